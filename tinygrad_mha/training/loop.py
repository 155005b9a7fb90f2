"""`train` and its loop: evaluate, sample, update, log, checkpoint."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from tinygrad_mha.data import Tokenizer
from tinygrad_mha.files.run_folder import check_new, find_latest, hold_folder
from tinygrad_mha.training.config import TrainConfig, preset
from tinygrad_mha.training.parallel import join_ranks
from tinygrad_mha.training.report import Event, Show, open_report, save_loss_plot
from tinygrad_mha.training.resume import resume_run, save_checkpoint
from tinygrad_mha.training.run_state import Run
from tinygrad_mha.training.source import open_text

__all__ = ["train"]

# Ctrl-C, the end that a batch system announces, and a terminal that is closed (Windows has no SIGHUP).
STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def train(
    config: TrainConfig | str | None = None,
    text: str | Path | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    tokenizer: Tokenizer | None = None,
    model: Any = None,
    workers: int | None = None,
    show: Show = "bar",
    **changes: Any,
) -> Run:
    """Train a GPT on a text, or continue to train a model.

    Ctrl-C, SIGTERM and SIGHUP finish the current step, write a checkpoint and return; a second one stops at once. The
    folder receives `log.csv` (one row per step), `samples.csv`, the latest checkpoint and, if matplotlib is installed,
    `loss.png`.

    Args:
        config: a TrainConfig or the name of a preset ("tiny", "cpu", "finetune"). Unless given it is "finetune" for a
            given model, else "cpu". `changes` replace single options of it, such as `steps=100` or `n_layer=2`.
        text: the text itself (str), a file (Path), or None for the built-in corpus.
        folder: where checkpoints, logs and samples are written; None writes nothing.
        resume: continue from the latest checkpoint in the folder, or start if there is none. The configuration is the
            stored one; `changes` may only contain options of `training.resume.CHANGEABLE`. More `steps`
            lengthen the learning-rate schedule, unless `decay_steps` is the number of steps of before.
        tokenizer: the characters of the text unless given. It has as many tokens as the model. Only these numbers are
            compared, so pass the tokenizer of a given model: that of another text may assign other ids.
        model: the model to train, in place, with its dtype, ties, frozen tensors and generators: a `GPT`, or any
            `Module` with `loss(idx, targets)`, a Tensor with one element, and a `config` with `vocab_size` and
            `block_size`. To write samples it is also a `tinygrad_mha.decoding.LanguageModel`; else set
            `sample_interval=0`. It determines the model options of the configuration; those that are given must agree,
            but `block_size` may be smaller: the length of the windows of text. To resume, pass the same model again, in
            any state; a `GPT` of ours is rebuilt if it is left out.
        workers: the number of threads that share the rows of each batch, one if None. Each computes with a copy of the
            modules of the model, made once, and with BLAS on one thread. One is used where more would be slower: see
            `training.parallel`. With dropout, another number draws other masks.
        show: "bar" (a progress bar), "json" (one JSON object per event on standard output), "quiet", or a function
            that receives every event.

    Returns:
        The run: `.model`, `.tokenizer`, `.log.rows`, `.interrupted` and more.

    Raises:
        ValueError: an invalid configuration, text or folder, or a model that contradicts configuration or tokenizer.
        TypeError: a model that lacks what training needs.
        CheckpointError: a damaged checkpoint, or one of another configuration or model.
        DivergedError: the loss, gradient or weights became inf or nan.
        OSError: the folder cannot be written.

    Example:
        >>> run = train("tiny", text="hello world. " * 99, steps=3, eval_batches=1, sample_interval=0, show="quiet")
        >>> [row["step"] for row in run.log.rows]
        [0, 1, 2, 3]
    """
    with join_ranks() as ranks:
        ours = Path(folder) if folder is not None and ranks.rank == 0 else None  # the other ranks write nothing
        with nullcontext() if ours is None else hold_folder(ours):
            checkpoint = ranks.bcast(None if ours is None else find_latest(ours))
            if checkpoint is not None and not resume:
                raise ValueError(
                    f"{folder} contains a run already, at {checkpoint.name}: resume it, or choose another folder"
                )
            if checkpoint is not None:
                run = resume_run(checkpoint, config, text, tokenizer, model, workers, changes)
            else:
                if ours is not None:
                    check_new(ours, resume)
                if not isinstance(config, TrainConfig):
                    config = preset(config or ("cpu" if model is None else "finetune"))
                run = Run(dataclasses.replace(config, **changes), open_text(text), tokenizer, folder, model, workers)
            shown = show if ranks.rank == 0 else "quiet"
            with open_report(shown, run) as report, catch_interrupt(ranks.size) as interruption:
                report({"event": "start", "step": run.step, "computing": run.workers.summary, "note": run.note})
                with run.workers.limit_blas():
                    run_steps(run, report, interruption)
                report({"event": "end", "step": run.step, "interrupted": run.interrupted})
            if run.folder is not None:
                try:
                    save_loss_plot(run.log.rows, run.folder / "loss.png")
                except Exception as error:
                    warnings.warn(f"the run is saved, but not the plot of its losses: {error}", stacklevel=2)
            return run


def run_steps(run: Run, report: Callable[[Event], None], interruption: threading.Event) -> None:
    """The loop: evaluate, sample, update, log, checkpoint, until the last step or an interruption."""
    config = run.config
    samples = config.sample_interval > 0 and run.workers.comm.rank == 0
    if run.step == 0 and run.folder is not None:
        create_folder(run)
    while True:
        last = run.step >= config.steps
        row: dict[str, Any] = {"step": run.step}
        if last or run.step % config.eval_interval == 0:
            row["validation_loss"] = run.evaluate()
        if samples and (last or run.step % config.sample_interval == 0):
            sample = {"step": run.step, "text": run.sample()}
            run.samples.add(sample)
            report({"event": "sample", **sample})
        speed = {}
        if not last:
            start = time.perf_counter()
            with np.errstate(over="ignore", invalid="ignore"):  # update checks the loss itself and names the step
                row |= run.update()
            tokens = config.batch_size * config.accumulate * config.block_size
            seconds = time.perf_counter() - start
            speed = {"tokens_per_second": tokens / seconds} if seconds > 0 else {}  # a clock may stand still
        run.log.add(row)
        report({"event": "step", **row, **speed})
        if last:
            return
        due = run.step % config.checkpoint_interval == 0 or run.step == config.steps
        stop = run.workers.agree_to_stop(interruption.is_set())
        if run.folder is not None and (due or stop):
            report({"event": "checkpoint", "step": run.step, "path": str(save_checkpoint(run))})
        if stop:
            run.interrupted = True
            return


def create_folder(run: Run) -> None:
    """Create the folder of a new run, with empty logs and a checkpoint of step 0, so that a fault shows at once."""
    assert run.folder is not None
    try:
        run.log.rewind(0)
        run.samples.rewind(0)
        save_checkpoint(run)
    except OSError as error:
        raise type(error)(
            error.errno, f"cannot write the run to this folder ({error.strerror})", str(run.folder)
        ) from error


@contextmanager
def catch_interrupt(n_ranks: int = 1) -> Iterator[threading.Event]:
    """Yield an event that the first of the signals STOPS sets, such as that of Ctrl-C; a second has its usual effect.

    Signals stay as they are in other threads than the main one, as do those that the process ignores, such as Ctrl-C in
    background jobs and SIGHUP under nohup. One of several ranks ends at SIGTERM and SIGHUP: a launcher sends them when
    another has failed, for which it would wait.
    """
    interruption = threading.Event()
    in_main = threading.current_thread() is threading.main_thread()
    caught = STOPS if n_ranks == 1 else [signal.SIGINT]
    before = {number: signal.getsignal(number) for number in caught} if in_main else {}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request(number: int, frame: FrameType | None) -> None:
        interruption.set()
        restore()

    for number in before:
        signal.signal(number, request)
    try:
        yield interruption
    finally:
        restore()
