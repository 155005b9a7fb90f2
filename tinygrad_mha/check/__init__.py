"""Proofs to run: gradients against finite differences, and what an attention, a cache and a training step promise."""

from tinygrad_mha.check import samples as samples
from tinygrad_mha.check.caching import CacheVerdict, kv_cache
from tinygrad_mha.check.conformance import attention
from tinygrad_mha.check.dependence import Dependencies, dependencies
from tinygrad_mha.check.diagnosis import doctor
from tinygrad_mha.check.gradient_check import gradcheck
from tinygrad_mha.check.report import GradcheckError, GradcheckReport
from tinygrad_mha.check.stages import DerivationVerdict, derivation
from tinygrad_mha.check.verdict import CheckError, Finding, Verdict

__all__ = ["CacheVerdict", "CheckError", "Dependencies", "DerivationVerdict", "Finding", "GradcheckError"]
__all__ += ["GradcheckReport", "Verdict", "attention", "dependencies", "derivation", "doctor", "gradcheck", "kv_cache"]


def __dir__() -> list[str]:
    return sorted(__all__)
