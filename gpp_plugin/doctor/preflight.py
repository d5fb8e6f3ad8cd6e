"""`gpp doctor --gpus N`: before the first job on new machines, everything of it but the model, in two minutes.

It is a micro-benchmark as well: speeds of the devices by type, of their memory, of the links between ranks and of an
all-reduce, which ``--output`` writes as a description that ``gpp plan --cluster`` reads. Started by itself it starts N
ranks on this host; under a launcher (``torchrun``, ``deepspeed``, ``srun``, ``mpirun``) each process is one of the
ranks, on however many hosts. Every wait has a limit, and what ends it names the rank or the pair that did not answer.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpp_plugin.errors import ConfigError, DeviceMissing
from gpp_plugin.ir.serialize import output_path, write_text_whole
from gpp_plugin.launch import end_rank, run_ranks
from gpp_plugin.report.units import fill_text, format_table

# How a check of `gpp doctor` ended, and what to do about it.


class Status(enum.Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at.

    Args:
        found: what there is; ``advice`` what to do about it, empty where nothing.
        is_required: without it nothing trains.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    is_required: bool = True

    @property
    def is_failure(self) -> bool:
        """Return whether training is impossible because of this."""
        return self.is_required and self.status in (Status.MISSING, Status.FAILED)


def print_checks(checks: Sequence[Check]) -> None:
    """Print what was found as a table."""
    rows = [[check.name, check.status.value, check.found] for check in checks]
    print(format_table(["check", "status", "found"], rows, left=3))


def print_advice(checks: Sequence[Check]) -> None:
    """Print what to do, where there is anything."""
    advice = [f"- {check.name}: {check.advice}" for check in checks if check.advice]
    if advice:
        print("\nWhat to do\n" + "\n".join(fill_text(line, indent="  ") for line in advice))


COMMAND_TIMEOUT_S = 30.0
ALL = -1
"""What ``--gpus`` without a number means: all GPUs of this host, or the ranks that a launcher started."""
CPU_RANKS = 2
"""With ``--cpu``, by default."""


def add_preflight_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the preflight."""
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="?",
        const=ALL,
        metavar="N",
        help="try N ranks (all GPUs of this host) before a job: channels, a step of zeros, speeds, links and memory; "
        "alone on this host, or one process a rank under a launcher: torchrun --no-python --nproc-per-node 8 gpp "
        "doctor --gpus 8",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="with --gpus: cpu tries the same over gloo, where there is no GPU",
    )
    parser.add_argument(
        "--cpu",
        dest="device",
        action="store_const",
        const="cpu",
        default=argparse.SUPPRESS,
        help="as --device cpu",
    )
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="with --gpus: open the channels of this plan"
    )
    parser.add_argument(
        "--output",
        type=output_path,
        metavar="FILE",
        help="with --gpus: write the cluster there, for graph_pipeline.cluster and gpp plan --cluster",
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="with --gpus: longest wait for a rank (120)"
    )


def run_preflight(args: argparse.Namespace) -> dict[str, Any]:
    """Print what was found and return it; ``rows`` are the pairs of ranks.

    Raises:
        ConfigError: an option contradicts the launcher or the plan.
        DeviceMissing: there is no CUDA device.
        RuntimeFailure, CommTimeout: a rank failed or did not answer; says which.
    """
    launched = started_ranks(os.environ)
    if args.gpus == ALL:
        args.gpus = launched or _devices_here(args.device)
    _check_options(args, launched)
    found = _run(args, is_launched=launched > 0)
    # on CPUs there is nothing to compile for
    checks = [*_checks_of(found, args), *(check() for check in HOST_CHECKS if args.device == "cuda")]
    print_checks(checks)
    if found["pairs"]:
        rows = []
        for pair in found["pairs"]:
            speeds = f"{pair['latency_us']:.1f}", f"{pair['bytes_per_s'] / 1e9:.2f}"
            rows.append([f"{pair['first']} - {pair['second']}", pair["link"], *speeds])
        print("\nPairs of ranks, one way, several pairs at a time")
        print(format_table(["ranks", "link", "us", "GB/s"], rows, left=2))
    print_advice(checks)
    if args.output is not None:
        try:
            write_text_whole(args.output, json.dumps(found["cluster"], indent=2) + "\n")
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            raise ConfigError(f"--output {args.output}: {reason}; name another file") from error
        print(
            f'\nthe cluster is in {args.output}: "graph_pipeline": {{"cluster": "{args.output}"}}, '
            f"gpp plan MODEL --cluster {args.output}"
        )
    broken = [check.name for check in checks if check.is_failure]
    functional = " (a functional run on CPUs over gloo: its speeds say nothing about GPUs)"
    label = functional if args.device == "cpu" else ""
    print(f"\n{args.gpus} ranks are {'not ready: ' + ', '.join(broken) if broken else 'ready'}{label}")
    return {
        "rows": found["pairs"],
        "checks": [{**asdict(check), "status": check.status.value} for check in checks],
        **{key: found[key] for key in ("cluster", "steps_ms", "all_reduce_bytes_per_s")},
        "device": args.device,
        "ok": not broken,
    }


