"""Other runtimes on stages whose compute is a delay: what schedules are compared with.

A chain is run by DeepSpeed's PipelineEngine and by torch's Schedule1F1B; a plan, each stage a module, by
megatron-core's multi-module communicator. Every runtime gets the same delays, the same bytes between neighbours and
the same micro-batches. The optimizer step and the exchange of the loss are left out for all of them.

From a process that starts ranks::

    times_ms = measure_chain(chain, repeats=7, timeout_s=120)     # {"deepspeed": [...], "torch_1f1b": [...]}

From ranks that run already, to alternate with other runtimes::

    runs = {name: make_iteration(name, chain) for name in RUNTIMES} | {"gpp": own_iteration}
    times_ms = time_iterations(runs, repeats=7)

Source: this project
Tests: tests/compare/test_chains.py
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.pipeline_peer import PipelinePeer, join_ranks
from gpp_plugin.integrations.megatron.megatron_peer import MegatronPeer, PeerModule
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.launch import emit_event, run_ranks
from gpp_plugin.rehearse.rehearsal_rank import wait_us
from gpp_plugin.schedule.event_loop import Durations, duration_reader

RUNTIMES = ("deepspeed", "torch_1f1b")

Iteration = Callable[[], None]
"""Runs all forwards, backwards and messages of one mini-batch on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages one after the other, one rank each.

    Args:
        forward_us, backward_us: time of one micro-batch on each stage.
        boundary_bytes: bytes of the activations (and of their gradients) of one micro-batch between stage i
            and i + 1; one entry fewer than stages.
        num_micro_batches: micro-batches of one iteration.
    """

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    boundary_bytes: tuple[int, ...]
    num_micro_batches: int

    def __post_init__(self) -> None:
        stages = len(self.forward_us)
        if stages < 2 or len(self.backward_us) != stages or len(self.boundary_bytes) != stages - 1:
            raise ValueError(
                f"{stages} forward times, {len(self.backward_us)} backward times and {len(self.boundary_bytes)} "
                "boundaries; give p >= 2, p and p - 1"
            )
        if self.num_micro_batches < 1 or min(*self.forward_us, *self.backward_us) < 0:
            raise ValueError("times must not be negative, and there must be at least one micro-batch")

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.forward_us)


def measure_chain(
    chain: Chain, *, runtimes: Sequence[str] = RUNTIMES, repeats: int = 7, timeout_s: float = 120.0
) -> dict[str, list[float]]:
    """Start one process a stage and return the iteration times in ms of every runtime, alternated.

    Raises:
        RuntimeFailure: a rank failed or the time ran out.
    """
    arguments = [json.dumps({"chain": asdict(chain), "runtimes": list(runtimes), "repeats": repeats})]
    environment = {"DS_ACCELERATOR": "cpu"}
    events = run_ranks(
        __name__, arguments, num_ranks=chain.num_stages, timeout_s=timeout_s, environment=environment
    )
    found: list[dict[str, list[float]]] = [event["times_ms"] for event in events]
    return found[-1] if found else {}


def make_iteration(runtime: str, chain: Chain) -> Iteration:
    """Return this rank's part of one iteration of ``chain``; collective over its stages' ranks.

    Raises:
        ConfigError: no such runtime, or the ranks are not one a stage.
    """
    if dist.get_world_size() != chain.num_stages:
        raise ConfigError(
            f"a chain of {chain.num_stages} stages needs as many ranks, not {dist.get_world_size()}"
        )
    makers = {"deepspeed": _deepspeed_iteration, "torch_1f1b": _torch_iteration}
    if runtime not in makers:
        raise ConfigError(f"no runtime {runtime!r}; there are {', '.join(makers)}")
    return makers[runtime](chain)


def time_iterations(
    iterations: Mapping[str, Iteration], *, repeats: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Run the iterations in turn, ``repeats`` times each, and return their times in ms.

    All ranks start an iteration together; its time ends with the last rank.
    """
    times: dict[str, list[float]] = {name: [] for name in iterations}
    # Repeats outside, contenders inside: a slow second of the machine is shared by all of them instead of
    # being one contender's. The first rounds, with negative numbers, allocate and connect, and do not count.
    #
    #   repeat   -2      -1      0       1
    #            a b     a b     a b     a b       times: a from 0 on, b from 0 on
    for repeat in range(-warm_up, repeats):
        for name, iterate in iterations.items():
            dist.barrier()
            start = time.perf_counter()
            iterate()
            # The clock is read before the reduction, which is only there to find the slowest rank.
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if repeat >= 0:
                times[name].append(float(slowest) * 1e3)
    return times


