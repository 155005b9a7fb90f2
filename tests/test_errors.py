"""Errors for bad input: raised early, with what was expected, what was given, and what to do."""

import copy
import functools
import operator
import pickle
import re
from contextlib import contextmanager

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import nn, ops, torch_names


def leaf(data, name=None):
    return tg.Tensor(np.array(data, np.float64), requires_grad=True, name=name)


def ones(*shape):
    return leaf(np.ones(shape))


@contextmanager
def refused(error, *words):
    """An error of this type whose message contains every one of `words`."""
    with pytest.raises(error) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


# --------------------------------------------------------------------------------------------------------------------
# The gradient that backward is given

BACKWARDS = {
    "backward": lambda y, g: y.backward(g),
    "grad": lambda y, g: tg.grad(y, y.node.inputs[0], grad_output=g),
    "grad, twice differentiable": lambda y, g: tg.grad(y, y.node.inputs[0], grad_output=g, create_graph=True),
}


@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 2), (1, 3), (1, 2, 3), (0,)])
def test_a_cotangent_of_another_shape_is_refused_even_if_it_would_broadcast(shape, how):
    with refused(ValueError, "(2, 3)", str(shape)):
        BACKWARDS[how](ones(2, 3) * 2, np.ones(shape))


@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize(
    ("g", "dtype"), [([1j, 1], "complex"), ([True, False], "bool"), (["a", "b"], "<U1"), ([None, None], "object")]
)
def test_a_cotangent_must_consist_of_real_numbers(g, dtype, how):
    with refused(TypeError, "real numbers", dtype):
        BACKWARDS[how](ones(2) * 2, g)


@pytest.mark.parametrize("g", [[1, 10], (1, 10), np.array([1, 10], np.int8), np.array([1, 10], np.float16)])
def test_a_cotangent_may_be_a_list_or_any_real_dtype(g):
    x = ones(2)
    (x * 2).backward(g)
    np.testing.assert_array_equal(x.grad, [2.0, 20.0])
    assert x.grad.dtype == np.float64


@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize("shape", [(2, 3), (2,), (0,)])
def test_several_elements_need_a_cotangent(shape, how):
    with refused(ValueError, str(shape), "grad=", "scalar"):
        BACKWARDS[how](ones(*shape) * 2, None)


# --------------------------------------------------------------------------------------------------------------------
# Nothing to differentiate


def under_no_grad():
    with tg.no_grad():
        return ones() * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: tg.Tensor(1.0),
        lambda: tg.Tensor(1.0) * 2 + np.ones(()),
        lambda: (ones() * 2).detach(),
        lambda: (ones() * 2).astype(int),
        under_no_grad,
    ],
)
def test_backward_without_a_recorded_graph_states_the_reason(make):
    with refused(ValueError, "does not require grad", "no_grad", "loss"):
        make().named("loss").backward()


@pytest.mark.parametrize("x", [tg.Tensor(1.0), np.ones(2), 1.0])
def test_the_gradient_with_respect_to_a_constant_is_refused(x):
    with refused(ValueError, "xs[1]", "requires_grad=True"):
        tg.grad(ones(), [ones(), x])


@pytest.mark.parametrize("data", [[1, 2], [True, False]])
def test_integers_and_booleans_cannot_require_grad(data):
    array = np.array(data)
    with refused(TypeError, "floating", str(array.dtype), "astype"):
        tg.Tensor(array, requires_grad=True)
    t = tg.Tensor(array)
    with refused(TypeError, "floating", str(array.dtype)):
        t.requires_grad = True
    assert not t.requires_grad
    with refused(TypeError, "floating"):
        tg.Tensor([1.0, 2.0], requires_grad=True, dtype=array.dtype)


@pytest.mark.parametrize("make", [lambda: ones(2) * 2, lambda: in_record(ones(2).detach())])
def test_requires_grad_of_a_computed_tensor_cannot_be_set(make):
    y = make()
    with refused(ValueError, "computed", "detach"):
        y.requires_grad = not y.requires_grad


def in_record(x):
    with tg.record():
        return x * 2


# --------------------------------------------------------------------------------------------------------------------
# Shapes that do not fit: the message names the operation and every shape

A, B = (2, 3), (5, 7)

OPERATORS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "matmul": operator.matmul,
}

