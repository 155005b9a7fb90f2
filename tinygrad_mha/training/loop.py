"""Training a GPT on a text: a loop that can be read, killed at any moment, and gone on with as if nothing had happened.

A run lives in a folder. `log.csv` has one row per step, `samples.csv` what the model wrote along the way, and a
checkpoint (see `checkpoints.py`) all that the run consists of: weights, optimizer, the states of all random generators,
tokenizer and configuration, as safetensors and JSON. What a resumed run computes and writes equals, bit for bit, what
it would have been without the interruption (on the same machine, with the same versions and number of threads).
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.util
import json
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from tinygrad_mha.data import Batches, CharTokenizer, Tokenizer, builtin_corpus, load_tokenizer, read_text, split_text
from tinygrad_mha.decoding import ContextFullWarning, generate
from tinygrad_mha.files import CheckpointError, load_arrays, read_json, replacing, save_arrays, write_json
from tinygrad_mha.files.run_folder import CsvLog, find_latest, remove_others, write_checkpoint
from tinygrad_mha.modes import no_grad
from tinygrad_mha.nn import GPT, GPTConfig
from tinygrad_mha.optim import AdamW, clip_grad_norm, decay_groups, warmup_cosine

# --------------------------------------------------------------------------------------------------------------------
# Configuration


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides how a run goes, besides its text. The defaults are nanoGPT's CPU configuration.

    Attributes:
        n_layer, n_head, n_embd, block_size, dropout, bias, norm, norm_first, activation, position, tie_weights,
            n_kv_head: the model; see `GPTConfig`.
        batch_size, accumulate: windows per pass, and passes per step.
        steps: how many times the weights move.
        learning_rate, min_lr, warmup: up in a line, down in half a cosine until the last step; see `warmup_cosine`.
        betas, weight_decay: of AdamW; matrices and embeddings decay, the rest does not.
        clip: the longest gradient (0: any).
        eval_interval, eval_batches: every so many steps, the mean validation loss of so many batches, always the same.
        sample_interval, sample_tokens: every so many steps (0: never), the model writes so many tokens.
        checkpoint_interval: every so many steps, all is saved.
        seed: of the weights, the data, dropout, the evaluation and the samples, each with a generator of its own.
    """

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64
    dropout: float = 0.0
    bias: bool = False
    norm: str = "layer"
    norm_first: bool = True
    activation: str = "gelu"
    position: str = "learned"
    tie_weights: bool = True
    n_kv_head: int | None = None
    batch_size: int = 12
    accumulate: int = 1
    steps: int = 2000
    learning_rate: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_interval: int = 250
    eval_batches: int = 20
    sample_interval: int = 500
    sample_tokens: int = 200
    checkpoint_interval: int = 250
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of {least} or more, got {value!r}")
        if not 0 <= self.min_lr <= self.learning_rate < math.inf:
            raise ValueError(f"expected 0 <= min_lr <= learning_rate, got {self.min_lr} and {self.learning_rate}")
        if not 0 <= self.clip < math.inf:
            raise ValueError(f"clip must be a finite number, 0 (no clipping) or more, got {self.clip}")
        object.__setattr__(self, "betas", tuple(self.betas))

    @classmethod
    def of(cls, given: dict[str, Any]) -> TrainConfig:
        """From a dict; a key that is not known is a ValueError that names the nearest that is."""
        check_keys(given)
        return cls(**given)

    def model(self, vocab_size: int) -> GPTConfig:
        """The model's own part of it."""
        shared = {field.name for field in dataclasses.fields(GPTConfig)} & {f.name for f in dataclasses.fields(self)}
        return GPTConfig(vocab_size=vocab_size, **{name: getattr(self, name) for name in sorted(shared)})

    def lr(self, step: int) -> float:
        """The learning rate of a step, 0 being the first."""
        return warmup_cosine(step, self.learning_rate, self.min_lr, self.warmup, max(self.steps, self.warmup))


LEAST = dict.fromkeys(["n_layer", "n_head", "n_embd", "block_size", "batch_size", "accumulate", "eval_interval"], 1)
LEAST |= dict.fromkeys(["eval_batches", "checkpoint_interval"], 1)
LEAST |= dict.fromkeys(["steps", "warmup", "sample_interval", "sample_tokens", "seed"], 0)

# What a resumed run may change: how long it goes on, and what is looked at on the way.
CHANGEABLE = ("steps", "eval_interval", "eval_batches", "sample_interval", "sample_tokens", "checkpoint_interval")

