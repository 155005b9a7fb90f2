"""Sliding windows, soft caps and sinks: their formulas, with a cache, head by head, in batches, pictures and pages."""

import itertools
import json
import re
from dataclasses import dataclass

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import nn, ops

SETTINGS = [
    {"window": 3},
    {"score": "softcap"},
    {"score": nn.SoftCap(0.7), "position": "alibi"},
    {"score": "sinks", "n_kv_head": 2},
    {"score": "sinks", "window": 3, "position": "rotary"},
]
PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]


def gpt(**settings):
    config = nn.GPTConfig(vocab_size=11, block_size=17, n_layer=2, n_head=4, n_embd=8, **settings)
    model = nn.GPT(config, seed=0).astype(np.float64)
    rng = np.random.default_rng(1)
    for parameter in model.parameters():
        parameter.assign_(rng.standard_normal(parameter.shape) * 0.5)
    return model.eval()


def mha(rng, **options):
    module = nn.MultiHeadAttention(5, n_head=3, d_k=7, d_v=11, rng=0, **options).astype(np.float64)
    for parameter in module.parameters():
        parameter.assign_(rng.standard_normal(parameter.shape))
    return module


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# --------------------------------------------------------------------------------------------------------------------
# Formulas


def test_a_window_is_a_band_below_the_diagonal():
    np.testing.assert_array_equal(nn.causal(5, window=2), np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool))
    np.testing.assert_array_equal(nn.causal(2, 5, window=3).astype(int), [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(nn.causal(5, window=5), nn.causal(5))
    for window in (0, 2.5):
        with pytest.raises((ValueError, TypeError), match="window must be an integer of at least 1"):
            nn.causal(3, window=window)
    with pytest.raises(ValueError, match="window narrows a causal mask"):
        nn.MultiHeadAttention(5, 2, d_k=3, rng=0)(np.ones((3, 5)), window=2)


def test_a_soft_cap_comes_before_bias_and_mask(rng):
    module, x, bias = mha(rng, score=nn.SoftCap(1.5)), rng.standard_normal((5, 5)), rng.standard_normal((1, 3, 5, 5))
    _, trace = module(x, causal=True, bias=bias, trace=True)
    scores = trace.q.data @ np.swapaxes(trace.k.data, -1, -2) / 7**0.5
    np.testing.assert_allclose(trace.scores.data, scores, rtol=1e-12)
    masked = np.where(np.tri(5, dtype=bool), 1.5 * np.tanh(scores / 1.5) + bias[0], -np.inf)
    np.testing.assert_allclose(trace.masked.data, masked, rtol=1e-12)
    np.testing.assert_allclose(trace.weights.data, softmax(masked), rtol=1e-12)


def test_a_sink_takes_part_in_the_softmax_and_has_no_value(rng):
    module, x = mha(rng, score="sinks"), rng.standard_normal((5, 5))
    _, trace = module(x, causal=True, trace=True)
    e = np.exp(trace.masked.data)
    weights = e / (e.sum(axis=-1, keepdims=True) + np.exp(module.score.sink.data))
    np.testing.assert_allclose(trace.weights.data, weights, rtol=1e-12)
    assert module.score.sink.shape == (3, 1, 1)
    assert (nn.MultiHeadAttention(5, 3, d_k=7, rng=0, score="sinks").score.sink.data == 0).all()


def test_a_query_that_sees_no_key_gives_all_its_weight_to_the_sink(rng):
    _, trace = mha(rng, score="sinks")(rng.standard_normal((5, 5)), allow=np.eye(5, k=-1, dtype=bool), trace=True)
    assert (trace.weights.data[:, 0] == 0).all()
    assert np.isfinite(trace.heads.data).all()


# --------------------------------------------------------------------------------------------------------------------
# All ways of computing agree


@pytest.mark.parametrize("settings", SETTINGS)
def test_with_a_cache_and_in_batches_of_different_lengths_texts_are_those_of_each_prompt_alone(settings):
    model = gpt(**settings)
    alone = [tg.generate(model, prompt, 9, temperature=0, use_cache=False)[0].tolist() for prompt in PROMPTS]
    for use_cache in (True, False):
        rows = tg.generate(model, PROMPTS, 9, temperature=0, use_cache=use_cache)
        assert [row.tolist() for row in rows] == alone


@pytest.mark.parametrize("settings", SETTINGS)
def test_chunks_with_a_cache_give_the_logits_of_the_whole(settings):
    model, ids = gpt(**settings), np.random.default_rng(0).integers(0, 11, (2, 11))
    whole = model(ids).data
    for chunks in ([1] * 11, [5, 2, 4], [10, 1]):
        cache, starts = nn.KVCache(2), np.cumsum([0, *chunks])
        with tg.no_grad():
            parts = [model(ids[:, a:b], cache=cache).data for a, b in itertools.pairwise(starts)]
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS)
def test_traced_and_head_by_head_give_the_same_values_and_gradients(settings, rng):
    model, ids = gpt(**settings), [3, 1, 4, 1, 5, 9, 2]
    logits, _ = model(ids, trace=True)
    np.testing.assert_allclose(logits.data, model(ids).data, rtol=1e-11)
    attention, g = model.h[1].attn, rng.standard_normal((7, 8))
    x = tg.Tensor(rng.standard_normal((7, 8)), requires_grad=True)
    leaves = [x, *attention.parameters()]
    both = [compute(x) for compute in (attention, attention.per_head)]
    np.testing.assert_allclose(both[0].data, both[1].data, rtol=1e-11)
    for a, b in zip(*(tg.grad(y, leaves, grad_output=g) for y in both), strict=True):
        np.testing.assert_allclose(a.data, b.data, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{"score": "softcap"}, {"score": "sinks"}])
