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
from gpp_plugin.capture.tracing.carried_state import (
    changed_attributes,
    described,
    initial_values,
    without_history,
)
from gpp_plugin.capture.tracing.outside import noted_accesses, noted_reads
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import CarriedState, StateTensor
from gpp_plugin.ir.block_graph import CARRIED as CARRIED_PREFIX
from gpp_plugin.ir.block_graph import is_carried
from tests.capture.graphs import compared
from tests.carried_models import (
    CARRIED,
    REFUSED,
    WHOLE,
    Branching,
    Centre,
    Counter,
    Enclosed,
    LateTable,
    Listed,
    Momentum,
    Plain,
    Stashing,
    make_batch,
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


@pytest.mark.parametrize("make", WHOLE)
def test_a_model_whose_own_python_reads_its_state_is_one_block(make: type[Plain]) -> None:
    torch.manual_seed(0)
    model = make()
    before = copy.deepcopy(model.state_dict())
    captured = capture_model(model, make_batch(4))
    assert captured.analysis.eager == ("",)
    assert [n.is_coupling for n in captured.op_graph.nodes if n.target.startswith("eager")] == [True]
    assert {p.name.replace(CARRIED_PREFIX, "") for p in captured.op_graph.parameters if p.is_state} & {
        "shift",
        "average",
        "calls",
    }
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_statistics_that_training_does_not_read_are_no_state() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(6))
    captured = capture_model(model, {"input": make_batch(4)["x"]}, outputs=(), call=_mean)
    assert {p.name for p in captured.op_graph.parameters if p.is_mutated} == {
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    }
    assert not any(p.is_state for p in captured.op_graph.parameters)


def _mean(model: nn.Module, entries: Any) -> torch.Tensor:
    return model(entries["input"]).square().mean()


@pytest.mark.parametrize("make", [Listed, Enclosed])
def test_a_teacher_that_is_no_submodule_is_seen_without_a_comparison(make: type[Plain]) -> None:
    with pytest.raises(CaptureError, match="teachers|none of its modules holds"):
        capture_model(make(), make_batch(4))


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


class Holder(nn.Module):
    """Holds a number, a tensor that a forward made, and one that it did not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.calls, self.made, self.given = 3, torch.ones(2), torch.ones(2)


def test_what_is_noted_of_modules_is_noted_while_it_is_asked_for() -> None:
    model, seen = Holder(), []
    own = nn.Module.__setattr__, "__getattribute__" in vars(nn.Module)
    with noted_accesses(model) as first:
        with noted_reads(lambda owner, name: seen.append(name)):
            assert model.calls == 3
        model.given = model.made
        model.calls += 1
        model.extra = 1
        assert model.extra == 1
    table = id(vars(model))
    assert {name: first[table, name] for name in ("calls", "made", "given", "extra")} == {
        "calls": True, "made": True, "given": False, "extra": False,
    }  # fmt: skip
    assert (nn.Module.__setattr__, "__getattribute__" in vars(nn.Module)) == own and "calls" in seen
    assert seen.count("made") == 0, "read behind it"


def test_what_changed_is_told_by_object_or_by_value() -> None:
    ones = torch.ones(2)
    before = {"number": 1, "nan": float("nan"), "tensor": ones, "gone": "x"}
    after = {"number": 1.0, "nan": float("nan"), "tensor": ones.clone(), "new": None}
    assert changed_attributes(before, after) == ["number", "tensor", "gone", "new"]
    assert changed_attributes(before, after, by_value=True) == ["number", "gone", "new"]
    assert changed_attributes(before, {**before, "tensor": 2 * ones}, by_value=True) == ["tensor"]


def test_state_begins_with_a_copy_of_what_the_user_s_model_holds() -> None:
    model = Holder()
    model.made = (model.scale * 2).detach().requires_grad_(True) * 1
    memo = without_history(model)
    assert memo.keys() == {id(model.made)}, "deepcopy takes the others as they are"
    copied = copy.deepcopy(model, memo)
    assert torch.equal(copied.made, model.made.detach()) and copied.given is not model.given
    states = [
        CarriedState(name=name, tensors=(StateTensor(name=f"carried:{name}", shape=shape, dtype=dtype),))
        for name, shape, dtype in (
            ("calls", (), "int64"),
            ("given", (2,), "float32"),
            ("hidden", (2, 3), "float64"),
        )
    ]
    wanted = described(states)
    assert [parameter.bytes for parameter in wanted] == [8, 8, 48]
    found = initial_values(model, wanted)
    assert found["carried:calls"].item() == 3 and not found["carried:hidden"].any()
    found["carried:given"].zero_()
    assert model.given.eq(1).all(), "a stage writes into its own"
