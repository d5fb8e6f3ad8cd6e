"""`gpp demo`, shortened: ranks train the same as one process, the towers at the same time."""

import contextlib
import io
import json
import sys
import tempfile
from unittest import mock

import pytest
import torch

from gpp_plugin.cli import main
from gpp_plugin.demo import demo_run
from gpp_plugin.demo.clip import TEMPLATES, WordTokenizer, load_digit_captions, mini_batches
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import fingerprint, load
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.launch import EVENTS_VARIABLE
from tests.ranks import run_kept_ranks
from tests.waits import run_program


def be_rank(arguments):
    """Be a rank of the demo; return its events."""
    with tempfile.TemporaryFile() as events:
        variables = mock.patch.dict("os.environ", {EVENTS_VARIABLE: str(events.fileno())})
        with variables, mock.patch.object(sys, "argv", ["demo_run", *arguments]):
            demo_run.main()
        events.seek(0)
        return [json.loads(line) for line in events]


def run_ranks(module, arguments, *, num_ranks, timeout_s):
    """Do as `gpp_plugin.launch.run_ranks`, on ranks that are there already."""
    assert module == demo_run.__name__ and timeout_s > 0
    yield from run_kept_ranks(be_rank, num_ranks, arguments)[0]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return the folder and the figures of a demo of two ranks."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["demo", "--ranks", "2", "--stages", "2", "--steps", "3", "--out", str(folder), "--json"]
    with (
        mock.patch.object(demo_run, "run_ranks", run_ranks),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        assert main(words) == 0
    return folder, json.loads(out.getvalue().splitlines()[-1])


def check_figures(result, *, steps):
    assert result["command"] == "demo"
    assert [row["step"] for row in result["rows"]] == list(range(1, steps + 1))
    assert result["max_relative_difference"] < 2e-6
    assert result["seconds"] > result["train_seconds"] > 0
    assert 0 <= result["accuracy"] <= 1


def check_files(folder, result, *, num_stages):
    plan, timeline = load(PipelinePlan, folder / "plan.json"), load(Timeline, folder / "timeline.json")
    assert (result["num_stages"], result["depth"]) == (len(plan.stages), plan.depth)
    assert plan.depth <= len(plan.stages) == num_stages
    assert plan.stages[plan.stage_index("loss")].micro_batch_size == plan.mini_batch == 64
    assert timeline.source == "measured" and timeline.plan == fingerprint(plan)
    assert (folder / "model" / "config.json").is_file()
    return plan


def test_two_ranks_train_as_one_process(demo):
    check_figures(demo[1], steps=3)


def test_what_it_leaves(demo):
    check_files(*demo, num_stages=2)


def test_the_command_starts_its_ranks_and_the_towers_are_side_by_side(tmp_path):
    done = run_program(
        [sys.executable, "-m", "gpp_plugin.cli", "demo", "--steps", "6", "--out", str(tmp_path), "--json"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    check_figures(result, steps=6)
    plan = check_files(tmp_path, result, num_stages=4)
    assert plan.depth < len(plan.stages)
    # how long they really are at the same time is the machine's
    assert result["overlap"]["overlap_us"] >= result["overlap"]["same_micro_batch_us"] >= 0


# ---- data, model and reference ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data():
    return load_digit_captions()


def test_tokenizer_ends_with_the_highest_id():
    tokenizer = WordTokenizer()
    ids, mask = tokenizer.encode("a handwritten seven")
    words = [tokenizer.vocabulary[i] for i in ids]
    assert words == ["<start>", "a", "handwritten", "seven", "<end>"] + ["<pad>"] * (tokenizer.length - 5)
    assert mask == [1] * 5 + [0] * (tokenizer.length - 5)
    assert tokenizer.end_id == max(ids) == len(tokenizer.vocabulary) - 1 != 2
    with pytest.raises(ValueError, match="'elephant'"):
        tokenizer.encode("an elephant")


def test_split_is_by_class_and_nothing_is_in_both(data):
    assert (len(data.train), len(data.held_out)) == (1437, 360)
    counts = torch.bincount(torch.tensor(data.held_out.labels))
    assert counts.min() >= 34 and counts.max() <= 38
    assert abs(float(data.train.images.mean())) < 1e-5
    assert abs(float(data.train.images.std()) - 1) < 1e-3
    assert {data.train.caption(i).split()[0] for i in range(len(TEMPLATES))} >= {"a", "the", "someone"}


def test_batches_are_the_same_for_the_same_seed_and_see_every_sample(data):
    first, again = (list(mini_batches(data.train, mini_batch=64, steps=24, seed=3)) for _ in range(2))
    assert all(torch.equal(a[key], b[key]) for a, b in zip(first, again, strict=True) for key in a)
    other = next(mini_batches(data.train, mini_batch=64, steps=1, seed=4))
    assert not torch.equal(first[0]["pixel_values"], other["pixel_values"])
    assert {key: (tuple(value.shape), value.dtype) for key, value in first[0].items()} == {
        "input_ids": ((64, data.tokenizer.length), torch.int64),
        "attention_mask": ((64, data.tokenizer.length), torch.int64),
        "pixel_values": ((64, 1, 8, 8), torch.float32),
    }
    seen = torch.cat([batch["pixel_values"] for batch in first]).flatten(1)
    assert len(torch.unique(seen, dim=0)) == len(torch.unique(data.train.images.flatten(1), dim=0))


def test_reference_follows_deepspeeds_scheduler(data):
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    settings = demo_run.DemoSettings(steps=30, warmup_steps=5)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=settings.learning_rate)
    scheduler = WarmupDecayLR(optimizer, **settings.scheduler_block()["params"])
    for step in range(settings.steps):
        expected = settings.learning_rate * settings.learning_rate_factor(step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, abs=1e-12), step
        optimizer.step()
        scheduler.step()
