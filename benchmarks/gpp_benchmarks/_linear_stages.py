"""Plain linear stages for any random plan, and the same network in one process: gradients to compare.

Every stage adds up linear maps of what it receives (and of the mini-batch's rows), multiplies once more, and makes the
tensors its edges name: those with a batch axis from its rows, in different layouts, those without from
parameters and received tensors of that kind. A stage without a gradient from behind yields a loss, half
the mean square of its rows. An edge that sends no gradient for a tensor cuts it there.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.tensors import UNIFORM, LayoutKind, TensorSpec, batch_layout
from gpp_plugin.relative_errors import LEAST_SHARE, gradient_errors, least_scale
from gpp_plugin.runtime.compute import AutogradCompute, HalfForwards, StageHooks, boundary_gradients
from gpp_plugin.runtime.stage_module import StageFunction
from gpp_plugin.runtime.weight_versions import WeightVersions

DATA = "data"
DATA_WIDTH = 3
WIDTH = 4
LOSS = "loss"

FP32_LIMIT = 1e-5
ROUNDINGS = 4.0
"""Times the rounding of one process in fp32 that ours may be off it: its own, and three times as much of ours, which is
of the same operations, summed in another order."""
NUM_NEARBY = 4
"""Parameters one step of rounding away, from which one process's rounding is found once more each."""
MOST_ROUNDING = 1e-4
"""What rounding of one process excuses at most: beyond, fp32 says nothing of a tensor, and it fails."""

Parameters = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStage:
    """What one stage of the network reads and makes.

    Args:
        received, outputs: names of tensors; ``has_loss`` adds the loss behind the outputs.
        reads_data: whether it reads the mini-batch's rows.
    """

    index: int
    received: tuple[str, ...]
    outputs: tuple[str, ...]
    reads_data: bool
    has_loss: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearNetwork:
    """A network on a plan; ``specs`` are its boundary tensors, ``starts`` the parameters it begins with."""

    plan: PipelinePlan
    forward_only: frozenset[int]
    stages: tuple[LinearStage, ...]
    specs: Mapping[str, TensorSpec]
    starts: tuple[Parameters, ...]


def linear_network(
    plan: PipelinePlan, forward_only: frozenset[int], *, seed: int, dtype: torch.dtype
) -> LinearNetwork:
    """Return a random network on ``plan``; the same for the same seed, but for rounding to ``dtype``."""
    rng = random.Random(seed)
    specs: dict[str, TensorSpec] = {}
    for edge in plan.edges:
        for name in (*edge.batch_tensors, *edge.whole_tensors):
            if name not in specs:
                specs[name] = _random_spec(name, name in edge.batch_tensors, rng, dtype)
    stages = tuple(_linear_stage(plan, index, forward_only, rng) for index in range(len(plan.stages)))
    generator = torch.Generator().manual_seed(seed)
    starts = tuple(_parameters(stage, specs, generator, dtype) for stage in stages)
    return LinearNetwork(plan=plan, forward_only=forward_only, stages=stages, specs=specs, starts=starts)


def _random_spec(name: str, is_batch: bool, rng: random.Random, dtype: torch.dtype) -> TensorSpec:
    kind = str(dtype).removeprefix("torch.")
    width = rng.randint(1, 4)
    if not is_batch:
        return TensorSpec(name=name, dtype=kind, shape=(width,), num_samples=1, layout=UNIFORM)
    axis, rows = rng.choice([0, 0, 1]), rng.choice([1, 1, 2])
    shape = (rows, width) if axis == 0 else (width, rows)
    return TensorSpec(
        name=name,
        dtype=kind,
        shape=shape,
        num_samples=1,
        layout=batch_layout(axis=axis, rows_per_sample=rows),
    )


def _linear_stage(
    plan: PipelinePlan, index: int, forward_only: frozenset[int], rng: random.Random
) -> LinearStage:
    incoming = [edge for edge in plan.edges if edge.dst == index]
    outgoing = [edge for edge in plan.edges if edge.src == index]
    received = dict.fromkeys(name for e in incoming for name in (*e.batch_tensors, *e.whole_tensors))
    outputs = dict.fromkeys(name for e in outgoing for name in (*e.batch_tensors, *e.whole_tensors))
    needs_loss = not any(edge.gradient_tensors for edge in outgoing)
    reads_data = not any(edge.batch_tensors for edge in incoming) or rng.random() < 0.4
    return LinearStage(
        index=index,
        received=tuple(received),
        outputs=tuple(outputs),
        reads_data=reads_data,
        has_loss=index not in forward_only and (needs_loss or rng.random() < 0.2),
    )


