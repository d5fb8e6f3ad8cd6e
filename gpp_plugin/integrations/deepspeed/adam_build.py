"""Which implementation of Adam a DeepSpeed configuration gets: DeepSpeed's own is compiled where it is first used.

A JSON ``Adam`` or ``AdamW`` is DeepSpeed's FusedAdam on a GPU, a CUDA operator that is compiled with nvcc when the
optimizer is made, unless the installation brought it ready. Where that cannot be done torch's fused Adam takes its
place: the same update of the same hyper-parameters, in one launch for many parameters, and part of torch.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import builder

from gpp_plugin.errors import ConfigError, first_line
from gpp_plugin.integrations.deepspeed.stage_config import torch_adam_params
from gpp_plugin.runtime.ranks.agree import exchange

OPERATOR = "fused_adam"
"""DeepSpeed's name of the operator."""


def why_no_fused_adam() -> str:
    """Return why DeepSpeed's FusedAdam cannot be used on this machine's GPUs; empty where it can be.

    Nothing is compiled.
    """
    if installed_ops.get(OPERATOR, False) or torch.version.hip is not None:
        return ""
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    try:
        builder.assert_no_cuda_mismatch(OPERATOR)
    except Exception as error:  # DeepSpeed's own types, one for each thing that may be wrong with nvcc
        return first_line(error)
    lacking = [name for name in ("ninja", "c++") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} cannot be found" if lacking else ""


def with_usable_adam(
    ds_config: Mapping[str, Any], *, device_type: str, group: dist.ProcessGroup | None
) -> tuple[dict[str, Any], str]:
    """Return the configuration with torch's fused Adam where a rank cannot use DeepSpeed's, and a line that says so.

    Collective on CUDA: all ranks take the same one, or the replicas of a stage would differ.

    Args:
        group: a CPU group of all ranks; None for a single rank.

    Returns:
        The configuration, its own copy where it is another one; and the line, empty where nothing is replaced.

    Raises:
        ConfigError: the optimizer has options that only FusedAdam knows.
    """
    # DeepSpeed compiles FusedAdam when a stage's engine is made, each rank for itself. What is looked at here, before
    # any is, is whether that can work; one rank's lack is every rank's.
    block = ds_config.get("optimizer")
    name = str(block.get("type", "")) if isinstance(block, Mapping) else ""
    if device_type != "cuda" or name.lower() not in ("adam", "adamw") or _chooses_itself(ds_config):
        return dict(ds_config), ""
    reasons = exchange(why_no_fused_adam, what="a look at the compiler", group=group)
    found = next(((rank, why) for rank, why in enumerate(reasons) if why), None)
    if found is None:
        return dict(ds_config), ""
    why = f"on rank {found[0]} DeepSpeed's FusedAdam cannot be compiled ({found[1]})"
    changed = copy.deepcopy(dict(ds_config))
    params = torch_adam_params(changed["optimizer"].get("params") or {})
    if params is None:
        raise ConfigError(
            f"optimizer.params: {sorted(changed['optimizer']['params'])} hold what torch's Adam does not know, and "
            f"{why}; remove it, or install the CUDA toolkit of torch's version"
        )
    if not params.get("foreach"):
        params["fused"] = True
    changed["optimizer"]["params"] = params
    return changed, (
        f"optimizer.type {name}: {why}, so that torch's fused implementation is used; "
        "install the CUDA toolkit of torch's version for DeepSpeed's"
    )


def _chooses_itself(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the configuration says whose Adam it wants: torch's or not, or DeepSpeed's on the host."""
    params = ds_config["optimizer"].get("params") or {}
    zero = ds_config.get("zero_optimization") or {}
    offload = zero.get("offload_optimizer") or {}
    return "torch_adam" in params or str(offload.get("device", "none")) == "cpu"
