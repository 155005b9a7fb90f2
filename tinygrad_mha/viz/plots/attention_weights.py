"""Attention weights as a heatmap."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from tinygrad_mha.data import show_token
from tinygrad_mha.nn.gpt import GPTTrace
from tinygrad_mha.nn.heads import AttentionTrace
from tinygrad_mha.tensors import plain
from tinygrad_mha.viz.diagram.heat import ABSENT, write_value
from tinygrad_mha.viz.plots.figures import Plot, add_scale, finish_plot, make_colormap, new_plot, text_color

with contextlib.suppress(ImportError):  # `new_plot` says so
    from matplotlib.patches import Rectangle

__all__ = ["heatmap"]

GAP = 2.0  # the value between panels, in multiples of the upper limit of the colours
SMALLEST_TEXT = 5  # points
ONE_LINE = 40  # cells beside each other: they are large enough for names
ROUNDING = 1e-5  # a softmax in float32 can exceed 1 by less than this


def heatmap(
    weights: Any,
    tokens: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    label: str = "attention weight",
    axes_names: tuple[str, str] = ("query", "key"),
) -> Plot:
    """Plot attention weights as colours: a panel for each head, a line of panels for each layer. Rows are queries.

    Many heads of one layer are in several lines. Names of tokens that would be too small are left out, with a warning.

    Colours span 0 to 1. If a weight is below 0 or above 1, they diverge from 0 and span -m to m, where m is the largest
    magnitude.

    Args:
        weights: (T_q, T_k), (H, T_q, T_k) or (L, H, T_q, T_k); or the trace of an attention or a GPT, of one sequence.
        tokens: the names of the rows, and those of the columns if there are as many.
        keys: the names of the columns, for cross-attention.
        path: where to write the plot.
        label: what the colours mean.
        axes_names: what rows and columns are.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: weights of another shape, a batch of several, or a wrong number of names.

    Example:
        >>> heatmap(np.eye(3), tokens=["the", "cat", "sat"]).axes[0].get_title()
        ''
    """
    stack = as_weights(weights)
    layers, heads, n_q, n_k = stack.shape
    if keys is None and n_q == n_k:
        keys = tokens
    rows, columns = check_names(tokens, n_q, "tokens"), check_names(keys, n_k, "keys")

    # All panels are one image with gaps in it: a hundred axes would take half a minute.
    lines, per_line = (layers, heads) if layers > 1 else wrap_heads(heads, n_q, n_k)
    gap = max(1, max(n_q, n_k) // 10)
    is_wrapped = lines > layers
    down, across = n_q + (max(gap, 2, n_q // 4) if is_wrapped else gap), n_k + gap  # titles stand between lines
    low, high, palette = find_colors(stack)
    image = np.full((lines * down - (down - n_q), per_line * across - gap), GAP * high)
    corners = {(layer, head): divmod(layer * heads + head, per_line) for layer, head in np.ndindex(layers, heads)}
    for panel, (line, place) in corners.items():
        image[line * down : line * down + n_q, place * across : place * across + n_k] = stack[panel]
    cell = min(0.62, max(0.06, 9 / max(image.shape)))  # inches
    # In inches, beside the cells: scale and names of queries; titles and names of keys, which may stand upright.
    beside, below = (max(map(len, names or [""])) * 0.075 for names in (rows, columns))
    plot = new_plot(cell * image.shape[1] + 1.5 + beside, cell * image.shape[0] + 1.0 + below)
    axes = plot.subplots()
    shown = axes.imshow(image, cmap=make_colormap(palette), vmin=low, vmax=high, interpolation="nearest")
    axes.spines[:].set_visible(False)
    for (_, head), (line, place) in corners.items():
        x, y = place * across, line * down
        border = Rectangle((x - 0.5, y - 0.5), n_k, n_q, fill=False, edgecolor=ABSENT, linewidth=0.5, clip_on=False)
        axes.add_patch(border)
        if layers * heads > 1 and (line == 0 or is_wrapped):
            axes.text(x + (n_k - 1) / 2, y - 0.7, f"head {head + 1}", ha="center", va="bottom", fontsize=9)
    if layers > 1:
        for layer in range(layers):
            x, y = image.shape[1] - 0.3, layer * down + (n_q - 1) / 2
            axes.text(x, y, f"layer {layer + 1}", ha="left", va="center", rotation=270, fontsize=9)
    label_axis(axes.yaxis, rows, down, lines, cell)
    label_axis(axes.xaxis, columns, across, per_line, cell)
    axes.set_ylabel(axes_names[0], fontsize=9)
    axes.set_xlabel(axes_names[1], fontsize=9)
    if cell * 72 >= 26:
        for (i, j), weight in np.ndenumerate(image):
            if weight != GAP * high:
                text = write_value(float(weight))
                color = text_color(abs(weight) / high)
                axes.text(j, i, text, ha="center", va="center", fontsize=min(8.0, cell * 18), color=color)
    add_scale(plot, shown, axes, label, 2.6 / (cell * image.shape[0]), 0.02 if layers == 1 else 0.05)
    return finish_plot(plot, path)


def wrap_heads(heads: int, n_q: int, n_k: int) -> tuple[int, int]:
    """How many lines of how many panels show the heads of one layer: one line if its cells are large enough.

    Otherwise the number of lines that makes the cells largest.
    """
    if heads * (n_k + 1) <= ONE_LINE:
        return 1, heads
    lines = min(range(1, heads + 1), key=lambda n: max(-(-heads // n) * (n_k + 1), n * (n_q + 2)))
    return lines, -(-heads // lines)


def as_weights(weights: Any) -> np.ndarray:
    """Weights in any accepted form as (L, H, T_q, T_k)."""
    if isinstance(weights, AttentionTrace) and weights.weights is None:
        raise ValueError('this attention did not show its weights: its forward must call edit("weights", weights)')
    if isinstance(weights, AttentionTrace):
        array = plain(weights.weights)
        if array.ndim == 4 and len(array) != 1:
            raise ValueError(f"a heatmap shows one sequence, this trace has a batch of {len(array)}: pass .weights[i]")
        return as_weights(array[0] if array.ndim == 4 else array)
    if isinstance(weights, GPTTrace):
        return np.stack([as_weights(steps)[0] for steps in weights.attention])
    array = np.asarray(plain(weights), dtype=float)
    if not 2 <= array.ndim <= 4 or 0 in array.shape:
        raise ValueError(f"weights must be (T_q, T_k), (H, T_q, T_k) or (L, H, T_q, T_k), got shape {array.shape}")
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def find_colors(weights: np.ndarray) -> tuple[float, float, str]:
    """The limits of the colours and the palette: 0 to 1 for probabilities, symmetric about 0 for other weights."""
    finite = weights[np.isfinite(weights)]
    lowest, highest = float(finite.min(initial=0.0)), float(finite.max(initial=1.0))
    if lowest >= 0 and highest <= 1 + ROUNDING:
        return 0.0, highest, "attention"
    most = float(np.abs(finite).max())
    return -most, most, "value"


def check_names(names: Sequence[str] | None, n: int, argument: str) -> list[str] | None:
    if names is not None and len(names) != n:
        raise ValueError(f"{argument} must be {n} names, one for each, got {len(names)}")
    return None if names is None else [show_token(str(name)) for name in names]


def label_axis(axis: Any, names: list[str] | None, pitch: int, panels: int, cell: float) -> None:
    """Names along an axis, once for each panel, if a cell (in inches) has room for them."""
    size = min(9.0, cell * 72 * 0.8)
    axis.set_tick_params(length=0, pad=3)
    if names is not None and size < SMALLEST_TEXT:
        message = (
            f"the names of {len(names)} tokens do not fit at {panels} panels of {len(names)} cells, and are left out"
        )
        warnings.warn(f"{message}: plot fewer tokens, fewer heads or one layer", stacklevel=3)
    if names is None or size < SMALLEST_TEXT:
        axis.set_ticks([])
        return
    ticks = [panel * pitch + i for panel in range(panels) for i in range(len(names))]
    is_narrow = axis.axis_name == "x" and max(map(len, names)) * size * 0.62 > cell * 72
    axis.set_ticks(ticks, labels=names * panels, fontsize=size, rotation=90 if is_narrow else 0)
