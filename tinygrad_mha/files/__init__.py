"""Files: atomic writing, JSON, safetensors, Hugging Face folders, and the folder of a training run."""

from tinygrad_mha.files.atomic import replacing
from tinygrad_mha.files.json_files import read_json, write_json
from tinygrad_mha.files.reading import CheckpointError
from tinygrad_mha.files.safetensors import load_arrays, save_arrays

__all__ = ["CheckpointError", "load_arrays", "read_json", "replacing", "save_arrays", "write_json"]


def __dir__() -> list[str]:
    return sorted(__all__)
