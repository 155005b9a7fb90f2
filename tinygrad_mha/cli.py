"""The command line: `tinygrad-mha COMMAND`, one function a command."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.check import GradcheckReport, gradcheck
from tinygrad_mha.data import Tokenizer, load_tokenizer
from tinygrad_mha.decoding import ContextFullWarning, CountedModel, generate, stream
from tinygrad_mha.demo import STEPS, SUBJECTS, run_demo, words
from tinygrad_mha.files import CheckpointError
from tinygrad_mha.files.run_folder import find_latest
from tinygrad_mha.nn import GPT, MultiHeadAttention
from tinygrad_mha.primitives import Primitive
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.training import PRESETS, DivergedError, load_trained, train
from tinygrad_mha.training.config import list_option_names


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 1 a check that failed, 2 a call that cannot be carried out."""
    parser = argparse.ArgumentParser(prog="tinygrad-mha", description=tg.__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {tg.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (add_demo, add_train, add_generate, add_graph, add_walkthrough, add_gradcheck):
        add(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except DivergedError as error:
        print(f"tinygrad-mha: {error}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, LookupError, ImportError, OSError, CheckpointError) as error:
        print(f"tinygrad-mha: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


# --------------------------------------------------------------------------------------------------------------------
# demo


def add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="attention by hand, its gradients and its cache proved, a GPT trained and sampled: under two minutes",
        description="The main job, offline: the matrices of causal two-head attention, a gradient check of a whole "
        "block, the KV cache against the full computation, a GPT trained on the Python language reference, and text "
        "generated with the cache. Everything is written into a folder.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("tinygrad-mha-demo"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.set_defaults(run=lambda args: (run_demo(args.out, args.steps), 0)[1])


# --------------------------------------------------------------------------------------------------------------------
# train


def add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a GPT on a text",
        description="Train a GPT on the characters of a text. Ctrl-C saves and stops; --resume goes on from the last "
        "checkpoint, bit for bit as if nothing had happened.",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text; default: Python's language reference")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where checkpoints, log and samples go")
    parser.add_argument("--config", choices=sorted(PRESETS), help="default: tiny; cpu is nanoGPT's CPU configuration")
    parser.add_argument("--steps", type=int, help="how many times the weights move")
    parser.add_argument("--seed", type=int, help="of weights, data, dropout and samples (default 0)")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="any other field of the configuration: " + ", ".join(list_option_names()),
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR, or begin it")
    parser.add_argument("--quiet", action="store_true", help="print nothing but the result")
    parser.add_argument("--json", action="store_true", help="one JSON object per event on the standard output")
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    changes = dict(map(setting, args.set))
    for name in ("steps", "seed"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    resumed = args.resume and find_latest(args.out) is not None
    run = train(
        args.config or (None if resumed else "tiny"),
        args.text,
        args.out,
        resume=args.resume,
        show="json" if args.json else "quiet" if args.quiet else "bar",
        **changes,
    )
    if not args.json:
        losses = [row["validation_loss"] for row in run.log.rows if "validation_loss" in row]
        state = "interrupted" if run.interrupted else "finished"
        print(f"{state} at step {run.step}; validation loss {losses[-1]:.4f} (at first {losses[0]:.4f}); in {args.out}")
        again = "train --resume --out" if run.interrupted else "generate"
        print(f"next: tinygrad-mha {again} {args.out}")
    return 130 if run.interrupted else 0


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as Python would read it, or as a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name.strip().replace("-", "_"), ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name.strip().replace("-", "_"), value


# --------------------------------------------------------------------------------------------------------------------
# generate


def add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a text with a trained model",
        description="Continue a prompt with the model of a run of `tinygrad-mha train`, or of a Hugging Face folder of "
        "a GPT-1 or GPT-2 (which needs tokenizer files, or --ids).",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--prompt",
        default=None,
        help="the text to continue; default: a line feed, or the first token of a vocabulary without one",
    )
    what.add_argument("--ids", nargs="+", type=int, metavar="ID", help="token ids to continue; the output is ids too")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=200, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy; default: %(default)s")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest that hold the mass P")
    parser.add_argument("--stop", nargs="+", metavar="TEXT", help="stop after any of these")
    parser.add_argument("--seed", type=int, help="the same seed draws the same text")
    parser.add_argument("--no-cache", action="store_true", help="compute everything again for every token")
    parser.add_argument(
        "--on-full",
        choices=("error", "slide"),
        default="slide",
        help="when the context is full: an error, or slide over the text and compute anew (default: %(default)s)",
    )
    parser.add_argument("--stats", action="store_true", help="tokens per second and multiply-adds, on standard error")
    parser.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    model, tokenizer = open_model(args.folder)
    if args.ids is not None:
        prompt, tokenizer = np.array(args.ids), None
    elif tokenizer is None:
        raise ValueError(f"{args.folder} has no tokenizer (vocab.json and merges.txt): give token ids with --ids")
    else:
        prompt = beginning(tokenizer) if args.prompt is None else tokenizer.encode(args.prompt)
    if tokenizer is None and args.stop:
        raise ValueError("--stop is text, and this model has no tokenizer")
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "stop", "seed", "on_full")}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", ContextFullWarning)
        pieces = stream(model, prompt, args.max_new_tokens, tokenizer=tokenizer, use_cache=not args.no_cache, **options)
    for note in notes:
        print(f"note: {note.message}", file=sys.stderr)
    began, count = time.perf_counter(), 0
    print(*args.ids or "", end=args.prompt or "", flush=True)
    for piece in pieces:
        print(piece if isinstance(piece, str) else f" {piece}", end="", flush=True)
        count += 1
    print()
    if args.stats:
        seconds = time.perf_counter() - began
        counted = CountedModel(model)
        generate(counted, prompt, count, temperature=0, use_cache=not args.no_cache, on_full="slide")
        way = "without" if args.no_cache else "with"
        speed = f"{count} tokens in {seconds:.2f} s, {count / max(seconds, 1e-9):.1f} tokens/s {way} the cache"
        print(f"{speed}; multiply-adds: {counted.multiply_adds:,}", file=sys.stderr)
    return 0


def beginning(tokenizer: Tokenizer) -> np.ndarray:
    """Something to continue when nothing was given."""
    try:
        return tokenizer.encode("\n")
    except ValueError:
        return np.zeros(1, np.int64)


def open_model(folder: Path) -> tuple[GPT, Tokenizer | None]:
    """A run's model and tokenizer, or those of a Hugging Face folder, which may lack a tokenizer."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    if (folder / "config.json").is_file():
        try:
            tokenizer = load_tokenizer(folder)
        except FileNotFoundError:
            tokenizer = None
        return GPT.from_pretrained(folder), tokenizer
    return load_trained(folder)


# --------------------------------------------------------------------------------------------------------------------
# graph and walkthrough


def add_graph(commands: Any) -> None:
    parser = commands.add_parser(
        "graph",
        help="draw a computation: attention, a block, a GPT, or a function of yours",
        description="Draw a computation with shapes, values and gradients. A function of yours is called with its "
        "default values, or with random arrays of --shape, and returns tensors.",
    )
    parser.add_argument("target", metavar="|".join(SUBJECTS) + "|FILE.py:NAME")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help=".svg .png .pdf .html or .dot")
    parser.add_argument("--depth", type=int, help="how many levels of modules are open (gpt: 1 unless given)")
    parser.add_argument("--no-values", action="store_true", help="names, shapes and formulas only")
    parser.add_argument("--backward", action="store_true", help="draw the computation of the gradients as well")
    parser.add_argument("--ops", choices=("folded", "separate"), default="folded", help="default: %(default)s")
    parser.add_argument("--direction", choices=("TB", "LR"), default="TB", help="default: %(default)s")
    parser.add_argument("--shape", nargs="+", metavar="3x5", help="one shape for each input of a function")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (default 0)")
    parser.set_defaults(run=run_graph)


def run_graph(args: argparse.Namespace) -> int:
    if args.target in SUBJECTS:
        y = SUBJECTS[args.target](args.seed)
    elif ":" not in args.target:
        raise ValueError(f"expected {', '.join(SUBJECTS)} or FILE.py:NAME, got {args.target!r}")
    else:
        y = called(load(args.target), args)
    depth = 1 if args.target == "gpt" and args.depth is None else args.depth
    values: bool | str = False if args.no_values else "auto"
    picture = tg.graph(
        y,
        depth=depth,
        values=values,
        grads=values,
        backward=args.backward,
        ops=args.ops,
        direction=args.direction,
    )
    print(f"{picture.save(args.out)}: {len(picture.picture.nodes)} boxes")
    return 0


def called(f: Callable[..., Any], args: argparse.Namespace) -> Any:
    """What a user's function returns; with --backward, after a random gradient has gone back from it."""
    takes_inputs = bool(inspect.signature(getattr(f, "forward", f)).parameters)
    inputs = inputs_of(f, args) if args.shape or takes_inputs else []
    floating = [isinstance(x, np.ndarray) and x.dtype.kind == "f" for x in inputs]
    y = f(*(Tensor(x, requires_grad=True) if yes else x for x, yes in zip(inputs, floating, strict=True)))
    if args.backward and isinstance(y, Tensor) and y.requires_grad and y.size != 1:
        y.backward(np.random.default_rng(args.seed).standard_normal(y.shape))
    return y


def add_walkthrough(commands: Any) -> None:
    parser = commands.add_parser(
        "walkthrough",
        help="a page that leads through attention on your own sentence",
        description="Write one self-contained page that leads through multi-head attention, matrix by matrix, on a "
        "sentence of yours: with random weights, or with those of one layer of a trained model.",
    )
    parser.add_argument("sentence", help="words, separated by spaces (for --model: any text)")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="PAGE.html")
    parser.add_argument("--heads", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--widths", default="5x7x11", metavar="5x7x11", help="d_model x d_k x d_v; default: %(default)s"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a run of `tinygrad-mha train` or a Hugging Face folder"
    )
    parser.add_argument("--layer", type=int, default=0, help="which layer of that model (default 0)")
    parser.add_argument("--no-mask", action="store_true", help="every token may attend to all others")
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="the language of the page")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    parser.set_defaults(run=run_walkthrough)


def run_walkthrough(args: argparse.Namespace) -> int:
    if args.model is not None:
        if args.no_mask:
            raise ValueError("a GPT is causal: --no-mask goes without --model")
        model, tokenizer = open_model(args.model)
        if tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer, so a sentence cannot be read")
        ids = tokenizer.encode(args.sentence)
        tokens = [tokenizer.decode([i]) for i in ids]
        page = tg.walkthrough(model, ids, tokens=tokens, layer=args.layer, lang=args.lang)
    else:
        tokens = args.sentence.split()
        if not tokens:
            raise ValueError("the sentence has no words")
        widths = shape_of(args.widths)
        if len(widths) != 3:
            raise ValueError(f"--widths wants d_model x d_k x d_v, such as 5x7x11, got {args.widths!r}")
        d_model, d_k, d_v = widths
        mha = MultiHeadAttention(d_model, args.heads, d_k, d_v, rng=args.seed).astype(np.float64)
        page = tg.walkthrough(mha, words(tokens, d_model, args.seed), tokens, causal=not args.no_mask, lang=args.lang)
    print(f"{page.save(args.out)}: {page.summary}")
    return 0


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
