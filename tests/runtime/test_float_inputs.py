"""Layers that read the batch's own floats: what is measured, planned and counted of them is one number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpp_plugin.capture.export import capture_model
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import MemoryPlan, Stage
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.profile.measure import profile_blocks
from gpp_plugin.runtime.batches import InputLink
from tests.runtime.memory_stages import (
    CPU,
    SAMPLES,
    TestStage,
    Trainer,
    chunks,
    memory_plan,
    plan_swap,
    stage_of,
)


class Tokens(nn.Module):
    """Its first layer reads a sequence of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the squared error of a number a sample; ``x`` is (samples, length, 16)."""
        found = self.second(torch.tanh(self.first(x))).mean(1).squeeze(-1)
        return nn.functional.mse_loss(found, labels)


def tokens(num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_samples, 5, 16, generator=generator),
        "labels": torch.randn(num_samples, generator=generator),
    }


def scattered(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same values, the last two axes of three exchanged in memory."""
    return {
        k: v.transpose(-1, -2).contiguous().transpose(-1, -2) for k, v in batch.items() if v.dim() > 2
    } | {k: v for k, v in batch.items() if v.dim() <= 2}


def counted(stage: TestStage, plan: MemoryPlan | None, rows: list[tuple[Tensor, ...]]) -> MemoryCounts:
    """Return what one pass over these rows keeps, moves and makes again."""
    trainer = Trainer(stage, plan)
    trainer.compute.start_counting()
    for micro_batch, inputs in enumerate(rows):
        trainer.compute.forward(micro_batch, None, inputs, [])
        trainer.compute.backward(micro_batch, [])
    counts = trainer.compute.stop_counting()
    assert counts is not None
    return counts


def test_the_batch_is_held_by_the_batch_however_it_lies_in_memory() -> None:
    torch.manual_seed(0)
    model, batch = Tokens(), tokens(2 * SAMPLES)
    captured = capture_model(model.train(), tokens(SAMPLES))
    stage = stage_of(captured, model, tokens, granularity="layer")
    specs: dict[str, TensorSpec] = {spec.name: spec for spec in captured.op_graph.inputs}
    whole = Stage(
        name="s", blocks=stage.blocks, ranks=(0,), micro_batch_size=SAMPLES, in_flight=1, schedule="1f1b"
    )
    found = set()
    for given in (batch, scattered(batch)):
        profile = profile_blocks(
            captured, stage.graph, model_state=stage.state, batch=given, repeats=1, use_cache=False
        )
        kept = sum(c.saved_bytes_per_sample * SAMPLES + c.saved_bytes_fixed for c in profile.costs)
        rows = InputLink(CPU).slice_batch(
            given, stage.function.batch_inputs, samples=[whole.samples(m, 0) for m in range(2)], specs=specs,
            dtype=torch.float32,
        )  # fmt: skip
        swapped, dropped = plan_swap(stage), memory_plan(stage, chunks(stage, 1))
        made_again = sum(segment.bytes for segment in dropped.recomputed)
        plain = counted(stage, None, rows)
        away, again = counted(stage, swapped, rows), counted(stage, dropped, rows)
        assert plain.held_bytes == kept
        assert away.swapped_bytes == swapped.swapped_bytes and again.recomputed_bytes == made_again
        assert away.held_bytes + away.swapped_bytes == kept
        found.add((plain, away, again))
    assert len(found) == 1
