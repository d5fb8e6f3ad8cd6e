"""Memory at many lengths: what is predicted is counted, and what is too long is refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpp_benchmarks._attention_models import Batch, Size, build_family
from gpp_plugin.engine.memory_watch import MemoryWatch
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.costs.planned_lengths import UnitSize
from gpp_plugin.runtime.batches import UnitBatch
from gpp_plugin.runtime.ranks.collectives import Collectives
from tests.integrations.engine_jobs import B, config_of, make_engine, said_of
from tests.plan.test_planned_lengths import sized
from tests.ranks import run_kept_ranks

SHARES = (0.5, 0.625, 0.75, 1.0)
"""Of the longest: lengths that are trained on, none of them one that blocks are measured at but by chance."""


def at_share(batch: Batch, share: float) -> Batch:
    """Return a batch with texts of a share of their length, as evenly as whole tokens allow."""
    found = dict(batch)
    for key, value in batch.items():
        if isinstance(value, Tensor) and not value.is_floating_point() and value.ndim == 2:
            found[key] = value[:, : round(value.shape[1] * share)].contiguous()
    return found


def measure(name: str, block: dict[str, Any]) -> dict[str, Any]:
    """Train at four lengths, each longer than the one before, and return what each rank held and should have."""
    model, make_batch = build_family(name, Size(width=16, layers=1, length=64, samples=B))
    whole = make_batch("none")
    # the longest that the model has places for is what it is built for; so that one can be longer, max is less
    longest = at_share(whole, 0.75)
    most = {key: longest[key].shape[1] for key in ("input_ids", "labels") if key in whole}
    typical = {key: round(0.6 * value) for key, value in most.items()}
    lengths = {"max": most, "typical": [typical]}
    engine = make_engine(model, longest, config_of(block={"stages": 2, "lengths": lengths, **block}))
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
                    "lengths": report.lengths.partition(";")[0],
                    "predicted_bytes": predicted.activations,
                    "predicted_inputs": predicted.inputs,
                    "held_inputs": rank.held.buffers,
                    "ratio": counts.peak_held_bytes / predicted.activations if predicted.activations else 1.0,
                    "differences": list(report.differences),
                }
            )
    steps = engine.global_steps
    refused = said_of(lambda: engine.train_batch(data_iter=iter([whole])))
    engine.train_batch(data_iter=iter([at_share(longest, 0.7)]))
    found = {
        "rows": rows,
        "refused": refused,
        "steps_after": engine.global_steps - steps,
        "planned": [part.activations for part in engine.plan.memory],
        "byte_error": engine._memory._sized.costs.byte_error,
    }
    engine.destroy()
    return found


@pytest.mark.parametrize(("model", "recompute"), [("gpt2", "full"), ("t5", "off"), ("gpt2", "off")])
def test_what_is_predicted_at_four_lengths_is_counted(model: str, recompute: str) -> None:
    """T5 has two lengths, an encoder's and a decoder's; in the third case stages were planned at the longest."""
    block = {"memory": {"recompute": recompute, "swap": "off"}}
    first, second = run_kept_ranks(measure, 2, model, block, timeout_s=200)
    assert [row["ratio"] for row in first["rows"]] == [row["ratio"] for row in second["rows"]]
    lengths = dict.fromkeys(row["lengths"] for row in first["rows"])
    assert len(lengths) == 4 and len(first["rows"]) == 8
    for row in first["rows"]:
        assert row["ratio"] == pytest.approx(1.0, abs=0.02), row
        assert row["held_inputs"] == row["predicted_inputs"]
        assert row["differences"] == []
    longest = [row["predicted_bytes"] for row in first["rows"][-2:]]
    assert longest == first["planned"], "memory is planned for the longest"
    assert "is 64 long, and graph_pipeline.lengths.max is 48" in first["refused"] == second["refused"]
    assert first["steps_after"] == 1, "and the next mini-batch trains"
    assert first["byte_error"] == pytest.approx(0.0, abs=1e-6)


def texts(length: int) -> dict[str, Tensor]:
    return {"ids": torch.zeros(8, length, dtype=torch.int64)}


def watch_of(
    mode: str = "sync", *, is_sized: bool = True, plan: PipelinePlan | None = None, **changes: Any
) -> MemoryWatch:
    """Return what watches one rank of a plan for texts of 8 to 32 tokens."""
    found = sized()
    found.plan = plan or found.plan
    lengths, memory = SimpleNamespace(max=32), SimpleNamespace(optimization="auto")
    config = SimpleNamespace(
        lengths=lengths if is_sized else None, mode=mode, comm_timeout_s=1.0, memory=memory
    )
    setting = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, rank=0, zero_stage=0)
    given: Any = {
        "config": config,
        "setting": setting,
        "sample_batch": texts(8),
        "reads": [["ids"]],
        "collectives": SimpleNamespace(gather=lambda told, what: [told]),
        "sized": found if is_sized else None,
        **changes,
    }
    return MemoryWatch(found.plan, **given)


@pytest.mark.parametrize(
    ("mode", "is_sized", "counted"),
    [("sync", True, [6, 8, 9, 10, 11, 12, 13, 14]), ("async", True, [6]), ("sync", False, [8])],
)
def test_what_is_longer_than_before_is_counted_eight_times_at_most(
    mode: str, is_sized: bool, counted: list[int]
) -> None:
    """In mode async once: of a longer one micro-batches of the call before would be counted, too."""
    watch, found = watch_of(mode, is_sized=is_sized), []
    for length in (6, 5, 6, 8, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16):
        if watch.is_due(texts(length)):
            found.append(length)
            watch.compare({}, texts(length), most_bytes=0, message_bytes=0)
    assert found == counted
    unlike = UnitBatch(units=({"ids": texts(16)["ids"][:2]}, {"ids": texts(31)["ids"][:2]}))
    assert not watch_of(mode, is_sized=is_sized).is_due(unlike), "the first unit's alone would be counted"


def test_a_rank_s_buffers_and_optimizer_are_counted_once_each() -> None:
    """Rows that its stage's ranks share out, whole tables; units each rank has its own of; masters that are weights."""
    collectives = Collectives(group=None, who="rank 0", timeout_s=1.0)
    plan = sized().plan
    first, second = plan.stages
    first = dataclasses.replace(first, ranks=(0, 1), micro_batch_size=2 * first.micro_batch_size)
    plan = dataclasses.replace(plan, stages=(first, dataclasses.replace(second, ranks=(2,))))
    weight, other = torch.zeros(4, 2), torch.zeros(3, dtype=torch.float64)
    stage = SimpleNamespace(
        weight_tensors=lambda: [weight, weight[1:]],
        updater=SimpleNamespace(own_tensors=lambda: [weight[:2], other, other[1:]]),
    )
    table = torch.zeros(1, 5, dtype=torch.float64)  # cast to fp32
    for batch, read in (
        ({**texts(8), "table": table, "unread": texts(8)["ids"]}, 8 * 8 * 8 // 2 + 5 * 4),
        (
            UnitBatch(units=tuple({"ids": texts(n)["ids"][:2], "table": table} for n in (8, 4))),
            2 * 12 * 4 + 5 * 4,
        ),
    ):
        watch = watch_of(plan=plan, reads=[["ids", "table"]], collectives=collectives, is_sized=False)
        watch.compare({}, batch, most_bytes=1000, message_bytes=9)
        engine: Any = SimpleNamespace(stages=[stage], whole_bytes=SimpleNamespace(most=7), gradient_bytes=5)
        (rank,) = watch.report(engine).ranks
        assert (rank.held.buffers, rank.held.weights, rank.held.optimizer) == (read, 32, 24)
        assert (rank.held.gathered, rank.held.messages, rank.held.gradients) == (7, 9, 5)
        assert rank.measured_peak_bytes == rank.held.total + 1000


def test_a_mini_batch_is_refused_for_the_stage_that_lacks_memory_whichever_is_larger() -> None:
    plan = sized().at([UnitSize(lengths=(16,), samples=2)])
    small, large = sorted(range(2), key=lambda stage: plan.memory[stage].total)
    for limits, said in (({small: -5}, small), ({small: 0}, None), ({large: -1, small: 3}, large)):
        memory = [
            dataclasses.replace(part, limit=part.total + limits[i] if i in limits else 0)
            for i, part in enumerate(plan.memory)
        ]
        watch = watch_of(plan=dataclasses.replace(plan, memory=tuple(memory)))
        line = watch.refusal(texts(16))
        assert watch.refusal(texts(8)) is None
        if said is None:
            assert line is None
            continue
        total, missing = plan.memory[said].total, -limits[said]
        assert line is not None and (
            f"stage {plan.stages[said].name!r} needs {total} bytes a rank and may use {total - missing}, "
            f"{missing} bytes are missing" in line
        )
