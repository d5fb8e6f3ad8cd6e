"""Trains one model in a single process, on stock DeepSpeed and on the graph of stages, in turns on the same batches."""
