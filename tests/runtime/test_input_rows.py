"""Rows on their way to a device: what they are, when they may be read, and when their buffers may be written again.

`DeferredStream` is a device whose copies run as late as they may: only what is waited for has arrived.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import Stage
from gpp_plugin.ir.tensors import UNIFORM, SampleRange, TensorSpec, batch_layout
from gpp_plugin.runtime.batches import CudaCopyStream, InputLink, InputRows, OwnRows, mini_batch_shapes
from gpp_plugin.runtime.memory.swap import HostPool

CPU = torch.device("cpu")
B = 8
STAGE = Stage(
    name="s", blocks=("b",), ranks=(0, 1), micro_batch_size=4, in_flight=2, schedule="1f1b"
)  # rank 1 reads samples 2..3 and 6..7
SPECS = {
    "x": TensorSpec(name="x", dtype="float32", shape=(2, 3), num_samples=2, layout=batch_layout()),
    "images": TensorSpec(
        name="images", dtype="float32", shape=(6, 2), num_samples=2, layout=batch_layout(0, 3)
    ),
    "ids": TensorSpec(name="ids", dtype="int64", shape=(2,), num_samples=2, layout=batch_layout()),
    "table": TensorSpec(name="table", dtype="float32", shape=(1, 5), num_samples=2, layout=UNIFORM),
}


class DeferredStream(CudaCopyStream):
    """Runs copies only as far as somebody waits for them; ``log`` has what was asked for, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._queue: list[tuple[Tensor, Tensor]] = []
        self._done = 0

    def is_direct(self, rows: Tensor) -> bool:
        return False

    def follow(self) -> None:
        self.log.append("follow")

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.log.append("copy")
        self._queue.append((target, source))

    def record(self) -> _Event:
        self.log.append("record")
        return _Event(self, len(self._queue))

    def wait(self, event: _Event) -> None:
        self.log.append(f"wait {event.position}")
        event.synchronize()

    def run_to(self, position: int) -> None:
        for target, source in self._queue[self._done : position]:
            target.copy_(source)
        self._done = max(self._done, position)


class _Event:
    def __init__(self, stream: DeferredStream, position: int) -> None:
        self._stream, self.position = stream, position

    def synchronize(self) -> None:
        self._stream.run_to(self.position)


def batch_of(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(B, 3, generator=generator),
        "images": torch.randn(3 * B, 2, generator=generator),
        "ids": torch.randint(100, (B,), generator=generator),
        "table": torch.randn(1, 5, generator=generator),
        "flag": True,
    }


def sliced(link: InputLink, batch: Any, dtype: torch.dtype | None = None) -> InputRows:
    return link.slice_batch(
        batch,
        ["x", "images", "ids", "table"],
        samples=[STAGE.samples(micro_batch, 1) for micro_batch in range(2)],
        specs=SPECS,
        dtype=dtype,
    )


def own_rows(batch: dict[str, Any]) -> OwnRows:
    """Return what rank 1 holds of a batch."""
    keep = [2, 3, 6, 7]
    images = torch.cat([batch["images"][6:12], batch["images"][18:24]])
    return OwnRows(
        shapes=mini_batch_shapes(batch),
        held={"x": batch["x"][keep], "images": images, "ids": batch["ids"][keep], "table": batch["table"]},
        samples=tuple(SampleRange(first_sample=first, num_samples=2) for first in (2, 6)),
        rows={"x": 1, "images": 3, "ids": 1, "table": 0},
        checksum=5,
    )


def expected(batch: dict[str, Any], dtype: torch.dtype) -> list[list[Tensor]]:
    return [
        [
            batch["x"][first : first + 2].to(dtype),
            batch["images"][3 * first : 3 * first + 6].to(dtype),
            batch["ids"][first : first + 2],
            batch["table"].to(dtype),
        ]
        for first in (2, 6)
    ]


def assert_same(found: InputRows, wanted: list[list[Tensor]]) -> None:
    assert len(found) == len(wanted)
    for have, want in zip(found, wanted, strict=True):
        assert [t.dtype for t in have] == [t.dtype for t in want]
        assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("is_beside", [False, True])
def test_rows_are_the_same_whoever_holds_what_and_however_they_travel(
    dtype: torch.dtype, is_own: bool, is_beside: bool
) -> None:
    pool = HostPool(is_pinned=False)
    link = InputLink(CPU, stream=DeferredStream(), pool=pool) if is_beside else InputLink(CPU)
    sizes = set()
    for seed in range(3):
        batch = batch_of(seed)
        with sliced(link, own_rows(batch) if is_own else batch, dtype) as found:
            assert_same(found, expected(batch, dtype))
        sizes.add(pool.total_bytes)
    assert len(sizes) == 1, "no more buffers than one mini-batch needs"


def test_a_micro_batch_waits_for_its_own_copies_only_and_for_what_computed_before() -> None:
    stream = DeferredStream()
    rows = sliced(InputLink(CPU, stream=stream, pool=HostPool(is_pinned=False)), batch_of())
    # all memory is there before the copies wait for the computing stream; the table is copied once
    assert stream.log == ["follow", *["copy"] * 4, "record", *["copy"] * 3, "record"]
    wanted = expected(batch_of(), torch.float32)
    assert torch.equal(rows[0][0], wanted[0][0]) and stream.log[-1] == "wait 4"
    assert stream._done == 4, "the second micro-batch is still on its way"
    assert torch.equal(rows[1][0], wanted[1][0]) and stream.log[-1] == "wait 7"


def test_page_locked_rows_are_copied_as_they_are() -> None:
    class Direct(DeferredStream):
        def is_direct(self, rows: Tensor) -> bool:
            return True

    batch, pool = batch_of(), HostPool(is_pinned=False)
    link = InputLink(CPU, stream=Direct(), pool=pool)
    with sliced(link, own_rows(batch)) as found:
        assert_same(found, expected(batch, torch.float32))
    assert pool.total_bytes == 0
    with sliced(link, own_rows(batch), torch.bfloat16) as found:  # the cast takes a buffer
        assert_same(found, expected(batch, torch.bfloat16))
    assert pool.total_bytes > 0


def test_own_rows_look_like_the_whole_mini_batch() -> None:
    batch = batch_of()
    own = own_rows(batch)
    assert {k: v.shape for k, v in own.items() if k != "flag"} == {
        k: v.shape for k, v in batch.items() if k != "flag"
    }
    assert own["x"].is_meta and own["flag"] is True and list(own) == list(batch)
    trial = own.stand_in()
    assert trial["x"].shape == (B, 3) and torch.equal(trial["x"][4:], batch["x"][[2, 3, 6, 7]])
    with pytest.raises(ConfigError, match="ids has 1 rows a sample"):
        own.take_whole("ids")
