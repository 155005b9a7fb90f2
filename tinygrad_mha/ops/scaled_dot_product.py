"""Scaled dot-product attention, twice: `attention` is one fused primitive, `attend` the same formula step by step.

Use `attend` to see, name or replace the scores and weights. `attention` is faster, and is tested against `attend`.

Axes: T_q queries, T_k keys, d_k the width of a query and of a key, d_v the width of a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_mha import notation
from tinygrad_mha.arguments import check_boolean
from tinygrad_mha.ops.elementary import INFINITY, add, mask, matmul, where
from tinygrad_mha.ops.elementary import scale as multiply_by
from tinygrad_mha.ops.network import dropout, softmax
from tinygrad_mha.primitives import primitive

__all__ = ["attend", "attention"]


@primitive(
    kind="attention", roles=("data", "data", "data", "mask", "operand", "operand"), formula=notation.write_attention
)
def attention(q, k, v, allow=None, bias=None, keep_mask=None, *, scale=None) -> Any:
    """softmax(q k^T * scale + bias, -inf where not `allow`) v in one node (arXiv:1706.03762, equation 1).

    `attend` is the same formula in steps, and describes the arguments.
    """
    k, v = zero_unattended(k, v, allow)
    scores = np.matmul(q, k.mT) * score_scale(q, scale)
    if bias is not None:
        scores = scores + bias
    if allow is not None:
        scores = np.where(allow, scores, -INFINITY)
    weights = softmax(scores)
    return np.matmul(weights if keep_mask is None else weights * keep_mask, v), weights, k, v


def attention_vjp(g, y, weights, seen_k, seen_v, q, k, v, allow, bias, keep_mask, *, scale):
    """Go back through kept @ v, dropout, softmax, scaling. Returns gradients of q, k, v, allow, bias, keep_mask."""
    kept = weights if keep_mask is None else weights * keep_mask
    g_kept = g @ seen_v.mT
    g_weights = g_kept if keep_mask is None else g_kept * keep_mask
    g_scores = weights * (g_weights - np.sum(g_weights * weights, axis=-1, keepdims=True))  # the rule of softmax
    g_qk = g_scores * score_scale(q, scale)
    return g_qk @ seen_k, g_qk.mT @ q, kept.mT @ g, None, g_scores, g_kept * weights


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


def score_scale(q, scale):
    return q.shape[-1] ** -0.5 if scale is None else scale


def zero_unattended(k, v, allow):
    """Zero the keys and values that no query may attend to: nan in padding times 0 would be nan."""
    if allow is None:
        return k, v
    check_boolean(allow, "allow")
    # Which keys some query may attend to: allow (..., T_q, T_k) -> (..., T_k, 1), which broadcasts with k and v.
    seen = np.atleast_2d(np.asarray(allow)).any(axis=-2)[..., None]
    return (k, v) if seen.all() else (where(seen, k, 0.0), where(seen, v, 0.0))
