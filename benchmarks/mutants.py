"""Put small faults into the package, one at a time, and see which ones no test notices.

    python benchmarks/mutants.py --count 200

A mutant replaces one expression or removes one statement, at a random place. The tests that belong to its file
run until one fails. A mutant that all of them pass has survived: a test is missing, or the change has no effect. Lines
whose survivors were looked at and have no effect, or one that is a matter of taste, are in EQUIVALENT with the reason.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# The tests that hold a file, the fastest first. The first entry that the path begins with counts.
TESTS = {
    "ops": "registry kernels properties numbers torch_parity attention engine",
    "kernels": "kernels registry optim parallel",
    "numpy_protocol": "engine properties public_reports",
    "notation": "graph number_words walkthrough",
    "nn/cache": "cache generation attention",
    "nn/contract": "own_attention check_attention",
    "nn/translators": "seq2seq beam",
    "nn/transformer": "seq2seq beam",
    "nn": "modules attention scores gpt cache own_attention hugging_face generation differential",
    "optim": "optim parallel training differential",
    "data": "data training",
    "decoding": "sampling beam generation cache",
    "files/python_files": "verdict cli",
    "files": "errors data training hugging_face gpt cli",
    "training": "training parallel fine_tuning errors",
    "viz/diagram/graphviz_engines": "render",
    "viz/diagram": "graph render number_words",
    "viz/plots": "plots",
    "viz/terminal": "show",
    "viz/page": "walkthrough walkthrough_model own_attention graph",
    "laboratory": "laboratory",
    "check/gradient_check": "gradcheck registry",
    "check/differences": "gradcheck registry",
    "check/report": "gradcheck",
    "check/dependence": "check_dependencies",
    "check/stages": "check_derivation",
    "check/diagnosis": "check_doctor",
    "check/caching": "check_cache",
    "check/cache_faults": "check_cache",
    "check/ledger": "check_cache",
    "check": "check_attention verdict cli",
    "": "engine numbers properties errors modules public_reports check_doctor differential",
}
SKIPPED = ("cli.py", "demo.py", "__init__.py", "check/samples.py")
# {file: line of code: why its survivors need no test}
EQUIVALENT = {
    "check/differences.py: return gaps[0] > 1e-3 * largest(self.gradient) and gaps[1] > 0.5 * gaps[0]": (
        "differences are never exactly equal to a threshold"
    ),
    "decoding/generation.py: pieces = [writers[row].write(token) for row, token in zip(rows, tokens, strict=True)]": (
        "each row gets one token, whatever `strict` says"
    ),
    "decoding/stops.py: self.done = False": "each text gets a token before `done` is read",
    "kernels/reference.py: fits = weight.shape == x.shape[-1:]": "the engine sums what a rule leaves to be summed",
    "ops/elementary.py: inputs = (*inputs[:-1], as_index(inputs[-1]))": "there are two inputs: [:-1] is [:1]",
    "training/parallel.py: sys.stderr.flush()": "Python flushes standard error after each line",
    'viz/diagram/dot.py: size = 12 if node.shape == "scalar" else 10': "a matter of taste: the size of letters",
    "viz/plots/attention_weights.py: plot = new_plot(cell * image.shape[1] + 1.6, cell * image.shape[0] + 0.7)": (
        "a matter of taste: the size of the picture"
    ),
    "viz/plots/training_curves.py: plot = new_plot(7, 0.9 + 0.23 * len(squares))": (
        "a matter of taste: the size of the picture"
    ),
    "files/huggingface.py: for name, part in zip(names, parts, strict=True):": (
        "both have the number of names, whatever `strict` says"
    ),
    'viz/diagram/dot.py: weight = WEIGHTS.get(edge.kind, 1) + 2 * (edge.kind == "data" and only_way_out)': (
        "a matter of taste: how straight an arrow is"
    ),
    "viz/diagram/heat.py: return max(34, 6 * widest + 4), 15 if table.second else 17": (
        "a matter of taste: the size of cells"
    ),
    "viz/diagram/heat.py: text, points = write_value(x, factor), min(9, size[1] - 1)": (
        "a matter of taste: the size of letters"
    ),
    "viz/diagram/heat.py: linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)": (
        "a channel is a multiple of 1/255, never 0.04045"
    ),
    "check/dependence.py: by_derivative, by_change = self.derivative > self.limit, self.change > self.limit": (
        "numbers are never exactly equal to a threshold"
    ),
    "check/dependence.py: matrix = (derivative > limit) | (change > limit)": (
        "numbers are never exactly equal to a threshold"
    ),
    "check/claims.py: seen = (measure_influence(c, big, facts.seed, HUGE, **options) > CLOSE) & hidden": (
        "numbers are never exactly equal to a threshold"
    ),
    "check/dependence.py: for new in [*(row + step * rng.standard_normal(row.shape) for step in STEPS), -row]:": (
        "random changes of any sizes show a dependence"
    ),
    "check/diagnosis.py: rounding = np.finfo(root.dtype).eps * np.abs(root.numpy()).max(initial=0.0)": (
        "`initial` decides for an empty loss only, and backward refuses that"
    ),
    "check/claims.py: inputs = tuple(x[..., -3:, :] if c.takes_rows else x for x in inputs)": (
        "gradients are checked at fewer or more tokens"
    ),
    "check/claims.py: for t in range(n - 1, 0, -1):": "fewer lengths of chunks are tried",
    "check/gradient_check.py: variables = {name: x for name, x in zip(names, arguments, strict=True) "
    "if is_floating(x)} | parameters": "both have the number of arguments, whatever `strict` says",
    'check/conformance.py: example = dict(zip(["x"] if c.takes_rows else ["q", "k", "v"], inputs, strict=True))': (
        "both have one length, whatever `strict` says"
    ),
    'viz/diagram/dot.py: ranges = [font(f"value {extent(value)}", 9, GREY), '
    'font(f"gradient {extent(gradient)}", 9, GRADIENT_INK)]': "a matter of taste: the size of letters",
    "viz/diagram/fold.py: most = MOST_IN_A_GRADIENT if user.backward else MOST_IN_A_FORMULA": (
        "a matter of taste: how long a formula gets"
    ),
    'viz/page/equations.py: if not heads or not {"X", "Q_1", "V_1"} <= set(values):': (
        "the set also holds the head found before, so the two are never equal"
    ),
    'viz/page/measure.py: "agrees": not difference > rounding,': (
        "a difference is never exactly equal to its limit, which is not 0"
    ),
    "viz/plots/attention_weights.py: axis.set_tick_params(length=0, pad=3)": "a matter of taste: distances",
    "viz/plots/attention_weights.py: axes.spines[:].set_visible(False)": "a matter of taste: a border",
    "viz/plots/attention_weights.py: size = min(9.0, cell * 72 * 0.8)": "a matter of taste: the size of letters",
    'viz/plots/layer_predictions.py: add_scale(plot, image, axes, "probability", 1.0, 0.02)': (
        "a matter of taste: distances"
    ),
    "viz/plots/layer_predictions.py: axes.spines[:].set_visible(False)": "a matter of taste: a border",
    "viz/plots/training_curves.py: sums = np.cumsum(np.concatenate([[0.0], values]))": (
        "only differences of these sums are used"
    ),
}


class Mutant(NamedTuple):
    """One change: bytes `start` to `end` of a file, which are in the line of `code`, become `text`."""

    file: str
    line: int
    code: str
    start: int
    end: int
    before: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {shorten(self.before)}  ->  {shorten(self.text)}"


def forget_line(text: str) -> str:
    """A mutant as text without its line, which changes with the lines before."""
    return re.sub(r":\d+:", ":", text, count=1)


def shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) < 70 else f"{text[:67]}..."


COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
             ast.FloorDiv: ast.Add, ast.Mod: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}  # fmt: skip


def change(node: ast.AST) -> ast.AST | None:
    """A changed copy of an expression or statement, or None if this kind is left alone."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op, *_]):
            new.ops[0] = COMPARISONS[type(op)]()
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            new.op = OPERATORS[type(op)]()
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return new.operand
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float()):
            new.value += 1
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return ast.Pass()
        case _:
            return None
    return new


