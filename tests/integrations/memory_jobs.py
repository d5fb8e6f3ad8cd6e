"""What ranks run in the tests of memory optimization through the engine."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tests.integrations.engine_jobs import B, config_of, make_engine
from tests.models import build


class _Lines(logging.Handler):
    """Keeps what the package logs about memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("memory: "):
            self.lines.append((record.levelname, text))


def train_with(name: str, blocks: list[dict[str, Any]], dropout: float = 0.0) -> list[dict[str, Any]]:
    """Train a step and a half of a model under each block; return losses, gradients and the memory report."""
    answers = []
    log = logging.getLogger("gpp_plugin.integrations.memory")
    log.setLevel(logging.INFO)
    for block in blocks:
        lines = _Lines()
        log.addHandler(lines)
        model, make_batch = build(name, dropout=dropout)
        batches = [make_batch(B, seed) for seed in range(2)]
        engine = make_engine(model, batches[0], config_of(block={"stages": 2, **block}))
        engine.retain_gradients()
        torch.manual_seed(7 + engine.global_rank)
        losses = [float(engine.train_batch(data_iter=iter([batches[0]])))]
        gradients = {key: gradient.clone() for key, gradient in engine.gradients.items()}
        losses.append(float(engine.train_batch(data_iter=iter([batches[1]]))))
        answers.append(
            {
                "losses": losses,
                "gradients": gradients,
                "plan": engine.plan,
                "report": engine.memory_report(),
                "lines": lines.lines,
            }
        )
        log.removeHandler(lines)
    return answers
