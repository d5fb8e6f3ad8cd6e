"""What users change on a model before and between steps, as ranks try it out beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.errors import GppError
from tests.integrations.engine_jobs import config_of, make_engine

RATE = 0.1
PLAN = {"stages": [{"modules": ["tower"], "ranks": [0]}, {"modules": ["*"], "ranks": [1]}]}


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


def _owns(parameter: Tensor) -> bool:
    return not parameter.is_meta


# ---- what is honoured: the same calls on the pipeline's model and on the one process's -------------------------


def clamp(model: Changed) -> None:
    model.logit_scale.data.clamp_(max=0.9)


def clip_without_data(model: Changed) -> None:
    with torch.no_grad():
        for parameter in model.tower.parameters():
            parameter.clamp_(-0.2, 0.2)


def assign_data(model: Changed) -> None:
    if _owns(model.head.weight):
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
    answer = change_between_steps(
        (clamp, clamp_without_data, assign_scale, clamp),
        block={"plan": {"stages": [{"modules": ["*"], "ranks": [0, 1]}]}},
        train_micro_batch_size_per_gpu=4,
        zero_optimization={"stage": 3},
        bf16={"enabled": True},
    )
    engine, told = answer.pop("engine"), {}
    before = engine.gather_state_dict()

    def attempt(name: str, parameter: Tensor) -> None:
        try:
            engine.train_batch(iter([batch_of(0)]))
            told[name] = "trained"
        except GppError as error:
            told[name] = str(error)
        with engine.gathered_parameters(), torch.no_grad():
            parameter.mul_(0.5)
        told[f"{name} as advised"] = engine.gather_state_dict()

    for name in ("head.weight", "tower.0.bias"):
        parameter = dict(engine.named_parameters())[name]
        parameter.data.fill_(1.0)
        attempt(name, parameter)
    engine.train_batch(iter([batch_of(0)]))
    return {**answer, "told": told, "before": before}


def change_between_steps(
    changes: Sequence[Callable[[Changed], None]] = HONOURED, **config: Any
) -> dict[str, Any]:
    """Train while each change is made before a step; return losses and weights, and those of one process."""
    norm = (
        nn.LayerNorm if "bf16" in config else nn.BatchNorm1d
    )  # whose statistics stay in fp32, which CPUs refuse
    model, alone = changed(norm), changed(norm)
    engine = engine_of(model, **config)
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE, momentum=0.9, weight_decay=0.01)
    losses, wanted = [], []
    for step, change in enumerate((lambda model: None, *changes, lambda model: None)):
        change(model)
        change(alone)
        losses.append(float(engine.train_batch(iter([batch_of(step)]))))
        optimizer.zero_grad()
        loss = alone(**batch_of(step))["loss"]
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    return {
        "engine": engine,
        "losses": losses,
        "wanted": wanted,
        "weights": engine.gather_state_dict(),
        "state": {name: tensor.clone() for name, tensor in alone.state_dict().items()},
    }


# ---- modes that were set before the start ----------------------------------------------------------------------


def modes_before_start() -> dict[str, Any]:
    """Train with a frozen tower in eval mode, evaluate in between; the same in one process."""
    model = changed()
    with torch.no_grad():
        model.tower[1].running_mean.normal_()
    model.tower[2].p = 0.5
    model.tower.requires_grad_(False).eval()
    alone = copy.deepcopy(model)
    engine = engine_of(model, block={"verify": True})
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE, momentum=0.9, weight_decay=0.01)
    losses, wanted = [], []
    for step in range(3):
        losses.append(float(engine.train_batch(iter([batch_of(step)]))))
        engine.eval_batch(iter([batch_of(step)]))
        optimizer.zero_grad()
        loss = alone(**batch_of(step))["loss"]
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    modes = {name: module.training for name, module in model.named_modules()}
    return {
        "losses": losses,
        "wanted": wanted,
        "modes": modes,
        "were": {name: module.training for name, module in alone.named_modules()},
        "weights": engine.gather_state_dict(),
        "state": dict(alone.state_dict()),
    }


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
        try:
            engine.train_batch(iter([batch_of(0)]))
            told[name] = "trained"
        except GppError as error:
            told[name] = str(error)
        undo()
        engine.train_batch(iter([batch_of(0)]))  # goes on when it is undone

    def set_to(owner: Any, name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(owner, name, value)

    attempt("attribute", set_to(model, "beta", 5.0), set_to(model, "beta", 1.0))
    attempt("dropout", set_to(model.tower[2], "p", 0.5), set_to(model.tower[2], "p", 0.0))
    attempt("mode", model.tower[1].eval, model.tower[1].train)
    attempt(
        "hook",
        lambda: handles.append(model.tower[0].register_forward_hook(lambda *given: None)),
        lambda: handles.pop().remove(),
    )
    if not model.head.bias.is_meta:
        told["rank"] = "owns the bias"
    attempt(
        "thawed",
        lambda: model.head.bias.requires_grad_(True),
        lambda: model.head.bias.requires_grad_(False),
    )
    try:
        engine.module.register_forward_hook(lambda *given: None)
    except GppError as error:
        told["shell"] = str(error)
    try:
        engine.register_forward_hook(lambda *given: None)
    except AttributeError as error:
        told["engine"] = str(error)
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

    told = {}
    for name, hook, block in (
        ("clamp", lambda gradient: gradient.clamp(-1e-3, 1e-3), {"units": 2}),
        ("axis", lambda gradient: gradient * mask, {}),
    ):
        try:
            engine_with(hook, **block)
        except GppError as error:
            told[name] = str(error)
    engine, alone = (
        engine_with(lambda gradient: gradient * mask, units=2),
        made(lambda gradient: gradient * mask),
    )
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
    losses, wanted = [], []
    for step in range(2):
        units = [unit_of(2 * step), unit_of(2 * step + 1)]
        losses.append(float(engine.train_batch(iter(units))))
        optimizer.zero_grad()
        each = [alone(**unit)["loss"] / 2 for unit in units]
        for loss in each:
            loss.backward()
        optimizer.step()
        wanted.append(sum(loss.item() for loss in each))
    return {
        "told": told,
        "losses": losses,
        "wanted": wanted,
        "weights": engine.gather_state_dict(),
        "state": dict(alone.state_dict()),
    }
