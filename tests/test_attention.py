"""Attention computes its formula, refuses bad input with a reason, and exposes every matrix and its gradient."""

import copy
import functools
import itertools
import math
import runpy
from pathlib import Path

import numpy as np
import pytest

from tinygrad_mha import Tensor, gradcheck, hvp, nn, no_grad, ops
from tinygrad_mha.engine import toposort
from tinygrad_mha.nn.positions import Position, alibi, alibi_slopes, as_position, relative_buckets, rotary, sinusoidal

B, H, T_Q, T_K, D_K, D_V = 2, 3, 5, 7, 11, 13


def tensors(rng, *shapes):
    return [Tensor(rng.standard_normal(shape), requires_grad=True) for shape in shapes]


def qkv(rng, front=(B, H)):
    return tensors(rng, (*front, T_Q, D_K), (*front, T_K, D_K), (*front, T_K, D_V))


def by_hand(q, k, v, allow=None, bias=None, scale=None):
    """The formula in plain NumPy, one query at a time."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    allow = np.broadcast_to(True if allow is None else allow, (*q.shape[:-1], k.shape[-2]))
    bias = np.broadcast_to(0.0 if bias is None else bias, allow.shape)
    for place in np.ndindex(q.shape[:-1]):
        front, seen = place[:-1], np.flatnonzero(allow[place])
        if seen.size:
            scores = k[front][seen] @ q[place] * (q.shape[-1] ** -0.5 if scale is None else scale) + bias[place][seen]
            weights = np.exp(scores - scores.max())
            out[place] = weights / weights.sum() @ v[front][seen]
    return out


def close(a, b, tolerance=1e-12):
    np.testing.assert_allclose(a.data if isinstance(a, Tensor) else a, b, rtol=tolerance, atol=tolerance)


def gradients(y, inputs, g):
    for x in inputs:
        x.zero_grad()
    y.backward(g)
    return [x.grad for x in inputs]


# --------------------------------------------------------------------------------------------------------------------
# The free function


@pytest.mark.parametrize("front", [(), (B,), (B, H), (2, 3, 2)])
def test_attention_is_softmax_of_scaled_products_times_values(rng, front):
    q, k, v = qkv(rng, front)
    allow = rng.random((T_Q, T_K)) < 0.7
    close(nn.attention(q, k, v), by_hand(q.data, k.data, v.data))
    close(nn.attention(q, k, v, allow=allow), by_hand(q.data, k.data, v.data, allow))
    close(nn.attention(q, k, v, scale=0.3), by_hand(q.data, k.data, v.data, scale=0.3))


def test_attention_takes_arrays_and_gives_a_tensor(rng):
    q, k, v = (x.data for x in qkv(rng))
    y = nn.attention(q, k, v)
    assert isinstance(y, Tensor)
    assert not y.requires_grad


def test_attention_is_made_of_visible_steps(rng):
    q, k, v = qkv(rng)
    keep = rng.random((B, H, T_Q, T_K)) < 0.5
    y = nn.attention(q, k, v, allow=rng.random((T_Q, T_K)) < 0.9, bias=rng.standard_normal((T_Q, T_K)), keep_mask=keep)
    steps = []
    while y.node is not None:
        steps.append(y.node.op.name)
        y = y.node.inputs[0]
    assert steps == ["matmul", "dropout", "softmax", "mask", "add", "scale", "matmul"]
    plain, trace = nn.attention(q, k, v, trace=True)
    assert plain is trace.heads
    assert trace.masked is trace.scores
    assert trace.scores.node.inputs[0].node.inputs[1].node.op.name == "transpose"


def test_attention_agrees_with_its_fused_primitive_in_value_and_gradient(rng):
    q, k, v = qkv(rng)
    allow = rng.random((B, 1, T_Q, T_K)) < 0.6
    bias = Tensor(rng.standard_normal((B, H, T_Q, T_K)), requires_grad=True)
    keep = (rng.random((B, H, T_Q, T_K)) < 0.5) * 2.0
    g = rng.standard_normal((B, H, T_Q, D_V))
    visible = nn.attention(q, k, v, allow=allow, bias=bias, keep_mask=keep)
    fused = ops.attention(q, k, v, allow, bias, keep)
    close(visible, fused.data)
    inputs = (q, k, v, bias)
    for a, b in zip(gradients(visible, inputs, g), gradients(fused, inputs, g), strict=True):
        close(a, b)


def test_attention_agrees_with_torch_in_value_and_gradient(rng):
    torch = pytest.importorskip("torch")
    q, k, v = qkv(rng)
    allow = rng.random((B, H, T_Q, T_K)) < 0.6
    allow[..., 0] = True
    g = rng.standard_normal((B, H, T_Q, D_V))
    theirs = [torch.tensor(x.data, requires_grad=True) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, attn_mask=torch.tensor(allow))
    expected.backward(torch.tensor(g))
    y = nn.attention(q, k, v, allow=allow)
    close(y, expected.detach().numpy())
    for ours, other in zip(gradients(y, (q, k, v), g), theirs, strict=True):
        close(ours, other.grad.numpy())


def test_a_gradient_reaches_a_bias_given_as_a_tensor(rng):
    q, k, v = qkv(rng)
    bias = Tensor(rng.standard_normal((B, T_Q, T_K)), requires_grad=True)
    gradcheck(lambda b: nn.attention(q.detach(), k.detach(), v.detach(), bias=b), bias)
    close(nn.attention(q, k, v, bias=bias), by_hand(q.data, k.data, v.data, bias=bias.data[:, None]))


# --------------------------------------------------------------------------------------------------------------------
# Masks: one polarity, four shapes


def test_each_accepted_form_of_allow_means_what_it_says(rng):
    q, k, v = (x.data for x in qkv(rng))
    for shape in [(T_Q, T_K), (B, T_Q, T_K), (B, H, T_Q, T_K), (1, 1, T_Q, T_K), (B, 1, T_Q, T_K), (1, H, T_Q, T_K)]:
        allow = rng.random(shape) < 0.6
        full = allow[:, None] if len(shape) == 3 else allow
        close(nn.attention(q, k, v, allow=allow), by_hand(q, k, v, full))


def test_key_allow_hides_keys_from_every_query_and_head_and_combines_with_allow(rng):
    q, k, v = (x.data for x in qkv(rng))
    key_allow = rng.random((B, T_K)) < 0.6
    allow = rng.random((T_Q, T_K)) < 0.6
    keys = key_allow[:, None, None, :]
    close(nn.attention(q, k, v, key_allow=key_allow), by_hand(q, k, v, keys))
    close(nn.attention(q, k, v, key_allow=key_allow, allow=allow), by_hand(q, k, v, keys & allow))
    close(
        nn.attention(q[:, 0], k[:, 0], v[:, 0], key_allow=key_allow),
        by_hand(q[:, 0], k[:, 0], v[:, 0], key_allow[:, None]),
    )
    close(
        nn.attention(q[0, 0], k[0, 0], v[0, 0], key_allow=key_allow[:1]),
        by_hand(q[0, 0], k[0, 0], v[0, 0], key_allow[0]),
    )


@pytest.mark.parametrize("options", [{}, {"window": 131}, {"key_allow": True}, {"bias": True}])
@pytest.mark.parametrize("position", [None, "alibi"])
def test_many_queries_without_records_get_what_they_get_with_records(rng, options, position):
    n, dropped = 263, 0.25
    options = dict(options)
    mha = nn.MultiHeadAttention(
        10, n_head=4, d_k=3, n_kv_head=2, position=position, dropout=dropped, rng=0, fused=True
    ).astype(np.float64)
    if "key_allow" in options:
        options["key_allow"] = rng.random((3, n)) < 0.8
    if "bias" in options:
        options["bias"] = rng.standard_normal((3, 4, n, n))
    x = rng.standard_normal((3, n, 10))
    recorded = copy.deepcopy(mha)(x, causal=True, **options)
    with no_grad():
        close(mha(x, causal=True, **options), recorded.data)


def test_many_queries_after_those_in_a_cache_see_them_all(rng):
    mha = nn.MultiHeadAttention(12, n_head=3, position="rotary", rng=0, fused=True).astype(np.float64)
    x, cache = rng.standard_normal((269, 12)), nn.KVCache()
    whole = mha(x, causal=True)
    with no_grad():
        parts = [mha(rows, causal=True, cache=cache).data for rows in (x[:7], x[7:])]
    close(np.concatenate(parts), whole.data)


@pytest.mark.parametrize("name", ["allow", "bias"])
@pytest.mark.parametrize(
    "shape",
    [
        (T_K,),
        (T_K, T_Q),
        (B, T_K),
        (1, T_K),
        (T_Q, 1),
        (H, T_Q, T_K),
        (B, 1, T_K),
        (H, B, T_Q, T_K),
        (1, B, H, T_Q, T_K),
        (),
    ],
)
def test_any_other_shape_of_a_mask_is_refused_with_the_accepted_ones(rng, name, shape):
    mask = np.ones(shape, bool) if name == "allow" else np.ones(shape)
    with pytest.raises(ValueError, match=f"{name} has shape") as caught:
        nn.attention(*qkv(rng), **{name: mask})
    for form in (
        "(T_q, T_k), (B, T_q, T_k) or (B, H, T_q, T_k)",
        "key_allow: boolean, of shape (B, T_k)",
        "True = may",
    ):
        assert form in str(caught.value)


@pytest.mark.parametrize("shape", [(T_K,), (T_K, B), (B, T_Q), (B, 1, T_K), (1, T_K)])
def test_any_other_shape_of_key_allow_is_refused(rng, shape):
    with pytest.raises(ValueError, match="key_allow has shape"):
        nn.attention(*qkv(rng), key_allow=np.ones(shape, bool))


def test_a_mask_with_heads_is_refused_for_scores_without_heads(rng):
    q, k, v = qkv(rng, (B,))
    with pytest.raises(ValueError, match=r"does not fit B = 2, T_q = 5, T_k = 7\. Accepted"):
        nn.attention(q, k, v, allow=np.ones((B, H, T_Q, T_K), bool))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("name", ["allow", "key_allow"])
def test_a_mask_of_zeros_and_ones_is_refused_with_the_reason(rng, name, dtype):
    shape = (T_Q, T_K) if name == "allow" else (B, T_K)
    with pytest.raises(TypeError, match="holds 0 and 1, which do not say which of the two hides") as caught:
        nn.attention(*qkv(rng), **{name: np.tri(*shape).astype(dtype)})
    assert f"{name}=(m > 0)" in str(caught.value)


def test_scores_given_as_allow_are_refused(rng):
    with pytest.raises(TypeError, match="allow is not boolean; got float64"):
        nn.attention(*qkv(rng), allow=rng.standard_normal((T_Q, T_K)))


@pytest.mark.parametrize("dtype", [bool, np.int64])
def test_a_bias_that_is_not_floating_is_refused(rng, dtype):
    with pytest.raises(TypeError, match="bias must be floating"):
        nn.attention(*qkv(rng), bias=np.ones((T_Q, T_K), dtype))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("trace", [False, True])
def test_a_float_bias_is_added_and_never_read_as_a_boolean(mode, trace):
    bias = np.log([[1.0, 2.0, 3.0]])
    y = nn.attention(np.zeros((1, 1)), np.ones((3, 1)), np.arange(3.0)[:, None], bias=bias, trace=trace)
    if trace:
        close(y[1].weights, [[1 / 6, 2 / 6, 3 / 6]])
    close(y[0] if trace else y, [[8 / 6]])
    mha = getattr(identity_attention(), mode)()
    close(mha(np.array([[0.0], [1.0], [2.0]]), bias=np.broadcast_to(bias, (3, 3)))[0], [8 / 6])


def identity_attention():
    """One head, one wide, that attends to nothing in particular and hands values through."""
    mha = nn.MultiHeadAttention(1, 1).astype(np.float64)
    for p, value in ((mha.wq, 0), (mha.wk, 1), (mha.wv, 1), (mha.wo, 1)):
        p.assign_([[value]])
    return mha


def test_allowed_keys_of_a_boolean_mask_are_the_true_ones():
    scores = np.array([[1.0, 2.0, 3.0]])
    values = np.array([[10.0], [20.0], [30.0]])
    y, trace = nn.attention(
        np.array([[1.0]]), scores.T, values, allow=np.array([[True, True, False]]), scale=1.0, trace=True
    )
    close(trace.weights, [[1 / (1 + math.e), math.e / (1 + math.e), 0]])
    close(y, [[(10 + 20 * math.e) / (1 + math.e)]])


def test_masked_scores_are_excluded_exactly_however_large_they_are(rng):
    q, k, v = (x.data for x in qkv(rng, ()))
    k[3] = 1e6 * q[0]
    allow = np.ones((T_Q, T_K), bool)
    allow[:, 3] = False
    y, trace = nn.attention(q, k, v, allow=allow, trace=True)
    assert (trace.weights.data[:, 3] == 0).all()
    close(y, by_hand(q, k, v, allow))


def test_a_query_that_may_attend_to_nothing_gets_zeros_and_zero_gradients(rng):
    q, k, v = qkv(rng)
    allow = np.ones((T_Q, T_K), bool)
    allow[2] = False
    y, trace = nn.attention(q, k, v, allow=allow, trace=True)
    assert not y.data[..., 2, :].any()
    assert not trace.weights.data[..., 2, :].any()
    y.backward(rng.standard_normal(y.shape))
    assert not q.grad[..., 2, :].any()
    for x in (q, k, v):
        assert np.isfinite(x.grad).all()


def test_everything_masked_gives_zeros_with_zero_gradients(rng):
    q, k, v = qkv(rng)
    y = nn.attention(q, k, v, key_allow=np.zeros((B, T_K), bool))
    y.backward(np.ones(y.shape))
    assert not y.data.any()
    assert not any(x.grad.any() for x in (q, k, v))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_keys_and_values_that_no_query_may_attend_to_have_no_effect(rng, poison):
    q, k, v = qkv(rng)
    key_allow = np.ones((B, T_K), bool)
    key_allow[1, 4:] = False
    g = rng.standard_normal((B, H, T_Q, D_V))
    clean = nn.attention(q, k, v, key_allow=key_allow)
    expected = gradients(clean, (q, k, v), g)
    k.data[1, :, 4:] = v.data[1, :, 4:] = poison
    y = nn.attention(q, k, v, key_allow=key_allow)
    close(y, clean.data)
    for a, b in zip(gradients(y, (q, k, v), g), expected, strict=True):
        close(a, b)
    assert not k.grad[1, :, 4:].any()


def test_rows_that_padding_and_a_window_leave_empty_do_not_affect_others(rng):
    mha = nn.MultiHeadAttention(8, 2, rng=0).astype(np.float64)
    x = Tensor(rng.standard_normal((2, 4, 8)), requires_grad=True)
    window = np.eye(4, dtype=bool) | np.eye(4, k=-1, dtype=bool)
    key_allow = np.array([[True] * 4, [True, True, False, False]])
    y = mha(x, allow=window, key_allow=key_allow)
    assert not y.data[1, 3].any()  # saw padding only, and W_O of 0 is 0
    close(y[1, :2], mha(x[1, :2], allow=window[:2, :2]).data)
    y.backward(np.where(key_allow[..., None], rng.standard_normal(y.shape), 0))
    assert all(np.isfinite(p.grad).all() for p in (*mha.parameters(), x))


def test_padding_in_front_under_a_causal_mask_equals_the_short_sequence_alone(rng):
    mha = nn.MultiHeadAttention(5, 2, d_k=7, rng=0).astype(np.float64)
    x = rng.standard_normal((1, 4, 5))
    y = mha(x, causal=True, key_allow=np.array([[False, False, True, True]]))
    close(y[0, 2:], mha(x[0, 2:], causal=True).data)
    assert not y.data[0, :2].any()


# --------------------------------------------------------------------------------------------------------------------
# All heads in one node


def packed(rng, *front, dtype=np.float64):
    return Tensor(rng.standard_normal((*front, 3 * H * D_K)).astype(dtype), requires_grad=True, name="qkv")


def in_steps(x, allow=None, bias=None, keep_mask=None):
    """`ops.self_attention` from single operations."""
    q, k, v = (nn.split_heads(part, H) for part in ops.split(x, 3, axis=-1))
    return nn.join_heads(ops.attend(q, k, v, allow, bias, keep_mask))


def make_masks(rng, front, n):
    """Every mask and bias that a model passes: causal, of one row of the batch each, of one head each."""
    allow = rng.random((*front, 1, n, n)) < 0.6
    keep_mask = (rng.random((*front, H, n, n)) < 0.8) / 0.8
    bias = rng.standard_normal((H, n, n))
    return [(), (np.tri(n, dtype=bool),), (allow,), (allow, bias), (None, bias, keep_mask), (allow, None, keep_mask)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)])
@pytest.mark.parametrize("front", [(), (2,), (1,), (2, 3)])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_self_attention_in_one_node_equals_its_steps_in_value_and_gradient(rng, front, n, dtype, tolerance):
    g = rng.standard_normal((*front, n, H * D_K)).astype(dtype)
    for masks in make_masks(rng, front, n):
        masks = [m.astype(dtype) if m is not None and m.dtype.kind == "f" else m for m in masks]
        x = packed(rng, *front, n, dtype=dtype)
        biases = [Tensor(b, requires_grad=True) for b in masks[1:2] if b is not None]
        results = []
        for function in (functools.partial(ops.self_attention, n_head=H), in_steps):
            y = function(x, *masks[:1], *(biases or masks[1:2]), *masks[2:])
            assert y.dtype == dtype
            results.append([y.data, *gradients(y, (x, *biases), g)])
        for a, b in zip(*results, strict=True):
            assert a.dtype == dtype
            close(a, b, tolerance)


def test_the_second_derivative_of_self_attention_is_that_of_its_steps(rng):
    x, weights = packed(rng, 2, 5), rng.standard_normal((2, 5, H * D_K))
    direction = rng.standard_normal(x.shape)
    for masks in make_masks(rng, (2,), 5):
        one, other = (
            hvp(lambda t, f=f: (f(t, *masks) * weights).sum(), x.data, direction)  # noqa: B023 (called at once)
            for f in (functools.partial(ops.self_attention, n_head=H), in_steps)
        )
        close(one, other.data, 1e-11)


def heads_in_steps(q, k, v, *masks):
    """`ops.multi_head_attention` from single operations."""
    return nn.join_heads(ops.attend(*(nn.split_heads(x, H) for x in (q, k, v)), *masks))


@pytest.mark.parametrize("front", [(), (2,)])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (3, 5), (7, 2)])
def test_heads_of_any_widths_in_one_node_equal_their_steps_in_all_derivatives(rng, front, n_q, n_k):
    shapes = (n_q, H * D_K), (n_k, H * D_K), (n_k, H * D_V)
    q, k, v = (rng.standard_normal((*front, *shape)) for shape in shapes)
    g = rng.standard_normal((*front, n_q, H * D_V))
    allow = rng.random((*front, 1, n_q, n_k)) < 0.6
    keep_mask = (rng.random((*front, H, n_q, n_k)) < 0.8) / 0.8
    for masks in [(), (allow,), (None, rng.standard_normal((H, n_q, n_k)), keep_mask), (allow, None, keep_mask)]:
        results = []
        for f in (functools.partial(ops.multi_head_attention, n_head=H), heads_in_steps):
            inputs = [Tensor(x, requires_grad=True) for x in (q, k, v)]
            y = f(*inputs, *masks)
            second = hvp(lambda t, f=f: (f(t, k, v, *masks) * g).sum(), q, q[::-1].copy())  # noqa: B023 (called at once)
            results.append([y.data, *gradients(y, inputs, g), second.data])
        for a, b in zip(*results, strict=True):
            close(a, b, 1e-11)


def test_a_fused_module_computes_what_its_steps_compute_in_a_few_nodes(rng):
    x, g = rng.standard_normal((3, 5)), rng.standard_normal((3, 5))
    results = []
    for fused in (True, False):
        mha = nn.MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, bias=True, rng=0, fused=fused).astype(np.float64)
        y = mha(x, causal=True)
        results.append([y.data, *gradients(y, mha.parameters(), g)])
        names = [value.node.op.name for value in toposort([y]) if value.node is not None]
        assert (names == ["linear"] * 3 + ["multi_head_attention", "linear"]) == fused
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-12)


def test_heads_that_do_not_stand_side_by_side_are_refused():
    with pytest.raises(
        ValueError, match=r"multi_head_attention of \(3, 4\), \(3, 4\), \(3, 5\), n_head=2: .*n_head \* d"
    ):
        ops.multi_head_attention(np.ones((3, 4)), np.ones((3, 4)), np.ones((3, 5)), n_head=2)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_padding_has_no_effect_on_self_attention_in_one_node(rng, poison):
    key_allow = np.array([[True] * 5, [False, False, True, True, True]])
    allow = key_allow[:, None, None, :] & np.tri(5, dtype=bool)
    g = rng.standard_normal((2, 5, H * D_K)) * key_allow[..., None]
    x = packed(rng, 2, 5)
    clean = ops.self_attention(x, allow, n_head=H)
    expected = gradients(clean, (x,), g)
    x.data[1, :2, H * D_K :] = poison  # the keys and values of padding
    y = ops.self_attention(x, allow, n_head=H)
    close(y, clean.data, 0)
    close(gradients(y, (x,), g)[0], expected[0], 0)
    assert not y.data[1, :2].any()  # these queries may attend to nothing
    assert not x.grad[1, :2].any()


def test_an_infinite_score_where_a_query_may_not_attend_is_hidden(rng):
    x = packed(rng, 3, dtype=np.float32)
    x.data[2, H * D_K : 2 * H * D_K] = 3e38  # the last key
    with np.errstate(over="ignore"):
        y = ops.self_attention(x, np.tri(3, dtype=bool), n_head=H)
    close(y[:2], in_steps(x[:2], np.tri(2, dtype=bool)).data, 1e-6)


def test_attention_with_a_bias_of_another_dtype_has_the_wider_one(rng):
    x = packed(rng, 3, dtype=np.float32)
    y = ops.self_attention(x, None, rng.standard_normal((3, 3)), n_head=H)
    assert y.dtype == np.float64
    assert gradients(y, (x,), np.ones(y.shape))[0].dtype == np.float32


def test_self_attention_that_does_not_divide_into_heads_is_refused():
    with pytest.raises(ValueError, match=r"self_attention of \(3, 10\), n_head=2: .*3 \* n_head"):
        ops.self_attention(np.ones((3, 10)), n_head=2)


# --------------------------------------------------------------------------------------------------------------------
# Causal


def test_causal_is_a_triangle_that_ends_at_the_last_key():
    np.testing.assert_array_equal(nn.causal(3), np.tri(3, dtype=bool))
    np.testing.assert_array_equal(nn.causal(2, 5), [[True] * 4 + [False], [True] * 5])
    assert nn.causal(1, 5).all()
    assert nn.causal(3).dtype == bool
    for lengths in [(3.5,), (True,), (-1,), (2, 5.0)]:
        with pytest.raises(ValueError, match="must be an integer of at least 0"):
            nn.causal(*lengths)
    with pytest.raises(ValueError, match="at least as many keys as queries, got 5 queries and 2 keys"):
        nn.causal(5, 2)


def test_the_last_query_of_a_causal_attention_sees_every_key():
    values = np.arange(5.0)[:, None]
    y = nn.attention(np.zeros((1, 1)), np.zeros((5, 1)), values, allow=nn.causal(1, 5))
    assert y.item() == 2.0


def test_row_n_of_a_causal_attention_depends_on_rows_1_to_n_only(rng):
    mha = nn.MultiHeadAttention(5, 2, d_k=7, d_v=11, rng=0).astype(np.float64)
    x = Tensor(rng.standard_normal((4, 5)), requires_grad=True)
    y = mha(x, causal=True)
    for n in range(4):
        g = np.zeros(y.shape)
        g[n] = rng.standard_normal(5)
        (dx,) = gradients(y, [x], g)
        assert dx[: n + 1].all()
        assert not dx[n + 1 :].any()


# --------------------------------------------------------------------------------------------------------------------
# Errors about q, k, v


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((5,), (7, 11), (7, 13)), r"expects q \(\.\.\., T_q, d_k\)"),
        (((5, 11), (7, 3), (7, 13)), "same width d_k; got q .5, 11., k .7, 3."),
        (((5, 11), (7, 11), (3, 13)), "same number of rows T_k"),
        (((2, 5, 11), (3, 7, 11), (2, 7, 13)), "axes in front"),
    ],
)
def test_operands_that_do_not_fit_are_named_with_their_shapes(shapes, message):
    with pytest.raises(ValueError, match=message):
        nn.attention(*map(np.zeros, shapes))


def test_keep_mask_multiplies_the_weights_and_must_broadcast_to_them(rng):
    q, k, v = qkv(rng)
    keep = rng.random((B, H, T_Q, T_K)) < 0.5
    y, trace = nn.attention(q, k, v, keep_mask=keep, trace=True)
    close(y, (trace.weights.data * keep) @ v.data)
    close(trace.weights.data.sum(-1), np.ones((B, H, T_Q)))
    for shape in [(1, 7), (5, 1), (3, 1, 7)]:
        y = nn.attention(q, k, v, keep_mask=np.full(shape, 2.0))
        np.testing.assert_allclose(y.numpy(), 2.0 * nn.attention(q, k, v).numpy(), rtol=1e-13)
    with pytest.raises(ValueError, match=r"keep_mask must broadcast to the weights, \(2, 3, 5, 7\), got \(7, 5\)"):
        nn.attention(q, k, v, keep_mask=np.ones((T_K, T_Q)))


def test_float32_stays_float32_whatever_the_masks_are_made_of(rng):
    q, k, v = (Tensor(x.data.astype(np.float32), requires_grad=True) for x in qkv(rng))
    y, trace = nn.attention(
        q,
        k,
        v,
        bias=rng.standard_normal((T_Q, T_K)),
        keep_mask=rng.random((T_Q, T_K)),
        key_allow=np.ones((B, T_K), bool),
        trace=True,
    )
    y.backward(np.ones(y.shape))
    assert {t.dtype for t in (*trace[:7], y)} == {np.dtype(np.float32)}
    assert {x.grad.dtype for x in (q, k, v)} == {np.dtype(np.float32)}


# --------------------------------------------------------------------------------------------------------------------
# Multi-head attention

WIDTHS = {"d_model": 5, "n_head": 3, "d_k": 7, "d_v": 11, "d_out": 13, "d_memory": 17}


def randomised(module, rng):
    for p in module.astype(np.float64).parameters():
        p.assign_(rng.standard_normal(p.shape))
    return module


def heads_by_hand(mha, x, memory, allow=None, bias=None):
    """Concat and Y in plain NumPy, head by head, from the columns of the parameters."""
    shared = mha.n_head // mha.n_kv_head
    heads = []
    for i in range(mha.n_head):
        j = i // shared
        q = x @ mha.wq.data[:, i * mha.d_k : (i + 1) * mha.d_k]
        k = memory @ mha.wk.data[:, j * mha.d_k : (j + 1) * mha.d_k]
        v = memory @ mha.wv.data[:, j * mha.d_v : (j + 1) * mha.d_v]
        heads.append(by_hand(q, k, v, allow, None if bias is None else bias[i]))
    return np.concatenate(heads, -1) @ mha.wo.data


def test_every_width_is_free_and_parameters_have_the_shapes_of_the_paper(rng):
    mha = nn.MultiHeadAttention(**WIDTHS, rng=0)
    shapes = {name: p.shape for name, p in mha.named_parameters()}
    assert shapes == {"wq": (5, 21), "wk": (17, 21), "wv": (17, 33), "wo": (33, 13)}
    assert mha(np.ones((2, 3, 5)), memory=np.ones((2, 7, 17))).shape == (2, 3, 13)


def test_widths_default_to_the_usual_division():
    mha = nn.MultiHeadAttention(5, 2)
    assert (mha.d_k, mha.d_v, mha.d_out, mha.d_memory, mha.n_kv_head) == (2, 2, 5, 5, 2)
    assert (mha.bq, mha.bo) == (None, None)
    biased = nn.MultiHeadAttention(5, 2, bias=True)
    assert [name for name, _ in biased.named_parameters()] == ["wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo"]


def test_initial_projections_keep_the_spread_of_what_they_multiply_and_biases_are_zero():
    mha = nn.MultiHeadAttention(67, 3, d_k=101, d_v=89, d_out=107, d_memory=257, bias=True, rng=0)
    for weight, fan_in in ((mha.wq, 67), (mha.wk, 257), (mha.wv, 257), (mha.wo, 3 * 89)):
        assert weight.data.std() == pytest.approx(fan_in**-0.5, rel=0.03)
    for bias in (mha.bq, mha.bk, mha.bv, mha.bo):
        assert not bias.data.any()


def test_multi_head_attention_is_one_attention_per_head_joined_and_mixed(rng):
    mha = randomised(nn.MultiHeadAttention(**WIDTHS), rng)
    x, memory = rng.standard_normal((B, T_Q, 5)), rng.standard_normal((B, T_K, 17))
    allow = rng.random((T_Q, T_K)) < 0.6
    close(mha(x, memory=memory, allow=allow), heads_by_hand(mha, x, memory, allow))


def test_a_sequence_without_a_batch_axis_is_a_batch_of_one(rng):
    mha = randomised(nn.MultiHeadAttention(5, 3, d_k=7), rng)
    x = rng.standard_normal((T_Q, 5))
    key_allow = rng.random((1, T_Q)) < 0.7
    allow = rng.random((1, 3, T_Q, T_Q)) < 0.7
    close(mha(x), mha(x[None])[0].data)
    close(mha(x, key_allow=key_allow, allow=allow), mha(x[None], key_allow=key_allow, allow=allow)[0].data)


def test_multi_head_attention_agrees_with_torch_in_value_and_gradient(rng):
    torch = pytest.importorskip("torch")
    mha = randomised(nn.MultiHeadAttention(15, 3, d_memory=15, bias=True), rng)
    theirs = torch.nn.MultiheadAttention(15, 3, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.tensor(np.concatenate([p.data.T for p in (mha.wq, mha.wk, mha.wv)])))
        theirs.in_proj_bias.copy_(torch.tensor(np.concatenate([p.data for p in (mha.bq, mha.bk, mha.bv)])))
        theirs.out_proj.weight.copy_(torch.tensor(mha.wo.data.T))
        theirs.out_proj.bias.copy_(torch.tensor(mha.bo.data))
    x, memory = tensors(rng, (B, T_Q, 15), (B, T_K, 15))
    key_allow = rng.random((B, T_K)) < 0.7
    key_allow[:, 0] = True
    g = rng.standard_normal((B, T_Q, 15))
    tx, tm = (torch.tensor(t.data, requires_grad=True) for t in (x, memory))
    expected, weights = theirs(tx, tm, tm, key_padding_mask=torch.tensor(~key_allow), average_attn_weights=False)
    expected.backward(torch.tensor(g))
    y, trace = mha(x, memory=memory, key_allow=key_allow, trace=True)
    close(y, expected.detach().numpy())
    close(trace.weights, weights.detach().numpy())
    ours = gradients(y, (x, memory, *mha.parameters()), g)
    packed = [p.T for p in np.split(theirs.in_proj_weight.grad.numpy(), 3)]
    wanted = [tx.grad.numpy(), tm.grad.numpy(), *packed, theirs.out_proj.weight.grad.numpy().T]
    wanted += [*np.split(theirs.in_proj_bias.grad.numpy(), 3), theirs.out_proj.bias.grad.numpy()]
    for a, b in zip(ours, wanted, strict=True):
        close(a, b)


RELATIVE = nn.Relative(num_buckets=4, max_distance=4)  # all buckets occur within five tokens
SETTINGS = list(itertools.product([None, 1, 2], [None, "rotary", "alibi", RELATIVE], [False, True], [(), (B,)]))


@pytest.mark.parametrize(("n_kv_head", "position", "bias", "front"), SETTINGS)
def test_per_head_gives_the_same_numbers_and_gradients_as_the_batched_path(rng, n_kv_head, position, bias, front):
    mha = randomised(
        nn.MultiHeadAttention(5, 4, d_k=6, d_v=11, d_out=13, n_kv_head=n_kv_head, position=position, bias=bias), rng
    )
    (x,) = tensors(rng, (*front, T_Q, 5))
    masks = {
        "causal": True,
        "key_allow": rng.random((*(front or (1,)), T_Q)) < 0.7,
        "bias": rng.standard_normal((1, 4, T_Q, T_Q)),
    }
    g = rng.standard_normal((*front, T_Q, 13))
    batched, one_by_one = mha(x, **masks), mha.per_head(x, **masks)
    close(batched, one_by_one.data)
    inputs = (x, *mha.parameters())
    for a, b in zip(gradients(batched, inputs, g), gradients(one_by_one, inputs, g), strict=True):
        close(a, b, 1e-11)


def test_per_head_draws_the_same_dropout_as_the_batched_path(rng):
    a, b = (nn.MultiHeadAttention(5, 3, dropout=0.4, rng=0).astype(np.float64) for _ in range(2))
    x = rng.standard_normal((B, T_Q, 5))
    y = a(x)
    close(y, b.per_head(x).data)
    assert np.abs(y.data - a(x).data).max() > 1e-3
    close(a.eval()(x), b.eval().per_head(x).data)


def test_per_head_of_cross_attention_equals_the_batched_path(rng):
    mha = randomised(nn.MultiHeadAttention(**WIDTHS), rng)
    x, memory = rng.standard_normal((B, T_Q, 5)), rng.standard_normal((B, T_K, 17))
    allow = rng.random((B, T_Q, T_K)) < 0.7
    close(mha.per_head(x, memory=memory, allow=allow), mha(x, memory=memory, allow=allow).data)


def test_a_memory_projected_once_serves_many_queries(rng):
    mha = randomised(nn.MultiHeadAttention(**WIDTHS), rng)
    memory = rng.standard_normal((B, T_K, 17))
    key_allow = rng.random((B, T_K)) < 0.7
    projected = mha.project_memory(memory)
    for n in (1, T_Q):
        x = rng.standard_normal((B, n, 5))
        y, trace = mha(x, memory=projected, key_allow=key_allow, trace=True)
        close(y, mha(x, memory=memory, key_allow=key_allow).data, 0)
        assert trace.k is projected.k
    rows = [1, 0, 1]
    close(mha(x[rows], memory=projected.select(rows)), mha(x, memory=memory).data[rows])
    with pytest.raises(TypeError, match="per_head projects the memory itself"):
        mha.per_head(x, memory=projected)
    with pytest.raises(ValueError, match="memory with d_memory columns"):
        mha.project_memory(rng.standard_normal((B, T_K, 5)))


def test_fused_attention_gives_the_numbers_and_gradients_of_the_visible_steps(rng):
    (x,) = tensors(rng, (B, T_Q, 5))
    results = []
    for fused in (False, True):
        mha = nn.MultiHeadAttention(5, 4, d_k=6, n_kv_head=2, position=RELATIVE, rng=0, fused=fused)
        mha.astype(np.float64)
        y = mha(x, causal=True)
        assert (y.node.inputs[0].node.inputs[0].node.inputs[0].node.op is ops.attention) == fused
        results.append([y.data, *gradients(y, (x, *mha.parameters()), np.cos(y.data))])
    for a, b in zip(*results, strict=True):
        close(a, b)


def made_from(y):
    """Every tensor behind `y`, by name."""
    found, stack = {}, [y]
    while stack:
        t = stack.pop()
        if t.name is not None:
            found.setdefault(t.name, t)
        stack.extend(x for x in (t.node.inputs if t.node else ()) if isinstance(x, Tensor))
    return found


def test_per_head_names_every_matrix_and_takes_the_head_matrices_from_the_parameters(rng):
    mha = randomised(nn.MultiHeadAttention(5, 2, d_k=7, d_v=11, bias=True), rng)
    x = Tensor(rng.standard_normal((3, 5)), name="X")
    found = made_from(mha.per_head(x, causal=True))
    shapes = {name: t.shape for name, t in found.items()}
    for i in (1, 2):
        expected = {
            f"W_Q{i}": (5, 7),
            f"W_K{i}": (5, 7),
            f"W_V{i}": (5, 11),
            f"b_Q{i}": (7,),
            f"Q_{i}": (3, 7),
            f"K_{i}": (3, 7),
            f"V_{i}": (3, 11),
            f"scores_{i}": (3, 3),
            f"masked_{i}": (3, 3),
            f"S_{i}": (3, 3),
            f"H_{i}": (3, 11),
        }
        assert expected.items() <= shapes.items()
    assert {"X": (3, 5), "Concat": (3, 22), "W_O": (22, 5), "Y": (3, 5)}.items() <= shapes.items()
    assert found["W_Q2"].node.inputs[0] is mha.wq
    np.testing.assert_array_equal(found["W_V2"].data, mha.wv.data[:, 11:])
    assert found["Y"].node.scope[0].class_name == "MultiHeadAttention"


def test_grouped_heads_share_keys_and_values_in_order(rng):
    mha = randomised(nn.MultiHeadAttention(5, 4, d_k=7, d_v=11, n_kv_head=2), rng)
    assert (mha.wk.shape, mha.wv.shape) == ((5, 14), (5, 22))
    x = rng.standard_normal((B, T_Q, 5))
    y, trace = mha(x, trace=True)
    close(y, heads_by_hand(mha, x, x))
    assert trace.k.shape == (B, 2, T_Q, 7)
    assert trace.weights.shape == (B, 4, T_Q, T_Q)


def test_gradients_of_multi_head_attention_pass_the_check_to_second_order(rng):
    mha = nn.MultiHeadAttention(3, 2, d_k=2, d_v=5, n_kv_head=1, position="rotary", bias=True, rng=0)
    gradcheck(lambda x: mha(x, causal=True), rng.standard_normal((3, 3)), order=2)
    gradcheck(mha, rng.standard_normal((2, 3, 3)))
    mha = nn.MultiHeadAttention(3, 2, d_k=5, d_v=2, position=RELATIVE, rng=0)
    report = gradcheck(lambda x: mha(x, causal=True), rng.standard_normal((3, 3)), order=2)
    assert report.ok
    assert "position.weight" in str(gradcheck(mha, rng.standard_normal((2, 3, 3))))


def test_dropout_differs_between_train_and_eval_only(rng):
    mha = nn.MultiHeadAttention(5, 2, dropout=0.5, rng=0).astype(np.float64)
    x = rng.standard_normal((T_Q, 5))
    plain = nn.MultiHeadAttention(5, 2, rng=0).astype(np.float64)
    close(mha.eval()(x), plain(x).data, 0)
    assert np.abs(mha.train()(x).data - plain(x).data).max() > 1e-3
    with no_grad():
        close(plain.eval()(x), plain.train()(x).data, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_head": 0}, "n_head must be an integer of at least 1"),
        ({"d_k": 2.5}, "d_k .* must be an integer"),
        ({"n_head": 7}, "d_k .*got 0"),
        ({"n_head": 3, "n_kv_head": 2}, "n_head must be a multiple of n_kv_head, got 3 and 2"),
        ({"position": "learned"}, "a scheme that acts in attention; Learned.. is added to the input"),
        ({"position": "rotary", "d_k": 7}, "d_k must be even, got 7"),
        ({"dropout": 1.5}, "dropout must be a probability"),
        ({"d_v": True}, "d_v must be an integer"),
    ],
)
def test_invalid_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        nn.MultiHeadAttention(**{"d_model": 5, "n_head": 2, **arguments})


@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        ((5,), {}, r"x must be \(T_q, d_model\) or \(B, T_q, d_model\), got shape \(5,\)"),
        ((2, 3, 7, 5), {}, "x must be"),
        ((3, 7), {}, "last axis of length 5, got an input of shape .3, 7."),
        ((2, 3, 5), {"memory": np.ones((3, 7, 5))}, "memory must have the batch axis of x"),
        ((2, 3, 5), {"memory": np.ones((2, 7, 3))}, "memory with d_memory columns"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x, arguments, message):
    with pytest.raises(ValueError, match=message):
        nn.MultiHeadAttention(5, 2)(np.ones(x), **arguments)


def test_self_attention_of_another_memory_width_says_what_is_missing():
    with pytest.raises(ValueError, match="self-attention needs d_memory = d_model, got 7 and 5"):
        nn.MultiHeadAttention(5, 2, d_memory=7)(np.ones((3, 5)))


# --------------------------------------------------------------------------------------------------------------------
# Looking inside


def test_the_trace_holds_every_step_with_its_shape_and_name(rng):
    mha = randomised(nn.MultiHeadAttention(5, 3, d_k=7, d_v=11), rng)
    y, trace = mha(rng.standard_normal((B, T_Q, 5)), causal=True, trace=True)
    shapes = {name: t.shape for name, t in trace._asdict().items()}
    assert shapes == {
        "q": (B, 3, T_Q, 7),
        "k": (B, 3, T_Q, 7),
        "v": (B, 3, T_Q, 11),
        "scores": (B, 3, T_Q, T_Q),
        "masked": (B, 3, T_Q, T_Q),
        "weights": (B, 3, T_Q, T_Q),
        "heads": (B, 3, T_Q, 11),
        "concat": (B, T_Q, 33),
    }
    assert [t.name for t in trace] == ["Q", "K", "V", "scores", "masked", "S", "H", "Concat"]
    assert y.name == "Y"
    close(trace.scores, trace.q.data @ trace.k.data.mT / math.sqrt(7))
    np.testing.assert_array_equal(np.isneginf(trace.masked.data), np.broadcast_to(~nn.causal(T_Q), (B, 3, T_Q, T_Q)))
    close(trace.heads, trace.weights.data @ trace.v.data)
    close(trace.concat @ mha.wo, y.data)


def test_every_traced_tensor_has_its_gradient_after_backward(rng):
    mha = randomised(nn.MultiHeadAttention(5, 3, d_k=7, d_v=11), rng)
    y, trace = mha(rng.standard_normal((T_Q, 5)), causal=True, trace=True)
    g = rng.standard_normal(y.shape)
    y.backward(g)
    close(trace.concat.grad, g @ mha.wo.data.T)
    close(trace.heads.grad, trace.concat.grad.reshape(T_Q, 3, 11).swapaxes(0, 1))
    close(trace.v.grad, trace.weights.data.mT @ trace.heads.grad)
    close(trace.weights.grad, trace.heads.grad @ trace.v.data.mT)
    for t in trace:
        assert np.isfinite(t.grad).all()


def test_without_masks_the_masked_scores_are_the_scores(rng):
    _, trace = nn.MultiHeadAttention(5, 2)(np.ones((3, 5)), trace=True)
    assert trace.masked is trace.scores


def test_tracing_does_not_change_the_result(rng):
    mha = randomised(nn.MultiHeadAttention(5, 3, d_k=7), rng)
    x = rng.standard_normal((T_Q, 5))
    close(mha(x, causal=True), mha(x, causal=True, trace=True)[0].data, 0)


def test_a_head_can_be_zeroed_through_edit(rng):
    mha = randomised(nn.MultiHeadAttention(5, 2, d_k=7, d_v=11), rng)
    x = rng.standard_normal((T_Q, 5))
    without_second = mha(x, edit=lambda name, t: t * np.array([1.0, 0.0])[:, None, None] if name == "heads" else t)
    _, trace = mha(x, trace=True)
    close(without_second, trace.heads.data[0] @ mha.wo.data[:11])


@pytest.mark.parametrize("field", nn.AttentionTrace._fields)
def test_any_traced_tensor_can_be_replaced_and_the_rest_follows(rng, field):
    mha = randomised(nn.MultiHeadAttention(5, 2, d_k=7, d_v=11), rng)
    x, other = rng.standard_normal((2, T_Q, 5))
    _, donor = mha(other, causal=True, trace=True)
    seen = []

    def patch(name, t):
        seen.append(name)
        return getattr(donor, name).detach() if name == field else t

    y, trace = mha(x, causal=True, trace=True, edit=patch)
    assert seen == list(nn.AttentionTrace._fields)
    np.testing.assert_array_equal(getattr(trace, field).data, getattr(donor, field).data)
    assert np.abs(y.data - mha(x, causal=True).data).max() > 1e-3
    if field in ("heads", "concat"):
        close(y, mha(other, causal=True).data)
    y.backward(np.ones(y.shape))  # the gradient passes beside what was cut out
    assert mha.wo.grad is not None


def test_an_edit_that_returns_nothing_or_another_shape_is_refused():
    mha = nn.MultiHeadAttention(5, 2)
    with pytest.raises(TypeError, match=r"edit\('q', \.\.\.\) returned None"):
        mha(np.ones((3, 5)), edit=lambda name, t: None)
    with pytest.raises(ValueError, match=r"edit\('q', \.\.\.\) must return the shape \(2, 3, 2\), got \(1, 3, 2\)"):
        mha(np.ones((3, 5)), edit=lambda name, t: t[:1])


# --------------------------------------------------------------------------------------------------------------------
# Positions


def test_sinusoidal_positions_are_the_table_of_the_paper():
    table = sinusoidal(np.arange(7), 5)
    for p, i in np.ndindex(7, 5):
        angle = p / 10000 ** (2 * (i // 2) / 5)
        assert table[p, i] == pytest.approx(math.cos(angle) if i % 2 else math.sin(angle), abs=1e-15)


def test_rotary_turns_pairs_as_complex_numbers(rng):
    x = rng.standard_normal((B, H, T_Q, 6))
    pairs = x[..., :3] + 1j * x[..., 3:]
    turned = pairs * np.exp(1j * np.arange(T_Q)[:, None] * 10000.0 ** (-np.arange(3) / 3))
    close(rotary(Tensor(x), np.arange(T_Q)), np.concatenate([turned.real, turned.imag], -1))
    assert rotary(Tensor(x.astype(np.float32)), np.arange(T_Q)).dtype == np.float32


def test_rotary_scores_depend_on_distances_alone(rng):
    mha = randomised(nn.MultiHeadAttention(5, 2, d_k=6, position="rotary"), rng)
    x = rng.standard_normal((B, T_Q, 5))
    shifted = np.arange(T_Q) + 17
    close(mha(x, causal=True), mha(x, causal=True, positions=shifted).data, 1e-11)
    close(mha(x, positions=np.stack([np.arange(T_Q), shifted])), mha(x).data, 1e-11)
    assert np.abs(mha(x).data - mha(x, positions=np.arange(T_Q) * 2).data).max() > 1e-3


def test_rotary_positions_may_differ_between_the_rows_of_a_batch(rng):
    mha = randomised(nn.MultiHeadAttention(5, 2, d_k=6, position="rotary"), rng)
    x = rng.standard_normal((B, T_Q, 5))
    positions = np.array([np.arange(T_Q), np.arange(T_Q)[::-1]])
    y = mha(x, positions=positions)
    for b in range(B):
        close(y[b], mha(x[b], positions=positions[b]).data)
        close(y[b], mha.per_head(x[b], positions=positions[b]).data)
    close(mha.per_head(x, positions=positions), y.data)


@pytest.mark.parametrize("positions", [np.arange(T_Q) + 0.5, np.arange(T_Q + 1), np.zeros((B + 1, T_Q), int)])
def test_positions_of_another_shape_or_kind_are_refused(positions):
    mha = nn.MultiHeadAttention(5, 2, d_k=6, position="rotary")
    with pytest.raises(ValueError, match="positions must be integers of shape"):
        mha(np.ones((B, T_Q, 5)), positions=positions)


def test_alibi_slopes_are_those_of_the_paper_and_of_its_code():
    np.testing.assert_allclose(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(alibi_slopes(4), [2**-2, 2**-4, 2**-6, 2**-8])
    np.testing.assert_allclose(alibi_slopes(6), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    np.testing.assert_allclose(alibi_slopes(1), [2**-8])


def test_alibi_takes_slope_times_distance_from_the_scaled_scores(rng):
    bias = alibi(2, 2, 3)
    np.testing.assert_allclose(bias[0], -(2**-4) * np.array([[1, 0, 1], [2, 1, 0]]))
    mha = randomised(nn.MultiHeadAttention(5, 2, d_k=7, position="alibi"), rng)
    x = rng.standard_normal((B, T_Q, 5))
    close(mha(x, causal=True), heads_by_hand(mha, x, x, nn.causal(T_Q), alibi(2, T_Q, T_Q)))
    extra = Tensor(rng.standard_normal((T_Q, T_Q)).astype(np.float32), requires_grad=True)
    assert mha.astype(np.float32)(x.astype(np.float32), bias=extra).dtype == np.float32


def test_a_bias_is_added_to_that_of_the_position(rng):
    mha = nn.MultiHeadAttention(6, 2, position="alibi", rng=0).astype(np.float64)
    x, bias = rng.standard_normal((1, 5, 6)), rng.standard_normal((1, 2, 5, 5))
    (_, both), (_, position_alone) = mha(x, bias=bias, trace=True), mha(x, trace=True)
    close(both.masked, position_alone.masked.data + bias)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (6, 7)])
def test_relative_buckets_are_those_of_t5(bidirectional, num_buckets, max_distance):
    torch, t5 = pytest.importorskip("torch"), pytest.importorskip("transformers.models.t5.modeling_t5")
    offsets = np.arange(-200, 201)
    theirs = t5.T5Attention._relative_position_bucket(
        torch.tensor(offsets), bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    np.testing.assert_array_equal(relative_buckets(offsets, num_buckets, max_distance, bidirectional), theirs.numpy())


def test_a_relative_bias_is_looked_up_by_distance_and_added_to_the_scaled_scores(rng):
    mha = randomised(nn.MultiHeadAttention(5, 3, d_k=7, position=nn.Relative(num_buckets=8, max_distance=11)), rng)
    assert mha.position.weight.shape == (8, 3)
    assert "position.weight" in dict(mha.named_parameters())
    x = rng.standard_normal((B, T_Q, 5))
    buckets = relative_buckets(np.arange(T_Q) - np.arange(T_Q)[:, None], 8, 11, True)
    assert np.unique(buckets).tolist() == [0, 1, 2, 5, 6]
    bias = mha.position.weight.data[buckets].transpose(2, 0, 1)
    close(mha(x), heads_by_hand(mha, x, x, None, bias))
    close(mha(x, causal=True), heads_by_hand(mha, x, x, nn.causal(T_Q), bias))
    shift = rng.standard_normal((T_Q, T_Q))
    close(mha(x, bias=shift), heads_by_hand(mha, x, x, None, bias + shift))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_buckets": 3}, "num_buckets must be an integer of at least 4, got 3"),
        ({"num_buckets": 8, "max_distance": 7}, "max_distance must be an integer of at least 8, got 7"),
    ],
)
def test_invalid_settings_of_relative_positions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        nn.Relative(**settings)


def test_a_scheme_is_given_by_name_by_dict_or_as_an_object():
    for scheme in (nn.Rotary(500.0), nn.Relative(8, 16, bidirectional=False), nn.Alibi(), nn.Learned(), nn.Position()):
        assert as_position(scheme) is scheme
        assert as_position(scheme.to_dict()) == scheme
    assert as_position("rotary", base=500.0, num_buckets=8) == nn.Rotary(500.0) != nn.Rotary()
    assert as_position(None) == as_position("none") == nn.Position()
    with pytest.raises(ValueError, match=r"position must be one of 'learned', .* got 'rotatory'"):
        as_position("rotatory")
    with pytest.raises(TypeError, match="bass"):
        as_position({"name": "rotary", "bass": 3})


def test_one_relative_scheme_makes_separate_tables_unless_it_has_one(rng):
    scheme = nn.Relative(num_buckets=8)
    a, b = nn.MultiHeadAttention(6, 2, position=scheme, rng=0), nn.MultiHeadAttention(6, 2, position=scheme, rng=0)
    assert scheme.weight is None
    assert a.position.weight is not b.position.weight
    shared = nn.MultiHeadAttention(6, 2, position=a.position, rng=0)
    assert shared.position.weight is a.position.weight
    x = rng.standard_normal((3, 6)).astype(np.float32)
    np.testing.assert_array_equal(shared(x).data, a(x).data)


def test_a_user_defined_scheme_is_one_class(rng):
    """Scores rise by one for each step that a key is nearer to the first token."""

    class Backwards(nn.Position):
        def bias(self, n_head, n_q, n_k, dtype):
            return Tensor(np.broadcast_to(-np.arange(float(n_k)), (n_head, n_q, n_k)), dtype=dtype, name="backwards")

    assert Backwards.name == "backwards"
    mha = randomised(nn.MultiHeadAttention(5, 2, d_k=7, position=Backwards()), rng)
    x = rng.standard_normal((B, T_Q, 5))
    expected = heads_by_hand(mha, x, x, nn.causal(T_Q), np.broadcast_to(-np.arange(float(T_Q)), (2, T_Q, T_Q)))
    close(mha(x, causal=True), expected)
    close(mha.per_head(x, causal=True), expected)


def test_an_empty_batch_passes():
    mha = nn.MultiHeadAttention(5, 2)
    x = np.zeros((0, 3, 5), np.float32)
    masks = {"key_allow": np.ones((0, 3), bool), "allow": np.ones((0, 3, 3), bool), "causal": True}
    assert mha(x, **masks).shape == mha.per_head(x, **masks).shape == (0, 3, 5)


def test_a_scheme_in_an_attention_is_made_for_any_number_of_tokens():
    class Seen(Position):
        def initialize(self, n_head, d_model, block_size, rng):
            sizes.append((n_head, d_model, block_size))
            return self

    sizes = []
    nn.MultiHeadAttention(5, 3, d_k=2, position=Seen())
    assert sizes == [(3, 5, 0)]


def test_cross_attention_refuses_a_positional_scheme():
    mha = nn.MultiHeadAttention(5, 2, position="alibi")
    with pytest.raises(ValueError, match="cross-attention"):
        mha(np.ones((3, 5)), memory=np.ones((7, 5)))


@pytest.mark.parametrize("position", [None, "rotary", "alibi", RELATIVE])
def test_float32_stays_float32_through_multi_head_attention_and_back(rng, position):
    mha = nn.MultiHeadAttention(5, 4, d_k=6, n_kv_head=2, position=position, dropout=0.1, bias=True, rng=0)
    x = Tensor(rng.standard_normal((B, T_Q, 5)).astype(np.float32), requires_grad=True)
    y, trace = mha(x, causal=True, trace=True)
    y.backward(np.ones(y.shape))
    assert {t.dtype for t in (y, *trace)} == {np.dtype(np.float32)}
    assert {p.grad.dtype for p in (x, *mha.parameters())} == {np.dtype(np.float32)}


def test_seeds_decide_the_weights_and_dropout_has_a_generator_of_its_own():
    a, b, c = (nn.MultiHeadAttention(5, 2, dropout=0.5, rng=seed) for seed in (0, 0, 42))
    np.testing.assert_array_equal(a.wq.data, b.wq.data)
    assert (a.wq.data != c.wq.data).any()
    assert list(a.generators()) == ["heads.dropout.rng"]
    rng = np.random.default_rng(0)
    assert nn.MultiHeadAttention(5, 2, rng=rng).heads.dropout.rng is not rng


# --------------------------------------------------------------------------------------------------------------------
# The article as a program


def test_the_example_shows_every_matrix_of_the_article_and_proves_what_it_says(capsys):
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "attention_by_hand.py"))
    example["main"]()  # it asserts that each pair of ways gives the same numbers, and that no later row is seen
    printed = capsys.readouterr().out
    shapes = {"X": "3 × 5", "Concat": "3 × 22", "W_O": "22 × 5", "Y": "3 × 5", "X_4": "1 × 5", "Y_4": "1 × 5"}
    for i in (1, 2):
        shapes |= {f"W_{name}{i}": f"5 × {width}" for name, width in (("Q", 7), ("K", 7), ("V", 11))}
        shapes |= {f"Q_{i}": "3 × 7", f"K_{i}": "3 × 7", f"V_{i}": "3 × 11", f"H_{i}": "3 × 11", f"q_{i}": "1 × 7"}
        shapes |= {f"{name}_{i}": "3 × 3" for name in ("products", "scores", "masked", "S")}
    titles = [line.split() for line in printed.splitlines() if line.startswith("    ") and "×" in line]
    for name, shape in shapes.items():
        assert any(words[0] == name and words[-3:] == shape.split() for words in titles), name
    assert printed.count("the same numbers") == 3
    mha, x = example["make_attention"]()
    with no_grad():
        whole = mha(x, causal=True).data
    for row in whole:
        assert "".join(f"{example['write_number'](n):>7}" for n in row) in printed
    assert "108 numbers for three words, 144 for four" in printed
    assert all(len(line) <= 120 for line in printed.splitlines())


def test_the_example_counts_the_multiplications_of_its_shapes(capsys):
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "attention_by_hand.py"))["main"]()
    all_rows = 4 * 5 * 2 * (7 + 7 + 11) + 4 * 4 * 2 * (7 + 11) + 4 * 22 * 5
    assert f"{all_rows // 4} multiplications instead of {all_rows}" in capsys.readouterr().out
