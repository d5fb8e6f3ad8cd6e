"""What is run on devices, held against a single process and recorded; each function is one subject."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from gpp_plugin.relative_errors import loss_difference
from tests.gpu import gpu_jobs
from tests.gpu.lab import Lab
from tests.integrations.pipedream import reported
from tests.integrations.test_async import emulate
from tests.models import build
from tests.reference import gradient_errors
from tests.runtime import jobs
from tests.runtime.test_equality import compare

SLACK = {"cuda": 5.0, "cpu": 1.0}
"""Kernels of a device, and so their rounding, change with the size of a batch; a mistake is a thousand times larger."""
MOST_SWAP, MOST_CAPTURED, MOST_OFF = 1.3, 1.02, 0.08


def equality(
    lab: Lab,
    num_ranks: int,
    tasks: Sequence[jobs.Job],
    what: str,
    *,
    num_devices: int = 1,
    environment: Mapping[str, str] | None = None,
) -> list[list[dict[str, Any]]]:
    """Train jobs on ranks; losses and every gradient are those of the plain model in one process on one device."""
    tasks = [{"steps": 3, **task, "device": lab.device} for task in tasks]
    per_rank = lab.run(
        jobs.train, num_ranks, tasks, limit_s=120.0 + 20.0 * len(tasks), num_devices=num_devices, environment=environment
    )  # fmt: skip
    worst_loss = worst_gradient = 0.0
    answers = []
    for index, (task, plain) in enumerate(zip(tasks, _plain_answers(lab, tasks), strict=True)):
        answers.append([of_rank[index] for of_rank in per_rank])
        exact = plain["exact"]
        try:
            loss, gradient = compare(
                answers[-1],
                plain["losses"],
                plain["gradients"],
                lambda exact=exact: exact,
                slack=SLACK[lab.device],
            )
        except AssertionError as error:
            raise AssertionError(f"{task['model']} {task['block']}: {error}") from None
        worst_loss, worst_gradient = max(worst_loss, loss), max(worst_gradient, gradient)
        _check_transport(lab, answers[-1][0]["transport"], num_ranks, num_devices)
    lab.record(f"{what}: largest relative difference of a loss", worst_loss)
    lab.record(f"{what}: largest error of a gradient", worst_gradient)
    return answers


def _plain_answers(lab: Lab, tasks: Sequence[jobs.Job]) -> list[dict[str, Any]]:
    """Return what one process makes of each job: of those that were not asked for before, in one go."""
    keys = [
        repr(
            sorted(
                (k, v) for k, v in task.items() if k not in ("block", "zero", "config", "overrides", "memory")
            )
        )
        for task in tasks
    ]
    new = {key: task for key, task in zip(keys, tasks, strict=True) if key not in lab.plain}
    if new:
        (answers,) = lab.run(jobs.train_plainly, 1, list(new.values()), limit_s=120.0 + 15.0 * len(new))
        lab.plain.update(zip(new, answers, strict=True))
    return [lab.plain[key] for key in keys]


def _check_transport(lab: Lab, name: str, num_ranks: int, num_devices: int) -> None:
    """Messages between devices go over NCCL, and between ranks of one device through the host."""
    if lab.is_dry or num_ranks == 1 or name == "MegatronTransport":
        return
    assert ("Nccl" in name) == (num_devices >= num_ranks), f"messages went over {name}"


def less_memory(lab: Lab, num_ranks: int) -> None:
    """Stages that swap and run again train as the plain model does, and do what is planned."""
    parts: list[dict[str, Any]] = [{"modules": ["*"]}]
    if num_ranks == 4:
        parts = [{"modules": ["encoder"], "ranks": [0, 1]}, {"modules": ["decoder"], "ranks": [2]}, *parts]
        parts[-1]["ranks"] = [3]
    one = {"model": "t5", "mini_batch": 8, "unit": 2, "block": {"plan": {"stages": parts}, "slicing": "off"}}
    tasks = [one, {**one, "overrides": {}, "memory": True}]
    what = f"swap and recompute, {num_ranks} ranks"
    plain, both = equality(lab, num_ranks, tasks, what)
    assert all(both[0]["has_memory"]) and not any(plain[0]["has_memory"])
    ranks = both[0]["memory"].ranks
    assert all(rank.counts.swapped_bytes and rank.counts.recomputed_bytes for rank in ranks)
    worst = 0.0
    for answer, other in zip(both, plain, strict=True):
        worst = max(worst, *gradient_errors(answer["gradients"], other["gradients"]).values(), 0.0)
    assert worst <= 1e-6, f"a gradient is {worst:.1e} off"
    lab.record(f"{what}: largest difference of a gradient from all kept", worst)
    full = {**one, "block": {**one["block"], "memory": {"recompute": "full"}}}
    equality(lab, num_ranks, [full], f"full recompute, {num_ranks} ranks")


def demo(lab: Lab, *words: str, num_devices: int = 1) -> None:
    """The demo trains as one process does."""
    found = lab.gpp("demo", *words, limit_s=420.0, num_devices=num_devices)
    command = " ".join(["gpp demo", *words])
    lab.record(f"demo: largest relative difference of its first {found['compared_steps']} losses",
               found["max_relative_difference"], most=1e-3, command=command)  # fmt: skip
    lab.record("demo: seconds of training", found["train_seconds"], command=command)
    lab.record("demo: accuracy missing to 100 %", 100.0 * (1 - found["accuracy"]), most=10.0, command=command)


def bench_swap(lab: Lab, *words: str) -> None:
    """Swapping at twice the batch costs little time a sample."""
    words = ("bench", "swap", "--device", lab.device, *words)
    found = lab.gpp(*words, limit_s=300.0)
    command = "gpp " + " ".join(words)
    lab.record("swap at twice the batch over plain, time a sample", found["swap_over_plain"], most=MOST_SWAP, command=command)  # fmt: skip
    lab.record("full recompute at twice the batch over plain, time a sample", found["recompute_over_plain"], command=command)  # fmt: skip
    for row in found["rows"]:
        if not lab.is_dry:
            off = abs(row["measured_bytes"] / row["predicted_bytes"] - 1.0)
            lab.record(f"memory of run {row['run']} off its prediction", off, most=MOST_OFF, command=command)
    assert found["ok"], found["rows"]


def bench_memory(lab: Lab, *words: str, num_devices: int = 1) -> None:
    """What the allocator holds is what is predicted, and what is predicted not to fit does not."""
    words = ("bench", "memory", "--device", lab.device, *words)
    found = lab.gpp(*words, limit_s=600.0, num_devices=num_devices)
    worst = max(abs(row["ratio"] - 1.0) for row in found["rows"])
    lab.record(
        "memory off its prediction, two stages", worst, most=MOST_OFF, command="gpp " + " ".join(words)
    )
    assert found["ok"], found


def no_reads(lab: Lab, num_ranks: int, *, num_devices: int = 1, num_steps: int = 3) -> None:
    """Nothing reads the device from the host between the first and the last task of a step."""
    per_rank = lab.run(
        gpu_jobs.train_without_reading, num_ranks, lab.device, min(num_ranks, 2), num_steps, num_devices=num_devices
    )  # fmt: skip
    for answer in per_rank:
        assert answer["guarded"] == num_steps and len(answer["losses"]) == 2 + num_steps
        assert lab.is_dry or "synchroniz" in answer["refused"], "the guard lets the device be read"
        _check_transport(lab, answer["transport"], num_ranks, num_devices)
    lab.record(f"steps without a read of the device, {num_ranks} ranks", num_steps)


def capped_memory(lab: Lab, num_ranks: int, *, zero: int = 0, num_devices: int = 1) -> None:
    """A job trains in the memory that its plan predicts and a reserve, and takes what is predicted."""
    stages = min(num_ranks, 4)
    per_rank = lab.run(
        gpu_jobs.train_within_prediction, num_ranks, lab.device, stages, zero, 3, num_devices=num_devices
    )  # fmt: skip
    for answer in per_rank:
        assert all(loss > 0.0 for loss in answer["losses"]) and answer["predicted"] > 0
        assert answer["differences"] == ()
    off = max(abs(answer["measured"] / answer["predicted"] - 1.0) for answer in per_rank)
    name = f"memory off its prediction, capped, {num_ranks} ranks, {stages} stages, ZeRO {zero}"
    lab.record(name, off, most=MOST_OFF)
    if not lab.is_dry:
        full = max(answer["reserved"] / answer["cap"] for answer in per_rank)
        lab.record(f"{name}: allocator's most over what it may have", full, most=1.0)


def captured_over_eager(lab: Lab, rounds: int) -> None:
    """A stage's code takes as long as the modules it was captured from."""
    (found,) = lab.run(gpu_jobs.time_captured_and_eager, 1, lab.device, rounds)
    is_same = pytest.approx(found["eager_loss"], rel=1e-5 if lab.is_dry else 1e-2)  # bf16 on a device
    assert found["captured_loss"] == is_same, "both compute the same"
    lab.record("eager forward and backward, ms", found["eager"])
    lab.record("whole step of one stage, ms", found["step"])
    lab.record(
        "captured over eager, forward and backward", found["captured"] / found["eager"], most=MOST_CAPTURED
    )


