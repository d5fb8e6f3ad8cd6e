"""What the tensor ranks of a data position do together inside a task, and a captured graph as one of them computes it.

The ranks' collectives are operators of a stage's generated code:

    shared    x ──► x      backward: the gradients of all ranks summed     where a region begins
    summed    x ──► sum    backward: the gradient as it is                 where a region ends
    joined    part of a parameter ──► whole    backward: its own part      where a whole one is read
    drawn     a number that all of them have                               in front of what draws at random

What is whole must be the same bits on every rank, dropped elements too, whatever a rank's generators have drawn before.
So each forward of a micro-batch takes one number, which the group's first rank draws from torch's generator and sends
from host to host; every operator that draws seeds the generators by it, by its own place in the code and, inside a
region, by the rank's position. A forward that runs again drops the same, as whoever recomputes restores torch's
generator.

A graph has regions on a rank's own parts, and sums where they end (`shard_graph`):

    captured                            rank 0 of 2
    h = norm(x)                         h = norm(x)
                                        s = shared(h)              its linear readers' weight gradients: beside the sum
    q = linear(h, wq)                   q = linear(s, wq)          wq is this rank's rows
    v = view(q, [2, 8, 4, 8])           v = view(q, [2, 8, 2, 8])
    o = linear(a, wo, bo)               p = linear(a, wo)          wo is this rank's columns
                                        t = summed(p)
                                        o = add(t, bo)

Operators keep their names; what is put between them is marked (`ADDED`) and belongs to the block of its neighbour.

Source: Megatron-LM (arXiv 1909.08053), section 3; dropout by seeds: this project
Tests: tests/runtime/test_shard_graph.py, tests/integrations/test_captured_tensor.py
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from gpp_plugin.capture.axis_rules import argument, sizes_of_part
from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.find_regions import as_linear, regions_of_stage
from gpp_plugin.capture.layouts import is_random
from gpp_plugin.capture.tracing.clean import ADDED
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.analysis import ShardedRegion, TensorShard, without_half_cut
from gpp_plugin.ir.block_graph import OpNode
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.runtime.random_streams import restored_streams, seed_streams_of
from gpp_plugin.runtime.ranks.collectives import all_reduce, begin_all_reduce, finish
from gpp_plugin.runtime.stage_module import Reference

# Parameters of a captured stage in parts, a part a tensor rank.
#
#     weight of q, k, v      rank 0          rank 1              parts (4, 4, 4) along axis 0 of 2 ranks
#     q0 q1 q2 q3            q0 q1           q2 q3
#     k0 k1 k2 k3            k0 k1           k2 k3
#     v0 v1 v2 v3            v0 v1           v2 v3
#
# They say so by the attributes that Megatron's layers give their parameters, by which norms, checkpoints and exports
# go.


def parameter_shards(reference: Reference, plan: PipelinePlan, index: int) -> dict[str, TensorShard]:
    """Return how the parameters of a stage are cut that its tensor ranks share out, by name."""
    if plan.stages[index].tensor == 1:
        return {}
    regions = regions_of_stage(reference.block_graph, reference.analysis.sharding.regions, plan, index)
    return {shard.name: shard for region in regions for shard in region.parameters}


def own_part(whole: Tensor, shard: TensorShard, position: int, degree: int) -> Tensor:
    """Return what one of ``degree`` ranks holds, in memory of its own."""
    # a copy also of one piece: a view would keep the whole tensor in memory. Of parts (4, 4, 4) rank 1 of 2 takes rows
    # 2 and 3, 6 and 7, 10 and 11.
    pieces = [whole.narrow(shard.axis, first, count) for first, count in shard.rows(position, degree)]
    return torch.cat(pieces, shard.axis)


def mark_part(parameter: nn.Parameter, shard: TensorShard) -> None:
    """Let a parameter say that each tensor rank holds its own part, and how parts make the whole."""
    marked: Any = parameter
    marked.tensor_model_parallel = True
    marked.partition_dim = shard.axis
    marked.partition_stride = len(shard.parts)


def check_shared_out(reference: Reference, requested: object) -> None:
    """Refuse tensor ranks for a model of which nothing can be shared out among them.

    Args:
        requested: ``tensor_parallel`` of the configuration.

    Raises:
        ConfigError: names the operator that is in the way.
    """
    graph = reference.block_graph
    if requested in (1, "auto") or graph.sharding:
        return
    why = next(iter(graph.undivided.values()), "it has no linear operators")
    raise ConfigError(
        f"graph_pipeline.tensor_parallel is {requested!r} and nothing of {graph.model} can be shared out among tensor "
        f'ranks: {why}; set it to 1, or to "auto" for what can be'
    )


def describe_whole(reference: Reference, plan: PipelinePlan) -> list[str]:
    """Return a line for each stage on tensor ranks some of whose linear operators are computed whole on all of them."""
    reasons = {each.name: each.reason for each in reference.analysis.sharding.whole}
    blocks = {block.name: block for block in reference.block_graph.blocks}
    lines = []
    for stage in plan.stages:
        own = [n for b in stage.blocks for n in blocks[b].nodes if n in reasons]
        if stage.tensor > 1 and own:
            more = f", and {len(own) - 1} more" if len(own) > 1 else ""
            lines.append(
                f"stage {stage.name!r}: each of its {stage.tensor} tensor ranks computes all of operator "
                f"{own[0]!r}{more}: {reasons[own[0]]}"
            )
    return lines


RESULT, GRADIENT = "the result of a region", "the gradient of what a region reads"
"""What is summed."""
_SEEDS = 1 << 48
_NEXT_OPERATOR, _NEXT_POSITION = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
"""Large odd numbers: seeds of neighbouring operators and positions lie far from each other."""


@dataclass(slots=True, kw_only=True)
class TensorRanks:
    """A stage's tensor ranks of one data position, as one of them sees them.

    Args:
        position, size: of this rank, and how many there are.
        group: theirs; None until the job's groups are made.
        parts: how the stage's parameters are cut, as it holds them; None until it does.
        sent_bytes: of `RESULT` and `GRADIENT`, the bytes of the tensors that have been summed so far.
    """

    stage: str
    position: int
    size: int
    group: dist.ProcessGroup | int | None = None
    parts: Mapping[str, TensorShard] | None = None
    sent_bytes: dict[str, int] = field(default_factory=dict)

    def sum(self, tensor: Tensor, what: str, *, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Return the sum of the ranks' tensors, or what else ``op`` makes of them."""
        total, arguments = self._summand(tensor, what)
        all_reduce(total, op=op, **arguments)
        return total

    def begin_sum(self, tensor: Tensor, what: str) -> tuple[Tensor, Callable[[], None]]:
        """Begin a sum; return where it will be, and what waits for it."""
        total, arguments = self._summand(tensor, what)
        return total, begin_all_reduce(total, **arguments)

    def _summand(self, tensor: Tensor, what: str) -> tuple[Tensor, dict[str, Any]]:
        assert self.group is not None, "the groups of a job are made before it runs"
        self.sent_bytes[what] = self.sent_bytes.get(what, 0) + tensor.nbytes
        title = f"{what} over the tensor ranks of stage {self.stage!r}"
        return tensor.clone(memory_format=torch.contiguous_format), {"group": self.group, "what": title}

    def join(self, part: Tensor, shard: TensorShard) -> Tensor:
        """Return the whole of the ranks' parts."""
        assert isinstance(self.group, dist.ProcessGroup), "the groups of a job are made before it runs"
        own = part.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        work = dist.all_gather(parts, own, group=self.group, async_op=True)
        finish(work, own, group=self.group, what=f"the whole of {shard.name} in stage {self.stage!r}")
        pieces = [each.chunk(len(shard.parts), shard.axis) for each in parts]
        return torch.cat([own[i] for i in range(len(shard.parts)) for own in pieces], shard.axis)


