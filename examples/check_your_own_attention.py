"""Invent an attention, check it, break it three ways, and read what the check says of each.

    python examples/check_your_own_attention.py

`Fading` forgets. In each head a token x_t has a gate f_t = sigmoid(x_t W_f), and what a query sees of an older token is
multiplied by all gates in between. In the scores, products are sums:

    S_ij = q_i k_j / sqrt(d) + log f_(j+1) + ... + log f_i        for j <= i

That sum is c_i - c_j, where c is the cumulative sum of log f. All keys of a query share c_i, which a softmax does not
see, so -c_j is enough. With a cache the gates of old tokens are needed too: they are one more column of the keys.

The broken ones differ from it in a line each. All of them train.

- `FadingByShare` divides the gates by their mean over the sequence, which contains later tokens.
- `FadingFromZero` puts the sums into the cache instead of the gates, so each chunk starts again at 0.
- `FadingOverPadding` does not hide the padding of shorter rows in a batch.

Target: the check accepts `Fading` and names the fault of each other one. A few seconds.
"""

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha import nn, ops
from tinygrad_mha.programs import ending_quietly, make_parser


class Fading(nn.Module):
    """Causal attention in which tokens fade by a learned gate per head."""

    def __init__(self, width=12, n_head=3, rng=0):
        rng = np.random.default_rng(rng)
        self.n_head = n_head
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, rng=rng) for _ in range(4))
        self.gate = nn.Linear(width, n_head, rng=rng)

    def forward(self, x, cache=None, positions=None, key_allow=None):
        q, k, v = (nn.split_heads(layer(x), self.n_head) for layer in (self.query, self.key, self.value))
        column = self.before_cache(self.log_gates(x).mT[..., None])  # (..., H, T, 1)
        if cache is not None:
            k, v = cache.append(ops.concat(k, column, axis=-1), v)
            k, column = k[..., :-1], k[..., -1:]
        scores = q @ k.mT / q.shape[-1] ** 0.5 - self.after_cache(column).mT
        allow = self.find_visible(q, k, key_allow)
        weights = ops.softmax(scores if allow is None else ops.where(allow, scores, -np.inf))
        return self.out(nn.join_heads(weights @ v))

    def log_gates(self, x):
        z = self.gate(x)
        return ops.minimum(z, 0.0) - ops.log(1.0 + ops.exp(-abs(z)))  # log sigmoid(z), without overflow

    def before_cache(self, log_gates):
        return log_gates

    def after_cache(self, log_gates):
        return sum_up(log_gates)

    def find_visible(self, q, k, key_allow):
        return nn.allow_past(q, k, key_allow)


def sum_up(column):
    """The cumulative sum of (..., T, 1) along T."""
    return np.tri(column.shape[-2], dtype=column.dtype) @ column


class FadingByShare(Fading):
    def log_gates(self, x):
        gates = ops.sigmoid(self.gate(x))
        return ops.log(gates / gates.mean(axis=-2, keepdims=True))


class FadingFromZero(Fading):
    def before_cache(self, log_gates):
        return sum_up(log_gates)

    def after_cache(self, sums):
        return sums


class FadingOverPadding(Fading):
    def find_visible(self, q, k, key_allow):
        return nn.allow_past(q, k)


def main():
    verdicts = {}
    for attention in (Fading, FadingByShare, FadingFromZero, FadingOverPadding):
        verdict = verdicts[attention.__name__] = tg.check.attention(attention)
        print(verdict, end="\n\n")
    return verdicts


if __name__ == "__main__":
    with ending_quietly():
        make_parser(__doc__).parse_args()
        right, *broken = main().values()
        sys.exit(0 if right.ok and all(verdict.failed for verdict in broken) else 1)
