"""Stages whose ranks are a data x context x tensor grid: who sends what to whom, and programs that are proven to finish."""

import dataclasses
import math
import random

import pytest

from gpp_benchmarks._random_plans import forward_only_of, random_plan
from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, InstructionKind
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.serialize import dumps, from_plain, loads, to_plain
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_async, validate_programs
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.messages import tensor_pairs
from gpp_plugin.schedule.program_sets import lower_async
from gpp_plugin.simulate.predict import predict_iteration_us, simulate_plan, simulate_programs
from tests.schedule.plans import changed, make_edge, on_rows, proven, simple_plan, with_all
from tests.schedule.test_async import random_async_plan

KINDS = (TaskKind.FORWARD, TaskKind.BACKWARD)
ACTIVATION, GRADIENT = Direction.ACTIVATION, Direction.GRADIENT


def grid_plan(*grids, sizes=None, shards=(None, None), mini_batch=None, in_flight=2) -> PipelinePlan:
    """Return a chain of stages of (data, tensor) or (data, tensor, context) ranks.

    ``shards`` are the axes at the ends of every edge.
    """
    whole = [(*grid, 1)[:3] for grid in grids]
    sizes = sizes or [data for data, *_ in whole]
    axes = {"src_shard_axis": shards[0], "dst_shard_axis": shards[1]}
    edges = [make_edge(i, i + 1, num_bytes=12.0, **axes) for i in range(len(grids) - 1)]
    plan = simple_plan(sizes, [], mini_batch=mini_batch or 2 * max(sizes), forward_us=10.0, backward_us=20.0)
    plan = with_all(dataclasses.replace(plan, edges=tuple(edges)), in_flight=in_flight)
    return on_rows(plan, *zip(*whole, strict=True))


def messages_of(plan, direction):
    return sorted(
        (m.src_rank, m.dst_rank, m.samples.first_sample, m.samples.num_samples)
        for program in proven(plan)[1]
        for m in program.messages(InstructionKind.SEND)
        if m.direction is direction
    )


def pairs_of(producers, consumers, direction, *shards):
    plan = grid_plan((1, producers), (1, consumers), shards=shards or (None, None))
    return [tuple(pair) for pair in tensor_pairs(plan, 0, direction)]


def test_whole_tensors_are_asked_of_one_holder_and_shards_of_all_that_are_needed():
    assert pairs_of(2, 3, ACTIVATION) == [(0, 0, 1.0), (1, 1, 1.0), (0, 2, 1.0)]
    assert pairs_of(2, 3, GRADIENT) == [(0, 0, 1.0), (1, 1, 1.0)]
    assert pairs_of(2, 1, ACTIVATION) == [(0, 0, 1.0)]
    assert pairs_of(2, 1, GRADIENT) == [(0, 0, 1.0), (0, 1, 1.0)]
    assert pairs_of(2, 2, ACTIVATION, 1, 1) == [(0, 0, 0.5), (1, 1, 0.5)]
    assert pairs_of(2, 2, ACTIVATION, 1, 2) == [(0, 0, 0.25), (1, 0, 0.25), (0, 1, 0.25), (1, 1, 0.25)]
    assert pairs_of(2, 1, ACTIVATION, 1, None) == [(0, 0, 0.5), (1, 0, 0.5)]
    assert pairs_of(2, 1, GRADIENT, 1, None) == [(0, 0, 0.5), (0, 1, 0.5)]
    assert pairs_of(1, 2, ACTIVATION, None, 0) == [(0, 0, 0.5), (0, 1, 0.5)]
    assert pairs_of(2, 4, ACTIVATION, 0, 0) == [(0, 0, 0.25), (0, 1, 0.25), (1, 2, 0.25), (1, 3, 0.25)]
    sixths = [(0, 0, 2 / 6), (0, 1, 1 / 6), (1, 1, 1 / 6), (1, 2, 2 / 6)]
    assert pairs_of(2, 3, ACTIVATION, 0, 0) == sixths


@pytest.mark.parametrize("shards", [(None, None), (0, None), (None, 0), (0, 0), (0, 1)])
@pytest.mark.parametrize("direction", [ACTIVATION, GRADIENT])
def test_every_receiver_gets_exactly_its_part(shards, direction):
    for producers in (1, 2, 3, 4):
        for consumers in (1, 2, 3, 4):
            ends = [(producers, shards[0]), (consumers, shards[1])]
            receivers, axis = ends[1 if direction is ACTIVATION else 0]
            needed = 1.0 / receivers if axis is not None else 1.0
            got = [0.0] * receivers
            pairs = pairs_of(producers, consumers, direction, *shards)
            for _, receiver, share in pairs:
                got[receiver] += share
            assert got == pytest.approx([needed] * receivers)
            assert len({pair[:2] for pair in pairs}) == len(pairs)


