"""DeepSpeed's pipeline and torch's on the graphs of `gpp bench topologies`.

Both know chains only, so a graph is put in a line, as their users do it by hand: every stage hands on what later
stages need, beside its own output. What cannot be put so is tried as far as their constructors let it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gpp_benchmarks._topology_models import (
    Topology,
    TopologyStage,
    input_names,
    loss_of,
    output_names,
)
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.pipeline_peer import PipelinePeer

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


def _named_gradients(link: _Link) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in link.stage.named_parameters() if p.grad is not None}


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
        return _named_gradients(own)

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
        return _named_gradients(link)

    return step
