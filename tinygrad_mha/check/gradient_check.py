"""Compare the gradients that backward computes with finite differences.

A random cotangent c reduces the outputs of a function f to one number: L(x) = <c, f(x)>. The gradient G of L that
backward computes is right if in every direction v

    <G, v> = (L(x + h v) - L(x - h v)) / 2h

up to truncation and rounding. `check_variable` compares the two sides in a random direction that moves all elements,
then in the directions that move one element. For second derivatives, the same check runs on another function: the one
that maps the inputs and the cotangent to the gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tinygrad_mha import engine, modes, ops
from tinygrad_mha.check.differences import STEP, Comparison, measure_condition
from tinygrad_mha.check.report import Entry, GradcheckError, GradcheckReport
from tinygrad_mha.check.verdict import name_subject
from tinygrad_mha.tensors import Tensor, plain
from tinygrad_mha.torch_names import translate_keywords
from tinygrad_mha.transforms import grad

__all__ = ["gradcheck"]


@translate_keywords
def gradcheck(
    f: Any,
    *inputs: Any,
    order: int = 1,
    eps: float | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    seed: int = 0,
    elements: int = 200,
    zero: Sequence[str] = (),
    raises: bool = True,
) -> GradcheckReport:
    """Check the gradients of a function or module with respect to all floating inputs and named parameters.

    The check computes in float64, whatever the dtypes of the inputs. Afterwards the parameters have their own arrays
    again, and no `.grad` has changed. An array given twice counts as two inputs. Tensors with more than `elements`
    elements are compared at that many of them and in one random direction of all. If only the direction disagrees, a
    bisection looks for the wrong element.

    Args:
        f: a function of tensors that returns a tensor, or a tuple, list or dict of them; or an nn.Module.
        inputs: arrays, tensors, numbers or lists of numbers of any shape. Floating ones are checked, all others (ids,
            masks, options) are passed on as they are.
        order: 2 checks the second derivatives too.
        eps: the step, relative to max(1, |x|); chosen automatically when None.
        rtol, atol: the allowed error of an element: rtol * |element| + atol * the largest |gradient| of its tensor.
        elements: how many elements of a tensor are compared one by one.
        seed: seeds the random cotangent, directions and sampled elements.
        zero: names of inputs or parameters whose gradient is expected to be zero everywhere.
        raises: if False, a failed check returns its report instead of raising GradcheckError with it.

    Returns:
        The report: `.ok`, `.worst`, `.entries`, `.to_dict()`; its text is a table.

    Raises:
        GradcheckError: with the report, if a gradient is wrong; if two calls give different values (dropout); or if the
            output depends on an input but the gradient is zero everywhere, so that the check could not fail
            (`softmax(x).sum()` is constant); or if no input has an element.
        ValueError: no input and no parameter is floating, or an argument is invalid.
        TypeError: `f` returns something that is not a tensor.

    Example:
        >>> print(gradcheck(lambda x: x.tanh(), np.array([0.3, -1.2])))
        gradcheck of <lambda>: ok
          x  (2,)         ok          2 checked  largest error ...
    """
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, got {order}")
    rng = np.random.default_rng(seed)
    tolerances = {"step": eps or STEP, "rtol": rtol, "atol": atol}
    report = GradcheckReport(name_subject(f))
    with parameters_in_float64(f) as parameters, modes.enable_grad():
        names = name_inputs(f, inputs)
        arguments = [make_leaf(x, name) if is_floating(x) else x for x, name in zip(inputs, names, strict=True)]
        variables = {name: x for name, x in zip(names, arguments, strict=True) if is_floating(x)} | parameters
        check_names(variables, zero)

        def values() -> list[Tensor]:
            return select_floating(f(*arguments))

        report.problem = find_problem(values)
        if not report.problem:
            report.entries += check_map(values(), values, variables, 1, rng, zero, elements, **tolerances)
        if order == 2 and report.ok:
            cotangents = [Tensor(rng.standard_normal(y.shape), requires_grad=True) for y in values()]
            named = {f"cotangent {i}" if i else "cotangent": c for i, c in enumerate(cotangents)}

            def gradients(create_graph: bool = False) -> list[Tensor]:
                return list(grad(contract(values(), cotangents), list(variables.values()), create_graph=create_graph))

            report.entries += check_map(
                gradients(create_graph=True), gradients, variables | named, 2, rng, zero, elements, **tolerances
            )
        if not report.problem and not any(entry.checked for entry in report.entries):
            report.problem = "no input has an element that can move: nothing was compared"
    if raises and not report.ok:
        raise GradcheckError(report)
    return report


def check_map(
    outputs: list[Tensor],
    evaluate: Callable[[], list[Tensor]],
    variables: dict[str, Tensor],
    order: int,
    rng: np.random.Generator,
    zero: Sequence[str],
    elements: int,
    **tolerances: float,
) -> Iterator[Entry]:
    """Check the gradient of L = <c, outputs> with respect to each variable, for a random cotangent c.

    `evaluate` computes the outputs again, after a variable has moved.
    """
    cotangents = [rng.standard_normal(y.shape) for y in outputs]
    total = contract(outputs, cotangents)
    pairs = list(engine.sweep(total, np.ones(()))) if total.requires_grad else []
    gradients = {id(t): g for t, g in pairs}
    condition = measure_condition(pairs)

    def loss() -> list[np.ndarray]:
        return [y.numpy() * c for y, c in zip(evaluate(), cotangents, strict=True)]

    for name, x in variables.items():
        entry = Entry(name, x.shape, order)
        gradient = gradients.get(id(x), np.zeros(x.shape))
        comparison = Comparison(entry, x._data, gradient, loss, condition, **tolerances)
        check_variable(comparison, rng, elements)
        if order == 2 and entry.status == "ok" and entry.checked and not gradient.any():
            entry.status = "zero"
        if order == 1 and entry.checked and comparison.is_zero():
            set_zero_status(entry, id(x) in gradients, name in zero)
        yield entry


def check_variable(comparison: Comparison, rng: np.random.Generator, most: int) -> None:
    """Compare the gradient of one tensor along a random direction, then element by element."""
    entry, x = comparison.entry, comparison.x
    direction = rng.choice([-1.0, 1.0], x.shape) * np.isfinite(x)  # masked scores are -inf: they cannot move
    agrees = comparison.agrees(direction)
    elements = np.argwhere(direction)
    sample = rng.permutation(elements)[:most] if len(elements) > most else elements
    for index in sample.tolist():
        comparison.check_element(tuple(index))
    entry.checked = len(sample)
    if not len(sample):
        entry.status = "empty"
        entry.note = "nothing was compared: " + ("none of its elements is finite" if x.size else "it has no elements")
    if not agrees and entry.status == "ok" and len(elements) > most:
        comparison.find_wrong_element(direction)
    if not agrees and entry.status == "ok":
        entry.note = "a step of all elements at once disagrees, but no single one does: a kink nearby?"
    if entry.kinks:
        entry.note = f"no derivative at {len(entry.kinks)} elements (a kink: relu at 0, a tie of max), the first is"
        entry.note += f"\n{entry.kinks[0]}"


def set_zero_status(entry: Entry, reached: bool, expected: bool) -> None:
    """Set the status of an input whose analytic gradient is zero everywhere; see `Entry` for the words.

    `reached`: the graph leads from the output to it. `expected`: the caller named it in `zero`.
    """
    if entry.status == "wrong":
        if not reached:
            entry.status = "cut"
            entry.note = "the output depends on it, but the graph does not reach it: detach, .numpy() or no_grad?"
    elif expected:
        entry.status = "zero"
    elif reached:
        entry.status = "vacuous"
        entry.note = (
            "the output is built on it, so this check could not fail. A .sum() after softmax or layer norm does that:\n"
            "return the tensor itself. If zero is right, as for a bias that is the same for all keys, pass\n"
            f"zero=[{entry.name!r}]"
        )
    else:
        entry.status = "ignored"
        entry.note = "the output does not depend on it"


# --------------------------------------------------------------------------------------------------------------------
# Inputs, parameters and outputs


@contextmanager
def parameters_in_float64(f: Any) -> Iterator[dict[str, Tensor]]:
    """The named parameters of a module, in float64 and requiring gradients; afterwards everything is as before."""
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


def name_inputs(f: Any, inputs: Sequence[Any]) -> list[str]:
    """A name for each input: that of the tensor, else that of the parameter of `f`, else its position."""
    try:
        known = list(inspect.signature(getattr(f, "forward", f)).parameters.values())
    except (TypeError, ValueError):
        known = []
    positional = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names: list[str] = []
    for i, x in enumerate(inputs):
        name = x.name if isinstance(x, Tensor) and x.name else positional[i] if i < len(positional) else f"input {i}"
        names.append(name if name not in names else f"{name} ({i})")
    return names


def check_names(variables: dict[str, Tensor], zero: Sequence[str]) -> None:
    """Raise ValueError if there is nothing to check, or `zero` names something else."""
    if not variables:
        raise ValueError("nothing to check: gradcheck expects at least one floating input or a module with parameters")
    unknown = sorted(set(zero) - set(variables))
    if unknown:
        raise ValueError(f"zero= names {unknown}; the inputs and parameters are {list(variables)}")


def is_floating(x: Any) -> bool:
    """Whether an input is checked: a floating array, tensor or number, or a list of numbers with a floating one."""
    if isinstance(x, (list, tuple)):
        return any(map(is_floating, x)) and all(isinstance(e, (list, tuple, int, float, np.number)) for e in x)
    return isinstance(x, (float, np.floating)) or (isinstance(x, (Tensor, np.ndarray)) and x.dtype.kind == "f")


def make_leaf(x: Any, name: str) -> Tensor:
    """A float64 leaf with a copy of `x`: inputs that overlap or are given twice must move one element at a time."""
    return Tensor(np.array(plain(x), dtype=np.float64), requires_grad=True, name=name)


def select_floating(result: Any) -> list[Tensor]:
    """The floating tensors among what a function returned, in float64."""
    parts = list(result.values()) if isinstance(result, dict) else result
    parts = parts if isinstance(parts, (tuple, list)) else [parts]
    for y in parts:
        if not isinstance(y, Tensor):
            raise TypeError(f"the function to check must return tensors, got {type(y).__name__}")
    return [y.astype(np.float64) for y in parts if y.dtype.kind == "f"]


def find_problem(f: Callable[[], list[Tensor]]) -> str:
    """Why differences of `f` would mean nothing, or ""."""
    values = [y.numpy().copy() for y in f()]
    again = [y.numpy().copy() for y in f()]
    if not values:
        return "the function returns no floating tensor"
    equal = [np.array_equal(v, w, equal_nan=True) for v, w in zip(values, again, strict=False)]
    if len(values) != len(again) or not all(equal):
        return (
            "it is not deterministic: two calls with the same input give different values. "
            "Dropout? Put the module into eval(), or draw the mask outside and pass it in"
        )
    if not all(np.isfinite(v).all() for v in values):
        return "the function has values that are inf or nan here; check it at another point"
    return ""


def contract(ys: Sequence[Tensor], cotangents: Sequence[Any]) -> Tensor:
    """The sum of all <y, c>: one number, as a tensor."""
    products = [ops.sum(y * c) for y, c in zip(ys, cotangents, strict=True)]
    return sum(products, start=Tensor(np.zeros(())))
