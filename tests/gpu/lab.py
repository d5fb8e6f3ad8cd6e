"""The devices of this machine as tests use them, and the numbers that tests found there."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.watched_job import ROOT, run_job, run_program

DEVICE_VARIABLE = "GPP_GPU_TESTS"
"""``cuda`` or ``cpu``: where `python -m tests.gpu` wants the suite to run; unset in the normal tests."""
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
    """

    device: str
    devices: Sequence[str]
    run_ranks: Callable[..., list[Any]] = run_job
    numbers: list[Number] = field(default_factory=list)
    test: str = ""
    plain: dict[str, Any] = field(default_factory=dict)
    """What a single process makes of jobs, by the job."""

    @property
    def is_dry(self) -> bool:
        """Return whether nothing here is a device."""
        return self.device == "cpu"

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
        return self.run_ranks(
            function,
            num_ranks,
            *arguments,
            limit_s=limit_s * (DRY_TIME if self.is_dry else 1.0),
            environment={**self._variables(num_devices), **(environment or {})},
        )

    def gpp(self, *words: str, limit_s: float, num_devices: int = 1) -> dict[str, Any]:
        """Run a ``gpp`` command there and return its result."""
        limit_s *= DRY_TIME if self.is_dry else 1.0
        return run_program(words, limit_s=limit_s, environment=self._variables(num_devices))

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
    if os.environ.get(DEVICE_VARIABLE) == "cpu":
        return Lab(device="cpu", devices=[""] * int(os.environ.get("GPP_DRY_RANKS", DRY_RANKS)))
    import torch

    if not torch.cuda.is_available():
        return None
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    count = torch.cuda.device_count()
    return Lab(device="cuda", devices=names[:count] or [str(index) for index in range(count)])


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

    Args:
        outcomes: what became of each test, by its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(number), "is_good": number.is_good} for number in lab.numbers]
    report = {"device": lab.device, "machine": machine, "tests": outcomes, "numbers": rows}
    (folder / "gpu_report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    lines = ["# make test-gpu", ""]
    if lab.is_dry:
        lines += [
            "A dry run on CPU ranks: functional, nothing of a device; no number is held against its bound.",
            "",
        ]
    lines += [f"- {name}: {text}" for name, text in machine.items()]
    lines += ["", "| number | found | at most | command |", "|---|---|---|---|"]
    for number in lab.numbers:
        most = "" if number.most is None else f"{number.most:g}"
        flag = "" if number.is_good else " **above**"
        lines.append(f"| {number.what} | {number.value:.4g}{flag} | {most} | `{number.command}` |")
    lines += ["", "| test | |", "|---|---|", *(f"| {name} | {text} |" for name, text in outcomes.items())]
    path = folder / "gpu_report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
