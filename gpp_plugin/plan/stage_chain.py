"""The blocks of one stage of a graph as a chain, so that what is worked out for chains applies to any stage.

Position 0 stands for all blocks outside that the stage reads from, the last position for all that read from
it; neither costs anything. In between are the stage's blocks in the order of the graph, which is the order they
run in. So a tensor that comes from outside, or is read there, begins or ends at a position that no recomputed
segment contains: it is never dropped, and what a segment reads of it unsaved must be held.

A tensor that blocks of several stages keep is held by each of those stages, in each by its first keeper there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpp_plugin.plan.costs import CostModel, Floats
from gpp_plugin.plan.operator_chain import (
    Ints,
    OperatorChain,
    PipelineShape,
    SavedTensors,
    UnsavedResults,
    result_bytes,
)
from gpp_plugin.plan.recompute_menu import CAPS, LEAST_PRICE, PRICES, Segments, find_segments

MENU = tuple((price, cap) for price in (*PRICES[::2], LEAST_PRICE) for cap in (1.0, *CAPS[:3]))
"""Prices and caps for the blocks of one stage: few, and large."""
LENGTHS = (1, 2, 3, 4, 6, 8)
"""Blocks a segment of equal segments has."""


class GraphTensors:
    """What autograd keeps of a graph, by position of blocks, at any number of samples.

    Args:
        keepers: by tensor, the blocks that keep it, increasing.
        users: by tensor, the blocks that make, keep or read it; ``spanning``: tensors of more than one.
        results: results that cross between blocks, with the block that makes each and those that read it.
        kept_in: by block, the tensors it keeps; ``entering``: by block, the results it reads.
    """

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        graph, position = costs.graph, costs.index
        readers: dict[str, list[int]] = {}
        makers: dict[str, int] = {}
        for edge in graph.edges:
            for name in edge.tensors:
                readers.setdefault(name, []).append(position[edge.dst])
                makers[name] = position[edge.src]
        self.names = [tensor.name for tensor in graph.saved]
        self.made = [position[tensor.made_by] for tensor in graph.saved]
        self.keepers = [sorted(position[block] for block in tensor.kept_by) for tensor in graph.saved]
        self.users = [
            {made, *keepers, *(r for name in (t.name, *t.views) for r in readers.get(name, ()))}
            for t, made, keepers in zip(graph.saved, self.made, self.keepers, strict=True)
        ]
        self.spanning = [t for t, users in enumerate(self.users) if len(users) > 1]
        kept = {name: i for i, t in enumerate(graph.saved) for name in (t.name, *t.views)}
        self.results = [(name, makers[name], sorted(set(blocks))) for name, blocks in readers.items()]
        self.result_tensor = [kept.get(name, -1) for name, _, _ in self.results]
        self.kept_in: list[list[int]] = [[] for _ in graph.blocks]
        for t, keepers in enumerate(self.keepers):
            for block in keepers:
                self.kept_in[block].append(t)
        self.entering: list[list[int]] = [[] for _ in graph.blocks]
        for r, (_, _, blocks) in enumerate(self.results):
            for block in blocks:
                self.entering[block].append(r)
        self._charged = np.array([keepers[0] for keepers in self.keepers], dtype=np.int64)
        self._bytes = np.array([tensor.bytes for tensor in graph.saved], dtype=float)
        self._sizes: dict[float, Floats] = {}
        self._results_at: dict[float, Floats] = {}

    def sizes(self, local: float) -> Floats:
        """Return the bytes of every tensor; they grow as the profile says that the bytes of their block do."""
        found = self._sizes.get(local)
        if found is None:
            found = self._sizes[local] = self._bytes * self.costs.saved_growth(local)[self._charged]
        return found

    def result_sizes(self, local: float) -> Floats:
        """Return the bytes of every result that crosses between blocks."""
        found = self._results_at.get(local)
        if found is None:
            sizes = [result_bytes(self.costs, name, local) for name, _, _ in self.results]
            found = self._results_at[local] = np.array(sizes, dtype=float)
        return found

    def single_segments(self, local: float) -> tuple[Floats, Floats]:
        """Return by block what it drops as a segment of its own, and what it then holds instead."""
        sizes, results = self.sizes(local), self.result_sizes(local)
        dropped, held = np.zeros(len(self.kept_in)), np.zeros(len(self.kept_in))
        for t, users in enumerate(self.users):
            if len(users) == 1:
                dropped[self.made[t]] += sizes[t]
        for r, (_, _, readers) in enumerate(self.results):
            if self.result_tensor[r] < 0:
                held[readers] += results[r]
        return dropped, held


class StageChain(OperatorChain):
    """A stage of any blocks of a graph at one number of samples a rank.

    Args:
        everything: the tensors of the graph.
        rows: positions of the blocks, increasing; at least one.
    """

    def __init__(
        self, everything: GraphTensors, rows: Sequence[int], local: float, *, degree: int = 1
    ) -> None:
        costs = everything.costs
        self.costs, self.local, self.rows, self._degree = costs, local, tuple(rows), degree
        place = {row: 1 + i for i, row in enumerate(rows)}
        self.names = ["", *(costs.graph.blocks[row].name for row in rows), ""]
        forward, backward = costs.block_times(local)
        picked = list(rows)
        self.set_times(_framed(forward[picked]), _framed(backward[picked]))
        entering = list(dict.fromkeys(r for row in rows for r in everything.entering[row]))
        results = everything.result_sizes(local)
        sizes = _sizes_in_stage(everything, everything.sizes(local), results, place, entering)
        self.tensors = _stage_tensors(everything, sizes, place)
        self.unsaved, steps = _stage_results(everything, results, place, entering)
        self.crossing = np.concatenate([[0.0], np.cumsum(steps)])
        self.set_tensor_sums()

    @property
    def whole(self) -> tuple[int, int]:
        """Return the interval of the stage's own blocks."""
        return 1, self.num_blocks - 1

    def memory_bytes(self, start: int, stop: int, stage: int, shape: PipelineShape) -> float:
        """Return the peak without memory optimization, of the whole stage only.

        Under ZeRO 2 gradients are whole at the end of a backward, when little of what was saved is left to make
        room for them: all of them are counted.
        """
        assert (start, stop) == self.whole
        in_flight = shape.in_flight(stage)
        return float(optimized_base(self.costs, self.rows, self._degree, self.local, in_flight))

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