PRESETS = {
    "tiny": TrainConfig(
        n_layer=2,
        n_head=4,
        n_embd=64,
        block_size=32,
        batch_size=16,
        steps=600,
        learning_rate=3e-3,
        min_lr=3e-4,
        warmup=30,
        eval_interval=100,
        sample_interval=300,
        sample_tokens=100,
        checkpoint_interval=100,
    ),
    "cpu": TrainConfig(),
}


def preset(name: str, **changes: Any) -> TrainConfig:
    """One of PRESETS, with changes.

    Example:
        >>> preset("cpu", dropout=0.1).dropout
        0.1
    """
    if name not in PRESETS:
        raise ValueError(f"there is no configuration {name!r}; there are {', '.join(PRESETS)}")
    check_keys(changes)
    return dataclasses.replace(PRESETS[name], **changes)


def check_keys(given: Iterable[str]) -> None:
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"a training configuration has no {name!r}; {hint}it has {', '.join(known)}")


# --------------------------------------------------------------------------------------------------------------------
# One run


# What a random generator is for goes into its seed. (Those of the model, for weights and dropout, are the model's own.)
DATA, EVALUATION, SAMPLING = 1, 2, 3

LOG = {"step": int, "learning_rate": float, "loss": float, "grad_norm": float, "validation_loss": float}
SAMPLES = {"step": int, "text": str}


class DivergedError(RuntimeError):
    """The loss, the gradient or a weight became inf or nan; the message names the step."""