def test_gradients_pass_the_check(options, rng):
    module, g = mha(rng, **options), rng.standard_normal((5, 5))
    assert tg.gradcheck(lambda x, *_: (module(x, causal=True, window=3) * g).sum(), rng.standard_normal((5, 5))).ok
    x = rng.standard_normal((5, 5))
    parameters = module.parameters()
    assert tg.gradcheck(lambda *ps: (module(x, causal=True) * g).sum(), *parameters).ok


def test_a_window_that_holds_the_whole_context_changes_nothing():
    ids = [3, 1, 4, 1, 5]
    np.testing.assert_array_equal(gpt(window=17)(ids).data, gpt()(ids).data)
    assert not np.allclose(gpt(window=2)(ids).data, gpt()(ids).data)


# --------------------------------------------------------------------------------------------------------------------
# Settings


def test_settings_survive_json():
    for settings in SETTINGS:
        config = gpt(**settings).config
        again = nn.GPTConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        assert again.to_dict() == config.to_dict()
    assert nn.GPTConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score": "sink"}, "score must be one of 'softcap', 'sinks', 'softmax', got 'sink'"),
        ({"window": 0}, "window must be an integer of at least 1"),
        ({"score": {"name": "softcap", "cap": -1.0}}, "cap must be a positive number"),
        ({"score": nn.Alibi()}, "score must be one of"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        gpt(**settings)


@pytest.mark.parametrize(
    ("settings", "named"), [({"window": 3}, "window = 3"), ({"score": "sinks"}, "score = 'sinks'")]
)
def test_a_hugging_face_folder_cannot_hold_them(settings, named, tmp_path):
    with pytest.raises(ValueError, match=f"{named}, not None"):
        gpt(**settings).save_pretrained(tmp_path)


def test_each_layer_has_its_own_sinks():
    names = [name for name, _ in gpt(score="sinks").named_parameters() if "sink" in name]
    assert names == ["h.0.attn.score.sink", "h.1.attn.score.sink"]


def test_a_score_of_a_users_own_is_one_class(rng):
    @dataclass(unsafe_hash=True)
    class Temperature(nn.Score):
        """All scores times a constant, and the square of the softmax, normalized."""

        factor: float = 2.0

        def change(self, scores):
            return scores * self.factor

        def normalize(self, masked):
            squares = ops.softmax(masked) ** 2
            return squares / squares.sum(axis=-1, keepdims=True)

    x = rng.standard_normal((5, 5))
    module = mha(rng, score=Temperature(1.5))
    _, trace = module(x, causal=True, trace=True)
    np.testing.assert_allclose(trace.weights.data, softmax(2 * trace.masked.data), rtol=1e-9)
    np.testing.assert_allclose(module.per_head(x, causal=True).data, module(x, causal=True).data, rtol=1e-11)
    assert gpt(score=Temperature()).config.to_dict()["score"] == {"name": "temperature", "factor": 2.0}


# --------------------------------------------------------------------------------------------------------------------
# Pictures and pages


def equations(page):
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.html, re.DOTALL)[1])
    texts = [text for step in data["walks"][0] for text in step["forward"]]
    return {text.partition(" = ")[0]: text.replace("\u2060", "") for text in texts}, data


@pytest.mark.parametrize(
    ("settings", "title", "equation"),
    [
        ({"score": nn.SoftCap(30.0)}, "masked_1", "masked_1 = mask(30 · tanh( scores_1 / 30))"),
        ({"score": "sinks"}, "S_1", "S_1 = softmax( masked_1 | sink_1 )[…,:-1]"),
        ({"window": 2}, "masked_1", "masked_1 = mask( scores_1 )"),
    ],
)
def test_the_walkthrough_writes_them_as_computed(settings, title, equation):
    shown, data = equations(tg.walkthrough(gpt(**settings), [3, 1, 4, 1, 5], layer=0))
    assert shown[title] == equation
    assert all(step["agrees"] for step in data["decode"])


def test_the_graph_shows_them():
    graph = tg.graph(gpt(score=nn.SoftCap(30.0))([3, 1, 4], trace=True)[0], depth=3)
    assert "tanh" in graph.dot
    text = tg.graph(gpt(score="sinks")([3, 1, 4]), depth=3).dot
    assert "sink" in text
