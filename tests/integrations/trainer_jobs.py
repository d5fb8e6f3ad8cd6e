"""Trainings with HuggingFace's Trainer and with ours, as one process or several ranks run them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from gpp_plugin import GraphPipelineTrainer
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.trainer.trainer_config import TRIED_SAMPLES
from tests.models import build

UNIT, STEPS, ACCUMULATION = 2, 10, 2
"""Samples of a batch, optimizer steps, and batches a step and rank."""


class Rows(Dataset[dict[str, Any]]):
    """Samples of a batch; ``seen`` are the numbers read since it was cleared."""

    def __init__(self, name: str, count: int) -> None:
        batch = build(name)[1](count, 0)
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


def model_of(name: str, dropout: float = 0.0) -> nn.Module:
    if name != "lora":
        return build(name, dropout=dropout)[0]
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model, _ = build("llava", dropout=dropout)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
        return get_peft_model(model, lora)


def data_of(name: str, count: int) -> Rows:
    return Rows("llava" if name == "lora" else name, count)


def arguments(directory: str, *, total: int, ranks: int, **more: Any) -> Any:
    """Return arguments of a job whose mini-batches have ``total`` samples on so many ranks."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=UNIT,
        gradient_accumulation_steps=total // UNIT // ranks,
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


def train_plain(name: str, directory: str, *, total: int, count: int, **more: Any) -> Any:
    """Train with Trainer in this process."""
    from transformers import Trainer

    args = arguments(directory, total=total, ranks=1, **more)
    trainer = Trainer(model_of(name), args, train_dataset=data_of(name, count), data_collator=stack)
    trainer.train()
    return trainer


def train_on_ranks(
    name: str, directory: str, configs: list[dict[str, Any]], count: int, more: dict[str, Any] | None = None
) -> list[Any]:
    """Train on these ranks under each configuration; return what was logged."""
    ranks = dist.get_world_size()
    answers = []
    for config in configs:
        args = arguments(directory, total=UNIT * ACCUMULATION * ranks, ranks=ranks, **(more or {}))
        trainer = GraphPipelineTrainer(
            model_of(name),
            args,
            config=config,
            train_dataset=data_of(name, count),
            data_collator=stack,
        )
        trainer.train()
        answers.append(logged(trainer))
        trainer.engine.destroy()
    return answers


