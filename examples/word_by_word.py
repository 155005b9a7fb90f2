"""Attention for one word, then for all words, then with two heads: every way gives the same numbers.

    python examples/word_by_word.py                # the numbers
    python examples/word_by_word.py --out FOLDER   # and a picture of each stage

The sentence has four words, and each word has a vector of six numbers. Nothing is trained: vectors and matrices are
drawn at random once, with one decimal, so that every step can be checked with pencil and paper.
"""

import sys
from pathlib import Path

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.nn import attention, sinusoidal
from tinygrad_mha.programs import ending_quietly, make_parser

SENTENCE = ["we", "see", "the", "sea"]
WIDTH, HEAD = 6, 3


def make_matrix(rng, rows, columns, name):
    """Return a random parameter whose numbers have one decimal."""
    return tg.Tensor(rng.integers(-9, 10, (rows, columns)) / 10, requires_grad=True, name=name)


def make_parameters(seed=0):
    """Return all matrices: the word vectors E, W_Q W_K W_V, two further ones for each of them, and W_O."""
    rng = np.random.default_rng(seed)
    shapes = {"E": (len(SENTENCE), WIDTH), "W_Q": (WIDTH, WIDTH), "W_K": (WIDTH, WIDTH), "W_V": (WIDTH, WIDTH)}
    shapes |= {f"W_{x}{i}": (WIDTH, HEAD) for i in (1, 2) for x in "QKV"}
    shapes["W_O"] = (2 * HEAD, WIDTH)
    return {name: make_matrix(rng, *shape, name) for name, shape in shapes.items()}


def embed_sentence(p):
    """1. Add the sinusoids of its position to each word's vector: X (4, 6)."""
    positions = tg.Tensor(sinusoidal(np.arange(len(SENTENCE)), WIDTH), name="P")
    return (p["E"] + positions).named("X")


def attend_from_one_word(p, X, i=0):
    """2. to 4. Compute the query of word i, the keys and values of all words, and their weighted sum A_i (1, 6)."""
    n = len(SENTENCE)
    x = [X[j : j + 1].named(f"x_{j + 1}") for j in range(n)]
    q = (x[i] @ p["W_Q"]).named(f"q_{i + 1}")
    k = [(x[j] @ p["W_K"]).named(f"k_{j + 1}") for j in range(n)]
    v = [(x[j] @ p["W_V"]).named(f"v_{j + 1}") for j in range(n)]
    products = [(q @ k[j].mT).named(f"q_{i + 1}·k_{j + 1}") for j in range(n)]
    scores = tg.ops.scale(tg.ops.concat(products, axis=-1), by=WIDTH**-0.5).named(f"scores_{i + 1}")
    weights = scores.softmax().named(f"S_{i + 1}")
    parts = [(weights[:, j : j + 1] * v[j]).named(f"weighted v_{j + 1}") for j in range(n)]
    A = parts[0]
    for part in parts[1:]:
        A = A + part
    return {"q": q, "k": k, "v": v, "products": products, "weights": weights, "A": A.named(f"A_{i + 1}")}


def attend_from_all_words(p, X):
    """5. Compute the same for all words at once: A = softmax(Q K^T / sqrt(6)) V, (4, 6)."""
    Q, K, V = ((X @ p[f"W_{x}"]).named(x) for x in "QKV")
    A, steps = attention(Q, K, V, trace=True)
    steps.scores.named("scores")
    steps.weights.named("S")
    return {"Q": Q, "K": K, "V": V, "S": steps.weights, "A": A.named("A")}


def attend_with_two_heads(p, Q, K, V):
    """6. Multiply Q, K and V by two further matrices each, and attend with each pair: H_1 and H_2, (4, 3) each."""
    heads = []
    for i in (1, 2):
        q, k, v = ((M @ p[f"W_{x}{i}"]).named(f"{x}_{i}") for x, M in zip("QKV", (Q, K, V), strict=True))
        heads.append(attention(q, k, v).named(f"H_{i}"))
    return heads


