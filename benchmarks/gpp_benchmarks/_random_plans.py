"""Random plans to prove schedules on: DAGs of stages with mixed micro-batches, degrees, schedules, tensors."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable

from gpp_benchmarks._emulated_graphs import with_in_flight
from gpp_plugin.errors import GppError
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules


def random_links(rng: random.Random, num_stages: int) -> list[tuple[int, int]]:
    """Return the links of a random DAG in which every stage but the first may have several of each."""
    density = rng.choice([0.15, 0.3, 0.6])
    links = {(src, dst) for dst in range(num_stages) for src in range(dst) if rng.random() < density}
    for dst in range(1, num_stages):
        if not any(link[1] == dst for link in links) and rng.random() < 0.85:
            links.add((rng.randrange(dst), dst))
    return sorted(links)


def random_plan(
    rng: random.Random,
    *,
    most_stages: int = 9,
    most_ranks: int = 24,
    num_ranks: int | None = None,
    shares_ranks: bool = False,
) -> PipelinePlan:
    """Return a random plan whose stages differ in micro-batch, degree, schedule, k, tensors and times.

    Args:
        num_ranks: ranks it uses; any number up to ``most_ranks`` where None.
        shares_ranks: put several stages on ranks.
    """
    while True:
        num_stages = rng.randint(2, most_stages)
        mini_batch = rng.choice([4, 6, 8, 12, 16, 24])
        divisors = [b for b in range(1, mini_batch + 1) if mini_batch % b == 0]
        stages: list[Stage] = []
        next_rank = 0
        is_uniform = rng.random() < 0.3
        common = rng.choice(divisors)
        for index in range(num_stages):
            size = common if is_uniform else rng.choice(divisors)
            degree = rng.choice([d for d in (1, 1, 2, 3, 4) if size % d == 0])
            schedule = rng.choice(["1f1b", "1f1b", "1f1b", "gpipe", "greedy"])
            stages.append(
                Stage(
                    name=f"s{index}",
                    blocks=(f"b{index}",),
                    ranks=tuple(range(next_rank, next_rank + degree)),
                    micro_batch_size=size,
                    in_flight=1,
                    schedule=schedule,
                    k=rng.choice([1, 1, 1, 2, 3, 4]),
                    forward_us=rng.uniform(0.1, 4.0),
                    backward_us=rng.uniform(0.1, 8.0),
                )
            )
            next_rank += degree
        if shares_ranks:
            shared = _on_shared_ranks(rng, stages, num_ranks or rng.randint(1, min(4, most_ranks)))
            if shared is None:
                continue
            stages, next_rank = shared
        elif next_rank > most_ranks or num_ranks not in (None, next_rank):
            continue
        edges = tuple(_random_edge(rng, src, dst) for src, dst in random_links(rng, num_stages))
        numbers = rng.sample(range(next_rank), next_rank)  # ranks of a stage need not follow each other
        plan = PipelinePlan(
            model="random",
            graph="none",
            planner="none",
            mini_batch=mini_batch,
            loss_unit=1,
            stages=tuple(stages),
            edges=edges,
        )
        ranks = [tuple(numbers[rank] for rank in stage.ranks) for stage in stages]
        return with_in_flight(plan.with_each(ranks=ranks))


def _on_shared_ranks(
    rng: random.Random, stages: list[Stage], num_ranks: int
) -> tuple[list[Stage], int] | None:
    """Return the stages on so many ranks, several of them on one at least, and that number; None where they do not fit.

    Either one behind the other, round and round (as interleaved stages are), or anywhere.
    """
    if any(stage.degree > num_ranks for stage in stages):
        return None
    is_round = rng.random() < 0.5
    placed, first = [], 0
    for stage in stages:
        ranks = [(first + i) % num_ranks for i in range(stage.degree)]
        first += stage.degree
        placed.append(
            dataclasses.replace(
                stage, ranks=tuple(ranks if is_round else rng.sample(range(num_ranks), stage.degree))
            )
        )
    used = [rank for stage in placed for rank in stage.ranks]
    return (placed, num_ranks) if len(set(used)) == num_ranks < len(used) else None


def _random_edge(rng: random.Random, src: int, dst: int) -> StageEdge:
    batch = tuple(f"x{src}_{i}" for i in range(rng.choice([0, 1, 1, 2])))
    whole = tuple(f"w{src}_{i}" for i in range(rng.choice([0, 0, 1]) if batch else 1))
    chance = rng.choice([1.0, 1.0, 0.5, 0.0])
    gradients = tuple(name for name in (*batch, *whole) if rng.random() < chance)
    return StageEdge(
        src=src,
        dst=dst,
        batch_tensors=batch,
        whole_tensors=whole,
        gradient_tensors=gradients,
        bytes_per_sample=rng.uniform(1e3, 1e6) * len(batch),
        bytes_fixed=rng.uniform(1e3, 1e6) * len(whole),
        gradient_bytes_per_sample=rng.uniform(1e3, 1e6) * len(batch),
        gradient_bytes_fixed=rng.uniform(1e3, 1e6) * len(whole),
    )


def forward_only_of(plan: PipelinePlan, rng: random.Random) -> frozenset[int]:
    """Return some of the stages through which no gradient need flow."""
    touched = {i for edge in plan.edges if edge.gradient_tensors for i in (edge.src, edge.dst)}
    return frozenset(i for i in range(len(plan.stages)) if i not in touched and rng.random() < 0.9)


# Random plans under every kind of schedule: what the exactness bench runs, and what the validator must pass.
#
# A draw is a random DAG of stages with mixed micro-batches and degrees (`_random_plans`), all of whose stages
# follow one family of schedules, or each stage its own.

FAMILIES = ("1f1b", "gpipe", "kfkb", "greedy", "sliced", "zero_bubble", "mixed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A random plan, its schedules and programs; lowered, not yet validated.

    Args:
        forward_only: stages that run no backwards.
    """

    seed: int
    family: str
    plan: PipelinePlan
    forward_only: frozenset[int]
    schedules: tuple[StageSchedule, ...]
    programs: tuple[RankProgram, ...]


