"""Cluster descriptions: those that come along, and what wrong ones are told."""

import copy
import json

import pytest

from gpp_plugin.errors import ConfigError
from gpp_plugin.plan.cluster_files import cluster_names, read_cluster

GOOD = {
    "name": "two nodes",
    "nodes": 2,
    "devices": [{"name": "gpu", "count": 4, "memory_gb": 16, "tflops": 10, "memory_gb_per_s": 900}],
    "links": [
        {"name": "inner", "span": 4, "gb_per_s": 50, "latency_us": 5},
        {"name": "outer", "gb_per_s": 10, "latency_us": 20},
    ],
}


def test_levels_of_the_network():
    cluster = read_cluster(GOOD)
    assert cluster.num_devices == 8
    assert cluster.link_between(0, 3).name == "inner"
    assert cluster.link_between(3, 4).name == "outer"
    assert cluster.transfer_us(0, 4, 1e7) == pytest.approx(20 + 1000)
    assert read_cluster(GOOD, num_devices=6).num_devices == 6


def test_mixed_memory_follows_rank_order():
    mixed = copy.deepcopy(GOOD)
    mixed["devices"].append({"name": "big", "memory_gb": 80, "tflops": 10, "memory_gb_per_s": 900})
    mixed["links"][0]["span"] = 5
    cluster = read_cluster(mixed)
    assert [d.memory_bytes // 10**9 for d in cluster.devices] == [16] * 4 + [80] + [16] * 4 + [80]


@pytest.mark.parametrize("name", cluster_names())
def test_every_description_that_comes_along_is_read(name):
    cluster = read_cluster(name, num_devices=32)
    assert cluster.num_devices == 32
    assert cluster.links[-1].span >= 32
    assert all(
        a.bytes_per_s >= b.bytes_per_s or name == "rtx3090_100g"
        for a, b in zip(cluster.links, cluster.links[1:], strict=False)
    )


def changed(**changes):
    return {**copy.deepcopy(GOOD), **changes}


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (changed(links=[]), "links must be a list with at least one"),
        (changed(links=GOOD["links"][:1]), "no link joins all 8 devices"),
        (changed(links=[GOOD["links"][1], GOOD["links"][0]]), r"links\[0\].*has no span"),
        (
            changed(devices=[{**GOOD["devices"][0], "memory_gb": 0}]),
            r"devices\[0\].memory_gb is 0; .*above 0",
        ),
        (changed(devices=[{**GOOD["devices"][0], "efficiency": 2}]), "at most 1"),
        (changed(device=[]), "unknown key 'device'; did you mean 'devices'"),
        ({"name": "x", "devices": GOOD["devices"]}, "links is missing"),
        (changed(nodes=0), "nodes is 0"),
        ([], "expected an object"),
    ],
)
def test_wrong_descriptions_get_one_line(plain, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match=message) as caught:
        read_cluster(path)
    assert "\n" not in str(caught.value)
    assert "bad.json" in str(caught.value)


def test_unknown_names_get_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'summit'"):
        read_cluster("sumit")
