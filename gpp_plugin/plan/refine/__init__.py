"""Moves that improve a set of stages, and how many ranks each stage gets."""
