"""Plain data parallelism: the first candidate of every search, the first row of every comparison."""

from __future__ import annotations

import dataclasses
import random

import pytest

from gpp_plugin.api import make_request as make_planning_request
from gpp_plugin.api import plan_for
from gpp_plugin.commands.plan_command import format_against
from gpp_plugin.compare.compare_settings import CHAIN, GRAPH, PLAIN, STOCK
from gpp_plugin.compare.simulated import best_stock, plain_line, simulate_mode, simulated_row
from gpp_plugin.config.key_names import ARGUMENT_NAMES, use_names
from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.plan import registry
from gpp_plugin.plan.baselines.data_parallel import (
    best_plain,
    describe_plain,
    gathered_features,
    loss_units,
    plain_plans,
    settled,
)
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.validate_plan import validate_for
from tests.plan.graphs import branches, chain, encoder_decoder, make_cluster, make_profile, make_request

MB = 1 << 20


def drawn(seed: int, **changes: object):
    """Return a request of unequal blocks with parameters, over a slow link or a quick one."""
    rng = random.Random(seed)
    graph = rng.choice([branches(2, 3), chain(6), encoder_decoder()])
    times = {block.name: float(rng.randint(20, 200)) for block in graph.blocks}
    profile = make_profile(graph, times, parameter=rng.choice([1_000, 4 * MB]), saved=float(MB))
    cluster = make_cluster(4, bandwidth=rng.choice([1e9, 1e12]), latency=2.0)
    return make_request(graph, profile, ranks=4, cluster=cluster, **changes)


@pytest.mark.parametrize("planner", ["auto", "graphpipe"])
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_slower_than_plain_data_parallelism(planner, seed):
    """Of what the request allows; with the ZeRO stage left open, of all stages."""
    for request in (drawn(seed), drawn(seed, zero_stage=2), drawn(seed, is_zero_open=True)):
        plain = plain_plans(request)[0]
        assert len(plain.stages) == 1 and plain.num_ranks == 4
        plan = plan_for(request, planner=planner)
        assert plan.iteration_us <= plain.iteration_us * (1 + 1e-9)
        validate_for(plan, settled(request, plan))


def test_an_open_stage_is_no_slower_than_any_that_is_named():
    for seed in range(4):
        auto = plan_for(drawn(seed, is_zero_open=True))
        named = [plan_for(drawn(seed, zero_stage=stage)).iteration_us for stage in (0, 1)]
        assert auto.iteration_us <= min(named) * (1 + 1e-9)


def test_what_fits_under_no_other_stage_is_found_under_zero_3():
    """Two ranks, each with place for a little more than half of the weights and one layer's gradients."""
    graph = chain(4)
    costs = [
        dataclasses.replace(cost, parameter_bytes=10 * MB, gradient_bytes=10 * MB, optimizer_bytes=80 * MB)
        for cost in make_profile(graph).costs
    ]
    profile = dataclasses.replace(make_profile(graph), costs=tuple(costs))
    request = make_request(
        graph, profile, ranks=2, num_stages=1, memory_limit_bytes=240 * MB, is_zero_open=True
    )
    with pytest.raises(PlanInfeasible):
        plan_for(dataclasses.replace(request, is_zero_open=False))
    plan = plan_for(request)
    assert plan.zero_stage > 0 and plan.stages[0].memory_bytes <= 240 * MB


