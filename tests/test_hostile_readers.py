"""Hostile files: a reader either accepts a file or refuses it in one clear error, in little memory and time.

Valid files are changed at random: bits, lengths, JSON values and keys, encodings, and what stands in the place of the
file. Nothing may be written then, and nothing executed. A hundred changes for each reader are tried here, as many as
wanted with

    python tests/test_hostile_readers.py --files 10000 [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tinygrad_mha.cli import main as command_line
from tinygrad_mha.data import BYTE_SYMBOLS, BPETokenizer, CharTokenizer, load_tokenizer, read_text
from tinygrad_mha.files import CheckpointError, load_arrays, save_arrays
from tinygrad_mha.files.python_files import OwnCodeError, load_object
from tinygrad_mha.files.run_folder import CsvLog, find_latest
from tinygrad_mha.files.safetensors import DTYPES, read_shapes
from tinygrad_mha.nn import GPT, GPTConfig
from tinygrad_mha.training import load_trained, train
from tinygrad_mha.training.resume import compute_digest, resume_run, seal_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory, pipes and devices of Linux")

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 3
MEGABYTES, SECONDS, CHARACTERS = 600, 60, 2000  # the most that a reader may take, and of its message


# --------------------------------------------------------------------------------------------------------- the readers


class Reader(NamedTuple):
    """What reads files of a folder.

    Args:
        make: writes valid files into a folder.
        files: those that are changed.
        read: reads them.
        command: the command line that reads them, with `{}` for the folder; () if there is none.
    """

    make: Callable[[Path], Any]
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    command: tuple[str, ...] = ()


def make_arrays(folder: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"a.{kind}": rng.integers(0, 2, (3, i)).astype(dtype)
        for i, (kind, dtype) in enumerate(DTYPES.items())
        if kind != "BF16"
    }
    save_arrays(folder / "a.safetensors", {**arrays, "scalar": np.array(1.5)}, {"format": "pt"})


def read_arrays(folder: Path) -> None:
    arrays = load_arrays(folder / "a.safetensors")
    assert read_shapes(folder / "a.safetensors") == {name: array.shape for name, array in arrays.items()}


def make_gpt(**options: Any) -> GPT:
    return GPT(GPTConfig(vocab_size=11, block_size=5, n_layer=2, n_head=2, n_embd=4, **options), seed=0)


def make_pretrained(folder: Path, **options: Any) -> None:
    model = make_gpt(**options)
    model.special_ids, model.generation_config = {"eos_token_id": 3}, {"eos_token_id": [3, 4]}
    model.save_pretrained(folder, CharTokenizer("abcdefghijk"))


def make_llama(folder: Path) -> None:
    make_pretrained(folder, norm="rms", activation="swiglu", position="rotary", bias=False, n_kv_head=1)


def make_run(folder: Path) -> None:
    model = {"n_layer": 1, "n_head": 2, "n_embd": 4, "block_size": 5, "dropout": 0.5}
    run = {"eval_batches": 1, "batch_size": 2, "sample_tokens": 3, "sample_interval": 1, "steps": 2, "warmup": 0}
    (folder / "text.txt").write_text(TEXT)
    train("tiny", folder / "text.txt", folder / "run", show="quiet", **model, **run)
    (folder / "run/step-2").rename(folder / "run/step-1")  # every valid folder has the same names
    (folder / "run/LATEST").write_text("step-1")


def resume(folder: Path) -> None:
    checkpoint = find_latest(folder / "run")
    if checkpoint is None:
        raise CheckpointError(f"{folder} has no checkpoint")
    resume_run(checkpoint, None, None, None, None, None, {})


def merge(folder: Path) -> BPETokenizer:
    merges = [("t", "h"), ("th", "e")]
    vocab = {token: i for i, token in enumerate([*BYTE_SYMBOLS, "th", "the", "<|endoftext|>"])}
    tokenizer = BPETokenizer(vocab, merges)
    tokenizer.save(folder)
    return tokenizer


def make_merges(folder: Path) -> None:
    merge(folder)
    (folder / "tokenizer.json").unlink()


def use_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.decode(range(min(tokenizer.vocab_size, 300)))


def make_table(folder: Path) -> None:
    log = open_table(folder)
    log.rewind(0)
    for step, text in enumerate(["one", "two\rthree", 'a "b"', "", "注意力\n"]):
        log.add({"step": step, "loss": 1 / (step + 3), "text": text})


def open_table(folder: Path) -> CsvLog:
    return CsvLog(folder / "log.csv", {"step": int, "loss": float, "text": str})


OWN = """# -*- coding: utf-8 -*-
import numpy as np
WIDTH = {"注意力": 3.0, "b": (1, [2])}
def scale(x=np.ones((2, 3))):
    "Twice x."
    return x * 2.0 if x.ndim > 1 else -x
