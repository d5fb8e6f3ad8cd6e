"""Every key of DeepSpeed's configuration, sub-keys included, and what a graph of stages makes of it: one table.

`config_values` and `stage_config` go by it, `gpp doctor --keys` prints it, and a test walks the configuration classes
of the installed DeepSpeed: a key of theirs that is not here fails it.

Tests: tests/integrations/test_deepspeed_keys.py
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class KeyVerdict(enum.Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    REFUSED = "refused"
    NO_EFFECT = "without effect"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedKey:
    """A key of DeepSpeed's configuration.

    Args:
        path: ``zero_optimization.stage``.
        note: what it means here, or what to do instead.
        off: values with which a key requests nothing, beside null, false (true where it is one of them), "auto" and
            what is empty.
        warns: of a key without effect: its user would have expected one.
    """

    path: str
    verdict: KeyVerdict
    note: str = ""
    off: tuple[Any, ...] = ()
    warns: bool = False

    def is_requested(self, value: Any) -> bool:
        """Return whether a value requests something."""
        if isinstance(value, bool):
            return value is not any(off is True for off in self.off)  # 1 equals True, and is a number
        return value is not None and value not in ("", "auto", [], {}, *self.off)


_STAGES_REDUCE = "stages reduce and gather as their programs say"
_REMOVED = "DeepSpeed has removed it; remove it"
_RECOMPUTE = (
    'write graph_pipeline.memory.recompute: "auto" where a plan needs it to fit, "full" for every layer'
)
_BLOCK_PLANS = "the graph_pipeline block says how the model is cut"
_OWN_FILES = "checkpoints are the engine's own: one file a stage's rank, checksummed"
_DENSE = "not available with a graph of stages; remove it"

HONOURED_KEYS = {
    "": "steps_per_print dump_state disable_python_gc memory_breakdown log_level vocabulary_size "
    "communication_data_type gradient_clipping zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "wall_clock_breakdown optimizer scheduler fp16 bf16 bfloat16 zero_optimization data_types comms_logger "
    "tensorboard wandb csv_monitor comet flops_profiler",
    "optimizer": "type params",
    "scheduler": "type params",
    "fp16": "enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale",
    "bf16": "enabled check_grad_overflow",
    "zero_optimization": "stage reduce_bucket_size offload_optimizer cpu_offload",
    "zero_optimization.offload_optimizer": "device pin_memory",
    "data_types": "grad_accum_dtype buffer_dtype keep_in_fp32_modules",
    "comms_logger": "enabled prof_all prof_ops verbose debug",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    "flops_profiler": "enabled profile_step output_file",
}  # fmt: skip
"""Keys that mean what they mean to DeepSpeed."""

REPLACED_KEYS = {
    "train_batch_size": "samples of one optimizer step over the whole graph; DeepSpeed's product is not required",
    "train_micro_batch_size_per_gpu": "samples of one loss (docs/configuration.md)",
    "gradient_accumulation_steps": "divides the losses of a step",
}
"""Keys of the batch arithmetic, which is ours: DeepSpeed's classes do not see them."""

