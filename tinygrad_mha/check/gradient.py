"""Is the derivative right? Every analytic gradient against finite differences, as a report that explains its verdict.

The function becomes a number by a random cotangent v: L(x) = <v, f(x)>. Its gradient by the rules is compared, element
by element, with (L(x + h) - L(x - h)) / 2h in float64. An element that disagrees is looked at again over a whole range
of steps: between truncation (large h) and rounding (small h) the differences settle, on the analytic value if the rule
is right and beside it if it is wrong. Where the slopes to the left and to the right differ there is no derivative, and
the report says so.

How far rounding reaches is known from the sweep itself: a relative error u in a tensor t of the graph changes L by at
most u * sum|t dL/dt|. The sum of that over all tensors is the `condition` of L: differences below u * condition / h,
and gradients below about u * condition / |x|, are rounding.

Tensors with more than `SAMPLED` elements are checked at that many elements, and in a random direction of all of them;
if only the direction disagrees, halving it finds the element.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from tinygrad_mha import engine, modes, ops
from tinygrad_mha.tensors import Tensor, plain
from tinygrad_mha.transforms import grad

SAMPLED = 200
STEP = 6e-6  # about the cube root of the rounding unit: the best step for a central difference
SWEEP = tuple(10.0**-k for k in range(1, 10))
ROUNDING = 10 * float(np.finfo(np.float64).eps)
ZERO = 1e-11  # a gradient this small, measured against condition / |x|, is zero up to rounding
DROWNED = 1e-4  # an error of this part of the largest gradient is never excused by rounding


@dataclass
class Difference:
    """One element: its analytic and its numeric derivative, and how far they are apart."""

    name: str
    index: tuple[int, ...]
    analytic: float
    numeric: float

    @property
    def absolute(self) -> float:
        return abs(self.analytic - self.numeric)

    @property
    def relative(self) -> float:
        size = max(abs(self.analytic), abs(self.numeric))
        return self.absolute / size if size else 0.0

    def __str__(self) -> str:
        place = f"{self.name}[{', '.join(map(str, self.index))}]" if self.index else self.name
        return (
            f"{place}: analytic {self.analytic:.10g}, numeric {self.numeric:.10g}, "
            f"off by {self.absolute:.2g} absolute, {self.relative:.2g} relative"
        )


@dataclass
class Entry:
    """What was found for one input or parameter.

    status: `ok`; `wrong`; `vacuous` (built on it, yet the gradient is zero everywhere: nothing was checked); `cut` (the
    value depends on it but the graph does not reach it); `ignored` (the function does not use it); `zero` (expected, or
    second order).
    """

    name: str
    shape: tuple[int, ...]
    order: int
    status: str
    checked: int
    worst: Difference | None = None
    kinks: list[Difference] = field(default_factory=list)
    sweep: list[tuple[float, float]] = field(default_factory=list)
    note: str = ""


@dataclass
class GradcheckReport:
    """The verdict of `gradcheck`: `.ok`, `.worst`, `.entries`; `print` it for the table, `.to_dict()` for data."""

    function: str
    entries: list[Entry] = field(default_factory=list)
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and all(e.status in ("ok", "ignored", "zero") for e in self.entries)

    @property
    def worst(self) -> Difference | None:
        """The element with the largest relative error, of those that are wrong if there are any."""
        wrong = [e.worst for e in self.entries if e.worst and e.status == "wrong"]
        found = wrong or [e.worst for e in self.entries if e.worst]
        return max(found, key=lambda d: math.inf if math.isnan(d.relative) else d.relative, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python data, ready for JSON."""
        worst = self.worst
        return {
            "function": self.function,
            "ok": self.ok,
            "problem": self.problem,
            "worst": _difference_dict(worst) if worst else None,
            "entries": [
                {
                    **{k: v for k, v in asdict(e).items() if k not in ("worst", "kinks")},
                    "shape": list(e.shape),
                    "worst": _difference_dict(e.worst) if e.worst else None,
                    "kinks": [_difference_dict(kink) for kink in e.kinks],
                }
                for e in self.entries
            ],
        }

    def __str__(self) -> str:
        lines = [f"gradcheck of {self.function}: {'ok' if self.ok else 'FAILED'}"]
        if self.problem:
            lines.append(f"  {self.problem}")
        width = max((len(e.name) for e in self.entries), default=0)
        for e in self.entries:
            worst = f"largest error {e.worst.absolute:.1e} ({e.worst.relative:.1e} relative)" if e.worst else ""
            order = f"{('first', 'second')[e.order - 1]:8}" if self.entries[-1].order == 2 else ""
            line = f"  {e.name:{width}}  {e.shape!s:12} {order}{e.status:8} {e.checked:4} checked  {worst}"
            lines.append(line.rstrip())
            if e.status == "wrong" and e.worst:
                lines.append(f"    {e.worst}")
            lines += [f"    {note}" for note in e.note.splitlines()]
            lines += [f"    step {h:7.0e}  error {error:.1e}" for h, error in e.sweep]
        return "\n".join(lines)