def evaluation(
    lab: Lab, num_ranks: int, *, num_devices: int = 1, sizes: tuple[int, ...] = (16, 5, 1)
) -> None:
    """Batches of any size evaluate as the plain model does, between steps of training."""
    per_rank = lab.run(
        gpu_jobs.train_and_evaluate, num_ranks, lab.device, min(num_ranks, 2), sizes, num_devices=num_devices
    )  # fmt: skip
    worst = 0.0
    for answer in per_rank:
        assert answer["losses"] == per_rank[0]["losses"] and answer["after"] == per_rank[0]["after"]
        for (loss, logits), (wanted, wanted_logits) in zip(answer["found"], answer["wanted"], strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5)
            torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-5)
            worst = max(worst, abs(loss / wanted - 1.0))
        _check_transport(lab, answer["transport"], num_ranks, num_devices)
    lab.record(f"evaluation, {num_ranks} ranks: largest relative difference of a loss", worst)


def tracing(lab: Lab, num_ranks: int, *, num_devices: int = 1) -> None:
    """A traced step ends, and its trace shows every rank's tasks, and every message at both its ends."""
    stages = min(num_ranks, 2)
    with tempfile.TemporaryDirectory(prefix="gpp_trace_") as folder:
        os.chmod(folder, 0o755)
        per_rank = lab.run(
            gpu_jobs.train_with_traces, num_ranks, lab.device, stages, folder, num_devices=num_devices
        )  # fmt: skip
    events, timeline = per_rank[0]["events"], per_rank[0]["timeline"]
    assert {event["pid"] for event in events} == set(range(num_ranks))
    kinds = [event["cat"] for event in events]
    assert kinds.count("forward") == kinds.count("backward") > 0
    sent, received = (
        [e.bytes for e in timeline.events if e.kind.value == kind] for kind in ("send", "receive")
    )
    assert sorted(sent) == sorted(received) and (stages == 1 or sent), "each message has its two ends"
    assert 0.0 < timeline.iteration_us <= per_rank[0]["took_us"]
    for event in timeline.events:
        assert event.start_us <= event.end_us
    busy = timeline.busy_us()
    lab.record(f"traced step, {num_ranks} ranks, ms", timeline.iteration_us / 1e3)
    lab.record(f"traced step, {num_ranks} ranks: longest computation of a rank, ms", max(busy.values()) / 1e3)


