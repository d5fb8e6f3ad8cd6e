"""What devices reach, as entries of a cluster file; on the CPU (what is of CUDA there is not run here)."""

import dataclasses

import pytest
import torch

from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.plan.cluster_files import describe_cluster, read_cluster
from gpp_plugin.profile.device_memory import MeasuredDevice, measure_device, with_measured


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
