"""Optimus: an image encoder before a language model, on ranks before it, spread over all stages, or on every rank.

Known of a run are its degrees (tables 11 and 12), the layers of both models (tables 8 and 9) and what the collectives
of data parallelism take before and behind a step (table 1). One number is fitted, the time of a language layer, on one
row; an encoder layer takes its share by FLOPs, as the paper's own balancing has it (appendix B). Tensor parallelism is
part of a layer's time, as are its gaps: encoder kernels in them (the paper's fine-grained filling) are not simulated.

    Megatron     the encoder atop the language model's first stage, one stage a rank, 1F1B
    balanced     V stages a rank, the longest as short as whole layers allow, Megatron's interleaved order
    Optimus      the language model alone in V stages a rank, the encoder on the same ranks: in PP_enc stages, with as
                 many replicas as that leaves, each in pieces, taken where list scheduling finds room

Source: Optimus (USENIX ATC 2025), sections 4 and 5, appendices A to D
Tests: tests/bench/test_published.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from gpp_benchmarks.published._plans import chain, interleaved_orders, longest_span_us, schedules_of, stage_of
from gpp_benchmarks.published._rows import FITTED, HELD_OUT, Row
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.event_loop import run_task_graph, task_durations
from gpp_plugin.schedule.orders.kfkb import one_f_one_b_schedule
from gpp_plugin.schedule.shared_ranks import merge_chains
from gpp_plugin.schedule.task_graph import TaskGraph

# A step with an encoder on the ranks of an interleaved language model, its tasks where list scheduling finds room.
#
# The language model runs in Megatron's order, rank by rank; the encoder's stages are each a chain of their own in the
# order of 1F1B. The encoder of two ranks below is one stage with two replicas (E0 of sample 0 on rank 0, of sample 1
# on rank 1); while the collective before the step runs, only it may:
#
#     rank 0   gather  E0 .   F0 F1 ...   B0 B1 E0'  scatter
#     rank 1   gather  E0 .   .  F0 F1 ... B0 B1 E0' scatter
#
# The collective behind the step begins on a rank with its last language task, and the encoder runs beside it.


def colocated_step(
    encoder: tuple[Stage, ...],
    language: tuple[Stage, ...],
    *,
    ranks: int,
    micro_batches: int,
    gather: float,
    scatter: float,
) -> float:
    """Return when the last of all tasks and collectives ends.

    Args:
        encoder: its stages, one behind the other, each with its replicas' ranks, ``in_flight`` micro-batches held; may
            be none.
        language: chunk c of rank r is stage ``c * ranks + r``.
        gather, scatter: the collectives before and behind the language model's tasks.
    """
    first = len(encoder)
    orders = [
        [dataclasses.replace(task, stage=first + task.stage) for task in order]
        for order in interleaved_orders(ranks, micro_batches, len(language) // ranks)
    ]
    gathering = first + len(language)
    forward = Task(stage=gathering, kind=TaskKind.FORWARD, micro_batch=0)
    schedules = (
        *(
            one_f_one_b_schedule(i, micro_batches // stage.micro_batch_size, num_in_flight=stage.in_flight)
            for i, stage in enumerate(encoder)
        ),
        *schedules_of(orders),
        StageSchedule(stage=gathering, tasks=(forward,), num_in_flight=1),
    )
    graph = build_task_graph(_with_gather(encoder, language, ranks, micro_batches, gather), schedules)
    _merge(graph, schedules, orders, first)
    times = run_task_graph(graph, task_durations(graph, None))
    return max(
        end + (scatter if first <= graph.stage[node] < gathering else 0.0)
        for node, end in enumerate(times.end)
    )


def _with_gather(
    encoder: tuple[Stage, ...], language: tuple[Stage, ...], ranks: int, micro_batches: int, gather: float
) -> PipelinePlan:
    """Return both as a chain, and the first collective: a stage of one forward on a rank more, before the language."""
    waiting = dataclasses.replace(
        language[0],
        name="gather",
        ranks=(ranks,),
        micro_batch_size=micro_batches,
        in_flight=1,
        forward_us=gather,
    )
    stages = (*encoder, *language, waiting)
    links = [(index, index + 1) for index in range(len(stages) - 2)]
    plan = chain(stages, micro_batches=micro_batches, links=[*links, (len(stages) - 1, len(encoder))])
    edges = (*plan.edges[:-1], dataclasses.replace(plan.edges[-1], gradient_tensors=()))
    return dataclasses.replace(plan, edges=edges)


def _merge(
    graph: TaskGraph, schedules: tuple[StageSchedule, ...], orders: list[list[Task]], first: int
) -> None:
    """Give each rank one order of its language tasks, as they are, and the tasks of its encoder stages."""
    number = {(str(graph.task(node)), graph.rank[node]): node for node in range(len(graph.stage))}
    plan = graph.plan
    chains = [(rank, [number[str(task), rank] for task in order]) for rank, order in enumerate(orders)]
    alone = [*schedules[:first], schedules[-1]]
    for schedule in alone:
        for rank in plan.stages[schedule.stage].ranks:
            chains.append((rank, [number[str(task), rank] for task in schedule.tasks]))
    graph.replace_chains({})
    for _, nodes in chains:
        graph.add_chain(nodes)
    graph.replace_chains(merge_chains(graph, chains))


SOURCE = "Optimus"
LIMIT = 0.08
SEQUENCE = 2048
FORWARD_SHARE = 1.4 / (1.4 + 2.0)
"""Of a layer's time, by the encoder layer of section 2.3: 1.4 ms forward, 2.0 ms backward."""
GATHER_S, SCATTER_S = 0.167, 0.458
"""Table 1: collectives of data parallelism before the first and behind the last task; an encoder may run meanwhile."""
PIECES = 4
"""Parts that an encoder stage is run in, so that it fits between tasks of the language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Transformer layers of one width."""

    width: int
    layers: int

    @property
    def flops(self) -> float:
        """Return what a layer costs a token: 24 h² of products and 4 sh of attention, forward."""
        return 24.0 * self.width**2 + 4.0 * SEQUENCE * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An encoder before a language model on ``ranks`` pipeline ranks; times are in language layers, F and B."""

    encoder: Tower
    language: Tower
    ranks: int
    chunks: int

    @property
    def encoder_layer(self) -> float:
        """Return an encoder layer's time over a language layer's."""
        return self.encoder.flops / self.language.flops

    @property
    def encoder_work(self) -> float:
        """Return the time of the whole encoder on one micro-batch."""
        return self.encoder_layer * self.encoder.layers

    # ---- the three ways to run a step; each returns language layers, without collectives of data parallelism

    def megatron(self, micro_batches: int) -> float:
        """Return the step with the encoder on the first rank, beside as many language layers as on any other."""
        each = self.language.layers / self.ranks
        stages = [
            _stage(rank, rank, each + (self.encoder_work if rank == 0 else 0.0), in_flight=self.ranks - rank)
            for rank in range(self.ranks)
        ]
        plan = chain(stages, micro_batches=micro_batches)
        return longest_span_us(plan, build_schedules(plan))

    def balanced(self, micro_batches: int) -> float:
        """Return the step of the partition into ``chunks`` stages a rank whose longest stage is shortest."""
        orders = interleaved_orders(self.ranks, micro_batches, self.chunks)
        schedules = schedules_of(orders)
        stages = [
            _stage(index, index % self.ranks, work, in_flight=schedules[index].num_in_flight)
            for index, work in enumerate(self.partition())
        ]
        return longest_span_us(
            chain(stages, micro_batches=micro_batches), schedules, orders=dict(enumerate(orders))
        )

    def partition(self) -> list[float]:
        """Return the time of each virtual stage: whole layers, the longest as short as can be.

        Of partitions with equal longest stages it is one whose chunks are the same on all ranks, and of those the one
        with the least work a rank. The paper does not say which of equal ones it takes; one that spreads its stages
        of two layers over all chunks makes a step of 32 micro-batches 25 % longer, as ranks wait for each other.
        """
        best: tuple[float, float, list[float]] | None = None
        for chunks in range(1, self.chunks):
            if self.encoder.layers % (self.ranks * chunks) or self.language.layers % self.ranks:
                continue
            front = [self.encoder.layers // (self.ranks * chunks) * self.encoder_layer] * chunks
            works = front + [
                float(n) for n in _even(self.language.layers // self.ranks, self.chunks - chunks)
            ]
            found = (max(works), sum(works), [work for work in works for _ in range(self.ranks)])
            best = found if best is None or found[:2] < best[:2] else best
        assert best is not None, f"{self.encoder.layers} layers do not divide evenly by {self.ranks} ranks"
        return best[2]

    def alone(self, micro_batches: int, *, gather: float = 0.0, scatter: float = 0.0) -> float:
        """Return the step of the language model without an encoder, collectives included."""
        return self._colocated((), micro_batches, gather, scatter)

    def optimus(self, micro_batches: int, *, gather: float, scatter: float) -> float:
        """Return the step with the encoder on every rank, collectives included: the best of all encoder plans."""
        sizes = [size for size in range(1, self.ranks + 1) if self.ranks % size == 0]
        # every micro-batch may be held: what the language model needs in flight is Megatron's affair
        stages = [self.encoder_stages(size, micro_batches * size // self.ranks) for size in sizes]
        return min(self._colocated(each, micro_batches, gather, scatter) for each in stages)

    def encoder_stages(self, num_stages: int, in_flight: int) -> tuple[Stage, ...]:
        """Return an encoder pipeline of so many stages, each in pieces, with a replica for every so many ranks."""
        # 8 ranks, 2 stages: replicas on ranks 0-1, 2-3, 4-5 and 6-7, so that stage 0 is on ranks 0, 2, 4 and 6
        work = self.encoder_work / num_stages / PIECES
        replicas = self.ranks // num_stages
        return tuple(
            dataclasses.replace(
                _stage(stage * PIECES + piece, stage, work, in_flight=in_flight),
                name=f"encoder {stage}.{piece}",
                ranks=tuple(range(stage, self.ranks, num_stages)),
                micro_batch_size=replicas,
            )
            for stage in range(num_stages)
            for piece in range(PIECES)
        )

    def _colocated(
        self, encoder: tuple[Stage, ...], micro_batches: int, gather: float, scatter: float
    ) -> float:
        each = self.language.layers / (self.ranks * self.chunks)
        language = tuple(
            _stage(index, index % self.ranks, each, in_flight=micro_batches)
            for index in range(self.ranks * self.chunks)
        )
        times = {"gather": gather, "scatter": scatter}
        return colocated_step(encoder, language, ranks=self.ranks, micro_batches=micro_batches, **times)


def _stage(index: int, rank: int, work: float, *, in_flight: int) -> Stage:
    forward, backward = work * FORWARD_SHARE, work * (1.0 - FORWARD_SHARE)
    return stage_of(index, rank, (forward, backward / 2, backward / 2), in_flight=in_flight)


def _even(layers: int, parts: int) -> list[int]:
    """Return whole layers in parts, the parts with one more evenly among the others.

    >>> _even(10, 4)
    [2, 3, 2, 3]
    """
    return [(part + 1) * layers // parts - part * layers // parts for part in range(parts)]


# ---- the rows ------------------------------------------------------------------------------------------------

LARGE = Setting(
    encoder=Tower(width=6144, layers=48), language=Tower(width=12288, layers=96), ranks=8, chunks=12
)
"""ViT-22B + GPT-175B: 8 tensor ranks a stage, micro-batches of 2."""
STRONG_SCALING = (
    (1536, 32, 10.65, 10.43, 9.80, 0.343, 0.575),
    (2048, 24, 8.26, 8.06, 7.29, 0.458, 0.693),
    (3072, 16, 5.91, 5.87, 4.87, 0.687, 0.850),
)
"""GPUs, micro-batches of a pipeline; seconds of Megatron, balanced and Optimus; shares hidden, coarse and fine."""
SMALL = Setting(
    encoder=Tower(width=2304, layers=48), language=Tower(width=3072, layers=80), ranks=2, chunks=2
)
"""ViT-3B + GPT-11B on 8 A100, batch 16. No degrees are published: of 2, 4 and 8 ranks, chunks that divide the layers
and micro-batches of 1 and 2 these come nearest to the quotient of Megatron's two steps, and so its rows are fitted."""
SMALL_MICRO_BATCHES = 16
SMALL_STEPS = {"Megatron": 3.42, "balanced": 3.04, "Optimus": 2.78}

