"""Kernels in plain NumPy, for every dtype and layout. `tinygrad_mha.kernels` describes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["EXACT_P", "LOWEST", "MANY", "TANH_P", "adam", "blockwise", "erf", "gelu", "gelu_vjp", "is_narrow"]
__all__ += ["is_row", "layer_norm", "layer_norm_vjp", "merge_rows", "row_mean_of_product", "shrink_large"]
__all__ += ["softmax_over_keys", "sum_leading"]

# --------------------------------------------------------------------------------------------------------------------
# The error function

# Rational approximations, computed for this project at Chebyshev nodes in 60-digit arithmetic. Each row holds the
# coefficients of one power of x in the numerator P and the denominator Q, the lowest power first.
#
# float64: for |x| <= 1, erf(x) = x P(x^2) / Q(x^2), relative error 1.1e-16; for 1 <= |x| <= 6,
# 1 - erf(x) = exp(-x^2) P(x) / Q(x), relative error 1.3e-15. Beyond 6, erf rounds to 1.
NEAR = (
    (1.1283791670955126, 1.0),
    (0.08841052542214509, 0.4116851214558425),
    (0.03819055372753878, 0.07107387083062207),
    (-0.00015671142571065683, 0.006193420046513889),
    (0.00011863778745563329, 0.000234623401538168),
    (-3.07674302885028e-06, 0.0),
)
FAR = (
    (0.9999999329230368, 1.0),
    (1.9092051614072063, 3.037583680554602),
    (1.7912379461953511, 4.218787116156915),
    (1.042020632999184, 3.517072075916176),
    (0.40287947933460566, 1.9377341835736956),
    (0.10380702402663751, 0.7289025349965536),
    (0.016719752883378385, 0.18519264748163738),
    (0.0013534639791073974, 0.029634990027643294),
    (0.0, 0.002398952446946931),
)
# float32 and float16: for |x| <= 3.92, erf(x) = x P(x^2) / Q(x^2), relative error 2.2e-8. Beyond, erf rounds to 1.
SINGLE = (
    (1.1283791910546426, 1.0),
    (0.18359681156407145, 0.4960422000444414),
    (0.054416713587951165, 0.11357112975179505),
    (0.00382398323287719, 0.015454809761642235),
    (0.0003918728026236124, 0.0013187295414998446),
    (5.051744773552552e-06, 6.65764719617305e-05),
    (-1.4986023864796218e-08, 0.0),
)


def evaluate(table: tuple[tuple[float, float], ...], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numerator and the denominator of a rational function, by Horner's rule."""
    p, q = (np.full_like(x, c) for c in table[-1])
    for a, b in table[-2::-1]:
        p *= x
        p += a
        q *= x
        q += b
    return p, q


def erf(x: np.ndarray) -> np.ndarray:
    """The error function, with a relative error of about 1e-15 in float64 and 3e-7 in float32. NumPy has none."""
    return erf_single(x) if x.dtype.itemsize <= 4 else erf_double(x)


def erf_single(x: np.ndarray) -> np.ndarray:
    size = np.asarray(np.minimum(np.maximum(x, -3.92), 3.92))  # NumPy makes a scalar of a 0-d array
    p, q = evaluate(SINGLE, size * size)
    size *= p
    size /= q
    np.clip(size, -1.0, 1.0, out=size)
    far = np.abs(x) >= 3.92
    return np.where(far, np.copysign(np.float32(1), x), size) if far.any() else size


def erf_double(x: np.ndarray) -> np.ndarray:
    size = np.minimum(np.abs(x), 6.0)
    near = np.minimum(size, 1.0)
    p, q = evaluate(NEAR, near * near)
    far_p, far_q = evaluate(FAR, size)
    inner = near * p / q
    outer = 1.0 - np.exp(-size * size) * far_p / far_q
    return np.copysign(np.where(size < 1.0, inner, outer), x)


# --------------------------------------------------------------------------------------------------------------------
# GELU

# Phi(x) = 1 / (1 + exp(-x P(x^2))), coefficients of P with the lowest power first. GPT-2's approximation is exactly
# this with two coefficients, because (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)). The exact form was fitted for this project
# on |x| <= 5.5: the error of Phi is 3e-8, half a unit in the last place of float32 below 1. Beyond, x P(x^2) grows.
TANH_P = (2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)
EXACT_P = (
    1.5957698822021484,
    0.07266616821289062,
    -6.518961890833452e-05,
    -0.00011061254917876795,
    7.929522325866856e-06,
    -2.645296603986935e-07,
    3.5124341213332855e-09,
)
LOWEST_INPUT = -1e4  # Phi is 0 there in every dtype, and minus infinity times 0 would be nan