MISFITS = {
    **{name: getattr(ops, name) for name in OPERATORS},
    "maximum": ops.maximum,
    "minimum": ops.minimum,
    "where": lambda a, b: ops.where(True, a, b),
    "mask": lambda a, b: ops.mask(a, b > 0),
    "linear": ops.linear,
    "concat": ops.concat,
    "stack": ops.stack,
    "einsum": lambda a, b: ops.einsum("ij,jk->ik", a, b),
    "layer_norm": ops.layer_norm,
    "rms_norm": ops.rms_norm,
    "attention": lambda a, b: ops.attention(a, b, b),
    "cross_entropy": lambda a, b: ops.cross_entropy(a, np.zeros(b.shape, int)),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("make", [ones, lambda *shape: np.ones(shape)], ids=["tensors", "arrays"])
def test_mismatched_operands_are_reported_with_their_operation(make, name):
    with refused(ValueError, name, str(A), str(B)):
        MISFITS[name](make(*A), make(*B))


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_report_mismatched_operands_in_order(name):
    for a, b in ((ones(*A), ones(*B)), (ones(*A), np.ones(B)), (np.ones(A), ones(*B))):
        with refused(ValueError, name, f"{A}, {B}"):
            OPERATORS[name](a, b)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x.reshape(4, 2), ["reshape", "(2, 3)", "(4, 2)"]),
        (lambda x: x.broadcast_to(2, 5), ["broadcast_to", "(2, 3)", "(2, 5)"]),
        (lambda x: x.transpose(0, 1, 2), ["transpose", "(2, 3)", "(0, 1, 2)"]),
        (lambda x: x[2], ["getitem", "(2, 3)", "index=2", "size 2"]),
        (lambda x: x[0, 0, 0], ["getitem", "(2, 3)", "too many indices"]),
        (lambda x: x[np.ones(5, bool)], ["getitem", "(2, 3)"]),
        (lambda x: x["a"], ["getitem", "(2, 3)"]),
        (lambda x: ops.split(x, 2, axis=1), ["axis 1", "length 3", "2 equal parts"]),
        (lambda x: x.sum(axis=2), ["sum", "(2, 3)", "axis 2"]),
        (lambda x: x @ 2.0, ["@", "(2, 3)", "()"]),
        (lambda x: x[0].mT, ["mT", "(3,)"]),
        (lambda x: x.item(), ["one element", "(2, 3)"]),
        (lambda x: bool(x), ["6 elements", "ambiguous", ".any()"]),
        (lambda x: x[:0].max(), ["max", "(0, 3)"]),
    ],
)
def test_shapes_that_a_method_cannot_handle_are_reported(call, words):
    with refused((ValueError, IndexError), *words):
        call(ones(2, 3))


def test_matmul_of_vectors_recommends_the_operator():
    for a, b in ((ones(3), ones(3, 2)), (ones(2, 3), ones(3)), (np.ones(3), np.ones(3))):
        with refused(ValueError, "matmul", str(a.shape), str(b.shape), "two or more axes", "a @ b"):
            ops.matmul(a, b)


@pytest.mark.parametrize("call", [len, iter, lambda x: x[0]])
def test_a_0d_tensor_has_neither_length_nor_elements(call):
    with refused((TypeError, IndexError), "()"):
        call(ones())


def test_only_an_integer_tensor_is_an_index():
    with refused(TypeError, "integer", "float64"):
        range(ones())
    assert range(tg.Tensor(np.array(3))) == range(3)


# --------------------------------------------------------------------------------------------------------------------
# Primitives of the user


@pytest.mark.usefixtures("own_primitives")
@pytest.mark.parametrize("how", ["grad", "grad, twice differentiable"])
def test_a_missing_rule_is_reported_with_how_to_give_one(how):
    @ops.primitive
    def cube(x):
        return x * x * x

    y = cube(ones(2))
    np.testing.assert_array_equal(y.data, [1.0, 1.0])
    for call in (y.backward, lambda g: BACKWARDS[how](y, g)):
        with refused(TypeError, "'cube'", "no derivative rule", "vjps"):
            call([1.0, 1.0])


@pytest.mark.usefixtures("own_primitives")
@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize(
    ("wrong", "returned"),
    [
        (lambda g: g[0], "(3,)"),
        (lambda g: g.T, "(3, 2)"),
        (lambda g: g.sum(axis=0, keepdims=True), "(1, 3)"),
        (lambda g: g.sum(), "()"),
        (lambda g: ops.concat(g, g), "(4, 3)"),
        (lambda g: ops.stack(g, g, axis=-1), "(2, 3, 2)"),
    ],
)
def test_a_rule_that_returns_a_wrong_shape_is_reported_with_its_argument(wrong, returned, how):
    @ops.primitive
    def plus(first, second):
        return first + second

    plus.vjps(lambda g, y, first, second: wrong(g), lambda g, y, first, second: g)
    y = plus(ones(2, 3), ones(2, 3))
    with refused(ValueError, "'plus'", "'first'", returned, "expected (2, 3)"):
        BACKWARDS[how](y, np.ones((2, 3)))


