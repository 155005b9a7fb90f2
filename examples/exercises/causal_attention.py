"""Exercise 2: write causal attention.

`attend` receives queries q (T_q, d_k), keys k (T_k, d_k) and values v (T_k, d_v), a row for each token. It returns a
row for each query, (T_q, d_v): the mean of the values, weighted by how well the query fits each key. A token must not
see later ones.

1. The scores: the product of each query with each key, divided by the square root of d_k.
2. The mask: the score of a later key is -inf.
3. The weights: the softmax of each row of the masked scores. Write it with np.exp and a sum.
4. The result: the values, weighted.
5. With fewer queries than keys, the queries are the last tokens. Does your mask know that?

Let it be checked, repair what the first FAILED says, and check again:

    python causal_attention.py
    tinygrad-mha check causal_attention.py:attend --causal      the same, without the comparison with our formula

Question: what would a token learn to do if it could see the next one? Why does the loss look good then?
"""

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.programs import ending_quietly, run_exercise


def attend(q, k, v):
    n = k.shape[-2]
    weights = np.full((q.shape[-2], n), 1 / n, q.dtype)  # each token sees all tokens alike: this is not right yet
    return weights @ v


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
