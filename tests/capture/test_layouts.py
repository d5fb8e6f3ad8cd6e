"""Layouts and couplings against brute force: blocks run on slices of samples give the slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.recapture import recapture
from gpp_plugin.capture.tracing.sample_batches import count_samples, resize_batch, rows_per_sample
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec
from tests.capture.graphs import Calls, captured, run_graph, run_nodes, tensors_of
from tests.models import MODELS, build


def _take(value: torch.Tensor, spec: TensorSpec, start: int, count: int) -> torch.Tensor:
    if spec.layout.kind is not LayoutKind.BATCH:
        return value
    rows = spec.layout.rows_per_sample
    return value.narrow(spec.layout.axis, start * rows, count * rows)


def _assert_blocks_run_on_slices(
    model: nn.Module, batch: dict[str, Any], small: CapturedGraph, large: CapturedGraph, granularity: str
) -> int:
    """Run every block that does not mix samples on slices; return how many tensors were compared."""
    n, total = small.op_graph.num_samples, large.op_graph.num_samples
    whole = run_graph(large, model, batch)
    own = tensors_of(model)
    small_blocks, large_blocks = (
        coarsen(small, granularity=granularity),
        coarsen(large, granularity=granularity),
    )
    specs, inputs = large_blocks.tensors, {spec.name: spec for spec in large.op_graph.inputs}
    compared = 0
    for block in small_blocks.blocks:
        made = {t for e in small_blocks.edges if e.src == block.name for t in e.tensors}
        read = {t for e in small_blocks.edges if e.dst == block.name for t in e.tensors}
        if any(specs[t].layout.kind is LayoutKind.UNIT for t in made | read):
            assert block.is_coupled, f"{block.name} touches a value of the whole unit"
        if block.is_coupled:
            continue
        for start in range(0, total - n + 1):
            values: dict[str, Any] = {name: own[key] for name, key in small.parameters.items()}
            values.update(small.constants)
            for name, key in small.inputs.items():
                values[name] = _take(batch[key], inputs[key], start, n)
            # contiguous, as a stage receives it: torch 2.11 traces `view` where 2.13 traces `reshape`
            values.update((t, _take(whole[t], specs[t], start, n).contiguous()) for t in read)
            result = run_nodes(small, small.replicated_closure(block.nodes), values)
            for t in made:
                expected = _take(whole[t], specs[t], start, n)
                assert result[t].shape == small_blocks.tensors[t].shape
                torch.testing.assert_close(
                    result[t], expected, rtol=1e-9, atol=1e-11, msg=f"{block.name}: {t}"
                )
                compared += 1
    return compared


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_that_does_not_mix_samples_runs_on_slices(name: str) -> None:
    model, make_batch = build(name, dtype=torch.float64)
    batch = make_batch(4, 3)
    small = capture_model(model, resize_batch(batch, 2))
    large = recapture(model, small.analysis, batch)
    assert _assert_blocks_run_on_slices(model, batch, small, large, "node") > 5
    _assert_blocks_run_on_slices(model, batch, small, large, "layer")


COUPLINGS = {
    "clip": ["the model itself: aten.matmul.default (matmul) combines every sample with every other"],
    "siglip": [
        "the model itself: aten.matmul.default (matmul) combines every sample with every other",
        "the model itself: aten.mean.default (mean_1) reduces over the samples",
    ],
    "llava": [
        "model: aten.masked_scatter.default (masked_scatter) takes its values in the order of the mask over all samples",
        "the model itself: aten.cross_entropy_loss.default (cross_entropy_loss) reduces over the samples",
    ],
    "batch_norm_mlp": [
        "layers.0.1: aten.batch_norm.default (batch_norm) updates buffers in place over all samples (layers.0.1.num_batches_tracked, layers.0.1.running_mean, layers.0.1.running_var)",
        "layers.1.1: aten.batch_norm.default (batch_norm_1) updates buffers in place over all samples (layers.1.1.num_batches_tracked, layers.1.1.running_mean, layers.1.1.running_var)",
        "the model itself: aten.cross_entropy_loss.default (cross_entropy_loss) reduces over the samples",
    ],
    "multi_sink": [
        "the model itself: aten.cross_entropy_loss.default (cross_entropy_loss) reduces over the samples",
        "the model itself: aten.mse_loss.default (mse_loss) reduces over the samples",
    ],
    "dlrm": [
        "the model itself: aten.binary_cross_entropy_with_logits.default (binary_cross_entropy_with_logits) reduces over the samples"
    ],
}
ONLY_THE_LOSS = [
    "the model itself: aten.cross_entropy_loss.default (cross_entropy_loss) reduces over the samples"
]


@pytest.mark.parametrize("name", MODELS)
def test_couplings_are_named_and_no_others(name: str) -> None:
    assert list(captured(name).op_graph.couplings) == COUPLINGS.get(name, ONLY_THE_LOSS)


def test_evaluation_batch_norm_mixes_nothing() -> None:
    assert list(captured("batch_norm_mlp", training=False).op_graph.couplings) == ONLY_THE_LOSS


class _Middle(nn.Module):
    """Linear, then an operator under test, then linear and a mean."""

    def __init__(self, function):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.LazyLinear(3)
        self.function = function

    def forward(self, x):
        return self.second(self.function(self.first(x))).pow(2).mean()


def _middle_nodes(function) -> set[str]:
    model = _Middle(function)
    model(torch.randn(4, 6))
    graph = capture_model(model, {"x": torch.randn(4, 6)}).op_graph
    second = next(i for i, node in enumerate(graph.nodes) if node.module == "second")
    mixing = [node.target for node in graph.nodes[:second] if node.is_coupling]
    return {target.split(".")[1] for target in mixing if "getitem" not in target}


@pytest.mark.parametrize(
    ("function", "operators"),
    [
        (lambda x: x - x.mean(0), {"mean", "sub"}),
        (lambda x: x.cumsum(0), {"cumsum"}),
        (lambda x: x.flip(0), {"flip"}),
        (lambda x: x.roll(1, 0), {"roll"}),
        (lambda x: x * torch.arange(x.shape[0])[:, None], {"mul"}),
        (lambda x: x.view(x.shape[0] // 2, 2, 6).flip(1).reshape(x.shape), {"view", "flip", "reshape"}),
        (lambda x: x.sort(0).values, {"sort"}),
        (lambda x: torch.softmax(x, 0), {"softmax"}),
        (lambda x: torch.softmax(x @ x.t(), -1) @ x, {"matmul", "softmax"}),
        (lambda x: x + x[:1], {"slice", "add"}),
        (lambda x: nn.functional.batch_norm(x, None, None, training=True), {"batch_norm"}),
        (lambda x: x / x.norm(), {"linalg_vector_norm", "norm", "div"}),
        (lambda x: torch.cat([x, x[:1]])[1:], {"slice", "cat"}),
        (lambda x: x[None].expand(x.shape[0], -1, -1).exp().mean(0), {"expand", "exp", "mean"}),
        # and operators that keep samples apart
        (lambda x: x.cumsum(1), set()),
        (lambda x: x.flip(1).sort(1).values, set()),
        (lambda x: torch.softmax(x, 1), set()),
        (lambda x: x[torch.arange(x.shape[0]), x.argmax(1)][:, None] + x, set()),
        (lambda x: nn.functional.group_norm(x, 2), set()),
        (lambda x: torch.einsum("bi,bj->bij", x, x).flatten(1), set()),
        (lambda x: x.t().contiguous().view(6, -1).t(), set()),
        (lambda x: x.view(-1, 3, 2).transpose(0, 1).reshape(-1, 2).exp().view(3, -1, 2).transpose(0, 1).flatten(1), set()),
        (lambda x: torch.stack(x.chunk(3, 1), 1).sum(1), set()),
        (lambda x: nn.functional.pad(x, (1, 1)).unfold(1, 3, 1).mean(-1), set()),
        (lambda x: torch.where(x > 0, x, x.new_zeros(())), set()),
        (lambda x: x.repeat_interleave(2, 0).view(-1, 12), set()),
        (lambda x: x.gather(1, x.argsort(1)), set()),
        (lambda x: x + torch.ones(x.shape[0], 1), set()),
        (lambda x: x * torch.rand(x.shape[0], 1), set()),  # stochastic depth draws for each sample
        (lambda x: x * torch.rand(()), {"rand", "mul"}),
        (lambda x: x * torch.rand_like(x), set()),
    ],
)  # fmt: skip
def test_mixing_operators_are_found(function, operators) -> None:
    found = _middle_nodes(function)
    if operators:
        assert found
        assert found <= operators
    else:
        assert found == set()


def test_merged_axis_never_crosses_blocks() -> None:
    capture = captured("sequence_first")
    model, make_batch = build("sequence_first")
    large = recapture(model, capture.analysis, make_batch(4))
    merged = [
        (a.name, a.output.shape)
        for a, b in zip(capture.op_graph.nodes, large.op_graph.nodes, strict=True)
        if a.output and a.output.shape == (10, 8) and b.output.shape == (20, 8)  # (length * samples, width)
    ]
    assert len(merged) == 4
    crossing = coarsen(capture, granularity="node").tensors
    assert not crossing.keys() & {name for name, _ in merged}
    assert [spec.layout.axis for spec in coarsen(capture).tensors.values()] == [1, 0]


def _writes(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """In-place writes through views, a buffer that counts, and a write into an activation."""
    shifted = ids.new_zeros(ids.shape)
    shifted[:, 1:] = ids[:, :-1].clone()
    shifted[:, 0] = 3
    x = model.layers[0](model.embed(shifted))
    mask = (shifted > 2).unsqueeze(-1)
    y = model.layers[1](x)
    y[:, 0] += 1.0
    y.masked_fill_(mask, 0.5)
    if model.training:
        model.steps += 1
    return model.layers[2](y * 2).pow(2).mean()


def test_writes_stay_with_what_reads_before_them() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    steps = nn.Buffer(torch.zeros((), dtype=torch.long))
    model = Calls(_writes, embed=nn.Embedding(8, 4), layers=layers, steps=steps)
    ids = torch.randint(0, 8, (4, 5))
    capture = capture_model(model, {"ids": ids[:2]})
    nodes = {node.name: node for node in capture.op_graph.nodes}
    shift = next(c for c in capture.clusters if "new_zeros" in c)
    assert {nodes[n].target.split(".")[1] for n in shift} >= {"zeros", "slice", "copy_", "select", "fill_"}
    assert all(nodes[n].is_replicable for n in shift)
    active = next(c for c in capture.clusters if "masked_fill_" in c)
    assert "linear_1" in active
    assert not any(nodes[n].is_replicable for n in active)
    assert set(shift) <= capture.replicated_closure(["embedding"])
    assert [p.name for p in capture.op_graph.parameters if p.is_mutated] == ["steps"]
    large = recapture(model, capture.analysis, {"ids": ids})
    for granularity in ("layer", "node"):
        assert _assert_blocks_run_on_slices(model, {"ids": ids}, capture, large, granularity) >= 4
        blocks = coarsen(capture, granularity=granularity).blocks
        assert sum("steps" in block.parameters for block in blocks) == 1
        assert all(len({b.name for b in blocks if set(c) & set(b.nodes)}) <= 1 for c in capture.clusters)


def _positions(model: Any, x: Any, images: Any, positions: Any, scale: Any) -> torch.Tensor:
    hidden = model.embed(x + positions) * scale
    return hidden.mean() + model.embed(images).view(x.shape[0], 3, -1).mean()


def test_inputs_with_several_rows_a_sample_or_none() -> None:
    batch = {
        "x": torch.randn(4, 5, 2),
        "images": torch.randn(12, 2),
        "positions": torch.randn(1, 5, 2),
        "scale": torch.tensor(2.0),
        "mode": None,
    }
    assert count_samples(batch) == 4
    assert rows_per_sample(batch) == {"x": 1, "images": 3, "positions": 0, "scale": 0}
    smaller = resize_batch(batch, 3)
    assert {k: tuple(v.shape) for k, v in smaller.items() if v is not None} == {
        "x": (3, 5, 2), "images": (9, 2), "positions": (1, 5, 2), "scale": ()
    }  # fmt: skip
    assert torch.equal(resize_batch(batch, 6)["images"][12:], batch["images"][:6])
    batch.pop("mode")
    graph = capture_model(Calls(_positions, embed=nn.Linear(2, 4)), batch).op_graph
    kinds = {s.name: (s.layout.kind.value, s.layout.rows_per_sample) for s in graph.inputs}
    assert kinds == {
        "x": ("batch", 1),
        "images": ("batch", 3),
        "positions": ("uniform", 1),
        "scale": ("uniform", 1),
    }


def test_unequal_rows_are_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"leading sizes \{'a': 4, 'b': 4, 'c': 6\} are not multiples of 4"
    ):
        count_samples({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(6)})
    with pytest.raises(CaptureError, match="no tensor with a batch axis"):
        count_samples({"a": torch.zeros(()), "b": 3})
    with pytest.raises(ValueError, match="num_samples must be positive, got 0"):
        resize_batch({"a": torch.zeros(4)}, 0)


def _branches(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Tables by name, made in a loop over a set: Gemma 3's, which has another order in every process."""
    tables = {name: (x * getattr(model, f"{name}_table")).cos() for name in model.order}
    for name in ("full", "sliding", "none"):
        x = model.layers[name](x).contiguous() + tables[name]
    return x.pow(2).mean()


