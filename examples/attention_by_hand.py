"""Print every matrix of a two-head attention on three words, then add a fourth word with the cache.

All widths are different (5, 7, 11, 22), so the shape of a matrix shows where it comes from. It takes a
second and writes no file. Run it:

    python examples/attention_by_hand.py
"""

from __future__ import annotations

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha import Tensor, nn, ops
from tinygrad_mha.decoding.cost import count_multiply_adds
from tinygrad_mha.programs import ending_quietly, make_parser

WORDS = ["the", "cat", "sat", "down"]
D_MODEL, N_HEAD, D_K, D_V = 5, 2, 7, 11


def main() -> None:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # the console may have another default, without ⎡ and ⎤
    mha, x = make_attention()
    X, x_4 = Tensor(x[:3], requires_grad=True, name="X"), x[3:]

    print_heading(
        "1. The input",
        "Each of the three words is a row of 5 numbers of X. (0 is exactly 0; 0.00 is small.)",
    )
    print_matrix(X, rows=WORDS)

    matrices: dict[str, Tensor] = {}
    for i in (1, 2):
        matrices |= compute_head(i, X, mha)
    Y = join_heads(mha, matrices)

    print_heading(
        "5. The same in one call", "MultiHeadAttention computes both heads at once; their matrices are side by side."
    )
    print_equality("mha(X, causal=True)", mha(X, causal=True), Y)
    print_equality("mha.per_head(X, causal=True)", mha.per_head(X, causal=True), Y)

    show_gradients(Y, X, mha, matrices)
    show_dependence(X, Y)
    show_changed_rows(mha, x, Y)
    append_a_word(mha, x, x_4)


def make_attention() -> tuple[nn.MultiHeadAttention, np.ndarray]:
    """The attention and four words (4, 5). All numbers have one decimal, so that they can be computed by hand."""
    rng = np.random.default_rng(7)
    mha = nn.MultiHeadAttention(D_MODEL, N_HEAD, d_k=D_K, d_v=D_V).astype(np.float64)
    for parameter in mha.parameters():
        parameter.assign_(rng.normal(0, 0.4, parameter.shape).round(1))
    return mha, rng.normal(0, 1, (4, D_MODEL)).round(1)


# --------------------------------------------------------------------------------------------------------------------
# Forward


def compute_head(i: int, X: Tensor, mha: nn.MultiHeadAttention) -> dict[str, Tensor]:
    """Compute one head step by step and print its matrices; returns them by name."""
    keys, values = slice((i - 1) * D_K, i * D_K), slice((i - 1) * D_V, i * D_V)  # the columns of this head
    W_Q = mha.wq[:, keys].named(f"W_Q{i}")
    W_K = mha.wk[:, keys].named(f"W_K{i}")
    W_V = mha.wv[:, values].named(f"W_V{i}")
    Q = (X @ W_Q).named(f"Q_{i}")
    K = (X @ W_K).named(f"K_{i}")
    V = (X @ W_V).named(f"V_{i}")
    products = (Q @ K.T).named(f"products_{i}")
    scores = (products * D_K**-0.5).named(f"scores_{i}")
    masked = ops.mask(scores, nn.causal(3)).named(f"masked_{i}")
    S = masked.softmax().named(f"S_{i}")
    H = (S @ V).named(f"H_{i}")

    if i == 1:
        print_heading("2. The first head", "Three matrices turn every word into a query, a key and a value.")
    else:
        print_heading("3. The second head", "The same computation with other matrices.")
    for which, W, projected in (("Q", W_Q, Q), ("K", W_K, K), ("V", W_V, V)):
        print_matrix(W)
        print_matrix(projected, f"X W_{which}{i}", WORDS)
    print_note(f"Row n of Q_{i} K_{i}ᵀ: how well the query of word n fits the key of each word.")
    print_matrix(products, f"Q_{i} K_{i}ᵀ", WORDS, WORDS)
    print_matrix(scores, f"Q_{i} K_{i}ᵀ / √{D_K}", WORDS, WORDS)
    print_note("A word may attend to itself and to earlier words. All other scores are -inf; softmax makes them 0.")
    print_matrix(masked, f"mask(scores_{i})", WORDS, WORDS)
    print_matrix(S, f"softmax(masked_{i})", WORDS, WORDS)
    print_note(
        f"Every row of S_{i} sums to 1. Row n of H_{i} is the sum of the rows of V_{i}, weighted by row n of S_{i}."
    )
    print_matrix(H, f"S_{i} V_{i}", WORDS)
    return {t.name or "": t for t in (W_Q, W_K, W_V, Q, K, V, products, scores, masked, S, H)}


