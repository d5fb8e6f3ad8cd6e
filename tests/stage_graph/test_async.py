"""Mode async on a user's own modules equals PipeDream's staleness emulated in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.integrations.pipedream import Emulation, PlainStage, reported
from tests.ranks import run_kept_ranks
from tests.stage_graph import jobs
from tests.stage_graph.graphs import B, U, Whole, batch_of, in_single

NUM_BATCHES = 6


def emulate(name: str, held: dict[str, int]) -> tuple[Emulation, list[list[float]]]:
    model = Whole(name).float()
    stages = [
        PlainStage(
            parameters=tuple(n for n, _ in model.named_parameters() if n.startswith(f"{stage}.")), held=count
        )
        for stage, count in held.items()
    ]
    emulation = Emulation(
        model,
        stages,
        unit=U,
        window=B // U,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
    )
    losses = []
    for seed in range(NUM_BATCHES):
        losses.append(emulation.mini_batch(in_single(batch_of(name, seed=seed)), U))
    emulation.flush()
    return emulation, losses


def part_of(name: str, rank: int, whole: dict[str, Tensor]) -> Tensor:
    """Return what a tensor rank of stage b holds of the plain module's parameters."""
    stage, _, leaf = name.partition(".")
    if stage != "b" or leaf in ("first.weight", "first.bias", "second.weight", "second.bias"):
        return whole[name]
    first, kind = leaf.partition("_")[::2]
    tensor = whole[f"b.{first}.{kind or 'weight'}"]
    axis = {"first": 0, "first_bias": 0, "second": 1}.get(leaf)
    return tensor if axis is None else tensor.chunk(2, dim=axis)[rank]


def test_modules_step_after_every_micro_batch_with_the_weights_of_its_forward() -> None:
    """Stages with an edge past another, run again before their backward, and one of two tensor ranks with shards."""
    memory = {"skip": {"recompute": "full"}, "two_tensor_ranks": {}}
    answers = run_kept_ranks(jobs.train_asynchronously, 3, memory, NUM_BATCHES)
    for name in memory:
        first = answers[0][name]
        assert first["recomputed"] == ([True, True, False] if name == "skip" else [False, False])
        assert max(first["staleness"].values()) > 0 and first["differences"] == ()
        emulation, losses = emulate(name, first["held"])
        wanted = {key: parameter.detach() for key, parameter in emulation.model.named_parameters()}
        for rank, answer in enumerate(each[name] for each in answers):
            assert answer["losses"] == pytest.approx(reported(losses, emulation.longest), abs=1e-6)
            assert answer["parameters"]
            for key, parameter in answer["parameters"].items():
                torch.testing.assert_close(parameter, part_of(key, rank, wanted), rtol=1e-5, atol=1e-6)
