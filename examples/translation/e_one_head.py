"""e) One head: with the matrices W_Q, W_K and W_V a word can attend to words that are not similar to it.

python examples/translation/e_one_head.py
"""

import c_attention
import common

from tinygrad_mha import nn
from tinygrad_mha.programs import ending_quietly

RUNG, TITLE = "e", "one head"


def build(corpus, seed=0, n_head=1):
    return c_attention.build(corpus, seed, nn.MultiHeadAttention(64, n_head, rng=seed), positions=True)


if __name__ == "__main__":
    with ending_quietly():
        common.run(RUNG, TITLE, build, __doc__)
