"""Arrays that remember how they were made, so that multi-head attention can be seen, checked and trained."""

from tinygrad_mha import check, data, nn, ops, optim, training, viz
from tinygrad_mha.check import GradcheckError, GradcheckReport, gradcheck
from tinygrad_mha.decoding import generate, stream
from tinygrad_mha.modes import enable_grad, is_grad_enabled, no_grad, record
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.transforms import grad, hessian, hvp, jacobian, jvp, vjp
from tinygrad_mha.viz import graph, graph_diff, walkthrough

__version__ = "0.1.0"

__all__ = ["GradcheckError", "GradcheckReport", "Tensor", "__version__", "check", "data", "enable_grad", "grad"]
__all__ += ["gradcheck"]
__all__ += ["hessian", "hvp", "is_grad_enabled", "jacobian", "jvp"]
__all__ += ["generate", "nn", "no_grad", "ops", "optim", "record", "stream", "training", "vjp"]
__all__ += ["graph", "graph_diff", "viz", "walkthrough"]


def __dir__() -> list[str]:
    return sorted(__all__)
