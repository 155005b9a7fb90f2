"""Two-head attention on three words, number by number; then a fourth word through the cache.

No two widths are equal (5, 7, 11, 22), so the shape of every matrix tells where it comes from. Run it:

    python examples/attention_by_hand.py
"""

from __future__ import annotations

import sys

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha import Tensor, nn, ops

WORDS = ["the", "cat", "sat", "down"]
D_MODEL, N_HEAD, D_K, D_V = 5, 2, 7, 11


def main() -> None:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # the brackets, also where a console expects something older
    mha, x = make()
    X, x_4 = Tensor(x[:3], requires_grad=True, name="X"), x[3:]

    heading(
        "1. The input",
        "Three words. Each is a row of 5 numbers, and X is all three rows. (0 is exactly 0, 0.00 small.)",
    )
    show(X, rows=WORDS)

    found = {}
    for i in (1, 2):
        found |= head(i, X, mha)
    Y = join(mha, found)

    heading("5. The same in one call", "MultiHeadAttention does both heads at once, with their matrices side by side.")
    equal("mha(X, causal=True)", mha(X, causal=True), Y)
    equal("mha.per_head(X, causal=True)", mha.per_head(X, causal=True), Y)

    show_gradients(Y, X, mha, found)
    show_dependence(X, Y)
    show_changed_rows(mha, x, Y)
    append_a_word(mha, x, x_4)


def make() -> tuple[nn.MultiHeadAttention, np.ndarray]:
    """The attention and four words, in numbers with one decimal that can be followed on paper."""
    rng = np.random.default_rng(7)
    mha = nn.MultiHeadAttention(D_MODEL, N_HEAD, d_k=D_K, d_v=D_V).astype(np.float64)
    for parameter in mha.parameters():
        parameter.assign_(rng.normal(0, 0.4, parameter.shape).round(1))
    return mha, rng.normal(0, 1, (4, D_MODEL)).round(1)


# --------------------------------------------------------------------------------------------------------------------
# Forward


def head(i: int, X: Tensor, mha: nn.MultiHeadAttention) -> dict[str, Tensor]:
    """One head, written out; every line of it is a line of the formula."""
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
        heading("2. The first head", "Three matrices turn every word into a query, a key and a value.")
    else:
        heading("3. The second head", "The same with matrices of its own: it looks for something else.")
    for which, W, projected in (("Q", W_Q, Q), ("K", W_K, K), ("V", W_V, V)):
        show(W)
        show(projected, f"X W_{which}{i}", WORDS)
    note(f"Each query meets each key: row n of Q_{i} K_{i}ᵀ says how well word n's query fits every word's key.")
    show(products, f"Q_{i} K_{i}ᵀ", WORDS, WORDS)
    show(scores, f"Q_{i} K_{i}ᵀ / √{D_K}", WORDS, WORDS)
    note("A word may look at itself and at what came before; the rest is -inf, which the softmax turns into 0.")
    show(masked, f"mask(scores_{i})", WORDS, WORDS)
    show(S, f"softmax(masked_{i})", WORDS, WORDS)
    note(f"Every row of S_{i} sums to 1. Row n of H_{i} mixes the rows of V_{i}, in the shares of row n of S_{i}.")
    show(H, f"S_{i} V_{i}", WORDS)
    return {t.name or "": t for t in (W_Q, W_K, W_V, Q, K, V, products, scores, masked, S, H)}


def join(mha: nn.MultiHeadAttention, found: dict[str, Tensor]) -> Tensor:
    """The heads side by side, and the matrix that mixes them."""
    Concat = ops.concat(found["H_1"], found["H_2"], axis=1).named("Concat")
    Y = (Concat @ mha.wo).named("Y")
    heading("4. Both heads together", "H_1 and H_2 stand side by side, and W_O mixes them back to the width of X.")
    show(Concat, "[ H_1 | H_2 ]", WORDS)
    show(mha.wo)
    show(Y, "Concat W_O", WORDS)
    found |= {"Concat": Concat}
    return Y


# --------------------------------------------------------------------------------------------------------------------
# Backward


def show_gradients(Y: Tensor, X: Tensor, mha: nn.MultiHeadAttention, found: dict[str, Tensor]) -> None:
    heading("6. Every matrix has a gradient", "Take L = the sum of Y ∘ G for some G. Then dL/dM has the shape of M.")
    G = np.random.default_rng(3).normal(0, 1, Y.shape).round(1)
    show(G, "dL/dY", WORDS, name="G")
    Y.backward(G)
    show(found["S_1"].grad, "dL/dH_1 V_1ᵀ", WORDS, WORDS, name="dL/dS_1")
    note("Through the softmax: nothing reaches a score that was hidden, nor the only one of a row.")
    show(found["masked_1"].grad, "", WORDS, WORDS, name="dL/dmasked_1")
    show(found["W_Q1"].grad, "Xᵀ dL/dQ_1", name="dL/dW_Q1")
    print("    all of them, by their length:")
    for t in (X, *found.values(), mha.wo):
        print(f"      dL/d{t.name:10} {size(t.shape):>7}   {np.linalg.norm(t.grad):6.2f}")
    print()


# --------------------------------------------------------------------------------------------------------------------
# Who depends on whom


def show_dependence(X: Tensor, Y: Tensor) -> None:
    heading(
        "7. Row n of Y needs rows 1 to n of X",
        "How strongly each row of X reaches each row of Y (the length of a gradient):",
    )
    table = np.zeros((3, 3))
    for n in range(3):
        G = np.zeros(Y.shape)
        G[n] = 1
        (gradient,) = tg.grad(Y, X, grad_output=G)
        table[n] = np.linalg.norm(gradient.numpy(), axis=1)
    show(table, "rows of Y by rows of X", WORDS, WORDS, name="|dY/dX|")
    note("Exactly 0 above the diagonal: no row of Y depends on a later row of X.")
    assert (np.triu(table, 1) == 0).all()
    assert (table[np.tri(3, dtype=bool)] > 0).all()


