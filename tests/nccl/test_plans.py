"""No plan hangs: the recorded-order model (`operations`) over what else runs than plans of the tests (`test_races`)."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from gpp_benchmarks._emulated_graphs import emulated_plan
from gpp_benchmarks._random_plans import random_draw
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, StageEdge
from gpp_plugin.runtime.rank_programs import plan_of_units
from tests.nccl.collect_plans import read_plans
from tests.nccl.coverage_counts import Tell, check_runs, everything, report
from tests.nccl.recording import Run, record_job
from tests.schedule.plans import chain_plan, simple_plan
from tests.schedule.test_async import random_async_plan
from tests.schedule.test_look_ahead import may_look_ahead
from tests.tiers import some


def test_windows_that_stay_full(tell: Tell) -> None:
    plans = [random_async_plan(random.Random(seed)) for seed in some(range(20), every=5)]
    report(
        tell,
        check_runs([(f"seed {n}", Run(plan=plan, steps=2, record=True)) for n, plan in enumerate(plans)]),
    )


# ---- frozen branches that run ahead, units of unlike shapes ------------------------------------------------


def ahead(plan: PipelinePlan, **given: Any) -> Run:
    """Return seven mini-batches whose frozen branch runs ahead, with an evaluation and another iterator between."""
    return Run(plan=plan, prefetches=True, evaluate=True, record=True, **given)


def test_branches_of_the_tests_that_run_ahead(tell: Tell) -> None:
    runs = [
        (name, ahead(run.plan, tied=run.tied, zero=run.zero))
        for name, run in read_plans()
        if run.train and run.plan.mode == "sync" and may_look_ahead(run.plan)
    ]
    assert len(runs) > 8
    report(tell, check_runs(some(runs, every=8)))


def with_units(run: Run) -> Run | None:
    """Return two mini-batches of units on a plan of the tests, an evaluation behind the first; None: it cuts units."""
    try:
        return dataclasses.replace(everything(run), plan=plan_of_units(run.plan), has_units=True)
    except PlanError:
        return None


def test_units_of_unlike_shapes(tell: Tell) -> None:
    synchronous = [(name, run) for name, run in read_plans() if run.plan.mode == "sync"]
    runs = [(name, found) for name, run in synchronous if (found := with_units(run)) is not None]
    report(tell, check_runs(some(runs, every=8)))


# ---- several edges between two ranks -----------------------------------------------------------------------


def with_more_edges(seed: int) -> Run:
    """Return a random graph some of whose edges are two or three, each with a part of the tensors or more of them."""
    rng = random.Random(seed)
    plan = random_draw(seed, most_ranks=12).plan
    edges: list[StageEdge] = []
    for edge in plan.edges:
        edges.append(edge)
        for number in range(rng.choice([0, 1, 2])):
            name = f"more{edge.src}_{number}"
            edges.append(
                dataclasses.replace(
                    edge, batch_tensors=(name,), whole_tensors=(), gradient_tensors=rng.choice([(name,), ()])
                )
            )
    trained = dataclasses.replace(plan, edges=tuple(edges))
    return Run(plan=trained)


def test_several_edges_between_two_ranks(tell: Tell) -> None:
    runs = [with_more_edges(seed) for seed in some(range(3000, 3010), every=3)]
    assert any(len({(e.src, e.dst) for e in run.plan.edges}) < len(run.plan.edges) for run in runs)
    report(tell, check_runs([(str(number), everything(run)) for number, run in enumerate(runs)]))


# ---- Megatron's communicator -------------------------------------------------------------------------------


def test_megatrons_communicators(tell: Tell) -> None:
    pytest.importorskip("megatron.core")
    from gpp_plugin.integrations.megatron.p2p import MEGATRON_TRANSPORT

    plans = [
        chain_plan(2, 3),
        chain_plan(4, 6),
        simple_plan([1, 1, 1], [(0, 2), (1, 2)], mini_batch=4),
        simple_plan([2, 2, 4, 2], [(0, 1), (0, 2), (1, 3), (2, 3)], mini_batch=8),
        emulated_plan("twins", [(0, 2), (1, 2)], num_micro_batches=4, degrees={0: 2}),
        *(simple_plan([1] * n, _links(n), mini_batch=6) for n in some(range(3, 7), every=2)),
    ]
    runs = [Run(plan=plan, make_transport=MEGATRON_TRANSPORT.make) for plan in plans]
    world = [t for operation in record_job(runs[0])[1] for t in operation.transfers if t.communicator[0] == 0]
    assert len(world) == 4, "one to open it, and the gradients of three micro-batches over the default group"
    report(tell, check_runs([(str(number), everything(run)) for number, run in enumerate(runs)]))


def _links(num_stages: int) -> list[tuple[int, int]]:
    rng = random.Random(num_stages)
    return sorted({(rng.randrange(dst), dst) for dst in range(1, num_stages) for _ in range(2)})
