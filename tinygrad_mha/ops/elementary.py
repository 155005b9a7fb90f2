"""The elementary primitives: arithmetic, functions, reductions, shape, indexing, products. Rules follow each one.

A rule is `rule(g, y, inputs..., keywords...)`: the gradient `g` of the output `y`, times the local derivative. It uses
only primitives and what arrays and Tensors have in common. So the same rule runs on arrays in a plain backward, and on
Tensors if the gradient is to be differentiated again. Comparisons give plain arrays in both cases. A rule may return
the shape that its argument was broadcast to; the engine sums it back.

Where a derivative does not exist, the rule takes a finite value, which the docstring states (`relu`, `abs`, ties of
`max`). An infinite derivative of one of these primitives, times a gradient of exactly 0, gives 0. A product with an
infinite factor is no derivative of that kind: `where(x > 0, x * log(x), 0)` has the gradient 0 * -inf = nan at 0.
Replace the argument, not the result: with `safe = where(x > 0, x, 1)`, `where(x > 0, x * log(safe), 0)` is finite.

Names follow NumPy, so some hide a builtin (`sum`, `max`, `min`, `abs`, `pow`) in this file.
"""

from __future__ import annotations

import builtins
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy import ndarray
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from tinygrad_mha import notation
from tinygrad_mha.arguments import as_index, check_boolean, check_ids
from tinygrad_mha.kernels import reference
from tinygrad_mha.kernels.reference import MANY, merge_rows, sum_leading
from tinygrad_mha.primitives import primitive
from tinygrad_mha.torch_names import translate_keywords

__all__ = ["abs", "add", "broadcast_to", "cast", "clip", "concat", "cos", "cumsum", "div", "einsum", "erf", "exp"]
__all__ += ["expm1", "flip", "getitem", "linear", "log", "log1p", "mask", "matmul", "max", "maximum", "mean", "min"]
__all__ += ["minimum", "moveaxis", "mul", "neg", "norm", "pow", "prod", "relu", "reshape", "scale", "scatter_add"]
__all__ += ["sigmoid", "sin", "split", "sqrt", "stack", "std", "sub", "sum", "swapaxes", "take", "tanh", "transpose"]
__all__ += ["var", "where"]

INFINITY = math.inf
X = TypeVar("X", bound=Any)  # an array or a Tensor
Axis = int | tuple[int, ...] | None

# --------------------------------------------------------------------------------------------------------------------
# Arithmetic. `x * 0.5` is recorded as scale(x, by=0.5), without an input for the constant.


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


def div_vjp_divisor(g, y, a, b):
    # -g a / b^2 from the quotient y, because b^2 overflows and underflows early. Where even g / b does, g y does not.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        gradient = multiply_gradient(divide_gradient(g, b), y)
        finite = np.isfinite(gradient)
        return -(gradient if np.all(finite) else where(finite, gradient, divide_gradient(g * y, b)))


div.vjps(lambda g, y, a, b: divide_gradient(g, b), div_vjp_divisor)


@primitive(kind="elementwise", formula=notation.write_neg)
def neg(x) -> np.ndarray:
    """-x."""
    return -x


neg.vjps(lambda g, y, x: -g)


@primitive(kind="elementwise", formula=notation.write_scale)
def scale(x, *, by) -> np.ndarray:
    """x * by, for a number `by` that is part of the formula, such as 1 / sqrt(d_k)."""
    return x * by


scale.vjps(lambda g, y, x, by: g * by)


@primitive(kind="elementwise", formula=notation.write_pow)
def pow(a, b) -> Any:
    """a ** b; nan, with NumPy's warning, where the power is not real (a negative, b fractional).

    The derivative with respect to a is 0 where b is 0. The derivative with respect to b is 0 where a is 0; where a is
    negative it is nan, with NumPy's warning.
    """
    return a**b


