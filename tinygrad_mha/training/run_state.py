"""A run: a model in training, and the operations that the training loop consists of."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_mha.data import Batches, CharTokenizer, Tokenizer, split_text
from tinygrad_mha.decoding import ContextFullWarning, generate
from tinygrad_mha.files.run_folder import CsvLog, find_latest
from tinygrad_mha.modes import no_grad
from tinygrad_mha.nn import GPT
from tinygrad_mha.optim import AdamW, clip_grad_norm, decay_groups
from tinygrad_mha.training.config import TrainConfig
from tinygrad_mha.training.source import GIVEN, Source

__all__ = ["DivergedError", "Run", "accumulate"]

# The seed of a random generator combines the seed of the run and its purpose. The model has its own for weights and
# dropout.
DATA, EVALUATION, SAMPLING = 1, 2, 3

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
        folder: where checkpoints and logs are written; None writes nothing.

    Attributes:
        model, optimizer, tokenizer, config: what is trained, and how.
        step: the number of updates so far.
        log: one row per step; `log.rows` is a list of dicts.
        samples: the samples with their steps, as `log`.
        interrupted: whether `train` was interrupted before the last step.

    Raises:
        ValueError: the training or validation part of the text is shorter than a block.
    """

    def __init__(
        self,
        config: TrainConfig,
        text: str | Source,
        tokenizer: Tokenizer | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.config = config
        self.source = text if isinstance(text, Source) else Source(text, GIVEN)
        self.tokenizer = CharTokenizer.of(self.source.text) if tokenizer is None else tokenizer
        self.train_ids, self.validation_ids = (self.tokenizer.encode(part) for part in split_text(self.source.text))
        self.batches = self._make_batches("training", self.train_ids, DATA)
        self._make_batches("validation", self.validation_ids, EVALUATION)  # raises if it is too short
        self.model = GPT(config.make_model_config(self.tokenizer.vocab_size), seed=config.seed)
        self.optimizer = AdamW(
            decay_groups(self.model, config.weight_decay), lr=config.lr(0), betas=config.betas, weight_decay=0.0
        )
        self.step = 0
        self.interrupted = False
        self.folder = None if folder is None else Path(folder)
        self.log = CsvLog(self.folder and self.folder / "log.csv", LOG)
        self.samples = CsvLog(self.folder and self.folder / "samples.csv", SAMPLES)

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
        loss = accumulate(self.model, [next(self.batches) for _ in range(self.config.accumulate)])
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
        with self.model.evaluating():
            losses = [self.model.loss(*next(batches)).item() for _ in range(self.config.eval_batches)]
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


def accumulate(model: Any, batches: list[tuple[np.ndarray, np.ndarray]], ignore_index: int = -100) -> float:
    """Compute the mean loss over all targets of all batches, accumulate its gradient in `.grad`, and return it.

    Each batch is weighted by its number of counted targets, so six batches of ten give the result of one of sixty.
    """
    counts = [int(np.count_nonzero(targets != ignore_index)) for _, targets in batches]
    total, value = max(sum(counts), 1), 0.0
    for (idx, targets), count in zip(batches, counts, strict=True):
        loss = model.loss(idx, targets) * (count / total)
        loss.backward(leaves_only=True)
        value += loss.item()
    return value
