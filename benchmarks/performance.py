"""Measure this package against PyTorch and transformers, and write the table, the plots and docs/performance.md.

    python benchmarks/performance.py [--rounds 9] [--only nanogpt,decode] [--baseline DIR] [--docs]

Every library runs in a process of its own (worker.py), and one runs at a time. A round runs each of them once, in turn.
The ratio of a round is ours / theirs; the table shows the median of the rounds. Both get the same weights, batches
and number of threads, and their results are compared before anything is timed. `--baseline DIR` also measures another
checkout of this package. `--docs` writes docs/performance.md and its plot; otherwise only performance.json is written.

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
    floor: str = ""  # the work that only multiplies matrices
    tokens: int = 0  # report tokens per second, and ratios of speed


ROWS = {
    "attention": Row("two-head attention 3x5, forward and backward", "attention", targets=(0.40, 0.45)),
    "tiny": Row("GPT of 1 layer, 16 wide: AdamW step", "train", {"folder": "tiny", "batch": 1}, targets=(0.40, 0.50)),
    "nanogpt": Row(
        "nanoGPT for CPUs: AdamW step",
        "train",
        {"folder": "nanogpt", "batch": 12},
        targets=(1.00, 1.30),
        floor="train_products",
    ),
    "nanogpt-2": Row(
        "nanoGPT for CPUs: AdamW step",
        "train",
        {"folder": "nanogpt", "batch": 12},
        2,
        (1.05, 1.55),
        ours={"workers": 2},
        floor="train_products",
    ),
    "six384-2": Row(
        "6 layers, 384 wide, block 256: AdamW step",
        "train",
        {"folder": "six384", "batch": 2},
        2,
        (1.10, 1.50),
        ours={"workers": 2},
        floor="train_products",
    ),
    "decode-nano": Row(
        "cached greedy decoding, nanoGPT's size",
        "generate",
        {"folder": "gpt2-nano", "prompt": 16, "new": 48},
        targets=(3.5, 3.5),
        peer="transformers",
        tokens=48,
    ),
    "decode-llama": Row(
        "cached greedy decoding, Llama of 260 thousand parameters",
        "generate",
        {"folder": "llama-260k", "prompt": 16, "new": 64},
        targets=(2.5, 2.5),
        peer="transformers",
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
        tokens=64,
    ),
    "prefill-124m": Row(
        "512 tokens read at once, GPT-2 of 124 million parameters",
        "prefill",
        {"folder": "gpt2-124m", "tokens": 512},
        targets=(1.0, 1.3),
        peer="transformers",
    ),
}
LONG = ("six384-2", "decode-124m", "prefill-124m")  # fewer rounds


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


def measure(row: Row, folders: Path, rounds: int, baseline: Path | None, least: float = 0.05) -> dict[str, Any]:
    """Compare the results of all sides, then time them in turn. Returns the numbers of a row."""
    sides = [side for side in SIDES if has_side(side, row, baseline)]
    with ExitStack() as stack:
        workers = {side: stack.enter_context(Worker(side, row.threads, baseline)) for side in sides}
        if row.floor:
            workers["floor"] = stack.enter_context(Worker("numpy", row.threads))
        seconds: dict[str, list[float]] = {side: [] for side in workers}
        answers, repeats = {}, {}
        for side, worker in workers.items():
            options = row.options | (row.ours if side == "fast" else {})
            if "folder" in options:
                options["folder"] = str(folders / options["folder"])
            name = row.work
            if side == "floor":
                name = row.floor
                options = {key: options[key] for key in options.keys() & {"folder", "batch", "new"}}
            answers[side] = worker.ask(work=name, options=options)
            worker.ask(repeat=1)
            once = worker.ask(repeat=1)["seconds"]
            repeats[side] = max(1, int(least / once))
        compare_results({side: answers[side]["results"] for side in sides})
        for _ in range(rounds):
            for side, worker in workers.items():
                if row.threads > 1:
                    time.sleep(0.3)  # the threads of the side before stop spinning
                answer = worker.ask(repeat=repeats[side])
                seconds[side].append(answer["seconds"] / repeats[side])
                answers[side] |= answer
    versions = {name: v for a in answers.values() for name, v in a["versions"].items() if name != "kernels"}
    peer = "peer" if "peer" in seconds else "baseline"
    ratios = {side: float(np.median(np.divide(seconds[side], seconds[peer]))) for side in seconds if peer in seconds}
    return {
        "seconds": {side: float(np.median(s)) for side, s in seconds.items()},
        "ratios": ratios,
        "faults": {side: answers[side]["faults"] / repeats[side] for side in sides},
        "memory_mb": {side: answers[side]["peak_mb"] - answers[side]["import_mb"] for side in sides},
        "process_mb": {side: answers[side]["peak_mb"] for side in sides},
        "versions": versions,
    }


def has_side(side: str, row: Row, baseline: Path | None) -> bool:
    if side == "baseline":
        return baseline is not None
    return side != "peer" or row.peer != "baseline"


def compare_results(results: dict[str, list[float]]) -> None:
    """Raise AssertionError unless all sides computed the same: tokens, losses of three steps, logits or gradients."""
    for side, numbers in results.items():
        np.testing.assert_allclose(numbers, results["numpy"], rtol=2e-3, atol=2e-4, err_msg=side)


def measure_import(rounds: int) -> dict[str, Any]:
    """The seconds of importing this package and torch, each in a new process, in turn."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
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


