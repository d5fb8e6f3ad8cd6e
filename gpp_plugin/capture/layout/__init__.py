"""How tensors depend on samples, which operators mix them, and what belongs together."""
