"""GraphPipe's partitioner: series-parallel search for a graph of stages (arXiv 2406.17145)."""
