"""Predicts a plan's timeline: the event loop, and what is read off a timeline."""
