"""Which frames repeat their neighbour, and are drawn once with ×N."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha.nn.module import Scope
from tinygrad_mha.viz.diagram.frames import Frame, Pattern, entry_key, matches
from tinygrad_mha.viz.diagram.modules import Modules
from tinygrad_mha.viz.diagram.record import RESHAPING, Run, Value, content_key

__all__ = ["find_drawn", "fold_repetitions", "frame_chains"]

LEAST_REPETITIONS = 3  # of parts without a class, such as heads; of modules two are enough

LONGEST_STEP = 64  # operations

Repeats = dict[Frame, list[Frame]]
StandsFor = dict[Value, Value]


def fold_repetitions(
    run: Run, modules: Modules, expand: Sequence[Pattern], collapse: Sequence[Pattern], compact: bool
) -> tuple[Modules, Repeats, StandsFor]:
    """Find neighbours that compute the same, such as the blocks of a network and its heads, and keep the first of them.

    `compact`: two heads are enough to be drawn as one.

    Returns the modules without the others, and the `repeats` and `stands_for` of a `Layout`.
    """
    children: dict[Frame, list[Frame]] = {}
    repeats: Repeats = {}
    stands_for: StandsFor = {}
    queue = deque([modules.root])  # frames before those in them, and the forward pass before the backward pass
    while queue:
        parent = queue.popleft()
        children[parent] = []
        for group in group_equals(run, modules, parent, (expand, collapse), repeats, stands_for):
            if len(group) < (2 if group[0].class_name or compact else LEAST_REPETITIONS):
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
    run: Run,
    modules: Modules,
    parent: Frame,
    patterns: tuple[Sequence[Pattern], Sequence[Pattern]],
    repeats: Repeats,
    stands_for: StandsFor,
) -> list[list[Frame]]:
    """Neighbouring frames in groups of those that compute the same from the same, or each from the result of the last.

    Heads that share keys and values with some of their neighbours only are in different groups: an arrow from or to the
    box of a group holds for all of its members. So are parts that are used differently, such as the projections to
    queries, keys and values, and frames of which only some are to be opened or closed by `patterns`, those of `expand`
    and `collapse`.
    """
    expand, collapse = patterns
    groups: list[list[Frame]] = []
    last = None
    for frame in modules.children[parent]:
        wanted = tuple((matches(inner, expand), matches(inner, collapse)) for inner in modules.inside(frame))
        contents = modules.contents(frame)
        steps, outside = fingerprint(contents)
        # object() equals nothing, so an expanded frame is in a group of its own.
        part = Part(frame, object() if wanted[0][0] else (frame.class_name, wanted, steps), outside, set(contents))
        if (
            last is not None
            and continues(last, part, repeats, stands_for)
            and (frame.forward is not None or are_used_alike(run, last, part))
        ):
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


def are_used_alike(run: Run, last: Part, part: Part) -> bool:
    """Whether the second part continues the first, or the results of both are joined or added up in one place."""
    if any(x in last.contents for x in part.outside):
        return True
    users = [{user for v in p.contents for user in run.users[v] if user not in p.contents} for p in (last, part)]
    return users[0] == users[1] and all(user.has_kind("join", "addition") for user in users[0])


def fingerprint(contents: Sequence[Value]) -> tuple[Any, list[Value]]:
    """The operations, shapes and operands without names and numbers; and the operands from outside."""
    index: dict[Value, Any] = {value: i for i, value in enumerate(contents)}
    outside: list[Value] = []

    def describe_option(name: str, option: Any) -> Any:
        return name, np.shape(option) if isinstance(option, np.ndarray) else str(option)

    def describe_operand(x: Any, is_masking: bool) -> Any:
        if not isinstance(x, Value):
            if is_masking and isinstance(x, np.ndarray) and x.dtype.kind == "b":
                return content_key(x)  # not the shape alone: blocks with a causal and a full mask are not equal
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
            tuple(describe_operand(x, value.has_kind("mask", "attention")) for x in value.inputs),
        )
        for value in contents
    )
    return steps, outside


# --------------------------------------------------------------------------------------------------------------------
# Chains outside of modules


def frame_chains(run: Run) -> None:
    """Put each repetition in a chain of operations, such as the steps of a loop, into a frame of its own: "step 1", ...

    Changes the scopes of the values.
    """
    computed = [value for value in run.values if value.op is not None and not value.backward]
    # Operations of one module, with no other module between them: that would be a step of its own.
    for _, group in groupby(computed, key=lambda value: tuple(map(entry_key, value.scope))):
        values = list(group)
        numbers: dict[Any, int] = {}
        kinds = np.array([numbers.setdefault(describe_operation(v), len(numbers)) for v in values])
        i, step = 0, 1
        while i < len(kinds):
            period, times = find_period(kinds[i:])
            if not all(value.has_kind(*RESHAPING) for value in values[i : i + period]):  # as of Q, K and V
                for k in range(times):
                    for value in values[i + k * period : i + (k + 1) * period]:
                        value.scope = (*value.scope, Scope(f"step {step + k}"))
                step += times
            i += max(1, period * times)


def describe_operation(value: Value) -> Any:
    return value.op, value.array.shape, value.array.dtype.str


def find_period(kinds: np.ndarray) -> tuple[int, int]:
    """The length of what the sequence begins with and repeats at once, and how often it occurs; (0, 0) if it does not.

    Among the lengths up to LONGEST_STEP that occur LEAST_REPETITIONS times, the one that covers most of the sequence.
    """
    best = 0, 0
    for period in range(1, min(LONGEST_STEP, len(kinds) // LEAST_REPETITIONS) + 1):
        differs = kinds[period:] != kinds[:-period]
        same = int(differs.argmax()) if differs.any() else len(differs)
        times = same // period + 1
        if times >= LEAST_REPETITIONS and times * period > best[0] * best[1]:
            best = period, times
    return best


def find_drawn(value: Value, stands_for: StandsFor) -> Value:
    """The value itself, or the one that is drawn in its place."""
    while value in stands_for:
        value = stands_for[value]
    return value
