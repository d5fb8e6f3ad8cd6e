"""What is found out of a user's module by trying it: what it keeps, whether its backward splits, what it is."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.model.graph.module_cost import measure_split
from gpp_plugin.model.graph.module_trial import ModuleTrial
from gpp_plugin.model.graph.resolve import resolve
from gpp_plugin.model.graph.stage_costs import NotDescribed, describe_module
from gpp_plugin.model.graph.stage_graph import StageGraph
from gpp_plugin.profile.block_survey import CANNOT_SPLIT, UNSPLITTABLE
from gpp_plugin.runtime.memory.counting import StorageNumbers
from tests.stage_graph.graphs import Once
from tests.stage_graph.recompute_jobs import WIDTH, Deep

CPU = torch.device("cpu")
ROWS = 4


class Masked(nn.Module):
    """Keeps what it received, a mask of its own that outlives the forward, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)
        self.mask = torch.ones(1, 2 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.sigmoid(torch.tanh(self.layer(hidden)) * self.mask)


def trial_of(module: nn.Module) -> ModuleTrial:
    graph = StageGraph()
    graph.stage("start", nn.Identity(), inputs=["x"], outputs=["hidden"], ranks=[0])
    graph.stage("own", module, inputs=["hidden"], outputs=["loss"], ranks=[1])
    stage = resolve(graph, batch_keys=("x",), num_ranks=2).stage("own")
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    return ModuleTrial(stage=stage, module=module, device=CPU, arguments={"hidden": hidden})


def test_a_freed_storage_lends_its_number_to_none() -> None:
    numbers, found = StorageNumbers(()), []
    for _ in range(20):  # allocators give the same memory again
        found.append(numbers.number(torch.empty(1 << 12)))
    assert found == list(range(20))


class _Grows(Once):
    """A product whose backward scales what it kept: right the first time."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.operands
        found = gradient @ weight.T, hidden.T @ gradient
        ctx.operands[0] = 2 * hidden
        return found


class Product(nn.Module):
    """Multiplies by a weight, in one way or another, behind a layer."""

    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.multiply = multiply

    def forward(self, hidden: Tensor) -> Tensor:
        return self.multiply(torch.tanh(self.layer(hidden)), self.weight)


@pytest.mark.parametrize("module", [Product(torch.matmul), Deep(), Masked()])
def test_a_backward_that_splits(module: nn.Module) -> None:
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    trial = trial_of(module)
    drawn = torch.get_rng_state()
    split = measure_split(trial)
    assert 0.0 < split.factor < UNSPLITTABLE and 0.0 < split.input_share < 1.0
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("function", [Once, _Grows])
def test_a_backward_that_fails_or_lies_in_two_parts(function: Any) -> None:
    assert measure_split(trial_of(Product(function.apply))) is CANNOT_SPLIT


def test_descriptions_tell_modules_apart() -> None:
    assert describe_module(nn.Linear(3, 4)) == describe_module(nn.Linear(3, 4))
    assert describe_module(Deep()) == describe_module(Deep())
    power = [lambda x: x**2, lambda x: x**3]
    variants: list[nn.Module] = [
        nn.Linear(3, 4),
        nn.Linear(3, 5),
        nn.Linear(3, 4).double(),
        nn.Linear(3, 4).requires_grad_(False),
        nn.Dropout(0.1),
        nn.Dropout(0.2),
        nn.Sequential(nn.Linear(3, 4), nn.ReLU()),
        nn.Sequential(nn.Linear(3, 4), nn.Tanh()),
        *(Product(function) for function in power),
    ]
    hooked = nn.Linear(3, 4)
    hooked.register_forward_hook(lambda *given: None)
    found = [str(describe_module(module)) for module in (*variants, hooked)]
    assert len(set(found)) == len(found)


def test_a_program_without_a_file_is_read_only_where_it_defines_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = types.ModuleType("__main__")  # as in a notebook
    monkeypatch.setitem(sys.modules, "__main__", program)
    described = describe_module(Deep())
    monkeypatch.setattr(sys.modules[Deep.__module__], "pickler", program, raising=False)
    assert describe_module(Deep()) == described
    monkeypatch.setattr(Deep, "__module__", "__main__")
    with pytest.raises(NotDescribed, match="module __main__ has no file"):
        describe_module(Deep())


def test_what_says_nothing_of_itself_is_not_described() -> None:
    module = nn.Linear(3, 4)
    module.random = torch.Generator()  # type: ignore[assignment]
    with pytest.raises(NotDescribed, match=r"module.random is a torch._C.Generator"):
        describe_module(module)
