"""What the command line and the example scripts share: how a program reads its options, and how it ends."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["discard", "end_early", "ending_quietly", "make_parser", "run_exercise"]


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """A parser whose --help shows the docstring of a script as it is written."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


@contextmanager
def ending_quietly() -> Iterator[None]:
    """End the script without a traceback when its output is closed (`| head`) or Ctrl-C is pressed.

    Raises:
        SystemExit: with the code of a shell, 141 or 130.
    """
    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # here, where a closed output can still be handled
    except (KeyboardInterrupt, BrokenPipeError) as error:
        sys.exit(end_early(error, Path(sys.argv[0]).name))


def run_exercise(check: Callable[[], Any], text: str | None) -> int:
    """Print the verdict that `check` returns, and whether the exercise is solved; return its exit code."""
    make_parser(text).parse_args()
    verdict = check()
    print(verdict)
    print("solved" if verdict.ok else "not solved yet")
    return verdict.exit_code


def end_early(error: BaseException, name: str) -> int:
    """The exit code after Ctrl-C, which is one line on standard error, or after a closed output, which is silent."""
    if isinstance(error, KeyboardInterrupt):
        with suppress(OSError):
            print(f"{name}: interrupted", file=sys.stderr)
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        discard(sys.stdout)
    return 130 if isinstance(error, KeyboardInterrupt) else 141


def discard(stream: Any) -> None:
    """Let what Python still writes to a stream at its exit lead nowhere."""
    with suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
