"""GPT: a stack of causal attention and feed-forward blocks, with the parameter names of GPT-2.

Axes: B batch, T tokens, C width (n_embd), V vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import as_ids, check_choice, check_count, check_probability
from tinygrad_mha.files import huggingface as hf
from tinygrad_mha.files.safetensors import CheckpointError
from tinygrad_mha.nn.cache import KVCache
from tinygrad_mha.nn.layers import (
    ACTIVATIONS,
    Dropout,
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    normal,
)
from tinygrad_mha.nn.module import Module
from tinygrad_mha.nn.multihead import AttentionTrace, Edit, MultiHeadAttention
from tinygrad_mha.nn.positions import sinusoidal
from tinygrad_mha.tensors import Tensor

POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "none")
STD = 0.02  # of the initial weights, as GPT-2


@dataclass
class GPTConfig:
    """The shape of a GPT.

    Args:
        vocab_size: the number of tokens V.
        block_size: the longest context.
        n_layer, n_head, n_embd: blocks, heads per block, and the width C, a multiple of n_head.
        n_inner: the width inside the feed-forward part, 4 C unless given.
        dropout: of embeddings, attention weights and the outputs of both parts of a block.
        bias: whether linear layers and layer norms have one.
        norm: "pre" (GPT-2: a norm in front of each part, ln_f at the end) or "post" (GPT-1: behind each sum, no ln_f).
        activation: "gelu_tanh" (GPT-1 and GPT-2), "gelu" (exact) or "relu".
        position: "learned", "sinusoidal", "rotary", "alibi" or "none".
        tie_weights: whether the head is the token embedding: one tensor, used twice.
        n_kv_head: how many heads have keys and values of their own; see `MultiHeadAttention`.
        eps: of the layer norms.

    Raises:
        TypeError: an unknown key.
        ValueError: a value that cannot be.
    """

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    n_inner: int | None = None
    dropout: float = 0.0
    bias: bool = True
    norm: str = "pre"
    activation: str = "gelu_tanh"
    position: str = "learned"
    tie_weights: bool = True
    n_kv_head: int | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            setattr(self, name, check_count(getattr(self, name), name))
        for name in ("n_inner", "n_kv_head"):
            if getattr(self, name) is not None:
                setattr(self, name, check_count(getattr(self, name), name))
        self.dropout = check_probability(self.dropout, "dropout")
        for name in ("bias", "tie_weights"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        check_choice(self.norm, ("pre", "post"), "norm")
        check_choice(self.activation, ACTIVATIONS, "activation")
        check_choice(self.position, POSITIONS, "position")
        if not isinstance(self.eps, (int, float, np.floating)) or not self.eps > 0:
            raise ValueError(f"eps must be a positive number, got {self.eps!r}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}")
        if self.n_head % (self.n_kv_head or 1):
            raise ValueError(f"n_head must be a multiple of n_kv_head, got {self.n_head} and {self.n_kv_head}")
        if self.position == "rotary" and self.n_embd // self.n_head % 2:
            raise ValueError(f"rotary positions want heads of even width, got {self.n_embd} / {self.n_head}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """A configuration from a dict (as JSON gives it); every unknown or missing key is named."""
        known = cls.__dataclass_fields__
        unknown = [key for key in values if key not in known]
        missing = [key for key in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd") if key not in values]
        if unknown or missing:
            raise ValueError(f"GPTConfig: unknown keys {unknown}, missing keys {missing}; known are {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class GPTTrace(NamedTuple):
    """What a GPT computed on its way."""

    hidden: tuple[Tensor, ...]  # the embedding, then the output of each block, (B, T, C)
    attention: tuple[AttentionTrace, ...]  # of each block
    final: Tensor  # what the head sees: hidden[-1] after ln_f, where there is one


class CausalSelfAttention(MultiHeadAttention):
    """Multi-head attention as GPT-2 stores it: W_Q, W_K and W_V side by side in one matrix c_attn, W_O in c_proj."""

    fused = True
    always_causal = True

    def __init__(self, config: GPTConfig, rng: np.random.Generator, dropout_rng: np.random.Generator) -> None:
        self.residual_std = residual_std(config)
        position = config.position if config.position in ("rotary", "alibi") else None
        super().__init__(
            config.n_embd,
            config.n_head,
            n_kv_head=config.n_kv_head,
            bias=config.bias,
            dropout=config.dropout,
            position=position,
            rng=rng,
        )
        self.rng = dropout_rng

    def make_parameters(self, bias: bool, rng: np.random.Generator) -> None:
        width = self.n_head * self.d_k
        self.c_attn = Linear(self.d_model, width + 2 * self.n_kv_head * self.d_k, bias, STD, rng)
        self.c_proj = Linear(width, self.d_model, bias, self.residual_std, rng)
        self.c_attn.weight.name, self.c_proj.weight.name = "W_QKV", "W_O"

    def edges(self) -> tuple[int, int]:
        """Where the columns of K and those of V begin."""
        keys = self.n_head * self.d_k
        return keys, keys + self.n_kv_head * self.d_k

    def project(self, x: Any, memory: Any) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.c_attn(x)
        keys, values = self.edges()
        return qkv[..., :keys], qkv[..., keys:values], qkv[..., values:]

    def output(self, concat: Tensor) -> Tensor:
        return self.c_proj(concat)

    def matrix(self, which: str, head: int) -> tuple[Tensor, Tensor | None]:
        first = dict(zip("QKV", (0, *self.edges()), strict=True))[which]
        return self.columns(which, head, self.c_attn.weight, self.c_attn.bias, first)


class Block(Module):
    """Attention, then a feed-forward network, each added to what it was given.

    norm="pre" (GPT-2):  x + attn(ln_1(x)), then x + mlp(ln_2(x)).
    norm="post" (GPT-1): ln_1(x + attn(x)), then ln_2(x + mlp(x)).
    """

    def __init__(self, config: GPTConfig, rng: np.random.Generator, dropout_rng: np.random.Generator) -> None:
        self.norm = config.norm
        inner = config.n_inner or 4 * config.n_embd
        self.ln_1 = LayerNorm(config.n_embd, config.eps, config.bias)
        self.attn = CausalSelfAttention(config, rng, dropout_rng)
        self.ln_2 = LayerNorm(config.n_embd, config.eps, config.bias)
        self.mlp = FeedForward(
            config.n_embd, inner, config.activation, config.bias, std=STD, std_out=residual_std(config), rng=rng
        )
        self.drop = Dropout(config.dropout, dropout_rng)

    def forward(self, x: Tensor, trace: bool = False, **options: Any) -> Any:
        """(B, T, C) -> (B, T, C), or that and an `AttentionTrace`; `options` go to the attention."""
        pre = self.norm == "pre"
        mixed = self.attn(self.ln_1(x) if pre else x, trace=trace, **options)
        mixed, steps = mixed if trace else (mixed, None)
        x = x + self.drop(mixed)
        x = x if pre else self.ln_1(x)
        x = x + self.drop(self.mlp(self.ln_2(x) if pre else x))
        x = x if pre else self.ln_2(x)
        return (x, steps) if trace else x


class Head(Module):
    """Logits: how much each token's row of `weight` (V, C), the layout of an embedding, has in common with x."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight.mT)


