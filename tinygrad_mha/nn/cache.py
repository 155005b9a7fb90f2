"""KVCache: the keys and values of the tokens so far, so that a new token costs one row of attention.

Row n of attention's output depends on query n alone, but on every key and value up to n. So keys and values are kept
and queries are not. The length of the cache is the position of the next token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_mha import modes, ops
from tinygrad_mha.arguments import check_count, check_integer
from tinygrad_mha.tensors import Tensor, wrap

__all__ = ["CachedLayer", "KVCache"]


class Rows:
    """Memory for the keys and values of one layer, (..., capacity, width). The first `used` rows are written.

    Forked caches share it. While it is shared, rows in use are not overwritten: a cache of length `used` appends in
    place, any other one copies its rows first.
    """

    __slots__ = ("k", "layout", "shared", "used", "v")

    def __init__(self, k: np.ndarray, v: np.ndarray, capacity: int) -> None:
        self.k, self.v = (np.empty((*x.shape[:-2], capacity, x.shape[-1]), x.dtype) for x in (k, v))
        self.layout = layout_of(k), layout_of(v)
        self.used = 0
        self.shared = False

    def write(self, start: int, k: np.ndarray, v: np.ndarray) -> None:
        self.used = start + k.shape[-2]
        self.k[..., start : self.used, :] = k
        self.v[..., start : self.used, :] = v

    def first(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        return self.k[..., :n, :], self.v[..., :n, :]


class KVCache:
    """The keys and values of all tokens so far, for each layer. A call with `cache=` appends to it.

    Args:
        n_layer: the number of attention layers, `config.n_layer` for a GPT.

    Example:
        >>> import tinygrad_mha as tg
        >>> mha = tg.nn.MultiHeadAttention(5, 2, rng=0)
        >>> x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
        >>> cache = KVCache()
        >>> with tg.no_grad():
        ...     first = mha(x[:3], causal=True, cache=cache)
        ...     fourth = mha(x[3:], causal=True, cache=cache)
        ...     whole = mha(x, causal=True)
        >>> cache.length, bool(np.allclose(fourth.data, whole.data[3:], atol=1e-6))
        (4, True)
    """

    def __init__(self, n_layer: int = 1) -> None:
        check_count(n_layer, "n_layer")
        self._rows: list[Rows | None] = [None] * n_layer
        self._counts = [0] * n_layer

    @property
    def n_layer(self) -> int:
        """The number of layers that it serves."""
        return len(self._rows)

    @property
    def length(self) -> int:
        """The number of tokens that every layer holds. A call that fails halfway therefore adds none."""
        return min(self._counts)

    @property
    def nbytes(self) -> int:
        """The size of the keys and values in bytes."""
        return sum(x.nbytes for rows in self._rows if rows is not None for x in rows.first(self.length))

    def __getitem__(self, layer: int) -> CachedLayer:
        """The part of one layer, to pass to that layer: `attention(x, cache=cache[2])`."""
        if not 0 <= layer < self.n_layer:
            raise IndexError(f"this cache has the layers 0 to {self.n_layer - 1}, got {layer}")
        return CachedLayer(self, layer)

    def fork(self) -> KVCache:
        """A second cache of the same tokens. Rows are shared, and copied when one cache would overwrite the other."""
        twin = KVCache(self.n_layer)
        twin._rows = list(self._rows)
        twin._counts = [self.length] * self.n_layer
        for rows in self._rows:
            if rows is not None:
                rows.shared = True
        return twin

    def crop(self, n: int) -> None:
        """Keep the first `n` tokens and drop the others.

        Raises:
            TypeError: `n` is not an integer.
            ValueError: `n` is negative or more than `length`.
        """
        if not 0 <= check_integer(n, "n") <= self.length:
            raise ValueError(f"crop keeps from 0 to {self.length} tokens, got {n}")
        self._counts = [int(n)] * self.n_layer

    def select(self, batch: Any) -> KVCache:
        """A copy with the rows `batch` of the batch: indices, which may repeat.

        Raises:
            ValueError: the cache holds a sequence without a batch axis.
        """
        twin = KVCache(self.n_layer)
        for layer, rows in enumerate(self._rows):
            if rows is None:
                continue
            if rows.k.ndim < 4:
                raise ValueError(f"this cache holds one sequence, k {rows.k.shape}: there is no batch to select from")
            k, v = (x[np.asarray(batch)] for x in rows.first(self.length))
            twin._write(layer, 0, k, v)
        return twin

    def _write(self, layer: int, start: int, k: np.ndarray, v: np.ndarray) -> Rows:
        stop = start + k.shape[-2]
        rows = self._rows[layer]
        if rows is None or start == 0 or stop > rows.k.shape[-2] or (rows.shared and rows.used != start):
            bigger = Rows(k, v, max(16, 1 << (stop - 1).bit_length()))
            if rows is not None and start:
                bigger.write(0, *rows.first(start))
            self._rows[layer] = rows = bigger
        rows.write(start, k, v)
        self._counts[layer] = stop
        return rows

    def __repr__(self) -> str:
        rows = self._rows[0]
        held = "" if rows is None else f", k {rows.first(self.length)[0].shape}, v {rows.first(self.length)[1].shape}"
        return f"KVCache({self.length} tokens, {self.n_layer} layer{'s' if self.n_layer > 1 else ''}{held})"


class CachedLayer:
    """The part of a `KVCache` that belongs to one layer."""

    __slots__ = ("_cache", "_layer")

    def __init__(self, cache: KVCache, layer: int) -> None:
        self._cache, self._layer = cache, layer

    @property
    def length(self) -> int:
        """The number of tokens before the current ones."""
        return self._cache.length

    @property
    def appended(self) -> int:
        """The number of tokens of this layer, with those that were appended in the current call."""
        return self._cache._counts[self._layer]

    def keys(self) -> np.ndarray:
        """The keys of this layer, (..., T, width): a view."""
        return np.empty((0, 0)) if self._rows is None else self._rows.first(self.appended)[0]

    @property
    def _rows(self) -> Rows | None:
        return self._cache._rows[self._layer]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (..., T, width), and return those of all tokens.

        The results do not change when the cache does. Where operations are recorded, the new rows are their inputs.

        Raises:
            ValueError: gradients are on, or the shapes or dtypes differ from those in the cache.
        """
        start = self.length
        k_all, v_all = self.extend(k._data, v._data)
        if modes.STATE.get().is_silent:
            assert self._rows is not None
            self._rows.shared = True  # so that a write to these rows, after `crop`, goes to a copy
            k_all.flags.writeable = v_all.flags.writeable = False
            return wrap(k_all), wrap(v_all)
        if start == 0:
            return k, v
        k_before, v_before = (
            Tensor(k_all[..., :start, :], name="cached K"),
            Tensor(v_all[..., :start, :], name="cached V"),
        )
        return ops.concat(k_before, k, axis=-2), ops.concat(v_before, v, axis=-2)

    def extend(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`append` for arrays. The results are views of memory that is written to after `crop`."""
        if modes.is_grad_enabled():
            raise ValueError("a KVCache holds arrays, through which no gradient flows: use it under tg.no_grad()")
        cache, rows = self._cache, self._rows
        start = cache.length
        if rows is not None and start and rows.layout != (layout_of(k), layout_of(v)):
            for name, new, old in (("k", k, rows.k), ("v", v, rows.v)):
                if layout_of(new) != layout_of(old):
                    raise ValueError(
                        f"the cache holds {name} of shape {old[..., :start, :].shape}, {old.dtype} (batch, heads, "
                        f"tokens, width), got {new.shape}, {new.dtype}: use a new cache for another batch or model"
                    )
        return cache._write(self._layer, start, k, v).first(start + k.shape[-2])


def layout_of(x: np.ndarray) -> tuple[Any, ...]:
    """What keys or values of other tokens in the same cache share: all lengths but the number of tokens; the dtype."""
    *front, _, width = x.shape
    return front, width, x.dtype
