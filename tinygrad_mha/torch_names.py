"""What PyTorch calls otherwise: the hints in the errors about names that this package lacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

__all__ = ["KEYWORDS", "METHODS", "MODULES", "MODULE_METHODS", "OPERATIONS", "TOP_LEVEL"]
__all__ += ["check_keywords", "find_hint", "raise_unknown", "translate_keywords", "unknown_keyword"]

P = ParamSpec("P")
R = TypeVar("R")

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

# Keywords of functions, methods and constructors. Each hint is true wherever the keyword is unknown.
KEYWORDS = {
    "dim": "it is called axis here, as in NumPy",
    "dims": "it is called axis here, as in NumPy",
    "keepdim": "it is called keepdims here, as in NumPy",
    "correction": "it is called ddof here, as in NumPy",
    "unbiased": "it is called ddof here, as in NumPy",
    "p": "norms are those of order 2, and dropout with a probability is nn.Dropout(p)",
    "norm_type": "norms are those of order 2",
    "device": "arrays are always in main memory",
    "dtype": "use astype(dtype)",
    "seed": "layers take rng=, a generator or a seed; models and calls take seed=",
    "inplace": "no operation changes a tensor in place",
    "training": "module.train() and module.eval() choose the mode",
    "approximate": "use tanh=True for the approximation",
    "in_features": "it is called n_in here",
    "out_features": "it is called n_out here",
    "num_embeddings": "it is called n here",
    "embedding_dim": "it is called width here",
    "padding_idx": "the loss leaves out ids by ignore_index=, attention leaves out tokens by key_allow=",
    "normalized_shape": "the last axis is normalized; nn.LayerNorm takes its length, width",
    "elementwise_affine": "the weight is always there; nn.LayerNorm(width, bias=False) has no bias",
    "embed_dim": "it is called d_model here",
    "num_heads": "it is called n_head here",
    "nhead": "it is called n_head here",
    "kdim": "it is called d_memory here, the width of what keys and values are made from",
    "vdim": "it is called d_memory here, the width of what keys and values are made from",
    "dim_feedforward": "it is called d_ff here",
    "num_encoder_layers": "it is called n_layer here, for encoder and decoder alike",
    "num_decoder_layers": "it is called n_layer here, for encoder and decoder alike",
    "batch_first": "arrays are always (batch, tokens, width)",
    "attn_mask": "use allow=, which is True for the keys that a query may see, or bias=, which is added to the scores",
    "key_padding_mask": "use key_allow=, which is True for the tokens that are not padding",
    "is_causal": "use causal=True of nn.MultiHeadAttention, or allow=np.tril(...)",
    "need_weights": "use trace=True, which also returns the weights and all other steps",
    "dropout_p": "use keep_mask=, or nn.MultiHeadAttention(dropout=p)",
    "input": "the first argument is given by position",
    "retain_graph": "the graph is kept as long as its result is",
    "create_graph": "use tg.grad(y, x, create_graph=True)",
    "gradient": "it is called grad here",
    "grad_outputs": "it is called grad_output here",
    "outputs": "the arguments are y and xs",
    "inputs": "the arguments are y and xs",
    "allow_unused": "an x that y does not depend on gets zeros",
    "set_to_none": "gradients become None",
    "raise_exception": "it is called raises here",
}


def unknown_keyword(function: str, unknown: Sequence[str]) -> TypeError:
    """The error for keywords that `function` does not have, with the hint for the first of them."""
    return TypeError(f"{function} has no argument {unknown[0]!r}{find_hint(unknown[0], KEYWORDS)}")


def translate_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """A function that raises the error of `unknown_keyword` for a keyword that it does not have."""
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if not known.issuperset(keywords):
            raise unknown_keyword(function.__name__, [name for name in keywords if name not in known])
        return function(*args, **keywords)

    return call


def check_keywords(name: str, function: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Raise the error of `unknown_keyword` if `function` lacks a keyword of `KEYWORDS`; fast if none is given."""
    if KEYWORDS.keys().isdisjoint(keywords):
        return
    parameters = inspect.signature(function).parameters
    unknown = [keyword for keyword in keywords if keyword in KEYWORDS and keyword not in parameters]
    if unknown and all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise unknown_keyword(name, unknown)


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
