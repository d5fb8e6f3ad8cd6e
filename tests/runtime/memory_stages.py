"""One stage of a test model in one process, with and without a memory plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.ir.block_graph import BlockGraph, SavedTensor
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import MemoryPlan, RecomputedSegment, SwappedTensor
from gpp_plugin.runtime.compute import AutogradCompute, BoundaryGradients
from gpp_plugin.runtime.memory.activation_policy import make_stage_activations
from gpp_plugin.runtime.memory.segments import StageOperators
from gpp_plugin.runtime.memory.swap import SwapLink
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function
from tests.models import build

SAMPLES = 2
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class StageBlocks:
    """Some blocks of a graph."""

    graph: BlockGraph
    blocks: tuple[str, ...]

    def saved(self) -> list[SavedTensor]:
        """Return what the blocks are charged with."""
        return [t for t in self.graph.saved if t.kept_by[0] in self.blocks]


@dataclass(frozen=True, kw_only=True)
class TestStage(StageBlocks):
    """Blocks of a model captured at `SAMPLES` samples.

    Args:
        gradients: received tensors that take a gradient.
    """

    __test__ = False

    captured: CapturedGraph
    function: StageFunction
    gradients: tuple[str, ...]
    state: Mapping[str, Tensor]
    make_batch: Callable[..., Any]

    @property
    def operators(self) -> StageOperators:
        return StageOperators(
            blocks={b.name: b.nodes for b in self.graph.blocks if b.name in self.blocks},
            storage_of={n.name: n.storage for n in self.captured.op_graph.nodes if n.storage},
        )


@cache
def capture(name: str, dtype: torch.dtype, dropout: float) -> tuple[Any, ...]:
    model, make_batch = build(name, dtype=dtype, dropout=dropout)
    return capture_model(model, make_batch(SAMPLES)), model, make_batch


def make_stage(
    name: str,
    *,
    granularity: str = "node",
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    start: float = 0.0,
) -> TestStage:
    """Return the blocks of a test model behind the first ``start`` of them as a stage."""
    captured, model, make_batch = capture(name, dtype, dropout)
    return stage_of(captured, model, make_batch, granularity=granularity, start=start)


def stage_of(
    captured: CapturedGraph,
    model: nn.Module,
    make_batch: Callable[..., Any],
    *,
    granularity: str = "node",
    start: float = 0.0,
) -> TestStage:
    """Return the blocks of a captured model behind the first ``start`` of them as a stage."""
    graph = coarsen(captured, granularity=granularity)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    blocks = tuple(block.name for block in graph.blocks[int(start * len(graph.blocks)) :])
    nodes = [node for block in graph.blocks if block.name in blocks for node in block.nodes]
    function = build_stage_function(captured, nodes, (str(captured.op_graph.loss),))
    if function.choice is not None:
        function.choice.use(captured.analysis.unpadded)
    gradients = tuple(n for n in function.received if graph.tensors[n].requires_grad)
    return TestStage(
        captured=captured, graph=graph, blocks=blocks, function=function, gradients=gradients, state=state,
        make_batch=make_batch,
    )  # fmt: skip


def dropped_by(graph: BlockGraph, blocks: Sequence[str]) -> list[SavedTensor]:
    """Return what a segment drops: made in it, kept and read by nobody outside."""
    inside = set(blocks)
    read_outside = {n for e in graph.edges if e.src in inside and e.dst not in inside for n in e.tensors}
    return [
        t
        for t in graph.saved
        if t.made_by in inside
        and inside.issuperset(t.kept_by)
        and read_outside.isdisjoint((t.name, *t.views))
    ]


def memory_plan(
    stage: StageBlocks, segments: Iterable[Sequence[str]] = (), swapped: Iterable[str] = ()
) -> MemoryPlan:
    """Return a plan with these segments of blocks and these tensors swapped."""
    recomputed = []
    for blocks in segments:
        tensors = dropped_by(stage.graph, blocks)
        if tensors:
            recomputed.append(
                RecomputedSegment(
                    blocks=tuple(blocks),
                    tensors=tuple(t.name for t in tensors),
                    bytes=sum(t.bytes for t in tensors),
                    held_bytes=0,
                    recompute_us=1.0,
                )
            )
    sizes = {t.name: t.bytes for t in stage.graph.saved}
    return MemoryPlan(
        recomputed=tuple(recomputed),
        swapped=tuple(SwappedTensor(name=name, bytes=sizes[name], free_us=0.0) for name in swapped),
    )


def chunks(stage: StageBlocks, length: int) -> list[tuple[str, ...]]:
    """Return every other chunk of so many blocks: some are recomputed, some are not."""
    blocks = stage.blocks
    return [blocks[i : i + length] for i in range(0, len(blocks), 2 * length)]


def plan_swap(stage: StageBlocks) -> MemoryPlan:
    """Swap all that the stage keeps."""
    return memory_plan(stage, (), kept_by(stage, MemoryPlan()))


def plan_both(stage: StageBlocks, length: int) -> MemoryPlan:
    """Recompute every other chunk of blocks, and swap every other tensor that is left."""
    segments = chunks(stage, length)
    return memory_plan(stage, segments, kept_by(stage, memory_plan(stage, segments))[::2])


def kept_by(stage: StageBlocks, plan: MemoryPlan) -> list[str]:
    """Return the tensors that a plan's segments leave to the stage."""
    dropped = {name for segment in plan.recomputed for name in segment.tensors}
    return [t.name for t in stage.saved() if t.name not in dropped]


