"""The backward pass: nodes, their topological order, and the accumulation of gradients.

The engine works on *values*: objects with `.node`, `.requires_grad`, `.shape`, `.dtype` and the array `._data`. A value
without a node is a leaf. A node refers to its inputs and never to its output, so there are no reference cycles, and an
intermediate is freed as soon as nothing refers to it.

One clock counts node creations and writes to leaves. Sorting nodes by time is a topological sort, and comparing two
times tells whether a leaf was written to after a node had used it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray

from tinygrad_mha.kernels.reference import MANY, sum_leading
from tinygrad_mha.primitives import Primitive

__all__ = ["Node", "WriteTime", "backprop_node", "backward", "sweep", "tick", "toposort"]

# tick() returns 1, 2, 3, ...: the time. Every node calls it, and this is the fastest counter.
tick = itertools.count(1).__next__


class Node:
    """How a value was computed: the primitive `op` applied to `inputs` (values and constants) with `kwargs`.

    Attributes:
        needed: the positions of the inputs that need a gradient.
        arrays: the array or constant of each input, as the forward received it.
        residuals: what the forward returned, besides the result, for the rules.
        scope: the modules and `scope` blocks in which it was made, outermost first.
        stamp: the time at which it was made, from `tick`.
        source: the line of the user's code that made it, "train.py:12"; None unless `check.doctor` is on.
    """

    source: str | None = None
    __slots__ = ("arrays", "inputs", "kwargs", "needed", "op", "residuals", "scope", "stamp")

    def __init__(
        self,
        op: Primitive[..., Any],
        inputs: tuple[Any, ...],
        needed: tuple[int, ...],
        arrays: tuple[Any, ...],
        kwargs: dict[str, Any],
        residuals: tuple[Any, ...],
        scope: tuple[Any, ...],
    ) -> None:
        self.op = op
        self.inputs = inputs
        self.needed = needed
        self.arrays = arrays
        self.kwargs = kwargs
        self.residuals = residuals
        self.scope = scope
        self.stamp = tick()


class WriteTime:
    """The time of the last write to some memory; values that share the memory share this object."""

    __slots__ = ("stamp",)
    latest: ClassVar[int] = 0  # of all writes to any memory, so that most graphs need no search
    replaced: ClassVar[int] = 0  # the last time that a leaf took another array, which copies of its model do not have

    def __init__(self) -> None:
        self.stamp = 0

    def touch(self) -> None:
        """Record a write that happens now."""
        self.stamp = WriteTime.latest = tick()


# --------------------------------------------------------------------------------------------------------------------
# Order


def is_value(x: Any) -> bool:
    """Whether an input is a value (a Tensor) rather than a constant."""
    return hasattr(x, "requires_grad")


def toposort(roots: Iterable[Any], newer_than: int = -1, everything: bool = False) -> list[Any]:
    """Sort `roots` and all values they were computed from: each once, inputs before results, leaves first.

    Values that need no gradient are left out, unless `everything` is set. A value whose node was made at time
    `newer_than` or before is left out too, and its inputs are not visited through it. The search is iterative, so
    chains of any length work.
    """
    leaves: dict[int, Any] = {}  # by id
    made: dict[int, Any] = {}  # by stamp
    stack = [root for root in roots if everything or root.requires_grad]
    while stack:
        value = stack.pop()
        node = value.node
        if node is None:
            leaves[id(value)] = value
        elif node.stamp not in made and node.stamp > newer_than:
            made[node.stamp] = value
            if everything:
                stack.extend(x for x in node.inputs if is_value(x))
            else:
                inputs = node.inputs
                for i in node.needed:
                    stack.append(inputs[i])
    return [*leaves.values(), *(made[stamp] for stamp in sorted(made))]


def check_not_modified(order: list[Any]) -> None:
    """Raise RuntimeError if an operand was modified in place after a node used it: its rule would use wrong numbers."""
    oldest = next((value.node for value in order if value.node is not None), None)
    if oldest is None or WriteTime.latest < oldest.stamp:  # all writes were before the graph
        return
    for node in (value.node for value in order if value.node is not None):
        for i, x in enumerate(node.inputs):
            written = getattr(x, "_written", None)
            if written is not None and written.stamp > node.stamp:
                name = f" {x.name!r}" if x.name else ""
                raise RuntimeError(
                    f"the tensor{name} of shape {x.shape} was written to after {node.op.name!r} used it as its "
                    f"argument {node.op.argument_name(i)!r}; run the forward again, or call backward before you write "
                    f"(an optimizer step, assign_ and the .data setter write)"
                )


# --------------------------------------------------------------------------------------------------------------------
# Gradients


def sweep(root: Any, seed: Any, differentiable: bool = False, newer_than: int = -1) -> Iterator[tuple[Any, Any]]:
    """Yield each value that `root` was computed from with its gradient, from the root down; leaves come last.

    A gradient is complete when it is yielded, because everything computed from its value comes before. With
    `differentiable`, the seed and the gradients are values that record how they were computed. `newer_than` is that of
    `toposort`: older nodes are not reached.
    """
    order = toposort([root], newer_than)
    check_not_modified(order)
    gradients = {id(root): seed}
    for value in reversed(order):
        gradient = gradients.pop(id(value), None)
        if gradient is None:
            continue
        yield value, gradient
        if value.node is not None:
            backprop_node(value, gradient, gradients, differentiable)


def backprop_node(value: Any, g: Any, gradients: dict[int, Any], differentiable: bool) -> None:
    """Apply the chain rule to one node: from the gradient `g` of `value`, add to the `gradients` of its inputs.

    Rules receive arrays or, with `differentiable`, values: then what they compute is recorded.
    """
    node = value.node
    op, inputs, y, operands = node.op, node.inputs, value._data, node.arrays
    if differentiable:
        y, operands = value, [x if is_value(x) else a for x, a in zip(inputs, operands, strict=True)]
        if op.composition is not None:
            backprop_composition(node, operands, g, gradients)
            return
    call = (g, y, *node.residuals, *operands)
    rules, kwargs, joint = op.rules, node.kwargs, None
    if op.joint_rule is not None:
        joint = apply_joint_rule(node, call, differentiable)
    for i in node.needed:
        if joint is not None:
            gradient = joint[i]
        else:
            rule = rules[i] if rules is not None else rule_of(op, i)
            try:
                gradient = rule(*call, **kwargs) if kwargs else rule(*call)  # an empty ** costs time
            except TypeError as error:
                check_signature(node, i, rule, call)
                raise error
        x = operands[i]
        # Most gradients fit already; `is` is faster than ==, and `match_operand` accepts what it lets through.
        if gradient.__class__ is not x.__class__ or gradient.shape != x.shape or gradient.dtype is not x.dtype:
            gradient = match_operand(gradient, x, op, i)
        key = id(inputs[i])
        gradients[key] = add_gradients(gradients[key], gradient) if key in gradients else gradient


def backprop_composition(node: Node, operands: list[Any], g: Any, gradients: dict[int, Any]) -> None:
    """Differentiate a fused node through its composition: run that, and propagate `g` through the nodes it makes."""
    assert node.op.composition is not None
    start = tick()
    y = node.op.composition(*operands, **node.kwargs)
    if y.requires_grad:
        gradients[id(y)] = add_gradients(gradients[id(y)], g) if id(y) in gradients else g
    for inner in reversed(toposort([y], newer_than=start)):
        if inner.node is not None and id(inner) in gradients:
            backprop_node(inner, gradients.pop(id(inner)), gradients, differentiable=True)


def apply_joint_rule(node: Node, call: tuple[Any, ...], differentiable: bool) -> Sequence[Any]:
    """The gradients that a joint rule returns, one or None per argument."""
    op = node.op
    assert op.joint_rule is not None
    if differentiable:
        raise TypeError(
            f"primitive {op.name!r} has a joint rule only, which gives no second derivatives: write its composition "
            f"from simpler primitives, and register it with @{op.name}.composed_of"
        )
    gradients = op.joint_rule(*call, **node.kwargs)
    n, wanted = len(gradients), len(node.inputs)
    if n != wanted:
        raise TypeError(f"the joint rule of {op.name!r} returned {n} gradients for {wanted} arguments")
    return gradients


def rule_of(op: Primitive[..., Any], i: int) -> Any:
    """The rule of argument `i`; TypeError if there is none."""
    rule = op.rule(i)
    if rule is None:
        raise TypeError(
            f"primitive {op.name!r} has no derivative rule for its argument {op.argument_name(i)!r}: give it one per "
            f"argument with {op.name}.vjps(...), or pass a tensor that needs no gradient"
        )
    return rule


def check_signature(node: Node, i: int, rule: Any, call: tuple[Any, ...]) -> None:
    """Raise TypeError if the rule of argument `i` does not take what rules are called with."""
    try:
        inspect.signature(rule).bind(*call, **node.kwargs)
    except TypeError as error:
        op = node.op
        residuals = [f"residual_{k}" for k in range(len(node.residuals))]
        operands = [op.argument_name(k) for k in range(len(node.inputs))]
        arguments = ", ".join(["g", "y", *residuals, *operands, *node.kwargs])
        raise TypeError(
            f"the rule of primitive {op.name!r} for its argument {op.argument_name(i)!r} is called as "
            f"rule({arguments}), where y is the result; it does not accept that: {error}"
        ) from None


def add_gradients(a: Any, b: Any) -> Any:
    """`a + b`, as an array where NumPy alone would give a scalar (of 0-d arrays)."""
    result = a + b
    return result if result.__class__ is ndarray or is_value(result) else np.asarray(result)


def match_operand(gradient: Any, x: Any, op: Primitive[..., Any], i: int) -> Any:
    """Convert what a rule returned for `x` to the shape and dtype of `x`, and to a value if `x` is one."""
    if gradient is None:
        raise TypeError(f"the rule of primitive {op.name!r} for its argument {op.argument_name(i)!r} returned None")
    if is_value(x) and not is_value(gradient):
        gradient = type(x)(gradient)
    elif gradient.__class__ is not ndarray and not is_value(gradient):
        gradient = np.asarray(gradient)
    if gradient.dtype.kind not in "fiub":
        raise TypeError(
            f"the rule of primitive {op.name!r} for its argument {op.argument_name(i)!r} must return real numbers, got "
            f"{gradient.dtype}"
        )
    if gradient.shape != x.shape:
        gradient = unbroadcast(gradient, x, op, i)
    return gradient if gradient.dtype == x.dtype else gradient.astype(x.dtype)


def unbroadcast(gradient: Any, x: Any, op: Primitive[..., Any], i: int) -> Any:
    """Sum `gradient` over the axes along which `x` was broadcast: those added in front, and those of length 1."""
    added = gradient.ndim - len(x.shape)
    trailing = gradient.shape[added:] if added >= 0 else ()
    stretched = tuple(added + k for k, (n, m) in enumerate(zip(trailing, x.shape, strict=False)) if m == 1 and n != 1)
    if added < 0 or any(n != m and m != 1 for n, m in zip(trailing, x.shape, strict=True)):
        raise ValueError(
            f"the rule of primitive {op.name!r} for its argument {op.argument_name(i)!r} returned a gradient of shape "
            f"{gradient.shape}; expected {tuple(x.shape)}, or a shape that {tuple(x.shape)} broadcasts to"
        )
    if added or stretched:
        axes = tuple(range(added)) + stretched
        if gradient.size > MANY and gradient.__class__ is ndarray and axes == tuple(range(len(axes))):
            gradient = sum_leading(gradient, len(axes))
        else:
            gradient = gradient.sum(axis=axes, keepdims=True)
    return gradient.reshape(x.shape)


def backward(root: Any, seed: ndarray, leaves_only: bool = False) -> None:
    """Compute gradients: add them to the `.grad` of leaves, and store them as the `.grad` of intermediates.

    With `leaves_only` the `.grad` of intermediates is not touched. Nothing is stored before the sweep has succeeded.
    Every `.grad` is a new array, shared with nothing.
    """
    received = [(value, g) for value, g in sweep(root, seed) if value.node is None or not leaves_only]
    results = []
    for value, g in received:
        accumulates = value.node is None and value.grad is not None
        results.append(add_gradients(value.grad, g) if accumulates else g.copy())
    for (value, _), gradient in zip(received, results, strict=True):
        value.grad = gradient
