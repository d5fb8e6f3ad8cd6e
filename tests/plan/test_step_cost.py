"""One ledger for every number: what a step costs is made once, stored with the plan, and printed alike everywhere."""

import dataclasses
import json
import re

import pytest

from gpp_plugin import api
from gpp_plugin.cli import main
from gpp_plugin.commands import simulate_command
from gpp_plugin.commands.rehearse_command import format_rehearsal, rehearsal_figures
from gpp_plugin.compare.compare_settings import GRAPH
from gpp_plugin.compare.simulated import best_stock, simulate_mode, simulated_row, single_plan
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import Alternative, cost_key, forward_only_stages
from gpp_plugin.ir.serialize import dumps, fingerprint, loads
from gpp_plugin.ir.step_cost import GATHERS, REDUCTIONS, TENSOR_SUMS
from gpp_plugin.ir.timeline import EventKind
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us, finished_plan, step_cost
from gpp_plugin.plan.memory.fitting import memory_advice
from gpp_plugin.plan.plan_form import plan_of_envelope
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import BAND
from gpp_plugin.rehearse.rehearsal import Rehearsal, RehearsalSettings, measure_times
from gpp_plugin.report.plan_text import NO_COST, format_plan
from gpp_plugin.report.units import format_bytes, format_ms
from tests.plan.graphs import branches, chain, keep_inside, make_profile, make_request, uneven_request

FROZEN = "b0"


def frozen(graph):
    """Return the graph whose first branch trains nothing: no gradient flows back into it."""
    tensors = {
        name: dataclasses.replace(spec, requires_grad=not name.startswith(FROZEN))
        for name, spec in graph.tensors.items()
    }
    return dataclasses.replace(graph, tensors=tensors)


def tight(**changes):
    """Return a request whose stages have to swap or recompute."""
    graph = keep_inside(branches(2, 3), 1000)
    profile = make_profile(graph, saved=1000.0, parameter=100)
    return make_request(graph, profile, ranks=4, memory_limit_bytes=7000, **changes)


MMT = {"num_devices": 4, "sizes": {"branches": 2, "layers": 4}, "mini_batch": 16, "loss_unit": 4}


def mmt(**options):
    return lambda: api.make_request("mmt", "summit", **MMT, **options)


def made_of(graph, **changes):
    return lambda: make_request(graph, make_profile(graph, parameter=10**6), **changes)


def has_memory_plan(way):
    return lambda plan: any(stage.memory is not None and getattr(stage.memory, way) for stage in plan.stages)


def has_schedule(name):
    return lambda plan: all(stage.schedule == name for stage in plan.stages)


def gathers(plan):
    return any(stage.gathered_bytes for stage in plan.stages)


def is_async(plan):
    return plan.mode == "async"


def shares_ranks(plan):
    return plan.shares_ranks


