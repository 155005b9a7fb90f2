"""Plots with matplotlib: attention weights, losses, gradient norms, and what each layer of a GPT would predict."""

from tinygrad_mha.viz.plots.attention_weights import heatmap
from tinygrad_mha.viz.plots.layer_predictions import plot_logit_lens
from tinygrad_mha.viz.plots.training_curves import plot_gradient_norms, plot_losses

__all__ = ["heatmap", "plot_gradient_norms", "plot_logit_lens", "plot_losses"]
