"""What the tensor ranks of a data position do together inside a task.

The ranks' collectives are operators of a stage's generated code (`shard_graph`):

    shared     x ──► x      backward: the gradients of all ranks summed     where a region begins
    shared     part of x ──► x      backward: the sum at its positions     where it begins behind parts of positions
    summed     x ──► sum    backward: the gradient as it is                 where a region ends
    scattered  x ──► the sum at its positions    backward: the whole of the parts    where it ends in front of parts
    gathered   part of x ──► x      backward: its own part                 where all ranks compute the same behind parts
    joined     part of a parameter ──► whole    backward: its own part      where a whole one is read
    drawn      a number that all of them have                               in front of what draws at random

What is whole must be the same bits on every rank, dropped elements too, whatever a rank's generators have drawn before.
So each forward of a micro-batch takes one number, which the group's first rank draws from torch's generator and sends
from host to host; every operator that draws seeds the generators by it, by its own place in the code and, where the
rank has a part, by the rank's position. A forward that runs again drops the same, as whoever recomputes restores
torch's generator.

Source: Megatron-LM (arXiv 1909.08053), section 3; dropout by seeds: this project
Tests: tests/runtime/test_shard_graph.py, tests/integrations/test_captured_tensor.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.ir.analysis import TensorShard, regions_of_stage, sequence_of_stage
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


def partial_parameters(reference: Reference, plan: PipelinePlan, index: int) -> frozenset[str]:
    """Return the parameters of a stage of whose gradients each tensor rank makes those of its positions alone."""
    if plan.stages[index].tensor == 1:
        return frozenset()
    parts = sequence_of_stage(reference.block_graph, reference.analysis.sharding, plan, index)
    return frozenset(name for part in parts for name in part.parameters)


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
PARTS, GRADIENT_PARTS = "a cut along positions", "the gradient of a cut along positions"
"""What is put in parts, or is made whole of them, in forwards and in backwards."""
EXCHANGED, GRADIENT_EXCHANGED = "a change between positions and heads", "the gradient of such a change"
"""What is cut along one axis before, and along another one behind."""
_SEEDS = 1 << 48
_NEXT_OPERATOR, _NEXT_POSITION, _NEXT_CONTEXT = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
"""Large odd numbers: seeds of neighbouring operators and positions lie far from each other."""


@dataclass(slots=True, kw_only=True)
class TensorRanks:
    """Ranks of a stage that compute the same samples together, as one of them sees them.

    Args:
        position, size: of this rank, and how many there are.
        kind: ``tensor`` ranks, ``context`` ranks, or both (``model``).
        group: theirs; None until the job's groups are made.
        parts: how the stage's parameters are cut, as it holds them; None until it does.
        sent_bytes: of `RESULT` and the like, the bytes of the whole tensors that have been sent so far.
    """

    stage: str
    position: int
    size: int
    kind: str = "tensor"
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
        title = f"{what} over the {self.kind} ranks of stage {self.stage!r}"
        return tensor.clone(memory_format=torch.contiguous_format), {"group": self.group, "what": title}

    def positions(self, length: int, position: int | None = None) -> tuple[int, int]:
        """Return the first of ``length`` positions that a rank has (None: this one), and how many.

        >>> [TensorRanks(stage="", position=0, size=2).positions(5, rank) for rank in range(2)]
        [(0, 2), (2, 3)]
        """
        at = self.position if position is None else position
        first = length * at // self.size
        return first, length * (at + 1) // self.size - first

    def own_positions(self, whole: Tensor, axis: int) -> Tensor:
        """Return this rank's positions of a whole tensor, in memory of their own."""
        return whole.narrow(axis, *self.positions(whole.shape[axis])).clone(
            memory_format=torch.contiguous_format
        )

    def begin_scatter(self, tensor: Tensor, axis: int, what: str) -> tuple[Tensor, Callable[[], None]]:
        """Begin the sum of the ranks' tensors at this rank's positions; return where it will be, and what waits."""
        # [2, 5, 8] on two ranks: each receives all ranks' summands of its positions, rank 1 [2 ranks, 2, 3, 8], and
        # adds them up in the order of the ranks. As many bytes travel as in a reduce-scatter, whatever the lengths.
        pieces = [tensor.narrow(axis, *self.positions(tensor.shape[axis], rank)) for rank in range(self.size)]
        shape = pieces[self.position].shape
        total = tensor.new_empty(shape)
        received, wait = self._begin_exchange(pieces, [shape] * self.size, tensor.nbytes, what)

        def finish_sum() -> None:
            wait()
            torch.sum(received.view(self.size, *shape), 0, out=total)

        return total, finish_sum

    def begin_gather(self, part: Tensor, axis: int, length: int, what: str) -> Callable[[], Tensor]:
        """Begin to make a whole of the ranks' parts of ``length`` positions; return what waits for it."""
        shapes = [
            (*part.shape[:axis], self.positions(length, rank)[1], *part.shape[axis + 1 :])
            for rank in range(self.size)
        ]
        num_bytes = part.element_size() * sum(map(math.prod, shapes))
        received, wait = self._begin_exchange([part] * self.size, shapes, num_bytes, what)

        def whole() -> Tensor:
            wait()
            pieces = received.split([math.prod(shape) for shape in shapes])
            return torch.cat([p.view(shape) for p, shape in zip(pieces, shapes, strict=True)], axis)

        return whole

    def begin_exchange(
        self, part: Tensor, axes: tuple[int, int], length: int, what: str
    ) -> Callable[[], Tensor]:
        """Begin to change the axis along which a tensor is cut; return what waits for it.

        Args:
            axes: the old one, of which this rank has its part of ``length``, and the new one.
        """
        # [2, 5, 4, 8] of 5 positions and 4 heads on two ranks: rank 1 has [2, 3, 4, 8], sends rank 0 heads 0 and 1 of
        # these, receives heads 2 and 3 of the positions 0 and 1, and has [2, 5, 2, 8]
        old, new = axes
        pieces = [part.narrow(new, *self.positions(part.shape[new], rank)) for rank in range(self.size)]
        shapes = []
        for rank in range(self.size):
            shape = list(pieces[self.position].shape)
            shape[old] = self.positions(length, rank)[1]
            shapes.append(shape)
        rest = math.prod(size for axis, size in enumerate(part.shape) if axis != old)
        received, wait = self._begin_exchange(pieces, shapes, part.element_size() * rest * length, what)

        def changed() -> Tensor:
            wait()
            found = received.split([math.prod(shape) for shape in shapes])
            return torch.cat([p.view(shape) for p, shape in zip(found, shapes, strict=True)], old)

        return changed

    def _begin_exchange(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], num_bytes: int, what: str
    ) -> tuple[Tensor, Callable[[], None]]:
        """Begin to send each rank its piece; return where theirs will be, one after the other, and what waits."""
        assert self.group is not None, "the groups of a job are made before it runs"
        self.sent_bytes[what] = self.sent_bytes.get(what, 0) + num_bytes
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [math.prod(shape) for shape in shapes]
        received = sent.new_empty(sum(sizes))
        title = f"{what} over the {self.kind} ranks of stage {self.stage!r}"
        given = [piece.numel() for piece in pieces]
        group = self.group
        work = dist.all_to_all_single(received, sent, sizes, given, group=group, async_op=True)

        def wait() -> None:
            finish(work, received, group=group, what=title)
            assert sent.numel() == sum(given)  # it lives until here

        return received, wait

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
    """The ranks that compute a stage's samples with this one; code is made before there are process groups."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[tuple[str, str, tuple[int, ...]], TensorRanks] = {}

    def of(self, stage: Stage, kind: str = "tensor") -> TensorRanks:
        """Return the ranks with this one's positions (``tensor``), its shards (``context``), or all (``model``)."""
        data_position, place = stage.position(self._rank)
        context, position = divmod(place, stage.tensor)
        ranks = {
            "tensor": stage.tensor_ranks(data_position, context),
            "context": stage.context_ranks(data_position, position),
            "model": stage.model_ranks(data_position),
        }[kind]
        key = stage.name, kind, ranks
        if key not in self._known:
            own = ranks.index(self._rank)
            self._known[key] = TensorRanks(stage=stage.name, position=own, size=len(ranks), kind=kind)
        return self._known[key]

    def join(
        self, stage: Stage, groups: Mapping[str, dist.ProcessGroup | int], parts: Mapping[str, TensorShard]
    ) -> None:
        """Let the code of a stage use these groups, by kind, and parameters as they are held, from now on."""
        for kind, group in groups.items():
            self.of(stage, kind).group = group
        self.of(stage).parts = parts


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
    def forward(
        ctx: Any, tensor: Tensor, cut: _Cut | None, columns: Sequence[int], *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(tensor)
        ctx.set_materialize_grads(False)
        ctx.columns, ctx.cut, ctx.begun = columns, cut, None
        rows = tensor.shape[:-1] if cut is None else cut.rows(tensor)
        shapes = [(*rows, w.shape[axis]) for w, axis in zip(given[::2], columns, strict=True)]
        return tuple(tensor.new_empty_strided(shape, (0,) * len(shape)) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # tensor [2, 8, 16], weight [4, 16] with its columns along axis 0: rows [16, 16], own [16, 4]
        begun, ctx.begun = ctx.begun, None
        rows = _rows(ctx.saved_tensors[0] if ctx.cut is None else (begun or _begin_again(ctx))())
        found: list[Tensor | None] = []
        for number, (gradient, axis) in enumerate(zip(gradients, ctx.columns, strict=True), start=1):
            if gradient is None:
                found += [None, None]
                continue
            own, (of_weight, of_bias) = _rows(gradient), ctx.needs_input_grad[2 * number + 1 :][:2]
            factors = (rows, own) if axis else (own, rows)
            found.append(factors[0].t().mm(factors[1]) if of_weight else None)
            found.append(own.sum(0) if of_bias else None)
        return None, None, None, *found


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _begin_again(ctx: Any) -> Callable[[], Tensor]:
    found: Callable[[], Tensor] = ctx.cut.begin_whole(ctx.saved_tensors[0], GRADIENT_PARTS)
    return found


class _Launched(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, begun: list[Callable[[], None]], ranks: TensorRanks, cut: _Cut | None
    ) -> Tensor:
        ctx.begun, ctx.ranks, ctx.cut = begun, ranks, cut
        return tensor.view_as(tensor) if cut is None else cut.begin_whole(tensor, PARTS)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.cut is None:
            total, wait = ctx.ranks.begin_sum(gradient, GRADIENT)
        else:
            total, wait = ctx.cut.begin_parts(gradient)
        ctx.begun.append(wait)
        return total, None, None, None


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, of_weights: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        # Of a tensor in parts, the whole is on its way again while the linear operator makes its input's gradient; but
        # not in the first part of a split backward, which makes no gradients of weights.
        weights = ctx.next_functions[1][0]
        if weights.cut is not None and weights.begun is None:
            if torch._C._will_engine_execute_node(weights):
                weights.begun = _begin_again(weights)
        return gradient, gradient


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks.sum(tensor, RESULT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How what a region reads is cut along positions, ``length`` in all.

    Args:
        is_flat: it reads rows, [10, 8] of [2, 5, 8].
    """

    ranks: TensorRanks
    axis: int
    length: int
    is_flat: bool

    def rows(self, part: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole, without the features."""
        whole = (*part.shape[: self.axis], self.length, *part.shape[self.axis + 1 : -1])
        return (math.prod(whole),) if self.is_flat else whole

    def begin_whole(self, part: Tensor, what: str) -> Callable[[], Tensor]:
        """Begin to make the whole; return what waits for it."""
        wait = self.ranks.begin_gather(part, self.axis, self.length, what)
        return lambda: wait().flatten(0, -2) if self.is_flat else wait()

    def begin_parts(self, gradient: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Begin the sum of a whole's gradients at this rank's positions; return where it will be, and what waits."""
        whole = gradient.unflatten(0, (-1, self.length)) if self.is_flat else gradient
        return self.ranks.begin_scatter(whole, self.axis, GRADIENT_PARTS)


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks, axis: int) -> Tensor:
        ctx.ranks, ctx.axis, ctx.length = ranks, axis, tensor.shape[axis]
        total, wait = ranks.begin_scatter(tensor, axis, PARTS)
        wait()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.begin_gather(gradient, ctx.axis, ctx.length, GRADIENT_PARTS)(), None, None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorRanks, axis: int) -> Tensor:
        ctx.ranks, ctx.axis, ctx.length = ranks, axis, whole.shape[axis]
        return ranks.own_positions(whole, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.begin_gather(gradient, ctx.axis, ctx.length, GRADIENT_PARTS)(), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks, axis: int, length: int) -> Tensor:
        ctx.ranks, ctx.axis = ranks, axis
        return ranks.begin_gather(part, axis, length, PARTS)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.ranks.own_positions(gradient, ctx.axis), None, None, None


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
    """An operator of generated code on tensor or context ranks: the target of a graph's node.

    Args:
        title: how generated code calls it.
        around: makes the same around another operator, of one that is made around one.
    """

    def __init__(
        self,
        title: str,
        call: Callable[..., Any],
        *,
        is_random: bool = False,
        around: Callable[[Callable[..., Any]], TensorOperator] | None = None,
    ) -> None:
        self.__name__ = title
        self._call = call
        self.around = around
        self.tags = (torch.Tag.nondeterministic_seeded,) if is_random else ()

    def __str__(self) -> str:
        return self.__name__

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorOperator:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self._call(*args, **kwargs)


def shared(
    ranks: TensorRanks, columns: Sequence[int] = (), *, axis: int = 0, is_flat: bool = False
) -> TensorOperator:
    """Return what hands a whole tensor to a region, and to each `linear` operator there what it takes first.

    It takes the tensor; its number of positions, if it is in parts of these and the region reads the whole; then weight
    and bias (or None) of each of those operators.

    Args:
        columns: the axis along which each weight makes features.
        axis: of positions.
        is_flat: the region reads one row a position, of all samples.
    """

    def share(tensor: Tensor, length: int | None, *given: Tensor) -> tuple[Tensor | None, ...]:
        cut = None if length is None else _Cut(ranks=ranks, axis=axis, length=length, is_flat=is_flat)
        if not torch.is_grad_enabled():
            whole = tensor if cut is None else cut.begin_whole(tensor, PARTS)()
            return whole, *(None for _ in columns)
        begun: list[Callable[[], None]] = []
        waited = _Waited.apply(tensor, begun)  # type: ignore[no-untyped-call]
        of_weights = _Weights.apply(tensor.detach(), cut, columns, *given) if columns else ()  # type: ignore[no-untyped-call]
        return _Launched.apply(waited, begun, ranks, cut), *of_weights  # type: ignore[no-untyped-call]

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


def scattered(ranks: TensorRanks, axis: int) -> TensorOperator:
    """Return what makes of the ranks' summands the sum at each rank's positions."""
    return TensorOperator("tensor_scattered", lambda tensor: _Scattered.apply(tensor, ranks, axis))  # type: ignore[no-untyped-call]


def own_positions(ranks: TensorRanks, axis: int) -> TensorOperator:
    """Return what takes each rank's positions of a whole tensor, which all of them have."""
    return TensorOperator("tensor_own", lambda whole: _Own.apply(whole, ranks, axis))  # type: ignore[no-untyped-call]


def gathered(ranks: TensorRanks, axis: int) -> TensorOperator:
    """Return what makes a whole of parts and the number of positions, for operators that all ranks run alike."""
    return TensorOperator(
        "tensor_gathered",
        lambda part, length: _Gathered.apply(part, ranks, axis, length),  # type: ignore[no-untyped-call]
    )


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
    call: Callable[..., Any],
    ranks: TensorRanks,
    device: torch.device,
    *,
    place: int,
    is_part: bool,
    context: TensorRanks | None = None,
) -> TensorOperator:
    """Return an operator that draws by the number of its forward, which is its first argument.

    Args:
        place: of the operator in the code.
        is_part: its result is a part: each rank drops other elements.
        context: the context ranks, if its result is a part of theirs.
    """
    # Dropout of hidden states: the same seed on all ranks. Of attention's heads: one for each position, so that heads 0
    # and 2, of ranks 0 and 1, do not drop the same. The next operator of the forward draws differently from both.
    distance = place * _NEXT_OPERATOR + (ranks.position + 1) * _NEXT_POSITION * is_part
    distance += 0 if context is None else (context.position + 1) * _NEXT_CONTEXT

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
