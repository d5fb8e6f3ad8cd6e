"""One rank of `gpp bench peers`: some scenarios, one after the other, on one side.

python -m gpp_benchmarks.peers._rank SETTINGS_JSON
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpp_benchmarks._ranks import rank_settings
from gpp_benchmarks.peers import all_scenarios
from gpp_benchmarks.peers._scenario import RAISED, Scenario, Seen, Side, ended, raised_as
from gpp_plugin.integrations.deepspeed.stock_engine import join_ranks
from gpp_plugin.launch import emit_event, end_rank


def main() -> None:
    """Run the scenarios; rank 0 tells what each of them showed."""
    settings = rank_settings()
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings["limit_s"]))
    join_ranks()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    known = {own.name: own for own in all_scenarios()}
    for name in settings["names"]:
        if dist.get_rank() == 0:
            emit_event(event="begin", name=name)
        folder = Path(settings["folder"]) / name
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        seen = _seen_by_all(known[name], Side(is_peer=settings["is_peer"], folder=folder))
        if dist.get_rank() == 0:
            emit_event(event="seen", name=name, seen=seen)
    dist.barrier()
    end_rank()


def _seen_by_all(own: Scenario, side: Side) -> Seen:
    """Return what rank 0 saw, or what the first rank that raised did; collective."""
    assert own.run is not None
    torch.manual_seed(0)
    try:
        with ended(side):
            seen = own.run(side)
    except Exception as error:
        seen = raised_as(error)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    return next((one for one in every if RAISED in one), every[0])


if __name__ == "__main__":
    main()
