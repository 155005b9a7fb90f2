"""`attention`: everything that an attention promises, tried on a candidate, and what is wrong in its formula.

A claim that failed is tried again on smaller inputs, and the smallest ones that fail are reported.

Axes: T tokens, T_q queries, T_k keys, C width, d_k, d_v widths of a key and a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tinygrad_mha.check.candidates import Candidate, CandidateError
from tinygrad_mha.check.claims import (
    CLAIMS,
    Check,
    Facts,
    Inputs,
    NotApplicableError,
    check_causality,
    check_determinism,
    measure_influence,
)
from tinygrad_mha.check.formulas import CLOSE, FAULTS, Formula, Reference, is_equal
from tinygrad_mha.check.verdict import Finding, Verdict

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
        The verdict. It raises nothing: `.raise_if_failed()` does, for tests. A candidate that cannot be run, raises, or
        returns something else than rows has a `problem`, and is not ok.

    Example:
        >>> def unscaled(q, k, v):
        ...     scores = np.exp(q @ k.swapaxes(-1, -2))
        ...     return scores / scores.sum(-1, keepdims=True) @ v
        >>> for finding in attention(unscaled).failed:
        ...     print(finding.name, "-", finding.cause)
        scale - the scores are not divided by sqrt(d_k): the scale is missing
        overflow - exp overflows: the largest score of each row is not subtracted before it
    """
    name = getattr(candidate, "__name__", type(candidate).__name__)
    try:
        c = Candidate(candidate, inputs, seed, causal)
        return Verdict(name, list(judge(c, causal, seed)))
    except CandidateError as error:
        return Verdict(name, problem=str(error))


def judge(c: Candidate, causal: bool | None, seed: int) -> Iterator[Finding]:
    """Try all claims."""
    finding = check_determinism(c)
    yield finding
    if finding.status == "failed":
        return
    if not np.isfinite(c(*c.inputs)).all():
        raise CandidateError("it returned nan or infinity for small inputs")
    facts = Facts(seed, causal, measure_influence(c, c.inputs, seed) > CLOSE)
    finding = check_causality(c, c.inputs, facts)
    facts.is_causal = facts.stated = finding.status != "does not apply"
    facts.leaks = finding.status == "failed"
    by_formula = list(check_formula(c, facts))  # a fault that is known to the digit explains what else failed
    yield from (found for found in by_formula if found.status == "failed")
    yield with_example(c, finding, check_causality, facts)
    for check in CLAIMS:
        name = check.__name__.removeprefix("check_")
        try:
            yield with_example(c, check(c, c.inputs, facts), check, facts)
        except NotApplicableError as reason:
            yield Finding(name, "does not apply", str(reason))
        except CandidateError as error:
            yield Finding(name, "failed", str(error), "an option or input that it should take cannot be used")
    yield from (found for found in by_formula if found.status != "failed")
    if c.printed:
        text = f"it prints while it runs, which is not shown; the first line is {c.printed.splitlines()[0]!r}"
        yield Finding("output", "does not apply", text)


# --------------------------------------------------------------------------------------------------------------------
# The formula


def check_formula(c: Candidate, facts: Facts) -> Iterator[Finding]:
    """What only a comparison with the formula shows: scale, softmax, heads, roles, positions, residual."""
    bias = measure_bias(c, facts) if not c.takes_rows and c.module is None else None
    names = dict.fromkeys(["scale", *(name for name, _, _ in FAULTS if name != "causality")])
    reference, y = Reference(c), c(*c.inputs)
    formula, claim, cause = reference.identify(c.inputs, y, facts.see, 0.0 if bias is None else bias)
    if formula is None and bias is not None:
        formula, claim, cause = reference.identify(c.inputs, y, facts.see)
    if bias is not None and not claim and prefers_far(bias, facts.see):
        claim, cause = "positions", "the slope of the distances (ALiBi) has the wrong sign: far keys get more weight"
    if claim and formula is not None:
        correct = Formula(formula.n_head, rotary=formula.rotary)

        def differs(c: Candidate, inputs: Inputs, facts: Facts) -> Finding:
            n, m = inputs[0].shape[-2], inputs[-1].shape[-2]
            expected = reference.compute(correct, inputs, facts.see[:n, :m])
            status = "passed" if is_equal(expected, c(*inputs)) else "failed"
            return Finding(claim, status, "", cause)  # type: ignore[arg-type]

        text = "the result equals the formula with this one change, and not the formula"
        yield with_example(c, Finding(claim, "failed", text, cause), differs, facts)
    for name in names:
        if name == claim:
            continue
        if formula is None:
            reason = "neither softmax(Q K^T / sqrt(d_k)) V nor one of its known faults: no formula to compare with"
            yield Finding(name, "does not apply", reason)
        else:
            heads = f" in {formula.n_head} heads" if formula.n_head > 1 else ""
            rotary = ", rotary" if formula.rotary else ""
            yield Finding(name, "passed", f"as in softmax(Q K^T / sqrt(d_k)) V{heads}{rotary}")


def measure_bias(c: Candidate, facts: Facts) -> np.ndarray | None:
    """What is added to the scores of a function of q, k and v, (..., T_q, T_k): with q = 0 there is nothing else."""
    q, k, v = c.inputs
    if v.shape[-1] < v.shape[-2] or len({x.shape[:-2] for x in c.inputs}) > 1:
        return None
    weights = c(np.zeros_like(q), k, v) @ np.linalg.pinv(v)
    if weights.shape[-2:] != facts.see.shape or not (weights[..., facts.see] > 0).all():
        return None
    bias = np.log(np.where(facts.see & (weights > 0), weights, 1.0))
    return bias - bias.max(axis=-1, keepdims=True)


def prefers_far(bias: np.ndarray, see: np.ndarray) -> bool:
    """Whether the bias of the last query falls by the same amount with each key towards the latest."""
    steps = np.diff(bias[..., -1, :][..., see[-1]])
    return bool(steps.size > 1 and np.ptp(steps) < CLOSE and steps.max() < -CLOSE)


# --------------------------------------------------------------------------------------------------------------------
# Examples


def with_example(c: Candidate, finding: Finding, check: Check, facts: Facts) -> Finding:
    """A failed finding with the smallest inputs for which the check fails for the same cause."""
    if finding.status != "failed":
        return finding
    inputs = c.inputs
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in simplify(inputs, has_free_width=c.module is None):
            try:
                found = check(c, smaller, facts)
            except Exception:  # inputs that it cannot have
                continue
            if found.status == "failed" and found.cause == finding.cause:
                inputs, is_smaller = smaller, True
                finding = replace(finding, message=found.message or finding.message)
                break
    names = ["x"] if c.takes_rows else ["q", "k", "v"]
    return replace(finding, example=dict(zip(names, inputs, strict=True)))


def simplify(inputs: Inputs, has_free_width: bool) -> Iterator[Inputs]:
    """Smaller inputs: fewer tokens, then fewer columns, then round numbers."""
    n = min(x.shape[-2] for x in inputs)
    for t in range(1, n):
        yield tuple(x[..., :t, :] for x in inputs)
    if has_free_width:
        for width in range(1, min(x.shape[-1] for x in inputs)):
            yield tuple(x[..., :width] for x in inputs)
    for digits in (0, 1):
        rounded = tuple(np.round(x, digits) + 0.0 for x in inputs)  # no -0.0
        if not all(np.array_equal(x, np.round(x, digits)) for x in inputs):
            yield rounded