UNEVEN = {"mini_batch": 16, "loss_unit": 2}
PLANS = {
    **{f"zero {zero}": (mmt(zero_stage=zero), {}, bool) for zero in range(3)},
    "zero 3": (mmt(zero_stage=3, data_parallel=2), {}, gathers),
    "one stage zero 1": (mmt(zero_stage=1, stages=1), {}, lambda plan: len(plan.stages) == 1),
    "one stage zero 3": (mmt(zero_stage=3, stages=1), {}, gathers),
    "zero bubble": (mmt(stages=4), {"schedule": "zero_bubble"}, has_schedule("zero_bubble")),
    "gpipe": (mmt(stages=4), {"schedule": "gpipe"}, has_schedule("gpipe")),
    "kfkb": (mmt(stages=4), {"schedule": "kfkb"}, lambda plan: plan.stages[0].k > 1),
    "slices": (mmt(data_parallel=1), {"slicing": "on"}, lambda plan: any(s.num_sliced for s in plan.stages)),
    "async": (mmt(mode="async"), {}, is_async),
    "async zero 1": (mmt(mode="async", zero_stage=1), {}, is_async),
    "interleaved": (made_of(chain(4), ranks=2, virtual_stages=2, data_parallel=1), {}, shares_ranks),
    "colocated": (made_of(branches(2, 2), ranks=2, num_stages=3, colocate=True), {}, shares_ranks),
    "shared zero 3": (
        made_of(chain(4), ranks=4, virtual_stages=2, data_parallel=2, zero_stage=3),
        {},
        lambda plan: gathers(plan) and shares_ranks(plan),
    ),
    "dlrm": (lambda: api.make_request("dlrm", num_devices=4, mini_batch=64), {}, bool),
    "stock": (mmt(), {"planner": "stock_1f1b"}, has_schedule("1f1b")),
    "frozen": (lambda: make_request(frozen(branches(2, 3)), ranks=4, num_stages=4), {}, forward_only_stages),
    "tied and unlike": (lambda: uneven_request(3, **UNEVEN), {}, bool),
    "tensor ranks": (
        lambda: uneven_request(5, tensor_parallel=2, **UNEVEN),
        {},
        lambda plan: any(stage.tensor > 1 for stage in plan.stages),
    ),
    "recompute": (lambda: tight(memory_optimization=("recompute",)), {}, has_memory_plan("recomputed")),
    "swap": (lambda: tight(memory_optimization=("swap",)), {}, has_memory_plan("swapped")),
}


@pytest.fixture(scope="module", params=PLANS)
def made(request, tmp_path_factory):
    """A request, its finished plan, and the file that holds it."""
    make, choices, is_meant = PLANS[request.param]
    asked = make()
    plan = api.plan_for(asked, **choices)
    assert is_meant(plan), request.param
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    api.save(plan, path)
    return asked, plan, path


