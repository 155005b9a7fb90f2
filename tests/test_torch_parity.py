"""Values and gradients equal torch's: random expressions over all primitives, and single operations at their edges."""

from __future__ import annotations

import collections
import functools
import math
import operator

import numpy as np
import pytest
from expressions import BUILDERS, FUNCTIONS, Step, Value, expression

import tinygrad_mha as tg
from tinygrad_mha import engine, ops

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # torch warns for empty arrays too
F = torch.nn.functional


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads slow down operations on small arrays."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SEEDS = 640
CHUNK = 40
PRIMITIVES = {name for name, op in ops.REGISTRY.items() if op.forward.__module__.startswith("tinygrad_mha.")}

# --------------------------------------------------------------------------------------------------------------------
# The functions of an expression, in torch


def arithmetic(function):
    """Boolean constants count as 0 and 1; torch does not subtract them."""

    def number(x):
        return x.long() if getattr(x, "dtype", None) is torch.bool else x

    return lambda a, b: function(number(a), number(b))


def reduced(function):
    """A torch reduction with NumPy's axes: torch reads the empty tuple as all axes."""

    def call(x, *, axis, keepdims, **options):
        dims = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        if dims:
            return function(x, dims, keepdims, **options)
        return function(x[None], (0,), False, **options)

    return call


def positions(shape, index):
    """The indices into x.reshape(-1) of the elements that NumPy's `x[index]` selects."""
    return torch.tensor(np.array(np.arange(math.prod(shape)).reshape(shape)[index]))


def torch_scatter_add(values, *, index, shape):
    places = positions(shape, index).reshape(-1)
    return values.new_zeros(math.prod(shape)).index_add(0, places, values.reshape(-1)).reshape(shape)


def torch_softmax(x, *, axis):
    dead = (x == -math.inf).all(axis, keepdim=True)
    return torch.where(dead, 0.0, torch.softmax(torch.where(dead, 0.0, x), axis))


def torch_cross_entropy(logits, targets, *, ignore_index, label_smoothing, reduction):
    flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if reduction == "none":
        return F.cross_entropy(*flat, reduction="none", **options).reshape(targets.shape)
    counted = max(1, int((targets != ignore_index).sum())) if reduction == "mean" else 1
    return F.cross_entropy(*flat, reduction="sum", **options) / counted


def torch_attention(q, k, v, allow=None, bias=None, keep_mask=None, *, scale):
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if allow is not None:
        scores = torch.where(allow, scores, -math.inf)
    weights = torch_softmax(scores, axis=-1)
    return (weights if keep_mask is None else weights * keep_mask) @ v


def torch_multi_head_attention(q, k, v, allow=None, bias=None, keep_mask=None, *, n_head):
    q, k, v = (x.unflatten(-1, (n_head, -1)).transpose(-2, -3) for x in (q, k, v))
    return torch_attention(q, k, v, allow, bias, keep_mask, scale=None).transpose(-2, -3).flatten(-2)


def torch_self_attention(qkv, *masks, n_head):
    return torch_multi_head_attention(*qkv.chunk(3, dim=-1), *masks, n_head=n_head)


def torch_layer_norm(x, weight=None, bias=None, *, eps):
    y = F.layer_norm(x, x.shape[-1:], weight, None, eps)
    return y if bias is None else y + bias  # torch has no second derivative for a bias without a weight


def torch_rotate(x, *, angles):
    a, b = x.chunk(2, dim=-1)
    angles = torch.tensor(angles, dtype=x.dtype)
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


