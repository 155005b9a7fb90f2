"""Multi-head attention that you can see, check and train: a small autodiff framework on NumPy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tinygrad_mha import data, kernels, nn, ops, optim
from tinygrad_mha.decoding import generate, stream
from tinygrad_mha.modes import enable_grad, is_grad_enabled, no_grad, record
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.torch_names import TOP_LEVEL, find_hint
from tinygrad_mha.transforms import grad, hessian, hvp, jacobian, jvp, vjp

if TYPE_CHECKING:
    from tinygrad_mha import check, training, viz
    from tinygrad_mha.check import GradcheckError, GradcheckReport, gradcheck
    from tinygrad_mha.viz import graph, graph_diff, show, walkthrough

__version__ = "0.2.0"

__all__ = ["GradcheckError", "GradcheckReport", "Tensor", "__version__", "check", "data", "enable_grad", "grad"]
__all__ += ["gradcheck"]
__all__ += ["hessian", "hvp", "is_grad_enabled", "jacobian", "jvp", "kernels"]
__all__ += ["generate", "nn", "no_grad", "ops", "optim", "record", "stream", "training", "vjp"]
__all__ += ["graph", "graph_diff", "show", "viz", "walkthrough"]

PACKAGES = {
    "check": ("check", "GradcheckError", "GradcheckReport", "gradcheck"),
    "training": ("training",),
    "viz": ("viz", "graph", "graph_diff", "show", "walkthrough"),
}


def __getattr__(name: str) -> Any:
    """Import what checks, trains and draws when it is first used: that takes as long as all the rest."""
    for package, names in PACKAGES.items():
        if name in names:
            module = import_module(f"{__name__}.{package}")
            return module if name == package else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{find_hint(name, TOP_LEVEL, ops.REGISTRY)}")


def __dir__() -> list[str]:
    return sorted(__all__)
