"""Where each value belongs: the tree of frames, one for each module of the run, and which module owns which leaf.

A node records in which modules it was made, so a computed value belongs to the innermost of them. A leaf belongs to the
module that owns it. A parameter without a known owner belongs to the module that first uses it, or to the innermost
frame that holds all of its users, so that W_Q1 stands in "head 1". An input stands in the outermost module of its
users.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tinygrad_mha.nn.module import walk
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.viz.diagram.frames import Frame, FrameTree, list_inside
from tinygrad_mha.viz.diagram.picture import Kind
from tinygrad_mha.viz.diagram.record import BACKWARD, FORWARD, Run, Value
from tinygrad_mha.viz.diagram.roles import decide_kind, weight_role

__all__ = ["Modules", "arrange_modules"]


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


# --------------------------------------------------------------------------------------------------------------------
# What belongs to each frame


def arrange_modules(run: Run) -> Modules:
    """Build the tree of frames, and decide what each value is and where it belongs."""
    tree = FrameTree()
    frame_of = {value: tree.enter_all(value.scope) for value in run.values if not value.backward}
    owners = find_owners(list_inside(tree.children, tree.root))
    names = {value: owners[id(value.tensor)][1] for value in run.values if id(value.tensor) in owners}
    kinds = {value: decide_kind(run, value, names, frame_of) for value in run.values}
    for value in run.values:
        if value.op is None and not value.backward and run.users[value]:
            if kinds[value] == "input":
                frame_of[value] = place_input(run, value, frame_of)
            elif value in names:
                frame_of[value] = owners[id(value.tensor)][0]
            else:
                frame_of[value] = place_parameter(run, value, frame_of)
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

    A leaf that two modules share belongs to the first of them; if their classes are equal, to the frame around both, so
    that equal blocks with one table of positions stay equal.
    """
    owners: dict[int, tuple[Frame, str]] = {}
    found_in: dict[int, Frame] = {}
    for frame in frames:
        for name, tensor in walk(frame.module):
            if not isinstance(tensor, Tensor) or tensor.node is not None:
                continue
            known = found_in.get(id(tensor))
            if known is None or (known is not frame and known in frame.enclosing):
                found_in[id(tensor)] = frame
                owners[id(tensor)] = frame, name
            elif known.class_name == frame.class_name and known not in frame.enclosing:
                owners[id(tensor)] = find_common([owners[id(tensor)][0], frame]), name
    return owners


def place_parameter(run: Run, leaf: Value, frame_of: dict[Value, Frame]) -> Frame:
    """The frame of a parameter without a known owner, such as one of a module that was freed."""
    users = run.users[leaf]
    owners = [frame_of[user] for user in users if frame_of[user].class_name and weight_role(leaf, user)]
    if len({frame.class_name for frame in owners}) > 1:
        return owners[0]
    return find_common(owners or [frame_of[user] for user in users])


def place_input(run: Run, leaf: Value, frame_of: dict[Value, Frame]) -> Frame:
    """The outermost module around all uses of an input, whatever else the picture holds; else the frame of the pass."""
    outwards = find_common(frame_of[user] for user in run.users[leaf]).enclosing
    modules = [frame for frame in outwards if frame.class_name]
    return modules[-1] if modules else next((f for f in outwards if f.scope is FORWARD), outwards[-1])


def find_common(frames: Iterable[Frame]) -> Frame:
    """The innermost frame around all of these."""
    first, *others = frames
    around = [set(frame.enclosing) for frame in others]
    return next(frame for frame in first.enclosing if all(frame in outer for outer in around))


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
    if frame.parent is None or frame.scope is FORWARD or any(value.backward for value in contents):
        return ""
    n = sum(v.array.size for v in contents if v.op is None and modules.kinds[v] == "parameter")
    if n or not frame.class_name:
        return f"{n:,} parameter{'s' * (n != 1)}" if n else ""
    used = (modules.frame_of[s] for v in contents for s in v.sources if modules.kinds[s] == "parameter")
    return next((f"tied to {owner.name}" for owner in used if owner not in frame.enclosing), "")
