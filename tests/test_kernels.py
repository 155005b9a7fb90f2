"""The kernels, in NumPy and compiled, against float64 and against each other: awkward shapes and layouts, nan, inf."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import Tensor, kernels, nn, ops, optim
from tinygrad_mha.kernels import reference

pytestmark = pytest.mark.usefixtures("kind")  # both kinds of kernels

NAN, INF = math.nan, math.inf
SHAPES = [(), (1,), (0,), (3,), (0, 5), (7, 0), (1, 13), (2, 3, 101), (40_009,)]


def single(rng, *shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def layouts(x):
    """Arrays equal to x: in Fortran's order, of every second element, backwards, read-only, not aligned."""
    yield np.asfortranarray(x)
    yield np.repeat(x, 2, axis=-1)[..., ::2]
    yield np.flip(np.flip(x, 0).copy(), 0)
    constant = x.copy()
    constant.flags.writeable = False
    yield constant
    shifted = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    assert not shifted.flags.aligned
    yield shifted


def exact_gelu(x, tanh):
    """gelu and its derivative in float64."""
    y, phi = reference.gelu(x.astype(np.float64), tanh)
    return y, reference.gelu_vjp(np.ones(x.shape), phi, x.astype(np.float64), tanh)


def exact_softmax(scores, allow):
    e = np.exp(np.where(allow, scores, -INF).astype(np.float64) - np.where(allow, scores, -INF).max(-2, keepdims=True))
    return e / e.sum(-2, keepdims=True)


# --------------------------------------------------------------------------------------------------------------------
# GELU


@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_of_float32_is_within_two_units_of_float64(tanh):
    x = np.linspace(-12, 12, 40_009).astype(np.float32)
    y, phi = kernels.gelu(x, tanh)
    slope = kernels.gelu_vjp(np.ones_like(x), phi, x, tanh)
    exact, exact_slope = exact_gelu(x, tanh)
    assert y.dtype == slope.dtype == np.float32
    assert np.all(np.abs(y - exact) <= 2.4e-7 * np.maximum(1, np.abs(x)))
    assert np.abs(slope - exact_slope).max() <= (2.4e-6 if tanh else 2.4e-7)


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_accepts_every_shape_and_layout(rng, shape, tanh):
    x, g = single(rng, *shape), single(rng, *shape)
    exact, slope = exact_gelu(x, tanh)
    for a, b in zip(
        [x, *(layouts(x) if x.size and x.ndim else [])], [g, *(layouts(g) if x.size and x.ndim else [])], strict=True
    ):
        y, phi = kernels.gelu(a, tanh)
        g_x = kernels.gelu_vjp(b, phi, a, tanh)
        assert y.shape == g_x.shape == shape
        np.testing.assert_allclose(y, exact, rtol=0, atol=6e-7)
        np.testing.assert_allclose(g_x, g * slope, rtol=0, atol=4e-6)


@pytest.mark.parametrize("tanh", [False, True])
def test_a_gradient_in_another_layout_gets_the_same_derivative(rng, tanh):
    x, g = single(rng, 7, 13), single(rng, 13, 7).T
    _, phi = kernels.gelu(x, tanh)
    np.testing.assert_allclose(kernels.gelu_vjp(g, phi, x, tanh), g * exact_gelu(x, tanh)[1], rtol=0, atol=4e-6)


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_gelu_is_the_identity_far_to_the_right_and_zero_far_to_the_left(dtype, tanh):
    far = np.finfo(dtype).max
    x = np.array([far, -far, NAN, 6.0e4, -6.0e4, 0.0, -0.0], dtype)
    y, phi = kernels.gelu(x, tanh)
    np.testing.assert_array_equal(y, np.array([far, 0, NAN, 6.0e4, 0, 0, 0], dtype))
    slope = kernels.gelu_vjp(np.ones_like(x), phi, x, tanh)
    np.testing.assert_array_equal(slope, np.array([1, 0, NAN, 1, 0, 0.5, 0.5], dtype))
    assert y.dtype == slope.dtype == dtype


# --------------------------------------------------------------------------------------------------------------------
# Cross entropy


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_one_ignored_target_has_no_loss_and_no_gradient_even_if_its_logits_are_nan(reduction, smoothing):
    logits = Tensor(np.full((1, 5), NAN, np.float32), requires_grad=True)
    loss = ops.cross_entropy(logits, np.array([-100]), reduction=reduction, label_smoothing=smoothing)
    loss.backward(np.ones(loss.shape, np.float32))
    np.testing.assert_array_equal(loss.numpy(), np.zeros(loss.shape))
    np.testing.assert_array_equal(logits.grad, np.zeros((1, 5)))


@pytest.mark.parametrize("targets", [np.zeros((3, 7), int), np.full((3, 7), -100)])
def test_cross_entropy_does_not_write_to_its_logits(rng, targets):
    logits = rng.standard_normal((3, 7, 11))
    before = logits.copy()
    ops.cross_entropy(logits, targets)
    np.testing.assert_array_equal(logits, before)


# --------------------------------------------------------------------------------------------------------------------
# Layer norm


