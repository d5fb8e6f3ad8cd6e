"""Immutable data that passes between the layers; pure Python, reads and writes JSON."""
