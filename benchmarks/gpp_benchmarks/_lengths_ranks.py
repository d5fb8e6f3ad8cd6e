"""One rank of `gpp bench lengths`.

python -m gpp_benchmarks._lengths_ranks SETTINGS_JSON
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpp_benchmarks._attention_models import Batch, Size
from gpp_benchmarks._lengths_models import FAMILIES, build
from gpp_benchmarks._ranks import rank_settings, start_engine
from gpp_plugin.launch import emit_event
from gpp_plugin.relative_errors import loss_difference

UNITS, SAMPLES = 4, 2
"""Units of a mini-batch, and samples of a unit."""
NOT_COUNTED = 4
"""Mini-batches at the start, times the most images, that count for nothing: the second shape is exported by symbols."""
NUM_MARKS = 5

MiniBatch = list[Batch]


def drawn_lengths(count: int, *, shortest: int, longest: int) -> list[int]:
    """Return so many lengths, no two alike as long as there are others."""
    draw = random.Random(0)
    every = list(range(shortest, longest + 1))
    lengths: list[int] = []
    while len(lengths) < count:
        lengths += draw.sample(every, min(len(every), count - len(lengths)))
    return lengths


def drawn_shapes(
    count: int, *, units: int, shortest: int, longest: int, most_images: int
) -> list[list[tuple[int, int]]]:
    """Return for each mini-batch the length and the number of images of its units.

    Units of a mini-batch are all of different lengths, and each has its own number of images; a length comes again when
    all have been there.
    """
    lengths = drawn_lengths(count * units, shortest=shortest, longest=longest)
    draw = random.Random(1)
    images = [draw.randint(1, most_images) if most_images else 0 for _ in range(count * units)]
    pairs = list(zip(lengths, images, strict=True))
    return [pairs[i * units : (i + 1) * units] for i in range(count)]


def resident_mib() -> float:
    """Return the memory of this process that is resident."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Watch:
    """Counts exports, and the host's processor time for what the shapes of a mini-batch ask for."""

    def __init__(self, engine: Any) -> None:
        self.exports = 0
        self._host_ms = 0.0
        export = torch.export.export

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.exports += 1
            return export(*args, **kwargs)

        torch.export.export = counting
        # code and executors are the stage runner's; what Python reads of a batch is found out where batches come in
        runner = engine._rank_runner.stage_runners[0]
        for name in ("make_code", "compile", "_make_executor"):
            setattr(runner, name, self._timed(getattr(runner, name)))
        engine._batch_source.collect = self._timed(engine._batch_source.collect)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._host_ms += (time.thread_time() - start) * 1e3

        return timed

    def take(self) -> float:
        """Return the milliseconds since the last call."""
        found, self._host_ms = self._host_ms, 0.0
        return found


def make_batches(settings: dict[str, Any]) -> tuple[nn.Module, list[MiniBatch]]:
    """Return the model and its mini-batches, each a list of loss units."""
    family = FAMILIES[settings["model"]]
    longest = settings["longest"]
    size = Size(width=settings["width"], layers=settings["layers"], length=longest, samples=SAMPLES)
    model, unit = build(settings["model"], size)
    shapes = drawn_shapes(
        settings["batches"],
        units=UNITS,
        shortest=longest // 2,
        longest=longest,
        most_images=family.most_images,
    )
    return model, [[unit(*shape) for shape in of_batch] for of_batch in shapes]


class PlainSteps:
    """The same mini-batches in one process, by the model itself."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model.train()

    def loss(self, units: MiniBatch) -> float:
        """Return the mean of the units' losses."""
        with torch.no_grad():
            return sum(float(self._model(**unit).loss) for unit in units) / len(units)

    def step(self, units: MiniBatch) -> float:
        """Run forwards and backwards of a mini-batch; return its loss."""
        self._model.zero_grad()
        total = 0.0
        for unit in units:
            loss = self._model(**unit).loss / len(units)
            loss.backward()
            total += float(loss.detach())
        return total


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Train on all mini-batches, each when it is new and once more, and return what rank 0 saw."""
    model, batches = make_batches(settings)
    if settings["is_plain"]:
        plain = PlainSteps(model)
        return _alternate(batches, plain.step, most_images=0, marks=[])
    block: dict[str, Any] = {"stages": settings["stages"]} if settings["stages"] > 1 else {"enabled": True}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        # no step changes a weight: each loss can be held against the same model in one process
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}},
        "graph_pipeline": {**block, "units": UNITS},
    }
    engine = start_engine(model, batches[0][0], config)
    watch = Watch(engine)
    reference = PlainSteps(make_batches({**settings, "batches": 1})[0]) if os.environ["RANK"] == "0" else None
    errors: list[float] = []
    marks: list[float] = []

    def step(units: MiniBatch) -> float:
        items: Iterator[Batch] = iter(units)
        return float(engine.train_batch(data_iter=items))

    def check(units: MiniBatch, loss: float) -> None:
        if reference is not None:
            wanted = reference.loss(units)
            errors.append(loss_difference([loss], [wanted]))

    images = FAMILIES[settings["model"]].most_images
    found = _alternate(batches, step, most_images=images, marks=marks, watch=watch, check=check)
    stages = [stage.name for stage in engine.plan.stages]
    engine.destroy()
    return {
        **found,
        "most_loss_error": max(errors, default=0.0),
        "memory_mib": marks,
        "exports": watch.exports,
        "stages": stages,
    }


def _alternate(
    batches: Sequence[MiniBatch],
    step: Callable[[MiniBatch], float],
    *,
    most_images: int,
    marks: list[float],
    watch: Watch | None = None,
    check: Callable[[MiniBatch, float], None] = lambda units, loss: None,
) -> dict[str, Any]:
    """Return the times of all mini-batches, new and seen.

    new 0 | new 1, seen 0 | new 2, seen 1 | ...         each runs between two others, so that caches are as cold

    Ranks begin each together: one that still ends its last step, or computes a loss to check, is in nobody's time.
    """
    new, seen, costs = [0.0] * len(batches), [0.0] * len(batches), [[0.0, 0.0] for _ in batches]

    def run(place: int, *, is_new: bool) -> float:
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        loss = step(batches[place])
        (new if is_new else seen)[place] = time.perf_counter() - start
        costs[place][not is_new] = 0.0 if watch is None else watch.take()
        return loss

    first = min(NOT_COUNTED * max(most_images, 1), len(batches) // 2)
    every = max((len(batches) - first) // NUM_MARKS, 1)
    run(0, is_new=True)
    for place in range(1, len(batches)):
        loss = run(place, is_new=True)
        check(batches[place], loss)
        run(place - 1, is_new=False)
        if place >= first and (place - first) % every == 0:
            marks.append(resident_mib())
    counted = range(first, len(batches) - 1)
    ratios = [new[i] / seen[i] for i in counted]
    host = [a - b for a, b in (costs[i] for i in counted)]
    return {
        "new_over_seen": sum(new[i] for i in counted) / sum(seen[i] for i in counted),
        "median_ratio": statistics.median(ratios),
        "seen_step_ms": 1e3 * statistics.fmean(seen[i] for i in counted),
        "counted": len(counted),
        "new_length_ms": statistics.median(host),
        "most_new_length_ms": max(host),
    }


def main() -> None:
    """Run the rank and tell what it measured on rank 0."""
    found = measure(rank_settings())
    if os.environ["RANK"] == "0":
        emit_event(found=found)


if __name__ == "__main__":
    main()
