"""Faults that users of other libraries reported in public, each with the value that is right.

Each test names its report: "pytorch#1528" is that issue or pull request of PyTorch. "Related to" marks tests of similar
operations, which the report does not mention.
"""

import copy
import functools
import gc
import itertools
import math
import operator
import pickle
import threading
import tracemalloc

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import ops

FLOATS = [np.float32, np.float64]
ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv]


def leaf(data, dtype=np.float64):
    return tg.Tensor(np.array(data, dtype), requires_grad=True)


def rng(seed=0):
    return np.random.default_rng(seed)


def as_array(x):
    return x.numpy() if isinstance(x, tg.Tensor) else x


def assert_same(actual, expected, rtol=1e-10, atol=0.0):
    """Assert that `actual` is an array (no scalar, no list) of exactly this shape and of these values."""
    actual, expected = as_array(actual), as_array(expected)
    assert type(actual) is np.ndarray
    assert actual.shape == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def compute_gradients(f, *arrays, g=None):
    """The gradients of `f` at `arrays` for the cotangent `g`, random by default."""
    xs = [leaf(a) for a in arrays]
    y = f(*xs)
    y.backward(rng(7).normal(size=y.shape) if g is None else g)
    return [x.grad for x in xs]


def central_differences(f, x, step=1e-5):
    """The gradient of a function from an array to a float, by central differences."""
    x = np.array(x, np.float64)
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        out[i] = (f(up) - f(down)) / (2 * step)
    return out


# --------------------------------------------------------------------------------------------------------------------
# Broadcasting: every gradient has the shape of its own operand


@pytest.mark.parametrize(("op", "expected"), [*zip(ARITHMETIC, [2.0, -2.0, 2.0, -8.0], strict=True)])
def test_a_scalar_parameter_beside_a_vector_receives_a_scalar_gradient(op, expected):
    """rust-autograd#38: a rank-0 variable received a length-2 gradient."""
    v = leaf(0.5)
    op(np.ones(2), v).sum().backward()
    assert_same(v.grad, np.array(expected))


def test_a_trailing_axis_of_length_one_is_summed_back():
    """tt-metal#40008."""
    h, m = leaf(np.arange(1.0, 25).reshape(2, 1, 3, 4)), leaf(np.full((2, 1, 3, 1), 2.0))
    (h * m).sum().backward()
    assert_same(m.grad, np.reshape([10.0, 26, 42, 58, 74, 90], (2, 1, 3, 1)))
    assert_same(h.grad, np.full((2, 1, 3, 4), 2.0))


BROADCASTING = {
    **{op.__name__: op for op in ARITHMETIC},
    "pow": lambda a, b: abs(a) ** b,
    "maximum": ops.maximum,
    "minimum": ops.minimum,
    "where": lambda a, b: ops.where(np.arange(5) % 2 == 0, a, b),
    "einsum": lambda a, b: ops.einsum("...,...->...", a, b),
}


@pytest.mark.parametrize(
    "shapes", [((), (3, 5)), ((5,), (2, 3, 5)), ((2, 1, 5), (3, 1)), ((1, 1), (3, 5)), ((1,), (5,))]
)
@pytest.mark.parametrize("name", BROADCASTING)
def test_the_gradient_of_a_broadcast_operand_is_the_sum_of_that_of_its_full_copy(name, shapes):
    """Related to rust-autograd#38: added axes in front, and axes of length 1, in every binary operation."""
    f = BROADCASTING[name]
    arrays = [rng(i).normal(size=shape) for i, shape in enumerate(shapes)]
    full = np.broadcast_shapes(*shapes, (5,) if name == "where" else ())
    g = rng(3).normal(size=full)
    copies = compute_gradients(f, *(np.broadcast_to(a, full) for a in arrays), g=g)
    for received, whole, a in zip(compute_gradients(f, *arrays, g=g), copies, arrays, strict=True):
        added = tuple(range(len(full) - a.ndim))
        stretched = tuple(i for i in range(len(full)) if i not in added and a.shape[i - len(added)] == 1)
        assert_same(received, whole.sum(axis=added + stretched, keepdims=True).reshape(a.shape))


# --------------------------------------------------------------------------------------------------------------------
# Products of vectors and matrices


def test_the_gradient_of_the_matrix_in_matrix_times_vector_is_an_outer_product():
    """cs249r_book#1781: `.T` does nothing to a vector, and for a square matrix the mistake is silent."""
    a, b = leaf([[1, 2], [3, 4]]), leaf([5, 6])
    (a @ b).backward([1, 10])
    assert_same(a.grad, [[5.0, 6], [50, 60]])
    assert_same(b.grad, [31.0, 42])


@pytest.mark.parametrize(
    ("a", "b", "formula"),
    [
        ((3, 2), (2,), "ij,j->i"),
        ((2,), (2, 3), "i,ij->j"),
        ((5,), (5,), "i,i->"),
        ((7, 3, 2), (2,), "bij,j->bi"),
        ((2,), (7, 2, 3), "i,bij->bj"),
        ((5, 1, 3, 2), (7, 2, 3), "axij,bjk->abik"),
    ],
)
def test_products_of_any_rank_equal_einsum(a, b, formula):
    """Related to cs249r_book#1781: vectors on either side, and stacks that broadcast."""
    arrays = [rng(1).normal(size=a), rng(2).normal(size=b)]
    by_letters = [lambda a, b: ops.einsum(formula, a, b), operator.matmul]
    for e, m in zip(*(compute_gradients(f, *arrays) for f in by_letters), strict=True):
        assert_same(m, e)


# --------------------------------------------------------------------------------------------------------------------
# One tensor used several times; several calls of backward


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("grouping", [lambda a, b, c: (a + b) + c, lambda a, b, c: a + (b + c)])
def test_a_shared_leaf_receives_the_gradient_of_each_path_once(order, grouping):
    """cTensor#5: a node with several consumers was visited while its gradient was still growing; 7 instead of 6."""
    x, a = leaf([1.0]), tg.Tensor(np.array([1.0]))
    xa, x2 = x * a, x * x
    terms = [x * xa, x2 * a, x * xa]
    grouping(*(terms[i] for i in order)).backward()
    assert_same(x.grad, [6.0])


@pytest.mark.parametrize(
    ("f", "at", "expected"),
    [
        (lambda x: x * x * x, [1, 2], [3, 12]),
        (lambda x: x + x, [1, 2], [2, 2]),
        (lambda x: x - x, [1, 2], [0, 0]),
        (lambda x: x / x, [1, 2], [0, 0]),
        (lambda x: x @ x.T, [[1, 2], [3, 4]], [[8, 12], [8, 12]]),
        (lambda x: ops.einsum("ij,kj->ik", x, x), [[1, 2], [3, 4]], [[8, 12], [8, 12]]),
        (lambda x: ops.stack(x, x, x), [1, 2], [3, 3]),
        (lambda x: ops.where(np.array([True, False]), x, x), [1, 2], [1, 1]),
        (lambda x: ops.linear(x, x, x[0]), [[1, 2], [3, 4]], [[9, 13], [9, 13]]),
    ],
)
def test_every_use_of_an_operand_counts(f, at, expected):
    """nnabla#532: after clearing the gradient, a variable that entered a function twice counted once."""
    x = leaf(at)
    x.zero_grad()
    f(x).sum().backward()
    assert_same(x.grad, np.array(expected, float))


def test_a_second_backward_adds_the_same_once_more():
    """micrograd#102: inner nodes kept their gradient of the first pass; 36 instead of 24."""
    x = leaf(3.0)
    y = x * x
    z = 2 * y
    z.backward()
    z.backward()
    assert_same(x.grad, np.array(24.0))
    assert_same(y.grad, np.array(2.0))