def test_samples_a_loss_that_nobody_named_are_the_best():
    """A loss over 2 samples holds one stage to micro-batches of 2 a rank; nobody asked for 2."""
    graph = dataclasses.replace(chain(4), blocks=tuple(
        dataclasses.replace(block, is_coupled=block.name == "layers.3") for block in chain(4).blocks
    ))  # fmt: skip
    costs = [
        dataclasses.replace(cost, samples=(1, 16), forward_us=(100.0, 400.0), backward_us=(200.0, 800.0))
        for cost in make_profile(graph).costs
    ]
    profile = dataclasses.replace(make_profile(graph), costs=tuple(costs))
    held = make_request(graph, profile, ranks=2, mini_batch=32, loss_unit=2)
    free = dataclasses.replace(held, is_unit_open=True)
    assert loss_units(held) == [2] and max(loss_units(free)) == 32
    assert [plan.loss_unit for plan in plain_plans(held)] == [2]
    plan = plan_for(free)
    assert plan.loss_unit == 16 and len(plan.stages) == 1
    assert plan.iteration_us < plan_for(held).iteration_us
    # so it is for what plans are held against
    assert best_stock(free).iteration_us < best_stock(held).iteration_us


def test_without_blocks_that_mix_samples_stock_is_held_to_no_loss_unit():
    """The straw man of one loss a mini-batch: a chain of one micro-batch, slower than a single device."""
    request = make_request(chain(6), ranks=2, mini_batch=16, loss_unit=16)
    assert best_stock(request).iteration_us < make_plan("stock_1f1b", request).iteration_us


def test_a_loss_that_compares_samples_has_an_estimate_with_gathered_features():
    graph = branches(2, 2)
    coupled = tuple(dataclasses.replace(b, is_coupled=b.name == "join") for b in graph.blocks)
    graph = dataclasses.replace(graph, blocks=coupled)
    request = make_request(graph, ranks=4, mini_batch=16, loss_unit=16)
    assert plain_plans(request) == []
    plan = gathered_features(request)
    # 4 samples a rank of four blocks of 300 us a sample, and all 16 of the loss
    assert plan is not None and plan.iteration_us == pytest.approx(4 * 4 * 300 + 16 * 300, rel=1e-3)
    row = simulate_mode(PLAIN, request, plan_for)
    assert row["how"] == "estimated" and row["what"].startswith("plain data parallel, gathered features")
    # a plan of ours need not be as quick: it keeps the loss on its rank
    graph_row = simulated_row(GRAPH, plan_for(request), request)
    assert plain_line([row, graph_row]).startswith("plain data parallel, gathered features, ZeRO 0: ")


def test_the_first_line_says_what_plain_data_parallelism_takes():
    request = drawn(0, is_zero_open=True)
    plain = simulate_mode(PLAIN, request, plan_for)
    alone = simulated_row(GRAPH, plain_plans(request)[0], request)
    assert plain_line([plain, alone]).endswith("; no pipeline: no other plan that was found is shorter")
    slower = make_plan("uniform", drawn(0, num_stages=2))
    line = plain_line([plain, simulated_row(GRAPH, slower, request)])
    assert line.startswith("plain data parallel, ZeRO ") and "; this plan, 2 stages: " in line
    assert plain_line([simulate_mode(STOCK, request, plan_for)]) == ""


def test_a_row_of_its_own_says_what_another_stage_would_give():
    """An absent stage stays 0; so do tensor ranks and recompute that nobody allowed."""
    graph = chain(4)
    costs = [
        dataclasses.replace(cost, parameter_bytes=MB, gradient_bytes=MB, optimizer_bytes=100 * MB)
        for cost in make_profile(graph).costs
    ]
    profile = dataclasses.replace(make_profile(graph), costs=tuple(costs))
    request = make_request(graph, profile, ranks=2, memory_limit_bytes=250 * MB)
    with pytest.raises(PlanInfeasible, match="under ZeRO 0 does not fit"):
        best_plain(request)
    row = simulate_mode(PLAIN, request, plan_for)
    assert "refused" in row and row["open"]["what"] == "plain data parallel, ZeRO 1"
    rows = [row, simulated_row(GRAPH, plan_for(request), request)]
    line = plain_line(rows)
    assert line.startswith("plain data parallel, ZeRO 1: ") and "; this plan, 2 stages: " in line
    with use_names(ARGUMENT_NAMES):
        row = simulate_mode(PLAIN, request, plan_for)
    assert row["open"]["with"] == "zero_stage=1"
    assert "plain data parallel, ZeRO 1 (with zero_stage=1)" in format_against([row, rows[1]])
    # with the stage left open it is the plan
    assert "open" not in simulate_mode(PLAIN, dataclasses.replace(request, is_zero_open=True), plan_for)


