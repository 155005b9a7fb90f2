"""Ends and disturbs training runs wherever it can: python benchmarks/sudden_death.py [--only NAME ...] [--kills 200].

After each death the run is resumed, and all of its files must equal those of a run that was left alone, bit for bit.
The runs are those of tests/test_training.py, in child processes.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import ctypes
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(ROOT / "tests"))

from test_training import contents, small

from tinygrad_mha.files import CheckpointError
from tinygrad_mha.files.run_folder import PATIENCE
from tinygrad_mha.training import report

Counts = dict[str, Any]
Action = Callable[[], Any]

# One step: an evaluation, a sample, a row, and a checkpoint that takes the place of the one before.
SHORT = {"steps": 1, "eval_interval": 1, "eval_batches": 1, "sample_interval": 1, "sample_tokens": 1}
SHORT |= {"checkpoint_interval": 1}
LONG = {"steps": 60, "eval_interval": 20, "sample_interval": 20, "checkpoint_interval": 2}
FINISHED, FAILED, INTERRUPTED = 0, 3, 4  # how a child exits


class Subject:
    """A run that is ended again and again, beside the same run left alone.

    Args:
        parent: the folder of both.
        options: those of `train`.
    """

    def __init__(self, parent: Path, options: dict[str, Any]) -> None:
        self.parent, self.options = parent, options
        self.folder = parent / "killed"
        small(parent / "whole", **options)
        self.expected = contents(parent / "whole")

    def train(self, **options: Any) -> Any:
        return small(self.folder, resume=True, **self.options, **options)

    def fork(self, prepare: Action = lambda: None, **options: Any) -> int:
        """Start the run, or resume it, in a child process in which `prepare` is called first. Returns its id."""
        pid = os.fork()
        if pid:
            return pid
        code = FAILED
        try:
            prepare()
            code = INTERRUPTED if self.train(**options).interrupted else FINISHED
        except (OSError, CheckpointError) as error:
            with contextlib.suppress(OSError):
                (self.parent / "error").write_text(str(error))
        except KeyboardInterrupt:
            code = INTERRUPTED
        finally:
            os._exit(code)

    def end(self, prepare: Action = lambda: None) -> int:
        """Begin anew in a child process, and return how it ended."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.parent / "error").write_text("")
        return os.waitpid(self.fork(prepare), 0)[1]

    def check(self, what: Any) -> None:
        """Resume the run to its end and compare all of its files."""
        self.train()
        found = contents(self.folder)
        different = sorted(name for name in {*found, *self.expected} if found.get(name) != self.expected.get(name))
        assert not different, f"after {what} these files differ: {different}"

    def check_error(self, what: Any) -> None:
        """Check that the child that failed has named the folder in its error."""
        text = (self.parent / "error").read_text()
        assert str(self.folder) in text, f"{what}: {text or 'no error of ours'}"


def has_failed(status: int) -> bool:
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == FAILED


# ----------------------------------------------------------------------------------------------------------------- kill


def kill_at_random_moments(parent: Path, kills: int) -> Counts:
    """kill -9 at random moments of a run, which is resumed each time."""
    subject, draw, done, runs = Subject(parent, LONG), random.Random(1), 0, 0
    start = time.perf_counter()
    subject.train()
    whole = time.perf_counter() - start
    shutil.rmtree(subject.folder)
    while done < kills:
        pid = subject.fork()
        time.sleep(draw.uniform(0, whole / 2))
        os.kill(pid, signal.SIGKILL)
        if os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            done += 1
        else:  # it had come to its end
            subject.check(f"{done} kills")
            shutil.rmtree(subject.folder)
            runs += 1
    subject.check(f"{done} kills")
    return {"kills": done, "runs": runs + 1}


