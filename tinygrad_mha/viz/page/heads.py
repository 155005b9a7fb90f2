"""An attention that computes all heads at once, computed again one head at a time, so that a page can show it.

A recorded run of its `forward` says what it computes; `edit` says which values are the steps q, k, v, weights, heads.
Each recorded operation is applied again: to the part of each head where that gives the same numbers, else to all heads.

Axes: B batch, H heads, T tokens, C width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_mha import engine, modes, ops
from tinygrad_mha.nn.contract import GUIDE, call_attention, find_options
from tinygrad_mha.nn.heads import NAMES
from tinygrad_mha.nn.module import Module, walk
from tinygrad_mha.tensors import Tensor, plain

__all__ = ["HeadByHead"]

NEEDED = ("q", "k", "v", "weights", "heads")


class HeadByHead(Module):
    """An attention that meets the contract of nn/contract.py, with a `per_head` that its recorded run gives.

    Args:
        attention: a copy, whose unnamed parameters are named after their paths.
    """

    def __init__(self, attention: Module) -> None:
        self.attention = attention
        self.takes_cache = "cache" in find_options(type(attention).forward)
        for path, found in walk(attention):
            if isinstance(found, Tensor) and not found.name:
                found.name = path

    def forward(self, x: Any, cache: Any = None, edit: Any = None) -> Tensor:
        """(T, C) or (B, T, C) -> the same shape."""
        x = x if isinstance(x, Tensor) else Tensor(x)
        layer = None if cache is None else cache[0]
        start = 0 if cache is None else cache.length
        positions = np.arange(start, start + x.shape[-2])
        return call_attention(self.attention, x, cache=layer, positions=positions, edit=edit)

    def per_head(self, x: Tensor) -> Tensor:
        """The same result; of each step with an axis of heads, the matrices have names such as Q_1.

        Raises:
            ValueError: the attention does not show a step that the page needs.
        """
        steps: list[tuple[str, Tensor]] = []

        def note(name: str, tensor: Tensor) -> Tensor:
            steps.append((name, tensor))
            return tensor

        who = type(self.attention).__name__
        y = None
        if "edit" in find_options(type(self.attention).forward):
            with modes.enable_grad():
                y = self(x, edit=note)
        axes = {name: tensor.ndim - x.ndim for name, tensor in reversed(steps)}
        has_heads = 1 in axes.values()
        missing = [name for name in NEEDED if axes.get(name) != has_heads]
        if missing or y is None:
            raise ValueError(
                f"a walkthrough shows the steps {', '.join(NEEDED)}, each (H, T, width): {who} does not so show "
                f"{', '.join(missing)}. Let its forward call tensor = edit(name, tensor) for them, or give it a method "
                f"per_head. {GUIDE}"
            )
        with self.scope():
            parameters = [found for _, found in walk(self.attention) if isinstance(found, Tensor)]
            return Replay(y, steps, has_heads, parameters).run()


class Replay:
    """The operations of a run applied again, head by head where that gives the same numbers."""

    def __init__(self, y: Tensor, steps: list[tuple[str, Tensor]], has_heads: bool, parameters: list[Tensor]) -> None:
        self.y = y
        self.order = engine.toposort([y], everything=True)
        self.names = {id(tensor): name for name, tensor in reversed(steps)}  # of several names the first
        self.n_head = dict(steps)["heads"].shape[-3] if has_heads else 0  # 0: one head, without an axis
        self.done: dict[int, Any] = {}  # by identity: a Tensor, or a list of one (..., 1, T, width) for each head
        self.heads: list[Tensor] = []  # H_1, H_2, ...
        self.parameters = {id(parameter) for parameter in parameters}
        self.parts: dict[tuple[int, int], Tensor] = {}  # by parameter and head

    def run(self) -> Tensor:
        """Apply everything, and return the result."""
        for value in self.order:
            result = value if value.node is None else self._apply(value)
            name = self.names.get(id(value))
            if name is not None and value.node is not None:
                result = self._show(NAMES.get(name, name), value, result)
            elif value.node is not None and value.node.op.kind == "movement" and value.ndim > self.y.ndim:
                result = self._split(value, result)
            self.done[id(value)] = result
        result = join(self.done[id(self.y)])
        return ops.reshape(result, shape=result.shape) if id(self.y) in self.names else result  # Y = H_1

    def _apply(self, value: Tensor) -> Any:
        node: Any = value.node
        inputs = [self.done.get(id(x), x) for x in node.inputs]
        if any(isinstance(x, list) or (self._has_part(x) and node.op.kind != "index") for x in inputs):
            parts = [self._apply_to_head(value, inputs, i) for i in range(self.n_head)]
            if all(part is not None for part in parts):
                return parts
        if self.heads and self.names.get(id(value)) == "concat":
            side_by_side = ops.concat(*self.heads, axis=-1)
            if is_equal(side_by_side, value.numpy()):
                return side_by_side
        return node.op(*map(join, inputs), **node.kwargs)

    def _apply_to_head(self, value: Tensor, inputs: list[Any], i: int) -> Tensor | None:
        """The part of head `i`, or None if the operation does not compute it from the parts of head `i` alone."""
        if value.ndim < 3 or value.shape[-3] != self.n_head:
            return None
        node: Any = value.node
        expected = value.numpy()[..., i : i + 1, :, :]
        try:
            result = node.op(*(self._select(x, i) for x in inputs), **node.kwargs)
        except (ValueError, IndexError, TypeError):
            return None
        return result if is_equal(result, expected) else None

    def _has_part(self, x: Any) -> bool:
        """Whether `x` is a parameter with an axis of heads."""
        return id(x) in self.parameters and x.ndim >= 3 and x.shape[-3] == self.n_head > 1

    def _select(self, x: Any, i: int) -> Any:
        if isinstance(x, list):
            return x[i]
        if np.ndim(plain(x)) < 3 or x.shape[-3] != self.n_head or self.n_head == 1:
            return x
        if not isinstance(x, Tensor):
            return x[..., i : i + 1, :, :]
        if not self._has_part(x):
            return insert_head(take_head(x, i))
        if (id(x), i) not in self.parts:  # one matrix for all uses, so that its gradient is complete
            self.parts[id(x), i] = take_head(x, i).named(add_index(x.name or "parameter", i + 1))
        return insert_head(self.parts[id(x), i])

    def _take_columns(self, name: str, value: Tensor, i: int) -> Tensor | None:
        """Head `i` of a value whose heads are columns of a matrix before they are split, or None for another value."""
        d, expected = value.shape[-1], value.numpy()[..., i, :, :]
        start, matrix, node = i * d, value, value.node
        while node is not None and node.op.kind in ("movement", "index"):
            index = node.kwargs.get("index", ())
            part = index[-1] if isinstance(index, tuple) and len(index) == value.ndim - 1 else slice(None)
            start += part.start or 0 if isinstance(part, slice) else 0
            matrix, node = node.inputs[0], node.inputs[0].node
        if node is None or matrix.shape[:-1] != expected.shape[:-1]:
            return None
        columns = slice(start, start + d)
        data, *weights = (self.done.get(id(x), x) for x in node.inputs)
        if node.op.kind == "product" and all(isinstance(w, Tensor | None) for w in weights):
            named = zip("Wb", weights, strict=False)
            parts = [
                None
                if w is None
                else w[..., columns].named(f"{letter}_{name}{i + 1}" if name else add_index(w.name, i + 1))
                for letter, w in named
            ]
            result = node.op(data, *parts, **node.kwargs)
        else:
            result = self.done[id(matrix)][(slice(None),) * (matrix.ndim - 1) + (columns,)]
        return result if is_equal(result, expected) else None

    def _split(self, value: Tensor, result: Any) -> Any:
        """The parts of the heads of a value that holds the columns of a matrix, or `result` as it is."""
        if isinstance(result, list) or value.shape[-3] != self.n_head:
            return result
        matrices = [self._take_columns("", value, i) for i in range(self.n_head)]
        return result if any(x is None for x in matrices) else [insert_head(x) for x in matrices if x is not None]

    def _show(self, name: str, value: Tensor, result: Any) -> Any:
        """Name the matrices of a step, one for each head."""
        if value.ndim == self.y.ndim:
            return result.named(name if self.n_head or name == NAMES["concat"] else f"{name}_1")
        if isinstance(result, list):
            matrices = [ops.reshape(part, shape=drop_head(part.shape)) for part in result]
        else:
            columns = [self._take_columns(name, value, i) for i in range(value.shape[-3])]
            matrices = [take_head(result, i) if part is None else part for i, part in enumerate(columns)]
        matrices = [matrix.named(f"{name}_{i}") for i, matrix in enumerate(matrices, 1)]
        if name == NAMES["heads"]:
            self.heads = matrices
        parts = [insert_head(matrix) for matrix in matrices]
        return parts if len(parts) == self.n_head else join(parts)


def take_head(x: Tensor, i: int) -> Tensor:
    """Head `i` of (..., H, T, width)."""
    front = (slice(None),) * (x.ndim - 3)
    return x[(*front, i)] if front else x[i]


def add_index(name: str, i: int) -> str:
    """gain, 1 -> gain_1; W_Q, 1 -> W_Q1: all behind the underscore is the index of a title."""
    return f"{name}{i}" if "_" in name else f"{name}_{i}"


def drop_head(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-3], *shape[-2:])


def insert_head(x: Tensor) -> Tensor:
    """(..., T, width) -> (..., 1, T, width)."""
    return ops.reshape(x, shape=(*x.shape[:-2], 1, *x.shape[-2:]))


def join(x: Any) -> Any:
    """The parts of all heads as one Tensor; anything else as it is."""
    return ops.concat(*x, axis=-3) if isinstance(x, list) else x


def is_equal(result: Any, expected: np.ndarray) -> bool:
    """Whether two arrays are equal up to rounding."""
    array = np.asarray(plain(result))
    if array.shape != expected.shape:
        return False
    size = np.abs(expected).max(initial=0.0, where=np.isfinite(expected))
    rounding = 1000 * np.finfo(expected.dtype).eps if expected.dtype.kind == "f" else 0.0
    return bool(np.allclose(array, expected, rtol=rounding, atol=rounding * size, equal_nan=True))
