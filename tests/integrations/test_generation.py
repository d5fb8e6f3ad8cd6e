"""Generation on the stages of a model in training: the tokens of one process, whatever the plan.

`python -m tests.soak generation` does the same for all models, on two and three ranks, and with Seq2SeqTrainer.
"""

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


@pytest.fixture(scope="module")
def generated() -> list[dict[str, Any]]:
    """Return what two ranks generated: greedy, four beams and sampling, of unequal prompts that end early."""
    return run_kept_ranks(jobs.generate_all, 2, ("gpt2",), {"stages": 2})


def test_two_ranks_generate_the_tokens_of_one_process(generated: list[dict[str, Any]]) -> None:
    check(generated)
    tokens = generated[0]["gpt2"]["expected"]["sampled"]
    assert len({tuple(row[8:]) for row in tokens}) > 1, "the prompts go on differently"


def test_two_ranks_that_generated_train_on(generated: list[dict[str, Any]]) -> None:
    first, second = (answer["gpt2"] for answer in generated)
    assert first["after"] == second["after"] and first["after"][0] > 0


def test_two_ranks_generate_in_micro_batches_stream_and_refuse_wrong_calls() -> None:
    answers = run_kept_ranks(jobs.generate_all, 2, ("gpt2",), {"stages": 2}, True, (3, "auto"))
    check(answers)
    for answer in answers:
        for number, parts in ((3, 3), ("auto", 2)):
            one = answer[f"gpt2 in {number}"]
            assert one["report"].micro_batches == parts
            assert [each.rows for each in one["report"].ranks] == [4, 4]
            assert "rank 0: IndexError" in one["said"], "a part that fails ends the others"
    first, second = (answer["gpt2"] for answer in answers)
    assert first["after"] == second["after"], "training goes on"
    assert first["streamed"] == second["streamed"] == [first["expected"]["greedy"][0]]
    said = first["refused"]
    assert said == second["refused"], "all ranks say the same"
    assert "input_ids is int64 [4, 8]" in said["prompts"] and "on rank 1" in said["prompts"]
    assert "max_new_tokens is 2 on rank 0 and 3 on rank 1" in said["arguments"]
    assert "assisted decoding is not supported" in said["assisted"]
    assert "prompt lookup" in said["lookup"]
    assert "cache_implementation='static'" in said["static"]
    assert "max_time: ranks have clocks of their own" in said["clock"]
    assert "no tensor among the arguments" in said["nothing"]
    assert "max_new_tokns" in said["unknown"]
    assert "rank 0: IndexError" in said["too long"]
    assert all("\n" not in text for text in said.values())


def test_data_parallel_ranks_share_the_prompts_or_the_caches() -> None:
    """Five prompts and one, on stages of two ranks each; with a byte less than whole caches take these are cut."""
    cases = ((5, "greedy"), (5, "sampled"), (1, "beams"))
    answers = run_kept_ranks(jobs.share_prompts, 4, "llama", cases)
    said = answers[0].pop("no room")["said"]
    assert all(answer.pop("no room")["said"] == said for answer in answers[1:])
    assert "bytes are missing; give fewer or shorter prompts" in said
    check(answers)
    for number, way in cases:
        whole, cut = (answers[0][f"{cache} {number} {way}"]["report"] for cache in ("data", "sequence"))
        assert (whole.cache, cut.cache) == ("data", "sequence")
        alone, parts = ([each.counted_bytes for each in report.ranks] for report in (whole, cut))
        assert max(parts) < max(alone) and min(parts) > 0
    # of one prompt's cache of 14 positions each rank of a stage has four blocks of two
    assert min(alone) == 0 and max(parts) == max(alone) * 8 // 14


@pytest.mark.parametrize(
    ("ranks", "block", "module"),
    [
        (2, {}, "model.layers.3.mlp"),  # its layer's cache has grown: it fails on shapes, too
        (4, {"data_parallel": 2, "generate": {"block": 2, "cache": "sequence"}}, "lm_head"),  # the others stop together
        (2, {}, "streamer"),
        (2, {}, "hook"),
        (2, {"generate": {"micro_batches": 1}}, "hook"),
    ],
    ids=["a grown cache", "cut caches", "a streamer", "an outer hook", "an outer hook, one micro-batch"],
)  # fmt: skip
def test_a_module_that_fails_on_one_rank_is_in_the_last_line_of_all(
    ranks: int, block: dict[str, Any], module: str
) -> None:
    bad = 0 if module == "streamer" else ranks - 1
    expected = f"engine.generate: rank {bad}: ValueError: this layer is broken (generation_jobs.py:"
    for rank, (said, first) in enumerate(run_kept_ranks(jobs.fail_on_one_rank, ranks, bad, block, module)):
        place = {"streamer": "in put)", "hook": "in fail_here)"}.get(module, "in forward)")
        assert expected in said and place in said, (rank, said)
        if module == "streamer":
            assert said.endswith("; then True") and first == "None", "all stop together, and train on"
        else:
            assert first.startswith(f"rank {bad} (stage ") and expected in first, (rank, first)


@pytest.mark.parametrize("setting", [s for s in jobs.SETTINGS if "tensor ranks" in s])
def test_tensor_ranks_share_the_prompts_and_train_on_as_if_nothing_were(setting: str, tmp_path: Path) -> None:
    """Each has its stage's weights whole meanwhile; the losses behind it are those without a generation, to the bit."""
    answers = run_kept_ranks(jobs.generate_in_setting, jobs.SETTINGS[setting][0], setting, str(tmp_path))
    check(answers)
    if setting == "tensor ranks":
        assert [each.rows for each in answers[0][setting]["report"].ranks] == [2, 2]
    for answer in answers:
        assert answer[setting]["after"] == answer[setting]["without"]