def kill_at_file_operations(parent: Path, kills: int) -> Counts:
    """kill -9 at every file operation of Python in a run of one step with two saves."""
    subject, done = Subject(parent, SHORT), 0

    def prepare() -> None:
        left = [done + 1]

        def lethal(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        for name in ("open", "replace", "mkdir", "rmdir", "unlink", "fsync"):
            setattr(os, name, lethal(getattr(os, name)))
        builtins.open = lethal(open)

    while os.WIFSIGNALED(subject.end(prepare)):
        done += 1
        subject.check(f"a kill at file operation {done}")
    return {"kills": done}


# System calls that change files, by their numbers on x86-64.
CALLS = {1: "write", 2: "open", 3: "close", 18: "pwrite", 20: "writev", 73: "flock", 74: "fsync", 77: "ftruncate"}
CALLS |= {82: "rename", 83: "mkdir", 84: "rmdir", 87: "unlink", 88: "symlink", 90: "chmod", 91: "fchmod"}
CALLS |= {257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 268: "fchmodat", 316: "renameat2"}
TRACE_ME, GET_REGISTERS, SET_REGISTERS, NEXT_CALL, SET_OPTIONS = 0, 12, 13, 24, 0x4200  # requests of ptrace
RESULT, NUMBER = 10, 15  # the registers rax and orig_rax
ENOSPC = 28


class Tracer:
    """A child process that stops before and after each system call."""

    def __init__(self, subject: Subject) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.registers = (ctypes.c_ulong * 27)()
        shutil.rmtree(subject.folder, ignore_errors=True)
        (subject.parent / "error").write_text("")
        self.pid = subject.fork(self._stop)
        os.waitpid(self.pid, 0)
        self.ptrace(SET_OPTIONS, 1)  # marks the stops at system calls

    def _stop(self) -> None:
        self.ptrace(TRACE_ME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)

    def ptrace(self, request: int, argument: Any) -> None:
        pid = 0 if request == TRACE_ME else self.pid
        if self.libc.ptrace(request, pid, None, ctypes.c_void_p(argument)) < 0:
            raise OSError(ctypes.get_errno(), f"ptrace request {request}")

    def follow(self, visit: Callable[[int, bool], None]) -> int:
        """Call `visit(n, before)` before and after each call of CALLS, n from 1. Returns how the child ended."""
        n, before, forwarded = 0, True, 0
        while True:
            with contextlib.suppress(ProcessLookupError):  # it was killed
                self.ptrace(NEXT_CALL, forwarded)
            _, status = os.waitpid(self.pid, 0)
            if not os.WIFSTOPPED(status):
                return status
            forwarded = os.WSTOPSIG(status)
            if forwarded == signal.SIGTRAP | 0x80:
                forwarded = 0
                self.ptrace(GET_REGISTERS, ctypes.addressof(self.registers))
                if self.registers[NUMBER] in CALLS or (not before and n and self.registers[NUMBER] == 2**64 - 1):
                    n += before
                    visit(n, before)
                before = not before

    def write_register(self, register: int, value: int) -> None:
        self.registers[register] = value % 2**64
        self.ptrace(SET_REGISTERS, ctypes.addressof(self.registers))


def kill_at_system_calls(parent: Path, kills: int) -> Counts:
    """kill -9 before and after every system call that changes files, in a run of one step with two saves."""
    subject, done = Subject(parent, SHORT), 0
    while True:
        tracer = Tracer(subject)

        def visit(n: int, before: bool, tracer: Tracer = tracer, last: int = done + 1) -> None:
            if 2 * n - before == last:
                os.kill(tracer.pid, signal.SIGKILL)

        if not os.WIFSIGNALED(tracer.follow(visit)):
            return {"kills": done}
        done += 1
        subject.check(f"a kill at system call {done / 2}")


def fail_at_system_calls(parent: Path, kills: int) -> Counts:
    """Every system call that changes files fails once, as on a full disk."""
    subject, n_calls, failures = Subject(parent, SHORT), 0, 0
    while True:
        tracer, calls = Tracer(subject), 0

        def visit(n: int, before: bool, tracer: Tracer = tracer, failing: int = n_calls + 1) -> None:
            nonlocal calls
            calls = n
            if n == failing and CALLS.get(tracer.registers[NUMBER]) != "close":
                tracer.write_register(*((NUMBER, -1) if before else (RESULT, -ENOSPC)))
            elif n == failing and not before and tracer.registers[NUMBER] == 2**64 - 1:
                tracer.write_register(RESULT, -ENOSPC)

        status = tracer.follow(visit)
        assert os.WIFEXITED(status), f"call {n_calls + 1} that fails ends the process with status {status}"
        if calls <= n_calls:
            return {"calls": n_calls, "runs that stopped with an error": failures}
        n_calls += 1
        if has_failed(status):
            failures += 1
            subject.check_error(f"the failure of system call {n_calls}")
        subject.check(f"the failure of system call {n_calls}")


# ----------------------------------------------------------------------------------------------------------------- disk


def exceed_file_sizes(parent: Path, kills: int) -> Counts:
    """A limit on the size of a file that kills the process or fails, in the middle of each file of a run."""
    subject, done = Subject(parent, SHORT), 0
    largest = max(map(len, subject.expected.values()))
    for size in range(1, largest, max(1, largest // 6)):
        for deadly in (True, False):

            def prepare(size: int = size, deadly: bool = deadly) -> None:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

            status = subject.end(prepare)
            assert os.WIFSIGNALED(status) if deadly else has_failed(status), (size, deadly, status)
            subject.check(f"a limit of {size} bytes")
            done += 1
    return {"limits": done}


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory, which only root can make."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill_disk(parent: Path, kills: int) -> Counts:
    """A file system that becomes full somewhere in a run, and is made larger before the run is resumed."""
    if os.geteuid() != 0:
        return {"not tried": "only root mounts a small file system"}
    done = 0
    with mounted(parent / "disk", "size=10m"):
        subject = Subject(parent / "disk", SHORT)
        shutil.rmtree(parent / "disk/whole")
        for pages in range(1, 40):
            shutil.rmtree(subject.folder, ignore_errors=True)
            size = f"remount,size={4 * pages}k"
            subprocess.run(["mount", "-o", size, parent / "disk"], check=True)
            status = os.waitpid(subject.fork(), 0)[1]
            subprocess.run(["mount", "-o", "remount,size=10m", parent / "disk"], check=True)
            assert os.WIFEXITED(status)
            subject.check(f"a disk of {4 * pages} kB")
            done += has_failed(status)
            if not has_failed(status):
                break
    return {"sizes": done}


def write_protect(parent: Path, kills: int) -> Counts:
    """A folder that is, or in the midst of a run becomes, read-only."""
    parent.chmod(0o777)
    subject = Subject(parent, {**LONG, "steps": 6})
    user = 65534 if os.geteuid() == 0 else os.geteuid()  # root may write everywhere
    for step in range(-1, 6):
        shutil.rmtree(subject.folder, ignore_errors=True)
        subject.folder.mkdir()
        os.chown(subject.folder, user, -1)
        (parent / "error").write_text("")
        (parent / "error").chmod(0o666)

        def protect(event: dict[str, Any], step: int = step) -> None:
            if event["event"] == "step" and event["step"] == step:
                subject.folder.chmod(0o555)

        def prepare(step: int = step) -> None:
            if step < 0:
                subject.folder.chmod(0o555)
            if os.geteuid() != user:
                os.setuid(user)

        status = os.waitpid(subject.fork(prepare, show=protect), 0)[1]
        subject.folder.chmod(0o777)
        assert has_failed(status), f"step {step} ended with status {status}"
        subject.check_error(f"write protection at step {step}")
        subject.check(f"write protection at step {step}")
    return {"moments": 7}


# ------------------------------------------------------------------------------------------- neighbours, clock, signals


def start_together(parent: Path, kills: int) -> Counts:
    """Four processes that start at once on one folder, 10 times: one trains, the others are refused."""
    subject, refused = Subject(parent, {**LONG, "steps": 6}), 0

    def linger(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            time.sleep(PATIENCE + 1)

    for _ in range(10):
        shutil.rmtree(subject.folder, ignore_errors=True)
        (parent / "error").write_text("")
        children = [subject.fork(show=linger) for _ in range(4)]
        statuses = [os.waitpid(pid, 0)[1] for pid in children]
        finished = sum(os.WIFEXITED(s) and os.WEXITSTATUS(s) == FINISHED for s in statuses)
        assert (finished, sum(map(has_failed, statuses))) == (1, 3), statuses
        refused += 3
        subject.check_error("four processes at once")
        subject.check("four processes at once")
    return {"starts": 40, "refused": refused}


def turn_back_the_clock(parent: Path, kills: int) -> Counts:
    """Clocks that run backwards, and stand still, while a run shows its bar."""
    subject = Subject(parent, {**LONG, "steps": 6})
    for pace in (-3600.0, 0.0):

        def prepare(pace: float = pace) -> None:
            now = [1e9]

            def read() -> float:
                now[0] += pace
                return now[0]

            time.time = time.monotonic = time.perf_counter = read
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115

        shutil.rmtree(subject.folder, ignore_errors=True)
        status = os.waitpid(subject.fork(prepare, show="bar"), 0)[1]
        assert status == FINISHED, f"a pace of {pace} ended with status {status}"
        subject.check(f"a clock of pace {pace}")
    return {"clocks": 2}


def send_signals(parent: Path, kills: int) -> Counts:
    """SIGINT, SIGTERM, SIGHUP, and SIGINT twice, at random moments of a run, which is resumed each time."""
    subject, draw, counts = Subject(parent, LONG), random.Random(2), {}
    start = time.perf_counter()
    subject.train()
    whole = time.perf_counter() - start
    for name, numbers in {
        "SIGINT": [signal.SIGINT],
        "SIGTERM": [signal.SIGTERM],
        "SIGHUP": [signal.SIGHUP],
        "SIGINT twice": [signal.SIGINT] * 2,
    }.items():
        shutil.rmtree(subject.folder)
        sent = 0
        while sent < kills // 4:
            pid = subject.fork(lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
            time.sleep(draw.uniform(0.01, whole / 2))
            for number in numbers:
                os.kill(pid, number)
                time.sleep(draw.uniform(0, 0.003))
            status = os.waitpid(pid, 0)[1]
            assert not has_failed(status), f"{name}: {(parent / 'error').read_text()}"
            sent += 1
            if status == FINISHED:
                subject.check(f"{sent} times {name}")
                shutil.rmtree(subject.folder)
        subject.check(f"{sent} times {name}")
        counts[name] = sent
    return counts


ENTRIES: dict[str, Callable[[Path, int], Counts]] = {
    "moments": kill_at_random_moments,
    "operations": kill_at_file_operations,
    "calls": kill_at_system_calls,
    "failures": fail_at_system_calls,
    "sizes": exceed_file_sizes,
    "disk": fill_disk,
    "protection": write_protect,
    "neighbours": start_together,
    "clock": turn_back_the_clock,
    "signals": send_signals,
}
NEEDS_LINUX = ("calls", "failures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--kills", type=int, default=200, help="at random moments (default: 200)")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    args = parser.parse_args()
    report.can_plot = lambda: False
    os.fsync = lambda handle: None  # what a killed process has written is not lost without it
    result: dict[str, Counts] = {}
    for name in args.only:
        if name in NEEDS_LINUX and (sys.platform, platform.machine()) != ("linux", "x86_64"):
            continue
        with tempfile.TemporaryDirectory() as parent:
            counts = ENTRIES[name](Path(parent), args.kills)
        result[name] = {"what": ENTRIES[name].__doc__, **counts}
        print(name, counts, flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
