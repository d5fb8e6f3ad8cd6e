"""Values of DeepSpeed's own keys that it would take as something else, or trip over after minutes: refused at once.

DeepSpeed reads a clipping of -1 or NaN as none, an unknown key as nothing at all, and passes a learning rate that is a
text on to the optimizer. `stage_config` decides what of a configuration stages can honour; here is what no job means.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.typed_leaves import Range, WrongLeaf, reader_of, show

_AUTO = "auto"
"""What HuggingFace's Trainer fills in, and DeepSpeed takes for its default inside objects."""
_READ_HERE = frozenset(
    {
        ("zero_optimization", "stage"),
        ("zero_optimization", "reduce_bucket_size"),
        ("tensor_parallel", "autotp_size"),
    }
)
"""What stages take from their block themselves: a number, not what DeepSpeed would put for "auto"."""
_Magnitude = Annotated[float, Range(low=0.0, high=1e30)]
_VALUES: dict[tuple[str, ...], Any] = {
    ("gradient_clipping",): _Magnitude,
    ("wall_clock_breakdown",): bool,
    ("prescale_gradients",): bool,
    ("gradient_predivide_factor",): Annotated[float, Range(low=1e-30, high=1e30)],
    ("zero_allow_untested_optimizer",): bool,
    ("zero_optimization", "stage"): Annotated[int, Range(low=0, high=3)],
    ("zero_optimization", "reduce_bucket_size"): Annotated[float, Range(low=1.0, high=1e18)],
    ("zero_optimization", "allgather_bucket_size"): Annotated[float, Range(low=0.0, high=1e18)],
    ("tensor_parallel", "autotp_size"): Annotated[int, Range(low=0, high=2**20)],
    ("data_types", "grad_accum_dtype"): str,
    ("fp16", "enabled"): bool,
    ("fp16", "loss_scale"): _Magnitude,
    ("fp16", "initial_scale_power"): Annotated[int, Range(low=0, high=126)],
    ("fp16", "loss_scale_window"): Annotated[int, Range(low=1, high=2**31)],
    ("fp16", "hysteresis"): Annotated[int, Range(low=1, high=2**31)],
    ("fp16", "min_loss_scale"): _Magnitude,
    ("bf16", "enabled"): bool,
    ("bfloat16", "enabled"): bool,
    ("optimizer", "type"): str,
    ("optimizer", "params", "lr"): _Magnitude,
    ("optimizer", "params", "eps"): _Magnitude,
    ("optimizer", "params", "weight_decay"): Annotated[float, Range(low=-1e30, high=1e30)],
    ("optimizer", "params", "momentum"): Annotated[float, Range(low=0.0, high=1e30)],
    ("optimizer", "params", "betas"): tuple[
        Annotated[float, Range(low=0.0, high=1.0)], Annotated[float, Range(low=0.0, high=1.0)]
    ],
    ("scheduler", "type"): str,
    ("scheduler", "params", "warmup_num_steps"): Annotated[float, Range(low=0.0, high=1e18)],
    ("scheduler", "params", "total_num_steps"): Annotated[float, Range(low=0.0, high=1e18)],
    ("scheduler", "params", "warmup_min_lr"): _Magnitude,
    ("scheduler", "params", "warmup_max_lr"): _Magnitude,
}
"""What a key's value must be where it is given."""
_PER_GROUP = frozenset({("scheduler", "params", "warmup_min_lr"), ("scheduler", "params", "warmup_max_lr")})
"""What may also be a list, a value for each parameter group."""

_OBJECTS = (
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger",
    "compile", "compression_training", "csv_monitor", "curriculum_learning", "data_efficiency", "data_types",
    "elasticity", "expert_parallel", "flops_profiler", "fp16", "hybrid_engine", "nebula", "optimizer", "pipeline",
    "progressive_layer_drop", "scheduler", "tensor_parallel", "tensorboard", "timers", "torch_autocast", "wandb",
    "weight_quantization", "zero_optimization",
)  # fmt: skip
_OTHERS = (
    "communication_data_type", "dataloader_drop_last", "disable_allgather", "disable_python_gc", "dump_state",
    "eigenvalue", "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping",
    "gradient_predivide_factor", "graph_pipeline", "keep_in_fp32_modules", "log_level",
    "managed_gradient_accumulation", "memory_breakdown", "prescale_gradients",
    "seq_parallel_communication_data_type", "sequence_parallel_size", "sparse_attention", "sparse_gradients",
    "steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism",
    "use_node_local_storage", "vocabulary_size", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "load_universal_checkpoint", "memory_efficient_linear", "data_sampling",
)  # fmt: skip
_INNER = {
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
    "fp16": ("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
             "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"),
    "bf16": ("enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads",
             "bf16_optimizer_states"),
    "zero_optimization": ("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size",
                          "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights",
                          "elastic_checkpoint", "offload_param", "offload_optimizer", "sub_group_size",
                          "round_robin_gradients", "ignore_unused_parameters", "cpu_offload"),
}  # fmt: skip
_LIKENESS = 0.84
"""Of a mistyped key to the one that was meant; others are left to DeepSpeed, whose releases add some."""


def check_values(config: Mapping[str, Any]) -> None:
    """Refuse values that a key cannot have, and keys that are mistyped.

    Raises:
        ConfigError: one line for each, with the key path, the value and what to write.
    """
    lines = [line for key in config if (line := _mistyped(str(key), (*_OBJECTS, *_OTHERS), ""))]
    for name in _OBJECTS:
        block = config.get(name)
        if isinstance(block, Mapping):
            lines += [
                line for key in block if (line := _mistyped(str(key), _INNER.get(name, ()), f"{name}."))
            ]
        elif block is not None and (block is not False or name in {path[0] for path in _VALUES}):
            lines.append(f"{name}: expected an object, found {show(block)}")
    for path, kind in _VALUES.items():
        line = _wrong(config, path, kind)
        if line is not None:
            lines.append(line)
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))


def _mistyped(key: str, known: tuple[str, ...], prefix: str) -> str | None:
    if key in known:
        return None
    near = difflib.get_close_matches(key[:100].lower(), known, n=1, cutoff=_LIKENESS)
    if not near:
        return None
    return f"{prefix}{key}: unknown key, and DeepSpeed would ignore it; did you mean {near[0]!r}?"


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
    if value == _AUTO and len(path) > 1 and path not in _READ_HERE:
        return None
    if path in _PER_GROUP and isinstance(value, list):
        kind = tuple[kind, ...]
    try:
        reader_of(kind)(value)
    except WrongLeaf as error:
        return error.line(".".join(path))
    return None
