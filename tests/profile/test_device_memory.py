"""What a plan may use of a CUDA device: the pure part, with made-up numbers of drivers."""

import pytest
import torch

from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.model.preparation import with_memory_explained
from gpp_plugin.profile.device_memory import (
    COMMUNICATORS,
    FRAGMENTATION,
    DeviceMemory,
    least_of_equals,
    use_cublas,
)
from gpp_plugin.profile.job_cluster import JobCluster

MIB, GIB = 1 << 20, 1 << 30
H100 = DeviceMemory(
    name="H100",
    total_bytes=80 * GIB,
    free_bytes=78 * GIB,
    communicator_bytes=130 * MIB,
    workspace_bytes=64 * MIB,
)


def test_what_is_free_less_a_reserve():
    """At 37ec3e4 it was the device's total: more than is free."""
    assert H100.usable_bytes == 78 * GIB - COMMUNICATORS * 130 * MIB - int(FRAGMENTATION * 78 * GIB)
    assert H100.usable_bytes < H100.free_bytes < H100.total_bytes
    assert H100.share_bytes == 78 * GIB, "a limit that the user gives has no reserve taken off"


def test_ranks_that_share_a_device_share_what_is_free_of_it():
    four = DeviceMemory(name="H100", total_bytes=80 * GIB, free_bytes=72 * GIB, sharers=4)
    assert four.usable_bytes == 18 * GIB - int(FRAGMENTATION * 18 * GIB)
    assert "shared by 4 ranks" in four.explanation and "communicators" not in four.explanation


def test_no_memory_is_no_negative_number():
    assert (
        DeviceMemory(name="small", total_bytes=GIB, free_bytes=MIB, communicator_bytes=GIB).usable_bytes == 0
    )


def test_equal_devices_get_the_lowest():
    def device(name: str, free: int) -> DeviceMemory:
        return DeviceMemory(name=name, total_bytes=80 * GIB, free_bytes=free * GIB)

    found = least_of_equals([device("H100", 78), device("A100", 30), device("H100", 70), device("A100", 35)])
    assert [(each.name, each.free_bytes // GIB) for each in found] == [
        ("H100", 70),
        ("A100", 30),
        ("H100", 70),
        ("A100", 30),
    ]


def test_the_numbers_are_in_the_error_of_a_plan_that_does_not_fit(tmp_path):
    device = Device(name="H100", memory_bytes=H100.usable_bytes, flops_per_s=1e15, memory_bytes_per_s=1e12)
    link = Link(name="NVLink", span=2, bytes_per_s=1e11, latency_us=5.0)
    found = JobCluster(
        cluster=Cluster(name="auto", devices=(device,) * 2, links=(link,)),
        memory=(H100, H100),
        speeds=(),
        path=tmp_path,
    )
    with pytest.raises(PlanInfeasible) as said, with_memory_explained(GraphPipelineConfig(), found):
        raise PlanInfeasible("no plan fits")
    assert str(said.value) == (
        'no plan fits; memory.limit_gb "auto" is 78.474 GB a rank on H100: 78.0 GiB free of 80.0 GiB (in use: 64.0 MiB '
        "of cuBLAS, contexts, kernels), less 8 communicators of 130 MiB and 3.90 GiB for fragmentation"
    )
    own = GraphPipelineConfig(memory={"limit_gb": 70.0})
    with pytest.raises(PlanInfeasible, match="^no plan fits$"), with_memory_explained(own, found):
        raise PlanInfeasible("no plan fits")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_workspaces_are_measured():
    device = torch.device("cuda", 0)
    use_cublas(device, torch.bfloat16)
    assert use_cublas(device, torch.bfloat16) == 0, "they are there the second time, and nothing else stays"