class Layer:
    def __call__(self, x):
        return x + WIDTH["b"][0]
layer = Layer()
"""

CHECKPOINT = ("state.json", "model.safetensors", "optimizer.safetensors", "characters.json")
RUN = ("run/LATEST", *(f"run/step-1/{name}" for name in CHECKPOINT))
PRETRAINED = ("config.json", "generation_config.json", "model.safetensors", "characters.json")
GENERATE = ("generate", "{}", "-n", "1", "--prompt", "a")

READERS = {
    "safetensors": Reader(make_arrays, ("a.safetensors",), read_arrays),
    "hugging face, GPT-2": Reader(make_pretrained, PRETRAINED[:3], GPT.from_pretrained, GENERATE),
    "hugging face, Llama": Reader(make_llama, PRETRAINED[:3], GPT.from_pretrained, GENERATE),
    "trained model": Reader(make_run, RUN, lambda folder: load_trained(folder / "run"), ("generate", "{}/run", "-n1")),
    "run": Reader(
        make_run,
        (*RUN, "run/log.csv", "run/samples.csv", "text.txt"),
        resume,
        ("train", "--resume", "--out", "{}/run", "--steps", "2", "--quiet"),
    ),
    "characters": Reader(lambda f: CharTokenizer.of(TEXT).save(f), ("characters.json",), use_tokenizer),
    "byte pairs": Reader(merge, ("tokenizer.json",), use_tokenizer),
    "byte pairs in two files": Reader(make_merges, ("vocab.json", "merges.txt"), use_tokenizer),
    "text": Reader(
        lambda folder: (folder / "text.txt").write_text(TEXT),
        ("text.txt",),
        lambda folder: read_text(folder / "text.txt"),
        ("train", "--text", "{}/text.txt", "--out", "{}/run", "--steps", "0", "--quiet"),
    ),
    "table": Reader(make_table, ("log.csv",), lambda folder: open_table(folder).rewind(4)),
    "Python": Reader(
        lambda folder: (folder / "own.py").write_text(OWN),
        ("own.py",),
        lambda folder: load_object(f"{folder}/own.py:scale"),
        ("gradcheck", "{}/own.py:scale"),
    ),
}


# --------------------------------------------------------------------------------------------------------- the changes


HOSTILE: list[Any] = [None, True, -1, 0, 3.5, 2**31, 2**63, 2**64, 10**30, -(10**30), 10**400, 1e308, 1e-320]
HOSTILE += [float("inf"), float("nan"), "", "x", "\ud800", "\0", "x" * 3000, "../../x", "/dev/zero", "NaN", "int"]
HOSTILE += [[], {}, [[]], [1, 2], {"a": 1}, [None] * 300, ["x"] * 300, {str(i): i for i in range(300)}]
HOSTILE += [[10**30] * 100, [0, 2**62, 2**62]]
RAW = {
    "digits": b"9" * 5000,
    "lists": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "minus": b"-" * 3000,
    "large": b"1e999999",
    "half": b'"\\ud800',
    "byte": b"\xff",
    "zero": b"\0",
    "word": b"nul",
}

Change = tuple[Any, ...]
fraction, data = st.floats(0, 1), st.binary(min_size=1, max_size=9)
BYTES = st.one_of(
    st.tuples(st.just("flip"), fraction, st.integers(0, 7)),
    st.tuples(st.just("cut"), fraction),
    st.tuples(st.just("insert"), fraction, st.one_of(data, st.sampled_from(sorted(RAW)))),
    st.tuples(st.just("overwrite"), fraction, data),
    st.tuples(st.just("delete"), fraction, st.integers(1, 40)),
    st.tuples(st.just("repeat"), fraction, st.integers(1, 400), st.sampled_from([1, 2, 500])),
    st.tuples(st.just("encode"), st.sampled_from(["utf-16", "utf-32-be", "utf-8-sig", "latin-1", "cp037"])),
    st.tuples(st.just("lines"), st.sampled_from([b"\r\n", b"\r", b"\n\n", b"\x00\n"])),
)
JSON = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 10**6), st.sampled_from(HOSTILE)),
    st.tuples(st.just("remove"), st.integers(0, 10**6)),
    st.tuples(st.just("twice"), st.integers(0, 10**6)),
    st.tuples(st.just("add"), st.integers(0, 10**6), st.sampled_from(HOSTILE)),
    st.tuples(st.just("raw"), st.integers(0, 10**6), st.sampled_from(sorted(RAW))),
)
KINDS = st.tuples(
    st.sampled_from(["folder", "pipe", "socket", "zeros", "full", "dangling", "loop", "missing", "empty", "sparse"])
)


def change_bytes(content: bytes, change: Change) -> bytes:
    match change:
        case "encode", encoding:
            return content.decode("latin-1").encode(encoding, "replace")
        case "lines", end:
            return content.replace(b"\n", end)
    i = int(change[1] * len(content))
    match change:
        case "flip", _, bit if i < len(content):
            return content[:i] + bytes([content[i] ^ 1 << bit]) + content[i + 1 :]
        case "cut", _:
            return content[:i]
        case "insert", _, new:
            return content[:i] + RAW.get(new, new) + content[i:]
        case "overwrite", _, new:
            return content[:i] + new + content[i + len(new) :]
        case "delete", _, n:
            return content[:i] + content[i + n :]
        case "repeat", _, n, times:
            return content[:i] + content[i : i + n] * times + content[i:]
    return content


def find_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All (container, key) of a JSON value, in a fixed order."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        yield value, key
        yield from find_places(inside)


def change_json(text: bytes, change: Change) -> bytes:
    content = json.loads(text)
    places = list(find_places(content))
    container, key = places[change[1] % len(places)]
    mark = "the place of what JSON cannot write"
    match change:
        case "set", _, value:
            container[key] = value
        case "remove", _:
            del container[key]
        case "add", _, value:
            container.append(value) if isinstance(container, list) else container.update(new=value)
        case ("twice", _) | ("raw", _, _):
            raw = RAW[change[2]] if change[0] == "raw" else None
            if raw is None and isinstance(container, dict):
                raw = b'1, "%s": 2' % str(key).encode()
            container[key] = mark
            return json.dumps(content).encode().replace(json.dumps(mark).encode(), raw or b"1")
    return json.dumps(content).encode()


def change_kind(path: Path, kind: str) -> None:
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as s, contextlib.chdir(path.parent):  # a path of 108 bytes at most
                s.bind(path.name)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "full":
            path.symlink_to("/dev/full")
        case "dangling":
            path.symlink_to("nowhere")
        case "loop":
            path.symlink_to(path.name)
        case "empty":
            path.touch()
        case "sparse":
            with open(path, "wb") as file:
                file.truncate(10**12)


def apply(change: Change, path: Path) -> None:
    if len(change) == 1:
        change_kind(path, *change)
        return
    content = path.read_bytes()
    is_json = change[0] in ("set", "remove", "twice", "add", "raw")
    if is_json and path.suffix == ".safetensors":
        end = 8 + int.from_bytes(content[:8], "little")
        header = change_json(content[8:end], change)
        content = len(header).to_bytes(8, "little") + header + content[end:]
    elif is_json and path.suffix == ".json":
        content = change_json(content, change)
    elif not is_json:
        content = change_bytes(content, change)
    path.write_bytes(content)


def reseal(path: Path) -> None:
    """Enter the digests of a changed file into the state of its checkpoint, as somebody would who wants to deceive."""
    state = path.with_name("state.json")
    if not (state.is_file() and path.is_file()) or path.stat().st_size > 10**6:
        return
    with contextlib.suppress(ValueError, AttributeError, RecursionError):  # not the state of a run any more
        content = json.loads(state.read_text())
        if path != state:
            content["files"][path.name] = compute_digest(path)
        state.write_text(json.dumps(seal_state(content)))


# -------------------------------------------------------------------------------------------------------------- a trial


EVENTS: list[str] | None = None  # what was written and executed while a reader was at work
WRITES = ("os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate", "os.chmod")
STARTS = ("exec", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect")
STARTS += ("pickle.find_class", "marshal.load", "marshal.loads", "ctypes.dlopen")


def watch(event: str, args: tuple[Any, ...]) -> None:
    if EVENTS is None:
        return
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event in WRITES or event in STARTS:
        EVENTS.append(f"{event} {args[:2]}")


sys.addaudithook(watch)


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Yield a list of what is written and executed meanwhile, and hold memory and time within bounds."""
    global EVENTS

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt("too slow")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    EVENTS = events = []
    try:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEGABYTES * 2**20, limits[1]))
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        yield events
    finally:
        EVENTS = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def list_contents(folder: Path) -> dict[str, Any]:
    """What is in a folder: bytes of files, the aim of links, the mode of everything else."""
    result: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            result[name] = os.readlink(path)
        elif path.is_file() and path.stat().st_size < 10**7:
            result[name] = path.read_bytes()
        else:
            result[name] = path.stat().st_mode
    return result