class Run:
    """A model in training: everything that belongs to it at one moment, and what takes it one step further.

    Args:
        config: how it goes.
        text: what it learns from; the last tenth validates.
        tokenizer: the characters of the text unless given.
        folder: where it keeps what it must not lose; None keeps nothing.
        source: where the text came from, so that a resumed run can find it.

    Attributes:
        step: how many updates there were.
        log: one row per step; `log.rows` is a list of dicts.
        samples: what the model wrote, by step.
        interrupted: whether `train` was stopped before its time.

    Raises:
        ValueError: a text whose training or validation part is shorter than a block.
    """

    def __init__(
        self,
        config: TrainConfig,
        text: str,
        tokenizer: Tokenizer | None = None,
        folder: str | os.PathLike[str] | None = None,
        source: str = "given",
    ) -> None:
        self.config = config
        self.tokenizer = CharTokenizer.of(text) if tokenizer is None else tokenizer
        self.text = {"source": source, "sha256": fingerprint(text), "characters": len(text)}
        self.train_ids, self.validation_ids = (self.tokenizer.encode(part) for part in split_text(text))
        self.batches = self._windows("training", self.train_ids, DATA)
        self._windows("validation", self.validation_ids, EVALUATION)  # is it long enough?
        self.model = GPT(config.model(self.tokenizer.vocab_size), seed=config.seed)
        self.optimizer = AdamW(
            decay_groups(self.model, config.weight_decay), lr=config.lr(0), betas=config.betas, weight_decay=0.0
        )
        self.step = 0
        self.interrupted = False
        self.folder = None if folder is None else Path(folder)
        self.log = CsvLog(self.folder and self.folder / "log.csv", LOG)
        self.samples = CsvLog(self.folder and self.folder / "samples.csv", SAMPLES)

    def _windows(self, part: str, ids: np.ndarray, purpose: int) -> Batches:
        try:
            return Batches(ids, self.config.block_size, self.config.batch_size, [self.config.seed, purpose])
        except ValueError as error:
            raise ValueError(f"the {part} part of the text cannot be used: {error}") from error

    def update(self) -> dict[str, float]:
        """Move the weights once. Returns the learning rate, the loss before, and the length of the gradient.

        Raises:
            DivergedError: loss or gradient are inf or nan; the weights have not been touched.
        """
        lr = self.optimizer.lr = self.config.lr(self.step)
        loss = accumulate(self.model, [next(self.batches) for _ in range(self.config.accumulate)])
        norm = clip_grad_norm(self.optimizer.parameters, self.config.clip or math.inf)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(f"the loss is {loss} and the gradient norm {norm}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return {"learning_rate": lr, "loss": loss, "grad_norm": norm}

    @no_grad
    def evaluate(self) -> float:
        """The mean validation loss, without dropout, over batches that are the same every time."""
        batches = self._windows("validation", self.validation_ids, EVALUATION)
        self.model.eval()
        try:
            losses = [self.model.loss(*next(batches)).item() for _ in range(self.config.eval_batches)]
        finally:
            self.model.train()
        return sum(losses) / len(losses)

    def sample(self) -> str:
        """What the model writes now, after the first token of the text. The draws depend on seed and step alone."""
        seed = np.random.SeedSequence([self.config.seed, SAMPLING, self.step]).generate_state(1)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ContextFullWarning)  # a sample may well be longer than a block
            ids = generate(self.model, self.train_ids[:1], self.config.sample_tokens, seed=int(seed), on_full="slide")
        return self.tokenizer.decode(ids[0])

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> Path:
        """Write a checkpoint, and remove the one before when it is whole. Returns its folder.

        Raises:
            DivergedError: a weight is inf or nan. The checkpoint before stays.
            OSError: it could not be written. The checkpoint before stays.
        """
        if self.folder is None:
            raise ValueError("this run has no folder to save into")
        if not all(np.isfinite(p.data).all() for p in self.optimizer.parameters):
            raise self._diverged("a weight is inf or nan")
        self.log.sync()
        self.samples.sync()
        return write_checkpoint(self.folder, self.step, self._write)

    def _write(self, folder: Path) -> None:
        saved = self.optimizer.state_dict()
        arrays: dict[str, np.ndarray] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for name, state in zip(self._parameter_names(), saved["state"], strict=True):
            numbers[name] = {key: value for key, value in state.items() if not isinstance(value, np.ndarray)}
            arrays |= {f"{name}.{key}": value for key, value in state.items() if key not in numbers[name]}
        self.model.save(folder / "model.safetensors")
        save_arrays(folder / "optimizer.safetensors", arrays)
        self.tokenizer.save(folder)
        state = {
            "step": self.step,
            "config": dataclasses.asdict(self.config),
            "text": self.text,
            "data": self.batches.state_dict(),
            "generators": {name: rng.bit_generator.state for name, rng in self.model.generators().items()},
            "optimizer": {"groups": saved["groups"], "state": numbers},
        }
        write_json(folder / "state.json", state)

    def load(self, checkpoint: Path) -> None:
        """Take over everything from a checkpoint of a run with this configuration and text.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        state = read_json(checkpoint / "state.json")
        self.model.load(checkpoint / "model.safetensors")
        arrays = load_arrays(checkpoint / "optimizer.safetensors")
        try:
            numbers = state["optimizer"]["state"]
            states = [numbers[name] | arrays_of(name, arrays) for name in self._parameter_names()]
            self.optimizer.load_state_dict({"groups": state["optimizer"]["groups"], "state": states})
            self.batches.load_state_dict(state["data"])
            for name, generator in self.model.generators().items():
                generator.bit_generator.state = state["generators"][name]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint} does not belong to this run: {error!r}") from error
        self.step = state["step"]
        self.log.rewind(self.step)
        self.samples.rewind(self.step)

    def _parameter_names(self) -> list[str]:
        names = {id(p): name for name, p in self.model.named_parameters()}
        return [names[id(p)] for p in self.optimizer.parameters]

    def _diverged(self, what: str) -> DivergedError:
        kept = find_latest(self.folder) if self.folder else None
        where = f"; the last good checkpoint is {kept}" if kept else ""
        return DivergedError(f"training diverged at step {self.step}: {what}. Try a lower learning rate{where}")


def accumulate(model: Any, batches: list[tuple[np.ndarray, np.ndarray]], ignore_index: int = -100) -> float:
    """Leave in `.grad` the gradient of the mean loss over all targets of all batches, and return that mean.

    Each batch is weighted by the targets that it counts, so six batches of ten give what one of sixty gives, and a
    short sample does not weigh more than a long one.
    """
    counts = [int(np.count_nonzero(targets != ignore_index)) for _, targets in batches]
    total, value = max(sum(counts), 1), 0.0
    for (idx, targets), count in zip(batches, counts, strict=True):
        loss = model.loss(idx, targets) * (count / total)
        loss.backward(leaves_only=True)
        value += loss.item()
    return value


# --------------------------------------------------------------------------------------------------------------------
# The loop


def train(
    config: TrainConfig | str | None = None,
    text: str | Path | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    tokenizer: Tokenizer | None = None,
    show: str | Callable[[dict[str, Any]], None] = "bar",
    **changes: Any,
) -> Run:
    """Train a GPT on a text.

    Ctrl-C lets the step in progress finish, saves and returns (a second one stops at once).

    Args:
        config: a TrainConfig or the name of a preset ("tiny", "cpu"; "cpu" unless given); `changes` change single
            fields of it.
        text: the text itself (str), or a file (Path), or None for the built-in corpus.
        folder: where checkpoints, log and samples go; without one nothing is kept.
        resume: go on from the latest checkpoint in the folder, or begin if there is none. The configuration is the
            stored one; `changes` may only alter what CHANGEABLE lists.
        tokenizer: the characters of the text unless given.
        show: "bar" (a progress bar), "json" (one JSON object per event on the standard output), "quiet", or a
            function that is handed every event.

    Returns:
        The run: `.model`, `.tokenizer`, `.log.rows`, `.interrupted` and so on.

    Raises:
        ValueError: a configuration, text or folder that cannot be used.
        CheckpointError: a checkpoint that is damaged or of another configuration.
        DivergedError: the loss, gradient or weights became inf or nan.
        OSError: the folder cannot be written.

    Example:
        >>> run = train("tiny", text="hello world. " * 99, steps=3, eval_batches=1, sample_interval=0, show="quiet")
        >>> [row["step"] for row in run.log.rows]
        [0, 1, 2, 3]
    """
    kept = find_latest(folder) if folder is not None else None
    if kept is not None and not resume:
        raise ValueError(f"{folder} holds a run already, at {kept.name}: resume it, or choose another folder")
    if kept is not None:
        run = reopen(kept, config, text, tokenizer, changes)
    else:
        if not isinstance(config, TrainConfig):
            config = preset("cpu" if config is None else config)
        check_keys(changes)
        config = dataclasses.replace(config, **changes)
        text, source = open_text(text)
        run = Run(config, text, tokenizer, folder, source)
    with reporter(show, run) as report, Interruption() as interruption:
        go_on(run, report, interruption)
        report({"event": "end", "step": run.step, "interrupted": run.interrupted})
    if run.folder is not None and can_draw():
        draw_losses(run.log.rows, run.folder / "loss.png")
    return run


def go_on(run: Run, report: Callable[[dict[str, Any]], None], interruption: Interruption) -> None:
    """The loop itself: look, move, write it down, save."""
    config = run.config
    if run.step == 0 and run.folder is not None:
        begin_folder(run)
    while True:
        last = run.step >= config.steps
        row: dict[str, Any] = {"step": run.step}
        if last or run.step % config.eval_interval == 0:
            row["validation_loss"] = run.evaluate()
        if config.sample_interval and (last or run.step % config.sample_interval == 0):
            sample = {"step": run.step, "text": run.sample()}
            run.samples.add(sample)
            report({"event": "sample", **sample})
        if not last:
            began = time.perf_counter()
            with np.errstate(over="ignore", invalid="ignore"):  # update looks for itself, and names the step
                row |= run.update()
            tokens = config.batch_size * config.accumulate * config.block_size
            speed = {"tokens_per_second": tokens / (time.perf_counter() - began)}
        run.log.add(row)
        report({"event": "step", **row, **({} if last else speed)})
        if last:
            return
        due = run.step % config.checkpoint_interval == 0 or run.step == config.steps
        if run.folder is not None and (due or interruption.requested):
            report({"event": "checkpoint", "step": run.step, "path": str(run.save())})
        if interruption.requested:
            run.interrupted = True
            return


def begin_folder(run: Run) -> None:
    """A new run's folder, with an empty log and the checkpoint of step 0: whatever cannot be written shows now."""
    assert run.folder is not None
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        run.log.rewind(0)
        run.samples.rewind(0)
        run.save()
    except OSError as error:
        raise type(error)(
            error.errno, f"cannot keep the run in this folder ({error.strerror})", str(run.folder)
        ) from error


