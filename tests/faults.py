"""Attentions with one fault each, and correct ones: what `tg.check.attention` is tried on.

`FAULTS` and `VARIANTS` list them. A fault states what a report must say: a pattern that is found in the name or the
cause of a failed finding. The code is what a person would write; names and styles differ on purpose.

Axes: B batch, H heads, T tokens, C width, d width of a head.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha import nn, ops

X = ((7, 12),)  # one input x (T, C): three heads of width 4


@dataclass(frozen=True)
class Case:
    """A candidate, the shapes of its inputs (none: the check makes them), and what a report says of it."""

    name: str
    make: Callable[[], Any]
    says: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    causal: bool | None = None

    def inputs(self) -> list[np.ndarray]:
        rng = np.random.default_rng(11)
        return [rng.standard_normal(shape) for shape in self.shapes]

    def check(self) -> Any:
        return tg.check.attention(self.make(), *self.inputs(), causal=self.causal)


FAULTS: list[Case] = []
VARIANTS: list[Case] = []


def enter(into, says, shapes, causal):
    def add(candidate):
        make = candidate if inspect.isclass(candidate) else lambda: candidate
        into.append(Case(candidate.__name__, make, says, shapes, causal))
        return candidate

    return add


def fault(says, *shapes, causal=None):
    """Enter the decorated function, or the objects that the class makes, as a fault of which a report says `says`."""
    return enter(FAULTS, says, shapes, causal)


def variant(*shapes, causal=None):
    """Enter the decorated function, or the objects that the class makes, as a correct attention."""
    return enter(VARIANTS, "", shapes, causal)


def softmax(scores, axis=-1):
    e = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


# --------------------------------------------------------------------------------------------------------------------
# Functions of q (..., T_q, d), k (..., T_k, d), v (..., T_k, d_v) in NumPy


@variant()
def bidirectional(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v


@variant()
def causal(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    scores = np.einsum("...id,...jd->...ij", q, k) * q.shape[-1] ** -0.5
    future = np.triu(np.ones((n, m), dtype=bool), k=m - n + 1)
    return np.einsum("...ij,...jv->...iv", softmax(np.where(future, -np.inf, scores)), v)


@variant()
def with_a_mask(q, k, v, mask=None):
    """mask is True where a query may attend; a query that may attend to nothing gets zeros."""
    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    if mask is None:
        return softmax(scores) @ v
    scores = np.where(mask, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total) @ v


@variant((3, 5), (7, 5), (7, 11))
def with_a_mask_for_more_keys_than_queries(q, k, v, mask=None):
    return with_a_mask(q, k, v, mask)


@variant((4, 5, 6), (2, 5, 6), (2, 5, 7))
def grouped_queries(q, k, v):
    repeats = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, repeats, axis=-3), np.repeat(v, repeats, axis=-3)
    return softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v


@variant((3, 5, 6), (1, 7, 6), (1, 7, 11))
def multi_query(q, k, v):
    weights = softmax(np.einsum("...hid,...jd->...hij", q, k[..., 0, :, :]) / math.sqrt(q.shape[-1]))
    return np.einsum("...hij,...jv->...hiv", weights, v[..., 0, :, :])


@variant()
def alibi(q, k, v, slope=0.25):
    n, m = q.shape[-2], k.shape[-2]
    distance = np.arange(m - n, m, dtype=q.dtype)[:, None] - np.arange(m, dtype=q.dtype)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) - slope * distance
    return softmax(np.where(distance >= 0, scores, -np.inf)) @ v


@variant()
def soft_capped(q, k, v, cap=20.0):
    n, m = q.shape[-2], k.shape[-2]
    scores = cap * np.tanh(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) / cap)
    return softmax(np.where(np.tri(n, m, m - n, dtype=bool), scores, -np.inf)) @ v


@variant()
def sink(q, k, v):
    """One more key of score 0 without a value: softmax off by one."""
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    top = np.maximum(scores.max(-1, keepdims=True), 0)
    e = np.exp(scores - top)
    return e / (e.sum(-1, keepdims=True) + np.exp(-top)) @ v


@variant()
def linear_attention(q, k, v):
    """Causal linear attention by its recurrence: the state is the sum of outer products so far."""
    feature = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))  # noqa: E731
    state = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]), q.dtype)
    total = np.zeros((*k.shape[:-2], k.shape[-1]), q.dtype)
    rows, offset = [], k.shape[-2] - q.shape[-2]
    for j in range(k.shape[-2]):
        key = feature(k[..., j, :])
        state, total = state + key[..., :, None] * v[..., j, None, :], total + key
        if j >= offset:
            query = feature(q[..., j - offset, :])
            y = (query[..., None, :] @ state)[..., 0, :]
            rows.append(y / (query * total).sum(-1, keepdims=True))
    return np.stack(rows, axis=-2)


@variant()
def windowed(q, k, v, window=3):
    n, m = q.shape[-2], k.shape[-2]
    back = np.arange(m - n, m)[:, None] - np.arange(m)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return softmax(np.where((back >= 0) & (back < window), scores, -np.inf)) @ v


@variant((5, 12), (5, 12), (5, 12))
def split_heads_of_rows(q, k, v, n_head=3):
    q, k, v = (np.moveaxis(z.reshape(*z.shape[:-1], n_head, -1), -2, -3) for z in (q, k, v))
    y = softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v
    y = np.moveaxis(y, -3, -2)
    return y.reshape(*y.shape[:-2], -1)


@fault("sign of the scores|softmax.*sign|sign.*softmax")
def attention_with_softmin(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    e = np.exp(scores.min(-1, keepdims=True) - scores)
    return e / e.sum(-1, keepdims=True) @ v


@fault("scale")
def attention_without_scale(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2)) @ v


@fault("scale")
def attention_scaled_by_d(query, key, value):
    d_k = query.shape[-1]
    logits = np.einsum("...qd,...kd->...qk", query, key) / d_k
    return np.einsum("...qk,...kv->...qv", softmax(logits), value)


@fault("axis")
def attention_softmax_over_queries(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), axis=-2) @ v


@fault("(?i)(k and v|keys and values|v and k).*swapped|swapped.*(k and v|keys and values)")
def attention_k_and_v_swapped(q, k, v):
    return softmax(q @ v.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ k


@fault("(?i)(q and k|queries and keys|k and q).*swapped|swapped.*(q and k|queries and keys)")
def attention_q_and_k_swapped(q, k, v):
    return softmax(k @ q.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v


@fault("next|off by one|one too (far|many)")
def causal_mask_sees_the_next(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return softmax(np.where(np.tri(n, m, m - n + 1, dtype=bool), scores, -np.inf)) @ v


@fault("itself|off by one|own")
def causal_mask_hides_itself(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    scores = np.where(np.tri(n, m, m - n - 1, dtype=bool), scores, -1e30)
    return softmax(scores) @ v


@fault("corner|top.left|aligned")
def causal_mask_from_the_top_left(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    past = np.tril(np.ones(scores.shape[-2:], dtype=bool))
    return softmax(np.where(past, scores, -np.inf)) @ v


@fault("polarity|inverted|opposite")
def causal_mask_inverted(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    past = np.tri(n, m, m - n - 1, dtype=bool)
    return softmax(np.where(past, -np.inf, scores)) @ v


@fault("polarity|inverted|opposite")
def allow_hides(q, k, v, allow=None):
    """allow: boolean (T_q, T_k), True = may attend."""
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if allow is not None:
        scores = np.where(allow, -1e30, scores)
    return softmax(scores) @ v


@fault("(?i)exclu|finite|-1e4|constant")
def masked_with_minus_1e4(q, k, v, mask=None):
    """mask: 1 where a query may attend, 0 where not."""
    att = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        att = att - 1e4 * (1 - mask)
    return softmax(att) @ v


@fault("(?i)exclu|finite|-1e9|constant")
def causal_with_minus_1e9_added(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return softmax(scores + np.triu(np.full((n, m), -1e9), k=m - n + 1).astype(scores.dtype)) @ v


@fault("float32")
def attention_in_float32(q, k, v):
    q, k = np.asarray(q, dtype=np.float32), np.asarray(k, dtype=np.float32)
    return (softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v).astype(v.dtype)


@fault("dtype|float64|upcast|promot")
def attention_promoted_by_sqrt(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


@fault("leak")
def values_centred_over_time(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    v = v - v.mean(axis=-2, keepdims=True)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return softmax(np.where(np.tri(n, m, m - n, dtype=bool), scores, -np.inf)) @ v


@fault("renormal|after the softmax|sum to 1", causal=True)
def mask_after_softmax(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    weights = softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))
    return (weights * np.tri(n, m, m - n)).astype(v.dtype) @ v


@fault("(?i)no key|all keys|fully masked|every key|nan")
def nan_where_all_is_masked(q, k, v, mask=None):
    """mask: boolean, True = may attend."""
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    with np.errstate(invalid="ignore"):
        return softmax(scores) @ v


@fault("overflow|largest|maximum")
def softmax_without_maximum(q, k, v):
    e = np.exp(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))
    return (e / e.sum(-1, keepdims=True)) @ v


@fault("tile|repeat|group|order", (4, 5, 6), (2, 5, 6), (2, 5, 7))
def grouped_queries_tiled(q, k, v):
    repeats = q.shape[-3] // k.shape[-3]
    front = (1,) * (k.ndim - 3)
    k, v = np.tile(k, (*front, repeats, 1, 1)), np.tile(v, (*front, repeats, 1, 1))
    return softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v


@fault("(?i)slope|alibi|far|distance")
def alibi_prefers_the_far(q, k, v, slope=0.25):
    n, m = q.shape[-2], k.shape[-2]
    distance = np.arange(m - n, m, dtype=q.dtype)[:, None] - np.arange(m, dtype=q.dtype)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + slope * distance
    return softmax(np.where(distance >= 0, scores, -np.inf)) @ v


@fault("window")
def window_of_one_more(q, k, v, window=3):
    n, m = q.shape[-2], k.shape[-2]
    back = np.arange(m - n, m)[:, None] - np.arange(m)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return softmax(np.where((back >= 0) & (back <= window), scores, -np.inf)) @ v


@fault("reshape|transpose", (5, 12), (5, 12), (5, 12))
def heads_split_by_reshape(q, k, v, n_head=3):
    n, m, d = q.shape[-2], k.shape[-2], q.shape[-1] // n_head
    qh = q.reshape(*q.shape[:-2], n_head, n, d)
    kh, vh = (z.reshape(*z.shape[:-2], n_head, m, d) for z in (k, v))
    y = np.moveaxis(softmax(qh @ kh.swapaxes(-1, -2) / math.sqrt(d)) @ vh, -3, -2)
    return y.reshape(q.shape)


@fault("order|interleav|join|concatenat", (5, 12), (5, 12), (5, 12))
def heads_interleaved(q, k, v, n_head=3):
    q, k, v = (np.moveaxis(z.reshape(*z.shape[:-1], n_head, -1), -2, -3) for z in (q, k, v))
    y = softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v  # (..., H, T, d)
    y = np.moveaxis(y, -3, -1)
    return y.reshape(*y.shape[:-2], -1)


@fault("average|mean", (5, 12), (5, 12), (5, 12))
def heads_averaged(q, k, v, n_head=3):
    q, k, v = (np.moveaxis(z.reshape(*z.shape[:-1], n_head, -1), -2, -3) for z in (q, k, v))
    y = (softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v).mean(axis=-3)
    return np.concatenate([y] * n_head, axis=-1)


@fault("scale", (5, 12), (5, 12), (5, 12))
def heads_scaled_by_the_width_of_the_model(q, k, v, n_head=3):
    d_model = q.shape[-1]
    q, k, v = (np.moveaxis(z.reshape(*z.shape[:-1], n_head, -1), -2, -3) for z in (q, k, v))
    y = np.moveaxis(softmax(q @ k.swapaxes(-1, -2) / math.sqrt(d_model)) @ v, -3, -2)
    return y.reshape(*y.shape[:-2], -1)


@fault("residual|adds", (5, 7), (5, 7), (5, 7))
def adds_the_query(q, k, v):
    return q + softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v


# --------------------------------------------------------------------------------------------------------------------
# Functions in ours


@variant()
def ours_causal(q, k, v):
    return nn.attention(q, k, v, allow=nn.causal(q.shape[-2], k.shape[-2]))


@variant()
def ours_by_hand(Q, K, V):
    S = Q @ K.mT * Q.shape[-1] ** -0.5
    return ops.softmax(S) @ V


@variant((5, 8), (7, 8), (7, 11))
def ours_cross(q, k, v, key_allow=None):
    return nn.attention(q, k, v, key_allow=key_allow)


@variant()
def ours_rotary(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    q, k = nn.positions.rotary(q, np.arange(m - n, m)), nn.positions.rotary(k, np.arange(m))
    return ops.attend(q, k, v, nn.causal(n, m))


@fault("sign of the scores|softmax.*sign|sign.*softmax")
def ours_negated(q, k, v):
    scores = -(q @ k.mT) / q.shape[-1] ** 0.5
    return ops.softmax(scores) @ v


@fault("scale")
def ours_scaled_by_d_v(q, k, v):
    scores = (q @ k.mT) / v.shape[-1] ** 0.5
    return ops.softmax(scores) @ v


@fault("(?i)gradient", causal=True)
def ours_detached(q, k, v):
    weights = ops.softmax(ops.where(nn.causal(q.shape[-2], k.shape[-2]), q @ k.mT / q.shape[-1] ** 0.5, -np.inf))
    return weights.detach() @ v


# --------------------------------------------------------------------------------------------------------------------
# Modules over x (..., T, C)


@variant(*X)
class PlainModule(nn.Module):
    """Causal attention with padding and a cache, from primitives; the faults below differ from it in one place."""

    n_head = 3

    def __init__(self, width=12, rng=0):
        rng = np.random.default_rng(rng)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, rng=rng) for _ in range(4))

    def split(self, z):
        z = z.reshape(*z.shape[:-1], self.n_head, -1)
        return z.swapaxes(-2, -3)

    def join(self, z):
        z = z.swapaxes(-2, -3)
        return z.reshape(*z.shape[:-2], -1)

    def project(self, x, positions):
        return [self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj)]

    def remember(self, cache, k, v):
        return cache.append(k, v)

    def weigh(self, q, k, key_allow):
        n, m = q.shape[-2], k.shape[-2]
        scores = q @ k.mT / q.shape[-1] ** 0.5
        allow = np.tri(n, m, m - n, dtype=bool)
        if key_allow is not None:
            allow = allow & key_allow[:, None, None, :]
        return ops.softmax(ops.where(allow, scores, -np.inf))

    def forward(self, x, cache=None, positions=None, key_allow=None):
        q, k, v = self.project(x, positions)
        if cache is not None:
            k, v = self.remember(cache, k, v)
        return self.o_proj(self.join(self.weigh(q, k, key_allow) @ v))


@variant(*X)
class OurGPTs(nn.CausalSelfAttention):
    def __init__(self):
        config = nn.GPTConfig(vocab_size=5, block_size=16, n_layer=1, n_head=3, n_embd=12)
        super().__init__(config, np.random.default_rng(0))


@variant(*X)
class Llamas(nn.CausalSelfAttention):
    def __init__(self):
        sizes = {"vocab_size": 5, "block_size": 16, "n_layer": 1, "n_head": 3, "n_embd": 12, "n_kv_head": 1}
        config = nn.GPTConfig(**sizes, position="rotary", norm="rms", activation="swiglu", bias=False)
        super().__init__(config, np.random.default_rng(0))


@variant(*X, causal=False)
class Encoder(nn.Module):
    def __init__(self):
        self.mha = nn.MultiHeadAttention(12, 3, rng=0)

    def forward(self, x, key_allow=None):
        return self.mha(x, key_allow=key_allow)


class Ours(nn.Module):
    """Our multi-head attention with an option."""

    options: dict[str, Any] = {}  # noqa: RUF012
    window = None

    def __init__(self):
        self.mha = nn.MultiHeadAttention(12, 3, rng=0, **self.options)

    def forward(self, x, cache=None, positions=None, key_allow=None):
        options = {} if self.window is None else {"window": self.window}
        return self.mha(x, causal=True, cache=cache, positions=positions, key_allow=key_allow, **options)


@variant(*X)
class WithRelativeBias(Ours):
    options = {"position": nn.positions.Relative(num_buckets=4, max_distance=8)}  # noqa: RUF012


@variant(*X)
class WithAlibi(Ours):
    options = {"position": "alibi"}  # noqa: RUF012


@variant(*X)
class WithWindow(Ours):
    window = 3


@variant(*X)
class WithSinks(Ours):
    options = {"score": "sinks"}  # noqa: RUF012


@variant(*X)
class WithSoftCap(Ours):
    options = {"score": nn.SoftCap(5.0)}  # noqa: RUF012


@variant(*X)
class WithSharedKeys(Ours):
    options = {"n_kv_head": 1, "position": "rotary"}  # noqa: RUF012


@variant(*X)
class LinearRecurrence(nn.Module):
    """phi(q) S / phi(q) z, with S and z summed over the past; reads its past again from the cache."""

    def __init__(self):
        rng = np.random.default_rng(3)
        self.Wq, self.Wk, self.Wv = (nn.Linear(12, 12, bias=False, rng=rng) for _ in range(3))
        self.Wo = nn.Linear(12, 12, rng=rng)

    def forward(self, x, cache=None):
        phi = lambda z: ops.sigmoid(z) + 0.1  # noqa: E731
        q, k, v = (nn.split_heads(f(x), 3) for f in (self.Wq, self.Wk, self.Wv))
        if cache is not None:
            k, v = cache.append(k, v)
        q, k = phi(q), phi(k)
        state, total, rows = 0.0, 0.0, []
        for j in range(k.shape[-2]):
            state = state + k[..., j, :, None] * v[..., j, None, :]
            total = total + k[..., j, :]
            i = j - (k.shape[-2] - q.shape[-2])
            if i >= 0:
                rows.append((q[..., i, None, :] @ state)[..., 0, :] / (q[..., i, :] * total).sum(-1, keepdims=True))
        return self.Wo(nn.join_heads(ops.stack(rows, axis=-2)))


@variant(*X)
class SigmoidWeights(PlainModule):
    def weigh(self, q, k, key_allow):
        allow = nn.allow_past(q, k, key_allow)
        weights = ops.sigmoid(q @ k.mT / q.shape[-1] ** 0.5)
        weights = weights if allow is None else ops.where(allow, weights, 0.0)
        return weights / (weights.sum(axis=-1, keepdims=True) + 1e-6)


@fault("(?i)leak|later|future", *X)
class AddsAMeanOverTime(PlainModule):
    def forward(self, x, cache=None, positions=None, key_allow=None):
        return super().forward(x, cache, positions, key_allow) + 0.1 * x.mean(axis=-2, keepdims=True)


@fault("(?i)normali|leak|later|future", *X)
class NormalisesOverTime(PlainModule):
    def project(self, x, positions):
        centred = x - x.mean(axis=-2, keepdims=True)
        spread = ((centred * centred).mean(axis=-2, keepdims=True) + 1e-5) ** 0.5
        return super().project(centred / spread, positions)


@fault("next|off by one", *X)
class SeesTheNext(PlainModule):
    def weigh(self, q, k, key_allow):
        T, S = q.shape[-2], k.shape[-2]
        mask = np.triu(np.ones((T, S), dtype=bool), k=S - T + 2)
        if key_allow is not None:
            mask = mask | ~key_allow[:, None, None, :]
        return ops.softmax(ops.where(mask, -np.inf, q @ k.mT * q.shape[-1] ** -0.5))


@fault("corner|top.left|aligned|offset", *X)
class MaskFromTheTopLeft(PlainModule):
    def weigh(self, q, k, key_allow):
        allow = np.tril(np.ones((q.shape[-2], k.shape[-2]), dtype=bool))
        if key_allow is not None:
            allow = allow & key_allow[:, None, None, :]
        return ops.softmax(ops.where(allow, q @ k.mT / q.shape[-1] ** 0.5, -np.inf))


@fault("scale", *X)
class ModuleWithoutScale(PlainModule):
    def weigh(self, q, k, key_allow):
        allow = nn.allow_past(q, k, key_allow)
        return ops.softmax(q @ k.mT if allow is None else ops.where(allow, q @ k.mT, -np.inf))


@fault("scale", *X)
class ModuleScaledByModelWidth(PlainModule):
    def weigh(self, q, k, key_allow):
        scores = q @ k.mT * self.q_proj.weight.shape[0] ** -0.5
        allow = nn.allow_past(q, k, key_allow)
        return ops.softmax(scores if allow is None else ops.where(allow, scores, -np.inf))


@fault("axis", *X, causal=False)
class ModuleSoftmaxOverQueries(PlainModule):
    def weigh(self, q, k, key_allow):
        return ops.softmax(q @ k.mT / q.shape[-1] ** 0.5, axis=-2)


@fault("reshape|transpose", *X)
class SplitsByReshape(PlainModule):
    def split(self, z):
        return z.reshape(*z.shape[:-2], self.n_head, z.shape[-2], -1)


@fault("reshape|transpose", *X)
class JoinsByReshape(PlainModule):
    def join(self, z):
        return z.reshape(*z.shape[:-3], z.shape[-2], -1)


@fault("average|mean", *X)
class AveragesHeads(PlainModule):
    def __init__(self):
        super().__init__()
        self.o_proj = nn.Linear(4, 12, rng=1)

    def join(self, z):
        return z.mean(axis=-3)


class Rotated(PlainModule):
    """Rotary positions, in the style of GPT-NeoX: the two halves of a head are rotated."""

    def turn(self, z, positions, sign=1):
        d = z.shape[-1] // 2
        angles = positions[..., None] * 10000.0 ** (-np.arange(d) / d)
        if angles.ndim == 3:
            angles = angles[:, None]
        cos, sin = np.cos(angles).astype(z.dtype), sign * np.sin(angles).astype(z.dtype)
        a, b = z[..., :d], z[..., d:]
        return ops.concat(a * cos - b * sin, b * cos + a * sin, axis=-1)

    def project(self, x, positions):
        q, k, v = super().project(x, positions)
        return self.turn(q, positions), self.turn(k, positions), v

    def forward(self, x, cache=None, positions=None, key_allow=None):
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = np.arange(start, start + x.shape[-2])
        return super().forward(x, cache, positions, key_allow)


variant(*X)(Rotated)


@fault("offset|position", *X)
class PositionsStartAgain(Rotated):
    def forward(self, x, cache=None, positions=None, key_allow=None):
        return super().forward(x, cache, np.arange(x.shape[-2]), key_allow)


@fault("(?i)position", *X)
class StandsAtZeroByDefault(Rotated):
    def forward(self, x, cache=None, positions=None, key_allow=None):
        if positions is None:
            positions = np.zeros(x.shape[-2], dtype=int)
        return super().forward(x, cache, positions, key_allow)


@fault("(?i)rota|position", *X)
class RotatesValues(Rotated):
    def project(self, x, positions):
        q, k, v = super().project(x, positions)
        return q, k, self.turn(v, positions)


@fault("(?i)rota|position|shift", *X)
class RotatesKeysBackwards(Rotated):
    def project(self, x, positions):
        q, k, v = PlainModule.project(self, x, positions)
        return self.turn(q, positions), self.turn(k, positions, sign=-1), v


@fault("(?i)rota|position|distance", *X)
class KeysStartAtOne(Rotated):
    def project(self, x, positions):
        q, k, v = PlainModule.project(self, x, positions)
        return self.turn(q, positions), self.turn(k, positions + 1), v


@fault("(?i)drop|newest|current|last", *X)
class CacheWithoutTheNewest(PlainModule):
    def remember(self, cache, k, v):
        n = cache.length
        all_k, all_v = cache.append(k, v)
        return (all_k[..., :n, :], all_v[..., :n, :]) if n else (k, v)


@fault("(?i)first|drop|trim|missing", *X)
class CacheWithoutTheFirst(PlainModule):
    def remember(self, cache, k, v):
        n = cache.length
        k, v = cache.append(k, v)
        return (k[..., 1:, :], v[..., 1:, :]) if n else (k, v)


@fault("(?i)stale|crop|fork|own copy", *X)
class KeepsKeysOfItsOwn(PlainModule):
    def remember(self, cache, k, v):
        if cache.length == 0:
            self.past = k, v
        else:
            self.past = tuple(ops.concat(old, new, axis=-2) for old, new in zip(self.past, (k, v), strict=True))
        cache.append(k, v)
        return self.past


@fault("padding: key_allow does not hide padding", *X)
class SeesPadding(PlainModule):
    def weigh(self, q, k, key_allow):
        return super().weigh(q, k, None)


@fault("(?i)padding", *X)
class SinksOnPadding(PlainModule):
    def weigh(self, q, k, key_allow):
        T, S = q.shape[-2], k.shape[-2]
        past = np.tri(T, S, S - T, dtype=bool)
        back = np.arange(S - T, S)[:, None] - np.arange(S)
        allow = past & (back < 4)
        if key_allow is not None:
            allow = allow & key_allow[:, None, None, :]
        allow = allow | (past & (np.arange(S) < 1))  # attention sinks: the first column is always seen
        return ops.softmax(ops.where(allow, q @ k.mT / q.shape[-1] ** 0.5, -np.inf))


@fault("(?i)same twice|random|determin|dropout", *X)
class DropsInEval(PlainModule):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(5)

    def weigh(self, q, k, key_allow):
        weights = super().weigh(q, k, key_allow)
        keep = self.rng.random(weights.shape) > 0.1
        return weights * (keep / 0.9).astype(weights.dtype)


@fault("(?i)batch", *X)
class NormalisesOverBatch(PlainModule):
    def project(self, x, positions):
        if x.ndim == 3:
            x = x - x.mean(axis=0, keepdims=True) * 0.5
        return super().project(x, positions)


@fault("residual", *X)
class ResidualInside(PlainModule):
    def forward(self, x, cache=None, positions=None, key_allow=None):
        return x + super().forward(x, cache, positions, key_allow)


@fault("residual|adds", *X)
class ResidualOfQueries(PlainModule):
    def forward(self, x, cache=None, positions=None, key_allow=None):
        q, k, v = self.project(x, positions)
        if cache is not None:
            k, v = self.remember(cache, k, v)
        return self.o_proj(self.join(self.weigh(q, k, key_allow) @ v + q))


@fault("(?i)not used|unused|no gradient|without effect|does not depend", *X)
class ForgetsTheOutputProjection(PlainModule):
    def forward(self, x, cache=None, positions=None, key_allow=None):
        q, k, v = self.project(x, positions)
        if cache is not None:
            k, v = self.remember(cache, k, v)
        return self.join(self.weigh(q, k, key_allow) @ v)


@fault("(?i)exclu|finite|-1e4|constant", *X)
class AddsMinus1e4(PlainModule):
    def weigh(self, q, k, key_allow):
        allow = nn.allow_past(q, k, key_allow)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return ops.softmax(scores if allow is None else scores + (~allow * -1e4).astype(scores.dtype))


@fault("window", *X)
class WindowOfOneMore(PlainModule):
    window = 3

    def weigh(self, q, k, key_allow):
        return ops.softmax(
            ops.where(nn.allow_past(q, k, key_allow, self.window + 1), q @ k.mT / q.shape[-1] ** 0.5, -np.inf)
        )


@fault("dtype|float64|float32", *X)
class ReturnsFloat64(PlainModule):
    def weigh(self, q, k, key_allow):
        return super().weigh(q, k, key_allow).astype(np.float64)


# --------------------------------------------------------------------------------------------------------------------
# These were written without looking at the check, and tried when it was finished.


@fault("scale")
def multiplied_by_sqrt(q, k, v):
    return softmax((q @ k.swapaxes(-1, -2)) * math.sqrt(q.shape[-1])) @ v


@fault("in place")
def writes_to_its_input(q, k, v):
    q /= math.sqrt(q.shape[-1])
    return softmax(q @ k.swapaxes(-1, -2)) @ v


@fault("(?i)softmax|twice")
def softmax_twice(q, k, v):
    return softmax(softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))) @ v


@fault("(?i)exclu|cap|finite|later|future|order")
def cap_after_mask(q, k, v, cap=5.0):
    n, m = q.shape[-2], k.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    scores = np.where(np.tri(n, m, m - n, dtype=bool), scores, -np.inf)
    return softmax(cap * np.tanh(scores / cap)) @ v


@fault("(?i)later|future|leak|wrap", *X)
class ShiftsByRoll(PlainModule):
    """Token shift as in RWKV: half of the channels come from the token before; the roll wraps around."""

    def project(self, x, positions):
        before = ops.concat(x[..., -1:, :], x[..., :-1, :], axis=-2)
        return super().project(x * 0.5 + before * 0.5, positions)


@fault("(?i)same twice|state|determin|call", *X)
class KeepsARunningMean(PlainModule):
    def __init__(self):
        super().__init__()
        self.mean = 0.0

    def project(self, x, positions):
        self.mean = 0.9 * self.mean + 0.1 * x.numpy().mean()
        return super().project(x - float(self.mean), positions)


@fault("(?i)gradient", *X)
class DetachesKeys(PlainModule):
    def project(self, x, positions):
        q, k, v = super().project(x, positions)
        return q, k.detach(), v


@fault("(?i)length|stale|state|call|first", *X)
class MaskOfTheFirstCall(PlainModule):
    mask = None

    def weigh(self, q, k, key_allow):
        if self.mask is None or self.mask.shape[-1] < k.shape[-2]:
            self.mask = np.tri(q.shape[-2], k.shape[-2], dtype=bool)
        allow = self.mask[: q.shape[-2], : k.shape[-2]]
        if key_allow is not None:
            allow = allow & key_allow[:, None, None, :]
        return ops.softmax(ops.where(allow, q @ k.mT / q.shape[-1] ** 0.5, -np.inf))


@fault("(?i)cache|twice|rotat|position", *X)
class RotatesCachedKeysAgain(Rotated):
    def project(self, x, positions):
        q, k, v = PlainModule.project(self, x, positions)
        return self.turn(q, positions), k, v

    def remember(self, cache, k, v):
        k, v = cache.append(self.turn(k, np.arange(cache.length, cache.length + k.shape[-2])), v)
        return self.turn(k, np.arange(k.shape[-2])), v


@fault("(?i)padding|position", *X)
class AbsolutePositionsByIndex(PlainModule):
    """Adds learned absolute positions inside attention, ignoring `positions` (padding in front moves them)."""

    def __init__(self):
        super().__init__()
        self.table = tg.Tensor(np.random.default_rng(2).standard_normal((32, 12)), requires_grad=True)

    def forward(self, x, cache=None, positions=None, key_allow=None):
        start = 0 if cache is None else cache.length
        return super().forward(
            x + self.table[np.arange(start, start + x.shape[-2])].astype(x.dtype), cache, positions, key_allow
        )


@fault("(?i)nan|padding|masked", *X)
class MultipliesMaskedValues(PlainModule):
    """A row without a key is 0 / 0; the largest score may be one that is hidden."""

    def weigh(self, q, k, key_allow):
        n, m = q.shape[-2], k.shape[-2]
        allow = np.tri(n, m, m - n, dtype=bool)
        if key_allow is not None:
            allow = allow & key_allow[:, None, None, :]
        scores = q @ k.mT / q.shape[-1] ** 0.5
        e = ops.exp(scores - scores.max(axis=-1, keepdims=True)) * allow.astype(scores.dtype)
        return e / e.sum(axis=-1, keepdims=True)


@fault("(?i)float16|dtype|precision|cache", *X)
class HalfPrecisionCache(PlainModule):
    def remember(self, cache, k, v):
        return [tg.Tensor(z.numpy().astype(np.float16).astype(z.dtype)) for z in cache.append(k, v)]


@variant(*X)
class CosineAttention(PlainModule):
    def weigh(self, q, k, key_allow):
        q, k = (z / ((z * z).sum(axis=-1, keepdims=True) + 1e-6) ** 0.5 for z in (q, k))
        scores = 8.0 * (q @ k.mT)
        allow = nn.allow_past(q, k, key_allow)
        return ops.softmax(scores if allow is None else ops.where(allow, scores, -np.inf))


@variant(*X)
class GatedOutput(PlainModule):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(12, 12, rng=7)

    def forward(self, x, cache=None, positions=None, key_allow=None):
        return super().forward(x, cache, positions, key_allow) * ops.sigmoid(self.gate(x))


@variant(*X)
class TokenShift(PlainModule):
    """Each token also reads the one before it (no cache)."""

    def project(self, x, positions):
        zero = np.zeros_like(x.numpy()[..., :1, :])
        return super().project(x * 0.5 + ops.concat(tg.Tensor(zero), x[..., :-1, :], axis=-2) * 0.5, positions)

    def forward(self, x):
        return super().forward(x)


@variant(*X)
class Differential(PlainModule):
    """Difference of two softmaxes (arXiv:2410.05258), with a learned factor."""

    def __init__(self):
        super().__init__()
        self.q2, self.k2 = nn.Linear(12, 12, rng=8), nn.Linear(12, 12, rng=9)
        self.lam = tg.Tensor(np.array(0.3), requires_grad=True)

    def forward(self, x):
        q, k, v = self.project(x, None)
        q2, k2 = self.split(self.q2(x)), self.split(self.k2(x))
        w = self.weigh(q, k, None) - self.lam * self.weigh(q2, k2, None)
        return self.o_proj(self.join(w @ v))


@variant()
def gaussian_kernel(q, k, v):
    d2 = ((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1)
    return softmax(-d2 / (2 * math.sqrt(q.shape[-1]))) @ v


@fault("scale", *X)
class NamesNothing(nn.Module):
    def __init__(self):
        self.a, self.b, self.c, self.d = (nn.Linear(12, 12, rng=i) for i in range(4))
        self.h = 3

    def forward(self, x):
        q, k, v = (nn.split_heads(f(x), self.h) for f in (self.a, self.b, self.c))
        return self.d(nn.join_heads(ops.softmax(ops.where(nn.causal(x.shape[-2]), q @ k.mT, -np.inf)) @ v))


# --------------------------------------------------------------------------------------------------------------------
# Siblings of the faults above, in places where a formula is not known or a mask hides the difference


class AlibiModule(PlainModule):
    """ALiBi with slopes of its own in each head."""

    def slopes(self):
        return 2.0 ** (-8.0 * np.arange(1, 4) / 3)

    def weigh(self, q, k, key_allow):
        n, m = q.shape[-2], k.shape[-2]
        distance = np.arange(m - n, m)[:, None] - np.arange(m)
        bias = (-self.slopes()[:, None, None] * distance).astype(q.dtype)
        allow = nn.allow_past(q, k, key_allow)
        scores = self.score(q, k, bias)
        return ops.softmax(scores if allow is None else ops.where(allow, scores, -np.inf))

    def score(self, q, k, bias):
        return q @ k.mT / q.shape[-1] ** 0.5 + bias


variant(*X)(AlibiModule)


@fault("positions.*sign.*far", *X)
class AlibiModulePrefersTheFar(AlibiModule):
    def slopes(self):
        return -super().slopes()


@fault("positions.*slopes.*order", *X)
class AlibiSlopesReversed(AlibiModule):
    def slopes(self):
        return nn.positions.alibi_slopes(3)[::-1]


@fault("positions.*before the division", *X)
class AlibiAddedBeforeTheScale(AlibiModule):
    def slopes(self):
        return nn.positions.alibi_slopes(3)

    def score(self, q, k, bias):
        return (q @ k.mT + bias) / q.shape[-1] ** 0.5


@fault("scale: the scores are not divided", *X)
class AlibiWithoutScale(AlibiModule):
    def score(self, q, k, bias):
        return q @ k.mT + bias


@fault("heads.*(copied|another head)", *X)
class CopiesTheFirstHead(PlainModule):
    def join(self, z):
        return super().join(ops.concat(*[z[..., :1, :, :]] * 3, axis=-3))


@fault("heads.*(copied|another head)", *X)
class CopiesTheSecondHead(PlainModule):
    def join(self, z):
        return super().join(ops.concat(*[z[..., 1:2, :, :]] * 3, axis=-3))


@fault("heads.*(copied|another head)", *X)
class CopiesAHeadOfALinearAttention(PlainModule):
    def weigh(self, q, k, key_allow):
        allow = nn.allow_past(q, k, key_allow)
        weights = ops.sigmoid(q @ k.mT / q.shape[-1] ** 0.5)
        return weights if allow is None else ops.where(allow, weights, 0.0)

    def join(self, z):
        return super().join(ops.concat(*[z[..., :1, :, :]] * 3, axis=-3))


@fault("heads.*another head", (3, 5, 7), (3, 5, 7), (3, 5, 7))
def one_head_for_all(q, k, v):
    y = softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v
    return np.broadcast_to(y[..., :1, :, :], y.shape).copy() if y.ndim > 2 else y


@fault("heads.*reverse", *X)
class JoinsInReverse(PlainModule):
    def join(self, z):
        return super().join(z[..., ::-1, :, :])


@fault("softmax.*sum", *X)
class ForgetsTheSum(PlainModule):
    def weigh(self, q, k, key_allow):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        allow = nn.allow_past(q, k, key_allow)
        return ops.exp(scores) * (1.0 if allow is None else allow.astype(scores.dtype))


@fault("softmax.*set to 0", causal=True)
def scores_times_mask(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return softmax(scores * np.tri(n, m, m - n, dtype=q.dtype)) @ v


@fault("constant|finite")
def scaled_after_the_mask(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    scores = np.where(np.tri(n, m, m - n, dtype=bool), q @ k.swapaxes(-1, -2), -1e4) / math.sqrt(q.shape[-1])
    return softmax(scores) @ v


@fault("padding", *X)
class HidesQueriesThatArePadding(PlainModule):
    """The padding mask is on the axis of the queries."""

    def weigh(self, q, k, key_allow):
        n, m = q.shape[-2], k.shape[-2]
        allow = np.tri(n, m, m - n, dtype=bool)
        if key_allow is not None:
            allow = allow & key_allow[:, None, -n:, None]
        return ops.softmax(ops.where(allow, q @ k.mT / q.shape[-1] ** 0.5, -np.inf))


@fault("padding", *X)
class HidesThePaddingOfTheFirstRowOnly(PlainModule):
    """The padding mask is on the axis of the heads: with as many rows as heads it fits."""

    def weigh(self, q, k, key_allow):
        n, m = q.shape[-2], k.shape[-2]
        allow = np.tri(n, m, m - n, dtype=bool)
        if key_allow is not None:
            allow = allow & np.concatenate([key_allow, np.ones_like(key_allow).repeat(3, 0)])[:3][None, :, None, :]
        return ops.softmax(ops.where(allow, q @ k.mT / q.shape[-1] ** 0.5, -np.inf))


@fault("positions.*other pairs", *X)
class RotatesOtherPairsOfKeys(Rotated):
    def project(self, x, positions):
        q, k, v = PlainModule.project(self, x, positions)
        order = [0, 2, 1, 3]  # neighbours become halves, and back
        return self.turn(q, positions), self.turn(k[..., order], positions)[..., order], v


@fault("positions.*frequencies", *X)
class RotatesWithHalfTheExponent(Rotated):
    def turn(self, z, positions, sign=1):
        d = z.shape[-1]
        angles = positions[..., None] * 10000.0 ** (-np.arange(d // 2) / d)
        if angles.ndim == 3:
            angles = angles[:, None]
        cos, sin = np.cos(angles).astype(z.dtype), np.sin(angles).astype(z.dtype)
        a, b = z[..., : d // 2], z[..., d // 2 :]
        return ops.concat(a * cos - b * sin, b * cos + a * sin, axis=-1)


@fault("positions.*only the queries", *X)
class RotatesQueriesOnly(Rotated):
    def project(self, x, positions):
        q, k, v = PlainModule.project(self, x, positions)
        return self.turn(q, positions), k, v


@fault("heads.*tiled", *X)
class TilesSharedKeys(PlainModule):
    n_head, n_kv_head = 4, 2

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(4)
        self.k_proj, self.v_proj = nn.Linear(12, 6, rng=rng), nn.Linear(12, 6, rng=rng)

    def project(self, x, positions):
        q = self.split(self.q_proj(x))
        k, v = (z.reshape(*z.shape[:-1], 2, -1).swapaxes(-2, -3) for z in (self.k_proj(x), self.v_proj(x)))
        return q, *(ops.concat(z, z, axis=-3) for z in (k, v))

    def forward(self, x, key_allow=None):
        return super().forward(x, None, None, key_allow)


@fault("float16")
def through_float16(q, k, v):
    half = (z.astype(np.float16).astype(z.dtype) for z in (q, k))
    q, k = half
    return softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v


@fault("float16")
def float16_for_float32_only(q, k, v):
    """The path of a mixed precision that nobody asked for."""
    dtype = q.dtype
    if dtype == np.float32:
        q, k, v = (z.astype(np.float16) for z in (q, k, v))
    return (softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v).astype(dtype)


@fault("in place", *X)
class AddsToItsInput(PlainModule):
    def forward(self, x, cache=None, positions=None, key_allow=None):
        y = super().forward(x, cache, positions, key_allow)
        x.data[...] = x.data + 1.0
        return y


KEPT: dict[Any, np.ndarray] = {}


@fault("k is not used")
def remembers_the_keys_of_a_shape(q, k, v):
    k = KEPT.setdefault((k.shape, k.dtype), k)
    return softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v


@fault("batch", *X)
class BiasOverTheBatch(PlainModule):
    """A bias for each head stands on the axis of the batch: with as many rows as heads it fits."""

    def weigh(self, q, k, key_allow):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        bias = (np.arange(3.0)[:, None, None] * np.arange(k.shape[-2])).astype(q.dtype)
        scores = scores + (bias[:, None] if scores.ndim == 4 and len(scores) == 3 else bias)
        allow = nn.allow_past(q, k, key_allow)
        return ops.softmax(scores if allow is None else ops.where(allow, scores, -np.inf))


@fault("all rows of the result are the same", *X)
class LastTokenOnly(PlainModule):
    """Each row is that of the last token."""

    def forward(self, x, cache=None, positions=None, key_allow=None):
        y = super().forward(x, cache, positions, key_allow)
        return ops.concat(*[y[..., -1:, :]] * y.shape[-2], axis=-2)


@fault("window", *X)
class WindowOfOneLess(PlainModule):
    window = 3

    def weigh(self, q, k, key_allow):
        allow = nn.allow_past(q, k, key_allow, self.window - 1)
        return ops.softmax(ops.where(allow, q @ k.mT / q.shape[-1] ** 0.5, -np.inf))


@fault("window", *X)
class IgnoresItsWindow(PlainModule):
    window = 3


@fault("scale: .*all columns", *X)
class PerHeadScaledByModelWidth(nn.Module):
    """A list of heads with matrices of their own, as in tutorials."""

    class Head(nn.Module):
        def __init__(self, rng):
            self.query, self.key, self.value = (nn.Linear(12, 4, bias=False, rng=rng) for _ in range(3))

        def forward(self, x):
            q, k, v = self.query(x), self.key(x), self.value(x)
            scores = q @ k.mT * x.shape[-1] ** -0.5
            return ops.softmax(ops.where(nn.causal(x.shape[-2]), scores, -np.inf)) @ v

    def __init__(self):
        rng = np.random.default_rng(6)
        self.heads = [self.Head(rng) for _ in range(3)]
        self.proj = nn.Linear(12, 12, rng=rng)

    def forward(self, x):
        return self.proj(ops.concat(*[head(x) for head in self.heads], axis=-1))


@variant(*X)
class PerHead(PerHeadScaledByModelWidth):
    class Head(PerHeadScaledByModelWidth.Head):
        def forward(self, x):
            q, k, v = self.query(x), self.key(x), self.value(x)
            return ops.softmax(ops.where(nn.causal(x.shape[-2]), q @ k.mT * 0.5, -np.inf)) @ v


@variant(*X)
class TalkingHeads(PlainModule):
    """The weights of all heads are mixed (arXiv:2003.02436)."""

    def __init__(self):
        super().__init__()
        self.mix = tg.Tensor(np.random.default_rng(5).standard_normal((3, 3)), requires_grad=True)

    def weigh(self, q, k, key_allow):
        weights = super().weigh(q, k, key_allow)
        return ops.einsum("gh,...hij->...gij", self.mix.astype(weights.dtype), weights)


def make_wrong_softmax():
    """A primitive whose rule leaves out the sum over the row."""
    before = dict(ops.REGISTRY)

    @ops.primitive
    def wrong_softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    wrong_softmax.vjps(lambda g, y, x: g * y)
    ops.REGISTRY.clear()
    ops.REGISTRY.update(before)
    return wrong_softmax


wrong_softmax = make_wrong_softmax()


@fault("gradient")
def softmax_with_a_wrong_derivative(q, k, v):
    return wrong_softmax(q @ k.mT / q.shape[-1] ** 0.5) @ v


# --------------------------------------------------------------------------------------------------------------------
# Other numbers in the formula, another matrix, another order; and correct attentions that look like these


class Rerotated(PlainModule):
    """Rotary positions with a base that the class may state, of queries and of keys."""

    base_q = base_k = 10000.0

    def turn(self, z, positions, base):
        d = z.shape[-1] // 2
        angles = positions[..., None] * base ** (-np.arange(d) / d)
        angles = angles[:, None] if angles.ndim == 3 else angles
        cos, sin = np.cos(angles).astype(z.dtype), np.sin(angles).astype(z.dtype)
        a, b = z[..., :d], z[..., d:]
        return ops.concat(a * cos - b * sin, b * cos + a * sin, axis=-1)

    def project(self, x, positions):
        q, k, v = super().project(x, positions)
        return self.turn(q, self.place(positions, x), self.base_q), self.turn(k, positions, self.base_k), v

    def place(self, positions, x):
        return positions

    def forward(self, x, cache=None, positions=None, key_allow=None):
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = np.arange(start, start + x.shape[-2])
        return super().forward(x, cache, positions, key_allow)


@variant(*X)
class RotatesWithItsOwnBase(Rerotated):
    base_q = base_k = 500.0


@fault("positions: the base of the rotation is 1000", *X)
class RotatesWithAnotherBaseThanItStates(Rerotated):
    rope_theta = 10000.0
    base_q = base_k = 1000.0


@fault("positions: keys are rotated with the base 500", *X)
class RotatesKeysWithAnotherBase(Rerotated):
    base_k = 500.0


@fault("position", *X)
class RotatesNewQueriesFromZero(Rerotated):
    def place(self, positions, x):
        return np.arange(x.shape[-2])


@fault("scale: .*not by the same in all heads", *X)
class ForgetsTheScaleOfOneHead(PlainModule):
    def weigh(self, q, k, key_allow):
        return super().weigh(q * np.array([1.0, 2.0, 1.0], q.dtype)[:, None, None], k, key_allow)


@fault("scale: .*d_model", *X)
class DividesByTheWidthOfTheModel(PlainModule):
    def weigh(self, q, k, key_allow):
        return super().weigh(q / 6, k, key_allow)


@fault("softmax: the weights of a query sum to 0.9", *X)
class ScalesTheWeightsInEval(PlainModule):
    def weigh(self, q, k, key_allow):
        return super().weigh(q, k, key_allow) * 0.9


@fault("softmax: the weights are the logarithm")
def logarithm_of_softmax(q, k, v):
    return np.log(softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))) @ v


@fault("each other")
def relu_divided_by_the_sum_over_queries(q, k, v):
    weights = np.maximum(q @ k.swapaxes(-1, -2), 0)
    return weights / (weights.sum(-2, keepdims=True) + 1e-6) @ v


@fault("norms: only queries", *X)
class NormalisesQueriesOnly(PlainModule):
    def weigh(self, q, k, key_allow):
        return super().weigh(q / ((q * q).mean(axis=-1, keepdims=True) + 1e-6) ** 0.5, k, key_allow)


@fault("diagonal")
def hides_the_diagonal(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    n, m = scores.shape[-2:]
    return softmax(np.where(np.eye(n, m, m - n, dtype=bool), -np.inf, scores)) @ v


@fault("causality: .*itself", *X)
class HidesItselfButForTheFirst(PlainModule):
    def weigh(self, q, k, key_allow):
        n, m = q.shape[-2], k.shape[-2]
        allow = np.tri(n, m, m - n - 1, dtype=bool)
        allow[:, 0] = True
        return ops.softmax(ops.where(allow, q @ k.mT / q.shape[-1] ** 0.5, -np.inf))

    def forward(self, x):
        return super().forward(x)


@fault("roles: .*transposed", *X)
class TransposesTheOutputMatrix(PlainModule):
    def forward(self, x, key_allow=None):
        q, k, v = self.project(x, None)
        return self.join(self.weigh(q, k, key_allow) @ v) @ self.o_proj.weight.mT + self.o_proj.bias


@fault("heads: the weights of the heads are averaged", *X)
class AveragesTheWeights(PlainModule):
    def weigh(self, q, k, key_allow):
        weights = super().weigh(q, k, key_allow)
        return weights.mean(axis=-3, keepdims=True) + 0.0 * weights


@fault("heads: .*alternating", *X)
class SplitsAlternatingColumns(PlainModule):
    def split(self, z):
        return z.reshape(*z.shape[:-1], -1, self.n_head).swapaxes(-1, -2).swapaxes(-2, -3)


@fault("heads: keys of the first head", *X)
class UsesTheKeysOfTheFirstHead(PlainModule):
    def weigh(self, q, k, key_allow):
        return super().weigh(q, ops.concat(*[k[..., :1, :, :]] * 3, axis=-3), key_allow)


@fault("heads: .*another order", *X)
class JoinsTheFirstHeadLast(PlainModule):
    def join(self, z):
        return super().join(ops.concat(z[..., 1:, :, :], z[..., :1, :, :], axis=-3))


@fault("padding", *X)
class HidesPaddingFromTheFirstHeadOnly(PlainModule):
    def weigh(self, q, k, key_allow):
        n, m = q.shape[-2], k.shape[-2]
        allow = np.tri(n, m, m - n, dtype=bool)
        if key_allow is not None:
            allow = allow & (key_allow[:, None, None, :] | (np.arange(3) > 0)[:, None, None])
        return ops.softmax(ops.where(allow, q @ k.mT / q.shape[-1] ** 0.5, -np.inf))


@fault("cache: trimmed", *X)
class KeepsTheLastThree(PlainModule):
    def remember(self, cache, k, v):
        k, v = cache.append(k, v)
        return k[..., -3:, :], v[..., -3:, :]

    def weigh(self, q, k, key_allow):
        return super().weigh(q, k, None if key_allow is None else key_allow[..., -k.shape[-2] :])


@fault("softmax: .*over the heads", *X, causal=True)
class SoftmaxOverTheHeads(PlainModule):
    def weigh(self, q, k, key_allow):
        n, m = q.shape[-2], k.shape[-2]
        allow = np.tri(n, m, m - n) if key_allow is None else np.tri(n, m, m - n) * key_allow[:, None, None, :]
        return ops.softmax(q @ k.mT / q.shape[-1] ** 0.5, axis=-3) * allow.astype(q.dtype)


@fault("residual: .* 2 times", *X)
class AddsTheInputTwice(PlainModule):
    def forward(self, x, cache=None, positions=None, key_allow=None):
        return super().forward(x, cache, positions, key_allow) + 2.0 * x


@fault("heads: queries of another head", *X)
class MatchesQueriesWithOtherHeads(PlainModule):
    def weigh(self, q, k, key_allow):
        return super().weigh(ops.concat(q[..., 1:, :, :], q[..., :1, :, :], axis=-3), k, key_allow)


@fault("heads: this head adds nothing", *X)
class ForgetsTheLastHead(PlainModule):
    def weigh(self, q, k, key_allow):
        return super().weigh(q, k, key_allow) * np.array([1, 1, 0], q.dtype)[:, None, None]


@fault("scale: .*multiplied by d_k")
def multiplied_by_d(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2) * q.shape[-1]) @ v


@fault("padding: .*constant")
def padding_lowered_by_1e3(q, k, v, key_allow=None):
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return softmax(scores if key_allow is None else scores - (~key_allow[0] * 1e3).astype(q.dtype)) @ v


# --------------------------------------------------------------------------------------------------------------------
# Written later than the checks, to see what a stranger's faults are called


@fault("positions: .*sign in head 1", *X)
class AlibiPrefersTheFarInOneHead(AlibiModule):
    def slopes(self):
        return super().slopes() * np.array([1, -1, 1])


@fault("softmax: a mask of 0 and -1e9 is added to the weights")
def mask_added_after_softmax(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    weights = softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))
    return (weights + np.where(np.tri(n, m, m - n, dtype=bool), 0, -1e9).astype(q.dtype)) @ v


@fault("softmax: a mask of 0 and 1 is added to the scores")
def mask_of_0_and_1_added(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    return softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + np.tri(n, m, m - n, dtype=q.dtype)) @ v


@fault("mask: hidden scores are set to 0")
def scores_times_the_mask_given(q, k, v, mask=None):
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return softmax(scores if mask is None else scores * mask) @ v


@fault("scale: the weights are divided by sqrt.* after the softmax", *X)
class DividesAfterTheSoftmax(PlainModule):
    def weigh(self, q, k, key_allow):
        root = q.shape[-1] ** 0.5
        return super().weigh(q * root, k, key_allow) / root


@fault("scale: .*all columns", *X)
class ScaledByTheRootOfTheModelWidth(PlainModule):
    def weigh(self, q, k, key_allow):
        return super().weigh(q / 3**0.5, k, key_allow)


@fault("cache: position off by one", *X)
class PutsNewTokensOneTooFar(Rotated):
    def forward(self, x, cache=None, positions=None, key_allow=None):
        if cache is not None and cache.length:
            positions = np.arange(cache.length, cache.length + x.shape[-2]) + 1
        return super().forward(x, cache, positions, key_allow)


@fault("cache: position off by one.*queries alone", *X)
class PutsNewQueriesOneTooNear(Rotated):
    def project(self, x, positions):
        q, k, v = PlainModule.project(self, x, positions)
        return self.turn(q, positions - (np.min(positions) > 0)), self.turn(k, positions), v


@fault("cache: .*value of the newest", *X)
class CachesTheLastValueLate(PlainModule):
    def remember(self, cache, k, v):
        n = k.shape[-2]
        k, v = super().remember(cache, k, v)
        return k, v if v.shape[-2] == n else ops.concat(v[..., :-1, :], v[..., -2:-1, :], axis=-2)


@fault("heads: shared values are tiled", (4, 5, 6), (2, 5, 6), (2, 5, 7))
def shared_values_tiled(q, k, v):
    n = q.shape[-3] // k.shape[-3]
    weights = softmax(q @ np.repeat(k, n, axis=-3).swapaxes(-1, -2) / math.sqrt(q.shape[-1]))
    return weights @ np.concatenate([v] * n, axis=-3)


@fault("heads: .*keys of another group", (4, 5, 6), (2, 5, 6), (2, 5, 7))
def shared_values_tiled_behind_other_weights(q, k, v):
    n = q.shape[-3] // k.shape[-3]
    weights = np.maximum(q @ np.repeat(k, n, axis=-3).swapaxes(-1, -2), 0)
    return weights @ np.concatenate([v] * n, axis=-3)


@fault("gradients: v_proj.weight: .*does not reach", *X)
class DetachesValues(PlainModule):
    def project(self, x, positions):
        q, k, v = super().project(x, positions)
        return q, k, v.detach()


@fault("gradients: v_proj.* is not used", *X)
class UsesKeysAsValues(PlainModule):
    def project(self, x, positions):
        q, k, _ = super().project(x, positions)
        return q, k, k


@fault("padding: the mask is applied after the softmax", *X)
class HidesPaddingAfterTheSoftmax(PlainModule):
    def weigh(self, q, k, key_allow):
        weights = super().weigh(q, k, None)
        return weights if key_allow is None else weights * key_allow[:, None, None, :].astype(weights.dtype)


@fault("determinism: .*dropout", *X)
class DropsItsOutputInEval(PlainModule):
    def __init__(self):
        super().__init__()
        self.mask_rng = np.random.default_rng(0)

    def forward(self, x, cache=None, positions=None, key_allow=None):
        y = super().forward(x, cache, positions, key_allow)
        return y * (self.mask_rng.random(y.shape) < 0.9).astype(y.dtype)


@variant(*X, causal=False)
class Prefix(PlainModule):
    """The first three tokens see each other."""

    def forward(self, x):
        q, k, v = self.project(x, None)
        n = x.shape[-2]
        allow = np.tri(n, dtype=bool) | (np.arange(n) < 3) & (np.arange(n)[:, None] < 3)
        return self.o_proj(self.join(ops.softmax(ops.where(allow, q @ k.mT / 2, -np.inf)) @ v))


@variant(*X)
class BucketsWithoutScale(PlainModule):
    """A learned bias for each distance and head, and no scale, as in T5."""

    def __init__(self):
        super().__init__()
        self.table = tg.Tensor(np.random.default_rng(0).standard_normal((4, 3)), requires_grad=True)

    def weigh(self, q, k, key_allow):
        n, m = q.shape[-2], k.shape[-2]
        distance = np.clip(np.arange(m - n, m)[:, None] - np.arange(m), 0, 3)
        scores = q @ k.mT + self.table[distance].transpose((2, 0, 1)).astype(q.dtype)
        allow = nn.allow_past(q, k, key_allow)
        return ops.softmax(scores if allow is None else ops.where(allow, scores, -np.inf))


@variant(*X)
class ReluWeights(PlainModule):
    """In some heads the first token sees nothing."""

    def weigh(self, q, k, key_allow):
        allow = nn.allow_past(q, k, key_allow)
        weights = ops.relu(q @ k.mT / q.shape[-1] ** 0.5)
        return weights if allow is None else ops.where(allow, weights, 0.0)


@variant(*X)
class NormalisesQueriesAndKeys(PlainModule):
    """RMS norms and a learned temperature of each head."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)
        self.temperature = tg.Tensor(np.array([[[1.0]], [[2.0]], [[3.0]]]), requires_grad=True)

    def weigh(self, q, k, key_allow):
        return super().weigh(self.q_norm(q) * self.temperature.astype(q.dtype), self.k_norm(k), key_allow)


