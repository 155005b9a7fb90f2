"""The elementary primitives: arithmetic, functions, reductions, shape, indexing, products. Rules stand below each.

A rule is `rule(g, y, inputs..., keywords...)`: the gradient `g` of the output `y`, times the local derivative. It is
written with primitives and with what arrays and tensors share, so the same rule runs on arrays in a
plain backward, and on tensors when the gradient must itself be differentiated. Comparisons give plain arrays in both
cases. A rule may return the shape that its argument was broadcast to; the engine sums it back.

Where a derivative does not exist, the rule takes a finite value and says so (`relu`, `abs`, ties of `max`). Where it is
infinite it is infinite, but a gradient that is exactly 0 stays 0 there (0 * inf = 0), so that the branch that a `where`
did not select sends nothing back.

Names follow NumPy, so several hide a builtin (`sum`, `max`, `min`, `abs`, `pow`) in this file.
"""

from __future__ import annotations

import builtins
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from tinygrad_mha import notation
from tinygrad_mha.arguments import as_index, check_boolean, check_ids
from tinygrad_mha.kernels import reference
from tinygrad_mha.primitives import primitive

__all__ = ["abs", "add", "broadcast_to", "cast", "clip", "concat", "div", "einsum", "erf", "exp", "getitem", "linear"]
__all__ += ["log", "mask", "matmul", "max", "maximum", "mean", "min", "minimum", "mul", "neg", "norm", "pow", "relu"]
__all__ += ["reshape", "scale", "scatter_add", "sigmoid", "split", "sqrt", "stack", "std", "sub", "sum", "swapaxes"]
__all__ += ["take", "tanh", "transpose", "var", "where"]

INFINITY = math.inf
X = TypeVar("X", bound=Any)  # an array or a Tensor
Axis = int | tuple[int, ...] | None

# --------------------------------------------------------------------------------------------------------------------
# Arithmetic. `x * 0.5` is scale(x, by=0.5): a constant is not a node.


@primitive(kind="addition", formula=notation.infix("+", notation.SUM, associative=True))
def add(a, b) -> Any:
    """a + b, with broadcasting."""
    return a + b


add.vjps(lambda g, y, a, b: g, lambda g, y, a, b: g)


@primitive(kind="elementwise", formula=notation.infix("−", notation.SUM))
def sub(a, b) -> Any:
    """a - b, with broadcasting."""
    return a - b


sub.vjps(lambda g, y, a, b: g, lambda g, y, a, b: -g)


@primitive(kind="elementwise", formula=notation.infix("*"))
def mul(a, b) -> Any:
    """a * b, element by element, with broadcasting."""
    return a * b


mul.vjps(lambda g, y, a, b: g * b, lambda g, y, a, b: g * a)


@primitive(kind="elementwise", formula=notation.write_div)
def div(a, b) -> Any:
    """a / b, with broadcasting."""
    return a / b


div.vjps(
    lambda g, y, a, b: quotient(g, b),
    lambda g, y, a, b: -quotient(quotient(g, b) * a, b),
)


@primitive(kind="elementwise", formula=notation.write_neg)
def neg(x) -> np.ndarray:
    """-x."""
    return -x


neg.vjps(lambda g, y, x: -g)


@primitive(kind="elementwise", formula=notation.write_scale)
def scale(x, *, by) -> np.ndarray:
    """x * by, for a number `by` that is part of the formula rather than of the data (1 / sqrt(d_k), say)."""
    return x * by


scale.vjps(lambda g, y, x, by: g * by)


@primitive(kind="elementwise", formula=notation.write_pow)
def pow(a, b) -> Any:
    """a ** b, real. x ** 0 is 1 with derivative 0, also at x = 0; so is the derivative by b at a = 0.

    A negative base has no derivative by its exponent: nan, with NumPy's warning.
    """
    return a**b


def pow_vjp_base(g, y, a, b):
    # The slope of a root at 0 is infinite, that of a negative base nan: so was its value, and the forward has warned.
    with np.errstate(divide="ignore", invalid="ignore"):
        return times(g, b * a ** one_less(b))


