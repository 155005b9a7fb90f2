"""The encoder-decoder Transformer of "Attention Is All You Need" (arXiv:1706.03762).

Axes: B batch, S source words, T target words, C width (d_model), H heads, V_t target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, overload

import numpy as np
from numpy.random import Generator

from tinygrad_mha import ops
from tinygrad_mha.arguments import check_count
from tinygrad_mha.nn.cache import CachedLayer, KVCache
from tinygrad_mha.nn.heads import AttentionTrace, Steps
from tinygrad_mha.nn.init import normal
from tinygrad_mha.nn.layers import Dropout, Embedding, FeedForward, LayerNorm
from tinygrad_mha.nn.module import Module
from tinygrad_mha.nn.multihead import Memory, MultiHeadAttention
from tinygrad_mha.nn.positions import sinusoidal
from tinygrad_mha.nn.translators import Translator
from tinygrad_mha.tensors import Tensor

__all__ = ["DecoderBlock", "EncoderBlock", "Transformer", "TransformerState", "TransformerTrace"]


class ResidualBlock(Module):
    """Base class of the blocks: every sublayer has a residual connection and a layer norm.

    With `norm_first` the sublayer's input is normalized (arXiv:2002.04745), else the sum, as in the paper.
    """

    has_cross: ClassVar[bool] = False  # whether there is cross-attention after the self-attention

    def __init__(
        self, d_model: int, n_head: int, d_ff: int, norm_first: bool, dropout: float, activation: str, rng: Generator
    ) -> None:
        attention = partial(MultiHeadAttention, d_model, n_head, bias=True, dropout=dropout, rng=rng, fused=True)
        self.norm_first = norm_first
        self.drop = Dropout(dropout, rng.spawn(1)[0])
        self.ln_1 = LayerNorm(d_model)
        self.attn = attention()
        self.ln_2 = LayerNorm(d_model)
        if self.has_cross:
            self.cross = attention()
            self.ln_3 = LayerNorm(d_model)
        self.mlp = FeedForward(d_model, d_ff, activation, rng=rng)

    def add(self, x: Tensor, ln: LayerNorm, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x + dropout(sublayer(ln(x))) with `norm_first`, else ln(x + dropout(sublayer(x)))."""
        return x + self.drop(sublayer(ln(x))) if self.norm_first else ln(x + self.drop(sublayer(x)))


class EncoderBlock(ResidualBlock):
    """Self-attention over the source, then a feed-forward network."""

    takes_arrays = True

    def forward(self, x: Tensor, key_allow: np.ndarray | None, steps: Steps | None = None) -> Tensor:
        """Map the source (B, S, C) to (B, S, C). `key_allow` (B, S) is False for padding; `steps` records attention."""
        x = self.add(x, self.ln_1, lambda x: self.attn(x, key_allow=key_allow, edit=steps))
        return self.add(x, self.ln_2, self.mlp)


class DecoderBlock(ResidualBlock):
    """Causal self-attention over the target, cross-attention to the source, then a feed-forward network."""

    has_cross = True
    takes_arrays = True

    def forward(
        self,
        x: Tensor,
        memory: Tensor | Memory,
        key_allow: np.ndarray | None,
        cache: CachedLayer | None = None,
        steps: Steps | None = None,
        cross_steps: Steps | None = None,
    ) -> Tensor:
        """Map the target (B, T, C) to (B, T, C); `memory` is the encoded source, or its keys and values."""
        x = self.add(x, self.ln_1, lambda x: self.attn(x, causal=True, cache=cache, edit=steps))
        x = self.add(x, self.ln_2, lambda x: self.cross(x, memory, key_allow=key_allow, edit=cross_steps))
        return self.add(x, self.ln_3, self.mlp)


class TransformerTrace(NamedTuple):
    """What the attention layers of a Transformer computed, one `AttentionTrace` per block."""

    encoder: tuple[AttentionTrace, ...]
    decoder: tuple[AttentionTrace, ...]
    cross: tuple[AttentionTrace, ...]  # weights (B, H, T, S): from each target word to the source words


