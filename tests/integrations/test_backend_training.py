"""Backends in training and evaluation through `deepspeed.initialize`: losses as on torch, and for weights that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpp_plugin.backends.forward_code import ForwardCode, ForwardRunner
from gpp_plugin.backends.stage_backends import BackendForward
from gpp_plugin.plugins import BACKENDS, Backend, find_backend
from tests.integrations.ahead_jobs import STAGES
from tests.integrations.engine_jobs import B, config_of, make_engine
from tests.integrations.frozen_jobs import frozen_model
from tests.ranks import run_kept_ranks

LLAVA = "llava model.vision_tower"


class Baked(Backend):
    """Copies the weights when it builds; counts builds and runs; answers what it was asked last without computing.

    So it is many times as fast as torch where it is measured, and computes each micro-batch of training.
    """

    def __init__(self) -> None:
        self.num_built = self.num_run = 0

    def build(self, code: ForwardCode) -> ForwardRunner:
        """Return the frozen code, on weights of its own."""
        self.num_built += 1
        module = code.frozen
        for name, held in list(module.named_buffers()):
            setattr(module, name, held.clone())
        last: list[Any] = [None, None]

        def run(*tensors: Tensor) -> Any:
            self.num_run += 1
            if last[0] is None or any(a is not b for a, b in zip(last[0], tensors, strict=True)):
                last[:] = tensors, [made + 1e-7 for made in module(*tensors)]
            return [made.clone() for made in last[1]]

        return run


def train(asked: Any, *, profile_dir: str, num_steps: int = 4, is_planned: bool = False) -> dict[str, Any]:
    """Train, load other weights into the tower in between, and evaluate.

    Args:
        is_planned: stages are the planner's.
    """
    model, make_batch = frozen_model(LLAVA)
    batches = [make_batch(B, seed) for seed in range(num_steps)]
    block = {
        "micro_batch_sizes": 2,
        "backends": asked,
        "profile_dir": profile_dir,
        "verify": False,
        **({"stages": 2} if is_planned else {"plan": {"stages": STAGES[LLAVA]}}),
    }
    baked = Baked()
    with BACKENDS.lent("baked", baked):
        torch.manual_seed(11)
        engine = make_engine(model, batches[0], config_of(block=block))
        losses = []
        for step, batch in enumerate(batches):
            if step == 2:  # as a checkpoint would
                with torch.no_grad():
                    for name, parameter in engine.module.named_parameters():
                        if "vision_tower" in name:
                            parameter.mul_(1.25)
            losses.append(float(engine.train_batch(data_iter=iter([batch]))))
        losses.append(float(engine.eval_batch(iter([make_batch(B, 99)]))))
        runner = engine._rank_runner.stage_runners[0]
        (compiled,) = runner._compiled.values()
        call = getattr(compiled.compute, "_call", None)
        return {
            "losses": losses,
            "backends": {name: one.backend for name, one in engine.backends.items()},
            "costs": {name: [c.backend for c in one.costs] for name, one in engine.backends.items()},
            "notes": [note for note in engine.plan.notes if "runs on" in note],
            "planned": [note for note in engine.plan.notes if note.startswith("with backends")],
            "forward_on": {stage.name: stage.backend for stage in engine.plan.stages},
            "built": baked.num_built,
            "run": baked.num_run,
            "taken": isinstance(call, BackendForward) and call.is_taken,
            "stage": engine.plan.stages[runner.stage_index].name,
        }


def train_all(cases: list[Any], profile_dir: str) -> list[dict[str, Any]]:
    """Train once for each value of the key, and once more where the planner cuts the stages."""
    given = [train(asked, profile_dir=profile_dir) for asked in cases]
    return [*given, train(["baked"], profile_dir=profile_dir, is_planned=True)]


INSTALLED = [name for name in ("onnxruntime", "openvino") if not find_backend(name).missing()]
CASES: list[Any] = ["off", ["baked"], *({"vision": name} for name in INSTALLED)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Return the answers of both ranks to each case, ``off`` first."""
    folder = str(tmp_path_factory.mktemp("costs"))
    of_ranks = run_kept_ranks(train_all, 2, CASES, folder, timeout_s=290)
    return [list(of_case) for of_case in zip(*of_ranks, strict=True)]


def test_losses_are_those_of_torch_to_rounding_and_after_weights_changed(answers: Any) -> None:
    off, *others = answers
    assert all(one["backends"] == {} and not one["taken"] and one["built"] == 0 for one in off)
    for both in others:
        for own, right in zip(both, off, strict=True):
            assert own["losses"] == pytest.approx(right["losses"], rel=1e-5)
    for vision, language in others[:-1]:
        assert vision["stage"] == "vision" and vision["taken"] and not language["taken"]


def test_what_was_measured_is_told_to_all_ranks_and_built_again_for_new_weights(answers: Any) -> None:
    vision, language = answers[1]
    assert vision["backends"] == language["backends"] == {"vision": "baked"}
    assert vision["costs"] == language["costs"] == {"vision": ["torch", "baked"]}
    assert vision["notes"] == language["notes"]
    (note,) = vision["notes"]
    assert note.startswith("stage vision runs on baked: a forward takes ") and "x as fast" in note
    # when it was measured, in training, for other weights, and where evaluation has other operators
    assert vision["built"] in (3, 4) and language["built"] == 0
    assert vision["run"] > 4 * 4, "it ran the micro-batches of four steps"


def test_stages_are_cut_with_what_they_take_on_backends(answers: Any) -> None:
    first, second = answers[-1]
    assert first["planned"] == second["planned"] and first["forward_on"] == second["forward_on"]
    (note,) = first["planned"]
    assert note.startswith("with backends a step takes ") and " ms simulated, on torch " in note
    # where the tower lies best with blocks that train, their stage runs on torch
    assert set(first["forward_on"].values()) <= {"", "baked"}
    # of stages that are given the times alone are others
    given = answers[1][0]
    assert given["planned"] == [] and given["forward_on"] == {"vision": "baked", "language": ""}
