"""Kernels compiled by Numba, for contiguous arrays of float32: each is one pass through memory.

They hold no lock of the interpreter, so threads run side by side. They start no threads, which would compete with those
of BLAS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from tinygrad_mha.kernels import reference
from tinygrad_mha.kernels.reference import TANH_P, merge_rows

__all__ = ["adam", "gelu", "gelu_vjp", "layer_norm", "layer_norm_vjp", "softmax_over_keys"]

F = np.float32
ONE, HALF, ZERO, INFINITY = F(1), F(0.5), F(0), F(np.inf)


def compile_loops(loops: Callable[..., None]) -> Any:
    """Compile a function at its first call, and keep the machine code on disk where a folder for it can be written.

    Numba may reorder sums and contract products with them, but may not assume that nan and inf do not occur.
    """
    options: Any = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "arcp", "nsz"}}
    try:
        return numba.njit(cache=True, **options)(loops)
    except RuntimeError:  # no folder to cache in
        return numba.njit(**options)(loops)


# --------------------------------------------------------------------------------------------------------------------
# exp

LOG2_E, LN2_HIGH, LN2_LOW = F(1.4426950408889634), F(0.693359375), F(-2.12194440e-4)  # ln 2 = LN2_HIGH + LN2_LOW
E2, E3, E4, E5, E6 = F(0.5), F(0.16666665), F(0.041665795), F(0.0083334519), F(0.0013981999)
LIMIT, BIAS, MANTISSA_BITS = F(87), np.int32(127), np.int32(23)


@compile_loops
def clip(x, limit):  # type: ignore[no-untyped-def]
    """x between -limit and limit; nan stays."""
    x = limit if x > limit else x
    return -limit if x < -limit else x


@compile_loops
def exp(z):  # type: ignore[no-untyped-def]
    """e^z = 2^n e^f with an integer n and |f| <= ln 2 / 2. It is 0 below -87 and inf above 87.

    Loops with it are vectorized, those with np.exp are not. Relative error: 1.2e-7.
    """
    inside = clip(z, LIMIT)
    n = np.floor(inside * LOG2_E + HALF)
    f = inside - n * LN2_HIGH - n * LN2_LOW
    p = ONE + f * (ONE + f * (E2 + f * (E3 + f * (E4 + f * (E5 + f * E6)))))
    p *= np.int32((np.int32(n) + BIAS) << MANTISSA_BITS).view(np.float32)
    p = ZERO if z < -LIMIT else p
    return INFINITY if z > LIMIT else p


# --------------------------------------------------------------------------------------------------------------------
# GELU

# With a = |x|, t = 1 / (1 + T a) and the density phi, 1 - Phi(a) = sqrt(2 pi) phi(a) (t C1 + t^2 C2 + ...): the form of
# Abramowitz and Stegun 26.2.17, with coefficients fitted for this project. Error of Phi: 6e-9, relative 2e-5.
T, C1, C2, C3 = F(0.25), F(0.09889879), F(0.11137229), F(0.02796661)
C4, C5, C6, C7 = F(0.27506907), F(-0.26062296), F(0.33814912), F(-0.09083291)
DENSITY_AT_0 = F(1 / math.sqrt(2 * math.pi))
LINEAR, CUBIC = F(TANH_P[0]), F(TANH_P[1])


def gelu(x: np.ndarray, tanh: bool) -> tuple[np.ndarray, None]:
    """x * Phi(x), and None: `gelu_vjp` computes Phi again, which takes no longer than reading it from memory."""
    y = np.empty_like(x)
    loops = gelu_tanh_loops if tanh else gelu_loops
    loops(x.reshape(-1), y.reshape(-1))
    return y, None


def gelu_vjp(g: np.ndarray, phi: None, x: np.ndarray, tanh: bool) -> np.ndarray:
    g_x = np.empty_like(x)
    loops = gelu_tanh_vjp_loops if tanh else gelu_vjp_loops
    loops(g.reshape(-1), x.reshape(-1), g_x.reshape(-1))
    return g_x


@compile_loops
def cdf(x, e):  # type: ignore[no-untyped-def]
    """Phi(x), given e = exp(-x^2 / 2)."""
    t = ONE / (ONE + T * abs(x))
    tail = e * t * (C1 + t * (C2 + t * (C3 + t * (C4 + t * (C5 + t * (C6 + t * C7))))))
    return ONE - tail if x > ZERO else tail


@compile_loops
def clip_low(x):  # type: ignore[no-untyped-def]
    """x, but -40 below that: there Phi is 0, and -inf times 0 would be nan."""
    return F(-40) if x < F(-40) else x


@compile_loops
def gelu_loops(x, y):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        y[i] = clip_low(x[i]) * cdf(x[i], exp(-HALF * x[i] * x[i]))


@compile_loops
def gelu_vjp_loops(g, x, g_x):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        t = clip(x[i], F(40))  # beyond, the density rounds to 0
        e = exp(-HALF * t * t)
        g_x[i] = g[i] * (cdf(x[i], e) + t * (DENSITY_AT_0 * e))


@compile_loops
def tanh_cdf(x):  # type: ignore[no-untyped-def]
    """GPT-2's approximation of Phi(x)."""
    return ONE / (ONE + exp(-x * (LINEAR + CUBIC * x * x)))


