"""Attention as a function of visible steps, and multi-head attention with every width free.

Axes: B batch, H heads, T_q queries, T_k keys. One polarity everywhere: `allow` is True where a query may attend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha import modes, ops
from tinygrad_mha.arguments import check_count, check_probability, check_width
from tinygrad_mha.nn.cache import CachedLayer, KVCache
from tinygrad_mha.nn.layers import Seed, constant, keep_mask, normal
from tinygrad_mha.nn.module import Module
from tinygrad_mha.nn.positions import alibi, rotary
from tinygrad_mha.tensors import Tensor, as_tensor, plain

FORMS = (
    "Accepted are allow: boolean, True = may attend, of shape (T_q, T_k), (B, T_q, T_k) or (B, H, T_q, T_k); "
    "key_allow: boolean, of shape (B, T_k); bias: float, added to the scaled scores, in one of the shapes of allow"
)

Edit = Callable[[str, Tensor], Tensor]


class AttentionTrace(NamedTuple):
    """What attention computed on its way, as tensors whose `.grad` can be read after a backward."""

    q: Tensor  # (..., T_q, d_k)
    k: Tensor  # (..., T_k, d_k)
    v: Tensor  # (..., T_k, d_v)
    scores: Tensor  # (..., T_q, T_k): q k^T, scaled
    masked: Tensor  # the scores with bias, and -inf where nothing may be seen: what the softmax is taken of
    weights: Tensor  # after the softmax: every row sums to 1, or is 0 where nothing may be seen
    heads: Tensor  # (..., T_q, d_v)
    concat: Tensor | None = None  # (..., T_q, H d_v): the heads side by side; of `attention` itself None


def causal(n_q: int, n_k: int | None = None) -> np.ndarray:
    """Which keys a query may see when it may not look ahead: boolean (n_q, n_k), True = may attend.

    With more keys than queries the queries are the last ones: the last query sees every key.

    Example:
        >>> causal(2, 4).astype(int)
        array([[1, 1, 1, 0],
               [1, 1, 1, 1]])
    """
    n_k = n_q if n_k is None else n_k
    if n_k < n_q:
        raise ValueError(f"a causal mask wants at least as many keys as queries, got {n_q} queries and {n_k} keys")
    return np.tri(n_q, n_k, n_k - n_q, dtype=bool)


def attention(
    q: Any,
    k: Any,
    v: Any,
    allow: Any = None,
    key_allow: Any = None,
    bias: Any = None,
    scale: float | None = None,
    keep: Any = None,
    trace: bool = False,
) -> Any:
    """softmax(q k^T * scale) v (arXiv:1706.03762, equation 1), in visible steps.

    Args:
        q, k, v: (..., T_q, d_k), (..., T_k, d_k), (..., T_k, d_v), with (), (B,) or (B, H) in front; with more axes in
            front `allow` has two.
        allow: boolean, True = may attend: (T_q, T_k), (B, T_q, T_k) or (B, H, T_q, T_k); B and H may be 1. A query that
            may see nothing gets zeros.
        key_allow: boolean (B, T_k), False for padding.
        bias: floats added to the scaled scores, in a shape of `allow`; a tensor receives its gradient.
        scale: d_k ** -0.5 unless given.
        keep: what the weights are multiplied by (dropout, drawn outside), broadcasting to (..., T_q, T_k).
        trace: also return an `AttentionTrace`.

    Returns:
        A tensor (..., T_q, d_v), or (tensor, trace).

    Raises:
        ValueError: shapes that do not fit.
        TypeError: an `allow` that is not boolean, or a `bias` that is not floating.

    Example:
        >>> values = np.arange(5.0)[:, None]
        >>> attention(np.zeros((1, 1)), np.zeros((5, 1)), values, allow=causal(1, 5)).item()
        2.0
    """
    q, k, v = as_tensor(q), as_tensor(k), as_tensor(v)
    front = check_operands(q, k, v)
    batch, heads = (*front, None, None)[:2] if len(front) <= 2 else (None, None)
    n_q, n_k = q.shape[-2], k.shape[-2]
    seen, bias = masks(allow, key_allow, bias, batch, heads, n_q, n_k)
    if keep is not None:
        keep = np.asarray(plain(keep))
        shape = (*front, n_q, n_k)
        try:
            np.broadcast_to(keep, shape)
        except ValueError:
            raise ValueError(f"keep must broadcast to the weights, {shape}, got {keep.shape}") from None
    steps = attend(q, k, v, seen, bias, keep, scale=scale)
    return (steps.heads, steps) if trace else steps.heads


def attend(
    q: Any,
    k: Any,
    v: Any,
    allow: np.ndarray | None,
    bias: Any,
    keep: np.ndarray | None,
    edit: Edit = lambda name, tensor: tensor,
    scale: float | None = None,
    share: int = 1,
) -> AttentionTrace:
    """The steps, on masks that broadcast to the scores already. `edit` sees each result, and what it returns goes on.

    `share` heads of queries use each head of keys and values.
    """
    q, k, v = edit("q", q), edit("k", k), edit("v", v)
    # Keys that no query may see are zeroed: a nan in padding must not reach 0 * nan.
    seen_k, seen_v = (ops.only_seen(repeat_heads(x, share), allow) for x in (k, v))
    scores = edit("scores", ops.scale(ops.matmul(q, seen_k.mT), by=q.shape[-1] ** -0.5 if scale is None else scale))
    masked = scores if bias is None else ops.add(scores, bias.astype(q.dtype))
    masked = edit("masked", masked if allow is None else ops.mask(masked, allow))
    weights = edit("weights", ops.softmax(masked))
    kept = weights if keep is None else ops.mul(weights, keep.astype(q.dtype))
    return AttentionTrace(q, k, v, scores, masked, weights, edit("heads", ops.matmul(kept, seen_v)))


def check_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The axes in front of (T, d), which q, k and v share by broadcasting."""
    shapes = f"got q {q.shape}, k {k.shape}, v {v.shape}"
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ValueError(f"attention wants q (..., T_q, d_k), k (..., T_k, d_k), v (..., T_k, d_v); {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same width d_k; {shapes}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have the same number of rows T_k; {shapes}")
    try:
        return np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    except ValueError:
        raise ValueError(f"the axes in front of (T, d) must agree; {shapes}") from None