THEIRS = {
    "add": arithmetic(operator.add),
    "sub": arithmetic(operator.sub),
    "mul": arithmetic(operator.mul),
    "div": operator.truediv,
    "dropout": lambda x, keep_mask: x * keep_mask,
    "pow": operator.pow,
    "neg": torch.neg,
    "scale": lambda x, *, by: x * by,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "sin": torch.sin,
    "cos": torch.cos,
    "cumsum": lambda x, *, axis: torch.cumsum(x, axis),
    "logsumexp": reduced(lambda x, dims, keepdim: torch.logsumexp(x, dims, keepdim)),
    "rotate": torch_rotate,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": lambda x, *, tanh: F.gelu(x, approximate="tanh" if tanh else "none"),
    "abs": torch.abs,
    "clip": lambda x, *, min, max: torch.clamp(x, min, max),
    "where": torch.where,
    "mask": lambda scores, allow: torch.where(allow, scores, -math.inf),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "sum": reduced(torch.sum),
    "mean": reduced(torch.mean),
    "var": reduced(lambda x, dims, keepdim, ddof=0: torch.var(x, dims, correction=ddof, keepdim=keepdim)),
    "std": reduced(lambda x, dims, keepdim, ddof=0: torch.std(x, dims, correction=ddof, keepdim=keepdim)),
    "norm": reduced(lambda x, dims, keepdim: torch.linalg.vector_norm(x, 2, dims, keepdim)),
    "max": reduced(torch.amax),
    "min": reduced(torch.amin),
    "reshape": lambda x, *, shape: x.reshape(shape),
    "transpose": lambda x, *, axes: x.permute(tuple(range(x.ndim))[::-1] if axes is None else axes),
    "mT": lambda x: x.mT,
    "swapaxes": lambda x, *, axis1, axis2: torch.swapaxes(x, axis1, axis2),
    "broadcast_to": lambda x, *, shape: torch.broadcast_to(x, shape),
    "cast": None,  # to the dtype that the expression is computed in, see run_theirs
    "concat": lambda *xs, axis: torch.cat(xs, axis),
    "stack": lambda *xs, axis: torch.stack(xs, axis),
    "split": lambda x, *, parts, axis, piece: torch.tensor_split(x, parts, axis)[piece],
    "getitem": lambda x, *, index: x.reshape(-1)[positions(x.shape, index)],
    "scatter_add": torch_scatter_add,
    "take": lambda weight, ids: weight[ids],
    "matmul": torch.matmul,
    "vectors": torch.matmul,
    "linear": lambda x, weight, bias=None: F.linear(x, weight.mT, bias),
    "einsum": lambda *xs, subscripts: torch.einsum(subscripts, *xs),
    "softmax": torch_softmax,
    "log_softmax": lambda x, *, axis: torch.log_softmax(x, axis),
    "cross_entropy": torch_cross_entropy,
    "layer_norm": torch_layer_norm,
    "rms_norm": lambda x, weight=None, *, eps: F.rms_norm(x, x.shape[-1:], weight, eps),
    "attention": torch_attention,
    "multi_head_attention": torch_multi_head_attention,
    "self_attention": torch_self_attention,
}

# --------------------------------------------------------------------------------------------------------------------
# An expression in both libraries


def constant(x, dtype):
    """A constant operand: floating arrays are converted to the dtype of the expression."""
    return x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x


def torch_constant(x, dtype):
    x = constant(x, dtype)
    return torch.as_tensor(x) if isinstance(x, np.ndarray) else x.item() if isinstance(x, np.generic) else x


def leaf_array(leaf, dtype):
    other = np.float32 if dtype == np.float64 else np.float64
    return leaf.array.astype(other if leaf.foreign else dtype)


def run_ours(e, dtype):
    return e.run(
        {**FUNCTIONS, "cast": lambda x, **_: ops.cast(x, dtype=dtype)},
        lambda leaf: tg.Tensor(leaf_array(leaf, dtype), requires_grad=True),
        lambda x: constant(x, dtype),
    )


def run_theirs(e, dtype):
    working = torch.float32 if dtype == np.float32 else torch.float64
    return e.run(
        {**THEIRS, "cast": lambda x, **_: x.to(working, copy=True)},
        lambda leaf: torch.tensor(leaf_array(leaf, dtype), requires_grad=True),
        lambda x: torch_constant(x, dtype),
    )


def assert_close(ours, theirs, tolerance, what):
    """Equal within `tolerance` times the largest number in `theirs` (at least 1), with the same infinities."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape, f"{what}: shape {ours.shape}, torch has {theirs.shape}"
    assert ours.dtype == theirs.dtype, f"{what}: dtype {ours.dtype}, torch has {theirs.dtype}"
    scale = max(1.0, np.abs(theirs, where=np.isfinite(theirs), out=np.zeros_like(theirs)).max(initial=0))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale, err_msg=what)


def assert_parity(e, dtype, tolerance):
    """The value and the gradient of every line of the expression equal torch's."""
    ours, theirs = run_ours(e, dtype), run_theirs(e, dtype)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_close(a.numpy(), b.detach(), tolerance, f"value of %{i}")
    for b in theirs:
        if not b.is_leaf:
            b.retain_grad()
    cotangent = e.cotangent.astype(dtype)
    ours[-1].backward(cotangent)
    theirs[-1].backward(torch.as_tensor(cotangent))
    for i, (a, b) in reversed([*enumerate(zip(ours, theirs, strict=True))]):
        assert (a.grad is None) == (b.grad is None), f"gradient of %{i}: {a.grad}, torch has {b.grad}"
        if a.grad is not None:
            allowed = tolerance if a.dtype == dtype else max(tolerance, 1e-5)
            assert_close(a.grad, b.grad, allowed, f"gradient of %{i}")


