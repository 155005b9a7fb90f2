"""`attention`: everything that an attention promises, tried on a candidate, and what is wrong in its formula.

A claim that failed is tried again on smaller inputs, and the smallest ones that fail are reported.

Axes: T tokens, T_q queries, T_k keys, C width, d_k, d_v widths of a key and a value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tinygrad_mha.check.candidates import Candidate, CandidateError, Inputs
from tinygrad_mha.check.claims import (
    CLAIMS,
    BrokenError,
    Check,
    Facts,
    NotApplicableError,
    check_causality,
    check_determinism,
    measure_influence,
)
from tinygrad_mha.check.differences import CLOSE, is_equal
from tinygrad_mha.check.formulas import FAULTS
from tinygrad_mha.check.matching import Reference
from tinygrad_mha.check.verdict import Finding, Verdict, name_subject
from tinygrad_mha.files.python_files import TimeLimitError

__all__ = ["attention"]


def attention(candidate: Any, *inputs: Any, causal: bool | None = None, seed: int = 0) -> Verdict:
    """Try an attention of your own on everything that an attention promises.

    The candidate is a function or module `f(x)` of rows x (T, C) or (B, T, C), or `f(q, k, v)`; of plain NumPy, of this
    package, or of torch. A class, or a function of (config, rng), is called with small sizes. It is computed in float64
    and eval mode, on a copy. Of the options allow (mask, attn_mask), key_allow (key_padding_mask), causal (is_causal),
    cache and positions, those that it declares are tried too.

    Args:
        candidate: the function, module or class.
        inputs: arrays of a size that it takes; small random ones if left out.
        causal: whether no token may depend on later ones. None: if tokens do not, or if it depends on later ones in
            part or weakly, which is a leak, it is judged as causal. The report says which.
        seed: of the inputs and weights that the check makes.

    Returns:
        The verdict. It raises nothing: `.raise_if_failed()` does, for tests. A candidate that cannot be run, raises,
        takes more than 20 seconds for a call, or returns something else than rows has a `problem`, and is not ok.

    Example:
        >>> def unscaled(q, k, v):
        ...     scores = np.exp(q @ k.swapaxes(-1, -2))
        ...     return scores / scores.sum(-1, keepdims=True) @ v
        >>> for finding in attention(unscaled).failed:
        ...     print(finding.name, "-", finding.cause)
        scale - the scores are not divided by sqrt(d_k): the scale is missing
        overflow - exp overflows: the largest score of each row is not subtracted before it
    """
    name = name_subject(candidate)
    try:
        c = Candidate(candidate, inputs, seed, causal)
        facts = Facts(seed, causal, np.ones((1, 1), dtype=bool))
        return Verdict(name, list(judge(c, facts)), caveat=describe_unknown(c, facts))
    except (CandidateError, TimeLimitError) as error:
        return Verdict(name, problem=str(error))


def judge(c: Candidate, facts: Facts) -> Iterator[Finding]:
    """Try all claims, and enter what is found about all in `facts`."""
    finding = try_claim(check_determinism, c, facts)
    yield finding
    if finding.status == "failed":
        return
    y = c(*c.inputs)
    if not np.isfinite(y).all():
        rows = ", ".join(map(str, np.unique(np.argwhere(~np.isfinite(y))[:, -2]).tolist()))
        raise CandidateError(
            f"it returned nan or infinity for small inputs, in row {rows} of 0 to {y.shape[-2] - 1}: does the mask "
            "hide every key of such a query, its own too, or is -inf multiplied by 0?"
        )
    facts.see = measure_influence(c, c.inputs, facts.seed) > CLOSE
    causality = try_claim(check_causality, c, facts)
    facts.is_causal = facts.stated = causality.status != "does not apply"
    facts.leaks = causality.status == "failed"
    if facts.see.sum(axis=-1).max() > 1:  # a single key has the weight 1 in every formula
        facts.match = Reference(c).identify(c.inputs, facts.see)
    by_formula = list(compare_formula(c, facts))
    known = [finding for finding in by_formula if finding.status == "failed"]
    yield from known  # a fault that is known to the digit explains what else failed
    yield causality
    for check in CLAIMS:
        finding = try_claim(check, c, facts)
        if finding.name not in {other.name for other in known}:
            yield finding
    yield from (finding for finding in by_formula if finding not in known)
    if c.printed:
        text = f"it prints while it runs, which is not shown; the first line is {c.printed.splitlines()[0]!r}"
        yield Finding("output", "does not apply", text)


def describe_unknown(c: Candidate, facts: Facts) -> str:
    """That its formula is none that this check knows or could compare, and what can be told; "" if it is known."""
    if facts.match.formula is not None:
        return ""
    if not Reference(c).is_known:
        return "its formula is not compared, because its projections have no usual names"
    text = "its formula is none that this check knows"
    if c.module is None:
        q, k, v = c.inputs
        sums = c(q, k, np.ones_like(v))
        text += "" if is_equal(sums, np.ones_like(sums)) else " (weights do not sum to 1)"
    return text


def try_claim(check: Check, c: Candidate, facts: Facts, name: str = "") -> Finding:
    """The finding of a claim; a failed one with the smallest inputs for which it fails for the same cause."""
    name = name or check.__name__.removeprefix("check_")
    try:
        return Finding(name, "passed", check(c, c.inputs, facts))
    except NotApplicableError as reason:
        return Finding(name, "does not apply", str(reason))
    except CandidateError as error:
        return Finding(name, "failed", str(error), "an option or input that it should take cannot be used")
    except BrokenError as error:
        first = error
    broken, inputs = find_smallest(check, c, facts, first)
    example = dict(zip(c.names, inputs, strict=True))
    return Finding(name, "failed", str(broken), first.cause, example, broken.details)


def compare_formula(c: Candidate, facts: Facts) -> Iterator[Finding]:
    """What only a comparison with the formula shows: scale, softmax, heads, roles, positions, residual."""
    match = facts.match

    def check_match(c: Candidate, inputs: Inputs, facts: Facts) -> str:
        text = "the result equals the formula with this one change, and not the formula"
        text = "far keys get other weights than they should" if match.formula is match.correct else text
        with contextlib.suppress(ValueError):  # the output projection has the width of one head
            if Reference(c).follows(match, inputs, facts.see):
                return ""
        raise BrokenError(text, match.cause)

    for name in sorted(({"scale", *FAULTS} - {"causality", "heads"}) | {match.claim} - {""}):
        if name == match.claim:
            yield try_claim(check_match, c, facts, name)
        elif match.formula is None:
            reason = "neither softmax(Q K^T / sqrt(d_k)) V nor one of its known faults: no formula to compare with"
            reason = reason if facts.see.sum(axis=-1).max() > 1 else "no row depends on more than one key"
            yield Finding(name, "does not apply", reason)
        else:
            heads = f" in {match.formula.n_head} heads" if match.formula.n_head > 1 else ""
            scores = "Q K^T / sqrt(d_k)" if match.n is None else "Q K^T / sqrt(d_k) + bias"
            rotary = ", rotary" if match.formula.pairing else ""
            yield Finding(name, "passed", f"as in softmax({scores}) V{heads}{rotary}")


# --------------------------------------------------------------------------------------------------------------------
# Examples


def find_smallest(check: Check, c: Candidate, facts: Facts, first: BrokenError) -> tuple[BrokenError, Inputs]:
    """The smallest inputs for which the check fails for the same cause, with what it then says."""
    broken, inputs = first, c.inputs
    choices = simplify(inputs, has_free_width=c.module is None)
    while (smaller := next(choices, None)) is not None:
        with contextlib.suppress(Exception):  # inputs that it cannot have
            try:
                check(c, smaller, facts)
            except BrokenError as found:
                # The pairs of rows prove a leak, whose kind can look different in fewer rows.
                if found.cause == first.cause or {"pairs"} <= found.details.keys() & first.details.keys():
                    broken, inputs = found, smaller
                    choices = simplify(inputs, has_free_width=c.module is None)
    return broken, inputs


def simplify(inputs: Inputs, has_free_width: bool) -> Iterator[Inputs]:
    """Smaller inputs: fewer tokens, then fewer columns, then round numbers."""
    for t in range(1, min(x.shape[-2] for x in inputs)):
        yield tuple(x[..., :t, :] for x in inputs)
    for width in range(1, min(x.shape[-1] for x in inputs) if has_free_width else 0):
        yield tuple(x[..., :width] for x in inputs)
    for digits in (0, 1):
        rounded = tuple(np.round(x, digits) + 0.0 for x in inputs)  # no -0.0
        has_zeros = any((x == 0).all(axis=-1).any() for x in rounded)  # whose scores show nothing
        if not has_zeros and not all(map(np.array_equal, inputs, rounded)):
            yield rounded
