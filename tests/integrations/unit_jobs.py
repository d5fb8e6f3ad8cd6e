"""What each rank runs in the tests of token means and of mini-batches of unlike units."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.integrations.engine_jobs import (
    config_of,
    logged,
    make_engine,
    part_of,
    shards_of,
    steps_and_gradients,
)
from tests.models import build
from tests.reference import ReferenceRun, gradient_errors, train_reference

UNLABELLED = -100

# ---- one process --------------------------------------------------------------------------------------------


def trainer_count(model: nn.Module, units: Sequence[dict[str, Any]]) -> Tensor:
    """Return `num_items_in_batch` as HuggingFace's Trainer counts it for these batches of one step."""
    from transformers import Trainer
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    # as Trainer.__init__ has it, which itself needs accelerate
    is_causal = LOSS_MAPPING.get(model.loss_type) is ForCausalLMLoss
    trainer = SimpleNamespace(
        model_accepts_loss_kwargs=True,
        _loss_shifts_labels=is_causal and not getattr(model.config, "is_encoder_decoder", False),
        args=SimpleNamespace(average_tokens_across_devices=False, n_gpu=0),
        get_tp_size=lambda: 1,
        get_cp_size=lambda: 1,
        get_sp_size=lambda: 1,
    )
    return Trainer._get_num_items_in_batch(trainer, units, torch.device("cpu"))


