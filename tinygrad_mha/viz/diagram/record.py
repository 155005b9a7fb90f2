"""What a run did: every value once, with the operation that made it and the values that it was made from.

A node of a tensor does not say who uses the tensor, what is inside of a fused primitive, or how its gradient is
computed. This file collects all three. The rest of the package works on `Run` and `Value` and never on tensors.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha import engine
from tinygrad_mha.modes import SCOPE, STATE, State
from tinygrad_mha.nn.module import Scope
from tinygrad_mha.notation import is_range
from tinygrad_mha.primitives import Primitive
from tinygrad_mha.tensors import Tensor

__all__ = [
    "BACKWARD",
    "DATA_ROLES",
    "FORWARD",
    "RESHAPING",
    "Run",
    "Value",
    "record_backward",
    "record_forward",
]

FORWARD, BACKWARD = Scope("forward"), Scope("backward")  # the outermost frames of a picture that shows both passes
RESHAPING = ("movement", "index")  # kinds of primitives that rearrange or select numbers and compute none
DATA_ROLES = ("data", "weight", "bias", "ids", "targets")  # a plain array in one of these roles is drawn


@dataclass(slots=True, eq=False, repr=False)
class Value:
    """A tensor, or a plain array that an operation was given: what made it, and from what."""

    array: np.ndarray
    name: str | None
    tensor: Tensor | None = None
    gradient: np.ndarray | None = None
    op: Primitive | None = None  # None for a leaf
    inputs: tuple[Any, ...] = ()  # Values, and constants as the operation saw them
    kwargs: dict[str, Any] = field(default_factory=dict)
    scope: tuple[Any, ...] = ()
    backward: bool = False  # computed by the backward pass that is part of the picture
    gradient_of: list[Value] = field(default_factory=list)  # the forward values whose gradient this is
    rule_of: Primitive | None = None  # in the backward pass: the primitive whose derivative rule computed this

    @property
    def sources(self) -> list[Value]:
        """The inputs that are values, not constants."""
        return [x for x in self.inputs if isinstance(x, Value)]

    @property
    def requires_grad(self) -> bool:
        """Whether it is a tensor that requires grad."""
        return self.tensor is not None and self.tensor.requires_grad

    def has_kind(self, *kinds: str) -> bool:
        """Whether a primitive of one of these kinds made the value."""
        return self.op is not None and self.op.kind in kinds


@dataclass(frozen=True)
class Run:
    """All values of a run in the order of the computation, inputs before what is made from them.

    Attributes:
        roots: the values that are drawn as outputs.
        users: for each value, the values of the same pass that were made from it; twice in `x * x`.
        position: the index of each value in `values`.
    """

    values: Sequence[Value]
    roots: Sequence[Value]
    users: dict[Value, list[Value]]
    position: dict[Value, int]

    @cached_property
    def has_backward(self) -> bool:
        """Whether the backward pass is part of the run."""
        return any(value.backward for value in self.values)

    @cached_property
    def records_gradients(self) -> bool:
        """False if nodes were recorded only to be drawn: then no gradient flows, though parameters require grad."""
        return any(v.requires_grad and (v.op is not None or v.gradient is not None) for v in self.values)


class Rule(NamedTuple):
    """The scope entry of nodes that a derivative rule makes."""

    op: Primitive


def record_forward(roots: Iterable[Tensor], opens: Callable[[Primitive], bool] = lambda op: False) -> Run:
    """The run that made `roots`. A fused primitive for which `opens` is true is replaced by its composition."""
    roots = list(roots)
    with composites_opened(roots):
        values = collect(roots, opens)
    return as_run(values.values(), [values[tensor_key(root)] for root in roots])


def record_backward(y: Tensor) -> Run:
    """The run that made `y`, followed by the run that computes its gradients, recorded as `create_graph` does.

    FORWARD and BACKWARD are the outermost scope entries. What a derivative rule computes is in the scope of the node
    that the rule belongs to.

    Raises:
        ValueError: `y` does not require grad, or has several elements and no gradient yet.
    """
    if not y.requires_grad:
        raise ValueError("backward=True needs an output that requires grad; this one was made from constants only")
    if y.grad is None and y.size != 1:
        raise ValueError(
            f"backward=True needs the gradient of an output of shape {y.shape}: call backward(grad) first, "
            f"or draw a scalar"
        )
    seed = Tensor(np.ones_like(y.numpy()) if y.grad is None else y.grad)

    def sweep() -> list[tuple[Tensor, Tensor]]:
        pairs = []
        STATE.set(State(grad=True, record=True))
        SCOPE.set(())
        for value, gradient in engine.sweep(y, seed, differentiable=True):
            pairs.append((value, gradient))
            # The sweep applies the rules of `value` after this step, so this is the scope of the nodes that they make.
            SCOPE.set((*value.node.scope, Rule(value.node.op)) if value.node else ())
        return pairs

    with composites_opened([y]):
        start = engine.tick()
        pairs = contextvars.copy_context().run(sweep)
        values = collect([y, *(gradient for _, gradient in pairs)], backward_after=start)
    for value in values.values():
        value.scope = (BACKWARD if value.backward else FORWARD, *value.scope)
    for tensor, gradient in pairs:
        values[tensor_key(gradient)].gradient_of.append(values[tensor_key(tensor)])
    return as_run(values.values(), [values[tensor_key(y)]])


def as_run(values: Iterable[Value], roots: Sequence[Value]) -> Run:
    """The run of these values, which stand in the order of the computation."""
    ordered = list(values)
    users: dict[Value, list[Value]] = {value: [] for value in ordered}
    for value in ordered:
        for source in value.sources:
            if source.backward == value.backward:
                users[source].append(value)
    return Run(ordered, roots, users, {value: i for i, value in enumerate(ordered)})


def collect(
    roots: Sequence[Tensor], opens: Callable[[Primitive], bool] = lambda op: False, backward_after: float = math.inf
) -> dict[Any, Value]:
    """The values that `roots` were made from, by `tensor_key`, in the order of the run.

    Values made after the time `backward_after`, and leaves first used by them, belong to the backward pass.
    """
    values: dict[Any, Value] = {}
    for tensor in engine.toposort(roots, everything=True):
        node, gradients = tensor.node, {id(tensor): tensor.grad}
        if node is None:
            continue  # a leaf is added before its first user
        backward = node.stamp > backward_after
        if node.op.composition is not None and opens(node.op):
            *inner, last = run_composition(tensor, gradients)
            for step in inner:
                add_computed(values, step, step.node, gradients.get(id(step)), backward)
            node = last.node
        add_computed(values, tensor, node, gradients.get(id(tensor)), backward)
    for i, root in enumerate(roots):
        # After the first, the roots of record_backward are gradients.
        find_tensor(values, root, i > 0 and backward_after < math.inf)
    return values


def add_computed(
    values: dict[Any, Value], tensor: Tensor, node: Any, gradient: np.ndarray | None, backward: bool
) -> None:
    """Add a computed tensor to `values`, after the leaves and the plain arrays that it is the first to use."""
    inputs: list[Any] = []
    for i, (x, array) in enumerate(zip(node.inputs, node.arrays, strict=True)):
        if isinstance(x, Tensor):
            inputs.append(find_tensor(values, x, backward))
        elif is_data(node.op, i, array):
            # The node holds a copy. An array that its owner has refilled since is another input.
            key = id(x), content_key(array)
            if key not in values:
                role = node.op.role(i)
                name = node.op.argument_name(i) if role in ("ids", "targets") else None
                values[key] = Value(np.asarray(array), name, backward=backward)
            inputs.append(values[key])
        else:
            inputs.append(array)
    scope, rule_of = node.scope, None
    if scope and isinstance(scope[-1], Rule):
        scope, rule_of = scope[:-1], scope[-1].op
    values[id(tensor)] = Value(
        tensor.numpy(),
        tensor.name,
        tensor,
        gradient=gradient,
        op=node.op,
        inputs=tuple(inputs),
        kwargs=node.kwargs,
        scope=scope,
        backward=backward,
        rule_of=rule_of,
    )


def find_tensor(values: dict[Any, Value], tensor: Tensor, backward: bool) -> Value:
    """The value of a tensor, which is added if it is a leaf that is met for the first time."""
    key = tensor_key(tensor)
    if key not in values:
        values[key] = Value(tensor.numpy(), tensor.name, tensor, tensor.grad, backward=backward)
    return values[key]


def tensor_key(tensor: Tensor) -> Any:
    """What identifies a tensor: its id; of a constant with a name, the name and the content.

    So a table that every layer makes anew, such as that of ALiBi, is one input.
    """
    if tensor.node is None and tensor.name and not tensor.requires_grad:
        return tensor.name, content_key(tensor.numpy())
    return id(tensor)


def content_key(array: np.ndarray) -> Any:
    """What identifies an array by its content."""
    return array.shape, array.dtype.str, sha256(array.tobytes()).digest()


def is_data(op: Primitive, i: int, array: Any) -> bool:
    """Whether a plain array is drawn as an input. Otherwise it is a constant, which the formula names.

    The role that the primitive declares for the argument decides. Integers that count up by one, such as positions,
    are written in the formula as 0…4, which loses nothing.
    """
    if not isinstance(array, np.ndarray) or array.ndim == 0 or array.dtype.kind == "b":
        return False
    return op.role(i) in DATA_ROLES and not (op.role(i) == "ids" and is_range(array))


@contextmanager
def composites_opened(roots: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the graph of `roots` has the composition of every primitive of kind "composite", as if it had run."""
    nodes = [(tensor, tensor.node) for tensor in engine.toposort(roots, everything=True) if tensor.node is not None]
    composites = [(tensor, node) for tensor, node in nodes if node.op.kind == "composite"]
    try:
        for tensor, node in composites:
            gradients: dict[int, Any] = {}
            steps = run_composition(tensor, gradients)
            for i, step in enumerate(steps, 1):
                assert step.node is not None
                step.grad = gradients.get(id(step))
                step.node.stamp = node.stamp - 1 + i / len(steps)  # after the inputs and before the users of `tensor`
            tensor.node = steps[-1].node
        yield
    finally:
        for tensor, node in composites:
            tensor.node = node


def run_composition(tensor: Tensor, gradients: dict[int, Any]) -> list[Tensor]:
    """Run the composition of the fused primitive that made `tensor`, on the same operands: its steps, the result last.

    If `tensor` has a gradient, it is propagated through the steps, and the gradient of each is added to `gradients`.
    """
    node = tensor.node
    assert node is not None
    composition = node.op.composition
    assert composition is not None
    operands = [x if isinstance(x, Tensor) else a for x, a in zip(node.inputs, node.arrays, strict=True)]

    def run() -> Any:
        entry = Scope(node.op.name, is_attention=node.op.kind == "attention")
        SCOPE.set(node.scope if node.op.kind == "composite" else (*node.scope, entry))
        STATE.set(State(grad=tensor.requires_grad, record=True))
        return composition(*operands, **node.kwargs)

    start = engine.tick()
    result = contextvars.copy_context().run(run)
    if tensor.grad is not None and result.requires_grad:
        gradients |= {id(t): g for t, g in engine.sweep(result, tensor.grad, newer_than=start)}
    return [t for t in engine.toposort([result], newer_than=start, everything=True) if t.node is not None]
