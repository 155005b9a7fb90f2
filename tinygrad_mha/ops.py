"""Every primitive: what it computes, and right under it what its derivative is.

A rule is `rule(g, y, inputs..., keywords...)`: the gradient `g` of the output `y`, times the local derivative. It is
written with the primitives of this file and with what arrays and tensors share, so the same rule runs on arrays in a
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

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from tinygrad_mha.kernels import reference
from tinygrad_mha.primitives import REGISTRY, Primitive, as_operand, primitive

INFINITY = math.inf

# --------------------------------------------------------------------------------------------------------------------
# Arithmetic. `x * 0.5` is scale(x, by=0.5): a constant is not a node.


@primitive
def add(a, b):
    """a + b, with broadcasting."""
    return a + b


add.vjps(lambda g, y, a, b: g, lambda g, y, a, b: g)


@primitive
def sub(a, b):
    """a - b, with broadcasting."""
    return a - b


sub.vjps(lambda g, y, a, b: g, lambda g, y, a, b: -g)


@primitive
def mul(a, b):
    """a * b, element by element, with broadcasting."""
    return a * b


mul.vjps(lambda g, y, a, b: g * b, lambda g, y, a, b: g * a)


@primitive
def div(a, b):
    """a / b, with broadcasting."""
    return a / b


div.vjps(
    lambda g, y, a, b: quotient(g, b),
    lambda g, y, a, b: -quotient(quotient(g, b) * a, b),
)


@primitive
def neg(x):
    """-x."""
    return -x


neg.vjps(lambda g, y, x: -g)


@primitive
def scale(x, *, by):
    """x * by, for a number `by` that is part of the formula rather than of the data (1 / sqrt(d_k), say)."""
    return x * by


scale.vjps(lambda g, y, x, by: g * by)


@primitive
def pow(a, b):
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


@primitive
def exp(x):
    """e ** x."""
    return np.exp(x)


exp.vjps(lambda g, y, x: times(g, y))


@primitive
def log(x):
    """The natural logarithm. log(0) is -inf and log of a negative number nan, both with NumPy's warning."""
    return np.log(x)


log.vjps(lambda g, y, x: quotient(g, x))


@primitive
def sqrt(x):
    """The square root. Its slope at 0 is infinite: see `norm` and `std` for a root of squares that may be 0."""
    return np.sqrt(x)


sqrt.vjps(lambda g, y, x: quotient(g, 2.0 * y))


@primitive
def erf(x):
    """The error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x; about 1e-15 in float64."""
    return reference.erf(floating(x))


def floating(x):
    """`x` itself, or integers as floats: for functions whose values are no integers."""
    x = np.asarray(x)
    return x if x.dtype.kind == "f" else x.astype(np.float64)


# Beyond 40 the slope is 0 in every dtype; the clip keeps the square from overflowing.
erf.vjps(lambda g, y, x: g * (2.0 / math.sqrt(math.pi) * exp(-(clip(x, min=-40.0, max=40.0) ** 2))))


@primitive
def tanh(x):
    """The hyperbolic tangent."""
    return np.tanh(x)


tanh.vjps(lambda g, y, x: g * (1.0 - y * y))


@primitive
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow on either side."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


sigmoid.vjps(lambda g, y, x: g * (y * (1.0 - y)))


@primitive
def relu(x):
    """max(x, 0). The derivative at 0 is taken as 0."""
    return np.maximum(x, 0)


relu.vjps(lambda g, y, x: where(x > 0, g, 0.0))


@primitive
def gelu(x, *, tanh=False):
    """x * Phi(x), Phi the normal distribution function (arXiv:1606.08415).

    Exactly through erf, or with `tanh=True` by the formula that GPT-2 was trained with:
    0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
    """
    x = floating(x)
    passed = np.asarray(gelu_passed(x, tanh), dtype=x.dtype)  # of a 0-d array, NumPy makes scalars, which are weak
    return x * passed, passed


def gelu_passed(x, tanh):
    """Phi(x): which part of x passes."""
    return 0.5 * (1.0 + (TANH(gelu_tanh_argument(x)) if tanh else erf(x * math.sqrt(0.5))))


def gelu_tanh_argument(x):
    x = clip(x, min=-10.0, max=10.0)  # beyond, the tanh is 1 to the last bit, and x^3 need not overflow
    return math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))


