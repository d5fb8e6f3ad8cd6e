"""The map of winners: what a plan counts as, what is searched, and what is called a win."""

from __future__ import annotations

import pytest

from gpp_benchmarks.winners import BAND, CASE, KINDS, describe, find_winner, format_map, is_win, slow_down
from gpp_plugin.plan.cluster_files import read_cluster


def case(**values):
    usual = dict(zip(CASE, ("candle_uno", "summit", 3, 8, 0, 1), strict=True))
    return tuple({**usual, **values}.values())


def test_a_graph_wins_where_it_is_quicker_than_plain_tensor_and_chain():
    row = find_winner(case())
    times = {kind: row[f"{kind}_ms"] for kind in KINDS if row[f"{kind}_ms"] is not None}
    assert row["winner"] == min(times, key=times.get) and min(times.values()) >= row["bound_ms"]
    assert row["margin"] == pytest.approx(sorted(times.values())[1] / times[row["winner"]])
    assert row["pipelines"] == "searched" and {"plain", "chain", "graph"} <= set(times)
    assert is_win(row) == (row["winner"] == "graph" and row["margin"] > 1 + BAND)
    assert (
        row["command"]
        == "gpp plan candle_uno --zero auto --tensor-parallel auto --memory-recompute auto --cluster summit --devices 3 --mini-batch 24"
    )


def test_nothing_is_searched_where_plain_data_parallelism_is_near_the_bound():
    row = find_winner(case(model="gpt2_345m", devices=2, batch=32, cluster="dgx_h100"))
    assert row["winner"] == "plain" and row["chain_ms"] is None and row["graph_ms"] is None
    assert row["plain_ms"] <= row["bound_ms"] * (1 + BAND) and row["pipelines"].startswith("at most 1.0")
    assert not is_win(row)


def test_a_model_that_fits_in_no_way_is_said_so():
    row = find_winner(case(model="llava_34b", devices=2, batch=1))
    assert row["winner"] == "none fits" and row["margin"] is None
    assert describe(row) == "llava_34b, summit, 2 devices, mini-batch 2: none fits"


def test_the_map_has_a_row_a_model_and_a_column_for_what_differs():
    rows = [
        dict(zip(CASE, case(model=model, devices=devices), strict=True))
        | {"winner": "graph", "margin": margin}
        for model, devices, margin in (("mmt", 4, 1.25), ("mmt", 8, None), ("dlrm", 4, 1.0), ("dlrm", 8, 1.1))
    ]
    lines = format_map(rows).splitlines()
    assert lines[0].split() == ["summit", "4", "summit", "8"]
    assert [line.split() for line in lines[1:]] == [
        ["mmt", "graph", "1.25", "graph"],
        ["dlrm", "graph", "1.00", "graph", "1.10"],
    ]
    assert [is_win(row) for row in rows] == [True, True, False, False]


def test_links_between_nodes_alone_are_slower():
    cluster = read_cluster("l40s_100g", num_devices=16)
    slow = slow_down(cluster, 4)
    assert slow.links[0] == cluster.links[0] and slow.links[1].bytes_per_s * 4 == cluster.links[1].bytes_per_s
