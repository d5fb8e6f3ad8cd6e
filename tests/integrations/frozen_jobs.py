"""Models of which only a part is trained, and what each rank runs in their tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.ir.program import InstructionKind
from tests.integrations.engine_jobs import make_engine, steps_and_gradients
from tests.models import build
from tests.runtime.jobs import Job, make_batches, make_config


class LoRA(nn.Module):
    """A frozen layer plus a trained product of two small matrices (Hu et al. 2021): ``W x + B A x``."""

    def __init__(self, layer: nn.Module, width_in: int, width_out: int, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, width_in) / width_in**0.5)
        self.b = nn.Parameter(torch.randn(width_out, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with the product's added."""
        out: Tensor = self.layer(x) + x @ self.a.T @ self.b.T
        return out


def frozen_model(kind: str, **options: Any) -> tuple[nn.Module, Any]:
    """Return a model with a part frozen, and its batches; ``options`` as of `build`."""
    name, _, part = kind.partition(" ")
    model, make_batch = build(name, **options)
    if part.endswith("lora"):  # late: only in the last block; everything before it runs forward only
        torch.manual_seed(7)
        model.requires_grad_(False)
        for block in model.transformer.h[-1:] if part == "late lora" else model.transformer.h:
            width = block.attn.c_attn.weight.shape
            block.attn.c_attn = LoRA(block.attn.c_attn, width[0], width[1], rank=2)
    else:
        for path in part.split("+"):
            model.get_submodule(path).requires_grad_(False)
    return model, make_batch


def train_frozen(tasks: list[Job]) -> list[dict[str, Any]]:
    """Train each job; return what the equality tests compare, and what each stage does and holds."""
    answers = []
    for job in tasks:
        model, make_batch = frozen_model(job["model"])
        batches = make_batches(make_batch, job)
        engine = make_engine(model, batches[0], make_config(job))
        losses, gradients = steps_and_gradients(engine, batches)
        program = engine._rank_runner.stage_runners[0]._programs.main
        kinds = [i.task.kind.value for i in program.instructions if i.task is not None]
        sent = [m.direction.value for m in program.messages(InstructionKind.SEND)]
        stage = engine.plan.stages[engine.stage_id]
        answers.append(
            {
                "losses": losses,
                "gradients": gradients,
                "stage": stage,
                "plan": engine.plan,
                "kinds": "".join(dict.fromkeys(kinds)),
                "gradients sent": sent.count("gradient"),
                "trained": sum(p.numel() for p in engine.module.parameters() if p.requires_grad),
                "optimizer elements": optimizer_elements(engine.stage_engine),
            }
        )
    return answers


def optimizer_elements(stage_engine: Any) -> int:
    """Return the elements of all state tensors of the stage's optimizer that are as large as its parameters."""
    inner = stage_engine.updater._masters.optimizer
    if inner is None:
        return 0
    return sum(
        value.numel()
        for state in inner.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim > 0
    )
