"""The zoo's configurations build, and its command tells exact, refused, wrong and ended models apart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_benchmarks import zoo
from gpp_benchmarks.zoo import _children, _on_ranks, _staged, _trial
from gpp_benchmarks.zoo._staged import Trained
from gpp_benchmarks.zoo.plain import PLAIN_MODELS, _plain_ranks
from gpp_benchmarks.zoo.plain._entry import PlainModel
from gpp_plugin.cli import main
from gpp_plugin.errors import CaptureError
from tests.ranks import run_kept_ranks

SOME = ("qwen2_5_vl", "whisper", "t5", "clip", "detr", "mixtral", "resnet")


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def in_this_process(names: Sequence[str], *, jobs: int, timeout_s: float) -> Iterator[dict[str, Any]]:
    yield from (_trial.try_model(zoo.CATALOGUE[name]) for name in names)


def test_the_table_is_whole() -> None:
    assert len(zoo.CATALOGUE) == 312  # no name twice
    assert len({entry.model for entry in zoo.CATALOGUE.values()}) >= 120
    for entry in zoo.CATALOGUE.values():
        first, second = (entry.batch(2, length) for length in entry.lengths)
        assert first.keys() == second.keys()
        shapes = [
            [tuple(v.shape) for v in batch.values() if isinstance(v, Tensor)] for batch in (first, second)
        ]
        assert (shapes[0] == shapes[1]) == entry.means.startswith("nothing"), entry.name
        again = entry.batch(2, entry.lengths[0])
        assert all(torch.equal(first[k], again[k]) for k in first if isinstance(first[k], Tensor)), entry.name


@pytest.mark.parametrize("name", SOME)
def test_a_model_and_its_batch_give_the_same_loss_at_every_build(name: str) -> None:
    losses = []
    for _ in range(2):
        model, batch = zoo.build(name)
        losses.append(model(**batch).loss)
    losses[0].backward()
    assert torch.equal(losses[0], losses[1]) and bool(torch.isfinite(losses[0]))
    assert (
        any(p.grad is not None and bool(p.grad.any()) for p in model.parameters()) is False
    )  # the second one's
    assert zoo.build(name, device="meta")[0].training


def test_a_refused_model_gives_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CaptureError("layer 3 cannot be captured; leave it out")

    monkeypatch.setattr(_staged.CapturedPart, "capture", refuse)
    monkeypatch.setattr(_children, "rows_of", in_this_process)
    assert main(["bench", "zoo", "--models", "llama", "--json"]) == 0
    output = capsys.readouterr().out
    found = json.loads(output.splitlines()[-1])
    assert found["rows"][0]["line"] == "layer 3 cannot be captured; leave it out"
    assert found["summary"][-1]["refused"] == 1 and "refused              layer 3" in output


def test_what_is_wrong_is_told_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One gradient of the stages is off by a hundred-thousandth; nothing raises."""
    right = _trial.train_staged

    def train(*arguments: Any) -> Trained:
        found = right(*arguments)
        name = next(name for name in found.gradients if name.endswith("q_proj.weight"))
        return dataclasses.replace(
            found, gradients={**found.gradients, name: found.gradients[name] * (1 + 1e-5)}
        )

    monkeypatch.setattr(_trial, "train_staged", train)
    monkeypatch.setattr(_children, "rows_of", in_this_process)
    assert main(["bench", "zoo", "--models", "llama", "--json"]) == 1
    found = told(capsys)
    assert found["wrong"] == ["llama"] and found["summary"][-1]["wrong"] == 1
    assert "q_proj.weight" in found["rows"][0]["line"]


def test_other_errors_are_no_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise IndexError("list index\nout of range")

    monkeypatch.setattr(_staged.CapturedPart, "capture", fail)
    row = _trial.try_model(zoo.CATALOGUE["llama"])
    assert (row["verdict"], row["line"]) == ("raw error", "IndexError: list index out of range")


def test_a_model_that_takes_too_long_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "zoo", "--models", "switch_transformers", "--timeout", "0.05", "--json"]) == 0
    (row,) = told(capsys)["rows"]
    assert row["verdict"] == "ended" and "more than 0.05 s, in phase" in row["line"]


def on_ranks(name: str) -> dict[str, Any]:
    return _on_ranks.train_here(zoo.CATALOGUE[name])