def context_pairs(producers, consumers, direction, *shards):
    """Return the pairs of stages of context x tensor ranks."""
    grids = [(1, tensor, context) for context, tensor in (producers, consumers)]
    return [tuple(pair) for pair in tensor_pairs(grid_plan(*grids, shards=shards), 0, direction)]


def test_parts_of_the_positions_are_whole_on_all_tensor_ranks_of_a_context_position():
    # places 0 and 1 have the first half, 2 and 3 the second: each half comes from one of two holders
    halves = [(0, 0, 0.5), (2, 0, 0.5), (1, 1, 0.5), (3, 1, 0.5)]
    assert context_pairs((2, 2), (1, 2), ACTIVATION, 1, None) == halves
    assert context_pairs((2, 2), (1, 2), GRADIENT, 1, None) == [
        (0, 0, 0.5),
        (1, 1, 0.5),
        (0, 2, 0.5),
        (1, 3, 0.5),
    ]
    assert context_pairs((2, 2), (2, 2), ACTIVATION, 1, 1) == [(place, place, 0.5) for place in range(4)]
    sixths = [(0, 0, 2 / 6), (1, 1, 1 / 6), (3, 1, 1 / 6), (2, 2, 2 / 6)]
    assert context_pairs((2, 2), (3, 1), ACTIVATION, 1, 1) == sixths
    assert context_pairs((2, 1), (2, 2), ACTIVATION, None, None) == [
        (0, 0, 1.0),
        (1, 1, 1.0),
        (0, 2, 1.0),
        (1, 3, 1.0),
    ]


def test_ranks_of_the_same_samples_are_those_of_context_and_tensor():
    stage = grid_plan((2, 2, 3), (1, 1), sizes=(4, 4)).stages[0]
    assert (stage.degree, stage.num_replicas, stage.local_batch_size) == (2, 6, 2)
    assert [stage.position(rank) for rank in (0, 5, 6, 11)] == [(0, 0), (0, 5), (1, 0), (1, 5)]
    assert [(stage.context_position(rank), stage.tensor_position(rank)) for rank in range(6)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)
    ]  # fmt: skip
    assert (stage.data_ranks(1), stage.model_ranks(1)) == ((1, 7), (6, 7, 8, 9, 10, 11))
    assert (stage.replicas(1), stage.context_ranks(1, 1)) == ((1, 3, 5, 7, 9, 11), (7, 9, 11))
    assert [stage.part_at(place, 1) for place in range(6)] == [0, 0, 1, 1, 2, 2]
    assert len({stage.samples(0, rank) for rank in stage.model_ranks(0)}) == 1


def test_a_grid_reshards_over_samples_and_tensor_ranks():
    plan = grid_plan((2, 2), (3, 1), mini_batch=6, sizes=(6, 6))
    assert messages_of(plan, ACTIVATION) == [(0, 4, 0, 2), (0, 5, 2, 1), (2, 5, 3, 1), (2, 6, 4, 2)]
    assert messages_of(plan, GRADIENT) == [
        (4, 0, 0, 2), (4, 1, 0, 2), (5, 0, 2, 1), (5, 1, 2, 1), (5, 2, 3, 1), (5, 3, 3, 1), (6, 2, 4, 2), (6, 3, 4, 2),
    ]  # fmt: skip


