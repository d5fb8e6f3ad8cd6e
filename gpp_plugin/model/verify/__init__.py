"""Whether a capture is the model: both run on the same batch before training, and are compared."""
