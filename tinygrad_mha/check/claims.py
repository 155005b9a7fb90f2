"""The claims that `check.attention` tries: what every attention promises about its inputs, masks, batches and caches.

Each is a function `check_NAME(candidate, inputs, facts)` that returns what it found, or raises `NotApplicableError`.
`CLAIMS` lists them; determinism and causality come before them.

Axes: T tokens, T_q queries, T_k keys, C width, d_k, d_v widths of a key and a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinygrad_mha.check.cache_faults import measure_size
from tinygrad_mha.check.caching import kv_cache
from tinygrad_mha.check.candidates import Candidate, CandidateError
from tinygrad_mha.check.formulas import CLOSE, Reference, is_equal, past
from tinygrad_mha.check.gradient_check import gradcheck
from tinygrad_mha.check.verdict import Finding
from tinygrad_mha.nn import KVCache
from tinygrad_mha.tensors import plain

__all__ = ["CLAIMS", "Check", "Facts", "Inputs", "NotApplicableError"]
__all__ += ["check_causality", "check_determinism", "measure_influence"]

Inputs = tuple[np.ndarray, ...]
WEAK = 0.5  # an influence of later tokens that is smaller than this, relative to that of earlier ones, is a leak
HUGE = 1e7  # a factor of queries and keys: their products exceed any constant that is added to hide a score


@dataclass
class Facts:
    """What is known before the claims are tried.

    Attributes:
        seed: of changes of the inputs.
        stated: whether it must be causal; None if the candidate says it.
        see: (T_q, T_k): which rows of x, or keys with their values, have an influence on which row of the result.
        is_causal, leaks: whether it is judged as causal, and tokens then see later ones.
        encode: turns a boolean mask, True = may attend, into what the candidate takes; None if it takes none.
        hides_true: whether key_allow hides where it is True; None if it takes none.
    """

    seed: int
    stated: bool | None
    see: np.ndarray
    is_causal: bool = False
    leaks: bool = False
    encode: Callable[[np.ndarray], np.ndarray] | None = None
    hides_true: bool | None = None


Check = Callable[[Candidate, Inputs, Facts], Finding]


class NotApplicableError(Exception):
    """Raised by a claim that means nothing for this candidate; the message is the reason."""


def check_determinism(c: Candidate) -> Finding:
    """Two calls give the same, and leave their inputs as they are."""
    inputs = [c.convert(x) for x in c.inputs]
    c.call_raw(*inputs)
    if not all(np.array_equal(np.asarray(plain(x)), y) for x, y in zip(inputs, c.inputs, strict=True)):
        text = "its inputs have other values afterwards"
        return Finding("determinism", "failed", text, "it edits its input in place")
    if not is_equal(c(*c.inputs), c(*c.inputs), 0.0):
        text = "two calls with the same input in eval mode give different numbers; nothing else can be told"
        cause = "random numbers in eval mode (dropout that is left on), or a state that it keeps between calls"
        return Finding("determinism", "failed", text, cause)
    return Finding("determinism", "passed", "two calls with the same input give the same numbers")


# --------------------------------------------------------------------------------------------------------------------
# Influence


def measure_influence(
    c: Candidate, inputs: Inputs, seed: int, size: float = 1.0, changed: slice = slice(-2, None), **options: Any
) -> np.ndarray:
    """(T_q, T_k): how much each row of the result changes with each row of x, or of k and v (relative).

    Args:
        size: of the changes.
        changed: which of the inputs change; slice(1, 2) is k alone.
    """
    rng = np.random.default_rng(seed)
    y = c(*inputs, **options)
    columns = []
    for j in range(inputs[-1].shape[-2]):
        moved = [x.copy() for x in inputs]
        for x in moved[changed]:
            x[..., j, :] += size * rng.standard_normal(x[..., j, :].shape)
        with np.errstate(invalid="ignore"):
            change = np.abs(c(*moved, **options) - y)
        change = np.where(np.isnan(change), np.inf, change)
        columns.append(change.max(axis=(*range(y.ndim - 2), -1)))
    return np.stack(columns, axis=-1) / measure_size(y)


def check_causality(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    influence = measure_influence(c, inputs, facts.seed)
    see = influence > CLOSE
    n, m = see.shape
    before, later = past(see, -1), see & ~past(see)
    causal = c.states_causal() if facts.stated is None else facts.stated
    if m > 1 and not (see & ~(past(see) & ~past(see, -1))).any():
        cause = "nothing is attended to: the result of a token depends on no other token"
        return Finding("causality", "failed", "no row depends on another one", cause)
    if not later.any():
        if m > 1 and not np.diagonal(see, m - n).any():
            cause = "the mask hides a token from itself (off by one)"
            return Finding("causality", "failed", "no row depends on its own key and value", cause)
        return Finding("causality", "passed", f"no row depends on a later one ({n} x {m} pairs, each changed)")
    strength = influence[later].mean() / influence[before].mean() if n > 1 and influence[before].any() else np.inf
    is_unordered = n == m and is_symmetric(c, inputs)
    is_two_way = n != m or is_unordered or ((see == see.T).all() and strength > WEAK)
    if is_two_way and not causal and (c.takes_rows or not hides_later(c, inputs, facts)):
        text = "rows depend on later ones as on earlier ones: judged as not causal, which causal=True would forbid"
        return Finding("causality", "does not apply", text)
    if is_unordered:
        cause = "there is no causal mask: tokens see all others"
    elif n == m and not c.takes_rows and not (later[1:].any() or np.diagonal(see)[1:].any()):
        cause = "the mask hides a token from itself (off by one); the first token, which then has no key, sees all"
    elif n > 1 and not (before & see).any():
        cause = "the polarity of the causal mask is inverted: tokens see later ones and not earlier ones"
    elif n > 2 and not (see & ~past(see, 1)).any():
        cause = "the mask lets a token see the next one (off by one)"
    elif see.all():
        cause = "later tokens leak through something that is computed over all tokens, such as a mean or normalisation"
    else:
        cause = "some later tokens leak into earlier ones"
    i, j = (int(index) for index in np.argwhere(later)[0])
    text = f"row {i} depends on row {j}, which comes later: it changes by {influence[i, j]:.1e} of the largest element"
    return Finding("causality", "failed", text, cause, details={"pairs": np.argwhere(later), "strength": strength})


def hides_later(c: Candidate, inputs: Inputs, facts: Facts) -> bool:
    """Whether later keys alone, or later values alone, have no influence: then there is a causal mask."""
    return any(
        not (see & ~past(see)).any()
        for changed in (slice(1, 2), slice(2, 3))
        for see in [measure_influence(c, inputs, facts.seed, changed=changed) > CLOSE]
    )


def is_symmetric(c: Candidate, inputs: Inputs) -> bool:
    """Whether the order of tokens means nothing: another order of the rows gives the result in that order."""
    order = np.random.default_rng(0).permutation(inputs[0].shape[-2])
    return is_equal(c(*(x[..., order, :] for x in inputs)), c(*inputs)[..., order, :])


# --------------------------------------------------------------------------------------------------------------------
# Claims


def check_gradients(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    """Gradients in float64 of every input and parameter."""
    if c.library == "numpy" and not c.accepts_tensors():
        raise NotApplicableError("a function of NumPy arrays has no gradients")
    inputs = tuple(x[..., -3:, :] if c.takes_rows else x for x in inputs)
    if c.library == "torch":
        return check_torch_gradients(c, inputs)
    report = gradcheck(c.module or c.target, *inputs, raises=False, seed=facts.seed)
    if report.problem:
        raise NotApplicableError(report.problem)
    wrong = [entry for entry in report.entries if entry.status in ("wrong", "cut")]
    unused = [entry.name for entry in report.entries if entry.status == "ignored"]
    if wrong:
        text = f"the gradient of {wrong[0].name} is wrong: {wrong[0].worst}"
        cause = wrong[0].note or "a derivative rule is wrong, or the graph is cut in part (detach, .numpy(), no_grad)"
        return Finding("gradients", "failed", text, cause)
    return judge_uses(unused, len(report.entries))


def check_torch_gradients(c: Candidate, inputs: Inputs) -> Finding:
    """The gradients of torch, by its own gradcheck, which moves the parameters in place."""
    leaves = [c.convert(x, requires_grad=True) for x in inputs]
    named = dict(c.module.named_parameters()) if c.module is not None else {}
    variables = [*leaves, *named.values()]
    try:
        c.torch.autograd.gradcheck(lambda *_: c.call_raw(*leaves), variables, fast_mode=True)
    except (RuntimeError, CandidateError) as error:
        text = " ".join(str(error).partition("The above")[0].split())
        return Finding("gradients", "failed", text, "a derivative is wrong, or the graph is cut (detach, no_grad)")
    gradients = c.torch.autograd.grad(c.call_raw(*leaves).sum(), variables, allow_unused=True)
    names = [*(f"input {i}" for i in range(len(leaves))), *named]
    unused = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
    return judge_uses(unused, len(variables))


def judge_uses(unused: list[str], n: int) -> Finding:
    """The finding where the gradients of all `n` inputs and parameters are right, and some of them may be unused."""
    if unused:
        text = f"the result does not depend on {', '.join(unused)}"
        return Finding("gradients", "failed", text, f"{unused[0]} is not used: it has no effect and no gradient")
    return Finding("gradients", "passed", f"{n} inputs and parameters agree with finite differences")


def check_dtype(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    y = c(*inputs, dtype=np.float32)
    if y.dtype != np.float32:
        cause = f"float32 is promoted to {y.dtype}, as by an array or np.float64 number inside (np.sqrt of an integer)"
        return Finding("dtype", "failed", f"float32 inputs give {y.dtype}", cause)
    y = c(*inputs)
    if y.dtype != np.float64:
        return Finding("dtype", "failed", f"float64 inputs give {y.dtype}", "a conversion to float32 inside")
    rng = np.random.default_rng(facts.seed)
    directions = [rng.standard_normal(x.shape) for x in inputs]
    slopes = []
    for h in (1e-4, 1e-8):
        plus, minus = (c(*(x + sign * h * v for x, v in zip(inputs, directions, strict=True))) for sign in (1, -1))
        slopes.append((plus - minus) / (2 * h))
    if not is_equal(slopes[1], slopes[0], 1e-3):
        text = "with float64 inputs, a change of 1e-8 is rounded away"
        return Finding("dtype", "failed", text, "numbers are rounded to float32 inside")
    return Finding("dtype", "passed", "float32 gives float32; float64 gives float64, with no rounding to less inside")


def check_batch(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    """A row of a batch equals the row alone."""
    rng = np.random.default_rng(facts.seed)
    rows = [inputs, *(tuple(rng.standard_normal(x.shape) for x in inputs) for _ in range(2))]
    try:
        y = c(*(np.stack(xs) for xs in zip(*rows, strict=True)))
        alone = [c(*row) for row in rows]
    except CandidateError as error:
        if inputs[0].ndim < 3 or len({len(x) for x in inputs}) > 1:
            raise NotApplicableError(f"it takes no batch: {error}") from None
        rows = [tuple(rng.standard_normal((3, *x.shape[1:])) for x in inputs)]
        y, alone = c(*rows[0]), [c(*(x[i : i + 1] for x in rows[0]))[0] for i in range(3)]
    for i, expected in enumerate(alone):
        if not is_equal(y[i], expected):
            text = f"row {i} of a batch of 3 differs from the row alone"
            return Finding("batch", "failed", text, "something is computed over the batch axis")
    return Finding("batch", "passed", "each row of a batch of 3 equals the row alone")


def check_chunking(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    """The last queries alone, of a function of q, k and v."""
    if c.takes_rows:
        raise NotApplicableError("it takes x, of which keys and queries are made: see cache")
    q, k, v = inputs
    n = q.shape[-2]
    whole = c(q, k, v)
    for t in range(n - 1, 0, -1):
        try:
            y = c(q[..., n - t :, :], k, v)
        except CandidateError as error:
            raise NotApplicableError(f"it takes as many queries as keys only: {error}") from None
        if not is_equal(y, whole[..., n - t :, :]):
            see = measure_influence(c, (q[..., n - t :, :], k, v), facts.seed) > CLOSE
            corner = facts.is_causal and not np.triu(see, 1).any()
            cause = "the causal mask is aligned at the top left corner: with a cache, new queries miss the latest keys"
            cause = cause if corner else "queries depend on each other, or on their place"
            text = f"the last {t} of {n} queries alone give other rows than all of them"
            return Finding("chunking", "failed", text, cause)
    return Finding("chunking", "passed", f"the last 1 to {n - 1} queries alone give the same rows as all {n}")


def check_cache(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    """The claims of `kv_cache`."""
    if "cache" not in c.options or not c.takes_rows or c.library != "tinygrad_mha":
        raise NotApplicableError("it declares no cache that a KVCache of this package can be given to")
    n, width = inputs[0].shape[-2:]
    if n < 2 or not facts.is_causal or facts.leaks:
        raise NotApplicableError("a cache serves causal attention of at least two tokens: see causality")
    x = inputs[0].reshape(-1, n, width)[0, -5:]
    with c.guard():
        verdict = kv_cache(c.module, x)
    if verdict.ok:
        return Finding("cache", "passed", "with a cache in any chunks, cropped or forked, the same numbers as without")
    first = verdict.failed[0]
    cause = explain_cache(c, x) or first.cause
    return Finding("cache", "failed", f"{first.name}: {first.message}", cause, details=first.example)


def explain_cache(c: Candidate, x: np.ndarray) -> str:
    """Two faults that show only where the projections are known."""
    n, cache, y = len(x), KVCache(), x
    for t in range(n):
        options = {"positions": np.arange(t, t + 1)} if "positions" in c.options else {}
        y = c(x[t : t + 1], cache=cache[0], **options)
    reference, see = Reference(c), np.tri(n, dtype=bool)
    formula, _, _ = reference.identify((x,), c(x), see)
    if formula is None:
        return ""
    if is_equal(reference.compute(replace(formula, hides_itself=True), (x,), see)[-1:], y):
        return "the newest token is missing from the keys: a query does not see its own"
    unmoved = reference.compute(replace(formula, rotary=""), (x,), see)[-1:]
    is_restarted = formula.rotary and is_equal(unmoved, y)
    return "positions are not offset by the tokens in the cache: each call starts again at 0" if is_restarted else ""


def check_mask(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    """What the mask hides has no influence, and what True means."""
    if "allow" not in c.options:
        raise NotApplicableError("it declares no allow, mask or attn_mask")
    n, m = inputs[0].shape[-2], inputs[-1].shape[-2]
    rng = np.random.default_rng(facts.seed)
    allow = rng.random((n, m)) < 0.5
    allow[:, 0] = True
    expected = allow & past(allow) if facts.is_causal else allow
    open_pairs = np.eye(n, m, dtype=bool) if c.takes_rows else np.zeros((n, m), dtype=bool)
    name, problem = c.options["allow"], ""
    for meaning, encode in ENCODINGS.items():
        try:
            see = measure_influence(c, inputs, facts.seed, allow=encode(allow)) > CLOSE
        except CandidateError as error:
            problem = problem or str(error)
            continue
        if (see | open_pairs == expected | open_pairs).all():
            facts.encode = encode
            if meaning == "True hides" and name == "allow":
                cause = "the polarity of the mask is inverted: allow is True where a query may attend, here True hides"
                return Finding("mask", "failed", "a key has an influence exactly where allow is False", cause)
            return Finding("mask", "passed", f"hidden keys have no influence; of {name}, {meaning}")
    if problem:
        raise NotApplicableError(f"{name} of shape {(n, m)} cannot be used: {problem}")
    return Finding("mask", "failed", f"a key that {name} hides has an influence", "the mask is ignored or incomplete")


ENCODINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "True = may attend": lambda allow: allow,
    "True hides": lambda allow: ~allow,
    "0 and -inf are added": lambda allow: np.where(allow, 0.0, -np.inf),
}


def check_exclusion(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    """Hidden keys have no influence, however large their scores are."""
    n, m = inputs[0].shape[-2], inputs[-1].shape[-2]
    options: dict[str, Any] = {}
    allow = past(np.ones((n, m), dtype=bool))
    if facts.encode is not None:
        options["allow"] = facts.encode(allow)
    elif not facts.is_causal or facts.leaks:
        raise NotApplicableError("nothing is hidden")
    big = tuple(x * HUGE if i < 2 else x for i, x in enumerate(inputs))
    if not np.isfinite(c(*big, **options)).all():
        raise NotApplicableError("scores of this size overflow: see overflow")
    influence = measure_influence(c, big, facts.seed, HUGE, **options)
    seen = (influence > CLOSE) & ~allow & ~np.eye(n, m, dtype=bool)
    if seen.any() and not ((measure_influence(c, inputs, facts.seed, **options) > CLOSE) & seen).any():
        i, j = np.argwhere(seen)[0]
        text = f"with queries and keys times {HUGE:.0e}, row {i} sees the hidden key {j}"
        cause = "a finite constant (such as -1e4) is added to hidden scores instead of an exclusion: large scores win"
        return Finding("exclusion", "failed", text, cause)
    return Finding("exclusion", "passed", f"hidden keys have no influence, also with scores of {HUGE**2:.0e}")


def check_empty(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    """A query that may attend to no key."""
    if facts.encode is not None:
        allow = np.ones((inputs[0].shape[-2], inputs[-1].shape[-2]), dtype=bool)
        allow[0] = False
        y = c(*inputs, allow=facts.encode(allow))
    elif facts.hides_true is not None:
        key_allow = np.full((len(inputs[0]) if inputs[0].ndim > 2 else 1, inputs[-1].shape[-2]), facts.hides_true)
        y = c(*(x[None] if x.ndim == 2 and c.has_batch else x for x in inputs), key_allow=key_allow)
    else:
        raise NotApplicableError("no mask can hide all keys of a query")
    if not np.isfinite(y).all():
        cause = "softmax of a fully masked row, -inf - -inf: a query with no key gets nan, which spreads in a batch"
        return Finding("empty", "failed", "a query that may attend to no key gets nan", cause)
    return Finding("empty", "passed", "a query that may attend to no key gets finite numbers")


def check_padding(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    """A row with padding equals the row alone."""
    if "key_allow" not in c.options:
        raise NotApplicableError("it declares no key_allow or key_padding_mask")
    if facts.leaks:
        raise NotApplicableError("tokens see later ones: see causality")
    name, n = c.options["key_allow"], inputs[-1].shape[-2]
    rng = np.random.default_rng(facts.seed)

    def run(fill: float, hides: bool) -> np.ndarray:
        rows = [
            np.concatenate([np.full_like(x[..., :1, :], fill) * rng.standard_normal(x.shape[-1]), x], -2)
            for x in inputs
        ]
        if not c.takes_rows:
            rows[0] = inputs[0]
        rows = [x[None] if x.ndim == 2 and c.has_batch else x for x in rows]
        options = {"positions": np.maximum(np.arange(n + 1) - 1, 0)[None]} if "positions" in c.options else {}
        key_allow = np.broadcast_to(np.arange(n + 1) > 0, (len(rows[0]) if rows[0].ndim > 2 else 1, n + 1))
        y = c(*rows, key_allow=key_allow ^ hides, **options)
        return (y[0] if inputs[0].ndim == 2 and y.ndim == 3 else y)[..., -inputs[0].shape[-2] :, :]

    alone = c(*inputs)
    found = [hides for hides in (False, True) if is_equal(run(3.0, hides), alone)]
    if not found:
        text = f"a padding token in front, hidden by {name}, changes the result"
        return Finding("padding", "failed", text, f"{name} does not hide padding from every query")
    if found[0] and "allow" in name:
        return Finding("padding", "failed", f"{name} hides where it is True", f"the polarity of {name} is inverted")
    facts.hides_true = found[0]
    text = f"{'True is padding' if found[0] else 'False is padding'}; hidden by {name} it has no influence"
    text += "" if is_equal(run(np.nan, found[0]), alone) else ", unless it holds nan (0 * nan is nan)"
    return Finding("padding", "passed", text)


def check_overflow(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    y = c(*(x * 300.0 if i < 2 else x for i, x in enumerate(inputs)))
    if not np.isfinite(y).all():
        cause = "exp overflows: the largest score of each row is not subtracted before it"
        return Finding("overflow", "failed", "with queries and keys times 300 the result is not finite", cause)
    return Finding("overflow", "passed", "with queries and keys times 300 the result is finite")


def check_permutation(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    if facts.is_causal:
        raise NotApplicableError("a causal mask depends on the order of tokens")
    order = np.random.default_rng(facts.seed).permutation(inputs[-1].shape[-2])
    if c.takes_rows:
        is_same = is_symmetric(c, inputs)
    else:
        is_same = is_equal(c(inputs[0], *(x[..., order, :] for x in inputs[1:])), c(*inputs))
    if not is_same:
        raise NotApplicableError("the order of keys matters: it has positions")
    return Finding("permutation", "passed", "another order of the keys, each with its value, changes nothing")


def check_shift(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    if "positions" not in c.options or not c.takes_rows:
        raise NotApplicableError("it takes no positions")
    places = np.arange(inputs[0].shape[-2])
    y = c(*inputs, positions=places)
    if not is_equal(y, c(*inputs)):
        return Finding(
            "shift",
            "failed",
            "without positions, its tokens do not stand at 0, 1, 2, ...",
            "wrong default of positions",
        )
    if not is_equal(c(*inputs, positions=places + 5), y):
        raise NotApplicableError("it depends on absolute positions")
    return Finding("shift", "passed", "all positions 5 later give the same result")


def check_window(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
    window = c.find_size("window", "window_size", "sliding_window")
    n, m = facts.see.shape
    distances = np.arange(m - n, m)[:, None] - np.arange(m)
    if window is None or not facts.is_causal or window >= m:
        raise NotApplicableError("it has no window shorter than the input")
    found = int(distances[facts.see].max()) + 1
    if found != window:
        text = f"the window is {window}, but a query sees the last {found} keys"
        return Finding(
            "window",
            "failed",
            text,
            "the window is off by one" if abs(found - window) == 1 else "the window is ignored",
        )
    return Finding("window", "passed", f"a query sees the last {window} keys, itself included")


# In this order, what fails first explains what fails later.
CLAIMS: list[Check] = [
    check_gradients, check_dtype, check_batch, check_shift, check_mask, check_exclusion, check_padding, check_empty,
    check_chunking, check_cache, check_overflow, check_permutation, check_window,
]  # fmt: skip
