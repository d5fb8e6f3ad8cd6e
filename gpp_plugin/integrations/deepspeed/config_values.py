"""The one reader of DeepSpeed's keys: its own classes read the user's configuration, and what they read is what trains.

    the user's ──► values and names ──► DeepSpeed's classes ──► the table ──► settled: no "auto", no old names, each
                   that no job means    refuse, or read it      refuses         value as DeepSpeed reads it

DeepSpeed's classes drop "auto", take old names, and turn texts into numbers: whoever read the text a second time might
read something else (``bool("auto")``). So all that follows reads the settled configuration. What they would let through
and trip over after minutes is refused before: a clipping of NaN, a learning rate that is a text. The batch arithmetic
is ours (`config.batch_sizes`), so their classes see one that always multiplies out.

Source: this project
Tests: tests/integrations/test_deepspeed_keys.py, tests/test_malformed.py
"""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from deepspeed.utils import logger as deepspeed_logger
from pydantic import BaseModel, ValidationError

from gpp_plugin.config.block import BLOCK
from gpp_plugin.config.deepspeed_keys import (
    FREE,
    KEYS,
    REFUSED_OPTIMIZERS,
    REPLACED_KEYS,
    VALUES,
    KeyVerdict,
    configured_keys,
    home_of,
    names_in,
)
from gpp_plugin.engine.framework import StepSettings
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.huggingface.model_inputs import guilty_key
from gpp_plugin.ir.typed_leaves import Range, WrongLeaf, nearest_key, reader_of, show

_AUTO = "auto"
_MODELS: Mapping[str, Callable[[DeepSpeedConfig], BaseModel | None]] = {
    "zero_optimization": lambda read: read.zero_config,
    "fp16": lambda read: read.float16_config,
    "bf16": lambda read: read.bfloat16_config,
    "comms_logger": lambda read: getattr(read.comms_config, "comms_logger", None),
    "tensorboard": lambda read: read.monitor_config.tensorboard,
    "wandb": lambda read: read.monitor_config.wandb,
    "csv_monitor": lambda read: read.monitor_config.csv_monitor,
    "comet": lambda read: read.monitor_config.comet,
    "compile": lambda read: read.compile_config,
    "tensor_parallel": lambda read: read.tensor_parallel_config,
    "hybrid_engine": lambda read: read.hybrid_engine,
    "weight_quantization": lambda read: read.weight_quantization_config,
}
"""Blocks that DeepSpeed reads with a pydantic model, which drops "auto" and has all keys; and that model."""
_KINDS = {"bool": bool, "str": str, "int": int, "float": float, "pair": float}


def _kind(name: str, low: float | None = None, high: float | None = None) -> Any:
    """Return what reads a value of the table."""
    kind: Any = _KINDS[name]
    if low is not None and high is not None:
        kind = Annotated[kind, Range(low=low, high=high)]
    return tuple[kind, kind] if name == "pair" else kind


_VALUES: dict[tuple[str, ...], Any] = {tuple(path.split(".")): _kind(*row) for path, row in VALUES.items()}
"""What a key's value must be where it receives."""
_PER_GROUP = frozenset({("scheduler", "params", "warmup_min_lr"), ("scheduler", "params", "warmup_max_lr")})
"""What may also be a list, a value for each parameter group."""

