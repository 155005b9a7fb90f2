"""The Transformer of the original paper: an encoder that reads, and a decoder that looks back at it while it writes.

Axes: B batch, S source words, T target words, C width (d_model), V_t target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np

from tinygrad_mha import modes, ops
from tinygrad_mha.arguments import check_choice, check_count
from tinygrad_mha.nn.cache import CachedLayer, KVCache
from tinygrad_mha.nn.layers import Dropout, Embedding, FeedForward, LayerNorm, normal
from tinygrad_mha.nn.module import Module
from tinygrad_mha.nn.multihead import AttentionTrace, MultiHeadAttention, join_heads, split_heads
from tinygrad_mha.nn.positions import sinusoidal
from tinygrad_mha.nn.translators import State, Translator
from tinygrad_mha.tensors import Tensor


class FusedAttention(MultiHeadAttention):
    """Attention in one node when nobody asks to see the steps."""

    fused = True


class CrossAttention(FusedAttention):
    """Attention whose keys and values come from another sequence, and can be computed once for many queries."""

    def remember(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of `memory` (B, S, C), (B, H, S, d) each."""
        k, v = ops.linear(memory, self.wk, self.bk), ops.linear(memory, self.wv, self.bv)
        return split_heads(k, self.n_kv_head), split_heads(v, self.n_kv_head)

    def recall(self, x: Tensor, k: Any, v: Any, allow: np.ndarray | None) -> Tensor:
        """Look with `x` (B, T, C) at what was remembered; `allow` (B, 1, 1, S)."""
        with modes.scope(self._scope()):
            q = split_heads(ops.linear(x, self.wq, self.bq), self.n_head)
            return self.output(join_heads(ops.attention(q, k, v, allow)))


