"""The pictures of the ladder: accuracy by length, and which source words each target word looked at."""

import sys
from pathlib import Path

import numpy as np

import tinygrad_mha as tg

# Whichever of these is installed is used for Chinese characters.
CHINESE_FONTS = [
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",  # the same outlines in one file; matplotlib knows the file by its first name
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
    """There is no font with Chinese characters."""


def pyplot():
    """matplotlib's pyplot, drawing to files; None with a hint where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        print('no pictures: they need the extra "plot": pip install "tinygrad_mha[plot]"', file=sys.stderr)
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def chinese_font():
    """The name of an installed font with Chinese characters.

    Raises:
        MissingFontError: there is none; it says what to install.
    """
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    for name in CHINESE_FONTS:
        if name in installed:
            return name
    raise MissingFontError(
        "no font with Chinese characters is installed: install Noto Sans CJK (Debian and Ubuntu: "
        "apt-get install fonts-noto-cjk), or any of " + ", ".join(CHINESE_FONTS[4:]) + ". If you did so just now, "
        "matplotlib's list of fonts may be older: remove its folder fontlist*.json in "
        "matplotlib.get_cachedir()"
    )


def accuracy_by_length(rows, path):
    """Curves of exact match over the length of the number, a line for each rung."""
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    # Dark to light and of different dashes, so that the lines are told apart without colours.
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.92, len(rows)))
    for i, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        shares = [100 * share for share in row.by_kind.values()]
        style = ("-", "--", "-.", ":")[i % 4]
        label = f"{row.rung}) {row.title}"
        axes.plot(list(row.by_kind), shares, style, color=colour, marker="osD^vXPh"[i % 8], label=label)
    axes.set_ylim(-3, 103)
    axes.set_ylabel("exact match, %")
    axes.set_title("Numbers that were never seen, by their length")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save(plt, figure, path)


@tg.no_grad
def alignment(model, corpus, sentences, path):
    """The last cross-attention, the mean over its heads: a row for each word written, a column for each word read."""
    plt = pyplot()
    if plt is None:
        return
    font = chinese_font()
    figure, several = plt.subplots(1, len(sentences), figsize=(5.2 * len(sentences), 5.4), layout="constrained")
    for axes, words in zip(np.atleast_1d(several), sentences, strict=True):
        src = np.array(corpus.source.encode(words))
        answer = model.generate(src, max_new_tokens=corpus.max_len - 1)  # which is read again, behind `start`
        read = np.concatenate([[model.start], answer])
        _, trace = model(src, read, trace=True)
        weights = trace.cross[-1].weights.numpy()[0].mean(axis=0)
        axes.imshow(weights, cmap="Purples", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(words)), words, rotation=60, ha="right")
        # Row i is where word i is chosen, having read those before it.
        axes.set_yticks(range(len(read)), [*corpus.target.decode(answer), "end"], fontfamily=[font, "DejaVu Sans"])
        axes.set_title("".join(corpus.target.decode(answer)), fontfamily=[font, "DejaVu Sans"])
    figure.supylabel("written")
    save(plt, figure, path)


def save(plt, figure, path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"wrote {path}")
