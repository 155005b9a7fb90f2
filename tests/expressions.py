"""Random expressions over all primitives: small programs that any array library can run.

A program is a list of leaves and steps. A step names a function and its operands: earlier values, constant arrays,
numbers or None. The builder computes along in NumPy, and uses what it sees to stay on firm ground: values are scaled
when they grow, pushed away from kinks and ties before a function that has them, made positive before a logarithm. So
no program is ever thrown away, and whatever two libraries disagree about is a disagreement.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import tinygrad_mha as tg

LENGTHS = (1, 2, 3, 5)
LARGEST = 400  # elements; larger results are averaged at once
HIGHEST = 4.0  # larger values are scaled down at once
MARGIN = 0.1  # the least distance of values from a kink or a tie


class Value(NamedTuple):
    """One line of a program, as an operand of a later line, and what NumPy computed for it."""

    position: int
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


class Leaf(NamedTuple):
    """An input that needs a gradient. A `foreign` one has another floating dtype and is cast first."""

    array: np.ndarray
    foreign: bool = False


class Step(NamedTuple):
    """A function of `FUNCTIONS` applied to values, constant arrays, numbers and None."""

    name: str
    operands: tuple[Any, ...]
    keywords: dict[str, Any]


class Expression(NamedTuple):
    """A program whose last line is the output, and a cotangent for that."""

    program: list[Leaf | Step]
    cotangent: np.ndarray

    def run(self, functions: Any, leaf: Callable[[Leaf], Any], constant: Callable[[Any], Any]) -> list[Any]:
        """The value of every line, computed with `functions[name](*operands, **keywords)`."""
        values: list[Any] = []
        for line in self.program:
            if isinstance(line, Leaf):
                values.append(leaf(line))
            else:
                operands = [values[x.position] if isinstance(x, Value) else constant(x) for x in line.operands]
                values.append(functions[line.name](*operands, **line.keywords))
        return values

    def __str__(self) -> str:
        with np.printoptions(threshold=20, edgeitems=2):
            return "\n".join(f"%{i} = {describe(line)}" for i, line in enumerate(self.program))


def describe(line: Leaf | Step) -> str:
    if isinstance(line, Leaf):
        return f"leaf {line.array.shape}" + (" of the other dtype" if line.foreign else "")
    operands = [
        f"%{x.position} {x.shape}" if isinstance(x, Value) else f"constant {np.shape(x)}" if np.ndim(x) else repr(x)
        for x in line.operands
    ]
    return f"{line.name}({', '.join(operands + [f'{k}={v!r}' for k, v in line.keywords.items()])})"


# The functions behind the names of steps: primitives, operators and compositions.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: op for name, op in tg.ops.REGISTRY.items() if op.forward.__module__.startswith("tinygrad_mha.")},
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "getitem": lambda x, *, index: x[index],
    "vectors": operator.matmul,
    "mT": lambda x: x.mT,
    "swapaxes": tg.ops.swapaxes,
    "split": lambda x, *, parts, axis, piece: tg.ops.split(x, parts, axis)[piece],
    "norm": tg.ops.norm,
    "std": tg.ops.std,
}


class Builder:
    """Builds one program. `pick`, `partner` and `fresh` choose operands, `apply` adds a step."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.program: list[Leaf | Step] = []
        self.pool: list[Value] = []
        self.used: set[int] = set()

    # ------------------------------------------------------------------------------------------------------ adding

    def line(self, entry: Leaf | Step, array: np.ndarray, usable: bool = True) -> Value:
        value = Value(len(self.program), array)
        self.program.append(entry)
        if usable:
            self.pool.append(value)
        return value

    def step(self, name: str, *operands: Any, usable: bool = True, **keywords: Any) -> Value:
        """Add a step."""
        self.used |= {x.position for x in operands if isinstance(x, Value)}
        arrays = [x.array if isinstance(x, Value) else x for x in operands]
        array = np.asarray(FUNCTIONS[name](*arrays, **keywords))
        return self.line(Step(name, operands, keywords), array, usable)

    def apply(self, name: str, *operands: Any, **keywords: Any) -> Value:
        """Add a step, and steps that limit the size of its result before others use it."""
        value = self.step(name, *operands, usable=False, **keywords)
        while value.array.size > LARGEST:
            value = self.step("mean", value, usable=False, axis=int(np.argmax(value.shape)), keepdims=False)
        highest = np.abs(value.array).max(initial=0)
        if highest > HIGHEST:
            value = self.step("scale", value, usable=False, by=float(2 / highest))
        self.pool.append(value)
        return value

    def fresh(self, shape: tuple[int, ...]) -> Value:
        """A new leaf."""
        array = self.constant(shape)
        return self.line(Leaf(array), array)

    # ----------------------------------------------------------------------------------------------------- choosing

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def one_of(self, *options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def length(self) -> int:
        return 0 if self.chance(0.02) else int(self.rng.choice(LENGTHS, p=(0.15, 0.35, 0.35, 0.15)))

    def random_shape(self, least: int = 0) -> tuple[int, ...]:
        ndim = max(least, int(self.rng.choice(5, p=(0.08, 0.22, 0.35, 0.25, 0.1))))
        return tuple(self.length() for _ in range(ndim))

    def pick(self, want: Callable[[tuple[int, ...]], bool] = lambda shape: True, least: int = 0) -> Value:
        """A value with a suitable shape of at least `least` axes: often recent, sometimes older or new."""
        fitting = [v for v in self.pool if v.array.ndim >= least and want(v.shape)]
        if fitting and self.chance(0.85):
            return fitting[-1 - self.rng.integers(min(3, len(fitting)))] if self.chance(0.7) else self.one_of(*fitting)
        return self.fresh(self.wanted_shape(want, least))

    def wanted_shape(self, want: Callable[[tuple[int, ...]], bool], least: int) -> tuple[int, ...]:
        while True:
            shape = self.random_shape(least)
            if want(shape):
                return shape

    def partner_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts with `shape`: axes of length 1, longer axes, fewer or more axes in front."""
        if self.chance(0.25):
            return shape
        other = [self.length() if n == 1 and self.chance(0.5) else 1 if self.chance(0.3) else n for n in shape]
        if self.chance(0.3):
            return tuple(other[self.rng.integers(len(other) + 1) :])
        return (self.length(), *other) if self.chance(0.2) and len(other) < 4 else tuple(other)

    def partner(self, x: Value, same: float = 0.15) -> Value:
        """A second operand for `x`: `x` itself, an existing value that broadcasts with it, or a new leaf."""
        if self.chance(same):
            return x
        fitting = [v for v in self.pool if v is not x and moderate(x.shape, v.shape)]
        return self.one_of(*fitting) if fitting and self.chance(0.5) else self.fresh(self.partner_shape(x.shape))

    def shaped(self, shape: tuple[int, ...]) -> Value:
        """A value of exactly this shape, existing or new."""
        fitting = [v for v in self.pool if v.shape == shape]
        return self.one_of(*fitting) if fitting and self.chance(0.5) else self.fresh(shape)

    def constant(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(self.rng.uniform(0.3, 1.5, shape) * self.rng.choice([-1.0, 1.0], shape))

    def narrowed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to `shape`."""
        cut = self.one_of(0, 0, len(shape) // 2)
        return tuple(1 if self.chance(0.25) else n for n in shape[cut:])

    def coin_flips(self, shape: tuple[int, ...], p: float = 0.5) -> np.ndarray:
        return np.asarray(self.rng.random(shape) < p)

    def axis(self, ndim: int) -> int:
        return int(self.rng.integers(-ndim, ndim))

    def axes(self, x: Value, empty: bool = False) -> Any:
        """None, a positive or negative axis, or a tuple of them; none of length 0 unless `empty`."""
        allowed = [i for i, n in enumerate(x.shape) if n or empty]
        if len(allowed) == x.array.ndim and self.chance(0.25):
            return None
        chosen = [int(i) for i in self.rng.permutation(allowed)[: self.rng.integers(len(allowed) + 1)]]
        chosen = [i - x.array.ndim if self.chance(0.5) else i for i in chosen]
        return chosen[0] if len(chosen) == 1 and self.chance(0.7) else tuple(chosen)

    # ------------------------------------------------------------------------------------------- safe operands

    def positive(self, x: Value) -> Value:
        """A function of `x` with values between about 0.4 and 3."""
        return self.one_of(
            lambda: self.step("add", self.step("scale", self.step("sigmoid", x), by=2.0), 0.5),
            lambda: self.step("exp", self.step("tanh", x)),
            lambda: self.step("add", self.step("scale", self.step("mul", x, x), by=0.15), 0.5),
            lambda: self.step("sqrt", self.step("add", self.step("pow", x, 2), 0.3)),
        )()

    def away_from(self, x: Value, *kinks: float) -> Value:
        """`x`, moved where it is closer than MARGIN to one of `kinks`."""
        shift = np.zeros(x.shape)
        for kink in kinks:
            distance = x.array - kink
            shift += np.where(np.abs(distance) < MARGIN, np.where(distance < 0, -MARGIN, MARGIN), 0.0)
        return self.step("add", x, shift) if shift.any() else x

    def apart(self, a: Value, b: Value) -> Value:
        """`a`, moved where it is closer than MARGIN to `b`, in the broadcast shape."""
        distance = a.array - b.array
        shift = np.where(np.abs(distance) < MARGIN, np.where(distance < 0, -MARGIN, MARGIN), 0.0)
        return self.step("add", a, shift) if shift.any() else a

    def with_one_extremum(self, x: Value, axis: Any, sign: float) -> Value:
        """`x` with one largest (or smallest) element along `axis` moved ahead of all others."""
        axes = range(x.array.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        reduced = [i % x.array.ndim for i in axes]
        last = [i for i in range(x.array.ndim) if i not in reduced] + reduced
        moved = np.transpose(sign * x.array, last)
        rows = moved.reshape(*moved.shape[: len(last) - len(reduced)], math.prod(x.shape[i] for i in reduced))
        shift = np.zeros(rows.shape)
        if rows.size:
            np.put_along_axis(shift, rows.argmax(-1)[..., None], sign * MARGIN, -1)
        return self.step("add", x, np.transpose(shift.reshape(moved.shape), np.argsort(last)))

    def spread(self, x: Value) -> Value:
        """`x` plus values that differ along the last axis, so that no row is constant or zero."""
        n = x.shape[-1]
        return self.step("add", x, np.linspace(1.0, -1.5, n) * (1 + np.arange(n) % 2))

    # ---------------------------------------------------------------------------------------------------- indexing

    def index(self, shape: tuple[int, ...]) -> Any:
        """An index into `shape`: basic, integer arrays with repeats, boolean masks, or a mixture."""
        if shape and self.chance(0.1):
            return self.coin_flips(shape)
        parts: list[Any] = []
        taken = int(self.rng.integers(len(shape) + 1))
        at_the_end = self.chance(0.3)
        common: tuple[int, ...] = self.one_of((), (3,), (5,), (2, 1), (2, 3))  # what integer arrays broadcast to
        for n in shape[len(shape) - taken :] if at_the_end else shape[:taken]:
            kind = self.one_of("integer", "slice", "slice", "array", "array", "mask")
            if kind == "integer" and n:
                parts.append(int(self.rng.integers(-n, n)))
            elif kind == "array" and n:
                parts.append(self.rng.integers(-n, n, self.narrowed(common)))
            elif kind == "mask" and not any(isinstance(part, np.ndarray) for part in parts):
                parts.append(self.coin_flips((n,), 0.7))
                common = (int(parts[-1].sum()),)
            else:
                parts.append(self.slice(n))
        if self.chance(0.2):
            parts.insert(int(self.rng.integers(len(parts) + 1)), None)
        if at_the_end:
            parts.insert(0, ...)
        elif self.chance(0.2):
            parts.append(...)
        return parts[0] if len(parts) == 1 and self.chance(0.7) else tuple(parts)

    def slice(self, n: int) -> slice:
        bounds = (None, 0, 1, -1, n, n - 1)
        if self.chance(0.4):
            return slice(self.one_of(None, None, n, -1), self.one_of(None, None, 0), self.one_of(-1, -2))
        return slice(self.one_of(*bounds), self.one_of(None, None, *bounds), self.one_of(None, 1, 2))


def moderate(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two shapes broadcast to an array of moderate size."""
    try:
        return math.prod(np.broadcast_shapes(a, b)) <= LARGEST
    except ValueError:
        return False


# --------------------------------------------------------------------------------------------------------------------
# How each function is used

BUILDERS: dict[str, Callable[[Builder], Value]] = {}


def builds(*names: str) -> Callable[[Callable[[Builder, str], Value]], Callable[[Builder, str], Value]]:
    def enter(build: Callable[[Builder, str], Value]) -> Callable[[Builder, str], Value]:
        BUILDERS.update({name: functools.partial(build, name=name) for name in names})
        return build

    return enter


@builds("add", "sub", "mul")
def arithmetic(b: Builder, name: str) -> Value:
    x = b.pick()
    if b.chance(0.6):
        return b.apply(name, x, b.partner(x))
    shape = b.partner_shape(x.shape)
    constant = b.one_of(0.7, -2, np.float64(1.5), b.constant(shape), b.constant(shape), b.coin_flips(x.shape))
    return b.apply(name, *b.one_of((x, constant), (constant, x)))


@builds("div")
def quotient(b: Builder, name: str) -> Value:
    x = b.pick()
    if b.chance(0.2):
        return b.apply(name, x, b.one_of(1.7, -3, b.constant(b.partner_shape(x.shape))))
    below = b.positive(b.partner(x))
    if b.chance(0.5):
        below = b.step("neg", below)
    return b.apply(name, b.one_of(x, x, x, 2, b.constant(below.shape)), below)


@builds("pow")
def power(b: Builder, name: str) -> Value:
    x = b.pick()
    kind = b.one_of("whole", "whole", "fraction", "tensor", "tensor", "base", "array")
    if kind == "whole":
        return b.apply(name, x, b.one_of(0, 1, 2, 3, 2.0))
    if kind == "fraction":
        return b.apply(name, b.positive(x), b.one_of(0.5, -1.5, -1, np.float64(1 / 3)))
    if kind == "tensor":
        return b.apply(name, b.positive(x), b.partner(x))
    if kind == "base":
        return b.apply(name, b.one_of(2, 0.5, b.rng.uniform(0.5, 2, x.shape)), x)
    return b.apply(name, b.away_from(x, 0.0), b.rng.integers(0, 4, b.partner_shape(x.shape)))


@builds("neg", "exp", "erf", "tanh", "sigmoid", "sin", "cos", "expm1")
def smooth(b: Builder, name: str) -> Value:
    return b.apply(name, b.pick())


@builds("log", "sqrt", "log1p")
def of_positive(b: Builder, name: str) -> Value:
    return b.apply(name, b.positive(b.pick()))


@builds("scale")
def scaling(b: Builder, name: str) -> Value:
    return b.apply(name, b.pick(), by=float(b.rng.uniform(-2, 2)))


@builds("gelu")
def gelu(b: Builder, name: str) -> Value:
    return b.apply(name, b.pick(), tanh=b.chance(0.5))


@builds("relu", "abs")
def kinked_at_zero(b: Builder, name: str) -> Value:
    return b.apply(name, b.away_from(b.pick(), 0.0))


@builds("clip")
def clip(b: Builder, name: str) -> Value:
    low, high = b.one_of((-0.6, 0.9), (None, 0.5), (-0.5, None), (0.3, 1.1))
    x = b.away_from(b.pick(), *(limit for limit in (low, high) if limit is not None))
    return b.apply(name, x, min=low, max=high)


@builds("where")
def choice(b: Builder, name: str) -> Value:
    x = b.pick()
    if b.chance(0.3):
        return b.apply(name, b.coin_flips(b.partner_shape(x.shape)), *b.one_of((x, 0.0), (0.5, x)))
    y = b.partner(x)
    return b.apply(name, b.coin_flips(b.narrowed(np.broadcast_shapes(x.shape, y.shape))), x, y)


@builds("mask")
def mask(b: Builder, name: str) -> Value:
    x = b.pick(least=1)
    allow = b.coin_flips(b.narrowed(x.shape), 0.6)
    return b.apply("softmax", b.step(name, x, allow, usable=False), axis=b.axis(x.array.ndim))


@builds("maximum", "minimum")
def of_two(b: Builder, name: str) -> Value:
    x = b.pick()
    y = b.partner(x, same=0)
    x = b.apart(x, y)
    return b.apply(name, *b.one_of((x, y), (y, x)))


@builds("sum", "mean", "var", "norm", "std", "logsumexp")
def reduction(b: Builder, name: str) -> Value:
    if name == "std":
        x = b.spread(b.pick(lambda shape: shape[-1] > 1, least=1))
        axis: Any = b.one_of(-1, x.array.ndim - 1)
    else:
        x = b.away_from(b.pick(), 0.0) if name == "norm" else b.pick()
        axis = b.axes(x, empty=name == "sum")
    options: dict[str, Any] = {"keepdims": b.chance(0.4)}
    if name in ("var", "std") and np.ones(x.shape).sum(axis).max(initial=0) > 1:
        options["ddof"] = b.one_of(0, 1)
    return b.apply(name, x, axis=axis, **options)


@builds("max", "min")
def extremum(b: Builder, name: str) -> Value:
    x = b.pick()
    axis = b.axes(x)
    winner = b.with_one_extremum(x, axis, 1.0 if name == "max" else -1.0)
    return b.apply(name, winner, axis=axis, keepdims=b.chance(0.4))


@builds("reshape")
def reshape(b: Builder, name: str) -> Value:
    x = b.pick()
    shape = [x.shape[i] for i in b.rng.permutation(x.array.ndim)]
    if b.chance(0.5):
        shape.insert(int(b.rng.integers(len(shape) + 1)), 1)
    if len(shape) > 2 and b.chance(0.5):
        shape[:2] = [shape[0] * shape[1]]
    if shape and x.array.size and b.chance(0.4):
        shape[b.rng.integers(len(shape))] = -1
    return b.apply(name, x, shape=tuple(shape))


@builds("transpose")
def transpose(b: Builder, name: str) -> Value:
    x = b.pick()
    axes = [int(i) for i in b.rng.permutation(x.array.ndim)]
    return b.apply(name, x, axes=b.one_of(None, tuple(axes), tuple(i - x.array.ndim for i in axes)))


@builds("mT")
def matrix_transpose(b: Builder, name: str) -> Value:
    return b.apply(name, b.pick(least=2))


@builds("swapaxes")
def swapaxes(b: Builder, name: str) -> Value:
    x = b.pick(least=1)
    return b.apply(name, x, axis1=b.axis(x.array.ndim), axis2=b.axis(x.array.ndim))


@builds("broadcast_to")
def broadcast_to(b: Builder, name: str) -> Value:
    x = b.pick(lambda shape: len(shape) < 4)
    front = [b.length()] if b.chance(0.5) else []
    return b.apply(name, x, shape=(*front, *(b.one_of(1, 2, 3) if n == 1 else n for n in x.shape)))


@builds("cast")
def cast(b: Builder, name: str) -> Value:
    if b.chance(0.5):
        return b.apply(name, b.pick(), dtype=np.float64)
    array = b.constant(b.random_shape()).astype(np.float32).astype(np.float64)
    return b.apply(name, b.line(Leaf(array, foreign=True), array, usable=False), dtype=np.float64)


@builds("concat")
def concat(b: Builder, name: str) -> Value:
    x = b.pick(least=1)
    ndim, axis = x.array.ndim, b.axis(x.array.ndim)
    rest = np.delete(x.shape, axis).tolist()
    others = [v for v in b.pool if v.array.ndim == ndim and np.delete(v.shape, axis).tolist() == rest]
    parts: list[Any] = [x, *(b.one_of(*others) for _ in range(b.rng.integers(3)))]
    if b.chance(0.5):
        shape = list(x.shape)
        shape[axis] = b.one_of(0, 1, 2, 3)
        parts.append(b.one_of(b.fresh, b.constant)(tuple(shape)))
    return b.apply(name, *parts, axis=axis)


@builds("stack")
def stack(b: Builder, name: str) -> Value:
    x = b.pick(lambda shape: len(shape) < 4)
    return b.apply(name, x, *(b.shaped(x.shape) for _ in range(b.rng.integers(3))), axis=b.axis(x.array.ndim + 1))


@builds("split")
def split(b: Builder, name: str) -> Value:
    x = b.pick(lambda shape: max(shape) > 1, least=1)
    axis = int(np.argmax(x.shape)) - b.one_of(0, x.array.ndim)
    n = x.shape[axis]
    parts = b.one_of(n, [1], [1, n - 1], [0, 1])
    piece = int(b.rng.integers(n if isinstance(parts, int) else len(parts) + 1))
    return b.apply(name, x, parts=parts, axis=axis, piece=piece)


@builds("getitem")
def getitem(b: Builder, name: str) -> Value:
    x = b.pick(lambda shape: len(shape) < 5)
    return b.apply(name, x, index=b.index(x.shape))


@builds("scatter_add")
def scatter_add(b: Builder, name: str) -> Value:
    shape = b.random_shape(least=1)
    index = b.index(shape)
    return b.apply(name, b.shaped(np.zeros(shape)[index].shape), index=index, shape=shape)


@builds("take")
def take(b: Builder, name: str) -> Value:
    weight = b.pick(lambda shape: shape[0] > 0, least=1)
    return b.apply(name, weight, b.rng.integers(0, weight.shape[0], b.one_of((), (3,), (2, 3), (0,), (1, 5))))


@builds("matmul")
def matmul(b: Builder, name: str) -> Value:
    x = b.pick(least=2)
    kind = b.one_of("square", "left", "left", "right", "right")
    if kind == "square":
        return b.apply(name, *b.one_of((x, b.step("mT", x)), (b.step("mT", x), x)))
    *batch, n, k = x.shape
    batch = list(b.partner_shape(tuple(batch)))
    if kind == "left":
        return b.apply(name, b.shaped((*batch, b.length(), n)), x)
    return b.apply(name, x, b.shaped((*batch, k, b.length())))


@builds("vectors")
def vectors(b: Builder, name: str) -> Value:
    """matmul with a vector on one side or on both."""
    x = b.pick(least=1)
    if x.array.ndim > 1 and b.chance(0.5):
        return b.apply(name, b.shaped(x.shape[-2:-1]), x)
    if x.array.ndim == 1 and b.chance(0.6):
        return b.apply(
            name, x, b.one_of(lambda: x, lambda: b.fresh((*x.shape, 3)), lambda: b.fresh((2, *x.shape, 3)))()
        )
    return b.apply(name, x, b.shaped(x.shape[-1:]))


@builds("linear")
def linear(b: Builder, name: str) -> Value:
    x = b.pick(least=1)
    weight = b.shaped((x.shape[-1], b.length()))
    return b.apply(name, x, weight, *([b.shaped(weight.shape[1:])] if b.chance(0.6) else []))


@builds("einsum")
def einsum(b: Builder, name: str) -> Value:
    if b.chance(0.3):
        return einsum_with_dots(b, name)
    # Random letters. Equal lengths of the first operand may share one (a diagonal); other operands take some of its
    # letters and perhaps one of their own.
    x = b.pick(lambda shape: len(shape) < 4)
    lengths: dict[str, int] = {}
    first = ""
    for n in x.shape:
        twins = [c for c, m in lengths.items() if m == n]
        first += b.one_of(*twins) if twins and b.chance(0.3) else "abc"[len(lengths)]
        lengths[first[-1]] = n
    terms, operands = [first], [x]
    for own in "jk"[: b.rng.integers(3)]:
        if b.chance(0.2):
            terms.append(first)
            operands.append(x)
        else:
            if b.chance(0.5):
                lengths[own] = b.length()
            terms.append("".join(b.rng.permutation([c for c in lengths if b.chance(0.6)]).tolist()))
            operands.append(b.shaped(tuple(lengths[c] for c in terms[-1])))
    used = [c for c in lengths if c in "".join(terms)]
    out = "".join(b.rng.permutation([c for c in used if b.chance(0.5)]).tolist())
    return b.apply(name, *operands, subscripts=",".join(terms) + b.one_of("", "->" + out, "->" + out))


def einsum_with_dots(b: Builder, name: str) -> Value:
    x = b.pick(least=2)
    *batch, n, k = x.shape
    right = (*batch[len(batch) // 2 :], k, 2)
    other, subscripts = b.one_of(
        (right, "...ij,...jk->...ik"),
        (right, "...ij,...jk"),
        (right, "...ij,...jk->...k"),
        ((n,), "...ij,i->j..."),
        (x.shape, "...ij,...ij->..."),
        (None, "...ij->...ji"),
        (None, "i...->i"),
    )
    return b.apply(name, x, *([] if other is None else [b.shaped(other)]), subscripts=subscripts)


@builds("softmax", "log_softmax", "cumsum")
def softmax(b: Builder, name: str) -> Value:
    x = b.pick(least=1)
    return b.apply(name, x, axis=b.axis(x.array.ndim))


@builds("cross_entropy")
def cross_entropy(b: Builder, name: str) -> Value:
    logits = b.pick(lambda shape: shape[-1] > 0, least=1)
    ignored = b.one_of(-100, -1, 0)
    targets = b.rng.integers(0, logits.shape[-1], logits.shape[:-1])
    targets = np.where(b.coin_flips(targets.shape, 0.25), ignored, targets)
    options = {"label_smoothing": b.one_of(0.0, 0.1), "reduction": b.one_of("mean", "sum", "none")}
    return b.apply(name, logits, targets, ignore_index=ignored, **options)


@builds("layer_norm", "rms_norm")
def normalization(b: Builder, name: str) -> Value:
    x = b.spread(b.pick(lambda shape: shape[-1] > 1, least=1))
    weight = b.shaped(x.shape[-1:]) if b.chance(0.7) else None
    bias = [b.shaped(x.shape[-1:])] if b.chance(0.5) and name == "layer_norm" else []
    return b.apply(name, x, weight, *bias, eps=b.one_of(1e-5, 0.1))


@builds("dropout")
def dropout(b: Builder, name: str) -> Value:
    x = b.pick()
    return b.apply(name, x, b.coin_flips(x.shape, 0.8) / 0.8)


@builds("rotate")
def rotate(b: Builder, name: str) -> Value:
    x = b.pick(lambda shape: shape[-1] % 2 == 0, least=1)
    return b.apply(name, x, angles=b.rng.standard_normal((*x.shape[:-1], x.shape[-1] // 2)))


@builds("attention")
def attention(b: Builder, name: str) -> Value:
    q = b.pick(lambda shape: shape[-1] > 0, least=2)
    *batch, t_q, d = q.shape
    if b.chance(0.3):
        t_k, k, v = t_q, q, q
    else:
        t_k = b.one_of(1, 2, 3, 5)
        k, v = b.shaped((*batch[b.one_of(0, len(batch) // 2) :], t_k, d)), b.shaped((*batch, t_k, b.length()))
    scores = (*batch, t_q, t_k)
    allow = b.one_of(None, b.coin_flips(scores, 0.7), b.coin_flips(scores[-2:], 0.5), np.tri(t_q, t_k, dtype=bool))
    bias = b.one_of(lambda: None, lambda: b.shaped(b.narrowed(scores)), lambda: b.constant(scores))()
    keep = b.one_of(None, None, b.coin_flips(scores, 0.8) / 0.8)
    return b.apply(name, q, k, v, allow, bias, keep, scale=b.one_of(None, None, 0.3))


@builds("multi_head_attention")
def multi_head_attention(b: Builder, name: str) -> Value:
    n_head, d_k, d_v = b.one_of(1, 2, 3), b.one_of(1, 2), b.one_of(1, 2, 3)
    *batch, t_q, _ = b.pick(lambda shape: True, least=2).shape
    t_k = b.one_of(1, 2, 3, 5)
    q, k = b.shaped((*batch, t_q, n_head * d_k)), b.shaped((*batch, t_k, n_head * d_k))
    v, scores = b.shaped((*batch, t_k, n_head * d_v)), (*batch, n_head, t_q, t_k)
    allow = b.one_of(None, b.coin_flips(scores, 0.7), b.coin_flips(scores[-2:], 0.5), np.tri(t_q, t_k, dtype=bool))
    bias = b.one_of(lambda: None, lambda: b.shaped(b.narrowed(scores)), lambda: b.constant(scores))()
    keep = b.one_of(None, None, b.coin_flips(scores, 0.8) / 0.8)
    return b.apply(name, q, k, v, allow, bias, keep, n_head=n_head)


@builds("self_attention")
def self_attention(b: Builder, name: str) -> Value:
    n_head, d = b.one_of(1, 2, 3), b.one_of(1, 2)
    *batch, t, _ = b.pick(lambda shape: True, least=2).shape
    qkv = b.shaped((*batch, t, 3 * n_head * d))
    scores = (*batch, n_head, t, t)
    allow = b.one_of(None, b.coin_flips(scores, 0.7), b.coin_flips(scores[-2:], 0.5), np.tri(t, dtype=bool))
    bias = b.one_of(lambda: None, lambda: b.shaped(b.narrowed(scores)), lambda: b.constant(scores))()
    keep = b.one_of(None, None, b.coin_flips(scores, 0.8) / 0.8)
    return b.apply(name, qkv, allow, bias, keep, n_head=n_head)


# --------------------------------------------------------------------------------------------------------------------


@functools.cache
def expression(seed: int) -> Expression:
    """The program of a seed: 8 to 20 functions chosen at random, joined into one output."""
    b = Builder(seed)
    b.fresh(b.random_shape(least=1))
    names = [*BUILDERS, "getitem", "scatter_add"]  # twice, because there are many kinds of index
    for _ in range(b.rng.integers(8, 21)):
        BUILDERS[b.one_of(*names)](b)
    ends = [v for v in b.pool if v.position not in b.used]
    if (
        b.chance(0.8) and len(ends) > 1
    ):  # else the output is the last value, and lines that it does not depend on get no gradient
        b.step("concat", *(b.step("reshape", v, shape=(v.array.size,)) for v in ends), axis=0)
    return Expression(b.program, b.rng.standard_normal(b.pool[-1].shape))
