"""Where training is in its data: after a checkpoint the next mini-batch is the one after the last that was trained."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from gpp_plugin.data import pack
from gpp_plugin.engine.checkpoints.checkpoint_files import to_json
from gpp_plugin.engine.loading.row_loader import RowLoader
from gpp_plugin.engine.loading.training_data import TrainingData
from gpp_plugin.errors import CheckpointError
from gpp_plugin.runtime.batches import OwnRows, UnitBatch
from gpp_plugin.runtime.random_streams import host_streams, set_host_streams
from tests.integrations.loading_jobs import (
    ROWS,
    WIDTH,
    Noisy,
    Samples,
    Streamed,
    batch_source,
    make,
    row_loader,
)
from tests.ranks import run_kept_ranks


class NoisyStream(Streamed):
    """Samples one after the other with noise of three generators added, and no state."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for item in super().__iter__():
            yield {**item, "x": item["x"] + torch.randn(WIDTH) + random.random() + float(np.random.rand())}


def resume(kind: str, directory: str) -> dict[str, Any]:
    """Eight steps straight; four, and four of a fresh engine from a checkpoint in the middle of an epoch; and again."""
    make_dataset: Any = {"samples": Samples, "stream": Streamed}[kind]
    straight = make(make_dataset(), workers=0, stages=2)
    for _ in range(3):
        straight.train_batch()
    straight.save_checkpoint(directory, tag="three")
    losses = [float(straight.train_batch()) for _ in range(4)]
    straight.load_checkpoint(directory)
    back = [float(straight.train_batch()) for _ in range(4)]
    straight.destroy()
    resumed = make(make_dataset(), workers=0, stages=2)
    resumed.load_checkpoint(directory)
    again = [float(resumed.train_batch()) for _ in range(4)]
    resumed.destroy()
    return {"straight": losses, "resumed": again, "rolled back": back}


class Stream(IterableDataset[dict[str, Any]]):
    """20 samples, another order each pass, which knows where it is."""

    def __init__(self) -> None:
        self.samples = Samples()
        self.epoch = self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < 20:
            self.at += 1
            yield self.samples[order[self.at - 1]]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def data_of(loader: RowLoader | None, *, peeks: bool = False) -> TrainingData:
    return TrainingData(batch_source(), loader, peeks_at_iterators=peeks)


def taken(data: TrainingData, count: int, *, ahead: bool = False) -> list[Tensor]:
    """Return the inputs of some mini-batches; with ``ahead`` each next one is taken before it is needed."""
    found = []
    for _ in range(count):
        batch = data.next(None)
        if isinstance(batch, UnitBatch):
            found.append(torch.cat([unit["x"] for unit in batch.units]))
        else:
            found.append(batch.held["x"] if isinstance(batch, OwnRows) else batch["x"])
        if ahead:
            data.peek(None)
    return found


def alike(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


KINDS: dict[str, Any] = {
    "samples": lambda workers: row_loader(Samples(), workers=workers),
    "units": lambda workers: row_loader(Samples(), workers=workers, units=3),
    "packed": lambda workers: row_loader(
        pack(Samples(), cost=[1.0 + n % 4 for n in range(20)], budget=8, units=2), workers=workers, units=2
    ),
    "stream": lambda workers: row_loader(Stream(), workers=workers),
    "dropped": lambda workers: row_loader(Streamed(), workers=workers),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_mini_batch_is_the_one_after_the_last_trained(kind: str, workers: int) -> None:
    straight = data_of(KINDS[kind](workers))
    wanted = taken(straight, 11, ahead=True)  # three epochs of three, and a half
    straight.close()
    for trained in (0, 1, 3, 5):
        before = data_of(KINDS[kind](workers))
        assert alike(taken(before, trained, ahead=True), wanted[:trained])
        position = json.loads(json.dumps(before.position()))
        before.close()
        after = data_of(KINDS[kind](workers))
        taken(after, 2)  # wherever it is
        after.restore(position)
        assert after.position() == position
        assert alike(taken(after, 3), wanted[trained : trained + 3])
        again = after.position()  # and once more
        after.restore(again)
        assert alike(taken(after, 3), wanted[trained + 3 : trained + 6])
        after.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Noisy, NoisyStream])
def test_random_numbers_go_on(kind: Any, workers: int) -> None:
    """What a dataset draws is what it would have drawn; and reading again leaves dropout's numbers alone."""
    straight = data_of(row_loader(kind(), workers=workers))
    taken(straight, 2)
    position, states = straight.position(), host_streams()
    wanted, drawn = taken(straight, 3), torch.rand(3)
    straight.close()
    resumed = data_of(row_loader(kind(), workers=workers))
    set_host_streams(states)
    resumed.restore(position)
    assert alike(taken(resumed, 3), wanted) and torch.equal(torch.rand(3), drawn)
    resumed.close()


def test_a_stream_without_state_says_how_many_samples_it_drops(caplog: pytest.LogCaptureFixture) -> None:
    before = data_of(row_loader(Streamed()))
    taken(before, 4)
    with caplog.at_level(logging.WARNING):
        data_of(row_loader(Streamed())).restore(before.position())
    (record,) = caplog.records
    assert "24 samples of it are read and dropped" in record.getMessage()