class Hooks:
    """The optimizer side of a stage: sums over nobody, and counts."""

    def __init__(self, loss_scale: float = 1.0) -> None:
        self.loss_scale = loss_scale
        self.num_accumulated = self.steps = 0

    def accumulate(self) -> None:
        self.num_accumulated += 1

    def reduce_data(self) -> None: ...

    def reduce_tied(self) -> None: ...

    def step(self) -> None:
        self.steps += 1


class Trainer:
    """Runs a stage's tasks on copies of its parameters."""

    def __init__(
        self, stage: TestStage, plan: MemoryPlan | None = None, *, device: torch.device = CPU, **options: Any
    ) -> None:
        self.stage = stage
        self.link = SwapLink(device)
        self.device = device
        self.tensors = [
            stage.state[name].detach().clone().to(device).requires_grad_(stage.state[name].requires_grad)
            for name in stage.function.tensors
        ]
        activations = None
        if plan is not None:
            activations = make_stage_activations(
                stage="s",
                plan=plan,
                blocks=stage.blocks,
                operators=stage.operators,
                whole=stage.function,
                gradient_inputs=stage.gradients,
                link=self.link,
                **options,
            )
        self.activations = activations
        self.compute = AutogradCompute(
            function=stage.function,
            parameters=self.tensors,
            gradients=BoundaryGradients(outputs=(), inputs=stage.gradients),
            hooks=Hooks(2.0),
            loss=str(stage.captured.op_graph.loss),
            activations=activations,
        )

    def forward(self, micro_batch: int) -> Tensor:
        """Run a forward on data that depends on the micro-batch only; return the loss."""
        batch = self.stage.make_batch(SAMPLES, micro_batch)
        inputs = [batch[key].to(self.device) for key in self.stage.function.batch_inputs]
        return self.compute.forward(micro_batch, None, inputs, self.received(micro_batch))[0].detach()

    def received(self, micro_batch: int) -> list[Tensor]:
        specs = [self.stage.graph.tensors[name] for name in self.stage.function.received]
        generator = torch.Generator().manual_seed(1000 + micro_batch)
        found = []
        for spec in specs:
            dtype = getattr(torch, spec.dtype)
            if dtype.is_floating_point:
                tensor = torch.randn(spec.shape, generator=generator).to(dtype)
            else:
                tensor = torch.ones(spec.shape, dtype=dtype)
            found.append(tensor.to(self.device))
        return found

    def backward(self, micro_batch: int, *, is_split: bool = False) -> list[Tensor]:
        if not is_split:
            return [g.clone() for g in self.compute.backward(micro_batch, [])]
        found = [g.clone() for g in self.compute.input_gradient(micro_batch, [])]
        self.compute.weight_gradient(micro_batch)
        return found

    def train(self, *, is_split: bool = False, in_flight: int = 2, steps: int = 3) -> dict[str, list[Tensor]]:
        """Run micro-batches with so many in flight; return all that training makes."""
        torch.manual_seed(7)
        for tensor in self.tensors:
            tensor.grad = None
        losses, received = [], []
        for micro_batch in range(steps + in_flight - 1):
            if micro_batch < steps:
                losses.append(self.forward(micro_batch))
            done = micro_batch - in_flight + 1
            if done >= 0:
                received += self.backward(done, is_split=is_split)
        self.compute.clear()
        return {
            "losses": losses,
            "received": received,
            "gradients": [t.grad for t in self.tensors if t.grad is not None],
            "buffers": [t.detach().clone() for t in self.tensors if not t.requires_grad],
            "random": [torch.get_rng_state()],
        }

    def count(self, **options: Any) -> MemoryCounts:
        """Return what a mini-batch keeps."""
        return self.train_and_count(**options)[1]

    def train_and_count(self, **options: Any) -> tuple[dict[str, list[Tensor]], MemoryCounts]:
        """Return what training makes and what it keeps."""
        self.compute.start_counting()
        made = self.train(**options)
        counts = self.compute.stop_counting()
        assert counts is not None
        return made, counts


def check_plan(stage: TestStage, plan: MemoryPlan, expected: dict[str, list[Tensor]]) -> MemoryCounts:
    """Compare the first pass, which finds a recipe, and the next ones with what keeping everything makes."""
    trainer = Trainer(stage, plan)
    first, counts = trainer.train_and_count()
    assert_same(first, expected)
    again, counts_again = trainer.train_and_count()
    assert_same(again, expected)
    assert counts == counts_again
    return counts


def assert_same(ours: dict[str, list[Tensor]], theirs: dict[str, list[Tensor]]) -> None:
    """Compare bit by bit."""
    assert ours.keys() == theirs.keys()
    for what, tensors in ours.items():
        assert len(tensors) == len(theirs[what]), what
        for i, (a, b) in enumerate(zip(tensors, theirs[what], strict=True)):
            assert torch.equal(a, b), f"{what} {i} differs by {(a - b).abs().max()}"
