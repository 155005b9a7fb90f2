"""A run of a GPT in which the result of every part is kept, with its gradient."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tinygrad_mha import ops, transforms
from tinygrad_mha.nn import GPT
from tinygrad_mha.nn.contract import call_attention
from tinygrad_mha.nn.module import Module, walk
from tinygrad_mha.tensors import Tensor

__all__ = ["ModelRun", "Recorder", "Result", "copy_for_run", "run_model"]

AnyModule = TypeVar("AnyModule", bound=Module)


class Result(NamedTuple):
    """A value of the run and the gradient of the loss with respect to it, both (T, width)."""

    values: np.ndarray
    gradient: np.ndarray | None


class Recorder(Module):
    """Calls a module in its place, and keeps the last input and output."""

    def __init__(self, module: Any, calls_by_contract: bool = False) -> None:
        self.module = module
        self.calls_by_contract = calls_by_contract

    def forward(self, *inputs: Any, **options: Any) -> Any:
        y = (
            call_attention(self.module, *inputs, **options)
            if self.calls_by_contract
            else self.module(*inputs, **options)
        )
        self.x, self.y = inputs[0], y
        return y


class ModelRun(NamedTuple):
    """A GPT that has run on `idx` (T,), as a copy in eval mode.

    Attributes:
        parts: the recorders of wte, wpe, h.0.ln_1, h.0.attn, h.0.ln_2, h.0.mlp, h.0.mlp.c_proj, ..., ln_f and lm_head,
            by these names; wpe and ln_f only if the model has them.
        logits: (T, V).
        loss: the cross entropy of predicting each next token, the mean over T - 1 tokens; None if T is 1.
    """

    idx: np.ndarray
    model: GPT
    parts: dict[str, Recorder]
    logits: Tensor
    loss: Tensor | None

    def get_gradients(self, tensors: list[Tensor]) -> list[np.ndarray | None]:
        """The gradient of the loss with respect to each tensor; None if there is no loss."""
        if self.loss is None:
            return [None] * len(tensors)
        return [gradient.numpy() for gradient in transforms.grad(self.loss, tensors)]


def copy_for_run(module: AnyModule) -> AnyModule:
    """A copy in eval mode in which every parameter receives a gradient, frozen ones too."""
    twin = copy.deepcopy(module).eval()
    for _, found in walk(twin):
        if isinstance(found, Tensor) and found.dtype.kind == "f":
            found.requires_grad = True
    return twin


def run_model(model: GPT, idx: np.ndarray) -> ModelRun:
    """Run a copy of the model on token ids (T,)."""
    twin = copy_for_run(model)
    parts: dict[str, Recorder] = {}

    def record(owner: Any, name: str, path: str, is_attention: bool = False) -> None:
        parts[path] = Recorder(getattr(owner, name), is_attention)
        setattr(owner, name, parts[path])

    for name in ("wte", "wpe", "ln_f", "lm_head"):
        if getattr(twin, name, None) is not None:
            record(twin, name, name)
    for i, block in enumerate(twin.h):
        for name in ("ln_1", "attn", "ln_2", "mlp"):
            record(block, name, f"h.{i}.{name}", name == "attn")
        record(parts[f"h.{i}.mlp"].module, "c_proj", f"h.{i}.mlp.c_proj")
    logits = twin(idx)
    loss = ops.cross_entropy(logits[:-1], idx[1:]) if len(idx) > 1 else None
    return ModelRun(idx, twin, parts, logits, loss)
