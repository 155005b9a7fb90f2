"""b) A recurrent network reads the words in order into one state; a second one writes the answer from that state.

    python examples/translation/b_rnn.py
    python examples/translation/b_rnn.py --cell gru

The decoder receives only the last state of the encoder, whose size does not depend on the length of the sentence.
"""

import sys

import common
from models import Seq2Seq

from tinygrad_mha.programs import ending_quietly

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
    with ending_quietly():
        arguments = sys.argv[1:]
        gru = arguments[:2] == ["--cell", "gru"]
        if gru:
            common.run(RUNG, "GRU", build_gru, __doc__, arguments[2:])
        else:
            common.run(RUNG, TITLE, build, __doc__, arguments)
