"""`gpp doctor --gpus N --device cpu`: the whole way over gloo, and what it refuses."""

import json
import os
import re
import sys

import pytest

from gpp_plugin.cli import main
from gpp_plugin.doctor import preflight
from gpp_plugin.doctor.preflight import Status, check_driver, check_ninja, check_nvcc, started_ranks
from gpp_plugin.doctor.preflight_rank import preflight_plan
from gpp_plugin.ir.serialize import save
from gpp_plugin.launch import reserved_port
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.costs.collective_costs import collectives
from gpp_plugin.rehearse.rehearsal import programs_of_plan
from gpp_plugin.runtime.rank_programs import channels_of
from tests.waits import run_program


def test_two_ranks_of_this_host(tmp_path, capsys):
    output = tmp_path / "cluster.json"
    assert main(["doctor", "--gpus", "--cpu", "--output", str(output), "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step of zeros") and "channels of 2 stages" in line for line in text)
    assert text[-1].startswith("2 ranks are ready (a functional run on CPUs over gloo")
    result = json.loads(last)
    (pair,) = result["rows"]
    assert (pair["first"], pair["second"], pair["link"]) == (0, 1, "host memory")
    assert pair["bytes_per_s"] > 0 and pair["latency_us"] > 0 and result["device"] == "cpu"
    assert any(line.startswith("speed of") and "fp32: " in line for line in text)
    assert any(line.startswith("all-reduce") for line in text) and result["all_reduce_bytes_per_s"] > 0
    cluster = read_cluster(output, num_devices=2)
    assert {dtype for dtype, _ in cluster.devices[0].peaks} == {"fp32", "bf16"}
    assert [(link.name, link.span) for link in cluster.links] == [("host memory", 2)]
    # what collectives took is in the file, and is what they are priced at
    assert any(line.startswith("all-gather") for line in text)
    link, price = cluster.links[0], collectives(cluster, (0, 1))
    for measured, cost, sent in (
        (link.all_reduce, price.all_reduce, 1.0),
        (link.all_gather, price.gather, 0.5),
    ):
        assert measured is not None and measured.latency_us is not None
        quickest = min(cost.lines, key=lambda line: line[1])
        assert quickest[1] == pytest.approx(sent * 1e6 / measured.bytes_per_s, rel=1e-6)
    assert price.gather.lines[0][0] == pytest.approx(link.all_gather.latency_us)
    assert result["all_reduce_bytes_per_s"] == link.all_reduce.bytes_per_s
    assert main(["plan", "mmt", "--cluster", str(output), "--planner", "uniform"]) == 0


def test_a_rank_that_does_not_come_is_named():
    options = ["--gpus", "2", "--device", "cpu", "--timeout", "3"]
    command = [sys.executable, "-m", "gpp_plugin.cli", "doctor", *options]
    with reserved_port() as port:
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, **variables}
        alone = run_program(command, env=environment, capture_output=True, text=True, timeout=150)
    assert alone.returncode == 1
    assert alone.stderr.strip().splitlines()[-1].startswith("gpp doctor: ")
    waited = re.search(r"rank 0 of 2 ranks waited ([\d.]+) s for all to join at 127\.0\.0\.1", alone.stderr)
    assert waited is not None and float(waited[1]) >= 3, alone.stderr


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_the_plan_opens_channels_both_ways(num_ranks):
    plan = preflight_plan(num_ranks)
    assert plan.num_ranks == num_ranks
    pairs = {channel[-2:] for channel in channels_of(programs_of_plan(plan))}
    assert pairs == {(b, a) for a, b in pairs}, "gradients come back"
    assert {rank for pair in pairs for rank in pair} == (set(range(num_ranks)) if num_ranks > 1 else set())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus 0: give at least 1 rank"),
        (["--gpus", "2", "--timeout", "0"], "--timeout 0: give seconds above 0"),
        (["--gpus", "4", "--plan", "plan.json"], "the plan is for 2 ranks; give --gpus 2"),
    ],
)
def test_what_is_refused(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(preflight_plan(2), tmp_path / "plan.json")
    assert main(["doctor", "--device", "cpu", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_without_a_device_it_says_what_to_do(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--gpus", "2"]) == 2
    assert "torch sees no CUDA device; --cpu tries the same over gloo" in capsys.readouterr().err


def test_who_started_this_process():
    assert started_ranks({}) == 0
    assert started_ranks({"RANK": "0", "WORLD_SIZE": "1"}) == 1
    assert started_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == 0, "a batch script"
    assert started_ranks({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}) == 4


def test_driver_and_compilers(monkeypatch):
    import torch

    said = {"nvidia-smi": "Driver Version: 535.104.05   CUDA Version: 12.2", "nvcc": "release 11.8, V11.8.89"}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(preflight, "_output_of", lambda command: said[os.path.basename(command[0])])
    monkeypatch.setattr(preflight.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
    driver, nvcc, ninja = check_driver(), check_nvcc(), check_ninja()
    assert driver.is_failure and driver.found == "driver 535.104.05, torch's CUDA 13.0, NCCL 2.27.3"
    assert nvcc.status is Status.WARNING and "nvcc is of CUDA 11.8 and torch of 13.0" in nvcc.advice
    assert ninja.status is Status.OK
    monkeypatch.setattr(preflight.shutil, "which", lambda name, path=None: None)
    assert [check().status for check in (check_nvcc, check_ninja)] == [Status.MISSING] * 2
