"""Arrays in a file, in the safetensors format: written whole or not at all, and read with one kind of error.

The file is eight bytes (the length of the header, little-endian), a JSON header that gives every array a dtype, a shape
and a place, and then the bytes of the arrays without a gap. Reading is done here rather than by the safetensors package
because we want BF16, which NumPy lacks, and because a damaged file of any kind has to be refused in the same clear way.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import safetensors.numpy

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


class CheckpointError(ValueError):
    """A file or folder of weights that cannot be used; the message names it and says why."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name beside `path`. It takes the place of `path` when the block succeeds, and goes when it fails.

    So whoever reads `path` finds the old file or the whole new one, whenever the writer is killed.
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


def save_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Write named arrays as one safetensors file, through a temporary name.

    Raises:
        TypeError: an array whose dtype the format does not know (complex, say).
    """
    plain = {}
    for name, array in arrays.items():
        if array.dtype.newbyteorder("<") not in DTYPES.values():
            raise TypeError(f"{name!r} has dtype {array.dtype}; a safetensors file holds floats, integers and booleans")
        # A broadcast view has one row in memory and many in its shape: write what it means.
        plain[name] = array if array.flags.c_contiguous else np.array(array, order="C")
    with replacing(path) as temporary:
        safetensors.numpy.save_file(plain, temporary, metadata)


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read all arrays of a safetensors file, in their own dtype (BF16 as float32); each is yours to write to.

    Raises:
        CheckpointError: the file is no safetensors file, or damaged; nothing is allocated on the word of its header.
        OSError: it cannot be opened.
    """
    path = Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        entries, start = read_header(path, file, size)
        arrays = {}
        for name, (kind, shape, begin) in entries.items():
            file.seek(start + begin)
            dtype = DTYPES[kind]
            flat = np.fromfile(file, dtype, count=math.prod(shape))
            if kind == "BF16":
                flat = (flat.astype(np.uint32) << 16).view(np.float32)
            arrays[name] = flat.astype(flat.dtype.newbyteorder("="), copy=False).reshape(shape)
    return arrays


def read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], int]:
    """What the header says, checked against the file's size: {name: (dtype, shape, begin)}, and where data start."""

    def refuse(reason: str) -> NoReturn:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {reason}")

    first = file.read(8)
    if len(first) < 8:
        refuse(f"it has {size} bytes, and the length of its header alone takes 8")
    if first[:4] == b"PK\x03\x04":
        refuse("it is a zip archive (the format of torch.save?); save it as safetensors")
    length = int.from_bytes(first, "little")
    if length > size - 8:
        refuse(f"its header should have {length} bytes, but only {size - 8} follow (cut short, or another format?)")
    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        refuse(f"its header is no valid JSON ({error})")
    if not isinstance(header, dict):
        refuse("its header is no JSON object")
    header.pop("__metadata__", None)

    entries = {}
    places = []
    for name, entry in header.items():
        kind, shape, begin, end = checked_entry(name, entry, refuse)
        entries[name] = (kind, shape, begin)
        places.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(places):
        if begin != reached:
            what = "a hole" if begin > reached else "an overlap"
            refuse(f"the bytes of {name!r} begin at {begin}, expected {reached} ({what})")
        reached = end
    held = size - 8 - length
    if reached != held:
        refuse(
            f"its arrays take {reached} bytes, it holds {held} ({'cut short' if reached > held else 'trailing bytes'})"
        )
    return entries, 8 + length


def checked_entry(name: str, entry: Any, refuse: Any) -> tuple[str, tuple[int, ...], int, int]:
    """One array of the header: dtype, shape, first byte and the byte after its last."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        refuse(f"the entry of {name!r} lacks dtype, shape or data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in DTYPES:
        refuse(f"{name!r} has dtype {kind!r}, known are {', '.join(DTYPES)}")
    if not is_naturals(shape):
        refuse(f"{name!r} has the shape {shape!r}, expected a list of natural numbers")
    if not is_naturals(offsets) or len(offsets) != 2:
        refuse(f"{name!r} has the offsets {offsets!r}, expected two natural numbers")
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[kind].itemsize
    if end - begin != needed:
        refuse(f"{name!r} has the offsets {offsets}, but {kind} of shape {tuple(shape)} takes {needed} bytes")
    return kind, tuple(shape), begin, end


def is_naturals(x: Any) -> bool:
    return isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are distinct; Python alone would let the last one win."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return found
