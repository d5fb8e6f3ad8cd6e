"""The devices of this machine as tests use them, and the numbers that tests found there."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.watched_job import ROOT, JobFailed, run_job, run_program

DEVICE_VARIABLE = "GPP_GPU_TESTS"
"""``cuda`` or ``cpu``: where `python -m tests.gpu` wants the suite to run; unset in the normal tests."""
SECONDS_VARIABLE = "GPP_GPU_SECONDS"
"""How long the suite may take; unset: as long as it takes."""
NOT_REACHED = "not reached"
LEAST_S = 20.0
"""A test is begun only where so much of the time is left."""
DRY_RANKS = 4
DRY_TIME = 3.0
"""Limits of jobs are longer by this on CPU ranks."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """One measured number.

    Args:
        most: its bound, None where it is only told.
        is_held: the number is held against its bound: it was measured on a device.
        command: runs the test that measured it.
    """

    what: str
    value: float
    most: float | None
    is_held: bool
    command: str

    @property
    def is_good(self) -> bool:
        """Return whether it is within its bound, where that says something."""
        return not self.is_held or self.most is None or self.value <= self.most


@dataclass
class Lab:
    """Where jobs run.

    Args:
        device: ``cuda``, or ``cpu`` for a dry run.
        devices: what ``CUDA_VISIBLE_DEVICES`` calls each; as many empty names in a dry run.
        run_ranks: runs a function on ranks.
        seconds: after which nothing is begun, and what runs is ended.
    """

    device: str
    devices: Sequence[str]
    run_ranks: Callable[..., list[Any]] = run_job
    seconds: float = math.inf
    began: float = field(default_factory=time.monotonic)
    numbers: list[Number] = field(default_factory=list)
    test: str = ""
    plain: dict[str, Any] = field(default_factory=dict)
    """What a single process makes of jobs, by the job."""

    @property
    def is_dry(self) -> bool:
        """Return whether nothing here is a device."""
        return self.device == "cpu"

    def has_time(self) -> bool:
        """Return whether a test may begin."""
        return self._left_s() >= LEAST_S

    def _left_s(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def _within(self, limit_s: float, call: Callable[[float], Any]) -> Any:
        """Call something with its limit, or with the time that is left where that is shorter."""
        limit_s *= DRY_TIME if self.is_dry else 1.0
        left_s = max(self._left_s(), 1.0)
        try:
            return call(min(limit_s, left_s))
        except JobFailed:
            if left_s < limit_s and self._left_s() <= 1.0:
                pytest.skip(f"{NOT_REACHED}: {self.seconds:g} s were over within it")
            raise

    def run(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        *arguments: Any,
        limit_s: float = 240.0,
        num_devices: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Run a function on ranks that see the first ``num_devices`` devices, and return what each returned."""
        variables = {**self._variables(num_devices), **(environment or {})}

        def call(limit: float) -> list[Any]:
            return self.run_ranks(function, num_ranks, *arguments, limit_s=limit, environment=variables)

        found: list[Any] = self._within(limit_s, call)
        return found

    def gpp(self, *words: str, limit_s: float, num_devices: int = 1) -> dict[str, Any]:
        """Run a ``gpp`` command there and return its result."""
        variables = self._variables(num_devices)
        found: dict[str, Any] = self._within(
            limit_s, lambda limit: run_program(words, limit_s=limit, environment=variables)
        )
        return found

    def _variables(self, num_devices: int) -> dict[str, str]:
        visible = {} if self.is_dry else {"CUDA_VISIBLE_DEVICES": ",".join(self.devices[:num_devices])}
        return {"DS_ACCELERATOR": self.device, **visible}

    def record(self, what: str, value: float, *, most: float | None = None, command: str = "") -> None:
        """Keep a number and print it with the command that measures it.

        Raises:
            AssertionError: it is above ``most``; not in a dry run.
        """
        ours = f'make test-gpu ARGS="-k {self.test}"'
        number = Number(
            what=what, value=value, most=most, is_held=not self.is_dry, command=f"{command}; {ours}" if command else ours
        )  # fmt: skip
        self.numbers.append(number)
        bound = "" if most is None else f" (at most {most:g})"
        print(
            f"{what}: {value:.4g}{bound}{' [dry run: functional only]' if self.is_dry else ''}; {number.command}"
        )
        assert number.is_good, f"{what}: {value:.4g}, at most {most:g}; {number.command}"


