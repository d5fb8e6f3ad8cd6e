"""Scripts of others: what is changed in them, what counts as the same, what is refused in time."""

from __future__ import annotations

import argparse
import random

import pytest

from gpp_benchmarks.scripts import NO, NOT_THERE, REFUSED, YES, add_arguments, change_script, run
from gpp_benchmarks.scripts._inputs import CASES, KNOWN, SAMPLES, make_inputs
from gpp_plugin.errors import ConfigError

SCRIPT = """
import sys

import torch
from transformers import (
    GPT2LMHeadModel,
    Trainer, TrainingArguments, HfArgumentParser,
)

model = GPT2LMHeadModel.from_pretrained("model")
rows = torch.randint(0, 31, (48, 9), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]
flags = {"--train_file", "--validation_file", "--block_size", "--model_name_or_path"}
given, words = [], iter(sys.argv[1:])
for word in words:
    if word in flags:
        next(words)
    else:
        given.append(word)
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(given)
SETTING
trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:5])
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_state()
trainer.save_metrics("eval", trainer.evaluate())
"""


def run_with(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


def verdict_of(folder, setting):
    (folder / "run_clm.py").write_text(SCRIPT.replace("SETTING", setting), encoding="utf-8")
    (row,) = run_with(folder, "--scripts", "run_clm", "--timeout", "120")["rows"]
    return row


def test_a_script_trains_as_unchanged_and_resumes(tmp_path):
    row = verdict_of(tmp_path, "args.lr_scheduler_type = 'constant'")
    assert row["verdict"] == YES, row
    assert row["lines_changed"] == 2 and row["resumed"]
    assert max(row["loss_apart"], row["norm_apart"], row["evaluation_apart"]) < 1e-5


def test_a_script_that_draws_other_weights_on_each_side_is_not_the_same(tmp_path):
    row = verdict_of(tmp_path, "if args.deepspeed: model.transformer.wte.weight.data.mul_(1.001)")
    assert row["verdict"] == NO and row["norm_apart"] > 1e-5


def test_what_is_refused_before_a_step_is_said_in_its_row(tmp_path):
    row = verdict_of(tmp_path, "args.auto_find_batch_size = bool(args.deepspeed)")
    assert row["verdict"] == REFUSED and "auto_find_batch_size" in row["line"]


def test_the_import_of_a_trainer_is_followed_by_one_of_ours():
    text, added = change_script(SCRIPT)
    assert added == 1
    assert ")\nfrom gpp_plugin import GraphPipelineTrainer as Trainer\n" in text
    assert change_script("import transformers\nfrom transformers import set_seed")[1] == 0


def test_samples_are_of_unlike_lengths_and_of_known_words(tmp_path):
    for name, make in SAMPLES.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name, random.Random(3))
        assert list((tmp_path / name).iterdir()), name
    lengths = {len(line.split()) for line in (tmp_path / "texts/train.txt").read_text().splitlines()}
    assert len(lengths) > 5
    assert {word for line in (tmp_path / "texts/train.txt").read_text().split() for word in [line]} <= set(
        KNOWN
    )


def test_models_are_small_and_have_no_dropout_unless_asked(tmp_path):
    from transformers import AutoConfig

    for has_dropout in (False, True):
        folder = tmp_path / str(has_dropout)
        folder.mkdir()
        make_inputs("run_glue", folder, has_dropout=has_dropout)
        assert (AutoConfig.from_pretrained(folder / "model").hidden_dropout_prob > 0) == has_dropout


def test_wrong_options_are_told_in_a_line(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        run_with(tmp_path / "absent")
    with pytest.raises(ConfigError, match="run_glu: not a script that is known; did you mean"):
        run_with(tmp_path, "--scripts", "run_glu")
    with pytest.raises(ConfigError, match="give two or more"):
        run_with(tmp_path, "--ranks", "1")
    with pytest.raises(ConfigError, match="exists; give a new folder"):
        run_with(tmp_path, "--keep", tmp_path)


def test_scripts_that_are_not_there_are_no_failure_of_ours(tmp_path):
    found = run_with(tmp_path)
    assert [row["verdict"] for row in found["rows"]] == [NOT_THERE] * len(CASES) and not found["ok"]
