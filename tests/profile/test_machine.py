"""This machine as a cluster, and `gpp plan --cluster auto` on it."""

import os

import pytest
import torch

from gpp_plugin.cli import main
from gpp_plugin.profile import machine
from gpp_plugin.profile.machine import reached_speeds, read_machine

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about CPU ranks")
def test_cpu_ranks_share_memory_and_speed():
    cluster = read_machine(4)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cluster.num_devices == 4
    assert sum(device.memory_bytes for device in cluster.devices) == pytest.approx(whole, rel=1e-6)
    assert 1e7 < cluster.devices[0].flops_per_s < 1e14
    assert 1e7 < cluster.devices[0].memory_bytes_per_s < 1e13


def test_reading_it_draws_no_random_numbers():
    reached_speeds.cache_clear()
    before = torch.get_rng_state()
    read_machine(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_products_are_timed_in_the_dtype_they_are_trained_in(monkeypatch):
    """On the device at hand, so that a plan of bf16 ranks is made with the speed of bf16."""
    seen = []
    monkeypatch.setattr(machine, "seconds_of", lambda operation, is_cuda: seen.append(operation()) or 1e-3)
    reached_speeds.cache_clear()
    try:
        speeds = [read_machine(1, device_type="cpu", dtype=d).devices[0].flops_per_s for d in DTYPES]
        read_machine(1, device_type="cpu", dtype=torch.bfloat16)
    finally:
        reached_speeds.cache_clear()
    products = [made.dtype for made in seen if made.shape == (machine.WIDTH, machine.WIDTH)]
    assert products == DTYPES, "each once a process"
    assert speeds == [pytest.approx(2 * machine.WIDTH**3 / 1e-3)] * 2


def test_plan_takes_this_machine(capsys):
    assert main(["plan", "mmt", "--cluster", "auto", "--devices", "2", "--planner", "uniform"]) == 0
    assert "planned on auto" in capsys.readouterr().out
