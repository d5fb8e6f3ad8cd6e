"""One rank of `gpp bench compile`: the same steps on torch and compiled, by turns; rank 0 tells of every run.

python -m gpp_benchmarks._compile_ranks SETTINGS_JSON
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks._attention_models import Size, build_family
from gpp_benchmarks._backend_ranks import MINI_BATCH, train, train_alone
from gpp_benchmarks._linear_stages import starts_nearby
from gpp_benchmarks._ranks import rank_settings
from gpp_plugin.launch import emit_event, end_rank
from gpp_plugin.relative_errors import least_scale, tensor_error

WAYS: dict[str, Any] = {"torch": False, "compiled": True, "auto": "auto"}


def main() -> None:
    """Train in each way, as often as the settings say, and on rank 0 alone as the model is."""
    settings = rank_settings()
    sizes = {key: settings[key] for key in ("width", "layers", "length")}
    model, make_batch = build_family(settings["model"], Size(samples=MINI_BATCH, **sizes))
    batches = []
    for seed in range(settings["steps"]):
        torch.manual_seed(seed)
        batches.append(make_batch("none"))
    right: dict[str, Tensor] = {}
    losses = train_alone(copy.deepcopy(model), batches, right)
    rank = int(os.environ["RANK"])
    rounding = roundings(model, batches[0]) if rank == 0 else {}
    for number in range(settings["turns"]):
        for way in settings["ways"]:
            block = {"compile": WAYS[way], "profile_dir": settings["folder"], "comm_timeout_s": 300}
            block |= {"stages": settings["stages"]} if settings["stages"] else {}
            found, plan = train(
                copy.deepcopy(model), batches, block, settling=settings["settling"], keeps_gradients=True
            )
            del found["rank"]
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, gradient_errors(found.pop("gradients"), right))
            error, name = worst_of(of_ranks, right)
            if rank == 0:
                found |= {"gradient_error": error, "worst": name, "rounding": rounding.get(name, 0.0)}
                compiled = sum(len(stage.compiled) for stage in plan.stages)
                emit_event(way=way, turn=number, num_compiled=compiled, **found)
    if rank == 0:
        emit_event(way="eager", losses=losses)
    end_rank()


def roundings(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far each gradient of one process in fp32 is off itself in fp64.

    It is the largest of several starts a rounding apart: where a ReLU is at zero, one of them may have a sample on the
    other side of it, and the next may not.
    """
    exact_batch = {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in batch.items()
    }
    largest: dict[str, float] = {}
    for (parameters,) in starts_nearby([dict(model.named_parameters())]):
        near = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in near.named_parameters():
                parameter.copy_(parameters[name])
        plain: dict[str, Tensor] = {}
        exact: dict[str, Tensor] = {}
        train_alone(near, [batch], plain, steps=False)
        train_alone(near.double(), [exact_batch], exact, steps=False)
        for name, error in gradient_errors({n: g.double() for n, g in plain.items()}, exact).items():
            largest[name] = max(largest.get(name, 0.0), error)
    return largest


def gradient_errors(own: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the error of each gradient by its norm; inf for what is no number, or is not to be there."""
    least = least_scale(right.values())
    return {
        name: tensor_error(gradient, right[name], least=least) if name in right else math.inf
        for name, gradient in own.items()
    }


def worst_of(of_ranks: Sequence[Mapping[str, float]], names: Iterable[str]) -> tuple[float, str]:
    """Return the largest error of all ranks, and whose it is; inf for a name that no rank has a gradient of."""
    found = [(error, name) for errors in of_ranks for name, error in errors.items()]
    there = {name for _, name in found}
    return max([*found, *((math.inf, name) for name in names if name not in there)])


if __name__ == "__main__":
    main()
