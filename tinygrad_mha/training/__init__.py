"""Training a GPT on a text, with logs, checkpoints and exact resume."""

from tinygrad_mha.training.loop import (
    PRESETS,
    DivergedError,
    Run,
    TrainConfig,
    accumulate,
    load_trained,
    preset,
    train,
)

__all__ = ["PRESETS", "DivergedError", "Run", "TrainConfig", "accumulate", "load_trained", "preset", "train"]
