"""Plots of a run: attention weights, losses, gradient norms, what each layer would predict. Needs matplotlib.

Figures are made without pyplot, so there is no display to be had, no window to be closed, and nothing is shared. A
notebook shows them; elsewhere `.save(path)` or a `path=` writes them.
"""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import as_ids
from tinygrad_mha.files import replacing
from tinygrad_mha.modes import no_grad
from tinygrad_mha.nn import GPT
from tinygrad_mha.nn.gpt import GPTTrace
from tinygrad_mha.nn.module import Module
from tinygrad_mha.nn.multihead import AttentionTrace
from tinygrad_mha.tensors import plain
from tinygrad_mha.training.report import draw_losses
from tinygrad_mha.viz.diagram.heat import ABSENT, INK, PALETTES

try:
    from matplotlib import font_manager, rcParams
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text
except ImportError:  # said when a plot is asked for, see `blank`
    Figure = object  # type: ignore[assignment, misc]

GAP = 2.0  # between panels: no share of attention is as large
BLUE, ORANGE = (f"#{r:02x}{g:02x}{b:02x}" for r, g, b in (PALETTES["value"][0], PALETTES["value"][2]))

CHINESE_FONTS = """Noto Sans CJK SC,Noto Sans SC,Source Han Sans SC,PingFang SC,Hiragino Sans GB,Microsoft YaHei,SimHei,
    WenQuanYi Micro Hei,WenQuanYi Zen Hei,Noto Sans CJK JP,Noto Sans CJK TC,Droid Sans Fallback,Arial Unicode MS"""


class Plot(Figure):
    """A matplotlib Figure that a notebook shows, and `save` writes."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it, whole or not at all, in the format that the suffix names (png, svg, pdf). Returns the path."""
        path = Path(path)
        with replacing(path) as temporary:
            self.savefig(temporary, format=path.suffix[1:] or "png")
        return path

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


# --------------------------------------------------------------------------------------------------------------------
# Attention


