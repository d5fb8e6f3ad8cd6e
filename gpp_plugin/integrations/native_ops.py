"""Keeps DeepSpeed from compiling native operators that training does not use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed


@contextmanager
def without_shared_memory_op() -> Iterator[None]:
    """Let `deepspeed.init_distributed` skip its CPU all-reduce operator within the block.

    DeepSpeed compiles it with the C++ compiler when it joins the ranks, about a minute the first time on a
    machine, and uses it only for `inference_all_reduce`.
    """
    compatible = deepspeed.ops.__compatible_ops__
    before = compatible.get("deepspeed_shm_comm")
    compatible["deepspeed_shm_comm"] = False
    try:
        yield
    finally:
        if before is None:
            del compatible["deepspeed_shm_comm"]
        else:
            compatible["deepspeed_shm_comm"] = before
