"""How operations are written: `Q_1 @ K_1ᵀ / √7`, `softmax over each row`. Plain text, no tensors.

A *writer* turns a `Call` into a `Formula`. Every primitive names its writer where it is defined; one without is written
as a call, `name(x, option=1)`. A formula has a level, as an expression in a grammar, so brackets appear only where they
are needed.

Example:
    >>> a, b = Formula("a"), Formula("b")
    >>> total = infix("+", SUM, associative=True)(Call("add", (a, b)))
    >>> infix("*")(Call("mul", (total, b))).text
    '(a + b) * b'
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = ["ATOM", "POWER", "PRODUCT", "SIGN", "SUM", "Call", "Formula", "FormulaWriter", "function", "hidden", "infix"]
__all__ += ["is_causal", "is_range", "write_constant", "write_number", "write_shape"]

SUM, PRODUCT, SIGN, POWER, ATOM = range(5)


class Formula(NamedTuple):
    """A piece of text that can be part of a larger formula.

    Attributes:
        text: the formula itself.
        level: what its outermost operation is: SUM, PRODUCT, SIGN, POWER or ATOM (a name, a number, a call).
        remarks: words that describe the whole formula and are shown in front of it: "scaled", "causal mask".
        kind: the kind of the primitive that computed it; "" for leaves and constants.
        factors: the operands of a matrix product.
        quotient: the dividend and the divisor of a division by a number.
    """

    text: str
    level: int = ATOM
    remarks: tuple[str, ...] = ()
    kind: str = ""
    factors: tuple[Formula, Formula] | None = None
    quotient: tuple[Formula, str] | None = None

    def within(self, level: int) -> str:
        """The text as an operand of an operation of `level`, in brackets if it needs them."""
        return self.text if self.level >= level else f"({self.text})"


MISSING = Formula("·")


class Call(NamedTuple):
    """One application of a primitive, as its writer sees it.

    Attributes:
        label: the name of the primitive in formulas.
        operands: the formula of each array argument, None for one that was left out.
        constants: the number or array of each argument that is a constant, None for the others.
        shapes: the shape of each array argument.
        keywords: the keywords that differ from their defaults, and those without a default.
        shape: the shape of the result.
    """

    label: str
    operands: tuple[Formula | None, ...]
    constants: tuple[Any, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    keywords: Mapping[str, Any] = {}
    shape: tuple[int, ...] = ()

    @property
    def x(self) -> Formula:
        """The first operand."""
        return self.operand(0)

    def operand(self, i: int) -> Formula:
        """Operand `i`, or a dot if it was left out."""
        return self.operands[i] or MISSING

    @property
    def given(self) -> list[str]:
        """The texts of the operands that were not left out."""
        return [operand.text for operand in self.operands if operand]


FormulaWriter = Callable[[Call], Formula]

# --------------------------------------------------------------------------------------------------------------------
# Constants


def write_number(x: float, digits: int = 4) -> str:
    """At most four significant digits, or `digits`, with a real minus sign: 0.0042, −1.234e−5."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{x:.{digits}g}").replace("-", "−").replace("inf", "∞")


def write_shape(lengths: tuple[int, ...]) -> str:
    """3×5, or "scalar"."""
    return "×".join(map(str, lengths)) if lengths else "scalar"


def write_constant(x: Any) -> Formula:
    """One number by its digits, consecutive integers as a range, other arrays by their shape."""
    if np.size(x) == 1:
        number = float(np.asarray(x).item())
        return Formula(write_number(number), ATOM if number >= 0 else SIGN)
    if is_range(x):
        return Formula(f"{x[0]}…{x[-1]}")
    return Formula(f"{'condition' if x.dtype.kind == 'b' else 'constant'} {write_shape(x.shape)}")


def is_range(x: np.ndarray) -> bool:
    """Whether a vector holds consecutive integers, as token positions do."""
    return x.dtype.kind in "iu" and x.ndim == 1 and x.size > 1 and bool(np.all(np.diff(x) == 1))


def is_causal(allow: Any) -> bool:
    """Whether a mask lets each query attend to the keys up to its own position, counted from the end."""
    if not isinstance(allow, np.ndarray) or allow.ndim < 2 or allow.shape[-1] < 2:
        return False
    n, m = allow.shape[-2:]
    return m >= n and bool(np.all(allow == np.tri(n, m, m - n, dtype=bool)))


def mask_remark(allow: Any) -> str:
    return "causal mask" if is_causal(allow) else "masked"


def radicand(x: float) -> int | None:
    """n if `x` is the square root of the integer n, else None."""
    if not 1 < x < 10**3:
        return None
    n = round(x * x)
    return n if abs(n**0.5 - x) < 1e-15 * x else None  # within rounding


