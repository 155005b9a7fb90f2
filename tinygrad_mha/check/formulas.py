"""Which formula a candidate computes: multi-head attention as it should be, or with one of the known faults.

A candidate without a visible fault can still compute something else than attention: an unscaled softmax keeps every
promise about masks. So its result is compared with the formula, and with the formula changed in one place. Equality up
to rounding, on random numbers, identifies the change.

Axes: H heads, G heads of keys and values, T_q queries, T_k keys, d width of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from tinygrad_mha.check.candidates import Candidate, walk_modules
from tinygrad_mha.check.differences import largest
from tinygrad_mha.nn.positions import alibi_slopes

__all__ = [
    "CLOSE",
    "FAULTS",
    "Block",
    "Formula",
    "Match",
    "Reference",
    "is_equal",
    "judge_distances",
    "past",
    "restoring",
]

STEPS = 12  # of Newton's method, which doubles the digits with each
CLOSE = 1e-9  # relative to the largest element, in float64

# What people call the four projections.
ROLES = {
    "q": ("wq", "qproj", "query", "toq", "q", "queryproj", "qlinear", "linq", "querylayer"),
    "k": ("wk", "kproj", "key", "tok", "k", "keyproj", "klinear", "link", "keylayer"),
    "v": ("wv", "vproj", "value", "tov", "v", "valueproj", "vlinear", "linv", "valuelayer"),
    "qkv": ("cattn", "qkv", "wqkv", "inproj", "inprojweight", "qkvproj", "toqkv", "querykeyvalue"),
    "o": ("wo", "oproj", "cproj", "outproj", "out", "o", "proj", "toout", "output", "outputproj", "dense", "linout"),
}
ORDERS = {4: ("q", "k", "v", "o"), 2: ("qkv", "o")}  # in which linear layers are usually made
BIASES = {"wq": "bq", "wk": "bk", "wv": "bv", "wo": "bo", "in_proj_weight": "in_proj_bias"}

Block = tuple[np.ndarray, np.ndarray]
"""A weight (in, out) and an offset (out,) that share memory with a module."""

# --------------------------------------------------------------------------------------------------------------------
# The formula


def split_heads(x: np.ndarray, n: int) -> np.ndarray:
    """(..., n, T, d) of (..., T, n d)."""
    return np.moveaxis(x.reshape(*x.shape[:-1], n, -1), -2, -3)


def split_by_reshape(x: np.ndarray, n: int) -> np.ndarray:
    return x.reshape(*x.shape[:-2], n, x.shape[-2], -1)


def join_heads(y: np.ndarray, axis: int = -2) -> np.ndarray:
    """(..., T, n d) of (..., n, T, d); with axis -1 the columns of the heads alternate."""
    y = np.moveaxis(y, -3, axis)
    return y.reshape(*y.shape[:-2], -1)


def join_by_reshape(y: np.ndarray) -> np.ndarray:
    return y.reshape(*y.shape[:-3], y.shape[-2], -1)


def join_alike(y: np.ndarray, head: np.ndarray) -> np.ndarray:
    """All heads replaced by the one that is given, (..., 1, T, d)."""
    return join_heads(np.broadcast_to(head, y.shape))


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


@dataclass(frozen=True)
class Formula:
    """softmax(Q K^T scale) V in heads. Each field is one step; a fault is another function in its place.

    Attributes:
        n_head: the number of heads in the columns of q, k and v.
        scale: of the scores; d ** -0.5 if None.
        order: which of q, k and v takes which place.
        split, join: how columns become heads, and heads columns.
        repeat: how k and v of a group are repeated for its queries.
        pairing, pairing_k: which columns rotary positions turn together: "" for none; of keys, if others.
        base: of the frequencies of rotary positions.
        place_q, place_k, place_v: the position for which each is rotated, of its own position.
        weigh: the weights of scores and a mask.
        add: what is added to the result of the heads, of q and v.
        residual: how often the input is added to the result.
    """

    n_head: int = 1
    scale: float | None = None
    order: str = "qkv"
    split: Callable[[np.ndarray, int], np.ndarray] = split_heads
    join: Callable[[np.ndarray], np.ndarray] = join_heads
    repeat: Callable[..., np.ndarray] = lambda x, n: np.repeat(x, n, axis=-3)
    pairing: str = ""
    pairing_k: str = ""
    base: float = 10000.0
    place_q: Callable[[np.ndarray], np.ndarray] = lambda p: p
    place_k: Callable[[np.ndarray], np.ndarray] = lambda p: p
    place_v: Callable[[np.ndarray], np.ndarray] = lambda p: 0 * p
    weigh: Callable[..., np.ndarray] = softmax
    add: Callable[[np.ndarray, np.ndarray], Any] = lambda q, v: 0.0
    residual: int = 0

    def split_all(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        """q, k and v by heads, as many of each: shared keys and values are repeated."""
        if self.n_head > 1:
            width = q.shape[-1] // self.n_head
            q, k = (self.split(x, x.shape[-1] // width) for x in (q, k))
            v = self.split(v, k.shape[-3])
        n = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
        return [q, k, v] if n == 1 else [q, self.repeat(k, n), self.repeat(v, n)]

    def __call__(self, q: Any, k: Any, v: Any, see: np.ndarray, bias: Any = 0.0) -> np.ndarray:
        """(..., T_q, H d) for q, k, v (..., T, H d). `see` (T_q, T_k): which keys a query attends to."""
        q, k, v = self.split_all(*({"q": q, "k": k, "v": v}[name] for name in self.order))
        if self.pairing:
            places = np.arange(k.shape[-2])
            q = rotate(q, self.place_q(places[-q.shape[-2] :]), self.pairing, self.base)
            k = rotate(k, self.place_k(places), self.pairing_k or self.pairing, self.base)
            v = rotate(v, self.place_v(places), self.pairing, self.base)
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if self.scale is None else self.scale) + bias
        y = self.weigh(scores, see) @ v + self.add(q, v)
        return self.join(y) if self.n_head > 1 else y


def softmax_over_queries(scores: np.ndarray, see: np.ndarray) -> np.ndarray:
    return softmax(scores, see, -2)


def tile(x: np.ndarray, n: int) -> np.ndarray:
    return np.concatenate([x] * n, axis=-3)


def hide_itself(see: np.ndarray) -> np.ndarray:
    return see & ~np.eye(len(see), see.shape[1], see.shape[1] - len(see), dtype=bool)


# Steps that are faults, by the claim that they break: the cause in words, and the fields that differ.
FAULTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "causality": [
        ("the mask hides a token from itself (off by one)", {"weigh": lambda s, see: softmax(s, hide_itself(see))}),
    ],
    "residual": [
        ("the input is added to the result: a residual connection inside", {"residual": 1}),
        ("the queries are added to the result (a residual from the wrong place)", {"add": lambda q, v: q}),
        ("the values are added to the result (a residual from the wrong place)", {"add": lambda q, v: v}),
    ],
    "softmax": [
        ("the softmax is over the queries (axis -2), not over the keys: wrong axis", {"weigh": softmax_over_queries}),
        ("the mask is applied after the softmax: weights do not sum to 1", {"weigh": lambda s, see: softmax(s) * see}),
        ("the softmax is applied twice", {"weigh": lambda s, see: softmax(softmax(s, see), see)}),
        ("the softmax is applied twice", {"weigh": lambda s, see: softmax(softmax(s, see))}),
        ("the weights are not divided by their sum", {"weigh": lambda s, see: np.exp(s) * see}),
        ("hidden scores are set to 0, a score like any other, not to -inf", {"weigh": lambda s, see: softmax(s * see)}),
    ],
    "roles": [
        ("K and V are swapped", {"order": "qvk"}),
        ("Q and K are swapped", {"order": "kqv"}),
        ("Q and V are swapped", {"order": "vkq"}),
    ],
    "heads": [
        ("heads are split by a reshape without a transpose, which mixes tokens", {"split": split_by_reshape}),
        ("heads are joined by a reshape without a transpose, which mixes tokens", {"join": join_by_reshape}),
        ("heads are split and joined without a transpose", {"split": split_by_reshape, "join": join_by_reshape}),
        ("the columns of the heads are interleaved: wrong order of axes", {"join": lambda y: join_heads(y, -1)}),
        ("the heads are averaged instead of concatenated", {"join": lambda y: y.mean(-3)}),
        (
            "the heads are averaged instead of concatenated",
            {"join": lambda y: join_alike(y, y.mean(-3, keepdims=True))},
        ),
        ("the heads are added instead of concatenated", {"join": lambda y: y.sum(-3)}),
        ("the first head is copied to all heads", {"join": lambda y: join_alike(y, y[..., :1, :, :])}),
        ("the last head is copied to all heads", {"join": lambda y: join_alike(y, y[..., -1:, :, :])}),
        ("the heads are joined in reverse order", {"join": lambda y: join_heads(y[..., ::-1, :, :])}),
        ("shared keys are tiled, so a group uses different keys: repeat each instead", {"repeat": tile}),
    ],
    "positions": [
        ("the values are rotated too: rotary positions turn queries and keys only", {"place_v": lambda p: p}),
        ("the keys are rotated backwards, against the queries", {"place_k": lambda p: -p}),
        ("only the keys are rotated", {"place_q": lambda p: 0 * p}),
        ("only the queries are rotated", {"place_k": lambda p: 0 * p}),
        ("the keys are rotated one position further than the queries: off by one", {"place_k": lambda p: p + 1}),
        ("the keys are rotated one position less than the queries: off by one", {"place_k": lambda p: p - 1}),
        ("queries are rotated in other pairs of columns than keys", {"pairing_k": "halves"}),
        ("queries are rotated in other pairs of columns than keys", {"pairing_k": "pairs"}),
        ("the frequencies of the rotation are base^(-i/d) instead of base^(-2i/d)", {"base": 100.0}),
    ],
}


def list_scales(d_k: int, d_v: int, width: int, n_k: int) -> dict[str, float]:
    """Wrong scales of the scores, by the fault that makes them."""
    root = d_k**-0.5
    scales = {
        "the scores are not divided by sqrt(d_k): the scale is missing": 1.0,
        "the scores are divided by d_k instead of sqrt(d_k)": 1.0 / d_k,
        "the scores are divided by sqrt(d_v), the width of the values, instead of sqrt(d_k)": d_v**-0.5,
        "the scores are divided by the square root of all columns instead of those of a head, sqrt(d_k)": width**-0.5,
        "the scores are multiplied by sqrt(d_k) instead of divided": d_k**0.5,
        "the scores are divided by the square root of the number of keys": n_k**-0.5,
        "the scores have the wrong sign: softmax(-Q K^T / sqrt(d_k))": -root,
        "the scores have the wrong sign, and are not divided by sqrt(d_k)": -1.0,
    }
    return {cause: scale for cause, scale in scales.items() if not np.isclose(scale, root)}


def fit_scale(error: Callable[[float], np.ndarray], starts: Iterable[float]) -> float | None:
    """The scale of which the error is zero up to rounding, by Newton's method from each start, or None."""
    for scale in starts:
        for _ in range(STEPS):
            e = error(scale)
            if np.abs(e).max() < CLOSE:
                return scale
            slope = (error(scale * (1 + 1e-6)) - e) / (scale * 1e-6)
            scale -= float((slope * e).sum() / (slope * slope).sum())
    return None