def pow_vjp_base(g, y, a, b):
    # At a = 0 with b < 1 the slope is infinite. For negative a with fractional b it is nan, and the forward has warned.
    with np.errstate(divide="ignore", invalid="ignore"):
        return multiply_gradient(g, b * a ** slope_exponent(a, b))


def pow_vjp_exponent(g, y, a, b):
    one = np.ones((), y.dtype)  # the logarithm in the dtype of the result
    return multiply_gradient(g * log(where(a == 0, one, a)), y)


def slope_exponent(a, b):
    """The exponent b - 1 of the derivative, but 1 at a = b = 0, and 0 for the number 0: then b * a ** (b - 1) is 0."""
    return where((a == 0) & (b == 0), 1, b - 1) if hasattr(b, "shape") else (b - 1 if b else 0)


pow.vjps(pow_vjp_base, pow_vjp_exponent)


def multiply_gradient(g, slope):
    """g * slope, but 0 where g is 0 and the slope is infinite or nan."""
    finite = (slope < INFINITY) & (slope > -INFINITY)
    return g * (slope if np.all(finite) else where((g == 0) & ~finite, 0.0, slope))


def divide_gradient(g, d):
    """g / d, but 0 where g is 0 and d is 0 or nan. Other divisions by 0 are infinite."""
    usable = (d > 0) | (d < 0)  # a Python bool if d is a Python number, so below np.logical_not, not ~
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


exp.vjps(lambda g, y, x: multiply_gradient(g, y))


@primitive(kind="elementwise")
def log(x) -> np.ndarray:
    """The natural logarithm: -inf at 0 and nan for negative numbers, both with NumPy's warning."""
    return np.log(x)


log.vjps(lambda g, y, x: divide_gradient(g, x))


@primitive(kind="elementwise")
def log1p(x) -> np.ndarray:
    """log(1 + x), accurate for small x."""
    return np.log1p(x)


log1p.vjps(lambda g, y, x: divide_gradient(g, 1.0 + x))


@primitive(kind="elementwise")
def expm1(x) -> np.ndarray:
    """exp(x) - 1, accurate for small x."""
    return np.expm1(x)


expm1.vjps(lambda g, y, x: multiply_gradient(g, y + 1.0))


@primitive(kind="elementwise")
def sin(x) -> np.ndarray:
    """The sine of an angle in radians."""
    return np.sin(x)


sin.vjps(lambda g, y, x: g * cos(x))


@primitive(kind="elementwise")
def cos(x) -> np.ndarray:
    """The cosine of an angle in radians."""
    return np.cos(x)


cos.vjps(lambda g, y, x: -g * sin(x))


@primitive(kind="elementwise", formula=notation.write_sqrt)
def sqrt(x) -> np.ndarray:
    """The square root. Its derivative at 0 is infinite; `norm` and `std` take 0 there."""
    return np.sqrt(x)


sqrt.vjps(lambda g, y, x: divide_gradient(g, 2.0 * y))


@primitive(kind="elementwise")
def erf(x) -> np.ndarray:
    """The error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x. Error in float64: about 1e-15."""
    return reference.erf(as_floating(x))


def as_floating(x):
    """Convert integers to float64; floats are unchanged."""
    x = np.asarray(x)
    return x if x.dtype.kind == "f" else x.astype(np.float64)


# Beyond 40 the derivative is 0 in every dtype; the clip prevents an overflow of the square.
erf.vjps(lambda g, y, x: g * (2.0 / math.sqrt(math.pi) * exp(-(clip(x, min=-40.0, max=40.0) ** 2))))


@primitive(kind="activation")
def tanh(x) -> np.ndarray:
    """The hyperbolic tangent."""
    return np.tanh(x)


tanh.vjps(lambda g, y, x: g * (1.0 - y * y))


@primitive(kind="activation")
def sigmoid(x) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow for large |x|."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


sigmoid.vjps(lambda g, y, x: g * (y * (1.0 - y)))


