"""The configuration of a training run, and presets."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tinygrad_mha.arguments import check_count, check_number
from tinygrad_mha.nn import GPTConfig
from tinygrad_mha.optim import warmup_cosine

__all__ = ["PRESETS", "TrainConfig", "check_names", "list_differences", "list_option_names", "preset"]

# The model that is trained if nothing else is given; other options have the defaults of GPTConfig.
MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "bias": False, "activation": "gelu"}
MODEL_NAMES = tuple(option.name for option in fields(GPTConfig) if option.name != "vocab_size")

LEAST = dict.fromkeys(("batch_size", "accumulate", "eval_interval", "eval_batches", "checkpoint_interval"), 1)
LEAST |= dict.fromkeys(("steps", "warmup", "decay_steps", "sample_interval", "sample_tokens", "seed"), 0)
NUMBERS = ("learning_rate", "min_lr", "weight_decay", "clip")


@dataclass(frozen=True, init=False, repr=False)
class TrainConfig:
    """All options of a training run except its text. The defaults are nanoGPT's configuration for a CPU.

    The options of the model are those of `GPTConfig` except vocab_size, which the tokenizer determines. They are given
    and read by the same flat names as the others: `TrainConfig(n_layer=2, steps=100).n_layer`.

    Args:
        model_options: a dict of options of the model; those given by name take precedence.
        given: the names in `model_options` that count as given by the caller, all unless stated: a model that is given
            to `train` must agree with them, and determines the other options of the model.
        block_size: the number of tokens in a window of text: the context of a model that the run makes, and at most the
            context of a model that is given.
        batch_size, accumulate: windows of text per pass, and passes per step.
        steps: the number of updates.
        learning_rate, min_lr, warmup: see `warmup_cosine`.
        decay_steps: the step at which the learning rate has fallen to `min_lr` (0: the last step).
        betas, weight_decay: of AdamW. Matrices and embeddings decay, biases and norms do not.
        clip: the largest gradient norm (0: no clipping).
        eval_interval, eval_batches: how often the validation loss is computed, and over how many batches.
        sample_interval, sample_tokens: how often the model writes a sample (0: never), and its length.
        checkpoint_interval: how often a checkpoint is written.
        seed: of weights, data, dropout, evaluation and samples, each with a generator of its own.

    Raises:
        ValueError: an unknown name (the nearest known one is suggested), or an invalid value.

    Example:
        >>> config = TrainConfig(n_layer=2, steps=100)
        >>> config.n_layer, config.n_embd
        (2, 128)
        >>> TrainConfig(**config.to_dict()) == config
        True
    """

    model_options: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 12
    accumulate: int = 1
    steps: int = 2000
    learning_rate: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 100
    decay_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_interval: int = 250
    eval_batches: int = 20
    sample_interval: int = 500
    sample_tokens: int = 200
    checkpoint_interval: int = 250
    seed: int = 0
    given: frozenset[str] = field(default=frozenset(), compare=False)

    def __init__(
        self, *, model_options: dict[str, Any] | None = None, given: Iterable[str] | None = None, **options: Any
    ) -> None:
        model_options = model_options or {}
        check_names([*model_options, *options])
        named = {name: options.pop(name) for name in MODEL_NAMES if name in options}
        model = GPTConfig(vocab_size=1, **{**MODEL, **model_options, **named})
        values: dict[str, Any] = {option.name: option.default for option in fields(self)} | options
        values["model_options"] = {name: getattr(model, name) for name in MODEL_NAMES}
        values["given"] = frozenset([*named, *(model_options if given is None else given)])
        for name, least in LEAST.items():
            values[name] = check_count(values[name], name, least)
        for name in NUMBERS:
            values[name] = check_number(values[name], name)
        if values["min_lr"] > values["learning_rate"]:
            raise ValueError(f"min_lr is {values['min_lr']}, more than learning_rate, {values['learning_rate']}")
        values["betas"] = tuple(map(float, values["betas"]))
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in MODEL_NAMES:
            return self.model_options[name]
        raise AttributeError(f"a TrainConfig has no {name!r}")

    def __repr__(self) -> str:
        return f"TrainConfig({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def to_dict(self) -> dict[str, Any]:
        """All options by their flat names, as JSON can hold them; `TrainConfig(**config.to_dict())` is equal."""
        values = self.make_model_config(vocab_size=1).to_dict()
        return {name: values[name] if name in values else getattr(self, name) for name in list_option_names()}

    def make_model_config(self, vocab_size: int) -> GPTConfig:
        """The configuration of the model for a tokenizer of `vocab_size` tokens."""
        return GPTConfig(vocab_size=vocab_size, **self.model_options)

    def adapt(self, options: Mapping[str, Any]) -> TrainConfig:
        """This configuration with these options of a model, except where others were given."""
        return replace(self, **{name: value for name, value in options.items() if name not in self.given})

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        last = max(self.decay_steps or self.steps, self.warmup)
        return warmup_cosine(step, self.learning_rate, self.min_lr, self.warmup, last)


def list_option_names() -> list[str]:
    """The flat names of all options of a `TrainConfig`."""
    others = [option.name for option in fields(TrainConfig)]
    return [*MODEL_NAMES, *others[1:-1]]  # without model_options and given


def list_differences(stored: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The entries of `stored` that `found` lacks or contradicts, in words; "" if there are none."""
    pairs = [(name, value, found.get(name)) for name, value in stored.items()]
    return "; ".join(f"{name} is {value!r}, not {other!r}" for name, value, other in pairs if value != other)


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for a name that is no option, and suggest the nearest one."""
    known = list_option_names()
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise ValueError(f"a training configuration has no option {name!r}; {hint}it has {', '.join(known)}")


PRESETS = {
    "tiny": TrainConfig(
        model_options={"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 32},
        given=(),
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
    "finetune": TrainConfig(steps=200, learning_rate=1e-4, min_lr=1e-5, warmup=10, eval_interval=50),
}


def preset(name: str, **changes: Any) -> TrainConfig:
    """The configuration PRESETS[name], with changes.

    "tiny" and "cpu" are for new models, the second is nanoGPT's configuration for a CPU; "finetune", with a low
    learning rate, is for trained ones. A model that is given to `train` must agree with `changes`, not with the preset.

    Raises:
        ValueError: an unknown preset or option, or an invalid value.

    Example:
        >>> preset("cpu", dropout=0.1).dropout
        0.1
    """
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}, expected one of {', '.join(PRESETS)}")
    return replace(PRESETS[name], **changes)
