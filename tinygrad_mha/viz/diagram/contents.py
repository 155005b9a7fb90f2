"""The picture of a draft: what is written in each box, what the frames are called, and which arrows there are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from tinygrad_mha.notation import write_number, write_shape
from tinygrad_mha.viz.diagram import formulas as formula
from tinygrad_mha.viz.diagram.fold import PRODUCTS, Draft, can_be_a_table, is_weights
from tinygrad_mha.viz.diagram.labels import heading, place_title
from tinygrad_mha.viz.diagram.modules import Place
from tinygrad_mha.viz.diagram.picture import Cluster, Edge, Kind, Node, Picture, Table
from tinygrad_mha.viz.diagram.record import BACKWARD, FORWARD, Value

STEPS = {"linear": "Linear", "matmul": "Linear", "gelu": "GELU", "relu": "ReLU", "tanh": "tanh"}


def compose(draft: Draft, titles: dict[Value, str]) -> Picture:
    """Boxes, frames and arrows, as plain data."""
    picture = Picture()
    for place, id in draft.frames.items():
        parent = draft.frame_around(place.parent)
        picture.clusters.append(Cluster(id, place_title(place), frame_lines(draft, place), parent))
    for box, id in draft.boxes.items():
        node = value_node(draft, titles, box, id) if isinstance(box, Value) else place_node(draft, box, id)
        picture.nodes.append(node)
        if isinstance(box, Value) and box.backward:
            picture.pairs += [(draft.boxes[v], id) for v in box.gradient_of[:1] if v in draft.boxes]
    picture.edges = edges(draft)
    if draft.options.separate:
        insert_operations(draft, picture)
    return picture


# --------------------------------------------------------------------------------------------------------------------
# Boxes


def value_node(draft: Draft, titles: dict[Value, str], value: Value, id: str) -> Node:
    kind, cluster, hint = draft.kinds[value], draft.frame_around(draft.home[value]), tooltip(value, titles[value])
    if draft.is_plus(value):
        return Node(id, "plus", "+", cluster=cluster, tooltip=hint)
    named = value.name or value.op is None or not draft.options.separate
    node = Node(id, kind, heading(draft, titles, value) if named else "", write_shape(value.array.shape))
    node.lines = lines_under(draft, titles, value, node.title)
    if value in draft.numbers:
        node.value = Table(panels(value.array), palette(value, kind))
    node.gradient = gradient(draft, value)
    node.warning = not_finite(value)
    node.tooltip = hint
    node.cluster = cluster
    return node


def lines_under(draft: Draft, titles: dict[Value, str], value: Value, title: str) -> list[str]:
    """What stands under a title: the kind in a word, so that nobody needs to see colours, and the formula."""
    kind = draft.kinds[value]
    word = kind if kind in ("input", "parameter", "attention", "output") else ""
    if value.op is None and kind == "gradient":
        return ["begins as 1" if value.array.size == 1 and value.array.item() == 1 else "as given"]
    if value.op is None or draft.options.separate:
        return [word] if word else []
    named = draft.reads(value)
    if value.backward and all(isinstance(draft.box(v), Place) for v in named):
        return [f"from {', '.join(dict.fromkeys(titles[v] for v in named))}"]  # the formula would name nothing else
    text = formula.formula(value, titles.__getitem__, draft.inlined.__contains__)
    if kind == "parameter":
        return [word, text]  # a slice: two short lines, for its box is narrow
    if word and not text.startswith(word):
        text = f"{word}: {text}"
    # As many characters as fit under the title and over the table; without a table, a line may be longer.
    columns = value.array.shape[-1] if value.array.ndim else 1
    room = max(24, 3 * len(title) // 2, 2 * columns) if value in draft.numbers else 40
    return formula.lines(text, min(room, 48), 8 if value.backward else 3)


def place_node(draft: Draft, place: Place, id: str) -> Node:
    leaving = draft.leaving(place)
    results = dict.fromkeys(write_shape(v.array.shape) for v in leaving)
    own = [v for v in place.values if v.op] or [v for child in place.children for v in child.values]
    is_attention = any(v.op and (v.op.name == "attention" or draft.kinds[v] == "attention") for v in own)
    kind: Kind = "output" if any(v in draft.roots for v in leaving) else "attention" if is_attention else "op"
    node = Node(id, kind, place_title(place), ", ".join(results))
    node.lines = [describe(draft, place)]
    node.parameters = parameters_in(draft, place)
    node.cluster = draft.frame_around(place.parent)
    node.warning = next(filter(None, map(not_finite, leaving)), "")
    if draft.options.values and len(leaving) == 1 and can_be_a_table(leaving[0].array):
        node.value = Table(panels(leaving[0].array), palette(leaving[0], "op"))
    node.tooltip = f"{place.path or place.kind}: {len(place.contents())} tensors"
    return node


def describe(draft: Draft, place: Place) -> str:
    """The class of a closed module, the number of its heads, or the few operations that it does."""
    n_head = getattr(place.module, "n_head", None)
    if n_head:
        return f"{place.kind}, {n_head} head{'s' if n_head > 1 else ''}"
    made = sorted((v for v in place.contents() if v.op), key=draft.order.__getitem__)
    steps = [STEPS[v.op.name] for v in made if v.op and v.op.name in STEPS]
    if 1 < len(steps) < 4 and not any(v.op and v.op.name in ("attention", "softmax") for v in made):
        return " → ".join(steps)
    return place.kind or f"{len(made)} operations"


def frame_lines(draft: Draft, place: Place) -> list[str]:
    return [line for line in (place.kind if place.name else "", parameters_in(draft, place)) if line]


def parameters_in(draft: Draft, place: Place) -> str:
    """How many numbers are trained in a place, or to what the parameters are tied that it uses."""
    contents = place.contents()
    if place.name in (FORWARD, BACKWARD) or any(v.backward for v in contents):
        return ""
    leaves = [v for v in contents if v.op is None and draft.kinds[v] == "parameter"]
    count = getattr(place.module, "count", None)
    n = sum(v.array.size for v in leaves) if count is None else count()
    if n and not leaves:
        owners = [draft.home[s] for v in contents for s in v.sources if draft.kinds[s] == "parameter"]
        return f"tied to {owners[0].name}" if owners else ""
    return f"{n:,} parameter{'s' * (n != 1)}{' each' * (len(place.run) > 1)}" if n else ""


def gradient(draft: Draft, value: Value) -> Table | str | None:
    """A table, or which of the two reasons there is for none: not computed yet, not required."""
    wanted = draft.options.grads
    if wanted is False or value.backward or value.array.dtype.kind != "f":
        return None
    if wanted is None and (value not in draft.numbers or draft.two_halves):
        return None
    if value.gradient is not None:
        if can_be_a_table(value.array):
            return Table(panels(value.gradient), "gradient", second=value in draft.numbers)
        return f"gradient ±{write_number(largest(value.gradient))}"
    if not draft.gradients_flow:
        return None
    if value.wants:
        return "gradient: not computed"
    return "gradient: not required"


# --------------------------------------------------------------------------------------------------------------------
# Arrows


def edges(draft: Draft) -> list[Edge]:
    """Who is made from whom. Where a box stands for several values, several arrows can become one."""
    found: list[Edge] = []
    first: dict[tuple[str, str], Edge] = {}
    repeated: Counter[tuple[str, str]] = Counter()
    for value in draft.values:
        target = draft.box(value)
        if value.op is None or value in draft.inlined or target is None:
            continue
        residual = residual_source(draft, value) if isinstance(target, Value) else None
        for source in draft.reads(value):
            start = draft.box(source)
            if start is None or start is target or between_repetitions(draft, source, value):
                continue
            if value.backward and not source.backward and not draft.options.separate:
                continue  # the formula names it; arrows across the whole picture would hide the rest
            ends = draft.boxes[start], draft.boxes[target]
            if ends in first:
                repeated[ends] += source in draft.stands_for and value not in draft.stands_for
                if are_one_arrow(draft, start, target, source, value):
                    continue
            edge = Edge(*ends, *edge_kind(draft, source, value, start, source is residual))
            first.setdefault(ends, edge)
            found.append(edge)
    for ends, times in repeated.items():
        if times:
            first[ends].label = f"×{times + 1}"
    return found


def are_one_arrow(draft: Draft, start: Value | Place, target: Value | Place, source: Value, value: Value) -> bool:
    """Whether a second arrow between two boxes says nothing new. In `x * x` it does: there are two."""
    closed = isinstance(start, Place) or isinstance(target, Place)
    return closed or value.backward or source in draft.stands_for or value in draft.stands_for


def between_repetitions(draft: Draft, source: Value, value: Value) -> bool:
    """Whether an arrow leads from one repetition of a block into another: that is what ×N says."""
    if source not in draft.stands_for and value not in draft.stands_for:
        return False
    ways = draft.home[source].outward(), list(draft.home[value].outward())
    return any(p.run is q.run and p is not q for p in ways[0] for q in ways[1])


def edge_kind(draft: Draft, source: Value, value: Value, start: Value | Place, residual: bool) -> tuple[Any, str]:
    if residual:
        return "residual", "residual"
    if value.backward:
        return "gradient" if source.backward else "recall", ""
    kind = draft.kinds[source]
    if kind == "parameter":
        return "parameter", "tied" if isinstance(start, Place) else ""
    return ("input" if kind == "input" else "data"), ""


def residual_source(draft: Draft, value: Value) -> Value | None:
    """x, in x + f(x) where f contains a product: the input of an addition from which the other one was made."""
    assert value.op is not None
    if value.op.name != "add" or len(value.sources) != 2 or value.sources[0] is value.sources[1]:
        return None
    older, newer = sorted(value.sources, key=draft.order.__getitem__)
    if not older.array.shape == newer.array.shape == value.array.shape or draft.kinds[older] == "parameter":
        return None
    oldest, stack, seen, product = draft.order[older], [newer], {newer}, False
    while stack and len(seen) < 5000:
        step = stack.pop()
        if step is older:
            return older if product else None
        product = product or (step.op is not None and step.op.name in PRODUCTS)
        fresh = [s for s in step.sources if s not in seen and draft.order[s] >= oldest]
        seen.update(fresh)
        stack += fresh
    return None


def insert_operations(draft: Draft, picture: Picture) -> None:
    """The plain autograd graph: an oval for each operation, between its operands and its result."""
    made = {id: box for box, id in draft.boxes.items()}
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
# Arrays


def palette(value: Value, kind: Kind) -> Any:
    return "attention" if is_weights(value) else "gradient" if kind == "gradient" else "value"


def panels(array: np.ndarray) -> np.ndarray:
    """A copy, as matrices: (panels, rows, columns)."""
    if array.ndim < 2:
        return np.array(array).reshape(1, 1, -1)
    return np.array(array).reshape(-1, *array.shape[-2:])


def largest(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def not_finite(value: Value) -> str:
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
    told = [f"{title}, {write_shape(array.shape)}, {array.dtype}"]
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
