"""Solution of exercise 2.

A token that sees the next one learns to copy it. In training the next token is the target, so the loss falls towards 0;
when text is generated there is no next token, and the model has learnt nothing.
"""

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.programs import ending_quietly, run_exercise


def attend(q, k, v):
    n_q, n_k = q.shape[-2], k.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    allow = np.tri(n_q, n_k, n_k - n_q, dtype=bool)  # the last query sees all keys
    scores = np.where(allow, scores, -np.inf)
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))  # the largest is 0, so that exp does not overflow
    return e / e.sum(axis=-1, keepdims=True) @ v


def check():
    verdict = tg.check.attention(attend, causal=True)
    if verdict.ok:  # it is an attention; is it this one?
        rng = np.random.default_rng(0)
        q, k, v = rng.standard_normal((5, 7)), rng.standard_normal((5, 7)), rng.standard_normal((5, 11))
        right = tg.nn.attention(q, k, v, tg.nn.causal(5)).numpy()
        off = np.abs(attend(q, k, v) - right)
        row, column = np.unravel_index(off.argmax(), off.shape)
        place = f"row {row}, column {column}, counted from 0"
        message = f"off by up to {off.max():.2g} from softmax(Q K^T / sqrt(d_k)) V, masked ({place})"
        usual = "often no exp, a sum without keepdims=True, or weights that are not divided by their sum"
        status, cause = ("passed", "") if off.max() < 1e-6 else ("failed", usual)
        verdict.findings.append(tg.check.Finding("formula", status, message, cause))
    return verdict


if __name__ == "__main__":
    with ending_quietly():
        sys.exit(run_exercise(check, __doc__))
