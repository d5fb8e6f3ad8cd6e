"""Megatron-core's multi-module communicator under Megatron's 1F1B: what `gpp bench topologies` compares with.

Megatron-core 0.16 ships the communicator without a schedule that uses it; the loop here is the one Megatron-LM
puts around it: warm-up as the communicator counts it, then forward and backward in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.integrations.megatron import cpu

Forward = Callable[[int, Mapping[str, Tensor]], Tensor]
"""From a micro-batch's number and what other modules sent, by module, to the output or the scaled loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerModule:
    """A module of the communicator: ``stages`` in a line, each on a grid of data x tensor ranks."""

    name: str
    first_rank: int
    stages: int
    degree: int
    tensor: int
    consumers: tuple[str, ...]


class MegatronPeer:
    """One rank of a multi-module pipeline.

    Args:
        modules: all of them; the same on every rank, collective.
        shape: of the tensors this rank's module hands on inside itself.
        dtype: of every message.
    """

    def __init__(self, modules: Sequence[PeerModule], *, shape: Sequence[int], dtype: torch.dtype) -> None:
        cpu.install()
        from megatron.core.hyper_comm_grid import HyperCommGrid
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator

        rank = dist.get_rank()
        self._shape = tuple(shape)
        # Every rank makes the groups of all modules: new_group is a collective of all ranks.
        grids = {}
        for module in modules:
            grid = HyperCommGrid(
                shape=[module.tensor, 1, module.degree, module.stages],
                dim_names=["tp", "cp", "dp", "pp"],
                rank_offset=module.first_rank,
            )
            for dims in (["tp"], ["dp"], ["pp"]):
                grid.create_pg(dims)
            grids[module.name] = grid
            size = module.tensor * module.degree * module.stages
            if module.first_rank <= rank < module.first_rank + size:
                self._module = module
        own = grids[self._module.name]
        self.tensor_group, self.data_group = own.get_pg("tp"), own.get_pg("dp")
        config = ModelParallelConfig(pipeline_model_parallel_size=self._module.stages, pipeline_dtype=dtype)
        config.batch_p2p_comm, config.overlap_p2p_comm = False, False
        config.deallocate_pipeline_outputs = False
        self._communicator: Any = MultiModulePipelineCommunicator(
            grids,
            {module.name: list(module.consumers) for module in modules},
            config,
            dim_mapping={"b": 0, "s": 1, "h": 2},
        )
        info = self._communicator.rank_module_map[self._module.name]
        self._is_end = info.pp_rank == info.pp_size - 1 and not self._module.consumers

    def run(self, forward: Forward, *, num_micro_batches: int) -> None:
        """Run all forwards, backwards and messages of one mini-batch."""
        # Megatron's 1F1B, here with a warm-up of 1 (as the communicator counts it) and 3 micro-batches;
        # B0' is the gradient for B0:
        #
        #   F0 send | recv | F1 send+recv B0' | B0 send+recv | F2 send+recv B1' | B1 send | recv B2' | B2 send
        #   warm-up | steady: a forward, then the oldest backward                         | cool-down
        #
        # held is a queue: outputs wait for their gradients in the order in which they were made.
        communicator, shape = self._communicator, self._shape
        num_warm_up = min(communicator.num_warmup_microbatches, num_micro_batches)
        held: list[tuple[dict[str, Tensor], Tensor]] = []

        def compute(index: int, received: dict[str, Tensor]) -> dict[str, Tensor]:
            for tensor in received.values():
                tensor.retain_grad()  # what a bridge joins is no leaf
            output = forward(index, received)
            held.append((received, output))
            return {self._module.name: output}

        def backward(gradients: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
            received, output = held.pop(0)
            torch.autograd.backward(output, None if self._is_end else gradients[self._module.name])
            return {name: tensor.grad for name, tensor in received.items()}

        for index in range(num_warm_up):
            communicator.send_forward(compute(index, communicator.recv_forward(shape)))
        received = communicator.recv_forward(shape) if num_warm_up < num_micro_batches else {}
        for index in range(num_warm_up, num_micro_batches):
            gradients = communicator.send_forward_recv_backward(compute(index, received), shape)
            sent = backward(gradients)
            if index == num_micro_batches - 1:
                communicator.send_backward(sent)
            else:
                received = communicator.send_backward_recv_forward(sent, shape)
        while held:
            communicator.send_backward(backward(communicator.recv_backward(shape)))
