"""The store of an elastic agent, which outlives the processes that it starts: keys of each start's own.

torchrun's agent keeps one store for a job and starts the ranks anew, as many or fewer, when one fails. What the ranks
before have left there, their addresses and their first failure, is not to be read by those of now. Nothing that an
agent tells its processes counts its starts alike on all hosts, so the ranks agree on a name for theirs:

    rank 0      call = 7f3a                                   go/7f3a = [b1, 9c]      a name, all who answered it
    rank 1            call? 7f3a   answer/1 = 7f3a b1         go/7f3a has b1: it is
    rank 2      call? 22c0 answer/2 = 22c0 9c   go/22c0 (of the start before) has no 9c ... call? 7f3a   answer, go

Source: this project
Tests: tests/runtime/test_agents_store.py, tests/integrations/test_elastic.py
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Container

import torch.distributed as dist

from gpp_plugin.errors import CommTimeout

LOOKS_S = 0.05
"""Between two looks at what the others have written, in a job of few ranks."""

LOOKS_A_SECOND = 2000
"""Of all ranks together, at most: the store, one thread, has other work while ranks start."""

_PREFIX = "gpp_plugin/start"


def has_agents_store() -> bool:
    """Return whether the store that this process is told of is an elastic agent's, and no rank's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_start(store: dist.Store, *, rank: int, num_ranks: int, timeout_s: float) -> dist.Store:
    """Return the part of an agent's store that the ranks started together have; collective over them.

    Raises:
        CommTimeout: a rank did not come; says which.
    """
    started = time.monotonic()
    own = secrets.token_hex(8)
    name = own if rank == 0 else ""
    answers: dict[int, str] = {}
    if rank == 0:
        store.set(f"{_PREFIX}/call", name)
    while time.monotonic() - started < timeout_s:
        if rank == 0:
            answers |= _answers(store, name, num_ranks, known=answers)
            if len(answers) == num_ranks - 1:
                store.set(f"{_PREFIX}/go/{name}", json.dumps(list(answers.values())))
                return dist.PrefixStore(name, store)
        else:
            called = _get(store, "call")
            if called != name:
                name = called
                store.set(f"{_PREFIX}/answer/{rank}", f"{name} {own}")
            if name and own in _get(store, f"go/{name}"):
                return dist.PrefixStore(name, store)
        time.sleep(max(LOOKS_S, num_ranks / LOOKS_A_SECOND))
    here = {0} | set(_answers(store, name, num_ranks)) if name else set()
    absent = [other for other in range(num_ranks) if other not in here] or [0]
    raise did_not_come(absent, rank=rank, num_ranks=num_ranks, waited_s=timeout_s)


def _answers(store: dist.Store, name: str, num_ranks: int, known: Container[int] = ()) -> dict[int, str]:
    """Return the words of the other ranks that have answered to a name, but for those whose answer is known."""
    unknown = [rank for rank in range(1, num_ranks) if rank not in known]
    told = {rank: _get(store, f"answer/{rank}").split() for rank in unknown}
    return {rank: words[1] for rank, words in told.items() if words[:1] == [name]}


def _get(store: dist.Store, key: str) -> str:
    """Return what is written under a key; empty where nothing is, without waiting for it."""
    full = f"{_PREFIX}/{key}"
    text: str = store.get(full).decode() if store.check([full]) else ""
    return text


def did_not_come(
    absent: list[int], *, rank: int, num_ranks: int, waited_s: float, why: str = ""
) -> CommTimeout:
    """Return the error of a rank that waited for others to start.

    Args:
        absent: who did not come.
        why: what torch said.
    """
    names = " and ".join(f"rank {each}" for each in absent)
    where = os.environ.get("MASTER_ADDR", "the job's store")
    return CommTimeout(
        f"rank {rank} of {num_ranks} ranks waited {round(waited_s, 1):g} s for all to meet at {where}: {names} did not "
        f"come{f' ({why})' if why else ''}; start every rank, with rank 0's host as MASTER_ADDR, and look at the "
        "output of those that did not come"
    )
