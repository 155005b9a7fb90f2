"""Time to write the DOT text of a run, to refuse a run that is too large, and to draw with each engine.

    python benchmarks/bench_graph.py [--rounds 20] [--json results.json]

Medians in milliseconds, on one thread. If torch and torchviz are installed (`pip install torchviz`, and the extra
`bench`), torchviz draws the same model in turn. Engines that are not installed are left out.

1. gpt: the DOT text of a 2-layer GPT (4 heads, width 64, 64 tokens), by operations, folded and not, and with its blocks
   closed. Goal: under 200 ms by operations.
2. chain: a run of 100 000 operations, which is refused. Goal: under 1000 ms.
3. attention: the two-head attention of the paper with values and gradients: DOT text, then SVG and PNG by each engine.
"""

from __future__ import annotations

import os

for pool in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(pool, "1")

import argparse
import importlib
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha import nn
from tinygrad_mha.viz import GraphTooLargeError
from tinygrad_mha.viz.diagram import graphviz_engines as engines

VOCABULARY, TOKENS, LAYERS, HEADS, WIDTH = 65, 64, 2, 4, 64
Step = Callable[[], Any]


def optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


torch, torchviz = optional("torch"), optional("torchviz")


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """The median time of each step in milliseconds; every round runs all steps in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: 1000 * float(np.median(t)) for name, t in times.items()}


# --------------------------------------------------------------------------------------------------------------------
# 1. GPT


def gpt_steps() -> dict[str, Step]:
    config = nn.GPTConfig(VOCABULARY, TOKENS, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH)
    model = nn.GPT(config)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, TOKENS))
    loss = model.loss(ids, ids)
    loss.backward()
    steps: dict[str, Step] = {
        "tg.graph(loss).dot": lambda: (tg.graph(loss).dot, model)[0],
        "tg.graph(loss, fold=False).dot": lambda: tg.graph(loss, fold=False).dot,
        "tg.graph(loss, ops='separate').dot": lambda: tg.graph(loss, ops="separate").dot,
        "tg.graph(loss, depth=2).dot": lambda: tg.graph(loss, depth=2).dot,
    }
    if torch is not None and torchviz is not None:
        torch.set_num_threads(1)
        their_loss, parameters = torch_gpt(torch.from_numpy(ids))
        steps["torchviz.make_dot(loss).source"] = lambda: torchviz.make_dot(their_loss, params=parameters).source
    return steps


def torch_gpt(ids: Any) -> tuple[Any, dict[str, Any]]:
    """The same model in torch: its loss, and its parameters by name."""
    functional = torch.nn.functional

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
            self.c_attn, self.c_proj = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            self.fc, self.out = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            split = (1, TOKENS, HEADS, WIDTH // HEADS)
            q, k, v = (part.view(split).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2))
            heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(heads.transpose(1, 2).reshape(1, TOKENS, WIDTH))
            return x + self.out(functional.gelu(self.fc(self.ln_2(x)), approximate="tanh"))

    class GPT(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(TOKENS, WIDTH)
            self.h = torch.nn.ModuleList(Block() for _ in range(LAYERS))
            self.ln_f = torch.nn.LayerNorm(WIDTH)

        def forward(self, ids: Any) -> Any:
            x = self.wte(ids) + self.wpe(torch.arange(TOKENS))
            for block in self.h:
                x = block(x)
            return self.ln_f(x) @ self.wte.weight.T

    model = GPT()
    loss = functional.cross_entropy(model(ids)[0], ids[0])
    return loss, dict(model.named_parameters())


# --------------------------------------------------------------------------------------------------------------------
# 2. A long chain


def chain_steps() -> dict[str, Step]:
    y = x = tg.Tensor([1.0], requires_grad=True)
    for _ in range(100_000):
        y = y * x

    def refuse() -> None:
        try:
            tg.graph(y)
        except GraphTooLargeError:
            return
        raise AssertionError("a chain of 100 000 operations was not refused")

    return {"refusal of 100 000 operations": refuse}


# --------------------------------------------------------------------------------------------------------------------
# 3. Attention


def attention_steps() -> dict[str, Step]:
    rng = np.random.default_rng(0)
    mha = nn.MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, rng=0)
    y = mha.per_head(tg.Tensor(rng.normal(size=(3, 5)), requires_grad=True, name="X"), causal=True)
    y.backward(rng.normal(size=y.shape))
    graph = tg.graph(y)
    steps: dict[str, Step] = {"two-head attention, DOT": lambda: (tg.graph(y).dot, mha)[0]}
    nodes = [node.id for node in graph.picture.nodes]
    for engine, find in engines.ENGINES.items():
        try:
            found = find()
        except engines.EngineFailedError:
            continue
        if found is not None:
            for format in ("svg", "png"):
                steps[f"two-head attention, {format.upper()} by {engine}"] = lambda format=format, engine=engine: (
                    engines.render(graph.dot, format, nodes, engine)
                )
    return steps


# --------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="how many times each step is measured")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    arguments = parser.parse_args()

    figures = medians(gpt_steps(), arguments.rounds)
    figures |= medians(chain_steps(), max(1, arguments.rounds // 5))
    figures |= medians(attention_steps(), max(1, arguments.rounds // 4))

    width = max(map(len, figures))
    for name, milliseconds in figures.items():
        print(f"{name:{width}}  {milliseconds:8.1f} ms")
    if arguments.json:
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        if torch is not None:
            versions["torch"] = torch.__version__
        arguments.json.write_text(json.dumps({"versions": versions, "milliseconds": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
