"""One rank measures while the others wait: ranks that profile side by side measure each other."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.errors import CommTimeout, ProfileError
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.serialize import dumps, loads

logger = logging.getLogger(__name__)


def profile_on_rank_zero(
    measure: Callable[[], Profile],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> Profile:
    """Call ``measure`` on the first rank of ``group`` alone and return its profile on every rank.

    The other ranks compute nothing meanwhile, so that the times are those of an undisturbed machine.

    Args:
        measure: measures and returns the profile; called on the first rank only, with the threads one rank has.
        group: who takes part; the default group if None. Prefer a gloo group: ranks that wait inside an NCCL
            broadcast are ended by its watchdog when the measurement takes longer than the watchdog allows.
        timeout: seconds the others wait for the measurement.

    Raises:
        ProfileError: ``measure`` failed; the message is the first rank's, on every rank.
        CommTimeout: the first rank did not answer in time.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return _measured(measure)
    device = torch.device("cuda", torch.cuda.current_device()) if _is_nccl(group) else torch.device("cpu")
    failure: ProfileError | None = None
    payload = b""
    is_first = dist.get_rank(group) == 0
    if is_first:
        try:
            payload = json.dumps({"profile": dumps(_measured(measure))}).encode()
        except ProfileError as error:
            failure = error
            payload = json.dumps({"error": str(error)}).encode()
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    _broadcast(length, group=group, timeout=timeout)
    body = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    if is_first:
        body.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    _broadcast(body, group=group, timeout=timeout)
    if failure is not None:
        raise failure
    answer = json.loads(bytes(body.cpu().tolist()))
    if "error" in answer:
        raise ProfileError(answer["error"])
    return loads(Profile, answer["profile"])


def _measured(measure: Callable[[], Profile]) -> Profile:
    try:
        return measure()
    except ProfileError:
        raise
    except Exception as error:  # whatever the user's model raises must reach every rank
        raise ProfileError(f"profiling failed: {type(error).__name__}: {error}") from error


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    return dist.get_backend(group) == "nccl"


def _broadcast(tensor: Tensor, *, group: dist.ProcessGroup | None, timeout: float) -> None:
    first = dist.get_global_rank(group, 0) if group is not None else 0
    work = dist.broadcast(tensor, src=first, group=group, async_op=True)
    assert work is not None
    try:
        work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        raise CommTimeout(
            f"rank {dist.get_rank()} waited for the profile of rank {first} (limit {timeout:g} s) and got none: "
            f"{error}; see that rank's output, or raise the limit for large models"
        ) from error
