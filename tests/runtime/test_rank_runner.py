"""Several stages on a rank equal one process; what they hand over to each other is not copied."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gpp_benchmarks import _exactness_kept as ranks
from gpp_benchmarks._emulated_graphs import chain_links, emulated_plan, with_in_flight
from gpp_benchmarks._exactness_kept import DrawnRank
from gpp_benchmarks._linear_stages import (
    DATA_WIDTH,
    LinearHooks,
    LinearNetwork,
    linear_network,
    single_process_gradients,
    stage_rows,
    tensor_errors,
)
from gpp_benchmarks._random_plans import FAMILIES, random_draw
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.timeline import EventKind
from gpp_plugin.runtime import executor as executors
from gpp_plugin.runtime.batches import UnitBatch
from gpp_plugin.runtime.messages.mailbox import LocalTransfers
from gpp_plugin.runtime.rank_programs import channels_of
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.program_sets import RankPrograms
from tests.integrations.absent_jobs import TwoTowers, tower_units
from tests.runtime.test_ragged_units import ThreadJob
from tests.schedule.plans import proven


def ready(network: LinearNetwork, program: RankProgram) -> tuple[dict[int, LinearHooks], Any, Any]:
    """Return the optimizer side of each stage of a rank that holds all of them, and what runs them."""
    draw: Any = SimpleNamespace(plan=network.plan, forward_only=frozenset())
    groups = dict.fromkeys(program.stages)
    own = DrawnRank(
        draw, network, rank=0, groups=groups, transport=None, delays=random.Random(0), longest_delay_s=0.0
    )
    for stage in own.stages:
        own.begin(program.of_stage(stage))
    executor = own.executor(RankPrograms(plan=network.plan, programs={"whole": program}))
    return own.hooks, executor, [own.make(program.of_stage(stage)) for stage in own.stages]


def rows_of(network: LinearNetwork) -> list[Any]:
    """Return the rows of random data that each stage reads."""
    plan = network.plan
    data = torch.randn(plan.mini_batch, DATA_WIDTH, dtype=torch.float64)
    return [stage_rows(network, index, 0, data) for index in range(len(plan.stages))]


def run_here(network: LinearNetwork, program: RankProgram, seed: int) -> float:
    """Train three mini-batches on one rank that holds all stages; return the largest error of a gradient."""
    hooks, executor, parts = ready(network, program)
    generator = torch.Generator().manual_seed(seed)
    shape = (network.plan.mini_batch, DATA_WIDTH)
    worst = 0.0
    for number in range(3):
        data = torch.randn(shape, generator=generator, dtype=torch.float64)
        executor.run("whole", parts, [stage_rows(network, index, 0, data) for index in hooks])
        ours = {index: own.done.gradients[number] for index, own in hooks.items()}
        parameters = [own.done.parameters[number] for own in hooks.values()]
        errors = tensor_errors(ours, single_process_gradients(network, parameters, data))
        worst = max(worst, *errors.values())
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_that_holds_every_stage_equals_one_process(family: str) -> None:
    num_stages = set()
    for seed in range(6):
        draw = random_draw(seed, family, most_stages=6, num_ranks=1, shares_ranks=True)
        validate_programs(draw.plan, draw.schedules, draw.programs)
        (program,) = draw.programs
        assert not channels_of(draw.programs)
        network = linear_network(draw.plan, draw.forward_only, seed=seed, dtype=torch.float64)
        assert run_here(network, program, seed) < 1e-12
        num_stages.add(len(program.stages))
    assert max(num_stages) > 2


# ---- what is handed over ------------------------------------------------------------------------------------


class Watched:
    """A stage's compute that keeps what it made and read, by task, and tells what it makes."""

    def __init__(
        self, compute: Any, *, write: bool = False, tell: Callable[[Any], Any] | None = None
    ) -> None:
        self._compute, self._write, self._tell = compute, write, tell
        self.made: dict[Any, Sequence[Tensor]] = {}
        self.read: dict[Any, Sequence[Tensor | None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compute, name)

    def forward(
        self, micro_batch: int, half: int | None, inputs: Sequence[Tensor], received: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        if self._write:
            with torch.no_grad():
                received[0].detach().add_(1.0)
        made = self._compute.forward(micro_batch, half, inputs, received)
        return self._note(("F", micro_batch), received, made)

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        return self._note(("B", micro_batch), gradients, self._compute.backward(micro_batch, gradients))

    def _note(self, task: Any, read: Sequence[Tensor | None], made: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._tell is not None:
            self._tell(made)
        else:
            self.read[task], self.made[task] = read, made
        return made


def chain_on_one_rank(sizes: Sequence[int], num_micro_batches: int = 4) -> PipelinePlan:
    """Return a chain of stages with these micro-batches on one rank; all tensors have samples first."""
    plan = emulated_plan("chain", chain_links(len(sizes)), num_micro_batches=num_micro_batches, samples=2)
    return with_in_flight(plan.with_each(ranks=[(0,)] * len(sizes), micro_batch_size=sizes))


def watched_run(
    plan: PipelinePlan, *, writes: int | None = None, record: bool = False
) -> tuple[dict[int, Watched], Any, Callable[[], LocalTransfers]]:
    _, (program,) = proven(plan)
    network = linear_network(plan, frozenset(), seed=3, dtype=torch.float64)
    # samples first and one row each, so that rows of a tensor are a view of it
    specs = {
        name: dataclasses.replace(
            spec, shape=(1, 4), layout=dataclasses.replace(spec.layout, axis=0, rows_per_sample=1)
        )
        for name, spec in network.specs.items()
    }
    starts = tuple(
        {
            name: torch.ones(4 if name != "in.data" else DATA_WIDTH, 4, dtype=torch.float64)
            if "." in name
            else p
            for name, p in start.items()
        }
        for start in network.starts
    )
    network = dataclasses.replace(network, specs=specs, starts=starts)
    watched: dict[int, Watched] = {}
    plain = ranks.stage_compute

    def compute(network: Any, program: RankProgram, parameters: Any, own: Any, **_: Any) -> Any:
        watched[program.stage] = Watched(
            plain(network, program, parameters, own), write=program.stage == writes
        )
        return watched[program.stage]

    with mock.patch.object(ranks, "stage_compute", compute):
        _, executor, parts = ready(network, program)
    result = executor.run("whole", parts, rows_of(network), record=record)
    return watched, result, lambda: executor._local_transfers


def test_a_consumer_reads_the_tensor_that_its_producer_made() -> None:
    watched, _, local_transfers = watched_run(chain_on_one_rank((4, 2, 2)))
    for micro_batch in range(4):
        # two micro-batches of stage 1 are views of one of stage 0
        made, read = watched[0].made["F", micro_batch // 2][0], watched[1].read["F", micro_batch][0]
        assert made.untyped_storage().data_ptr() == read.untyped_storage().data_ptr()
        assert read.storage_offset() == micro_batch % 2 * 2 * 4
        assert made is not read and read.is_leaf
        made, read = watched[2].made["B", micro_batch][0], watched[1].read["B", micro_batch][0]
        assert made.data_ptr() == read.data_ptr()
    assert not any(local_transfers()._places.values())


def test_what_was_handed_over_and_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    held, most = list[StorageWeakRef](), list[int]()
    plain, step = ranks.stage_compute, LinearHooks.step

    def watch(made: Sequence[Tensor]) -> None:
        held[:] = [each for each in held if not each.expired()]
        known = {each.cdata for each in held}
        new = {t.untyped_storage()._cdata: StorageWeakRef(t.untyped_storage()) for t in made if t.ndim}
        held.extend(each for key, each in new.items() if key not in known)
        most.append(len(held))

    monkeypatch.setattr(ranks, "stage_compute", lambda *given, **_: Watched(plain(*given), tell=watch))
    left: list[int] = []

    def count(hooks: LinearHooks) -> Any:
        left.append(sum(not each.expired() for each in held))
        return step(hooks)

    monkeypatch.setattr(LinearHooks, "step", count)
    plan = chain_on_one_rank((2, 2, 2), 12)
    network = linear_network(plan, frozenset(), seed=3, dtype=torch.float64)
    _, executor, parts = ready(network, *lower_schedules(plan, build_schedules(plan)))
    executor.run("whole", parts, rows_of(network))
    assert left and not any(left), "at the step nothing of the mini-batch is there"
    assert max(most) <= 8 < 12, most


def test_hand_overs_are_no_messages_of_a_recorded_mini_batch() -> None:
    plan = chain_on_one_rank((2, 2, 2))
    _, result, _ = watched_run(plan, record=True)
    kinds = [event.kind for event in result.events]
    assert EventKind.SEND not in kinds and EventKind.RECEIVE not in kinds
    assert kinds.count(EventKind.STEP) == 1
    tasks = [(event.stage, event.micro_batch) for event in result.events if event.kind is EventKind.FORWARD]
    assert sorted(tasks) == [(stage, m) for stage in range(3) for m in range(4)]
    starts = [event.start_us for event in result.events]
    assert starts == sorted(starts)


def test_a_stage_that_writes_into_what_it_was_handed_is_refused() -> None:
    with pytest.raises(
        RuntimeFailure, match="stage stage1 writes into x0, which another stage of its rank made"
    ):
        watched_run(chain_on_one_rank((2, 2, 2)), writes=1)


def test_a_failure_of_one_stage_lets_go_of_all() -> None:
    plan = chain_on_one_rank((2, 2))
    (program,) = lower_schedules(plan, build_schedules(plan))
    network = linear_network(plan, frozenset(), seed=3, dtype=torch.float64)
    hooks, executor, parts = ready(network, program)
    failing = hooks[1].accumulate

    def fail() -> None:
        raise OSError("no more")

    hooks[1].accumulate = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeFailure, match=r"rank 0, stage loss, at 1B0: OSError: no more"):
        executor.run("whole", parts, rows_of(network))
    for part in parts:
        assert not part._made and not any(part.mail.inbox) and not part._compute._kept  # type: ignore[attr-defined]
    hooks[1].accumulate = failing  # type: ignore[method-assign]
    for own in hooks.values():
        for parameter in own.parameters.values():
            parameter.grad = None
    assert run_here(network, program, 1) < 1e-12


def test_the_memory_of_all_stages_of_a_rank(tmp_path: Path) -> None:
    torch.manual_seed(0)
    units = tower_units("bbbb")
    block = {"units": 4, "data_parallel": 1, "planner": "uniform"}
    job = ThreadJob(TwoTowers(), units[0], 3, block, tmp_path, seats=1)
    job.run(units)
    (runner,) = job.runners
    batch = UnitBatch(units=tuple(job.source.complete_batches(units)))
    result = runner.run(batch, count=True)
    assert set(result.memories) == set(runner.stages) == {0, 1, 2}
    peaks = [counts.peak_held_bytes for counts in result.memories.values()]
    assert max(peaks) <= result.most_bytes <= sum(peaks)
    assert not runner.run(batch).memories


def test_the_steps_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "MOST_EXECUTORS", 2)
    plan = chain_on_one_rank((2, 2))
    (whole,) = lower_schedules(plan, build_schedules(plan))
    kept = executors.RankExecutor(
        RankPrograms(plan=plan, programs={"whole": whole}), local_transfers=LocalTransfers()
    )
    monkeypatch.setattr(kept, "_join", lambda *given: [])
    programs: list[Any] = [object() for _ in range(3)]
    first, second = (kept._steps_of(program, (), None) for program in programs[:2])
    assert kept._steps_of(programs[0], (), None) is first
    kept._steps_of(programs[2], (), None)
    assert kept._steps_of(programs[0], (), None) is first
    assert kept._steps_of(programs[1], (), None) is not second
