"""What gets a box: each value, unless it is in a closed module, repeats another, or is written in a formula."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha.viz.diagram.modules import Frame, Modules, Pattern, matches
from tinygrad_mha.viz.diagram.record import RESHAPING, Run, Value
from tinygrad_mha.viz.diagram.roles import ELEMENTWISE

__all__ = ["MOST_IN_A_FORMULA", "Layout", "Options", "fits_a_table", "is_foldable", "make_layout"]

# A formula absorbs these kinds of operations, if their other operands are constants. Those that are
# neither here nor in ALWAYS_A_BOX can be the innermost part of a formula.
FOLDABLE = (*RESHAPING, *ELEMENTWISE, "mask", "choice")
ALWAYS_A_BOX = ("distribution", "attention", "activation", "normalization", "lookup", "join")

MOST_IN_A_FORMULA = 6  # operations that do not only change the shape
MOST_IN_A_GRADIENT = 12  # every step of a gradient has an unnamed part, and sums are long
MOST_CELLS = 1024  # of one table
MOST_ROWS = 128
MOST_CELLS_IN_ALL = 12_000
MOST_TABLES = 80
LEAST_REPETITIONS = 3

Repeats = dict[Frame, list[Frame]]
StandsFor = dict[Value, Value]


@dataclass(frozen=True)
class Options:
    """The options of `graph` that decide what is drawn."""

    depth: int | None = None
    collapse: Sequence[Pattern] = ()
    expand: Sequence[Pattern] = ()
    fold: bool = True
    separate: bool = False
    values: bool | None = None
    grads: bool | None = None


@dataclass(frozen=True)
class Layout:
    """What is drawn, and as what.

    Attributes:
        modules: the frames, without those that repeat another.
        repeats: for each frame of a group that is drawn once, the whole group.
        stands_for: for each value of a repetition, the value that is drawn in its place.
        closed_in: for each frame, the outermost closed frame around it, or None.
        readers: for each drawn value, the drawn values that were made from it or from what it stands for.
        inlined: the values that are written in the formulas of their users.
        hidden: the parameters that are drawn as slices, one per head, and not as a whole.
        atomic: the frames that formulas write by their notation, such as dropout(x).
        boxes: the id of each box, a value or a closed frame, in the order of the picture.
        clusters: the id of each frame that is drawn around boxes.
        tables: the values whose numbers are shown.
    """

    run: Run
    modules: Modules
    options: Options
    repeats: Repeats
    stands_for: StandsFor
    closed_in: dict[Frame, Frame | None]
    readers: dict[Value, set[Value]]
    inlined: set[Value] = field(default_factory=set)
    hidden: set[Value] = field(default_factory=set)
    atomic: set[Frame] = field(default_factory=set)
    boxes: dict[Value | Frame, str] = field(default_factory=dict)
    clusters: dict[Frame, str] = field(default_factory=dict)
    tables: set[Value] = field(default_factory=set)

    def closed_around(self, value: Value) -> Frame | None:
        return self.closed_in[self.modules.frame_of[value]]

    def open_frame(self, value: Value) -> Frame | None:
        """The innermost frame around a value that is not atomic."""
        frame = self.modules.frame_of[value]
        return frame.parent if frame in self.atomic else frame

    def box(self, value: Value) -> Value | Frame | None:
        """What shows `value`: a box of its own, the closed frame that it is in, or nothing."""
        value = find_drawn(value, self.stands_for)
        closed = self.closed_around(value)
        return closed or (None if value in self.hidden or value in self.inlined else value)

    def operands(self, value: Value) -> list[Value]:
        """The values that the formula of `value` names: its inputs, and those of inputs that are written out in it."""
        named, stack = [], self.inputs(value)[::-1]
        while stack:
            source = stack.pop()
            if source in self.inlined:
                stack += self.inputs(source)[::-1]
            else:
                named.append(source)
        return named

    def inputs(self, value: Value) -> list[Value]:
        """The values that `value` was made from. If an atomic frame made it, the values that entered the frame."""
        frame = self.modules.frame_of[value]
        if frame not in self.atomic:
            return value.sources
        entered: list[Value] = []
        seen, stack = {value}, [value]
        while stack:
            for source in stack.pop().sources:
                if source not in seen:
                    seen.add(source)
                    is_inside = source.op is not None and self.modules.frame_of[source] is frame
                    (stack if is_inside else entered).append(source)
        return entered

    def results(self, frame: Frame) -> list[Value]:
        """The values computed in a frame that are used outside of it, or not at all."""
        contents = self.modules.contents(frame)
        within = set(contents)
        last = {v for v in contents if v in self.run.roots or not self.readers[v]}
        return [v for v in contents if v.op and (v in last or not self.readers[v] <= within)]

    def cluster_around(self, frame: Frame | None) -> str | None:
        """The id of the innermost drawn frame, from `frame` outwards."""
        while frame is not None and frame not in self.clusters:
            frame = frame.parent
        return None if frame is None else self.clusters[frame]


def make_layout(run: Run, modules: Modules, options: Options) -> Layout:
    """Decide what gets a box."""
    folds = options.fold and not options.separate
    atomic = find_atomic_frames(modules, options) if folds else set()
    closed = close_frames(modules, options, atomic, 1 if run.has_backward else 0)
    modules = move_inputs_out(modules, closed)
    modules, repeats, stands_for = fold_repetitions(modules, options.expand) if folds else (modules, {}, {})
    closed_in = {frame: outermost_closed(frame, closed) for frame in modules.members}
    readers: dict[Value, set[Value]] = defaultdict(set)
    for value in run.values:
        readers[find_drawn(value, stands_for)].update(find_drawn(user, stands_for) for user in run.users[value])
    layout = Layout(run, modules, options, repeats, stands_for, closed_in, readers, atomic=atomic - closed)
    if folds:
        layout.hidden.update(find_sliced_parameters(run, modules))
        inline_operands(layout)
    layout.boxes.update(number_boxes(layout))
    layout.clusters.update(number_clusters(layout))
    layout.tables.update(choose_tables(layout))
    return layout


def find_drawn(value: Value, stands_for: StandsFor) -> Value:
    """The value itself, or the one that is drawn in its place."""
    while value in stands_for:
        value = stands_for[value]
    return value


# --------------------------------------------------------------------------------------------------------------------
# Closed modules


def find_atomic_frames(modules: Modules, options: Options) -> set[Frame]:
    """The frames of modules that have a notation, unless `expand` opens them. In the backward pass there are none."""
    frames = modules.inside(modules.root)
    return {f for f in frames if f.notation and f.forward is None and not matches(f, options.expand)}


def close_frames(modules: Modules, options: Options, atomic: set[Frame], added_depth: int) -> set[Frame]:
    """The frames that are drawn as one box.

    These are frames deeper than `depth` and those that `collapse` matches, unless they lead to one that `expand`
    matches. If there is a `depth`, a module of a single operation is closed too: its parameters are a detail.
    """
    frames = modules.inside(modules.root)
    opened = {outer for frame in frames if matches(frame, options.expand) for outer in frame.enclosing()}
    closed = set()
    for frame in frames:
        if frame.parent is None or frame in opened:
            continue
        if frame.forward is not None:
            is_closed = frame.forward in closed
        else:
            is_closed = matches(frame, options.collapse)
            if options.depth is not None and frame not in atomic:
                is_closed |= frame.depth > options.depth + added_depth
                is_closed |= frame.is_module and count_operations(modules, frame) == 1
        if is_closed:
            closed.add(frame)
    return closed


def count_operations(modules: Modules, frame: Frame) -> int:
    """How many operations in a frame compute numbers."""
    return sum(value.op is not None and not value.has_kind(*RESHAPING) for value in modules.contents(frame))


def outermost_closed(frame: Frame, closed: set[Frame]) -> Frame | None:
    around = [outer for outer in frame.enclosing() if outer in closed]
    return around[-1] if around else None


def move_inputs_out(modules: Modules, closed: set[Frame]) -> Modules:
    """Put the inputs of a closed module in front of it, even if it is the frame of the whole picture."""
    frame_of = dict(modules.frame_of)
    for value, frame in frame_of.items():
        around = outermost_closed(frame, closed)
        if around is not None and around.parent is not None and modules.kinds[value] == "input" and value.op is None:
            frame_of[value] = around.parent
    members: dict[Frame, list[Value]] = {frame: [] for frame in modules.members}
    for value, frame in frame_of.items():
        members[frame].append(value)
    return replace(modules, frame_of=frame_of, members=members)


# --------------------------------------------------------------------------------------------------------------------
# Repetitions


def fold_repetitions(modules: Modules, expand: Sequence[Pattern]) -> tuple[Modules, Repeats, StandsFor]:
    """Find neighbours that compute the same, such as the blocks of a network and its heads, and keep the first of them.

    Returns the modules without the others, and the `repeats` and `stands_for` of a `Layout`.
    """
    children: dict[Frame, list[Frame]] = {}
    repeats: Repeats = {}
    stands_for: StandsFor = {}
    queue = deque([modules.root])  # frames before those in them, and the forward pass before the backward pass
    while queue:
        parent = queue.popleft()
        children[parent] = []
        for group in group_equals(modules, parent, expand, repeats, stands_for):
            if len(group) < LEAST_REPETITIONS:
                children[parent] += group
                continue
            children[parent].append(group[0])
            repeats |= dict.fromkeys(group, group)
            for other in group[1:]:
                stands_for |= dict(zip(modules.contents(other), modules.contents(group[0]), strict=True))
        queue += children[parent]
    return replace(modules, children=children), repeats, stands_for


class Part(NamedTuple):
    """A frame that may repeat its neighbour: what it computes, from which values outside of it."""

    frame: Frame
    key: Any
    outside: list[Value]
    contents: set[Value]


def group_equals(
    modules: Modules, parent: Frame, expand: Sequence[Pattern], repeats: Repeats, stands_for: StandsFor
) -> list[list[Frame]]:
    """Neighbouring frames in groups of those that compute the same from the same, or each from the result of the last.

    Heads that share keys and values with some of their neighbours only are in different groups: an arrow from or to the
    box of a group holds for all of its members.
    """
    groups: list[list[Frame]] = []
    last = None
    for frame in modules.children[parent]:
        expanded = tuple(matches(inner, expand) for inner in modules.inside(frame))
        contents = modules.contents(frame)
        steps, outside = fingerprint(contents)
        part = Part(frame, object() if expanded[0] else (frame.kind, expanded, steps), outside, set(contents))
        if last is not None and continues(last, part, repeats, stands_for):
            groups[-1].append(frame)
        else:
            groups.append([frame])
        last = part
    return groups


def continues(last: Part, part: Part, repeats: Repeats, stands_for: StandsFor) -> bool:
    """Whether `part` computes the same as its neighbour, from corresponding values."""
    if part.key != last.key:
        return False
    a, b = last.frame.forward, part.frame.forward
    is_mirror = a in repeats and b in repeats and repeats[a] is repeats[b]
    return all(
        find_drawn(a, stands_for) is find_drawn(b, stands_for)
        or b in last.contents
        or a in part.contents
        or (is_mirror and not a.backward)  # compared in the forward pass
        for a, b in zip(last.outside, part.outside, strict=True)
    )


def fingerprint(contents: Sequence[Value]) -> tuple[Any, list[Value]]:
    """The operations, shapes and operands without names and numbers; and the operands from outside."""
    index: dict[Value, Any] = {value: i for i, value in enumerate(contents)}
    outside: list[Value] = []

    def describe_option(name: str, option: Any) -> Any:
        return name, np.shape(option) if isinstance(option, np.ndarray) else str(option)

    def describe_operand(x: Any) -> Any:
        if not isinstance(x, Value):
            return np.shape(x) or x
        if x not in index:
            index[x] = "outside", len(outside)
            outside.append(x)
        return index[x]

    steps = tuple(
        (
            value.op.name if value.op else "leaf",
            value.array.shape,
            value.array.dtype.str,
            () if value.has_kind("index") else tuple(describe_option(*item) for item in value.kwargs.items()),
            tuple(map(describe_operand, value.inputs)),
        )
        for value in contents
    )
    return steps, outside


# --------------------------------------------------------------------------------------------------------------------
# Formulas


def find_sliced_parameters(run: Run, modules: Modules) -> set[Value]:
    """Parameters that are used in named slices only, one per head, and their gradients."""
    kinds = modules.kinds
    sliced = {
        value
        for value in run.values
        if value.op is None and kinds[value] == "parameter" and run.users[value]
        if all(user.name and kinds[user] == "parameter" for user in run.users[value])
    }
    return sliced | {v for v in run.values if v.gradient_of and sliced.issuperset(v.gradient_of)}


def inline_operands(layout: Layout) -> None:
    """Write reshaping and element-wise chains into the formulas of their users."""
    size = {value: int(value.op is not None and not value.has_kind(*RESHAPING)) for value in layout.run.values}
    frame_of = layout.modules.frame_of
    for value in layout.run.values:
        users = layout.run.users[value]
        if frame_of[value] in layout.atomic and users and all(frame_of[user] is frame_of[value] for user in users):
            layout.inlined.add(value)  # in the middle of an atomic frame
    for user in layout.run.values:
        most = MOST_IN_A_GRADIENT if user.backward else MOST_IN_A_FORMULA
        for value in layout.inputs(user):
            fits = size[value] + size[user] <= most
            if fits and value not in layout.inlined and may_inline(layout, value, user):
                layout.inlined.add(value)
            if value in layout.inlined:
                size[user] += size[value]


def may_inline(layout: Layout, value: Value, user: Value) -> bool:
    """Whether the formula of `user` may contain that of `value`, so that `value` needs no box."""
    if value.op is None or value.name or value in layout.run.roots or value in layout.stands_for:
        return False
    if any(forward not in layout.inlined for forward in value.gradient_of):
        return False
    anywhere = value.has_kind(*RESHAPING) or (value.backward and is_foldable(layout, value))
    if anywhere and layout.closed_around(value) is None:
        return True
    frame_of = layout.modules.frame_of
    users = {frame_of[u] if frame_of[u] in layout.atomic else i for i, u in enumerate(layout.run.users[value])}
    if len(users) != 1 or user.backward != value.backward or layout.modules.kinds[value] not in ("op", "gradient"):
        return False
    if value.backward:
        return layout.closed_around(value) is layout.closed_around(user)
    if user.has_kind("addition") and frame_of[value] in layout.atomic:
        return False  # in x + dropout(y), the + is a mere sign
    if layout.open_frame(value) is not layout.open_frame(user):
        return False
    return is_foldable(layout, value) or (is_foldable(layout, user) and not value.has_kind(*ALWAYS_A_BOX))


def is_foldable(layout: Layout, value: Value) -> bool:
    """Whether a value is a simple function of one other value."""
    is_simple = value.has_kind(*FOLDABLE) or layout.modules.frame_of[value] in layout.atomic
    return is_simple and len(layout.inputs(value)) == 1


# --------------------------------------------------------------------------------------------------------------------
# Boxes and frames


def number_boxes(layout: Layout) -> dict[Value | Frame, str]:
    """The boxes in the order of the run, with their ids. Gradients come second, in the order of their values."""

    def order(value: Value) -> tuple[bool, int]:
        of = value.gradient_of[0] if value.backward and value.gradient_of else value
        return value.backward, layout.run.position[of]

    boxes: dict[Value | Frame, str] = {}
    for value in sorted(layout.run.values, key=order):
        box = None if value in layout.stands_for else layout.box(value)
        if box is not None and box not in boxes:
            boxes[box] = f"t{len(boxes)}" if isinstance(box, Value) else f"m{len(boxes)}"
    return boxes


def number_clusters(layout: Layout) -> dict[Frame, str]:
    """The open frames that hold more than one computed box, with their ids."""
    computed: Counter[Frame] = Counter()
    for box in layout.boxes:
        if isinstance(box, Frame):
            computed.update(list(box.enclosing())[1:])
        elif box.op is not None:
            computed.update(layout.modules.frame_of[box].enclosing())
    frames = layout.modules.inside(layout.modules.root)[1:]
    drawn = [frame for frame in frames if computed[frame] > 1 and frame not in layout.atomic]
    return {frame: f"cluster_{i}" for i, frame in enumerate(drawn)}


def choose_tables(layout: Layout) -> set[Value]:
    """The values whose numbers are shown: by default those of a small picture without closed modules."""
    shown = [box for box in layout.boxes if isinstance(box, Value)]
    show = layout.options.values
    if show is None:
        cells = sum(value.array.size for value in shown)
        show = len(shown) == len(layout.boxes) <= MOST_TABLES and cells <= MOST_CELLS_IN_ALL
    return {value for value in shown if show and fits_a_table(value.array)}


def fits_a_table(array: np.ndarray) -> bool:
    return 0 < array.size <= MOST_CELLS and max(array.shape[-2:], default=1) <= MOST_ROWS
