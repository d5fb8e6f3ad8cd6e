"""Malformed configurations, clusters, batch sizes and plans: each is refused by one line that names the key."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gpp_plugin.config.reader import batch_arithmetic, read_config
from gpp_plugin.errors import GppError
from gpp_plugin.integrations.deepspeed.config_values import derive_stage_config
from gpp_plugin.ir.serialize import dumps
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.plan_form import plan_of_envelope
from tests.ir.test_serialize import PLAN as TWO_STAGES

NAN, INF = float("nan"), float("inf")
DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]

BLOCKS: list[tuple[str, Any]] = [
    ("enabled", "yes"), ("enabled", 1), ("planner", "graphpype"), ("planner", 3), ("planner", None), ("planner", ""),
    ("stages", 0), ("stages", -1), ("stages", 2.5), ("stages", "2"), ("stages", True), ("stages", [2]), ("stages", NAN),
    ("virtual_stages", 0), ("virtual_stages", "many"), ("colocate", "on"), ("colocate", True), ("data_parallel", 0),
    ("data_parallel", -2), ("data_parallel", "all"), ("schedule", "1b1f"), ("schedule", 5), ("schedule", "0f0b"),
    ("micro_batch_sizes", 0), ("micro_batch_sizes", "big"), ("micro_batch_sizes", {"loss": 0}),
    ("micro_batch_sizes", {"loss": "half"}), ("micro_batch_sizes", [1, 2]), ("granularity", "module"),
    ("granularity", 2), ("slicing", 0), ("slicing", "some"), ("slicing", -1), ("memory", 8), ("memory", {"limit": 8}),
    ("memory", {"limit_gb": -1}), ("memory", {"limit_gb": NAN}), ("memory", {"limit_gb": INF}),
    ("memory", {"limit_gb": "8GB"}), ("memory", {"swap": "on"}), ("memory", {"recompute": 1}), ("lengths", 64),
    ("lengths", {"max": 0}), ("lengths", {"typical": [0]}), ("lengths", {"max": 8, "typical": [16]}),
    ("lengths", {"max": 8, "typical": "4"}), ("lengths", {"max": {"input_ids": -3}}), ("cluster", 4), ("cluster", ["a"]),
    ("plan", 7), ("plan", ["stages"]), ("profile_dir", 1), ("loss_mean", "sum"), ("units", 0), ("units", "8"),
    ("unit_order", "random"), ("mode", "Async"), ("vertical_sync", "no"), ("vertical_sync", True), ("p2p", "nccl"),
    ("comm_timeout_s", 0), ("comm_timeout_s", -5), ("comm_timeout_s", NAN), ("comm_timeout_s", INF),
    ("comm_timeout_s", "60s"), ("trace_path", 0), ("seed", -1), ("seed", 2**64), ("seed", 1.5), ("weights", 3),
    ("verify", "true"), ("eager", "layers.*"), ("eager", [1]), ("loader_workers", -1), ("loader_workers", "two"),
    ("frozen_prefetch", 2), ("frozen_prefetch", -1), ("frozen_prefetch", "on"), ("stage", 2), ("Planner", "auto"), ("limit_gb", 8),
    ("\x1b[2J", 1), ("stages", DEEP),
]  # fmt: skip

DEEPSPEED: list[tuple[str, Any]] = [
    ("optimizer.lr", 1e-2), ("optimizer", {"params": {"lr": 1e-2}}), ("dump_state", "false"),
    ("gradient_clipping", -1), ("gradient_clipping", NAN), ("gradient_clipping", INF), ("gradient_clipping", "1.0"),
    ("gradient_clipping", True), ("gradient_clipping", [1]), ("gradient_clipping", "auto"),
    ("gradient_cliping", 1.0), ("gradient_clip", 1.0), ("optimiser", {}), ("zero_optimisation", {"stage": 1}),
    ("zero_optimization.stage", -1), ("zero_optimization.stage", 4),
    ("zero_optimization.stage", "1"), ("zero_optimization.stage", 1.5), ("zero_optimization.stage", NAN), ("tensor_parallel.autotp_size", "two"),
    ("zero_optimization.stages", 1), ("zero_optimization.reduce_bucket_size", 0),
    ("zero_optimization.reduce_bucket_size", -5e8), ("zero_optimization.reduce_bucket_size", "5e8"),
    ("zero_optimization", 1), ("zero_optimization", True), ("zero_optimization", "stage1"),
    ("fp16", True), ("fp16.enabled", "false"), ("fp16.loss_scale", -1), ("fp16.loss_scale", NAN),
    ("fp16.initial_scale_power", 2000), ("fp16.initial_scale_power", 1.5), ("fp16.loss_scale_window", 0),
    ("fp16.hysteresis", 0), ("fp16.min_loss_scale", -1), ("fp16.loss_scal", 0), ("bf16.enabled", 1), ("bf16", "on"),
    ("optimizer", "AdamW"), ("optimizer.type", 3), ("optimizer.parms", {}), ("optimizer.params", [1e-3]),
    ("optimizer.params.lr", "1e-3"), ("optimizer.params.lr", -1e-3), ("optimizer.params.lr", NAN),
    ("optimizer.params.betas", [0.9]), ("optimizer.params.betas", 0.9), ("optimizer.params.betas", [0.9, 1.5]),
    ("optimizer.params.eps", -1e-8), ("optimizer.params.weight_decay", INF), ("scheduler", "WarmupLR"),
    ("scheduler.type", 1), ("scheduler.params.warmup_num_steps", -1), ("scheduler.params.warmup_max_lr", NAN),
    ("data_types.grad_accum_dtype", "fp8"), ("data_types", "fp32"), ("flops_profiler", True), ("communication_data_type", "int8"), ("wall_clock_breakdown", "yes"),
    ("sparse_gradients", True), ("gradient_allreduce_op", "sum"), ("gradient_predivide_factor", 0),
]  # fmt: skip

SIZES: list[tuple[str, Any]] = [
    ("train_batch_size", 0), ("train_batch_size", -8), ("train_batch_size", 7), ("train_batch_size", "16"),
    ("train_batch_size", 2.0), ("train_batch_size", NAN), ("train_batch_size", True),
    ("train_micro_batch_size_per_gpu", 3), ("train_micro_batch_size_per_gpu", 0),
    ("train_micro_batch_size_per_gpu", [2]), ("gradient_accumulation_steps", 3), ("gradient_accumulation_steps", -1),
    ("gradient_accumulation_steps", "two"), ("train_micro_batch_size_per_gpu", 32),
]  # fmt: skip

CLUSTERS: list[tuple[str, Any]] = [
    ("name", None), ("name", 5), ("name", ""), ("name", "x" * 1000), ("nodes", 0), ("nodes", -1), ("nodes", 1.5),
    ("nodes", "2"), ("nodes", 100_000), ("nodes", 10**18), ("nodes", NAN), ("devices", []), ("devices", {}),
    ("devices", None), ("devices.0", 4), ("devices.0.memory_gb", 0), ("devices.0.memory_gb", -16),
    ("devices.0.memory_gb", NAN), ("devices.0.memory_gb", INF), ("devices.0.memory_gb", "16GB"),
    ("devices.0.tflops", 0), ("devices.0.tflops", {}), ("devices.0.tflops", {"fp64": 1}), ("devices.0.tflops", [1]),
    ("devices.0.tflops", {"fp32": NAN}), ("devices.0.count", 0), ("devices.0.count", 10**9),
    ("devices.0.efficiency", 1.5), ("devices.0.efficiency", -1), ("devices.0.launch_us", -1),
    ("devices.0.memory_gb_per_s", 1e300), ("devices.0.tflop", 1), ("links", []), ("links", "nvlink"),
    ("links.0.span", 0), ("links.0.span", "4"), ("links.0.gb_per_s", 0), ("links.0.gb_per_s", INF),
    ("links.0.latency_us", -1), ("links.0.adapters", 9), ("links.0.bandwidth", 1), ("links.0.name", 0), ("link", []),
]  # fmt: skip

PLANS: list[tuple[str, Any]] = [
    ("mini_batch", 7), ("mini_batch", 0), ("mini_batch", 2**31 - 8), ("loss_unit", 3), ("stages", []), ("stages", None),
    ("stages.1.name", "a"), ("stages.1.blocks", []), ("stages.1.blocks", ["x"]), ("stages.1.ranks", []),
    ("stages.1.ranks", [0, 0]), ("stages.1.ranks", [5]), ("stages.1.ranks", [-1]), ("stages.1.micro_batch_size", 3),
    ("stages.1.in_flight", 0), ("stages.1.schedule", "2b2f"), ("stages.1.k", 0),
    ("stages.1.tensor", 2), ("stages.1.forward_us", NAN), ("stages.1.forward_us", -1.0), ("stages.0.num_sliced", -1),
    ("edges.0.src", 1), ("edges.0.dst", 7), ("edges.0.dst", 0), ("edges.0.gradient_tensors", ["other"]),
    ("edges.0.batch_tensors", ["h", "h"]), ("edges.0.src_shard_axis", -1), ("tensors.0.shape", [-4, 8]),
    ("tensors.0.dtype", "float12"), ("tensors.0.layout.axis", 5), ("losses", ["nobody"]), ("mode", "later"),
    ("tensors.0.layout.kind", "unit"),
]  # fmt: skip


def _with(valid: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = json.loads(json.dumps(valid))
    at: Any = changed
    *way, last = path.split(".")
    for key in way:
        at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
    at[int(last) if isinstance(at, list) else last] = value
    return changed


def _named(rows: list[tuple[str, Any]]) -> list[Any]:
    return [
        pytest.param(*row, id=f"{i}-{row[0].encode('unicode_escape').decode()}") for i, row in enumerate(rows)
    ]


def _refused(read: Callable[[], object], key: str) -> None:
    with pytest.raises(GppError) as caught:
        read()
    line = str(caught.value)
    assert "\n" not in line and 20 < len(line) < 600, line
    assert key in line, line


BASE = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "graph_pipeline": {},
}
CLUSTER = {
    "name": "c",
    "nodes": 2,
    "devices": [{"name": "d", "count": 4, "memory_gb": 16, "tflops": {"fp32": 10}, "memory_gb_per_s": 900}],
    "links": [{"name": "in", "span": 4, "gb_per_s": 50}, {"name": "out", "gb_per_s": 10}],
}
PLAN = json.loads(dumps(TWO_STAGES))


@pytest.mark.parametrize(("key", "value"), _named(BLOCKS))
def test_blocks(key: str, value: Any) -> None:
    _refused(lambda: read_config({**BASE, "graph_pipeline": {key: value}}), f"graph_pipeline.{key}")


@pytest.mark.parametrize(("path", "value"), _named(DEEPSPEED))
def test_deepspeed_values(path: str, value: Any) -> None:
    config = _with(BASE, path, value)
    key = path.partition(".")[0]
    _refused(lambda: derive_stage_config(config, mini_batch=16, degree=1, device_type="cpu"), key)


@pytest.mark.parametrize(("key", "value"), _named(SIZES))
def test_batch_sizes(key: str, value: Any) -> None:
    _refused(lambda: batch_arithmetic({**BASE, key: value}, 2), key)


@pytest.mark.parametrize(("path", "value"), _named(CLUSTERS))
def test_clusters(path: str, value: Any) -> None:
    _refused(
        lambda: read_cluster(_with(CLUSTER, path, value)), path.rpartition(".")[2] if "." in path else path
    )


@pytest.mark.parametrize(("path", "value"), _named(PLANS))
def test_plans(path: str, value: Any) -> None:
    plan_of_envelope(PLAN)
    _refused(lambda: plan_of_envelope(_with(PLAN, f"value.{path}", value)), "")


def test_too_many_devices() -> None:
    _refused(lambda: read_cluster("dgx_h100", num_devices=100_000), "100000 devices")
