"""What a forward leaves for the next one is trained with on two stages as in one process, and comes with checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpp_plugin.errors import GppError, PlanError
from gpp_plugin.model import preparation
from tests import carried_models
from tests.carried_models import make_batch
from tests.integrations.engine_jobs import config_of, make_engine, steps
from tests.plan.graphs import chain, make_request
from tests.ranks import run_kept_ranks
from tests.reference import Batch, ReferenceRun, train_reference


def train_whole(names: tuple[str, ...], batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Train models that are one block, on one rank."""
    return {name: train_carried(name, batches, "", {}) for name in names}


def train_with_copies(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Try a stage of two ranks that keeps state, by default and as the refusal says."""
    answer: dict[str, Any] = {}
    for name, block in (("stages", {"stages": 1}), ("advised", {"data_parallel": 2}), ("auto", {})):
        try:
            answer[name] = train_carried("Centre", batches, "", block)["stages"]
        except GppError as error:
            answer[name] = str(error)
    return answer


def train_carried(
    name: str, batches: list[dict[str, Any]], directory: str, block: dict[str, Any]
) -> dict[str, Any]:
    """Train a model on two stages; with a directory, save after two steps, and go on in an engine that loads that."""

    def start(*, verify: bool) -> Any:
        torch.manual_seed(0)
        config = config_of(
            train_batch_size=len(batches[0]["x"]),
            train_micro_batch_size_per_gpu=2,
            optimizer={"type": "SGD", "params": {"lr": 0.1}},
            block={"verify": verify, **block},
        )
        return make_engine(getattr(carried_models, name)(), batches[0], config)

    engine = start(verify=True)
    losses = steps(engine, batches[:2])
    if directory:
        engine.save_checkpoint(directory)
        engine = start(verify=False)
        engine.load_checkpoint(directory)
    losses += steps(engine, batches[2:])
    names = [s.name for s in engine.plan.stages]
    return {"losses": losses, "state": engine.gather_state_dict(), "stages": names}


BATCH, UNIT, STEPS = 4, 2, 5


def train_alone(name: str, batches: list[Batch]) -> ReferenceRun:
    torch.manual_seed(0)
    return train_reference(
        getattr(carried_models, name)(),
        batches,
        unit=UNIT,
        make_optimizer=lambda own: torch.optim.SGD(own, lr=0.1),
    )


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_two_stages_train_as_one_process_also_after_a_checkpoint(recompute: str, tmp_path: Path) -> None:
    batches = [make_batch(BATCH, seed) for seed in range(STEPS)]
    block = {"stages": 2, "memory": {"recompute": recompute}}
    directory = str(tmp_path) if recompute == "off" else ""
    answers = run_kept_ranks(train_carried, 2, "Everything", batches, directory, block, timeout_s=120)
    alone = train_alone("Everything", batches)
    state = alone.model.state_dict()
    assert answers[0]["losses"] == answers[1]["losses"] == pytest.approx(alone.losses, rel=2e-6)
    assert answers[0]["state"].keys() == state.keys() and len(answers[0]["stages"]) == 2
    for name, value in state.items():
        torch.testing.assert_close(answers[0]["state"][name], value, rtol=1e-5, atol=1e-6)


def test_a_model_whose_python_reads_its_state_trains_as_one_block() -> None:
    names = tuple(kind.__name__ for kind in carried_models.WHOLE)
    batches = [make_batch(BATCH, seed) for seed in range(STEPS)]
    (answer,) = run_kept_ranks(train_whole, 1, names, batches)
    for name in names:
        alone = train_alone(name, batches)
        assert answer[name]["losses"] == pytest.approx(alone.losses, rel=2e-6)
        for key, value in alone.model.state_dict().items():
            torch.testing.assert_close(answer[name]["state"][key], value, rtol=1e-5, atol=1e-6)


def test_ranks_share_no_stage_that_keeps_state_unless_they_are_asked_to() -> None:
    for answer in run_kept_ranks(train_with_copies, 2, [make_batch(BATCH, 0)]):
        assert answer["stages"].startswith(
            "each forward leaves centre for the next one, so that each stage has one"
        )
        assert '"data_parallel": 2' in answer["stages"] and "\n" not in answer["stages"]
        assert len(answer["advised"]) == 1 and len(answer["auto"]) == 2


@pytest.mark.parametrize(
    "stages, ranks, advice",
    [
        (2, 3, "run on 2 ranks"),
        (2, 4, 'run on 2 ranks, or let .*"data_parallel": 2 in graph_pipeline'),
        (None, 9, 'run on fewer ranks, or let .*"data_parallel": 9 in graph_pipeline'),
    ],
)
def test_what_is_advised_where_state_allows_no_plan_works(
    stages: int | None, ranks: int, advice: str
) -> None:
    config: Any = SimpleNamespace(planner="auto")
    request = make_request(chain(4), ranks=ranks, num_stages=stages, data_parallel=1)
    with pytest.raises(PlanError, match=f"; {advice}$"):
        preparation._plan_with_state(config, request, ["centre"])


def test_every_step_of_planning_keeps_stages_with_state_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    for name in ("make_plan", "schedule_plan", "share_ranks"):

        def plan(first: Any, request: Any, *, name: str = name, **options: Any) -> Any:
            asked[name] = request.data_parallel
            return first

        monkeypatch.setattr(preparation, name, plan)
    config: Any = SimpleNamespace(
        planner="auto", schedule="1f1b", slicing=None, memory=SimpleNamespace(recompute="off")
    )
    request = make_request(chain(4))
    for state, degree in ((["centre"], 1), ([], None)):
        preparation._planned(request.graph, request, config, None, None, {}, {}, state)
        assert asked == dict.fromkeys(("make_plan", "schedule_plan", "share_ranks"), degree)
