"""From reduced gradients to the step, on one rank without an engine: sums, norm, overflow, clipping, counters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gpp_plugin.engine import stage_step
from gpp_plugin.engine.framework import StepCounters
from gpp_plugin.engine.gradient_store import Summand
from gpp_plugin.engine.mini_batch_runner import share_of_loss
from gpp_plugin.engine.rank_engine import RankEngine
from gpp_plugin.engine.stage_groups import TiedParameter
from gpp_plugin.engine.stage_step import RankUpdate, StageUpdate, StepAlone, StepTogether
from gpp_plugin.errors import RuntimeFailure


class Gradients:
    """One number a stage: its scaled gradient; notes what is asked of it."""

    def __init__(self, value: float, unknown: Sequence[float] = ()) -> None:
        self.parameters: dict[str, Any] = {"own": None, "tie": None}
        self.resting = frozenset[str]()
        self.value, self.flags, self.log, self.learnt = value, list(unknown), [], list[float]()
        self.num_cleared = 0

    def for_optimizer(self) -> dict[str, None]:
        return dict.fromkeys(self.parameters)

    def accumulate(self) -> None:
        self.log.append("accumulate")

    def reduce_data(self) -> None:
        self.log.append("data")

    def sum_tensor(self, names: Sequence[str], *, group: Any) -> None:
        self.log.append(f"tensor {group}")

    def tied_summands(self, names: Sequence[str]) -> Any:
        self.log.append(f"tied {list(names)}")
        yield Summand(brought=torch.tensor([6.0]), take=lambda total: None)

    def squared_norm(self, *, without: Any, precision: torch.dtype) -> Tensor:
        self.log.append(f"without {sorted(without)}")
        return torch.tensor(self.value**2, dtype=precision)

    def is_empty(self) -> bool:
        return self.value == 0

    def unknown(self) -> Tensor | None:
        return torch.tensor(self.flags) if self.flags else None

    def learn(self, flags: Sequence[float]) -> None:
        self.learnt = list(flags)

    def clear(self) -> None:
        self.num_cleared += 1


class Updater:
    norm_precision = torch.float64
    trained = True

    def __init__(
        self, *, scale: float = 1.0, clipping: float = 0.0, layout: Sequence[int] = (), written: int = 0
    ) -> None:
        self.config = SimpleNamespace(gradient_clipping=clipping, check_overflow=True)
        self.loss_scale, self.layout = scale, layout
        self.applied: list[float] = []
        self.advanced, self.counted = 0, list[bool]()
        self.num_written, self.num_adopted = written, 0

    def written(self) -> torch.Tensor | None:
        return torch.tensor(self.num_written) if self.norm_precision is torch.float64 else None

    def adopt_written(self) -> None:
        self.num_adopted += 1

    def apply(self, gradients: Any, *, coefficient: float, resting: Any) -> None:
        assert gradients == {"own": None, "tie": None} and not resting
        self.applied.append(coefficient)

    def rates(self) -> tuple[float, ...]:
        return (float(self.advanced),)

    def advance_rates(self) -> None:
        self.advanced += 1

    def count(self, counters: Any, *, overflow: bool) -> None:
        self.counted.append(overflow)
        self.loss_scale /= 1 + overflow


def stage_of(
    index: int,
    gradients: Gradients,
    updater: Updater,
    *,
    degree: int = 1,
    tensor: int = 1,
    ties: bool = False,
) -> StageUpdate:
    tied = [TiedParameter(name="tie", stages=(0, 2), owner=2, is_whole=True)] if ties else []
    return StageUpdate(
        gradients,  # type: ignore[arg-type]
        updater,  # type: ignore[arg-type]
        stage=SimpleNamespace(name=f"s{index}", num_replicas=degree, tensor=tensor),  # type: ignore[arg-type]
        stage_index=index,
        groups=SimpleNamespace(tensor={index: "group"}),  # type: ignore[arg-type]
        tied=tied,
        device=torch.device("cpu"),
        foreign=["tie"],
    )


def rank_of(
    stages: Sequence[StageUpdate], agreeing: Sequence[int], **options: Any
) -> tuple[RankUpdate, StepCounters]:
    counters = StepCounters()
    given = {"group": None, "compare": lambda: None, "samples": 12, **options}
    return RankUpdate(stages, counters, agreeing=agreeing, **given), counters  # type: ignore[arg-type]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Squares that other ranks add to the norm, by number of the stage that agrees."""
    brought: list[float] = []

    def all_reduce(tensor: Tensor, *, group: Any, what: str) -> None:
        tensor += torch.tensor(brought, dtype=tensor.dtype)

    monkeypatch.setattr(stage_step, "all_reduce", all_reduce)
    return brought


