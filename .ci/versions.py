#!/usr/bin/env python3
"""Runs a quick list of tests with other releases of Python, torch and transformers than the pinned ones.

.ci/versions.py [--python python3.11 ...] [--torch 2.11 ...] [--transformers 5.17 ...] [--limit-s 900] [--json FILE]

Not part of `make test`: it downloads. Every pair of an interpreter and a torch has one environment below
build/versions, with what constraints.txt pins but for torch and transformers; transformers is exchanged in it from
release to release. In each, this package is imported, and the tests of `STEPS` are run, under a time limit. Of a
minor release the newest patch is taken. An environment needs about 6 GB where the torch is a CUDA build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
FREE = ("torch", "transformers", "tokenizers", "huggingface_hub")
"""What constraints.txt does not say here: the two that are varied, and what a transformers pins itself."""
LIBRARIES = (
    "deepspeed",
    "megatron-core",
    "numpy",
    "networkx",
    "pydantic",
    "rich",
    "safetensors",
    "scikit-learn",
)
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "einops", "tensorboard")
WHERE = (
    "import deepspeed, torch, transformers, gpp_plugin; print(torch.__version__, transformers.__version__)"
)
STEPS: dict[str, tuple[str, ...]] = {
    "capture": ("tests/capture/test_export.py", "-k", "of_the_model or recapture or dropout or dropped"),
    "whole capture": ("tests/capture",),
    "equality": ("tests/runtime/test_equality.py", "-k", "two and ranks"),
    "nccl": ("tests/nccl",),
    "gpu suite, dry": ("tests/gpu/test_dry_run.py",),
}
"""Column of the table: what pytest is given; left out where the checkout has no such tests."""


@dataclass
class Row:
    """One combination of releases and how every step of it ended."""

    python: str
    torch: str
    transformers: str
    results: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Return whether every step passed."""
        return all(text.startswith("ok") for text in self.results.values())


def main() -> int:
    """Run every combination; return 0 if all of them passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--torch", nargs="+", default=["2.11", "2.12", "2.13"], help="minor releases")
    parser.add_argument(
        "--transformers", nargs="+", default=[f"5.{n}" for n in range(17, 24)], help="minor releases"
    )
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--limit-s", type=float, default=900.0, help="of one step (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows there, after each of them")
    args = parser.parse_args()
    rows: list[Row] = []
    for python in args.python:
        for torch in args.torch:
            environment = FOLDER / f"{Path(python).resolve().name}-torch{torch}"
            make_environment(python, torch, environment)
            for transformers in args.transformers:
                rows.append(try_out(environment, transformers, args.steps, args.limit_s))
                print(table(rows[-1:]), flush=True)
                if args.json is not None:
                    args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print("\n" + table(rows))
    return 0 if all(row.is_good for row in rows) else 1


def make_environment(python: str, torch: str, environment: Path) -> None:
    """Make the environment of an interpreter and a torch, unless it is there."""
    if (environment / "made").exists():
        return
    environment.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([python, "-m", "venv", "--clear", str(environment)], check=True)
    install(environment, f"torch=={torch}.*")
    install(environment, "setuptools", "wheel")
    install(environment, "--no-build-isolation", *LIBRARIES, *TOOLS)
    (environment / "made").touch()


def install(environment: Path, *what: str) -> None:
    """Install with the pins of constraints.txt but for `FREE`.

    Raises:
        CalledProcessError: pip could not.
    """
    kept = FOLDER / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept.write_text("\n".join(line for line in lines if line.partition("==")[0] not in FREE) + "\n")
    command = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(kept), *what]
    subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})


def try_out(environment: Path, transformers: str, steps: Sequence[str], limit_s: float) -> Row:
    """Run the steps with one release of transformers."""
    start = time.monotonic()
    python = str(environment / "bin" / "python")
    name = environment.name.removeprefix("python").split("-torch")
    row = Row(python=name[0], torch=name[1], transformers=transformers)
    try:
        install(environment, f"transformers=={transformers}.*")
    except subprocess.CalledProcessError:
        row.results["import"] = "does not install"
        return row
    code, said = run([python, "-c", WHERE], limit_s)
    row.results["import"] = "ok" if code == 0 else said.strip().splitlines()[-1][:60]
    if code == 0:
        row.torch, row.transformers = said.split()[-2:]
        for step in steps:
            if (ROOT / STEPS[step][0]).exists():
                row.results[step] = run_tests(python, STEPS[step], limit_s, environment / f"{step}.log")
    row.seconds = round(time.monotonic() - start, 1)
    return row


def run_tests(python: str, arguments: Sequence[str], limit_s: float, log: Path) -> str:
    """Return how many tests passed, or what failed; the output is kept in ``log``."""
    options = ["-q", "-p", "no:cacheprovider", "--durations=0", "-n", "0"]
    code, said = run([python, "-m", "pytest", *options, *arguments], limit_s)
    log.write_text(said)
    if code is None:
        return f"no end in {limit_s:g} s"
    counts = re.findall(r"(\d+) (passed|failed|errors?|skipped)", (said.strip().splitlines() or [""])[-1])
    text = ", ".join(f"{number} {kind}" for number, kind in counts) or f"exit code {code}"
    return f"ok: {text}" if code == 0 else text


def run(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Return exit code and output of a command in this checkout; None if it had to be ended, children and all."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return_code: int | None = None
        said, _ = process.communicate(timeout=limit_s)
        return_code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    return return_code, said


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    columns = list(dict.fromkeys(step for row in rows for step in row.results))
    lines = [["Python", "torch", "transformers", *columns, "s"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        results = [row.results.get(column, "-") for column in columns]
        lines.append([row.python, row.torch, row.transformers, *results, f"{row.seconds:.0f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