def test_flava_trains_on_ranks_as_in_one_process() -> None:
    """Codes that weights decide, a temperature that is clamped, and a loss that would gather over ranks."""
    row, _ = run_kept_ranks(on_ranks, 2, "flava", timeout_s=150)
    assert (row["verdict"], row["line"], row["stages"]) == ("exact", "", 2)
    assert row["loss_error"] <= 1e-6 and row["parameter_error"] <= 1e-5
    assert row["losses"][2] < row["losses"][0]


def test_the_plain_zoo_is_whole_and_its_options_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(PLAIN_MODELS) >= 65 and not PLAIN_MODELS.keys() & zoo.CATALOGUE.keys()
    for entry in PLAIN_MODELS.values():
        first, second = entry.unit(0), entry.unit(1)
        assert first.keys() == second.keys(), entry.name
        state = entry.build().state_dict()
        assert entry.build().state_dict().keys() == state.keys(), entry.name
    assert main(["bench", "zoo", "--family", "plain", "--list", "--first", "3", "--json"]) == 0
    assert told(capsys)["models"] == list(PLAIN_MODELS)[:3]
    assert main(["bench", "zoo", "--family", "plain", "--models", "dino_centre"]) == 1
    assert "did you mean 'dino_center'" in capsys.readouterr().err


def plain_on_ranks(names: Sequence[str]) -> list[dict[str, Any]]:
    return [_plain_ranks.train_plain(PLAIN_MODELS[name]) for name in names]


def test_plain_modules_train_on_ranks_or_are_refused_at_the_start() -> None:
    names = ["writes_input", "sparse_embedding", "complex_weights"]
    rows, _ = run_kept_ranks(plain_on_ranks, 2, names)
    assert [(row["verdict"], row["line"]) for row in rows[:2]] == [("exact", "")] * 2
    assert all(row["cuttable"]["blocks"] > 1 and row["cuttable"]["stages"] == 2 for row in rows[:2])
    assert rows[2]["verdict"] == "refused" and "torch.view_as_real(w)" in rows[2]["line"]


class OneLabel(nn.Module):
    """A graph with one label: 12 nodes, two rows of edges or one label may be taken for its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, edge_index: Tensor, y: Tensor) -> dict[str, Tensor]:
        source, target = edge_index
        hidden = torch.tanh(self.body(x))
        hidden = hidden.index_add(0, target, hidden[source])
        return {"loss": (self.head(hidden.mean(0)) - y).square().mean()}


def one_graph(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    edges = torch.randint(0, 12, (2, 20), generator=generator)
    return {"x": torch.randn(12, 4, generator=generator), "edge_index": edges, "y": torch.ones(1)}


def units_as_they_are() -> list[dict[str, Any]]:
    """Return rows without `units`, and with the advice followed."""
    graph = PlainModel(name="one_label", kind="inputs", make=OneLabel, unit=one_graph, block={})
    flattened = PLAIN_MODELS["flattened_texts"]
    entries = [graph, flattened, *(dataclasses.replace(e, block={"units": 2}) for e in (graph, flattened))]
    return [_plain_ranks.train_plain(entry) for entry in entries]


def test_batches_that_are_units_as_they_are_train_with_units() -> None:
    rows, _ = run_kept_ranks(units_as_they_are, 2)
    assert [row["verdict"] for row in rows] == ["refused", "refused", "exact", "exact"], rows
    assert "may be of 2 or 12 samples" in rows[0]["line"] and '"units": N' in rows[0]["line"]
    assert "may be of 1 or 3 samples" in rows[1]["line"]


def test_a_plain_module_that_is_wrong_or_late_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(names: Sequence[str], *, timeout_s: float) -> Iterator[dict[str, Any]]:
        for name, verdict in zip(names, ("exact", "wrong", "late"), strict=True):
            cuttable = {"blocks": 4, "stages": 2, "eager": ["gate"], "eager_share": 0.25}
            yield {"name": name, "kind": "state", "verdict": verdict, "line": "why", "cuttable": cuttable}

    monkeypatch.setattr(zoo, "plain_rows", rows)
    assert main(["bench", "zoo", "--family", "plain", "--first", "3", "--json"]) == 1
    output = capsys.readouterr().out
    assert json.loads(output.splitlines()[-1])["wrong"] == list(PLAIN_MODELS)[1:2]
    assert "4 blocks in 2 stages, 25% of its operations eager; why" in output
    assert "3 modules: exact 1, late 1, wrong 1; 3 in two stages" in output
