"""Runs a plan with delays in place of compute: real processes, engine loop and messages on any machine."""
