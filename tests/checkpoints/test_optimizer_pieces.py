"""Optimizer state from masters of one layout to masters of another."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from gpp_plugin.engine.checkpoints.checkpoint_files import MASTER
from gpp_plugin.engine.checkpoints.optimizer_pieces import (
    Fragment,
    OptimizerPiece,
    OptimizerPieces,
    check_saved,
    optimizer_pieces,
    restore_optimizer,
    whole_fragment,
)
from gpp_plugin.errors import CheckpointError

SHAPES: dict[str, tuple[int, ...]] = {"a": (2, 3), "b": (4,), "scale": ()}


class Held:
    """Pieces of any number of ranks, as a checkpoint has them."""

    def __init__(self, *ranks: OptimizerPieces) -> None:
        self._ranks = ranks

    def kind(self) -> str:
        return self._ranks[0].kind

    def _pieces(self, name: str, what: str) -> list[OptimizerPiece]:
        found = [p for rank in self._ranks for p in rank.pieces if (p.name, p.what) == (name, what)]
        return sorted(found, key=lambda p: p.start or 0)

    def tensor_kinds(self, name: str) -> Collection[str]:
        return {p.what for rank in self._ranks for p in rank.pieces if p.name == name} - {MASTER}

    def is_whole(self, name: str, what: str) -> bool:
        return any(p.start is None for p in self._pieces(name, what))

    def read(self, name: str, what: str, start: int, count: int) -> Tensor:
        flat = torch.cat([p.tensor.reshape(-1) for p in self._pieces(name, what)])
        return flat[start : start + count].clone()

    def read_whole(self, name: str, what: str) -> Tensor:
        return self._pieces(name, what)[0].tensor.clone()

    def numbers(self, name: str) -> Mapping[str, Any]:
        return next(rank.numbers[name] for rank in self._ranks if name in rank.numbers)

    def options(self, name: str) -> Mapping[str, Any]:
        return next(g.options for rank in self._ranks for g in rank.groups if name in g.names)


def whole(seed: int) -> dict[str, Fragment]:
    generator = torch.Generator().manual_seed(seed)
    return {name: whole_fragment(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def flat(cuts: tuple[int, ...], rank: int, seed: int) -> dict[str, Fragment]:
    """Return one rank's fragments of a flat buffer a | b | scale that is cut into parts."""
    first, size = sum(cuts[:rank]), cuts[rank]
    master = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    found, at = {}, 0
    for name, shape in SHAPES.items():
        count = torch.Size(shape).numel()
        begin, end = max(at, first), min(at + count, first + size)
        if begin < end:
            found[name] = Fragment(
                master=master,
                master_start=begin - first,
                start=begin - at,
                num_elements=end - begin,
                flat=True,
            )
        at += count
    return found


def masters(fragments: Mapping[str, Fragment]) -> list[Tensor]:
    return list({id(f.master): f.master for f in fragments.values()}.values())


def stepped(fragments: Mapping[str, Fragment], steps: int = 3, **options: Any) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(masters(fragments), lr=0.1, **options)
    for step in range(steps):
        for master in masters(fragments):
            master.grad = torch.ones_like(master) * (step + 1)
        optimizer.step()
    return optimizer


def state_of(
    optimizer: torch.optim.Optimizer, fragments: Mapping[str, Fragment]
) -> dict[tuple[str, str], Tensor]:
    pieces = optimizer_pieces(optimizer, fragments, has_masters=True).pieces
    return {(p.name, p.what): p.tensor.reshape(-1).clone() for p in pieces}


@pytest.mark.parametrize("cuts", [(11,), (5, 6), (6, 5), (1, 9, 1), (5, 7)], ids=str)
def test_there_and_back(cuts: tuple[int, ...]) -> None:
    """Whole parameters to flat partitions, padding in the last of them, and back."""
    one = whole(1)
    before = stepped(one)
    held = Held(optimizer_pieces(before, one, has_masters=True))
    ranks = []
    for rank in range(len(cuts)):
        fragments = flat(cuts, rank, seed=2)
        optimizer = torch.optim.AdamW(masters(fragments), lr=9.0, weight_decay=0.9)
        restore_optimizer(optimizer, fragments, held)
        assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.param_groups[0]["weight_decay"] == 0.01
        assert all(float(state["step"]) == 3 for state in optimizer.state.values())
        ranks.append(optimizer_pieces(optimizer, fragments, has_masters=True))
    two = whole(3)
    after = torch.optim.AdamW(masters(two), lr=9.0)
    restore_optimizer(after, two, Held(*ranks))
    wanted, found = state_of(before, one), state_of(after, two)
    assert wanted.keys() == found.keys() and len(wanted) == 9
    assert all(torch.equal(value, found[key]) for key, value in wanted.items())