class Residual(Module):
    """A block of parts that are each added to what they were given.

    norm="pre": x + part(ln(x)) (arXiv:2002.04745). norm="post": ln(x + part(x)), as in the original paper.
    """

    def __init__(self, norm: str, drop: Dropout) -> None:
        self.norm = norm
        self.drop = drop

    def add(self, x: Tensor, ln: LayerNorm, part: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.drop(part(ln(x))) if self.norm == "pre" else ln(x + self.drop(part(x)))


class EncoderBlock(Residual):
    """Every word looks at all words, then thinks for itself."""

    def __init__(self, width: Width, rng: np.random.Generator) -> None:
        super().__init__(width.norm, Dropout(width.dropout, rng.spawn(1)[0]))
        self.ln_1 = LayerNorm(width.d_model)
        self.attn = FusedAttention(width.d_model, width.n_head, bias=True, dropout=width.dropout, rng=rng)
        self.ln_2 = LayerNorm(width.d_model)
        self.mlp = FeedForward(width.d_model, width.d_ff, width.activation, rng=rng)

    def forward(self, x: Tensor, key_allow: np.ndarray | None, steps: list[AttentionTrace] | None) -> Tensor:
        x = self.add(x, self.ln_1, lambda x: traced(steps, self.attn, x, key_allow=key_allow))
        return self.add(x, self.ln_2, self.mlp)


class DecoderBlock(Residual):
    """Every word looks at those before it, then at the source, then thinks for itself."""

    def __init__(self, width: Width, rng: np.random.Generator) -> None:
        super().__init__(width.norm, Dropout(width.dropout, rng.spawn(1)[0]))
        self.ln_1 = LayerNorm(width.d_model)
        self.attn = FusedAttention(width.d_model, width.n_head, bias=True, dropout=width.dropout, rng=rng)
        self.ln_2 = LayerNorm(width.d_model)
        self.cross = CrossAttention(width.d_model, width.n_head, bias=True, dropout=width.dropout, rng=rng)
        self.ln_3 = LayerNorm(width.d_model)
        self.mlp = FeedForward(width.d_model, width.d_ff, width.activation, rng=rng)

    def forward(
        self,
        x: Tensor,
        look: Callable[[CrossAttention, Tensor], Tensor],
        cache: CachedLayer | None = None,
        steps: list[AttentionTrace] | None = None,
    ) -> Tensor:
        """`look(cross, x)` is the cross-attention: at a source that is being read now, or that was read before."""
        x = self.add(x, self.ln_1, lambda x: traced(steps, self.attn, x, causal=True, cache=cache))
        x = self.add(x, self.ln_2, lambda x: look(self.cross, x))
        return self.add(x, self.ln_3, self.mlp)


def traced(steps: list[AttentionTrace] | None, attention: MultiHeadAttention, x: Tensor, **options: Any) -> Tensor:
    """The attention's result; its trace goes into `steps` if there is such a list."""
    if steps is None:
        return attention(x, **options)
    y, trace = attention(x, trace=True, **options)
    steps.append(trace)
    return y


class Width(NamedTuple):
    """What all blocks of a Transformer have in common."""

    d_model: int
    n_head: int
    d_ff: int
    norm: str
    dropout: float
    activation: str


class TransformerTrace(NamedTuple):
    """What a Transformer's attentions computed, one `AttentionTrace` for each block."""

    encoder: tuple[AttentionTrace, ...]
    decoder: tuple[AttentionTrace, ...]
    cross: tuple[AttentionTrace, ...]  # weights (B, H, T, S): which source words each target word looked at


class Decoding(State):
    """The source as every block's cross-attention sees it, and the keys and values of the target so far."""

    def __init__(self, memory: list[tuple[np.ndarray, np.ndarray]], allow: np.ndarray | None, cache: KVCache) -> None:
        self.memory = memory
        self.allow = allow
        self.cache = cache

    def select(self, rows: np.ndarray) -> Self:
        self.memory = [(k[rows], v[rows]) for k, v in self.memory]
        self.allow = None if self.allow is None else self.allow[rows]
        self.cache = self.cache.select(rows)
        return self


class Transformer(Translator):
    """The encoder-decoder of arXiv:1706.03762: unmasked attention over the source, causal attention over the target,
    and cross-attention from one to the other.

    Args:
        source_vocab, target_vocab: how many words there are on each side.
        d_model: the width C.
        n_head, n_layer, d_ff: heads, blocks on each side, and the width inside the feed-forward parts.
        max_len: the length of the position table: the longest source, and the longest target.
        norm: "pre" (with one more norm behind the last block of each side) or "post" (the paper).
        dropout: of embeddings, attention weights and the outputs of all parts.
        pad, start, end: the ids of padding (both sides), and of the words that begin and end a target.
        shared: whether source, target and output have one table of word vectors (section 3.4 of the paper); both sides
            then have one vocabulary.
        activation: "relu" (the paper), "gelu" or "gelu_tanh".
        seed: of the initial weights and, in generators of their own, of dropout.

    Raises:
        ValueError: widths that do not fit, an unknown `norm`, a shared table for vocabularies of two sizes.

    Example:
        >>> model = Transformer(source_vocab=11, target_vocab=7, d_model=6, n_head=2, n_layer=1, d_ff=12, max_len=9)
        >>> model([[3, 4, 5]], [[1, 3, 4, 4]]).shape
        (1, 4, 7)
        >>> model.loss([[3, 4, 5]], [[1, 3, 4, 4, 2]]).shape
        ()
    """

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        d_model: int,
        n_head: int,
        n_layer: int,
        d_ff: int,
        max_len: int,
        norm: str = "pre",
        dropout: float = 0.0,
        pad: int = 0,
        seed: int | None = 0,
        start: int = 1,
        end: int = 2,
        shared: bool = False,
        activation: str = "relu",
    ) -> None:
        super().__init__(source_vocab, target_vocab, max_len, pad, start, end)
        if check_count(d_model, "d_model") % check_count(n_head, "n_head"):
            raise ValueError(f"d_model must be a multiple of n_head, got {d_model} and {n_head}")
        if shared and source_vocab != target_vocab:
            raise ValueError(
                f"shared=True wants one vocabulary for both sides, got {source_vocab} and {target_vocab} words"
            )
        rng = np.random.default_rng(seed)
        self.d_model, self.n_layer = d_model, check_count(n_layer, "n_layer")
        self.norm = check_choice(norm, ("pre", "post"), "norm")
        width = Width(d_model, n_head, check_count(d_ff, "d_ff"), norm, dropout, activation)
        std = d_model**-0.5  # and what is looked up is multiplied by the root: about 1, like the sinusoids
        self.source_embedding = Embedding(source_vocab, d_model, std, rng)
        self.target_embedding = self.source_embedding if shared else Embedding(target_vocab, d_model, std, rng)
        self.drop = Dropout(dropout, rng.spawn(1)[0])
        self.encoder = [EncoderBlock(width, rng) for _ in range(n_layer)]
        self.decoder = [DecoderBlock(width, rng) for _ in range(n_layer)]
        self.ln_source = LayerNorm(d_model) if norm == "pre" else None
        self.ln_target = LayerNorm(d_model) if norm == "pre" else None
        self.head = self.target_embedding.weight if shared else normal((target_vocab, d_model), std, rng)
        self.table = sinusoidal(np.arange(max_len), d_model)

    def encode(self, src: Any) -> Tensor:
        """Ids (S,) or (B, S) -> what the decoder looks at, (S, C) or (B, S, C)."""
        src = self.sources(src)
        memory = self.read(np.atleast_2d(src), None)
        return memory if src.ndim == 2 else memory[0]

    def forward(self, src: Any, tgt: Any, trace: bool = False) -> Any:
        """Ids (B, S) and (B, T) -> logits (B, T, V_t): what follows each target word. Without B: one pair.

        Args:
            src: source ids, padded behind.
            tgt: target ids, `start` first, padded behind.
            trace: also return a `TransformerTrace` (with the axis B).

        Raises:
            ValueError: an empty sentence, or one longer than `max_len`.
            TypeError, IndexError: ids that are no integers, or not in the vocabulary.
        """
        src, tgt, front = self.pair(src, tgt)
        steps: tuple[list[AttentionTrace] | None, ...] = ([], [], []) if trace else (None, None, None)
        memory, seen = self.read(src, steps[0]), self.real(src)
        x = self.embedded(self.target_embedding, tgt)
        for block in self.decoder:
            x = block(x, lambda cross, x: traced(steps[2], cross, x, memory=memory, key_allow=seen), steps=steps[1])
        logits = self.logits(x)
        logits = logits if front else logits[0]
        return (logits, TransformerTrace(*(tuple(step or ()) for step in steps))) if trace else logits

    def read(self, src: np.ndarray, steps: list[AttentionTrace] | None) -> Tensor:
        seen = self.real(src)
        x = self.embedded(self.source_embedding, src)
        for block in self.encoder:
            x = block(x, seen, steps)
        return x if self.ln_source is None else self.ln_source(x)

    def real(self, ids: np.ndarray) -> np.ndarray | None:
        """True for words and False for padding; None where there is no padding, which saves masking."""
        seen = ids != self.pad
        return None if seen.all() else seen

    def embedded(self, embedding: Embedding, ids: np.ndarray, first: int = 0) -> Tensor:
        x = ops.scale(embedding(ids), by=self.d_model**0.5)
        return self.drop(x + self.table[first : first + ids.shape[-1]].astype(x.dtype))

    def logits(self, x: Tensor) -> Tensor:
        return ops.linear(x if self.ln_target is None else self.ln_target(x), self.head.mT)

    # ------------------------------------------------------------------------------------------------------- decoding

    def begin(self, src: np.ndarray) -> State:
        memory, seen = self.read(src, None), self.real(src)
        kept = []
        for block in self.decoder:
            k, v = block.cross.remember(memory)
            kept.append((k.numpy(), v.numpy()))
        return Decoding(kept, None if seen is None else seen[:, None, None, :], KVCache(self.n_layer))

    def advance(self, state: State, tokens: np.ndarray) -> Tensor:
        assert isinstance(state, Decoding)
        x = self.embedded(self.target_embedding, tokens[:, None], state.cache.length)
        for i, block in enumerate(self.decoder):
            k, v = state.memory[i]
            x = block(x, lambda cross, x, k=k, v=v: cross.recall(x, k, v, state.allow), state.cache[i])
        return self.logits(x)[:, 0]
