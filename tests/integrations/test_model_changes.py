"""Modes, writes, flags, attributes and hooks of the user's model: honoured as in one process, or refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.engine_jobs import config_of, make_engine, said_of
from tests.ranks import run_kept_ranks
from tests.reference import train_reference

RATE = 0.1
PLAN = {"stages": [{"modules": ["tower"], "ranks": [0]}, {"modules": ["*"], "ranks": [1]}]}
ON_BOTH: dict[str, Any] = {
    "block": {"plan": {"stages": [{"modules": ["*"], "ranks": [0, 1]}]}},
    "train_micro_batch_size_per_gpu": 4,
}
"""One stage on two ranks."""


class Changed(nn.Module):
    """A tower with BatchNorm and dropout, a temperature, a buffer and attributes that its forward reads, or not."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 16), norm(16), nn.Dropout(0.0), nn.Linear(16, 4))
        self.head = nn.Linear(6, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("weight", torch.ones(()))
        self.beta, self.epoch, self.seen = 1.0, 0, []

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return a scaled squared error."""
        error = (self.tower(x) - self.head(y)).square().mean()
        return {"loss": self.beta * self.weight * self.logit_scale * error}


def changed(norm: type[nn.Module] = nn.BatchNorm1d) -> Changed:
    torch.manual_seed(0)
    return Changed(norm)


def batch_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 8, generator=generator), "y": torch.randn(8, 6, generator=generator)}


def engine_of(model: nn.Module, **changes: Any) -> Any:
    sizes = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": changes.pop("train_micro_batch_size_per_gpu", 8),
    }
    optimizer = {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9, "weight_decay": 0.01}}
    block = {"plan": PLAN, **changes.pop("block", {})}
    more = {"zero_allow_untested_optimizer": True, **changes}
    return make_engine(model, batch_of(0), config_of(**sizes, optimizer=optimizer, block=block, **more))


# ---- what is honoured: the same calls on the pipeline's model and on the one process's -------------------------


def clamp(model: Changed) -> None:
    model.logit_scale.data.clamp_(max=0.9)


def clip_without_data(model: Changed) -> None:
    with torch.no_grad():
        for parameter in model.tower.parameters():
            parameter.clamp_(-0.2, 0.2)


def assign_data(model: Changed) -> None:
    if not model.head.weight.is_meta:  # this rank owns it
        model.head.weight.data = model.head.weight.data * 0.5


def fill_buffer(model: Changed) -> None:
    model.weight.fill_(0.5)


def assign_buffer(model: Changed) -> None:
    model.weight = torch.tensor(2.0)


def freeze(model: Changed) -> None:
    model.tower[0].requires_grad_(False)


def thaw(model: Changed) -> None:
    model.tower[0].requires_grad_(True)


def hook(model: Changed) -> None:
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def take_notes(model: Changed) -> None:
    model.epoch += 1
    model.seen.append(model.epoch)
    model.head.eval()  # which has no mode


HONOURED: tuple[Callable[[Changed], None], ...] = (
    clamp, clip_without_data, assign_data, fill_buffer, freeze, take_notes, thaw, assign_buffer, clamp, hook
)  # fmt: skip


def clamp_without_data(model: Changed) -> None:
    with torch.no_grad():
        model.logit_scale.clamp_(max=0.8)


def assign_scale(model: Changed) -> None:
    model.logit_scale.data = torch.tensor(0.7)


def change_what_is_in_parts() -> dict[str, Any]:
    """Write to parameters of which each of two ranks holds a part (ZeRO 3): a temperature, and larger ones."""
    model = changed(nn.LayerNorm)  # BatchNorm's statistics would stay in fp32, which CPUs refuse
    engine, answer = change_between_steps(
        model,
        (clamp, clamp_without_data, assign_scale, clamp),
        zero_optimization={"stage": 3},
        bf16={"enabled": True},
        **ON_BOTH,
    )
    before, told = engine.gather_state_dict(), {}
    for name in ("head.weight", "tower.0.bias"):
        parameter = dict(engine.named_parameters())[name]
        parameter.data.fill_(1.0)
        told[name] = said_of(functools.partial(train_one, engine))
        with engine.gathered_parameters(), torch.no_grad():
            parameter.mul_(0.5)
        told[f"{name} as advised"] = engine.gather_state_dict()
    parameter = dict(engine.named_parameters())["head.weight"]
    parameter.data[0, 0].mul_(0.5)
    told["one element"] = said_of(functools.partial(train_one, engine))
    with engine.gathered_parameters(), torch.no_grad():
        parameter.mul_(0.5)
    train_one(engine)
    return {**answer, "told": told, "before": before}


def train_one(engine: Any) -> float:
    return float(engine.train_batch(iter([batch_of(0)])))


def change_between_steps(
    model: Changed,
    changes: Sequence[Callable[[Changed], object]],
    *,
    evaluates: bool = False,
    **config: Any,
) -> tuple[Any, dict[str, Any]]:
    """Train while each change is made before a step; return the engine, losses and weights, and one process's."""
    alone = copy.deepcopy(model)
    engine = engine_of(model, **config)
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE, momentum=0.9, weight_decay=0.01)
    losses, wanted = [], []
    for step, change in enumerate((lambda model: None, *changes, lambda model: None)):
        change(model)
        change(alone)
        losses.append(float(engine.train_batch(iter([batch_of(step)]))))
        if evaluates:
            engine.eval_batch(iter([batch_of(step)]))
        optimizer.zero_grad()
        loss = alone(**batch_of(step))["loss"]
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    modes = [[module.training for module in each.modules()] for each in (model, alone)]
    return engine, {
        "losses": losses,
        "wanted": wanted,
        "same modes": modes[0] == modes[1],
        "weights": engine.gather_state_dict(),
        "state": {name: tensor.clone() for name, tensor in alone.state_dict().items()},
    }


