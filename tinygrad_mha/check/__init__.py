"""Proofs to run: gradients against finite differences."""

from tinygrad_mha.check import samples as samples
from tinygrad_mha.check.caching import CacheVerdict, kv_cache
from tinygrad_mha.check.diagnosis import doctor
from tinygrad_mha.check.gradient_check import gradcheck
from tinygrad_mha.check.report import GradcheckError, GradcheckReport
from tinygrad_mha.check.verdict import CheckError, Finding, Verdict

__all__ = [
    "CacheVerdict",
    "CheckError",
    "Finding",
    "GradcheckError",
    "GradcheckReport",
    "Verdict",
    "doctor",
    "gradcheck",
    "kv_cache",
]


def __dir__() -> list[str]:
    return sorted(__all__)