def one_process(
    model: nn.Module, steps: Sequence[Sequence[dict[str, Any]]], *, loss_mean: str
) -> ReferenceRun:
    """Train a copy on a list of units a step."""
    if loss_mean == "units":
        return train_reference(model, steps)
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    run = ReferenceRun(losses=[], gradients={}, model=model)
    for units in steps:
        optimizer.zero_grad()
        losses = token_losses(model, units)
        sum(losses).backward()
        run.losses.append(float(sum(losses).detach()))
        run.gradients = run.gradients or {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
    return run


def token_losses(model: nn.Module, units: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Return what each unit adds to the loss of a step, which is the mean over its labelled tokens."""
    count = trainer_count(model, units)
    return [model(**unit, num_items_in_batch=count).loss for unit in units]


# ---- token means --------------------------------------------------------------------------------------------


def unlike_labels(batch: dict[str, Any], unit: int) -> dict[str, Any]:
    """Take away labels, more of them the later the unit, so that means of units and of tokens differ."""
    labels = batch["labels"].clone()
    for row in range(len(labels)):
        labels[row, -1 - row // unit - row % 3 :] = UNLABELLED
    return {**batch, "labels": labels}


def collate_padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad as users' collators do."""
    fill = {"labels": UNLABELLED}
    return {
        key: pad_sequence([i[key] for i in items], batch_first=True, padding_value=fill.get(key, 0))
        for key in items[0]
    }


def token_mean(name: str, zero: int, loader: str, block: dict[str, Any]) -> dict[str, Any]:
    """Train three steps with the mean over tokens, and evaluate; compare with one process."""
    torch.manual_seed(0)
    model, make_batch = build(name, layers=1)
    plain = copy.deepcopy(model)
    batches = [unlike_labels(make_batch(8, seed), 2) for seed in range(3)]
    config = config_of(block={"loss_mean": "tokens", **block}, zero_optimization={"stage": zero})
    given: dict[str, Any] = {}
    if loader != "iterator":
        given["training_data"] = [{k: v[i] for k, v in b.items()} for b in batches for i in range(8)]
        given["collate_fn"] = collate_padded if loader == "collated" else None
    engine = make_engine(model, unlike_labels(make_batch(8, 9), 2), config, **given)
    if given:
        batches = list(engine.training_dataloader)
        engine.training_dataloader.generator.manual_seed(0)  # from the beginning, as the engine reads it
    wanted = [[{k: v[i : i + 2] for k, v in b.items()} for i in range(0, 8, 2)] for b in batches]
    losses, gradients = own_steps(engine) if given else steps_and_gradients(engine, batches)
    evaluated = float(engine.eval_batch(iter([batches[0]])))
    reference = one_process(plain, wanted, loss_mean="tokens")
    with torch.no_grad():
        whole = float(sum(token_losses(reference.model.eval(), wanted[0])))
    return {
        "losses": losses,
        "wanted": reference.losses,
        "by_units": one_process(plain, wanted[:1], loss_mean="units").losses[0],
        "errors": gradient_errors(gradients, reference.gradients),
        "evaluated": evaluated,
        "wanted_evaluated": whole,
    }


def own_steps(engine: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train three steps on what the engine loads; return the losses and the first step's gradients."""
    engine.retain_gradients()
    losses = [float(engine.train_batch())]
    gradients = dict(engine.gradients)
    return losses + [float(engine.train_batch()) for _ in range(2)], gradients


def train_counts(
    counts: Sequence[Sequence[int]], block: dict[str, Any], name: str = "gpt2", shorter: Sequence[int] = ()
) -> dict[str, Any]:
    """Train on a mini-batch for each list of numbers of samples, of other lengths each; compare with one process.

    Args:
        shorter: tokens that each unit of a mini-batch lacks beside; none by default.
    """
    torch.manual_seed(0)
    model, make_batch = build(name, layers=1)
    plain = copy.deepcopy(model)
    config = config_of(block={"units": len(counts[0]), **block}, train_batch_size="auto")
    engine = make_engine(model, make_batch(4, 9), config)
    steps = [
        [
            {key: value[:, : value.shape[1] - step - less].contiguous() for key, value in make_batch(n, 7 * step + n).items()}
            for n, less in zip(of_step, shorter or [0] * len(of_step), strict=True)
        ]
        for step, of_step in enumerate(counts)
    ]  # fmt: skip
    engine.retain_gradients()
    with (
        mock.patch.object(torch.export, "export", wraps=torch.export.export) as export,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", "Raw SymInt")  # a graph that has torch's symbols among its arguments
        losses = [float(engine.train_batch(iter(steps[0])))]
        gradients, after_first = dict(engine.gradients), export.call_count
        losses += [float(engine.train_batch(iter(units))) for units in steps[1:]]
    reference, shards = train_reference(plain, steps), shards_of(engine)
    own = {name: part_of(reference.gradients[name], shards.get(name)) for name in gradients}
    return {
        "losses": losses,
        "wanted": reference.losses,
        "errors": gradient_errors(gradients, own),
        "exports": (after_first, export.call_count - after_first),
    }


def lines(count: int) -> list[dict[str, Tensor]]:
    """Return texts of unlike lengths, without masks: a stage in the middle reads nothing."""
    _, make_batch = build("gpt2")
    rows = [row[: 3 + (5 * i) % 6] for i, row in enumerate(make_batch(count, 5)["input_ids"])]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in rows]


class Branching(nn.Module):
    """Its structure depends on the length of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        if x.shape[1] == 7:
            hidden = torch.tanh(hidden)
        return {"loss": self.second(hidden).square().mean()}


# ---- samples in one row -------------------------------------------------------------------------------------


def train_flattened(name: str, block: dict[str, Any]) -> dict[str, Any]:
    """Train on rows of several samples that the engine's loader makes; compare with samples one by one."""
    import deepspeed

    from gpp_plugin.data import flatten, pack

    torch.manual_seed(0)
    model = build(name)[0]
    plain = copy.deepcopy(model)
    plain.config.use_cache = False
    data = lines(24)

    def packing() -> Any:
        return pack(data, cost="input_ids", budget=20, units=2, seed=1, is_padded=False)

    config = config_of(block={"loss_mean": "tokens", "verify": True, **block})
    del config["train_batch_size"], config["train_micro_batch_size_per_gpu"]
    with logged("gpp_plugin") as records:
        engine = deepspeed.initialize(
            model=model, config=config, training_data=packing(), collate_fn=flatten
        )[0]
        losses, gradients = own_steps(engine)
    units = packing().epoch_units(0)[:6]
    steps = [[data[i] for unit in units[first : first + 2] for i in unit] for first in (0, 2, 4)]
    single = [[_alone(item) for item in step] for step in steps]
    reference = one_process(plain, single, loss_mean="tokens")
    return {
        "losses": losses,
        "wanted": reference.losses,
        "errors": gradient_errors(gradients, reference.gradients),
        "rows": sum(len(unit) for unit in units) / len(units),
        "log": " ".join(record.getMessage() for record in records)
        if torch.distributed.get_rank() == 0
        else "verified",
    }


def _alone(item: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a sample as a batch; its first label, which no position predicts, is counted for GPT-2 unless it is none."""
    batch = {key: value[None].clone() for key, value in item.items()}
    batch["labels"][:, 0] = UNLABELLED
    return batch
