"""Atomic writing: a file or folder is written under a temporary name and renamed when it is complete.

A reader finds either the old content or all of the new, whenever the writing process is killed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["naming", "replacing", "replacing_folder", "setting_aside", "sync_folder"]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`, for a file that is renamed to `path` on success and deleted on failure.

    A symbolic link stays: the file that it points to is replaced. A device or pipe is written into when all is ready.
    The file has the permissions of the one that it replaces, or those of any new file.

    Raises:
        OSError: the file cannot be written; the error names `path`.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.txt")
        >>> with replacing(path) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> path.read_text()
        'whole'
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder, path.name)
            yield temporary
            with naming(path, temporary), open(path, "wb") as device:
                device.write(temporary.read_bytes())
        return
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with naming(path, temporary):
            open(temporary, "wb").close()  # some writers make files that only their owner can read
            mode = (target if target.exists() else temporary).stat().st_mode
            yield temporary
            with open(temporary, "rb+") as file:
                os.chmod(temporary, mode & 0o777)
                os.fsync(file.fileno())
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` on success and deleted on failure.

    Raises:
        OSError: it cannot be written, or `path` or the temporary folder exists and is not empty.
    """
    temporary = path.with_name(path.name + ".tmp")
    with naming(path, temporary):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            sync_folder(temporary)
            os.replace(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextmanager
def setting_aside(path: Path) -> Iterator[None]:
    """Rename a file out of the way. On failure it comes back in the place of a new one, on success it is deleted.

    Several files that are replaced inside of this together are so all old or all new, unless the process is killed.
    """
    target = Path(os.path.realpath(path))
    aside = target.with_name(f".{target.name}.{os.getpid()}.old")
    existed = target.exists()
    if existed:
        os.replace(target, aside)
    try:
        yield
    except BaseException:
        if existed:
            os.replace(aside, target)
        else:
            target.unlink(missing_ok=True)
        raise
    aside.unlink(missing_ok=True)


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Let an OSError name the file that was asked for, not the temporary one, nor none as when a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is None or str(error.filename) not in ("None", str(temporary)):
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that the names in it are on the disk. Does nothing where the system cannot."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            with naming(folder):
                os.fsync(handle)
        finally:
            os.close(handle)