def honour(config: dict[str, Any]) -> dict[str, Any]:
    """Make all changes that are honoured, between steps."""
    model = changed(nn.LayerNorm if "bf16" in config else nn.BatchNorm1d)
    return change_between_steps(model, HONOURED, **config)[1]


def hook_as_advised() -> dict[str, str]:
    """Try a hook on a parameter under ZeRO 2 on two ranks, and do as its refusal says."""

    def try_stage(stage: int) -> None:
        model = changed()
        model.head.weight.register_hook(lambda gradient: 0.5 * gradient)
        train_one(engine_of(model, zero_optimization={"stage": stage}, **ON_BOTH))

    return {f"ZeRO {stage}": said_of(functools.partial(try_stage, stage)) for stage in (2, 0)}


def save_what_is_written(directory: str) -> dict[str, Any]:
    """Write to the model behind a step, and save a checkpoint, a state dict and an export before the next one."""
    model = changed(nn.LayerNorm)
    engine = engine_of(model, bf16={"enabled": True}, zero_optimization={"stage": 1})
    engine.train_batch(iter([batch_of(0)]))
    clamp(model)
    assign_data(model)
    assign_buffer(model)
    engine.save_checkpoint(directory)
    saved = engine.gather_state_dict()
    engine.train_batch(iter([batch_of(1)]))
    again = engine_of(changed(nn.LayerNorm), bf16={"enabled": True}, zero_optimization={"stage": 1})
    again.load_checkpoint(directory)
    return {"saved": saved, "loaded": again.gather_state_dict()}


# ---- modes that were set before the start ----------------------------------------------------------------------


def modes_before_start() -> dict[str, Any]:
    """Train with a frozen tower in eval mode, evaluate in between; the same in one process."""
    model = changed()
    with torch.no_grad():
        model.tower[1].running_mean.normal_()
    model.tower[2].p = 0.5
    model.tower.requires_grad_(False).eval()
    return change_between_steps(model, [id], evaluates=True, block={"verify": True})[1]


# ---- what is refused, and what its advice leads to -------------------------------------------------------------


