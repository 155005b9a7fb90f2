"""A person's own Python file: the object NAME of FILE.py:NAME, whatever happens when the file runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from tinygrad_mha.files.reading import CheckpointError, FileError, read_file

__all__ = ["OwnCodeError", "TimeLimitError", "TimeLimited", "catching_exit", "limiting", "load_object", "running"]

SECONDS = 20.0  # a call of a person's function may take, and a file to run


class OwnCodeError(FileError):
    """A person's own code that cannot be loaded or run; the message is one line."""


def load_object(target: str, with_classes: bool = False) -> Callable[..., Any]:
    """Run the file in FILE.py:NAME and return its NAME, a function, primitive, module or other callable.

    What the file prints goes to standard error. Like a script, it can import the files beside it.

    Args:
        with_classes: whether NAME may be a class.

    Raises:
        OwnCodeError: the file raises an exception, calls sys.exit(), runs too long, is not Python, or has no such name.
        FileNotFoundError: there is no such file.
        TypeError: NAME is something else.
    """
    path, _, name = target.rpartition(":") if not target.endswith(".py") else (target, ":", "")
    if not path or not (name or path.endswith(".py")):
        raise OwnCodeError(f"expected FILE.py:NAME, got {target!r}")
    module = run_file(Path(path))
    if name not in vars(module):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__]
        defined = f"it defines {', '.join(own) or 'no functions'}"
        choose = f"{path} is a file: choose a name in it, as in {path}:{own[0] if own else 'NAME'}"
        raise OwnCodeError(f"{path} has no {name!r}; {defined}" if name else f"{choose}; {defined}")
    found = vars(module)[name]
    if not callable(found):
        raise TypeError(f"{target} is a {type(found).__name__}, expected a function, a primitive or a module")
    if isinstance(found, type) and not with_classes:
        raise TypeError(f"{target} is a class, expected a function or an object: write model = {name}(...) in the file")
    return found


def run_file(path: Path) -> types.ModuleType:
    """Run a file as a module, without the cache of bytecode that an import would write beside it."""
    if path.suffix != ".py":
        raise OwnCodeError(f"{path} is not a Python file: expected a name that ends in .py")
    try:
        source = read_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None
    except CheckpointError as error:
        raise OwnCodeError(str(error)) from error
    code = compile_source(source, path)
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules.setdefault(path.stem, module)  # a dataclass looks its module up there
    sys.path.insert(0, str(path.parent))
    with running(path), limiting(), contextlib.redirect_stdout(sys.stderr):
        exec(code, vars(module))
    return module


def compile_source(source: bytes, path: Path) -> types.CodeType:
    """Compile a file.

    Raises:
        OwnCodeError: it is not Python.
    """
    try:
        return compile(source, str(path), "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise OwnCodeError(f"{path}, line {error.lineno}: {type(error).__name__}: {error.msg}: {line}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # a zero byte, or nested too deeply
        raise OwnCodeError(f"{path} is not Python: {error or 'it is nested too deeply'}") from error


@contextlib.contextmanager
def running(path: Any) -> Iterator[None]:
    """While the code of a file runs: its sys.exit(), exceptions and time limits become an `OwnCodeError`.

    The error names the line.
    """
    try:
        with catching_exit():
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # such as SystemExit, GeneratorExit or CancelledError
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == Path(path)]
        place = f"{path}, line {lines[-1]}" if lines else str(path)
        if isinstance(error, SystemExit):
            hint = "code for a script alone belongs under if __name__ == '__main__'"
            raise OwnCodeError(f"{place}: it calls sys.exit({error.code}), so nothing was computed; {hint}") from error
        if isinstance(error, TimeLimitError):
            raise OwnCodeError(f"{place}: {error}") from error
        if not lines:
            raise  # it comes from a check of ours
        text = " ".join(str(error).split())
        raise OwnCodeError(f"{place}: {type(error).__name__}: {text}") from error


@contextlib.contextmanager
def catching_exit() -> Iterator[None]:
    """While the code of a person runs, os._exit() is sys.exit(), so that it can be reported.

    A child process still ends by it.
    """
    leave, parent = os._exit, os.getpid()

    def exit_or_raise(status: int) -> NoReturn:
        if os.getpid() == parent:
            raise SystemExit(status)
        leave(status)

    os._exit = exit_or_raise
    try:
        yield
    finally:
        os._exit = leave


class TimeLimitError(BaseException):
    """Raised inside of code that runs too long. An `except Exception` in that code does not catch it."""


@contextlib.contextmanager
def limiting(calls: int = 1) -> Iterator[None]:
    """Raise `TimeLimitError` in the code of a person that runs longer than `calls` calls may, such as an endless loop.

    It needs the alarm signal, so it does nothing outside of the main thread and on Windows.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    seconds = calls * SECONDS

    def stop(*_: Any) -> NoReturn:
        raise TimeLimitError(f"it did not return within {seconds:g} seconds: an endless loop?")

    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


class TimeLimited:
    """A function or module of a person with the same attributes; each call of it has the time limit."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.__wrapped__ = f  # where `inspect.signature` looks for the parameters

    def __call__(self, *inputs: Any) -> Any:
        with limiting():
            return self.__wrapped__(*inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)
