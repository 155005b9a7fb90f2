"""The command line: `tinygrad-mha COMMAND`, one function a command."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.check import GradcheckReport, gradcheck
from tinygrad_mha.primitive import Primitive


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 1 a check that failed, 2 a call that cannot be carried out."""
    parser = argparse.ArgumentParser(prog="tinygrad-mha", description=tg.__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {tg.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_gradcheck(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, TypeError, OSError) as error:
        print(f"tinygrad-mha: {error}", file=sys.stderr)
        return 2


# --------------------------------------------------------------------------------------------------------------------
# gradcheck


def add_gradcheck(commands: Any) -> None:
    parser = commands.add_parser(
        "gradcheck",
        help="check every derivative rule, or your own function, against finite differences",
        description="Check the derivative rules of all primitives to first and second order, or one function of yours. "
        "Exit code 0: all proved; 1: something is wrong; 2: it could not be run.",
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="FILE.py:NAME",
        help="a function, primitive or module of yours. Its inputs are its default values, the samples of a primitive, "
        "or random arrays of --shape",
    )
    parser.add_argument("--shape", nargs="+", metavar="3x5", help="one shape for each input, such as 3x5 5x7, or () ")
    parser.add_argument("--order", type=int, choices=(1, 2), default=2, help="the highest derivative (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and cotangents (default 0)")
    parser.add_argument("--json", action="store_true", help="print data, one JSON object a line")
    parser.set_defaults(run=run_gradcheck)


def run_gradcheck(args: argparse.Namespace) -> int:
    if args.target is None:
        if args.shape:
            raise ValueError("--shape belongs to a FILE.py:NAME")
        return check_registry(args)
    f = load(args.target)
    if isinstance(f, Primitive) and f.samples is not None and not args.shape:
        return report_primitives([f], args)
    report = gradcheck(f, *inputs_of(f, args), order=args.order, seed=args.seed, raises=False)
    print(json.dumps(report.to_dict()) if args.json else report)
    return 0 if report.ok else 1


def check_registry(args: argparse.Namespace) -> int:
    return report_primitives([tg.ops.REGISTRY[name] for name in sorted(tg.ops.REGISTRY)], args)


def report_primitives(primitives: list[Primitive], args: argparse.Namespace) -> int:
    """One line for each primitive, the whole report of those that fail, and a verdict."""
    failed = []
    for op in primitives:
        reports = check_primitive(op, args.order, args.seed)
        ok = bool(reports) and all(report.ok for report in reports)
        if not ok:
            failed.append(op.name)
        if args.json:
            print(json.dumps({"primitive": op.name, "ok": ok, "reports": [r.to_dict() for r in reports]}))
        else:
            print(line_of(op, reports, ok))
            for report in reports:
                if not report.ok:
                    print(report)
    if not args.json:
        order = "first" if args.order == 1 else "first and second"
        verdict = f"FAILED: {', '.join(failed)}" if failed else f"all proved to {order} order"
        print(f"{len(primitives)} primitives, {verdict}")
    return 1 if failed else 0


def check_primitive(op: Primitive, order: int, seed: int) -> list[GradcheckReport]:
    """The reports of a primitive at each of its samples."""
    samples = op.samples(np.random.default_rng(seed)) if op.samples else []
    reports = []
    for inputs, keywords in samples:

        def call(*xs: Any, keywords: dict[str, Any] = keywords) -> Any:
            return op(*xs, **keywords)

        call.__name__ = op.name
        reports.append(gradcheck(call, *inputs, order=order, seed=seed, raises=False))
    return reports


def line_of(op: Primitive, reports: list[GradcheckReport], ok: bool) -> str:
    if not reports:
        return f"{op.name:14} FAILED  no samples: nothing was checked"
    elements = sum(entry.checked for report in reports for entry in report.entries)
    largest = [
        max((e.worst.relative for r in reports for e in r.entries if e.worst and e.order == order), default=0.0)
        for order in (1, 2)
    ]
    return (
        f"{op.name:14} {'ok' if ok else 'FAILED':7} {len(reports):2} inputs {elements:5} derivatives   "
        f"largest relative error {largest[0]:.0e} first order, {largest[1]:.0e} second"
    )


def inputs_of(f: Any, args: argparse.Namespace) -> list[Any]:
    """What to call f with: random arrays of the shapes named, or its own default values."""
    rng = np.random.default_rng(args.seed)
    if args.shape:
        return [rng.standard_normal(shape_of(text)) for text in args.shape]
    parameters = list(inspect.signature(getattr(f, "forward", f)).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    without = [p.name for p in positional if p.default is p.empty]
    if without or not positional:
        raise ValueError(
            f"{args.target} needs inputs: name a shape for each of {without or 'them'}, as in --shape 3x5 5x7, "
            f"or give them array defaults"
        )
    return [p.default for p in positional if p.default is not None]


def shape_of(text: str) -> tuple[int, ...]:
    """3x5 -> (3, 5); () -> ()."""
    try:
        return tuple(int(n) for n in text.strip("()").replace(",", "x").split("x") if n.strip())
    except ValueError:
        raise ValueError(f"{text!r} is not a shape: write it as 3x5, or () for a number") from None


# --------------------------------------------------------------------------------------------------------------------
# A name in a user's file


def load(target: str) -> Callable[..., Any]:
    """The object NAME in the file of FILE.py:NAME."""
    path, colon, name = target.rpartition(":")
    if not colon or not name:
        raise ValueError(f"expected FILE.py:NAME, got {target!r}")
    module = run_file(Path(path))
    if not hasattr(module, name):
        known = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__
        ]
        raise ValueError(f"{path} has no {name!r}; it defines {', '.join(known) or 'no functions'}")
    found = getattr(module, name)
    if not callable(found):
        raise TypeError(f"{target} is a {type(found).__name__}, expected a function, a primitive or a module")
    return found


def run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # so that it finds what lies beside it, as a script does
    spec.loader.exec_module(module)
    return module
