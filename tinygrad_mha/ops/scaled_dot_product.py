"""Scaled dot-product attention: `attend` is the formula step by step, `attention` one fused primitive.

Use `attend` to see, name or replace the scores and weights. `attention` is faster, and is tested against `attend`.
`multi_head_attention` is `attention` of all heads at once, which stand side by side in the columns of q, k, v and the
result; `self_attention` takes q, k and v in one matrix.

Axes: T_q queries, T_k keys, d_k the width of a query and of a key, d_v the width of a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_mha import kernels, notation
from tinygrad_mha.arguments import check_boolean
from tinygrad_mha.ops.elementary import X, add, mask, matmul, split, where
from tinygrad_mha.ops.elementary import scale as multiply_by
from tinygrad_mha.ops.network import dropout, softmax
from tinygrad_mha.primitives import primitive

__all__ = ["attend", "attention", "join_heads", "multi_head_attention", "self_attention", "split_heads"]


@primitive(
    kind="attention", roles=("data", "data", "data", "mask", "operand", "operand"), formula=notation.write_attention
)
def attention(q, k, v, allow=None, bias=None, keep_mask=None, *, scale=None) -> Any:
    """softmax(q k^T * scale + bias, -inf where not `allow`) v in one node (arXiv:1706.03762, equation 1).

    `attend` is the same formula in steps, and describes the arguments.
    """
    return attend_arrays(q, k, v, allow, bias, keep_mask, scale)


def attention_vjp(g, y, weights, scaled_q, seen_k, seen_v, q, k, v, allow, bias, keep_mask, *, scale):
    g_q, g_k, g_v, g_bias, g_keep_mask = attend_arrays_vjp(g, y, weights, scaled_q, seen_k, seen_v, keep_mask, scale)
    return g_q, g_k, g_v, None, g_bias, g_keep_mask


def attend_arrays(q, k, v, allow, bias, keep_mask, scale):
    """`attend` on arrays: the result, then the residuals weights, scaled q, k and v without unattended keys.

    Scores and weights stand transposed, (..., T_k, T_q): NumPy reduces that axis four times faster than the last one.
    """
    k, v = zero_unattended(k, v, allow)
    q = q * score_scale(q, scale)
    scores = np.matmul(k, q.mT)
    if bias is not None:
        scores = scores + np.atleast_2d(bias).mT
    weights = kernels.softmax_over_keys(scores, None if allow is None else np.atleast_2d(allow).mT)
    kept = weights if keep_mask is None else weights * np.atleast_2d(keep_mask).mT
    return np.matmul(kept.mT, v), weights, q, k, v


def attend_arrays_vjp(g, y, weights, q, k, v, keep_mask, scale, out=(None, None, None)):
    """Go back through kept @ v, dropout, softmax, scaling: the gradients of q, k, v, bias and keep_mask.

    y, weights, q, k and v are what `attend_arrays` returned, so q is the scaled one. `out` holds arrays for the
    gradients of q, k and v.
    """
    kept, g_weights, g_keep_mask = weights, np.matmul(v, g.mT), None
    if keep_mask is not None:
        keep_mask = np.atleast_2d(keep_mask).mT
        kept, g_weights, g_keep_mask = weights * keep_mask, g_weights * keep_mask, (g_weights * weights).mT
    # The sum over keys of g_weights * weights is that of g * y over the columns of v, which is shorter.
    g_scores = g_weights
    g_scores -= np.vecdot(g, y)[..., None, :]
    g_scores *= weights
    g_q = np.matmul(g_scores.mT, k, out=out[0])
    g_q *= score_scale(q, scale)
    return g_q, np.matmul(g_scores, q, out=out[1]), np.matmul(kept, g, out=out[2]), g_scores.mT, g_keep_mask


attention.vjp_joint(attention_vjp)


def unchanged(name, tensor):
    """The default of `observe`: return the tensor as it is."""
    return tensor


@attention.composed_of
def attend(q, k, v, allow=None, bias=None, keep_mask=None, *, scale=None, observe=unchanged, score=None):
    """softmax(q k^T * scale + bias, -inf where not `allow`) v, one primitive per step (arXiv:1706.03762, equation 1).

    This function defines attention in this package: the fused `attention` is tested against it.

    Args:
        q, k, v: (..., T_q, d_k), (..., T_k, d_k), (..., T_k, d_v).
        allow: boolean, True = may attend, broadcasts to the scores (..., T_q, T_k). A query that may attend to no key
            gets zeros. A key that no query may attend to is replaced by zeros, so that nan in padding cannot spread.
        bias: added to the scaled scores; broadcasts to them.
        keep_mask: multiplied by the weights: a dropout mask, drawn by the caller.
        scale: d_k ** -0.5 unless given.
        observe: called as `observe(name, tensor)` with "scores" (scaled), "masked" (with bias and mask), "weights"
            (after the softmax) and "heads" (the result). It returns the tensor to continue with: the same or another.
        score: an object of nn.scores, whose `change(scores)` comes before the bias, and `normalize(masked)` in the
            place of the softmax.

    Returns:
        (..., T_q, d_v).
    """
    k, v = zero_unattended(k, v, allow)
    scores = observe("scores", multiply_by(matmul(q, k.mT), by=score_scale(q, scale)))
    changed = scores if score is None else score.change(scores)
    masked = changed if bias is None else add(changed, bias)
    masked = observe("masked", masked if allow is None else mask(masked, allow))
    weights = observe("weights", softmax(masked) if score is None else score.normalize(masked))
    kept = weights if keep_mask is None else dropout(weights, keep_mask)
    return observe("heads", matmul(kept, v))


@primitive(kind="composite", roles=("data", "data", "data", "mask", "operand", "operand"))
def multi_head_attention(q, k, v, allow=None, bias=None, keep_mask=None, *, n_head) -> Any:
    """`attention` in `n_head` heads, which stand side by side in the columns of q, k, v and of the result.

    q (..., T_q, H d_k), k (..., T_k, H d_k), v (..., T_k, H d_v) -> (..., T_q, H d_v). `allow`, `bias` and `keep_mask`
    broadcast to the scores (..., H, T_q, T_k).
    """
    if any(x.ndim < 2 or x.shape[-1] % n_head for x in (q, k, v)):
        raise ValueError("expected the heads side by side: (..., T, n_head * d)")
    q, k, v = split_heads(q, n_head), split_heads(k, n_head), split_heads(v, n_head)
    heads, *residuals = attend_arrays(q, k, v, allow, bias, keep_mask, None)
    return join_heads(heads), *residuals


def multi_head_attention_vjp(g, y, weights, scaled_q, seen_k, seen_v, q, k, v, allow, bias, keep_mask, *, n_head):
    g, y = split_heads(g, n_head), split_heads(y, n_head)
    g_q, g_k, g_v, g_bias, g_keep_mask = attend_arrays_vjp(g, y, weights, scaled_q, seen_k, seen_v, keep_mask, None)
    return join_heads(g_q), join_heads(g_k), join_heads(g_v), None, g_bias, g_keep_mask


multi_head_attention.vjp_joint(multi_head_attention_vjp)


@multi_head_attention.composed_of
def attend_in_heads(q, k, v, allow=None, bias=None, keep_mask=None, *, n_head):
    q, k, v = split_heads(q, n_head), split_heads(k, n_head), split_heads(v, n_head)
    return join_heads(attention(q, k, v, allow, bias, keep_mask))


@primitive(kind="composite", roles=("data", "mask", "operand", "operand"))
def self_attention(qkv, allow=None, bias=None, keep_mask=None, *, n_head) -> Any:
    """`multi_head_attention` of q, k and v that stand side by side: (..., T, 3 H d) -> (..., T, H d).

    `allow`, `bias` and `keep_mask` broadcast to the scores (..., H, T, T).
    """
    if qkv.ndim < 2 or qkv.shape[-1] % (3 * n_head):
        raise ValueError("expected q, k and v side by side: (..., T, 3 * n_head * d)")
    q, k, v = view_heads(qkv, 3, n_head)
    heads, *residuals = attend_arrays(q, k, v, allow, bias, keep_mask, None)
    return heads.swapaxes(-2, -3).reshape(*qkv.shape[:-1], qkv.shape[-1] // 3), *residuals


def self_attention_vjp(g, y, weights, q, k, v, qkv, allow, bias, keep_mask, *, n_head):
    (g,), (y,) = view_heads(g, 1, n_head), view_heads(y, 1, n_head)
    g_qkv = np.empty_like(qkv, order="C")
    out = view_heads(g_qkv, 3, n_head)
    *_, g_bias, g_keep_mask = attend_arrays_vjp(g, y, weights, q, k, v, keep_mask, None, out)
    return g_qkv, None, g_bias, g_keep_mask


self_attention.vjp_joint(self_attention_vjp)


@self_attention.composed_of
def attend_packed_heads(qkv, allow=None, bias=None, keep_mask=None, *, n_head):
    return attend_in_heads(*split(qkv, 3, axis=-1), allow, bias, keep_mask, n_head=n_head)


def view_heads(x, parts, n_head):
    """Views (..., H, T, d) of the parts of an array (..., T, parts H d), as `split_heads` of each part."""
    x = x.reshape(*x.shape[:-1], parts, n_head, x.shape[-1] // (parts * n_head))
    n = x.ndim - 4
    return x.transpose(n + 1, *range(n), n + 2, n, n + 3)


def split_heads(x: X, n: int) -> X:
    """Split the columns into n heads: (..., T, n * d) -> (..., n, T, d). Head i gets columns i * d to (i + 1) * d."""
    return swap_tokens_and_heads(x.reshape(*x.shape[:-1], n, x.shape[-1] // n))


def join_heads(x: X) -> X:
    """Put the heads side by side: (..., H, T, d) -> (..., T, H * d)."""
    x = swap_tokens_and_heads(x)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def swap_tokens_and_heads(x: X) -> X:
    """(..., T, H, d) -> (..., H, T, d), and back."""
    return x.transpose(*range(x.ndim - 3), -2, -3, -1)


def score_scale(q, scale):
    if scale is not None:
        return scale
    if q.shape[-1] == 0:
        raise ValueError(f"d_k, the width of queries and keys, must be at least 1, got q of shape {tuple(q.shape)}")
    return q.shape[-1] ** -0.5


def zero_unattended(k, v, allow):
    """Zero the keys and values that no query may attend to: nan in padding times 0 would be nan."""
    if allow is None:
        return k, v
    check_boolean(allow, "allow")
    # Which keys some query may attend to: allow (..., T_q, T_k) -> (..., T_k, 1), which broadcasts with k and v.
    seen = np.atleast_2d(np.asarray(allow)).any(axis=-2)[..., None]
    return (k, v) if seen.all() else (where(seen, k, 0.0), where(seen, v, 0.0))
