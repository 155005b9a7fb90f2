"""Matrices as text for a terminal: `show` prints every step of an attention, head by head, or matrices one by one."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from unicodedata import east_asian_width

import numpy as np

from tinygrad_mha.arguments import check_choice
from tinygrad_mha.data import show_token
from tinygrad_mha.nn.gpt import GPTTrace
from tinygrad_mha.nn.heads import NAMES, AttentionTrace
from tinygrad_mha.tensors import Tensor, plain
from tinygrad_mha.viz.diagram.heat import colour_of, common_factor, largest_magnitude, write_factor, write_value
from tinygrad_mha.viz.page.document import LANGUAGES, read_page_file

__all__ = ["Matrix", "print_matrices", "read_words", "show"]

MOST_ROWS = 64
WIDTH = 100  # of output that is not a terminal
LONGEST_HEAD = 12  # of the label of a column
QUERIES_IN_ROWS = ("q", "scores", "masked", "weights", "heads", "concat")
KEYS_IN_ROWS, KEYS_IN_COLUMNS = ("k", "v"), ("scores", "masked", "weights")
Palette = Literal["value", "attention"]


class Matrix(NamedTuple):
    """A matrix (rows, columns) to be printed. `rows` and `columns` are the labels of its axes, if they have any."""

    name: str
    values: np.ndarray
    meaning: str = ""
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    palette: Palette = "value"


def show(
    what: AttentionTrace | GPTTrace | Tensor | np.ndarray | Sequence[Tensor] | Mapping[str, Tensor | np.ndarray],
    tokens: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    layer: int = 0,
    head: int | None = None,
    lang: str = "en",
) -> None:
    """Print matrices: all of an attention (Q, K, V, scores, masked scores, S and H of each head; Concat), or your own.

    Each has its name, its shape and its numbers; rows and columns that belong to tokens have their labels. Numbers are
    written with two or three significant digits. Columns that do not fit and the ends of long labels are left out, with
    … in their place. On a terminal, cells are coloured as in pictures, unless NO_COLOR is set or TERM is dumb.

    Args:
        what: what an attention or a GPT returns with trace=True, for one sequence; or a matrix, several named Tensors,
            or a dict of names and matrices.
        tokens: the labels of the queries, by default 1, 2, ...; also those of the keys if there are as many. Of a
            matrix, the labels of its rows, by default none.
        keys: the labels of the keys, for cross-attention or with a cache. Of a matrix, those of its columns.
        layer: the layer of a GPT.
        head: print this head only: 1 for Q_1, K_1, ...
        lang: the language of the words beside the names, "en" or "zh".

    Raises:
        TypeError: nothing that can be printed.
        ValueError: an unknown language, a batch of several sequences, an array that is no matrix, or a wrong number of
            labels.
        IndexError: no such layer or head.

    Example:
        >>> y, trace = tg.nn.attention(np.eye(2), np.eye(2), np.eye(2), tg.nn.causal(2), trace=True)
        >>> show(trace, tokens=["the", "cat"])
        Q  2x2  the queries
          the  1.00     0
          cat     0  1.00
        ...
        S  2x2  softmax of each masked row
                the   cat
          the  1.00     0
          cat  0.33  0.67
        ...
        >>> show(tg.Tensor([[1.0, 2.0, 3.0]], name="X"), tokens=["the"])
        X  1x3
          the  1.00  2.00  3.00
    """
    if isinstance(what, (AttentionTrace, GPTTrace)):
        print_matrices(list_steps(what, tokens, keys, layer, head, read_words(lang)), lang)
    else:
        print_matrices(list_matrices(what, tokens, keys), lang)
    print()  # before the matrix of the next call


def list_matrices(what: Any, tokens: Sequence[str] | None, keys: Sequence[str] | None) -> Iterator[Matrix]:
    """One matrix, several, or a dict of them, with the same labels. The arguments are those of `show`."""
    if isinstance(what, (Tensor, np.ndarray)):
        what = [what]
    if isinstance(what, (list, tuple)):
        named = [(x.name or "" if isinstance(x, Tensor) else "", x) for x in what]
    elif isinstance(what, Mapping):
        named = list(what.items())
    else:
        named = []
    if not named or not all(isinstance(x, (Tensor, np.ndarray)) for _, x in named):
        raise TypeError(
            f"expected a trace, as y, trace = mha(x, trace=True) gives, a matrix, or several; got {type(what).__name__}"
        )
    for name, x in named:
        if x.ndim != 2:
            raise ValueError(f"a matrix (rows, columns) can be shown, {name or 'this array'} has the shape {x.shape}")
        rows = None if tokens is None else choose_labels(tokens, "tokens", x.shape[0])
        columns = None if keys is None else choose_labels(keys, "keys", x.shape[1])
        yield Matrix(name, plain(x), rows=rows, columns=columns)


def list_steps(
    trace: Any,
    tokens: Sequence[str] | None,
    keys: Sequence[str] | None,
    layer: int,
    head: int | None,
    words: Mapping[str, str],
) -> Iterator[Matrix]:
    """The matrices of a trace, head by head, described in `words`. All else is as in `show`."""
    if isinstance(trace, GPTTrace):
        if not 0 <= layer < len(trace.attention):
            raise IndexError(f"layer must be 0 to {len(trace.attention) - 1}, got {layer}")
        trace = trace.attention[layer]
    steps = {name: one_sequence(plain(step)) for name, step in trace._asdict().items() if step is not None}
    if not steps:
        raise ValueError("this attention shows no steps: its forward calls edit(name, tensor) for each")
    n_head = max((len(step) for step in steps.values() if step.ndim == 3), default=1)
    if head is not None and not 1 <= head <= n_head:
        raise IndexError(f"head must be 1 to {n_head}, got {head}")
    queries = choose_labels(tokens, "tokens", count(steps, rows=QUERIES_IN_ROWS))
    n_keys = count(steps, rows=KEYS_IN_ROWS, columns=KEYS_IN_COLUMNS)
    keys = queries if keys is None and n_keys == len(queries) else choose_labels(keys, "keys", n_keys)
    for i in range(n_head) if head is None else [head - 1]:
        for name, step in steps.items():
            if name == "concat":
                continue
            shared = n_head // len(step) if step.ndim == 3 else 1  # query heads that share a head of keys and values
            if i % shared and head is None:
                continue
            values = step[i // shared] if step.ndim == 3 else step
            title = f"{NAMES[name]}_{i // shared + 1}" if step.ndim == 3 else NAMES[name]
            rows = keys if name in KEYS_IN_ROWS else queries
            columns = keys if name in KEYS_IN_COLUMNS else None
            palette: Palette = "attention" if name == "weights" and values.min() >= 0 else "value"
            yield Matrix(title, values, words[name], rows, columns, palette)
    if "concat" in steps and head is None:
        yield Matrix("Concat", steps["concat"], words["concat"], queries)


def one_sequence(step: np.ndarray) -> np.ndarray:
    """A step of one sequence, (H, T, d) or (T, d), without an axis of a batch of one."""
    if step.ndim == 4 and len(step) != 1:
        raise ValueError(f"show prints one sequence, this trace has a batch of {len(step)}: run the model on one")
    return step[0] if step.ndim == 4 else step


def count(steps: dict[str, np.ndarray], rows: Sequence[str], columns: Sequence[str] = ()) -> int:
    """The number of tokens: the rows, or the columns, of the first of these steps that the trace has."""
    lengths = [steps[name].shape[-2] for name in rows if name in steps]
    return [*lengths, *(steps[name].shape[-1] for name in columns if name in steps), 0][0]


def choose_labels(labels: Sequence[str] | None, argument: str, n: int) -> list[str]:
    """The labels of n tokens: those given, or 1, 2, ..."""
    if labels is None:
        return [str(i + 1) for i in range(n)]
    if len(labels) != n:
        raise ValueError(f"{argument} must be {n} labels, one for each token, got {len(labels)}")
    return [show_token(str(label)) for label in labels]


# --------------------------------------------------------------------------------------------------------------------
# Text


@functools.cache
def read_words(lang: str) -> dict[str, str]:
    """The words of `show` in one language.

    Raises:
        ValueError: an unknown language.
    """
    return json.loads(read_page_file("show_words.json"))[check_choice(lang, LANGUAGES, "lang")]


def print_matrices(matrices: Iterator[Matrix] | Sequence[Matrix], lang: str = "en") -> None:
    """Print matrices one below the other, as wide as the terminal, in colours if there is one."""
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    print("\n\n".join("\n".join(write_matrix(matrix, width, coloured, read_words(lang))) for matrix in matrices))


def write_matrix(matrix: Matrix, width: int, coloured: bool, words: Mapping[str, str]) -> Iterator[str]:
    """The lines of a matrix: its name, shape and meaning, then its rows with their labels."""
    values = matrix.values
    factor, most = common_factor(values), largest_magnitude(values)
    shape = "x".join(map(str, values.shape))
    remark = f"{matrix.meaning} {write_factor(factor)}".strip()
    yield "  ".join(filter(None, (matrix.name, shape, remark)))
    labels = [shorten(label, width // 3) for label in (matrix.rows or [""] * len(values))[:MOST_ROWS]]
    head = [shorten(label, LONGEST_HEAD) for label in matrix.columns or []]
    cells = [[write_value(x, factor) for x in row] for row in values[:MOST_ROWS].tolist()]
    margin = max(map(columns_of, labels), default=0)
    number = max((len(text) for row in cells for text in row), default=1)
    sizes = [2 + max(number, columns_of(label)) for label in head or [""] * values.shape[1]]
    shown = count_fitting(sizes, width - 2 - margin)
    more = "  …" if shown < len(sizes) else ""
    if head:
        yield "  " + " " * margin + "".join(map(align, head[:shown], sizes)) + more
    for label, texts, row in zip(labels, cells, values, strict=False):
        line = "".join(
            colour(align(text, size - 1) + " ", float(x), most, matrix.palette) if coloured else align(text, size)
            for text, size, x in zip(texts[:shown], sizes, row, strict=False)
        )
        yield ("  " + label + " " * (margin - columns_of(label)) + line + more).rstrip()
    if len(values) > MOST_ROWS:
        yield f"  … {words['more_rows'].format(count=len(values) - MOST_ROWS)}"


def count_fitting(sizes: Sequence[int], width: int) -> int:
    """How many columns fit, at least one; if not all do, there is room for "  …" after them."""
    if sum(sizes) <= width:
        return len(sizes)
    ends = np.cumsum(sizes)
    return max(1, int(np.searchsorted(ends, width - 3, side="right")))


def shorten(text: str, width: int) -> str:
    """The beginning of a text that is wider than `width` columns of a terminal, and …"""
    if columns_of(text) <= width:
        return text
    ends = np.cumsum([columns_of(c) for c in text])
    return text[: int(np.searchsorted(ends, width - 1, side="right"))] + "…"


def align(text: str, width: int) -> str:
    """The text at the right end of `width` columns of a terminal."""
    return " " * (width - columns_of(text)) + text


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes: two for a Chinese character."""
    return sum(2 if east_asian_width(c) in "WF" else 1 for c in text)


def colour(text: str, value: float, most: float, palette: str) -> str:
    """The text on the colour of its value, as an escape sequence of terminals with 24-bit colours."""
    colours = colour_of(value, most, palette)
    back, front = (";".join(str(int(name[i : i + 2], 16)) for i in (1, 3, 5)) for name in colours)
    return f"\033[48;2;{back};38;2;{front}m{text}\033[0m"