class _Delay(torch.autograd.Function):
    """Waits in forward and in backward; makes tensors of the right shapes."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, times_us: tuple[float, float], shape: tuple[int, ...], *inputs: Tensor
    ) -> Tensor:
        ctx.backward_us, ctx.weight_shape = times_us[1], weight.shape
        ctx.input_shapes = [tensor.shape for tensor in inputs]
        wait_us(times_us[0])
        return weight.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wait_us(ctx.backward_us)
        # Contents do not matter, sizes do: zeros of the inputs' shapes travel back, and the weight's gradient
        # is what makes autograd call this at all.
        (gradient,) = gradients
        made = [gradient.new_zeros(shape) for shape in (ctx.weight_shape, *ctx.input_shapes)]
        return made[0], None, None, *made[1:]


class _DelayStage(nn.Module):
    """One stage: a weight, so that there is a backward, and two delays."""

    def __init__(self, *, forward_us: float, backward_us: float, num_outputs: int) -> None:
        super().__init__()
        self.times_us, self.shape = (forward_us, backward_us), (1, num_outputs)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = _Delay.apply(self.weight, self.times_us, self.shape, features)  # type: ignore[no-untyped-call]
        return result


def _stages(chain: Chain) -> list[_DelayStage]:
    # float32: 4 bytes each. The last stage returns nothing but a loss of one number.
    floats = [max(1, size // 4) for size in chain.boundary_bytes]
    return [
        _DelayStage(forward_us=forward, backward_us=backward, num_outputs=count)
        for forward, backward, count in zip(chain.forward_us, chain.backward_us, [*floats, 1], strict=True)
    ]


def _deepspeed_iteration(chain: Chain) -> Iteration:
    peer = PipelinePeer(
        _stages(chain),
        loss=lambda output, label: output.sum(),
        micro_batch_size=1,
        num_micro_batches=chain.num_micro_batches,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    row = torch.zeros(1, 1)

    def iterate() -> None:
        # The data is one number a micro-batch: only the first stage
        # reads it, and its delay stands for the rest.
        peer.run(iter([(row, row)] * chain.num_micro_batches))

    return iterate


def _torch_iteration(chain: Chain) -> Iteration:
    rank = dist.get_rank()
    stage = PipelineStage(_stages(chain)[rank], rank, chain.num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, n_microbatches=chain.num_micro_batches, loss_fn=lambda output, target: output.sum()
    )
    rows = torch.zeros(chain.num_micro_batches, 1)

    def iterate() -> None:
        if rank == 0:
            schedule.step(rows)
        elif rank == chain.num_stages - 1:
            schedule.step(target=rows, return_outputs=False)
        else:
            schedule.step()

    return iterate


def make_megatron_iteration(plan: PipelinePlan, durations: Durations | None) -> Iteration:
    """Return this rank's part of one iteration of ``plan``; collective over its ranks.

    Args:
        plan: one rank a stage, equal micro-batches, one tensor a stage, and one stage that nothing is sent from.
        durations: of single tasks; the plan's own if None.
    """
    # The communicator takes modules (name, ranks, consumers) and makes its own order; only stages, edges and times are
    # from the plan. CLIP in three stages of one rank each becomes
    #
    #   vision (rank 0) --.
    #                      >-- loss (rank 2)         consumers: vision -> (loss,), text -> (loss,), loss -> ()
    #   text   (rank 1) --'
    consumers: Mapping[int, list[str]] = {index: [] for index in range(len(plan.stages))}
    for edge in plan.edges:
        consumers[edge.src].append(plan.stages[edge.dst].name)
    modules = [
        PeerModule(
            name=stage.name,
            first_rank=stage.ranks[0],
            stages=1,
            degree=1,
            tensor=1,
            consumers=tuple(consumers[index]),
        )
        for index, stage in enumerate(plan.stages)
    ]
    rank = dist.get_rank()
    index = plan.stage_of_rank(rank)
    samples = plan.stages[index].micro_batch_size
    (rows, columns) = plan.tensors[0].shape_for(samples)
    # [rows of the micro-batch, 1, float32 values a row]: the axes b, s, h of the communicator's
    # ``dim_mapping``, which takes tensors of three axes only. 8 rows of 4 KiB are (8, 1, 1024).
    shape = (rows, 1, columns)  # the communicator's tensors have three dimensions
    peer = MegatronPeer(modules, shape=shape, dtype=torch.float32)
    made = shape if consumers[index] else ()  # the last stage makes a loss
    weight = torch.zeros(1, requires_grad=True)
    read = duration_reader(plan, durations)

    def forward(micro_batch: int, received: Mapping[str, Tensor]) -> Tensor:
        kinds = (TaskKind.FORWARD, TaskKind.BACKWARD)
        times = tuple(read(Task(stage=index, kind=k, micro_batch=micro_batch), rank) for k in kinds)
        output: Tensor = _Delay.apply(weight, times, made, *received.values())  # type: ignore[no-untyped-call]
        return output

    def iterate() -> None:
        # Else every micro-batch's zeros would be added to those of
        # iterations before: work no other contender does.
        weight.grad = None
        peer.run(forward, num_micro_batches=plan.num_micro_batches(index))

    return iterate


def main() -> None:
    """Measure on this rank; rank 0 reports."""
    task = json.loads(sys.argv[1])
    sizes: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in task["chain"].items()}
    chain = Chain(**sizes)
    torch.set_num_threads(1)
    join_ranks()
    iterations = {name: make_iteration(name, chain) for name in task["runtimes"]}
    times = time_iterations(iterations, repeats=task["repeats"])
    if os.environ["RANK"] == "0":
        emit_event(times_ms=times)


if __name__ == "__main__":
    main()
