"""How an operation is written on paper: `Q_1 @ K_1ᵀ / √7`, `softmax over each row`.

One small function per primitive, in FORMULAS; a primitive without one is written as a call. A formula has a level, as
in a grammar, so that brackets stand where they are needed and nowhere else.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha.viz.diagram.record import SHAPE_ONLY, Value, is_range

LONGEST_OPERAND = 24
SUM, PRODUCT, SIGN, POWER, ATOM = range(5)


class Formula(NamedTuple):
    """A text, how tightly it holds together, and remarks that belong in front of the whole: scaled, causal mask."""

    text: str
    level: int = ATOM
    remarks: tuple[str, ...] = ()
    factors: tuple[Formula, Formula] | None = None  # of a matrix product

    def within(self, level: int) -> str:
        """The text as part of something that holds at `level`."""
        return self.text if self.level >= level else f"({self.text})"


class Call(NamedTuple):
    """One operation: the formulas of its operands (None for an operand that was left out), and the value it made."""

    operands: list[Formula | None]
    value: Value

    @property
    def x(self) -> Formula:
        """The first operand."""
        return self.operands[0] or Formula("·")

    def option(self, name: str) -> Any:
        return self.value.kwargs.get(name)


def formula(value: Value, title: Callable[[Value], str], folded: Callable[[Value], bool]) -> str:
    """What made `value`, in one line. Inputs for which `folded` answers yes are written out, others by their title."""
    said = expression(value, title, folded)
    sentence = SENTENCES.get(value.op.name) if value.op else None
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
    return folded(first) and not (first.op and first.op.name == "mask" and not any(map(folded, first.sources)))


def expression(value: Value, title: Callable[[Value], str], folded: Callable[[Value], bool]) -> Formula:
    """The formula of `value`, with the formulas of its folded inputs in their places."""
    assert value.op is not None
    call = called(value, title, folded)
    said = FORMULAS.get(value.op.name, as_call)(call)
    remarks = [r for operand in call.operands if operand for r in operand.remarks] + list(said.remarks)
    return said._replace(remarks=tuple(dict.fromkeys(remarks)))


def called(value: Value, title: Callable[[Value], str], folded: Callable[[Value], bool]) -> Call:
    def operand(x: Any) -> Formula | None:
        if not isinstance(x, Value):
            return constant(x)
        return expression(x, title, folded) if folded(x) else Formula(shortened(title(x), LONGEST_OPERAND))

    return Call([operand(x) for x in value.inputs], value)


def lines(text: str, width: int, most: int) -> list[str]:
    """A formula broken at its spaces, cut after `most` lines."""
    return textwrap.wrap(text, width, max_lines=most, placeholder=" …", break_on_hyphens=False)


def shortened(text: str, most: int) -> str:
    """A long text without its middle."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2 - 1) :]}"


# --------------------------------------------------------------------------------------------------------------------
# Constants


def number(x: float) -> str:
    """At most four digits, with a real minus sign."""
    return f"{x:.4g}".replace("-", "−").replace("inf", "∞")


def constant(x: Any) -> Formula | None:
    """A number by its digits, an array by its shape."""
    if x is None:
        return None
    if np.ndim(x) == 0:
        return Formula(number(float(x)), ATOM if float(x) >= 0 else SIGN)
    if is_range(x):
        return Formula(f"{x[0]}…{x[-1]}")
    return Formula(f"constant {shape(np.shape(x))}")


def shape(lengths: tuple[int, ...]) -> str:
    return "×".join(map(str, lengths)) if lengths else "scalar"


def root(x: float) -> int | None:
    """n, if x is the square root of the whole number n."""
    n = round(x * x)
    return n if 1 < n < 10**6 and abs(n**0.5 - x) < 1e-9 * x else None


def divided(x: Formula, by: float, root_first: bool) -> Formula | None:
    """x / √7 or x / 7, if `by` is one of the two; a root is preferred for scores, where √16 says more than 4."""
    n, whole = root(by) if by > 0 else None, by == round(by) and 1 < by < 10**6
    if n is not None and (root_first or not whole):
        return Formula(f"{x.within(PRODUCT)} / √{n}", PRODUCT, ("scaled",) if root_first else ())
    return Formula(f"{x.within(PRODUCT)} / {round(by)}", PRODUCT) if whole else None


def is_causal(allow: Any) -> bool:
    """Whether a mask lets each query see the keys up to its own place, counted from the end."""
    if not isinstance(allow, np.ndarray) or allow.ndim < 2 or allow.shape[-1] < 2:
        return False
    n, m = allow.shape[-2:]
    return m >= n and bool(np.all(allow == np.tri(n, m, m - n, dtype=bool)))


def mask_word(allow: Any) -> str:
    return "causal mask" if is_causal(allow) else "masked"


# --------------------------------------------------------------------------------------------------------------------
# Formulas


def write_mul(c: Call) -> Formula:
    """a * b; a factor of zeros and one other number is what dropout left."""
    if isinstance(c.value.inputs[0], Value) and is_keep_mask(c.value.inputs[1]):
        return Formula(f"dropout({c.x.text})")
    return infix("*", PRODUCT, PRODUCT, SIGN)(c)


