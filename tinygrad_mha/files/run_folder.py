"""The files of a training run: checkpoints and logs.

The folder of a run contains a folder `step-N`, which is a checkpoint, and a file `LATEST` with its name. A new
checkpoint is written under a temporary name, and `LATEST` is changed when all of it is on the disk. So a complete
checkpoint exists whenever the process is killed.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinygrad_mha.files.atomic import replacing, replacing_folder, sync_folder
from tinygrad_mha.files.json_files import CheckpointError

__all__ = ["CsvLog", "find_latest", "remove_others", "write_checkpoint"]


def find_latest(folder: str | os.PathLike[str]) -> Path | None:
    """The latest checkpoint in the folder of a run, or None.

    Raises:
        CheckpointError: `LATEST` names a folder that does not exist.
    """
    path = Path(folder, "LATEST")
    if not path.is_file():
        return None
    name = path.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"step-\d+", name) or not Path(folder, name).is_dir():
        raise CheckpointError(f"{path} contains {name!r}, but there is no such checkpoint")
    return Path(folder, name)


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a folder, name it `step-N`, set `LATEST` to it, and remove the checkpoints before.

    If `LATEST` names this step already, nothing is written: the same step of a run has the same state.
    """
    checkpoint = folder / f"step-{step}"
    if checkpoint != find_latest(folder):
        with replacing_folder(checkpoint) as temporary:
            write(temporary)
        with replacing(folder / "LATEST") as temporary:
            temporary.write_text(checkpoint.name + "\n", encoding="utf-8")
        sync_folder(folder)
    remove_others(folder, checkpoint)
    return checkpoint


def remove_others(folder: Path, checkpoint: Path) -> None:
    """Remove all other checkpoints of a run, and the temporary files of a process that was killed."""
    for path in folder.iterdir():
        if re.fullmatch(r"step-\d+(\.tmp)?", path.name) and path.is_dir() and path != checkpoint:
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(r"\.(LATEST|loss\.png|(log|samples)\.csv)\.\d+\.tmp", path.name):
            path.unlink(missing_ok=True)


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
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow([row.get(name, "") for name in self.columns])

    def sync(self) -> None:
        """fsync the file."""
        if self.path is not None:
            with open(self.path, "rb+") as file:
                os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Keep the rows before `step` and drop the others, such as a row that was cut short.

        Raises:
            CheckpointError: a row that should be kept cannot be read.
        """
        if self.path is None:
            return
        found: list[list[str]] = []
        if self.path.exists():
            with open(self.path, newline="", encoding="utf-8") as file:
                found = [row for row in csv.reader(file) if len(row) == len(self.columns) and row[0].isdecimal()]
        kept = [row for row in found if int(row[0]) < step]
        try:
            self.rows = [self._parse(row) for row in kept]
        except ValueError as error:
            raise CheckpointError(f"{self.path} has a row that cannot be read ({error}): move it away") from error
        with replacing(self.path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([list(self.columns), *kept])

    def _parse(self, cells: list[str]) -> dict[str, Any]:
        pairs = zip(self.columns.items(), cells, strict=True)
        return {name: kind(cell) for (name, kind), cell in pairs if cell or kind is str}
