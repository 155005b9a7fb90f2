"""`derivation`: backward formulas written by hand, each compared with autodiff and finite differences.

Every formula receives the right gradients of later stages. So a wrong formula does not make the next one wrong, and one
run judges all of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_mha import engine, modes
from tinygrad_mha.check.differences import STEP, ZERO, Comparison, largest, measure_condition
from tinygrad_mha.check.gradient_check import find_problem, is_floating, make_leaf, parameters_in_float64
from tinygrad_mha.check.report import Entry
from tinygrad_mha.check.verdict import Finding, StoppedError, Verdict, confining, name_subject
from tinygrad_mha.tensors import Tensor, plain

__all__ = ["DerivationVerdict", "derivation"]

TOLERANCE = 1e-8  # relative to the largest element of the right gradient
MOST_REDUCTIONS = 4  # of a formula, the axes of the first sums and means are tried
MOST_ELEMENTS = 1000  # of a stage with more, it is not tried whether a formula derives each by its own alone


@dataclass(repr=False)
class DerivationVerdict(Verdict):
    """The verdict of `derivation`: one finding for each formula, in the order of the backward pass."""

    @property
    def first_wrong(self) -> str | None:
        """The name of the first wrong formula on the way from the output to the inputs, or None."""
        return self.failed[0].name if self.failed else None

    def to_dict(self) -> dict[str, Any]:
        """Plain Python data, ready for JSON."""
        return super().to_dict() | {"first_wrong": self.first_wrong}

    def __str__(self) -> str:
        wrong = f"FAILED, the first wrong formula is {self.first_wrong}" if self.first_wrong else self.status
        rows = [("gradient", "shape", "difference", "")]
        for finding in self.findings:
            off = finding.details.get("difference")
            status = self._status_word(finding) + (f": {finding.message}" if finding.message else "")
            rows.append((finding.name, str(finding.details["shape"]), "" if off is None else f"{off:.1e}", status))
        first, second, third = (max(len(row[i]) for row in rows) for i in range(3))
        lines = [f"{self.subject}: {wrong}"]
        for row, cause in zip(rows, ["", *(finding.cause for finding in self.findings)], strict=True):
            lines.append(f"  {row[0]:{first}}  {row[1]:{second}}  {row[2]:>{third}}  {row[3]}".rstrip())
            lines += [" " * (first + second + third + 8) + f"cause: {cause}"] if cause else []
        return "\n".join(lines)


def derivation(
    forward: Any,
    inputs: Mapping[str, Any],
    formulas: Mapping[str, Callable[..., Any]],
    *,
    grad_output: Any = None,
    seed: int = 0,
) -> DerivationVerdict:
    """Compare backward formulas written in NumPy with autodiff and with finite differences, stage by stage, in float64.

    Args:
        forward: a function or module, called as `forward(**inputs)`. It names its stages with `.named("S")` and returns
            a tensor, or returns a dict of stages, the output last. An output without a name is "Y".
        inputs: arrays by name. Floating ones are stages too, all others (ids, masks) are passed on as they are.
        formulas: a function for each gradient: "dS" for the stage "S"; any of the stages, in any order. Its parameters
            are names of inputs and stages ("S") and of gradients of later stages ("dP"): it receives their values. With
            `**_` it receives all of them.
        grad_output: the gradient of the output. Default: random numbers, or 1 if the output has one element.
        seed: seeds the random numbers.

    Returns:
        The verdict: `.ok`, `.first_wrong`, `.findings`. A wrong formula is shown with its worst element and, if a
        simple repair makes it right, with the cause: a sign, factor, transpose, shape, row sum, sum over a broadcast or
        wrong axis, transposed operand, mask or path.

    Raises:
        ValueError: no formulas, one of an unknown stage or with an unknown parameter; two stages with one name; an
            output that is not finite, or differs between two calls.
        TypeError: `inputs` or `formulas` is no dict, a formula is no function, or `forward` returns no tensor, or not
            one computed in float64 from its floating inputs.
        RuntimeError: `forward` calls sys.exit(), or does not return within 20 seconds. A formula that does has failed.

    Example:
        >>> def forward(S, V):
        ...     P = S.softmax().named("P")
        ...     return P @ V
        >>> S, V = np.arange(6.0).reshape(2, 3), np.array([[1.0, 2.0], [3.0, 5.0], [4.0, 9.0]])
        >>> print(derivation(forward, {"S": S, "V": V}, {"dP": lambda dY, V: dY @ V.T, "dS": lambda dP, P: P * dP}))
        forward: FAILED, the first wrong formula is dS
          gradient  shape   difference
          dP        (2, 3)     0.0e+00  passed
          dS        (2, 3)     2.0e+00  FAILED: [1, 2] formula 2.3322, autodiff 0.331623, finite differences 0.331623
                                        cause: a row sum is missing or wrong: subtract a term with a sum over axis -1
    """
    for name, given in (("inputs", inputs), ("formulas", formulas)):
        if not isinstance(given, Mapping):
            shape = "{'S': array}" if name == "inputs" else "{'dS': function}"
            raise TypeError(f"{name} must be a dict, such as {shape}, got {type(given).__name__}")
    for name, function in formulas.items():
        if not callable(function):
            raise TypeError(f"the formula of {name} must be a function, got {type(function).__name__}")
    rng = np.random.default_rng(seed)
    with parameters_in_float64(forward) as parameters, modes.enable_grad():
        arguments = {name: make_leaf(x, name) if is_floating(x) else x for name, x in inputs.items()}
        evaluate = functools.partial(run_forward, forward, arguments)
        problem = find_problem(lambda: [find_stages(evaluate())[0]])
        if problem:
            raise ValueError(problem)
        y, stages = find_stages(evaluate())
        stages = parameters | stages
        run = RecordedRun(
            y, rng.standard_normal(y.shape) if grad_output is None and y.size != 1 else y._seed(grad_output)
        )
        gradients = {name: run.gradients[id(t)] for name, t in stages.items() if id(t) in run.gradients}
        unknown = [name for name in formulas if name[:1] != "d" or name[1:] not in gradients]
        if unknown or not formulas:
            what = f"there is no stage for {', '.join(unknown)}" if unknown else "there are no formulas"
            raise ValueError(f"{what}; they can be given for {', '.join(f'd{name}' for name in gradients)}")
        verdict = DerivationVerdict(name_subject(forward))
        for name in sorted(formulas, key=lambda name: -run.needed_at(stages[name[1:]])):
            stage = stages[name[1:]]
            known = {key: plain(x) for key, x in (dict(inputs) | stages).items()}
            known |= {f"d{key}": g for key, g in gradients.items() if made_at(stages[key]) > made_at(stage)}
            formula = Formula(name, formulas[name], known)
            reference = make_reference(name, stage, run, evaluate)
            others = run.list_other_elements(stage)
            verdict.findings.append(judge(formula, reference, run.split_gradient(stage), others, rng))
    return verdict


# --------------------------------------------------------------------------------------------------------------------
# The right gradients


def run_forward(forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    with confining():
        return forward(**arguments)


def find_stages(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and all named tensors of a forward pass; an output without a name is "Y"."""
    stages = dict(result) if isinstance(result, Mapping) else {}
    y = [*stages.values()][-1] if stages else result
    if not isinstance(y, Tensor) or y.dtype != np.float64 or not y.requires_grad:
        got = f"one of {y.dtype}, made from constants" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise TypeError(f"forward must compute a float64 tensor from its inputs, and return it or a dict; got {got}")
    for tensor in engine.toposort([y]):
        if tensor.name and stages.setdefault(tensor.name, tensor) is not tensor:
            raise ValueError(f"two stages are called {tensor.name!r}: give each its own name")
    if not any(stage is y for stage in stages.values()):
        stages["Y"] = y
    return y, stages


