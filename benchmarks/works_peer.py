"""The works of `performance.py` in PyTorch (eager) and transformers, with the same weights and batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from works_files import load_arrays, make_attention_arrays, make_tokens, merge_heads, read

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
Work = tuple[Callable[[], Any], list[float]]
VERSIONS = {"torch": torch.__version__.split("+")[0]}


def attention() -> Work:
    step = make_torch_attention(*make_attention_arrays())
    return step, [float(g.abs().sum()) for g in step()]


def make_torch_attention(
    w: dict[str, np.ndarray], x: np.ndarray, g: np.ndarray, allow: np.ndarray
) -> Callable[[], Any]:
    p = {name: torch.tensor(a, requires_grad=True) for name, a in w.items()}
    X, G, hidden = torch.tensor(x), torch.tensor(g), torch.tensor(~allow)

    def step() -> list[Any]:
        heads = []
        for h in "12":
            q, k, v = X @ p["Q" + h], X @ p["K" + h], X @ p["V" + h]
            scores = (q @ k.mT) * 7**-0.5
            heads.append(torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v)
        y = torch.cat(heads, -1) @ p["O"]
        for t in p.values():
            t.grad = None
        y.backward(G)
        return [t.grad for t in p.values()]

    return step


def attention_module() -> Work:
    """The same attention with one matrix for the heads of each of Q, K and V, and PyTorch's fused function."""
    w, x, g, _ = make_attention_arrays()
    p = {name: torch.tensor(a, requires_grad=True) for name, a in merge_heads(w).items()}
    X, G = torch.tensor(x), torch.tensor(g)

    def step() -> list[Any]:
        q, k, v = ((X @ p[m]).view(3, 2, -1).transpose(0, 1) for m in "QKV")
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = heads.transpose(0, 1).reshape(3, -1) @ p["O"]
        for t in p.values():
            t.grad = None
        y.backward(G)
        return [t.grad for t in p.values()]

    return step, [float(g.abs().sum()) for g in step()]


class Block(nn.Module):
    """nanoGPT's block: attention by `scaled_dot_product_attention`, exact GELU."""

    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width, bias=False), "c_proj": nn.Linear(width, width, bias=False)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width, bias=False), "c_proj": nn.Linear(4 * width, width, bias=False)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).split(c, dim=2)
        q, k, v = (a.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for a in qkv)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(b, t, c)
        x = x + self.attn["c_proj"](y)
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class GPT(nn.Module):
    """nanoGPT's model; the weights of the head are those of the token embedding."""

    def __init__(self, vocab_size: int, block_size: int, n_layer: int, n_head: int, n_embd: int, **_: Any) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = functional.linear(self.ln_f(x), self.wte.weight)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def train(folder: str, batch: int, **_: Any) -> Work:
    config = read(folder, "config.json")
    model = GPT(**config)
    state = {name: torch.tensor(a) for name, a in load_arrays(folder).items()}
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    model.load_state_dict({name: a.T if name.endswith(linear) else a for name, a in state.items()})
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    tokens = torch.tensor(make_tokens(config["vocab_size"], batch, config["block_size"] + 1))
    idx, targets = tokens[:, :-1], tokens[:, 1:]

    def step() -> float:
        loss = model(idx, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    return step, [step() for _ in range(3)]


def load_model(folder: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    VERSIONS["transformers"] = transformers.__version__
    model = transformers.AutoModelForCausalLM.from_pretrained(Path(folder), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def generate(folder: str, prompt: int, new: int, use_cache: bool = True) -> Work:
    model = load_model(folder)
    idx = torch.tensor(make_tokens(model.config.vocab_size, 1, prompt))

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return model.generate(idx, max_new_tokens=new, do_sample=False, use_cache=use_cache)

    return step, step()[0].tolist()


def prefill(folder: str, tokens: int) -> Work:
    model = load_model(folder)
    idx = torch.tensor(make_tokens(model.config.vocab_size, 1, tokens))

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return model(idx, use_cache=True, logits_to_keep=1).logits

    return step, step().flatten()[:100].tolist()


WORKS: dict[str, Callable[..., Work]] = {f.__name__: f for f in (attention, attention_module, train, generate, prefill)}
