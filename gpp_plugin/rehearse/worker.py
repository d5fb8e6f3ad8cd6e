"""One rank of a rehearsal: the engine's own executor and transport on a plan, compute emulated.

python -m gpp_plugin.rehearse.worker PLAN SETTINGS_JSON OUTPUT_DIRECTORY
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import load, save
from gpp_plugin.launch import emit_event, end_rank
from gpp_plugin.rehearse.rank import RehearsalRank
from gpp_plugin.rehearse.settings import LEAST_COMM_TIMEOUT_S, RehearsalSettings


def main() -> None:
    """Rehearse on this rank; rank 0 writes the timelines and reports."""
    plan = load(PipelinePlan, sys.argv[1])
    settings = RehearsalSettings(**json.loads(sys.argv[2]))
    folder = Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", timeout=datetime.timedelta(seconds=settings.comm_timeout_s or LEAST_COMM_TIMEOUT_S)
    )
    is_first = dist.get_rank() == 0
    rank = RehearsalRank(plan, settings)
    if is_first:
        emit_event(event="ready")
    for step in range(-1, settings.steps):
        timeline = rank.run()
        if timeline is not None and step >= 0:
            save(timeline, folder / f"timeline{step}.json")
            emit_event(event="step", step=step, iteration_us=timeline.iteration_us)
    rank.meet("the end of the rehearsal")
    end_rank()


if __name__ == "__main__":
    main()
