"""One capture for many lengths: its code at each is that of a capture there, and what it cannot hold for is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_benchmarks._attention_models import Batch, Size, build_family
from gpp_plugin.capture.tracing.sample_batches import WholeUnit
from gpp_plugin.errors import CaptureError
from gpp_plugin.model.graph import captured_part
from gpp_plugin.runtime.stage_module import StageCode
from tests.capture.attention_calls import OneStage
from tests.capture.graphs import Calls, counted_exports
from tests.reference import assert_near

SIZE = Size(layers=1, length=16)
LENGTHS = {
    "gpt2": (12, 9, 14, 7), "mistral": (12, 9, 14, 7, 6), "t5": (12, 10, 14, 8), "clip": (12, 9, 14, 7),
    "bert": (12, 9, 14, 7), "whisper": (12, 9, 14, 7), "llava": (28, 31, 26, 29),
}  # fmt: skip
"""Captured at the first of them; a text's images are among the first 24 tokens of llava's 32."""


def cut(batch: Batch, length: int) -> Batch:
    """Return a batch whose longest text has ``length`` tokens, and others as much less."""
    texts = {
        k: v for k, v in batch.items() if isinstance(v, Tensor) and not v.is_floating_point() and v.ndim == 2
    }
    longest = max(text.shape[1] for text in texts.values())
    short = {k: v[:, : v.shape[1] * length // longest].contiguous() for k, v in texts.items()}
    return {**batch, **short}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.name.startswith("gpp_plugin") and r.levelno >= logging.WARNING
    ]


@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_code_at_a_length_is_that_of_a_capture_there(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, make_batch = build_family(name, SIZE)
    first, *others = LENGTHS[name]
    stage = OneStage(model, cut(make_batch("left"), first))
    stage.code(cut(make_batch("left"), first))
    with counted_exports() as exports:
        codes = {length: stage.code(cut(make_batch("left"), length)) for length in others}
    assert len(exports) == 1, "one for all lengths"
    assert all(code.is_for_lengths for code in codes.values())
    assert not warnings_in(caplog)
    for length in others:
        fresh = stage.recaptured(cut(make_batch("left"), length))
        assert codes[length].tensors == fresh.tensors
        assert codes[length].inputs == fresh.inputs
        assert codes[length].operators == fresh.operators
        for padding in ("left", "none"):
            batch = cut(make_batch(padding), length)
            loss, gradients, calls = stage.run(codes[length], batch)
            wanted, of_capture, wanted_calls = stage.run(fresh, batch)
            assert calls == wanted_calls and calls, (length, padding)
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
            assert loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)
            assert gradients.keys() == of_capture.keys()
            assert_near(gradients, of_capture)


def test_a_text_may_be_as_long_as_the_table_of_positions() -> None:
    # then the table's slice is all of it, which Python leaves out
    model, make_batch = build_family("clip", SIZE)
    stage = OneStage(model, cut(make_batch("left"), 9))
    for length in (9, 16):
        batch = cut(make_batch("left"), length)
        loss, _, _ = stage.run(stage.recaptured(batch), batch)
        assert loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)


class Asking(nn.Module):
    """Asks for its input's length in Python: of more than 6 steps it takes another layer, or another number."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.what = what

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return a loss of x [samples, length, 4]."""
        is_long = x.shape[1] > 6
        result = self.layers[1 if is_long and self.what == "layer" else 0](x)
        factor = 3.0 if is_long and self.what == "number" else 2.0
        times = int(x.shape[1]) if self.what == "length" else 1
        return {"loss": (result * factor).square().mean() + sum(result.mean() for _ in range(times))}


def _steps(length: int) -> Batch:
    return {"x": torch.randn(2, length, 4, generator=torch.Generator().manual_seed(length))}


def _check_loss(stage: OneStage, code: StageCode, batch: Batch) -> None:
    assert stage.run(code, batch)[0].item() == pytest.approx(stage.model(**batch)["loss"].item(), rel=1e-6)


def test_what_python_asked_of_a_length_is_a_condition(caplog: pytest.LogCaptureFixture) -> None:
    stage = OneStage(Asking("number"), _steps(4))
    stage.code(_steps(4))
    for length in (5, 6, 7, 9, 2, 8):
        code = stage.code(_steps(length))
        assert code.is_for_lengths
        _check_loss(stage, code, _steps(length))
    assert not warnings_in(caplog)


def test_a_length_at_which_the_model_is_another_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    # operators of one kind on both ways: only what they read tells that it is another layer
    stage = OneStage(Asking("layer"), _steps(4))
    stage.code(_steps(4))
    assert stage.code(_steps(5)).is_for_lengths
    with pytest.raises(CaptureError, match=r"linear .* of .*layers_0.* is linear .* of .*layers_1"):
        stage.code(_steps(7))
    _check_loss(stage, stage.code(_steps(6)), _steps(6))
    (warning,) = warnings_in(caplog)
    assert "Asking is captured again for each new shape" in warning


def test_a_length_that_python_takes_as_a_number_is_captured_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def scaled(model: Any, x: Tensor) -> dict[str, Tensor]:
        return {"loss": model.layer(x).square().mean() * [1.0, 2.0][int(x.shape[1]) % 2]}

    stage = OneStage(Calls(scaled, layer=nn.Linear(4, 4)), _steps(5))
    stage.code(_steps(5))
    for length in (6, 7, 8, 9, 10, 5):
        code = stage.code(_steps(length))
        assert not code.is_for_lengths
        _check_loss(stage, code, _steps(length))
    (warning,) = warnings_in(caplog)
    assert "x.shape[1] is a number to the model" in warning
    assert "pad sequences to a few lengths" in warning


def _reading(model: Any, ids: Tensor, sizes: Tensor) -> dict[str, Tensor]:
    """Reads in Python how many tokens of its texts are marked by 1, and takes a layer for each image it is told of."""
    hidden = model.embed(ids)
    for size in sizes.tolist():
        hidden = model.layers[size % 2](hidden) * size
    return {"loss": hidden[ids == 1].square().mean() + hidden.mean()}


def _marked(length: int, sizes: tuple[int, ...] = (2, 3)) -> WholeUnit:
    ids = torch.full((2, length), 5)
    ids[:, 2:4] = 1
    return WholeUnit({"ids": ids, "sizes": torch.tensor(sizes)}, num_samples=2)


def test_lengths_are_symbols_beside_readings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    stage = OneStage(Calls(_reading, embed=nn.Embedding(9, 4), layers=layers), _marked(5))
    analysis = stage.reference.analysis
    runs: list[int] = []
    read = captured_part.read_values

    def reading(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return read(*args, **kwargs)

    monkeypatch.setattr(captured_part, "read_values", reading)
    found = []
    kinds = [(5, (2, 3)), (6, (2, 3)), (9, (2, 3)), (8, (4, 3)), (7, (4, 3)), (11, (4, 3)), (4, (2, 3))]
    with counted_exports() as exports:
        for length, sizes in kinds:
            unit = _marked(length, sizes)
            unit.readings = stage.part.readings(analysis, unit)
            code = stage.code(unit)
            _check_loss(stage, code, unit)
            found.append((code.is_for_lengths, len(exports), len(runs)))
    # of each kind of readings: one capture as it is, one with symbols; and two runs that tell that lengths do not matter
    assert found == [
        (False, 0, 1), (True, 1, 2), (True, 1, 2), (False, 2, 3), (True, 3, 4), (True, 3, 4), (True, 3, 4)
    ]  # fmt: skip
    assert not warnings_in(caplog)
    # one mark more, at a length and shape that were met
    unit = _marked(9)
    unit["ids"][0, 0] = 1
    assert stage.part.readings(analysis, unit) != stage.part.readings(analysis, _marked(9))


def _halves(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Fills a table by halves of its columns, as PegasusX does: each half is a slice of a slice of all rows."""
    steps = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    table = torch.zeros(x.shape[1], 4)
    table[:, :2] = torch.sin(steps * torch.ones(2))
    table[:, 2:] = torch.cos(steps * torch.ones(2))
    return {"loss": model.layer(x + table).square().mean()}


