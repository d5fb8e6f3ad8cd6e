"""Capture: a model and a sample batch become an operator graph, and that a graph of blocks."""
