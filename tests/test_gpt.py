"""A GPT is what its configuration says, keeps GPT-2's names, and opens and writes Hugging Face folders."""

import copy
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tinygrad_mha import Tensor, gradcheck, nn, ops
from tinygrad_mha.engine import toposort
from tinygrad_mha.files import CheckpointError, load_arrays, save_arrays
from tinygrad_mha.files.huggingface import FORMATS
from tinygrad_mha.nn.layers import ACTIVATIONS

V, T = 13, 7
SIZES = {"vocab_size": V, "block_size": 11, "n_layer": 2, "n_head": 3, "n_embd": 12}
IDS = np.random.default_rng(0).integers(0, V, (2, T))


def gpt(seed=0, **settings):
    return nn.GPT(nn.GPTConfig(**{**SIZES, **settings}), seed=seed)


def lively(seed=0, **settings):
    """In float64, with weights large enough for every mistake to show."""
    model = gpt(**settings).astype(np.float64).eval()
    rng = np.random.default_rng(seed)
    for p in model.parameters():
        p.assign_(rng.standard_normal(p.shape) * 0.4)
    return model


def close(a, b, tolerance=1e-12):
    np.testing.assert_allclose(a.data if isinstance(a, Tensor) else a, b, rtol=0, atol=tolerance)


BLOCK = [
    "ln_1.weight",
    "ln_1.bias",
    "attn.c_attn.weight",
    "attn.c_attn.bias",
    "attn.c_proj.weight",
    "attn.c_proj.bias",
    "ln_2.weight",
    "ln_2.bias",
    "mlp.c_fc.weight",
    "mlp.c_fc.bias",
    "mlp.c_proj.weight",
    "mlp.c_proj.bias",
]


# --------------------------------------------------------------------------------------------------------------------
# Parameters


def test_parameters_have_the_names_and_shapes_of_gpt2():
    shapes = {name: p.shape for name, p in gpt().named_parameters()}
    blocks = [f"h.{i}.{name}" for i in range(2) for name in BLOCK]
    assert list(shapes) == ["wte.weight", "wpe.weight", *blocks, "ln_f.weight", "ln_f.bias"]
    assert shapes["h.1.attn.c_attn.weight"] == (12, 36)
    assert shapes["h.1.mlp.c_proj.weight"] == (48, 12)
    assert shapes["wpe.weight"] == (11, 12)


def test_settings_decide_which_parameters_there_are():
    def names(**settings):
        return {name for name, _ in gpt(**settings).named_parameters()}

    full = names()
    assert full - names(norm_first=False) == {"ln_f.weight", "ln_f.bias"}
    assert full - names(position="rotary") == {"wpe.weight"}
    assert full - names(bias=False) == {name for name in full if name.endswith("bias")}
    assert names(tie_weights=False) - full == {"lm_head.weight"}
    assert gpt(n_inner=5).h[0].mlp.c_fc.weight.shape == (12, 5)
    assert gpt(n_kv_head=1).h[0].attn.c_attn.weight.shape == (12, 12 + 2 * 4)
    norms = [m.eps for _, m in gpt(eps=0.5).named_modules() if isinstance(m, nn.LayerNorm)]
    assert norms == [0.5] * 5


def test_a_tied_head_is_the_embedding_itself_and_stays_so():
    model = gpt()
    assert model.lm_head.weight is model.wte.weight
    assert model.count() == gpt(tie_weights=False).count() - V * 12
    twin = copy.deepcopy(model)
    twin.load_state_dict(gpt(seed=1).state_dict())
    twin.astype(np.float64)
    assert twin.lm_head.weight is twin.wte.weight
    assert twin.wte.weight is not model.wte.weight


def test_the_gradient_of_a_tied_embedding_is_the_sum_of_both_uses():
    tied, untied = lively(), lively(tie_weights=False)
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.wte.weight.data})
    for model in (tied, untied):
        model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    close(tied.wte.weight.grad, untied.wte.weight.grad + untied.lm_head.weight.grad)


def test_initial_weights_are_those_of_gpt2():
    model = gpt(n_embd=96, n_head=3, n_layer=2, vocab_size=500)
    block = model.h[1]
    for p in (model.wte.weight, block.attn.c_attn.weight, block.mlp.c_fc.weight):
        assert p.data.std() == pytest.approx(0.02, rel=0.05)
    assert model.wpe.weight.data.std() == pytest.approx(0.02, rel=0.1)
    for p in (block.attn.c_proj.weight, block.mlp.c_proj.weight):  # added to the stream, 2 n_layer times
        assert p.data.std() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.data.any()
        elif ".ln_" in name or name.startswith("ln_"):
            assert (p.data == 1).all()
        else:
            assert abs(p.data.mean()) < 0.002


