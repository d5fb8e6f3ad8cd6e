"""What must be the same on all ranks, compared before the first step and after a load.

A rank with another learning rate, seed or checkpoint trains on: stages step with different rates, replicas of one stage
average what does not belong together, and nothing fails. So each rank brings facts, short texts by key; all of them
gather a digest, and where these differ the facts themselves, and every rank raises the same error:

    facts of rank 2     optimizer.params.lr: 0.002     torch: 2.13.0     weight wte.weight: float32 [50257, 768] 1f3a
    the error           optimizer.params.lr is 0.001 on ranks 0, 1, 3 and 0.002 on rank 2; ...

Weights are compared by a checksum of a sample of each tensor's bits: all of it up to `SAMPLE` elements, and above that
sixteen runs spread evenly over it. Another seed, checkpoint, training step, type or shape is always seen; a few
elements that differ in a large tensor may lie between the runs.

Source: this project
Tests: tests/integrations/test_agreement.py
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
import time
import zlib
from collections.abc import Mapping, Sequence, Sized
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.errors import ConfigError
from gpp_plugin.runtime.ranks.collectives import exchange
from gpp_plugin.runtime.ranks.job_board import mark_shared

logger = logging.getLogger(__name__)

SAMPLE = 65536
"""Elements of a tensor that its checksum is of."""

RUNS = 16
"""Runs of neighbours that make up the sample of a larger one."""

MOST_NAMED = 3
"""Keys that an error names; of more it says how many."""

WEIGHT = "weight "
"""How facts about weights begin; a rank need not have all of them."""
PACKAGES = ("gpp_plugin", "torch", "deepspeed", "transformers")

RANKS_OWN = (
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "comms_logger",
    "local_rank",
    "dump_state",
    "log_level",
    "graph_pipeline.trace_path",
    "graph_pipeline.profile_dir",
    "graph_pipeline.weights",
    "graph_pipeline.loader_workers",
)
"""Keys of a configuration that may name something of a rank's own host, and change nothing of what is trained."""


def agree(
    facts: Mapping[str, str], *, what: str, group: dist.ProcessGroup | None, is_partial: bool = False
) -> None:
    """Refuse ranks whose facts are not the same; collective over the group.

    Args:
        facts: of this rank, by key.
        what: what they are, for errors of the collective.
        is_partial: a rank need not have what others have.

    Raises:
        ConfigError: names keys, values and ranks; the same on every rank.
    """
    if group is None:
        return
    digest = hashlib.sha256(json.dumps(sorted(facts.items())).encode()).hexdigest()
    if not is_partial and len(set(exchange(lambda: digest, what=what, group=group))) == 1:
        return
    all_facts = exchange(lambda: dict(facts), what=what, group=group)
    if differences := describe_differences(all_facts, is_partial=is_partial):
        error = ConfigError(differences)
        mark_shared(error)
        raise error


def describe_differences(all_facts: Sequence[Mapping[str, str]], *, is_partial: bool = False) -> str:
    """Return one line about the keys that ranks do not agree on; empty where there are none.

    Args:
        all_facts: the facts of each rank.
        is_partial: a rank need not have what others have; of weights it never need.

    >>> describe_differences([{"a": "1"}, {"a": "2"}, {"a": "1"}])
    'the ranks do not have the same job: a is 1 on ranks 0, 2 and 2 on rank 1; give every rank the same'
    """
    keys = sorted({key for facts in all_facts for key in facts}, key=_by_rank_of_kind)
    lines = []
    for key in keys:
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(all_facts):
            if key in facts or not (is_partial or key.startswith(WEIGHT)):
                ranks.setdefault(facts.get(key, "not set"), []).append(rank)
        if len(ranks) > 1:
            values = [
                f"{value} on rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}"
                for value, of in ranks.items()
            ]
            lines.append(f"{key} is {' and '.join(values)}")
    if not lines:
        return ""
    more = f"; and {len(lines) - MOST_NAMED} more keys" if len(lines) > MOST_NAMED else ""
    return (
        f"the ranks do not have the same job: {'; '.join(lines[:MOST_NAMED])}{more}; give every rank the same"
        + (_ADVICE_WEIGHTS if any(line.startswith(WEIGHT) for line in lines) else "")
    )


_ADVICE_WEIGHTS = (
    " weights: seed all ranks alike (torch.manual_seed) before the model is built, "
    "or load one checkpoint on all"
)


def _by_rank_of_kind(key: str) -> tuple[bool, str]:
    """Sort tensors behind what explains them."""
    return key.startswith(WEIGHT), key


def fingerprint_of(value: Any) -> str:
    """Return a checksum of a value of `ir`, whose text says all there is to it."""
    # what was read from JSON has 0.0 where a sum of nothing has 0
    text = re.sub(r"(?<=[=( ])(-?\d+)\.0(?=[,)])", r"\1", repr(value))
    return f"{zlib.crc32(text.encode()):08x}"


