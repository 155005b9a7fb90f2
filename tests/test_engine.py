"""The engine: deep graphs, memory, accumulation, shared memory, versions, modes, dtypes, copies, transforms."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import sys
import threading
import tracemalloc
import weakref

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import Tensor, engine, modes, ops


def leaf(rng, *shape, dtype=np.float64):
    return Tensor(rng.standard_normal(shape), requires_grad=True, dtype=dtype)


# --------------------------------------------------------------------------------------------------------- deep graphs


def test_a_chain_of_a_hundred_thousand_ops_runs_backward_and_is_freed():
    x = Tensor(1.0, requires_grad=True, dtype=np.float64)
    y = x
    for _ in range(100_000):
        y = y + 0.001 * x
    y.backward(leaves_only=True)
    assert x.grad == pytest.approx(101.0)
    alive = weakref.ref(y.node.inputs[0])
    del y
    assert alive() is None


def test_a_doubling_graph_of_two_to_the_sixtieth_paths_takes_sixty_steps():
    x = Tensor(1.0, requires_grad=True, dtype=np.float64)
    y = x
    for _ in range(60):
        y = y + y
    assert len(engine.toposort([y])) == 61
    y.backward()
    assert x.grad == 2.0**60


def test_higher_derivatives_of_a_long_chain_need_no_recursion():
    x = Tensor(0.5, requires_grad=True, dtype=np.float64)
    y = x
    for _ in range(3 * sys.getrecursionlimit()):
        y = y * 1.0001
    (first,) = tg.grad(y * y, x, create_graph=True)
    (second,) = tg.grad(first, x)
    assert second.item() == pytest.approx(2 * 1.0001 ** (6 * sys.getrecursionlimit()))


# -------------------------------------------------------------------------------------------------------------- memory


def test_an_intermediate_is_freed_without_the_garbage_collector(rng):
    gc.disable()
    try:
        w = leaf(rng, 3, 5)
        h = (Tensor(rng.standard_normal((2, 3))) @ w).tanh()
        loss = (h * h).mean()
        loss.backward()
        alive = weakref.ref(h)
        del h, loss
        assert alive() is None
    finally:
        gc.enable()


def test_an_unused_intermediate_is_freed_at_once_under_no_grad(rng):
    w = leaf(rng, 3, 3)
    with tg.no_grad():
        h = w @ w
        alive = weakref.ref(h)
        h = h @ w
        assert alive() is None


def test_memory_use_is_constant_over_two_thousand_steps(rng):
    w, x = leaf(rng, 7, 7), rng.standard_normal((5, 7))

    def step():
        w.grad = None
        ((x @ w).softmax() * (x @ w).tanh()).mean().backward()

    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(50):
            step()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(2000):
            step()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert after - before < 20_000  # bytes: less than ten a step


def test_a_graph_is_freed_if_an_error_occurs_before_backward(rng):
    gc.disable()
    try:
        w = leaf(rng, 3, 3)
        y = w @ w
        alive = weakref.ref(y)
        with pytest.raises(ValueError, match="shape"):
            y.backward(np.ones(2))
        del y
        assert alive() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------- accumulation


def test_x_times_x_has_two_edges(rng):
    x = leaf(rng, 3)
    y = x * x
    assert [t is x for t in y.node.inputs] == [True, True]
    y.backward(np.ones(3))
    np.testing.assert_array_equal(x.grad, 2 * x.numpy())


def test_backward_twice_is_exactly_twice(rng):
    w, x = leaf(rng, 3, 5), leaf(rng, 2, 3)
    y = (x @ w).softmax().tanh()
    g = rng.standard_normal((2, 5))
    y.backward(g)
    once = w.grad.copy(), x.grad.copy(), y.node.inputs[0].grad.copy()
    y.backward(g)
    np.testing.assert_array_equal(w.grad, 2 * once[0])
    np.testing.assert_array_equal(x.grad, 2 * once[1])
    np.testing.assert_array_equal(y.node.inputs[0].grad, once[2])  # intermediates are overwritten


def test_two_outputs_of_one_trunk_accumulate_in_the_leaves(rng):
    x = leaf(rng, 3)
    trunk = x.tanh()
    a, b = trunk * 2.0, trunk * trunk
    a.backward(np.ones(3))
    b.backward(np.ones(3))
    slope = 1 - np.tanh(x.numpy()) ** 2
    np.testing.assert_allclose(x.grad, slope * (2 + 2 * np.tanh(x.numpy())), rtol=1e-14)


def test_intermediate_gradients_are_readable_unless_leaves_only_is_set(rng):
    x = leaf(rng, 3)
    h = x.exp()
    y = h.sum()
    y.backward(leaves_only=True)
    assert h.grad is None
    assert y.grad is None
    y.backward()
    np.testing.assert_array_equal(h.grad, np.ones(3))
    assert y.grad.shape == ()


# ------------------------------------------------------------------------------------------------------- shared memory


def graph_with_every_kind_of_sharing(rng):
    x, y = leaf(rng, 3, 3), leaf(rng, 3, 3)
    parts = [x + y, x.T, x.reshape(9).reshape(3, 3), y[:, ::-1], y.broadcast_to((3, 3)), x - y, y.mT]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return [x, y, *parts, total], total


def test_gradients_share_no_memory_with_each_other_or_with_anything(rng):
    tensors, total = graph_with_every_kind_of_sharing(rng)
    g = rng.standard_normal((3, 3))
    total.backward(g)
    arrays = [t.grad for t in tensors] + [t._data for t in tensors[:2]] + [g]
    for i, a in enumerate(arrays):
        for b in arrays[:i]:
            assert not np.shares_memory(a, b)


def test_gradients_are_writable_arrays_of_the_tensors_own_dtype_and_shape(rng):
    for dtype in (np.float16, np.float32, np.float64):
        x, s = leaf(rng, 2, 3, dtype=dtype), leaf(rng, dtype=dtype)
        (x * s).sum().backward()
        for t in (x, s):
            assert type(t.grad) is np.ndarray
            assert t.grad.dtype == dtype
            assert t.grad.shape == t.shape
            t.grad += 1


def test_zero_dimensional_results_are_arrays(rng):
    x = leaf(rng, 3)
    y = x.sum() * 2.0 + 1.0
    for t in (y, *y.node.inputs[:1], x.mean(), x.max(), x[0], x.norm()):
        assert type(t.numpy()) is np.ndarray
        assert t.shape == ()
    y.backward()
    y.backward()
    assert type(x.grad) is np.ndarray


def test_arrays_of_the_caller_are_copied(rng):
    x, c, ids = leaf(rng, 2, 3), rng.standard_normal((2, 3)), np.array([0, 0, 1])
    y, z = x * c, x[ids]
    expected = c.copy()
    c[:] = 0
    ids[:] = 1
    y.backward(np.ones((2, 3)))
    np.testing.assert_array_equal(x.grad, expected)
    x.grad = None
    z.backward(np.ones((3, 3)))
    np.testing.assert_array_equal(x.grad, [[2, 2, 2], [1, 1, 1]])


def test_a_tensor_copies_its_data(rng):
    a = rng.standard_normal(3)
    x = Tensor(a)
    a[:] = 0
    assert x.numpy().all()


# ------------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("write", ["assign_", "data", "augmented"])
def test_a_leaf_written_to_after_use_stops_backward_before_anything_is_stored(write, rng):
    w, x = leaf(rng, 3, 3).named("W"), leaf(rng, 3, 3)
    y = (x @ w) * x
    if write == "assign_":
        w.assign_(np.ones((3, 3)))
    elif write == "data":
        w.data = np.ones((3, 3))
    else:
        w.data -= 0.1
    with pytest.raises(RuntimeError, match=r"'W'.*'matmul'.*'b'"):
        y.backward(np.ones((3, 3)))
    assert x.grad is None
    assert w.grad is None


@pytest.mark.parametrize(
    "view",
    [lambda w: w.T, lambda w: w.reshape(9), lambda w: w[1:], lambda w: w.detach(), lambda w: w.T.T.reshape(3, 3)],
    ids=["transpose", "reshape", "slice", "detach", "several"],
)
def test_views_share_the_version_of_their_base(view, rng):
    w = leaf(rng, 3, 3)
    seen = view(w)
    y = (seen * seen).sum() + (w.sum() * 0.0)
    w.assign_(np.zeros((3, 3)))
    with pytest.raises(RuntimeError, match="written to"):
        y.backward()


def test_copies_do_not_share_the_version(rng):
    w, x = leaf(rng, 3, 3), leaf(rng, 3)
    independent = (w.T * 1.0) @ w
    w.assign_(np.zeros((3, 3)))
    (x * x).sum().backward()
    with pytest.raises(RuntimeError):
        independent.sum().backward()
    loss = (w * w).sum()  # a graph made after the write is fine
    loss.backward()


def test_data_of_an_intermediate_cannot_be_written(rng):
    y = leaf(rng, 3).exp()
    with pytest.raises(ValueError, match="read-only"):
        y.data[1] = 2
    with pytest.raises(ValueError, match="read-only"):
        y.numpy()[1] = 2
    with pytest.raises(ValueError, match="computed"):
        y.assign_(np.ones(3))


def test_a_write_keeps_shape_and_dtype(rng):
    w = leaf(rng, 3, dtype=np.float32)
    w.data = np.arange(3)
    assert w.dtype == np.float32
    w.data = w.data - np.float64(0.1) * np.ones(3)
    assert w.dtype == np.float32


# ---------------------------------------------------------------------------------------------------------- grad mode


def test_no_grad_can_be_nested_and_is_restored_after_exceptions():
    def boom():
        with tg.no_grad(), tg.enable_grad(), tg.no_grad():
            assert not tg.is_grad_enabled()
            raise KeyError

    with pytest.raises(KeyError):
        boom()
    assert tg.is_grad_enabled()


def test_no_grad_decorates_recursive_functions_with_and_without_parentheses():
    @tg.no_grad
    def depth(n):
        assert not tg.is_grad_enabled()
        return 0 if n == 0 else 1 + depth(n - 1)

    @tg.no_grad()
    def mode():
        return tg.is_grad_enabled()

    assert depth(5) == 5
    assert mode() is False
    assert tg.is_grad_enabled()


def test_a_decorated_generator_does_not_change_the_mode_of_its_caller():
    @tg.no_grad()
    def steps():
        try:
            sent = yield tg.is_grad_enabled()
            yield (sent, tg.is_grad_enabled())
        finally:
            closed.append(tg.is_grad_enabled())

    closed = []
    generator = steps()
    assert tg.is_grad_enabled()
    assert next(generator) is False
    assert tg.is_grad_enabled()
    assert generator.send("hello") == ("hello", False)
    generator.close()
    assert closed == [False]
    assert tg.is_grad_enabled()


def test_a_decorated_generator_forwards_exceptions_and_its_return_value():
    @tg.no_grad()
    def steps():
        try:
            yield 1
        except KeyError:
            yield "caught"
        return "done"

    def outer():
        result = yield from steps()
        yield result

    generator = outer()
    assert next(generator) == 1
    assert generator.throw(KeyError()) == "caught"
    assert next(generator) == "done"


def test_each_thread_has_its_own_mode():
    seen = []
    with tg.no_grad():
        thread = threading.Thread(target=lambda: seen.append(tg.is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_threads_build_and_differentiate_graphs_independently(rng):
    x = leaf(rng, 5, 5)
    expected = tg.grad((x @ x).softmax().tanh().sum(), x)[0].numpy()
    wrong = []

    def work(off):
        for _ in range(50):
            if off:
                with tg.no_grad():
                    assert (x @ x).node is None
            elif not np.array_equal(tg.grad((x @ x).softmax().tanh().sum(), x)[0].numpy(), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_each_asyncio_task_has_its_own_mode():
    @tg.no_grad()
    async def off():
        await asyncio.sleep(0)
        return tg.is_grad_enabled()

    async def on():
        await asyncio.sleep(0)
        return tg.is_grad_enabled()

    async def both():
        return await asyncio.gather(off(), on(), off())

    assert asyncio.run(both()) == [False, True, False]


def test_record_keeps_nodes_of_inference_without_gradients(rng):
    x = Tensor(rng.standard_normal((2, 3)))
    assert (x @ x.T).node is None
    with tg.record(), tg.no_grad():
        y = x @ x.T
    assert y.node.op is ops.matmul
    assert not y.requires_grad
    with pytest.raises(ValueError, match="does not require grad"):
        y.sum().backward()


def test_nodes_record_their_scope(rng):
    x = leaf(rng, 3)
    with modes.scope("outer"), modes.scope("inner"), tg.no_grad(), tg.enable_grad():
        y = x.exp()
    assert y.node.scope == ("outer", "inner")
    assert x.exp().node.scope == ()


# -------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scalars_of_python_and_numpy_are_weak(dtype):
    x = Tensor(np.ones(3, dtype), requires_grad=True)
    for number in (2, 2.0, True, np.float64(2), np.float32(2), np.int64(2), np.bool_(True)):
        for y in (x * number, number * x, x + number, number + x, x - number, number - x, x / number, number / x):
            assert y.dtype == dtype
        for y in (x**number, number**x, ops.maximum(x, number), np.add(number, x)):
            assert y.dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_integer_and_boolean_arrays_take_the_dtype_of_the_tensor(dtype):
    x = Tensor(np.ones(3, dtype), requires_grad=True)
    for array in (np.arange(1, 4), np.array([True, False, True])):
        for y in (x * array, array * x, x + array, array - x, x * (x > 0)):
            assert y.dtype == dtype
            y.backward(np.ones(3))
            assert x.grad.dtype == dtype


def test_lists_become_float32_and_arrays_keep_their_dtype():
    assert Tensor([1, 2]).dtype == np.float32
    assert Tensor(3).dtype == np.float32
    assert Tensor([1.5]).dtype == np.float32
    assert Tensor([True]).dtype == bool
    assert Tensor(np.array([1, 2])).dtype == np.int64
    assert Tensor(np.array([1.0])).dtype == np.float64
    assert Tensor(np.array([1.0]), dtype=np.float32).dtype == np.float32


def test_mixed_precision_gradients_have_the_dtype_of_their_leaf(rng):
    a, b = leaf(rng, 3, dtype=np.float32), leaf(rng, 3)
    y = a * b
    assert y.dtype == np.float64
    y.backward(np.ones(3))
    assert (a.grad.dtype, b.grad.dtype) == (np.float32, np.float64)


def test_astype_passes_the_gradient_between_floats_and_ends_it_at_integers(rng):
    x = leaf(rng, 3, dtype=np.float32)
    y = x.astype(np.float64)
    y.backward(np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(x.grad, np.array([1, 2, 3], np.float32))
    assert x.grad.dtype == np.float32
    assert not x.astype(np.int64).requires_grad
    assert x.astype(np.float32) is x


# ------------------------------------------------------------------------------------------------- NumPy and Python


@pytest.mark.parametrize("left", [np.ones(3), np.float64(2), np.float32(2), [1.0, 2.0, 3.0], 2.0], ids=str)
def test_an_array_or_scalar_on_the_left_of_an_operator_gives_a_tensor(left, rng):
    x = leaf(rng, 3)
    for y in (left + x, left - x, left * x, left / x, (np.abs(left) if not isinstance(left, list) else left) ** x):
        assert isinstance(y, Tensor)
        assert y.requires_grad
        assert y.dtype == np.float64


def test_comparisons_give_plain_arrays_and_hash_is_identity(rng):
    x, y = leaf(rng, 3), leaf(rng, 3)
    for result in (x > 0, x < y, x == y, x != 1, x >= 0, np.greater(x, 0), np.ones(3) > x):
        assert type(result) is np.ndarray
        assert result.dtype == bool
    assert len({x, y, x}) == 2


def test_length_iteration_truth_and_numbers(rng):
    x = leaf(rng, 2, 3)
    assert len(x) == 2
    assert [row.shape for row in x] == [(3,), (3,)]
    sum(row.sum() for row in x).backward()
    np.testing.assert_array_equal(x.grad, np.ones((2, 3)))
    assert float(Tensor([[2.5]])) == 2.5
    assert bool(Tensor(1.0))
    assert Tensor(2.5).item() == 2.5
    assert ["a", "b"][Tensor(np.array(1))] == "b"
    for bad in (lambda: bool(x), lambda: float(x), lambda: x.item()):
        with pytest.raises(ValueError):  # noqa: PT011 (three different messages)
            bad()
    with pytest.raises(TypeError):
        len(Tensor(1.0))


def test_repr_shows_values_shape_dtype_name_and_origin(rng):
    x = leaf(rng, 2, 3, dtype=np.float32).named("X")
    assert "shape=(2, 3), float32, name='X', leaf" in repr(x)
    assert "made by matmul" in repr(x @ x.T)
    assert "constant" in repr(Tensor(1.0))
    assert len(repr(Tensor(np.zeros(10**6)))) < 500


# ----------------------------------------------------------------------------------------------------- copy and pickle


def test_leaves_are_copied_and_pickled_with_their_gradient(rng):
    x = leaf(rng, 3).named("x")
    (x * x).sum().backward()
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        np.testing.assert_array_equal(y.numpy(), x.numpy())
        np.testing.assert_array_equal(y.grad, x.grad)
        assert (y.requires_grad, y.name, y.node) == (True, "x", None)
        assert not np.shares_memory(y.numpy(), x.numpy())
        assert not np.shares_memory(y.grad, x.grad)


# ---------------------------------------------------------------------------------------------------------- transforms


def test_grad_changes_no_grad_attribute_and_gives_zeros_for_independent_inputs(rng):
    x, y, z = leaf(rng, 3), leaf(rng, 3), leaf(rng, 2)
    gx, gz, gx2 = tg.grad((x * y).sum(), [x, z, x])
    np.testing.assert_array_equal(gx.numpy(), y.numpy())
    np.testing.assert_array_equal(gx2.numpy(), y.numpy())
    np.testing.assert_array_equal(gz.numpy(), np.zeros(2))
    assert x.grad is None
    assert y.grad is None
    assert isinstance(tg.grad(x.sum(), x), tuple)


def test_grad_with_respect_to_an_intermediate(rng):
    x = leaf(rng, 3)
    h = x.exp()
    (g,) = tg.grad((h * h).sum(), h)
    np.testing.assert_allclose(g.numpy(), 2 * h.numpy())


def test_grad_with_respect_to_something_unrecorded_raises(rng):
    x = Tensor(rng.standard_normal(3))
    with pytest.raises(ValueError, match="requires_grad"):
        tg.grad(x.sum(), x)


def test_third_derivative_of_a_quartic():
    x = Tensor(2.0, requires_grad=True, dtype=np.float64)
    y = x**4
    for expected in (32.0, 48.0, 48.0, 24.0, 0.0):
        (y,) = tg.grad(y, x, create_graph=True)
        assert y.item() == expected


def test_a_zero_cotangent_still_has_a_second_derivative():
    # d/dx of w * sqrt(x) at w = 0 is 0, but its derivative by w is 1 / (2 sqrt(x)).
    x, w = Tensor(4.0, requires_grad=True), Tensor(0.0, requires_grad=True)
    (first,) = tg.grad(w * x.sqrt(), x, create_graph=True)
    assert first.item() == 0
    assert tg.grad(first, w)[0].item() == 0.25


def test_jacobian_hessian_vjp_jvp_and_hvp_agree(rng):
    a = rng.standard_normal((5, 3))

    def f(x):
        return (Tensor(a) @ x).softmax()

    def loss(x):
        return (f(x) ** 2).sum() + x.tanh().sum()

    x, v, g = rng.standard_normal((3,)), rng.standard_normal((3,)), rng.standard_normal((5,))
    jacobian = tg.jacobian(f, x).numpy()
    p = f(Tensor(x)).numpy()
    np.testing.assert_allclose(jacobian, (np.diag(p) - np.outer(p, p)) @ a, rtol=1e-12)
    y, pull = tg.vjp(f, x)
    np.testing.assert_allclose(y.numpy(), p)
    np.testing.assert_allclose(pull(g)[0].numpy(), g @ jacobian, rtol=1e-12)
    y, dy = tg.jvp(f, x, v)
    np.testing.assert_allclose(dy.numpy(), jacobian @ v, rtol=1e-12)
    hessian = tg.hessian(loss, x).numpy()
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-14)
    np.testing.assert_allclose(tg.hvp(loss, x, v).numpy(), hessian @ v, rtol=1e-11)


def test_transforms_compose(rng):
    x = rng.standard_normal(3)
    third = tg.jacobian(
        lambda x: tg.grad(tg.grad((x**4).sum(), x, create_graph=True)[0].sum(), x, create_graph=True)[0], x
    )
    np.testing.assert_allclose(third.numpy(), np.diag(24 * x), rtol=1e-12)


def test_transforms_work_under_no_grad_and_restore_the_mode(rng):
    with tg.no_grad():
        assert tg.jacobian(lambda x: x * x, rng.standard_normal(3)).shape == (3, 3)
        assert tg.hvp(lambda x: (x**3).sum(), np.ones(2), np.ones(2)).numpy().tolist() == [6, 6]
        assert not tg.is_grad_enabled()


def test_jvp_of_several_inputs_and_of_a_linear_function(rng):
    a, b, da, db = (rng.standard_normal((3, 3)) for _ in range(4))
    _, dy = tg.jvp(lambda a, b: a @ b, [a, b], [da, db])
    np.testing.assert_allclose(dy.numpy(), da @ b + a @ db, rtol=1e-12)
    _, dy = tg.jvp(lambda a: a * 2.0, a, da)
    np.testing.assert_array_equal(dy.numpy(), 2 * da)
    with pytest.raises(ValueError, match="direction"):
        tg.jvp(lambda a: a, [a], [da, db])
    with pytest.raises(ValueError, match="shape"):
        tg.jvp(lambda a: a, [a], [da[0]])


def test_one_no_grad_object_serves_two_tasks():
    shared, seen = tg.no_grad(), []

    async def first(inside, leave):
        with shared:
            inside.set()
            await leave.wait()
        seen.append(tg.is_grad_enabled())

    async def second(inside, leave):
        await inside.wait()
        with shared, tg.enable_grad():
            leave.set()
            await asyncio.sleep(0)
            seen.append(tg.is_grad_enabled())
        seen.append(tg.is_grad_enabled())

    async def both():
        inside, leave = asyncio.Event(), asyncio.Event()
        await asyncio.gather(first(inside, leave), second(inside, leave))

    asyncio.run(both())
    assert seen == [True, True, True]
