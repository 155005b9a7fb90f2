"""What decoding needs of a model, as protocols: GPT has it, and so may any model of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

__all__ = ["Cache", "LanguageModel", "make_cache"]


class Cache(Protocol):
    """The keys and values of the tokens read so far; a call of the model appends to it."""

    @property
    def length(self) -> int:
        """The number of tokens it holds."""

    def select(self, rows: Any) -> Self:
        """A cache of the rows of the batch with these indices, which may repeat."""


class LanguageModel(Protocol):
    """A module that returns logits of the next token.

    Attributes:
        config: has `vocab_size` and `block_size`, the largest number of tokens that a call may read.

    A method `new_cache()` that returns an empty `Cache` is optional. Without it every call reads all tokens. So are
    `end_ids`, the ids after which a text ends, and `copy_on_arrays()`, which returns a model of the same results, as
    arrays, that is faster and is called in place of this one where nothing is recorded.
    """

    config: Any

    @property  # as in Module, whose calls are typed by its forward
    def __call__(self) -> Callable[..., Any]:
        """`model(idx, last_only=True)`: ids (B, T) -> a Tensor of logits (B, 1, V), of what follows the last token.

        With a cache, `cache=` is passed too and `idx` contains the new tokens only. For prompts of different lengths
        `positions=`, integers (B, T), and `key_allow=`, boolean (B, T_k), are passed: False marks padding.
        """

    def evaluating(self) -> AbstractContextManager[Any]:
        """A context manager for eval mode, which may be entered repeatedly; see `tg.nn.Module.evaluating`."""


def make_cache(model: LanguageModel) -> Cache | None:
    """A new cache for `model`, or None if the model does not use one."""
    return model.new_cache() if hasattr(model, "new_cache") else None
