"""Draws of the exactness bench that keep something from one mini-batch to the next: mode async, and frozen prefetch.

Both run as an engine runs them: programs of a pipeline that is emptied once, at the end, with versions of weights; or a
frozen branch on the next mini-batch in the program of this one. What mode async must equal is PipeDream's rule itself,
one micro-batch after the other in one process (`stale_gradients`), which knows no windows, ranks or messages.

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.2
Tests: tests/bench/test_exactness.py
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks._linear_stages import (
    Delayed,
    GradientError,
    LinearHooks,
    LinearNetwork,
    Parameters,
    Trained,
    in_double,
    single_process_gradients,
    stage_compute,
    stage_rows,
    starts_nearby,
    stepped,
    worst_error,
)
from gpp_benchmarks._random_plans import Draw, forward_only_of, random_plan, with_family
from gpp_plugin.ir.plan import PipelinePlan, forward_only_stages, frozen_branch
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.plugins import Transport
from gpp_plugin.runtime.executor import RankExecutor, StageExecutor
from gpp_plugin.runtime.messages.mailbox import LocalTransfers
from gpp_plugin.runtime.weight_versions import WeightVersions
from gpp_plugin.schedule.checks.validate_programs import validate_async, validate_prefetch
from gpp_plugin.schedule.orders.async_1f1b import asynchronous_in_flight, windows_of
from gpp_plugin.schedule.program_sets import (
    ProgramPlace,
    ProgramSet,
    RankPrograms,
    lower_async,
    lower_prefetch,
)

KEPT_FAMILIES = ("async", "look_ahead")
_ORDERS = ("1f1b", "gpipe", "kfkb", "greedy", "sliced", "zero_bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDraw:
    """A random plan and its programs, of mode async or with a frozen branch that is prefetched."""

    seed: int
    family: str
    plan: PipelinePlan
    forward_only: frozenset[int]
    programs: ProgramSet

    def validate(self) -> None:
        """Prove the programs.

        Raises:
            ScheduleError: they are unsafe.
        """
        if self.programs.windows is not None:
            validate_async(self.plan, self.programs, forward_only_stages=self.forward_only)
        else:
            validate_prefetch(self.plan, self.programs)

    @property
    def least_mini_batches(self) -> int:
        """Return how many mini-batches it takes until a program is run a second time."""
        windows = self.programs.windows
        return 1 if windows is None else windows.first_steady + 1


def kept_draw(seed: int, family: str, **options: Any) -> KeptDraw:
    """Return a random plan of one of `KEPT_FAMILIES`; options as of `random_plan`."""
    rng = random.Random(seed)
    if family == "async":
        plan = _random_async_plan(rng, options)
        frozen = forward_only_of(plan, rng)
        programs = lower_async(plan, forward_only_stages=frozen)
        return KeptDraw(seed=seed, family=family, plan=plan, forward_only=frozen, programs=programs)
    plan = _random_frozen_plan(rng, options)
    return KeptDraw(
        seed=seed,
        family=family,
        plan=plan,
        forward_only=forward_only_stages(plan),
        programs=lower_prefetch(plan, reduce_each_backward=rng.random() < 0.3),
    )


def _random_async_plan(rng: random.Random, options: dict[str, Any]) -> PipelinePlan:
    """Return a random plan of one micro-batch size, which every degree divides."""
    while True:
        plan = random_plan(rng, **options)
        size = rng.choice([4, 12])
        if all(size % stage.degree == 0 for stage in plan.stages):
            break
    counts, extra = asynchronous_in_flight(plan), rng.choice([0, 0, 1])
    num = len(plan.stages)
    uniform = plan.with_each(
        micro_batch_size=[size] * num,
        schedule=["1f1b"] * num,
        k=[1] * num,
        in_flight=[count + extra for count in counts],
    )
    vertical_sync = rng.random() < 0.3
    mini_batch = size * rng.choice([1, 2, 3, 5])
    return dataclasses.replace(uniform, mode="async", vertical_sync=vertical_sync, mini_batch=mini_batch)


def _random_frozen_plan(rng: random.Random, options: dict[str, Any]) -> PipelinePlan:
    """Return a random plan some of whose stages run ahead."""
    while True:
        plan = random_plan(rng, **options)
        cut = {i for i in range(len(plan.stages)) if rng.random() < 0.5}
        edges = tuple(dataclasses.replace(e, gradient_tensors=()) if e.src in cut else e for e in plan.edges)
        plan = dataclasses.replace(plan, edges=edges)
        frozen = forward_only_stages(plan)
        if frozen_branch(plan) and not any(e.gradient_tensors and e.dst in frozen for e in plan.edges):
            return with_family(plan, rng.choice(_ORDERS), rng)


# ---- running one rank ----------------------------------------------------------------------------------------


class DrawnRank:
    """The stages of one rank in a draw: what runs each program of each, and the hooks that note what comes of it."""

    def __init__(
        self,
        draw: Draw | KeptDraw,
        network: LinearNetwork,
        *,
        rank: int,
        groups: Mapping[int, dist.ProcessGroup | None],
        transport: Transport | None,
        delays: random.Random,
        longest_delay_s: float,
    ) -> None:
        self._draw, self._network, self._rank = draw, network, rank
        self._transport = transport
        self._delays, self._longest_delay_s = delays, longest_delay_s
        self._local_transfers = LocalTransfers()
        self.stages = tuple(groups)
        self.hooks = {
            index: LinearHooks({n: nn.Parameter(p.clone()) for n, p in network.starts[index].items()}, group)
            for index, group in groups.items()
        }
        self._made: dict[int, tuple[Any, Any]] = {}

    def executor(self, programs: RankPrograms) -> RankExecutor:
        """Return what runs the rank's programs."""
        return RankExecutor(programs, local_transfers=self._local_transfers, step=self._step)

    def _step(self) -> None:
        for own in self.hooks.values():
            own.step()

    def done(self) -> dict[int, Trained]:
        """Return what came of each stage."""
        return {index: hooks.done for index, hooks in self.hooks.items()}

    def make(self, program: RankProgram, place: ProgramPlace | None = None) -> StageExecutor:
        """Return what runs a program of one stage; all of a stage's share what computes."""
        index, network = program.stage, self._network
        compute, versions = self._made[index]
        return StageExecutor(
            plan=self._draw.plan,
            program=program,
            compute=compute,
            specs=network.specs,
            transport=self._transport,
            hooks=self.hooks[index],
            device=torch.device("cpu"),
            loss=compute.outputs[-1] if network.stages[index].has_loss else None,
            place=place,
            local_transfers=self._local_transfers,
            versions=versions,
        )

    def begin(self, program: RankProgram, versions: WeightVersions | None = None) -> None:
        """Make what computes a stage; ``program`` has all that it ever sends and receives."""
        own = self.hooks[program.stage]
        compute: Any = stage_compute(self._network, program, own.parameters, own, versions=versions)
        if self._longest_delay_s:
            compute = Delayed(compute, self._delays, self._longest_delay_s)
        self._made[program.stage] = compute, versions

    def versions(self, stage: int) -> WeightVersions | None:
        """Return the versions of a stage's weights in mode async; None where it trains nothing."""
        if stage in self._draw.forward_only:
            return None
        plan = self._draw.plan
        windows = windows_of(plan)
        return WeightVersions(
            list(self.hooks[stage].parameters.values()),
            most=plan.num_versions(stage),
            lag=windows.staleness(stage) if windows.vertical_sync else None,
        )

    def rows(self, data: Tensor) -> list[list[tuple[Tensor, ...]]]:
        """Return what each stage's micro-batches read of a mini-batch."""
        return [stage_rows(self._network, index, self._rank, data) for index in self.stages]