def test_an_untrained_model_guesses_evenly():
    assert gpt().loss(IDS[:, :-1], IDS[:, 1:]).item() == pytest.approx(math.log(V), abs=0.05)


def test_seeds_decide_weights_and_dropout_apart_from_each_other_and_from_numpy():
    before = np.random.get_state()[1].copy()
    a, b, dropped, other = gpt(), gpt(), gpt(dropout=0.5), gpt(seed=42)
    for x, y, z in zip(a.parameters(), b.parameters(), dropped.parameters(), strict=True):
        np.testing.assert_array_equal(x.data, y.data)
        np.testing.assert_array_equal(x.data, z.data)
    assert (a.wte.weight.data != other.wte.weight.data).any()
    assert (gpt(seed=None).wte.weight.data != gpt(seed=None).wte.weight.data).any()
    close(dropped(IDS), gpt(dropout=0.5)(IDS).data, 0)
    assert np.abs(dropped(IDS).data - gpt(dropout=0.5)(IDS).data).max() > 0  # the second draw differs from the first
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_all_dropout_draws_from_one_generator_whose_state_can_be_kept():
    model = gpt(dropout=0.5)
    assert list(model.generators()) == ["drop.rng"]
    state = model.drop.rng.bit_generator.state
    first = model(IDS).data
    model.drop.rng.bit_generator.state = state
    close(model(IDS), first, 0)


def test_the_module_path_of_a_node_is_that_of_the_parameters():
    model = gpt()
    node = model(IDS).node
    assert [(s.name, s.class_name) for s in node.scope] == [("", "GPT"), ("lm_head", "LMHead")]
    _, trace = model(IDS, trace=True)
    path = [(s.name, s.class_name) for s in trace.attention[1].weights.node.scope]
    assert path == [("", "GPT"), ("h.1", "Block"), ("attn", "CausalSelfAttention")]


# --------------------------------------------------------------------------------------------------------------------
# What it computes


def norm(x, layer):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + layer.eps) * layer.weight.data + layer.bias.data


def by_hand(model, idx):
    """The logits of one sequence in plain NumPy, from the formulas."""
    config = model.config
    x = model.wte.weight.data[idx] + model.wpe.weight.data[: len(idx)]
    for block in model.h:

        def attn(x, a=block.attn):
            q, k, v = np.split(x @ a.c_attn.weight.data + a.c_attn.bias.data, 3, axis=-1)
            heads = []
            for i in range(config.n_head):
                at = slice(i * 4, (i + 1) * 4)
                scores = np.where(np.tri(len(x), dtype=bool), q[:, at] @ k[:, at].T / 2.0, -np.inf)
                e = np.exp(scores - scores.max(-1, keepdims=True))
                heads.append(e / e.sum(-1, keepdims=True) @ v[:, at])
            return np.concatenate(heads, -1) @ a.c_proj.weight.data + a.c_proj.bias.data

        def mlp(x, m=block.mlp):
            hidden = ACTIVATIONS[config.activation](Tensor(x @ m.c_fc.weight.data + m.c_fc.bias.data)).data
            return hidden @ m.c_proj.weight.data + m.c_proj.bias.data

        if config.norm_first:
            x = x + attn(norm(x, block.ln_1))
            x = x + mlp(norm(x, block.ln_2))
        else:
            x = norm(x + attn(x), block.ln_1)
            x = norm(x + mlp(x), block.ln_2)
    x = norm(x, model.ln_f) if config.norm_first else x
    return x @ model.lm_head.weight.data.T


@pytest.mark.parametrize("settings", [{}, {"norm_first": False}, {"tie_weights": False, "activation": "relu"}])
def test_logits_are_those_of_the_formulas(settings):
    model = lively(**settings)
    logits = model(IDS)
    for row, idx in enumerate(IDS):
        close(logits[row], by_hand(model, idx))


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rotary", "alibi", "relative", "none"])
def test_logits_depend_on_the_past_only_and_on_its_order(position):
    model = lively(position=position, n_kv_head=1)
    logits = model(IDS).data
    for n in range(1, T):
        changed = IDS.copy()
        changed[:, n:] = (changed[:, n:] + 1) % V
        close(model(changed).data[:, :n], logits[:, :n])
    swapped = IDS[:1, [1, 0, *range(2, T)]]
    order_seen = np.abs(model(swapped).data[0, -1] - logits[0, -1]).max()
    if position == "none":  # two layers of causal attention still see order; one sees a set
        one = lively(position=position, n_layer=1)
        close(one(swapped).data[0, -1], one(IDS).data[0, -1])
    else:
        assert order_seen > 1e-3


LLAMA = {"norm": "rms", "activation": "swiglu", "position": "rotary", "bias": False, "n_kv_head": 1, "n_inner": 17}


