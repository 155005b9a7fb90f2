"""Attention for one word, then for all, then with two heads: the same numbers every time.

    python examples/word_by_word.py                # the numbers
    python examples/word_by_word.py --out FOLDER   # and a picture of each stage

The sentence has four words, and each has a vector of six numbers. Nothing is trained here: the vectors and matrices are
drawn once and rounded, so that everything can be followed with pencil and paper.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.nn import attention, sinusoidal

SENTENCE = ["we", "see", "the", "sea"]
WIDTH, HEAD = 6, 3


def drawn(rng, rows, columns, name):
    """A small matrix with one decimal, a parameter."""
    return tg.Tensor(rng.integers(-9, 10, (rows, columns)) / 10, requires_grad=True, name=name)


def parameters(seed=0):
    """All matrices of this page: the word vectors, W_Q W_K W_V, two further ones for each of them, and W_O."""
    rng = np.random.default_rng(seed)
    shapes = {"E": (len(SENTENCE), WIDTH), "W_Q": (WIDTH, WIDTH), "W_K": (WIDTH, WIDTH), "W_V": (WIDTH, WIDTH)}
    shapes |= {f"W_{x}{i}": (WIDTH, HEAD) for i in (1, 2) for x in "QKV"}
    shapes["W_O"] = (2 * HEAD, WIDTH)
    return {name: drawn(rng, *shape, name) for name, shape in shapes.items()}


def words_with_places(p):
    """1. Each word's vector and, added to it, the sinusoids of its place: (4, 6)."""
    places = tg.Tensor(sinusoidal(np.arange(len(SENTENCE)), WIDTH), name="P")
    return (p["E"] + places).named("X")


def one_word(p, X, i=0):
    """2. and 3. What word i asks (q), what every word offers (k) and says (v), and the weighted sum A_i: (1, 6)."""
    n = len(SENTENCE)
    x = [X[j : j + 1].named(f"x_{j + 1}") for j in range(n)]
    q = (x[i] @ p["W_Q"]).named(f"q_{i + 1}")
    k = [(x[j] @ p["W_K"]).named(f"k_{j + 1}") for j in range(n)]
    v = [(x[j] @ p["W_V"]).named(f"v_{j + 1}") for j in range(n)]
    products = [(q @ k[j].mT).named(f"q_{i + 1}·k_{j + 1}") for j in range(n)]
    scores = tg.ops.scale(tg.ops.concat(products, axis=-1), by=WIDTH**-0.5).named(f"scores_{i + 1}")
    weights = scores.softmax().named(f"S_{i + 1}")
    parts = [(weights[:, j : j + 1] * v[j]).named(f"share of v_{j + 1}") for j in range(n)]
    A = parts[0]
    for part in parts[1:]:
        A = A + part
    return {"q": q, "k": k, "v": v, "products": products, "weights": weights, "A": A.named(f"A_{i + 1}")}


def all_words(p, X):
    """5. The same for all words at once: A = softmax(Q K^T / sqrt(6)) V, (4, 6)."""
    Q, K, V = ((X @ p[f"W_{x}"]).named(x) for x in "QKV")
    A, steps = attention(Q, K, V, trace=True)
    steps.scores.named("scores")
    steps.weights.named("S")
    return {"Q": Q, "K": K, "V": V, "S": steps.weights, "A": A.named("A")}


def two_heads(p, Q, K, V):
    """6. Two further matrices on each of Q, K and V, and attention within each pair: H_1 and H_2, (4, 3) each."""
    heads = []
    for i in (1, 2):
        q, k, v = ((M @ p[f"W_{x}{i}"]).named(f"{x}_{i}") for x, M in zip("QKV", (Q, K, V), strict=True))
        heads.append(attention(q, k, v).named(f"H_{i}"))
    return heads


