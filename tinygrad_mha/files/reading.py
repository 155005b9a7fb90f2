"""Reading: only regular files are opened, so that no pipe is waited for and no device is read without an end."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

__all__ = ["CheckpointError", "FileError", "open_file", "read_file"]

MOST_CHARACTERS = 2000  # of a message
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class FileError(ValueError):
    """What is wrong with a file; of a long message the first MOST_CHARACTERS."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= MOST_CHARACTERS else f"{message[: MOST_CHARACTERS - 4]} ...")


class CheckpointError(FileError):
    """A file or folder that cannot be used; the message names it and gives the reason."""


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file, or a link to one, to read its bytes.

    Raises:
        CheckpointError: it is a folder, a pipe or a device.
        OSError: it does not exist, or cannot be opened.
    """
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except ValueError as error:  # a zero byte, or a character that no path has
        raise CheckpointError(f"{os.fspath(path)!r} is not the path of a file: {error}") from error
    if kind != stat.S_IFREG:
        raise CheckpointError(f"{os.fspath(path)} is {KINDS.get(kind, 'a socket')}, expected a file")
    return open(path, "rb")


def read_file(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The content of a regular file.

    Args:
        most: the number of bytes above which the file is refused.

    Raises:
        CheckpointError: it is not a regular file, or larger than `most` or than the memory.
        OSError: it does not exist, or cannot be read.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise CheckpointError(f"{Path(path)} has {size:,} bytes, expected at most {most:,}")
        try:
            return file.read()
        except MemoryError as error:
            raise CheckpointError(f"{Path(path)} has {size:,} bytes, more than fit into memory") from error
