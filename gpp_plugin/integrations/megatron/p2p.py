"""Messages over megatron-core's `P2PCommunicator`, between the ranks whose edge it can carry; the others stay native.

One communicator serves one pair of ranks, in a group of these two. Its public calls for a schedule that overlaps
communication (``send_forward_recv_forward``, ``send_backward_recv_backward``) are used one way at a time: each posts
one transfer and returns its handle, which is waited for where the program says, with the same timeout and the same
errors as a native message's. In a group of two the communicator sends from the lower rank to the higher one in that
group and the other way in the default group, so that the two directions have a group each.

Between which ranks these are, `plan.edge_transports` decides for the plan of training. Between them every message
that is one floating-point tensor passes over the communicator, whatever its edge, in evaluation too.
Messages without tags keep their order, which is the program's.

Source: this project
Tests: tests/plan/test_edge_transports.py, tests/integrations/test_megatron_p2p.py
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.megatron import cpu
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.plan.edge_transports import MEGATRON, choose_edge_transports
from gpp_plugin.plugins import Channel, Pending, Post, Transport, TransportFactory, TransportRequest
from gpp_plugin.runtime.messages.routes import Payload
from gpp_plugin.runtime.messages.sockets import widen_open_sockets, widened_sockets
from gpp_plugin.runtime.messages.transport import NATIVE_TRANSPORT, MessagePlace, Posted
from gpp_plugin.runtime.ranks.collectives import collective_timeout_s

Pair = tuple[int, int]
"""The ranks of an edge, the lower one first."""

_KEY = "graph_pipeline.p2p"


class MegatronTransport:
    """Sends some edges' messages over `P2PCommunicator` and the others' over ``native``.

    Args:
        groups: the two-rank group of every pair that this rank is in and that has a communicator.
        timeout_s: of a wait; None where the group's own timeout ends it (NCCL).
    """

    def __init__(
        self,
        *,
        native: Transport,
        groups: Mapping[Pair, dist.ProcessGroup],
        timeout_s: float | None,
    ) -> None:
        self.prepost_depth = native.prepost_depth
        self.prepost_bytes = native.prepost_bytes
        # A communicator makes what it receives into when it is called: that must be on the stream that reads it.
        self.buffers_ahead = 0
        self._native = native
        self._groups = groups
        self._timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        self._communicators: dict[tuple[Pair, torch.dtype], Any] = {}

    def bind_send(self, message: Message, payloads: Sequence[Payload], edge: str) -> Post:
        """Return what sends the message."""
        call = self._call(message, payloads)
        if call is None:
            return self._native.bind_send(message, payloads, edge)
        place = MessagePlace("send", message, edge, self._timeout)

        def post(tensors: Sequence[Tensor]) -> Pending:
            # (what to send, whether to receive, shape): nothing is received, and the call
            # returns the handle at once.
            (tensor,) = tensors
            _, handles = call(tensor, False, None, overlap_p2p_comm=True)
            return Posted(list(handles.values()), place, tensors)

        return post

    def bind_receive(self, message: Message, payloads: Sequence[Payload], edge: str) -> Post:
        """Return what receives the message into a tensor of the communicator's, which the buffer becomes."""
        call = self._call(message, payloads)
        if call is None:
            return self._native.bind_receive(message, payloads, edge)
        shape = list(payloads[0].shape)
        place = MessagePlace("receive", message, edge, self._timeout)

        def post(buffers: Sequence[Tensor]) -> Pending:
            (buffer,) = buffers
            received, handles = call(None, True, shape, overlap_p2p_comm=True)
            # The communicator allocates what it receives into; `set_` makes the caller's buffer that
            # memory, without a copy.
            buffer.set_(received.detach())
            return Posted(list(handles.values()), place, buffers)

        return post

    def _call(self, message: Message, payloads: Sequence[Payload]) -> Callable[..., Any] | None:
        """Return the communicator's call that moves messages of this kind; None for one that it cannot carry."""
        pair = _pair(message.src_rank, message.dst_rank)
        if pair not in self._groups or len(payloads) != 1 or not payloads[0].dtype.is_floating_point:
            return None
        key = (pair, payloads[0].dtype)
        if key not in self._communicators:
            self._communicators[key] = _make_communicator(self._groups[pair], payloads[0].dtype)
        communicator = self._communicators[key]
        if message.direction is Direction.ACTIVATION:
            return communicator.send_forward_recv_forward
        return communicator.send_backward_recv_backward

    def open(self, channels: Collection[Channel]) -> None:
        """Make what the native transport lacks for these channels; communicators are those of training."""
        self._native.open(channels)

    def close(self) -> None:
        """Release all process groups."""
        self._communicators.clear()
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._native.close()


