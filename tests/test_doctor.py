"""gpp doctor: what it says about versions, backends and the machine."""

import json
import sys

import pytest

from gpp_plugin.cli import main
from gpp_plugin.doctor import checks as doctor
from gpp_plugin.doctor.checks import Check, Package, Status, check_compiler, check_package, check_python
from gpp_plugin.errors import RuntimeFailure

TORCH = Package(name="torch", least=(2, 11), tested=(2, 13))
HF = Package(name="transformers", least=(5, 0), tested=(5, 23), purpose="HuggingFace models")


OLDER = "2.10.1 is older than 2.11: pip install --upgrade 'torch>=2.11'"
NEWER = "2.14.0a1 is newer than 2.13, the last one tried; if something fails, try 2.13"


@pytest.mark.parametrize(
    ("package", "version", "status", "advice", "fails"),
    [
        (TORCH, "2.13.0+cpu", Status.OK, "", False),
        (TORCH, "2.11.0", Status.OK, "", False),
        (TORCH, "2.10.1", Status.FAILED, OLDER, True),
        (TORCH, "2.14.0a1", Status.WARNING, NEWER, False),
        (TORCH, None, Status.MISSING, "pip install 'torch>=2.11'", True),
        (HF, None, Status.MISSING, "pip install 'transformers>=5.0' for HuggingFace models", False),
    ],
)
def test_versions(package, version, status, advice, fails):
    check = check_package(package, version)
    assert (check.status, check.advice, check.is_failure) == (status, advice, fails)


def test_python():
    assert not check_python((3, 11, 0)).is_failure
    old = check_python((3, 10, 12))
    assert old.is_failure and old.found == "3.10.12" and "make PYTHON=" in old.advice


def test_compiler():
    assert check_compiler({"g++": "/usr/bin/g++"}.get).found == "g++"
    missing = check_compiler(lambda name: None)
    assert missing.status is Status.MISSING and not missing.is_failure and missing.advice


def test_gloo_is_really_tried(monkeypatch):
    monkeypatch.setattr(doctor, "EXCHANGE_TIMEOUT_S", 600.0)  # of a machine that has nothing else to do
    check = doctor.check_exchange("gloo")
    assert check.status is Status.OK, check.found
    assert check.found.startswith("2 processes, round trip of 256 KiB in ")


def test_the_hook_is_really_tried(monkeypatch):
    assert doctor.check_hook().status is Status.OK
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert doctor.check_hook().status is Status.FAILED


def test_output_and_exit_code(monkeypatch, capsys):
    good = Check(name="python", status=Status.OK, found="3.11.0")
    optional = Check(
        name="cuda", status=Status.MISSING, found="no device", advice="use the CPU", is_required=False
    )
    monkeypatch.setattr(doctor, "run_checks", lambda: iter([good, optional]))
    assert main(["doctor", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["check   status   found", "python  ok       3.11.0", "cuda    missing  no device"]
    assert "- cuda: use the CPU" in lines
    result = json.loads(lines[-1])
    assert (result["command"], result["ok"], result["broken"]) == ("doctor", True, [])
    assert [row["status"] for row in result["rows"]] == ["ok", "missing"]

    bad = Check(name="gloo send/receive", status=Status.FAILED, found="refused", advice="see the firewall")
    monkeypatch.setattr(doctor, "run_checks", lambda: iter([good, bad]))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "training cannot work: gloo send/receive"


def test_a_failed_exchange_is_reported_not_raised(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeFailure("rank 1 ended with exit code 1; it said last:\nconnection refused")
        yield

    monkeypatch.setattr(doctor, "run_ranks", fail)
    check = doctor.check_exchange("gloo")
    assert check.is_failure and check.found == "connection refused" and "GLOO_SOCKET_IFNAME" in check.advice


@pytest.mark.parametrize(
    ("has_gpu", "why", "status", "found"),
    [
        (False, "no nvcc", "ok", "torch's: nothing is compiled for the CPU"),
        (True, "", "ok", "DeepSpeed's FusedAdam, compiled in the first job or installed"),
        (True, "no nvcc", "warning", "torch's fused one: DeepSpeed's cannot be compiled (no nvcc)"),
    ],
)
def test_whose_adam_a_job_will_have_is_said(monkeypatch, has_gpu, why, status, found):
    from gpp_plugin.integrations.deepspeed import optimizer_bytes

    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr(optimizer_bytes, "why_no_fused_adam", lambda: why)
    check = doctor.check_optimizer()
    assert (check.status.value, check.found, check.is_failure) == (status, found, False)
    assert bool(check.advice) == (status == "warning")