@primitive(kind="activation", label="ReLU")
def relu(x) -> np.ndarray:
    """max(x, 0). The derivative at 0 is taken as 0; a nan passes the gradient on, as in `maximum`."""
    return np.maximum(x, 0)


relu.vjps(lambda g, y, x: where(x <= 0, 0.0, g))


@primitive(kind="elementwise", formula=notation.write_abs)
def abs(x) -> np.ndarray:
    """|x|. The derivative at 0 is taken as 0."""
    return np.abs(x)


abs.vjps(lambda g, y, x: where(x == 0, 0.0, where(x < 0, -g, g)))


@primitive(kind="elementwise")
def clip(x, *, min=None, max=None) -> np.ndarray:
    """x limited to the range from `min` to `max` (numbers). The derivative at the limits is 1."""
    return np.clip(x, min, max)


def clip_vjp(g, y, x, *, min, max):
    outside = False if min is None else x < min
    if max is not None:
        outside = outside | (x > max)
    return where(outside, 0.0, g)


clip.vjps(clip_vjp)


# --------------------------------------------------------------------------------------------------------------------
# Selection


@primitive(kind="choice", roles=("mask", "operand", "operand"))
def where(condition, a, b) -> Any:
    """a where the boolean `condition` holds, else b. Elements that were not selected get a gradient of exactly 0."""
    return np.where(condition, a, b)


where.vjps(
    None,
    lambda g, y, condition, a, b: where(condition, g, 0.0),
    lambda g, y, condition, a, b: where(condition, 0.0, g),
)


@primitive(kind="mask", roles=("operand", "mask"), formula=notation.write_mask)
def mask(scores, allow) -> Any:
    """`scores` where the boolean `allow` holds, -inf elsewhere, so that a softmax gives exactly 0 there."""
    check_boolean(np.asarray(allow), "allow")  # asarray: a 0-d `allow` can be a Python bool, which has no dtype
    return np.where(allow, scores, -INFINITY)


mask.vjps(lambda g, y, scores, allow: where(allow, g, 0.0), None)


@primitive(kind="elementwise")
def maximum(a, b) -> Any:
    """The larger of a and b, element-wise. At a tie each gets half of the gradient; a nan is the larger."""
    return np.maximum(a, b)


maximum.vjps(
    lambda g, y, a, b: share_gradient(g, a, b, a > b),
    lambda g, y, a, b: share_gradient(g, b, a, b > a),
)


@primitive(kind="elementwise")
def minimum(a, b) -> Any:
    """The smaller of a and b, element-wise. At a tie each gets half of the gradient; a nan is the smaller."""
    return np.minimum(a, b)


minimum.vjps(
    lambda g, y, a, b: share_gradient(g, a, b, a < b),
    lambda g, y, a, b: share_gradient(g, b, a, b < a),
)


def share_gradient(g, x, other, wins):
    """What `x` gets of `g`: all where it `wins` or only it is nan, half at a tie or if both are nan, else 0."""
    is_nan, other_is_nan = np.not_equal(x, x), np.not_equal(other, other)
    ties = np.equal(x, other) | (is_nan & other_is_nan)
    return where(wins | (is_nan & np.logical_not(other_is_nan)), g, where(ties, 0.5 * g, 0.0))


# --------------------------------------------------------------------------------------------------------------------
# Reductions. `axis` is None, an integer or a tuple; negative axes count from the end, as in NumPy.


def keepdims_shape(x, axis):
    """The shape of `x` with the reduced axes at length 1."""
    if axis is None or x.ndim == 0:  # NumPy reduces a 0-d array over axis 0 and -1 too
        return (1,) * x.ndim
    axes = normalize_axis_tuple(axis, x.ndim, allow_duplicate=True)
    if len(set(axes)) < len(axes):
        raise ValueError(f"an axis of {x.shape} is given twice: axis={axis}")
    return tuple(1 if i in axes else n for i, n in enumerate(x.shape))


