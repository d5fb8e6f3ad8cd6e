"""Random plans to prove schedules on: DAGs of stages with mixed micro-batches, degrees, schedules, tensors."""

from __future__ import annotations

import dataclasses
import random

from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.orders.in_flight import plan_in_flight


def random_links(rng: random.Random, num_stages: int) -> list[tuple[int, int]]:
    """Return the links of a random DAG in which every stage but the first may have several of each."""
    density = rng.choice([0.15, 0.3, 0.6])
    links = {(src, dst) for dst in range(num_stages) for src in range(dst) if rng.random() < density}
    for dst in range(1, num_stages):
        if not any(link[1] == dst for link in links) and rng.random() < 0.85:
            links.add((rng.randrange(dst), dst))
    return sorted(links)


def with_in_flight(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with the in-flight counts that `plan_in_flight` gives it."""
    counts = plan_in_flight(plan)
    stages = tuple(
        dataclasses.replace(stage, in_flight=count) for stage, count in zip(plan.stages, counts, strict=True)
    )
    return dataclasses.replace(plan, stages=stages)


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
        stages = [
            dataclasses.replace(stage, ranks=tuple(numbers[rank] for rank in stage.ranks)) for stage in stages
        ]
        plan = PipelinePlan(
            model="random",
            graph="none",
            planner="none",
            mini_batch=mini_batch,
            loss_unit=1,
            stages=tuple(stages),
            edges=edges,
        )
        return with_in_flight(plan)


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


def check_draw(seed: int) -> PipelinePlan:
    """Schedule, lower and validate one random plan, in training and evaluation; return it.

    Raises:
        ScheduleError: the programs are unsafe.
    """
    rng = random.Random(seed)
    plan = random_plan(rng)
    frozen = forward_only_of(plan, rng)
    schedules = build_schedules(plan, forward_only_stages=frozen)
    validate_programs(plan, schedules, lower_schedules(plan, schedules, forward_only_stages=frozen))
    forwards = forward_schedules(plan)
    validate_programs(plan, forwards, lower_schedules(plan, forwards, training=False))
    return plan
