"""One rank of `gpp bench topologies`: one graph on one runtime.

python -m gpp_benchmarks._topology_ranks SETTINGS_JSON
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from gpp_benchmarks._ranks import rank_settings
from gpp_benchmarks._topology_models import (
    Topology,
    gather_gradients,
    largest_error,
    reference_gradients,
    topologies,
)
from gpp_benchmarks._topology_steps import Step, deepspeed_step, gpp_step, megatron_step, torch_step
from gpp_plugin.integrations.deepspeed.stock_engine import join_ranks
from gpp_plugin.launch import emit_event, end_rank

STEPS = {
    "gpp": gpp_step,
    "deepspeed": deepspeed_step,
    "torch": torch_step,
    "megatron": megatron_step,
    "megatron_patched": megatron_step,
}
TIMED_BELOW = 1e-9
WARM_UP = 2


def main() -> None:
    """Run the steps of this rank; the first rank that knows reports."""
    settings = rank_settings()
    topology = next(t for t in topologies() if t.name == settings["topology"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    join_ranks()
    make_step = STEPS[settings["system"]]
    dist.barrier()
    watchdog = threading.Timer(settings["limit_s"], _give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        _measure(topology, make_step(topology), settings["rounds"])
    except Exception as error:
        emit_event(event="refused", rank=dist.get_rank(), reason=f"{type(error).__name__}: {error}")
        # the launcher ends all ranks; this one must not look like the failure
        time.sleep(settings["limit_s"])
    watchdog.cancel()
    dist.barrier()
    end_rank()


def _measure(topology: Topology, step: Step, rounds: int) -> None:
    found = gather_gradients(topology, step())
    error = largest_error(found, reference_gradients(topology))
    times = []
    if error < TIMED_BELOW:
        for index in range(WARM_UP + rounds):
            dist.barrier()
            start = time.perf_counter()
            step()
            if index >= WARM_UP:
                times.append(time.perf_counter() - start)
    own = torch.tensor([statistics.median(times) if times else 0.0], dtype=torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        emit_event(event="done", error=error, iteration_s=own.item() if times else None)


def _give_up() -> None:
    emit_event(event="deadlock")
    os._exit(0)


if __name__ == "__main__":
    main()
