"""`make test-gpu`: says what it found, runs the suite test by test, and writes build/gpu_report.md and .json."""

from __future__ import annotations

import argparse
import os
import sys

import pytest

from tests.gpu.lab import DEVICE_VARIABLE, describe_machine, find_lab
from tests.gpu.watched_job import ROOT

FILES = ("tests/gpu/test_one_gpu.py", "tests/gpu/test_many_gpus.py")


def main() -> int:
    """Run the suite; pytest's exit code, or 2 where there is no device."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").strip())
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: a dry run, functional only (%(default)s)",
    )
    args, others = parser.parse_known_args()  # the others are pytest's
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
    return int(pytest.main(["-p", "no:cacheprovider", "--timeout=0", "-s", "-v", *FILES, *others]))


if __name__ == "__main__":
    sys.exit(main())