def command(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    return " ".join(" ".join(text).split()), json.loads(last)


def test_all_printers_say_the_same(made, capsys, tmp_path):
    asked, plan, path = made
    cost = plan.cost
    step = f"{format_ms(cost.step_us)} ms"
    held = f"{cost.fullest.rank} holds {format_bytes(cost.fullest.peak)}"
    assert plan.iteration_us == cost.step_us > 0
    assert sum(cost.parts.values()) == pytest.approx(cost.step_us, rel=1e-9)
    plain = json.loads(json.dumps(cost.parts))

    assert loads(api.PipelinePlan, dumps(plan)) == api.load_plan(path) == plan

    text = " ".join(format_plan(plan).split())  # of `gpp plan`
    assert f"{step} a step predicted" in text and f"takes {step} on " in text and held in text
    assert not re.search(r"\d (us|ms)\b", " ".join(plan.notes)), "only the ledger says how long a step is"

    page = tmp_path / "page.html"
    text, found = command(capsys, "report", path, "--html", page)
    assert f"{step} a step predicted" in text and held in text
    assert f"{step} a step predicted" in page.read_text() and held in page.read_text()
    assert found["cost"]["parts_us"] == plain and found["iteration_us"] == cost.step_us
    assert [row["load_us"] for row in found["rows"]] == list(cost.stage_us)
    assert max(rank["peak"] for rank in found["cost"]["ranks"]) == max(rank.peak for rank in cost.ranks)

    text, found = command(capsys, "simulate", path)
    assert f"takes {step} on " in text and held in text and found["cost"]["parts_us"] == plain
    busy, each = found["summary"]["busy_us"], found["summary"].get("num_windows", 1)
    for rank in range(plan.num_ranks):
        load_us = sum(cost.stage_us[index] for index in plan.stages_of_rank(rank))
        assert busy[str(rank)] == pytest.approx(each * load_us)
    if plan.mode == "async":
        assert found["summary"]["steady_us"] == pytest.approx(cost.step_us)
        assert f"mini-batches of an asynchronous plan: {step} each" in text
        assert (found["summary"]["fill_us"], found["summary"]["drain_us"]) == (
            cost.start_up_us,
            cost.drain_us,
        )
    else:
        assert found["summary"]["iteration_us"] == pytest.approx(cost.step_us)
        assert text.startswith(f"predicted: {step}, ")

    row = simulated_row(GRAPH, plan, asked)  # of `gpp compare` and of the baselines below a plan
    assert (row["iteration_ms"], row["peak_bytes"], row["fits"]) == (
        cost.step_us / 1e3,
        cost.fullest.peak,
        cost.fits,
    )
    assert row["fits"] == all(rank.peak <= asked.rank_limits[rank.rank] for rank in cost.ranks)

    rehearsal = rehearsed(plan)
    assert rehearsal_figures(rehearsal)["planned_ms"] == cost.step_us / 1e3
    assert f"planned {step} a " in format_rehearsal(rehearsal)


def rehearsed(plan):
    """Return what a rehearsal of a plan would be that measured what is predicted."""
    if plan.mode == "async":
        windows = api.simulate_async(plan)
        whole, timeline = windows.plan, windows.timeline
    else:
        whole, timeline = plan, api.simulate(plan)
    events = tuple(event for event in timeline.events if event.kind is not EventKind.STEP)
    timeline = dataclasses.replace(timeline, events=events)
    return Rehearsal(
        plan=whole,
        num_windows=whole.mini_batch // plan.mini_batch,
        settings=RehearsalSettings(),
        timelines=(timeline,),
        times=measure_times(whole, [timeline]),
        delays_us=timeline.iteration_us,
        predicted_us=timeline.iteration_us,
        cost=plan.cost,
    )


def test_memory_is_that_of_ranks(made):
    """By rank all its stages together; of parameters that are gathered the largest stage's, or two where they fit."""
    _, plan, _ = made
    for rank in plan.cost.ranks:
        own = [plan.memory[index] for index in plan.stages_of_rank(rank.rank)]
        gathered = sorted((part.gathered for part in own), reverse=True)
        rest = sum(part.total - part.gathered for part in own)
        assert rank.held in (rest + gathered[0], rest + sum(gathered[:2]))
        assert rank.messages == sum(part.messages for part in own)
        assert rank.limit == min(part.limit for part in own)
    (line,) = memory_advice(plan, zero_stage=0, allowed=())
    full = max(plan.cost.ranks, key=lambda rank: rank.peak / rank.limit)
    assert f": {full.peak} of {full.limit} bytes (" in line
    assert plan.cost.fits == all(rank.held + rank.messages <= rank.limit for rank in plan.cost.ranks)


def test_a_plan_without_costs_is_read_and_said_to_lack_them(made, tmp_path, capsys):
    """Files of releases before, and those whose times were changed by hand."""
    _, plan, path = made
    old = json.loads(path.read_text())
    del old["value"]["cost"]
    changed = json.loads(path.read_text())
    changed["value"]["stages"][0]["forward_us"] *= 2
    for content in (old, changed):
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(content))
        found = api.load_plan(file)
        assert found.cost is None and NO_COST in format_plan(found)
        text, result = command(capsys, "simulate", file)
        assert NO_COST in text and result["cost"] is None
    without = dataclasses.replace(plan, cost=None)
    assert fingerprint(plan) == fingerprint(without), "timelines of a plan are of the file without costs too"
    noted = dataclasses.replace(plan, notes=("other",))
    assert cost_key(noted) == plan.cost.plan


def test_the_same_stages_have_one_fingerprint_whichever_search_found_them():
    request = make_request(branches(2, 3), ranks=4)
    plan = api.plan_for(request)
    other = Alternative(num_stages=1, iteration_us=9.0, peak_bytes=10)
    for changed in (
        {"alternatives": (other,)},
        {"notes": ("not searched",)},
        {"planner": "graphpipe", "cost": None},
    ):
        assert fingerprint(dataclasses.replace(plan, **changed)) == fingerprint(plan)
    for changed in ({"zero_stage": 1}, {"stages": ()}, {"mini_batch": 32}):
        assert fingerprint(dataclasses.replace(plan, **changed)) != fingerprint(plan)