def test_a_loop_of_another_order_is_the_same_graph() -> None:
    torch.manual_seed(0)
    order = ["full", "sliding", "none"]
    layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in order})
    tables = {f"{name}_table": nn.Buffer(torch.arange(4.0) + i) for i, name in enumerate(order)}
    model: Any = Calls(_branches, order=order, layers=layers, **tables)
    batch = {"x": torch.randn(4, 4)}
    capture = capture_model(model, {"x": batch["x"][:2]})
    wanted = float(model(**batch).detach())
    for order in (["sliding", "full", "none"], ["none", "sliding", "full"]):
        model.order = order
        again = recapture(model, capture.analysis, batch)
        assert [node.name for node in again.op_graph.nodes] == [node.name for node in capture.op_graph.nodes]
        assert [node.inputs for node in again.op_graph.nodes] == [
            node.inputs for node in capture.op_graph.nodes
        ]
        assert float(run_graph(again, model, batch)[again.op_graph.loss]) == pytest.approx(wanted, rel=1e-6)


def _counts(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads what it writes, before or after."""
    x = model.layer(x)
    y = x * model.state if model.reads_first else None
    model.state.mul_(0.5)
    return (x * model.state if y is None else y).pow(2).mean()


def test_a_read_and_a_write_do_not_change_places() -> None:
    model: Any = Calls(_counts, reads_first=True, layer=nn.Linear(4, 4), state=nn.Buffer(torch.ones(4)))
    capture = capture_model(model, {"x": torch.randn(2, 4)})
    model.reads_first = False
    with pytest.raises(CaptureError, match="the graph changed"):
        recapture(model, capture.analysis, {"x": torch.randn(4, 4)})