def llama_by_hand(model, idx):
    """The logits of one sequence by the formulas of Llama (arXiv:2302.13971) in plain NumPy."""

    def rms(x, layer):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.eps) * layer.weight.data

    def rotated(x):
        pairs = (x[:, :2] + 1j * x[:, 2:]) * np.exp(1j * np.arange(len(x))[:, None] * [1, 500.0**-0.5])
        return np.concatenate([pairs.real, pairs.imag], -1)

    x = model.wte.weight.data[idx]
    for block in model.h:
        qkv = rms(x, block.ln_1) @ block.attn.c_attn.weight.data
        k, v = rotated(qkv[:, 12:16]), qkv[:, 16:]
        heads = []
        for i in range(3):
            scores = np.where(np.tri(len(x), dtype=bool), rotated(qkv[:, i * 4 : i * 4 + 4]) @ k.T / 2.0, -np.inf)
            e = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(e / e.sum(-1, keepdims=True) @ v)
        x = x + np.concatenate(heads, -1) @ block.attn.c_proj.weight.data
        normed = rms(x, block.ln_2)
        gate = normed @ block.mlp.c_gate.weight.data
        hidden = gate / (1 + np.exp(-gate)) * (normed @ block.mlp.c_fc.weight.data)
        x = x + hidden @ block.mlp.c_proj.weight.data
    return rms(x, model.ln_f) @ model.lm_head.weight.data.T


def test_llama_is_a_configuration():
    model = lively(**LLAMA, rope_base=500.0)
    logits = model(IDS)
    for row, idx in enumerate(IDS):
        close(logits[row], llama_by_hand(model, idx))
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert {type(m) for _, m in model.named_modules()} & {nn.LayerNorm, nn.RMSNorm} == {nn.RMSNorm}


def test_all_blocks_share_the_table_of_relative_positions():
    model = lively(position="relative")
    assert dict(model.named_parameters())["position.weight"].shape == (32, 3)
    assert all(block.attn.heads.position is model.position for block in model.h)
    assert not model.position.bidirectional
    twin = copy.deepcopy(model)
    assert twin.h[1].attn.heads.position is twin.position is not model.position
    twin.load_state_dict(lively(seed=1, position="relative").state_dict())
    assert np.abs(twin(IDS).data - model(IDS).data).max() > 1e-3


def test_sinusoidal_positions_are_added_to_the_tokens():
    model = lively(position="sinusoidal")
    _, trace = model(IDS, trace=True)
    close(trace.hidden[0], model.wte.weight.data[IDS] + nn.sinusoidal(np.arange(T), 12))


@pytest.mark.parametrize("settings", [{}, {"position": "alibi"}, {"position": "alibi", "n_kv_head": 1}, {"window": 2}])
def test_the_fused_path_equals_the_traced_one_in_value_and_gradient(settings):
    model = lively(**settings)
    key_allow = np.array([[True] * T, [False, False] + [True] * (T - 2)])
    g = np.random.default_rng(5).standard_normal((2, T, V))
    results = []
    for trace in (False, True):
        out = model(IDS, key_allow=key_allow, trace=trace)
        logits = out[0] if trace else out
        model.zero_grad()
        logits.backward(g)
        results.append([logits.data, *[p.grad for p in model.parameters()]])
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-11)


def test_attention_is_one_fused_node_without_trace_or_edit():
    names = [t.node.op.name for t in toposort([gpt()(IDS)]) if t.node is not None]
    assert names.count("self_attention") == 2
    assert names.count("layer_norm") == 5
    assert names.count("gelu") == 2
    assert "softmax" not in names
    _, trace = gpt()(IDS, trace=True)
    assert trace.attention[0].weights.node.op is ops.softmax


@pytest.mark.parametrize("n_kv_head", [None, 1])
@pytest.mark.parametrize("position", ["learned", "rotary", "alibi", "relative"])
def test_the_attention_of_a_gpt_can_be_computed_head_by_head(n_kv_head, position, rng):
    attn = lively(n_kv_head=n_kv_head, position=position).h[0].attn
    x = rng.standard_normal((T, 12))
    y = attn.per_head(x)
    close(y, attn(x).data)
    names, stack = {}, [y]
    while stack:
        t = stack.pop()
        names[t.name] = t
        stack.extend(i for i in (t.node.inputs if t.node else ()) if isinstance(i, Tensor))
    assert {"W_Q1", "W_Q3", "W_K1", "b_V1", "S_2", "H_3", "Concat", "W_O", "Y"} <= set(names)
    assert names["W_V1"].node.inputs[0] is attn.c_attn.weight
    start = 12 + 4 * (n_kv_head or 3)
    np.testing.assert_array_equal(names["W_V1"].data, attn.c_attn.weight.data[:, start : start + 4])


