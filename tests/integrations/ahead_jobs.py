"""What each rank runs in the tests of frozen branches that run ahead: the same training with and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gpp_plugin.api import format_timeline
from gpp_plugin.report.timeline_chart import summarize_timeline
from tests.integrations.engine_jobs import B, config_of, make_engine
from tests.integrations.frozen_jobs import frozen_model

STAGES: dict[str, list[dict[str, Any]]] = {
    "llava model.vision_tower": [
        {"name": "vision", "modules": ["model.vision_tower"], "devices": 1},
        {"name": "language", "modules": ["*"], "devices": 1},
    ],
    "frozen_branch left": [
        {"name": "frozen", "modules": ["left"], "devices": 1},
        {"name": "trained", "modules": ["*"], "devices": 1},
    ],
    "llava on two": [
        {"name": "vision", "modules": ["model.vision_tower"], "devices": 2},
        {"name": "language", "modules": ["*"], "devices": 2},
    ],
    "llava branch of two": [
        {"name": "early", "modules": ["model.vision_tower.embeddings", "model.vision_tower.pre_layrnorm"], "devices": 1},
        {"name": "late", "modules": ["model.vision_tower"], "devices": 1},
        {"name": "language", "modules": ["*"], "devices": 1},
    ],
    "llava, the tower on the language model's ranks": [
        {"name": "vision", "modules": ["model.vision_tower"], "ranks": [0, 1]},
        {"name": "early", "modules": ["model", "model.language_model.embed_tokens", "model.language_model.layers.0"], "ranks": [0]},
        {"name": "late", "modules": ["model.language_model.layers.1", "model.language_model.norm", "*"], "ranks": [1]},
    ],
    "clip, the text tower on both ranks": [
        {"name": "text", "modules": ["text_model"], "ranks": [1, 0]},
        {"name": "vision", "modules": ["vision_model"], "ranks": [0]},
        {"name": "loss", "modules": ["*"], "ranks": [1]},
    ],
}  # fmt: skip


class Rows(Dataset[dict[str, Tensor]]):
    """The samples of some mini-batches, one by one; ``draws`` lets loading draw random numbers."""

    def __init__(self, batch: dict[str, Tensor], *, draws: bool = False) -> None:
        self._batch, self._draws = batch, draws

    def __len__(self) -> int:
        return len(next(iter(self._batch.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = {key: value[index] for key, value in self._batch.items()}
        if self._draws:
            row["pixel_values"] = row["pixel_values"] + 0.1 * torch.randn(row["pixel_values"].shape)
        return row


def train_both(kind: str, stages: str, options: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Train without looking ahead and with; options as of `train`."""
    return {ahead: train(kind, stages, ahead=ahead, **options) for ahead in (0, 1)}


def train(
    kind: str,
    stages: str,
    *,
    ahead: int,
    own: bool = False,
    dropout: float = 0.0,
    dropout_after: float = 0.0,
    zero: int = 0,
    num_steps: int = 6,
    lengths: tuple[int, ...] = (),
    interrupt: str = "",
    directory: str = "",
    draws: bool = False,
) -> dict[str, Any]:
    """Train some steps; between two of them do what ``interrupt`` names.

    Args:
        own: the engine loads the data, and looks ahead by default; ``draws``: its dataset draws random numbers.
        dropout: of the whole model; ``dropout_after`` of the trained language model alone.
    """
    model, make_batch = frozen_model(kind, dropout=dropout)
    if dropout_after:
        for layer in model.model.language_model.layers:
            layer.self_attn.attention_dropout = dropout_after
    batches = [make_batch(B, seed) for seed in range(num_steps)]
    for batch, length in zip(batches, lengths, strict=False):
        for key in ("input_ids", "attention_mask", "labels"):
            batch[key] = batch[key][:, :length].contiguous()
    given = "auto" if own and ahead else ahead
    config = config_of(
        zero_optimization={"stage": zero},
        block={
            "plan": {"stages": STAGES[stages]},
            "look_ahead": given,
            "micro_batch_sizes": 2,
        },
    )
    data = {"training_data": Rows(make_batch(4 * B, 50), draws=draws)} if own else {}
    torch.manual_seed(11)
    engine = make_engine(model, batches[0], config, **data)
    engine.retain_gradients()
    engine.record_timelines = interrupt == "trace"
    iterator = None if own else iter(batches)
    losses, gradients, looked = [], [], []
    for step in range(num_steps):
        if step == 3 and interrupt:
            losses += disturb(interrupt, engine, iterator, make_batch, directory)
        losses.append(float(engine.train_batch(data_iter=iterator)))
        gradients.append({name: g.clone() for name, g in engine.gradients.items()})
        looked.append(engine._rank_runner.has_prefetched)
    if not own:
        try:
            engine.train_batch(data_iter=iterator)
        except StopIteration:
            losses.append(-1.0)
    with engine.gathered_parameters():
        parameters = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    answer = {
        "losses": losses,
        "gradients": gradients,
        "looked": looked,
        "parameters": parameters,
        "steps": engine.global_steps,
        "report": engine.memory_report(),
    }
    engine.flush()
    return answer


def disturb(
    what: str, engine: Any, iterator: Iterator[Any] | None, make_batch: Any, directory: str
) -> list[float]:
    """Do something between two steps; return the losses that it yields."""
    if what == "trace":
        timeline = engine.last_timeline
        if (
            timeline is not None
        ):  # rank 0's: the tower ran the next mini-batch, in the numbers behind this one's four
            run = [{e.micro_batch for e in timeline.events if e.task and e.stage == s} for s in (0, 1)]
            first = 4 if engine._rank_runner.has_prefetched else 0
            assert run == [set(range(first, first + 4)), {0, 1, 2, 3}], run
            assert "vision" in format_timeline(timeline, engine.plan)
            assert summarize_timeline(timeline).iteration_us > 0.0
        return []
    if what == "evaluate":
        return [float(engine.eval_batch(iter([make_batch(B, 40)])))]
    if what == "other iterator":  # and back to the first one afterwards: none of its mini-batches is lost
        return [float(engine.train_batch(data_iter=iter([make_batch(B, seed)]))) for seed in (30, 31)]
    if what == "load":
        engine.save_checkpoint(directory, tag="here")
        found = [float(engine.train_batch(data_iter=iter([make_batch(B, 30)])))]
        engine.load_checkpoint(directory, tag="here")
        return found
    if what == "weights":
        state = {name: value * 1.01 for name, value in engine.module.state_dict().items()}
        engine.load_module_state_dict(state)
        return []
    assert what == "weights by hand"  # as nobody is told: one rank finds it out, and all drop what they have
    with torch.no_grad():
        for parameter in engine.module.parameters():
            if not parameter.requires_grad:
                parameter.mul_(1.01)
    return []