@pytest.mark.usefixtures("own_primitives")
def test_a_wrong_shape_from_a_variadic_or_joint_rule_is_reported():
    @ops.primitive
    def total(*terms):
        return sum(terms)

    total.vjp_each(lambda i, g, y, *terms: g if i < 2 else g[:1])

    @ops.primitive
    def pair(a, b):
        return a + b

    pair.vjp_joint(lambda g, y, a, b: (g, g[:1]))

    with refused(ValueError, "'total'", "'terms[2]'", "(1,)", "expected (2,)"):
        total(ones(2), ones(2), ones(2)).sum().backward()
    with refused(ValueError, "'pair'", "'b'", "(1,)", "expected (2,)"):
        pair(ones(2), ones(2)).sum().backward()
    with refused(TypeError, "'pair'", "joint rule", "composition"):
        tg.grad(pair(*[x := ones(2), ones(2)]).sum(), x, create_graph=True)


@pytest.mark.usefixtures("own_primitives")
def test_a_tensor_that_needs_a_gradient_is_refused_as_an_argument_without_derivative():
    @ops.primitive
    def blend(x, amount):
        return x * amount

    blend.vjps(lambda g, y, x, amount: g * amount, None)
    for call in (lambda: blend(ones(2), ones(2)), lambda: blend(np.ones(2), ones(2))):
        with refused(TypeError, "'amount'", "'blend'", "no derivative", "detach"):
            call()
    assert not blend(np.ones(2), ones(2).detach()).requires_grad
    with refused(TypeError, "'condition'", "'where'", "no derivative"):
        ops.where(ones(2), ones(2), 0.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: ops.scale(ones(2), by=t),
        lambda t: ops.clip(ones(2), min=t),
        lambda t: ones(2).clip(max=t),
        lambda t: ops.layer_norm(ones(2), eps=t),
        lambda t: ops.attention(ones(2, 3), ones(2, 3), ones(2, 3), scale=t),
    ],
)
def test_a_tensor_that_needs_a_gradient_is_refused_as_a_keyword(call):
    with refused(TypeError, "constant", "detach"):
        call(ones())
    assert call(ones().detach()).requires_grad


def test_a_tensor_as_the_keyword_of_plain_arrays_is_refused_too():
    with refused(TypeError, "detach"):
        ops.scale(np.ones(2), by=ones())


@pytest.mark.usefixtures("own_primitives")
def test_rules_that_do_not_match_the_arguments_are_refused_at_once():
    @ops.primitive
    def two(left, right, *, power=1):
        return left**power + right

    for rules in ((), (None,), (None, None, None)):
        with refused(TypeError, "'two'", "2 rules", "left", "right", f"got {len(rules)}"):
            two.vjps(*rules)

    @ops.primitive
    def many(*xs):
        return sum(xs)

    with refused(TypeError, "'many'", "vjp_each"):
        many.vjps(lambda g, y, *xs: g)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ops.add(x), ["add", "('a', 'b')", "missing ('b',)"]),
        (lambda x: ops.add(x, x, x), ["add", "3 were given"]),
        (lambda x: ops.exp(x, base=2), ["exp", "(2,)", "base"]),
        (lambda x: ops.scale(x), ["scale", "'by'"]),
        (lambda x: ops.sum(x, axes=0), ["sum", "axes"]),
        (lambda x: ops.attention(x), ["attention", "'k', 'v'"]),
    ],
)
def test_unknown_arguments_of_a_primitive_are_named(call, words):
    for x in (ones(2), np.ones(2)):
        with refused(TypeError, *words):
            call(x)


def test_unsupported_numpy_keywords_are_named():
    for keyword in ({"dtype": np.float32}, {"initial": 1.0}, {"out": np.empty(())}):
        with refused(TypeError, "sum", *keyword):
            np.sum(ones(2), **keyword)


def test_a_primitive_cannot_take_the_name_of_another(own_primitives):
    known = own_primitives["add"]
    with refused(ValueError, "'add'", "tinygrad_mha.ops", "another name"):

        @ops.primitive
        def add(a, b):
            return a + b

    assert ops.REGISTRY["add"] is known is ops.add


def test_a_primitive_may_be_defined_again_in_the_same_module(own_primitives):
    def declare():
        @ops.primitive
        def mine(x):
            return x

        return mine

    assert declare() is not declare()
    assert own_primitives["mine"].name == "mine"


# --------------------------------------------------------------------------------------------------------------------
# A backward that fails changes no gradient


@pytest.fixture
def broken(own_primitives):
    """Primitives whose backward fails in different ways."""

    @ops.primitive
    def misshapen(x):
        return x * 1.0

    misshapen.vjps(lambda g, y, x: g[:1])

    @ops.primitive
    def raising(x):
        return x * 1.0

    @raising.vjps
    def raising_vjp(g, y, x):
        raise ZeroDivisionError("in the rule")

    @ops.primitive
    def ruleless(x):
        return x * 1.0

    return {"misshapen": misshapen, "raising": raising, "ruleless": ruleless}


