"""What `make test` leaves out, what it counts, and how long it waits."""

import json
import os
import subprocess
import sys

import pytest

from tests import tiers
from tests.processor_time import Meter
from tests.waits import Patience, run_program

NAMES = [
    "tests/a.py::test_one",
    *(f"tests/a.py::test_two[{case}]" for case in ("clip", "t5-fp16", "t5-fp32", "gpt2")),
    "tests/a.py::test_twofold",
    "tests/plan/b.py::Class::test_three",
]
SPIN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ({"tests/a.py": []}, NAMES[:6]),
        ({"tests/a.py": ["test_two[*", "test_one"]}, NAMES[5:6]),
        ({"tests/a.py::test_two": []}, NAMES[1:5]),
        ({"tests/a.py::test_two": 3}, NAMES[2:4]),
        ({"tests/a.py::test_two": ["clip", "*-fp16"]}, NAMES[3:5]),
        ({"tests/a.py": [], "tests/a.py::test_two": ["gpt2"]}, [NAMES[0], *NAMES[1:4], NAMES[5]]),
    ],
    ids=str,
)
def test_what_an_entry_leaves_out(kept, expected):
    found, lines = tiers.left_out(kept | {"tests/plan": [], "tests/elsewhere.py::test_x": []}, NAMES)
    assert sorted(found) == sorted([*expected, NAMES[-1]]) and lines == []


def test_entries_that_name_nothing_are_told():
    kept = {"tests/a.py::test_two": ["clip", "bert"], "tests/a.py::test_thre": 2}
    assert tiers.left_out(kept, NAMES)[1] == [
        "'tests/a.py::test_two' keeps 'bert', which is none of its tests",
        "'tests/a.py::test_thre' names no test, or another entry names all of them",
    ]
    assert tiers.missing_files({"tests/test_tiers.py::x": [], "tests/a.py": []}) == [
        "'tests/a.py': there is no such file"
    ]


@pytest.mark.parametrize("value", ["true", "1", '"all"', "[1]"])
def test_an_entry_that_is_written_otherwise_is_refused(value):
    with pytest.raises(tiers.TiersError, match=r"'a\.py' = .*; give a list of what is kept"):
        tiers.read_kept(f'[kept]\n"a.py" = {value}\n')


def test_what_a_command_line_names():
    assert tiers.is_named("tests/a.py::test_two[clip]", ["./tests/a.py::test_two"])
    assert not tiers.is_named("tests/a.py::test_twofold", ["tests/a.py::test_two", "tests/a.py"])


@pytest.mark.parametrize(
    ("use", "ends_at"),
    [
        (lambda now: 0.0, 61),  # stands still from the start
        (lambda now: min(now, 30.0), 90),  # stands still after half a minute
        (lambda now: 0.005 * now, 61),  # wakes up now and then
        (lambda now: 0.05 * now, 601),  # a busy machine gives it a twentieth of a core: ten times the limit
        (lambda now: now, 601),  # spins
    ],
)
def test_a_wait_ends_when_processes_stand_still(use, ends_at):
    now = 0.0
    patience = Patience(60.0, lambda: use(now), clock=lambda: now)
    while not patience.is_over():
        now += 1.0
    assert ends_at <= now <= ends_at + 3


def test_a_program_that_sleeps_is_not_waited_for():
    with pytest.raises(subprocess.TimeoutExpired, match=r"timed out after 0\.4 seconds"):
        run_program([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.4, capture_output=True)
    said = run_program([sys.executable, "-c", "print(input())"], timeout=60, input=b"x", capture_output=True)
    assert said.stdout == b"x\n"


def test_seconds_of_living_and_ended_descendants_are_counted_once():
    meter = Meter()
    inner = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN.format(0.2)!r}])\n"
    before = meter.of_tests_s()
    process = subprocess.Popen(
        [sys.executable, "-c", f"{inner}print(1, flush=True)\ninput()"], stdin=-1, stdout=-1
    )
    process.stdout.readline()
    living = meter.of_tests_s() - before
    with meter.apart("outer"), meter.apart("inner"):
        process.communicate(b"\n")
        exec(SPIN.format(0.4))
    (inner_name, inner_s), (_, outer_s) = meter.rows
    # a busy machine makes starts of Python and looks at all processes dearer: bounds are half of what is spun
    assert 0.2 <= living < 1.5 and inner_name == "inner"
    assert inner_s >= 0.38 and outer_s < 0.2, "what is counted apart is in nothing else"
    assert meter.of_tests_s() - before == pytest.approx(living, abs=0.2)


CONFTEST = """
from collections import Counter
from tests.processor_time import ProcessorTimes
def pytest_configure(config):
    left_out = {"test_it.py::test_slow_left_out"}
    config.pluginmanager.register(
        ProcessorTimes(limit_s=0.1, file="" if hasattr(config, "workerinput") else "times.json",
                       left_out=left_out, counts=Counter({"here": 3}))
    )
"""
TESTS = f"""
import pytest, subprocess, sys
def spin(): subprocess.run([sys.executable, "-c", {SPIN.format(0.4)!r}])
spin()  # as files import what takes long
@pytest.fixture(scope="module")
def shared(): spin()
def test_quick(shared): pass
def test_slow(shared): spin()
def test_slow_left_out(): spin()
"""


@pytest.mark.parametrize("options", [["-p", "no:xdist"], ["-n", "1"]], ids=["one process", "a worker"])
def test_a_test_that_takes_too_long_fails_by_name(options, tmp_path):
    if "-n" in options:
        pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    done = run_program(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_it.py"],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(tiers.ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert (
        "test_it.py::test_slow took 0." in done.stdout
        and "of 0.1 that a test of `make test` may" in done.stdout
    )
    times = json.loads((tmp_path / "times.json").read_text())
    tests = {name.partition("::")[2]: row for name, row in times["tests"].items()}
    assert {name: row["outcome"] for name, row in tests.items()} == {
        "test_quick": "passed", "test_slow": "failed", "test_slow_left_out": "passed",
    }  # fmt: skip
    assert tests["test_quick"]["setup"] < 0.2 and tests["test_slow"]["call"] >= 0.4
    assert tests["test_slow_left_out"]["tier"] == "test-all"
    assert times["shared"]["test_it.py::shared"]["times"] == 1
    assert times["shared"]["test_it.py::shared"]["seconds"] >= 0.4
    assert times["total_s"] > 1.2 and times["tests_by_tier"] == {"here": 3}
