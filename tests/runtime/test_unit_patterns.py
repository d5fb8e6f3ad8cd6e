"""Units that lack a branch of the model equal one process that runs them one by one; all ranks are threads here."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.program import InstructionKind
from tests.integrations.absent_jobs import TwoTowers, tower_units
from tests.integrations.unit_jobs import one_process
from tests.reading_models import Reader, reader_batch
from tests.reference import gradient_errors
from tests.runtime.test_ragged_units import ThreadJob


def check(job: ThreadJob, plain: nn.Module, units: Sequence[dict[str, Any]]) -> None:
    """Run a mini-batch, and hold it against one process: which gradients there are, too."""
    loss, gradients = job.run(units)
    reference = one_process(plain, [units], loss_mean="units")
    assert loss == pytest.approx(reference.losses[0], rel=1e-6)
    assert gradients.keys() == reference.gradients.keys()
    assert max(gradient_errors(gradients, reference.gradients).values()) < 2e-6


def test_units_without_images_of_a_model_whose_python_reads_values(tmp_path: Path) -> None:
    # without images it reads less, but not nothing: whether something is padded, and how many tokens are labelled
    torch.manual_seed(0)
    model = Reader()
    plain = copy.deepcopy(model)
    job = ThreadJob(
        model, reader_batch([[2, 1], [1]]), 3, {"units": 3, "data_parallel": 1, "stages": 3}, tmp_path
    )

    def unit(kind: str, seed: int) -> dict[str, Any]:
        sizes = {"b": [[2, 1], [1]], "o": [[1, 1], [3]]}.get(kind, [[], []])
        found = reader_batch(sizes, seed=seed, padded=kind != "u")
        return found if kind in "bo" else {k: v for k, v in found.items() if k not in ("pixels", "sizes")}

    for step, kinds in enumerate(("btu", "tut", "otb", "btu")):
        check(job, plain, [unit(kind, 10 * step + number) for number, kind in enumerate(kinds)])
    text = next(p for p in job.runners[0].stage_runners[0]._patterns._known.values() if p.lacks)
    assert text.reference.analysis.reads_values
    # padded or not is another reading, so other code of the same pattern
    keys = {
        key
        for runner in job.runners
        for key, code in runner.stage_runners[0]._codes.items()
        if code.pattern.lacks
    }
    assert len(keys) == 2


def test_a_unit_without_what_the_model_needs_is_refused_in_one_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    job = ThreadJob(TwoTowers(), tower_units("b")[0], 2, {"units": 2, "stages": 2}, tmp_path)
    good = tower_units("bb")
    for lost in ({"left": None, "right": None}, {"labels": None}):
        unit = {k: v for k, v in good[0].items() if k not in lost}
        with pytest.raises(CaptureError, match=r"a unit lacks \['(left', 'right|labels)'\]") as caught:
            job.run([good[0], unit])
        assert "\n" not in str(caught.value)
    job.run(good)


class Unread(nn.Module):
    """Takes an input and makes nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, hint: Tensor | None = None) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(loss=self.layer(x).square().mean())


def test_an_input_that_nobody_reads_may_be_absent(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sample = {"x": torch.randn(2, 8), "hint": torch.randn(2, 3)}
    model = Unread()
    plain = copy.deepcopy(model)
    job = ThreadJob(model, sample, 1, {"units": 2}, tmp_path)
    check(job, plain, [sample, {"x": torch.randn(2, 8)}])
    assert all(i.kind is not InstructionKind.SEND for i in job.runners[0].program.instructions)
