"""KVCache: the keys and values of what a model has read, so that a new token costs one row and not all of them.

Row n of attention's output needs query n only, but every key and value up to n. So keys and values are kept, queries
are thrown away, and positions follow from how many rows there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_mha import modes, ops
from tinygrad_mha.arguments import check_count, check_integer
from tinygrad_mha.tensors import Tensor


class Rows:
    """Memory for the keys and values of one layer, (..., capacity, width), of which the first `used` are written.

    Caches that were forked share it. Rows in use are never written again while it is shared: the cache that comes first
    continues behind `used`, any other takes a copy.
    """

    __slots__ = ("k", "shared", "used", "v")

    def __init__(self, k: np.ndarray, v: np.ndarray, capacity: int) -> None:
        self.k, self.v = (np.empty((*x.shape[:-2], capacity, x.shape[-1]), x.dtype) for x in (k, v))
        self.used = 0
        self.shared = False

    def write(self, start: int, k: np.ndarray, v: np.ndarray) -> None:
        self.used = start + k.shape[-2]
        self.k[..., start : self.used, :] = k
        self.v[..., start : self.used, :] = v

    def first(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        return self.k[..., :n, :], self.v[..., :n, :]

    @property
    def capacity(self) -> int:
        return self.k.shape[-2]


class KVCache:
    """The keys and values of all tokens read so far, one store per layer. It is yours: a call appends, no more.

    Args:
        n_layer: how many attention layers will use it, `config.n_layer` for a GPT.

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
        """How many tokens it holds. A token counts when every layer has it, so a call that fails halfway adds none."""
        return min(self._counts)

    @property
    def nbytes(self) -> int:
        """The bytes of the keys and values that it holds."""
        return sum(x.nbytes for rows in self._rows if rows is not None for x in rows.first(self.length))

    def __getitem__(self, layer: int) -> CachedLayer:
        """The part of one layer, to hand to that layer: `attention(x, cache=cache[2])`."""
        if not 0 <= layer < self.n_layer:
            raise IndexError(f"this cache has the layers 0 to {self.n_layer - 1}, got {layer}")
        return CachedLayer(self, layer)

    def fork(self) -> KVCache:
        """A second cache of the same tokens. Both share the rows until one must write where the other reads."""
        twin = KVCache(self.n_layer)
        twin._rows = list(self._rows)
        twin._counts = [self.length] * self.n_layer
        for rows in self._rows:
            if rows is not None:
                rows.shared = True
        return twin

    def crop(self, n: int) -> None:
        """Keep the first `n` tokens and forget those after them.

        Raises:
            ValueError: an `n` that is negative, or more than there are.
        """
        if not 0 <= check_integer(n, "n") <= self.length:
            raise ValueError(f"crop keeps from 0 to {self.length} tokens, got {n}")
        self._counts = [n] * self.n_layer

    def select(self, batch: Any) -> KVCache:
        """A cache (with rows of its own) for the rows `batch` of the batch: indices, of which some may repeat.

        Raises:
            ValueError: the sequence that it holds has no batch axis.
        """
        twin = KVCache(self.n_layer)
        for layer, rows in enumerate(self._rows):
            if rows is not None:
                if rows.k.ndim < 4:
                    raise ValueError(
                        f"this cache holds one sequence, k {rows.k.shape}: there is no batch to select from"
                    )
                k, v = (x[np.asarray(batch)] for x in rows.first(self.length))
                twin._write(layer, k, v)
        return twin

    def _write(self, layer: int, k: np.ndarray, v: np.ndarray) -> Rows:
        start = self.length
        stop = start + k.shape[-2]
        rows = self._rows[layer]
        if rows is None or start == 0 or stop > rows.capacity or (rows.shared and rows.used != start):
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

    __slots__ = ("cache", "layer")

    def __init__(self, cache: KVCache, layer: int) -> None:
        self.cache = cache
        self.layer = layer

    @property
    def length(self) -> int:
        """How many tokens came before those that are being read now."""
        return self.cache.length

    def append(self, k: Tensor, v: Tensor, snapshot: bool = False) -> tuple[Any, Any]:
        """Keep new keys and values, (..., T, width) each, and return all of them from the first token on.

        Args:
            snapshot: return tensors of their own that remember the new rows as an input (to be traced, or drawn),
                rather than views of the memory.

        Raises:
            ValueError: gradients are on; or the shapes or dtypes do not continue those that are there.
        """
        if modes.is_grad_enabled():
            raise ValueError("a KVCache keeps plain arrays, which no gradient can pass: use it under tg.no_grad()")
        start = self.cache.length
        rows = self.cache._rows[self.layer]
        before: tuple[np.ndarray, ...] = ()
        if rows is not None and start:
            before = rows.first(start)
            for name, new, old in zip("kv", (k, v), before, strict=True):
                if (*new.shape[:-2], new.shape[-1], new.dtype) != (*old.shape[:-2], old.shape[-1], old.dtype):
                    raise ValueError(
                        f"the cache holds {name} of shape {old.shape}, {old.dtype} (batch, heads, tokens, width); "
                        f"{new.shape}, {new.dtype} does not continue it: another batch or model wants a new cache"
                    )
        if snapshot and before:
            whole = [
                ops.concat(Tensor(old, name=f"cached {name}"), new, axis=-2)
                for name, new, old in zip("KV", (k, v), before, strict=True)
            ]
        else:
            whole = [k, v]
        kept = self.cache._write(self.layer, k.numpy(), v.numpy()).first(start + k.shape[-2])
        return (whole[0], whole[1]) if snapshot else kept
