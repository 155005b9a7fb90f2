"""The base class of models that translate one row of ids into another: checks of ids, the loss, and decoding.

Axes: B batch, S source words, T target words, V_t target vocabulary. A target is a row `start ... end`, padded at the
end. A model reads it without its last word and predicts the word after each.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from tinygrad_mha import modes, ops
from tinygrad_mha.arguments import as_ids, check_count, check_ids
from tinygrad_mha.decoding import BeamSearchResult, beam_search, check_logits, compute_log_probabilities
from tinygrad_mha.nn.module import Module, copy_on_arrays
from tinygrad_mha.tensors import Tensor, plain

__all__ = ["Translator"]


class Translator(Module):
    """Base class of translators. A subclass defines `forward(src, tgt)`, `begin(src)` and `advance(state, tokens)`.

    Args:
        source_vocab, target_vocab: the number of words on each side.
        max_len: the length of the longest source and of the longest target (with `start` or `end`, not both).
        pad, start, end: the ids of padding (both sides) and of the words that begin and end a target.

    Raises:
        ValueError: a size below 1, or ids that are equal or not in the target's vocabulary.
    """

    def __init__(
        self, source_vocab: int, target_vocab: int, max_len: int, pad: int = 0, start: int = 1, end: int = 2
    ) -> None:
        self.source_vocab = check_count(source_vocab, "source_vocab")
        self.target_vocab = check_count(target_vocab, "target_vocab")
        self.max_len = check_count(max_len, "max_len")
        if len({pad, start, end}) < 3 or not all(0 <= i < target_vocab for i in (pad, start, end)):
            raise ValueError(
                f"pad, start and end must be three different ids of the target's {target_vocab} words, "
                f"got {pad}, {start} and {end}"
            )
        self.pad, self.start, self.end = pad, start, end

    def begin(self, src: np.ndarray) -> Any:
        """Read the sources (B, S) once and return the state before the first target word."""
        raise NotImplementedError(f"{type(self).__name__} does not define begin")

    def advance(self, state: Any, tokens: np.ndarray) -> Tensor:
        """Read one more target word (B,) of each row into `state`; return the logits (B, V_t) of the next."""
        raise NotImplementedError(f"{type(self).__name__} does not define advance")

    def loss(self, src: Any, tgt: Any, label_smoothing: float = 0.0) -> Tensor:
        """Return the mean cross entropy, in nats, of every target word after the first, padding left out.

        Args:
            src: ids (S,) or (B, S), padded at the end.
            tgt: ids (T,) or (B, T), `start ... end`, padded at the end.
        """
        tgt = self.check_target(tgt)
        logits = self(src, tgt[..., :-1])
        return ops.cross_entropy(logits, tgt[..., 1:], ignore_index=self.pad, label_smoothing=label_smoothing)

    def count_targets(self, tgt: Any) -> int:
        """The number of words of which `loss` is the mean: those after the first, padding left out."""
        return int(np.count_nonzero(self.check_target(tgt)[..., 1:] != self.pad))

    # -------------------------------------------------------------------------------------------------------- checks

    def check_source(self, src: Any) -> np.ndarray:
        """Return a source as integers (S,) or (B, S).

        Raises:
            ValueError: a wrong shape, more than max_len words, or a sentence of padding only.
            TypeError, IndexError: ids that are not integers, or not in the vocabulary.
        """
        return self._check_sentences(src, "src", self.source_vocab, self.max_len, least=1)

    def check_target(self, tgt: Any) -> np.ndarray:
        """Return a whole target, `start ... end`, as integers (T,) or (B, T); it has at most max_len + 1 words."""
        return self._check_sentences(tgt, "tgt", self.target_vocab, self.max_len + 1, least=2)

    def check_pair(self, src: Any, tgt: Any) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return the inputs of `forward` as (B, S) and (B, T), and whether they were given as a batch."""
        src = self.check_source(src)
        tgt = self._check_sentences(tgt, "tgt", self.target_vocab, self.max_len, least=1)
        if src.shape[:-1] != tgt.shape[:-1]:
            raise ValueError(
                f"src and tgt must be (S,) and (T,), or (B, S) and (B, T); got {src.shape} and {tgt.shape}"
            )
        return np.atleast_2d(src), np.atleast_2d(tgt), src.ndim == 2

    def _check_sentences(self, ids: Any, name: str, vocab: int, longest: int, least: int) -> np.ndarray:
        ids = as_ids(ids, name)
        if ids.ndim not in (1, 2) or ids.shape[-1] < least:
            raise ValueError(f"{name} must be (T,) or (B, T) with {least} words or more, got shape {ids.shape}")
        if ids.shape[-1] > longest:
            raise ValueError(f"{name} has {ids.shape[-1]} words, but this model has max_len = {self.max_len}")
        check_ids(ids, vocab, name)
        empty = np.flatnonzero((np.atleast_2d(ids) == self.pad).all(axis=-1))
        if empty.size:
            raise ValueError(f"{name}: sentence {empty[0]} is empty, it holds only padding (the id {self.pad})")
        return ids

    # ------------------------------------------------------------------------------------------------------ decoding

    def generate(
        self, src: Any, beam: int = 1, max_new_tokens: int | None = None, length_penalty: float = 0.0
    ) -> np.ndarray | list[np.ndarray]:
        """Translate: return the target ids of each source, without `start` and `end`.

        The model runs in eval mode and without gradients; afterwards it has the mode that it had before.

        Args:
            src: ids (S,) or (B, S).
            beam: the number of prefixes kept; 1 takes the most probable word at every step.
            max_new_tokens: where a sentence that does not end is cut; `max_len` by default and at most.
            length_penalty: see `beam_search`; it has no effect with a beam of 1.

        Returns:
            An array (n,) for a source (S,), a list of such arrays for (B, S).

        Raises:
            ValueError: sources as in `check_source`, an option out of its range, or logits that are nan or infinite.
        """
        ids = self.check_source(src)
        if check_count(beam, "beam") == 1:
            rows = self._generate_greedily(np.atleast_2d(ids), self.limit_tokens(max_new_tokens))
        else:
            found = [self.search(row, beam, max_new_tokens, length_penalty) for row in np.atleast_2d(ids)]
            rows = [self.cut_at_end(result.best.tokens) for result in found]
        return rows[0] if ids.ndim == 1 else rows

    @modes.no_grad
    def search(
        self, src: Any, beam: int = 4, max_new_tokens: int | None = None, length_penalty: float = 0.0
    ) -> BeamSearchResult:
        """Run a beam search for one source (S,). Returns all hypotheses, best first, and the tree of the search.

        The arguments are those of `generate`. The token ids of a hypothesis end with `end` if it was reached.
        """
        ids = self.check_source(src)
        if ids.ndim != 1:
            raise ValueError(f"search takes one source (S,), got shape {ids.shape}")
        with self.evaluating():
            model = self._model_for_inference()
            state = model.begin(ids[ids != self.pad][None])

            def step(prefixes: np.ndarray, parents: np.ndarray) -> np.ndarray:
                nonlocal state
                state = state.select(parents)
                return compute_log_probabilities(plain(model.advance(state, prefixes[:, -1])))

            return beam_search(step, [self.start], self.end, beam, self.limit_tokens(max_new_tokens), length_penalty)

    @modes.no_grad
    def _generate_greedily(self, src: np.ndarray, limit: int) -> list[np.ndarray]:
        """Take the most probable word at every step, for all rows at once."""
        with self.evaluating():
            model = self._model_for_inference()
            state = model.begin(src)
            tokens = np.full(len(src), self.start)
            columns: list[np.ndarray] = []
            while (tokens != self.end).any() and len(columns) < limit:
                best = check_logits(plain(model.advance(state, tokens))).argmax(axis=-1)
                tokens = np.where(tokens == self.end, self.end, best)
                columns.append(tokens)
        return [self.cut_at_end(row) for row in np.stack(columns, axis=1)]

    def _model_for_inference(self) -> Self:
        """A twin on arrays, unless operations are to be recorded."""
        return copy_on_arrays(self) if modes.STATE.get().is_silent else self

    def limit_tokens(self, max_new_tokens: int | None) -> int:
        """Return the largest number of words of an answer: max_len by default and at most."""
        limit = self.max_len if max_new_tokens is None else check_count(max_new_tokens, "max_new_tokens")
        return min(limit, self.max_len)

    def cut_at_end(self, row: np.ndarray) -> np.ndarray:
        """Return the ids before the first `end`."""
        ends = np.flatnonzero(row == self.end)
        return row[: ends[0]] if ends.size else row
