"""Translators: what turns one row of ids into another, and how they are asked for an answer.

Axes: B batch, S source words, T target words, V_t target vocabulary. A target is a row `start ... end`, padded behind;
a model reads it up to the word before the last and is held to what follows each word.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from tinygrad_mha import modes, ops
from tinygrad_mha.arguments import as_ids, check_choice, check_count, check_ids
from tinygrad_mha.decoding.beam import Beams, beam_search
from tinygrad_mha.nn.layers import Embedding, FeedForward, Linear
from tinygrad_mha.nn.module import Module
from tinygrad_mha.nn.positions import sinusoidal
from tinygrad_mha.nn.recurrent import GRU, RNN, Recurrent
from tinygrad_mha.tensors import Tensor


class Translator(Module):
    """What translators share: the checks of ids, the loss, and decoding one word after the other.

    Args:
        source_vocab, target_vocab: how many words there are on each side.
        max_len: the longest source, and the longest target (with `start` or `end`, not both).
        pad, start, end: their ids; `pad` on both sides, the others in the target.
    """

    def __init__(
        self, source_vocab: int, target_vocab: int, max_len: int, pad: int = 0, start: int = 1, end: int = 2
    ) -> None:
        self.source_vocab, self.target_vocab = (
            check_count(source_vocab, "source_vocab"),
            check_count(target_vocab, "target_vocab"),
        )
        self.max_len = check_count(max_len, "max_len")
        if len({pad, start, end}) < 3 or not all(0 <= i < target_vocab for i in (pad, start, end)):
            raise ValueError(
                f"pad, start and end must be three different ids of the target's {target_vocab} words, "
                f"got {pad}, {start} and {end}"
            )
        self.pad, self.start, self.end = pad, start, end

    # What a model of this kind defines: `forward(src, tgt)`, and the two steps of decoding.

    def begin(self, src: np.ndarray) -> State:
        """Read sources (B, S): all that is needed of them, computed once."""
        raise NotImplementedError(f"{type(self).__name__} does not define begin")

    def advance(self, state: State, tokens: np.ndarray) -> Tensor:
        """Read one more target word (B,) of each row, and give logits (B, V_t) for the next; `state` moves on."""
        raise NotImplementedError(f"{type(self).__name__} does not define advance")

    def loss(self, src: Any, tgt: Any, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross entropy, in nats, of every target word after the first, padding left out.

        Args:
            src: ids (S,) or (B, S), padded behind.
            tgt: ids (T,) or (B, T), `start ... end`, padded behind.
        """
        tgt = self.checked(tgt, "tgt", self.target_vocab, longest=self.max_len + 1, least=2)
        logits = self(src, tgt[..., :-1])
        return ops.cross_entropy(logits, tgt[..., 1:], ignore_index=self.pad, label_smoothing=label_smoothing)

    def checked(self, ids: Any, name: str, vocab: int, longest: int | None = None, least: int = 1) -> np.ndarray:
        """Ids as an array, (T,) or (B, T), or an error that says which sentence cannot be used."""
        ids = as_ids(ids, name)
        longest = self.max_len if longest is None else longest
        if ids.ndim not in (1, 2) or ids.shape[-1] < least:
            raise ValueError(f"{name} must be (T,) or (B, T) with {least} words or more, got shape {ids.shape}")
        if ids.shape[-1] > longest:
            raise ValueError(f"{name} has {ids.shape[-1]} words, but this model has max_len = {self.max_len}")
        check_ids(ids, vocab, name)
        empty = np.flatnonzero((np.atleast_2d(ids) == self.pad).all(axis=-1))
        if empty.size:
            raise ValueError(f"{name}: sentence {empty[0]} is empty, it holds nothing but padding (the id {self.pad})")
        return ids

    def sources(self, src: Any) -> np.ndarray:
        return self.checked(src, "src", self.source_vocab)

    def pair(self, src: Any, tgt: Any) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Both sides with a batch axis, and what stands in front of T in the answer: (B,), or () for one pair."""
        src, tgt = self.sources(src), self.checked(tgt, "tgt", self.target_vocab)
        if src.shape[:-1] != tgt.shape[:-1]:
            raise ValueError(
                f"src and tgt must be (S,) and (T,), or (B, S) and (B, T); got {src.shape} and {tgt.shape}"
            )
        return np.atleast_2d(src), np.atleast_2d(tgt), src.shape[:-1]

    # ------------------------------------------------------------------------------------------------------- decoding

    def generate(
        self,
        src: Any,
        beam: int = 1,
        max_new_tokens: int | None = None,
        length_penalty: float = 0.0,
        use_cache: bool = True,
    ) -> Any:
        """Translate: one row of target ids for each source, without `start` and `end`.

        Args:
            src: ids (S,) or (B, S).
            beam: how many beginnings are followed; 1 takes the most probable word every time.
            max_new_tokens: where to stop a sentence that does not end, `max_len` unless given (and at most).
            length_penalty: see `beam_search`; of no consequence for a beam of 1.
            use_cache: False computes every word from the beginning: slow, and the same.

        Returns:
            An array (n,) for a source (S,), a list of such arrays for (B, S).
        """
        ids = self.sources(src)
        if beam == 1:
            found = self.greedy(np.atleast_2d(ids), self.limit(max_new_tokens), use_cache)
        else:
            options = {"beam": beam, "max_new_tokens": max_new_tokens, "length_penalty": length_penalty}
            found = [
                self.cut(self.search(row, **options, use_cache=use_cache).best.tokens) for row in np.atleast_2d(ids)
            ]
        return found[0] if ids.ndim == 1 else found

    @modes.no_grad
    def search(
        self,
        src: Any,
        beam: int = 4,
        max_new_tokens: int | None = None,
        length_penalty: float = 0.0,
        use_cache: bool = True,
    ) -> Beams:
        """The beams of one source (S,): its hypotheses, best first, and the tree that they stand in."""
        ids = self.sources(src)
        if ids.ndim != 1:
            raise ValueError(f"search takes one source (S,), got shape {ids.shape}")
        ids = ids[ids != self.pad]
        state: State = self.begin(ids[None]) if use_cache else Reread(ids[None])

        def step(prefixes: np.ndarray, parents: np.ndarray) -> np.ndarray:
            state.select(parents)
            logits = self.advance(state, prefixes[:, -1]) if use_cache else self.reread(state, prefixes[:, -1])
            return ops.log_softmax(logits.numpy().astype(np.float64))

        with self.evaluating():
            return beam_search(step, [self.start], self.end, beam, self.limit(max_new_tokens), length_penalty)

    @modes.no_grad
    def greedy(self, src: np.ndarray, limit: int, use_cache: bool) -> list[np.ndarray]:
        """The most probable word every time, for all rows at once."""
        with self.evaluating():
            state: State = self.begin(src) if use_cache else Reread(src)
            tokens = np.full(len(src), self.start)
            written: list[np.ndarray] = []
            going = np.ones(len(src), bool)
            while going.any() and len(written) < limit:
                logits = self.advance(state, tokens) if use_cache else self.reread(state, tokens)
                tokens = np.where(going, logits.numpy().argmax(axis=-1), self.end)
                going &= tokens != self.end
                written.append(tokens)
        return [self.cut(row) for row in np.stack(written, axis=1)]

    def reread(self, state: State, tokens: np.ndarray) -> Tensor:
        """`advance` without remembering: the whole target so far goes through the model again."""
        assert isinstance(state, Reread)
        state.tgt = np.concatenate([state.tgt, tokens[:, None]], axis=1)
        return self(state.src, state.tgt)[:, -1]

    def limit(self, max_new_tokens: int | None) -> int:
        wanted = self.max_len if max_new_tokens is None else check_count(max_new_tokens, "max_new_tokens")
        return min(wanted, self.max_len)

    def cut(self, row: np.ndarray) -> np.ndarray:
        """What stands before the first `end`."""
        ends = np.flatnonzero(row == self.end)
        return row[: ends[0]] if ends.size else row


class State:
    """What decoding remembers, one row for each sentence (or beam)."""

    def select(self, rows: np.ndarray) -> Self:
        """Go on with these rows, of which some may repeat."""
        raise NotImplementedError


class Reread(State):
    """Remembers the words alone."""

    def __init__(self, src: np.ndarray) -> None:
        self.src = src
        self.tgt = np.empty((len(src), 0), np.int64)

    def select(self, rows: np.ndarray) -> Self:
        self.src, self.tgt = self.src[rows], self.tgt[rows]
        return self


# --------------------------------------------------------------------------------------------------------------------
# Word for word


class PerWord(Translator):
    """A feed-forward network for each word, its answer standing where the word stands: logits_i = f(word_i).

    Nothing is passed between words unless there is a `mixer`, and no word knows its place unless there are `positions`.
    Places behind the source, up to max_len, hold padding, so that an answer can be longer than the question.

    Args:
        d_model: the width of a word vector.
        d_ff: the width inside the network.
        mixer: a module called as `mixer(x, key_allow=...)` on all words (B, max_len, d_model), whose result is added to
            them: a `MultiHeadAttention`, say. `key_allow` is False for padding.
        positions: whether sinusoids are added to the word vectors.

    Example:
        >>> model = PerWord(source_vocab=11, target_vocab=7, d_model=6, d_ff=12, max_len=5)
        >>> model([[3, 4]]).shape
        (1, 5, 7)
    """

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        d_model: int,
        d_ff: int,
        max_len: int,
        mixer: Module | None = None,
        positions: bool = False,
        pad: int = 0,
        start: int = 1,
        end: int = 2,
        seed: int | None = 0,
    ) -> None:
        super().__init__(source_vocab, target_vocab, max_len, pad, start, end)
        rng = np.random.default_rng(seed)
        self.d_model, self.positions = d_model, positions
        self.embedding = Embedding(source_vocab, d_model, 1.0, rng)
        self.mixer = mixer
        self.mlp = FeedForward(d_model, d_ff, "relu", rng=rng)
        self.head = Linear(d_model, target_vocab, rng=rng)

    def forward(self, src: Any, tgt: Any = None) -> Tensor:
        """Ids (S,) or (B, S) -> logits (max_len, V_t) or (B, max_len, V_t) for each place. `tgt` is not looked at."""
        src = self.sources(src)
        logits = self.answered(np.atleast_2d(src), self.max_len)
        return logits if src.ndim == 2 else logits[0]

    def answered(self, src: np.ndarray, n: int) -> Tensor:
        """Logits (B, n, V_t) of the first n places, n >= S: those behind change nothing in them."""
        ids = np.pad(src, [(0, 0), (0, n - src.shape[1])], constant_values=self.pad)
        x = self.embedding(ids)
        if self.positions:
            x = x + sinusoidal(np.arange(n), self.d_model).astype(x.dtype)
        if self.mixer is not None:
            x = x + self.mixer(x, key_allow=ids != self.pad)
        return self.head(x + self.mlp(x))

    def loss(self, src: Any, tgt: Any, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross entropy of each target word, and of `end`, at its place; see `Translator.loss`."""
        src = np.atleast_2d(self.sources(src))
        tgt = self.checked(tgt, "tgt", self.target_vocab, longest=self.max_len + 1, least=2)
        wanted = np.atleast_2d(tgt)[:, 1:]
        if len(wanted) != len(src):
            raise ValueError(f"src and tgt must have as many sentences, got {len(src)} and {len(wanted)}")
        n = wanted.shape[1]
        logits = self.answered(src, max(n, src.shape[1]))[:, :n]
        return ops.cross_entropy(logits, wanted, ignore_index=self.pad, label_smoothing=label_smoothing)

    @modes.no_grad
    def generate(
        self,
        src: Any,
        beam: int = 1,
        max_new_tokens: int | None = None,
        length_penalty: float = 0.0,
        use_cache: bool = True,
    ) -> Any:
        """The most probable word of each place, up to the first `end`; see `Translator.generate`.

        Raises:
            ValueError: a beam other than 1: the places do not depend on each other, so there is nothing to search.
        """
        if beam != 1:
            raise ValueError(f"the places of a {type(self).__name__} do not depend on each other: leave beam at 1")
        with self.evaluating():
            best = self(src).numpy().argmax(axis=-1)[..., : self.limit(max_new_tokens)]
        return self.cut(best) if best.ndim == 1 else [self.cut(row) for row in best]


