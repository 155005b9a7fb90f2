"""Where each value belongs: the tree of frames, one for each module of the run, and which module owns which leaf.

A node records in which modules it was made, so a computed value belongs to the innermost of them. A leaf belongs to the
module that owns it. A parameter without a known owner belongs to the module that first uses it, or to the innermost
frame that holds all of its users, so that W_Q1 stands in "head 1". Inputs stand outside of all modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from tinygrad_mha.nn.module import Module, Scope, walk
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.viz.diagram.picture import Kind
from tinygrad_mha.viz.diagram.record import BACKWARD, FORWARD, Run, Value, as_run
from tinygrad_mha.viz.diagram.roles import decide_kind, weight_role

__all__ = ["Frame", "Modules", "Pattern", "arrange_modules", "contract_modules", "entry_key", "matches"]

Pattern = str | Callable[[str], bool]


@dataclass(frozen=True, eq=False, repr=False)
class Frame:
    """A module of the run, or another entry that was pushed with `modes.scope`."""

    scope: Scope
    parent: Frame | None
    forward: Frame | None = None  # in the backward pass: the frame whose gradients are in here

    @property
    def name(self) -> str:
        """The name of the module in its parent; "" for the outermost module."""
        return self.scope.name

    @property
    def kind(self) -> str:
        """The class of a module; "" for other entries."""
        return self.scope.kind

    @property
    def module(self) -> Module | None:
        """The module; None if it was freed or the entry is not a module."""
        return self.scope.module()

    @property
    def path(self) -> str:
        """The names of the enclosing modules and its own: h.0.attn."""
        return ".".join(frame.name for frame in reversed(self.enclosing) if frame.name)

    @property
    def enclosing(self) -> list[Frame]:
        """This frame and all frames around it, inner ones first."""
        frames = [self]
        while frames[-1].parent is not None:
            frames.append(frames[-1].parent)
        return frames


@dataclass(frozen=True)
class Modules:
    """The frames of a run and what belongs to them.

    Attributes:
        root: the frame around everything, which is not drawn.
        children: the frames directly inside of each frame, in the order of the run.
        members: the values that belong directly to each frame, in the order of the run.
        frame_of: the frame that each value belongs to.
        kinds: what each value is.
        names: the names that modules have for the leaves that they own.
        parameters: a line about the parameters of each frame: how many, or to which module they are tied.
    """

    root: Frame
    children: dict[Frame, list[Frame]]
    members: dict[Frame, list[Value]]
    frame_of: dict[Value, Frame]
    kinds: dict[Value, Kind]
    names: dict[Value, str]
    parameters: dict[Frame, str]

    def inside(self, frame: Frame) -> list[Frame]:
        """The frame and all frames in it, outer ones first."""
        return list_inside(self.children, frame)

    def contents(self, frame: Frame) -> list[Value]:
        """All values in a frame, frame by frame."""
        return [value for inner in self.inside(frame) for value in self.members[inner]]


class FrameTree:
    """The frames that were entered so far."""

    def __init__(self) -> None:
        self.root = Frame(Scope(""), None)
        self.children: dict[Frame, list[Frame]] = {self.root: []}
        self._known: dict[Any, Frame] = {}

    def enter(self, parent: Frame, entry: Any, forward: Frame | None = None) -> Frame:
        """The frame of a scope entry, which is added if it is new."""
        key = parent, entry_key(entry)
        if key not in self._known:
            scope = entry if isinstance(entry, Scope) else Scope(str(entry))
            frame = self._known[key] = Frame(scope, parent, forward)
            self.children[parent].append(frame)
            self.children[frame] = []
        return self._known[key]

    def enter_all(self, scope: Sequence[Any]) -> Frame:
        """The frame of a whole scope."""
        frame = self.root
        for entry in scope:
            frame = self.enter(frame, entry)
        return frame


def entry_key(entry: Any) -> tuple[str, int]:
    """What makes two scope entries the same frame: name and module. The weak reference outlives its module."""
    return str(getattr(entry, "name", entry)), id(getattr(entry, "module", None))


def list_inside(children: dict[Frame, list[Frame]], frame: Frame) -> list[Frame]:
    """A frame and all frames in it, outer ones first."""
    found, stack = [], [frame]
    while stack:
        found.append(stack.pop())
        stack.extend(reversed(children[found[-1]]))
    return found


def matches(frame: Frame, patterns: Sequence[Pattern]) -> bool:
    """Whether a pattern means this frame: its path from any enclosing module down, its class, or a predicate."""
    if frame.parent is None or not patterns:
        return False
    path = frame.path
    paths = [path, *(path[len(outer.path) + 1 :] for outer in frame.enclosing[1:-1])]
    return any(
        pattern(path) if callable(pattern) else pattern == frame.kind or any(fnmatchcase(p, pattern) for p in paths)
        for pattern in patterns
    )


def contract_modules(run: Run, opened: Sequence[Pattern]) -> Run:
    """Make one step of each call of a module that has a notation, such as dropout(x), unless a pattern opens it.

    The values inside of the call are left out, its result is made from what entered it. If the backward pass is drawn
    and needs them, the call stays as it is.
    """
    tree = FrameTree()
    frames = {value: tree.enter_all(value.scope) for value in run.values}
    contracted = {f for f in tree.children if f.scope.notation and not matches(f, opened)}
    recalled = {v for value in run.values if value.backward for v in (*value.sources, *value.gradient_of)}
    left_out: set[Value] = set()
    for value in run.values:
        frame = frames[value]
        is_result = value in run.roots or any(frames[user] is not frame for user in run.users[value])
        if value.op is None or value.backward or frame not in contracted or not is_result:
            continue
        inside: set[Value] = set()
        entered: dict[Value, None] = {}
        stack = [value]
        while stack:
            for source in stack.pop().sources:
                if source.op is None or source.notation or frames[source] is not frame:
                    entered[source] = None
                elif source not in inside:
                    inside.add(source)
                    stack.append(source)
        if not inside & recalled:
            left_out |= inside
            value.inputs, value.notation, value.scope = tuple(entered), frame.scope.notation, value.scope[:-1]
    return as_run((value for value in run.values if value not in left_out), run.roots)


# --------------------------------------------------------------------------------------------------------------------
# What belongs to each frame


def arrange_modules(run: Run) -> Modules:
    """Build the tree of frames, and decide what each value is and where it belongs."""
    tree = FrameTree()
    frame_of = {value: tree.enter_all(value.scope) for value in run.values if not value.backward}
    owners = find_owners(list_inside(tree.children, tree.root))
    names = {value: owners[id(value.tensor)][1] for value in run.values if id(value.tensor) in owners}
    kinds = {value: decide_kind(run, value, names, frame_of) for value in run.values}
    entrance = find_entrance(tree, frame_of)
    for value in run.values:
        if value.op is None and not value.backward and run.users[value]:
            frame_of[value] = owners[id(value.tensor)][0] if value in names else place_leaf(run, value, kinds, frame_of)
            if kinds[value] == "input":
                frame_of[value] = entrance
    if run.has_backward:
        mirrored = mirror_forward(tree)
        for value in run.values:
            if value.backward:
                of = value.gradient_of
                frame_of[value] = mirrored[frame_of[of[0]]] if of else tree.enter_all(value.scope)
    members: dict[Frame, list[Value]] = {frame: [] for frame in tree.children}
    for value in run.values:
        members[frame_of[value]].append(value)
    modules = Modules(tree.root, tree.children, members, frame_of, kinds, names, {})
    return replace(modules, parameters={frame: describe_parameters(modules, frame) for frame in tree.children})


def find_owners(frames: Iterable[Frame]) -> dict[int, tuple[Frame, str]]:
    """For each leaf tensor that a living module of the run holds, by id: the innermost such frame, and its name there.

    A leaf that two modules share belongs to the first of them.
    """
    owners: dict[int, tuple[Frame, str]] = {}
    for frame in frames:
        for name, tensor in walk(frame.module):
            if isinstance(tensor, Tensor) and tensor.node is None:
                known = owners.get(id(tensor))
                if known is None or (known[0] is not frame and known[0] in frame.enclosing):
                    owners[id(tensor)] = frame, name
    return owners


def place_leaf(run: Run, leaf: Value, kinds: dict[Value, Kind], frame_of: dict[Value, Frame]) -> Frame:
    """The frame of a leaf without a known owner."""
    users = run.users[leaf]
    for user in users:
        if kinds[leaf] == "parameter" and frame_of[user].kind and weight_role(leaf, user):
            return frame_of[user]
    around = set.intersection(*(set(frame_of[user].enclosing) for user in users))
    return next(frame for frame in frame_of[users[0]].enclosing if frame in around)


def find_entrance(tree: FrameTree, frame_of: dict[Value, Frame]) -> Frame:
    """Where inputs stand: outside of all modules, unless one module is the frame of the whole picture."""
    outermost = tree.children[tree.root]
    frame = outermost[0] if outermost and outermost[0].name == FORWARD else tree.root
    inner = tree.children[frame]
    computes = any(value.op is not None and frame_of[value] is frame for value in frame_of)
    return inner[0] if len(inner) == 1 and inner[0].kind and not computes else frame


def mirror_forward(tree: FrameTree) -> dict[Frame, Frame]:
    """Build the backward half of the tree like the forward half: gradients are framed like their values."""
    half = tree.children[tree.root][0]
    mirrored = {tree.root: tree.root, half: tree.enter(tree.root, BACKWARD)}
    for frame in list_inside(tree.children, half)[1:]:
        assert frame.parent is not None
        mirrored[frame] = tree.enter(mirrored[frame.parent], frame.scope, frame)
    return mirrored


def describe_parameters(modules: Modules, frame: Frame) -> str:
    """How many numbers the parameters in a frame hold, or to which module they are tied; "" if there are none."""
    contents = modules.contents(frame)
    if frame.parent is None or frame.name in (FORWARD, BACKWARD) or any(value.backward for value in contents):
        return ""
    n = sum(v.array.size for v in contents if v.op is None and modules.kinds[v] == "parameter")
    if n or not frame.kind:
        return f"{n:,} parameter{'s' * (n != 1)}" if n else ""
    used = (modules.frame_of[s] for v in contents for s in v.sources if modules.kinds[s] == "parameter")
    return next((f"tied to {owner.name}" for owner in used if owner not in frame.enclosing), "")
