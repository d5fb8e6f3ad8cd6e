"""Mode async on ranks that hold several stages equals PipeDream's staleness emulated in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import async_jobs
from tests.integrations.engine_jobs import steps
from tests.integrations.pipedream import reported
from tests.integrations.test_async import check_parameters, emulate
from tests.integrations.test_shared_ranks import CLIP, LLAVA
from tests.models import build
from tests.ranks import run_kept_ranks

PLACED: dict[str, tuple[str, list[list[str]], list[list[int]]]] = {
    "clip, a tower on both ranks": ("clip", CLIP, [[0, 1], [0], [1]]),
    "clip, both towers data-parallel": ("clip", CLIP, [[0, 1], [1, 0], [0]]),
    "llava, interleaved": ("llava", LLAVA, [[0], [1], [0]]),
}
"""Model, the modules of each stage, and the ranks of each."""
STEPS = 8


def stages_of(engine: Any, names: Any) -> set[int]:
    """Return the stages of this rank that parameters of these names are of."""
    return {s.stage_index for s in engine.rank_engine.stages if set(names) & set(s.gradients.parameters)}


def train(case: str, mini_batch: int, unit: int, changes: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train some mini-batches, with a flush, an evaluation and a checkpoint on the way; go on from that anew."""
    name, modules, ranks = PLACED[case]
    stages = [{"modules": m, "ranks": r} for m, r in zip(modules, ranks, strict=True)]
    block = {"plan": {"stages": stages}, **changes.get("block", {})}
    given = async_jobs.async_config(mini_batch=mini_batch, unit=unit, **{**changes, "block": block})
    engine, batches = async_jobs.make(name, mini_batch, given)
    engine.retain_gradients()
    losses = steps(engine, batches[:4])
    flushed = [engine.flush()]
    losses += steps(engine, batches[4:STEPS])
    flushed.append(engine.flush())
    engine.save_checkpoint(directory)
    report = engine.memory_report().ranks[engine.global_rank]
    answer: dict[str, Any] = {
        "losses": losses,
        "flushed": [float(loss) for loss in flushed],
        "parameters": {n: p.detach().clone() for n, p in engine.module.named_parameters()},
        "stages": async_jobs.held_by_stages(engine),
        "steps": (engine.global_steps, engine.global_samples),
        "held": engine.rank_engine.indices,
        "kept": sorted(stages_of(engine, engine.gradients)),
        "memory": (report.counts is not None, report.measured_peak_bytes),
    }
    rest = batches[STEPS : STEPS + 3]
    answer["through"] = steps(engine, rest)
    engine.destroy()
    other, _ = async_jobs.make(name, mini_batch, given)
    other.load_checkpoint(directory)
    answer["resumed"] = steps(other, rest)
    other.destroy()
    return answer


@pytest.mark.parametrize(
    ("case", "mini_batch", "unit", "changes"),
    [
        ("clip, a tower on both ranks", 16, 4, {"zero_optimization": {"stage": 1}}),
        ("clip, both towers data-parallel", 8, 4, {"block": {"vertical_sync": True}}),
        (
            "llava, interleaved",
            4,
            2,
            {"gradient_clipping": 0.05, "block": {"memory": {"recompute": "full"}}},
        ),
    ],
)
def test_it_equals_the_emulation(
    case: str, mini_batch: int, unit: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    answers = run_kept_ranks(train, 2, case, mini_batch, unit, changes, str(tmp_path), timeout_s=300)
    assert any(len(answer["held"]) > 1 for answer in answers)
    name, stages = PLACED[case][0], answers[0]["stages"]
    emulation = emulate(
        name,
        stages,
        mini_batch=mini_batch,
        micro=unit,
        unit=unit,
        vertical_sync=changes.get("block", {}).get("vertical_sync", False),
        clip=changes.get("gradient_clipping", 0.0),
    )
    losses: list[float] = []
    for first in (0, 4):
        batches = [build(name)[1](mini_batch, seed) for seed in range(first, first + 4)]
        found = [emulation.mini_batch(batch, unit) for batch in batches]
        emulation.flush()
        losses += reported(found, emulation.longest)
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, abs=2e-6)
        assert answer["steps"] == (STEPS, STEPS * mini_batch)
        assert answer["resumed"] == answer["through"]
        assert answer["kept"] == list(answer["held"]), "each stage keeps the gradients of its last update"
        assert answer["memory"][0] and answer["memory"][1] > 0
        assert answer["flushed"] == answers[0]["flushed"]
    check_parameters(answers, emulation)