# --------------------------------------------------------------------------------------------------------------------
# Recurrent


CELLS: dict[str, type[Recurrent]] = {"rnn": RNN, "gru": GRU}


class Carried(State):
    """The state of a recurrent decoder."""

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def select(self, rows: np.ndarray) -> Self:
        self.h = Tensor(self.h.numpy()[rows])
        return self


class Seq2Seq(Translator):
    """A recurrent encoder reads the source into one vector, a recurrent decoder writes the target from it
    (arXiv:1409.3215).

    Args:
        d_model: the width of word vectors.
        n_hidden: the width of the states, d_model unless given.
        cell: "rnn" or "gru".

    Example:
        >>> model = Seq2Seq(source_vocab=11, target_vocab=7, d_model=6, max_len=9, cell="gru")
        >>> model([[3, 4, 5]], [[1, 3, 4, 4]]).shape
        (1, 4, 7)
    """

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        d_model: int,
        max_len: int,
        n_hidden: int | None = None,
        cell: str = "rnn",
        pad: int = 0,
        start: int = 1,
        end: int = 2,
        seed: int | None = 0,
    ) -> None:
        super().__init__(source_vocab, target_vocab, max_len, pad, start, end)
        make = CELLS[check_choice(cell, CELLS, "cell")]
        n_hidden = d_model if n_hidden is None else n_hidden
        rng = np.random.default_rng(seed)
        self.source_embedding = Embedding(source_vocab, d_model, 1.0, rng)
        self.target_embedding = Embedding(target_vocab, d_model, 1.0, rng)
        self.encoder = make(d_model, n_hidden, rng)
        self.decoder = make(d_model, n_hidden, rng)
        self.head = Linear(n_hidden, target_vocab, rng=rng)

    def encode(self, src: Any) -> Tensor:
        """Ids (S,) or (B, S) -> the state after the last word, (H,) or (B, H): all that the decoder learns of them."""
        src = self.sources(src)
        ids = np.atleast_2d(src)
        _, last = self.encoder(self.source_embedding(ids), alive=ids != self.pad)
        return last if src.ndim == 2 else last[0]

    def forward(self, src: Any, tgt: Any) -> Tensor:
        """Ids (B, S) and (B, T) -> logits (B, T, V_t): what follows each target word. Without B: one pair."""
        src, tgt, front = self.pair(src, tgt)
        states, _ = self.decoder(self.target_embedding(tgt), self.encode(src))
        logits = self.head(states)
        return logits if front else logits[0]

    def begin(self, src: np.ndarray) -> State:
        return Carried(self.encode(src))

    def advance(self, state: State, tokens: np.ndarray) -> Tensor:
        assert isinstance(state, Carried)
        _, state.h = self.decoder(self.target_embedding(tokens[:, None]), state.h)
        return self.head(state.h)
