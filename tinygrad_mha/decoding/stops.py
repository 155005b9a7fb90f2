"""When a generated text ends: after a token id, after a string, or after a number of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha.arguments import is_integer
from tinygrad_mha.data import StreamDecoder, Tokenizer
from tinygrad_mha.decoding.language_model import LanguageModel

__all__ = ["Stops", "TextWriter", "parse_end_ids", "parse_stops"]


class Stops(NamedTuple):
    """What a text stops after."""

    ids: frozenset[int]
    strings: tuple[str, ...]


def parse_stops(stop: Any, tokenizer: Tokenizer | None, vocab_size: int) -> Stops:
    """Sort `stop` (None, a token id, a string, or a list of these) into ids and strings.

    Raises:
        ValueError: an empty string, a string that the tokenizer cannot write, a string without a tokenizer, an id
            outside the vocabulary.
        TypeError: anything else.
    """
    ids, strings = set(), []
    for one in as_list(stop):
        if isinstance(one, str):
            if not one:
                raise ValueError("stop contains an empty string, which every text contains")
            if tokenizer is None:
                raise ValueError(f"stop={one!r} is a string: pass tokenizer=..., or give a token id")
            tokenizer.encode(one)  # raises if the tokenizer has no tokens for it
            strings.append(one)
        else:
            ids.add(check_id(one, "stop", "a token id, a string, or a list of these", vocab_size))
    return Stops(frozenset(ids), tuple(strings))


def parse_end_ids(eos: Any, model: LanguageModel, vocab_size: int) -> frozenset[int]:
    """The ids that `eos` means: those of the model for "model", a token id, a list of these, or None for none.

    Ids of the model that are not in the vocabulary are never drawn, so they are left out.

    Raises:
        ValueError: an id outside the vocabulary.
        TypeError: anything else.
    """
    if isinstance(eos, str) and eos == "model":
        return frozenset(i for i in getattr(model, "end_ids", ()) if 0 <= i < vocab_size)
    expected = '"model", a token id, a list of token ids, or None'
    return frozenset(check_id(i, "eos", expected, vocab_size) for i in as_list(eos))


def as_list(values: Any) -> list[Any]:
    """None as an empty list, one value as a list of it."""
    return [] if values is None else [values] if isinstance(values, str) or np.ndim(values) == 0 else list(values)


def check_id(i: Any, name: str, expected: str, vocab_size: int) -> int:
    if not is_integer(i):
        raise TypeError(f"{name} must be {expected}, got {i!r}")
    if not 0 <= i < vocab_size:
        raise ValueError(f"{name} contains the id {i}, which is not in the vocabulary, 0 to {vocab_size - 1}")
    return int(i)


class TextWriter:
    """The new text of one row, token by token, and whether it is done.

    Args:
        prompt: the ids before the new text. They stop nothing, but their last character may be incomplete.
        limit: the number of tokens after which the text is done.
        stops: what else ends it.
        tokenizer: decodes tokens; None writes ids only.
    """

    def __init__(self, prompt: np.ndarray, limit: int, stops: Stops, tokenizer: Tokenizer | None) -> None:
        self.remaining = limit
        self.stops = stops
        self.done = False
        self._tail = ""  # the end of the new text, as long as the longest string to stop at
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        if self._decoder is not None:
            for token in prompt:
                self._decoder.push(int(token))

    def write(self, token: int) -> str:
        """Append a token; returns the text that it completes, "" without a tokenizer."""
        self.remaining -= 1
        self.done = self.remaining == 0 or token in self.stops.ids
        if self._decoder is None:
            return ""
        piece = self._decoder.push(token)
        text = self._tail + piece
        strings = self.stops.strings
        self.done = self.done or any(string in text for string in strings)
        self._tail = text[-max(map(len, strings), default=1) :]
        return piece + self._decoder.flush() if self.done else piece
