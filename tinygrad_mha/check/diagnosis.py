"""`doctor`: what is wrong with a training step, found by observing every operation of it."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import types
import zlib
from typing import Any, NamedTuple, Self

import numpy as np

from tinygrad_mha import engine
from tinygrad_mha.check.gradient_check import is_floating
from tinygrad_mha.check.verdict import PACKAGE, Finding, Verdict
from tinygrad_mha.engine import Node
from tinygrad_mha.modes import SCOPE, STATE, enter, leave
from tinygrad_mha.nn.layers import Dropout
from tinygrad_mha.nn.module import Module, Scope, walk
from tinygrad_mha.primitives import Primitive
from tinygrad_mha.tensors import Tensor, plain

__all__ = ["doctor", "find_line", "quote_line"]

MOST_NAMES = 5


class SourcedNode(Node):
    """A node that knows the line of the user's code that made it."""

    __slots__ = ("source",)
    source: str | None


class Event(NamedTuple):
    """One operation of the step."""

    op: Primitive[..., Any]
    inputs: tuple[Any, ...]
    out: Tensor
    path: str  # of the module that did it
    line: str  # of the user's code
    has_grad: bool  # whether gradients were on

    def operands(self, role: str) -> list[Any]:
        """The inputs in this role of the primitive."""
        return [x for i, x in enumerate(self.inputs) if self.op.role(i) == role]

    def __str__(self) -> str:
        inside = f" in {self.path}" if self.path else ""
        return f"{self.op.name!r}{inside} at {quote_line(self.line)}"


