"""The demo's data, model and reference."""

import pytest
import torch

from gpp_plugin.demo.clip import TEMPLATES, WordTokenizer, load_digit_captions, mini_batches
from gpp_plugin.demo.demo_run import DemoSettings


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

    settings = DemoSettings(steps=30, warmup_steps=5)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=settings.learning_rate)
    scheduler = WarmupDecayLR(optimizer, **settings.scheduler_block()["params"])
    for step in range(settings.steps):
        expected = settings.learning_rate * settings.learning_rate_factor(step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, abs=1e-12), step
        optimizer.step()
        scheduler.step()
