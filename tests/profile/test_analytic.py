"""Derived costs against closed forms written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.errors import ProfileError
from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph, OpGraph
from gpp_plugin.ir.cluster import Device
from gpp_plugin.ir.tensors import TensorSpec, batch_layout
from gpp_plugin.profile.analytic_costs import analytic_profile, default_sample_counts

COMPUTE_BOUND = Device(
    name="matrix machine",
    memory_bytes=1,
    flops_per_s=1e6,
    memory_bytes_per_s=1e30,
    efficiency=0.5,
    launch_us=0.0,
)
"""Half a FLOP a microsecond, free memory traffic and launches: times are FLOPs times two."""
LAUNCH_BOUND = Device(
    name="slow host", memory_bytes=1, flops_per_s=1e30, memory_bytes_per_s=1e30, launch_us=3.0
)
MEMORY_BOUND = Device(name="narrow", memory_bytes=1, flops_per_s=1e30, memory_bytes_per_s=1e6, launch_us=0.0)
WIDTH = 8


class Chain(nn.Module):
    """Linear layers without bias, each followed by tanh; the first may be frozen."""

    def __init__(self, layers: int, *, frozen: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def profile_of(
    model: nn.Module, *, num_samples: int = 4, counts: tuple[int, ...] = (4,), device: Device
) -> dict:
    captured = capture_model(model, {"x": torch.randn(num_samples, WIDTH)})
    graph = coarsen(captured)
    profile = analytic_profile(graph, device, sample_counts=counts, op_graph=captured.op_graph)
    assert profile.source == "analytic" and profile.device == device.name
    return {cost.block: cost for cost in profile.costs}


def test_linear_chain_costs_its_closed_form() -> None:
    """A product is 2 n w^2 FLOPs, each gradient of it as many again; tanh is n w, and its gradient too."""
    costs = profile_of(Chain(4), counts=(4, 8), device=COMPUTE_BOUND)
    product = [2 * (2 * n * WIDTH * WIDTH) for n in (4, 8)]
    tanh = [2 * (n * WIDTH) for n in (4, 8)]
    for name in ("layers.0", "layers.1", "layers.2"):
        assert costs[name].forward_us == pytest.approx([p + t for p, t in zip(product, tanh, strict=True)])
    first = [p + t for p, t in zip(product, tanh, strict=True)]
    assert costs["layers.0"].backward_us == pytest.approx(first)  # the input takes no gradient
    assert costs["layers.1"].backward_us == pytest.approx(
        [2 * p + t for p, t in zip(product, tanh, strict=True)]
    )
    assert costs["layers.1"].parameter_bytes == costs["layers.1"].gradient_bytes == 4 * WIDTH * WIDTH
    assert costs["layers.1"].optimizer_bytes == 8 * WIDTH * WIDTH


def test_frozen_layers_cost_no_gradient_of_their_own() -> None:
    product, tanh = 2 * (2 * 4 * WIDTH * WIDTH), 2 * (4 * WIDTH)
    costs = profile_of(Chain(4, frozen=2), device=COMPUTE_BOUND)
    assert [costs[f"layers.{i}"].forward_us[0] for i in range(3)] == pytest.approx([product + tanh] * 3)
    assert [costs[f"layers.{i}"].backward_us[0] for i in range(3)] == pytest.approx([0, 0, product + tanh])
    assert [costs[f"layers.{i}"].optimizer_bytes for i in range(3)] == [0, 0, 8 * WIDTH * WIDTH]
    middle = Chain(4)
    middle.layers[1].requires_grad_(False)
    assert profile_of(middle, device=COMPUTE_BOUND)["layers.1"].backward_us[0] == pytest.approx(
        product + tanh
    )


def test_launches_are_charged_once_an_operator() -> None:
    costs = profile_of(Chain(3), device=LAUNCH_BOUND)
    assert costs["layers.1"].forward_us[0] == pytest.approx(3 * 2)  # linear, tanh
    assert costs["layers.1"].backward_us[0] == pytest.approx(3 * (2 + 1))


def test_bytes_are_operands_and_results() -> None:
    costs = profile_of(Chain(3), device=MEMORY_BOUND)
    activation, weight = 4 * 4 * WIDTH, 4 * WIDTH * WIDTH
    linear, tanh = 2 * activation + weight, 2 * activation
    assert costs["layers.1"].forward_us[0] == pytest.approx(linear + tanh)
    assert costs["layers.1"].backward_us[0] == pytest.approx(2 * linear + tanh)


def paper_graph(*, trainable: bool = True, requires_grad: bool = True) -> BlockGraph:
    """Two blocks without operators, as models taken from papers are."""
    edge = TensorSpec(
        name="h",
        dtype="float32",
        shape=(2, 10),
        num_samples=2,
        layout=batch_layout(),
        requires_grad=requires_grad,
    )
    return BlockGraph(
        model="paper",
        num_samples=2,
        blocks=(
            Block(name="a", parameter_bytes=100, trainable_bytes=100, flops=60.0, saved_bytes=40),
            Block(name="b", parameter_bytes=100, trainable_bytes=100 * trainable, flops=60.0, saved_bytes=40),
        ),
        edges=(BlockEdge(src="a", dst="b", tensors=("h",)),),
        tensors={"h": edge},
        loss_block="b",
        tied={},
    )


@pytest.mark.parametrize(
    ("trainable", "requires_grad", "factor"),
    [(True, True, 2), (False, True, 1), (True, False, 1), (False, False, 0)],
)
def test_block_level_backward_counts_the_gradients_needed(
    trainable: bool, requires_grad: bool, factor: int
) -> None:
    graph = paper_graph(trainable=trainable, requires_grad=requires_grad)
    cost = analytic_profile(graph, COMPUTE_BOUND, sample_counts=(1, 2)).by_block()["b"]
    assert cost.forward_us == pytest.approx((60, 120))
    assert cost.backward_us == pytest.approx((60 * factor, 120 * factor))
    assert cost.saved_bytes_per_sample == 20


def test_block_level_bytes() -> None:
    cost = analytic_profile(paper_graph(), MEMORY_BOUND, sample_counts=(2,)).by_block()["b"]
    assert cost.forward_us[0] == pytest.approx(100 + 80 + 2 * 40)  # parameters, tensor in, saved twice


def test_optimizer_bytes_follow_the_precision() -> None:
    graph = paper_graph()
    mixed = analytic_profile(graph, COMPUTE_BOUND, optimizer_bytes_per_parameter=12, element_bytes=2)
    assert mixed.costs[0].optimizer_bytes == 600


def test_operators_that_are_not_there_are_refused() -> None:
    empty = OpGraph(model="x", num_samples=2, inputs=(), parameters=(), nodes=(), loss=None, outputs={})
    graph = BlockGraph(
        model="x", num_samples=2, blocks=(Block(name="a", nodes=("linear",)),), edges=(), tensors={},
        loss_block=None, tied={},
    )  # fmt: skip
    with pytest.raises(ProfileError, match=r"block 'a' names operators \['linear'\]"):
        analytic_profile(graph, COMPUTE_BOUND, op_graph=empty)


@pytest.mark.parametrize("counts", [(), (0, 1), (2, 1), (2, 2)])
def test_sample_counts_must_increase(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="increasing positive"):
        analytic_profile(paper_graph(), COMPUTE_BOUND, sample_counts=counts)


def test_default_sample_counts_are_few_and_hold_both_ends() -> None:
    for largest in range(1, 130):
        counts = default_sample_counts(largest)
        assert counts[0] == 1 and counts[-1] == largest and len(counts) <= 3
    assert default_sample_counts(64) == (1, 8, 64)
    with pytest.raises(ValueError, match="at least 1"):
        default_sample_counts(0)