def reopen(
    checkpoint: Path,
    config: TrainConfig | str | None,
    text: str | Path | None,
    tokenizer: Tokenizer | None,
    changes: dict[str, Any],
) -> Run:
    """A run as it was at a checkpoint."""
    state = read_json(checkpoint / "state.json")
    check_keys(changes)
    try:
        stored = TrainConfig.of(state["config"])
        source, sha256 = state["text"]["source"], state["text"]["sha256"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / 'state.json'} is no state of a run: {error!r}") from error
    config = asked_config(stored, config, changes)
    differing = [
        f"{name} is {value!r}, not {getattr(config, name)!r}"
        for name, value in dataclasses.asdict(stored).items()
        if name not in CHANGEABLE and getattr(config, name) != value
    ]
    if differing:
        raise CheckpointError(
            f"{checkpoint} is of another configuration: {'; '.join(differing)}. Leave these out to go on with it, or "
            f"choose another folder; only {', '.join(CHANGEABLE)} may change"
        )
    if config.steps < state["step"]:
        raise ValueError(f"{checkpoint} has {state['step']} steps behind it, more than the {config.steps} asked for")
    text, source = open_text(text) if text is not None else open_source(source, checkpoint)
    if fingerprint(text) != sha256:
        raise CheckpointError(
            f"{checkpoint} was trained on another text: {state['text']['characters']} characters, SHA-256 {sha256}; "
            f"now {len(text)}, {fingerprint(text)}"
        )
    run = Run(config, text, tokenizer or load_tokenizer(checkpoint), checkpoint.parent, source)
    run.load(checkpoint)
    remove_others(checkpoint.parent, checkpoint)
    return run


