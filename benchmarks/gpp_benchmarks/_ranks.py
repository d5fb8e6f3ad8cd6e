"""How benchmarks start ranks on this machine, and an engine on them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpp_plugin.launch import run_ranks

ON_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def bench_ranks(
    module: str,
    settings: Mapping[str, Any],
    *,
    num_ranks: int,
    timeout_s: float,
    environment: Mapping[str, str] | None = ON_CPU,
) -> Iterator[dict[str, Any]]:
    """Run ``gpp_benchmarks.MODULE SETTINGS_JSON`` once a rank and yield what rank 0 tells (`run_ranks`)."""
    name, arguments = f"gpp_benchmarks.{module}", [json.dumps(settings)]
    return run_ranks(name, arguments, num_ranks=num_ranks, timeout_s=timeout_s, environment=environment)


def rank_settings() -> Any:
    """Return the settings that this rank was started with; torch computes on one thread from now on."""
    import torch  # not where ranks are started: options and help are there without it

    torch.set_num_threads(1)
    return json.loads(sys.argv[1])


def start_engine(model: Any, sample_batch: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Return the engine that trains a model on all ranks, and prints no steps; collective."""
    import deepspeed

    import gpp_plugin

    wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=sample_batch)
    return deepspeed.initialize(model=wrapped, config={"steps_per_print": 10**9, **config})[0]


def over_ranks(times: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return rounds, seconds of the slowest rank, but in column 1 processor seconds of all together; collective."""
    import torch
    import torch.distributed as dist

    most = torch.tensor(times, dtype=torch.float64)
    total = most.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    most[:, 1] = total[:, 1]
    found: list[list[float]] = most.tolist()
    return found