@variant(*X)
class LatentKeys(PlainModule):
    """Keys and values from one latent vector of each token (multi-head latent attention)."""

    def __init__(self):
        super().__init__()
        self.down, self.k_proj, self.v_proj = nn.Linear(12, 5, rng=3), nn.Linear(5, 12, rng=4), nn.Linear(5, 12, rng=5)

    def project(self, x, positions):
        latent = self.down(x)
        return self.split(self.q_proj(x)), self.split(self.k_proj(latent)), self.split(self.v_proj(latent))


@variant(*X)
class Retention(PlainModule):
    """Scores that decay with the distance, without a softmax (arXiv:2307.08621)."""

    def weigh(self, q, k, key_allow):
        n, m = q.shape[-2], k.shape[-2]
        distance = np.arange(m - n, m)[:, None] - np.arange(m)
        decay = np.array([0.9, 0.8, 0.7])[:, None, None] ** np.maximum(distance, 0) * (distance >= 0)
        if key_allow is not None:
            decay = decay * key_allow[:, None, None, :]
        return q @ k.mT / q.shape[-1] ** 0.5 * decay.astype(q.dtype)


@variant(*X)
class LocalAndGlobalHeads(PlainModule):
    def weigh(self, q, k, key_allow):
        n, m = q.shape[-2], k.shape[-2]
        distance = np.arange(m - n, m)[:, None] - np.arange(m)
        allow = (distance >= 0) & np.stack([distance < 3, distance < 99, distance < 99])
        if key_allow is not None:
            allow = allow & key_allow[:, None, None, :]
        return ops.softmax(ops.where(allow, q @ k.mT / q.shape[-1] ** 0.5, -np.inf))


