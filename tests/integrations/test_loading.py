"""Loading: every rank its own rows, the same numbers whoever loads them and however many workers there are."""

from __future__ import annotations

import itertools
import multiprocessing
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.engine.loading.batch_source import _Loading
from gpp_plugin.engine.loading.row_loader import RowLoader, count_workers, make_loader
from gpp_plugin.engine.loading.training_data import TrainingData
from gpp_plugin.errors import ConfigError, RuntimeFailure
from gpp_plugin.model.graph.stage_graph import StageGraph, named_batch, prepare_batch
from gpp_plugin.runtime.batches import OwnRows, UnitBatch, mini_batch_shapes
from gpp_plugin.runtime.random_streams import host_streams, set_host_streams
from tests.integrations import loading_jobs as jobs
from tests.integrations.loading_jobs import Lengths, Noisy, Samples, Streamed, batch_source, pad, row_loader
from tests.ranks import run_kept_ranks

B = jobs.ROWS
MODEL = jobs.Classes()
WHOLE = ((0, B),)
PARTS = (((0, 1), (3, 1)), ((1, 2), (4, 2)))
"""Two ranks of a stage: samples 0 and 3, and samples 1, 2, 4 and 5."""


def loader_of(dataset: Any, **given: Any) -> RowLoader:
    keys = ("x", "labels") if not getattr(dataset, "_extra", None) else ("x", "labels", "extra")
    return row_loader(dataset, prepare=lambda batch: prepare_batch(MODEL, batch), keys=keys, **given)


def taken(loader: RowLoader, count: int) -> list[OwnRows]:
    try:
        return list(itertools.islice(loader, count))
    finally:
        loader.close()


def whole_batches(dataset: Any, count: int, collate_fn: Any = None) -> list[dict[str, Tensor]]:
    """Return what iterating over a loader again and again gives."""
    loader = make_loader(dataset, mini_batch=B, collate_fn=collate_fn, seed=1)
    return list(itertools.islice((batch for _ in range(count) for batch in loader), count))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("dataset", "collate_fn"), [(Samples, None), (Streamed, None), (Lengths, pad)])
def test_the_order_is_that_of_a_loader_epoch_after_epoch(workers: int, dataset: Any, collate_fn: Any) -> None:
    torch.manual_seed(5)
    wanted = whole_batches(dataset(), 8, collate_fn)  # three epochs of three mini-batches, but for one
    after = torch.get_rng_state()
    torch.manual_seed(5)
    found = taken(loader_of(dataset(), workers=workers, collate_fn=collate_fn), 8)
    if not workers or dataset is not Streamed:
        assert torch.equal(torch.get_rng_state(), after), "dropout must not depend on who loads"
    assert len({own.checksum for own in found}) > 2
    for have, want in zip(found, wanted, strict=True):
        for key, value in want.items():
            assert torch.equal(have.held[key], value) and have[key].shape == value.shape


def test_ranks_that_load_parts_draw_what_one_process_draws() -> None:
    torch.manual_seed(5)
    program = host_streams()
    wanted = whole_batches(Noisy(), 4)
    set_host_streams(program)
    for rows in PARTS:
        loader, found = loader_of(Noisy(), part=rows), []
        loader.streams.state = program  # as ranks agree
        for _ in range(4):
            torch.rand(rows[0][0] + 1)  # what else this rank draws
            found.append(next(loader))
        numbers = loader._share.numbers
        assert all(
            torch.equal(own.held["x"], batch["x"][numbers]) for own, batch in zip(found, wanted, strict=True)
        )
        set_host_streams(program)


@pytest.mark.parametrize("way", ["own", "iterator", "batch", "loader"])
def test_data_that_draw_are_those_of_one_process_however_they_come(way: str) -> None:
    block: dict[str, Any] = {"stages": 1, "data_parallel": 2} if way in ("own", "batch") else {"stages": 2}
    for found in run_kept_ranks(jobs.train_on_noise, 2, way, {"loader_workers": 0, **block}):
        losses, drawn = found["alone"]
        assert len(drawn) >= 5 * jobs.ROWS and found["ranks"][0] == pytest.approx(losses, rel=1e-5)
        for name in ("ranks", "dropout"):
            own = found[name][1]
            assert not own or own == drawn, (name, "a rank that reads nothing draws nothing")


def test_samples_are_fetched_together_where_a_dataset_can() -> None:
    class Together(Samples):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            together.append(len(indices))
            return [self[index] for index in indices]

    together: list[int] = []
    found = taken(loader_of(Together(), part=PARTS[0]), 3)
    assert together == [6, 2, 2]
    for have, want in zip(found, taken(loader_of(Samples(), part=PARTS[0]), 3), strict=True):
        assert torch.equal(have.held["x"], want.held["x"])


