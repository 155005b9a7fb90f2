"""Scaled dot-product attention as one primitive, its rule, and its composition from simpler primitives."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_mha import notation
from tinygrad_mha.arguments import check_boolean
from tinygrad_mha.ops.elementary import INFINITY, add, mask, matmul, mul, where
from tinygrad_mha.ops.elementary import scale as multiply_by
from tinygrad_mha.ops.network import softmax
from tinygrad_mha.primitives import primitive

__all__ = ["attention", "only_seen"]


@primitive(
    kind="attention", roles=("data", "data", "data", "mask", "operand", "operand"), formula=notation.write_attention
)
def attention(q, k, v, allow=None, bias=None, keep=None, *, scale=None) -> Any:
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
    scores = multiply_by(matmul(q, k.mT), by=attention_scale(q, scale))
    if bias is not None:
        scores = add(scores, bias)
    weights = softmax(scores if allow is None else mask(scores, allow))
    return matmul(weights if keep is None else mul(weights, keep), v)


def attention_scale(q, scale):
    return q.shape[-1] ** -0.5 if scale is None else scale


def only_seen(rows, allow):
    """`rows` of keys or values, with zeros for those that no query may see: a nan in padding must not reach 0 * nan."""
    if allow is None:
        return rows
    check_boolean(allow, "allow")
    seen = np.atleast_2d(np.asarray(allow)).any(axis=-2)[..., None]
    return rows if seen.all() else where(seen, rows, 0.0)