def _parameters(
    stage: LinearStage, specs: Mapping[str, TensorSpec], generator: torch.Generator, dtype: torch.dtype
) -> Parameters:
    shapes: dict[str, tuple[int, ...]] = {"bias": (WIDTH,), "middle": (WIDTH, WIDTH)}
    if stage.reads_data:
        shapes[f"in.{DATA}"] = (DATA_WIDTH, WIDTH)
    for name in stage.received:
        shapes[f"in.{name}"] = (_features(specs[name]), WIDTH)
    for name in stage.outputs:
        if _is_batch(specs[name]):
            shapes[f"out.{name}"] = (WIDTH, _features(specs[name]))
            continue
        shapes[f"out.{name}"] = specs[name].shape
        for other in stage.received:
            if not _is_batch(specs[other]):
                shapes[f"out.{name}.{other}"] = (specs[other].shape[0], specs[name].shape[0])
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5).to(dtype)
        for name, shape in shapes.items()
    }


def _is_batch(spec: TensorSpec) -> bool:
    return spec.layout.kind is LayoutKind.BATCH


def _features(spec: TensorSpec) -> int:
    """Return the numbers a sample has in a tensor, or all numbers of one without a batch axis."""
    return math.prod(spec.shape_for(1))


def _call(
    stage: LinearStage,
    specs: Mapping[str, TensorSpec],
    parameters: Mapping[str, Tensor],
    data: Tensor | None,
    received: Mapping[str, Tensor],
) -> tuple[Tensor, ...]:
    """Return the outputs of a stage, and its loss behind them if it has one."""
    hidden = parameters["bias"]
    if data is not None:
        hidden = hidden + data @ parameters[f"in.{DATA}"]
    for name, tensor in received.items():
        spec = specs[name]
        rows = _to_rows(tensor, spec) if _is_batch(spec) else tensor
        hidden = hidden + rows @ parameters[f"in.{name}"]
    hidden = hidden @ parameters["middle"]
    made = []
    for name in stage.outputs:
        spec, weight = specs[name], parameters[f"out.{name}"]
        if _is_batch(spec):
            made.append(_from_rows(hidden @ weight, spec))
            continue
        for other, tensor in received.items():
            if not _is_batch(specs[other]):
                weight = weight + tensor @ parameters[f"out.{name}.{other}"]
        made.append(weight)
    if stage.has_loss:
        made.append(hidden.square().sum() / (2 * hidden.shape[0]))
    return tuple(made)


