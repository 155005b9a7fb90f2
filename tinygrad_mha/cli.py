"""The command line, `tinygrad-mha COMMAND`: for each command a function that runs it, and one that adds its options."""

from __future__ import annotations

import argparse
import ast
import codecs
import difflib
import errno
import inspect
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
import traceback
import warnings
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.check import GradcheckReport, attention, gradcheck
from tinygrad_mha.check.verdict import wrap_lines
from tinygrad_mha.data import Tokenizer, load_tokenizer, name_token, split_words
from tinygrad_mha.decoding import ContextFullWarning, CountedModel, generate, stream
from tinygrad_mha.demo import OWN_ATTENTION, STEPS, SUBJECTS, embed_words, write_demo
from tinygrad_mha.files.json_files import read_json
from tinygrad_mha.files.python_files import TimeLimited, limiting, load_object, running
from tinygrad_mha.files.run_folder import STATE, find_latest
from tinygrad_mha.laboratory import LabServer, find_weights
from tinygrad_mha.nn import GPT, MultiHeadAttention
from tinygrad_mha.primitives import Primitive
from tinygrad_mha.programs import discard, end_early
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.training import PRESETS, DivergedError, TrainConfig, load_trained, train
from tinygrad_mha.training.config import list_option_names
from tinygrad_mha.training.parallel import join_ranks
from tinygrad_mha.viz.terminal import Matrix, print_matrices, read_words

__all__ = ["main", "make_parser"]

OUR_MODEL = Path("the GPT of this package")  # what --model means without DIR
MODEL_HELP = "the folder of a run, or a Hugging Face folder; without DIR: the small GPT of this package"

MINUS = "−"
UNBROKEN = "\0"  # stands for a space between words that stay on one line
MOST_CHARACTERS = 2000  # of a message
MOST_COLUMNS = 118  # of the prose in a help
MOST_WORDS = 500
MOST_HEADS = 64
MOST_WIDTH = 1024
MOST_ELEMENTS = 10_000_000  # of an input

BEGIN = """Begin with `tinygrad-mha demo`.
`tinygrad-mha COMMAND --help` has examples of each command.

Examples:
  tinygrad-mha demo
  tinygrad-mha show "the cat sat"
  tinygrad-mha train"""

OWN_FILE = f"model.py is a file of yours, such as:\n\n{textwrap.indent(OWN_ATTENTION.rstrip(), '    ')}"

# What is to be copied from a message: it is not broken between lines.
COPIED = re.compile(r'pip install "[^"]*"|--[a-z-]+ (?:[A-Z]+|slide)\b|--shape( \d+x\d+)+')


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 for success, 1 for a failed check or training, 2 for what could not be run.

    An exception becomes one line on standard error, as wide as the terminal, and then one for each command that helps;
    --debug shows its traceback too.
    """
    prepare_streams()
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args = argparse.Namespace(debug=False)
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:  # with the usage of the command, not that of tinygrad-mha
            message = f"unrecognized arguments: {' '.join(unknown)}{hint_signs(argv)}"
            getattr(args, "parser", parser).error(message)
        if not hasattr(args, "run"):
            parser.print_help()
            return 2
        code = args.run(args)
        print(end="", flush=True)
        return code
    except (KeyboardInterrupt, BrokenPipeError) as error:  # `| head` has read enough
        return end_early(error, "tinygrad-mha")
    except Exception as error:
        with suppress(OSError):  # standard error may be closed
            if args.debug:
                traceback.print_exc()
            print(fit_terminal(f"tinygrad-mha: {describe_error(error, args)}{hint_signs(argv)}"), file=sys.stderr)
        return 1 if isinstance(error, DivergedError) else 2
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # the disk is full, say: the exit code is that of the command
            discard(sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `shtab` makes completions for a shell from it."""
    format_help = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="tinygrad-mha", description=tg.__doc__, epilog=BEGIN, formatter_class=format_help)
    parser.add_argument("--version", action="version", version=f"%(prog)s {tg.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    adders = (
        add_demo,
        add_show,
        add_train,
        add_generate,
        add_graph,
        add_walkthrough,
        add_lab,
        add_gradcheck,
        add_check,
        add_examples,
    )
    for add in adders:
        add(commands)
    return parser


class Parser(argparse.ArgumentParser):
    """Adds the nearest command or option to the message about one that does not exist."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"arguments: (--[\w-]+)|COMMAND: invalid choice: '(.*?)'", message)
        if wrong:
            known = re.findall(r"--[a-z-]+|(?<=^    )[a-z]+", self.format_help(), re.MULTILINE)
            message += suggest(wrong[1] or wrong[2], known)
        self.print_usage(sys.stderr)
        self.exit(2, fit_terminal(f"{self.prog}: error: {message}") + "\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write now, so that a help or version that cannot be written is an error; argparse ignores it."""
        if file is sys.stdout:
            print(message, end="", flush=True)
        else:
            super()._print_message(message, file)


def suggest(word: str, known: Iterable[str]) -> str:
    """The known word that is like a mistyped one, as the end of a message, or nothing."""
    nearest = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def hint_signs(argv: Sequence[str]) -> str:
    """What to type instead of a long dash before an option, or of a full-width colon."""
    for text in argv:
        typed = re.sub(r"^[—–−－]+(?=[a-z]+)", "--", text).replace(".py：", ".py:")
        if typed != text:
            return f"; {text!r} has another sign than the plain {typed!r}"
    return ""


