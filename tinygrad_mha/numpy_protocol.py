"""NumPy functions that accept Tensors: each calls the method or the primitive of the same meaning.

`Tensor.__array_ufunc__` and `Tensor.__array_function__` call `apply_ufunc` and `apply_function`. Other NumPy functions
raise TypeError: none may turn a Tensor into an array silently and lose its gradient. The type annotations of NumPy do
not cover this: typed code uses operators, methods of Tensor, and `ops`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from tinygrad_mha import ops

__all__ = ["COMPARISONS", "FUNCTIONS", "PLAIN", "UFUNCS", "apply_function", "apply_ufunc"]


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


def full(fill: Callable[..., Any]) -> Callable[..., Any]:
    """np.zeros_like and the like: plain arrays, which depend on the shape and dtype alone."""
    return lambda x, *args, **kwargs: fill(x.numpy(), *args, **kwargs)


def on_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose result has no derivative, of the values."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*(x.numpy() if is_tensor(x) else x for x in args), **kwargs)

    return call


def expand_dims(x: Any, axis: Any) -> Any:
    n = x.ndim + len(np.atleast_1d(axis))
    axes = normalize_axis_tuple(axis, n)
    lengths = iter(x.shape)
    return ops.reshape(x, shape=tuple(1 if i in axes else next(lengths) for i in range(n)))


def squeeze(x: Any, axis: Any = None) -> Any:
    axes = [i for i, n in enumerate(x.shape) if n == 1] if axis is None else normalize_axis_tuple(axis, x.ndim)
    if any(x.shape[i] != 1 for i in axes):
        raise ValueError(f"squeeze removes axes of length 1, got axis {axis} of shape {x.shape}")
    return ops.reshape(x, shape=tuple(n for i, n in enumerate(x.shape) if i not in axes))


def ravel(x: Any) -> Any:
    return ops.reshape(x, shape=(-1,))


def at_least(n: int, xs: Any) -> list[Any]:
    """The arrays with axes of length 1 in front, up to `n` axes."""
    return [ops.reshape(x, shape=(1,) * (n - np.ndim(x)) + np.shape(x)) for x in xs]


def hstack(xs: Any) -> Any:
    xs = at_least(1, xs)
    return ops.concat(*xs, axis=0 if np.ndim(xs[0]) == 1 else 1)


def outer(a: Any, b: Any) -> Any:
    return operator("mul")(ops.reshape(a, shape=(-1, 1)), ops.reshape(b, shape=(1, -1)))


def rearrange(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose result consists of elements of its input. Applied to their indices it says which."""
    return lambda x, *args, **kwargs: ravel(x)[function(np.arange(x.size).reshape(x.shape), *args, **kwargs)]


def sort(x: Any, axis: int | None = -1) -> Any:
    x, axis = (ravel(x), 0) if axis is None else (x, axis)
    return rearrange(np.take_along_axis)(x, np.argsort(x.numpy(), axis, stable=True), axis)


def diff(x: Any, n: int = 1, axis: int = -1) -> Any:
    for _ in range(n):
        places = np.arange(x.shape[axis])
        x = rearrange(np.take)(x, places[1:], axis) - rearrange(np.take)(x, places[:-1], axis)
    return x


