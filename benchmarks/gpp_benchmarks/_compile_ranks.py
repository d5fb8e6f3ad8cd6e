"""One rank of `gpp bench compile`: the same steps on torch and compiled, by turns; rank 0 tells of every run.

python -m gpp_benchmarks._compile_ranks SETTINGS_JSON
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks._attention_models import Size, build_family
from gpp_benchmarks._backend_ranks import MINI_BATCH, train, train_alone
from gpp_benchmarks._linear_stages import starts_nearby
from gpp_plugin.compare.loss_difference import error_or_inf
from gpp_plugin.launch import emit_event, end_rank

WAYS: dict[str, Any] = {"torch": False, "compiled": True, "auto": "auto"}
LEAST_SCALE = 1e-3
"""Share of the largest gradient's norm by which smaller ones are compared: a key's bias has one of rounding alone."""
TOLERANCE = 1e-5
"""A gradient's largest error beside one process, or what that process is off itself in fp64 where that is more."""


def main() -> None:
    """Train in each way, as often as the settings say, and on rank 0 alone as the model is."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    sizes = {key: settings[key] for key in ("width", "layers", "length")}
    model, make_batch = build_family(settings["model"], Size(samples=MINI_BATCH, **sizes))
    batches = []
    for seed in range(settings["steps"]):
        torch.manual_seed(seed)
        batches.append(make_batch("none"))
    right: dict[str, Tensor] = {}
    losses = train_alone(copy.deepcopy(model), batches, right)
    rounding = roundings(model, batches[0]) if int(os.environ["RANK"]) == 0 else {}
    rank = 0
    for number in range(settings["turns"]):
        for way in settings["ways"]:
            block = {"compile": WAYS[way], "profile_dir": settings["folder"], "comm_timeout_s": 300}
            block |= {"stages": settings["stages"]} if settings["stages"] else {}
            found, plan = train(
                copy.deepcopy(model), batches, block, settling=settings["settling"], keeps_gradients=True
            )
            rank = found.pop("rank")
            worst = _worst(found.pop("gradients"), right, rounding)
            if rank == 0:
                compiled = sum(len(stage.compiled) for stage in plan.stages)
                emit_event(way=way, turn=number, num_compiled=compiled, **worst, **found)
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


def _worst(
    own: Mapping[str, Tensor], right: Mapping[str, Tensor], rounding: Mapping[str, float]
) -> dict[str, Any]:
    """Return on rank 0 the gradient of any rank that is furthest beyond what is allowed; collective."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, gradient_errors(own, right))
    return worst_of(of_ranks, dict.fromkeys(right, 0.0) | dict(rounding))


def gradient_errors(own: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the error of each gradient by its norm; inf for what is no number, or is not to be there."""
    least = LEAST_SCALE * max(float(gradient.norm()) for gradient in right.values())
    return {
        name: error_or_inf(float((gradient - right[name]).norm()) / max(float(right[name].norm()), least))
        if name in right
        else math.inf
        for name, gradient in own.items()
    }


def worst_of(of_ranks: Sequence[Mapping[str, float]], rounding: Mapping[str, float]) -> dict[str, Any]:
    """Return the error of all ranks that is the largest share of its limit, whose it is, and the rounding there.

    Args:
        rounding: of one process, by name; an error of inf is that of a name that no rank has a gradient of.
    """
    found = [(error, name) for errors in of_ranks for name, error in errors.items()]
    there = {name for _, name in found}
    found += [(math.inf, name) for name in rounding if name not in there]
    error, name = max(found, key=lambda each: each[0] / max(TOLERANCE, rounding.get(each[1], 0.0)))
    return {"gradient_error": error, "worst": name, "rounding": rounding.get(name, 0.0)}


if __name__ == "__main__":
    main()
