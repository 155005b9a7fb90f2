"""Invent an attention, check it, break it three ways, and read what the check says of each.

    python examples/check_your_own_attention.py

`Fading` forgets: each token x_t has a gate f_t = sigmoid(x_t W_f) in each head, and what a query sees of an older token
is multiplied by all gates in between. In scores, where products are sums,

    S_ij = q_i k_j / sqrt(d) + log f_(j+1) + ... + log f_i        for j <= i

The sum is c_i - c_j, with c the cumulative sum of log f. With a cache, the gates of old tokens are needed too: they
travel as one more column of the keys.

The three broken ones differ from it in one line each, and each of them trains:

- `FadingByShare` divides the gates by their mean over the sequence: the mean contains later tokens
- `FadingWithNewGates` with a cache sums the gates of the new tokens only
- `FadingOverPadding` does not hide the padding of shorter rows in a batch

Target: the check accepts `Fading` and names the fault of each other one. A few seconds.
"""

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha import nn, ops


class Fading(nn.Module):
    """Causal attention whose tokens fade by a learned gate per head."""

    def __init__(self, width=12, n_head=3, rng=0):
        rng = np.random.default_rng(rng)
        self.n_head = n_head
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, rng=rng) for _ in range(4))
        self.gate = nn.Linear(width, n_head, rng=rng)

    def forward(self, x, cache=None, positions=None, key_allow=None):
        q, k, v = (nn.split_heads(layer(x), self.n_head) for layer in (self.query, self.key, self.value))
        fade = self.log_gates(x).swapaxes(-1, -2)[..., None]  # (..., H, T, 1)
        if cache is not None:
            k, v = cache.append(ops.concat(k, fade, axis=-1), v)
            k, fade = k[..., :-1], self.gates_of_all(k[..., -1:], fade)
        n, m = q.shape[-2], k.shape[-2]
        c = np.tri(m, dtype=x.dtype) @ fade  # (..., H, T_k, 1), the cumulative sum
        scores = q @ k.mT / q.shape[-1] ** 0.5 + c[..., m - n :, :] - c.mT
        allow = self.allow(q, k, key_allow)
        weights = ops.softmax(scores if allow is None else ops.where(allow, scores, -np.inf))
        return self.out(nn.join_heads(weights @ v))

    def log_gates(self, x):
        return ops.log(ops.sigmoid(self.gate(x)))

    def gates_of_all(self, cached, new):
        return cached

    def allow(self, q, k, key_allow):
        return nn.allow_past(q, k, key_allow)


class FadingByShare(Fading):
    def log_gates(self, x):
        gates = ops.sigmoid(self.gate(x))
        return ops.log(gates / gates.mean(axis=-2, keepdims=True))


class FadingWithNewGates(Fading):
    def gates_of_all(self, cached, new):
        n, m = new.shape[-2], cached.shape[-2]
        return cached * (np.arange(m) >= m - n).astype(cached.dtype)[:, None]


class FadingOverPadding(Fading):
    def allow(self, q, k, key_allow):
        return nn.allow_past(q, k)


def main():
    x = np.random.default_rng(1).standard_normal((7, 12))
    verdicts = {}
    for attention in (Fading, FadingByShare, FadingWithNewGates, FadingOverPadding):
        verdict = verdicts[attention.__name__] = tg.check.attention(attention(), x)
        print(verdict, end="\n\n")
    return verdicts


if __name__ == "__main__":
    right, *broken = main().values()
    sys.exit(0 if right.ok and all(v.failed for v in broken) else 1)
