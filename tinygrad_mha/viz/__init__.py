"""See it: graphs of a run, with shapes, values and gradients in the boxes."""

from tinygrad_mha.viz.graph import Graph, GraphTooLargeError, graph, graph_diff
from tinygrad_mha.viz.render import NoEngineError
from tinygrad_mha.viz.walkthrough import Walkthrough, walkthrough

__all__ = ["Graph", "GraphTooLargeError", "NoEngineError", "graph", "graph_diff"]
__all__ += ["Walkthrough", "walkthrough"]
