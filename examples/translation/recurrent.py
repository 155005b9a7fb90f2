"""Recurrent layers: one state that is passed from word to word.

Axes: B batch, T tokens, H hidden. Step t combines the input x_t with the state after step t - 1. A sentence of T words
therefore takes T steps one after the other, and everything the network remembers is stored in H numbers.
"""

import numpy as np

from tinygrad_mha import Tensor, nn, ops
from tinygrad_mha.arguments import check_count, check_width
from tinygrad_mha.tensors import as_tensor


class Recurrent(nn.Module):
    """Base class of recurrent layers: the parameters of `n_gates` vectors of width H, and the loop over the words.

    Args:
        n_in: the width of an input.
        n_hidden: H, the width of the state.
        rng: a numpy Generator or a seed for the initial weights.
    """

    n_gates: int

    def __init__(self, n_in, n_hidden, rng=None):
        self.n_in, self.n_hidden = check_count(n_in, "n_in"), check_count(n_hidden, "n_hidden")
        rng = np.random.default_rng(rng)
        width = self.n_gates * n_hidden

        def parameter(values, name):
            return Tensor(values, requires_grad=True, name=name)

        self.w_x = parameter(rng.standard_normal((n_in, width), np.float32) * n_in**-0.5, "W_x")
        self.w_h = parameter(rng.standard_normal((n_hidden, width), np.float32) * n_hidden**-0.5, "W_h")
        self.b_x = parameter(np.zeros(width, np.float32), "b_x")
        self.b_h = parameter(np.zeros(width, np.float32), "b_h")

    def step(self, x, h):
        """Return the next state: x (B, n_gates H) is x_t W_x + b_x, h (B, H) is the previous state."""
        raise NotImplementedError

    def forward(self, x, h=None, valid=None):
        """Map x (B, T, n_in) to the states after each word (B, T, H) and the last state (B, H).

        Args:
            h: the initial state (B, H); zeros by default.
            valid: boolean (B, T), False for padding, which leaves the state unchanged.

        Raises:
            ValueError: shapes that do not fit, or a sentence without words.
        """
        x = as_tensor(x)
        if x.ndim != 3 or x.shape[1] == 0:
            raise ValueError(f"x must be (B, T, n_in) with at least one word, got shape {x.shape}")
        check_width(x, self.n_in, type(self).__name__)
        n_batch, n_steps = x.shape[:2]
        h = Tensor(np.zeros((n_batch, self.n_hidden), x.dtype)) if h is None else as_tensor(h)
        if h.shape != (n_batch, self.n_hidden):
            raise ValueError(f"h must be (B, H) = {(n_batch, self.n_hidden)}, got shape {h.shape}")
        if valid is not None:
            valid = np.asarray(valid)
            if valid.shape != (n_batch, n_steps) or valid.dtype.kind != "b":
                raise ValueError(
                    f"valid must be boolean (B, T) = {(n_batch, n_steps)}, got {valid.dtype} {valid.shape}"
                )
        inputs = ops.linear(x, self.w_x, self.b_x)  # of all steps in one product: it does not depend on a state
        states = []
        for t in range(n_steps):
            new = self.step(inputs[:, t], h)
            h = new if valid is None or valid[:, t].all() else ops.where(valid[:, t, None], new, h)
            states.append(h)
        return ops.stack(*states, axis=1), h


class RNN(Recurrent):
    """h_t = tanh(x_t W_x + b_x + h_(t-1) W_h + b_h) (Elman 1990), as torch.nn.RNN.

    Example:
        >>> states, last = RNN(2, 3, rng=0)(np.ones((5, 7, 2), np.float32))
        >>> states.shape, last.shape
        ((5, 7, 3), (5, 3))
    """

    n_gates = 1

    def step(self, x, h):
        return ops.tanh(x + ops.linear(h, self.w_h, self.b_h))


class GRU(Recurrent):
    """A gated recurrent unit (arXiv:1406.1078), as torch.nn.GRU: a gate decides how much of the state changes.

    r = sigmoid(x_t W_r + h W_hr), z = sigmoid(x_t W_z + h W_hz), n = tanh(x_t W_n + r * (h W_hn)) and
    h_t = (1 - z) * n + z * h, with a bias in each product. The parameters hold r, z and n side by side.
    """

    n_gates = 3

    def step(self, x, h):
        n = self.n_hidden
        from_h = ops.linear(h, self.w_h, self.b_h)
        gates = ops.sigmoid(x[:, : 2 * n] + from_h[:, : 2 * n])
        r, z = gates[:, :n], gates[:, n:]
        new = ops.tanh(x[:, 2 * n :] + r * from_h[:, 2 * n :])
        return new + z * (h - new)