def heatmap(
    weights: Any,
    tokens: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Plot:
    """Attention weights as colours: a panel for each head, a line of panels for each layer. Rows are queries.

    Args:
        weights: (T_q, T_k), (H, T_q, T_k) or (L, H, T_q, T_k); or the trace of an attention or a GPT, of one sequence.
        tokens: the names of the rows, and of the columns too where these are as many.
        keys: the names of the columns, in cross-attention.
        path: where to write the plot, if anywhere.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: weights of another shape, a batch of several, or names that are not as many as the rows.

    Example:
        >>> heatmap(np.eye(3), tokens=["the", "cat", "sat"]).axes[0].get_title()
        ''
    """
    stack = weights_of(weights)
    layers, heads, n_q, n_k = stack.shape
    if keys is None and n_q == n_k:
        keys = tokens
    rows, columns = names(tokens, n_q, "tokens"), names(keys, n_k, "keys")

    # All panels are one image with gaps in it: a hundred axes would take half a minute.
    gap = max(1, max(n_q, n_k) // 10)
    down, across = n_q + gap, n_k + gap
    image = np.full((layers * down - gap, heads * across - gap), GAP)
    for layer, head in np.ndindex(layers, heads):
        image[layer * down : layer * down + n_q, head * across : head * across + n_k] = stack[layer, head]
    cell = min(0.62, max(0.06, 9 / max(image.shape)))  # inches
    figure = blank(cell * image.shape[1] + 1.6, cell * image.shape[0] + 0.7)
    axes = figure.subplots()
    shown = axes.imshow(image, cmap=palette("attention"), vmin=0, vmax=1, interpolation="nearest")
    axes.spines[:].set_visible(False)
    for layer, head in np.ndindex(layers, heads):
        corner = head * across - 0.5, layer * down - 0.5
        axes.add_patch(Rectangle(corner, n_k, n_q, fill=False, edgecolor=ABSENT, linewidth=0.5, clip_on=False))
    if layers * heads > 1:
        for head in range(heads):
            axes.text(head * across + (n_k - 1) / 2, -0.7, f"head {head + 1}", ha="center", va="bottom", fontsize=9)
    if layers > 1:
        for layer in range(layers):
            place = image.shape[1] - 0.3, layer * down + (n_q - 1) / 2
            axes.text(*place, f"layer {layer}", ha="left", va="center", rotation=270, fontsize=9)
    label(axes.yaxis, rows, down, layers, cell)
    label(axes.xaxis, columns, across, heads, cell)
    if cell * 72 >= 26:
        inscribe(axes, image)
    scale(figure, shown, axes, "share of attention", 2.6 / (cell * image.shape[0]), 0.02 if layers == 1 else 0.05)
    return finished(figure, path)


def weights_of(weights: Any) -> np.ndarray:
    """(L, H, T_q, T_k), whatever weights came in."""
    if isinstance(weights, AttentionTrace):
        return weights_of(one_sequence(weights.weights))
    if isinstance(weights, GPTTrace):
        return np.stack([weights_of(steps)[0] for steps in weights.attention])
    array = np.asarray(plain(weights), dtype=float)
    if not 2 <= array.ndim <= 4 or 0 in array.shape:
        raise ValueError(f"weights are (T_q, T_k), (H, T_q, T_k) or (L, H, T_q, T_k), got shape {array.shape}")
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def label(axis: Any, tokens: list[str] | None, pitch: int, panels: int, cell: float) -> None:
    """Names along an axis, once for each panel, where a cell (in inches) has room for them."""
    size = min(9.0, cell * 72 * 0.8)
    axis.set_tick_params(length=0, pad=3)
    if tokens is None or size < 5:
        axis.set_ticks([])
        return
    places = [panel * pitch + i for panel in range(panels) for i in range(len(tokens))]
    turn = 90 if axis.axis_name == "x" and max(map(len, tokens)) * size * 0.62 > cell * 72 else 0
    axis.set_ticks(places, labels=tokens * panels, fontsize=size, rotation=turn)


def one_sequence(weights: Any) -> Any:
    array = plain(weights)
    if array.ndim == 4 and len(array) != 1:
        raise ValueError(f"a heatmap shows one sequence, this trace has a batch of {len(array)}: pass its .weights[i]")
    return array[0] if array.ndim == 4 else array


def inscribe(axes: Any, matrix: np.ndarray) -> None:
    """Write the numbers into the cells."""
    for (i, j), share in np.ndenumerate(matrix):
        if share != GAP:
            said = f"{share:.2f}" if share else "0"
            axes.text(j, i, said, ha="center", va="center", fontsize=8, color=ink(share))


# --------------------------------------------------------------------------------------------------------------------
# Training


def plot_losses(runs: Any, path: str | os.PathLike[str] | None = None) -> Plot:
    """Training loss (each step, and its running mean) and validation loss against the step.

    Args:
        runs: a run's folder or its log.csv, a `Run`, or its rows as dicts; or {label: any of these} to compare several.
        path: where to write the plot, if anywhere.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a file without the columns step and loss, or nothing to plot.
        OSError: a file that cannot be read.

    Example:
        >>> plot_losses([{"step": 0, "loss": 4.2}, {"step": 1, "loss": 3.9}]).axes[0].get_xlabel()
        'step'
    """
    several = runs.items() if isinstance(runs, Mapping) else [("", runs)]
    rows = {label: rows_of(run) for label, run in several}
    for label, lines in rows.items():
        if not any("loss" in line or "validation_loss" in line for line in lines):
            raise ValueError(f"there is no loss to plot{f' in {label!r}' if label else ''}: the run has no step yet")
    figure = blank(7, 4)
    draw_losses(figure.subplots(), rows)
    return finished(figure, path)


def rows_of(run: Any) -> list[dict[str, Any]]:
    """The rows of a run's log as dicts of numbers; empty cells are left out."""
    if hasattr(run, "log"):
        return list(run.log.rows)
    if not isinstance(run, (str, os.PathLike)):
        return list(run)
    path = Path(run)
    path = path / "log.csv" if path.is_dir() else path
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        found = reader.fieldnames or []
        if not {"step", "loss"} <= set(found):
            raise ValueError(f"{path} is no log of a run: expected the columns step and loss, found {list(found)}")
        rows = [row for row in reader if None not in row.values()]  # of a row cut short the end is None
    try:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]
    except ValueError as error:
        raise ValueError(f"{path} holds something else than numbers: {error}") from error


def plot_gradient_norms(model: Module, path: str | os.PathLike[str] | None = None) -> Plot:
    """The length of the gradient of each layer, after a `backward`: one bar for each module that holds parameters.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no parameter has a gradient.
    """
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0] or name
        if parameter.grad is not None:
            squares[layer] = squares.get(layer, 0.0) + float(np.square(parameter.grad, dtype=float).sum())
    if not squares:
        raise ValueError("no parameter of this model has a gradient: call loss.backward() first")
    figure = blank(7, 0.9 + 0.23 * len(squares))
    axes = figure.subplots()
    places = np.arange(len(squares))
    axes.barh(places, np.sqrt(list(squares.values())), color=BLUE, height=0.7)
    axes.set_yticks(places, labels=list(squares), fontsize=9)
    axes.set_ylim(len(squares) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter(lambda x, _: "")
    axes.set_xlabel("length of the gradient")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.25)
    return finished(figure, path)


# --------------------------------------------------------------------------------------------------------------------
# A look into a GPT


