"""Plans written in a line: stages of one rank each; and what is done with plans and programs again and again."""

from __future__ import annotations

import dataclasses
import math

from gpp_benchmarks._random_plans import with_in_flight
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.plan import MemoryBreakdown, PipelinePlan, Stage, StageEdge
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules


def make_plan(stages, edges, *, mini_batch: int, loss_unit: int = 1) -> PipelinePlan:
    return PipelinePlan(
        **{"model": "test", "graph": "none", "planner": "none"},
        mini_batch=mini_batch,
        loss_unit=loss_unit,
        stages=tuple(stages),
        edges=tuple(edges),
    )


def simple_plan(
    sizes, links, *, mini_batch: int, forward_us=1.0, backward_us=1.0, schedule="1f1b", k=1, num_bytes=0.0
) -> PipelinePlan:
    """Return stages of one rank each, with micro-batches of ``sizes`` and (src, dst) ``links``.

    Numbers given for one stage hold for all.
    """

    def of(value, index):
        return value[index] if isinstance(value, (list, tuple)) else value

    stages = [
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
    ]
    edges = [make_edge(src, dst, num_bytes=num_bytes) for src, dst in links]
    return with_in_flight(make_plan(stages, edges, mini_batch=mini_batch))


def make_edge(
    src: int, dst: int, name: str = "", *, num_bytes=0.0, has_gradient: bool = True, **more
) -> StageEdge:
    """Return an edge of one tensor, by default the producer's ``t``, of so many bytes a sample both ways."""
    names = (name or f"t{src}",)
    return StageEdge(
        src=src,
        dst=dst,
        batch_tensors=names,
        gradient_tensors=names if has_gradient else (),
        bytes_per_sample=num_bytes,
        gradient_bytes_per_sample=num_bytes if has_gradient else 0.0,
        **more,
    )


def chain_plan(num_stages, micro_batches, **options) -> PipelinePlan:
    links = [(i, i + 1) for i in range(num_stages - 1)]
    return simple_plan([1] * num_stages, links, mini_batch=micro_batches, **options)


def on_ranks(plan, *ranks) -> PipelinePlan:
    """Return the plan with these ranks, a number or a tuple for each stage."""
    return plan.with_each(ranks=[own if isinstance(own, tuple) else (own,) for own in ranks])


def on_rows(plan, degrees, tensor=None, context=None) -> PipelinePlan:
    """Return the plan on grids of data x context x tensor ranks (by default one of the latter), in order."""
    tensor, context = tensor or [1] * len(degrees), context or [1] * len(degrees)
    ranks, first = [], 0
    for degree, *sizes in zip(degrees, tensor, context, strict=True):
        behind = first + degree * math.prod(sizes)
        ranks.append(tuple(range(first, behind)))
        first = behind
    return plan.with_each(ranks=ranks, tensor=tensor, context=context)


def on_shared_ranks(plan, draw, most_ranks) -> PipelinePlan:
    """Return the plan with its stages on ranks drawn anew: so many, or as many as its widest stage has."""
    count = max(most_ranks, *(len(stage.ranks) for stage in plan.stages))
    drawn = [tuple(draw.sample(range(count), len(stage.ranks))) for stage in plan.stages]
    number = {rank: i for i, rank in enumerate(sorted({rank for ranks in drawn for rank in ranks}))}
    return on_ranks(plan, *(tuple(number[rank] for rank in ranks) for ranks in drawn))


def with_all(plan: PipelinePlan, **values) -> PipelinePlan:
    """Return the plan with the same values of these fields for all stages."""
    return plan.with_each(**{name: [value] * len(plan.stages) for name, value in values.items()})


def freeze(plan, stages) -> PipelinePlan:
    """Return the plan with no gradients sent to these stages."""
    none = {"gradient_tensors": (), "gradient_bytes_per_sample": 0.0}
    edges = (dataclasses.replace(edge, **none) if edge.src in stages else edge for edge in plan.edges)
    return dataclasses.replace(plan, edges=tuple(edges))


def sharded(plan: PipelinePlan, *ranks: tuple[int, ...], num_bytes: int = 80) -> PipelinePlan:
    """Return the plan with its stages on these ranks (none: as they are), which hold their parameters in parts."""
    own = [stage.ranks for stage in plan.stages] if not ranks else ranks
    wide = [len(of_stage) > stage.tensor for of_stage, stage in zip(own, plan.stages, strict=True)]
    return plan.with_each(ranks=own, sharded_bytes=[num_bytes if is_wide else 0 for is_wide in wide])


def with_room(plan: PipelinePlan, *, limit: int = 1 << 40) -> PipelinePlan:
    """Return the plan with a limit of its ranks, and nothing in their memory but what is gathered."""
    nothing = dict.fromkeys(
        ("weights", "stashed_weights", "gradients", "optimizer", "activations", "working", "transient"), 0
    )
    parts = (
        MemoryBreakdown(stage=stage.name, gathered=stage.gathered_bytes, limit=limit, **nothing)
        for stage in plan.stages
    )
    return dataclasses.replace(plan, memory=tuple(parts))


def cluster_of(num, *, bytes_per_s=1e6, latency_us=0.0, node=None, **device) -> Cluster:
    """1e6 bytes a second is one byte a microsecond; with ``node`` ranks of one have links ten times as fast."""
    one = Device(**{"name": "d", "memory_bytes": 1, "flops_per_s": 1.0, "memory_bytes_per_s": 1.0, **device})
    links = [Link(name="net", span=num, bytes_per_s=bytes_per_s, latency_us=latency_us)]
    if node:
        links.insert(
            0, Link(name="node", span=node, bytes_per_s=10 * bytes_per_s, latency_us=latency_us / 10)
        )
    return Cluster(name="c", devices=(one,) * num, links=tuple(links))


# ---- programs ----------------------------------------------------------------------------------------------


def proven(plan, schedules=None, *, presence=None, **options):
    """Return the schedules of a plan and its programs, which are valid."""
    schedules = schedules or build_schedules(plan, forward_only_stages=options.get("forward_only_stages"))
    programs = lower_schedules(plan, schedules, presence=presence, **options)
    validate_programs(plan, schedules, programs, presence=presence)
    return schedules, programs


def changed(programs, rank, edit):
    """Return the programs with one rank's instructions changed: ``edit`` changes their list, or returns another."""
    body = list(programs[rank].instructions)
    found = edit(body)
    own = tuple(found if isinstance(found, list) else body)
    return tuple(dataclasses.replace(p, instructions=own) if p.rank == rank else p for p in programs)


def lines(program):
    return [str(instruction) for instruction in program.instructions]


def short(program):
    """Return the program as words, messages left out."""
    return " ".join(str(i) for i in program.instructions if i.message is None)


def words(tasks):
    """Return tasks of one stage, or a schedule's, without its number."""
    return " ".join(str(task)[1:] for task in getattr(tasks, "tasks", tasks))


def with_split_costs(plan, *, half_overhead_us=0.0, split_factor=1.0, input_share=0.5):
    """Return the plan with times of the parts of its tasks, so many times what the whole ones take."""
    return plan.with_each(
        half_forward_us=[stage.forward_us / 2.0 + half_overhead_us for stage in plan.stages],
        input_gradient_us=[s.backward_us * split_factor * input_share for s in plan.stages],
        weight_gradient_us=[s.backward_us * split_factor * (1.0 - input_share) for s in plan.stages],
    )
