"""A stage's DeepSpeed configuration, derived from the user's; decided before any rank waits.

What the graph of stages owns (batch sizes, clipping, loss scale, scheduler, monitors, timers) is taken out of
the copy each stage's engine gets; what a stage cannot honour is refused here with one line.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.config_values import read_deepspeed
from gpp_plugin.integrations.deepspeed.deepspeed_keys import KEYS, KeyVerdict

DTYPE_NAMES = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
}
"""DeepSpeed's spellings of a dtype and torch's name of it."""

PASSED_KEYS = (
    "optimizer",
    "fp16",
    "bf16",
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "data_types",
    "comms_logger",
    "memory_breakdown",
    "dump_state",
    "disable_python_gc",
    "log_level",
    "vocabulary_size",
)
"""Keys that a stage's DeepSpeedEngine sees; every other one is honoured by the graph engine, or refused."""

_TORCH_ADAM_KEYS = {"lr", "betas", "eps", "weight_decay", "adam_w_mode", "amsgrad", "fused", "foreach"}

NO_OPTIMIZER = (
    "optimizer: missing, train_batch() would change no weights; add an optimizer block to the DeepSpeed "
    "configuration, or pass optimizer= to deepspeed.initialize"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """What one stage takes from the user's DeepSpeed JSON.

    Args:
        deepspeed: the configuration of the stage's own DeepSpeedEngine.
        dtype: torch's name of the parameters' type (``float32``, ``bfloat16``, ``float16``).
        accumulation_dtype: torch's name of the type in which micro-batches' gradients are added up.
        communication_dtype: torch's name of the type gradients are sent in; None sends them as they are.
        gradient_clipping: largest global L2 norm of a step; 0 does not clip.
        bucket_elements: most elements of one gradient all-reduce.
        zero_stage: 0 to 3.
        check_overflow: skip the step when the norm is not finite.
        notes: lines for the user about what was changed, logged once.
    """

    deepspeed: dict[str, Any]
    dtype: str
    accumulation_dtype: str
    communication_dtype: str | None
    gradient_clipping: float
    bucket_elements: int
    zero_stage: int
    check_overflow: bool
    notes: tuple[str, ...]


def derive_stage_config(
    config: Mapping[str, Any], *, mini_batch: int, degree: int, device_type: str
) -> StageConfig:
    """Derive the configuration of a stage of ``degree`` ranks from the user's DeepSpeed JSON.

    Args:
        mini_batch: samples of one optimizer step over the whole graph.
        device_type: ``cpu`` or ``cuda``; decides whether Adam needs a native build.

    Raises:
        ConfigError: a key asks for what a graph of stages cannot do.
    """
    # What is left out of `derived` a stage's engine does not see: batch sizes are replaced by ones that multiply out
    # (B = B/d * d * 1), clipping, scheduler, monitors and timers are the graph's.
    config = read_deepspeed(config).config
    notes: list[str] = []
    dtype = _parameter_dtype(config)
    derived = {key: copy.deepcopy(config[key]) for key in PASSED_KEYS if config.get(key) is not None}
    derived["train_batch_size"] = mini_batch
    derived["train_micro_batch_size_per_gpu"] = mini_batch // degree
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
        bucket_elements=int(_block(config, "zero_optimization").get("reduce_bucket_size") or 50_000_000),
        zero_stage=int(_block(config, "zero_optimization").get("stage") or 0),
        check_overflow=dtype != "bfloat16" or bool(_block(config, "bf16").get("check_grad_overflow", True)),
        notes=tuple(notes),
    )


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: expected an object, found {_cut(value)}")
    return value


def _parameter_dtype(config: Mapping[str, Any]) -> str:
    half = bool(_block(config, "fp16").get("enabled", False))
    brain = bool(_block(config, "bf16").get("enabled", False))
    return "float16" if half else "bfloat16" if brain else "float32"


def _dtype_name(value: Any, path: str) -> str | None:
    if value is None:
        return None
    name = DTYPE_NAMES.get(str(value).lower())
    if name is None:
        raise ConfigError(f"{path}: {_cut(value)} is no dtype; use one of fp32, bf16, fp16")
    return name


def _accumulation_dtype(config: Mapping[str, Any], dtype: str) -> str:
    path = "data_types.grad_accum_dtype"
    # fp32 sums of bf16 gradients lose nothing over many micro-batches; bf16 has 8 bits, so that a 257th one is lost.
    name = _dtype_name(_block(config, "data_types").get("grad_accum_dtype"), path) or dtype
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
    given = block.get("params") or {}
    held = derived.get("zero_optimization", {}).get("offload_optimizer") or {}
    offloaded = held.get("device", "none") == "cpu"
    if str(block.get("type", "")).lower() not in ("adam", "adamw") or "torch_adam" in given or offloaded:
        return
    # DeepSpeed makes its own Adam of both names, on the CPU with a C++ operator that it compiles when first used.
    params = torch_adam_params(given)
    if params is None:
        return
    block["params"] = params
    notes.append(
        f"optimizer.type {block['type']}: on the CPU torch's implementation is used, so that nothing is built "
        'natively; "torch_adam": false asks for DeepSpeed\'s'
    )


def torch_adam_params(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what makes DeepSpeed build torch's Adam as it would its FusedAdam; None where torch's cannot do that.

    Args:
        given: ``params`` of a JSON ``Adam`` or ``AdamW``. Of both DeepSpeed makes AdamW, but for an ``Adam`` with
            ``adam_w_mode`` false.
    """
    params = dict(given)
    if params.get("bias_correction") is True:
        del params["bias_correction"]
    params.pop("set_grad_none", None)
    if set(params) - _TORCH_ADAM_KEYS:
        return None
    params.setdefault("weight_decay", 0.0)  # FusedAdam's default; torch.optim.AdamW's is 0.01
    return {**params, "torch_adam": True}