def pow_vjp_exponent(g, y, a, b):
    one = np.ones((), y.dtype)  # so that a float32 base of a float64 power has a float64 logarithm
    return times(g * log(where(a == 0, one, a)), y)


def one_less(b):
    """b - 1; and 1 where b is 0, where the slope b * a ** (b - 1) must be 0 even at a = 0."""
    return where(b == 0, 1, b - 1) if hasattr(b, "shape") else (b - 1 if b else 1)


pow.vjps(pow_vjp_base, pow_vjp_exponent)


def times(g, slope):
    """g * slope, and 0 where g is 0 and the slope is infinite or nan."""
    finite = (slope < INFINITY) & (slope > -INFINITY)
    return g * (slope if np.all(finite) else where((g == 0) & ~finite, 0.0, slope))


def quotient(g, d):
    """g / d, and 0 where g is 0 and d is 0 or nan. Other divisions by 0 are infinite, as the derivation says."""
    usable = (d > 0) | (d < 0)
    if np.all(usable):
        return g / d
    with np.errstate(divide="ignore"):
        return g / where((g == 0) & np.logical_not(usable), 1.0, d)


# --------------------------------------------------------------------------------------------------------------------
# Functions of one number


@primitive(kind="elementwise")
def exp(x) -> np.ndarray:
    """e ** x."""
    return np.exp(x)


exp.vjps(lambda g, y, x: times(g, y))


@primitive(kind="elementwise")
def log(x) -> np.ndarray:
    """The natural logarithm. log(0) is -inf and log of a negative number nan, both with NumPy's warning."""
    return np.log(x)


log.vjps(lambda g, y, x: quotient(g, x))


@primitive(kind="elementwise", formula=notation.write_sqrt)
def sqrt(x) -> np.ndarray:
    """The square root. Its slope at 0 is infinite: see `norm` and `std` for a root of squares that may be 0."""
    return np.sqrt(x)


sqrt.vjps(lambda g, y, x: quotient(g, 2.0 * y))


@primitive(kind="elementwise")
def erf(x) -> np.ndarray:
    """The error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x; about 1e-15 in float64."""
    return reference.erf(floating(x))


def floating(x):
    """`x` itself, or integers as floats: for functions whose values are no integers."""
    x = np.asarray(x)
    return x if x.dtype.kind == "f" else x.astype(np.float64)


# Beyond 40 the slope is 0 in every dtype; the clip keeps the square from overflowing.
erf.vjps(lambda g, y, x: g * (2.0 / math.sqrt(math.pi) * exp(-(clip(x, min=-40.0, max=40.0) ** 2))))


@primitive(kind="activation")
def tanh(x) -> np.ndarray:
    """The hyperbolic tangent."""
    return np.tanh(x)


tanh.vjps(lambda g, y, x: g * (1.0 - y * y))


@primitive(kind="activation")
def sigmoid(x) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow on either side."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


sigmoid.vjps(lambda g, y, x: g * (y * (1.0 - y)))


@primitive(kind="activation", label="ReLU")
def relu(x) -> np.ndarray:
    """max(x, 0). The derivative at 0 is taken as 0."""
    return np.maximum(x, 0)


relu.vjps(lambda g, y, x: where(x > 0, g, 0.0))


@primitive(kind="elementwise", formula=notation.write_abs)
def abs(x) -> np.ndarray:
    """|x|. The derivative at 0 is taken as 0."""
    return np.abs(x)


abs.vjps(lambda g, y, x: where(x > 0, g, where(x < 0, -g, 0.0)))


@primitive(kind="elementwise")
def clip(x, *, min=None, max=None) -> np.ndarray:
    """x, but at least `min` and at most `max` (numbers). The derivative at the limits themselves is 1."""
    return np.clip(x, min, max)


def clip_vjp(g, y, x, *, min, max):
    inside = True if min is None else x >= min
    if max is not None:
        inside = inside & (x <= max)
    return where(inside, g, 0.0)


clip.vjps(clip_vjp)


# --------------------------------------------------------------------------------------------------------------------
# Choosing


@primitive(kind="choice", roles=("mask", "operand", "operand"))
def where(condition, a, b) -> Any:
    """a where the boolean `condition` holds, else b; the side not chosen receives exactly 0."""
    return np.where(condition, a, b)


