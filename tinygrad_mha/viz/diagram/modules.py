"""Where each value belongs: the tree of modules, which of them stay closed, and which are repetitions of another.

A place is one module in the run, or any entry that the user pushed with `engine.scope`. Nodes say in which place a
computed value was made. A leaf is at home in the module that owns it; else in the innermost place that holds all of its
users, so that W_Q1 stands inside of "head 1". Inputs come from outside and stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from tinygrad_mha.viz.diagram.picture import Kind
from tinygrad_mha.viz.diagram.record import BACKWARD, FORWARD, SHAPE_ONLY, Value

Pattern = str | Callable[[str], bool]


class Place:
    """A module of the run: its name, its class, what is in it, and how it shall be drawn."""

    def __init__(self, entry: Any, parent: Place | None) -> None:
        self.entry = entry
        self.name = str(getattr(entry, "name", entry))
        self.kind = str(getattr(entry, "kind", ""))
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.path: str = f"{parent.path}.{self.name}" if parent is not None and parent.path else self.name
        self.children: list[Place] = []
        self.values: list[Value] = []  # at home right here, in the order of the run
        self.closed = False
        self.twin: Place | None = None  # in the backward half: the place whose gradients are here
        self.run: list[Place] = [self]  # neighbours that compute the same; only the first of them is drawn

    @property
    def module(self) -> Any:
        """The module itself, or None where it lives no longer, or never was one."""
        reference = getattr(self.entry, "module", None)
        return reference() if reference is not None else None

    def inside(self) -> Iterable[Place]:
        """This place and all places in it, outer ones first."""
        stack = [self]
        while stack:
            place = stack.pop()
            yield place
            stack.extend(reversed(place.children))

    def contents(self) -> list[Value]:
        """All values in here, place by place."""
        return [value for place in self.inside() for value in place.values]

    def outward(self) -> Iterable[Place]:
        """This place and all places around it, inner ones first."""
        place: Place | None = self
        while place is not None:
            yield place
            place = place.parent

    def matches(self, patterns: Sequence[Pattern]) -> bool:
        """Whether one of the patterns means this place: its path from any module down, its class, or a predicate."""
        if self.parent is None:
            return False
        steps = [place.path for place in self.outward() if place.parent is not None]
        paths = [self.path, *(self.path[len(outer) + 1 :] for outer in steps[1:])]

        def means(pattern: Pattern) -> bool:
            if callable(pattern):
                return bool(pattern(self.path))
            return pattern == self.kind or any(pattern == path or fnmatchcase(path, pattern) for path in paths)

        return any(map(means, patterns))


def plant(values: Sequence[Value], kinds: dict[Value, Kind]) -> tuple[Place, dict[Value, Place], dict[Value, str]]:
    """The tree of places, the home of each value, and the names that modules have for their parameters.

    What a module uses and does not own was given to it: such leaves become inputs in `kinds`.
    """
    root, known, home = Place("", None), {}, {}
    twins: dict[Place, Place] = {}  # from the forward half to the backward half

    def step(place: Place, entry: Any) -> Place:
        key = (place, identity(entry))
        if key not in known:
            known[key] = Place(entry, place)
            place.children.append(known[key])
        return known[key]

    for value in values:
        if value.backward and not twins:
            twins |= mirror(root, step)
        home[value] = root
        for entry in value.scope:
            home[value] = step(home[value], entry)
    names = house_leaves(values, kinds, root, home)
    for value in values:
        if value.backward and value.gradient_of:
            home[value] = twins[home[value.gradient_of[0]]]
    for value in values:
        home[value].values.append(value)
    return root, home, names


def house_leaves(
    values: Sequence[Value], kinds: dict[Value, Kind], root: Place, home: dict[Value, Place]
) -> dict[Value, str]:
    """Give each leaf a home, and those that a module owns the name that they have there."""
    owners, given_at = owned_by_modules(root), entrance(values, root, home)
    names = {}
    for value in values:
        if value.op is not None or not value.users:
            continue
        if id(value.tensor) in owners:
            home[value], names[value] = owners[id(value.tensor)]
            continue
        home[value] = around([home[user] for user in value.users if user.backward == value.backward])
        used_by_a_module = any(place.module is not None for place in home[value].outward())
        if used_by_a_module and not value.backward and (value.name or "")[:1] not in ("W", "w"):
            kinds[value] = "input"
        if kinds[value] == "input":
            home[value] = given_at
    return names


def entrance(values: Sequence[Value], root: Place, home: dict[Value, Place]) -> Place:
    """Where inputs stand: outside of all modules, unless one module is the frame of the whole picture."""
    place = root.children[0] if root.children and root.children[0].name == FORWARD else root
    whole = len(place.children) == 1 and not any(v.op and home[v] is place for v in values)
    return place.children[0] if whole and place.children[0].kind else place


def identity(entry: Any) -> tuple[str, int]:
    """What makes an entry of a scope the same place: name and module. The reference to a module outlives it."""
    return str(getattr(entry, "name", entry)), id(getattr(entry, "module", None))


def owned_by_modules(root: Place) -> dict[int, tuple[Place, str]]:
    """For each parameter of a module in the run, by identity: the innermost place that has it, and its name there.

    One that two modules share belongs to the first of them.
    """
    owners: dict[int, tuple[Place, str]] = {}
    for place in root.inside():
        own = getattr(place.module, "named_parameters", list)
        for name, parameter in own():
            known = owners.get(id(parameter))
            if known is None or known[0] in place.outward():
                owners[id(parameter)] = place, name
    return owners


def mirror(root: Place, step: Callable[[Place, Any], Place]) -> dict[Place, Place]:
    """Build the backward half of the tree like the forward half: gradients live where their values do."""
    half = root.children[0]
    twins = {root: root, half: step(root, BACKWARD)}
    for place in half.inside():
        if place is not half and place.parent is not None:
            twins[place] = step(twins[place.parent], place.entry)
            twins[place].twin = place
    return twins


def around(places: Sequence[Place]) -> Place:
    """The innermost place that holds all of these."""
    common = list(places[0].outward())
    for place in places[1:]:
        ways_out = set(place.outward())
        common = [p for p in common if p in ways_out]
    return common[0]


def close(root: Place, depth: int | None, collapse: Sequence[Pattern], expand: Sequence[Pattern]) -> None:
    """Close what lies deeper than `depth` and what `collapse` means, except for what leads to what `expand` means.

    With a `depth`, a module that is a single operation is one box at any depth: its parameters are a detail.
    """
    wanted = {outer for place in root.inside() if place.matches(expand) for outer in place.outward()}
    for place in root.inside():
        computed = [v for v in place.contents() if v.op is not None and v.op.name not in SHAPE_ONLY]
        single = place.kind and len(computed) == 1
        too_deep = depth is not None and (place.depth > depth or single)
        place.closed = place.parent is not None and place not in wanted and (too_deep or place.matches(collapse))
        if place.twin is not None:
            place.closed = place.twin.closed


def repetitions(root: Place, expand: Sequence[Pattern], least: int = 3) -> dict[Value, Value]:
    """Find neighbours that compute the same, keep the first of each run, and say which value of it stands for which.

    Blocks of a network one after the other are neighbours, and so are heads side by side. The places that are not
    kept are taken out of the tree.
    """
    stands_for: dict[Value, Value] = {}
    stack = [root]
    while stack:
        parent = stack.pop()
        runs: list[list[Place]] = []
        shapes: list[Any] = []
        for place in parent.children:
            opened = tuple(p.matches(expand) for p in place.inside())
            shape = object() if opened[0] else (place.kind, opened, fingerprint(place))
            if shapes and shapes[-1] == shape:
                runs[-1].append(place)
            else:
                runs.append([place])
                shapes.append(shape)
        parent.children = []
        for run in runs:
            if len(run) < least:
                parent.children += run
                continue
            first = run[0]
            first.run = run
            parent.children.append(first)
            for other in run[1:]:
                other.run = run
                stands_for |= dict(zip(other.contents(), first.contents(), strict=True))
        stack += parent.children
    return stands_for


def fingerprint(place: Place) -> tuple[Any, ...]:
    """What a place computes, apart from names and numbers: operations, shapes, and who reads from whom."""
    contents = place.contents()
    index: dict[Value, Any] = {value: i for i, value in enumerate(contents)}

    def option(item: tuple[str, Any]) -> Any:
        return item[0], np.shape(item[1]) if isinstance(item[1], np.ndarray) else str(item[1])

    def operand(x: Any) -> Any:
        if isinstance(x, Value):
            return index.setdefault(x, ("from outside", len(index)))
        return np.shape(x) or x

    return tuple(
        (
            value.op.name if value.op else "leaf",
            value.array.shape,
            value.array.dtype.str,
            () if value.op and value.op.name == "getitem" else tuple(map(option, value.kwargs.items())),
            tuple(map(operand, value.inputs)),
        )
        for value in contents
    )
