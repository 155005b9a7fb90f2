"""Which formula a candidate computes: multi-head attention as it should be, or with one of the known faults.

A candidate without a visible fault can still compute something else than attention: an unscaled softmax keeps every
promise about masks. So its result is compared with the formula, with other numbers in the formula (which are found by
Newton's method), and with the formula changed in one step. Equality up to rounding, on random numbers, identifies the
change.

Axes: H heads, G heads of keys and values, T_q queries, T_k keys, d width of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from tinygrad_mha.check.candidates import Candidate, Inputs, walk_modules
from tinygrad_mha.check.differences import CLOSE, is_equal, largest
from tinygrad_mha.check.formulas import FAULTS, Formula, past, split_heads
from tinygrad_mha.nn.positions import alibi_slopes

__all__ = ["Match", "Reference", "restoring"]

STEPS = 12  # of Newton's method, which doubles the digits with each
BASE, BASES = 10000.0, [100.0, 3000.0, 500000.0]  # of rotary positions: the usual one; those to start from
NUMBERS = {"scale": [1.0, 0.3, 0.05, 5.0, -0.3, -1.0], "factor": [1.0], "residual": [1.0]}  # to start from

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

Block = tuple[np.ndarray, ...]
"""A weight (in, out) and an offset (out,) that share memory with a module; or the input of a function, (..., T, d)."""

# --------------------------------------------------------------------------------------------------------------------
# The formula of a candidate


@dataclass(frozen=True)
class Match:
    """The formula that gives the result of a candidate.

    Attributes:
        formula: None if no formula does.
        claim, cause: the claim that it breaks and the fault in words, both "" for a correct one.
        correct: the formula without the fault.
        n: the number of tokens for which the bias is known; None for any.
    """

    formula: Formula | None = None
    claim: str = ""
    cause: str = ""
    correct: Formula = field(default_factory=Formula)
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
        self.n_head = candidate.find_number("n_head", "num_heads", "n_heads", "heads", "h", "H", "nhead") or 1
        self.n_kv_head = candidate.find_number("n_kv_head", "num_key_value_heads", "num_kv_heads") or self.n_head
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
        widths = dict(zip("qkv", (x.shape[-1] for x in self.candidate.inputs * 3), strict=False))  # x, or q, k, v
        if len(self.parts) < 4 or any(len(self.parts[name][0][0]) != width for name, width in widths.items()):
            self.parts = {}  # of keys from something else than the input

    def open(self, inputs: Inputs) -> tuple[Inputs, dict[str, list[Block]]]:
        """Copies of the inputs; and what makes the "q", "k" and "v" of each head, to be changed in place."""
        copies = tuple(x.copy() for x in inputs)
        heads = [np.moveaxis(x, -3, 0) if x.ndim > 2 else [x] for x in copies]
        blocks: dict[str, list[Block]] = {name: [(x,) for x in xs] for name, xs in zip("qkv", heads, strict=False)}
        return copies, {name: self.parts.get(name, blocks.get(name, [])) for name in "qkv"}

    @property
    def may_scale(self) -> bool:
        """Whether it has parameters besides the projections, which may set the scale of scores or weights."""
        known = [array for blocks in self.parts.values() for block in blocks for array in block]
        return not all(any(np.may_share_memory(p, a) for a in known) for p in self.candidate.parameters())

    def project(self, inputs: Inputs, transposed: str = "") -> Inputs:
        """q, k and v (..., T, H d) of the inputs of the candidate."""
        if not self.parts:
            return inputs
        inputs = inputs if len(inputs) == 3 else inputs * 3
        return tuple(self._apply(name, x, transposed) for name, x in zip("qkv", inputs, strict=True))

    def _apply(self, name: str, x: np.ndarray, transposed: str = "") -> np.ndarray:
        """The projection "q", "k", "v" or "o" of x."""
        weight, offset = (np.concatenate(arrays, axis=-1) for arrays in zip(*self.parts[name], strict=True))
        return np.asarray(x @ (weight.T if name in transposed else weight) + offset)

    def compute(self, formula: Formula, inputs: Inputs, see: np.ndarray, bias: Any = 0.0) -> np.ndarray:
        """The result of the candidate if it computed `formula`; see `Formula.__call__`."""
        q, k, v = self.project(inputs, formula.transposed)
        y = formula(q, k, v, see, bias)
        y = self._apply("o", y, formula.transposed) if self.parts else y
        return y + formula.residual * inputs[0] if np.any(formula.residual) else y

    def identify(self, inputs: Inputs, see: np.ndarray, run: Callable[..., np.ndarray] | None = None) -> Match:
        """The formula that gives the result for these inputs, without a bias of the scores or with the measured one.

        `run` calls the candidate with a mask or padding, of which `see` says what they hide; then no bias is measured.
        """
        if not self.is_known:
            return Match()
        match = next(self._search(inputs, see, 0.0, run or self.candidate), Match())
        if match.formula is None and run is None:
            with contextlib.suppress(Exception), np.errstate(all="ignore"):  # shapes of another kind of attention
                q, _, v = self.project(inputs)
                n = min(inputs[-1].shape[-2], v.shape[-1] // self._count_heads(q, self.n_kv_head))
                fewer, see = tuple(x[..., :n, :] for x in inputs), see[:n, :n]
                bias = self.measure_bias(fewer, see)
                match = replace(next(self._search(fewer, see, bias, self.candidate), Match()), n=n)
                if match.claim and not is_equal(bias, self.measure_bias(fewer, see, key_factor=0.5)):
                    return Match()  # the scores are not q k^T and a bias, as with a kernel of |q - k|: no fault of one
                cause = judge_distances(bias, see, q.shape[-1] // self._count_heads(q, self.n_head))
                if cause and not match.claim:
                    match = replace(match, claim="positions", cause=cause)
        return match

    def follows(self, match: Match, inputs: Inputs, see: np.ndarray) -> bool:
        """Whether the correct formula gives the result too, as for one key, where the fault has no effect."""
        bias: Any = 0.0
        if match.n is not None:
            inputs = tuple(x[..., : match.n, :] for x in inputs)
        see = see[: inputs[0].shape[-2], : inputs[-1].shape[-2]]
        if match.n is not None:
            q, _, v = self.project(inputs)
            if v.shape[-1] // self._count_heads(q, self.n_kv_head) < see.shape[-1]:
                return True  # the bias cannot be measured, so these inputs show nothing
            bias = self.measure_bias(inputs, see)
            if judge_distances(bias, see, q.shape[-1] // self._count_heads(q, self.n_head)):
                return False
        return is_equal(self.compute(match.correct, inputs, see, bias), self.candidate(*inputs))

    def _count_heads(self, q: np.ndarray, n: int) -> int:
        """n, or 1 if the columns of the queries are those of one head."""
        return 1 if q.shape[-1] % self.n_head else n

    def _search(self, inputs: Inputs, see: np.ndarray, bias: Any, run: Callable[..., np.ndarray]) -> Iterator[Match]:
        """Formulas that give the result: correct ones, those with a known fault, those with other numbers in them."""
        y, stated = run(*inputs), self.candidate.find_number("rope_theta", "rope_base", "theta", "base")
        q = self.project(inputs)[0]
        n_head = self._count_heads(q, self.n_head)
        pairings = ("", "halves", "pairs") if q.shape[-1] // n_head % 2 == 0 else ("",)
        kinds = [Formula(n_head, pairing=pairing, base=stated or BASE) for pairing in pairings]
        full = np.ones_like(see) if (see & ~past(see)).any() else past(see)  # a weight can be too small to be seen
        cases = list(product(kinds, {mask.tobytes(): mask for mask in (see, past(see), full)}.values()))

        def error(formula: Formula, mask: np.ndarray) -> np.ndarray:
            with np.errstate(all="ignore"):
                return (self.compute(formula, inputs, mask, bias) - y) / (largest(y) or 1.0)

        def list_choices() -> Iterator[tuple[str, str, Formula, Formula, np.ndarray]]:
            """A claim, the cause of its failure, the formula with and without the fault, and a mask."""
            yield from (("", "", kind, kind, mask) for kind, mask in cases)
            for claim, faults in FAULTS.items():
                for (cause, change), (kind, mask) in product(
                    faults if claim != "scale" or not self.may_scale else (), cases
                ):
                    yield claim, cause, replace(kind, **change), kind, mask
            for kind, mask in cases:
                starts = dict(NUMBERS) | (dict.fromkeys(("base", "base_k"), BASES) if kind.pairing else {})
                for name, values in starts.items():
                    size = n_head if name in ("scale", "factor") else 1
                    found = fit(lambda z: error(replace(kind, **{name: z}), mask), [np.full(size, z) for z in values])  # noqa: B023
                    if found is not None and holds_elsewhere(replace(kind, **{name: found}), mask):
                        yield *self._judge(name, found, stated), replace(kind, **{name: found}), kind, mask

        def holds_elsewhere(formula: Formula, mask: np.ndarray) -> bool:
            """Whether numbers in a formula are the same for other inputs."""
            other = tuple(0.5 * x for x in inputs)
            return is_equal(self.compute(formula, other, mask, bias), run(*other))

        for claim, cause, formula, kind, mask in list_choices():
            with contextlib.suppress(Exception):  # shapes that a formula cannot have
                if np.abs(error(formula, mask)).max() < CLOSE:
                    yield Match(formula, claim, cause, kind if claim else formula)

    def _judge(self, name: str, found: np.ndarray, stated: float | None) -> tuple[str, str]:
        """The claim that other numbers in the formula break, or "" if they may be chosen; and the fault in words."""
        numbers = ", ".join(f"{z:.4g}" for z in found)
        if name == "scale":
            more = ": not by the same in all heads" if len(found) > 1 else ""
            claim = "softmax" if (found < 0).any() else "" if self.may_scale else "scale"
            return claim, f"the scores are multiplied by {numbers} instead of 1/sqrt(d_k){more}"
        if name == "factor":
            sums = ", ".join(f"{z:.9g}" for z in found)  # also those that are close to 1
            return ("" if self.may_scale else "softmax"), f"the weights of a query sum to {sums}, not to 1"
        if name == "residual":
            times = "" if found[0] == 1 else f"{numbers} times "
            cause = f"the input is added {times}to the result: a residual connection inside"
            return ("" if self.may_scale else "residual"), cause
        if name == "base_k":
            return "positions", f"keys are rotated with the base {numbers}, and queries with {stated or BASE:g}"
        if np.allclose(found, (stated or BASE) ** 0.5):
            return "positions", "the frequencies of the rotation are base^(-i/d) instead of base^(-2i/d)"
        return ("positions" if stated else ""), f"the base of the rotation is {numbers}, but it states {stated}"

    def measure_bias(self, inputs: tuple[np.ndarray, ...], see: np.ndarray, key_factor: float = 1.0) -> np.ndarray:
        """What is added to the scores, (..., T_q, T_k), if a head is as wide as there are keys.

        With queries of 0 there is nothing else in the scores, and the weights follow from the result and the values.
        Keys are multiplied with `key_factor`, which changes nothing unless what is added is made from them.
        """
        copies, blocks = self.open(inputs)
        factors = {"q": 0.0, "k": key_factor}
        arrays = {name: [array for block in blocks[name] for array in block] for name in factors}
        with restoring([*arrays["q"], *arrays["k"]]):
            for name, factor in factors.items():
                for array in arrays[name]:
                    array *= factor
            y = self.candidate(*copies)
        for weight, offset in self.parts.get("o", []):
            y = (y - offset) @ np.linalg.pinv(weight)
        _, _, v = Formula(self.n_head).split_all(*self.project(inputs))
        weights = (split_heads(y, self.n_head) if self.n_head > 1 else y) @ np.linalg.pinv(v)
        if not (weights[..., see] > 0).all():
            raise ValueError("weights are not positive")
        bias = np.log(np.where(see & (weights > 0), weights, 1.0))
        return bias - bias.max(axis=-1, keepdims=True)


def fit(error: Callable[[np.ndarray], np.ndarray], starts: Iterable[np.ndarray]) -> np.ndarray | None:
    """The numbers for which the error is zero up to rounding, by Newton's method from the best starts, or None."""

    def measure(numbers: np.ndarray) -> float:
        return float(np.nan_to_num(np.abs(error(numbers)).sum(), nan=np.inf))

    with contextlib.suppress(Exception):  # shapes that a formula cannot have, a singular matrix
        for numbers in sorted(starts, key=measure)[:2]:
            for _ in range(STEPS):
                e = error(numbers)
                if np.abs(e).max() < CLOSE:
                    return numbers if np.ptp(numbers) > CLOSE else numbers[:1]
                slopes = np.stack([(error(numbers + 1e-6 * z) - e).ravel() * 1e6 for z in np.diag(numbers)], axis=-1)
                if not np.isfinite(slopes).all():
                    break
                step = np.linalg.lstsq(slopes, e.ravel())[0]  # relative, so that no number changes its sign
                numbers = numbers * np.exp(-np.clip(step, -2, 2))
    return None


def judge_distances(bias: np.ndarray, see: np.ndarray, d_k: int) -> str:
    """What is wrong with what is added to the scores (..., T_q, T_k), if it falls with the distance as in ALiBi."""
    if see[-1].sum() < 3:
        return ""
    steps = np.diff(bias[..., -1, :][..., see[-1]]).reshape(-1, see[-1].sum() - 1)
    if np.ptp(steps, axis=-1).max() > CLOSE or (np.abs(steps) < CLOSE).all():
        return ""
    wrong = np.flatnonzero(steps[:, 0] < -CLOSE).tolist()
    if wrong:
        heads = "" if len(wrong) == len(steps) else f" in head {', '.join(map(str, wrong))}"
        return f"the slope of the distances (ALiBi) has the wrong sign{heads}: far keys get more weight"
    slopes, expected = steps[:, 0], alibi_slopes(len(steps))
    if len(slopes) < 2 or is_equal(slopes, expected):
        return ""
    if is_equal(slopes, expected * d_k**-0.5):
        return "the distances (ALiBi) are divided by sqrt(d_k) too: they are added before the division"
    if is_equal(np.sort(slopes), np.sort(expected)):
        return "the slopes of the distances (ALiBi) are those of other heads: wrong order"
    return ""


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