where.vjps(
    None,
    lambda g, y, condition, a, b: where(condition, g, 0.0),
    lambda g, y, condition, a, b: where(condition, 0.0, g),
)


@primitive(kind="mask", roles=("operand", "mask"), formula=notation.write_mask)
def mask(scores, allow) -> Any:
    """`scores` where the boolean `allow` holds, -inf elsewhere: excluded exactly, however large the score was."""
    check_boolean(np.asarray(allow), "allow")  # comparing 0-d tensors gives a bool
    return np.where(allow, scores, -INFINITY)


mask.vjps(lambda g, y, scores, allow: where(allow, g, 0.0), None)


@primitive(kind="elementwise")
def maximum(a, b) -> Any:
    """The larger of a and b, element by element. At a tie each side takes half of the gradient."""
    return np.maximum(a, b)


maximum.vjps(
    lambda g, y, a, b: g * share(a > b, a == b, g),
    lambda g, y, a, b: g * share(b > a, a == b, g),
)


@primitive(kind="elementwise")
def minimum(a, b) -> Any:
    """The smaller of a and b, element by element. At a tie each side takes half of the gradient."""
    return np.minimum(a, b)


minimum.vjps(
    lambda g, y, a, b: g * share(a < b, a == b, g),
    lambda g, y, a, b: g * share(b < a, a == b, g),
)


def share(wins, ties, g):
    """1 for a win, a half for a tie, 0 for a loss."""
    return np.where(ties, 0.5, wins).astype(g.dtype)


# --------------------------------------------------------------------------------------------------------------------
# Reductions. `axis` is None, an integer or a tuple, negative ones count from the end, as in NumPy.


def kept(x, axis):
    """The shape of `x` with the reduced axes left at length 1."""
    if axis is None or x.ndim == 0:  # NumPy lets a 0-d array be reduced over axis 0 and -1
        return (1,) * x.ndim
    axes = normalize_axis_tuple(axis, x.ndim)
    return tuple(1 if i in axes else n for i, n in enumerate(x.shape))


def count(x, axis):
    """How many elements of `x` one result of a reduction is made of."""
    return math.prod(n for n, k in zip(x.shape, kept(x, axis), strict=True) if k == 1)


@primitive(kind="reduction", formula=notation.write_reduction)
def sum(x, *, axis=None, keepdims=False) -> np.ndarray:
    """The sum over `axis`. An empty sum is 0."""
    return np.sum(x, axis=axis, keepdims=keepdims)


sum.vjps(lambda g, y, x, axis, keepdims: broadcast_to(g.reshape(kept(x, axis)), shape=x.shape))


@primitive(kind="reduction", formula=notation.write_reduction)
def mean(x, *, axis=None, keepdims=False) -> np.ndarray:
    """The mean over `axis`."""
    return np.mean(x, axis=axis, keepdims=keepdims)


mean.vjps(lambda g, y, x, axis, keepdims: broadcast_to(g.reshape(kept(x, axis)) / count(x, axis), shape=x.shape))


@primitive(kind="reduction", formula=notation.write_reduction)
def var(x, *, axis=None, ddof=0, keepdims=False) -> np.ndarray:
    """The variance over `axis`: the squared distance from the mean, summed and divided by n - ddof."""
    return np.var(x, axis=axis, ddof=ddof, keepdims=keepdims)


def var_vjp(g, y, x, *, axis, ddof, keepdims):
    n = count(x, axis)
    factor = 2.0 / (n - ddof) if n > ddof else math.nan
    return g.reshape(kept(x, axis)) * factor * (x - mean(x, axis=axis, keepdims=True))


var.vjps(var_vjp)


@primitive(kind="reduction", formula=notation.write_reduction)
def max(x, *, axis=None, keepdims=False) -> np.ndarray:
    """The largest element over `axis`. Elements that tie share the gradient evenly."""
    return np.max(x, axis=axis, keepdims=keepdims)


@primitive(kind="reduction", formula=notation.write_reduction)
def min(x, *, axis=None, keepdims=False) -> np.ndarray:
    """The smallest element over `axis`. Elements that tie share the gradient evenly."""
    return np.min(x, axis=axis, keepdims=keepdims)


