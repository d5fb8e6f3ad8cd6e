"""`gpp doctor`: what is installed, which backends and devices really work, and what to do about the rest.

Backends are really tried: two processes send and receive over gloo, and over NCCL where there are two devices.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpp_plugin.doctor.patch_check import PATCH_DIR, installed_version, report_patches
from gpp_plugin.doctor.preflight import (
    Check,
    Status,
    add_preflight_arguments,
    check_optimizer,
    print_advice,
    print_checks,
    run_preflight,
)
from gpp_plugin.errors import GppError, RuntimeFailure
from gpp_plugin.integrations.deepspeed.deepspeed_keys import KEYS, KeyVerdict
from gpp_plugin.launch import emit_event, end_rank, run_ranks
from gpp_plugin.report.units import format_bytes, format_table

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A distribution and the versions this release works with.

    Args:
        least: the first version that works; ``tested`` the last one tried.
        purpose: what it is for, where training does without it.
    """

    name: str
    least: Version
    tested: Version
    purpose: str = ""


# The ends of what `.ci/versions.py` was run with are those of torch and transformers (docs/gpus.md has the table);
# setup.py requires the same least ones.
PACKAGES = (
    Package(name="torch", least=(2, 11), tested=(2, 13)),
    Package(name="deepspeed", least=(0, 19), tested=(0, 19)),
    Package(name="networkx", least=(3, 2), tested=(3, 6)),
    Package(name="numpy", least=(1, 26), tested=(2, 4)),
    Package(name="pydantic", least=(2, 7), tested=(2, 14)),
    Package(name="rich", least=(13,), tested=(15,)),
    Package(name="safetensors", least=(0, 4, 5), tested=(0, 8)),
    Package(name="transformers", least=(5, 17), tested=(5, 23), purpose="HuggingFace models"),
    Package(name="scikit-learn", least=(1, 5), tested=(1, 9), purpose="gpp demo"),
    Package(name="tensorboard", least=(2, 18), tested=(2, 21), purpose="the tensorboard monitor"),
    Package(name="megatron-core", least=(0, 16), tested=(0, 16), purpose="stages of Megatron modules"),
)
_MODULE = "gpp_plugin.doctor.checks"
"""This module, by name also where it runs as a script."""
EXCHANGE_TIMEOUT_S = 90.0
IMPORT_TIMEOUT_S = 120.0
NUM_VALUES = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp doctor`."""
    parser.add_argument(
        "--patches",
        nargs="?",
        type=Path,
        const=PATCH_DIR,
        metavar="DIRECTORY",
        help="only say which patches the installed DeepSpeed and megatron-core need, and how to apply them",
    )
    parser.add_argument(
        "--keys",
        action="store_true",
        help="only list every key of DeepSpeed's configuration: honoured, refused or without effect",
    )
    add_preflight_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print every check and its advice; ``ok`` of the result is false if training cannot work.

    Raises:
        ConfigError: the directory of --patches has none, or as `run_preflight`.
    """
    if args.patches is not None:
        return report_patches(args.patches)
    if args.keys:
        return report_keys()
    if args.gpus is not None:
        return run_preflight(args)
    checks = list(run_checks())
    print_checks(checks)
    print_advice(checks)
    broken = [check.name for check in checks if check.is_failure]
    print("\n" + (f"training cannot work: {', '.join(broken)}" if broken else "everything required works"))
    return {
        "rows": [{**asdict(check), "status": check.status.value} for check in checks],
        "ok": not broken,
        "broken": broken,
    }


def report_keys() -> dict[str, Any]:
    """Print what becomes of every key of DeepSpeed's configuration under a ``graph_pipeline`` block."""
    header = ["key", "verdict", "note"]
    rows = [[key.path, key.verdict.value, key.note] for key in KEYS.values()]
    print(format_table(header, rows, left=3))
    counts = {verdict.value: sum(row[1] == verdict.value for row in rows) for verdict in KeyVerdict}
    print("\n" + ", ".join(f"{count} {name}" for name, count in counts.items()) + f"; {len(rows)} keys")
    return {"rows": [dict(zip(header, row, strict=True)) for row in rows], "counts": counts}


def run_checks() -> Iterator[Check]:
    """Yield the checks, the cheap ones first; a backend is tried only where torch imports."""
    yield check_python(sys.version_info[:3])
    for package in PACKAGES:
        yield check_package(package, installed_version(package.name))
    hook = check_hook()
    yield hook
    yield check_compiler(shutil.which)
    yield check_machine()
    if hook.status is Status.OK:
        yield check_optimizer()
        yield from check_backends()
        yield check_exchange("gloo")
        yield from check_cuda()


def check_python(version: Version) -> Check:
    """Check the interpreter."""
    found = ".".join(map(str, version))
    if version < (3, 11):
        advice = "install Python 3.11 or newer and make the environment anew: make PYTHON=python3.11 install"
        return Check(name="python", status=Status.FAILED, found=found, advice=advice)
    return Check(name="python", status=Status.OK, found=found)


def parse_version(text: str) -> Version:
    """Return the release numbers of a version.

    >>> parse_version("2.13.0+cpu"), parse_version("5.0rc1"), parse_version("0.16.1.post2")
    ((2, 13, 0), (5, 0), (0, 16, 1))
    """
    # Pre-releases count as the release: 5.0rc1 has what 5.0 requires.
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def check_package(package: Package, version: str | None) -> Check:
    """Check one distribution against the versions this release works with."""
    least, tested = (".".join(map(str, each)) for each in (package.least, package.tested))
    status, advice = Status.OK, ""
    if version is None:
        purpose = f" for {package.purpose}" if package.purpose else ""
        status, advice = Status.MISSING, f"pip install '{package.name}>={least}'{purpose}"
    elif parse_version(version) < package.least:
        advice = f"{version} is older than {least}: pip install --upgrade '{package.name}>={least}'"
        status = Status.FAILED
    # Compared by the numbers of ``tested``: with tested (2, 13), 2.13.1 is fine and 2.14.0 is newer. Newer is a
    # warning: most newer releases work, and a user should look here first where one does not.
    elif parse_version(version)[: len(package.tested)] > package.tested:
        advice = f"{version} is newer than {tested}, the last one tried; if something fails, try {tested}"
        status = Status.WARNING
    required = not package.purpose
    return Check(name=package.name, status=status, found=version or "-", advice=advice, is_required=required)


def check_backends() -> Iterator[Check]:
    """Check what stages that train nothing may run on beside torch's operators; nothing is built."""
    from gpp_plugin.plugins import BACKENDS, find_backend

    for name in BACKENDS.names():
        if name == "torch":
            continue
        status, found, advice = Status.OK, "-", ""
        try:
            backend = find_backend(name)
            if reason := backend.missing():
                status, advice = Status.MISSING, f"{reason} (to run frozen stages on it)"
            else:
                found = backend.version()
        except GppError as error:
            status, advice = Status.FAILED, str(error)
        yield Check(name=f"backend {name}", status=status, found=found, advice=advice, is_required=False)


def check_hook() -> Check:
    """Check in a fresh process that `import gpp_plugin` makes `deepspeed.initialize` honour the block."""
    name = "deepspeed hook"
    # A process of its own: here deepspeed may be imported already, or be wrapped. DeepSpeed first, then this
    # package: the harder of the two orders, in which the wrapper comes too late to catch the import itself.
    code = (
        "import deepspeed; stock = deepspeed.initialize; import gpp_plugin; "
        "assert deepspeed.initialize is not stock, 'deepspeed.initialize is not wrapped'"
    )
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        found = f"importing deepspeed took more than {IMPORT_TIMEOUT_S:g} s"
        advice = "run python -X importtime -c 'import deepspeed' to see what hangs"
        return Check(name=name, status=Status.FAILED, found=found, advice=advice)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        advice = "import torch, deepspeed and gpp_plugin one by one in python; reinstall the one that fails"
        return Check(name=name, status=Status.FAILED, found=lines[-1], advice=advice)
    return Check(name=name, status=Status.OK, found="deepspeed.initialize reads graph_pipeline")


def check_compiler(find: Callable[[str], str | None]) -> Check:
    """Check for a C++ compiler, which DeepSpeed's native optimizers and torch.compile need."""
    for compiler in ("c++", "g++", "clang++"):
        if find(compiler):
            return Check(name="compiler", status=Status.OK, found=compiler, is_required=False)
    advice = "install g++ if you use DeepSpeed's native optimizers (torch's need none)"
    return Check(name="compiler", status=Status.MISSING, found="-", advice=advice, is_required=False)


def check_machine() -> Check:
    """Report cores and memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{platform.system()} {platform.machine()}, {cores} cores, {format_bytes(memory)} memory"
    return Check(name="machine", status=Status.OK, found=found)


def check_exchange(backend: str) -> Check:
    """Exchange tensors between two processes over ``backend`` and check what arrived."""
    name, is_gloo, status, advice = f"{backend} send/receive", backend == "gloo", Status.OK, ""
    try:
        # Really tried: torch reports gloo as available on machines where a firewall stops its sockets.
        events = [*run_ranks(_MODULE, [backend], num_ranks=2, timeout_s=EXCHANGE_TIMEOUT_S)]
        found = f"2 processes, round trip of 256 KiB in {events[-1]['us']:.0f} us"
    except RuntimeFailure as error:
        status, found = Status.FAILED, str(error).splitlines()[-1]
        advice = "set NCCL_DEBUG=INFO and run gpp doctor again; check driver and NCCL versions"
        if is_gloo:
            advice = (
                "look for a firewall or host name trouble between processes of this machine (GLOO_SOCKET_IFNAME=lo "
                "names the interface)"
            )
    return Check(name=name, status=status, found=found, advice=advice, is_required=is_gloo)


def check_cuda() -> Iterator[Check]:
    """Report CUDA devices, and try NCCL between two of them."""
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        found = f"no device (torch is {built})"
        advice = "training runs on the CPU over gloo; install a CUDA build of torch to use a GPU"
        yield Check(name="cuda", status=Status.MISSING, found=found, advice=advice, is_required=False)
        return
    # NCCL refuses two ranks on one device ("Duplicate GPU detected"), so one device cannot try it.
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    found = f"{count} x {properties.name}, {format_bytes(properties.total_memory)}, CUDA {torch.version.cuda}"
    yield Check(name="cuda", status=Status.OK, found=found, is_required=False)
    if count > 1:
        yield check_exchange("nccl")
        return
    found = f"{'.'.join(map(str, torch.cuda.nccl.version()))}, not tried"
    advice = "one device cannot host two NCCL ranks; several ranks share it and exchange messages over gloo"
    yield Check(name="nccl", status=Status.WARNING, found=found, advice=advice, is_required=False)


def _exchange(backend: str) -> None:
    """Be one of two ranks: send a tensor, get it back negated; rank 0 reports the time."""
    import time

    import torch
    import torch.distributed as dist

    # rank 0   send --->  recv, compare        a round trip of 2 x 256 KiB, three times; rank 1   recv,
    # negate, send --->         the last one is timed, when the connection is there
    #
    # Negated, so that a transport that returns the sender's own buffer is found out.
    dist.init_process_group(backend)
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    sent = torch.arange(NUM_VALUES, dtype=torch.float32, device=device)
    received = torch.empty_like(sent)
    seconds = 0.0
    for _ in range(3):  # the first exchange also connects
        start = time.perf_counter()
        if rank == 0:
            dist.send(sent, dst=1)
            dist.recv(received, src=1)
            if not torch.equal(received, -sent):
                raise GppError(f"{backend}: what came back is not what was sent")
        else:
            dist.recv(received, src=0)
            dist.send(-received, dst=0)
        seconds = time.perf_counter() - start
    if rank == 0:
        emit_event(us=seconds * 1e6)
    dist.barrier()
    end_rank()


if __name__ == "__main__":
    _exchange(sys.argv[1])
