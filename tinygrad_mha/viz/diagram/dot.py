"""A picture as DOT, the language of Graphviz: pure text, the same for the same picture.

Rules that were found with four engines and a browser:

- One run of text per cell. If the font changes inside of a line, the parts drift apart in viewers that substitute it.
- The font is "Arial" and not a list of fonts. From a list, engines that only estimate widths take Times. Without
  Helvetica, Graphviz 2.43 takes a much wider font for it; Arial has a substitute of equal widths everywhere.
- No empty <FONT>: it is a syntax error, and the box shows its id only.
- remincross=false: when Graphviz 2.43 minimizes crossings a second time, it forgets the order of rows inside of frames.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tinygrad_mha.notation import write_number
from tinygrad_mha.viz.diagram import heat
from tinygrad_mha.viz.diagram.formulas import shorten
from tinygrad_mha.viz.diagram.picture import Cluster, Edge, Node, Picture, Table

__all__ = ["escape", "fit", "quote", "to_dot"]


class Look(NamedTuple):
    """The colours of the border and of the background of a kind of box."""

    border: str
    fill: str


FONT = "Arial"
GAP = "\u00a0"  # browsers leave out a space at the end of a text
LONGEST_TITLE = 36
LONGEST_LINE, LONGEST_TOOLTIP = 60, 400
GREY, WARNING, GRADIENT_INK = "#57606a", "#b3141f", "#7a3e7a"
LOOKS = {
    "input": Look("#0b6bcb", "#e8f2fd"),
    "parameter": Look("#8a5a10", "#fff6e0"),
    "attention": Look("#54278f", "#f5f0fb"),
    "output": Look("#1a7f37", "#e6f6ea"),
    "gradient": Look("#92308f", "#fcf3fc"),
    "op": Look("#57606a", "#ffffff"),
}
OVAL = Look("#6e7781", "#eef0f2")
EDGE_COLOURS = {
    "data": "#6e7781",
    "input": "#0b6bcb",
    "parameter": "#d4a72c",
    "residual": "#0b6bcb",
    "gradient": "#92308f",
    "recall": "#8c959f",
}
WEIGHTS = {"data": 3, "parameter": 2}  # Graphviz edge weights: data edges stay straightest
CHANGES = {"same": ("", GREY), "left": ("− ", "#cf222e"), "right": ("+ ", "#1a7f37")}


def to_dot(picture: Picture, direction: str = "TB") -> str:
    """The whole picture as DOT text."""
    lines = [*write_header(picture, direction), *write_boxes(picture, direction), *write_rows(picture, direction)]
    lines += write_arrows(picture, direction)
    return "\n".join(["digraph {", *("\t" + line for line in lines), "}", ""])


def write_boxes(picture: Picture, direction: str) -> list[str]:
    """The boxes in their frames. Iterative, so frames can be nested to any depth.

    From left to right, Graphviz stacks frames from the bottom up, so they are written in the opposite order.
    """
    inside: dict[str | None, list[str | Cluster]] = defaultdict(list)
    for node in picture.nodes:
        inside[node.cluster].append(write_node(node))
    for cluster in picture.clusters if direction == "TB" else picture.clusters[::-1]:
        inside[cluster.parent].append(cluster)
    lines: list[str] = []
    todo: list[tuple[int, str | Cluster]] = [(0, item) for item in reversed(inside[None])]
    while todo:
        depth, item = todo.pop()
        tabs = "\t" * depth
        if isinstance(item, str):
            lines.append(tabs + item)
            continue
        lines += [f"{tabs}subgraph {item.id} {{", f"{tabs}\t{cluster_attributes(item)}"]
        todo.append((depth, "}"))
        todo += [(depth + 1, inner) for inner in reversed(inside[item.id])]
    return lines


def write_header(picture: Picture, direction: str) -> list[str]:
    """The attributes of the graph, of all nodes and of all edges."""
    label = write_legend(picture)
    return [
        f'graph [bgcolor=white fontname="{FONT}" fontsize=12 {label}labelloc=b newrank=true nodesep=0.25 pad=0.15 '
        f"rankdir={direction} ranksep=0.5 remincross=false splines=spline]",
        f'node [fontname="{FONT}" shape=plain]',
        f'edge [arrowsize=0.6 color="{EDGE_COLOURS["data"]}" fontname="{FONT}" fontsize=10 penwidth=1.2]',
    ]


# --------------------------------------------------------------------------------------------------------------------
# Boxes


def write_node(node: Node) -> str:
    """The DOT statement of a box."""
    if node.kind == "plus":
        border = CHANGES[node.change][1]
        label = table([row(font("+", 14, heat.INK), 'WIDTH="20" ALIGN="CENTER"')], border, heat.PAPER, padding=0)
    elif node.kind == "operation":
        return (
            f"{node.id} [shape=oval style=filled fillcolor={quote(OVAL.fill)} color={quote(OVAL.border)} fontsize=11 "
            f'margin="0.08,0.02" label=<{escape(node.title)}> tooltip={quote(node.tooltip)}]'
        )
    else:
        label = write_table(node)
    return f"{node.id} [label=<{label}> tooltip={quote(node.tooltip or node.title)}]"


def write_table(node: Node) -> str:
    """Title and shape, the lines, the value, and the gradient: under the value, or beside it if it is tall."""
    sign, change = CHANGES[node.change]
    look = LOOKS[node.kind] if node.change == "same" else Look(change, LOOKS[node.kind].fill)
    title = font(sign + shorten(node.title, LONGEST_TITLE), 14, heat.INK, bold=True)
    corner = font(node.shape, 12, look.border if node.kind != "op" else GREY, bold=True)
    rows = [ends(title, corner)]
    *lines, last = [shorten(line, LONGEST_LINE) for line in node.lines if line] or [""]
    rows += [wide(font(line, 10, GREY)) for line in lines]
    remark = font(node.parameters, 10, LOOKS["parameter"].border) or font(describe_scale(node), 9, GREY)
    if remark:
        rows.append(ends(font(last, 10, GREY), remark))
    elif last:
        rows.append(wide(font(last, 10, GREY)))
    if node.warning:
        rows.append(wide(font(f"! {node.warning}", 10, WARNING, bold=True)))
    rows += number_rows(node)
    inner = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="2">{"".join(rows)}</TABLE>'
    return table([row(inner, "")], look.border, look.fill, padding=3)


def is_tall(node: Node) -> bool:
    """Whether value and gradient are so tall that they stand side by side."""
    return all(isinstance(t, Table) and t.data.shape[-2] > 12 for t in (node.value, node.gradient))


def describe_scale(node: Node) -> str:
    """The common factor of the numbers; where no numbers are shown, what the strongest colour means."""
    value = node.value
    if not isinstance(value, Table):
        return ""
    if value.numbers:
        return heat.write_factor(heat.common_factor(value.data))
    return "" if value.palette == "attention" or is_tall(node) else colour_range(value)


def number_rows(node: Node) -> list[str]:
    """The tables of the value and of the gradient, or the reason why there is no gradient."""
    value, gradient = node.value, node.gradient
    if is_tall(node) and isinstance(value, Table) and isinstance(gradient, Table):
        side = "".join(f'<TD ALIGN="LEFT">{heat.heat_table(t)}</TD>' for t in (value, gradient))
        ranges = [font(f"value {extent(value)}", 9, GREY), font(f"gradient {extent(gradient)}", 9, GRADIENT_INK)]
        under = "".join(f'<TD ALIGN="LEFT">{text}</TD>' for text in ranges)
        look = 'ALIGN="LEFT" BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="2"'
        return [wide(f"<TABLE {look}><TR>{side}</TR><TR>{under}</TR></TABLE>")]
    if isinstance(value, str):
        size = 12 if node.shape == "scalar" else 10
        left = font(value, size, heat.INK)
        if isinstance(gradient, str) and left:
            return [ends(left, font(gradient, size, GRADIENT_INK))]
        rows = [wide(left)] if left else []
    else:
        rows = []
    upper, lower = (t if isinstance(t, Table) else None for t in (value, gradient))
    if upper:
        rows.append(wide(heat.heat_table(upper, lower)))
    if lower:
        rows += [wide(font(f"gradient {extent(lower)}".strip(), 9, GRADIENT_INK)), wide(heat.heat_table(lower, upper))]
    elif isinstance(gradient, str):
        rows.append(wide(font(gradient, 9, GRADIENT_INK)))
    return rows


def extent(t: Table) -> str:
    """What the colours or the numbers of a table mean, and how many of its elements are not finite."""
    n = int(t.data.size - np.isfinite(t.data).sum())
    if n == t.data.size:
        return "not finite"
    scale = heat.write_factor(heat.common_factor(t.data)) if t.numbers else colour_range(t)
    return ", ".join(filter(None, (scale, f"{n} not finite" if n else "")))


def colour_range(t: Table) -> str:
    most = heat.largest_magnitude(t.data)
    return "0…1" if t.palette == "attention" else f"±{write_number(most, 2)}"


def table(rows: Iterable[str], border: str, fill: str, padding: int) -> str:
    """A table with a border and a background."""
    look = f'BORDER="1" STYLE="ROUNDED" COLOR="{border}" BGCOLOR="{fill}" CELLBORDER="0"'
    return f'<TABLE {look} CELLSPACING="0" CELLPADDING="{padding}">{"".join(rows)}</TABLE>'


def row(content: str, attributes: str) -> str:
    return f"<TR><TD {attributes}>{content}</TD></TR>"


def ends(left: str, right: str) -> str:
    """A row with one text at its left end and one at its right end."""
    return f'<TR><TD ALIGN="LEFT">{left}</TD><TD WIDTH="6"></TD><TD ALIGN="RIGHT">{right}</TD></TR>'


def wide(content: str) -> str:
    """A row of a single cell."""
    return row(content, 'COLSPAN="3" ALIGN="LEFT"')


# --------------------------------------------------------------------------------------------------------------------
# Text


def font(text: str, size: int, colour: str, bold: bool = False) -> str:
    """Text in one run; "" for an empty text."""
    if not text:
        return ""
    inner = f"<B>{escape(text)}</B>" if bold else escape(text)
    return f'<FONT POINT-SIZE="{size}" COLOR="{colour}">{inner}</FONT>'


def escape(text: str) -> str:
    """Any text for an HTML-like label. Newlines become line breaks, characters that XML cannot hold are replaced."""
    text = fit(text).replace("\t", " ")
    text = text.replace("\\", "\\\\")  # Graphviz replaces \\N by the id of the box
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return re.sub(r"\r\n|\r|\n", "<BR/>", text)


def fit(text: str) -> str:
    """Replace what XML cannot hold: control characters and lone surrogates."""
    return UNFIT.sub("\ufffd", text)


UNFIT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def quote(text: str) -> str:
    """Any text as a quoted string of DOT, in which a backslash and & begin an escape. Long texts lose their middle."""
    text = fit(shorten(text, LONGEST_TOOLTIP)).replace("\\", "\\\\").replace("&", "&amp;").replace('"', '\\"')
    return '"' + re.sub(r"\r\n|\r|\n", r"\\n", text) + '"'


# --------------------------------------------------------------------------------------------------------------------
# Frames and arrows


def cluster_attributes(cluster: Cluster) -> str:
    rows = [row(font(shorten(cluster.title, LONGEST_LINE) or " ", 13, GREY), 'ALIGN="LEFT"')]
    rows += [row(font(shorten(line, LONGEST_LINE), 10, GREY), 'ALIGN="LEFT"') for line in cluster.lines]
    label = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="1">{"".join(rows)}</TABLE>'
    return (
        f'graph [color="#c9d1d9" fillcolor="#f6f8fa" label=<{label}> labeljust=l labelloc=t margin=12 '
        f'style="rounded,filled" tooltip={quote(cluster.title)}]'
    )


def write_arrows(picture: Picture, direction: str) -> list[str]:
    """The arrows. Those of an input fan out from its middle if their target is made from it and one parameter."""
    nodes = {node.id: node for node in picture.nodes}
    ways_out = Counter(edge.source for edge in picture.edges)
    ways_in = Counter(edge.target for edge in picture.edges)
    others = {edge.target for edge in picture.edges if nodes[edge.source].kind not in ("input", "parameter")}
    others |= {node.id for node in picture.nodes if node.kind in ("plus", "operation") or ways_in[node.id] > 2}
    start, end = (":s", ":n") if direction == "TB" else (":e", ":w")
    lines = []
    for edge in picture.edges:
        fans_out = edge.kind != "parameter" and not others & {edge.source, edge.target}
        ends = (edge.source + start, edge.target + end) if fans_out else (edge.source, edge.target)
        if edge.kind == "residual" and direction == "TB":
            ends = edge.source + ":s", edge.target + ":ne"  # on the right: the titles of frames are on the left
        attributes = edge_attributes(edge, ways_out[edge.source] == 1)
        tooltip = quote(f"{nodes[edge.source].title} → {nodes[edge.target].title}")
        if edge.kind == "gradient":
            # Gradient edges point up; emit them reversed, so that ranks follow the forward pass.
            ends, attributes = ends[::-1], [*attributes, "dir=back"]
        if nodes[edge.source].kind == nodes[edge.target].kind == "parameter":
            attributes.append("constraint=false")  # see write_rows
        lines.append(f"{' -> '.join(ends)} [{' '.join([*attributes, f'tooltip={tooltip}'])}]")
    return lines


def edge_attributes(edge: Edge, only_way_out: bool) -> list[str]:
    colour = EDGE_COLOURS[edge.kind] if edge.change == "same" else CHANGES[edge.change][1]
    ink = LOOKS["parameter"].border if edge.kind == "parameter" else GREY if edge.kind == "data" else colour
    weight = WEIGHTS.get(edge.kind, 1) + 2 * (edge.kind == "data" and only_way_out)
    attributes = [f'color="{colour}"', f"weight={weight}"]
    if edge.label:
        label = font(f"{GAP}{edge.label}{GAP}", 10, ink if edge.change == "same" else colour)
        # A label in the middle needs room and bends the curve, so "residual" stands at the end.
        at_the_end = "labeldistance=3 labelangle=-40 head" if edge.label == "residual" else ""
        attributes.append(f"{at_the_end}label=<{label}>")
    if edge.change != "same":
        attributes.append("penwidth=2.2")
    if edge.change == "left" or edge.kind == "recall":
        attributes.append("style=dashed")
    if edge.kind == "recall":
        attributes.append("constraint=false")
    return attributes


def write_rows(picture: Picture, direction: str) -> list[str]:
    """Rows of boxes in a fixed order: Q, K, V of each head, and in the same order the parameters above them.

    A row holds the boxes that are made from one value and parameters, in the order of the parameters. Without
    rank=same, versions of Graphviz differ. From left to right, Graphviz stacks a row from the bottom up.
    """
    nodes = {node.id: node for node in picture.nodes}
    position = {id: i for i, id in enumerate(nodes)}
    sources: dict[str, list[str]] = defaultdict(list)
    for edge in picture.edges:
        sources[edge.target].append(edge.source)
    uses = Counter(edge.source for edge in picture.edges)
    frames = {cluster.id: i for i, cluster in enumerate(picture.clusters)}
    rows: dict[str, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
    chains, lines = [], []
    for node in picture.nodes:
        parameters = tuple(id for id in sources[node.id] if nodes[id].kind == "parameter")
        own_input = {id for id in sources[node.id] if nodes[id].kind == "input" and uses[id] == 1}  # the cached keys
        others = [id for id in sources[node.id] if id not in parameters and id not in own_input]
        frames_of_parameters = {nodes[id].cluster for id in parameters}
        if len(others) == 1 and frames_of_parameters == {node.cluster}:
            rows[others[0]].append((node.id, parameters))
        own = tuple(id for id in parameters if uses[id] == 1)
        if len(own) > 1 and len({nodes[id].cluster for id in own}) == 1:
            chains.append(own)  # weight, then bias
    for x, made_of in rows.items():
        if len(made_of) < 2:
            continue
        made_of.sort(key=lambda pair: (frames.get(nodes[pair[0]].cluster or "", -1), position[pair[1][0]]))
        made, parameters_of_each = zip(*made_of, strict=True)
        parameters = tuple(dict.fromkeys(id for ids in parameters_of_each for id in ids))
        chains += [made, parameters]
        # Parameters that are slices: those that they are slices of stand above, in the same order. The arrows between
        # them, which cross, would reverse the heads, so they do not take part in the layout.
        wholes = tuple(dict.fromkeys(source for id in parameters for source in sources[id]))
        if wholes:
            chains.append(wholes)
            lines.append(f"{wholes[0]} -> {x} [style=invis]")
    gradient = dict(picture.pairs)
    chains += [tuple(gradient[id] for id in ids) for ids in chains if all(id in gradient for id in ids)]
    order = 1 if direction == "TB" else -1
    lines += ["{ rank=same " + " -> ".join(ids[::order]) + " [style=invis] }" for ids in chains]
    lines += [f"{{ rank=same {a} {b} }}" for a, b in picture.pairs]
    return lines


def write_legend(picture: Picture) -> str:
    """The palettes in use, and the caption."""
    tables = [t for node in picture.nodes for t in (node.value, node.gradient) if isinstance(t, Table)]
    used = {t.palette for t in tables if t.data.size > 1}
    ends = {
        "value": ("value  −max", "+max"),
        "attention": ("attention  0", "1"),
        "gradient": ("gradient  −max", "+max"),
    }
    cells = []
    for palette, (low, high) in ends.items():
        if palette in used:
            left, right = font(f"{3 * GAP}{low}{GAP}", 10, GREY), font(f"{GAP}{high}{3 * GAP}", 10, GREY)
            cells.append(f"<TD>{left}</TD>{heat.legend_bar(palette)}<TD>{right}</TD>")
    rows = [f'<TR><TD HEIGHT="12"></TD></TR><TR>{"".join(cells)}</TR>'] if cells else []
    span = f'COLSPAN="{(heat.LEGEND_STEPS + 2) * len(cells) or 1}"'
    rows += [row(font(line, 11, GREY), span) for line in picture.caption]
    if not rows:
        return ""
    return f'label=<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="0">{"".join(rows)}</TABLE>> '
