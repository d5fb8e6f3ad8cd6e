"""Where a stage's code comes from: traced from one model, or the user's own modules (`gpp_plugin.stage_graph`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import count_samples, recapture, resize_batch
from gpp_plugin.capture.graph import CapturedGraph
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.runtime.batches import Batch, shape_key
from gpp_plugin.runtime.memory_policy import StageOperators
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A model as captured once, in one mode: what was found out, and its blocks."""

    analysis: Analysis
    block_graph: BlockGraph
    granularity: str


def make_reference(analysis: Analysis, granularity: str) -> Reference:
    """Coarsen what a capture found out to blocks."""
    graph = coarsen(analysis, granularity=granularity)
    return Reference(analysis=analysis, block_graph=graph, granularity=granularity)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCode:
    """A stage at one shape.

    Args:
        tensors: every tensor that crosses a stage's boundary, at that shape.
        inputs: the model's inputs by batch key.
        loss: which of the function's outputs is the loss, if the stage yields one.
        outputs: named output of the model -> which of the function's outputs it is.
        operators: what the code is made of; None where it is not captured.
    """

    function: StageFunction
    tensors: Mapping[str, TensorSpec]
    inputs: Mapping[str, TensorSpec]
    loss: str | None
    outputs: Mapping[str, str]
    operators: StageOperators | None = None


class StageSource(Protocol):
    """Gives a rank the code of its stage."""

    def stage_code(
        self, reference: Reference, plan: PipelinePlan, stage: int, batch: Batch, num_samples: int
    ) -> StageCode:
        """Return a stage's code for ``num_samples`` samples of the shapes of ``batch``.

        Args:
            reference: of the mode the code is for.
            plan: on ``reference.block_graph``.
        """


class CapturedStages:
    """Stages of one captured model: their operators, captured anew at each shape.

    Args:
        model: as the user gave it; only its structure is read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: tuple[tuple[object, ...], CapturedGraph] | None = None

    def keep(self, captured: CapturedGraph, batch: Batch) -> None:
        """Use a capture of the model on ``batch`` the first time a stage runs in that mode at those shapes."""
        self._kept = (_shapes(batch), captured)

    def stage_code(
        self, reference: Reference, plan: PipelinePlan, stage: int, batch: Batch, num_samples: int
    ) -> StageCode:
        """Capture the model at ``num_samples`` samples and generate the stage's code.

        Raises:
            CaptureError: the model's structure depends on its input shapes.
        """
        captured = self._capture(reference.analysis, resize_batch(batch, num_samples))
        graph = coarsen(captured, granularity=reference.granularity)
        nodes = stage_nodes(captured, graph, plan, stage)
        function = build_stage_function(captured, nodes, stage_outputs(captured, nodes, plan, stage))
        own, names = set(function.outputs), set(plan.stages[stage].blocks)
        loss = captured.op_graph.loss
        return StageCode(
            function=function,
            tensors=graph.tensors,
            inputs={spec.name: spec for spec in captured.op_graph.inputs},
            loss=loss if loss in own else None,
            outputs={name: node for name, node in captured.op_graph.outputs.items() if node in own},
            operators=StageOperators(
                blocks={block.name: block.nodes for block in graph.blocks if block.name in names},
                storage_of={node.name: node.storage for node in captured.op_graph.nodes if node.storage},
            ),
        )

    def _capture(self, analysis: Analysis, batch: Batch) -> CapturedGraph:
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] == _shapes(batch) and kept[1].analysis == analysis:
            return kept[1]
        return recapture(self._model, analysis, batch)


def _shapes(batch: Batch) -> tuple[object, ...]:
    count = count_samples(batch)
    return (count, *shape_key(batch, count))


def stage_nodes(captured: CapturedGraph, graph: BlockGraph, plan: PipelinePlan, stage: int) -> list[str]:
    """Return the operator nodes of a stage in a graph captured at any shape.

    Raises:
        CaptureError: the graph lacks one of the stage's blocks.
    """
    blocks = {block.name: block for block in graph.blocks}
    missing = [name for name in plan.stages[stage].blocks if name not in blocks]
    if missing:
        raise CaptureError(
            f"stage {plan.stages[stage].name}: blocks {missing[:3]} are gone from the graph captured at "
            f"{captured.op_graph.num_samples} samples; the model's structure depends on its input shapes"
        )
    return [node for name in plan.stages[stage].blocks for node in blocks[name].nodes]


def stage_outputs(
    captured: CapturedGraph, nodes: list[str], plan: PipelinePlan, stage: int
) -> tuple[str, ...]:
    """Return what a stage's code returns: what other stages read, the loss, the model's named outputs."""
    own = set(nodes)
    edges = [edge for edge in plan.edges if edge.src == stage]
    outputs = [name for edge in edges for name in (*edge.batch_tensors, *edge.whole_tensors)]
    if captured.op_graph.loss in own:
        outputs.append(str(captured.op_graph.loss))
    outputs += [node for node in captured.op_graph.outputs.values() if node in own]
    return tuple(dict.fromkeys(outputs))
