"""This machine as a cluster, and `gpp plan --cluster auto` on it."""

import os

import pytest
import torch

from gpp_plugin.cli import main
from gpp_plugin.profile.machine import _speeds, read_machine


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about CPU ranks")
def test_cpu_ranks_share_memory_and_speed():
    cluster = read_machine(4)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cluster.num_devices == 4
    assert sum(device.memory_bytes for device in cluster.devices) == pytest.approx(whole, rel=1e-6)
    assert 1e7 < cluster.devices[0].flops_per_s < 1e14
    assert 1e7 < cluster.devices[0].memory_bytes_per_s < 1e13


def test_reading_it_draws_no_random_numbers():
    _speeds.cache_clear()
    before = torch.get_rng_state()
    read_machine(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_plan_takes_this_machine(capsys):
    assert main(["plan", "mmt", "--cluster", "auto", "--devices", "2", "--planner", "uniform"]) == 0
    assert "planned on auto" in capsys.readouterr().out


def test_no_devices_are_refused(capsys):
    assert main(["plan", "mmt", "--cluster", "auto", "--devices", "0"]) == 1
    assert "--devices 0: give at least 1" in capsys.readouterr().err
