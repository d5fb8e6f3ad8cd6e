"""One rank of `gpp bench lengths`.

python -m gpp_benchmarks._lengths_ranks SETTINGS_JSON
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpp_benchmarks._attention_models import Batch, Size, build_family

MINI_BATCH, UNIT = 8, 2
LONGEST = 1024
NOT_COUNTED = 4
"""Lengths at the start that count for nothing: the second is exported with symbols."""
NUM_MARKS = 5


def cut(batch: Batch, length: int) -> Batch:
    """Return a batch whose longest text has ``length`` tokens, and others as much less."""
    texts = {k: v for k, v in batch.items() if not v.is_floating_point() and v.ndim == 2}
    longest = max(text.shape[1] for text in texts.values())
    short = {k: v[:, : max(v.shape[1] * length // longest, 4)].contiguous() for k, v in texts.items()}
    return {**batch, **short}


def drawn_lengths(count: int, *, shortest: int, longest: int) -> list[int]:
    """Return so many lengths, no two alike as long as there are others."""
    draw = random.Random(0)
    every = list(range(shortest, longest + 1))
    lengths: list[int] = []
    while len(lengths) < count:
        lengths += draw.sample(every, min(len(every), count - len(lengths)))
    return lengths


def resident_mib() -> float:
    """Return the memory of this process that is resident."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Watch:
    """Counts exports, and the host's time for the executor of each mini-batch."""

    def __init__(self, lane: Any) -> None:
        self.exports = 0
        self.executor_ms: list[float] = []
        export, executor_for = torch.export.export, lane._executor_for

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.exports += 1
            return export(*args, **kwargs)

        def timed(batch: Batch) -> Any:
            start = time.thread_time()
            compiled = executor_for(batch)
            self.executor_ms.append((time.thread_time() - start) * 1e3)
            return compiled

        torch.export.export = counting
        lane._executor_for = timed


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Train on all lengths, each when it is new and once more, and return what rank 0 saw."""
    import deepspeed

    import gpp_plugin

    count = settings["batches"]
    span = max(2 * count, 64)
    size = Size(
        width=settings["width"], layers=settings["layers"], length=min(span, LONGEST), samples=MINI_BATCH
    )
    model, make_batch = build_family(settings["model"], size)
    whole = make_batch("right")
    longest = max(v.shape[1] for v in whole.values() if isinstance(v, Tensor) and v.ndim == 2)
    shortest = longest - size.length // 2  # a text's images are in its first half
    config = {
        "train_batch_size": MINI_BATCH,
        "train_micro_batch_size_per_gpu": UNIT,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 10**9,
        "graph_pipeline": {"stages": settings["stages"]} if settings["stages"] > 1 else {"enabled": True},
    }
    lengths = drawn_lengths(count, shortest=shortest, longest=longest)
    wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=cut(whole, lengths[0]))
    engine, *_ = deepspeed.initialize(model=wrapped, config=config)
    stages = [stage.name for stage in engine.plan.stages]
    watch = Watch(engine._lane)

    def step(length: int) -> float:
        batches: Iterator[Batch] = iter([cut(whole, length)])
        start = time.perf_counter()
        engine.train_batch(data_iter=batches)
        return time.perf_counter() - start

    new, seen, marks = [step(lengths[0])], [0.0], []
    for place in range(1, count):
        new.append(step(lengths[place]))
        seen.append(step(lengths[place - 1]))
        if place >= NOT_COUNTED and (place - NOT_COUNTED) % max((count - NOT_COUNTED) // NUM_MARKS, 1) == 0:
            marks.append(resident_mib())
    # of mini-batch i: new at i, seen at i + 1
    executors = watch.executor_ms[1:]
    costs = [a - b for a, b in zip(executors[::2], executors[1::2], strict=True)][NOT_COUNTED:]
    first, again = sum(new[NOT_COUNTED:-1]), sum(seen[NOT_COUNTED + 1 :])
    engine.destroy()
    return {
        "new_over_seen": first / again,
        "seen_step_ms": 1e3 * again / len(seen[NOT_COUNTED + 1 :]),
        "new_length_ms": statistics.median(costs),
        "most_new_length_ms": max(costs),
        "memory_mib": marks,
        "exports": watch.exports,
        "shortest": min(lengths),
        "longest": max(lengths),
        "stages": stages,
    }


def main() -> None:
    """Run the rank and tell what it measured on rank 0."""
    torch.set_num_threads(1)
    found = measure(json.loads(sys.argv[1]))
    if os.environ["RANK"] == "0":
        from gpp_plugin.launch import emit_event

        emit_event(found=found)


if __name__ == "__main__":
    main()
