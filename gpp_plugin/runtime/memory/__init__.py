"""What a stage keeps from forward to backward: kept, swapped, made again, counted."""