def config_of(zero: int = 0, **block: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": zero}, "graph_pipeline": {"comm_timeout_s": 60, **block}}


def resume(directory: str, name: str, config: dict[str, Any], streams: bool = False) -> dict[str, Any]:
    """Train with dropout and save in the middle of the second epoch; go on from there with a fresh trainer.

    An epoch has four steps, and half a mini-batch is left over. ``straight`` is without the break; of both the losses,
    the samples read since the model was captured, the checkpoints kept and the weights at the end.
    """
    total = UNIT * ACCUMULATION * dist.get_world_size()
    rows = data_of(name, 4 * total + total // 2)
    # what is read in one: a list of the half that is left over too, as one process reads ahead
    answers: dict[str, Any] = {"epoch": len(rows) if streams else 4 * total + UNIT}

    def trainer_in(folder: str, **more: Any) -> Any:
        return GraphPipelineTrainer(
            model_of(name, dropout=0.2),
            arguments(folder, total=total, ranks=dist.get_world_size(), **more),
            config=config,
            train_dataset=Stream(rows) if streams else rows,
            data_collator=stack,
        )

    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}
    stopped = trainer_in(directory, **saving)
    stopped.add_callback(_stop_at(6))
    stopped.train()
    stopped.engine.destroy()
    for part, more in (("straight", {}), ("resumed", saving)):
        dist.barrier()  # rank 0 removes the older checkpoints
        answers[f"{part} kept"] = _checkpoints_in(directory)
        trainer = trainer_in(directory if more else directory + "/again", **more)
        rows.seen.clear()
        trainer.train(resume_from_checkpoint=True if more else None)
        answers[part] = logged(trainer)
        answers[f"{part} seen"] = list(rows.seen)
        answers[f"{part} weights"] = trainer.engine.gather_state_dict()
        trainer.engine.destroy()
    dist.barrier()
    answers["kept"] = _checkpoints_in(directory)
    return answers


def _checkpoints_in(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.startswith("checkpoint"))


def check_resumed(found: dict[str, Any]) -> None:
    """Compare what `resume` answers: the same bits, the same data, each sample once an epoch."""
    assert len(found["straight"]) == STEPS and found["resumed"] == found["straight"], "losses, norms or rates"
    weights, again = found["straight weights"] or {}, found["resumed weights"] or {}  # of rank 0 alone
    assert weights.keys() == again.keys()
    assert all(torch.equal(again[key], value) for key, value in weights.items()), "weights"
    before = UNIT + TRIED_SAMPLES  # the model is captured with those, and the collator tried on the others
    seen, after = found["straight seen"][before:], found["resumed seen"][before:]
    epoch = found["epoch"]
    epochs = [seen[at : at + epoch] for at in range(0, len(seen), epoch)]
    assert epoch <= len(after) <= epoch + UNIT and after == seen[len(seen) - len(after) :], "the data"
    assert len(epochs) == 3 and all(len(set(numbers)) == len(numbers) for numbers in epochs)
    assert found["resumed kept"] == ["checkpoint-6"] and found["kept"] == [f"checkpoint-{STEPS}"]


def _stop_at(step: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        """Ends training after a step, as a job's time limit does."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step >= step
            return control

    return Stop()


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of right next tokens, of predictions padded with -100."""
    found = np.argmax(prediction.predictions[:, :-1], axis=-1)
    labels = prediction.label_ids[:, 1:]
    return {"accuracy": float((found == labels).mean()), "sum": float(np.abs(prediction.predictions).sum())}


def evaluating(trainer_class: Any, directory: str, *, ranks: int, **given: Any) -> dict[str, Any]:
    """Train with evaluations, keep the best model, and predict."""
    args = arguments(
        directory,
        total=UNIT * ACCUMULATION * 2,
        ranks=ranks,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=5,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        save_total_limit=2,
    )
    trainer = trainer_class(
        build("gpt2", layers=1)[0],
        args,
        train_dataset=data_of("gpt2", 32),
        eval_dataset=data_of("gpt2", 13),
        data_collator=stack,
        compute_metrics=accuracy,
        **given,
    )
    before = trainer.evaluate()
    trainer.train()
    found = trainer.predict(data_of("gpt2", 7))
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    keys = ("eval_loss", "eval_accuracy", "eval_sum", "epoch")
    answer = {
        "before": [before[key] for key in keys[:3]],
        "during": [[row[key] for key in keys] for row in rows[1:]],
        "predictions": found.predictions,
        "metrics": [found.metrics[f"test_{key}"] for key in ("loss", "accuracy")],
        "best": os.path.basename(trainer.state.best_model_checkpoint),
        "flos": trainer.state.total_flos,
        "losses": logged(trainer),
    }
    trainer.save_model(directory + "/final")
    if getattr(trainer, "engine", None) is not None:
        trainer.engine.destroy()
    return answer


def train_as_documented(saved: str, directory: str, zeros: list[int]) -> list[Any]:
    """Train with the configuration in the arguments, and a model loaded behind them; return what was logged."""
    from transformers import GPT2LMHeadModel

    total = UNIT * ACCUMULATION * dist.get_world_size()
    answers = []
    for zero in zeros:
        block = {"comm_timeout_s": 60, **({"data_parallel": 2, "stages": 1} if zero == 3 else {"stages": 2})}
        config: dict[str, Any] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "auto",
            "graph_pipeline": block,
        }
        if zero:
            config["zero_optimization"] = {"stage": zero}
        args = arguments(directory, total=total, ranks=dist.get_world_size(), deepspeed=config)
        trainer = GraphPipelineTrainer(
            GPT2LMHeadModel.from_pretrained(saved),
            args,
            train_dataset=data_of("gpt2", 24),
            data_collator=stack,
        )
        trainer.train()
        answers.append((trainer.engine.zero_optimization_stage(), logged(trainer)))
        trainer.engine.destroy()
    return answers


class Augmented(Dataset[dict[str, Tensor]]):
    """Samples with noise of three generators, each of which is noted in ``seen``."""

    def __init__(self, count: int) -> None:
        self.rows = Rows("two_branch", count)
        self.seen: list[float] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        noise = torch.randn(8) * 0.1 + random.random() + float(np.random.rand())
        self.seen.append(float(noise.sum()))
        return {**row, "x": row["x"] + noise}


class AugmentedStream(IterableDataset[dict[str, Any]]):
    """The same, one after the other."""

    def __init__(self, rows: Augmented) -> None:
        self.rows = rows
        self.seen = rows.seen

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.rows[index] for index in range(len(self.rows)))


