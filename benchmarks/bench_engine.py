"""Time the engine and its peers in one run.

    python benchmarks/bench_engine.py [--rounds 60] [--json results.json]

The libraries take turns, round by round, on one thread each. The medians are compared, so that the speed of the machine
cancels. Peers that are not installed are left out; `pip install ".[bench]"` installs them.

1. attention: the two-head causal attention with X 3x5, W_Q and W_K 5x7, W_V 5x11, W_O 22x5, from single operations,
   forward and backward to all seven weights, float32. Making the leaves is not timed.
2. chain: 10 000 operations of one kind on 4x4 arrays, forward and backward, per operation.
3. size: one step of y = tanh(x @ w) * x forward and backward for n x n arrays, as n grows.
"""

from __future__ import annotations

import os

for pool in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(pool, "1")

import argparse
import gc
import importlib
import json
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from works_files import make_attention_arrays
from works_ours import make_ours_attention

import tinygrad_mha as tg

Step = Callable[[], Any]


def import_optional(name: str) -> Any:
    """The module, or None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


PEERS = {name: import_optional(name) for name in ("torch", "autograd", "mygrad")}
torch, autograd, mygrad = PEERS.values()
if torch is not None:
    torch.set_num_threads(1)


# --------------------------------------------------------------------------------------------------------------------
# 1. Two-head attention


def make_attention_steps() -> dict[str, Step]:
    w, x, g, allow = make_attention_arrays()
    steps = {"tinygrad_mha": make_ours_attention(w, x, g, allow)}
    if torch is not None:
        steps["torch"] = importlib.import_module("works_peer").make_torch_attention(w, x, g, allow)
    if autograd is not None:
        steps["autograd"] = make_autograd_attention(w, x, g, allow)
    if mygrad is not None:
        steps["mygrad"] = make_mygrad_attention(w, x, g, allow)
    gradients = {name: step() for name, step in steps.items()}
    for name, results in gradients.items():  # the times are comparable only if all compute the same
        for ours, theirs in zip(gradients["tinygrad_mha"], results, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-4, err_msg=name)
    return steps


def make_autograd_attention(w: dict[str, np.ndarray], x: np.ndarray, g: np.ndarray, allow: np.ndarray) -> Step:
    anp = importlib.import_module("autograd.numpy")
    names = list(w)

    def loss(arrays: list[Any]) -> Any:
        p = dict(zip(names, arrays, strict=True))
        heads = []
        for h in "12":
            q, k, v = anp.dot(x, p["Q" + h]), anp.dot(x, p["K" + h]), anp.dot(x, p["V" + h])
            scores = anp.where(allow, anp.dot(q, k.T) * 7**-0.5, -np.inf)
            e = anp.exp(scores - anp.max(scores, axis=-1, keepdims=True))
            heads.append(anp.dot(e / anp.sum(e, axis=-1, keepdims=True), v))
        return anp.sum(anp.dot(anp.concatenate(heads, axis=-1), p["O"]) * g)

    gradient = autograd.grad(loss)
    arrays = list(w.values())
    return lambda: gradient(arrays)


def make_mygrad_attention(w: dict[str, np.ndarray], x: np.ndarray, g: np.ndarray, allow: np.ndarray) -> Step:
    softmax = importlib.import_module("mygrad.nnet").softmax
    p = {name: mygrad.tensor(a) for name, a in w.items()}
    X = mygrad.tensor(x, constant=True)

    def step() -> list[np.ndarray]:
        heads = []
        for h in "12":
            q, k, v = X @ p["Q" + h], X @ p["K" + h], X @ p["V" + h]
            scores = mygrad.where(allow, (q @ k.T) * 7**-0.5, -np.inf)
            heads.append(softmax(scores, axis=-1) @ v)
        y = mygrad.concatenate(heads, axis=-1) @ p["O"]
        for t in p.values():
            t.null_grad()
        y.backward(g)
        return [t.grad for t in p.values()]

    return step


# --------------------------------------------------------------------------------------------------------------------
# 2. A long chain

KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda y, a: y + a,
    "mul": lambda y, a: y * a,
    "matmul": lambda y, a: y @ a,
    "tanh": lambda y, a: y.tanh(),
    "scale": lambda y, a: y * 0.999,
}


def time_chain(kind: str, library: str, length: int) -> tuple[float, float]:
    """The seconds of forward and of backward, per operation."""
    start = np.eye(4, dtype=np.float32)  # with an orthogonal factor, no product of the chain overflows
    one = np.ones((4, 4), np.float32)
    a = tg.Tensor(start, requires_grad=True) if library == "tinygrad_mha" else torch.tensor(start, requires_grad=True)
    g = one if library == "tinygrad_mha" else torch.tensor(one)
    f = KINDS[kind]
    t0 = time.perf_counter()
    y = a
    for _ in range(length):
        y = f(y, a)
    t1 = time.perf_counter()
    if library == "tinygrad_mha":
        y.backward(g, leaves_only=True)
    else:
        y.backward(g)
    t2 = time.perf_counter()
    return (t1 - t0) / length, (t2 - t1) / length


# --------------------------------------------------------------------------------------------------------------------
# 3. Cost against size


def make_size_steps(n: int) -> dict[str, Step]:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((n, n)).astype("f"), rng.standard_normal((n, n)).astype("f") / n
    g = np.ones((n, n), np.float32)
    xo, wo = tg.Tensor(x, requires_grad=True), tg.Tensor(w, requires_grad=True)

    def ours() -> None:
        xo.grad = wo.grad = None
        ((xo @ wo).tanh() * xo).backward(g, leaves_only=True)

    steps: dict[str, Step] = {"tinygrad_mha": ours}
    if torch is not None:
        xt, wt, gt = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True), torch.tensor(g)

        def theirs() -> None:
            xt.grad = wt.grad = None
            ((xt @ wt).tanh() * xt).backward(gt)

        steps["torch"] = theirs
    return steps


# --------------------------------------------------------------------------------------------------------------------
# Measuring


def time_in_turn(steps: dict[str, Step], rounds: int, target: float = 0.004) -> dict[str, float]:
    """The median seconds of each step over `rounds` rounds. In each round every step is timed once."""
    repeats = {}
    for name, step in steps.items():
        step()
        start = time.perf_counter()
        step()
        repeats[name] = max(1, int(target / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                step()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return {name: float(np.median(t)) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "numpy": np.__version__}
        | {name: getattr(m, "__version__", "?") for name, m in PEERS.items() if m is not None},
    }
    missing = [name for name, m in PEERS.items() if m is None]
    if missing:
        print(f"not installed, so left out: {', '.join(missing)}\n")

    print("attention 3x5, two heads, forward and backward")
    medians = time_in_turn(make_attention_steps(), args.rounds)
    ours = medians["tinygrad_mha"]
    results["attention_us"] = {name: t * 1e6 for name, t in medians.items()}
    for name, t in medians.items():
        print(f"  {name:14} {t * 1e6:8.1f} us" + (f"   ours / {name} = {ours / t:.2f}" if t is not ours else ""))

    print("\nchain of 10 000 operations on 4x4 arrays, us per operation (forward + backward)")
    results["chain_us"] = {}
    libraries = ["tinygrad_mha"] + (["torch"] if torch is not None else [])
    for kind in KINDS:
        rounds = {name: [] for name in libraries}
        for _ in range(max(5, args.rounds // 6)):
            for name in libraries:
                gc.collect()
                rounds[name].append(time_chain(kind, name, 10_000))
        medians = {name: (np.median(rounds[name], axis=0) * 1e6).tolist() for name in libraries}
        results["chain_us"][kind] = medians
        line = "   ".join(f"{name} {f:5.2f} + {b:5.2f} = {f + b:5.2f}" for name, (f, b) in medians.items())
        ratio = (
            f"   ours / torch = {sum(medians['tinygrad_mha']) / sum(medians['torch']):.2f}"
            if "torch" in medians
            else ""
        )
        print(f"  {kind:8} {line}{ratio}")

    if torch is not None:
        sums = {name: sum(sum(medians[name]) for medians in results["chain_us"].values()) for name in libraries}
        results["chain_ratio"] = sums["tinygrad_mha"] / sums["torch"]
        print(f"  all five together: ours / torch = {results['chain_ratio']:.2f}")

    print("\ntanh(x @ w) * x for n x n, forward and backward, us")
    results["size_us"] = {}
    for n in (2, 8, 32, 128, 512):
        medians = time_in_turn(make_size_steps(n), max(5, args.rounds // 4))
        results["size_us"][n] = {name: t * 1e6 for name, t in medians.items()}
        print(f"  n = {n:4} " + "   ".join(f"{name} {t * 1e6:9.1f}" for name, t in medians.items()))

    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