def made_at(stage: Tensor) -> int:
    """The time at which a stage was computed; 0 for an input."""
    return stage.node.stamp if stage.node else 0


class RecordedRun:
    """A forward pass to `y`, and the gradients of all its values, by id, for the gradient `cotangent` of `y`."""

    def __init__(self, y: Tensor, cotangent: np.ndarray) -> None:
        self.y, self.cotangent = y, cotangent
        self.order = engine.toposort([y])
        pairs = list(engine.sweep(y, cotangent))
        self.gradients = {id(value): g for value, g in pairs}
        self.condition = measure_condition(pairs)

    def needed_at(self, stage: Tensor) -> float:
        """The time at which a stage was computed; of an input, just before the first stage computed from it."""
        if stage.node:
            return stage.node.stamp
        uses = (value.node.stamp for value in self.order if value.node and any(x is stage for x in value.node.inputs))
        return min(uses, default=0.5) - 0.5

    def replay(self, stage: Tensor, array: np.ndarray) -> np.ndarray:
        """The output if `stage` were `array`: the operations that follow it run again."""
        moved: dict[int, Any] = {id(stage): array}
        for value in self.order:
            node = value.node
            if node and id(value) not in moved and any(id(x) in moved for x in node.inputs):
                operands = [moved.get(id(x), a) for x, a in zip(node.inputs, node.arrays, strict=True)]
                moved[id(value)] = node.op(*operands, **node.kwargs)
        result: np.ndarray = moved[id(self.y)]
        return result

    def split_gradient(self, stage: Tensor) -> list[tuple[str, np.ndarray]]:
        """What each use of `stage` contributes to its gradient, with the name of what was computed from it."""
        parts = []
        for value in self.order:
            if value.node and any(x is stage for x in value.node.inputs) and id(value) in self.gradients:
                received: dict[int, Any] = {}
                engine.backprop_node(value, self.gradients[id(value)], received, differentiable=False)
                parts.append((value.name or value.node.op.name, received[id(stage)]))
        return parts

    def list_other_elements(self, stage: Tensor) -> Iterator[tuple[str, np.ndarray]]:
        """Of each use of `stage` in its shape, what it contributes through other elements than the same one."""
        for value in self.order:
            is_use = value.node and value.shape == stage.shape and any(x is stage for x in value.node.inputs)
            if is_use and stage.size <= MOST_ELEMENTS and id(value) in self.gradients:
                g = self.gradients[id(value)]
                others = np.zeros(stage.shape)
                for index in np.ndindex(stage.shape):
                    received: dict[int, Any] = {}
                    alone = np.zeros(stage.shape)
                    alone[index] = g[index]
                    engine.backprop_node(value, alone, received, differentiable=False)
                    others += received[id(stage)]
                    others[index] -= received[id(stage)][index]
                yield value.name or value.node.op.name, others


