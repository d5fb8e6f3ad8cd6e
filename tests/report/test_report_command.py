"""`gpp report` on several files: text, a page, pictures; its errors are one line."""

import dataclasses
import json
import sys

import pytest

from gpp_plugin.cli import main
from gpp_plugin.ir.serialize import save
from gpp_plugin.simulate.predict import simulate_plan


@pytest.fixture
def files(plan, tmp_path):
    """Return a plan's file, and those of its predicted and measured timelines."""
    timeline = simulate_plan(plan)
    save(plan, tmp_path / "plan.json")
    paths = [tmp_path / "plan.json"]
    for source in ("predicted", "measured"):
        save(dataclasses.replace(timeline, source=source), tmp_path / f"{source}.json")
        paths.append(tmp_path / f"{source}.json")
    return [str(path) for path in paths]


def test_page_and_pictures_of_a_plan_and_its_timelines(files, tmp_path, capsys):
    outputs = [str(tmp_path / name) for name in ("out.html", "out.svg", "out.png")]
    pytest.importorskip("PIL", reason="Pillow is not installed")
    options = ["--html", outputs[0], "--svg", outputs[1], "--png", outputs[2]]
    assert main(["report", *files, *options, "--json"]) == 0
    printed = capsys.readouterr().out
    assert "0 vision_model" in printed and "predicted: " in printed and "measured: " in printed
    reports = json.loads(printed.splitlines()[-1])["reports"]
    assert ["depth" in report for report in reports] == [True, False, False]
    page = (tmp_path / "out.html").read_text()
    assert "predicted (predicted.json)" in page and "measured (measured.json)" in page
    # the measured timeline is the predicted one: every rank takes as long as is planned
    assert "over replicas" in printed and "slow" not in printed and page.count("over replicas") == 1
    ranks = [(each["rank"], each["over_plan"], each["over_replicas"]) for each in reports[2]["ranks"]]
    assert ranks == [(0, 1.0, 1.0), (1, 1.0, 1.0), (2, 1.0, 0.0), (3, 1.0, 0.0)] and "ranks" not in reports[1]
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_rank_that_was_slow_in_most_measured_timelines_is_marked(files, plan, tmp_path, capsys):
    timeline = simulate_plan(plan)
    for number, factor in enumerate((1.0, 1.5, 1.5)):
        events = tuple(
            dataclasses.replace(e, end_us=e.start_us + factor * (e.end_us - e.start_us)) if e.rank == 1 else e
            for e in timeline.events
        )
        save(dataclasses.replace(timeline, source="measured", events=events), tmp_path / f"{number}.json")
    page = tmp_path / "out.html"
    measured = [str(tmp_path / f"{number}.json") for number in range(3)]
    assert main(["report", files[0], *measured, "--html", str(page)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (header,) = (number for number, words in enumerate(rows) if words[:3] == ["rank", "stage", "tasks"])
    assert [(words[0], words[-1] == "slow") for words in rows[header + 1 : header + 5]] == [
        *(("0", False), ("1", True), ("2", False), ("3", False))
    ]
    assert page.read_text().count("<td>slow</td>") == 1


def test_a_plan_of_timelines_only_is_on_the_page_and_not_in_the_text(files, tmp_path, capsys):
    page = tmp_path / "out.html"
    assert main(["report", *files[1:], "--plan", files[0], "--html", str(page)]) == 0
    assert capsys.readouterr().out.startswith("predicted: ")
    assert "2 micro-batches of 4, 2 in flight" in page.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--trace", "t.json"], "--trace: writes one timeline and 2 are there; give one"),
        (["--html", "/dev/full"], "/dev/full: No space left on device"),
    ],
)
def test_errors_are_one_line(files, tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *files, *options]) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["report", *files, "--html", "plan.json/out.html"])
    error, refused = capsys.readouterr().err.splitlines(keepends=True)
    assert "--html: plan.json/out.html cannot be written (" in refused
    assert said in error and error.count("\n") == 1


def test_png_without_pillow(files, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["report", *files, "--png", str(tmp_path / "out.png")]) == 1
    assert "need Pillow; pip install 'gpp_plugin[report]', or write SVG" in capsys.readouterr().err