def started_ranks(environment: Mapping[str, str]) -> int:
    """Return how many ranks the launcher of this process started; 0 where none did."""
    from gpp_plugin.runtime.ranks.placement_of_ranks import launcher_variables

    if "RANK" in environment:
        return int(environment.get("WORLD_SIZE", "1"))
    size = int(launcher_variables(environment)["WORLD_SIZE"])
    return size if size > 1 else 0


def _devices_here(device: str) -> int:
    """Return the ranks that are tried by default; at least 1, so that a missing GPU is reported as such."""
    import torch

    return max(1, torch.cuda.device_count()) if device == "cuda" else CPU_RANKS


def _check_options(args: argparse.Namespace, launched: int) -> None:
    if args.gpus < 1:
        raise ConfigError(f"--gpus {args.gpus}: give at least 1 rank")
    if launched and launched != args.gpus:
        advice = f"give --gpus {launched}"
        raise ConfigError(f"--gpus {args.gpus}: the launcher started {launched} ranks; {advice}")
    if args.timeout <= 0:
        raise ConfigError(f"--timeout {args.timeout:g}: give seconds above 0")
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise DeviceMissing(
                f"--gpus {args.gpus}: torch sees no CUDA device; --cpu tries the same over gloo and measures the CPU"
            )
    if args.plan is not None:
        from gpp_plugin.rehearse.rehearsal import load_rehearsable

        num_ranks = load_rehearsable(args.plan).num_ranks
        if num_ranks != args.gpus:
            raise ConfigError(
                f"--plan {args.plan}: the plan is for {num_ranks} ranks; give --gpus {num_ranks} or another plan"
            )


def _run(args: argparse.Namespace, *, is_launched: bool) -> dict[str, Any]:
    """Return what rank 0 found; a launched process that is another rank ends here."""
    plan = None if args.plan is None else str(args.plan.absolute())
    settings: dict[str, Any] = {"device": args.device, "plan": plan, "timeout_s": args.timeout}
    if not is_launched:
        # a rank's limits end it and say why long before this one
        module = "gpp_plugin.doctor.preflight_rank"
        arguments = [json.dumps(settings)]
        events = list(run_ranks(module, arguments, num_ranks=args.gpus, timeout_s=5 * args.timeout + 60))
        return events[-1]
    from gpp_plugin.doctor.preflight_rank import run_rank

    found = run_rank(**settings)
    if found is None:
        end_rank()
    assert found is not None, "a rank but the first has ended"
    return found


def _checks_of(found: Mapping[str, Any], args: argparse.Namespace) -> Iterator[Check]:
    """Yield what the ranks found, as checks."""
    hosts = "; ".join(f"{host}: ranks {ranks[0]}..{ranks[-1]}" for host, ranks in found["hosts"])
    yield _ok("ranks", f"{args.gpus} joined in {found['joined_s']:.1f} s; {hosts}")
    kind = f"{found['num_devices']} x {found['device']}, {found['backend']}"
    status = Status.WARNING if found["fall_back"] else Status.OK
    yield Check(name="devices", status=status, found=kind, advice=found["fall_back"])
    first, second = found["steps_ms"]
    channels = f"{found['channels']} channels of {found['stages']} stages"
    yield _ok("step of zeros", f"{channels}: {first:.1f} ms, then {second:.1f} ms")
    for link in found["cluster"]["links"]:
        speed = f"{link['gb_per_s']:.1f} GB/s a rank, {link['latency_us']:.1f} us"
        yield _ok(f"link {link['name']}", f"joins {link['span']} ranks: {speed}")
        for kind in ("all_reduce", "all_gather"):
            if kind in link:
                speed = (
                    f"{link[kind]['gb_per_s']:.2f} GB/s of bus bandwidth, {link[kind]['latency_us']:.1f} us"
                )
                yield _ok(kind.replace("_", "-"), f"over {link['span']} ranks: {speed}")
    for name, lines in found["speeds"].items():
        yield _ok(f"speed of {name}", "; ".join(lines))
    for line in found["memory"]:
        yield _ok("memory", line)