def test_the_attention_of_a_gpt_takes_no_memory():
    attn = gpt().h[0].attn
    for call in (attn, attn.per_head):
        with pytest.raises(TypeError, match="memory"):
            call(np.ones((T, 12)), memory=np.ones((3, 12)))


def test_every_parameter_receives_a_gradient():
    for settings in ({}, {"norm_first": False, "position": "rotary"}, {"tie_weights": False, "n_kv_head": 1}, LLAMA):
        model = gpt(**settings)
        model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            if not name.endswith(
                "c_attn.bias"
            ):  # of which the key part has gradient 0: it shifts a whole row of scores
                assert p.grad.any(), name


def test_gradients_of_a_whole_gpt_pass_the_check():
    small = {"n_layer": 1, "n_embd": 6, "n_inner": 5, "vocab_size": 5, "block_size": 3}
    for settings in (
        {"norm_first": False},
        {"position": "rotary", "n_kv_head": 1},
        {"norm": "rms", "activation": "swiglu", "position": nn.Relative(4, 4), "bias": False},
        {"norm": "rms", "norm_first": False, "activation": "swiglu"},
    ):
        model = gpt(**small, **settings)
        report = gradcheck(model, IDS[:, :3] % 5)
        assert "h.0.attn.c_attn.weight" in str(report)


def test_float32_stays_float32_in_logits_traces_and_gradients():
    for position in ("learned", "sinusoidal", "rotary", "alibi", "relative"):
        model = gpt(position=position, dropout=0.1, n_embd=12)
        logits, trace = model(IDS, trace=True)
        ops.cross_entropy(logits, IDS).backward()
        assert {t.dtype for t in (logits, trace.final, *trace.hidden, *trace.attention[0])} == {np.dtype(np.float32)}
        assert {p.grad.dtype for p in model.parameters()} == {np.dtype(np.float32)}


def test_dropout_differs_between_train_and_eval_only():
    model = gpt(dropout=0.3)
    plain = gpt()
    close(model.eval()(IDS), plain(IDS).data, 0)
    close(plain.eval()(IDS), plain.train()(IDS).data, 0)
    assert np.abs(model.train()(IDS).data - plain(IDS).data).max() > 1e-4
    nothing_left = gpt(dropout=1.0)
    assert not nothing_left(IDS).data.any()  # bias 0, nothing of the tokens passes


def test_dropout_acts_on_the_embedding_the_weights_and_both_parts_of_every_block():
    nodes = [t.node for t in toposort([gpt(dropout=0.3)(IDS)]) if t.node is not None]
    assert sum(node.op is ops.dropout for node in nodes) == 1 + 2 * 2
    keeps = [node.inputs[3] for node in nodes if node.op is ops.self_attention]
    assert [keep.shape for keep in keeps] == [(2, 3, T, T)] * 2


def test_loss_is_the_cross_entropy_of_the_targets_as_they_are():
    model = lively()
    targets = IDS[:, ::-1]
    logits = model(IDS).data
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    close(model.loss(IDS, targets), each.mean())
    close(model.loss(IDS, targets, reduction="sum"), each.sum(), 1e-11)
    some = np.where(np.arange(T) < 3, targets, -1)
    close(model.loss(IDS.tolist(), some.tolist(), ignore_index=-1), each[:, :3].mean())


def test_last_only_gives_the_last_logits():
    model = lively()
    close(model(IDS, last_only=True), model(IDS).data[:, -1:])
    assert model(IDS[0], last_only=True).shape == (1, V)


def test_ids_may_be_lists_tensors_and_a_single_sequence():
    model = lively()
    close(model(IDS.tolist()), model(IDS).data, 0)
    close(model(Tensor(IDS)), model(IDS).data, 0)
    close(model(IDS[0]), model(IDS).data[0])


def test_the_trace_holds_the_residual_stream_after_every_block():
    for settings in ({}, {"norm_first": False}):
        model = lively(**settings)
        logits, trace = model(IDS, trace=True)
        assert len(trace.hidden) == 3
        assert len(trace.attention) == 2
        close(trace.hidden[0], model.wte.weight.data[IDS] + model.wpe.weight.data[:T])
        for i, block in enumerate(model.h):
            close(trace.hidden[i + 1], block(trace.hidden[i]).data)
        close(trace.final, model.ln_f(trace.hidden[2]).data if not settings else trace.hidden[2].data)
        close(logits, trace.final.data @ model.wte.weight.data.T)
        logits.backward(np.ones(logits.shape))
        assert all(t.grad is not None for t in (*trace.hidden, *trace.attention[1]))


def test_a_head_of_one_block_can_be_switched_off():
    model = lively()
    off = np.array([1.0, 0.0, 1.0])[:, None, None]
    without = model(IDS, edit=lambda name, t: t * off if name == "h.1.heads" else t).data
    model.h[1].attn.c_proj.weight.data[4:8] = 0
    close(without, model(IDS).data)


