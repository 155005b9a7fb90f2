"""What gets a box: each value, unless it is in a closed module, repeats another, or is written in a formula."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tinygrad_mha.viz.diagram.frames import Frame, Pattern, matches
from tinygrad_mha.viz.diagram.modules import Modules
from tinygrad_mha.viz.diagram.record import RESHAPING, Run, Value
from tinygrad_mha.viz.diagram.repetitions import find_drawn, fold_repetitions
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


@dataclass(frozen=True)
class Options:
    """The options of `graph` that decide what is drawn."""

    depth: int | None = None
    compact: bool = False  # draw two equal heads as one, and the repeated steps of a chain as one
    collapse: Sequence[Pattern] = ()
    expand: Sequence[Pattern] = ()
    fold: bool = True
    separate: bool = False
    values: bool | None = None
    grads: bool | None = None


@dataclass
class Layout:
    """What is drawn, and as what.

    Attributes:
        modules: the frames, without those that repeat another.
        repeats: for each frame of a group that is drawn once, the whole group.
        stands_for: for each value of a repetition, the value that is drawn in its place.
        closed_in: for each frame, the outermost closed frame around it, or None.
        readers: for each drawn value, the drawn values that were made from it or from what it stands for.
        inlined: the values without a box: those that are written in the formulas of their users.
        boxes: the id of each box, a value or a closed frame, in the order of the picture.
        clusters: the id of each frame that is drawn around boxes.
        tables: the values whose numbers are shown.
    """

    run: Run
    modules: Modules
    options: Options
    repeats: dict[Frame, list[Frame]]
    stands_for: dict[Value, Value]
    closed_in: dict[Frame, Frame | None]
    readers: dict[Value, set[Value]]
    inlined: set[Value] = field(default_factory=set)
    boxes: dict[Value | Frame, str] = field(default_factory=dict)
    clusters: dict[Frame, str] = field(default_factory=dict)
    tables: set[Value] = field(default_factory=set)

    def closed_around(self, value: Value) -> Frame | None:
        """The closed frame that shows a value. An input stands in front of it."""
        is_input = value.op is None and self.modules.kinds[value] == "input"
        return None if is_input else self.closed_in[self.modules.frame_of[value]]

    def box(self, value: Value) -> Value | Frame | None:
        """What shows `value`: a box of its own, the closed frame that it is in, or nothing."""
        value = find_drawn(value, self.stands_for)
        return self.closed_around(value) or (None if value in self.inlined else value)

    def operands(self, value: Value) -> list[Value]:
        """The values that the formula of `value` names: its inputs, and those of inputs that are written out in it."""
        named, stack = [], value.sources[::-1]
        while stack:
            source = stack.pop()
            if source in self.inlined:
                stack += source.sources[::-1]
            else:
                named.append(source)
        return named

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
    closed = close_frames(modules, options, added_depth=int(run.has_backward))
    closed_in = {f: next((outer for outer in reversed(f.enclosing) if outer in closed), None) for f in modules.members}
    repeats: dict[Frame, list[Frame]] = {}
    stands_for: dict[Value, Value] = {}
    if options.fold:
        modules, repeats, stands_for = fold_repetitions(run, modules, options.expand, options.collapse, options.compact)
    readers: dict[Value, set[Value]] = defaultdict(set)
    for value in run.values:
        readers[find_drawn(value, stands_for)].update(find_drawn(user, stands_for) for user in run.users[value])
    layout = Layout(run, modules, options, repeats, stands_for, closed_in, readers)
    if options.fold:
        layout.inlined.update(find_sliced_parameters(run, modules))
        inline_operands(layout)
    layout.boxes = number_boxes(layout)
    layout.clusters = number_clusters(layout)
    layout.tables = choose_tables(layout)
    return layout


def close_frames(modules: Modules, options: Options, added_depth: int) -> set[Frame]:
    """The frames that are drawn as one box.

    These are frames deeper than `depth` and those that `collapse` matches, unless they lead to one that `expand`
    matches. If there is a `depth`, a module of a single operation is closed too: its parameters are a detail.
    """
    frames = modules.inside(modules.root)
    opened = {outer for frame in frames if matches(frame, options.expand) for outer in frame.enclosing}
    closed = set()
    for frame in frames:
        if frame.parent is None or frame in opened:
            continue
        if frame.forward is not None:
            is_closed = frame.forward in closed
        else:
            is_closed = matches(frame, options.collapse)
            if options.depth is not None:
                is_closed |= len(frame.enclosing) - 1 > options.depth + added_depth
                is_closed |= bool(frame.class_name) and count_operations(modules, frame) == 1
        if is_closed:
            closed.add(frame)
    return closed


def count_operations(modules: Modules, frame: Frame) -> int:
    """How many operations in a frame compute numbers."""
    return sum(value.op is not None and not value.has_kind(*RESHAPING) for value in modules.contents(frame))


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
    products = {value for value in layout.run.values if value.has_kind("product")}  # and what holds one
    for user in layout.run.values:
        most = MOST_IN_A_GRADIENT if user.backward else MOST_IN_A_FORMULA
        for value in user.sources:
            fits = size[value] + size[user] <= most and not (value in products and is_multiplied(layout, user))
            if fits and value not in layout.inlined and may_inline(layout, value, user):
                layout.inlined.add(value)
            if value in layout.inlined:
                size[user] += size[value]
                products |= {user} if value in products else set()


def is_multiplied(layout: Layout, value: Value) -> bool:
    """Whether a value is a product or an attention, or is an operand of one after it was rearranged, as W in x @ Wᵀ.

    A product is not written into that of another one: queries, keys and values have boxes of their own.
    """
    stack = [value]
    while stack:
        value = stack.pop()
        if value.has_kind("product", "attention"):
            return not value.backward
        if value.has_kind(*RESHAPING) and not value.name:
            stack += layout.run.users[value]
    return False


def may_inline(layout: Layout, value: Value, user: Value) -> bool:
    """Whether the formula of `user` may contain that of `value`, so that `value` needs no box."""
    if value.op is None or value.name or value in layout.run.roots or value in layout.stands_for:
        return False
    if any(forward not in layout.inlined for forward in value.gradient_of):
        return False
    anywhere = value.has_kind(*RESHAPING) or (value.backward and is_foldable(value))
    if anywhere and layout.closed_around(value) is None:
        return True
    if len(layout.run.users[value]) != 1 or user.backward != value.backward:
        return False
    if value.backward:
        return layout.closed_around(value) is layout.closed_around(user)
    if layout.modules.kinds[value] != "op" or layout.modules.frame_of[value] is not layout.modules.frame_of[user]:
        return False
    return is_foldable(value) or (is_foldable(user) and not value.has_kind(*ALWAYS_A_BOX))


def is_foldable(value: Value) -> bool:
    """Whether a value is a simple function of one other value."""
    return len(value.sources) == 1 and value.has_kind(*FOLDABLE)


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
    """The open frames that hold more than one computed box or are drawn for several, with their ids."""
    computed: Counter[Frame] = Counter()
    for box in layout.boxes:
        if isinstance(box, Frame):
            computed.update(box.enclosing[1:])
        elif box.op is not None:
            computed.update(layout.modules.frame_of[box].enclosing)
    frames = layout.modules.inside(layout.modules.root)[1:]
    drawn = [f for f in frames if computed[f] > (f not in layout.repeats)]
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
    """Whether an array is small enough for a heat table."""
    return 0 < array.size <= MOST_CELLS and max(array.shape[-2:], default=1) <= MOST_ROWS
