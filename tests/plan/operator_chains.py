"""Chains of single operators with saved tensors, and the plain dynamic program over their cuts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph, SavedTensor
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.tensors import TensorSpec, batch_layout
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.memory.memory_chain import OptimizerFactory
from tests.plan.graphs import make_cluster

Key = tuple[float, float]


def operator_chain(
    times: Sequence[float],
    *,
    saved: Sequence[float] | float = 0.0,
    parameters: Sequence[int] | int = 0,
    output: int = 4,
    kept_inside: Sequence[bool] | bool = True,
    backward_ratio: float = 0.0,
) -> tuple[BlockGraph, Profile]:
    """Return a chain o0 -> o1 -> ...; ``times`` are forward microseconds of any number of samples up to 1.

    Args:
        saved: bytes a sample that each operator keeps: of its own, or (not ``kept_inside``) its operand.
    """
    num = len(times)
    kept = [saved] * num if isinstance(saved, (int, float)) else list(saved)
    params = [parameters] * num if isinstance(parameters, int) else list(parameters)
    inside = [kept_inside] * num if isinstance(kept_inside, bool) else list(kept_inside)
    names = [f"o{i}" for i in range(num)]
    tensors = {
        name: TensorSpec(
            name=name, dtype="float32", shape=(1, output // 4), num_samples=1, layout=batch_layout(),
            requires_grad=True,
        )
        for name in names
    }  # fmt: skip
    saved_tensors = []
    for i, name in enumerate(names):
        if kept[i]:
            is_own = inside[i] or i == 0
            saved_tensors.append(
                SavedTensor(
                    name=f"{name}:inside" if is_own else names[i - 1],
                    made_by=name if is_own else names[i - 1],
                    kept_by=(name,),
                    bytes=int(kept[i]),
                )
            )
    graph = BlockGraph(
        model="chain",
        num_samples=1,
        blocks=tuple(Block(name=name, saved_bytes=int(kept[i])) for i, name in enumerate(names)),
        edges=tuple(BlockEdge(src=a, dst=b, tensors=(a,)) for a, b in zip(names, names[1:], strict=False)),
        tensors=tensors,
        loss_block=names[-1],
        tied={},
        saved=tuple(saved_tensors),
    )
    costs = tuple(
        BlockCost(
            block=name,
            samples=(1,),
            forward_us=(float(times[i]),),
            backward_us=(float(times[i]) * backward_ratio,),
            saved_bytes_per_sample=float(kept[i]),
            parameter_bytes=params[i],
            gradient_bytes=params[i],
        )
        for i, name in enumerate(names)
    )
    return graph, Profile(graph=fingerprint(graph), device="test", source="given", costs=costs)


def random_chain(rng: random.Random, num: int) -> tuple[BlockGraph, Profile]:
    """Return a chain with unequal times, saved bytes and parameters."""
    return operator_chain(
        [rng.randint(1, 20) for _ in range(num)],
        saved=[rng.choice([0, 0, 100, 400, 1000]) * rng.randint(1, 3) for _ in range(num)],
        parameters=[rng.choice([0, 50, 300]) for _ in range(num)],
        kept_inside=[rng.random() < 0.5 for _ in range(num)],
        backward_ratio=2.0,
        output=rng.choice([40, 400]),
    )


def factory(
    graph: BlockGraph,
    profile: Profile,
    limits: Sequence[int],
    cluster: Cluster | None = None,
    **options: object,
) -> OptimizerFactory:
    costs = CostModel(graph, profile, cluster or make_cluster(len(limits)))
    return OptimizerFactory(costs, limits=limits, **options)  # type: ignore[arg-type]


def best_partition(num: int, num_stages: int, key_of: Callable[[int, int, int], Key]) -> Key:
    """Return the least largest key over all ways to cut: O(stages x operators^2)."""
    best = [key_of(0, 0, stop) if stop else None for stop in range(num + 1)]
    for stage in range(1, num_stages):
        following: list[Key | None] = [None] * (num + 1)
        for stop in range(stage + 1, num + 1):
            choices = [
                max(before, key_of(stage, start, stop))
                for start in range(stage, stop)
                if (before := best[start]) is not None
            ]
            following[stop] = min(choices)
        best = following
    found = best[num]
    assert found is not None
    return found
