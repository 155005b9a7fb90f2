"""Pictures: graphs of a run with shapes, values and gradients in the boxes, a page on attention, and plots."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tinygrad_mha.viz.diagram.graphviz_engines import NoEngineError
from tinygrad_mha.viz.diagram.snapshot import Graph, GraphTooLargeError, graph, graph_diff
from tinygrad_mha.viz.page.document import Walkthrough, walkthrough
from tinygrad_mha.viz.terminal import show

if TYPE_CHECKING:
    from tinygrad_mha.viz.plots import heatmap, plot_gradient_norms, plot_logit_lens, plot_losses

__all__ = ["Graph", "GraphTooLargeError", "NoEngineError", "graph", "graph_diff"]
__all__ += ["Walkthrough", "show", "walkthrough"]
__all__ += ["heatmap", "plot_gradient_norms", "plot_logit_lens", "plot_losses"]


def __getattr__(name: str) -> Any:
    """Import the plots when the first one is asked for: matplotlib takes longer to import than this package."""
    if name in __all__:
        return getattr(import_module("tinygrad_mha.viz.plots"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
