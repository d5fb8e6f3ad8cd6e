"""The DeepSpeed configuration that HuggingFace's `TrainingArguments` mean, for a graph of stages.

What a configuration says counts; what it leaves open, or has as ``"auto"``, comes from the arguments, as in Trainer's
own use of DeepSpeed. Where both say something, and not the same, that is an error, which lists all of it.

Source: transformers, integrations/deepspeed.py (release 5.23)
Tests: tests/integrations/test_trainer.py
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import Adafactor

from gpp_plugin.config.block import BLOCK
from gpp_plugin.config.reader import read_config
from gpp_plugin.errors import ConfigError

AUTO = "auto"
_BY_ELEMENT = (
    torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adadelta,
)  # fmt: skip
"""Optimizers that ZeRO may step in flat parts, each element by itself, though DeepSpeed's list is without them."""


def engine_config(
    given: Mapping[str, Any],
    args: Any,
    *,
    mini_batch: int,
    units: int | None,
    counts_tokens: bool,
    max_steps: int,
) -> dict[str, Any]:
    """Return a whole configuration for `deepspeed.initialize`.

    Args:
        given: the user's; with or without a ``graph_pipeline`` block.
        args: the `TrainingArguments`.
        mini_batch: samples of an optimizer step.
        units: loss units of it, where they have shapes of their own.
        max_steps: optimizer steps in all: what an ``auto`` of the schedule comes from; 0 where nothing is trained.
        counts_tokens: losses are means over the labelled tokens of the mini-batch, unless the block says otherwise.

    Raises:
        ConfigError: configuration and arguments contradict each other.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(per_device_train_batch_size=2, max_grad_norm=1.0, bf16=False, fp16=False)
    >>> told = {"mini_batch": 8, "units": None, "counts_tokens": False, "max_steps": 10}
    >>> config = engine_config({"train_batch_size": "auto"}, args, **told)
    >>> config["train_batch_size"], config["gradient_clipping"], config["graph_pipeline"]
    (8, 1.0, {})
    """
    config = copy.deepcopy(dict(given))
    if not (config.get(BLOCK) or {}).get("enabled", True):
        raise ConfigError(f"{BLOCK}.enabled is false: use transformers.Trainer, or enable the block")
    unit = args.per_device_train_batch_size
    wrong: list[str] = []
    _settle(wrong, config, "train_micro_batch_size_per_gpu", unit, "per_device_train_batch_size")
    _settle(
        wrong,
        config,
        "train_batch_size",
        mini_batch,
        "per_device_train_batch_size x gradient_accumulation_steps x ranks",
    )
    if config.get("gradient_accumulation_steps", AUTO) != AUTO:
        _settle(
            wrong,
            config,
            "gradient_accumulation_steps",
            args.gradient_accumulation_steps,
            "gradient_accumulation_steps",
        )
    config.pop(
        "gradient_accumulation_steps", None
    )  # of an engine it means the losses of a step, on all ranks
    _settle(wrong, config, "gradient_clipping", float(args.max_grad_norm), "max_grad_norm")
    for key in ("bf16", "fp16"):
        asked = bool(getattr(args, key))
        block = config.get(key)
        if block is None and asked:
            config[key] = {"enabled": True}
        elif isinstance(block, dict):
            _settle(wrong, block, "enabled", asked, key, where=f"{key}.")
    _settle_optimizer(wrong, config, args, max_steps)
    if wrong:
        raise ConfigError("\n".join([*wrong, 'set these keys to "auto", or make them equal']))
    block = dict(config.get(BLOCK) or {})
    _settle_units(block, units)
    if counts_tokens:
        block.setdefault("loss_mean", "tokens")
    own = _without_auto({key: value for key, value in config.items() if key != BLOCK})
    return {**own, BLOCK: block}  # in the block "auto" is a value like others


def check_known_ranks(args: Any) -> None:
    """Refuse arguments that know one process of a job of several: all of them would save.

    Raises:
        ConfigError: says both numbers.
    """
    known = max(int(args.world_size), 1)  # of accelerate, which is asked first: it joins the ranks
    ranks = dist.get_world_size() if dist.is_initialized() else known
    if known != ranks:
        raise ConfigError(
            f"TrainingArguments: know {known} process where the job has {ranks} ranks, as accelerate found no GPU; "
            "pass use_cpu=True"
        )