def divide(x: Formula, by: float) -> Formula | None:
    """x / 7 or x / √7 if `by` is an integer or the square root of one, else None."""
    if not 1 < by < 10**6:
        return None
    n = radicand(by)
    if by == round(by):
        quotient = write_quotient(x, str(round(by)))
    elif n is not None:
        quotient = write_quotient(x, f"√{n}")
    else:
        return None
    return quotient._replace(remarks=("scaled",)) if x.kind == "product" else quotient


def write_quotient(x: Formula, divisor: str) -> Formula:
    return Formula(f"{x.within(PRODUCT)} / {divisor}", PRODUCT, quotient=(x, divisor))


# --------------------------------------------------------------------------------------------------------------------
# Writers for new primitives too


def infix(sign: str, level: int = PRODUCT, associative: bool = False) -> FormulaWriter:
    """A writer of `a sign b` at `level`. Unless `associative`, a right operand of the same level is in brackets."""

    def write(c: Call) -> Formula:
        right = level if associative else level + 1
        return Formula(f"{c.x.within(level)} {sign} {c.operand(1).within(right)}", level)

    return write


def function(c: Call) -> Formula:
    """Write label(operands), without options."""
    return Formula(f"{c.label}({', '.join(c.given)})")


def hidden(c: Call) -> Formula:
    """Write the operand alone: only its shape changes, and every box shows the shape."""
    return c.x


def write_reshape(c: Call) -> Formula:
    """Write the operand, with a remark if its last axis is split into parts, as for attention heads."""
    (*before, width), after = c.shapes[0] or (1,), c.shape
    is_split = len(before) > 0 and after[:-2] == tuple(before) and 1 < after[-2] < width
    return c.x._replace(remarks=(*c.x.remarks, f"in {after[-2]} parts")) if is_split else c.x


def write_call(c: Call) -> Formula:
    """Write label(operands, options). This is the writer of a primitive that names no other."""
    options = [f"{k}={v}" for k, v in c.keywords.items() if isinstance(v, (int, float, str, tuple))]
    return Formula(f"{c.label}({', '.join(c.given + options)})")


# --------------------------------------------------------------------------------------------------------------------
# Writers and sentences of the primitives


def write_div(c: Call) -> Formula:
    by = c.constants[1]
    exact = divide(c.x, float(by)) if isinstance(by, (int, float)) else None
    return exact or infix("/")(c)


def write_scale(c: Call) -> Formula:
    by = c.keywords["by"]
    if by == 1:
        return c.x
    if by == -1:
        return write_neg(c)
    # 0.25 is written as a division by 4, and 0.1 as it is: it is shorter than that.
    is_decimal = len(repr(float(by))) < 5 and math.frexp(by)[0] != 0.5
    exact = None if is_decimal or not by else divide(c.x, 1 / by)
    n = radicand(by)
    factor = f"√{n}" if n is not None and by % 1 else write_number(by)
    return exact or Formula(f"{factor} · {c.x.within(SIGN)}", PRODUCT)


def write_neg(c: Call) -> Formula:
    return Formula(f"−{c.x.within(SIGN)}", SIGN)


def write_pow(c: Call) -> Formula:
    by = c.constants[1]
    if isinstance(by, (int, float)) and by in (1, 2, 3):
        return c.x if by == 1 else Formula(c.x.within(ATOM) + {2.0: "²", 3.0: "³"}[by], POWER)
    return Formula(f"{c.x.within(ATOM)} ** {c.operand(1).within(ATOM)}", POWER)


def write_sqrt(c: Call) -> Formula:
    return Formula(f"√{c.x.within(ATOM)}", SIGN)


def write_abs(c: Call) -> Formula:
    return Formula(f"|{c.x.text}|")


def write_transpose(c: Call) -> Formula:
    """ᵀ where the last two axes are exchanged. Other orders are visible in the shape only."""
    axes, n = c.keywords.get("axes"), len(c.shape)
    swapped = (*range(n - 2), n - 1, n - 2)
    is_matrix_transpose = n > 1 and (axes == swapped or (axes is None and n == 2))
    return transpose(c.x) if is_matrix_transpose else c.x


def transpose(x: Formula) -> Formula:
    """(A @ B)ᵀ is Bᵀ @ Aᵀ, (A / 2)ᵀ is Aᵀ / 2, and Aᵀᵀ is A."""
    if x.quotient is not None:
        return write_quotient(transpose(x.quotient[0]), x.quotient[1])
    if x.factors is not None:
        return multiply(transpose(x.factors[1]), transpose(x.factors[0]))
    if x.level == POWER and x.text.endswith("ᵀ"):
        return Formula(x.text[:-1])
    return Formula(f"{x.within(ATOM)}ᵀ", POWER, x.remarks)


def multiply(a: Formula, b: Formula) -> Formula:
    """The matrix product a @ b."""
    return Formula(f"{a.within(PRODUCT)} @ {b.within(SIGN)}", PRODUCT, factors=(a, b))


def write_matmul(c: Call) -> Formula:
    return multiply(c.x, c.operand(1))


