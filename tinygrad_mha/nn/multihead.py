"""Attention as a function, and multi-head attention with every width free.

`Heads` is the part between the projections: heads, positions, cache, masks, attention. `MultiHeadAttention` adds a
matrix for each of Q, K, V and the output; a GPT's attention (nn/gpt.py) packs them differently around the same part.

Axes: B batch, H heads, T_q queries, T_k keys, d_k width of queries and keys, d_v width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import numpy as np

from tinygrad_mha import modes, ops
from tinygrad_mha.arguments import check_count, check_probability, check_width
from tinygrad_mha.nn.cache import CachedLayer, KVCache
from tinygrad_mha.nn.init import Seed, constant, normal
from tinygrad_mha.nn.layers import Dropout
from tinygrad_mha.nn.masks import Axes, combine_masks, pad_bias, select_head
from tinygrad_mha.nn.module import Module
from tinygrad_mha.nn.positions import Position, as_position
from tinygrad_mha.tensors import Tensor, as_tensor, plain

__all__ = ["AttentionTrace", "Edit", "Heads", "Memory", "MultiHeadAttention", "Projection", "Steps", "attention"]

Edit = Callable[[str, Tensor], Tensor]

# The names of the steps in the paper's notation, which pictures show.
NAMES = {"q": "Q", "k": "K", "v": "V", "scores": "scores", "masked": "masked", "weights": "S", "heads": "H"}
NAMES["concat"] = "Concat"


class AttentionTrace(NamedTuple):
    """The steps of an attention, as tensors whose `.grad` can be read after `backward`."""

    q: Tensor  # (..., T_q, d_k)
    k: Tensor  # (..., T_k, d_k)
    v: Tensor  # (..., T_k, d_v)
    scores: Tensor  # (..., T_q, T_k): q k^T, scaled
    masked: Tensor  # the scores with bias, and -inf where a query may not attend: the input of the softmax
    weights: Tensor  # the softmax: every row sums to 1, or is 0 where no key may be attended to
    heads: Tensor  # (..., T_q, d_v)
    concat: Tensor | None = None  # (..., T_q, H d_v): the heads side by side; None for the function `attention`


class Steps:
    """An observer of attention's steps: names each as in the paper, lets `edit` replace it, and keeps it."""

    def __init__(self, edit: Edit | None = None, suffix: str = "") -> None:
        self._edit = edit
        self._suffix = suffix
        self._seen: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.name is None:
            tensor.name = NAMES[name] + self._suffix
        self._seen[name] = tensor if self._edit is None else apply_edit(self._edit, name, tensor)
        return self._seen[name]

    def trace(self) -> AttentionTrace:
        return AttentionTrace(**self._seen)


def apply_edit(edit: Edit, name: str, tensor: Tensor) -> Tensor:
    """What `edit` returns for this step, in the dtype of the step; another shape is an error."""
    new = edit(name, tensor)
    if new is None:
        raise TypeError(f"edit({name!r}, ...) returned None: return the tensor itself to keep it")
    new = as_tensor(new)
    if new.shape != tensor.shape:
        raise ValueError(f"edit({name!r}, ...) must return the shape {tensor.shape}, got {new.shape}")
    return new.astype(tensor.dtype)


# --------------------------------------------------------------------------------------------------------------------
# The function


class FunctionOptions(TypedDict, total=False):
    """Keywords of `attention`, for type checkers."""

    key_allow: Any
    bias: Any
    scale: float | None
    keep_mask: Any


