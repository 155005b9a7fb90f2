"""The cost of a computation: multiply-adds of its matrix products, counted on the recorded graph."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tinygrad_mha import engine, modes, ops
from tinygrad_mha.decoding.language_model import Cache, LanguageModel, make_cache
from tinygrad_mha.ops.elementary import einsum_terms
from tinygrad_mha.tensors import Tensor

__all__ = ["CountedModel", "count_multiply_adds"]


def count_multiply_adds(y: Tensor) -> int:
    """The number of multiplications, each with an addition, in all matrix products that `y` was computed from.

    They are counted from the shapes of the recorded operands: what the program computed, masked scores included.
    Element-wise operations and reductions are not counted. A fused primitive is counted by its composition.

    Args:
        y: a tensor whose computation was recorded: under `tg.record()`, or because it needs a gradient.

    Example:
        >>> a, b = tg.Tensor(np.ones((2, 3))), tg.Tensor(np.ones((3, 5)))
        >>> with tg.record():
        ...     y = (a @ b).tanh()
        >>> count_multiply_adds(y)
        30
    """
    return sum(count_node(t) for t in engine.toposort([y], everything=True) if t.node is not None)


def count_node(y: Tensor) -> int:
    """The multiply-adds of the one operation that computed `y`."""
    assert y.node is not None
    op, arrays, keywords = y.node.op, y.node.arrays, y.node.kwargs
    if op in (ops.matmul, ops.linear):
        return y.size * arrays[0].shape[-1]
    if op is ops.einsum:
        shapes = [np.shape(x) for x in arrays]
        terms, _ = einsum_terms(keywords["subscripts"], shapes)
        lengths: dict[str, int] = {}
        for term, shape in zip(terms, shapes, strict=True):
            lengths |= {letter: max(n, lengths.get(letter, 1)) for letter, n in zip(term, shape, strict=True)}
        return (len(arrays) - 1) * math.prod(lengths.values())
    if op.composition is not None and op.kind in ("attention", "composite", "product", "function"):
        with modes.no_grad(), modes.record():
            return count_multiply_adds(op.composition(Tensor(arrays[0]), *arrays[1:], **keywords))
    return 0


class CountedModel:
    """A language model that counts the multiply-adds of its calls; everything else is left to the model it wraps.

    Attributes:
        multiply_adds: the number counted so far.

    Example:
        >>> config = tg.nn.GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=6)
        >>> model = CountedModel(tg.nn.GPT(config))
        >>> ids = tg.generate(model, [1, 2, 3, 4], 3)
        >>> model.multiply_adds
        3114
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.config = model.config
        self.end_ids = getattr(model, "end_ids", ())
        self.multiply_adds = 0

    def __call__(self, idx: np.ndarray, **options: Any) -> Tensor:
        """Call the model and count."""
        with modes.record():
            logits = self.model(idx, **options)
        self.multiply_adds += count_multiply_adds(logits)
        return logits

    def new_cache(self) -> Cache | None:
        """See `LanguageModel`."""
        return make_cache(self.model)

    def evaluating(self) -> AbstractContextManager[Any]:
        """See `LanguageModel`."""
        return self.model.evaluating()
