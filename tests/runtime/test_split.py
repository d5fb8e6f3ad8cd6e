"""A backward in two parts makes the gradients of the whole one, computes nothing twice and frees what it held."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpp_plugin.profile.block_survey import measure_split_cost
from gpp_plugin.profile.timing import Operands
from gpp_plugin.runtime.split import BackwardSplitter

WIDTH = 8
Stage = Callable[..., tuple[Tensor, ...]]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def check(
    stage: Stage,
    parameters: Sequence[Tensor],
    leaves: Sequence[Tensor],
    splitter: BackwardSplitter | None = None,
) -> int:
    """Compare both parts with one backward, for two graphs of one stage; return how many parameters were early."""
    splitter = splitter or BackwardSplitter()
    for _ in range(2):
        outputs = stage(*leaves)
        seeds = [torch.randn_like(output) for output in outputs]
        expected = torch.autograd.grad(outputs, [*leaves, *parameters], seeds, allow_unused=True)
        for parameter in parameters:
            parameter.grad = None
        gradients, pending = splitter.split(stage(*leaves), leaves, seeds)
        assert all(tensor.grad is None for tensor in (*parameters, *leaves)), (
            "the first part makes no weight gradient"
        )
        pending.run()
        assert all(tensor.grad is None for tensor in leaves)
        found = [*gradients, *(parameter.grad for parameter in parameters)]
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    return len(splitter._plans[0].early) if splitter._plans else 0


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_transformer_layers() -> None:
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, dtype=torch.float64) for _ in range(2)
    )

    def stage(x: Tensor) -> tuple[Tensor, ...]:
        for layer in layers:
            x = layer(x)
        return (x,)

    assert check(stage, [*layers.parameters()], [leaf(3, 5, WIDTH)]) == 0


def test_a_layer_used_twice_needs_only_its_bias_early() -> None:
    linear = nn.Linear(WIDTH, WIDTH).double()
    stage = lambda x: (linear(torch.tanh(linear(x))),)  # noqa: E731
    assert check(stage, [*linear.parameters()], [leaf(4, WIDTH)]) == 1


def test_a_bias_computed_from_parameters_and_added_in_every_layer() -> None:
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
    table = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def stage(x: Tensor) -> tuple[Tensor, ...]:
        shared = table.exp()
        for layer in layers:
            x = torch.tanh(layer(x) + shared)
        return x, shared

    assert check(stage, [*layers.parameters(), table], [leaf(4, WIDTH)]) == 1


def test_targets_behind_targets() -> None:
    weight, other = (nn.Parameter(torch.randn(WIDTH, dtype=torch.float64)) for _ in range(2))

    def stage(x: Tensor) -> tuple[Tensor, ...]:
        inner = weight.exp()
        return x * inner + x * (inner * other), inner.sin()

    assert check(stage, [weight, other], [leaf(4, WIDTH)]) == 2


def test_a_tied_weight_with_roots_of_its_own() -> None:
    linear = nn.Linear(WIDTH, WIDTH, bias=False).double()
    first, second = (lambda w: w.t(), lambda w: w * 2)
    assert check(
        lambda x: (torch.relu(x @ first(linear.weight)) @ second(linear.weight), linear.weight.sum()),
        [linear.weight],
        [leaf(4, WIDTH)],
    ) in (0, 1)


def test_several_leaves_views_and_outputs() -> None:
    linear = nn.Linear(WIDTH, WIDTH).double()

    def stage(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        pieces = torch.split(linear(x + y), 4, dim=-1)
        return torch.cat(pieces, dim=0), y.sum(), x.view(-1), x

    check(stage, [*linear.parameters()], [leaf(4, WIDTH), leaf(4, WIDTH)])


def test_graphs_of_other_structures_in_turn() -> None:
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(3)]
    splitter = BackwardSplitter()
    for order in ([0, 1], [1, 0], [0, 0], [2], [0, 1, 2], [0, 1]):

        def stage(x: Tensor, order: Sequence[int] = order) -> tuple[Tensor, ...]:
            for index in order:
                x = torch.tanh(x @ weights[index].t()) if index < 2 else torch.tanh(x + x @ weights[2])
            return (x,)

        check(stage, weights, [leaf(4, WIDTH)], splitter)


def test_operators_in_place() -> None:
    linear = nn.Linear(WIDTH, WIDTH).double()
    bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def stage(x: Tensor) -> tuple[Tensor, ...]:
        hidden = linear(x).clone()
        hidden.add_(bias).mul_(2)
        hidden[:, 1:3].relu_()
        return hidden, hidden[0]

    check(stage, [*linear.parameters(), bias], [leaf(4, WIDTH)])


def test_a_leaf_that_nothing_depends_on_and_a_stage_without_leaves() -> None:
    linear = nn.Linear(WIDTH, WIDTH).double()
    data = torch.randn(4, WIDTH, dtype=torch.float64)
    check(lambda x: (linear(data),), [*linear.parameters()], [leaf(4, WIDTH)])
    check(lambda: (linear(data),), [*linear.parameters()], [])


def test_frozen_parameters_leave_nothing_for_the_second_part() -> None:
    linear = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)
    x = leaf(4, WIDTH)
    output = linear(x)
    gradients, pending = BackwardSplitter().split([output], [x], [torch.ones_like(output)])
    assert not pending.calls and not pending.edges
    assert gradients[0] is not None


class Watched(torch.autograd.Function):
    """x @ w that holds a tensor which a test can watch."""

    held: list[weakref.ref[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        watched = x.clone()
        Watched.held.append(weakref.ref(watched))
        ctx.save_for_backward(watched, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradients[0] @ w.T, x.T @ gradients[0]


def test_what_was_saved_is_freed_after_the_second_part() -> None:
    Watched.held.clear()
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(3)]

    def stage(x: Tensor) -> tuple[Tensor, ...]:
        for weight in weights:
            x = torch.tanh(Watched.apply(x, weight))
        return (x,)

    x = leaf(4, WIDTH)
    outputs = stage(x)
    _, pending = BackwardSplitter().split(outputs, [x], [torch.ones_like(outputs[0])])
    del outputs
    assert all(held() is not None for held in Watched.held)
    pending.run()
    assert all(held() is None for held in Watched.held)


class CountOperators(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_twice() -> None:
    mlp = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU()))).double()
    x = leaf(4, WIDTH)
    output = mlp(x)
    with CountOperators() as whole:
        torch.autograd.backward([output], [torch.ones_like(output)])
    output = mlp(x)
    with CountOperators() as first:
        _, pending = BackwardSplitter().split([output], [x], [torch.ones_like(output)])
    with CountOperators() as second:
        pending.run()
    assert whole.counts["mm"] == 6
    assert first.counts["mm"] == second.counts["mm"] == 3
    assert first.counts["gelu_backward"] == 3 and second.counts["gelu_backward"] == 0


def test_split_cost_has_both_parts() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    operands = Operands(
        call=lambda w, x: (torch.tanh(x @ w),),
        parameters=(linear.weight.detach().requires_grad_(),),
        inputs=(),
        received=(torch.randn(4, WIDTH),),
        takes_gradient=(True,),
        is_training=True,
    )
    cost = measure_split_cost(operands, device=torch.device("cpu"), repeats=3)
    assert cost.backward_us > 0 and cost.input_gradient_us > 0 and cost.weight_gradient_us > 0
    assert cost.factor > 0 and 0 < cost.input_share < 1