def gelu_vjp(g, y, passed, x, *, tanh):
    if tanh:
        # passed = (1 + tanh u) / 2, so 1 - tanh^2 u = 4 passed (1 - passed).
        inside = np.clip(x, -10.0, 10.0)
        slope = passed * (1.0 - passed) * (math.sqrt(8.0 / math.pi) * (1.0 + 3 * 0.044715 * (inside * inside)))
    else:
        with np.errstate(over="ignore"):
            slope = np.exp(-0.5 * (x * x)) * (1.0 / math.sqrt(2.0 * math.pi))
    return g * (passed + x * slope)


TANH = tanh  # gelu has a keyword of the same name
gelu.vjps(gelu_vjp)


@gelu.composed_of
def gelu_from_primitives(x, *, tanh):
    return x * gelu_passed(x, tanh)


@primitive
def abs(x):
    """|x|. The derivative at 0 is taken as 0."""
    return np.abs(x)


abs.vjps(lambda g, y, x: where(x > 0, g, where(x < 0, -g, 0.0)))


@primitive
def clip(x, *, min=None, max=None):
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


@primitive
def where(condition, a, b):
    """a where the boolean `condition` holds, else b; the side not chosen receives exactly 0."""
    return np.where(condition, a, b)


where.vjps(
    None,
    lambda g, y, condition, a, b: where(condition, g, 0.0),
    lambda g, y, condition, a, b: where(condition, 0.0, g),
)


@primitive
def mask(scores, allow):
    """`scores` where the boolean `allow` holds, -inf elsewhere: excluded exactly, however large the score was."""
    check_boolean(np.asarray(allow), "allow")  # comparing 0-d tensors gives a bool
    return np.where(allow, scores, -INFINITY)


mask.vjps(lambda g, y, scores, allow: where(allow, g, 0.0), None)


def check_boolean(condition, name):
    if not hasattr(condition, "dtype") or condition.dtype.kind != "b":
        kind = getattr(condition, "dtype", type(condition).__name__)
        raise TypeError(f"{name} must be a boolean array (True = may be seen), got {kind}; compare first: m > 0")


@primitive
def maximum(a, b):
    """The larger of a and b, element by element. At a tie each side takes half of the gradient."""
    return np.maximum(a, b)


maximum.vjps(
    lambda g, y, a, b: g * share(a > b, a == b, g),
    lambda g, y, a, b: g * share(b > a, a == b, g),
)


@primitive
def minimum(a, b):
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


@primitive
def sum(x, *, axis=None, keepdims=False):
    """The sum over `axis`. An empty sum is 0."""
    return np.sum(x, axis=axis, keepdims=keepdims)


sum.vjps(lambda g, y, x, axis, keepdims: broadcast_to(g.reshape(kept(x, axis)), shape=x.shape))


@primitive
def mean(x, *, axis=None, keepdims=False):
    """The mean over `axis`."""
    return np.mean(x, axis=axis, keepdims=keepdims)


mean.vjps(lambda g, y, x, axis, keepdims: broadcast_to(g.reshape(kept(x, axis)) / count(x, axis), shape=x.shape))


@primitive
def var(x, *, axis=None, ddof=0, keepdims=False):
    """The variance over `axis`: the squared distance from the mean, summed and divided by n - ddof."""
    return np.var(x, axis=axis, ddof=ddof, keepdims=keepdims)


def var_vjp(g, y, x, *, axis, ddof, keepdims):
    n = count(x, axis)
    factor = 2.0 / (n - ddof) if n > ddof else math.nan
    return g.reshape(kept(x, axis)) * factor * (x - mean(x, axis=axis, keepdims=True))


var.vjps(var_vjp)


@primitive
def max(x, *, axis=None, keepdims=False):
    """The largest element over `axis`. Elements that tie share the gradient evenly."""
    return np.max(x, axis=axis, keepdims=keepdims)


@primitive
def min(x, *, axis=None, keepdims=False):
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


@primitive
def reshape(x, *, shape):
    """The same elements in row-major order under another shape; one length may be -1."""
    return np.reshape(x, shape)


reshape.vjps(lambda g, y, x, shape: g.reshape(x.shape))


@primitive
def transpose(x, *, axes=None):
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


@primitive
def broadcast_to(x, *, shape):
    """`x` repeated to `shape` by NumPy's rules."""
    return np.broadcast_to(x, shape)


broadcast_to.vjps(lambda g, y, x, shape: g)


@primitive
def cast(x, *, dtype):
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


@primitive(arrange=list_of_arrays)
def concat(*xs, axis=0):
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


