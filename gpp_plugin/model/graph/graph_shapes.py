"""What is known of a stage graph's tensors: shape, type and layout of every output, by what the stages really made.

Source: this project
Tests: tests/stage_graph/test_equality.py, tests/stage_graph/test_engine.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.tensors import DTYPE_BYTES, UNIFORM, UNIT, Layout, TensorSpec, batch_layout
from gpp_plugin.model.graph.resolve import GraphStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One output as a stage made it from some number of samples."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The tensors of a stage graph at one shape of its batches.

    Args:
        num_samples: samples that the specs are of.
        tensors: every output, as "stage.output".
        inputs: every batch key that holds a tensor.
    """

    num_samples: int
    tensors: Mapping[str, TensorSpec]
    inputs: Mapping[str, TensorSpec]


def layout_of(
    stage: GraphStage, node: str, small: Seen, large: Seen, counts: tuple[int, int], *, is_coupled: bool
) -> Layout:
    """Return how an output depends on the samples, from its shapes at two numbers of them.

    Args:
        counts: those numbers, increasing.
        is_coupled: the stage computes on whole loss units.

    Raises:
        ConfigError: it is not what the user said, or fits no layout.
    """
    # An axis is of samples where its length is the same whole number of rows a sample at both counts. With 2 and 4:
    #
    #     [2, 7, 64]  and [4, 7, 64]     batch, axis 0, one row a sample
    #     [14, 64]    and [28, 64]       batch, axis 0, seven rows a sample: tokens of all samples one after another
    #     [7, 64]     and [7, 64]        uniform: the same for every sample (positions, say); a unit if coupled
    #     [2, 2]      and [4, 4]         two such axes, a similarity of all pairs: a unit, and only where it is coupled
    #
    # Two counts are needed, as [2, 7] alone may have two samples or two of something else. The user's word comes
    # before what is seen, and must not contradict it.
    declared = dict(stage.spec.layouts).get(node.rpartition(".")[2])
    shapes = f"{list(small.shape)} of {counts[0]} samples and {list(large.shape)} of {counts[1]}"
    if declared == "uniform":
        if small.shape != large.shape:
            raise ConfigError(f"stage {stage.name!r}: output {node!r} is said to be uniform and is {shapes}")
        return UNIFORM
    axes = _scaling_axes(small.shape, large.shape, counts)
    if isinstance(declared, int):
        if declared not in axes:
            raise ConfigError(
                f"stage {stage.name!r}: output {node!r} is said to have its samples along axis {declared} and is "
                f"{shapes}; axes that grow with the samples: {axes or 'none'}"
            )
        axes = [declared]
    same = [(a, b) for i, (a, b) in enumerate(zip(small.shape, large.shape, strict=False)) if i not in axes]
    others = [a for a, b in same if a != b]
    if len(axes) == 1 and not others:
        rows = small.shape[axes[0]] // counts[0]
        return batch_layout(axes[0], rows)
    if is_coupled:
        return UNIT
    if small.shape == large.shape:
        return UNIFORM
    raise ConfigError(
        f"stage {stage.name!r}: output {node!r} is {shapes}, which has no one batch axis; return one row a sample, "
        f"name its axis with layouts={{{node.rpartition('.')[2]!r}: axis}}, or set coupled=True for what mixes samples"
    )


def _scaling_axes(small: Sequence[int], large: Sequence[int], counts: tuple[int, int]) -> list[int]:
    """Return the axes whose length is a whole number of rows a sample."""
    if len(small) != len(large):
        return []
    return [
        axis
        for axis, (a, b) in enumerate(zip(small, large, strict=True))
        if a != b and a % counts[0] == 0 and a * counts[1] == b * counts[0]
    ]


def spec_of(stage: GraphStage, node: str, seen: Seen, layout: Layout, num_samples: int) -> TensorSpec:
    """Return the spec of an output.

    Raises:
        ConfigError: its type cannot be sent.
    """
    if seen.dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"stage {stage.name!r}: output {node!r} is of type {seen.dtype}, which cannot be sent; the types are "
            f"{', '.join(DTYPE_BYTES)}"
        )
    return TensorSpec(
        name=node,
        dtype=seen.dtype,
        shape=seen.shape,
        num_samples=num_samples,
        layout=layout,
        requires_grad=seen.requires_grad,
    )


def at_new_shape(stage: GraphStage, known: TensorSpec, seen: Seen, num_samples: int) -> TensorSpec:
    """Return the spec of an output at another shape of the batch, its layout being known.

    Raises:
        ConfigError: it no longer fits its layout.
    """
    layout = known.layout
    if len(seen.shape) != len(known.shape) or seen.dtype != known.dtype:
        raise ConfigError(
            f"stage {stage.name!r}: output {known.name!r} was {list(known.shape)} {known.dtype} and is "
            f"{list(seen.shape)} {seen.dtype} for another batch; its form depends on the data"
        )
    if layout.kind is batch_layout().kind:
        rows = seen.shape[layout.axis]
        if rows % num_samples:
            raise ConfigError(
                f"stage {stage.name!r}: output {known.name!r} has {rows} rows of {num_samples} samples along axis "
                f"{layout.axis}; return whole rows a sample"
            )
        layout = batch_layout(layout.axis, rows // num_samples)
    return spec_of(stage, known.name, seen, layout, num_samples)
