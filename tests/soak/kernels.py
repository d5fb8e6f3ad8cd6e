"""Captured graphs and partitions against eager modules, whatever kernels torch takes: each choice in a process of its own.

python -m tests.soak kernels                        eight choices: AVX-512 or AVX2, with and without MKL-DNN, 1 and 2 threads
python -m tests.soak kernels --only avx2 off 2      one of them
python -m tests.soak kernels tests/stage_graph      other tests than these

`default` is what the processor has. As a pytest plugin this module takes the choice of its environment.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys

from tests.ranks import use_kernels

TESTS = (
    "tests/capture/test_export.py",
    "tests/capture/test_eager.py",
    "tests/runtime/test_equality.py",
    "tests/stage_graph/test_equality.py",
)
CHOICES = (("default", "avx2"), ("on", "off"), ("1", "2"))
"""Of ATEN_CPU_CAPABILITY, MKL-DNN, and threads of the tests' process and of ranks."""


def pytest_configure() -> None:
    """Compute as the environment says, where pytest loads this module as a plugin."""
    use_kernels()


def main(arguments: list[str]) -> int:
    """Run the tests under each choice; return 1 where one of them fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak kernels", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("tests", nargs="*", default=TESTS)
    known = [each for column in CHOICES for each in column]
    parser.add_argument("--only", nargs="+", default=(), choices=known, help="choices that have all of these")
    args = parser.parse_args(arguments)
    failed = []
    for choice in itertools.product(*CHOICES):
        if not set(args.only) <= set(choice):
            continue
        capability, mkldnn, threads = choice
        own = {"GPP_TEST_MKLDNN": mkldnn, "GPP_TEST_THREADS": threads, "OMP_NUM_THREADS": threads}
        own |= {} if capability == "default" else {"ATEN_CPU_CAPABILITY": capability}
        name = f"{capability}, MKL-DNN {mkldnn}, {threads} threads"
        print(f"--- {name}", flush=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n0",
            "--processor-limit",
            "0",
            "-p",
            "tests.soak.kernels",
        ]
        if subprocess.run([*command, *args.tests], env=os.environ | own).returncode:
            failed.append(name)
    print(f"failed: {'; '.join(failed) or 'none'}")
    return int(bool(failed))