def settle_zero(optimizer: Any, config: dict[str, Any]) -> None:
    """Allow what steps ZeRO's flat parts as whole parameters; refuse what would step something else in them.

    Raises:
        ConfigError: names both keys.
    """
    if type(optimizer) in _BY_ELEMENT:
        config.setdefault("zero_allow_untested_optimizer", True)
    zero = (config.get("zero_optimization") or {}).get("stage", 0)
    if zero and isinstance(optimizer, Adafactor) and not config.get("zero_allow_untested_optimizer"):
        raise ConfigError(
            f"TrainingArguments.optim: Adafactor has factors of whole matrices, and zero_optimization.stage {zero} "
            "steps flat parts of them; set the stage to 0, or choose another optim, e.g. 'adamw_torch'"
        )


def _settle_optimizer(wrong: list[str], config: dict[str, Any], args: Any, max_steps: int) -> None:
    """Fill in what an ``optimizer`` and a ``scheduler`` block leave to the arguments, and compare the rest of it."""
    # What a block does not name is DeepSpeed's default, as in Trainer; what it names is compared.
    if isinstance(config.get("optimizer"), dict):
        told = {
            "lr": (args.learning_rate, "learning_rate"),
            "betas": ([args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2"),
            "eps": (args.adam_epsilon, "adam_epsilon"),
            "weight_decay": (args.weight_decay, "weight_decay"),
        }
        _settle_params(wrong, config, "optimizer", told)
    if isinstance(config.get("scheduler"), dict):
        params = config["scheduler"].setdefault("params", {})
        if params.get("warmup_min_lr") == AUTO:
            params["warmup_min_lr"] = 0
        steps = {
            # DeepSpeed refuses a warm-up of 0 steps, which Trainer therefore makes 1
            "warmup_num_steps": (max(1, args.get_warmup_steps(max(max_steps, 1))), "warmup_steps"),
            "total_num_steps": (max(max_steps, 1), "max_steps, or epochs x steps"),
        }
        if not max_steps:  # no schedule is stepped, and nobody knows how many steps there would be
            params.update({key: value for key, (value, _) in steps.items() if key in params})
        _settle_params(
            wrong, config, "scheduler", {"warmup_max_lr": (args.learning_rate, "learning_rate"), **steps}
        )


def _settle_params(
    wrong: list[str], config: dict[str, Any], block: str, told: Mapping[str, tuple[Any, str]]
) -> None:
    params = config[block].setdefault("params", {})
    for key, (value, name) in told.items():
        if key in params:
            _settle(wrong, params, key, value, name, where=f"{block}.params.")


def _settle_units(block: dict[str, Any], units: int | None) -> None:
    if units is None or (block.get("units", units) is None):
        return
    if block.get("units", units) != units:
        raise ConfigError(
            f"{BLOCK}.units: {block['units']}, and an optimizer step has {units} batches (gradient_accumulation_steps "
            "x ranks); remove the key"
        )
    block["units"] = units


def why_no_units(config: Mapping[str, Any]) -> str:
    """Return what refuses the ``units`` of a configuration that is well without them; empty where nothing does."""
    block = config[BLOCK]
    try:
        read_config(config)
    except ConfigError as error:
        try:
            read_config({**config, BLOCK: {key: value for key, value in block.items() if key != "units"}})
        except ConfigError:
            return ""  # it is wrong in another way, which the engine says
        return str(error)
    return ""


def _settle(
    wrong: list[str], config: dict[str, Any], key: str, value: Any, name: str, *, where: str = ""
) -> None:
    """Set a key that is missing or ``auto``; note one that says something else than the arguments.

    Args:
        wrong: gets a line with both values.
    """
    found = config.get(key, AUTO)
    if found == AUTO:
        config[key] = value
    elif (list(found) if isinstance(found, tuple) else found) != value:
        wrong.append(
            f"{where}{key}: {found!r} in the DeepSpeed configuration, and TrainingArguments say {value!r} ({name})"
        )


def _without_auto(value: Any) -> Any:
    """Return a configuration without what is left ``auto``: DeepSpeed's own defaults count."""
    if isinstance(value, dict):
        return {key: _without_auto(item) for key, item in value.items() if item != AUTO}
    return value
