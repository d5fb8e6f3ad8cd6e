"""Mode async on ranks that hold several stages equals PipeDream's staleness emulated in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import kept_shared_jobs as jobs
from tests.integrations.pipedream import reported
from tests.integrations.test_async import check_parameters, emulate
from tests.models import build
from tests.ranks import run_kept_ranks


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
    answers = run_kept_ranks(jobs.train, 2, case, mini_batch, unit, changes, str(tmp_path), timeout_s=300)
    assert any(len(answer["held"]) > 1 for answer in answers)
    name, stages = jobs.PLACED[case][0], answers[0]["stages"]
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
        assert answer["steps"] == (jobs.STEPS, jobs.STEPS * mini_batch)
        assert answer["resumed"] == answer["through"]
        assert answer["kept"] == list(answer["held"]), "each stage keeps the gradients of its last update"
        assert answer["memory"][0] and answer["memory"][1] > 0
        assert answer["flushed"] == answers[0]["flushed"]
    check_parameters(answers, emulation)
