"""The models of `gpp bench topologies`: named stages of small layers in fp64, and their gradients in one process.

Every stage adds up what it reads (rows of the mini-batch and other stages' tensors) and passes it through a layer. A
stage without consumers yields a loss, the mean square of its rows less its target; the model's loss is their
sum. Weights depend on the names of stages only, so that every runtime starts from the same ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.relative_errors import gradient_errors

WIDTH = 16
SEQUENCE = 2
VOCABULARY = 8
DTYPE = torch.float64

Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One stage.

    Args:
        reads: names of other stages whose hidden states it takes; without any it reads its own rows of the batch.
        degree: data-parallel ranks; ``tensor`` ranks share one layer (Megatron's column and row parallel linears).
        micro_batch_size: samples it takes at a time; 0 is the topology's.
        makes_choices: its outputs are hidden states, an int64 tensor and a bool tensor.
    """

    name: str
    reads: tuple[str, ...] = ()
    degree: int = 1
    tensor: int = 1
    micro_batch_size: int = 0
    makes_choices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A graph of stages, in topological order; its ranks are given to them in this order."""

    name: str
    nodes: tuple[Node, ...]
    micro_batch_size: int = 6
    num_micro_batches: int = 4

    @property
    def mini_batch(self) -> int:
        """Return the samples of one step."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def num_ranks(self) -> int:
        """Return the ranks of all stages."""
        return sum(node.degree * node.tensor for node in self.nodes)

    @property
    def is_plain(self) -> bool:
        """Return whether every stage has one rank and the same micro-batches."""
        return all(n.degree == n.tensor == 1 and not n.micro_batch_size for n in self.nodes)

    def node(self, name: str) -> Node:
        """Return the stage of that name."""
        return next(node for node in self.nodes if node.name == name)

    def ranks(self, node: Node) -> tuple[int, ...]:
        """Return a stage's ranks."""
        first = sum(n.degree * n.tensor for n in self.nodes[: self.nodes.index(node)])
        return tuple(range(first, first + node.degree * node.tensor))

    def consumers(self, node: Node) -> tuple[Node, ...]:
        """Return the stages that read this one."""
        return tuple(other for other in self.nodes if node.name in other.reads)

    def is_sink(self, node: Node) -> bool:
        """Return whether a stage yields a loss."""
        return not self.consumers(node)

    def node_of_rank(self, rank: int) -> Node:
        """Return the stage a rank belongs to."""
        return next(node for node in self.nodes if rank in self.ranks(node))

    def batch(self) -> dict[str, Tensor]:
        """Return the mini-batch: for each source its rows, for each sink its target, both [B, SEQUENCE, WIDTH]."""
        generator = torch.Generator().manual_seed(7)
        shape = (self.mini_batch, SEQUENCE, WIDTH)
        keys = [f"{node.name}_rows" for node in self.nodes if not node.reads]
        keys += [f"{node.name}_target" for node in self.nodes if self.is_sink(node)]
        return {key: torch.randn(shape, generator=generator, dtype=DTYPE) for key in keys}


