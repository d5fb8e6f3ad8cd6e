"""The models and the schedules that torch.distributed.pipelining tests itself with, trained by it and by this package.

Two ranks train one mini-batch. Losses and every gradient are compared, as sums of micro-batches over their number.
The models are written anew: two matrices and two linears, arguments with defaults, parameters under two names, stacks
of perceptrons, several outputs between stages, linears with a backward of their own. Their split is where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks.peers._scenario import Seen, Side, scenario

WIDTH, SAMPLES, UNITS = 8, 8, 4
NODES = {"granularity": "node"}
"""Of a model without layers: it is cut between operators."""


def _randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


class TwoMatrices(nn.Module):
    """A matrix and a linear in each half; a constant that has no gradient crosses the cut."""

    def __init__(self, *, is_shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Parameter(_randn(WIDTH, WIDTH, seed=1))
        self.second = self.first if is_shared else nn.Parameter(_randn(WIDTH, WIDTH, seed=2))
        self.register_buffer("constant", _randn(WIDTH, seed=3))
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = self.before if is_shared else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return [samples, WIDTH]."""
        from torch.distributed.pipelining import pipe_split

        constant = self.get_buffer("constant").clone()
        x = self.before(torch.relu(torch.mm(x, self.first) + y))
        pipe_split()
        return self.after(torch.mm(torch.relu(x) + constant, self.second))


class WithDefault(nn.Module):
    """The same, with an argument that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoMatrices()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return [samples, WIDTH]."""
        return self.inner(x, torch.zeros_like(x) if y is None else y)


class Perceptron(nn.Module):
    """Two linears; it takes an argument that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        """Return [samples, WIDTH]."""
        return self.down(torch.relu(self.up(x)))


class _Line(torch.autograd.Function):
    """A linear with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return [samples, outputs]."""
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of input, weight and bias."""
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


class OwnBackward(nn.Module):
    """A perceptron of such linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return [samples, WIDTH]."""
        line: Callable[..., Tensor] = getattr(_Line, "apply")  # noqa: B009 - torch has no type for it
        x = torch.relu(line(x, self.up.weight, self.up.bias))
        made = line(x, self.down.weight, self.down.bias)
        return made