class GPT(Module):
    """A decoder-only Transformer, GPT-2 and GPT-1 among its settings.

    Args:
        config: a `GPTConfig`.
        seed: of the initial weights and, in a generator of its own, of dropout. None draws any.

    Example:
        >>> model = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=6), seed=0)
        >>> model([[1, 2, 3]]).shape
        (1, 3, 11)
        >>> model.loss([[1, 2, 3]], [[2, 3, 4]]).shape
        ()
    """

    def __init__(self, config: GPTConfig, seed: int | None = 0) -> None:
        self.config = config
        rng, dropout_rng = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
        self.wte = Embedding(config.vocab_size, config.n_embd, STD, rng)
        if config.position == "learned":
            self.wpe = Embedding(config.block_size, config.n_embd, STD, rng)
        self.drop = Dropout(config.dropout, dropout_rng)
        self.h = [Block(config, rng, dropout_rng) for _ in range(config.n_layer)]
        if config.norm == "pre":
            self.ln_f = LayerNorm(config.n_embd, config.eps, config.bias)
        self.lm_head = Head(
            self.wte.weight if config.tie_weights else normal((config.vocab_size, config.n_embd), STD, rng)
        )

    def forward(
        self,
        idx: Any,
        cache: KVCache | None = None,
        positions: Any = None,
        key_allow: Any = None,
        trace: bool = False,
        last_only: bool = False,
        edit: Edit | None = None,
    ) -> Any:
        """Token ids (T,) or (B, T) -> logits (T, V) or (B, T, V): what comes after each token.

        Args:
            idx: integers in 0 .. V - 1. With a cache, only those that it does not hold yet.
            cache: a `KVCache(config.n_layer)` to append to; only with gradients off.
            positions: where the tokens stand, integers (T,) or (B, T), for batches with padding in front. Unless given
                they continue after the cache. "alibi" and "none" have no use for them.
            key_allow: boolean (B, T_k) over all keys, those in the cache first: False for padding.
            trace: also return a `GPTTrace`.
            last_only: logits of the last token alone, (B, 1, V).
            edit: as in `MultiHeadAttention`; the names begin with the block, "h.0.weights".

        Raises:
            ValueError: no tokens, or more than `block_size` together with the cache; a cache of another depth.
            TypeError, IndexError: ids that are no integers, or not in the vocabulary.
        """
        idx, start = self.checked(idx, cache)
        places = np.arange(start, start + idx.shape[-1]) if positions is None else as_ids(positions, "positions")
        if places.shape not in (idx.shape, idx.shape[-1:]):
            raise ValueError(f"positions must have the shape {idx.shape} or {idx.shape[-1:]}, got {places.shape}")
        x = self.drop(self.embedded(idx, places))
        hidden, steps = [x], []
        options: dict[str, Any] = {"key_allow": key_allow, "trace": trace}
        if self.config.position == "rotary":
            options["positions"] = places
        for i, block in enumerate(self.h):
            layer = None if cache is None else cache[i]
            x = block(x, cache=layer, edit=in_block(edit, i), **options)
            if trace:
                x, step = x
                hidden.append(x)
                steps.append(step)
        if last_only:
            x = x[..., -1:, :]
        if self.config.norm == "pre":
            x = self.ln_f(x)
        logits = self.lm_head(x)
        return (logits, GPTTrace(tuple(hidden), tuple(steps), x)) if trace else logits

    def checked(self, idx: Any, cache: KVCache | None) -> tuple[np.ndarray, int]:
        """The ids as an array, and how many tokens came before them."""
        idx = as_ids(idx, "idx")
        if idx.ndim not in (1, 2) or idx.shape[-1] == 0:
            raise ValueError(f"idx must be (T,) or (B, T) with at least one token, got shape {idx.shape}")
        if cache is not None and cache.n_layer != self.config.n_layer:
            raise ValueError(f"the cache is for {cache.n_layer} layers, the model has {self.config.n_layer}")
        start = 0 if cache is None else cache.length
        length, limit = start + idx.shape[-1], self.config.block_size
        if length > limit:
            held = f" ({start} of them in the cache)" if start else ""
            raise ValueError(f"{length} tokens{held} are more than the context holds: block_size is {limit}")
        return idx, start

    def embedded(self, idx: np.ndarray, places: np.ndarray) -> Tensor:
        """What enters the first block: the tokens' vectors and, where positions are added, those of their places."""
        x = self.wte(idx)
        if self.config.position == "learned":
            return x + self.wpe(places)
        if self.config.position == "sinusoidal":
            return x + sinusoidal(places, self.config.n_embd).astype(x.dtype)
        return x

    def loss(self, idx: Any, targets: Any, **options: Any) -> Tensor:
        """The cross entropy of `targets`, of the shape of `idx`, in nats; `options` are those of `ops.cross_entropy`.

        Nothing is shifted here: targets[i] is what should follow idx[i], and whoever makes the pair shifts.
        """
        return ops.cross_entropy(self(idx), as_ids(targets, "targets"), **options)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], dtype: Any = None) -> Self:
        """Open a Hugging Face folder of a GPT-1 or GPT-2 (config.json and model.safetensors), in eval mode.

        Args:
            dtype: np.float32 or np.float64 to compute in; unless given float32, or float64 if the file has that.

        Raises:
            CheckpointError: a folder that holds something else, is damaged, or whose weights do not fit; it names all.
        """
        values, arrays = hf.read_folder(folder)
        if dtype is None:
            dtype = np.float64 if any(array.dtype == np.float64 for array in arrays.values()) else np.float32
        try:
            model = cls(GPTConfig.from_dict(values)).astype(dtype)
            model.load_state_dict(arrays)
        except ValueError as error:
            raise CheckpointError(f"{os.fspath(folder)}: {error}") from error
        return model.eval()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder that `from_pretrained` and Hugging Face transformers open.

        Layers without a bias are written with a bias of zeros, since those formats have no way to say otherwise.

        Raises:
            ValueError: a configuration that is neither a GPT-1 nor a GPT-2 (rotary positions, say): use `save`.
        """
        arrays = {name: tensor.numpy() for name, tensor in self._tensors().items()}
        hf.write_folder(folder, self.config.to_dict(), arrays)


def residual_std(config: GPTConfig) -> float:
    """What is added to the residual stream 2 n_layer times starts smaller, so that the stream does not grow."""
    return STD * (2 * config.n_layer) ** -0.5


def in_block(edit: Edit | None, i: int) -> Edit | None:
    """`edit`, told in which block it is."""
    return None if edit is None else lambda name, tensor: edit(f"h.{i}.{name}", tensor)
