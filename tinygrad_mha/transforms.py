"""Derivatives as functions: grad, vjp, jvp, jacobian, hessian, hvp. None reads or writes a `.grad`.

The results of jvp, jacobian, hessian and hvp can be differentiated again with respect to an input that is a tensor with
requires_grad, unless they are computed under `no_grad`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from tinygrad_mha import engine, modes, ops
from tinygrad_mha.tensors import Tensor, as_tensor, plain, wrap
from tinygrad_mha.torch_names import translate_keywords

__all__ = ["grad", "hessian", "hvp", "jacobian", "jvp", "vjp"]


class Function(Protocol):
    """A function or a module: anything callable. As a property, because the calls of modules are typed by one."""

    @property
    def __call__(self) -> Callable[..., Any]: ...


@translate_keywords
def grad(
    y: Tensor, xs: Tensor | Sequence[Tensor], grad_output: Any = None, create_graph: bool = False
) -> tuple[Tensor, ...]:
    """The gradients of `y` with respect to `xs`, which may be leaves or intermediates.

    Args:
        y: a tensor of one element, or of any shape together with `grad_output`.
        xs: one tensor or several; an x that `y` does not depend on gets zeros.
        grad_output: the gradient of `y`, in its shape; 1 if `y` has a single element.
        create_graph: whether the results are recorded, so that they can be differentiated again.

    Returns:
        One gradient per x, in the shape of x: a tuple, for a single x too.

    Raises:
        ValueError: `y` or an x that does not require grad (nothing about it was recorded), or no `grad_output` for
            several elements of `y`, or one of the wrong shape.

    Example:
        >>> x = Tensor(3.0, requires_grad=True)
        >>> (first,) = grad(x**3, x, create_graph=True)
        >>> (second,) = grad(first, x)
        >>> first.item(), second.item()
        (27.0, 18.0)
    """
    if not isinstance(y, Tensor):
        raise TypeError(f"y must be a Tensor, got {type(y).__name__}")
    xs = [xs] if isinstance(xs, Tensor) else list(xs)
    for i, x in enumerate(xs):
        if not isinstance(x, Tensor) or not x.requires_grad:
            raise ValueError(
                f"xs[{i}] must be a tensor with requires_grad=True, else nothing about it was recorded; got {x!r}"
            )
    if xs and not y.requires_grad:
        raise ValueError(
            f"grad of {y._label()}, which does not require grad: no tensor that it was made from has "
            f"requires_grad=True, it was made under no_grad, or it is a gradient taken without create_graph=True"
        )
    seed: Any = y._seed(grad_output)
    if create_graph:
        seed = grad_output.astype(y.dtype) if isinstance(grad_output, Tensor) else wrap(seed)
    gradients: dict[int, Any] = {}
    wanted = {id(x) for x in xs}
    oldest = min((x.node.stamp - 1 if x.node else -1 for x in xs), default=-1)
    with modes.enable_grad():
        for value, g in engine.sweep(y, seed, differentiable=create_graph, newer_than=oldest):
            if id(value) in wanted:
                gradients[id(value)] = g if create_graph else wrap(np.array(g))
    results: list[Tensor] = []
    for x in xs:
        g = gradients[id(x)] if id(x) in gradients else Tensor(np.zeros(x.shape, x.dtype))
        is_taken = any(g is other for other in (grad_output, *results))
        if is_taken:
            g = ops.reshape(g, shape=g.shape) if create_graph else wrap(g._data.copy())
        if create_graph and not g.requires_grad:
            # A constant gradient, of a linear function: a leaf, so that its own derivatives are zeros and no error.
            g = Tensor(g._data, requires_grad=True)
        results.append(g)
    return tuple(results)


def variable(x: Any) -> Tensor:
    """A tensor to differentiate with respect to: a new leaf, or, for a tensor with a graph, an alias that keeps it."""
    if isinstance(x, Tensor) and x.requires_grad:
        with modes.enable_grad():
            return ops.reshape(x, shape=x.shape)
    return Tensor(x, requires_grad=True)


def is_recorded(x: Any) -> bool:
    """Whether a derivative at `x` can itself be differentiated with respect to `x`."""
    return isinstance(x, Tensor) and x.requires_grad and modes.is_grad_enabled()


def run(f: Function, xs: Sequence[Tensor]) -> Tensor:
    """f(*xs) with gradients on; TypeError unless it is a Tensor."""
    with modes.enable_grad():
        y = f(*xs)
    if not isinstance(y, Tensor):
        raise TypeError(f"the function to differentiate must return a Tensor, got {type(y).__name__}")
    return y


def vjp(f: Function, *xs: Any) -> tuple[Tensor, Callable[..., tuple[Tensor, ...]]]:
    """`y = f(*xs)`, and a function `pull(g)` that returns the gradients g^T J, one per x, in the shape of x.

    Example:
        >>> y, pull = vjp(lambda a, b: a @ b, np.eye(2), np.ones((2, 3)))
        >>> [g.shape for g in pull(np.ones((2, 3)))]
        [(2, 2), (2, 3)]
    """
    variables = [variable(x) for x in xs]
    y = run(f, variables)
    if not y.requires_grad:
        raise ValueError(
            f"the function returned {y._label()}, which does not require grad: it was not computed from the inputs, or "
            f"under no_grad, or by a gradient taken without create_graph=True"
        )

    def pull(g: Any = None, create_graph: bool = False) -> tuple[Tensor, ...]:
        return grad(y, variables, grad_output=g, create_graph=create_graph)

    return y, pull


def jvp(f: Function, xs: Any, vs: Any) -> tuple[Tensor, Tensor]:
    """`y = f(*xs)`, and its directional derivative J v in the shape of y.

    `xs` and `vs` are sequences of inputs and directions of the same shapes, or one array each. The computation is
    reverse over reverse: g^T J is linear in g, and its derivative with respect to g in the direction v is J v.
    """
    xs, vs = as_sequence(xs), as_sequence(vs)
    if len(xs) != len(vs):
        raise ValueError(f"expected one direction for each input, got {len(xs)} inputs and {len(vs)} directions")
    y, pull = vjp(f, *xs)
    g = Tensor(np.zeros(y.shape, y.dtype), requires_grad=True)
    pulled = pull(g, create_graph=True)
    with modes.enable_grad():
        terms = [ops.sum(p * as_direction(v, p)) for p, v in zip(pulled, vs, strict=True)]
        total = functools.reduce(operator.add, terms)
    return y, grad(total, g, create_graph=modes.is_grad_enabled())[0]


def as_direction(v: Any, like: Tensor) -> Tensor:
    """A direction as a tensor in the dtype of its input; ValueError unless it has its shape."""
    v = as_tensor(v)
    if v.shape != like.shape:
        raise ValueError(f"a direction must have the shape of its input, {like.shape}, got {v.shape}")
    return v.astype(like.dtype)


def as_sequence(xs: Any) -> list[Any]:
    return list(xs) if isinstance(xs, (list, tuple)) else [xs]


def jacobian(f: Function, x: Any) -> Tensor:
    """All derivatives of `f` at `x`: a tensor of shape y.shape + x.shape, from one backward per element of y."""
    y, pull = vjp(f, x)
    units = np.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)
    shape = (*y.shape, *np.shape(plain(x)))
    if is_recorded(x):
        rows = [pull(unit, create_graph=True)[0] for unit in units]
        return ops.reshape(ops.stack(*rows, axis=0), shape=shape) if rows else Tensor(np.zeros(shape, y.dtype))
    return wrap(np.array([pull(unit)[0].numpy() for unit in units], dtype=y.dtype).reshape(shape))


def hessian(f: Function, x: Any) -> Tensor:
    """All second derivatives of a scalar `f` at `x`: a tensor of shape x.shape + x.shape."""
    return jacobian(lambda x: grad(run(f, [x]), x, create_graph=True)[0], x)


def hvp(f: Function, x: Any, v: Any) -> Tensor:
    """The Hessian of a scalar `f` at `x` times `v`, in the shape of x: the derivative of <grad f, v>."""
    recorded, x = is_recorded(x), variable(x)
    with modes.enable_grad():
        (first,) = grad(run(f, [x]), x, create_graph=True)
        return grad(ops.sum(first * as_direction(v, first)), x, create_graph=recorded)[0]
