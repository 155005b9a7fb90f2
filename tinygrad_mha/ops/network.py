"""The primitives of neural networks: softmax, losses, normalization, GELU. Rules are written as in `elementary`.

A primitive with a composition (`composed_of`) is an exception: its rule gets arrays only and may use NumPy, because
second derivatives go through the composition.
"""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np

from tinygrad_mha import kernels, notation
from tinygrad_mha.arguments import check_ids, check_integer
from tinygrad_mha.kernels.reference import LOWEST, is_narrow, is_row, merge_rows, row_mean_of_product, shrink_large
from tinygrad_mha.ops.elementary import as_floating, clip, convert_ids, erf, exp, keepdims_shape, mean, sqrt, sum, where
from tinygrad_mha.ops.elementary import tanh as apply_tanh
from tinygrad_mha.primitives import primitive

__all__ = [
    "cross_entropy",
    "dropout",
    "gelu",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "rms_norm",
    "rotate",
    "softmax",
]

# --------------------------------------------------------------------------------------------------------------------
# Softmax and losses


@primitive(kind="distribution", formula=notation.function, sentence=notation.say_softmax)
def softmax(x, *, axis=-1) -> np.ndarray:
    """exp(x) / sum(exp(x)) along `axis`. A row of -inf, where nothing is allowed, gives zeros and zero gradients."""
    _, e, total = shifted_exp(x, axis)
    e /= total
    return e


# y = e / sum(e), so dy_i/dx_j = y_i (delta_ij - y_j).
softmax.vjps(lambda g, y, x, axis: y * (g - (g * y).sum(axis=axis, keepdims=True)))


def shifted_exp(x, axis):
    """Return x - max(x), exp(x - max(x)) and the sum of that exp, along `axis`. The shift does not change the softmax.

    A row of -inf has the maximum -inf, and -inf minus -inf is nan. So `initial` shifts such a row by the lowest finite
    number; its exp are 0, their sum is set to 1, and its softmax is 0. All other sums are at least exp(0) = 1 already.
    """
    shifted = subtract_largest(as_floating(x), axis)
    e = np.exp(shifted)
    return shifted, e, np.maximum(np.add.reduce(e, axis=axis, keepdims=True), 1)


def subtract_largest(x, axis):
    """x minus its largest element along `axis`; the limit where that is inf: 0 for elements inf and -inf for others."""
    largest = find_largest(x, axis)
    is_infinite = largest == math.inf
    if np.count_nonzero(is_infinite):
        x = np.where(is_infinite, np.where(x == math.inf, 0, -math.inf), x).astype(x.dtype)
        largest = np.where(is_infinite, 0, largest)
    with np.errstate(over="ignore"):  # to -inf, whose exp is 0 as it should be
        return x - largest


def find_largest(x, axis):
    """The largest element along `axis`, or the lowest finite number if that is larger."""
    return np.maximum.reduce(x, axis=axis, keepdims=True, initial=LOWEST[x.dtype])


@primitive(kind="normalization", label="log softmax", formula=notation.function, sentence=notation.say_softmax)
def log_softmax(x, *, axis=-1) -> np.ndarray:
    """x - log(sum(exp(x))) along `axis`. A row of -inf stays -inf."""
    shifted, _, total = shifted_exp(x, axis)
    return shifted - np.log(total)


log_softmax.vjps(lambda g, y, x, axis: g - exp(y) * g.sum(axis=axis, keepdims=True))


@primitive(kind="reduction", formula=notation.function)
def logsumexp(x, *, axis=None, keepdims=False) -> np.ndarray:
    """log(sum(exp(x))) over `axis`, without overflow. -inf where all elements are."""
    x = as_floating(x)
    _, _, total = shifted_exp(x, axis)
    largest = np.max(x, axis=axis, keepdims=True, initial=-math.inf)
    y = np.log(total) + largest
    return y if keepdims else np.squeeze(y, axis=axis)


logsumexp.vjps(lambda g, y, x, axis, keepdims: g.reshape(keepdims_shape(x, axis)) * softmax(x, axis=axis))


