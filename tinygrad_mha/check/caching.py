"""`kv_cache`: a computation with a cache compared with the same computation without it.

Axes: B rows of a batch, H heads, T tokens, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha.nn import KVCache

__all__ = ["Chunkings", "compare_chunkings", "list_chunkings"]

TOLERANCE = 1e-11  # relative to the largest element, in float64: the rounding of sums in another order is 1e-15


class Chunkings(NamedTuple):
    """What `compare_chunkings` found. Differences are relative to the largest element of the whole computation."""

    chunkings: list[tuple[int, ...]]
    is_exhaustive: bool  # whether these are all
    largest: float  # the largest difference
    failed: list[tuple[tuple[int, ...], int, int, float]]  # chunks, step and token of the first difference, its size


def list_chunkings(n: int, most: int = 64, seed: int = 0) -> list[tuple[int, ...]]:
    """Ways to read `n` tokens in chunks: all 2^(n - 1), or `most` of them, one chunk and single tokens included.

    Example:
        >>> list_chunkings(3)
        [(3,), (1, 2), (2, 1), (1, 1, 1)]
    """
    last = 2 ** (n - 1) - 1  # bit i of a code: a chunk ends after token i
    codes: list[int] = list(range(last + 1)) if last < most else [0, last]
    rng = np.random.default_rng(seed)
    while len(codes) < min(most, last + 1):
        code = sum(int(bit) << i for i, bit in enumerate(rng.integers(0, 2, n - 1)))
        codes += [code] if code not in codes else []
    ends = ([i + 1 for i in range(n - 1) if code >> i & 1] for code in codes)
    return [tuple(int(size) for size in np.diff([0, *inner, n])) for inner in ends]


def read_in_chunks(chunks: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The first token of each chunk and the one after it."""
    start = 0
    for size in chunks:
        yield start, start + size
        start += size


def compare_chunkings(
    run: Callable[[int, int, Any], Any],
    n: int,
    new_cache: Callable[[], Any] = KVCache,
    most: int = 64,
    tolerance: float = TOLERANCE,
) -> Chunkings:
    """Compare a computation over `n` tokens in chunks, with a cache, with the same in one call without a cache.

    Args:
        run: `run(start, stop, cache)` returns the rows of the tokens start .. stop - 1, (..., stop - start, width). The
            cache holds the tokens before; it is None, and start 0, for the computation that the others are compared
            with.
        new_cache: makes an empty cache.
        most: the number of chunkings, if there are more than these.
        tolerance: relative; a chunking with a larger difference has failed.

    Example:
        >>> mha = tg.nn.MultiHeadAttention(4, 2, rng=0)
        >>> x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
        >>> with tg.no_grad():
        ...     run = lambda start, stop, cache: mha(x[start:stop], causal=True, cache=cache).numpy()
        ...     found = compare_chunkings(run, 5, tolerance=1e-5)
        >>> len(found.chunkings), found.failed
        (16, [])
    """
    whole = np.asarray(run(0, n, None))
    size = largest_of(whole)
    chunkings, largest = list_chunkings(n, most), 0.0
    failed = []
    for chunks in chunkings:
        cache, is_equal = new_cache(), True
        for step, (start, stop) in enumerate(read_in_chunks(chunks)):
            differences = compare_rows(run(start, stop, cache), whole[..., start:stop, :]) / size
            largest = max(largest, float(differences.max()))
            if is_equal and differences.max() > tolerance:
                is_equal = False
                failed.append((chunks, step, start + int(differences.argmax()), float(differences.max())))
    return Chunkings(chunkings, len(chunkings) == 2 ** (n - 1), largest, failed)


def largest_of(array: np.ndarray) -> float:
    """The largest absolute value, by which differences are divided."""
    return float(np.abs(array).max(initial=0.0, where=np.isfinite(array))) or 1.0


def compare_rows(a: Any, b: Any) -> np.ndarray:
    """The largest difference in each row, (T,), of arrays (..., T, width); infinite where only one of them is nan."""
    a, b = np.asarray(a), np.asarray(b)
    with np.errstate(invalid="ignore"):  # inf - inf
        differences = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    differences = np.where(np.isnan(differences), np.inf, differences)
    return np.moveaxis(differences, -2, 0).reshape(differences.shape[-2], -1).max(axis=1, initial=0.0)
