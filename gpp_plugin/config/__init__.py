"""User configuration: the ``graph_pipeline`` block of the DeepSpeed JSON and the batch sizes beside it; pure Python."""
