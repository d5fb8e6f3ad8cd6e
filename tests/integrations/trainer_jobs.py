"""Trainings with HuggingFace's Trainer and with ours, as one process or several ranks run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from tests.models import build

UNIT, STEPS, ACCUMULATION = 2, 10, 2
"""Samples of a batch, optimizer steps, and batches a step and rank."""


class Rows(Dataset[dict[str, Any]]):
    """Samples of a batch; ``seen`` are the numbers read since it was cleared."""

    def __init__(self, name: str, count: int) -> None:
        batch = build(name)[1](count, 0)
        if name == "t5":  # Trainer does not divide T5's loss: one mean over all tokens is that of equal units
            batch["labels"] = batch["labels"].clamp(min=1)
        self.rows = [{k: v[i] for k, v in batch.items() if isinstance(v, Tensor)} for i in range(count)]
        if name == "clip":
            for row in self.rows:
                row["input_ids"][-1] = 2
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.seen.append(index)
        return self.rows[index]


class Stream(IterableDataset[dict[str, Any]]):
    """The same, one after the other, which knows where it is."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def stack(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    batch: dict[str, Any] = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    if "pixel_values" in batch and "labels" not in batch:
        batch["return_loss"] = True
    return batch


class Longest:
    """Pads to the longest of a batch, as collators with ``padding=True`` do."""

    padding = True

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        lengths = [5 + int(row["input_ids"][0]) % 4 for row in rows]
        width = max(lengths)
        batch = {key: torch.stack([row[key][:width] for row in rows]) for key in rows[0]}
        for at, length in enumerate(lengths):
            batch["attention_mask"][at, length:] = 0
            batch["labels"][at, length:] = -100
        return batch


def model_of(name: str) -> nn.Module:
    if name != "lora":
        return build(name)[0]
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model, _ = build("llava")
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        return get_peft_model(model, lora)


def data_of(name: str, count: int) -> Rows:
    return Rows("llava" if name == "lora" else name, count)


def arguments(directory: str, *, total: int, ranks: int, one_batch: bool = False, **more: Any) -> Any:
    """Return arguments of a job whose mini-batches have ``total`` samples on so many ranks."""
    from transformers import TrainingArguments

    unit = total if one_batch else UNIT
    return TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=unit,
        gradient_accumulation_steps=total // unit // ranks,
        **{
            "max_steps": STEPS,
            "learning_rate": 2e-3,
            "warmup_steps": 3,
            "weight_decay": 0.05,
            "max_grad_norm": 0.5,
            "lr_scheduler_type": "cosine",
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 3,
            "save_strategy": "no",
            "dataloader_pin_memory": False,
            "per_device_eval_batch_size": 5,
            **more,
        },  # fmt: skip
    )


def logged(trainer: Any) -> list[tuple[float, float, float]]:
    """Return loss, gradient norm and learning rate of each step."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [(row["loss"], float(row["grad_norm"]), row["learning_rate"]) for row in rows]


def train_plain(
    name: str, directory: str, *, total: int, count: int, collator: Any = None, **more: Any
) -> Any:
    """Train with Trainer in this process."""
    from transformers import Trainer

    args = arguments(directory, total=total, ranks=1, one_batch=name == "t5", **more)
    trainer = Trainer(
        model_of(name), args, train_dataset=data_of(name, count), data_collator=collator or stack
    )
    trainer.train()
    return trainer


def train_on_ranks(
    name: str, directory: str, configs: list[dict[str, Any]], count: int, collator: Any = None
) -> list[Any]:
    """Train on these ranks under each configuration; return what was logged."""
    import torch.distributed as dist

    from gpp_plugin import GraphPipelineTrainer

    ranks = dist.get_world_size()
    answers = []
    for config in configs:
        args = arguments(directory, total=UNIT * ACCUMULATION * ranks, ranks=ranks)
        trainer = GraphPipelineTrainer(
            model_of(name),
            args,
            config=config,
            train_dataset=data_of(name, count),
            data_collator=collator or stack,
        )
        trainer.train()
        answers.append(logged(trainer))
        trainer.engine.destroy()
    return answers


def config_of(zero: int = 0, **block: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": zero}, "graph_pipeline": {"comm_timeout_s": 60, **block}}
