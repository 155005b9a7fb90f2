"""How a gradient travels: nodes, their order, the place where gradients are summed back and stored.

The engine works on *values*: anything with `.node`, `.requires_grad`, `.shape`, `.dtype` and the array `._data`. A
value without a node is a leaf. A node holds its inputs and never its output, so there are no cycles, and an
intermediate dies by reference count as soon as nothing needs it.

One clock orders everything. A node takes the time at which it was made, a write to a leaf takes the time at which it
happened: sorting by time is a topological sort, and a leaf written after a node has used it is seen by comparing two
integers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy import ndarray

from tinygrad_mha.primitives import Primitive

tick = itertools.count(1).__next__


class Node:
    """How a value was made: the primitive `op` applied to `inputs` (values and constants) with `kwargs`.

    `needed` are the positions of the inputs that need a gradient, `arrays` the operands as the forward saw them,
    `residuals` what it left for its rules, `stamp` the time, `scope` the path of modules being called, `source` the
    user's line where somebody asked for it.
    """

    __slots__ = ("arrays", "inputs", "kwargs", "needed", "op", "residuals", "scope", "source", "stamp")

    def __init__(
        self,
        op: Primitive,
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
        self.source = None
        self.stamp = tick()


class WriteTime:
    """When memory was last written to; shared by all values that share the memory."""

    __slots__ = ("stamp",)
    latest: ClassVar[int] = 0  # of all memory: while it is older than a graph, nothing in that graph can be stale

    def __init__(self) -> None:
        self.stamp = 0

    def touch(self) -> None:
        self.stamp = WriteTime.latest = tick()


# --------------------------------------------------------------------------------------------------------------------
# What is being recorded: per thread and per task


class State(NamedTuple):
    """Whether gradients are on, whether nodes are recorded though nothing needs a gradient, and the module path."""

    grad: bool = True
    record: bool = False
    scope: tuple[Any, ...] = ()


STATE: ContextVar[State] = ContextVar("tinygrad_mha", default=State())  # noqa: B039 (a State is immutable)


class Mode:
    """A change of `State`, as a context manager and as a decorator of functions, coroutines and generators.

    A decorated generator runs each of its steps in the mode, and its caller keeps its own mode in between.
    """

    change: ClassVar[dict[str, Any]]

    def __new__(cls, function: Callable[..., Any] | None = None) -> Any:
        mode = super().__new__(cls)
        mode.before = []
        return mode if function is None else mode(function)

    before: list[State]

    def __enter__(self) -> None:
        state = STATE.get()
        self.before.append(state)
        STATE.set(state._replace(**self.change))

    def __exit__(self, *exception: object) -> None:
        # Only our own fields go back: a scope opened inside and still open is not ours to close.
        before = self.before.pop()
        STATE.set(STATE.get()._replace(**{field: getattr(before, field) for field in self.change}))

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        mode = type(self)
        if inspect.isclass(function) or not callable(function):
            raise TypeError(f"{mode.__name__} decorates functions, got {function!r}")
        if inspect.isasyncgenfunction(function):
            raise TypeError(f"{mode.__name__} does not decorate asynchronous generators: use `with` inside of them")

        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def steps(*args: Any, **kwargs: Any) -> Iterator[Any]:
                with mode():
                    generator = function(*args, **kwargs)
                return (yield from _Stepped(generator, mode))

            return steps

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def coroutine(*args: Any, **kwargs: Any) -> Any:
                with mode():
                    return await function(*args, **kwargs)

            return coroutine

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return function(*args, **kwargs)

        return call


class _Stepped:
    """A generator whose every resume happens inside a mode; `yield from` forwards send, throw and close to it."""

    def __init__(self, generator: Any, mode: type[Mode]) -> None:
        self.generator = generator
        self.mode = mode

    def __iter__(self) -> _Stepped:
        return self

    def __next__(self) -> Any:
        with self.mode():
            return next(self.generator)

    def send(self, value: Any) -> Any:
        with self.mode():
            return self.generator.send(value)

    def throw(self, *error: Any) -> Any:
        with self.mode():
            return self.generator.throw(*error)

    def close(self) -> None:
        with self.mode():
            self.generator.close()


class no_grad(Mode):  # noqa: N801 (used like a function)
    """Nothing computed inside asks for a gradient: `with no_grad():` or `@no_grad`."""

    change: ClassVar = {"grad": False}


class enable_grad(Mode):  # noqa: N801
    """Gradients are on inside, whatever is around it: `with enable_grad():` or `@enable_grad`."""

    change: ClassVar = {"grad": True}


class record(Mode):  # noqa: N801
    """Nodes are recorded though nothing needs a gradient, so that inference can be drawn: `with record():`."""

    change: ClassVar = {"record": True}


def is_grad_enabled() -> bool:
    """Whether operations on values that need a gradient are being recorded, in this thread and task."""
    return STATE.get().grad


class scope:  # noqa: N801 (used like a function)
    """Nodes made inside carry `entry` as the innermost part of their scope: `with scope(entry):`."""

    __slots__ = ("before", "entry")

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def __enter__(self) -> None:
        grad, recording, self.before = STATE.get()
        STATE.set(State(grad, recording, (*self.before, self.entry)))

    def __exit__(self, *exception: object) -> None:
        grad, recording, _ = STATE.get()
        STATE.set(State(grad, recording, self.before))


# --------------------------------------------------------------------------------------------------------------------
# Order


def toposort(roots: Iterable[Any], newer_than: int = -1, everything: bool = False) -> list[Any]:
    """The values that `roots` were made from and the roots themselves, each once, inputs before what is made of them.

    Only values that need a gradient are followed, unless `everything` is asked for; nodes made at `newer_than` or
    before are not entered. Iterative, so a chain of any length is fine.
    """
    seen: set[int] = set()
    leaves, made = [], []
    stack = [root for root in roots if everything or root.requires_grad]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        node = value.node
        if node is None:
            leaves.append(value)
        elif node.stamp > newer_than:
            made.append(value)
            if everything:
                stack.extend([x for x in node.inputs if hasattr(x, "requires_grad")])
            else:
                inputs = node.inputs
                for i in node.needed:
                    stack.append(inputs[i])
    made.sort(key=attrgetter("node.stamp"))
    return leaves + made


def check_unwritten(order: list[Any]) -> None:
    """Raise if an operand was overwritten after a node used it: its rule would see the wrong numbers."""
    nodes = [value.node for value in order if value.node is not None]
    if not nodes or WriteTime.latest < nodes[0].stamp:
        return
    for node in nodes:
        for i, x in enumerate(node.inputs):
            written = getattr(x, "_written", None)
            if written is not None and written.stamp > node.stamp:
                name = f"{x.name!r}, " if x.name else ""
                raise RuntimeError(
                    f"the tensor {name}shape {x.shape}, was written to after {node.op.name!r} used it as its argument "
                    f"{node.op.argument(i)!r}; run the forward again, or call backward before you write "
                    f"(an optimizer step, assign_ and the .data setter write)"
                )


# --------------------------------------------------------------------------------------------------------------------
# Gradients


def sweep(root: Any, seed: Any, differentiable: bool = False, newer_than: int = -1) -> Iterator[tuple[Any, Any]]:
    """Yield each value that `root` was made from with its whole gradient, from the root down; leaves come last.

    A value's gradient is complete when it is yielded: all that is made from it was visited before. With
    `differentiable`, seed and gradients are values themselves and remember how they were made.
    """
    order = toposort([root], newer_than)
    check_unwritten(order)
    step = pull_differentiably if differentiable else pull
    gradients = {id(root): seed}
    for value in reversed(order):
        gradient = gradients.pop(id(value), None)
        if gradient is None:
            continue
        yield value, gradient
        if value.node is not None:
            step(value, gradient, gradients)


def pull(value: Any, g: ndarray, gradients: dict[int, Any]) -> None:
    """Add what the gradient `g` of `value` means for each input of its node to `gradients`."""
    node = value.node
    op, inputs, arrays = node.op, node.inputs, node.arrays
    if op.joint_rule is not None:
        answers = op.joint_rule(g, value._data, *node.residuals, *arrays, **node.kwargs)
        if len(answers) != len(inputs):
            raise TypeError(f"the joint rule of {op.name!r} gave {len(answers)} gradients for {len(inputs)} arguments")
        for i in node.needed:
            if answers[i] is None:
                raise no_rule(op, i)
            add(gradients, inputs[i], fit(answers[i], arrays[i], op, i))
        return
    rules, kwargs = op.rules, node.kwargs
    operands = (g, value._data, *node.residuals, *arrays)
    for i in node.needed:
        rule = rules[i] if rules is not None else rule_of(op, i)
        gradient = rule(*operands, **kwargs) if kwargs else rule(*operands)
        x = arrays[i]
        if gradient.__class__ is not ndarray or gradient.shape != x.shape or gradient.dtype is not x.dtype:
            gradient = fit(gradient, x, op, i)
        key = id(inputs[i])
        gradients[key] = total(gradients[key], gradient) if key in gradients else gradient


def pull_differentiably(value: Any, g: Any, gradients: dict[int, Any]) -> None:
    """The same with rules that see tensors, so that what they compute is itself recorded."""
    node = value.node
    op = node.op
    operands = [x if hasattr(x, "requires_grad") else a for x, a in zip(node.inputs, node.arrays, strict=True)]
    if op.composition is not None:
        # A fused node is differentiated through its composition: run that now, and sweep over just what it makes.
        start = tick()
        again = op.composition(*operands, **node.kwargs)
        if again.requires_grad:
            add(gradients, again, g)
        for inner in reversed(toposort([again], newer_than=start)):
            if inner.node is not None and id(inner) in gradients:
                pull_differentiably(inner, gradients.pop(id(inner)), gradients)
        return
    if op.joint_rule is not None:
        raise TypeError(f"primitive {op.name!r} has a joint rule only: name its composition for second derivatives")
    for i in node.needed:
        gradient = rule_of(op, i)(g, value, *node.residuals, *operands, **node.kwargs)
        if not hasattr(gradient, "requires_grad"):
            gradient = type(g)(gradient)
        add(gradients, node.inputs[i], fit(gradient, node.inputs[i], op, i))


def rule_of(op: Primitive, i: int) -> Any:
    """The rule of argument `i`, which needs one."""
    rule = op.rule(i)
    if rule is None:
        raise no_rule(op, i)
    return rule


def no_rule(op: Primitive, i: int) -> TypeError:
    return TypeError(
        f"primitive {op.name!r} has no derivative rule for its argument {op.argument(i)!r}: give it one per argument "
        f"with {op.name}.vjps(...), or pass a tensor that needs no gradient"
    )


def add(gradients: dict[int, Any], x: Any, gradient: Any) -> None:
    """Add one contribution to the gradient of `x`."""
    key = id(x)
    gradients[key] = total(gradients[key], gradient) if key in gradients else gradient


def total(a: Any, b: Any) -> Any:
    """`a + b`; of 0-d arrays too it is an array, where NumPy alone would give a scalar."""
    result = a + b
    return result if result.__class__ is ndarray or hasattr(result, "requires_grad") else np.asarray(result)


def fit(gradient: Any, x: Any, op: Primitive, i: int) -> Any:
    """What a rule returned for `x`, in the shape and dtype of `x`."""
    if gradient is None:
        raise TypeError(f"the rule of primitive {op.name!r} for its argument {op.argument(i)!r} returned None")
    if gradient.__class__ is not ndarray and not hasattr(gradient, "requires_grad"):
        gradient = np.asarray(gradient)
    if gradient.shape != x.shape:
        gradient = unbroadcast(gradient, x, op, i)
    return gradient if gradient.dtype == x.dtype else gradient.astype(x.dtype)


def unbroadcast(gradient: Any, x: Any, op: Primitive, i: int) -> Any:
    """Sum `gradient` over the axes along which `x` was broadcast: those added in front, and those of length 1."""
    added = gradient.ndim - len(x.shape)
    trailing = gradient.shape[added:] if added >= 0 else ()
    stretched = tuple(added + k for k, (n, m) in enumerate(zip(trailing, x.shape, strict=False)) if m == 1 and n != 1)
    if added < 0 or any(n != m and m != 1 for n, m in zip(trailing, x.shape, strict=True)):
        raise ValueError(
            f"the rule of primitive {op.name!r} for its argument {op.argument(i)!r} returned a gradient of shape "
            f"{gradient.shape}; expected {tuple(x.shape)}, or a shape that {tuple(x.shape)} broadcasts to"
        )
    if added or stretched:
        gradient = gradient.sum(axis=tuple(range(added)) + stretched, keepdims=True)
    return gradient.reshape(x.shape)


def backward(root: Any, seed: ndarray, leaves_only: bool = False) -> None:
    """Leaves add what they receive to `.grad`, intermediates are overwritten (left alone with `leaves_only`).

    Nothing is stored before the sweep has succeeded. Every `.grad` is a fresh array, shared with nobody.
    """
    received = [(value, g) for value, g in sweep(root, seed) if value.node is None or not leaves_only]
    totals = [
        g.copy() if value.node is not None or value.grad is None else total(value.grad, g) for value, g in received
    ]
    for (value, _), gradient in zip(received, totals, strict=True):
        value.grad = gradient
