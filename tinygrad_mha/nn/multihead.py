"""Attention as a function, and multi-head attention with every width free.

Axes: B batch, H heads, T_q queries, T_k keys, d_k width of queries and keys, d_v width of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack, overload

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import check_count, check_probability, check_width
from tinygrad_mha.nn.cache import CachedLayer, KVCache
from tinygrad_mha.nn.heads import AttentionTrace, Edit, Heads, Masks, Projection, Steps, check_rows, split_heads
from tinygrad_mha.nn.init import Seed, constant, normal
from tinygrad_mha.nn.layers import Dropout
from tinygrad_mha.nn.masks import combine_masks, pad_bias
from tinygrad_mha.nn.module import Module
from tinygrad_mha.nn.positions import Position, as_position
from tinygrad_mha.nn.scores import Score, as_score
from tinygrad_mha.tensors import Tensor, as_tensor, plain

__all__ = ["AttentionOptions", "FunctionOptions", "Memory", "MultiHeadAttention", "attention"]


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
    score_shape = batch, heads, q.shape[-2], k.shape[-2]
    allow = combine_masks(allow, key_allow, False, score_shape)
    bias = None if bias is None else pad_bias(bias, score_shape).astype(q.dtype)
    if keep_mask is not None:
        keep_mask = np.asarray(plain(keep_mask)).astype(q.dtype)
        shape = (*front, *score_shape[2:])
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


class AttentionOptions(Masks, total=False):
    """Keywords of a call of `MultiHeadAttention`, for type checkers."""

    cache: KVCache | CachedLayer | None
    positions: Any
    edit: Edit | None


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
        fused: whether the steps are computed as one node, which is faster, unless `trace`, `edit` or `score` is given.
        score: "softcap", "sinks" or an object of nn.scores; None for the usual softmax.

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
    takes_arrays = True

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
        score: Score | str | None = None,
    ) -> None:
        self.d_model, self.n_head = check_count(d_model, "d_model"), check_count(n_head, "n_head")
        self.d_k = check_count(d_model // n_head if d_k is None else d_k, "d_k (d_model // n_head unless given)")
        self.d_v = check_count(self.d_k if d_v is None else d_v, "d_v")
        self.d_out = check_count(d_model if d_out is None else d_out, "d_out")
        self.d_memory = check_count(d_model if d_memory is None else d_memory, "d_memory")
        self.n_kv_head = check_count(n_head if n_kv_head is None else n_kv_head, "n_kv_head")
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
        score = as_score(score)
        self.score = None if score is None else score.initialize(n)
        self.heads = Heads(n, m, self.position, drop, fused, self.score)
        self.detail = self.heads.detail

    if TYPE_CHECKING:

        @overload  # type: ignore[override]  # the result depends on `trace`
        def __call__(
            self, x: Any, memory: Any = None, *, trace: Literal[True], **options: Unpack[AttentionOptions]
        ) -> tuple[Tensor, AttentionTrace]: ...
        @overload
        def __call__(
            self, x: Any, memory: Any = None, *, trace: Literal[False] = False, **options: Unpack[AttentionOptions]
        ) -> Tensor: ...
        def __call__(self, *args: Any, **options: Any) -> Any: ...

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
        window: int | None = None,
    ) -> Tensor | tuple[Tensor, AttentionTrace]:
        """X (T_q, d_model) or (B, T_q, d_model) -> Y of the same shape with width d_out.

        Args:
            memory: what is attended to, (T_k, d_memory) or (B, T_k, d_memory), or a `Memory` from `project_memory`;
                x itself unless given.
            allow, key_allow, bias: as in `attention`. With a cache, keys are those in the cache and then the new ones.
            causal: also allow no key that comes after the query.
            window: with `causal`, allow only the last `window` keys up to the query.
            cache: a `KVCache` (or the layer `cache[i]` of one): the keys and values of x are appended to it, and all
                that it holds is attended to. Only with gradients off.
            positions: of the tokens of x, integers (T_q,) or (B, T_q). Unless given they continue after the cache.
                Only rotary positions use them.
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
        masks = Masks(allow=allow, key_allow=key_allow, bias=bias, causal=causal, window=window)
        q = ops.linear(x, self.wq, self.bq)
        if isinstance(memory, Memory):
            concat = self.heads.attend(split_heads(q, self.n_head), *memory, edit=steps or edit, **masks)
        else:
            k, v = self._keys_and_values(self._check_memory(x, memory))
            concat = self.heads.attend_columns(q, k, v, cache, positions, steps or edit, **masks)
        y = ops.linear(concat, self.wo, self.bo)
        if self.on_arrays:
            return y
        y.name = "Y"
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
            memory = memory if self.on_arrays else as_tensor(memory)
            check_width(memory, self.d_memory, "MultiHeadAttention, memory with d_memory columns,")
            k, v = self._keys_and_values(memory)
            return Memory(split_heads(k, self.n_kv_head), split_heads(v, self.n_kv_head))

    def per_head(self, x: Any, memory: Any = None, positions: Any = None, **masks: Unpack[Masks]) -> Tensor:
        """The same result computed one head at a time, every matrix named: W_Q1, Q_1, K_1, V_1, scores_1, S_1, H_1, ...

        This is how the formula is written, and how it is best drawn. W_Q1 is a part of the parameter, so its gradient
        is added there. Arguments as in `forward`: `masks` are allow, key_allow, bias, causal, window.
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

    def _keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads side by side: (..., T_k, H_kv d_k), (..., T_k, H_kv d_v)."""
        return ops.linear(memory, self.wk, self.bk), ops.linear(memory, self.wv, self.bv)

    def _check_input(self, x: Any, memory: Any, cache: Any, positions: Any) -> Tensor:
        if memory is not None and (cache is not None or positions is not None or self.position.name != "none"):
            raise ValueError("positions and a cache count the tokens of x; cross-attention (memory=) takes neither")
        return check_rows(x, self.d_model, positions, self.on_arrays)

    def _check_memory(self, x: Tensor, memory: Any) -> Tensor:
        if memory is None:
            if self.d_memory != self.d_model:
                raise ValueError(f"self-attention needs d_memory = d_model, got {self.d_memory} and {self.d_model}")
            return x
        if isinstance(memory, Memory):
            raise TypeError("per_head projects the memory itself: pass the memory that was projected")
        memory = as_tensor(memory)
        if memory.ndim != x.ndim or memory.shape[:-2] != x.shape[:-2]:
            raise ValueError(f"memory must have the batch axis of x, got memory {memory.shape} and x {x.shape}")
        check_width(memory, self.d_memory, "MultiHeadAttention, memory with d_memory columns,")
        return memory
