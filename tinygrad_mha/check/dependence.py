"""`dependencies`: which output rows depend on which input rows, measured in two ways.

A vector-Jacobian product with a random cotangent on row i of the output gives the derivative of that row in all input
rows. Finite changes of row j of the input find what has no derivative: a detached path, or one whose derivative is 0.
"""

from __future__ import annotations

import contextlib
import html
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinygrad_mha import engine, modes, viz
from tinygrad_mha.arguments import as_ids
from tinygrad_mha.check.diagnosis import find_line, quote_line
from tinygrad_mha.check.gradient_check import find_problem, is_floating, parameters_in_float64
from tinygrad_mha.check.verdict import Finding, Verdict, as_plain_data, confining, name_subject
from tinygrad_mha.nn import Embedding
from tinygrad_mha.nn.module import Module
from tinygrad_mha.tensors import Tensor, plain
from tinygrad_mha.viz.diagram.record import RESHAPING, Run, Value, record_forward

__all__ = ["Dependencies", "dependencies"]

DRAWS = 2  # random cotangents for each output row
STEPS = (1e-6, 1.0, 1e3)  # sizes of the changes of an input row; one more change flips its sign
ROUNDING = 64  # times the machine precision: a relative size up to this may be rounding
MOST_PATHS = 8  # leaks whose path is looked up


