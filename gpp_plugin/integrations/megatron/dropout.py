"""Random streams of a stage's dropout.

Ranks of one tensor group must drop the same elements of what they all hold and different ones of what they share out,
and ranks of different data positions must differ. Megatron seeds generators once and trusts every rank to draw equally
often ever after, which a data loader on the CPU's generator breaks. Here every forward of a micro-batch seeds its
own streams, from numbers that need no agreement: the stage's seed, how many forwards came before, and the place in the
grid.

A forward that is run again (recomputation) must drop the same elements. Whoever recomputes restores torch's generator
first, so the number each forward draws from it tells a repetition from something new.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

import torch

from gpp_plugin.stage_graph.context import StageContext

MOST_REMEMBERED = 4096
"""Forwards whose seeds are kept for recomputation; far more than micro-batches in flight."""
_SPREAD = 1_000_003


class DropoutStreams:
    """Seeds Megatron's streams for each forward of a stage.

    Args:
        seed: of the stage.
    """

    def __init__(self, seed: int, context: StageContext) -> None:
        self._seed, self._context = seed, context
        self._devices = [context.device] if context.device.type == "cuda" else []
        self._count = 0
        self._remembered: OrderedDict[int, int] = OrderedDict()

    @contextlib.contextmanager
    def of_forward(self) -> Iterator[None]:
        """Run a forward within; torch's generators are as before afterwards, but for one number drawn."""
        number = self._number_of(int(torch.empty((), dtype=torch.int64).random_()))
        place = (self._seed * _SPREAD + number) * self._context.data_size + self._context.data_rank
        with torch.random.fork_rng(devices=self._devices):
            seed_streams(place % 2**48, self._context)
            yield

    def _number_of(self, drawn: int) -> int:
        if drawn not in self._remembered:
            self._remembered[drawn] = self._count
            self._count += 1
            if len(self._remembered) > MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        return self._remembered[drawn]


def seed_streams(seed: int, context: StageContext) -> None:
    """Seed torch's generators alike over a tensor group, and Megatron's tracked streams apart."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, tp_rank=context.tensor_rank, ep_rank=0, etp_rank=0)
