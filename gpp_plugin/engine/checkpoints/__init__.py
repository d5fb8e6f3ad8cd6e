"""Checkpoints: whole or not there, checked before they are used, of any plan, and nothing in them is code."""