# --------------------------------------------------------------------------------------------------------------------
# What it refuses


def test_more_tokens_than_the_context_holds_are_refused_with_both_numbers():
    model = gpt()
    model(np.zeros((1, 11), int))
    with pytest.raises(ValueError, match="12 tokens are more than the context holds: block_size is 11"):
        model(np.zeros((1, 12), int))
    with pytest.raises(ValueError, match="block_size is 11"):
        gpt(position="rotary", n_head=3)(np.zeros((1, 12), int))


@pytest.mark.parametrize(
    ("idx", "error", "message"),
    [
        ([[1.0, 2.0]], TypeError, "idx must be integers, got float64"),
        ([[True]], TypeError, "idx must be integers, got bool"),
        ([["a"]], TypeError, "idx must be integers"),
        ([[0, V]], IndexError, rf"\[0, 1\] is {V}, expected 0 to {V - 1}"),
        ([[-1]], IndexError, "is -1, expected 0"),
        ([], ValueError, r"at least one token, got shape \(0,\)"),
        ([[], []], ValueError, r"at least one token, got shape \(2, 0\)"),
        (3, ValueError, r"idx must be \(T,\) or \(B, T\)"),
        (np.zeros((1, 2, 3), int), ValueError, r"idx must be \(T,\) or \(B, T\)"),
    ],
)
def test_invalid_ids_are_refused(idx, error, message):
    with pytest.raises(error, match=message):
        gpt()(idx)


def test_positions_and_targets_that_do_not_fit_are_refused():
    model = gpt()
    with pytest.raises(ValueError, match=r"positions must have the shape \(2, 7\) or \(7,\), got \(6,\)"):
        model(IDS, positions=np.arange(6))
    with pytest.raises(IndexError, match="is 11, expected 0 to 10"):
        model(IDS, positions=np.arange(T) + 5)
    with pytest.raises(ValueError, match="targets"):
        model.loss(IDS, IDS[:, 1:])
    with pytest.raises(ValueError, match="key_allow has shape"):
        model(IDS, key_allow=np.ones((2, T + 1), bool))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"n_embd": 13}, "n_embd must be a multiple of n_head, got 13 and 3"),
        ({"n_layer": 0}, "n_layer must be an integer of at least 1, got 0"),
        ({"vocab_size": -5}, "vocab_size"),
        ({"block_size": 8.0}, "block_size must be an integer"),
        ({"n_head": True}, "n_head"),
        ({"n_inner": 0}, "n_inner"),
        ({"dropout": 1.5}, "dropout must be a probability"),
        ({"dropout": None}, "dropout must be a probability"),
        ({"bias": "yes"}, "bias must be True or False, got 'yes'"),
        ({"norm": "both"}, "norm must be one of 'layer', 'rms', got 'both'"),
        ({"norm": "pre"}, "norm is 'layer' or 'rms'; for norm='pre' pass norm_first=True"),
        ({"norm": "post"}, "for norm='post' pass norm_first=False"),
        ({"norm_first": "yes"}, "norm_first must be True or False"),
        ({"rope_base": -1.0}, "rope_base must be a positive number"),
        ({"activation": "gelu_new"}, "activation must be one of"),
        ({"position": ["rotary"]}, "position must be one of"),
        ({"n_kv_head": 2}, "n_head must be a multiple of n_kv_head, got 3 and 2"),
        ({"position": "rotary", "n_embd": 9}, "d_k must be even, got 3"),
        ({"eps": 0}, "eps must be a positive number"),
        ({"eps": "small"}, "eps must be a positive number"),
    ],
)
def test_an_invalid_configuration_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        nn.GPTConfig(**{**SIZES, **setting})


def test_a_configuration_takes_numpy_numbers_and_survives_a_dict_and_json():
    config = nn.GPTConfig(**{**SIZES, "n_layer": np.int64(2), "norm_first": False})
    assert nn.GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for position in (nn.Rotary(500.0), nn.Relative(8, 16)):
        config = nn.GPTConfig(**SIZES, position=position, norm="rms", activation="swiglu", rope_base=500.0)
        again = nn.GPTConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        assert again == config
        assert again.position == position


def test_unknown_and_missing_keys_of_a_configuration_are_all_named():
    with pytest.raises(TypeError, match="n_heads"):
        nn.GPTConfig(**SIZES, n_heads=3)
    with pytest.raises(
        ValueError, match=r"unknown keys \['n_heads', 'width'\], missing keys \['n_embd'\]; known are voc"
    ):
        nn.GPTConfig.from_dict({"n_heads": 3, "width": 2, **{k: v for k, v in SIZES.items() if k != "n_embd"}})


# --------------------------------------------------------------------------------------------------------------------
# Hugging Face folders