def _difference_dict(d: Difference) -> dict[str, Any]:
    return {**asdict(d), "index": list(d.index), "absolute": d.absolute, "relative": d.relative}


class GradcheckError(AssertionError):
    """Raised by `gradcheck` when a gradient is wrong or nothing could be checked; `.report` has the details."""

    def __init__(self, report: GradcheckReport) -> None:
        super().__init__(str(report))
        self.report = report


def gradcheck(
    f: Any,
    *inputs: Any,
    order: int = 1,
    eps: float | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    seed: int = 0,
    zero: Sequence[str] = (),
    raises: bool = True,
) -> GradcheckReport:
    """Check the gradients of a function or a module by every floating input and every named parameter.

    Everything happens in float64, whatever the dtypes handed in; parameters get their own values back afterwards, and
    no `.grad` is touched. The same array given twice counts as two inputs.

    Args:
        f: a function of tensors that returns a tensor, or a tuple, list or dict of them; or an nn.Module.
        inputs: arrays, tensors or numbers; floating ones are checked, all others are passed on as they are.
        order: 2 checks the second derivatives too: the map from (inputs, cotangent) to the gradients.
        eps: the step, relative to max(1, |x|); chosen by itself when None.
        rtol, atol: an element passes within rtol * its size + atol * the largest gradient of its tensor.
        seed: of the cotangent and of the elements sampled.
        zero: names of inputs or parameters whose gradient is expected to be zero everywhere.
        raises: whether a failed check raises GradcheckError; the report is the same.

    Raises:
        GradcheckError: with the report, when a gradient is wrong; when it is zero everywhere although the output is
            built on the input (the check could not fail: `softmax(x).sum()`); when two calls differ (dropout).

    Example:
        >>> print(gradcheck(lambda x: x.tanh(), np.array([0.3, -1.2])))
        gradcheck of <lambda>: ok
          x  (2,)         ok          2 checked  largest error ...
    """
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, got {order}")
    report = GradcheckReport(_name_of(f))
    with _in_float64(f) as parameters:
        check = _Check(f, inputs, parameters, report, np.random.default_rng(seed), eps, rtol, atol, frozenset(zero))
        check.first_order()
        if order == 2 and report.ok:
            check.second_order()
    if raises and not report.ok:
        raise GradcheckError(report)
    return report


def _name_of(f: Any) -> str:
    return getattr(f, "__name__", None) or getattr(f, "name", None) or type(f).__name__


@contextmanager
def _in_float64(f: Any) -> Iterator[dict[str, Tensor]]:
    """The named parameters of a module, in float64 and asking for gradients; afterwards all is as it was."""
    named = dict(f.named_parameters()) if hasattr(f, "named_parameters") else {}
    before = {name: (p._data, p._needs_grad) for name, p in named.items()}
    generators = list(f.generators().values()) if hasattr(f, "generators") else []
    states = [g.bit_generator.state for g in generators]
    try:
        for p in named.values():
            p._data, p._needs_grad = p._data.astype(np.float64), True
        yield named
    finally:
        for name, p in named.items():
            p._data, p._needs_grad = before[name]
        for generator, state in zip(generators, states, strict=True):
            generator.bit_generator.state = state


