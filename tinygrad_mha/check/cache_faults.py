"""Why an attention computes other numbers with a cache: each known fault is put in, and what reproduces them is named.

The computation without a cache is trusted. It is repeated with keys hidden, with queries or keys of other positions, or
with rows that should be gone, and the result is compared with the wrong rows.

Axes: H heads, T tokens so far, n of them new, C width.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.check.candidates import Candidate
from tinygrad_mha.check.differences import compare_rows, is_equal
from tinygrad_mha.check.formulas import hide_itself, softmax
from tinygrad_mha.check.matching import Reference
from tinygrad_mha.nn import KVCache, MultiHeadAttention
from tinygrad_mha.nn.contract import call_attention, find_options
from tinygrad_mha.nn.heads import Steps
from tinygrad_mha.nn.module import Module
from tinygrad_mha.tensors import Tensor

__all__ = ["NOT_OFFSET", "TOLERANCE", "Case", "find_cause", "run_attention"]

TOLERANCE = 1e-11  # relative to the largest element, in float64: sums in another order differ by about 1e-15
NOT_OFFSET = "position not offset: new tokens stand at 0, 1, ..., not after those in the cache"
OFF_BY_ONE = "position off by one: new tokens stand one place too far or too near"
OWN_KEY_MISSING = "a token missing, the newest: new tokens do not see their own key"
LATER_MATTER = "without a cache, a row changes with later tokens: it sees them (not causal), or their number is used"
UNKNOWN = "no fault that this check knows gives these numbers"
UNKNOWN_WITHOUT_STEPS = f"{UNKNOWN}; it finds more if forward shows q, k, v and scores to edit"


@dataclass(frozen=True)
class Case:
    """One call of an attention with a cache that returned wrong rows for one sequence.

    Attributes:
        x: the input rows of the sequence without the cache, (all T, C), those of later calls included.
        start, stop: the tokens of this call.
        history: the input rows of all calls so far, padding and what was cropped or read by a fork included.
        positions: those that were passed with them.
        keys: those in the cache after this call, (..., T, d).
        shown: what it showed in this call, and what it returned, "y" (n, C).
    """

    attention: Module
    x: np.ndarray
    start: int
    stop: int
    history: np.ndarray
    positions: np.ndarray
    keys: np.ndarray
    shown: dict[str, np.ndarray]

    @property
    def y(self) -> np.ndarray:
        return self.shown["y"]


Predict = Callable[[Case], Iterator[np.ndarray]]
"""What a fault could make of the new rows of a case, (n, C)."""


def run_attention(attention: Module, x: Tensor, **options: Any) -> Tensor:
    """Call an attention of ours or of a person's own, causal."""
    if isinstance(attention, MultiHeadAttention):
        return attention(x, causal=True, **options)
    return call_attention(attention, x, **options)


def find_cause(cases: list[Case], claim: str) -> str:
    """The first cause in CAUSES that reproduces the numbers of every case."""
    for cause, predict in CAUSES.items():
        if all(is_reproduced(case, predict) for case in cases):
            return STALE.get(claim, cause) if cause == "stale" else cause
    with contextlib.suppress(Exception):  # an attention that refuses single tokens
        cause = explain_by_formula(cases[0])
        if cause:
            return cause
    return UNKNOWN if all("q" in case.shown for case in cases) else UNKNOWN_WITHOUT_STEPS


def is_reproduced(case: Case, predict: Predict) -> bool:
    try:
        return any(compare_rows(rows, case.y).max() <= TOLERANCE for rows in predict(case))
    except Exception:  # this attention refuses what the fault needs
        return False


# --------------------------------------------------------------------------------------------------------------------
# The computation without a cache, with something changed


def recompute(case: Case, x: np.ndarray | None = None, edit: Any = None, **options: Any) -> np.ndarray:
    """The rows of the new tokens, (n, C), from the tokens so far or from other rows `x`."""
    x = case.x[: case.stop] if x is None else x
    options.setdefault("positions", np.arange(len(x)))
    return run_attention(case.attention, Tensor(x), edit=edit, **options).numpy()[-len(case.y) :]


def show_steps(case: Case, x: np.ndarray) -> dict[str, np.ndarray]:
    """The steps of a run over the rows `x`, from position 0 on."""
    steps = Steps()
    run_attention(case.attention, Tensor(x), positions=np.arange(len(x)), edit=steps)
    return {name: tensor.numpy() for name, tensor in steps.trace()._asdict().items() if tensor is not None}


def store_keys(case: Case, x: np.ndarray) -> np.ndarray:
    """The keys that the attention puts into an empty cache, (..., T, d)."""
    cache = KVCache()
    run_attention(case.attention, Tensor(x), cache=cache[0], positions=np.arange(len(x)))
    return cache[0].keys()