def assert_second_order_parity(e, seed):
    """The gradient of <gradients, v> with respect to leaves and cotangent equals torch's, for random v."""
    rng = np.random.default_rng([seed, 2])
    ours, theirs = run_ours(e, np.float64), run_theirs(e, np.float64)
    leaves = [i for i, line in enumerate(e.program) if not isinstance(line, Step)]
    vs = [rng.standard_normal(ours[i].shape).astype(ours[i].dtype) for i in leaves]
    g, h = tg.Tensor(e.cotangent, requires_grad=True), torch.tensor(e.cotangent, requires_grad=True)

    firsts = tg.grad(ours[-1], [ours[i] for i in leaves], grad_output=g, create_graph=True)
    dot = sum((first.astype(np.float64) * v).sum() for first, v in zip(firsts, vs, strict=True))
    seconds = tg.grad(dot, [*(ours[i] for i in leaves), g])

    options = {"allow_unused": True, "materialize_grads": True}
    xs = [theirs[i] for i in leaves]
    their_firsts = torch.autograd.grad(theirs[-1], xs, h, create_graph=True, **options)
    their_dot = sum((first.double() * torch.as_tensor(v)).sum() for first, v in zip(their_firsts, vs, strict=True))
    their_dot = their_dot + 0 * h.sum()  # torch refuses a number that depends on nothing, as that of empty arrays
    their_seconds = torch.autograd.grad(their_dot, [*xs, h], **options)

    for i, a, b in zip([*leaves, "the cotangent"], seconds, their_seconds, strict=True):
        b = b + torch.zeros(b.shape, dtype=b.dtype)  # torch's symbolic zeros do not convert to NumPy
        assert_close(a.numpy(), b, 1e-10 if a.dtype == np.float64 else 1e-5, f"second gradient of {i}")


def for_each(seeds, check):
    """Call `check(expression, seed)`, and add the program to any error."""
    for seed in seeds:
        e = expression(seed)
        try:
            check(e, seed)
        except Exception as error:
            error.add_note(f"in the expression of seed {seed}:\n{e}")
            raise


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_random_expressions_and_all_their_gradients_equal_torch(start):
    for_each(range(start, start + CHUNK), lambda e, seed: assert_parity(e, np.float64, 1e-10))


@pytest.mark.parametrize("start", range(0, 160, CHUNK))
def test_second_derivatives_of_random_expressions_equal_torch(start):
    for_each(range(start, start + CHUNK), assert_second_order_parity)


@pytest.mark.parametrize("start", range(0, 160, CHUNK))
def test_float32_expressions_stay_float32_and_equal_torch(start):
    for_each(range(start, start + CHUNK), lambda e, seed: assert_parity(e, np.float32, 1e-5))


# --------------------------------------------------------------------------------------------------------------------
# Coverage of the expressions


def nodes_of(e):
    """The nodes of our graph that the output of an expression depends on."""
    output = run_ours(e, np.float64)[-1]
    return [value.node for value in engine.toposort([output]) if value.node is not None]