@dataclass
class _Check:
    f: Callable[..., Any]
    inputs: tuple[Any, ...]
    parameters: dict[str, Tensor]
    report: GradcheckReport
    rng: np.random.Generator
    eps: float | None
    rtol: float
    atol: float
    zero: frozenset[str]

    def __post_init__(self) -> None:
        names = _argument_names(self.f, self.inputs)
        self.arguments = [_leaf(x, name) if _is_floating(x) else x for x, name in zip(self.inputs, names, strict=True)]
        chosen = [(name, x) for name, x in zip(names, self.arguments, strict=True) if _is_leaf(x)]
        self.variables = dict(chosen) | self.parameters
        unknown = self.zero - set(self.variables)
        if unknown:
            raise ValueError(f"zero= names {sorted(unknown)}; the inputs and parameters are {list(self.variables)}")
        if not self.variables:
            raise ValueError(
                "nothing to check: gradcheck wants at least one floating input or a module with parameters"
            )

    # ------------------------------------------------------------------------------------------------------- the map

    def outputs(self) -> list[Tensor]:
        """The floating outputs of f, in float64."""
        result = self.f(*self.arguments)
        parts = list(result.values()) if isinstance(result, dict) else result
        parts = list(parts) if isinstance(parts, (tuple, list)) else [parts]
        for y in parts:
            if not isinstance(y, Tensor):
                raise TypeError(f"the function to check must return tensors, got {type(y).__name__}")
        return [y.astype(np.float64) for y in parts if y.dtype.kind == "f"]

    def gradients(self, cotangents: list[Any], create_graph: bool = False) -> list[Tensor]:
        """The gradient of <cotangents, f> by each variable."""
        with modes.enable_grad():
            total = _inner(self.outputs(), cotangents)
            return list(grad(total, list(self.variables.values()), create_graph=create_graph))

    # ---------------------------------------------------------------------------------------------------- the orders

    def first_order(self) -> None:
        with modes.no_grad():
            values, again = [[y.numpy().copy() for y in self.outputs()] for _ in range(2)]
        if not values:
            self.report.problem = "the function returns no floating tensor"
            return
        if len(values) != len(again) or any(not _same(a, b) for a, b in zip(values, again, strict=True)):
            self.report.problem = (
                "not deterministic: two calls with the same input give different values, so no difference means "
                "anything. Dropout? Put the module into eval(), or draw the mask outside and pass it in"
            )
            return
        if not all(np.isfinite(v).all() for v in values):
            self.report.problem = "the function has values that are inf or nan here; check it at another point"
            return
        cotangents = [self.rng.standard_normal(v.shape) for v in values]
        with modes.enable_grad():
            total = _inner(self.outputs(), cotangents)
        reached = {id(t) for t in engine.toposort([total])}

        def loss() -> list[np.ndarray]:
            with modes.no_grad():
                return [y.numpy() * c for y, c in zip(self.outputs(), cotangents, strict=True)]

        for entry, x, analytic, condition in self.compared(total, self.variables, loss, order=1):
            if entry.checked and np.abs(analytic).max() * max(1.0, _largest(x._data)) <= ZERO * condition:
                _judge_zero(entry, id(x) in reached, entry.name in self.zero)

    def second_order(self) -> None:
        """The map from the variables and the cotangents to the gradients, checked like any other map."""
        with modes.no_grad():
            shapes = [y.shape for y in self.outputs()]
        cotangents = [Tensor(self.rng.standard_normal(s), requires_grad=True) for s in shapes]
        directions = [self.rng.standard_normal(x.shape) for x in self.variables.values()]
        named = self.variables | {f"cotangent {i}" if i else "cotangent": c for i, c in enumerate(cotangents)}
        with modes.enable_grad():
            total = _inner(self.gradients(cotangents, create_graph=True), directions)

        def loss() -> list[np.ndarray]:
            fixed = [c.detach() for c in cotangents]
            return [g.numpy() * d for g, d in zip(self.gradients(fixed), directions, strict=True)]

        for entry, _, analytic, _ in self.compared(total, named, loss, order=2):
            if entry.status == "ok" and entry.checked and not np.abs(analytic).max():
                entry.status = "zero"

    def compared(
        self, total: Tensor, named: dict[str, Tensor], loss: Any, order: int
    ) -> Iterator[tuple[Entry, Tensor, np.ndarray, float]]:
        """Compare the gradients of `total`, which `loss` gives as summands, by each tensor named."""
        found, condition = {}, np.finfo(np.float64).tiny
        if total.requires_grad:
            for t, g in engine.sweep(total, np.ones(())):
                found[id(t)] = g
                finite = np.isfinite(t.numpy())
                condition += float(np.abs(np.where(finite, t.numpy(), 0.0) * g).sum())
        for name, x in named.items():
            analytic = found.get(id(x), np.zeros(x.shape))
            entry = Entry(name, x.shape, order, "ok", 0)
            _Comparison(self, entry, x._data, analytic, loss, condition).run()
            self.report.entries.append(entry)
            yield entry, x, analytic, condition


