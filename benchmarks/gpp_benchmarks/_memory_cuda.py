"""One rank of `gpp bench memory --device cuda`: a step of a GPT-2 in two stages that share a device, under a cap.

python -m gpp_benchmarks._memory_cuda SETTINGS_JSON
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from gpp_benchmarks._ranks import bench_ranks, rank_settings, start_engine
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.launch import emit_event, end_rank
from gpp_plugin.profile.device_memory import FRAGMENTATION, use_cublas

NUM_RANKS = 2
TIMEOUT_S = 600.0
TOLERANCE = 0.08
OVER = 1.15
"""A batch this much larger than the largest predicted to fit must not train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaCase:
    """What one job runs.

    Args:
        unit: samples of a micro-batch; a mini-batch has four.
        cap_gb: what PyTorch's allocator may have on each rank.
    """

    unit: int
    cap_gb: float
    layers: int = 8
    hidden: int = 512
    length: int = 256


def run_on_cuda(cap_gb: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return the rows of a small batch and of the largest predicted to fit, and whether a larger one fails."""
    first = CudaCase(unit=2, cap_gb=cap_gb)
    rows = _rows(first)
    room = (1.0 - FRAGMENTATION) * cap_gb * 1e9 - max(row["workspace_bytes"] for row in rows)
    per_sample = max(row["growing_bytes"] / first.unit / (room - row["fixed_bytes"]) for row in rows)
    largest = replace(first, unit=max(math.floor(1.0 / per_sample), 1))
    tell(f"largest micro-batch predicted to fit {cap_gb} GB a rank: {largest.unit} samples")
    rows += _rows(largest)
    over = replace(first, unit=math.ceil(OVER * largest.unit))
    try:
        rows_over = _rows(over)
    except RuntimeFailure as error:
        refused = "out of memory" in str(error).lower()
        tell(f"{over.unit} samples: {'out of memory' if refused else error}")
    else:
        refused = False
        rows += rows_over
    close = all(abs(row["ratio"] - 1.0) <= TOLERANCE for row in rows)
    return {"rows": rows, "largest_unit": largest.unit, "larger_fails": refused, "ok": close and refused}


def _rows(case: CudaCase) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    options: dict[str, Any] = {"num_ranks": NUM_RANKS, "timeout_s": TIMEOUT_S}
    for event in bench_ranks("_memory_cuda", asdict(case), **options, environment=None):
        rows += event["rows"]
    return rows


def main() -> None:
    """Train two steps; rank 0 reports a row for each rank."""
    from gpp_plugin.integrations.huggingface.hf_models import build_model_of, config_of, make_example_batch

    case = CudaCase(**rank_settings())
    device = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()  # the one `initialize` takes
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(case.cap_gb * 1e9 / total, 1.0), device)
    workspace = use_cublas(torch.device("cuda", device), torch.float32)
    torch.manual_seed(0)
    plain = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 2048, "n_embd": case.hidden,
        "n_layer": case.layers, "n_head": case.hidden // 64, "n_positions": case.length,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = build_model_of(config_of(plain, "gpp bench memory"))
    batch = make_example_batch(model, num_samples=4 * case.unit, length=case.length)
    config = {
        "train_batch_size": 4 * case.unit,
        "train_micro_batch_size_per_gpu": case.unit,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "graph_pipeline": {
            "planner": "uniform",
            "stages": NUM_RANKS,
            "schedule": "1f1b",
            "slicing": "off",
            "comm_timeout_s": 120,
            "memory": {"recompute": "off", "swap": "off"},
        },
    }
    engine = start_engine(model, batch, config)
    for _ in range(2):  # the optimizer's state is there from the first step on
        engine.train_batch(data_iter=iter([batch]))
    report = engine.memory_report()
    if dist.get_rank() == 0:
        emit_event(rows=[_row(case, rank, workspace) for rank in report.ranks])
    dist.barrier()
    end_rank()


def _row(case: CudaCase, rank: Any, workspace: int) -> dict[str, Any]:
    part = rank.predicted
    counted = rank.measured_peak_bytes - workspace  # a plan's limit has cuBLAS's off already
    growing = part.activations + part.transient + part.inputs
    return {
        "model": "gpt2",
        "plan": "none",
        "rank": rank.rank,
        "stage": rank.stage,
        "unit": case.unit,
        "predicted_bytes": rank.predicted_peak_bytes,
        "counted_bytes": counted,
        "workspace_bytes": workspace,
        "ratio": counted / rank.predicted_peak_bytes,
        "growing_bytes": growing,
        "fixed_bytes": rank.predicted_peak_bytes - growing,
    }


if __name__ == "__main__":
    main()
