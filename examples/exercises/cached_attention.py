"""Exercise 3: build the cache.

`Attention` is causal attention with one head. A generator calls it again for each new token, and each time it computes
all rows. With a cache a call computes only the rows of the new tokens:

    cache = nn.KVCache()
    attention(x[:3], cache=cache)     # three tokens are read, and their keys and values are kept
    attention(x[3:4], cache=cache)    # the row of the fourth

`k, v = cache.append(k, v)` keeps the rows of k and v, and returns them behind those of all earlier calls.
`cache.length` is the number of tokens of earlier calls (read it before you append).

1. Which of q, k, v does a later token need? Keep those.
2. q now has fewer rows than k. Which keys may row i of q see?
3. A position is added to each row of x. Which positions have the rows of this call?

Without a cache nothing may change. Keep the calls of `show`: by them the check sees q, k, v and the scores. Let it be
checked:

    python cached_attention.py                          read in all chunks, with what each step costs
    tinygrad-mha check cached_attention.py:Attention    with everything else that an attention promises

Question: the table counts the rows of Q. Why is there no "Q reused"?
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
        T = x.shape[-2]
        x = x + nn.positions.sinusoidal(np.arange(T), x.shape[-1]).astype(x.dtype)
        q, k, v = show("q", self.q(x)), show("k", self.k(x)), show("v", self.v(x))
        # `cache` is not used yet
        scores = show("scores", q @ k.mT / q.shape[-1] ** 0.5)
        allow = np.tri(T, dtype=bool)  # (T_q, T_k): row i sees keys 0 to i
        return ops.where(allow, scores, -np.inf).softmax() @ v


def check():
    x = np.random.default_rng(0).standard_normal((5, 12))
    return tg.check.kv_cache(Attention(), x)


if __name__ == "__main__":
    verdict = check()
    print(verdict)
    sys.exit(verdict.exit_code)
