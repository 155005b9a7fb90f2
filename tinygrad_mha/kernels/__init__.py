"""Kernels: what training spends its time on, as functions of arrays, without graphs.

`reference` computes them in NumPy. `compiled` computes some of them for float32 by loops that Numba compiles, each in
one pass through memory. `active` says which are in use: "numba" if Numba is installed, else "numpy", unless the
environment variable TINYGRAD_MHA_KERNELS says numpy or numba when the package is imported. The first call that needs
Numba imports it.

Results of the two agree to a few units in the last place, not bit for bit.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import numpy as np

from tinygrad_mha.kernels import reference

__all__ = ["active", "adam", "gelu", "gelu_vjp", "layer_norm", "layer_norm_vjp", "softmax_over_keys"]

SINGLE = np.dtype(np.float32)
INSTALL = 'pip install "tinygrad_mha[fast]"'


def choose_active(wanted: str | None) -> str:
    """The kernels to use, "numpy" or "numba", if the environment variable is `wanted` or not set (None).

    Raises:
        ValueError: an unknown name.
        ImportError: "numba" without the package.
    """
    installed = importlib.util.find_spec("numba") is not None
    if not wanted:
        return "numba" if installed else "numpy"
    if wanted not in ("numpy", "numba"):
        raise ValueError(f"TINYGRAD_MHA_KERNELS must be numpy or numba ({INSTALL}), got {wanted!r}")
    if wanted == "numba" and not installed:
        raise ImportError(f"TINYGRAD_MHA_KERNELS is numba, and Numba is not installed: {INSTALL}")
    return wanted


active = choose_active(os.environ.get("TINYGRAD_MHA_KERNELS"))


@functools.cache
def import_compiled() -> Any:
    """The module of the compiled kernels, imported at its first use.

    Raises:
        ImportError: a Numba that refuses this version of NumPy.
    """
    try:
        return importlib.import_module("tinygrad_mha.kernels.compiled")
    except ImportError as error:
        raise ImportError(
            f"Numba cannot be imported: {error}. Update it with {INSTALL}, or set TINYGRAD_MHA_KERNELS=numpy"
        ) from error


def select(*arrays: np.ndarray | None) -> Any:
    """The module to compute with: `compiled` takes contiguous, writable arrays of float32, `reference` takes any."""
    if active == "numpy":
        return reference
    for a in arrays:
        if a is not None and (a.dtype != SINGLE or not a.flags.carray):
            return reference
    return import_compiled()


def gelu(x: np.ndarray, tanh: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """x * Phi(x), and Phi(x) unless `gelu_vjp` computes it again."""
    return select(x).gelu(x, tanh)


def gelu_vjp(g: np.ndarray, phi: np.ndarray | None, x: np.ndarray, tanh: bool) -> np.ndarray:
    """g * (Phi(x) + x * Phi'(x))."""
    return select(g, x).gelu_vjp(g, phi, x, tanh)


def layer_norm(
    x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, eps: float
) -> tuple[np.ndarray, np.ndarray | float, np.ndarray | float]:
    """Normalize the last axis: the result, and the mean (..., 1) and 1 / sqrt(var + eps) (..., 1) of each row.

    The latter two may be numbers if there is one row.
    """
    return select(x, weight, bias).layer_norm(x, weight, bias, eps)


def layer_norm_vjp(
    g: np.ndarray, mean: np.ndarray | float, rstd: np.ndarray | float, x: np.ndarray, weight: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """The gradients of x, weight and bias, those of weight and bias summed over rows if that is their shape."""
    body = select(g, x, weight) if weight is not None and weight.shape == x.shape[-1:] else reference
    return body.layer_norm_vjp(g, mean, rstd, x, weight)


def softmax_over_keys(scores: np.ndarray, allow: np.ndarray | None) -> np.ndarray:
    """The softmax over axis -2 of `scores` (..., T_k, T_q) where the boolean `allow` holds, 0 elsewhere, in place."""
    return select(scores).softmax_over_keys(scores, allow)


def adam(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, betas: tuple[float, float], keep: float, rate: float,
    root: float, eps: float,
) -> None:  # fmt: skip
    """Update `m` and `v` with the gradient `g`, then p <- keep * p - rate * m / (root * sqrt(v) + eps), in place."""
    select(p, g, m, v).adam(p, g, m, v, betas, keep, rate, root, eps)