def random_draw(
    seed: int,
    family: str | None = None,
    *,
    most_stages: int = 9,
    most_ranks: int = 24,
    num_ranks: int | None = None,
    may_freeze: bool = True,
    shares_ranks: bool = False,
) -> Draw:
    """Return a random plan under a family of schedules; the same for the same arguments.

    Args:
        family: one of `FAMILIES`; drawn where None.
        num_ranks: ranks the plan uses; any number up to ``most_ranks`` where None.
        shares_ranks: put several stages on ranks.
        may_freeze: leave stages without backwards where no gradient need flow.

    Raises:
        ValueError: the family is unknown.
        ScheduleError: the plan cannot be scheduled.
    """
    rng = random.Random(seed)
    drawn = rng.choice(FAMILIES)
    family = family or drawn
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}; choose one of {FAMILIES}")
    plan = with_family(
        random_plan(
            rng,
            most_stages=most_stages,
            most_ranks=most_ranks,
            num_ranks=num_ranks,
            shares_ranks=shares_ranks,
        ),
        family,
        rng,
    )
    frozen = forward_only_of(plan, rng)
    frozen = frozen if may_freeze else frozenset()
    schedules = build_schedules(plan, forward_only_stages=frozen)
    programs = lower_schedules(
        plan, schedules, forward_only_stages=frozen, reduce_each_backward=rng.random() < 0.3
    )
    return Draw(
        seed=seed, family=family, plan=plan, forward_only=frozen, schedules=schedules, programs=programs
    )


def with_family(plan: PipelinePlan, family: str, rng: random.Random) -> PipelinePlan:
    """Return ``plan`` with a schedule of that family on all stages, and the in-flight counts that asks for."""
    styles = [family]
    if family == "mixed":  # greedy counts can be too small for zero bubble, which moves ranks together
        styles = sorted(_STYLES.keys() - {rng.choice(["greedy", "zero_bubble"])})
    stages = tuple(_STYLES[rng.choice(styles)](stage, rng) for stage in plan.stages)
    counted = with_in_flight(dataclasses.replace(plan, stages=stages))
    if family == "zero_bubble" and rng.random() < 0.3:
        return _with_more_in_flight(counted, rng)
    return counted


Style = Callable[[Stage, random.Random], Stage]


def _styled(schedule: str, *ks: int) -> Style:
    """Return what gives a stage a schedule, and one of these k."""
    return lambda stage, rng: dataclasses.replace(stage, schedule=schedule, k=rng.choice(ks) if ks else 1)


def _sliced(stage: Stage, rng: random.Random) -> Stage:
    """Return the stage under 1F1B or kFkB with some forwards in halves, where its samples can be halved."""
    sliced = dataclasses.replace(stage, schedule="1f1b", k=rng.choice([1, 1, 2]))
    if stage.local_batch_size % 2:
        return sliced
    return dataclasses.replace(
        sliced, num_sliced=rng.choice([1, 1, 2, 3]), joins_last_slice=rng.random() < 0.4
    )


_STYLES: dict[str, Style] = {
    "1f1b": _styled("1f1b"),
    "gpipe": _styled("gpipe"),
    "kfkb": _styled("1f1b", 2, 3, 4),
    "greedy": _styled("greedy"),
    "sliced": _sliced,
    "zero_bubble": _styled("zero_bubble"),
}


def _with_more_in_flight(plan: PipelinePlan, rng: random.Random) -> PipelinePlan:
    """Return the plan with up to two more micro-batches in flight on every stage that something feeds on.

    Under 1F1B that would ask more of the stages before; under zero bubble it is only a limit.
    """
    feeding = {edge.src for edge in plan.edges}
    more = rng.choice([1, 2])
    counts = [
        min(stage.in_flight + more, plan.num_micro_batches(i)) if i in feeding else stage.in_flight
        for i, stage in enumerate(plan.stages)
    ]
    return plan.with_each(in_flight=counts)


def check_schedule_draw(seed: int, family: str | None = None) -> Draw:
    """Draw, lower and validate one plan in training, and its forwards in evaluation; return the draw.

    Raises:
        ScheduleError: the programs are unsafe.
    """
    draw = random_draw(seed, family)
    validate_programs(draw.plan, draw.schedules, draw.programs)
    forwards = forward_schedules(draw.plan)
    validate_programs(draw.plan, forwards, lower_schedules(draw.plan, forwards, training=False))
    return draw


def check_schedule_draws(
    seeds: Iterable[int], families: Iterable[str] = FAMILIES
) -> tuple[Counter[str], list[str]]:
    """Validate the programs of every seed under every family.

    Returns:
        The number of programs that passed by family, and one line for each draw that failed.
    """
    passed: Counter[str] = Counter()
    failures = []
    wanted = tuple(families)
    for seed in seeds:
        for family in wanted:
            try:
                check_schedule_draw(seed, family)
            except GppError as error:
                failures.append(f"seed {seed}, {family}: {str(error).splitlines()[0]}")
            else:
                passed[family] += 1
    return passed, failures
