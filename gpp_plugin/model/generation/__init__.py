"""Generation with the weights in training: HuggingFace's own `generate`, run by all ranks of a replica together."""