def _stage_tensors(everything: GraphTensors, sizes: Floats, place: dict[int, int]) -> SavedTensors:
    """Return what the stage keeps; what is made or used outside is made at 0 and never dropped."""
    numbers = list(dict.fromkeys(t for row in place for t in everything.kept_in[row]))
    made, charged, last = [], [], []
    for t in numbers:
        users = everything.users[t]
        inside = [place[user] for user in users if user in place]
        is_own = len(inside) == len(users)
        made.append(place[everything.made[t]] if is_own else 0)
        charged.append(min(place[keeper] for keeper in everything.keepers[t] if keeper in place))
        last.append(max(inside))
    return SavedTensors(
        names=tuple(everything.names[t] for t in numbers),
        made=np.array(made, dtype=np.int64),
        charged=np.array(charged, dtype=np.int64),
        last=np.array(last, dtype=np.int64),
        bytes=sizes[numbers] if numbers else np.zeros(0),
    )


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


def _stage_results(
    everything: GraphTensors, sizes: Floats, place: dict[int, int], entering: Sequence[int]
) -> tuple[UnsavedResults, Floats]:
    """Return the results the stage reads and does not keep, and by position what begins less what ends there."""
    end = len(place) + 1
    steps = np.zeros(end + 1)
    rows: list[tuple[int, int, int]] = []
    for r in entering:
        _, maker, readers = everything.results[r]
        inside = [place[reader] for reader in readers if reader in place]
        begin = place.get(maker, 0)
        steps[begin] += sizes[r]
        steps[max(inside)] -= sizes[r]
        t = everything.result_tensor[r]
        if t < 0 or not any(keeper in place for keeper in everything.keepers[t]):
            rows.extend((r, begin, reader) for reader in inside)
    found: Ints = np.array(rows, dtype=np.int64).reshape(-1, 3)
    unsaved = UnsavedResults(
        result=found[:, 0],
        made=found[:, 1],
        reader=found[:, 2],
        bytes=sizes[found[:, 0]] if rows else np.zeros(0),
    )
    return unsaved, steps


def optimized_base(costs: CostModel, rows: Sequence[int], degree: int, local: float, in_flight: int) -> float:
    """Return a stage's peak before what memory optimization saves of it (ZeRO 2: with all its gradients)."""
    plain = costs.stage_memory(rows, degree=degree, local=local, in_flight=in_flight)
    if costs.zero_stage < 2 or degree == 1:
        return plain
    more = costs.stage_memory(rows, degree=degree, local=local, in_flight=in_flight + 1)
    return plain + min(costs.group_gradient_bytes(rows), more - plain)