def _ok(name: str, found: str, *, is_required: bool = True) -> Check:
    return Check(name=name, status=Status.OK, found=found, is_required=is_required)


# ---- what this host has --------------------------------------------------------------------------------------


def check_driver() -> Check:
    """Compare the driver with the CUDA runtime that torch was built with."""
    import torch

    built = torch.version.cuda or "none"
    printed = _output_of(["nvidia-smi"])
    driver = re.search(r"Driver Version:\s*([\d.]+)", printed)
    newest = re.search(r"CUDA Version:\s*([\d.]+)", printed)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none"
    found = f"driver {driver[1] if driver else 'unknown'}, torch's CUDA {built}, NCCL {nccl}"
    status, advice = (Status.OK, "") if driver else (Status.WARNING, "nvidia-smi was not found")
    if newest and torch.version.cuda and _major(newest[1]) < _major(built):
        status = Status.FAILED
        advice = (
            f"the driver serves CUDA {newest[1]} at most: install a newer driver, or a torch built for it"
        )
    return Check(name="driver", status=status, found=found, advice=advice)


def check_nvcc() -> Check:
    """Look for nvcc, which compiles DeepSpeed's fused optimizers and other native operators at their first use."""
    import torch

    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or ""
    folder = os.path.join(home, "bin") if home else os.defpath
    path = shutil.which("nvcc") or shutil.which("nvcc", path=folder)
    printed = _output_of([path, "--version"]) if path else ""
    release = re.search(r"release ([\d.]+)", printed)
    if path is None or release is None:
        advice = (
            "DeepSpeed's fused optimizers cannot be compiled here; install the CUDA toolkit, or use torch's"
        )
        return Check(name="nvcc", status=Status.MISSING, found="-", advice=advice, is_required=False)
    built, found = torch.version.cuda or "", f"{release[1]}, {path}"
    if not built or _major(release[1]) == _major(built):
        return _ok("nvcc", found, is_required=False)
    advice = f"nvcc is of CUDA {release[1]} and torch of {built}: native operators will not compile"
    return Check(name="nvcc", status=Status.WARNING, found=found, advice=advice, is_required=False)


def check_ninja() -> Check:
    """Look for ninja, which torch builds native operators with."""
    path = shutil.which("ninja")
    if path is None:
        advice = "pip install ninja if you use native operators"
        return Check(name="ninja", status=Status.MISSING, found="-", advice=advice, is_required=False)
    return _ok("ninja", path, is_required=False)


def check_optimizer() -> Check:
    """Say whose Adam a JSON ``AdamW`` will be on this machine, and why."""
    import torch

    from gpp_plugin.integrations.deepspeed.optimizer_bytes import why_no_fused_adam

    name = "JSON AdamW"
    if not torch.cuda.is_available():
        return _ok(name, "torch's: nothing is compiled for the CPU", is_required=False)
    why = why_no_fused_adam()
    if not why:
        return _ok(name, "DeepSpeed's FusedAdam, compiled in the first job or installed", is_required=False)
    advice = (
        "torch's is as exact; for DeepSpeed's install the CUDA toolkit of torch's version, its nvcc and ninja"
    )
    found = f"torch's fused one: DeepSpeed's cannot be compiled ({why})"
    return Check(name=name, status=Status.WARNING, found=found, advice=advice, is_required=False)


HOST_CHECKS: tuple[Callable[[], Check], ...] = (check_driver, check_nvcc, check_ninja, check_optimizer)


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