def test_other_data_are_named(caplog: pytest.LogCaptureFixture) -> None:
    before = data_of(row_loader(Samples()))
    wanted = torch.cat(taken(before, 2))
    position = before.position()
    smaller = data_of(row_loader(Samples(), mini_batch=4))
    smaller.restore(position)
    assert torch.equal(taken(smaller, 1)[0], taken(before, 1)[0][:4]) and wanted.shape[0] == 12
    stream = data_of(row_loader(Streamed()))
    with caplog.at_level(logging.WARNING):
        stream.restore(position)
        data_of(row_loader(Samples(), mini_batch=5)).restore(position)
        data_of(row_loader(Samples())).restore(None)
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in said] == [
        "training_data was another (samples) when the checkpoint was saved",
        "12 samples of the epoch are trained, which are no whole number of batches of 5",
        "the checkpoint has no position in training_data, which is read from its beginning",
    ]
    for broken in (
        {"kind": "samples"},
        {**position, "generator": {"$": "tensor"}},
        {**position, "lists": "x"},
    ):
        with pytest.raises(CheckpointError, match="position in"):
            data_of(row_loader(Samples())).restore(broken)


@pytest.mark.parametrize("is_given_before", [True, False])
def test_a_loader_without_a_position_is_told_of_once(
    is_given_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loader = [{"x": torch.ones(6), "labels": torch.zeros(6)}]
    data = data_of(None)
    with caplog.at_level(logging.WARNING):
        if is_given_before:
            data.use_loader(loader)
        data.restore(None)
        data.use_loader(loader)
        data.use_iterator(iter(loader))
    (record,) = caplog.records
    assert "the list is read from where it is, and samples may come twice" in record.getMessage()


class Stateful:
    """A caller's loader of 20 numbers, as torchdata has them: it goes on where its state says, once."""

    def __init__(self) -> None:
        self.at, self.epoch = 0, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.at < 3:
            self.at += 1
            first = 100 * self.epoch + 6 * self.at
            yield {"x": torch.arange(first, first + 6.0), "labels": torch.zeros(6)}
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": torch.tensor(self.epoch), "worker": (1, b"2")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["worker"] == (1, b"2")
        self.at, self.epoch = state["at"], int(state["epoch"])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("is_set_first", [False, True])
def test_a_loader_with_state_dict_goes_on(is_set_first: bool, ahead: bool) -> None:
    straight = data_of(None)
    straight.use_loader(Stateful())
    wanted = taken(straight, 8)
    for trained in (2, 3, 4):
        before = data_of(None, peeks=ahead)
        before.use_loader(Stateful())
        taken(before, trained, ahead=ahead)
        position = json.loads(json.dumps(before.position()))
        after = data_of(None, peeks=ahead)
        if is_set_first:
            after.use_loader(Stateful())
            taken(after, 1, ahead=ahead)
        after.restore(position)
        if not is_set_first:
            after.use_loader(Stateful())
        assert alike(taken(after, 4, ahead=ahead), wanted[trained : trained + 4])
        assert after.position() != position


def test_each_rank_goes_on_where_its_own_loader_was() -> None:
    for rank, number in ((0, 1), (1, 2), (2, 1)):  # of two that were saved
        data = data_of(None)
        data._batch_source.rank, loader = rank, Stateful()
        data.use_loader(loader)
        states = [{"at": at, "epoch": 0, "worker": [1, b"2"]} for at in (1, 2)]
        with_tuples = [{**state, "worker": (1, b"2")} for state in states]
        data.restore({"kind": "given", "states": [to_json(s, path="", tensors=None) for s in with_tuples]})
        assert taken(data, 1)[0][0] == 6 * (number + 1)


def test_mini_batches_are_counted_on_from_a_restored_position() -> None:
    before, after = (data_of(KINDS["samples"](0)) for _ in range(2))
    taken(before, 4)
    position = before.position()
    assert position is not None and position["mini_batches"] == 4
    after.restore(position)
    assert alike(taken(after, 2), taken(before, 2))
    found = after.position()
    assert found is not None and found["mini_batches"] == 6


@pytest.mark.parametrize("method", [None, "state_dict", "load_state_dict"])
def test_an_iterator_whose_state_cannot_be_taken_and_given_back_has_no_position(method: str | None) -> None:
    data = data_of(None)
    methods = {} if method is None else {method: lambda self, *state: {"at": 1}}
    iterator: Any = type("Numbers", (itertools.repeat,), methods) if methods else itertools.repeat
    data.use_iterator(iterator({"x": torch.zeros(ROWS), "labels": torch.zeros(ROWS)}))
    taken(data, 1)
    assert data.position() is None
    data.restore(None)


@pytest.mark.parametrize("kind", ["samples", "stream"])
def test_an_engine_resumes_in_the_middle_of_an_epoch(kind: str, tmp_path: Any) -> None:
    for found in run_kept_ranks(resume, 2, kind, str(tmp_path)):
        assert found["resumed"] == found["straight"]
        assert found["rolled back"] == found["straight"]
