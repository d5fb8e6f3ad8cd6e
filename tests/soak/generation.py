"""Generation of all models of the tests, on two to four ranks, in stages that share ranks, and with Seq2SeqTrainer."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from tests.integrations import generation_jobs as jobs
from tests.integrations.test_generation import check
from tests.ranks import run_kept_ranks

ALL = ("gpt2", "llama", "t5", "bart", "whisper", "llava", "qwen2_5_vl")
TENSOR = {"stages": 1, "data_parallel": 1, "tensor_parallel": 2}


def main(arguments: Sequence[str]) -> int:
    """Return 0 where every token is that of one process."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak generation")
    parser.add_argument("--models", nargs="+", choices=ALL, default=ALL, help="these (all)")
    models = tuple(parser.parse_args(arguments).models)
    wrong = 0
    for ranks, names, block in (
        (2, models, {"stages": 2}),
        (3, models, {"stages": 3}),
        (3, models, {"stages": 2, "data_parallel": "auto"}),
        (4, models, {"stages": 4}),
        (2, tuple(name for name in models if name in ALL[:2]), {"stages": 4}),
    ):
        for name in names:  # each by itself: what fails in one says nothing of the others
            wrong += _tried(f"{ranks} ranks, {block}", name, jobs.generate_all, ranks, (name,), block)
    cases = tuple((number, way) for number in (5, 1) for way in jobs.WAYS)
    for name in models:
        are_cut = name in ("gpt2", "llama", "llava")
        wrong += _tried("4 ranks, 2 stages of 2", name, jobs.share_prompts, 4, name, cases, are_cut)
    for setting, (ranks, name, _, _) in jobs.SETTINGS.items():
        if name in models:
            wrong += _tried(f"{ranks} ranks, {name}", setting, jobs.generate_in_setting, ranks, setting)
    with tempfile.TemporaryDirectory() as directory:
        plain = jobs.predict(directory)
        for block in ({"stages": 2}, {"stages": 1, "data_parallel": 2}, TENSOR):
            for found in run_kept_ranks(jobs.predict, 2, directory, block):
                is_same = found["predictions"] == plain["predictions"] and all(
                    abs(a - b) < 1e-5 for a, b in zip(found["metrics"], plain["metrics"], strict=True)
                )
                print(f"  Seq2SeqTrainer, {block}: {'the same' if is_same else 'WRONG'}", flush=True)
                wrong += not is_same
    return int(wrong > 0)


def _tried(what: str, name: str, job: Callable[..., Any], ranks: int, *arguments: Any) -> int:
    """Run a job of one model and return how many of its lines are wrong."""
    try:
        return _told(what, run_kept_ranks(job, ranks, *arguments))
    except Exception as error:
        last = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
        print(f"  {what}: {name}: WRONG: {type(error).__name__}: {last}", flush=True)
        return 1


def _told(what: str, answers: list[dict[str, Any]]) -> int:
    """Print one line for each model and return how many are wrong."""
    wrong = 0
    for name in answers[0]:
        try:
            check([{name: answer[name]} for answer in answers])
        except AssertionError as error:
            wrong += 1
            print(f"  {what}: WRONG: {error}", flush=True)
        else:
            print(f"  {what}: {name}: the same", flush=True)
    return wrong
