"""Swaps what a user's module keeps: its storages are known by number, in the order in which it first keeps them.

Nothing is asked of the module but that it keeps the same ones each time, and even that only so that what is planned is
what leaves: a module that goes another way keeps or swaps other storages, and its gradients are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.memory_plan import MemoryPlan
from gpp_plugin.runtime.counting import StorageNumbers
from gpp_plugin.runtime.recipe import Packed, Pass, Swap, is_movable, unpack
from gpp_plugin.runtime.stage_module import StageFunction
from gpp_plugin.runtime.swap import SwapLink


class SwappingModule:
    """A stage's code that is a user's module, some of whose storages wait on the host.

    Args:
        swapped: the numbers of those (`StorageNumbers`).
    """

    def __init__(self, function: StageFunction, swapped: frozenset[int], link: SwapLink) -> None:
        assert function.given is not None
        self._function = function
        self._module = function.given
        self._swapped = swapped
        self._link = link

    def run(
        self, fixed: Sequence[Tensor], received: Sequence[Tensor], **surroundings: Any
    ) -> tuple[Pass, tuple[Tensor, ...]]:
        """Return what is kept of a pass, and its outputs.

        Args:
            fixed: parameters and the model's inputs.
        """
        kept = Pass(fixed=(), num_segments=0, link=self._link, **surroundings)
        numbers = StorageNumbers((*fixed, *self._module.buffers()))
        slots: dict[tuple[int, int], int] = {}
        free = itertools.count()

        def pack(tensor: Tensor) -> Packed:
            number = numbers.number(tensor)
            if number not in self._swapped or not is_movable(tensor, self._link.device):
                return kept.pack(tensor, 0, None)
            key = number, tensor._version  # what was written to after it left is another storage on the host
            if key not in slots:
                slots[key] = next(free)
            return kept.pack(tensor, 0, Swap(slots[key]))

        with saved_tensors_hooks(pack, unpack):
            outputs = self._function.call(*fixed, *received)
        kept.finish()
        return kept, outputs


def swapped_numbers(stage: str, plan: MemoryPlan) -> frozenset[int]:
    """Return the numbers of the storages that a plan swaps.

    Raises:
        PlanError: it also recomputes, or names something else than storages of a module.
    """
    numbers = [tensor.name.rpartition(":")[2] for tensor in plan.swapped]
    if plan.recomputed or not all(number.isdecimal() for number in numbers):
        what = plan.swapped[0].name if plan.swapped else plan.recomputed[0].blocks[:3]
        raise PlanError(
            f"stage {stage!r} runs the user's own module as it is: it swaps some of what that keeps, or runs again as "
            f"a whole, and its memory plan says {what!r}; plan again for this graph"
        )
    return frozenset(map(int, numbers))
