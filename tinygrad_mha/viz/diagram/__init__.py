"""Graphs of a recorded computation: from tensors to boxes, from boxes to DOT, from DOT to a file."""
