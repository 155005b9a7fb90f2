"""What each layer of a GPT would predict."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import as_ids
from tinygrad_mha.data import name_token, show_token
from tinygrad_mha.modes import no_grad
from tinygrad_mha.nn import GPT
from tinygrad_mha.viz.plots.figures import Plot, add_scale, finish_plot, make_colormap, new_plot, text_color

__all__ = ["plot_logit_lens"]


def plot_logit_lens(model: GPT, ids: Any, tokenizer: Any = None, path: str | os.PathLike[str] | None = None) -> Plot:
    """Plot what a GPT would predict after each layer: the most likely next token, and its probability.

    The hidden state after each block goes straight to the final norm and the head ("the logit lens", nostalgebraist,
    2020). The last row is the prediction of the model.

    Args:
        ids: one sequence of token ids, (T,) or (1, T).
        tokenizer: names the ids by `decode([id])`; without it they are shown as numbers.
        path: where to write the plot.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError, TypeError: `ids` is not one sequence of integers.
    """
    idx = as_ids(ids, "ids")
    idx = idx[0] if idx.ndim == 2 and len(idx) == 1 else idx
    if idx.ndim != 1:
        raise ValueError(f"a logit lens shows one sequence of ids, (T,), got shape {idx.shape}")

    def name(i: int) -> str:
        return show_token(name_token(tokenizer, i))

    likely, probability = predict_from_layers(model, idx)
    rows = ["embedding", *(f"layer {i}" for i in range(1, len(likely)))]
    longest = max(len(name(i)) for i in {*likely.ravel().tolist(), *idx.tolist()})
    plot = new_plot(len(idx) * max(0.34, 0.085 * longest + 0.12) + 2, len(rows) * 0.32 + 1.1)
    axes = plot.subplots()
    image = axes.imshow(probability, cmap=make_colormap("attention"), vmin=0, vmax=1, aspect="auto")
    for i, j in np.ndindex(*likely.shape):
        color = text_color(float(probability[i, j]))
        axes.text(j, i, name(int(likely[i, j])), ha="center", va="center", fontsize=9, color=color)
    axes.set_yticks(range(len(rows)), labels=rows, fontsize=9)
    axes.set_xticks(range(len(idx)), labels=[name(int(i)) for i in idx], fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    add_scale(plot, image, axes, "probability", 1.0, 0.02)
    return finish_plot(plot, path)


@no_grad
def predict_from_layers(model: GPT, idx: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The most likely next token after each layer and its probability, (n_layer + 1, T) each."""
    _, trace = model(idx, trace=True)
    hidden = [model.ln_f(x) if model.config.norm_first else x for x in trace.hidden]
    probabilities = np.stack([ops.softmax(model.lm_head(x)).numpy() for x in hidden])
    return probabilities.argmax(axis=-1), probabilities.max(axis=-1)