@dataclass(repr=False)
class Dependencies:
    """Which output rows depend on which input rows: `print` it for a picture.

    Attributes:
        subject: the name of what was measured.
        matrix: (rows out, rows in), boolean: whether the row depends on it by at least one method.
        derivative: (rows out, rows in): the largest derivative, relative to the largest one of the output row.
        change: (rows out, rows in): the largest change by a finite step, relative to the size of the output row and to
            the growth of the input by that step (1 if it does not grow).
        limit: relative sizes up to this are rounding.
        paths: for the first leaks, how the input row reaches the output row.
    """

    subject: str
    matrix: np.ndarray
    derivative: np.ndarray
    change: np.ndarray
    limit: float
    paths: dict[tuple[int, int], str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        raise TypeError("dependencies are neither true nor false: use .assert_causal(), or .leaks, which lists pairs")

    @property
    def leaks(self) -> list[tuple[int, int]]:
        """The pairs (out, in) with in > out: rows that depend on a later one."""
        return [(i, j) for i, j in np.argwhere(self.matrix).tolist() if j > i]

    @property
    def below_rounding(self) -> np.ndarray:
        """Where something nonzero was measured that rounding alone can make."""
        return ~self.matrix & ((self.derivative > 0) | (self.change > 0))

    @property
    def disagreements(self) -> list[str]:
        """Pairs that only one of the methods sees, in words."""
        by_derivative, by_change = self.derivative > self.limit, self.change > self.limit
        found = []
        for only, reason in (
            (by_change & ~by_derivative, "only finite changes see {}: a detached path, or a derivative of 0"),
            (by_derivative & ~by_change, "only derivatives see {}: finite changes are below rounding"),
        ):
            if only.any():
                pairs = [f"{i} <- {j}" for i, j in np.argwhere(only).tolist()]
                found.append(reason.format(", ".join(pairs[:6]) + (f" and {len(pairs) - 6} more" if pairs[6:] else "")))
        return found

    def assert_causal(self) -> None:
        """Raise `CheckError`, which names each leak with its size and path, if a row depends on a later one."""
        findings = []
        for i, j in self.leaks:
            sizes = f"derivative {self.derivative[i, j]:.1e}, change {self.change[i, j]:.1e} (relative)"
            message = f"output row {i} depends on input row {j}: {sizes}"
            findings.append(Finding(f"{i} <- {j}", "failed", message, self.paths.get((i, j), "")))
        Verdict(self.subject, findings).raise_if_failed()

    def heatmap(self, path: Any = None) -> Any:
        """A plot of the matrix; `path` is where to write it. Needs matplotlib."""
        rows, columns = ([str(i) for i in range(n)] for n in self.matrix.shape)
        return viz.heatmap(
            self.matrix, rows, columns, path, label="depends on the input row", axes_names=("output row", "input row")
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain Python data, ready for JSON."""
        paths = [{"out": i, "in": j, "path": path} for (i, j), path in self.paths.items()]
        facts = vars(self) | {"paths": paths, "leaks": self.leaks, "below_rounding": self.below_rounding}
        plain_data: dict[str, Any] = as_plain_data(facts | {"disagreements": self.disagreements})
        return plain_data

    def _cells(self) -> list[list[str]]:
        signs: list[list[str]] = np.where(self.matrix, "■", np.where(self.below_rounding, "~", "·")).tolist()
        return signs

    def __repr__(self) -> str:
        return str(self)  # what the prompt of Python shows

    def __str__(self) -> str:
        width = len(str(max(self.matrix.shape) - 1))
        lines = [f"{self.subject}: output rows (down) that depend on input rows (across)"]
        lines.append(" " * (width + 2) + " ".join(f"{j:>{width}}" for j in range(self.matrix.shape[1])))
        for i, row in enumerate(self._cells()):
            lines.append(f"{i:>{width}}  " + " ".join(f"{sign:>{width}}" for sign in row))
        if self.below_rounding.any():
            lines.append("~ nonzero, but below rounding")
        return "\n".join(lines + self.disagreements)

    def _repr_html_(self) -> str:
        rows = ""
        for i, row in enumerate(self._cells()):
            colors = ("#eee;color:#111" if sign != "■" else "#c00" if j > i else "#048" for j, sign in enumerate(row))
            look = "color:#fff;background:"  # also in a dark notebook
            cells = (f'<td style="{look}{color}">{sign}</td>' for color, sign in zip(colors, row, strict=True))
            rows += f"<tr><th>{i}</th>{''.join(cells)}</tr>"
        head = "".join(f"<th>{j}</th>" for j in range(self.matrix.shape[1]))
        notes = html.escape("; ".join(self.disagreements))
        title = f"{self.subject}: output rows (down) that depend on input rows (across), on a later one in red"
        return f"<div>{html.escape(title)}</div><table><tr><th></th>{head}</tr>{rows}</table>{notes}"


def dependencies(f: Any, x: Any, *, seed: int = 0) -> Dependencies:
    """Measure which rows (axis -2) of f(x) depend on which rows of x, in float64 and eval mode.

    Args:
        f: a function of a tensor that returns a tensor, or an nn.Module.
        x: (..., T, C), floating; or integer ids (..., T) for a module with an `nn.Embedding`: then the rows that the
            first one returns are varied. A pair counts if any sequence of a batch has it.
        seed: seeds the random cotangents and changes.

    Raises:
        ValueError: `x` or f(x) has too few axes, f(x) is not finite, or two calls give different values.
        RuntimeError: f calls sys.exit(), or takes more than 20 seconds for a call.
        TypeError: f(x) is no floating tensor, or `x` holds ids and `f` has no embedding that it calls.

    Example:
        >>> print(dependencies(lambda x: np.tri(3) @ x, np.ones((3, 2))))
        <lambda>: output rows (down) that depend on input rows (across)
           0 1 2
        0  ■ · ·
        1  ■ ■ ·
        2  ■ ■ ■
    """
    rng = np.random.default_rng(seed)
    subject = name_subject(f)
    mode = f.evaluating() if isinstance(f, Module) else contextlib.nullcontext()
    with mode, parameters_in_float64(f), modes.enable_grad(), varied(f, x) as (call, base):

        def evaluate(rows: Tensor) -> Any:
            with confining():
                return call(rows)

        leaf = Tensor(base, requires_grad=True, name="x")
        problem = find_problem(lambda: [check_output(evaluate(leaf))])
        if problem:
            raise ValueError(f"the dependence of {subject} cannot be measured: {problem}")
        y = check_output(evaluate(leaf))
        limit = ROUNDING * float(np.finfo(y.dtype).eps)
        derivative = measure_derivative(y, leaf, rng)
        change, steps = measure_change(evaluate, base, y.numpy(), rng)
        matrix = (derivative > limit) | (change > limit)
        result = Dependencies(subject, matrix, derivative, change, limit)
        for i, j in result.leaks[:MOST_PATHS]:
            result.paths[i, j] = find_path(evaluate, base, steps[i][j], i)
    return result


@contextlib.contextmanager
def varied(f: Any, x: Any) -> Iterator[tuple[Callable[[Tensor], Any], np.ndarray]]:
    """A function of the rows that are varied, and their values; inside, an embedding may be replaced by them."""
    if is_floating(x):
        base = np.array(plain(x), np.float64)
        if base.ndim < 2 or not base.shape[-2]:
            raise ValueError(f"x must be (..., T, C) with T >= 1, or integer ids (..., T); got shape {base.shape}")
        yield f, base
        return
    ids = as_ids(plain(x), "x")
    found = [m for _, m in f.named_modules() if isinstance(m, Embedding)] if isinstance(f, Module) else []
    if not found or not ids.ndim or not ids.size:
        raise TypeError(f"ids (..., T) of at least one token need a module with an nn.Embedding; got shape {ids.shape}")
    embedding, base = found[0], found[0](ids).numpy()

    def evaluate(rows: Tensor) -> Any:
        calls = []

        def forward(given: Any) -> Tensor:
            calls.append(given)
            return rows

        vars(embedding)["forward"] = forward
        try:
            y = f(ids)
        finally:
            del vars(embedding)["forward"]
        if len(calls) != 1:
            raise TypeError(
                f"the first nn.Embedding must be called once with the ids; it was called {len(calls)} times"
            )
        return y

    yield evaluate, base


def check_output(y: Any) -> Tensor:
    """`y` if it is a floating tensor (..., T, C)."""
    if not isinstance(y, Tensor) or y.dtype.kind != "f":
        raise TypeError(f"the function must return a floating tensor, got {type(y).__name__}")
    if y.ndim < 2:
        raise ValueError(f"the function must return rows, (..., T, C); got shape {y.shape}")
    return y


def largest_of_rows(a: np.ndarray) -> np.ndarray:
    """The largest magnitude in each row of (..., T, C): (T,)."""
    largest: np.ndarray = np.moveaxis(np.abs(a), -2, 0).reshape(a.shape[-2], -1).max(axis=-1, initial=0.0)
    return largest


def measure_derivative(y: Tensor, leaf: Tensor, rng: np.random.Generator) -> np.ndarray:
    """(rows out, rows in): the largest derivative, relative to the largest of the output row."""
    sizes = np.zeros((y.shape[-2], leaf.shape[-2]))
    for i in range(len(sizes) if y.requires_grad else 0):
        for _ in range(DRAWS):
            cotangent = np.zeros(y.shape, y.dtype)
            cotangent[..., i, :] = rng.standard_normal(cotangent[..., i, :].shape)
            for value, gradient in engine.sweep(y, cotangent):
                if value is leaf:
                    sizes[i] = np.maximum(sizes[i], largest_of_rows(gradient))
    if not np.isfinite(sizes).all():
        raise ValueError("a derivative is nan or infinite here: dependence cannot be measured, use another x")
    return sizes / np.maximum(sizes.max(axis=1, keepdims=True), np.finfo(float).tiny)


def measure_change(
    evaluate: Callable[[Tensor], Any], base: np.ndarray, y: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """(rows out, rows in): the largest change relative to the row; and for each pair the input that shows it."""
    n, m = y.shape[-2], base.shape[-2]
    sizes, inputs = np.zeros((n, m)), [[base] * m for _ in range(n)]
    for j in range(m):
        row = base[..., j, :]
        for new in [*(row + step * rng.standard_normal(row.shape) for step in STEPS), -row]:
            changed = base.copy()
            changed[..., j, :] = new
            with modes.no_grad(), np.errstate(all="ignore"):
                moved = plain(evaluate(Tensor(changed)))
                # What cancels in exact arithmetic leaves rounding errors as large as the input has become.
                growth = max(1.0, np.abs(new).max(initial=0.0) / (np.abs(base).max(initial=0.0) or 1.0))
                scale = np.maximum(largest_of_rows(y) * growth, np.finfo(float).tiny)
                relative = np.nan_to_num(largest_of_rows(moved - y) / scale, nan=np.inf)
            for i in np.flatnonzero(relative > sizes[:, j]).tolist():
                sizes[i, j], inputs[i][j] = relative[i], changed
    return sizes, inputs


# --------------------------------------------------------------------------------------------------------------------
# The path of a leak


def find_path(evaluate: Callable[[Tensor], Any], base: np.ndarray, changed: np.ndarray, i: int) -> str:
    """How a change of the input reaches row `i` of the output: the operations and names, and the first that mixes rows.

    The search goes back from the output through values that differ, until row i of a value does not.
    """
    n, lines = base.shape[-2], Lines()
    runs: list[Run] = []
    token = modes.STATE.set(modes.STATE.get()._replace(record=True, observer=lines))
    try:
        for array in (changed, base):  # the lines are those of the last run
            with np.errstate(all="ignore"):
                y = evaluate(Tensor(array, name="x"))
                runs.insert(0, record_forward([y], lambda op: op.composition is not None))
    finally:
        modes.STATE.reset(token)
    value, other = runs[0].roots[0], runs[1].roots[0]
    chain = [value]
    while True:
        for source, twin in zip(value.sources, other.sources, strict=False):
            a, b = source.array, twin.array
            if a.ndim >= 2 and a.shape[-2] == n:
                a, b = a[..., i, :], b[..., i, :]
            if not np.array_equal(a, b, equal_nan=True):
                value, other = source, twin
                chain.insert(0, value)
                break
        else:
            break
    steps = [step for step, _ in itertools.groupby(describe(step) for step in chain)]
    path = " -> ".join(steps if len(steps) <= 8 else [*steps[:5], "...", *steps[-2:]])
    constants = [*zip(value.inputs, other.inputs, strict=False), (value.kwargs, other.kwargs)]
    if value.op is None or not all(isinstance(a, Value) or is_same(a, b) for a, b in constants):
        return f"the graph does not show where: a constant carries it (.numpy()?) into {path}{lines.quote(chain)}"
    first = next((i for i, step in enumerate(chain) if not step.has_kind(*RESHAPING)), 0)
    return f"the first to mix rows is {describe(chain[first])}; path: x -> {path}{lines.quote(chain[first:])}"


def is_same(a: Any, b: Any) -> bool:
    """Whether two constants of an operation, or all of its options, are equal."""
    return np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else repr(a) == repr(b)


class Lines:
    """The line of the user's code that made each value; the observer of a run."""

    def __init__(self) -> None:
        self.of: dict[int, str] = {}

    def applied(self, op: Any, inputs: Any, out: Tensor) -> None:
        """Called after each operation."""
        self.of[id(out)] = find_line()

    def quote(self, chain: list[Value]) -> str:
        """The line of the first value that has one: a step inside of a fused primitive has that of its result."""
        line = next((self.of[id(step.tensor)] for step in chain if self.of.get(id(step.tensor))), "")
        return f"; line: {quote_line(line)}" if line else ""


def describe(value: Value) -> str:
    """An operation with its axis, the name of its result and its module, as in "mean over axis -2 in h.0.attn"."""
    if value.op is None:
        return value.name or "a constant"
    axis = value.kwargs.get("axis")
    if isinstance(axis, int) and axis >= 0 and value.sources:
        axis -= value.sources[0].array.ndim
    text = (
        value.op.name + (f" over axis {axis}" if axis is not None else "") + (f" ({value.name})" if value.name else "")
    )
    module = ".".join(scope.name for scope in value.scope if scope.name)
    return f"{text} in {module}" if module else text