def count(x, axis):
    """The number of elements of `x` that are reduced to one."""
    # An axis of length 1 that is not reduced is included too: a factor of 1.
    return math.prod(n for n, k in zip(x.shape, keepdims_shape(x, axis), strict=True) if k == 1)


@primitive(kind="reduction", formula=notation.write_reduction)
def sum(x, *, axis=None, keepdims=False) -> np.ndarray:
    """The sum over `axis`. An empty sum is 0."""
    return add_up(x, axis, keepdims)


def add_up(x, axis, keepdims):
    shape = keepdims_shape(x, axis) if np.size(x) > MANY and axis is not None and x.ndim > 1 else ()
    n = next((i for i, m in enumerate(shape) if m != 1), 0)  # the first axes are reduced, or have length 1
    if n and x.dtype == np.float32 and builtins.all(k == m for k, m in zip(shape[n:], x.shape[n:], strict=True)):
        total = sum_leading(x, n)
        return total.reshape(shape) if keepdims else total.reshape(reduced_shape(x, axis))
    return np.sum(x, axis=axis, keepdims=keepdims)


def reduced_shape(x, axis):
    """The shape of `x` without the reduced axes."""
    axes = normalize_axis_tuple(axis, x.ndim)
    return tuple(n for i, n in enumerate(x.shape) if i not in axes)


sum.vjps(lambda g, y, x, axis, keepdims: broadcast_to(g.reshape(keepdims_shape(x, axis)), shape=x.shape))


@primitive(kind="reduction", formula=notation.write_reduction)
def mean(x, *, axis=None, keepdims=False) -> np.ndarray:
    """The mean over `axis`."""
    if np.size(x) > MANY and x.dtype == np.float32:
        return add_up(x, axis, keepdims) / count(x, axis)
    return np.mean(x, axis=axis, keepdims=keepdims)


mean.vjps(
    lambda g, y, x, axis, keepdims: broadcast_to(g.reshape(keepdims_shape(x, axis)) / count(x, axis), shape=x.shape)
)


@primitive(kind="reduction", formula=notation.write_reduction)
def var(x, *, axis=None, ddof=0, keepdims=False) -> np.ndarray:
    """The variance over `axis`: the sum of squared distances from the mean, divided by n - ddof."""
    # np.var subtracts the mean once more, whose rounding error alone would be the variance of equal numbers.
    return np.var(x - np.mean(x, axis=axis, keepdims=True), axis=axis, ddof=ddof, keepdims=keepdims)


def var_vjp(g, y, x, *, axis, ddof, keepdims):
    n = count(x, axis)
    factor = 2.0 / (n - ddof) if n > ddof else math.nan
    centred = x - mean(x, axis=axis, keepdims=True)
    centred = centred - mean(centred, axis=axis, keepdims=True)
    return g.reshape(keepdims_shape(x, axis)) * factor * centred


var.vjps(var_vjp)


@primitive(kind="reduction", formula=notation.write_reduction)
def max(x, *, axis=None, keepdims=False) -> np.ndarray:
    """The maximum over `axis`. Equal maxima share the gradient evenly."""
    return np.max(x, axis=axis, keepdims=keepdims)


@primitive(kind="reduction", formula=notation.write_reduction)
def min(x, *, axis=None, keepdims=False) -> np.ndarray:
    """The minimum over `axis`. Equal minima share the gradient evenly."""
    return np.min(x, axis=axis, keepdims=keepdims)


def extremum_vjp(g, y, x, *, axis, keepdims):
    shape = keepdims_shape(x, axis)
    chosen = (x == y.reshape(shape)) | (x != x)  # a nan is the extremum
    n = np.sum(chosen, axis=axis, keepdims=True).astype(x.dtype)
    return where(chosen, g.reshape(shape) / n, 0.0)


max.vjps(extremum_vjp)
min.vjps(extremum_vjp)


