"""The gradients of one stage between backward and step: adding up micro-batches, summing over ranks.

Sums over a stage's ranks are made bucket by bucket, where the gradients lie (`GradientBuffer`). Which parameters a loss
has reached on any rank is summed with them: a flag of each, at the front of the buffer. The host needs no flag of what
its own losses reached; of the rest it reads them when it reads the norm of the step, and not before.

    flat     | flags | embed | layer.weight | layer.bias | out |
    buckets  '------ 2 ------'-------- 1 --------'----- 0 -----'

*Early* reductions: while the last backward of a mini-batch runs, a bucket is sent as soon as all its gradients are
final, and `reduce_data` waits only. Buckets go in the same order on every rank, from the back, as backwards end with
the parameters that forwards began with. So what each rank sends to its group is the same whatever the timing, and so
are the bits. Where ranks may do so is decided in `schedule.gathers`.

Source: buckets and early reductions, PyTorch Distributed (Li et al., VLDB 2020; arXiv 2006.15704), section 3.2
Tests: tests/integrations/test_gradients.py, tests/integrations/test_stage_engine.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.runtime.ranks.collectives import all_reduce, finish
from gpp_plugin.schedule.gathers import EARLY_BUCKET_ELEMENTS

# Gradients of one type in one buffer that lasts as long as the job: autograd adds to its views.
#
#     flat    | flags | pad | embed | layer.weight | layer.bias | ... |        views of it are ``parameter.grad``
#
# Where gradients are added up in the parameters' own type, autograd writes into the views itself. In another type (bf16
# parameters, fp32 sums) it makes ``parameter.grad`` anew, and `GradientBuffer.accumulate` adds all of them in one call.
# So the sums of a stage's ranks are made where gradients lie, and a mini-batch begins with one operation a buffer.
#
# Optimizers distinguish a gradient of zeros from none, so each parameter records whether a loss has reached it. The
# host needs no value of the device: each view has a version counter of its own (as ``Tensor.data`` has; views that
# autograd tracks would share the buffer's), which autograd raises when it adds to the view.


SUMMED = "the sum of the gradients of a stage's ranks"
"""What ranks wait for in it, in errors."""


@dataclass(slots=True, eq=False)
class HeldGradient:
    """The gradient of one parameter in a buffer.

    Args:
        view: the gradient, in the parameter's shape and strides.
        version: of ``view`` when the mini-batch began.
        is_reached: a loss of this mini-batch reached the parameter, on this rank or, as far as is known, another.
    """

    parameter: nn.Parameter
    view: Tensor
    version: int
    is_reached: bool = False


class GradientBuffer:
    """The gradients of some parameters, one after the other.

    Args:
        places: by name, the parameter and the first element of its gradient in the buffer.
        num_elements: of the buffer.
        dtype: in which gradients are added up.
    """

    def __init__(
        self,
        places: Mapping[str, tuple[nn.Parameter, int]],
        *,
        num_elements: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.flat = torch.zeros(num_elements, dtype=dtype, device=device)
        self.held: dict[str, HeldGradient] = {}
        for name, (parameter, first) in places.items():
            view = _view_like(parameter, self.flat, first)
            self.held[name] = HeldGradient(parameter, view, view._version)
        everything = self.held.values()
        self._own = [held for held in everything if held.parameter.dtype == dtype]
        self._other = [held for held in everything if held.parameter.dtype != dtype]
        self.clear()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all gradients held now: the sums, and what autograd left beside them."""
        beside = [held.parameter.grad for held in self.held.values()]
        return sum(held.view.nbytes for held in self.held.values()) + sum(
            gradient.nbytes
            for gradient, held in zip(beside, self.held.values(), strict=True)
            if gradient is not None and gradient is not held.view
        )

    def is_empty(self) -> bool:
        """Return whether no loss has reached any parameter."""
        return not any(map(_has_gradient, self.held.values()))

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add what autograd left beside the sums, where these are in another type; one call for all parameters."""
        self.add(self._other)

    @torch.no_grad()
    def add(self, some: Sequence[HeldGradient]) -> None:
        """Add to the sums of ``some`` what autograd left beside them."""
        sums, found = [], []
        for held in some:
            gradient = held.parameter.grad
            if gradient is not None and gradient is not held.view:
                sums.append(held.view)
                found.append(gradient)
                held.parameter.grad = None
                held.is_reached = True
        if sums:
            torch._foreach_add_(sums, found)

    @torch.no_grad()
    def take_up(self) -> None:
        """Learn which parameters the losses on this rank have reached; take what somebody put in place of a view."""
        # A parameter's `grad` is the truth: a user, or an optimizer's zero_grad(), may have put another tensor there,
        # or none, and autograd continues from that.
        self.accumulate()
        for held in self._own:
            gradient = held.parameter.grad
            if gradient is held.view:
                held.is_reached |= held.view._version != held.version
                continue
            held.is_reached = gradient is not None
            if gradient is None:
                held.view.zero_()
            else:
                held.view.copy_(gradient)
            held.parameter.grad = held.view

    @torch.no_grad()
    def clear(self) -> None:
        """Begin a mini-batch: all sums are zero, and no parameter is reached."""
        self.flat.zero_()
        for held in self._own:
            if held.parameter.grad is not held.view:
                held.parameter.grad = held.view
            held.version = held.view._version
            held.is_reached = False
        for held in self._other:
            held.parameter.grad = None
            held.is_reached = False


def _has_gradient(held: HeldGradient) -> bool:
    is_written = held.parameter.grad is not None and held.view._version != held.version
    return held.is_reached or is_written or _is_beside(held)


def _view_like(parameter: nn.Parameter, flat: Tensor, first: int) -> Tensor:
    """Return the elements from ``first`` on in the parameter's shape, and in its strides if these leave no gaps."""
    strides = torch.empty_like(parameter, device="meta").stride()
    # `data`: a version counter of its own
    return flat.as_strided(parameter.shape, strides, first).data


