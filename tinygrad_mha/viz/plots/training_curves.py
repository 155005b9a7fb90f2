"""Plots of training: the losses of a run, and the gradient norm of each layer."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_mha.nn.module import Module
from tinygrad_mha.viz.plots.figures import Plot, finish_plot, new_plot

__all__ = ["plot_gradient_norms", "plot_losses"]

Rows = list[dict[str, Any]]
BLUE, ORANGE = "#2166ac", "#d6601e"


def plot_losses(runs: Any, path: str | os.PathLike[str] | None = None) -> Plot:
    """Plot training loss (each step, and its running mean) and validation loss against the step.

    Args:
        runs: a run's folder or its log.csv, a `Run`, or its rows as dicts; or {label: any of these} to compare several.
        path: where to write the plot.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a file without the columns step and loss, or nothing to plot.
        OSError: a file that cannot be read.

    Example:
        >>> plot_losses([{"step": 0, "loss": 4.2}, {"step": 1, "loss": 3.9}]).axes[0].get_xlabel()
        'step'
    """
    several = runs.items() if isinstance(runs, Mapping) else [("", runs)]
    rows = {label: read_rows(run) for label, run in several}
    for label, log in rows.items():
        if not any("loss" in row or "validation_loss" in row for row in log):
            raise ValueError(f"there is no loss to plot{f' in {label!r}' if label else ''}: the run has no step yet")
    plot = new_plot(7, 4)
    draw_losses(plot.subplots(), rows)
    return finish_plot(plot, path)


def read_rows(run: Any) -> Rows:
    """The rows of a run's log as dicts of numbers, without empty cells."""
    if hasattr(run, "log"):
        return list(run.log.rows)
    if not isinstance(run, (str, os.PathLike)):
        return list(run)
    path = Path(run)
    path = path / "log.csv" if path.is_dir() else path
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or [])
        if not {"step", "loss"} <= set(columns):
            raise ValueError(f"{path} is not the log of a run: expected the columns step and loss, found {columns}")
        rows = [row for row in reader if None not in row.values()]  # a row that was cut short ends in None
    try:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]
    except ValueError as error:
        raise ValueError(f"{path} holds something other than numbers: {error}") from error


def draw_losses(axes: Any, runs: Mapping[str, Rows]) -> None:
    """Draw training loss (each step, and its running mean) and validation loss against the step.

    Args:
        axes: matplotlib axes.
        runs: the rows of each run's log by its label; one label may be "".
    """
    for i, (label, rows) in enumerate(runs.items()):
        colours = (BLUE, ORANGE) if len(runs) == 1 else (f"C{i}", f"C{i}")
        prefix = f"{label}, " if label else ""
        steps, losses = select_column(rows, "loss")
        axes.plot(steps, losses, color=colours[0], linewidth=0.6, alpha=0.35)
        mean = running_mean(losses, window=max(1, len(losses) // 50))
        marker = "o" if len(steps) == 1 else None  # a line of one point is invisible
        axes.plot(steps, mean, color=colours[0], linewidth=1.4, marker=marker, label=f"{prefix}training")
        mark_divergence(axes, steps, losses, colours[0], prefix)
        steps, losses = select_column(rows, "validation_loss")
        if len(steps):
            style = "o-" if len(runs) == 1 else "o--"
            axes.plot(steps, losses, style, color=colours[1], markersize=4, linewidth=1.2, label=f"{prefix}validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def mark_divergence(axes: Any, steps: np.ndarray, losses: np.ndarray, colour: str, prefix: str) -> None:
    """A line at the first step whose loss is not finite, where the curve ends."""
    wrong = steps[~np.isfinite(losses)]
    if len(wrong):
        axes.axvline(wrong[0], color=colour, linestyle=":", label=f"{prefix}diverged at step {wrong[0]:g}")


def select_column(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps that have a value of this name, and the values."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return steps, values


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the `window` values around each one, of fewer at both ends."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    middle = np.arange(len(values))
    first, last = np.maximum(middle - window // 2, 0), np.minimum(middle + (window + 1) // 2, len(values))
    return (sums[last] - sums[first]) / (last - first)


def plot_gradient_norms(model: Module, path: str | os.PathLike[str] | None = None) -> Plot:
    """Plot the gradient norm of each module that holds parameters, after a `backward`.

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
    plot = new_plot(7, 0.9 + 0.23 * len(squares))
    axes = plot.subplots()
    rows = np.arange(len(squares))
    norms = np.sqrt(list(squares.values()))
    # Dots, not bars: a logarithmic axis has no zero from which a bar could start.
    axes.plot(norms, rows, "o", color=BLUE)
    for row, norm in zip(rows, norms, strict=True):
        axes.annotate(f"{norm:.2g}", (norm, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.margins(x=0.15)
    axes.set_yticks(rows, labels=list(squares), fontsize=9)
    axes.set_ylim(len(squares) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter(lambda x, _: "")
    axes.set_xlabel("gradient norm")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.25)
    return finish_plot(plot, path)
