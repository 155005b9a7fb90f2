"""NumPy functions that accept Tensors: each calls the method or the primitive of the same meaning.

`Tensor.__array_ufunc__` and `Tensor.__array_function__` call `apply_ufunc` and `apply_function`. Other NumPy functions
raise TypeError: none may turn a Tensor into an array silently and lose its gradient. The type annotations of NumPy do
not cover this: typed code uses operators, methods of Tensor, and `ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tinygrad_mha import ops

__all__ = ["COMPARISONS", "FUNCTIONS", "UFUNCS", "apply_function", "apply_ufunc"]


def apply_ufunc(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the counterpart of a ufunc. Comparisons have no derivative and return plain arrays."""
    if method != "__call__" or kwargs:
        how = f".{method}" if method != "__call__" else f" with {', '.join(kwargs)}="
        raise TypeError(
            f"np.{ufunc.__name__}{how} does not take tensors: use the methods of Tensor, or .numpy() for plain values"
        )
    if ufunc in COMPARISONS:
        return np.asarray(ufunc(*(x.numpy() if is_tensor(x) else x for x in inputs)))
    return find(ufunc, UFUNCS)(*inputs)


def apply_function(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call the counterpart of a NumPy function."""
    return find(function, FUNCTIONS)(*args, **kwargs)


def find(function: Any, known: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    if function not in known:
        names = ", ".join(sorted(f.__name__ for f in known))
        raise TypeError(
            f"np.{function.__name__} is not differentiable here. NumPy functions that take tensors: {names}. "
            f"For plain values use x.numpy(), for a new rule tg.ops.primitive"
        )
    return known[function]


def is_tensor(x: Any) -> bool:
    return hasattr(x, "__apply_primitive__")


def operator(name: str) -> Callable[[Any, Any], Any]:
    """The operator `__name__` of the left operand if that is a Tensor, else `__rname__` of the right one."""
    direct, reflected = f"__{name}__", f"__r{name}__"
    return lambda a, b: getattr(a, direct)(b) if is_tensor(a) else getattr(b, reflected)(a)


def in_one_dtype(op: Any) -> Callable[[Any, Any], Any]:
    """`op` with its operands converted as those of operators are."""
    return lambda a, b: op(a, a._like(b)) if is_tensor(a) else op(b._like(a), b)


def with_shape(op: Any) -> Callable[..., Any]:
    return lambda x, shape, **kwargs: op(x, shape=tuple(np.atleast_1d(shape).tolist()), **kwargs)


def join(op: Any) -> Callable[..., Any]:
    return lambda xs, axis=0: op(*xs, axis=axis)


def reduce(op: Any) -> Callable[..., Any]:
    return lambda x, axis=None, **kwargs: op(x, axis=axis, **kwargs)


def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    if ord is not None:
        raise TypeError(f"np.linalg.norm of a tensor is the Euclidean one: leave out ord, got {ord!r}")
    return ops.norm(x, axis=axis, keepdims=keepdims)


def dot(a: Any, b: Any) -> Any:
    if max(np.ndim(a), np.ndim(b)) > 2:
        raise ValueError("np.dot of more than two axes is no stack of products: use @ for that, else np.einsum")
    return UFUNCS[np.matmul](a, b)


COMPARISONS: tuple[Any, ...] = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)
COMPARISONS += (np.isfinite, np.isnan, np.isinf, np.sign)

UFUNCS: dict[Any, Callable[..., Any]] = {
    np.add: operator("add"),
    np.subtract: operator("sub"),
    np.multiply: operator("mul"),
    np.true_divide: operator("truediv"),
    np.power: operator("pow"),
    np.float_power: operator("pow"),
    np.matmul: operator("matmul"),
    np.negative: ops.neg,
    np.positive: lambda x: x,
    np.absolute: ops.abs,
    np.fabs: ops.abs,
    np.exp: ops.exp,
    np.log: ops.log,
    np.sqrt: ops.sqrt,
    np.square: lambda x: x * x,
    np.tanh: ops.tanh,
    np.maximum: in_one_dtype(ops.maximum),
    np.minimum: in_one_dtype(ops.minimum),
}

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: reduce(ops.sum),
    np.mean: reduce(ops.mean),
    np.var: reduce(ops.var),
    np.std: reduce(ops.std),
    np.max: reduce(ops.max),
    np.min: reduce(ops.min),
    np.linalg.norm: norm,
    np.argmax: lambda x, axis=None: x.argmax(axis=axis),
    np.argmin: lambda x, axis=None: x.argmin(axis=axis),
    np.where: ops.where,
    np.clip: lambda x, a_min=None, a_max=None, **kwargs: ops.clip(x, **{"min": a_min, "max": a_max, **kwargs}),
    np.reshape: with_shape(ops.reshape),
    np.broadcast_to: with_shape(ops.broadcast_to),
    np.transpose: lambda x, axes=None: ops.transpose(x, axes=axes),
    np.matrix_transpose: lambda x: x.mT,
    np.swapaxes: ops.swapaxes,
    np.concatenate: join(ops.concat),
    np.stack: join(ops.stack),
    np.split: ops.split,
    np.einsum: ops.einsum,
    np.dot: dot,
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
    np.size: lambda x: x.size,
}