_WHY_LITERAL = (
    "as described, the first stage holds the encoder (12.3 language layers by FLOPs) atop 12 of 96 language layers, so "
    "that a step takes about 1.7 times the balanced one; the published times are 1.01 to 1.02 times it, so that the "
    "stages published cannot have been so uneven, or a language layer took 0.6 of its time in the balanced run"
)
_WHY_OWN = "the layer time fitted on Megatron's own first row, stages as described"
_WHY_FLOPS = (
    "one number fitted, the time of a language layer; the encoder's by FLOPs, data-parallel collectives of table 1 "
    "(0.167 s before, 0.458 s behind a step) the same in every run"
)
_WHY_SHARE = (
    "pipeline and data-parallel gaps are filled, by quarters of an encoder stage, and gaps of tensor parallelism are "
    "not: more than coarse filling, which uses only those before and behind the language model, less than fine"
)
_WHY_SMALL = (
    "2 ranks of 4 tensor ranks, 2 chunks, micro-batches of 1: chosen on the Megatron rows, as none are given"
)


def optimus_rows(
    settings: tuple[tuple[int, int, float, float, float, float, float], ...] = STRONG_SCALING,
) -> Iterator[Row]:
    """Yield steps and hidden shares of strong scaling, fitted on its first row, and of the small model."""
    collectives = GATHER_S + SCATTER_S
    first = settings[0]
    layer = (first[3] - collectives) / LARGE.balanced(first[1])
    own_layer = (first[2] - collectives) / LARGE.megatron(first[1])
    for setting in settings:
        gpus, micro_batches, megatron, balanced, optimus, coarse, fine = setting
        case = f"ViT-22B + GPT-175B, {gpus} GPUs"
        known = FITTED if setting is first else HELD_OUT
        literal = LARGE.megatron(micro_batches)
        yield _step(case, "Megatron", megatron, literal * layer + collectives, HELD_OUT, _WHY_LITERAL)
        yield _step(
            case, "Megatron, its own layer time", megatron, literal * own_layer + collectives, known, _WHY_OWN
        )
        ours = LARGE.balanced(micro_batches) * layer + collectives
        yield _step(case, "balanced", balanced, ours, known, _WHY_FLOPS)
        gather, scatter = GATHER_S / layer, SCATTER_S / layer
        ours = LARGE.optimus(micro_batches, gather=gather, scatter=scatter)
        yield _step(case, "Optimus", optimus, ours * layer, HELD_OUT, _WHY_FLOPS)
        alone = LARGE.alone(micro_batches, gather=gather, scatter=scatter)
        hidden = 1.0 - (ours - alone) / (micro_batches * LARGE.encoder_work / LARGE.ranks)
        for kind, share in (("coarse", coarse), ("fine", fine)):
            yield Row(
                source=SOURCE,
                case=case,
                quantity=f"encoder hidden, {kind}",
                unit="share",
                published=share,
                ours=hidden,
                known=HELD_OUT,
                why=_WHY_SHARE,
            )
    yield from _small_rows()


def _small_rows() -> Iterator[Row]:
    case, count = "ViT-3B + GPT-11B, 8 GPUs", SMALL_MICRO_BATCHES
    layer = SMALL_STEPS["balanced"] / SMALL.balanced(count)
    found = {
        "Megatron": (SMALL.megatron(count), FITTED),
        "balanced": (SMALL.balanced(count), FITTED),
        "Optimus": (SMALL.optimus(count, gather=0.0, scatter=0.0), HELD_OUT),
    }
    for name, (layers, known) in found.items():
        yield _step(case, name, SMALL_STEPS[name], layers * layer, known, _WHY_SMALL)


def _step(case: str, name: str, published: float, ours: float, known: str, why: str) -> Row:
    return Row(
        source=SOURCE,
        case=case,
        quantity=f"step, {name}",
        unit="s",
        published=published,
        ours=ours,
        known=known,
        limit=LIMIT,
        why=why,
    )
