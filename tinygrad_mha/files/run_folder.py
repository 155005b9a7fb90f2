"""What a training run has on the disk: checkpoints that are whole or not there, and tables that can be taken back.

A run's folder holds `step-N` folders, each a checkpoint, and `LATEST`, which names the one that counts. A new one is
written under another name, and `LATEST` moves on when all of it is on the disk: whenever the writer is killed, a whole
one is there.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinygrad_mha.files.safetensors import CheckpointError, replacing


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that counts in a run's folder, or None.

    Raises:
        CheckpointError: `LATEST` names something that is not there.
    """
    path = Path(folder, "LATEST")
    if not path.is_file():
        return None
    name = path.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"step-\d+", name) or not Path(folder, name).is_dir():
        raise CheckpointError(f"{path} names {name!r}, and there is no such checkpoint")
    return Path(folder, name)


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Have `write` fill a folder, call it `step-N`, let `LATEST` name it, and remove what came before.

    One that `LATEST` names already is left as it is: the same step of the same run is the same state.
    """
    checkpoint = folder / f"step-{step}"
    if checkpoint != latest(folder):
        with whole_folder(checkpoint) as temporary:
            write(temporary)
        with replacing(folder / "LATEST") as temporary:
            temporary.write_text(checkpoint.name + "\n", encoding="utf-8")
        sync_folder(folder)
    tidy(folder, checkpoint)
    return checkpoint


def tidy(folder: Path, checkpoint: Path) -> None:
    """Remove the other checkpoints, and what a writer that was killed has left behind."""
    for path in folder.iterdir():
        if re.fullmatch(r"step-\d+(\.tmp)?", path.name) and path.is_dir() and path != checkpoint:
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(r"\.(LATEST|loss\.png|(log|samples)\.csv)\.\d+\.tmp", path.name):
            path.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that gets the name `target` when the block has succeeded, and is removed when it fails."""
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_folder(temporary)
        # A folder cannot take the place of a full one. If one is here, LATEST never named it: its run was killed.
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk (not every system can)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} is no checkpoint of a run: {path.name} cannot be read ({error})"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: expected a JSON object, got a {type(content).__name__}")
    return content


class Table:
    """Rows that only ever grow, in memory and in a CSV file if there is a path.

    Numbers are written so that reading gives the same number again. Two runs that compute the same have the same file,
    so nothing that differs between them, such as a time, belongs here.

    Args:
        columns: {name: int, float or str}; the first is the step, and steps do not fall.
    """

    def __init__(self, path: Path | None, columns: dict[str, type]) -> None:
        self.path = path
        self.columns = columns
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Append one row; a column that it lacks stays empty."""
        self.rows.append(row)
        if self.path is not None:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow([row.get(name, "") for name in self.columns])

    def sync(self) -> None:
        """Have on the disk what was written."""
        if self.path is not None:
            with open(self.path, "rb+") as file:
                os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Keep the rows before `step`: what came after the checkpoint that we go back to will be written again.

        A row that was cut short by a kill is among those. Without a file, a new one begins.
        """
        if self.path is None:
            return
        found: list[list[str]] = []
        if self.path.exists():
            with open(self.path, newline="", encoding="utf-8") as file:
                found = [row for row in csv.reader(file) if len(row) == len(self.columns) and row[0].isdecimal()]
        kept = [row for row in found if int(row[0]) < step]
        try:
            self.rows = [self._read(row) for row in kept]
        except ValueError as error:
            raise CheckpointError(f"{self.path} has a row that cannot be read ({error}): move it away") from error
        with replacing(self.path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([list(self.columns), *kept])

    def _read(self, cells: list[str]) -> dict[str, Any]:
        pairs = zip(self.columns.items(), cells, strict=True)
        return {name: kind(cell) for (name, kind), cell in pairs if cell or kind is str}
