"""`make mutants`: plant one fault at a time and run the tests that reach it, to the first that fails.

python -m tests.mutants                      all faults of faults.json, against the tests of `make test`
python -m tests.mutants --layer costs --json

First those tests run once with probes, which say what each of them reaches; a folder given by `--reach` keeps that. A
fault counts as seen where a test fails, or does not end; which test that was is kept beside it and comes first the next
time. The command fails below 90 % of what can be seen.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.faults import LIST, ROOT, DoesNotApply, Fault, place_of, read_faults
from tests.mutants.import_hook import PACKAGE, block_places
from tests.mutants.reach_plugin import CALL, SETUP
from tests.processor_time import Family

LEAST_SEEN = 0.9
MOST_STRUCK = 0.05
MOST_S = 420.0
"""The wall time of one fault's tests; what is not seen by then is told with the number of tests that ran."""
HANG_S = 60
"""A test that takes longer with a fault planted does not end."""
COLLECTION_S = 60.0
"""Processor seconds after which tests that are still being collected do not end: some call what they test there."""
NO_COLLECTION = "does not end while tests are collected"
SITE = Path(__file__).with_name("site")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one fault: ``seen``, ``not seen``, ``not reached``, ``equivalent`` or ``does not apply``."""

    fault: Fault
    verdict: str
    by: str = ""
    tests: int = 0
    seconds: float = 0.0

    def row(self) -> dict[str, object]:
        """Return it as plain values."""
        return {**dataclasses.asdict(self.fault), **dataclasses.asdict(self), "fault": str(self.fault)}


class Reach:
    """Which tests reach which block of the package; tests that fail without a fault are left out."""

    def __init__(self, folder: Path) -> None:
        self._seconds: dict[str, float] = {}
        self._shared: dict[str, float] = defaultdict(float)
        failing = set()
        for path in folder.glob("times-*.jsonl"):
            for test, setup_s, call_s, passed in map(json.loads, path.read_text().splitlines()):
                self._seconds[test] = call_s
                file = test.split("::")[0]
                self._shared[file] = max(self._shared[file], setup_s)
                failing |= set() if passed else {test}
        self._seconds = {test: s for test, s in self._seconds.items() if test not in failing}
        self.failing = sorted(failing)
        self._places = block_places()
        self._tests: dict[int, set[str]] = defaultdict(set)
        for path in folder.glob("[0-9]*.jsonl"):
            for label, blocks in map(json.loads, path.read_text().splitlines()):
                tests = self._tests_of(label.replace(" (teardown)", CALL))
                for block in blocks:
                    self._tests[block] |= tests

    def _tests_of(self, label: str) -> set[str]:
        """Return the tests that a phase counts for: what a fixture reached is reached by all tests of its file."""
        if label.endswith(SETUP):
            file = label.split("::")[0]
            return {test for test in self._seconds if test.split("::")[0] == file}
        return {label.removesuffix(CALL)} & self._seconds.keys()

    def tests(self, file: str, line: int, first: str = "") -> list[str]:
        """Return the tests that reach a line.

        In this order: the one named ``first``, those of the folder that mirrors the file's, the others; the cheap ones
        before the dear ones, with what their file's fixtures take.
        """
        around = [
            (last - begin, number)
            for number, (name, begin, last) in enumerate(self._places)
            if name == file and begin <= line <= last
        ]
        if not around:
            return []
        mirror = f"tests/{file.split('/')[0]}/"

        def place(test: str) -> tuple[bool, bool, float, str]:
            seconds = self._seconds[test] + self._shared[test.split("::")[0]]
            return test != first, not test.startswith(mirror), seconds, test

        return sorted(self._tests.get(min(around)[1], set()), key=place)


def measure_reach(folder: Path, arguments: Sequence[str]) -> None:
    """Run the tests once with probes."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"GPP_REACH": str(folder)}
    command = [
        "-q",
        "-n",
        str(os.cpu_count()),
        "--dist",
        "loadscope",
        "--no-loadscope-reorder",
        "--timeout",
        "900",
    ]
    done = subprocess.run(_pytest(*command, *arguments), cwd=ROOT, env=_environment(variables), check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the tests did not run with probes (exit {done.returncode})")


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "tests.mutants.reach_plugin", *arguments]


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "GPP_MUTANTS_ROOT": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        **variables,
    }


