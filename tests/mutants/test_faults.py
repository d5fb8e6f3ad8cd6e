"""The list of faults fits the package, and what tests reach is measured before any is planted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants.faults import place_of, read_faults


def test_every_fault_of_the_list_has_its_place() -> None:
    faults = read_faults()
    for fault in faults:
        place_of(fault)
    layers = Counter(fault.layer for fault in faults)
    assert len(faults) >= 120 and min(layers.values()) >= 8, layers


def test_a_fault_of_every_layer_is_drawn() -> None:
    drawing = pytest.importorskip("tests.mutants.draw", reason="needs mutmut", exc_type=ImportError)
    drawn = drawing.draw(seed=1, each=1)
    assert [fault.layer for fault in drawn] == list(drawing.LAYERS)
    for fault in drawn:
        place_of(fault)


def test_what_tests_reach_is_measured_first_or_taken_from_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[Path] = []

    def measure(folder: Path, tests: list[str]) -> None:
        folder.mkdir()
        measured.append(folder)

    monkeypatch.setattr(mutants, "measure_reach", measure)
    monkeypatch.setattr(mutants, "Reach", lambda folder: SimpleNamespace(failing=(), folder=folder))
    monkeypatch.setattr(
        mutants, "try_fault", lambda fault, reach, first: mutants.Result(fault=fault, verdict="seen", by="a")
    )
    monkeypatch.setattr(mutants, "SEEN_BY", tmp_path / "seen.json")
    assert mutants.main(["--layer", "costs"]) == 0
    assert len(measured) == 1, "in a folder of its own"
    kept = tmp_path / "reach"
    for _ in range(2):
        mutants.main(["--layer", "costs", "--reach", str(kept)])
    assert measured[1:] == [kept], "once"
