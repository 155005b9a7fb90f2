"""Scores: what changes the scores of attention before the mask, and what makes weights of them. `SCORES` lists all.

Axes: H heads, T_q queries, T_k keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tinygrad_mha import ops
from tinygrad_mha.arguments import check_number
from tinygrad_mha.nn.init import constant
from tinygrad_mha.nn.schemes import Scheme, find_scheme
from tinygrad_mha.tensors import Tensor

__all__ = ["SCORES", "Score", "Sinks", "SoftCap", "as_score"]


@dataclass(unsafe_hash=True)
class Score(Scheme):
    """The usual softmax, named "softmax", and the base class of all others, which override what they need."""

    name: ClassVar[str] = "softmax"

    def initialize(self, n_head: int) -> Score:
        """A copy with parameters for `n_head` heads; the scheme itself if it has no parameters to make."""
        return self

    def of_head(self, i: int) -> Score:
        """The same for scores (..., T_q, T_k) of head `i` alone."""
        return self

    def change(self, scores: Tensor) -> Tensor:
        """The scaled scores (..., H, T_q, T_k), changed before bias and mask."""
        return scores

    def normalize(self, masked: Tensor) -> Tensor:
        """Weights from scores with bias and mask: (..., H, T_q, T_k) -> the same shape."""
        return ops.softmax(masked)


@dataclass(unsafe_hash=True)
class SoftCap(Score):
    """Scores are kept between -cap and cap by cap tanh(scores / cap), as in Gemma 2 (arXiv:2408.00118, section 2)."""

    cap: float = 50.0

    def __post_init__(self) -> None:
        check_number(self.cap, "cap", positive=True)

    def change(self, scores: Tensor) -> Tensor:
        return ops.tanh(scores / self.cap) * self.cap


class Sinks(Score):
    """Each head has a learned score that takes part in the softmax and has no value, as in gpt-oss.

    A query can give weight to it instead of to a token, so its weights sum to less than 1. It belongs to no position,
    so windows and padding do not touch it. The scores are 0 at first: weights are exp(s_j) / (1 + sum_k exp(s_k)).
    """

    def __post_init__(self) -> None:
        self.sink: Tensor | None = None  # (H, 1, 1)

    def initialize(self, n_head: int) -> Sinks:
        scheme = dataclasses.replace(self)
        scheme.sink = constant((n_head, 1, 1), 0.0, "sink")
        return scheme

    def of_head(self, i: int) -> Sinks:
        scheme = dataclasses.replace(self)
        assert self.sink is not None
        scheme.sink = self.sink[i].named(f"sink_{i + 1}")
        return scheme

    def normalize(self, masked: Tensor) -> Tensor:
        column = ops.broadcast_to(self.sink, shape=(*masked.shape[:-1], 1))
        return ops.softmax(ops.concat(masked, column, axis=-1))[..., :-1]


SCORES: dict[str, type[Score]] = {scheme.name: scheme for scheme in (SoftCap, Sinks, Score)}


def as_score(score: Score | Mapping[str, Any] | str | None) -> Score | None:
    """The object that `score` describes; see `find_scheme`. None for the usual softmax.

    Example:
        >>> as_score("softcap"), as_score({"name": "softcap", "cap": 30.0})
        (SoftCap(cap=50.0), SoftCap(cap=30.0))
    """
    scheme = find_scheme("softmax" if score is None else score, Score, SCORES, "score")
    return None if type(scheme) is Score else scheme
