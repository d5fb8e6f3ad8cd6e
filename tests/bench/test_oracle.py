"""The oracles share no formula with what they judge, and yet agree with it on every plan."""

from __future__ import annotations

import ast
import dataclasses
import random
from pathlib import Path

import networkx as nx
import pytest

from gpp_benchmarks import _memory_oracle, _oracle, _oracle_costs
from gpp_benchmarks._oracle import (
    all_degrees,
    all_partitions,
    random_dag,
    random_request,
    random_series_parallel,
    series_parallel_parts,
)
from gpp_benchmarks._oracle_costs import oracle_plan, step_us
from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.plan import validate_plan as validate
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.graphpipe.intervals import Component, decompose
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.request import PlanRequest

ORACLES = (_oracle, _memory_oracle, _oracle_costs)
INPUT_TYPES = {("gpp_plugin.plan.request", name) for name in ("PlanRequest", "AXES")}
"""What an oracle may know of the planners: the type of what both are asked, and the keys of its grids."""
KNOWN_PACKAGES = ("gpp_plugin.ir.", "gpp_benchmarks._oracle")


RECKONING_TYPES = (
    *(Stage, StageEdge, PipelinePlan, Block, BlockEdge, BlockGraph, BlockCost, Profile, TensorSpec),
    *(Device, Link, Cluster, PlanRequest),
)
"""What the oracles hold in their hands: its fields are the input, its methods and properties are code of ours."""


@pytest.mark.parametrize("module", ORACLES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_oracles_import_nothing_of_the_planners(module) -> None:
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    found = [
        (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    found += [
        (alias.name, "") for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    ]
    own = {pair for pair in found if pair[0].startswith(("gpp_plugin", "gpp_benchmarks"))}
    assert {pair for pair in own if not pair[0].startswith(KNOWN_PACKAGES)} <= INPUT_TYPES


@pytest.mark.parametrize("module", ORACLES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_oracles_reckon_with_fields_alone(module) -> None:
    """What our dataclasses reckon themselves (times at so many samples, bytes) planners reckon with as well."""
    tree = ast.parse(Path(module.__file__).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    methods = {
        name
        for kind in RECKONING_TYPES
        for name, value in vars(kind).items()
        if not name.startswith("__") and (callable(value) or isinstance(value, property))
    }
    fields = {field.name for kind in RECKONING_TYPES for field in dataclasses.fields(kind)}
    assert used & (methods - fields) == set()


def test_the_validator_of_plans_knows_neither_planners_nor_simulators() -> None:
    tree = ast.parse(Path(validate.__file__).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = {(node.module or "", alias.name) for node in nodes for alias in node.names} - INPUT_TYPES
    own = {
        name for name, _ in found if name.startswith("gpp_plugin") and not name.startswith("gpp_plugin.ir.")
    }
    assert own <= {"gpp_plugin.errors", "gpp_plugin.config.key_names", "gpp_plugin.plan.plan_form"}


def some_plans(seed: int, count: int) -> list[tuple[PlanRequest, PipelinePlan, PipelinePlan, CostModel]]:
    """Return plans of one random graph as the oracle and as the planners' code makes them."""
    rng = random.Random(seed)
    request = random_request(rng, random_dag(rng, rng.randint(3, 6)), ranks=rng.randint(2, 4), is_tight=False)
    costs = CostModel(request.graph, request.profile, request.cluster)
    cases = [
        (groups, degrees)
        for groups in all_partitions(request.graph, request.num_ranks)
        for degrees in all_degrees(len(groups), request.num_ranks, [1, 2, 4])
    ]
    found = []
    for groups, degrees in rng.sample(cases, min(count, len(cases))):
        drafts = [
            StageDraft(blocks=group, degree=degree, micro_batch_size=4)
            for group, degree in zip(groups, degrees, strict=True)
        ]
        built = build_plan(request, drafts, planner="brute force", costs=costs, is_named=False)
        found.append((request, oracle_plan(request, groups, degrees, 4), built, costs))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_oracles_and_planners_agree_on_bytes_and_times(seed: int) -> None:
    for request, own, built, costs in some_plans(seed, 12):
        assert [(s.blocks, s.ranks, s.in_flight) for s in own.stages] == [
            (s.blocks, s.ranks, s.in_flight) for s in built.stages
        ]
        assert [s.memory_bytes for s in own.stages] == [s.memory_bytes for s in built.stages]
        assert [s.forward_us for s in own.stages] == pytest.approx([s.forward_us for s in built.stages])
        assert step_us(own, request.cluster) == pytest.approx(evaluate_us(built, costs), rel=1e-9)


def test_the_drawn_pipeline_takes_what_its_picture_says() -> None:
    rng = random.Random(0)
    request = random_request(rng, nx.path_graph(2, create_using=nx.DiGraph), ranks=2, is_tight=False)
    plan = oracle_plan(request, (("n0",), ("n1",)), (1, 1), 16)
    assert [stage.in_flight for stage in plan.stages] == [2, 1] and plan.num_micro_batches(0) == 2
    stages = tuple(
        dataclasses.replace(s, forward_us=10.0, backward_us=20.0, gradient_bytes=0) for s in plan.stages
    )
    edges = tuple(
        dataclasses.replace(e, bytes_per_sample=0.0, gradient_bytes_per_sample=0.0) for e in plan.edges
    )
    link = dataclasses.replace(request.cluster.links[0], latency_us=0.0)
    cluster = dataclasses.replace(request.cluster, links=(link,))
    assert step_us(dataclasses.replace(plan, stages=stages, edges=edges), cluster) == 90.0


@pytest.mark.parametrize("seed", range(20))
def test_series_parallel_orders_are_taken_apart_as_the_planners_do(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_series_parallel(rng, rng.randint(2, 8))

    def text(part: object) -> str:
        kind, children, blocks = part  # type: ignore[misc]
        if kind == "block":
            return str(blocks[0])
        return f"{'S' if kind == 'series' else 'P'}({' '.join(map(text, children))})"

    found: Component = decompose(graph)
    assert text(series_parallel_parts(nx.transitive_closure_dag(graph), range(len(graph)))) == str(found)