def saved(tmp_path, **settings):
    model = lively(**settings)
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in {**config, **changes}.items() if v != "delete"}
    (folder / "config.json").write_text(json.dumps(config))


def edit_arrays(folder, change):
    arrays = load_arrays(folder / "model.safetensors")
    save_arrays(folder / "model.safetensors", change(arrays) or arrays, {"format": "pt"})


FORMS = [
    {},
    {"norm_first": False},
    {"tie_weights": False, "activation": "gelu", "n_inner": 17, "eps": 1e-3, "dropout": 0.25},
    {"norm_first": False, "tie_weights": False, "activation": "relu"},
]


@pytest.mark.parametrize("settings", FORMS)
def test_a_folder_that_was_saved_opens_with_the_same_settings_and_numbers(tmp_path, settings):
    model, folder = saved(tmp_path, **settings)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    again = nn.GPT.from_pretrained(folder)
    expected = {**model.config.to_dict(), "n_inner": model.config.n_inner}
    assert again.config.to_dict() == expected
    assert again.training is False
    assert again.wte.weight.dtype == np.float64
    close(again(IDS), model(IDS).data, 0)
    assert nn.GPT.from_pretrained(folder, dtype=np.float32)(IDS).dtype == np.float32


def test_float32_is_what_a_float32_or_half_precision_file_opens_as(tmp_path):
    model, folder = saved(tmp_path)
    edit_arrays(folder, lambda arrays: {name: a.astype(np.float16) for name, a in arrays.items()})
    half = nn.GPT.from_pretrained(folder)
    assert half.wte.weight.dtype == np.float32
    np.testing.assert_array_equal(half.wpe.weight.data, model.wpe.weight.data.astype(np.float16))
    close(nn.GPT.from_pretrained(folder, dtype=np.float64)(IDS), half.astype(np.float64)(IDS).data, 0)


def test_float64_is_what_a_file_with_one_float64_array_opens_as(tmp_path):
    _, folder = saved(tmp_path)
    edit_arrays(
        folder, lambda arrays: {n: a.astype(np.float64 if "wpe" in n else np.float32) for n, a in arrays.items()}
    )
    assert {p.dtype for p in nn.GPT.from_pretrained(folder).parameters()} == {np.dtype(np.float64)}


def test_a_folder_is_made_with_its_parents_and_says_its_dtype_and_the_format_of_its_arrays(tmp_path):
    folder = tmp_path / "a" / "b"
    for dtype in (np.float32, np.float64):
        gpt().astype(dtype).save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["dtype"] == np.dtype(dtype).name
    data = (folder / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"format": "pt"}  # transformers refuses a file without it


def test_sizes_that_config_json_leaves_out_are_those_of_transformers():
    for kind, block_size, vocab_size in (("gpt2", 1024, 50257), ("openai-gpt", 512, 40478), ("llama", 2048, 32000)):
        settings = FORMATS[kind].read_config(Path("config.json"), {})
        assert (settings["block_size"], settings["vocab_size"]) == (block_size, vocab_size)
    assert FORMATS["gpt2"].read_config(Path("config.json"), {})["n_layer"] == 12


def test_a_bfloat16_folder_opens(tmp_path):
    model, folder = saved(tmp_path)
    arrays = load_arrays(folder / "model.safetensors")
    header, data = {}, b""
    for name, array in arrays.items():
        upper = (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [len(data), len(data) + len(upper)]}
        data += upper
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    opened = nn.GPT.from_pretrained(folder)
    np.testing.assert_allclose(opened.wpe.weight.data, model.wpe.weight.data, rtol=2**-7)


def without_prefix(arrays):
    return {name.removeprefix("transformer."): a for name, a in arrays.items()}


