"""What ranks decide together, and what they say where one does not come."""

from __future__ import annotations

import datetime
import time

import pytest
import torch.distributed as dist

from gpp_plugin.errors import CommTimeout, ConfigError
from gpp_plugin.runtime.ranks.collectives import call_on_rank_zero, do_together, exchange
from gpp_plugin.runtime.ranks.failure_board import HERE
from gpp_plugin.runtime.ranks.job_board import engine_call
from tests.ranks import open_test_board, run_kept_ranks

STAGES = ("start", "start", "deep", "end")


def _meet_without(absent: int) -> tuple[list[int], str, str]:
    """Exchange twice on all ranks, once with an error on one of them, and then without one rank."""
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=20))

    def fail() -> int:
        if rank == 1:
            raise ConfigError("no such stage")
        return rank

    told = exchange(lambda: 10 * rank, what="the first", group=group, stages=STAGES)
    refused = lost = ""
    try:
        exchange(fail, what="the second", group=group, stages=STAGES)
    except ConfigError as error:
        refused = str(error)
    open_test_board(limit_s=1.0)
    if rank == absent:
        time.sleep(5)
    else:
        try:
            with engine_call("initialize", is_fatal=lambda: False):
                exchange(lambda: rank, what="the profile of stage 'deep'", group=group, stages=STAGES)
        except CommTimeout as error:
            lost = str(error)
    return told, refused, lost


def _act_together() -> tuple[list[int], str, dict[str, str]]:
    """Do something twice on all ranks; the second time it fails on one."""
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    done: list[int] = []
    do_together(lambda: done.append(rank), what="the first", group=group)

    def fail() -> None:
        if rank == 2:
            raise ConfigError("no such length")
        done.append(rank)

    refused = ""
    try:
        do_together(fail, what="the second", group=group)
    except ConfigError as error:
        refused = str(error)
    HERE.stage = ""  # another test of this process may have built an engine
    broken = {}
    for name, act in (
        ("do_together", lambda: do_together(break_down, what="the third", group=group)),
        ("exchange", lambda: exchange(break_down, what="the third", group=group, stages=STAGES)),
        ("zero", lambda: call_on_rank_zero(break_all, int, what="third", group=group, timeout_s=60.0)),
    ):  # fmt: skip
        try:
            act()
        except Exception as error:
            broken[name] = str(error)
    return done, refused, broken


def break_down() -> None:
    """Fail on one rank as what is not ours does."""
    if dist.get_rank() == 1:
        break_all()


def break_all() -> int:
    raise KeyError("weight")


def test_what_fails_on_one_rank_fails_on_all() -> None:
    answers = run_kept_ranks(_act_together, 4)
    line = f"(test_agree.py:{break_all.__code__.co_firstlineno + 1}, in break_all)"
    for rank, (done, refused, broken) in enumerate(answers):
        assert done == [rank] * (1 if rank == 2 else 2)
        assert refused == "rank 2: no such length"
        assert (
            broken.pop("exchange")
            == f"rank 1 (stage {STAGES[1]!r}): the third failed: KeyError: 'weight' {line}"
        )
        assert broken.pop("do_together") == f"rank 1: the third failed: KeyError: 'weight' {line}"
        assert rank == 0 or broken.pop("zero") == f"rank 0: third failed: KeyError: 'weight' {line}"
        assert rank or broken == {"zero": "'weight'"}, "rank 0 has its own"


def _fail_alike() -> str:
    def fail() -> None:
        raise ConfigError("no such key")

    with pytest.raises(ConfigError) as error:
        exchange(fail, what="the fourth", group=dist.new_group(backend="gloo"))
    return str(error.value)


def test_what_fails_on_all_ranks_is_no_rank_s_own() -> None:
    assert run_kept_ranks(_fail_alike, 2) == ["no such key"] * 2


def test_an_exchange_names_who_did_not_come() -> None:
    for rank, (told, refused, lost) in enumerate(run_kept_ranks(_meet_without, 4, 2)):
        assert told == [0, 10, 20, 30]
        assert refused == f"rank 1 (stage {STAGES[1]!r}): no such stage"
        if rank != 2:
            assert lost.startswith(
                f"rank {rank} (stage {STAGES[rank]!r}) waited for the other ranks at the profile "
            )
            assert (
                "rank 2 failed first, outside of the engine's calls: it did not come to the profile" in lost
            )