@pytest.mark.parametrize(
    ("name", "error"), [("misshapen", ValueError), ("raising", ZeroDivisionError), ("ruleless", TypeError)]
)
@pytest.mark.parametrize("leaves_only", [True, False])
def test_a_failed_backward_changes_no_gradient(name, error, leaves_only, broken):
    fresh, used, behind = ones(3), ones(3), ones(3)
    (used * 2).sum().backward()
    h = fresh * used
    h.sum().backward()
    before = [(t.grad, None if t.grad is None else t.grad.copy()) for t in (fresh, used, behind, h)]
    # The good branch is the newer one, so its gradients are complete before the broken one is reached.
    bad = broken[name](behind) * used
    y = (bad + h * h * fresh).sum()
    with pytest.raises(error):
        y.backward(leaves_only=leaves_only)
    for t, (array, values) in zip((fresh, used, behind, h), before, strict=True):
        assert t.grad is array
        np.testing.assert_array_equal(array, values)
    assert y.grad is bad.grad is None


def test_a_refused_cotangent_or_a_stale_graph_changes_no_gradient():
    x, w = ones(3), leaf([1.0, 2.0, 3.0], name="w")
    y = x * w
    y.backward([1, 1, 1])
    kept = x.grad
    with refused(ValueError, "(3,)"):
        y.backward([1, 1])
    w.assign_([0, 0, 0])
    with refused(RuntimeError, "'w'"):
        y.backward([1, 1, 1])
    assert x.grad is kept
    np.testing.assert_array_equal(kept, [1.0, 2.0, 3.0])


# --------------------------------------------------------------------------------------------------------------------
# Writing

WRITES = {
    "assign_": lambda x: x.assign_(np.zeros((2, 2))),
    "data": lambda x: setattr(x, "data", np.zeros((2, 2))),
    "an alias": lambda x: x.detach().assign_(np.zeros((2, 2))),
    "a view": lambda x: without_gradients(lambda: x.T).assign_(np.zeros((2, 2))),
    "a view of an alias": lambda x: x.detach()[1:].assign_(np.zeros((1, 2))),
}


def without_gradients(f):
    with tg.no_grad():
        return f()


USES = {
    "mul": lambda x: x * x,
    "matmul": lambda x: np.ones((5, 2)) @ x,
    "transpose": lambda x: x.T * 2.0,
    "softmax": lambda x: x.softmax(),
    "concat": lambda x: ops.concat(np.ones((5, 2)), x),
    "linear": lambda x: ops.linear(np.ones((5, 2)), x),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("op", USES)
def test_a_write_after_use_is_reported_with_tensor_and_operation(op, write):
    x = leaf([[1, 2], [3, 4]], name="W_Q")
    y = USES[op](x)
    WRITES[write](x)
    for call in (y.backward, lambda g: tg.grad(y, x, grad_output=g)):
        with refused(RuntimeError, "'W_Q'", "(2, 2)", repr(op), "run the forward again"):
            call(np.ones(y.shape))
    assert x.grad is None


def test_a_write_to_a_constant_tensor_after_use_is_reported_too():
    x, c = ones(2, 2), tg.Tensor(np.ones((2, 2)), name="c")
    y = (x * c).sum()
    c.assign_(np.zeros((2, 2)))
    with refused(RuntimeError, "'c'", "'mul'", "'b'"):
        y.backward()


@pytest.mark.parametrize("write", WRITES)
def test_writes_before_use_after_backward_or_elsewhere_are_allowed(write):
    x, other = ones(2, 2), ones(2, 2)
    for _ in range(2):
        y = (x * x).sum()
        WRITES[write](other)
        y.backward()
        WRITES[write](x)
    assert x.grad.any()


@pytest.mark.parametrize("by", ["assign_", "data"])
def test_a_refused_assignment_changes_nothing(by):
    def assign(t, array):
        return t.assign_(array) if by == "assign_" else setattr(t, "data", array)

    x, ids = tg.Tensor(np.ones((2, 3), np.float32)), tg.Tensor(np.array([1, 2]))
    for shape in ((3, 2), (3,), (1, 3), (), (2, 3, 1)):
        with refused(ValueError, "shape", "(2, 3)", str(shape)):
            assign(x, np.zeros(shape))
    for array in (np.full((2, 3), 1j), np.full((2, 3), "a"), np.full((2, 3), None)):
        with refused(TypeError, "dtype", str(array.dtype), "float32"):
            assign(x, array)
    with refused(TypeError, "float64", "int64"):
        assign(ids, [0.5, 1.5])
    np.testing.assert_array_equal(x.data, np.ones((2, 3)))
    np.testing.assert_array_equal(ids.data, [1, 2])
    for array in (np.zeros((2, 3)), [[0, 0, 0], [0, 0, 0]], tg.Tensor(np.zeros((2, 3)))):
        assign(x, array)
        assert x.dtype == np.float32
        assert not x.data.any()
    assign(ids, [3, 4])
    assert ids.dtype == np.int64


@pytest.mark.parametrize("assign", [lambda y: y.assign_([0, 0]), lambda y: setattr(y, "data", [0, 0])])
def test_a_computed_tensor_cannot_be_assigned_to(assign):
    y = (ones(2) * 2).named("h")
    with refused(ValueError, "'h'", "computed", "leaves"):
        assign(y)
    with refused(ValueError, "read-only", "copy"):
        y.detach().assign_([0, 0])
    np.testing.assert_array_equal(y.data, [2.0, 2.0])


def test_assigning_to_a_read_only_leaf_recommends_a_copy():
    t = tg.Tensor([1.0, 2.0]).broadcast_to(3, 2)
    with refused(ValueError, "read-only", "copy", "Tensor(t.numpy())"):
        t.assign_(np.zeros((3, 2)))
    tg.Tensor(t.numpy()).assign_(np.zeros((3, 2)))


def test_item_assignment_is_refused():
    x = ones(3)
    with refused(TypeError, "item assignment", "where", "assign_"):
        x[0] = 1.0
    with refused(TypeError, "item assignment"):
        x[1:] += 1.0
    np.testing.assert_array_equal(x.data, np.ones(3))


def test_in_place_operators_make_a_new_tensor():
    x = ones(3)
    y = x
    y += 1.0
    y *= 2.0
    assert y is not x
    np.testing.assert_array_equal(x.data, np.ones(3))
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, np.full(3, 2.0))