def prepare_streams() -> None:
    """Print a warning as one line, lead closed streams nowhere, and replace characters that an encoding lacks.

    The sign instead is ?, but a hyphen for the minus sign.
    """
    warnings.formatwarning = lambda message, *_, **__: f"tinygrad-mha: warning: {message}\n"
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    codecs.register_error("replace_signs", replace_signs)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace_signs")


def replace_signs(error: UnicodeError) -> tuple[str, int]:
    """What is written instead of the characters that cannot be encoded, and where to go on."""
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end]
    return "".join("-" if sign == MINUS else "?" for sign in signs), error.end


def describe_error(error: Exception, args: argparse.Namespace) -> str:
    """One line about an error: its message, with the path of an OSError, or its type where the message lacks sense.

    Commands at the end of a message, each on an indented line of its own, stay so. Arguments of Python are named as the
    options of the command: on_full="slide" is --on-full slide.
    """
    text = "\n  ".join(" ".join(part.split()) for part in re.split(r"\n  (?=tinygrad-mha )", str(error)))
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    elif isinstance(error, MemoryError):
        text = f"not enough memory: {text or 'choose smaller sizes'}"
    elif not text or not isinstance(error, (ValueError, TypeError, ImportError, OSError, RuntimeError)):
        text = f"{type(error).__name__}: {text}"
    for name in vars(args):
        option = f"--{name.replace('_', '-')}"
        text = re.sub(rf'\b{name}="(\w+)"', rf"{option} \1", text)
        text = re.sub(rf"\b{name}\b" if "_" in name else f"^{name}(?= must)", option, text)
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + " ..."


def fit_terminal(message: str) -> str:
    """The message in lines that fit the terminal, if standard error is one. What is to be copied is not broken."""
    if not sys.stderr.isatty():
        return message
    prose, *commands = message.split("\n")
    prose = COPIED.sub(lambda match: match[0].replace(" ", UNBROKEN), prose)
    width = shutil.get_terminal_size().columns - 1
    lines = textwrap.wrap(prose, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, *commands]).replace(UNBROKEN, " ")