def test_a_plan_says_itself_that_it_is_an_estimate():
    """Files without the field are of plans that run; a planner's name says nothing of it."""
    request = make_request(branches(2, 3), ranks=4)
    plan = api.plan_for(request)
    named = dataclasses.replace(plan, planner="plain data parallel, of my own")
    assert simulated_row(GRAPH, named, request)["how"] == "simulated"
    estimate = dataclasses.replace(plan, is_estimate=True)
    assert simulated_row(GRAPH, estimate, request)["how"] == "estimated"
    plain = json.loads(dumps(estimate))
    with pytest.raises(PlanError, match="is an estimate"):
        plan_of_envelope(plain)
    del plain["value"]["is_estimate"]
    assert plan_of_envelope(plain).stages == plan.stages


def test_an_optimizer_step_takes_its_bytes_over_the_memory_bandwidth():
    """2 (O + G) bytes, at 1e12 a second; ZeRO 1 to 3 share out both."""
    graph = chain(4)
    profile = make_profile(graph, parameter=1_000_000)
    profile = dataclasses.replace(
        profile, costs=tuple(dataclasses.replace(cost, optimizer_bytes=6_000_000) for cost in profile.costs)
    )
    whole_us = 2 * 4 * (6_000_000 + 1_000_000) / 1e12 * 1e6
    for zero in range(4):
        request = make_request(graph, profile, ranks=4, num_stages=1, zero_stage=zero)
        cost = finished_plan(make_plan("uniform", request), request).cost
        assert cost.prices.update_us == pytest.approx([whole_us if zero == 0 else whole_us / 4])
        assert cost.optimizer_us == pytest.approx(cost.prices.update_us[0])


def test_searches_compare_the_step_of_the_ledger(made):
    """Optimizer steps and overlaps included; of mode async in closed form, and of ZeRO 3 without waits for peers."""
    asked, plan, _ = made
    costs = CostModel(asked.graph, asked.profile, asked.cluster, zero_stage=plan.zero_stage)
    near = 0.1 if plan.mode == "async" else 1e-2 if plan.zero_stage == 3 else 1e-3
    assert evaluate_us(plan, costs) == pytest.approx(plan.cost.step_us, rel=near)


def with_optimizers(num_bytes):
    """Return a request for which plain data parallelism computes no longer than two stages, but steps all parameters."""
    graph = chain(2)
    profile = make_profile(graph, parameter=1_000_000)
    heavy = tuple(dataclasses.replace(cost, optimizer_bytes=num_bytes) for cost in profile.costs)
    return make_request(graph, dataclasses.replace(profile, costs=heavy), ranks=2, mini_batch=64)


def test_a_plan_whose_optimizers_take_less_is_taken():
    request = with_optimizers(2 * 10**8)
    plan = make_plan("auto", request)
    plain = finished_plan(make_plan("auto", dataclasses.replace(request, num_stages=1)), request)
    assert len(plan.stages) == 2 and finished_plan(plan, request).iteration_us < plain.iteration_us
    assert plain.iteration_us - plain.cost.optimizer_us < plan.iteration_us - plain.cost.optimizer_us / 2


@pytest.mark.parametrize(("num_bytes", "gain", "stages"), [(2 * 10**8, 0.005, 1), (4 * 10**8, 0.024, 2)])
def test_within_the_band_the_simplest_plan_wins(num_bytes, gain, stages):
    """Two stages for 0.5 % lose against plain data parallelism, and are named; for 2.4 % they win."""
    request = dataclasses.replace(with_optimizers(num_bytes), final_schedule="auto")
    shortest = api.plan_for(request)
    plain = api.plan_for(dataclasses.replace(request, num_stages=1))
    assert len(shortest.stages) == 2 and plain.iteration_us / shortest.iteration_us - 1 == pytest.approx(
        gain, abs=1e-3
    )
    plan = api.plan_for(dataclasses.replace(request, band=BAND))
    assert len(plan.stages) == stages
    assert any(note.startswith("2 stages (stages=2) may take") for note in plan.notes) == (stages == 1)


