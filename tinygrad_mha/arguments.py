"""Checks of arguments, shared by the whole package. Each raises an error that names the argument, or returns its value.

Arrays and Tensors are both accepted; this module imports neither Tensor nor an operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = [
    "as_array",
    "as_ids",
    "as_index",
    "check_boolean",
    "check_choice",
    "check_count",
    "check_ids",
    "check_integer",
]
__all__ += ["check_number", "check_probability", "check_width", "is_integer", "is_number"]


BOOLEAN = np.dtype(np.bool_)


def is_integer(x: Any) -> bool:
    """Whether `x` is an integer of Python or NumPy; booleans are not."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    """Whether `x` is a real number of Python or NumPy; booleans are not."""
    return is_integer(x) or isinstance(x, (float, np.floating))


def check_integer(value: Any, name: str) -> int:
    """Return `value` as a Python int.

    Raises:
        TypeError: `value` is not an integer.
    """
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return int(value)


def check_count(value: Any, name: str, least: int = 1) -> int:
    """Return `value` as a Python int.

    Raises:
        ValueError: `value` is not an integer, or less than `least`.
    """
    if not is_integer(value) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def check_number(value: Any, name: str, positive: bool = False) -> float:
    """Return `value` as a Python float.

    Raises:
        ValueError: `value` is not a finite number of at least 0, or with `positive`, above 0.
    """
    if not is_number(value) or not 0 <= value < math.inf or (positive and value == 0):
        expected = "a positive number" if positive else "a finite number of at least 0"
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return float(value)


def check_probability(value: Any, name: str) -> float:
    """Return `value` as a Python float.

    Raises:
        ValueError: `value` is not a number from 0 to 1.
    """
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a probability, from 0 to 1, got {value!r}")
    return float(value)


def check_choice(value: Any, known: Iterable[str], name: str) -> str:
    """Return `value`.

    Raises:
        ValueError: `value` is not one of the strings in `known`.
    """
    known = list(known)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    return value


def check_width(x: Any, width: int, who: str) -> None:
    """Raise ValueError unless the last axis of `x` has length `width`; `who` names the layer that expects it."""
    shape = getattr(x, "shape", None)
    shape = np.shape(x) if shape is None else shape
    if not shape or shape[-1] != width:
        raise ValueError(f"{who} expected a last axis of length {width}, got an input of shape {shape}")


def check_boolean(x: Any, name: str) -> None:
    """Raise TypeError unless `x` is a boolean array."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or dtype != BOOLEAN:
        kind = type(x).__name__ if dtype is None else dtype
        raise TypeError(f"{name} must be a boolean array (True = may be seen), got {kind}; compare first: m > 0")


def check_ids(ids: Any, n: int, name: str, besides: int | None = None) -> None:
    """Check that `ids` are integers in 0 .. n - 1, or equal to `besides`.

    Raises:
        TypeError: `ids` are not integers.
        IndexError: an id is out of range; the message gives the first one and its index.
    """
    ids = np.asarray(ids)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {ids.dtype}")
    wrong = (ids < 0) | (ids >= n)
    if besides is not None:
        wrong &= ids != besides
    if np.count_nonzero(wrong):  # for few ids twice as fast as wrong.any()
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        also = "" if besides is None else f" (or {besides}, which is ignored)"
        raise IndexError(f"{name}{list(index)} is {ids[index]}, expected 0 to {n - 1}{also}")


def as_ids(ids: Any, name: str) -> np.ndarray:
    """Return ids (an array, a Tensor or nested lists of integers) as an integer array.

    Raises:
        TypeError: `ids` are not integers.
    """
    array = as_index(ids.numpy() if hasattr(ids, "numpy") else ids)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array


def as_index(index: Any) -> np.ndarray:
    """Return a list as an index array. An empty list is one of integers, where NumPy alone makes it one of floats."""
    array = as_array(index)
    return array if array.size else array.astype(np.intp)


def as_array(data: Any) -> np.ndarray:
    """`np.asarray(data)`, with an error that says what to do about rows of unequal lengths.

    Raises:
        ValueError: the rows have unequal lengths.
    """
    try:
        return np.asarray(data)
    except ValueError as error:
        if "inhomogeneous" not in str(error):
            raise
        raise ValueError(
            "the rows have unequal lengths, and an array has rows of one length: pad the shorter ones"
        ) from error