# ---- facts -------------------------------------------------------------------------------------------------------


def config_facts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a configuration's values by their paths, but for what is a rank's own.

    >>> config_facts({"optimizer": {"params": {"lr": 0.1}}, "wandb": {"team": "a"}})
    {'optimizer.params.lr': '0.1'}
    """
    facts: dict[str, str] = {}

    def add(value: Any, path: str) -> None:
        if path in RANKS_OWN:
            return
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                add(inner, f"{path}.{key}" if path else str(key))
        else:
            facts[path] = _short(repr(value))

    add(config, "")
    return facts


def software_facts() -> dict[str, str]:
    """Return the releases that decide about what is computed, and torch's settings that do."""
    facts = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    facts["torch.get_default_dtype()"] = str(torch.get_default_dtype())
    facts["torch.get_float32_matmul_precision()"] = torch.get_float32_matmul_precision()
    return facts


def model_facts(model: nn.Module) -> dict[str, str]:
    """Return what identifies a model and its weights: its class, a checksum of each tensor.

    Not torch's seed: what it made is in the weights, and separate seeds of ranks for dropout are common.
    """
    evaluated = [name for name, module in model.named_modules() if not module.training]
    facts = {
        "model": type(model).__qualname__,
        "modules in eval mode": _short(", ".join(evaluated) or "none"),
    }
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if tensor.is_meta:  # never there, or released by an earlier engine, which has its own stages'
            continue
        frozen = "" if not isinstance(tensor, nn.Parameter) or tensor.requires_grad else " frozen"
        facts[f"{WEIGHT}{name}"] = describe_tensor(tensor) + frozen
    return facts


def describe_tensor(tensor: Tensor) -> str:
    """Return type, shape and a checksum of a tensor's bits; ``meta`` where it has none."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {list(tensor.shape)} {checksum(tensor)}"


@torch.no_grad()
def checksum(tensor: Tensor) -> str:
    """Return a checksum of a sample of a tensor's bits (module docstring)."""
    if tensor.is_meta:
        return "meta"
    if tensor.layout is not torch.strided:
        return "not dense"
    flat = tensor.detach().reshape(-1)
    if flat.numel() > SAMPLE:
        # the first run begins at the beginning, the last one ends at the end
        length, last = SAMPLE // RUNS, flat.numel() - SAMPLE // RUNS
        starts = [last * run // (RUNS - 1) for run in range(RUNS)]
        flat = torch.cat([flat[start : start + length] for start in starts])
    bits = flat.cpu().contiguous().view(torch.uint8)
    return f"{zlib.crc32(bits.numpy().tobytes()):08x}"


def recipe_facts(optimizer: Any, scheduler: Any, data: Any) -> dict[str, str]:
    """Return what was passed beside the configuration: optimizer with its groups' options, schedule, data."""
    facts = {"optimizer=": _named(optimizer), "lr_scheduler=": _named(scheduler)}
    if isinstance(optimizer, torch.optim.Optimizer):
        facts |= {
            f"optimizer={_named(optimizer)} {key}": repr(value) for key, value in optimizer.defaults.items()
        }
        for position, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            facts[f"param_groups[{position}]"] = _short(
                f"{sum(p.numel() for p in group['params'])} elements, {sorted(options.items())}"
            )
    length = f" of {len(data)} samples" if isinstance(data, Sized) else ""
    facts["training_data="] = _named(data) + length
    return facts


def _named(function: Any) -> str:
    """Return a function's name, or the name of an object's class; not its address."""
    if function is None:
        return "None"
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _short(text: str, most: int = 200) -> str:
    """Return a value as an error can show it; two long ones are distinguished by a checksum."""
    return text if len(text) <= most else f"{text[:most]}... ({zlib.crc32(text.encode()):08x})"


def agree_on_job(
    ds_config: Mapping[str, Any],
    block: Mapping[str, Any],
    *,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    data: Any,
    group: dist.ProcessGroup | None,
) -> None:
    """Refuse ranks that do not have the same job, before anything is captured; collective over the group.

    Args:
        block: the checked ``graph_pipeline`` block, with its defaults.
        model: its weights are compared if it is a module: of a graph of stages every rank builds its own.

    Raises:
        ConfigError: as of `agree`.
    """
    started = time.perf_counter()
    facts = {
        **software_facts(),
        **config_facts({**ds_config, "graph_pipeline": block}),
        **recipe_facts(optimizer, scheduler, data),
        **(model_facts(model) if isinstance(model, nn.Module) else {"model": type(model).__qualname__}),
    }
    agree(facts, what="a look at what each rank received", group=group)
    logger.debug("ranks agree on %d facts in %.1f ms", len(facts), (time.perf_counter() - started) * 1e3)