# --------------------------------------------------------------------------------------------------------------------
# NumPy


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: np.add(x, x, out=np.empty(3)), ["np.add", "out="]),
        (lambda x: np.exp(x, np.empty(3)), ["np.exp", "out="]),
        (lambda x: np.exp(np.ones(3), out=x), ["np.exp", "out="]),
        (lambda x: np.add(x, x, where=np.ones(3, bool)), ["np.add", "where="]),
        (lambda x: np.add(x, x, dtype=np.float32), ["np.add", "dtype="]),
        (lambda x: np.add.reduce(x), ["np.add.reduce"]),
        (lambda x: np.add.accumulate(x), ["np.add.accumulate"]),
        (lambda x: np.multiply.outer(x, x), ["np.multiply.outer"]),
        (lambda x: np.add.at(np.zeros(3), [0, 0, 1], x), ["np.add.at"]),
        (lambda x: operator.iadd(np.zeros(3), x), ["np.add", "out="]),
    ],
)
def test_the_special_forms_of_a_ufunc_are_refused(call, words):
    with refused(TypeError, *words, ".numpy()"):
        call(ones(3))


@pytest.mark.parametrize("name", ["arctan2", "logaddexp", "hypot", "floor"])
def test_an_unsupported_ufunc_is_refused_and_the_supported_ones_are_listed(name):
    ufunc = getattr(np, name)
    with refused(TypeError, f"np.{name}", "exp, ", "tanh", ".numpy()", "tg.ops.primitive"):
        ufunc(*[ones(3)] * ufunc.nin)


@pytest.mark.parametrize(
    "call",
    [np.median, np.unique, np.linalg.inv, np.cumprod, np.linalg.det, np.ptp],
)
def test_an_unsupported_function_is_refused_and_the_supported_ones_are_listed(call):
    with refused(TypeError, "concatenate", "einsum", "where", ".numpy()", "tg.ops.primitive"):
        call(ones(3, 3))


def test_the_refusal_names_the_function():
    with refused(TypeError, "np.cumprod"):
        np.cumprod(ones(3))


def test_functions_with_another_meaning_in_numpy_are_refused():
    with refused(TypeError, "ord", "1"):
        np.linalg.norm(ones(2, 3), 1)
    with refused(ValueError, "np.dot", "@"):
        np.dot(ones(2, 3, 5), np.ones((2, 5, 7)))
    with refused(TypeError, "None"):
        np.concatenate([ones(2, 3), ones(3)], axis=None)
    np.testing.assert_array_equal(np.dot([1.0, 1.0], ones(2, 3)).data, np.full(3, 2.0))
    np.testing.assert_allclose(np.linalg.norm(ones(2, 3), axis=1).data, np.full(2, 3**0.5))


@pytest.mark.parametrize(
    "convert",
    [
        np.asarray,
        np.array,
        np.ascontiguousarray,
        lambda x: np.asarray(x, dtype=np.float32),
        lambda x: np.array([x, x]),
        lambda x: np.zeros(3).__setitem__(slice(None), x),
        lambda x: np.testing.assert_array_equal(x, np.ones(3)),
    ],
)
def test_converting_a_tensor_that_needs_a_gradient_to_an_array_is_refused(convert):
    x = ones(3)
    for tensor in (x, x * 2):
        with refused(TypeError, "cut the graph", ".numpy()", ".detach()"):
            convert(tensor)
    convert(x.detach())


