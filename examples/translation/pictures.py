"""The pictures of the ladder: accuracy by length, and the attention from target words to source words."""

import sys
from pathlib import Path

import numpy as np

import tinygrad_mha as tg


def import_pyplot():
    """Return matplotlib.pyplot with a backend for files, or None and print a hint if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        print('no pictures: matplotlib is not installed: pip install "tinygrad_mha[plot]"', file=sys.stderr)
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_accuracy(rows, path):
    """Draw exact match by the length of the number, one line per rung."""
    plt = import_pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    # Different brightness, dashes and markers, so that the lines can be told apart without colour.
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.92, len(rows)))
    for i, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        accuracies = [100 * accuracy for accuracy in row.by_group.values()]
        style = ("-", "--", "-.", ":")[i % 4]
        label = f"{row.rung}) {row.title}"
        axes.plot(list(row.by_group), accuracies, style, color=colour, marker="osD^vXPh"[i % 8], label=label)
    axes.set_ylim(-3, 103)
    axes.set_ylabel("exact match, %")
    axes.set_title("Numbers that are not in the training set, by length")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save(plt, figure, path)


@tg.no_grad
def draw_alignments(model, corpus, sentences, path):
    """Draw the last cross-attention, averaged over its heads, one picture for each sentence: rows are written words."""
    if import_pyplot() is None:
        return
    for i, words in enumerate(sentences, 1):
        src = np.array(corpus.source.encode(words))
        answer = model.generate(src, max_new_tokens=corpus.max_len - 1)  # read below, after `start`
        _, trace = model(src, np.concatenate([[model.start], answer]), trace=True)
        weights = trace.cross[-1].weights.numpy()[0].mean(axis=0)
        written = [*corpus.target.decode(answer), "end"]  # row i is the step that predicts word i
        file = path.with_stem(f"{path.stem}_{i}")
        tg.viz.heatmap(weights, written, keys=words, path=file, axes_names=("written", "read"))
        print(f"wrote {file}")


def save(plt, figure, path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"wrote {path}")
