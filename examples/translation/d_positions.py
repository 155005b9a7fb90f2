"""d) The same attention with positions: sines and cosines of the position are added to each word's vector.

python examples/translation/d_positions.py
"""

import c_attention
import common

from tinygrad_mha.programs import ending_quietly

RUNG, TITLE = "d", "with positions"


def build(corpus, seed=0):
    return c_attention.build(corpus, seed, positions=True)


if __name__ == "__main__":
    with ending_quietly():
        common.run(RUNG, TITLE, build, __doc__)