def test_the_array_of_a_constant_shares_its_memory_and_is_read_only():
    c = tg.Tensor([1.0, 2.0])
    assert np.shares_memory(np.asarray(c), c.data)
    with refused(ValueError, "read-only"):
        np.asarray(c)[0] = 3.0
    np.array(c)[0] = 3.0
    np.testing.assert_array_equal(c.data, [1.0, 2.0])


# --------------------------------------------------------------------------------------------------------------------
# Data of a tensor


@pytest.mark.parametrize(
    "data", [[ones(2), ones(2)], (ones(2),), [[1.0, ones()]], [tg.Tensor(1.0), 2.0], [[], [[tg.Tensor(1.0)]]]]
)
def test_a_list_of_tensors_is_refused_as_data(data):
    with refused(TypeError, "list of Tensors", "stack"):
        tg.Tensor(data)


def test_a_tensor_of_a_tensor_that_needs_a_gradient_is_refused():
    with refused(TypeError, "cut the graph", "detach", "astype"):
        tg.Tensor(ones(2))
    assert tg.Tensor(ones(2).detach(), requires_grad=True).requires_grad


NO_NUMBERS = {"<U3": "abc", "complex128": 1j, "object": {"a": 1}}


@pytest.mark.parametrize("dtype", NO_NUMBERS)
def test_data_must_be_numbers(dtype):
    for data in (NO_NUMBERS[dtype], [NO_NUMBERS[dtype]], np.array([NO_NUMBERS[dtype]])):
        with refused(TypeError, "numbers", dtype):
            tg.Tensor(data)


@pytest.mark.parametrize("dtype", NO_NUMBERS)
@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow])
def test_operands_must_be_numbers(op, dtype):
    for other in (NO_NUMBERS[dtype], np.array([NO_NUMBERS[dtype]])):
        with refused(TypeError, dtype):
            op(ones(2), other)
        with pytest.raises(TypeError):  # NumPy may raise first, with its own message
            op(other, ones(2))


def test_none_is_refused_as_data_and_as_an_operand():
    with refused(TypeError, "numbers", "NoneType"):
        tg.Tensor(None)
    with refused(TypeError, "add", "(2,)", "NoneType"):
        ones(2) + None


def test_ragged_lists_are_refused():
    with refused(ValueError, "rows have unequal lengths"):
        tg.Tensor([[1.0, 2.0], [3.0]])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_a_computed_tensor_recommends_detach(copied):
    y = (ones(2) * 2).named("h")
    with refused(TypeError, "'h'", "made by scale", "detach"):
        copied(y)
    copied(y.detach())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda xs: pickle.loads(pickle.dumps(xs)), lambda xs: [copy.copy(xs[0])] * 2]
)
def test_a_copy_of_a_leaf_has_its_gradient_and_name(copied):
    x = leaf([1, 2], name="x")
    (x * x).sum().backward()
    y, again = copied([x, x])
    assert y is again is not x
    assert (y.name, y.requires_grad, y.dtype) == ("x", True, np.float64)
    assert not np.shares_memory(y.data, x.data)
    assert not np.shares_memory(y.grad, x.grad)
    np.testing.assert_array_equal(y.grad, [2.0, 4.0])
    (y * y).sum().backward()
    np.testing.assert_array_equal(x.grad, [2.0, 4.0])


def test_unknown_attributes_of_a_tensor_cannot_be_set():
    with pytest.raises(AttributeError):
        ones(2).require_grad = True


# --------------------------------------------------------------------------------------------------------------------
# Ids, targets, masks, subscripts


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([[0, 1], [7, 2]], IndexError, ["ids[1, 0]", "is 7", "0 to 6"]),
        ([0, -1], IndexError, ["ids[1]", "is -1", "0 to 6"]),
        (7, IndexError, ["is 7", "0 to 6"]),
        (np.array([300]), IndexError, ["is 300"]),
        ([0.0, 1.0], TypeError, ["integers", "float64"]),
        ([True, False], TypeError, ["integers", "bool"]),
        (1.0, TypeError, ["integers", "float64"]),
        (ones(2), TypeError, ["integers", "float64"]),
    ],
)
def test_ids_outside_the_table_are_reported_with_their_index(ids, error, words):
    for table in (ones(7, 2), np.ones((7, 2))):
        with refused(error, "take", "(7, 2)", *words):
            ops.take(table, ids)


