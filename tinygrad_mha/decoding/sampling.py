"""How one token is chosen from logits: temperature, top-k, top-p and the draw.

Every function takes an array of logits (..., V) and works along its last axis.
"""

from __future__ import annotations

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import check_count, check_number, check_probability

__all__ = ["Sampler", "apply_temperature", "check_logits", "compute_log_probabilities", "compute_probabilities"]
__all__ += ["draw", "keep_top_k", "keep_top_p"]

ROUNDING = 1e-6  # tolerance of top-p: probabilities come from float32 logits, and their sum may miss p by this much


def check_logits(logits: np.ndarray) -> np.ndarray:
    """Return `logits`. Single entries may be -inf, which stands for an impossible token.

    Raises:
        ValueError: a row contains nan or +inf, or only -inf, so that no token can be chosen.
    """
    if not np.isfinite(logits.max(axis=-1)).all():
        raise ValueError("the logits are nan or infinite, so no token can be chosen: has the training diverged?")
    return logits


def compute_log_probabilities(logits: np.ndarray) -> np.ndarray:
    """log softmax of `logits` in float64, (..., V).

    Raises:
        ValueError: see `check_logits`.
    """
    return ops.log_softmax(check_logits(logits).astype(np.float64))


def apply_temperature(logits: np.ndarray, temperature: float) -> np.ndarray:
    """logits / temperature minus a constant per row, such that the largest is 0; float64.

    Softmax ignores the constant. It is subtracted before the division, so a tiny temperature sends the other logits to
    -inf and never the largest to inf.
    """
    logits = np.asarray(logits, np.float64)
    with np.errstate(over="ignore"):
        return (logits - logits.max(axis=-1, keepdims=True)) / temperature


def keep_top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """The `k` largest logits, -inf elsewhere; all of them if there are at most k. Ties keep the lowest index."""
    if k >= logits.shape[-1]:
        return logits
    kth = -np.partition(-logits, k - 1, axis=-1)[..., k - 1 : k]
    above, equal = logits > kth, logits == kth
    room = k - above.sum(axis=-1, keepdims=True)
    return np.where(above | (equal & (equal.cumsum(axis=-1) <= room)), logits, -np.inf)


def keep_top_p(logits: np.ndarray, p: float) -> np.ndarray:
    """The most probable tokens whose probabilities sum to `p` or more, as few as possible; -inf elsewhere.

    This is nucleus sampling (arXiv:1904.09751). The token that crosses p is kept, and the most probable one always is.
    Ties keep the lowest index.
    """
    if p >= 1:
        return logits  # a sum of rounded probabilities may reach 1 before the last of them
    order = np.argsort(-logits, axis=-1, kind="stable")
    sorted_p = ops.softmax(np.take_along_axis(logits, order, axis=-1))
    sum_before = sorted_p.cumsum(axis=-1) - sorted_p
    keep_sorted = sum_before < p - ROUNDING
    keep_sorted[..., 0] = True
    keep = np.empty_like(keep_sorted)
    np.put_along_axis(keep, order, keep_sorted, axis=-1)
    return np.where(keep, logits, -np.inf)


def compute_probabilities(
    logits: np.ndarray, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> np.ndarray:
    """The probabilities that `generate` draws from, (..., V), float64: temperature, then top-k, then top-p.

    Raises:
        ValueError: an option out of its range.

    Example:
        >>> compute_probabilities(np.log([0.5, 0.41, 0.09]), top_p=0.9).round(4)
        array([0.5495, 0.4505, 0.    ])
    """
    check_sampling(temperature, top_k, top_p)
    logits = np.asarray(logits)
    if temperature == 0:
        return np.eye(logits.shape[-1])[logits.argmax(axis=-1)]
    logits = apply_temperature(logits, temperature)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    return ops.softmax(logits)


def draw(p: np.ndarray, rng: np.random.Generator) -> int:
    """Draw an index with the probabilities `p`, (V,): the first at which the running sum exceeds a random number.

    The random number is below the total also after rounding, so there is such an index, and an index of probability 0
    is never drawn.
    """
    sums = p.cumsum()
    return int(sums.searchsorted(rng.random() * sums[-1], side="right"))


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError for an option out of its range."""
    check_number(temperature, "temperature")
    if top_k is not None:
        check_count(top_k, "top_k")
    if top_p is not None:
        check_probability(top_p, "top_p")


class Sampler:
    """Chooses one token per row. Each row draws from its own random generator.

    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None, n_rows: int
    ) -> None:
        check_sampling(temperature, top_k, top_p)
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generators = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(n_rows)]

    def choose(self, logits: np.ndarray, rows: np.ndarray) -> list[int]:
        """A token for each of the rows with the indices `rows` (R,), from logits (R, V)."""
        if self.temperature == 0:
            return [int(token) for token in logits.argmax(axis=-1)]
        p = compute_probabilities(logits, self.temperature, self.top_k, self.top_p)
        return [draw(p[i], self.generators[row]) for i, row in enumerate(rows)]