def refusals() -> dict[str, Any]:
    """Try changes that stages cannot follow, undo each as its error says, and train on."""
    model = changed()
    model.head.bias.requires_grad_(False)
    engine = engine_of(model)
    told: dict[str, str] = {}
    handles = []

    def attempt(name: str, change: Callable[[], Any], undo: Callable[[], Any]) -> None:
        change()
        told[name] = said_of(functools.partial(train_one, engine))
        undo()
        train_one(engine)  # goes on when it is undone

    def set_to(owner: Any, name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(owner, name, value)

    attempt("attribute", set_to(model, "beta", 5.0), set_to(model, "beta", 1.0))
    attempt("all modes", model.eval, model.train)
    own = Changed.forward
    attempt("class", set_to(Changed, "forward", lambda model, x, y: {}), set_to(Changed, "forward", own))
    for name, register in (
        ("hook of all", nn.modules.module.register_module_forward_hook),
        ("hook", model.tower[0].register_forward_hook),
    ):
        add = functools.partial(lambda register: handles.append(register(lambda *given: None)), register)
        attempt(name, add, lambda: handles.pop().remove())
    told["rank"] = "" if model.head.bias.is_meta else "owns the bias"
    bias = model.head.bias
    attempt("thawed", lambda: bias.requires_grad_(True), lambda: bias.requires_grad_(False))
    told["shell"] = said_of(lambda: engine.module.register_forward_hook(print))
    told["engine"] = said_of(lambda: engine.register_forward_hook(print))
    return told


def hooks_before_start() -> dict[str, Any]:
    """Count the calls of hooks that were there before; an activation and a gradient that they saw in the last step."""
    model = changed()
    seen: dict[str, list[Tensor]] = {"forward": [], "backward": []}
    model.tower[3].register_forward_hook(
        lambda module, given, made: seen["forward"].append(made.detach().clone())
    )
    model.tower[3].register_full_backward_hook(
        lambda module, inner, outer: seen["backward"].append(outer[0].detach().clone())
    )
    alone = copy.deepcopy(model)
    engine = engine_of(model)
    at_start = {name: len(calls) for name, calls in seen.items()}
    loss = float(engine.train_batch(iter([batch_of(0)])))
    calls = {name: len(of) - at_start[name] for name, of in seen.items()}
    last = {name: of[-1] for name, of in seen.items() if of}
    for of in seen.values():
        of.clear()
    wanted = alone(**batch_of(0))["loss"]
    wanted.backward()
    return {
        "loss": loss,
        "wanted": wanted.item(),
        "at start": at_start,
        "calls": calls,
        "last": last,
        "should": {name: of[-1] for name, of in seen.items()},
    }


# ---- a step of two loss units ----------------------------------------------------------------------------------


class Tempered(nn.Module):
    """Two layers, and a temperature without an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor, tau: Tensor) -> dict[str, Tensor]:
        """Return a squared error."""
        return {"loss": (self.head(torch.tanh(self.tower(x)) / tau) - y).square().mean()}


def unit_of(number: int) -> dict[str, Tensor]:
    return {**{key: value[:4] for key, value in batch_of(number).items()}, "tau": torch.tensor(1.0 + number)}


def two_units() -> dict[str, Any]:
    """Train on two units a step with a mask of a gradient; say what is refused instead, and one process's results."""
    mask = (torch.arange(8) % 2).float()

    def made(hook: Callable[[Tensor], Tensor]) -> Tempered:
        torch.manual_seed(0)
        model = Tempered()
        model.tower.weight.register_hook(hook)
        return model

    def engine_with(hook: Callable[[Tensor], Tensor], **block: Any) -> Any:
        optimizer = {"type": "SGD", "params": {"lr": RATE}}
        sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
        return make_engine(
            made(hook), unit_of(0), config_of(**sizes, optimizer=optimizer, block={"plan": PLAN, **block})
        )

    told = {
        "clamp": said_of(lambda: engine_with(lambda gradient: gradient.clamp(-1e-3, 1e-3), units=2)),
        "axis": said_of(lambda: engine_with(lambda gradient: gradient * mask)),
    }
    engine = engine_with(lambda gradient: gradient * mask, units=2)
    steps = [[unit_of(2 * step), unit_of(2 * step + 1)] for step in range(2)]

    def alone_with_hook(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        parameters[0].register_hook(
            lambda gradient: gradient * mask
        )  # the tower's weight: a copy has no hooks
        return torch.optim.SGD(parameters, lr=RATE)

    alone = train_reference(made(lambda gradient: gradient), steps, make_optimizer=alone_with_hook)
    return {
        "told": told,
        "losses": [float(engine.train_batch(iter(units))) for units in steps],
        "wanted": alone.losses,
        "weights": engine.gather_state_dict(),
        "state": dict(alone.model.state_dict()),
    }


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "ZeRO 3": {"zero_optimization": {"stage": 3}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, ZeRO 2": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_changes_between_steps_are_those_of_one_process(name: str) -> None:
    first, second = run_kept_ranks(honour, 2, PRECISIONS[name])
    tolerance = 3e-2 if "bf16" in name else 1e-5
    assert first["losses"] == second["losses"] == pytest.approx(first["wanted"], rel=tolerance)
    for key, tensor in first["state"].items():
        found = first["weights"][key].to(tensor.dtype)
        assert torch.allclose(found, tensor, rtol=tolerance, atol=tolerance), key


def test_what_is_written_to_parameters_in_parts_is_taken_or_refused_by_name() -> None:
    first, second = run_kept_ranks(change_what_is_in_parts, 2)
    assert first["losses"] == second["losses"] == pytest.approx(first["wanted"], rel=3e-2)
    found, wanted = (float(first[key]["logit_scale"]) for key in ("weights", "state"))
    assert found == pytest.approx(wanted, rel=1e-2)
    for told in (first["told"], second["told"]):
        for name in ("head.weight", "tower.0.bias"):
            assert f"{name} was written to" in told[name], told[name]
        assert "was written to" in told["one element"]
    expected = 0.5 * first["before"]["head.weight"]
    assert torch.equal(first["told"]["head.weight as advised"]["head.weight"], expected)


def test_what_is_written_before_a_checkpoint_is_in_it(tmp_path: Path) -> None:
    first, _ = run_kept_ranks(save_what_is_written, 2, str(tmp_path))
    assert float(first["saved"]["logit_scale"]) <= 0.9 and float(first["saved"]["weight"]) == 2.0
    for name, tensor in first["saved"].items():
        assert torch.equal(first["loaded"][name], tensor), name


def test_a_hook_on_a_parameter_in_parts_trains_as_its_refusal_says() -> None:
    for told in run_kept_ranks(hook_as_advised, 2):
        assert "set zero_optimization.stage to 0" in told["ZeRO 2"]
        assert told["ZeRO 0"] == ""


def test_modes_that_were_set_before_the_start_stay() -> None:
    first, _ = run_kept_ranks(modes_before_start, 2)
    assert first["losses"] == pytest.approx(first["wanted"], rel=1e-5)
    assert first["same modes"]
    for key, tensor in first["state"].items():
        assert torch.allclose(first["weights"][key], tensor, atol=1e-5), key


def test_what_cannot_be_followed_is_refused_by_name_until_it_is_undone() -> None:
    for told in run_kept_ranks(refusals, 2):
        assert "beta is 5.0, and was 1.0" in told["attribute"]
        assert "the model is in eval mode" in told["all modes"] and "train()" in told["all modes"]
        assert "Changed.forward is" in told["class"]
        assert "hooks on all modules were registered" in told["hook of all"]
        assert "hooks on tower.0" in told["hook"] and "handle.remove()" in told["hook"]
        thawed = (
            "head.bias takes a gradient now"
            if told["rank"]
            else "rank 1 has no mini-batch, and nothing of it has run: "
        )
        assert thawed in told["thawed"]
        assert "before deepspeed.initialize" in told["shell"]
        assert "before deepspeed.initialize" in told["engine"]


def test_hooks_that_were_there_before_are_called() -> None:
    ranks = run_kept_ranks(hooks_before_start, 2)
    owner = ranks[0]
    assert owner["loss"] == pytest.approx(owner["wanted"], rel=1e-5)
    assert owner["calls"] == {"forward": 1, "backward": 1}
    assert owner["at start"]["forward"] < 10, "not while it is timed"
    for name, tensor in owner["should"].items():
        assert torch.allclose(owner["last"][name], tensor, atol=1e-6), name


def test_hooks_that_add_up_and_numbers_without_an_axis_train_over_several_units() -> None:
    ranks = run_kept_ranks(two_units, 2)
    for rank in ranks:
        assert (
            '"units": 2' in rank["told"]["axis"]
            and "'tau' is a tensor without an axis" in rank["told"]["axis"]
        )
    assert "tower.weight has a hook" in ranks[0]["told"]["clamp"] and ranks[1]["told"]["clamp"]
    first = ranks[0]
    assert first["losses"] == pytest.approx(first["wanted"], rel=1e-5)
    for key, tensor in first["state"].items():
        assert torch.allclose(first["weights"][key], tensor, atol=1e-6), key
