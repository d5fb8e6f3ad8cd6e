"""Proofs on task orders and on lowered programs, independent of how they were made."""