def test_backward_from_two_roots_of_one_intermediate_adds_up_in_the_leaf_only():
    """micrograd#102, with several roots: the intermediate has the gradient of the latest call."""
    x = leaf(3.0)
    y = x * x
    (2 * y).backward()
    (5 * y).backward()
    assert_same(x.grad, np.array(12.0 + 30.0))
    assert_same(y.grad, np.array(5.0))


# --------------------------------------------------------------------------------------------------------------------
# Memory: no write to one array changes another


@pytest.mark.parametrize("op", [operator.add, operator.sub, lambda x, y: ops.where(np.ones(3, bool), x + y, x)])
def test_two_leaves_never_share_a_gradient_array(op):
    """pytorch#46168: both operands of a sum received the same array."""
    x, y = leaf(np.ones(3)), leaf(np.ones(3))
    op(x, y).sum().backward()
    kept = y.grad.copy()
    x.grad *= 10
    assert_same(y.grad, kept, rtol=0)
    assert not np.shares_memory(x.grad, y.grad)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x + y,
        lambda x, y: (x + y).reshape(6),
        lambda x, y: (x + y).T,
        lambda x, y: ops.concat(x, y),
        lambda x, y: ops.stack(x, y)[0] + y,
        lambda x, y: ops.broadcast_to(x + y, shape=(5, 2, 3)),
        lambda x, y: ops.linear(x, np.eye(3)) + y,
        lambda x, y: (x + y).astype(np.float64),
        lambda x, y: ops.layer_norm(x, np.ones(3), y),
    ],
)
def test_gradients_share_memory_with_no_other_array(f):
    """pytorch#46168: not with each other, nor with intermediates, values or the array given to backward."""
    x, y = leaf(rng(1).normal(size=(2, 3))), leaf(rng(2).normal(size=(2, 3)))
    out = f(x, y)
    given = rng(3).normal(size=out.shape)
    out.backward(given)
    made = [v for v in tg.engine.toposort([out]) if v.grad is not None]
    owned = [v.grad for v in made] + [v.numpy() for v in (x, y, out)] + [given]
    assert all(v.grad.flags.writeable for v in made)
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations(owned, 2))


def test_the_first_gradient_is_not_changed_by_a_second_backward():
    """pytorch#46168: accumulating makes a new array, because the old one may still be in use."""
    x = leaf([1.0, 2.0])
    y = (x * x).sum()
    y.backward()
    first = x.grad
    y.backward()
    assert_same(first, [2.0, 4.0])


def write_directly(b):
    b.data[1] = 2


def write_to_numpy(b):
    b.numpy()[1] = 2


def write_to_an_alias(b):
    b.detach().data[1] = 2


def write_to_an_array(b):
    np.asarray(b.detach())[1] = 2


@pytest.mark.parametrize("write", [write_directly, write_to_numpy, write_to_an_alias, write_to_an_array])
@pytest.mark.parametrize("name", ["sigmoid", "exp", "tanh", "softmax", "sqrt"])
def test_an_output_that_a_rule_needs_cannot_be_edited(name, write):
    """pytorch#9391: a rule that reads its output silently used the edited value."""
    a = leaf([1.0, 2.0, 3.0])
    b = getattr(a, name)()
    (expected,) = tg.grad(b, a, grad_output=np.array([1.0, 3.0, 7.0]))
    with tg.no_grad(), pytest.raises(ValueError, match="read-only"):
        write(b)
    b.backward([1.0, 3.0, 7.0])
    assert_same(a.grad, expected, rtol=0)


def test_the_gradient_of_sigmoid_is_that_of_the_original_forward():
    """pytorch#9391: the edit there gave 2 * (1 - 2) = -2 at index 1."""
    a = leaf([1.0, 2.0, 3.0])
    a.sigmoid().sum().backward()
    assert_same(a.grad, [0.19661193, 0.10499359, 0.04517666], rtol=1e-7)


def test_writing_to_the_given_arrays_afterwards_changes_nothing():
    """Related to pytorch#9391: data, constants, masks, indices and ids are copied."""
    data, constant, mask = np.array([1.0, 2, 3]), np.array([2.0, 3, 5]), np.array([True, False, True])
    index, ids, weight = np.array([0, 0, 2]), np.array([2, 2, 1]), leaf(np.ones((3, 2)))
    x = tg.Tensor(data, requires_grad=True)
    y = ops.where(mask, x * constant, 0.0)[index].sum() + (ops.take(weight, ids) * [[1.0], [10], [100]]).sum()
    data[:], constant[:], mask[:], index[:], ids[:] = 0, 0, False, 1, 0
    y.backward()
    assert_same(x.grad, [4.0, 0, 5])
    assert_same(weight.grad, [[0.0, 0], [100, 100], [11, 11]])


# --------------------------------------------------------------------------------------------------------------------
# dtypes: float32 in, float32 out


@pytest.mark.parametrize("name", ["max", "min"])
def test_gradients_of_ties_stay_float32(name):
    """autograd#199: a mask divided by an integer count became float64."""
    x = leaf([[1, 2, 2], [3, 0, 3]], np.float32)
    (getattr(x, name)(axis=1)).sum().backward()
    assert x.grad.dtype == np.float32
    assert_same(x.grad, [[0, 0.5, 0.5], [0.5, 0, 0.5]] if name == "max" else [[1, 0, 0], [0, 1, 0]])


KEEPS_FLOAT32 = {
    "mean": lambda x: x.mean(axis=1),
    "var": lambda x: x.var(axis=0, ddof=1),
    "std": lambda x: x.std(axis=1),
    "norm": lambda x: x.norm(axis=0),
    "take": lambda x: ops.take(x, np.array([0, 1, 1])),
    "getitem": lambda x: x[[0, 0, 1], 1:],
    "boolean index": lambda x: x[x > 1],
    "maximum": lambda x: ops.maximum(x, 1.5),
    "where with a number": lambda x: ops.where(x > 1, x, 0),
    "mask": lambda x: ops.softmax(ops.mask(x, x > 1)),
    "clip": lambda x: x.clip(1, 2),
    "softmax": lambda x: x.softmax(),
    "log_softmax": lambda x: x.log_softmax(axis=0),
    "cross_entropy": lambda x: ops.cross_entropy(x, np.array([1, 2]), label_smoothing=0.1),
    "layer_norm": lambda x: ops.layer_norm(x),
    "rms_norm": lambda x: ops.rms_norm(x),
    "gelu": lambda x: ops.gelu(x),
    "gelu by tanh": lambda x: ops.gelu(x, tanh=True),
    "erf": ops.erf,
    "sigmoid": ops.sigmoid,
    "relu": ops.relu,
    "abs": abs,
    "attention": lambda x: ops.attention(x, x, x),
    "matmul": lambda x: x @ x.T,
    "linear": lambda x: ops.linear(x, x.T),
    "einsum": lambda x: ops.einsum("ii->i", x @ x.T),
    "a NumPy scalar on the right": lambda x: x * np.float64(2) - np.float64(1) / np.int64(3),
    "a NumPy scalar on the left": lambda x: np.float64(2) ** x / np.int64(3),
    "powers": lambda x: x**3 + x**0.5 + x**-1 + x ** np.int64(2),
    "a boolean array": lambda x: x * (as_array(x) > 1),
    "an integer array": lambda x: np.arange(3) * x,
    "a list": lambda x: [1, 2, 3] - x,
}


@pytest.mark.parametrize("name", KEEPS_FLOAT32)
def test_float32_stays_float32_in_values_and_gradients(name):
    """Related to autograd#199: counts, constants, masks, indices and NumPy's float64 scalars."""
    x = leaf([[1, 2, 3], [4, 2, 1]], np.float32)
    y = KEEPS_FLOAT32[name](x)
    assert y.dtype == np.float32
    y.backward(np.ones(y.shape))
    assert (x.grad.dtype, x.grad.shape) == (np.float32, (2, 3))
    value, (first,) = y.dtype, tg.grad(y, x, grad_output=np.ones(y.shape), create_graph=True)
    assert (value, first.dtype) == (np.float32, np.float32)