def make_reference(name: str, stage: Tensor, run: RecordedRun, forward: Callable[[], Any]) -> Comparison:
    """The gradient of a stage, to be compared with finite differences: of `forward`, or of what follows the stage."""
    x = stage.numpy().copy() if stage.node else stage._data  # what moves

    def loss() -> list[np.ndarray]:
        y = run.replay(stage, x) if stage.node else find_stages(forward())[0].numpy()
        return [y * run.cotangent]

    gradient = run.gradients[id(stage)]
    return Comparison(Entry(name, x.shape, 1), x, gradient, loss, run.condition, STEP, rtol=1e-5, atol=1e-7)


# --------------------------------------------------------------------------------------------------------------------
# The formulas


def judge(
    formula: Formula,
    reference: Comparison,
    parts: list[tuple[str, np.ndarray]],
    others: Iterator[tuple[str, np.ndarray]],
    rng: np.random.Generator,
) -> Finding:
    """Compare what one formula gives with the right gradient.

    `parts` are what each use of the stage contributes, `others` what of it comes through other elements.
    """
    name, x, right = reference.entry.name, reference.x, reference.gradient
    details: dict[str, Any] = {"shape": right.shape}
    if not reference.agrees(rng.choice([-1.0, 1.0], x.shape) * np.isfinite(x)):
        cause = "a kink (relu at 0), a detached path, or a wrong rule of a primitive: see tg.gradcheck"
        return Finding(name, "failed", "autodiff and finite differences disagree", cause, details=details)
    atol = TOLERANCE * largest(right) + ZERO * reference.condition / max(1.0, largest(x))

    def is_right(array: np.ndarray) -> bool:
        return array.shape == right.shape and bool((np.abs(array - right) <= atol).all())

    try:
        given = formula.compute()
    except StoppedError as error:
        return Finding(name, "failed", str(error), details=details)
    except Exception as error:
        cause = next((words for words, array in formula.list_changes() if is_right(array)), "")
        return Finding(name, "failed", f"raises {type(error).__name__}: {error}", cause, details=details)
    fits = given.shape == right.shape
    if fits:
        details["difference"] = float(np.abs(given - right).max(initial=0.0))
    if is_right(given):
        if not reference.is_zero():
            return Finding(name, "passed", details=details)
        reason = "the gradient is 0 everywhere, so this cannot fail: a .sum() after softmax or layer norm?"
        return Finding(name, "does not apply", reason, details=details)
    repairs = itertools.chain(
        formula.list_changes(),
        list_repairs(name, given, right, formula.arrays()),
        list_paths(given, right, parts),
        list_missing_elements(given, others),
        formula.list_substitutes(),
    )
    cause = next((words for words, array in repairs if is_right(array)), "") or formula.explain(given)
    if not fits:
        return Finding(name, "failed", f"has the shape {given.shape}, expected {right.shape}", cause, details=details)
    errors = np.nan_to_num(np.abs(given - right), nan=np.inf)
    index = tuple(int(i) for i in np.unravel_index(errors.argmax(), errors.shape))
    values = {"formula": given[index], "autodiff": right[index]}
    if np.isfinite(x[index]):  # masked scores are -inf: they cannot move
        reference.check_element(index)
        found = next(d for d in (reference.entry.worst, *reference.entry.kinks) if d)
        values["finite differences"] = found.numeric
    place = f"{list(index)} " if index else ""
    message = place + ", ".join(f"{what} {value:.6g}" for what, value in values.items())
    return Finding(name, "failed", message, cause, {"element": index} | values, details)


