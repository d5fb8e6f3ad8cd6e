"""What each megatron-core patch mends, as a program: multi-module pipelines on gloo, beside one process.

``python megatron_scenarios.py CASES OUT`` reads [[name, scenario, folder], ...] and writes {name: "ok" or what went
wrong}. megatron-core is imported once; the ranks of a case take its pipeline communicators from the case's folder.
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron.core.pipeline_parallel as pipeline_parallel
import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor, nn

from tests.patches.forked_ranks import outcome_of

COMMUNICATORS = ("p2p_communication", "bridge_communicator", "multimodule_communicator")
WAIT_S = 12.0
"""Longest wait for a message: a rank that waits longer is in a deadlock; tasks take a millisecond."""
SHAPE = (3, 4, 8)  # sequence, batch, hidden
DIMENSIONS = {"s": 0, "b": 1, "h": 2}
MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Modules and who reads whom; a module has ``stages`` pipeline stages on ``replicas`` ranks each."""

    topology: Mapping[str, list[str]]
    stages: Mapping[str, int] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)

    def sizes(self, module: str) -> tuple[int, int]:
        return self.stages.get(module, 1), self.replicas.get(module, 1)

    @property
    def num_ranks(self) -> int:
        return sum(stages * replicas for stages, replicas in map(self.sizes, self.topology))


SCENARIOS = {
    # a chain inside a module and a bridge to the next one
    "0001": Topology(topology={"encoder": ["llm"], "llm": []}, stages={"encoder": 2}),
    # one module is read by two
    "0002": Topology(topology={"source": ["a", "b"], "a": ["join"], "b": ["join"], "join": []}),
    # branches of one and of two stages
    "0003": Topology(topology={"a": ["llm"], "b": ["llm"], "llm": []}, stages={"b": 2}),
    # one rank feeds two, which cut the batch, the second dimension
    "0004": Topology(topology={"encoder": ["llm"], "llm": []}, replicas={"llm": 2}),
}


def layer(module: str, stage: int) -> nn.Linear:
    torch.manual_seed(sum(map(ord, module)) + 100 * stage)
    return nn.Linear(SHAPE[2], SHAPE[2], dtype=torch.float64)


def micro_batch(index: int) -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum() / MICRO_BATCHES


def reference(topology: Topology) -> dict[tuple[str, int], Tensor]:
    """Return the gradient of every layer's weight in one process."""
    layers = {(m, s): layer(m, s) for m in topology.topology for s in range(topology.sizes(m)[0])}
    for index in range(MICRO_BATCHES):
        made: dict[str, Tensor] = {}
        for module, readers in topology.topology.items():
            sources = [name for name in made if module in topology.topology[name]]
            received = [made[name] for name in sources]
            value = sum(received, start=torch.zeros(())) if sources else micro_batch(index)
            for stage in range(topology.sizes(module)[0]):
                value = torch.tanh(layers[module, stage](value))
            made[module] = value
            if not readers:
                loss_of(value).backward(retain_graph=True)
    return {key: found.weight.grad for key, found in layers.items() if found.weight.grad is not None}


class Stage:
    """One rank's stage of its module: a layer, and what it keeps between forward and backward."""

    def __init__(self, topology: Topology, module: str, stage: int) -> None:
        self.module = module
        self.layer = layer(module, stage)
        self.is_source = stage == 0 and not any(module in readers for readers in topology.topology.values())
        self.is_sink = stage == topology.sizes(module)[0] - 1 and not topology.topology[module]
        self.held: deque[tuple[dict[str, Tensor], Tensor]] = deque()
        self.started = 0

    def forward(self, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inputs = {name: tensor.detach().requires_grad_() for name, tensor in received.items()}
        received = sum(inputs.values(), start=torch.zeros(()))
        total = micro_batch(self.started) if self.is_source else received
        output = torch.tanh(self.layer(total))
        self.started += 1
        self.held.append((inputs, loss_of(output) if self.is_sink else output))
        return {self.module: output.detach()}

    def backward(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inputs, output = self.held.popleft()
        output.backward(None if self.is_sink else gradients[self.module])
        return {name: tensor.grad for name, tensor in inputs.items() if tensor.grad is not None}


def run_1f1b(communicator: Any, stage: Stage, shape: tuple[int, ...]) -> None:
    """Run 1F1B as the schedule of later releases does with this communicator."""
    warm_up = min(communicator.num_warmup_microbatches, MICRO_BATCHES)
    for _ in range(warm_up):
        communicator.send_forward(stage.forward(communicator.recv_forward(shape)))
    steady = MICRO_BATCHES - warm_up
    received = communicator.recv_forward(shape) if steady else {}
    for index in range(steady):
        gradients = communicator.send_forward_recv_backward(stage.forward(received), shape)
        sent = stage.backward(gradients)
        if index < steady - 1:
            received = communicator.send_backward_recv_forward(sent, shape)
        else:
            communicator.send_backward(sent)
    for _ in range(warm_up):
        communicator.send_backward(stage.backward(communicator.recv_backward(shape)))


def check(topology: Topology, rank: int) -> None:
    """Train one mini-batch and compare this rank's gradient with one process's."""
    communicators = importlib.import_module("megatron.core.pipeline_parallel.multimodule_communicator")
    grids: dict[str, Any] = {}
    first, place = 0, None
    for module in topology.topology:
        stages, replicas = topology.sizes(module)
        grid = HyperCommGrid([1, 1, stages, replicas], ["tp", "cp", "pp", "dp"], rank_offset=first)
        for name in ("pp", "dp"):
            grid.create_pg(name)
        if first <= rank < first + stages * replicas:
            place = (module, (rank - first) % stages, grid)
        grids[module] = grid
        first += stages * replicas
    assert place is not None
    module, index, grid = place
    communicator = communicators.MultiModulePipelineCommunicator(
        grids,
        {name: list(readers) for name, readers in topology.topology.items()},
        ModelParallelConfig(pipeline_dtype=torch.float64, batch_p2p_comm=True),
        dim_mapping=DIMENSIONS,
    )
    stage = Stage(topology, module, index)
    shape = (SHAPE[0], SHAPE[1] // topology.sizes(module)[1], SHAPE[2])
    run_1f1b(communicator, stage, shape)
    gradient = stage.layer.weight.grad
    assert gradient is not None
    dist.all_reduce(gradient, group=grid.get_pg("dp"))
    wanted = reference(topology)[module, index]
    error = float((gradient - wanted).norm() / wanted.norm())
    assert error < 1e-12, f"the gradient of {module} is off by {100 * error:.0f} %"


def run(scenario: str, folder: str) -> str:
    """Return "ok", or what the first rank that failed said."""
    topology = SCENARIOS[scenario]

    def join_and_check(rank: int) -> None:
        pipeline_parallel.__path__ = [str(Path(folder, "megatron", "core", "pipeline_parallel"))]
        for name in COMMUNICATORS:
            sys.modules.pop(f"megatron.core.pipeline_parallel.{name}", None)
        dist.init_process_group(
            "gloo", rank=rank, world_size=topology.num_ranks, timeout=datetime.timedelta(seconds=WAIT_S)
        )
        check(topology, rank)
        dist.barrier()

    return outcome_of(join_and_check, topology.num_ranks)


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(
        json.dumps({name: run(scenario, folder) for name, scenario, folder in cases})
    )