@primitive(kind="reduction")
def cumsum(x, *, axis) -> np.ndarray:
    """The sums of the first 1, 2, 3, ... elements along `axis` (an integer), in the shape of x."""
    return np.cumsum(x, axis=operator.index(axis))


# Element i is part of all sums from i on: the same from the other end.
cumsum.vjps(lambda g, y, x, axis: flip(cumsum(flip(g, axis), axis=axis), axis))


# --------------------------------------------------------------------------------------------------------------------
# Shape


@primitive(kind="movement", formula=notation.write_reshape)
def reshape(x, *, shape) -> np.ndarray:
    """The same elements, in row-major order, in another shape; one length may be -1."""
    return np.asarray(x).reshape(shape)  # np.reshape takes three times as long


reshape.vjps(lambda g, y, x, shape: g.reshape(x.shape))


@primitive(kind="movement", formula=notation.write_transpose)
def transpose(x, *, axes=None) -> np.ndarray:
    """The axes in the order `axes`; None reverses them."""
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
    """`x` repeated to `shape` by NumPy's broadcasting rules."""
    return np.broadcast_to(x, shape)


broadcast_to.vjps(lambda g, y, x, shape: g)


@primitive(kind="movement", formula=notation.write_cast)
def cast(x, *, dtype) -> np.ndarray:
    """`x` in another floating dtype. Its gradient has the dtype of `x`."""
    return x.astype(dtype)


cast.vjps(lambda g, y, x, dtype: g)


def unpack_list(inputs, keywords):
    """Accept concat([a, b]) as well as concat(a, b)."""
    if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)):
        inputs = tuple(inputs[0])
    return inputs, keywords


@primitive(kind="join", formula=notation.write_concat, arrange=unpack_list)
def concat(*xs, axis=0) -> Any:
    """Join arrays along an existing `axis`."""
    return np.concatenate(xs, axis=operator.index(axis))  # refuses None, for which NumPy flattens


@concat.vjp_each
def concat_vjp(i, g, y, *xs, axis):
    axis = axis % g.ndim
    start = builtins.sum(x.shape[axis] for x in xs[:i])
    return g[index_along(axis, slice(start, start + xs[i].shape[axis]))]


def index_along(axis, index):
    """The index that applies `index` to `axis` and selects everything on the axes before it."""
    return (slice(None),) * axis + (index,)


@primitive(kind="join", formula=notation.function, arrange=unpack_list)
def stack(*xs, axis=0) -> Any:
    """Join arrays of one shape along a new `axis`."""
    return np.stack(xs, axis=axis)


@stack.vjp_each
def stack_vjp(i, g, y, *xs, axis):
    return g[index_along(axis % g.ndim, i)]


# --------------------------------------------------------------------------------------------------------------------
# Indexing


def copy_index(inputs, keywords):
    """Copy index arrays: later writes by the caller must not change the backward."""

    def copy(part):
        if hasattr(part, "__apply_primitive__"):  # a Tensor
            part = getattr(part, "_data", part)
        if isinstance(part, list):
            return as_index(part)
        return part.copy() if isinstance(part, np.ndarray) else part

    index = keywords["index"]
    index = tuple(copy(part) for part in index) if isinstance(index, tuple) else copy(index)
    return inputs, {**keywords, "index": index}


@primitive(kind="index", formula=notation.write_getitem, arrange=copy_index)
def getitem(x, *, index) -> np.ndarray:
    """x[index], for all indices that NumPy has: integers, slices, None, ..., boolean and integer arrays."""
    return x[index]


getitem.vjps(lambda g, y, x, index: scatter_add(g, index=index, shape=x.shape))


