"""Tensor-parallel stages of plain torch: modules, plans of their grids, and what each rank runs.

case "beside"   encoder 1x1 ─┬─► first 1x2 ═(shards)═► second 1x2 ─► loss 1x1      ranks 0 | 1 2 | 3 4 | 5
                             └────────────────────────────────────────►┘
case "tied"     the same, the first matrix of both blocks one parameter
case "grid"     encoder 2x1 ─► loss 2x2                                            ranks 0 1 | 2 3 4 5
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from gpp_plugin.engine.checkpoints.load_checkpoint import load_checkpoint
from gpp_plugin.engine.checkpoints.save_checkpoint import save_checkpoint
from gpp_plugin.engine.stage_engine import StageEngine
from gpp_plugin.engine.stage_groups import StageGroups, TiedParameter
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.stage_optimizer import make_stage_engine
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.tensors import TensorSpec, batch_layout
from gpp_plugin.runtime.compute import AutogradCompute, StageHooks, boundary_gradients
from gpp_plugin.runtime.executor import StageExecutor
from gpp_plugin.runtime.messages.transport import make_transport
from gpp_plugin.runtime.rank_programs import channels_of
from gpp_plugin.runtime.stage_module import StageFunction
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.orders.in_flight import plan_in_flight

NUM_RANKS = 6
MINI_BATCH = 8
SEQUENCE, INPUT, HIDDEN, INNER, OUTPUT = 4, 3, 6, 8, 5
CPU = torch.device("cpu")
Group = dist.ProcessGroup | None


# ---- collectives of tensor parallelism -------------------------------------------------------------------


def _summed(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _joined(tensor: Tensor, group: Group) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _part(tensor: Tensor, group: Group) -> Tensor:
    return tensor.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


_WAYS = {
    "copy": (lambda t, g: t.clone(), _summed),
    "sum": (_summed, lambda t, g: t),
    "gather": (_joined, lambda t, g: _part(_summed(t, g), g)),
    "sum and cut": (lambda t, g: _part(_summed(t, g), g), _joined),
    "cut": (_part, _joined),
    "join": (_joined, _part),
}


class _Region(torch.autograd.Function):
    """One of these collectives forward, its counterpart backward; sequences lie along axis 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, way: str, group: Group) -> Tensor:
        ctx.way, ctx.group = way, group
        return _WAYS[way][0](tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _WAYS[ctx.way][1](gradient, ctx.group), None, None


def region(tensor: Tensor, way: str, group: Group) -> Tensor:
    return tensor if group is None else _Region.apply(tensor, way, group)


# ---- modules ---------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.map = nn.Linear(INPUT, HIDDEN)
        self.still = nn.Linear(HIDDEN, HIDDEN)
        self.still.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.tanh(self.still(self.map(x))),)


