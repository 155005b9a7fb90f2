"""A cache that changes numbers is rejected with the name of its fault; correct ones pass; the ledger counts."""

import json

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import nn, ops
from tinygrad_mha.check.caching import kv_cache

V = 11
PROMPT = [3, 1, 4, 1, 5, 9]


def gpt(attention=None, **settings):
    """A small GPT whose weights are large enough for attention to matter."""
    config = nn.GPTConfig(**{"vocab_size": V, "block_size": 7, "n_layer": 2, "n_head": 2, "n_embd": 12, **settings})
    model = nn.GPT(config, seed=0, attention=attention)
    rng = np.random.default_rng(1)
    for p in model.parameters():
        p.assign_(rng.standard_normal(p.shape) * 0.5)
    return model


# --------------------------------------------------------------------------------------------------------------------
# Correct ones


LLAMA = {"norm": "rms", "activation": "swiglu", "position": "rotary", "bias": False, "n_kv_head": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"norm_first": False, "dropout": 0.3},
        {"position": "sinusoidal"},
        {"position": "rotary", "n_kv_head": 1, "window": 3},
        {"position": "alibi", "score": "sinks"},
        {"position": "relative", "score": nn.SoftCap(2.0)},
        {"position": "none", "tie_weights": False},
        LLAMA,
    ],
    ids=str,
)
def test_every_option_of_a_gpt_passes_with_nothing_but_rounding(settings):
    model = gpt(**settings)
    before = model.state_dict()
    verdict = kv_cache(model, PROMPT)
    assert verdict.ok, verdict
    assert str(verdict).startswith("GPT: passed")
    assert [f.name for f in verdict.findings] == ["chunks", "padding", "crop", "fork"]
    assert "all 32 ways" in verdict.findings[0].message
    assert verdict.first_divergence is None
    assert np.shape(verdict.differences) == (6, 2, 2)
    assert np.max(verdict.differences) < 1e-13
    assert model.training
    assert all(np.array_equal(a, before[name]) for name, a in model.state_dict().items())


# --------------------------------------------------------------------------------------------------------------------
# One fault each


class Own(nn.Module):
    """Rotary attention from primitives. Each subclass changes one method, which gives it one fault."""

    is_attention = True
    names = ("q", "k", "v", "scores", "masked", "weights", "heads")

    def __init__(self, d=12, n_head=2, rng=None):
        rng = np.random.default_rng(7)
        self.n_head = n_head
        self.w = [tg.Tensor(rng.standard_normal((d, d)) * 0.4, requires_grad=True) for _ in range(4)]

    def forward(self, x, cache=None, positions=None, key_allow=None, edit=None):
        show = edit or (lambda name, tensor: tensor)
        start = 0 if cache is None else cache.length
        positions = np.arange(start, start + x.shape[-2]) if positions is None else positions
        q, k, v = (nn.split_heads(x @ w, self.n_head) for w in self.w[:3])
        q, k = self.place(q, k, positions, cache)
        if cache is not None:
            k, v = self.store(cache, k, v)
        q, k, v = show("q", q), show("k", k), show("v", v)
        scores = show("scores", (q @ k.mT) * q.shape[-1] ** -0.5)
        allow = self.mask(q.shape[-2], k.shape[-2], key_allow, cache)
        masked = show("masked", ops.where(allow, scores + self.bias(q.shape[-2], k.shape[-2]), -np.inf))
        heads = show("heads", show("weights", masked.softmax()) @ v)
        return nn.join_heads(heads) @ self.w[3]

    def place(self, q, k, positions, cache):
        return tuple(nn.positions.rotary(t, positions) for t in (q, k))

    def store(self, cache, k, v):
        return cache.append(k, v)

    def bias(self, n, n_k):
        return 0.0

    def mask(self, n, n_k, key_allow, cache):
        allow = nn.causal(n, n_k)
        return allow if key_allow is None else allow & key_allow[:, None, None, :]


class PlacesAtTheStart(Own):
    def place(self, q, k, positions, cache):
        return super().place(q, k, np.arange(q.shape[-2]), cache)


class PlacesQueriesAtTheStart(Own):
    def place(self, q, k, positions, cache):
        return super().place(q, k, np.arange(q.shape[-2]), cache)[0], super().place(q, k, positions, cache)[1]


class PlacesKeysAtTheStart(Own):
    def place(self, q, k, positions, cache):
        return super().place(q, k, positions, cache)[0], super().place(q, k, np.arange(q.shape[-2]), cache)[1]


class BiasFromTheStart(Own):
    def bias(self, n, n_k):
        distance = np.arange(n)[:, None] - np.arange(n_k)
        return -0.5 * np.abs(distance).astype(np.float32)


class MasksFromTheLeft(Own):
    def mask(self, n, n_k, key_allow, cache):
        allow = np.tri(n, n_k, dtype=bool)
        return allow if key_allow is None else allow & key_allow[:, None, None, :]