def extremum_vjp(g, y, x, *, axis, keepdims):
    shape = kept(x, axis)
    chosen = (x == y.reshape(shape)) | (x != x)  # a nan is its own extremum
    shares = chosen / np.sum(chosen, axis=axis, keepdims=True)
    return g.reshape(shape) * shares.astype(x.dtype)


max.vjps(extremum_vjp)
min.vjps(extremum_vjp)


# --------------------------------------------------------------------------------------------------------------------
# Shape


@primitive(kind="movement", formula=notation.hidden)
def reshape(x, *, shape) -> np.ndarray:
    """The same elements in row-major order under another shape; one length may be -1."""
    return np.reshape(x, shape)


reshape.vjps(lambda g, y, x, shape: g.reshape(x.shape))


@primitive(kind="movement", formula=notation.write_transpose)
def transpose(x, *, axes=None) -> np.ndarray:
    """The axes in the order `axes`, or reversed."""
    return x.transpose(axes)


def transpose_vjp(g, y, x, *, axes):
    if axes is None:
        return transpose(g)
    back = [0] * x.ndim
    for i, axis in enumerate(axes):
        back[axis] = i
    return transpose(g, axes=tuple(back))


transpose.vjps(transpose_vjp)


@primitive(kind="movement", formula=notation.hidden)
def broadcast_to(x, *, shape) -> np.ndarray:
    """`x` repeated to `shape` by NumPy's rules."""
    return np.broadcast_to(x, shape)


broadcast_to.vjps(lambda g, y, x, shape: g)


@primitive(kind="movement", formula=notation.write_cast)
def cast(x, *, dtype) -> np.ndarray:
    """`x` in another floating dtype; the gradient returns in the dtype of `x`."""
    return x.astype(dtype)


cast.vjps(lambda g, y, x, dtype: g)


def list_of_arrays(inputs, keywords):
    """Accept concat([a, b]) beside concat(a, b)."""
    return (
        (tuple(inputs[0]), keywords)
        if len(inputs) == 1 and isinstance(inputs[0], (list, tuple))
        else (inputs, keywords)
    )


@primitive(kind="join", formula=notation.write_concat, arrange=list_of_arrays)
def concat(*xs, axis=0) -> Any:
    """The arrays one after the other along an existing `axis`."""
    return np.concatenate(xs, axis=operator.index(axis))  # None would flatten, and no rule would know


@concat.vjp_each
def concat_vjp(i, g, y, *xs, axis):
    axis = axis % g.ndim
    start = builtins.sum(x.shape[axis] for x in xs[:i])
    return g[along(axis, slice(start, start + xs[i].shape[axis]))]


def along(axis, index):
    """The index that takes `index` on `axis` and everything on the axes before it."""
    return (slice(None),) * axis + (index,)


@primitive(kind="join", formula=notation.function, arrange=list_of_arrays)
def stack(*xs, axis=0) -> Any:
    """Arrays of one shape side by side along a new `axis`."""
    return np.stack(xs, axis=axis)


@stack.vjp_each
def stack_vjp(i, g, y, *xs, axis):
    return g[along(axis % g.ndim, i)]


# --------------------------------------------------------------------------------------------------------------------
# Indexing


def frozen_index(inputs, keywords):
    """Take array indices by value: what the caller does to them later must not reach the backward."""

    def freeze(part):
        part = getattr(part, "_data", part) if hasattr(part, "__apply_primitive__") else part
        return as_index(part) if isinstance(part, list) else part.copy() if isinstance(part, np.ndarray) else part

    index = keywords["index"]
    return inputs, {**keywords, "index": tuple(map(freeze, index)) if isinstance(index, tuple) else freeze(index)}


@primitive(kind="index", formula=notation.write_getitem, arrange=frozen_index)
def getitem(x, *, index) -> np.ndarray:
    """x[index]: integers, slices, None, ..., boolean masks and integer arrays, as in NumPy."""
    return x[index]


getitem.vjps(lambda g, y, x, index: scatter_add(g, index=index, shape=x.shape))


