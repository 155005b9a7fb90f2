"""Which formula a candidate computes: multi-head attention as it should be, or with one of the known faults.

A candidate without a visible fault can still compute something else than attention: an unscaled softmax keeps every
promise about masks. So its result is compared with the formula, and with the formula changed in one place. Equality up
to rounding, on random numbers, identifies the change.

Axes: H heads, T_q queries, T_k keys, d width of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from tinygrad_mha.check.candidates import Candidate, walk_modules
from tinygrad_mha.check.differences import largest

__all__ = ["CLOSE", "FAULTS", "Formula", "Reference", "is_equal", "past"]

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


@dataclass(frozen=True)
class Formula:
    """softmax(Q K^T scale) V in heads, with one choice for each thing that goes wrong.

    Attributes:
        n_head: the number of heads in the columns of q, k and v.
        scale: of the scores; d ** -0.5 if None.
        axis, times: of the softmax, and how often it is applied.
        is_late: whether the mask is multiplied by the weights instead of hiding scores.
        split, join: how columns become heads, and heads columns: "heads", "reshape", "interleave"; join also "mean".
        tile: whether shared keys are repeated as a whole instead of one by one.
        rotary: "" for none, "halves" or "pairs": what is rotated together.
        turned: what of "q", "k", "v" is rotated, "-k" backwards.
        shift: how much later keys are than queries, in positions.
        order: which of q, k and v takes which place.
        plus: what is added: "q" or "v" to the heads, "x" to the result, or "".
        hides_itself: whether the mask hides a token from itself.
    """

    n_head: int = 1
    scale: float | None = None
    axis: int = -1
    times: int = 1
    is_late: bool = False
    split: str = "heads"
    join: str = "heads"
    tile: bool = False
    rotary: str = ""
    turned: tuple[str, ...] = ("q", "k")
    shift: int = 0
    order: str = "qkv"
    plus: str = ""
    hides_itself: bool = False

    def __call__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, see: np.ndarray, bias: Any = 0.0) -> np.ndarray:
        """(..., T_q, H d) for q, k, v (..., T, H d). `see` (T_q, T_k): which keys a query attends to."""
        q, k, v = ({"q": q, "k": k, "v": v}[name] for name in self.order)
        if self.n_head > 1:
            width = q.shape[-1] // self.n_head
            q, k = (self._split(x, x.shape[-1] // width) for x in (q, k))
            v = self._split(v, k.shape[-3])
        if self.hides_itself:
            see = see & ~np.eye(len(see), see.shape[1], see.shape[1] - len(see), dtype=bool)
        if self.rotary:
            places = np.arange(k.shape[-2])
            q = self._rotate(q, places[-q.shape[-2] :], "q" in self.turned)
            v = self._rotate(v, places, "v" in self.turned)
            k = self._rotate(k, (-1 if "-k" in self.turned else 1) * places + self.shift, True)
        if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
            times = q.shape[-3] // k.shape[-3]
            repeat: Callable[..., Any] = np.repeat
            if self.tile:
                repeat = lambda x, n, axis: np.concatenate([x] * n, axis)  # noqa: E731
            k, v = repeat(k, times, axis=-3), repeat(v, times, axis=-3)
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if self.scale is None else self.scale) + bias
        for _ in range(self.times):
            scores = scores if self.is_late else np.where(see, scores, -np.inf)
            top = scores.max(axis=self.axis, keepdims=True)
            weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
            total = weights.sum(axis=self.axis, keepdims=True)
            scores = weights / np.where(total == 0, 1.0, total) * see
        y = scores @ v
        y = y + {"q": q, "v": v}[self.plus] if self.plus in ("q", "v") else y
        return self._join(y) if self.n_head > 1 else y

    def _split(self, x: np.ndarray, n: int) -> np.ndarray:
        *front, rows, columns = x.shape
        if self.split == "reshape":
            return x.reshape(*front, n, rows, columns // n)
        if self.split == "interleave":
            return np.moveaxis(x.reshape(*front, rows, columns // n, n), -1, -3)
        return np.moveaxis(x.reshape(*front, rows, n, columns // n), -2, -3)

    def _join(self, y: np.ndarray) -> np.ndarray:
        *front, n, rows, width = y.shape
        if self.join == "mean":
            return y.mean(axis=-3)
        if self.join == "tiled mean":
            return np.concatenate([y.mean(axis=-3)] * n, axis=-1)
        y = y if self.join == "reshape" else np.moveaxis(y, -3, -1 if self.join == "interleave" else -2)
        return y.reshape(*front, rows, n * width)

    def _rotate(self, x: np.ndarray, positions: np.ndarray, applies: bool) -> np.ndarray:
        if not applies or x.shape[-1] % 2:
            return x
        half = x.shape[-1] // 2
        angles = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
        a, b = (x[..., :half], x[..., half:]) if self.rotary == "halves" else (x[..., ::2], x[..., 1::2])
        turned = np.stack([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])
        return (
            np.concatenate(list(turned), -1) if self.rotary == "halves" else np.moveaxis(turned, 0, -1).reshape(x.shape)
        )


# Changes that are faults: the claim that they break, the cause in words, and the fields that differ.
FAULTS: list[tuple[str, str, dict[str, Any]]] = [
    ("causality", "the mask hides a token from itself (off by one)", {"hides_itself": True}),
    ("residual", "the input is added to the result: a residual connection inside", {"plus": "x"}),
    ("softmax", "the softmax is over the queries (axis -2), not over the keys: wrong axis", {"axis": -2}),
    (
        "softmax",
        "the mask is applied after the softmax, so the weights that are left do not sum to 1",
        {"is_late": True},
    ),
    ("softmax", "the softmax is applied twice", {"times": 2}),
    ("roles", "K and V are swapped", {"order": "qvk"}),
    ("roles", "Q and K are swapped", {"order": "kqv"}),
    ("roles", "Q and V are swapped", {"order": "vkq"}),
    ("heads", "heads are split by a reshape without a transpose, which mixes tokens", {"split": "reshape"}),
    ("heads", "heads are joined by a reshape without a transpose, which mixes tokens", {"join": "reshape"}),
    ("heads", "heads are split and joined by a reshape without a transpose", {"split": "reshape", "join": "reshape"}),
    (
        "heads",
        "the columns of the heads are interleaved when they are joined: wrong order of axes",
        {"join": "interleave"},
    ),
    ("heads", "the heads are averaged instead of concatenated", {"join": "mean"}),
    ("heads", "the heads are averaged instead of concatenated", {"join": "tiled mean"}),
    ("heads", "shared keys are tiled, so queries of one group use different keys: repeat each instead", {"tile": True}),
    (
        "positions",
        "the values are rotated too: rotary positions turn queries and keys only",
        {"turned": ("q", "k", "v")},
    ),
    ("positions", "the keys are rotated backwards, against the queries", {"turned": ("q", "-k")}),
    ("positions", "only the keys are rotated", {"turned": ("k",)}),
    (
        "positions",
        "the keys are rotated for one position later than the queries: distances are off by one",
        {"shift": 1},
    ),
    (
        "positions",
        "the keys are rotated for one position earlier than the queries: distances are off by one",
        {"shift": -1},
    ),
    ("residual", "the queries are added to the result (a residual connection from the wrong place)", {"plus": "q"}),
    ("residual", "the values are added to the result (a residual connection from the wrong place)", {"plus": "v"}),
]


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


class Reference:
    """The formula with the projections of a candidate, to compare it with.

    Projections are found by their names or order; a function of q, k and v has none. Without them nothing is compared.

    Attributes:
        is_known: whether there is something to compare with.
    """

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.parts = {} if candidate.module is None else find_projections(candidate)
        self.is_known = bool(self.parts) or (candidate.module is None and not candidate.takes_rows)
        self.n_head = candidate.find_size("n_head", "num_heads", "n_heads", "heads", "h", "H", "nhead") or 1
        self.n_kv_head = candidate.find_size("n_kv_head", "num_key_value_heads", "num_kv_heads") or self.n_head

    def project(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """q, k and v (..., T, H d) of the inputs of the candidate."""
        if not self.parts:
            return inputs
        inputs = inputs if len(inputs) == 3 else inputs * 3
        if "qkv" not in self.parts:
            return tuple(self.parts[name](x) for name, x in zip("qkv", inputs, strict=True))
        parts = []
        for i, x in enumerate(inputs):
            y = self.parts["qkv"](x)
            d = y.shape[-1] // (self.n_head + 2 * self.n_kv_head)
            parts.append(np.split(y, [self.n_head * d, (self.n_head + self.n_kv_head) * d], axis=-1)[i])
        return tuple(parts)

    def compute(self, formula: Formula, inputs: tuple[np.ndarray, ...], see: np.ndarray, bias: Any = 0.0) -> np.ndarray:
        """The result of the candidate if it computed `formula`; see `Formula.__call__`."""
        q, k, v = self.project(inputs)
        y = formula(q, k, v, see, bias)
        y = self.parts["o"](y) if self.parts else y
        return y + inputs[0] if formula.plus == "x" else y

    def identify(
        self, inputs: tuple[np.ndarray, ...], y: np.ndarray, see: np.ndarray, bias: Any = 0.0
    ) -> tuple[Formula | None, str, str]:
        """The formula that gives y; the claim that it breaks and the fault in words, both "" for a correct one."""
        if not self.is_known:
            return None, "", ""
        q, k, v = self.project(inputs)
        n_head = 1 if q.shape[-1] % self.n_head else self.n_head
        d_k = q.shape[-1] // n_head
        scales = list_scales(d_k, v.shape[-1] // max(1, k.shape[-1] // d_k), q.shape[-1], k.shape[-2])
        for formula, claim, cause in list_formulas(Formula(n_head)):
            for mask in (see, past(see)):

                def error(scale: float | None, formula: Formula = formula, mask: np.ndarray = mask) -> np.ndarray:
                    return self.compute(replace(formula, scale=scale), inputs, mask, bias) - y

                with contextlib.suppress(Exception), np.errstate(all="ignore"):  # shapes that a formula cannot have
                    if is_equal(error(None) + y, y):
                        return formula, claim, cause
                    scale = None if claim else fit_scale(error, scales.values())
                    if scale is not None:
                        cause = f"the scores are multiplied by {scale:.4g} instead of 1/sqrt(d_k) = {d_k**-0.5:.4g}"
                        cause = next((text for text, known in scales.items() if np.isclose(known, scale)), cause)
                        return replace(formula, scale=scale), "softmax" if scale < 0 else "scale", cause
        return None, "", ""


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


def find_projections(candidate: Candidate) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """The projections of a module by their role in ROLES, as functions of arrays.

    Roles follow from names. If these say too little and there are two or four linear layers, they follow from the order
    in which these were made: a guess is harmless, since a formula counts only if all digits agree.
    """
    found: dict[str, Any] = {}
    for _, module in walk_modules(candidate.module):
        held = {**vars(module), **vars(module).get("_parameters", {}), **vars(module).get("_modules", {})}
        for name, part in held.items():
            short = name.lower().replace("_", "")
            role = next((role for role, names in ROLES.items() if short in names), None)
            if role and role not in found and (callable(part) or hasattr(part, "shape")):
                found[role] = as_projection(candidate, part, held.get(BIASES.get(name, "")))
    layers = [module for _, module in walk_modules(candidate.module) if type(module).__name__ == "Linear"]
    if not is_complete(found) and len(layers) in ORDERS:
        found = {
            role: as_projection(candidate, layer, None) for role, layer in zip(ORDERS[len(layers)], layers, strict=True)
        }
    return found if is_complete(found) else {}


def is_complete(found: dict[str, Any]) -> bool:
    return "o" in found and ("qkv" in found or {"q", "k", "v"} <= found.keys())


def as_projection(candidate: Candidate, part: Any, bias: Any) -> Callable[[np.ndarray], np.ndarray]:
    """A linear module, or a matrix and a bias, as a function of arrays."""

    def read(x: Any) -> np.ndarray:
        return np.asarray(x.detach().numpy())

    if callable(part):
        return lambda x: read(part(candidate.convert(x)))
    matrix, offset = read(part), 0.0 if bias is None else read(bias)
    return lambda x: x @ (matrix.T if candidate.library == "torch" else matrix) + offset


def list_formulas(base: Formula) -> Iterator[tuple[Formula, str, str]]:
    """Correct formulas first, then those with one fault."""
    kinds = [base] + [replace(base, rotary=rotary) for rotary in ("halves", "pairs")]
    yield from ((kind, "", "") for kind in kinds)
    for (claim, cause, change), kind in product(FAULTS, kinds):
        yield replace(kind, **change), claim, cause


def past(see: np.ndarray, more: int = 0) -> np.ndarray:
    """The causal mask of the shape of `see`, with `more` later keys."""
    n, m = see.shape
    return np.tri(n, m, m - n + more, dtype=bool)


def is_equal(a: np.ndarray, b: np.ndarray, tolerance: float = CLOSE) -> bool:
    """Whether two arrays are equal up to `tolerance`, relative to the largest finite element of b."""
    if a.shape != b.shape:
        return False
    return bool(np.allclose(a, b, rtol=0, atol=tolerance * largest(b), equal_nan=True))
