"""See it: graphs of a run, with shapes, values and gradients in the boxes."""

from tinygrad_mha.viz.graph import Graph, GraphTooLargeError, graph, graph_diff
from tinygrad_mha.viz.render import NoEngineError

__all__ = ["Graph", "GraphTooLargeError", "NoEngineError", "graph", "graph_diff"]
