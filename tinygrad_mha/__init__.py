"""Arrays that remember how they were made, so that multi-head attention can be seen, checked and trained."""

from tinygrad_mha import ops, optim
from tinygrad_mha.engine import enable_grad, is_grad_enabled, no_grad, record
from tinygrad_mha.tensor import Tensor
from tinygrad_mha.transforms import grad, hessian, hvp, jacobian, jvp, vjp

__version__ = "0.1.0"

__all__ = ["Tensor", "enable_grad", "grad", "hessian", "hvp", "is_grad_enabled", "jacobian", "jvp"]
__all__ += ["no_grad", "ops", "optim", "record", "vjp"]
