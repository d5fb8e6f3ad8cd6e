"""Cluster descriptions: those that come along, and what wrong ones are told."""

import copy
import json

import pytest

from gpp_plugin.errors import ConfigError
from gpp_plugin.plan.cluster_files import cluster_names, describe_cluster, read_cluster

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
        (changed(links=GOOD["links"][:1]), "no link joins all 8 devices"),
        (changed(links=[GOOD["links"][1], GOOD["links"][0]]), r"links\[0\].*has no span"),
        (changed(device=[]), "unknown key 'device'; did you mean 'devices'"),
        ({"name": "x", "devices": GOOD["devices"]}, "links is missing"),
        (
            changed(devices=[GOOD["devices"][0], {"name": "old", "memory_gb": 16, "memory_gb_per_s": 900}]),
            r"devices\[1\] \(old\): tflops is missing; heterogeneous devices get work by their speeds: .*gpp doctor --gpus",
        ),
        (
            changed(devices=[{**GOOD["devices"][0], "tflops": {d: 1}, "name": d} for d in ("bf16", "fp16")]),
            r"no type has a speed on all devices: devices\[1\] \(fp16\) has a speed in fp16",
        ),
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


def test_speeds_are_of_the_type_that_is_trained_in():
    plain = changed(devices=[{**GOOD["devices"][0], "tflops": {"bf16": 100, "fp32": 20}}])
    assert [(d.dtype, d.flops_per_s) for d in read_cluster(plain).devices[:1]] == [("bf16", 100e12)]
    assert read_cluster(plain, dtype="fp32").devices[0].flops_per_s == 20e12
    assert read_cluster(describe_cluster(read_cluster(plain, dtype="fp32"))).devices[0].dtype == "fp32"
    with pytest.raises(
        ConfigError, match=r"devices\[0\] \(gpu\) has a speed in bf16, fp32 and none in fp16; train in"
    ):
        read_cluster(plain, dtype="fp16")
    # one number is the speed in whatever is trained in
    assert read_cluster(GOOD, dtype="fp16").devices[0].flops_per_s == 10e12
    with pytest.raises(ConfigError, match="dtype 'int8': is not known; give one of bf16, fp16, fp32"):
        read_cluster(GOOD, dtype="int8")


def test_unlike_devices_train_in_a_type_that_all_have():
    entries = [
        {**GOOD["devices"][0], "tflops": {"bf16": 100, "fp32": 20}},
        {**GOOD["devices"][0], "name": "old", "tflops": {"fp32": 10, "fp16": 80}},
    ]
    cluster = read_cluster(changed(devices=entries, links=[{"name": "all", "gb_per_s": 10}]))
    assert {d.dtype for d in cluster.devices} == {"fp32"}
    assert cluster.is_mixed
