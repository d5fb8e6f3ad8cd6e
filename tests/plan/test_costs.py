"""What stages, reductions and messages cost, worked out a second time from the plain numbers of uneven requests."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from gpp_plugin.ir.plan import MemoryPlan, PipelinePlan, RecomputedSegment, Stage, SwappedTensor
from gpp_plugin.plan.costs.collective_costs import gather_times
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import _edge_timing, estimate_plan_us, evaluate_us, update_times
from gpp_plugin.plan.costs.memory_formula import complete_plan, memory_breakdown
from gpp_plugin.plan.graphpipe.intervals import interval_bytes
from gpp_plugin.plan.make import LEAST_SHARE, StageDraft, build_plan, with_link_times, with_part_times
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.validate_plan import _stage_bytes
from tests.plan.graphs import uneven_request, walked_us

WAYS = {
    # blocks, data-parallel degree, tensor size, micro-batch, ranks where they are not the next ones
    "one rank each": [("b0 b1", 1, 1, 2), ("b2 b3 b4", 1, 1, 4), ("b5 b6", 1, 1, 1)],
    "unlike degrees": [("b0", 2, 1, 4), ("b1 b2 b3", 3, 1, 12), ("b4 b5 b6", 1, 1, 2)],
    "tensor ranks": [("b0 b1 b2", 1, 2, 2), ("b3 b4", 2, 2, 4, (2, 3, 5, 6)), ("b5 b6", 2, 1, 2)],
}
CASES = list(itertools.product(sorted(WAYS), range(2)))


def planned(way: str, seed: int, **changes: object) -> tuple[PlanRequest, CostModel, PipelinePlan]:
    request = uneven_request(seed, mini_batch=24, **changes)
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    drafts = [
        StageDraft(
            blocks=tuple(blocks.split()),
            degree=degree,
            tensor=tensor,
            micro_batch_size=size,
            ranks=ranks[0] if ranks else None,
        )
        for blocks, degree, tensor, size, *ranks in WAYS[way]
    ]
    return request, costs, build_plan(request, drafts, planner="", costs=costs)


def on_line(samples, times, local):
    return times[0] + (times[1] - times[0]) * (local - samples[0]) / (samples[1] - samples[0])


def plain_times(request: PlanRequest, stage: Stage, local: float) -> dict[str, float]:
    """Microseconds of a stage's forward, backward, and backward in two parts, block by block."""
    costs = request.profile.by_block()
    sharding = {each.block: each for each in request.graph.sharding if stage.tensor in each.degrees}
    found = dict.fromkeys(("forward", "backward", "input", "weight"), 0.0)
    for name in stage.blocks:
        cost, shard = costs[name], sharding.get(name) if stage.tensor > 1 else None
        share, sums = 1.0, [0.0, 0.0]
        if shard is not None:
            share = 1 - shard.flop_share * (1 - 1 / stage.tensor)
            rows = [stage.tensor_ranks(d) for d in range(stage.degree)]
            num = request.graph.num_samples
            sums = [  # of the row of tensor ranks that takes longest
                max(
                    count
                    * walked_us(request.cluster, row, num_bytes * local / num / count, beside=stage.ranks)
                    for row in rows
                )
                for count, num_bytes in (
                    (shard.forward_sums, shard.forward_sum_bytes),
                    (shard.backward_sums, shard.backward_sum_bytes),
                )
            ]
        backward = on_line(cost.samples, cost.backward_us, local) * share
        found["forward"] += on_line(cost.samples, cost.forward_us, local) * share + sums[0]
        beside = 0.0 if shard is None else backward * (1 - cost.input_share) * shard.beside_share
        found["backward"] += backward + max(sums[1] - beside, 0.0)
        found["input"] += backward * cost.split_factor * cost.input_share + sums[1]
        found["weight"] += backward * cost.split_factor * (1 - cost.input_share)
    return found


