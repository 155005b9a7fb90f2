"""Attention, GPT and the updates of optimizers, written once more with torch: short, plain, without options of ours.

Every function takes a dict of torch tensors under our parameter names. Axes: B batch, T tokens, C width, H heads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import tinygrad_mha as tg

F = torch.nn.functional
Parameters = dict[str, torch.Tensor]


def copy_parameters(module: tg.nn.Module) -> Parameters:
    """The parameters of a module as leaves of torch, under their names; a tied one once."""
    return {name: torch.tensor(p.numpy(), requires_grad=True) for name, p in module.named_parameters()}


def attend(q: Any, k: Any, v: Any, allow: Any = None, bias: Any = None, change: Any = None, sink: Any = None) -> Any:
    """softmax(change(q k^T / sqrt(d)) + bias) v; a query that may see nothing gets zeros. (B, H, T, d) each."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if change is None else change(scores)
    scores = scores if bias is None else scores + bias
    if allow is not None:
        scores = scores.masked_fill(~allow, -math.inf)
        nothing = ~allow.any(-1, keepdim=True)
        scores = torch.where(nothing, torch.zeros_like(scores), scores)
    if sink is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]
    return weights @ v if allow is None else torch.where(nothing, torch.zeros_like(weights), weights) @ v


def split(x: torch.Tensor, n: int) -> torch.Tensor:
    """(B, T, n d) -> (B, n, T, d)."""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def join(x: torch.Tensor) -> torch.Tensor:
    """(B, n, T, d) -> (B, T, n d)."""
    return x.transpose(1, 2).flatten(2)


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary positions 0, 1, ...: column i and column i + d/2 are one pair."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def alibi(n_head: int, n: int) -> torch.Tensor:
    """Minus slope times distance, (H, T, T), for a power of two of heads."""
    slopes = 2.0 ** (-8 / n_head * torch.arange(1, n_head + 1, dtype=torch.float64))
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    return -slopes[:, None, None] * distance


def normalize(p: Parameters, name: str, x: torch.Tensor, config: tg.nn.GPTConfig) -> torch.Tensor:
    shape, weight = x.shape[-1:], p[f"{name}.weight"]
    if config.norm == "rms":
        return F.rms_norm(x, shape, weight, config.eps)
    return F.layer_norm(x, shape, weight, p.get(f"{name}.bias"), config.eps)


def linear(p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ p[f"{name}.weight"]
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def gpt(p: Parameters, config: tg.nn.GPTConfig, idx: np.ndarray) -> torch.Tensor:
    """The logits (B, T, V) of a GPT for the token ids (B, T), without dropout."""
    n, heads, shared = idx.shape[1], config.n_head, config.n_kv_head or config.n_head
    distance = torch.arange(n)[:, None] - torch.arange(n)
    allow = (distance >= 0) & (distance < (config.window or n))
    x = p["wte.weight"][torch.tensor(idx)]
    if config.position == "learned":
        x = x + p["wpe.weight"][:n]
    if config.position == "sinusoidal":
        i = torch.arange(config.n_embd, dtype=torch.float64)
        angle = torch.arange(n)[:, None] / 10000 ** ((i - i % 2) / config.n_embd)
        x = x + torch.where(i % 2 == 1, angle.cos(), angle.sin())

    def attention(i: int, x: torch.Tensor) -> torch.Tensor:
        widths = [config.n_embd, *[shared * config.n_embd // heads] * 2]
        parts = linear(p, f"h.{i}.attn.c_attn", x).split(widths, -1)
        q, k, v = (split(part, count) for part, count in zip(parts, (heads, shared, shared), strict=True))
        if config.position == "rotary":
            q, k = rotate(q, config.rope_base), rotate(k, config.rope_base)
        k, v = (a.repeat_interleave(heads // shared, 1) for a in (k, v))
        bias = alibi(heads, n) if config.position == "alibi" else None
        change = (lambda s: 50 * (s / 50).tanh()) if config.score == "softcap" else None
        y = attend(q, k, v, allow, bias, change, p.get(f"h.{i}.attn.score.sink"))
        return linear(p, f"h.{i}.attn.c_proj", join(y))

    def mlp(i: int, x: torch.Tensor) -> torch.Tensor:
        inner = linear(p, f"h.{i}.mlp.c_fc", x)
        if config.activation == "swiglu":
            inner = F.silu(linear(p, f"h.{i}.mlp.c_gate", x)) * inner
        else:
            inner = {"gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"), "relu": F.relu}[
                config.activation
            ](inner)
        return linear(p, f"h.{i}.mlp.c_proj", inner)

    for i in range(config.n_layer):
        if config.norm_first:
            x = x + attention(i, normalize(p, f"h.{i}.ln_1", x, config))
            x = x + mlp(i, normalize(p, f"h.{i}.ln_2", x, config))
        else:
            x = normalize(p, f"h.{i}.ln_1", x + attention(i, x), config)
            x = normalize(p, f"h.{i}.ln_2", x + mlp(i, x), config)
    if config.norm_first:
        x = normalize(p, "ln_f", x, config)
    return x @ p["wte.weight" if config.tie_weights else "lm_head.weight"].T


def multi_head(p: Parameters, n_head: int, n_kv_head: int, x: Any, memory: Any, allow: Any, bias: Any) -> torch.Tensor:
    """Multi-head attention of x (B, T, C) to memory (B, S, C'), `allow` and `bias` broadcast to (B, H, T, S)."""

    def project(name: str, rows: torch.Tensor, heads: int) -> torch.Tensor:
        y = rows @ p[f"w{name}"]
        return split(y + p[f"b{name}"] if f"b{name}" in p else y, heads)

    q, k, v = project("q", x, n_head), project("k", memory, n_kv_head), project("v", memory, n_kv_head)
    k, v = (a.repeat_interleave(n_head // n_kv_head, 1) for a in (k, v))
    y = join(attend(q, k, v, allow, bias)) @ p["wo"]
    return y + p["bo"] if "bo" in p else y


def make_optimizer(kind: str, groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    """torch's optimizer of the same name, with our options."""
    return {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[kind](groups, **options)
