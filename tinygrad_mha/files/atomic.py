"""Atomic writing: a file or folder is written under a temporary name and renamed when it is complete.

A reader finds either the old content or all of the new, whenever the writing process is killed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing", "replacing_folder", "sync_folder"]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`, for a file that is renamed to `path` on success and deleted on failure.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.txt")
        >>> with replacing(path) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> path.read_text()
        'whole'
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` on success and deleted on failure."""
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_folder(temporary)
        shutil.rmtree(path, ignore_errors=True)  # a folder cannot be renamed over one that is not empty
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that the names in it are on the disk. Does nothing where the system cannot."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
