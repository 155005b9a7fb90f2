"""From values to boxes: which values get a box of their own, what it is called, and what is written in it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tinygrad_mha.viz import formula
from tinygrad_mha.viz.picture import Cluster, Edge, Kind, Node, Picture, Table
from tinygrad_mha.viz.places import Pattern, Place, close, plant, repetitions
from tinygrad_mha.viz.trace import SHAPE_ONLY, Value

UNARY = SHAPE_ONLY | {"scale", "neg", "mask", "sqrt", "exp", "log", "abs", "clip"}
UNARY |= {"add", "sub", "mul", "div", "pow", "where", "maximum", "minimum"}  # when the rest is constant
ALWAYS_A_BOX = {"softmax", "attention", "relu", "gelu", "sigmoid", "layer_norm", "rms_norm", "take", "concat", "stack"}
PRODUCTS = {"matmul", "linear", "einsum", "attention"}

STEPS = {"linear": "Linear", "matmul": "Linear", "gelu": "GELU", "relu": "ReLU", "tanh": "tanh"}

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
        close(self.tree, options.depth, options.collapse, options.expand)
        self.stands_for = repetitions(self.tree, options.expand) if options.fold and not options.separate else {}
        self.closed_in = {place: outermost_closed(place) for place in {*self.home.values()}}
        self.inlined: set[Value] = set()
        self.hidden: set[Value] = set()
        if options.fold and not options.separate:
            self.hide_sliced_parameters()
            self.inline()
        self.boxes = self.visible()

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
            readers[self.drawn(value)].update(map(self.drawn, value.users))
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
                if len(slices) == len(value.users):
                    self.hidden.add(value)

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

    # -------------------------------------------------------------------------------------------------------- the rest

    def picture(self) -> Picture:
        self.frames = self.framed()
        self.with_tables = self.tables_wanted()
        self.titles = self.titled()
        picture = Picture()
        for place, id in self.frames.items():
            parent = self.frame_around(place.parent)
            picture.clusters.append(Cluster(id, place_title(place), self.frame_lines(place), parent))
        for box, id in self.boxes.items():
            node = self.value_node(box, id) if isinstance(box, Value) else self.place_node(box, id)
            picture.nodes.append(node)
        picture.edges = self.edges()
        picture.pairs = [
            (self.boxes[v], id)
            for g, id in self.boxes.items()
            if isinstance(g, Value)
            for v in g.gradient_of[:1]
            if v in self.boxes
        ]
        if self.options.separate:
            self.insert_operations(picture)
        return picture

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

    # ---------------------------------------------------------------------------------------------------------- titles

    def titled(self) -> dict[Value, str]:
        """A name for each value: the user's, else that of its module, else what made it, numbered."""
        titles: dict[Value, str] = {}
        unnamed: dict[tuple[str | None, str], list[Value]] = defaultdict(list)
        results = self.results_of_places()
        for value in self.values:
            closed = self.closed_in[self.home[value]]
            if closed is not None:
                titles[value] = place_title(closed)
            elif value.name:
                titles[value] = value.name
            elif value in self.local_names:
                titles[value] = self.name_in_frame(value, self.local_names[value])
            elif value in results and not value.backward:
                titles[value] = results[value]
            elif self.is_plus(value):
                titles[value] = "x"  # the residual stream; its box is a mere +
            else:
                unnamed[self.frame_around(self.home[value]), self.word(value)].append(value)
        for (_, word), values in unnamed.items():
            shown = [value for value in values if value in self.boxes]
            titles |= dict.fromkeys(values, word)
            if len(shown) > 1:
                titles |= {value: f"{word}_{i}" for i, value in enumerate(shown, 1)}
        for value in self.values:
            of = [titles[v] for v in value.gradient_of if v not in self.inlined]
            if of and value.backward:
                titles[value] = f"∂L/∂{of[0]}"
        return titles

    def name_in_frame(self, parameter: Value, name: str) -> str:
        """The name of a parameter of a module, with the modules between it and the frame that it stands in."""
        place = self.home[parameter]
        while place.parent is not None and place not in self.frames:
            name, place = f"{place.name}.{name}".removeprefix("."), place.parent
        return name

    def heading(self, value: Value) -> str:
        """The title of a box. A gradient that passes an addition unchanged is that of several values."""
        same = [self.titles[v] for v in value.gradient_of[:3] if value.backward and v not in self.inlined]
        return " = ".join(f"∂L/∂{title}" for title in same) or self.titles[value]

    def results_of_places(self) -> dict[Value, str]:
        """For the one value that leaves an open module: the name of the module."""
        results: dict[Value, str] = {}
        for place in self.tree.inside():
            leaving = self.leaving(place)
            if len(leaving) == 1 and leaving[0] not in self.roots and place.parent is not None and not place.closed:
                results[leaving[0]] = place.name  # an inner place comes later, and has the last word
        return results

    def leaving(self, place: Place) -> list[Value]:
        """The values made in a place that are used outside of it."""
        contents = place.contents()
        within = set(contents)
        return [v for v in contents if v.op and (v in self.roots or not within.issuperset(self.readers[v]))]

    def word(self, value: Value) -> str:
        """What to call a value without a name."""
        if value in self.roots and value.op is not None:
            return "loss" if value.op.name == "cross_entropy" else "output"
        if is_weights(value):
            return "weights"
        if value.op is None:
            return self.name_in_frame(value, role(value)) if self.kinds[value] == "parameter" else "input"
        chain = value
        while is_unary(chain) and chain.sources[0] in self.inlined:
            chain = chain.sources[0]  # the scale of a matmul is a matmul
        assert chain.op is not None
        return chain.op.name

    # ----------------------------------------------------------------------------------------------------------- boxes

    def value_node(self, value: Value, id: str) -> Node:
        kind = self.kinds[value]
        title = self.heading(value) if value.name or value.op is None or not self.options.separate else ""
        node = Node(id, kind, title, formula.shape(value.array.shape))
        node.cluster = self.frame_around(self.home[value])
        word = {"input": "input", "parameter": "parameter", "attention": "attention", "output": "output"}.get(kind)
        if value.op is not None and not self.options.separate:
            text = formula.formula(value, self.titles.__getitem__, self.inlined.__contains__)
            # As many characters as fit under the title and over the table; without a table, a line may be longer.
            columns = value.array.shape[-1] if value.array.ndim else 1
            room = max(24, 3 * len(node.title) // 2, 2 * columns) if value in self.with_tables else 40
            room = min(room, 48)
            said = text if word is None or text.startswith(word) else f"{word}: {text}"
            node.lines = (
                ["parameter", text] if kind == "parameter" else formula.lines(said, room, 8 if value.backward else 3)
            )
        elif word:
            node.lines = [word]
        elif kind == "gradient":
            node.lines = ["begins as 1" if value.array.size == 1 and value.array.item() == 1 else "as given"]
        if self.is_plus(value):
            return Node(id, "plus", "+", cluster=node.cluster, tooltip=tooltip(value, self.titles[value]))
        if value in self.with_tables:
            node.value = Table(panels(value.array), palette(value, kind))
        node.gradient = self.gradient(value)
        node.warning = not_finite(value, kind)
        node.tooltip = tooltip(value, self.titles[value])
        return node

    def is_plus(self, value: Value) -> bool:
        """An unnamed sum of two values needs no more than a sign, unless its numbers are shown."""
        if value.op is None or value.op.name != "add" or value.name or self.kinds[value] != "op":
            return False
        if len(value.sources) != 2 or any(self.kinds[source] == "parameter" for source in value.sources):
            return False
        plain = value not in self.with_tables and not self.inlined.intersection(value.sources)
        return plain and not value.backward and not self.options.separate

    def place_node(self, place: Place, id: str) -> Node:
        leaving = self.leaving(place)
        results = dict.fromkeys(formula.shape(v.array.shape) for v in leaving)
        own = [v for v in place.values if v.op] or [v for child in place.children for v in child.values]
        is_attention = any(v.op and (v.op.name == "attention" or self.kinds[v] == "attention") for v in own)
        kind: Kind = "output" if any(v in self.roots for v in leaving) else "attention" if is_attention else "op"
        node = Node(id, kind, place_title(place), ", ".join(results))
        node.lines = [self.describe(place)]
        node.parameters = self.parameters_in(place)
        node.cluster = self.frame_around(place.parent)
        node.warning = next(filter(None, (not_finite(v, self.kinds[v]) for v in leaving)), "")
        if self.options.values and len(leaving) == 1 and can_be_a_table(leaving[0].array):
            node.value = Table(panels(leaving[0].array), palette(leaving[0], "op"))
        node.tooltip = f"{place.path or place.kind}: {len(place.contents())} tensors"
        return node

    def describe(self, place: Place) -> str:
        """The class of a closed module, the number of its heads, or the few operations that it does."""
        n_head = getattr(place.module, "n_head", None)
        if n_head:
            return f"{place.kind}, {n_head} head{'s' if n_head > 1 else ''}"
        made = sorted((v for v in place.contents() if v.op), key=self.order.__getitem__)
        steps = [STEPS[v.op.name] for v in made if v.op and v.op.name in STEPS]
        if 1 < len(steps) < 4 and not any(v.op and v.op.name in ("attention", "softmax") for v in made):
            return " → ".join(steps)
        return place.kind or f"{len(made)} operations"

    def frame_lines(self, place: Place) -> list[str]:
        return [line for line in (place.kind if place.name else "", self.parameters_in(place)) if line]

    def parameters_in(self, place: Place) -> str:
        """How many numbers are trained in a place, or to what the parameters are tied that it uses."""
        leaves = {id(v): v for v in place.contents() if v.op is None and v.wants}.values()
        own = getattr(place.module, "count", None)
        n = own() if own is not None else sum(v.array.size for v in leaves if self.kinds[v] == "parameter")
        if n and own is not None and not leaves:
            used = [self.home[s] for v in place.contents() for s in v.sources if self.kinds[s] == "parameter"]
            return f"tied to {used[0].name}" if used else ""
        return f"{n:,} parameter{'s' * (n != 1)}{' each' * (len(place.run) > 1)}" if n else ""

    # ---------------------------------------------------------------------------------------------------------- tables

    def tables_wanted(self) -> set[Value]:
        """The values whose numbers are shown. By default those of a small picture, in which nothing is closed."""
        shown = [box for box in self.boxes if isinstance(box, Value)]
        if self.options.values is None:
            cells = sum(v.array.size for v in shown)
            small = len(shown) <= MOST_TABLES and cells <= MOST_CELLS_IN_ALL and len(shown) == len(self.boxes)
        else:
            small = self.options.values
        return {v for v in shown if can_be_a_table(v.array)} if small else set()

    def gradient(self, value: Value) -> Table | str | None:
        """A table, or which of the two reasons there is for none: not computed yet, not required."""
        wanted = self.options.grads
        if wanted is False or value.backward or value.array.dtype.kind != "f":
            return None
        if wanted is None and (value not in self.with_tables or self.two_halves):
            return None
        if value.gradient is not None:
            if can_be_a_table(value.array):
                return Table(panels(value.gradient), "gradient", second=value in self.with_tables)
            return f"gradient ±{formula.number(largest(value.gradient))}"
        if not self.gradients_flow:
            return None
        if value.wants:
            return "gradient: not computed"
        return "gradient: not required"

    # ----------------------------------------------------------------------------------------------------------- edges

    def edges(self) -> list[Edge]:
        edges: list[Edge] = []
        first: dict[tuple[str, str], Edge] = {}
        repeated: Counter[tuple[str, str]] = Counter()
        for value in self.values:
            target = self.box(value)
            if value.op is None or value in self.inlined or target is None:
                continue
            residual = self.residual_source(value) if isinstance(target, Value) else None
            for source in self.reads(value):
                start = self.box(source)
                if start is None or start is target or self.between_repetitions(source, value):
                    continue
                if value.backward and not source.backward and not self.options.separate:
                    continue  # the formula names it; arrows across the whole picture would hide the rest
                ends = self.boxes[start], self.boxes[target]
                if ends in first:
                    repeated[ends] += source in self.stands_for and value not in self.stands_for
                    if self.are_one_arrow(start, target, source, value):
                        continue
                edge = Edge(*ends, *self.edge_kind(source, value, start, source is residual))
                first.setdefault(ends, edge)
                edges.append(edge)
        for ends, times in repeated.items():
            if times:
                first[ends].label = f"×{times + 1}"
        return edges

    def are_one_arrow(self, start: Value | Place, target: Value | Place, source: Value, value: Value) -> bool:
        """Whether a second arrow between two boxes says nothing new. In `x * x` it does: there are two."""
        closed = isinstance(start, Place) or isinstance(target, Place)
        return closed or value.backward or source in self.stands_for or value in self.stands_for

    def between_repetitions(self, source: Value, value: Value) -> bool:
        """Whether an arrow leads from one repetition of a block into another: that is what ×N says."""
        if source not in self.stands_for and value not in self.stands_for:
            return False
        ways = self.home[source].outward(), list(self.home[value].outward())
        return any(p.run is q.run and p is not q for p in ways[0] for q in ways[1])

    def edge_kind(self, source: Value, value: Value, start: Value | Place, residual: bool) -> tuple[Any, str]:
        if residual:
            return "residual", "residual"
        if value.backward:
            return "gradient" if source.backward else "recall", ""
        kind = self.kinds[source]
        if kind == "parameter":
            return "parameter", "tied" if isinstance(start, Place) else ""
        return ("input" if kind == "input" else "data"), ""

    def residual_source(self, value: Value) -> Value | None:
        """x, in x + f(x) where f contains a product: the input of an addition from which the other one was made."""
        assert value.op is not None
        if value.op.name != "add" or len(value.sources) != 2 or value.sources[0] is value.sources[1]:
            return None
        older, newer = sorted(value.sources, key=self.order.__getitem__)
        if not older.array.shape == newer.array.shape == value.array.shape or self.kinds[older] == "parameter":
            return None
        oldest, stack, seen, product = self.order[older], [newer], {newer}, False
        while stack and len(seen) < 5000:
            step = stack.pop()
            if step is older:
                return older if product else None
            product = product or (step.op is not None and step.op.name in PRODUCTS)
            fresh = [s for s in step.sources if s not in seen and self.order[s] >= oldest]
            seen.update(fresh)
            stack += fresh
        return None

    def insert_operations(self, picture: Picture) -> None:
        """The plain autograd graph: an oval for each operation, between its operands and its result."""
        made = {id: box for box, id in self.boxes.items()}
        operations = {}
        for node in list(picture.nodes):
            value = made[node.id]
            if isinstance(value, Value) and value.op is not None:
                operations[node.id] = f"o{node.id[1:]}"
                picture.nodes.append(operation_node(value, operations[node.id], node.cluster))
        for edge in picture.edges:
            edge.target = operations.get(edge.target, edge.target)
        picture.edges += [Edge(operation, result) for result, operation in operations.items()]


# --------------------------------------------------------------------------------------------------------------------
# Questions about one value


def rename(values: Sequence[Value], names: Mapping[Any, Any]) -> None:
    """Names from a mapping, name to tensor (`locals()` will do), come before those that the tensors have."""
    given = {id(tensor): name for name, tensor in names.items() if isinstance(name, str) and name}
    for value in values:
        name = given.get(id(value.tensor), value.name)
        value.name = name if name and name.strip() else None


def role(parameter: Value) -> str:
    """What the first operation that uses a parameter calls it: weight, bias."""
    if parameter.users and parameter.users[0].op is not None:
        user = parameter.users[0]
        argument = user.op.argument(user.inputs.index(parameter))
        if argument in ("weight", "bias"):
            return argument
    return "parameter"


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


def palette(value: Value, kind: Kind) -> Any:
    return "attention" if is_weights(value) else "gradient" if kind == "gradient" else "value"


def panels(array: np.ndarray) -> np.ndarray:
    """A copy, as matrices: (panels, rows, columns)."""
    if array.ndim < 2:
        return np.array(array).reshape(1, 1, -1)
    return np.array(array).reshape(-1, *array.shape[-2:])


def can_be_a_table(array: np.ndarray) -> bool:
    return 0 < array.size <= MOST_CELLS and max(array.shape[-2:], default=1) <= MOST_ROWS


def largest(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def not_finite(value: Value, kind: Kind) -> str:
    """nan and ∞ in words. −∞ is what a mask puts into scores, and no fault there."""
    array = value.array
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return ""
    masked = any(v.op is not None and v.op.name == "mask" for v in (value, *value.sources))
    found = {"nan": np.isnan(array).sum(), "∞": np.isposinf(array).sum(), "−∞": np.isneginf(array).sum()}
    return ", ".join(f"{n} × {word}" for word, n in found.items() if n and not (word == "−∞" and masked))


def tooltip(value: Value, title: str) -> str:
    """What a reader sees who rests the pointer on a box."""
    array = value.array
    told = [f"{title}, {formula.shape(array.shape)}, {array.dtype}"]
    if array.dtype.kind == "f" and array.size and np.isfinite(array).all():
        told.append(f"min {array.min():.4g}, mean {array.mean():.4g}, max {array.max():.4g}")
    if value.gradient is not None:
        told.append(f"gradient: length {np.linalg.norm(value.gradient):.4g}")
    if value.op is not None:
        told.append(f"made by {value.op.name}")
    return "\n".join(told)


def operation_node(value: Value, id: str, cluster: str | None) -> Node:
    assert value.op is not None
    return Node(id, "operation", value.op.name, cluster=cluster, tooltip=value.op.name)


# --------------------------------------------------------------------------------------------------------------------
# Questions about one place


def outermost_closed(place: Place) -> Place | None:
    closed = [p for p in place.outward() if p.closed]
    return closed[-1] if closed else None


def place_title(place: Place) -> str:
    if len(place.run) == 1:
        return place.name or place.kind
    a, b = place.name, place.run[-1].name
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same] and not a[same].isdigit():
        same += 1
    return f"{a}…{b[same:]}  ×{len(place.run)}"