def tensor_parallel(lab: Lab, num_ranks: int, name: str, zero: int, *, num_devices: int = 1) -> None:
    """A graph with tensor-parallel stages trains as one process does."""
    from tests.stage_graph.graphs import batch_of
    from tests.stage_graph.test_engine import reference_steps

    per_rank = lab.run(gpu_jobs.train_stage_graph, num_ranks, lab.device, name, zero, num_devices=num_devices)
    losses, norms = reference_steps(name, [batch_of(name, seed=seed) for seed in range(3)])
    rel = 1e-5 * SLACK[lab.device]
    for answer in per_rank:
        assert answer["losses"] == pytest.approx(losses, rel=rel)
        assert answer["norms"] == pytest.approx(norms, rel=rel)
        _check_transport(lab, answer["transport"], num_ranks, num_devices)
    worst = loss_difference(per_rank[0]["losses"], losses)
    lab.record(f"tensor-parallel stages, {num_ranks} ranks, ZeRO {zero}: largest difference of a loss", worst)


def mode_async(lab: Lab, num_ranks: int, *, num_devices: int = 1, num_batches: int = 12) -> None:
    """Mode async equals PipeDream's staleness, emulated in one process."""
    per_rank = lab.run(
        gpu_jobs.train_asynchronously, num_ranks, lab.device, 2, num_batches, num_devices=num_devices
    )
    first = per_rank[0]
    micro = first["micro_batch"]
    emulation = emulate("two_branch", first["stages"], mini_batch=16, micro=micro, unit=4)
    make_batch = build("two_branch")[1]
    losses = [emulation.mini_batch(make_batch(16, seed), micro) for seed in range(num_batches)]
    emulation.flush()
    wanted = reported(losses, emulation.longest)
    tolerance = 1e-6 if lab.is_dry else 1e-4
    final = dict(emulation.model.named_parameters())
    for answer in per_rank:
        assert answer["losses"] == pytest.approx(wanted, abs=tolerance)
        for name, parameter in answer["parameters"].items():
            torch.testing.assert_close(parameter, final[name].detach(), rtol=1e-5, atol=tolerance)
        _check_transport(lab, answer["transport"], num_ranks, num_devices)
    worst = max(abs(a - b) for a, b in zip(first["losses"], wanted, strict=True))
    lab.record(f"mode async, {num_ranks} ranks: largest difference of a loss from its emulation", worst)
