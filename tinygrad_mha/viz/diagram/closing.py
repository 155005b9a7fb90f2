"""A picture with some of its frames closed: each is one box. Works on plain data, so that a saved page needs no run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tinygrad_mha.viz.diagram.picture import Cluster, Edge, Node, Picture

__all__ = ["close_frames", "list_states"]

MOST_STATES = 40


def close_frames(picture: Picture, closed: Collection[str]) -> Picture:
    """The picture with a box, of the same id, in place of each frame in `closed`."""
    around = {cluster.id: cluster.parent for cluster in picture.clusters}

    def find_closed(frame: str | None) -> str | None:
        found = None
        while frame is not None:
            found = frame if frame in closed else found
            frame = around[frame]
        return found

    inside = {node.id: find_closed(node.cluster) for node in picture.nodes}
    boxes: dict[str, Node] = {}
    for node in picture.nodes:
        frame = inside[node.id]
        if frame is None:
            boxes[node.id] = node
        elif frame not in boxes:
            cluster = next(c for c in picture.clusters if c.id == frame)
            boxes[frame] = write_box(picture, cluster, inside)
    edges: dict[tuple[str, str], Edge] = {}
    for edge in picture.edges:
        a, b = (inside[id] or id for id in (edge.source, edge.target))
        if a != b:
            key = (a, b) if (a, b) != (edge.source, edge.target) else (edge.source, f"{edge.target} {len(edges)}")
            edges.setdefault(key, replace(edge, source=a, target=b))
    clusters = [c for c in picture.clusters if find_closed(c.id) is None]
    pairs = [pair for pair in picture.pairs if all(id in boxes for id in pair)]
    return Picture(list(boxes.values()), list(edges.values()), clusters, pairs, picture.caption)


def write_box(picture: Picture, cluster: Cluster, inside: dict[str, str | None]) -> Node:
    """The box of a closed frame: its lines, and the shape, range and gradient of the last result that leaves it."""
    leaving = {edge.source for edge in picture.edges if inside[edge.target] != cluster.id}
    within = [node for node in picture.nodes if inside[node.id] == cluster.id]
    results = [node for node in within if node.kind != "parameter" and (node.id in leaving or node.kind == "output")]
    last = (results or within)[-1]
    return Node(
        cluster.id,
        "output" if any(node.kind == "output" for node in within) else "op",
        cluster.title,
        last.shape,
        lines=list(cluster.lines),
        value=last.value if isinstance(last.value, str) else None,
        gradient=last.gradient if isinstance(last.gradient, str) else None,
        warning=last.warning,
        tooltip=f"{cluster.title}: {len(within)} boxes",
        cluster=cluster.parent,
    )


def list_states(picture: Picture, most: int) -> dict[str, set[str]]:
    """The closed frames of each state that a page can show.

    "" is the start, with the deepest level open of which at most `most` boxes are made; "all" has all frames open,
    "none" has all closed. The id of a frame is the state in which it and the frames around it are open, others closed.
    """
    around = {cluster.id: cluster.parent for cluster in picture.clusters}
    paths: dict[str, list[str]] = {}
    for id, parent in around.items():
        paths[id] = [*(paths[parent] if parent else []), id]
    states: dict[str, set[str]] = {"all": set(), "none": set(paths)}
    for depth in range(max(map(len, paths.values()), default=0), -1, -1):
        states[""] = {id for id, path in paths.items() if len(path) > depth}
        if len(close_frames(picture, states[""]).nodes) <= most:
            break
    for id, path in list(paths.items())[:MOST_STATES]:
        states[id] = set(paths) - set(path)
    return states
