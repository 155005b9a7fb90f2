"""c) Attention without positions: every word looks at all words, as a bag of words.

    python examples/translation/c_attention.py

Scores are the dot products of the word vectors themselves, and what is mixed are those vectors: attention before any
matrix. Nothing in it knows where a word stands, so "two thousand and five" and "five thousand and two" get the same
answers in another order.
"""

import sys

import common
from models import PerWord

from tinygrad_mha import nn

RUNG, TITLE = "c", "attention, no positions"


class PlainAttention(nn.Module):
    """A_i = softmax(x_i x_j / sqrt(d)) x_j: every word becomes a weighted sum of all words."""

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


def show_blindness(model, corpus):
    """The same words in another order: what stands at the places of the words, by word."""
    for text in ("two thousand and five", "five thousand and two"):
        words = text.split()
        best = model(corpus.source.encode(words)).numpy()[: len(words)].argmax(axis=-1)
        print("  ".join(f"{word} -> {corpus.target.words[i]}" for word, i in zip(words, best, strict=True)))


if __name__ == "__main__":
    model, corpus = common.run(RUNG, TITLE, build, __doc__)
    if "--pairs" not in sys.argv:
        print("\nEvery word is answered alike, wherever it stands:")
        show_blindness(model, corpus)