def features(e):
    """Names of the special cases in an expression, one for each step that has it."""
    uses = collections.Counter()
    for step in e.program:
        if not isinstance(step, Step):
            continue
        values = [x for x in step.operands if isinstance(x, Value)]
        uses.update({x.position for x in values})
        shapes = [x.shape for x in values]
        axis, index = step.keywords.get("axis"), step.keywords.get("index")
        parts = index if isinstance(index, tuple) else (index,)
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        yield from (
            name
            for name, shown in {
                "a 0-d operand": () in shapes,
                "an empty operand": any(0 in shape for shape in shapes),
                "the same operand twice": len({x.position for x in values}) < len(values),
                "a negative axis": isinstance(axis, int) and axis < 0,
                "a tuple of axes": isinstance(axis, tuple),
                "keepdims": step.keywords.get("keepdims", False),
                "broadcast in front": step.name in BROADCASTING and len({len(shape) for shape in shapes}) > 1,
                "broadcast in the middle": step.name in BROADCASTING and stretched(shapes),
                "broadcast batches": step.name == "matmul" and len({shape[:-2] for shape in shapes}) > 1,
                "a vector in a product": step.name == "vectors",
                "an ellipsis": any(part is ... for part in parts),
                "a new axis": "index" in step.keywords and any(part is None for part in parts),
                "a negative step": any(isinstance(part, slice) and (part.step or 1) < 0 for part in parts),
                "a boolean mask": any(part.dtype == bool for part in arrays),
                "an integer array": any(part.dtype != bool for part in arrays),
                "repeated places": any(part.dtype != bool and repeats(part) for part in arrays),
            }.items()
            if shown
        )
    yield from ("a value used by several steps" for count in uses.values() if count > 1)


BROADCASTING = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "where")


def stretched(shapes):
    common = np.broadcast_shapes(*shapes)
    return any(n == 1 and m > 1 for shape in shapes for n, m in zip(shape[::-1], common[::-1], strict=False))


def repeats(places):
    return len(np.unique(places)) < places.size


def test_every_primitive_has_a_counterpart_in_torch_and_is_used_many_times():
    assert set(BUILDERS) >= PRIMITIVES, f"tests/expressions.py cannot build {PRIMITIVES - set(BUILDERS)}"
    assert set(THEIRS) >= set(BUILDERS), f"no torch counterpart for {set(BUILDERS) - set(THEIRS)}"
    used = collections.Counter(node.op.name for seed in range(SEEDS) for node in nodes_of(expression(seed)))
    rare = {name: used[name] for name in PRIMITIVES if used[name] < 60}
    assert not rare, f"primitives that the expressions hardly reach: {rare}"


def test_the_expressions_cover_special_cases():
    seen = collections.Counter(name for seed in range(SEEDS) for name in features(expression(seed)))
    rare = {name: count for name, count in seen.items() if count < 20}
    assert len(seen) == 17
    assert not rare

    lengths, depths, alive, largest = [], [], [], []
    for seed in range(SEEDS):
        e = expression(seed)
        values = run_ours(e, np.float64)
        values[-1].backward(e.cotangent)
        depth = collections.defaultdict(int)
        order = engine.toposort([values[-1]])
        for value in order:
            if value.node is not None:
                depth[id(value)] = 1 + max(depth[id(value.node.inputs[i])] for i in value.node.needed)
        gradients = [value.grad.ravel() for value in order if value.node is None]
        lengths.append(len(order))
        depths.append(max(depth.values()))
        alive.extend(np.concatenate(gradients) != 0)
        largest.append(max(np.abs(g).max(initial=0) for g in gradients))
    assert np.mean(lengths) > 20
    assert np.mean(depths) > 7
    assert np.mean(alive) > 0.75
    assert 0.1 < np.median(largest) < 10
    assert max(largest) < 1000


def assert_all_agree(es):
    for e in es:
        assert_parity(e, np.float64, 1e-10)


@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_a_rule_that_is_wrong_by_a_thousandth_is_detected(name, monkeypatch):
    """If the rules of one primitive are 0.1 % too large, an expression that uses it disagrees with torch."""
    op = ops.REGISTRY[name]
    using = [e for e in map(expression, range(200)) if any(isinstance(s, Step) and s.name == name for s in e.program)]

    def wrong(rule, *arguments, **keywords):
        answers = rule(*arguments, **keywords)
        if isinstance(answers, tuple):
            return tuple(None if answer is None else 1.001 * answer for answer in answers)
        return 1.001 * answers

    for attribute in ("each_rule", "joint_rule"):
        if getattr(op, attribute) is not None:
            monkeypatch.setattr(op, attribute, functools.partial(wrong, getattr(op, attribute)))
    if op.rules is not None:
        monkeypatch.setattr(op, "rules", tuple(rule and functools.partial(wrong, rule) for rule in op.rules))
    with pytest.raises(AssertionError, match="gradient of"):
        assert_all_agree(using)