def add_command(commands: Any, run: Callable[[argparse.Namespace], int], epilog: str = "") -> Callable[..., Any]:
    """Add the command `run_NAME`, whose docstring is its help. Returns the function that adds an option to it."""
    text = inspect.getdoc(run) or ""
    width = min(shutil.get_terminal_size().columns - 2, MOST_COLUMNS)
    parts = [part if "\n  " in part else textwrap.fill(part, width) for part in text.split("\n\n")]
    parser = commands.add_parser(
        run.__name__.removeprefix("run_"),
        help=text.partition("\n")[0].rstrip("."),
        description="\n\n".join(parts),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser.add_argument


def natural(text: str) -> int:
    """An integer of at least 0, as the type of an option."""
    if re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """An integer of at least 1, as the type of an option."""
    number = natural(text)
    if number == 0:
        raise argparse.ArgumentTypeError("expected an integer of at least 1, got 0")
    return number


def file_path(text: str) -> Path:
    """The path of a file or folder, as the type of an option."""
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a file or folder, got an empty text")
    return Path(text)


def folder_path(text: str) -> Path:
    """The path of a folder, which may be new, as the type of an option."""
    if file_path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected a folder, {text!r} is a file")
    return Path(text)


# --------------------------------------------------------------------------------------------------------------------
# demo


def add_demo(commands: Any) -> None:
    option = add_command(commands, run_demo)
    option("--out", type=folder_path, default=Path("tinygrad-mha-demo"), metavar="DIR", help="default: %(default)s")
    option("--steps", type=natural, default=STEPS, help="training steps (default: %(default)s)")


def run_demo(args: argparse.Namespace) -> int:
    """Compute and check attention, train a GPT and sample from it, in less than two minutes.

    Offline: the matrices of causal two-head attention, a gradient check of a whole block, the check of an attention
    with a fault, the KV cache against the full computation, a GPT trained on the Python language reference, and text
    generated with the cache. All results are written into a folder.

    Examples:
      tinygrad-mha demo
      tinygrad-mha demo --steps 300 --out demo
    """
    write_demo(args.out, args.steps)
    return 0


# --------------------------------------------------------------------------------------------------------------------
# train


def add_train(commands: Any) -> None:
    option = add_command(commands, run_train)
    option("--text", type=file_path, metavar="FILE", help="UTF-8 text; default: Python's language reference")
    text = "folder for checkpoints, log and samples (default: %(default)s)"
    option("--out", type=folder_path, default=Path("run"), metavar="DIR", help=text)
    option(
        "--init",
        type=folder_path,
        metavar="DIR",
        help="start with the model and tokenizer of a run or Hugging Face folder",
    )
    text = f"""one of {", ".join(PRESETS)}; a JSON file of options; or the folder of a run, for its configuration.
        Default: tiny, or with --init finetune; cpu is nanoGPT's configuration for a CPU"""
    option("--config", metavar="NAME|FILE.json|DIR", help=text)
    option("--steps", type=natural, help="number of updates")
    option("--seed", type=natural, help="of weights, data, dropout and samples (default 0)")
    text = f"any option of the configuration: {', '.join(list_option_names())}"
    option("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=text)
    option(
        "--resume",
        action="store_true",
        help="continue the run in DIR; with --text, --init or --config, start it if there is none",
    )
    option("--workers", type=positive, metavar="N", help="threads that share the rows of each batch (default 1)")
    option("--quiet", action="store_true", help="print no progress, only the result and the next command")
    option("--json", action="store_true", help="print one JSON object per event, and nothing else")


def run_train(args: argparse.Namespace) -> int:
    """Train a GPT on a text.

    The tokens are the characters of the text. With --init a trained model is trained further, with its own tokenizer.
    Ctrl-C writes a checkpoint and stops; --resume continues from the latest checkpoint in --out, bit for bit as if the
    run had not been interrupted (with the same --steps). Without a run there, --resume is an error, unless --text,
    --init or --config says what to start. Started by `mpiexec -n N`, N processes share the rows of each batch.

    novel.txt and letters.txt stand for texts of yours.

    Examples:
      tinygrad-mha train
      tinygrad-mha train --resume --steps 900
      tinygrad-mha train --config run --set dropout=0.1 --out again
      tinygrad-mha train --text novel.txt --out novel --config cpu --set n_embd=96
      tinygrad-mha train --init novel --text letters.txt --out tuned
    """
    if args.quiet and args.json:
        raise ValueError("give --quiet or --json, not both")
    changes = dict(map(parse_setting, args.set))
    changes |= {name: getattr(args, name) for name in ("steps", "seed") if getattr(args, name) is not None}
    show = "json" if args.json else "quiet" if args.quiet else "bar"
    with join_ranks() as ranks:
        checkpoint = ranks.bcast(find_latest(args.out) if ranks.rank == 0 else None)
        check_start(args, checkpoint)
        resumed = checkpoint is not None
        config = read_config(args.config) if args.config else None if resumed or args.init else "tiny"
        model, tokenizer = (None, None) if resumed or args.init is None else open_model(args.init)
        given = {"resume": args.resume, "model": model, "tokenizer": tokenizer, "workers": args.workers, "show": show}
        if show == "bar" and ranks.rank == 0 and not resumed:
            tell_start(args)
        run = train(config, args.text, args.out, **given, **changes)
    if not args.json and ranks.rank == 0:
        losses = [(row["step"], row["validation_loss"]) for row in run.log.rows if "validation_loss" in row]
        state, advice = "interrupted" if run.interrupted else "finished", ""
        if checkpoint is not None and checkpoint.name == f"step-{run.step}" and not run.interrupted:
            state, advice = "already finished", "; a higher --steps continues"
        (first, before), (last, now) = losses[0], losses[-1]
        others = [f"measured at step {last}"] * (last != run.step) + [f"at first {before:.4f}"] * (last != first)
        loss = f"validation loss {now:.4f}" + (f" ({', '.join(others)})" if others else "")
        print(f"{state} at step {run.step}{advice}; {loss}; in {args.out}")
        print(run.workers.summary)
        command = "train --resume --out" if run.interrupted else "generate"
        print(f"next: tinygrad-mha {command} {shlex.quote(str(args.out))}")
    return 130 if run.interrupted else 0


def check_start(args: argparse.Namespace, checkpoint: Path | None) -> None:
    """Refuse a new run over another one, and --resume that neither finds a run nor is told what to start.

    Raises:
        ValueError: what to do.
    """
    if checkpoint is not None and not args.resume:
        text = "continue it with --resume, or choose another folder with --out"
        raise ValueError(f"{args.out} contains a run already, at {checkpoint.name}: {text}")
    if checkpoint is None and args.resume and args.text is args.init is args.config is None:
        text = "name the folder of a run with --out, or give --text FILE to start one"
        raise ValueError(f"{args.out} contains no run to resume: {text}")


def tell_start(args: argparse.Namespace) -> None:
    """Note what a new run does that the options do not say."""
    if args.resume:
        print(f"note: {args.out} contains no run: a new one starts", file=sys.stderr)
    if args.text is None:
        print("note: no --text is given: the text is Python's language reference", file=sys.stderr)


def read_config(name: str) -> TrainConfig | str:
    """The name of a preset, or the configuration in a JSON file or in the latest checkpoint of a run.

    A file holds any options of a TrainConfig, or is the state.json of a checkpoint.
    """
    if name in PRESETS:
        return name
    path = Path(name)
    if path.is_dir():
        checkpoint = path if (path / STATE).exists() else find_latest(path)
        if checkpoint is None:
            raise ValueError(f"--config {name}: the folder contains no run")
        path = checkpoint / STATE
    elif not path.exists():
        raise ValueError(f"--config must be {', '.join(PRESETS)}, a JSON file, or the folder of a run, got {name!r}")
    content = read_json(path)
    options = content.get("config") if path.name == STATE else content
    if not isinstance(options, dict):
        raise ValueError(f"{path} has no configuration")
    try:
        return TrainConfig(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def parse_setting(text: str) -> tuple[str, Any]:
    """Split NAME=VALUE; the value is a Python literal, or else a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"expected NAME=VALUE, got {text!r}")
    with suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value)
    return name.strip().replace("-", "_"), value


# --------------------------------------------------------------------------------------------------------------------
# generate


def add_generate(commands: Any) -> None:
    option = add_command(commands, run_generate)
    option("folder", type=folder_path, nargs="?", metavar="DIR", help="default: the small GPT of this package")
    option("--prompt", help="the text to continue; default: a line feed, or the first token of the vocabulary")
    option("--ids", nargs="+", type=int, metavar="ID", help="token ids to continue; then the output is ids too")
    option(
        "-n", "--max-new-tokens", type=natural, metavar="N", help="default: 200; without DIR, to the end of the context"
    )
    option("--temperature", type=float, default=0.8, help="0 is greedy; default: %(default)s")
    option("--top-k", type=int, metavar="K", help="draw from the K most probable tokens")
    option("--top-p", type=float, metavar="P", help="draw from the most probable tokens that sum to P")
    option("--stop", nargs="+", metavar="TEXT", help="stop after any of these")
    option("--no-eos", action="store_true", help="continue after the model's end of text")
    option("--seed", type=natural, help="the same seed draws the same text")
    option("--no-cache", action="store_true", help="read all tokens again for every token")
    text = "when the context is full: fail, or read the last block_size tokens for each token (default: %(default)s)"
    option("--on-full", choices=("error", "slide"), default="slide", help=text)
    option("--stats", action="store_true", help="print tokens per second and multiply-adds on standard error")


def run_generate(args: argparse.Namespace) -> int:
    """Continue a text with a trained model.

    DIR is the folder of a run of `tinygrad-mha train`, or a Hugging Face folder (with tokenizer files, or use --ids).
    Without it a small GPT writes, which is part of this package and was trained on Python's language reference. In the
    examples run is the folder of a run and gpt2 a Hugging Face folder.

    Examples:
      tinygrad-mha generate --prompt "The "
      tinygrad-mha generate run --prompt "The " --temperature 0 --stats
      tinygrad-mha generate gpt2 --ids 464 3797 -n 20 --top-k 50 --seed 1
    """
    if args.ids is not None and args.prompt is not None:
        raise ValueError("give --prompt or --ids, not both")
    model, tokenizer = open_model(args.folder, with_tokenizer=args.ids is None, others=['generate --prompt "The "'])
    if args.ids is not None:
        prompt, tokenizer = np.array(args.ids), None
    else:
        prompt = default_prompt(tokenizer) if args.prompt is None else encode(tokenizer, args.prompt, args.folder)
    if tokenizer is None and args.stop:
        raise ValueError("--stop is text, but there is no tokenizer")
    if args.max_new_tokens is None:
        args.max_new_tokens = 200 if args.folder else max(1, model.config.block_size - len(prompt))
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "stop", "seed", "on_full")}
    options["eos"] = None if args.no_eos else "model"
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", ContextFullWarning)
        pieces = stream(model, prompt, args.max_new_tokens, tokenizer=tokenizer, use_cache=not args.no_cache, **options)
    for note in notes:
        print(f"note: {note.message}", file=sys.stderr)
    start, count = time.perf_counter(), 0
    print(*args.ids or "", end=args.prompt or "", flush=True)
    for piece in pieces:
        print(piece if isinstance(piece, str) else f" {piece}", end="", flush=True)
        count += 1
    print(flush=True)
    if args.stats:
        seconds = time.perf_counter() - start
        counted = CountedModel(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ContextFullWarning)  # the note above says it
            generate(counted, prompt, count, temperature=0, eos=None, use_cache=not args.no_cache, on_full="slide")
        way = "without" if args.no_cache else "with"
        speed = f"{count} tokens in {seconds:.2f} s, {count / max(seconds, 1e-9):.1f} tokens/s {way} the cache"
        print(f"{speed}; multiply-adds: {counted.multiply_adds:,}", file=sys.stderr)
    return 0


def default_prompt(tokenizer: Tokenizer) -> np.ndarray:
    """A line feed, or the first token of a vocabulary without one."""
    try:
        return tokenizer.encode("\n")
    except ValueError:
        return np.zeros(1, np.int64)


def encode(tokenizer: Any, text: str, folder: Path | None) -> np.ndarray:
    """The token ids of a text for the model of `open_model`."""
    try:
        return np.asarray(tokenizer.encode(text))
    except ValueError as error:
        if folder is not None and folder is not OUR_MODEL:
            raise
        advice = "train a model on a text of yours, and give its DIR:\n  tinygrad-mha train --text FILE --out DIR"
        raise ValueError(
            f"the GPT of this package writes English only: {text!r} has other characters; {advice}"
        ) from error


def open_model(folder: Path | None, with_tokenizer: bool = True, others: Sequence[str] = ()) -> tuple[GPT, Any]:
    """Open the model and the tokenizer of a run or of a Hugging Face folder, or those of this package.

    Args:
        with_tokenizer: False: the tokenizer of a Hugging Face folder is None.
        others: commands to run instead if there is no such folder, besides the one that trains a model into it.
    """
    if folder is None or folder is OUR_MODEL:
        return load_trained()
    if not folder.is_dir():
        commands = [*others, f"train --text FILE --out {shlex.quote(str(folder))}"]
        purposes = "write with the small GPT of this package, or train" if others else "train"
        raise FileNotFoundError(
            "\n  tinygrad-mha ".join(
                [f"no such folder: {folder}; to {purposes} a model on a text of yours:", *commands]
            )
        )
    if not (folder / "config.json").is_file():
        return load_trained(folder)
    try:
        return GPT.from_pretrained(folder), load_tokenizer(folder) if with_tokenizer else None
    except FileNotFoundError as error:
        advice = "Save one there, with tokenizer.save(folder), or generate from token ids, with --ids"
        raise FileNotFoundError(f"{error}. {advice}") from error


# --------------------------------------------------------------------------------------------------------------------
# graph and walkthrough


def add_graph(commands: Any) -> None:
    option = add_command(commands, run_graph, OWN_FILE)
    option("target", metavar="|".join(SUBJECTS) + "|FILE.py:NAME")
    option(
        "-o",
        "--out",
        type=file_path,
        default=Path("graph.svg"),
        metavar="FILE",
        help=".svg .png .pdf .html or .dot; default: %(default)s",
    )
    option("--open", action="store_true", help="open the picture in a browser")
    option("--model", type=folder_path, nargs="?", const=OUR_MODEL, metavar="DIR", help=f"for gpt: {MODEL_HELP}")
    option("--depth", type=natural, help="the number of open levels of modules (gpt: 1 unless given)")
    option("--no-values", action="store_true", help="names, shapes and formulas only")
    option("--backward", action="store_true", help="draw the computation of the gradients too")
    option("--ops", choices=("folded", "separate"), default="folded", help="default: %(default)s")
    option("--direction", choices=("TB", "LR"), default="TB", help="default: %(default)s")
    option("--shape", nargs="+", metavar="3x5", help="one shape for each input of a function")
    option("--seed", type=natural, default=0, help="of weights and inputs (default 0)")


def run_graph(args: argparse.Namespace) -> int:
    """Draw a computation: attention, a block, a GPT, or your own function.

    The picture shows shapes, values and gradients. Your own function is called with its default values, or with random
    arrays of --shape (q, k, v: 3x5 3x5 3x7; a single input: 3x5), and returns tensors.

    Examples:
      tinygrad-mha graph mha --open
      tinygrad-mha graph gpt --depth 2 -o gpt.png
      tinygrad-mha graph gpt --model -o trained.html
      tinygrad-mha graph model.py:attention --shape 3x5 3x5 3x7 --backward
    """
    if args.model is not None and args.target != "gpt":
        raise ValueError(f"--model is for the target gpt, got {args.target!r}")
    if args.target in SUBJECTS:
        if args.shape:
            raise ValueError("--shape needs a FILE.py:NAME")
        y = SUBJECTS[args.target](args.seed) if args.model is None else run_model(args)
    elif ":" not in args.target and not args.target.endswith(".py"):
        known = ", ".join(SUBJECTS)
        raise ValueError(f"expected {known} or FILE.py:NAME, got {args.target!r}{suggest(args.target, SUBJECTS)}")
    else:
        f = load_object(args.target)
        with running(args.target.rpartition(":")[0]), limiting():
            y = call_function(f, args)
    depth = 1 if args.target == "gpt" and args.depth is None else args.depth
    values: bool | str = False if args.no_values else "auto"
    options = {"backward": args.backward, "ops": args.ops, "direction": args.direction}
    picture = tg.graph(y, depth=depth, values=values, grads=values, **options)
    try:
        path = picture.save(args.out)
    except tg.viz.NoEngineError as error:
        hint = 'pip install "tinygrad_mha[render]" contains it; -o graph.dot writes text, which needs none'
        raise ValueError(
            f"this picture needs dot, the program of Graphviz, which is not installed or does not work: {hint}"
        ) from error
    print(f"{path}: {len(picture.picture.nodes)} boxes")
    open_page(args)
    return 0


def run_model(args: argparse.Namespace) -> Tensor:
    """The loss of a trained model on the tokens that it writes after token 0, with gradients."""
    model, _ = open_model(args.model, with_tokenizer=False)
    ids = np.asarray(generate(model, [0], min(8, model.config.block_size), temperature=0, eos=None))
    loss = model.eval().loss(Tensor(ids[:, :-1], name="ids"), Tensor(ids[:, 1:], name="targets")).named("loss")
    loss.backward()
    return loss


def call_function(f: Callable[..., Any], args: argparse.Namespace) -> Any:
    """Call a user's function; with --backward, propagate a random gradient from its result."""
    names = list(inspect.signature(getattr(f, "forward", f)).parameters)
    inputs = make_inputs(f, args) if args.shape or names else []
    for i, (x, name) in enumerate(zip(inputs, names, strict=False)):
        if isinstance(x, np.ndarray) and x.dtype.kind == "f":
            inputs[i] = Tensor(x, requires_grad=True, name=name)
    y = f(*inputs)
    if args.backward and isinstance(y, Tensor) and y.requires_grad and y.size != 1:
        y.backward(np.random.default_rng(args.seed).standard_normal(y.shape))
    return y


class JoinWords(argparse.Action):
    """A sentence, whether or not it stands in quotation marks."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, " ".join(values))


def add_sentence(option: Callable[..., Any]) -> None:
    """Add the options of commands that compute the attention of a sentence."""
    words = "words, separated by spaces, and Chinese characters (with --model: any text)"
    option("sentence", nargs="+", action=JoinWords, help=words)
    option("--heads", type=positive, help="default: 2")
    option("--widths", metavar="5x7x11", help="d_model x d_k x d_v; default: 5x7x11")
    option("--no-mask", action="store_true", help="every token may attend to all others")
    option("--seed", type=natural, help="of the random weights (default 0)")
    option("--model", type=folder_path, nargs="?", const=OUR_MODEL, metavar="DIR", help=MODEL_HELP)


def read_sentence(args: argparse.Namespace) -> tuple[MultiHeadAttention, np.ndarray, list[str]]:
    """Random attention of the widths that were asked for, an input for each word, and the words."""
    words = split_words(args.sentence)
    if not words:
        raise ValueError("the sentence has no words")
    if len(words) > MOST_WORDS:
        raise ValueError(f"the sentence must have at most {MOST_WORDS} words, got {len(words)}")
    if args.layer is not None:
        raise ValueError("--layer is a layer of a trained model: give --model too")
    heads, seed = args.heads or 2, args.seed or 0
    if heads > MOST_HEADS:
        raise ValueError(f"--heads must be at most {MOST_HEADS}, got {heads}")
    widths = parse_shape(args.widths or "5x7x11")
    if len(widths) != 3 or not all(1 <= width <= MOST_WIDTH for width in widths):
        raise ValueError(
            f"--widths must be d_model x d_k x d_v, from 1 to {MOST_WIDTH}, such as 5x7x11, got {args.widths!r}"
        )
    d_model, d_k, d_v = widths
    mha = MultiHeadAttention(d_model, heads, d_k, d_v, rng=seed).astype(np.float64)
    return mha, embed_words(words, d_model, seed), words


def open_model_of_sentence(args: argparse.Namespace) -> tuple[GPT, Tokenizer]:
    """The trained model of --model, and its tokenizer."""
    if args.no_mask:
        raise ValueError("a GPT is causal: use --no-mask without --model")
    given = [f"--{name}" for name in ("heads", "widths", "seed") if getattr(args, name) is not None]
    if given:
        raise ValueError(f"a trained model has heads, widths and weights of its own: leave {', '.join(given)} out")
    model, tokenizer = open_model(args.model)
    for name, least, most in (("layer", 0, model.config.n_layer - 1), ("head", 1, model.config.n_head)):
        number = getattr(args, name, None)
        if number is not None and number > most:
            raise ValueError(f"--{name} must be from {least} to {most}, got {number}")
    encode(tokenizer, args.sentence, args.model)
    return model, tokenizer


def add_show(commands: Any) -> None:
    option = add_command(commands, run_show)
    add_sentence(option)
    option("--layer", type=natural, help="the layer of that model (default 0)")
    option("--head", type=positive, metavar="N", help="only this head, from 1")
    add_language(option)


def run_show(args: argparse.Namespace) -> int:
    """Print every matrix of the attention of your own sentence.

    Each has its name, its shape, its labels and its numbers. The weights are random, or those of a trained model.

    Examples:
      tinygrad-mha show "the cat sat"
      tinygrad-mha show "猫坐在垫子上" --lang zh --head 1
      tinygrad-mha show "The cat" --layer 1 --head 2 --model
    """
    if args.model is not None:
        model, tokenizer = open_model_of_sentence(args)
        ids = tokenizer.encode(args.sentence)
        _, model_trace = model(ids, trace=True)
        tg.show(
            model_trace, [name_token(tokenizer, i) for i in ids], layer=args.layer or 0, head=args.head, lang=args.lang
        )
        return 0
    mha, x, words = read_sentence(args)
    y, trace = mha(x, causal=not args.no_mask, trace=True)
    terms = read_words(args.lang)
    print_matrices([Matrix("X", x, terms["input"], words), *list_weights(mha, args.head, terms)], args.lang)
    print()
    tg.show(trace, words, head=args.head, lang=args.lang)
    print()
    print_matrices([Matrix("W_O", mha.wo.numpy()), Matrix("Y", y.numpy(), "Concat W_O", words)], args.lang)
    return 0


def list_weights(mha: MultiHeadAttention, head: int | None, terms: dict[str, str]) -> Iterator[Matrix]:
    """W_Q, W_K and W_V of each head, or of one."""
    if head is not None and head > mha.n_head:
        raise ValueError(f"--head must be from 1 to {mha.n_head}, got {head}")
    weights = find_weights(mha)
    for i in range(1, mha.n_head + 1) if head is None else [head]:
        for name in ("W_Q", "W_K", "W_V"):
            weight, columns = weights[f"{name}{i}"]
            meaning = terms["columns"].format(first=columns.start, last=columns.stop - 1, name=name)
            yield Matrix(f"{name}{i}", weight.numpy()[:, columns], meaning)


def add_walkthrough(commands: Any) -> None:
    option = add_command(commands, run_walkthrough)
    add_sentence(option)
    option("--layer", type=natural, help="only the attention of this layer of that model (from 0)")
    option(
        "-o",
        "--out",
        type=file_path,
        default=Path("walkthrough.html"),
        metavar="PAGE.html",
        help="default: %(default)s",
    )
    option("--open", action="store_true", help="open the page in a browser")
    add_language(option)


def run_walkthrough(args: argparse.Namespace) -> int:
    """Write a page that shows the attention of your own sentence, matrix by matrix.

    The page is one file. The weights are random. With --model it shows a whole trained model, from text to next token.

    Examples:
      tinygrad-mha walkthrough "the cat sat on mats" --open
      tinygrad-mha walkthrough "猫坐在垫子上" --lang zh -o page.html
      tinygrad-mha walkthrough "The cat" --model
      tinygrad-mha walkthrough "The cat" --model run --layer 1
    """
    if args.out.suffix not in (".html", ".htm"):
        raise ValueError(f"the page is HTML: expected -o PAGE.html, got {str(args.out)!r}")
    if args.model is not None:
        model, tokenizer = open_model_of_sentence(args)
        page = tg.walkthrough(model, args.sentence, tokenizer=tokenizer, layer=args.layer, lang=args.lang)
    else:
        mha, x, words = read_sentence(args)
        page = tg.walkthrough(mha, x, words, causal=not args.no_mask, lang=args.lang)
    print(f"{page.save(args.out)}: {page.summary}")
    open_page(args)
    return 0


def add_language(option: Callable[..., Any]) -> None:
    """Add the option of commands that speak two languages."""
    option("--lang", choices=("en", "zh"), default=guess_language(), help="of what is shown; here: %(default)s")


def guess_language() -> str:
    """The language of the locale, as the environment names it: "zh" or else "en"."""
    names = (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return "zh" if next(filter(None, names), "").startswith("zh") else "en"


def open_page(args: argparse.Namespace) -> None:
    """With --open, open the file that was written in the browser."""
    if args.open and not webbrowser.open(args.out.resolve().as_uri()):
        print("tinygrad-mha: no browser was found", file=sys.stderr)


# --------------------------------------------------------------------------------------------------------------------
# lab


def add_lab(commands: Any) -> None:
    option = add_command(commands, run_lab)
    option("--model", type=folder_path, nargs="?", const=OUR_MODEL, metavar="DIR", help=MODEL_HELP)
    option("--port", type=int, default=0, help="default: any free port")
    option("--open", action="store_true", help="open the address in the browser")
    add_language(option)


def run_lab(args: argparse.Namespace) -> int:
    """Change an attention in the browser, and see what it computes and whether it is still causal.

    Serves this machine only. The first line is the address; it contains a secret token. Closing the page ends the lab,
    and so does Ctrl-C.

    Examples:
      tinygrad-mha lab --open
      tinygrad-mha lab --model run --port 8000
    """
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port must be in 0 ... 65535, got {args.port}")
    model, tokenizer = (None, None) if args.model is None else open_model(args.model)
    try:
        server = LabServer(args.port, model, tokenizer, args.lang)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(f"port {args.port} is in use: give another --port, or none for any free port") from error
    print(server.address, flush=True)
    print("Open this address in a browser; closing the page or Ctrl-C ends the lab.", file=sys.stderr)
    if args.open:
        webbrowser.open(server.address)
    server.run()
    return 0


# --------------------------------------------------------------------------------------------------------------------
# gradcheck


def add_gradcheck(commands: Any) -> None:
    option = add_command(commands, run_gradcheck, OWN_FILE)
    option("target", nargs="?", metavar="FILE.py:NAME", help="a function, primitive or module of yours")
    option("--shape", nargs="+", metavar="3x5", help="one shape for each input, such as 3x5 5x7, or ()")
    option("--order", type=int, choices=(1, 2), default=2, help="the highest derivative (default 2)")
    option("--seed", type=natural, default=0, help="of inputs and cotangents (default 0)")
    option("--json", action="store_true", help="print one JSON object per line")


def run_gradcheck(args: argparse.Namespace) -> int:
    """Check every derivative rule, or your own function, against finite differences.

    Without a target all primitives are checked. The inputs of your own function are its default values, the samples of
    a primitive, or random arrays of --shape (q, k, v: 3x5 3x5 3x7; a single input: 3x5). Exit code 0: all correct;
    1: a check failed; 2: could not be run.

    Examples:
      tinygrad-mha gradcheck
      tinygrad-mha gradcheck model.py:attention --shape 3x5 3x5 3x7
    """
    if args.target is None:
        if args.shape:
            raise ValueError("--shape needs a FILE.py:NAME")
        return report_primitives([tg.ops.REGISTRY[name] for name in sorted(tg.ops.REGISTRY)], args)
    f = load_object(args.target)
    if isinstance(f, Primitive) and f.samples is not None and not args.shape:
        return report_primitives([f], args)
    with running(args.target.rpartition(":")[0]):
        inputs = make_inputs(f, args)
        report = gradcheck(TimeLimited(f), *inputs, order=args.order, seed=args.seed, raises=False)
    print(json.dumps(report.to_dict()) if args.json else report)
    return 0 if report.ok else 1


def report_primitives(primitives: list[Primitive[..., Any]], args: argparse.Namespace) -> int:
    """Print one line per primitive, the full report of those that fail, and a summary."""
    failed = []
    if not args.json:
        print(f"{'errors of':27} checked first second")
    for op in primitives:
        reports = check_primitive(op, args.order, args.seed)
        ok = bool(reports) and all(report.ok for report in reports)
        if not ok:
            failed.append(op.name)
        if args.json:
            print(json.dumps({"primitive": op.name, "ok": ok, "reports": [r.to_dict() for r in reports]}))
        else:
            print(summarize(op, reports, ok), *(report for report in reports if not report.ok), sep="\n")
    if not args.json:
        order = "first" if args.order == 1 else "first and second"
        verdict = f"FAILED: {', '.join(failed)}" if failed else f"all agree with finite differences to {order} order"
        print(wrap_lines(f"{len(primitives)} primitives, {verdict} (errors: the largest relative ones)", "  "))
    return 1 if failed else 0


def check_primitive(op: Primitive[..., Any], order: int, seed: int) -> list[GradcheckReport]:
    """Check a primitive at each of its samples."""
    samples = op.samples(np.random.default_rng(seed)) if op.samples else []
    reports = []
    for inputs, keywords in samples:

        def call(*xs: Any, keywords: dict[str, Any] = keywords) -> Any:
            return op(*xs, **keywords)

        call.__name__ = op.name
        report = gradcheck(TimeLimited(call), *inputs, order=order, seed=seed, raises=False)
        if not report.entries or any(entry.status != "empty" for entry in report.entries):
            reports.append(report)  # arrays without elements show only that the rules run
    return reports


def summarize(op: Primitive[..., Any], reports: list[GradcheckReport], ok: bool) -> str:
    """One line about the checks of a primitive."""
    if not reports:
        return f"{op.name:20} FAILED no samples: nothing was checked"
    entries = [entry for report in reports for entry in report.entries]
    first, second = (
        max((e.worst.relative for e in entries if e.worst and e.order == order), default=0.0) for order in (1, 2)
    )
    checked = sum(entry.checked for entry in entries)
    return f"{op.name:20} {'ok' if ok else 'FAILED':6} {checked:7} {first:.0e} {second:6.0e}"


# --------------------------------------------------------------------------------------------------------------------
# check


def add_check(commands: Any) -> None:
    option = add_command(commands, run_check, OWN_FILE)
    option("target", metavar="FILE.py:NAME", help="a function of x or of q, k, v; a module, or its class")
    option("--causal", action=argparse.BooleanOptionalAction, help="whether tokens must not depend on later ones")
    option("--shape", nargs="+", metavar="7x11", help="one shape for each input (default: small ones that fit)")
    option("--seed", type=natural, default=0, help="of weights and inputs (default 0)")
    option("--json", action="store_true", help="print one JSON object")


def run_check(args: argparse.Namespace) -> int:
    """Check an attention of your own against what every attention promises, and name its fault.

    Gradients, causality, caches, masks, padding, batches, dtypes, and the formula itself: scale, softmax, heads. It is
    made of NumPy, of this package or of torch. Exit code 0: passed; 1: a claim failed; 2: could not be run.

    Examples:
      tinygrad-mha check model.py:attention
      tinygrad-mha check model.py:attention --no-causal --shape 7x11 7x11 7x13
    """
    target = load_object(args.target, with_classes=True)
    inputs = make_arrays(target, args.shape, args.seed) if args.shape else []
    verdict = attention(target, *inputs, causal=args.causal, seed=args.seed)
    print(json.dumps(verdict.to_dict()) if args.json else verdict)
    return verdict.exit_code


# --------------------------------------------------------------------------------------------------------------------
# examples


def add_examples(commands: Any) -> None:
    option = add_command(commands, run_examples)
    default = Path("tinygrad-mha-examples")
    option(
        "folder", type=folder_path, nargs="?", default=default, metavar="DIR", help="new or empty; default: %(default)s"
    )


def run_examples(args: argparse.Namespace) -> int:
    """Copy the examples of this package into a folder.

    Scripts: attention by hand, a check of your own attention, training on digits, sums and names, exercises, and a
    translator built step by step. The first lines of each say what it does and how it is run.

    Examples:
      tinygrad-mha examples
      tinygrad-mha examples lesson
    """
    if args.folder.exists() and not (args.folder.is_dir() and not any(args.folder.iterdir())):
        raise FileExistsError(f"{args.folder} exists already and is not an empty folder: choose another one")
    package = Path(tg.__file__).parent
    source = package / "examples"  # in a wheel; in a checkout they are beside the package
    source = source if source.is_dir() else package.parent / "examples"
    shutil.copytree(source, args.folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    print(*sorted(file for file in args.folder.rglob("*") if file.is_file()), sep="\n")
    print(f"next: python {shlex.quote(str(args.folder / 'attention_by_hand.py'))}")
    return 0


# --------------------------------------------------------------------------------------------------------------------
# A user's own function

SHAPES = {"x": ["3x5"], "qkv": ["3x5", "3x5", "3x7"]}  # of the only input; of those with these initials


def make_inputs(f: Any, args: argparse.Namespace) -> list[Any]:
    """The inputs of `f`: random arrays of the given shapes or of SHAPES, or its own default values."""
    if args.shape:
        return make_arrays(f, args.shape, args.seed)
    parameters = list(inspect.signature(getattr(f, "forward", f)).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    without = [p.name for p in positional if p.default is p.empty]
    shapes = SHAPES.get("".join(name[0].lower() for name in without) if len(without) > 1 else "x" * len(without))
    if shapes:
        inputs = ", ".join(map(" ".join, zip(without, shapes, strict=True)))
        print(f"inputs: {inputs}; --shape takes others", file=sys.stderr)
        return make_arrays(f, shapes, args.seed)
    if without or not positional:
        raise ValueError(
            f"{args.target} needs inputs: give a shape for each of {without or 'them'}, as in "
            f"--shape {' '.join(['3x5'] * (len(without) or 1))}, or array defaults in the function"
        )
    return [p.default for p in positional if p.default is not None]


def make_arrays(f: Any, texts: list[str], seed: int) -> list[np.ndarray]:
    """Random arrays of shapes as they stand in --shape.

    Raises:
        ValueError: `f` is a function that needs more arguments, or takes fewer.
    """
    shapes = [parse_shape(text) for text in texts]
    if inspect.isfunction(f):
        try:
            inspect.signature(f).bind(*shapes)
        except TypeError as error:
            names = ", ".join(inspect.signature(f).parameters)
            example = f"--shape {' '.join(['7x11'] * (len(inspect.signature(f).parameters)))}"
            raise ValueError(f"give one shape for each of {names}, such as {example}: {error}") from error
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def parse_shape(text: str) -> tuple[int, ...]:
    """3x5 -> (3, 5); () -> ()."""
    if re.fullmatch(r"\(?([0-9]+([x,][0-9]+)*,?)?\)?", text) is None or not text or text.endswith(","):
        raise ValueError(f"{text!r} is not a shape: write 3x5, or () for a number")
    shape = tuple(int(n) for n in re.findall("[0-9]+", text))
    if math.prod(shape) > MOST_ELEMENTS:
        raise ValueError(f"the shape {text} has {math.prod(shape):,} elements, more than {MOST_ELEMENTS:,}")
    return shape