def trace(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    return rearrange(np.diagonal)(x, offset, axis1, axis2).sum(axis=-1)


def pad(x: Any, pad_width: Any, mode: str = "constant", constant_values: Any = 0) -> Any:
    if mode != "constant" or np.ndim(constant_values):
        raise TypeError(f"np.pad of a tensor adds one constant: mode 'constant' and one number, got mode {mode!r}")
    for axis, widths in enumerate(np.broadcast_to(pad_width, (x.ndim, 2)).tolist()):
        if any(widths):
            shapes = [(*x.shape[:axis], width, *x.shape[axis + 1 :]) for width in widths]
            before, after = (np.full(shape, constant_values, x.dtype) for shape in shapes)
            x = ops.concat(before, x, after, axis=axis)
    return x


def cumsum(x: Any, axis: int | None = None) -> Any:
    return ops.cumsum(ravel(x), axis=0) if axis is None else ops.cumsum(x, axis=axis)


def triangle(keep: Callable[..., Any]) -> Callable[..., Any]:
    """np.tril and np.triu: zeros on one side of a diagonal of the last two axes."""
    return lambda x, k=0: ops.where(keep(np.ones(x.shape[-2:], bool), k), x, 0.0)


def einsum(*args: Any, optimize: Any = False) -> Any:
    """`optimize` chooses the order of products in NumPy, and not the result; it is accepted for that reason."""
    return ops.einsum(*args)


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
    np.sin: ops.sin,
    np.cos: ops.cos,
    np.log1p: ops.log1p,
    np.log2: lambda x: ops.log(x) * (1 / math.log(2)),
    np.log10: lambda x: ops.log(x) * (1 / math.log(10)),
    np.exp2: lambda x: ops.exp(x * math.log(2)),
    np.expm1: ops.expm1,
    np.reciprocal: lambda x: 1.0 / x,
    np.maximum: in_one_dtype(ops.maximum),
    np.minimum: in_one_dtype(ops.minimum),
}

# Results without a derivative are plain values.
PLAIN: dict[Any, Callable[..., Any]] = {
    np.argmax: lambda x, axis=None, **kwargs: x.argmax(axis=axis, **kwargs),
    np.argmin: lambda x, axis=None, **kwargs: x.argmin(axis=axis, **kwargs),
    np.argsort: on_values(np.argsort),
    np.allclose: on_values(np.allclose),
    np.isclose: on_values(np.isclose),
    np.array_equal: on_values(np.array_equal),
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
    np.size: lambda x: x.size,
    np.zeros_like: full(np.zeros_like),
    np.ones_like: full(np.ones_like),
    np.full_like: full(np.full_like),
}

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **PLAIN,
    np.sum: reduce(ops.sum),
    np.mean: reduce(ops.mean),
    np.var: reduce(ops.var),
    np.std: reduce(ops.std),
    np.max: reduce(ops.max),
    np.min: reduce(ops.min),
    np.amax: reduce(ops.max),
    np.amin: reduce(ops.min),
    np.prod: reduce(ops.prod),
    np.cumsum: cumsum,
    np.linalg.norm: norm,
    np.where: ops.where,
    np.clip: lambda x, a_min=None, a_max=None, **kwargs: ops.clip(x, **{"min": a_min, "max": a_max, **kwargs}),
    np.reshape: with_shape(ops.reshape),
    np.broadcast_to: with_shape(ops.broadcast_to),
    np.transpose: lambda x, axes=None: ops.transpose(x, axes=axes),
    np.matrix_transpose: lambda x: x.mT,
    np.swapaxes: ops.swapaxes,
    np.concatenate: join(ops.concat),
    np.stack: join(ops.stack),
    np.hstack: hstack,
    np.vstack: lambda xs: ops.concat(*at_least(2, xs), axis=0),
    np.column_stack: lambda xs: ops.concat(*(x[:, None] if np.ndim(x) == 1 else x for x in xs), axis=1),
    np.atleast_1d: lambda x: at_least(1, [x])[0],
    np.atleast_2d: lambda x: at_least(2, [x])[0],
    np.split: ops.split,
    np.expand_dims: expand_dims,
    np.squeeze: squeeze,
    np.moveaxis: ops.moveaxis,
    np.ravel: ravel,
    np.flip: ops.flip,
    np.repeat: rearrange(np.repeat),
    np.tile: rearrange(np.tile),
    np.roll: rearrange(np.roll),
    np.rot90: rearrange(np.rot90),
    np.fliplr: rearrange(np.fliplr),
    np.flipud: rearrange(np.flipud),
    np.take: rearrange(np.take),
    np.take_along_axis: rearrange(np.take_along_axis),
    np.delete: rearrange(np.delete),
    np.diagonal: rearrange(np.diagonal),
    np.sort: sort,
    np.diff: diff,
    np.trace: trace,
    np.pad: pad,
    np.tril: triangle(np.tril),
    np.triu: triangle(np.triu),
    np.outer: outer,
    np.einsum: einsum,
    np.dot: dot,
}
