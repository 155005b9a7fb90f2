"""The files of a training run: checkpoints and logs.

The folder of a run contains a folder `step-N`, which is a checkpoint, and a file `LATEST` with its name. A new
checkpoint is written under a temporary name, and `LATEST` is changed when all of it is on the disk. So a complete
checkpoint exists whenever the process is killed. Until the run is finished, the checkpoint before is kept too.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tinygrad_mha.files.atomic import naming, replacing, replacing_folder, sync_folder
from tinygrad_mha.files.json_files import read_json
from tinygrad_mha.files.reading import CheckpointError, open_file, read_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "STATE",
    "CsvLog",
    "check_new",
    "find_latest",
    "hold_folder",
    "is_plain",
    "remove_others",
    "write_checkpoint",
]

PATIENCE = 1.0  # seconds
MOST_OF_A_NAME = 300  # bytes; file systems have 255 of one name
STATE = "state.json"  # the last file of a checkpoint; "files" in it names the others
MODEL_FILES = {"model.safetensors", "optimizer.safetensors"}
TOKENIZER_FILES = {"characters.json", "tokenizer.json", "vocab.json", "merges.txt"}
TEMPORARY = re.compile(r"^\.(.+)\.[0-9]+\.tmp$")  # the name under which a file is written
STEP = re.compile(r"step-[0-9]+")
LOGS = ("log.csv", "samples.csv")
REMAINS = re.compile(r"\.(LATEST|loss\.png|(log|samples)\.csv)\.[0-9]+\.tmp")


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Create the folder of a run and lock it, so that no other process writes there. The kernel releases the lock.

    A folder that is created and stays empty is removed at the end. A system without `flock` locks nothing.

    Raises:
        BlockingIOError: another process holds the folder.
        OSError: it cannot be created or opened.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    except OSError as error:
        raise type(error)(
            error.errno, f"cannot write the run to this folder ({error.strerror})", str(folder)
        ) from error
    try:
        if handle is not None:
            lock(handle, folder)
        try:
            yield
        finally:
            for path in missing:
                with suppress(OSError):  # not empty
                    path.rmdir()
    finally:  # a process that is refused removes nothing: the other one may not have written yet
        if handle is not None:
            os.close(handle)


def lock(handle: int, folder: Path) -> None:
    """Lock an open folder, or wait for a process that is about to end, such as a rank of a launch that was aborted.

    Raises:
        BlockingIOError: another process holds it.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                text = "another process is training in this folder: wait for its end, or choose another folder"
                raise BlockingIOError(error.errno, text, str(folder)) from error
            time.sleep(0.05)
        except OSError:
            return  # a file system without locks


def find_latest(folder: str | os.PathLike[str]) -> Path | None:
    """The latest checkpoint in the folder of a run, or None. Without `LATEST` it is the checkpoint of the highest step.

    Raises:
        CheckpointError: `LATEST` names a folder that does not exist, or is no file.
    """
    path = Path(folder, "LATEST")
    if not path.exists():
        return max(list_checkpoints(Path(folder)), key=get_step, default=None)
    name = read_file(path, MOST_OF_A_NAME).decode("utf-8", "replace").strip()
    if not STEP.fullmatch(name) or not Path(folder, name).is_dir():
        raise CheckpointError(
            f"{path} contains {name!r}, but there is no such checkpoint; without {path} the last whole one is used"
        )
    return Path(folder, name)


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in the folder of a run."""
    return [path for path in folder.glob("step-*") if STEP.fullmatch(path.name) and is_ours(path) and is_whole(path)]


def get_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def list_files(checkpoint: Path) -> list[str]:
    """The files that a checkpoint says it has, besides its state."""
    try:
        files = read_json(checkpoint / STATE).get("files")
    except CheckpointError:
        return []
    return [name for name in files if is_plain(name)] if isinstance(files, dict) else []


def is_plain(name: str) -> bool:
    """Whether a name is that of a file in a folder, and no path out of it."""
    return Path(name).name == name and "\0" not in name


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint has its state and all files that it names."""
    return all((checkpoint / name).is_file() for name in (STATE, *list_files(checkpoint)))


def is_ours(path: Path) -> bool:
    """Whether a folder has the files of a checkpoint, of some of them, and no files of anybody else."""
    if path.is_symlink() or not path.is_dir():
        return False
    names = {STATE, *MODEL_FILES, *TOKENIZER_FILES, *list_files(path)}
    found = [TEMPORARY.sub(r"\1", p.name) if p.is_file() else "" for p in path.iterdir()]
    return names.issuperset(found)


def check_new(folder: Path, resume: bool) -> None:
    """Check that a run may begin in a folder without a run: it would overwrite nothing.

    Raises:
        CheckpointError: with `resume`, the folder holds something else.
        FileExistsError: it holds files with the names of those of a run.
    """
    # What a process that was killed may leave before its first checkpoint is complete does not count.
    empty = {name for name in LOGS if is_empty_log(folder / name)}
    names = sorted(path.name for path in folder.iterdir())
    names = [name for name in names if not (REMAINS.fullmatch(name) or re.fullmatch(r"step-[0-9]+\.tmp", name))]
    found = [name for name in names if name not in empty]
    if resume and found:
        if STATE in found:
            what = f"it is a checkpoint: resume its run, {folder.parent}"
        elif "config.json" in found:
            what = "it is a Hugging Face folder: train its model with --init, or model="
        else:
            what = f"it contains {', '.join(found[:5])}{' and more' if len(found) > 5 else ''}"
        raise CheckpointError(f"{folder} has no run to resume: {what}")
    taken = [name for name in found if re.fullmatch(r"LATEST|log\.csv|samples\.csv|loss\.png|step-[0-9]+", name)]
    if taken:
        raise FileExistsError(
            f"{folder} contains {', '.join(taken[:5])}, which a run would overwrite: choose another folder"
        )