# --------------------------------------------------------------------------------------------------------------------
# Masks


def masks(
    allow: Any, key_allow: Any, bias: Any, batch: int | None, heads: int | None, n_q: int, n_k: int
) -> tuple[np.ndarray | None, Any]:
    """`allow` and `key_allow` as one boolean array, and `bias`, both with axes that broadcast to the scores.

    `batch` and `heads` are the lengths of those axes of the scores, None where the scores have no such axis.
    """
    seen = None
    if allow is not None:
        allow = boolean(allow, "allow")
        seen = fitted(allow, "allow", batch, heads, n_q, n_k)
    if key_allow is not None:
        key_allow = boolean(key_allow, "key_allow")
        if key_allow.shape != (one(batch), n_k):
            raise ValueError(f"key_allow has shape {key_allow.shape}, expected (B, T_k) = {one(batch), n_k}. {FORMS}")
        keys = fitted(key_allow[:, None, :], "key_allow", batch, heads, 1, n_k)
        seen = keys if seen is None else seen & keys
    if bias is not None:
        if not isinstance(bias, Tensor):
            bias = np.asarray(bias)
        if bias.dtype.kind != "f":
            raise TypeError(f"bias must be floating, it is added to the scores; got {bias.dtype}. {FORMS}")
        bias = fitted(bias, "bias", batch, heads, n_q, n_k)
    return seen, bias


def boolean(mask: Any, name: str) -> np.ndarray:
    array = np.asarray(plain(mask))
    if array.dtype.kind == "b":
        return array
    reason = "is not boolean"
    if array.size and np.isin(array, (0, 1)).all():
        reason = "holds 0 and 1, which as scores to be added would hide nothing, and do not say which of the two hides"
    raise TypeError(f"{name} {reason}; got {array.dtype}: pass a comparison, {name}=(m > 0). {FORMS}")


def one(n: int | None) -> int:
    """The length of an axis; one that is not there has length 1."""
    return 1 if n is None else n