@overload
def attention(
    q: Any, k: Any, v: Any, allow: Any = None, *, trace: Literal[True], **options: Unpack[FunctionOptions]
) -> tuple[Tensor, AttentionTrace]: ...
@overload
def attention(
    q: Any, k: Any, v: Any, allow: Any = None, *, trace: Literal[False] = False, **options: Unpack[FunctionOptions]
) -> Tensor: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    allow: Any = None,
    key_allow: Any = None,
    bias: Any = None,
    scale: float | None = None,
    keep_mask: Any = None,
    trace: bool = False,
) -> Tensor | tuple[Tensor, AttentionTrace]:
    """softmax(q k^T * scale + bias) v in visible steps (arXiv:1706.03762, equation 1); `ops.attend` with checks.

    Args:
        q, k, v: (..., T_q, d_k), (..., T_k, d_k), (..., T_k, d_v), with (), (B,) or (B, H) in front; with more axes in
            front `allow` has two.
        allow: boolean, True = may attend: (T_q, T_k), (B, T_q, T_k) or (B, H, T_q, T_k); B and H may be 1. A query that
            may attend to no key gets zeros.
        key_allow: boolean (B, T_k), False for padding.
        bias: floats added to the scaled scores, in a shape of `allow`; a Tensor receives its gradient.
        scale: d_k ** -0.5 unless given.
        keep_mask: multiplied by the weights (dropout, drawn by the caller); broadcasts to (..., T_q, T_k).
        trace: also return an `AttentionTrace`.

    Returns:
        A Tensor (..., T_q, d_v), or (Tensor, AttentionTrace).

    Raises:
        ValueError: shapes that do not fit.
        TypeError: an `allow` that is not boolean, or a `bias` that is not floating.

    Example:
        >>> values = np.arange(5.0)[:, None]
        >>> attention(np.zeros((1, 1)), np.zeros((5, 1)), values, allow=np.ones((1, 5), bool)).item()
        2.0
    """
    q, k, v = as_tensor(q), as_tensor(k), as_tensor(v)
    front = check_operands(q, k, v)
    batch, heads = (*front, None, None)[:2] if len(front) <= 2 else (None, None)
    axes = batch, heads, q.shape[-2], k.shape[-2]
    allow = combine_masks(allow, key_allow, False, axes)
    bias = None if bias is None else pad_bias(bias, axes).astype(q.dtype)
    if keep_mask is not None:
        keep_mask = np.asarray(plain(keep_mask)).astype(q.dtype)
        shape = (*front, *axes[2:])
        lengths = zip(keep_mask.shape[::-1], shape[::-1], strict=False)
        if keep_mask.ndim > len(shape) or any(n not in (1, m) for n, m in lengths):
            raise ValueError(f"keep_mask must broadcast to the weights, {shape}, got {keep_mask.shape}")
    steps = Steps()
    q, k, v = steps("q", q), steps("k", k), steps("v", v)
    y = ops.attend(q, k, v, allow, bias, keep_mask, scale=scale, observe=steps)
    return (y, steps.trace()) if trace else y


