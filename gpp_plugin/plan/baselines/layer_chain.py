"""Whole layers as the unit of cutting, swapping and recomputing: what DawnPiper's rivals work with.

Costs are those of `operator_chain`, at operators; these planners only see fewer cuts and coarser choices.

    GPipe (torchgpipe)  stages balanced by time; a stage keeps its input and runs again as a whole
    PipeDream           stages balanced by the slower of time and communication; no memory optimization
    vPipe               each layer is kept, swapped or recomputed (`vpipe`)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpp_plugin.errors import PlanError
from gpp_plugin.plan.linear_order import layer_bounds, split_by_weight
from gpp_plugin.plan.memory.capuchin import StageChoice, StageOptimizer
from gpp_plugin.plan.memory.memory_chain import ChainPlan
from gpp_plugin.plan.memory.operator_chain import TensorChain


def balanced_bounds(chain: TensorChain, bounds: Sequence[int], num_stages: int) -> list[int]:
    """Return the layers' bounds between stages whose longest time is shortest (exact).

    Raises:
        PlanError: there are fewer layers than stages.
    """
    if len(bounds) - 1 < num_stages:
        raise PlanError(f"{num_stages} stages of {len(bounds) - 1} layers; lower the number of stages")
    times = np.diff(chain.time[list(bounds)]).tolist()
    parts = split_by_weight(times, num_stages)
    return [*(bounds[start] for start, _ in parts), bounds[-1]]


def partition_gpipe(optimizer: StageOptimizer) -> ChainPlan:
    """Return torchgpipe's stages: balanced by time, checkpointed whole where they do not fit otherwise."""
    chain, shape = optimizer.chain, optimizer.shape
    cuts = balanced_bounds(chain, layer_bounds(chain.names, shape.num_stages), shape.num_stages)
    choices = []
    for stage, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):
        choice = optimizer.weigh(stage, start, stop)
        if optimizer.can_recompute and choice.excess_bytes > 0:
            whole = optimizer.weigh(stage, start, stop, segments=[(start, stop)])
            choice = min(choice, whole, key=lambda c: c.key)
        choices.append(choice)
    return ChainPlan(cuts=tuple(cuts), stages=tuple(choices), local=chain.local)


def partition_pipedream(optimizer: StageOptimizer) -> ChainPlan:
    """Return PipeDream's stages: the slowest of all stages and links as quick as possible.

    Section 3.1's program for one rank a stage; activations and gradients share a link.
    """
    chain, shape = optimizer.chain, optimizer.shape
    bounds = layer_bounds(chain.names, shape.num_stages)
    num = len(bounds) - 1
    if num < shape.num_stages:
        raise PlanError(f"{shape.num_stages} stages of {num} layers; lower the number of stages")
    time = chain.time[bounds]
    link = 2 * chain.crossing[bounds] / shape.link_bytes_per_s * 1e6
    best = np.where(np.arange(num + 1) > 0, time - time[0], np.inf)
    cut = np.zeros((shape.num_stages, num + 1), dtype=np.int64)
    for stage in range(1, shape.num_stages):
        following = np.full(num + 1, np.inf)
        for stop in range(stage + 1, num + 1):
            starts = np.arange(stage, stop)
            worst = np.maximum(np.maximum(best[starts], link[starts]), time[stop] - time[starts])
            choice = int(worst.argmin())
            following[stop], cut[stage, stop] = worst[choice], starts[choice]
        best = following
    ends = [num]
    for stage in range(shape.num_stages - 1, 0, -1):
        ends.append(int(cut[stage, ends[-1]]))
    cuts = [0, *(bounds[i] for i in reversed(ends))]
    stages: list[StageChoice] = [
        optimizer.weigh(stage, a, b) for stage, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
    ]
    return ChainPlan(cuts=tuple(cuts), stages=tuple(stages), local=chain.local)