def test_a_rank_keeps_what_it_reads_in_the_precision_it_computes_in() -> None:
    own = taken(loader_of(Samples(), workers=2, part=PARTS[0], held={"x"}, dtype=torch.bfloat16), 2)[1]
    assert set(own.held) == {"x"} and set(own) == {"x", "labels"}
    assert own.held["x"].dtype == torch.bfloat16 and own["x"].dtype == torch.float32
    assert own.held["x"].untyped_storage().nbytes() == 2 * 8 * 2, "two rows leave the worker, not six"


def test_noise_depends_on_the_sample_alone_where_workers_draw_it() -> None:
    whole = taken(loader_of(Noisy(), workers=1), 4)
    assert not torch.equal(whole[0].held["x"], taken(loader_of(Samples()), 1)[0].held["x"])
    for workers, part in ((2, WHOLE), (1, PARTS[0]), (2, PARTS[1])):
        rows = [n for first, count in part for n in range(first, first + count)]
        for have, want in zip(taken(loader_of(Noisy(), workers=workers, part=part), 4), whole, strict=True):
            assert torch.equal(have.held["x"], want.held["x"][rows])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_fails_is_named_in_one_line_and_workers_end(workers: int) -> None:
    loader = loader_of(Samples(broken=7), workers=workers)
    others = set(multiprocessing.active_children())  # ranks that other tests keep
    with pytest.raises(RuntimeFailure) as caught:
        taken(loader, 4)
    said = "rank 3 could not load sample 7 of training_data: OSError: the disk is gone (loading_jobs.py:"
    assert str(caught.value).startswith(said)
    assert set(multiprocessing.active_children()) <= others
    with pytest.raises(RuntimeFailure, match="rank 3 loads no more"):
        next(loader)


def test_a_worker_that_is_killed_is_noticed() -> None:
    others = set(multiprocessing.active_children())  # ranks that other tests keep
    loader = loader_of(Samples(), workers=1)
    try:
        next(loader)
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        with pytest.raises(RuntimeFailure, match="rank 3: a process that loads training_data is gone"):
            for _ in range(9):
                next(loader)
    finally:
        loader.close()


def test_batches_of_other_keys_and_late_functions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a batch also has \['more'\]"):
        taken(loader_of(Samples(extra=lambda index: {"extra": 1.0, "more": 1.0})), 1)
    loader = loader_of(Samples(), part=PARTS[0])
    loader.apply(
        lambda batch: {**batch, "x": batch["x"] - batch["x"].mean(0)}
    )  # mixes samples: all are fetched
    own = [next(loader), next(loader)][1]
    wanted = whole_batches(Samples(), 2)[1]["x"]
    assert torch.equal(own.held["x"], (wanted - wanted.mean(0))[[0, 3]])
    with pytest.raises(ConfigError, match="set_batch_fn"):
        loader.apply(lambda batch: batch)


def test_workers_are_chosen_where_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for cores, workers in ((4, 1), (16, 1), (24, 2), (256, 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert count_workers("auto", cuda) == workers
    assert count_workers("auto", cpu) == 0 and count_workers(3, cpu) == 3


@pytest.mark.parametrize(("stages", "kind"), [(1, "fixed"), (2, "fixed"), (1, "padded"), (1, "streamed")])
def test_losses_and_gradients_do_not_depend_on_who_loads(stages: int, kind: str) -> None:
    for found in run_kept_ranks(jobs.train_with_and_without_workers, 2, stages, kind):
        for loaded in ("0", "2"):
            for (loss, gradients), (want, wanted) in zip(found[loaded], found["None"], strict=True):
                assert loss == want
                assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())
        assert found["children 0"] == 0 and found["children after 2"] == 0
        assert found["children 2"] == (0 if not found["reads"] else 1 if kind == "streamed" else 2)
        if (
            kind == "fixed"
        ):  # given batches and the first own one are whole: 8 samples, and then 4 of each rank
            own = 4 if stages == 1 else 8
            assert found["fetched 0"] == (8 + 4 * own if found["reads"] else 0)
            assert found["fetched None"] == 5 * 8 and found["fetched 2"] == 0


def test_tuples_are_what_the_model_is_called_with() -> None:
    for found in run_kept_ranks(jobs.train_on_tuples, 2):
        for kind in ("pairs", "turned"):
            for (loss, gradients), (want, wanted) in zip(found[kind], found["dicts"], strict=True):
                assert loss == want
                assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())
        assert found["iterators"] == found["evaluated"]


@pytest.mark.parametrize("way", ["set_batch_fn", "loader", "iterator"])
def test_data_without_names_wait_for_the_call_that_gives_them(way: str) -> None:
    line = "has 3 entries, and forward of Classes takes 2 by position .*call engine.set_batch_fn"
    for answer in run_kept_ranks(jobs.begin_late, 2, way):
        assert answer["losses"] == answer["wanted"]
        assert answer["given"] == [None, None, None]
        assert answer["kind"] == "GraphPipelineEngine" and answer["optimizer"]
        for name, said in zip(("train_batch", "optimizer"), answer["said"], strict=True):
            assert re.match(f"ConfigError: engine.{name}: a batch {line}", said)
        assert re.match(f"UnnamedBatch: a batch {line}", answer["wrong"])


