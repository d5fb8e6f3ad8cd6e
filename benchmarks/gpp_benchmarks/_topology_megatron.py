"""Megatron-core's multi-module communicator on the graphs of `gpp bench topologies`."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from gpp_benchmarks._topology_models import (
    DTYPE,
    SEQUENCE,
    WIDTH,
    Node,
    Topology,
    TopologyStage,
)
from gpp_benchmarks._topology_peers import Step
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.megatron.p2p import MegatronPeer, PeerModule


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
        found = {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}
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
