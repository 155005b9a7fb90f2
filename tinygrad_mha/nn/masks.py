"""Masks: which keys a query may attend to, and what is added to the scores.

Axes: B batch, H heads, T_q queries, T_k keys. `allow` and `key_allow` are True where a query may attend.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import check_count
from tinygrad_mha.tensors import Tensor, plain

__all__ = ["allow_past", "causal", "combine_masks", "pad_bias", "select_head"]

FORMS = (
    "Accepted are allow: boolean, True = may attend, of shape (T_q, T_k), (B, T_q, T_k) or (B, H, T_q, T_k); "
    "key_allow: boolean, of shape (B, T_k); bias: float, added to the scaled scores, in one of the shapes of allow"
)

ScoreShape = tuple[int | None, int | None, int, int]
"""The lengths (B, H, T_q, T_k) of scores; None for an axis that they do not have."""


def causal(n_q: int, n_k: int | None = None, window: int | None = None) -> np.ndarray:
    """The causal mask: query i may attend to keys up to its own position. Boolean (n_q, n_k), True = may attend.

    With more keys than queries, the queries stand at the end: the last one may attend to every key.

    Args:
        window: hide all but the last `window` of these keys from each query (a sliding window, arXiv:2004.05150).

    Raises:
        ValueError: lengths that are no integers, fewer keys than queries, or a window of less than 1.

    Example:
        >>> causal(2, 4).astype(int)
        array([[1, 1, 1, 0],
               [1, 1, 1, 1]])
    """
    n_q = check_count(n_q, "n_q", 0)
    n_k = n_q if n_k is None else check_count(n_k, "n_k", 0)
    if n_k < n_q:
        raise ValueError(f"a causal mask needs at least as many keys as queries, got {n_q} queries and {n_k} keys")
    queries, keys = np.arange(n_k - n_q, n_k)[:, None], np.arange(n_k)
    past = queries >= keys
    return past if window is None else past & (queries - keys < check_count(window, "window"))


def allow_past(q: Any, k: Any, key_allow: Any = None, window: int | None = None) -> np.ndarray | None:
    """The causal mask for queries q (..., T_q, d) at the end of keys k (..., T_k, d), with padding hidden.

    Args:
        q, k: (H, T, d) or (B, H, T, d).
        key_allow: boolean (B, T_k), False for padding.
        window: as in `causal`.

    Returns:
        What `ops.attend` takes as `allow`: boolean, broadcasts to the scores; None if nothing is hidden.
    """
    score_shape = q.shape[0] if q.ndim == 4 else None, q.shape[-3], q.shape[-2], k.shape[-2]
    return combine_masks(None, key_allow, True, score_shape, window)


def combine_masks(
    allow: Any, key_allow: Any, is_causal: bool, score_shape: ScoreShape, window: int | None = None
) -> np.ndarray | None:
    """Combine all masks into one boolean array that broadcasts to scores of `score_shape`; None if there are none.

    Raises:
        TypeError: a mask that is not boolean.
        ValueError: a mask whose shape does not fit, or a window without a causal mask.
    """
    batch, _, n_q, n_k = score_shape
    if window is not None and not is_causal:
        raise ValueError("window narrows a causal mask: pass causal=True too")
    combined = None
    if allow is not None:
        combined = pad_axes(check_mask(allow, "allow"), "allow", score_shape)
    if key_allow is not None:
        key_allow = check_mask(key_allow, "key_allow")
        expected = (1 if batch is None else batch, n_k)
        if key_allow.shape != expected:
            raise ValueError(f"key_allow has shape {key_allow.shape}, expected (B, T_k) = {expected}. {FORMS}")
        keys = pad_axes(key_allow[:, None, :], "key_allow", (*score_shape[:2], 1, n_k))
        combined = keys if combined is None else combined & keys
    if is_causal and (n_q != 1 or window is not None):  # a single query is the last one, which sees every key
        past = causal(n_q, n_k, window)
        combined = past if combined is None else combined & past
    return combined


def pad_bias(bias: Any, score_shape: ScoreShape) -> Any:
    """`bias`, an array or Tensor, in a shape that broadcasts to scores of `score_shape`.

    Raises:
        TypeError: a bias that is not floating.
        ValueError: a bias whose shape does not fit.
    """
    bias = bias if isinstance(bias, Tensor) else np.asarray(bias)
    if bias.dtype.kind != "f":
        raise TypeError(f"bias must be floating, it is added to the scores; got {bias.dtype}. {FORMS}")
    return pad_axes(bias, "bias", score_shape)


def check_mask(mask: Any, name: str) -> np.ndarray:
    """The mask as a boolean array. Numbers are refused, since 0 and 1 do not say which of them hides."""
    array = np.asarray(plain(mask))
    if array.dtype.kind == "b":
        return array
    reason = "is not boolean"
    if array.size and np.isin(array, (0, 1)).all():
        reason = "holds 0 and 1, which do not say which of the two hides, and as scores to be added would hide nothing"
    raise TypeError(f"{name} {reason}; got {array.dtype}: pass a boolean array, {name}=(m > 0). {FORMS}")


def pad_axes(mask: Any, name: str, score_shape: ScoreShape) -> Any:
    """A mask of 2, 3 or 4 axes as one that broadcasts to scores of `score_shape`: axes inserted or removed in front."""
    batch, heads, n_q, n_k = score_shape
    shape = mask.shape
    front = {2: (1, 1), 3: (*shape[:1], 1), 4: shape[:2]}.get(len(shape), (-1, -1))
    fits = [n in (1, 1 if axis is None else axis) for n, axis in zip(front, (batch, heads), strict=True)]
    if shape[-2:] != (n_q, n_k) or not all(fits):
        names = zip(("B", "H", "T_q", "T_k"), score_shape, strict=True)
        lengths = ", ".join(f"{axis} = {n}" for axis, n in names if n is not None)
        raise ValueError(f"{name} has shape {shape}, which does not fit {lengths}. {FORMS}")
    if len(shape) == 2:
        return mask
    front = tuple(n for n, axis in zip(front, (batch, heads), strict=True) if axis is not None)
    return mask if shape == (*front, n_q, n_k) else ops.reshape(mask, shape=(*front, n_q, n_k))


def select_head(mask: Any, i: int) -> Any:
    """The part of head `i` of a mask or bias that broadcasts to (..., H, T_q, T_k); None for None."""
    if mask is None or mask.ndim == 2:
        return mask
    part = mask[..., i if mask.shape[-3] > 1 else 0, :, :]
    return part.named(f"{mask.name or 'bias'}_{i + 1}") if isinstance(part, Tensor) else part