def exact_layer_norm(x, weight, bias, g):
    """The value and gradients in float64, through the composition."""
    tensors = [None if a is None else Tensor(a.astype(np.float64), requires_grad=True) for a in (x, weight, bias)]
    y = ops.layer_norm.composition(*tensors, eps=1e-5)
    y.backward(g.astype(np.float64))
    return y.data, *[None if t is None else t.grad for t in tensors]


def layer_norm(x, weight, bias, g):
    y, *residuals = kernels.layer_norm(x, weight, bias, 1e-5)
    g_x, g_weight, g_bias = kernels.layer_norm_vjp(g, *residuals, x, weight)
    axes = tuple(range(g.ndim - 1))
    return y, g_x, *[a if a is None or a.shape == x.shape[-1:] else a.sum(axes) for a in (g_weight, g_bias)]


@pytest.mark.parametrize("shape", [(3,), (1,), (0, 5), (7, 13), (2, 3, 101), (5, 1025)])
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, False), (False, True)])
def test_layer_norm_of_float32_equals_float64(rng, shape, given):
    weight, bias = (single(rng, shape[-1]) if is_given else None for is_given in given)
    x, g = 3 + single(rng, *shape), single(rng, *shape)
    expected = exact_layer_norm(x, weight, bias, g)
    for a, b in zip([x, *(layouts(x) if x.size else [])], [g, *(layouts(g) if x.size else [])], strict=True):
        for name, ours, exact in zip(
            ["y", "x", "weight", "bias"], layer_norm(a, weight, bias, b), expected, strict=True
        ):
            if exact is not None:
                np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5, err_msg=name)
                assert ours.dtype == np.float32


def test_layer_norm_takes_a_weight_that_broadcasts(rng):
    x, weight = single(rng, 5, 7), single(rng, 5, 1)
    y, _, _ = kernels.layer_norm(x, weight, weight[:1, 0], 1e-5)
    unit, _, _ = kernels.layer_norm(x, None, None, 1e-5)
    np.testing.assert_allclose(y, unit * weight + weight[0], atol=1e-6)


def test_a_weight_of_another_length_is_refused(rng):
    with pytest.raises(ValueError, match=r"layer_norm of \(5, 7\), \(6,\)"):
        ops.layer_norm(Tensor(single(rng, 5, 7)), Tensor(single(rng, 6)))


def test_a_row_with_nan_or_infinity_is_nan_and_no_other_row(rng):
    x = single(rng, 3, 17)
    x[0, 5], x[2, 3] = NAN, INF
    with np.errstate(invalid="ignore"):
        y, _, _ = kernels.layer_norm(x, None, None, 1e-5)
    assert np.isnan(y).all(-1).tolist() == [True, False, True]
    assert np.isfinite(y[1]).all()


def test_layer_norm_of_float16_does_not_overflow_in_its_sums(rng):
    x = (200 + single(rng, 3, 769, scale=30)).astype(np.float16)
    y, *_ = layer_norm(x, None, None, np.ones_like(x))
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, exact_layer_norm(x, None, None, np.ones_like(x))[0], atol=4e-3)


# --------------------------------------------------------------------------------------------------------------------
# Softmax of attention


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 7, 1), (2, 3, 33, 17), (0, 3, 5)])
def test_the_softmax_over_keys_equals_float64_under_every_mask(rng, shape):
    scores = single(rng, *shape, scale=3)
    whole = rng.random(shape) < 0.7
    whole[..., 0, :] = True  # each query sees a key
    shared = np.triu(np.ones(shape[-2:], bool))
    per_matrix = [np.ascontiguousarray(whole.any(-1, keepdims=True)), whole, whole[..., :1]]
    for allow in [shared, shared.T.copy().T, shared.reshape((1,) * (len(shape) - 2) + shared.shape), *per_matrix]:
        for layout in [scores.copy(), np.asfortranarray(scores)]:
            weights = kernels.softmax_over_keys(layout, allow)
            np.testing.assert_allclose(weights, exact_softmax(scores, allow), rtol=0, atol=3e-7)
            assert not weights[~np.broadcast_to(allow, shape)].any()
    np.testing.assert_allclose(kernels.softmax_over_keys(scores.copy(), None), exact_softmax(scores, True), atol=3e-7)


def test_a_query_without_keys_gets_zeros_and_nan_stays_in_its_query():
    scores = np.array([[1, -INF, NAN, 1, 100], [2, -INF, 3, NAN, -100], [3, -INF, 4, 5, 0]], np.float32)
    allow = np.ones_like(scores, bool)
    allow[:, 0] = False
    allow[1, 3] = False  # hides the nan
    weights = kernels.softmax_over_keys(scores, allow)
    assert not weights[:, :2].any()
    assert np.isnan(weights[:, 2]).all()
    np.testing.assert_allclose(weights[:, 3], [1 / (1 + math.e**4), 0, 1 / (1 + math.e**-4)], rtol=1e-6)
    np.testing.assert_allclose(weights[:, 4], [1, 0, 0], atol=1e-37)


