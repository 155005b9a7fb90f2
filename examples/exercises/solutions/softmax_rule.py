"""Solution of exercise 1.

The derivative of p_j by s_i is p_j ([i = j] - p_i). Summed over all p_j of the row:

    ds_i = sum over j of dp_j p_j ([i = j] - p_i) = p_i (dp_i - sum over j of p_j dp_j)

Each row of dS sums to 0, whatever dP is: p does not change if 1 is added to all scores of a row.
"""

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.programs import ending_quietly, run_exercise


def rule(dP, P):
    """dS, (rows, n), of dP and P in the same shape."""
    return P * (dP - (P * dP).sum(axis=-1, keepdims=True))


@tg.ops.primitive
def softmax_of_rows(S):
    E = np.exp(S - S.max(axis=-1, keepdims=True))
    return E / E.sum(axis=-1, keepdims=True)


softmax_of_rows.vjps(lambda g, y, S: rule(g, y))  # g is dP, y is P


def check():
    def softmax(S):
        return {"P": tg.ops.softmax(S)}

    scores = np.random.default_rng(0).standard_normal((3, 5))
    return tg.check.derivation(softmax, {"S": scores}, {"dS": rule})


if __name__ == "__main__":
    with ending_quietly():
        sys.exit(run_exercise(check, __doc__))