def test_the_gradient_of_a_scalar_used_three_times_is_a_0d_array_of_its_dtype():
    """dlsyscourse hw2#11: sum() over 0-d gradients started at the integer 0 and gave float64."""
    w = leaf(2.0, np.float32)
    (w * 1 + w * 2 + w * 3).backward()
    assert_same(w.grad, np.array(6.0))
    assert w.grad.dtype == w.dtype == np.float32


# --------------------------------------------------------------------------------------------------------------------
# Integers and booleans carry no gradient


def test_argmax_and_comparisons_are_plain_arrays():
    """pytorch#37680: the result of argmax claimed to require grad."""
    t = leaf(rng().random(10))
    for index in (t.argmax(), t.argmin(), np.argmax(t), t.reshape(2, 5).argmax(axis=1), np.argmin(t, axis=0)):
        assert isinstance(index + 2, (np.integer, np.ndarray))
        assert index.dtype.kind == "i"
    for compared in (t > 0.5, t >= t, t < 0.5, t <= 0.5, t == 0.5, t != 0.5, np.greater(t, 0.5), np.float64(0.5) < t):
        assert type(compared) is np.ndarray
        assert compared.dtype == bool
    assert type(np.sign(t)) is np.ndarray


@pytest.mark.parametrize(
    "make",
    [
        lambda t: tg.Tensor(t.argmax()),
        lambda t: tg.Tensor(t > 0.5),
        lambda t: t.astype(np.int64),
        lambda t: t.astype(bool),
        lambda t: tg.Tensor(np.array([1, 2]))[0] + tg.Tensor(np.array([1, 2])).sum(),
        lambda t: ops.take(np.array([[1], [2]]), tg.Tensor(np.array([0, 1]))),
    ],
)
def test_backward_from_integers_says_that_they_do_not_require_grad(make):
    """pytorch#37680: the error came much later, or never."""
    made = tg.Tensor(make(leaf([0.3, 0.9])))
    assert not made.requires_grad
    with pytest.raises(ValueError, match="does not require grad"):
        made.sum().backward()


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda t: t * (t < 0), [0, 1, 0]),
        (lambda t: t * (t == 3), [0, 0, 1]),
        (lambda t: (t >= 1) * t, [1, 0, 1]),
        (lambda t: ops.where(t > 0, t, 0), [1, 0, 1]),
        (lambda t: np.where(t > 0, t, 0), [1, 0, 1]),
        (lambda t: t * tg.Tensor(t > 0), [1, 0, 1]),
        (lambda t: t * np.sign(t), [1, -1, 1]),
    ],
)
def test_a_comparison_inside_a_product_needs_no_derivative(f, expected):
    """tinygrad#3037: backward failed at the comparison."""
    t = leaf([1.0, -2.0, 3.0])
    f(t).sum().backward()
    assert_same(t.grad, np.array(expected, float))


# --------------------------------------------------------------------------------------------------------------------
# 0-d and empty arrays


def test_the_gradient_of_a_broadcast_scalar_is_a_0d_array_and_accumulates_as_one():
    """MyGrad#373: `.grad` was a Python float."""
    x = leaf(2.0)
    for expected in (3.0, 6.0):
        (x * np.ones(3)).sum().backward()
        assert_same(x.grad, np.array(expected))


@pytest.mark.parametrize(
    "f",
    [
        *(ops.neg, ops.exp, ops.log, ops.sqrt, ops.erf, ops.tanh, ops.sigmoid, ops.relu, ops.gelu, ops.abs),
        *(ops.sum, ops.mean, ops.max, ops.min, ops.var, ops.std, ops.norm),
        lambda x: x**2,
        lambda x: 2**x,
        lambda x: x * x,
        lambda x: ops.clip(x, min=0, max=9),
        lambda x: ops.where(True, x, 0.0),
        lambda x: x.reshape(1)[0],
        lambda x: ops.einsum(",->", x, x),
        lambda x: np.maximum(x, x),
    ],
)
def test_functions_of_a_scalar_give_0d_arrays(f):
    """Related to MyGrad#373: NumPy itself turns a 0-d array into a scalar at every step."""
    x = leaf(2.0)
    y = f(x)
    y.backward()
    for array in (y.data, y.grad, x.grad, tg.grad(y, x)[0].data):
        assert type(array) is np.ndarray
        assert array.shape == ()


def test_reshape_of_an_empty_array_follows_numpy():
    """tinygrad#3102: an empty prompt made logits with an axis of length 0."""
    x = leaf(np.zeros((0, 3)))
    assert x.reshape(-1, 3).shape == (0, 3)
    with pytest.raises(ValueError, match=r"reshape of \(0, 3\).*\(0, -1\)"):
        x.reshape(0, -1)


@pytest.mark.parametrize("ids", [np.zeros((1, 0), int), [[]]])
def test_the_embedding_of_an_empty_prompt_is_empty_and_has_gradient_zero(ids):
    """tinygrad#3102."""
    weight = leaf(np.ones((7, 5)))
    y = ops.take(weight, ids)
    assert y.shape == (1, 0, 5)
    y.sum().backward()
    assert_same(weight.grad, np.zeros((7, 5)))


EMPTY = {
    "softmax": lambda x: x.softmax(),
    "softmax of an empty axis": lambda x: x.softmax(axis=0),
    "log_softmax": lambda x: x.log_softmax(),
    "layer_norm": lambda x: ops.layer_norm(x, np.ones(3), np.ones(3)),
    "gelu": ops.gelu,
    "sum": lambda x: x.sum(),
    "mean of rows": lambda x: x.mean(axis=1),
    "max of rows": lambda x: x.max(axis=1),
    "concat": lambda x: ops.concat(x, np.ones((2, 3)), x),
    "stack": lambda x: ops.stack(x, x, axis=-1),
    "split": lambda x: ops.split(x, [0], axis=0)[1],
    "getitem": lambda x: x[:, [0, 0]],
    "empty list": lambda x: x[[]],
    "boolean": lambda x: x[np.zeros(0, bool)],
    "linear": lambda x: ops.linear(x, np.ones((3, 2)), np.ones(2)),
    "matmul with nothing between": lambda x: x.T @ x,
    "einsum": lambda x: ops.einsum("ij,ik->jk", x, x),
    "attention over nothing": lambda x: ops.attention(np.ones((2, 3)), x, x),
    "cross_entropy": lambda x: ops.cross_entropy(x, np.zeros(0, int)),
    "swapaxes": lambda x: x.swapaxes(0, 1),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_arrays_have_values_and_gradients(name):
    """Related to tinygrad#3102: a (0, 3) array through every operation that an empty prompt passes."""
    x = leaf(np.zeros((0, 3)))
    y = EMPTY[name](x)
    assert np.isfinite(y.data).all()
    y.backward(np.ones(y.shape))
    assert_same(x.grad, np.zeros((0, 3)))


# --------------------------------------------------------------------------------------------------------------------
# Axes


def test_the_mean_over_one_axis_accepts_a_gradient_that_is_not_scalar():
    """shumai#74: the gradient was tiled to shape (2, 9)."""
    t = leaf(np.ones((2, 3)))
    (t.mean(axis=0, keepdims=True) @ [[10], [20], [30]]).backward()
    assert_same(t.grad, [[5.0, 10, 15], [5, 10, 15]])


REDUCTIONS = ["sum", "mean", "max", "min", "var", "std", "norm"]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, (0, 2), (2, 1), (0, 1, 2)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_match_finite_differences_over_every_set_of_axes(name, axis, keepdims):
    """Related to shumai#74."""
    x = rng(5).normal(size=(2, 3, 5))
    f = functools.partial(getattr(ops, name), axis=axis, keepdims=keepdims)
    g = rng(6).normal(size=f(x).shape)
    assert_same(
        compute_gradients(f, x, g=g)[0], central_differences(lambda x: np.sum(g * f(x)), x), rtol=1e-6, atol=1e-9
    )


def test_a_sum_over_axis_minus_one_has_a_gradient():
    """tensorflow#10835: the forward accepted axis=-1, the gradient did not."""
    t = leaf([[1, 2], [3, 4]])
    t.sum(-1).backward([1, 10])
    assert_same(t.grad, [[1.0, 1], [10, 10]])


ALONG_AN_AXIS = {
    **{n: lambda x, axis, n=n: getattr(ops, n)(x, axis=axis) for n in [*REDUCTIONS, "softmax", "log_softmax"]},
    "concat": lambda x, axis: ops.concat(x, x * 2, axis=axis),
    "stack": lambda x, axis: ops.stack(x, x * 2, axis=axis),
    "split": lambda x, axis: ops.split(x, [1], axis=axis)[1],
    "swapaxes": lambda x, axis: ops.swapaxes(x, axis, 0),
    "transpose": lambda x, axis: ops.transpose(x, axes=(axis, *{0, 1, 2} - {axis % 3})),
}


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ALONG_AN_AXIS)
def test_a_negative_axis_is_the_same_axis(name, axis):
    """Related to tensorflow#10835."""
    x = leaf(rng(8).normal(size=(2, 3, 5)))
    f = ALONG_AN_AXIS[name]
    from_end = axis - (4 if name == "stack" else 3)
    assert_same(f(x, from_end), f(x, axis).numpy(), rtol=0)
    assert_same(*(compute_gradients(lambda x, a=a: f(x, a), x.numpy())[0] for a in (from_end, axis)), rtol=0)


