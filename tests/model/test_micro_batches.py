"""Calls that take turns: one runs at a time, a wait lets the others go on, and each draws of its own streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.tensors import even_ranges
from gpp_plugin.model.generation.micro_batches import Turns, copy_modules

CPU = torch.device("cpu")
LIMIT_S = 30


def test_a_wait_lets_others_go_on_and_everyone_draws_as_if_alone() -> None:
    """The first waits for what the second does behind its own wait; nobody notices what the other draws."""
    turns, log = Turns(CPU), []
    came = [threading.Event(), threading.Event()]

    def call(number: int) -> list[float]:
        drawn = [float(torch.rand(()))]
        log.append(f"{number} begins")
        with turns.waiting(number):
            came[1 - number].set()
            assert came[number].wait(LIMIT_S)
        log.append(f"{number} ends")
        return drawn + [float(torch.rand(())) for _ in range(1 + number)]

    torch.manual_seed(3)
    begin = torch.get_rng_state()
    expected = [float(torch.rand(())) for _ in range(3)]
    torch.set_rng_state(begin)
    found, ends = turns.run([lambda: call(0), lambda: call(1)])
    assert log[:2] == ["0 begins", "1 begins"] and sorted(log[2:]) == ["0 ends", "1 ends"]
    assert found == [expected[:2], expected]
    assert torch.equal(torch.get_rng_state(), begin), "the caller says how it goes on"
    torch.set_rng_state(ends[0][0])
    assert float(torch.rand(())) == expected[2]


def test_what_one_raises_is_raised_at_once_and_the_others_end_in_their_wait() -> None:
    turns, release, ended = Turns(CPU), threading.Event(), threading.Event()

    def waits() -> None:
        try:
            with turns.waiting(0):
                release.wait(LIMIT_S)
        finally:
            ended.set()

    def fails() -> None:
        raise RuntimeError("its own")

    with pytest.raises(RuntimeError, match="its own"):
        turns.run([waits, fails])
    assert not ended.is_set()
    release.set()
    assert ended.wait(LIMIT_S)


class Noting(nn.Module):
    """Notes what it was called with, as models do with offsets of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2))
        self.noted: Any = None
        self.other = torch.ones(2, requires_grad=True) * 2

    def forward(self, x: Any) -> Any:
        self.noted = x
        return self.inner(x)


def test_a_twin_shares_tensors_and_no_notes() -> None:
    model = Noting()
    model.inner.register_forward_pre_hook(hook := (lambda module, args: None))
    twin = copy_modules(model)
    twin.noted = 1
    assert model.noted is None and twin.inner is not model.inner
    assert twin.inner.weight is model.inner.weight and twin.table is model.table and twin.other is model.other
    assert list(twin.inner._forward_pre_hooks.values()) == [hook]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: setattr(model, "noted", threading.Lock()), "Noting cannot be copied .*; set it to 1"),
        (lambda model: setattr(model.inner, "forward", lambda x: x), "forward of 'inner' was replaced"),
    ],
)
def test_a_model_without_a_twin_is_refused_in_one_line(change: Callable[[Any], None], said: str) -> None:
    model = Noting()
    change(model)
    with pytest.raises(ConfigError, match=said):
        copy_modules(model)


def test_prompts_are_split_evenly() -> None:
    assert [list(rows) for rows in even_ranges(7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
