"""Stages of data x tensor ranks of plain torch: gradients, norm, steps and checkpoints of one process.

case "beside"   encoder 1x1 ─┬─► first 1x2 ═(shards)═► second 1x2 ─► loss 1x1      ranks 0 | 1 2 | 3 4 | 5
                             └────────────────────────────────────────►┘
case "tied"     the same, the first matrix of both blocks one parameter
case "grid"     encoder 2x1 ─► loss 2x2                                            ranks 0 1 | 2 3 4 5
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import gpp_plugin
from tests.integrations.engine_jobs import config_of, make_engine, said_of, steps
from tests.ranks import run_kept_ranks
from tests.tiers import some

NUM_RANKS = 6
MINI_BATCH = 8
SEQUENCE, INPUT, HIDDEN, INNER, OUTPUT = 4, 3, 6, 8, 5
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

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.still(self.map(x)))


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

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "cut":
            x = region(x, "cut", self.group)
        is_whole = self.way == "whole"
        inner = functional.gelu(self.up(region(self.norm(x), "copy" if is_whole else "gather", self.group)))
        outer = functional.linear(inner, self.down.weight)
        x = x + region(outer, "sum" if is_whole else "sum and cut", self.group) + self.down.bias
        return region(x, "join", self.group) if self.way == "join" else x


class Head(nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, OUTPUT)

    def forward(self, target: Tensor, **tensors: Tensor) -> Tensor:
        return (self.out(sum(tensors.values())) - target).square().mean()


class BlockAndHead(nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.block, self.head = Block(group, "whole"), Head(group)

    def forward(self, target: Tensor, x: Tensor) -> Tensor:
        return self.head(target, x=self.block(x))


CASES: dict[str, list[tuple[str, Any, dict[str, str]]]] = {
    # name, module of a group, its arguments: keys of the batch and what other stages make
    "beside": [
        ("encoder", Encoder, {"x": "x"}),
        ("first", lambda group: Block(group, "cut"), {"x": "of encoder"}),
        ("second", lambda group: Block(group, "join"), {"x": "of first"}),
        ("loss", Head, {"target": "target", "x": "of second", "beside": "of encoder"}),
    ],
    "grid": [
        ("encoder", Encoder, {"x": "x"}),
        ("loss", BlockAndHead, {"target": "target", "x": "of encoder"}),
    ],
}
CASES["tied"] = CASES["beside"]
GRIDS = {case: [(1, 1), (1, 2), (1, 2), (1, 1)] for case in ("beside", "tied")} | {"grid": [(2, 1), (2, 2)]}
SIZES = {case: [2, 1, 2, 4] for case in ("beside", "tied")} | {"grid": [4, 2]}


def initial(stage: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the first value of a whole parameter, the same in every process."""
    generator = torch.Generator().manual_seed(sum(map(ord, stage + name)))
    return torch.randn(shape, generator=generator) * 0.5


def own_part(name: str, whole: Tensor, position: int, size: int) -> Tensor:
    """Return what one tensor position holds of a whole parameter or its gradient."""
    if "up." in name:
        return whole.chunk(size, dim=0)[position]
    return whole.chunk(size, dim=1)[position] if name.endswith("down.weight") else whole


def make_module(case: str, index: int, group: Group) -> nn.Module:
    """Return a stage's module, a tensor rank's part of it where there is a group."""
    stage, make, _ = CASES[case][index]
    module, whole = make(group), make(None)
    size, position = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = initial(stage, name, tuple(whole.get_parameter(name).shape))
            parameter.copy_(own_part(name, value, position, size))
    return module


def make_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    shapes = {"x": (MINI_BATCH, SEQUENCE, INPUT), "target": (MINI_BATCH, SEQUENCE, OUTPUT)}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


# ---- one rank --------------------------------------------------------------------------------------------