def attend_with_combined_matrices(p, X):
    """Compute the same heads from X directly: X W_Q W_Q1 = X (W_Q W_Q1), so two matrices can be stored as one."""
    heads = []
    for i in (1, 2):
        q, k, v = (X @ (p[f"W_{x}"] @ p[f"W_{x}{i}"]).named(f"W_{x} W_{x}{i}") for x in "QKV")
        heads.append(attention(q, k, v).named(f"H_{i}"))
    return heads


def combine_heads(p, heads):
    """7. Concatenate the heads and multiply by W_O: Y (4, 6), the shape of X."""
    return (tg.ops.concat(heads, axis=-1).named("Concat") @ p["W_O"]).named("Y")


def run_all_stages(seed=0):
    """Return a dict with the tensors of every stage."""
    p = make_parameters(seed)
    X = embed_sentence(p)
    words = [attend_from_one_word(p, X, i) for i in range(len(SENTENCE))]
    whole = attend_from_all_words(p, X)
    heads = attend_with_two_heads(p, whole["Q"], whole["K"], whole["V"])
    combined = attend_with_combined_matrices(p, X)
    Y = combine_heads(p, heads)
    return {"p": p, "X": X, "words": words, "whole": whole, "heads": heads, "combined": combined, "Y": Y}


def compare(a, b):
    """Return the largest difference, and the same in units in the last place of the largest value."""
    gap = np.abs(a - b).max()
    return gap, gap / np.spacing(max(np.abs(a).max(), np.abs(b).max()))


def print_report(run):
    def show(tensor):
        return np.array2string(tensor.numpy(), precision=3, suppress_small=True)

    first, whole = run["words"][0], run["whole"]
    print(f"X, one row for each of {SENTENCE}: its vector plus its position\n{show(run['X'])}\n")
    print(f"q_1, the query of {SENTENCE[0]!r}: x_1 W_Q\n{show(first['q'])}\n")
    for word, k, product in zip(SENTENCE, first["k"], first["products"], strict=True):
        print(f"  times the key of {word!r:6} {show(k)}: {product.item():7.3f}")
    print(f"\nS_1, the weights: these products divided by sqrt(6), then softmax\n{show(first['weights'])}\n")
    print(f"A_1, the sum of the four values with these weights\n{show(first['A'])}\n")
    rows = np.concatenate([word["A"].numpy() for word in run["words"]])
    print(f"A_1 to A_4, each computed in this way\n{np.array2string(rows, precision=3)}\n")
    gap, units = compare(rows, whole["A"].numpy())
    print(f"A = softmax(Q K^T / sqrt(6)) V\n{show(whole['A'])}")
    print(f"differs from the rows above by {gap:.1e}, {units:.0f} units in the last place\n")
    for i, (head, combined) in enumerate(zip(run["heads"], run["combined"], strict=True), 1):
        gap, units = compare(head.numpy(), combined.numpy())
        print(f"H_{i}, from Q W_Q{i}, K W_K{i} and V W_V{i}\n{show(head)}")
        print(f"differs from X (W_Q W_Q{i}) ... by {gap:.1e}, {units:.0f} units in the last place\n")
    print(f"Y = [H_1 H_2] W_O\n{show(run['Y'])}")


def save_pictures(run, folder):
    """Write a picture of each stage, or DOT text if no Graphviz is installed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stages = {
        "1_words_and_positions": run["X"],
        "2_products_of_one_word": run["words"][0]["products"],
        "3_result_of_one_word": run["words"][0]["A"],
        "4_all_words": run["whole"]["A"],
        "5_two_heads": run["heads"],
        "6_combined_matrices": run["combined"],
        "7_output": run["Y"],
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
    with ending_quietly():
        parser = make_parser(__doc__)
        parser.add_argument("--out", metavar="FOLDER", help="draw every stage into this folder")
        args = parser.parse_args()
        run = run_all_stages()
        print_report(run)
        if args.out:
            save_pictures(run, args.out)