def test_an_optimizer_that_took_no_step() -> None:
    one, two = whole(1), whole(2)
    held = Held(optimizer_pieces(stepped(one, 0), one, has_masters=True))
    optimizer = stepped(two)
    restore_optimizer(optimizer, two, held)
    assert not optimizer.state, "the state of what was before is gone"


def test_unlike_step_counts_in_one_flat_master(caplog: pytest.LogCaptureFixture) -> None:
    one = whole(1)
    optimizer = stepped(one)
    optimizer.state[one["b"].master]["step"] += 4
    two = flat((11,), 0, seed=2)
    found = torch.optim.AdamW(masters(two))
    with caplog.at_level(logging.WARNING):
        restore_optimizer(found, two, Held(optimizer_pieces(optimizer, one, has_masters=True)))
    assert "step of the parameters" in caplog.text and "[3.0, 7.0]" in caplog.text
    assert float(next(iter(found.state.values()))["step"]) == 7


def test_state_of_a_shape_of_its_own() -> None:
    one = whole(1)
    optimizer = torch.optim.Adafactor(masters(one), lr=0.1)
    for master in masters(one):
        master.grad = torch.ones_like(master)
    optimizer.step()
    held = Held(optimizer_pieces(optimizer, one, has_masters=False))
    two = whole(2)
    found = torch.optim.Adafactor(masters(two), lr=0.1)
    for name in SHAPES:  # masters are not saved here: the weights are
        two[name].master.copy_(one[name].master)
    held.read = (
        lambda name, what, start, count: (  # type: ignore[method-assign]
            one[name].master.reshape(-1)[start : start + count].clone()
            if what == MASTER
            else Held.read(held, name, what, start, count)
        )
    )
    restore_optimizer(found, two, held)
    for name in SHAPES:
        wanted, got = optimizer.state[one[name].master], found.state[two[name].master]
        assert wanted.keys() == got.keys()
        assert all(torch.equal(torch.as_tensor(wanted[k]), torch.as_tensor(got[k])) for k in wanted)
    parts = flat((11,), 0, seed=2)
    with pytest.raises(
        CheckpointError, match="is of the whole parameter, of which this run's ZeRO steps parts"
    ):
        check_saved(torch.optim.Adafactor(masters(parts)), parts, held)


class FusedAdam(torch.optim.AdamW):
    """DeepSpeed's by name."""


def test_families_of_optimizers() -> None:
    one = whole(1)
    held = Held(optimizer_pieces(stepped(one), one, has_masters=True))
    check_saved(FusedAdam(masters(one)), one, held)
    with pytest.raises(CheckpointError, match="has the state of AdamW, this run's optimizer is SGD"):
        check_saved(torch.optim.SGD(masters(one), lr=0.1), one, held)


def test_groups_keep_their_numbers_and_options() -> None:
    one = whole(1)
    second = {"params": [one["b"].master], "lr": 0.25, "betas": (0.8, 0.9)}
    optimizer = torch.optim.AdamW([{"params": [one["a"].master], "lr": 0.5}, second])
    own = {name: one[name] for name in ("a", "b")}
    pieces = optimizer_pieces(optimizer, own, has_masters=True, group_numbers=[1, 4], foreign=["a"])
    found_groups = [(g.number, g.names, g.options["lr"]) for g in pieces.groups]
    assert found_groups == [(1, ("a",), 0.5), (4, ("b",), 0.25)]
    assert {p.name for p in pieces.pieces} == {"b"}
    two = {name: whole(2)[name] for name in ("b", "a")}
    found = torch.optim.AdamW([{"params": [f.master]} for f in two.values()])
    held = Held(optimizer_pieces(optimizer, own, has_masters=True))
    restore_optimizer(found, two, held)
    assert [group["lr"] for group in found.param_groups] == [0.25, 0.5]
    assert found.param_groups[0]["betas"] == (0.8, 0.9)


class CountsInIntegers(torch.optim.SGD):
    """Keeps its step as an integer, as DeepSpeed's optimizers do; no optimizer of torch's own module."""


def test_steps_are_counted_as_the_optimizer_that_goes_on_counts_them() -> None:
    one = whole(1)
    before = stepped(one)
    for state in before.state.values():
        state["rank"] = 2  # a number of its own, which no other optimizer turns into its kind of step
    held = Held(optimizer_pieces(before, one, has_masters=True))
    for optimizer, kind in (
        (CountsInIntegers(masters(one), lr=0.1), int),
        (torch.optim.Adam(masters(one)), Tensor),
    ):
        restore_optimizer(optimizer, one, held)
        assert all(
            isinstance(state["step"], kind) and state["step"] == 3 for state in optimizer.state.values()
        )
        assert all(type(state["rank"]) is int and state["rank"] == 2 for state in optimizer.state.values())
    counted = Held(optimizer_pieces(CountsInIntegers(masters(one), lr=0.1), one, has_masters=True))
    assert counted.kind() == "CountsInIntegers"