@pytest.mark.parametrize(
    ("targets", "ignore_index", "error", "words"),
    [
        ([-4], -1, IndexError, ["targets[0]", "is -4", "0 to 4", "-1, which is ignored"]),
        ([5], -100, IndexError, ["targets[0]", "is 5", "0 to 4"]),
        ([-1], -100, IndexError, ["targets[0]", "is -1", "-100, which is ignored"]),
        ([1.0], -100, TypeError, ["targets", "integers", "float64"]),
        ([[1]], -100, ValueError, ["(1, 5)", "(1, 1)", "targets (...)"]),
        ([1, 1], -100, ValueError, ["(1, 5)", "(2,)"]),
    ],
)
def test_a_target_outside_the_classes_is_reported_with_its_index(targets, ignore_index, error, words):
    """pytorch#12670: an invalid negative class was silently accepted."""
    for logits in (leaf(np.zeros((1, 5))), np.zeros((1, 5))):
        with refused(error, "cross_entropy", *words):
            ops.cross_entropy(logits, np.array(targets), ignore_index=ignore_index)
    assert ops.cross_entropy(leaf(np.zeros((1, 5))), np.array([-1]), ignore_index=-1).item() == 0.0


def test_the_options_of_cross_entropy_are_checked():
    with refused(ValueError, "'mean', 'sum' or 'none'", "'average'"):
        ops.cross_entropy(ones(1, 5), np.array([1]), reduction="average")
    for smoothing in (-0.1, 1.1):
        with refused(ValueError, "between 0 and 1", str(smoothing)):
            ops.cross_entropy(ones(1, 5), np.array([1]), label_smoothing=smoothing)


@pytest.mark.parametrize(
    "allow", [np.eye(2), np.eye(2, dtype=int), tg.Tensor(np.eye(2)), [[1.0, 0.0], [1.0, 1.0]], 1.0]
)
def test_a_mask_of_zeros_and_ones_is_refused(allow):
    """pytorch#21518: a float mask of ones was added to the scores rather than hiding keys."""
    for call in (
        lambda: ops.mask(ones(2, 2), allow),
        lambda: ops.attention(ones(2, 3), ones(2, 3), ones(2, 3), allow),
    ):
        with refused(TypeError, "allow", "boolean", "True = may be seen", "compare first"):
            call()


@pytest.mark.parametrize("allow", [True, [True, False, True], [[True], [False]], [[True, False, False]] * 2])
def test_boolean_masks_of_all_shapes_hide_the_same_keys_in_every_form(allow):
    q, k, v = (leaf(np.random.default_rng(i).normal(size=shape)) for i, shape in enumerate([(2, 5), (3, 5), (3, 7)]))
    full = np.broadcast_to(allow, (2, 3))
    expected = ops.softmax(ops.mask(q @ k.T * 5**-0.5, full)) @ v
    for given in (np.array(allow), tg.Tensor(np.array(allow)), full):
        y = ops.attention(q, k, v, given)
        np.testing.assert_allclose(y.data, expected.data, rtol=1e-12)
        (g,) = tg.grad((y * y).sum(), q, create_graph=True)
        np.testing.assert_allclose(g.data, tg.grad((expected * expected).sum(), q)[0].data, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: ops.einsum("ij,jk->ik", a), ["ij,jk->ik", "2 operands, got 1"]),
        (lambda a: ops.einsum("ij->ji", a, a), ["1 operands, got 2"]),
        (lambda a: ops.einsum("ijk->i", a), ["einsum", "(2, 3)"]),
        (lambda a: ops.einsum("ij->ix", a), ["einsum", "(2, 3)", "x"]),
        (lambda a: ops.einsum("ij,ij->", a, a.T), ["einsum", "(2, 3)", "(3, 2)"]),
        (lambda a: np.einsum("ij,jk->ik", a), ["2 operands, got 1"]),
    ],
)
def test_subscripts_that_do_not_match_the_operands_are_refused(call, words):
    with refused(ValueError, *words):
        call(ones(2, 3))


# --------------------------------------------------------------------------------------------------------------------
# Modes


@pytest.mark.parametrize("mode", [tg.no_grad, tg.enable_grad, tg.record])
def test_a_mode_decorates_functions_only(mode):
    async def tokens():
        yield 1

    for decorate in (mode, mode()):
        with refused(TypeError, mode.__name__, "asynchronous generators", "`with` inside"):
            decorate(tokens)
        for thing in (3, "text", ones(2), dict):
            with refused(TypeError, mode.__name__, "decorates functions"):
                decorate(thing)


def test_a_mode_decorates_a_coroutine():
    @tg.no_grad
    async def answer():
        return tg.is_grad_enabled()

    with pytest.raises(StopIteration) as stopped:
        answer().send(None)
    assert stopped.value.value is False
    assert tg.is_grad_enabled()


