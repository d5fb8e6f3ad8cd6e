"""DeepSpeed: configuration, optimizer step, ZeRO, checkpoints, its own pipeline as the peer."""