@primitive(
    kind="loss",
    roles=("data", "targets"),
    label="cross entropy",
    formula=notation.function,
    sentence=notation.say_cross_entropy,
    arrange=convert_ids,
)
def cross_entropy(logits, targets, *, ignore_index=-100, label_smoothing=0.0, reduction="mean") -> Any:
    """-log(softmax(logits)[target]): logits (..., C), integer targets (...); classes on the last axis.

    Targets equal to `ignore_index` do not count; the mean over no targets is 0. With `label_smoothing` s, the target
    distribution is 1 - s on the target plus s / C on every class (arXiv:1512.00567). `reduction`: mean, sum or none.
    """
    check_cross_entropy(logits, targets, ignore_index, label_smoothing, reduction)
    class_ids = np.ravel(targets)
    ignored = np.flatnonzero(class_ids == ignore_index)
    rows = merge_rows(as_floating(logits))
    if ignored.size:
        rows, class_ids = rows.copy(), class_ids.copy()
        rows[ignored] = class_ids[ignored] = 0  # 0 * nan would let a nan in padding through
    at_target, n = (np.arange(class_ids.size), class_ids), builtins.max(class_ids.size - ignored.size, 1)
    shifted = subtract_largest(rows, -1)
    loss = shifted[at_target] * (label_smoothing - 1)
    if label_smoothing:
        loss -= label_smoothing * shifted.mean(-1)
    probabilities = np.exp(shifted, out=shifted)
    total = np.maximum(probabilities.sum(-1), 1)
    loss += np.log(total)
    loss[ignored] = 0
    probabilities /= total[:, None]
    loss = loss.reshape(logits.shape[:-1]) if reduction == "none" else loss.sum() / (n if reduction == "mean" else 1)
    return loss.astype(rows.dtype), probabilities, at_target, ignored, n


def cross_entropy_vjp(
    g, y, probabilities, at_target, ignored, n, logits, targets, *, ignore_index, label_smoothing, reduction
):
    # d loss / d logits = probabilities - ((1 - s) * one_hot(target) + s / C), with s = label_smoothing.
    gradient = probabilities - label_smoothing / logits.shape[-1]
    gradient[at_target] -= 1 - label_smoothing
    gradient *= g.reshape(-1, 1) / (n if reduction == "mean" else 1)
    gradient[ignored] = 0
    return gradient.reshape(logits.shape), None


cross_entropy.vjp_joint(cross_entropy_vjp)


@cross_entropy.composed_of
def cross_entropy_from_primitives(logits, targets, *, ignore_index, label_smoothing, reduction):
    valid, class_ids, n = select_targets(targets, ignore_index)
    log_p = log_softmax(clear_ignored(logits, valid))
    loss = -log_p[(*np.indices(class_ids.shape, sparse=True), class_ids)]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * mean(log_p, axis=-1)
    loss = where(valid, loss, 0.0)
    if reduction == "none":
        return loss
    return sum(loss) if reduction == "sum" else sum(loss) / n


def check_cross_entropy(logits, targets, ignore_index, label_smoothing, reduction):
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    check_integer(ignore_index, "ignore_index")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if np.ndim(logits) < 1 or np.shape(targets) != logits.shape[:-1]:
        raise ValueError(f"expected logits (..., C) and targets (...), got {np.shape(logits)} and {np.shape(targets)}")
    check_ids(targets, logits.shape[-1], "targets", besides=ignore_index)


def select_targets(targets, ignore_index):
    """Which targets count, the targets with the ignored ones replaced by 0, and how many count (at least 1)."""
    targets = np.asarray(targets)
    valid = targets != ignore_index
    return valid, np.where(valid, targets, 0), builtins.max(int(valid.sum()), 1)


def clear_ignored(logits, valid):
    """`logits` with zeros in the rows that are ignored, because 0 * nan would let a nan in padding through."""
    return logits if valid.all() else where(valid[..., None], logits, 0.0)


# --------------------------------------------------------------------------------------------------------------------
# Normalization, over the last axis