@primitive(kind="scatter", formula=notation.write_scatter)
def scatter_add(values, *, index, shape) -> np.ndarray:
    """Zeros of `shape` with `values` added at `index`. Repeated indices add up."""
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
    """Whether an index consists of slices, integers, None and ... only, so that no element is selected twice."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or isinstance(part, (slice, int, np.integer)) for part in parts)


def add_rows(out, rows, values):
    """Set out[r] to the sum of all `values` with row r; `out` must be zeros. Sorting many is faster than np.add.at."""
    if values.size < 1000:
        np.add.at(out, rows, values)
        return
    rows = np.where(rows < 0, rows + len(out), rows)
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
    out[rows[starts]] = np.add.reduceat(values[order], starts, axis=0)


def convert_ids(inputs, keywords):
    """Accept ids as a list, which becomes an array of integers."""
    if inputs and isinstance(inputs[-1], (list, tuple)):
        inputs = (*inputs[:-1], as_index(inputs[-1]))
    return inputs, keywords


@primitive(kind="lookup", roles=("weight", "ids"), formula=notation.write_take, arrange=convert_ids)
def take(weight, ids) -> Any:
    """Rows of a table, weight[ids]: weight (V, ...), integer ids of any shape -> ids.shape + (...)."""
    check_ids(ids, len(weight), "ids")
    return weight[ids]


take.vjps(lambda g, y, weight, ids: scatter_add(g, index=ids, shape=weight.shape), None)


# --------------------------------------------------------------------------------------------------------------------
# Products


@primitive(kind="product", roles=("data", "data"), label="Linear", formula=notation.write_matmul)
def matmul(a, b) -> Any:
    """The matrix product (..., n, k) @ (..., k, m) -> (..., n, m). The operator `@` accepts vectors too."""
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"expected two or more axes on both sides, got {a.ndim} and {b.ndim}; use a @ b")
    return product(a, b)


matmul.vjps(
    lambda g, y, a, b: product(g, b.mT),
    lambda g, y, a, b: product(a.mT, g),
)


def product(a, b):
    """a @ b. For small 2-D arrays `dot` is twice as fast as `@`."""
    are_arrays = a.__class__ is b.__class__ is ndarray
    return a.dot(b) if are_arrays and a.ndim == b.ndim == 2 else a @ b


@primitive(kind="product", roles=("data", "weight", "bias"), label="Linear", formula=notation.write_linear)
def linear(x, weight, bias=None) -> Any:
    """x @ weight + bias: x (..., n), weight (n, m), bias (m,) -> (..., m)."""
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ValueError("expected x (..., n) and weight (n, m), stored (in, out)")
    rows = x.reshape(-1) if x.size == len(weight) > 0 else merge_rows(x)  # BLAS is faster with a vector than one row
    y = rows.dot(weight)
    if bias is not None:
        y = np.add(y, bias, out=y if bias.dtype == y.dtype else None)  # in place it takes half the time
    return y.reshape(*x.shape[:-1], weight.shape[1])


linear.vjps(
    lambda g, y, x, weight, bias: product(merge_rows(g), weight.mT).reshape(x.shape),
    lambda g, y, x, weight, bias: product(merge_rows(x).mT, merge_rows(g)),
    lambda g, y, x, weight, bias: g,
)


@linear.composed_of
def linear_from_primitives(x, weight, bias=None):
    y = reshape(matmul(merge_rows(x), weight), shape=(*x.shape[:-1], weight.shape[1]))
    return y if bias is None else add(y, bias)


def move_subscripts(inputs, keywords):
    """Accept NumPy's einsum("ij,jk->ik", a, b)."""
    if inputs and isinstance(inputs[0], str):
        keywords, inputs = {**keywords, "subscripts": inputs[0]}, inputs[1:]
    return inputs, keywords


@primitive(kind="product", roles=("data",), formula=notation.write_einsum, arrange=move_subscripts)
def einsum(*xs, subscripts="") -> Any:
    """Einstein summation as np.einsum: einsum("bqd,bkd->bqk", q, k)."""
    terms, out = einsum_terms(subscripts, [np.shape(x) for x in xs])
    return np.einsum(",".join(terms) + "->" + out, *xs)


