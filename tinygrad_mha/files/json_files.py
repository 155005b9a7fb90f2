"""JSON objects in files, read with one kind of error."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from tinygrad_mha.files.atomic import replacing
from tinygrad_mha.files.reading import CheckpointError, read_file

__all__ = ["MOST_BYTES", "parse_json", "read_json", "write_json"]

MOST_BYTES = 100_000_000  # of JSON; the safetensors package has the same limit for a header


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that contains one JSON object.

    Raises:
        CheckpointError: the file does not exist, cannot be read, or contains something else.
    """
    try:
        data = read_file(path, MOST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return parse_json(data, str(path))


def parse_json(data: bytes, source: str) -> dict[str, Any]:
    """Parse one JSON object, in UTF-8; `source` names it in errors.

    Raises:
        CheckpointError: `data` is not valid JSON, not an object, or an object with a repeated key.
    """
    try:
        content = json.loads(data.decode("utf-8-sig"), object_pairs_hook=make_dict)
    except RecursionError as error:
        raise CheckpointError(f"{source} is nested too deeply to be JSON of ours") from error
    except ValueError as error:
        raise CheckpointError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{source} must contain a JSON object, got a {type(content).__name__}")
    return content


def make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of distinct keys; Python's own would keep the last of equal ones."""
    result = dict(pairs)
    if len(result) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name!r} occurs twice")
    return result


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a JSON object atomically. Arrays and numbers of NumPy are written as lists and numbers."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=indent, default=to_plain), encoding="utf-8")


def to_plain(value: Any) -> Any:
    """An array or number of NumPy as a list or number."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"JSON has no {type(value).__name__}: {value!r}")
