"""What gets a box: each tensor one, but for what is inside of a closed module, repeated, or part of a formula."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tinygrad_mha.viz.diagram.modules import Pattern, Place, close, plant, repetitions
from tinygrad_mha.viz.diagram.picture import Kind
from tinygrad_mha.viz.diagram.record import SHAPE_ONLY, Value

UNARY = SHAPE_ONLY | {"scale", "neg", "mask", "sqrt", "exp", "log", "abs", "clip"}
UNARY |= {"add", "sub", "mul", "div", "pow", "where", "maximum", "minimum"}  # when the rest is constant
ALWAYS_A_BOX = {"softmax", "attention", "relu", "gelu", "sigmoid", "layer_norm", "rms_norm", "take", "concat", "stack"}
PRODUCTS = {"matmul", "linear", "einsum", "attention"}

MOST_IN_A_FORMULA = 6  # operations that do not only change the shape
MOST_IN_A_GRADIENT = 12  # of a gradient every step has an unnamed part, and sums are long
MOST_CELLS = 1024  # of one table
MOST_ROWS = 128
MOST_CELLS_IN_ALL = 12_000
MOST_TABLES = 80


@dataclass
class Options:
    """What the caller of `graph` asked for."""

    depth: int | None = None
    collapse: Sequence[Pattern] = ()
    expand: Sequence[Pattern] = ()
    fold: bool = True
    separate: bool = False
    values: bool | None = None
    grads: bool | None = None
    names: Mapping[Any, Any] = field(default_factory=dict)


class Draft:
    """A run on its way to a picture. The order of the methods is the order of the work."""

    def __init__(self, values: Sequence[Value], roots: Sequence[Value], options: Options) -> None:
        self.values = values
        self.roots = set(roots)
        self.options = options
        self.two_halves = any(value.backward for value in values)
        # In a mere recording nothing flows back, although parameters could have gradients.
        self.gradients_flow = any(v.wants and (v.op is not None or v.gradient is not None) for v in values)
        self.order = {value: i for i, value in enumerate(values)}
        rename(values, options.names)
        self.kinds = {value: self.kind(value) for value in values}
        self.tree, self.home, self.local_names = plant(values, self.kinds)
        self.every_place = list(self.tree.inside())
        depth = options.depth if options.depth is None else options.depth + self.two_halves
        close(self.tree, depth, options.collapse, options.expand)
        self.keep_inputs_outside()
        self.stands_for = repetitions(self.tree, options.expand) if options.fold and not options.separate else {}
        self.closed_in = {place: outermost_closed(place) for place in {*self.home.values()}}
        self.inlined: set[Value] = set()
        self.hidden: set[Value] = set()
        if options.fold and not options.separate:
            self.hide_sliced_parameters()
            self.inline()
        self.boxes = self.visible()
        self.frames = self.framed()
        self.numbers = self.with_numbers()

    # ---------------------------------------------------------------------------------------------- what each value is

    def kind(self, value: Value) -> Kind:
        if value.backward and value.gradient_of:
            return "gradient"
        if is_parameter(value):
            return "parameter"
        if value.op is None:
            return "input"
        if value in self.roots:
            return "output"
        if value.op.name == "attention" or is_weights(value):
            return "attention"
        return "op"

    def keep_inputs_outside(self) -> None:
        """An input stands in front of a closed module, even if that module is a frame around everything else."""
        for value, place in self.home.items():
            closed = outermost_closed(place)
            if closed is not None and closed.parent is not None and self.kinds[value] == "input" and value.op is None:
                place.values.remove(value)
                closed.parent.values.append(value)
                self.home[value] = closed.parent

    # ------------------------------------------------------------------------------------------ what gets its own box

    def drawn(self, value: Value) -> Value:
        """The value itself, or the one that stands for it where a block is drawn once for all its repetitions."""
        while value in self.stands_for:
            value = self.stands_for[value]
        return value

    @cached_property
    def readers(self) -> dict[Value, set[Value]]:
        """Who uses a value, where blocks are drawn once for all their repetitions."""
        readers: dict[Value, set[Value]] = defaultdict(set)
        for value in self.values:
            readers[self.drawn(value)].update(self.drawn(u) for u in value.users if u.backward == value.backward)
        return readers

    def box(self, value: Value) -> Value | Place | None:
        """What stands for `value` in the picture: a box of its own, the closed place that it is in, or nothing."""
        value = self.drawn(value)
        closed = self.closed_in[self.home[value]]
        return closed or (None if value in self.hidden or value in self.inlined else value)

    def reads(self, value: Value) -> list[Value]:
        """The values that the formula of `value` names: its inputs, and those of inputs that are written out in it."""
        named, stack = [], value.sources[::-1]
        while stack:
            source = stack.pop()
            if source in self.inlined:
                stack += source.sources[::-1]
            else:
                named.append(source)
        return named

    def hide_sliced_parameters(self) -> None:
        """A parameter that is used in named slices only, one per head, is drawn as those slices."""
        for value in self.values:
            if value.op is None and value.users and self.kinds[value] == "parameter":
                slices = [user for user in value.users if user.name and self.kinds[user] == "parameter"]
                if len(slices) == sum(not user.backward for user in value.users):
                    self.hidden.add(value)
        self.hidden |= {
            v for v in self.values if v.backward and v.gradient_of and self.hidden.issuperset(v.gradient_of)
        }

    def inline(self) -> None:
        """Write shape-only and unary chains into the formula of their user; constants are in formulas anyway."""
        size = {value: int(value.op is not None and value.op.name not in SHAPE_ONLY) for value in self.values}
        for user in self.values:
            most = MOST_IN_A_GRADIENT if user.backward else MOST_IN_A_FORMULA
            for value in user.sources:
                if value not in self.inlined and self.may_inline(value, user) and size[value] + size[user] <= most:
                    self.inlined.add(value)
                if value in self.inlined:
                    size[user] += size[value]

    def may_inline(self, value: Value, user: Value) -> bool:
        if value.op is None or value.name or value in self.roots or value in self.stands_for:
            return False
        if any(forward not in self.inlined for forward in value.gradient_of):
            return False
        users = [u for u in value.users if u.backward == value.backward]
        anywhere = value.op.name in SHAPE_ONLY or (value.backward and is_unary(value))
        if anywhere and self.closed_in[self.home[value]] is None:
            return True
        if len(users) != 1 or user.backward != value.backward or self.kinds[value] not in ("op", "gradient"):
            return False
        if value.backward:
            return self.closed_in[self.home[value]] is self.closed_in[self.home[user]]
        if self.home[value] is not self.home[user]:
            return False
        return is_unary(value) or (is_unary(user) and value.op.name not in ALWAYS_A_BOX)

    def visible(self) -> dict[Value | Place, str]:
        """The boxes, in the order of the run, with their ids."""
        boxes: dict[Value | Place, str] = {}
        for value in sorted(self.values, key=self.place_in_picture) if self.two_halves else self.values:
            if value in self.stands_for:
                continue
            box = self.box(value)
            if box is not None and box not in boxes:
                boxes[box] = f"t{len(boxes)}" if isinstance(box, Value) else f"m{len(boxes)}"
        return boxes

    def place_in_picture(self, value: Value) -> tuple[bool, int]:
        """The backward half comes second, and its gradients in the order of their values."""
        twin = value.gradient_of[0] if value.backward and value.gradient_of else value
        return value.backward, self.order[twin]

    def fitting_depth(self, most: int) -> int | None:
        """The largest depth at which there are no more than `most` boxes."""
        deepest = max(place.depth for place in self.every_place)
        for depth in range(deepest - 1, -1, -1):
            smaller = Draft(self.values, list(self.roots), replace(self.options, depth=depth))
            if len(smaller.boxes) <= most:
                return depth
        return None

    # ------------------------------------------------------------------------------------ what is around and in a box

    def framed(self) -> dict[Place, str]:
        """The places that get a frame: open ones that hold more than one computation."""
        computed: Counter[Place] = Counter()
        for box in self.boxes:
            if isinstance(box, Place) or box.op is not None:
                start = box.parent if isinstance(box, Place) else self.home[box]
                computed.update(start.outward() if start else ())
        places = [place for place in self.tree.inside() if place.parent is not None and computed[place] > 1]
        return {place: f"cluster_{i}" for i, place in enumerate(places)}

    def frame_around(self, place: Place | None) -> str | None:
        while place is not None and place not in self.frames:
            place = place.parent
        return None if place is None else self.frames[place]

    def leaving(self, place: Place) -> list[Value]:
        """The values made in a place that are used outside of it."""
        contents = place.contents()
        within = set(contents)
        last = {v for v in contents if v in self.roots or not self.readers[v]}
        return [v for v in contents if v.op and (v in last or not within.issuperset(self.readers[v]))]

    def with_numbers(self) -> set[Value]:
        """The values whose numbers are shown. By default those of a small picture, in which nothing is closed."""
        shown = [box for box in self.boxes if isinstance(box, Value)]
        if self.options.values is None:
            cells = sum(v.array.size for v in shown)
            small = len(shown) <= MOST_TABLES and cells <= MOST_CELLS_IN_ALL and len(shown) == len(self.boxes)
        else:
            small = self.options.values
        return {v for v in shown if can_be_a_table(v.array)} if small else set()

    def is_plus(self, value: Value) -> bool:
        """An unnamed sum of two values needs no more than a sign, unless its numbers are shown."""
        if value.op is None or value.op.name != "add" or value.name or self.kinds[value] != "op":
            return False
        if len(value.sources) != 2 or any(self.kinds[source] == "parameter" for source in value.sources):
            return False
        plain = value not in self.numbers and not self.inlined.intersection(value.sources)
        return plain and not value.backward and not self.options.separate


# --------------------------------------------------------------------------------------------------------------------
# Questions about one value, and one place


def rename(values: Sequence[Value], names: Mapping[Any, Any]) -> None:
    """Names from a mapping, name to tensor (`locals()` will do), come before those that the tensors have."""
    given = {id(tensor): name for name, tensor in names.items() if isinstance(name, str) and name}
    for value in values:
        name = given.get(id(value.tensor), value.name)
        value.name = name if name and name.strip() else None


def is_unary(value: Value) -> bool:
    """Whether a value is a function of one other value, small enough to be part of a formula."""
    assert value.op is not None or not value.sources
    if value.op is None or len(value.sources) != 1:
        return False
    return value.op.name in UNARY


def is_parameter(value: Value) -> bool:
    """A leaf that learns, and is not the input of the network; or a named slice of one."""
    while value.op is not None and value.op.name in SHAPE_ONLY and value.name and len(value.sources) == 1:
        value = value.sources[0]
    if value.op is not None or not value.wants:
        return False
    initial = (value.name or "")[:1]
    if initial in ("x", "X"):
        return False
    # What stands on the left of a product only is data, unless its name says that it is a weight.
    left = [user for user in value.users if user.op and user.op.name in PRODUCTS and user.inputs[0] is value]
    return initial in ("w", "W", "b") or not left or len(left) < len(value.users)


def is_weights(value: Value) -> bool:
    """Whether a softmax is consumed by a product: these are attention weights."""
    if value.op is None or value.op.name != "softmax":
        return False
    stack, seen = list(value.users), 0
    while stack and seen < 20:
        user, seen = stack.pop(), seen + 1
        if user.op is not None and user.op.name in ("matmul", "einsum"):
            return True
        if user.op is not None and (user.op.name in SHAPE_ONLY or user.op.name in ("mul", "where", "scale")):
            stack += user.users
    return False


def can_be_a_table(array: np.ndarray) -> bool:
    return 0 < array.size <= MOST_CELLS and max(array.shape[-2:], default=1) <= MOST_ROWS


def outermost_closed(place: Place) -> Place | None:
    closed = [p for p in place.outward() if p.closed]
    return closed[-1] if closed else None
