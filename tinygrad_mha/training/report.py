"""What a run shows: a progress bar, JSON lines, events for a function, and the plot of its losses."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from tinygrad_mha.files import replacing
from tinygrad_mha.training.run_state import Run

__all__ = ["draw_losses", "open_report", "save_loss_plot"]

Event = dict[str, Any]
Show = str | Callable[[Event], None]
Rows = list[dict[str, Any]]

FORMATS = {"loss": "loss {:.4f}", "validation_loss": "validation {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}
BLUE, ORANGE = "#2166ac", "#d6601e"


@contextmanager
def open_report(show: Show, run: Run) -> Iterator[Callable[[Event], None]]:
    """Yield the callback that receives each event: {"event": "step" | "sample" | "checkpoint" | "end", "step": n, ...}.

    Raises:
        ValueError: an unknown `show`.
    """
    if callable(show):
        yield show
    elif show == "quiet":
        yield lambda event: None
    elif show == "json":
        yield lambda event: print(json.dumps(event), flush=True)
    elif show == "bar":
        total = run.config.steps
        with tqdm(total=total, initial=run.step, unit="step", dynamic_ncols=True, file=sys.stderr) as bar:
            yield Bar(bar)
    else:
        raise ValueError(f'show must be "bar", "json", "quiet" or a function, got {show!r}')


class Bar:
    """Shows events on a progress bar: loss, validation loss, tokens per second; tqdm adds the remaining time."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar
        self.shown: dict[str, str] = {}

    def __call__(self, event: Event) -> None:
        if event["event"] == "sample":
            self.bar.write(f"--- step {event['step']} ---\n{event['text']}", file=sys.stderr)
        for name, text in FORMATS.items():
            if name in event:
                self.shown[name] = text.format(event[name])
        self.bar.set_postfix_str(", ".join(self.shown.values()), refresh=False)
        self.bar.update(1 if "loss" in event else 0)


# --------------------------------------------------------------------------------------------------------------------
# The plot of losses


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save_loss_plot(rows: Rows, path: Path) -> None:
    """Write the plot of a run's losses as PNG. Does nothing without matplotlib."""
    if not can_plot():
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    draw_losses(figure.subplots(), {"": rows})
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


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
        axes.plot(steps, mean, color=colours[0], linewidth=1.4, label=f"{prefix}training")
        steps, losses = select_column(rows, "validation_loss")
        if len(steps):
            style = "o-" if len(runs) == 1 else "o--"
            axes.plot(steps, losses, style, color=colours[1], markersize=4, linewidth=1.2, label=f"{prefix}validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


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