def join_heads(mha: nn.MultiHeadAttention, matrices: dict[str, Tensor]) -> Tensor:
    """Join the heads, multiply by W_O, and print both."""
    Concat = ops.concat(matrices["H_1"], matrices["H_2"], axis=1).named("Concat")
    Y = (Concat @ mha.wo).named("Y")
    print_heading("4. Both heads together", "H_1 and H_2 are joined; W_O maps them to the width of X.")
    print_matrix(Concat, "[ H_1 | H_2 ]", WORDS)
    print_matrix(mha.wo)
    print_matrix(Y, "Concat W_O", WORDS)
    matrices |= {"Concat": Concat}
    return Y


# --------------------------------------------------------------------------------------------------------------------
# Backward


def show_gradients(Y: Tensor, X: Tensor, mha: nn.MultiHeadAttention, matrices: dict[str, Tensor]) -> None:
    print_heading(
        "6. Every matrix has a gradient", "Let L be the sum of Y ∘ G for some G. Then dL/dM has the shape of M."
    )
    G = np.random.default_rng(3).normal(0, 1, Y.shape).round(1)
    print_matrix(G, "dL/dY", WORDS, name="G")
    Y.backward(G)
    print_matrix(matrices["S_1"].grad, "dL/dH_1 V_1ᵀ", WORDS, WORDS, name="dL/dS_1")
    print_note("Through the softmax: the gradient of a masked score is 0, and so is that of the only score of a row.")
    print_matrix(matrices["masked_1"].grad, "", WORDS, WORDS, name="dL/dmasked_1")
    print_matrix(matrices["W_Q1"].grad, "Xᵀ dL/dQ_1", name="dL/dW_Q1")
    print("    the norm of each gradient:")
    for t in (X, *matrices.values(), mha.wo):
        print(f"      dL/d{t.name:10} {write_shape(t.shape):>7}   {np.linalg.norm(t.grad):6.2f}")
    print()


# --------------------------------------------------------------------------------------------------------------------
# Which rows depend on which


def show_dependence(X: Tensor, Y: Tensor) -> None:
    print_heading(
        "7. Row n of Y needs rows 1 to n of X",
        "The norm of the gradient of each row of Y by each row of X:",
    )
    table = np.zeros((3, 3))
    for n in range(3):
        G = np.zeros(Y.shape)
        G[n] = 1
        (gradient,) = tg.grad(Y, X, grad_output=G)
        table[n] = np.linalg.norm(gradient.numpy(), axis=1)
    print_matrix(table, "rows of Y by rows of X", WORDS, WORDS, name="|dY/dX|")
    print_note("Exactly 0 above the diagonal: no row of Y depends on a later row of X.")
    assert (np.triu(table, 1) == 0).all()
    assert (table[np.tri(3, dtype=bool)] > 0).all()


def show_changed_rows(mha: nn.MultiHeadAttention, x: np.ndarray, Y: Tensor) -> None:
    print("    The same without gradients: change the last row of X and see which rows of Y change.")
    other = x[:3].copy()
    other[2] += 1
    change = np.abs(mha(other, causal=True).data - Y.data).max(axis=1)
    for word, distance in zip(WORDS[:3], change, strict=True):
        print(f"      row {word!r:6} of Y changed by {distance:.2f}")
    print()
    assert (change[:2] == 0).all()
    assert change[2] > 0


# --------------------------------------------------------------------------------------------------------------------
# One more word


