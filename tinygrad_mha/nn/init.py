"""Initial values of parameters."""

from __future__ import annotations

import numpy as np

from tinygrad_mha.tensors import Tensor

__all__ = ["Seed", "constant", "normal"]

Seed = np.random.Generator | int | None
"""What layers take as `rng`: a generator, a seed for one, or None for different values in every run."""


def normal(shape: tuple[int, ...], std: float, rng: Seed = None, name: str | None = None) -> Tensor:
    """A float32 parameter drawn from a normal distribution with mean 0 and standard deviation `std`."""
    values = np.random.default_rng(rng).standard_normal(shape, dtype=np.float32)
    return Tensor(values * np.float32(std), requires_grad=True, name=name)


def constant(shape: tuple[int, ...], value: float, name: str | None = None) -> Tensor:
    """A float32 parameter filled with `value`."""
    return Tensor(np.full(shape, value, dtype=np.float32), requires_grad=True, name=name)