def measure_growth(folders: Path, rounds: int) -> dict[str, Any]:
    """The seconds of a training step of 4 rows against tokens, width and layers; the exponent of the last doubling."""
    growth: dict[str, Any] = {}
    for name, (option, sizes) in SWEEPS.items():
        seconds: dict[str, list[float]] = {"fast": [], "numpy": [], "peer": []}
        for size in sizes:
            write_weights(folders / f"{name}-{size}", BASE | {option: size})
            row = Row(f"{name} {size}", "train", {"folder": f"{name}-{size}", "batch": 4})
            measured = measure(row, folders, rounds, None, least=0.02)["seconds"]
            for side, times in seconds.items():
                times.append(measured[side])
        exponents = {side: float(np.log2(t[-1] / t[-2])) for side, t in seconds.items()}
        growth[name] = {"sizes": sizes, "seconds": seconds, "exponents": exponents}
    return growth


def measure_positions(folders: Path, rounds: int, new: int = 8) -> dict[str, Any]:
    """The seconds of one more token at several positions, with the cache and without it."""
    positions = [32, 64, 128, 256, 500]
    write_folder(folders / "gpt2-long", NANO | {"block_size": 512})
    result: dict[str, Any] = {"positions": positions}
    for use_cache in (True, False):
        seconds: dict[str, list[float]] = {"fast": [], "peer": []}
        for prompt in positions:
            times = {}
            for count in (1, 1 + new):
                options = {"folder": "gpt2-long", "prompt": prompt, "new": count, "use_cache": use_cache}
                times[count] = measure(Row("", "generate", options), folders, rounds, None)["seconds"]
            for side, values in seconds.items():
                values.append((times[1 + new][side] - times[1][side]) / new)
        result["cached" if use_cache else "uncached"] = seconds
    return result


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

    def ratio(side: str) -> float | None:
        if side not in ratios:
            return None
        return 1 / ratios[side] if row.tokens else ratios[side]

    def cell(side: str, target: float | None) -> str:
        value = ratio(side)
        if value is None:
            return "" if side not in seconds else show(seconds[side], row.tokens)
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
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


HEADER = ["work", "threads", "peer", "with `fast`", "NumPy alone", "products alone", "baseline"]


def make_table(results: dict[str, Any]) -> str:
    rows = [format_row(ROWS[key], results["rows"][key]) for key in ROWS if key in results["rows"]]
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
    parser.add_argument(
        "--only", default="", help=f"rows, separated by commas: {', '.join(ROWS)}, import, demo, growth, scaling"
    )
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="another checkout of this package")
    parser.add_argument("--json", type=Path, default=Path("performance.json"))
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md and its plot")
    args = parser.parse_args()
    only = set(args.only.split(",")) - {""}
    unknown = only - set(ROWS) - {"import", "demo", "growth", "scaling"}
    if unknown:
        parser.error(f"--only: unknown {sorted(unknown)}")

    def wanted(name: str) -> bool:
        return not only or name in only

    results: dict[str, Any] = {"machine": describe_machine(), "rounds": args.rounds, "rows": {}}
    with tempfile.TemporaryDirectory() as name:
        folders = Path(name)
        for key, row in ROWS.items():
            if not wanted(key) or (row.peer == "baseline" and args.baseline is None):
                continue
            folder = row.options.get("folder", "")
            if folder in SHAPES:
                write_weights(folders / folder, SHAPES[folder])
            elif folder and not (folders / folder).exists():
                write_folder(folders / folder, FOLDERS[folder])
            rounds = max(3, args.rounds // 2) if key in LONG else args.rounds
            results["rows"][key] = measure(row, folders, rounds, args.baseline)
            results.setdefault("versions", {}).update(results["rows"][key].pop("versions"))
            print(" | ".join(cell for cell in format_row(row, results["rows"][key]) if cell), flush=True)
        if wanted("import"):
            results["import"] = measure_import(args.rounds)
            print(f"import: {results['import']}", flush=True)
        if wanted("demo"):
            results["demo"] = measure_demo()
            print(f"demo: {results['demo']:.1f} s", flush=True)
        if wanted("growth"):
            results["growth"] = measure_growth(folders, 3)
            results["positions"] = measure_positions(folders, 3)
            print({name: sweep["exponents"] for name, sweep in results["growth"].items()})
        if wanted("scaling"):
            results["scaling"] = bench_scaling.write_text(bench_scaling.measure(args.rounds))
    args.json.write_text(json.dumps(results, indent=1, default=float) + "\n")
    print(f"\n{make_table(results)}\n\nwritten to {args.json}")
    if args.docs:
        write_page(results)


def write_page(results: dict[str, Any]) -> None:
    """Fill benchmarks/performance_page.md with the numbers. Needs the results of a complete run."""
    docs, memory = HERE.parent / "docs", results["rows"]["nanogpt"]
    names = {"fast": "with `fast`", "numpy": "NumPy alone", "peer": "PyTorch"}
    plot_growth(results, docs / "images" / "performance.svg")
    fields = results["machine"] | {
        "versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
        "table": make_table(results),
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
        "scaling": results["scaling"],
    }
    (docs / "performance.md").write_text((HERE / "performance_page.md").read_text().format(**fields))


if __name__ == "__main__":
    main()
