"""gpp on the graphs of `gpp bench topologies`: an explicit stage graph, without an optimizer's step, as its peers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks._topology_models import DTYPE, Topology, TopologyStage, input_names, output_names
from gpp_benchmarks._topology_peers import Step
from gpp_plugin.config.batch_sizes import BatchSizes
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.model.graph.stage_graph import StageContext, StageGraph
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.model.preparation import Setting
from gpp_plugin.runtime.messages.transport import make_transport
from gpp_plugin.runtime.rank_programs import channels_of, make_programs
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.ranks.placement_of_ranks import JobPlacement
from gpp_plugin.runtime.stage_runner import RunnerContext
from gpp_plugin.schedule.program_sets import RankPrograms

TIMEOUT_S = 60.0


def gpp_step(topology: Topology) -> Step:
    """Return a step of a stage graph on this runtime."""
    batch = topology.batch()
    device = torch.device("cpu")
    degree = max(node.degree for node in topology.nodes if topology.is_sink(node))
    setting = Setting(
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        device=device,
        dtype=DTYPE,
        sizes=BatchSizes(topology.mini_batch, topology.micro_batch_size // degree, None),
        zero_stage=0,
        optimizer_bytes=0.0,
        group=dist.new_group(backend="gloo"),
        placement=JobPlacement.on_one_host(dist.get_world_size(), rank=dist.get_rank()),
    )
    source = ModelSource(stage_graph(topology), config=GraphPipelineConfig(), setting=setting)
    reference, plan = source.prepare_plan(batch)
    programs = make_programs(plan, reference)
    transport = make_transport(
        device=device,
        channels=channels_of(programs),
        timeout_s=TIMEOUT_S,
    )
    program = next(program for program in programs if program.rank == setting.rank)
    shared = RunnerContext(
        source=source.stages, reference=reference, transport=transport, device=device, dtype=DTYPE
    )
    runner = RankRunner(RankPrograms(plan=plan, programs={"whole": program}), shared)
    (module,) = source.make_modules(runner, batch)
    runner.bind([module], [_Sums(module, plan)])
    prefix = f"{topology.node_of_rank(setting.rank).name}."

    def step() -> dict[str, Tensor]:
        module.zero_grad()
        runner.run(batch)
        return {
            name.removeprefix(prefix): parameter.grad.clone()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }

    return step


def stage_graph(topology: Topology) -> StageGraph:
    """Return a topology as a user of stage graphs writes it down."""
    losses = [
        name for node in topology.nodes if topology.is_sink(node) for name in output_names(topology, node)
    ]
    graph = StageGraph(name=topology.name, losses=losses)
    for node in topology.nodes:

        def make(context: StageContext, name: str = node.name) -> nn.Module:
            own = topology.node(name)
            group = context.tensor_group if own.tensor > 1 else None
            return TopologyStage(topology, own, tensor_group=group, tensor_rank=context.tensor_rank)

        graph.stage(
            node.name,
            make,
            inputs=input_names(topology, node),
            outputs=output_names(topology, node),
            ranks=topology.ranks(node),
            tensor=node.tensor,
            micro_batch_size=node.micro_batch_size or topology.micro_batch_size,
        )
    return graph


class _Sums:
    """An optimizer side that sums gradients over data-parallel ranks and steps nothing."""

    loss_scale = 1.0

    def __init__(self, module: nn.Module, plan: PipelinePlan) -> None:
        self._module = module
        self._group: dist.ProcessGroup | None = None
        for stage in plan.stages:
            for position in range(stage.tensor):
                ranks = list(stage.ranks[position :: stage.tensor])
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks and len(ranks) > 1:
                    self._group = group

    def accumulate(self) -> None:
        """Leave gradients where autograd adds them up."""

    def begin_reduction(self) -> None:
        """Do nothing: `reduce_data` sums all."""

    def reduce_data(self) -> None:
        """Sum over the stage's data-parallel ranks."""
        if self._group is not None:
            for parameter in self._module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self._group)

    def reduce_tied(self) -> None:
        """Sum nothing: no parameter is tied."""

    def step(self) -> None:
        """Step nothing."""