_REFUSED: tuple[tuple[str, str, str], ...] = (
    ("", "managed_gradient_accumulation", "train_batch ends every step; remove it"),
    ("", "gradient_allreduce_op", "would make the result depend on the stages' degrees; use 'mean' (the loss of a step "
         "is the mean over its loss units)"),
    ("", "sequence_parallel_size data_parallel_size", "stages share out ranks by graph_pipeline.data_parallel and "
         "graph_pipeline.tensor_parallel; remove it"),
    ("", "datastates_ckpt", f"{_OWN_FILES}; remove it"),
    ("", "sparse_gradients", "stages reduce dense gradients; remove it"),
    ("", "elasticity", "the plan fixes the ranks; remove it"),
    ("", "amp", "use bf16 or fp16"),
    ("", "nebula compression_training quantize_training eigenvalue sparse_attention graph_harvesting "
         "curriculum_learning progressive_layer_drop", _REMOVED),
    ("", "torch_autocast", "stages run their graph directly; use bf16 or fp16"),
    ("torch_autocast", "enabled dtype lower_precision_safe_modules", "stages run their graph directly; use bf16 or "
         "fp16"),
    ("", "autotuning", "the planner chooses micro-batches; remove it"),
    ("autotuning", "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path "
         "tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path mp_size "
         "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
         "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes",
     "the planner chooses micro-batches; remove it"),
    ("autotuning.model_info", "profile num_params hidden_size num_layers", "the planner chooses micro-batches; remove "
         "it"),
    ("", "data_efficiency hybrid_engine expert_parallel weight_quantization", _DENSE),
    ("data_efficiency", "enabled seed data_sampling data_routing", _DENSE),
    ("data_efficiency.data_sampling", "enabled num_epochs num_workers pin_memory curriculum_learning dynamic_batching",
     _DENSE),
    ("data_efficiency.data_sampling.curriculum_learning", "enabled curriculum_metrics data_cluster_path", _DENSE),
    ("data_efficiency.data_sampling.dynamic_batching", "enabled metrics_path lr_scaling_method min_batch_size "
         "max_batch_size sequence_picking_order max_tokens verbose", _DENSE),
    ("data_efficiency.data_routing", "enabled random_ltd", _DENSE),
    ("data_efficiency.data_routing.random_ltd", "enabled total_layer_num random_ltd_layer_num random_ltd_layer_id "
         "model_mask_name model_type hidden_state_order random_ltd_schedule layer_token_lr_schedule micro_batch_size "
         "global_batch_size sample_idx attention_mask", _DENSE),
    ("hybrid_engine", "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
         "tp_gather_partition_size enable_cuda_graph", _DENSE),
    ("expert_parallel", "enabled autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan "
         "preset_model moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm "
         "route_norm route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm "
         "comm_qp_margin comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k "
         "load_balance_coeff routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr "
         "has_shared_experts shared_experts_pattern shared_experts_gate_pattern expert_activation", _DENSE),
    ("weight_quantization", "enabled num_bits q_type q_groups quantized_initialization post_init_quant", _DENSE),
    ("optimizer.params", "max_grad_norm", "is no option of an optimizer; write gradient_clipping"),
    ("fp16", "fp16_master_weights_and_grads", "stages step fp32 masters; remove it"),
    ("bf16", "bf16_master_weights_and_grads bf16_optimizer_states", "stages step fp32 masters; remove it"),
    ("zero_optimization", "zenflow", "needs the optimizer step of one process group; remove it"),
    ("zero_optimization", "zero_quantized_gradients", "stages reduce gradients as they are; remove it"),
    ("zero_optimization", "zero_quantized_weights zero_quantized_nontrainable_weights",
     "stages gather weights as they are; remove it"),
    ("zero_optimization", "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param", _REMOVED),
    ("zero_optimization", "offload_param cpu_offload_param", "a rank's part of the parameters stays on its device; use "
         "graph_pipeline.memory.swap"),
    ("zero_optimization.offload_param", "device", "a rank's part of the parameters stays on its device; use "
         "graph_pipeline.memory.swap"),
    ("zero_optimization.offload_optimizer", "ratio", "a stage's whole optimizer is offloaded; set it to 1.0"),
    ("zero_optimization.offload_optimizer", "super_offload", "stages step by DeepSpeed's ZeRO 1; remove it"),
    ("zero_optimization.zenflow", "topk_ratio select_strategy select_interval update_interval overlap_step offload "
         "auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
     "needs the optimizer step of one process group; remove it"),
    ("checkpoint", "load_universal", "checkpoints load on any plan, and gpp convert reads universal ones; remove it"),
    ("checkpoint", "use_node_local_storage", "checkpoints lie in one directory that all hosts see; remove it"),
    ("compile", "deepcompile", "stages compile their own graph (graph_pipeline.compile); remove it"),
    ("data_types", "param_dtype", "use bf16 or fp16"),
    ("tensor_parallel", "autotp_size", "stages are shared out among ranks by graph_pipeline.tensor_parallel; set that, "
         "and remove this or set it to 1"),
)  # fmt: skip
"""Block, keys, what to do."""

