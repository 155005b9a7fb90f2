"""What PyTorch calls otherwise: the hints in the errors about names that this package lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NoReturn

__all__ = ["METHODS", "MODULES", "MODULE_METHODS", "OPERATIONS", "TOP_LEVEL", "find_hint", "raise_unknown"]

# Methods and attributes of a Tensor.
METHODS = {
    "view": "use reshape(shape)",
    "view_as": "use reshape(other.shape)",
    "reshape_as": "use reshape(other.shape)",
    "permute": "use transpose(axes)",
    "t": "use .T",
    "unsqueeze": "use x[:, None] or np.expand_dims(x, axis)",
    "squeeze": "use np.squeeze(x, axis), or x[:, 0]",
    "flatten": "use reshape(-1)",
    "unflatten": "use reshape(shape)",
    "expand": "use broadcast_to(shape)",
    "expand_as": "use broadcast_to(other.shape)",
    "repeat": "use np.repeat(x, n, axis), or ops.concat([x] * n, axis=0)",
    "repeat_interleave": "use np.repeat(x, n, axis)",
    "masked_fill": "use ops.where(mask, value, x)",
    "masked_fill_": "use ops.where(mask, value, x)",
    "gather": "use x[index arrays]",
    "scatter": "use ops.scatter_add(values, index=index, shape=shape)",
    "index_select": "use x[ids], or ops.take(x, ids)",
    "retain_grad": "the gradients of intermediates are kept without it, as .grad",
    "requires_grad_": "set x.requires_grad = True",
    "numel": "use .size",
    "nelement": "use .size",
    "dim": "use .ndim",
    "clone": "use copy.copy(x) for a leaf; no operation changes a tensor in place",
    "contiguous": "nothing is needed in its place",
    "cpu": "arrays are always in main memory; nothing is needed in its place",
    "cuda": "arrays are always in main memory",
    "device": "arrays are always in main memory",
    "to": "use astype(dtype)",
    "type": "use astype(dtype)",
    "type_as": "use astype(other.dtype)",
    "float": "use astype(np.float32)",
    "double": "use astype(np.float64)",
    "half": "use astype(np.float16)",
    "long": "use astype(np.int64)",
    "int": "use astype(np.int32)",
    "bool": "use x != 0",
    "tolist": "use .numpy().tolist()",
    "pow": "use x**n",
    "matmul": "use a @ b",
    "mm": "use a @ b",
    "bmm": "use a @ b",
    "mv": "use a @ b",
    "clamp": "use clip(min, max)",
    "amax": "use max(axis)",
    "amin": "use min(axis)",
    "square": "use x * x",
    "copy_": "use assign_(array)",
    "fill_": "use assign_(array)",
    "zero_": "use assign_(array), or zero_grad() for the gradient",
    "detach_": "use detach()",
    "is_leaf": "use x.node is None",
    "grad_fn": "use x.node",
    "chunk": "use ops.split(x, parts, axis)",
    "topk": "use np.argsort(x) and x[index]",
    "eq": "use x == y",
    "register_hook": "read x.grad after backward: the gradients of intermediates are kept",
}

# torch.NAME
TOP_LEVEL = {
    "tensor": "use tg.Tensor(data)",
    "as_tensor": "use tg.Tensor(data)",
    "from_numpy": "use tg.Tensor(array)",
    "FloatTensor": "use tg.Tensor(data, dtype=np.float32)",
    "Parameter": "use tg.Tensor(array, requires_grad=True)",
    "zeros": "use tg.Tensor(np.zeros(shape))",
    "ones": "use tg.Tensor(np.ones(shape))",
    "full": "use tg.Tensor(np.full(shape, value))",
    "empty": "use tg.Tensor(np.empty(shape))",
    "eye": "use tg.Tensor(np.eye(n))",
    "arange": "use np.arange(n)",
    "linspace": "use np.linspace(start, stop, n)",
    "rand": "use tg.Tensor(np.random.default_rng(seed).random(shape))",
    "randn": "use tg.Tensor(np.random.default_rng(seed).standard_normal(shape))",
    "randint": "use np.random.default_rng(seed).integers(low, high, shape)",
    "manual_seed": "pass seed= or rng= to what draws: there is no global generator",
    "cat": "use tg.ops.concat",
    "inference_mode": "use tg.no_grad()",
    "set_grad_enabled": "use tg.no_grad() or tg.enable_grad()",
    "autograd": "use tg.grad, tg.jacobian, tg.hessian",
    "save": "use module.save(path)",
    "load": "use module.load(path)",
    "compile": "nothing is needed in its place; see tg.kernels",
    "device": "arrays are always in main memory",
    "float32": "use np.float32",
    "float64": "use np.float64",
    "long": "use np.int64",
    "bool": "use np.bool_",
    "utils": "use tg.data for batches",
    "functional": "use tg.ops",
}

# torch.NAME and torch.nn.functional.NAME
OPERATIONS = {
    "cat": "use ops.concat",
    "concatenate": "use ops.concat",
    "hstack": "use np.hstack",
    "vstack": "use np.vstack",
    "permute": "use ops.transpose",
    "unsqueeze": "use x[:, None] or np.expand_dims(x, axis)",
    "squeeze": "use np.squeeze(x, axis)",
    "flatten": "use ops.reshape(x, shape=(-1,))",
    "masked_fill": "use ops.where(mask, value, x)",
    "gather": "use x[index arrays]",
    "embedding": "use ops.take(weight, ids)",
    "bmm": "use ops.matmul",
    "mm": "use ops.matmul",
    "dot": "use ops.matmul",
    "clamp": "use ops.clip",
    "pad": "use np.pad",
    "tril": "use np.tril",
    "triu": "use np.triu",
    "chunk": "use ops.split(x, parts, axis)",
    "scaled_dot_product_attention": "use ops.attention, or ops.attend for its steps",
    "silu": "use x * ops.sigmoid(x)",
    "nll_loss": "use ops.cross_entropy, which takes logits",
    "mse_loss": "use ((x - y) ** 2).mean()",
    "subtract": "use ops.sub",
    "multiply": "use ops.mul",
    "divide": "use ops.div",
    "negative": "use ops.neg",
    "power": "use ops.pow",
    "one_hot": "use np.eye(n)[ids]",
}

# torch.nn.NAME
MODULES = {
    "Parameter": "use tg.Tensor(array, requires_grad=True): as an attribute of a module it is a parameter",
    "ModuleList": "use a list: modules in lists and dicts are found",
    "ModuleDict": "use a dict: modules in lists and dicts are found",
    "ParameterList": "use a list: tensors in lists and dicts are found",
    "Sequential": "use a list of modules and a loop in forward",
    "MultiheadAttention": "use nn.MultiHeadAttention",
    "functional": "use tg.ops",
    "ReLU": "use ops.relu",
    "GELU": "use ops.gelu",
    "SiLU": "use x * ops.sigmoid(x)",
    "Tanh": "use ops.tanh",
    "Sigmoid": "use ops.sigmoid",
    "Softmax": "use ops.softmax(x, axis=axis)",
    "LogSoftmax": "use ops.log_softmax(x, axis=axis)",
    "CrossEntropyLoss": "use ops.cross_entropy(logits, targets)",
    "MSELoss": "use ((x - y) ** 2).mean()",
    "Identity": "leave it out, or write a module that returns x",
    "TransformerEncoderLayer": "use nn.Block of a GPT, or nn.Transformer",
    "TransformerDecoderLayer": "use nn.Block of a GPT, or nn.Transformer",
    "utils": "use tg.optim.clip_grad_norm to clip gradients",
    "RNN": "examples/translation has recurrent networks",
    "GRU": "examples/translation has recurrent networks",
    "LSTM": "examples/translation has recurrent networks",
    "Conv2d": "there are no convolutions",
    "Conv1d": "there are no convolutions",
    "BatchNorm1d": "there is no batch norm: use nn.LayerNorm or nn.RMSNorm",
}


# Methods of a module.
MODULE_METHODS = {
    "generate": "use tg.generate(model, ids, max_new_tokens=n)",
    "to": "use astype(dtype); arrays are always in main memory",
    "cpu": "arrays are always in main memory; nothing is needed in its place",
    "cuda": "arrays are always in main memory",
    "float": "use astype(np.float32)",
    "double": "use astype(np.float64)",
    "half": "use astype(np.float16)",
    "modules": "use named_modules(), pairs of a name and a module",
    "children": "use named_modules(), pairs of a name and a module",
    "named_children": "use named_modules(), pairs of a name and a module",
    "buffers": "a Tensor without requires_grad is part of the state, see state_dict()",
    "named_buffers": "a Tensor without requires_grad is part of the state, see state_dict()",
    "register_buffer": "assign a Tensor without requires_grad to an attribute",
    "register_parameter": "assign a Tensor with requires_grad=True to an attribute",
    "register_module": "assign the module to an attribute",
    "add_module": "assign the module to an attribute",
    "requires_grad_": "set requires_grad of each of parameters()",
    "apply": "loop over named_modules()",
    "num_parameters": "use count()",
    "get_num_params": "use count()",
    "configure_optimizers": "use tg.optim.AdamW(model.parameters(), lr=rate)",
    "register_forward_hook": "give the module a forward that does it, or see tg.record()",
    "compile": "nothing is needed in its place",
}


def find_hint(name: str, hints: dict[str, str], operations: Collection[str] = ()) -> str:
    """What to use in place of a name of PyTorch, as the end of a message; "" if nothing is known.

    Args:
        operations: names of primitives, which are functions and not methods.
    """
    if name in hints:
        return f": {hints[name]}"
    if name in operations:
        return f": use ops.{name}(x)"
    if name.endswith("_") and not name.startswith("_") and (name[:-1] in operations or name[:-1] in hints):
        return ": no operation changes a tensor in place; assign_(array) replaces the values of a leaf"
    return ""


def raise_unknown(module: str, hints: dict[str, str]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module: it raises AttributeError with the hint for a name that the module lacks.

    Example:
        >>> raise_unknown("tinygrad_mha.ops", {"cat": "use ops.concat"})("cat")
        Traceback (most recent call last):
        AttributeError: module 'tinygrad_mha.ops' has no attribute 'cat': use ops.concat
    """

    def __getattr__(name: str) -> NoReturn:  # noqa: N807
        raise AttributeError(f"module {module!r} has no attribute {name!r}{find_hint(name, hints)}")

    return __getattr__
