"""`gpp bench loading`: no rank takes more memory than its share of the weights while a meta model is loaded."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from safetensors import safe_open

from gpp_benchmarks import loading
from gpp_plugin.errors import RuntimeFailure

SMALL = {"hidden": 64, "layers": 2, "vocabulary": 128}


def test_weights_are_written_in_shards_that_differ(tmp_path) -> None:
    written = loading.write_weights(tmp_path, SMALL, shard_mb=0.05)
    index = json.loads((tmp_path / loading.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and written == index["metadata"]["total_size"]
    found = {}
    for file in files:
        with safe_open(tmp_path / file, framework="pt") as reader:
            found |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    assert set(found) == set(index["weight_map"])
    queries = [found[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in range(2)]
    assert not torch.equal(*queries) and queries[0].dtype is torch.bfloat16


def test_a_rank_that_takes_more_than_its_share_fails(monkeypatch, tmp_path) -> None:
    (tmp_path / loading.INDEX).write_text("{}")
    found = [
        {"stage_mb": 1000.0, "before_load_mb": 500.0, "peak_mb": peak, "imported_mb": 400.0}
        for peak in (1700.0, 2400.0)
    ]
    monkeypatch.setattr(loading, "bench_ranks", lambda *args, **options: iter([{"found": found}]))
    with pytest.raises(RuntimeFailure, match="rank 1 took 1900 MB to load 1000 MB"):
        loading._load_from(tmp_path, {**SMALL, "ranks": 2}, 1.0)


def test_two_ranks_load_fifty_million_parameters_in_their_share() -> None:
    parser = argparse.ArgumentParser()
    loading.add_arguments(parser)
    rows = loading.run(parser.parse_args(["--shard-mb", "20"]))["rows"]
    assert len(rows) == 2 and len({row["loss"] for row in rows}) == 1
    assert sum(row["stage_mb"] for row in rows) > 80
