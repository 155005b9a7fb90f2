"""Attention weights as a heatmap."""

from __future__ import annotations

import contextlib
import os
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
    gap = max(1, max(n_q, n_k) // 10)
    down, across = n_q + gap, n_k + gap
    low, high, palette = find_colors(stack)
    image = np.full((layers * down - gap, heads * across - gap), GAP * high)
    for layer, head in np.ndindex(layers, heads):
        image[layer * down : layer * down + n_q, head * across : head * across + n_k] = stack[layer, head]
    cell = min(0.62, max(0.06, 9 / max(image.shape)))  # inches
    plot = new_plot(cell * image.shape[1] + 1.6, cell * image.shape[0] + 0.7)
    axes = plot.subplots()
    shown = axes.imshow(image, cmap=make_colormap(palette), vmin=low, vmax=high, interpolation="nearest")
    axes.spines[:].set_visible(False)
    for layer, head in np.ndindex(layers, heads):
        corner = head * across - 0.5, layer * down - 0.5
        axes.add_patch(Rectangle(corner, n_k, n_q, fill=False, edgecolor=ABSENT, linewidth=0.5, clip_on=False))
    if layers * heads > 1:
        for head in range(heads):
            axes.text(head * across + (n_k - 1) / 2, -0.7, f"head {head + 1}", ha="center", va="bottom", fontsize=9)
    if layers > 1:
        for layer in range(layers):
            x, y = image.shape[1] - 0.3, layer * down + (n_q - 1) / 2
            axes.text(x, y, f"layer {layer + 1}", ha="left", va="center", rotation=270, fontsize=9)
    label_axis(axes.yaxis, rows, down, layers, cell)
    label_axis(axes.xaxis, columns, across, heads, cell)
    axes.set_ylabel(axes_names[0], fontsize=9)
    axes.set_xlabel(axes_names[1], fontsize=9)
    if cell * 72 >= 26:
        for (i, j), weight in np.ndenumerate(image):
            if weight != GAP * high:
                text = write_value(float(weight))
                color = text_color(abs(weight) / high)
                axes.text(j, i, text, ha="center", va="center", fontsize=8, color=color)
    add_scale(plot, shown, axes, label, 2.6 / (cell * image.shape[0]), 0.02 if layers == 1 else 0.05)
    return finish_plot(plot, path)


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
    if names is None or size < 5:
        axis.set_ticks([])
        return
    ticks = [panel * pitch + i for panel in range(panels) for i in range(len(names))]
    is_narrow = axis.axis_name == "x" and max(map(len, names)) * size * 0.62 > cell * 72
    axis.set_ticks(ticks, labels=names * panels, fontsize=size, rotation=90 if is_narrow else 0)
