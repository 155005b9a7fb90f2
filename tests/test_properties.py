"""Properties for all shapes, axes and indices: broadcasting, reductions, indexing, round trips, dtypes, NumPy."""

from __future__ import annotations

import functools
import math
import operator

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import tinygrad_mha as tg
from tinygrad_mha import Tensor, ops
from tinygrad_mha.check import samples  # noqa: F401  # gives primitives their samples
from tinygrad_mha.numpy_protocol import COMPARISONS, FUNCTIONS, PLAIN, UFUNCS

claim = settings(derandomize=True, deadline=None, database=None, max_examples=40)
seeds = st.integers(0, 2**32 - 1)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)


def numbers(shape, seed, apart=0.0):
    """Random numbers of both signs, at least `apart` from 0."""
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return np.asarray(x + np.copysign(apart, x))


def positive(shape, seed):
    """Random numbers between 0.4 and 1.4."""
    return 0.4 + np.random.default_rng(seed).random(shape)


def gradients(f, *arrays, g=None):
    """The value of f, a cotangent (random, or the one given), and the gradients of all arrays."""
    xs = [Tensor(x, requires_grad=True) for x in arrays]
    y = f(*xs)
    g = numbers(y.shape, 5) if g is None else g
    y.backward(g)
    return y.numpy(), g, *(x.grad for x in xs)


def close(a, b, tolerance=1e-12):
    assert a.shape == np.shape(b)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def inner(a, b):
    return float((a * b).sum())


# --------------------------------------------------------------------------------------------------------------------
# Broadcasting


def sum_to(g, shape):
    """Sum `g` over the axes along which an array of `shape` is broadcast to it."""
    places = np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), g.shape)
    return np.bincount(places.ravel(), g.ravel(), math.prod(shape)).reshape(shape)


def checkerboard(shape):
    return np.indices(shape).sum(0) % 2 == 0


TWO_OPERANDS = {
    "add": (ops.add, np.add),
    "sub": (ops.sub, np.subtract),
    "mul": (ops.mul, np.multiply),
    "div": (ops.div, np.divide),
    "pow": (lambda a, b: ops.pow(a * a, b), lambda a, b: np.power(a * a, b)),
    "maximum": (ops.maximum, np.maximum),
    "minimum": (ops.minimum, np.minimum),
    "where": tuple(
        lambda a, b, where=where: where(checkerboard(np.broadcast_shapes(a.shape, b.shape)), a, b)
        for where in (ops.where, np.where)
    ),
    "mask": (
        lambda a, b: ops.exp(ops.mask(a, b > 0)) + b,
        lambda a, b: np.exp(np.where(b > 0, a, -np.inf)) + b,
    ),
    "+": (operator.add, np.add),
    "-": (operator.sub, np.subtract),
    "*": (operator.mul, np.multiply),
    "/": (operator.truediv, np.divide),
}


@pytest.mark.parametrize("name", TWO_OPERANDS)
@claim
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, min_side=0, max_side=3), seeds)
def test_the_gradient_of_a_broadcast_operand_is_that_of_its_full_copy_summed(name, broadcast, seed):
    ours, numpys = TWO_OPERANDS[name]
    a, b = (numbers(shape, seed + i, apart=0.3) for i, shape in enumerate(broadcast.input_shapes))
    value, g, a_grad, b_grad = gradients(ours, a, b)
    close(value, numpys(a, b))
    full = (np.broadcast_to(x, broadcast.result_shape).copy() for x in (a, b))
    _, _, a_full, b_full = gradients(ours, *full, g=g)
    close(a_grad, sum_to(a_full, a.shape))
    close(b_grad, sum_to(b_full, b.shape))


@claim
@given(hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=3, min_side=0, max_side=3), seeds)
def test_each_of_several_broadcast_operands_gets_its_own_sum(broadcast, seed):
    a, b, c = (numbers(shape, seed + i) for i, shape in enumerate(broadcast.input_shapes))
    value, g, a_grad, b_grad, c_grad = gradients(lambda a, b, c: (a * b + c) * a, a, b, c)
    close(value, (a * b + c) * a)
    close(a_grad, sum_to(g * (2 * a * b + c), a.shape))
    close(b_grad, sum_to(g * a * a, b.shape))
    close(c_grad, sum_to(g * a + 0 * b * c, c.shape))


@claim
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, min_side=0, max_side=3), seeds)
def test_unbroadcasting_is_linear_and_the_adjoint_of_broadcasting(broadcast, seed):
    shape, result = broadcast.input_shapes[0], broadcast.result_shape
    x, g, h = numbers(shape, seed), numbers(result, seed + 1), numbers(result, seed + 2)

    def back(g):
        return gradients(lambda x: ops.broadcast_to(x, shape=result), x, g=g)[2]

    close(back(g), sum_to(g, shape))
    close(back(g - 2 * h), back(g) - 2 * back(h))
    assert inner(np.broadcast_to(x, result), g) == pytest.approx(inner(x, back(g)), abs=1e-10)


@claim
@given(hnp.mutually_broadcastable_shapes(signature=np.matmul.signature, max_dims=3, min_side=0, max_side=3), seeds)
def test_matmul_of_stacks_and_vectors_equals_numpy_and_its_gradients_are_adjoint(broadcast, seed):
    a, b = (numbers(shape, seed + i) for i, shape in enumerate(broadcast.input_shapes))
    value, g, a_grad, b_grad = gradients(operator.matmul, a, b)
    close(value, a @ b)
    a_step, b_step = numbers(a.shape, seed + 2), numbers(b.shape, seed + 3)
    assert a_grad.shape == a.shape
    assert b_grad.shape == b.shape
    assert inner(a_step @ b, g) == pytest.approx(inner(a_step, a_grad), abs=1e-10)
    assert inner(a @ b_step, g) == pytest.approx(inner(b_step, b_grad), abs=1e-10)


