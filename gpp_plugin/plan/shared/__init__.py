"""Plans whose ranks hold several stages: interleaved ones, and branches on the ranks of others."""
