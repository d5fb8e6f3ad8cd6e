"""What one capture of a model found out, as data: made once, on one rank, and carried on by every other.

With it another rank captures at the size of its own stage in one export, and gets the same names,
layouts and blocks.

What tensor ranks may share out of it are regions of operators between whole tensors (`ShardedRegion`):

    x whole ──► q, k, v by columns ──► heads, attention ──► o by rows ──sum──► whole
                each rank its heads    each rank its own    each rank a summand

A region begins with linear operators whose weights are cut by columns (their results' features) and ends with those
whose weights are cut by rows, whose results are summed over the ranks. Between the two every operator computes on a
part of one axis of its result, and as many parts as ranks are the whole. Nothing outside a region depends on it.

A vocabulary is shared out likewise: of an embedding each rank has some rows, and zeros for other tokens are summed; of
logits each rank has some columns, and a cross entropy needs the largest one, a sum and the label's of each row.

Source: Megatron-LM (arXiv 1909.08053), section 3
Tests: tests/capture/test_sharding.py
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpp_plugin.ir.block_graph import OpGraph

PREPARED, RECORDED, WHOLE_UNITS = "prepared", "recorded", "whole units"
"""Means of a capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One node of the captured torch graph, for graphs of other sizes to be held against.

    Args:
        op: ``placeholder``, ``get_attr``, ``call_function`` or ``output``.
        target: the operator (its name), or the placeholder's name; "" for the others.
        inputs: names of the nodes it reads.
        module: path of the module that called it.
    """

    name: str
    op: str
    target: str
    inputs: tuple[str, ...]
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """How a tensor is cut for the tensor ranks of a data position.

    Args:
        name: of an operator (whose result it is), an input, or a parameter.
        axis: along which it is cut.
        parts: sizes of what lies one behind the other along that axis, each of which is cut by itself: of a weight
            that makes queries, keys and values of 32 each ``(32, 32, 32)``; rank 1 of 2 holds the second half of each.
            Those of a parameter are equal.
    """

    name: str
    axis: int
    parts: tuple[int, ...]

    def rows(self, position: int, degree: int) -> tuple[tuple[int, int], ...]:
        """Return what one of ``degree`` ranks holds along the axis, as (first, how many) of each part.

        >>> TensorShard(name="qkv", axis=0, parts=(8, 4)).rows(1, 2)
        ((4, 4), (10, 2))
        """
        found, begin = [], 0
        for size in self.parts:
            own = size // degree
            found.append((begin + position * own, own))
            begin += size
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRegion:
    """Operators that compute on parts, from whole tensors to whole tensors.

    Args:
        size: a tensor degree is possible where it divides this: the largest number that divides all that is cut (heads,
            groups of keys and values, features).
        results: of its operators, those that ranks hold parts of.
        parameters: that are cut.
        sums: its last operators, whose results are summed over the ranks.
        losses: or cross entropies over what is cut, which sum three numbers a row.
        shared: whole tensors and parameters that it reads and whose gradient is summed over the ranks.
        sliced: of the whole tensors that it reads, those of which each rank reads its part.
    """

    size: int
    results: tuple[TensorShard, ...]
    parameters: tuple[TensorShard, ...]
    sums: tuple[str, ...]
    shared: tuple[str, ...]
    sliced: tuple[TensorShard, ...]
    losses: tuple[str, ...] = ()

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the operators of the region."""
        return (*(result.name for result in self.results), *self.sums, *self.losses)

    def is_divided_by(self, degree: int) -> bool:
        """Return whether so many ranks can share it out."""
        return degree > 1 and self.size % degree == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePart:
    """An operator between two regions that treats positions alike: a rank computes its part of the positions.

    Args:
        name: of the operator, whose result is cut.
        axis: of its result, along which positions lie.
        operands: what it reads parts of -> the axis of positions there; it reads all else whole.
        parameters: that it reads; each rank's gradient of them is of its own positions.
        shared: whole tensors that it reads and whose gradient is summed over the ranks.
        joins: the result of a region that it is, or is a view of; "" for none.
    """

    name: str
    axis: int
    operands: dict[str, int]
    parameters: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    joins: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeLinear:
    """A linear operator that stays whole, and the operator that is in the way."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What of a captured model can be shared out, and what cannot."""

    regions: tuple[ShardedRegion, ...] = ()
    whole: tuple[WholeLinear, ...] = ()
    sequence: tuple[SequencePart, ...] = ()


