"""Steps that are run twice: the same bits where nothing is wrong, and the rank named where something is."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.config.reader import read_config
from gpp_plugin.engine.guards.repetition import Repetition, Verdict, _listed
from gpp_plugin.engine.guards.spikes import LEAST, SPIKE, WINDOW, Spikes
from gpp_plugin.engine.guards.task_digests import TaskDigest, TaskDigests, _is_close
from gpp_plugin.errors import ConfigError, RuntimeFailure
from gpp_plugin.runtime.ranks.job_board import is_shared
from tests.ranks import run_kept_ranks

PLAIN = {"schedule": "1f1b", "slicing": "off"}
"""So that tasks have the names that faults happen at."""


class Net(nn.Module):
    """Draws random numbers and writes buffers, as a run that is repeated must not do twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(self.first(x)).square().mean()}


def batch_of(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))}


def engine_of(repeat_steps: Any, **block: Any) -> Any:
    from tests.integrations.engine_jobs import config_of, make_engine

    torch.manual_seed(0)
    return make_engine(Net(), batch_of(0), config_of(block={"repeat_steps": repeat_steps, **PLAIN, **block}))


def train(engine: Any, num_steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(5)
    losses = [float(engine.train_batch(iter([batch_of(seed)]))) for seed in range(num_steps)]
    return losses, {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


def repeat_and_corrupt(block: dict[str, Any], faults: list[dict[str, Any]]) -> list[str]:
    """Check that repetition changes nothing; then let each fault happen, and return what is said of it."""
    from tests.faults import Fault, inject, let_be

    once, twice = train(engine_of("off", **block)), train(engine_of(1, **block))
    assert once[0] == twice[0] and all(
        torch.equal(once[1][name], tensor) for name, tensor in twice[1].items()
    )
    engine = engine_of(1, **block)
    train(engine, 1)
    said = []
    for fault in faults:
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        inject(Fault(kind="corrupt", **fault), rank=torch.distributed.get_rank())
        try:
            engine.train_batch(iter([batch_of(9)]))
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        let_be()
        assert all(torch.equal(before[name], p) for name, p in engine.module.named_parameters()), "no step"
        assert engine.global_steps == 1
    engine.train_batch(iter([batch_of(1)]))  # it goes on
    norms = engine.stage_grad_norms
    assert sum(norm**2 for norm in norms.values()) == pytest.approx(engine.get_global_grad_norm() ** 2)
    return [*said, ", ".join(norms)]


def test_the_rank_that_computes_something_else_is_named() -> None:
    faults = [
        {"rank": 0, "at": "instruction:0F1"},
        {"rank": 1, "at": "instruction:1F0", "skip": 1},  # in the second run
        {"rank": 1, "at": "instruction:1B1"},
        {"rank": 0, "at": "instruction:0B0"},
    ]
    for *said, stages in run_kept_ranks(repeat_and_corrupt, 2, {"stages": 2}, faults):
        assert len(stages.split(", ")) == 2
        for fault, text in zip(faults, said, strict=True):
            name = f"rank {fault['rank']} (stage"
            assert text.startswith(
                "RuntimeFailure: step 2 was run twice, as it is its turn, and came out differently"
            ), text
            assert name in text and text.count("(stage") == 1, text


def test_the_replica_is_named() -> None:
    faults = [{"rank": 1, "at": "instruction:0B"}]
    for said, _ in run_kept_ranks(repeat_and_corrupt, 2, {"stages": 1, "data_parallel": 2}, faults):
        assert "rank 1 (stage" in said and "rank 0 (stage" not in said, said


def test_what_is_usual_is_the_last_numbers_that_are_finite_and_spikes_among_them() -> None:
    # around 0, of 1.4826 times the median distance 1: a spike is above 8 of these, and from the 21st number on
    sides, deviation = [1.0, -1.0], 1.4826
    early, late = Spikes(), Spikes()
    for i in range(LEAST):
        late.note(sides[i % 2])
        if i < LEAST - 1:
            early.note(sides[i % 2])
    assert early.note(1e6) is None and early.note(1e6) is not None
    for _ in range(WINDOW):  # no number of these is kept, or the range would be none
        assert late.note(float("nan")) is None and late.note(float("inf")) is None
    assert late.note(-1e6) is None and late.note(1e6) is not None, "far below, and far above"
    late = Spikes()
    for i in range(WINDOW):
        late.note(sides[i % 2])
    assert late.note(SPIKE * deviation * 0.999) is None
    found = late.note(SPIKE * deviation * 1.02)
    assert found == pytest.approx(SPIKE * 1.02, rel=0.01)
    alarms = [late.note(100.0) is not None for _ in range(WINDOW)]
    assert alarms == [i < WINDOW // 2 - 1 for i in range(WINDOW)], "a level that stays becomes the usual one"
    small = Spikes()
    for _ in range(LEAST):
        small.note(-2.0)
    assert small.note(-2.0 + 0.02 * SPIKE * 0.99) is None, "a hundredth of the median's size"
    assert small.note(-2.0 + 0.02 * SPIKE * 1.01)


def digest(task: str, given: float, made: float) -> TaskDigest:
    return TaskDigest(task=task, given=(given,), made=(made,))


def test_a_step_is_run_again_for_its_gradient_or_in_its_turn() -> None:
    noted: list[str] = []
    stages = SimpleNamespace(global_steps=0, stages=[])
    digests = SimpleNamespace(note=lambda given, made, task: noted.append(task))
    guard = Repetition(every=3, stages=stages, digests=digests, meeting=None, step=lambda: None)
    stages.stages = [
        SimpleNamespace(stage_index=i, is_trained=i != 1, gradients=SimpleNamespace(parts=list),
                        stage=SimpleNamespace(name=f"s{i}"))
        for i in range(3)
    ]  # fmt: skip
    guard.note_gradients(stages.stages[0])
    held = []
    for step in range(LEAST + 1):
        stages.global_steps = step
        held.append(guard._is_to_be_held(1.0))
    assert [step + 1 for step, is_held in enumerate(held) if is_held] == [3, 6, 9, 12, 15, 18, 21]
    assert noted == ["the gradients of stage 's0'", "the gradients of stage 's2'"], "once each"
    stages.global_steps = 21
    for norm, reason in ((5.0, "its gradient's norm 5 is "), (math.nan, "its gradient is not finite")):
        assert guard._is_to_be_held(norm) and guard._reason.startswith(reason)
    guard._is_again = True
    assert guard._is_to_be_held(1.0), "the second run's step waits for the verdict as well"
    assert not Repetition(
        every=None, stages=stages, digests=digests, meeting=None, step=print
    )._is_to_be_held(1.0)


def test_a_rank_s_own_results_are_told_from_what_came_to_it() -> None:
    differ = TaskDigests(torch.device("cpu"), tolerance=0.0).differ
    guard = Repetition(
        every=1, stages=None, digests=SimpleNamespace(differ=differ), meeting=None, step=lambda: None
    )
    first = [
        digest("0F0", 1, 2),
        digest("0F1", 3, 4),
        digest("0B0", 5, 6),
        digest("the gradients of a", 0, 7),
    ]
    assert guard._verdict(first, first) == Verdict()
    own = [first[0], digest("0F1", 3, 9), first[2], digest("the gradients of a", 0, 9)]
    assert guard._verdict(first, own) == Verdict(own=["0F1", "the gradients of a"])
    came = [digest("0F0", 9, 9), digest("0F1", 3, 9), first[2], digest("the gradients of a", 0, 9)]
    assert guard._verdict(first, came) == Verdict(own=["0F1"], came=["0F0"]), "sums follow from what came"
    assert _listed(["a", "b", "c"]) == "a, b, c" and _listed(list("abcde")) == "a, b, c and 2 more"


@pytest.mark.parametrize("other", [{"mode": "async"}, {"look_ahead": 1}])
def test_what_cannot_be_repeated_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not possible with graph_pipeline.repeat_steps"):
        read_config({"train_batch_size": 8, "graph_pipeline": {"repeat_steps": "suspicious", **other}})


def test_what_is_not_finite_is_near_itself_only() -> None:
    inf, nan = float("inf"), float("nan")
    for first, second in ((1.0, 1.0005), (inf, inf), (-inf, -inf), (nan, nan)):
        assert _is_close(first, second, 1e-3)
    for first, second in ((1.0, 1.1), (inf, 5.0), (5.0, -inf), (inf, -inf), (nan, 5.0), (inf, nan)):
        assert not _is_close(first, second, 1e-3) and not _is_close(second, first, 1e-3)


def test_digests_are_of_bits_of_what_each_task_was_given_and_made() -> None:
    digests = TaskDigests(torch.device("cpu"), tolerance=0.5)
    large = torch.full((1000,), 1e30)
    other = large.clone()
    other.view(torch.int32)[7] ^= 1
    for made in ([large, None, large], [large], [other], [torch.tensor([True, False])]):
        digests.note([large, None], made, task="0F0")
    first, second, third, last = digests.take()
    assert [(len(each.given), len(each.made)) for each in (first, second, third, last)] == [
        (1, 2),
        (1, 1),
        (1, 1),
        (1, 1),
    ]
    assert first.made == (*second.made, *second.made) and digests.differ(second.made, third.made), "one bit"
    assert last.made == (1.0,) and digests.take() == [], "each once"
    digests.note([], [large], task="0F1")
    digests.forget()
    assert digests.take() == []


class Rank:
    """A rank of one stage with a buffer, which a mini-batch writes; each of its runs draws a number."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, *, every: int | None, fault: str = "") -> None:
        module = nn.BatchNorm1d(1)
        parts = [torch.ones(1)]
        self.stages = [
            SimpleNamespace(
                module=module, stage_index=0, is_trained=True, stage=SimpleNamespace(name="s"),
                gradients=SimpleNamespace(parts=lambda: parts),
            )
        ]  # fmt: skip
        self.plan = SimpleNamespace(names_on_rank=lambda rank: f"of {rank}")
        self.global_steps, self.fault = 4, fault
        self.log: list[Any] = []
        self.digests = TaskDigests(self.device, tolerance=0.0)
        self.hold: Any = None
        meeting: Any = SimpleNamespace(gather=lambda value, what: [Verdict(), value])
        self.guard = Repetition(
            every=every, stages=self, digests=self.digests, meeting=meeting, step=lambda: self.log.append("step"),  # type: ignore[arg-type]
        )  # fmt: skip

    def hold_steps(self, hold: Any) -> None:
        self.hold = hold

    def zero_grad(self) -> None:
        self.log.append("zero")

    def run(self, name: str) -> Any:
        def once() -> Any:
            draw = torch.rand(1)
            self.stages[0].module.running_mean += 1
            self.log.append((name, float(draw), float(self.stages[0].module.running_mean)))
            given = draw + 1 if self.fault == f"given {name}" else draw
            made = draw + 1 if self.fault == f"made {name}" else draw
            self.digests.note([given], [made], task="0F0")
            if not self.hold(1.0):
                self.log.append("step")
            return name

        return once


@pytest.mark.parametrize("every", [None, 4, 5])
def test_a_second_run_begins_as_the_first_and_is_the_step(every: int | None) -> None:
    rank = Rank(every=every)
    torch.manual_seed(0)
    draws = [float(torch.rand(1)) for _ in range(2)]
    torch.manual_seed(0)
    rank.digests.note([], [torch.ones(1)], task="left by a mini-batch that failed")
    if every != 5:
        assert rank.guard.run(rank.run("first"), rank.run("again")) == "first"  # type: ignore[arg-type]
        assert rank.log == [("first", draws[0], 1.0), "step"]
    else:
        assert rank.guard.run(rank.run("first"), rank.run("again")) == "again"  # type: ignore[arg-type]
        assert rank.log == [("first", draws[0], 1.0), "zero", ("again", draws[0], 1.0), "step"]
    assert rank.hold is None and float(torch.rand(1)) == draws[1], "as after one run"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("made again", r"other results from the same inputs: rank 1 \(stage 'of 1'\) at 0F0\. A processor"),
        ("given first", r"were sent other inputs: rank 1 \(stage 'of 1'\) at 0F0\. A link"),
    ],
)
def test_a_run_that_comes_out_differently_is_no_step_and_the_same_error_on_all_ranks(
    fault: str, said: str
) -> None:
    rank = Rank(every=1, fault=fault)
    with pytest.raises(RuntimeFailure, match=said) as refused:
        rank.guard.run(rank.run("first"), rank.run("again"))  # type: ignore[arg-type]
    assert is_shared(refused.value) and [each for each in rank.log if isinstance(each, str)] == [
        "zero",
        "zero",
    ]