def plot_logit_lens(
    model: GPT,
    ids: Any,
    tokenizer: Any = None,
    path: str | os.PathLike[str] | None = None,
) -> Plot:
    """What a GPT would predict if it stopped after each layer: the likeliest next token, and how likely it is.

    The hidden state after each block goes straight to the final norm and the head ("the logit lens", nostalgebraist,
    2020). The last line is what the model says.

    Args:
        ids: one sequence of token ids, (T,) or (1, T).
        tokenizer: what gives names to ids, by `decode([id])`; the ids themselves unless given.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError, TypeError: ids that are not one sequence of integers.
    """
    idx = as_ids(ids, "ids")
    idx = idx[0] if idx.ndim == 2 and len(idx) == 1 else idx
    if idx.ndim != 1:
        raise ValueError(f"a logit lens looks at one sequence of ids, (T,), got shape {idx.shape}")

    def name(i: int) -> str:
        return str(i) if tokenizer is None else visible(tokenizer.decode([i]))

    likely, probability = lens(model, idx)
    lines = ["embedding", *(f"block {i}" for i in range(len(likely) - 1))]
    longest = max(len(name(i)) for i in {*likely.ravel().tolist(), *idx.tolist()})
    width = max(0.34, 0.085 * longest + 0.12)
    figure = blank(len(idx) * width + 2, len(lines) * 0.32 + 1.1)
    axes = figure.subplots()
    image = axes.imshow(probability, cmap=palette("attention"), vmin=0, vmax=1, aspect="auto")
    for i, j in np.ndindex(*likely.shape):
        shade = ink(float(probability[i, j]))
        axes.text(j, i, name(int(likely[i, j])), ha="center", va="center", fontsize=9, color=shade)
    axes.set_yticks(range(len(lines)), labels=lines, fontsize=9)
    axes.set_xticks(range(len(idx)), labels=[name(int(i)) for i in idx], fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    scale(figure, image, axes, "probability", 1.0, 0.02)
    return finished(figure, path)


@no_grad
def lens(model: GPT, idx: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """After each layer, the likeliest next token and its probability, (n_layer + 1, T) each."""
    _, trace = model(idx, trace=True)
    hidden = [model.ln_f(x) if model.config.norm_first else x for x in trace.hidden]
    weights = np.stack([ops.softmax(model.lm_head(x)).numpy() for x in hidden])
    return weights.argmax(axis=-1), weights.max(axis=-1)


# --------------------------------------------------------------------------------------------------------------------
# What all plots share


def blank(width: float, height: float) -> Plot:
    if Figure is object:
        raise ImportError('plots need matplotlib, which is not installed: pip install "tinygrad_mha[plot]"')
    return Plot(figsize=(width, height), dpi=130, layout="constrained")


def finished(figure: Plot, path: str | os.PathLike[str] | None) -> Plot:
    """Text as it is written (a token $x$ is no formula), in fonts that have its characters; written if so asked."""
    texts = figure.findobj(Text)
    family = families("".join(text.get_text() for text in texts))
    for text in texts:
        text.set_parse_math(False)
        text.set_fontfamily(family)
    if path is not None:
        figure.save(path)
    return figure


def families(text: str) -> list[str]:
    """The fonts to write a text in: a Chinese one too where it is needed."""
    usual = list(rcParams["font.family"])
    if not any("\u2e80" <= c <= "\uffef" or c >= "\U00020000" for c in text):
        return usual
    wanted = [name.strip() for name in CHINESE_FONTS.split(",")]
    installed = {font.name for font in font_manager.fontManager.ttflist}
    if installed.isdisjoint(wanted):  # a font may be newer than matplotlib's list of them
        for file in font_manager.findSystemFonts():
            if "cjk" in Path(file).name.lower() or "wqy" in Path(file).name.lower():
                font_manager.fontManager.addfont(file)
        installed = {font.name for font in font_manager.fontManager.ttflist}
    found = [name for name in wanted if name in installed][:1]
    if not found:
        warnings.warn(
            f"no font with Chinese characters was found, so they will be boxes: install one of {', '.join(wanted)} "
            f"(the system package fonts-noto-cjk, say)",
            stacklevel=4,
        )
    return usual + found


def names(given: Sequence[str] | None, n: int, what: str) -> list[str] | None:
    if given is None:
        return None
    given = [visible(str(name)) for name in given]
    if len(given) != n:
        raise ValueError(f"{what} must be {n} names, one for each, got {len(given)}")
    return given


def visible(token: str) -> str:
    """A token as it can be seen: signs for what is only white space, and for a break inside."""
    if not token.strip():
        return token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "∅"
    return token.replace("\n", "⏎")


def scale(figure: Plot, image: Any, axes: Any, text: str, shrink: float, pad: float) -> None:
    """The colours and what they mean, beside the picture."""
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, shrink), pad=pad)
    bar.set_label(text, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_linewidth(0.5)


def palette(name: str) -> Any:
    """A palette of the graphs as a colour map. What is no number is black, what is above all is white."""
    low, zero, high = (tuple(part / 255 for part in colour) for colour in PALETTES[name])
    parts = [zero, high] if low == zero else [low, zero, high]
    return LinearSegmentedColormap.from_list(name, parts).with_extremes(bad=INK, over="white")


def ink(share: float) -> str:
    """What is read on the colour of a share; also on that of no number."""
    return "white" if not share < 0.55 else INK
