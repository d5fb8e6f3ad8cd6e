"""The coarsened graph planners work on: blocks of operators, and the tensors between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import networkx as nx

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.serialize import DERIVED, fingerprint
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.ir.typed_leaves import Share

# The captured model as data: one node per operator, without tensors or torch.

CARRIED = "carried:"
"""In front of an attribute's name: a buffer that carries what a forward leaves there for the next one."""


def is_carried(name: str) -> bool:
    """Return whether a buffer carries an attribute of a module, which the user's model has no buffer for."""
    return name.rpartition(".")[2].startswith(CARRIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter or buffer of the model, under its HuggingFace name.

    Args:
        name: the first name the model gives it (``model.named_parameters()`` order).
        aliases: further names of the same tensor (weight tying), without ``name``.
        is_buffer: a buffer; ``is_persistent`` says whether the state dict holds it.
        is_mutated: a buffer that the forward pass updates in place (BatchNorm statistics).
        is_state: what the forward leaves in it is part of what the next one computes (not BatchNorm's, in training).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    is_buffer: bool = False
    is_persistent: bool = True
    is_mutated: bool = False
    is_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpNode:
    """One operator call of the captured graph.

    Args:
        name: unique node name, the one the torch graph uses.
        target: the operator, e.g. ``aten.linear.default``.
        inputs: names of nodes, model inputs and parameters it reads, in order, no repeats.
        module: HuggingFace path of the innermost module that called it ("" is the model itself).
        output: its tensor, or None for an operator that returns several (read by getitem nodes).
        flops: floating-point operations of the forward at the captured number of samples.
        saved_bytes: bytes saved for backward that no earlier node keeps already.
        keeps: nodes, perhaps itself, whose results it keeps for backward, with the bytes of the storage (of
            results that share one: the first); model inputs and parameters, held anyway, are left out.
        storage: the node whose result its own is a view of; "" where it has a storage of its own.
        kept_inside_bytes: of ``saved_bytes``, what is no node's result (a dropout's mask, softmax inside attention).
        is_coupling: mixes samples (in-batch losses, BatchNorm, means over the batch).
        is_random: draws random numbers (dropout).
        is_replicable: cheap, parameter-free, depends on model inputs only; recomputed per stage.
    """

    name: str
    target: str
    inputs: tuple[str, ...]
    module: str
    output: TensorSpec | None
    flops: float = 0.0
    saved_bytes: int = 0
    keeps: tuple[tuple[str, int], ...] = ()
    kept_inside_bytes: int = 0
    storage: str = ""
    is_coupling: bool = False
    is_random: bool = False
    is_replicable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """A captured model: nodes in execution order, model inputs, parameters, outputs.

    Args:
        num_samples: samples in the batch it was captured with.
        inputs: the model's tensor inputs (batch entries), in capture order.
        received: those of them that other stages make (of a captured part of a stage graph): they are not there
            anyway, and may take a gradient.
        loss: name of the node that yields the loss; None in an evaluation graph without labels.
        outputs: named outputs requested beside the loss, output name -> node name.
        couplings: one line of text for each place that mixes samples (for the user).
    """

    model: str
    num_samples: int
    inputs: tuple[TensorSpec, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[OpNode, ...]
    loss: str | None
    outputs: dict[str, str]
    couplings: tuple[str, ...] = ()
    received: tuple[str, ...] = ()


GRANULARITIES = ("layer", "sub_layer", "node")
"""Sizes of blocks, the coarsest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A convex group of operators that is never split by a block-level planner.

    Args:
        name: module path, e.g. ``vision_model.encoder.layers.0`` (``#2`` appended where a path recurs).
        nodes: operator nodes in execution order; empty in analytic graphs.
        parameters: names of the parameters and buffers it reads (a tied one under its first name).
        inputs: model inputs it reads, directly or through replicated nodes.
        flops: forward floating-point operations at ``BlockGraph.num_samples`` samples.
        saved_bytes: bytes saved for backward at that number of samples.
        is_coupled: computes on whole loss units only.
        is_trainable: has a parameter with ``requires_grad``.
    """

    name: str
    nodes: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    flops: float = 0.0
    saved_bytes: int = 0
    is_coupled: bool = False
    is_trainable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEdge:
    """Tensors that block ``src`` makes and block ``dst`` reads (names in `BlockGraph.tensors`).

    Args:
        src_shard_axis, dst_shard_axis: as in `StageEdge`, of all its tensors; an explicit stage is one block.
    """

    src: str
    dst: str
    tensors: tuple[str, ...]
    src_shard_axis: int | None = None
    dst_shard_axis: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A storage that autograd keeps from forward to backward: what can be swapped or recomputed.

    Args:
        name: the operator whose result it is, or ``<operator>:inside`` for what an operator keeps beside
            operands and results (masks, statistics).
        made_by: the block that makes it; "" where another stage does (of a captured part of a stage graph).
        kept_by: blocks whose backward reads it, in order; the first is charged with it in ``saved_bytes``.
        bytes: at ``BlockGraph.num_samples`` samples.
        views: further results that lie in it.
    """

    name: str
    made_by: str
    kept_by: tuple[str, ...]
    bytes: int
    views: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSharding:
    """What the tensor ranks, or the context ranks, of a data position divide of a block, and what they send each other.

    A block without one computes the same on every one of them: nothing of it is divided.

    Args:
        degrees: sizes above 1 that divide its heads (and features and vocabulary, of tensor ranks), increasing.
        flop_share: share of ``Block.flops`` that is divided by the degree; the rest every rank computes.
        parameter_bytes, trainable_bytes: of those of the block, what is held as shards.
        saved_share: share of ``Block.saved_bytes`` that is divided.
        forward_sums, backward_sums: all-reduces of one task, whatever its number of samples.
        forward_sum_bytes, backward_sum_bytes: bytes that they sum at ``BlockGraph.num_samples`` samples (of whole
            tensors, not what a ring sends of them).
        forward_gathers, backward_gathers: reduce-scatters and all-gathers along positions in one task.
        forward_gather_bytes, backward_gather_bytes: bytes of the whole tensors of these.
        beside_gathers, beside_gather_bytes: of the backward's, those that travel while weight gradients are made.
        cut_results: results that are in parts, and that other blocks read so: a stage that ends or begins with
            them makes them whole, and puts them in parts.
        beside_share: share of the block's weight gradients that is made while its backward's sums travel: of linear
            operators that read what is summed.
        forward_exchanges, backward_exchanges: all-to-alls between parts of positions and parts of heads in one task.
        forward_exchange_bytes, backward_exchange_bytes: bytes of the whole tensors of these; of n ranks each sends
            (n - 1) / n of its nth part.
        groups: how many groups of keys and values are exchanged, 0 where there are none: more ranks than these
            exchange ``group_bytes`` (of the whole tensors of one task) n / gcd(n, groups) times over.
        twice_bytes: of what it keeps by heads and by positions, both: attention's result, which the linear operator
            behind it reads as well. Bytes of the whole tensors, of which each rank has its part once more.
    """

    block: str
    degrees: tuple[int, ...]
    flop_share: float
    parameter_bytes: int
    trainable_bytes: int
    saved_share: float
    forward_sums: int
    forward_sum_bytes: int
    backward_sums: int
    backward_sum_bytes: int
    beside_share: Share = 0.0
    forward_gathers: int = 0
    forward_gather_bytes: int = 0
    backward_gathers: int = 0
    backward_gather_bytes: int = 0
    beside_gathers: int = 0
    beside_gather_bytes: int = 0
    cut_results: tuple[str, ...] = ()
    forward_exchanges: int = 0
    forward_exchange_bytes: int = 0
    backward_exchanges: int = 0
    backward_exchange_bytes: int = 0
    groups: int = 0
    group_bytes: int = 0
    twice_bytes: int = 0


@dataclass(frozen=True, kw_only=True)  # without slots, so that it keeps its fingerprint
class BlockGraph:
    """Blocks in a topological order, every edge between them, and the tensors on the edges.

    Args:
        num_samples: samples the sizes refer to.
        loss_block: the block that yields the loss, or None.
        more_losses: further blocks that yield a loss, which are all added up (explicit stage graphs).
        sharding: of the blocks that tensor ranks can divide; empty where that is not known.
        context: of the blocks that context ranks can divide; empty where that is not known.
        uncut: of blocks with linear operators or attention that context ranks do not divide, why.
        position_axes: tensor -> the axis of its positions, of those that context ranks hold in parts where they cross
            between stages; all others cross whole.
        undivided: of blocks with linear operators that tensor ranks cannot divide, why: names the operator in the way.
        tied: groups of blocks that share a parameter, parameter name -> block names.
        saved: what is saved for backward, tensor by tensor; empty in analytic graphs of layers.
    """

    model: str
    num_samples: int
    blocks: tuple[Block, ...]
    edges: tuple[BlockEdge, ...]
    tensors: dict[str, TensorSpec]
    loss_block: str | None
    tied: dict[str, tuple[str, ...]]
    saved: tuple[SavedTensor, ...] = ()
    more_losses: tuple[str, ...] = ()
    sharding: tuple[BlockSharding, ...] = ()
    undivided: dict[str, str] = field(default_factory=dict)
    context: tuple[BlockSharding, ...] = field(default=(), metadata=DERIVED)
    uncut: dict[str, str] = field(default_factory=dict, metadata=DERIVED)
    position_axes: dict[str, int] = field(default_factory=dict, metadata=DERIVED)

    @cached_property
    def fingerprint(self) -> str:
        """Return what plans and profiles of the graph name it by: of a large one this takes a tenth of a second."""
        return fingerprint(self)

    @property
    def loss_blocks(self) -> tuple[str, ...]:
        """Return all blocks that yield a loss."""
        return (*(() if self.loss_block is None else (self.loss_block,)), *self.more_losses)

    def block(self, name: str) -> Block:
        """Return the block of that name.

        Raises:
            PlanError: there is none.
        """
        for block in self.blocks:
            if block.name == name:
                return block
        raise PlanError(f"no block {name!r}; the blocks are {[b.name for b in self.blocks]}")

    def digraph(self) -> nx.DiGraph:
        """Return all edges as a directed graph over block names, in block order."""
        graph = nx.DiGraph()
        graph.add_nodes_from(block.name for block in self.blocks)
        graph.add_edges_from((edge.src, edge.dst) for edge in self.edges)
        return graph

    def dependencies(self) -> nx.DiGraph:
        """Return the transitive reduction: what must precede what, without implied edges."""
        # Every decoder layer of a T5 reads the encoder's output; that layer 1 comes behind the encoder follows from
        # layer 0, which it reads. Without such edges the graph is series-parallel, and planners search a small space;
        # what is sent (`edges`) has them all. What follows a block is a bit set: an edge is implied where its end
        # follows another block that reads its source. Put together anew, to keep the order of nodes.
        full = self.digraph()
        bit = {name: 1 << i for i, name in enumerate(full)}
        after = dict.fromkeys(bit, 0)
        behind_readers = dict.fromkeys(bit, 0)
        for name in reversed(list(nx.topological_sort(full))):
            for reader in full.successors(name):
                behind_readers[name] |= after[reader]
                after[name] |= bit[reader]
            after[name] |= behind_readers[name]
        ordered = nx.DiGraph()
        ordered.add_nodes_from(full.nodes)
        ordered.add_edges_from((src, dst) for src, dst in full.edges if not behind_readers[src] & bit[dst])
        return ordered

    def tensors_between(self, sources: Iterable[str], targets: Iterable[str]) -> tuple[TensorSpec, ...]:
        """Return each tensor once that a block of ``sources`` makes and one of ``targets`` reads."""
        src, dst = set(sources), set(targets)
        names = dict.fromkeys(
            name for edge in self.edges if edge.src in src and edge.dst in dst for name in edge.tensors
        )
        return tuple(self.tensors[name] for name in names)