# --------------------------------------------------------------------------------------------------------------------
# Derivatives as functions


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tg.jvp(lambda a, b: a * b, [np.ones(2), np.ones(2)], [np.ones(2)]), ValueError, ["2 inputs", "1 dir"]),
        (lambda: tg.jvp(lambda a: a * a, np.ones(2), np.ones(3)), ValueError, ["(2,)", "(3,)"]),
        (lambda: tg.hvp(lambda a: (a * a).sum(), np.ones(2), np.ones(3)), ValueError, ["(2,)", "(3,)"]),
        (lambda: tg.jacobian(lambda a: a.numpy(), np.ones(2)), TypeError, ["must return a Tensor", "ndarray"]),
        (lambda: tg.hessian(lambda a: a * a, np.ones(2)), ValueError, ["(2,)", "scalar"]),
        (lambda: tg.vjp(lambda a: a * a, np.ones(2))[1](np.ones(3)), ValueError, ["(2,)", "(3,)"]),
        (lambda: tg.vjp(lambda a: a * a, np.array([1, 2])), TypeError, ["floating", "int64"]),
    ],
)
def test_unsuitable_directions_and_functions_are_refused(call, error, words):
    with refused(error, *words):
        call()


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (tg, "tensor", "use tg.Tensor(data)"),
        (tg, "cat", "use tg.ops.concat"),
        (tg, "manual_seed", "pass seed= or rng="),
        (tg, "exp", "use ops.exp(x)"),
        (ops, "cat", "use ops.concat"),
        (ops, "scaled_dot_product_attention", "use ops.attention"),
        (nn, "Parameter", "use tg.Tensor(array, requires_grad=True)"),
        (nn, "MultiheadAttention", "use nn.MultiHeadAttention"),
        (nn, "ModuleList", "use a list"),
    ],
)
def test_a_name_of_torch_is_answered_with_ours(module, name, hint):
    with pytest.raises(AttributeError) as error:
        getattr(module, name)
    assert hint in str(error.value)


def test_every_name_that_a_hint_recommends_exists():
    homes = {"tg": tg, "ops": ops, "nn": nn, "np": np}
    tables = {
        tg.Tensor: torch_names.METHODS,
        tg: torch_names.TOP_LEVEL,
        ops: torch_names.OPERATIONS,
        nn: torch_names.MODULES,
    }
    for home, hints in tables.items():
        for name, hint in hints.items():
            assert not hasattr(home, name), f"{name} exists: its hint is never shown"
            for owner, path in re.findall(r"\b(tg|ops|nn|np)\.((?:\w+\.)*\w+)", hint):
                functools.reduce(getattr, path.split("."), homes[owner])


def test_the_size_that_is_called_says_what_the_lengths_are():
    x = tg.Tensor(np.ones((2, 3)))
    assert x.size == 6
    with pytest.raises(TypeError, match=r"the lengths of the axes are x\.shape"):
        x.size(0)


def test_rows_of_unequal_lengths_are_to_be_padded():
    model = nn.Transformer(11, 7, d_model=6, n_head=2, n_layer=1, d_ff=5, max_len=7, seed=0)
    gpt = nn.GPT(nn.GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=8))
    for call in [
        lambda rows: model.loss(rows, [[1, 2], [1, 2]]),
        lambda rows: model.loss([[1, 2], [1, 2]], rows),
        model.generate,
        gpt,
        tg.Tensor,
        lambda rows: ops.take(np.ones((5, 2)), rows),
    ]:
        with refused(ValueError, "the rows have unequal lengths", "pad the shorter ones"):
            call([[3, 4], [3]])


@pytest.mark.parametrize("name", ["add_", "mul_", "relu_", "sub_"])
def test_a_method_in_place_is_answered_with_assign(name):
    with pytest.raises(AttributeError, match=r"no operation changes a tensor in place; assign_\(array\)"):
        getattr(tg.Tensor([1.0]), name)


@pytest.mark.parametrize("read", [np.from_dlpack, "torch.from_dlpack", "torch.as_tensor", "torch.tensor"], ids=str)
def test_another_library_gets_a_copy_and_never_a_tensor_with_a_graph(read):
    if isinstance(read, str):
        read = getattr(pytest.importorskip("torch"), read.removeprefix("torch."))
    x = leaf([1.0, 2.0])
    with refused(TypeError, "would cut the graph", ".detach()"):
        read(x)
    constant = x.detach()
    copied = read(constant)
    assert np.array_equal(np.asarray(copied), [1.0, 2.0])
    if not isinstance(copied, np.ndarray):
        copied[0] = 7.0
    assert np.array_equal(constant.numpy(), [1.0, 2.0])


@pytest.mark.parametrize("attend", [nn.attention, ops.attention, ops.attend])
def test_an_attention_of_width_0_is_refused(attend):
    with refused(ValueError, "d_k, the width of queries and keys, must be at least 1", "(3, 0)"):
        attend(ones(3, 0), ones(5, 0), ones(5, 7))
