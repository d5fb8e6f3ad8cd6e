"""Weights of a stage graph for use without this package: a safetensors file a stage, under its module's own names.

<dir>/vision.safetensors                              `vision.load_state_dict(load_file(...))`
<dir>/language-tensor-0.safetensors, -tensor-1...     each tensor rank's shards
<dir>/tower.0-1.safetensors, tower.2-3.safetensors    a captured part in two stages

Characters of a stage's name that are not safe in one are escaped: ``tower.3%2Bhead%2Bloss.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from gpp_plugin.errors import CheckpointError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import escape_name, whole_file
from gpp_plugin.runtime.ranks.agree import exchange


def save_stages(
    directory: str | Path,
    *,
    states: Mapping[int, tuple[str, Mapping[str, Tensor]]],
    plan: PipelinePlan,
    rank: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Write every stage's weights; collective over all ranks.

    Args:
        states: of this rank's stages, by their index in the plan: the name of the stage as the user gave it, which is
            what the names of its tensors begin with, and its tensors.

    Raises:
        CheckpointError: a rank could not write; on every rank.
    """

    # Data positions hold copies, so position 0 writes; tensor ranks hold shards, so each of its ranks writes its own.
    # A stage "language" on ranks 2 to 5 with tensor=2:
    #
    #     rank 2, (data 0, tensor 0)   language-tensor-0.safetensors      rank 4, (1, 0)   nothing
    #     rank 3, (0, 1)               language-tensor-1.safetensors      rank 5, (1, 1)   nothing
    #
    # All ranks come to the exchange: if one cannot write, all say so.
    from safetensors.torch import save_file

    def write() -> None:
        for index, (name, state) in states.items():
            stage = plan.stages[index]
            data, tensor = stage.position(rank)
            if data:
                continue
            suffix = "" if stage.tensor == 1 else f"-tensor-{tensor}"
            own = {
                key.removeprefix(f"{name}."): value.detach().cpu().contiguous().clone()
                for key, value in state.items()
                if key.startswith(f"{name}.")
            }
            try:
                path = Path(directory) / f"{escape_name(stage.name)}{suffix}.safetensors"
                with whole_file(path) as temporary:
                    save_file(own, temporary, metadata={"format": "pt"})
            except OSError as error:
                raise CheckpointError(
                    f"rank {rank} cannot write stage {stage.name!r} to {directory}: {error}"
                ) from error

    names = [plan.names_on_rank(each) for each in range(plan.num_ranks)]
    exchange(write, what="save_pretrained", group=group, stages=names)
