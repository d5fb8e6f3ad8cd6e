"""Plans written in a line: stages of one rank each."""

from __future__ import annotations

import dataclasses

from gpp_benchmarks._random_plans import with_in_flight
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge


def make_plan(stages, edges, *, mini_batch: int) -> PipelinePlan:
    return PipelinePlan(
        model="test",
        graph="none",
        planner="none",
        mini_batch=mini_batch,
        loss_unit=1,
        stages=stages,
        edges=edges,
    )


def simple_plan(
    sizes, links, *, mini_batch: int, forward_us=1.0, backward_us=1.0, schedule="1f1b", k=1, num_bytes=0.0
) -> PipelinePlan:
    """Return stages of one rank each, with micro-batches of ``sizes`` and (src, dst) ``links``.

    Numbers given for one stage hold for all.
    """

    def of(value, index):
        return value[index] if isinstance(value, (list, tuple)) else value

    stages = tuple(
        Stage(
            name=f"s{i}",
            blocks=(f"b{i}",),
            ranks=(i,),
            micro_batch_size=size,
            in_flight=1,
            schedule=of(schedule, i),
            k=of(k, i),
            forward_us=of(forward_us, i),
            backward_us=of(backward_us, i),
        )
        for i, size in enumerate(sizes)
    )
    edges = tuple(
        StageEdge(
            src=src,
            dst=dst,
            batch_tensors=(f"t{src}",),
            gradient_tensors=(f"t{src}",),
            bytes_per_sample=num_bytes,
            gradient_bytes_per_sample=num_bytes,
        )
        for src, dst in links
    )
    return with_in_flight(make_plan(stages, edges, mini_batch=mini_batch))


def chain_plan(num_stages, micro_batches, **options) -> PipelinePlan:
    links = [(i, i + 1) for i in range(num_stages - 1)]
    return simple_plan([1] * num_stages, links, mini_batch=micro_batches, **options)


def on_ranks(plan, *ranks) -> PipelinePlan:
    """Return the plan with these ranks, a number or a tuple for each stage."""
    stages = tuple(
        dataclasses.replace(stage, ranks=own if isinstance(own, tuple) else (own,))
        for stage, own in zip(plan.stages, ranks, strict=True)
    )
    return dataclasses.replace(plan, stages=stages)


def on_shared_ranks(plan, draw, most_ranks) -> PipelinePlan:
    """Return the plan with its stages on ranks drawn anew: so many, or as many as its widest stage has."""
    count = max(most_ranks, *(len(stage.ranks) for stage in plan.stages))
    drawn = [tuple(draw.sample(range(count), len(stage.ranks))) for stage in plan.stages]
    number = {rank: i for i, rank in enumerate(sorted({rank for ranks in drawn for rank in ranks}))}
    return on_ranks(plan, *(tuple(number[rank] for rank in ranks) for ranks in drawn))


def sharded(plan: PipelinePlan, *ranks: tuple[int, ...], num_bytes: int = 80) -> PipelinePlan:
    """Return the plan with its stages on these ranks (none: as they are), which hold their parameters in parts."""
    own = [stage.ranks for stage in plan.stages] if not ranks else ranks
    stages = tuple(
        dataclasses.replace(
            stage, ranks=of_stage, sharded_bytes=num_bytes if len(of_stage) > stage.tensor else 0
        )
        for stage, of_stage in zip(plan.stages, own, strict=True)
    )
    return dataclasses.replace(plan, stages=stages)
