"""What all plots share: the figure, its fonts and colours. Needs matplotlib.

Figures are made without pyplot, so nothing opens a window or keeps a figure alive.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

from tinygrad_mha.files import replacing
from tinygrad_mha.viz import fonts
from tinygrad_mha.viz.diagram.heat import INK, PALETTES

try:
    from matplotlib import font_manager, rcParams
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.text import Text
except ImportError:  # `new_plot` says so
    Figure = object  # type: ignore[assignment, misc]

__all__ = ["Plot", "add_scale", "finish_plot", "make_colormap", "new_plot", "text_color"]


class Plot(Figure):
    """A matplotlib Figure that notebooks display and `save` writes."""

    def savefig(self, *args: Any, **options: Any) -> None:
        """As matplotlib's, without a warning for each missing character: `choose_fonts` has warned once."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
            super().savefig(*args, **options)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plot in the format of the suffix (png, svg, pdf) and return the path."""
        path = Path(path)
        with replacing(path) as temporary:
            self.savefig(temporary, format=path.suffix[1:] or "png")
        return path

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def new_plot(width: float, height: float) -> Plot:
    """An empty plot, in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if Figure is object:
        raise ImportError('plots need matplotlib, which is not installed: pip install "tinygrad_mha[plot]"')
    return Plot(figsize=(width, height), dpi=130, layout="constrained")


def finish_plot(plot: Plot, path: str | os.PathLike[str] | None) -> Plot:
    """Disable mathtext, choose fonts that cover the text, and save the plot if `path` is given."""
    texts = plot.findobj(Text)
    families = choose_fonts("".join(text.get_text() for text in texts))
    for text in texts:
        text.set_parse_math(False)
        text.set_fontfamily(families)
    if path is not None:
        plot.save(path)
    return plot


def choose_fonts(text: str) -> list[str]:
    """The usual fonts and, if the text needs them, those with Chinese characters."""
    usual = list(rcParams["font.family"])
    if not fonts.has_chinese(text):
        return usual
    wanted = [name.strip() for name in fonts.CHINESE_FONTS.split(",")]
    known = font_manager.fontManager
    own = fonts.chinese_font()
    if own is not None and str(own) not in {font.fname for font in known.ttflist}:
        known.addfont(own)
    if {font.name for font in known.ttflist}.isdisjoint(wanted):  # matplotlib's list may be older than the font
        for file in font_manager.findSystemFonts():
            if "cjk" in Path(file).name.lower() or "wqy" in Path(file).name.lower():
                known.addfont(file)
    installed = {font.name for font in known.ttflist}
    chinese = [name for name in wanted if name in installed]
    if not chinese:
        fonts.warn_of_boxes(stacklevel=4)
    return usual + chinese


def make_colormap(name: str) -> Any:
    """A palette of the graphs as a colour map. NaN is black, values above the range are white."""
    low, zero, high = (tuple(part / 255 for part in color) for color in PALETTES[name])
    colors = [zero, high] if low == zero else [low, zero, high]
    return LinearSegmentedColormap.from_list(name, colors).with_extremes(bad=INK, over="white")


def text_color(weight: float) -> str:
    """Text colour that is legible on the cell of a weight (NaN included)."""
    return "white" if not weight < 0.55 else INK


def add_scale(plot: Plot, image: Any, axes: Any, title: str, shrink: float, pad: float) -> None:
    """A colour bar beside the image."""
    bar = plot.colorbar(image, ax=axes, shrink=min(1.0, shrink), pad=pad)
    bar.set_label(title, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_linewidth(0.5)
