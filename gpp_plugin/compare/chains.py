"""A chain of stages whose compute is a delay, run by DeepSpeed's PipelineEngine and by torch's Schedule1F1B.

What schedules are compared with: every runtime gets the same delays, the same bytes between neighbours and the
same micro-batches. The optimizer step and the exchange of the loss are left out for all of them.

From a process that starts ranks::

    times_ms = measure_chain(chain, repeats=7, timeout_s=120)     # {"deepspeed": [...], "torch_1f1b": [...]}

From ranks that run already, to alternate with other runtimes::

    runs = {name: make_iteration(name, chain) for name in RUNTIMES} | {"gpp": own_iteration}
    times_ms = time_iterations(runs, repeats=7)
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
from gpp_plugin.integrations.pipeline_peer import PipelinePeer, join_ranks
from gpp_plugin.launch import emit_event, run_ranks
from gpp_plugin.runtime.delay import wait_us

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
    events = run_ranks(
        __name__,
        arguments,
        num_ranks=chain.num_stages,
        timeout_s=timeout_s,
        environment={"DS_ACCELERATOR": "cpu"},
    )
    times: dict[str, list[float]] = {}
    for event in events:
        times = event["times_ms"]
    return times


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
    for repeat in range(-warm_up, repeats):
        for name, iterate in iterations.items():
            dist.barrier()
            start = time.perf_counter()
            iterate()
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if repeat >= 0:
                times[name].append(float(slowest) * 1e3)
    return times


class _Delay(torch.autograd.Function):
    """Waits in forward and in backward; makes tensors of the right size."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, stage: _DelayStage) -> Tensor:
        ctx.stage, ctx.size = stage, features.shape
        wait_us(stage.forward_us)
        return features.new_zeros(1, stage.num_outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        wait_us(ctx.stage.backward_us)
        return gradients[0].new_zeros(ctx.size), gradients[0].new_zeros(1), None


class _DelayStage(nn.Module):
    """One stage: a weight, so that there is a backward, and two delays."""

    def __init__(self, *, forward_us: float, backward_us: float, num_outputs: int) -> None:
        super().__init__()
        self.forward_us, self.backward_us, self.num_outputs = forward_us, backward_us, num_outputs
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = _Delay.apply(features, self.weight, self)  # type: ignore[no-untyped-call]
        return result


def _stages(chain: Chain) -> list[_DelayStage]:
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


def main() -> None:
    """Measure on this rank; rank 0 reports."""
    task = json.loads(sys.argv[1])
    chain = Chain(**{name: _tuple(value) for name, value in task["chain"].items()})
    torch.set_num_threads(1)
    join_ranks()
    iterations = {name: make_iteration(name, chain) for name in task["runtimes"]}
    times = time_iterations(iterations, repeats=task["repeats"])
    if os.environ["RANK"] == "0":
        emit_event(times_ms=times)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