def fitted(mask: Any, name: str, batch: int | None, heads: int | None, n_q: int, n_k: int) -> Any:
    """A mask of 2, 3 or 4 axes with the axes that the scores have: those it lacks added, those they lack dropped."""
    shape = mask.shape
    front = {2: (1, 1), 3: (*shape[:1], 1), 4: shape[:2]}.get(len(shape), (-1, -1))
    if shape[-2:] != (n_q, n_k) or front[0] not in (1, one(batch)) or front[1] not in (1, one(heads)):
        axes = {"B": batch, "H": heads, "T_q": n_q, "T_k": n_k}
        lengths = ", ".join(f"{axis} = {n}" for axis, n in axes.items() if n is not None)
        raise ValueError(f"{name} has shape {shape}, which does not fit {lengths}. {FORMS}")
    if len(shape) == 2:
        return mask
    front = tuple(n for n, axis in zip(front, (batch, heads), strict=True) if axis is not None)
    return mask if shape == (*front, n_q, n_k) else ops.reshape(mask, shape=(*front, n_q, n_k))


# --------------------------------------------------------------------------------------------------------------------
# Heads


def split_heads(x: Tensor, n: int) -> Tensor:
    """(..., T, n d) -> (..., n, T, d): head i is columns i d to (i + 1) d."""
    return ops.swapaxes(ops.reshape(x, shape=(*x.shape[:-1], n, x.shape[-1] // n)), -2, -3)


def join_heads(x: Tensor) -> Tensor:
    """(..., H, T, d) -> (..., T, H d)."""
    x = ops.swapaxes(x, -2, -3)
    return ops.reshape(x, shape=(*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def repeat_heads(x: Any, times: int) -> Any:
    """(..., H, T, d) -> (..., H times, T, d): each head that many times in a row (queries that share keys)."""
    if times == 1:
        return x
    *front, heads, rows, width = x.shape
    x = ops.reshape(x, shape=(*front, heads, 1, rows, width))
    x = ops.broadcast_to(x, shape=(*front, heads, times, rows, width))
    return ops.reshape(x, shape=(*front, heads * times, rows, width))


class MultiHeadAttention(Module):
    """Several attentions side by side, each with matrices of its own, and one matrix that mixes what they found.

    Y = concat(H_1, ..., H_n) W_O with H_i = attention(X W_Qi, M W_Ki, M W_Vi) (arXiv:1706.03762, section 3.2.2). M is X
    or, in cross-attention, another sequence. The parameters wq, wk and wv hold the matrices of all heads side by side:
    W_Q1 is wq[:, 0:d_k].

    Args:
        d_model: the width of X.
        n_head: the number of heads.
        d_k: the width of a query and a key, d_model // n_head unless given.
        d_v: the width of a value, d_k unless given.
        d_out: the width of Y, d_model unless given.
        d_memory: the width of M, d_model unless given.
        n_kv_head: how many heads have keys and values of their own; `n_head // n_kv_head` heads of queries share each
            (arXiv:2305.13245). n_head unless given.
        bias: whether X W has a bias added (bq, bk, bv, bo).
        dropout: how much of the weights is dropped in training.
        position: None, "rotary" (Q and K are rotated, d_k must be even) or "alibi" (scores fall with distance).
        rng: a numpy Generator or a seed (None: any) of the initial weights; that of dropout is spawned from it.

    Raises:
        ValueError: a width that is no natural number, or `n_head` that is no multiple of `n_kv_head`.

    Example:
        >>> mha = MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, rng=0)
        >>> x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
        >>> y, trace = mha(x, causal=True, trace=True)
        >>> y.shape, trace.q.shape, trace.weights.shape, trace.concat.shape
        ((3, 5), (2, 3, 7), (2, 3, 3), (3, 22))
    """

    is_attention = True
    fused = False  # whether the steps between the projections are one node when nobody asks to see them
    always_causal = False

    def __init__(
        self,
        d_model: int,
        n_head: int,
        d_k: int | None = None,
        d_v: int | None = None,
        d_out: int | None = None,
        d_memory: int | None = None,
        n_kv_head: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        position: str | None = None,
        rng: Seed = None,
    ) -> None:
        self.d_model, self.n_head = check_count(d_model, "d_model"), check_count(n_head, "n_head")
        self.d_k = check_count(d_model // n_head if d_k is None else d_k, "d_k (d_model // n_head unless given)")
        self.d_v = check_count(self.d_k if d_v is None else d_v, "d_v")
        self.d_out = check_count(d_model if d_out is None else d_out, "d_out")
        self.d_memory = check_count(d_model if d_memory is None else d_memory, "d_memory")
        self.n_kv_head = check_count(n_head if n_kv_head is None else n_kv_head, "n_kv_head")
        if n_head % self.n_kv_head:
            raise ValueError(f"n_head must be a multiple of n_kv_head, got {n_head} and {self.n_kv_head}")
        if position not in (None, "rotary", "alibi"):
            raise ValueError(f"position must be None, 'rotary' or 'alibi', got {position!r}")
        if position == "rotary" and self.d_k % 2:
            raise ValueError(f"rotary positions rotate pairs, so d_k must be even, got {self.d_k}")
        self.detail = f"{self.n_head} head{'s' if self.n_head > 1 else ''}"
        self.position = position
        self.dropout = check_probability(dropout, "dropout")
        rng = np.random.default_rng(rng)
        self.rng = rng.spawn(1)[0]
        self.make_parameters(bias, rng)

    def make_parameters(self, bias: bool, rng: np.random.Generator) -> None:
        n, m = self.n_head, self.n_kv_head
        self.wq = normal((self.d_model, n * self.d_k), self.d_model**-0.5, rng, "W_Q")
        self.wk = normal((self.d_memory, m * self.d_k), self.d_memory**-0.5, rng, "W_K")
        self.wv = normal((self.d_memory, m * self.d_v), self.d_memory**-0.5, rng, "W_V")
        self.wo = normal((n * self.d_v, self.d_out), (n * self.d_v) ** -0.5, rng, "W_O")
        self.bq = constant((n * self.d_k,), 0.0, "b_Q") if bias else None
        self.bk = constant((m * self.d_k,), 0.0, "b_K") if bias else None
        self.bv = constant((m * self.d_v,), 0.0, "b_V") if bias else None
        self.bo = constant((self.d_out,), 0.0, "b_O") if bias else None

    def project(self, x: Any, memory: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (..., T_q, H d_k), keys (..., T_k, H_kv d_k) and values (..., T_k, H_kv d_v), heads side by side."""
        return (
            ops.linear(x, self.wq, self.bq),
            ops.linear(memory, self.wk, self.bk),
            ops.linear(memory, self.wv, self.bv),
        )

    def output(self, concat: Tensor) -> Tensor:
        """(..., T_q, H d_v) -> (..., T_q, d_out)."""
        return ops.linear(concat, self.wo, self.bo)

    def matrix(self, which: str, head: int) -> tuple[Tensor, Tensor | None]:
        """The matrix and bias of one head, `which` being "Q", "K" or "V": columns of the parameters, and named so."""
        weight, bias = {"Q": (self.wq, self.bq), "K": (self.wk, self.bk), "V": (self.wv, self.bv)}[which]
        return self.columns(which, head, weight, bias, 0)

    def columns(
        self, which: str, head: int, weight: Tensor, bias: Tensor | None, first: int
    ) -> tuple[Tensor, Tensor | None]:
        width = self.d_v if which == "V" else self.d_k
        at = slice(first + head * width, first + (head + 1) * width)
        return (
            weight[:, at].named(f"W_{which}{head + 1}"),
            None if bias is None else bias[at].named(f"b_{which}{head + 1}"),
        )

    def forward(
        self,
        x: Any,
        memory: Any = None,
        allow: Any = None,
        key_allow: Any = None,
        bias: Any = None,
        causal: bool = False,
        cache: KVCache | CachedLayer | None = None,
        positions: Any = None,
        trace: bool = False,
        edit: Edit | None = None,
    ) -> Any:
        """X (T_q, d_model) or (B, T_q, d_model) -> Y of the same shape with width d_out.

        Args:
            memory: what is attended to, (T_k, d_memory) or (B, T_k, d_memory); x itself unless given.
            allow, key_allow, bias: as in `attention`. With a cache, keys are those in the cache and then the new ones.
            causal: also allow no key that comes after the query.
            cache: a `KVCache` (or the layer `cache[i]` of one): the keys and values of x are appended to it, and all
                that it holds is attended to. Only with gradients off.
            positions: for rotary positions, where x stands: integers (T_q,) or (B, T_q). Unless given they continue
                after the cache.
            trace: also return an `AttentionTrace`.
            edit: called with the name of each field of the trace and its tensor; what it returns takes its place.

        Example:
            >>> mha = MultiHeadAttention(5, n_head=2, rng=0)
            >>> def without_head_0(name, t):
            ...     return t * np.array([0.0, 1.0])[:, None, None] if name == "heads" else t
            >>> mha(np.ones((3, 5)), edit=without_head_0).shape
            (3, 5)
        """
        x, memory, layer = self.checked(x, memory, cache, positions)
        start = 0 if layer is None else layer.length
        n_q, n_k = x.shape[-2], start + memory.shape[-2]
        allow, bias = self.constraints(x, allow, key_allow, bias, causal, n_k)

        q, k, v = self.project(x, memory)
        q, k, v = split_heads(q, self.n_head), split_heads(k, self.n_kv_head), split_heads(v, self.n_kv_head)
        if self.position == "rotary":
            places = np.arange(start, start + n_q) if positions is None else np.asarray(positions)
            q, k = rotary(q, places), rotary(k, places)
        if layer is not None:
            k, v = layer.append(k, v, snapshot=trace or edit is not None or modes.STATE.get().record)
        keep = self.drawn((*q.shape[:-1], n_k), q.dtype)
        share = self.n_head // self.n_kv_head

        if self.fused and not trace and edit is None:
            bias = None if bias is None else bias.astype(q.dtype)
            return self.output(
                join_heads(ops.attention(q, repeat_heads(k, share), repeat_heads(v, share), allow, bias, keep))
            )
        change = labelled(edit)
        steps = attend(q, k, v, allow, bias, keep, change, share=share)
        concat = change("concat", join_heads(steps.heads))
        y = self.output(concat).named("Y")
        return (y, steps._replace(concat=concat)) if trace else y

    def per_head(
        self,
        x: Any,
        memory: Any = None,
        allow: Any = None,
        key_allow: Any = None,
        bias: Any = None,
        causal: bool = False,
        positions: Any = None,
    ) -> Tensor:
        """The same numbers one head after the other, every matrix named: W_Q1, Q_1, K_1, V_1, scores_1, S_1, H_1, ...

        This is how the formula is written, and how it is best drawn. W_Q1 is a part of the parameter, so the gradient
        lands there. Arguments as in `forward`; equal to it up to rounding.
        """
        with modes.scope(self._scope()):
            x, memory, _ = self.checked(x, memory, None, positions)
            n_q, n_k = x.shape[-2], memory.shape[-2]
            allow, bias = self.constraints(x, allow, key_allow, bias, causal, n_k)
            places = np.arange(n_q) if positions is None else np.asarray(positions)
            keep = self.drawn((*x.shape[:-2], self.n_head, n_q, n_k), x.dtype)

            def project(which: str, head: int, rows: Tensor) -> Tensor:
                weight, b = self.matrix(which, head)
                y = rows @ weight if b is None else rows @ weight + b
                if self.position == "rotary" and which != "V":
                    y = rotary(y, places)
                return y.named(f"{which}_{head + 1}")

            # Keys and values that several heads of queries share belong to none of them.
            sharing = range(self.n_kv_head if self.n_kv_head < self.n_head else 0)
            keys, values = ([project(which, i, memory) for i in sharing] for which in "KV")
            heads = []
            for i in range(self.n_head):
                shared = i * self.n_kv_head // self.n_head
                with modes.scope(f"head {i + 1}"):
                    steps = attend(
                        project("Q", i, x),
                        keys[shared] if keys else project("K", i, memory),
                        values[shared] if values else project("V", i, memory),
                        of_head(allow, i),
                        of_head(bias, i),
                        of_head(keep, i),
                        labelled(None, f"_{i + 1}"),
                    )
                heads.append(steps.heads)
            return self.output(ops.concat(heads, axis=-1).named("Concat")).named("Y")

    def checked(
        self, x: Any, memory: Any, cache: KVCache | CachedLayer | None, positions: Any
    ) -> tuple[Tensor, Tensor, CachedLayer | None]:
        """The inputs as tensors and as the layer of the cache, or an error that says what does not fit."""
        x = as_tensor(x)
        if x.ndim not in (2, 3):
            raise ValueError(f"x must be (T_q, d_model) or (B, T_q, d_model), got shape {x.shape}")
        check_width(x, self.d_model, "MultiHeadAttention, x with d_model columns,")
        if self.always_causal and memory is not None:
            raise ValueError("this is causal self-attention, it takes no memory: use MultiHeadAttention")
        if memory is None:
            memory = x
            if self.d_memory != self.d_model:
                raise ValueError(f"self-attention needs d_memory = d_model, got {self.d_memory} and {self.d_model}")
        else:
            memory = as_tensor(memory)
            if memory.ndim != x.ndim or memory.shape[:-2] != x.shape[:-2]:
                raise ValueError(f"memory must have the batch axis of x, got memory {memory.shape} and x {x.shape}")
            check_width(memory, self.d_memory, "MultiHeadAttention, memory with d_memory columns,")
            if self.position is not None or cache is not None:
                raise ValueError("positions and a cache count the tokens of x; cross-attention (memory=) takes neither")
        if positions is not None:
            if self.position != "rotary":
                raise ValueError(f"positions are for position='rotary', this attention has {self.position!r}")
            shape = np.shape(positions)
            if shape not in ((x.shape[-2],), x.shape[:-1]) or np.asarray(positions).dtype.kind not in "iu":
                raise ValueError(f"positions must be integers of shape (T_q,) or (B, T_q), got shape {shape}")
        if isinstance(cache, KVCache):
            if cache.n_layer != 1:
                raise ValueError(f"this cache is for {cache.n_layer} layers: give each layer its own part, cache[i]")
            cache = cache[0]
        return x, memory, cache

    def constraints(
        self, x: Tensor, allow: Any, key_allow: Any, bias: Any, is_causal: bool, n_k: int
    ) -> tuple[np.ndarray | None, Any]:
        """All that restricts or shifts the scores, as one boolean array and one bias (None for neither)."""
        n_q = x.shape[-2]
        allow, bias = masks(allow, key_allow, bias, x.shape[0] if x.ndim == 3 else None, self.n_head, n_q, n_k)
        if (is_causal or self.always_causal) and n_q != 1:  # a single query is the last one, and sees everything
            earlier = causal(n_q, n_k)
            allow = earlier if allow is None else allow & earlier
        if self.position == "alibi":
            distances = alibi(self.n_head, n_q, n_k)
            bias = distances if bias is None else bias + distances.astype(bias.dtype)
        return allow, bias

    def drawn(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
        """What dropout leaves of the weights, or None where nothing is dropped."""
        return keep_mask(self.rng, self.dropout, shape, dtype) if self.training and self.dropout else None


LABELS = {"q": "Q", "k": "K", "v": "V", "scores": "scores", "masked": "masked", "weights": "S", "heads": "H"}
LABELS["concat"] = "Concat"


def labelled(edit: Edit | None, suffix: str = "") -> Edit:
    """`edit`, told of tensors that have their names from the paper, and held to returning what fits."""

    def change(name: str, tensor: Tensor) -> Tensor:
        if isinstance(tensor, Tensor) and tensor.name is None:
            tensor.name = LABELS[name] + suffix
        if edit is None:
            return tensor
        new = edit(name, tensor)
        if new is None:
            raise TypeError(f"edit({name!r}, ...) returned None: return the tensor itself to keep it")
        new = as_tensor(new)
        if new.shape != tensor.shape:
            raise ValueError(f"edit({name!r}, ...) must return the shape {tensor.shape}, got {new.shape}")
        return new.astype(tensor.dtype)

    return change


def of_head(mask: Any, i: int) -> Any:
    """What belongs to head `i` of a mask that broadcasts to (..., H, T_q, T_k)."""
    if mask is None or mask.ndim == 2:
        return mask
    return mask[..., i if mask.shape[-3] > 1 else 0, :, :]
