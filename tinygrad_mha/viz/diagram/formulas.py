"""The formula of a value: the notation of its primitive, with the formulas of folded inputs written out."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from tinygrad_mha.notation import Call, Formula, write_constant
from tinygrad_mha.viz.diagram.record import SHAPE_ONLY, Value

LONGEST_OPERAND = 24


def formula(value: Value, title: Callable[[Value], str], folded: Callable[[Value], bool]) -> str:
    """What made `value`, in one line. Inputs for which `folded` answers yes are written out, others by their title."""
    said = expression(value, title, folded)
    sentence = value.op.sentence if value.op else None
    if sentence is not None and value.sources and not folded_further(value, folded):
        return sentence(called(value, title, folded))
    if (
        value.op
        and value.op.name in SHAPE_ONLY
        and said.text in {shortened(title(v), LONGEST_OPERAND) for v in chain(value, folded)}
    ):
        return f"{said.text}, rearranged"
    return ", ".join(said.remarks) + ": " + said.text if said.remarks else said.text


def chain(value: Value, folded: Callable[[Value], bool]) -> list[Value]:
    """The values at the end of a chain of first operands that are written out."""
    while value.sources and folded(value.sources[0]):
        value = value.sources[0]
    return value.sources[:1]


def folded_further(value: Value, folded: Callable[[Value], bool]) -> bool:
    """Whether the first operand is itself a formula, other than a mask, which the sentence can say in a word."""
    first = value.sources[0]
    return folded(first) and not (first.op and first.op.kind == "mask" and not any(map(folded, first.sources)))


def expression(value: Value, title: Callable[[Value], str], folded: Callable[[Value], bool]) -> Formula:
    """The formula of `value`, with the formulas of its folded inputs in their places."""
    assert value.op is not None
    call = called(value, title, folded)
    said = Formula(f"dropout({call.x.text})") if is_dropout(value) else value.op.formula(call)
    remarks = [r for operand in call.operands if operand for r in operand.remarks] + list(said.remarks)
    return said._replace(remarks=tuple(dict.fromkeys(remarks)), kind=value.op.kind)


def called(value: Value, title: Callable[[Value], str], folded: Callable[[Value], bool]) -> Call:
    """The call that made `value`, as the writer of its primitive wants it."""
    assert value.op is not None
    op, inputs = value.op, value.inputs

    def operand(x: Any) -> Formula | None:
        if not isinstance(x, Value):
            return None if x is None else write_constant(x)
        if folded(x):
            return expression(x, title, folded)
        return Formula(shortened(title(x), LONGEST_OPERAND), kind=x.op.kind if x.op else "")

    return Call(
        op.label,
        tuple(operand(x) for x in inputs),
        tuple(None if isinstance(x, Value) else x for x in inputs),
        tuple(np.shape(x.array if isinstance(x, Value) else x) for x in inputs),
        {k: v for k, v in value.kwargs.items() if k not in op.defaults or not is_same(v, op.defaults[k])},
        value.array.shape,
    )


def is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (int, float, str, tuple)) and a == b)


def is_dropout(value: Value) -> bool:
    """Whether `value` is a product with an array of zeros and one other number."""
    x = value.inputs[-1]
    return value.op is not None and value.op.name == "mul" and isinstance(value.inputs[0], Value) and is_keep_mask(x)


def is_keep_mask(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim > 1 and x.size > 0 and bool(((x == 0) | (x == x.max())).all())


def lines(text: str, width: int, most: int) -> list[str]:
    """A formula broken at its spaces, cut after `most` lines."""
    return textwrap.wrap(text, width, max_lines=most, placeholder=" …", break_on_hyphens=False)


def shortened(text: str, most: int) -> str:
    """A long text without its middle."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2 - 1) :]}"