@pytest.mark.parametrize("axis", [5, -5])
@pytest.mark.parametrize("name", ALONG_AN_AXIS)
def test_an_axis_out_of_range_raises_and_is_named(name, axis):
    """tensorflow#10835."""
    with pytest.raises(np.exceptions.AxisError, match=f"axis.* {axis} is out of bounds"):
        ALONG_AN_AXIS[name](leaf(rng(8).normal(size=(2, 3, 5))), axis)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_same_axis_twice_raises(name):
    """tensorflow#10835."""
    with pytest.raises(ValueError, match=r"(?s)\(2, 3\).*(duplicate|twice|repeated)"):
        getattr(ops, name)(leaf(np.ones((2, 3))), axis=(0, 0))
    with pytest.raises(ValueError, match="repeated axis"):
        leaf(np.ones((2, 3))).transpose(0, 0)


# --------------------------------------------------------------------------------------------------------------------
# Ties


@pytest.mark.parametrize("op", [ops.maximum, ops.minimum])
def test_a_tie_of_two_divides_the_gradient_evenly(op):
    """autograd#212, pytorch#56734: the first argument received everything."""
    a, b, x = leaf(1.0), leaf(1.0), leaf(1.0)
    op(a, b).backward()
    assert_same(a.grad, np.array(0.5))
    assert_same(b.grad, np.array(0.5))
    op(x, x).backward()
    assert_same(x.grad, np.array(1.0))


def test_relu_at_zero_has_slope_zero_and_maximum_with_zero_a_half():
    """autograd#212: both are conventions, stated in the docstrings."""
    x = leaf([-1.0, 0, 2])
    x.relu().sum().backward()
    assert_same(x.grad, [0.0, 0, 1])
    x.zero_grad()
    ops.maximum(x, 0).sum().backward()
    assert_same(x.grad, [0.0, 0.5, 1])


@pytest.mark.parametrize("name", ["max", "min"])
def test_the_gradients_of_a_tie_add_up_to_the_whole_gradient(name):
    """autograd#212: a valid subgradient, over several axes at once too."""
    x = leaf(rng(2).integers(0, 2, size=(3, 5, 7)))
    getattr(x, name)(axis=(0, 2)).backward(np.array([1.0, 10, 100, 1000, 10000]))
    assert_same(x.grad.sum(axis=(0, 2)), [1.0, 10, 100, 1000, 10000])
    assert not x.grad[as_array(x) != (1 if name == "max" else 0)].any()


# --------------------------------------------------------------------------------------------------------------------
# Points where a derivative blows up, and 0 * inf


def test_the_derivative_by_the_exponent_at_base_zero_is_its_limit():
    """pytorch#27134: 0 * log(0) is nan. At 0 ** 0 it is taken as 0, as the docstring says."""
    for exponents, expected in (([1, 1], [0, 1.38629436]), ([0, 0], [0, 0.69314718])):
        b = leaf(exponents)
        (np.array([0.0, 2.0]) ** b).sum().backward()
        assert_same(b.grad, np.array(expected), rtol=1e-8)


@pytest.mark.parametrize("exponent", [0, 0.0, np.float64(0), np.zeros(2), tg.Tensor(np.zeros(2))])
def test_x_to_the_power_zero_has_slope_zero_at_zero(exponent):
    """drake#23862: 0 * x ** -1 is nan."""
    x = leaf([0.0, 3.0])
    (x**exponent).sum().backward()
    assert_same(x.grad, [0.0, 0.0])


def test_a_polynomial_has_a_derivative_at_zero():
    """drake#23862."""
    x = leaf(0.0)
    y = sum(c * x**i for i, c in enumerate([1, 2, 3, 4]))
    y.backward()
    assert_same(y, np.array(1.0))
    assert_same(x.grad, np.array(2.0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.std(),
        lambda x: x.std(axis=0),
        lambda x: x.var(),
        lambda x: (x - x).norm(),
        lambda x: x[:1].std(),
        lambda x: x.reshape(3, 1).std(axis=1).sum(),
    ],
)
def test_the_deviation_of_equal_values_has_gradient_zero(f, dtype):
    """pytorch#4320: the root of a zero variance gave inf * 0."""
    x = leaf([1, 1, 1], dtype)
    y = f(x)
    y.backward()
    assert_same(y, np.array(0.0))
    assert_same(x.grad, [0.0, 0, 0])


@pytest.mark.parametrize("name", ["var", "std"])
def test_the_unbiased_deviation_of_one_value_is_nan_by_definition(name):
    """pytorch#4320: 0 / 0 degrees of freedom: NumPy warns, and backward does not crash."""
    x = leaf([[2.0]])
    with pytest.warns(RuntimeWarning):
        y = getattr(x, name)(axis=1, ddof=1)
    assert np.isnan(y.data).all()
    y.backward()
    assert np.isnan(x.grad).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.0, 1.0, 80000.3])
def test_layer_norm_of_equal_values_is_finite(value, dtype):
    """pytorch#4320: the value is 0 and the slope 1 / sqrt(eps), less the mean."""
    x = leaf([value] * 3, dtype)
    y = ops.layer_norm(x)
    y.backward([1, 2, 6])
    assert_same(y, np.zeros(3))
    assert_same(x.grad, np.array([-2, -1, 3]) / math.sqrt(1e-5), rtol=1e-6)


def test_gradients_of_roots_and_norms_at_zero_are_infinite_or_zero_but_never_nan():
    """Related to pytorch#4320: sqrt has an infinite slope at 0, abs and norm have slope 0 there."""
    for f, expected in ((ops.sqrt, np.inf), (lambda x: x**0.5, np.inf), (ops.abs, 0.0), (ops.norm, 0.0)):
        x = leaf([0.0])
        f(x).backward(np.ones(f(x).shape))
        assert_same(x.grad, [expected])


# --------------------------------------------------------------------------------------------------------------------
# where: the gradient of the branch that is not chosen is exactly 0


