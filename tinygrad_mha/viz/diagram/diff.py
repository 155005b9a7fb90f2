"""Two pictures beside each other, with their differences."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any, Literal

from tinygrad_mha.viz.diagram.picture import Cluster, Edge, Node, Picture

Side = Literal["left", "right"]


def compared(left: Picture, right: Picture) -> Picture:
    """One picture with both in frames of their own. What only one side has is marked as changed."""
    both = Picture(clusters=[Cluster("cluster_left", "left"), Cluster("cluster_right", "right")])
    names = keys(left), keys(right)
    edges = [Counter(edge_key(edge, name) for edge in p.edges) for p, name in zip((left, right), names, strict=True)]
    told = []
    for side, picture, mine, other in (("left", left, 0, 1), ("right", right, 1, 0)):
        theirs, spare = set(names[other].values()), edges[other].copy()
        nodes = [moved(node, side, names[mine][node.id] not in theirs) for node in picture.nodes]
        arrows = []
        for edge in picture.edges:
            key = edge_key(edge, names[mine])
            arrows.append(moved_edge(edge, side, spare[key] <= 0))
            spare[key] -= 1
        both.nodes += nodes
        both.edges += arrows
        both.clusters += [moved_cluster(cluster, side) for cluster in picture.clusters]
        both.pairs += [(f"{side}_{a}", f"{side}_{b}") for a, b in picture.pairs]
        boxes, only = (sum(x.change != "same" for x in group) for group in (nodes, arrows))
        told.append(f"only on the {side}: {boxes} box{'es' * (boxes != 1)}, {only} arrow{'s' * (only != 1)}")
    both.caption = [" · ".join(told)]
    return both


def keys(picture: Picture) -> dict[str, Any]:
    """What makes a box the same box in another picture: its frames, its title, and the how-manieth of that title.

    A frame around everything does not count: it is the name of the whole.
    """
    outermost = [cluster.id for cluster in picture.clusters if cluster.parent is None]
    whole = outermost[0] if len(outermost) == 1 else None
    parents = {cluster.id: (cluster.parent, cluster.title) for cluster in picture.clusters}
    seen: dict[Any, int] = defaultdict(int)
    found = {}
    for node in picture.nodes:
        path, cluster = [], node.cluster
        while cluster not in (None, whole):
            cluster, title = parents[cluster]
            path.append(title)
        key = (tuple(path), node.kind == "operation", node.title)
        found[node.id] = (*key, seen[key])
        seen[key] += 1
    return found


def edge_key(edge: Edge, names: dict[str, Any]) -> Any:
    return names[edge.source], names[edge.target]


def moved(node: Node, side: Any, changed: bool) -> Node:
    """A box in the frame of its side. What both sides have is drawn without colour, so that changes are seen."""
    cluster = f"cluster_{side}_{node.cluster}" if node.cluster else f"cluster_{side}"
    kind = node.kind if node.kind in ("plus", "operation") else "op"
    return replace(node, id=f"{side}_{node.id}", cluster=cluster, kind=kind, change=side if changed else "same")


def moved_edge(edge: Edge, side: Any, changed: bool) -> Edge:
    ends = {"source": f"{side}_{edge.source}", "target": f"{side}_{edge.target}"}
    return replace(edge, **ends, kind="data", change=side if changed else "same")


def moved_cluster(cluster: Cluster, side: Any) -> Cluster:
    parent = f"cluster_{side}_{cluster.parent}" if cluster.parent else f"cluster_{side}"
    return replace(cluster, id=f"cluster_{side}_{cluster.id}", parent=parent)
