"""HuggingFace's Trainer over a graph of stages."""