def find_lab() -> Lab | None:
    """Return the lab that `python -m tests.gpu` asked for, or that of the devices there are; None without any."""
    seconds = float(os.environ.get(SECONDS_VARIABLE, "inf"))
    if os.environ.get(DEVICE_VARIABLE) == "cpu":
        ranks = int(os.environ.get("GPP_DRY_RANKS", DRY_RANKS))
        return Lab(device="cpu", devices=[""] * ranks, seconds=seconds)
    import torch

    if not torch.cuda.is_available():
        return None
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    count = torch.cuda.device_count()
    devices = names[:count] or [str(index) for index in range(count)]
    return Lab(device="cuda", devices=devices, seconds=seconds)


@functools.cache
def describe_machine() -> dict[str, str]:
    """Return what a reader of the numbers must know: devices, driver, releases."""
    import deepspeed
    import torch
    import transformers

    found = {
        "python": platform.python_version(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "deepspeed": str(deepspeed.__version__),
        "transformers": str(transformers.__version__),
        "revision": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
    }
    if not torch.cuda.is_available():
        return {"devices": "no CUDA device", **found}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    driver = re.findall(r"Driver Version: ([\d.]+)", _output("nvidia-smi"))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if hasattr(torch.cuda, "nccl") else "none"
    return {"devices": devices, "driver": ", ".join(driver) or "unknown", "NCCL": nccl, **found}


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def write_report(lab: Lab, machine: Mapping[str, str], outcomes: Mapping[str, str], folder: Path) -> Path:
    """Write build/gpu_report.json and .md, and return the second.

    What is there of the same revision and devices stays, but for what this run found anew.

    Args:
        outcomes: what became of each test, by its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu_report.json"
    before = _report_of(path, lab.device, machine)
    numbers = {number.what: number for number in (*before[0], *lab.numbers)}.values()
    # what is not reached this time may have been before
    outcomes = {
        **outcomes,
        **before[1],
        **{k: v for k, v in outcomes.items() if not v.startswith(NOT_REACHED)},
    }
    rows = [{**asdict(number), "is_good": number.is_good} for number in numbers]
    report = {"device": lab.device, "machine": machine, "tests": outcomes, "numbers": rows}
    written = path.with_suffix(".part")  # never half a report, whenever the run is ended
    written.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    written.replace(path)
    lines = ["# make test-gpu", ""]
    if lab.is_dry:
        lines += [
            "A dry run on CPU ranks: functional, nothing of a device; no number is held against its bound.",
            "",
        ]
    lines += [f"- {name}: {text}" for name, text in machine.items()]
    lines += ["", "| number | found | at most | command |", "|---|---|---|---|"]
    for number in numbers:
        most = "" if number.most is None else f"{number.most:g}"
        flag = "" if number.is_good else " **above**"
        lines.append(f"| {number.what} | {number.value:.4g}{flag} | {most} | `{number.command}` |")
    missing = [name for name, text in outcomes.items() if text.startswith(NOT_REACHED)]
    if missing:
        lines += ["", f"{len(missing)} of {len(outcomes)} tests were not reached."]
    lines += ["", "| test | |", "|---|---|", *(f"| {name} | {text} |" for name, text in outcomes.items())]
    path = folder / "gpu_report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _report_of(path: Path, device: str, machine: Mapping[str, str]) -> tuple[list[Number], dict[str, str]]:
    """Return the numbers and the tests of a report, if it is of this revision and these devices."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if (found["device"], found["machine"]) != (device, dict(machine)):
            return [], {}
        rows = [{k: v for k, v in row.items() if k != "is_good"} for row in found["numbers"]]
        return [Number(**row) for row in rows], dict(found["tests"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or one of another form
        return [], {}
