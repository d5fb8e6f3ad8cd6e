"""Where a stage's code comes from: traced from one model, or the user's own modules (`gpp_plugin.model.graph`).

Source: this project
Tests: tests/integrations/test_preparation.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.memory.keeper import StageOperators
from gpp_plugin.runtime.stage_module import StageFunction


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
        is_for_lengths: bound to this shape from code that holds for others: at another length that is all to be done.
    """

    function: StageFunction
    tensors: Mapping[str, TensorSpec]
    inputs: Mapping[str, TensorSpec]
    loss: str | None
    outputs: Mapping[str, str]
    operators: StageOperators | None = None
    is_for_lengths: bool = False


NO_CODE = StageCode(
    function=StageFunction(
        call=lambda: (), tensors=(), constants=(), batch_inputs=(), received=(), outputs=(), code=""
    ),
    tensors={},
    inputs={},
    loss=None,
    outputs={},
)
"""Of a rank that has nothing to run."""


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


class StageForwards(Protocol):
    """Runs the forwards of stages on something else than torch's operators."""

    def forward(
        self, stage: str, function: StageFunction, parameters: Sequence[Tensor]
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return what is called as ``function`` is and gives the same, of a stage that has no backwards.

        None: the function itself runs.
        """

    def trained(
        self, stage: Stage, function: StageFunction, code: StageCode
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return the same of a stage that has backwards, which flow back through what is returned.

        Args:
            code: what ``function`` is of, at these samples or at twice as many.
        """


class UnitSource(StageSource, Protocol):
    """Gives the code of stages also for loss units that lack some of a model's inputs."""

    def lacking(self, reference: Reference, unit: Batch) -> Reference:
        """Return the model as it is for units of these keys only; collective over all ranks.

        Args:
            reference: of the model with all its inputs, in the mode that is asked for.

        Raises:
            CaptureError: it cannot do without the others; the same on every rank.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedModule:
    """A captured module as its user holds it.

    Args:
        prefix: what stages put before its own names of tensors.
        eager: its modules that run as they are.
        trace: traces it as it is, on this rank alone: returns all that two traces can differ in, and which attributes
            of which modules (by path) were read.
    """

    module: nn.Module
    prefix: str
    eager: tuple[str, ...]
    trace: Callable[[], tuple[str, frozenset[tuple[str, str]]]]