def append_a_word(mha: nn.MultiHeadAttention, x: np.ndarray, x_4: np.ndarray) -> None:
    print_heading("8. A fourth word", "Rows 1 to 3 of Y do not change, so only row 4 has to be computed. It needs:")
    print_matrix(x_4, "", WORDS[3:], name="X_4")
    with tg.no_grad(), tg.record():  # recorded, so that the multiplications can be counted
        cache = nn.KVCache()
        mha(x[:3], causal=True, cache=cache)
        before = cache.nbytes // 8
        y_4, trace = mha(x_4, causal=True, cache=cache, trace=True)
        whole = mha(x, causal=True)
    q, k, v, s, h = (t.data for t in (trace.q, trace.k, trace.v, trace.weights, trace.heads))
    print_note("Its own query, which no later word will need:")
    for i in range(N_HEAD):
        print_matrix(q[i], f"X_4 W_Q{i + 1}", WORDS[3:], name=f"q_{i + 1}")
    print_note("All keys and values: three rows are in the cache, the fourth is new and is added to it.")
    marks = [f"{word} (cached)" for word in WORDS[:3]] + [f"{WORDS[3]} (new)"]
    for i in range(N_HEAD):
        print_matrix(k[i], f"[ cache ; X_4 W_K{i + 1} ]", marks, name=f"K_{i + 1}")
        print_matrix(v[i], f"[ cache ; X_4 W_V{i + 1} ]", marks, name=f"V_{i + 1}")
    print_note("From these, one row of everything else. The last word may attend to all words, so there is no mask:")
    for i in range(N_HEAD):
        print_matrix(s[i], f"softmax(q_{i + 1} K_{i + 1}ᵀ / √{D_K})", WORDS[3:], WORDS, name=f"s_{i + 1}")
        print_matrix(h[i], f"s_{i + 1} V_{i + 1}", WORDS[3:], name=f"h_{i + 1}")
    print_matrix(y_4, "[ h_1 | h_2 ] W_O", WORDS[3:], name="Y_4")
    print_equality("row 4 of Y, and the same computed from all four words", whole[3:], y_4)

    print("    cached       K and V of every word:", f"{before} numbers for three words, {cache.nbytes // 8} for four")
    print("    not needed   Q, scores, S, H, Concat and Y of the earlier words")
    with_cache, without = count_multiply_adds(y_4), count_multiply_adds(whole)
    print(f"    work         {with_cache} multiplications instead of {without}")


# --------------------------------------------------------------------------------------------------------------------
# Printing


def print_heading(title: str, text: str) -> None:
    print(f"\n{title}\n{'─' * len(title)}\n{text}\n")


def print_note(text: str) -> None:
    print(f"    {text}\n")


def write_shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def print_matrix(
    matrix: Tensor | np.ndarray,
    formula: str = "",
    rows: list[str] | None = None,
    columns: list[str] | None = None,
    name: str | None = None,
) -> None:
    """Print a matrix with its name, formula, shape and numbers; 22 columns are printed in two parts."""
    values = matrix.data if isinstance(matrix, Tensor) else matrix
    name = name or (matrix.name if isinstance(matrix, Tensor) else "")
    print(f"    {name}{' = ' if formula else ''}{formula}    {write_shape(values.shape)}")
    labels = (rows or [""] * len(values))[: len(values)]
    margin = max(map(len, labels))
    for first in range(0, values.shape[1], D_V):
        part = values[:, first : first + D_V]
        if values.shape[1] > D_V:
            print(f"      columns {first + 1} to {first + D_V}")
        if columns:
            print("      " + " " * margin + "  " + "".join(f"{word:>8}" for word in columns[: part.shape[1]]))
        for i, (label, row) in enumerate(zip(labels, part, strict=True)):
            left, right = choose_brackets(i, len(part))
            numbers = "".join(f"{write_number(n):>{8 if columns else 7}}" for n in row)
            print(f"      {label:{margin}} {left}{numbers} {right}")
    print()


def write_number(n: float) -> str:
    return "-inf" if np.isneginf(n) else "0" if n == 0 else f"{n:.2f}".replace("-0.00", "0.00")


def choose_brackets(i: int, n: int) -> tuple[str, str]:
    if n == 1:
        return "[", "]"
    return ("⎡", "⎤") if i == 0 else ("⎣", "⎦") if i == n - 1 else ("⎢", "⎥")


def print_equality(what: str, a: Tensor, b: Tensor) -> None:
    difference = np.abs(a.data - b.data).max()
    assert difference < 1e-12, (what, difference)
    print(f"    {what}: the same numbers, {f'to {difference:.0e}' if difference else 'exactly'}\n")


if __name__ == "__main__":
    with ending_quietly():
        make_parser(__doc__).parse_args()
        main()