@pytest.mark.parametrize(
    ("f", "at", "expected"),
    [
        (lambda x: ops.where(x > 0, x.sqrt(), 0), [-1, 4], [0, 0.25]),
        (lambda x: ops.where(x > 0, x.sqrt(), 0), [0, 4], [0, 0.25]),
        (lambda x: ops.where(x > 0, ops.where(x > 0, x, 1).sqrt(), 0), [-1, 4], [0, 0.25]),
        (lambda x: ops.where(x > 0, x.log(), 0), [-1, 4], [0, 0.25]),
        (lambda x: ops.where(x > 0, x.log(), 0), [0, 4], [0, 0.25]),
        (lambda x: ops.where(x > 0, 1 / x, 0), [0, 4], [0, -0.0625]),
        (lambda x: ops.where(x > 0, x / x, 0), [0, 4], [0, 0]),
        (lambda x: ops.where(x > 0, x**0.5, 0), [-1, 4], [0, 0.25]),
        (lambda x: ops.where(x > 0, x**-1, 0), [0, 4], [0, -0.0625]),
        (lambda x: ops.where(x < 9, x.exp(), 0), [1e4, 0], [0, 1]),
        (lambda x: ops.where(x < 9, 2.0**x, 0), [1e4, 0], [0, math.log(2)]),
        (lambda x: ops.where(x > 0, (x * x).log(), 0), [0, 4], [0, 0.5]),
    ],
)
def test_the_gradient_of_the_branch_that_is_not_chosen_is_exactly_zero(f, at, expected):
    """tinygrad#15806: where(x > 0, sqrt(x), 0) had gradient nan at -1. (The forward may warn, as NumPy does.)"""
    x = leaf(at)
    with np.errstate(all="ignore"):
        y = f(x).sum()
    y.backward()
    assert_same(x.grad, np.array(expected, float), rtol=1e-15)


def test_the_gradient_of_a_masked_score_is_exactly_zero_whatever_the_score():
    """tinygrad#15806: masking before softmax, in a row with infinities and in a row that is masked completely."""
    allow = np.array([[True, False, True, False], [False] * 4, [True] * 4])
    scores = leaf([[1, np.inf, 2, np.nan], [3, -np.inf, np.inf, np.nan], [1, -np.inf, 2, -np.inf]])
    weights = ops.softmax(ops.mask(scores, allow))
    weights.backward(rng(1).normal(size=(3, 4)))
    a, b = 1 / (1 + math.e), math.e / (1 + math.e)
    assert_same(weights, [[a, 0, b, 0], [0, 0, 0, 0], [a, 0, b, 0]])
    assert not scores.grad[~allow | np.isinf(scores.data)].any()
    assert_same(
        compute_gradients(lambda x: ops.mask(x, allow), scores.data, g=np.where(allow, 1.0, np.nan))[0], 1.0 * allow
    )
    assert scores.grad[0, 0] == pytest.approx(-scores.grad[0, 2]) != 0


# --------------------------------------------------------------------------------------------------------------------
# Softmax and its relatives at large numbers


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([-249.87, -424.13, -460.29, 378.10, -292.61], [0, 0, 0, 1, 0]),
        ([1e4, 1e4], [0.5, 0.5]),
        ([-1e4, -1e4], [0.5, 0.5]),
        ([3e38, 3e38], [0.5, 0.5]),
        ([-np.inf, 0, 0], [0, 0.5, 0.5]),
        ([-np.inf, -np.inf], [0, 0]),
    ],
)
def test_softmax_of_large_logits_is_exact_without_warnings(logits, expected, dtype):
    """uTensor#175: exp was taken of the raw logits."""
    x = leaf(logits, dtype)
    y = x.softmax()
    y.backward(rng(2).normal(size=y.shape))
    assert_same(y, np.array(expected, float), rtol=1e-7, atol=1e-38)
    assert np.isfinite(x.grad).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_log_softmax_and_cross_entropy_of_large_logits_are_exact(dtype):
    """Related to uTensor#175."""
    x = leaf([[1e4, 0], [-1e4, 0], [-np.inf, 0]], dtype)
    y = x.log_softmax()
    assert_same(y, [[0, -1e4], [-1e4, 0], [-np.inf, 0]])
    losses = ops.cross_entropy(x, np.array([1, 0, 1]), reduction="none")
    assert_same(losses, [1e4, 1e4, 0])
    losses.backward([1, 10, 100])
    assert_same(x.grad, [[1, -1], [-10, 10], [0, 0]])


# --------------------------------------------------------------------------------------------------------------------
# Cross entropy


def test_label_smoothing_averages_over_the_targets_that_are_not_ignored():
    """tinygrad#3570: ignored rows were counted in the denominator."""
    for smoothing, expected in ((0.1, 2.54164469), (0.0, 2.67164469)):
        x = leaf([[1, 2], [3, 0.4]])
        loss = ops.cross_entropy(x, [-100, 1], label_smoothing=smoothing)
        loss.backward()
        assert_same(loss, np.array(expected), rtol=1e-8)
        assert_same(x.grad != 0, [[False, False], [True, True]])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_when_every_target_is_ignored_loss_and_gradient_are_zero(reduction, smoothing):
    """pytorch#70348: the mean over no rows was 0 / 0. Here it is 0."""
    x = leaf([[1, 2, 3]])
    loss = ops.cross_entropy(x, np.array([-100]), reduction=reduction, label_smoothing=smoothing)
    assert_same(loss, np.zeros(1) if reduction == "none" else np.array(0.0), rtol=0)
    loss.backward()
    assert_same(x.grad, np.zeros((1, 3)), rtol=0)


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_the_gradient_of_an_ignored_row_is_zero_whatever_its_values(what):
    """Related to pytorch#70348: padding may hold anything."""
    x = leaf([[what, 1.0], [0.0, 0.0]])
    with np.errstate(invalid="ignore"):
        loss = ops.cross_entropy(x, np.array([-100, 1]))
    loss.backward()
    assert_same(loss, np.array(math.log(2)))
    assert_same(x.grad, [[0, 0], [0.5, -0.5]])


def test_the_loss_of_integer_logits_is_not_rounded():
    """Related to autograd#199: the loss had the dtype of its logits."""
    assert_same(ops.cross_entropy(np.zeros((1, 5), int), np.array([0])), np.array(math.log(5)))


# --------------------------------------------------------------------------------------------------------------------
# Layer norm


@pytest.mark.parametrize("start", [40000, 80000])
def test_layer_norm_of_large_consecutive_values_keeps_its_digits(start):
    """onnxruntime#28463: the variance in float32 came out negative, the result nan."""
    x = leaf([[start, start + 1, start + 2, start + 3]], np.float32)
    y = ops.layer_norm(x)
    y.backward([[1, 10, 100, 1000]])
    assert_same(y, [[-1.3416354, -0.4472118, 0.4472118, 1.3416354]], rtol=1e-4)
    (expected,) = compute_gradients(ops.layer_norm, [[0, 1, 2, 3]], g=[[1, 10, 100, 1000]])
    assert_same(x.grad, expected, rtol=1e-4)


@pytest.mark.parametrize("value", [-3.0, 0.1, 1e8])
def test_layer_norm_of_a_single_value_is_its_bias(value):
    """pytorch#98075: rounding noise leaked through a large weight."""
    x = leaf([value])
    y = ops.layer_norm(x, np.array([1e12]), np.array([-1.0]), eps=0.1)
    y.backward()
    assert_same(y, [-1.0], rtol=0)
    assert_same(x.grad, [0.0], rtol=0)


# --------------------------------------------------------------------------------------------------------------------
# Indexing: gradients of repeated elements add up