def try_fault(fault: Fault, reach: Reach, first: str = "") -> Result:
    """Plant a fault and run the tests that reach it, to the first that fails."""
    if fault.equivalent:
        return Result(fault=fault, verdict="equivalent")
    try:
        path, line = place_of(fault)
    except DoesNotApply:
        return Result(fault=fault, verdict="does not apply")
    tests = reach.tests(path.relative_to(ROOT / PACKAGE).as_posix(), line, first)
    if not tests:
        return Result(fault=fault, verdict="not reached")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpp-mutant-") as folder:
        order, ids, collected = (Path(folder, name) for name in ("order", "ids", "collected"))
        order.write_text("\n".join(tests))
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        ids.write_text("\n".join(tests if len(tests) < 400 else files))
        command = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-n0"]
        command += ["--timeout", str(HANG_S), "--timeout-method", "thread", "--durations=0", f"@{ids}"]
        variables = {
            "GPP_FAULT": json.dumps(dataclasses.asdict(fault)),
            "GPP_ORDER": str(order),
            "GPP_COLLECTED": str(collected),
        }
        status, text = _run(_pytest(*command), _environment(variables), collected)
    seconds = time.monotonic() - started
    by = next((line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    by = by.split(" - ")[0].partition(" ")[2]
    if status == 0:
        return Result(fault=fault, verdict="not seen", tests=len(tests), seconds=seconds)
    if status in (3, 4, 5):  # pytest itself did not run them
        raise RuntimeError(f"{fault}: the tests did not run (exit {status}): {text[-2000:]}")
    if status is None and text:
        return Result(fault=fault, verdict="seen", by=text, tests=len(tests), seconds=seconds)
    if status is None:
        return Result(fault=fault, verdict="not seen", by="time was up", tests=len(tests), seconds=seconds)
    return Result(fault=fault, verdict="seen", by=by or "does not end", tests=len(tests), seconds=seconds)


def _run(command: Sequence[str], environment: Mapping[str, str], collected: Path) -> tuple[int | None, str]:
    """Return exit status and output; None where time was up. Ranks that are left over are ended with it.

    Where the tests were not even collected the output says so.

    Args:
        collected: a file that the tests make when they are.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    end = time.monotonic() + MOST_S
    try:
        while True:
            try:
                text, _ = process.communicate(timeout=max(min(end - time.monotonic(), 1.0), 0.01))
                return process.returncode, text
            except subprocess.TimeoutExpired:
                if not collected.exists() and Family(process.pid).used_s() > COLLECTION_S:
                    return None, NO_COLLECTION
                if time.monotonic() >= end:
                    return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def launch_orders() -> tuple[int, int]:
    """Return how many changed launch orders of `tests.nccl` hang, and how many of those its checker finds."""
    from tests.nccl.test_checker import judged_mutants

    judged = [(hangs, is_found) for _, hangs, is_found, _ in judged_mutants() if hangs]
    return len(judged), sum(is_found for _, is_found in judged)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print the table; return 0 where enough faults are seen."""
    parser = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layer", action="append", help="only this layer's faults; may be repeated")
    parser.add_argument("--only", help="only faults whose line holds this text")
    parser.add_argument(
        "--reach", type=Path, help="folder that keeps what the tests reach; read where it is there"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults tried at a time")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("tests", nargs="*", help="the tests to measure, if not those of `make test`")
    args = parser.parse_args(arguments)
    faults = [f for f in read_faults() if not args.layer or f.layer in args.layer]
    faults = [f for f in faults if not args.only or args.only in str(f)]
    if not faults:
        parser.error(f"no fault of layers {args.layer} with {args.only!r} in {LIST.name}")
    with tempfile.TemporaryDirectory(prefix="gpp-reach-") as temporary:
        folder = args.reach or Path(temporary) / "reach"
        if not folder.is_dir():
            measure_reach(folder, args.tests)
        reach = Reach(folder)
    for test in reach.failing:
        print(f"fails without a fault, left out: {test}")
    seen_by = _read_seen_by()
    results = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        waiting = [pool.submit(try_fault, fault, reach, seen_by.get(str(fault), "")) for fault in faults]
        for number, each in enumerate(concurrent.futures.as_completed(waiting), 1):
            result = each.result()
            results.append(result)
            print(f"[{number}/{len(faults)}] {result.verdict}: {result.fault} {result.by}", flush=True)
    seen_by |= {str(r.fault): r.by for r in results if r.verdict == "seen"}
    SEEN_BY.parent.mkdir(exist_ok=True)
    SEEN_BY.write_text(json.dumps(seen_by, indent=1))
    return _report(results, as_json=args.json, with_orders=not (args.layer or args.only))


SEEN_BY = ROOT / "build" / "mutants_seen_by.json"


def _read_seen_by() -> dict[str, str]:
    return json.loads(SEEN_BY.read_text()) if SEEN_BY.exists() else {}


def _report(results: Sequence[Result], *, as_json: bool, with_orders: bool) -> int:
    verdicts = ("seen", "not seen", "not reached", "equivalent", "does not apply")
    print(f"\n{'layer':<20}" + "".join(f"{verdict:>16}" for verdict in verdicts))
    layers = list(dict.fromkeys(each.fault.layer for each in results))
    for layer in [*sorted(layers), "all"]:
        own = [each.verdict for each in results if layer in ("all", each.fault.layer)]
        print(f"{layer:<20}" + "".join(f"{own.count(verdict):>16}" for verdict in verdicts))
    for each in results:
        if each.verdict == "equivalent":
            print(f"equivalent: {each.fault}: {each.fault.equivalent}")
        elif each.verdict != "seen":
            print(f"{each.verdict}: {each.fault} ({each.tests} tests, {each.seconds:.0f} s) {each.by}")
    hang, found = launch_orders() if with_orders else (0, 0)
    if with_orders:
        print(f"changed launch orders that hang: {hang}, found {found}")
    counts = {verdict: sum(each.verdict == verdict for each in results) for verdict in verdicts}
    share = counts["seen"] / max(len(results) - counts["equivalent"], 1)
    struck = counts["equivalent"] / len(results)
    print(f"{share:.1%} seen (at least {LEAST_SEEN:.0%}), {struck:.1%} struck (at most {MOST_STRUCK:.0%})")
    if as_json:
        rows = [each.row() for each in results]
        print(json.dumps({"command": "mutants", "rows": rows, "seen": share, "launch_orders": [hang, found]}))
    return 0 if share >= LEAST_SEEN and struck <= MOST_STRUCK and hang == found else 1


if __name__ == "__main__":
    sys.exit(main())