# --------------------------------------------------------------------------------------------------------------------
# Edge cases of single operations


def assert_same(ours, theirs, *arrays, tolerance=1e-10, cotangent=None):
    """The value, and the gradients of all arrays, for a random cotangent."""
    xs = [tg.Tensor(x, requires_grad=True) for x in arrays]
    ts = [torch.tensor(x, requires_grad=True) for x in arrays]
    y, z = ours(*xs), theirs(*ts)
    assert_close(y.numpy(), z.detach(), tolerance, "value")
    g = np.random.default_rng(5).uniform(0.5, 1.5, y.shape) if cotangent is None else cotangent
    y.backward(g)
    z.backward(torch.as_tensor(g, dtype=z.dtype))
    for i, (x, t) in enumerate(zip(xs, ts, strict=True)):
        assert_close(x.grad, t.grad, tolerance, f"gradient of argument {i}")


TIED = np.array([[2.0, 5.0, 5.0], [5.0, -1.0, 2.0], [-1.0, -1.0, -1.0], [5.0, 0.0, 5.0], [0.0, -0.0, -7.0]])


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1), (-1, 0)])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [(ops.max, torch.amax), (ops.min, torch.amin)])
def test_ties_of_max_and_min_share_evenly_as_in_amax(ours, theirs, axis, keepdims):
    dims = (0, 1) if axis is None else axis
    assert_same(lambda x: ours(x, axis=axis, keepdims=keepdims), lambda x: theirs(x, dims, keepdims), TIED)


@pytest.mark.parametrize(("ours", "theirs"), [(ops.maximum, torch.maximum), (ops.minimum, torch.minimum)])
def test_ties_of_maximum_and_minimum_share_evenly(ours, theirs):
    assert_same(ours, theirs, TIED, TIED[:, ::-1].copy())
    assert_same(ours, theirs, TIED, TIED[1])
    assert_same(lambda x: ours(x, x), lambda x: theirs(x, x), TIED)
    assert_same(lambda x: ours(x, 5.0), lambda x: theirs(x, x.new_tensor(5.0)), TIED)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 2.0), (None, 2.0), (0.0, None), (5.0, 5.0), (2.0, -1.0)])
def test_clip_at_its_limits_equals_clamp(low, high):
    assert_same(lambda x: ops.clip(x, min=low, max=high), lambda x: torch.clamp(x, low, high), TIED)


def test_derivatives_at_kinks_equal_torch():
    x = np.array([-2.0, -0.0, 0.0, 3.0])
    assert_same(ops.relu, torch.relu, x)
    assert_same(ops.abs, torch.abs, x)
    assert_same(ops.sqrt, torch.sqrt, np.array([0.0, 4.0]))
    rows = np.array([[0.0, 0.0], [3.0, 4.0]])
    assert_same(lambda x: ops.norm(x, axis=1), lambda x: torch.linalg.vector_norm(x, dim=1), rows)
    assert_same(lambda x: ops.std(x, axis=1), lambda x: torch.std(x, 1, correction=0), rows)
    assert_same(lambda x: ops.std(x, axis=0, ddof=1), lambda x: torch.std(x, 0), np.array([[2.0, 1.0], [2.0, 3.0]]))
    assert_same(lambda x: ops.var(x, axis=1), lambda x: torch.var(x, 1, correction=0), rows[:, :1])


def test_powers_at_base_zero_equal_torch():
    base = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0])
    exponent = np.array([0.0, 0.5, 1.0, 2.0, 3.5, 0.0, -1.5])
    assert_same(operator.pow, operator.pow, base, exponent)
    assert_same(lambda b: 0.0**b, lambda b: 0.0**b, exponent[:5])
    for whole in (0, 1, 2, 3, 2.0, -1, -2):
        x = np.array([-3.0, -0.5, 2.0]) if whole < 0 else np.array([-3.0, -0.0, 0.0, 2.0])
        assert_same(lambda x, n=whole: x**n, lambda x, n=whole: x**n, x)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_equals_torch_for_large_inputs(tanh, dtype):
    far = [0.0, 1e-30, 1e-8, 0.5, 3.0, 5.9, 6.1, 8.0, 10.0, 12.0, 21.657723, 39.0, 41.0, 1e4]
    x = np.array([*far, *(-v for v in far)], dtype)
    assert_same(
        lambda x: ops.gelu(x, tanh=tanh),
        lambda x: F.gelu(x, approximate="tanh" if tanh else "none"),
        x,
        tolerance=1e-14 if dtype == np.float64 else 1e-6,
        cotangent=np.ones(x.shape),
    )
    huge = tg.Tensor(np.array([1e30, -1e30, 3e38, -3e38], dtype), requires_grad=True)
    y = ops.gelu(huge, tanh=tanh)
    y.backward(np.ones(4))
    np.testing.assert_array_equal(y.numpy(), np.maximum(huge.numpy(), 0))
    np.testing.assert_array_equal(huge.grad, [1, 0, 1, 0])


