"""What an engine holds and remembers: data that fails, weights and gradients under ZeRO."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpp_plugin.model.materialize import resident_bytes
from tests.integrations.engine_jobs import B, config_of, make_engine, said_of, steps
from tests.integrations.loading_jobs import Samples, make
from tests.models import build
from tests.ranks import run_kept_ranks


def fail_to_load(bad_rank: int) -> dict[str, Any]:
    """Train until one rank's dataset fails, at a sample that the first epoch leaves out; say what this rank saw."""
    is_bad = torch.distributed.get_rank() == bad_rank
    engine = make(Samples(broken=15 if is_bad else None), workers=0, stages=2)
    said = [said_of(engine.train_batch) for _ in range(3)]
    assert said[:2] == ["", ""]
    return {"said": said[2], "step": engine.global_steps}


def hold_weights() -> list[dict[str, Any]]:
    """Train under each ZeRO stage on two ranks of one stage; say what is held and what the program does."""
    answers = []
    for zero in (0, 1, 2):
        model, make_batch = build("gpt2")
        batch = make_batch(B, 0)
        config = config_of(zero_optimization={"stage": zero}, block={"stages": 1})
        engine = make_engine(model, batch, config)
        stage_engine, hooks = engine.stage_engine, engine._rank_runner.stage_runners[0]._hooks
        held: list[int] = []
        between: list[int] = []

        def note(into: list[int], of: Any = stage_engine.gradients) -> None:
            into.append(of.held_bytes())

        def then(*calls: Callable[[], None]) -> Callable[[], None]:
            return lambda: [call() for call in calls] and None

        hooks.accumulate = then(functools.partial(note, held), stage_engine.accumulate)
        hooks.reduce_data = then(stage_engine.reduce_data, functools.partial(note, between))
        losses = steps(engine, [batch])
        stage = dict(engine.module.named_parameters(remove_duplicate=False))
        kinds = [i.kind.value for i in engine._rank_runner.stage_runners[0]._programs.main.instructions]
        answers.append(
            {
                "losses": losses,
                "reductions": kinds.count("reduce_data"),
                "as backwards end": held,
                "after reductions": between,
                "parameters": sum(p.numel() * p.element_size() for p in engine.module.parameters()),
                "shared": all(p.data_ptr() == stage[n].data_ptr() for n, p in model.named_parameters()),
                "model bytes": resident_bytes(model),
            }
        )
    return answers


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_cannot_load_its_data_tells_the_others(bad_rank: int) -> None:
    answers = run_kept_ranks(fail_to_load, 2, bad_rank)
    said = answers[bad_rank]["said"]
    assert said.startswith(f"RuntimeFailure: rank {bad_rank} could not load sample ")
    assert " of training_data: OSError: the disk is gone (loading_jobs.py:" in said
    other = answers[1 - bad_rank]
    why = (
        f"RuntimeFailure: rank {bad_rank} has no mini-batch, and nothing of it has run: RuntimeFailure: rank "
    )
    assert other["said"].startswith(why) and other["said"].endswith(said.partition("rank ")[2])
    assert other["step"] == answers[bad_rank]["step"] == 2


def test_zero_2_reduces_behind_each_backward_and_the_users_model_keeps_no_copies() -> None:
    for found in run_kept_ranks(hold_weights, 2):
        whole = found[0]["parameters"]
        assert [answer["reductions"] for answer in found] == [1, 1, 2], "of two micro-batches"
        assert found[1]["losses"] == found[0]["losses"] and found[2]["losses"] == pytest.approx(
            found[0]["losses"]
        )
        for answer in found:
            assert answer["shared"] and answer["model bytes"] <= whole + 4096
        part = found[2]["after reductions"][0]
        assert whole / 2 <= part <= whole / 2 + 64
        assert found[0]["as backwards end"] == [whole, whole] and found[0]["after reductions"] == [whole]
        assert found[1]["as backwards end"] == [whole, whole] and found[1]["after reductions"] == [whole]
        assert found[2]["as backwards end"] == [whole + part, whole + part]
        assert found[2]["after reductions"] == [part, part]
