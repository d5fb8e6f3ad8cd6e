"""What each rank runs in the tests of compiled stages: the same steps on torch and compiled."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gpp_plugin.backends import compiled_blocks
from gpp_plugin.relative_errors import gradient_errors
from tests.compilers import compile_plainly
from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build


def train(asked: Any, *, model: str, folder: str, dropout: float = 0.0) -> dict[str, Any]:
    """Train three steps, evaluate, and tell what is compiled."""
    made, make_batch = build(model, dropout=dropout)
    batches = [make_batch(B, seed) for seed in range(3)]
    engine = make_engine(
        made,
        batches[0],
        config_of(block={"stages": 2, "slicing": "off", "compile": asked, "profile_dir": folder}),
    )
    torch.manual_seed(5)  # what starting draws is not the same where profiles are on disk
    engine.retain_gradients()
    losses = steps(engine, batches[:1])
    gradients = {name: gradient.clone() for name, gradient in engine.gradients.items()}
    losses += steps(engine, batches[1:])
    losses.append(float(engine.eval_batch(iter([make_batch(B, 9)]))))
    report = engine.memory_report()
    told = {
        "losses": losses,
        "gradients": gradients,
        "compiled": [stage.compiled for stage in engine.plan.stages],
        "labels": [stage.forward_label for stage in engine.plan.stages],
        "notes": [note for note in engine.plan.notes if note.startswith("compile: ")],
        "num_compiled": engine._backends.compiled.compiler.num_compiled,
        "differences": list(report.differences),
    }
    engine.destroy()
    return told


def train_all(
    cases: list[Any], model: str, folder: str, dropout: float, is_plain: bool
) -> list[dict[str, Any]]:
    """Train once for each value of the key.

    Args:
        is_plain: with a compiler that takes no seconds.
    """
    compiler = compile_plainly if is_plain else compiled_blocks.compile_with_inductor
    with mock.patch.object(compiled_blocks, "compile_with_inductor", compiler):
        found = [train(asked, model=model, folder=folder, dropout=dropout) for asked in cases]
    for one in found:  # compiled code may make the planner cut the stages elsewhere
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, one["gradients"])
        one["gradients"] = {name: gradient for own in of_ranks for name, gradient in own.items()}
    right = found[0]["gradients"]
    for one in found:
        assert one["gradients"].keys() == right.keys()
        one["error"] = max(gradient_errors(one["gradients"], right).values())
    return found