@dataclass(frozen=True, slots=True, kw_only=True)
class Summand:
    """Gradients that go into a sum over ranks together.

    Args:
        brought: what this rank adds; a tensor of its own, that the sum may be made in.
        take: takes in the sum.
    """

    brought: Tensor
    take: Callable[[Tensor], None]


@torch.no_grad()
def sum_over(group: dist.ProcessGroup | int, brought: Sequence[Iterable[Summand]]) -> None:
    """Sum what stages of this rank bring over the ranks of ``group``; collective over them.

    Args:
        brought: by stage, summands of the same gradients in the same order. A group has a rank once, however many of
            the stages it holds: they are added up here before they are sent, and each takes in the sum.
    """
    for summands in zip(*brought, strict=True):
        total = summands[0].brought
        for other in summands[1:]:
            total.add_(other.brought)
        all_reduce(total, group=group, what="the sum of tied gradients")
        for summand in summands:
            summand.take(total)


_FLAGS_ALIGNMENT = 64
"""Gradients begin at a multiple of this many elements, whatever the number of flags in front of them."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients that are sent together: elements ``start`` to ``stop`` of a buffer.

    Args:
        members: the gradients in it.
        waiting: those that the backward which runs has not made yet.
        versions: of the members' views, when they were sent.
        sent: what is under way: ``message`` itself, which is the buffer's part unless another type travels.
    """

    buffer: GradientBuffer
    start: int
    stop: int
    members: list[HeldGradient]
    waiting: set[int]
    versions: list[int]
    message: Tensor | None = None
    sent: Any = None

    @property
    def part(self) -> Tensor:
        """Return its elements."""
        return self.buffer.flat.narrow(0, self.start, self.stop - self.start)


