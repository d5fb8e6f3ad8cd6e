"""Configurations that projects ship, each with a `graph_pipeline` block: trained as in one process, or refused.

What stands here is which keys a file has, in values of our own. A file with ``"auto"`` goes the way of HuggingFace's
Trainer, which fills it in; the others go to `deepspeed.initialize`. The peer's side is one process without DeepSpeed.
Compared are the first loss and the first gradient norm; the second loss too where the file has no schedule. What is
refused must be so before the model is captured, in a line for each key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gpp_benchmarks.peers._scenario import REFUSED, SAME, Seen, Side, add_scenario

Json = dict[str, Any]
UNIT, SAMPLES, LENGTH, WORDS = 2, 8, 6, 32

# ---- the keys, by part -----------------------------------------------------------------------------------------

SIZES: Json = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}  # fmt: skip
SCALE: Json = {
    "loss_scale": 0,
    "loss_scale_window": 500,
    "initial_scale_power": 12,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
HALVES: Json = {"fp16": {"enabled": "auto", **SCALE}, "bf16": {"enabled": "auto"}}
BF16: Json = {"bf16": {"enabled": True}}
FP16: Json = {"fp16": {"enabled": True}}
ADAMW: Json = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
}
WARM_UP: Json = {
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    }
}
DECAY: Json = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"
        ),
    }
}
LOGS: Json = {"steps_per_print": 900, "wall_clock_breakdown": False}
FILLED = (SIZES, HALVES, ADAMW, WARM_UP, LOGS)
"""What Trainer fills in, and what is printed: the same in most files."""
ANY: Json = {"zero_allow_untested_optimizer": True}
CPU: Json = {"device": "cpu", "pin_memory": True}
BUCKETS: Json = {
    "allgather_partitions": True, "allgather_bucket_size": 3e6, "overlap_comm": True, "reduce_scatter": True,
    "reduce_bucket_size": 3e6, "contiguous_gradients": True,
}  # fmt: skip
LIVE: Json = {
    "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e8, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e8, "stage3_max_reuse_distance": 1e8,
    "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip


def zero(stage: int, *parts: Mapping[str, Any], **more: Any) -> Json:
    """Return the block of a ZeRO stage."""
    block: Json = {"stage": stage}
    for part in parts:
        block |= part
    return {"zero_optimization": block | more}


def made_by(kind: str, **params: Any) -> Json:
    """Return sizes and an optimizer, as files without ``auto`` have them."""
    return {
        "train_batch_size": SAMPLES, "train_micro_batch_size_per_gpu": UNIT, "gradient_clipping": 1.0,
        "optimizer": {"type": kind, "params": {"lr": 2e-3, **params}},
    }  # fmt: skip


ADAM = made_by("Adam", betas=[0.85, 0.995], eps=1e-7, weight_decay=1e-6)
ON_CPU = "a CPU computes no fp16: bf16"
OFFLOAD = "weights stay on their stage's device: `memory.swap` frees activations"
DROPPED = "DeepSpeed 0.19 refuses it, too"

FILES: tuple[tuple[str, str, tuple[Json, ...]], ...] = (
    # of the Trainer: project, why it is refused, keys
    (
        "transformers zero2",
        "",
        (*FILLED, zero(2, BUCKETS, offload_optimizer=CPU)),
    ),
    (
        "transformers zero3",
        OFFLOAD,
        (*FILLED, zero(3, LIVE, offload_optimizer=CPU, offload_param=CPU)),
    ),
    ("axolotl zero1", "", (SIZES, HALVES, LOGS, zero(1, overlap_comm=True))),
    (
        "axolotl zero1 compile",
        "DeepSpeed has no such keys of `compile` any more",
        (
            SIZES,
            HALVES,
            LOGS,
            zero(1, overlap_comm=True),
            {"compile": {"disable": False, "backend": "inductor"}},
        ),
    ),
    (
        "axolotl zero2",
        "",
        (
            SIZES,
            HALVES,
            LOGS,
            zero(2, offload_optimizer={"device": "none"}, contiguous_gradients=True, overlap_comm=True),
        ),
    ),
    ("axolotl zero3", "", (SIZES, HALVES, LOGS, zero(3, LIVE, sub_group_size=0))),
    ("axolotl zero3 bf16", "", (SIZES, BF16, LOGS, zero(3, LIVE, sub_group_size=0))),
    (
        "axolotl zero3 bf16 offload params",
        OFFLOAD,
        (SIZES, BF16, ANY, {"zero_force_ds_cpu_optimizer": False}, zero(3, LIVE, offload_param=CPU)),
    ),
    (
        "axolotl zero3 bf16 offload all",
        OFFLOAD,
        (SIZES, BF16, ANY, zero(3, LIVE, offload_optimizer=CPU, offload_param=CPU)),
    ),
    ("llama-factory z0", "", (SIZES, HALVES, ANY, zero(0, BUCKETS, round_robin_gradients=True))),
    (
        "llama-factory z2",
        "",
        (SIZES, HALVES, ANY, zero(2, BUCKETS, overlap_comm=False, round_robin_gradients=True)),
    ),
    (
        "llama-factory z2 offload",
        "",
        (SIZES, HALVES, ANY, zero(2, BUCKETS, offload_optimizer=CPU, round_robin_gradients=True)),
    ),
    (
        "llama-factory z2 autotp",
        "tensor ranks are of `graph_pipeline.tensor_parallel`",
        (SIZES, HALVES, ANY, zero(2, BUCKETS), {"tensor_parallel": {"autotp_size": 2}}),
    ),
    ("llama-factory z3", "", (SIZES, HALVES, ANY, zero(3, LIVE, overlap_comm=False))),
    (
        "llama-factory z3 offload",
        OFFLOAD,
        (SIZES, HALVES, ANY, zero(3, LIVE, offload_optimizer=CPU, offload_param=CPU)),
    ),
    (
        "llama-factory z3 partly offload",
        "",
        (
            SIZES,
            HALVES,
            ANY,
            {"zero_force_ds_cpu_optimizer": True},
            zero(3, LIVE, offload_optimizer={"device": "cpu", "pin_memory": False}),
        ),
    ),
    (
        "llama-factory alst",
        OFFLOAD,
        (
            SIZES,
            {"bf16": {"enabled": True, "auto_cast": False, **SCALE}},
            ADAMW,
            WARM_UP,
            zero(3, LIVE, offload_optimizer=CPU, offload_param=CPU),
            {
                "sequence_parallel": {"enabled": True, "size": 4, "mode": "ulysses"},
                "comms_logger": {"enabled": False},
            },
        ),
    ),
    ("llama-factory fp8", "", (SIZES, {"fp8": {"enabled": True, "hysteresis": 2}}, ANY, zero(3, LIVE))),
    (
        "llava zero2",
        "",
        (
            SIZES,
            HALVES,
            zero(
                2, overlap_comm=True, contiguous_gradients=True, sub_group_size=1e8, reduce_bucket_size="auto"
            ),
        ),
    ),
    ("llava zero3", "", (SIZES, HALVES, zero(3, LIVE))),
    (
        "llava zero3 offload",
        OFFLOAD,
        (SIZES, HALVES, BF16, ADAMW, WARM_UP, LOGS, zero(3, LIVE, offload_optimizer=CPU, offload_param=CPU)),
    ),
    (
        "qwen-vl zero2",
        "",
        (
            *FILLED,
            zero(2, BUCKETS, offload_optimizer={"device": "none", "pin_memory": True}),
        ),
    ),
    (
        "qwen-vl zero3",
        "",
        (
            *FILLED,
            zero(3, LIVE, offload_optimizer={"device": "none"}, offload_param={"device": "none"}),
        ),
    ),
    (
        "examples hf z2 decay",
        "",
        (
            SIZES,
            {"bf16": {"enabled": "auto"}},
            ADAMW,
            DECAY,
            LOGS,
            zero(2, gather_16bit_weights_on_model_save=True),
        ),
    ),
    (
        "examples hf autotp",
        "tensor ranks are of `graph_pipeline.tensor_parallel`",
        (
            SIZES,
            {"bf16": {"enabled": "auto"}},
            ADAMW,
            DECAY,
            LOGS,
            zero(2),
            {"tensor_parallel": {"autotp_size": 4}},
        ),
    ),
    # as they are
    ("examples pipeline", "", (made_by("Adam", betas=[0.9, 0.99], eps=1e-7), LOGS)),
    ("examples gan", "", ({**ADAM, "gradient_clipping": 0.0}, {"train_micro_batch_size_per_gpu": SAMPLES})),
    (
        "examples imagenet",
        "",
        (
            ADAM,
            ANY,
            zero(0),
            {"fp16": {"enabled": False}, "prescale_gradients": False, "wall_clock_breakdown": False},
        ),
    ),
    ("examples cifar compression", ON_CPU, (ADAM, FP16, zero(0), {"prescale_gradients": True})),
    ("examples bert squad", ON_CPU, (made_by("Adam", weight_decay=0.0, bias_correction=False), FP16)),
    (
        "examples bert lamb",
        DROPPED,
        (
            made_by("Lamb", max_coeff=0.3, min_coeff=0.02),
            FP16,
            {"sparse_attention": {"mode": "fixed", "block": 8}},
        ),
    ),
    (
        "examples bert layer drop",
        DROPPED,
        (ADAM, FP16, {"progressive_layer_drop": {"enabled": True, "theta": 0.6, "gamma": 0.01}}),
    ),
    (
        "examples bert 1-bit adam",
        DROPPED,
        (made_by("OneBitAdam", freeze_step=90, cuda_aware=False, comm_backend_name="nccl"), FP16),
    ),
    ("examples bert 0/1 adam", DROPPED, (made_by("ZeroOneAdam", var_freeze_step=90), FP16)),
    (
        "examples random layer-token drop",
        "layers would be changed while they train",
        (
            ADAM,
            zero(0),
            {
                "data_efficiency": {
                    "enabled": True,
                    "data_routing": {"enabled": True, "random_ltd": {"enabled": True}},
                }
            },
        ),
    ),
    (
        "examples zenflow",
        "gradients go to the CPU in parts",
        (
            made_by("AdamW", weight_decay=0.02),
            BF16,
            ANY,
            zero(2, offload_optimizer=CPU, zenflow={"topk_ratio": 0.2, "update_interval": 4}),
        ),
    ),
)
"""Name, reason of a refusal, parts."""


def json_of(parts: tuple[Json, ...]) -> Json:
    """Return the file of these parts."""
    return functools.reduce(lambda one, other: one | other, parts, {})


# ---- both sides ------------------------------------------------------------------------------------------------


def _model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": WORDS}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    )


def _rows() -> list[Json]:
    ids = torch.randint(0, WORDS, (3 * SAMPLES, LENGTH), generator=torch.Generator().manual_seed(6))
    return [{"input_ids": row, "labels": row} for row in ids]


def _arguments(side: Side, config: Json, **more: Any) -> Any:
    from transformers import TrainingArguments

    steps = SAMPLES // UNIT // dist.get_world_size()
    is_half = (config.get("bf16") or {}).get("enabled") is True
    return TrainingArguments(
        str(side.own), per_device_train_batch_size=UNIT, gradient_accumulation_steps=steps, max_steps=2,
        logging_steps=1, learning_rate=3e-3, lr_scheduler_type="constant", bf16=is_half, report_to="none",
        disable_tqdm=True, use_cpu=True, seed=7, save_strategy="no", dataloader_pin_memory=False, **more,
    )  # fmt: skip


def _by_trainer(side: Side, config: Json) -> list[list[float]]:
    from transformers import Trainer
    from transformers.integrations import deepspeed as stock

    from gpp_plugin import GraphPipelineTrainer

    rows = _rows()
    if side.is_peer:
        trainer: Any = Trainer(_model(), _arguments(side, config), train_dataset=rows)
    else:
        block = {"stages": 2, "verify": False, "comm_timeout_s": 30}
        args = _arguments(side, config, deepspeed={**config, "graph_pipeline": block})
        trainer = GraphPipelineTrainer(_model(), args, train_dataset=rows)
    try:
        trainer.train()
    finally:
        stock.unset_hf_deepspeed_config()
    if not side.is_peer:
        side.keep(trainer.engine)
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return [[row["loss"], float(row["grad_norm"])] for row in logged]


def _by_initialize(side: Side, config: Json) -> list[list[float]]:
    import deepspeed

    rows = _rows()[:SAMPLES]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    model = _model()
    if side.is_peer:
        unit = config["train_micro_batch_size_per_gpu"]
        parts = [{key: value[n : n + unit] for key, value in batch.items()} for n in range(0, SAMPLES, unit)]
        mean = torch.stack([model(**part).loss for part in parts]).mean()
        mean.backward()
        return [[float(mean), _norm([p.grad for p in model.parameters() if p.grad is not None])]]
    import gpp_plugin

    config = {**config, "graph_pipeline": {"stages": 2, "verify": False, "comm_timeout_s": 30}}
    wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=batch)
    engine = side.keep(deepspeed.initialize(model=wrapped, config=config)[0])
    engine.retain_gradients()
    loss = float(engine.train_batch(iter([batch])))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dict(engine.gradients))
    whole = {name: value for own in every for name, value in own.items()}  # a tied one is once in it
    return [[loss, _norm(list(whole.values()))]]


def _norm(gradients: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def _shipped(config: Json, side: Side) -> Seen:
    """Return the first steps under a configuration.

    Raises:
        RuntimeError: it was refused when the model was captured already.
    """
    from gpp_plugin.errors import GppError
    from gpp_plugin.model.model_source import ModelSource

    captured: list[bool] = []
    own = ModelSource.prepare_plan

    def watched(*given: Any, **more: Any) -> Any:
        captured.append(True)
        return own(*given, **more)

    ModelSource.prepare_plan = watched  # type: ignore[method-assign]
    is_auto = config["train_batch_size"] == "auto"
    try:
        steps = (_by_trainer if is_auto else _by_initialize)(side, config)
    except GppError as error:
        lines = str(error).splitlines()
        if captured or not all(": " in line for line in lines):  # one a key
            raise RuntimeError(f"late, or not a line a key: {lines[0]}") from error
        raise
    finally:
        ModelSource.prepare_plan = own  # type: ignore[method-assign]
    seen: Seen = {"loss": steps[0][0], "norm": steps[0][1]}
    if is_auto and "scheduler" not in config:
        seen["second loss"] = steps[1][0]
    return seen


for _name, _why, _parts in FILES:
    _config = json_of(_parts)
    add_scenario(
        functools.partial(_shipped, _config),
        name=_name.replace(" ", "_").replace("/", "_").replace("-", "_"),
        peer="files",
        of=_name.split()[0],
        what=" ".join(_name.split()[1:]),
        here=REFUSED if _why else SAME,
        why=_why,
        most=2e-2 if (_config.get("bf16") or {}).get("enabled") is True else 1e-5,
    )