def augmenting(
    trainer_class: Any,
    directory: str,
    *,
    ranks: int,
    dropout: float,
    streams: bool = False,
    resumes: bool = False,
    **given: Any,
) -> dict[str, Any]:
    """Train on data that draw, evaluate on such data between two steps of an epoch; return all that was drawn.

    An epoch has four steps.
    """
    total = UNIT * ACCUMULATION * 2
    more = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "max_steps": 7,
    }
    rows, held_out = Augmented(4 * total), Augmented(7)
    trainer = trainer_class(
        build("two_branch", dropout=dropout)[0],
        arguments(directory, total=total, ranks=ranks, **more),
        train_dataset=AugmentedStream(rows) if streams else rows,
        eval_dataset=held_out,
        data_collator=stack,
        **given,
    )
    trainer.train(resume_from_checkpoint=directory + "/checkpoint-3" if resumes else None)
    answer = {
        "seen": rows.seen,
        "held out": held_out.seen,
        "losses": logged(trainer),
        "evaluated": [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row],
    }
    if getattr(trainer, "engine", None) is not None:
        trainer.engine.destroy()
    return answer


class OwnGenerator(Rows):
    """Samples with noise of a generator of the dataset's own, as of albumentations."""

    def __init__(self, count: int, seed: int | None) -> None:
        super().__init__("two_branch", count)
        self.generator = np.random.default_rng(seed)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return {**row, "x": row["x"] + torch.as_tensor(self.generator.normal(size=8)).float()}


def own_generators_on_ranks(directory: str, seeds: list[int | None]) -> list[str]:
    """Return for each seed of a dataset's generator what refused the dataset."""
    told = []
    for seed in seeds:
        try:
            GraphPipelineTrainer(
                build("two_branch")[0],
                arguments(directory, total=8, ranks=dist.get_world_size(), max_steps=1),
                train_dataset=OwnGenerator(24, seed),
                data_collator=stack,
            )
        except ConfigError as error:
            told.append(str(error))
        else:
            told.append("")
    return told


def augment_on_ranks(directory: str, config: dict[str, Any], streams: bool) -> dict[str, Any]:
    """Return what `augmenting` answers without dropout, with it, and resumed."""
    given = {"ranks": dist.get_world_size(), "config": config, "streams": streams}
    answers = {
        str(dropout): augmenting(GraphPipelineTrainer, f"{directory}/{dropout}", dropout=dropout, **given)
        for dropout in (0.0, 0.3)
    }
    dist.barrier()
    answers["resumed"] = augmenting(
        GraphPipelineTrainer, f"{directory}/0.3", dropout=0.3, resumes=True, **given
    )
    return answers


def evaluate_on_ranks(directory: str, config: dict[str, Any]) -> dict[str, Any]:
    return evaluating(GraphPipelineTrainer, directory, ranks=dist.get_world_size(), config=config)