INNARDS = ("NoneType", "object has no attribute", "not subscriptable", "unhashable", "unpack", "positional argument")
INNARDS += ("list indices", "not iterable", "unsupported operand", "not supported between", "\n\n", "0x7f", "Traceback")


def judge(error: Exception, name: str, folder: Path) -> None:
    """Assert that an error is one of this package, names the file or its folder, and is clear."""
    text = str(error)
    assert isinstance(error, (CheckpointError, OwnCodeError, OSError, TypeError if name == "Python" else OSError))
    assert str(folder) in text, "the message names no file"
    assert len(text) <= CHARACTERS, f"a message of {len(text)} characters"
    assert name == "Python" or not [word for word in INNARDS if word in text]  # errors of a person's own are shown


def examine(name: str, valid: Path, file: str, change: Change, sealed: bool, counts: Counter[str]) -> None:
    """Change a file of a copy of a valid folder, read it, and judge how it is refused, here and by the command line."""
    reader = READERS[name]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "folder")
        shutil.copytree(valid, folder)
        relocate(folder)
        apply(change, folder / file)
        if sealed:
            reseal(folder / file)
        before = list_contents(folder)
        counts["files"] += 1
        try:
            with watched() as events, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader.read(folder)
            counts["accepted"] += 1
            return
        except Exception as error:
            judge(error, name, folder)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert list_contents(folder) == before, "a reader that failed has changed the folder"
        assert name == "Python" or not events, f"written or executed: {events}"
        if reader.command:
            with watched(), contextlib.redirect_stderr(io.StringIO()) as err, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code = command_line([word.format(folder) for word in reader.command])
            lines = err.getvalue().splitlines()
            assert (code, len(lines)) == (2, 1), f"exit {code}: {err.getvalue()}"
            assert lines[0].startswith("tinygrad-mha: ")
            assert list_contents(folder) == before


