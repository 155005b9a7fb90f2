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
    return f"{type(attention).__name__} {fault}. {GUIDE}"


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
    given = {name: value for name, value in options.items() if value is not None}
    cache, steps = given.get("cache"), given.get("edit")
    if steps is not None:
        steps = given["edit"] = steps if isinstance(steps, Steps) else Steps(steps)
    supported = find_options(type(attention).forward)
    for name in [name for name in OPTIONS if name in given and name not in supported]:
        if name in HINTS and (name != "edit" or (steps is not None and steps.is_editing)):
            fault = f"takes no {name}: declare {name} in its forward ({HINTS[name]})"
            raise ValueError(describe_fault(attention, fault))
        del given[name]
    n = 0 if cache is None else cache.length + x.shape[-2]
    y = attention(x, **given)
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
    try:
        attention = factory(config, rng)
    except (TypeError, AttributeError) as error:
        raise TypeError(f"attention(config, rng) failed: {error}; config is a GPTConfig. {GUIDE}") from error
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
    """Try a new attention on up to three random tokens; raise an error that names the first thing that is wrong.

    A copy runs in eval mode, so nothing of the attention changes, its random generators included.

    Raises:
        TypeError: it returns no Tensor.
        ValueError: it fails, or returns another shape or dtype. Unless its class states `is_causal = False`, also: it
            lets tokens see later ones, or an option that it declares does not do what it should.
    """
    attention = copy.deepcopy(attention).eval()
    n = min(3, block_size)
    x = np.random.default_rng(0).standard_normal((n, width)).astype(np.float32)
    try:
        with no_grad():
            compare_calls(attention, x)
    except Exception as error:
        if GUIDE in str(error):
            raise
        expected = f"x is (T, C) or (B, T, C), here C = {width}, and options have the default None"
        fault = f"fails on {n} tokens: {type(error).__name__}: {error} ({expected})"
        raise ValueError(describe_fault(attention, fault)) from error


def compare_calls(attention: Module, x: np.ndarray) -> None:
    """Compare calls that must agree on the rows of x (T, C) if tokens do not see later ones."""
    n, places = len(x), np.arange(len(x))
    supported = find_options(type(attention).forward)

    def run(rows: np.ndarray, start: int = 0, **options: Any) -> np.ndarray:
        options = {"positions": places[start : start + rows.shape[-2]], **options}
        return call_attention(attention, Tensor(rows), **options).numpy()

    def compare(y: np.ndarray, fault: str) -> None:
        atol = TOLERANCE * np.abs(whole).max()
        equal = np.allclose(y, whole[: len(y)], rtol=TOLERANCE, atol=atol, equal_nan=True)
        if not equal and getattr(attention, "is_causal", True):
            raise ValueError(describe_fault(attention, fault))

    whole = call_attention(attention, Tensor(x)).numpy()
    compare(run(x), "declares positions, but without them its tokens do not stand at 0, 1, 2, ...")
    compare(run(x[None])[0], "returns different numbers for a batch of one sequence than for the sequence")
    for m in range(1, n):
        hint = "hide them (causal=True, or allow=nn.causal(T_q, T_k)), or state is_causal = False in the class"
        compare(run(x[:m]), f"lets a token see later ones: {hint}")
    if "key_allow" in supported:
        rows = np.concatenate([x[-1:], x[:-1]])[None]  # the last row is the padding in front of the others
        padded = run(rows, key_allow=places[None] > 0, positions=np.maximum(places - 1, 0)[None])
        compare(padded[0, 1:], "declares key_allow, but a padding token in front changes its result")
    if "cache" in supported:
        cache = KVCache()
        parts = [run(x[t : t + 1], t, cache=cache[0]) for t in range(n)]
        fault = "declares cache, but returns different numbers with it than without it (with a cache, T_q < T_k)"
        compare(np.concatenate(parts), fault)
