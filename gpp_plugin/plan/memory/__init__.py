"""What makes a stage fit: swap and recompute, with the partition or behind it (DawnPiper, Capuchin)."""