def train_kept(
    draw: KeptDraw, network: LinearNetwork, batches: Sequence[Tensor], *, rank: int, **given: Any
) -> dict[int, Trained]:
    """Run the mini-batches one behind the other; return what came of each stage of this rank.

    Args:
        given: ``groups`` of the rank's stages, ``transport``, ``delays`` and ``longest_delay_s``.
    """
    own = DrawnRank(draw, network, rank=rank, **given)
    programs = draw.programs.of_rank(rank)
    makers = [programs.of_stage(stage) for stage in own.stages]
    for of_stage in makers:
        own.begin(of_stage.main, None if programs.windows is None else own.versions(of_stage.main.stage))
    parts = {
        name: [own.make(of_stage.programs[name], of_stage.place(name)) for of_stage in makers]
        for name in programs.programs
    }
    executor, policy = own.executor(programs), programs.policy
    for now, following in zip(batches, (*batches[1:], None), strict=True):
        *first, last = policy.calls[executor.last, policy.can_prefetch and following is not None]
        for name, branch in [*((name, now) for name in first), (last, following)]:
            ours, next_ones = own.rows(now), own.rows(now if branch is None else branch)
            pairs = zip(makers, ours, next_ones, strict=True)
            rows = [theirs if of_stage.is_prefetched else mine for of_stage, mine, theirs in pairs]
            executor.run(name, parts[name], rows)
    drain = policy.drains.get(executor.last)
    if drain is not None:
        executor.run(drain, parts[drain], [()] * len(makers))
    return own.done()