class doctor(Verdict):  # noqa: N801 (used like a function)
    """Observe one training step, and name what is wrong with it: `with check.doctor(model, optimizer) as d:`.

    Inside stands one step: the forward, `loss.backward()` and, if you like, `optimizer.step()`. Afterwards
    `d.findings` lists what is wrong, nothing if the step is sound. Found are, by their names:

    - "gradient": parameters that receive none, and where their path to the loss was cut
    - "finite": the first value or gradient that is nan or infinite; -inf where a mask puts it is none
    - "edited": arrays that were written to between the forward and the backward
    - "dtype": an operation whose float32 input became float64
    - "mode": eval mode in training, or train mode under no_grad
    - "cleared": gradients of an earlier step that `backward` adds to
    - "loss": one that no parameter changes, or whose targets are its inputs
    - "optimizer": parameters that it does not hold, or that the model does not; a learning rate of 0

    An exception passes through unchanged: `problem` holds it, and the findings up to it can be read. The block observes
    its own thread or task. One doctor can be used again, for the next step; two at a time raise RuntimeError. Inside,
    every value of the step stays in memory, and `node.source` is the line of your code that made it.

    Args:
        model: the module that is trained. Parameters with requires_grad=False are frozen on purpose.
        optimizer: the one that holds its parameters.

    Example:
        >>> model = tg.nn.GPT(tg.nn.GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=6))
        >>> with doctor(model) as d:
        ...     model.loss([[3, 1, 4]], [[3, 1, 4]]).backward()
        >>> print(d)
        GPT: FAILED (loss)
          FAILED  loss  the targets are the inputs, so the model learns to copy
                        cause: targets are not shifted: pass ids[:-1] as inputs and ids[1:] as targets
    """

    def __init__(self, model: Module, optimizer: Any = None) -> None:
        if not isinstance(model, Module):
            raise TypeError(f"doctor observes a Module, got {type(model).__name__}")
        if optimizer is not None and not (hasattr(optimizer, "parameters") and hasattr(optimizer, "groups")):
            raise TypeError(f"doctor takes an optimizer of tg.optim, got {type(optimizer).__name__}")
        super().__init__(type(model).__name__)
        self.model, self.optimizer = model, optimizer

    def __enter__(self) -> Self:
        if STATE.get().observer is not None:
            raise RuntimeError("another doctor observes this thread: one block is one step, and blocks are not nested")
        self.findings, self.problem = [], ""
        self._tensors = {id(x): path for path, x in reversed(list(walk(self.model))) if isinstance(x, Tensor)}
        self._modules = {id(module): (path, module) for path, module in self.model.named_modules()}
        self._varying = [pair for pair in self._modules.values() if depends_on_mode(pair[1])]
        self._events: list[Event] = []
        self._made: set[int] = set()  # results of operations, by identity
        self._masked: set[int] = set()  # values with -inf on purpose
        self._evaluates = False  # whether the model is called under no_grad
        self._reached: set[int] = set()  # what some loss was computed from
        self._checksums: dict[tuple[int, int], int] = {}  # of leaves when they were first used, by time of writing
        self._old_gradients = {id(p): p.grad for p in self.model.parameters() if p.grad is not None and p.grad.any()}
        enter(self, observer=self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        leave(self, "observer")
        if error is not None:
            self.problem = f"{type(error).__name__}: {error}"
        elif not self._events:
            self.problem = "no operation was observed: the step belongs inside the block, in the same thread"
        if error is None or self._reached:
            self._check_parameters()
        if self._evaluates and not self._reached:
            self._check_mode(True, "call model.eval() to evaluate", self.model)
        if self.optimizer is not None:
            self._check_optimizer()
        self._events = []  # which hold all values of the step

    # ------------------------------------------------------------------------------------------- what the step calls

    def applied(self, op: Primitive[..., Any], inputs: tuple[Any, ...], out: Tensor) -> None:
        """Called after each operation."""
        grad_on, scope = STATE.get().grad, SCOPE.get()
        path = ".".join(entry.name for entry in scope if getattr(entry, "name", ""))
        event = Event(op, inputs, out, path, find_line(), grad_on)
        if out.node is not None:
            out.node = add_source(out.node, event.line)
        self._check_values(event)
        self._check_dtype(event)
        modules = [entry.module() for entry in scope if isinstance(entry, Scope)]
        if not grad_on and any(id(module) in self._modules for module in modules):
            self._evaluates = True
            self._check_mode(True, f"call model.eval() before {event}")
        for x in inputs:
            if isinstance(x, Tensor) and id(x) not in self._made and (id(x), written_at(x)) not in self._checksums:
                self._checksums[id(x), written_at(x)] = checksum(x)
        self._events.append(event)
        self._made.add(id(out))

    def backward(self, root: Tensor) -> None:
        """Called before each backward pass."""
        graph = {id(x) for x in engine.toposort([root])}
        self._reached |= graph
        self._check_mode(False, "call model.train() before the step", self.model)
        parameters = self.model.named_parameters()
        if not any(id(p) in graph for _, p in parameters):
            self._report("loss", "the loss does not depend on any parameter of the model")
        old = [name for name, p in parameters if p.grad is not None and p.grad is self._old_gradients.get(id(p))]
        if old:
            cause = "call optimizer.zero_grad() or model.zero_grad() before backward"
            self._report("cleared", f"backward adds to gradients of an earlier step: {join(old)}", cause)
        for event in self._events:
            if id(event.out) in graph:
                self._check_written(event)
                self._check_targets(event)

    def returned(self, root: Tensor) -> None:
        """Called after each backward pass."""
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        rounding = np.finfo(root.dtype).eps * np.abs(root.numpy()).max(initial=0.0)
        if gradients and max(np.abs(g).max(initial=0.0) for g in gradients.values()) <= rounding:
            self._report("loss", "the gradient of every parameter is 0 up to rounding: the loss is constant")
        bad = [name for name, g in gradients.items() if not np.isfinite(g).all()]
        if bad:
            sweep = engine.sweep(root, np.ones_like(root.numpy()))
            value = next((x for x, g in sweep if not np.isfinite(g).all()), None)
            users = [event for event in self._events if any(x is value for x in event.inputs)]
            cause = f"the derivative of {users[-1]} is not finite" if users else ""
            self._report("finite", f"gradients are not finite: {join(bad)}", cause)

    # ------------------------------------------------------------------------------------------------------- findings

    def _report(self, name: str, message: str, cause: str = "") -> None:
        """Add a finding. What follows from the first one of these names is not reported."""
        if not (name in ("finite", "dtype", "mode", "cleared") and any(f.name == name for f in self.findings)):
            self.findings.append(Finding(name, "failed", message, cause))

    def _name(self, x: Any) -> str:
        path = self._tensors.get(id(x))
        return path or getattr(x, "name", None) or f"an array of shape {np.shape(plain(x))}"

    def _check_values(self, event: Event) -> None:
        """Report the first value that is nan or infinite, unless it is -inf on purpose."""
        for x in (*event.inputs, event.out):
            array = plain(x)
            if id(x) in self._made or not is_floating(array) or np.isfinite(array).all():
                continue
            masks = event.op.kind == "mask" or any(id(i) in self._masked for i in event.inputs)
            if np.less(array, np.inf).all() and (masks if x is event.out else not getattr(x, "requires_grad", False)):
                self._masked.add(id(x))
                continue
            bad = np.ravel(array)[~np.isfinite(np.ravel(array))]
            what = f"{bad[0]} in {bad.size} of {np.size(array)} elements"
            if x is event.out:
                operands = [plain(i) for i in event.inputs if is_floating(plain(i))]
                ranges = ", ".join(f"{np.min(a):.3g} to {np.max(a):.3g}" for a in operands if np.size(a))
                self._report("finite", f"the first value that is not finite is {what}", f"{event}, of values {ranges}")
            else:
                self._report("finite", f"{self._name(x)} has {what} before the step", f"first used by {event}")

    def _check_dtype(self, event: Event) -> None:
        """Report the first float32 value that depends on a parameter and becomes float64, unless by a conversion."""
        narrow = [x for x in event.inputs if isinstance(x, Tensor) and x.requires_grad and x.dtype == np.float32]
        if narrow and event.out.dtype == np.float64 and event.op.name != "cast":
            wide = [self._name(x) for x in event.inputs if getattr(x, "dtype", None) == np.float64]
            cause = f"float64 is {join(wide) or 'what the operation returns'}: use .astype(np.float32)"
            self._report("dtype", f"float32 becomes float64 by {event}", cause)

    def _check_mode(self, training: bool, cause: str, root: Module | None = None) -> None:
        """Report `root`, and modules that compute something else in training, in this mode, but for frozen ones."""
        modules = (
            self._varying if root is None else [("", root), *(pair for pair in self._varying if pair[1] is not root)]
        )
        wrong = [(path, module) for path, module in modules if module.training == training]
        found = [path or type(module).__name__ for path, module in wrong if training or not self._is_frozen(path)]
        if found:
            mode = "train mode under no_grad" if training else "eval mode in a training step"
            self._report("mode", f"{mode}: {join(found)}", cause)

    def _is_frozen(self, path: str) -> bool:
        """Whether a module around the one of this path has tensors, and none of them is trained."""
        around = [m for p, m in self._modules.values() if p and path.startswith(f"{p}.")]
        return any(list(m.state_dict()) and not m.parameters() for m in around)

    def _check_written(self, event: Event) -> None:
        """Report operands that were written to since the operation had used them."""
        assert event.out.node is not None
        for x in event.inputs:
            if not isinstance(x, Tensor):
                continue
            is_tracked = written_at(x) > event.out.node.stamp
            before = self._checksums.get((id(x), written_at(x)))
            if is_tracked or (before is not None and before != checksum(x)):
                how = "by assign_, .data = or an optimizer" if is_tracked else "through its array, as in t.data[0] = 1"
                cause = f"{event} used the old values: write after backward, or run the forward again"
                self._report("edited", f"{self._name(x)} was written to before backward, {how}", cause)

    def _check_targets(self, event: Event) -> None:
        """Report targets that are all that a model with attention reads, so that it learns to copy."""
        assert event.out.node is not None
        if not any(module.is_attention for _, module in self._modules.values()):
            return
        ignored = event.out.node.kwargs.get("ignore_index")
        for x in event.operands("targets"):
            targets = np.asarray(plain(x))
            valid = targets != ignored
            ids = [np.asarray(plain(x)) for e in self._events for x in e.operands("ids")]
            read = [a[..., : targets.shape[-1]] if a.ndim == targets.ndim else a.ravel() for a in ids if targets.ndim]
            read = [a for a in read if a.shape == targets.shape and (np.diff(a) != 1).any()]  # no positions
            is_copy = read and all((np.equal(a, targets) | ~valid).all() for a in read)
            if is_copy and len(np.unique(targets[valid])) > 1:
                cause = "targets are not shifted: pass ids[:-1] as inputs and ids[1:] as targets"
                self._report("loss", "the targets are the inputs, so the model learns to copy", cause)

    def _check_parameters(self) -> None:
        """Report parameters that no loss reached, by what cut their path, and those that are not finite."""
        # Where a path could go on behind a cut: leaves and constants that are not of the model.
        leaves = [
            (event, x)
            for event in self._events
            for x in event.inputs
            if id(x) not in self._made and id(x) not in self._tensors and is_floating(plain(x)) and np.ndim(plain(x))
        ]
        groups: dict[str, list[str]] = {}
        for name, p in self.model.named_parameters():
            if not np.isfinite(p.numpy()).all():
                self._report("finite", f"{name} is not finite after the step", "the learning rate may be too large")
            if id(p) not in self._reached and any(event.out.requires_grad for event in self._events):
                cause = self._explain_cut(p, leaves) if self._reached else "backward was not called"
                groups.setdefault(cause, []).append(name)
        for cause, names in groups.items():
            self._report("gradient", f"no gradient: {join(names)}", cause)

    def _explain_cut(self, p: Tensor, leaves: list[tuple[Event, Any]]) -> str:
        """Where the path from a parameter to the loss ends."""
        dead, uses = {id(p): p}, []
        for event in self._events:
            if id(event.out) not in self._reached and any(id(x) in dead for x in event.inputs):
                dead[id(event.out)] = event.out
                uses.append(event)
        for (event, x), end in itertools.product(leaves, dead.values()):
            if np.shares_memory(plain(x), end.numpy()):
                return f"cut by {'detach()' if isinstance(x, Tensor) else '.numpy() or .data'}: {event} uses the result"
            if np.array_equal(plain(x), end.numpy()) and np.ptp(plain(x)) > 0:
                return f"cut by .numpy() or .data: {event} uses a copy of the numbers"
        off = next((event for event in uses if not event.has_grad), None)
        if off is not None:
            return f"cut by no_grad: {off}"
        if uses:
            return f"the loss uses nothing of {uses[-1]}: the result was dropped, or taken out by .numpy() or .item()"
        return "never used in the step"

    def _check_optimizer(self) -> None:
        """Report parameters that only the model or only the optimizer holds, and a learning rate of 0."""
        held = {id(p): p for p in self.optimizer.parameters}
        missing = [name for name, p in self.model.named_parameters() if id(p) not in held]
        foreign = [self._name(p) for key, p in held.items() if key not in self._tensors]
        if missing:
            cause = "make the optimizer from model.parameters() when the model is complete, or freeze these"
            self._report("optimizer", f"the optimizer does not hold {join(missing)}", cause)
        if foreign:
            cause = "make the optimizer from the parameters of the model that is trained, not of a copy"
            self._report("optimizer", f"the optimizer holds what is not in the model: {join(foreign)}", cause)
        if any(group["lr"] == 0 for group in self.optimizer.groups):
            self._report("optimizer", "the learning rate is 0, so optimizer.step() changes nothing")


# --------------------------------------------------------------------------------------------------------------------
# Facts


def find_line() -> str:
    """The innermost line of code outside of this package, "train.py:12"."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    return f"{os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file}:{frame.f_lineno}"


def quote_line(line: str) -> str:
    """A line that `find_line` found with its code: "train.py:12: loss = model(x)"."""
    file, _, number = line.rpartition(":")
    code = linecache.getline(file, int(number)).strip() if file else ""
    return f"{line}: {code}" if code else line


def add_source(node: Node, line: str) -> SourcedNode:
    """The same node with the line that made it."""
    twin = SourcedNode.__new__(SourcedNode)
    for name in Node.__slots__:
        setattr(twin, name, getattr(node, name))
    twin.source = line
    return twin


def written_at(x: Tensor) -> int:
    """The time of the last tracked write to the memory of a tensor."""
    return 0 if x._written is None else x._written.stamp


def checksum(x: Tensor) -> int:
    return zlib.crc32(np.ascontiguousarray(x.numpy()).data)


def depends_on_mode(module: Module) -> bool:
    """Whether a module computes something else in training: dropout, or code that reads `training`."""
    if isinstance(module, Dropout):
        return module.p > 0
    kinds = itertools.takewhile(lambda kind: kind is not Module, type(module).__mro__)
    functions = (f for kind in kinds for f in vars(kind).values() if isinstance(f, types.FunctionType))
    return any("training" in f.__code__.co_names for f in functions)


def join(names: list[str]) -> str:
    """The first names, and how many there are."""
    return ", ".join(names[:MOST_NAMES]) + (f", ... ({len(names)} in all)" if len(names) > MOST_NAMES else "")
