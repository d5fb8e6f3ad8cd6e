"""What ranks run in the tests of memory at many lengths: held, predicted and counted, and what is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpp_benchmarks._attention_models import Batch, Size, build_family

MINI_BATCH, UNIT = 8, 2
SHARES = (0.5, 0.625, 0.75, 1.0)
"""Of the longest: lengths that are trained on, none of them one that blocks are measured at but by chance."""


def texts_of(batch: Batch) -> dict[str, Tensor]:
    """Return the entries that hold texts."""
    return {
        k: v for k, v in batch.items() if isinstance(v, Tensor) and not v.is_floating_point() and v.ndim == 2
    }


def at_share(batch: Batch, share: float, *, least: int = 0) -> Batch:
    """Return a batch with texts of a share of their length, as evenly as whole tokens allow."""
    found = dict(batch)
    for key, value in texts_of(batch).items():
        length = max(round(value.shape[1] * share), least)
        times = -(-length // value.shape[1])
        longer = torch.cat([value, *[value[:, -1:].expand(-1, value.shape[1])] * (times - 1)], dim=1)
        found[key] = longer[:, :length].contiguous()
    return found


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Train at four lengths, each longer than the one before, and return what each rank held and should have."""
    import deepspeed

    import gpp_plugin
    from gpp_plugin.errors import BatchRefused

    size = Size(
        width=settings["width"], layers=settings["layers"], length=settings["length"], samples=MINI_BATCH
    )
    model, make_batch = build_family(settings["model"], size)
    whole = make_batch("none")
    # the longest that the model has places for is what it is built for; so that one can be longer, max is less
    longest = at_share(whole, 0.75)
    anchors = [key for key in ("input_ids", "labels") if key in whole]
    most = {key: longest[key].shape[1] for key in anchors}
    typical = {key: round(0.6 * value) for key, value in most.items()}
    block: dict[str, Any] = {
        "stages": settings["stages"],
        "lengths": {"max": most, "typical": [typical]},
        **settings.get("block", {}),
    }
    config = {
        "train_batch_size": MINI_BATCH,
        "train_micro_batch_size_per_gpu": UNIT,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 10**9,
        "graph_pipeline": block,
    }
    wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=longest)
    engine, *_ = deepspeed.initialize(model=wrapped, config=config)
    rows = []
    for share in SHARES:
        batch = at_share(longest, share)
        engine.train_batch(data_iter=iter([batch]))
        report = engine.memory_report()
        for rank in report.ranks:
            counts, predicted = rank.counts, rank.predicted
            assert counts is not None and predicted is not None
            rows.append(
                {
                    "model": settings["model"],
                    "lengths": report.lengths.partition(";")[0],
                    "rank": rank.rank,
                    "stage": rank.stage,
                    "predicted_bytes": predicted.activations,
                    "counted_bytes": counts.peak_held_bytes,
                    "predicted_inputs": predicted.inputs,
                    "held_inputs": rank.held.buffers,
                    "ratio": counts.peak_held_bytes / predicted.activations if predicted.activations else 1.0,
                    "differences": list(report.differences),
                }
            )
    refused, steps = "", engine.global_steps
    try:
        engine.train_batch(data_iter=iter([whole]))
    except BatchRefused as error:
        refused = str(error)
    engine.train_batch(data_iter=iter([at_share(longest, 0.7)]))
    costs = engine._memory._sized.costs
    found = {
        "rows": rows,
        "refused": refused,
        "steps_after": engine.global_steps - steps,
        "planned": [part.activations for part in engine.plan.memory],
        "time_error": costs.time_error,
        "byte_error": costs.byte_error,
    }
    engine.destroy()
    return found
