"""Programs of units that lack branches: proven on random plans and patterns, refused where wrong."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan, forward_only_stages
from gpp_plugin.ir.program import Direction, Instruction, InstructionKind, RankProgram
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.build_graph import Presence
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.gathers import gathered_at_once, stages_that_reduce_early
from gpp_plugin.schedule.lower import lower_schedules
from tests.schedule.plans import (
    changed,
    make_edge,
    on_rows,
    on_shared_ranks,
    proven,
    sharded,
    simple_plan,
    with_all,
)

VISION, EMBED, TEXT, LOSS = range(4)


def language_model(units: int, degrees: Sequence[int] = (1, 1, 1, 1), **stage: Any) -> PipelinePlan:
    """Return a vision tower and embeddings, joined by the text stage; without images embeddings go there alone."""
    plan = simple_plan(
        degrees, [], mini_batch=units, forward_us=[10.0, 1.0, 10.0, 10.0], backward_us=[20.0, 0.0, 20.0, 20.0]
    )
    held = [max(1, units // degree) for degree in degrees[:2]]
    plan = plan.with_each(name=("vision", "embed", "text", "loss"), in_flight=[*held, 2, 1])
    edges = [
        make_edge(src, dst, name, num_bytes=4.0)
        for src, dst, name in ((VISION, TEXT, "features"), (EMBED, TEXT, "embedding"), (TEXT, LOSS, "hidden"))
    ]
    plan = on_rows(dataclasses.replace(plan, edges=tuple(edges)), degrees)
    return with_all(plan, **stage) if stage else plan


def of_units(has_image: Sequence[bool]) -> Presence:
    return Presence(
        stages=tuple(frozenset(range(4)) - ({VISION} if not image else set()) for image in has_image),
        edges=tuple(frozenset({0, 1, 2} if image else {1, 2}) for image in has_image),
    )


def programs_of(
    plan: PipelinePlan, presence: Presence | None, **options: Any
) -> tuple[tuple[StageSchedule, ...], tuple[RankProgram, ...]]:
    frozen = forward_only_stages(plan)
    return proven(plan, presence=presence, forward_only_stages=frozen, **options)


def test_a_unit_without_images_has_no_task_and_no_message_of_the_tower() -> None:
    images = [True, False, False, True]
    _, programs = programs_of(language_model(4), of_units(images))
    tower, _, text, loss = programs
    assert [str(i) for i in tower.instructions if i.task is not None] == ["0F0", "0F3", "0B0", "0B3"]
    assert {m.samples.first_sample for m in tower.messages(InstructionKind.SEND)} == {0, 3}
    sent_back = [
        m for m in text.messages(InstructionKind.SEND) if m.direction is Direction.GRADIENT and m.edge == 0
    ]
    assert [m.samples.first_sample for m in sent_back] == [0, 3]
    for program in (text, loss):
        assert sum(i.task is not None for i in program.instructions) == 8
    _, alone = programs_of(language_model(4), of_units([False] * 4))
    assert [i.kind for i in alone[0].instructions] == [InstructionKind.REDUCE_DATA, InstructionKind.STEP]


def test_a_rank_without_tasks_gathers_with_the_others_and_lets_go() -> None:
    """ZeRO 3: the second rank of the tower has only units without images, and its part of the parameters is needed."""
    plan = sharded(language_model(4, (2, 1, 2, 1)))
    _, programs = programs_of(plan, of_units([True, False, True, False]))
    tower = [[str(i) for i in program.instructions if i.message is None] for program in programs[:2]]
    assert tower[0] == ["gather", "0F0", "0F1", "0B0", "0B1", "free", "reduce_data", "step"]
    assert tower[1] == ["gather", "free", "reduce_data", "step"]
    assert [gathered_at_once(plan, program) for program in programs] == [40, 40, 0, 40, 40, 0]


def random_job(seed: int) -> tuple[PipelinePlan, list[tuple[frozenset[int], frozenset[int]]]]:
    """Return a random plan of units, and patterns: closed sets of stages with the edges between, some of their own."""
    draw = random.Random(seed)
    count, degrees = draw.randint(2, 6), []
    units = draw.choice((4, 6, 8))
    for _ in range(count):
        degrees.append(draw.choice([d for d in (1, 1, 2, 3) if units % d == 0]))
    edges = []
    for dst in range(1, count):
        for src in draw.sample(range(dst), draw.randint(1, min(dst, 3))):
            edges.append(
                make_edge(src, dst, f"t{src}_{dst}", num_bytes=4.0, has_gradient=draw.random() < 0.8)
            )
    # whoever gets no gradient sends none on
    for dst in reversed(range(count)):
        if not any(e.src == dst and e.gradient_tensors for e in edges) and any(e.src == dst for e in edges):
            edges = [
                e
                if e.dst != dst
                else make_edge(e.src, dst, *e.batch_tensors, num_bytes=4.0, has_gradient=False)
                for e in edges
            ]
    patterns = [(frozenset(range(count)), frozenset(range(len(edges))))]
    base = len(edges)
    for _ in range(draw.randint(1, 3)):
        gone = {s for s in range(count - 1) if draw.random() < 0.4}
        left = frozenset(range(count)) - gone
        kept = {i for i, e in enumerate(edges[:base]) if e.src in left and e.dst in left}
        if draw.random() < 0.5 and len(left) > 1:  # an edge that only units without that branch have
            src, dst = sorted(draw.sample(sorted(left), 2))
            kept.add(len(edges))
            edges.append(make_edge(src, dst, f"own{len(edges)}", num_bytes=4.0, has_gradient=False))
        patterns.append((left, frozenset(kept)))
    plan = on_rows(simple_plan(degrees, [], mini_batch=units), degrees)
    kinds = ("1f1b", "gpipe", "greedy", "zero_bubble")
    drawn = [(draw.choice(kinds), draw.uniform(1, 9), draw.uniform(1, 9)) for _ in degrees]
    schedules, forward_us, backward_us = zip(*drawn, strict=True)
    plan = plan.with_each(
        in_flight=[units // degree for degree in degrees],
        schedule=schedules,
        forward_us=forward_us,
        backward_us=backward_us,
    )
    return dataclasses.replace(plan, edges=tuple(edges)), patterns


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("most_ranks", [0, 3])
def test_programs_of_random_patterns_are_proven(each: bool, most_ranks: int) -> None:
    """Args: most_ranks: that all stages share, as far as their degrees allow; 0: each has its own."""
    num_proven = 0
    for seed in range(60 if not most_ranks else 30):
        plan, patterns = random_job(seed)
        if most_ranks:
            plan = on_shared_ranks(plan, random.Random(seed), most_ranks)
        base = dataclasses.replace(plan, edges=plan.edges[: len(patterns[0][1])])
        frozen = forward_only_stages(base)
        schedules = build_schedules(base, forward_only_stages=frozen)
        draw = random.Random(seed)
        for _ in range(3):
            chosen = [draw.choice(patterns) for _ in range(plan.mini_batch)]
            presence = Presence(stages=tuple(s for s, _ in chosen), edges=tuple(e for _, e in chosen))
            _, programs = proven(
                plan, schedules, forward_only_stages=frozen, reduce_each_backward=each, presence=presence
            )
            stages_that_reduce_early(plan, programs)
            num_proven += 1
            for program in programs:
                sent = {(m.edge, m.samples.first_sample) for m in program.messages(InstructionKind.SEND)}
                assert all(e in presence.edges[unit] for e, unit in sent)
    assert num_proven == (180 if not most_ranks else 90)


def test_evaluation_leaves_out_the_same() -> None:
    plan, presence = language_model(4, (2, 1, 2, 1)), of_units([False, True, False, False])
    _, programs = proven(plan, forward_schedules(plan), training=False, presence=presence)
    assert [len(p.instructions) for p in programs[:2]] == [
        0,
        2,
    ]  # unit 1 is the second rank's: F and its message


def test_what_is_wrong_is_found() -> None:
    plan, presence = language_model(4), of_units([True, False, True, True])
    schedules, programs = programs_of(plan, presence)
    # programs of one mini-batch do not fit another one
    with pytest.raises(ScheduleError, match="runs 2 tasks|runs 0F0 where|runs 6 tasks of the 4"):
        validate_programs(plan, schedules, programs, presence=of_units([False, True, True, False]))
    with pytest.raises(ScheduleError, match="of the 8 scheduled|where the schedule has"):
        validate_programs(plan, schedules, programs)
    with pytest.raises(ScheduleError, match="take other than one at a time"):
        presence.check(language_model(4, num_sliced=1))
    lost = dataclasses.replace(presence, edges=(frozenset({0, 1, 2}),) * 4)
    with pytest.raises(ScheduleError, match="edge vision -> text carries unit 1"):
        lower_schedules(plan, schedules, presence=lost)

    # a message that is due and not there
    def without(body: list[Instruction]) -> list[Instruction]:
        return [
            i for i in body if not (i.message and not i.message.edge and i.message.samples.first_sample == 2)
        ]

    cut = programs
    for rank in range(len(programs)):
        cut = changed(cut, rank, without)
    with pytest.raises(ScheduleError, match=r"it needs \[2..2\]"):
        validate_programs(plan, schedules, cut, presence=presence)
