"""Trains one model in a single process, on stock DeepSpeed and on the graph of stages, in turns on the same batches.

`alternated_benchmarks` does the same with plans and chains whose tasks are delays; benchmarks use it too.
"""
