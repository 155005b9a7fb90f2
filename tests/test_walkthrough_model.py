"""The page of a whole GPT: its numbers against the model, its limits."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_walkthrough import block

import tinygrad_mha as tg
from tinygrad_mha.decoding.sampling import compute_probabilities
from tinygrad_mha.viz.page import document, story

TEXT = "to be or"
TOKENIZER = tg.data.CharTokenizer.of("to be or not </script>&")
KINDS = {
    "GPT-2": {},
    "GPT-1": {"norm_first": False},
    "Llama": {"norm": "rms", "activation": "swiglu", "position": "rotary", "bias": False, "n_kv_head": 1},
}


def make_model(attention=None, **options):
    sizes = {"vocab_size": TOKENIZER.vocab_size, "block_size": 13, "n_layer": 3, "n_head": 2, "n_embd": 12}
    model = tg.nn.GPT(tg.nn.GPTConfig(**sizes | options), seed=1, attention=attention).astype(np.float64)
    for i, parameter in enumerate(model.parameters()):  # larger than at the start, so that predictions differ
        parameter.data = parameter.data + 0.3 * np.random.default_rng(i).standard_normal(parameter.shape)
    return model


def open_matrix(page, name, what="values"):
    data = block(page, "data")
    packed = data["matrices"][name]
    if "room" in packed:
        packed = block(page, f"room-{packed['room']}")["matrices"][packed["name"]]
    (text,) = packed[what].values()
    return np.frombuffer(document.base64.b64decode(text), "<" + next(iter(packed[what]))).reshape(
        packed["rows"], packed["columns"]
    )


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_the_page_of_a_model_shows_its_own_stream_gradients_and_predictions(options):
    model = make_model(**options)
    page = tg.walkthrough(model, TEXT, tokenizer=TOKENIZER)
    data, ids = block(page, "data"), TOKENIZER.encode(TEXT)
    assert data["tokens"] == list(TEXT)
    assert data["ids"] == ids.tolist()
    logits, trace = model.eval()(ids, trace=True)
    last = [steps[-1]["name"] for steps in data["blocks"]]
    for name, hidden in zip(["embedding", *last], trace.hidden, strict=True):
        np.testing.assert_allclose(open_matrix(page, name), hidden.numpy(), rtol=1e-12)
    loss = tg.ops.cross_entropy(logits[:-1], ids[1:])
    gradients = tg.grad(loss, trace.hidden)
    for name, gradient in zip(["embedding", *last], gradients, strict=True):
        np.testing.assert_allclose(open_matrix(page, name, "gradient"), gradient.numpy(), rtol=1e-9, atol=1e-14)
    p = tg.ops.softmax(logits.numpy())
    lens = data["lenses"][last[-1]]
    assert [row[0] for row in lens["ids"]] == p.argmax(axis=-1).tolist()
    right = p[np.arange(7), ids[1:]]
    np.testing.assert_allclose(lens["answer_p"], right, rtol=1e-4)
    assert lens["answer_rank"] == [1 + int((row > q).sum()) for row, q in zip(p, right, strict=False)]
    for i, room in enumerate(block(page, f"room-{i}") for i in range(3)):
        assert room["facts"]["layer"] == i
        assert len(room["walks"]) == 2


def test_probabilities_and_draws_are_those_of_generate():
    model = make_model()
    data, ids = block(tg.walkthrough(model, TEXT, tokenizer=TOKENIZER), "data"), TOKENIZER.encode(TEXT)
    sampling = data["sampling"]
    settings = iter(sampling["settings"])
    logits = model.eval()(ids).numpy()[-1]
    for temperature in sampling["temperatures"]:
        for k in sampling["top_k"]:
            for top_p in sampling["top_p"]:
                setting = next(settings)
                p = compute_probabilities(logits, temperature, k, top_p)
                np.testing.assert_allclose(setting["p"], p[sampling["ids"]], rtol=1e-4)
                drawn = tg.generate(model, ids, 1, temperature, k, top_p, seed=3, eos=None)[0, -1]
                assert setting["draws"][3] == drawn


def test_each_decoding_step_counts_what_it_computes_keeps_and_saves():
    steps = block(tg.walkthrough(make_model(), TEXT, tokenizer=TOKENIZER), "data")["decode"]
    kept = 3 * 2 * 12
    assert [step["kept"] for step in steps] == [kept] * 8
    assert [step["read"] for step in steps] == [kept * t for t in range(8)]
    assert all(step["agrees"] and step["thrown"] == step["computed"] - kept - step["logits"] for step in steps)
    assert steps[0]["products"] == steps[0]["products_without"]
    assert steps[7]["products"] < 0.2 * steps[7]["products_without"]


class Own(tg.nn.MultiHeadAttention):
    """An attention of a person's own, without a cache."""

    def __init__(self, config, rng):
        super().__init__(config.n_embd, config.n_head, rng=rng)

    def forward(self, x, edit=None):
        return super().forward(x, causal=True, edit=edit)


