"""The short cuts of the stage search give what looking at everything does."""

import random

import networkx as nx
import numpy as np
import pytest

from gpp_benchmarks._oracle import random_request, random_series_parallel
from gpp_plugin.plan.batch_rules import batch_rules
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.graphpipe.graphpipe import make_search
from gpp_plugin.plan.graphpipe.intervals import build_series, decompose
from gpp_plugin.plan.graphpipe.reconstruction import read_groups
from gpp_plugin.plan.graphpipe.stage_search import StageSearch
from gpp_plugin.plan.graphpipe.stage_table import AllowedStages, InTime, StageTable


def test_the_drawn_row() -> None:
    fits = np.zeros((3, 1, 6), dtype=bool)
    for variant, last in enumerate((1, 3, 5)):
        fits[variant, 0, : last + 1] = True
    behind = np.array([[[9.0, 7.0, 6.0, 4.0, 3.0, 0.0]]])
    stages = AllowedStages(1, 1, np.array([1.0, 2.0, 4.0]), [lambda columns: fits[:, :, columns]], 6, None)
    assert stages.cost.tolist() == [[1, 1, 2, 2, 4, 4]]
    assert stages.fewest_with(behind).tolist() == [[[4.0]]]
    assert stages.fewest_with(behind[:, :, ::-1]).tolist() == [
        [[1.0]]
    ]  # more behind longer stages: every sum


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_stages_are_enough(seed: int) -> None:
    """With holes among the stages in time and among those that fit, ordered or not behind them, shared ends or none."""
    rng = np.random.default_rng(seed)
    num, shared, rows = 7, int(rng.integers(0, 3)), 4
    shape = (3, rows, num + shared)
    levels = np.where(rng.random(shape) < 0.7, 9, rng.integers(1, 4, shape))
    ones = np.ones(shape, dtype=np.int64)
    table = StageTable(
        degrees=np.array([1.0, 2.0, 4.0]),
        fitted_level=np.zeros(3, dtype=np.int64),
        us_per_sample=np.where(rng.random(shape) < 0.6, 1.0, 2.0),
        max_level=levels,
        first_step=ones,
        step=ones,
    )
    in_time = table.us_per_sample <= 1.0
    behind = rng.integers(0, 9, (1, 2, num + shared)).astype(float)
    if seed % 3:
        behind[:, :, :num] = -np.sort(-behind[:, :, :num], axis=2)
    for level in (1, 2, 3, 9):
        (stages,) = table.allowed(InTime(is_in_time=in_time, limits=np.array([9])), level, num)
        fits = in_time & (levels >= level)
        cost = np.where(fits, table.degrees[:, None, None], np.inf).min(axis=0)
        assert (stages.cost == cost).all()
        assert (stages.fewest_with(behind) == (cost + behind[:, :, None, :]).min(axis=3)).all()


def make(seed: int) -> tuple[StageSearch, int]:
    rng = random.Random(seed)
    graph = random_series_parallel(rng, rng.randint(5, 10))
    request = random_request(rng, graph, ranks=rng.randint(3, 7), is_tight=seed % 2 == 1)
    costs, rules = CostModel(request.graph, request.profile, request.cluster), batch_rules(request)
    root = build_series(request.graph, costs, rules, decompose(nx.DiGraph(graph)))
    return make_search(request, costs, rules, root, rules.wishes()[0], len(graph)), request.num_ranks


@pytest.mark.parametrize("seed", [*range(8), 36])  # 36: a join's stage takes part of a branch
def test_questions_may_end_early(seed: int) -> None:
    """With a most of levels and enough devices, levels up to the first that suffices are as without."""
    search, ranks = make(seed)
    times = search.times()
    for t in times[:: max(1, len(times) // 6)]:
        full = make(seed)[0].fewest_devices(float(t))
        first = next((level for level, devices in enumerate(full) if devices <= ranks), None)
        for most in (1, 3, search.max_level):
            found = search.fewest_devices(float(t), most_levels=most, enough=ranks)
            stop = most if first is None else min(most, first)
            assert found[: stop + 1].tolist() == full[: stop + 1].tolist()
            if first is not None and first <= most:
                other = make(seed)[0]
                other.fewest_devices(float(t))
                assert read_groups(search, first) == read_groups(other, first)
