"""The graphs of `gpp bench topologies` on DeepSpeed's pipeline, torch's, Megatron-core's communicator and here.

The first two know chains only, so a graph is put in a line, as their users do it by hand: every stage hands on what
later stages need, beside its own output. What cannot be put so is tried as far as their constructors let it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gpp_benchmarks._topology_models import (
    DTYPE,
    SEQUENCE,
    WIDTH,
    Node,
    Topology,
    TopologyStage,
    input_names,
    loss_of,
    output_names,
)
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.config.reader import BatchSizes
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.stock_engine import PipelinePeer
from gpp_plugin.integrations.megatron.p2p import MegatronPeer, PeerModule
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

Step = Callable[[], dict[str, Tensor]]
"""Runs one mini-batch and returns the gradients of this rank's stage by name."""


class _Link(nn.Module):
    """A stage in a line: takes what is alive, returns what stages behind it need.

    The last one returns its hidden states, and the losses of other sinks; its own loss wants the labels.
    """

    def __init__(self, topology: Topology, index: int) -> None:
        super().__init__()
        self.node = topology.nodes[index]
        self.stage = TopologyStage(topology, self.node)
        self.takes = _alive(topology, index)
        self.gives = _alive(topology, index + 1)
        self.outputs = output_names(topology, self.node)
        self.is_last = index == len(topology.nodes) - 1

    def forward(self, *given: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        tensors: Any = given[0] if len(given) == 1 and isinstance(given[0], tuple) else given
        known: dict[str, Tensor] = dict(zip(self.takes, tensors, strict=True))
        for tensor in known.values():
            if tensor.is_floating_point() and not tensor.requires_grad:
                tensor.requires_grad_()  # DeepSpeed starts a backward at every float that crosses stages
        if self.is_last:
            losses = [known[name] for name in self.takes if name.endswith("_loss")]
            made = (self.stage.hidden(known), *losses)
        else:
            known.update(zip(self.outputs, self.stage(**known), strict=True))
            if self.stage.is_sink:
                known[self.outputs[0]] = known[self.outputs[0]].reshape(1)
            made = tuple(known[name] for name in self.gives)
        return made if len(made) > 1 else made[0]


def _alive(topology: Topology, index: int) -> tuple[str, ...]:
    """Return what enters stage ``index`` of the line."""
    made = [name for node in topology.nodes[:index] for name in output_names(topology, node)]
    needed = {name for node in topology.nodes[index:] for name in input_names(topology, node)}
    last = f"{topology.nodes[-1].name}_target"  # comes as the labels
    keys = [key for key in topology.batch() if key in needed and key != last]
    return (*keys, *(name for name in made if name in needed or name.endswith("_loss")))


def _loss(outputs: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
    if isinstance(outputs, Tensor):
        return loss_of(outputs, target)
    return loss_of(outputs[0], target) + torch.stack([loss.sum() for loss in outputs[1:]]).sum()


def _refuse_own_micro_batches(topology: Topology, what: str) -> None:
    if any(node.micro_batch_size for node in topology.nodes):
        raise ConfigError(f"{what} has one micro-batch size for all stages")


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def deepspeed_step(topology: Topology) -> Step:
    """Return a step of stock DeepSpeed's `PipelineEngine`."""
    _refuse_own_micro_batches(topology, "PipelineModule")
    links = [_Link(topology, index) for index in range(len(topology.nodes))]
    peer = PipelinePeer(
        links,
        loss=_loss,
        micro_batch_size=topology.micro_batch_size,
        num_micro_batches=topology.num_micro_batches,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    batch = topology.batch()
    target = f"{topology.nodes[-1].name}_target"
    size = topology.micro_batch_size

    def rows(index: int) -> tuple[Any, Tensor]:
        part = slice(index * size, (index + 1) * size)
        inputs = tuple(batch[key][part] for key in links[0].takes)
        return inputs if len(inputs) > 1 else inputs[0], batch[target][part]

    own = links[peer.engine.stage_id]

    def step() -> dict[str, Tensor]:
        own.zero_grad()
        peer.run(iter([rows(index) for index in range(topology.num_micro_batches)]))
        return _gradients(own.stage)

    return step


def _examples(topology: Topology, rank: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return what a micro-batch of a stage takes and gives, without values.

    Left to find it out, torch runs stages on tensors that hold anything, which an embedding does not survive.
    """
    batch = topology.batch()
    taken = given = tuple(batch[key][: topology.micro_batch_size] for key in _alive(topology, 0))
    with torch.no_grad():
        for index in range(min(rank, len(topology.nodes) - 1) + 1):
            made = _Link(topology, index)(*given)
            taken, given = given, made if isinstance(made, tuple) else (made,)

    def example(tensor: Tensor) -> Tensor:
        return tensor.detach().to("meta").requires_grad_(tensor.is_floating_point())

    return tuple(map(example, taken)), tuple(map(example, given))


def torch_step(topology: Topology) -> Step:
    """Return a step of `torch.distributed.pipelining`, 1F1B."""
    _refuse_own_micro_batches(topology, "Schedule1F1B")
    rank, count = dist.get_rank(), len(topology.nodes)
    link = _Link(topology, min(rank, count - 1))
    taken, given = _examples(topology, rank)
    stage = PipelineStage(link, rank, count, torch.device("cpu"), input_args=taken, output_args=given)
    schedule = Schedule1F1B(stage, topology.num_micro_batches, loss_fn=_loss)
    batch = topology.batch()
    inputs = [batch[key] for key in link.takes] if rank == 0 else []
    target = batch[f"{topology.nodes[-1].name}_target"] if rank == count - 1 else None

    def step() -> dict[str, Tensor]:
        link.zero_grad()
        if target is not None:
            schedule.step(target=target)
        else:
            schedule.step(*inputs)
        return _gradients(link.stage)

    return step


# ---- this package: an explicit stage graph, without an optimizer's step, as its peers --------------------------

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
    transport = make_transport(device=device, channels=channels_of(programs), timeout_s=TIMEOUT_S)
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
        return {name.removeprefix(prefix): gradient for name, gradient in _gradients(module).items()}

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


# ---- Megatron-core's multi-module communicator ----------------------------------------------------------------


def megatron_step(topology: Topology) -> Step:
    """Return a step of the communicator under Megatron's 1F1B.

    Raises:
        ConfigError: the graph has what the communicator has no way to say.
    """
    if any(node.micro_batch_size for node in topology.nodes):
        raise ConfigError("the communicator has one micro-batch size for all modules")
    if any(node.makes_choices for node in topology.nodes):
        raise ConfigError("the communicator moves one tensor of one dtype from module to module")
    lines = _lines(topology)
    first = {line[0].name: line for line in lines}
    modules = [
        PeerModule(
            name=name,
            first_rank=topology.ranks(line[0])[0],
            stages=len(line),
            degree=line[0].degree,
            tensor=line[0].tensor,
            consumers=tuple(consumer.name for consumer in topology.consumers(line[-1])),
        )
        for name, line in first.items()
    ]
    node = topology.node_of_rank(dist.get_rank())
    line = next(line for line in lines if node in line)
    names = {other[-1].name: other[0].name for other in lines}
    local = topology.micro_batch_size // node.degree
    peer = MegatronPeer(modules, shape=(local, SEQUENCE, WIDTH), dtype=DTYPE)
    position = dist.get_rank() - topology.ranks(node)[0]
    tensor_group = peer.tensor_group if node.tensor > 1 else None
    stage = TopologyStage(topology, node, tensor_group=tensor_group, tensor_rank=position % node.tensor)
    batch = topology.batch()

    def forward(index: int, received: Mapping[str, Tensor]) -> Tensor:
        start = index * topology.micro_batch_size + position // node.tensor * local
        known = {key: tensor[start : start + local] for key, tensor in batch.items()}
        inside = node is not line[0]
        known.update({read: received[line[0].name if inside else names[read]] for read in node.reads})
        output: Tensor = stage(**known)[0]
        return output * (local / topology.mini_batch) if stage.is_sink else output

    def step() -> dict[str, Tensor]:
        stage.zero_grad()
        peer.run(forward, num_micro_batches=topology.num_micro_batches)
        found = _gradients(stage)
        for gradient in found.values() if node.degree > 1 else ():
            dist.all_reduce(gradient, group=peer.data_group)
        return found

    return step


def _lines(topology: Topology) -> list[list[Node]]:
    """Return the modules: a stage and those behind it that only hand on, on as many ranks."""
    lines: list[list[Node]] = []
    for node in topology.nodes:
        before = topology.node(node.reads[0]) if len(node.reads) == 1 else None
        if (
            before is not None
            and topology.consumers(before) == (node,)
            and (before.degree, before.tensor) == (node.degree, node.tensor)
        ):
            next(line for line in lines if line[-1] is before).append(node)
        else:
            lines.append([node])
    return lines