def _make_groups(
    plan: PipelinePlan, carried: Sequence[tuple[Pair, int]], *, device: torch.device, timeout_s: float
) -> dict[Pair, dist.ProcessGroup]:
    """Return the group of each pair that this rank is in; every rank calls it with the same pairs and their edges."""
    # Making groups is collective over all ranks, and on CUDA the first use of a group over its two ranks. So
    # every rank walks the same sorted list of pairs, in it or not:
    #
    #   carried = [((0, 1), edge 0), ((0, 2), edge 1), ((1, 3), edge 2)]
    #   rank 0    group, open        group, open        group
    #   rank 1    group, open        group              group, open
    #   rank 2    group              group, open        group
    #
    # Both ranks of a pair come to its `_open` having opened all their pairs before it in one order: no
    # circle. Were groups opened at the first message instead, one host would wait in NCCL while the
    # other waits elsewhere.
    timeout = datetime.timedelta(seconds=timeout_s)
    groups: dict[Pair, dist.ProcessGroup] = {}
    for pair, edge in carried:
        with widened_sockets():
            group: Any = dist.new_group(
                list(pair), timeout=timeout, group_desc=f"P2PCommunicator of {plan.edge_name(edge)}"
            )
        if dist.get_rank() in pair:
            groups[pair] = group
            if device.type == "cuda":
                _open(_make_communicator(group, torch.float32), device)
    return groups


def _pair(first: int, second: int) -> Pair:
    return (first, second) if first < second else (second, first)


def _make_communicator(group: dist.ProcessGroup, dtype: torch.dtype) -> Any:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    config = ModelParallelConfig(
        pipeline_dtype=dtype, batch_p2p_comm=False, overlap_p2p_comm=True, variable_seq_lengths=False
    )
    return P2PCommunicator(group, config)


def _open(communicator: Any, device: torch.device) -> None:
    """Move one value each way: NCCL makes a communicator at the first use, where both hosts wait for each other."""
    value = torch.zeros(1, device=device)
    is_low = communicator.pp_group.rank() == 0
    for is_sender in (is_low, not is_low):
        # Both directions, one after the other: they are two communicators (see above), each
        # made at its first use.
        arguments = (value, False, None) if is_sender else (None, True, [1])
        _, handles = communicator.send_forward_recv_forward(*arguments, overlap_p2p_comm=True)
        for handle in handles.values():
            handle.wait()


class MegatronTransports(TransportFactory):
    """What ``"p2p": "megatron"`` names: communicators where they can carry an edge, our own transport elsewhere."""

    def check(self, device: str) -> None:
        """Refuse a job without megatron-core, or without a device for each rank.

        Raises:
            ConfigError: megatron-core is not installed, or the default group does not move tensors of ``device``.
        """
        if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
            raise ConfigError(
                f"{_KEY}: \"megatron\" needs megatron-core, which is not installed; pip install 'megatron-core>=0.16', "
                'or write "native"'
            )
        backend = dist.get_backend() if dist.is_initialized() else ""
        if torch.device(device).type == "cuda" and "nccl" not in backend:
            raise ConfigError(
                f'{_KEY}: "megatron" on a CUDA device sends over NCCL, which needs a device for each rank; the default '
                f'group is {backend or "not there"}; write "native", which stages messages through the host'
            )

    def make(self, request: TransportRequest) -> Transport:
        """Return a transport that uses a `P2PCommunicator` between the ranks of each edge that it can carry.

        Collective: all channels of the plan's programs give the pairs of ranks.
        """
        plan, native = request.plan, NATIVE_TRANSPORT.make(request)
        chosen = choose_edge_transports(plan, MEGATRON, specs=request.specs)
        edges = {choice.edge for choice in chosen if choice.transport == MEGATRON}
        if not edges:
            return native
        device, timeout_s = torch.device(request.device), request.timeout_s
        is_cuda = device.type == "cuda"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of optional packages that megatron-core does without
            importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
            cpu.install()
        if not is_cuda:
            widen_open_sockets()  # one direction uses the default group
        # An edge's two directions are one pair of ranks, one group; a channel has one direction.
        ends = {(plan.edges[edge].src, plan.edges[edge].dst): edge for edge in sorted(edges)}
        carried = set()
        for channel in request.channels:
            source, target = (plan.stage_of_rank(rank) for rank in channel)
            edge = ends.get((source, target), ends.get((target, source)))
            if edge is not None:
                carried.add((_pair(*channel), edge))
        group_timeout_s = collective_timeout_s(plan, timeout_s) if is_cuda else timeout_s
        return MegatronTransport(
            native=native,
            groups=_make_groups(plan, sorted(carried), device=device, timeout_s=group_timeout_s),
            timeout_s=None if is_cuda else timeout_s,
        )


MEGATRON_TRANSPORT = MegatronTransports()


# ---- what benchmarks compare with ------------------------------------------------------------------------------
#
# Megatron-core's multi-module communicator under Megatron's 1F1B. Megatron-core 0.16 ships the communicator without a
# schedule that uses it; the loop here is the one Megatron-LM puts around it: warm-up as the communicator counts it,
# then forward and backward in turn.

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