@einsum.vjp_each
def einsum_vjp(i, g, y, *xs, subscripts):
    """The einsum with argument `i` and the output exchanged.

    Letters that only argument `i` has were summed over: the gradient is broadcast along them. Letters that it has twice
    select a diagonal: the gradient is multiplied by an identity matrix.
    """
    terms, out = einsum_terms(subscripts, [np.shape(x) for x in xs])
    term, shape = terms[i], xs[i].shape
    others = terms[:i] + terms[i + 1 :]
    # 1. The letters of `term` that occur elsewhere, each once: einsum computes the gradient along these.
    elsewhere = out + "".join(others)
    known = "".join(letter for letter in dict.fromkeys(term) if letter in elsewhere)
    gradient = einsum(g, *xs[:i], *xs[i + 1 :], subscripts=",".join([out, *others]) + "->" + known)
    # 2. One axis per letter of `term`, of length 1 for a letter that was summed over or that is repeated. Broadcasting
    #    fills these in. Where x has length 1 and was broadcast, the gradient stays longer: the engine sums it back.
    lengths = dict(zip(known, gradient.shape, strict=True))
    is_first = [term.index(letter) == k for k, letter in enumerate(term)]
    gradient = gradient.reshape(
        tuple(lengths.get(letter, 1) if first else 1 for letter, first in zip(term, is_first, strict=True))
    )
    gradient = broadcast_to(gradient, shape=np.broadcast_shapes(gradient.shape, shape))
    # 3. A repeated letter reads a diagonal: every other element gets 0.
    for k, letter in enumerate(term):
        first = term.index(letter)
        if first != k:
            identity = np.eye(shape[k], dtype=xs[i].dtype)
            gradient = gradient * identity.reshape([shape[k] if j in (first, k) else 1 for j in range(len(term))])
    return gradient


def einsum_terms(subscripts, shapes):
    """The letters of each operand and of the output. `...` is replaced by unused capital letters."""
    text = subscripts.replace(" ", "")
    left, arrow, out = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        raise ValueError(f"{subscripts!r} names {len(terms)} operands, got {len(shapes)}")
    spare = [c for c in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in text]
    # For how many axes `...` stands in each term. Shorter ones are aligned on the right, as in broadcasting.
    dotted = [len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes, strict=True)]
    longest = builtins.max((n for n, term in zip(dotted, terms, strict=True) if "..." in term), default=0)
    dots = "".join(spare[:longest])
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        out = ("..." if "..." in left else "") + "".join(c for c in sorted(set(letters)) if letters.count(c) == 1)
    terms = [term.replace("...", dots[longest - n :] if n else "") for n, term in zip(dotted, terms, strict=True)]
    return terms, out.replace("...", dots)


# --------------------------------------------------------------------------------------------------------------------
# Compositions


def swapaxes(x: X, axis1: int, axis2: int) -> X:
    """Exchange two axes of `x`."""
    i, j = normalize_axis_index(axis1, x.ndim), normalize_axis_index(axis2, x.ndim)
    axes = list(range(x.ndim))
    axes[i], axes[j] = j, i
    return transpose(x, axes=tuple(axes))