# ---- what it must equal --------------------------------------------------------------------------------------


def stale_gradients(
    network: LinearNetwork, batches: Sequence[Tensor]
) -> list[list[dict[str, Tensor | None]]]:
    """Return the gradient of each update of each stage under PipeDream's rule, in one process.

    A stage that holds k micro-batches uses for micro-batch m its weights after m - k + 1 updates; with vertical sync k
    is that of the stage that holds most.
    """
    plan = network.plan
    size = plan.stages[0].micro_batch_size
    held = [stage.in_flight for stage in plan.stages]
    lags = [max(held)] * len(held) if plan.vertical_sync else held
    history: list[list[Parameters]] = [[start] for start in network.starts]
    found: list[list[dict[str, Tensor | None]]] = [[] for _ in plan.stages]

    def update(stage: int) -> None:
        gradients = found[stage][len(history[stage]) - 1]
        newest = history[stage][-1]
        history[stage].append(
            {n: p if (g := gradients[n]) is None else stepped(p, g) for n, p in newest.items()}
        )

    for number, data in enumerate(row for batch in batches for row in batch.split(size)):
        used = [history[stage][max(0, number - lag + 1)] for stage, lag in enumerate(lags)]
        for stage, gradients in enumerate(single_process_gradients(network, used, data)):
            found[stage].append(gradients)
            if len(found[stage]) - len(history[stage]) + 1 >= held[stage]:
                update(stage)
    return found


def stale_error(
    run: Mapping[int, Trained], network: LinearNetwork, batches: Sequence[Tensor]
) -> GradientError:
    """Return the worst error of a gradient tensor of any update of this rank's stages against one process.

    Its rounding is that process's own against itself in fp64, steps included.
    """
    answers = []
    for starts in starts_nearby(network.starts):
        plainly = dataclasses.replace(network, starts=starts)
        exactly = dataclasses.replace(network, starts=tuple(map(in_double, starts)))
        in_fp64 = stale_gradients(exactly, [data.double() for data in batches])
        answers.append((stale_gradients(plainly, batches), in_fp64))
    expected = answers[0][0]
    for stage, own in run.items():
        due = 0 if stage in network.forward_only else len(expected[stage])
        assert len(own.gradients) == due, f"stage {stage} made {len(own.gradients)} of {due} updates"
    found = [GradientError(0.0, 0.0)]
    for number in range(len(expected[0])):
        ours = {
            stage: own.gradients[number] for stage, own in run.items() if stage not in network.forward_only
        }
        of_update = [
            ([of_stage[number] for of_stage in plain], [of_stage[number] for of_stage in exact])
            for plain, exact in answers
        ]
        found.append(worst_error(ours, of_update))
    return max(found, key=GradientError.excess)