_LIKENESS = 0.84
"""Of a mistyped key to the one that was meant; others have no effect in DeepSpeed either, which a warning says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedReading:
    """A configuration as DeepSpeed's classes read it.

    Args:
        config: the user's, with the values that were read: no "auto" in blocks, no names of older releases.
        warnings: what has no effect here, and its user would have expected to have one; a line each.
        notes: what has none, and changes nothing.
    """

    config: dict[str, Any]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def read_deepspeed(config: Mapping[str, Any]) -> DeepSpeedReading:
    """Read a configuration as DeepSpeed does, and hold its keys against the table.

    Raises:
        ConfigError: what DeepSpeed refuses, what a graph of stages cannot do, and values and names that no job means;
            a line for each, with the key path, the value and what to write.
    """
    # {"bf16": {"enabled": "auto"}, "amp": {...}, "graph_pipeline": {...}}
    #   values    types and near misses of names, before DeepSpeed's classes word them
    #   settled   as DeepSpeed's classes read it: bf16 is off
    #   refused   what the table says no stage can do: amp
    own = {str(key): value for key, value in config.items() if key != BLOCK}
    check_values(own)
    others = {key: config[key] for key in (*REPLACED_KEYS, BLOCK) if key in config}
    settled = {**_settle({key: value for key, value in own.items() if key not in REPLACED_KEYS}), **others}
    _refuse(own, settled)
    warnings, notes = _without_effect(own)
    return DeepSpeedReading(config=settled, warnings=warnings, notes=notes)


def check_values(config: Mapping[str, Any]) -> None:
    """Refuse values that a key cannot have, and keys that are mistyped.

    Raises:
        ConfigError: one line for each, with the key path, the value and what to write.
    """
    lines: list[str] = []
    for path, value in _all_keys(config):
        block, _, name = path.rpartition(".")
        known = names_in(block)
        near = [] if name in known else difflib.get_close_matches(name[:100].lower(), known, 1, _LIKENESS)
        if near and (home := home_of(name)):
            lines.append(f"{path}: unknown key, and DeepSpeed would ignore it; write {home}")
        elif near:
            lines.append(f"{path}: unknown key, and DeepSpeed would ignore it; did you mean {near[0]!r}?")
        if names_in(path) and not isinstance(value, Mapping) and value is not None:
            if value is not False or path in {key[0] for key in _VALUES}:
                fix = (
                    f'; write {{"stage": {int(value)}}}'
                    if path == "zero_optimization" and value in (0, 1)
                    else ""
                )
                lines.append(f"{path}: expected an object, found {show(value)}{fix}")
    # a file of HuggingFace's has many, and needs one thing
    filled = ["gradient_clipping"] if config.get("gradient_clipping") == _AUTO else []
    for place, kind in _VALUES.items():
        line = _wrong(config, place, kind)
        if line is not None and ".".join(place) not in filled:
            lines.append(line)
    for block in ("optimizer", "scheduler"):
        raw = config.get(block) if isinstance(config.get(block), Mapping) else None
        lines += [
            f"{block}.{key}: no key of {block}; write it in {block}.params"
            for key in raw or {}
            if key not in names_in(block)
            and not difflib.get_close_matches(key, names_in(block), 1, _LIKENESS)
        ]
        if raw and raw.get("type") is None and not any(line.startswith(f"{block}.") for line in lines):
            lines.append(f"{block}.type: missing; name the class that {block}.params are of")
        params = (raw or {}).get("params")
        named = params.items() if isinstance(params, Mapping) else ()
        filled += [f"{block}.params.{key}" for key, value in named if value == _AUTO]
    if filled:
        lines.append(
            f'{", ".join(filled)}: "auto" is filled in by HuggingFace\'s Trainer alone; give a value, leave the key '
            "out, or train with gpp_plugin.GraphPipelineTrainer"
        )
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))


def _all_keys(config: Mapping[str, Any], block: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every key, also in blocks that are switched off."""
    for name, value in config.items():
        path = f"{block}.{name}" if block else str(name)
        yield path, value
        if isinstance(value, Mapping) and names_in(path) and path not in FREE:
            yield from _all_keys(value, path)


def _wrong(config: Mapping[str, Any], path: tuple[str, ...], kind: Any) -> str | None:
    value: Any = config
    for depth, key in enumerate(path):
        if not isinstance(value, Mapping):
            at = ".".join(path[:depth])
            # "auto" stands for values, not for a block of them
            return f"{at}: expected an object, found {show(value)}" if depth > 1 else None
        value = value.get(key)
        if value is None:
            return None
    if value == _AUTO and (path[0] in _MODELS or path[0] == "bfloat16" or "params" in path):
        return None
    if path in _PER_GROUP and isinstance(value, list):
        kind = tuple[kind, ...]
    try:
        reader_of(kind)(value)
    except WrongLeaf as error:
        return error.line(".".join(path))
    return None


# ---- as DeepSpeed reads it -------------------------------------------------------------------------------------


class _OneRank:
    """Stands for the number of ranks where DeepSpeed reads it, which is no matter of its own here."""

    def get_data_parallel_world_size(self) -> int:
        return 1


def _read(config: Mapping[str, Any]) -> DeepSpeedConfig:
    return DeepSpeedConfig({**copy.deepcopy(dict(config)), "train_batch_size": 1}, _OneRank())


