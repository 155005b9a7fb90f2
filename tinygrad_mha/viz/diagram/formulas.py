"""The formula of a value: its primitive writes it, with the formulas of inlined operands in their places."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from tinygrad_mha.notation import PRODUCT, SUM, Call, Formula, write_constant
from tinygrad_mha.viz.diagram.fold import Layout
from tinygrad_mha.viz.diagram.record import RESHAPING, Value

__all__ = ["make_call", "shorten", "wrap_formula", "write_formula"]

LONGEST_OPERAND = 24


def write_formula(layout: Layout, titles: dict[Value, str], value: Value) -> str:
    """How `value` was made, in one line: a sentence if its primitive has one, else the formula."""
    assert value.op is not None
    if value.op.sentence is not None and value.sources and not starts_with_formula(layout, value):
        return value.op.sentence(make_call(value, operand_writer(layout, titles)))
    formula = build_formula(layout, titles, value)
    source = value
    while source.sources and source.sources[0] in layout.inlined:
        source = source.sources[0]
    unchanged = {shorten(titles[v], LONGEST_OPERAND) for v in source.sources[:1]}
    if value.has_kind(*RESHAPING) and formula.text in unchanged:
        return f"{formula.text}, {'rearranged' if value.array.size == source.sources[0].array.size else 'broadcast'}"
    return ", ".join(formula.remarks) + ": " + formula.text if formula.remarks else formula.text


def starts_with_formula(layout: Layout, value: Value) -> bool:
    """Whether the first operand is a formula, other than a mask, which a sentence mentions in a word."""
    first = value.sources[0]
    return first in layout.inlined and not (first.has_kind("mask") and not layout.inlined.intersection(first.sources))


def build_formula(layout: Layout, titles: dict[Value, str], value: Value) -> Formula:
    """The formula of a computed value, with the remarks of its operands."""
    assert value.op is not None
    call = make_call(value, operand_writer(layout, titles))
    if value.has_kind("choice") and value.rule_of is not None and value.rule_of.kind in ("mask", "attention"):
        formula = Formula(f"{call.operand(1).within(PRODUCT)} where allowed", SUM)
    else:
        formula = value.op.formula(call)
    inner = () if value.has_kind("attention") else call.operands  # attention has its own word for what is in heads
    remarks = [remark for operand in inner if operand for remark in operand.remarks] + list(formula.remarks)
    return formula._replace(remarks=tuple(dict.fromkeys(remarks)), kind=value.op.kind)


def operand_writer(layout: Layout, titles: dict[Value, str]) -> Callable[[Any], Formula | None]:
    """What writes an operand: an inlined value by its formula, another by its title, a constant by its digits."""

    def write_operand(x: Any) -> Formula | None:
        if not isinstance(x, Value):
            return None if x is None else write_constant(x)
        if x in layout.inlined and x.op is not None:
            return build_formula(layout, titles, x)
        return Formula(shorten(titles[x], LONGEST_OPERAND), kind=x.op.kind if x.op else "")

    return write_operand


def make_call(value: Value, write_operand: Callable[[Any], Formula | None]) -> Call:
    """The operation that made `value`, as its writer sees it. `write_operand` writes its values and constants."""
    op = value.op
    assert op is not None
    given = {
        name: option
        for name, option in value.kwargs.items()
        if name not in op.defaults or isinstance(option, np.ndarray) or option != op.defaults[name]
    }
    return Call(
        label=op.label,
        operands=tuple(write_operand(x) for x in value.inputs),
        constants=tuple(None if isinstance(x, Value) else x for x in value.inputs),
        shapes=tuple(x.array.shape if isinstance(x, Value) else np.shape(x) for x in value.inputs),
        keywords=given,
        shape=value.array.shape,
    )


def wrap_formula(text: str, width: int, most: int) -> list[str]:
    """A formula broken at its spaces, cut after `most` lines."""
    return textwrap.wrap(text, width, max_lines=most, placeholder=" …", break_on_hyphens=False)


def shorten(text: str, most: int) -> str:
    """A long text without its middle."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2 - 1) :]}"