def engine_of(case: str, zero: int, *, forgets: bool = False) -> Any:
    """Return the engine of a case.

    Args:
        forgets: nobody marks the parameters whose gradients are of each rank's part of the sequence.
    """
    graph, first = gpp_plugin.StageGraph(case), 0
    for index, (name, _, arguments) in enumerate(CASES[case]):

        def make(context: Any, index: int = index) -> nn.Module:
            module = make_module(case, index, context.tensor_group if context.tensor_size > 1 else None)
            for parameter in module.parameters() if forgets else ():
                parameter.sequence_parallel = False
            return module

        data, tensor = GRIDS[case][index]
        output = "loss" if name == "loss" else f"of {name}"
        graph.stage(
            name,
            make,
            inputs=arguments,
            outputs=[output],
            ranks=range(first, first + data * tensor),
            tensor=tensor,
            micro_batch_size=SIZES[case][index],
            coupled=False,
            sharded_inputs={"x": 1} if "of first" in arguments.values() else None,
            sharded_outputs={output: 1} if name == "first" else None,
        )
        first += data * tensor
    if case == "tied":
        graph.tie("first.up.weight", "second.up.weight")
    return make_engine(graph, make_batch(0), config(zero))


def config(zero: int) -> dict[str, Any]:
    return config_of(
        train_batch_size=MINI_BATCH,
        train_micro_batch_size_per_gpu=1,
        # not Adam, to which a wrong norm would make no difference
        optimizer={"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        zero_allow_untested_optimizer=True,
        zero_optimization={"stage": zero},
        gradient_clipping=0.05,
        # measured times choose slices, and sums of halves have other last bits than sums of whole micro-batches
        block={"schedule": "1f1b", "slicing": "off"},
    )


def train(
    cases: list[tuple[str, int]], directory: str, num_steps: int
) -> dict[tuple[str, int], dict[str, Any]]:
    """Train each case, save half-way, and go on from there once more on engines that were made anew."""
    answers = {}
    half = num_steps // 2
    batches = [make_batch(step) for step in range(num_steps)]
    for case, zero in cases:
        engine = engine_of(case, zero)
        engine.retain_gradients()
        target = Path(directory) / f"{case}-{zero}"
        ran, gradients = [], []
        for step, batch in enumerate(batches):
            if step == half:
                engine.save_checkpoint(target, tag="half")
            ran.append((steps(engine, [batch])[0], engine.get_global_grad_norm()))
            gradients.append(named(engine.gradients))
        again = engine_of(case, zero)
        with torch.no_grad():
            for parameter in again.module.parameters():
                parameter.zero_()
        again.load_checkpoint(target)
        rest = [(steps(again, [batch])[0], again.get_global_grad_norm()) for batch in batches[half:]]
        parameters, reloaded = (named(dict(each.module.named_parameters())) for each in (engine, again))
        stage = engine.plan.stages[engine.stage_id]
        answers[case, zero] = {
            "losses": [loss for loss, _ in ran],
            "norms": [norm for _, norm in ran],
            "gradients": gradients[0],
            "parameters": parameters,
            "stage": engine.stage_id,
            "position": stage.position(dist.get_rank()),
            "tensor": stage.tensor,
            "went on": (ran[half:], parameters),
            "reloaded": (rest, reloaded),
            "files": sorted(path.name for path in (target / "half").iterdir()),
        }
    return answers


def named(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return values of a stage's parameters by its module's names; a tied one has the name of the first stage's."""
    return {name.partition(".")[2]: value.detach().clone() for name, value in values.items()}


def forgotten(zero: int) -> str:
    """Return what is said of norms whose gradients are of each rank's part of the sequence, which nobody marked."""
    return said_of(lambda: steps(engine_of("beside", zero, forgets=True), [make_batch(0)]))


# ---- one process -----------------------------------------------------------------------------------------


def whole_modules(case: str) -> list[nn.Module]:
    """Return the whole modules of a case."""
    modules: list[Any] = [make_module(case, index, None) for index in range(len(CASES[case]))]
    if case == "tied":
        modules[2].up.weight = modules[1].up.weight
    return modules


def whole_loss(case: str, modules: list[nn.Module], batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a mini-batch."""
    made = dict(batch)
    for (name, _, arguments), module in zip(CASES[case], modules, strict=True):
        made[f"of {name}"] = module(**{argument: made[tensor] for argument, tensor in arguments.items()})
    return made["of loss"]


STEPS = 4
TRAINED = some([(case, zero) for case in CASES for zero in (0, 1, 2)], every=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[dict[tuple[str, int], dict[str, Any]]]:
    directory = str(tmp_path_factory.mktemp("tensor"))
    return run_kept_ranks(train, NUM_RANKS, TRAINED, directory, STEPS)


@functools.cache
def alone(case: str) -> tuple[list[float], list[float], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return losses, norms, first gradients and last parameters by stage of one process with plain torch."""
    modules = whole_modules(case)
    parameters = list(dict.fromkeys(p for m in modules for p in m.parameters() if p.requires_grad))
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    losses, norms, first = [], [], []
    for step in range(STEPS):
        loss = whole_loss(case, modules, make_batch(step))
        loss.backward()
        if not first:
            first = [{n: p.grad.clone() for n, p in m.named_parameters() if p.requires_grad} for m in modules]
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, first, [dict(module.named_parameters()) for module in modules]


@pytest.mark.parametrize(("case", "zero"), TRAINED)
def test_norm_clipping_and_steps_are_those_of_one_process(trained, case, zero):
    losses, norms, gradients, parameters = alone(case)
    assert min(norms) > 0.05  # every step is clipped, so that a wrong norm shows in the parameters
    for answer in (found[case, zero] for found in trained):
        stage, own = answer["stage"], (answer["position"][1], answer["tensor"])
        assert answer["losses"] == pytest.approx(losses, rel=1e-5)
        assert answer["norms"] == pytest.approx(norms, rel=1e-5)
        assert answer["gradients"].keys() == gradients[stage].keys()
        for name, gradient in answer["gradients"].items():
            wanted = own_part(name, gradients[stage][name], *own)
            assert float((gradient - wanted).norm()) <= 2e-6 * float(wanted.norm()), name
        for name, parameter in answer["parameters"].items():
            wanted = own_part(name, parameters[stage][name].detach(), *own)
            torch.testing.assert_close(parameter, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("case", "zero"), TRAINED)
def test_what_tensor_ranks_hold_alike_stays_alike(trained, case, zero):
    rows: dict[tuple[int, int], list[dict[str, Tensor]]] = {}
    for answer in (found[case, zero] for found in trained):
        rows.setdefault((answer["stage"], answer["position"][0]), []).append(answer["parameters"])
    assert max(map(len, rows.values())) == 2
    for (stage, _), (first, *others) in rows.items():
        whole = dict(whole_modules(case)[stage].named_parameters())
        for name in (n for n, p in whole.items() if not getattr(p, "tensor_model_parallel", False)):
            assert all(torch.equal(first[name], other[name]) for other in others)


@pytest.mark.parametrize(("case", "zero"), TRAINED)
def test_training_goes_on_bit_for_bit_from_a_checkpoint(trained, case, zero):
    for answer in (found[case, zero] for found in trained):
        (ran, parameters), (rest, reloaded) = answer["went on"], answer["reloaded"]
        assert rest == ran
        assert [name for name, value in parameters.items() if not torch.equal(reloaded[name], value)] == []
    files = trained[0][case, zero]["files"]
    sharded = ["01-loss"] if case == "grid" else ["01-first", "02-second"]
    models = [name for name in files if name.startswith("model-")]
    assert {f"model-{stage}-t{t}.safetensors" for stage in sharded for t in range(2)} <= set(models)
    assert len(models) == len(CASES[case]) + len(sharded)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_duplicate_with_unlike_gradients_is_refused_on_every_rank_before_it_steps(zero):
    for said in run_kept_ranks(forgotten, NUM_RANKS, zero):
        one = r"stage '(first|second)': the gradient of '\1.norm.weight' differs between tensor ranks"
        assert re.search(one, said), said
        assert "sequence_parallel = True" in said and "\n" not in said
