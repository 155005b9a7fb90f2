"""Exercise 1: derive the rule of softmax.

Each row of P is the softmax of the same row of S:

    p_j = exp(s_j) / (exp(s_1) + ... + exp(s_n))

L is a loss that is computed from P. You are given P and dP, where dP_ij = dL / dP_ij. Find dS.

1. On paper: the derivative of p_j by s_i, for i = j and for i != j. Write both as one formula with p_i and p_j.
2. All p_j of a row depend on s_i. Sum over them with the chain rule: ds_i = ...
3. Write the result as a line of NumPy in `rule` below, for all rows at once.

Then let it be checked:

    python softmax_rule.py                                               what is wrong with the formula
    tinygrad-mha gradcheck softmax_rule.py:softmax_of_rows --shape 3x5   as the rule of a primitive, to second order

Question: what is the sum of each row of dS, whatever dP is? What does that say about adding 1 to all scores of a row?
"""

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.programs import ending_quietly, run_exercise


def rule(dP, P):
    """dS, (rows, n), of dP and P in the same shape."""
    return dP  # this is not right yet


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
