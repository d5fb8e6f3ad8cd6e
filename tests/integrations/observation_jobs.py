"""What each rank runs in the tests of what users see of training; importable by the processes that run it."""

from __future__ import annotations

import logging
from typing import Any

from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build


def observe(directory: str) -> dict[str, Any]:
    """Every report of the JSON, alone with the others, a line each two steps."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gpp_plugin.engine.metrics")
    logger.addHandler(handler)
    level, logger.level = logger.level, logging.INFO
    try:
        model, make_batch = build("t5")
        config = config_of(
            steps_per_print=2,
            wall_clock_breakdown=True,
            comms_logger={"enabled": True},
            flops_profiler={"enabled": True, "profile_step": 1, "output_file": f"{directory}/flops.txt"},
            csv_monitor={"enabled": True, "output_path": directory, "job_name": "job"},
            tensorboard={"enabled": True, "output_path": directory, "job_name": "board"},
            block={"stages": 2},
        )
        engine = make_engine(model, make_batch(B, 0), config)
        steps(engine, [make_batch(B, seed) for seed in range(4)])
        names = [stage.name for stage in engine.plan.stages]
        return {"lines": lines, "stages": names, "tokens": [make_batch(B, 0)["input_ids"].numel()]}
    finally:
        logger.removeHandler(handler)
        logger.level = level
