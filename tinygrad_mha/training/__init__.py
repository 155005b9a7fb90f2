"""Training a GPT on a text, with logs, checkpoints and exact resume."""

from tinygrad_mha.training.config import PRESETS, TrainConfig, preset
from tinygrad_mha.training.loop import train
from tinygrad_mha.training.parallel import accumulate
from tinygrad_mha.training.resume import load_trained, save_checkpoint
from tinygrad_mha.training.run_state import DivergedError, Run

__all__ = ["PRESETS", "DivergedError", "Run", "TrainConfig", "accumulate", "load_trained", "preset", "save_checkpoint"]
__all__ += ["train"]


def __dir__() -> list[str]:
    return sorted(__all__)
