"""Mini-batches: loaders, a rank's share of them, what is taken ahead, and the position that a checkpoint keeps."""
