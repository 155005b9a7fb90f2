"""Equations between the matrices of a recorded run: `Q_1 = X @ W_Q1`, `∂Q_1 = ∂scores_1 / √7 @ K_1`.

Every equation is written from the operations that the run recorded. Values without a title are written out in terms of
those that have one.

An equation is a string of words with one blank between them. A word that is a title, or ∂ and a title, stands for that
matrix, with ᵀ behind it for the transposed matrix. Everything else is text. A matrix that the equation has shown before
is text too: it has a word joiner, which is invisible, in front.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha.notation import POWER, PRODUCT, SUM, Formula, write_call, write_constant
from tinygrad_mha.viz.diagram.formulas import make_call
from tinygrad_mha.viz.diagram.record import RESHAPING, Run, Value
from tinygrad_mha.viz.diagram.roles import find_dependents

__all__ = ["Equation", "EquationWriter", "Json", "as_matrix", "write_walks"]

Json = dict[str, Any]

MOST_OPERATIONS = 24  # in a term; if one has more, A = f(B, C) says only what A is computed from
MOST_TERMS = 4  # of a sum; of a longer one only the terms of the head that is shown are written
WORD_JOINER = "\u2060"
SYMBOLS = 0xE000  # until an equation is complete, a title is one character of the private use area
SQUARE = ("scores", "masked", "S")  # what `per_head` calls the matrices (T, T) of a head


class Equation(NamedTuple):
    text: str
    titles: tuple[str, ...] = ()  # of the matrices on the right side, without ∂


class TooLongError(Exception):
    """A term has more than MOST_OPERATIONS operations."""


class EquationWriter:
    """Writes values of a run in terms of those that have a title.

    Attributes:
        titles: the titles of values; that of a gradient is "∂" and the title of what it belongs to.
        constants: a title for each array that occurs in an equation.
    """

    def __init__(self, titles: Mapping[Value, str]) -> None:
        self.titles = titles
        self.constants: dict[str, np.ndarray] = {}
        self._symbols: dict[str, str] = {}
        self._operations = 0

    def write(self, left: str, value: Value, shown: Container[str] | None = None) -> Equation:
        """The equation `left = ...` of how `value` was computed.

        In a sum of more than MOST_TERMS terms, those with a matrix that is not in `shown` are replaced by "…".
        """
        values = self._split_sum(value)
        try:
            terms = [self._write_term(term, is_root=term is value) for term in values]
        except TooLongError:
            operands = [self._symbol(self.titles[x]) for x in find_sources(value, self.titles.__contains__)]
            values, terms = [value], [Formula(f"f({', '.join(operands)})")]
        if shown is not None and len(terms) > MOST_TERMS:
            terms = [term for term in terms if all(title in shown for title in self._find_titles(term.text))]
        texts = [term.within(SUM) for term in terms] if len(values) > 1 else [terms[0].text]
        right = " + ".join(texts + ["…"] * (len(terms) < len(values)))
        return Equation(f"{left} = {self._insert_titles(right)}", tuple(self._find_titles(right)))

    def _split_sum(self, value: Value) -> list[Value]:
        """The terms of the sum that `value` is, or `value` alone."""
        terms, stack = [], [value]
        while stack:
            term = stack.pop()
            is_sum = term.has_kind("addition") and len(term.sources) == len(term.inputs)
            if is_sum and (term is value or term not in self.titles):
                # Contributions to a gradient are added in the reverse of the order in which the forward pass uses it.
                stack += term.sources if term.backward else reversed(term.sources)
            else:
                terms.append(term)
        return terms

    def _write_term(self, value: Value, is_root: bool) -> Formula:
        self._operations = 0
        return self._expand(value) if is_root else self._write(value) or Formula("")

    def _write(self, x: Any) -> Formula | None:
        """An operand: its title if it has one, otherwise how it was computed."""
        if isinstance(x, Value):
            if x not in self.titles:
                return self._expand(x)
            return Formula(self._symbol(self.titles[x]), kind=x.op.kind if x.op else "")
        if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.ndim in (1, 2):
            for title, array in self.constants.items():
                if np.array_equal(array, x):
                    return Formula(self._symbol(title))
                if np.array_equal(array.T, x):  # a rule used the transposed matrix
                    return Formula(f"{self._symbol(title)}ᵀ", POWER)
            title = f"constant_{len(self.constants) + 1}"
            self.constants[title] = x
            return Formula(self._symbol(title))
        return None if x is None else write_constant(x)

    def _expand(self, value: Value) -> Formula:
        """How a value was computed."""
        self._operations += 1
        if self._operations > MOST_OPERATIONS:
            raise TooLongError
        if value.op is None and value.requires_grad:
            return Formula(value.name or "parameter")  # another tensor has its title
        if value.op is None:
            return self._write(value.array) or Formula("")
        call = make_call(value, self._write)
        if value.rule_of is value.op and any(isinstance(x, np.ndarray) for x in call.keywords.values()):
            call = call._replace(label=f"{call.label}′")  # the same function with other arrays, which are not written
        if value.has_kind("mask"):
            return Formula(f"mask({call.x.text})")
        if value.has_kind("choice") and value.rule_of is not None and value.rule_of.kind in ("mask", "attention"):
            return Formula(f"{call.operand(1).within(PRODUCT)} where\u00a0allowed", SUM)
        if value.has_kind("join") and call.keywords.get("axis") in (-1, len(call.shape) - 1):
            return Formula(" | ".join(call.given), level=-1)
        if value.has_kind("attention"):
            return write_call(call)  # the formula of attention leaves the mask to a remark
        if value.has_kind("movement") and "dtype" in call.keywords:
            return call.x
        return value.op.formula(call)._replace(kind=value.op.kind)

    def _symbol(self, title: str) -> str:
        return self._symbols.setdefault(title, chr(SYMBOLS + len(self._symbols)))

    def _find_titles(self, text: str) -> list[str]:
        return [title.removeprefix("∂") for title, symbol in self._symbols.items() if symbol in text]

    def _insert_titles(self, text: str) -> str:
        """Put titles in the places of their symbols, and blanks around them."""
        titles = {symbol: title for title, symbol in self._symbols.items()}
        shown: set[str] = set()

        def write_title(match: re.Match[str]) -> str:
            word = titles[match[1]] + match[2]
            if word in shown:
                return WORD_JOINER + word
            shown.add(word)
            return f" {word} "

        text = re.sub(r"\[[^\]]*\]", lambda index: index[0].replace(" ", ""), text)
        text = re.sub(rf"([{chr(SYMBOLS)}-\uf8ff])(ᵀ?)", write_title, text)
        return " ".join(word for word in text.split(" ") if word)


def find_sources(value: Value, is_end: Callable[[Value], bool]) -> list[Value]:
    """The nearest values for which `is_end` is true among those that `value` was computed from."""
    found: dict[Value, None] = {}
    seen, stack = {value}, [value]
    while stack:
        for x in stack.pop().sources:
            if is_end(x):
                found[x] = None
            elif x not in seen:
                seen.add(x)
                stack.append(x)
    return list(found)


# --------------------------------------------------------------------------------------------------------------------
# Walks


def write_walks(run: Run, names: Mapping[int, str], n: int) -> tuple[list[list[Json]], dict[str, Json]]:
    """The steps from X to Y, once for each head and in the order of the run, and the matrices in their equations.

    Args:
        run: a run of `per_head` with its backward pass.
        names: names of tensors by identity; those with up to two axes are shown, and all parameters.
        n: the number of tokens.

    Returns:
        A list for each head of {"out": title, "forward": equations, "backward": equations}, and {title: matrix}.

    Raises:
        ValueError: matrices that the page needs have no name.
    """
    named = [v for v in run.values if id(v.tensor) in names and not v.backward]
    matrices = [v for v in named if v.array.ndim <= 2 or (v.op is None and v.requires_grad)]
    values = {names[id(value.tensor)]: value for value in matrices}
    heads = [value for title, value in values.items() if re.fullmatch(r"H_\d+", title)]
    if not heads or not {"X", "Q_1", "V_1"} <= set(values):
        raise ValueError(f"per_head must name the matrices X, Q_1, V_1, H_1, ...; it names {', '.join(sorted(values))}")
    titles = {value: title for title, value in values.items()}
    gradients = {titles[v]: gradient for gradient in run.values for v in gradient.gradient_of if v in titles}
    # One array can be the gradient of several values. The equation of the first in the backward pass says how it was
    # computed. The others say that they equal the first, and later equations use the last.
    first = {gradient: title for title, gradient in reversed(gradients.items())}
    writer = EquationWriter(titles | {gradient: f"∂{title}" for title, gradient in gradients.items()})

    def write_gradient(title: str, shown: Container[str]) -> Equation:
        gradient = gradients.get(title)
        if gradient is None:
            return Equation(f"∂{title} = 0")
        if first[gradient] != title:
            return Equation(f"∂{title} = ∂{first[gradient]}", (first[gradient],))
        return Equation(f"∂{title}") if gradient.op is None else writer.write(f"∂{title}", gradient, shown)

    dependent = find_dependents(run, values["X"])
    ancestors = []
    for head in heads:
        own = {head}
        for value in reversed(run.values):
            own.update(value.sources if value in own else ())
        ancestors.append(own)
    walks, mentioned = [], set()
    tables: set[str] = set()  # titles in the equations of matrices (T, T)
    for own in ancestors:
        others = set().union(*ancestors) - own
        path = [title for title, value in values.items() if value in dependent and value not in others]
        forward = {t: writer.write(t, values[t]) if values[t].op else Equation(t) for t in path}
        shown = set(path).union(*(equation.titles for equation in forward.values()))
        tables.update(*(e.titles for t, e in forward.items() if t.partition("_")[0] in SQUARE))
        walk = []
        for title, equation in forward.items():
            parameters = [t for t in equation.titles if t in gradients and values[t] not in dependent]
            backward = [write_gradient(t, shown) for t in (title, *parameters)]
            mentioned |= shown.union(*(gradient.titles for gradient in backward))
            walk.append({"out": title, "forward": [equation.text], "backward": [e.text for e in backward]})
        walks.append(walk)
    described = {}
    for title in (title for title in values if title in mentioned):
        value, is_table = values[title], title in tables and values[title].array.shape == (n, n)
        described[title] = describe_matrix(title, value, gradients.get(title), value in dependent, is_table)
    for title, array in writer.constants.items():
        is_table = title in tables and array.shape == (n, n)
        described[title] = describe_matrix(title, Value(array, title), None, False, is_table)
    return walks, described


def describe_matrix(title: str, value: Value, gradient: Value | None, is_step: bool, is_table: bool) -> Json:
    """Its numbers, what it is ("" for most steps), and whether its rows and its columns belong to tokens.

    `is_table`: whether it is a constant of queries and keys, such as a bias of the scores.
    """
    kind = "parameter" if value.requires_grad else "constant"
    if is_step:
        origin = value
        while origin.has_kind(*RESHAPING):  # the weights of one head, taken from those of all
            origin = origin.sources[0]
        kind = {"X": "input", "Y": "output"}.get(title, "attention" if origin.has_kind("distribution") else "")
    is_table = is_table and kind == "constant"
    zeros = np.zeros_like(as_matrix(value.array)) if value.requires_grad else None
    return {
        "values": as_matrix(value.array),
        "gradient": zeros if gradient is None else as_matrix(gradient.array),
        "kind": kind,
        "tokens": [is_step or is_table, is_table or (is_step and title.partition("_")[0] in SQUARE)],
    }


def as_matrix(array: np.ndarray) -> np.ndarray:
    """An array with two axes: of a larger one, the matrices of the last two axes below each other."""
    return array.reshape(-1, array.shape[-1]) if array.ndim > 2 else np.atleast_2d(array)