def places(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may be changed: no documentation, annotations, messages of errors, or formatted text."""
    for name, value in ast.iter_fields(tree):
        for node in value if isinstance(value, list) else [value]:
            is_left_alone = name in ("annotation", "returns", "decorator_list") or isinstance(
                node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
            )
            is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            if isinstance(node, ast.AST) and not is_left_alone and not is_typing:
                yield node
                yield from places(node)


def find_mutants(file: Path) -> Iterator[Mutant]:
    source = file.read_text()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()
    for node in places(ast.parse(source)):
        new = change(node)
        if new is None or not hasattr(node, "lineno"):
            continue
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(new)
        text = text if isinstance(new, ast.stmt) else f"({text})"
        name = file.relative_to(ROOT / "tinygrad_mha").as_posix()
        code = lines[node.lineno - 1].strip()
        yield Mutant(name, node.lineno, code, start, end, data[start:end].decode(), text)


def tests_of(name: str) -> list[str]:
    names = next(tests for prefix, tests in TESTS.items() if name.startswith(prefix)).split()
    return [f"tests/test_{n}.py" for n in names if (ROOT / f"tests/test_{n}.py").exists()]


def survives(mutant: Mutant, seconds: float) -> bool:
    """Whether the tests pass with the mutant, in a copy of the checkout. A mutant without a change tests the tests."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, "checkout")
        shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".venv*"))
        path = copied / "tinygrad_mha" / mutant.file
        data = path.read_bytes()
        path.write_bytes(data[: mutant.start] + mutant.text.encode() + data[mutant.end :])
        environment = os.environ | {
            "PYTHONPATH": str(copied),
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests_of(mutant.file)]
        try:
            run = subprocess.run(command, cwd=copied, env=environment, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return run.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many mutants (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files whose name begins so, such as nn/")
    parser.add_argument("--at-once", type=int, default=2, help="how many run at once (default: 2)")
    parser.add_argument(
        "--seconds", type=float, default=300, help="a mutant that runs longer is noticed (default: 300)"
    )
    parser.add_argument("--again", type=Path, metavar="FILE", help="only the survivors in this result of --json")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    files = [p for p in sorted((ROOT / "tinygrad_mha").rglob("*.py"))
             if (name := p.relative_to(ROOT / "tinygrad_mha").as_posix()).startswith(args.only)
             and not name.endswith(SKIPPED)]  # fmt: skip
    mutants = [mutant for file in files for mutant in find_mutants(file)]
    if args.again:
        survivors = {forget_line(text) for text in json.loads(args.again.read_text())["survivors"]}
        mutants = [mutant for mutant in mutants if forget_line(str(mutant)) in survivors]
    chosen = random.Random(args.seed).sample(mutants, min(args.count, len(mutants)))
    for tests in sorted({tuple(tests_of(mutant.file)) for mutant in chosen}):
        example = next(mutant for mutant in chosen if tuple(tests_of(mutant.file)) == tests)
        if not survives(example._replace(text=example.before), 4 * args.seconds):
            raise SystemExit(f"without any mutant, some of {', '.join(tests)} fail")
    survivors, equivalent = [], []
    with ThreadPoolExecutor(args.at_once) as pool:
        for i, (mutant, survived) in enumerate(
            zip(chosen, pool.map(lambda m: survives(m, args.seconds), chosen), strict=True)
        ):
            reason = EQUIVALENT.get(f"{mutant.file}: {mutant.code}")
            if survived:
                (survivors if reason is None else equivalent).append(str(mutant))
            print(f"{i + 1:4} {'SURVIVED' if survived else 'noticed '} {mutant}", flush=True)
    print(f"{len(chosen)} mutants: {len(chosen) - len(survivors) - len(equivalent)} noticed, "
          f"{len(equivalent)} without effect, {len(survivors)} survived")  # fmt: skip
    if args.json:
        result = {"mutants": len(chosen), "seed": args.seed, "equivalent": equivalent, "survivors": survivors}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
