"""The layers that a Transformer is built from. Weights are stored (in, out); every layer is one primitive or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import as_ids, check_choice, check_probability, check_width
from tinygrad_mha.nn.module import Module
from tinygrad_mha.tensors import Tensor, as_tensor

Seed = np.random.Generator | int | None

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: ops.gelu(x),
    "gelu_tanh": lambda x: ops.gelu(x, tanh=True),
    "relu": lambda x: ops.relu(x),
}


def normal(shape: tuple[int, ...], std: float, rng: Seed = None, name: str | None = None) -> Tensor:
    """A float32 parameter drawn from a normal distribution around 0. `rng`: a generator, a seed, or None for any."""
    values = np.random.default_rng(rng).standard_normal(shape, dtype=np.float32)
    return Tensor(values * np.float32(std), requires_grad=True, name=name)


def constant(shape: tuple[int, ...], value: float, name: str | None = None) -> Tensor:
    """A float32 parameter that starts at one value everywhere."""
    return Tensor(np.full(shape, value, dtype=np.float32), requires_grad=True, name=name)


class Linear(Module):
    """x @ weight + bias: (..., n_in) -> (..., n_out).

    Args:
        bias: whether there is one; it starts at 0.
        std: the spread of the initial weights, n_in ** -0.5 unless given, which keeps the spread of x.
        rng: a numpy Generator or a seed for them.

    Raises:
        ValueError: an x whose last axis is not n_in long.

    Example:
        >>> Linear(2, 3, rng=0)(np.ones((5, 2), dtype=np.float32)).shape
        (5, 3)
    """

    def __init__(self, n_in: int, n_out: int, bias: bool = True, std: float | None = None, rng: Seed = None) -> None:
        self.weight = normal((n_in, n_out), n_in**-0.5 if std is None else std, rng)
        self.bias = constant((n_out,), 0.0) if bias else None

    def forward(self, x: Any) -> Tensor:
        check_width(x, self.weight.shape[0], "Linear")
        return ops.linear(x, self.weight, self.bias)


class Embedding(Module):
    """One row of `weight` (n, width) for each id: integers of any shape -> ids.shape + (width,).

    Raises:
        TypeError: ids that are not integers.
        IndexError: an id that is not in 0 .. n - 1; it names the first one and its place.
    """

    def __init__(self, n: int, width: int, std: float = 0.02, rng: Seed = None) -> None:
        self.weight = normal((n, width), std, rng)

    def forward(self, ids: Any) -> Tensor:
        return ops.take(self.weight, as_ids(ids, "ids"))


class LayerNorm(Module):
    """Every row (the last axis) to mean 0 and variance 1, then times `weight` plus `bias` (arXiv:1607.06450)."""

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True) -> None:
        self.eps = eps
        self.weight = constant((width,), 1.0)
        self.bias = constant((width,), 0.0) if bias else None

    def forward(self, x: Any) -> Tensor:
        check_width(x, self.weight.shape[0], "LayerNorm")
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """Every row (the last axis) to a mean square of 1, then times `weight` (arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        self.eps = eps
        self.weight = constant((width,), 1.0)

    def forward(self, x: Any) -> Tensor:
        check_width(x, self.weight.shape[0], "RMSNorm")
        return ops.rms_norm(x, self.weight, eps=self.eps)


class Dropout(Module):
    """In training, each number is set to 0 with probability `p` and the others are divided by 1 - p; else the identity.

    Args:
        p: from 0 to 1; with 1 nothing is left.
        rng: the numpy Generator (or a seed) that draws. It is the module's own, so `generators()` finds it.

    Raises:
        ValueError: a `p` outside 0 .. 1.
    """

    notation = "dropout"

    def __init__(self, p: float, rng: Seed = None) -> None:
        self.p = check_probability(p, "p")
        self.rng = np.random.default_rng(rng)

    def forward(self, x: Any) -> Tensor:
        x = as_tensor(x)
        if not self.training or self.p == 0:
            return x
        return x * keep_mask(self.rng, self.p, x.shape, x.dtype)


class FeedForward(Module):
    """c_proj(activation(c_fc(x))), each position by itself: (..., width) -> (..., width), with `hidden` in between.

    Args:
        activation: "gelu" (exact), "gelu_tanh" (as GPT-2 was trained) or "relu".
        std, std_out: the spread of the initial weights of c_fc and c_proj; see `Linear`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str = "gelu_tanh",
        bias: bool = True,
        std: float | None = None,
        std_out: float | None = None,
        rng: Seed = None,
    ) -> None:
        rng = np.random.default_rng(rng)
        self.activation = check_choice(activation, ACTIVATIONS, "activation")
        self.c_fc = Linear(width, hidden, bias, std, rng)
        self.c_proj = Linear(hidden, width, bias, std_out, rng)

    def forward(self, x: Any) -> Tensor:
        return self.c_proj(ACTIVATIONS[self.activation](self.c_fc(x)))


def keep_mask(rng: np.random.Generator, p: float, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """What dropout multiplies by: 0 with probability `p`, else 1 / (1 - p), so that the expectation stays."""
    if p == 1:
        return np.zeros(shape, dtype)
    return (rng.random(shape, dtype=np.float32) >= p).astype(dtype) * (1 / (1 - p))
