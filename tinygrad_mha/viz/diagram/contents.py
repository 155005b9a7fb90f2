"""The picture as plain data: the lines in each box, the titles of the frames, and the arrows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from tinygrad_mha.notation import write_number, write_shape
from tinygrad_mha.viz.diagram.fold import Layout, fits_a_table
from tinygrad_mha.viz.diagram.formulas import wrap_formula, write_formula
from tinygrad_mha.viz.diagram.frames import Frame
from tinygrad_mha.viz.diagram.heat import MOST_COLUMNS, largest_magnitude
from tinygrad_mha.viz.diagram.labels import frame_title, is_plus, value_heading
from tinygrad_mha.viz.diagram.picture import Cluster, Edge, Kind, Node, Picture, Table
from tinygrad_mha.viz.diagram.record import Value
from tinygrad_mha.viz.diagram.roles import is_attention_weights

__all__ = ["compose_picture"]

MOST_NUMBERED_BY_DEFAULT = 5  # rows and columns
MOST_NUMBERED_ROWS = 32
MOST_SHAPES = 3  # of the results of a closed module
NOT_COMPUTED = "gradient: not computed", "grad not computed"  # of an array, of a scalar
NOT_REQUIRED = "gradient: not required", "grad not required"
MAX_SEARCHED = 5000  # values between the two operands of an addition


def compose_picture(layout: Layout, titles: dict[Value, str]) -> Picture:
    """The boxes, frames and arrows of a layout."""
    picture = Picture()
    for frame, id in layout.clusters.items():
        lines = [line for line in (frame.class_name if frame.name else "", parameters_line(layout, frame)) if line]
        picture.clusters.append(Cluster(id, frame_title(layout, frame), lines, layout.cluster_around(frame.parent)))
    for box, id in layout.boxes.items():
        node = value_node(layout, titles, box, id) if isinstance(box, Value) else frame_node(layout, box, id)
        picture.nodes.append(node)
        if isinstance(box, Value) and box.backward:
            picture.pairs += [(layout.boxes[v], id) for v in box.gradient_of[:1] if v in layout.boxes]
    say_once(picture)
    picture.edges = draw_edges(layout)
    if layout.options.separate:
        insert_operations(layout, picture)
    return picture


def say_once(picture: Picture) -> None:
    """If no gradient is computed yet, say so under the picture and not in every box."""
    words = {node.gradient for node in picture.nodes if isinstance(node.gradient, str)}
    is_none = not any(isinstance(node.gradient, Table) for node in picture.nodes)
    if is_none and words & set(NOT_COMPUTED) and words <= {*NOT_COMPUTED, *NOT_REQUIRED}:
        picture.caption.append("gradients: not computed")
        for node in picture.nodes:
            node.gradient = None


# --------------------------------------------------------------------------------------------------------------------
# Boxes


def value_node(layout: Layout, titles: dict[Value, str], value: Value, id: str) -> Node:
    """The box of a value."""
    kind = layout.modules.kinds[value]
    cluster = layout.cluster_around(layout.modules.frame_of[value])
    tooltip = write_tooltip(value, titles[value])
    if is_plus(layout, value):
        return Node(id, "plus", "+", cluster=cluster, tooltip=tooltip)
    has_title = value.name or value.op is None or not layout.options.separate
    title = value_heading(layout, titles, value) if has_title else ""
    return Node(
        id,
        kind,
        title,
        write_shape(value.array.shape),
        lines=write_lines(layout, titles, value, title),
        value=show_value(layout, value),
        gradient=show_gradient(layout, value),
        warning=count_not_finite(value),
        tooltip=tooltip,
        cluster=cluster,
    )


def write_lines(layout: Layout, titles: dict[Value, str], value: Value, title: str) -> list[str]:
    """The lines under a title: the kind in a word, so that the colour is not needed, and the formula."""
    kind = layout.modules.kinds[value]
    word = kind if kind in ("input", "parameter", "attention", "output") else ""
    if value.op is None and kind == "gradient":
        return ["begins as 1" if value.array.size == 1 and value.array.item() == 1 else "as given"]
    if value.op is None or layout.options.separate:
        return [word] if word else []
    operands = layout.operands(value)
    if value.backward and all(isinstance(layout.box(v), Frame) for v in operands):
        return [f"from {', '.join(dict.fromkeys(titles[v] for v in operands))}"]  # the formula would name nothing else
    text = write_formula(layout, titles, value)
    if kind == "parameter":
        return [word, text]  # a slice: two short lines, for its box is narrow
    if word and not text.startswith(word):
        text = f"{word}: {text}"
    # As many characters as fit under the title and over the table; without a table, a line may be longer.
    columns = value.array.shape[-1] if value.array.ndim else 1
    room = max(24, 3 * len(title) // 2, 2 * columns) if value in layout.tables else 40
    return wrap_formula(text, min(room, 48), 8 if value.backward else 4)


def frame_node(layout: Layout, frame: Frame, id: str) -> Node:
    """The box of a closed module."""
    results = layout.results(frame)
    kind: Kind = "output" if any(v in layout.run.roots for v in results) else "op"
    shapes = list(dict.fromkeys(write_shape(v.array.shape) for v in results))
    shape = ", ".join(shapes) if len(shapes) <= MOST_SHAPES else f"{len(shapes)} shapes"
    node = Node(id, kind, frame_title(layout, frame), shape)
    node.lines = [describe_frame(layout, frame)]
    node.parameters = parameters_line(layout, frame)
    node.cluster = layout.cluster_around(frame.parent)
    node.warning = next(filter(None, map(count_not_finite, results)), "")
    if len(results) == 1:
        (result,) = results
        if layout.options.values and fits_a_table(result.array):
            node.value = make_table(layout, result.array, palette(layout, result))
        elif layout.options.values is not False:
            node.value = write_range(result.array)
        node.gradient = show_gradient(layout, result)
    node.tooltip = f"{frame.path or frame.class_name}: {len(layout.modules.contents(frame))} tensors"
    return node


def describe_frame(layout: Layout, frame: Frame) -> str:
    """The class of a closed module and its detail, such as the number of heads, or the few operations that it does."""
    if frame.scope.detail:
        return f"{frame.class_name}, {frame.scope.detail}"
    made = sorted((v for v in layout.modules.contents(frame) if v.op), key=layout.run.position.__getitem__)
    steps = [v.op.label for v in made if v.op and v.has_kind("product", "activation")]
    if 1 < len(steps) < 4 and not any(v.has_kind("attention", "distribution") for v in made):
        return " → ".join(steps)
    return frame.class_name or f"{len(made)} operation{'s' * (len(made) != 1)}"


def parameters_line(layout: Layout, frame: Frame) -> str:
    line = layout.modules.parameters[frame]
    return f"{line} each" if frame in layout.repeats and line.endswith(("parameter", "parameters")) else line


def make_table(layout: Layout, array: np.ndarray, palette: Any, second: bool = False) -> Table:
    """The table of an array: with its numbers up to 5 x 5, with `values=True` as far as they are legible."""
    data = as_panels(array)
    rows, columns = data.shape[-2:]
    if layout.options.values:
        numbers = columns <= MOST_COLUMNS and rows <= MOST_NUMBERED_ROWS
    else:
        numbers = max(rows, columns) <= MOST_NUMBERED_BY_DEFAULT
    return Table(data, palette, second, numbers)


def show_value(layout: Layout, value: Value) -> Table | str | None:
    """The table of a value; the number of a scalar, which is shown in large pictures too."""
    if value.array.ndim == 0:
        return None if layout.options.values is False else write_scalar(value.array)
    return make_table(layout, value.array, palette(layout, value)) if value in layout.tables else None


def show_gradient(layout: Layout, value: Value) -> Table | str | None:
    """A table; the number of a scalar; the reason why there is none: not computed yet, not required."""
    wanted = layout.options.grads
    if wanted is False or value.backward or value.array.dtype.kind != "f":
        return None
    is_scalar = value.array.ndim == 0
    if wanted is None and layout.run.has_backward:
        return None
    if value.gradient is not None:
        if is_scalar:
            return f"grad {write_scalar(value.gradient)}"
        if value in layout.tables or (wanted and fits_a_table(value.array)):
            return make_table(layout, value.gradient, "gradient", second=value in layout.tables)
        return f"gradient ±{write_number(largest_magnitude(value.gradient), 2)}"
    if not layout.run.records_gradients or (wanted is None and value not in layout.tables):
        return None
    return (NOT_COMPUTED if value.requires_grad else NOT_REQUIRED)[is_scalar]


# --------------------------------------------------------------------------------------------------------------------
# Arrows


def draw_edges(layout: Layout) -> list[Edge]:
    """The arrows from operands to results. Parallel arrows are merged where they repeat each other."""
    edges: list[Edge] = []
    first: dict[tuple[str, str], Edge] = {}
    repeated: Counter[tuple[str, str]] = Counter()
    for value in layout.run.values:
        target = layout.box(value)
        if value.op is None or value in layout.inlined or target is None:
            continue
        residual = find_residual(layout, value) if isinstance(target, Value) else None
        arguments = list_attention_arguments(layout, value) if isinstance(target, Value) else []
        for i, source in enumerate(layout.operands(value)):
            start = layout.box(source)
            if start is None or start is target or joins_repetitions(layout, source, value):
                continue
            if value.backward and not source.backward and not layout.options.separate:
                continue  # the formula names it; arrows across the whole picture would hide the rest
            ends = layout.boxes[start], layout.boxes[target]
            if ends in first:
                if source in layout.stands_for and value not in layout.stands_for:
                    repeated[ends] += 1
                if arguments and arguments[i] and value not in layout.stands_for:
                    first[ends].label += f", {arguments[i]}"  # Q, K, V
                closed = isinstance(start, Frame) or isinstance(target, Frame) or arguments
                if closed or value.backward or source in layout.stands_for or value in layout.stands_for:
                    continue  # says nothing new; in `x * x` a second arrow does
            edge = Edge(*ends, *edge_kind(layout, source, value, start, source is residual))
            edge.label = edge.label or (arguments[i] if arguments else "")
            first.setdefault(ends, edge)
            edges.append(edge)
    for ends, times in repeated.items():
        first[ends].label = f"×{times + 1}"
    return edges


def joins_repetitions(layout: Layout, source: Value, value: Value) -> bool:
    """Whether an arrow leads from one repetition of a block into another, which ×N says already."""
    if source not in layout.stands_for and value not in layout.stands_for:
        return False
    a, b = find_repeated_frames(layout, source), find_repeated_frames(layout, value)
    return any(b.get(group, frame) is not frame for group, frame in a.items())


def find_repeated_frames(layout: Layout, value: Value) -> dict[int, Frame]:
    """The frames around a value that are drawn once for several, by their group: its members share one list."""
    frames = layout.modules.frame_of[value].enclosing
    return {id(layout.repeats[frame]): frame for frame in frames if frame in layout.repeats}


def edge_kind(layout: Layout, source: Value, value: Value, start: Value | Frame, residual: bool) -> tuple[Any, str]:
    """The kind of an arrow and its label."""
    if residual:
        return "residual", "residual"
    if value.backward:
        return "gradient" if source.backward else "recall", ""
    kind = layout.modules.kinds[source]
    if kind == "parameter":
        return "parameter", "tied" if isinstance(start, Frame) else ""
    return ("input" if kind == "input" else "data"), ""


def list_attention_arguments(layout: Layout, value: Value) -> list[str]:
    """Q, K and V, for each of the operands that attention takes as such; of other values nothing."""
    if value.op is None or not value.has_kind("attention"):
        return []
    names = []
    for i, x in enumerate(value.inputs):
        if isinstance(x, Value):
            name = value.op.argument_name(i).upper() if value.op.role(i) == "data" else ""
            names += [name] * (len(layout.operands(x)) if x in layout.inlined else 1)
    return names


def find_residual(layout: Layout, value: Value) -> Value | None:
    """The operand that an addition passes by f, in x + f(x): the older one, if the newer was made from it by a product.

    The search ends after MAX_SEARCHED values; then the arrow has no label.
    """
    if not value.has_kind("addition") or len(value.sources) != 2 or value.sources[0] is value.sources[1]:
        return None
    position = layout.run.position
    older, newer = sorted(value.sources, key=position.__getitem__)
    same_shape = older.array.shape == newer.array.shape == value.array.shape
    if not same_shape or layout.modules.kinds[older] == "parameter":
        return None
    stack, seen, has_product = [newer], {newer}, False
    while stack and len(seen) < MAX_SEARCHED:
        step = stack.pop()
        if step is older:
            return older if has_product else None
        has_product = has_product or step.has_kind("product", "attention")
        fresh = [s for s in step.sources if s not in seen and position[s] >= position[older]]
        seen.update(fresh)
        stack += fresh
    return None


def insert_operations(layout: Layout, picture: Picture) -> None:
    """Add an oval for each operation, between its operands and its result: the plain autograd graph."""
    operations: dict[str, str] = {}
    for box, id in layout.boxes.items():
        if isinstance(box, Value) and box.op is not None:
            operations[id] = f"o{id[1:]}"
            cluster = layout.cluster_around(layout.modules.frame_of[box])
            node = Node(operations[id], "operation", box.op.name, cluster=cluster, tooltip=box.op.name)
            picture.nodes.append(node)
    for edge in picture.edges:
        edge.target = operations.get(edge.target, edge.target)
    picture.edges += [Edge(operation, result) for result, operation in operations.items()]


# --------------------------------------------------------------------------------------------------------------------
# Arrays


def write_scalar(array: np.ndarray) -> str:
    """A number of four digits: −2.000, 138.8; an integer with all of its digits."""
    x = array.item()
    if isinstance(x, (bool, int)) or not np.isfinite(x):
        return write_number(x) if isinstance(x, float) else str(x).replace("-", "−")
    if x == 0 or 1e-4 <= abs(x) < 9999.5:
        return f"{x:#.4g}".rstrip(".").replace("-", "−") if x else "0"
    return write_number(x)


def write_range(array: np.ndarray) -> str:
    """The least and the largest finite number, for a box without a table."""
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array[:0]
    return f"{write_number(finite.min(), 2)} … {write_number(finite.max(), 2)}" if finite.size else ""


def palette(layout: Layout, value: Value) -> Any:
    if is_attention_weights(value, layout.modules.frame_of):
        return "attention"
    return "gradient" if layout.modules.kinds[value] == "gradient" else "value"


def as_panels(array: np.ndarray) -> np.ndarray:
    """A copy, as matrices: (panels, rows, columns)."""
    if array.ndim < 2:
        return np.array(array).reshape(1, 1, -1)
    return np.array(array).reshape(-1, *array.shape[-2:])


def count_not_finite(value: Value) -> str:
    """How many elements are nan and infinite. −∞ is not counted where a mask put it."""
    array = value.array
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return ""
    masked = any(v.has_kind("mask") for v in (value, *value.sources))
    counts = {"nan": np.isnan(array).sum(), "∞": np.isposinf(array).sum(), "−∞": np.isneginf(array).sum()}
    return ", ".join(f"{n} × {word}" for word, n in counts.items() if n and not (word == "−∞" and masked))


def write_tooltip(value: Value, title: str) -> str:
    """The text that is shown when the pointer rests on a box."""
    array = value.array
    lines = [f"{title}, {write_shape(array.shape)}, {array.dtype}"]
    if array.dtype.kind == "f" and array.size and np.isfinite(array).all():
        lines.append(
            f"min {write_number(array.min())}, mean {write_number(array.mean())}, max {write_number(array.max())}"
        )
    if value.gradient is not None:
        lines.append(f"gradient: norm {write_number(float(np.linalg.norm(value.gradient)))}")
    if value.op is not None:
        lines.append(f"made by {value.op.name}")
    return "\n".join(lines)