@pytest.mark.parametrize(("way", "seed"), CASES)
def test_times_of_stages_and_of_parts_of_their_tasks(way, seed):
    request, costs, plan = planned(way, seed)
    swapped = MemoryPlan(
        swapped=(
            SwappedTensor(name="x", bytes=5000, free_us=1.0),
            SwappedTensor(name="y", bytes=70, free_us=1.0),
        ),
        recomputed=(
            RecomputedSegment(blocks=("b0",), tensors=("z",), bytes=40, held_bytes=9, recompute_us=17.0),
            RecomputedSegment(blocks=("b1",), tensors=("w",), bytes=30, held_bytes=2, recompute_us=6.0),
        ),
        swap_us=3.0,
    )
    stages = tuple(
        dataclasses.replace(s, memory=swapped if i == 1 else None) for i, s in enumerate(plan.stages)
    )
    parts = with_part_times(dataclasses.replace(plan, stages=stages), costs)
    for index, (stage, split) in enumerate(zip(plan.stages, parts.stages, strict=True)):
        local = stage.micro_batch_size / stage.degree
        wanted = plain_times(request, stage, local)
        assert (stage.forward_us, stage.backward_us) == pytest.approx((wanted["forward"], wanted["backward"]))
        again, back = 0.0, 0.0
        if index == 1:
            again, back = 23.0, 5070 / min(20 - rank for rank in stage.ranks) / 100
        assert split.input_gradient_us == pytest.approx(wanted["input"] + again + (3.0 if again else 0.0))
        assert split.weight_gradient_us == pytest.approx(wanted["weight"] + again + back)
        half = local / 2
        if half >= 1:  # below the least number of samples that was measured other rules hold
            assert split.half_forward_us == pytest.approx(plain_times(request, stage, half)["forward"])


def test_times_between_and_beyond_the_measured_numbers_of_samples():
    request = uneven_request(0)
    cost = dataclasses.replace(
        request.profile.costs[0],
        samples=(1, 8, 64),
        forward_us=(50.0, 60.0, 410.0),
        backward_us=(90.0, 60.0, 20.0),
    )
    found = [cost.forward_us_for(n) for n in (1, 4, 8, 36, 64, 128)]
    assert found == pytest.approx([50, 50 + 30 / 7, 60, 235, 410, 810])
    assert cost.forward_us_for(0.5) == pytest.approx(50 - 5 / 7), "a launch is not halved"
    assert dataclasses.replace(cost, forward_us=(50.0, 400.0, 410.0)).forward_us_for(0.5) == 25.0
    assert cost.backward_us_for(1000) == 0.0, "no time is negative"
    assert dataclasses.replace(cost, samples=(2,), forward_us=(30.0,)).forward_us_for(3) == 45.0


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("way", "seed"), CASES)
def test_memory_is_the_same_to_planners_reports_and_the_validator(way, seed, zero):
    """The three are written apart; here with ties, shared storages, inputs, transients, and what is swapped or made
    again."""
    request, costs, plan = planned(way, seed, zero_stage=zero)
    memory = MemoryPlan(
        swapped=(SwappedTensor(name="x", bytes=51, free_us=1.0),),
        recomputed=(
            RecomputedSegment(blocks=("b0",), tensors=("z",), bytes=90, held_bytes=20, recompute_us=17.0),
            RecomputedSegment(blocks=("b1",), tensors=("w",), bytes=60, held_bytes=7, recompute_us=6.0),
        ),
        working_bytes=13,
    )
    for stage in plan.stages:
        plain = _stage_bytes(stage, request.graph, request.profile, zero, num_versions=1)
        assert stage.memory_bytes == pytest.approx(plain, abs=6)  # tensor ranks: whole bytes a block
    for mode in ("sync", "async"):
        stages = tuple(dataclasses.replace(s, memory=memory, pending=i) for i, s in enumerate(plan.stages))
        changed = dataclasses.replace(plan, stages=stages, mode=mode)
        parts = memory_breakdown(changed, request.profile, graph=request.graph, zero_stage=zero)
        for index, (stage, part) in enumerate(zip(stages, parts, strict=True)):
            versions = stage.in_flight if mode == "async" else 1
            plain = _stage_bytes(stage, request.graph, request.profile, zero, num_versions=versions)
            assert part.total == pytest.approx(plain, abs=stage.in_flight + 7)
            assert part.working == 13 and part.stage == stage.name
            if mode == "sync" and zero == 0:
                less = stage.in_flight * (51 + 70 + 53) - 13
                waiting = costs.on(stage).pending_bytes(costs.indices(stage.blocks), stage.local_batch_size)
                assert part.total == pytest.approx(stage.memory_bytes - less + index * waiting, abs=9)


