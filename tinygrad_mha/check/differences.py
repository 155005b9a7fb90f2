"""Finite differences: how a derivative is estimated, and when an analytic one agrees with it.

L is a sum of many numbers. It is given as a function without arguments, which returns the arrays of its summands. The
derivative of L along a direction v of a tensor x is estimated by

    (L(x + h v) - L(x - h v)) / 2h

If that disagrees with the analytic derivative, the estimate is repeated for a range of steps h. Large h have truncation
errors, small h have rounding errors; between them the estimate hardly changes with h. If it is then the analytic value,
the rule is right, else it is wrong. Where the slopes to the left and to the right differ (a kink), L has no derivative.

Rounding is bounded by the `condition` of L. A relative error u in a tensor t of the graph changes L by at most
u * sum|t dL/dt|, and the sum of that over all tensors is the condition: differences below u * condition / h are
rounding, and so are gradients below about u * condition / |x|.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from tinygrad_mha.check.report import Difference, Entry

__all__ = ["CLOSE", "STEP", "ZERO", "Comparison", "compare_rows", "is_equal", "largest", "measure_condition"]

CLOSE = 1e-9  # arrays are equal, relative to the largest element, in float64
STEP = 6e-6  # about the cube root of the rounding unit: the best step for a central difference
STEPS = tuple(10.0**-k for k in range(1, 10))  # the steps to try if the first one disagrees
ROUNDING = 10 * float(np.finfo(np.float64).eps)  # the relative error u of an intermediate, with some margin
ZERO = 1e-11  # a gradient this small, measured against condition / |x|, is zero up to rounding
MAX_ROUNDING = 1e-4  # rounding may explain an error of at most this fraction of the largest gradient

Loss = Callable[[], list[np.ndarray]]


class Line:
    """Difference quotients of L at `x` along `direction`. `x` is moved in place and put back.

    A step `h` moves x by h * size * direction, where size = max(1, largest |element| that moves).
    """

    def __init__(self, x: np.ndarray, direction: np.ndarray, loss: Loss) -> None:
        self.x = x
        self.direction = direction
        self.loss = loss
        self.size = max(1.0, float(np.abs(x[direction != 0]).max(initial=0.0)))

    def central(self, h: float) -> float:
        """The central difference with the relative step `h`."""
        return self._slope(-h * self.size, h * self.size)

    def one_sided(self, h: float) -> tuple[float, float]:
        """The slopes to the left and to the right."""
        return self._slope(-h * self.size, 0.0), self._slope(0.0, h * self.size)

    def _slope(self, a: float, b: float) -> float:
        """(L(x + b v) - L(x + a v)) / (b - a). Subtracting summand by summand keeps more digits."""
        with np.errstate(all="ignore"):
            return float(sum(np.sum(p - q) for p, q in zip(self._at(b), self._at(a), strict=True))) / (b - a)

    def _at(self, t: float) -> list[np.ndarray]:
        before = self.x.copy()
        try:
            self.x += t * self.direction
            return self.loss()  # nan or inf if the step leaves the domain
        finally:
            self.x[...] = before


@dataclass
class Comparison:
    """The analytic gradient of L with respect to one tensor x, compared with finite differences.

    Attributes:
        entry: receives the results.
        x: the array of the tensor, float64.
        gradient: the analytic gradient of L with respect to x.
        loss: returns the summands of L.
        condition: the condition of L.
        step: the first step to try.
        rtol, atol: relative to the derivative, and to the largest element of the gradient.
    """

    entry: Entry
    x: np.ndarray
    gradient: np.ndarray
    loss: Loss
    condition: float
    step: float
    rtol: float
    atol: float

    def is_zero(self) -> bool:
        """Whether the whole gradient is zero up to rounding."""
        return largest(self.gradient) * max(1.0, largest(self.x)) <= ZERO * self.condition

    def agrees(self, direction: np.ndarray) -> bool:
        """Whether the analytic and the numeric derivative along `direction` agree."""
        _, agrees, _ = self._measure(Line(self.x, direction, self.loss), ())
        return agrees

    def check_element(self, index: tuple[int, ...]) -> None:
        """Compare the derivatives with respect to one element and enter the result."""
        direction = np.zeros_like(self.x)
        direction[index] = 1.0
        line = Line(self.x, direction, self.loss)
        difference, agrees, sweep = self._measure(line, index)
        entry = self.entry
        is_worst = entry.worst is None or difference.absolute > entry.worst.absolute
        # `entry.worst` is the worst element that agrees, until one is wrong; from then on it is the worst wrong one.
        if agrees:
            if entry.status == "ok" and is_worst:
                entry.worst = difference
        elif self._is_kink(line, difference.analytic):
            entry.kinks.append(difference)
        elif entry.status == "ok" or is_worst:
            entry.status, entry.worst = "wrong", difference
            entry.sweep = [(h, abs(value - difference.analytic)) for h, value in sweep]

    def find_wrong_element(self, direction: np.ndarray) -> None:
        """Find an element that explains why `direction` disagrees: halve the set that moves until one is left."""
        moving = np.argwhere(direction)
        while len(moving) > 1:
            half, rest = np.split(moving, [len(moving) // 2])
            part = np.zeros_like(direction)
            part[tuple(half.T)] = direction[tuple(half.T)]
            moving = rest if self.agrees(part) else half
        self.check_element(tuple(moving[0].tolist()))

    def _measure(self, line: Line, index: tuple[int, ...]) -> tuple[Difference, bool, list[tuple[float, float]]]:
        """The derivatives along a line, whether they agree, and (step, estimate) of the steps tried."""
        analytic = float(np.sum(self.gradient * line.direction, where=line.direction != 0))
        first = Difference(self.entry.name, index, analytic, line.central(self.step))
        if self._within_tolerance(first, self._rounding(line, self.step)):
            return first, True, []
        sweep = [(h, line.central(h)) for h in STEPS]
        settled, h = self._settle(sweep, line, first) or (first, self.step)
        return settled, self._within_tolerance(settled, self._rounding(line, h)), sweep

    def _rounding(self, line: Line, h: float) -> float:
        """The largest error of a central difference with the step `h` that rounding alone explains."""
        return ROUNDING * self.condition / (h * line.size)

    def _within_tolerance(self, d: Difference, rounding: float) -> bool:
        scale = largest(self.gradient)
        if scale > ZERO * self.condition:
            rounding = min(rounding, MAX_ROUNDING * scale)
        allowed = self.rtol * max(abs(d.analytic), abs(d.numeric)) + self.atol * scale + rounding
        return math.isfinite(d.absolute) and d.absolute <= allowed

    def _settle(
        self, sweep: list[tuple[float, float]], line: Line, first: Difference
    ) -> tuple[Difference, float] | None:
        """The estimate on which a sweep settles, with its step; None if no two neighbours are finite.

        A sweep settles where its estimates change least from one step to the next. Beside a kink it settles twice, with
        steps larger and smaller than the distance to it; then the one that agrees with the analytic value counts. One
        estimate that agrees, but differs from its neighbour, does not count: it can agree by chance.
        """
        candidates = []
        for (_, wider), (h, value) in pairwise(sweep):
            if math.isfinite(value - wider):
                rounding = self._rounding(line, h)
                steady = self._within_tolerance(replace(first, analytic=wider, numeric=value), rounding)
                estimate = replace(first, numeric=value)
                agrees = steady and self._within_tolerance(estimate, rounding)
                # The order of preference: one that agrees, then the smallest change.
                candidates.append(((not agrees, abs(value - wider) + rounding), estimate, h))
        if not candidates:
            return None
        _, estimate, h = min(candidates, key=lambda candidate: candidate[0])
        return estimate, h

    def _is_kink(self, line: Line, analytic: float) -> bool:
        """Whether the slopes left and right differ at every scale, with the analytic value between the two."""
        gaps = []
        for h in (STEP, STEP / 100):
            left, right = line.one_sided(h)
            gaps.append(abs(right - left))
            slack = 1e-3 * gaps[-1]
            if not min(left, right) - slack <= analytic <= max(left, right) + slack:
                return False
        # Where L is smooth, the gap shrinks with the step.
        return gaps[0] > 1e-3 * largest(self.gradient) and gaps[1] > 0.5 * gaps[0]


def largest(x: np.ndarray) -> float:
    """The largest finite absolute value in `x`."""
    return float(np.abs(x).max(initial=0.0, where=np.isfinite(x)))


def is_equal(a: np.ndarray, b: np.ndarray, tolerance: float = CLOSE) -> bool:
    """Whether two arrays are equal up to `tolerance`, relative to the largest finite element of b."""
    if a.shape != b.shape:
        return False
    return bool(np.allclose(a, b, rtol=0, atol=tolerance * largest(b), equal_nan=True))


def compare_rows(rows: Any, whole: Any, tokens: slice = slice(None)) -> np.ndarray:
    """The largest difference of each row of (..., n, width) from the rows `tokens` of `whole`, (n,).

    It is relative to the largest element of `whole`, and infinite where only one of two numbers is nan.
    """
    rows, whole = np.asarray(rows), np.asarray(whole)
    right = whole[..., tokens, :]
    with np.errstate(invalid="ignore"):  # inf - inf
        differences = np.where((rows == right) | (np.isnan(rows) & np.isnan(right)), 0.0, np.abs(rows - right))
    differences = np.where(np.isnan(differences), np.inf, differences) / (largest(whole) or 1.0)
    return differences.max(axis=(*range(differences.ndim - 2), -1))


def measure_condition(gradients: Iterable[tuple[Any, np.ndarray]]) -> float:
    """The condition of L, from the tensors of the graph with their gradients; a little above 0."""
    condition = float(np.finfo(np.float64).tiny)
    for tensor, gradient in gradients:
        x = tensor.numpy()
        condition += float(np.abs(np.where(np.isfinite(x), x, 0.0) * gradient).sum())
    return condition
