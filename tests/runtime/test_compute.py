"""A stage's compute without messages: halves and split backwards against one whole backward; what is held when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gpp_plugin.runtime.compute import AutogradCompute, BoundaryGradients, HalfForwards
from gpp_plugin.runtime.stage_module import StageFunction
from tests.runtime.memory_stages import Hooks

SAMPLES, WIDTH, MICRO_BATCH = 6, 3, 7


def call(weight: Tensor, table: Tensor, data: Tensor, rows: Tensor, shared: Tensor) -> tuple[Tensor, ...]:
    """rows_WN [width, samples] has its samples behind, shared_W is the same for all, table gives shared outputs."""
    hidden = torch.tanh((data + rows.t()) @ weight + shared)
    return hidden, hidden.t() * 2, table.exp() * shared, hidden.square().sum() / (2 * hidden.shape[0])


FUNCTION = StageFunction(
    call=call, tensors=("weight", "table"), constants=(), batch_inputs=("data",), received=("rows", "shared"),
    outputs=("hidden", "turned", "table", "loss"), code="",
)  # fmt: skip
HALVES = HalfForwards(
    function=FUNCTION, input_axes=(0,), axes={"rows": 1, "shared": -1, "hidden": 0, "turned": 1, "table": -1}
)


def make(hooks: Hooks | None) -> tuple[AutogradCompute, list[Tensor]]:
    parameters = [torch.randn(*shape, dtype=torch.float64) for shape in ((WIDTH, WIDTH), (WIDTH,))]
    compute = AutogradCompute(
        function=FUNCTION,
        parameters=[p.requires_grad_(hooks is not None) for p in parameters],
        gradients=BoundaryGradients(outputs=("table", "turned", "hidden"), inputs=("shared", "rows")),
        hooks=hooks,
        loss="loss",
        loss_share=0.5,
        halves=HALVES,
    )
    return compute, parameters


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((SAMPLES, WIDTH), (WIDTH, SAMPLES), (WIDTH,))
    data, rows, shared = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    return data, rows, shared


def forward(compute: AutogradCompute, given: Sequence[Tensor], is_halved: bool) -> list[Tensor]:
    data, rows, shared = given
    if not is_halved:
        return list(compute.forward(MICRO_BATCH, None, [data], [rows.clone(), shared.clone()]))
    shared = shared.clone()  # one received tensor for both halves
    one, other = (
        compute.forward(MICRO_BATCH, half, [data], [part.clone(), shared])
        for half, part in enumerate(rows.chunk(2, dim=1))
    )
    return [
        torch.cat([one[0], other[0]]),
        torch.cat([one[1], other[1]], dim=1),
        one[2],
        (one[3] + other[3]) / 2,
    ]


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("is_halved", [False, True], ids=["one forward", "halves"])
@pytest.mark.parametrize("sent", [True, False], ids=["all gradients", "no gradient of the table"])
def test_every_way_gives_the_gradients_of_plain_autograd(is_split: bool, is_halved: bool, sent: bool) -> None:
    torch.manual_seed(0)
    hooks = Hooks(4.0)
    compute, parameters = make(hooks)
    data, rows, shared = given = inputs()
    leaves = [shared.clone().requires_grad_(), rows.clone().requires_grad_()]
    expected_outputs = call(*parameters, data, leaves[1], leaves[0])
    seeds = {
        name: torch.randn_like(expected_outputs[FUNCTION.outputs.index(name)])
        for name in HALVES.axes
        if name in FUNCTION.outputs
    }
    roots = [expected_outputs[i] for i, name in enumerate(FUNCTION.outputs) if name != "table" or sent]
    weights = [
        *(seeds[n] for n in ("hidden", "turned", "table") if n != "table" or sent),
        torch.tensor(2.0, dtype=torch.float64),
    ]
    expected = torch.autograd.grad(roots, [*leaves, *parameters], weights, allow_unused=True)

    outputs = forward(compute, given, is_halved)
    for ours, theirs in zip(outputs, expected_outputs, strict=True):
        torch.testing.assert_close(ours, theirs)
    gradients = [seeds["table"] if sent else None, seeds["turned"], seeds["hidden"]]
    if is_split:
        found = list(compute.input_gradient(MICRO_BATCH, gradients))
        assert all(p.grad is None for p in parameters) and hooks.num_accumulated == 0
        compute.weight_gradient(MICRO_BATCH)
    else:
        found = list(compute.backward(MICRO_BATCH, gradients))
    assert hooks.num_accumulated == 1
    for ours, theirs in zip([*found, *(p.grad for p in parameters)], expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_each_backward_is_of_its_own_micro_batch_at_the_scale_of_the_day() -> None:
    """Unlike micro-batches, in another order than their forwards; sums may begin in the last one's backward alone."""
    log: list[str] = []
    hooks = Hooks(4.0)
    hooks.begin_reduction = lambda: log.append("begin")  # type: ignore[attr-defined]
    compute, parameters = make(hooks)
    compute._reduces_in = 1
    given = {m: inputs() for m in (1, 2)}
    for m, (data, rows, shared) in given.items():
        compute.forward(m, None, [data], [rows.clone(), shared.clone()])
    before = [torch.zeros_like(p) for p in parameters]
    for m, scale in ((2, 4.0), (1, 32.0)):
        data, rows, shared = given[m]
        loss = call(*parameters, data, rows, shared)[3]
        wanted = torch.autograd.grad(loss * scale * 0.5, parameters, allow_unused=True)
        hooks.loss_scale = scale
        hooks.accumulate = lambda: log.append("accumulate")  # type: ignore[method-assign]
        compute.backward(m, [None, None, None])
        for p, old, gradient in zip(parameters, before, wanted, strict=True):
            found = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(found, old + (0 if gradient is None else gradient))
        before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    assert log == ["accumulate", "begin", "accumulate"]
    with pytest.raises(KeyError):
        compute.backward(1, [None, None, None])


def test_a_stage_without_backwards_keeps_nothing() -> None:
    compute, _ = make(None)
    data, rows, shared = inputs()
    outputs = compute.forward(MICRO_BATCH, None, [data], [rows, shared])
    assert not any(output.requires_grad for output in outputs)
    assert not rows.requires_grad
    with pytest.raises(AssertionError, match="needs hooks"):
        compute.backward(MICRO_BATCH, [None, None, None])


def test_micro_batches_are_let_go_when_a_mini_batch_fails() -> None:
    compute, _ = make(Hooks(4.0))
    forward(compute, inputs(), is_halved=False)
    compute.clear()
    with pytest.raises(KeyError):
        compute.backward(MICRO_BATCH, [None, None, None])
