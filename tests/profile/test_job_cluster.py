"""A job's machines as a cluster: measured once for a kind of cluster, read from disk after that."""

import json
from pathlib import Path

import torch

from gpp_plugin.ir.cluster import Device
from gpp_plugin.plan.cluster_files import describe_cluster, read_cluster
from gpp_plugin.profile import job_cluster
from gpp_plugin.profile.device_links import Level
from gpp_plugin.profile.device_memory import DeviceMemory
from gpp_plugin.profile.job_cluster import cluster_key
from gpp_plugin.runtime.ranks.placement_of_ranks import JobPlacement, SeenByRank, place_ranks
from tests.ranks import run_kept_ranks


def test_a_description_reads_back_as_the_same_cluster():
    for name in ("dgx_h100", "summit", "laptop_cpu"):
        cluster = read_cluster(name, num_devices=16)
        assert read_cluster(json.loads(json.dumps(describe_cluster(cluster)))) == cluster


def test_other_hosts_of_the_same_kind_have_the_same_key():
    placement, levels = JobPlacement.on_one_host(4), [Level(name="PCIe", span=4)]
    key = cluster_key(placement, ["x"], levels)
    assert key != cluster_key(placement, ["y"], levels)
    assert key != cluster_key(placement, ["x"], [Level(name="NVLink", span=4)])
    assert placement.places[0].host not in json.dumps(key)


def test_devices_on_cuda_have_what_is_free_of_them(monkeypatch, tmp_path):
    one = SeenByRank(host="a", local_rank=0, devices=("GPU-0",), names=("H100",))
    memory = DeviceMemory(name="H100", total_bytes=80 << 30, free_bytes=78 << 30)
    monkeypatch.setattr(job_cluster, "measure_memory", lambda placement, group, **options: (memory,))
    monkeypatch.setattr(job_cluster, "reached_speeds", lambda kind, dtype: (1e15, 1e12, 4.0))

    def find(keeps_reserve: bool) -> Device:
        options = {"dtype": torch.bfloat16, "keeps_reserve": keeps_reserve, "directory": tmp_path}
        found = job_cluster.find_cluster(place_ranks([one], rank=0), None, **options)
        assert not found.speeds and not list(tmp_path.iterdir()), "one rank has no links"
        return found.cluster.devices[0]

    assert find(True).memory_bytes == memory.usable_bytes
    assert find(False).memory_bytes == 78 << 30, "a limit that the user gives has no reserve taken off"
    assert (find(True).name, find(True).flops_per_s, find(True).efficiency) == ("H100", 1e15, 1.0)


def _find(directory: str) -> tuple[list[dict], list[int], str]:
    import torch.distributed as dist

    placement = JobPlacement.on_one_host(2, rank=dist.get_rank())
    group = dist.new_group(backend="gloo")

    def find(**options):
        return job_cluster.find_cluster(
            placement, group, dtype=torch.float32, keeps_reserve=True, directory=directory, **options
        )

    found = [find(), find(), find(measures_anew=True)]
    clusters = [describe_cluster(each.cluster) for each in found]
    return clusters, [len(each.speeds) for each in found], str(found[0].path)


def test_links_are_measured_once(tmp_path):
    (clusters, counts, path), other = run_kept_ranks(_find, 2, str(tmp_path))
    assert (clusters, counts, path) == other, "every rank has the same"
    assert counts == [1, 0, 1]
    first, stored, _ = clusters
    assert first["links"] == stored["links"]
    assert [(link["name"], link["span"]) for link in first["links"]] == [("host memory", 2)]
    assert [device["count"] for device in first["devices"]] == [2]
    assert list(tmp_path.iterdir()) == [Path(path)]
    assert read_cluster(path).num_devices == 2
