"""The pictures of the ladder: accuracy by length, and the attention from target words to source words."""

import sys
from pathlib import Path

import numpy as np

import tinygrad_mha as tg

# Fonts with Chinese characters; the first that is installed is used.
CHINESE_FONTS = [
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",  # matplotlib knows the font collection by this name
    "Noto Serif CJK SC",
    "Noto Serif CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "AR PL UMing CN",
    "PingFang SC",
    "Heiti SC",
    "Microsoft YaHei",
    "SimHei",
]


class MissingFontError(RuntimeError):
    """No font with Chinese characters is installed."""


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


def find_chinese_font():
    """Return the name of an installed font with Chinese characters.

    Raises:
        MissingFontError: none is installed; the message says what to install.
    """
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    for name in CHINESE_FONTS:
        if name in installed:
            return name
    raise MissingFontError(
        "no font with Chinese characters is installed: install Noto Sans CJK (Debian and Ubuntu: "
        "apt-get install fonts-noto-cjk), or one of " + ", ".join(CHINESE_FONTS[4:]) + ". If it is installed already, "
        "matplotlib's list of fonts is out of date: delete fontlist*.json in matplotlib.get_cachedir()"
    )


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
def draw_alignment(model, corpus, sentences, path):
    """Draw the last cross-attention, averaged over its heads: rows are target words, columns source words."""
    plt = import_pyplot()
    if plt is None:
        return
    font = find_chinese_font()
    figure, panels = plt.subplots(1, len(sentences), figsize=(5.2 * len(sentences), 5.4), layout="constrained")
    for axes, words in zip(np.atleast_1d(panels), sentences, strict=True):
        src = np.array(corpus.source.encode(words))
        answer = model.generate(src, max_new_tokens=corpus.max_len - 1)  # read below, after `start`
        read = np.concatenate([[model.start], answer])
        _, trace = model(src, read, trace=True)
        weights = trace.cross[-1].weights.numpy()[0].mean(axis=0)
        axes.imshow(weights, cmap="Purples", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(words)), words, rotation=60, ha="right")
        # Row i is the step that predicts word i.
        axes.set_yticks(range(len(read)), [*corpus.target.decode(answer), "end"], fontfamily=[font, "DejaVu Sans"])
        axes.set_title("".join(corpus.target.decode(answer)), fontfamily=[font, "DejaVu Sans"])
    figure.supylabel("written")
    save(plt, figure, path)


def save(plt, figure, path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"wrote {path}")