@pytest.mark.parametrize(
    ("ours", "theirs"), [(ops.erf, torch.erf), (ops.sigmoid, torch.sigmoid), (ops.tanh, torch.tanh)]
)
def test_saturating_functions_equal_torch_to_machine_precision(ours, theirs):
    x = np.concatenate([np.linspace(-8, 8, 2001), [-1e3, -40.0, -1e-300, 1e-12, 40.0, 1e3, 1e300]])
    t = torch.tensor(x, requires_grad=True)
    z = theirs(t)
    np.testing.assert_allclose(ours(x), z.detach(), rtol=2e-15, atol=0 if ours is not ops.erf else 1e-300)
    z.backward(torch.ones_like(z))
    leaf = tg.Tensor(x, requires_grad=True)
    ours(leaf).backward(np.ones(x.shape))
    np.testing.assert_allclose(leaf.grad, t.grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_softmax_and_log_softmax_with_minus_infinity_equal_torch(axis):
    x = np.random.default_rng(3).standard_normal((5, 3))
    x[np.array([0, 1, 3, 4, 4]), np.array([1, 0, 2, 0, 1])] = -np.inf
    assert_same(lambda x: ops.softmax(x, axis=axis), lambda x: torch.softmax(x, axis), x)
    assert_same(lambda x: ops.log_softmax(x, axis=axis), lambda x: torch.log_softmax(x, axis), x)
    big = np.array([[1e4, -1e4, 9999.0], [1e300, 1e300, -1e300]])
    assert_same(lambda x: ops.softmax(x, axis=axis), lambda x: torch.softmax(x, axis), big)


def test_a_row_of_minus_infinity_has_softmax_zero_and_gradient_zero():
    x = tg.Tensor(np.full((2, 3), -np.inf), requires_grad=True)
    y = ops.softmax(x)
    y.backward(np.arange(6.0).reshape(2, 3))
    assert not y.numpy().any()
    assert not x.grad.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignored", [-100, 2, -1])
def test_cross_entropy_equals_torch(reduction, smoothing, ignored):
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((2, 5, 7)) * 30
    targets = rng.integers(0, 7, (2, 5))
    targets[0, 1] = targets[1, 3] = ignored
    options = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": reduction}
    assert_same(
        lambda x: ops.cross_entropy(x, targets, **options),
        lambda x: F.cross_entropy(x.movedim(-1, 1), torch.as_tensor(targets), **options),
        logits,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_with_excluded_classes_equals_torch(reduction):
    logits = np.array([[0.3, -np.inf, 1.7], [-np.inf, -np.inf, 2.0], [1e4, -1e4, 0.0]])
    targets = np.array([2, 2, 1])
    assert_same(
        lambda x: ops.cross_entropy(x, targets, reduction=reduction),
        lambda x: F.cross_entropy(x, torch.as_tensor(targets), reduction=reduction),
        logits,
    )


def test_cross_entropy_of_no_targets_is_zero_where_torch_has_nan():
    x = tg.Tensor(np.random.default_rng(0).standard_normal((3, 5)), requires_grad=True)
    loss = ops.cross_entropy(x, np.full(3, -100), label_smoothing=0.1)
    loss.backward()
    assert loss.item() == 0
    assert not x.grad.any()


ROWS = {
    "usual": np.random.default_rng(11).standard_normal((2, 3, 5)),
    "constant": np.full((3, 5), 7.0),
    "zeros": np.zeros((3, 5)),
    "a small spread far from zero": np.array([[1e6, 1e6 + 1, 1e6 + 2, 1e6 + 4, 1e6 - 1]]),
    "of one element": np.array([[-3.0], [0.1], [4.0]]),
    "no rows": np.zeros((0, 5)),
}


@pytest.mark.parametrize("rows", ROWS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_normalizations_equal_torch(rows, eps):
    x = ROWS[rows]
    n = x.shape[-1]
    weight, bias = np.random.default_rng(1).standard_normal((2, n))
    assert_same(lambda x: ops.layer_norm(x, eps=eps), lambda x: F.layer_norm(x, (n,), None, None, eps), x)
    assert_same(
        lambda x, w, b: ops.layer_norm(x, w, b, eps=eps),
        lambda x, w, b: F.layer_norm(x, (n,), w, b, eps),
        x,
        weight,
        bias,
    )
    assert_same(lambda x: ops.rms_norm(x, eps=eps), lambda x: F.rms_norm(x, (n,), None, eps), x)
    assert_same(lambda x, w: ops.rms_norm(x, w, eps=eps), lambda x, w: F.rms_norm(x, (n,), w, eps), x, weight)


def heads(*shapes, dtype=np.float64):
    rng = np.random.default_rng(13)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


ALLOW = {
    "causal": np.tri(5, 7, k=2, dtype=bool),
    "random": np.random.default_rng(17).random((2, 3, 5, 7)) < 0.6,
    "padding": np.arange(7) < np.array([4, 7])[:, None, None, None],
    "dead rows": np.arange(5)[:, None] > np.array([1] * 7),
}


@pytest.mark.parametrize("allow", ALLOW, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("scale", [None, 0.7])
def test_attention_with_a_boolean_mask_equals_torch(allow, scale):
    mask = ALLOW[allow]
    assert_same(
        lambda q, k, v: ops.attention(q, k, v, mask, scale=scale),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.as_tensor(mask), scale=scale),
        *heads((2, 3, 5, 11), (2, 3, 7, 11), (2, 3, 7, 13)),
    )


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (3, 5, 7), (2, 1, 5, 1), (2, 3, 5, 7)])
def test_attention_with_a_float_bias_equals_torch_and_so_does_the_gradient_of_the_bias(shape):
    allow = ALLOW["random"]
    arrays = heads((2, 3, 5, 11), (2, 3, 7, 11), (2, 3, 7, 13), shape)
    expand = (2, 3, 5, 7)
    assert_same(
        lambda q, k, v, bias: ops.attention(q, k, v, None, bias),
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias.expand(expand)),
        *arrays,
    )
    assert_same(
        lambda q, k, v, bias: ops.attention(q, k, v, allow, bias),
        lambda q, k, v, bias: F.scaled_dot_product_attention(
            q, k, v, bias.expand(expand).masked_fill(~torch.as_tensor(allow), -math.inf)
        ),
        *arrays,
    )


