"""Messages between the ranks of a lane: to their readers alone, with who failed, and an end of all waits."""

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import open_test_board, run_kept_ranks

LIMIT_S = 60.0


def make_wire() -> Any:
    from gpp_plugin.model.generation.lane_wire import LaneWire

    return LaneWire(
        ranks=(2, 0, 1),
        position={2: 0, 0: 1, 1: 2}[dist.get_rank()],
        group=dist.new_group(),
        device=torch.device("cpu"),
        timeout_s=LIMIT_S,
    )


def tell() -> dict[str, Any]:
    """Position 0 tells all more than it waits for, position 1 hands over to 2, and says that it failed."""
    wire = make_wire()
    shape = torch.empty(3, device="meta")
    is_first = wire.position == 0
    told = [
        wire.tell(
            torch.full((3,), float(n)) if is_first else shape, source=0, readers=(1, 2), has_failed=False
        )
        for n in range(100)
    ]
    own = torch.ones(3) if wire.position == 1 else shape
    handed = wire.tell(own, source=1, readers=(2,), has_failed=False)
    failed = wire.tell(own, source=1, readers=(2,), has_failed=True)
    wire.finish()
    return {
        "told": [float(each[0]) for each in told],
        "handed": None if handed.is_meta else handed.tolist(),
        "has_failed": failed is None,
        "messages": wire.messages,
        "sent": wire.sent_bytes,
    }


def test_a_tensor_comes_to_its_readers_and_nobody_else_waits() -> None:
    answers = sorted(run_kept_ranks(tell, 3), key=lambda answer: answer["sent"])
    assert all(answer["told"] == [float(n) for n in range(100)] for answer in answers)
    assert all(answer["messages"] == 102 for answer in answers), "all ranks count alike"
    assert [answer["sent"] for answer in answers] == [0, 2 * 12, 200 * 12]
    assert [answer["handed"] for answer in answers] == [[1.0] * 3, [1.0] * 3, None]
    assert [answer["has_failed"] for answer in answers] == [True, True, False]


def wait_past_the_limit(is_at_work: bool) -> tuple[float, str]:
    """One rank tells something three times later than silent ranks are waited for, at work or outside of any call."""
    from gpp_plugin.errors import CommTimeout
    from gpp_plugin.runtime.ranks.calls import engine_call

    wire = make_wire()
    open_test_board(limit_s=1.0)
    start, said = time.monotonic(), ""
    shape = torch.empty(3, device="meta")
    try:
        if wire.position == 0 and not is_at_work:
            time.sleep(6.0)
            return 0.0, ""
        with engine_call("generate", is_fatal=lambda: False):
            if wire.position == 0:
                time.sleep(3.5)
                shape = torch.ones(3)
            wire.tell(shape, source=0, readers=(1, 2), has_failed=False)
            wire.finish()
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
