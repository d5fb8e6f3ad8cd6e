"""What a forward leaves behind for the next one is part of the graph, or the model is refused by name."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.recapture import recapture
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.op_graph import is_carried
from gpp_plugin.model.verify.compare_capture import Comparison, compare_capture, make_twin
from tests.carried_models import (
    CARRIED,
    REFUSED,
    Branching,
    Centre,
    Counter,
    LateTable,
    Momentum,
    Plain,
    Stashing,
    make_batch,
)

CPU = torch.device("cpu")


def compared(model: nn.Module, batch: dict[str, Any]) -> Comparison:
    twin = make_twin(model, device=CPU)
    return compare_capture(
        capture_model(model, batch), twin, batch, call=lambda module, entries: module(**entries)
    )


@pytest.mark.parametrize("make", CARRIED)
def test_two_forwards_of_the_graph_are_those_of_the_module_which_stays_as_it_is(make: type[Plain]) -> None:
    torch.manual_seed(0)
    model = make()
    before, plain = copy.deepcopy(model.state_dict()), repr(vars(model))
    outside = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    assert compared(model, make_batch(4)).differences == ()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert repr(vars(model)) == plain and all(p.grad is None for p in model.parameters())
    assert outside == (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())


@pytest.mark.parametrize("make", REFUSED)
def test_what_cannot_be_carried_is_refused_by_name(make: type[Plain]) -> None:
    torch.manual_seed(0)
    try:
        differences = compared(make(), make_batch(4)).differences
        text = differences[0].what
    except CaptureError as error:
        text = str(error)
    assert REFUSED[make] in text and "\n" not in text


def test_what_is_no_state_is_not_carried() -> None:
    carried = capture_model(Stashing(), make_batch(4)).analysis.carried
    assert {state.name for state in carried} == {"table"}
    assert not any(state.tensors for state in carried)


def test_another_rank_carries_the_same_and_a_module_that_runs_as_it_is_has_its_own() -> None:
    model, batch = Branching(), make_batch(4)
    first = capture_model(model, batch)
    assert first.analysis.eager == ("turn",)
    again = recapture(model, first.analysis, make_batch(2))
    names = [p.name for p in again.op_graph.parameters if p.is_mutated]
    assert names == ["turn.carried:calls"] and is_carried(names[0])


def test_only_what_reads_and_writes_state_is_kept_together() -> None:
    for make in (Centre, Counter):
        captured = capture_model(make(), make_batch(4))
        linear = {n.name for n in captured.op_graph.nodes if n.target == "aten.linear.default"}
        assert linear.isdisjoint(name for cluster in captured.analysis.clusters for name in cluster)
        assert not captured.analysis.takes_whole_units


class Untold(Counter):
    """Counts where it is not traced."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        if torch.compiler.is_exporting():
            return Plain.forward(self, x, y)
        return super().forward(x, y)


class Hushed(Momentum):
    """Writes its teacher's weights where it is not traced."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        if torch.compiler.is_exporting():
            return {
                "loss": self.loss(self.first(x), y) + (self.first(x) - self.teacher(x) + 1).square().mean()
            }
        return super().forward(x, y)


@pytest.mark.parametrize(("make", "name"), [(Untold, "state calls"), (Hushed, "teacher.weight")])
def test_what_is_left_behind_is_found_on_the_module_and_not_read_off_the_graph(
    make: type[Plain], name: str
) -> None:
    torch.manual_seed(0)
    differences = compared(make(), make_batch(4)).differences
    assert any(name in difference.what for difference in differences)


def test_a_buffer_registered_by_a_forward_before_the_start_is_one_of_the_model() -> None:
    model, batch = LateTable(), make_batch(4)
    model(**batch)
    assert compared(model, batch).differences == ()
