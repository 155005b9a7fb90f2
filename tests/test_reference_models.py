"""Real models and recorded runs of others: the same numbers, gradients and answers."""

import base64
import itertools
import json

import numpy as np
import pytest
from recorded_data import read_packed

from tinygrad_mha import nn, no_grad
from tinygrad_mha.files import load_arrays

LOSS = {"tiny-gpt2-random": 9.749089452520085, "tiny-gpt1-random": 8.903727306221613}
NORM = {"tiny-gpt2-random": 12.97608389904365, "tiny-gpt1-random": 26.477404668861748}


def close(a, b, tolerance):
    np.testing.assert_allclose(a.data if hasattr(a, "backward") else a, b, rtol=0, atol=tolerance)


def greedy(model, prompts, n, cached=True):
    """The prompts and `n` tokens by argmax; the last one is not fed back."""
    idx = new = np.asarray(prompts)
    cache = nn.KVCache(model.config.n_layer) if cached else None
    with no_grad():
        for _ in range(n):
            logits = model(new if cached else idx, cache=cache, last_only=True)
            new = logits.data.argmax(-1)
            idx = np.concatenate([idx, new], axis=1)
    return idx


@pytest.fixture(scope="module", params=["tiny-gpt2-random", "tiny-gpt1-random"])
def tiny(request, data):
    """A random GPT-2 and a random GPT-1 in float64, and what transformers and float64 autograd made of them."""
    folder = data / request.param
    model = nn.GPT.from_pretrained(folder, dtype=np.float64)
    return request.param, model, np.load(folder / "expected_float64.npz")


def test_logits_hidden_states_and_attention_weights_equal_those_of_transformers(tiny):
    name, model, expected = tiny
    ids = expected["ids"]
    logits, trace = model(ids, trace=True)
    close(logits, expected["logits"], 1e-12)
    close(model(ids), expected["logits"], 1e-12)
    for i in range(3):
        close(trace.attention[i].weights, expected[f"attention.{i}"], 1e-12)
        close(trace.hidden[i], expected[f"hidden.{i}"], 1e-12)
    close(trace.final, expected["hidden.3"], 1e-12)
    assert hasattr(model, "ln_f") == (name == "tiny-gpt2-random")


def test_the_loss_and_the_gradient_of_every_parameter_equal_those_of_autograd_in_float64(tiny):
    name, model, expected = tiny
    ids = expected["ids"]
    model.zero_grad()
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward(leaves_only=True)
    assert loss.item() == pytest.approx(LOSS[name], abs=1e-12)
    theirs = {key: key.removeprefix("grad.transformer.") for key in expected.files if key.startswith("grad.")}
    ours = {n.replace("tokens_embed", "wte").replace("positions_embed", "wpe"): key for key, n in theirs.items()}
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(ours)
    for parameter, key in ours.items():
        close(parameters[parameter].grad, expected[key], 1e-12)
    assert not parameters["wpe.weight"].grad[10:].any()
    norm = np.sqrt(sum((p.grad**2).sum() for p in parameters.values()))
    assert norm == pytest.approx(NORM[name], abs=1e-11)


def test_gradients_through_the_visible_steps_are_the_same(tiny):
    _, model, expected = tiny
    model.zero_grad()
    logits, _ = model(expected["ids"], trace=True)
    g = np.random.default_rng(0).standard_normal(logits.shape)
    logits.backward(g)
    visible = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(expected["ids"]).backward(g)
    for a, b in zip(visible, model.parameters(), strict=True):
        close(a, b.grad, 1e-11)


@pytest.mark.parametrize("cached", [True, False])
def test_greedy_tokens_equal_those_of_transformers(tiny, cached):
    _, model, expected = tiny
    np.testing.assert_array_equal(greedy(model, expected["greedy"][:, :11], 13, cached), expected["greedy"])


def test_a_cached_reading_gives_the_logits_of_transformers(tiny):
    _, model, expected = tiny
    cache = nn.KVCache(3)
    with no_grad():
        chunks = [model(part, cache=cache).data for part in np.split(expected["ids"], [4, 5], axis=1)]
    close(np.concatenate(chunks, axis=1), expected["logits"], 1e-12)


def test_float32_stays_close_to_float64(tiny):
    _, model, expected = tiny
    single = nn.GPT(model.config).eval()
    single.load_state_dict(model.state_dict())
    logits = single(expected["ids"])
    assert logits.dtype == np.float32
    close(logits, expected["logits"], 2e-4)


def test_a_folder_of_transformers_is_written_back_with_the_same_arrays(tiny, data, tmp_path):
    name, model, _ = tiny
    model.save_pretrained(tmp_path)
    theirs, ours = (load_arrays(folder / "model.safetensors") for folder in (data / name, tmp_path))
    assert set(ours) == set(theirs)
    for key, array in theirs.items():
        np.testing.assert_array_equal(ours[key], array)


# --------------------------------------------------------------------------------------------------------------------
# Models that were trained to do something


def test_gpt_nano_sorts_all_729_prompts(data):
    model = nn.GPT.from_pretrained(data / "hf-gpt2" / "gpt-nano-sort")
    prompts = np.array(list(itertools.product(range(3), repeat=6)))
    for cached in (True, False):
        np.testing.assert_array_equal(greedy(model, prompts, 6, cached)[:, 6:], np.sort(prompts, axis=1))


