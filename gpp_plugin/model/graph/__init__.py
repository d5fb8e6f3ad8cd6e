"""Stage graphs: how they are written down, tried, profiled, called."""