def check_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The axes in front of (T, d), which q, k and v share by broadcasting."""
    shapes = f"got q {q.shape}, k {k.shape}, v {v.shape}"
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ValueError(f"attention expects q (..., T_q, d_k), k (..., T_k, d_k), v (..., T_k, d_v); {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same width d_k; {shapes}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have the same number of rows T_k; {shapes}")
    try:
        return np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    except ValueError:
        raise ValueError(f"the axes in front of (T, d) must agree; {shapes}") from None


# --------------------------------------------------------------------------------------------------------------------
# Heads


def split_heads(x: Tensor, n: int) -> Tensor:
    """(..., T, n d) -> (..., n, T, d): head i is columns i d to (i + 1) d."""
    return swap_rows_and_heads(ops.reshape(x, shape=(*x.shape[:-1], n, x.shape[-1] // n)))


def join_heads(x: Tensor) -> Tensor:
    """(..., H, T, d) -> (..., T, H d)."""
    x = swap_rows_and_heads(x)
    return ops.reshape(x, shape=(*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def swap_rows_and_heads(x: Tensor) -> Tensor:
    """(..., T, H, d) -> (..., H, T, d), and back."""
    *front, i, j, k = range(x.ndim)
    return ops.transpose(x, axes=(*front, j, i, k))


def repeat_heads(x: Any, times: int) -> Any:
    """(..., H, T, d) -> (..., H times, T, d): each head `times` times in a row, for the queries that share it."""
    if times == 1:
        return x
    *front, heads, rows, width = x.shape
    x = ops.reshape(x, shape=(*front, heads, 1, rows, width))
    x = ops.broadcast_to(x, shape=(*front, heads, times, rows, width))
    return ops.reshape(x, shape=(*front, heads * times, rows, width))


class Projection(NamedTuple):
    """The columns of a parameter that make "Q", "K" or "V": from `start` on, `width` for each head."""

    name: str
    weight: Tensor
    bias: Tensor | None
    width: int
    start: int = 0

    def of_head(self, i: int) -> tuple[Tensor, Tensor | None]:
        """The matrix and bias of head `i`, named W_Q1 and b_Q1."""
        columns = slice(self.start + i * self.width, self.start + (i + 1) * self.width)
        bias = None if self.bias is None else self.bias[columns].named(f"b_{self.name}{i + 1}")
        return self.weight[:, columns].named(f"W_{self.name}{i + 1}"), bias


class Masks(TypedDict, total=False):
    """What says which keys a query may attend to, and what is added to the scores; see `attention`."""

    allow: Any
    key_allow: Any
    bias: Any
    causal: bool


class AttentionOptions(Masks, total=False):
    """Keywords of a call of `MultiHeadAttention`, for type checkers."""

    cache: KVCache | CachedLayer | None
    positions: Any
    edit: Edit | None


class Heads(Module):
    """What multi-head attention does between its projections. It has no matrices.

    Args:
        n_head: the number of heads of queries.
        n_kv_head: the number of heads of keys and values; n_head // n_kv_head heads of queries share each.
        position: the positional scheme, one that acts in attention.
        dropout: applied to the weights.
        fused: whether the steps are one node (`ops.attention`) unless somebody observes them (`ops.attend`).
    """

    def __init__(self, n_head: int, n_kv_head: int, position: Position, dropout: Dropout, fused: bool) -> None:
        if n_head % n_kv_head:
            raise ValueError(f"n_head must be a multiple of n_kv_head, got {n_head} and {n_kv_head}")
        self.n_head, self.n_kv_head = n_head, n_kv_head
        self.position = position
        self.dropout = dropout
        self.fused = fused

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache | CachedLayer | None = None,
        positions: Any = None,
        edit: Edit | None = None,
        **masks: Unpack[Masks],
    ) -> Tensor:
        """q (..., H, T_q, d_k), k (..., H_kv, T, d_k), v (..., H_kv, T, d_v) -> the heads' results side by side.

        The keys are those in the cache followed by k. Arguments as in `MultiHeadAttention`.

        Returns:
            (..., T_q, H d_v).
        """
        cache = check_cache(cache)
        start = 0 if cache is None else cache.length
        n_q, n_k = q.shape[-2], start + k.shape[-2]
        axes: Axes = (q.shape[0] if q.ndim == 4 else None, self.n_head, n_q, n_k)
        allow, bias = self._masks(axes, q.dtype, **masks)
        positions = np.arange(start, start + n_q) if positions is None else np.asarray(positions)
        q, k = self.position.rotate(q, positions), self.position.rotate(k, positions)
        steps = edit if edit is None or isinstance(edit, Steps) else Steps(edit)
        if steps is None and not self.fused:
            steps = Steps()
        if cache is not None:
            k, v = cache.append(k, v, snapshot=steps is not None or modes.STATE.get().record)
        keep_mask = self.dropout.sample_mask((*q.shape[:-1], n_k), q.dtype)
        times = self.n_head // self.n_kv_head
        if steps is None:
            return join_heads(ops.attention(q, repeat_heads(k, times), repeat_heads(v, times), allow, bias, keep_mask))
        q, k, v = steps("q", q), steps("k", k), steps("v", v)
        k, v = repeat_heads(k, times), repeat_heads(v, times)
        return steps("concat", join_heads(ops.attend(q, k, v, allow, bias, keep_mask, observe=steps)))

    def attend_per_head(
        self,
        x: Tensor,
        memory: Tensor,
        projections: tuple[Projection, Projection, Projection],
        positions: Any = None,
        **masks: Unpack[Masks],
    ) -> Tensor:
        """The projections and `attend`, one head at a time, with every matrix named.

        x (..., T_q, d_model), memory (..., T_k, d_memory) -> (..., T_q, H d_v).
        """
        n_q, n_k = x.shape[-2], memory.shape[-2]
        axes: Axes = (x.shape[0] if x.ndim == 3 else None, self.n_head, n_q, n_k)
        allow, bias = self._masks(axes, x.dtype, **masks)
        positions = np.arange(n_q) if positions is None else np.asarray(positions)
        keep_mask = self.dropout.sample_mask((*x.shape[:-2], self.n_head, n_q, n_k), x.dtype)

        def project(part: Projection, i: int, rows: Tensor) -> Tensor:
            weight, b = part.of_head(i)
            y = rows @ weight if b is None else rows @ weight + b
            return (y if part.name == "V" else self.position.rotate(y, positions)).named(f"{part.name}_{i + 1}")

        q, k, v = projections
        # Keys and values that several heads of queries share are computed before them, in none of their scopes.
        shared = range(self.n_kv_head if self.n_kv_head < self.n_head else 0)
        keys, values = ([project(part, i, memory) for i in shared] for part in (k, v))
        heads = []
        for i in range(self.n_head):
            group = i * self.n_kv_head // self.n_head
            with modes.scope(f"head {i + 1}"):
                q_i = project(q, i, x)
                k_i = keys[group] if keys else project(k, i, memory)
                v_i = values[group] if values else project(v, i, memory)
                of_head = [select_head(mask, i) for mask in (allow, bias, keep_mask)]
                heads.append(ops.attend(q_i, k_i, v_i, *of_head, observe=Steps(suffix=f"_{i + 1}")))
        return ops.concat(heads, axis=-1).named("Concat")

    def _masks(
        self,
        axes: Axes,
        dtype: np.dtype[Any],
        allow: Any = None,
        key_allow: Any = None,
        bias: Any = None,
        causal: bool = False,
    ) -> tuple[Any, Any]:
        """All masks as one boolean array and all biases as one Tensor or array, or None for either."""
        by_position = self.position.bias(self.n_head, *axes[2:], dtype)
        if bias is None:
            bias = by_position
        else:
            bias = pad_bias(bias, axes).astype(dtype)
            bias = bias if by_position is None else by_position + bias
        return combine_masks(allow, key_allow, causal, axes), bias


def check_cache(cache: KVCache | CachedLayer | None) -> CachedLayer | None:
    """The part of the cache for one layer."""
    if not isinstance(cache, KVCache):
        return cache
    if cache.n_layer != 1:
        raise ValueError(f"this cache is for {cache.n_layer} layers: pass each layer its own part, cache[i]")
    return cache[0]


def check_rows(x: Any, width: int, positions: Any) -> Tensor:
    """The input of an attention as a Tensor (T_q, d_model) or (B, T_q, d_model), with `positions` that fit it."""
    x = as_tensor(x)
    if x.ndim not in (2, 3):
        raise ValueError(f"x must be (T_q, d_model) or (B, T_q, d_model), got shape {x.shape}")
    check_width(x, width, "attention, x with d_model columns,")
    if positions is not None:
        shape = np.shape(positions)
        if shape not in ((x.shape[-2],), x.shape[:-1]) or np.asarray(positions).dtype.kind not in "iu":
            raise ValueError(f"positions must be integers of shape (T_q,) or (B, T_q), got shape {shape}")
    return x


class Memory(NamedTuple):
    """The keys (..., H_kv, T_k, d_k) and values (..., H_kv, T_k, d_v) of a memory; see `project_memory`."""

    k: Tensor
    v: Tensor

    def select(self, batch: Any) -> Memory:
        """Those of the rows `batch` of the batch: indices, of which some may repeat."""
        return Memory(self.k[batch], self.v[batch])


class MultiHeadAttention(Module):
    """Several attentions in parallel, each with its own projections, and one matrix that combines their results.

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
        n_kv_head: the number of heads of keys and values; n_head // n_kv_head heads of queries share each
            (arXiv:2305.13245). n_head unless given.
        bias: whether the projections have a bias (bq, bk, bv, bo).
        dropout: the probability with which a weight is dropped in training.
        position: "rotary", "alibi", "relative" or an object of nn.positions that acts in attention; None for none.
        rng: a NumPy Generator or a seed of the initial weights; the generator of dropout is spawned from it.
        fused: whether the steps are computed as one node, which is faster, unless `trace` or `edit` asks for them.

    Raises:
        ValueError: a width that is not a positive integer, or an `n_head` that is not a multiple of `n_kv_head`.

    Example:
        >>> mha = MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, rng=0)
        >>> x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
        >>> y, trace = mha(x, causal=True, trace=True)
        >>> y.shape, trace.q.shape, trace.weights.shape, trace.concat.shape
        ((3, 5), (2, 3, 7), (2, 3, 3), (3, 22))
    """

    is_attention = True

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
        position: Position | str | None = None,
        rng: Seed = None,
        fused: bool = False,
    ) -> None:
        self.d_model, self.n_head = check_count(d_model, "d_model"), check_count(n_head, "n_head")
        self.d_k = check_count(d_model // n_head if d_k is None else d_k, "d_k (d_model // n_head unless given)")
        self.d_v = check_count(self.d_k if d_v is None else d_v, "d_v")
        self.d_out = check_count(d_model if d_out is None else d_out, "d_out")
        self.d_memory = check_count(d_model if d_memory is None else d_memory, "d_memory")
        self.n_kv_head = check_count(n_head if n_kv_head is None else n_kv_head, "n_kv_head")
        self.detail = describe_heads(n_head)
        position = as_position(position)
        if position.acts_on != "attention":
            raise ValueError(f"position must be a scheme that acts in attention; {position!r} is added to the input")
        position.check_head_width(self.d_k)
        rng = np.random.default_rng(rng)
        drop = Dropout(check_probability(dropout, "dropout"), rng.spawn(1)[0])
        n, m = self.n_head, self.n_kv_head
        self.wq = normal((self.d_model, n * self.d_k), self.d_model**-0.5, rng, "W_Q")
        self.wk = normal((self.d_memory, m * self.d_k), self.d_memory**-0.5, rng, "W_K")
        self.wv = normal((self.d_memory, m * self.d_v), self.d_memory**-0.5, rng, "W_V")
        self.wo = normal((n * self.d_v, self.d_out), (n * self.d_v) ** -0.5, rng, "W_O")
        self.bq = constant((n * self.d_k,), 0.0, "b_Q") if bias else None
        self.bk = constant((m * self.d_k,), 0.0, "b_K") if bias else None
        self.bv = constant((m * self.d_v,), 0.0, "b_V") if bias else None
        self.bo = constant((self.d_out,), 0.0, "b_O") if bias else None
        self.position = position.initialize(n_head, d_model, 0, rng)
        self.heads = Heads(n, m, self.position, drop, fused)

    @overload
    def forward(
        self, x: Any, memory: Any = None, *, trace: Literal[True], **options: Unpack[AttentionOptions]
    ) -> tuple[Tensor, AttentionTrace]: ...
    @overload
    def forward(
        self, x: Any, memory: Any = None, *, trace: Literal[False] = False, **options: Unpack[AttentionOptions]
    ) -> Tensor: ...
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
    ) -> Tensor | tuple[Tensor, AttentionTrace]:
        """X (T_q, d_model) or (B, T_q, d_model) -> Y of the same shape with width d_out.

        Args:
            memory: what is attended to, (T_k, d_memory) or (B, T_k, d_memory), or a `Memory` from `project_memory`;
                x itself unless given.
            allow, key_allow, bias: as in `attention`. With a cache, keys are those in the cache and then the new ones.
            causal: also allow no key that comes after the query.
            cache: a `KVCache` (or the layer `cache[i]` of one): the keys and values of x are appended to it, and all
                that it holds is attended to. Only with gradients off.
            positions: for rotary positions, the positions of x: integers (T_q,) or (B, T_q). Unless given they
                continue after the cache.
            trace: also return an `AttentionTrace`.
            edit: called with the name of each field of the trace and its tensor; what it returns replaces it.

        Example:
            >>> mha = MultiHeadAttention(5, n_head=2, rng=0)
            >>> def without_head_0(name, t):
            ...     return t * np.array([0.0, 1.0])[:, None, None] if name == "heads" else t
            >>> mha(np.ones((3, 5)), edit=without_head_0).shape
            (3, 5)
        """
        x = self._check_input(x, memory, cache, positions)
        steps = Steps(edit) if trace else None
        q = split_heads(ops.linear(x, self.wq, self.bq), self.n_head)
        k, v = memory if isinstance(memory, Memory) else self._keys_and_values(self._check_memory(x, memory))
        masks = Masks(allow=allow, key_allow=key_allow, bias=bias, causal=causal)
        concat = self.heads.attend(q, k, v, cache, positions, steps or edit, **masks)
        y = ops.linear(concat, self.wo, self.bo).named("Y")
        return y if steps is None else (y, steps.trace())

    def project_memory(self, memory: Any) -> Memory:
        """The keys and values of a memory (T_k, d_memory) or (B, T_k, d_memory), to pass as `memory=` many times.

        Example:
            >>> mha = MultiHeadAttention(5, n_head=2, rng=0)
            >>> memory = mha.project_memory(np.ones((7, 5), np.float32))
            >>> [mha(np.ones((t, 5), np.float32), memory=memory).shape for t in (1, 3)]
            [(1, 5), (3, 5)]
        """
        with self.scope():
            memory = as_tensor(memory)
            check_width(memory, self.d_memory, "MultiHeadAttention, memory with d_memory columns,")
            return self._keys_and_values(memory)

    def per_head(self, x: Any, memory: Any = None, positions: Any = None, **masks: Unpack[Masks]) -> Tensor:
        """The same result computed one head at a time, every matrix named: W_Q1, Q_1, K_1, V_1, scores_1, S_1, H_1, ...

        This is how the formula is written, and how it is best drawn. W_Q1 is a part of the parameter, so its gradient
        is added there. Arguments as in `forward`: `masks` are allow, key_allow, bias and causal.
        """
        with self.scope():
            x = self._check_input(x, memory, None, positions)
            projections = (
                Projection("Q", self.wq, self.bq, self.d_k),
                Projection("K", self.wk, self.bk, self.d_k),
                Projection("V", self.wv, self.bv, self.d_v),
            )
            concat = self.heads.attend_per_head(x, self._check_memory(x, memory), projections, positions, **masks)
            return ops.linear(concat, self.wo, self.bo).named("Y")

    def _keys_and_values(self, memory: Tensor) -> Memory:
        k = split_heads(ops.linear(memory, self.wk, self.bk), self.n_kv_head)
        return Memory(k, split_heads(ops.linear(memory, self.wv, self.bv), self.n_kv_head))

    def _check_input(self, x: Any, memory: Any, cache: Any, positions: Any) -> Tensor:
        if positions is not None and not self.position.rotates:
            raise ValueError(f"positions are for rotary positions, this attention has {self.position!r}")
        if memory is not None and (cache is not None or self.position.name != "none"):
            raise ValueError("positions and a cache count the tokens of x; cross-attention (memory=) takes neither")
        return check_rows(x, self.d_model, positions)

    def _check_memory(self, x: Tensor, memory: Any) -> Tensor:
        if memory is None:
            if self.d_memory != self.d_model:
                raise ValueError(f"self-attention needs d_memory = d_model, got {self.d_memory} and {self.d_model}")
            return x
        memory = as_tensor(memory)
        if memory.ndim != x.ndim or memory.shape[:-2] != x.shape[:-2]:
            raise ValueError(f"memory must have the batch axis of x, got memory {memory.shape} and x {x.shape}")
        check_width(memory, self.d_memory, "MultiHeadAttention, memory with d_memory columns,")
        return memory


def describe_heads(n_head: int) -> str:
    return f"{n_head} head{'s' if n_head > 1 else ''}"