class GradientStore:
    """Whole gradients of a stage's trained parameters, by name, scaled by the loss scale.

    Args:
        parameters: trained parameters by name, in the same order on every rank of the stage.
        dtype: type in which micro-batches are added up; None: each parameter's own.
        bucket_elements: most elements sent at once (a larger parameter travels alone).
        group: the stage's ranks; this one is number ``position`` of ``degree``.
        communication_dtype: type of the transfers between the stage's ranks; None: the gradients' own.
        reduces_early: ranks may send in the mini-batch's last backward.
        device: where they lie.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        dtype: torch.dtype | None,
        bucket_elements: int,
        group: dist.ProcessGroup | int | None = None,
        position: int = 0,
        degree: int = 1,
        communication_dtype: torch.dtype | None = None,
        reduces_early: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.parameters = dict(parameters)
        self.resting: frozenset[str] = frozenset()
        """Those that no unit of this mini-batch reads, on any rank: they must not move, momentum or decay or not."""
        self._bucket_elements = bucket_elements
        self._group = group
        self._position = position
        self._degree = degree
        self._communication_dtype = communication_dtype
        self._device = torch.device(device)
        self._buffers = _make_buffers(self.parameters, dtype, self._device)
        self._held = {name: held for buffer in self._buffers for name, held in buffer.held.items()}
        self._flags = {
            name: buffer.flat.narrow(0, number, 1)
            for buffer in self._buffers
            for number, name in enumerate(buffer.held)
        }
        # Flags of this mini-batch are written once; ``_shared`` are the names whose flags were summed over other ranks.
        self._has_flags = False
        self._shared: set[str] = set()
        most = min(bucket_elements, EARLY_BUCKET_ELEMENTS) if reduces_early else bucket_elements
        self._buckets = [b for buffer in self._buffers for b in _cut(buffer, most)] if degree > 1 else []
        self._early = EarlySends(self._buckets, self._send) if reduces_early and self._buckets else None

    # ---- one mini-batch ------------------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Take up what a micro-batch's backward left in ``parameter.grad``, where sums are of another type."""
        if self._early is not None:
            self._early.check()
        for buffer in self._buffers:
            buffer.accumulate()
        if self._early is not None:
            self._early.end()

    def begin_reduction(self) -> None:
        """Sum gradients over the stage's ranks as they become final: what follows is the mini-batch's last backward."""
        if self._early is not None:
            self._take_up()
            self._early.begin()

    def rest(self, names: Iterable[str]) -> None:
        """Let parameters stay as they are in this step, whatever gradient they have."""
        self._take_up()
        self.resting |= frozenset(names)
        for name in self.resting:
            self._held[name].view.zero_()

    def get(self, name: str) -> Tensor | None:
        """Return the gradient of ``name``; None where it rests or no loss reached it, as far as is known."""
        held = self._held[name]
        return held.view if held.is_reached and name not in self.resting else None

    def whole(self, name: str) -> Tensor | None:
        """Return where the sum of a gradient lies, in the parameter's shape; None where no loss reached it."""
        self._take_up()
        held = self._held[name]
        return held.view if held.is_reached or name in self._shared else None

    def is_empty(self) -> bool:
        """Return whether no loss on this rank reached any parameter, as in a stage without backwards."""
        return all(buffer.is_empty() for buffer in self._buffers)

    def for_optimizer(self) -> dict[str, Tensor | None]:
        """Return what an optimizer steps with: every gradient by name (`get`)."""
        return {name: self.get(name) for name in self.parameters}

    def held_bytes(self) -> int:
        """Return the bytes of all gradients held now."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    def parts(self) -> list[Tensor]:
        """Return the buffers."""
        self._take_up()
        return [buffer.flat for buffer in self._buffers]

    def clear(self) -> None:
        """Forget all gradients."""
        self.resting = frozenset()
        if self._early is not None:
            self._early.stop()
        for bucket in self._buckets:
            bucket.message = bucket.sent = None
        for buffer in self._buffers:
            buffer.clear()
        self._has_flags = False
        self._shared.clear()

    # ---- sums over ranks -----------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_data(self) -> None:
        """Sum all gradients over the stage's ranks; collective over those, once a mini-batch."""
        self._take_up()
        for bucket in self._buckets:
            if bucket.sent is None:
                self._send(bucket)
        for bucket in self._buckets:
            assert bucket.message is not None, "it was sent"
            finish(bucket.sent, bucket.message, group=self._group, what=SUMMED)
            if bucket.message.dtype != bucket.buffer.flat.dtype:
                bucket.part.copy_(bucket.message)
            bucket.message = bucket.sent = None
        if self._buckets:
            self._shared.update(self.parameters)

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        """Begin to sum a bucket over the stage's ranks; all ranks send the same buckets in the same order."""
        if bucket.start == 0:  # the flags are at the front, which is sent last
            self._write_flags(bucket.buffer)
        bucket.message = bucket.part.to(self._communication_dtype or bucket.part.dtype)
        bucket.sent = dist.all_reduce(bucket.message, group=self._group, async_op=True)

    def tied_summands(self, names: Sequence[str]) -> Iterator[Summand]:
        """Yield what this rank brings of ``names`` to sums over the ranks of several stages.

        Every rank of a stage holds the stage's sum by then, so one rank of each stage brings it, whatever the
        degrees: no sum is divided again.
        """
        return self._summands(names, contribute=self._position == 0)

    def sum_tensor(self, names: Sequence[str], *, group: dist.ProcessGroup | int) -> None:
        """Sum the gradients of ``names`` over the tensor ranks of a data position; collective over them."""
        sum_over(group, [self._summands(names, contribute=True)])

    def _summands(self, names: Sequence[str], *, contribute: bool) -> Iterator[Summand]:
        """Yield the gradients of some parameters, and their flags, in the order of ``names``.

        Args:
            contribute: False brings zeros (of a replica whose sum another rank brings).
        """
        # They lie anywhere in the buffers, so they travel in a tensor made for it: | gradients | their flags |.
        self._take_up()
        if not self._has_flags:
            for buffer in self._buffers:
                self._write_flags(buffer)
        for bucket in self._groups_of(names):
            own = [self._held[name].view for name in bucket] + [self._flags[name] for name in bucket]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in own])
            if not contribute:
                flat.zero_()
            yield Summand(brought=flat, take=functools.partial(self._take_sum, bucket, own))
        self._shared.update(names)

    @torch.no_grad()
    def _take_sum(self, names: Sequence[str], own: list[Tensor], total: Tensor) -> None:
        """Take in the sum of some gradients and their flags."""
        pieces = total.split([tensor.numel() for tensor in own])
        torch._foreach_copy_(own, [p.view(t.shape) for p, t in zip(pieces, own, strict=True)])
        for held in (self._held[name] for name in names):
            if not held.is_reached:  # what was written is no gradient of a loss on this rank
                held.version = held.view._version

    def _groups_of(self, names: Sequence[str]) -> Iterator[list[str]]:
        # Neighbours of one type up to the limit: sizes 3, 4 and 9 with 8 a bucket go as [3, 4] and [9]. The order is
        # that of `names`, the same on every rank, or ranks would sum different parameters.
        bucket: list[str] = []
        elements = 0
        for name in names:
            view = self._held[name].view
            other_type = bucket and view.dtype != self._held[bucket[0]].view.dtype
            if bucket and (other_type or elements + view.numel() > self._bucket_elements):
                yield bucket
                bucket, elements = [], 0
            bucket.append(name)
            elements += view.numel()
        if bucket:
            yield bucket

    # ---- which parameters were reached ---------------------------------------------------------------------

    def _take_up(self) -> None:
        for buffer in self._buffers:
            buffer.take_up()

    def _write_flags(self, buffer: GradientBuffer) -> None:
        """Write, before they are summed, which parameters this rank's losses have reached."""
        reached = [held.is_reached or held.view._version != held.version for held in buffer.held.values()]
        flags = buffer.flat.narrow(0, 0, len(reached))
        self._has_flags = True
        if all(reached):
            flags.fill_(1.0)
            return
        # To a GPU from pinned memory, or the host would wait for the copy.
        values = torch.tensor(reached, dtype=flags.dtype)
        flags.copy_(values.pin_memory() if flags.is_cuda else values, non_blocking=True)

    def unknown(self) -> Tensor | None:
        """Return the flags, on the device, of parameters that perhaps another rank's losses reached; None: of none."""
        names = self._unknown_names()
        return torch.cat([self._flags[name] for name in names]) if names else None

    def learn(self, flags: Sequence[float]) -> None:
        """Take the values of what `unknown` returned."""
        for name, flag in zip(self._unknown_names(), flags, strict=True):
            self._held[name].is_reached = flag > 0

    def _unknown_names(self) -> list[str]:
        return [name for name, held in self._held.items() if not held.is_reached and name in self._shared]

    # ---- what the step reads -------------------------------------------------------------------------------

    @torch.no_grad()
    def squared_norm(self, *, without: Iterable[str], precision: torch.dtype) -> Tensor:
        """Return this rank's share of the squared L2 norm; the stage's ranks hold the same and share it out."""
        self._take_up()
        left_out = set(without)
        # Every d-th parameter from this rank's position on: of five parameters on two ranks 0 2 4 and 1 3. One that
        # no loss reached is zero, on all ranks.
        mine = [name for name in self.parameters if name not in left_out][self._position :: self._degree]
        views = [self._held[name].view for name in mine]
        if not views:
            return torch.zeros((), dtype=precision, device=self._device)
        return torch.stack(torch._foreach_norm(views, 2, dtype=precision)).square().sum()

    def norms(self, names: Sequence[str]) -> Tensor:
        """Return the L2 norm of each gradient of ``names``, in double precision on the host; 0 where there is none."""
        norms = [self._held[name].view.float().norm() for name in names]
        return torch.stack(norms).double().cpu() if norms else torch.zeros(0, dtype=torch.float64)

    def gather(self) -> dict[str, Tensor]:
        """Return copies of the gradients by name, fp32, without those that no loss reached."""
        self._take_up()
        unknown = self.unknown()
        if unknown is not None:
            self.learn(unknown.tolist())
        held = {name: self.get(name) for name in self.parameters}
        return {name: g.float().clone() for name, g in held.items() if g is not None}


