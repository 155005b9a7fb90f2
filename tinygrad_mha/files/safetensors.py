"""Named arrays in one file, in the safetensors format.

The file consists of eight bytes (the length of the header, little-endian), a JSON header with the dtype, shape and
position of each array, and the bytes of all arrays without gaps. The safetensors package writes it. Reading is done
here: NumPy has no BF16, every kind of damage must raise the same clear error, and shapes are needed before memory is
allocated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import safetensors.numpy

from tinygrad_mha.files.atomic import replacing
from tinygrad_mha.files.json_files import MOST_BYTES, parse_json
from tinygrad_mha.files.reading import CheckpointError, open_file

__all__ = ["load_arrays", "read_shapes", "save_arrays"]

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # the upper half of a float32
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


def save_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Write named arrays to one safetensors file, atomically.

    Raises:
        TypeError: the format has no code for the dtype of an array, such as complex.
    """
    for name, array in arrays.items():
        if array.dtype.newbyteorder("<") not in DTYPES.values():
            raise TypeError(
                f"{name!r} has dtype {array.dtype}; a safetensors file contains floats, integers and booleans"
            )
    # The package writes the wrong bytes of arrays with gaps or strides of 0, so it gets contiguous ones.
    data = safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()}, metadata)
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read all arrays of a safetensors file, in their own dtype (BF16 as float32). All are new and writable.

    The header is checked against the size of the file before memory is allocated.

    Raises:
        CheckpointError: the file is damaged, or not a safetensors file.
        OSError: the file cannot be opened.
    """
    with open_file(path) as file, naming_damage(path):
        return read_arrays(file)


def read_shapes(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Read the shape of each array in a safetensors file, from its header alone.

    Raises:
        CheckpointError, OSError: as `load_arrays`.
    """
    with open_file(path) as file, naming_damage(path):
        entries, _ = read_header(file, os.fstat(file.fileno()).st_size)
    return {entry.name: entry.shape for entry in entries}


@contextmanager
def naming_damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let the errors about a file name it."""
    try:
        yield
    except MemoryError as error:
        raise CheckpointError(f"{os.fspath(path)} holds more than fits into memory") from error
    except CheckpointError as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read as a safetensors file: {error}") from error


class Entry(NamedTuple):
    """What the header says of one array."""

    name: str
    kind: str  # a key of DTYPES
    shape: tuple[int, ...]
    begin: int  # its first byte, counted from the end of the header
    end: int  # the byte after its last


def read_arrays(file: BinaryIO) -> dict[str, np.ndarray]:
    """Read all arrays of an open file; the errors do not name the file."""
    entries, start = read_header(file, os.fstat(file.fileno()).st_size)
    arrays = {}
    for name, kind, shape, begin, _ in entries:
        file.seek(start + begin)
        flat = np.fromfile(file, DTYPES[kind], count=math.prod(shape))
        if flat.size < math.prod(shape):
            raise CheckpointError(f"the bytes of {name!r} end early: the file was cut short while it was read")
        if kind == "BF16":
            flat = (flat.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = flat.astype(flat.dtype.newbyteorder("="), copy=False).reshape(shape)
    return arrays


def read_header(file: BinaryIO, size: int) -> tuple[list[Entry], int]:
    """Read the header of a file of `size` bytes: its entries, and the position of the first byte after it."""
    first = file.read(8)
    if len(first) < 8:
        raise CheckpointError(f"it has {size} bytes, but the length of its header alone takes 8")
    if first[:4] == b"PK\x03\x04":
        raise CheckpointError("it is a zip archive (the format of torch.save?); save it as safetensors")
    length = int.from_bytes(first, "little")
    if length > size - 8:
        raise CheckpointError(
            f"its header should have {length} bytes, but only {size - 8} follow (cut short, or another format?)"
        )
    if length > MOST_BYTES:
        raise CheckpointError(f"its header should have {length:,} bytes, expected at most {MOST_BYTES:,}")
    header = parse_json(file.read(length), "its header")
    header.pop("__metadata__", None)
    entries = [parse_entry(name, fields) for name, fields in header.items()]
    reached = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != reached:
            fault = "a hole" if entry.begin > reached else "an overlap"
            raise CheckpointError(f"the bytes of {entry.name!r} begin at {entry.begin}, expected {reached} ({fault})")
        reached = entry.end
    available = size - 8 - length
    if reached != available:
        fault = "cut short" if reached > available else "trailing bytes"
        raise CheckpointError(f"its arrays take {reached} bytes, but {available} follow the header ({fault})")
    return entries, 8 + length


def parse_entry(name: str, fields: Any) -> Entry:
    """Check what the header says of one array."""
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise CheckpointError(f"the entry of {name!r} lacks dtype, shape or data_offsets")
    kind, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if kind not in list(DTYPES):  # a damaged header may hold what has no hash, such as a list
        raise CheckpointError(f"{name!r} has dtype {kind!r}, known are {', '.join(DTYPES)}")
    if not are_naturals(shape) or len(shape) > 64:  # the most axes that an array of NumPy has
        raise CheckpointError(f"{name!r} has the shape {shape!r}, expected at most 64 integers of at least 0")
    if not are_naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{name!r} has the offsets {offsets!r}, expected two integers of at least 0")
    needed = math.prod(shape) * DTYPES[kind].itemsize
    if offsets[1] - offsets[0] != needed:
        raise CheckpointError(
            f"{name!r} has the offsets {offsets}, but {kind} of shape {tuple(shape)} takes {needed} bytes"
        )
    return Entry(name, kind, tuple(shape), *offsets)


def are_naturals(x: Any) -> bool:
    """Whether `x` is a list of integers of at least 0 that have 64 bits."""
    return isinstance(x, list) and all(type(n) is int and 0 <= n < 2**63 for n in x)