_NO_EFFECT: tuple[tuple[str, str, str, bool], ...] = (
    ("", "activation_checkpointing", _RECOMPUTE, False),
    ("activation_checkpointing", "partition_activations number_checkpoints contiguous_memory_optimization "
         "synchronize_checkpoint_boundary profile cpu_checkpointing", _RECOMPUTE, True),
    ("", "pipeline", _BLOCK_PLANS, False),
    ("pipeline", "activation_checkpoint_interval", _RECOMPUTE, True),
    ("pipeline", "stages partition", f"{_BLOCK_PLANS}: graph_pipeline.stages, planner and plan", True),
    ("pipeline", "seed_layers pipe_partitioned grad_partitioned use_reentrant", _BLOCK_PLANS, False),
    ("", "checkpoint", _OWN_FILES, False),
    ("checkpoint", "tag_validation", 'ranks always agree on the tag, as with "Fail"', True),
    ("checkpoint", "parallel_write checkpoint_serialization", _OWN_FILES, False),
    ("checkpoint", "writer", f"{_OWN_FILES}; graph_pipeline.checkpoint.async_save writes beside training", True),
    ("checkpoint.parallel_write", "pipeline_stage", "every stage writes its own files", False),
    ("checkpoint.writer", "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier",
     _OWN_FILES, False),
    ("", "prescale_gradients gradient_predivide_factor", "gradients are summed over ranks, never averaged", True),
    ("", "dataloader_drop_last", "the last, incomplete mini-batch is always left out", False),
    ("", "disable_allgather use_data_before_expert_parallelism seq_parallel_communication_data_type allgather_size",
     _STAGES_REDUCE, False),
    ("", "aio", "nothing is offloaded to NVMe", False),
    ("aio", "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
     "nothing is offloaded to NVMe", False),
    ("", "timers", "stages are timed by the graph engine", False),
    ("timers", "throughput", "stages are timed by the graph engine", False),
    ("timers.throughput", "enabled synchronized", "stages are timed by the graph engine", False),
    ("", "compile", "graph_pipeline.compile says what is compiled", False),
    ("compile", "autoep_non_moe free_activation_threshold offload_activation_pin_memory double_buffer symmetric_memory "
         "debug_log sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
         "keep_int_input_tensors keep_all_input_tensors passes", "graph_pipeline.compile says what is compiled", False),
    ("compile", "free_activation offload_activation offload_opt_states offload_parameters",
     "graph_pipeline.memory says what is done to fit", True),
    ("", "tensor_parallel", "write graph_pipeline.tensor_parallel", False),
    ("tensor_parallel", "dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend tensor_parallel tp "
         "injection_policy_tuple partition_config preset_model keep_module_on_host replace_with_kernel_inject "
         "kernel_inject", "write graph_pipeline.tensor_parallel", False),
    ("tensor_parallel.tp", "tp_size tp_grain_size mpu tp_group", "write graph_pipeline.tensor_parallel", False),
    ("tensor_parallel.tensor_parallel", "tp_size tp_grain_size mpu tp_group", "write graph_pipeline.tensor_parallel",
     False),
    ("flops_profiler", "recompute_fwd_factor module_depth top_modules detailed",
     "the graph engine counts the whole model, and no modules", False),
    ("optimizer", "legacy_fusion", "DeepSpeed 0.19 reads it and makes nothing of it", False),
    ("fp16", "auto_cast", "give the batch's tensors in the type that the model takes", True),
    ("bf16", "immediate_grad_update", "gradients are added up in data_types.grad_accum_dtype", False),
    ("zero_optimization", "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
         "allgather_bucket_size overlap_comm compute_grad_norm ignore_unused_parameters round_robin_gradients "
         "parameter_alignment", _STAGES_REDUCE, False),
    ("zero_optimization", "load_from_fp32_weights elastic_checkpoint legacy_stage1 pipeline_loading_checkpoint",
     _OWN_FILES, False),
    ("zero_optimization", "memory_efficient_linear override_module_apply log_trace_cache_warnings "
         "enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module cpu_offload_use_pin_memory "
         "sub_group_size zero_hpz_partition_size",
     "the program says when a stage's weights are gathered, and files always hold whole ones", False),
    ("zero_optimization", "prefetch_bucket_size stage3_prefetch_bucket_size param_persistence_threshold "
         "stage3_param_persistence_threshold model_persistence_threshold stage3_model_persistence_threshold "
         "max_live_parameters stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance "
         "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
         "stage3_gather_fp16_weights_on_model_save module_granularity_threshold stage3_module_granularity_threshold "
         "use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params allgather_sequential "
         "stage3_allgather_sequential",
     "the program says when a stage's weights are gathered, and files always hold whole ones", False),
    ("zero_optimization.leaf_module", "classes names name_suffixes",
     "the program says when a stage's weights are gathered, and files always hold whole ones", False),
    ("zero_optimization.offload_optimizer", "nvme_path buffer_count pipeline_read pipeline_write fast_init "
         "cpuadam_cores_perc", "nothing is offloaded to NVMe", False),
    ("zero_optimization.offload_param", "nvme_path buffer_count buffer_size max_in_cpu pin_memory",
     "nothing is offloaded to NVMe", False),
)  # fmt: skip
"""Block, keys, what does it here, and whether a warning says so."""

