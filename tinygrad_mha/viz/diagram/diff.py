"""Two pictures beside each other, with their differences marked."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from tinygrad_mha.viz.diagram.picture import Change, Cluster, Edge, Node, Picture

__all__ = ["compare_pictures"]


def compare_pictures(left: Picture, right: Picture) -> Picture:
    """One picture that holds both, each in a frame of its own. What only one of them has is marked as changed."""
    both = Picture(clusters=[Cluster("cluster_left", "left"), Cluster("cluster_right", "right")])
    keys = {"left": node_keys(left), "right": node_keys(right)}
    edges = {side: Counter(edge_key(e, keys[side]) for e in p.edges) for side, p in (("left", left), ("right", right))}
    counts = []
    sides: list[tuple[Change, Change, Picture]] = [("left", "right", left), ("right", "left", right)]
    for side, other, picture in sides:
        known, unmatched = set(keys[other].values()), edges[other].copy()
        nodes = [move_node(node, side, keys[side][node.id] not in known) for node in picture.nodes]
        arrows = []
        for edge in picture.edges:
            key = edge_key(edge, keys[side])
            arrows.append(move_edge(edge, side, unmatched[key] <= 0))
            unmatched[key] -= 1
        both.nodes += nodes
        both.edges += arrows
        both.clusters += [move_cluster(cluster, side) for cluster in picture.clusters]
        both.pairs += [(f"{side}_{a}", f"{side}_{b}") for a, b in picture.pairs]
        n, m = (sum(x.change != "same" for x in group) for group in (nodes, arrows))
        counts.append(f"only on the {side}: {n} box{'es' * (n != 1)}, {m} arrow{'s' * (m != 1)}")
    both.caption = [" · ".join(counts)]
    return both


def node_keys(picture: Picture) -> dict[str, Any]:
    """What identifies a box in another picture: its frames, its title, and the occurrence number of that title.

    A frame around everything does not count: it is the name of the whole.
    """
    outermost = [cluster.id for cluster in picture.clusters if cluster.parent is None]
    whole = outermost[0] if len(outermost) == 1 else None
    parents = {cluster.id: (cluster.parent, cluster.title) for cluster in picture.clusters}
    occurrences: dict[Any, int] = defaultdict(int)
    keys = {}
    for node in picture.nodes:
        path, cluster = [], node.cluster
        while cluster not in (None, whole):
            cluster, title = parents[cluster]
            path.append(title)
        key = (tuple(path), node.kind == "operation", node.title)
        keys[node.id] = (*key, occurrences[key])
        occurrences[key] += 1
    return keys


def edge_key(edge: Edge, keys: dict[str, Any]) -> Any:
    return keys[edge.source], keys[edge.target]


def move_node(node: Node, side: Change, is_changed: bool) -> Node:
    """A box in the frame of its side, without the colour of its kind, so that changes are seen."""
    cluster = f"cluster_{side}_{node.cluster}" if node.cluster else f"cluster_{side}"
    kind = node.kind if node.kind in ("plus", "operation") else "op"
    return replace(node, id=f"{side}_{node.id}", cluster=cluster, kind=kind, change=side if is_changed else "same")


def move_edge(edge: Edge, side: Change, is_changed: bool) -> Edge:
    ends = {"source": f"{side}_{edge.source}", "target": f"{side}_{edge.target}"}
    return replace(edge, **ends, kind="data", change=side if is_changed else "same")


def move_cluster(cluster: Cluster, side: Change) -> Cluster:
    parent = f"cluster_{side}_{cluster.parent}" if cluster.parent else f"cluster_{side}"
    return replace(cluster, id=f"cluster_{side}_{cluster.id}", parent=parent)