def _to_rows(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Return a received tensor as [samples, features]."""
    flat = tensor.t() if spec.layout.axis == 1 else tensor
    return flat.reshape(-1, _features(spec))


def _from_rows(rows: Tensor, spec: TensorSpec) -> Tensor:
    """Return [samples, features] in the layout of an output."""
    flat = rows.reshape(rows.shape[0] * spec.layout.rows_per_sample, -1)
    return flat.t() if spec.layout.axis == 1 else flat


def stage_compute(
    network: LinearNetwork,
    program: RankProgram,
    parameters: Parameters,
    hooks: StageHooks,
    *,
    versions: WeightVersions | None = None,
) -> AutogradCompute:
    """Return the compute of one rank, as `Lane` makes it for a captured stage.

    Args:
        versions: of the parameters, where the stage steps after each micro-batch; its loss is that one's.
    """
    plan, stage = network.plan, network.stages[program.stage]
    names = tuple(parameters)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, tensors, strict=False))
        rest = tensors[len(names) :]
        data = rest[0] if stage.reads_data else None
        return _call(
            stage,
            network.specs,
            given,
            data,
            dict(zip(stage.received, rest[stage.reads_data :], strict=True)),
        )

    function = StageFunction(
        call=call,
        tensors=names,
        constants=(),
        batch_inputs=(DATA,) if stage.reads_data else (),
        received=stage.received,
        outputs=(*stage.outputs, LOSS) if stage.has_loss else stage.outputs,
        code="",
    )
    is_trained = program.stage not in network.forward_only
    own = plan.stages[program.stage]
    return AutogradCompute(
        function=function,
        parameters=[p.requires_grad_(is_trained) for p in parameters.values()],
        gradients=boundary_gradients(program, plan, network.specs),
        hooks=hooks if is_trained else None,
        loss=LOSS if stage.has_loss else None,
        loss_share=own.local_batch_size / (plan.mini_batch if plan.mode == "sync" else own.micro_batch_size),
        versions=versions,
        halves=HalfForwards(
            function=function,
            input_axes=(0,) if stage.reads_data else (),
            axes={n: s.layout.axis if _is_batch(s) else -1 for n, s in network.specs.items()},
        ),
    )


def single_process_gradients(
    network: LinearNetwork, parameters: Sequence[Parameters], data: Tensor
) -> list[dict[str, Tensor | None]]:
    """Return every stage's gradients of the mini-batch's loss, computed at once.

    Args:
        parameters: of every stage.
        data: [mini-batch, DATA_WIDTH].
    """
    edges = network.plan.edges
    made: dict[str, Tensor] = {}
    leaves: list[Parameters] = []
    losses: list[Tensor] = []
    for stage in network.stages:
        with_gradient = {name for e in edges if e.dst == stage.index for name in e.gradient_tensors}
        received = {n: made[n] if n in with_gradient else made[n].detach() for n in stage.received}
        is_trained = stage.index not in network.forward_only
        leaves.append(
            {n: p.detach().clone().requires_grad_(is_trained) for n, p in parameters[stage.index].items()}
        )
        outputs = _call(stage, network.specs, leaves[-1], data if stage.reads_data else None, received)
        made.update(zip(stage.outputs, outputs, strict=False))
        if stage.has_loss:
            losses.append(outputs[-1])
    if losses:
        torch.autograd.backward(losses)
    return [{name: p.grad for name, p in of_stage.items()} for of_stage in leaves]


def tensor_errors(
    ours: Mapping[int, Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor | None]]
) -> dict[tuple[int, str], float]:
    """Return the error of each gradient tensor of some stages, by stage and name; one that is missing is 0.

    What is not finite, on either side, is no agreement: inf.

    Args:
        expected: of every stage.
    """
    wanted = {
        (stage, name): gradient
        for stage, of_stage in enumerate(expected)
        for name, gradient in of_stage.items()
        if gradient is not None
    }
    found = {
        (stage, name): gradient for stage, of_stage in ours.items() for name, gradient in of_stage.items()
    }
    own = {key: gradient for key, gradient in wanted.items() if key[0] in ours}
    return gradient_errors(found, own, least=least_scale(wanted.values()) or LEAST_SHARE)


def in_double(parameters: Parameters) -> Parameters:
    """Return the same numbers in fp64."""
    return {name: parameter.double() for name, parameter in parameters.items()}


Answers = Sequence[Mapping[str, Tensor | None]]
"""Gradients of every stage, by name."""


def starts_nearby(starts: Sequence[Parameters]) -> list[tuple[Parameters, ...]]:
    """Return the parameters as they are, and `NUM_NEARBY` times each number one step of rounding up or down, by chance.

    The rounding of one process is a matter of luck in a single tensor: the largest of several says what it can be.
    """
    generator = torch.Generator().manual_seed(0)

    def shaken(tensor: Tensor) -> Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        return (tensor.detach() * (1 + signs * torch.finfo(tensor.dtype).eps)).to(tensor.dtype)

    nearby = [
        tuple({name: shaken(p) for name, p in of_stage.items()} for of_stage in starts)
        for _ in range(NUM_NEARBY)
    ]
    return [tuple(starts), *nearby]


def worst_error(
    ours: Mapping[int, Mapping[str, Tensor]], answers: Sequence[tuple[Answers, Answers]]
) -> GradientError:
    """Return how far some stages' gradients are off one process, where they are furthest beyond what is allowed.

    Each tensor is judged by its own rounding, the largest that one process has.

    Args:
        answers: of one process in fp32 and in fp64: first from the parameters that ours has, which it is compared
            with, then from others near by (`starts_nearby`).
    """
    roundings: dict[tuple[int, str], float] = {}
    for plain, exact in answers:
        own = {stage: {name: g for name, g in plain[stage].items() if g is not None} for stage in ours}
        for key, error in tensor_errors(own, exact).items():
            roundings[key] = max(roundings.get(key, 0.0), error)
    errors = tensor_errors(ours, answers[0][0])
    found = [GradientError(error, roundings.get(key, 0.0)) for key, error in errors.items()]
    return max(found, key=GradientError.excess, default=GradientError(0.0, 0.0))


class GradientError(NamedTuple):
    """The error of one gradient tensor, and what one process in fp32 is off itself there in fp64."""

    error: float
    rounding: float

    def excess(self) -> tuple[float, float]:
        """Return the share of what is allowed in fp32, by which the worst of several is found, and the error."""
        return self.error / fp32_limit(self.rounding), self.error


def fp32_limit(rounding: float) -> float:
    """Return the largest error in fp32 that is allowed, where one process's own rounding is so much.

    >>> fp32_limit(1e-7), fp32_limit(1e-5), fp32_limit(float("inf"))
    (1e-05, 4e-05, 1e-05)
    """
    return max(FP32_LIMIT, ROUNDINGS * rounding) if rounding <= MOST_ROUNDING else FP32_LIMIT


# ---- the optimizer side of linear stages on a rank, and delays of their tasks: what the exactness bench runs them with

LEARNING_RATE = 0.02
"""The longest step of a parameter tensor, by its norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One stage's gradients on this rank of each mini-batch, and the parameters they were taken at."""

    gradients: list[dict[str, Tensor]]
    parameters: list[Parameters]


class LinearHooks:
    """The optimizer side of a stage on a rank: sums gradients over the stage's ranks, steps plainly, keeps a copy.

    Ranks of different stages meet nowhere but in their messages: a stage that is done begins the next mini-batch.
    """

    loss_scale = 1.0

    def __init__(self, parameters: Parameters, group: dist.ProcessGroup | None) -> None:
        self.parameters = parameters
        self._group = group
        self._sums: dict[str, Tensor] = {}
        self.done = Trained(gradients=[], parameters=[])

    def accumulate(self) -> None:
        """Leave what autograd added up where it is."""

    def begin_reduction(self) -> None:
        """Do nothing: `reduce_data` sums all."""

    @torch.no_grad()
    def reduce_data(self) -> None:
        """Sum what has come together since the last time over the stage's ranks, and add it up.

        A rank may have no gradient where another one has: consumers ask only some of a stage's ranks for what is the
        same for all samples.
        """
        counts = torch.tensor([p.grad is not None for p in self.parameters.values()], dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        for count, (name, parameter) in zip(counts.tolist(), self.parameters.items(), strict=True):
            if not count:
                continue
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            if self._group is not None:
                dist.all_reduce(gradient, group=self._group)
            self._sums[name] = self._sums[name] + gradient if name in self._sums else gradient
            parameter.grad = None

    def reduce_tied(self) -> None:
        """Do nothing: no parameter is on two stages."""

    @torch.no_grad()
    def step(self) -> None:
        """Keep the gradients and where they were taken, and step along them."""
        self.done.gradients.append(self._sums)
        self.done.parameters.append({name: p.detach().clone() for name, p in self.parameters.items()})
        for name, gradient in self._sums.items():
            self.parameters[name].copy_(stepped(self.parameters[name], gradient))
        self._sums = {}


def stepped(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a parameter after a step along its gradient, no longer than `LEARNING_RATE`.

    The loss of random deep graphs is steep: a step as long as its gradient would end in numbers that say nothing.
    """
    return parameter - gradient * (LEARNING_RATE / gradient.norm().clamp(min=1.0))


TASKS = frozenset({"forward", "backward", "input_gradient", "weight_gradient"})


class Delayed:
    """An `AutogradCompute` that waits a random time before each task.

    Args:
        longest_s: of the waits.
    """

    def __init__(self, compute: AutogradCompute, rng: random.Random, longest_s: float) -> None:
        self._compute, self._rng, self._longest_s = compute, rng, longest_s

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._compute, name)
        if name not in TASKS:
            return found

        def delayed(*given: Any) -> Any:
            time.sleep(self._rng.uniform(0.0, self._longest_s))
            return found(*given)

        return delayed


def stage_rows(network: LinearNetwork, index: int, rank: int, data: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the rows of a mini-batch that a stage's micro-batches read on a rank."""
    plan, stage = network.plan, network.plan.stages[index]
    rows = [stage.samples(m, rank) for m in range(plan.num_micro_batches(index))]
    if not network.stages[index].reads_data:
        return [()] * len(rows)
    return [(data[r.first_sample : r.end],) for r in rows]
