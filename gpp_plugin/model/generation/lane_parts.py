"""Which ranks generate together, from which prompts, and what they draw: lanes, and their parts of the prompts.

Source: this project
Tests: tests/model/test_generator.py, tests/integrations/test_generation.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.samples import even_ranges


def lanes_of(plan: PipelinePlan) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each lane: one rank of every stage, each rank once.

    Stages of two ranks each make two lanes, ranks ``0 1 | 2 3`` the lanes ``(0, 2)`` and ``(1, 3)``; of stages with two
    and one ranks there is one lane, and a rank stands by. Where stages share ranks so that two lanes would meet on one,
    or be of unlike ranks, there is one lane. Tensor ranks, which have their stage's weights whole meanwhile, are like
    data-parallel ones.
    """
    # A rank that were in two lanes would have to run two generations at once; and ranks at one position of all lanes
    # must hold the same stages, for they share these stages' caches where caches are cut.
    number = min(len(stage.ranks) for stage in plan.stages)
    lanes = tuple(tuple(dict.fromkeys(stage.ranks[lane] for stage in plan.stages)) for lane in range(number))
    used = [rank for lane in lanes for rank in lane]
    are_alike = len({len(lane) for lane in lanes}) == 1
    return lanes if are_alike and len(used) == len(set(used)) else lanes[:1]


def rows_of(samples: int, lanes: int, lane: int, *, is_cut: bool) -> list[int]:
    """Return the prompts of a lane: neighbours, the first lanes one more.

    Lanes whose caches are cut have equally many, the last ones copies of the first prompt.

    >>> [rows_of(5, 2, lane, is_cut=False) for lane in (0, 1)], [rows_of(5, 2, lane, is_cut=True) for lane in (0, 1)]
    ([[0, 1, 2], [3, 4]], [[0, 1, 2], [3, 4, 0]])
    """
    if is_cut:
        each = -(-samples // lanes)
        return [row if row < samples else 0 for row in range(lane * each, (lane + 1) * each)]
    return list(even_ranges(samples, lanes)[lane])


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePart:
    """What a lane generates from: its part of a micro-batch of the prompts.

    Args:
        number: of the micro-batch, whose ``samples`` prompts begin at ``first`` of all ``whole``.
        lane: of ``lanes``.
        is_cut: the lanes' caches are cut along the sequence, so that they go in step.
    """

    number: int
    samples: int
    first: int
    whole: int
    lane: int
    lanes: int
    is_cut: bool

    @property
    def is_whole(self) -> bool:
        """Return whether it is all there is; then prompts need not be numbered."""
        return self.lanes == 1 and self.samples == self.whole

    @property
    def rows(self) -> list[int]:
        """Return the numbers of its prompts in the micro-batch."""
        return rows_of(self.samples, self.lanes, self.lane, is_cut=self.is_cut)

    @property
    def drawn_rows(self) -> list[int]:
        """Return the numbers of its prompts in all."""
        return [self.first + row for row in self.rows]

    def kept_rows(self, rows: int) -> int:
        """Return how many sequences of a micro-batch are no copies, where this part's lane made so many."""
        return rows // len(self.rows) * self.samples


class DrawsOfAll(TorchFunctionMode):
    """Lets a part sample as one process with all prompts would: it draws for all of them, and uses its own rows.

    Args:
        rows: of the part, of ``samples``.
    """

    number: int = 0
    """How often it drew."""

    def __init__(self, rows: Sequence[int], samples: int) -> None:
        super().__init__()
        self._rows = list(rows)
        self._samples = samples

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Draw; everything else goes on as it is."""
        kwargs = kwargs or {}
        if func is not torch.multinomial:
            return func(*args, **kwargs)
        return self._draw(*args, **kwargs)

    def _draw(self, probabilities: Tensor, num_samples: int) -> Tensor:
        # As torch draws without replacement: the most probable of p / q, q exponential. A prompt may have several rows
        # (beams, several sequences): as many in the lane as in the whole.
        each = probabilities.shape[0] // len(self._rows)
        self.number += 1
        whole = probabilities.new_empty(self._samples * each, probabilities.shape[1]).exponential_(1)
        own = whole.view(self._samples, each, -1)[self._rows].view_as(probabilities)
        return (probabilities / own).topk(num_samples, dim=-1).indices