def relocate(folder: Path) -> None:
    """Let the state of a copied run name the text beside it."""
    path = folder / "run/step-1/state.json"
    if path.is_file():
        state = json.loads(path.read_text())
        state["text"]["source"] = str(folder / "text.txt")
        path.write_text(json.dumps(seal_state(state)))


def fuzz(name: str, files: int, valid: Path, counts: Counter[str]) -> None:
    """Examine `files` changes of what a reader reads."""
    READERS[name].make(valid)
    with tempfile.TemporaryDirectory() as parent:  # once as it is: later calls import nothing
        shutil.copytree(valid, Path(parent, "folder"))
        relocate(Path(parent, "folder"))
        READERS[name].read(Path(parent, "folder"))
    changes = st.one_of(BYTES, JSON, KINDS)

    @settings(
        max_examples=files,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
    )
    @given(file=st.sampled_from(READERS[name].files), change=changes, sealed=st.booleans())
    def run(file: str, change: Change, sealed: bool) -> None:
        examine(name, valid, file, change, sealed, counts)

    run()


@pytest.mark.parametrize("name", READERS)
def test_a_changed_file_is_refused_in_one_clear_error(name, tmp_path):
    if name.startswith("byte pairs"):
        pytest.importorskip("tokenizers")
    fuzz(name, 100, tmp_path, Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000, help="how many in all (default: 10000)")
    parser.add_argument("--only", nargs="+", choices=READERS, default=list(READERS))
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    args = parser.parse_args()
    result = {}
    for name in args.only:
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            fuzz(name, args.files // len(args.only), Path(folder), counts)
        result[name] = dict(counts)
        print(f"{name:24} {counts['files']:7} files, {counts['accepted']:6} of them accepted", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