def asked_config(stored: TrainConfig, config: TrainConfig | str | None, changes: dict[str, Any]) -> TrainConfig:
    """What a resumed run was asked to be. Of a preset only the name was said, so its CHANGEABLE fields do not count."""
    if isinstance(config, str):
        chosen = dataclasses.asdict(preset(config))
        changes = {name: value for name, value in chosen.items() if name not in CHANGEABLE} | changes
    return dataclasses.replace(config if isinstance(config, TrainConfig) else stored, **changes)


def load_trained(folder: str | os.PathLike[str]) -> tuple[GPT, Tokenizer]:
    """The model, in eval mode, and the tokenizer of a run's latest checkpoint.

    Args:
        folder: that of a run, or of one checkpoint.

    Raises:
        CheckpointError: nothing is there, or it is damaged.
    """
    checkpoint = find_latest(folder) or Path(folder)
    if not (checkpoint / "state.json").exists():
        raise CheckpointError(f"{folder} is no checkpoint of a run: it contains no state.json")
    state = read_json(checkpoint / "state.json")
    tokenizer = load_tokenizer(checkpoint)
    try:
        config = TrainConfig.of(state["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / 'state.json'} is no state of a run: {error!r}") from error
    model = GPT(config.model(tokenizer.vocab_size))
    model.load(checkpoint / "model.safetensors")
    return model.eval(), tokenizer


class Interruption:
    """Ctrl-C becomes a request that the loop looks at between two steps; a second one acts as usual."""

    def __enter__(self) -> Interruption:
        self.requested = False
        self.before: Any = None
        if threading.current_thread() is threading.main_thread():
            self.before = signal.getsignal(signal.SIGINT)
        if self.before is signal.SIG_IGN:
            self.before = None  # a job in the background: Ctrl-C is not meant for it
        if self.before is not None:
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self.before)

    def __exit__(self, *exception: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)


# --------------------------------------------------------------------------------------------------------------------
# Texts


BUILTIN = "built-in"


def open_text(text: str | Path | None) -> tuple[str, str]:
    """A text, and where it came from."""
    if text is None:
        return builtin_corpus(), BUILTIN
    if isinstance(text, Path):
        return read_text(text), str(text.resolve())
    return text, "given"


def open_source(source: str, checkpoint: Path) -> tuple[str, str]:
    """The text that a run was started with, from where it came."""
    if source == "given":
        raise ValueError(f"{checkpoint} was trained on a text that was handed over: hand it over again")
    return open_text(None if source == BUILTIN else Path(source))


def arrays_of(name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of one parameter, `name.m` and so on, by their last names."""
    return {key.rpartition(".")[2]: array for key, array in arrays.items() if key.rpartition(".")[0] == name}


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# --------------------------------------------------------------------------------------------------------------------
# What is shown


@contextmanager
def reporter(show: str | Callable[[dict[str, Any]], None], run: Run) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Whoever is told of each event: {"event": "step" | "sample" | "checkpoint" | "end", "step": n, ...}."""
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
    """Events on a progress bar: loss, validation loss, tokens per second; tqdm adds the time left."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar
        self.shown: dict[str, str] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "sample":
            self.bar.write(f"--- step {event['step']} ---\n{event['text']}", file=sys.stderr)
        for name, text in BAR.items():
            if name in event:
                self.shown[name] = text.format(event[name])
        self.bar.set_postfix_str(", ".join(self.shown.values()), refresh=False)
        self.bar.update(1 if "loss" in event else 0)


BAR = {"loss": "loss {:.4f}", "validation_loss": "validation {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}


def can_draw() -> bool:
    """Whether matplotlib, which draws the loss curve, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_losses(rows: list[dict[str, Any]], path: Path) -> None:
    """Training and validation loss against the step, as a picture (PNG). Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for name, style in (("loss", {"linewidth": 0.6, "alpha": 0.6}), ("validation_loss", {"marker": "o"})):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*np.transpose(points) if points else ((), ()), label=name.replace("_", " "), **style)
    axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
