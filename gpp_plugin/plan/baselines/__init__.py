"""Planners of the field on the same costs: chains of DeepSpeed, Megatron, PipeDream, Piper, DAPPLE, vPipe, AutoPipe."""