def is_keep_mask(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim > 1 and x.size > 0 and bool(((x == 0) | (x == x.max())).all())


def as_call(c: Call) -> Formula:
    """What is not known here: name(operands, options)."""
    assert c.value.op is not None
    defaults = c.value.op.defaults
    options = [
        f"{k}={shape(v) if isinstance(v, tuple) and k == 'shape' else v}"
        for k, v in c.value.kwargs.items()
        if isinstance(v, (int, float, str, tuple)) and v != defaults.get(k, not v)
    ]
    return Formula(f"{c.value.op.name}({', '.join([o.text for o in c.operands if o] + options)})")


def infix(sign: str, level: int, left: int, right: int) -> Callable[[Call], Formula]:
    def write(c: Call) -> Formula:
        a, b = (operand or Formula("·") for operand in c.operands)
        return Formula(f"{a.within(left)} {sign} {b.within(right)}", level)

    return write


def function(name: str) -> Callable[[Call], Formula]:
    return lambda c: Formula(f"{name}({c.x.text})")


def unseen(c: Call) -> Formula:
    """Only the shape changes, and that stands in the corner of the box."""
    return c.x


def write_div(c: Call) -> Formula:
    by = c.value.inputs[1]
    exact = divided(c.x, float(by), is_product(c.value.inputs[0])) if isinstance(by, (int, float)) else None
    return exact or infix("/", PRODUCT, PRODUCT, SIGN)(c)


def write_scale(c: Call) -> Formula:
    by = c.option("by")
    if by == -1:
        return write_neg(c)
    exact = divided(c.x, 1 / by, is_product(c.value.inputs[0])) if by else None
    factor = f"√{root(by)}" if by > 0 and root(by) and by != round(by) else number(by)
    return exact or Formula(f"{factor} · {c.x.within(SIGN)}", PRODUCT)


def is_product(x: Any) -> bool:
    return isinstance(x, Value) and x.op is not None and x.op.name in ("matmul", "einsum")


def write_neg(c: Call) -> Formula:
    return Formula(f"−{c.x.within(SIGN)}", SIGN)


def write_pow(c: Call) -> Formula:
    exponent = c.operands[1] or Formula("·")
    if exponent.text == "1":
        return c.x
    raised = {"2": "²", "3": "³"}.get(exponent.text)
    return Formula(c.x.within(ATOM) + (raised or f" ** {exponent.within(ATOM)}"), POWER)


def write_sqrt(c: Call) -> Formula:
    return Formula(f"√{c.x.within(ATOM)}", SIGN)


def write_abs(c: Call) -> Formula:
    return Formula(f"|{c.x.text}|")


def write_transpose(c: Call) -> Formula:
    """The exchange of the last two axes is ᵀ; moving heads about is left to the shape in the corner."""
    axes, n = c.option("axes"), c.value.array.ndim
    swapped = (*range(n - 2), n - 1, n - 2)
    is_matrix_transpose = n > 1 and (axes == swapped or (axes is None and n == 2))
    return transposed(c.x) if is_matrix_transpose else c.x


def transposed(x: Formula) -> Formula:
    """(A @ B)ᵀ is Bᵀ @ Aᵀ, and Aᵀᵀ is A."""
    if x.factors is not None:
        return product(transposed(x.factors[1]), transposed(x.factors[0]))
    if x.level == POWER and x.text.endswith("ᵀ"):
        return Formula(x.text[:-1])
    return Formula(f"{x.within(ATOM)}ᵀ", POWER, x.remarks)


def product(a: Formula, b: Formula) -> Formula:
    return Formula(f"{a.within(PRODUCT)} @ {b.within(SIGN)}", PRODUCT, factors=(a, b))


def write_matmul(c: Call) -> Formula:
    return product(c.x, c.operands[1] or Formula("·"))


def write_mask(c: Call) -> Formula:
    return c.x._replace(remarks=(mask_word(c.value.inputs[1]),))


def write_where(c: Call) -> Formula:
    """The gradient of a mask is the gradient where the mask let something pass."""
    choice, a, b = (operand or Formula("·") for operand in c.operands)
    if b.text == "0" and not isinstance(c.value.inputs[0], Value):
        return Formula(f"{a.within(PRODUCT)} where allowed", SUM)
    return Formula(f"where({choice.text}, {a.text}, {b.text})")


def write_join(c: Call) -> Formula:
    """Side by side as [a | b], one under the other as [a ; b]."""
    parts = [operand.text for operand in c.operands if operand]
    if len(parts) > 4:
        parts = [*parts[:2], "…", parts[-1]]
    axis, n = c.option("axis"), c.value.array.ndim
    return Formula(f"[{(' | ' if axis in (-1, n - 1) else ' ; ').join(parts)}]")


def write_reduction(c: Call) -> Formula:
    """sum(x) of everything, row sum(x) over the last axis, else with the axis."""
    assert c.value.op is not None
    name, axis, n = c.value.op.name, c.option("axis"), c.value.sources[0].array.ndim
    axes = tuple(range(n)) if axis is None else tuple(i % n for i in np.atleast_1d(axis).tolist())
    if len(axes) == n:
        return Formula(f"{name}({c.x.text})")
    if axes == (n - 1,):
        return Formula(f"row {name}({c.x.text})")
    return Formula(f"{name}({c.x.text}, axis={axes[0] if len(axes) == 1 else axes})")


def write_getitem(c: Call) -> Formula:
    index = c.option("index")
    parts = index if isinstance(index, tuple) else (index,)
    return Formula(f"{c.x.within(ATOM)}[{', '.join(map(index_text, parts))}]")


def index_text(part: Any) -> str:
    if isinstance(part, slice):
        bounds = ["" if bound is None else str(bound) for bound in (part.start, part.stop, part.step)]
        return ":".join(bounds[:2] if part.step is None else bounds)
    if part is None or isinstance(part, (int, np.integer)):
        return str(part)
    return "…"


def write_take(c: Call) -> Formula:
    ids = c.operands[1] or Formula("·")
    return Formula(f"{c.x.within(ATOM)}[{ids.text}]")


def write_linear(c: Call) -> Formula:
    weight, bias = (*c.operands[1:], None)[:2]
    product = f"{c.x.within(PRODUCT)} @ {weight.within(SIGN) if weight else '·'}"
    return Formula(f"{product} + {bias.text}", SUM) if bias else Formula(product, PRODUCT)


def write_attention(c: Call) -> Formula:
    q, k, v, _, bias = (operand or Formula("·") for operand in c.operands[:5])
    scale = c.option("scale") or c.value.inputs[0].array.shape[-1] ** -0.5
    scores = Formula(f"{q.within(PRODUCT)} @ {k.within(ATOM)}ᵀ", PRODUCT)
    scores = divided(scores, 1 / scale, root_first=True) or Formula(f"{number(scale)} · {scores.text}", PRODUCT)
    inner = scores.text + (f" + {bias.text}" if c.value.inputs[4] is not None else "")
    remarks = ("attention",) if c.value.inputs[3] is None else ("attention", mask_word(c.value.inputs[3]))
    return Formula(f"softmax({inner}) @ {v.within(SIGN)}", PRODUCT, remarks)


def write_norm(c: Call) -> Formula:
    assert c.value.op is not None
    weight, bias = (*c.operands[1:], None, None)[:2]
    name = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}[c.value.op.name]
    text = f"{name}({c.x.text})" + (f" * {weight.within(PRODUCT)}" if weight else "")
    return Formula(text + f" + {bias.text}", SUM) if bias else Formula(text, PRODUCT if weight else ATOM)