def show_changed_rows(mha: nn.MultiHeadAttention, x: np.ndarray, Y: Tensor) -> None:
    print("    The other way round: change the last row of X, and see which rows of Y move.")
    other = x[:3].copy()
    other[2] += 1
    moved = np.abs(mha(other, causal=True).data - Y.data).max(axis=1)
    for word, distance in zip(WORDS[:3], moved, strict=True):
        print(f"      row {word!r:6} of Y moved by {distance:.2f}")
    print()
    assert (moved[:2] == 0).all()
    assert moved[2] > 0


# --------------------------------------------------------------------------------------------------------------------
# One more word


def append_a_word(mha: nn.MultiHeadAttention, x: np.ndarray, x_4: np.ndarray) -> None:
    heading("8. A fourth word", "Rows 1 to 3 of Y stay as they are, so only row 4 is missing. What does it need?")
    show(x_4, "", WORDS[3:], name="X_4")
    with tg.no_grad():
        cache = nn.KVCache()
        mha(x[:3], causal=True, cache=cache)
        before = cache.nbytes // 8
        y_4, trace = mha(x_4, causal=True, cache=cache, trace=True)
        whole = mha(x, causal=True)
    q, k, v, s, h = (t.data for t in (trace.q, trace.k, trace.v, trace.weights, trace.heads))
    note("Its own query, which nobody will ever ask for again:")
    for i in range(N_HEAD):
        show(q[i], f"X_4 W_Q{i + 1}", WORDS[3:], name=f"q_{i + 1}")
    note("All keys and values: three rows were kept, the fourth is new and is kept too.")
    marks = [f"{word} (kept)" for word in WORDS[:3]] + [f"{WORDS[3]} (new)"]
    for i in range(N_HEAD):
        show(k[i], f"[ cache ; X_4 W_K{i + 1} ]", marks, name=f"K_{i + 1}")
        show(v[i], f"[ cache ; X_4 W_V{i + 1} ]", marks, name=f"V_{i + 1}")
    note("From these, one row of everything else. The last word may see all, so there is nothing to mask:")
    for i in range(N_HEAD):
        show(s[i], f"softmax(q_{i + 1} K_{i + 1}ᵀ / √{D_K})", WORDS[3:], WORDS, name=f"s_{i + 1}")
        show(h[i], f"s_{i + 1} V_{i + 1}", WORDS[3:], name=f"h_{i + 1}")
    show(y_4, "[ h_1 | h_2 ] W_O", WORDS[3:], name="Y_4")
    equal("row 4 of Y, computed again from all four words", whole[3:], y_4)

    print("    kept         K and V of every word:", f"{before} numbers for three words, {cache.nbytes // 8} for four")
    print("    thrown away  Q, scores, S, H, Concat and Y of the words before")
    with_cache, without = multiply_adds(1, 4), multiply_adds(4, 4)
    print(f"    work         {with_cache} multiplications instead of {without}")


def multiply_adds(n_q: int, n_k: int) -> int:
    """The multiplications of `n_q` new rows that attend to `n_k` keys."""
    projections = n_q * D_MODEL * (D_K + D_K + D_V) * N_HEAD
    products = n_q * n_k * (D_K + D_V) * N_HEAD
    return projections + products + n_q * N_HEAD * D_V * D_MODEL


# --------------------------------------------------------------------------------------------------------------------
# Typesetting


def heading(title: str, text: str) -> None:
    print(f"\n{title}\n{'─' * len(title)}\n{text}\n")


def note(text: str) -> None:
    print(f"    {text}\n")


def size(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def show(
    matrix: Tensor | np.ndarray,
    formula: str = "",
    rows: list[str] | None = None,
    columns: list[str] | None = None,
    name: str | None = None,
) -> None:
    """A matrix with its name, where it comes from, its shape and its numbers; 22 columns go into two parts."""
    values = matrix.data if isinstance(matrix, Tensor) else matrix
    name = name or (matrix.name if isinstance(matrix, Tensor) else "")
    print(f"    {name}{' = ' if formula else ''}{formula}    {size(values.shape)}")
    labels = (rows or [""] * len(values))[: len(values)]
    margin = max(map(len, labels))
    for first in range(0, values.shape[1], D_V):
        part = values[:, first : first + D_V]
        if values.shape[1] > D_V:
            print(f"      columns {first + 1} to {first + D_V}")
        if columns:
            print("      " + " " * margin + "  " + "".join(f"{word:>8}" for word in columns[: part.shape[1]]))
        for i, (label, row) in enumerate(zip(labels, part, strict=True)):
            left, right = bracket(i, len(part))
            numbers = "".join(f"{number(n):>{8 if columns else 7}}" for n in row)
            print(f"      {label:{margin}} {left}{numbers} {right}")
    print()


def number(n: float) -> str:
    return "-inf" if np.isneginf(n) else "0" if n == 0 else f"{n:.2f}".replace("-0.00", "0.00")


def bracket(i: int, n: int) -> tuple[str, str]:
    if n == 1:
        return "[", "]"
    return ("⎡", "⎤") if i == 0 else ("⎣", "⎦") if i == n - 1 else ("⎢", "⎥")


def equal(what: str, a: Tensor, b: Tensor) -> None:
    difference = np.abs(a.data - b.data).max()
    assert difference < 1e-12, (what, difference)
    print(f"    {what}: the same numbers, {f'to {difference:.0e}' if difference else 'exactly'}\n")


if __name__ == "__main__":
    main()
