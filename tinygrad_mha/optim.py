"""Optimizers, gradient clipping and the learning-rate schedule.

An optimizer writes into the arrays of its parameters and marks them as written, so that a later backward through a
graph that has used the old values raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tinygrad_mha import kernels
from tinygrad_mha.arguments import check_number
from tinygrad_mha.kernels.memory import keep_freed_memory
from tinygrad_mha.tensors import Tensor, mark_written
from tinygrad_mha.torch_names import translate_keywords

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "clip_grad_norm", "decay_groups", "global_norm", "warmup_cosine"]

# The state of one parameter: arrays of its shape and dtype, and plain numbers; empty before its first step.
State = dict[str, Any]


class Optimizer:
    """The base of all optimizers: groups of parameters with options, and a state for each parameter.

    Args:
        params: an iterable of tensors, or of groups: dicts with "params" and the options that differ from `defaults`.
            A tensor that occurs twice, as tied weights do, is one parameter.
        defaults: the options of the optimizer and their values.

    Attributes:
        groups: dicts with "params" (a list of tensors) and every option.
        parameters: all parameters, a list of tensors.
        lr: the learning rate of the first group; setting it sets that of every group.

    Raises:
        TypeError: a parameter that is not a tensor, or an unknown option.
        ValueError: no parameters, a tensor that was computed, a tensor in two groups, an option out of its range.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self.groups = [_check_group(group, defaults) for group in _as_groups(params)]
        self.parameters: list[Tensor] = [p for group in self.groups for p in group["params"]]
        if not self.parameters:
            raise ValueError("an optimizer needs parameters, got none: pass model.parameters()")
        if len({id(p) for p in self.parameters}) < len(self.parameters):
            twice = next(p for p in self.parameters if sum(p is q for q in self.parameters) > 1)
            raise ValueError(f"{_label(twice)} is in two groups; keep it in one")
        self.state: list[State] = [{} for _ in self.parameters]
        keep_freed_memory()

    @property
    def lr(self) -> float:
        """The learning rate of the first group; setting it sets that of every group."""
        return self.groups[0]["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        _check_options({"lr": value})
        for group in self.groups:
            group["lr"] = value

    def step(self) -> None:
        """Update every parameter that has a gradient. Others are unchanged: no decay, no state."""
        for p in self.parameters:
            _check_step(p)
        for p, state, group in self._entries():
            if p.grad is None:
                continue
            if not state:
                state.update(self._new_state(p._data, group))
            self._update(p._data, p.grad, state, group)
            mark_written(p)

    @translate_keywords
    def zero_grad(self) -> None:
        """Delete the gradients of all parameters: each `.grad` is None again."""
        for p in self.parameters:
            p.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """A copy of options and state, for `load_state_dict`: {"groups": [options ...], "state": [one per parameter]}.

        Only "state" contains arrays; everything else is plain numbers, lists and strings.
        """
        positions = {id(p): i for i, p in enumerate(self.parameters)}
        groups = [{**group, "params": [positions[id(p)] for p in group["params"]]} for group in self.groups]
        return {"groups": groups, "state": [_copy_state(state) for state in self.state]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the options and state of another optimizer of this class, whose parameters have the same shapes.

        Raises:
            ValueError: other groups, options, shapes or dtypes. In this case nothing is changed.
        """
        groups, states = saved["groups"], saved["state"]
        ours = [len(group["params"]) for group in self.groups]
        theirs = [len(group["params"]) for group in groups]
        if ours != theirs or len(states) != len(self.parameters):
            raise ValueError(f"the saved state is of groups with {theirs} parameters, this optimizer has {ours}")
        options = [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]
        for group, new in zip(self.groups, options, strict=True):
            if group.keys() != {"params", *new}:
                raise ValueError(f"the saved state has the options {sorted(new)}, expected {sorted(group)}")
            _check_options(new)
        per_parameter = (new for new, n in zip(options, ours, strict=True) for _ in range(n))
        for p, state, new in zip(self.parameters, states, per_parameter, strict=True):
            _check_state(p, state, self._new_state(p._data, new))
        for group, new in zip(self.groups, options, strict=True):
            group.update(new)
        self.state = [_copy_state(state) for state in states]

    def _entries(self) -> Iterator[tuple[Tensor, State, dict[str, Any]]]:
        states = iter(self.state)
        for group in self.groups:
            for p in group["params"]:
                yield p, next(states), group

    def _new_state(self, p: np.ndarray, group: dict[str, Any]) -> State:
        raise NotImplementedError

    def _update(self, p: np.ndarray, g: np.ndarray, state: State, group: dict[str, Any]) -> None:
        raise NotImplementedError


class SGD(Optimizer):
    """Stochastic gradient descent, with optional momentum, as torch.optim.SGD.

    g <- grad + weight_decay * p
    b <- momentum * b + g, the first b being g
    p <- p - lr * b

    Example:
        >>> p = Tensor([1.0, 2.0], requires_grad=True)
        >>> (p * p).sum().backward()
        >>> SGD([p], lr=0.25).step()
        >>> p.data
        array([0.5, 1. ], dtype=float32)
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _new_state(self, p: np.ndarray, group: dict[str, Any]) -> State:
        return {"momentum": np.zeros_like(p)} if group["momentum"] else {}

    def _update(self, p: np.ndarray, g: np.ndarray, state: State, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            g = g + p * group["weight_decay"]
        if group["momentum"]:
            b = state["momentum"]
            b *= group["momentum"]
            b += g
            g = b
        p -= g * group["lr"]


class Adam(Optimizer):
    """Adam (arXiv:1412.6980): step sizes do not depend on the scale of the gradients.

    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    p <- p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    m and v start at 0; the divisions by 1 - beta^t correct for this. `weight_decay` adds weight_decay * p to the
    gradient, so it is scaled like the gradient; `AdamW` applies it separately.
    """

    decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def _new_state(self, p: np.ndarray, group: dict[str, Any]) -> State:
        return {"step": 0, "m": np.zeros_like(p), "v": np.zeros_like(p)}

    def _update(self, p: np.ndarray, g: np.ndarray, state: State, group: dict[str, Any]) -> None:
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        t = state["step"] = state["step"] + 1
        if decay and not self.decoupled:
            g = g + p * decay
        keep = 1 - lr * decay if self.decoupled else 1.0
        rate, root = lr / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t)
        kernels.adam(p, g, state["m"], state["v"], group["betas"], keep, rate, root, group["eps"])


class AdamW(Adam):
    """Adam with decoupled weight decay (arXiv:1711.05101): p is first multiplied by 1 - lr * weight_decay.

    Example:
        >>> p = Tensor([1.0], requires_grad=True)
        >>> p.grad = np.array([0.5], np.float32)
        >>> AdamW([p], lr=0.1, weight_decay=0.1).step()
        >>> round(p.item(), 6)
        0.89
    """

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


def decay_groups(module: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters of a module into two groups for an optimizer, as nanoGPT does.

    Parameters of two or more axes (matrices and embeddings) get `weight_decay`; biases and the weights of norms get 0.
    """
    parameters = [p for _, p in module.named_parameters()]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


# --------------------------------------------------------------------------------------------------------------------
# Gradient norm and clipping


@translate_keywords
def clip_grad_norm(params: Iterable[Tensor], max_norm: float) -> float:
    """Scale gradients so that their common L2 norm is at most `max_norm`; return the norm before scaling.

    Gradients are multiplied in place by max_norm / (norm + 1e-6) if that is less than 1, as torch does. A tensor that
    occurs twice counts once. If the norm is inf or nan the gradients are unchanged: check the result and skip the step.

    Raises:
        TypeError: `params` are not tensors.
        ValueError: no parameters, `max_norm` is negative or nan, or a gradient is not a writable array of the shape and
            dtype of its parameter. In this case nothing is changed.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be 0 or more (inf only measures), got {max_norm}")
    tensors = [params] if isinstance(params, Tensor) else list(_check_iterable(params))
    if not tensors:
        raise ValueError("expected parameters, got none: pass a list, because an iterator is empty once it was used")
    for p in tensors:
        if not isinstance(p, Tensor):
            raise TypeError(f"a parameter must be a Tensor, got {type(p).__name__}")
        if p.grad is not None:
            _check_gradient(p)
            if not p.grad.flags.writeable:
                raise ValueError(f"the gradient of {_label(p)} is a read-only array, which cannot be scaled: copy it")
    gradients = [p.grad for p in {id(p): p for p in tensors}.values() if p.grad is not None]
    norm = global_norm(gradients)
    factor = max_norm / (norm + 1e-6)
    if math.isfinite(norm) and factor < 1:
        for g in gradients:
            np.multiply(g, factor, out=g)
    return norm


def global_norm(arrays: Iterable[np.ndarray]) -> float:
    """The L2 norm over all elements of all arrays, with a relative error of 1e-6 in float32; 0 without arrays."""
    arrays = list(arrays)
    with np.errstate(over="ignore"):  # handled below
        squares = sum(_sum_of_squares(a) for a in arrays)
    if 1e-20 < squares < math.inf:
        return math.sqrt(squares)
    # An element is inf or nan, all are 0, or squares overflow or underflow: divide by the largest element first.
    top = float(np.max([np.abs(a).max(initial=0) for a in arrays], initial=0))
    if top == 0 or not math.isfinite(top):
        return top
    return top * math.sqrt(sum(_sum_of_squares(a / top) for a in arrays))


BLOCK = 1 << 12  # elements


def _sum_of_squares(a: np.ndarray) -> float:
    """The sum over blocks in the dtype of `a`, and their sum in float64: one long sum in float32 would lose digits."""
    flat = a.reshape(-1).astype(np.promote_types(a.dtype, np.float32), copy=False)
    blocks = (flat[start : start + BLOCK] for start in range(0, flat.size, BLOCK))
    return sum(float(block.dot(block)) for block in blocks)


# --------------------------------------------------------------------------------------------------------------------
# Learning-rate schedule


def warmup_cosine(step: int, max_lr: float, min_lr: float = 0.0, warmup: int = 0, total: int = 1) -> float:
    """The learning rate of update `step` (0 is the first): linear warmup, cosine decay, then `min_lr`.

    While step < warmup it is max_lr * (step + 1) / (warmup + 1), which is not 0 for the first update. It is max_lr at
    `warmup` and min_lr from `total` on (nanoGPT's rule; the cosine is that of arXiv:1608.03983).

    Raises:
        ValueError: a negative step or warmup, `total` below `warmup`, or not 0 <= min_lr <= max_lr.
    """
    if step < 0 or warmup < 0 or total < warmup:
        raise ValueError(f"expected 0 <= step and 0 <= warmup <= total, got {step=}, {warmup=}, {total=}")
    if not 0 <= min_lr <= max_lr < math.inf:
        raise ValueError(f"expected 0 <= min_lr <= max_lr, got {min_lr=}, {max_lr=}")
    if step < warmup:
        return max_lr * (step + 1) / (warmup + 1)
    if step >= total:
        return min_lr
    progress = (step - warmup) / (total - warmup)
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (max_lr - min_lr)


# --------------------------------------------------------------------------------------------------------------------
# Checks


def _check_iterable(params: Any) -> Iterable[Any]:
    if not hasattr(params, "__iter__"):
        hint = ": pass .parameters()" if hasattr(params, "parameters") else ""
        raise TypeError(f"expected tensors, got a {type(params).__name__}{hint}")
    return params


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """An iterable of tensors or of groups, as a list of groups."""
    if isinstance(params, (Tensor, dict)):
        raise TypeError(f"params must be an iterable of tensors or of groups, got a {type(params).__name__}")
    entries = list(_check_iterable(params))
    if entries and all(isinstance(entry, dict) for entry in entries):
        return entries
    return [{"params": entries}]


def _check_group(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A group with all options, its tensors in a list, each once."""
    unknown = given.keys() - defaults.keys() - {"params"}
    if unknown or "params" not in given:
        raise TypeError(f'a group has "params" and the options {sorted(defaults)}, got {sorted(given)}')
    params = given["params"]
    tensors = [params] if isinstance(params, Tensor) else list(params)
    for p in tensors:
        if not isinstance(p, Tensor):
            raise TypeError(f"a parameter must be a Tensor, got {type(p).__name__}")
        if p.node is not None:
            raise ValueError(f"{_label(p)} was computed by {p.node.op.name!r}; only leaves can be optimized")
        if p.dtype.kind != "f":
            raise TypeError(f"{_label(p)} is of {p.dtype}; only floating tensors can be optimized")
    options = {key: _plain(given.get(key, default)) for key, default in defaults.items()}
    _check_options(options)
    return {"params": list({id(p): p for p in tensors}.values()), **options}


def _check_options(options: dict[str, Any]) -> None:
    for key, value in options.items():
        if key == "betas":
            if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
                raise ValueError(f"betas must be two numbers in [0, 1), got {value}")
        else:
            check_number(value, key)


def _check_step(p: Tensor) -> None:
    """Raise ValueError unless `p` can be updated by its gradient, or has none."""
    if p.grad is None:
        return
    if not p._data.flags.writeable:
        raise ValueError(f"{_label(p)} is a read-only view, which cannot be updated: copy it first, Tensor(t.numpy())")
    _check_gradient(p)


def _check_gradient(p: Tensor) -> None:
    g, data = p.grad, p._data
    if not isinstance(g, np.ndarray) or g.shape != data.shape or g.dtype != data.dtype:
        got = f"{g.shape} {g.dtype}" if isinstance(g, np.ndarray) else type(g).__name__
        raise ValueError(f"the gradient of {_label(p)} must be an array {p.shape} {p.dtype}, got {got}")


def _check_state(p: Tensor, state: State, expected: State) -> None:
    """Check that a saved state is empty, or has the keys, shapes and dtypes of a new one."""
    if state and state.keys() != expected.keys():
        raise ValueError(f"the saved state of {_label(p)} has {sorted(state)}, expected {sorted(expected)}")
    for key, value in state.items():
        wanted = expected[key]
        shape, dtype = np.shape(value), getattr(value, "dtype", None)
        if isinstance(wanted, np.ndarray) and (shape, dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"the saved {key!r} of {_label(p)} is {shape} {dtype}, expected {wanted.shape} {wanted.dtype}"
            )


def _copy_state(state: State) -> State:
    return {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in state.items()}


def _plain(value: Any) -> Any:
    """An option as plain Python: NumPy scalars would change dtypes, and JSON turns tuples into lists."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    return value.item() if isinstance(value, np.generic) else value


def _label(p: Tensor) -> str:
    return f"the parameter {p.name!r} of shape {p.shape}" if p.name else f"a parameter of shape {p.shape}"
