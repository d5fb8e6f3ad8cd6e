"""What each rank runs in the tests of the engine; importable by the processes that run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import _world

from tests.models import build
from tests.runtime.odd_models import build_odd

B, U = 8, 2


def config_of(**changes: Any) -> dict[str, Any]:
    block = changes.pop("block", {})
    config: dict[str, Any] = {
        "train_batch_size": B,
        "train_micro_batch_size_per_gpu": U,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "steps_per_print": 1000,
        # tests hold losses and gradients against one process themselves
        "graph_pipeline": {"comm_timeout_s": 60, "verify": False, **block},
    }
    return {**config, **changes}


def make_engine(model: nn.Module, sample: dict[str, Any], config: dict[str, Any], **given: Any) -> Any:
    import deepspeed

    import gpp_plugin

    wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=sample)
    return deepspeed.initialize(model=wrapped, config=config, **given)[0]


def steps(engine: Any, batches: list[dict[str, Any]]) -> list[float]:
    return [float(engine.train_batch(data_iter=iter([batch]))) for batch in batches]


def bytes_beside(model: nn.Module, stage: nn.Module) -> int:
    """Return the bytes of a user's model that are not its stage's."""
    held = {t.untyped_storage().data_ptr() for t in (*stage.parameters(), *stage.buffers())}
    own = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    return sum(t.nbytes for t in own if t.untyped_storage().data_ptr() not in held)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def train_with_everything(zero: int, directory: str) -> dict[str, Any]:
    """Clipping, parameter groups, a schedule, and every report of the JSON switched on."""
    model, make_batch = build("t5")
    batches = [make_batch(B, seed) for seed in range(4)]
    config = config_of(
        zero_optimization={"stage": zero},
        gradient_clipping=0.5,
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 3,
                                                  "warmup_type": "linear"}},
        csv_monitor={"enabled": True, "output_path": directory, "job_name": "job"},
        tensorboard={"enabled": True, "output_path": directory, "job_name": "board"},
        wall_clock_breakdown=True,
        comms_logger={"enabled": True},
        flops_profiler={"enabled": True, "profile_step": 1},
        block={"stages": 2},
    )  # fmt: skip
    engine = make_engine(model, batches[0], config, model_parameters=decay_groups(model))
    losses, norms, rates = [], [], []
    first_rate = engine.get_lr()[0]
    for batch in batches:
        losses += steps(engine, [batch])
        norms.append(engine.get_global_grad_norm())
        rates.append(engine.get_lr())
    return {"losses": losses, "norms": norms, "rates": rates, "first_rate": first_rate}


def train_in_precision(precision: str) -> dict[str, Any]:
    """Mixed precision on T5 (tied embeddings) and CLIP."""
    answers = {}
    for name in ("t5", "clip"):
        model, make_batch = build(name)
        batches = [make_batch(B, seed) for seed in range(3)]
        config = config_of(
            **{precision: {"enabled": True}}, zero_optimization={"stage": 1}, block={"stages": 2}
        )
        engine = make_engine(model, batches[0], config)
        answers[name] = {
            "losses": steps(engine, batches),
            "dtypes": {str(p.dtype) for p in engine.module.parameters()},
            "resident": bytes_beside(model, engine.module),
            "says": (
                engine.zero_optimization_stage(),
                engine.gradient_clipping(),
                engine.bfloat16_enabled(),
            ),
        }
    return answers


def evaluate() -> dict[str, Any]:
    """Evaluation of batches of any size, with and without labels, with dropout in training."""
    model, make_batch = build("gpt2", dropout=0.3)
    engine = make_engine(model, make_batch(B, 0), config_of(block={"stages": 2, "data_parallel": 2}))
    answers: dict[str, Any] = {"losses": {}}
    groups = len(_world.pg_map)
    for size in (16, 5, 1):
        loss, logits = engine.eval_batch(iter([make_batch(size, size)]), return_logits=True)
        answers["losses"][size] = (float(loss), logits)
    answers["plain"] = float(engine.eval_batch(iter([make_batch(16, 16)])))
    unlabelled = {k: v for k, v in make_batch(6, 6).items() if k != "labels"}
    answers["unlabelled"] = engine.eval_batch(iter([unlabelled]), compute_loss=False)
    answers["after"] = steps(engine, [make_batch(B, 0)])[0]
    answers["groups made"] = len(_world.pg_map) - groups
    return answers


def refuse() -> dict[str, str]:
    """Each mistake and what it says."""
    import deepspeed

    model, make_batch = build("two_branch")
    batch = make_batch(B, 0)
    said: dict[str, str] = {}

    def attempt(name: str, action: Any) -> None:
        try:
            action()
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    engine = make_engine(model, batch, config_of(block={"stages": 2}))
    for name in ("forward", "backward", "step", "no_sync"):
        attempt(name, getattr(engine, name))
    attempt("no data", engine.train_batch)
    attempt("short", lambda: engine.train_batch(data_iter=iter([make_batch(3, 0)])))
    attempt("no iterator", lambda: engine.train_batch(data_iter=[batch]))
    attempt("mistyped", lambda: make_engine(model, batch, config_of(graph_pipline={})))
    attempt("unknown key", lambda: make_engine(model, batch, config_of(block={"stage": 2})))
    attempt("too many", lambda: make_engine(model, batch, config_of(block={"stages": 9})))
    offloaded = {"stage": 3, "offload_param": {"device": "cpu"}}
    attempt("offload", lambda: make_engine(model, batch, config_of(zero_optimization=offloaded)))
    attempt("no sample", lambda: deepspeed.initialize(model=model, config=config_of()))
    return said


def different_data() -> dict[str, str]:
    """Ranks that are given different batches must not train silently; mode async notices a call later."""
    said = {}
    for mode in ("sync", "async"):
        model, make_batch = build("two_branch")
        engine = make_engine(model, make_batch(B, 0), config_of(block={"stages": 1, "mode": mode}))
        try:
            steps(engine, [make_batch(B, torch.distributed.get_rank()), make_batch(B, 2)])
        except Exception as error:
            said[mode] = str(error)
    return said


def evaluate_a_head() -> dict[str, Any]:
    """Outputs and state that training does not use; a batch that gives no loss."""
    model, make_batch = build_odd("evaluation_head")
    block = {"plan": {"stages": [{"modules": ["stem"]}, {"modules": ["*"]}]}}
    engine = make_engine(model, make_batch(B, 0), config_of(block=block))
    asked = ("extra", "turned", "norm")
    _, found = engine.eval_batch(iter([make_batch(B, 1)]), return_logits=True, outputs=asked)
    unlabelled = {"a": make_batch(B, 1)["a"]}
    try:
        engine.eval_batch(iter([unlabelled]), return_logits=True)
        refusal = ""
    except Exception as error:
        refusal = str(error)
    return {"found": found, "refusal": refusal, "state": engine.gather_state_dict()}


def fail_and_go_on(stages: int) -> dict[str, Any]:
    """A batch that fails in its third micro-batch, then a good one."""
    model, make_batch = build("gpt2")
    good, bad = make_batch(B, 0), make_batch(B, 1)
    bad["input_ids"][4, 0] = 10**6
    engine = make_engine(model, good, config_of(block={"stages": stages, "comm_timeout_s": 5}))
    engine.retain_gradients()
    said = []
    for batch in (bad, good):
        try:
            steps(engine, [batch])
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return {"said": said, "gradients": engine.gradients if not said[1] else {}}
