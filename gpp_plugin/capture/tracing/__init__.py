"""From a module and a batch to a cleaned graph of operators: `torch.export` and what surrounds it."""
