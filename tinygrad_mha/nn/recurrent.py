"""Recurrent layers: one state that is carried from word to word.

Axes: B batch, T tokens, H hidden. Step t mixes the input x_t with the state after t - 1, so a sentence of T words takes
T steps, one after the other, and whatever is to be remembered passes through H numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import check_count, check_width
from tinygrad_mha.nn.layers import Seed, constant, normal
from tinygrad_mha.nn.module import Module
from tinygrad_mha.tensors import Tensor, as_tensor


class Recurrent(Module):
    """What recurrent layers share: parameters for `gates` vectors of width H, and the walk along the sentence.

    Args:
        n_in: the width of an input.
        n_hidden: H, the width of the state.
        rng: a numpy Generator or a seed for the initial weights.
    """

    gates: int

    def __init__(self, n_in: int, n_hidden: int, rng: Seed = None) -> None:
        self.n_in, self.n_hidden = check_count(n_in, "n_in"), check_count(n_hidden, "n_hidden")
        rng = np.random.default_rng(rng)
        self.w_x = normal((n_in, self.gates * n_hidden), n_in**-0.5, rng, "W_x")
        self.w_h = normal((n_hidden, self.gates * n_hidden), n_hidden**-0.5, rng, "W_h")
        self.b_x = constant((self.gates * n_hidden,), 0.0, "b_x")
        self.b_h = constant((self.gates * n_hidden,), 0.0, "b_h")

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        """The next state: x (B, gates H) is x_t W_x + b_x, h (B, H) the state before."""
        raise NotImplementedError

    def forward(self, x: Any, h: Any = None, alive: Any = None) -> tuple[Tensor, Tensor]:
        """x (B, T, n_in) -> all states (B, T, H), and the last one (B, H).

        Args:
            h: the state to begin with, (B, H); zeros unless given.
            alive: boolean (B, T), False for padding, which leaves the state as it is.

        Raises:
            ValueError: shapes that do not fit, or no words.
        """
        x = as_tensor(x)
        if x.ndim != 3 or x.shape[1] == 0:
            raise ValueError(f"x must be (B, T, n_in) with at least one word, got shape {x.shape}")
        check_width(x, self.n_in, type(self).__name__)
        n_batch, n_steps = x.shape[:2]
        h = Tensor(np.zeros((n_batch, self.n_hidden), x.dtype)) if h is None else as_tensor(h)
        if h.shape != (n_batch, self.n_hidden):
            raise ValueError(f"h must be (B, H) = {(n_batch, self.n_hidden)}, got shape {h.shape}")
        if alive is not None:
            alive = np.asarray(alive)
            if alive.shape != (n_batch, n_steps) or alive.dtype.kind != "b":
                raise ValueError(
                    f"alive must be boolean (B, T) = {(n_batch, n_steps)}, got {alive.dtype} {alive.shape}"
                )
        inputs = ops.linear(x, self.w_x, self.b_x)  # of all steps at once: nothing in it waits for a state
        states = []
        for t in range(n_steps):
            new = self.step(inputs[:, t], h)
            h = new if alive is None or alive[:, t].all() else ops.where(alive[:, t, None], new, h)
            states.append(h)
        return ops.stack(*states, axis=1), h


class RNN(Recurrent):
    """h_t = tanh(x_t W_x + b_x + h_(t-1) W_h + b_h) (Elman 1990), as torch.nn.RNN.

    Example:
        >>> states, last = RNN(2, 3, rng=0)(np.ones((5, 7, 2), np.float32))
        >>> states.shape, last.shape
        ((5, 7, 3), (5, 3))
    """

    gates = 1

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return ops.tanh(x + ops.linear(h, self.w_h, self.b_h))


class GRU(Recurrent):
    """A state that is changed only where a gate opens (arXiv:1406.1078), as torch.nn.GRU.

    r, z = sigmoid(of x_t and h), n = tanh(x_t W_n + b + r * (h W_hn + b_h)), h_t = (1 - z) * n + z * h. The parameters
    hold r, z and n side by side.
    """

    gates = 3

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        n = self.n_hidden
        from_h = ops.linear(h, self.w_h, self.b_h)
        gates = ops.sigmoid(x[:, : 2 * n] + from_h[:, : 2 * n])
        r, z = gates[:, :n], gates[:, n:]
        new = ops.tanh(x[:, 2 * n :] + r * from_h[:, 2 * n :])
        return new + z * (h - new)