class OnePair(nn.Module):
    def forward(self, x: Any, labels: Any = None, *, mode: str = "") -> Any:
        raise NotImplementedError


def test_positions_that_forward_does_not_have_are_refused_with_what_names_them() -> None:
    x, y = torch.ones(2, 3), torch.zeros(2)
    assert named_batch(OnePair(), x) == {"x": x}
    assert list(named_batch(OnePair(), [x, y])) == ["x", "labels"]
    untouched = {"x": x}, [{"x": x}, {"x": x}], "text"
    assert all(named_batch(OnePair(), batch) is batch for batch in untouched)
    ways = r"collate_fn.*set_batch_fn"
    with pytest.raises(ConfigError, match=rf"has 3 entries.* OnePair takes 1 to 2 .*\(x, labels\): .*{ways}"):
        named_batch(OnePair(), (x, y, y))
    with pytest.raises(ConfigError, match=rf"has 0 entries.*{ways}"):
        named_batch(OnePair(), ())
    with pytest.raises(ConfigError, match=rf"a batch is a list, and stages read inputs by name: .*{ways}"):
        named_batch(StageGraph(), [x, y])


def test_all_ranks_know_which_masks_hide_nothing_in_the_whole_mini_batch() -> None:
    answers = run_kept_ranks(jobs.tell_of_ones, 2)
    for answer in answers:
        assert answer["told"] == answer["wanted"] and sorted(answer["told"]) == [False, True, True]
    step = answers[0]["told"].index(False)
    assert {answer["own"][step] for answer in answers} == {True, False}, "one of them cannot see it"


# ---- what is taken ahead of callers' iterators -------------------------------------------------------------


def taking_turns(iterators: list[Any]) -> list[float]:
    """Take every iterator's three mini-batches in turn, each time one more ahead; return what came, in order."""
    data = TrainingData(batch_source(mini_batch=1, keys=["x"]), None, peeks_at_iterators=True)
    came = []
    for _ in range(3):
        for iterator in iterators:
            came.append(float(data.next(iterator)["x"]))
            data.peek(iterator)
    for iterator in iterators:
        with pytest.raises(StopIteration):
            data.next(iterator)
    assert not data._taken
    return came


def numbered(first: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.tensor([[10.0 * first + step]])} for step in range(3)]


@pytest.mark.parametrize("is_held", [False, True], ids=["generators", "iterators of lists"])
def test_any_number_of_iterators_in_turn_lose_nothing(is_held: bool, caplog: Any) -> None:
    iterators = [iter(numbered(first)) if is_held else (b for b in numbered(first)) for first in range(6)]
    assert taking_turns(iterators) == [10.0 * first + step for step in range(3) for first in range(6)]
    assert [r.getMessage().count("(a list_iterator)") for r in caplog.records] == [1] * is_held


def test_what_was_taken_ahead_goes_with_its_iterator() -> None:
    data = TrainingData(batch_source(mini_batch=1, keys=["x"]), None, peeks_at_iterators=True)

    def failing() -> Any:
        yield {"x": torch.zeros(1, 1)}
        raise OSError("the disk is gone")

    for make in (
        failing,
        lambda: (batch for batch in numbered(1)),
        lambda: (batch for batch in numbered(1)[:1]),
    ):
        iterator = make()
        data.next(iterator)
        data.peek(iterator)
        assert data._taken, "a mini-batch, an error or the end"
        goes = weakref.ref(iterator)
        del iterator  # no collection is needed
        assert goes() is None and not data._taken


def test_what_was_loaded_ahead_is_dropped_when_all_ranks_have_told_of_it() -> None:
    feed, waits, work = batch_source(), [], object()
    feed._wait = waits.append  # type: ignore[method-assign]
    feed._prefetched = _Loading(torch.zeros(2), work=work)
    for _ in range(2):
        feed.drop_prefetched()
        assert waits == [work] and feed._prefetched is None


def test_the_source_tells_the_shapes_of_a_mini_batch_and_of_every_unit() -> None:
    feed = batch_source()
    one, other = ({"x": torch.ones(n, 2 + n), "name": "a text"} for n in (1, 2))

    def shapes(batch: Any) -> dict[str, Any]:
        return {key: (v.device.type, *v.shape) if isinstance(v, Tensor) else v for key, v in batch.items()}

    assert shapes(feed._broadcast_shapes(one)) == shapes(mini_batch_shapes(one))
    told = feed._broadcast_shapes(UnitBatch(units=(one, other)))
    assert isinstance(told, UnitBatch)
    assert [shapes(unit) for unit in told.units] == [shapes(mini_batch_shapes(unit)) for unit in (one, other)]
