"""The heat table: a small matrix as an HTML-like table of coloured cells; its numbers, and the colours themselves.

Values go from blue through light grey to orange, gradients from green to purple, both symmetric about 0; attention
weights go from grey to purple on the fixed scale 0 to 1. People with red-green blindness can tell the pairs apart. Zero
is light grey, not white, so that the cell of a zero is visible. Colours grow a little faster than the numbers (power
0.8), which keeps small ones visible.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinygrad_mha.viz.diagram.picture import Table

__all__ = [
    "ABSENT",
    "COLOURS",
    "INK",
    "MOST_COLUMNS",
    "NOT_A_NUMBER",
    "PALETTES",
    "STEPS",
    "colour_of",
    "common_factor",
    "heat_table",
]
__all__ += ["largest_magnitude", "legend_bar", "write_factor", "write_value"]

ZERO = (238, 240, 242)
PALETTES = {  # the colours of the lowest value, of 0, and of the highest
    "value": ((33, 102, 172), ZERO, (214, 96, 30)),
    "attention": (ZERO, ZERO, (84, 39, 143)),
    "gradient": ((27, 120, 55), ZERO, (146, 48, 143)),
}
INK, PAPER, ABSENT = "#1b1f24", "#ffffff", "#6e7781"
BLACK = "#000000"
NOT_A_NUMBER = "#1b1f24"

MOST_COLUMNS = 16  # of numbers beside each other
CELL_SIDES = ((24, 11), (32, 9), (48, 7), (64, 5))  # (most rows or columns, points of a cell)
LEGEND_STEPS = 9
STEPS = 64  # shades on each side of 0: more than an eye tells apart
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def heat_table(table: Table, other: Table | None = None) -> str:
    """The matrices of a tensor, up to four in a row. The cells of a value and its gradient `other` have one width."""
    size = max(cell_size(t)[0] for t in (table, other or table)), cell_size(table)[1]
    if len(table.data) == 1:
        return draw_matrix(table.data[0], table, size)
    panels = [f"<TD>{draw_matrix(panel, table, size)}</TD>" for panel in table.data]
    n = min(4, max(1, MOST_COLUMNS // table.data.shape[-1])) if table.numbers else 4
    rows = "".join(f"<TR>{''.join(panels[i : i + n])}</TR>" for i in range(0, len(panels), n))
    return f'<TABLE ALIGN="LEFT" BORDER="0" CELLBORDER="0" CELLSPACING="3" CELLPADDING="0">{rows}</TABLE>'


def draw_matrix(matrix: np.ndarray, table: Table, size: tuple[int, int]) -> str:
    """One matrix of a table; colours and numbers are scaled for all of its matrices together."""
    (rows, columns), (width, height) = matrix.shape, size
    most, factor = largest_magnitude(table.data), common_factor(table.data)
    cell = f'<TD FIXEDSIZE="TRUE" WIDTH="{width}" HEIGHT="{height}" BGCOLOR='
    body = []
    for row in matrix.tolist():
        body.append("<TR>")
        for x in row:
            colour, ink = colour_of(x, most, table.palette)
            body.append(f'{cell}"{colour}">{cell_text(x, factor, ink, table.numbers, size)}</TD>')
        body.append("</TR>")
    extent = f'FIXEDSIZE="TRUE" WIDTH="{columns * (width + 1) + 1}" HEIGHT="{rows * (height + 1) + 1}"'
    look = 'BORDER="0" CELLBORDER="0" CELLSPACING="1" CELLPADDING="0"'
    return f'<TABLE ALIGN="LEFT" {extent} {look}>{"".join(body)}</TABLE>'


def cell_size(table: Table) -> tuple[int, int]:
    """Width and height of a cell: smaller for larger matrices, and lower in a second table."""
    rows, columns = table.data.shape[-2:]
    if table.numbers:
        factor = common_factor(table.data)
        widest = max((len(write_value(x, factor)) for x in table.data.ravel().tolist()), default=1)
        return max(34, 6 * widest + 4), 15 if table.second else 17
    longest = max(rows, columns)
    side = next((points for most, points in CELL_SIDES if longest <= most), 3)
    if rows > 12:
        return side, min(side, 7)
    return side, side - 2 if table.second else side


def cell_text(x: float, factor: int, ink: str, with_number: bool, size: tuple[int, int]) -> str:
    """The text of a cell: its number; without numbers a sign for nan, infinities, and negative numbers.

    The sign of a number is legible without its colour.
    """
    if with_number:
        text, points = write_value(x, factor), min(9, size[1] - 1)
    elif abs(x) < np.inf:
        text, points = "−" if x < 0 else "", min(size) - 1
    else:
        text, points = {"nan": "?", "∞": "∞", "−∞": "×"}[write_value(x)], max(5, size[1] - 2)
    return f'<FONT COLOR="{ink}" POINT-SIZE="{points}">{text}</FONT>' if text else ""


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def largest_magnitude(data: np.ndarray) -> float:
    """The largest |x| of the finite elements, which gets the strongest colour."""
    finite = data[np.isfinite(data)] if data.dtype.kind == "f" else data
    return float(np.abs(finite).max()) if finite.size else 0.0


def common_factor(data: np.ndarray) -> int:
    """The power of ten that is taken out of all numbers of a table: a multiple of 3, and 0 for ordinary numbers."""
    most = largest_magnitude(data) if data.dtype.kind == "f" else 0.0
    return 0 if most == 0 or 0.01 <= most < 1000 else max(3 * math.floor(math.log10(most) / 3), -300)


def write_factor(factor: int) -> str:
    """×10⁻³, or nothing for 10⁰."""
    return f"×10{str(factor).translate(SUPERSCRIPTS)}" if factor else ""


def write_value(x: float, factor: int = 0) -> str:
    """A number less the power of ten `factor`, with two or three significant digits and a real minus sign.

    Integers keep all of their digits, and so do numbers of up to 99999. An exact zero is 0.

    Example:
        >>> [write_value(x) for x in (0.0, -1.234, 0.0042, 1234.5, 3)], write_value(0.0042, -3)
        (['0', '−1.23', '0.0042', '1234', '3'], '4.20')
    """
    if x != x or abs(x) == np.inf:
        return "nan" if x != x else "∞" if x > 0 else "−∞"
    if x == 0 or isinstance(x, (int, bool)):
        return str(int(x)).replace("-", "−")
    scaled = x / 10.0**factor
    size = abs(scaled)
    if 0.001 <= size < 99999.5:
        decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.0995 else 3 if size >= 0.00995 else 4
        text = f"{scaled:.{decimals}f}"
    else:
        digits, exponent = f"{x:.1e}".split("e")
        text = f"{digits}e{int(exponent) - factor}"  # the quotient may be 0: 1e-300 beside 1e300
    return text.replace("-", "−")


# --------------------------------------------------------------------------------------------------------------------
# Colours


def colour_of(x: float, most: float, palette: str) -> tuple[str, str]:
    """The colour of a cell and that of its text. `most`: the number that gets the strongest colour."""
    if x != x or x == np.inf:
        return NOT_A_NUMBER, PAPER
    if x == -np.inf:
        return PAPER, ABSENT
    part = min(max(x, 0.0), 1.0) if palette == "attention" else x / most if most else 0.0
    step = round(abs(part) ** 0.8 * STEPS)
    return COLOURS[palette][step if part >= 0 else -step]


def mix(low: tuple[int, ...], high: tuple[int, ...], part: float) -> tuple[str, str]:
    """A colour between two others, and black or white, whichever has the stronger contrast: at least 4.5 to 1."""
    rgb = [round(x + (y - x) * part) for x, y in zip(low, high, strict=True)]
    colour = "#" + "".join(f"{channel:02x}" for channel in rgb)
    return colour, max((BLACK, PAPER), key=lambda ink: contrast(ink, colour))


def contrast(a: str, b: str) -> float:
    """The contrast ratio of two colours, from 1 to 21, as the Web Content Accessibility Guidelines 2 define it."""
    low, high = sorted(map(relative_luminance, (a, b)))
    return (high + 0.05) / (low + 0.05)


def relative_luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def make_shades(low: Any, zero: Any, high: Any) -> dict[int, tuple[str, str]]:
    up = {i: mix(zero, high, i / STEPS) for i in range(STEPS + 1)}
    return up | {-i: mix(zero, low, i / STEPS) for i in range(1, STEPS + 1)}


COLOURS = {name: make_shades(*anchors) for name, anchors in PALETTES.items()}


def legend_bar(palette: str) -> str:
    """The colours of a palette in a row of LEGEND_STEPS cells."""
    low = 0 if palette == "attention" else -STEPS
    shades = [COLOURS[palette][round(low + (STEPS - low) * i / (LEGEND_STEPS - 1))][0] for i in range(LEGEND_STEPS)]
    return "".join(f'<TD FIXEDSIZE="TRUE" WIDTH="9" HEIGHT="9" BGCOLOR="{shade}"></TD>' for shade in shades)
