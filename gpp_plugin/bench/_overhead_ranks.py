"""One rank of `gpp bench overhead`: every runtime in turn, in the same processes.

python -m gpp_plugin.bench._overhead_ranks SETTINGS_JSON
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from gpp_plugin.bench._chains import ChainRuntime, ChainSize, make_runtimes
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.integrations.pipeline_peer import join_ranks
from gpp_plugin.launch import emit_event

WARM_UP = 3
LARGEST_DIFFERENCE = 1e-4


def main() -> None:
    """Measure on this rank; rank 0 reports."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    join_ranks()
    runtimes = make_runtimes(settings["runtimes"], ChainSize(**settings["size"]))
    for _ in range(WARM_UP):
        _check_gradients({name: _gradient_after(runtime) for name, runtime in runtimes.items()})
    gc.collect()
    gc.freeze()  # what was made so far lives on: no runtime pays for looking at it again
    names = list(runtimes)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for round_index in range(settings["rounds"]):
        for name in _rotated(names, round_index):
            times[name].append(_time_once(runtimes[name]))
        if os.environ["RANK"] == "0":
            emit_event(event="round", index=round_index + 1)
    slowest = _slowest(times)
    if os.environ["RANK"] == "0":
        emit_event(event="times", times=slowest)
    dist.barrier()
    dist.destroy_process_group()


def _gradient_after(runtime: ChainRuntime) -> torch.Tensor | None:
    runtime.run()
    gradient = runtime.gradient()
    copy = None if gradient is None else gradient.clone()
    runtime.finish()
    return copy


def _check_gradients(gradients: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse to compare runtimes that do not do the same work."""
    found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    reference = next(iter(found.values()), None)
    for name, gradient in found.items():
        assert reference is not None
        difference = float((gradient - reference).norm() / reference.norm())
        if not difference <= LARGEST_DIFFERENCE:
            raise RuntimeFailure(
                f"{name} has another gradient than {next(iter(found))} on rank {dist.get_rank()}: they differ "
                f"by {difference:.1e} of its norm; their times cannot be compared"
            )


def _rotated(names: Sequence[str], by: int) -> list[str]:
    by %= len(names)
    return [*names[by:], *names[:by]]


def _time_once(runtime: ChainRuntime) -> tuple[float, float]:
    """Return the seconds of the micro-batches and of the optimizer step."""
    gc.collect()  # no runtime pays for what another one left behind
    dist.barrier()
    start = time.perf_counter()
    done = runtime.run()
    runtime.finish()
    return done - start, time.perf_counter() - done


def _slowest(times: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, list[list[float]]]:
    """Return the times of the slowest rank in each round, runtime -> [[seconds, seconds of the step], ...]."""
    slowest = {}
    for name, own in times.items():
        both = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        slowest[name] = both.tolist()
    return slowest


if __name__ == "__main__":
    main()
