"""The samples of a mini-batch and of a loss, as the configuration says or implies them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.config.key_names import name_of, place_of, setting_of
from gpp_plugin.config.reader import load_deepspeed_json, read_config
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.samples import nearest_divisors
from gpp_plugin.ir.typed_leaves import MOST_COUNT, show

_STEPS = "gradient_accumulation_steps"


class BatchSizes(NamedTuple):
    """What the configuration says about the mathematics of a step, in samples.

    Args:
        mini_batch: samples of one optimizer step over the whole graph (B).
        loss_unit: samples one loss is computed on (u); the step's loss is the mean over B/u of them.
        gradient_accumulation_steps: of the JSON; divides B/u.
    """

    mini_batch: int
    loss_unit: int
    gradient_accumulation_steps: int | None


def batch_arithmetic(ds_config: Mapping[str, Any] | str | Path, num_ranks: int) -> BatchSizes:
    """Return mini-batch, loss unit and accumulation steps as the configuration says or implies them.

    ``train_batch_size`` is B. ``train_micro_batch_size_per_gpu`` is the loss unit u; where it is missing,
    u is B / ``gradient_accumulation_steps``, or B where that is missing too. B may be left out only where
    the data-parallel degree is known (one rank, or ``graph_pipeline.data_parallel`` is there).

    Raises:
        ConfigError: a size is no positive whole number, does not divide, or contradicts
            ``graph_pipeline.micro_batch_sizes``.
    """
    # B = train_batch_size, u = train_micro_batch_size_per_gpu, s = gradient_accumulation_steps; a step's loss
    # is the mean of B / u losses of u samples each, on however many ranks (DeepSpeed's B = u * s * ranks is
    # not required, since stages may have different numbers of ranks).
    #
    #   the JSON          B    u    s        the JSON                             B    u
    #   B=64              64   64   -        B=64, loss: "full"                   64   64
    #   B=64 u=4          64   4    -        u=4 s=2, one rank                    8    4
    #   B=64 s=4          64   16   4        u=4 s=2, data_parallel=2             16   4
    #   B=64 u=4 s=3      refused: 3 does not divide the 16 losses
    plain = load_deepspeed_json(ds_config)
    config = read_config(plain) or GraphPipelineConfig()
    mini_batch = _size(plain, "train_batch_size", place_of("mini_batch"))
    unit = _size(plain, "train_micro_batch_size_per_gpu", place_of("loss_unit"))
    steps = _size(plain, _STEPS, _STEPS)
    if config.units is not None:
        return _units_arithmetic(config.units, mini_batch, unit, steps)
    if mini_batch is None:
        mini_batch = _implied_mini_batch(unit, steps, num_ranks, config)
    full_loss = isinstance(config.micro_batch_sizes, dict) and config.micro_batch_sizes.get("loss") == "full"
    if full_loss:
        _check_full_loss(mini_batch, unit, steps)
        unit = mini_batch
    if unit is None:
        if mini_batch % (steps or 1):
            raise ConfigError(
                f"{_STEPS}: {steps} does not divide {name_of('mini_batch')} {mini_batch}; "
                f"{_divisors_to_give(mini_batch, steps or 1)}"
            )
        unit = mini_batch // (steps or 1)
    check_sizes(config, mini_batch, unit)
    if steps is not None and (mini_batch // unit) % steps:
        raise ConfigError(
            f"{_STEPS}: {steps} does not divide the {mini_batch // unit} losses of a step "
            f"({name_of('mini_batch')} {mini_batch} / {name_of('loss_unit')} {unit}); remove it"
        )
    return BatchSizes(mini_batch, unit, steps)


def _units_arithmetic(units: int, mini_batch: int | None, unit: int | None, steps: int | None) -> BatchSizes:
    """Return the sizes of a mini-batch of ``units`` typical units."""
    # units=8 and u=4: B=32, which need not be there; units=8 and B=32: u=4
    if unit is None and mini_batch is None:
        raise ConfigError(
            f"{place_of('loss_unit')}: missing; give the samples of a typical one of the {units} "
            f"{name_of('units')}, which the plan is made for"
        )
    if unit is None and mini_batch is not None:
        unit = mini_batch // units
    assert unit is not None
    if mini_batch not in (None, units * unit) or not unit:
        raise ConfigError(
            f"{place_of('mini_batch')}: {mini_batch} is not {setting_of('units', units)} times "
            f"{name_of('loss_unit')}; remove it, since units may have any number of samples"
        )
    if steps is not None and units % steps:
        raise ConfigError(f"{_STEPS}: {steps} does not divide {setting_of('units', units)}; remove it")
    return BatchSizes(units * unit, unit, steps)


def _size(plain: Mapping[str, Any], key: str, place: str) -> int | None:
    value = plain.get(key)
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_COUNT:
        most = "" if not isinstance(value, int) or value < 1 else f", at most {MOST_COUNT}"
        raise ConfigError(
            f"{place}: {show(value)} is not valid; give a whole number of samples of at least 1{most}"
        )
    return value


def _implied_mini_batch(
    unit: int | None, steps: int | None, num_ranks: int, config: GraphPipelineConfig
) -> int:
    degree = 1 if num_ranks == 1 else config.data_parallel
    if unit is not None and isinstance(degree, int):
        return unit * (steps or 1) * degree
    raise ConfigError(
        f"{place_of('mini_batch')}: missing; give the samples of one optimizer step over the whole graph "
        "(stages may have different numbers of ranks, so it does not follow from the other sizes)"
    )


def _check_full_loss(mini_batch: int, unit: int | None, steps: int | None) -> None:
    path = f'{place_of("micro_batch_sizes", "loss")}: "full" computes one loss on all {mini_batch} samples'
    if unit is not None and unit != mini_batch:
        raise ConfigError(
            f"{path}, but {name_of('loss_unit')} makes losses of {unit} samples; "
            f"remove it or set it to {mini_batch}"
        )
    if steps is not None and steps != 1:
        raise ConfigError(f"{path}, but {_STEPS} makes {steps} losses a step; remove it")


def check_sizes(config: GraphPipelineConfig, mini_batch: int, unit: int) -> None:
    """Refuse loss units and micro-batches that leave a rest of the mini-batch.

    Raises:
        ConfigError: one line each, with sizes that divide it.
    """
    sizes = config.micro_batch_sizes
    named = sizes.items() if isinstance(sizes, dict) else [("", sizes)]
    wrong = {
        place_of("micro_batch_sizes", *([name] if name else [])): size
        for name, size in named
        if isinstance(size, int) and mini_batch % size
    }
    if mini_batch % unit:
        wrong = {place_of("loss_unit"): unit, **wrong}
    lines = [
        f"{place}: {size} does not divide {name_of('mini_batch')} {mini_batch}; "
        f"{_divisors_to_give(mini_batch, size)}"
        for place, size in wrong.items()
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def _divisors_to_give(number: int, wanted: int) -> str:
    return "give " + " or ".join(map(str, nearest_divisors(number, wanted)))