def judge_distances(bias: np.ndarray, see: np.ndarray, d_k: int) -> str:
    """What is wrong with what is added to the scores (..., T_q, T_k), if it falls with the distance as in ALiBi."""
    steps = np.diff(bias[..., -1, :][..., see[-1]]).reshape(-1, see[-1].sum() - 1)
    if steps.shape[-1] < 2 or np.ptp(steps, axis=-1).max() > CLOSE or (np.abs(steps) < CLOSE).all():
        return ""
    if steps.max() < -CLOSE:
        return "the slope of the distances (ALiBi) has the wrong sign: far keys get more weight"
    slopes, expected = steps[:, 0], alibi_slopes(len(steps))
    if len(slopes) < 2 or is_equal(slopes, expected):
        return ""
    if is_equal(slopes, expected * d_k**-0.5):
        return "the distances (ALiBi) are divided by sqrt(d_k) too: they are added before the division"
    if is_equal(np.sort(slopes), np.sort(expected)):
        return "the slopes of the distances (ALiBi) are those of other heads: wrong order"
    return ""


# --------------------------------------------------------------------------------------------------------------------
# The formula of a candidate


@dataclass(frozen=True)
class Match:
    """The formula that gives the result of a candidate.

    Attributes:
        formula: None if no formula does.
        claim, cause: the claim that it breaks and the fault in words, both "" for a correct one.
        correct: the formula without the fault.
        bias: what is added to the scores.
        n: the number of tokens for which the bias is known; None for any.
    """

    formula: Formula | None = None
    claim: str = ""
    cause: str = ""
    correct: Formula = field(default_factory=Formula)
    bias: Any = 0.0
    n: int | None = None


