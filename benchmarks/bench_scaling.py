"""Time training steps on more threads and MPI ranks, and compute where more ranks stop paying.

    python benchmarks/bench_scaling.py [--rounds 3] [--json results.json] [--markdown]

Every way to share a step runs in processes of its own, in turns; the medians count. Ranks need the extra `mpi`.

1. step: a whole training step (batch, forward, backward, clipping, AdamW) of nanoGPT's configuration for a CPU, and
   of a model of 6 layers, 384 wide: one thread; BLAS on two; two workers; two ranks.
2. allreduce: the time of one Allreduce of one number, and of as many bytes as the gradients have.
3. cluster: seconds per step on paper, for links of 10 and 100 Gbit/s. `--markdown` fills the numbers into scaling.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")

MODELS: dict[str, dict[str, Any]] = {
    "nanogpt": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12},
    "wide": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 2},
}
STEPS = {"nanogpt": 25, "wide": 4}

# Name: ranks, workers of each, threads of BLAS (of a single worker).
WAYS = {"one thread": (1, 1, 1), "BLAS on 2": (1, 1, 2), "2 workers": (1, 2, 2), "2 ranks": (2, 1, 2)}

# A link: seconds for a message to start, and bytes per second.
LINKS = {"10 Gbit/s": (30e-6, 10e9 / 8), "100 Gbit/s": (5e-6, 100e9 / 8)}


# --------------------------------------------------------------------------------------------------------------------
# In a process of its own


def time_steps(model: str, workers: int) -> dict[str, Any]:
    """The median seconds of a step of this process, and of its Allreduce if there are several ranks."""
    import numpy as np

    from tinygrad_mha.training import Run, TrainConfig

    text = "".join(map(chr, np.random.default_rng(0).integers(48, 48 + 65, size=20_000)))
    run = Run(TrainConfig(**MODELS[model], sample_interval=0), text, workers=workers)
    seconds = []
    with run.workers.limit_blas():
        for _ in range(3 + STEPS[model]):
            start = time.perf_counter()
            run.update()
            seconds.append(time.perf_counter() - start)
    result = {"step": statistics.median(seconds[3:]), "computing": run.workers.summary, "bytes": 4 * run.model.count()}
    comm = run.workers.comm
    if comm.size > 1:
        for name, size in (("latency", 1), ("allreduce", run.model.count())):
            ours, total, times = np.ones(size, np.float32), np.empty(size, np.float32), []
            for _ in range(50):
                comm.Barrier()
                start = time.perf_counter()
                comm.Allreduce(ours, total)
                times.append(time.perf_counter() - start)
            result[name] = statistics.median(times)
    return result if comm.rank == 0 else {}


# --------------------------------------------------------------------------------------------------------------------
# Measuring


def measure(rounds: int) -> dict[str, Any]:
    """Run every way of every model in turns; the medians over the rounds."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {model: {} for model in MODELS}
    for _ in range(rounds):
        for model in MODELS:
            for way, (ranks, workers, blas) in WAYS.items():
                if ranks > 1 and MPIEXEC is None:
                    continue
                launcher = [MPIEXEC, "-n", str(ranks)] if ranks > 1 else []
                command = [*launcher, sys.executable, __file__, "--child", model, str(workers)]
                environment = os.environ | {"OPENBLAS_NUM_THREADS": str(blas)}
                result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found[model].setdefault(way, []).append(json.loads(result.stdout))
    return {model: {way: merge(runs) for way, runs in ways.items()} for model, ways in found.items()}


def merge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of the numbers of several runs."""
    return {
        name: value if isinstance(value, str) else statistics.median(run[name] for run in runs)
        for name, value in runs[0].items()
    }


# --------------------------------------------------------------------------------------------------------------------
# On paper


def predict(seconds: float, n_bytes: int, latency: float, bandwidth: float, ranks: int) -> float:
    """The seconds of a step on `ranks` machines that share one batch: work, and a ring Allreduce of the gradients."""
    messages = 2 * (ranks - 1)
    return seconds / ranks + messages * (latency + n_bytes / ranks / bandwidth)


def predict_all(results: dict[str, Any]) -> dict[str, Any]:
    """The predicted speedup by model, link and number of ranks, and the number at which a step is shortest."""
    table: dict[str, Any] = {}
    for model, ways in results.items():
        best = min(ways[way]["step"] for way in ways if WAYS[way][0] == 1)
        for link, (latency, bandwidth) in LINKS.items():
            times = {n: predict(best, ways["one thread"]["bytes"], latency, bandwidth, n) for n in range(1, 1025)}
            speedups = {n: times[1] / times[n] for n in (2, 4, 8, 16, 64)}
            fastest = min(times, key=lambda n: times[n])
            table[f"{model}, {link}"] = {"speedup": speedups, "fastest": fastest, "most": times[1] / times[fastest]}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        result = time_steps(args.child[0], int(args.child[1]))
        if result:
            print(json.dumps(result))
        return
    results = measure(args.rounds)
    print(json.dumps({"measured": results, "predicted": predict_all(results)}, indent=1))


if __name__ == "__main__":
    main()
