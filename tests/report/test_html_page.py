"""The HTML page and the pictures: what they hold, that names stay text, their size, and that a browser runs the page."""

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from gpp_plugin.commands.report_command import ReportedPlan, report_page
from gpp_plugin.errors import GppError
from gpp_plugin.ir.plan import MemoryBreakdown
from gpp_plugin.report.figure import (
    CHAR_WIDTH,
    Figure,
    Polyline,
    Rectangle,
    draw_stage_graph,
    figure_png,
    figure_svg,
    stack_figures,
)
from gpp_plugin.report.timeline_chart import WIDTH, chart_timeline, draw_memory, draw_timeline
from gpp_plugin.simulate.predict import simulate_plan
from tests.schedule.plans import chain_plan, simple_plan
from tests.waits import run_program

BAD_NAME = "<script>alert(1)</script><!--</title>&\"'\x07"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """Reads a page: tags must close in order; scripts and visible text are kept."""

    def __init__(self, page):
        super().__init__()
        self.open, self.scripts, self.text, self.tags, self.urls = [], [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.urls += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)

    @property
    def data(self):
        return json.loads(self.scripts[0])


def with_memory(plan, limit=4000):
    part = {"stashed_weights": 0, "gradients": 100, "optimizer": 200, "working": 0, "transient": 40}
    return dataclasses.replace(
        plan,
        memory=tuple(
            MemoryBreakdown(stage=s.name, weights=100, activations=400, inputs=0, limit=limit, **part)
            for s in plan.stages
        ),
    )


def reported(plan, *sources):
    timeline = simulate_plan(plan)
    named = [dataclasses.replace(timeline, source=source) for source in sources or ("predicted",)]
    return ReportedPlan(name="plan.json", plan=plan, timelines=tuple((t.source, t) for t in named))


def test_the_page_holds_stages_timelines_memory_and_decisions(plan):
    plan = with_memory(plan)
    notes = (
        "the loss mixes",
        "rejected: stages of planner piper: 12.0 ms",
        "not searched, for want of time: x",
    )
    plan = dataclasses.replace(plan, notes=notes)
    page = Page(report_page([reported(plan, "predicted", "rehearsed", "measured")]))
    text = " ".join(page.text)
    assert all(note in text for note in notes)
    assert all(source in text for source in ("predicted", "rehearsed", "measured"))
    assert "2 micro-batches of 4, 2 in flight" in text and "1.00 KiB x 2" in text
    assert all(word in text for word in ("forward", "backward", "idle", "Memory over time"))
    assert page.tags.count("canvas") == 6 and not page.urls
    charts = page.data["plans"][0]["charts"]
    timeline = simulate_plan(plan)
    assert [len(chart["rows"]) for chart in charts] == [4, 4, 4]
    assert sum(len(row["bars"]) for row in charts[0]["rows"]) == len(timeline.events)
    assert all(row["limit"] == 4000 for row in charts[0]["rows"])
    # held at the most: all that is there always, two micro-batches' activations, what a block needs in passing
    assert max(held for _, held in charts[0]["rows"][0]["memory"]) == 400 + 400 + 40


def test_names_stay_text(plan):
    stages = tuple(dataclasses.replace(s, name=f"{BAD_NAME}{i}") for i, s in enumerate(plan.stages))
    bad = dataclasses.replace(plan, model=BAD_NAME, stages=stages, notes=(BAD_NAME,))
    one = reported(with_memory(bad), BAD_NAME)
    page = report_page([dataclasses.replace(one, name=BAD_NAME), one])
    parsed = Page(page)
    assert len(parsed.scripts) == 2 and parsed.tags.count("script") == 2 and parsed.tags.count("title") == 1
    assert page.lower().count("<script") == 2 and "alert(1)" not in parsed.scripts[1]
    assert parsed.data["plans"][0]["stages"][0]["name"] == f"{BAD_NAME}0"
    svg = figure_svg(stack_figures([draw_stage_graph(bad)]))
    texts = [element.text or "" for element in ElementTree.fromstring(svg).iter()]
    assert any("<script>" in text for text in texts)


@pytest.mark.parametrize("branches", [4, 9])
def test_heads_of_arrows_into_one_box_stand_apart(branches):
    joined = simple_plan([2] * (branches + 1), [(i, branches) for i in range(branches)], mini_batch=2)
    shapes = draw_stage_graph(joined).shapes
    heads = sorted(shape.points[-1][0] for shape in shapes if isinstance(shape, Polyline))
    assert len(heads) == branches
    assert min(b - a for a, b in itertools.pairwise(heads)) >= 2 * CHAR_WIDTH


def test_bars_do_not_leave_the_picture(plan, timeline):
    chart = chart_timeline(timeline, plan, title="measured")
    figure = draw_timeline(chart, plan)
    boxes = [shape for shape in figure.shapes if isinstance(shape, Rectangle)]
    assert all(
        0 <= box.x and box.x + box.width <= WIDTH and box.y + box.height <= figure.height for box in boxes
    )
    tips = [box.tip for box in boxes if box.tip]
    assert len(tips) == len(timeline.events)
    assert "2B0 backward of loss, micro-batch 0 of 8 samples, 0.050 ms" in tips
    assert "send on text_model -> loss, micro-batch 0, 64 B, 0.030 ms" in tips
    assert not chart.has_memory


@pytest.mark.parametrize("num_ranks", [4, 64])
def test_pictures_are_svg_and_png(num_ranks):
    pytest.importorskip("PIL", reason="Pillow is not installed")
    plan = with_memory(chain_plan(num_ranks, 8, num_bytes=64.0))
    chart = chart_timeline(simulate_plan(plan), plan, title="predicted")
    figure = stack_figures([draw_stage_graph(plan), draw_timeline(chart, plan), draw_memory(chart)])
    root = ElementTree.fromstring(figure_svg(figure))
    assert float(root.get("height")) == pytest.approx(figure.height, abs=1)
    png = figure_png(figure)
    assert png.startswith(b"\x89PNG") and len(png) < 5_000_000
    with pytest.raises(GppError, match="too large to open; write SVG"):
        figure_png(Figure(width=1e5, height=1e4, shapes=()))


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason=f"no browser here: {', '.join(BROWSERS)}")
def test_a_browser_draws_the_page(plan, tmp_path):
    page = report_page([reported(with_memory(plan), "predicted", "measured")])
    # The last line of the page says what was painted: the script has run to its end, and no canvas is blank.
    probe = """<script>document.title = "painted " + [...document.querySelectorAll("canvas")].filter(c =>
        c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some(v => v)).length;</script>"""
    (tmp_path / "page.html").write_text(page.replace("</body>", probe + "</body>"), encoding="utf-8")
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    try:
        dom = run_program(
            [*command, f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except subprocess.TimeoutExpired:
        pytest.skip(f"{browser} does not answer here")
    assert re.search(r"<title>painted 4</title>", dom)
