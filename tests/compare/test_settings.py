"""What a comparison is asked: one key changed for stock, wrong values refused before any process starts."""

import argparse

import pytest

from gpp_plugin.commands import compare_command
from gpp_plugin.compare.compare_settings import CompareSettings, default_config, settings_from_json
from gpp_plugin.errors import ConfigError


def settings(**changes):
    config = default_config(mini_batch=8, loss_unit=2, block={"planner": "graphpipe", "stages": 2})
    return CompareSettings(**{"model": "clip_tiny", "ds_config": config, "num_ranks": 2, **changes})


def test_stock_gets_the_same_configuration_with_another_planner():
    given = settings()
    given.ds_config["graph_pipeline"].update(plan="plan.json", schedule="gpipe", granularity="sub_layer")
    graph, stock = (given.config_of(mode, "folder") for mode in ("graph", "stock"))
    assert graph["graph_pipeline"] == {
        "planner": "graphpipe", "stages": 2, "plan": "plan.json", "schedule": "gpipe", "granularity": "sub_layer",
        "enabled": True, "profile_dir": "folder",
    }  # fmt: skip
    assert stock["graph_pipeline"] == {
        "planner": "stock_1f1b", "stages": 2, "granularity": "sub_layer", "enabled": True, "profile_dir": "folder",
    }  # fmt: skip
    assert {k: v for k, v in graph.items() if k != "graph_pipeline"} == {
        k: v for k, v in stock.items() if k != "graph_pipeline"
    }


def test_settings_survive_the_way_to_another_process():
    given = settings(modes=("stock", "graph"), sizes={"branches": 2})
    assert settings_from_json(given.to_json()) == given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": ("stock", "x")}, "modes: stock, x; give some of plain, single, stock, chain, graph"),
        ({"modes": ()}, "modes: none"),
        ({"steps": 0}, "steps: 0 is not valid"),
        ({"sizes": {"branches": "x"}}, "--size: branches=x is not valid; give a number"),
        ({"num_ranks": 0}, "the number of ranks: 0 is not valid"),
        ({"ds_config": {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}}, "does not divide"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_stock_has_as_many_stages_as_ranks_where_more_are_asked_for():
    given = settings(num_ranks=1)
    assert given.config_of("graph", "folder")["graph_pipeline"]["stages"] == 2
    assert "stages" not in given.config_of("stock", "folder")["graph_pipeline"]


def test_keys_of_the_command_line_stand_in_the_configuration():
    parser = argparse.ArgumentParser()
    compare_command.add_arguments(parser)
    words = ["gpt2_tiny", "--stages", "2", "--mini-batch", "8", "--length", "16", "--devices", "2"]
    words += ["--set", "memory=swap", "--set", "zero_stage=1", "--set", "trace_path=t.json"]
    found = compare_command._settings(parser.parse_args(words))
    assert found.ds_config["graph_pipeline"] == {
        "stages": 2, "memory": {"recompute": "off", "swap": "auto"}, "trace_path": "t.json",
    }  # fmt: skip
    assert found.ds_config["zero_optimization"] == {"stage": 1}
    assert (found.mini_batch, found.loss_unit, found.num_ranks, found.length) == (8, 4, 2, 16)