class EarlySends:
    """Sends buckets in the last backward of a mini-batch, in their order, each when it is final.

    All of them are on their way when the backward has ended, on every rank: no rank may stand between its last backward
    and `reduce_data` with a bucket unsent that another rank, early, waits for (`schedule.gathers`).

    Args:
        buckets: in the order in which all ranks send them.
        send: sends one.
    """

    def __init__(self, buckets: Sequence[_Bucket], send: Callable[[_Bucket], None]) -> None:
        self._buckets = list(buckets)
        self._send = send
        self._hooks: list[Any] = []
        self._next = 0
        self._is_last = False
        # A user's module may reach a parameter twice in one backward (reentrant checkpoints). So the first one is
        # watched only; where that happens this rank sends when the backward has ended, which is as good to the others.
        # A single bucket is final no earlier.
        self._is_watching = True
        self._is_allowed = len(self._buckets) > 1

    def begin(self) -> None:
        """Get ready for the last backward."""
        self._is_last = True
        self._next = 0
        if not self._is_allowed:
            return
        for bucket in self._buckets:
            bucket.waiting = set(map(id, bucket.members))
            for held in bucket.members:
                made = functools.partial(self._made, bucket, held)
                self._hooks.append(held.parameter.register_post_accumulate_grad_hook(made))

    def _made(self, bucket: _Bucket, held: HeldGradient, _: Tensor) -> None:
        """Take note that the backward has made a gradient; called by autograd."""
        if self._is_watching:
            self._is_allowed &= id(held) in bucket.waiting
        bucket.waiting.discard(id(held))
        if self._is_watching:
            return
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            ready = self._buckets[self._next]
            ready.buffer.add(ready.members)
            self._send(ready)
            ready.versions = [held.view._version for held in ready.members]
            self._next += 1

    def check(self) -> None:
        """Look, after a backward, whether what was sent is what it made.

        Raises:
            RuntimeFailure: a gradient changed after it was sent.
        """
        if not self._hooks:
            return
        self._remove_hooks()
        self._is_watching = False
        for bucket in self._buckets[: self._next]:
            for held, version in zip(bucket.members, bucket.versions, strict=True):
                if _is_beside(held) or held.view._version != version:
                    raise RuntimeFailure(
                        "a backward reached a parameter again after its gradient was sent to the stage's other ranks: "
                        "the module runs a backward inside its backward (torch.utils.checkpoint with "
                        "use_reentrant=True); use use_reentrant=False"
                    )

    def end(self) -> None:
        """Send what the last backward has not."""
        if self._is_last:
            for bucket in self._buckets[self._next :]:
                self._send(bucket)
        self._is_last = False

    def stop(self) -> None:
        """Send nothing more: the mini-batch has ended, or failed."""
        self._remove_hooks()
        self._is_last = False

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _is_beside(held: HeldGradient) -> bool:
    gradient = held.parameter.grad
    return gradient is not None and gradient is not held.view


