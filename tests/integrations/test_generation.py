"""Generation on the stages of a model in training: the tokens of one process, whatever the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import generation_jobs as jobs
from tests.ranks import run_kept_ranks


def check(answers: list[dict[str, Any]]) -> None:
    for name, first in answers[0].items():
        for way, tokens in first["expected"].items():
            for rank, answer in enumerate(answers):
                assert answer[name]["found"][way] == tokens, f"{name}, {way}, rank {rank}"
        for each in first["report"].ranks:
            assert each.counted_bytes == each.predicted_bytes, f"{name}: {each}"
        assert sum(each.counted_bytes for each in first["report"].ranks) > 0


def test_two_ranks_generate_the_tokens_of_one_process() -> None:
    """Greedy, four beams and sampling, of prompts of unequal length that end early, after three steps."""
    answers = run_kept_ranks(
        jobs.generate_all, 2, ("gpt2", "llama", "t5", "bart", "whisper", "llava"), {"stages": 2}
    )
    check(answers)
    assert all(answer["gpt2"]["after"] == answers[0]["gpt2"]["after"] for answer in answers)
    tokens = answers[0]["llama"]["expected"]["greedy"]
    assert len({tuple(row[8:]) for row in tokens}) > 1, "the prompts go on differently"


def test_three_stages_and_stages_that_share_a_rank() -> None:
    check(run_kept_ranks(jobs.generate_all, 3, ("llama", "t5"), {"stages": 3}))
    check(run_kept_ranks(jobs.generate_all, 2, ("llama",), {"stages": 4}))


def test_data_parallel_ranks_share_the_prompts_and_the_caches() -> None:
    answers = run_kept_ranks(jobs.share_prompts, 4)
    check(answers)
    shared, cut = (answers[0][f"{cache} gpt2 5"]["report"] for cache in ("data", "sequence"))
    assert all(each.rows for each in shared.ranks) and cut.cache == "sequence"
    # one prompt: with "data" one rank of each stage has its cache, with "sequence" both have a half, in whole blocks
    alone, parts = (
        [each.counted_bytes for each in answers[0][f"{cache} gpt2 1"]["report"].ranks]
        for cache in ("data", "sequence")
    )
    assert min(alone) == 0 and max(parts) == max(alone) * 8 // 14, "four blocks of two, of 14 positions"


def test_a_trainer_that_generates_predicts_what_one_process_does(tmp_path: Path) -> None:
    plain = jobs.predict(str(tmp_path), is_alone=True)
    for found in run_kept_ranks(jobs.predict_on_ranks, 2, str(tmp_path)):
        assert found["predictions"] == plain["predictions"]
        assert found["metrics"] == pytest.approx(plain["metrics"], abs=1e-5)


def test_wrong_calls_are_refused_in_one_line_and_the_job_goes_on() -> None:
    told = run_kept_ranks(jobs.refuse, 2)
    assert told[0] == told[1], "all ranks say the same"
    said = told[0]
    assert "input_ids is int64 [4, 8]" in said["prompts"] and "on rank 1" in said["prompts"]
    assert "max_new_tokens is 2 on rank 0 and 3 on rank 1" in said["arguments"]
    assert "assisted decoding is not supported" in said["assisted"]
    assert "prompt lookup" in said["lookup"]
    assert "cache_implementation='static'" in said["static"]
    assert "no tensor among the arguments" in said["nothing"]
    assert "max_new_tokns" in said["unknown"]
    assert "rank 0: IndexError" in said["too long"]
    assert "nothing has been generated yet" in said["report"]
    assert "CLIPModel cannot generate" in said["clip"]
    assert said["after"] == "2" and said["trains"] == "True"
    assert all("\n" not in text for text in said.values())