def is_empty_log(path: Path) -> bool:
    """Whether a file has the names of the columns of a log, and no rows."""
    if not path.is_file():
        return False
    with open_file(path) as file:
        start = file.read(200)
    return start.startswith(b"step,") and start.find(b"\n") == len(start) - 1


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None], keep: int = 1) -> Path:
    """Let `write` fill a folder, name it `step-N`, set `LATEST` to it, and remove the checkpoints before.

    If `LATEST` names this step already, nothing is written: the same step of a run has the same state.

    Args:
        keep: how many checkpoints remain.
    """
    checkpoint = folder / f"step-{step}"
    if checkpoint != find_latest(folder) or not (folder / "LATEST").is_file():
        for path in (checkpoint, checkpoint.with_name(checkpoint.name + ".tmp")):
            remove_checkpoint(path)
        with replacing_folder(checkpoint) as temporary:
            write(temporary)
        with replacing(folder / "LATEST") as temporary:
            temporary.write_text(checkpoint.name + "\n", encoding="utf-8")
        sync_folder(folder)
    remove_others(folder, checkpoint, keep)
    return checkpoint


def remove_others(folder: Path, checkpoint: Path, keep: int = 1) -> None:
    """Remove the other checkpoints of a run but the newest before it, and the remains of processes that were killed.

    Args:
        keep: how many checkpoints remain. Those of later steps than `checkpoint` are removed always.
    """
    before = [path for path in list_checkpoints(folder) if get_step(path) < get_step(checkpoint)]
    kept = [checkpoint, *sorted(before, key=get_step, reverse=True)[: keep - 1]]
    for path in folder.iterdir():
        if path.is_file() and REMAINS.fullmatch(path.name):
            path.unlink(missing_ok=True)
        elif STEP.fullmatch(path.name.removesuffix(".tmp")) and path not in kept:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, or what there is of it, unless it has files of anybody else."""
    begun = path.suffix == ".tmp" and not path.is_symlink() and (path / "model.safetensors").is_file()  # the first file
    if begun or is_ours(path):
        shutil.rmtree(path, ignore_errors=True)


class CsvLog:
    """Rows that are only appended, in memory and, if there is a path, in a CSV file.

    Reading a number gives exactly the number that was written. Runs that compute the same write the same file, so
    nothing that differs between them, such as a time, belongs here.

    Args:
        columns: {name: int, float or str}; the first is the step, which never decreases.

    Attributes:
        rows: the rows as dicts; a column without a value is missing.
    """

    def __init__(self, path: Path | None, columns: dict[str, type]) -> None:
        self.path = path
        self.columns = columns
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Append one row."""
        self.rows.append(row)
        if self.path is not None:
            with naming(self.path), open(self.path, "a", newline="", encoding="utf-8", errors="surrogatepass") as file:
                write_row(file, [row.get(name, "") for name in self.columns])

    def sync(self) -> None:
        """fsync the file."""
        if self.path is not None:
            with naming(self.path), open(self.path, "rb+") as file:
                os.fsync(file.fileno())

    def read(self, step: int) -> None:
        """Read the rows before `step` from the file, if there is one. A row that was cut short is no row.

        Raises:
            CheckpointError: a row cannot be read.
        """
        self.rows = []
        if self.path is None or not self.path.exists():
            return
        whole = [row for row in read_rows(self.path) if len(row) == len(self.columns) and row[0].isdecimal()]
        try:
            self.rows = [self._parse(row) for row in whole if int(row[0]) < step]
        except ValueError as error:
            raise CheckpointError(f"{self.path} has a row that cannot be read ({error}): move it away") from error

    def rewind(self, step: int) -> None:
        """Keep the rows before `step` and drop the others, in memory and in the file.

        Raises:
            CheckpointError: as `read`; the file is unchanged.
        """
        self.read(step)
        if self.path is None:
            return
        with (
            replacing(self.path) as temporary,
            open(temporary, "w", newline="", encoding="utf-8", errors="surrogatepass") as file,
        ):
            write_row(file, list(self.columns))
            for row in self.rows:
                write_row(file, [row.get(name, "") for name in self.columns])

    def _parse(self, cells: list[str]) -> dict[str, Any]:
        pairs = zip(self.columns.items(), cells, strict=True)
        return {name: kind(cell) for (name, kind), cell in pairs if cell or kind is str}


def write_row(file: Any, cells: list[Any]) -> None:
    """Write one row. All cells are quoted if one has a carriage return; csv in Python 3.12 quotes none."""
    quoted = any("\r" in cell for cell in cells if isinstance(cell, str))
    csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL).writerow(cells)


def read_rows(path: Path) -> list[list[str]]:
    """All rows of a file, with cells of any length."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        return list(csv.reader(io.StringIO(read_file(path).decode("utf-8", "surrogatepass"), newline="")))
    except CheckpointError:
        raise
    except (csv.Error, ValueError) as error:
        raise CheckpointError(f"{path} is not a table in UTF-8 ({error}): move it away") from error
    finally:
        csv.field_size_limit(limit)