def regions_in(regions: Iterable[ShardedRegion], operators: Iterable[str]) -> tuple[ShardedRegion, ...]:
    """Return the regions whose operators are all among some."""
    known = frozenset(operators)
    return tuple(region for region in regions if known.issuperset(region.operators))


def sequence_in(
    parts: Iterable[SequencePart], operators: Iterable[str], regions: Iterable[ShardedRegion]
) -> tuple[SequencePart, ...]:
    """Return the operators among some that compute on parts of the positions where these regions are shared out."""
    known, sums = frozenset(operators), {name for region in regions for name in region.sums}
    return tuple(part for part in parts if part.name in known and (not part.joins or part.joins in sums))


def without_half_cut(
    regions: Iterable[ShardedRegion], chosen: Iterable[ShardedRegion]
) -> tuple[ShardedRegion, ...]:
    """Return those of the chosen regions whose parameters no other region cuts that is not chosen too.

    Args:
        regions: all of a capture; each reader of a parameter that one of them cuts is in one that cuts it.
    """
    # A weight is that of an embedding (region 0) and a head (1), which has a bias that region 2 reads too. Where 0 is
    # not chosen, its embedding reads the weight whole: so 1 cannot cut it, thus not the bias either, thus 2 cannot.
    everything, chosen = tuple(regions), tuple(chosen)
    while True:
        own = frozenset(chosen)
        whole = {shard.name for region in everything if region not in own for shard in region.parameters}
        fewer = tuple(r for r in chosen if whole.isdisjoint(shard.name for shard in r.parameters))
        if len(fewer) == len(chosen):
            return chosen
        chosen = fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor, or a number, of a state.

    Args:
        name: the buffer that holds it.
        number: the type of a Python number, ``int`` or ``float``; "" for a tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    number: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedState:
    """What a forward leaves behind for the next one.

    Args:
        name: of a buffer that is assigned, or of a module's attribute.
        tensors: none where later forwards leave it as it is, so that it is no state.
        structure: of an attribute, how it is made of its tensors; "" for a buffer.
    """

    name: str
    tensors: tuple[StateTensor, ...] = ()
    structure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A captured model without its torch graph.

    Args:
        nodes: the torch graph's nodes in order.
        is_training: whether modules were in training mode.
        dtype: what floating parameters and inputs were cast to (torch's name of it); None left them.
        device_type: what the graph was captured for, ``cpu`` or ``cuda``; each rank has a device of its own.
        layer_lists: module paths whose children are repeated layers (module lists, long sequentials).
        clusters: groups of nodes that belong together: writers and readers of one storage, operators
            with several results and their parts, tensors that no batch axis can cut.
        unpadded: inputs that held ones only in the first capture's batch; costs are of attention without the masks
            that eager models leave out then.
        eager: modules (and loss functions) that stay whole and run as they are, by path.
        means: what tracing it took beyond an export: "prepared" where entries of the batch are made beforehand on the
            host, "recorded" where Python reads values of the batch, "whole units"
            where no axis is known to hold samples, so that all operators compute on whole loss units.
        sharding: what of it tensor ranks can share out.
        carried: what the forward leaves behind for the next one.
    """

    op_graph: OpGraph
    nodes: tuple[GraphNode, ...]
    is_training: bool
    dtype: str | None = None
    device_type: str = "cpu"
    layer_lists: tuple[str, ...] = ()
    clusters: tuple[tuple[str, ...], ...] = ()
    unpadded: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    means: tuple[str, ...] = ()
    sharding: Sharding = Sharding()
    carried: tuple[CarriedState, ...] = ()

    @property
    def reads_values(self) -> bool:
        """Return whether Python reads values of the batch."""
        return RECORDED in self.means

    @property
    def takes_whole_units(self) -> bool:
        """Return whether nothing is known of where samples lie."""
        return WHOLE_UNITS in self.means