def write_einsum(c: Call) -> Formula:
    return Formula(f"einsum({c.option('subscripts')}; {', '.join(o.text for o in c.operands if o)})")


def write_scatter(c: Call) -> Formula:
    """The gradient of an index: zeros, with the values in their places."""
    return Formula(f"{c.x.text} in its place")


def write_cross_entropy(c: Call) -> Formula:
    return Formula(f"cross_entropy({', '.join(operand.text for operand in c.operands if operand)})")


FORMULAS: dict[str, Callable[[Call], Formula]] = {
    "add": infix("+", SUM, SUM, SUM),
    "sub": infix("−", SUM, SUM, PRODUCT),
    "mul": write_mul,
    "div": write_div,
    "matmul": write_matmul,
    "linear": write_linear,
    "scale": write_scale,
    "neg": write_neg,
    "pow": write_pow,
    "sqrt": write_sqrt,
    "abs": write_abs,
    "transpose": write_transpose,
    "reshape": unseen,
    "broadcast_to": unseen,
    "cast": lambda c: Formula(f"{c.x.text} as {np.dtype(c.option('dtype'))}", SUM),
    "mask": write_mask,
    "where": write_where,
    "concat": write_join,
    "stack": function("stack"),
    "getitem": write_getitem,
    "scatter_add": write_scatter,
    "take": write_take,
    "attention": write_attention,
    "layer_norm": write_norm,
    "rms_norm": write_norm,
    "einsum": write_einsum,
    "softmax": function("softmax"),
    "log_softmax": function("log softmax"),
    "cross_entropy": write_cross_entropy,
    "gelu": function("GELU"),
    "relu": function("ReLU"),
    **dict.fromkeys(("sum", "mean", "var", "max", "min"), write_reduction),
}


# Some operations are better said in words, when their operand is in the picture anyway.


def say_softmax(c: Call) -> str:
    axis, n = c.option("axis"), c.value.array.ndim
    where = "each row" if axis in (-1, n - 1) else f"axis {axis}"
    remarks = "".join(f", {remark}" for remark in c.x.remarks)
    assert c.value.op is not None
    return f"{c.value.op.name.replace('_', ' ')} over {where}{remarks}"


def say_cross_entropy(c: Call) -> str:
    return "cross entropy" + ("" if c.option("reduction") == "mean" else f", {c.option('reduction')}")


SENTENCES: dict[str, Callable[[Call], str]] = {
    "softmax": say_softmax,
    "log_softmax": say_softmax,
    "cross_entropy": say_cross_entropy,
}
