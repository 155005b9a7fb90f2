"""Modules: layers, attention, GPT."""

from tinygrad_mha.nn.layers import Dropout, Embedding, FeedForward, LayerNorm, Linear, RMSNorm
from tinygrad_mha.nn.module import Module, Scope

__all__ = ["Dropout", "Embedding", "FeedForward", "LayerNorm", "Linear", "Module", "RMSNorm", "Scope"]
