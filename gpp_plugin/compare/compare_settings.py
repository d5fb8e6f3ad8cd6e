"""What `gpp compare` runs: model, DeepSpeed configuration, modes, how long."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpp_plugin.config.key_names import place_of
from gpp_plugin.config.reader import batch_arithmetic, check_ranks, read_config
from gpp_plugin.errors import ConfigError, nearest

PLAIN, SINGLE, STOCK, CHAIN, GRAPH = "plain", "single", "stock", "chain", "graph"
MODES = (PLAIN, SINGLE, STOCK, CHAIN, GRAPH)
"""Plain data parallelism, the whole model on every rank; one process; DeepSpeed's `PipelineEngine` on the linearised
model; the best chain that our own planner finds, which is never trained, only simulated or emulated; the graph of
stages."""

_TEXT_LENGTH = 32
"""Tokens of a text, by default."""

_GRAPH_ONLY = (
    "plan schedule trace_path slicing virtual_stages colocate tensor_parallel sequence_parallel".split()
)
"""Keys of the block that say how the graph runs, and nothing of one stage or a chain."""
_OWN_STAGES = "planner stages data_parallel micro_batch_sizes".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """One comparison; every process of it reads the same values.

    Args:
        model: what the user named (`compare.compared_models.build_model`).
        sizes: dimensions of a library model.
        length: tokens of a text, where batches are made up; None: as many as is usual.
        ds_config: the DeepSpeed configuration with its ``graph_pipeline`` block.
        num_ranks: processes of a pipeline.
        warm_up, steps: rounds before, and rounds that count.
        seed: of weights and batches.
        timeout_s: for the whole comparison.
    """

    model: str
    ds_config: dict[str, Any]
    num_ranks: int
    modes: tuple[str, ...] = MODES
    sizes: dict[str, int | str] = field(default_factory=dict)
    length: int | None = None
    warm_up: int = 2
    steps: int = 10
    seed: int = 0
    timeout_s: float = 1800.0

    @property
    def text_length(self) -> int:
        """Return the tokens of a text of the batches that are made up."""
        return _TEXT_LENGTH if self.length is None else self.length

    def __post_init__(self) -> None:
        check_modes(self.modes)
        for name, value, least in (
            (place_of("num_devices"), self.num_ranks, 1),
            (place_of("steps"), self.steps, 1),
            (place_of("warm_up"), self.warm_up, 0),
            (place_of("lengths.typical"), self.text_length, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}: {value} is not valid; give at least {least}")
        texts = [f"{name}={value}" for name, value in self.sizes.items() if not isinstance(value, int)]
        if texts:
            raise ConfigError(f"--size: {texts[0]} is not valid; give a number, as in branches=2")
        _ = self.mini_batch, self.loss_unit  # refused here, before any process starts
        block = read_config(self.ds_config)
        if block is not None and self.modes != (SINGLE,):
            check_ranks(block, self.num_ranks)
        if block is not None and (block.loss_mean, block.units) != ("units", None):
            key = "loss_mean" if block.units is None else "units"
            raise ConfigError(
                f"{place_of(key)}: {getattr(block, key)!r} is not what one process and {STOCK} are compared with; "
                "remove it"
            )

    @property
    def mini_batch(self) -> int:
        """Return the samples of one step."""
        return batch_arithmetic(self.ds_config, self.num_ranks).mini_batch

    @property
    def loss_unit(self) -> int:
        """Return the samples of one loss."""
        return batch_arithmetic(self.ds_config, self.num_ranks).loss_unit

    def config_of(self, mode: str, profile_dir: str) -> dict[str, Any]:
        """Return the DeepSpeed configuration of a mode: the user's, with other stages for plain and stock.

        Args:
            profile_dir: where it keeps measured costs; each mode its own, so that each measures them itself.
        """
        config = copy.deepcopy(self.ds_config)
        block = dict(config.get("graph_pipeline") or {})
        if mode in (PLAIN, STOCK):
            # The rest of the block (micro-batch sizes, cluster, time limits) holds for a chain as well.
            block = {key: value for key, value in block.items() if key not in _GRAPH_ONLY}
        if mode == PLAIN:
            block = {key: value for key, value in block.items() if key not in _OWN_STAGES} | {"stages": 1}
        if mode == STOCK:
            block = {key: value for key, value in block.items() if key not in ("memory", "zero")}
            block["planner"] = "stock_1f1b"
            if isinstance(block.get("stages"), int) and block["stages"] > self.num_ranks:
                del block["stages"]  # it holds one stage a rank; as many as there are ranks, then
        config["graph_pipeline"] = {**block, "enabled": True, "profile_dir": profile_dir}
        return config

    def to_json(self) -> str:
        """Return the settings as text for another process."""
        return json.dumps(dataclasses.asdict(self))


def check_modes(modes: Sequence[str]) -> None:
    """Refuse modes that are none, or not once each.

    Raises:
        ConfigError: names those that there are.
    """
    unknown = sorted(set(modes) - set(MODES))
    if unknown or not modes or len(set(modes)) < len(modes):
        hint = nearest(unknown[0], MODES) if unknown else ""
        raise ConfigError(
            f"modes: {', '.join(modes) or 'none'}{hint}; give some of {', '.join(MODES)}, once each"
        )


def settings_from_json(text: str) -> CompareSettings:
    """Return what `CompareSettings.to_json` wrote."""
    plain: dict[str, Any] = json.loads(text)
    return CompareSettings(**{**plain, "modes": tuple(plain["modes"])})


def default_config(*, mini_batch: int, loss_unit: int, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a comparison whose user gives none."""
    return {
        "train_batch_size": mini_batch,
        "train_micro_batch_size_per_gpu": loss_unit,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "steps_per_print": 0,
        "graph_pipeline": dict(block),
    }
