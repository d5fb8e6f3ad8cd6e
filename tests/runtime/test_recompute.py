"""Segments that run again: gradients, random states and buffers are those of a stage that keeps everything."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.capture.export import capture_model
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import MemoryPlan, RecomputedSegment
from gpp_plugin.runtime.memory.recompute import Drop, MovingPass, Replay
from gpp_plugin.runtime.random_streams import are_same, set_streams, streams_of
from tests.runtime.memory_stages import (
    CPU,
    SAMPLES,
    TestStage,
    Trainer,
    assert_same,
    chunks,
    make_stage,
    memory_plan,
    stage_of,
)


def check(stage: TestStage, plan: MemoryPlan, **options: Any) -> None:
    """Compare with everything kept, bit by bit, and what is made again with the plan."""
    assert_same(Trainer(stage, plan).train(**options), Trainer(stage).train(**options))
    counts = Trainer(stage, plan).count(**options)
    assert counts.recomputed_bytes == sum(segment.bytes for segment in plan.recomputed) > 0


def test_what_is_kept_and_made_again_adds_up() -> None:
    """Segments of whole layers hold nothing for themselves: all they read is kept anyway."""
    stage = make_stage("gpt2", granularity="layer", dropout=0.1)
    plan = memory_plan(stage, chunks(stage, 1))
    plain, counts = Trainer(stage).count(), Trainer(stage, plan).count()
    assert counts.held_bytes + counts.recomputed_bytes == plain.held_bytes
    assert (plain.recomputed_bytes, plain.swapped_bytes, plain.working_bytes) == (0, 0, 0)
    assert plain.peak_held_bytes == 2 * plain.held_bytes
    assert counts.peak_held_bytes == 2 * counts.held_bytes
    assert counts.working_bytes == max(segment.bytes for segment in plan.recomputed)
    charged = sum(block.saved_bytes for block in stage.graph.blocks)
    assert plain.held_bytes == pytest.approx(charged, rel=0.01)


@pytest.mark.parametrize("granularity", ["node", "layer"])
def test_batch_norm_statistics_are_updated_once(granularity: str) -> None:
    stage = make_stage("batch_norm_mlp", granularity=granularity)
    plan = memory_plan(stage, [stage.blocks[:-1]])
    check(stage, plan)
    trainer = Trainer(stage, plan)
    buffers = trainer.train(steps=3)["buffers"]
    assert [int(b) for b in buffers if b.dtype == torch.int64] == [3, 3]


class Drifting(nn.Module):
    """Reads a buffer before and after its update."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * (self.mean + 1).cos()
        self.mean.mul_(0.5).add_(hidden.detach().mean(0))
        hidden = torch.tanh(self.second(hidden) * self.mean)
        return nn.functional.cross_entropy(hidden, labels)