def test_tensor_ranks_of_a_data_position_have_the_same_samples():
    stage = grid_plan((2, 2), (1, 1), sizes=(4, 4)).stages[0]
    assert (stage.degree, stage.local_batch_size) == (2, 2)
    assert [stage.position(rank) for rank in stage.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [stage.samples(1, rank).first_sample for rank in stage.ranks] == [4, 4, 6, 6]
    assert [stage.data_ranks(t) for t in range(2)] == [(0, 2), (1, 3)]
    assert [stage.tensor_ranks(d) for d in range(2)] == [(0, 1), (2, 3)]


def test_plans_of_earlier_releases_are_read():
    plan = grid_plan((1, 1), (2, 1))
    plain = to_plain(plan)
    for stage in plain["stages"]:
        del stage["tensor"], stage["context"]
    for edge in plain["edges"]:
        del edge["src_shard_axis"], edge["dst_shard_axis"]
    assert from_plain(PipelinePlan, plain) == plan
    grid = grid_plan((1, 2), (2, 3), shards=(1, None))
    assert loads(PipelinePlan, dumps(grid)) == grid


def with_rows(plan: PipelinePlan, rng: random.Random) -> PipelinePlan:
    """Return the plan with rows of context x tensor ranks in place of its ranks, numbered at random."""
    grids = [rng.choice([(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (2, 2)]) for _ in plan.stages]
    counts = [len(s.ranks) * math.prod(grid) for s, grid in zip(plan.stages, grids, strict=True)]
    numbers = list(range(sum(counts)))
    rng.shuffle(numbers)
    ranks = [tuple(numbers.pop() for _ in range(count)) for count in counts]
    context, tensor = zip(*grids, strict=True)
    return plan.with_each(ranks=ranks, context=context, tensor=tensor)


def random_grid_plan(rng: random.Random) -> PipelinePlan:
    """Return a random plan on rows of context and tensor ranks, some of which hold tensors in parts."""
    plan = with_rows(random_plan(rng), rng)
    made = [rng.choice([None, 0, 1]) for _ in plan.stages]
    edges = tuple(
        dataclasses.replace(edge, src_shard_axis=made[edge.src], dst_shard_axis=rng.choice([None, 0, 1]))
        for edge in plan.edges
    )
    return dataclasses.replace(plan, edges=edges)


def test_random_graphs_of_grids_finish_whatever_the_times():
    grids = 0
    for seed in range(40):
        rng = random.Random(seed)
        plan = random_grid_plan(rng)
        grids += any(stage.context > 1 for stage in plan.stages)
        frozen = forward_only_of(plan, rng)
        _, programs = proven(
            plan,
            forward_only_stages=frozen,
            costs=lambda *_, rng=rng: 10 ** rng.uniform(-3, 3),
            reduce_each_backward=seed % 2 == 0,
        )
        for mode in ("asynchronous", "rendezvous"):
            assert simulate_programs(plan, programs, mode=mode).events
        proven(plan, forward_schedules(plan), training=False)
    assert grids > 20


def test_asynchronous_windows_of_grids_are_proven():
    for seed in range(20):
        rng = random.Random(seed)
        plan = with_rows(random_async_plan(rng), rng)
        validate_async(plan, lower_async(plan))


@pytest.mark.parametrize("grid", [(1, 2), (1, 1, 2)])
def test_ranks_of_the_same_samples_run_each_task_together(grid):
    plan = grid_plan(grid, (1, 1), mini_batch=2)
    slow = {
        (0, kind, m, rank): 7.0 if rank == 1 else 3.0 for kind in KINDS for m in range(2) for rank in (0, 1)
    }
    durations = {**slow, **{(1, kind, m): 1.0 for kind in KINDS for m in range(2)}}
    _, programs = proven(plan)
    for timeline in (
        simulate_plan(plan, durations=durations),
        simulate_programs(plan, programs, durations=durations),
    ):
        ran = {
            rank: [(e.start_us, e.end_us) for e in timeline.events if e.rank == rank and e.task is not None]
            for rank in (0, 1)
        }
        assert ran[0] == ran[1]
        assert all(end - start == 7.0 for start, end in ran[0])
    assert predict_iteration_us(plan, durations=durations) == timeline.iteration_us


def test_the_proof_takes_collectives_inside_tasks_into_account():
    """Rank 1 takes its gradient before its second forward: it waits only for rank 2, which waits for rank 0 only."""
    plan = grid_plan((1, 2), (1, 1), mini_batch=2, sizes=(1, 1))
    schedules = build_schedules(plan)
    programs = lower_schedules(plan, schedules)

    def receive_early(body):
        receive = next(x for x in body if x.message is not None and x.message.direction is GRADIENT)
        body.remove(receive)
        body.insert(next(i for i, x in enumerate(body) if str(x) == "0F1"), receive)

    match = r"rank 0 waits for rank 1 at their task 0F1, rank 1 waits for rank 2 at grad.*, rank 2 waits for rank 0"
    with pytest.raises(ScheduleError, match=match):
        validate_programs(plan, schedules, changed(programs, 1, receive_early))


@pytest.mark.parametrize("grid", [(1, 2), (1, 1, 2)])
def test_a_part_that_is_missing_or_sent_twice_is_found(grid):
    plan = grid_plan(grid, (1, 1), shards=(1, None), mini_batch=1)
    schedules = build_schedules(plan)
    programs = lower_schedules(plan, schedules)

    def come(rank: int, times: int):
        """Return programs in which what comes from a rank is received so often."""

        def edit(body):
            is_its = [x.kind is InstructionKind.RECEIVE and x.message.src_rank == rank for x in body]
            return [y for x, own in zip(body, is_its, strict=True) for y in [x] * (times if own else 1)]

        return changed(programs, 2, edit)

    with pytest.raises(ScheduleError, match="1F0 has received samples nothing over edge 0, it needs"):
        validate_programs(plan, schedules, come(1, 0))
    with pytest.raises(ScheduleError, match=r"1F0 has received samples \[0..0\], \[0..0\] over edge 0"):
        validate_programs(plan, schedules, come(0, 2))