def write_linear(c: Call) -> Formula:
    product = multiply(c.x, c.operand(1))._replace(factors=None)
    bias = c.operands[2]
    return Formula(f"{product.text} + {bias.text}", SUM) if bias else product


def write_einsum(c: Call) -> Formula:
    return Formula(f"einsum({c.keywords['subscripts']}; {', '.join(c.given)})")


def write_cast(c: Call) -> Formula:
    return Formula(f"{c.x.text} as {np.dtype(c.keywords['dtype'])}", SUM)


def write_mask(c: Call) -> Formula:
    return c.x._replace(remarks=(mask_remark(c.constants[1]),))


def write_dropout(c: Call) -> Formula:
    """dropout(x), without the mask."""
    return Formula(f"{c.label}({c.x.text})")


def write_concat(c: Call) -> Formula:
    """[a | b] along the last axis, [a ; b] along others."""
    parts = c.given if len(c.given) <= 4 else [*c.given[:2], "…", c.given[-1]]
    return Formula(f"[{(' | ' if c.keywords.get('axis') in (-1, len(c.shape) - 1) else ' ; ').join(parts)}]")


def write_reduction(c: Call) -> Formula:
    """sum(x) of everything, row sum(x) over the last axis, column sum(x) over the one before, else sum(x, axis=0)."""
    axis, n = c.keywords.get("axis"), len(c.shapes[0])
    axes = tuple(range(n)) if axis is None else tuple(i % n for i in np.atleast_1d(axis).tolist())
    if len(axes) == n:
        return Formula(f"{c.label}({c.x.text})")
    if axes in ((n - 1,), (n - 2,)):
        return Formula(f"{'row' if axes == (n - 1,) else 'column'} {c.label}({c.x.text})")
    return Formula(f"{c.label}({c.x.text}, axis={axes[0] if len(axes) == 1 else axes})")


def write_getitem(c: Call) -> Formula:
    index = c.keywords["index"]
    parts = index if isinstance(index, tuple) else (index,)
    whole = next((i for i, part in enumerate(parts) if not (isinstance(part, slice) and part == slice(None))), 0)
    if whole > 1 and len(parts) == len(c.shapes[0]):
        parts = (..., *parts[whole:])
    return Formula(f"{c.x.within(ATOM)}[{', '.join(map(write_index, parts))}]")


def write_index(part: Any) -> str:
    """One part of an index: a number, a slice, or … for an array."""
    if isinstance(part, slice):
        bounds = ["" if bound is None else str(bound) for bound in (part.start, part.stop, part.step)]
        return ":".join(bounds[:2] if part.step is None else bounds)
    return str(part) if part is None or isinstance(part, (int, np.integer)) else "…"


def write_scatter(c: Call) -> Formula:
    """The gradient of an index: zeros, with the values at their indices."""
    return Formula(f"{c.x.text} in its place")


def write_take(c: Call) -> Formula:
    return Formula(f"{c.x.within(ATOM)}[{c.operand(1).text}]")


def write_norm(c: Call) -> Formula:
    """LayerNorm(x) * weight + bias."""
    weight, bias = (*c.operands[1:], None, None)[:2]
    text = f"{c.label}({c.x.text})" + (f" * {weight.within(PRODUCT)}" if weight else "")
    return Formula(text + f" + {bias.text}", SUM) if bias else Formula(text, PRODUCT if weight else ATOM)


def write_attention(c: Call) -> Formula:
    """softmax(q @ kᵀ / √d_k + bias) @ v. Remarks name the heads, where axes are (B, H, T, D), and the mask."""
    q, k, v, allow, bias = c.operands[:5]
    scale = c.keywords.get("scale")
    scale = c.shapes[0][-1] ** -0.5 if scale is None else scale
    scores = multiply(q or MISSING, transpose(k or MISSING))._replace(kind="product")
    exact = divide(scores, 1 / scale) if scale else None
    scores = exact or Formula(f"{write_number(scale)} · {scores.text}", PRODUCT)
    inner = f"{scores.text} + {bias.text}" if bias else scores.text
    word = f"attention in {c.shape[1]} heads" if len(c.shape) == 4 and c.shape[1] > 1 else "attention"
    remarks = (word, mask_remark(c.constants[3])) if allow else (word,)
    return Formula(f"softmax({inner}) @ {(v or MISSING).within(SIGN)}", PRODUCT, remarks)


def say_softmax(c: Call) -> str:
    """softmax over each row, causal mask."""
    axis = c.keywords.get("axis", -1)
    where = "each row" if axis in (-1, len(c.shape) - 1) else f"axis {axis}"
    return ", ".join([f"{c.label} over {where}", *c.x.remarks])


def say_cross_entropy(c: Call) -> str:
    """cross entropy, and the reduction if it is not the mean."""
    return ", ".join([c.label, *filter(None, [c.keywords.get("reduction")])])
