"""A stage of any blocks as a chain: tensors that come from outside, leave, or are kept by several stages."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from gpp_benchmarks._memory_oracle import with_saved_tensors
from gpp_benchmarks._oracle import random_dag, random_request
from gpp_plugin.ir.block_graph import SavedTensor
from gpp_plugin.ir.profile import SharedStorage
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.memory.capuchin import Segments, segment_costs
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.memory.memory_chain import StageChain
from gpp_plugin.plan.memory.operator_chain import GraphTensors, OperatorChain, PipelineShape
from tests.plan.graphs import costs_of, make_cluster, make_graph, make_profile


def _costs() -> CostModel:
    """a -> b -> d, a -> c -> d; d and c keep a's result, b what it makes itself, d also what b makes."""
    graph = make_graph([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")], bytes_per_sample=40)
    saved = (
        SavedTensor(name="a:out", made_by="a", kept_by=("c",), bytes=40),
        SavedTensor(name="b:inside", made_by="b", kept_by=("b",), bytes=300),
        SavedTensor(name="b:out", made_by="b", kept_by=("d",), bytes=40),
        SavedTensor(name="d:inside", made_by="d", kept_by=("d",), bytes=100),
    )
    graph = dataclasses.replace(graph, saved=saved)
    kept = {"a": 0, "b": 300, "c": 40, "d": 140}
    profile = make_profile(graph, {name: 10.0 * i for i, name in enumerate("abcd", 1)})
    costs = tuple(dataclasses.replace(c, saved_bytes_per_sample=float(kept[c.block])) for c in profile.costs)
    return CostModel(graph, dataclasses.replace(profile, costs=costs), make_cluster(2))


def _segments(*places: tuple[int, int]) -> Segments:
    starts, stops = np.array(places, dtype=np.int64).T
    return Segments(starts=starts, stops=stops)


def test_what_comes_from_outside_is_never_dropped_and_what_is_read_unsaved_is_held() -> None:
    chain = StageChain(GraphTensors(_costs()), (1, 2, 3), 1.0)  # b, c, d
    assert chain.names == ["", "b", "c", "d", ""]
    made = dict(zip(chain.tensors.names, chain.tensors.made.tolist(), strict=True))
    assert made == {"a:out": 0, "b:inside": 1, "b:out": 1, "d:inside": 3}
    whole = segment_costs(chain, _segments((1, 4)))
    assert whole.dropped.tolist() == [440.0]  # all but a's result
    assert whole.held.tolist() == [0.0]  # which is kept
    parts = segment_costs(chain, _segments((1, 2), (3, 4)))
    assert parts.dropped.tolist() == [300.0, 100.0]  # b's result is used in both
    assert parts.held.tolist() == [0.0, 40.0]  # c's result, which nobody keeps
    assert parts.time_us.tolist() == [20.0, 40.0]


def test_a_tensor_kept_outside_the_stage_is_none_of_it() -> None:
    chain = StageChain(GraphTensors(_costs()), (0, 1), 1.0)  # a, b
    assert chain.tensors.names == ("b:inside",)
    assert chain.unsaved.reader.tolist() == [2]  # b reads a's result, which only c keeps
    assert segment_costs(chain, _segments((1, 2), (2, 3))).held.tolist() == [0.0, 40.0]


def test_two_stages_that_keep_one_tensor_each_hold_it() -> None:
    """By `CostModel`, by the chain of all operators, and by the chain of the stage."""
    costs = _costs()
    shared = SavedTensor(name="a:out", made_by="a", kept_by=("b", "c", "d"), bytes=40)
    graph = dataclasses.replace(costs.graph, saved=(shared, *costs.graph.saved[1:]))
    kept = {"a": 0, "b": 340, "c": 0, "d": 140}
    profile = make_profile(graph, 10.0)
    profile = dataclasses.replace(
        profile,
        graph=fingerprint(graph),
        costs=tuple(
            dataclasses.replace(c, saved_bytes_per_sample=float(kept[c.block])) for c in profile.costs
        ),
        shared=(SharedStorage(blocks=("b", "c", "d"), bytes_per_sample=40.0),),
    )
    costs = CostModel(graph, profile, make_cluster(4))
    shape = PipelineShape(
        num_stages=1, num_micro_batches=4, limits=(1 << 40,), host_bytes_per_s=1e9, counts=(3,)
    )
    everything, operators = GraphTensors(costs), OperatorChain(costs, 2.0)
    held = {(0, 1): 0, (1, 2): 340, (1, 4): 480, (2, 3): 40, (2, 4): 180, (3, 4): 180, (0, 4): 480}
    for (start, stop), expected in held.items():
        chain = StageChain(everything, tuple(range(start, stop)), 2.0)
        need = costs.stage_memory(range(start, stop), degree=1, local=2.0, in_flight=3)
        assert need == operators.memory_bytes(start, stop, 0, shape) == 3 * 2 * expected
        assert chain.memory_bytes(*chain.whole, 0, shape) == need
        assert chain.tensor_bytes[-1] == 2 * expected


@pytest.mark.parametrize("rows", [rows for n in (1, 2, 3, 4) for rows in itertools.combinations(range(4), n)])
def test_menus_cover_the_stage_without_its_surroundings(rows: tuple[int, ...]) -> None:
    chain = StageChain(GraphTensors(_costs()), rows, 1.0)
    start, stop = chain.whole
    assert (start, stop) == (1, len(rows) + 1)
    for level in chain.menu():
        assert (level.starts >= start).all() and (level.stops <= stop).all()
        assert (level.starts[1:] >= level.stops[:-1]).all()
    assert chain.crossing[0] == chain.crossing[-1] == 0.0


@pytest.mark.parametrize("seed", range(12))
def test_what_a_segment_drops_and_holds_is_the_same_by_block_by_stage_and_on_chains(seed: int) -> None:
    """`GraphTensors.single_segments` for tables, `StageFitter` for candidates, `segment_costs` for plans."""
    rng = random.Random(seed)
    request = random_request(rng, random_dag(rng, 6), ranks=2, is_tight=False)
    request = with_saved_tensors(rng, request, tightness=1.0)
    request = dataclasses.replace(request, memory_optimization=("recompute",))
    costs = costs_of(request)
    fitter, local = StageFitter(request, costs), 2.0
    everything = GraphTensors(costs)
    dropped, held = everything.single_segments(local)
    for count in (1, 2, 3, 6):
        for rows in itertools.combinations(range(6), count):
            chain = StageChain(everything, rows, local)
            whole = segment_costs(chain, _segments(chain.whole))
            found = fitter._segment(rows, local)
            assert found.dropped == whole.dropped[0]
            assert found.dropped - found.net == whole.held[0]
            if count == 1:
                assert dropped[rows[0]] == whole.dropped[0] and held[rows[0]] <= whole.held[0]
