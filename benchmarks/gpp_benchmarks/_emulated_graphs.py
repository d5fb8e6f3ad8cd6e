"""Plans whose stages are delays, and what stock DeepSpeed makes of them: a chain of the same stages.

Every stage takes the same time for a micro-batch on each of its ranks, so that the bound of the schedule is
(micro-batches + depth - 1) x (forward + backward), and only the depth differs between graph and chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.tensors import TensorSpec, batch_layout
from gpp_plugin.plan.baselines.stock_chain import crossing_edges
from gpp_plugin.schedule.build import plan_in_flight

FORWARD_US = 20_000.0
BACKWARD_US = 40_000.0
MESSAGE_BYTES = 65_536
"""Of a micro-batch's activations between two stages."""
FLOAT_BYTES = 4


def emulated_plan(
    name: str,
    links: Sequence[tuple[int, int]],
    *,
    num_micro_batches: int,
    forward_us: float | Sequence[float] = FORWARD_US,
    backward_us: float | Sequence[float] = BACKWARD_US,
    degrees: Mapping[int, int] | None = None,
    sizes: Mapping[int, int] | None = None,
    samples: int = 2,
    message_bytes: int = MESSAGE_BYTES,
    schedule: str = "1f1b",
) -> PipelinePlan:
    """Return stages 0..n-1 joined by ``links``, in topological order; the last one is the loss.

    Args:
        forward_us, backward_us: of a micro-batch on one rank, for all stages or one a stage.
        degrees: stage -> data-parallel ranks, where not 1.
        sizes: stage -> samples of a micro-batch, where not ``samples``; ``num_micro_batches`` counts those
            of ``samples``.
        message_bytes: of the activations of ``samples`` samples.
    """
    num_stages = 1 + max(max(link) for link in links)
    stages = []
    first_rank = 0
    for index in range(num_stages):
        degree = (degrees or {}).get(index, 1)
        stages.append(
            Stage(
                name="loss" if index == num_stages - 1 else f"stage{index}",
                blocks=(f"block{index}",),
                ranks=tuple(range(first_rank, first_rank + degree)),
                micro_batch_size=(sizes or {}).get(index, samples),
                in_flight=1,
                schedule=schedule,
                forward_us=_of(forward_us, index),
                backward_us=_of(backward_us, index),
            )
        )
        first_rank += degree
    per_sample = message_bytes / samples
    edges = tuple(
        StageEdge(
            src=src,
            dst=dst,
            batch_tensors=(f"x{src}",),
            gradient_tensors=(f"x{src}",),
            bytes_per_sample=per_sample,
            gradient_bytes_per_sample=per_sample,
        )
        for src, dst in sorted(links)
    )
    tensors = tuple(
        TensorSpec(
            name=f"x{src}",
            dtype="float32",
            shape=(samples, round(per_sample / FLOAT_BYTES)),
            num_samples=samples,
            layout=batch_layout(0),
            requires_grad=True,
        )
        for src in sorted({src for src, _ in links})
    )
    plan = PipelinePlan(
        model=name,
        graph="emulated",
        planner="none",
        mini_batch=num_micro_batches * samples,
        loss_unit=1,
        stages=tuple(stages),
        edges=edges,
        tensors=tensors,
    )
    return with_in_flight(plan)


def with_in_flight(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with the in-flight counts its schedules ask for."""
    return plan.with_each(in_flight=plan_in_flight(plan))


def _of(value: float | Sequence[float], index: int) -> float:
    return value[index] if isinstance(value, Sequence) else value


def chain_links(num_stages: int, first: int = 0) -> list[tuple[int, int]]:
    """Return the links of stages in a row."""
    return [(i, i + 1) for i in range(first, first + num_stages - 1)]


def branch_links(num_branches: int, length: int, *, has_own_join: bool) -> list[tuple[int, int]]:
    """Return the links of branches of equal length that meet in a last stage.

    Args:
        has_own_join: the last stage is one more; else the last stage of the last branch takes the others in.
    """
    links = [link for b in range(num_branches) for link in chain_links(length, b * length)]
    last = num_branches * length - (0 if has_own_join else 1)
    ends = [b * length + length - 1 for b in range(num_branches)]
    return links + [(end, last) for end in ends if end != last]


def linear_bytes(plan: PipelinePlan) -> tuple[int, ...]:
    """Return what crosses each boundary of the plan as a chain, in bytes of one micro-batch.

    A chain hands on everything made before a boundary and read behind it. A stage of several ranks stands
    for as many stages of the chain.
    """
    sizes = []
    for index, stage in enumerate(plan.stages):
        # inside a stage of several ranks only what goes into it travels on, as it does in front of the stage
        sizes += [_crossing_bytes(plan, index - 1)] * (stage.degree - 1) + [_crossing_bytes(plan, index)]
    return tuple(sizes[:-1])


def _crossing_bytes(plan: PipelinePlan, stage: int) -> int:
    """Return what crosses the cut behind ``stage``, each tensor once."""
    crossing: dict[str, float] = {}
    for edge in crossing_edges(plan, stage):
        size = plan.stages[edge.src].micro_batch_size * edge.bytes_per_sample
        crossing |= dict.fromkeys(edge.batch_tensors, size)
    return round(sum(crossing.values()))


def linear_plan(plan: PipelinePlan) -> PipelinePlan:
    """Return the chain stock DeepSpeed runs instead: as many stages as ranks, the same times."""
    first = plan.stages[0]
    return emulated_plan(
        f"{plan.model} in a line",
        chain_links(plan.num_ranks),
        num_micro_batches=plan.mini_batch // first.micro_batch_size,
        forward_us=first.forward_us,
        backward_us=first.backward_us,
        samples=first.micro_batch_size,
    )


def bound_us(plan: PipelinePlan) -> float:
    """Return (m + depth - 1) x (f + b) for a plan whose stages all take the same times."""
    first = plan.stages[0]
    return (plan.num_micro_batches(0) + plan.depth - 1) * (first.forward_us + first.backward_us)