class TensorLinks:
    """The tensor ranks of this rank's stages, by stage and ranks; code is made before there are process groups."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[tuple[str, tuple[int, ...]], TensorRanks] = {}

    def of(self, stage: Stage) -> TensorRanks:
        """Return the ranks that compute the same samples of a stage as this one."""
        data_position, position = stage.position(self._rank)
        key = stage.name, stage.tensor_ranks(data_position)
        if key not in self._known:
            self._known[key] = TensorRanks(stage=stage.name, position=position, size=stage.tensor)
        return self._known[key]

    def join(self, stage: Stage, group: dist.ProcessGroup | int, parts: Mapping[str, TensorShard]) -> None:
        """Let the code of a stage use this group, and parameters as they are held, from now on."""
        self.of(stage).group, self.of(stage).parts = group, parts


# What is shared: a sum that computing does not wait for. A linear operator's own autograd makes the gradients of input
# and weight in one node, so that the sum could begin only behind the last weight's. So linear operators read weights
# detached, and one node of its own makes the gradients of the weights of all that read the tensor:
#
#     forward    h ─► waited ───────────────────► launched ─┬─► linear(·, wq) ─► both ─► q
#                h, wq, wk ─► weights ─┬─ of q ─────────────│─────────────────────┘
#                                      └─ of k ─────┐       └─► linear(·, wk) ─► both ─► k
#                                                   └──────────────────────────────┘
#     backward   each linear operator, launched (the sum begins), weights (dwq, dwk), waited
#
# Autograd runs first what was made last, of all that can run: ``weights`` is made between the other two. In another
# order results are the same, as nothing but ``waited`` hands the sum on. A split backward has ``weights`` and what lies
# behind it in its second part alone.


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, begun: list[Callable[[], None]]) -> Tensor:
        ctx.begun = begun
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.begun.pop()()
        return gradient, None


class _Weights(torch.autograd.Function):
    """Makes a tensor without memory of each weight and bias: what arrives there is their operator's gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, columns: Sequence[int], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(tensor)
        ctx.set_materialize_grads(False)
        ctx.columns = columns
        shapes = [(*tensor.shape[:-1], w.shape[axis]) for w, axis in zip(given[::2], columns, strict=True)]
        return tuple(tensor.new_empty_strided(shape, (0,) * len(shape)) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # tensor [2, 8, 16], weight [4, 16] with its columns along axis 0: rows [16, 16], own [16, 4]
        rows = _rows(ctx.saved_tensors[0])
        found: list[Tensor | None] = []
        for number, (gradient, axis) in enumerate(zip(gradients, ctx.columns, strict=True), start=1):
            if gradient is None:
                found += [None, None]
                continue
            own, (of_weight, of_bias) = _rows(gradient), ctx.needs_input_grad[2 * number :][:2]
            factors = (rows, own) if axis else (own, rows)
            found.append(factors[0].t().mm(factors[1]) if of_weight else None)
            found.append(own.sum(0) if of_bias else None)
        return None, None, *found


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _Launched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, begun: list[Callable[[], None]], ranks: TensorRanks) -> Tensor:
        ctx.begun, ctx.ranks = begun, ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total, wait = ctx.ranks.begin_sum(gradient, GRADIENT)
        ctx.begun.append(wait)
        return total, None, None


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, of_weights: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks.sum(tensor, RESULT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks, shard: TensorShard) -> Tensor:
        ctx.ranks, ctx.shard = ranks, shard
        return ranks.join(part, shard)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shard = ctx.shard
        rows = shard.rows(ctx.ranks.position, ctx.ranks.size)
        own = [gradient.narrow(shard.axis, first, count) for first, count in rows]
        return torch.cat(own, shard.axis), None, None