class Formula:
    """A formula with what it may use.

    Raises:
        ValueError: it has a parameter of another name than those in `known`.
    """

    def __init__(self, name: str, function: Callable[..., Any], known: dict[str, Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        missing = [key for key, p in named.items() if p.default is p.empty and key not in known]
        if missing:
            raise ValueError(f"the formula of {name} asks for {', '.join(missing)}; there are {', '.join(known)}")
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.name, self.function, self.known = name, function, known
        self.arguments = {key: value for key, value in known.items() if takes_all or key in named}

    def arrays(self) -> dict[str, np.ndarray]:
        """The finite arrays that it could use."""
        return {key: x for key, x in self.known.items() if isinstance(x, np.ndarray) and np.isfinite(x).all()}

    def compute(self, **changed: Any) -> np.ndarray:
        """What it returns, for copies of its arguments, because it may write to them."""
        with confining():
            result = self.function(**copy.deepcopy(self.arguments | changed))
        if result is None:
            raise TypeError("the formula returns None: does it end with return?")
        return np.array(plain(result), np.float64)

    def explain(self, given: np.ndarray) -> str:
        """What is wrong whatever the right formula is: the kind of numbers, or how they depend on later gradients."""
        if not np.isfinite(given).all():
            index = [int(i) for i in np.argwhere(~np.isfinite(given))[0]]
            return f"not finite, first at {index}: a division by 0, or a logarithm or root of a negative number?"
        if not given.any():
            return "it is 0 everywhere: is a result of the formula used, or only the array that it was to be put into?"
        gradients = {key: x for key, x in self.arguments.items() if key[:1] == "d" and key[1:] in self.known}
        if not gradients:
            return ""
        names = ", ".join(gradients)
        for key, x in self.arguments.items():
            if isinstance(x, np.ndarray) and np.array_equal(x, given):
                return f"it is {key}, unchanged: the derivative of the stage, or the gradient behind it, is missing"
        with contextlib.suppress(Exception):
            doubled = self.compute(**{key: 2 * x for key, x in gradients.items()})
            if np.array_equal(doubled, given):
                return f"it does not depend on {names}: by the chain rule, each term has a gradient as a factor"
            if not np.allclose(doubled, 2 * given, rtol=1e-6, atol=0):
                return f"{names} must be a factor of each term exactly once: with it doubled, the result is not doubled"
        return ""

    def list_changes(self) -> Iterator[tuple[str, np.ndarray]]:
        """Single changes, a sum or mean over another axis or a transposed operand: in words, and the result."""
        operands = {key: x for key, x in self.arguments.items() if isinstance(x, np.ndarray) and x.ndim >= 2}
        for number, kind, axis, keepdims in itertools.product(
            range(MOST_REDUCTIONS), ("sum", "mean"), (None, -1, -2, -3), (False, True)
        ):
            reductions = Reductions(number, kind, axis, keepdims)
            with contextlib.suppress(Exception):
                result = self.compute(**{key: reductions.watch(x) for key, x in operands.items()})
                yield f"{reductions.change} is right", result
        for key, x in operands.items():
            yield from self._replace(key, x.mT, f"an operand is transposed: with {key}.mT")

    def list_substitutes(self) -> Iterator[tuple[str, np.ndarray]]:
        """Another array in place of an argument."""
        for key, (other, x) in itertools.product(self.arguments, self.arrays().items()):
            yield from self._replace(key, x, f"with {other}")

    def _replace(self, key: str, x: np.ndarray, words: str) -> Iterator[tuple[str, np.ndarray]]:
        with contextlib.suppress(Exception):  # shapes may not fit
            yield f"{words} in place of {key} it is right", self.compute(**{key: x})


class Reductions:
    """The sums and means of the arrays that it watches, in the order of the calls; one of them is replaced.

    Attributes:
        number: which one.
        kind, axis: what replaces it; None keeps the axis.
        keepdims: whether the axis stays, with one element, in any case.
        change: what was replaced, in words.
    """

    def __init__(self, number: int, kind: str, axis: int | None, keepdims: bool) -> None:
        self.number, self.kind, self.axis, self.keepdims = number, kind, axis, keepdims
        self.change = ""

        class Watched(np.ndarray):
            sum = functools.partialmethod(lambda x, *args, **options: self.reduce("sum", x, *args, **options))
            mean = functools.partialmethod(lambda x, *args, **options: self.reduce("mean", x, *args, **options))

        self.watch = lambda x: np.asarray(x).view(Watched)

    def reduce(self, kind: str, x: np.ndarray, axis: Any = None, **options: Any) -> Any:
        """Called in place of x.sum and x.mean."""
        if self.number == 0:
            place = f"{kind} over axis {axis}"
            kind, axis = self.kind, axis if self.axis is None else self.axis
            self.change = f"a {place} is wrong: a {kind} over axis {axis}"
            if self.keepdims:
                options["keepdims"] = True
                self.change += " with keepdims=True"
        self.number -= 1
        return self.watch(getattr(x.view(np.ndarray), kind)(axis=axis, **options))


def list_repairs(
    name: str,
    given: np.ndarray,
    right: np.ndarray,
    arrays: dict[str, np.ndarray],
) -> Iterator[tuple[str, np.ndarray]]:
    """Simple changes of what a formula gave: in words, and the result. `arrays` are what it could use."""
    yield "the sign is wrong, of every element", -given
    if given.ndim >= 2:
        yield f"a transpose: {name}.mT is right", given.mT
    if given.size == right.size:
        yield f"the shape: {name}.reshape{right.shape} is right", given.reshape(right.shape)
    added = given.ndim - right.ndim
    axes = tuple(i for i in range(given.ndim) if i < added or right.shape[i - added] == 1)
    if added >= 0 and given.sum(axis=axes).size == right.size:
        words = f"the sum over a broadcast axis is missing: {name}.sum(axis={axes}) is right"
        yield words, given.sum(axis=axes).reshape(right.shape)
    if given.shape != right.shape:
        return
    if np.allclose(given, right, rtol=0, atol=1e-6 * largest(right)):
        yield "numbers are rounded to float32: compute in float64", right
    factor = float((given * right).sum()) / (float((given * given).sum()) or 1.0)
    if given.size > 1:
        words = write_factor(factor, {n for array in arrays.values() for n in array.shape})
        yield f"a factor of {words} is missing", factor * given
    alike = {key: array for key, array in arrays.items() if array.ndim and is_broadcast_to(array.shape, given.shape)}
    yield from ((f"a factor {key} is missing", given * array) for key, array in alike.items())
    for key, array in alike.items():
        yield f"a factor 1 / {key} is missing", np.divide(given, array, out=given.copy(), where=array != 0)
    if right.any():
        yield "it is not 0 where it must be: a mask is missing", np.where(right == 0, 0.0, given)
    terms = [(np.ones(()), given)]  # what is subtracted: a factor, and what is reduced
    for array in alike.values():
        terms += [(array, given), (array, array * given)]
    for axis, kind, (array, inner) in itertools.product(range(-given.ndim, 0), ("sum", "mean"), terms):
        reduced = getattr(inner, kind)(axis=axis, keepdims=True)
        words = f"subtract a term with a {kind} over axis {axis}"
        yield f"a {'row ' * (axis == -1)}{kind} is missing or wrong: {words}", given - array * reduced


def list_paths(
    given: np.ndarray, right: np.ndarray, parts: list[tuple[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """The right gradient, if a formula gave the contributions of the uses of a stage with other factors than 1."""
    if given.shape == right.shape and np.isfinite(given).all() and len(parts) > 1:
        columns = np.stack([part.ravel() for _, part in parts], axis=-1)
        factors = np.linalg.lstsq(columns, given.ravel())[0].round(6)
        missing = ", ".join(name for (name, _), factor in zip(parts, factors, strict=True) if factor == 0)
        others = [f"{name} times {f:g}" for (name, _), f in zip(parts, factors, strict=True) if f not in (0, 1)]
        words = [f"what comes through {missing} is missing"] if missing else []
        words += [f"what comes through {', '.join(others)} should come once"] if others else []
        if np.allclose(columns @ factors, given.ravel(), rtol=0, atol=TOLERANCE * largest(given)):
            yield "; ".join(words), right


def list_missing_elements(
    given: np.ndarray, others: Iterator[tuple[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """What a formula gave, with what it leaves out if it derives each element by the same element alone."""
    for name, rest in others:
        if rest.shape == given.shape:
            words = f"each element of {name} depends on others too, the formula has its own alone"
            yield words, given + rest


def is_broadcast_to(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether an array of this shape can be multiplied with one of the other, and gives one of the other."""
    return len(shape) <= len(other) and all(n in (1, m) for n, m in zip(shape[::-1], other[::-1], strict=False))


def write_factor(factor: float, lengths: set[int]) -> str:
    """A factor as a power of a length that occurs, if it is one: "1/sqrt(7)"."""
    for n in sorted(lengths - {0, 1}):
        for text, value in {f"1/sqrt({n})": n**-0.5, f"sqrt({n})": n**0.5, f"1/{n}": 1 / n, f"{n}": float(n)}.items():
            if np.isclose(abs(factor), value, rtol=TOLERANCE, atol=0):
                return f"-{text}" if factor < 0 else text
    return f"{factor:.9g}"
