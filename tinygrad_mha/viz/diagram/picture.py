"""What is in a picture: boxes, arrows and frames around boxes, as plain data. No tensor and no Graphviz in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

__all__ = ["Change", "Cluster", "Edge", "Kind", "Node", "Picture", "Table"]

Kind = Literal["input", "parameter", "attention", "output", "op", "gradient", "plus", "operation"]
Change = Literal["same", "left", "right"]  # in a comparison: in both, or only in one of the two


@dataclass
class Table:
    """Numbers to be shown as colours: `data` holds the matrices (panels, rows, columns) of one tensor.

    With `numbers`, the numbers are written in the cells. A `second` table, that of the gradient under a value, is shown
    with less weight.
    """

    data: np.ndarray
    palette: Literal["value", "attention", "gradient"]
    second: bool = False
    numbers: bool = False


@dataclass
class Node:
    """A box: a tensor, or a closed module. `lines` stand under the title.

    `value` and `gradient` are tables, or texts: the number of a scalar, the range of a result, why there is none.
    """

    id: str
    kind: Kind
    title: str
    shape: str = ""
    lines: list[str] = field(default_factory=list)
    parameters: str = ""
    value: Table | str | None = None
    gradient: Table | str | None = None
    warning: str = ""
    tooltip: str = ""
    cluster: str | None = None
    change: Change = "same"


@dataclass
class Edge:
    """An arrow from one box to another, in the direction of the computation."""

    source: str
    target: str
    kind: Literal["data", "input", "parameter", "residual", "gradient", "recall"] = "data"
    label: str = ""
    change: Change = "same"


@dataclass
class Cluster:
    """A frame around the boxes of one module."""

    id: str
    title: str
    lines: list[str] = field(default_factory=list)
    parent: str | None = None


@dataclass
class Picture:
    """All of it. `pairs` are boxes that belong side by side: a tensor and its gradient."""

    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    clusters: list[Cluster] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    caption: list[str] = field(default_factory=list)