class TensorOperator:
    """An operator of generated code on tensor ranks: the target of a graph's node.

    Args:
        title: how generated code calls it.
    """

    def __init__(self, title: str, call: Callable[..., Any], *, is_random: bool = False) -> None:
        self.__name__ = title
        self._call = call
        self.tags = (torch.Tag.nondeterministic_seeded,) if is_random else ()

    def __str__(self) -> str:
        return self.__name__

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorOperator:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self._call(*args, **kwargs)


def shared(ranks: TensorRanks, columns: Sequence[int] = ()) -> TensorOperator:
    """Return what hands a whole tensor to a region, and to each `linear` operator there what it takes first.

    It takes the tensor, then weight and bias (or None) of each of those operators.

    Args:
        columns: the axis along which each weight makes features.
    """

    def share(tensor: Tensor, *given: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return tensor, *(None for _ in columns)
        begun: list[Callable[[], None]] = []
        waited = _Waited.apply(tensor, begun)  # type: ignore[no-untyped-call]
        of_weights = _Weights.apply(tensor.detach(), columns, *given) if columns else ()  # type: ignore[no-untyped-call]
        return _Launched.apply(waited, begun, ranks), *of_weights  # type: ignore[no-untyped-call]

    return TensorOperator("tensor_shared", share)


def linear(call: Callable[..., Tensor], place: int) -> TensorOperator:
    """Return a linear operator that has the gradients of its weights made apart (`shared`).

    Args:
        place: of the tensor among its arguments.
    """

    def run(of_weights: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        if of_weights is None or not of_weights.requires_grad:
            return call(*args, **kwargs)
        own = [a.detach() if isinstance(a, Tensor) and i != place else a for i, a in enumerate(args)]
        named = {key: a.detach() if isinstance(a, Tensor) else a for key, a in kwargs.items()}
        found: Tensor = _Both.apply(call(*own, **named), of_weights)  # type: ignore[no-untyped-call]
        return found

    return TensorOperator("tensor_linear", run)


def summed(ranks: TensorRanks) -> TensorOperator:
    """Return what makes a whole tensor of the ranks' summands."""
    return TensorOperator("tensor_summed", lambda tensor: _Summed.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def joined(ranks: TensorRanks, shard: TensorShard) -> TensorOperator:
    """Return what makes a whole parameter of the ranks' parts; all of them compute the same with it."""
    return TensorOperator("tensor_joined", lambda part: _Joined.apply(part, ranks, shard))  # type: ignore[no-untyped-call]


def drawn(ranks: TensorRanks) -> TensorOperator:
    """Return what draws one number for a forward, the same on all ranks of the group."""

    def draw() -> Tensor:
        number = torch.empty((), dtype=torch.int64).random_(_SEEDS)
        if ranks.position > 0:
            number.zero_()
        assert ranks.group is not None, "the groups of a job are made before it runs"
        # on the host, over the group's gloo: read from a device, it would be waited for in each forward
        all_reduce(number, group=ranks.group, what=f"the seed of a forward of stage {ranks.stage!r}")
        return number

    return TensorOperator("tensor_drawn", draw, is_random=True)


def seeded(
    call: Callable[..., Any], ranks: TensorRanks, device: torch.device, *, place: int, is_part: bool
) -> TensorOperator:
    """Return an operator that draws by the number of its forward, which is its first argument.

    Args:
        place: of the operator in the code.
        is_part: its result is a part: each rank drops other elements.
    """
    # Dropout of hidden states: the same seed on all ranks. Of attention's heads: one for each position, so that heads 0
    # and 2, of ranks 0 and 1, do not drop the same. The next operator of the forward draws differently from both.
    distance = place * _NEXT_OPERATOR + (ranks.position + 1) * _NEXT_POSITION * is_part

    def run(number: Tensor, *args: Any, **kwargs: Any) -> Any:
        with restored_streams(device):
            seed_streams_of(device, (int(number) + distance) % (1 << 63))
            return call(*args, **kwargs)

    return TensorOperator("tensor_seeded", run)


# Embedding and cross entropy of a vocabulary that tensor ranks share out.
#
#     tokens [B, T]        each rank looks up those of its own rows, has zeros for the others, and all are summed
#     logits [N, V / t]    each rank has its own columns; of each row the ranks agree on
#                              the largest logit m                       one maximum
#                              sum of exp(logit - m), label's logit      one sum of two numbers
#                          loss = log(sum) - (label's logit - m); gradient = exp(logit - m) / sum - [is the label]

aten = torch.ops.aten


def embedded(first: int) -> TensorOperator:
    """Return an embedding of the tokens of this rank's rows, the first of which is ``first``; zeros for the others."""

    def embed(weight: Tensor, tokens: Tensor, padding: int = -1, *rest: Any) -> Tensor:
        # rows 4 to 7 are rank 1's: token 5 is its row 1; token 2 is looked up at row 0, and what is found set to zero,
        # so that no gradient reaches that row
        place = tokens - first
        is_own = (place >= 0) & (place < weight.shape[0])
        own_padding = padding - first if 0 <= padding - first < weight.shape[0] else -1
        found: Tensor = aten.embedding.default(weight, place.where(is_own, 0), own_padding)
        return found.masked_fill(~is_own.unsqueeze(-1), 0.0)

    return TensorOperator("tensor_embedded", embed)


def cross_entropy(ranks: TensorRanks, first: int) -> TensorOperator:
    """Return a cross entropy of logits of which this rank has the columns from ``first`` on."""

    def loss(
        logits: Tensor,
        target: Tensor,
        weight: None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        assert weight is None and not label_smoothing, "such a loss is not shared out"
        found: Tensor = _CrossEntropy.apply(logits, target, ranks, first, ignore_index, reduction == 1)  # type: ignore[no-untyped-call]
        return found

    return TensorOperator("tensor_cross_entropy", loss)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ranks: TensorRanks, first: int, ignored: int, is_mean: bool
    ) -> Tensor:
        # own [N, V / t], most [N], place [N, 1]: of a label of another rank any column is looked at, and its logit is
        # left out. With 8 classes on 2 ranks and label 5: rank 0 brings 0, rank 1 logit 1 of its own.
        own = logits if logits.dtype == torch.float64 else logits.float()
        most = ranks.sum(own.amax(1), RESULT, op=dist.ReduceOp.MAX)
        shifted = own - most.unsqueeze(1)
        place = target - first
        is_own = (place >= 0) & (place < own.shape[1])
        place = place.where(is_own, 0).unsqueeze(1)
        labelled = shifted.gather(1, place).squeeze(1).where(is_own, 0.0)
        exponentials = shifted.exp()
        total, label = ranks.sum(torch.stack([exponentials.sum(1), labelled]), RESULT)
        is_counted = target != ignored
        losses = (total.log() - label).where(is_counted, 0.0)
        count = is_counted.sum() if is_mean else torch.ones_like(losses.sum())
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), place, is_own, is_counted, count)
        ctx.dtype = logits.dtype
        return (losses.sum() / count).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        shares, place, is_own, is_counted, count = ctx.saved_tensors
        # shares [N, V / t] are this rank's columns of the softmax; 1 is taken off where the label is
        found = shares.scatter_add(1, place, -is_own.to(shares.dtype).unsqueeze(1))
        scale = (gradient.to(shares.dtype) / count).where(is_counted, 0.0)
        return found.mul_(scale.unsqueeze(1)).to(ctx.dtype), None, None, None, None, None


def shard_graph(
    captured: CapturedGraph, regions: Sequence[ShardedRegion], ranks: TensorRanks, own: Sequence[str]
) -> tuple[CapturedGraph, dict[str, str]]:
    """Return a capture whose regions compute on this rank's parts, and what was put in.

    Of each operator that was put in, the operator of the capture whose block it belongs to.

    Args:
        regions: those that are shared out; everything else is computed whole.
        own: the operators that the rank computes.

    A parameter that is held in parts (`TensorRanks.parts`) and that nobody reads so here is joined: an evaluation may
    request a tensor inside of what was a region in training, a unit that lacks inputs has operators of its own. What is
    held whole is never cut.

    Raises:
        CaptureError: an operator's sizes are not what they were when the regions were found.
    """
    if ranks.parts is not None:
        held = ranks.parts
        fit = [r for r in regions if all(held.get(shard.name) == shard for shard in r.parameters)]
        regions = without_half_cut(regions, fit)
    writer = _Writer(captured, regions, ranks, frozenset(own))
    graph = writer.write()
    # what of an operator that was put in is read is known of the operators beside it
    added = [OpNode(name=n, target="added", inputs=(), module="", output=None) for n in writer.added]
    op_graph = dataclasses.replace(captured.op_graph, nodes=(*captured.op_graph.nodes, *added))
    return dataclasses.replace(captured, graph=graph, op_graph=op_graph), writer.added


class _Writer:
    """Copies a graph node by node, and puts in what tensor ranks need."""

    def __init__(
        self,
        captured: CapturedGraph,
        regions: Sequence[ShardedRegion],
        ranks: TensorRanks,
        own: frozenset[str],
    ) -> None:
        self._captured = captured
        self._ranks = ranks
        self._region_of = {name: i for i, region in enumerate(regions) for name in region.operators}
        self._results = {result.name: result for region in regions for result in region.results}
        self._sums = {name for region in regions for name in region.sums}
        self._losses = {name for region in regions for name in region.losses}
        self._parameters = {shard.name: shard for region in regions for shard in region.parameters}
        self._shared = [frozenset(region.shared) for region in regions]
        self._sliced = [{shard.name: shard for shard in region.sliced} for region in regions]
        self._names = {**captured.inputs, **captured.parameters}
        cut = {shard.name for region in regions for shard in region.parameters}
        self._joined = {name: shard for name, shard in (ranks.parts or {}).items() if name not in cut}
        self._own = own
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._whole: dict[fx.Node, fx.Node] = {}
        self._in_region: dict[tuple[int, fx.Node], fx.Node] = {}
        self._of_weights: dict[fx.Node, fx.Node] = {}
        self._number: fx.Node | None = None
        self.added: dict[str, str] = {}

    def write(self) -> fx.Graph:
        """Return the copy."""
        for place, node in enumerate(self._captured.graph.nodes):
            copy = self._copies[node] = self._copy(node, place)
            assert copy.name == node.name, f"{node.name} became {copy.name}"
            shard = self._joined.get(self._captured.parameters.get(node.name, ""))
            readers = [user for user in node.users if user.name in self._own] if shard is not None else []
            if shard is not None and readers:
                whole = joined(self._ranks, shard)
                self._whole[node] = self._add(whole, (copy,), readers[0], f"tensor_{node.name}_joined", node)
        return self._graph

    def _copy(self, node: fx.Node, place: int) -> fx.Node:
        # Outside of regions a node is copied as it is, unless it draws: then it draws what all ranks draw. Inside it
        # reads what the region has of its operands (`_operand`), and takes the sizes of its part (`_local`).
        region = self._region_of.get(node.name)
        is_random_here = node.op == "call_function" and node.name in self._own and is_random(node)
        if region is None and not is_random_here:
            return self._graph.node_copy(node, self._read)
        number = self._drawn(node) if is_random_here else None

        def operand(source: fx.Node) -> fx.Node:
            return self._read(source) if region is None else self._operand(region, source, node)

        if node.name in self._sums:
            return self._summed(node, operand)
        args: Any = fx.map_arg(node.args, operand)
        kwargs: Any = fx.map_arg(node.kwargs, operand)
        shard = self._results.get(node.name)
        target: Any = node.target
        if node.name in self._losses:
            logits: Any = node.args[0]
            target = cross_entropy(self._ranks, self._first_of(self._results[logits.name]))
        if shard is not None:
            args = sizes_of_part(node, shard.axis, self._ranks.size, args)
        if number is not None:
            assert callable(target)
            device = self._captured.device
            target = seeded(target, self._ranks, device, place=place, is_part=shard is not None)
            args = (number, *args)
        if node in self._of_weights:
            place = next(i for i, each in enumerate(node.args) if str(each) not in self._captured.parameters)
            target, args = linear(target, place), (self._of_weights[node], *args)
        copy = self._graph.create_node(node.op, target, args, kwargs, name=node.name)
        copy.meta = dict(node.meta)
        return copy

    def _read(self, source: fx.Node) -> fx.Node:
        return self._whole.get(source) or self._copies[source]

    # ---- what is put in ------------------------------------------------------------------------

    def _add(
        self, target: Any, args: tuple[Any, ...], beside: fx.Node, name: str, value: fx.Node | None
    ) -> fx.Node:
        node = self._graph.create_node("call_function", target, args, {}, name=name)
        node.meta = {} if value is None else {k: v for k, v in value.meta.items() if k == "val"}
        node.meta[ADDED] = True
        self.added[node.name] = beside.name
        return node

    def _operand(self, region: int, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return what an operator of a region reads in the place of another's result."""
        copy = self._read(source)
        name = self._names.get(source.name, source.name)
        shard = self._sliced[region].get(name)
        is_shared = name in self._shared[region]
        if shard is None and not is_shared:
            return copy
        # Once a region: q, k and v read one copy of the hidden states, whose gradients are added up here, by autograd,
        # before they are summed over the ranks: one all-reduce for the three.
        if (region, source) not in self._in_region:
            base = f"tensor_{source.name}_{region}"
            if is_shared:
                copy = self._share(region, source, copy, reader, base)
            if shard is not None:
                copy = self._part(shard, copy, reader, base, source)
            self._in_region[region, source] = copy
        return self._in_region[region, source]

    def _share(self, region: int, source: fx.Node, copy: fx.Node, beside: fx.Node, base: str) -> fx.Node:
        own = (user for user in source.users if self._region_of.get(user.name) == region)
        found = (as_linear(user, self._captured.parameters) for user in own)
        linears = [
            f for f in found if f and f.operand is source and self._names[f.weight.name] in self._parameters
        ]
        given = [None if n is None else self._read(n) for f in linears for n in (f.weight, f.bias)]
        target = shared(self._ranks, tuple(f.columns for f in linears))
        made = self._add(target, (copy, *given), beside, f"{base}_sharing", None)
        for number, each in enumerate(linears, start=1):
            name = f"{base}_weights_{number}"
            self._of_weights[each.node] = self._add(operator.getitem, (made, number), beside, name, None)
        return self._add(operator.getitem, (made, 0), beside, f"{base}_shared", source)

    def _part(
        self, shard: TensorShard, whole: fx.Node, reader: fx.Node, base: str, value: fx.Node
    ) -> fx.Node:
        rows = shard.rows(self._ranks.position, self._ranks.size)
        pieces = [
            self._add(
                aten.slice.Tensor,
                (whole, shard.axis, first, first + count),
                reader,
                f"{base}_part_{i}",
                value,
            )
            for i, (first, count) in enumerate(rows)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return self._add(aten.cat.default, (pieces, shard.axis), reader, f"{base}_parts", value)

    def _drawn(self, reader: fx.Node) -> fx.Node:
        if self._number is None:
            self._number = self._add(drawn(self._ranks), (), reader, "tensor_drawn", None)
        return self._number

    def _summed(self, node: fx.Node, operand: Any) -> fx.Node:
        """Return the sum of the ranks' products, with the bias added once."""
        # A bias is whole, and is added behind the sum: before it, each rank would add it once.
        target: Any = node.target
        bias: fx.Node | None = None
        if target is aten.embedding.default:
            table: Any = node.args[0]
            first = self._first_of(self._parameters[self._names[table.name]])
            args = (operand(table), operand(node.args[1]), *node.args[2:])
            product = self._add(embedded(first), args, node, f"tensor_{node.name}_own", node)
        elif target is aten.addmm.default:
            bias, left, weight = (operand(each) for each in node.args)
            product = self._add(aten.mm.default, (left, weight), node, f"tensor_{node.name}_product", node)
        else:
            bias_argument = argument(node, 2, "bias")
            bias = operand(bias_argument) if isinstance(bias_argument, fx.Node) else None
            left, weight = operand(node.args[0]), operand(node.args[1])
            product = self._add(target, (left, weight), node, f"tensor_{node.name}_product", node)
        total = summed(self._ranks)
        if bias is None:
            last = self._graph.create_node("call_function", total, (product,), {}, name=node.name)
        else:
            whole = self._add(total, (product,), node, f"tensor_{node.name}_sum", node)
            last = self._graph.create_node(
                "call_function", aten.add.Tensor, (whole, bias), {}, name=node.name
            )
        last.meta = dict(node.meta)
        return last

    def _first_of(self, shard: TensorShard) -> int:
        """Return the first row, or column, that this rank has of what is cut into one part a rank."""
        return shard.rows(self._ranks.position, self._ranks.size)[0][0]
