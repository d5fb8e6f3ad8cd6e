"""What stages hold of the mini-batch itself: every row that one of their tasks will read, from its start to its end.

Source: this project
Tests: tests/plan/test_inputs.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.profile import InputCost, Profile
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec


def with_inputs(
    profile: Profile, graph: BlockGraph, inputs: Iterable[TensorSpec], *, mini_batch: int, dtype: str
) -> Profile:
    """Return a profile that knows the batches which plans are made for.

    Args:
        inputs: the model's, by batch key.
        mini_batch: samples of a step.
        dtype: floats are cast to it.
    """
    found = []
    for spec in inputs:
        if spec.dtype.startswith(("float", "bfloat")):
            spec = dataclasses.replace(spec, dtype=dtype)
        readers = tuple(block.name for block in graph.blocks if spec.name in block.inputs)
        if readers:
            has_samples = spec.layout.kind is LayoutKind.BATCH
            found.append(
                InputCost(blocks=readers, bytes=spec.bytes_for(mini_batch), is_shared_out=has_samples)
            )
    return dataclasses.replace(profile, inputs=tuple(found))