class TopologyStage(nn.Module):
    """A stage's layer.

    Args:
        tensor_group: the ranks that share the layer, where ``node.tensor`` is above 1.
        tensor_rank: this rank's place among them.
    """

    def __init__(
        self,
        topology: Topology,
        node: Node,
        *,
        tensor_group: dist.ProcessGroup | None = None,
        tensor_rank: int = 0,
    ) -> None:
        super().__init__()
        self.node = node
        self.is_sink = topology.is_sink(node)
        self.chooses = any(topology.node(name).makes_choices for name in node.reads)
        self.tensor_group = tensor_group
        generator = torch.Generator().manual_seed(zlib.crc32(node.name.encode()))

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=DTYPE) / shape[-1] ** 0.5)

        self.inner = nn.ParameterDict({name: draw(WIDTH, WIDTH) for name in (*node.reads, "rows")})
        if node.reads:
            del self.inner["rows"]
        self.embedding = draw(VOCABULARY, WIDTH) if self.chooses else None
        self.column, self.row = draw(WIDTH * 2, WIDTH), draw(WIDTH, WIDTH * 2)
        self.bias = draw(WIDTH)
        if tensor_group is not None:
            part = slice(tensor_rank * 2 * WIDTH // node.tensor, (tensor_rank + 1) * 2 * WIDTH // node.tensor)
            self.column = nn.Parameter(self.column.detach()[part].clone())
            self.row = nn.Parameter(self.row.detach()[:, part].clone())
            for parameter in (self.column, self.row):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, **given: Tensor) -> tuple[Tensor, ...]:
        """Return the stage's outputs from its inputs by name (see `input_names`), a sink's loss."""
        hidden = self.hidden(given)
        if self.is_sink:
            return (loss_of(hidden, given[f"{self.node.name}_target"]),)
        if not self.node.makes_choices:
            return (hidden,)
        size = given[f"{self.node.name}_rows"].detach().abs().sum(-1)
        return hidden, size.long() % VOCABULARY, size % 1.0 > 0.5

    def hidden(self, given: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states, [samples, SEQUENCE, WIDTH]."""
        reads = self.node.reads
        if reads:
            mixed = torch.stack([given[read] @ self.inner[read] for read in reads]).sum(0)
        else:
            mixed = given[f"{self.node.name}_rows"] @ self.inner["rows"]
        for read in reads:
            if f"{read}_choice" in given:
                assert self.embedding is not None
                chosen = torch.nn.functional.embedding(given[f"{read}_choice"], self.embedding)
                mixed = torch.where(given[f"{read}_keep"].unsqueeze(-1), mixed, chosen)
        return _parallel_layer(mixed, self.column, self.row, self.tensor_group) + self.bias


def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
    """Return a sink's loss: the mean square of hidden states less the target."""
    return (hidden - target).square().mean()


def input_names(topology: Topology, node: Node) -> tuple[str, ...]:
    """Return the names of what a stage reads: batch keys and outputs of other stages."""
    names = [name for read in node.reads for name in output_names(topology, topology.node(read))]
    if not node.reads:
        names.append(f"{node.name}_rows")
    if topology.is_sink(node):
        names.append(f"{node.name}_target")
    return tuple(names)


def output_names(topology: Topology, node: Node) -> tuple[str, ...]:
    """Return the names of what a stage makes."""
    if topology.is_sink(node):
        return (f"{node.name}_loss",)
    choices = (f"{node.name}_choice", f"{node.name}_keep") if node.makes_choices else ()
    return (node.name, *choices)


def reference_gradients(topology: Topology) -> Gradients:
    """Return every gradient, ``stage.parameter`` -> tensor, of one process and one backward on all samples."""
    stages = {node.name: TopologyStage(topology, node) for node in topology.nodes}
    known = topology.batch()
    losses = []
    for node in topology.nodes:
        made = stages[node.name](**{name: known[name] for name in input_names(topology, node)})
        known.update(zip(output_names(topology, node), made, strict=True))
        if topology.is_sink(node):
            losses.append(made[0])
    torch.stack(losses).sum().backward()
    return {
        f"{name}.{parameter}": tensor.grad
        for name, stage in stages.items()
        for parameter, tensor in stage.named_parameters()
        if tensor.grad is not None
    }


def largest_error(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the largest relative error of a gradient, by the norms of whole tensors; a missing one is zeros."""
    return max(gradient_errors(found, reference).values())


def gather_gradients(topology: Topology, own: Mapping[str, Tensor]) -> Gradients:
    """Return every stage's gradients on every rank, from those that each rank has of its own stage.

    Data-parallel ranks must hold the stage's sum already; parts over tensor ranks are joined.
    """
    gathered: list[dict[str, Tensor] | None] = [None] * topology.num_ranks
    dist.all_gather_object(gathered, dict(own))
    found: Gradients = {}
    for node in topology.nodes:
        ranks = topology.ranks(node)[: node.tensor]
        parts: Sequence[dict[str, Tensor]] = [gathered[rank] or {} for rank in ranks]
        for name in parts[0]:
            tensors = [part[name] for part in parts]
            axis = {"column": 0, "row": 1}.get(name)
            is_split = node.tensor > 1 and axis is not None
            found[f"{node.name}.{name}"] = torch.cat(tensors, dim=axis or 0) if is_split else tensors[0]
    return found


class _CopyToGroup(torch.autograd.Function):
    """The same tensor forward, the sum of the group's gradients backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return tensor.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)  # type: ignore[attr-defined]
        return total, None


class _SumOverGroup(torch.autograd.Function):
    """The sum of the group's tensors forward, the same gradient backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _parallel_layer(rows: Tensor, column: Tensor, row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return two linear maps with a tanh between them, split over ``group`` along the inner features."""
    if group is None:
        return torch.tanh(rows @ column.T) @ row.T
    copied: Tensor = _CopyToGroup.apply(rows, group)  # type: ignore[no-untyped-call]
    total: Tensor = _SumOverGroup.apply(torch.tanh(copied @ column.T) @ row.T, group)  # type: ignore[no-untyped-call]
    return total


def topologies() -> tuple[Topology, ...]:
    """Return the graphs of the benchmark."""

    def graph(name: str, *nodes: Node) -> Topology:
        return Topology(name=name, nodes=nodes)

    def node(name: str, *reads: str, **options: int) -> Node:
        return Node(name=name, reads=reads, **options)  # type: ignore[arg-type]

    return (
        graph("chain", node("a"), node("b", "a"), node("c", "b"), node("d", "c")),
        graph("two encoders", node("vision"), node("audio"), node("language", "vision", "audio")),
        graph(
            "uneven depth",
            node("vision"),
            node("audio0"),
            node("audio1", "audio0"),
            node("language", "vision", "audio1"),
        ),
        graph("skip", node("source"), node("middle", "source"), node("language", "middle", "source")),
        graph(
            "diamond",
            node("source"),
            node("left", "source"),
            node("right", "source"),
            node("join", "left", "right"),
        ),
        graph("two sinks", node("source"), node("first", "source"), node("second", "source")),
        graph("data 2 to 1", node("vision", degree=2), node("language", "vision")),
        graph("data 1 to 2", node("vision"), node("language", "vision", degree=2)),
        graph("data 2 to 3", node("vision", degree=2), node("language", "vision", degree=3)),
        graph("micro-batch per module", node("vision", micro_batch_size=12), node("language", "vision")),
        graph("tensor 2 beside 1", node("vision"), node("language", "vision", tensor=2)),
        graph(
            "int and bool edges",
            Node(name="source", makes_choices=True),
            node("middle", "source"),
            node("language", "middle", "source"),
        ),
    )