def hide_keys(case: Case, allow: np.ndarray) -> np.ndarray:
    """The rows of the new tokens if they see only the keys that `allow` (n, T) leaves."""
    x = case.x[: case.stop]
    if "key_allow" in find_options(type(case.attention).forward):
        batch = np.broadcast_to(x, (len(allow), *x.shape))  # one query of each copy is read
        y = run_attention(case.attention, Tensor(batch), positions=np.arange(len(x)), key_allow=allow).numpy()
        return y[range(len(allow)), range(case.start, case.stop)]
    name = "masked" if "masked" in case.shown else "scores"
    allow = np.concatenate([np.ones((case.start, case.stop), bool), allow])
    return recompute(case, edit=lambda step, t: ops.where(allow, t, -np.inf) if step == name else t)


def replace_end(new: dict[str, np.ndarray]) -> Any:
    """An `edit` that replaces the last rows of the steps in `new`."""
    return lambda step, t: ops.concat(t[..., : -new[step].shape[-2], :], new[step], axis=-2) if step in new else t


# --------------------------------------------------------------------------------------------------------------------
# The faults: what each would make of the new rows


def put_elsewhere(case: Case, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Queries, keys or both, and values, as they are at the end of `rows`."""
    steps = show_steps(case, rows)
    for names in (("q",), ("k",), ("q", "k"), ("q", "k", "v")):
        yield recompute(case, edit=replace_end({name: steps[name][..., -len(case.y) :, :] for name in names}))


def put_at_the_start(case: Case) -> Iterator[np.ndarray]:
    n, start = len(case.y), case.start
    yield recompute(case, positions=np.concatenate([np.arange(start), np.arange(n)]))
    if {"scores", "masked"} <= case.shown.keys():  # a bias of positions: that of the first n queries, where it is known
        whole = show_steps(case, case.x[: case.stop])
        right, wrong = (steps["masked"] - steps["scores"] for steps in (whole, case.shown))
        known = np.tri(n, case.stop, dtype=bool)
        if right[np.isfinite(right)].any() and np.allclose(wrong[..., known], right[..., :n, :][..., known], TOLERANCE):
            yield case.y
    alone, right = (store_keys(case, x)[..., -n:, :] for x in (case.x[start : case.stop], case.x[: case.stop]))
    new = case.keys[..., start : case.stop, :]
    if compare_rows(new, alone).max() <= TOLERANCE < compare_rows(new, right).max():
        yield case.y
    yield from put_elsewhere(case, case.x[start : case.stop])


def put_beside(case: Case) -> Iterator[np.ndarray]:
    for shift in (1, -1):
        yield recompute(case, positions=np.arange(case.stop) + shift * (np.arange(case.stop) >= case.start))
    if "positions" not in find_options(
        type(case.attention).forward
    ):  # a token in front, or one fewer, moves the others
        yield from put_elsewhere(case, case.x[np.r_[0, : case.stop]])
        yield from put_elsewhere(case, case.x[1 : case.stop])


def see_only(sees: Callable[[np.ndarray, np.ndarray, int], np.ndarray]) -> Predict:
    """Hide keys: `sees(i, j, start)` tells whether query i of the call sees key j."""

    def predict(case: Case) -> Iterator[np.ndarray]:
        i, j = np.arange(len(case.y))[:, None], np.arange(case.stop)
        allow: np.ndarray = np.broadcast_to(sees(i, j, case.start), (len(case.y), case.stop))
        seen = np.asarray(allow.any(axis=0))
        if seen[case.start :].all():  # all queries miss the same keys: leave their tokens out
            yield recompute(case, case.x[: case.stop][seen], positions=np.flatnonzero(seen))
        yield hide_keys(case, allow)

    return predict


def put_in_place(**others: str) -> Predict:
    """Use the rows of other steps as those of the steps named: `put_in_place(k="q")` uses queries as keys."""

    def predict(case: Case) -> Iterator[np.ndarray]:
        steps = show_steps(case, case.x[: case.stop])
        rows = {name: Tensor(steps[other]) for name, other in others.items()}
        yield recompute(case, edit=lambda step, t: rows.get(step, t))

    return predict


def see_from_the_left(case: Case) -> Iterator[np.ndarray]:
    """The first query of the call sees key 0 alone, so it returns what token 0 does."""
    first = run_attention(case.attention, Tensor(case.x[:1])).numpy()
    yield np.concatenate([first, case.y[1:]])
    yield from see_only(lambda i, j, start: j <= i)(case)


def drop_one(case: Case) -> Iterator[np.ndarray]:
    for key in range(1, case.start):
        yield from see_only(lambda i, j, start, key=key: j != key)(case)  # type: ignore[misc]


def see_the_last(case: Case) -> Iterator[np.ndarray]:
    for n in range(1, case.stop):
        yield from see_only(lambda i, j, start, n=n: j >= case.stop - n)(case)  # type: ignore[misc]


def see_later_keys(case: Case) -> Iterator[np.ndarray]:
    """Each query of the call comes last, so that it sees all keys."""
    rows = []
    for query in range(case.start, case.stop):
        order = np.array([j for j in range(case.stop) if j != query] + [query])
        rows.append(recompute(case, case.x[order], positions=order)[-1])
    yield np.array(rows)
    if "q" in case.shown:  # the last query sees all keys: each query is put in its place
        edits = [replace_last_query(query) for query in range(case.start, case.stop)]
        yield np.array([recompute(case, edit=edit)[-1] for edit in edits])


def replace_last_query(query: int) -> Any:
    """An `edit` that puts one row of the queries in the place of the last."""
    return lambda step, t: ops.concat(t[..., :-1, :], t[..., [query], :], axis=-2) if step == "q" else t


def see_history(case: Case) -> Iterator[np.ndarray]:
    """Attend to all rows that the layer was ever given; or stand behind them."""
    if len(case.history) == case.stop:
        return
    yield recompute(case, case.history, positions=case.positions)
    yield recompute(case, case.history)
    yield from put_elsewhere(case, case.history)


def repeat_last_but_one(v: np.ndarray) -> np.ndarray:
    return np.concatenate([v[..., :-1, :], v[..., -2:-1, :]], axis=-2)


def round_numbers(case: Case) -> Iterator[np.ndarray]:
    """Round keys and values, those in the cache or all; or differ by no more than rounding does."""
    small = compare_rows(case.y, recompute(case)).max() <= 10 * np.finfo(np.float32).eps
    if small or any(np.array_equal(case.keys, case.keys.astype(dtype)) for dtype in (np.float32, np.float16)):
        yield case.y
    for dtype, n in itertools.product((np.float32, np.float16), (case.start, case.stop)):

        def round_rows(step: str, t: Tensor, dtype: Any = dtype, n: int = n) -> Tensor:
            rounded = t[..., :n, :].astype(dtype).astype(t.dtype)
            return ops.concat(rounded, t[..., n:, :], axis=-2) if step in ("k", "v") else t

        yield recompute(case, edit=round_rows)


CAUSES: dict[str, Predict] = {
    LATER_MATTER: lambda case: iter([recompute(case)]),
    NOT_OFFSET: put_at_the_start,
    OFF_BY_ONE: put_beside,
    "mask from the wrong corner (top-left): query i of a call sees the keys 0 to i only": see_from_the_left,
    "cache not used: new tokens see only each other": see_only(lambda i, j, start: j >= start),
    "keys and values exchanged: the result is as if k were v, and v were k": put_in_place(k="v", v="k"),
    "queries in place of keys: q is appended to the cache, or used, where k belongs": put_in_place(k="q"),
    "keys in place of values: k is appended to the cache, or used, where v belongs": put_in_place(v="k"),
    OWN_KEY_MISSING: see_only(lambda i, j, start: j != start + i),
    "a token missing: the keys of a call are not seen in it": see_only(lambda i, j, start: j < start),
    "trimmed by one: the first token in the cache is missing": see_only(lambda i, j, start: j != 0),
    "trimmed by one: the last token in the cache is missing": see_only(lambda i, j, start: j != start - 1),
    "a token missing: one in the middle of the cache is not seen": drop_one,
    "trimmed: only the last keys in the cache are seen": see_the_last,
    "no causal mask with a cache: the tokens of a call see later ones in it": see_later_keys,
    "stale": see_history,
    "dtype: keys, values or results are rounded to a smaller dtype": round_numbers,
}
STALE = {
    "padding": "padding seen: tokens of the padding are attended to, or counted as positions",
    "crop": "stale after crop: the rows that crop dropped are still attended to, or counted as positions",
    "fork": "stale after fork: the rows that the other fork read are attended to, or counted as positions",
}

# Where projections are known: steps of the formula for which the last of single tokens gets the wrong numbers.
CHANGES: list[tuple[str, dict[str, Any]]] = [
    (OWN_KEY_MISSING, {"weigh": lambda scores, see: softmax(scores, hide_itself(see))}),
    (NOT_OFFSET, {"pairing": ""}),
    ("position not offset: new queries stand at 0, new keys do not", {"places": {"q": np.zeros_like}}),
    (f"{OFF_BY_ONE}, their queries alone", {"places": {"q": lambda p: p - 1}}),
    (f"{OFF_BY_ONE}, their queries alone", {"places": {"q": lambda p: p + 1}}),
    ("a token missing: the value of the newest is that of the one before", {"swap": {"v": repeat_last_but_one}}),
]


def explain_by_formula(case: Case) -> str:
    """The first cause in CHANGES that reproduces the last row of tokens that are read one by one, or ""."""
    candidate, cache, y = Candidate(case.attention, (case.x,), causal=True), KVCache(), case.x
    for t, row in enumerate(case.x):
        options = {"positions": np.arange(t, t + 1)} if "positions" in candidate.options else {}
        y = candidate(row[None], cache=cache[0], **options)
    reference, see = Reference(candidate), np.tri(len(case.x), dtype=bool)
    match = reference.identify((case.x,), see)
    formula = match.formula
    if formula is None or match.n is not None:
        return ""

    def gives(**change: Any) -> bool:
        return is_equal(reference.compute(replace(formula, **change), (case.x,), see)[-1:], y)

    return "" if gives() else next((cause for cause, change in CHANGES if gives(**change)), "")
