"""Random streams of a stage's dropout.

Ranks of one tensor group must drop the same elements of what they all hold and different ones of what they share out,
and ranks of different data positions must differ. Megatron seeds generators once and trusts every rank to draw equally
often ever after, which a data loader on the CPU's generator breaks. Here every forward of a micro-batch seeds its
streams from one number that the first rank of its tensor group draws from torch's generator and tells the others.

So a forward that is run again (recomputation) drops the same elements: whoever recomputes restores torch's generator.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from gpp_plugin.errors import CommTimeout
from gpp_plugin.model.graph.stage_context import StageContext
from gpp_plugin.runtime.random_streams import kept_streams, seed_streams_of

_SEEDS = 1 << 48


class DropoutStreams:
    """Seeds torch's and Megatron's streams for each forward of a stage.

    Args:
        seed: of the stage.
    """

    def __init__(self, seed: int, context: StageContext) -> None:
        self._context = context
        self._place = zlib.crc32(f"{seed}/{context.stage}/{context.data_rank}".encode())

    @contextlib.contextmanager
    def of_forward(self) -> Iterator[None]:
        """Run a forward within; torch's generators are as before afterwards, but for the one number drawn."""
        # One number a forward from torch's CPU generator, inside which recomputation can repeat it:
        #
        #   forward    state A --draw n--> seed n + place --> mask
        #   again      state A --draw n--> the same mask       whoever recomputes has put A back
        #
        # ``place`` is a hash of seed, stage and data position: tensor ranks agree (and hear n from the
        # first of them, whose generator counts), data positions and stages differ even where their
        # generators are equal.
        drawn = torch.empty((), dtype=torch.int64).random_(_SEEDS)
        if self._context.tensor_size > 1:  # on the CPU: no device waits for it
            self._share(drawn)
        with kept_streams(self._context.device):
            seed_streams((int(drawn) + self._place) % _SEEDS, self._context)
            yield

    def _share(self, drawn: torch.Tensor) -> None:
        """Take the number that the first rank of the tensor group drew."""
        context = self._context
        try:
            dist.broadcast(drawn, group=context.tensor_group, group_src=0)
        except RuntimeError as error:
            raise CommTimeout(
                f"rank {context.rank} (stage {context.stage!r}, tensor rank {context.tensor_rank}) waited for the "
                f"dropout seed among {context.tensor_size} tensor ranks, and one did not come or is gone: look for the "
                "first error of the others"
            ) from error


def seed_streams(seed: int, context: StageContext) -> None:
    """Seed torch's generators alike over a tensor group, and Megatron's tracked streams apart."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seed_streams_of(context.device, seed)
    model_parallel_cuda_manual_seed(seed, tp_rank=context.tensor_rank, ep_rank=0, etp_rank=0)
