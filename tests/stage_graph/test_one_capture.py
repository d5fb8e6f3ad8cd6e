"""A plain model and the same model as a graph of one captured part are one thing under two spellings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpp_plugin.model.graph.resolve import resolve
from gpp_plugin.model.graph.stage_graph import StageGraph
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.stage_graph import one_capture_jobs
from tests.stage_graph.one_capture_jobs import NUM_RANKS, WAYS, as_graph, files_of

Answers = list[dict[str, dict[str, dict[str, Any]]]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("both")


@pytest.fixture(scope="module")
def answers(directory: Path) -> Answers:
    return run_kept_ranks(one_capture_jobs.train_both, NUM_RANKS, str(directory), timeout_s=300.0)


@pytest.mark.parametrize("way", WAYS)
def test_plan_programs_losses_gradients_and_weights_are_equal(answers: Answers, way: str) -> None:
    for answer in answers:
        plain, captured = answer[way]["plain"], answer[way]["captured"]
        for what in ("plan", "programs", "losses", "evaluated"):
            assert plain.get(what) == captured.get(what), what
        for left, right in zip(
            [*plain["gradients"], plain["weights"]],
            [*captured["gradients"], captured["weights"]],
            strict=True,
        ):
            assert list(left) == list(right)
            assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.mark.parametrize("way", [way for way in WAYS if way != "async"])
def test_each_goes_on_from_the_other_s_checkpoint(answers: Answers, way: str) -> None:
    for answer in answers:
        for spelling in ("plain", "captured"):
            assert answer[way][spelling]["continued"] == answer[way][spelling]["next"]


@pytest.mark.parametrize("way", WAYS)
def test_they_save_the_same_files(answers: Answers, directory: Path, way: str) -> None:
    del answers
    plain, captured = (files_of(directory / way / f"{spelling}-export") for spelling in ("plain", "captured"))
    assert "config.json" in plain
    assert plain == captured


def test_both_share_one_profile(answers: Answers, directory: Path) -> None:
    del answers
    # and all ways do, but ZeRO 1, which holds other bytes of each parameter
    assert len(list((directory / "profiles").glob("*.json"))) == 2


def test_outputs_and_inputs_under_names_of_the_user_s_own() -> None:
    for answer in run_kept_ranks(one_capture_jobs.evaluate_named, 2):
        for plain, captured in zip(answer["plain"], answer["captured"], strict=True):
            same = torch.equal(plain, captured) if isinstance(plain, torch.Tensor) else plain == captured
            assert same


def test_a_loss_is_not_asked_for_where_none_is_wanted() -> None:
    model, make_batch = build("clip")
    keys = [key for key, value in make_batch(2).items() if isinstance(value, torch.Tensor)]
    graph = as_graph(model, num_ranks=1)
    resolved = resolve(graph, batch_keys=keys, num_ranks=1, needs_loss=False, asked=["image_embeds"])
    assert resolved.whole is not None
    assert (resolved.whole.constants, resolved.whole.losses) == ((), ())
    assert resolved.whole.nodes == (("image_embeds", "image_embeds"),)


def test_what_a_graph_of_one_captured_part_is_called_with() -> None:
    model, make_batch = build("clip")
    tensors = {key: value for key, value in make_batch(2).items() if isinstance(value, torch.Tensor)}
    graph = as_graph(model, num_ranks=1)
    assert [name for name, _ in graph.named_parameters()] == [name for name, _ in model.named_parameters()]
    (stage,) = resolve(graph, batch_keys=tensors, num_ranks=1).stages
    assert stage.constants == (("return_loss", True),)
    assert [key for _, key in stage.batch_inputs] == list(tensors)
    (told,) = resolve(graph, batch_keys=tensors, constants={"return_loss": 1}, num_ranks=1).stages
    assert told.constants == (("return_loss", 1),)


def test_a_constant_is_an_input_like_others() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return (super().forward(x) * scale).mean()

    graph = StageGraph("scaled")
    graph.capture("scaled", Scaled(3, 3), inputs={"x": "x", "scale": "by"}, outputs=["loss"], ranks=[0])
    (stage,) = resolve(graph, batch_keys=["x"], constants={"by": 2.0}, num_ranks=1).stages
    assert (stage.batch_inputs, stage.constants) == ((("x", "x"),), (("scale", 2.0),))
