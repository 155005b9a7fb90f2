"""What a GPT asks of its attention: `make_attention` makes and tries it, `call_attention` calls it.

An attention is a module whose `forward(x)` returns a Tensor of the shape of x, (T, C) or (B, T, C). Of the keywords in
OPTIONS, `forward` declares those that it supports; `**options` declares all. docs/your_own_attention.md describes them

Axes: B batch, T tokens, T_k keys, C width (n_embd).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from tinygrad_mha.modes import no_grad
from tinygrad_mha.nn.cache import KVCache
from tinygrad_mha.nn.heads import Steps
from tinygrad_mha.nn.module import Module
from tinygrad_mha.tensors import Tensor

__all__ = ["GUIDE", "OPTIONS", "AttentionFactory"]
__all__ += ["call_attention", "check_attention", "find_options", "make_attention"]

AttentionFactory = Callable[[Any, np.random.Generator], Module]
"""Called as `factory(config, rng)` for each block; returns its attention."""

# What cannot be ignored where it is passed, and what a forward does with it.
HINTS = {
    "cache": "k, v = cache.append(k, v) returns those of all tokens",
    "key_allow": "it hides the padding of batches with rows of different lengths",
    "edit": "call it as tensor = edit(name, tensor) for each step that can be edited",
}
OPTIONS = (*HINTS, "positions")
TOLERANCE = 1e-3  # relative to the largest element: float32, and another order of summation
GUIDE = "docs/your_own_attention.md shows what an attention in a GPT takes and gives"


def describe_fault(attention: Any, fault: str) -> str:
    return f"the attention of this GPT, {type(attention).__name__}, {fault}. {GUIDE}"


@functools.lru_cache
def find_options(forward: Callable[..., Any]) -> frozenset[str]:
    """The names in OPTIONS that a `forward` declares."""
    parameters = inspect.signature(forward).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return frozenset(OPTIONS) if takes_all else frozenset(OPTIONS).intersection(p.name for p in parameters)


def call_attention(attention: Module, x: Tensor, **options: Any) -> Tensor:
    """`attention(x)` with those of `options` that it declares.

    Raises:
        ValueError: an option that is needed and that it does not declare or ignores, or an output of another shape or
            dtype.
        TypeError: an output that is not a Tensor.
    """
    supported = find_options(type(attention).forward)
    cache, steps = options.get("cache"), options.get("edit")
    steps = options["edit"] = steps if steps is None or isinstance(steps, Steps) else Steps(steps)
    for name, hint in HINTS.items():
        is_needed = steps is not None and steps.is_editing if name == "edit" else options.get(name) is not None
        if is_needed and name not in supported:
            raise ValueError(describe_fault(attention, f"takes no {name}: declare {name} in its forward ({hint})"))
    n = 0 if cache is None else cache.length + x.shape[-2]
    y = attention(x, **{name: value for name, value in options.items() if name in supported})
    if not isinstance(y, Tensor):
        raise TypeError(describe_fault(attention, f"returned a {type(y).__name__}, not one Tensor"))
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        fault = f"must return the shape and dtype of its input, {x.shape} {x.dtype}, got {y.shape} {y.dtype}"
        raise ValueError(describe_fault(attention, fault))
    if cache is not None and cache.appended != n:
        fault = f"must call cache.append once with the keys and values of x: the cache holds {cache.appended} tokens"
        raise ValueError(describe_fault(attention, f"{fault} afterwards, not {n}"))
    if steps is not None and steps.is_editing and not steps.names:
        raise ValueError(describe_fault(attention, f"ignores edit: {HINTS['edit']}"))
    return y


def make_attention(factory: AttentionFactory, config: Any, rng: np.random.Generator) -> Module:
    """`factory(config, rng)`, converted to float32 and checked.

    Raises:
        TypeError: the factory cannot be called so, or returns no Module.
        ValueError: the attention leaves out the position or score of `config`, or `check_attention` refuses it.
    """
    if isinstance(factory, Module) or not callable(factory):
        got = f"a {type(factory).__name__}"
        raise TypeError(f"attention must be a class or function, called as attention(config, rng); got {got}. {GUIDE}")
    try:
        inspect.signature(factory).bind(config, rng)
    except TypeError as error:
        raise TypeError(f"attention is called as attention(config, rng): {error}. {GUIDE}") from error
    attention = factory(config, rng)
    if not isinstance(attention, Module):
        raise TypeError(f"attention(config, rng) must return a Module, got a {type(attention).__name__}. {GUIDE}")
    held = [type(module) for _, module in attention.named_modules()]
    for name, scheme in {"position": config.make_position(), "score": config.make_score()}.items():
        acts = scheme is not None and scheme.name != "none" and getattr(scheme, "acts_on", "attention") == "attention"
        if acts and type(scheme) not in held:
            hint = f"give it config.make_{name}(), or leave {name} out of the configuration and do it by yourself"
            raise ValueError(describe_fault(attention, f"does not hold the scheme of {name}={scheme.name!r}: {hint}"))
    attention.astype(np.float32)
    check_attention(attention, config.n_embd, config.block_size)
    return attention


def check_attention(attention: Module, width: int, block_size: int) -> None:
    """Call a new attention on up to three random tokens, with and without each option that it declares.

    A copy runs in eval mode, so nothing of the attention changes, its random generators included.

    Raises:
        TypeError: it returns no Tensor.
        ValueError: it fails, returns another shape or dtype, ignores a cache that it declares, or lets tokens see later
            ones and does not state `is_causal = False`.
    """
    attention = copy.deepcopy(attention).eval()
    n = min(3, block_size)
    x = Tensor(np.random.default_rng(0).standard_normal((2, n, width)).astype(np.float32))
    key_allow = np.arange(n) >= np.array([[0], [min(1, n - 1)]])  # the second row has one token of padding
    try:
        with no_grad():
            y = call_attention(attention, x[0]).numpy()
            for m in range(1, n if getattr(attention, "is_causal", True) else 1):
                prefix = call_attention(attention, x[0, :m]).numpy()
                if not np.allclose(prefix, y[:m], rtol=TOLERANCE, atol=TOLERANCE * np.abs(y).max(), equal_nan=True):
                    hint = (
                        "hide them (causal=True, or allow=nn.causal(T_q, T_k)), or state is_causal = False in the class"
                    )
                    raise ValueError(describe_fault(attention, f"lets a token see later ones: {hint}"))
            call_attention(attention, x, positions=np.arange(n))
            if "key_allow" in find_options(type(attention).forward):
                call_attention(attention, x, positions=np.arange(n), key_allow=key_allow)
            if "cache" in find_options(type(attention).forward):
                cache = KVCache()
                for t in range(n):
                    call_attention(attention, x[:, t : t + 1], positions=np.arange(t, t + 1), cache=cache[0])
    except Exception as error:
        if GUIDE in str(error):
            raise
        fault = f"fails on {n} tokens: {type(error).__name__}: {error}"
        raise ValueError(describe_fault(attention, fault)) from error
