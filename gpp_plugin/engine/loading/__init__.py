"""Mini-batches: loaders, a rank's shard of them, prefetched ones, and the position that a checkpoint saves."""
