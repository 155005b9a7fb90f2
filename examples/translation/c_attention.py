"""c) Attention without positions: every word attends to all words, without regard to their order.

    python examples/translation/c_attention.py

The scores are dot products of the word vectors, and the result is a weighted sum of the same vectors: attention
without any matrices. It does not depend on positions, so each word of "two thousand and five" gets the same answer as
in "five thousand and two".
"""

import sys

import common
from models import PerWord

from tinygrad_mha import nn
from tinygrad_mha.programs import ending_quietly

RUNG, TITLE = "c", "attention, no positions"


class PlainAttention(nn.Module):
    """A = softmax(X X^T / sqrt(d)) X: each row is a weighted sum of all word vectors."""

    def forward(self, x, key_allow):
        return nn.attention(x, x, x, key_allow=key_allow)


def build(corpus, seed=0, mixer=None, positions=False):
    return PerWord(
        len(corpus.source),
        len(corpus.target),
        d_model=64,
        d_ff=256,
        max_len=corpus.max_len,
        mixer=mixer or PlainAttention(),
        positions=positions,
        seed=seed,
    )


def show_answers_per_word(model, corpus):
    """Print the answer at each word's position, for the same words in two orders."""
    for text in ("two thousand and five", "five thousand and two"):
        words = text.split()
        best = model(corpus.source.encode(words)).numpy()[: len(words)].argmax(axis=-1)
        print("  ".join(f"{word} -> {corpus.target.words[i]}" for word, i in zip(words, best, strict=True)))


if __name__ == "__main__":
    with ending_quietly():
        model, corpus = common.run(RUNG, TITLE, build, __doc__)
        if "--pairs" not in sys.argv:
            print("\nEach word gets the same answer in every position:")
            show_answers_per_word(model, corpus)
