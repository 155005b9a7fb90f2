"""Where the text of a run comes from, so that a resumed run finds and recognizes it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from tinygrad_mha.data import builtin_corpus, read_text

__all__ = ["Source", "open_text", "reopen_text"]

BUILTIN, GIVEN = "built-in", "given"


class Source(NamedTuple):
    """A text and its origin: "built-in", "given" (as a string), or the path of a file."""

    text: str
    origin: str

    def describe(self) -> dict[str, str | int]:
        """The origin, length and SHA-256 of the text, for a checkpoint."""
        digest = hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()
        return {"source": self.origin, "sha256": digest, "characters": len(self.text)}


def open_text(text: str | Path | None) -> Source:
    """Open the text that a caller gave: the text itself, a file, or None for the built-in corpus.

    Raises:
        ValueError: the text is empty, or the name of a file.
    """
    if text is None:
        return Source(builtin_corpus(), BUILTIN)
    if isinstance(text, Path):
        return Source(read_text(text), str(text.resolve()))
    if re.fullmatch(r"[^\s]+\.[a-z]{2,4}", text):
        raise ValueError(
            f"the text is {text!r}, which is the name of a file: to train on its content, pass Path({text!r})"
        )
    if not text:
        raise ValueError("the text is empty")
    return Source(text, GIVEN)


def reopen_text(origin: str) -> Source:
    """Open the text of an earlier run by its origin.

    Raises:
        ValueError: the text was given as a string.
    """
    if origin == GIVEN:
        raise ValueError("the run was trained on a text that was given as a string: pass it again as text=")
    return open_text(None if origin == BUILTIN else Path(origin))
