"""Nothing reads the device from the host between the first and the last task of a step; the step reads once.

The first mini-batch is left out: it compiles, is counted, and finds out what the stages' operators save. On a GPU
`torch.cuda.set_sync_debug_mode("error")` says the same of the real thing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.host_reads import HostReads
from tests.integrations import host_read_jobs
from tests.ranks import run_kept_ranks

CHAIN: dict[str, Any] = {"stages": 2}
ONE: dict[str, Any] = {"stages": 1}


@pytest.mark.parametrize(
    ("num_ranks", "zero", "precision", "block"),
    [
        (1, 0, "fp32", ONE),
        (1, 1, "bf16+fp32", ONE),
        (2, 0, "fp32", ONE),
        (2, 0, "bf16+fp32", ONE),
        (2, 1, "fp16", ONE),
        (2, 2, "bf16+fp32", ONE),
        (2, 0, "fp16", CHAIN),
    ],
)
def test_tasks_read_nothing_and_a_step_once(
    num_ranks: int, zero: int, precision: str, block: dict[str, Any]
) -> None:
    for answer in run_kept_ranks(
        host_read_jobs.read_while_training, num_ranks, "gpt2", zero, precision, block
    ):
        assert answer["tasks"] == []
        assert len(answer["step"]) == 2, "one a step"
        assert all("stage_step.py" in where for where in answer["step"]), answer["step"]


def test_a_read_that_is_put_back_is_found() -> None:
    found = run_kept_ranks(host_read_jobs.read_while_training, 2, "gpt2", 0, "fp32", CHAIN, True)
    assert all(answer["tasks"] for answer in found)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(), lambda t: t.tolist(), lambda t: t.cpu(), lambda t: float(t[0]), lambda t: bool(t[0]),
        lambda t: t[t > 0], lambda t: t.nonzero(), lambda t: torch.tensor([1.0], device=t.device),
        lambda t: t.to(t.device), lambda t: torch.equal(t, t), lambda t: t.numpy(), lambda t: range(3)[t[0].int()],
    ],
)  # fmt: skip
def test_what_counts_as_a_read(read: Any) -> None:
    reads = HostReads()
    with reads.watching():
        torch.ones(3).mul_(2).to(torch.bfloat16)[0:2].sum()
    assert reads.found == []
    with reads.watching():
        read(torch.ones(3))
    assert reads.found