class Block(nn.Module):
    """A two-layer block: columns of the first matrix and rows of the second one are shared out.

    Args:
        way: ``whole`` keeps activations whole; ``cut`` and ``join`` hold them as sequence shards in between, and
            take whole ones, or give whole ones.
    """

    def __init__(self, group: Group, way: str) -> None:
        super().__init__()
        self.group, self.way = group, way
        size = 1 if group is None else dist.get_world_size(group)
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER // size)
        self.down = nn.Linear(INNER // size, HIDDEN)
        for parameter in (self.up.weight, self.up.bias, self.down.weight):
            parameter.tensor_model_parallel = True
        if way != "whole":
            for parameter in (self.norm.weight, self.norm.bias, self.down.bias):
                parameter.sequence_parallel = True

    def forward(self, x: Tensor) -> tuple[Tensor]:
        if self.way == "cut":
            x = region(x, "cut", self.group)
        is_whole = self.way == "whole"
        inner = functional.gelu(self.up(region(self.norm(x), "copy" if is_whole else "gather", self.group)))
        outer = functional.linear(inner, self.down.weight)
        x = x + region(outer, "sum" if is_whole else "sum and cut", self.group) + self.down.bias
        return (region(x, "join", self.group) if self.way == "join" else x,)


class Head(nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, OUTPUT)

    def forward(self, target: Tensor, *tensors: Tensor) -> tuple[Tensor]:
        return ((self.out(sum(tensors)) - target).square().mean(),)


class BlockAndHead(nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.block, self.head = Block(group, "whole"), Head(group)

    def forward(self, target: Tensor, x: Tensor) -> tuple[Tensor]:
        return self.head(target, *self.block(x))


CASES: dict[str, list[tuple[str, Any, str | None, tuple[str, ...]]]] = {
    # name, module of a group, key of the batch, tensors it receives
    "beside": [
        ("encoder", Encoder, "x", ()),
        ("first", lambda group: Block(group, "cut"), None, ("encoder",)),
        ("second", lambda group: Block(group, "join"), None, ("first",)),
        ("loss", Head, "target", ("second", "encoder")),
    ],
    "grid": [("encoder", Encoder, "x", ()), ("loss", BlockAndHead, "target", ("encoder",))],
}
CASES["tied"] = CASES["beside"]
GRIDS = {case: [(1, 1), (1, 2), (1, 2), (1, 1)] for case in ("beside", "tied")} | {"grid": [(2, 1), (2, 2)]}
SIZES = {case: [2, 1, 2, 4] for case in ("beside", "tied")} | {"grid": [4, 2]}
TIES = {"tied": (TiedParameter(name="up.weight", stages=(1, 2), owner=1),)}
SHARDED = {"first"}


def initial(stage: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the first value of a whole parameter, the same in every process."""
    generator = torch.Generator().manual_seed(sum(map(ord, stage + name)))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5).to(dtype)


def own_part(name: str, whole: Tensor, position: int, size: int) -> Tensor:
    """Return what one tensor position holds of a whole parameter or its gradient."""
    if "up." in name:
        return whole.chunk(size, dim=0)[position]
    return whole.chunk(size, dim=1)[position] if name.endswith("down.weight") else whole


def make_module(case: str, index: int, group: Group, dtype: torch.dtype) -> nn.Module:
    """Return a stage's module, a tensor rank's part of it where there is a group."""
    stage, make, _, _ = CASES[case][index]
    module = make(group).to(dtype)
    whole = make(None)
    size, position = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = initial(stage, name, tuple(whole.get_parameter(name).shape), dtype)
            parameter.copy_(own_part(name, value, position, size))
    return module


def make_batch(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    shapes = {"x": (MINI_BATCH, SEQUENCE, INPUT), "target": (MINI_BATCH, SEQUENCE, OUTPUT)}
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for key, shape in shapes.items()
    }


def make_plan(case: str, schedule: str = "1f1b") -> PipelinePlan:
    """Return the plan of a case."""
    stages, edges, first = [], [], 0
    names = [name for name, *_ in CASES[case]]
    for name, (data, tensor), size in zip(names, GRIDS[case], SIZES[case], strict=True):
        ranks = tuple(range(first, first + data * tensor))
        stages.append(
            Stage(
                name=name,
                blocks=(name,),
                ranks=ranks,
                tensor=tensor,
                micro_batch_size=size,
                in_flight=1,
                schedule=schedule,
            )
        )
        first += len(ranks)
    for dst, (_, _, _, received) in enumerate(CASES[case]):
        for tensor_name in received:
            axis = 1 if tensor_name in SHARDED else None
            edges.append(
                StageEdge(
                    src=names.index(tensor_name),
                    dst=dst,
                    batch_tensors=(tensor_name,),
                    gradient_tensors=(tensor_name,),
                    src_shard_axis=axis,
                    dst_shard_axis=axis,
                )
            )
    plan = PipelinePlan(
        model=case,
        graph="0" * 16,
        planner="by hand",
        mini_batch=MINI_BATCH,
        loss_unit=1,
        stages=tuple(stages),
        edges=tuple(edges),
    )
    counts = plan_in_flight(plan)
    stages = [replace(stage, in_flight=count) for stage, count in zip(stages, counts, strict=True)]
    return replace(plan, stages=tuple(stages))


# ---- one rank --------------------------------------------------------------------------------------------


def make_programs(case: str, plan: PipelinePlan, *, reduce_each_backward: bool) -> tuple[RankProgram, ...]:
    schedules = build_schedules(plan)
    programs = lower_schedules(
        plan,
        schedules,
        reduce_each_backward=reduce_each_backward,
        tied_stages={stage for tie in TIES.get(case, ()) for stage in tie.stages},
    )
    validate_programs(plan, schedules, programs)
    return programs


class Rank:
    """One rank's executor of a case.

    Args:
        hooks: made from this rank's module and the plan's groups.
    """

    def __init__(
        self, case: str, dtype: torch.dtype, make_hooks: Any, *, zero: int = 0, schedule: str = "1f1b"
    ) -> None:
        self.rank = dist.get_rank()
        self.plan = make_plan(case, schedule)
        self.ties = TIES.get(case, ())
        programs = make_programs(case, self.plan, reduce_each_backward=zero == 2)
        program = programs[self.rank]
        self.index = program.stage
        self.stage = self.plan.stages[self.index]
        self.groups = StageGroups.create(self.plan, self.ties, timeout_s=60)
        group = self.groups.tensor[self.index] if self.stage.tensor > 1 else None
        self.module = make_module(case, self.index, group, dtype)
        self.hooks: StageHooks = make_hooks(self)
        _, _, self.key, received = CASES[case][self.index]
        specs = {
            name: TensorSpec(
                name=name,
                dtype=str(dtype).removeprefix("torch."),
                shape=(1, SEQUENCE, HIDDEN),
                num_samples=1,
                layout=batch_layout(),
                requires_grad=True,
            )
            for name, *_ in CASES[case]
        }
        self.transport = make_transport(
            device=CPU,
            channels=channels_of(programs),
            timeout_s=60,
        )
        module = self.module
        function = StageFunction(
            call=lambda *tensors: module(*tensors),
            tensors=(),
            constants=(),
            batch_inputs=() if self.key is None else (self.key,),
            received=received,
            outputs=(self.stage.name,),
            code="",
        )
        has_loss = self.stage.name == "loss"
        self.executor = StageExecutor(
            plan=self.plan,
            program=program,
            compute=AutogradCompute(
                function=function,
                parameters=(),
                gradients=boundary_gradients(program, self.plan, specs),
                hooks=self.hooks,
                loss="loss" if has_loss else None,
                loss_share=self.stage.local_batch_size / self.plan.mini_batch,
            ),
            specs=specs,
            transport=self.transport,
            hooks=self.hooks,
            device=CPU,
            loss="loss" if has_loss else None,
        )

    def run(self, batch: dict[str, Tensor]) -> tuple[float, Any]:
        """Return the loss of a mini-batch, the same on every rank, and what the step returned."""
        rows = [self.stage.samples(m, self.rank) for m in range(self.plan.num_micro_batches(self.index))]
        inputs = [() if self.key is None else (batch[self.key][r.first_sample : r.end],) for r in rows]
        result = self.executor.run(inputs)
        total = torch.tensor(
            sum(float(loss) * n for loss, n in result.losses) / MINI_BATCH, dtype=torch.float64
        )
        dist.all_reduce(total)
        return float(total), result.step_result


def make_config(zero: int, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": MINI_BATCH,
        # not Adam, to which a wrong norm would make no difference
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero},
        "gradient_clipping": 0.05,
        **more,
    }
    return config


class _Recorded:
    """A stage engine that keeps the gradients of every step."""

    def __init__(self, rank: Rank, config: dict[str, Any], *, steps_alone: bool = False) -> None:
        self.engine = make_stage_engine(
            module=rank.module,
            config=config,
            plan=rank.plan,
            rank=rank.rank,
            groups=rank.groups,
            tied=rank.ties,
            steps_alone=steps_alone,
        )
        self.gradients: list[dict[str, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self) -> Any:
        self.gradients.append(self.engine.full_gradients())
        return self.engine.step()


def train(
    cases: list[tuple[str, int]], directory: str, steps: int = 4
) -> dict[tuple[str, int], dict[str, Any]]:
    """Train each case, save half-way, and go on from there once more on engines that were made anew."""
    answers = {}
    for case, zero in cases:
        config = make_config(zero)
        rank = Rank(case, torch.float32, lambda r, config=config: _Recorded(r, config), zero=zero)
        hooks: Any = rank.hooks
        target = Path(directory) / f"{case}-{zero}"
        ran = []
        for step in range(steps):
            if step == steps // 2:
                save_checkpoint([hooks.engine], target, "half")
            ran.append(rank.run(make_batch(step, torch.float32)))
        rank.transport.close()
        again = Rank(case, torch.float32, lambda r, config=config: _Recorded(r, config), zero=zero)
        with torch.no_grad():
            for parameter in again.module.parameters():
                parameter.zero_()
        load_checkpoint([again.hooks.engine], target)  # type: ignore[attr-defined]
        rest = [again.run(make_batch(step, torch.float32)) for step in range(steps // 2, steps)]
        again.transport.close()
        answers[case, zero] = {
            "losses": [loss for loss, _ in ran],
            "norms": [step.grad_norm for _, step in ran],
            "gradients": hooks.gradients[0],
            "parameters": {n: p.detach().clone() for n, p in rank.module.named_parameters()},
            "stage": rank.index,
            "is_bitwise_after_reload": rest == ran[steps // 2 :]
            and all(
                torch.equal(p, q)
                for p, q in zip(rank.module.parameters(), again.module.parameters(), strict=True)
            ),
            "files": sorted(path.name for path in (target / "half").iterdir()),
        }
    return answers


def stage_norm(case: str) -> float:
    """Return the norm of this rank's stage as an asynchronous stage finds it, every gradient 1 on every rank."""
    rank = Rank(case, torch.float32, lambda r: _Recorded(r, make_config(0), steps_alone=True))
    engine: StageEngine = rank.hooks.engine  # type: ignore[attr-defined]
    for parameter in engine.module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    engine.accumulate()
    engine.reduce_data()
    norm = engine.step().grad_norm
    rank.transport.close()
    return norm


def forgotten(zero: int) -> str:
    """Return what is said of norms whose gradients are of each rank's part of the sequence, which nobody marked."""

    def make_hooks(rank: Rank) -> _Recorded:
        for parameter in rank.module.parameters():
            parameter.sequence_parallel = False
        return _Recorded(rank, make_config(zero))

    rank = Rank("beside", torch.float32, make_hooks)
    try:
        rank.run(make_batch(0, torch.float32))
    except ConfigError as error:
        return str(error)
    finally:
        rank.transport.close()
    return ""


# ---- one process -----------------------------------------------------------------------------------------


def alone(case: str, dtype: torch.dtype) -> list[nn.Module]:
    """Return the whole modules of a case."""
    modules: list[Any] = [make_module(case, index, None, dtype) for index in range(len(CASES[case]))]
    if case in TIES:
        modules[2].up.weight = modules[1].up.weight
    return modules


def alone_loss(case: str, modules: list[nn.Module], batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a mini-batch."""
    made: dict[str, Tensor] = {}
    for (name, _, key, received), module in zip(CASES[case], modules, strict=True):
        inputs = [] if key is None else [batch[key]]
        (made[name],) = module(*inputs, *(made[tensor] for tensor in received))
    return made["loss"]
