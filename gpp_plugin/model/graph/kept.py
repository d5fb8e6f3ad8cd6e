"""What a user's module keeps from forward to backward: which storages, in which order, until when.

Source: this project
Tests: tests/stage_graph/test_module_cost.py
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.ir.profile import KeptStorage, ModuleMemory
from gpp_plugin.profile.timing import Stopwatch
from gpp_plugin.runtime.memory.counting import StorageNumbers, storage_id
from gpp_plugin.runtime.memory.recipe import is_movable

RELEASE_S = 0.1


@dataclass(slots=True, kw_only=True)
class Kept:
    """One storage at one number of samples.

    Args:
        last_use: share of the forward's time after which it is kept for the last time.
        is_made: whether the module made it.
        is_movable: plain bytes that nobody but autograd holds.
    """

    num_bytes: int
    last_use: float = 1.0
    is_made: bool = True
    is_movable: bool = True


def record_kept(
    forward: Callable[[], Any], *, fixed: Iterable[Tensor], received: Iterable[Tensor], device: torch.device
) -> list[Kept]:
    """Run a forward and return what autograd keeps of it, by number (`StorageNumbers`).

    Args:
        forward: what it returns holds the graph.
        fixed: what is there anyway and does not count.
        received: what other stages made; it counts, and the module did not make it.
    """
    given = {storage_id(tensor) for tensor in received if tensor.layout is torch.strided}
    numbers, watch = StorageNumbers(fixed), Stopwatch(device)
    saved: list[tuple[int | None, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        watch.mark()
        saved.append((numbers.number(tensor), tensor.detach()))
        return saved[-1][1]  # detached: an operator that held its own result would hold its graph, for ever

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    watch.mark()
    until = list(itertools.accumulate(watch.laps_us()))
    kept: dict[int, Kept] = {}
    while saved:
        number, tensor = saved.pop()
        now = until[len(saved)]
        if number is not None:
            first = Kept(
                num_bytes=tensor.untyped_storage().nbytes(), last_use=now / until[-1] if now > 0 else 1.0
            )
            found = kept.setdefault(number, first)
            found.is_made = storage_id(tensor) not in given
            found.is_movable &= is_movable(tensor)
        del tensor
    del result
    _await_release(numbers, [number for number, found in kept.items() if found.is_made])
    for number, found in kept.items():  # what somebody still holds (a cache) would free nothing
        found.is_movable &= not found.is_made or numbers.is_free(number)
    return [kept[number] for number in sorted(kept)]


def _await_release(numbers: StorageNumbers, made: Sequence[int]) -> None:
    """Wait a little for those who let go late.

    Graphs of operators written in Python may hold themselves, and the thread of a collective inside the forward holds
    its result, and with that the graph, until it runs again.
    """
    deadline = time.monotonic() + RELEASE_S
    if not all(map(numbers.is_free, made)):
        gc.collect()
    while not all(map(numbers.is_free, made)) and time.monotonic() < deadline:
        time.sleep(0.002)


def module_memory(block: str, kept: Mapping[int, list[Kept]], given_bytes: Mapping[int, int]) -> ModuleMemory:
    """Return what a module keeps at any number of samples.

    Args:
        kept: number of samples -> what it keeps then.
        given_bytes: number of samples -> bytes of all it receives, and of its buffers.
    """
    counts = sorted(kept)
    dropped = line([(n, sum(k.num_bytes for k in kept[n] if k.is_made)) for n in counts])
    held = line([(n, given_bytes[n] - sum(k.num_bytes for k in kept[n] if not k.is_made)) for n in counts])
    forms = {tuple(k.is_made for k in kept[n]) for n in counts}
    storages = []
    for number, most in enumerate(kept[counts[-1]] if len(forms) == 1 else ()):
        per_sample, fixed = line([(n, kept[n][number].num_bytes) for n in counts])
        storages.append(
            KeptStorage(
                bytes_per_sample=per_sample,
                bytes_fixed=fixed,
                last_use=most.last_use,
                is_made=most.is_made,
                # once is enough: what a module holds on to it holds on to always
                is_movable=any(kept[n][number].is_movable for n in counts),
            )
        )
    return ModuleMemory(
        block=block,
        storages=tuple(storages),
        dropped_bytes_per_sample=dropped[0],
        dropped_bytes_fixed=dropped[1],
        held_bytes_per_sample=held[0],
        held_bytes_fixed=held[1],
    )


def line(points: list[tuple[int, int]]) -> tuple[float, float]:
    """Return bytes a sample and bytes in any case through the first and the last of these points."""
    (low, least), (high, most) = points[0], points[-1]
    if low == high:
        return most / high, 0.0
    slope = max(most - least, 0) / (high - low)
    return slope, max(most - slope * high, 0.0)