@primitive(kind="scatter", formula=notation.write_scatter)
def scatter_add(values, *, index, shape) -> np.ndarray:
    """An array of zeros of `shape` to which `values` were added at `index`; places that repeat add up."""
    out = np.zeros(shape, dtype=values.dtype)
    if is_basic(index):
        out[index] = values
    elif isinstance(index, np.ndarray) and index.dtype.kind in "iu" and index.size:
        add_rows(out, index.ravel().astype(np.intp), values.reshape(index.size, *shape[1:]))
    else:
        np.add.at(out, index, values)
    return out


scatter_add.vjps(lambda g, y, values, index, shape: g[index])


def is_basic(index):
    """Whether an index is made of slices, integers, None and ... only, so that no place is named twice."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or isinstance(part, (slice, int, np.integer)) for part in parts)


def add_rows(out, rows, values):
    """out[rows] += values, repeated rows adding up: sorted first, which is many times faster than np.add.at."""
    rows = np.where(rows < 0, rows + len(out), rows)
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
    out[rows[starts]] = np.add.reduceat(values[order], starts, axis=0)


def ids_last(inputs, keywords):
    """Accept ids in a list, which are integers though other lists become floats."""
    if inputs and isinstance(inputs[-1], (list, tuple)):
        inputs = (*inputs[:-1], as_index(inputs[-1]))
    return inputs, keywords


@primitive(kind="lookup", roles=("weight", "ids"), formula=notation.write_take, arrange=ids_last)
def take(weight, ids) -> Any:
    """Rows of a table, weight[ids]: an embedding. weight (V, ...), integer ids of any shape -> ids.shape + (...)."""
    check_ids(ids, len(weight), "ids")
    return weight[ids]


take.vjps(lambda g, y, weight, ids: scatter_add(g, index=ids, shape=weight.shape), None)


# --------------------------------------------------------------------------------------------------------------------
# Products


@primitive(kind="product", roles=("data", "data"), label="Linear", formula=notation.write_matmul)
def matmul(a, b) -> Any:
    """(..., n, k) @ (..., k, m) -> (..., n, m). The `@` of tensors takes vectors too, as NumPy does."""
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"expected two or more axes on both sides, got {a.ndim} and {b.ndim}; use a @ b")
    return product(a, b)


matmul.vjps(
    lambda g, y, a, b: product(g, b.mT),
    lambda g, y, a, b: product(a.mT, g),
)


def product(a, b):
    """a @ b. Two small matrices meet in half the time through `dot`, which does not look for stacks of them."""
    return a.dot(b) if a.__class__ is np.ndarray is b.__class__ and a.ndim == b.ndim == 2 else a @ b


@primitive(kind="product", roles=("data", "weight", "bias"), label="Linear", formula=notation.write_linear)
def linear(x, weight, bias=None) -> Any:
    """x @ weight + bias: x (..., n), weight (n, m), bias (m,) -> (..., m)."""
    if np.ndim(x) < 1 or np.ndim(weight) != 2 or x.shape[-1] != weight.shape[0]:
        raise ValueError("expected x (..., n) and weight (n, m), stored (in, out)")
    y = (rows(x) @ weight).reshape(*x.shape[:-1], weight.shape[1])
    return y if bias is None else y + bias


linear.vjps(
    lambda g, y, x, weight, bias: (rows(g) @ weight.mT).reshape(x.shape),
    lambda g, y, x, weight, bias: rows(x).mT @ rows(g),
    lambda g, y, x, weight, bias: g,
)


def rows(x):
    """All leading axes as one: (..., n) -> (N, n)."""
    return x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))


@linear.composed_of
def linear_from_primitives(x, weight, bias=None):
    y = reshape(matmul(rows(x), weight), shape=(*x.shape[:-1], weight.shape[1]))
    return y if bias is None else add(y, bias)


def string_first(inputs, keywords):
    """Accept NumPy's einsum("ij,jk->ik", a, b)."""
    if inputs and isinstance(inputs[0], str):
        keywords, inputs = {**keywords, "subscripts": inputs[0]}, inputs[1:]
    return inputs, keywords


