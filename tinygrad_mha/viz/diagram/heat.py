"""The heat table: a small matrix as an HTML-like table of coloured cells, and the colours themselves.

Values go from blue through light grey to orange, gradients from green to purple, both symmetric about 0; attention
weights from grey to purple on the fixed scale 0 to 1. The pairs are those that people with red-green blindness tell
apart. Zero is light grey, not white, so that a zero is seen as a cell. Colours grow a little faster than the numbers
(power 0.8), which keeps small ones visible.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_mha.viz.diagram.picture import Table

ZERO = (238, 240, 242)
PALETTES = {  # the colours of the lowest value, of 0, and of the highest
    "value": ((33, 102, 172), ZERO, (214, 96, 30)),
    "attention": (ZERO, ZERO, (84, 39, 143)),
    "gradient": ((27, 120, 55), ZERO, (146, 48, 143)),
}
INK, PAPER, ABSENT = "#1b1f24", "#ffffff", "#8c959f"
NOT_A_NUMBER = "#1b1f24"

CELL_SIDES = ((24, 11), (32, 9), (48, 7), (64, 5))  # rows or columns, and the points that a cell gets then
STEPS = 64  # shades on each side of 0: more than an eye tells apart


def heat_table(table: Table) -> str:
    """The matrices of a tensor beside each other, four in a row, each cell one colour."""
    most, size = scale(table.data), cell_size(table)
    if len(table.data) == 1:
        return matrix(table.data[0], table, most, size)
    panels = [f"<TD>{matrix(panel, table, most, size)}</TD>" for panel in table.data]
    rows = "".join(f"<TR>{''.join(panels[i : i + 4])}</TR>" for i in range(0, len(panels), 4))
    return f'<TABLE ALIGN="LEFT" BORDER="0" CELLBORDER="0" CELLSPACING="3" CELLPADDING="0">{rows}</TABLE>'


def matrix(data: np.ndarray, table: Table, most: float, size: tuple[int, int]) -> str:
    """One matrix. `most` is the number that gets the strongest colour, `size` that of a cell."""
    (rows, columns), (width, height) = data.shape, size
    cell, numbers = f'<TD FIXEDSIZE="TRUE" WIDTH="{width}" HEIGHT="{height}" BGCOLOR=', shows_numbers(table)
    body = []
    for row in data.tolist():
        body.append("<TR>")
        for x in row:
            colour, ink = shade(x, most, table.palette)
            body.append(f'{cell}"{colour}">{inscription(x, ink, numbers, size)}</TD>')
        body.append("</TR>")
    extent = f'FIXEDSIZE="TRUE" WIDTH="{columns * (width + 1) + 1}" HEIGHT="{rows * (height + 1) + 1}"'
    look = 'BORDER="0" CELLBORDER="0" CELLSPACING="1" CELLPADDING="0"'
    return f'<TABLE ALIGN="LEFT" {extent} {look}>{"".join(body)}</TABLE>'


def shows_numbers(table: Table) -> bool:
    """Whether the numbers of a matrix are written out: up to 5 x 5, in the first table of a box."""
    return max(table.data.shape[-2:]) <= 5 and not table.second


def cell_size(table: Table) -> tuple[int, int]:
    """Width and height of a cell: smaller for larger matrices, and lower in a second table."""
    rows, columns = table.data.shape[-2:]
    if max(rows, columns) <= 5:
        longest = max((len(written(x)) for x in table.data.ravel().tolist()), default=1)
        return (max(34, 6 * longest + 4), 17) if shows_numbers(table) else (34, 9)
    longest = max(rows, columns)
    side = next((points for most, points in CELL_SIDES if longest <= most), 3)
    if rows > 12:
        return side, min(side, 7)
    return side, side - 2 if table.second else side


def scale(data: np.ndarray) -> float:
    """The number that gets the strongest colour."""
    finite = data[np.isfinite(data)] if data.dtype.kind == "f" else data
    return float(np.abs(finite).max()) if finite.size else 0.0


def shade(x: float, most: float, palette: str) -> tuple[str, str]:
    """The colour of a cell, and of the ink on it."""
    if x != x or x == np.inf:
        return NOT_A_NUMBER, PAPER
    if x == -np.inf:
        return PAPER, ABSENT
    part = min(max(x, 0.0), 1.0) if palette == "attention" else x / most if most else 0.0
    step = round(abs(part) ** 0.8 * STEPS)
    return COLOURS[palette][step if part >= 0 else -step]


def mixed(low: tuple[int, ...], high: tuple[int, ...], part: float) -> tuple[str, str]:
    """The colour between two others, and the ink that is read on it."""
    r, g, b = (round(x + (y - x) * part) for x, y in zip(low, high, strict=True))
    light = 0.299 * r + 0.587 * g + 0.114 * b
    return f"#{r:02x}{g:02x}{b:02x}", INK if light >= 140 else PAPER


def colours(low: Any, zero: Any, high: Any) -> dict[int, tuple[str, str]]:
    up = {i: mixed(zero, high, i / STEPS) for i in range(STEPS + 1)}
    return up | {-i: mixed(zero, low, i / STEPS) for i in range(1, STEPS + 1)}


COLOURS = {name: colours(*anchors) for name, anchors in PALETTES.items()}


def inscription(x: float, ink: str, numbers: bool, size: tuple[int, int]) -> str:
    """What is written in a cell: its number where numbers are shown, else only what is not finite."""
    if numbers or size[0] > 20:
        said, points = written(x), min(9, size[1] - 1)
        if not numbers and abs(x) < np.inf:
            return ""
    elif abs(x) < np.inf:
        return ""
    else:
        said, points = {"nan": "?", "∞": "∞", "−∞": "−"}[written(x)], max(5, size[1] - 2)
    return f'<FONT COLOR="{ink}" POINT-SIZE="{points}">{said}</FONT>'


def written(x: float) -> str:
    """Two decimals for ordinary numbers, whole numbers as they are, a real minus sign."""
    if x != x or abs(x) == np.inf:
        return "nan" if x != x else "∞" if x > 0 else "−∞"
    if isinstance(x, (int, bool)):
        return str(int(x)).replace("-", "−")
    if x == 0 or 0.005 <= abs(x) < 1000:
        return f"{x:.2f}".replace("-", "−")
    if abs(x) < 0.005:
        return "0.00" if x > 0 else "−0.00"
    return f"{x:.0e}".replace("e+0", "e").replace("e+", "e").replace("-", "−")


def legend_bar(palette: str, steps: int = 9) -> str:
    """The colours of a palette in a row."""
    low = 0 if palette == "attention" else -STEPS
    shades = [COLOURS[palette][round(low + (STEPS - low) * i / (steps - 1))][0] for i in range(steps)]
    return "".join(f'<TD FIXEDSIZE="TRUE" WIDTH="9" HEIGHT="9" BGCOLOR="{shade}"></TD>' for shade in shades)
