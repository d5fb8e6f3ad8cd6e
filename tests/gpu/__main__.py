"""`make test-gpu`: says what it found, runs the suite test by test, and writes build/gpu_report.md and .json.

The reports are written behind every test, so that a run that is cut off leaves them, and further runs of the same
revision on the same devices add to them.
"""

from __future__ import annotations

import argparse
import os
import sys

import pytest

from tests.gpu.lab import DEVICE_VARIABLE, SECONDS_VARIABLE, describe_machine, find_lab
from tests.gpu.watched_job import ROOT

FILES = ("tests/gpu/test_one_gpu.py", "tests/gpu/test_many_gpus.py")
QUICK_FILES, QUICK_S = ("tests/gpu/test_quick.py",), 530
"""The first tier, and the seconds after which it begins nothing more: with the start of the run nine minutes."""


def main() -> int:
    """Run the suite; pytest's exit code, or 2 where there is no device."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").strip())
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: a dry run, functional only (%(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the first tier: one device, within nine minutes"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"what is not done by then is not begun, or ended (--quick: {QUICK_S})"
    )
    args, others = parser.parse_known_args()  # the others are pytest's
    seconds = QUICK_S if args.quick and args.seconds is None else args.seconds
    if seconds is not None:
        os.environ[SECONDS_VARIABLE] = str(seconds)
    os.environ[DEVICE_VARIABLE] = args.device
    os.chdir(ROOT)
    machine = describe_machine()
    print("\n".join(f"{name:14}{text}" for name, text in machine.items()), flush=True)
    if find_lab() is None:
        print(
            "make test-gpu: there is no CUDA device; --device cpu runs the same jobs on CPU ranks",
            file=sys.stderr,
        )
        return 2
    # One test after the other: what they measure must not share a device. Each job has a limit of its own.
    files = QUICK_FILES if args.quick else FILES
    # Nor are they held to what a test of `make test` may take.
    options = ["-p", "no:cacheprovider", "--timeout=0", "--processor-limit=0", "-s", "-v"]
    return int(pytest.main([*options, *files, *others]))


if __name__ == "__main__":
    sys.exit(main())
