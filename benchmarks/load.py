"""Large inputs, long runs, threads, processes and interpreters: python benchmarks/load.py [--only NAME ...].

Every entry checks that the result is right and reports what it cost. None of them is timed against a limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import tinygrad_mha as tg

Figures = dict[str, Any]
SMALL = {"vocab_size": 17, "block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 8}


def resident_megabytes() -> float:
    """The memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def make_gpt(seed: int = 0, **options: Any) -> tg.nn.GPT:
    return tg.nn.GPT(tg.nn.GPTConfig(**{**SMALL, **options}), seed=seed)


def long_graph() -> Figures:
    """A chain of 100 000 operations: forward, backward, and freeing it again."""
    x = tg.Tensor(np.ones(3), requires_grad=True)
    y = x
    for _ in range(50_000):
        y = y * 1.0001 + 0.001
    y.backward(np.ones(3), leaves_only=True)
    assert np.allclose(x.grad, 1.0001**50_000, rtol=1e-9)
    del y
    return {"operations": 100_000}


def flat_memory() -> Figures:
    """10 000 training steps without the garbage collector: memory after 1 000 and after all of them."""
    model, rng = make_gpt(), np.random.default_rng(0)
    optimizer = tg.optim.AdamW(model.parameters(), lr=1e-3)
    gc.collect()
    gc.disable()
    at: dict[int, float] = {}
    for step in range(1, 10_001):
        idx = rng.integers(0, 17, (2, 9))
        optimizer.zero_grad()
        model.loss(idx[:, :-1], idx[:, 1:]).backward(leaves_only=True)
        tg.optim.clip_grad_norm(optimizer.parameters, 1.0)
        optimizer.step()
        if step in (1_000, 10_000):
            at[step] = resident_megabytes()
    gc.enable()
    growth = at[10_000] - at[1_000]
    assert growth < 5, f"memory grew by {growth} MB"
    return {"steps": 10_000, "megabytes": round(at[10_000], 1), "growth in megabytes": round(growth, 2)}


def many_drawings() -> Figures:
    """1 000 pictures of one attention: equal text, and memory that stays."""
    layer = tg.nn.MultiHeadAttention(5, 2, 7, 11, rng=0)
    y = layer(tg.Tensor(np.random.default_rng(0).standard_normal((3, 5)), requires_grad=True), causal=True)
    first = tg.graph(y).dot
    for i in range(1_000):
        assert tg.graph(y).dot == first
        if i == 100:
            before = resident_megabytes()
    growth = resident_megabytes() - before
    assert growth < 5, f"memory grew by {growth} MB"
    return {"drawings": 1_000, "growth in megabytes": round(growth, 2)}


def long_text() -> Figures:
    """A text of 200 000 tokens: encoded, decoded and trained on for ten steps."""
    text = ("the quick brown fox jumps over a lazy dog. " * 5_000)[:200_000]
    tokenizer = tg.data.CharTokenizer.of(text)
    ids = tokenizer.encode(text)
    assert len(ids) == 200_000
    assert tokenizer.decode(ids) == text
    with tempfile.TemporaryDirectory() as folder:
        config = tg.training.TrainConfig(
            n_layer=1, n_head=2, n_embd=8, block_size=16, batch_size=2, steps=10, checkpoint_interval=10
        )
        tg.training.train(config, text, Path(folder, "run"), show="quiet")
    return {"tokens": 200_000}


def sliding() -> Figures:
    """10 000 tokens from a context of 16: each equals the token of a call on the last 16 alone."""
    model = make_gpt().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the context is full is what is wanted here
        ids = tg.generate(model, [1, 2, 3], 10_000, temperature=0, on_full="slide")[0]
    with tg.no_grad():
        for i in np.random.default_rng(0).integers(16, 10_003, 200):
            assert ids[i] == model(ids[i - 16 : i]).numpy()[-1].argmax()
    return {"tokens": 10_000, "checked": 200}


