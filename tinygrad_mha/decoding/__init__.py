"""Text from a model: sampling, the generate loop, stop rules, beam search."""

from tinygrad_mha.decoding.generation import generate, stream

__all__ = ["generate", "stream"]
