"""What things are called: by the names that people gave them, then by their module, then by what made them."""

from __future__ import annotations

from collections import defaultdict

from tinygrad_mha.viz.diagram.fold import Draft, is_unary, is_weights
from tinygrad_mha.viz.diagram.modules import Place
from tinygrad_mha.viz.diagram.record import Value


def titles_of(draft: Draft) -> dict[Value, str]:
    """A name for each value: the user's, else that of its module, else what made it, numbered."""
    titles: dict[Value, str] = {}
    unnamed: dict[tuple[str | None, str], list[Value]] = defaultdict(list)
    results = results_of_places(draft)
    for value in draft.values:
        closed = draft.closed_in[draft.home[value]]
        if closed is not None:
            titles[value] = place_title(closed)
        elif value.name:
            titles[value] = value.name
        elif value in draft.local_names:
            titles[value] = name_in_frame(draft, value, draft.local_names[value])
        elif value in results and not value.backward:
            titles[value] = results[value]
        elif draft.is_plus(value):
            titles[value] = "x"  # the residual stream; its box is a mere +
        else:
            unnamed[draft.frame_around(draft.home[value]), word_for(draft, value)].append(value)
    for (_, word), values in unnamed.items():
        shown = [value for value in values if value in draft.boxes]
        titles |= dict.fromkeys(values, word)
        if len(shown) > 1:
            titles |= {value: f"{word}_{i}" for i, value in enumerate(shown, 1)}
    for value in draft.values:
        of = [titles[v] for v in value.gradient_of if v not in draft.inlined]
        if of and value.backward:
            titles[value] = f"∂L/∂{of[0]}"
    return titles


def name_in_frame(draft: Draft, parameter: Value, name: str) -> str:
    """The name of a parameter of a module, with the modules between it and the frame that it stands in."""
    place = draft.home[parameter]
    while place.parent is not None and place not in draft.frames:
        name, place = f"{place.name}.{name}".removeprefix("."), place.parent
    return name


def heading(draft: Draft, titles: dict[Value, str], value: Value) -> str:
    """The title of a box. A gradient that passes an addition unchanged is that of several values."""
    same = [titles[v] for v in value.gradient_of[:3] if value.backward and v not in draft.inlined]
    return " = ".join(f"∂L/∂{title}" for title in same) or titles[value]


def results_of_places(draft: Draft) -> dict[Value, str]:
    """For the one value that leaves an open module: the name of the module."""
    results: dict[Value, str] = {}
    for place in draft.tree.inside():
        leaving = draft.leaving(place)
        if len(leaving) == 1 and leaving[0] not in draft.roots and place.name and not place.closed:
            results[leaving[0]] = place.name  # an inner place comes later, and has the last word
    return results


def word_for(draft: Draft, value: Value) -> str:
    """What to call a value without a name."""
    if value in draft.roots and value.op is not None:
        return "loss" if value.op.name == "cross_entropy" else "output"
    if is_weights(value):
        return "weights"
    if value.op is None:
        return name_in_frame(draft, value, role(value)) if draft.kinds[value] == "parameter" else "input"
    core = value
    while is_unary(core) and core.sources[0] in draft.inlined:
        core = core.sources[0]
    named_after = value if is_unary(core) else core  # the scale of a matmul is a matmul
    assert named_after.op is not None
    return named_after.op.name


def role(parameter: Value) -> str:
    """What the first operation that uses a parameter calls it: weight, bias."""
    for user in parameter.users[:1]:
        assert user.op is not None
        argument = user.op.argument(user.inputs.index(parameter))
        if argument in ("weight", "bias"):
            return argument
    return "parameter"


def place_title(place: Place) -> str:
    if len(place.run) == 1:
        backward = place.closed and any(value.backward for value in place.contents())
        return f"{'backward of ' * backward}{place.name or place.kind}"
    a, b = place.name, place.run[-1].name
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same] and not a[same].isdigit():
        same += 1
    return f"{a}…{b[same:]}  ×{len(place.run)}"
