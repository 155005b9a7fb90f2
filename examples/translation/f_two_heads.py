"""f) Two heads of half the width: each word has two sets of weights, and W_O combines the two results.

python examples/translation/f_two_heads.py
"""

import common
import e_one_head

from tinygrad_mha.programs import ending_quietly

RUNG, TITLE = "f", "two heads"


def build(corpus, seed=0):
    return e_one_head.build(corpus, seed, n_head=2)


if __name__ == "__main__":
    with ending_quietly():
        common.run(RUNG, TITLE, build, __doc__)
