"""Ranks wait enough: the race check's own judgement, 0 races in what is recorded, planted faults."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpp_benchmarks._exactness_kept import kept_draw
from gpp_benchmarks._random_plans import FAMILIES, random_draw, with_family, with_in_flight
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.runtime.tensor_ranks import TensorRanks
from tests.nccl import planted
from tests.nccl.collect_plans import read_plans
from tests.nccl.coverage_counts import Counts, Tell, check_runs, check_waits, everything, report
from tests.nccl.fake_cuda import CUDA, FakeCuda
from tests.nccl.memory import LET_GO, Access, Block, Where
from tests.nccl.operations import Tape
from tests.nccl.races import Race, races, races_of
from tests.nccl.recording import Run, record_rank
from tests.nccl.test_plans import ahead, with_more_edges, with_units
from tests.runtime.memory_stages import (
    MemoryPlan,
    TestStage,
    Trainer,
    chunks,
    make_stage,
    memory_plan,
    plan_both,
    plan_swap,
)
from tests.schedule.plans import make_edge, on_ranks, on_rows, sharded, simple_plan, with_all
from tests.schedule.test_look_ahead import random_frozen_plan
from tests.tiers import some

NOWHERE = Where("?", 0, None)


def access(at: int, stream: int, *, is_write: bool, is_own: bool = False, what: str = "x") -> Access:
    return Access(at, stream, 0, 4, is_write, what, NOWHERE, is_own)


def block_of(accesses: Sequence[Access]) -> Block:
    block = Block(0, "[1] float32")
    block.accesses += accesses
    block.streams |= {each.stream for each in accesses}
    return block


# ---- the check's own judgement -------------------------------------------------------------------------------


def worked_example(*, without: int = -1) -> list[Race]:
    """Return the races of the worked example, without one of its waits."""
    tape = Tape(0)
    side = tape.new_stream()
    record_ = tape.put(0, "record")
    tape.put(side, "wait", after=[] if without == 1 else [record_])
    receive = tape.put(side, "receive")
    tape.put(0, "wait", after=[] if without == 3 else [receive])
    used = [
        access(0, 0, is_write=True, what="allocated"),
        access(receive, side, is_write=True, is_own=True, what="receive"),
        access(4, 0, is_write=False, what="B"),
        access(3 if without == 5 else 4, 0, is_write=True, what=LET_GO),
    ]
    return races(0, tape.operations, [block_of(used)])


def test_the_worked_example() -> None:
    assert worked_example() == []
    assert [(r.first.what, r.second.what) for r in worked_example(without=1)] == [("allocated", "receive")]
    assert {r.second.what for r in worked_example(without=3)} == {"B", LET_GO}
    assert [(r.first.what, r.second.what) for r in worked_example(without=5)] == [("receive", LET_GO)]


def test_a_race_is_told_with_both_places_and_the_missing_wait() -> None:
    (race, _) = worked_example(without=3)
    assert str(race).splitlines() == [
        "race on rank 0: [1] float32, allocated on stream 0",
        "  stream 1 writes it: receive at ?:0",
        "  stream 0 reads it: B at ?:0",
        "  missing: stream 0 does not wait for 'receive' of stream 1; an event, a work's wait, or record_stream where it "
        "is let go of",
        "    #1 stream 1: wait after #0",
        "    #2 stream 1: receive  <-",
        "    #3 stream 0: wait",
        "    #4 stream 0: B reads  <-",
    ]


def alone(work: Callable[[FakeCuda], Any]) -> FakeCuda:
    return record_rank(1, 0, work)[0]


def found_in(work: Callable[[FakeCuda, torch.cuda.Stream, Tensor], Any]) -> list[tuple[str, str]]:
    """Return the races of what is done with a tensor of the stream that computes, and a stream beside it."""

    def begin(cuda: FakeCuda) -> None:
        tensor, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        work(cuda, side, tensor)

    cuda = alone(begin)
    return [(r.first.what, r.second.what) for r in races_of(0, cuda.memory)]


def beside(side: Any, call: Callable[[], Any]) -> Any:
    with torch.cuda.stream(side):
        return call()


def waited(side: Any) -> None:
    torch.cuda.current_stream().wait_stream(side)


def test_what_counts_as_a_use() -> None:
    assert found_in(lambda cuda, side, t: beside(side, t.sum)) == [("sum", LET_GO)]
    assert found_in(lambda cuda, side, t: (beside(side, t.sum), waited(side))) == []
    assert found_in(lambda cuda, side, t: (beside(side, t.sum), t.record_stream(side))) == []
    assert found_in(lambda cuda, side, t: beside(side, lambda: t.view(2, 2).detach()[0])) == []  # views
    assert found_in(lambda cuda, side, t: (beside(side, t.sum), torch.cuda.synchronize())) == []
    assert ("mul_", "add_") in found_in(
        lambda cuda, side, t: (t.mul_(2), beside(side, lambda: t.add_(1)), waited(side))
    )
    # other bytes of one storage
    assert (
        found_in(lambda cuda, side, t: (t[:2].mul_(2), beside(side, lambda: t[2:].add_(1)), waited(side)))
        == []
    )
    # what is allocated beside is let go of there
    assert found_in(lambda cuda, side, t: beside(side, lambda: torch.ones(3, device="cuda")).sum())[0] == (
        "allocated",
        "sum",
    )
    # a storage that is emptied, and filled again
    resized = found_in(lambda cuda, side, t: (beside(side, t.sum), t.untyped_storage().resize_(0)))
    assert resized == [("sum", LET_GO)]


def test_copies_of_pinned_memory_are_the_streams() -> None:
    def overwritten(cuda: FakeCuda, side: Any, t: Tensor, *, waits: bool) -> None:
        pinned = torch.ones(4, pin_memory=True)
        t.copy_(pinned, non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        pinned.fill_(2)

    def read(cuda: FakeCuda, side: Any, t: Tensor, *, waits: bool) -> None:
        host = torch.empty(4, pin_memory=True)
        host.copy_(t, non_blocking=True)
        if waits:
            torch.cuda.current_stream().record_event().synchronize()
        host.sum()

    for work, pair in ((overwritten, ("copy", "fill_")), (read, ("copy", "sum"))):
        assert found_in(lambda *given, work=work: work(*given, waits=False)) == [pair]
        assert found_in(lambda *given, work=work: work(*given, waits=True)) == []
    # from pageable memory the host has copied before it goes on
    assert found_in(lambda cuda, side, t: (t.copy_(host := torch.ones(4)), host.fill_(2))) == []


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(), lambda t: t.tolist(), lambda t: t.cpu(), lambda t: float(t[0]), lambda t: bool(t[0]),
        lambda t: t[t > 0], lambda t: t.nonzero(), lambda t: torch.tensor([1.0], device=CUDA), lambda t: t.to("cpu"),
        lambda t: torch.equal(t, t), lambda t: t.numpy(), lambda t: range(3)[t[0].int()],
        lambda t: torch.ones(4).copy_(t), lambda t: torch.cuda.synchronize(), lambda t: torch.ones(3).to(CUDA),
    ],
)  # fmt: skip
def test_what_counts_as_a_host_read(read: Callable[[Tensor], Any]) -> None:
    assert not alone(
        lambda cuda: torch.ones(3, device=CUDA).mul_(2).to(torch.bfloat16)[0:2].sum()
    ).memory.reads
    assert alone(lambda cuda: read(torch.ones(4, device=CUDA))).memory.reads


def test_a_host_read_of_another_thing_than_the_device_is_none() -> None:
    assert not alone(lambda cuda: torch.ones(3).sum().item()).memory.reads


# ---- what is recorded races nowhere --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "clip"])
@pytest.mark.parametrize("is_split", [False, True])
def test_captured_code_under_every_memory_plan(name: str, is_split: bool) -> None:
    """Swapped, made again or kept: no races, and the same numbers bit by bit."""
    stage = make_stage(name, granularity="layer", dropout=0.1, start=0.5 if name == "clip" else 0.0)
    plans: list[MemoryPlan | None] = [
        None,
        plan_swap(stage),
        plan_both(stage, 1),
        memory_plan(stage, chunks(stage, 1)),
    ]
    numbers = []
    for plan in plans:

        def work(cuda: FakeCuda, plan: MemoryPlan | None = plan) -> None:
            trainer = Trainer(stage, plan, device=CUDA)
            for _ in range(2):  # the first finds out what is saved
                numbers.append(trainer.train(is_split=is_split))

        cuda = alone(work)
        assert not races_of(0, cuda.memory)
        assert bool(cuda.memory.used) is (plan is not None and bool(plan.swapped))
    for found in numbers[2::2]:
        assert all(map(torch.equal, found["gradients"], numbers[0]["gradients"]))


@pytest.mark.parametrize(
    ("make", "name", "is_split"),
    [
        (planted.in_parts, "gpt2", False),
        (planted.in_parts, "llama", True),
        (planted.in_context, "gpt2", True),
        (planted.in_context, "llama", False),
    ],
)
def test_captured_code_of_ranks_of_the_same_samples_under_every_memory_plan(
    make: Callable[[TestStage], tuple[TestStage, TensorRanks]], name: str, is_split: bool
) -> None:
    """Sums under way beside what comes back from the host or is made again: no races, and the same numbers."""
    stage, ranks = make(make_stage(name, granularity="layer", start=0.4))
    numbers = []
    for plan in (None, plan_swap(stage), plan_both(stage, 1)):

        def work(cuda: FakeCuda, plan: MemoryPlan | None = plan) -> None:
            ranks.group = dist.new_group(None)
            trainer = Trainer(stage, plan, device=CUDA)
            for _ in range(2):
                numbers.append(trainer.train(is_split=is_split))

        cuda, _ = record_rank(2, 0, work)
        assert not races_of(0, cuda.memory)
        assert any(
            access.what == "all_to_all_single" for block in cuda.memory.used for access in block.accesses
        )
    for found in numbers[1:]:
        assert all(map(torch.equal, found["gradients"], numbers[0]["gradients"]))


def computing(run: Run, zero: int = 0) -> Run:
    """Return a run whose stages really compute."""
    if run.plan.mode == "async" or not run.train:
        zero = run.zero
    plan = sharded(run.plan) if zero == 3 else run.plan
    return dataclasses.replace(everything(run), plan=plan, zero=zero, computes=True)


@pytest.mark.parametrize("first", some(range(6), every=4))
def test_every_plan_of_the_tests_that_computes(first: int, tell: Tell) -> None:
    runs = [(name, computing(run, n % 4)) for n, (name, run) in enumerate(read_plans())][first::6]
    report(tell, check_runs(some(runs, every=40), is_sampled=True))


def random_run(seed: int) -> Run:
    """Return a random graph of 2 to 9 stages under some family of schedules, ZeRO 2 every third time."""
    draw = random_draw(seed, FAMILIES[seed % len(FAMILIES)], most_ranks=16)
    return Run(plan=draw.plan, forward_only=draw.forward_only, zero=2 if seed % 3 == 0 else 0)


@pytest.mark.parametrize("first", some(range(0, 300, 50), every=4))
def test_random_graphs_that_compute(first: int, tell: Tell) -> None:
    seeds = some(range(first, first + 50), every=40)
    runs = [(f"seed {seed}", computing(random_run(seed), seed % 4)) for seed in seeds]
    report(tell, check_runs(runs, is_sampled=True))


def context_grids() -> PipelinePlan:
    """Return stages of context x tensor ranks of 2 x 2, 5 x 1 and 1 x 1, between which 12 positions are in parts."""
    edges = [
        make_edge(src, src + 1, src_shard_axis=axes[0], dst_shard_axis=axes[1])
        for src, axes in enumerate(((1, 1), (1, None)))
    ]
    plan = dataclasses.replace(simple_plan([2, 2, 2], [], mini_batch=4), edges=tuple(edges))
    return on_rows(with_in_flight(plan), [1, 1, 2], [2, 1, 1], [2, 5, 1])


def others_that_compute() -> list[tuple[str, Run]]:
    """Return what plans of the tests lack.

    Prefetch of a frozen branch, units of unlike shapes, several edges between two ranks, windows, shared ranks, grids of
    data x tensor ranks, whose sums are under way side by side, and context ranks with parts of what stages exchange.
    """
    rng = random.Random(1)
    window, branch = (
        kept_draw(seed, mode, most_stages=6, most_ranks=4, shares_ranks=True)
        for seed, mode in ((4, "async"), (1, "look_ahead"))
    )
    grids = on_ranks(simple_plan([4, 4], [(0, 1)], mini_batch=8), (0, 1, 2, 3), (4, 5, 6, 7))
    units = [with_units(run) for _, run in some(read_plans(), every=60) if run.plan.mode == "sync"]
    return [
        ("frozen branch", ahead(with_family(random_frozen_plan(rng), FAMILIES[1], rng))),
        ("many edges", everything(with_more_edges(3000))),
        ("windows", Run(plan=window.plan, forward_only=window.forward_only, steps=2)),
        ("grids", everything(Run(plan=with_all(grids, tensor=2)))),
        ("context ranks", everything(Run(plan=context_grids()))),
        ("prefetch", Run(plan=branch.plan, forward_only=branch.forward_only, prefetches=True, evaluate=True)),
        *((f"units {n}", run) for n, run in enumerate(units) if run is not None),
    ]


@pytest.mark.parametrize("first", range(3))
def test_whatever_else_computes(first: int, tell: Tell) -> None:
    runs = [(name, dataclasses.replace(run, computes=True)) for name, run in others_that_compute()]
    report(tell, check_runs(runs[first::3]))


def test_a_step_reads_its_device_once() -> None:
    for memory in planted.usual("chain").memories:
        reads = [read for read in memory.reads if read.where.instruction is not None]
        assert len(reads) == 2, "one for each of two mini-batches"
        assert all(str(read.where).startswith("engine/stage_step.py") for read in reads)


@pytest.mark.parametrize("job", planted.JOBS)
def test_jobs_of_planted_faults_as_they_are(job: str) -> None:
    recorded, counts = planted.usual(job), Counts()
    check_waits(counts, job, recorded)
    assert counts.races == [] and not planted.hangs(recorded)


# ---- planted faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", some(planted.FAULTS, every=2), ids=lambda fault: f"{fault.job} {fault.target.rpartition(':')[2]}"
)
def test_a_planted_fault_is_found(fault: planted.Fault, tell: Tell) -> None:
    """What changes a result is found; what is not found costs time or memory alone."""
    found = planted.find(fault)
    tell(found)
    assert (found == "nothing") is bool(fault.harmless)


def test_enough_faults_are_planted() -> None:
    assert sum(not fault.harmless for fault in planted.FAULTS) >= 40
