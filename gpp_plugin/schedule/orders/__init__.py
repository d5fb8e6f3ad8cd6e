"""Task orders of stages, one schedule a file, and what they count from."""
