"""A captured part of a stage graph: cut into stages of its own, and the tensors of one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import nn

from gpp_plugin.config import GraphPipelineConfig
from gpp_plugin.integrations.materialize import release_parameters
from gpp_plugin.integrations.model_source import is_same
from gpp_plugin.integrations.preparation import Setting, materialize_for, plan_request
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.profile import Profile
from gpp_plugin.plan.fixed import FixedStage
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.pipeline import Lane
from gpp_plugin.runtime.stage_module import StageModule
from gpp_plugin.stage_graph.part import CapturedPart


def cut_part(
    graph: BlockGraph,
    profile: Profile,
    *,
    name: str,
    ranks: Sequence[int],
    num_stages: int | None,
    micro_batch_size: int | None,
    config: GraphPipelineConfig,
    setting: Setting,
    smallest_local_batch: int,
) -> list[FixedStage]:
    """Return the stages that a planner cuts a captured part into, on its own ranks.

    Args:
        num_stages: exactly that many; None leaves it to the planner.

    Raises:
        PlanError, PlanInfeasible: the part cannot be cut so.
    """
    blocks = tuple(block.name for block in graph.blocks)
    if num_stages == 1 or (num_stages is None and len(ranks) == 1):
        return [FixedStage(name=name, blocks=blocks, ranks=tuple(ranks), micro_batch_size=micro_batch_size)]
    request = plan_request(
        graph,
        config,
        setting,
        profile,
        {} if micro_batch_size is None else {"*": micro_batch_size},
        smallest_local_batch=smallest_local_batch,
    )
    request = dataclasses.replace(
        request,
        num_ranks=len(ranks),
        num_stages=num_stages,
        data_parallel=None,
        cluster=dataclasses.replace(
            request.cluster, devices=tuple(request.cluster.devices[rank] for rank in ranks)
        ),
        memory_optimization=(),
    )
    plan = make_plan(config.planner, request)
    return [
        FixedStage(
            name=f"{name}.{index}" if len(plan.stages) > 1 else name,
            blocks=stage.blocks,
            ranks=tuple(ranks[rank] for rank in stage.ranks),
            micro_batch_size=micro_batch_size,
        )
        for index, stage in enumerate(plan.stages)
    ]


class PartHolder:
    """Takes what one stage of a captured part holds out of the user's module.

    Args:
        part: whose stage this rank runs.
    """

    def __init__(self, part: CapturedPart, *, config: GraphPipelineConfig, setting: Setting) -> None:
        assert isinstance(part.stage.spec.make, nn.Module)
        self._name = part.stage.name
        self._module: nn.Module = part.stage.spec.make
        self._config = config
        self._setting = setting

    def make_module(self, lane: Lane, sample_batch: Batch) -> StageModule:
        """Return the stage's parameters and buffers; the user's module keeps those only.

        What no block of the part reads must still be in files: it rests on the part's last stage.
        """
        graph, op_graph = lane.reference.block_graph, lane.reference.analysis.op_graph
        known = {p.name: p for p in op_graph.parameters}
        own = set(lane.plan.stages[lane.stage_index].blocks)
        used = {name for block in graph.blocks for name in block.parameters}
        names = dict.fromkeys(lane.prepare(sample_batch).tensors)
        names.update(
            dict.fromkeys(n for block in graph.blocks if block.name in own for n in block.parameters)
        )
        of_part = [n for n in known if n.startswith(f"{self._name}.")]
        mine = {
            block.name
            for block in graph.blocks
            if block.name.startswith((f"{self._name}.", f"{self._name}#"))
        }
        last = max(i for i, stage in enumerate(lane.plan.stages) if not mine.isdisjoint(stage.blocks))
        if last == lane.stage_index:
            rest = [
                n for n in of_part if n not in used and (known[n].is_persistent or not known[n].is_buffer)
            ]
            names.update(dict.fromkeys(rest))
        local = [name.partition(".")[2] for name in names]
        tensors = materialize_for(self._module, local, setting=self._setting, config=self._config)
        theirs = dict(self._module.named_parameters())
        shared = {n for n, t in tensors.items() if n in theirs and is_same(theirs[n], t)}
        buffers = {n.partition(".")[2] for n in of_part if known[n].is_buffer}
        release_parameters(self._module, keep=shared | buffers)
        return StageModule(
            tensors={f"{self._name}.{name}": tensor for name, tensor in tensors.items()},
            parameters=[name for name in names if not known[name].is_buffer],
            frozen=frozenset(n for n in names if not known[n].requires_grad or n not in used),
            persistent=frozenset(n for n in names if known[n].is_persistent),
        )

    def complete_module(self, module: StageModule, names: Iterable[str]) -> None:
        """Give the stage what only evaluation reads."""
        missing = [name for name in names if name not in module.named_tensors()]
        if missing:
            local = [name.partition(".")[2] for name in missing]
            tensors = materialize_for(self._module, local, setting=self._setting, config=self._config)
            module.add_buffers({f"{self._name}.{name}": tensor for name, tensor in tensors.items()})

    def share_weights(self, module: StageModule) -> None:
        """Let the user's module see the stage's weights where they are of one type."""
        stage = dict(module.named_parameters(remove_duplicate=False))
        for name, tensor in self._module.named_parameters(remove_duplicate=False):
            held = stage.get(f"{self._name}.{name}")
            if held is not None and not tensor.is_meta and tensor.dtype == held.dtype:
                tensor.data = held.data
