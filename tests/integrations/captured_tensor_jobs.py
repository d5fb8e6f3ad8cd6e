"""What each rank runs in the tests of captured stages on tensor ranks; importable by the processes that run it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpp_plugin.runtime.tensor_parallel.parameter_shards import own_part, parameter_shards
from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build

STEPS = 5


def config(block: dict[str, Any], *, zero: int = 0, clipping: float = 0.0) -> dict[str, Any]:
    return config_of(zero_optimization={"stage": zero}, gradient_clipping=clipping, block=block)


def shards_of(engine: Any) -> dict[str, Any]:
    """Return what this rank holds in parts, by name: how it is cut, its position, and the number of ranks."""
    reference = engine._lane.lanes[0].reference
    found = {}
    for index in engine.rank_engine.indices:
        stage = engine._plan.stages[index]
        for name, shard in parameter_shards(reference, stage).items():
            found[name] = (shard, stage.position(engine.global_rank)[1], stage.tensor)
    return found


def part_of(whole: Tensor, how: Any) -> Tensor:
    return whole if how is None else own_part(whole, *how)


def train_all(cases: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train every case: (model, block of the configuration, options of the rest)."""
    return {case: train(*given, f"{directory}/{case.replace(' ', '-')}") for case, given in cases.items()}


def train(name: str, block: dict[str, Any], options: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train five steps, export, evaluate; the first step's gradients, and how they are cut."""
    model, make_batch = build(name, layers=1)
    batches = [make_batch(B, seed) for seed in range(STEPS)]
    block = {**block, "profile_dir": f"{directory}/../profiles"}  # every model is measured once
    engine = make_engine(model, batches[0], config(block, **options))
    engine.retain_gradients()
    losses = steps(engine, batches[:1])
    answer = {
        "gradients": {name: gradient.clone() for name, gradient in engine.gradients.items()},
        "shards": shards_of(engine),
        "tensor": [stage.tensor for stage in engine._plan.stages],
    }
    losses += steps(engine, batches[1:])
    answer["losses"] = losses
    answer["evaluated"] = {n: float(engine.eval_batch(iter([make_batch(n, n)]))) for n in (B, 5)}
    engine.save_pretrained(f"{directory}/export")
    answer["exported"] = exported(f"{directory}/export", model)
    answer["gathered"] = engine.gather_state_dict()
    answer["held"] = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    engine.destroy()
    return answer


def exported(directory: str, model: Any) -> dict[str, Tensor]:
    """Return an export as HuggingFace reads it, by all names."""
    return dict(type(model).from_pretrained(directory).state_dict())