@primitive(kind="normalization", roles=("data", "weight", "bias"), label="LayerNorm", formula=notation.write_norm)
def layer_norm(x, weight=None, bias=None, *, eps=1e-5) -> Any:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis (arXiv:1607.06450).

    The variance has divisor n. It is computed from x - mean, which is accurate even if |mean| is much larger than the
    standard deviation.
    """
    return kernels.layer_norm(x, weight, bias, eps)


def layer_norm_vjp(g, y, mean, rstd, x, weight, bias, *, eps):
    return kernels.layer_norm_vjp(g, mean, rstd, x, weight)


layer_norm.vjp_joint(layer_norm_vjp)


@layer_norm.composed_of
def layer_norm_from_primitives(x, weight=None, bias=None, *, eps=1e-5):
    centred = x - mean(x, axis=-1, keepdims=True)
    return scale_and_shift(centred / sqrt(mean(centred * centred, axis=-1, keepdims=True) + eps), weight, bias)


@primitive(kind="normalization", roles=("data", "weight"), label="RMSNorm", formula=notation.write_norm)
def rms_norm(x, weight=None, *, eps=1e-5) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv:1910.07467)."""
    if is_narrow(x) and is_row(x):
        x_hat, rstd = scale_row(x, eps)
        return scale_and_shift(x_hat, weight, None), x_hat, rstd
    wide = x.astype(np.float64) if is_narrow(x) else x
    with np.errstate(divide="ignore", over="ignore"):  # an overflow is handled below
        rstd = 1.0 / np.sqrt(row_mean_of_product(wide, wide) + eps)
    if np.count_nonzero(rstd) < rstd.size:  # the squares of some rows overflow
        factor = shrink_large(rstd == 0, wide.dtype)
        scaled = wide * factor
        rstd = factor / np.sqrt(row_mean_of_product(scaled, scaled) + np.where(rstd == 0, 0, eps))
    with np.errstate(invalid="ignore"):
        x_hat = (wide * rstd).astype(x.dtype, copy=False)
    return scale_and_shift(x_hat, weight, None), x_hat, rstd.astype(x.dtype, copy=False)


def scale_row(x, eps):
    """x_hat and 1 / sqrt(mean(x^2) + eps) of one row; the latter is a number, with which NumPy takes less time."""
    wide = x.reshape(-1).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        rstd = (wide.dot(wide) / wide.size + eps) ** -0.5
        wide *= rstd
    return wide.astype(x.dtype).reshape(x.shape), rstd


def rms_norm_vjp(g, y, x_hat, rstd, x, weight, *, eps):
    u = g if weight is None else g * weight
    return rstd * (u - x_hat * row_mean_of_product(u, x_hat)), g * x_hat


rms_norm.vjp_joint(rms_norm_vjp)


@rms_norm.composed_of
def rms_norm_from_primitives(x, weight=None, *, eps=1e-5):
    return scale_and_shift(x / sqrt(mean(x * x, axis=-1, keepdims=True) + eps), weight, None)


def scale_and_shift(x, weight, bias):
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


# --------------------------------------------------------------------------------------------------------------------
# GELU


@primitive(kind="activation", label="GELU", formula=notation.function)
def gelu(x, *, tanh=False) -> Any:
    """x * Phi(x), where Phi is the cumulative distribution function of the standard normal (arXiv:1606.08415).

    Phi is computed exactly with erf, or with `tanh=True` by the approximation that GPT-2 uses:
    0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
    """
    return kernels.gelu(as_floating(x), tanh)


def gelu_phi(x, tanh):
    """Phi(x), on arrays and on Tensors."""
    return 0.5 * (1.0 + (apply_tanh(gelu_tanh_argument(x)) if tanh else erf(x * math.sqrt(0.5))))


def gelu_tanh_argument(x):
    x = clip(x, min=-10.0, max=10.0)  # beyond 10 the tanh rounds to 1; prevents an overflow of x^3
    return math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))


def gelu_vjp(g, y, phi, x, *, tanh):
    return kernels.gelu_vjp(g, phi, x, tanh)


gelu.vjps(gelu_vjp)


@gelu.composed_of
def gelu_from_primitives(x, *, tanh):
    return x * gelu_phi(x, tanh)


# --------------------------------------------------------------------------------------------------------------------
# Dropout and rotation


@primitive(kind="elementwise", roles=("operand", "mask"), formula=notation.write_dropout)
def dropout(x, keep_mask) -> Any:
    """x * keep_mask, where `keep_mask` is 0 for dropped elements and 1 / (1 - p) for the others.

    Unlike in PyTorch, the second argument is not the probability p: the caller draws the mask, so the primitive is a
    pure function. `nn.Dropout(p)` draws the mask and applies it.
    """
    return np.multiply(x, keep_mask)


dropout.vjps(lambda g, y, x, keep_mask: g * keep_mask, lambda g, y, x, keep_mask: g * x)


@primitive(kind="elementwise")
def rotate(x, *, angles) -> np.ndarray:
    """Rotate pairs of elements: element i of a row (..., d) is paired with i + d / 2, and turns by angles[..., i].

    `angles` (..., d / 2) broadcasts with x. Rotary position embeddings (arXiv:2104.09864) do this to queries and keys.
    """
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


rotate.vjps(lambda g, y, x, angles: rotate(g, angles=-angles))  # the transpose of a rotation is its inverse
