"""a) A feed-forward network applied to each word: the answer at a position depends only on the word there.

python examples/translation/a_per_word.py
"""

import common
from models import PerWord

from tinygrad_mha.programs import ending_quietly

RUNG, TITLE = "a", "per word"


def build(corpus, seed=0):
    return PerWord(len(corpus.source), len(corpus.target), d_model=64, d_ff=256, max_len=corpus.max_len, seed=seed)


if __name__ == "__main__":
    with ending_quietly():
        common.run(RUNG, TITLE, build, __doc__)
