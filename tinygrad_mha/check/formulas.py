"""The formula of multi-head attention, and the same with each of the known faults: one step of it is another function.

Axes: H heads, G heads of keys and values, T_q queries, T_k keys, d width of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

__all__ = ["FAULTS", "Formula", "Sizes", "past", "split_heads"]


def past(see: np.ndarray, more: int = 0) -> np.ndarray:
    """The causal mask of the shape of `see`, with `more` later keys."""
    n, m = see.shape
    return np.tri(n, m, m - n + more, dtype=bool)


def split_heads(x: np.ndarray, n: int) -> np.ndarray:
    """(..., n, T, d) of (..., T, n d)."""
    return np.moveaxis(x.reshape(*x.shape[:-1], n, -1), -2, -3)


def split_by_reshape(x: np.ndarray, n: int) -> np.ndarray:
    return x.reshape(*x.shape[:-2], n, x.shape[-2], -1)


def split_alternating(x: np.ndarray, n: int) -> np.ndarray:
    return np.moveaxis(x.reshape(*x.shape[:-1], -1, n), -1, -3)


def join_heads(y: np.ndarray, axis: int = -2) -> np.ndarray:
    """(..., T, n d) of (..., n, T, d); with axis -1 the columns of the heads alternate."""
    y = np.moveaxis(y, -3, axis)
    return y.reshape(*y.shape[:-2], -1)


def join_by_reshape(y: np.ndarray) -> np.ndarray:
    return y.reshape(*y.shape[:-3], y.shape[-2], -1)


def mean_of_heads(x: np.ndarray) -> np.ndarray:
    """(..., H, T, d), all heads replaced by their mean."""
    return np.broadcast_to(x.mean(axis=-3, keepdims=True), x.shape)


def copy_head(x: np.ndarray, head: int = 0) -> np.ndarray:
    """(..., H, T, d), all heads replaced by one."""
    return np.broadcast_to(x[..., [head], :, :], x.shape)


def softmax(scores: np.ndarray, see: Any = True, axis: int = -1) -> np.ndarray:
    """Weights that sum to 1 over the keys seen, and to 0 if there are none."""
    scores = np.where(see, scores, -np.inf)
    top = scores.max(axis=axis, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=axis, keepdims=True)
    return weights / np.where(total == 0, 1.0, total)


def rotate(x: np.ndarray, places: np.ndarray, pairing: str, base: float) -> np.ndarray:
    """Rotary positions: pairs of columns, "halves" or "pairs" of neighbours, are turned as complex numbers."""
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        return x
    a, b = (x[..., :half], x[..., half:]) if pairing == "halves" else (x[..., ::2], x[..., 1::2])
    turned = (a + 1j * b) * np.exp(1j * places[:, None] * base ** (-np.arange(half) / half))
    parts = np.concatenate if pairing == "halves" else np.stack
    return parts([turned.real, turned.imag], axis=-1).reshape(x.shape)


class Sizes(NamedTuple):
    """Of a head the widths of a key and a value; the columns of all heads; the number of keys."""

    d_k: int
    d_v: int
    width: int
    n_k: int


@dataclass(frozen=True)
class Formula:
    """softmax(Q K^T scale) V in heads. Each field is one step; a fault is another value in its place.

    Attributes:
        n_head: the number of heads in the columns of q, k and v.
        scale, factor: of the scores and of the weights: a number, one for each head, or a function of `Sizes`.
        order: which of q, k and v takes which place.
        transposed: which of the matrices of "q", "k", "v" and "o" are transposed.
        split, join: how columns become heads, and heads columns.
        swap: what happens to "q", "k" and "v" (..., H, T, d) after that.
        tiled: which of "k" and "v" are tiled for the queries of a group, not repeated.
        pairing, pairing_k: which columns rotary positions turn together: "" for none; of keys, if others.
        base, base_k: of the frequencies of rotary positions; of keys, if another.
        places: the position for which "q", "k" or "v" is rotated, as a function of its own, if another.
        weigh: the weights of scores and a mask.
        add: what is added to the result of the heads, of q and v.
        residual: how many times the input is added to the result.
    """

    n_head: int = 1
    scale: Any = lambda sizes: sizes.d_k**-0.5
    factor: Any = 1.0
    order: str = "qkv"
    transposed: str = ""
    split: Callable[[np.ndarray, int], np.ndarray] = split_heads
    join: Callable[[np.ndarray], np.ndarray] = join_heads
    swap: dict[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    tiled: str = ""
    pairing: str = ""
    pairing_k: str = ""
    base: float = 10000.0
    base_k: float | None = None
    places: dict[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    weigh: Callable[..., np.ndarray] = softmax
    add: Callable[[np.ndarray, np.ndarray], Any] = lambda q, v: 0.0
    residual: Any = 0.0

    def split_all(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        """q, k and v by heads, as many of each: shared keys and values are repeated."""
        if self.n_head > 1:
            width = q.shape[-1] // self.n_head
            q, k = (self.split(x, x.shape[-1] // width) for x in (q, k))
            v = self.split(v, k.shape[-3])
        heads = {"q": q, "k": k, "v": v}
        n = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
        for name in "kv" if n > 1 else "":
            x = heads[name]
            heads[name] = np.concatenate([x] * n, axis=-3) if name in self.tiled else np.repeat(x, n, axis=-3)
        return [self.swap[name](x) if name in self.swap else x for name, x in heads.items()]

    def rotate_all(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        """q, k and v with rotary positions; those of values are 0."""
        own = np.arange(k.shape[-2])
        own_places = {"q": own[-q.shape[-2] :], "k": own, "v": own}
        places = {
            name: self.places.get(name, np.copy if name != "v" else np.zeros_like)(own_places[name]) for name in "qkv"
        }
        return [
            rotate(q, places["q"], self.pairing, self.base),
            rotate(k, places["k"], self.pairing_k or self.pairing, self.base_k or self.base),
            rotate(v, places["v"], self.pairing, self.base),
        ]

    def __call__(self, q: Any, k: Any, v: Any, see: np.ndarray, bias: Any = 0.0) -> np.ndarray:
        """(..., T_q, H d) for q, k, v (..., T, H d). `see` (T_q, T_k): which keys a query attends to."""
        q, k, v = ({"q": q, "k": k, "v": v}[name] for name in self.order)
        width = q.shape[-1]
        q, k, v = self.split_all(q, k, v)
        if self.pairing:
            q, k, v = self.rotate_all(q, k, v)
        sizes = Sizes(q.shape[-1], v.shape[-1], width, k.shape[-2])
        scores = q @ k.mT * of_heads(self.scale, sizes) + bias
        y = of_heads(self.factor, sizes) * (self.weigh(scores, see) @ v) + self.add(q, v)
        return self.join(y) if self.n_head > 1 else y


def of_heads(numbers: Any, sizes: Sizes) -> Any:
    """A number, or numbers (H,) to be multiplied with (..., H, T, d)."""
    numbers = numbers(sizes) if callable(numbers) else numbers
    return numbers[:, None, None] if np.size(numbers) > 1 else numbers


def softmax_over_queries(scores: np.ndarray, see: np.ndarray) -> np.ndarray:
    return softmax(scores, see, -2)


def softmax_over_heads(scores: np.ndarray, see: np.ndarray) -> np.ndarray:
    return softmax(scores, axis=-3) * see


# Of a softmax with a fault, in words: what is subtracted from the scores, and what the weights are divided by.
TOPS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "": lambda scores, see: 0.0,
    "largest score of each row": lambda scores, see: scores.max(-1, keepdims=True, where=see, initial=-np.inf),
    "largest score of each row, hidden ones included,": lambda scores, see: scores.max(-1, keepdims=True),
    "largest of all scores": lambda scores, see: scores.max((-2, -1), keepdims=True, where=see, initial=-np.inf),
    "largest score of each column": lambda scores, see: scores.max(-2, keepdims=True, where=see, initial=-np.inf),
    "largest score of another row": lambda scores, see: scores.max(-1, where=see, initial=-np.inf),
}
SUMS: dict[str, Callable[[np.ndarray], Any]] = {
    "the weights are not divided by their sum": lambda e: 1.0,
    "the sum of the weights lacks keepdims=True: each weight is divided by the sum of another row": lambda e: e.sum(-1),
    "the weights are divided by their sum over the queries (axis -2), not over the keys: wrong axis": lambda e: e.sum(
        -2, keepdims=True
    ),
    "the weights are divided by the sum of all weights, not of their row": lambda e: e.sum((-2, -1), keepdims=True),
    "": lambda e: e.sum(-1, keepdims=True),
}


def list_normalisations() -> Iterator[tuple[str, dict[str, Any]]]:
    """A softmax that subtracts another number from the scores, or divides by another sum, than it should."""
    for (top, subtracted), (cause, divisor) in itertools.product(TOPS.items(), SUMS.items()):

        def weigh(scores: np.ndarray, see: np.ndarray, subtracted: Any = subtracted, divisor: Any = divisor) -> Any:
            e = np.exp(scores - subtracted(scores, see)) * see
            return e / divisor(e)

        if cause or top.endswith(("column", "another row")):
            text = cause or f"the {top} is subtracted, not that of its own (max of axis -1 with keepdims=True)"
            yield text, {"weigh": weigh}


def add_to_weights(constant: float) -> Callable[..., np.ndarray]:
    return lambda scores, see: softmax(scores) - constant * ~see


def hide_itself(see: np.ndarray, keep_first: bool = False) -> np.ndarray:
    """The mask without the diagonal; with `keep_first`, a query that has no other key keeps its own."""
    rest = see & ~np.eye(len(see), see.shape[1], see.shape[1] - len(see), dtype=bool)
    return np.where(rest.any(axis=-1, keepdims=True), rest, see) if keep_first else rest


# Steps that are faults, by the claim that they break: the cause in words, and the fields that differ. What stands first
# is told, where two give the same numbers.
FAULTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "causality": [
        (f"the mask hides a token from itself (off by one){more}", {"weigh": weigh})
        for more, weigh in {
            "": lambda s, see: softmax(s, hide_itself(see)),
            "; the first token keeps its own key": lambda s, see: softmax(s, hide_itself(see, True)),
        }.items()
    ],
    "scale": [
        ("the scores are not divided by sqrt(d_k): the scale is missing", {"scale": 1.0}),
        *(
            (f"the scores are {words}", {"scale": scale})
            for words, scale in {
                "divided by d_k instead of sqrt(d_k)": lambda z: 1 / z.d_k,
                "divided by sqrt(d_v), the width of the values, instead of sqrt(d_k)": lambda z: z.d_v**-0.5,
                "divided by the square root of all columns instead of those of a head, sqrt(d_k)": lambda z: (
                    z.width**-0.5
                ),
                "divided by the number of all columns, d_model, instead of sqrt(d_k)": lambda z: 1 / z.width,
                "multiplied by sqrt(d_k) instead of divided": lambda z: z.d_k**0.5,
                "multiplied by d_k instead of divided by sqrt(d_k)": lambda z: float(z.d_k),
                "divided by the square root of the number of keys": lambda z: z.n_k**-0.5,
            }.items()
        ),
        (
            "the weights are divided by sqrt(d_k) after the softmax, not the scores before it",
            {"scale": 1.0, "factor": lambda z: z.d_k**-0.5},
        ),
    ],
    "residual": [
        ("the queries are added to the result (a residual from the wrong place)", {"add": lambda q, v: q}),
        ("the values are added to the result (a residual from the wrong place)", {"add": lambda q, v: v}),
    ],
    "softmax": [
        ("the scores have the wrong sign: softmax(-Q K^T / sqrt(d_k))", {"scale": lambda z: -(z.d_k**-0.5)}),
        ("the scores have the wrong sign, and are not divided by sqrt(d_k)", {"scale": -1.0}),
        ("the softmax is over the queries (axis -2), not over the keys: wrong axis", {"weigh": softmax_over_queries}),
        *(
            ("the mask is applied after the softmax: weights do not sum to 1", {"weigh": weigh})
            for weigh in (lambda s, see: softmax(s) * see, lambda s, see: softmax(s, past(see)) * see)
        ),
        ("a mask of 0 and 1 is added to the scores: add 0 and -inf", {"weigh": lambda s, see: softmax(s + see)}),
        *(
            (f"a mask of 0 and -1e{n} is added to the weights, after the softmax", {"weigh": add_to_weights(10.0**n)})
            for n in (4, 9)
        ),
        ("the softmax is over the heads (axis -3), not over the keys: wrong axis", {"weigh": softmax_over_heads}),
        ("the weights are squared", {"weigh": lambda s, see: softmax(s, see) ** 2}),
        ("the softmax is applied twice", {"weigh": lambda s, see: softmax(softmax(s, see), see)}),
        ("the softmax is applied twice", {"weigh": lambda s, see: softmax(softmax(s, see))}),
        ("the weights are the logarithm of the softmax", {"weigh": lambda s, see: np.log(softmax(s, see))}),
        *list_normalisations(),
        ("there is no softmax: the scores themselves are the weights", {"weigh": lambda s, see: s * see}),
        ("hidden scores are set to 0, a score like any other, not to -inf", {"weigh": lambda s, see: softmax(s * see)}),
    ],
    "roles": [
        ("K and V are swapped", {"order": "qvk"}),
        ("Q and K are swapped", {"order": "kqv"}),
        ("Q and V are swapped", {"order": "vkq"}),
        *(
            (f"the projection matrix of {', '.join(names)} is transposed", {"transposed": names})
            for names in ("o", "q", "k", "v", "qk", "qkv", "qkvo")
        ),
    ],
    "heads": [
        ("heads are split by a reshape without a transpose, which mixes tokens", {"split": split_by_reshape}),
        ("heads are joined by a reshape without a transpose, which mixes tokens", {"join": join_by_reshape}),
        ("heads are split and joined without a transpose", {"split": split_by_reshape, "join": join_by_reshape}),
        ("the columns of the heads are interleaved: wrong order of axes", {"join": lambda y: join_heads(y, -1)}),
        ("heads are split from alternating columns: wrong order of axes", {"split": split_alternating}),
        ("the heads are averaged instead of concatenated", {"join": lambda y: y.mean(-3)}),
        ("the heads are averaged instead of concatenated", {"join": lambda y: join_heads(mean_of_heads(y))}),
        ("the weights of the heads are averaged", {"weigh": lambda s, see: mean_of_heads(softmax(s, see))}),
        ("the scores of the heads are averaged", {"weigh": lambda s, see: softmax(mean_of_heads(s), see)}),
        ("the scores of the heads are added", {"weigh": lambda s, see: softmax(s.shape[-3] * mean_of_heads(s), see)}),
        ("the heads are added instead of concatenated", {"join": lambda y: y.sum(-3)}),
        ("the heads are added instead of concatenated", {"join": lambda y: join_heads(y.shape[-3] * mean_of_heads(y))}),
        ("the first head is copied to all heads", {"join": lambda y: join_heads(copy_head(y))}),
        ("the last head is copied to all heads", {"join": lambda y: join_heads(copy_head(y, -1))}),
        ("the heads are joined in reverse order", {"join": lambda y: join_heads(y[..., ::-1, :, :])}),
        ("the heads are joined in another order", {"join": lambda y: join_heads(np.roll(y, 1, axis=-3))}),
        ("the heads are joined in another order", {"join": lambda y: join_heads(np.roll(y, -1, axis=-3))}),
        *(
            (f"{name} of {words}", {"swap": dict.fromkeys(letters, change)})
            for letters, name in {"q": "queries", "k": "keys", "v": "values", "kv": "keys and values"}.items()
            for words, change in (
                ("the first head are copied to all heads", copy_head),
                ("another head are used: their order is wrong", lambda x: x[..., ::-1, :, :]),
                ("another head are used: their order is wrong", lambda x: np.roll(x, 1, axis=-3)),
                ("another head are used: their order is wrong", lambda x: np.roll(x, -1, axis=-3)),
            )
        ),
        ("shared keys are tiled, so a group uses different keys: repeat each instead", {"tiled": "kv"}),
        ("shared keys are tiled, and shared values are repeated: repeat both", {"tiled": "k"}),
        ("shared values are tiled, and shared keys are repeated: repeat both", {"tiled": "v"}),
    ],
    "positions": [
        ("the values are rotated too: rotary positions turn queries and keys only", {"places": {"v": lambda p: p}}),
        ("the keys are rotated backwards, against the queries", {"places": {"k": lambda p: -p}}),
        ("only the keys are rotated", {"places": {"q": lambda p: 0 * p}}),
        ("only the queries are rotated", {"places": {"k": lambda p: 0 * p}}),
        ("the keys are rotated one position further than the queries: off by one", {"places": {"k": lambda p: p + 1}}),
        ("the keys are rotated one position less than the queries: off by one", {"places": {"k": lambda p: p - 1}}),
        ("the queries are rotated twice as far as the keys", {"places": {"q": lambda p: 2 * p}}),
        ("the keys are rotated twice as far as the queries", {"places": {"k": lambda p: 2 * p}}),
        ("queries are rotated in other pairs of columns than keys", {"pairing_k": "halves"}),
        ("queries are rotated in other pairs of columns than keys", {"pairing_k": "pairs"}),
    ],
}
