"""A run as the drawer sees it: each value once, with what it was made from and who used it.

Drawing wants three things that a tensor's node does not say: the users of a value, the inside of a fused primitive,
and the computation of the gradients. All three are found here, so that everything after this file reads `Value`s only.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tinygrad_mha import engine
from tinygrad_mha.engine import STATE, State
from tinygrad_mha.notation import is_range
from tinygrad_mha.primitives import Primitive
from tinygrad_mha.tensors import Tensor

FORWARD, BACKWARD = "forward", "backward"  # the two halves of a picture that has both
SHAPE_ONLY = {"transpose", "reshape", "broadcast_to", "cast", "getitem"}
DATA_ARGUMENTS = {"matmul", "linear", "einsum", "take", "cross_entropy"}


class Value:
    """One tensor, or one array of data that an operation was given: what made it, from what, and who used it."""

    __slots__ = (
        "array",
        "backward",
        "gradient",
        "gradient_of",
        "inputs",
        "kwargs",
        "name",
        "op",
        "scope",
        "tensor",
        "users",
        "wants",
    )

    def __init__(self, array: np.ndarray, name: str | None, tensor: Tensor | None = None) -> None:
        self.array = array
        self.name = name
        self.tensor = tensor
        self.wants = tensor is not None and tensor.requires_grad
        self.gradient = None if tensor is None else tensor.grad
        self.backward = False  # whether it was computed by a backward that is part of the picture
        self.gradient_of: list[Value] = []  # then: the values whose gradient this is
        self.op: Primitive | None = None
        self.inputs: tuple[Any, ...] = ()  # Values, and constants as the operation saw them
        self.kwargs: dict[str, Any] = {}
        self.scope: tuple[Any, ...] = ()
        self.users: list[Value] = []  # one entry per use: `x * x` uses x twice

    @property
    def sources(self) -> list[Value]:
        """The inputs that are values, not constants."""
        return [x for x in self.inputs if x.__class__ is Value]


def trace(roots: Iterable[Tensor], opened: Callable[[str], bool] = lambda op: False) -> dict[int, Value]:
    """Everything that `roots` were made from, by the identity of its tensor, inputs first, in the order of the run.

    Fused primitives for whose name `opened` answers yes are replaced by what they are composed of.
    """
    values: dict[int, Value] = {}
    for tensor in engine.toposort(roots, everything=True):
        if tensor.node is None:
            continue  # a leaf stands in front of its first user
        node, gradients = tensor.node, {id(tensor): tensor.grad}
        if node.op.composition is not None and opened(node.op.name):
            *inner, last = composed_again(tensor, gradients)
            for step in inner:
                enter(values, step, step.node, gradients.get(id(step)))
            node = last.node
        enter(values, tensor, node, gradients.get(id(tensor)))
    for root in roots:
        values.setdefault(id(root), Value(root.numpy(), root.name, root))
    return values


def enter(values: dict[int, Value], tensor: Tensor, node: Any, gradient: np.ndarray | None) -> None:
    """Add a computed tensor to `values`, after the leaves and the data that it is the first to use."""
    value = Value(tensor.numpy(), tensor.name, tensor)
    value.op, value.kwargs, value.scope, value.gradient = node.op, node.kwargs, node.scope, gradient
    inputs = []
    for i, (x, array) in enumerate(zip(node.inputs, node.arrays, strict=True)):
        if isinstance(x, Tensor):
            if id(x) not in values:
                values[id(x)] = Value(x.numpy(), x.name, x)
        elif is_data(node.op, i, array):
            if id(x) not in values:
                values[id(x)] = Value(np.asarray(array), data_name(node.op, i))
        else:
            inputs.append(array)
            continue
        inputs.append(values[id(x)])
        values[id(x)].users.append(value)
    value.inputs = tuple(inputs)
    values[id(tensor)] = value


def is_data(op: Primitive, i: int, array: Any) -> bool:
    """Whether a plain array is something that the network was given, and not a constant of its formula.

    Constants are not drawn: numbers, masks, what is added or multiplied element by element. What is left are the
    factors of products and the integers of lookups and losses; but positions 0, 1, 2 ... are a constant again.
    """
    if not isinstance(array, np.ndarray) or array.ndim == 0 or array.dtype.kind == "b":
        return False
    if op.name == "attention":
        return i < 3
    return op.name in DATA_ARGUMENTS and not (op.name == "take" and is_range(array))


def data_name(op: Primitive, i: int) -> str | None:
    argument = op.argument(i)
    return argument if argument in ("ids", "targets") else None


def composed_again(tensor: Tensor, gradients: dict[int, Any]) -> list[Tensor]:
    """What a fused primitive is composed of: its steps, the last of which equals `tensor`.

    The composition is run once more on the same operands. The gradient of `tensor`, if it has one, is sent back through
    the steps, and what each of them receives is added to `gradients`.
    """
    node = tensor.node
    assert node is not None
    composition = node.op.composition
    assert composition is not None
    operands = [x if isinstance(x, Tensor) else a for x, a in zip(node.inputs, node.arrays, strict=True)]

    def run() -> Any:
        STATE.set(State(grad=tensor.requires_grad, record=True, scope=(*node.scope, node.op.name)))
        return composition(*operands, **node.kwargs)

    start = engine.tick()
    again = contextvars.copy_context().run(run)
    if tensor.grad is not None and again.requires_grad:
        gradients |= {id(t): g for t, g in engine.sweep(again, tensor.grad, newer_than=start)}
    return [t for t in engine.toposort([again], newer_than=start, everything=True) if t.node is not None]


def trace_backward(y: Tensor) -> dict[int, Value]:
    """The run behind `y`, followed by the run that computes its gradients, as `create_graph` records it.

    The two halves are the outermost scopes; what is computed while a gradient passes through a node
    belongs to the scope of that node.

    Raises:
        ValueError: `y` needs no gradient, or has several elements and no gradient yet.
    """
    if not y.requires_grad:
        raise ValueError("backward=True wants an output that requires grad; this one was made from constants only")
    if y.grad is None and y.size != 1:
        raise ValueError(
            f"backward=True of an output of shape {y.shape} wants to know its gradient: call backward(grad) first, "
            f"or draw a scalar"
        )
    seed = Tensor(np.ones_like(y.numpy()) if y.grad is None else y.grad)

    def run() -> list[tuple[Tensor, Tensor]]:
        found = []
        STATE.set(State(grad=True, record=True))
        for value, g in engine.sweep(y, seed, differentiable=True):
            found.append((value, g))
            STATE.set(State(grad=True, record=True, scope=value.node.scope if value.node else ()))
        return found

    forward = trace([y])
    pairs = contextvars.copy_context().run(run)
    both = trace([y, *(g for _, g in pairs)])
    for key, value in both.items():
        value.backward = key not in forward
        value.scope = (BACKWARD if value.backward else FORWARD, *value.scope)
    for tensor, g in pairs:
        both[id(g)].gradient_of.append(both[id(tensor)])
    return both