def test_attention_equals_torch_in_float32_causally_and_with_shared_keys():
    allow = np.tri(5, dtype=bool)
    assert_same(
        lambda q, k, v: ops.attention(q, k, v, allow),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *heads((2, 3, 5, 11), (2, 3, 5, 11), (2, 3, 5, 13), dtype=np.float32),
        tolerance=1e-5,
    )
    # One head of keys and values for three of queries, broadcast.
    assert_same(
        lambda q, k, v: ops.attention(q, k, v, allow),
        lambda q, k, v: F.scaled_dot_product_attention(q, k.expand(2, 3, 5, 11), v.expand(2, 3, 5, 13), is_causal=True),
        *heads((2, 3, 5, 11), (2, 1, 5, 11), (2, 1, 5, 13)),
    )
    assert_same(
        lambda x: ops.attention(x, x, x, allow),
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        *heads((2, 3, 5, 11)),
    )


@pytest.mark.parametrize("table", [(7, 3), (7,), (7, 2, 3)])
@pytest.mark.parametrize("ids", [[3, 3, 0, 3], [[6, 0], [6, 6]], 5, []], ids=str)
def test_embeddings_with_repeated_ids_equal_torch(ids, table):
    ids = np.array(ids, dtype=np.int64)
    assert_same(
        lambda weight: ops.take(weight, ids),
        lambda weight: F.embedding(torch.as_tensor(ids), weight.reshape(7, -1)).reshape((*ids.shape, *table[1:])),
        *heads(table),
    )
