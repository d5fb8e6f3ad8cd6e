"""The tests that `make test` thins or leaves out (`tests.tiers`), whole: hours on two cores.

make soak ARGS=tables
make soak ARGS="tables tests/nccl -k random"
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TIERS = "from tests.tiers import"


def files_with_tiers() -> list[str]:
    """Return the test files of which `make test` runs a part."""
    return sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/**/test_*.py") if TIERS in p.read_text())


def main(arguments: Sequence[str]) -> int:
    """Run those files, or what ``arguments`` tell pytest, one worker a core."""
    paths = (
        [] if any(Path(argument.split("::")[0]).exists() for argument in arguments) else files_with_tiers()
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadscope", *arguments, *paths]
    environment = {**os.environ, "GPP_LONG_TESTS": "1"}
    return subprocess.run([*command, "--timeout", "3600"], cwd=ROOT, env=environment, check=False).returncode
