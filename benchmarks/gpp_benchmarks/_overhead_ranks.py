"""One rank of `gpp bench overhead`: every runtime in turn, in the same processes.

python -m gpp_benchmarks._overhead_ranks SETTINGS_JSON
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

from gpp_benchmarks._chains import ChainRuntime, ChainSize, make_runtimes
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.integrations.deepspeed.pipeline_peer import join_ranks
from gpp_plugin.launch import emit_event
from gpp_plugin.relative_errors import tensor_error

Sample = tuple[float, float, float]
"""Seconds: of all micro-batches, of this process's threads meanwhile, of the optimizer step."""

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
    times: dict[str, list[Sample]] = {name: [] for name in names}
    for round_index in range(settings["rounds"]):
        for name in _rotated(names, round_index):
            times[name].append(_time_once(runtimes[name]))
        if os.environ["RANK"] == "0":
            emit_event(event="round", index=round_index + 1)
    found = _over_ranks(times)
    if os.environ["RANK"] == "0":
        emit_event(event="times", times=found)
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
        difference = tensor_error(gradient, reference)
        if not difference <= LARGEST_DIFFERENCE:
            raise RuntimeFailure(
                f"{name} has another gradient than {next(iter(found))} on rank {dist.get_rank()}: they differ "
                f"by {difference:.1e} of its norm; their times cannot be compared"
            )


def _rotated(names: Sequence[str], by: int) -> list[str]:
    by %= len(names)
    return [*names[by:], *names[:by]]


def _time_once(runtime: ChainRuntime) -> Sample:
    gc.collect()  # no runtime pays for what another one left behind
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    done = runtime.run()
    cpu = time.process_time() - cpu_start
    runtime.finish()
    return done - start, cpu, time.perf_counter() - done


def _over_ranks(times: Mapping[str, Sequence[Sample]]) -> dict[str, list[list[float]]]:
    """Return what all ranks took in each round: times of the slowest rank, processor time of all together."""
    found = {}
    for name, own in times.items():
        most = torch.tensor(own, dtype=torch.float64)
        total = most.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        most[:, 1] = total[:, 1]
        found[name] = most.tolist()
    return found


if __name__ == "__main__":
    main()
