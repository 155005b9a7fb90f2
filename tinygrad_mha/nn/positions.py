"""Position encodings, called schemes here: how a model is told the order of its tokens.

Each scheme is one class, and `SCHEMES` lists them. It acts on the input (vectors are added to the token vectors) or in
attention (queries and keys are rotated, or a bias is added to the scores).

Axes: T tokens, C width of the model, H heads, d width of a query and of a key.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import check_count
from tinygrad_mha.nn.init import Seed, normal
from tinygrad_mha.nn.schemes import Scheme, find_scheme
from tinygrad_mha.tensors import Tensor

__all__ = ["SCHEMES", "Alibi", "Learned", "Position", "Relative", "Rotary", "Sinusoidal", "as_position"]
__all__ += ["alibi", "alibi_slopes", "relative_buckets", "rotary", "sinusoidal"]


@dataclass(unsafe_hash=True)
class Position(Scheme):
    """The scheme "none", and the base class of all others, which override what they need.

    A scheme with settings is a dataclass of them. Parameters, if it has any, are made by `initialize`. To add a scheme,
    write one class and list it in `SCHEMES`.
    """

    name: ClassVar[str] = "none"
    takes_arrays = True
    acts_on: ClassVar[Literal["input", "attention"]] = "attention"
    rotates: ClassVar[bool] = False  # whether it uses `positions` in attention, by `rotate`

    def check_head_width(self, d: int) -> None:
        """Raise ValueError if the scheme does not work with queries and keys of width `d`."""

    def initialize(self, n_head: int, d_model: int, block_size: int, rng: Seed) -> Position:
        """A copy with parameters for a model of these sizes; the scheme itself if it has no parameters to make."""
        return self

    def forward(self, positions: np.ndarray, x: Tensor) -> Any:
        """The vectors to add to token vectors x (..., T, C) at `positions` (T,) or (B, T); for acts_on = "input"."""
        raise TypeError(f"{self!r} adds nothing to token vectors")

    def rotate(self, x: Tensor, positions: np.ndarray) -> Tensor:
        """Rotate queries or keys x (..., T, d), whose `positions` are (T,) or (B, T). By default x is unchanged."""
        return x

    def bias(self, n_head: int, n_q: int, n_k: int, dtype: np.dtype[Any]) -> Tensor | None:
        """What is added to the scores: (n_head, n_q, n_k), or None. Queries are the last n_q of the n_k positions."""
        return None


@dataclass(unsafe_hash=True)
class Learned(Position):
    """A learned vector for each position is added to the token vectors, as in GPT-2."""

    takes_arrays = True
    acts_on = "input"

    def __post_init__(self) -> None:
        self.weight: Tensor | None = None  # (block_size, C)

    def initialize(self, n_head: int, d_model: int, block_size: int, rng: Seed) -> Learned:
        scheme = dataclasses.replace(self)
        scheme.weight = normal((block_size, d_model), 0.02, rng)
        return scheme

    def forward(self, positions: np.ndarray, x: Tensor | None = None) -> Tensor:
        return ops.take(self.weight, positions)


class Sinusoidal(Position):
    """Sines and cosines of the position are added to the token vectors (arXiv:1706.03762, section 3.5)."""

    takes_arrays = True
    acts_on = "input"

    def forward(self, positions: np.ndarray, x: Tensor) -> np.ndarray | Tensor:
        table = sinusoidal(positions, x.shape[-1]).astype(x.dtype)
        return table if self.on_arrays else Tensor(table, name="positions")


@dataclass(unsafe_hash=True)
class Rotary(Position):
    """Queries and keys are rotated by angles proportional to their positions (arXiv:2104.09864); see `rotary`."""

    base: float = 10000.0

    takes_arrays = True
    rotates = True

    def check_head_width(self, d: int) -> None:
        if d % 2:
            raise ValueError(f"rotary positions rotate pairs, so d_k must be even, got {d}")

    def rotate(self, x: Tensor, positions: np.ndarray) -> Tensor:
        return rotary(x, positions, self.base)


class Alibi(Position):
    """A bias of minus slope times distance is added to the scores; each head has its slope (arXiv:2108.12409)."""

    takes_arrays = True

    def bias(self, n_head: int, n_q: int, n_k: int, dtype: np.dtype[Any]) -> Tensor:
        return Tensor(alibi(n_head, n_q, n_k), dtype=dtype, name="alibi")


@dataclass(unsafe_hash=True)
class Relative(Position):
    """A learned bias for each head and bucket of distances is added to the scores, as in T5 (arXiv:1910.10683).

    Args:
        num_buckets: buckets of distances; see `relative_buckets`.
        max_distance: all distances from here on share the last bucket.
        bidirectional: True: keys after the query have their own buckets. False: they use the bucket of distance 0.
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    takes_arrays = True

    def __post_init__(self) -> None:
        self.weight: Tensor | None = None  # (num_buckets, H)
        check_count(self.num_buckets, "num_buckets", least=4)
        check_count(self.max_distance, "max_distance", least=self.num_buckets)

    def initialize(self, n_head: int, d_model: int, block_size: int, rng: Seed) -> Relative:
        if self.weight is not None:  # it has its parameters already: layers that get this object share them
            return self
        scheme = dataclasses.replace(self)
        scheme.weight = normal((self.num_buckets, n_head), 0.02, rng)
        return scheme

    def bias(self, n_head: int, n_q: int, n_k: int, dtype: np.dtype[Any]) -> Tensor:
        offsets = np.arange(n_k) - np.arange(n_k - n_q, n_k)[:, None]
        buckets = relative_buckets(offsets, self.num_buckets, self.max_distance, self.bidirectional)
        return ops.transpose(ops.take(self.weight, Tensor(buckets, name="buckets")), axes=(2, 0, 1)).named("relative")