@primitive(arrange=list_of_arrays)
def stack(*xs, axis=0):
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
        return listed(part) if isinstance(part, list) else part.copy() if isinstance(part, np.ndarray) else part

    index = keywords["index"]
    return inputs, {**keywords, "index": tuple(map(freeze, index)) if isinstance(index, tuple) else freeze(index)}


def listed(index):
    """A list as an index. NumPy alone would make floats of an empty one."""
    index = np.array(index)
    return index if index.size else index.astype(np.intp)


@primitive(arrange=frozen_index)
def getitem(x, *, index):
    """x[index]: integers, slices, None, ..., boolean masks and integer arrays, as in NumPy."""
    return x[index]


getitem.vjps(lambda g, y, x, index: scatter_add(g, index=index, shape=x.shape))


@primitive
def scatter_add(values, *, index, shape):
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
        inputs = (*inputs[:-1], listed(inputs[-1]))
    return inputs, keywords


@primitive(arrange=ids_last)
def take(weight, ids):
    """Rows of a table, weight[ids]: an embedding. weight (V, ...), integer ids of any shape -> ids.shape + (...)."""
    check_ids(ids, len(weight), "ids")
    return weight[ids]


take.vjps(lambda g, y, weight, ids: scatter_add(g, index=ids, shape=weight.shape), None)


def check_ids(ids, n, name, besides=None):
    """Raise unless `ids` are integers in 0 .. n - 1 (or `besides`), naming the first that is not and its place."""
    ids = np.asarray(ids)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {ids.dtype}")
    wrong = (ids < 0) | (ids >= n)
    if besides is not None:
        wrong &= ids != besides
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        also = "" if besides is None else f" (or {besides}, which is ignored)"
        raise IndexError(f"{name}{list(place)} is {ids[place]}, expected 0 to {n - 1}{also}")


# --------------------------------------------------------------------------------------------------------------------
# Products


@primitive
def matmul(a, b):
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


@primitive
def linear(x, weight, bias=None):
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


@primitive(arrange=string_first)
def einsum(*xs, subscripts):
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
# Softmax and losses


@primitive
def softmax(x, *, axis=-1):
    """exp(x) / sum(exp(x)) along `axis`. Rows that are all -inf (nothing allowed) give zeros, and zero gradients."""
    _, e, total = shifted_exp(x, axis)
    e /= total
    return e


# y = e / sum(e), so dy_i/dx_j = y_i (delta_ij - y_j).
softmax.vjps(lambda g, y, x, axis: y * (g - (g * y).sum(axis=axis, keepdims=True)))


def shifted_exp(x, axis):
    """x less its largest element along `axis` (which changes no softmax), exp of that, and its sum.

    A row that is all -inf is shifted by the lowest number there is: its exp is 0. The sum of any other row is at
    least 1, which its largest element contributes, so the sum of a dead row is set to 1 without touching the others.
    """
    x = floating(x)
    top = np.maximum.reduce(x, axis, None, None, True, -INFINITY)  # dtype, out, keepdims, initial
    shifted = x - np.maximum(top, LOWEST[x.dtype])
    e = np.exp(shifted)
    return shifted, e, np.maximum(np.add.reduce(e, axis, None, None, True), ONE[x.dtype])


# As 0-d arrays of each dtype: NumPy takes longer to convert a Python number than to use it.
FLOATS = (np.float16, np.float32, np.float64, np.longdouble)
LOWEST = {np.dtype(kind): np.array(np.finfo(kind).min) for kind in FLOATS}
ONE = {np.dtype(kind): np.ones((), kind) for kind in FLOATS}


@primitive
def log_softmax(x, *, axis=-1):
    """x - log(sum(exp(x))) along `axis`. Rows that are all -inf stay -inf."""
    shifted, _, total = shifted_exp(x, axis)
    return shifted - np.log(total)


log_softmax.vjps(lambda g, y, x, axis: g - exp(y) * g.sum(axis=axis, keepdims=True))


@primitive(arrange=ids_last)
def cross_entropy(logits, targets, *, ignore_index=-100, label_smoothing=0.0, reduction="mean"):
    """-log(softmax(logits)[target]): logits (..., C), integer targets (...); classes on the last axis.

    Targets equal to `ignore_index` count nowhere; the mean over no targets is 0. With `label_smoothing` e, the target
    distribution is 1 - e on the target plus e / C on every class (arXiv:1512.00567). `reduction`: mean, sum or none.
    """
    check_cross_entropy(logits, targets, ignore_index, label_smoothing, reduction)
    valid, safe, n = counted(targets, ignore_index)
    logits = only_counted(floating(logits), valid)
    shifted, e, total = shifted_exp(logits, -1)
    log_total = np.log(total)
    loss = log_total[..., 0] - np.take_along_axis(shifted, safe[..., None], -1)[..., 0]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (log_total[..., 0] - shifted.mean(-1))
    loss = np.where(valid, loss, 0)
    loss = loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.sum() / n
    return loss.astype(logits.dtype), e / total


