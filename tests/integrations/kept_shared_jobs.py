"""What each rank runs in the tests of mode async on ranks that hold several stages."""

from __future__ import annotations

from typing import Any

from tests.integrations import async_jobs
from tests.integrations.shared_rank_jobs import CLIP, LLAVA

PLACED: dict[str, tuple[str, list[list[str]], list[list[int]]]] = {
    "clip, a tower on both ranks": ("clip", CLIP, [[0, 1], [0], [1]]),
    "clip, both towers data-parallel": ("clip", CLIP, [[0, 1], [1, 0], [0]]),
    "llava, interleaved": ("llava", LLAVA, [[0], [1], [0]]),
}
"""Model, the modules of each stage, and the ranks of each."""
STEPS = 8


def config(case: str, *, mini_batch: int, unit: int, **changes: Any) -> dict[str, Any]:
    _, modules, ranks = PLACED[case]
    stages = [{"modules": m, "ranks": r} for m, r in zip(modules, ranks, strict=True)]
    block = {"plan": {"stages": stages}, **changes.pop("block", {})}
    return async_jobs.async_config(mini_batch=mini_batch, unit=unit, block=block, **changes)


def stages_of(engine: Any, names: Any) -> set[int]:
    """Return the stages of this rank that parameters of these names are of."""
    return {s.stage_index for s in engine.rank_engine.stages if set(names) & set(s.gradients.parameters)}


def train(case: str, mini_batch: int, unit: int, changes: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train some mini-batches, with a flush, an evaluation and a checkpoint on the way; go on from that anew."""
    name = PLACED[case][0]
    given = config(case, mini_batch=mini_batch, unit=unit, **changes)
    engine, batches = async_jobs.make(name, mini_batch, given)
    engine.retain_gradients()
    losses = [float(engine.train_batch(data_iter=iter([batch]))) for batch in batches[:4]]
    flushed = [engine.flush()]
    losses += [float(engine.train_batch(data_iter=iter([batch]))) for batch in batches[4:STEPS]]
    flushed.append(engine.flush())
    engine.save_checkpoint(directory)
    report = engine.memory_report().ranks[engine.global_rank]
    answer: dict[str, Any] = {
        "losses": losses,
        "flushed": [float(loss) for loss in flushed],
        "parameters": {n: p.detach().clone() for n, p in engine.module.named_parameters()},
        "stages": async_jobs.held_by_stages(engine),
        "staleness": engine.staleness,
        "steps": (engine.global_steps, engine.global_samples),
        "held": engine.rank_engine.indices,
        "kept": sorted(stages_of(engine, engine.gradients)),
        "memory": (report.counts is not None, report.measured_peak_bytes),
    }
    rest = batches[STEPS : STEPS + 3]
    answer["through"] = [float(engine.train_batch(data_iter=iter([batch]))) for batch in rest]
    engine.destroy()
    other, _ = async_jobs.make(name, mini_batch, given)
    other.load_checkpoint(directory)
    answer["resumed"] = [float(other.train_batch(data_iter=iter([batch]))) for batch in rest]
    other.destroy()
    return answer
