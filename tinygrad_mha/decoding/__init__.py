"""Text from a model: sampling, the generation loop, stop rules, beam search, and what it costs."""

from tinygrad_mha.decoding.beam import Beams, Hypothesis, beam_search
from tinygrad_mha.decoding.cost import CountedModel, count_multiply_adds
from tinygrad_mha.decoding.generation import ContextFullWarning, generate, stream
from tinygrad_mha.decoding.language_model import LanguageModel

__all__ = ["Beams", "ContextFullWarning", "CountedModel", "Hypothesis", "LanguageModel", "beam_search"]
__all__ += ["count_multiply_adds", "generate", "stream"]
