"""What a plan may use of a device, with made-up numbers of drivers, and what devices reach; on the CPU."""

import dataclasses

import pytest
import torch

from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.model.preparation import with_memory_explained
from gpp_plugin.plan.cluster_files import describe_cluster, read_cluster
from gpp_plugin.profile.device_memory import (
    COMMUNICATORS,
    FRAGMENTATION,
    DeviceMemory,
    MeasuredDevice,
    least_of_equals,
    measure_device,
    use_cublas,
    with_measured,
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
    small = DeviceMemory(name="small", total_bytes=GIB, free_bytes=MIB, communicator_bytes=GIB)
    assert small.usable_bytes == 0


def test_equal_devices_get_the_lowest():
    def device(name: str, free: int) -> DeviceMemory:
        return DeviceMemory(name=name, total_bytes=80 * GIB, free_bytes=free * GIB)

    found = least_of_equals([device("H100", 78), device("A100", 30), device("H100", 70), device("A100", 35)])
    assert [(each.name, each.free_bytes // GIB) for each in found] == [("H100", 70), ("A100", 30)] * 2


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


def test_a_cpu_is_measured_in_two_types():
    found = measure_device(torch.device("cpu"))
    assert set(found.flops_per_s) == {"fp32", "bf16"}
    assert all(1e7 < flops < 1e14 for flops in found.flops_per_s.values())
    assert found.host_bytes_per_s is None and found.launch_us > 0
    assert found.lines()[0].startswith("fp32: ")


def test_measured_speeds_are_written_and_read():
    device = Device(name="gpu", memory_bytes=10**9, flops_per_s=1e12, memory_bytes_per_s=1e12, efficiency=1.0)
    other = dataclasses.replace(device, name="old gpu")
    link = Link(name="link", span=3, bytes_per_s=1e9, latency_us=5.0)
    found = Cluster(name="found", devices=(device, device, other), links=(link,))
    quick = MeasuredDevice(
        flops_per_s={"bf16": 4e14, "fp32": 5e13},
        memory_bytes_per_s=3e12,
        launch_us=4.0,
        host_bytes_per_s=5e10,
    )
    slow = MeasuredDevice(flops_per_s={"fp32": 1e13}, memory_bytes_per_s=9e11, launch_us=8.0)
    cluster = with_measured(found, {"gpu": quick, "old gpu": slow}, {1: 0.5})
    assert [d.flops_per_s for d in cluster.devices] == [4e14, 2e14, 1e13]
    assert cluster.devices[1].memory_bytes_per_s == 1.5e12 and cluster.devices[0].host_bytes_per_s == 5e10
    # all know fp32, and so what is trained in is that
    again = read_cluster(describe_cluster(cluster))
    assert [d.dtype for d in again.devices] == ["fp32"] * 3
    assert [d.flops_per_s for d in again.devices] == pytest.approx([5e13, 2.5e13, 1e13])
    assert again.is_mixed