def gelu(x: np.ndarray, tanh: bool) -> tuple[np.ndarray, np.ndarray]:
    if x.dtype.itemsize < 4:
        y, phi = gelu(x.astype(np.float32), tanh)
        return y.astype(x.dtype), phi.astype(x.dtype)
    if x.dtype.itemsize > 4 and not tanh:
        phi = np.asarray(0.5 * (1.0 + erf(x * math.sqrt(0.5))))  # NumPy makes a scalar of a 0-d array
        return np.asarray(np.maximum(x, LOWEST_INPUT) * phi), phi
    first, *rest = [-c for c in (TANH_P if tanh else EXACT_P)[::-1]]

    def step(x: np.ndarray, y: np.ndarray, phi: np.ndarray) -> None:
        square = np.multiply(x, x, out=phi)
        z = np.multiply(square, first, out=y)
        for c in rest[:-1]:
            z += c
            z *= square
        z += rest[-1]
        z *= x
        np.exp(z, out=z)
        z += 1.0
        np.reciprocal(z, out=phi)
        np.maximum(x, LOWEST_INPUT, out=y)
        y *= phi

    y, phi = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    with np.errstate(over="ignore"):  # an infinite exp makes Phi 0
        blockwise(step, x, y, phi)
    return y, phi


def gelu_vjp(g: np.ndarray, phi: np.ndarray | None, x: np.ndarray, tanh: bool) -> np.ndarray:
    if phi is None:
        _, phi = gelu(x, tanh)
    linear, cubic = TANH_P

    def step_exact(g: np.ndarray, phi: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
        x = np.clip(x, -40.0, 40.0)  # beyond, Phi' rounds to 0; prevents infinity times 0
        np.multiply(x, x, out=out)
        out *= -0.5
        np.exp(out, out=out)
        out *= 1.0 / math.sqrt(2.0 * math.pi)  # Phi', the density of the normal distribution
        out *= x
        out += phi
        out *= g

    def step_tanh(g: np.ndarray, phi: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
        x = np.clip(x, -10.0, 10.0)  # beyond, Phi' rounds to 0; prevents an overflow of x^3
        np.multiply(x, x, out=out)
        out *= 3.0 * cubic
        out += linear
        out *= x
        out *= phi
        out *= np.subtract(1.0, phi, out=x)
        out += phi
        out *= g

    out = np.empty(x.shape, x.dtype)
    with np.errstate(over="ignore"):
        blockwise(step_tanh if tanh else step_exact, g, phi, x, out)
    return out


BLOCK = 1 << 15  # elements: a block of each of a few arrays stays in the cache of a core


def blockwise(step: Callable[..., None], *arrays: np.ndarray, size: int = BLOCK) -> None:
    """Call `step` on arrays of one shape in blocks of `size` elements, or on the whole if small or not contiguous."""
    if arrays[0].size <= size or not all(a.flags.c_contiguous for a in arrays):
        step(*[a if a.ndim else a.reshape(1) for a in arrays])
        return
    flat = [a.reshape(-1) for a in arrays]
    for start in range(0, flat[0].size, size):
        step(*[a[start : start + size] for a in flat])


# --------------------------------------------------------------------------------------------------------------------
# Layer norm


def layer_norm(x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, eps: float) -> tuple[Any, Any, Any]:
    if is_narrow(x):
        y, mean, rstd = (normalize_row if is_row(x) else normalize_in_float64)(x, eps)
    else:
        y, mean, rstd = normalize(x, eps)
        large = ~(rstd > 0)  # the variance of the row is not finite
        if large.any():
            factor = shrink_large(large, x.dtype)
            y, mean, rstd = normalize(x * factor, np.where(large, 0, eps).astype(x.dtype))
            mean, rstd = mean / factor, rstd * factor
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias, mean, rstd


def normalize(x: np.ndarray, eps: float | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x - mean) * rstd, and of each row the mean (..., 1) and rstd = 1 / sqrt(var + eps) (..., 1)."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        mean = row_mean(x)
        y = x - mean
        rest = row_mean(y)  # the rounding error of the mean, which would be normalized where a row is constant
        mean += rest
        y -= rest
        rstd = 1.0 / np.sqrt(row_mean_of_product(y, y) + eps)
        y *= rstd
    return y, mean, rstd


def normalize_in_float64(x: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`normalize` for narrow x: in float64, their sums of squares do not overflow, and their means are exact enough."""
    y = x.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = row_mean(y)
        y -= mean
        rstd = 1.0 / np.sqrt(row_mean_of_product(y, y) + eps)
        y *= rstd
    return y.astype(x.dtype), mean.astype(x.dtype), rstd.astype(x.dtype)


def normalize_row(x: np.ndarray, eps: float) -> tuple[np.ndarray, float, float]:
    """`normalize_in_float64` of one row, whose mean and rstd are numbers, with which NumPy takes less time."""
    y = x.reshape(-1).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        y -= (mean := float(np.add.reduce(y)) / y.size)
        y *= (rstd := (y.dot(y) / y.size + eps) ** -0.5)
    return y.astype(x.dtype).reshape(x.shape), mean, rstd


FEW = 1 << 12  # elements: below, arithmetic takes less time than the calls of NumPy


def is_narrow(x: np.ndarray) -> bool:
    """Whether norms compute in float64: on any float16, and on float32 if that takes no longer."""
    return x.dtype == np.float16 or (x.dtype == np.float32 and x.size <= FEW)


def is_row(x: np.ndarray) -> bool:
    """Whether x, of any number of axes, is one row that is not empty."""
    return 0 < x.size == x.shape[-1]


def layer_norm_vjp(
    g: np.ndarray, mean: Any, rstd: Any, x: np.ndarray, weight: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    # x_hat always has mean 0 and mean square 1 (up to eps). So remove from its gradient the parts along the constant
    # vector and along x_hat, which would change these two.
    x_hat = x - mean
    x_hat *= rstd
    g_weight = None
    if weight is not None:
        fits = weight.shape == x.shape[-1:]
        g_weight = np.einsum("nc,nc->c", merge_rows(g), merge_rows(x_hat)) if fits else g * x_hat
    g_x = g * (1 if weight is None else weight)
    if x.dtype == np.float16:
        g_x = g_x.astype(np.float32)
    along_x_hat = row_mean_of_product(g_x, x_hat)
    g_x -= row_mean(g_x)
    x_hat *= along_x_hat
    g_x -= x_hat
    g_x *= rstd
    return g_x, g_weight, g


def row_mean(x: np.ndarray) -> np.ndarray:
    """The mean over the last axis, kept with length 1. For small arrays np.mean takes four times as long."""
    return np.add.reduce(x, axis=-1, keepdims=True) / x.shape[-1]


MANY = 1 << 16  # elements: above, sums over leading axes are products
BLOCK = 1024  # rows that one product adds up: a product of 100 000 rows loses digits, too


def sum_leading(x: np.ndarray, n: int) -> np.ndarray:
    """The sum over the first `n` axes. NumPy adds row after row, which loses digits of float32; a product does not."""
    if x.dtype != np.float32:
        return x.sum(axis=tuple(range(n)))
    rows = x.reshape((math.prod(x.shape[:n]), math.prod(x.shape[n:])))
    count, rest = divmod(len(rows), BLOCK)
    total = np.ones(rest, x.dtype).dot(rows[count * BLOCK :])
    if count:
        blocks = rows[: count * BLOCK].reshape((count, BLOCK, rows.shape[1]))
        total += np.ones(count, x.dtype).dot(np.ones(BLOCK, x.dtype) @ blocks)
    return total.reshape(x.shape[n:])


def shrink_large(large: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """A factor for each row: 1, or where it is `large` a power of 2 with which its squares do not overflow.

    It is so small that an eps does not count beside the mean square even then.
    """
    return np.where(large, np.ldexp(1.0, -5 * np.finfo(dtype).maxexp // 8), 1.0).astype(dtype)


def row_mean_of_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.vecdot(a, b)[..., None] / a.shape[-1]


def merge_rows(x: np.ndarray) -> np.ndarray:
    """Merge all leading axes: (..., n) -> (N, n)."""
    return x if x.ndim == 2 else x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))


# --------------------------------------------------------------------------------------------------------------------
# Softmax of attention

# The lowest finite number of each dtype. As 0-d arrays, because NumPy would convert a Python number in every call.
LOWEST = {np.dtype(kind): np.array(np.finfo(kind).min) for kind in (np.float16, np.float32, np.float64, np.longdouble)}


def softmax_over_keys(scores: np.ndarray, allow: np.ndarray | None) -> np.ndarray:
    if allow is not None:
        np.copyto(scores, -np.inf, where=np.logical_not(allow, order="C"))
    # Shift by the lowest finite number where all scores are -inf: their exp are 0, and so are the weights.
    scores -= np.maximum.reduce(scores, axis=-2, keepdims=True, initial=LOWEST[scores.dtype])
    weights = np.exp(scores, out=scores)
    if weights.size <= FEW:
        total = np.add.reduce(weights, axis=-2, keepdims=True)
    else:
        total = np.matmul(np.ones((1, weights.shape[-2]), weights.dtype), weights)  # faster, if they are many
    weights /= np.maximum(total, 1, out=total)
    return weights


# --------------------------------------------------------------------------------------------------------------------
# Adam


def adam(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, betas: tuple[float, float], keep: float, rate: float,
    root: float, eps: float,
) -> None:  # fmt: skip
    beta1, beta2 = betas
    rate, eps = rate / root, eps / root  # m / (root * sqrt(v) + eps) = m / root / (sqrt(v) + eps / root), a pass less

    def step(p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> None:
        space = np.multiply(g, 1 - beta1)
        m *= beta1
        m += space
        np.multiply(g, g, out=space)
        space *= 1 - beta2
        v *= beta2
        v += space
        np.sqrt(v, out=space)
        space += eps
        np.divide(m, space, out=space)
        space *= rate
        if keep != 1:
            p *= keep
        p -= space

    blockwise(step, p, g, m, v)
