"""The sums over ranks that a mini-batch's gradients need before the step, each done once and in order.

reduce_data     over the stage's data-parallel ranks
sum_tensor      over its tensor ranks, of what each has of its part of the sequence only
reduce_tied     over the stages that hold a parameter together
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.integrations.gradients import StageGradients
from gpp_plugin.integrations.stage_groups import StageGroups, TiedParameter
from gpp_plugin.integrations.tensor_parallel import check_duplicates, sequence_parallel
from gpp_plugin.ir.plan import Stage


class GradientReductions:
    """Which sums of one stage's gradients are done.

    Args:
        stage_index: of ``stage`` in the plan.
        tied: the parameters that the stage holds together with others.
    """

    def __init__(
        self,
        gradients: StageGradients,
        *,
        stage: Stage,
        stage_index: int,
        groups: StageGroups,
        tied: Sequence[TiedParameter],
        device: torch.device,
    ) -> None:
        self._gradients = gradients
        self._stage = stage
        self._stage_index = stage_index
        self._groups = groups
        self._tied = tuple(tied)
        self._device = device
        self._has_data = self._has_tied = self._has_tensor = False

    def accumulate(self) -> None:
        """Take in a micro-batch's gradients, which no rank has summed yet."""
        self._gradients.accumulate()
        self._has_data = False

    def reduce_data(self) -> None:
        """Sum over the data-parallel ranks; collective over them."""
        if not self._has_data:
            self._gradients.reduce_data()
        self._has_data = True

    def reduce_tied(self) -> None:
        """Sum tied parameters' gradients over their stages; collective over those.

        Raises:
            RuntimeFailure: the stage's own sum is not complete.
        """
        if not self._has_data and not self._gradients.is_empty():
            raise RuntimeFailure("reduce_tied before reduce_data: the stage's own sum must be complete first")
        if not self._has_tied:
            self.sum_tensor()
            for stages in sorted({tuple(sorted(set(tie.stages))) for tie in self._tied}):
                names = [tie.name for tie in self._tied if tuple(sorted(set(tie.stages))) == stages]
                self._gradients.reduce_tied(
                    [name for name in names if name in self._gradients.parameters],
                    group=self._groups.tied[stages],
                )
        self._has_tied = True

    def sum_tensor(self) -> None:
        """Sum over the tensor ranks what each has of its part of the sequence only; once a mini-batch."""
        if self._stage.tensor > 1 and not self._has_tensor:
            names = sequence_parallel(self._gradients.parameters)
            self._gradients.sum_tensor(names, group=self._groups.tensor[self._stage_index])
        self._has_tensor = True

    def compare_duplicates(self) -> None:
        """Refuse tensor ranks that have unlike gradients of what they hold alike; collective over them.

        Raises:
            ConfigError: names the parameter.
        """
        group = self._groups.tensor[self._stage_index]
        if self._stage.tensor > 1 and isinstance(group, dist.ProcessGroup):
            self.sum_tensor()
            check_duplicates(self._gradients, stage=self._stage.name, group=group, device=self._device)

    def finish(self, *, is_partitioned: bool) -> None:
        """Complete the sums for a step.

        Args:
            is_partitioned: ranks step their parts of the gradients, so that even a single one reduces.

        Raises:
            RuntimeFailure: a sum that other ranks take part in was left out.
        """
        lacks_data = (self._stage.degree > 1 or is_partitioned) and not self._has_data
        if (lacks_data or (self._tied and not self._has_tied)) and not self._gradients.is_empty():
            raise RuntimeFailure("step before reduce_data and reduce_tied: replicas would step differently")
        self.sum_tensor()

    def clear(self) -> None:
        """Forget the mini-batch's gradients."""
        self._gradients.clear()
        self._has_data = self._has_tied = self._has_tensor = False