def test_a_slice_of_all_of_an_axis_is_left_out_before_another(caplog: pytest.LogCaptureFixture) -> None:
    stage = OneStage(Calls(_halves, layer=nn.Linear(4, 4)), _steps(5))
    stage.code(_steps(5))
    for length in (7, 4, 9):
        code = stage.code(_steps(length))
        assert code.is_for_lengths, warnings_in(caplog)
        _check_loss(stage, code, _steps(length))


def _listed(model: Any, ids: Tensor, images: Tensor) -> dict[str, Tensor]:
    """Takes its images one by one, so that their number is one to it; its texts are of any length."""
    images = torch.cat(list(model.image(images)[:, :1]))
    return {"loss": model.embed(ids).square().mean() + images.square().mean()}


def test_a_number_of_images_that_python_takes_has_a_capture_for_all_texts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def batch(length: int, images: int) -> Batch:
        return {"ids": torch.full((2, length), 5), "images": torch.randn(2 * images, 1, 4)}

    model = Calls(_listed, embed=nn.Embedding(9, 4), image=nn.Linear(4, 4))
    stage = OneStage(model, batch(5, 2))
    stage.code(batch(5, 2))
    found = []
    with counted_exports() as exports:
        for length, images in ((6, 1), (8, 1), (9, 2), (7, 2), (4, 1)):
            code = stage.code(batch(length, images))
            _check_loss(stage, code, batch(length, images))
            found.append(code.is_for_lengths)
    assert all(found), found
    assert len(exports) <= 4, "at most two tries for a number of images"
    assert not warnings_in(caplog)