class TransformerState(NamedTuple):
    """What decoding remembers between two words."""

    memory: list[Memory]  # the keys and values of the source, for each block
    key_allow: np.ndarray | None  # (B, S), False for padding
    cache: KVCache  # the keys and values of the target words so far

    def select(self, rows: np.ndarray) -> TransformerState:
        """Return the state of the given rows; a row may occur several times."""
        memory = [memory.select(rows) for memory in self.memory]
        key_allow = None if self.key_allow is None else self.key_allow[rows]
        return TransformerState(memory, key_allow, self.cache.select(rows))


class Transformer(Translator):
    """An encoder-decoder: self-attention over the source, causal self-attention over the target, and cross-attention
    from the target to the source (arXiv:1706.03762).

    Args:
        source_vocab, target_vocab: the number of words on each side.
        d_model: the width C.
        n_head, n_layer, d_ff: the number of heads and of blocks on each side, and the inner width of the feed-forward
            networks.
        max_len: the length of the position table, and so of the longest source and the longest target.
        norm_first: True normalizes the input of every sublayer, and the output of the last block of each side; False
            normalizes the sum, as in the paper.
        dropout: the probability of dropout on embeddings, attention weights and the outputs of all sublayers.
        pad, start, end: the ids of padding (both sides), and of the words that begin and end a target.
        seed: the seed of the initial weights and of dropout.
        shared: whether source, target and output share one table of word vectors (section 3.4 of the paper); both
            sides then have one vocabulary.
        activation: "relu" (the paper), "gelu" or "gelu_tanh".

    Raises:
        ValueError: sizes that do not fit, a `norm_first` that is not a boolean (or `norm`, its former name), or a
            shared table for vocabularies of two sizes.

    Example:
        >>> model = Transformer(source_vocab=11, target_vocab=7, d_model=6, n_head=2, n_layer=1, d_ff=12, max_len=9)
        >>> model([[3, 4, 5]], [[1, 3, 4, 4]]).shape
        (1, 4, 7)
        >>> model.loss([[3, 4, 5]], [[1, 3, 4, 4, 2]]).shape
        ()
    """

    takes_arrays = True

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        d_model: int,
        n_head: int,
        n_layer: int,
        d_ff: int,
        max_len: int,
        norm_first: bool = True,
        dropout: float = 0.0,
        pad: int = 0,
        seed: int | None = 0,
        start: int = 1,
        end: int = 2,
        shared: bool = False,
        activation: str = "relu",
        norm: None = None,
    ) -> None:
        super().__init__(source_vocab, target_vocab, max_len, pad, start, end)
        if check_count(d_model, "d_model") % check_count(n_head, "n_head"):
            raise ValueError(f"d_model must be a multiple of n_head, got {d_model} and {n_head}")
        if norm is not None or not isinstance(norm_first, bool):
            given = norm_first if norm is None else norm
            raise ValueError(f"norm_first must be True (instead of norm='pre') or False ('post'), got {given!r}")
        if shared and source_vocab != target_vocab:
            raise ValueError(
                f"shared=True needs one vocabulary for both sides, got {source_vocab} and {target_vocab} words"
            )
        rng = np.random.default_rng(seed)
        self.d_model, self.n_layer, self.norm_first = d_model, check_count(n_layer, "n_layer"), norm_first
        std = d_model**-0.5  # times sqrt(d_model) in `_embed`, word vectors have a spread of 1, like the sinusoids
        self.source_embedding = Embedding(source_vocab, d_model, std, rng)
        self.target_embedding = self.source_embedding if shared else Embedding(target_vocab, d_model, std, rng)
        self.drop = Dropout(dropout, rng.spawn(1)[0])
        block = (d_model, n_head, check_count(d_ff, "d_ff"), norm_first, dropout, activation, rng)
        self.encoder = [EncoderBlock(*block) for _ in range(n_layer)]
        self.decoder = [DecoderBlock(*block) for _ in range(n_layer)]
        self.ln_source = LayerNorm(d_model) if norm_first else None
        self.ln_target = LayerNorm(d_model) if norm_first else None
        self.head = self.target_embedding.weight if shared else normal((target_vocab, d_model), std, rng)
        self.table = sinusoidal(np.arange(max_len), d_model)

    def encode(self, src: Any) -> Tensor:
        """Map ids (S,) or (B, S) to what the decoder attends to, (S, C) or (B, S, C)."""
        src = self.check_source(src)
        memory = self._encode(np.atleast_2d(src))
        return memory if src.ndim == 2 else memory[0]

    if TYPE_CHECKING:

        @overload  # type: ignore[override]  # the result depends on `trace`
        def __call__(self, src: Any, tgt: Any, trace: Literal[False] = False) -> Tensor: ...
        @overload
        def __call__(self, src: Any, tgt: Any, trace: Literal[True]) -> tuple[Tensor, TransformerTrace]: ...
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def forward(self, src: Any, tgt: Any, trace: bool = False) -> Tensor | tuple[Tensor, TransformerTrace]:
        """Map ids (B, S) and (B, T) to the logits (B, T, V_t) of the word after each target word; or one pair.

        Args:
            src: source ids, padded at the end.
            tgt: target ids, `start` first, padded at the end.
            trace: also return a `TransformerTrace` (with the axis B).

        Raises:
            ValueError: an empty sentence, or one longer than `max_len`.
            TypeError, IndexError: ids that are not integers, or not in the vocabulary.
        """
        src, tgt, is_batch = self.check_pair(src, tgt)
        encoder, decoder, cross = ([Steps() if trace else None for _ in self.decoder] for _ in range(3))
        memory, key_allow = self._encode(src, encoder), self._allow_words(src)
        x = self._embed(self.target_embedding, tgt)
        for block, steps, cross_steps in zip(self.decoder, decoder, cross, strict=True):
            x = block(x, memory, key_allow, steps=steps, cross_steps=cross_steps)
        logits = self._compute_logits(x)
        logits = logits if is_batch else logits[0]
        if not trace:
            return logits
        return logits, TransformerTrace(*(tuple(s.trace() for s in steps if s) for steps in (encoder, decoder, cross)))

    def _encode(self, src: np.ndarray, steps: Sequence[Steps | None] | None = None) -> Tensor:
        key_allow = self._allow_words(src)
        x = self._embed(self.source_embedding, src)
        for block, block_steps in zip(self.encoder, steps or [None] * self.n_layer, strict=True):
            x = block(x, key_allow, block_steps)
        return x if self.ln_source is None else self.ln_source(x)

    def _allow_words(self, ids: np.ndarray) -> np.ndarray | None:
        """Return False for padding and True for words, or None without padding, so that nothing is masked."""
        key_allow = ids != self.pad
        return None if key_allow.all() else key_allow

    def _embed(self, embedding: Embedding, ids: np.ndarray, first: int = 0) -> Tensor:
        """Return scaled word vectors plus the sinusoids of positions first, first + 1, ... (section 3.4 and 3.5)."""
        x = ops.scale(embedding(ids), by=self.d_model**0.5)
        table = self.table[first : first + ids.shape[-1]].astype(x.dtype)
        return self.drop(x + (table if self.on_arrays else Tensor(table, name="positions")))

    def _compute_logits(self, x: Tensor) -> Tensor:
        return ops.linear(x if self.ln_target is None else self.ln_target(x), self.head.mT)

    # ------------------------------------------------------------------------------------------------------ decoding

    def begin(self, src: np.ndarray) -> TransformerState:
        encoded = self._encode(src)
        memory = [block.cross.project_memory(encoded) for block in self.decoder]
        return TransformerState(memory, self._allow_words(src), KVCache(self.n_layer))

    def advance(self, state: TransformerState, tokens: np.ndarray) -> Tensor:
        x = self._embed(self.target_embedding, tokens[:, None], state.cache.length)
        for i, block in enumerate(self.decoder):
            x = block(x, state.memory[i], state.key_allow, state.cache[i])
        return self._compute_logits(x)[:, 0]
