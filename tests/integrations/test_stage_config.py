"""What a stage takes from the user's DeepSpeed JSON."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.config_values import StageConfig, derive_stage_config

USER: dict[str, Any] = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32", "buffer_dtype": "fp32"},
    "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 1000},
    "communication_data_type": "bf16",
    "tensorboard": {"enabled": True},
    "csv_monitor": {"enabled": True},
    "graph_pipeline": {"enabled": True},
}


def derive(config: dict[str, Any], device_type: str = "cuda") -> StageConfig:
    return derive_stage_config(config, mini_batch=24, degree=3, device_type=device_type)


def test_a_whole_configuration() -> None:
    before = copy.deepcopy(USER)
    derived = derive(USER)
    assert before == USER, "the user's dict must stay as it is"
    assert derived == StageConfig(
        deepspeed={
            "train_batch_size": 24,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "steps_per_print": None,
            "optimizer": USER["optimizer"],
            "bf16": {"enabled": True},
            "data_types": {"buffer_dtype": "fp32"},
            "zero_optimization": {
                "stage": 1,
                "overlap_comm": False,
                "contiguous_gradients": False,
                "round_robin_gradients": False,
                "elastic_checkpoint": False,
                "reduce_bucket_size": 1000,
            },
        },
        dtype="bfloat16",
        accumulation_dtype="float32",
        communication_dtype="bfloat16",
        gradient_clipping=0.5,
        bucket_elements=1000,
        zero_stage=1,
        check_overflow=True,
        notes=(),
    )


def test_an_empty_configuration_trains_in_fp32() -> None:
    derived = derive({})
    assert (derived.dtype, derived.accumulation_dtype, derived.zero_stage) == ("float32", "float32", 0)
    assert (derived.gradient_clipping, derived.communication_dtype) == (0.0, None)
    assert "zero_optimization" not in derived.deepspeed


@pytest.mark.parametrize(
    ("block", "dtype", "accumulation", "check"),
    [
        ({"bf16": {"enabled": True}}, "bfloat16", "bfloat16", True),
        ({"bfloat16": {"enabled": True}}, "bfloat16", "bfloat16", True),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "bfloat16", "bfloat16", False),
        ({"fp16": {"enabled": True}}, "float16", "float16", True),
        ({"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "float16", "float32", True),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "float32", "float32", True),
    ],
)
def test_precisions(block: dict[str, Any], dtype: str, accumulation: str, check: bool) -> None:
    derived = derive(block)
    assert (derived.dtype, derived.accumulation_dtype, derived.check_overflow) == (dtype, accumulation, check)


def test_zero_2_partitions_gradients_outside_deepspeed() -> None:
    derived = derive({"zero_optimization": {"stage": 2}})
    assert (derived.zero_stage, derived.deepspeed["zero_optimization"]["stage"]) == (2, 1)


@pytest.mark.parametrize("kind", ["Adam", "adamw", "AdamW"])
def test_adam_on_the_cpu_is_torchs_with_fused_adams_defaults(kind: str) -> None:
    derived = derive({"optimizer": {"type": kind, "params": {"lr": 1e-3, "bias_correction": True}}}, "cpu")
    params = derived.deepspeed["optimizer"]["params"]
    assert params == {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}
    assert len(derived.notes) == 1 and '"torch_adam": false' in derived.notes[0]


@pytest.mark.parametrize("held", [{"device": "none"}, None])
def test_an_optimizer_that_is_not_offloaded_is_torchs_on_the_cpu(held: Any) -> None:
    zero, adamw = {"stage": 1, "offload_optimizer": held}, {"type": "AdamW", "params": {"lr": 1e-3}}
    derived = derive({"optimizer": adamw, "zero_optimization": zero}, "cpu")
    assert derived.deepspeed["optimizer"]["params"]["torch_adam"] is True


@pytest.mark.parametrize(
    ("optimizer", "device_type"),
    [
        ({"type": "AdamW", "params": {"lr": 1e-3}}, "cuda"),
        ({"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": False}}, "cpu"),
        ({"type": "AdamW", "params": {"lr": 1e-3, "bias_correction": False}}, "cpu"),
        ({"type": "SGD", "params": {"lr": 1e-3}}, "cpu"),
    ],
)
def test_other_optimizers_pass_unchanged(optimizer: dict[str, Any], device_type: str) -> None:
    derived = derive({"optimizer": optimizer}, device_type)
    assert derived.deepspeed["optimizer"] == optimizer
    assert derived.notes == ()


def test_what_the_stages_own_engines_do_not_do_is_said() -> None:
    notes = derive({"wall_clock_breakdown": True, "flops_profiler": {"enabled": True}}).notes
    assert [note.split()[0] for note in notes] == ["wall_clock_breakdown", "flops_profiler"]


def test_zero_3_is_zero_1_to_deepspeed() -> None:
    asked = {"stage": 3, "stage3_max_live_parameters": 1, "sub_group_size": 2, "reduce_bucket_size": 99}
    derived = derive({"zero_optimization": asked})
    assert (derived.zero_stage, derived.bucket_elements) == (3, 99)
    zero = derived.deepspeed["zero_optimization"]
    assert zero["stage"] == 1 and not any("stage3" in key or key == "sub_group_size" for key in zero)


def test_sums_that_lose_precision_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^data_types.grad_accum_dtype: "):
        derive({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}})


def test_an_optimizer_on_the_host_is_accepted() -> None:
    derive({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})
