"""b) A recurrent network reads the words in order and carries what it has understood along; a second one writes.

    python examples/translation/b_rnn.py
    python examples/translation/b_rnn.py --cell gru

All that the writer learns of the sentence is the reader's last state, however long the sentence was.
"""

import sys

import common
from models import Seq2Seq

RUNG, TITLE = "b", "RNN"


def build(corpus, seed=0, cell="rnn"):
    return Seq2Seq(
        len(corpus.source),
        len(corpus.target),
        d_model=64,
        n_hidden=128,
        max_len=corpus.max_len,
        cell=cell,
        seed=seed,
    )


def build_gru(corpus, seed=0):
    return build(corpus, seed, cell="gru")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    gru = arguments[:2] == ["--cell", "gru"]
    if gru:
        common.run(RUNG, "GRU", build_gru, __doc__, arguments[2:])
    else:
        common.run(RUNG, TITLE, build, __doc__, arguments)
