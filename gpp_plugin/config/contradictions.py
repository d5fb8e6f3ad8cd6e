"""Keys of the ``graph_pipeline`` block that do not go together, each refused with what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpp_plugin.config.block import BLOCK, GraphPipelineConfig, LengthsConfig
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.typed_leaves import show
from gpp_plugin.plugins import (
    SCHEDULES,
    find_schedule,
)


def check_contradictions(config: GraphPipelineConfig) -> GraphPipelineConfig:
    """Return the block with what follows from its keys, once none of them contradicts another.

    Raises:
        ConfigError: two do; says which, and what to write.
    """
    _check_mode(config)
    _check_sharing(config)
    if config.locate_nan and config.backends != "off":
        raise ConfigError(
            f"{BLOCK}.locate_nan: true looks at what every operator returns, and backends {show(config.backends)} run "
            'them out of sight; set backends to "off" while you look'
        )
    if config.compile is not False:
        config = _with_compile(config)
    if config.lengths is not None:
        _check_lengths(config.lengths)
    if config.units is not None:
        _check_units(config)
        config = config.model_copy(update={"slicing": "off"})  # a half of a unit is cut
    return config


def _with_compile(config: GraphPipelineConfig) -> GraphPipelineConfig:
    """Return the configuration of a job with compiled stages, which run whole forwards and backwards alone.

    Raises:
        ConfigError: it asks for what looks into a stage's code or cuts its tasks.
    """
    memory = config.memory
    splits = config.schedule in SCHEDULES and find_schedule(config.schedule).splits_backward
    refused = {
        "memory.recompute": (
            "full",
            memory.recompute == "full",
            "what is compiled is not run again in parts",
        ),
        "schedule": (config.schedule, splits, "a compiled backward is not made in two parts"),
        "slicing": (
            config.slicing,
            config.slicing not in ("auto", "off"),
            "halves would be compiled beside the whole",
        ),
        "mode": ("async", config.mode == "async", "its weights change between a forward and its backward"),
        "lengths": ("given", config.lengths is not None, "what is compiled is for one length"),
        "units": (config.units, config.units is not None, "each shape of a unit would be compiled"),
        "locate_nan": (True, config.locate_nan, "operators of compiled code are out of sight"),
        "tensor_parallel": (
            config.tensor_parallel,
            _asks_for_tensor_ranks(config.tensor_parallel),
            "what tensor ranks share out is not compiled",
        ),
        "granularity": ("node", config.granularity == "node", "compiling single operators gains nothing"),
    }
    for key, (value, is_wrong, reason) in refused.items():
        if is_wrong:
            raise ConfigError(
                f"{BLOCK}.compile: {show(config.compile)} does not go with {key} {show(value)}: {reason}; remove "
                "one of them"
            )
    alone = memory.model_copy(update={"recompute": "off", "swap": "off"})
    return config.model_copy(update={"memory": alone, "slicing": "off"})


def _asks_for_tensor_ranks(asked: str | int | Mapping[str, int]) -> bool:
    sizes = asked.values() if isinstance(asked, Mapping) else (asked,)
    return any(size != 1 for size in sizes)


def _check_lengths(lengths: LengthsConfig) -> None:
    """Refuse typical lengths that are longer than the longest, or of other keys."""
    for position, typical in enumerate(lengths.typical):
        path = f"{BLOCK}.lengths.typical[{position}]"
        if isinstance(typical, int) and isinstance(lengths.max, int):
            longer = typical > lengths.max
        elif (
            isinstance(typical, dict)
            and isinstance(lengths.max, dict)
            and typical.keys() == lengths.max.keys()
        ):
            longer = any(size > lengths.max[key] for key, size in typical.items())
        else:
            raise ConfigError(
                f"{path}: {show(typical)} is not of the form of {BLOCK}.lengths.max, {show(lengths.max)}; give "
                "numbers, or objects with the same keys"
            )
        if longer:
            raise ConfigError(
                f"{path}: {show(typical)} is longer than {BLOCK}.lengths.max, {show(lengths.max)}; raise max"
            )


def _check_sharing(config: GraphPipelineConfig) -> None:
    """Refuse ranks of several stages where they cannot run."""
    for key, value, default in (
        ("virtual_stages", config.virtual_stages, 1),
        ("colocate", config.colocate, "off"),
    ):
        if value == default:
            continue
        if config.mode != "sync":
            raise ConfigError(
                f"{BLOCK}.{key}: {show(value)} puts several stages on a rank by the times of mini-batches that end, "
                f'and mode {show(config.mode)} has none; set {key} to {show(default)}, mode to "sync", or say in '
                "plan.stages which ranks each stage has"
            )
        if config.p2p != "native":
            raise ConfigError(
                f"{BLOCK}.{key}: {show(value)} lets a rank hold several stages, which p2p {show(config.p2p)} cannot "
                f'run; set {key} to {show(default)}, or p2p to "native"'
            )


def _check_units(config: GraphPipelineConfig) -> None:
    """Refuse keys that contradict ``units``: nothing is cut below a unit, and each step is of whole ones."""
    wrong = {
        "micro_batch_sizes": (config.micro_batch_sizes, "auto"),
        "slicing": (config.slicing, "auto", "off"),
        "mode": (config.mode, "sync"),
        "p2p": (config.p2p, "native"),
    }
    _check_allowed(wrong, f"with {BLOCK}.units, of which every rank runs one whole unit at a time")


def _check_mode(config: GraphPipelineConfig) -> None:
    """Refuse keys that contradict ``mode``."""
    if config.mode == "sync":
        if config.vertical_sync:
            raise ConfigError(
                f"{BLOCK}.vertical_sync: true has no meaning in mode sync, where all stages step at once; set mode to "
                '"async" or remove it'
            )
        return
    if config.look_ahead == 1:
        raise ConfigError(
            f"{BLOCK}.look_ahead: 1 is not possible in mode async, whose pipeline never drains; set mode to "
            '"sync" or remove it'
        )
    if config.loss_mean == "tokens":
        raise ConfigError(
            f'{BLOCK}.loss_mean: "tokens" is a mean over the mini-batch, and in mode async each micro-batch is a step; '
            'set loss_mean to "units", or mode to "sync"'
        )
    sizes = config.micro_batch_sizes
    wrong = {
        "schedule": (config.schedule, "auto", "1f1b"),
        "slicing": (config.slicing, "auto", "off"),
    }
    _check_allowed(wrong, "in mode async, which runs 1F1B of whole micro-batches")
    if sizes != "auto" and not isinstance(sizes, int):
        raise ConfigError(
            f"{BLOCK}.micro_batch_sizes: {show(sizes)} is not possible in mode async, where each micro-batch is one "
            'optimizer step of every stage; give one number, or "auto" for train_micro_batch_size_per_gpu'
        )


def _check_allowed(wrong: Mapping[str, tuple[Any, ...]], why: str) -> None:
    """Refuse the first key whose value is none of those allowed.

    Args:
        wrong: key -> its value, and then what it may be.
    """
    for key, (value, *allowed) in wrong.items():
        if value not in allowed:
            raise ConfigError(
                f"{BLOCK}.{key}: {show(value)} is not possible {why}; give {' or '.join(map(show, allowed))}"
            )