def _make_buffers(
    parameters: Mapping[str, nn.Parameter], dtype: torch.dtype | None, device: torch.device
) -> list[GradientBuffer]:
    """Return a buffer for each type of sums, with the parameters in order behind their flags."""
    names_of: dict[torch.dtype, list[str]] = {}
    for name, parameter in parameters.items():
        names_of.setdefault(dtype or parameter.dtype, []).append(name)
    buffers = []
    for kind, names in names_of.items():
        first = -(-len(names) // _FLAGS_ALIGNMENT) * _FLAGS_ALIGNMENT
        places = {}
        for name in names:
            places[name] = parameters[name], first
            first += parameters[name].numel()
        buffers.append(GradientBuffer(places, num_elements=first, dtype=kind, device=device))
    return buffers


def _cut(buffer: GradientBuffer, most: int) -> list[_Bucket]:
    """Cut a buffer into buckets of at most ``most`` elements of gradients, from the back; flags are in the last one."""
    # Sizes 3, 4, 9 and 2 with 8 a bucket: [2], [9], [flags, 3, 4].
    buckets: list[_Bucket] = []
    members: list[HeldGradient] = []
    stop = buffer.flat.numel()
    start = stop
    for held in reversed(buffer.held.values()):
        size = held.view.numel()
        if members and stop - start + size > most:
            buckets.append(_Bucket(buffer, start, stop, members, set(), []))
            members, stop = [], start
        members.append(held)
        start -= size
    buckets.append(_Bucket(buffer, 0, stop, members, set(), []))
    return buckets