@st.composite
def subscripts(draw):
    """Subscripts for einsum and suitable shapes: shared and repeated letters, any order, with or without output."""
    lengths = dict(zip("ijkl", draw(st.lists(st.integers(1, 3), min_size=4, max_size=4)), strict=True))
    terms = draw(st.lists(st.text("ijkl", max_size=3), min_size=1, max_size=3))
    known = sorted(set("".join(terms)))
    out = draw(st.permutations(known).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: "".join(p[:n]))))
    return ",".join(terms) + draw(st.sampled_from(["", "->" + out])), [tuple(lengths[c] for c in t) for t in terms]


def test_einsum_takes_a_number():
    x = numbers((2, 3), 1)
    value, g, grad = gradients(lambda x: ops.einsum("ij,->j", x, 2.5), x)
    close(value, 2.5 * x.sum(0))
    close(grad, np.broadcast_to(2.5 * g, x.shape))


@claim
@given(subscripts(), seeds)
def test_einsum_equals_numpy_and_its_gradients_are_adjoint(formula, seed):
    text, shapes = formula
    xs = [numbers(shape, seed + i) for i, shape in enumerate(shapes)]
    value, g, *grads = gradients(lambda *xs: ops.einsum(text, *xs), *xs)
    close(value, np.einsum(text, *xs))
    for i, grad in enumerate(grads):
        step = numbers(xs[i].shape, seed + 7)
        moved = np.einsum(text, *xs[:i], step, *xs[i + 1 :])
        assert inner(moved, g) == pytest.approx(inner(step, grad), abs=1e-10)


# --------------------------------------------------------------------------------------------------------------------
# Reductions


def ratio(a, b):
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(a.shape), where=b != 0)


def centred(x, axes):
    return x - x.mean(axes, keepdims=True)


def shares(x, y, g, axes, n):
    chosen = x == y
    return g * chosen / chosen.sum(axes, keepdims=True)


# Ours, NumPy's, and the textbook gradient, where y and g keep the reduced axes and n is the count minus ddof.
REDUCTIONS = {
    "sum": (ops.sum, np.sum, lambda x, y, g, axes, n: np.broadcast_to(g, x.shape)),
    "mean": (ops.mean, np.mean, lambda x, y, g, axes, n: np.broadcast_to(g / n, x.shape)),
    "var": (ops.var, np.var, lambda x, y, g, axes, n: 2 * g * centred(x, axes) / n),
    "std": (ops.std, np.std, lambda x, y, g, axes, n: ratio(g * centred(x, axes), n * y)),
    "norm": (ops.norm, lambda x, **axes: np.sqrt(np.sum(x * x, **axes)), lambda x, y, g, axes, n: ratio(g * x, y)),
    "max": (ops.max, np.max, shares),
    "min": (ops.min, np.min, shares),
}