@compile_loops
def gelu_tanh_loops(x, y):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        y[i] = clip_low(x[i]) * tanh_cdf(x[i])


@compile_loops
def gelu_tanh_vjp_loops(g, x, g_x):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        phi, t = tanh_cdf(x[i]), clip(x[i], F(10))  # beyond, the slope rounds to 0
        g_x[i] = g[i] * (phi + t * (phi * (ONE - phi) * (LINEAR + F(3) * CUBIC * t * t)))


# --------------------------------------------------------------------------------------------------------------------
# Layer norm


def layer_norm(x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, eps: float) -> tuple[Any, Any, Any]:
    n = x.shape[-1]
    weight, bias = np.ones(n, F) if weight is None else weight, np.zeros(n, F) if bias is None else bias
    if not weight.shape == bias.shape == (n,):
        return reference.layer_norm(x, weight, bias, eps)
    rows = merge_rows(x)
    y, mean, rstd = np.empty_like(rows), np.empty(len(rows), F), np.empty(len(rows), F)
    if not layer_norm_loops(rows, weight, bias, F(eps), y, mean, rstd):
        return reference.layer_norm(x, weight, bias, eps)
    return y.reshape(x.shape), mean.reshape((*x.shape[:-1], 1)), rstd.reshape((*x.shape[:-1], 1))


@compile_loops
def layer_norm_loops(x, weight, bias, eps, y, mean, rstd):  # type: ignore[no-untyped-def]
    """Whether the squares of all rows have finite sums. If not, the result cannot be used."""
    rows, n = x.shape
    for r in range(rows):
        total, rest, squares = ZERO, ZERO, ZERO
        for i in range(n):
            total += x[r, i]
        mean[r] = total / F(n)
        for i in range(n):
            centred = x[r, i] - mean[r]
            rest += centred
            squares += centred * centred
        rest /= F(n)  # the rounding error of the mean
        mean[r] += rest
        variance = squares / F(n) - rest * rest
        variance = ZERO if variance < ZERO else variance
        if not variance < INFINITY:
            return False
        rstd[r] = ONE / np.sqrt(variance + eps)
        for i in range(n):
            y[r, i] = (x[r, i] - mean[r]) * rstd[r] * weight[i] + bias[i]
    return True


