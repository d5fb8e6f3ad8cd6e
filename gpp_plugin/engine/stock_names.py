"""Names that DeepSpeed's engines have and a graph of stages has not: why, and what to call instead.

`GraphPipelineEngine` answers the others. Tests hold both to DeepSpeed's classes: each of their public names, those that
only instances have among them, is either answered or here.

Source: this project
Tests: tests/integrations/test_surface.py
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Reason -> names; a name that ends in "*" stands for all that begin so.
_REFUSED: dict[str, str] = {
    "read the block of that name in the JSON": (
        "aio_config autotuning_* communication_data_type compile_zero_optimization_stage curriculum_* "
        "data_efficiency_* data_sampling_* dump_state flops_profiler_* initial_dynamic_scale "
        "dynamic_loss_scale_args log_level random_ltd_* sparse_gradients_enabled swap_tensor_config "
        "tensor_parallel_config zenflow_config checkpoint_tag_validation_* is_sanity_checks_enabled "
        "gradient_predivide_factor postscale_gradients prescale_gradients graph_harvesting "
        "zero_allgather_* zero_allow_* zero_compute_* zero_contiguous_* zero_cpu_* zero_elastic_* "
        "zero_force_* zero_gather_* zero_hpz_* zero_ignore_* zero_legacy_* zero_load_* zero_log_* "
        "zero_max_* zero_model_* zero_module_* zero_multi_* zero_nvme_* zero_offload_* "
        "zero_optimization_partition_* zero_overlap_* zero_param_* zero_parameter_* zero_partial_* "
        "zero_prefetch_* zero_quantized_* zero_reduce_* zero_round_* zero_save_* zero_sub_* zero_use_* "
        "get_optimizer_configuration optimizer_legacy_fusion checkpoint_serialization_enabled "
        "checkpoint_writer_enabled "
        "use_node_local_storage load_universal_checkpoint super_offload cpuadam_cores_perc autotp_size "
        "flops flops_profiler log_batch_step_id update_interval optimized_linear_* dist_backend use_ds_comm "
        "dont_change_device"
    ),
    "a program says when gradients are reduced; engine.retain_gradients() keeps them for engine.gradients": (
        "allreduce_* buffered_allreduce_fallback sparse_all* all_gather_scalar coalesce_grad_reduction "
        "set_gradient_accumulation_boundary managed_gradient_accumulation clip_fp32_gradients scale "
        "reduce_gradients_and_step enable_backward_allreduce pipeline_enable_backward_allreduce flatten unflatten "
        "gradient_average inside_no_sync_ctxt scale_wrt_gas warn_unscaled_loss"
    ),
    "stages run code generated from the capture, which torch.compile and tensor-parallel rewriting do not touch": (
        "compile compile_* get_autosp_backend get_autotp_backend get_compile_time get_deepcompile_backend "
        "get_deepspeed_compile_backend is_compiled is_deepcompile_* register_compile_pass "
        "uses_parallelization_pass_only module_forward_post_hook module_forward_pre_hook"
    ),
    "give the data as training_data, engine.set_dataloader() or an iterator of train_batch()": (
        "deepspeed_io set_data_post_process_func set_custom_curriculum_learning_schedule "
        "is_iterable_style_dataset is_map_style_dataset tensor_to_device batch_fn collate_fn data_iterator "
        "first_dataloader_check training_data"
    ),
    "the precision is engine.rank_engine.dtype; engine.fp16_enabled() and engine.bfloat16_enabled() tell it": (
        "fp16_auto_cast fp16_master_weights_and_gradients bf16_master_weights_and_gradients "
        "bf16_optimizer_states get_data_types torch_autocast_* amp_enabled amp_params"
    ),
    "the plan places weights for good; give graph_pipeline.memory what stages may swap and recompute": (
        "offload_states reload_states empty_partition_cache is_first_weights_partition_group to half float "
        "double bfloat16 type cuda cpu xpu ipu mtia to_empty share_memory"
    ),
    "engine.memory_report() tells memory, and the JSON's wall_clock_breakdown the times of a step": (
        "memory_breakdown print_forward_breakdown get_wall_clock_timers collect_python_gc"
    ),
    "the plan is made for one mini-batch; set train_micro_batch_size_per_gpu in the JSON": (
        "set_train_micro_batch_size"
    ),
    "stages have no mixture of experts over ranks, and no sequence-parallel group": (
        "load_moe_state_dict get_sequence_parallel_group all_to_all_group local_all_to_all_group expert_* "
        "gate_modules has_moe_layers moe_layers num_experts seq_* sequence_parallel_size"
    ),
    "each stage has an optimizer and a schedule of its own: engine.optimizer and engine.lr_scheduler": (
        "basic_optimizer client_optimizer client_lr_scheduler using_bf16_optimizer"
    ),
    "checkpoints name parameters and fit any plan; call engine.save_checkpoint() and engine.load_checkpoint()": (
        "checkpoint_engine checkpoint_mp_rank loaded_checkpoint_* save_non_zero_checkpoint save_zero_checkpoint"
    ),
    "call engine.eval_batch(return_logits=True)": "eval_return_logits",
    "call engine.optimizer_name()": "get_type",
    "engine.agg_train_loss keeps what train_batch() returned, and engine.last_timeline the times of a step": (
        "agg_additional_losses agg_loss dp_group_loss fwd_outputs loss losses outputs total_additional_losses "
        "total_loss batch_timer engine_timers engine_timers_cache fwd_duration timers tput_timer summary_events"
    ),
    "a stage may have several neighbours; engine.plan.stages and engine.plan.edges have stages, ranks and tensors": (
        "grid mpu next_stage prev_stage data_parallel_group first_gradient_send first_output_send has_bool_tensors "
        "num_pipe_buffers pipe_buffers pipe_partition_* pipe_recv_buf is_pipe_partitioned is_grad_partitioned "
        "dynamic_shape grad_layer grad_partition_grad_layer_meta_cache meta_buffer mesh_device has_attention_mask"
    ),
    "rank 0 writes to monitors, which the JSON's blocks name; engine.config is the graph_pipeline block": (
        "monitor autotuning_model_info"
    ),
    "no schedule of instructions is given; engine.plan and its programs say what runs": (
        "pipe_schedule execute_schedule"
    ),
    "engine.module, which holds this rank's stages, has it": (
        "modules named_modules children named_children get_parameter get_submodule get_buffer apply "
        "requires_grad_ extra_repr get_extra_state set_extra_state dump_patches call_super_init"
    ),
    "stages run what was captured; register it on the model before deepspeed.initialize": (
        "set_submodule add_module register_*"
    ),
}
_BY_NAME = {name: reason for reason, names in _REFUSED.items() for name in names.split()}


def why_lacking(name: str) -> str | None:
    """Return why the engine has no such name, if DeepSpeed's engines have it.

    >>> why_lacking("set_train_micro_batch_size")
    'the plan is made for one mini-batch; set train_micro_batch_size_per_gpu in the JSON'
    >>> why_lacking("zero_cpu_offload"), why_lacking("frobnicate")
    ('read the block of that name in the JSON', None)
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    starts = [known for known in _BY_NAME if known.endswith("*") and name.startswith(known[:-1])]
    return _BY_NAME[max(starts, key=len)] if starts else None


def missing_attribute(name: str, present: Iterable[str]) -> AttributeError:
    """Return the error for a name that the engine has not: why, or the nearest that it has."""
    reason = why_lacking(name)
    if reason is None:
        near = difflib.get_close_matches(name, [each for each in present if not each.startswith("_")], n=1)
        reason = f"did you mean engine.{near[0]}?" if near else "docs/porting.md lists what it has"
    return AttributeError(f"engine.{name} does not exist for a graph of stages: {reason}")
