"""What training holds of each parameter beside it and its gradient, by the optimizer that is configured.

Every state tensor that counts has the parameter's shape, in fp32; step counters are left out. DeepSpeed steps fp32
masters of half-precision weights, and under ZeRO a flat fp32 copy of every rank's part, whatever the weights are.

Source: this project
Tests: tests/integrations/test_optimizer_bytes.py
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import builder
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
from torch.utils import cpp_extension

from gpp_plugin.errors import ConfigError, first_line
from gpp_plugin.integrations.deepspeed.config_values import StageConfig, torch_adam_params
from gpp_plugin.report.progress import step
from gpp_plugin.runtime.ranks.collectives import exchange

logger = logging.getLogger(__name__)

# Which implementation of Adam a DeepSpeed configuration gets: DeepSpeed's own is compiled where it is first used.
#
# A JSON ``Adam`` or ``AdamW`` is DeepSpeed's FusedAdam on a GPU, a CUDA operator that is compiled with nvcc when the
# optimizer is made, unless the installation brought it ready. Where that cannot be done torch's fused Adam takes its
# place: the same update of the same hyper-parameters, in one launch for many parameters, and part of torch.

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
    if lacking:
        return f"{' and '.join(lacking)} cannot be found"
    # Images for one GPU name it as "9.0a", of which DeepSpeed 0.19.8 makes a ValueError.
    if named := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        its = FusedAdamBuilder()
        its.jit_mode = True
        try:
            its.compute_capability_args()
        except (ValueError, RuntimeError):
            return f"its builder cannot read TORCH_CUDA_ARCH_LIST={named!r}; plain numbers such as 9.0 it can"
    return ""


@contextmanager
def saying_what_compiles() -> Iterator[None]:
    """Say of each operator that DeepSpeed compiles within the block that it does, before; it takes minutes."""
    original = builder.OpBuilder.jit_load

    def jit_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(cpp_extension._get_build_directory(self.name, False))
        # one of the ranks of a host compiles, and holds the lock; the others wait for it
        if (folder / f"{self.name}.so").exists() or (folder / "lock").exists():
            return original(self, *args, **kwargs)
        logger.warning(
            "DeepSpeed compiles its operator %s for the optimizer, which may take minutes; later jobs find it in %s",
            self.name,
            folder,
        )
        with step(f"compile DeepSpeed's {self.name}"):
            return original(self, *args, **kwargs)

    builder.OpBuilder.jit_load = jit_load
    try:
        yield
    finally:
        builder.OpBuilder.jit_load = original


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
        ConfigError: the optimizer has options that only FusedAdam has.
    """
    # DeepSpeed compiles FusedAdam when a stage's engine is made, each rank for itself. What is looked at here, before
    # any is, is whether that can work; one rank's lack is every rank's.
    block = ds_config.get("optimizer")
    name = str(block.get("type", "")) if isinstance(block, Mapping) else ""
    if device_type != "cuda" or name.lower() not in ("adam", "adamw"):
        return dict(ds_config), ""
    # the configuration may say whose Adam it wants: torch's or not, or DeepSpeed's on the host
    offload = (ds_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    is_chosen = "torch_adam" in (ds_config["optimizer"].get("params") or {})
    if is_chosen or str(offload.get("device", "none")) == "cpu":
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
            f"{why}; remove it, or mend that: it needs the CUDA toolkit of torch's version, ninja and a C++ compiler"
        )
    if not params.get("foreach"):
        params["fused"] = True
    changed["optimizer"]["params"] = params
    return changed, (
        f"optimizer.type {name}: {why}, so that torch's fused implementation is used; "
        "DeepSpeed's needs the CUDA toolkit of torch's version, ninja and a C++ compiler"
    )


FP32_BYTES = 4.0
ADAM = "adam"
"""Where it is not known how much state an optimizer has, Adam's is taken: few have more."""

_Options = Mapping[str, Any]


def _count(least: int, *more: str) -> Callable[[_Options], int]:
    """Return what counts so many tensors, and one for each of these options that is on."""
    return lambda options: least + sum(bool(options.get(name)) for name in more)


