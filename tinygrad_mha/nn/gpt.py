"""GPT: a stack of causal attention and feed-forward blocks, with the parameter names of GPT-2.

Axes: B batch, T tokens, C width (n_embd), V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypedDict, Unpack, overload

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import as_ids, check_choice, check_count, check_number, check_probability
from tinygrad_mha.data import Tokenizer
from tinygrad_mha.files import CheckpointError
from tinygrad_mha.files import huggingface as hf
from tinygrad_mha.nn.cache import KVCache
from tinygrad_mha.nn.contract import AttentionFactory, call_attention, find_options, make_attention
from tinygrad_mha.nn.heads import AttentionTrace, Edit, Heads, Masks, Projection, Steps, check_rows
from tinygrad_mha.nn.init import normal
from tinygrad_mha.nn.layers import ACTIVATIONS, GATES, Dropout, Embedding, FeedForward, LayerNorm, Linear, RMSNorm
from tinygrad_mha.nn.module import Module, copy_on_arrays, has_array_forward
from tinygrad_mha.nn.positions import Learned, Position, as_position
from tinygrad_mha.nn.scores import Score, as_score
from tinygrad_mha.notation import write_shape
from tinygrad_mha.tables import make_table
from tinygrad_mha.tensors import Tensor, plain, wrap

__all__ = ["GPT", "Block", "CausalSelfAttention", "GPTConfig", "GPTTrace", "LMHead"]

STD = 0.02  # the standard deviation of initial weights, as in GPT-2


@dataclass
class GPTConfig:
    """The settings of a GPT.

    Args:
        vocab_size: the number of tokens V.
        block_size: the longest context, in tokens.
        n_layer, n_head, n_embd: the number of blocks, of heads per block, and the width C, a multiple of n_head.
        n_inner: the inner width of the feed-forward networks, 4 C unless given.
        dropout: the probability of dropping an element of embeddings, attention weights, outputs of attn and of mlp.
        bias: whether linear layers and layer norms have a bias.
        norm: "layer" (`LayerNorm`) or "rms" (`RMSNorm`, as in Llama).
        norm_first: True: a norm before each part, and ln_f at the end (GPT-2). False: a norm after each sum (GPT-1).
        activation: "gelu_tanh" (GPT-1 and GPT-2), "gelu" (exact), "relu" or "swiglu" (Llama); see `FeedForward`.
        position: "learned", "sinusoidal", "rotary", "alibi", "relative", "none", or an object of nn.positions.
        tie_weights: whether the head uses the weights of the token embedding.
        n_kv_head: the number of heads of keys and values; see `MultiHeadAttention`.
        eps: added to the variance in each norm.
        rope_base: the base of the angles of position="rotary" (theta in Llama).
        window: each token attends to itself and to the window - 1 tokens before it, as in Mistral; to all unless given.
        score: "softcap" (Gemma 2), "sinks" (gpt-oss) or an object of nn.scores; None for the usual softmax.

    Raises:
        TypeError: an unknown key.
        ValueError: an invalid value.

    Example:
        >>> sizes = dict(vocab_size=11, block_size=8, n_layer=2, n_head=4, n_embd=16)
        >>> llama = GPTConfig(**sizes, norm="rms", activation="swiglu", position="rotary", bias=False, n_kv_head=2)
        >>> GPTConfig.from_dict(llama.to_dict()) == llama
        True
    """

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    n_inner: int | None = None
    dropout: float = 0.0
    bias: bool = True
    norm: str = "layer"
    norm_first: bool = True
    activation: str = "gelu_tanh"
    position: str | Position = "learned"
    tie_weights: bool = True
    n_kv_head: int | None = None
    eps: float = 1e-5
    rope_base: float = 10000.0
    window: int | None = None
    score: str | Score | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            setattr(self, name, check_count(getattr(self, name), name))
        for name in ("n_inner", "n_kv_head", "window"):
            if getattr(self, name) is not None:
                setattr(self, name, check_count(getattr(self, name), name))
        self.dropout = check_probability(self.dropout, "dropout")
        for name in ("bias", "norm_first", "tie_weights"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
            setattr(self, name, bool(getattr(self, name)))
        for name in ("eps", "rope_base"):
            setattr(self, name, check_number(getattr(self, name), name, positive=True))
        if self.norm in ("pre", "post"):
            raise ValueError(f"norm is 'layer' or 'rms'; for norm={self.norm!r} pass norm_first={self.norm == 'pre'}")
        check_choice(self.norm, ("layer", "rms"), "norm")
        check_choice(self.activation, (*ACTIVATIONS, *GATES), "activation")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}")
        if self.n_head % (self.n_kv_head or 1):
            raise ValueError(f"n_head must be a multiple of n_kv_head, got {self.n_head} and {self.n_kv_head}")
        if isinstance(self.position, Mapping):
            self.position = as_position(self.position)
        score = as_score(self.score)
        self.score = score if isinstance(self.score, Mapping) else self.score
        self.make_position().check_head_width(self.n_embd // self.n_head)

    def check_size(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check, before a model is allocated, that it is not far larger than the saved parameters for it.

        Smaller differences are left to `load_state_dict`, which names all of them.

        Args:
            shapes: the shapes of the saved parameters by name.

        Raises:
            ValueError: it is far larger; the message gives both sizes.
        """
        width = self.n_embd
        keys = width // self.n_head * (self.n_kv_head or self.n_head)
        in_block = width * (2 * width + 2 * keys + 2 * (self.n_inner or 4 * width))
        rows = self.vocab_size + (self.block_size if isinstance(self.make_position(), Learned) else 0)
        size, saved_size = width * rows + self.n_layer * in_block, sum(map(math.prod, shapes.values()))
        n_blocks = len({name.split(".")[1] for name in shapes if name.startswith("h.")})
        if size > 2 * saved_size + 10_000_000 or self.n_layer > n_blocks + 100:
            raise ValueError(
                f"a model of this configuration has {self.n_layer:,} blocks and at least {size:,} parameters, but the "
                f"saved one has {n_blocks:,} and {saved_size:,}"
            )

    def make_position(self) -> Position:
        """The positional scheme as an object, without parameters."""
        return as_position(self.position, base=self.rope_base, bidirectional=False)

    def make_score(self) -> Score | None:
        """What changes the scores in one layer, with parameters if it has any; None for the usual softmax."""
        score = as_score(self.score)
        return None if score is None else score.initialize(self.n_head)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration of the dict that `to_dict` returned, also after a round trip through JSON.

        Raises:
            ValueError: unknown or missing keys (all are named), or an invalid value.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = [key for key in values if key not in fields]
        missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in values]
        if unknown or missing:
            raise ValueError(
                f"GPTConfig: unknown keys {unknown}, missing keys {missing}; known are {', '.join(fields)}"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The settings as values for JSON: an object becomes a dict."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.position, Position):
            values["position"] = self.position.to_dict()
        if isinstance(self.score, Score):
            values["score"] = self.score.to_dict()
        return values


class GPTTrace(NamedTuple):
    """Intermediate results of a GPT."""

    hidden: tuple[Tensor, ...]  # the embedding, then the output of each block, (B, T, C)
    attention: tuple[AttentionTrace, ...]  # of each block
    final: Tensor  # the input of the head: hidden[-1], after ln_f if there is one

    def __repr__(self) -> str:
        return f"GPTTrace(hidden {write_shape(self.final.shape)} at {len(self.hidden)} places, {self.attention})"

    def _repr_html_(self) -> str:
        layers = [[f"attention[{i}]", trace._repr_html_()] for i, trace in enumerate(self.attention)]
        shape = write_shape(self.final.shape)
        rows = [[f"hidden[{i}]", shape] for i in range(len(self.hidden))] + [["final", shape]]
        return make_table("the intermediate results of a GPT", rows + layers)


class GPTOptions(TypedDict, total=False):
    """Keywords of a call of `GPT`, for type checkers."""

    positions: Any
    key_allow: Any
    last_only: bool
    edit: Edit | None


class CausalSelfAttention(Module):
    """Multi-head attention as GPT-2 stores it: W_Q, W_K and W_V side by side in one matrix c_attn, W_O in c_proj.

    Args:
        position: the scheme that all blocks share; unless given that of `config`, if it acts in attention.
        dropout_rng: the generator of dropout, spawned from `rng` unless given.
    """

    is_attention = True
    takes_arrays = True

    def __init__(
        self,
        config: GPTConfig,
        rng: np.random.Generator,
        position: Position | None = None,
        dropout_rng: np.random.Generator | None = None,
    ) -> None:
        if position is None:
            scheme = config.make_position()
            sizes = config.n_head, config.n_embd, config.block_size
            position = scheme.initialize(*sizes, rng) if scheme.acts_on == "attention" else Position()
        n_head, n_kv_head, width = config.n_head, config.n_kv_head or config.n_head, config.n_embd
        self.n_head, self.n_kv_head, self.d_model = n_head, n_kv_head, width
        self.d_k = self.d_v = width // n_head
        self.window, self.score = config.window, config.make_score()
        dropout = Dropout(config.dropout, dropout_rng or rng.spawn(1)[0])
        self.heads = Heads(n_head, n_kv_head, position, dropout, fused=True, score=self.score)
        self.detail = self.heads.detail
        self.c_attn = Linear(width, width + 2 * n_kv_head * self.d_k, config.bias, STD, rng)
        self.c_proj = Linear(width, width, config.bias, residual_std(config), rng)
        for linear, subscript in ((self.c_attn, "QKV"), (self.c_proj, "O")):  # names for pictures
            linear.weight.name = f"W_{subscript}"
            if linear.bias is not None:
                linear.bias.name = f"b_{subscript}"

    def forward(self, x: Any, positions: Any = None, **options: Any) -> Tensor:
        """(T, C) or (B, T, C) -> the same shape; `options` are cache, key_allow and edit of `MultiHeadAttention`."""
        x = check_rows(x, self.d_model, positions, self.on_arrays)
        qkv = self.c_attn(x)
        return self.c_proj(
            self.heads.attend_packed(qkv, positions=positions, causal=True, window=self.window, **options)
        )

    def per_head(self, x: Any, positions: Any = None, key_allow: Any = None) -> Tensor:
        """The same result one head at a time, every matrix named; see `MultiHeadAttention.per_head`."""
        with self.scope():
            x = check_rows(x, self.d_model, positions, self.on_arrays)
            weight, bias, (start_k, start_v) = self.c_attn.weight, self.c_attn.bias, self._starts()
            projections = (
                Projection("Q", weight, bias, self.d_k),
                Projection("K", weight, bias, self.d_k, start_k),
                Projection("V", weight, bias, self.d_k, start_v),
            )
            masks = Masks(key_allow=key_allow, causal=True, window=self.window)
            concat = self.heads.attend_per_head(x, x, projections, positions, **masks)
            return self.c_proj(concat).named("Y")

    def _starts(self) -> tuple[int, int]:
        """The first columns of W_K and of W_V in c_attn."""
        return self.n_head * self.d_k, (self.n_head + self.n_kv_head) * self.d_k


class Block(Module):
    """Attention, then a feed-forward network, each added to its input.

    norm_first=True (GPT-2):  x + attn(ln_1(x)), then x + mlp(ln_2(x)).
    norm_first=False (GPT-1): ln_1(x + attn(x)), then ln_2(x + mlp(x)).
    """

    takes_arrays = True

    def __init__(
        self, config: GPTConfig, attention: AttentionFactory, rng: np.random.Generator, dropout_rng: np.random.Generator
    ) -> None:
        self.norm_first = config.norm_first
        inner = config.n_inner or 4 * config.n_embd
        self.ln_1 = make_norm(config)
        self.attn = attention(config, rng)
        self.ln_2 = make_norm(config)
        self.mlp = FeedForward(
            config.n_embd, inner, config.activation, config.bias, std=STD, std_out=residual_std(config), rng=rng
        )
        self.drop = Dropout(config.dropout, dropout_rng)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """(B, T, C) -> (B, T, C); `options` are those of `CausalSelfAttention`."""
        if self.norm_first:
            x = x + self.drop(self._attend(self.ln_1(x), **options))
            return x + self.drop(self.mlp(self.ln_2(x)))
        x = self.ln_1(x + self.drop(self._attend(x, **options)))
        return self.ln_2(x + self.drop(self.mlp(x)))

    def _attend(self, x: Tensor, **options: Any) -> Tensor:
        if type(self.attn).forward is CausalSelfAttention.forward:
            y = self.attn(x, **options)
        else:
            y = call_attention(self.attn, wrap(plain(x)) if self.on_arrays else x, **options)
        return plain(y) if self.on_arrays else y


class LMHead(Module):
    """Logits: x @ weight^T, with the weight (V, C) in the layout of an embedding, so that both can share it."""

    takes_arrays = True

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> logits (..., V)."""
        return ops.linear(x, self.weight.mT)


class GPT(Module):
    """A decoder-only Transformer: GPT-2, GPT-1 or Llama, depending on its configuration.

    Args:
        config: a `GPTConfig`.
        seed: seeds two random generators, one for the initial weights and one for dropout. None: different every time.
        attention: makes the attention of each block, called as `attention(config, rng)`: a class or a function that
            returns a module of your own, as docs/your_own_attention.md describes. It is tried on three tokens.

    Raises:
        TypeError, ValueError: an attention that is not as that page describes; the message says where.

    Attributes:
        special_ids: bos_token_id, eos_token_id and the like of config.json in a Hugging Face folder.
        generation_config: generation_config.json of such a folder, {} if there is none. Both are saved again.

    Example:
        >>> model = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=6), seed=0)
        >>> model([[1, 2, 3]]).shape
        (1, 3, 11)
        >>> model.loss([[1, 2, 3]], [[2, 3, 4]]).shape
        ()
    """

    takes_arrays = True

    def __init__(self, config: GPTConfig, seed: int | None = 0, attention: AttentionFactory | None = None) -> None:
        self.config = config
        rng, dropout_rng = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
        self.wte = Embedding(config.vocab_size, config.n_embd, STD, rng)
        position = config.make_position()
        if position.acts_on == "input" or attention is None:
            position = position.initialize(config.n_head, config.n_embd, config.block_size, rng)
        self.wpe = position if position.acts_on == "input" else None
        # One object for all blocks; an attention of the user's own makes its own.
        self.position = position if position.acts_on == "attention" and attention is None else Position()
        self.drop = Dropout(config.dropout, dropout_rng)
        make: AttentionFactory
        if attention is None:
            make = functools.partial(CausalSelfAttention, position=self.position, dropout_rng=dropout_rng)
        else:
            make = functools.partial(make_attention, attention)
        self.h = [Block(config, make, rng, dropout_rng) for _ in range(config.n_layer)]
        if config.norm_first:
            self.ln_f = make_norm(config)
        shape = config.vocab_size, config.n_embd
        self.lm_head = LMHead(self.wte.weight if config.tie_weights else normal(shape, STD, rng))
        self.special_ids: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}

    if TYPE_CHECKING:

        @overload  # type: ignore[override]  # the result depends on `trace`
        def __call__(
            self, idx: Any, cache: KVCache | None = None, *, trace: Literal[True], **options: Unpack[GPTOptions]
        ) -> tuple[Tensor, GPTTrace]: ...
        @overload
        def __call__(
            self,
            idx: Any,
            cache: KVCache | None = None,
            *,
            trace: Literal[False] = False,
            **options: Unpack[GPTOptions],
        ) -> Tensor: ...
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def forward(
        self,
        idx: Any,
        cache: KVCache | None = None,
        positions: Any = None,
        key_allow: Any = None,
        trace: bool = False,
        last_only: bool = False,
        edit: Edit | None = None,
    ) -> Tensor | tuple[Tensor, GPTTrace]:
        """Token ids (T,) or (B, T) -> logits (T, V) or (B, T, V) of the token that follows each.

        Args:
            idx: integers in 0 .. V - 1. With a cache, only those that it does not hold yet.
            cache: a `KVCache(config.n_layer)` to append to; only with gradients off.
            positions: the positions of the tokens, integers (T,) or (B, T), for batches with padding in front. Unless
                given they continue after the cache. Schemes that see only distances ("alibi") ignore them.
            key_allow: boolean (B, T_k) over all keys, those in the cache first: False for padding.
            trace: also return a `GPTTrace`.
            last_only: logits of the last token alone, (B, 1, V).
            edit: as in `MultiHeadAttention`; names begin with the block, "h.0.weights".

        Raises:
            ValueError: no tokens, or more than `block_size` together with the cache; a cache of another depth.
            TypeError, IndexError: ids that are not integers, or not in the vocabulary.
        """
        idx, start = self._check_idx(idx, cache)
        positions = np.arange(start, start + idx.shape[-1]) if positions is None else as_ids(positions, "positions")
        if positions.shape not in (idx.shape, idx.shape[-1:]):
            raise ValueError(f"positions must have the shape {idx.shape} or {idx.shape[-1:]}, got {positions.shape}")
        x = self.wte(idx)
        if self.wpe is not None:
            x = x + self.wpe(positions, x)
        x = self.drop(x)
        hidden, traces = [x], []
        for i, block in enumerate(self.h):
            edit_i = prefix_edit(edit, i)
            steps = Steps(edit_i) if trace else None  # a Steps is an edit that also keeps the tensors it sees
            layer = None if cache is None else cache[i]
            x = block(x, cache=layer, positions=positions, key_allow=key_allow, edit=edit_i if steps is None else steps)
            if steps is not None:
                hidden.append(x)
                traces.append(steps.trace())
        if last_only:
            x = x[..., -1:, :]
        if self.config.norm_first:
            x = self.ln_f(x)
        logits = self.lm_head(x)
        return (logits, GPTTrace(tuple(hidden), tuple(traces), x)) if trace else logits

    def _check_idx(self, idx: Any, cache: KVCache | None) -> tuple[np.ndarray, int]:
        """The ids as an array, and the number of tokens before them."""
        idx = as_ids(idx, "idx")
        if idx.ndim not in (1, 2) or idx.shape[-1] == 0:
            raise ValueError(f"idx must be (T,) or (B, T) with at least one token, got shape {idx.shape}")
        if cache is not None and not isinstance(cache, KVCache):
            hint = "model.loss(idx, targets) computes the loss"
            raise TypeError(f"cache must be a KVCache, as model.new_cache() makes, got {type(cache).__name__}; {hint}")
        if cache is not None and cache.n_layer != self.config.n_layer:
            raise ValueError(
                f"the cache is for {cache.n_layer} layers, the model has {self.config.n_layer}: use model.new_cache()"
            )
        start = 0 if cache is None else cache.length
        length, limit = start + idx.shape[-1], self.config.block_size
        if length > limit:
            held = f" ({start} of them in the cache)" if start else ""
            raise ValueError(
                f"{length} tokens{held} are more than the context holds: block_size is {limit}; pass the last {limit} "
                f"tokens and no cache"
            )
        return idx, start

    def copy_on_arrays(self) -> Self:
        """A twin whose calls take less time, for inference; see `nn.module.copy_on_arrays`. Or the model itself."""
        own = [block.attn for block in self.h if not all(has_array_forward(m) for _, m in block.attn.named_modules())]
        return copy_on_arrays(self, kept=own)

    def new_cache(self) -> KVCache | None:
        """An empty cache for `forward`; None if the attention of a block takes none, so that nothing is cached."""
        if all("cache" in find_options(type(block.attn).forward) for block in self.h):
            return KVCache(self.config.n_layer)
        return None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The end-of-text (EOS) ids: from `generation_config`, or from `special_ids` if that is empty."""
        return hf.find_end_ids(self.special_ids, self.generation_config)

    def loss(self, idx: Any, targets: Any, **options: Any) -> Tensor:
        """The cross entropy of the logits for `idx` and the `targets`, in nats; by default the mean over all tokens.

        `targets` has the shape of `idx` and is shifted already: targets[i] is the token that follows idx[i]. `options`
        are those of `ops.cross_entropy`.
        """
        return ops.cross_entropy(self(idx), as_ids(targets, "targets"), **options)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], dtype: Any = None) -> Self:
        """Open a Hugging Face folder of a GPT-1, GPT-2 or Llama (config.json and model.safetensors), in eval mode.

        Args:
            folder: the folder.
            dtype: np.float32 or np.float64, to compute in. Default: float64 if the file has float64, else float32.

        Raises:
            CheckpointError: a folder of another architecture, a damaged file, or weights that do not fit.
        """
        content = hf.read_folder(folder)
        if dtype is None:
            dtype = np.float64 if any(a.dtype == np.float64 for a in content.arrays.values()) else np.float32
        try:
            config = GPTConfig.from_dict(content.settings)
            config.check_size({name: array.shape for name, array in content.arrays.items()})
            model = cls(config).astype(dtype)
            model.load_state_dict(content.arrays)
        except ValueError as error:
            raise CheckpointError(f"{os.fspath(folder)}: {error}") from error
        model.special_ids, model.generation_config = content.special_ids, content.generation_config
        return model.eval()

    def save_pretrained(self, folder: str | os.PathLike[str], tokenizer: Tokenizer | None = None) -> None:
        """Write a folder that `from_pretrained` and Hugging Face transformers open.

        A GPT-2 or GPT-1 without biases is written with biases of zeros, since those formats have no way to omit them.
        The head is written as tied if `lm_head` and `wte` share one tensor, even if the configuration differs.

        Args:
            tokenizer: saved into the folder too.

        Raises:
            ValueError: settings, parameters or an attention that no Hugging Face format has, such as ALiBi (use `save`
                instead), or a tokenizer with more tokens than the model.
        """
        arrays = {name: tensor.numpy() for name, tensor in self._tensors().items()}
        defaults = {field.name: field.default for field in dataclasses.fields(GPTConfig)}
        content = hf.Folder(self.config.to_dict(), arrays, self.special_ids, self.generation_config)
        if tokenizer is not None and tokenizer.vocab_size > self.config.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {self.config.vocab_size}")
        other = next((block.attn for block in self.h if type(block.attn) is not CausalSelfAttention), None)
        if other is not None:
            raise ValueError(f"no Hugging Face folder can hold the attention {type(other).__name__}. Use save(path)")
        hf.write_folder(folder, content, defaults)
        if tokenizer is not None:
            tokenizer.save(folder)


def make_norm(config: GPTConfig) -> LayerNorm | RMSNorm:
    if config.norm == "rms":
        return RMSNorm(config.n_embd, config.eps)
    return LayerNorm(config.n_embd, config.eps, config.bias)


def residual_std(config: GPTConfig) -> float:
    """The initial standard deviation of the 2 n_layer projections whose outputs are summed in the residual stream."""
    return STD * (2 * config.n_layer) ** -0.5


def prefix_edit(edit: Edit | None, i: int) -> Edit | None:
    """Return a function that calls `edit` with "h.i." before the name of each step; None stays None."""
    return None if edit is None else lambda name, tensor: edit(f"h.{i}.{name}", tensor)
