"""The blocks of one stage of a graph as a chain, so that what is worked out for chains applies to any stage.

Position 0 stands for all blocks outside that the stage reads from, the last position for all that read from
it; neither costs anything. In between are the stage's blocks in the order of the graph, which is the order they
run in. So a tensor that comes from outside, or is read there, begins or ends at a position that no recomputed
segment contains: it is never dropped, and what a segment reads of it unsaved must be held.

A tensor that blocks of several stages keep is held by each of those stages, in each by its first keeper there.

Source: this project
Tests: tests/plan/test_joined.py, tests/plan/test_stage_chain.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpp_plugin.plan.costs.cost_model import Floats
from gpp_plugin.plan.memory.graph_tensors import GraphTensors, chain_results, chain_tensors
from gpp_plugin.plan.memory.operator_chain import PipelineShape, TensorChain
from gpp_plugin.plan.memory.recompute_menu import CAPS, LEAST_PRICE, PRICES, Segments, find_segments

MENU = tuple((price, cap) for price in (*PRICES[::2], LEAST_PRICE) for cap in (1.0, *CAPS[:3]))
"""Prices and caps for the blocks of one stage: few, and large."""
LENGTHS = (1, 2, 3, 4, 6, 8)
"""Blocks a segment of equal segments has."""


class WholeStage(TensorChain):
    """A chain that is one stage, of which nothing is cut off.

    Args:
        rows: positions of its blocks in the graph.
        degree: its ranks.
    """

    rows: tuple[int, ...]
    degree: int

    @property
    def whole(self) -> tuple[int, int]:
        """Return the interval of the stage's own operators."""
        return 0, self.num_blocks

    def memory_bytes(
        self, start: int, stop: int, stage: int, shape: PipelineShape, *, is_optimized: bool = False
    ) -> float:
        """Return the peak of the whole stage."""
        assert (start, stop) == self.whole
        return float(
            self.costs.stage_memory(
                self.rows,
                degree=self.degree,
                local=self.local,
                in_flight=shape.in_flight(stage),
                is_optimized=is_optimized,
            )
        )

    def room_for_gradients(self, start: int, stop: int, less: float) -> float:
        """Return the room of the whole stage."""
        if self.costs.zero_stage < 2 or self.degree == 1:
            return 0.0
        saved = self.costs.group_saved_bytes(self.rows, self.local)
        return min(self.costs.group_gradient_bytes(self.rows), max(saved - less, 0.0))


class StageChain(WholeStage):
    """A stage of any blocks of a graph at one number of samples a rank.

    Args:
        everything: the tensors of the graph.
        rows: positions of the blocks, increasing; at least one.
    """

    def __init__(
        self, everything: GraphTensors, rows: Sequence[int], local: float, *, degree: int = 1
    ) -> None:
        costs = everything.costs
        self.costs, self.local, self.rows, self.degree = costs, local, tuple(rows), degree
        place = {row: 1 + i for i, row in enumerate(rows)}
        self.names = ["", *(costs.graph.blocks[row].name for row in rows), ""]
        forward, backward = costs.block_times(local)
        picked = list(rows)
        self.set_times(_framed(forward[picked]), _framed(backward[picked]))
        entering = list(dict.fromkeys(r for row in rows for r in everything.entering[row]))
        results = everything.result_sizes(local)
        sizes = _sizes_in_stage(everything, everything.sizes(local), results, place, entering)
        kept = dict.fromkeys(t for row in rows for t in everything.kept_in[row])
        self.tensors = chain_tensors(everything, kept, sizes, place)
        self.unsaved, self.crossing = chain_results(everything, entering, results, place, len(self.names))
        self.set_tensor_sums()

    @property
    def whole(self) -> tuple[int, int]:
        """Return the interval of the stage's own blocks, without what stands for those outside."""
        return 1, self.num_blocks - 1

    def menu(self) -> list[Segments]:
        """Return the segments worth trying: equal ones of some lengths, and the best at several prices."""
        start, stop = self.whole
        equal = []
        for length in LENGTHS:
            if length >= stop - start:
                break
            begins = np.arange(start, stop, length, dtype=np.int64)
            equal.append(Segments(starts=begins, stops=np.minimum(begins + length, stop)))
        return [*equal, *find_segments(self, levels=MENU, layers=False, within=self.whole)]


def _framed(values: Floats) -> Floats:
    return np.concatenate([[0.0], values, [0.0]])


def _sizes_in_stage(
    everything: GraphTensors,
    sizes: Floats,
    result_sizes: Floats,
    place: dict[int, int],
    entering: Sequence[int],
) -> Floats:
    """Return the bytes of every tensor; of those received as one view, what is received."""
    sizes = sizes.copy()
    received: dict[int, list[int]] = {}
    for r in entering:
        received.setdefault(everything.result_tensor[r], []).append(r)
    for t, results in received.items():
        is_outside = t >= 0 and everything.made[t] not in place
        if is_outside and len(results) == 1 and everything.results[results[0]][1] not in place:
            sizes[t] = result_sizes[results[0]]
    return sizes