def cross_entropy_vjp(g, y, probabilities, logits, targets, *, ignore_index, label_smoothing, reduction):
    valid, safe, n = counted(targets, ignore_index)
    g = np.where(valid, g / n if reduction == "mean" else g, 0).astype(logits.dtype)[..., None]
    gradient = probabilities - label_smoothing / logits.shape[-1]
    at_target = np.take_along_axis(gradient, safe[..., None], -1) - (1 - label_smoothing)
    np.put_along_axis(gradient, safe[..., None], at_target, -1)
    return gradient * g, None


cross_entropy.vjp_joint(cross_entropy_vjp)


@cross_entropy.composed_of
def cross_entropy_from_primitives(logits, targets, *, ignore_index, label_smoothing, reduction):
    valid, safe, n = counted(targets, ignore_index)
    log_p = log_softmax(only_counted(logits, valid))
    loss = -log_p[(*np.indices(safe.shape, sparse=True), safe)]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * mean(log_p, axis=-1)
    loss = where(valid, loss, 0.0)
    return loss if reduction == "none" else sum(loss) if reduction == "sum" else sum(loss) / n


def check_cross_entropy(logits, targets, ignore_index, label_smoothing, reduction):
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if np.ndim(logits) < 1 or np.shape(targets) != logits.shape[:-1]:
        raise ValueError(f"expected logits (..., C) and targets (...), got {np.shape(logits)} and {np.shape(targets)}")
    check_ids(targets, logits.shape[-1], "targets", besides=ignore_index)


def counted(targets, ignore_index):
    """Which targets count, the targets with class 0 in place of the others, and how many count (at least 1)."""
    targets = np.asarray(targets)
    valid = targets != ignore_index
    return valid, np.where(valid, targets, 0), builtins.max(int(valid.sum()), 1)


def only_counted(logits, valid):
    """`logits`, with zeros in the rows that do not count: a nan in padding must not reach 0 * nan."""
    return logits if valid.all() else where(valid[..., None], logits, 0.0)


# --------------------------------------------------------------------------------------------------------------------
# Normalisation, over the last axis


@primitive
def layer_norm(x, weight=None, bias=None, *, eps=1e-5):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis (arXiv:1607.06450). The variance is that of the
    whole row (ddof 0), from centred values, so that large rows with a small spread keep their digits."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    inverse = 1.0 / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)
    unit = centred * inverse
    return affine(unit, weight, bias), unit, inverse


def layer_norm_vjp(g, y, unit, inverse, x, weight, bias, *, eps):
    # unit has mean 0 and a fixed length: take away the parts of the gradient that would change either.
    u = g if weight is None else g * weight
    along_unit = np.mean(u * unit, axis=-1, keepdims=True)
    return inverse * (u - np.mean(u, axis=-1, keepdims=True) - unit * along_unit), g * unit, g


layer_norm.vjp_joint(layer_norm_vjp)


@layer_norm.composed_of
def layer_norm_from_primitives(x, weight=None, bias=None, *, eps=1e-5):
    centred = x - mean(x, axis=-1, keepdims=True)
    return affine(centred / sqrt(mean(centred * centred, axis=-1, keepdims=True) + eps), weight, bias)