class Woven(nn.Module):
    """Two branches whose layers take turns, each with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        one, other = x, x * 0.5
        for left, right in zip(self.left, self.right, strict=True):
            one = nn.functional.dropout(torch.tanh(left(one)), 0.3, self.training)
            other = nn.functional.dropout(torch.tanh(right(other)), 0.3, self.training)
        return nn.functional.cross_entropy(one * other, labels)


def own_stage(model: nn.Module) -> TestStage:
    def make_batch(num_samples: int, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "x": torch.randn(num_samples, 8, generator=generator),
            "labels": torch.randint(0, 3, (num_samples,), generator=generator),
        }

    torch.manual_seed(0)
    return stage_of(capture_model(model.train(), make_batch(SAMPLES)), model, make_batch)


def test_a_buffer_that_is_read_and_written_has_its_value_of_the_forward() -> None:
    stage = own_stage(Drifting())
    assert any(p.is_mutated for p in stage.captured.op_graph.parameters)
    plan = memory_plan(stage, [stage.blocks])
    check(stage, plan, in_flight=1)
    # the next micro-batch's forward writes it before this one's backward
    assert_same(Trainer(stage, plan).train(in_flight=2), Trainer(stage).train(in_flight=1))


def test_random_numbers_of_a_segment_between_those_of_another_branch() -> None:
    stage = own_stage(Woven())
    left = [b for b in stage.blocks if ".left." in f".{b}" or b.startswith("left")]
    nodes = [n.name for n in stage.captured.op_graph.nodes]
    of_left = {node for block in stage.graph.blocks if block.name in left for node in block.nodes}
    drops = [name for name in nodes if "dropout" in name]
    # the model's own forward draws: a dropout belongs to the branch it reads from
    ours = [block for block in stage.blocks if block in left or block.rpartition(":")[2] in drops[::2]]
    tanhs = [name for name in nodes if "tanh" in name][::2]
    segment = [block for block in stage.blocks if block in ours or block.rpartition(":")[2] in tanhs]
    assert of_left and len(drops) == 6 and len(segment) == 9
    check(stage, memory_plan(stage, [segment]))


def test_dropped_storages_are_free_between_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make_stage("t5", granularity="layer", dropout=0.1)
    trainer = Trainer(stage, memory_plan(stage, [[block] for block in stage.blocks]))
    dropped: list[weakref.ref[Any]] = []
    original = MovingPass.pack

    def pack(self: MovingPass, tensor: Tensor, place: int, action: Any) -> Any:
        if isinstance(action, Drop):
            dropped.append(weakref.ref(tensor.untyped_storage()))
        return original(self, tensor, place, action)

    monkeypatch.setattr(MovingPass, "pack", pack)
    for micro_batch in range(2):
        trainer.forward(micro_batch)
        assert dropped and all(storage() is None for storage in dropped)
        trainer.backward(micro_batch)
        dropped.clear()


def test_a_segment_is_let_go_with_its_part_of_the_backward() -> None:
    """What it held does not wait for the end of the micro-batch."""
    stage = make_stage("gpt2", dropout=0.1)
    trainer = Trainer(stage, memory_plan(stage, chunks(stage, 5)))
    trainer.train(steps=1, in_flight=1)
    alive: list[weakref.ref[Replay]] = []
    numbers: list[int] = []
    run = Replay._run

    def watch(self: Replay) -> None:
        alive.append(weakref.ref(self))
        numbers.append(sum(replay() is not None for replay in alive))
        run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replay, "_run", watch)
        trainer.train(steps=1, in_flight=1)
    assert len(numbers) > 3 and set(numbers) == {1}, numbers


def segment(*blocks: str) -> RecomputedSegment:
    return RecomputedSegment(blocks=blocks, tensors=("x",), bytes=1, held_bytes=0, recompute_us=1.0)


def test_plans_that_do_not_fit_the_stage_are_refused() -> None:
    stage = make_stage("gpt2", granularity="layer", dropout=0.1)
    first = stage.blocks[0]
    with pytest.raises(PlanError, match="block 'elsewhere', which is not one of the stage's"):
        Trainer(stage, MemoryPlan(recomputed=(segment(first, "elsewhere"),)))
    with pytest.raises(PlanError, match=f"block {first!r} is in two segments"):
        Trainer(stage, MemoryPlan(recomputed=(segment(first), segment(first))))


def test_a_stage_without_a_plan_uses_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("hooks cost time")

    stage = make_stage("gpt2", granularity="layer", dropout=0.1)
    monkeypatch.setattr("gpp_plugin.runtime.memory.activation_policy.saved_tensors_hooks", fail)
    monkeypatch.setattr("gpp_plugin.runtime.memory.recompute.saved_tensors_hooks", fail)
    trainer = Trainer(stage)
    trainer.train()
    with pytest.raises(AssertionError, match="hooks cost time"):
        trainer.count()


def test_random_states_of_a_device_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for two CUDA devices: what they draw from, by device."""
    drawn = {0: 1.0, 1: 5.0}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([drawn[device.index]]))
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: drawn.update({device.index: float(state)})
    )
    second = torch.device("cuda", 1)
    before = streams_of(second)
    assert are_same(before, streams_of(second))
    drawn.update({0: 2.0, 1: 6.0})
    assert not are_same(before, streams_of(second))
    set_streams(second, before)
    assert drawn == {0: 2.0, 1: 5.0}
    torch.rand(1)
    assert not are_same(before, streams_of(second)), "the host draws too"
    on_host = streams_of(CPU)
    assert on_host[1] is None and are_same(on_host, streams_of(CPU))
    assert are_same(on_host, streams_of(second)), "of the device nothing is known"