def train_losses(seed: int) -> list[float]:
    model, rng, losses = make_gpt(seed, dropout=0.1), np.random.default_rng(seed), []
    optimizer = tg.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        idx = rng.integers(0, 17, (2, 9))
        optimizer.zero_grad()
        loss = model.loss(idx[:, :-1], idx[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def threads() -> Figures:
    """Two threads that train two models at once, with the losses of each alone, bit for bit."""
    alone = [train_losses(seed) for seed in (1, 2)]
    found: dict[int, list[float]] = {}
    workers = [threading.Thread(target=lambda s=s: found.update({s: train_losses(s)})) for s in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [found[1], found[2]] == alone
    return {"threads": 2, "steps each": 100}


def processes() -> Figures:
    """Processes that are forked and spawned from one that has trained, with its losses, bit for bit."""
    expected = train_losses(1)
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(train_losses, [1, 1]) == [expected] * 2
    return {"methods": "fork, spawn"}


SCRIPT = """
import numpy as np, tinygrad_mha as tg
layer = tg.nn.MultiHeadAttention(5, 2, 7, 11, rng=0)
x = tg.Tensor(np.random.default_rng(1).standard_normal((3, 5)), requires_grad=True)
y = layer(x, causal=True)
y.backward(np.ones((3, 5)))
assert tg.gradcheck(layer, x.numpy()).ok
assert tg.check.attention(layer, causal=True).ok
assert "digraph" in tg.graph(y).dot
model = tg.nn.GPT(tg.nn.GPTConfig(vocab_size=7, block_size=8, n_layer=1, n_head=2, n_embd=4), seed=0)
tg.generate(model, [1, 2], 3, seed=0)
try:
    tg.nn.attention(x, x, x, allow=np.ones((2, 3)))
except (TypeError, ValueError):
    pass
else:
    raise SystemExit("a wrong mask was accepted")
print(np.__version__)
"""


def interpreters() -> Figures:
    """The options -O, -W error and -X dev, and every other Python and the oldest NumPy that can be had here."""
    root = Path(__file__).resolve().parent.parent
    environment = os.environ | {"PYTHONPATH": str(root)}
    for options in (["-O"], ["-W", "error"], ["-X", "dev"]):
        subprocess.run([sys.executable, *options, "-c", SCRIPT], env=environment, check=True, capture_output=True)
    found: dict[str, str] = {}
    wanted = [("3.11", "numpy==2.0.0"), *((f"3.{minor}", "numpy") for minor in (11, 12, 13, 14))]
    for version, numpy in wanted:
        label = f"Python {version}, {'oldest' if '==' in numpy else 'newest'} NumPy"
        python = find_python(version)
        if python is None:
            found[label] = "not here"
            continue
        with tempfile.TemporaryDirectory() as folder:
            venv = Path(folder, "venv")
            subprocess.run([python, "-m", "venv", venv], check=True)
            pip = [venv / "bin/pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, numpy, "graphviz", "safetensors", "tqdm"], check=True)
            run = subprocess.run(
                [venv / "bin/python", "-W", "error", "-c", SCRIPT], env=environment, capture_output=True, text=True
            )
            assert run.returncode == 0, f"{label}: {run.stderr}"
            found[label] = f"passed with NumPy {run.stdout.strip()}"
    return found


def find_python(version: str) -> str | None:
    """An interpreter of this version: `python3.12` on the path, or beside the others that pyenv keeps."""
    places = [f"python{version}", *sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")))]
    for place in places:
        try:
            code = "import sys; print('%d.%d' % sys.version_info[:2])"
            run = subprocess.run([place, "-c", code], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            continue
        if run.stdout.strip() == version:
            return place
    return None


ENTRIES: dict[str, Callable[[], Figures]] = {
    "graph": long_graph,
    "memory": flat_memory,
    "drawings": many_drawings,
    "text": long_text,
    "sliding": sliding,
    "threads": threads,
    "processes": processes,
    "interpreters": interpreters,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    result: dict[str, Figures] = {}
    for name in args.only:
        start = time.perf_counter()
        result[name] = {"what": ENTRIES[name].__doc__, **ENTRIES[name](), "seconds": 0.0}
        result[name]["seconds"] = round(time.perf_counter() - start, 1)
        print(name, {key: value for key, value in result[name].items() if key != "what"}, flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
