"""Text from a model: sampling, the generation loop, stop rules, beam search, and what it costs."""

from tinygrad_mha.decoding.beam import BeamSearchResult, Hypothesis, beam_search
from tinygrad_mha.decoding.cost import CountedModel, count_multiply_adds
from tinygrad_mha.decoding.generation import ContextFullWarning, generate, stream
from tinygrad_mha.decoding.language_model import LanguageModel
from tinygrad_mha.decoding.sampling import check_logits, compute_log_probabilities, compute_probabilities

__all__ = ["BeamSearchResult", "ContextFullWarning", "CountedModel", "Hypothesis", "LanguageModel", "beam_search"]
__all__ += ["check_logits", "compute_log_probabilities", "compute_probabilities", "count_multiply_adds", "generate"]
__all__ += ["stream"]


def __dir__() -> list[str]:
    return sorted(__all__)
