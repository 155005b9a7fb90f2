"""Solution of exercise 3.

Row n of the result needs query n alone, and the keys and values of all tokens up to n. No later row needs query n: so
k and v are kept, and q is thrown away. That is why the table has no "Q reused".
"""

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha import nn, ops


class Attention(nn.Module):
    def __init__(self, width=12, rng=0):
        rng = np.random.default_rng(rng)
        self.q, self.k, self.v = (nn.Linear(width, width, rng=rng) for _ in range(3))

    def forward(self, x, cache=None, edit=None):
        show = edit or (lambda name, tensor: tensor)
        T, first = x.shape[-2], 0 if cache is None else cache.length
        x = x + nn.positions.sinusoidal(np.arange(first, first + T), x.shape[-1]).astype(x.dtype)
        q, k, v = show("q", self.q(x)), show("k", self.k(x)), show("v", self.v(x))
        if cache is not None:
            k, v = cache.append(k, v)
        scores = show("scores", q @ k.mT / q.shape[-1] ** 0.5)
        allow = np.tri(T, first + T, first, dtype=bool)  # (T_q, T_k): row i sees keys 0 to first + i
        return ops.where(allow, scores, -np.inf).softmax() @ v


def check():
    x = np.random.default_rng(0).standard_normal((5, 12))
    return tg.check.kv_cache(Attention(), x)


if __name__ == "__main__":
    verdict = check()
    print(verdict)
    sys.exit(verdict.exit_code)