@primitive(kind="product", roles=("data",), formula=notation.write_einsum, arrange=string_first)
def einsum(*xs, subscripts="") -> Any:
    """Sums of products by index letters: einsum("bqd,bkd->bqk", q, k)."""
    terms, out = einsum_terms(subscripts, [np.shape(x) for x in xs])
    return np.einsum(",".join(terms) + "->" + out, *xs)


@einsum.vjp_each
def einsum_vjp(i, g, y, *xs, subscripts):
    """Swap the argument and the output. What the swap cannot say is put back: letters that only this argument has
    (they were summed: broadcast), and letters that it has twice (a diagonal: an identity matrix)."""
    terms, out = einsum_terms(subscripts, [np.shape(x) for x in xs])
    term, shape = terms[i], xs[i].shape
    others = terms[:i] + terms[i + 1 :]
    once = "".join(dict.fromkeys(term))
    known = "".join(letter for letter in once if letter in out or any(letter in other for other in others))
    gradient = einsum(g, *xs[:i], *xs[i + 1 :], subscripts=",".join([out, *others]) + "->" + known)
    lengths = dict(zip(known, gradient.shape, strict=True))
    gradient = gradient.reshape(tuple(lengths.get(c, 1) if c not in term[:k] else 1 for k, c in enumerate(term)))
    gradient = broadcast_to(gradient, shape=np.broadcast_shapes(gradient.shape, shape))
    for k, letter in enumerate(term):
        first = term.index(letter)
        if first != k:
            identity = np.eye(shape[k], dtype=xs[i].dtype)
            gradient = gradient * identity.reshape([shape[k] if j in (first, k) else 1 for j in range(len(term))])
    return gradient


def einsum_terms(subscripts, shapes):
    """The letters of each operand and of the output, with `...` written out in capitals that are free."""
    text = subscripts.replace(" ", "")
    left, arrow, out = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        raise ValueError(f"{subscripts!r} names {len(terms)} operands, got {len(shapes)}")
    spare = [c for c in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in text]
    axes = [len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes, strict=True)]
    longest = builtins.max((n for n, term in zip(axes, terms, strict=True) if "..." in term), default=0)
    dots = "".join(spare[:longest])
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        out = ("..." if "..." in left else "") + "".join(c for c in sorted(set(letters)) if letters.count(c) == 1)
    terms = [term.replace("...", dots[longest - n :] if n else "") for n, term in zip(axes, terms, strict=True)]
    return terms, out.replace("...", dots)


# --------------------------------------------------------------------------------------------------------------------
# Compositions


def swapaxes(x: X, axis1: int, axis2: int) -> X:
    """Exchange two axes of `x`."""
    axis1, axis2 = normalize_axis_tuple((axis1, axis2), x.ndim, allow_duplicate=True)
    axes = list(range(x.ndim))
    axes[axis1], axes[axis2] = axis2, axis1
    return transpose(x, axes=tuple(axes))


def split(x: X, parts: int | Sequence[int], axis: int = 0) -> list[X]:
    """Cut `x` along `axis` into `parts` equal pieces, or at the indices in the list `parts`, as np.split does."""
    (axis,) = normalize_axis_tuple(axis, x.ndim)
    n = x.shape[axis]
    if isinstance(parts, (int, np.integer)):
        if parts < 1 or n % parts:
            raise ValueError(f"axis {axis} of length {n} does not split into {parts} equal parts")
        parts = [n // parts * i for i in range(1, parts)]
    edges = [0, *parts, n]
    return [x[along(axis, slice(a, b))] for a, b in itertools.pairwise(edges)]


def norm(x: X, axis: Axis = None, keepdims: bool = False) -> X:
    """The Euclidean norm over `axis`. Where it is 0 the gradient is taken as 0."""
    return root_of_squares(sum(x * x, axis=axis, keepdims=keepdims))


def std(x: X, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> X:
    """The standard deviation over `axis`. Where it is 0 the gradient is taken as 0."""
    return root_of_squares(var(x, axis=axis, ddof=ddof, keepdims=keepdims))


def root_of_squares(x):
    """sqrt(x), with derivative 0 at 0."""
    is_zero = x == 0
    return where(is_zero, 0.0, sqrt(where(is_zero, 1.0, x)))
