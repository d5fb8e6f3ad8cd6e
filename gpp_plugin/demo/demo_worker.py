"""One rank of the demo: what a user's training script does, and events for the process that shows them.

python -m gpp_plugin.demo.demo_worker SETTINGS_JSON OUTPUT_DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist

import gpp_plugin  # noqa: F401  (the import registers the `graph_pipeline` block)
from gpp_plugin.demo.clip import load_digit_captions, make_clip, mini_batches
from gpp_plugin.demo.demo_settings import DemoSettings
from gpp_plugin.ir.serialize import save
from gpp_plugin.launch import emit_event, end_rank

TIMELINE_STEPS = 5
"""Steps at the end whose timelines are recorded; the one of median length is kept."""


def main() -> None:
    """Train on this rank; rank 0 reports."""
    settings = DemoSettings(**json.loads(sys.argv[1]))
    output = Path(sys.argv[2])
    is_first = os.environ["RANK"] == "0"
    if is_first:
        emit_event(event="phase", text="the ranks are up; capturing, profiling and planning")
    data = load_digit_captions()
    engine, _, _, _ = deepspeed.initialize(
        model=make_clip(data.tokenizer, seed=settings.seed),
        config=settings.ds_config(),
        training_data=data.train,
    )
    if is_first:
        save(engine.plan, output / "plan.json")
        emit_event(event="plan")
    batches = mini_batches(
        data.train, mini_batch=settings.mini_batch, steps=settings.steps, seed=settings.seed
    )
    timelines = []
    for step in range(settings.steps):
        # Only at the end: by then everything is allocated, and recording costs the other steps nothing.
        engine.record_timelines = step >= settings.steps - TIMELINE_STEPS
        loss = engine.train_batch(data_iter=batches)
        if is_first:
            emit_event(event="step", step=step + 1, loss=float(loss))
            if engine.record_timelines:
                timelines.append(engine.last_timeline)
    if is_first:
        timelines.sort(key=lambda timeline: timeline.iteration_us)
        save(timelines[len(timelines) // 2], output / "timeline.json")
    engine.save_pretrained(output / "model")


if __name__ == "__main__":
    main()
    dist.barrier()
    end_rank()