_OFF: Mapping[str, tuple[Any, ...]] = {
    "managed_gradient_accumulation": (True,),
    "gradient_allreduce_op": ("mean", "Mean", "MEAN"),
    "sequence_parallel_size": (1,),
    "data_parallel_size": (1,),
    "tensor_parallel.autotp_size": (0, 1),
    "zero_optimization.offload_param.device": ("none",),
    "zero_optimization.offload_optimizer.ratio": (1.0,),
    "pipeline.activation_checkpoint_interval": (0,),
    "pipeline.partition": ("best",),
    "gradient_predivide_factor": (1.0,),
    "checkpoint.tag_validation": ("Fail", "FAIL", "fail"),
}

REFUSED_OPTIMIZERS = {
    "muon": "orthogonalises gradients inside DeepSpeed's own reduction, which stages do not use",
    **dict.fromkeys(
        ("onebitadam", "zerooneadam", "onebitlamb"),
        "compresses gradients inside DeepSpeed's own reduction, which stages do not use; DeepSpeed 0.19 has removed it",
    ),
}
"""Lower-case names of optimizers that DeepSpeed has or had, and why stages cannot have them."""


def _rows() -> Iterator[DeepSpeedKey]:
    def paths(block: str, names: str) -> Iterator[str]:
        return (f"{block}.{name}" if block else name for name in names.split())

    for path, note in REPLACED_KEYS.items():
        yield DeepSpeedKey(path=path, verdict=KeyVerdict.HONOURED, note=note)
    for block, names in HONOURED_KEYS.items():
        for path in paths(block, names):
            yield DeepSpeedKey(path=path, verdict=KeyVerdict.HONOURED)
    for block, names, note in _REFUSED:
        for path in paths(block, names):
            yield DeepSpeedKey(path=path, verdict=KeyVerdict.REFUSED, note=note, off=_OFF.get(path, ()))
    for block, names, note, warns in _NO_EFFECT:
        for path in paths(block, names):
            yield DeepSpeedKey(
                path=path, verdict=KeyVerdict.NO_EFFECT, note=note, off=_OFF.get(path, ()), warns=warns
            )


KEYS: Mapping[str, DeepSpeedKey] = {key.path: key for key in sorted(_rows(), key=lambda key: key.path)}
"""Path -> the key. What an optimizer and a schedule take is their constructors'; `bfloat16` has the keys of `bf16`."""

FREE = frozenset(
    {
        "optimizer.params",
        "scheduler.params",
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics",
        "autotuning.arg_mappings",
        "tensor_parallel.partition_config",
    }
)
"""Objects whose keys are names of the user's, or of the class that gets them."""


def names_in(block: str) -> tuple[str, ...]:
    """Return the keys of a block, "" for those outside of any.

    >>> names_in("csv_monitor")
    ('enabled', 'job_name', 'output_path')
    """
    if block == "bfloat16":
        block = "bf16"
    return tuple(path.rpartition(".")[2] for path in KEYS if path.rpartition(".")[0] == block)


def configured_keys(config: Mapping[str, Any], block: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every key of a configuration, those of a block that is not enabled left out."""
    for name, value in config.items():
        path = f"{block}.{name}" if block else str(name)
        path = path.replace("bfloat16", "bf16", 1) if path.startswith("bfloat16") else path
        yield path, value
        if path in FREE and isinstance(value, Mapping):
            yield from ((f"{path}.{key}", item) for key, item in value.items() if f"{path}.{key}" in KEYS)
        elif isinstance(value, Mapping):
            # all blocks that have such a switch are off without it, but for these two
            is_on = value.get("enabled", path in ("weight_quantization", "timers.throughput"))
            if "enabled" not in names_in(path) or is_on not in (False, None, "auto"):
                yield from configured_keys(value, path)