def test_an_attention_of_ones_own_shows_its_own_numbers_and_no_cache():
    model = make_model(attention=Own)
    page = tg.walkthrough(model, [3, 1, 4, 1])
    data = block(page, "data")
    assert data["tokens"] == ["3", "1", "4", "1"]
    assert data["decode"] == []
    _, trace = model.eval()([3, 1, 4, 1], trace=True)
    room = block(page, "room-2")["matrices"]["S_2"]["values"]
    weights = np.frombuffer(document.base64.b64decode(room["f8"]), "<f8").reshape(4, 4)
    np.testing.assert_allclose(weights, trace.attention[2].weights.numpy()[1], rtol=1e-12)


def test_one_token_has_no_loss_and_diverged_weights_can_be_looked_at():
    data = block(tg.walkthrough(make_model(), [5]), "data")
    assert data["facts"]["loss_value"] is None
    assert all(m.get("gradient") is None for m in data["matrices"].values())
    model = make_model()
    model.ln_f.weight.data = np.full(12, np.nan)
    assert block(tg.walkthrough(model, [5, 3]), "data")["sampling"]["settings"] == []


def test_what_cannot_be_shown_is_refused_before_any_work(monkeypatch):
    model = make_model()
    monkeypatch.setattr(story, "run_model", None)
    with pytest.raises(TypeError, match="tokenizer="):
        tg.walkthrough(model, TEXT)
    with pytest.raises(ValueError, match="no tokens"):
        tg.walkthrough(model, "", tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="causal=False"):
        tg.walkthrough(model, [1], causal=False)
    with pytest.raises(ValueError, match="layer=0"):
        tg.walkthrough(model, [1], grad=np.ones((1, 12)))
    monkeypatch.setattr(story, "MOST_WEIGHTS", 3 * 2 * 25)
    with pytest.raises(ValueError, match="at most 5 tokens, or one layer with layer=0"):
        tg.walkthrough(model, [1, 2, 3, 4, 5, 6])
    with pytest.raises(ValueError, match="tokenizer is for a GPT"):
        tg.walkthrough(tg.nn.MultiHeadAttention(4, 2), np.ones((2, 4)), tokenizer=TOKENIZER)


def test_a_layer_can_be_shown_alone_with_the_text():
    page = tg.walkthrough(make_model(), TEXT, tokenizer=TOKENIZER, layer=1)
    assert block(page, "data")["tokens"] == list(TEXT)


def test_a_page_of_four_layers_four_heads_width_128_and_16_tokens_is_below_one_and_a_half_megabytes():
    config = tg.nn.GPTConfig(vocab_size=65, block_size=16, n_layer=4, n_head=4, n_embd=128)
    page = tg.walkthrough(tg.nn.GPT(config), np.arange(16))
    assert len(page.html) < 1_500_000
    data = block(page, "data")
    assert data["matrices"]["h.1.sum_1"]["columns"] == 128  # the residual stream is whole


def test_every_word_of_the_page_of_a_model_is_in_both_languages():
    words = json.loads(document.read_page_file("model_words.json"))
    assert list(words["en"]) == list(words["zh"])
    for key, english in words["en"].items():
        fill = document.re.compile(r"\{(\w+)\}")
        assert set(fill.findall(english)) == set(fill.findall(words["zh"][key])), key