def test_what_the_user_says_of_stages_is_what_he_gets():
    assert mmt()().band == BAND
    for said in ({"stages": 2}, {"planner": "graphpipe"}, {"schedule": "gpipe"}, {"data_parallel": 2}):
        assert mmt(**said)().band == 0.0, said


def test_terms_are_what_a_step_takes_longer_with_each(made):
    """Of prices that are 0 the term is 0, and of one stage on one rank nothing but its tasks and the step is left."""
    _, plan, _ = made
    parts, stages = plan.cost.parts, plan.cost.prices.reductions.stages
    if not any(own.last_us or own.each_us or own.step_us for own in stages):
        assert parts[REDUCTIONS] == 0 or plan.cost.prices.reductions.tied
    if not any(own.gather_us for own in stages):
        assert parts[GATHERS] == 0
    if all(stage.tensor == 1 for stage in plan.stages):
        assert parts[TENSOR_SUMS] == 0
    else:  # behind the weight gradients of a whole backward
        (sums,) = (each for each in plan.cost.collectives if each.kind == TENSOR_SUMS)
        assert 0 < sums.hidden_us < sums.total_us
        printed = simulate_command._overlap(plan, api.simulate(plan), plan.cost.prices.cluster)["overlap"][-1]
        assert (printed["kind"], printed["hidden_us"]) == (TENSOR_SUMS, sums.hidden_us)
    if len(plan.stages) == 1:
        assert parts["bubble"] == pytest.approx(0, abs=1e-6) and parts["messages"] == 0
    assert parts["compute"] > 0
    for each in plan.cost.collectives:
        assert each.total_us >= each.exposed_us and each.hidden_us == each.total_us - each.exposed_us


@pytest.mark.parametrize("name", ["zero 0", "zero 1", "zero 2", "zero 3", "async", "tied and unlike"])
def test_on_another_cluster_all_but_tasks_has_other_prices(name):
    """As the costs of that cluster have them, from the plan alone; messages, sums, gathers and optimizer steps."""
    make, choices, _ = PLANS[name]
    asked = make()
    plan = api.plan_for(asked, **choices)
    own = asked.cluster
    links = tuple(
        dataclasses.replace(each, bytes_per_s=each.bytes_per_s / 8, latency_us=3 * each.latency_us)
        for each in own.links
    )
    devices = tuple(
        dataclasses.replace(each, memory_bytes_per_s=each.memory_bytes_per_s / 2) for each in own.devices
    )
    other = dataclasses.replace(own, name="slower", links=links, devices=devices)
    costs = CostModel(asked.graph, asked.profile, other, zero_stage=plan.zero_stage)
    expected = step_cost(plan, costs).step_us
    found = (
        api.simulate_async(plan, other).steady_us
        if plan.mode == "async"
        else api.simulate(plan, other).iteration_us
    )
    assert found == pytest.approx(expected, rel=2e-3) and found > plan.cost.step_us
    assert api.simulate(plan, own) == api.simulate(plan)


def test_baselines_have_the_ledger_too():
    request = make_request(branches(2, 3), ranks=4)

    def graph(asked):
        return api.plan_for(asked)

    makers = {"stock": best_stock, "single": single_plan, "graph": graph}
    for mode, make in makers.items():
        row, cost = simulate_mode(mode, request, graph), finished_plan(make(request), request).cost
        assert (row["peak_bytes"], row["fits"]) == (cost.fullest.peak, cost.fits), mode
        assert row["iteration_ms"] == pytest.approx(cost.step_us / 1e3), mode
    assert simulate_mode("chain", request, graph)["iteration_ms"] >= row["iteration_ms"] * (1 - 1e-9)
