"""vPipe, torchgpipe and PipeDream at the granularity of layers."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.plan.baselines.chain_costs import zero_memory_bytes
from gpp_plugin.plan.baselines.stock_chain import partition_gpipe, partition_pipedream
from gpp_plugin.plan.baselines.vpipe import LayerOptimizer, partition_vpipe
from gpp_plugin.plan.make import layer_bounds
from gpp_plugin.plan.memory.capuchin import StageOptimizer
from gpp_plugin.plan.memory.memory_chain import ChainPlan
from tests.plan.graphs import make_cluster
from tests.plan.operator_chains import best_partition, factory, operator_chain

BOTH = ("recompute", "swap")
PER_LAYER = 4


def layered(
    times: list[float], *, saved: float = 100.0, parameters: int = 10, output: int = 40
) -> tuple[BlockGraph, Profile]:
    """Return layers ``layers.i`` of four operators each; ``times`` are those of the layers, forward."""
    graph, profile = operator_chain(
        [us / PER_LAYER for us in times for _ in range(PER_LAYER)], saved=saved, parameters=parameters,
        kept_inside=False, backward_ratio=2.0, output=output,
    )  # fmt: skip
    new = {b.name: f"layers.{i // PER_LAYER}.op{i % PER_LAYER}" for i, b in enumerate(graph.blocks)}
    graph = dataclasses.replace(
        graph,
        blocks=tuple(dataclasses.replace(b, name=new[b.name]) for b in graph.blocks),
        edges=tuple(dataclasses.replace(e, src=new[e.src], dst=new[e.dst]) for e in graph.edges),
        saved=tuple(
            dataclasses.replace(t, made_by=new[t.made_by], kept_by=tuple(new[k] for k in t.kept_by))
            for t in graph.saved
        ),
        loss_block=new[graph.blocks[-1].name],
    )
    costs = tuple(dataclasses.replace(c, block=new[c.block]) for c in profile.costs)
    return graph, Profile(graph=fingerprint(graph), device="test", source="given", costs=costs)


def optimizer_of(
    limit: int, stages: int, ways: tuple[str, ...], times: list[float] | None = None, **options: str
) -> StageOptimizer:
    graph, profile = layered(times or [10.0, 30.0, 20.0, 10.0, 20.0, 30.0, 10.0, 20.0])
    cluster = make_cluster(stages, host=5e6)
    made = factory(graph, profile, [limit] * stages, cluster, memory_optimization=ways, **options)
    return made.at(1, stages)


def assert_layers(plan: ChainPlan) -> None:
    assert all(cut % PER_LAYER == 0 for cut in plan.cuts)


def test_layers_are_runs_of_operators_of_one_numbered_module():
    names = ["embed:a", "h.0.norm:b", "h.0.mlp:c", "h.1.norm:d", "norm:e", "head:f"]
    assert layer_bounds(names) == [0, 1, 3, 4, 6]
    assert layer_bounds(names, 5) == list(range(7)), "operators where there are fewer layers than stages"


@pytest.mark.parametrize("partition", [partition_vpipe, partition_gpipe, partition_pipedream])
def test_plain_partitions_follow_time(partition):
    """120, 120, 120, 90 microseconds forward and backward a stage is the best that whole layers allow."""
    plan = partition(optimizer_of(10**9, 4, ()))
    assert_layers(plan)
    times = [10.0, 30.0, 20.0, 10.0, 20.0, 30.0, 10.0, 20.0]
    best = min(
        max(sum(times[a:b]) for a, b in itertools.pairwise((0, *cuts, 8)))
        for cuts in itertools.combinations(range(1, 8), 3)
    )
    assert plan.key == (0, 3 * best)


def test_pipedream_avoids_a_dear_link():
    graph, profile = layered([10.0] * 4, output=40)
    tensors = dict(graph.tensors)
    wide = list(tensors)[2 * PER_LAYER - 1]
    tensors[wide] = dataclasses.replace(tensors[wide], shape=(1, 100_000))
    graph = dataclasses.replace(graph, tensors=tensors)
    profile = dataclasses.replace(profile, graph=fingerprint(graph))
    cluster = make_cluster(2, bandwidth=1e9)
    optimizer = factory(graph, profile, [10**9] * 2, cluster).at(1, 2)
    assert partition_gpipe(optimizer).cuts == (0, 8, 16)
    assert partition_pipedream(optimizer).cuts != (0, 8, 16)


def test_gpipe_runs_a_whole_stage_again():
    plan = partition_gpipe(optimizer_of(2500, 2, ("recompute",), mode="sync", schedule="gpipe"))
    assert plan.fits
    for choice, (start, stop) in zip(plan.stages, itertools.pairwise(plan.cuts), strict=True):
        if choice.memory is not None:
            (segment,) = choice.memory.recomputed
            assert len(segment.blocks) == stop - start


@pytest.mark.parametrize("ways", [("recompute",), ("swap",), BOTH])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vpipe_chooses_by_layer_and_is_near_its_own_best(ways, mode):
    """Kernighan-Lin against all cuts between layers with the same choices of a stage."""
    optimizer = optimizer_of(1500, 4, ways, mode=mode)
    plan = partition_vpipe(optimizer)
    assert_layers(plan)
    bounds = layer_bounds(optimizer.chain.names)
    layers = LayerOptimizer(optimizer, bounds)
    exact = best_partition(8, 4, lambda s, a, b: layers.choose(s, a, b).key)
    assert plan.fits == (exact[0] <= 0)
    if plan.fits:
        assert exact[1] <= plan.key[1] <= 1.1 * exact[1]
    for choice in plan.stages:
        for segment in choice.memory.recomputed if choice.memory is not None else ():
            assert len(segment.blocks) == PER_LAYER


def test_zero_shares_out_what_it_says():
    chain = optimizer_of(10**9, 1, ()).chain
    parameters, gradients, saved = 32 * 10, 32 * 10, 32 * 100
    bounds = layer_bounds(chain.names)
    assert (
        zero_memory_bytes(chain, num_ranks=4, zero_stage=2, bounds=bounds)
        == parameters + gradients / 4 + saved
    )
    assert zero_memory_bytes(chain, num_ranks=4, zero_stage=3, bounds=bounds) == (
        (parameters + gradients) / 4 + 2 * 40 + saved
    )
    with pytest.raises(ValueError, match="zero_stage is 1"):
        zero_memory_bytes(chain, num_ranks=4, zero_stage=1, bounds=np.array(bounds))
