"""What the model found before the runtime's messages were put into one global order, made anew by a change of the code.

At commit 37ec3e4 a traced step synchronised the device inside an exchange, and NCCL's receives were posted two
exchanges ahead of their place. These tests put onto that revision, with CUDA_DEVICE_MAX_CONNECTIONS=32, the last one
fails both ways: of 7 plans, the demo's among them, 7 hang in a traced step, and 7 hang with a wait for the device at one
of 299 of 3192 host points. (Posted where their exchange is, depth 0, 3 of 7 still hang, at 52 points: between the
receives and the sends of one exchange.) Of the 254 plans of the tests that train, 237 hang traced, 225 hang with one
wait at one of 20 030 of 262 327 points, and one hangs as it is.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from gpp_benchmarks._random_plans import random_draw
from gpp_plugin.runtime.messages.transport import NcclTransport
from gpp_plugin.runtime.recorder import Recorder
from tests.nccl.checker import WaitGraph, points_that_hang, share_queues
from tests.nccl.collect_plans import read_plans
from tests.nccl.coverage_counts import Tell
from tests.nccl.recording import Run, record_job
from tests.schedule.plans import chain_plan, simple_plan


@contextlib.contextmanager
def posting_ahead() -> Iterator[None]:
    """Let receives be posted two ahead of their place."""
    with mock.patch.multiple(NcclTransport, prepost_depth=2, prepost_bytes=1 << 40):
        yield


@contextlib.contextmanager
def waiting_for_each_event() -> Iterator[None]:
    """Let receives be posted ahead, and each time of a traced step be read behind a wait for the device."""

    def now(self: Recorder) -> float:
        if self.is_on:
            torch.cuda.synchronize()
        return 0.0

    with posting_ahead(), mock.patch.object(Recorder, "now", now):
        yield


def count_hangs(
    change: Callable[[], contextlib.AbstractContextManager[None]], *, record: bool
) -> Counter[str]:
    """Return how many of some plans hang on 32 queues: without any wait, or with a wait at some single point."""
    plans = [
        chain_plan(2, 3),
        chain_plan(4, 8),
        simple_plan([1, 1, 1], [(0, 2), (1, 2)], mini_batch=4),
        simple_plan([2, 2, 4, 2], [(0, 1), (0, 2), (1, 3), (2, 3)], mini_batch=8),
        chain_plan(3, 6, schedule="zero_bubble"),
        random_draw(5, most_ranks=8).plan,
        *(run.plan for test, run in read_plans() if test == "tests/demo/test_demo.py"),
    ]
    counts = Counter(plans=len(plans))
    for plan in plans:
        with change():
            job = record_job(Run(plan=plan, record=record))
        found = points_that_hang(WaitGraph(job), share_queues(job, 32))
        counts["at once"] += found is None
        counts["with a wait"] += bool(found)
    return counts


def test_receives_posted_ahead_hang_with_a_wait_for_the_device(tell: Tell) -> None:
    counts = count_hangs(posting_ahead, record=False)
    tell(dict(counts))
    assert counts["at once"] + counts["with a wait"] == counts["plans"]


def test_a_traced_step_that_waits_for_the_device_hangs(tell: Tell) -> None:
    counts = count_hangs(waiting_for_each_event, record=True)
    tell(dict(counts))
    assert counts["at once"] == counts["plans"]


@pytest.mark.parametrize("record", [False, True], ids=["plain", "traced"])
def test_nothing_of_the_kind_hangs_as_it_is(record: bool) -> None:
    counts = count_hangs(contextlib.nullcontext, record=record)
    assert counts == {"plans": 7, "at once": 0, "with a wait": 0}