@pytest.mark.parametrize("i", [0, 1])
def test_both_copies_of_a_repeated_element_have_a_gradient(i):
    """pytorch#1528: only the second copy had a gradient."""
    y = leaf([1.0])
    y[[0, 0]][i].backward()
    assert_same(y.grad, [1.0])


@pytest.mark.parametrize(
    ("index", "g", "expected"),
    [
        ([0, 0, 2], [1, 10, 100], [11, 0, 100]),
        ([0, -3], [1, 10], [11, 0, 0]),
        (np.array([2, 2], np.uint8), [1, 10], [0, 0, 11]),
        (np.array([[0, 1], [1, 0]]), [[1, 10], [100, 1000]], [1001, 110, 0]),
        (tg.Tensor(np.array([1, 1])), [1, 10], [0, 11, 0]),
        ([True, False, True], [1, 10], [1, 0, 10]),
        (([0, 0],), [1, 10], [11, 0, 0]),
        ([], [], [0, 0, 0]),
        (np.array(1), 7, [0, 7, 0]),
        (slice(None, None, -1), [1, 10, 100], [100, 10, 1]),
        ((None, [1, 1]), [[1, 10]], [0, 11, 0]),
    ],
)
def test_gradients_of_repeated_indices_add_up(index, g, expected):
    """Related to pytorch#1528."""
    y = leaf([1, 2, 3])
    y[index].backward(g)
    assert_same(y.grad, np.array(expected, float))


@pytest.mark.parametrize(
    "index",
    [
        (slice(1, None), [0, 0, -1]),
        ([0, 1, 0], [2, 2, 2]),
        ([0, 1, 0], slice(None), [4, 4, 0]),
        (..., [[0, 0], [3, -2]]),
        (np.array([True, False]), [1, 1]),
        (1, None, [2, 2], ...),
        np.arange(6).reshape(2, 3) % 4 == 0,
    ],
)
def test_indices_of_several_axes_match_finite_differences(index):
    """Related to pytorch#1528 in several axes."""
    x = rng(1).normal(size=(2, 3, 5))
    g = rng(2).normal(size=x[index].shape)
    assert_same(
        compute_gradients(lambda x: x[index], x, g=g)[0],
        central_differences(lambda x: np.sum(g * x[index]), x),
        rtol=1e-8,
        atol=1e-9,
    )


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int32, np.int64])
def test_ids_of_every_integer_type_select_their_row(kind):
    """Related to pytorch#1528: byte ids into a table of 256 rows and more."""
    for rows in (256, 300):
        table = leaf(np.ones((rows, 2)))
        ids = np.array([7, 7, 127], kind)
        (ops.take(table, ids) * [[1.0], [10], [100]]).sum().backward()
        expected = np.zeros((rows, 2))
        expected[7], expected[127] = 11, 100
        assert_same(table.grad, expected)


def test_a_masked_result_used_twice_counts_twice():
    """mxnet#15172: the mask overwrote the gradient of another use."""
    a = leaf([1, 2, 3])
    mask = np.array([True, False, True])
    b = a[mask]
    (b.sum() + (b * b).sum()).backward()
    assert_same(a.grad, [3.0, 0, 7])
    a.zero_grad()
    (a[mask].sum() + a.sum()).backward()
    assert_same(a.grad, [2.0, 1, 2])


# --------------------------------------------------------------------------------------------------------------------
# concat, stack, split


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("concat", [ops.concat, np.concatenate])
def test_a_tensor_concatenated_with_itself_receives_the_gradients_of_both_parts(concat, axis):
    """minpy#154, Theano#2747: the gradient was zero, or axis=-1 crashed."""
    x = leaf([[3.0]])
    (concat([x, x], axis=axis) @ [[1], [2]]).backward()
    assert_same(x.grad, [[3.0]])