class ForgetsTheCache(Own):
    def store(self, cache, k, v):
        cache.append(k, v)
        return k, v

    def mask(self, n, n_k, key_allow, cache):
        key_allow = None if key_allow is None else key_allow[:, -n_k:]
        return super().mask(n, n_k, key_allow, cache)


class HidesItsOwnKey(Own):
    def mask(self, n, n_k, key_allow, cache):
        own = np.arange(n_k) == np.arange(n_k - n, n_k)[:, None]
        allow = super().mask(n, n_k, key_allow, cache)
        return allow & ~own if cache is not None and cache.length else allow


class AppendsAfterwards(Own):
    """The keys of a call are stored, but seen only from the next call on."""

    def mask(self, n, n_k, key_allow, cache):
        allow = super().mask(n, n_k, key_allow, cache)
        return allow & (np.arange(n_k) < n_k - n) if cache is not None and cache.length else allow


class DropsTheFirst(Own):
    def mask(self, n, n_k, key_allow, cache):
        allow = super().mask(n, n_k, key_allow, cache)
        return allow & (np.arange(n_k) > 0) if cache is not None and cache.length else allow


class DropsTheLast(Own):
    def mask(self, n, n_k, key_allow, cache):
        allow = super().mask(n, n_k, key_allow, cache)
        last = np.arange(n_k) == n_k - n - 1
        return allow & ~last if cache is not None and cache.length else allow


class ForgetsTheCausalMask(Own):
    def mask(self, n, n_k, key_allow, cache):
        return (
            np.ones((n, n_k), bool)
            if cache is not None and key_allow is None
            else super().mask(n, n_k, key_allow, cache)
        )


class IgnoresPadding(Own):
    def mask(self, n, n_k, key_allow, cache):
        return nn.causal(n, n_k)


class KeepsItsOwnRows(Own):
    """Rows are kept in the module, which `crop` and `fork` do not reach."""

    def store(self, cache, k, v):
        new = np.array([k.numpy(), v.numpy()])
        self.held = [new if cache.length == 0 else np.concatenate([*self.held, new], axis=-2)]
        cache.append(k, v)
        return tuple(tg.Tensor(rows) for rows in self.held[0])


class CountsItsOwnPositions(Own):
    def place(self, q, k, positions, cache):
        n = q.shape[-2]
        if cache is not None:
            self.held = 0 if cache.length == 0 else self.held
            positions, self.held = np.arange(self.held, self.held + n), self.held + n
        return super().place(q, k, positions, cache)


class StoresHalf(Own):
    dtype = np.float16

    def store(self, cache, k, v):
        return cache.append(*(t.astype(self.dtype).astype(t.dtype) for t in (k, v)))


class StoresSingle(StoresHalf):
    dtype = np.float32


class LooksAhead(Own):
    def mask(self, n, n_k, key_allow, cache):
        return np.ones((n, n_k), bool)


class AppendsTwice(Own):
    def store(self, cache, k, v):
        cache.append(k, v)
        return cache.append(k, v)


NEVER_STORED = "cache.append once"
FAULTS = {
    PlacesAtTheStart: ("chunks", "position not offset"),
    PlacesQueriesAtTheStart: ("chunks", "position not offset"),
    PlacesKeysAtTheStart: ("chunks", "position not offset"),
    BiasFromTheStart: ("chunks", "position not offset"),
    MasksFromTheLeft: ("chunks", "mask from the wrong corner (top-left)"),
    ForgetsTheCache: ("chunks", "cache not used"),
    HidesItsOwnKey: ("chunks", "a token missing: new tokens do not see their own key"),
    AppendsAfterwards: ("chunks", "a token missing: the keys of a call"),
    DropsTheFirst: ("chunks", "trimmed by one: the first"),
    DropsTheLast: ("chunks", "trimmed by one: the last"),
    ForgetsTheCausalMask: ("chunks", "no causal mask with a cache"),
    IgnoresPadding: ("padding", "padding seen"),
    KeepsItsOwnRows: ("crop", "stale after crop"),
    CountsItsOwnPositions: ("crop", "stale after crop"),
    StoresHalf: ("chunks", "dtype"),
    StoresSingle: ("chunks", "dtype"),
    LooksAhead: ("chunks", "not causal"),
    AppendsTwice: ("chunks", "a call with a cache fails"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("in_a_gpt", [True, False])
def test_each_fault_is_rejected_by_name(fault, in_a_gpt):
    claim, cause = FAULTS[fault]
    subject = fault().astype(np.float32)
    if in_a_gpt:
        model = gpt()
        model.h[1].attn = subject
        verdict = kv_cache(model, PROMPT)
    else:
        x = np.random.default_rng(3).standard_normal((6, 12)).astype(np.float32)
        verdict = kv_cache(subject, x)
    first = verdict.first_divergence
    assert not verdict.ok
    assert first.claim == claim, verdict
    assert first.cause.startswith(cause), verdict
    assert first.cause in [f.cause or f.message for f in verdict.failed]
    assert json.loads(json.dumps(verdict.to_dict()))["first_divergence"]["claim"] == claim
    if "fails" not in cause:
        assert first.layer == int(in_a_gpt)
        assert first.head in (0, 1)
