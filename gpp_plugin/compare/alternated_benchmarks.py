"""Runs emulated plans and chains in turn on ranks that are started once: schedule benchmarks measure with it.

A round runs every contender once, so that load from elsewhere is the same for all.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpp_plugin.compare.chains import (
    Chain,
    Iteration,
    make_iteration,
    make_megatron_iteration,
    time_iterations,
)
from gpp_plugin.integrations.deepspeed.pipeline_peer import join_ranks
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.serialize import load, save
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.launch import check_priority, emit_event, end_rank, real_time, run_ranks
from gpp_plugin.rehearse.rehearsal import RehearsalSettings
from gpp_plugin.rehearse.rehearsal_rank import RehearsalRank

# The time limit of a run, in s: imports and connections take SECONDS_PER_RANK for each rank where ranks share
# few cores; SLOWNESS is how much longer than planned a round may take before something must be stuck.
SECONDS_PER_RANK = 15.0
LEAST_SECONDS = 180.0
SLOWNESS = 5.0
SETTINGS = RehearsalSettings()
WARM_UP = 2
"""Rounds before those that count."""

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
        runtimes: of `chains.RUNTIMES`.
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
                times = time_iterations(iterations, repeats=task["rounds"], warm_up=WARM_UP)
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