def test_one_norm_of_all_stages_scales_and_clips_each_of_the_rank(others: list[float]) -> None:
    """Stages 0 and 2 of four here, scale 4: (12, 16, 0, 48) / 4, of which this rank knows the first and the third."""
    others += [0.0, 16.0**2, 0.0, 48.0**2]
    near, far = Gradients(12.0, unknown=[0.0, 2.0]), Gradients(0.0, unknown=[1.0])
    updaters = [Updater(scale=4.0, clipping=clipping, written=n) for clipping, n in ((6.5, 0), (20.0, 3))]
    built = [stage_of(index, g, u) for index, g, u in zip((0, 2), (near, far), updaters, strict=True)]
    update, counters = rank_of(built, (0, 1, 2, 3))
    rule = StepTogether(update)
    result = rule.step()
    assert result.grad_norm == pytest.approx(13.0) and not result.overflow
    assert dict(result.stage_norms) == pytest.approx({0: 3.0, 1: 4.0, 2: 0.0, 3: 12.0})
    assert updaters[0].applied == pytest.approx([0.5 / 4], rel=1e-6), "above: down to the limit"
    assert updaters[1].applied == [1 / 4], "below: as it is"
    assert (near.num_cleared, far.num_cleared) == (1, 1) and near.log[-1] == "without ['tie']"
    assert near.learnt == [0.0, 2.0] and far.learnt == [1.0]
    assert [u.num_adopted for u in updaters] == [0, 1], (
        "masters take over what was written, of that stage alone"
    )
    assert counters == StepCounters(global_steps=1, global_samples=12)
    assert result.learning_rates == (1.0,)
    assert [u.counted for u in updaters] == [[False]] * 2 and rule.end_mini_batch() is result


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_steps_no_stage_and_counts(others: list[float], bad: float) -> None:
    others += [0.0, bad]
    updater = Updater(scale=8.0, clipping=1.0)
    gradients = Gradients(3.0)
    update, counters = rank_of([stage_of(0, gradients, updater)], (0, 1))
    result = StepTogether(update).step()
    assert result.overflow and result.grad_norm == math.inf and not updater.applied
    assert gradients.num_cleared == 1
    assert result.stage_norms[0] == 3.0 / 8 and not math.isfinite(result.stage_norms[1])
    assert counters == StepCounters(global_steps=1, skipped_steps=1, global_samples=12)
    assert result.learning_rates == (0.0,) and result.loss_scale == 4.0
    updater.config.check_overflow = False
    assert not StepTogether(update).step().overflow and len(updater.applied) == 1
    assert math.isnan(updater.applied[0]) if math.isnan(bad) else updater.applied == [0.0]


def test_stages_that_step_alone_advance_once_a_mini_batch(others: list[float]) -> None:
    others += [0.0]
    updaters, values = [Updater(clipping=1.0), Updater(clipping=1.0)], [Gradients(3.0), Gradients(4.0)]
    ranks = [rank_of([stage_of(i, values[i], updaters[i])], (i,)) for i in range(2)]
    rule = StepAlone({i: update for i, (update, _) in enumerate(ranks)})
    with pytest.raises(ValueError, match="unpack"):
        rule.step()
    for i in (0, 0, 1):
        assert rule.step(i).grad_norm == 3.0 + i
    others[0] = math.nan
    assert rule.step(0).overflow
    others[0] = 0.0
    rule.step(0)
    found = rule.end_mini_batch()
    assert found.overflow and found.grad_norm == math.inf and dict(found.stage_norms) == {0: 3.0, 1: 4.0}
    assert [len(u.applied) for u in updaters] == [3, 1] and [u.advanced for u in updaters] == [1, 1]
    assert [u.counted for u in updaters] == [[True], [True]]
    assert ranks[0][1] == StepCounters(global_steps=1, skipped_steps=1, global_samples=12), "one mini-batch"
    assert ranks[1][1] == StepCounters()
    found = rule.end_mini_batch()
    assert not found.overflow and found.grad_norm == 5.0