@primitive
def rms_norm(x, weight=None, *, eps=1e-5):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv:1910.07467)."""
    inverse = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    unit = x * inverse
    return affine(unit, weight, None), unit, inverse


def rms_norm_vjp(g, y, unit, inverse, x, weight, *, eps):
    u = g if weight is None else g * weight
    return inverse * (u - unit * np.mean(u * unit, axis=-1, keepdims=True)), g * unit


rms_norm.vjp_joint(rms_norm_vjp)


@rms_norm.composed_of
def rms_norm_from_primitives(x, weight=None, *, eps=1e-5):
    return affine(x / sqrt(mean(x * x, axis=-1, keepdims=True) + eps), weight, None)


def affine(x, weight, bias):
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


# --------------------------------------------------------------------------------------------------------------------
# Attention


@primitive
def attention(q, k, v, allow=None, bias=None, keep=None, *, scale=None):
    """softmax(q k^T * scale + bias, only where `allow`) v (arXiv:1706.03762, equation 1), in one node.

    q (..., T_q, d_k), k (..., T_k, d_k), v (..., T_k, d_v) -> (..., T_q, d_v). `allow` is boolean, `bias` is added to
    the scaled scores, both broadcast to (..., T_q, T_k). `keep` multiplies the weights: dropout, drawn outside.
    `scale` is d_k ** -0.5 unless given. Keys that no query may see take no part, whatever they hold.
    """
    k, v = only_seen(k, allow), only_seen(v, allow)
    scores = np.matmul(q, k.mT) * attention_scale(q, scale)
    if bias is not None:
        scores = scores + bias
    if allow is not None:
        scores = np.where(allow, scores, -INFINITY)
    weights = softmax(scores)
    return np.matmul(weights if keep is None else weights * keep, v), weights, k, v


def attention_vjp(g, y, weights, seen_k, seen_v, q, k, v, allow, bias, keep, *, scale):
    # q k^T -> scores -> weights -> kept weights -> y, backwards; softmax as above.
    kept_weights = weights if keep is None else weights * keep
    g_kept = g @ seen_v.mT
    g_weights = g_kept if keep is None else g_kept * keep
    g_scores = weights * (g_weights - np.sum(g_weights * weights, axis=-1, keepdims=True))
    scaled = g_scores * attention_scale(q, scale)
    return scaled @ seen_k, scaled.mT @ q, kept_weights.mT @ g, None, g_scores, g_kept * weights


attention.vjp_joint(attention_vjp)


@attention.composed_of
def attention_from_primitives(q, k, v, allow=None, bias=None, keep=None, *, scale=None):
    k, v = only_seen(k, allow), only_seen(v, allow)
    scores = SCALE(matmul(q, k.mT), by=attention_scale(q, scale))
    if bias is not None:
        scores = add(scores, bias)
    weights = softmax(scores if allow is None else mask(scores, allow))
    return matmul(weights if keep is None else mul(weights, keep), v)


SCALE = scale  # attention has a keyword of the same name


def attention_scale(q, scale):
    return q.shape[-1] ** -0.5 if scale is None else scale


def only_seen(rows, allow):
    """`rows` of keys or values, with zeros for those that no query may see: a nan in padding must not reach 0 * nan."""
    if allow is None:
        return rows
    check_boolean(allow, "allow")
    seen = np.atleast_2d(np.asarray(allow)).any(axis=-2)[..., None]
    return rows if seen.all() else where(seen, rows, 0.0)


# --------------------------------------------------------------------------------------------------------------------
# Compositions


def swapaxes(x, axis1, axis2):
    """`x` with two axes exchanged."""
    axis1, axis2 = normalize_axis_tuple((axis1, axis2), x.ndim, allow_duplicate=True)
    axes = list(range(x.ndim))
    axes[axis1], axes[axis2] = axis2, axis1
    return transpose(x, axes=tuple(axes))


def split(x, parts, axis=0):
    """`x` cut along `axis` into `parts` equal pieces, or at the positions in the list `parts`, as np.split does."""
    (axis,) = normalize_axis_tuple(axis, x.ndim)
    n = x.shape[axis]
    if isinstance(parts, int):
        if parts < 1 or n % parts:
            raise ValueError(f"axis {axis} of length {n} does not split into {parts} equal parts")
        parts = [n // parts * i for i in range(1, parts)]
    edges = [0, *parts, n]
    return [x[along(axis, slice(a, b))] for a, b in itertools.pairwise(edges)]


def norm(x, axis=None, keepdims=False):
    """The Euclidean length over `axis`. At length 0 the gradient is 0, the smallest of its subgradients."""
    return root_of_squares(sum(x * x, axis=axis, keepdims=keepdims))


def std(x, axis=None, ddof=0, keepdims=False):
    """The standard deviation over `axis`. Where all values are equal the gradient is 0."""
    return root_of_squares(var(x, axis=axis, ddof=ddof, keepdims=keepdims))


def root_of_squares(x):
    """sqrt(x), but with slope 0 at 0, where the root of a sum of squares has its corner."""
    corner = x == 0
    return where(corner, 0.0, sqrt(where(corner, 1.0, x)))


# What this file offers: the primitives, the compositions, and what a new primitive is made with.
__all__ = ["REGISTRY", "Primitive", "as_operand", "norm", "primitive", "split", "std", "swapaxes"]
__all__ += list(REGISTRY)