@translate_keywords
def split(x: X, parts: int | Sequence[int], axis: int = 0) -> list[X]:
    """Cut `x` along `axis` into `parts` equal pieces, or at the indices in the list `parts`, as np.split does."""
    (axis,) = normalize_axis_tuple(axis, x.ndim)
    n = x.shape[axis]
    if isinstance(parts, (float, bool, np.floating, np.bool)):
        raise TypeError(f"parts must be an integer or a list of indices, got {parts!r}")
    if isinstance(parts, (int, np.integer)):
        if parts < 1 or n % parts:
            raise ValueError(f"axis {axis} of length {n} does not split into {parts} equal parts")
        parts = [n // parts * i for i in range(1, parts)]
    edges = [0, *parts, n]
    return [x[index_along(axis, slice(a, b))] for a, b in itertools.pairwise(edges)]


def moveaxis(x: X, source: int | Sequence[int], destination: int | Sequence[int]) -> X:
    """Move the axes `source` to the positions `destination`; the others keep their order."""
    old, new = normalize_axis_tuple(source, x.ndim), normalize_axis_tuple(destination, x.ndim)
    if len(old) != len(new):
        raise ValueError(f"expected as many destinations as sources, got {source} and {destination}")
    axes = [i for i in range(x.ndim) if i not in old]
    for position, axis in sorted(zip(new, old, strict=True)):
        axes.insert(position, axis)
    return transpose(x, axes=tuple(axes))


def flip(x: X, axis: Axis = None) -> X:
    """Reverse the order of the elements along `axis` (None: all axes)."""
    axes = range(x.ndim) if axis is None else normalize_axis_tuple(axis, x.ndim)
    return x[tuple(slice(None, None, -1 if i in axes else 1) for i in range(x.ndim))]


def prod(x: X, axis: Axis = None, keepdims: bool = False) -> X:
    """The product over `axis`; 1 of no elements.

    It multiplies pairs, then pairs of these, and so on. So its derivatives are right where elements are 0, too.
    """
    axes = tuple(range(x.ndim)) if axis is None else normalize_axis_tuple(axis, x.ndim)
    shape = keepdims_shape(x, axes)
    kept = reduced_shape(x, axes)
    y = moveaxis(x, axes, tuple(range(len(axes)))).reshape((math.prod(x.shape[i] for i in axes), *kept))
    if not len(y):
        return y.sum(axis=0).reshape(shape if keepdims else kept) + 1.0
    while len(y) > 1:
        half = len(y) // 2
        pairs = y[:half] * y[half : 2 * half]
        y = concat(pairs, y[2 * half :], axis=0) if len(y) % 2 else pairs
    return y.reshape(shape if keepdims else kept)


@translate_keywords
def norm(x: X, axis: Axis = None, keepdims: bool = False) -> X:
    """The Euclidean norm over `axis`, of any numbers whose norm the dtype holds. Where it is 0 the gradient is 0."""
    x, scale_back = scale_to_square(x, axis, keepdims)
    y = sqrt_zero_slope(sum(x * x, axis=axis, keepdims=keepdims))
    return y if scale_back is None else y * scale_back


def std(x: X, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> X:
    """The standard deviation over `axis`, of any numbers that the dtype holds. Where it is 0 the gradient is 0."""
    x, scale_back = scale_to_square(x, axis, keepdims)
    y = sqrt_zero_slope(var(x, axis=axis, ddof=ddof, keepdims=keepdims))
    return y if scale_back is None else y * scale_back


def scale_to_square(x, axis, keepdims):
    """Scale `x` by powers of 2 so that squares neither overflow nor lose digits: (scaled x, what undoes it for a norm).

    Where the squares of `x` do neither anyway, it is returned unchanged, with None.
    """
    values = np.asarray(getattr(x, "_data", x))
    info = np.finfo(values.dtype if values.dtype.kind == "f" else np.float64)
    smallest, largest = math.sqrt(info.tiny / info.eps), math.sqrt(info.max / builtins.max(count(values, axis), 1)) / 2
    top = np.max(np.abs(values), axis=axis, keepdims=True, initial=0)
    beyond = np.isfinite(top) & (top > 0) & ((top < smallest) | (top > largest))
    if not beyond.any():
        return x, None
    limit = info.maxexp * 3 // 4
    exponent = np.where(beyond, np.clip(np.frexp(top)[1], -limit, limit), 0)
    back = np.ldexp(np.ones_like(top), exponent)
    return x * (1 / back), back if keepdims else np.squeeze(back, axis=axis)


def sqrt_zero_slope(x):
    """sqrt(x), with derivative 0 at 0."""
    is_zero = x == 0
    return where(is_zero, 0.0, sqrt(where(is_zero, 1.0, x)))