STATE_TENSORS: dict[str, Callable[[_Options], int]] = {
    **dict.fromkeys(
        ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "muadam", "muadamw"), _count(2, "amsgrad")
    ),
    **dict.fromkeys(("nadam", "radam", "adamax", "lamb", "fusedlamb", "adadelta", "rprop"), _count(2)),
    **dict.fromkeys(("lion", "fusedlion", "deepspeedcpulion"), _count(1)),
    **dict.fromkeys(("adagrad", "deepspeedcpuadagrad", "asgd"), _count(1)),
    **dict.fromkeys(("sgd", "musgd"), _count(0, "momentum")),
    "rmsprop": _count(1, "centered", "momentum"),
}
"""Lower-case name -> how many tensors of a parameter's size it keeps: names of DeepSpeed's configuration, of
`torch.optim`, and of DeepSpeed's own classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """Bytes for each trained parameter.

    Args:
        state: of the optimizer; ``master``: of weights of its own; ``sums``: of gradients added up in fp32.
        assumed: a line for the user where the optimizer is not known; "" where it is.
    """

    state: float
    master: float
    sums: float
    assumed: str = ""

    @property
    def total(self) -> float:
        """Return all of them."""
        return self.state + self.master + self.sums


def optimizer_bytes(
    ds_config: Mapping[str, Any], user_optimizer: Any, stage: StageConfig, *, device_type: str
) -> OptimizerBytes:
    """Return what the optimizer of a job holds on the device.

    Args:
        user_optimizer: the optimizer of `deepspeed.initialize`: an instance, a callable on parameters, or None
            where the configuration has it.
        stage: the types of weights, and in which gradients are added up; the ZeRO stage.
    """
    # Bytes a parameter, on the device; weights and gradients themselves are counted elsewhere:
    #
    #                                   state  master  sums
    #   Adam, fp32, ZeRO 0                8      0      0
    #   Adam, bf16, sums in fp32          8      4      4
    #   SGD without momentum, fp32        0      0      0
    #   Adam, bf16, ZeRO 1 offloaded      0      0      0    on CUDA, sums in bf16; the rest is the host's
    #
    # Under ZeRO a rank holds its part of state and master; the planner divides by the degree.
    name, options = _name_and_options(ds_config, user_optimizer)
    count = STATE_TENSORS.get(name.lower())
    assumed = ""
    if count is None:
        count = STATE_TENSORS[ADAM]
        assumed = (
            f"optimizer {name or 'that is passed in'} is not known: plans take its state to be Adam's, two fp32 "
            "numbers a parameter"
        )
    zero = ds_config.get("zero_optimization") or {}
    is_offloaded = str((zero.get("offload_optimizer") or {}).get("device", "none")) == "cpu"
    is_elsewhere = is_offloaded and device_type != "cpu"
    # ZeRO's flat fp32 partitions are copies of the weights even where those are fp32 (DeepSpeed 0.19).
    has_master = stage.dtype != "float32" or stage.zero_stage >= 1
    return OptimizerBytes(
        state=0.0 if is_elsewhere else FP32_BYTES * count(options),
        master=FP32_BYTES if has_master and not is_elsewhere else 0.0,
        sums=0.0 if stage.accumulation_dtype == stage.dtype else FP32_BYTES,
        assumed=assumed,
    )


def _name_and_options(ds_config: Mapping[str, Any], user_optimizer: Any) -> tuple[str, dict[str, Any]]:
    """Return an optimizer's name, "" where there is no telling, and its options (the first group's)."""
    if isinstance(user_optimizer, torch.optim.Optimizer):
        return type(user_optimizer).__name__, {**user_optimizer.defaults, **_of_any_group(user_optimizer)}
    if user_optimizer is None:
        block = ds_config.get("optimizer") or {}
        return str(block.get("type", ADAM)), dict(block.get("params") or {})
    if isinstance(user_optimizer, functools.partial):
        name, options = _name_and_options(ds_config, user_optimizer.func)
        return name, {**options, **user_optimizer.keywords}
    if inspect.isclass(user_optimizer):
        return user_optimizer.__name__, {}
    # A callable that is no class shows what it makes only by making it: of a parameter of one number.
    try:
        made = user_optimizer([torch.nn.Parameter(torch.zeros(1))])
    except Exception:  # the user's own code, which may want the model's parameters
        made = None
    return _name_and_options(ds_config, made) if isinstance(made, torch.optim.Optimizer) else ("", {})


def _of_any_group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options that decide about state, switched on where any group has them on."""
    names = ("momentum", "centered", "amsgrad")
    return {
        name: next((group[name] for group in optimizer.param_groups if group.get(name)), 0)
        for name in names
        if any(name in group for group in optimizer.param_groups)
    }
