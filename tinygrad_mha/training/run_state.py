"""A run: a model in training, and the operations that the training loop consists of."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_mha.arguments import is_integer
from tinygrad_mha.data import Batches, CharTokenizer, Tokenizer, split_text
from tinygrad_mha.decoding import ContextFullWarning, generate
from tinygrad_mha.files.run_folder import CsvLog, find_latest
from tinygrad_mha.modes import no_grad
from tinygrad_mha.nn import GPT, GPTConfig, Module
from tinygrad_mha.optim import AdamW, clip_grad_norm, decay_groups
from tinygrad_mha.tables import make_table
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.training.config import MODEL_NAMES, TrainConfig, list_differences
from tinygrad_mha.training.parallel import Workers
from tinygrad_mha.training.source import GIVEN, Source

__all__ = ["DivergedError", "Run"]

# The seed of a random generator combines the seed of the run and its purpose. The model has its own for weights and
# dropout.
DATA, EVALUATION, SAMPLING = 1, 2, 3

NEEDED = (
    "a model to train is a Module with config.vocab_size, config.block_size and loss(idx, targets), a Tensor with one "
    "element; to write samples it is also a LanguageModel of tinygrad_mha.decoding, or set sample_interval=0"
)

MOST_ROWS = 20  # of the table in a notebook
LOG = {"step": int, "learning_rate": float, "loss": float, "grad_norm": float, "validation_loss": float}
SAMPLES = {"step": int, "text": str}


class DivergedError(RuntimeError):
    """The loss, the gradient or a weight became inf or nan; the message gives the step."""


class Run:
    """A model in training: all of its state at one step.

    Args:
        config: the configuration.
        text: the text; the last tenth is for validation.
        tokenizer: the characters of the text unless given.
        folder: where checkpoints and logs are written, by rank 0; None writes nothing.
        model: the model to train, in place; see `train`. Unless given, a GPT is made from `config` and its seed.
        workers: the number of threads that share a batch; see `train`.

    Attributes:
        model, optimizer, tokenizer, config: what is trained, and how.
        step: the number of updates so far.
        log: one row per step; `log.rows` is a list of dicts.
        samples: the samples with their steps, as `log`.
        interrupted: whether `train` was interrupted before the last step.
        workers: the `Workers` that compute gradients.
        note: what a resumed run does differently from before, or "".

    Raises:
        ValueError: the training or validation part of the text is shorter than a block, or the model contradicts the
            configuration or the tokenizer.
        TypeError: the model lacks what training or sampling needs.
    """

    def __init__(
        self,
        config: TrainConfig,
        text: str | Source,
        tokenizer: Tokenizer | None = None,
        folder: str | os.PathLike[str] | None = None,
        model: Any = None,
        workers: int | None = None,
    ) -> None:
        self.config = config if model is None else adapt_config(config, model)
        self.source = text if isinstance(text, Source) else Source(text, GIVEN)
        self.tokenizer = CharTokenizer.of(self.source.text) if tokenizer is None else tokenizer
        vocab_size = self.tokenizer.vocab_size
        if model is not None and vocab_size != model.config.vocab_size:
            raise ValueError(
                f"the vocabulary has {vocab_size} tokens, that of the model {model.config.vocab_size}: pass the "
                "tokenizer of the model as tokenizer="
            )
        self.train_ids, self.validation_ids = (self.tokenizer.encode(part) for part in split_text(self.source.text))
        self.batches = self._make_batches("training", self.train_ids, DATA)
        self._make_batches("validation", self.validation_ids, EVALUATION)  # raises if it is too short
        self.model: GPT = GPT(config.make_model_config(vocab_size), config.seed) if model is None else model
        self.optimizer = AdamW(
            decay_groups(self.model, config.weight_decay), lr=config.lr(0), betas=config.betas, weight_decay=0.0
        )
        if model is not None:
            self._check_model()
        self.model.train().zero_grad()
        self.workers = Workers(self.model, self.config, self.train_ids, workers)
        self.step = 0
        self.interrupted = False
        self.note = ""
        self.folder = None if folder is None or self.workers.comm.rank > 0 else Path(folder)
        self.log = CsvLog(self.folder and self.folder / "log.csv", LOG)
        self.samples = CsvLog(self.folder and self.folder / "samples.csv", SAMPLES)

    def __repr__(self) -> str:
        return f"Run at step {self.step} of {self.config.steps}, in {self.folder}"

    def _repr_html_(self) -> str:
        names = ["step", "loss", "validation_loss"]
        rows = [
            [f"{row[name]:.4g}" if name in row else "" for name in names]
            for row in self.log.rows
            if "validation_loss" in row
        ]
        return make_table(repr(self), rows[-MOST_ROWS:], names)

    def _check_model(self) -> None:
        """Try what training and sampling call."""
        idx = self.train_ids[None, : self.config.block_size + 1]
        try:
            with self.model.evaluating(), no_grad():
                loss = self.model.loss(idx[:, :-1], idx[:, 1:])
                if self.config.sample_interval:
                    generate(self.model, idx[0, :1], 1)
        except (TypeError, AttributeError) as error:
            raise TypeError(f"{NEEDED}; {type(self.model).__name__} raised: {error}") from error
        if not isinstance(loss, Tensor) or loss.size != 1:
            raise TypeError(f"{NEEDED}; {type(self.model).__name__}.loss returned {loss!r}")

    def _make_batches(self, part: str, ids: np.ndarray, purpose: int) -> Batches:
        try:
            return Batches(ids, self.config.block_size, self.config.batch_size, [self.config.seed, purpose])
        except ValueError as error:
            raise ValueError(f"the {part} part of the text cannot be used: {error}") from error

    def update(self) -> dict[str, float]:
        """Update the weights once. Returns the learning rate, the loss before the update, and the gradient norm.

        Raises:
            DivergedError: loss or gradient are inf or nan; the weights are unchanged.
        """
        lr = self.optimizer.lr = self.config.lr(self.step)
        loss = self.workers.accumulate([next(self.batches) for _ in range(self.config.accumulate)])
        norm = clip_grad_norm(self.optimizer.parameters, self.config.clip or math.inf)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self.diverged(f"the loss is {loss} and the gradient norm {norm}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return {"learning_rate": lr, "loss": loss, "grad_norm": norm}

    @no_grad
    def evaluate(self) -> float:
        """The mean validation loss in eval mode, over the same batches every time."""
        batches = self._make_batches("validation", self.validation_ids, EVALUATION)
        drawn = itertools.islice(batches, self.config.eval_batches)
        with self.model.evaluating():
            losses = self.workers.map(lambda batch: self.model.loss(*batch).item(), drawn)
        return sum(losses) / len(losses)

    def sample(self) -> str:
        """A text that starts with the first token of the training text. Its draws depend only on seed and step."""
        seed = np.random.SeedSequence([self.config.seed, SAMPLING, self.step]).generate_state(1)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ContextFullWarning)  # a sample may be longer than a block
            ids = generate(self.model, self.train_ids[:1], self.config.sample_tokens, seed=int(seed), on_full="slide")
        return self.tokenizer.decode(ids[0])

    def diverged(self, reason: str) -> DivergedError:
        """An error that gives the step, the reason, and the latest checkpoint."""
        latest = find_latest(self.folder) if self.folder else None
        where = f"; the last good checkpoint is {latest}" if latest else ""
        return DivergedError(f"training diverged at step {self.step}: {reason}. Try a lower learning rate{where}")


def adapt_config(config: TrainConfig, model: Any) -> TrainConfig:
    """The configuration with the options of a given model.

    Raises:
        ValueError: options that were given and that the model contradicts, or a block_size above that of the model.
        TypeError: not a module, or one without what training needs.
    """
    theirs = getattr(model, "config", None)
    sizes = [getattr(theirs, name, None) for name in ("vocab_size", "block_size")]
    if not (isinstance(model, Module) and hasattr(model, "loss") and all(map(is_integer, sizes))):
        raise TypeError(f"{NEEDED}; got {type(model).__name__} with vocab_size and block_size {sizes}")
    names = MODEL_NAMES if isinstance(theirs, GPTConfig) else ("block_size",)
    options = {name: getattr(theirs, name) for name in names}
    adapted = config.adapt(options)
    if adapted.block_size < options["block_size"]:
        del options["block_size"]
    wrong = list_differences(options, adapted.model_options)
    if wrong:
        raise ValueError(f"the configuration contradicts the model, in which {wrong}. Leave these options out")
    return adapted