def test_infinite_scores_make_nan():
    scores = np.array([[INF, 0], [0, 0]], np.float32)
    with np.errstate(invalid="ignore"):
        weights = kernels.softmax_over_keys(scores, None)
    assert np.isnan(weights[:, 0]).all()
    assert weights[:, 1].tolist() == [0.5, 0.5]


# --------------------------------------------------------------------------------------------------------------------
# Adam


def adam_in_float64(p, g, m, v, betas, keep, rate, root, eps):
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    return keep * p - rate * m / (root * np.sqrt(v) + eps), m, v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adam_writes_into_arrays_of_every_shape_and_layout(rng, shape, dtype):
    options = (0.9, 0.99), 0.999, 1e-2, 1.25, 1e-8
    arrays = [rng.standard_normal(shape).astype(dtype) for _ in range(3)] + [rng.random(shape).astype(dtype)]
    expected = adam_in_float64(*(a.astype(np.float64) for a in arrays), *options)
    makers = [np.array, lambda a: a.copy(order="F"), lambda a: np.repeat(a, 2, axis=-1)[..., ::2]]
    for make in makers if len(shape) else makers[:1]:
        p, m, v = (make(a) for a in (arrays[0], *arrays[2:]))
        kernels.adam(p, arrays[1], m, v, *options)
        for ours, exact in zip((p, m, v), expected, strict=True):
            tolerance = 1e-6 if dtype == np.float32 else 1e-14
            np.testing.assert_allclose(ours, exact, rtol=tolerance, atol=tolerance)


def test_a_nan_gradient_reaches_its_parameter_and_no_other():
    p, g, m, v = (np.ones(5, np.float32) for _ in range(4))
    g[3] = NAN
    kernels.adam(p, g, m, v, (0.9, 0.99), 1.0, 1e-2, 1.0, 1e-8)
    assert np.isnan(p).tolist() == np.isnan(m).tolist() == np.isnan(v).tolist() == [False, False, False, True, False]


# --------------------------------------------------------------------------------------------------------------------
# The choice


def test_steps_of_a_gpt_agree_between_the_kernels(monkeypatch, rng):
    pytest.importorskip("numba")
    losses = []
    idx = rng.integers(0, 11, (3, 8))
    for active in ("numpy", "numba"):
        monkeypatch.setattr(kernels, "active", active)
        model = nn.GPT(nn.GPTConfig(vocab_size=11, block_size=7, n_layer=2, n_head=2, n_embd=12), seed=0)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model.loss(idx[:, :-1], idx[:, 1:])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    np.testing.assert_allclose(losses[:5], losses[5:], rtol=1e-5)


def test_the_kernels_in_use_are_public():
    assert tg.kernels.active in ("numpy", "numba")
    assert tg.kernels is kernels


def test_numba_is_the_choice_where_it_is_installed(monkeypatch):
    installed = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed or None)
    assert kernels.choose_active(None) == kernels.choose_active("") == kernels.choose_active("numpy") == "numpy"
    with pytest.raises(ImportError, match=r'Numba is not installed: pip install "tinygrad_mha\[fast\]"'):
        kernels.choose_active("numba")
    installed.append("numba")
    assert kernels.choose_active(None) == kernels.choose_active("numba") == "numba"
    assert kernels.choose_active("numpy") == "numpy"
    with pytest.raises(ValueError, match=r"must be numpy or numba \(pip install .*\[fast\].*\), got 'cuda'"):
        kernels.choose_active("cuda")


@pytest.mark.parametrize("wanted", ["numpy", "numba"])
def test_the_environment_variable_chooses_when_the_package_is_imported(wanted):
    pytest.importorskip("numba")
    code = "import tinygrad_mha as tg; print(tg.kernels.active)"
    environment = os.environ | {"TINYGRAD_MHA_KERNELS": wanted}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == wanted


def test_a_numba_that_cannot_be_imported_is_named_with_what_to_do(monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "tinygrad_mha.kernels.compiled", None)
    monkeypatch.setattr(kernels, "import_compiled", functools.cache(kernels.import_compiled.__wrapped__))
    x = np.ones(3, np.float32)
    if kind == "numpy":
        kernels.gelu(x, False)
    else:
        with pytest.raises(ImportError, match=r"Numba cannot be imported: .* or set TINYGRAD_MHA_KERNELS=numpy"):
            kernels.gelu(x, False)


def test_loops_compile_where_no_folder_can_keep_them(monkeypatch):
    caching = pytest.importorskip("numba.core.caching")
    compile_loops = pytest.importorskip("tinygrad_mha.kernels.compiled").compile_loops
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    assert compile_loops(lambda x: x + 1)(2) == 3


def test_the_import_of_the_package_does_not_import_numba():
    code = "import sys, tinygrad_mha as tg; tg.ops.exp(tg.Tensor([1.0])); sys.exit('numba' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "TINYGRAD_MHA_KERNELS"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_the_error_function_is_never_beyond_1(kind):
    x = np.linspace(3, 4, 20_001, dtype=np.float32)
    assert np.abs(reference.erf(np.concatenate([x, -x]))).max() == 1.0