def test_gpt_nano_computes_the_recorded_partial_results_layer_by_layer(data):
    record = json.loads(read_packed("gpt-nano-sort/gpt-nano-sort-t0-partials.json"))
    expected = {
        name: np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(entry["shape"])
        for name, entry in record.items()
        if name != "config"
    }
    model = nn.GPT.from_pretrained(data / "hf-gpt2" / "gpt-nano-sort")
    idx = expected["idx"].astype(int)
    logits, trace = model(idx, trace=True)
    block, steps = model.h[0], trace.attention[0]
    x = trace.hidden[0]
    ln1 = block.ln_1(x)
    y_projected = block.attn.c_proj(steps.concat)
    middle = x + y_projected
    ln2 = block.ln_2(middle)
    hidden = block.mlp.c_fc(ln2)
    ours = {
        "tok_emb": model.wte(idx),
        "pos_emb": model.wpe(np.arange(11)[None]),
        "x": x,
        "ln1": ln1,
        "qkv": block.attn.c_attn(ln1),
        "q": steps.q,
        "k": steps.k,
        "v": steps.v,
        "attSm": steps.weights,
        "y": steps.concat,
        "yProj": y_projected,
        "attnResid": middle,
        "ln2": ln2,
        "fc": hidden,
        "gelu": hidden.gelu(tanh=True),
        "mlp": block.mlp(ln2),
        "mlpResid": middle + block.mlp(ln2),
        "block0": trace.hidden[1],
        "block1": trace.hidden[2],
        "block2": trace.hidden[3],
        "ln_f": trace.final,
        "lm_head": logits,
        "probs": logits.softmax(),
    }
    assert set(ours) == set(expected) - {"idx", "att"}
    for name, value in ours.items():
        close(value, expected[name], 5e-6)
    hidden_scores = np.isneginf(expected["att"])
    np.testing.assert_array_equal(np.isneginf(steps.masked.data), hidden_scores)
    close(steps.masked.data[~hidden_scores], expected["att"][~hidden_scores], 5e-6)


def test_mingpt_adds_all_10000_pairs(data):
    model = nn.GPT.from_pretrained(data / "hf-gpt2" / "mingpt-adder-2digit")
    a, b = (n.ravel() for n in np.mgrid[:100, :100])
    answers = greedy(model, np.stack([a // 10, a % 10, b // 10, b % 10], axis=1), 3)[:, 4:]
    np.testing.assert_array_equal(answers @ [1, 10, 100], a + b)


def test_makemore_predicts_names_as_well_as_recorded(data):
    model = nn.GPT.from_pretrained(data / "hf-gpt2" / "makemore-names")
    names = (data / "corpora" / "names-test-1000.txt").read_text().split()
    idx = np.zeros((1000, 16), int)
    targets = np.full((1000, 16), -100)
    for row, name in enumerate(names):
        letters = [ord(c) - ord("a") + 1 for c in name]
        idx[row, 1 : len(letters) + 1] = letters
        targets[row, : len(letters) + 1] = [*letters, 0]
    assert (targets != -100).sum() == 7166
    with no_grad():
        assert model.loss(idx, targets).item() == pytest.approx(1.965246, abs=1e-5)


@pytest.mark.slow
def test_nanogpt_predicts_shakespeare_as_well_as_recorded(reference):
    model = nn.GPT.from_pretrained(reference / "hf-gpt2" / "nanogpt-shakespeare-char")
    text = (reference / "corpora" / "tinyshakespeare.txt").read_text()
    ids = np.searchsorted(sorted(set(text)), list(text))
    validation = ids[int(0.9 * len(ids)) :]
    n = 1742 * 64
    x, y = validation[:n].reshape(1742, 64), validation[1 : n + 1].reshape(1742, 64)
    with no_grad():
        total = sum(model.loss(x[i : i + 134], y[i : i + 134], reduction="sum").item() for i in range(0, 1742, 134))
    assert total / n == pytest.approx(1.897631, abs=1e-5)


@pytest.mark.parametrize("example", ["ex0", "ex1"])
def test_scale_mask_and_softmax_of_gpt2_are_as_recorded(example):
    outputs = json.loads(read_packed(f"gpt2-124m-outputs/{example}.json"))["outputs"]

    def recorded(kind):
        rows = [outputs[f"block_{b}_attn_head_{h}_{kind}"]["data"] for b in range(12) for h in range(12)]
        return np.array(rows, dtype=float).reshape(12, 12, 6, 6)

    products = recorded("attn")
    # Queries that are the products themselves and keys that are the unit vectors have exactly these products.
    unit = np.eye(6)
    _, trace = nn.attention(products, unit, unit, allow=nn.causal(6), scale=64**-0.5, trace=True)
    np.testing.assert_array_equal(trace.scores.data, recorded("attn_scaled"))
    masked = recorded("attn_masked")
    np.testing.assert_array_equal(np.isneginf(trace.masked.data), np.isnan(masked))
    np.testing.assert_array_equal(trace.masked.data[~np.isnan(masked)], masked[~np.isnan(masked)])
    close(trace.weights, recorded("attn_softmax"), 1e-6)
    close(trace.heads, recorded("attn_softmax"), 1e-6)