@pytest.mark.parametrize(
    ("axis", "first", "second"),
    [
        (0, [[0, 1], [2, 3]], [[4, 5], [6, 7]]),
        (1, [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
        (-1, [[0, 2], [4, 6]], [[1, 3], [5, 7]]),
        (2, [[0, 2], [4, 6]], [[1, 3], [5, 7]]),
    ],
)
@pytest.mark.parametrize("stack", [ops.stack, np.stack])
def test_the_gradients_of_stack_are_slices_along_its_axis(stack, axis, first, second):
    """oneflow#8194: pieces of the gradient were cut along the wrong axis."""
    a, b = leaf(np.zeros((2, 2))), leaf(np.zeros((2, 2)))
    stack([a, b], axis=axis).backward(np.arange(8).reshape(2, 2, 2))
    assert_same(a.grad, np.array(first, float))
    assert_same(b.grad, np.array(second, float))


def test_unused_parts_and_constants_leave_the_gradients_of_the_other_parts_right():
    """Related to minpy#154 and oneflow#8194: unequal parts, constants between them, an unused part of a split."""
    a, b = leaf(np.ones((2, 3))), leaf(np.ones((2, 2)))
    joined = ops.concat(a, np.ones((2, 1)), b, tg.Tensor(np.ones((2, 1))), axis=1)
    _, middle, last = ops.split(joined, [2, 5], axis=-1)
    (middle * [[1, 2, 3], [4, 5, 6]]).sum().backward()
    assert last.grad is None
    assert_same(a.grad, [[0.0, 0, 1], [0, 0, 4]])
    assert_same(b.grad, [[3.0, 0], [6, 0]])


# --------------------------------------------------------------------------------------------------------------------
# The tensor that backward starts from


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_backward_from_one_element_takes_no_gradient_whatever_the_rank(shape):
    """pytorch#24027: shape (1,) was accepted on one backend and refused on another."""
    x = leaf(np.ones(shape))
    (x * 2).backward()
    assert_same(x.grad, np.full(shape, 2.0))


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_backward_from_a_tensor_that_does_not_require_grad_raises(shape):
    """pytorch#24027."""
    with pytest.raises(ValueError, match="does not require grad"):
        (tg.Tensor(np.ones(shape)) * 2).backward()


# --------------------------------------------------------------------------------------------------------------------
# Whether gradients are on


@pytest.mark.parametrize(("mode", "inside"), [(tg.no_grad, False), (tg.enable_grad, True)])
@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("called", [False, True])
def test_decorating_a_function_changes_the_mode_inside_its_calls_only(mode, inside, outside, called):
    """pytorch#113298: the mode changed when the function was defined."""
    with tg.enable_grad() if outside else tg.no_grad():

        @(mode() if called else mode)
        def f(depth=2):
            return [tg.is_grad_enabled()] + (f(depth - 1) if depth else [])

        assert tg.is_grad_enabled() is outside
        assert f() == [inside] * 3
        assert tg.is_grad_enabled() is outside


def test_the_mode_nests_and_survives_exceptions():
    """Related to pytorch#113298."""
    mode = tg.no_grad()
    with mode:
        with tg.enable_grad():
            assert tg.is_grad_enabled()
            with mode:
                assert not tg.is_grad_enabled()
            assert tg.is_grad_enabled()
        assert not tg.is_grad_enabled()
    assert tg.is_grad_enabled()

    @tg.no_grad
    def fails():
        raise KeyError("inside")

    for call in (fails, lambda: mode.__call__(fails)()):
        with pytest.raises(KeyError, match="inside"):
            call()
        assert tg.is_grad_enabled()


def test_another_thread_has_its_own_mode():
    """Related to pytorch#113298."""
    seen = []

    def look():
        seen.append(tg.is_grad_enabled())
        with tg.no_grad():
            seen.append(tg.is_grad_enabled())
        seen.append(tg.is_grad_enabled())

    with tg.no_grad():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert not tg.is_grad_enabled()
    assert seen == [True, False, True]


@pytest.mark.parametrize("decorate", [tg.no_grad, tg.no_grad()])
def test_the_mode_of_a_decorated_generator_does_not_reach_its_caller(decorate):
    """pytorch#49017: the mode leaked into the caller while the generator was suspended."""

    @decorate
    def steps():
        try:
            received = yield tg.is_grad_enabled()
            yield received, tg.is_grad_enabled()
        except KeyError:
            yield "caught", tg.is_grad_enabled()
        finally:
            closed.append(tg.is_grad_enabled())

    closed = []
    g = steps()
    inside_and_out = [
        (None, tg.is_grad_enabled()),
        (next(g), tg.is_grad_enabled()),
        (g.send("word"), tg.is_grad_enabled()),
        (g.throw(KeyError), tg.is_grad_enabled()),
        (g.close(), tg.is_grad_enabled()),
        (list(steps()), tg.is_grad_enabled()),
    ]
    inside, outside = zip(*inside_and_out, strict=True)
    assert inside == (None, False, ("word", False), ("caught", False), None, [False, (None, False)])
    assert outside == (True,) * 6
    assert closed == [False, False]


def test_a_graph_can_be_built_between_two_steps_of_a_no_grad_generator():
    """pytorch#49017: training while tokens are sampled."""

    @tg.no_grad
    def tokens(w):
        for _ in range(2):
            yield (w * w).requires_grad

    w = leaf([2.0])
    for inside in tokens(w):
        assert not inside
        (w * w).backward()
    assert_same(w.grad, [8.0])


def test_the_modes_of_two_suspended_generators_are_independent():
    """Related to pytorch#49017."""

    def look():
        yield tg.is_grad_enabled()
        yield tg.is_grad_enabled()

    off, on = tg.no_grad(look)(), tg.enable_grad(look)()
    with tg.no_grad():
        assert [next(off), next(on), next(off), next(on)] == [False, True, False, True]
        assert not tg.is_grad_enabled()
    assert tg.is_grad_enabled()


# --------------------------------------------------------------------------------------------------------------------
# Depth and memory


def chain(x, length):
    y = x
    for _ in range(length):
        y = y + 0.001 * x
    return y


def test_a_long_chain_is_differentiated_printed_and_freed_without_recursion():
    """micrograd#90: RecursionError past about a thousand operations."""
    x = leaf(1.0)
    y = chain(x, 20_000)
    y.backward()
    assert_same(x.grad, np.array(21.0))
    assert "made by add" in repr(y)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="belongs to a graph"):
            copied(y)
    assert_same(copy.deepcopy(x), np.array(1.0))
    del y
    assert_same(tg.grad(chain(x, 2_000), x, create_graph=True)[0], np.array(3.0))


def live_tensors():
    return sum(type(thing) is tg.Tensor for thing in gc.get_objects())  # isinstance would load lazy modules


def step(w, x):
    h = (x @ w).tanh()
    return (h * h).mean()


def forward_and_backward(w, x):
    step(w, x).backward()
    w.zero_grad()


def interrupted(w, x):
    try:
        loss = step(w, x)
        raise KeyError(loss.item())
    except KeyError:
        pass


def second_order(w, x):
    (g,) = tg.grad(step(w, x), w, create_graph=True)
    (g * g).sum().backward()
    w.zero_grad()


@pytest.fixture
def without_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_gc")
@pytest.mark.parametrize("once", [forward_and_backward, step, interrupted, second_order])
def test_a_graph_is_freed_by_reference_counts_alone(once):
    """storchastic#26: a closure held its own output, and memory grew with every step."""
    w, x = leaf(rng(1).normal(size=(5, 7))), rng(2).normal(size=(3, 5))
    before = live_tensors()
    for _ in range(200):
        once(w, x)
    assert live_tensors() == before


@pytest.mark.usefixtures("without_gc")
def test_peak_memory_does_not_depend_on_the_number_of_steps():
    """storchastic#26."""
    w, x = leaf(rng(1).normal(size=(5, 700))), rng(2).normal(size=(30, 5))
    peaks = []
    tracemalloc.start()
    for steps in (10, 10, 100):
        tracemalloc.reset_peak()
        for _ in range(steps):
            forward_and_backward(w, x)
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peaks[2] < 1.05 * peaks[1]


# --------------------------------------------------------------------------------------------------------------------
# Hooks do not exist: asking for one is an error


def test_there_are_no_hooks_and_a_gradient_is_always_complete():
    """pytorch#8023: does a hook see each contribution, or the total?"""
    x = leaf([1, 2])
    (3 * x + x * x).sum().backward()
    assert_same(x.grad, [5.0, 7])
    for name in ("register_hook", "retain_grad", "hook"):
        assert not hasattr(x, name)
    with pytest.raises(AttributeError):
        x.hook = print


# --------------------------------------------------------------------------------------------------------------------
# Second derivatives

EYE, IDS = rng(9).normal(size=(3, 5)), np.array([[0, 1, 1], [0, 0, 1]])

TWICE = {
    "matmul": lambda x: x @ x.T,
    "matmul with a constant": lambda x: x @ EYE,
    "matmul of a constant": lambda x: EYE.T @ x.T,
    "linear": lambda x: ops.linear(x, EYE, x[0, 0] * np.ones(5)),
    "softmax": lambda x: x.softmax(),
    "log_softmax": lambda x: x.log_softmax(axis=0),
    "masked softmax": lambda x: ops.softmax(ops.mask(x, np.array([[True, True, False], [False] * 3]))),
    "layer_norm": lambda x: ops.layer_norm(x, x[0], x[1]),
    "rms_norm": lambda x: ops.rms_norm(x, x[0]),
    "gelu": lambda x: ops.gelu(x),
    "gelu by tanh": lambda x: ops.gelu(x, tanh=True),
    "embedding": lambda x: ops.take(x, IDS),
    "cross_entropy": lambda x: ops.cross_entropy(x, np.array([2, 0]), label_smoothing=0.1, reduction="none"),
    "concat": lambda x: ops.concat(x, x * x, axis=1),
    "stack": lambda x: ops.stack(x, x * x, axis=-1),
    "indexing": lambda x: x[[0, 0, 1], ::-1],
    "boolean indexing": lambda x: x[np.array([[True, False, True], [False, True, True]])],
    "where": lambda x: ops.where(x > 0, x * x, x),
    "attention": lambda x: ops.attention(x, x * 2, x + 1, np.array([[True, False], [True, True]])),
    "attention with bias and keep": lambda x: ops.attention(x, x, x, None, x @ x.T, np.array([[0.0, 2], [2, 2]])),
    "einsum": lambda x: ops.einsum("ij,kj->k", x, x),
    "mean": lambda x: x.mean(axis=0),
    "var": lambda x: x.var(axis=1),
    "std": lambda x: x.std(axis=1),
    "norm": lambda x: x.norm(axis=0),
    "max": lambda x: x.max(axis=1),
    "maximum": lambda x: ops.maximum(x, 0.1),
    "pow": lambda x: abs(x) ** x,
    "div": lambda x: 1 / (x + 5) / x,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
    "erf": ops.erf,
    "exp": ops.exp,
    "log": lambda x: abs(x).log(),
    "sqrt": lambda x: abs(x).sqrt(),
    "clip": lambda x: ops.clip(x * x, min=0.5),
    "transpose": lambda x: (x * x).T,
    "broadcast": lambda x: ops.broadcast_to(x[:1], shape=(5, 3)),
    "scatter_add": lambda x: ops.scatter_add(x, index=np.array([1, 1]), shape=(3, 3)),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_gradient_can_be_differentiated_again(name):
    """pytorch#15353: for one operation the gradient with create_graph=True had no graph."""

    def first(x):
        # (f . c)^2: a random direction, and an outer square, so that no operation is linear in x.
        y = TWICE[name](x)
        loss = (y * rng(4).normal(size=y.shape)).sum() ** 2
        return tg.grad(loss, x, create_graph=True)[0]

    at, direction = rng(3).normal(size=(2, 3)), rng(5).normal(size=(2, 3))
    x = leaf(at)
    g = first(x)
    assert g.requires_grad
    (second,) = tg.grad((g * direction).sum(), x)
    assert_same(
        second, central_differences(lambda x: np.sum(direction * first(leaf(x)).numpy()), at), rtol=1e-5, atol=1e-6
    )


# --------------------------------------------------------------------------------------------------------------------
# Arrays whose elements share memory


@pytest.mark.parametrize(
    "array",
    [
        np.broadcast_to([1.0, 2.0], (3, 2)),
        np.broadcast_to(np.array([[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]]]), (2, 1, 3)),
        np.lib.stride_tricks.as_strided(np.arange(6.0) + 1, (2, 1, 3), (24, 0, 8)),
        np.arange(12.0).reshape(3, 4)[::-1, ::2] + 1,
    ],
)
def test_overlapping_and_strided_input_is_copied(array):
    """pytorch#38877: moving one element of an expanded array moved several."""
    x = tg.Tensor(array, requires_grad=True)
    assert not np.shares_memory(x.data, array)
    assert x.data.flags.carray  # contiguous, and may be written to
    assert_same(tg.jacobian(lambda x: x * x, array), np.diag(2 * array.ravel()).reshape(array.shape * 2))


def test_an_input_that_is_ignored_has_a_jacobian_of_zeros():
    """pytorch#38877."""
    assert_same(tg.jacobian(lambda x: leaf([1, 2]), np.ones(3)), np.zeros((2, 3)))
    with pytest.raises(ValueError, match="does not require grad"):  # it looks like a result of no_grad
        tg.jacobian(lambda x: tg.Tensor([1.0, 2.0]), np.ones(3))


# --------------------------------------------------------------------------------------------------------------------
# tanh, sigmoid, gelu at large |x|


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("by_tanh", [True, False])
@pytest.mark.parametrize("x", [21.657723, 1e4, 1e15, 1e30, -1e4, -1e30, 3e38, -3e38])
def test_gelu_is_x_or_zero_far_from_zero(x, by_tanh, dtype):
    """AiDotNet.Tensors#594: inf / inf from about 21 on; even in float32 torch the derivative is nan at 1e30."""
    t = leaf(x, dtype)
    y = ops.gelu(t, tanh=by_tanh)
    y.backward()
    assert_same(y, np.array(dtype(x) if x > 0 else -0.0), rtol=0)
    assert_same(t.grad, np.array(1.0 if x > 0 else 0.0), rtol=0)
    assert np.signbit(y.data) == (x < 0)


@pytest.mark.parametrize(
    ("by_tanh", "value", "slope"), [(True, 0.34571401, 0.86736990), (False, 0.34573123, 0.86749512)]
)
def test_gelu_at_one_half(by_tanh, value, slope):
    """AiDotNet.Tensors#594."""
    t = leaf(0.5)
    y = ops.gelu(t, tanh=by_tanh)
    y.backward()
    assert_same(y, np.array(value), rtol=2e-8)
    assert_same(t.grad, np.array(slope), rtol=2e-8)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("op", "low"), [(ops.tanh, -1.0), (ops.sigmoid, 0.0), (ops.erf, -1.0), (ops.relu, 0.0)], ids=lambda v: str(v)
)
def test_saturated_functions_reach_their_limits_without_warnings(op, low, dtype):
    """Related to AiDotNet.Tensors#594."""
    for size in (1e4, 1e30, 3e38, np.inf):
        x = leaf([-size, size], dtype)
        y = op(x)
        y.backward([1, 1])
        assert_same(y, [low, size if op is ops.relu else 1.0], rtol=1e-6, atol=1e-38)
        assert_same(x.grad, [0, 1.0 if op is ops.relu else 0.0], rtol=1e-6, atol=1e-38)


