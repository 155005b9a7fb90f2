"""Tables and text blocks as HTML, by which notebooks show results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["make_pre", "make_table"]

# The first two have no Chinese characters: a browser takes those from the fonts that follow.
MONOSPACE = "Menlo,Consolas,'Noto Sans Mono CJK SC','Sarasa Mono SC','DejaVu Sans Mono',SimSun,monospace"


def make_table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A title and a table with left-aligned cells. `rows` are HTML: escape what comes from a person; the rest is text.

    Example:
        >>> make_table("2 < 3", [["a", "<b>b</b>"]])
        '<div>2 &lt; 3</div><table><tr><td style="text-align:left">a</td><td ...><b>b</b></td></tr></table>'
    """
    cells = [["<th>" + escape(name) + "</th>" for name in header]] if header else []
    cells += [[f'<td style="text-align:left">{cell}</td>' for cell in row] for row in rows]
    lines = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    # Not as a caption, which would be as narrow as the table.
    return f"<div>{escape(title)}</div><table>{lines}</table>"


def make_pre(text: str, height: str = "") -> str:
    """Text whose columns stay aligned: long lines scroll, and with a `height` ("30em") long texts do too.

    Example:
        >>> make_pre("1 < 2")
        '<pre style="font-family:...;overflow:auto">1 &lt; 2</pre>'
    """
    style = f"font-family:{MONOSPACE};line-height:1.3;overflow:auto" + (f";max-height:{height}" if height else "")
    return f'<pre style="{style}">{escape(text)}</pre>'