@variant()
def sparsemax(q, k, v):
    """The projection of the scores onto the simplex (arXiv:1602.02068)."""
    n, m = q.shape[-2], k.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    scores = np.where(np.tri(n, m, m - n, dtype=bool), scores - scores.max(-1, keepdims=True), -np.inf)
    ranked = -np.sort(-scores, axis=-1)
    sums = np.cumsum(ranked, axis=-1)
    count = (1 + np.arange(1, m + 1) * ranked > sums).sum(-1, keepdims=True)
    threshold = (np.take_along_axis(sums, count - 1, -1) - 1) / count.astype(q.dtype)
    return np.maximum(scores - threshold, 0) @ v


# --------------------------------------------------------------------------------------------------------------------
# Modules of torch, where it is installed

try:
    import torch
except ImportError:
    torch = None

if torch is not None:
    functional = torch.nn.functional

    @variant()
    def torch_sdpa(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v)

    @variant((2, 7, 12))
    class NanoGPTs(torch.nn.Module):
        """The attention of nanoGPT."""

        def __init__(self, n_embd=12, n_head=3, block_size=32):
            super().__init__()
            torch.manual_seed(0)
            self.c_attn = torch.nn.Linear(n_embd, 3 * n_embd)
            self.c_proj = torch.nn.Linear(n_embd, n_embd)
            self.n_head, self.n_embd = n_head, n_embd
            mask = torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size)
            self.register_buffer("bias", mask)

        def heads(self, z, B, T):
            return z.view(B, T, self.n_head, self.n_embd // self.n_head).transpose(1, 2)

        def scores(self, q, k):
            return (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))

        def hide(self, att):
            T = att.size(-1)
            return att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            q, k, v = self.heads(q, B, T), self.heads(k, B, T), self.heads(v, B, T)
            att = functional.softmax(self.hide(self.scores(q, k)), dim=-1)
            y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
            return self.c_proj(y)

    @fault("reshape|transpose", (2, 7, 12))
    class NanoGPTSplitByView(NanoGPTs):
        def heads(self, z, B, T):
            return z.contiguous().view(B, self.n_head, T, self.n_embd // self.n_head)

    @fault("scale", (2, 7, 12))
    class NanoGPTWithoutScale(NanoGPTs):
        def scores(self, q, k):
            return q @ k.transpose(-2, -1)

    @fault("next|off by one", (2, 7, 12))
    class NanoGPTSeesTheNext(NanoGPTs):
        def hide(self, att):
            T = att.size(-1)
            return att.masked_fill(torch.triu(torch.ones(T, T), diagonal=2) == 1, float("-inf"))

    @fault("(?i)drop|same twice|random|determin", (2, 7, 12))
    class NanoGPTDropsInEval(NanoGPTs):
        def hide(self, att):
            return functional.dropout(super().hide(att), p=0.1)  # training=True is the default of the function

    @fault("gradients: .*detach", (2, 7, 12))
    class NanoGPTDetachesTheScores(NanoGPTs):
        def scores(self, q, k):
            return super().scores(q.detach(), k)

    @fault("dtype: .*float32", (2, 7, 12))
    class NanoGPTInFloat32(NanoGPTs):
        def scores(self, q, k):
            return super().scores(q.float(), k.float()).to(q.dtype)

    @variant((2, 7, 12))
    class TorchLlamaLike(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.wq, self.wo = (torch.nn.Linear(12, 12, bias=False) for _ in range(2))
            self.wkv = torch.nn.Linear(12, 8, bias=False)

        def forward(self, x):
            B, T, C = x.shape
            q = self.wq(x).view(B, T, 3, 4).transpose(1, 2)
            k, v = self.wkv(x).view(B, T, 2, 1, 4).unbind(2)
            k, v = (z.transpose(1, 2).expand(B, 3, T, 4) for z in (k, v))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.wo(y.transpose(1, 2).reshape(B, T, C))


# --------------------------------------------------------------------------------------------------------------------
# A softmax that is left out, or normalised in another way


def scaled(q, k):
    return q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5


def hide_later(scores, fill=-np.inf):
    n, m = scores.shape[-2:]
    return np.where(np.tri(n, m, m - n, dtype=bool), scores, scores.dtype.type(fill))


@fault("softmax: the sum of the weights lacks keepdims=True")
def sum_without_keepdims(q, k, v):
    weights = np.exp(scaled(q, k))
    weights = weights / weights.sum(axis=-1)
    return weights @ v


@fault("softmax: the sum of the weights lacks keepdims=True", *((1, 5, 3), (1, 5, 3), (1, 5, 2)))
def sum_without_keepdims_of_a_batch_of_one(q, k, v):
    weights = np.exp(scaled(q, k))
    return weights / weights.sum(axis=-1) @ v


@fault("softmax: the sum of the weights lacks keepdims=True", causal=True)
def masked_sum_without_keepdims(q, k, v):
    scores = hide_later(scaled(q, k))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1)
    return weights @ v


@fault("softmax: the largest score of another row is subtracted")
def maximum_without_keepdims(q, k, v):
    scores = scaled(q, k)
    weights = np.exp(scores - scores.max(axis=-1))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


@fault("softmax: there is no softmax", causal=True)
def masked_scores_as_weights(q, k, v):
    return hide_later(scaled(q, k), 0.0) @ v


@fault("softmax: the weights are not divided by their sum", causal=True)
def exp_without_division(q, k, v):
    scores = hide_later(scaled(q, k))
    return np.exp(scores - scores.max(axis=-1, keepdims=True)) @ v


@fault(r"softmax: the weights are divided by their sum over the queries \(axis -2\)")
def sum_over_queries(q, k, v):
    scores = scaled(q, k)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(-2, keepdims=True) @ v


@fault("softmax: the weights are divided by the sum of all weights")
def sum_of_all(q, k, v):
    weights = np.exp(scaled(q, k))
    return weights / weights.sum() @ v


@fault("overflow: a row is not finite beside other rows")
def maximum_of_all_scores(q, k, v):
    scores = scaled(q, k)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum(axis=-1, keepdims=True) @ v


@fault("causality: the result is 0 everywhere")
def zeros(q, k, v):
    return np.zeros((*q.shape[:-1], v.shape[-1]), v.dtype)


@variant(*X)
class LinearAttentionWithTwoFeatureMaps(nn.Module):
    def __init__(self):
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(12, 12, rng=i) for i in range(4))

    def forward(self, x):
        q, k = ops.sigmoid(self.wq(x)) + 0.1, ops.relu(self.wk(x))
        weights = q @ k.mT * np.tri(x.shape[-2], dtype=x.dtype)
        return self.wo(weights / (weights.sum(axis=-1, keepdims=True) + 1e-12) @ self.wv(x))


@variant()
def linear_attention_with_two_feature_maps(q, k, v):
    weights = hide_later((np.maximum(q, 0) + 1) @ np.maximum(k, 0).swapaxes(-1, -2), 0.0)
    return weights / (weights.sum(axis=-1, keepdims=True) + q.dtype.type(1e-12)) @ v
