"""A framework of a few lines, plain torch's SGD: what the engine asks of one, and a job that trains with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.engine.checkpoints.optimizer_pieces import (
    Fragment,
    OptimizerPieces,
    check_saved,
    optimizer_pieces,
    restore_optimizer,
    whole_fragment,
)
from gpp_plugin.engine.checkpoints.saved_tensors import StageOptimizerState
from gpp_plugin.engine.framework import StepSettings
from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build

RATE = 0.05


def nothing(*args: Any, **given: Any) -> None:
    """Do nothing: what plain SGD does not need."""


@dataclass(frozen=True, kw_only=True)
class Settings(StepSettings):
    dtype: str = "float32"
    accumulation_dtype: str = "float32"
    communication_dtype: str | None = None
    bucket_elements: int = 1000
    zero_stage: int = 0
    gradient_clipping: float = 0.5
    check_overflow: bool = True


class PlainOptimizer:
    """`WeightUpdater` without masters, schedule or loss scale."""

    versions: Mapping[str, str] = {"plain": "1"}
    config = Settings()
    layout = ()
    norm_precision = torch.float64
    lr_scheduler = None
    loss_scale = 1.0
    require = advance_rates = refresh_masters = written = adopt_written = publish_to = nothing
    load_shared_state = check_shared_state = close = nothing

    def __init__(self, module: nn.Module) -> None:
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        stepped = list(self.trained.values()) or [nn.Parameter(torch.zeros(1))]
        self.optimizer = torch.optim.SGD(stepped, lr=RATE)
        self.counted: tuple[int, int] = (0, 0)

    def apply(self, gradients: Any, *, coefficient: float, resting: Any) -> None:
        for name, parameter in self.trained.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient * coefficient
        self.optimizer.step()

    def rates(self) -> tuple[float, ...]:
        return (RATE,)

    def count(self, counters: Any, *, overflow: bool) -> None:
        self.counted = (counters.global_steps, counters.global_samples)

    def places(self, parameters: Sequence[nn.Parameter]) -> Any:
        from gpp_plugin.runtime.weight_versions import ParameterPlaces

        return ParameterPlaces(parameters)

    def master(self, name: str) -> Tensor:
        return self.trained[name].detach().clone()

    def flat_weights(self) -> tuple[Any, ...]:
        return ()

    def own_tensors(self) -> list[Tensor]:
        return list(self.trained.values())

    @property
    def fragments(self) -> dict[str, Fragment]:
        return {name: whole_fragment(parameter) for name, parameter in self.trained.items()}

    def pieces(self, foreign: Collection[str]) -> OptimizerPieces:
        return optimizer_pieces(self.optimizer, self.fragments, has_masters=False, foreign=foreign)

    def spans(self) -> dict[str, list[tuple[int, int]]]:
        return {name: [(0, parameter.numel())] for name, parameter in self.trained.items()}

    def check_saved(self, saved: StageOptimizerState) -> None:
        check_saved(self.optimizer, self.fragments, saved)

    def restore(self, saved: StageOptimizerState) -> None:
        restore_optimizer(self.optimizer, self.fragments, saved)

    def shared_state(self) -> dict[str, Any]:
        return {}


class PlainFramework:
    name = "plain torch"
    enabled = True
    check_shared_out = check_transport = nothing

    def __init__(self, ds_config: Mapping[str, Any], **given: Any) -> None:
        self.events: list[tuple[str, float, int]] = []

    def make_optimizer(self, module: nn.Module, replica: Any) -> PlainOptimizer:
        return PlainOptimizer(module)

    def make_monitor(self) -> PlainFramework:
        return self

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        self.events += event_list

    def make_transport(self, native: Any, *args: Any, **given: Any) -> Any:
        return native


def train_without_deepspeed(mode: str, directory: str) -> dict[str, Any]:
    """Train with the plain framework in DeepSpeed's place; go back to a checkpoint half-way, and train on."""
    from gpp_plugin.integrations.deepspeed import dispatch as entry

    made: list[PlainFramework] = []

    def make_framework(*args: Any, **given: Any) -> PlainFramework:
        made.append(PlainFramework(*args, **given))
        return made[0]

    entry.DeepSpeedFramework = make_framework  # type: ignore[assignment,misc]
    model, make_batch = build("two_branch")
    batches = [make_batch(B, seed) for seed in range(4)]
    engine = make_engine(model, batches[0], config_of(block={"mode": mode, "stages": 2}))
    losses = steps(engine, batches[:2])
    engine.save_checkpoint(Path(directory) / mode, tag="half")
    before = steps(engine, batches[2:])
    engine.load_checkpoint(Path(directory) / mode, tag="half")
    return {
        "losses": losses + before,
        "again": steps(engine, batches[2:]),
        "flushed": engine.flush(),
        "staleness": engine.staleness,
        "norm": engine.get_global_grad_norm(),
        "counted": (engine.global_steps, engine.global_samples),
        "events": made[0].events,
        "rule": type(engine.stage_engine.optimizer).__name__,
        "names": [stage.name for stage in engine.plan.stages],
    }
