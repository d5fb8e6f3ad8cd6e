"""From what the user gives as a model to stages: graphs of stages, their weights."""