class Reference:
    """The formula with the projections of a candidate, to compare it with.

    Projections are found by their names or order; a function of q, k and v has none. Without them nothing is compared.

    Attributes:
        parts: of each of "q", "k", "v" a `Block` for each head, of "o" one; {} for a function.
        is_known: whether there is something to compare with.
        n_head, n_kv_head: H and G.
    """

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.n_head = candidate.find_size("n_head", "num_heads", "n_heads", "heads", "h", "H", "nhead") or 1
        self.n_kv_head = candidate.find_size("n_kv_head", "num_key_value_heads", "num_kv_heads") or self.n_head
        self.parts: dict[str, list[Block]] = {}
        if candidate.module is not None:
            self._split_blocks(find_projections(candidate))
        self.is_known = bool(self.parts) or (candidate.module is None and not candidate.takes_rows)

    def _split_blocks(self, found: dict[str, list[Block]]) -> None:
        """Divide the columns of the projections among the heads."""
        if not found:
            return
        n = len(found.get("q", ""))
        if n > 1 and n == len(found["k"]) == len(found["v"]):  # each head has projections of its own
            self.n_head = self.n_kv_head = n
            self.parts = found
            return
        if "qkv" in found:
            weight, offset = found["qkv"][0]
            d = weight.shape[-1] // (self.n_head + 2 * self.n_kv_head)
            stops = [0, self.n_head * d, (self.n_head + self.n_kv_head) * d, weight.shape[-1]]
            found |= {
                name: [(weight[:, a:b], offset[a:b])] for name, a, b in zip("qkv", stops, stops[1:], strict=False)
            }
        if found["q"][0][0].shape[-1] % self.n_head or self.n_head % self.n_kv_head:
            self.n_head = self.n_kv_head = 1
        for name, n in {"q": self.n_head, "k": self.n_kv_head, "v": self.n_kv_head, "o": 1}.items():
            weight, offset = found[name][0]
            if weight.shape[-1] % n == 0:
                blocks = zip(np.split(weight, n, axis=-1), np.split(offset, n), strict=True)
                self.parts[name] = list(blocks)
        if len(self.parts) < 4:
            self.parts = {}

    def project(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """q, k and v (..., T, H d) of the inputs of the candidate."""
        if not self.parts:
            return inputs
        inputs = inputs if len(inputs) == 3 else inputs * 3
        pairs = zip("qkv", inputs, strict=True)
        return tuple(np.concatenate([x @ w + b for w, b in self.parts[name]], axis=-1) for name, x in pairs)

    def compute(self, formula: Formula, inputs: tuple[np.ndarray, ...], see: np.ndarray, bias: Any = 0.0) -> np.ndarray:
        """The result of the candidate if it computed `formula`; see `Formula.__call__`."""
        q, k, v = self.project(inputs)
        y = formula(q, k, v, see, bias)
        for weight, offset in self.parts.get("o", []):
            y = y @ weight + offset
        return y + inputs[0] if formula.residual else y

    def identify(self, inputs: tuple[np.ndarray, ...], see: np.ndarray) -> Match:
        """The formula that gives the result for these inputs, without a bias of the scores or with the measured one."""
        if not self.is_known:
            return Match()
        match = self._match(inputs, see, 0.0)
        if match.formula is None:
            with contextlib.suppress(Exception), np.errstate(all="ignore"):  # shapes of another kind of attention
                n = min(inputs[-1].shape[-2], self._value_width(inputs))
                fewer, see = tuple(x[..., :n, :] for x in inputs), see[:n, :n]
                bias = self.measure_bias(fewer, see)
                found = self._match(fewer, see, bias)
                cause = judge_distances(bias, see, self.project(inputs)[0].shape[-1] // self.n_head)
                if found.formula is not None:
                    match = replace(found, n=n)
                if cause and not found.claim:
                    match = replace(match, claim="positions", cause=cause)
        return match

    def _value_width(self, inputs: tuple[np.ndarray, ...]) -> int:
        return self.project(inputs)[2].shape[-1] // (self.n_kv_head if self.n_head > 1 else 1)

    def _match(self, inputs: tuple[np.ndarray, ...], see: np.ndarray, bias: Any) -> Match:
        c, y = self.candidate, self.candidate(*inputs)
        q, k, _ = self.project(inputs)
        n_head = 1 if q.shape[-1] % self.n_head else self.n_head
        d_k, base = q.shape[-1] // n_head, c.find_size("rope_theta", "theta", "base") or 10000.0
        scales = list_scales(d_k, self._value_width(inputs), q.shape[-1], k.shape[-2])
        kinds = [Formula(n_head, pairing=pairing, base=base) for pairing in ("", "halves", "pairs")]
        choices = [("", "", {}), *((claim, *fault) for claim, faults in FAULTS.items() for fault in faults)]
        for (claim, cause, change), kind, mask in product(choices, kinds, (see, past(see))):
            formula = replace(kind, **change)

            def error(scale: float | None, formula: Formula = formula, mask: np.ndarray = mask) -> np.ndarray:
                return self.compute(replace(formula, scale=scale), inputs, mask, bias) - y

            with contextlib.suppress(Exception), np.errstate(all="ignore"):  # shapes that a formula cannot have
                if is_equal(error(None) + y, y):
                    return Match(formula, claim, cause, kind, bias)
                scale = None if claim else fit_scale(error, scales.values())
                if scale is not None:
                    cause = f"the scores are multiplied by {scale:.4g} instead of 1/sqrt(d_k) = {d_k**-0.5:.4g}"
                    cause = next((text for text, known in scales.items() if np.isclose(known, scale)), cause)
                    claim = "softmax" if scale < 0 else "scale"
                    return Match(replace(formula, scale=scale), claim, cause, kind, bias)
        return Match()

    def measure_bias(self, inputs: tuple[np.ndarray, ...], see: np.ndarray) -> np.ndarray:
        """What is added to the scores, (..., T_q, T_k), if a head is as wide as there are keys.

        With queries of 0 there is nothing else in the scores, and the weights follow from the result and the values.
        """
        formula = Formula(self.n_head)
        arrays = [array for block in self.parts.get("q", []) for array in block]
        with restoring(arrays):
            for array in arrays:
                array[...] = 0.0
            y = self.candidate(*(inputs if arrays else (np.zeros_like(inputs[0]), *inputs[1:])))
        for weight, offset in self.parts.get("o", []):
            y = (y - offset) @ np.linalg.pinv(weight)
        _, _, v = formula.split_all(*self.project(inputs))
        weights = (split_heads(y, self.n_head) if self.n_head > 1 else y) @ np.linalg.pinv(v)
        if not (weights[..., see] > 0).all():
            raise ValueError("weights are not positive")
        bias = np.log(np.where(see & (weights > 0), weights, 1.0))
        return bias - bias.max(axis=-1, keepdims=True)


def find_projections(candidate: Candidate) -> dict[str, list[Block]]:
    """The projections of a module by their role in ROLES.

    Roles follow from names. If these say too little and there are two or four linear layers, they follow from the order
    in which these were made: a guess is harmless, since a formula counts only if all digits agree.
    """
    found: dict[str, list[Block]] = {}
    for _, module in walk_modules(candidate.module):
        held = {**vars(module), **vars(module).get("_parameters", {}), **vars(module).get("_modules", {})}
        for name, part in held.items():
            short = name.lower().replace("_", "")
            role = next((role for role, names in ROLES.items() if short in names), None)
            block = read_block(candidate, part, held.get(BIASES.get(name, ""))) if role else None
            if role and block:
                found.setdefault(role, []).append(block)
    layers = [module for _, module in walk_modules(candidate.module) if type(module).__name__ == "Linear"]
    if not is_complete(found) and len(layers) in ORDERS:
        blocks = [read_block(candidate, layer, None) for layer in layers]
        found = {role: [block] for role, block in zip(ORDERS[len(layers)], blocks, strict=True) if block}
    return found if is_complete(found) else {}


def is_complete(found: dict[str, Any]) -> bool:
    return "o" in found and ("qkv" in found or {"q", "k", "v"} <= found.keys())


def read_block(candidate: Candidate, part: Any, bias: Any) -> Block | None:
    """The weight and offset of a linear module, or of a matrix and a bias; None of something else."""
    is_matrix = hasattr(part, "shape")
    weight, bias = (part, bias) if is_matrix else (getattr(part, "weight", None), getattr(part, "bias", None))
    if getattr(weight, "ndim", 0) != 2:
        return None
    matrix = candidate.share(weight)
    if candidate.library == "torch" and type(part).__name__ != "Conv1D":  # whose weight is (in, out), as ours is
        matrix = matrix.T
    return matrix, np.zeros(matrix.shape[-1]) if bias is None else candidate.share(bias)


@contextlib.contextmanager
def restoring(arrays: list[np.ndarray]) -> Iterator[None]:
    """Put the values of arrays back afterwards."""
    before = [array.copy() for array in arrays]
    try:
        yield
    finally:
        for array, values in zip(arrays, before, strict=True):
            array[...] = values


def past(see: np.ndarray, more: int = 0) -> np.ndarray:
    """The causal mask of the shape of `see`, with `more` later keys."""
    n, m = see.shape
    return np.tri(n, m, m - n + more, dtype=bool)


def is_equal(a: np.ndarray, b: np.ndarray, tolerance: float = CLOSE) -> bool:
    """Whether two arrays are equal up to `tolerance`, relative to the largest finite element of b."""
    if a.shape != b.shape:
        return False
    return bool(np.allclose(a, b, rtol=0, atol=tolerance * largest(b), equal_nan=True))
