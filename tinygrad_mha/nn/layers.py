"""The layers of a Transformer. Weights are stored (in, out)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import as_ids, check_choice, check_count, check_probability, check_width
from tinygrad_mha.nn.init import Seed, constant, normal
from tinygrad_mha.nn.module import Module
from tinygrad_mha.tensors import Tensor, as_tensor

__all__ = ["ACTIVATIONS", "GATES", "Dropout", "Embedding", "FeedForward", "LayerNorm", "Linear", "RMSNorm"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: ops.gelu(x),
    "gelu_tanh": lambda x: ops.gelu(x, tanh=True),
    "relu": lambda x: ops.relu(x),
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": lambda x: x * ops.sigmoid(x)}


class Linear(Module):
    """x @ weight + bias: (..., n_in) -> (..., n_out).

    Args:
        bias: whether there is a bias; it is initialized to 0.
        std: the standard deviation of the initial weights, n_in ** -0.5 unless given, which keeps that of x.
        rng: a NumPy Generator or a seed of the initial weights.

    Raises:
        ValueError: the last axis of x does not have length n_in.

    Example:
        >>> Linear(2, 3, rng=0)(np.ones((5, 2), dtype=np.float32)).shape
        (5, 3)
    """

    takes_arrays = True

    def __init__(self, n_in: int, n_out: int, bias: bool = True, std: float | None = None, rng: Seed = None) -> None:
        n_in, n_out = check_count(n_in, "n_in"), check_count(n_out, "n_out")
        self.weight = normal((n_in, n_out), n_in**-0.5 if std is None else std, rng)
        self.bias = constant((n_out,), 0.0) if bias else None

    def forward(self, x: Any) -> Tensor:
        if not self.on_arrays:  # the layers of a twin fit
            check_width(x, self.weight.shape[0], "Linear")
        return ops.linear(x, self.weight, self.bias)


class Embedding(Module):
    """The row of `weight` (n, width) for each id: integers of any shape -> ids.shape + (width,).

    Raises:
        TypeError: ids that are not integers.
        IndexError: an id that is not in 0 .. n - 1; the message gives the first one and its index.
    """

    takes_arrays = True

    def __init__(self, n: int, width: int, std: float = 0.02, rng: Seed = None) -> None:
        self.weight = normal((check_count(n, "n"), check_count(width, "width")), std, rng)

    def forward(self, ids: Any) -> Tensor:
        return ops.take(self.weight, as_ids(ids, "ids"))


class LayerNorm(Module):
    """Normalize each row (the last axis) to mean 0 and variance 1, then * weight + bias (arXiv:1607.06450)."""

    takes_arrays = True

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True) -> None:
        self.eps = eps
        self.weight = constant((check_count(width, "width"),), 1.0)
        self.bias = constant((width,), 0.0) if bias else None

    def forward(self, x: Any) -> Tensor:
        if not self.on_arrays:
            check_width(x, self.weight.shape[0], "LayerNorm")
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """Normalize each row (the last axis) to a mean square of 1, then * weight (arXiv:1910.07467)."""

    takes_arrays = True

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        self.eps = eps
        self.weight = constant((check_count(width, "width"),), 1.0)

    def forward(self, x: Any) -> Tensor:
        if not self.on_arrays:
            check_width(x, self.weight.shape[0], "RMSNorm")
        return ops.rms_norm(x, self.weight, eps=self.eps)


class Dropout(Module):
    """In training, set each element to 0 with probability `p` and divide the others by 1 - p; otherwise the identity.

    Args:
        p: from 0 to 1.
        rng: a NumPy Generator or a seed for one. The module keeps the generator, so `generators()` finds it.

    Raises:
        ValueError: `p` outside 0 .. 1.
    """

    takes_arrays = True

    def __init__(self, p: float, rng: Seed = None) -> None:
        self.p = check_probability(p, "p")
        self.rng = np.random.default_rng(rng)

    def forward(self, x: Any) -> Tensor:
        if self.on_arrays:
            return x
        x = as_tensor(x)
        mask = self.sample_mask(x.shape, x.dtype)
        return x if mask is None else ops.dropout(x, mask)

    def sample_mask(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
        """The next dropout mask, or None where nothing is dropped: in eval mode, and for p = 0."""
        return sample_dropout_mask(self.rng, self.p, shape, dtype) if self.p and self.training else None


def sample_dropout_mask(rng: np.random.Generator, p: float, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array that is 0 with probability `p` and else 1 / (1 - p), so that its mean is 1 (for p = 1: 0)."""
    if p == 1:
        return np.zeros(shape, dtype)
    return (rng.random(shape, dtype=np.float32) >= p).astype(dtype) * (1 / (1 - p))


class FeedForward(Module):
    """c_proj(activation(c_fc(x))), applied to each position: (..., width) -> (..., width).

    With "swiglu" it is c_proj(silu(c_gate(x)) * c_fc(x)), where silu(a) = a sigmoid(a) (arXiv:2002.05202).

    Args:
        hidden: the width in between.
        activation: "gelu" (exact), "gelu_tanh" (as GPT-2 was trained), "relu" or "swiglu".
        std, std_out: standard deviations of the initial weights of c_fc (and c_gate) and of c_proj; see `Linear`.
    """

    takes_arrays = True

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
        self.activation = check_choice(activation, (*ACTIVATIONS, *GATES), "activation")
        self.c_fc = Linear(width, hidden, bias, std, rng)
        self.c_gate = Linear(width, hidden, bias, std, rng) if activation in GATES else None
        self.c_proj = Linear(hidden, width, bias, std_out, rng)

    def forward(self, x: Any) -> Tensor:
        if self.c_gate is None:
            return self.c_proj(ACTIVATIONS[self.activation](self.c_fc(x)))
        return self.c_proj(GATES[self.activation](self.c_gate(x)) * self.c_fc(x))