def test_names_without_the_prefix_and_with_mask_buffers_open(tmp_path):
    model, folder = saved(tmp_path)

    def as_on_the_hub(arrays):
        arrays = without_prefix(arrays)
        for i in range(2):
            arrays[f"h.{i}.attn.bias"] = np.tri(11, dtype=np.float32)[None, None]
            arrays[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
        return arrays

    edit_arrays(folder, as_on_the_hub)
    opened = nn.GPT.from_pretrained(folder)
    assert opened.h[0].attn.c_attn.bias.data.any()  # whose name ends like that of a buffer
    close(opened(IDS), model(IDS).data)


def test_a_tied_head_that_is_stored_too_opens_if_it_is_equal_and_is_refused_if_not(tmp_path):
    model, folder = saved(tmp_path)
    edit_arrays(folder, lambda arrays: {**arrays, "lm_head.weight": model.wte.weight.data})
    opened = nn.GPT.from_pretrained(folder)
    assert opened.lm_head.weight is opened.wte.weight
    edit_arrays(folder, lambda arrays: {**arrays, "lm_head.weight": model.wte.weight.data + 1e-6})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is tied to wte\.weight, but differs"):
        nn.GPT.from_pretrained(folder)


def test_layers_without_a_bias_are_saved_with_zeros_and_compute_the_same(tmp_path):
    model, folder = saved(tmp_path, bias=False, tie_weights=False)
    arrays = load_arrays(folder / "model.safetensors")
    assert {name for name in arrays if name.endswith("bias")} == {
        f"transformer.{name}" for name in [*[f"h.{i}.{n}" for i in (0, 1) for n in BLOCK if "bias" in n], "ln_f.bias"]
    }
    opened = nn.GPT.from_pretrained(folder)
    assert opened.config.bias
    close(opened(IDS), model(IDS).data)


def test_settings_that_the_formats_cannot_hold_are_all_named_and_nothing_is_written(tmp_path):
    model = gpt(position="rotary", n_kv_head=1, norm_first=False, activation="gelu", n_inner=5)
    with pytest.raises(ValueError, match="no Hugging Face folder can hold this GPT") as caught:
        model.save_pretrained(tmp_path / "model")
    reason = next(line for line in str(caught.value).split("\n") if "openai-gpt: " in line)
    for part in ("position = 'rotary'", "n_kv_head = 1", "activation = 'gelu'", "n_inner = 5"):
        assert part in reason
    assert "Use save(path)" in str(caught.value)
    with pytest.raises(ValueError, match="no Hugging Face folder can hold this GPT") as caught:
        gpt(**{**LLAMA, "position": "alibi", "dropout": 0.5, "rope_base": 500.0}).save_pretrained(tmp_path / "model")
    reasons = str(caught.value).split("\n  ")
    assert reasons[-1] == "llama: dropout = 0.5, not 0.0; position = 'alibi', not 'rotary'"
    for part in ("norm = 'rms', not 'layer'", "activation = 'swiglu'", "rope_base = 500.0, not 1"):
        assert part in reasons[1]
    assert os.listdir(tmp_path) == []
    model.save(tmp_path / "rotary.safetensors")
    twin = gpt(seed=1, position="rotary", n_kv_head=1, norm_first=False, activation="gelu", n_inner=5)
    twin.load(tmp_path / "rotary.safetensors")
    close(twin(IDS), model(IDS).data, 0)


def test_n_kv_head_equal_to_n_head_is_saved_like_the_default(tmp_path):
    model, folder = saved(tmp_path, n_kv_head=3)
    close(nn.GPT.from_pretrained(folder)(IDS), model(IDS).data)


def test_a_failed_save_leaves_the_old_folder_as_it_was(tmp_path, monkeypatch):
    _, folder = saved(tmp_path)
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}

    def full_disk(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        gpt(n_layer=1).save_pretrained(folder)
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before


@pytest.mark.parametrize(
    ("kind", "word", "activation"),
    [
        ("gpt2", "gelu_new", "gelu_tanh"),
        ("gpt2", "gelu_pytorch_tanh", "gelu_tanh"),
        ("gpt2", "gelu", "gelu"),
        ("gpt2", "relu", "relu"),
        ("openai-gpt", "gelu", "gelu_tanh"),
        ("openai-gpt", "relu", "relu"),
    ],
)
def test_the_word_gelu_means_what_it_means_in_each_format(tmp_path, kind, word, activation):
    _, folder = saved(tmp_path, norm_first=kind == "gpt2")
    edit_config(folder, **{"activation_function" if kind == "gpt2" else "afn": word})
    assert nn.GPT.from_pretrained(folder).config.activation == activation


def test_what_config_json_leaves_out_has_the_default_of_transformers(tmp_path):
    _, folder = saved(tmp_path)
    for key in ("activation_function", "layer_norm_epsilon", "tie_word_embeddings", "n_inner", "resid_pdrop"):
        edit_config(folder, **{key: "delete"})
    edit_config(folder, embd_pdrop="delete", attn_pdrop="delete")
    config = nn.GPT.from_pretrained(folder).config
    assert (config.activation, config.eps, config.tie_weights, config.n_inner) == ("gelu_tanh", 1e-5, True, None)
    assert config.dropout == 0.1


def test_several_dropout_rates_become_one_with_a_warning(tmp_path):
    _, folder = saved(tmp_path)
    edit_config(folder, attn_pdrop=0.1, resid_pdrop=0.2)
    with pytest.warns(UserWarning, match=r"several dropout rates.*resid_pdrop"):
        model = nn.GPT.from_pretrained(folder)
    assert model.config.dropout == 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert', supported are 'gpt2', 'openai-gpt', 'llama'"),
        ({"model_type": "delete"}, "model_type is None"),
        (
            {"scale_attn_weights": False, "add_cross_attention": True},
            "scale_attn_weights = False; add_cross_attention =",
        ),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"activation_function": "swish"}, "the activation 'swish'"),
        ({"n_head": 5}, "n_embd must be a multiple of n_head, got 12 and 5"),
        ({"n_embd": "wide"}, "n_embd must be an integer"),
        ({"n_layer": 3}, r"missing h\.2\.ln_1\.weight; missing h\.2\.ln_1\.bias"),
        ({"n_layer": 1}, r"unexpected h\.1\.ln_1\.weight|unexpected h\.1\.attn"),
        ({"n_inner": 5}, r"h\.0\.mlp\.c_fc\.weight has shape \(12, 48\), expected \(12, 5\)"),
        ({"tie_word_embeddings": False}, r"missing lm_head\.weight"),
    ],
)
def test_a_folder_of_something_else_is_refused_with_its_name_and_the_reason(tmp_path, changes, message):
    _, folder = saved(tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        nn.GPT.from_pretrained(folder)
    assert str(folder) in str(caught.value)


def test_missing_extra_and_misshapen_weights_are_named_in_one_error(tmp_path):
    _, folder = saved(tmp_path)

    def spoil(arrays):
        del arrays["transformer.ln_f.bias"]
        del arrays["transformer.h.0.ln_1.weight"]
        arrays["transformer.h.7.extra"] = np.zeros(1)
        weight = arrays["transformer.h.1.attn.c_attn.weight"]
        arrays["transformer.h.1.attn.c_attn.weight"] = weight.T

    edit_arrays(folder, spoil)
    with pytest.raises(CheckpointError) as caught:
        nn.GPT.from_pretrained(folder)
    for part in (
        "missing ln_f.bias",
        "missing h.0.ln_1.weight",
        "unexpected h.7.extra",
        "h.1.attn.c_attn.weight has shape (36, 12), expected (12, 36) (transposed?",
    ):
        assert part in str(caught.value)


def test_a_name_with_and_without_prefix_is_refused(tmp_path):
    _, folder = saved(tmp_path)
    edit_arrays(folder, lambda arrays: {**arrays, "wte.weight": arrays["transformer.wte.weight"]})
    with pytest.raises(CheckpointError, match=r"'wte\.weight' with and without the prefix"):
        nn.GPT.from_pretrained(folder)


def test_missing_and_damaged_files_are_refused_by_name(tmp_path):
    _, folder = saved(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read .*cut short"):
        nn.GPT.from_pretrained(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist; .* holds pytorch_model\.bin"):
        nn.GPT.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        nn.GPT.from_pretrained(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="must contain a JSON object"):
        nn.GPT.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'nowhere' / 'config.json'} does not exist")):
        nn.GPT.from_pretrained(tmp_path / "nowhere")


# --------------------------------------------------------------------------------------------------------------------
# Held against transformers itself


@pytest.mark.parametrize("settings", [*FORMS, {"bias": False}])
@pytest.mark.filterwarnings("default")
def test_transformers_opens_what_we_save_and_gives_the_same_logits(tmp_path, transformers, settings):
    import torch

    model, folder = saved(tmp_path, **settings)
    kind = "GPT2LMHeadModel" if model.config.norm_first else "OpenAIGPTLMHeadModel"
    theirs, report = getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(IDS)).logits.numpy()
    close(model(IDS), logits)
    if model.config.tie_weights:
        assert theirs.lm_head.weight.data_ptr() == theirs.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize("kind", ["GPT2", "OpenAIGPT"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.filterwarnings("default")
def test_we_open_what_transformers_saves_and_give_the_same_logits_and_gradients(tmp_path, transformers, kind, tied):
    import torch

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=V, n_positions=11, n_embd=12, n_layer=2, n_head=3, tie_word_embeddings=tied, initializer_range=0.4
    )
    theirs = getattr(transformers, f"{kind}LMHeadModel")(config).double().eval()
    theirs.save_pretrained(tmp_path)
    model = nn.GPT.from_pretrained(tmp_path)
    logits = theirs(torch.tensor(IDS)).logits
    their_loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(IDS[:, 1:]).flatten())
    their_loss.backward()
    close(model(IDS), logits.detach().numpy())
    loss = model.loss(IDS[:, :-1], IDS[:, 1:])
    loss.backward()
    close(loss, their_loss.item())
    gradients = {name.removeprefix("transformer."): p.grad.numpy() for name, p in theirs.named_parameters()}
    gradients = {
        name.replace("tokens_embed", "wte").replace("positions_embed", "wpe"): g for name, g in gradients.items()
    }
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        close(p.grad, gradients[name])


def test_a_configuration_of_numpy_values_round_trips_through_json():
    config = nn.GPTConfig(11, 8, 2, 2, 6, bias=np.bool_(False), eps=np.float32(0.5), dropout=np.float32(0.25))
    assert nn.GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.bias is False
