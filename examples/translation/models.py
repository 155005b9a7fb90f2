"""The models of the first rungs: one network per word, and a recurrent encoder and decoder.

Axes: B batch, S source words, T target words, V_t target vocabulary.
"""

import numpy as np
from recurrent import GRU, RNN

from tinygrad_mha import Tensor, nn, no_grad, ops
from tinygrad_mha.arguments import check_choice
from tinygrad_mha.decoding import check_logits

CELLS = {"rnn": RNN, "gru": GRU}


class PerWord(nn.Translator):
    """A feed-forward network applied to each source word: logits_i = f(word_i), the answer at position i.

    Words exchange nothing unless there is a `mixer`, and a word does not depend on its position unless `positions` is
    True. Positions after the source, up to max_len, hold padding, so an answer can be longer than its source.

    Args:
        d_model: the width of a word vector.
        d_ff: the inner width of the network.
        mixer: a module called as `mixer(x, key_allow=...)` on all word vectors (B, max_len, d_model); its result is
            added to them. A `MultiHeadAttention`, for example. `key_allow` is False for padding.
        positions: whether sinusoids are added to the word vectors.

    Example:
        >>> model = PerWord(source_vocab=11, target_vocab=7, d_model=6, d_ff=12, max_len=5)
        >>> model([[3, 4]]).shape
        (1, 5, 7)
    """

    def __init__(
        self,
        source_vocab,
        target_vocab,
        d_model,
        d_ff,
        max_len,
        mixer=None,
        positions=False,
        pad=0,
        start=1,
        end=2,
        seed=0,
    ):
        super().__init__(source_vocab, target_vocab, max_len, pad, start, end)
        rng = np.random.default_rng(seed)
        self.d_model, self.positions = d_model, positions
        self.embedding = nn.Embedding(source_vocab, d_model, 1.0, rng)
        self.mixer = mixer
        self.mlp = nn.FeedForward(d_model, d_ff, "relu", rng=rng)
        self.head = nn.Linear(d_model, target_vocab, rng=rng)

    def forward(self, src, tgt=None):
        """Map ids (S,) or (B, S) to logits (max_len, V_t) or (B, max_len, V_t), one row per position. Ignores `tgt`."""
        src = self.check_source(src)
        logits = self.compute_logits(np.atleast_2d(src), self.max_len)
        return logits if src.ndim == 2 else logits[0]

    def compute_logits(self, src, n):
        """Return the logits (B, n, V_t) of the first n >= S positions; the positions after them do not change them."""
        ids = np.pad(src, [(0, 0), (0, n - src.shape[1])], constant_values=self.pad)
        x = self.embedding(ids)
        if self.positions:
            x = x + nn.sinusoidal(np.arange(n), self.d_model).astype(x.dtype)
        if self.mixer is not None:
            x = x + self.mixer(x, key_allow=ids != self.pad)
        return self.head(x + self.mlp(x))

    def loss(self, src, tgt, label_smoothing=0.0):
        """Return the mean cross entropy of each target word, and of `end`, at its position; see `Translator.loss`."""
        src = np.atleast_2d(self.check_source(src))
        targets = np.atleast_2d(self.check_target(tgt))[:, 1:]
        if len(targets) != len(src):
            raise ValueError(f"src and tgt must have as many sentences, got {len(src)} and {len(targets)}")
        n = targets.shape[1]
        logits = self.compute_logits(src, max(n, src.shape[1]))[:, :n]
        return ops.cross_entropy(logits, targets, ignore_index=self.pad, label_smoothing=label_smoothing)

    @no_grad
    def generate(self, src, beam=1, max_new_tokens=None):
        """Return the most probable word of each position, up to the first `end`; see `Translator.generate`.

        Raises:
            ValueError: a beam other than 1: the positions do not depend on each other, so there is nothing to search.
        """
        if beam != 1:
            raise ValueError(f"the positions of a {type(self).__name__} are independent: leave beam at 1, got {beam}")
        with self.evaluating():
            logits = check_logits(self(src).numpy())
        best = logits.argmax(axis=-1)[..., : self.limit_tokens(max_new_tokens)]
        return self.cut_at_end(best) if best.ndim == 1 else [self.cut_at_end(row) for row in best]


class Seq2Seq(nn.Translator):
    """A recurrent encoder reads the source into one vector, from which a recurrent decoder writes the target
    (arXiv:1409.3215).

    Args:
        d_model: the width of a word vector.
        n_hidden: the width of the states, d_model by default.
        cell: "rnn" or "gru".

    Example:
        >>> model = Seq2Seq(source_vocab=11, target_vocab=7, d_model=6, max_len=9, cell="gru")
        >>> model([[3, 4, 5]], [[1, 3, 4, 4]]).shape
        (1, 4, 7)
    """

    def __init__(
        self,
        source_vocab,
        target_vocab,
        d_model,
        max_len,
        n_hidden=None,
        cell="rnn",
        pad=0,
        start=1,
        end=2,
        seed=0,
    ):
        super().__init__(source_vocab, target_vocab, max_len, pad, start, end)
        layer = CELLS[check_choice(cell, CELLS, "cell")]
        n_hidden = d_model if n_hidden is None else n_hidden
        rng = np.random.default_rng(seed)
        self.source_embedding = nn.Embedding(source_vocab, d_model, 1.0, rng)
        self.target_embedding = nn.Embedding(target_vocab, d_model, 1.0, rng)
        self.encoder = layer(d_model, n_hidden, rng)
        self.decoder = layer(d_model, n_hidden, rng)
        self.head = nn.Linear(n_hidden, target_vocab, rng=rng)

    def encode(self, src):
        """Map ids (S,) or (B, S) to the state after the last word, (H,) or (B, H): all that the decoder receives."""
        src = self.check_source(src)
        ids = np.atleast_2d(src)
        _, last = self.encoder(self.source_embedding(ids), valid=ids != self.pad)
        return last if src.ndim == 2 else last[0]

    def forward(self, src, tgt):
        """Map ids (B, S) and (B, T) to the logits (B, T, V_t) of the word after each target word; or one pair."""
        src, tgt, is_batch = self.check_pair(src, tgt)
        states, _ = self.decoder(self.target_embedding(tgt), self.encode(src))
        logits = self.head(states)
        return logits if is_batch else logits[0]

    def begin(self, src):
        return RecurrentState(self.encode(src))

    def advance(self, state, tokens):
        _, state.h = self.decoder(self.target_embedding(tokens[:, None]), state.h)
        return self.head(state.h)


class RecurrentState:
    """The state h (B, H) of a recurrent decoder."""

    def __init__(self, h):
        self.h = h

    def select(self, rows):
        """Return the state of the given rows; a row may occur several times."""
        return RecurrentState(Tensor(self.h.numpy()[rows]))
