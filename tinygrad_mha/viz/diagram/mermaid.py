"""A picture as a flowchart of Mermaid, which code hosts draw: pure text. Syntax: mermaid.js.org, Flowchart."""

from __future__ import annotations

from collections import defaultdict

from tinygrad_mha.viz.diagram.dot import EDGE_COLOURS, LOOKS, fit
from tinygrad_mha.viz.diagram.formulas import shorten
from tinygrad_mha.viz.diagram.heat import INK
from tinygrad_mha.viz.diagram.picture import Cluster, Node, Picture

__all__ = ["to_mermaid"]

LONGEST = 60


def to_mermaid(picture: Picture, direction: str = "TB") -> str:
    """The boxes with title, shape and lines, the arrows with their labels, and the modules as subgraphs.

    Example:
        >>> print(to_mermaid(Picture(nodes=[Node("t0", "input", "x", "3×5")])).splitlines()[1].strip())
        t0["<b>x</b> 3×5"]:::input
    """
    lines = [f"flowchart {direction}", *write_boxes(picture)]
    for edge in picture.edges:
        label = f"|{quote(edge.label)}|" if edge.label else ""
        lines.append(f"  {edge.source} -->{label} {edge.target}")
    for i, edge in enumerate(picture.edges):
        if edge.kind in ("residual", "input", "parameter"):
            lines.append(f"  linkStyle {i} stroke:{EDGE_COLOURS[edge.kind]}")
    used = {node.kind for node in picture.nodes}
    for kind, look in LOOKS.items():
        if kind in used:
            lines.append(f"  classDef {kind} fill:{look.fill},stroke:{look.border},color:{INK}")
    return "\n".join([*lines, ""])


def write_boxes(picture: Picture) -> list[str]:
    """The boxes in their frames. Iterative, so frames can be nested to any depth."""
    inside: dict[str | None, list[Node | Cluster]] = defaultdict(list)
    for node in picture.nodes:
        inside[node.cluster].append(node)
    for cluster in picture.clusters:
        inside[cluster.parent].append(cluster)
    lines: list[str] = []
    todo: list[tuple[int, Node | Cluster | None]] = [(1, item) for item in reversed(inside[None])]
    while todo:
        depth, item = todo.pop()
        indent = "  " * depth
        if item is None:
            lines.append(f"{indent}end")
        elif isinstance(item, Node):
            lines.append(indent + write_node(item))
        else:
            lines.append(f"{indent}subgraph {item.id}[{quote(write_title(item))}]")
            todo.append((depth, None))
            todo += [(depth + 1, inner) for inner in reversed(inside[item.id])]
    return lines


def write_node(node: Node) -> str:
    if node.kind == "plus":
        return f'{node.id}(("+"))'
    if node.kind == "operation":
        return f"{node.id}([{quote(node.title)}])"
    texts = [escape(text) for text in (*node.lines, node.parameters) if text]
    texts += [escape(text) for text in (node.value, node.gradient) if isinstance(text, str) and text]
    head = f"<b>{escape(node.title)}</b> {escape(node.shape)}".strip()
    return f'{node.id}["{"<br>".join([head, *texts])}"]:::{node.kind}'


def write_title(cluster: Cluster) -> str:
    return " · ".join([cluster.title or " ", *cluster.lines])


def quote(text: str) -> str:
    return f'"{escape(text)}"'


def escape(text: str) -> str:
    """Any text for a label: Mermaid writes a special character as #code;. Letters, digits and common signs stay."""
    text = " ".join(fit(shorten(text, LONGEST)).split()) or " "
    return "".join(c if c.isalnum() or c in SAFE or ord(c) > 127 else f"#{ord(c)};" for c in text)


SAFE = " .,:+-=/@_()[]"
