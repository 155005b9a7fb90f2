"""Exercise 3: build the cache.

`Attention` is causal attention with one head. A generator calls it again for each new token, and each time it computes
all rows. With a cache a call computes only the rows of the new tokens:

    cache = nn.KVCache()
    attention(x[:3], cache=cache)     # three tokens are read, and their keys and values are kept
    attention(x[3:4], cache=cache)    # the row of the fourth

`k, v = cache.append(k, v)` keeps the rows of k and v, and returns them behind those of all earlier calls.
`cache.length` is the number of tokens of earlier calls (read it before you append).

1. Which of q, k, v does a later token need? Keep those.
2. q now has fewer rows than k. Which keys may row i of q see?
3. A position is added to each row of x. Which positions have the rows of this call?

Without a cache nothing may change. Keep the calls of `show`: by them the check sees q, k, v and the scores. Let it be
checked:

    python cached_attention.py                          read in all chunks, with what each step costs
    tinygrad-mha check cached_attention.py:Attention    with everything else that an attention promises

Question: the table counts the rows of Q. Why is there no "Q reused"?
"""

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha import nn, ops
from tinygrad_mha.programs import ending_quietly, run_exercise


class Attention(nn.Module):
    def __init__(self, width=12, rng=0):
        rng = np.random.default_rng(rng)
        self.q, self.k, self.v = (nn.Linear(width, width, rng=rng) for _ in range(3))

    def forward(self, x, cache=None, edit=None):
        show = edit or (lambda name, tensor: tensor)
        T = x.shape[-2]
        x = x + nn.positions.sinusoidal(np.arange(T), x.shape[-1]).astype(x.dtype)
        q, k, v = show("q", self.q(x)), show("k", self.k(x)), show("v", self.v(x))
        # `cache` is not used yet
        scores = show("scores", q @ k.mT / q.shape[-1] ** 0.5)
        allow = np.tri(T, dtype=bool)  # (T_q, T_k): row i sees keys 0 to i
        return ops.where(allow, scores, -np.inf).softmax() @ v


def check():
    x = np.random.default_rng(0).standard_normal((5, 12))
    try:
        verdict = tg.check.kv_cache(Attention(), x)
        if verdict.ok:  # with a cache and without one the same: is it what this file computed at first?
            verdict.findings.append(compare_with_start(Attention().astype(np.float64)(x), x))
    except Exception as error:
        hint = ". Without a cache, `cache` is None: is all that uses it behind `if cache is not None`?"
        problem = f"it raises {type(error).__name__}: {error}" + hint * ("'NoneType'" in str(error))
        return tg.check.Verdict("Attention", problem=problem)
    counts = verdict.ledger.total.cached
    computed = {name: counts[f"{name} computed"] for name in ("Q", "K", "V", "scores")}
    if verdict.ok and not all(computed.values()):
        names = ", ".join(name for name, rows in computed.items() if not rows)
        message = f"no rows of {names} were seen: keep the calls of show for q, k, v and scores"
        verdict.findings.append(tg.check.Finding("show", "failed", message))
    elif verdict.ok and max(computed.values()) > len(x):  # each token once
        rows = ", ".join(f"{count} rows of {name}" for name, count in computed.items())
        message = f"{rows} are computed with the cache, {len(x)} of each are needed: old tokens are computed again"
        verdict.findings.append(tg.check.Finding("work", "failed", message, "keep k and v, not x"))
    return verdict


def compare_with_start(y, x):
    """Whether y is what this file computed of x before it was changed."""
    y, rng = y.numpy() if isinstance(y, tg.Tensor) else y, np.random.default_rng(0)
    q, k, v = (nn.Linear(12, 12, rng=rng) for _ in range(3))

    def attend(first, allow):
        at = x + (0 if first is None else nn.positions.sinusoidal(np.arange(first, first + len(x)), 12))
        return nn.attention(q(at), k(at), v(at), allow).numpy()

    causal, itself = nn.causal(len(x)), np.eye(len(x), dtype=bool)
    faults = {
        "the result is 0 everywhere": 0 * x,
        "x is returned as it is": x,
        "each token sees itself alone": attend(0, itself),
        "no positions are added": attend(None, causal),
        "the first position is 1, not 0": attend(1, causal),
        "tokens see later ones": attend(0, ~itself | itself),
    }
    right = attend(0, causal)
    if y.shape != right.shape:
        return tg.check.Finding("start", "failed", f"without a cache the shape is {y.shape}, expected {right.shape}")
    off = np.abs(y - right).max(axis=-1)
    message = f"without a cache: off by up to {off.max():.1e} from this file at the start, in row {off.argmax()}"
    if off.max() < 1e-6:
        return tg.check.Finding("start", "passed", message)
    cause = "positions, mask, weights or scale differ, or another layer computes the result"
    cause = next((fault for fault, other in faults.items() if np.allclose(y, other, atol=1e-6)), cause)
    return tg.check.Finding("start", "failed", f"{message}. Without a cache nothing may change", cause)


if __name__ == "__main__":
    with ending_quietly():
        sys.exit(run_exercise(check, __doc__))