def direct_heads(p, X):
    """The same heads from X directly: X W_Q W_Q1 is X (W_Q W_Q1), so two matrices in a row are one."""
    heads = []
    for i in (1, 2):
        q, k, v = (X @ (p[f"W_{x}"] @ p[f"W_{x}{i}"]).named(f"W_{x} W_{x}{i}") for x in "QKV")
        heads.append(attention(q, k, v).named(f"H_{i}"))
    return heads


def together(p, heads):
    """7. Side by side, and through W_O: (4, 6) again, the shape of X."""
    return (tg.ops.concat(heads, axis=-1).named("Concat") @ p["W_O"]).named("Y")


def everything(seed=0):
    """All stages: a dict with the tensors of each."""
    p = parameters(seed)
    X = words_with_places(p)
    words = [one_word(p, X, i) for i in range(len(SENTENCE))]
    whole = all_words(p, X)
    heads = two_heads(p, whole["Q"], whole["K"], whole["V"])
    direct = direct_heads(p, X)
    return {"p": p, "X": X, "words": words, "whole": whole, "heads": heads, "direct": direct, "Y": together(p, heads)}


def difference(a, b):
    """The largest difference, and that as a multiple of the spacing of numbers around the largest value."""
    gap = np.abs(a - b).max()
    return gap, gap / np.spacing(max(np.abs(a).max(), np.abs(b).max()))


def report(run):
    def show(tensor):
        return np.array2string(tensor.numpy(), precision=3, suppress_small=True)

    first, whole = run["words"][0], run["whole"]
    print(f"X, one row for each of {SENTENCE}: its vector plus its place\n{show(run['X'])}\n")
    print(f"q_1, what {SENTENCE[0]!r} asks for: x_1 W_Q\n{show(first['q'])}\n")
    for word, k, product in zip(SENTENCE, first["k"], first["products"], strict=True):
        print(f"  with k of {word!r:6} {show(k)}: {product.item():7.3f}")
    print(f"\nS_1, their shares after dividing by the root of 6 and the softmax\n{show(first['weights'])}\n")
    print(f"A_1, the four values in these shares\n{show(first['A'])}\n")
    rows = np.concatenate([word["A"].numpy() for word in run["words"]])
    print(f"The other words in the same way, one below the other\n{np.array2string(rows, precision=3)}\n")
    gap, units = difference(rows, whole["A"].numpy())
    print(f"A = softmax(Q K^T / sqrt(6)) V\n{show(whole['A'])}")
    print(f"differs from the rows above by {gap:.1e}, {units:.0f} units in the last place\n")
    for i, (ours, direct) in enumerate(zip(run["heads"], run["direct"], strict=True), 1):
        gap, units = difference(ours.numpy(), direct.numpy())
        print(f"H_{i}, from Q W_Q{i}, K W_K{i} and V W_V{i}\n{show(ours)}")
        print(f"differs from X (W_Q W_Q{i}) ... by {gap:.1e}, {units:.0f} units in the last place\n")
    print(f"Y = [H_1 H_2] W_O\n{show(run['Y'])}")


def pictures(run, folder):
    """A picture of each stage; DOT text where no Graphviz is installed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stages = {
        "1_words_with_places": run["X"],
        "2_one_word_asks": run["words"][0]["products"],
        "3_one_word_answered": run["words"][0]["A"],
        "4_all_words": run["whole"]["A"],
        "5_two_heads": run["heads"],
        "6_two_heads_directly": run["direct"],
        "7_together": run["Y"],
    }
    for name, tensors in stages.items():
        graph = tg.graph(tensors, grads=False)
        try:
            graph.save(folder / f"{name}.svg")
        except tg.viz.NoEngineError as error:
            print(f"{name}.dot instead of a picture: {error}", file=sys.stderr)
            (folder / f"{name}.dot").write_text(graph.dot, encoding="utf-8")
    print(f"\n{len(stages)} pictures are in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FOLDER", help="draw every stage into this folder")
    args = parser.parse_args()
    run = everything()
    report(run)
    if args.out:
        pictures(run, args.out)
