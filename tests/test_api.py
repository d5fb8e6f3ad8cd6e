"""The Python API: every function in a process without ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpp_plugin
import gpp_plugin.api as api
from gpp_plugin.cli import main
from gpp_plugin.errors import ConfigError, GppError, PlanError, PlanInfeasible
from gpp_plugin.ir.serialize import load
from gpp_plugin.plan.cluster_files import read_cluster
from tests.models import build

SIZES = {"branches": 2, "layers": 2}
SMALL = {"num_devices": 4, "sizes": SIZES, "mini_batch": 16, "loss_unit": 4, "stages": 2}


@pytest.fixture(scope="module")
def made() -> api.PipelinePlan:
    return api.plan("mmt", "summit", **SMALL)


def test_the_command_and_the_function_make_the_same_plan(made: api.PipelinePlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sizes = ["--size", "branches=2", "--size", "layers=2", "--mini-batch", "16", "--loss-unit", "4"]
    sizes += ["--stages", "2"]
    assert main(["plan", "mmt", "--cluster", "summit", "--devices", "4", *sizes, "--out", str(path)]) == 0
    assert api.load_plan(path) == made
    assert made.num_ranks == 4 and made.memory


def test_what_simulate_returns_can_be_printed_and_saved(made: api.PipelinePlan, tmp_path: Path) -> None:
    timeline = api.simulate(made, "summit")
    assert isinstance(timeline, api.Timeline) and timeline.source == "predicted"
    assert timeline == api.simulate(made, read_cluster("summit", num_devices=4))
    assert timeline.iteration_us == api.simulate(made).iteration_us == made.iteration_us > 0
    assert all(f"rank {rank} " in api.format_timeline(timeline, made) for rank in range(4))
    assert made.stages[0].name in api.format_plan(made)
    api.save(timeline, tmp_path / "timeline.json")
    assert load(api.Timeline, tmp_path / "timeline.json") == timeline


def test_an_asynchronous_plan_is_simulated_over_several_mini_batches() -> None:
    made = api.plan("mmt", "summit", mode="async", planner="uniform", **SMALL)
    found = api.simulate_async(made, "summit")
    timeline = api.simulate(made, "summit")
    assert timeline == found.timeline
    assert 0 < found.steady_us < timeline.iteration_us / (found.num_windows - 1)
    assert api.format_timeline(timeline, made).startswith("predicted: ")
    api.validate(made)


def test_a_plan_is_held_against_its_request(made: api.PipelinePlan) -> None:
    request = api.make_request("mmt", "summit", **SMALL)
    api.validate(made, request)
    assert api.plan_for(request) == made
    with pytest.raises(PlanError, match="the plan is for graph"):
        api.validate(made, api.make_request("dlrm", "summit", num_devices=4))
    with pytest.raises(PlanInfeasible):
        api.plan("mmt", "summit", memory_limit_gb=1e-6, **SMALL)


def test_a_plan_that_cannot_run_is_refused(made: api.PipelinePlan) -> None:
    stages = tuple(dataclasses.replace(stage, schedule="1f1b", in_flight=1, k=3) for stage in made.stages)
    with pytest.raises(PlanError, match="too few"):
        api.validate(dataclasses.replace(made, stages=stages))
    assert made.edges
    with pytest.raises(PlanError, match="data flows to a later stage of the plan"):
        api.validate(dataclasses.replace(made, stages=made.stages[:1]))


@pytest.mark.parametrize("function", [api.simulate, api.rehearse, api.validate])
def test_a_file_in_place_of_a_plan_is_told_how_to_be_read(function) -> None:
    line = r"^plan: 'plan.json' is a str; read a file with load_plan\(path\)$"
    with pytest.raises(ConfigError, match=line):
        function("plan.json")


def wrong_calls(made: api.PipelinePlan, folder: Path) -> dict[str, Callable[[], object]]:
    """Return calls with an argument of a wrong type, or a path that is none, by the beginning of what refuses them."""
    (folder / "file").write_text("")
    timeline = api.simulate(made)
    return {
        "path: None is no path; give that of a file": lambda: api.save(made, None),  # type: ignore[arg-type]
        "path: 5 is no path": lambda: api.save(made, 5),  # type: ignore[arg-type]
        "path: '' is no path": lambda: api.save(timeline, ""),
        "path: 'a....b' is no path": lambda: api.save(timeline, "a\0b"),
        f"path: {folder} cannot be written .it is a directory.; give another": lambda: api.save(made, folder),
        f"path: {folder}/file/x cannot be written": lambda: api.save(made, folder / "file" / "x"),
        "value: '5' is a int; give what plan": lambda: api.save(5, folder / "x"),  # type: ignore[arg-type]
        '"None": is no path .*; give the path of a': lambda: api.load_plan(None),  # type: ignore[arg-type]
        '"7": is no path': lambda: api.load_plan(7),  # type: ignore[arg-type]
        r"cluster: 'None' is a NoneType; give a name \(": lambda: api.plan("mmt", None),  # type: ignore[arg-type]
        r"cluster: '\[\]' is a list; give a name": lambda: api.plan("mmt", []),  # type: ignore[arg-type]
        "cluster: '5' is a int": lambda: api.simulate(made, 5),  # type: ignore[arg-type]
        "request: '5' is a int; make one": lambda: api.validate(made, 5),  # type: ignore[arg-type]
        "request: 'x' is a str": lambda: api.plan_for("x"),  # type: ignore[arg-type]
        "timeline: '5' is a int": lambda: api.format_timeline(5, made),  # type: ignore[arg-type]
        "plan: '6' is a int": lambda: api.format_timeline(timeline, 6),  # type: ignore[arg-type]
    }


def test_an_argument_of_a_wrong_type_is_one_line_with_its_name(
    made: api.PipelinePlan, tmp_path: Path
) -> None:
    for line, call in wrong_calls(made, tmp_path).items():
        with pytest.raises(GppError, match=f"^{line}") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "what is refused writes nothing"


def test_several_lengths_are_planned_for_their_mean_time_and_the_longest_memory() -> None:
    model, make_batch = build("gpt2", layers=1)
    common = {"num_devices": 2, "sample_batch": make_batch(2), "mini_batch": 4, "loss_unit": 2}
    several = api.make_request(model, length=[8, 4], max_length=16, **common)
    each = {n: api.make_request(model, length=n, max_length=n, **common) for n in (4, 8, 16)}
    for i, cost in enumerate(several.profile.costs):
        short, long, longest = (each[n].profile.costs[i] for n in (4, 8, 16))
        assert cost.forward_us[-1] == pytest.approx((short.forward_us[-1] + long.forward_us[-1]) / 2)
        assert cost.saved_bytes_per_sample == longest.saved_bytes_per_sample
    assert several.profile.inputs == each[16].profile.inputs
    assert several.graph == each[4].graph, "the middle one of the usual lengths, the shorter of two"
    assert all(3.9 < growth <= 4.0 for growth in several.profile.growth.values())
    with pytest.raises(ConfigError, match=r"^length\[0\]: 8 is longer than max_length, 4; raise max_length$"):
        api.make_request(model, length=[8], max_length=4, **common)


def test_a_module_is_planned_with_a_batch() -> None:
    model, make_batch = build("clip")
    made = api.plan(model, num_devices=2, sample_batch=make_batch(2), mini_batch=8, loss_unit=4)
    assert made.model == type(model).__name__ and made.num_ranks == 2
    with pytest.raises(ConfigError, match="sample_batch: missing; a CLIPModel is captured on a batch"):
        api.plan(model, num_devices=2)


def test_a_name_whose_extra_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(home: str) -> None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.delitem(vars(gpp_plugin), "GraphPipelineTrainer", raising=False)
    monkeypatch.setattr(gpp_plugin, "importlib", SimpleNamespace(import_module=missing))
    with pytest.raises(ModuleNotFoundError) as raised:
        gpp_plugin.GraphPipelineTrainer  # noqa: B018
    assert str(raised.value) == (
        "gpp_plugin.GraphPipelineTrainer needs transformers, which is not installed: pip install 'gpp_plugin[hf]'"
    )
