"""Is the derivative right? Every analytic gradient against finite differences, as a report that explains its verdict.

The function becomes a number by a random cotangent v: L(x) = <v, f(x)>. Its gradient by the rules is compared, element
by element, with (L(x + h) - L(x - h)) / 2h in float64. An element that disagrees is looked at again over a whole range
of step sizes: an honest gradient agrees somewhere between truncation (large h) and rounding (small h), a wrong rule
nowhere. Where the slopes to the left and to the right differ, there is no derivative, and the report says so.

Tensors with more than `SAMPLED` elements are checked at that many elements, and in a random direction of all of them;
if only the direction disagrees, halving it finds the element.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tinygrad_mha import engine, ops
from tinygrad_mha.tensor import Tensor, plain
from tinygrad_mha.transforms import grad

SAMPLED = 200
STEP = 6e-6  # about the cube root of the rounding unit: the best step for a central difference
SWEEP = tuple(10.0**-k for k in (1, 2, 3, 4, 5, 6, 7, 8))
ZERO = 1e-11  # a gradient this small, measured against |v| |f(x)| / |x|, is zero up to rounding


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
            order = "2nd order " if e.order == 2 else ""
            lines.append(
                f"  {e.name:{width}}  {e.shape!s:12} {order}{e.status:8} {e.checked:4} checked  {worst}".rstrip()
            )
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
          x  (2,)         ok          2 checked  largest error 2.7e-12 (3.5e-12 relative)
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
    generators = [g for _, g in f.generators()] if hasattr(f, "generators") else []
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
        with engine.enable_grad():
            total = _inner(self.outputs(), cotangents)
            return list(grad(total, list(self.variables.values()), create_graph=create_graph))

    # ---------------------------------------------------------------------------------------------------- the orders

    def first_order(self) -> None:
        with engine.no_grad():
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
        with engine.enable_grad():
            total = _inner(self.outputs(), cotangents)
            reached = {id(t) for t in engine.toposort([total])}
        analytic = [g.numpy() for g in self.gradients(cotangents)]
        size = sum(float(np.abs(v * c).sum()) for v, c in zip(values, cotangents, strict=True))

        def loss() -> list[np.ndarray]:
            with engine.no_grad():
                return [y.numpy() * c for y, c in zip(self.outputs(), cotangents, strict=True)]

        for (name, x), a in zip(self.variables.items(), analytic, strict=True):
            entry = _compare(self, name, x._data, a, loss, order=1)
            if entry.checked and np.abs(a).max(initial=0) * max(1.0, _largest(x._data)) <= ZERO * max(size, 1e-300):
                _judge_zero(entry, id(x) in reached, name in self.zero)
            self.report.entries.append(entry)

    def second_order(self) -> None:
        """The map from the variables and the cotangents to the gradients, checked like any other map."""
        with engine.no_grad():
            shapes = [y.shape for y in self.outputs()]
        cotangents = [Tensor(self.rng.standard_normal(s), requires_grad=True) for s in shapes]
        directions = [self.rng.standard_normal(x.shape) for x in self.variables.values()]
        named = self.variables | {f"cotangent {i}" if i else "cotangent": c for i, c in enumerate(cotangents)}
        with engine.enable_grad():
            total = _inner(self.gradients(cotangents, create_graph=True), directions)
            analytic = [g.numpy() for g in grad(total, list(named.values()))]

        def loss() -> list[np.ndarray]:
            return [
                g.numpy() * d for g, d in zip(self.gradients([c.detach() for c in cotangents]), directions, strict=True)
            ]

        for (name, x), a in zip(named.items(), analytic, strict=True):
            entry = _compare(self, name, x._data, a, loss, order=2)
            if entry.status == "ok" and entry.checked and not np.abs(a).max(initial=0):
                entry.status = "zero"
            self.report.entries.append(entry)


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
            "the output is built on it, yet its gradient is zero everywhere, so this check could not fail. "
            "softmax or layer norm\nfollowed by .sum() does that: return the tensor itself. "
            f"If zero is right here, say so: zero=[{entry.name!r}]"
        )
    else:
        entry.status = "ignored"
        entry.note = "the output does not depend on it"


# --------------------------------------------------------------------------------------------------------------------
# Finite differences


def _compare(check: _Check, name: str, x: np.ndarray, analytic: np.ndarray, loss: Any, order: int) -> Entry:
    """Compare `analytic` with differences of `loss` (a list of summands) as the elements of `x` are moved in place."""
    usable = np.argwhere(np.isfinite(x))  # an input of -inf, as masked scores are, cannot be moved
    sampled = len(usable) > SAMPLED
    places = check.rng.permutation(usable)[:SAMPLED] if sampled else usable
    entry = Entry(name, x.shape, order, "ok", len(places))
    scale = float(np.abs(analytic).max(initial=0.0, where=np.isfinite(analytic)))
    for place in map(tuple, places.tolist()):
        _check_element(check, entry, x, place, analytic, loss, scale)
    if sampled and entry.status == "ok":
        _check_direction(check, entry, x, usable, analytic, loss, scale)
    if entry.kinks:
        entry.note = (
            f"no derivative at {len(entry.kinks)} of the elements (a kink: relu at 0, a tie of max), at first\n"
        )
        entry.note += str(entry.kinks[0])
    return entry


def _check_element(
    check: _Check, entry: Entry, x: np.ndarray, place: tuple[int, ...], analytic: np.ndarray, loss: Any, scale: float
) -> None:
    one = np.zeros_like(x)
    one[place] = 1.0
    line = _Line(x, one, loss)
    exact = float(analytic[place])
    found = Difference(entry.name, place, exact, line.central(check.eps or STEP))
    if _fits(check, found, scale, line.noise(check.eps or STEP)):
        _keep_worst(entry, found)
        return
    # It disagrees: with which steps?
    sweep = [(h, line.central(h)) for h in SWEEP]
    h, numeric = min(sweep, key=lambda pair: abs(pair[1] - exact) if math.isfinite(pair[1]) else math.inf)
    found = Difference(entry.name, place, exact, numeric)
    if _fits(check, found, scale, line.noise(h)):
        _keep_worst(entry, found)
        return
    left, right = line.one_sided(STEP)
    closer_left, closer_right = line.one_sided(STEP / 100)
    gap, closer_gap = abs(right - left), abs(closer_right - closer_left)
    if gap > 1e-3 * scale and closer_gap > 0.5 * gap:  # of a smooth function the gap shrinks with the step
        slack = 1e-3 * gap
        if min(left, right) - slack <= exact <= max(left, right) + slack:
            entry.kinks.append(Difference(entry.name, place, exact, line.central(STEP)))
            return
    if entry.status != "wrong" or entry.worst is None or not found.absolute <= entry.worst.absolute:
        entry.worst, entry.sweep = found, [(step, abs(value - exact)) for step, value in sweep]
    entry.status = "wrong"


def _check_direction(
    check: _Check, entry: Entry, x: np.ndarray, usable: np.ndarray, analytic: np.ndarray, loss: Any, scale: float
) -> None:
    """Move all elements at once; if that disagrees, halve the set that moves until one element is left."""
    direction = np.zeros_like(x)
    direction[tuple(usable.T)] = check.rng.choice([-1.0, 1.0], len(usable))

    def agrees(part: np.ndarray) -> bool:
        some = np.zeros_like(x)
        some[tuple(part.T)] = direction[tuple(part.T)]
        line = _Line(x, some, loss)
        exact = float(np.sum(analytic * some))
        tolerance = check.atol * scale * math.sqrt(len(part)) + check.rtol * abs(exact)
        return any(abs(line.central(h) - exact) <= tolerance + line.noise(h) for h in (STEP, 1e-4, 1e-3, 1e-7))

    if agrees(usable):
        return
    part = usable
    while len(part) > 1:
        half = part[: len(part) // 2]
        part = half if not agrees(half) else part[len(part) // 2 :]
    _check_element(check, entry, x, tuple(part[0].tolist()), analytic, loss, scale)
    if entry.status == "ok":
        entry.note = "a move of all elements at once disagrees, but no single one does: a kink nearby?"


@dataclass
class _Line:
    """The loss along one direction through x, which is moved in place and put back."""

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
        return float(sum(np.sum(p - q) for p, q in zip(self.at(b), self.at(a), strict=True))) / (b - a)

    def central(self, h: float) -> float:
        h *= self.size
        return self.slope(-h, h)

    def one_sided(self, h: float) -> tuple[float, float]:
        h *= self.size
        return self.slope(-h, 0.0), self.slope(0.0, h)

    def noise(self, h: float) -> float:
        """What rounding alone may do to a difference with this step."""
        total = sum(float(np.abs(p).sum()) for p in self.at(0.0))
        return 4 * np.finfo(np.float64).eps * total / (h * self.size)

    @property
    def size(self) -> float:
        return max(1.0, float(np.abs(self.x[self.direction != 0]).max(initial=0.0)))


def _fits(check: _Check, d: Difference, scale: float, noise: float) -> bool:
    size = max(abs(d.analytic), abs(d.numeric))
    return d.absolute <= check.rtol * size + check.atol * scale + noise


def _keep_worst(entry: Entry, d: Difference) -> None:
    if entry.status == "ok" and (entry.worst is None or not d.absolute <= entry.worst.absolute):
        entry.worst = d


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
