"""What a stage holds from forward to backward: saved, swapped, recomputed, counted."""
