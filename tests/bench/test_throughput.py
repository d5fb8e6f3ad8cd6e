"""`gpp bench throughput`: its three columns."""

from __future__ import annotations

import dataclasses
import json

import pytest

from gpp_benchmarks.throughput import RATIOS, _row
from gpp_plugin.cli import main
from gpp_plugin.ir.cluster import Link
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.make import StageDraft, build_plan
from tests.plan.graphs import make_cluster, make_graph, make_request

SMALL = ["--figures", "6", "--models", "two_branch", "--devices", "4"]
SMALL += ["--planners", "auto", "pipedream", "piper", "chain", "one-size"]


def test_ours_is_compared_with_the_best_of_each(capsys):
    assert main(["bench", "throughput", *SMALL, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    by_planner = {row["planner"]: row for row in result["rows"]}
    assert set(by_planner) == {"auto", "pipedream", "piper", "chain", "one-size"}
    ours, (cell,) = by_planner["auto"], result["cells"]
    assert cell["over_best_chain"] == ours["throughput"] / by_planner["chain"]["throughput"]
    assert cell["over_one_size"] == ours["throughput"] / by_planner["one-size"]["throughput"]
    best = max(by_planner[name]["throughput"] for name in ("pipedream", "piper"))
    assert cell["over_best_baseline"] == ours["throughput"] / best
    assert by_planner["chain"]["depth"] >= ours["depth"]
    assert result["summary"]["cells_behind_a_chain"] == []
    assert all(cell[name] >= 1.0 - 1e-9 for name in RATIOS) and cell["not_compared"] == {}
    assert by_planner["chain"]["throughput_as_graph"] is None


@pytest.mark.parametrize("planner", ["pipedream", "graphpipe"])
def test_everybodys_stages_may_share_a_node(planner):
    """Only b -> c is large, and in order it goes between nodes of two ranks."""
    graph = make_graph([("a", "b"), ("b", "c"), ("c", "d")])
    large = dataclasses.replace(graph.tensors["b:out"], shape=(1, 100_000))
    graph = dataclasses.replace(graph, tensors={**graph.tensors, "b:out": large})
    links = tuple(
        Link(name=name, span=span, bytes_per_s=speed, latency_us=0.0)
        for name, span, speed in (("inner", 2, 1e12), ("outer", 4, 1e9))
    )
    cluster = dataclasses.replace(make_cluster(4), links=links)
    request = make_request(graph, ranks=4, cluster=cluster, mini_batch=8)
    costs = CostModel(graph, request.profile, cluster)
    drafts = [StageDraft(blocks=(name,), degree=1, micro_batch_size=1) for name in "abcd"]
    plan = build_plan(request, drafts, planner=planner, costs=costs)
    row = _row("6", "four", request, planner, lambda: plan, 60.0)
    assert row["throughput"] > 1.2 * request.mini_batch / evaluate_us(plan, costs) * 1e6


def test_megatron_may_interleave_where_ours_may(capsys):
    arguments = ["--figures", "6", "--models", "mmt", "--devices", "8", "--planners", "uniform"]
    throughputs = []
    for extra in ([], ["--share-ranks"]):
        assert main(["bench", "throughput", *arguments, *extra, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
        throughputs.append(row["throughput"])
    # of an MMT data parallelism alone is the quickest since sums overlap: sharing ranks adds nothing, and takes nothing
    assert 0.0 < throughputs[0] <= throughputs[1]
