"""The part of multi-head attention that all models share: from projected q, k and v to the concatenated heads.

`Heads` applies positions, cache, masks and dropout, and computes `ops.attention` for all heads at once, or `ops.attend`
step by step if the steps are to be seen or edited. The projections before and after it differ from model to model, so
they belong to `MultiHeadAttention` and to `CausalSelfAttention` of a GPT.

Axes: B batch, H heads, T_q queries, T_k keys, d_k width of queries and keys, d_v width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np

from tinygrad_mha import modes, ops
from tinygrad_mha.arguments import check_width
from tinygrad_mha.nn.cache import CachedLayer, KVCache
from tinygrad_mha.nn.layers import Dropout
from tinygrad_mha.nn.masks import ScoreShape, combine_masks, pad_bias, select_head
from tinygrad_mha.nn.module import Module
from tinygrad_mha.nn.positions import Position, Rotary
from tinygrad_mha.nn.scores import Score
from tinygrad_mha.notation import write_shape
from tinygrad_mha.ops import join_heads, split_heads
from tinygrad_mha.tables import make_table
from tinygrad_mha.tensors import Tensor, as_tensor, plain

__all__ = ["AttentionTrace", "Edit", "Heads", "Masks", "Projection", "Steps", "check_rows", "join_heads", "split_heads"]

Edit = Callable[[str, Tensor], Tensor]

# Names of the traced tensors, shown in pictures. S is the softmax, so the weights; papers that write S = q k^T, such as
# FlashAttention, call these P. H is the output of a head, before W_O.
NAMES = {"q": "Q", "k": "K", "v": "V", "scores": "scores", "masked": "masked", "weights": "S", "heads": "H"}
NAMES["concat"] = "Concat"


UNKNOWN: Any = None  # a step that an attention does not show


class AttentionTrace(NamedTuple):
    """The steps of an attention, as tensors whose `.grad` can be read after `backward`.

    A step that an attention does not show to its `edit` is None.
    """

    q: Tensor = UNKNOWN  # (..., T_q, d_k)
    k: Tensor = UNKNOWN  # (..., T_k, d_k)
    v: Tensor = UNKNOWN  # (..., T_k, d_v)
    scores: Tensor = UNKNOWN  # (..., T_q, T_k): q k^T, scaled
    masked: Tensor = UNKNOWN  # the scores with bias, and -inf where a query may not attend: the input of the softmax
    weights: Tensor = UNKNOWN  # every row sums to 1, to 0 where no key may be attended to, to less with sinks
    heads: Tensor = UNKNOWN  # (..., T_q, d_v)
    concat: Tensor | None = None  # (..., T_q, H d_v): the heads side by side; None for the function `attention`

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {shape}" for name, shape in self._list_shapes())
        return f"AttentionTrace({shown}): tg.show prints it"

    def _repr_html_(self) -> str:
        return make_table("the steps of an attention: tg.show(trace) prints them", self._list_shapes())

    def _list_shapes(self) -> list[tuple[str, str]]:
        return [(name, write_shape(step.shape)) for name, step in self._asdict().items() if step is not None]


class Steps:
    """A hook for `ops.attend`: names each tensor, replaces it by what `edit` returns, and keeps it for a trace."""

    def __init__(self, edit: Edit | None = None, suffix: str = "") -> None:
        self._edit = edit
        self._suffix = suffix
        self._seen: dict[str, Tensor] = {}

    @property
    def is_editing(self) -> bool:
        """Whether it can replace tensors."""
        return self._edit is not None

    @property
    def names(self) -> list[str]:
        """The names of the steps of the last call."""
        return list(self._seen)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.name is None:
            tensor.name = NAMES.get(name, name) + self._suffix
        self._seen[name] = tensor if self._edit is None else apply_edit(self._edit, name, tensor)
        return self._seen[name]

    def trace(self) -> AttentionTrace:
        """The steps of the last call that an `AttentionTrace` has."""
        return AttentionTrace(**{name: x for name, x in self._seen.items() if name in NAMES})


def apply_edit(edit: Edit, name: str, tensor: Tensor) -> Tensor:
    """Return edit(name, tensor) in the dtype of the tensor, or raise if that has another shape."""
    new = edit(name, tensor)
    if new is None:
        raise TypeError(f"edit({name!r}, ...) returned None: return the tensor itself to keep it")
    new = as_tensor(new)
    if new.shape != tensor.shape:
        raise ValueError(f"edit({name!r}, ...) must return the shape {tensor.shape}, got {new.shape}")
    return new.astype(tensor.dtype)


# --------------------------------------------------------------------------------------------------------------------
# The layout of heads


def repeat_heads(x: Any, times: int) -> Any:
    """Repeat each head for the query heads that share it: (..., H, T, d) -> (..., H * times, T, d)."""
    if times == 1:
        return x
    if isinstance(x, np.ndarray):
        return x.repeat(times, axis=-3)
    *front, heads, rows, width = x.shape
    x = ops.reshape(x, shape=(*front, heads, 1, rows, width))
    x = ops.broadcast_to(x, shape=(*front, heads, times, rows, width))
    return ops.reshape(x, shape=(*front, heads * times, rows, width))


class Projection(NamedTuple):
    """The part of a weight matrix that computes "Q", "K" or "V": columns from `start` on, `width` of them per head."""

    name: str
    weight: Tensor
    bias: Tensor | None
    width: int
    start: int = 0

    def of_head(self, i: int) -> tuple[Tensor, Tensor | None]:
        """Select the matrix and bias of head `i`; for i = 0 they are named W_Q1 and b_Q1."""
        columns = slice(self.start + i * self.width, self.start + (i + 1) * self.width)
        bias = None if self.bias is None else self.bias[columns].named(f"b_{self.name}{i + 1}")
        return self.weight[:, columns].named(f"W_{self.name}{i + 1}"), bias


# --------------------------------------------------------------------------------------------------------------------
# Heads


class Masks(TypedDict, total=False):
    """The keywords that mask or shift the scores; see `attention`."""

    allow: Any
    key_allow: Any
    bias: Any
    causal: bool
    window: int | None


class Heads(Module):
    """Multi-head attention without its projections: it takes q, k and v, and has no weight matrices.

    Args:
        n_head: the number of heads of queries.
        n_kv_head: the number of heads of keys and values; n_head // n_kv_head heads of queries share each.
        position: the positional scheme, one that acts in attention.
        dropout: applied to the weights.
        fused: whether attention is one node (`ops.attention`) in calls without `edit`, else one node per step
            (`ops.attend`).
        score: an object of nn.scores, with parameters if it needs any; with it no call is fused. None for none.
    """

    takes_arrays = True

    def __init__(
        self,
        n_head: int,
        n_kv_head: int,
        position: Position,
        dropout: Dropout,
        fused: bool,
        score: Score | None = None,
    ) -> None:
        if n_head % n_kv_head:
            raise ValueError(f"n_head must be a multiple of n_kv_head, got {n_head} and {n_kv_head}")
        self.n_head, self.n_kv_head = n_head, n_kv_head
        self.position = position
        self.dropout = dropout
        self.fused = fused
        self.score = score
        self._rotates = type(position).rotate is not Position.rotate
        self.detail = f"{n_head} head{'s' if n_head > 1 else ''}"  # shown in pictures

    def attend(
        self,
        q: Any,
        k: Any,
        v: Any,
        cache: KVCache | CachedLayer | None = None,
        positions: Any = None,
        edit: Edit | None = None,
        **masks: Unpack[Masks],
    ) -> Tensor:
        """Attend with all heads and put their results side by side.

        q (..., H, T_q, d_k), k (..., H_kv, T, d_k), v (..., H_kv, T, d_v) -> (..., T_q, H * d_v). Queries attend to the
        keys in the cache, followed by k. The other arguments are those of `MultiHeadAttention`.
        """
        cache = select_layer_cache(cache)
        start = 0 if cache is None else cache.length
        n_q, n_k = q.shape[-2], start + k.shape[-2]
        score_shape: ScoreShape = (q.shape[0] if q.ndim == 4 else None, self.n_head, n_q, n_k)
        allow, bias = self._masks(score_shape, q.dtype, **masks)
        if self._rotates:
            positions = np.arange(start, start + n_q) if positions is None else np.asarray(positions)
            q, k = self._rotate(q, k, positions)
        keep_mask = None if self.on_arrays else self.dropout.sample_mask((*q.shape[:-1], n_k), q.dtype)
        times = self.n_head // self.n_kv_head
        is_fused = self._is_fused(edit)
        is_silent = modes.STATE.get().is_silent
        if cache is not None and is_fused and is_silent:
            k, v = cache.extend(plain(k), plain(v))  # nobody keeps them, so they may be views
        elif cache is not None:
            k, v = cache.append(k, v)
        if is_fused:
            k, v = repeat_heads(k, times), repeat_heads(v, times)
            if masks.get("causal") and n_q > BLOCK and is_silent:
                return join_heads(attend_causally(q, k, v, allow, bias, keep_mask))
            return join_heads(ops.attention(q, k, v, allow, bias, keep_mask))
        steps = edit if isinstance(edit, Steps) else Steps(edit)
        q, k, v = steps("q", q), steps("k", k), steps("v", v)
        k, v = repeat_heads(k, times), repeat_heads(v, times)
        return steps("concat", join_heads(ops.attend(q, k, v, allow, bias, keep_mask, observe=steps, score=self.score)))

    def _rotate(self, q: Any, k: Any, positions: np.ndarray) -> tuple[Any, Any]:
        """Queries and keys, rotated by the scheme of positions."""
        if self.on_arrays and type(self.position).rotate is Rotary.rotate:  # which turns all heads alike
            both: Any = np.concatenate([q, k], axis=-3)
            both = self.position.rotate(both, positions)
            return both[..., : self.n_head, :, :], both[..., self.n_head :, :, :]
        return self.position.rotate(q, positions), self.position.rotate(k, positions)

    def attend_packed(
        self,
        qkv: Tensor,
        cache: KVCache | CachedLayer | None = None,
        positions: Any = None,
        edit: Edit | None = None,
        **masks: Unpack[Masks],
    ) -> Tensor:
        """`attend_columns` to q, k and v that stand side by side: (..., T, (H + 2 H_kv) d) -> (..., T, H d)."""
        n, m = self.n_head, self.n_kv_head
        if self._is_one_node(cache, edit):
            return ops.self_attention(qkv, *self._masks_of_all(qkv, qkv, **masks), n_head=n)
        if self.on_arrays:  # the same views in fewer steps, which no picture shows
            heads = split_heads(qkv, n + 2 * m)
            q, k, v = heads[..., :n, :, :], heads[..., n : n + m, :, :], heads[..., n + m :, :, :]
            return self.attend(q, k, v, cache, positions, edit, **masks)
        d = qkv.shape[-1] // (n + 2 * m)
        q, k, v = ops.split(qkv, [n * d, (n + m) * d], axis=-1)
        return self.attend_columns(q, k, v, cache, positions, edit, **masks)

    def attend_columns(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache | CachedLayer | None = None,
        positions: Any = None,
        edit: Edit | None = None,
        **masks: Unpack[Masks],
    ) -> Tensor:
        """`attend` to heads that stand side by side: q (..., T_q, H d_k), k (..., T, H_kv d_k), v (..., T, H_kv d_v).

        It is one node where nothing comes between the projections and the scores, and nobody looks at the steps.
        """
        n, m = self.n_head, self.n_kv_head
        if self._is_one_node(cache, edit):
            return ops.multi_head_attention(q, k, v, *self._masks_of_all(q, k, **masks), n_head=n)
        return self.attend(split_heads(q, n), split_heads(k, m), split_heads(v, m), cache, positions, edit, **masks)

    def _is_one_node(self, cache: KVCache | CachedLayer | None, edit: Edit | None) -> bool:
        """Whether the steps are one node that also splits and joins the heads."""
        return self._is_fused(edit) and cache is None and self.n_head == self.n_kv_head and not self._rotates

    def _masks_of_all(self, q: Tensor, k: Tensor, **masks: Unpack[Masks]) -> tuple[Any, Any, np.ndarray | None]:
        """Masks, biases and the mask of dropout for the scores of q (..., T_q, H d_k) and k (..., T_k, H d_k)."""
        *front, n_q, _ = q.shape
        n_k = k.shape[-2]
        allow, bias = self._masks((front[0] if front else None, self.n_head, n_q, n_k), q.dtype, **masks)
        return allow, bias, self.dropout.sample_mask((*front, self.n_head, n_q, n_k), q.dtype)

    def _is_fused(self, edit: Edit | None) -> bool:
        """Whether the steps are one node in this call."""
        return (self.fused or self.on_arrays) and edit is None and self.score is None

    def attend_per_head(
        self,
        x: Tensor,
        memory: Tensor,
        projections: tuple[Projection, Projection, Projection],
        positions: Any = None,
        **masks: Unpack[Masks],
    ) -> Tensor:
        """Project and attend one head at a time, giving every matrix a name, for pictures and traces.

        x (..., T_q, d_model), memory (..., T_k, d_memory) -> (..., T_q, H * d_v). Queries come from x, keys and values
        from memory; in self-attention both are x.
        """
        n_q, n_k = x.shape[-2], memory.shape[-2]
        score_shape: ScoreShape = (x.shape[0] if x.ndim == 3 else None, self.n_head, n_q, n_k)
        allow, bias = self._masks(score_shape, x.dtype, **masks)
        positions = np.arange(n_q) if positions is None else np.asarray(positions)
        keep_mask = self.dropout.sample_mask((*x.shape[:-2], self.n_head, n_q, n_k), x.dtype)

        def project(projection: Projection, i: int, rows: Tensor) -> Tensor:
            weight, b = projection.of_head(i)
            y = rows @ weight if b is None else rows @ weight + b
            y = y if projection.name == "V" else self.position.rotate(y, positions)
            return y.named(f"{projection.name}_{i + 1}")

        q, k, v = projections
        # Keys and values that several heads share are computed before these heads, outside of their scopes.
        is_shared = self.n_kv_head < self.n_head
        keys = [project(k, i, memory) for i in range(self.n_kv_head)] if is_shared else []
        values = [project(v, i, memory) for i in range(self.n_kv_head)] if is_shared else []
        heads = []
        for i in range(self.n_head):
            group = i * self.n_kv_head // self.n_head
            with modes.scope(f"head {i + 1}"):
                q_i = project(q, i, x)
                k_i = keys[group] if is_shared else project(k, i, memory)
                v_i = values[group] if is_shared else project(v, i, memory)
                masks_of_head = [select_head(mask, i) for mask in (allow, bias, keep_mask)]
                score = None if self.score is None else self.score.of_head(i)
                heads.append(ops.attend(q_i, k_i, v_i, *masks_of_head, observe=Steps(suffix=f"_{i + 1}"), score=score))
        return ops.concat(heads, axis=-1).named("Concat")

    def _masks(
        self,
        score_shape: ScoreShape,
        dtype: np.dtype[Any],
        allow: Any = None,
        key_allow: Any = None,
        bias: Any = None,
        causal: bool = False,
        window: int | None = None,
    ) -> tuple[Any, Any]:
        """All masks as one boolean array and all biases as one Tensor or array, or None for either."""
        _, _, n_q, n_k = score_shape
        by_position = self.position.bias(self.n_head, n_q, n_k, dtype)
        by_position = plain(by_position) if self.on_arrays else by_position
        if bias is None:
            bias = by_position
        else:
            bias = pad_bias(bias, score_shape).astype(dtype)
            bias = bias if by_position is None else by_position + bias
        return combine_masks(allow, key_allow, causal, score_shape, window), bias


BLOCK = 128  # queries


def attend_causally(q: Any, k: Any, v: Any, *masks: Any) -> Any:
    """`ops.attention` of many queries at the end of the keys, in blocks, without the keys that come after a block.

    The `masks`, whose last two axes are queries and keys, or None, are those of `ops.attention`.
    """
    n_q, n_k = q.shape[-2], k.shape[-2]
    heads = []
    for start in range(0, n_q, BLOCK):
        stop = min(start + BLOCK, n_q)
        rows, keys = slice(start, stop), slice(n_k - n_q + stop)
        of_block = [None if mask is None else mask[..., rows, keys] for mask in masks]
        heads.append(ops.attention(q[..., rows, :], k[..., keys, :], v[..., keys, :], *of_block))
    return ops.concat(heads, axis=-2)


def select_layer_cache(cache: KVCache | CachedLayer | None) -> CachedLayer | None:
    """Return `cache` as the cache of one layer; a `KVCache` must have exactly one layer. None stays None."""
    if not isinstance(cache, KVCache):
        return cache
    if cache.n_layer != 1:
        raise ValueError(f"this cache is for {cache.n_layer} layers: pass each layer its own part, cache[i]")
    return cache[0]


def check_rows(x: Any, width: int, positions: Any, on_arrays: bool) -> Tensor:
    """Return x as a Tensor (T_q, d_model) or (B, T_q, d_model), after checking its width and `positions`."""
    if on_arrays:  # of a GPT that has checked them
        return x
    x = as_tensor(x)
    if x.ndim not in (2, 3):
        raise ValueError(f"x must be (T_q, d_model) or (B, T_q, d_model), got shape {x.shape}")
    check_width(x, width, f"attention with d_model={width}")
    if positions is not None:
        shape = np.shape(positions)
        if shape not in ((x.shape[-2],), x.shape[:-1]) or np.asarray(positions).dtype.kind not in "iu":
            raise ValueError(f"positions must be integers of shape (T_q,) or (B, T_q), got shape {shape}")
    return x
