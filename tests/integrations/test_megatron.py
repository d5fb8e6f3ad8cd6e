"""Chunks of megatron-core models: shared out over tensor ranks they compute what one rank does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations import megatron_jobs as jobs
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors

pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def shared_out() -> list[dict[str, Any]]:
    return run_kept_ranks(jobs.shared_out, 2)


@pytest.mark.parametrize("kind", jobs.KINDS)
def test_tensor_parallel_chunks_equal_one_rank(kind: str, shared_out: list[dict[str, Any]]) -> None:
    first, second = (answer[kind] for answer in shared_out)
    whole, one_chunk, two_chunks = first["losses"]
    assert one_chunk == pytest.approx(whole, rel=2e-6) and two_chunks == pytest.approx(whole, rel=2e-6)
    assert second["losses"][1:] == first["losses"][1:], "the loss is the same on all tensor ranks"
    for split in ("found", "in two"):
        assert set(first[split]) == set(first["wanted"])
        errors = gradient_errors(first[split], first["wanted"])
        assert max(errors.values()) < 2e-6, (split, max(errors, key=errors.__getitem__), errors)
    length = jobs.LENGTH // 2 if "sequence" in kind else jobs.LENGTH
    assert first["hidden"] == (length, 4, jobs.HIDDEN)
    assert first["logits"] < 1e-5
    assert first["weights"] and second["weights"], "what was shared out is gathered bit for bit"
