"""Runs plans and chains whose compute is a delay, in turn, on ranks that are started once: schedules are measured so.

A round runs every contender once, so that load from elsewhere is the same for all. Plans are run by this package's
executor. A chain is run by DeepSpeed's PipelineEngine and by torch's Schedule1F1B; a plan, each stage a module, by
megatron-core's multi-module communicator. Every runtime gets the same delays, the same bytes between neighbours and
the same micro-batches. The optimizer step and the exchange of the loss are left out for all of them.

Source: this project
Tests: tests/compare/test_chains.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.stock_engine import PipelinePeer, join_ranks
from gpp_plugin.integrations.megatron.p2p import MegatronPeer, PeerModule
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.serialize import load, save
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.launch import check_priority, emit_event, end_rank, real_time, run_ranks
from gpp_plugin.rehearse.rehearsal import RehearsalSettings
from gpp_plugin.rehearse.rehearsal_rank import RehearsalRank, wait_us
from gpp_plugin.schedule.event_loop import Durations, duration_reader

# The time limit of a run, in s: imports and connections take SECONDS_PER_RANK for each rank where ranks share
# few cores; SLOWNESS is how much longer than planned a round may take before something must be stuck.
SECONDS_PER_RANK = 15.0
LEAST_SECONDS = 180.0
SLOWNESS = 5.0
SETTINGS = RehearsalSettings()
WARM_UP = 2
"""Rounds before those that count."""

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
    iterations: Mapping[str, Iteration], *, repeats: int, warm_up: int = WARM_UP
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


# ---- plans and chains in turn --------------------------------------------------------------------------------

TaskTimes = Mapping[tuple[int, TaskKind, int], float]
"""Microseconds by (stage, kind, micro-batch)."""
RankTimes = Mapping[tuple[int, TaskKind, int, int], float]
"""The same on each rank, the last entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternatedBenchmark:
    """What is run in turn on the same ranks.

    Args:
        plans: name -> plan, run by this package's executor.
        chain: run by ``runtimes``; None for plans only.
        runtimes: of `RUNTIMES`.
        has_timelines: record every mini-batch's timeline of the plans (then no chain).
        durations: plan -> the times of its tasks, where they are not the plan's own.
        by_round: plan -> the same by round, where each mini-batch has times of its own; in turn, where there are fewer.
        megatron: the plans that megatron-core's multi-module communicator runs as well, as ``megatron NAME``.
        ahead: the plans whose frozen branch is prefetched.
    """

    name: str
    plans: dict[str, PipelinePlan]
    chain: Chain | None = None
    runtimes: tuple[str, ...] = ()
    has_timelines: bool = False
    durations: Mapping[str, TaskTimes] = field(default_factory=dict)
    by_round: Mapping[str, Sequence[RankTimes]] = field(default_factory=dict)
    megatron: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Milliseconds of every iteration by contender, and timelines by plan where they were requested."""

    times_ms: dict[str, list[float]]
    timelines: dict[str, list[Timeline]]


def run_alternated(
    contests: Sequence[AlternatedBenchmark],
    *,
    num_ranks: int,
    rounds: int,
    seconds: float,
    tell: Callable[[str], None],
    is_real_time: bool = False,
) -> dict[str, Outcome]:
    """Start the ranks, run the benchmarks one after the other and return their outcomes by name.

    Args:
        seconds: about how long one round of all benchmarks takes.
        tell: called with each line of progress.
        is_real_time: other programs of the machine wait while a benchmark runs.

    Raises:
        ConfigError: real-time priority is not permitted.
        RuntimeFailure: a rank failed or the time ran out.
    """
    if is_real_time:
        check_priority()
    # What the ranks read and write in the folder, for benchmark 0 with plans a and b in 2 rounds:
    #
    #   task.json                             what is run; rank 0 emits one event a benchmark when it is done
    #   0.a.plan.json    0.b.plan.json        read by every rank
    #   0.a.0.json 0.a.1.json  0.b.0.json ... timelines by round, written by rank 0 before its event
    #
    # Either timelines or times: recording events costs time, so a benchmark with timelines is not timed from outside.
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="gpp_alternated_") as name:
        folder = Path(name)
        written = [_write(folder, number, each) for number, each in enumerate(contests)]
        task = {"is_real_time": is_real_time, "rounds": rounds, "benchmarks": written}
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        events = run_ranks(
            __name__,
            [str(folder)],
            num_ranks=num_ranks,
            # Two rounds more than requested: the warm-up's.
            timeout_s=LEAST_SECONDS + SECONDS_PER_RANK * num_ranks + SLOWNESS * seconds * (rounds + 2),
            environment={"DS_ACCELERATOR": "cpu"},
        )
        for event in events:
            number = event["benchmark"]
            own = contests[number]
            timelines = {
                plan: [load(Timeline, folder / f"{number}.{plan}.{r}.json") for r in range(rounds)]
                for plan in (own.plans if own.has_timelines else ())
            }
            times = event["times_ms"] or {
                plan: [timeline.iteration_us / 1e3 for timeline in found] for plan, found in timelines.items()
            }
            outcomes[own.name] = Outcome(times_ms=times, timelines=timelines)
            tell(f"{own.name}: {rounds} rounds of {', '.join(times)} on {num_ranks} ranks")
    return outcomes


def _write(folder: Path, number: int, benchmark: AlternatedBenchmark) -> dict[str, Any]:
    for name, plan in benchmark.plans.items():
        save(plan, folder / f"{number}.{name}.plan.json")
    names = ("runtimes", "has_timelines", "megatron", "ahead")
    return {
        "plans": list(benchmark.plans),
        "chain": dataclasses.asdict(benchmark.chain) if benchmark.chain is not None else None,
        "durations": {name: _listed(times) for name, times in benchmark.durations.items()},
        "by_round": {name: [_listed(times) for times in each] for name, each in benchmark.by_round.items()},
        **{name: getattr(benchmark, name) for name in names},
    }


def _listed(times: TaskTimes | RankTimes) -> list[tuple[Any, ...]]:
    # JSON has no tuples as keys: (0, F, 3) and (0, F, 3, rank 1) become 0, "F", 3, us and 0, "F", 3, 1, us
    return [(stage, kind.value, *rest, us) for (stage, kind, *rest), us in times.items()]


def _read(listed: list[list[Any]]) -> dict[tuple[Any, ...], float]:
    return {(stage, TaskKind(kind), *rest): us for stage, kind, *rest, us in listed}


def _taking_turns(
    plan: RehearsalRank, durations: dict[tuple[Any, ...], float], rounds: Sequence[Mapping[Any, float]]
) -> Iteration:
    """Return what runs a plan with the times of one round after the other, which it reads from ``durations``."""
    number = itertools.count(-WARM_UP)

    def iterate() -> None:
        durations.update(rounds[max(next(number), 0) % len(rounds)])
        plan.iterate()

    return iterate


def main() -> None:
    """Run this rank's part of all benchmarks; rank 0 reports."""
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    join_ranks()
    for number, own in enumerate(task["benchmarks"]):
        read = {name: load(PipelinePlan, folder / f"{number}.{name}.plan.json") for name in own["plans"]}
        durations = {name: _read(times) for name, times in own["durations"].items()}
        by_round = {name: [_read(times) for times in each] for name, each in own["by_round"].items()}
        durations |= {name: dict(each[0]) for name, each in by_round.items()}
        plans = {
            name: RehearsalRank(
                plan,
                SETTINGS,
                has_step=False,
                durations=durations.get(name),
                prefetches=name in own["ahead"],
            )
            for name, plan in read.items()
        }
        iterations: dict[str, Iteration] = {name: plan.iterate for name, plan in plans.items()}
        iterations |= {
            name: _taking_turns(plans[name], durations[name], each) for name, each in by_round.items()
        }
        if own["chain"] is not None:
            chain = Chain(**own["chain"])
            iterations |= {name: make_iteration(name, chain) for name in own["runtimes"]}
        iterations |= {
            f"megatron {name}": make_megatron_iteration(read[name], durations.get(name))
            for name in own["megatron"]
        }
        times: dict[str, list[float]] | None = None
        # Only while something is measured: a real-time process that
        # spins in an import would starve the machine.
        with real_time() if task["is_real_time"] else contextlib.nullcontext():
            if own["has_timelines"]:
                _record(plans, folder, number, task["rounds"])
            else:
                times = time_iterations(iterations, repeats=task["rounds"])
        if dist.get_rank() == 0:
            emit_event(benchmark=number, times_ms=times)
    # A rank that ends while another still reads its messages makes gloo report a lost connection.
    dist.barrier()
    end_rank()


def _record(plans: dict[str, RehearsalRank], folder: Path, number: int, rounds: int) -> None:
    # One round of warm-up, -1, which is not saved.
    for round_number in range(-1, rounds):
        for name, plan in plans.items():
            timeline = plan.run()
            if timeline is not None and round_number >= 0:
                save(timeline, folder / f"{number}.{name}.{round_number}.json")


if __name__ == "__main__":
    main()