class _Pass(torch.autograd.Function):
    """Two inputs as two outputs."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return both."""
        return one.clone(), other.clone()

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return both gradients."""
        return one, other


class SeveralTensors(nn.Module):
    """A part that passes two tensors on: halves of its input, one of them through a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(_randn(WIDTH, WIDTH, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        """Return [samples, WIDTH] of [samples, WIDTH]."""
        one, other = torch.split(torch.cat([x, 2 * x], dim=1), WIDTH, dim=1)
        both: Callable[..., tuple[Tensor, Tensor]] = getattr(_Pass, "apply")  # noqa: B009 - the same
        one, matrix = both(one, self.matrix)
        return torch.matmul(one, matrix) * other


class Row(nn.Module):
    """Layers one after the other."""

    def __init__(self, kinds: Sequence[Callable[[], nn.Module]], *, passes_more: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind() for kind in kinds])
        self.passes_more = passes_more

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        """Return [samples, WIDTH]."""
        for layer in self.layers:
            x = layer(x, unused) if self.passes_more else layer(x)
        return x


class WithLoss(nn.Module):
    """A model and its loss, for this package: the mean square, as torch's schedule is given it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *, target: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": mean_square(self.model(**inputs), target)}


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of one micro-batch."""
    return nn.functional.mse_loss(output, target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and how it is trained.

    Args:
        layers: of a `Row`, cut between layers by hand; 0: torch's tracer cuts it at ``pipe_split``.
        inputs: arguments by keyword, beside ``x``.
    """

    make: Callable[[], nn.Module]
    layers: int = 0
    inputs: tuple[str, ...] = ()


def _inputs(case: Case) -> dict[str, Tensor]:
    return {
        "x": _randn(SAMPLES, WIDTH, seed=10),
        **{name: _randn(SAMPLES, WIDTH, seed=11) for name in case.inputs},
    }


def _model(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.make()


def _trained(side: Side, case: Case, *, schedule: str, block: Mapping[str, Any] | None = None) -> Seen:
    """Return loss and gradients of one mini-batch."""
    target = _randn(SAMPLES, WIDTH, seed=12)
    if side.is_peer:
        losses, gradients = _by_torch(case, schedule, target)
    else:
        losses, gradients = _here(side, case, target, block or {})
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, ({n: g.flatten().tolist() for n, g in gradients.items()}, losses))
    return {
        "gradients": {name: values for own, _ in every for name, values in own.items()},
        "loss": next(loss for _, loss in every if loss is not None),
    }


def _by_torch(case: Case, schedule: str, target: Tensor) -> tuple[float | None, dict[str, Tensor]]:
    """Train by torch's own: the tracer's stages, or layers cut by hand, one or two stages a rank."""
    from torch.distributed.pipelining import PipelineStage, pipeline
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    rank, device, model, inputs = dist.get_rank(), torch.device("cpu"), _model(case), _inputs(case)
    kind = get_schedule_class(schedule)
    losses: list[Tensor] = []
    if isinstance(model, Row):
        if issubclass(kind, PipelineScheduleMulti):
            # V shapes turn around at the last rank, loops go round
            numbers = [rank, 3 - rank] if "ZBV" in schedule or "DualPipeV" in schedule else [rank, rank + 2]
        else:
            numbers = [rank]
        count = 2 * len(numbers)
        size = case.layers // count
        stages: list[Any] = []
        for number in numbers:
            part = Row([])
            part.layers = model.layers[number * size : (number + 1) * size]
            stages.append(PipelineStage(part, number, count, device))
        names = [f"layers.{number * size + at}" for number in numbers for at in range(size)]
        holders = [stage.submod.layers[at] for stage in stages for at in range(size)]
    else:
        first = {name: value[: SAMPLES // UNITS] for name, value in inputs.items()}
        pipe = pipeline(model, (first.pop("x"),), first)
        stages = [pipe.build_stage(rank, device)]
        names, holders = [""], [pipe.get_stage_module(rank)]
    if issubclass(kind, PipelineScheduleMulti):
        made = kind(stages, UNITS, loss_fn=mean_square)
    else:
        made = kind(stages[0], UNITS, loss_fn=mean_square)
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    last = {"target": target, "losses": losses} if has_last else {}
    if has_first:
        made.step(inputs.pop("x"), **inputs, **last)
    else:
        made.step(**last)
    gradients = {
        f"{name}.{key}".lstrip("."): parameter.grad
        for name, holder in zip(names, holders, strict=True)
        for key, parameter in holder.named_parameters()
        if parameter.grad is not None
    }
    return (float(torch.stack(losses).mean()) if losses else None), gradients


def _here(
    side: Side, case: Case, target: Tensor, block: Mapping[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    import deepspeed

    import gpp_plugin

    batch = {**_inputs(case), "target": target}
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES // UNITS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "graph_pipeline": {"stages": 2, "verify": False, "comm_timeout_s": 30, **block},
    }
    model = gpp_plugin.GraphPipelineModule(WithLoss(_model(case)), sample_batch=batch)
    engine = side.keep(deepspeed.initialize(model=model, config=config)[0])
    engine.retain_gradients()
    loss = float(engine.train_batch(iter([batch])))
    return loss, {name.removeprefix("model."): value for name, value in engine.gradients.items()}


def _row(kind: Callable[[], nn.Module], layers: int = 2, **more: Any) -> Callable[[], nn.Module]:
    return lambda: Row([kind] * layers, **more)


# ---- models ----------------------------------------------------------------------------------------------------


@scenario("models", "two matrices, a constant across the cut, an argument beside", peer="torch")
def example_code(side: Side) -> Seen:
    return _trained(side, Case(make=TwoMatrices, inputs=("y",)), schedule="GPipe", block=NODES)


@scenario("models", "an argument by keyword, with a default", peer="torch")
def keyword_arguments(side: Side) -> Seen:
    return _trained(side, Case(make=WithDefault, inputs=("y",)), schedule="GPipe", block=NODES)


@scenario("models", "a matrix and a linear under two names, one in each stage", peer="torch")
def two_names(side: Side) -> Seen:
    case = Case(make=lambda: TwoMatrices(is_shared=True), inputs=("y",))
    # torch leaves the sum of a shared gradient to its user
    return {"loss": _trained(side, case, schedule="GPipe", block=NODES)["loss"]}


@scenario("models", "perceptrons in a row, a stage each", peer="torch")
def perceptrons(side: Side) -> Seen:
    return _trained(side, Case(make=_row(Perceptron), layers=2), schedule="1F1B")


@scenario("models", "the same, with an argument that no layer uses", peer="torch")
def unused_argument(side: Side) -> Seen:
    inputs = () if side.is_peer else ("unused",)
    return _trained(side, Case(make=_row(Perceptron), layers=2, inputs=inputs), schedule="1F1B")


@scenario("models", "linears with a backward of their own", peer="torch")
def own_backward(side: Side) -> Seen:
    return _trained(side, Case(make=_row(OwnBackward), layers=2), schedule="1F1B")


@scenario("models", "a part that passes several tensors on", peer="torch")
def several_tensors(side: Side) -> Seen:
    return _trained(side, Case(make=_row(SeveralTensors), layers=2), schedule="1F1B")


# ---- schedules -------------------------------------------------------------------------------------------------


def _scheduled(side: Side, name: str, **block: Any) -> Seen:
    return _trained(side, Case(make=_row(Perceptron, 4), layers=4), schedule=name, block=block)


@scenario("schedules", "GPipe", peer="torch")
def gpipe(side: Side) -> Seen:
    return _trained(
        side, Case(make=_row(Perceptron), layers=2), schedule="GPipe", block={"schedule": "gpipe"}
    )


@scenario("schedules", "1F1B", peer="torch")
def one_forward_one_backward(side: Side) -> Seen:
    return _trained(side, Case(make=_row(Perceptron), layers=2), schedule="1F1B", block={"schedule": "1f1b"})


@scenario("schedules", "interleaved 1F1B: two stages a rank", peer="torch")
def interleaved(side: Side) -> Seen:
    return _scheduled(side, "Interleaved1F1B", schedule="1f1b", **_loop())


@scenario("schedules", "looped breadth first", peer="torch")
def breadth_first(side: Side) -> Seen:
    return _scheduled(side, "LoopedBFS", schedule="gpipe", **_loop())


@scenario("schedules", "interleaved zero bubble: weights' gradients later", peer="torch")
def interleaved_zero_bubble(side: Side) -> Seen:
    return _scheduled(side, "InterleavedZeroBubble", schedule="zero_bubble", **_loop())


@scenario("schedules", "zero bubble in a V", peer="torch")
def zero_bubble_v(side: Side) -> Seen:
    return _scheduled(side, "ZBVZeroBubble", schedule="zero_bubble", **_loop((0, 1, 1, 0)))


@scenario("schedules", "DualPipe in a V", peer="torch")
def dual_pipe_in_v(side: Side) -> Seen:
    return _scheduled(side, "DualPipeV", schedule="zero_bubble", **_loop((0, 1, 1, 0)))


def _loop(ranks: Sequence[int] = (0, 1, 0, 1)) -> dict[str, Any]:
    """Return four stages of a layer each, on these ranks."""
    stages = [{"modules": [f"model.layers.{at}"], "ranks": [rank]} for at, rank in enumerate(ranks)]
    return {"stages": "auto", "plan": {"stages": stages}}
