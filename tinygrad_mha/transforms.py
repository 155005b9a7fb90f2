"""Derivatives as functions: grad, vjp, jvp, jacobian, hessian, hvp. No `.grad` is read or written here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tinygrad_mha import engine, modes, ops
from tinygrad_mha.tensors import Tensor, as_tensor, wrap


def grad(
    y: Tensor, xs: Tensor | Sequence[Tensor], grad_output: Any = None, create_graph: bool = False
) -> tuple[Tensor, ...]:
    """The gradients of `y` with respect to `xs`, which may be leaves or intermediates: a tuple, also for one x.

    An x that `y` does not depend on gets zeros. With `create_graph` the results remember how they were made, and can
    be differentiated again.

    Args:
        y: a tensor of one element, or of any shape together with `grad_output`, its gradient.

    Raises:
        ValueError: an x that does not require grad (nothing about it was recorded), or no `grad_output` for several
            elements of `y`, or one of the wrong shape.

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
    seed = y._seed(grad_output)
    found: dict[int, Any] = {}
    if y.requires_grad:
        wanted = {id(x) for x in xs}
        oldest = min((x.node.stamp - 1 if x.node else -1 for x in xs), default=-1)
        if create_graph:
            start = grad_output.astype(y.dtype) if isinstance(grad_output, Tensor) else wrap(seed)
            with modes.enable_grad():
                for value, g in engine.sweep(y, start, differentiable=True, newer_than=oldest):
                    if id(value) in wanted:
                        found[id(value)] = g
        else:
            for value, g in engine.sweep(y, seed, newer_than=oldest):
                if id(value) in wanted:
                    found[id(value)] = wrap(np.array(g))
    results: list[Tensor] = []
    for x in xs:
        g = found[id(x)] if id(x) in found else Tensor(np.zeros(x.shape, x.dtype))
        taken = [grad_output, *results]
        results.append(ops.reshape(g, shape=g.shape) if any(g is other for other in taken) else g)
    return tuple(results)


def variable(x: Any) -> Tensor:
    """`x` as something to differentiate by: a fresh leaf, or an alias that keeps the graph behind a tensor."""
    if isinstance(x, Tensor) and x.requires_grad:
        with modes.enable_grad():
            return ops.reshape(x, shape=x.shape)
    return Tensor(x, requires_grad=True)


def run(f: Callable[..., Any], xs: Sequence[Tensor]) -> Tensor:
    """f(*xs) with gradients on; it must give one tensor."""
    with modes.enable_grad():
        y = f(*xs)
    if not isinstance(y, Tensor):
        raise TypeError(f"the function to differentiate must return a Tensor, got {type(y).__name__}")
    return y


def vjp(f: Callable[..., Tensor], *xs: Any) -> tuple[Tensor, Callable[..., tuple[Tensor, ...]]]:
    """`y = f(*xs)` and `pull`, where `pull(g)` is the tuple g^T J of gradients, one for each x.

    Example:
        >>> y, pull = vjp(lambda a, b: a @ b, np.eye(2), np.ones((2, 3)))
        >>> [g.shape for g in pull(np.ones((2, 3)))]
        [(2, 2), (2, 3)]
    """
    variables = [variable(x) for x in xs]
    y = run(f, variables)

    def pull(g: Any = None, create_graph: bool = False) -> tuple[Tensor, ...]:
        return grad(y, variables, grad_output=g, create_graph=create_graph)

    return y, pull


def jvp(f: Callable[..., Tensor], xs: Any, vs: Any) -> tuple[Tensor, Tensor]:
    """`y = f(*xs)` and its change J v when every x moves along its v; `xs` and `vs` are sequences, or one array each.

    Forward derivatives come from reverse ones: g^T J is linear in g, and its derivative by g in the direction v is J v.
    """
    xs, vs = _sequence(xs), _sequence(vs)
    if len(xs) != len(vs):
        raise ValueError(f"expected one direction for each input, got {len(xs)} inputs and {len(vs)} directions")
    y, pull = vjp(f, *xs)
    g = Tensor(np.zeros(y.shape, y.dtype), requires_grad=True)
    pulled = pull(g, create_graph=True)
    with modes.enable_grad():
        moved = [ops.sum(p * _direction(v, p)) for p, v in zip(pulled, vs, strict=True)]
        total = moved[0]
        for more in moved[1:]:
            total = total + more
    return y, grad(total, g, create_graph=modes.is_grad_enabled())[0]


def _direction(v: Any, like: Tensor) -> Tensor:
    v = as_tensor(v)
    if v.shape != like.shape:
        raise ValueError(f"a direction must have the shape of its input, {like.shape}, got {v.shape}")
    return v.astype(like.dtype)


def _sequence(xs: Any) -> list[Any]:
    return list(xs) if isinstance(xs, (list, tuple)) else [xs]


def jacobian(f: Callable[[Tensor], Tensor], x: Any) -> Tensor:
    """All derivatives of `f` at `x`: a tensor of shape y.shape + x.shape, one backward per element of y."""
    y, pull = vjp(f, x)
    unit = np.zeros(y.size, y.dtype)
    rows = []
    for i in range(y.size):
        unit[i] = 1
        rows.append(pull(unit.reshape(y.shape))[0].numpy())
        unit[i] = 0
    shape = np.shape(x.numpy() if isinstance(x, Tensor) else x)
    return wrap(np.array(rows, dtype=y.dtype).reshape(*y.shape, *shape))


def hessian(f: Callable[[Tensor], Tensor], x: Any) -> Tensor:
    """All second derivatives of a scalar `f` at `x`: a tensor of shape x.shape + x.shape."""
    return jacobian(lambda x: grad(f(x), x, create_graph=True)[0], x)


def hvp(f: Callable[[Tensor], Tensor], x: Any, v: Any) -> Tensor:
    """The Hessian of a scalar `f` at `x` times `v`, without the Hessian: the derivative of <grad f, v>."""
    x = variable(x)
    with modes.enable_grad():
        (first,) = grad(run(f, [x]), x, create_graph=True)
        return grad(ops.sum(first * _direction(v, first)), x)[0]