@st.composite
def reductions(draw):
    """A shape, an axis argument for it, and the tuple of axes it denotes, none of length 0."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=3))
    ndim = len(shape)
    one = [st.integers(-ndim, ndim - 1)] if ndim else []
    axis = draw(st.one_of(st.none(), hnp.valid_tuple_axes(ndim), *one))
    axes = tuple(i % ndim for i in ((axis,) if isinstance(axis, int) else range(ndim) if axis is None else axis))
    rest = [i for i in range(ndim) if i not in axes]
    if rest and draw(st.integers(0, 4)) == 0:
        shape = tuple(0 if i == rest[0] else n for i, n in enumerate(shape))
    return shape, axis, axes


@pytest.mark.parametrize("name", REDUCTIONS)
@claim
@given(reductions(), st.booleans(), st.sampled_from([0, 1]), seeds)
def test_reductions_over_any_axes_equal_numpy_and_their_gradients_the_textbook(name, reduction, keepdims, ddof, seed):
    ours, numpys, textbook = REDUCTIONS[name]
    shape, axis, axes = reduction
    n = math.prod(shape[i] for i in axes)
    ways = {"ddof": ddof} if name in ("var", "std") and n > ddof else {}
    x = np.round(2 * numbers(shape, seed)) / 2  # many ties, and constant rows
    value, g, grad = gradients(lambda x: ours(x, axis=axis, keepdims=keepdims, **ways), x)
    close(value, numpys(x, axis=axis, keepdims=keepdims, **ways))
    y, g = (np.expand_dims(v, axes) if not keepdims else v for v in (value, g))
    close(grad, textbook(x, y, g, axes, n - ways.get("ddof", 0)), 1e-11)


@pytest.mark.parametrize("name", ["sum", "max", "min", "norm"])
@pytest.mark.parametrize("axis", [0, -1])
def test_a_0d_array_can_be_reduced_over_axis_0_and_minus_1_as_in_numpy(name, axis):
    ours, numpys, _ = REDUCTIONS[name]
    value, g, grad = gradients(lambda x: ours(x, axis=axis, keepdims=False), np.array(3.0))
    close(value, numpys(np.array(3.0), axis=axis, keepdims=False))
    close(grad, g)


@pytest.mark.parametrize("name", ["sum", "norm"])
@claim
@given(shapes, st.booleans())
def test_an_empty_sum_is_zero(name, shape, keepdims):
    value, _, grad = gradients(lambda x: REDUCTIONS[name][0](x, axis=None, keepdims=keepdims), np.zeros((0, *shape)))
    assert value.shape == (1,) * (1 + len(shape)) * keepdims
    assert not value.any()
    assert grad.shape == (0, *shape)


@pytest.mark.parametrize("name", REDUCTIONS)
@claim
@given(hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3), st.data())
def test_an_axis_out_of_range_or_given_twice_is_refused(name, shape, data):
    ndim = len(shape)
    beyond = st.sampled_from([max(ndim, 1), -max(ndim, 1) - 1])  # NumPy accepts axis 0 and -1 for a 0-d array
    twice = st.integers(0, ndim - 1).map(lambda i: (i, i - ndim)) if ndim else st.nothing()
    axis = data.draw(st.one_of(beyond, beyond.map(lambda i: (i,)), twice))
    with pytest.raises(ValueError, match="axis"):
        REDUCTIONS[name][0](Tensor(np.ones(shape), requires_grad=True), axis=axis)


# --------------------------------------------------------------------------------------------------------------------
# Indexing


@st.composite
def mixed_indices(draw, shape):
    """Slices, integers, integer arrays that broadcast together, or one mask, possibly with None and ..."""
    common = draw(st.sampled_from([(), (1,), (3,), (2, 1), (2, 3)]))
    masked = draw(st.booleans())
    parts = []

    def add(n):
        kinds = [st.slices(n)]
        if n:
            kinds.append(st.integers(-n, n - 1))
        if masked and not any(isinstance(part, np.ndarray) for part in parts):
            kinds.append(hnp.arrays(bool, (n,)))
        if n and not masked:
            narrow = st.sampled_from([common, (1,) * len(common), common[1:]])
            kinds.append(hnp.arrays(np.intp, narrow, elements=st.integers(-n, n - 1)))
        parts.append(draw(st.one_of(kinds)))

    first = draw(st.integers(0, len(shape)))
    for n in shape[:first]:
        add(n)
    if draw(st.booleans()):
        parts.append(...)
        for n in shape[draw(st.integers(first, len(shape))) :]:
            add(n)
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), None)
    return tuple(parts)


@st.composite
def indexed(draw, *kinds):
    """A shape and an index into it, of one of the `kinds`."""
    make = draw(st.sampled_from(kinds))
    least = 1 if make in (masks, integer_arrays) else 0
    shape = draw(hnp.array_shapes(min_dims=least, max_dims=4, min_side=1 if make is integer_arrays else 0, max_side=3))
    return shape, draw(make(shape))


def basic(shape):
    return hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True)


def masks(shape):
    return hnp.arrays(bool, shape)


def integer_arrays(shape):
    return hnp.integer_array_indices(
        shape, result_shape=hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4)
    )


def rows(shape):
    n = shape[0] if shape else 0
    ids = st.integers(-n, n - 1)
    return hnp.arrays(np.intp, (4,), elements=ids) | st.lists(ids, min_size=1, max_size=5) if n else basic(shape)


@pytest.mark.parametrize("kind", [basic, masks, integer_arrays, rows, mixed_indices], ids=lambda kind: kind.__name__)
def test_indexing_equals_numpy_and_its_gradient_adds_at_the_indices(kind):
    @claim
    @given(indexed(kind), seeds)
    def holds(case, seed):
        shape, index = case
        x = numbers(shape, seed)
        value, g, grad = gradients(lambda x: x[index], x)
        expected = np.zeros(shape)
        np.add.at(expected, index, g)
        close(value, x[index], 0)
        close(grad, expected, 1e-15)

        value, g, grad = gradients(lambda v: ops.scatter_add(v, index=index, shape=shape), g)
        close(value, expected, 1e-15)
        close(grad, g[index], 0)

    holds()


@claim
@given(indexed(rows, mixed_indices), seeds)
def test_an_index_may_contain_tensors_and_lists(case, seed):
    shape, index = case
    x = Tensor(numbers(shape, seed), requires_grad=True)
    parts = index if isinstance(index, tuple) else (index,)
    as_tensors = tuple(Tensor(part) if isinstance(part, np.ndarray) else part for part in parts)
    as_lists = tuple(part.tolist() if isinstance(part, np.ndarray) and part.size else part for part in parts)
    close(x[as_tensors].numpy(), x.numpy()[tuple(parts)], 0)
    close(x[as_lists].numpy(), x.numpy()[tuple(parts)], 0)


# --------------------------------------------------------------------------------------------------------------------
# Round trips


def assert_identity(round_trip, x):
    value, g, grad = gradients(round_trip, x)
    close(value, x, 0)
    close(grad, g, 0)


@claim
@given(shapes, seeds, st.data())
def test_reshape_and_back_is_the_identity(shape, seed, data):
    size = math.prod(shape)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    other = (data.draw(st.sampled_from(divisors)), -1) if size else data.draw(st.permutations(shape).map(tuple))
    x = numbers(shape, seed)
    close(Tensor(x).reshape(other).numpy(), x.reshape(other), 0)
    assert_identity(lambda x: x.reshape(*other).reshape(shape), x)
    assert_identity(lambda x: np.reshape(ops.reshape(x, shape=other), shape), x)


@claim
@given(shapes, seeds, st.data())
def test_transposing_and_back_is_the_identity(shape, seed, data):
    ndim = len(shape)
    axes = tuple(data.draw(st.permutations(range(ndim))))
    negative = tuple(i - ndim for i in axes)
    x = numbers(shape, seed)
    assert_identity(lambda x: x.transpose(axes).transpose(tuple(np.argsort(axes).tolist())), x)
    assert_identity(lambda x: ops.transpose(ops.transpose(x, axes=negative), axes=np.argsort(axes).tolist()), x)
    assert_identity(lambda x: x.T.T, x)
    if ndim:
        i, j = data.draw(st.tuples(*[st.integers(-ndim, ndim - 1)] * 2))
        close(Tensor(x).swapaxes(i, j).numpy(), np.swapaxes(x, i, j), 0)
        assert_identity(lambda x: x.swapaxes(i, j).swapaxes(j, i), x)
    if ndim > 1:
        assert_identity(lambda x: x.mT.mT, x)
    letters = "abcd"[:ndim]
    turned = "".join(letters[i] for i in axes)
    value, g, grad = gradients(lambda x: ops.einsum(f"{letters}->{turned}", x), x)
    close(value, np.transpose(x, axes), 0)
    close(grad, np.transpose(g, np.argsort(axes)), 0)


@claim
@given(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4), seeds, st.data())
def test_split_and_concat_are_the_identity(shape, seed, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    n = shape[axis]
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    parts = data.draw(st.sampled_from([cuts, *(k for k in range(1, n + 1) if n % k == 0)]))
    x = numbers(shape, seed)
    for ours, numpys in zip(ops.split(Tensor(x), parts, axis), np.split(x, parts, axis), strict=True):
        close(ours.numpy(), numpys, 0)
    assert_identity(lambda x: ops.concat(*ops.split(x, parts, axis), axis=axis), x)
    assert_identity(lambda x: np.concatenate(np.split(x, parts, axis), axis=axis), x)


@claim
@given(hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=3), seeds, st.data())
def test_unstacking_and_stacking_is_the_identity(shape, seed, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    x = numbers(shape, seed)
    before = (slice(None),) * axis
    pieces = range(shape[axis])
    assert_identity(lambda x: ops.stack(*(x[(*before, i)] for i in pieces), axis=axis), x)
    assert_identity(lambda x: ops.stack([x[(*before, i)] for i in pieces], axis=axis - len(shape)), x)
    assert_identity(lambda x: np.stack(list(x)), x)


@claim
@given(hnp.mutually_broadcastable_shapes(signature="(n,k),(k,m)->(n,m)", max_dims=2, max_side=3), seeds)
def test_three_ways_to_write_a_product_agree_in_value_and_gradients(broadcast, seed):
    a, b = (numbers(shape, seed + i) for i, shape in enumerate(broadcast.input_shapes))
    ways = [
        lambda a, b: a @ b,
        lambda a, b: ops.einsum("...nk,...km->...nm", a, b),
        lambda a, b: (a[..., :, :, None] * b[..., None, :, :]).sum(axis=-2),
    ]
    first = gradients(ways[0], a, b)
    for way in ways[1:]:
        for one, other in zip(first, gradients(way, a, b), strict=True):
            close(one, other)


# --------------------------------------------------------------------------------------------------------------------
# Dtypes


OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
    "@": operator.matmul,
}


def floating(x):
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


OWN = [op for op in ops.REGISTRY.values() if op.forward.__module__.startswith("tinygrad_mha.") and op.name != "cast"]
ELEMENTWISE = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "where")
SCALARS = [2.5, 2, True, np.float64(2.5), np.float32(2.5), np.int64(2), np.bool_(True)]
OF_SEVERAL_FLOATS = [
    op for op in OWN if any(sum(map(floating, inputs)) > 1 for inputs, _ in op.samples(np.random.default_rng(0)))
]


def assert_float32(f, *operands):
    """f of the operands, among them float32 tensors, is float32, and so are all gradients."""
    xs = [Tensor(x, requires_grad=True, dtype=np.float32) if floating(x) else x for x in operands]
    y = f(*xs)
    assert y.dtype == np.float32
    y.backward(np.ones(y.shape))
    for x in xs:
        if isinstance(x, Tensor):
            assert x.grad.dtype == np.float32
            assert x.grad.shape == x.shape


@pytest.mark.parametrize("op", [op for op in OWN if op.name in ELEMENTWISE], ids=lambda op: op.name)
@pytest.mark.parametrize("scalar", SCALARS, ids=lambda x: f"{type(x).__name__}({x})")
def test_a_scalar_does_not_change_the_dtype_of_a_float32_tensor(op, scalar):
    for inputs, keywords in op.samples(np.random.default_rng(0)):
        for j, x in enumerate(inputs):
            if floating(x) and sum(map(floating, inputs)) > 1:
                assert_float32(functools.partial(op, **keywords), *inputs[:j], scalar, *inputs[j + 1 :])


OF_ONE_NUMBER = {
    **{name: ops.REGISTRY[name] for name in ("neg", "exp", "log", "sqrt", "erf", "tanh", "sigmoid", "relu", "abs")},
    "gelu": ops.gelu,
    "gelu by tanh": functools.partial(ops.gelu, tanh=True),
    "scale": functools.partial(ops.scale, by=0.7),
    "clip": functools.partial(ops.clip, min=0.1, max=5.0),
    "pow": lambda x: x**3,
    "root": lambda x: x**0.5,
    "power": lambda x: 2.0**x,
    "softened": lambda x: 1 / (1 + x),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OF_ONE_NUMBER, ids=lambda name: name.replace(" ", "-"))
def test_a_0d_tensor_keeps_its_dtype_and_equals_a_vector_of_one_element(name, dtype):
    f = OF_ONE_NUMBER[name]
    outcomes = []
    for shape in ((), (1,)):
        x = Tensor(np.full(shape, 0.7), requires_grad=True, dtype=dtype)
        y = f(x)
        (first,) = tg.grad(y, x, create_graph=True)
        second = tg.grad(first, x)[0] if first.requires_grad else first
        y.backward()
        results = (y.numpy(), first.numpy(), second.numpy(), x.grad)
        assert all(type(r) is np.ndarray and r.dtype == dtype and r.shape == shape for r in results)
        outcomes.append([r.item() for r in results])
    np.testing.assert_allclose(*outcomes, rtol=16 * np.finfo(dtype).eps)


def integers(x):
    return 1 + np.abs(np.rint(x)).astype(np.int64)


def booleans(x):
    return np.ones(x.shape, bool)


@pytest.mark.parametrize("other", [integers, booleans])
@pytest.mark.parametrize("sign", ["+", "-", "*", "/", "**", "@"])
def test_an_array_of_integers_or_booleans_beside_a_float32_tensor_takes_its_dtype(sign, other):
    x = positive((3, 3), 1)
    for operands in ((x, other(x)), (other(x), x)):
        assert_float32(OPERATORS[sign], *operands)


def assert_later_operands_are_cast(op, other):
    for inputs, keywords in op.samples(np.random.default_rng(0)):
        for j in [j for j, x in enumerate(inputs) if floating(x)][1:]:
            assert_float32(functools.partial(op, **keywords), *inputs[:j], other(inputs[j]), *inputs[j + 1 :])


@pytest.mark.parametrize("op", OF_SEVERAL_FLOATS, ids=lambda op: op.name)
def test_booleans_beside_the_float32_tensor_of_a_primitive_take_its_dtype(op):
    assert_later_operands_are_cast(op, booleans)


@pytest.mark.xfail(strict=True, reason="called by name, primitives promote as NumPy does; only operators cast integers")
@pytest.mark.parametrize("op", OF_SEVERAL_FLOATS, ids=lambda op: op.name)
def test_integers_beside_the_float32_tensor_of_a_primitive_take_its_dtype(op):
    assert_later_operands_are_cast(op, integers)


LEFT = {
    "float64": np.full((3, 3), 1.5),
    "float32": np.full((3, 3), 1.5, np.float32),
    "integers": np.arange(1, 10).reshape(3, 3),
    "booleans": np.ones((3, 3), bool),
    "a vector": np.array([1.0, 2.0, 3.0]),
    "a 0-d array": np.array(1.5),
    "a float64 scalar": np.float64(1.5),
    "a float32 scalar": np.float32(1.5),
    "an int64 scalar": np.int64(2),
    "a bool scalar": np.bool_(True),
    "a transposed view": np.arange(1.0, 10.0).reshape(3, 3).T,
    "a read-only array": np.broadcast_to(np.array([1.0, 2.0, 3.0]), (3, 3)),
}


@pytest.mark.parametrize("sign", OPERATORS)
@pytest.mark.parametrize("left", LEFT, ids=lambda name: name.replace(" ", "-"))
def test_numpy_on_the_left_of_an_operator_gives_a_tensor(sign, left):
    f, a = OPERATORS[sign], LEFT[left]
    if sign == "@" and np.ndim(a) == 0:
        with pytest.raises(ValueError, match="at least one axis"):
            f(a, Tensor(np.ones((3, 3))))
        return
    b = np.random.default_rng(0).uniform(0.5, 1.5, (3, 3))
    x = Tensor(b, requires_grad=True)
    y = f(a, x)
    assert type(y) is Tensor
    assert y.dtype == np.float64
    close(y.numpy(), f(a, b))
    _, g, _, grad = gradients(f, np.asarray(a, dtype=np.float64), b)
    y.backward(g)
    close(x.grad, grad)
    y = f(Tensor(b), a)
    assert type(y) is Tensor
    close(y.numpy(), f(b, a))


@pytest.mark.parametrize("compare", [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge])
@pytest.mark.parametrize("left", LEFT, ids=lambda name: name.replace(" ", "-"))
def test_numpy_on_the_left_of_a_comparison_gives_a_plain_boolean_array(compare, left):
    a, b = LEFT[left], np.arange(9.0).reshape(3, 3)
    for result in (compare(a, Tensor(b, requires_grad=True)), compare(Tensor(b), a)):
        assert type(result) is np.ndarray
        assert result.dtype == bool
    np.testing.assert_array_equal(compare(a, Tensor(b)), compare(a, b))
    np.testing.assert_array_equal(compare(Tensor(b), a), compare(b, a))


@pytest.mark.parametrize("f", [operator.floordiv, operator.mod, operator.and_, operator.lshift, divmod])
def test_an_operator_without_a_rule_is_refused_on_either_side(f):
    x = Tensor(np.ones(3), requires_grad=True)
    with pytest.raises(TypeError):
        f(np.ones(3), x)
    with pytest.raises(TypeError):
        f(x, np.ones(3))


@pytest.mark.parametrize("f", [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow])
def test_an_array_is_never_changed_in_place_by_a_tensor(f):
    a = np.ones(3)
    with pytest.raises(TypeError, match="out="):
        f(a, Tensor(np.full(3, 2.0), requires_grad=True))
    np.testing.assert_array_equal(a, 1)


# --------------------------------------------------------------------------------------------------------------------
# NumPy's functions and their counterparts

UFUNC_COUNTERPARTS = {
    np.negative: operator.neg,
    np.positive: operator.pos,
    np.absolute: Tensor.abs,
    np.fabs: abs,
    np.exp: Tensor.exp,
    np.log: Tensor.log,
    np.sqrt: Tensor.sqrt,
    np.square: lambda x: x**2,
    np.tanh: Tensor.tanh,
    np.sin: ops.sin,
    np.cos: ops.cos,
    np.log1p: ops.log1p,
    np.expm1: ops.expm1,
    np.reciprocal: lambda x: 1.0 / x,
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.true_divide: operator.truediv,
    np.log2: lambda x: ops.log(x) / math.log(2),
    np.log10: lambda x: ops.log(x) / math.log(10),
    np.exp2: lambda x: ops.exp(x * math.log(2)),
    np.power: operator.pow,
    np.float_power: operator.pow,
    np.matmul: operator.matmul,
    np.maximum: ops.maximum,
    np.minimum: ops.minimum,
}

CONDITION = np.arange(9).reshape(3, 3) % 2 == 0

# Of x and z, both (2, 3, 3): the NumPy call, which works for arrays too, and ours.
FUNCTION_COUNTERPARTS = {
    np.sum: [
        (lambda x, z: np.sum(x), lambda x, z: x.sum()),
        (lambda x, z: np.sum(x, axis=(0, -1), keepdims=True), lambda x, z: x.sum(axis=(0, -1), keepdims=True)),
        (lambda x, z: np.sum(x, 1), lambda x, z: x.sum(1)),
    ],
    np.mean: [(lambda x, z: np.mean(x, axis=-1, keepdims=True), lambda x, z: x.mean(axis=-1, keepdims=True))],
    np.var: [(lambda x, z: np.var(x, axis=1, ddof=1), lambda x, z: x.var(axis=1, ddof=1))],
    np.std: [(lambda x, z: np.std(x, axis=(0, 1)), lambda x, z: x.std(axis=(0, 1)))],
    np.max: [
        (lambda x, z: np.max(x, axis=0), lambda x, z: x.max(axis=0)),
        (lambda x, z: np.max(x), lambda x, z: x.max()),
    ],
    np.min: [(lambda x, z: np.min(x, axis=-2, keepdims=True), lambda x, z: x.min(axis=-2, keepdims=True))],
    np.linalg.norm: [
        (lambda x, z: np.linalg.norm(x), lambda x, z: x.norm()),
        (lambda x, z: np.linalg.norm(x, axis=-1, keepdims=True), lambda x, z: x.norm(axis=-1, keepdims=True)),
    ],
    np.amax: [(lambda x, z: np.amax(x, axis=1), lambda x, z: x.max(axis=1))],
    np.amin: [(lambda x, z: np.amin(x), lambda x, z: x.min())],
    np.prod: [
        (lambda x, z: np.prod(x, axis=1), lambda x, z: x[:, 0] * x[:, 1] * x[:, 2]),
        (
            lambda x, z: np.prod(x, axis=(0, 2), keepdims=True),
            lambda x, z: ops.prod(x.swapaxes(1, 2).reshape(6, 3), 0)[None, :, None],
        ),
        (lambda x, z: np.prod(x), lambda x, z: x.log().sum().exp()),
    ],
    np.cumsum: [
        (lambda x, z: np.cumsum(x, axis=1), lambda x, z: np.tri(3) @ x),
        (lambda x, z: np.cumsum(x), lambda x, z: np.tri(18) @ x.reshape(-1)),
    ],
    np.where: [
        (lambda x, z: np.where(CONDITION, x, z), lambda x, z: ops.where(CONDITION, x, z)),
        (lambda x, z: np.where(CONDITION, 0.0, z), lambda x, z: ops.where(CONDITION, 0.0, z)),
    ],
    np.clip: [
        (lambda x, z: np.clip(x, 0.7, 1.2), lambda x, z: x.clip(0.7, 1.2)),
        (lambda x, z: np.clip(x, None, 1.2), lambda x, z: x.clip(max=1.2)),
        (lambda x, z: np.clip(x, min=0.7, max=1.2), lambda x, z: x.clip(min=0.7, max=1.2)),
    ],
    np.reshape: [
        (lambda x, z: np.reshape(x, (3, -1)), lambda x, z: x.reshape(3, -1)),
        (lambda x, z: np.reshape(x, -1), lambda x, z: x.reshape(-1)),
    ],
    np.broadcast_to: [(lambda x, z: np.broadcast_to(x, (5, 2, 3, 3)), lambda x, z: x.broadcast_to(5, 2, 3, 3))],
    np.transpose: [
        (lambda x, z: np.transpose(x), lambda x, z: x.T),
        (lambda x, z: np.transpose(x, (1, 0, 2)), lambda x, z: x.transpose(1, 0, 2)),
        (lambda x, z: np.transpose(x, axes=(-1, 0, 1)), lambda x, z: x.transpose((-1, 0, 1))),
    ],
    np.matrix_transpose: [(lambda x, z: np.matrix_transpose(x), lambda x, z: x.mT)],
    np.swapaxes: [(lambda x, z: np.swapaxes(x, 0, -1), lambda x, z: x.swapaxes(0, -1))],
    np.concatenate: [
        (lambda x, z: np.concatenate([x, z]), lambda x, z: ops.concat(x, z)),
        (lambda x, z: np.concatenate((x, z, x), axis=-1), lambda x, z: ops.concat(x, z, x, axis=-1)),
        (lambda x, z: np.concatenate((np.ones((1, 3, 3)), z), 0), lambda x, z: ops.concat(np.ones((1, 3, 3)), z)),
    ],
    np.stack: [(lambda x, z: np.stack([x, z], axis=-1), lambda x, z: ops.stack(x, z, axis=-1))],
    np.hstack: [
        (lambda x, z: np.hstack([x, z]), lambda x, z: ops.concat(x, z, axis=1)),
        (lambda x, z: np.hstack([x[0, 0], z[1, 2]]), lambda x, z: ops.concat(x[0, 0], z[1, 2])),
    ],
    np.vstack: [
        (lambda x, z: np.vstack([x, z]), lambda x, z: ops.concat(x, z)),
        (lambda x, z: np.vstack([x[0, 0], z[0]]), lambda x, z: ops.concat(x[0, :1], z[0])),
    ],
    np.expand_dims: [
        (lambda x, z: np.expand_dims(x, 1), lambda x, z: x[:, None]),
        (lambda x, z: np.expand_dims(x, (0, -1)), lambda x, z: x[None, ..., None]),
    ],
    np.squeeze: [
        (lambda x, z: np.squeeze(x[:1, :, :1]), lambda x, z: x[0, :, 0]),
        (lambda x, z: np.squeeze(x[:1, :, :1], axis=-1), lambda x, z: x[:1, :, 0]),
    ],
    np.moveaxis: [
        (lambda x, z: np.moveaxis(x, 0, -1), lambda x, z: x.transpose(1, 2, 0)),
        (lambda x, z: np.moveaxis(x, (0, 1), (1, 2)), lambda x, z: x.transpose(2, 0, 1)),
    ],
    np.ravel: [(lambda x, z: np.ravel(x), lambda x, z: x.reshape(-1))],
    np.flip: [
        (lambda x, z: np.flip(x, 1), lambda x, z: x[:, ::-1]),
        (lambda x, z: np.flip(x), lambda x, z: x[::-1, ::-1, ::-1]),
    ],
    np.repeat: [
        (lambda x, z: np.repeat(x, 2, axis=0), lambda x, z: x[[0, 0, 1, 1]]),
        (lambda x, z: np.repeat(x[0, 0], [2, 0, 1]), lambda x, z: x[0, 0][[0, 0, 2]]),
    ],
    np.tile: [(lambda x, z: np.tile(x[0], (1, 2)), lambda x, z: ops.concat(x[0], x[0], axis=1))],
    np.roll: [
        (lambda x, z: np.roll(x, 1, axis=1), lambda x, z: x[:, [2, 0, 1]]),
        (lambda x, z: np.roll(x, -1), lambda x, z: x.reshape(-1)[np.arange(1, 19) % 18].reshape(2, 3, 3)),
    ],
    np.rot90: [(lambda x, z: np.rot90(x[0]), lambda x, z: x[0].T[::-1])],
    np.fliplr: [(lambda x, z: np.fliplr(x), lambda x, z: x[:, ::-1])],
    np.flipud: [(lambda x, z: np.flipud(x), lambda x, z: x[::-1])],
    np.take: [
        (lambda x, z: np.take(x, [2, 2, 0], axis=1), lambda x, z: x[:, [2, 2, 0]]),
        (lambda x, z: np.take(x, [17, 0]), lambda x, z: x.reshape(-1)[[17, 0]]),
    ],
    np.take_along_axis: [
        (
            lambda x, z: np.take_along_axis(x, np.array([[[2], [0], [1]]]), axis=-1),
            lambda x, z: x[:, [0, 1, 2], [2, 0, 1]][..., None],
        )
    ],
    np.delete: [(lambda x, z: np.delete(x, 1, axis=2), lambda x, z: x[..., [0, 2]])],
    np.diagonal: [(lambda x, z: np.diagonal(x, axis1=1, axis2=2), lambda x, z: x[:, [0, 1, 2], [0, 1, 2]])],
    np.trace: [(lambda x, z: np.trace(x[0]), lambda x, z: (x[0] * np.eye(3)).sum())],
    np.sort: [
        (
            lambda x, z: np.sort(x, axis=1),
            lambda x, z: ops.stack(x.min(1), x.sum(1) - x.min(1) - x.max(1), x.max(1), axis=1),
        ),
        (lambda x, z: np.sort(x, axis=None)[[0, -1]], lambda x, z: ops.stack(x.min(), x.max())),
    ],
    np.diff: [
        (lambda x, z: np.diff(x), lambda x, z: x[..., 1:] - x[..., :-1]),
        (lambda x, z: np.diff(x, n=2, axis=1), lambda x, z: (x[:, 2] - 2 * x[:, 1] + x[:, 0])[:, None]),
    ],
    np.column_stack: [
        (lambda x, z: np.column_stack([x[0], z[1, 0]]), lambda x, z: ops.concat(x[0], z[1, 0][:, None], axis=1)),
    ],
    np.atleast_1d: [(lambda x, z: np.atleast_1d(x[0, 0, 0]), lambda x, z: x[0, 0, :1])],
    np.atleast_2d: [(lambda x, z: np.atleast_2d(x[0, 0]), lambda x, z: x[0, :1])],
    np.pad: [
        (
            lambda x, z: np.pad(x[0], ((1, 0), (0, 2)), constant_values=0.3),
            lambda x, z: ops.concat(ops.concat(np.full((1, 3), 0.3), x[0]), np.full((4, 2), 0.3), axis=1),
        ),
    ],
    np.tril: [(lambda x, z: np.tril(x, -1), lambda x, z: x * np.tri(3, k=-1))],
    np.triu: [(lambda x, z: np.triu(x), lambda x, z: x * np.tri(3).T)],
    np.outer: [(lambda x, z: np.outer(x[0, 0], z), lambda x, z: x[0, 0][:, None] * z.reshape(-1))],
    np.split: [(lambda x, z: np.split(x, 3, axis=1)[1], lambda x, z: ops.split(x, 3, 1)[1])],
    np.einsum: [
        (lambda x, z: np.einsum("bij,bkj->bik", x, z), lambda x, z: x @ z.mT),
        (
            lambda x, z: np.einsum("bij,bkj,b->ik", x, z, z[:, 0, 0], optimize=True),
            lambda x, z: ops.einsum("bij,bkj,b->ik", x, z, z[:, 0, 0]),
        ),
    ],
    np.dot: [
        (lambda x, z: np.dot(x[0], z[1]), lambda x, z: x[0] @ z[1]),
        (lambda x, z: np.dot(x[0, 0], z[1]), lambda x, z: x[0, 0] @ z[1]),
    ],
}
PLAIN_FUNCTIONS = {
    np.argmax: lambda x: np.argmax(x, axis=1),
    np.argmin: lambda x: np.argmin(x, axis=1, keepdims=True),
    np.argsort: lambda x: np.argsort(x, axis=1),
    np.allclose: lambda x: np.allclose(x, np.ones((2, 3, 5)), rtol=0.1),
    np.isclose: lambda x: np.isclose(x, np.ones((2, 3, 5)), rtol=0.1),
    np.array_equal: lambda x: np.array_equal(x, x),
    np.zeros_like: np.zeros_like,
    np.ones_like: np.ones_like,
    np.full_like: lambda x: np.full_like(x, 0.5),
    np.shape: np.shape,
    np.ndim: np.ndim,
    np.size: np.size,
}


@pytest.mark.parametrize("ufunc", UFUNC_COUNTERPARTS, ids=lambda ufunc: ufunc.__name__)
@claim
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, min_side=0, max_side=3), seeds)
def test_numpy_ufuncs_equal_their_counterparts(ufunc, broadcast, seed):
    shapes = ((2, 3), (3, 2)) if ufunc is np.matmul else broadcast.input_shapes
    xs = [positive(shape, seed + i) for i, shape in enumerate(shapes[: ufunc.nin])]
    value, g, *grads = gradients(ufunc, *xs)
    close(value, ufunc(*xs))
    for one, other in zip(grads, gradients(UFUNC_COUNTERPARTS[ufunc], *xs, g=g)[2:], strict=True):
        close(one, other)
    if ufunc.nin == 2:  # with a plain array on either side
        for i in range(2):
            mixed = [Tensor(x, requires_grad=True) if i == j else x for j, x in enumerate(xs)]
            y = ufunc(*mixed)
            assert type(y) is Tensor
            y.backward(g)
            close(mixed[i].grad, grads[i])


@pytest.mark.parametrize("function", FUNCTION_COUNTERPARTS, ids=lambda function: function.__name__)
def test_numpy_functions_equal_their_counterparts(function):
    x, z = positive((2, 3, 3), 1), positive((2, 3, 3), 2)
    for numpys, ours in FUNCTION_COUNTERPARTS[function]:
        a, b, c, d = (Tensor(v, requires_grad=True) for v in (x, z, x, z))
        y, ours_too = numpys(a, b), ours(c, d)
        assert type(y) is Tensor
        close(y.numpy(), numpys(x, z))
        close(ours_too.numpy(), numpys(x, z))
        g = numbers(y.shape, 3)
        y.backward(g)
        ours_too.backward(g)
        for one, other in ((a, c), (b, d)):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                close(one.grad, other.grad)


@pytest.mark.parametrize("function", PLAIN_FUNCTIONS, ids=lambda function: function.__name__)
def test_numpy_functions_without_a_derivative_give_plain_values(function):
    x = positive((2, 3, 5), 1)
    result = PLAIN_FUNCTIONS[function](Tensor(x, requires_grad=True))
    assert not isinstance(result, Tensor)
    np.testing.assert_array_equal(result, PLAIN_FUNCTIONS[function](x))


@pytest.mark.parametrize("ufunc", COMPARISONS, ids=lambda ufunc: ufunc.__name__)
def test_numpy_comparisons_give_plain_arrays(ufunc):
    x = np.array([-1.0, 0.0, np.inf, np.nan])
    operands = (x, np.zeros(4))[: ufunc.nin]
    result = ufunc(*(Tensor(v, requires_grad=True) for v in operands))
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, ufunc(*operands))


def test_every_supported_numpy_function_is_tested_here():
    assert set(UFUNC_COUNTERPARTS) == set(UFUNCS)
    assert set(FUNCTION_COUNTERPARTS) | set(PLAIN_FUNCTIONS) == set(FUNCTIONS)
    assert set(PLAIN_FUNCTIONS) == set(PLAIN)


@pytest.mark.parametrize(
    "f", [np.arctan, np.median, np.add.reduce, np.unique, lambda x: np.add(x, x, where=[True, False])]
)
def test_unsupported_numpy_functions_raise_instead_of_detaching(f):
    with pytest.raises(TypeError):
        f(Tensor(np.ones(2), requires_grad=True))
