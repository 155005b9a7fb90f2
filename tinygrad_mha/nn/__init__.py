"""Modules: layers, attention, GPT, translators."""

from tinygrad_mha.nn.cache import KVCache
from tinygrad_mha.nn.gpt import GPT, Block, CausalSelfAttention, GPTConfig, GPTTrace
from tinygrad_mha.nn.heads import AttentionTrace, join_heads, split_heads
from tinygrad_mha.nn.layers import Dropout, Embedding, FeedForward, LayerNorm, Linear, RMSNorm
from tinygrad_mha.nn.masks import allow_past, causal
from tinygrad_mha.nn.module import Module, Scope
from tinygrad_mha.nn.multihead import Memory, MultiHeadAttention, attention
from tinygrad_mha.nn.positions import Alibi, Learned, Position, Relative, Rotary, Sinusoidal, sinusoidal
from tinygrad_mha.nn.scores import Score, Sinks, SoftCap
from tinygrad_mha.nn.transformer import Transformer, TransformerTrace
from tinygrad_mha.nn.translators import Translator
from tinygrad_mha.torch_names import MODULES, raise_unknown

__all__ = ["GPT", "AttentionTrace", "Block", "CausalSelfAttention", "Dropout", "Embedding", "FeedForward"]
__all__ += ["GPTConfig", "GPTTrace", "KVCache", "LayerNorm", "Linear", "Module", "MultiHeadAttention", "RMSNorm"]
__all__ += ["Scope", "allow_past", "attention", "causal", "join_heads", "split_heads"]
__all__ += [
    "Alibi",
    "Learned",
    "Memory",
    "Position",
    "Relative",
    "Rotary",
    "Score",
    "Sinks",
    "Sinusoidal",
    "SoftCap",
    "sinusoidal",
]
__all__ += ["Transformer", "TransformerTrace", "Translator"]

__getattr__ = raise_unknown(__name__, MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
