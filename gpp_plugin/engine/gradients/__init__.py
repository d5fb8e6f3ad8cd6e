"""Gradients of a stage between backward and step: whole ones, partitions of them, and the buffers they lie in."""