def layer_norm_vjp(
    g: np.ndarray, mean: Any, rstd: Any, x: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    g_x, g_weight, g_bias = np.empty_like(x), np.zeros_like(weight), np.zeros_like(weight)
    rows = [merge_rows(a) for a in (g, x, g_x)]
    statistics = [np.asarray(a, F).reshape(-1) for a in (mean, rstd)]
    layer_norm_vjp_loops(*rows, *statistics, weight, g_weight, g_bias)
    return g_x, g_weight, g_bias


@compile_loops
def layer_norm_vjp_loops(g, x, g_x, mean, rstd, weight, g_weight, g_bias):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    for r in range(rows):
        total, along_x_hat = ZERO, ZERO
        for i in range(n):
            x_hat = (x[r, i] - mean[r]) * rstd[r]
            u = g[r, i] * weight[i]
            total += u
            along_x_hat += u * x_hat
            g_weight[i] += g[r, i] * x_hat
            g_bias[i] += g[r, i]
        for i in range(n):
            x_hat = (x[r, i] - mean[r]) * rstd[r]
            g_x[r, i] = rstd[r] * (g[r, i] * weight[i] - total / F(n) - x_hat * (along_x_hat / F(n)))


# --------------------------------------------------------------------------------------------------------------------
# Softmax of attention

LOWEST = F(np.finfo(F).min)


def softmax_over_keys(scores: np.ndarray, allow: np.ndarray | None) -> np.ndarray:
    matrices = merge_matrices(scores)
    if allow is None:
        mask = np.ones((1, *scores.shape[-2:]), bool)
    elif allow.size == allow.shape[-2] * allow.shape[-1]:  # one mask for all matrices of scores
        mask = np.broadcast_to(allow.reshape(allow.shape[-2:]), (1, *scores.shape[-2:]))
    else:
        mask = merge_matrices(np.broadcast_to(allow, scores.shape))
    softmax_loops(matrices, np.ascontiguousarray(mask))
    return scores


def merge_matrices(x: np.ndarray) -> np.ndarray:
    """Merge all axes in front of the last two: (..., m, n) -> (N, m, n)."""
    return x.reshape((math.prod(x.shape[:-2]), *x.shape[-2:]))


@compile_loops
def softmax_loops(scores, allow):  # type: ignore[no-untyped-def]
    matrices, n_k, n_q = scores.shape
    largest, total = np.empty(n_q, F), np.empty(n_q, F)
    for b in range(matrices):
        mask = allow[b if len(allow) > 1 else 0]
        largest[:] = LOWEST
        total[:] = ZERO
        for k in range(n_k):
            for q in range(n_q):
                z = scores[b, k, q] if mask[k, q] else LOWEST
                largest[q] = largest[q] if z <= largest[q] else z  # nan stays
        for k in range(n_k):
            for q in range(n_q):
                scores[b, k, q] = exp(scores[b, k, q] - largest[q]) if mask[k, q] else ZERO
                total[q] += scores[b, k, q]
        for q in range(n_q):
            total[q] = ONE / (ONE if total[q] < ONE else total[q])  # nan stays
        for k in range(n_k):
            for q in range(n_q):
                scores[b, k, q] *= total[q]


# --------------------------------------------------------------------------------------------------------------------
# Adam


def adam(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, betas: tuple[float, float], keep: float, rate: float,
    root: float, eps: float,
) -> None:  # fmt: skip
    flat = [a.reshape(-1) for a in (p, g, m, v)]
    adam_loops(*flat, *betas, keep, rate, root, eps)


@compile_loops
def adam_loops(p, g, m, v, beta1, beta2, keep, rate, root, eps):  # type: ignore[no-untyped-def]
    beta1, beta2, rest1, rest2 = F(beta1), F(beta2), F(1 - beta1), F(1 - beta2)
    keep, rate, root, eps = F(keep), F(rate), F(root), F(eps)
    for i in range(p.size):
        m[i] = beta1 * m[i] + rest1 * g[i]
        v[i] = beta2 * v[i] + rest2 * g[i] * g[i]
        p[i] = keep * p[i] - rate * m[i] / (root * np.sqrt(v[i]) + eps)