SCHEMES: dict[str, type[Position]] = {s.name: s for s in (Learned, Sinusoidal, Rotary, Alibi, Relative, Position)}


def as_position(position: Position | Mapping[str, Any] | str | None, **settings: Any) -> Position:
    """The scheme that `position` describes; see `find_scheme`. None is "none".

    Example:
        >>> as_position("rotary", base=500.0, num_buckets=8)
        Rotary(base=500.0)
    """
    return find_scheme("none" if position is None else position, Position, SCHEMES, "position", **settings)


# --------------------------------------------------------------------------------------------------------------------
# Formulas


def sinusoidal(positions: np.ndarray, width: int) -> np.ndarray:
    """Sines and cosines of falling frequency: positions (...) -> (..., width), float64.

    Column 2i is sin(p / 10000^(2i / width)), column 2i + 1 the cosine of the same (arXiv:1706.03762, section 3.5).
    """
    column = np.arange(width)
    exponents = (column - column % 2) / width  # 2i / width in both columns of pair i
    angles = np.asarray(positions)[..., None] / 10000.0**exponents
    return np.where(column % 2, np.cos(angles), np.sin(angles))


def rotary(x: Any, positions: np.ndarray, base: float = 10000.0) -> Any:
    """Rotate pairs of numbers by angles proportional to the position; q k^T then depends on distances only.

    Number i of a row is paired with number i + d / 2, and pair i turns by position * base^(-2i / d), as in Llama
    (arXiv:2104.09864, section 3.2, pairs neighbours instead).

    Args:
        x: (..., T, d) with an even d.
        positions: integers (T,), or (B, T) for an x whose first axis is B.
    """
    angles = np.asarray(positions)[..., None] * rotary_frequencies(x.shape[-1] // 2, base)
    # (T, d/2) -> (1, 1, T, d/2), or (B, T, d/2) -> (B, 1, T, d/2): all heads are rotated by the same angles.
    heads = (1,) * (x.ndim - angles.ndim)
    return ops.rotate(x, angles=angles.reshape(*angles.shape[:-2], *heads, *angles.shape[-2:]))


@functools.lru_cache
def rotary_frequencies(half: int, base: float) -> np.ndarray:
    """The angle by which each of `half` pairs turns from one position to the next: base^(-i / half)."""
    frequencies = base ** (-np.arange(half) / half)
    frequencies.flags.writeable = False
    return frequencies


def alibi_slopes(n_head: int) -> np.ndarray:
    """One slope per head: 2^(-8/n), 2^(-16/n), ... for n heads, n a power of two (arXiv:2108.12409, section 3).

    For another number of heads, let n be the next lower power of two. The first n heads get the slopes for n heads, the
    others get the 1st, 3rd, 5th, ... slope for 2n heads, as in the authors' code.
    """
    n = 2 ** int(math.log2(n_head))
    slopes = 2.0 ** (-8.0 / n * np.arange(1, n + 1))
    between = 2.0 ** (-4.0 / n * np.arange(1, 2 * n + 1, 2))
    return np.concatenate([slopes, between])[:n_head]


def alibi(n_head: int, n_q: int, n_k: int) -> np.ndarray:
    """-slope * distance: (n_head, n_q, n_k), float64. Queries are the last n_q of the n_k positions."""
    queries = np.arange(n_k - n_q, n_k)
    return -alibi_slopes(n_head)[:, None, None] * np.abs(queries[:, None] - np.arange(n_k))


def relative_buckets(offsets: np.ndarray, num_buckets: int, max_distance: int, bidirectional: bool) -> np.ndarray:
    """The bucket of each offset, position of the key minus position of the query: integers in 0 .. num_buckets - 1.

    Half of the buckets hold one distance each, the others grow exponentially up to `max_distance` (the T5 code).
    With `bidirectional`, keys after the query use the upper half of the buckets; else they share that of distance 0.
    """
    first = np.zeros_like(offsets)
    if bidirectional:
        num_buckets //= 2
        first = np.where(offsets > 0, num_buckets, 0)
    distances = np.abs(offsets) if bidirectional else np.maximum(-offsets, 0)
    exact = num_buckets // 2
    # From 0 at distance `exact` to 1 at `max_distance`, logarithmically: the place in the second half of the buckets.
    growth = np.log(np.maximum(distances, 1) / exact) / math.log(max_distance / exact)
    far = np.minimum(exact + (growth * (num_buckets - exact)).astype(int), num_buckets - 1)
    return first + np.where(distances < exact, distances, far)