def _settle(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with what DeepSpeed's classes make of it.

    Raises:
        ConfigError: they refuse it.
    """
    try:
        # of two true precisions DeepSpeed's assertion names no key
        if get_float16_config(dict(config)).enabled and get_bfloat16_config(dict(config)).enabled:
            raise ConfigError("fp16.enabled, bf16.enabled: both are true; choose one")
        read = _read(config)
    except ConfigError:
        raise
    except Exception as error:  # its own type, assertions, and what comes of values of another kind
        raise ConfigError(_why_refused(config, error)) from error
    settled = copy.deepcopy(dict(config))
    if "bfloat16" in settled:  # the older name, which the newer one overrides
        old = settled.pop("bfloat16")
        settled.setdefault("bf16", old)
    for name, model_of in _MODELS.items():
        model = model_of(read)
        if settled.get(name) is not None and model is not None:
            settled[name] = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return settled


def _why_refused(config: Mapping[str, Any], error: Exception) -> str:
    """Return the line for a configuration that DeepSpeed refuses: which key, its value and the reason."""
    with _quiet():
        guilty = guilty_key(dict(config), _read) or guilty_key(dict(config), _read_each(config))
    value: Any = config
    for key in guilty:
        value = value[key]
    path = ".".join(guilty)
    if value is None and path:
        return f"{path}: null is not valid; give its value, or leave the key out"
    if not isinstance(error, ValidationError):
        reason = " ".join(str(error).split()) or type(error).__name__
        where = f"{path}: {show(value)} is refused" if path else "the configuration is refused"
        return f"{where} by DeepSpeed {deepspeed.__version__}: {reason[:300]}"
    lines = []
    for item in error.errors(include_url=False):
        name = str(item["loc"][-1]) if item["loc"] else ""
        place = path if path.endswith(f".{name}") else ".".join([*guilty[:1], *map(str, item["loc"])])
        known = names_in(place.rpartition(".")[0])
        if item["type"] == "extra_forbidden":
            lines.append(f"{place}: unknown key (value {show(item['input'])}); {nearest_key(name, known)}")
        else:
            # of a whole block the input is an object of DeepSpeed's
            found = item["input"] if item["loc"] else value
            reason = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            lines.append(f"{place}: {show(found)} is not valid; {reason[:1].lower()}{reason[1:]}")
    return "\n".join(dict.fromkeys(lines))


def _read_each(config: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], None]:
    """Return what finds one of several wrong keys: it fails while the first that is wrong alone is there."""
    wrong = next((key for key in config if not _is_read({key: config[key]})), None)

    def read(others: Mapping[str, Any]) -> None:
        if wrong is not None and wrong in others:
            _read({wrong: others[wrong]})

    return read


def _is_read(config: Mapping[str, Any]) -> bool:
    try:
        _read(config)
    except Exception:
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    level = deepspeed_logger.level
    deepspeed_logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        deepspeed_logger.setLevel(level)


# ---- against the table -----------------------------------------------------------------------------------------


def _refuse(raw: Mapping[str, Any], settled: Mapping[str, Any]) -> None:
    """Refuse what the table refuses, and what its keys refuse together.

    Raises:
        ConfigError: a line a block.
    """
    lines: dict[str, str] = {}
    for path, value in (*configured_keys(raw), *configured_keys(settled)):
        key = KEYS.get(path)
        if key is None or key.verdict is not KeyVerdict.REFUSED or not key.is_requested(value):
            continue
        if isinstance(value, Mapping) and {"enabled", "device"} & set(names_in(path)):
            continue  # its switch says whether it requests anything
        block = path.partition(".")[0] if "." not in path else path.rpartition(".")[0]
        if not any(path.startswith(f"{other}.") for other in lines):
            lines.setdefault(block, f"{path}: {show(value)} is not supported: {key.note}")
    kind = (settled.get("optimizer") or {}).get("type")
    why = REFUSED_OPTIMIZERS.get(str(kind).lower())
    if why is not None:
        lines["optimizer"] = f"optimizer.type: {kind} {why}: use AdamW"
    zero = settled.get("zero_optimization") or {}
    held = (zero.get("offload_optimizer") or {}).get("device", "none")
    place = "zero_optimization.offload_optimizer"
    if held not in ("none", "cpu"):
        lines[place] = f"{place}.device: {show(held)} is not supported; use 'cpu'"
    elif held == "cpu" and not zero.get("stage"):
        lines[place] = f"{place}: needs ZeRO; set zero_optimization.stage to 1"
    if lines:
        raise ConfigError("\n".join(lines.values()))


def _without_effect(config: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the warnings and the notes of keys that change nothing."""
    warnings: list[str] = []
    by_reason: dict[str, list[str]] = {}
    for path, value in configured_keys(config):
        key = KEYS.get(path)
        if key is None:
            if path != BLOCK and path.rpartition(".")[0] not in FREE:
                home = home_of(path.rpartition(".")[2])
                warnings.append(
                    f"{path}: is no key that DeepSpeed {deepspeed.__version__} reads; it has no effect"
                    + (f": write {home}" if home else "")
                )
        elif key.verdict is KeyVerdict.NO_EFFECT and key.is_requested(value):
            if key.warns:
                warnings.append(f"{path}: {show(value)} has no effect under {BLOCK}: {key.note}")
            elif not isinstance(value, Mapping):
                by_reason.setdefault(key.note, []).append(path)
    notes = [f"{', '.join(paths)}: without effect; {reason}" for reason, paths in by_reason.items()]
    if config.get("gradient_clipping") is None and GRADIENT_CLIPPING_DEFAULT:
        notes.append(
            f"gradient_clipping: not set, so nothing is clipped; DeepSpeed {deepspeed.__version__} alone clips to "
            f"{GRADIENT_CLIPPING_DEFAULT} then"
        )
    return tuple(warnings), tuple(notes)


# A stage's DeepSpeed configuration, derived from the user's; decided before any rank waits.
#
# What the graph of stages owns (batch sizes, clipping, loss scale, scheduler, monitors, timers) is taken out of
# the copy each stage's engine gets; what a stage cannot honour is refused here with one line.

DTYPE_NAMES = {
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
}
"""DeepSpeed's spellings of a dtype and torch's name of it."""

PASSED_KEYS = (
    "optimizer fp16 bf16 zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer data_types "
    "comms_logger memory_breakdown dump_state disable_python_gc log_level vocabulary_size"
).split()
"""Keys that a stage's DeepSpeedEngine sees; every other one is honoured by the graph engine, or refused."""

_TORCH_ADAM_KEYS = {"lr", "betas", "eps", "weight_decay", "adam_w_mode", "amsgrad", "fused", "foreach"}

NO_OPTIMIZER = (
    "optimizer: missing, train_batch() would change no weights; add an optimizer block to the DeepSpeed "
    "configuration, or pass optimizer= to deepspeed.initialize"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig(StepSettings):
    """What one stage takes from the user's DeepSpeed JSON.

    Args:
        deepspeed: the configuration of the stage's own DeepSpeedEngine.
        notes: lines for the user about what was changed, logged once.
    """

    deepspeed: dict[str, Any]
    notes: tuple[str, ...]


def derive_stage_config(
    config: Mapping[str, Any],
    *,
    mini_batch: int,
    degree: int,
    device_type: str,
    zero_stage: int | None = None,
) -> StageConfig:
    """Derive the configuration of a stage of ``degree`` ranks from the user's DeepSpeed JSON.

    Args:
        mini_batch: samples of one optimizer step over the whole graph.
        device_type: ``cpu`` or ``cuda``; decides whether Adam needs a native build.
        zero_stage: the plan's; None: that of the JSON.

    Raises:
        ConfigError: a key requests what a graph of stages cannot do.
    """
    # What is left out of `derived` a stage's engine does not see: batch sizes are replaced by ones that multiply out
    # (B = B/d * d * 1; rounded up, as context ranks share samples), clipping, scheduler, monitors and timers are the
    # graph's.
    config = read_deepspeed(config).config
    if zero_stage is not None:
        config = {
            **config,
            "zero_optimization": {**(config.get("zero_optimization") or {}), "stage": zero_stage},
        }
    zero, brain = (config.get(key) or {} for key in ("zero_optimization", "bf16"))
    half = (config.get("fp16") or {}).get("enabled", False)
    dtype = "float16" if half else "bfloat16" if brain.get("enabled", False) else "float32"
    notes: list[str] = []
    derived = {key: copy.deepcopy(config[key]) for key in PASSED_KEYS if config.get(key) is not None}
    local = -(-mini_batch // degree)
    derived["train_batch_size"] = local * degree
    derived["train_micro_batch_size_per_gpu"] = local
    derived["gradient_accumulation_steps"] = 1
    derived["gradient_clipping"] = 0.0  # the norm is the graph's; a stage sees its part only
    derived["steps_per_print"] = None
    data_types = derived.get("data_types", {})
    data_types.pop("grad_accum_dtype", None)  # gradients are added up before DeepSpeed sees them
    _derive_zero(derived)
    _derive_optimizer(derived, device_type=device_type, notes=notes)
    for key in ("wall_clock_breakdown", "flops_profiler"):
        value = config.get(key)
        if value is True or (isinstance(value, Mapping) and value.get("enabled")):
            notes.append(f"{key} is off inside the stages' own engines; stages are timed by the graph engine")
    return StageConfig(
        deepspeed=derived,
        dtype=dtype,
        accumulation_dtype=_accumulation_dtype(config, dtype),
        communication_dtype=_dtype_name(config.get("communication_data_type"), "communication_data_type"),
        gradient_clipping=float(config.get("gradient_clipping") or 0.0),
        bucket_elements=int(zero.get("reduce_bucket_size") or 50_000_000),
        zero_stage=int(zero.get("stage") or 0),
        check_overflow=dtype != "bfloat16" or bool(brain.get("check_grad_overflow", True)),
        notes=tuple(notes),
    )


def _dtype_name(value: Any, path: str) -> str | None:
    if value is None:
        return None
    name = DTYPE_NAMES.get(str(value).lower())
    if name is None:
        raise ConfigError(f"{path}: {value!r:.80} is no dtype; use one of fp32, bf16, fp16")
    return name


def _accumulation_dtype(config: Mapping[str, Any], dtype: str) -> str:
    path = "data_types.grad_accum_dtype"
    # fp32 sums of bf16 gradients lose nothing over many micro-batches; bf16 has 8 bits, so that a 257th one is lost.
    name = _dtype_name((config.get("data_types") or {}).get("grad_accum_dtype"), path) or dtype
    if name not in (dtype, "float32"):
        raise ConfigError(f"{path}: {name} loses precision of {dtype} gradients; use fp32 or leave it out")
    return name


def _derive_zero(derived: dict[str, Any]) -> None:
    """Keep DeepSpeed's ZeRO out of backward: no gradient hooks, its partition in parameter order.

    Its wrapper partitions masters and optimizer state (stage 1). Partitioned gradients, stage 2, are the stage's
    own (`partitioned_gradients`): DeepSpeed's would be reduced by hooks, wherever backward comes to them. So are
    parameters in parts, stage 3 (`sharded_weights`): what its keys tune is the plan's.
    """
    zero = derived.get("zero_optimization")
    if not zero or int(zero.get("stage") or 0) == 0:
        derived.pop("zero_optimization", None)
        return
    # what its own reduction and its stage 3 are tuned by would only stand in the way of the flat buffers
    for path, key in KEYS.items():
        block, _, name = path.rpartition(".")
        if block == "zero_optimization" and key.verdict is not KeyVerdict.HONOURED:
            zero.pop(name, None)
    zero.update(
        stage=1,
        contiguous_gradients=False,  # together with overlap_comm: no hooks on parameters
        overlap_comm=False,
        round_robin_gradients=False,
        elastic_checkpoint=False,
    )


def _derive_optimizer(derived: dict[str, Any], *, device_type: str, notes: list[str]) -> None:
    """On the CPU let Adam be torch's, with FusedAdam's defaults, rather than build a native operator."""
    block = derived.get("optimizer")
    if not isinstance(block, dict) or device_type != "cpu":
        return
    raw = block.get("params") or {}
    held = derived.get("zero_optimization", {}).get("offload_optimizer") or {}
    offloaded = held.get("device", "none") == "cpu"
    if str(block.get("type", "")).lower() not in ("adam", "adamw") or "torch_adam" in raw or offloaded:
        return
    # DeepSpeed makes its own Adam of both names, on the CPU with a C++ operator that it compiles when first used.
    params = torch_adam_params(raw)
    if params is None:
        return
    block["params"] = params
    notes.append(
        f"optimizer.type {block['type']}: on the CPU torch's implementation is used, so that nothing is built "
        'natively; "torch_adam": false requests DeepSpeed\'s'
    )


def torch_adam_params(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what makes DeepSpeed build torch's Adam as it would its FusedAdam; None where torch's cannot do that.

    Args:
        raw: ``params`` of a JSON ``Adam`` or ``AdamW``. Of both DeepSpeed makes AdamW, but for an ``Adam`` with
            ``adam_w_mode`` false.
    """
    params = dict(raw)
    if params.get("bias_correction") is True:
        del params["bias_correction"]
    params.pop("set_grad_none", None)
    if set(params) - _TORCH_ADAM_KEYS:
        return None
    params.setdefault("weight_decay", 0.0)  # FusedAdam's default; torch.optim.AdamW's is 0.01
    return {**params, "torch_adam": True}