# --------------------------------------------------------------------------------------------------------------------
# Operators: reflected forms, and NumPy on the left


def test_base_and_exponent_both_have_a_derivative():
    """micrograd#17: only constant exponents had one."""
    a, b = leaf(2.0), leaf(3.0)
    (a**b).backward()
    assert_same(a.grad, np.array(12.0))
    assert_same(b.grad, np.array(8 * math.log(2)))


@pytest.mark.parametrize("two", [2.0, 2, np.float64(2), np.int64(2), np.array(2.0)], ids=repr)
def test_a_tensor_exponent_of_a_constant_has_a_derivative(two):
    """micrograd#17."""
    b = leaf(3.0)
    (two**b).backward()
    assert_same(b.grad, np.array(8 * math.log(2)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("exponent", "value", "slope"),
    [(np.int64(2), 4, 4), (-1, 0.5, -0.25), (np.float64(0.5), 2**0.5, 2**-1.5), (3, 8, 12)],
)
def test_constant_exponents_keep_the_dtype(exponent, value, slope, dtype):
    """micrograd#17."""
    a = leaf(2.0, dtype)
    y = a**exponent
    y.backward()
    assert y.dtype == a.grad.dtype == dtype
    assert_same(y, np.array(float(value)), rtol=1e-6)
    assert_same(a.grad, np.array(float(slope)), rtol=1e-6)


def test_a_constant_to_a_tensor_uses_the_rule_of_the_exponent():
    """tt-metal#52144: c ** x was differentiated as x ** c, and negative x became nan."""
    x = leaf([3.0, -2.0])
    y = 2.0**x
    y.sum().backward()
    assert_same(y, [8.0, 0.25])
    assert_same(x.grad, [5.54517744, 0.17328680], rtol=3e-8)
    x = leaf(2.0)
    (0.0**x).backward()
    assert_same(x.grad, np.array(0.0))


def test_a_negative_base_has_no_derivative_by_its_exponent():
    """tt-metal#52144: the gradient is nan with NumPy's warning, as documented; the value is right."""
    x = leaf(2.0)
    y = (-2.0) ** x
    assert_same(y, np.array(4.0))
    with pytest.warns(RuntimeWarning, match="invalid value"):
        y.backward()
    assert np.isnan(x.grad)


@pytest.mark.parametrize(
    "two",
    [2, 2.0, np.float32(2), np.float64(2), np.int64(2), np.full(3, 2.0), [2.0, 2.0, 2.0], tg.Tensor([2, 2, 2])],
    ids=repr,
)
def test_reflected_operators_keep_the_order_of_their_operands(two):
    """Related to micrograd#17 and tt-metal#52144: signs and order of - / ** @ for every kind of left operand."""
    for op, value, slope in (
        (operator.add, 2.5, 1),
        (operator.sub, 1.5, -1),
        (operator.mul, 1.0, 2),
        (operator.truediv, 4.0, -8),
        (operator.pow, math.sqrt(2), math.sqrt(2) * math.log(2)),
    ):
        x = leaf([0.5] * 3)
        y = op(two, x)
        assert isinstance(y, tg.Tensor)
        y.backward(np.ones(3))
        assert_same(y, np.full(3, float(value)))
        assert_same(x.grad, np.full(3, float(slope)), rtol=1e-8)  # a list is float32
    if np.ndim(as_array(two)):
        a, b = leaf(rng(1).normal(size=(3, 5))), leaf(rng(2).normal(size=(5, 3)))
        (two @ a).backward(np.arange(5))
        (b @ two).backward(np.arange(5))
        assert_same(a.grad, 2.0 * np.outer(np.ones(3), np.arange(5)))
        assert_same(b.grad, 2.0 * np.outer(np.arange(5), np.ones(3)))


def test_an_array_on_the_left_of_an_in_place_operator_is_refused():
    """Related to micrograd#17: an array cannot record `array += tensor`."""
    array, x = np.ones(3), leaf(np.ones(3))
    with pytest.raises(TypeError, match="out="):
        array += x
    assert_same(array, np.ones(3))