@pytest.mark.parametrize(("us", "searched"), [(0.5, [1]), (2.0, [1, 3, 3])])
def test_a_higher_zero_stage_is_searched_where_plain_data_parallelism_is_quicker_under_it(
    us, searched, monkeypatch
):
    """The model fits on a rank under ZeRO 3 alone: a plan that is quicker under 1 needs no second search."""
    request = drawn(0, is_zero_open=True)
    found = plan_for(dataclasses.replace(request, is_zero_open=False, zero_stage=3))
    plain = dataclasses.replace(plain_plans(request)[0], zero_stage=3)
    monkeypatch.setattr(registry, "plain_plans", lambda _: [plain])
    stages = []

    def make(asked):
        stages.append(asked.zero_stage)
        return dataclasses.replace(found, iteration_us=us * plain.iteration_us)

    registry.plan_open("auto", request, make)
    assert stages == searched


def test_what_is_said_of_stages_does_not_hold_for_the_row():
    request = dataclasses.replace(drawn(1, num_stages=2), micro_batch_sizes={"*": 4})
    plan = best_plain(request)
    assert plan.zero_stage == 0 and len(plan.stages) == 1
    assert describe_plain(plan).startswith("plain data parallel, ZeRO 0")


def test_alternatives_need_less_memory_or_stages_for_more_time():
    found = 0
    for seed in range(6):
        plan = plan_for(drawn(seed))
        shown = [(len(plan.stages), max(stage.memory_bytes for stage in plan.stages), 0.0)]
        shown += [(each.num_stages, each.peak_bytes, each.iteration_us) for each in plan.alternatives]
        assert [us for *_, us in shown[1:]] == sorted(us for *_, us in shown[1:])
        for at, (count, peak, us) in enumerate(shown[1:], start=1):
            found += 1
            assert us <= 1.5 * plan.iteration_us * 1.05
            assert all(peak < most or count < stages for stages, most, _ in shown[:at])
    assert found > 2


def test_the_best_chain_may_be_plain_too():
    request = drawn(2, is_zero_open=True)
    row = simulate_mode(CHAIN, request, plan_for)
    assert row["iteration_ms"] <= plain_plans(request)[0].iteration_us / 1e3 * (1 + 1e-9)


CASES = [
    ("t5-large", 16), ("t5-large", 64), ("whisper-large", 64), ("clip-l14", 64), ("llava-7b", 8), ("llava-7b", 64),
    ("gpt2-1.3b", 32), ("mmt", 8),
]  # fmt: skip


@pytest.mark.parametrize(("model", "devices"), CASES)
def test_on_many_gpus_no_plan_is_slower_than_plain_data_parallelism(model, devices):
    """Cases in which plain data parallelism, costed by hand, beat plans that were called quicker than stock."""
    ways = {"zero_stage": "auto", "memory": ["recompute"]}
    for options in ({}, ways):
        request = make_planning_request(model, "dgx_h100", num_devices=devices, **options)
        rows = [simulate_mode(mode, request, plan_for) for mode in (PLAIN, STOCK)]
        try:
            graph = simulated_row(GRAPH, plan_for(request), request)
        except PlanInfeasible:  # absent, the ZeRO stage stays 0
            assert not options and "open" in rows[0]
            continue
        for row in rows:
            # stock may have another ZeRO stage than the one that was asked for; the first line names it
            is_same_zero = bool(options) or row["mode"] == PLAIN
            if is_same_zero and row["how"] != "estimated" and row.get("fits"):
                assert graph["iteration_ms"] <= row["iteration_ms"] * (1 + 1e-6)
        assert plain_line([*rows, graph]).startswith("plain data parallel")
