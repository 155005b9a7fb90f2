"""How a model is told the order of its tokens: sinusoids added to the input, rotations of Q and K, biases on scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinygrad_mha import ops


def sinusoidal(positions: np.ndarray, width: int) -> np.ndarray:
    """Position p as sines and cosines of falling frequency: (...) -> (..., width), float64.

    Column 2i is sin(p / 10000^(2i / width)) and column 2i + 1 the cosine of the same (arXiv:1706.03762, section 3.5).
    """
    i = np.arange(width)
    angles = np.asarray(positions)[..., None] / 10000.0 ** ((i - i % 2) / width)
    return np.where(i % 2, np.cos(angles), np.sin(angles))


def rotary(x: Any, positions: np.ndarray, base: float = 10000.0) -> Any:
    """Rotate pairs of numbers by angles that grow with the position (arXiv:2104.09864): q.k then sees only distances.

    x (..., T, d) with d even; positions (T,), or (B, T) for an x whose first axis is B. Number i of a row is paired
    with number i + d / 2, and pair i turns by position * base^(-2i / d).

    Raises:
        ValueError: an odd d.
    """
    d = x.shape[-1]
    if d % 2:
        raise ValueError(f"rotary positions rotate pairs, so the width of a head must be even, got {d}")
    half = d // 2
    angles = np.asarray(positions)[..., None] * base ** (-np.arange(half) / half)
    between = (1,) * (x.ndim - angles.ndim)  # the heads: they all turn alike
    angles = angles.reshape(*angles.shape[:-2], *between, *angles.shape[-2:])
    cos, sin = (np.concatenate([f(angles), f(angles)], axis=-1).astype(x.dtype) for f in (np.cos, np.sin))
    turned = ops.concat(-x[..., half:], x[..., :half], axis=-1)
    return x * cos + turned * sin


def alibi_slopes(n_head: int) -> np.ndarray:
    """One slope per head (arXiv:2108.12409, section 3): 2^(-8/n), 2^(-16/n), ... for n heads, n a power of two.

    For other numbers: those of the next lower power of two n, then every other one of 2n, as in the authors' code.
    """
    n = 2 ** int(math.log2(n_head))
    slopes = 2.0 ** (-8.0 / n * np.arange(1, n + 1))
    between = 2.0 ** (-4.0 / n * np.arange(1, 2 * n + 1, 2))
    return np.concatenate([slopes, between])[:n_head]


def alibi(n_head: int, n_q: int, n_k: int) -> np.ndarray:
    """The bias of attention with linear biases: minus slope times distance, (n_head, n_q, n_k), float64.

    The last query stands at the last key. Distances count places in the sequence, so padding in front changes none.
    """
    queries = np.arange(n_k - n_q, n_k)
    return -alibi_slopes(n_head)[:, None, None] * np.abs(queries[:, None] - np.arange(n_k))
