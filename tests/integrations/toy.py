"""A toy graph of three stages with known gradients, and one process that trains the same numbers.

front (ranks 0, 1)  embed.weight (tied), scale (no dimensions), layer.*, frozen.weight
middle (rank 2)     nothing, or frozen.weight only
head (rank 3)       embed.weight (tied), norm.weight, out.*
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.engine.rank_engine import RankEngine, StageEngine
from gpp_plugin.engine.stage_groups import StageGroups, TiedParameter
from gpp_plugin.integrations.deepspeed.stage_optimizer import FRAMEWORK, DeepSpeedOptimizer
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (7, 5),
    "scale": (),
    "layer.weight": (5, 5),
    "layer.bias": (5,),
    "norm.weight": (5,),
    "out.weight": (3, 5),
    "out.bias": (3,),
}
FROZEN = {"frozen.weight": (4, 2), "middle.frozen.weight": (2, 2)}
STAGE_NAMES = (
    ("embed.weight", "scale", "layer.weight", "layer.bias", "frozen.weight"),
    (),
    ("embed.weight", "norm.weight", "out.weight", "out.bias"),
)
TIE = TiedParameter(name="embed.weight", stages=(0, 2), owner=0)
NUM_RANKS = 4


def make_plan(mini_batch: int = 8, context: int = 1) -> PipelinePlan:
    """Return the plan of the toy; ``context``: the ranks of its front that compute the same samples."""
    front = Stage(
        name="front", blocks=("front",), ranks=(0, 1), micro_batch_size=4, in_flight=2, context=context
    )
    return PipelinePlan(
        model="toy",
        graph="0" * 16,
        planner="by hand",
        mini_batch=mini_batch,
        loss_unit=1,
        stages=(
            front,
            Stage(name="middle", blocks=("middle",), ranks=(2,), micro_batch_size=2, in_flight=1),
            Stage(name="loss", blocks=("head",), ranks=(3,), micro_batch_size=8, in_flight=1),
        ),
        edges=(StageEdge(src=0, dst=1), StageEdge(src=1, dst=2), StageEdge(src=0, dst=2)),
    )


def initial(name: str) -> Tensor:
    """Return the first value of a parameter, the same in every process."""
    shape = {**SHAPES, **FROZEN}[name]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


class Holder(nn.Module):
    """A module with the given parameters at their dotted names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(leaf, nn.Parameter(initial(name), requires_grad="frozen" not in name))


def make_stage(index: int) -> Holder:
    """Return the module of stage ``index``."""
    return Holder(STAGE_NAMES[index])


def gradient(name: str, step: int, rank: int, micro_batch: int) -> Tensor:
    """Return the gradient that a micro-batch brings for ``name`` on ``rank``, the same in every process."""
    seed = (sum(map(ord, name)) * 31 + step) * 31 * 31 + rank * 31 + micro_batch
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed)) * 0.1


def whole_gradient(name: str, step: int, num_micro_batches: int) -> Tensor:
    """Return the sum of all micro-batches' gradients over all ranks that hold ``name``, in double precision."""
    ranks = [
        r for s, names in zip(make_plan().stages, STAGE_NAMES, strict=True) if name in names for r in s.ranks
    ]
    parts = [gradient(name, step, r, m).double() for r in ranks for m in range(num_micro_batches)]
    return torch.stack(parts).sum(0)


def make_engine(
    rank: int, config: dict[str, Any], *, module: nn.Module | None = None, context: int = 1, **options: Any
) -> StageEngine:
    """Return this rank's engine of the toy; ``module``: of its stage, where it is not as usual."""
    plan = make_plan(config.get("train_batch_size", 8), context)
    groups = StageGroups.create(plan, (TIE,), timeout_s=60)
    module = module or make_stage(plan.stage_of_rank(rank))
    return engine_of(module, config, plan=plan, rank=rank, groups=groups, tied=(TIE,), **options)


def engine_of(module: nn.Module, config: dict[str, Any], **options: Any) -> StageEngine:
    """Return a rank's one stage whose weights DeepSpeed updates; options of its optimizer, and of `RankEngine`."""
    names = ("optimizer", "lr_scheduler", "parameter_groups")
    own = {name: options.pop(name) for name in names if name in options}
    stage = int((config.get("zero_optimization") or {}).get("stage") or 0)
    options["plan"] = dataclasses.replace(
        options["plan"], zero_stage=stage
    )  # as a plan for this configuration says
    make_optimizer = functools.partial(DeepSpeedOptimizer, config=config, **own)
    return RankEngine(modules=[module], make_optimizer=make_optimizer, framework=FRAMEWORK, **options).only


def add_gradient(parameter: Tensor, value: Tensor) -> None:
    """Do what autograd does with a gradient."""
    if parameter.grad is None:
        parameter.grad = value
    else:
        parameter.grad.add_(value)


def feed(engine: StageEngine, step: int, num_micro_batches: int, *, spoil: str | None = None) -> None:
    """Do what the runtime does in a mini-batch: gradients of each micro-batch, then the two reductions.

    Under ZeRO 2 its program reduces behind each backward too.
    """
    for micro_batch in range(num_micro_batches):
        for name, parameter in engine.module.named_parameters():
            if not parameter.requires_grad:
                continue
            value = gradient(name, step, engine.rank, micro_batch) * engine.loss_scale
            if name == spoil and engine.position == 0:
                value = torch.full_like(value, float("inf"))
            value = value.to(parameter.dtype)
            add_gradient(parameter, value)
        engine.accumulate()
        if engine.config.zero_stage == 2:
            engine.reduce_data()
    engine.reduce_data()
    engine.reduce_tied()


# ---- the same training in one process --------------------------------------------------------------------


def summed(
    name: str,
    step: int,
    num_micro_batches: int,
    *,
    dtype: torch.dtype,
    sum_dtype: torch.dtype,
    scale: float = 1.0,
    reduced_often: bool = False,
) -> Tensor:
    """Return the unscaled whole gradient as rounded by the order of additions that the stages prescribe.

    Args:
        reduced_often: ranks are added up for each micro-batch, not once for all.
    """

    def part(rank: int, micro_batch: int) -> Tensor:
        return (gradient(name, step, rank, micro_batch) * scale).to(dtype).to(sum_dtype)

    def total(parts: list[Tensor]) -> Tensor:
        return sum(parts[1:], parts[0])

    micro_batches = range(num_micro_batches)
    stage_sums = []
    for stage, names in zip(make_plan().stages, STAGE_NAMES, strict=True):
        if name not in names:
            continue
        if reduced_often:
            parts = [total([part(r, m) for r in stage.ranks]) for m in micro_batches]
        else:
            parts = [total([part(r, m) for m in micro_batches]) for r in stage.ranks]
        stage_sums.append(total(parts))
    return total(stage_sums).float() / scale


class Alone:
    """Trains fp32 masters of all toy parameters in one process with plain torch."""

    def __init__(
        self, groups: list[dict[str, Any]], *, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        self.masters = {name: nn.Parameter(initial(name).to(dtype).float()) for name in SHAPES}
        self.optimizer = torch.optim.AdamW(
            [{**group, "params": [self.masters[name] for name in group["params"]]} for group in groups],
            **options,
        )

    def step(self, gradients: dict[str, Tensor], clipping: float = 0.0) -> float:
        """Step and return the norm before clipping."""
        for name, value in gradients.items():
            self.masters[name].grad = value.clone()
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), clipping or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)
