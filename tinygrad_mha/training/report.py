"""What a run shows: a progress bar, JSON lines, events for a function, and the plot of its losses."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from tinygrad_mha import viz
from tinygrad_mha.training.run_state import Run

__all__ = ["open_report", "save_loss_plot"]

Event = dict[str, Any]
Show = str | Callable[[Event], None]

FORMATS = {"loss": "loss {:.4f}", "validation_loss": "validation {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}


@contextmanager
def open_report(show: Show, run: Run) -> Iterator[Callable[[Event], None]]:
    """Yield the callback that receives each event: {"event": "start" | "step" | "sample" | ..., "step": n, ...}.

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
        total, pause = run.config.steps, 0.1 if Terminal().isatty() else 10  # seconds; a log needs fewer lines
        options = {"unit": "step", "dynamic_ncols": True, "mininterval": pause}
        with tqdm(total=total, initial=run.step, file=Terminal(), **options) as bar:
            yield Bar(bar)
    else:
        raise ValueError(f'show must be "bar", "json", "quiet" or a function, got {show!r}')


class Terminal:
    """Standard error. After it was closed it loses what is written, and the training goes on."""

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        try:
            return sys.stderr.isatty()
        except (ValueError, AttributeError):
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class Bar:
    """Shows events on a progress bar: loss, validation loss, tokens per second; tqdm adds the remaining time."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar
        self.shown: dict[str, str] = {}

    def __call__(self, event: Event) -> None:
        if event["event"] == "start":
            self.bar.write(event["computing"], file=self.bar.fp)
            if event["note"]:
                self.bar.write(f"note: {event['note']}", file=self.bar.fp)
        if event["event"] == "sample":
            self.bar.write(f"--- step {event['step']} ---\n{event['text']}", file=self.bar.fp)
        for name, text in FORMATS.items():
            if name in event:
                self.shown[name] = text.format(event[name])
        self.bar.set_postfix_str(", ".join(self.shown.values()), refresh=False)
        self.bar.update(1 if "loss" in event else 0)


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save_loss_plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the plot of a run's losses. Does nothing without matplotlib."""
    if can_plot():
        viz.plot_losses(rows, path)
