"""Messages between the ranks of a lane: whom is waited for, and for how long."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import open_test_board, run_kept_ranks

LIMIT_S = 60.0


def make_wire() -> Any:
    from gpp_plugin.model.generation.micro_batches import ReplicaLink

    return ReplicaLink(
        ranks=(2, 0, 1),
        position={2: 0, 0: 1, 1: 2}[dist.get_rank()],
        group=dist.new_group(),
        device=torch.device("cpu"),
        timeout_s=LIMIT_S,
    )


def wait_past_the_limit(is_at_work: bool) -> tuple[float, str]:
    """One rank tells something three times later than silent ranks are waited for, at work or outside of any call."""
    from gpp_plugin.errors import CommTimeout
    from gpp_plugin.runtime.ranks.job_board import engine_call

    link = make_wire()
    open_test_board(limit_s=1.0)
    start, said = time.monotonic(), ""
    shape = torch.empty(3, device="meta")
    try:
        if link.position == 0 and not is_at_work:
            time.sleep(6.0)
            return 0.0, ""
        with engine_call("generate", is_fatal=lambda: False):
            if link.position == 0:
                time.sleep(3.5)
                shape = torch.ones(3)
            link.broadcast(shape, source=0, readers=(1, 2), has_failed=False)
            link.finish()
    except CommTimeout as error:
        said = str(error)
    return time.monotonic() - start, said


def test_a_rank_at_work_is_waited_for_past_the_limit() -> None:
    for seconds, said in run_kept_ranks(wait_past_the_limit, 3, True):
        assert said == "" and 3.0 < seconds < LIMIT_S / 2


def test_a_rank_that_is_elsewhere_ends_the_wait_soon_after_the_limit() -> None:
    answers = [answer for answer in run_kept_ranks(wait_past_the_limit, 3, False) if answer[0]]
    assert len(answers) == 2
    for seconds, said in answers:
        assert seconds < LIMIT_S / 4
        assert "rank 2 failed first, outside of the engine's calls" in said


def test_a_lane_of_one_rank_counts_what_it_tells_and_sends_nothing() -> None:
    from gpp_plugin.model.generation.micro_batches import ReplicaLink

    link = ReplicaLink(ranks=(4,), position=0, group=None, device=torch.device("cpu"), timeout_s=LIMIT_S)
    own = torch.ones(2)
    assert link.broadcast(own, source=0, readers=(), has_failed=False) is own
    assert link.broadcast(own, source=0, readers=(), has_failed=True) is None
    assert (link.messages, link.sent_bytes) == (2, 0)
