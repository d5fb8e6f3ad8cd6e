"""Planners: from a BlockGraph, its costs and a cluster to a PipelinePlan; pure Python."""