@pytest.mark.parametrize("adapters", [None, 1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("way", "seed"), CASES)
def test_reductions_with_ties_between_unlike_stages(way, seed, zero, adapters):
    request, costs, plan = planned(way, seed, zero_stage=zero, adapters=adapters)
    by_name, sharding = request.profile.by_block(), {each.block: each for each in request.graph.sharding}

    def trained(name: str, tensor: int) -> float:
        """Return the share of a block's gradients that one tensor rank has."""
        shard = sharding.get(name)
        if shard is None or tensor not in shard.degrees:
            return 1.0
        return 1 - shard.trainable_bytes / by_name[name].gradient_bytes * (1 - 1 / tensor)

    wanted = []
    for index, stage in enumerate(plan.stages):
        gradients = sum(by_name[name].gradient_bytes * trained(name, stage.tensor) for name in stage.blocks)
        for tie in request.profile.tied:
            again = max(sum(name in stage.blocks for name in tie.blocks) - 1, 0)
            gradients -= again * tie.gradient_bytes * trained(tie.blocks[0], stage.tensor)
        ranks, ways = stage.data_ranks(0), {"beside": stage.ranks, "is_ring": zero > 0}
        one = walked_us(request.cluster, ranks, gradients, **ways)
        count = 24 // stage.micro_batch_size
        us = one * ((count + 1) / 2 if zero >= 2 else 1)
        if zero == 3:
            gathered = walked_us(request.cluster, ranks, stage.sharded_bytes, **ways) / 2
            us += gathered - one / 2
            assert gather_times(plan, request.cluster).get(index, 0.0) == pytest.approx(gathered)
        wanted.append(us)
    # Of a tied parameter a stage's gradients say no more than that it is no larger than the least of its blocks; of
    # stages of unlike tensor sizes the one that has most of it is waited for.
    for names in request.graph.tied.values():
        holders = [i for i, stage in enumerate(plan.stages) if set(names) & set(stage.blocks)]
        ranks = [rank for i in holders for rank in plan.stages[i].ranks[:: plan.stages[i].tensor]]
        everyone = [rank for i in holders for rank in plan.stages[i].ranks]
        sizes = [plan.stages[i].tensor for i in holders]
        most = max(min(by_name[n].gradient_bytes * trained(n, size) for n in names) for size in sizes)
        for i in holders if len(holders) > 1 else ():
            wanted[i] += walked_us(request.cluster, ranks, most, beside=everyone)
    found = costs.reduce_times(plan)
    assert [found[i] for i in range(len(plan.stages))] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(("way", "seed"), CASES)
def test_messages_of_edges_and_what_they_take(way, seed):
    request, costs, plan = planned(way, seed)
    sizes = {}
    for edge in plan.edges:
        src, dst = plan.stages[edge.src], plan.stages[edge.dst]
        names = {
            name
            for each in request.graph.edges
            for name in each.tensors
            if each.src in src.blocks and each.dst in dst.blocks
        }
        specs = [request.graph.tensors[name] for name in names]
        wide = {s.name: 4.0 * s.shape[-1] for s in specs}
        sizes[edge.src, edge.dst] = (
            sum(wide[s.name] for s in specs if len(s.shape) == 2),
            sum(wide[s.name] for s in specs if len(s.shape) == 1),
            sum(wide[s.name] for s in specs if len(s.shape) == 2 and s.requires_grad),
        )
        found = edge.bytes_per_sample, edge.bytes_fixed, edge.gradient_bytes_per_sample
        assert found == pytest.approx(sizes[edge.src, edge.dst])
        assert edge.gradient_bytes_fixed == edge.bytes_fixed
        assert set(edge.gradient_tensors) == {name for name in names if not name.endswith("mask")}
    assert {spec.name for spec in complete_plan(plan, request.graph, request.profile).tensors} == {
        name for edge in plan.edges for name in (*edge.batch_tensors, *edge.whole_tensors)
    }
    for edge in with_link_times(plan, request.cluster).edges:
        src, dst = plan.stages[edge.src], plan.stages[edge.dst]
        most = min(src.local_batch_size, dst.local_batch_size)
        batch, fixed, gradient = sizes[edge.src, edge.dst]

        def owner(stage, sample):
            place = sample % stage.micro_batch_size // stage.local_batch_size
            return stage.ranks[place * stage.tensor]

        ends = {(owner(src, sample), owner(dst, sample)) for sample in range(24)}
        slowest = max(request.cluster.transfer_us(*pair, batch * most + fixed) for pair in ends)
        assert edge.message_us == pytest.approx(slowest)
        slowest = max(request.cluster.transfer_us(*pair, gradient * most + fixed) for pair in ends)
        assert edge.gradient_us == pytest.approx(slowest)
    # messages that take hardly more than nothing are left out, and one that takes a little more puts all in
    dearest = max(edge.message_us for edge in with_link_times(plan, request.cluster).edges)
    for share, is_same in ((1.001, True), (0.999, False)):
        us = dearest / LEAST_SHARE * share
        scaled = tuple(
            dataclasses.replace(s, forward_us=us if i == 1 else 2 * us) for i, s in enumerate(plan.stages)
        )
        slow = dataclasses.replace(plan, stages=scaled)
        assert (with_link_times(slow, request.cluster) is slow) == is_same


def test_bytes_that_enter_and_leave_intervals():
    request = uneven_request(3)
    names = [block.name for block in request.graph.blocks]
    items = [(0,), (1, 2), (3,), (4,), (5, 6)]
    found = interval_bytes(request.graph, items)
    for start in range(5):
        for stop in range(start + 1, 6):
            inside = {names[i] for own in items[start:stop] for i in own}
            crossing = {
                (edge.src in inside, name)
                for edge in request.graph.edges
                for name in edge.tensors
                if (edge.src in inside) != (edge.dst in inside) and not name.endswith("bias")
            }
            wanted = sum(4 * request.graph.tensors[name].shape[1] for _, name in crossing)
            assert found[start, stop] == wanted, (start, stop)


@pytest.mark.parametrize(("way", "seed"), CASES)
def test_the_quick_prediction_is_the_simulation_where_no_messages_meet(way, seed):
    request = uneven_request(seed)
    link = dataclasses.replace(request.cluster.links[-1], bytes_per_s=1e18)
    _, costs, plan = planned(way, seed, cluster=dataclasses.replace(request.cluster, links=(link,)))
    # the ranks of a stage wait for each other there, and go on one by one in the simulation
    near, met = (1e-6, 2e-3) if way == "one rank each" else (0.1, 0.12)
    assert estimate_plan_us(plan, costs) == pytest.approx(evaluate_us(plan, costs), rel=near)
    _, costs, plan = planned(way, seed)
    assert estimate_plan_us(plan, costs) == pytest.approx(evaluate_us(plan, costs), rel=met)
    one = max(
        s.forward_us + s.backward_us + costs.reduce_times(plan)[index] + update_us
        for (index, update_us), s in zip(update_times(plan, costs).items(), plan.stages, strict=True)
    )
    asynchronous = dataclasses.replace(plan, mode="async")
    assert evaluate_us(asynchronous, costs) == pytest.approx(24 // plan.stages[0].micro_batch_size * one)
    # what messages hold of each end's links
    for edge in plan.edges:
        src, dst = plan.stages[edge.src], plan.stages[edge.dst]
        both = (*src.ranks, *dst.ranks)
        link = next(x for x in request.cluster.links if min(both) // x.span == max(both) // x.span)
        timing = _edge_timing(edge, src, dst, costs)
        per_us = link.bytes_per_s / 1e6
        there = [edge.bytes_per_sample * stage.local_batch_size + edge.bytes_fixed for stage in (src, dst)]
        back = [
            edge.gradient_bytes_per_sample * stage.local_batch_size + edge.gradient_bytes_fixed
            for stage in (src, dst)
        ]
        assert timing.latency_us == link.latency_us and timing.has_gradient
        serves = [-(-dst.tensor // src.tensor), -(-src.tensor // dst.tensor)]
        assert (timing.forward_out_us, timing.forward_in_us) == pytest.approx(
            (there[0] / per_us * serves[0], there[1] / per_us)
        )
        assert (timing.backward_out_us, timing.backward_in_us) == pytest.approx(
            (back[1] / per_us * serves[1], back[0] / per_us)
        )
