"""Explicit stage graphs: pipelines whose stages the user makes one by one, where capture cannot or should not trace."""