def test_a_step_before_its_sums_is_refused() -> None:
    for degree, layout, ties, done, is_fine in (
        (1, (), False, "", True), (2, (), False, "", False), (2, (), False, "data", True),
        (1, (0,), False, "", False), (1, (0,), False, "data", True), (1, (), True, "data", False),
        (1, (), True, "data tied", True),
    ):  # fmt: skip
        gradients = Gradients(1.0)
        stage = stage_of(0, gradients, Updater(layout=layout), degree=degree, ties=ties)
        stage.accumulate()
        if "data" in done:
            stage.reduce_data()
            stage.reduce_data()
            assert gradients.log == ["accumulate", "data"], "once"
        if "tied" in done:
            stage.prepare_tied()
            assert [s.brought.tolist() for s in stage.bring_tied(["tie", "another's"])] == [[6.0]]
            assert gradients.log[-1] == "tied ['tie']"
        if is_fine:
            stage.finish()
        else:
            with pytest.raises(RuntimeFailure, match="step before reduce_data and reduce_tied"):
                stage.finish()
            gradients.value = 0.0
            stage.finish()  # no loss has reached the stage


def test_sums_of_a_mini_batch_begin_anew_with_the_next() -> None:
    gradients = Gradients(1.0)
    reductions = stage_of(0, gradients, Updater(), degree=2, tensor=3, ties=True)
    reductions.accumulate()
    with pytest.raises(RuntimeFailure, match="reduce_tied before reduce_data"):
        reductions.prepare_tied()
    reductions.reduce_data()
    reductions.accumulate()  # another micro-batch, which ZeRO 2 reduces by itself
    reductions.reduce_data()
    reductions.prepare_tied()
    assert [s.brought.tolist() for s in reductions.bring_tied(["tie"], shared_out=True)] == [[2.0]]
    reductions.finish()
    once = ["accumulate", "data", "accumulate", "data", "tensor group", "tied ['tie']"]
    assert gradients.log == once and not reductions.lacks_tied
    reductions.clear()
    gradients.log.clear()
    assert reductions.lacks_tied
    reductions.reduce_data()
    reductions.sum_tensor()
    assert gradients.log == ["data", "tensor group"]


def test_the_loss_of_a_batch_is_a_mean_by_samples_or_a_sum() -> None:
    losses = [(torch.tensor(1.0), 1), (torch.tensor([5.0]), 3)]
    assert share_of_loss(losses, 8, is_sum=False) == 2.0 and share_of_loss(losses, 8, is_sum=True) == 6.0
    assert share_of_loss([], 8, is_sum=False) == 0.0


def test_gradients_are_kept_of_all_stages_that_stepped_alone() -> None:
    """Mode async: each stage of a rank steps by itself; asked for are those of the whole rank."""

    held = iter([30, 4] + [20, 4] * 3)

    def stage(index: int, name: str) -> Any:
        return SimpleNamespace(
            stage_index=index,
            gradients=SimpleNamespace(held_bytes=lambda: next(held)),
            full_gradients=lambda: {name: torch.ones(1)},
        )

    rank = RankEngine.__new__(RankEngine)
    rank.stages, rank.gradients = (stage(0, "first"), stage(2, "second")), None
    rank.measures_gradients, rank.gradient_bytes = True, 0
    rank._rule = mock.create_autospec(StepAlone, instance=True)
    rank._rule.step.side_effect = lambda stage: f"{stage} stepped"  # type: ignore[attr-defined]
    for keeps, kept in ((False, None), (True, {"first", "second"})):
        rank.keeps_gradients = keeps
        assert [rank.step(stage) for stage in (0, 2)] == ["0 stepped", "2 stepped"]
        assert (rank.gradients and set(rank.gradients)) == kept
    rank._rule = mock.create_autospec(StepTogether, instance=True)
    rank.gradients = {"old": torch.ones(1)}
    rank.measures_gradients = False
    rank.step()
    assert set(rank.gradients) == {"first", "second"}, "all, of this step alone"
    assert rank.gradient_bytes == 34 and next(held, None) is None, "the most of all stages, of measured steps"
