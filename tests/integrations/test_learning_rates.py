"""Parameter groups and schedules of the whole model on a stage that holds a part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpp_plugin.errors import CheckpointError, ConfigError
from gpp_plugin.integrations.deepspeed.dispatch import DeepSpeedFramework, _scheduler_of
from gpp_plugin.integrations.deepspeed.learning_rates import (
    LearningRates,
    StageParameterGroups,
    optimizer_of_whole_weights,
)


def make_parameters(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(2)) for name in names}


def make_rates(groups, *, optimizer_block=None, scheduler_block=None, **options) -> LearningRates:
    return LearningRates(groups, {"optimizer": optimizer_block, "scheduler": scheduler_block}, **options)


GROUPS = [{"params": ["a", "b"], "weight_decay": 0.0}, {"params": ["c"]}, {"params": ["d", "e"], "lr": 0.5}]
ADAMW = {"type": "AdamW", "params": {"lr": 0.1, "betas": (0.8, 0.9)}}


def test_a_stage_keeps_its_own_names_in_the_models_order() -> None:
    parameters = make_parameters("e", "b", "d")
    groups = StageParameterGroups(parameters, GROUPS)
    assert groups.names() == ["b", "d", "e"]
    assert groups.local == [0, 2]
    made = groups.optimizer_input(parameters)
    assert [set(group) for group in made] == [{"params", "weight_decay"}, {"params", "lr"}]
    assert made[1]["params"][0] is parameters["d"]
    assert len(groups.placeholder_input()) == 3


def test_a_second_name_of_one_parameter_counts_once() -> None:
    shared = nn.Parameter(torch.zeros(2))
    groups = StageParameterGroups({"a": shared, "b": shared}, GROUPS)
    assert groups.names() == ["a"]
    with pytest.raises(ConfigError, match="in the groups 0 and 1; name it once"):
        StageParameterGroups({"a": shared, "c": shared}, GROUPS)


def test_what_a_block_cannot_make_is_refused_before_anything_is_captured() -> None:
    """The first optimizer of a stage found it out, after the capture."""
    wrong: list[tuple[str, str, dict[str, Any], str]] = [
        ("optimizer", "AdmaW", {"lr": 1e-3}, "optimizer.type: 'AdmaW' .*'AdamW'"),
        ("scheduler", "WarmupLRR", {}, "scheduler.type: .*'WarmupLR'"),
        ("scheduler", "WarmupLR", {"warm": 1}, "scheduler.params: .*WarmupLR"),
    ]
    for key, kind, params, line in wrong:
        with pytest.raises(ConfigError, match=line):
            DeepSpeedFramework({"optimizer": ADAMW, key: {"type": kind, "params": params}})
    # what the call gives counts, not the block
    DeepSpeedFramework({"optimizer": {"type": "AdmaW"}}, optimizer=torch.optim.SGD)


def test_a_scheduler_class_is_a_callable_like_others() -> None:
    """It was called "a type, bound to an optimizer"."""
    constant, step = torch.optim.lr_scheduler.ConstantLR, torch.optim.lr_scheduler.StepLR
    assert _scheduler_of({"lr_scheduler": constant}) is constant
    groups = StageParameterGroups({}, None)
    assert isinstance(make_rates(groups, optimizer_block=ADAMW, scheduler=constant).scheduler, constant)
    with pytest.raises(
        ConfigError, match=r"lr_scheduler: StepLR\(optimizer\) fails: .*step_size.*functools.partial"
    ):
        make_rates(groups, optimizer_block=ADAMW, scheduler=step)
    bound = constant(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    with pytest.raises(ConfigError, match="lr_scheduler is a ConstantLR, bound to an optimizer"):
        _scheduler_of({"lr_scheduler": bound})


def test_groups_must_hold_names() -> None:
    with pytest.raises(ConfigError, match="parameter group 0: 'params' must list parameter names"):
        StageParameterGroups({}, [{"params": [torch.zeros(1)]}])


def test_rates_of_all_groups_on_a_stage_that_trains_nothing() -> None:
    rates = make_rates(StageParameterGroups({}, GROUPS), optimizer_block=ADAMW)
    assert rates.current(None) == (0.1, 0.1, 0.5)
    rates.step()
    assert rates.current(None) == (0.1, 0.1, 0.5)


def test_a_schedule_reaches_the_stages_groups_by_their_place_in_the_model() -> None:
    parameters = make_parameters("b", "d")
    groups = StageParameterGroups(parameters, GROUPS)
    block = {"type": "OneCycleLR", "params": {"max_lr": [1.0, 2.0, 3.0], "total_steps": 10}}
    rates = make_rates(groups, optimizer_block=ADAMW, scheduler_block=block)
    own = torch.optim.AdamW(groups.optimizer_input(parameters), lr=0.1)
    rates.publish(own)
    for _ in range(4):
        rates.step()
        rates.publish(own)
        mirrored = [rates.mirror.param_groups[index] for index in (0, 2)]
        for group, expected in zip(own.param_groups, mirrored, strict=True):
            for key in ("lr", "betas"):  # it cycles momentum too
                assert group[key] == expected[key]
    assert own.param_groups[1]["lr"] == pytest.approx(3 * own.param_groups[0]["lr"])
    assert own.param_groups[0]["weight_decay"] == 0.0


def test_rates_the_user_sets_by_hand_stay_without_a_schedule() -> None:
    parameters = make_parameters("c")
    groups = StageParameterGroups(parameters, GROUPS)
    rates = make_rates(groups, optimizer_block=ADAMW)
    own = torch.optim.AdamW(groups.optimizer_input(parameters), lr=0.1)
    own.param_groups[0]["lr"] = 0.7
    rates.step()
    rates.publish(own)
    assert rates.current(own) == (0.1, 0.7, 0.5)


def test_state_round_trip() -> None:
    block = {"type": "StepLR", "params": {"step_size": 2}}
    first, second = (
        make_rates(StageParameterGroups({}, GROUPS), optimizer_block=ADAMW, scheduler_block=block)
        for _ in range(2)
    )
    for _ in range(3):
        first.step()
    second.load_state_dict(first.state_dict())
    assert second.current(None) == first.current(None) == pytest.approx((0.01, 0.01, 0.05))
    first.step()
    second.step()
    assert second.current(None) == first.current(None) == pytest.approx((0.001, 0.001, 0.005))
    second.check(first.state_dict())
    with pytest.raises(
        CheckpointError, match="3 parameter groups and a scheduler; the configuration has 1 and no"
    ):
        make_rates(StageParameterGroups({}, None), optimizer_block=ADAMW).check(first.state_dict())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer_block": {"type": "AdamW", "params": {"lr": -1.0}}}, "optimizer.params: "),
        ({"optimizer": lambda groups: None}, "optimizer: the callable returned NoneType"),
        ({"scheduler_block": {"type": "StepLR", "params": {}}}, "scheduler.params: "),
        ({"scheduler": lambda optimizer: 3}, "lr_scheduler: the callable returned int"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_rates(StageParameterGroups({}, GROUPS), **options)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("optimizer", "block", "found"),
    [
        (None, {"type": "Lamb"}, "Lamb"),
        (None, ADAMW, None),
        (torch.optim.Adafactor, None, "Adafactor"),
        (lambda parameters: type("Mine", (torch.optim.Adafactor,), {})(parameters), None, "Mine"),
        (torch.optim.AdamW, {"type": "Lamb"}, None),
    ],
)
def test_optimizers_of_whole_weights_are_known(optimizer: Any, block: Any, found: str | None) -> None:
    for groups in (None, GROUPS):
        assert optimizer_of_whole_weights(optimizer, block, groups) == found


def test_an_optimizer_of_whole_weights_is_refused_where_tensor_ranks_hold_parts() -> None:
    framework = DeepSpeedFramework({"optimizer": {"type": "Lamb"}})
    plan: Any = SimpleNamespace(stages=[SimpleNamespace(name="all", tensor=1)])
    framework.check_shared_out(plan)
    plan.stages.append(SimpleNamespace(name="tail", tensor=2))
    DeepSpeedFramework({"optimizer": ADAMW}).check_shared_out(plan)
    with pytest.raises(ConfigError, match="optimizer Lamb .* 2 tensor ranks of stage 'tail' .* to 1"):
        framework.check_shared_out(plan)
