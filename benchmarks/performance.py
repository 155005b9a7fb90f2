"""Measure this package against PyTorch and transformers, and write the table, the plots and docs/performance.md.

    python benchmarks/performance.py [--rounds 9] [--only nanogpt,import] [--baseline DIR] [--docs]

Every library runs in a process of its own (worker.py), and one runs at a time. A round runs each of them once, in turn.
The ratio of a round is ours / theirs; the table shows the median of the rounds. Both get the same weights, batches
and number of threads, and their results are compared before anything is timed. `--baseline DIR` also measures another
checkout of this package. `--only` measures some parts and keeps the others of performance.json, so that a run can be
made in pieces. `--docs` writes docs/performance.md and its plot from that file.

Peers: `pip install "tinygrad_mha[fast,bench,parity,plot]"`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bench_scaling
import numpy as np
from safetensors.numpy import save_file

from tinygrad_mha import nn

HERE = Path(__file__).resolve().parent
SIDES = ("fast", "numpy", "baseline", "peer")
NANO = {"vocab_size": 65, "block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128}
SHAPES = {  # nanoGPT's: no biases, exact GELU
    "tiny": {"vocab_size": 27, "block_size": 16, "n_layer": 1, "n_head": 4, "n_embd": 16},
    "nanogpt": NANO,
    "six384": {"vocab_size": 65, "block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384},
}
FOLDERS = {  # what transformers opens
    "gpt2-nano": NANO,
    "llama-260k": {"vocab_size": 512, "block_size": 512, "n_layer": 5, "n_head": 8, "n_kv_head": 4, "n_embd": 64}
    | {"n_inner": 172, "norm": "rms", "activation": "swiglu", "position": "rotary", "bias": False},
    "gpt2-124m": {"vocab_size": 50257, "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768},
}


@dataclass
class Row:
    """One row of the table: a work, its options, and the ratios to reach with and without compiled kernels."""

    title: str
    work: str
    options: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    targets: tuple[float | None, float | None] = (None, None)
    peer: str = "torch"
    ours: dict[str, Any] = field(default_factory=dict)  # further options of the fast side
    floor: str = ""  # the work that only multiplies matrices, or only calls NumPy
    tokens: int = 0  # report tokens per second, and ratios of speed
    limit: str = ""  # what keeps the time up, for the page if a target is missed


SMALL = (
    "The arrays are so small that the time is that of Python and of NumPy's calls, about a microsecond each; "
    "`engine.py`, `primitives.py` and `tensors.py` are the bookkeeping of the graph."
)
LARGE = (
    "NumPy multiplies with OpenBLAS, PyTorch with MKL; between the products, each operation of NumPy is a pass through "
    "memory, and on one core."
)
TOKEN = (
    "A token is 17 products with weights of 3 MB, which a core of this machine does not keep in its cache (0.1 ms), "
    "some 300 other calls of NumPy of 0.2 to 1 µs each, and 450 calls of Python functions: modules, primitives, the "
    "cache, the loop. The floor is the same without these functions."
)
STREAM = "Each token reads all weights once, which bounds its speed."
ROWS = {
    "attention": Row(
        "two-head attention 3x5, forward and backward",
        "attention",
        targets=(0.40, 0.45),
        floor="attention_calls",
        limit=SMALL,
    ),
    "attention-module": Row(
        "the same attention as a module",
        "attention_module",
        targets=(0.40, 0.45),
        floor="attention_calls",
        limit=SMALL,
    ),
    "tiny": Row(
        "GPT of 1 layer, 16 wide: AdamW step",
        "train",
        {"folder": "tiny", "batch": 1},
        targets=(0.40, 0.50),
        limit=SMALL,
    ),
    "nanogpt": Row(
        "nanoGPT for CPUs: AdamW step",
        "train",
        {"folder": "nanogpt", "batch": 12},
        targets=(1.00, 1.30),
        floor="train_products",
        limit=LARGE,
    ),
    "nanogpt-2": Row(
        "nanoGPT for CPUs: AdamW step",
        "train",
        {"folder": "nanogpt", "batch": 12},
        2,
        (1.05, 1.55),
        ours={"workers": 2},
        floor="train_products",
        limit=LARGE,
    ),
    "six384-2": Row(
        "6 layers, 384 wide, block 256: AdamW step",
        "train",
        {"folder": "six384", "batch": 2},
        2,
        (1.10, 1.50),
        ours={"workers": 2},
        floor="train_products",
        limit=LARGE,
    ),
    "decode-nano": Row(
        "cached greedy decoding, nanoGPT's size",
        "generate",
        {"folder": "gpt2-nano", "prompt": 16, "new": 48},
        targets=(3.5, 3.5),
        peer="transformers",
        floor="decode_calls",
        limit=TOKEN,
        tokens=48,
    ),
    "decode-llama": Row(
        "cached greedy decoding, Llama of 260 thousand parameters",
        "generate",
        {"folder": "llama-260k", "prompt": 16, "new": 64},
        targets=(2.5, 2.5),
        peer="transformers",
        limit=SMALL,
        tokens=64,
    ),
    "decode-own": Row(
        "cached greedy decoding, an attention of your own",
        "generate_own",
        {"prompt": 16, "new": 48},
        targets=(1.8, 1.8),
        peer="baseline",
        tokens=48,
    ),
    "decode-124m": Row(
        "cached greedy decoding, GPT-2 of 124 million parameters",
        "generate",
        {"folder": "gpt2-124m", "prompt": 16, "new": 64},
        targets=(1.25, 1.2),
        peer="transformers",
        floor="decode_products",
        limit=STREAM,
        tokens=64,
    ),
    "prefill-124m": Row(
        "512 tokens read at once, GPT-2 of 124 million parameters",
        "prefill",
        {"folder": "gpt2-124m", "tokens": 512},
        targets=(1.0, 1.3),
        peer="transformers",
        limit=LARGE,
    ),
}
LONG = ("six384-2", "decode-124m", "prefill-124m")  # fewer rounds
PROFILED = ("attention", "attention-module", "tiny", "nanogpt", "nanogpt-2", "six384-2", "decode-nano", "decode-llama")


class Worker:
    """A process that runs the works of one side; see worker.py."""

    def __init__(self, side: str, threads: int, baseline: Path | None = None) -> None:
        pools = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
        environment = os.environ | {name: str(threads) for name in pools} | {"OMP_WAIT_POLICY": "PASSIVE"}
        environment["TINYGRAD_MHA_KERNELS"] = "numba" if side == "fast" else "numpy"
        root = baseline if side == "baseline" else HERE.parent
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{HERE}"
        library = "peer" if side == "peer" else "ours"
        command = [sys.executable, str(HERE / "worker.py"), library]
        self._process = subprocess.Popen(
            command, env=environment, cwd=HERE, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker stopped at {request}; its error is above")
        return json.loads(answer)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def measure(
    row: Row, folders: Path, rounds: int, baseline: Path | None = None, workers: dict[str, Worker] | None = None
) -> dict[str, Any]:
    """Compare the results of all sides, then time them in turn. Returns the numbers of a row.

    `workers` are processes to measure with, by side; without them new ones are started.
    """
    if workers is None:
        with ExitStack() as stack:
            sides = [side for side in SIDES if has_side(side, row, baseline)] + ["floor"] * bool(row.floor)
            started = {side: stack.enter_context(Worker(side, row.threads, baseline)) for side in sides}
            return measure(row, folders, rounds, baseline, started)
    answers, repeats = {}, {}
    for side, worker in workers.items():
        answers[side] = worker.ask(**make_request(row, side, folders))
        worker.ask(repeat=1)
        repeats[side] = max(1, int(LEAST / worker.ask(repeat=1)["seconds"]))
    compare_results({side: answer["results"] for side, answer in answers.items() if side != "floor"})
    seconds: dict[str, list[float]] = {side: [] for side in workers}
    for _ in range(rounds):
        for side, worker in workers.items():
            if row.threads > 1:
                time.sleep(0.3)  # the threads of the side before stop spinning
            answer = worker.ask(repeat=repeats[side])
            seconds[side].append(answer["seconds"] / repeats[side])
            answers[side] |= answer
    peer = seconds.get("peer", seconds.get("baseline"))
    ours = [side for side in SIDES if side in workers]
    return {
        "seconds": {side: float(np.median(s)) for side, s in seconds.items()},
        "ratios": {side: float(np.median(np.divide(s, peer))) for side, s in seconds.items()} if peer else {},
        "faults": {side: answers[side]["faults"] / repeats[side] for side in ours},
        "memory_mb": {side: answers[side]["peak_mb"] - answers[side]["import_mb"] for side in ours},
        "process_mb": {side: answers[side]["peak_mb"] for side in ours},
        "versions": {
            name: version
            for side, answer in answers.items()
            if side != "baseline"
            for name, version in answer["versions"].items()
        },
    }


LEAST = 0.05  # seconds of a measurement: quicker works are repeated


def make_request(row: Row, side: str, folders: Path) -> dict[str, Any]:
    """What to ask the worker of a side for, so that it makes the work of a row."""
    options = row.options | (row.ours if side == "fast" else {})
    if "folder" in options:
        options["folder"] = str(folders / options["folder"])
    return {"work": row.floor if side == "floor" else row.work, "options": options}


def has_side(side: str, row: Row, baseline: Path | None) -> bool:
    if side == "baseline":
        return baseline is not None
    return side != "peer" or row.peer != "baseline"


def compare_results(results: dict[str, list[float]]) -> None:
    """Raise AssertionError unless all sides computed the same: tokens, losses of three steps, logits or gradients."""
    expected = next(iter(results.values()))
    for side, numbers in results.items():
        np.testing.assert_allclose(numbers, expected, rtol=2e-3, atol=2e-4, err_msg=side)


def measure_import(rounds: int) -> dict[str, Any]:
    """The seconds of importing this package and torch, each in a new process, in turn, from compiled files.

    The first round, which is not counted, writes the files that an installation compiles.
    """
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds: dict[str, list[float]] = {"tinygrad_mha": [], "torch": []}
    code = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    for _ in range(rounds + 1):
        for name, times in seconds.items():
            command = [sys.executable, "-c", code.format(name)]
            times.append(float(subprocess.check_output(command, env=environment, cwd=HERE)))
    ours, theirs = seconds["tinygrad_mha"][1:], seconds["torch"][1:]
    ratio = float(np.median(np.divide(ours, theirs)))
    return {"seconds": {"fast": np.median(ours), "peer": np.median(theirs)}, "ratios": {"fast": ratio}}


def measure_demo() -> float:
    """The seconds of `tinygrad-mha demo`."""
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tinygrad_mha", "demo"]
        subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


# --------------------------------------------------------------------------------------------------------------------
# Growth

SWEEPS: dict[str, tuple[str, list[int]]] = {
    "tokens": ("block_size", [16, 32, 64, 128, 256, 512]),
    "width": ("n_embd", [32, 64, 128, 256, 512]),
    "layers": ("n_layer", [1, 2, 4, 8]),
}
BASE = {"vocab_size": 65, "block_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 64}


def measure_sweep(name: str, folders: Path, rounds: int) -> dict[str, Any]:
    """The seconds of a training step of 4 rows against a size, and the exponent of its last doubling."""
    option, sizes = SWEEPS[name]
    seconds: dict[str, list[float]] = {"fast": [], "numpy": [], "peer": []}
    with ExitStack() as stack:
        workers = {side: stack.enter_context(Worker(side, 1)) for side in seconds}
        for size in sizes:
            write_weights(folders / f"{name}-{size}", BASE | {option: size})
            row = Row(f"{name} {size}", "train", {"folder": f"{name}-{size}", "batch": 4})
            for side, value in measure(row, folders, rounds, workers=workers)["seconds"].items():
                seconds[side].append(value)
    exponents = {side: float(np.log2(t[-1] / t[-2])) for side, t in seconds.items()}
    return {"sizes": sizes, "seconds": seconds, "exponents": exponents}


def measure_positions(folders: Path, rounds: int, new: int = 8) -> dict[str, Any]:
    """The seconds of one more token at several positions, with the cache and without it."""
    positions = [32, 64, 128, 256, 500]
    write_folder(folders / "gpt2-long", NANO | {"block_size": 512})
    result: dict[str, Any] = {"positions": positions}
    with ExitStack() as stack:
        workers = {side: stack.enter_context(Worker(side, 1)) for side in ("fast", "peer")}
        for use_cache in (True, False):
            seconds: dict[str, list[float]] = {side: [] for side in workers}
            for prompt in positions:
                times = {}
                for count in (1, 1 + new):
                    options = {"folder": "gpt2-long", "prompt": prompt, "new": count, "use_cache": use_cache}
                    times[count] = measure(Row("", "generate", options), folders, rounds, workers=workers)["seconds"]
                for side, values in seconds.items():
                    values.append((times[1 + new][side] - times[1][side]) / new)
            result["cached" if use_cache else "uncached"] = seconds
    return result


def measure_profile(row: Row, folders: Path) -> dict[str, float]:
    """The share of the time of a step in each file of the package, with compiled kernels, the largest first."""
    with Worker("fast", row.threads) as worker:
        worker.ask(**make_request(row, "fast", folders))
        worker.ask(repeat=3)
        return worker.ask(profile=2.0)["shares"]


# --------------------------------------------------------------------------------------------------------------------
# Files


def write_weights(folder: Path, shape: dict[str, int]) -> None:
    """Random weights by GPT-2's names, and the configuration, for the training works of both sides."""
    config = shape | {"bias": False, "activation": "gelu"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    state = {name: np.asarray(a) for name, a in nn.GPT(nn.GPTConfig(**config), seed=0).state_dict().items()}
    save_file(state, folder / "model.safetensors")


def write_folder(folder: Path, shape: dict[str, Any]) -> None:
    """Random weights in a folder that transformers opens."""
    nn.GPT(nn.GPTConfig(**shape), seed=0).save_pretrained(folder)


def describe_machine() -> dict[str, str]:
    models = [line.split(":")[1].strip() for line in read_lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "machine": f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores",
        "system": f"{platform.system()}, Python {platform.python_version()}",
    }


def read_lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


# --------------------------------------------------------------------------------------------------------------------
# Output


def format_row(row: Row, measured: dict[str, Any]) -> list[str]:
    """The cells of a row: work, threads, peer, ours fast and NumPy alone (ratio and target), floor, baseline."""
    seconds, ratios = measured["seconds"], measured["ratios"]

    def cell(side: str, target: float | None) -> str:
        if side not in ratios:
            return show(seconds[side], row.tokens) if side in seconds else ""
        value = ratio_of(row, ratios[side])
        goal = "" if target is None else f" ({'≥' if row.tokens else '≤'} {target:.2f})"
        return f"{show(seconds[side], row.tokens)}, **{value:.2f}**{goal}"

    peer = "peer" if "peer" in seconds else "baseline"
    theirs = f"{row.peer} {show(seconds[peer], row.tokens)}" if peer in seconds else ""
    cells = [row.title, str(row.threads), theirs, cell("fast", row.targets[0]), cell("numpy", row.targets[1])]
    return [*cells, show(seconds["floor"], row.tokens) if "floor" in seconds else "", cell("baseline", None)]


def show(seconds: float, tokens: int = 0) -> str:
    if tokens:
        return f"{tokens / seconds:,.0f} tok/s".replace(",", " ")
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 0.9995:  # rounds to 1
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


HEADER = ["work", "threads", "peer", "with `fast`", "NumPy alone", "floor", "baseline"]


def make_table(results: dict[str, Any]) -> str:
    rows = [format_row(ROWS[key], results["rows"][key]) for key in ROWS if key in results.get("rows", {})]
    kept = [i for i, title in enumerate(HEADER) if title != "baseline" or any(row[i] for row in rows)]
    lines = [[HEADER[i] for i in kept], ["---"] * len(kept), *[[row[i] for i in kept] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot_growth(results: dict[str, Any], path: Path) -> None:
    """Step time against size, and the time of a token against its position."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "0", "font.size": 9}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(12, 3), layout="constrained")
    styles = {"fast": ("tinygrad_mha, fast", "C0"), "numpy": ("tinygrad_mha, NumPy", "C9"), "peer": ("PyTorch", "C1")}
    for axis, (name, sweep) in zip(axes, results["growth"].items(), strict=False):
        for side, times in sweep["seconds"].items():
            label, color = styles[side]
            axis.loglog(sweep["sizes"], np.multiply(times, 1e3), "o-", ms=3, color=color, label=label)
        axis.set(xlabel=name, ylabel="ms per training step")
        axis.set_xticks(sweep["sizes"], [str(n) for n in sweep["sizes"]], minor=False)
        axis.minorticks_off()
    axes[0].legend(frameon=False)
    positions = results["positions"]
    for kind, line in (("cached", "o-"), ("uncached", "o:")):
        for side, times in positions[kind].items():
            label = {"fast": "tinygrad_mha", "peer": "transformers"}[side]
            color = styles[side][1]
            axes[3].semilogy(
                positions["positions"], np.multiply(times, 1e3), line, ms=3, color=color, label=f"{label}, {kind}"
            )
    axes[3].set(xlabel="position", ylabel="ms per token")
    axes[3].legend(frameon=False, fontsize=7)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="how often each side is timed")
    parser.add_argument("--only", default="", help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="another checkout of this package")
    parser.add_argument("--json", type=Path, default=Path("performance.json"))
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md and its plot")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else PARTS
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only: unknown {sorted(unknown)}")
    if lacking := [name for name in ("torch", "transformers", "numba") if find_spec(name) is None]:
        parser.error(f'{", ".join(lacking)} is needed: pip install ".[parity,fast]"')
    results: dict[str, Any] = json.loads(args.json.read_text()) if args.only and args.json.exists() else {}
    results |= {"machine": describe_machine(), "rounds": args.rounds}
    with tempfile.TemporaryDirectory() as folder:
        for part in wanted:
            if part in ROWS and ROWS[part].peer == "baseline" and args.baseline is None:
                continue
            measure_part(part, results, Path(folder), args.rounds, args.baseline)
            args.json.write_text(json.dumps(results, indent=1, default=float) + "\n")
    print(f"\n{make_table(results)}\n\nwritten to {args.json}")
    if args.docs:
        write_page(results)


PARTS = (*ROWS, *SWEEPS, "positions", "profile", "import", "demo", "scaling")


def measure_part(part: str, results: dict[str, Any], folders: Path, rounds: int, baseline: Path | None) -> None:
    """Measure one part, print a line, and enter the numbers into `results`."""
    few = max(1, rounds // 3)
    if part in ROWS:
        row = ROWS[part]
        write_files(row, folders)
        measured = measure(row, folders, few if part in LONG else rounds, baseline)
        results.setdefault("versions", {}).update(measured.pop("versions"))
        results.setdefault("rows", {})[part] = measured
        line = " | ".join(cell for cell in format_row(row, measured) if cell)
    elif part in SWEEPS:
        results.setdefault("growth", {})[part] = sweep = measure_sweep(part, folders, few)
        line = f"{part}: {sweep['exponents']}"
    elif part == "positions":
        results[part] = measure_positions(folders, few)
        line = f"{part}: {results[part]}"
    elif part == "profile":
        for key in PROFILED:
            write_files(ROWS[key], folders)
            results.setdefault(part, {})[key] = measure_profile(ROWS[key], folders)
        line = f"{part}: {results[part]}"
    elif part == "import":
        results[part] = measure_import(rounds)
        line = f"{part}: {results[part]}"
    elif part == "demo":
        results[part] = measure_demo()
        line = f"{part}: {results[part]:.1f} s"
    else:
        results[part] = bench_scaling.write_text(bench_scaling.measure(max(1, rounds // 4)))
        line = f"{part}: measured"
    print(line, flush=True)


def write_files(row: Row, folders: Path) -> None:
    """Write the weights that the works of a row read, unless they are there."""
    folder = row.options.get("folder", "")
    if folder in SHAPES:
        write_weights(folders / folder, SHAPES[folder])
    elif folder and not (folders / folder).exists():
        write_folder(folders / folder, FOLDERS[folder])


def write_page(results: dict[str, Any]) -> None:
    """Fill benchmarks/performance_page.md with the numbers of all parts, with or without a baseline."""
    found = {*results["rows"], *results.get("growth", {}), *results}
    if missing := [part for part in PARTS if part not in found and part != "decode-own"]:
        sys.exit(f"the page needs all parts: run with --only {','.join(missing)} --docs")
    docs, memory, positions = HERE.parent / "docs", results["rows"]["nanogpt"], results["positions"]
    names = {"fast": "with `fast`", "numpy": "NumPy alone", "peer": "PyTorch"}
    plot_growth(results, docs / "images" / "performance.svg")
    fields = results["machine"] | {
        "versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
        "table": make_table(results),
        "missed": describe_missed(results),
        "import_ratio": f"{results['import']['ratios']['fast']:.2f}",
        "demo": show(results["demo"]),
        "memory": "\n".join(
            f"| {name} | {memory['faults'][side]:.0f} | {memory['memory_mb'][side]:.0f} MB "
            f"| {memory['process_mb'][side]:.0f} MB |"
            for side, name in names.items()
        ),
        "growth": "\n".join(
            f"| {name} | " + " | ".join(f"{sweep['exponents'][side]:.2f}" for side in names) + " |"
            for name, sweep in results["growth"].items()
        ),
        "decoding": "\n".join(
            f"| {position} | "
            + " | ".join(show(positions[kind][side][i]) for side in ("fast", "peer") for kind in KINDS)
            + " |"
            for i, position in enumerate(positions["positions"])
        ),
        "scaling": results["scaling"],
    }
    (docs / "performance.md").write_text((HERE / "performance_page.md").read_text().format(**fields))


KINDS = ("cached", "uncached")


def describe_missed(results: dict[str, Any]) -> str:
    """A paragraph for each row that misses a target: by how much, where its time goes, and why."""
    lines = []
    for key, row in ROWS.items():
        ratios = results["rows"].get(key, {}).get("ratios", {})
        missed = [
            f"{value:.2f} instead of {target:.2f} {name}"
            for side, name, target in zip(
                ("fast", "numpy"), ("with `fast`", "with NumPy alone"), row.targets, strict=True
            )
            if target and side in ratios and not reaches(value := ratio_of(row, ratios[side]), target, row)
        ]
        if missed:
            shares = results["profile"].get(key, {})
            profile = ", ".join(f"`{name}` {100 * share:.0f} %" for name, share in list(shares.items())[:6])
            facts = [f"{' and '.join(missed)}.", f"Time with `fast`: {profile}." if profile else ""]
            if row.floor:
                facts.append(f"The floor is {ratio_of(row, ratios['floor']):.2f} by the same measure.")
            text = " ".join(fact for fact in [*facts, row.limit] if fact)
            lines.append(f"- **{row.title}**, threads: {row.threads}: {text}")
    return "\n".join(lines) or "None."


def ratio_of(row: Row, ratio: float) -> float:
    """The ratio that the table shows: of times, or of speeds for decoding."""
    return 1 / ratio if row.tokens else ratio


def reaches(ratio: float, target: float, row: Row) -> bool:
    return round(ratio, 2) >= target if row.tokens else round(ratio, 2) <= target


if __name__ == "__main__":
    main()
