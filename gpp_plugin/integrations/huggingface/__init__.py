"""HuggingFace: models from a configuration, initialisers, names in checkpoints."""
