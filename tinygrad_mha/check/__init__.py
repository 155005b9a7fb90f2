"""Proofs to run: gradients against finite differences."""

from tinygrad_mha.check import samples as samples
from tinygrad_mha.check.gradient import GradcheckError, GradcheckReport, gradcheck

__all__ = ["GradcheckError", "GradcheckReport", "gradcheck"]
