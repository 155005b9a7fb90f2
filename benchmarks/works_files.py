"""What both sides of `performance.py` read: the same files, the same random tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

__all__ = ["load_arrays", "make_attention_arrays", "make_tokens", "read"]


def make_tokens(vocab_size: int, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, vocab_size, (batch, length))


def read(folder: str, name: str) -> Any:
    return json.loads(Path(folder, name).read_text())


def load_arrays(folder: str) -> dict[str, np.ndarray]:
    return load_file(Path(folder, "model.safetensors"))


def make_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {f"{m}{h}": (5, n) for h in (1, 2) for m, n in (("Q", 7), ("K", 7), ("V", 11))} | {"O": (22, 5)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def merge_heads(w: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The matrices of all heads side by side, Q (5, 14), K (5, 14), V (5, 22), and O."""
    return {m: np.concatenate([w[m + "1"], w[m + "2"]], axis=1) for m in "QKV"} | {"O": w["O"]}


def make_attention_arrays() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """The weights, x, the gradient of y, and the causal mask."""
    rng = np.random.default_rng(0)
    w, x, g = make_weights(rng), rng.standard_normal((3, 5)).astype("f"), rng.standard_normal((3, 5)).astype("f")
    return w, x, g, np.tri(3, dtype=bool)
