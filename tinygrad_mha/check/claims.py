"""The claims that `check.attention` tries: what every attention promises about its inputs, masks, batches and caches.

Each is a function `check_NAME(candidate, inputs, facts)`. It returns what holds, or raises `BrokenError` with what was
seen and its cause, or `NotApplicableError`. `CLAIMS` lists them; determinism and causality come before them.

Axes: T tokens, T_q queries, T_k keys, C width, d_k, d_v widths of a key and a value.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinygrad_mha.check.caching import kv_cache
from tinygrad_mha.check.candidates import Candidate, CandidateError, Inputs
from tinygrad_mha.check.differences import CLOSE, STEP, Comparison, compare_rows, is_equal
from tinygrad_mha.check.formulas import past
from tinygrad_mha.check.gradient_check import check_variable, gradcheck, set_zero_status
from tinygrad_mha.check.matching import Match, Reference, restoring
from tinygrad_mha.check.report import Entry
from tinygrad_mha.tensors import Tensor, plain

__all__ = ["CLAIMS", "BrokenError", "Check", "Facts", "NotApplicableError"]
__all__ += ["check_causality", "check_determinism", "measure_influence"]

WEAK = 0.5  # an influence of later tokens that is smaller than this, relative to that of earlier ones, is a leak
ELEMENTS = 5  # of each input and parameter, compared one by one; a random direction moves all
FINITE = "a finite constant (such as -1e4) is added to hidden scores instead of an exclusion: large scores win"
WRONG_GRADIENT = "a derivative rule is wrong, or the graph is cut in part (detach, .numpy(), no_grad)"
HUGE = 1e7  # a factor of queries and keys: their products exceed any constant that is added to hide a score


@dataclass
class Facts:
    """What is known before the claims are tried.

    Attributes:
        seed: of changes of the inputs.
        stated: whether it must be causal; None if the candidate says it.
        see: (T_q, T_k): which rows of x, or keys with their values, have an influence on which row of the result.
        is_causal, leaks: whether it is judged as causal, and tokens then see later ones.
        match: the formula that it computes.
        encode: turns a boolean mask, True = may attend, into what the candidate takes; None if it takes none.
        hides_true: whether key_allow hides where it is True; None if it takes none.
    """

    seed: int
    stated: bool | None
    see: np.ndarray
    is_causal: bool = False
    leaks: bool = False
    match: Match = field(default_factory=Match)
    encode: Callable[[np.ndarray], np.ndarray] | None = None
    hides_true: bool | None = None


Check = Callable[[Candidate, Inputs, Facts], str]


class NotApplicableError(Exception):
    """Raised by a claim that means nothing for this candidate; the message is the reason."""


class BrokenError(Exception):
    """Raised by a claim that does not hold.

    Args:
        message: what was seen.
        cause: the fault in words.
        details: figures for programs.
    """

    def __init__(self, message: str, cause: str, **details: Any) -> None:
        super().__init__(message)
        self.cause, self.details = cause, details


def require(holds: bool | np.bool_, message: str, cause: str) -> None:
    """Raise `BrokenError` unless it holds."""
    if not holds:
        raise BrokenError(message, cause)


def apply_if(applies: bool | np.bool_, reason: str) -> None:
    """Raise `NotApplicableError` unless the claim applies."""
    if not applies:
        raise NotApplicableError(reason)


def check_determinism(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """Two calls give the same, and leave their inputs as they are."""
    given = [c.convert(x) for x in inputs]
    c.call_raw(*given)
    are_kept = all(np.array_equal(np.asarray(plain(x)), y) for x, y in zip(given, inputs, strict=True))
    require(are_kept, "its inputs have other values afterwards", "it edits its input in place")
    text = "two calls with the same input in eval mode give different numbers; nothing else can be told"
    cause = "random numbers in eval mode (dropout that is left on), or a state that it keeps between calls"
    require(is_equal(c(*inputs), c(*inputs), 0.0), text, cause)
    y = c(*inputs)
    c(*(0.5 - x for x in inputs))
    cause = "it keeps numbers of an earlier call: a cache of its own that ignores what it is called with"
    require(is_equal(c(*inputs), y, 0.0), "a call with other inputs in between changes the result", cause)
    return "two calls with the same input give the same numbers"


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
        columns.append(compare_rows(c(*moved, **options), y))
    return np.stack(columns, axis=-1)


def check_causality(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """No token depends on a later one."""
    influence = measure_influence(c, inputs, facts.seed)
    see = influence > CLOSE
    n, m = see.shape
    before, later = past(see, -1), see & ~past(see)
    causal = c.states_causal() if facts.stated is None else facts.stated
    cause = "nothing is attended to: the result of a token depends on no other token"
    cause = cause if c(*inputs).any() else "the result is 0 everywhere"
    require(m == 1 or (see & ~(past(see) & ~past(see, -1))).any(), "no row depends on another one", cause)
    if not later.any():
        cause = "the mask hides a token from itself (off by one)"
        require(m == 1 or np.diagonal(see, m - n).any(), "no row depends on its own key and value", cause)
        text = "" if see[past(see)].all() else ", nor on all earlier ones: a window or another pattern"
        return f"no row depends on a later one ({n} x {m} pairs, each changed){text}"
    strength = influence[later].mean() / influence[before].mean() if n > 1 and influence[before].any() else np.inf
    is_unordered = n == m and is_symmetric(c, inputs)
    is_two_way = n != m or is_unordered or ((see == see.T).all() and strength > WEAK)
    if is_two_way and not causal and (c.takes_rows or not hides_later(c, inputs, facts)):
        others = see[~np.eye(n, m, m - n, dtype=bool)]
        is_own_hidden = n == m > 2 and others.all() and not np.diagonal(see).any()
        text = "each row depends on all keys and values but its own"
        require(not is_own_hidden, text, "the mask hides a token from itself: the diagonal")
        text = "rows depend on later ones as on earlier ones: judged as not causal, which causal=True would forbid"
        raise NotApplicableError(text)
    apply_if(facts.stated is not False, "tokens depend on later ones, which causal=False allows")
    y = c(*inputs)
    if is_equal(np.broadcast_to(y[..., -1:, :], y.shape), y):
        cause = "all rows of the result are the same: that of one token stands in each"
    elif is_unordered:
        cause = "there is no causal mask: tokens see all others"
    elif n == m and not c.takes_rows and not (later[1:].any() or np.diagonal(see)[1:].any()):
        cause = "the mask hides a token from itself (off by one); the first token, which then has no key, sees all"
    elif n > 1 and not (before & see).any():
        cause = "the polarity of the causal mask is inverted: tokens see later ones and not earlier ones"
    elif n > 2 and not (see & ~past(see, 1)).any():
        cause = "the mask lets a token see the next one (off by one)"
    elif see.all():
        cause = "later tokens leak through something that is computed over all tokens, such as a mean or normalisation"
        cause += ", or hidden scores are lowered by a small constant"
    else:
        cause = "some later tokens leak into earlier ones"
    i, j = (int(index) for index in np.argwhere(later)[0])
    text = f"row {i} depends on row {j}, which comes later: it changes by {influence[i, j]:.1e} of the largest element"
    raise BrokenError(text, cause, pairs=np.argwhere(later), strength=strength)


def hides_later(c: Candidate, inputs: Inputs, facts: Facts) -> bool:
    """Whether later keys alone, or later values alone, have no influence: then there is a causal mask."""
    return any(
        see.any() and not (see & ~past(see)).any()
        for changed in (slice(1, 2), slice(2, 3))
        for see in [measure_influence(c, inputs, facts.seed, changed=changed) > CLOSE]
    )


def is_symmetric(c: Candidate, inputs: Inputs) -> bool:
    """Whether the order of tokens means nothing: another order of the rows gives the result in that order."""
    order = np.random.default_rng(0).permutation(inputs[0].shape[-2])
    return is_equal(c(*(x[..., order, :] for x in inputs)), c(*inputs)[..., order, :])


# --------------------------------------------------------------------------------------------------------------------
# Claims


def check_gradients(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """Gradients in float64 of every input and parameter."""
    for i in range(len(inputs) if inputs[-1].shape[-2] > 1 else 0):
        y = c(*(0.5 - x if i == j else x for j, x in enumerate(inputs)))
        name = "qkv"[i] if len(inputs) > 1 else "x"
        text = f"the result does not depend on {name}"
        require(not is_equal(y, c(*inputs)), text, f"{name} is not used: it has no effect and no gradient")
    apply_if(c.library != "numpy" or c.accepts_tensors(), "a function of NumPy arrays has no gradients")
    inputs = tuple(x[..., -3:, :] if c.takes_rows else x for x in inputs)
    entries: Iterable[Entry] = (
        check_torch_gradients(c, inputs, facts.seed) if c.library == "torch" else check_our_gradients(c, inputs, facts)
    )
    checked = sorted(entries, key=lambda entry: entry.status != "cut")  # what is cut explains what is wrong
    for entry in checked:
        cause = f"{entry.name}: {entry.note}" if entry.note else WRONG_GRADIENT
        require(entry.status not in ("wrong", "cut"), f"the gradient of {entry.name} is wrong: {entry.worst}", cause)
    unused = [entry.name for entry in checked if entry.status == "ignored"]
    if unused:
        cause = f"{unused[0]} is not used: it has no effect and no gradient"
        raise BrokenError(f"the result does not depend on {', '.join(unused)}", cause)
    return f"{len(checked)} inputs and parameters agree with finite differences"


def check_our_gradients(c: Candidate, inputs: Inputs, facts: Facts) -> list[Entry]:
    """The findings of `gradcheck`."""
    f = functools.partial(c.call_raw)
    vars(f)["named_parameters"] = dict if c.module is None else c.module.named_parameters
    named = [Tensor(x, name=name) for x, name in zip(inputs, c.names, strict=True)]
    report = gradcheck(f, *named, raises=False, seed=facts.seed, elements=ELEMENTS)
    apply_if(not report.problem, report.problem)
    return report.entries


def check_torch_gradients(c: Candidate, inputs: Inputs, seed: int) -> Iterator[Entry]:
    """The same of a candidate of torch."""
    rng = np.random.default_rng(seed)
    leaves = [c.convert(x, requires_grad=True) for x in inputs]
    named = dict(zip(c.names, leaves, strict=True))
    named |= {} if c.module is None else dict(c.module.named_parameters())
    y = c.call_raw(*leaves)
    cotangent = c.convert(rng.standard_normal(tuple(y.shape)))
    wanted = list(named.values())
    found = c.torch.autograd.grad(y, wanted, cotangent, allow_unused=True) if y.requires_grad else [None] * len(wanted)

    def loss() -> list[np.ndarray]:
        return [(c.call_raw(*leaves) * cotangent).detach().numpy()]

    for (name, leaf), gradient in zip(named.items(), found, strict=True):
        x, g = c.share(leaf), np.zeros(tuple(leaf.shape)) if gradient is None else gradient.numpy()
        entry, condition = Entry(name, x.shape, 1), float(np.abs(loss()[0]).sum() + np.abs(x * g).sum())
        comparison = Comparison(entry, x, g, loss, condition, STEP, 1e-5, 1e-7)
        check_variable(comparison, rng, ELEMENTS)
        if comparison.is_zero():
            set_zero_status(entry, gradient is not None, expected=gradient is not None)
        yield entry


def check_dtype(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """float32 and float64 in and out, and no rounding to less inside."""
    for dtype in (np.float32, np.float64):
        found, name = c(*inputs, dtype=dtype).dtype, np.dtype(dtype).name
        promoted = f"float32 is promoted to {found} by an array or np.float64 number inside (np.sqrt of an "
        promoted += "integer): write d**0.5 or float(np.sqrt(d)), and make arrays with dtype=q.dtype"
        cause = promoted if dtype == np.float32 else f"a conversion to {found} inside"
        require(found == dtype, f"{name} inputs give {found}", cause)
    rng = np.random.default_rng(facts.seed)
    directions = [rng.standard_normal(x.shape) for x in inputs]

    def slope(h: float, dtype: Any) -> np.ndarray:
        moved = [[x + sign * h * v for x, v in zip(inputs, directions, strict=True)] for sign in (1, -1)]
        return (c(*moved[0], dtype=dtype).astype(float) - c(*moved[1], dtype=dtype)) / (2 * h)

    for dtype, h, tolerance, less in ((np.float32, 3e-4, 0.05, "float16"), (np.float64, 1e-8, 1e-3, "float32")):
        text = f"with {np.dtype(dtype).name} inputs, a change of {h:.0e} is rounded away"
        agrees = is_equal(slope(h, dtype), slope(1e-4, np.float64), tolerance)
        require(agrees, text, f"numbers are rounded to {less} inside")
    return "float32 gives float32; float64 gives float64, with no rounding to less inside"


def check_batch(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """A row of a batch equals the row alone."""
    rng = np.random.default_rng(facts.seed)
    rows = [inputs, *(tuple(rng.standard_normal(x.shape) for x in inputs) for _ in range(2))]
    try:
        y = c(*(np.stack(xs) for xs in zip(*rows, strict=True)))
        alone = [c(*row) for row in rows]
    except CandidateError as error:
        reason = f"it takes one sequence (T, d) only: with a batch (B, T, d), {error}"
        reason += "; .T swaps all axes (use swapaxes(-1, -2)), and a sum needs axis=-1, keepdims=True"
        apply_if(inputs[0].ndim > 2 and len({len(x) for x in inputs}) == 1, reason)
        batch = tuple(rng.standard_normal((3, *x.shape[1:])) for x in inputs)
        y, alone = c(*batch), [c(*(x[i : i + 1] for x in batch))[0] for i in range(3)]
    for i, expected in enumerate(alone):
        text = f"row {i} of a batch of 3 differs from the row alone"
        cause = "something is computed over the batch axis, or the batch is not the first axis"
        require(is_equal(y[i], expected), text, cause)
    return "each row of a batch of 3 equals the row alone"


def check_heads(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """What a head adds to the result depends on its own queries, keys and values.

    The heads of a module are separated by its output projection: the rows of all other heads are set to 0.
    """
    reference = Reference(c)
    apply_if(reference.is_known, "its projections have no usual names")
    moved, blocks = reference.open(inputs)
    n, n_kv = len(blocks["q"]), len(blocks["k"])
    apply_if(n > 1 and n % n_kv == 0, "it has one head" if n == 1 else "heads are no multiple of those of keys")
    rows = [weight for weight, _ in reference.parts.get("o", [])]
    apply_if(all(len(weight) % n == 0 for weight in rows), "its output projection has no rows for each head")
    kept = [*rows, *(array for name in blocks.values() for block in name for array in block)]

    def run(h: int, names: str, own: bool = True) -> np.ndarray:
        """What head h adds, with its own `names` of q, k, v changed, or those of all other heads."""
        rng = np.random.default_rng(facts.seed)
        with restoring(kept):
            for weight in rows:
                weight[...] *= np.repeat(np.arange(n) == h, len(weight) // n)[:, None]
            for heads in (blocks[name] for name in names):
                for head in (head for g, head in enumerate(heads) if (g == h * len(heads) // n) == own):
                    for array in head:
                        array += rng.standard_normal(array.shape)
            y = c(*moved)
        return y if rows else y[..., h, :, :]

    cause = "the result of another head stands in its place: copied, split or joined in the wrong order of axes"
    cause = cause if n == n_kv else f"{cause}, or matched with the keys of another group (repeat each, do not tile)"
    for h in range(n):
        y = run(h, "")
        uses_others = not is_equal(run(h, "qkv", own=False), y)
        for name in "qkv" if moved[-1].shape[-2] > 1 else "v":  # a single key has the weight 1, whatever its score
            words = {"q": "queries", "k": "keys", "v": "values"}[name]
            text = f"what head {h} adds to the result does not depend on its own {words}"
            require(
                not is_equal(run(h, name), y), text, cause if uses_others else "this head adds nothing to the result"
            )
        apply_if(not uses_others, "each head depends on the others too, by a norm or sum over heads")
    return f"each of {n} heads depends on its own queries, keys and values alone"


def check_norms(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """Queries and keys are both normalised, or neither."""
    reference = Reference(c)
    is_other = reference.is_known and facts.match.formula is None
    apply_if(is_other, "its projections have no usual names" if facts.match.formula is None else "its formula has none")
    moved, blocks = reference.open(inputs)
    y = c(*moved)

    def run(name: str, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        arrays = [array for block in blocks[name] for array in block]
        with restoring(arrays):
            for array in arrays:
                array[...] = change(array)
            return c(*moved)

    same = run("v", np.ones_like) if c.module is None else run("v", lambda array: np.full_like(array, array.ndim == 1))
    apply_if(is_equal(same, np.broadcast_to(same[..., :1, :], same.shape)) and same.any(), "weights do not sum to 1")
    unused = [name for name in "qk" if is_equal(run(name, lambda array: 0.5 - array[..., ::-1]), y, 1e-3)]
    apply_if(not unused, f"the result does not depend on {' and '.join(unused)}")
    normalised = [name for name in "qk" if is_equal(run(name, lambda array: 10 * array), y, 1e-3)]
    if len(normalised) == 1:  # a softmax of large scores takes one key; a quotient, as in linear attention, does not
        arrays = [array for block in blocks["k" if "q" in normalised else "q"] for array in block]
        with restoring(arrays):
            for array in arrays:
                array *= 1e6
            n_keys = (measure_influence(c, moved, facts.seed, 1e-6) > CLOSE).sum(axis=-1).max()
        reason = f"its weights are a quotient that cancels a factor of {normalised[0]}"
        apply_if(n_keys <= len(blocks["q"]), reason)
        cause = f"only {'queries' if 'q' in normalised else 'keys'} are normalised, not both"
        raise BrokenError(f"{normalised[0]} times 10 changes nothing", cause)
    both = "queries or keys times 10 change nothing: they are normalised, or a quotient cancels the factor"
    return both if normalised else "neither queries nor keys are normalised"


def check_chunking(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """The last queries alone, of a function of q, k and v."""
    apply_if(not c.takes_rows, "it takes x, of which keys and queries are made: see cache")
    q, k, v = inputs
    n = q.shape[-2]
    whole = c(q, k, v)
    for t in range(n - 1, 0, -1):
        last = q[..., n - t :, :]
        try:
            y = c(last, k, v)
        except CandidateError as error:
            raise NotApplicableError(f"it takes as many queries as keys only: {error}") from None
        if y.shape[-2] != t:
            cause = "the number of rows is taken from k or v: it is that of q"
            raise BrokenError(f"the last {t} of {n} queries give {y.shape[-2]} rows", cause)
        if not is_equal(y, whole[..., n - t :, :]):
            see = measure_influence(c, (last, k, v), facts.seed) > CLOSE
            corner = facts.is_causal and not np.triu(see, 1).any()
            cause = "the causal mask is aligned at the top left corner: with a cache, new queries miss the latest keys"
            cause = (
                cause
                if corner
                else "queries depend on each other (a sum over the axis of the queries?), or on their place"
            )
            raise BrokenError(f"the last {t} of {n} queries alone give other rows than all of them", cause)
    return f"the last 1 to {n - 1} queries alone give the same rows as all {n}"


def check_cache(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """The claims of `kv_cache`."""
    takes_ours = "cache" in c.options and c.takes_rows and c.library == "tinygrad_mha"
    apply_if(takes_ours, "it declares no cache that a KVCache of this package can be given to")
    n, width = inputs[0].shape[-2:]
    is_causal = n > 1 and facts.is_causal and not facts.leaks
    apply_if(is_causal, "a cache serves causal attention of at least two tokens: see causality")
    x = inputs[0].reshape(-1, n, width)[0, -5:]
    with c.guard(calls=10):
        verdict = kv_cache(c.module, x)
    if verdict.problem:
        raise CandidateError(verdict.problem)
    for first in verdict.failed:
        raise BrokenError(f"{first.name}: {first.message}", first.cause, **first.example)
    return "with a cache in any chunks, cropped or forked, the same numbers as without"


def check_mask(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """What the mask hides has no influence, and what True means."""
    apply_if("allow" in c.options, "it declares no allow, mask or attn_mask")
    n, m = inputs[0].shape[-2], inputs[-1].shape[-2]
    allow = np.random.default_rng(facts.seed).random((n, m)) < 0.5
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
            cause = "the polarity of the mask is inverted: allow is True where a query may attend, here True hides"
            is_inverted = meaning == "True hides" and name == "allow"
            require(not is_inverted, "a key has an influence exactly where allow is False", cause)
            return f"hidden keys have no influence; of {name}, {meaning}"
    apply_if(not problem, f"{name} of shape {(n, m)} cannot be used: {problem}")
    match = Reference(c).identify(inputs, expected, functools.partial(c, allow=allow))
    cause = match.cause or "the mask is ignored or incomplete"
    raise BrokenError(f"a key that {name} hides has an influence", cause)


ENCODINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "True = may attend": lambda allow: allow,
    "True hides": lambda allow: ~allow,
    "0 and -inf are added": lambda allow: np.where(allow, 0.0, -np.inf),
}


def check_exclusion(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """Hidden keys have no influence, however large their scores are."""
    allow = past(np.ones((inputs[0].shape[-2], inputs[-1].shape[-2]), dtype=bool))
    options: dict[str, Any] = {} if facts.encode is None else {"allow": facts.encode(allow)}
    apply_if(bool(options) or (facts.is_causal and not facts.leaks), "nothing is hidden")
    big = tuple(x * HUGE if i < 2 else x for i, x in enumerate(inputs))
    apply_if(np.isfinite(c(*big, **options)).all(), "scores of this size overflow: see overflow")
    hidden = ~(allow | np.eye(len(allow), allow.shape[1], dtype=bool))
    seen = (measure_influence(c, big, facts.seed, HUGE, **options) > CLOSE) & hidden
    if seen.any() and not ((measure_influence(c, inputs, facts.seed, **options) > CLOSE) & seen).any():
        i, j = np.argwhere(seen)[0]
        raise BrokenError(f"with queries and keys times {HUGE:.0e}, row {i} sees the hidden key {j}", FINITE)
    return f"hidden keys have no influence, also with scores of {HUGE**2:.0e}"


def check_empty(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """A query that may attend to no key."""
    can_hide = facts.encode is not None or facts.hides_true is not None
    apply_if(can_hide, "no mask can hide all keys of a query")
    if facts.encode is not None:
        allow = np.ones((inputs[0].shape[-2], inputs[-1].shape[-2]), dtype=bool)
        allow[0] = False
        y = c(*inputs, allow=facts.encode(allow))
    else:
        y = c.hide(inputs, np.full(inputs[-1].shape[-2], facts.hides_true))
    cause = "softmax of a fully masked row, -inf - -inf: a query with no key gets nan, which spreads in a batch"
    require(np.isfinite(y).all(), "a query that may attend to no key gets nan", cause)
    return "a query that may attend to no key gets finite numbers"


def check_padding(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """A row with padding equals the row alone."""
    apply_if("key_allow" in c.options, "it declares no key_allow or key_padding_mask")
    apply_if(not facts.leaks, "tokens see later ones: see causality")
    name, n = c.options["key_allow"], inputs[-1].shape[-2]
    rng = np.random.default_rng(facts.seed)

    def pad(fill: float, size: float = 1.0) -> list[np.ndarray]:
        noise = [fill * rng.standard_normal((*x.shape[:-2], 1, x.shape[-1])) for x in inputs]
        rows = [np.concatenate([extra, x], axis=-2) for extra, x in zip(noise, inputs, strict=True)]
        rows = rows if c.takes_rows else [inputs[0], *rows[1:]]
        return [x * size if i < 2 else x for i, x in enumerate(rows)]

    def call(*rows: np.ndarray, hides: bool = False) -> np.ndarray:
        options = {"positions": np.maximum(np.arange(n + 1) - 1, 0)[None]} if "positions" in c.options else {}
        return c.hide(rows, (np.arange(n + 1) > 0) ^ hides, **options)

    def run(fill: float, hides: bool, size: float = 1.0) -> np.ndarray:
        return call(*pad(fill, size), hides=hides)[..., -inputs[0].shape[-2] :, :]

    alone = c(*inputs)
    found = [hides for hides in (False, True) if is_equal(run(3.0, hides), alone)]
    cause = f"{name} does not hide padding from every query"
    if not found and is_equal(run(3.0, False), run(1.0, False)):
        cause = (
            f"the padding is hidden, but counts as a position and moves the other tokens, or {name} also hides queries"
        )
    if not found:
        rows = tuple(pad(3.0))
        see = np.ones((rows[0].shape[-2], n + 1), dtype=bool)
        see = (past(see) if facts.is_causal else see) & (np.arange(n + 1) > 0)
        cause = Reference(c).identify(rows, see, call).cause or cause
    require(bool(found), f"a padding token in front, hidden by {name}, changes the result", cause)
    is_inverted = found[0] and "allow" in name
    require(not is_inverted, f"{name} hides where it is True", f"the polarity of {name} is inverted")
    facts.hides_true = found[0]
    big = [run(fill, found[0], HUGE) for fill in (1.0, 3.0)]
    text = f"with queries and keys times {HUGE:.0e}, a padding token that {name} hides changes the result"
    require(not np.isfinite(big).all() or is_equal(big[0], big[1]), text, FINITE)
    text = f"{'True is padding' if found[0] else 'False is padding'}; hidden by {name} it has no influence"
    return text + ("" if is_equal(run(np.nan, found[0]), alone) else ", unless it holds nan (0 * nan is nan)")


def check_overflow(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """Large scores give finite numbers."""
    c.float_errors.clear()
    large = tuple(x * 300.0 if i < 2 else x for i, x in enumerate(inputs))
    y = c(*large)
    cause = "exp overflows, or all weights of a row underflow to 0: the largest score of each row is not subtracted"
    if "overflow" in c.float_errors and facts.match.formula is not None:  # not that of a sigmoid, which is harmless
        cause = "exp overflows: the largest score of each row is not subtracted before it"
    elif c.float_errors and "overflow" not in c.float_errors:
        cause = (
            "all weights of a row underflow to 0, and 0 / 0 is nan: subtract the largest score of each row before exp"
        )
    if facts.match.claim == "softmax":
        cause = "exp overflows, or a sum of weights is 0: see softmax"
    elif not np.isfinite(y).all() and not c.takes_rows:
        q, k, v = large
        with contextlib.suppress(CandidateError):  # it takes as many queries as keys only
            rows = ((i, i + 1 if facts.is_causal else k.shape[-2]) for i in range(q.shape[-2]))
            if all(np.isfinite(c(q[..., [i], :], k[..., :n, :], v[..., :n, :])).all() for i, n in rows):
                cause = "a row is not finite beside other rows, and finite alone: the largest score, or the sum, is "
                cause += "that of other rows too (the axis is -1, with keepdims=True)"
    require(np.isfinite(y).all(), "with queries and keys times 300 the result is not finite", cause)
    return "with queries and keys times 300 the result is finite"


def check_permutation(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """Whether the order of keys means something."""
    apply_if(not facts.is_causal, "a causal mask depends on the order of tokens")
    q, *keys = inputs
    order = np.random.default_rng(facts.seed).permutation(inputs[-1].shape[-2])
    is_same = is_symmetric(c, inputs) if c.takes_rows else is_equal(c(q, *(x[..., order, :] for x in keys)), c(*inputs))
    apply_if(is_same, "the order of keys matters: it has positions")
    return "another order of the keys, each with its value, changes nothing"


def check_shift(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """Positions that are all later."""
    apply_if("positions" in c.options and c.takes_rows, "it takes no positions")
    places = np.arange(inputs[0].shape[-2])
    y = c(*inputs, positions=places)
    text = "without positions, its tokens do not stand at 0, 1, 2, ..."
    require(is_equal(y, c(*inputs)), text, "wrong default of positions")
    apply_if(is_equal(c(*inputs, positions=places + 5), y), "it depends on absolute positions")
    return "all positions 5 later give the same result"


def check_window(c: Candidate, inputs: Inputs, facts: Facts) -> str:
    """As many keys as the window that it has."""
    window = c.find_number("window", "window_size", "sliding_window")
    see = measure_influence(c, inputs, facts.seed) > CLOSE
    n, m = see.shape
    found = int((np.arange(m - n, m)[:, None] - np.arange(m))[see].max(initial=-1)) + 1
    text = f"it sees the last {found} keys, and no option window, window_size or sliding_window says how many it should"
    apply_if(window is not None or not facts.is_causal or found in (0, 1, m), text)
    if window is None or not facts.is_causal or window >= m:
        raise NotApplicableError("it has no window shorter than the input")
    cause = "the window is off by one" if abs(found - window) == 1 else "the window is ignored"
    require(found == window, f"the window is {window}, but a query sees the last {found} keys", cause)
    return f"a query sees the last {window} keys, itself included"


# In this order, what fails first explains what fails later.
CLAIMS: list[Check] = [
    check_dtype, check_gradients, check_batch, check_heads, check_norms, check_shift, check_mask, check_exclusion,
    check_padding, check_empty, check_chunking, check_cache, check_overflow, check_permutation, check_window,
]  # fmt: skip
