"""All primitives, the registry, and `primitive` for making new ones.

`elementary` holds arithmetic, functions of one number, reductions, changes of shape, indexing and products; `network`
softmax, losses, normalization and GELU; `scaled_dot_product` attention.
"""

from tinygrad_mha.ops import elementary, network, scaled_dot_product
from tinygrad_mha.ops.elementary import *
from tinygrad_mha.ops.network import *
from tinygrad_mha.ops.scaled_dot_product import *
from tinygrad_mha.primitives import REGISTRY, Primitive, as_operand, primitive
from tinygrad_mha.torch_names import OPERATIONS, raise_unknown

__all__ = ["REGISTRY", "Primitive", "as_operand", "primitive"]
__all__ += elementary.__all__
__all__ += network.__all__
__all__ += scaled_dot_product.__all__

__getattr__ = raise_unknown(__name__, OPERATIONS)


def __dir__() -> list[str]:
    return sorted(__all__)
