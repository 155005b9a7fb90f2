"""What boxes and frames are called: by the names that users gave, then by their module, then by their operation."""

from __future__ import annotations

from collections import defaultdict

from tinygrad_mha.viz.diagram.fold import Layout, is_foldable
from tinygrad_mha.viz.diagram.frames import Frame
from tinygrad_mha.viz.diagram.record import RESHAPING, Value
from tinygrad_mha.viz.diagram.roles import ELEMENTWISE, is_attention_weights, weight_role

__all__ = ["choose_titles", "frame_title", "is_plus", "value_heading"]


def choose_titles(layout: Layout) -> dict[Value, str]:
    """A title for each value: the user's name, else that of its module, else its operation, numbered."""
    titles: dict[Value, str] = {}
    unnamed: dict[tuple[str | None, str], list[Value]] = defaultdict(list)
    results = module_results(layout)
    for value in layout.run.values:
        closed = layout.closed_around(value)
        if closed is not None:
            titles[value] = frame_title(layout, closed)
        elif value.name:
            titles[value] = value.name
        elif value in layout.modules.names:
            titles[value] = qualify(layout, value, layout.modules.names[value])
        elif value in results and not value.backward:
            titles[value] = results[value]
        else:
            word = describe_unnamed(layout, value)
            unnamed[layout.cluster_around(layout.modules.frame_of[value]), word].append(value)
    for (_, word), values in unnamed.items():
        shown = [value for value in values if value in layout.boxes]
        titles |= dict.fromkeys(values, word)
        if len(shown) > 1:
            titles |= {value: f"{word}_{i}" for i, value in enumerate(shown, 1)}
    for value in layout.run.values:
        of = [titles[v] for v in value.gradient_of if v not in layout.inlined]
        if of and value.backward:
            titles[value] = f"∂L/∂{of[0]}"
    return titles


def qualify(layout: Layout, parameter: Value, name: str) -> str:
    """The name of a parameter in its module, preceded by the modules between that and the frame that is drawn."""
    frame = layout.modules.frame_of[parameter]
    while frame.parent is not None and frame not in layout.clusters:
        name, frame = f"{frame.name}.{name}".removeprefix("."), frame.parent
    return name


def value_heading(layout: Layout, titles: dict[Value, str], value: Value) -> str:
    """The title in a box. A gradient that passes an addition unchanged is that of several values."""
    same = [titles[v] for v in value.gradient_of[:3] if value.backward and v not in layout.inlined]
    return " = ".join(f"∂L/∂{title}" for title in same) or titles[value]


def module_results(layout: Layout) -> dict[Value, str]:
    """The name of each open module that has a single result, for that result. Inner modules take precedence."""
    results: dict[Value, str] = {}
    for frame in layout.modules.inside(layout.modules.root):
        if frame.name and layout.closed_in[frame] is not frame:
            leaving = layout.results(frame)
            if len(leaving) == 1 and leaving[0] not in layout.run.roots:
                results[leaving[0]] = frame.name
    return results


def describe_unnamed(layout: Layout, value: Value) -> str:
    """A word for a value without a name."""
    if value in layout.run.roots and value.op is not None:
        return "loss" if value.has_kind("loss") else "output"
    if is_attention_weights(value, layout.modules.frame_of):
        return "weights"
    if value.op is None:
        if layout.modules.kinds[value] != "parameter":
            return "input"
        roles = (weight_role(value, user) for user in layout.run.users[value][:1])
        return qualify(layout, value, next(filter(None, roles), "parameter"))
    if argument := attention_argument(layout, value):
        return argument
    core = value
    while is_foldable(core) and core.sources[0] in layout.inlined:
        core = core.sources[0]
    if core.has_kind(*ELEMENTWISE):
        core = value  # (c - d) ** 2 is called pow
    named_after = value if is_foldable(core) else core  # a scaled matmul is called matmul
    assert named_after.op is not None
    return named_after.op.name


def attention_argument(layout: Layout, value: Value) -> str:
    """Q, K or V for what one attention takes as such, perhaps rearranged; "" for other values."""
    while len(layout.run.users[value]) == 1:
        (user,) = layout.run.users[value]
        if user.op is not None and user.has_kind("attention"):
            (i, *_) = (i for i, x in enumerate(user.inputs) if x is value)
            return user.op.argument_name(i).upper() if user.op.role(i) == "data" else ""
        if user.name or not user.has_kind(*RESHAPING):
            return ""
        value = user
    return ""


def is_plus(layout: Layout, value: Value) -> bool:
    """Whether an unnamed sum of two values is drawn as a mere +: its numbers are not shown."""
    if not value.has_kind("addition") or value.name or layout.modules.kinds[value] != "op" or value.backward:
        return False
    if len(value.sources) != 2 or any(layout.modules.kinds[source] == "parameter" for source in value.sources):
        return False
    return not (value in layout.tables or layout.options.separate or layout.inlined.intersection(value.sources))


def frame_title(layout: Layout, frame: Frame) -> str:
    """The name of a frame; of a group that is drawn once, the first and the last name and their number."""
    group = layout.repeats.get(frame, [frame])
    if len(group) == 1:
        is_backward = layout.closed_in[frame] is not None and frame.forward is not None
        return f"{'backward of ' if is_backward else ''}{frame.name or frame.class_name}"
    a, b = group[0].name, group[-1].name
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same] and not a[same].isdigit():
        same += 1
    return f"{a}…{b[same:]}  ×{len(group)}"
