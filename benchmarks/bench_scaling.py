"""Time training steps on more threads and MPI ranks, and compute where more ranks stop paying.

    python benchmarks/bench_scaling.py [--rounds 3] [--json results.json] [--markdown scaling.md]

Every way to share a step runs in processes of its own, in turns; the medians count. Ranks need the extra `mpi`.

1. step: a whole training step (batch, forward, backward, clipping, AdamW) of nanoGPT's configuration for a CPU, and of
   a model of 6 layers, 384 wide: on one thread, with half of the rows, with BLAS on two threads, with two workers, and
   on two ranks.
2. allreduce: the time of one Allreduce of one number, and of as many bytes as the gradients have.
3. cluster: the time of a step on paper. `--markdown` writes the text of benchmarks/scaling.md with all numbers.
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

# The ways to share a step: ranks, workers of each, threads of BLAS, and the fraction of the batch that is used.
WAYS = {
    "one_thread": (1, 1, 1, 1.0),
    "half_batch": (1, 1, 1, 0.5),
    "two_blas_threads": (1, 1, 2, 1.0),
    "two_workers": (1, 2, 2, 1.0),
    "two_ranks": (2, 1, 2, 1.0),
}

# Seconds until a message arrives, and bytes per second: an ordinary network, and one for computation.
LINKS = {"10": (30e-6, 10e9 / 8), "100": (5e-6, 100e9 / 8)}


# --------------------------------------------------------------------------------------------------------------------
# In a process of its own


def time_steps(model: str, workers: int, fraction: float) -> dict[str, Any]:
    """The median seconds of a step of this process, and of its Allreduce if there are several ranks."""
    import numpy as np

    from tinygrad_mha.training import Run, TrainConfig

    options = {**MODELS[model], "batch_size": int(MODELS[model]["batch_size"] * fraction), "sample_interval": 0}
    text = "".join(map(chr, np.random.default_rng(0).integers(48, 48 + 65, size=20_000)))
    run = Run(TrainConfig(**options), text, workers=workers)
    seconds = []
    with run.workers.limit_blas():
        for _ in range(3 + STEPS[model]):
            start = time.perf_counter()
            run.update()
            seconds.append(time.perf_counter() - start)
    result = {"seconds": statistics.median(seconds[3:]), "computing": run.workers.summary}
    result["bytes"] = 4 * run.model.count()
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
    """{model: {way: medians over the rounds}}, all ways in turns."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for model in MODELS:
            for way, (ranks, workers, blas, fraction) in WAYS.items():
                if ranks > 1 and MPIEXEC is None:
                    continue
                launcher = [MPIEXEC, "-n", str(ranks)] if ranks > 1 else []
                child = [sys.executable, __file__, "--child", model, str(workers), str(fraction)]
                environment = os.environ | {"OPENBLAS_NUM_THREADS": str(blas), "MKL_NUM_THREADS": str(blas)}
                result = subprocess.run(
                    [*launcher, *child], env=environment, capture_output=True, text=True, check=True
                )
                runs.setdefault((model, way), []).append(json.loads(result.stdout))
    results: dict[str, Any] = {model: {} for model in MODELS}
    for (model, way), found in runs.items():
        results[model][way] = {name: median_of([run[name] for run in found]) for name in found[0]}
    return results


def median_of(values: list[Any]) -> Any:
    return values[0] if isinstance(values[0], str) else statistics.median(values)


# --------------------------------------------------------------------------------------------------------------------
# On paper


def predict(ways: dict[str, Any], rows: int, link: str, ranks: int, rows_per_rank: float) -> float:
    """The seconds of a step of `ranks` ranks, with a ring Allreduce; `rows` is the size of the measured batch."""
    latency, bandwidth = LINKS[link]
    fixed, per_row = split_seconds(ways, rows)
    messages = 2 * (ranks - 1)
    n_bytes = ways["one_thread"]["bytes"]
    return fixed + rows_per_rank * per_row + messages * (latency + n_bytes / ranks / bandwidth)


def split_seconds(ways: dict[str, Any], rows: int) -> tuple[float, float]:
    """The seconds of a step that do not depend on the rows, and those per row, from a whole and half a batch."""
    whole, half = ways["one_thread"]["seconds"], ways["half_batch"]["seconds"]
    fixed = max(2 * half - whole, 0.0)
    return fixed, (whole - fixed) / rows


def list_fields(results: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the text by the names they have in scaling.md."""
    fields: dict[str, Any] = {
        "computing": results["nanogpt"]["one_thread"]["computing"].split(",")[0].removeprefix("kernels: ")
    }
    for model, ways in results.items():
        rows = MODELS[model]["batch_size"]
        fixed, per_row = split_seconds(ways, rows)
        fields |= {f"{model}_{way}": f"{1e3 * numbers['seconds']:.1f}" for way, numbers in ways.items()}
        fields |= {
            f"{model}_{way}_ratio": f"{numbers['seconds'] / ways['one_thread']['seconds']:.2f}"
            for way, numbers in ways.items()
        }
        fields[f"{model}_fixed"], fields[f"{model}_per_row"] = f"{1e3 * fixed:.1f}", f"{1e3 * per_row:.2f}"
        fields[f"{model}_megabytes"] = f"{ways['one_thread']['bytes'] / 1e6:.1f}"
        fields[f"{model}_allreduce"] = f"{1e3 * ways['two_ranks']['allreduce']:.2f}"
        fields[f"{model}_latency"] = f"{1e6 * ways['two_ranks']['latency']:.1f}"
        for link, (_, bandwidth) in LINKS.items():
            alone = predict(ways, rows, link, 1, rows)
            for ranks in (2, 4, 12):
                if ranks <= rows:
                    fields[f"{model}_{link}_{ranks}"] = f"{alone / predict(ways, rows, link, ranks, rows / ranks):.1f}"
            for ranks in (16, 256):
                fields[f"{model}_{link}_weak_{ranks}"] = f"{100 * alone / predict(ways, rows, link, ranks, rows):.0f}"
            fields[f"{model}_{link}_equal"] = f"{2 * ways['one_thread']['bytes'] / bandwidth / per_row:.2f}"
    return fields


def write_text(results: dict[str, Any]) -> str:
    """The text of scaling.md with the measured and computed numbers."""
    return (HERE / "scaling.md").read_text(encoding="utf-8").format(**list_fields(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measured numbers")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the text with all numbers")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        result = time_steps(args.child[0], int(args.child[1]), float(args.child[2]))
        if result:
            print(json.dumps(result))
        return
    if MPIEXEC is None:
        sys.exit('bench_scaling.py needs MPI: pip install "tinygrad_mha[mpi]"')
    results = measure(args.rounds)
    print(json.dumps(results, indent=1))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(write_text(results), encoding="utf-8")


if __name__ == "__main__":
    main()
