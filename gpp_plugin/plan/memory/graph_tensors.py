"""What autograd keeps of a graph, and what its blocks read of each other: the core of all memory optimization.

Two searches make stages fit: DawnPiper's, over intervals of the whole model's operators (`operator_chain`), and the
stage graph's, over any set of blocks (`fitting`). Both treat blocks as a *chain*: positions in the order in which
they run. `GraphTensors` has the tensors by block, once for a graph; `chain_tensors` places them on a chain.

Example: blocks a, b, c in a row; b saves a's result x and c reads it too, c's result is saved by no block.

    whole graph, positions a=0 b=1 c=2     x: made at 0, charged (first saved) at 1, last used at 2
    stage {b, c}, positions b=1 c=2        x: made at 0, which stands for everything outside: it is never dropped
    stage {a, b}, positions a=1 b=2        x: made at 0 too, for c outside reads it: this stage must keep it anyway
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpp_plugin.plan.costs.cost_model import CostModel, Floats, prefix_sums

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensors:
    """What autograd keeps, as arrays over tensors (positions in the chain).

    Args:
        made, charged: where a tensor is made, and where it is first saved.
        last: the last block that saves or reads it; a segment that ends before leaves it to others.
        bytes: for one micro-batch.
    """

    names: tuple[str, ...]
    made: Ints
    charged: Ints
    last: Ints
    bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsavedResults:
    """Results that no block saves, as arrays over (result, reader): what a segment must hold to run again."""

    result: Ints
    made: Ints
    reader: Ints
    bytes: Floats


class GraphTensors:
    """What autograd keeps of a graph, by position of blocks, at any number of samples.

    Args:
        savers: by tensor, the blocks that keep it, increasing.
        users: by tensor, the blocks that make, keep or read it; ``spanning``: tensors of more than one.
        results: results that cross between blocks, with the block that makes each and those that read it.
        saved_in: by block, the tensors it keeps; ``entering``: by block, the results it reads.
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
        self.savers = [sorted(position[block] for block in tensor.kept_by) for tensor in graph.saved]
        self.users = [
            {made, *savers, *(r for name in (t.name, *t.views) for r in readers.get(name, ()))}
            for t, made, savers in zip(graph.saved, self.made, self.savers, strict=True)
        ]
        self.spanning = [t for t, users in enumerate(self.users) if len(users) > 1]
        number_of = {name: i for i, t in enumerate(graph.saved) for name in (t.name, *t.views)}
        self.results = [(name, makers[name], sorted(set(blocks))) for name, blocks in readers.items()]
        self.result_tensor = [number_of.get(name, -1) for name, _, _ in self.results]
        self.saved_in: list[list[int]] = [[] for _ in graph.blocks]
        for t, savers in enumerate(self.savers):
            for block in savers:
                self.saved_in[block].append(t)
        self.entering: list[list[int]] = [[] for _ in graph.blocks]
        for r, (_, _, blocks) in enumerate(self.results):
            for block in blocks:
                self.entering[block].append(r)
        self._charged = np.array([savers[0] for savers in self.savers], dtype=np.int64)
        self._bytes = np.array([t.bytes * costs.growth.get(t.name, 1.0) for t in graph.saved], dtype=float)
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
            sizes = [self._result_bytes(name, local) for name, _, _ in self.results]
            found = self._results_at[local] = np.array(sizes, dtype=float)
        return found

    def _result_bytes(self, name: str, local: float) -> float:
        spec = self.costs.graph.tensors[name]
        fixed = float(spec.bytes_for(0))
        per_sample = (spec.bytes_for(spec.num_samples) - fixed) / spec.num_samples
        return (fixed + per_sample * local) * self.costs.growth.get(name, 1.0)

    def single_segments(self, local: float) -> tuple[Floats, Floats]:
        """Return by block what it drops as a segment of its own, and what it then holds instead, whatever its stage.

        What another block keeps is taken to be in the same stage: then it need not be held for this one.
        """
        sizes, results = self.sizes(local), self.result_sizes(local)
        dropped, held = np.zeros(len(self.saved_in)), np.zeros(len(self.saved_in))
        for t, users in enumerate(self.users):
            if len(users) == 1:
                dropped[self.made[t]] += sizes[t]
        for r, (_, _, readers) in enumerate(self.results):
            if self.result_tensor[r] < 0:
                held[readers] += results[r]
        return dropped, held


def chain_tensors(
    everything: GraphTensors, numbers: Iterable[int], sizes: Floats, place: Mapping[int, int]
) -> SavedTensors:
    """Return tensors as a chain of some blocks keeps them; what is made or used outside is made at 0, never dropped.

    Args:
        numbers: of the tensors; each is saved by a block of the chain.
        sizes: by tensor of the graph.
        place: position in the chain of each of its blocks.
    """
    numbers = list(numbers)
    made, charged, last = [], [], []
    for t in numbers:
        users = everything.users[t]
        inside = [place[user] for user in users if user in place]
        made.append(place[everything.made[t]] if len(inside) == len(users) else 0)
        charged.append(min(place[saver] for saver in everything.savers[t] if saver in place))
        last.append(max(inside))
    return SavedTensors(
        names=tuple(everything.names[t] for t in numbers),
        made=np.array(made, dtype=np.int64),
        charged=np.array(charged, dtype=np.int64),
        last=np.array(last, dtype=np.int64),
        bytes=sizes[numbers] if numbers else np.zeros(0),
    )


def chain_results(
    everything: GraphTensors, numbers: Iterable[int], sizes: Floats, place: Mapping[int, int], length: int
) -> tuple[UnsavedResults, Floats]:
    """Return what a chain's blocks read and none of them keeps, and by cut position the bytes that cross it.

    A result crosses the cuts behind its maker (0 if that is outside) up to its last reader, each once: one made at 0
    and read at 1 and 3 crosses cuts 1, 2 and 3 of [0 | 1 | 2 | 3].

    Args:
        numbers: of the results that blocks of the chain read.
        sizes: by result of the graph.
        length: positions of the chain.
    """
    steps = np.zeros(length)
    rows: list[tuple[int, int, int]] = []
    for r in numbers:
        _, maker, readers = everything.results[r]
        inside = [place[reader] for reader in readers if reader in place]
        begin = place.get(maker, 0)
        steps[begin] += sizes[r]
        steps[max(inside)] -= sizes[r]
        t = everything.result_tensor[r]
        if t < 0 or not any(saver in place for saver in everything.savers[t]):
            rows.extend((r, begin, reader) for reader in inside)
    found: Ints = np.array(rows, dtype=np.int64).reshape(-1, 3)
    unsaved = UnsavedResults(
        result=found[:, 0],
        made=found[:, 1],
        reader=found[:, 2],
        bytes=sizes[found[:, 0]] if rows else np.zeros(0),
    )
    return unsaved, prefix_sums(steps)