def _judge_zero(entry: Entry, reached: bool, expected: bool) -> None:
    """The analytic gradient is zero everywhere: what does that mean?"""
    if entry.status == "wrong":
        if not reached:
            entry.status = "cut"
            entry.note = (
                "the value depends on it, but the graph does not reach it: a detach, .numpy() or no_grad inside?"
            )
    elif expected:
        entry.status = "zero"
    elif reached:
        entry.status = "vacuous"
        entry.note = (
            "the output is built on it, yet its gradient is zero everywhere, so this check could not fail. softmax or\n"
            "layer norm followed by .sum() does that: return the tensor itself. If zero is right here, as for the\n"
            f"bias of the keys, which no softmax sees, say so: zero=[{entry.name!r}]"
        )
    else:
        entry.status = "ignored"
        entry.note = "the output does not depend on it"


# --------------------------------------------------------------------------------------------------------------------
# Finite differences


@dataclass
class _Comparison:
    """One tensor x against finite differences of `loss` (a list of summands); x is moved in place and put back."""

    check: _Check
    entry: Entry
    x: np.ndarray
    analytic: np.ndarray
    loss: Callable[[], list[np.ndarray]]
    condition: float

    def run(self) -> None:
        usable = np.argwhere(np.isfinite(self.x))  # an input of -inf, as masked scores are, cannot be moved
        sampled = len(usable) > SAMPLED
        places = self.check.rng.permutation(usable)[:SAMPLED] if sampled else usable
        self.entry.checked = len(places)
        for place in map(tuple, places.tolist()):
            self.check_element(place)
        if sampled and self.entry.status == "ok":
            self.check_direction(usable)
        kinks = self.entry.kinks
        if kinks:
            self.entry.note = (
                f"no derivative at {len(kinks)} elements (a kink: relu at 0, a tie of max), at first\n{kinks[0]}"
            )

    # ----------------------------------------------------------------------------------------------------- judgements

    def check_element(self, place: tuple[int, ...]) -> None:
        direction = np.zeros_like(self.x)
        direction[place] = 1.0
        line = _Line(self.x, direction, self.loss)
        exact = float(self.analytic[place])
        step = self.check.eps or STEP
        found = Difference(self.entry.name, place, exact, line.central(step))
        sweep: list[tuple[float, float]] = []
        if not self.fits(found, line.noise(step, self.condition)):
            sweep = [(h, line.central(h)) for h in SWEEP]
            found, step = self.settled(sweep, line, found) or (found, step)
        if self.fits(found, line.noise(step, self.condition)):
            if self.entry.status == "ok" and self.is_worst(found):
                self.entry.worst = found
        elif self.is_kink(line, exact):
            self.entry.kinks.append(found)
        elif self.entry.status == "ok" or self.is_worst(found):
            self.entry.status, self.entry.worst = "wrong", found
            self.entry.sweep = [(h, abs(value - exact)) for h, value in sweep]

    def fits(self, d: Difference, noise: float) -> bool:
        size = max(abs(d.analytic), abs(d.numeric))
        if self.scale > ZERO * self.condition:
            noise = min(noise, DROWNED * self.scale)
        return d.absolute <= self.check.rtol * size + self.check.atol * self.scale + noise

    def settled(
        self, sweep: list[tuple[float, float]], line: _Line, found: Difference
    ) -> tuple[Difference, float] | None:
        """The value on which the differences settle, and its step.

        They settle where they change least from one step to the next; beside a kink they do so twice, on either side of
        the distance to it, and then the analytic value may choose. A single step that comes close to it may not: it can
        do so by its own error.
        """
        settled = []
        for (_, wider), (h, value) in pairwise(sweep):
            if math.isfinite(value - wider):
                noise = line.noise(h, self.condition)
                steady = self.fits(Difference(found.name, found.index, wider, value), noise)
                there = replace(found, numeric=value)
                settled.append((not (steady and self.fits(there, noise)), abs(value - wider) + noise, there, h))
        return min(settled, key=lambda s: s[:2])[2:] if settled else None

    def is_kink(self, line: _Line, exact: float) -> bool:
        """Whether left and right slopes differ at every scale, and the rule took a value between the two."""
        gaps = []
        for step in (STEP, STEP / 100):
            left, right = line.one_sided(step)
            gaps.append(abs(right - left))
            slack = 1e-3 * gaps[-1]
            if not min(left, right) - slack <= exact <= max(left, right) + slack:
                return False
        return gaps[0] > 1e-3 * self.scale and gaps[1] > 0.5 * gaps[0]  # a smooth gap shrinks with the step

    def is_worst(self, d: Difference) -> bool:
        worst = self.entry.worst
        return worst is None or not d.absolute <= worst.absolute  # a nan is worse than any number

    def check_direction(self, usable: np.ndarray) -> None:
        """Move all elements at once; if that disagrees, halve the set that moves until one element is left."""
        signs = np.zeros_like(self.x)
        signs[tuple(usable.T)] = self.check.rng.choice([-1.0, 1.0], len(usable))

        def agrees(part: np.ndarray) -> bool:
            direction = np.zeros_like(self.x)
            direction[tuple(part.T)] = signs[tuple(part.T)]
            line = _Line(self.x, direction, self.loss)
            found = Difference(self.entry.name, (), float(np.sum(self.analytic * direction)), line.central(STEP))
            if self.fits(found, line.noise(STEP, self.condition)):
                return True
            best = self.settled([(h, line.central(h)) for h in SWEEP], line, found)
            return best is not None and self.fits(best[0], line.noise(best[1], self.condition))

        if agrees(usable):
            return
        part = usable
        while len(part) > 1:
            half = part[: len(part) // 2]
            part = half if not agrees(half) else part[len(part) // 2 :]
        self.check_element(tuple(part[0].tolist()))
        if self.entry.status == "ok":
            self.entry.note = "a move of all elements at once disagrees, but no single one does: a kink nearby?"

    @property
    def scale(self) -> float:
        return float(np.abs(self.analytic).max(initial=0.0, where=np.isfinite(self.analytic)))


@dataclass
class _Line:
    """The loss along one direction through x. Steps are relative to the size of what moves, but at least absolute."""

    x: np.ndarray
    direction: np.ndarray
    loss: Callable[[], list[np.ndarray]]

    def at(self, t: float) -> list[np.ndarray]:
        before = self.x.copy()
        try:
            self.x += t * self.direction
            with np.errstate(all="ignore"):  # a step may leave the domain; the value then says so
                return self.loss()
        finally:
            self.x[...] = before

    def slope(self, a: float, b: float) -> float:
        """(L(b) - L(a)) / (b - a), the summands subtracted one by one, which keeps more digits."""
        with np.errstate(all="ignore"):
            return float(sum(np.sum(p - q) for p, q in zip(self.at(b), self.at(a), strict=True))) / (b - a)

    def central(self, h: float) -> float:
        return self.slope(-h * self.size, h * self.size)

    def one_sided(self, h: float) -> tuple[float, float]:
        return self.slope(-h * self.size, 0.0), self.slope(0.0, h * self.size)

    def noise(self, h: float, condition: float) -> float:
        """What rounding alone may do to a difference with this step."""
        return ROUNDING * condition / (h * self.size)

    @property
    def size(self) -> float:
        return max(1.0, float(np.abs(self.x[self.direction != 0]).max(initial=0.0)))


# --------------------------------------------------------------------------------------------------------------------
# Small things


def _inner(ys: Sequence[Tensor], vs: Sequence[Any]) -> Tensor:
    """The sum of <y, v>: one number, as a tensor."""
    total = Tensor(np.zeros(()))
    for y, v in zip(ys, vs, strict=True):
        total = total + ops.sum(y * v)
    return total


def _is_floating(x: Any) -> bool:
    if isinstance(x, (bool, int)) or x is None or isinstance(x, str):
        return False
    return isinstance(x, (float, Tensor, np.ndarray, np.floating)) and np.asarray(plain(x)).dtype.kind == "f"


def _leaf(x: Any, name: str) -> Tensor:
    """A float64 copy of its own, so that arrays which overlap or stand twice are moved one element at a time."""
    return Tensor(np.array(plain(x), dtype=np.float64), requires_grad=True, name=name)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _argument_names(f: Any, inputs: Sequence[Any]) -> list[str]:
    """The parameter names of f; of a tensor that has a name, that."""
    target = f.forward if hasattr(f, "forward") else f
    try:
        known = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        known = []
    fixed = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = []
    for i, x in enumerate(inputs):
        name = x.name if isinstance(x, Tensor) and x.name else fixed[i] if i < len(fixed) else f"input {i}"
        names.append(name if name not in names else f"{name} ({i})")
    return names


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=True)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0, where=np.isfinite(x)))
