"""What DeepSpeed's optimizer wrappers step: where each parameter's master weight lies, and how it is published.

DeepSpeed 0.19 wraps the user's optimizer in one of three classes (or none), which differ in how they find
overflow, norm and clipping, but not in what remains: an inner torch optimizer that steps *master* tensors, and
a copy from masters to parameters. Norm, overflow and clipping are the whole graph's, so a stage hands finished
fp32 gradients to the masters, steps the inner optimizer, and has the wrapper publish the result.

    none                    master = the parameter               nothing to publish; no optimizer at all where a
                                                                 stage trains nothing
    FP16_UnfusedOptimizer   one fp32 tensor per parameter        copy
    FP16_Optimizer          one flat fp32 tensor per group       copy
    DeepSpeedZeroOptimizer  this rank's part of the flat group   update_lp_params(): copy, all-gather
                            (ZeRO 3)                             copy to the rank's part; programs gather

What a user writes into parameters between two steps (a clamp, an exponential average, a normalised weight) is taken
over by the masters before the next step (`adopt_written`): where a parameter is no longer its rounded master, the
master becomes the parameter's value, and elsewhere it keeps its precision. Whether anything was written is found out
by comparing parameters of up to `COMPARED_WHOLE` elements whole and about `SAMPLED` elements of larger ones, spread
evenly (`written`): a write past PyTorch's version counters (``parameter.data``) that changes less than one in
500 elements of a large parameter may be missed. Writes under ``torch.no_grad()`` are counted by PyTorch, so that
the engine sees them whatever they change.

Source: this project
Tests: tests/runtime/test_weight_versions.py, tests/integrations/test_async.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from gpp_plugin.engine.checkpoints.optimizer_pieces import (
    Fragment,
    OptimizerPieces,
    optimizer_pieces,
    restore_optimizer,
    whole_fragment,
)
from gpp_plugin.engine.checkpoints.saved_tensors import StageOptimizerState
from gpp_plugin.engine.partitioned_gradients import FlatGroup, ParameterSpan
from gpp_plugin.engine.sharded_weights import FlatWeights
from gpp_plugin.errors import ConfigError
from gpp_plugin.runtime.ranks.collectives import all_reduce
from gpp_plugin.runtime.weight_versions import ParameterPlaces, WeightPlace, WeightPlaces


def require_attributes(thing: object, *names: str) -> None:
    """Check that DeepSpeed still has what this package relies on.

    Raises:
        ConfigError: an attribute is missing; the message names the DeepSpeed version.
    """
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise ConfigError(
            f"{type(thing).__name__} of DeepSpeed {deepspeed.__version__} has no {', '.join(missing)}; "
            "this release of gpp_plugin works with DeepSpeed 0.19"
        )


COMPARED_WHOLE, SAMPLED = 4096, 1024
"""Elements up to which a parameter is compared whole, and about how many of a larger one are."""


class MasterWeights:
    """Steps the masters of one stage's parameters with finished gradients.

    Args:
        wrapper: the optimizer of the stage's DeepSpeedEngine, wrapped or not; None where it trains nothing.
        parameters: the stage's trained parameters by name.
        data_group: the stage's process group, over which ZeRO partitions masters.

    Raises:
        ConfigError: the wrapper is of a class, or of a DeepSpeed, that is not known here.
    """

    def __init__(
        self, wrapper: Any, parameters: Mapping[str, nn.Parameter], *, data_group: dist.ProcessGroup | None
    ) -> None:
        self._parameters = dict(parameters)
        self._wrapper = wrapper
        self._data_group = data_group
        self.partitioned = isinstance(wrapper, DeepSpeedZeroOptimizer)
        self.layout: tuple[FlatGroup, ...] = ()
        self._publish: Callable[[], None] = self._copy_masters
        self._parts: tuple[Tensor, ...] = ()
        # The four cases of the table above, the same question for each: which tensor does the inner optimizer step for
        # which part of which parameter? Example, ZeRO on two ranks, parameters a (6 elements) and b (4): rank 0 steps
        # all of a but its last element, rank 1 that element and b: one fragment on rank 0, two on rank 1.
        self.optimizer: Any = getattr(wrapper, "optimizer", None)
        if wrapper is None or isinstance(wrapper, torch.optim.Optimizer):
            self.optimizer = wrapper
            self.fragments = {n: whole_fragment(p) for n, p in parameters.items()}
            self._publish = lambda: None  # parameters are their own masters
        elif isinstance(wrapper, FP16_UnfusedOptimizer):
            require_attributes(wrapper, "optimizer", "fp16_groups", "fp32_groups", "refresh_fp32_params")
            self.fragments = _unfused_fragments(wrapper, parameters)
        elif isinstance(wrapper, FP16_Optimizer):
            require_attributes(wrapper, "optimizer", "fp16_groups", "fp32_groups_flat", "refresh_fp32_params")
            self.fragments = _fused_fragments(wrapper, parameters)
        elif self.partitioned:
            require_attributes(wrapper, "optimizer", "single_partition_of_fp32_groups")
            require_attributes(wrapper, "update_lp_params", "refresh_fp32_params")
            self.layout = read_layout(wrapper, parameters)
            self.fragments = _zero_fragments(wrapper, self.layout, dist.get_rank(data_group))
            self._publish = wrapper.update_lp_params
        else:
            raise ConfigError(
                f"optimizer wrapper {type(wrapper).__name__} of DeepSpeed {deepspeed.__version__} is not known; "
                "this release of gpp_plugin works with DeepSpeed 0.19"
            )
        self._samples: dict[int, Tensor] = {}
        masters = [fragment.master for fragment in self.fragments.values()]
        if self.partitioned:  # a partition may hold padding only
            masters = wrapper.single_partition_of_fp32_groups
        self._masters = list({id(master): master for master in masters}.values())
        if isinstance(wrapper, (FP16_Optimizer, FP16_UnfusedOptimizer)):
            self._forget_first_step()

    def flat_weights(self) -> tuple[FlatWeights, ...]:
        """Return the buffers that the parameters lie in, in the order of `layout`; none where they have their own."""
        if not self.partitioned:
            return ()
        require_attributes(self._wrapper, "bit16_groups_flat")
        return tuple(
            FlatWeights(
                whole=flat, places=tuple((self._parameters[span.name], span.first) for span in group.spans)
            )
            for flat, group in zip(self._wrapper.bit16_groups_flat, self.layout, strict=True)
        )

    def publish_to(self, parts: Sequence[Tensor]) -> None:
        """Publish this rank's masters to its parts of `flat_weights` from now on, which others gather."""
        self._parts = tuple(parts)

        def publish() -> None:
            for part, master in self._published():
                part.copy_(master)

        if self.optimizer is not None:
            self._publish = publish

    @property
    def is_plain(self) -> bool:
        """Return whether the parameters are their own masters."""
        return self._wrapper is self.optimizer

    def places(self, parameters: Sequence[nn.Parameter]) -> WeightPlaces:
        """Return where ``parameters``, those trained, may lie and still be published to."""
        if self.partitioned:
            return ZeroPlaces(self._wrapper, self.layout, self._parameters, parameters)
        return ParameterPlaces(parameters)

    @torch.no_grad()
    def step(
        self,
        gradients: Mapping[str, Tensor | None],
        *,
        coefficient: float,
        resting: Collection[str] = (),
    ) -> None:
        """Step every master with ``coefficient`` times its gradient and publish to the parameters.

        A parameter without a gradient is left alone where it has a master of its own, and has a gradient of
        zero where its master is flat, as in DeepSpeed. Gradients in the masters' type are scaled in place.

        Args:
            resting: parameters without gradients that are to stay as they are, whatever their masters.
        """
        # A flat master is stepped as one tensor, so that it needs a whole gradient: zeros where no loss reached.
        for master in {id(f.master): f.master for f in self.fragments.values() if f.flat}.values():
            master.grad = torch.zeros_like(master)
        places, parts = [], []
        for name, fragment in self.fragments.items():
            gradient = gradients.get(name)
            if not fragment.flat:
                fragment.master.grad = None if gradient is None else gradient.to(fragment.master.dtype)
            elif gradient is not None:
                parts.append(gradient.reshape(-1).narrow(0, fragment.start, fragment.num_elements))
                assert fragment.master.grad is not None
                places.append(fragment.master.grad.narrow(0, fragment.master_start, fragment.num_elements))
        if places:
            torch._foreach_copy_(places, parts)
        self._step_masters(coefficient, resting)

    @torch.no_grad()
    def step_partitions(
        self, partitions: Sequence[Tensor], *, coefficient: float, resting: Collection[str] = ()
    ) -> None:
        """Step the masters of this rank's partitions (ZeRO) with ``coefficient`` times their gradients.

        Args:
            partitions: one for each group of `layout`; those in the masters' type are scaled in place.
            resting: as of `step`.
        """
        for master, part in zip(self._wrapper.single_partition_of_fp32_groups, partitions, strict=True):
            master.grad = part.to(device=master.device, dtype=master.dtype)
        self._step_masters(coefficient, resting)

    def _step_masters(self, coefficient: float, resting: Collection[str]) -> None:
        if self.optimizer is None:
            return
        # One pass over all gradients takes out the loss scale and clips; DeepSpeed's own step would take two.
        held = [master.grad for master in self._masters if master.grad is not None]
        if coefficient != 1.0 and held:
            torch._foreach_mul_(held, coefficient)
        backups = self._backups_of(resting) if resting else []
        self.optimizer.step()
        for place, before in backups:
            place.copy_(before)
        if not self.is_plain:  # else the parameters themselves, whose gradients are not ours to release
            for master in self._masters:
                master.grad = None
        self._publish()
        self._link_state()

    def _backups_of(self, resting: Collection[str]) -> list[tuple[Tensor, Tensor]]:
        """Return what is to be as before the step of flat masters: places, and copies of what is there.

        A master of which nothing else moves takes no step at all.
        """
        # Of a flat master | a | b | c | with b resting: elements of b in the master and in each state tensor of its
        # size (momenta). The count of steps is the master's, so that b's bias correction is that of its neighbours.
        by_master: dict[int, list[tuple[str, Fragment]]] = {}
        for name, fragment in self.fragments.items():
            if fragment.flat:
                by_master.setdefault(id(fragment.master), []).append((name, fragment))
        backups = []
        for fragments in by_master.values():
            master = fragments[0][1].master
            if all(name in resting for name, _ in fragments):
                master.grad = None
                continue
            state = self.optimizer.state.get(master, {})
            same_size = [t for t in state.values() if isinstance(t, Tensor) and t.numel() == master.numel()]
            for name, fragment in fragments:
                for tensor in (master, *same_size) if name in resting else ():
                    place = tensor.view(-1).narrow(0, fragment.master_start, fragment.num_elements)
                    backups.append((place, place.clone()))
        return backups

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the masters anew from the parameters, which were written from outside."""
        if self._parts:
            for part, master in self._published():
                master.copy_(part)
        elif not self.is_plain:
            self._wrapper.refresh_fp32_params()

    # ---- what users write between steps --------------------------------------------------------------------

    @torch.no_grad()
    def written(self) -> Tensor | None:
        """Return how many sampled elements are not what was published, on the device; None where masters are none."""
        found = []
        for number, (published, master) in enumerate(self._published()):
            sample = self._sample(number, master)
            if sample.numel():
                now, was = (t.reshape(-1).index_select(0, sample) for t in (published, master))
                found.append(now.ne(was.to(now.dtype)).sum())
        return torch.stack(found).sum() if found else None

    @torch.no_grad()
    def adopt_written(self) -> None:
        """Take into the masters what was written to parameters since they were published; the rest stays as it is."""
        for published, master in self._published():
            is_written = published.ne(master.to(published.dtype)).to(master.device)
            master.copy_(torch.where(is_written, published.to(master), master))

    def _published(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of what is published and its master, element by element; of ZeRO, this rank's partitions."""
        wrapper = self._wrapper
        if self.is_plain:
            return []
        if self.partitioned:
            rank = dist.get_rank(self._data_group)
            own = self._parts or [parts[rank] for parts in wrapper.parallel_partitioned_bit16_groups]
            masters = wrapper.single_partition_of_fp32_groups
        elif isinstance(wrapper, FP16_Optimizer):
            own, masters = wrapper.fp16_groups_flat, wrapper.fp32_groups_flat
        else:
            own = [self._parameters[name] for name in self.fragments]
            masters = [fragment.master for fragment in self.fragments.values()]
        return [(low.detach(), master.detach()) for low, master in zip(own, masters, strict=True)]

    def _sample(self, number: int, master: Tensor) -> Tensor:
        """Return which elements of a master are compared."""
        # master | bias, 3 elements | weight [100, 100] |  ->  0 1 2, then every fifth element of the weight: its stride
        # and its rows' length have no common factor, so that all columns are looked at
        if number not in self._samples:
            places = []
            for name, fragment in self.fragments.items():
                if fragment.master.data_ptr() != master.data_ptr() or not fragment.num_elements:
                    continue
                shape = self._parameters[name].shape
                stride = 1
                if shape.numel() > COMPARED_WHOLE:
                    stride = shape.numel() // SAMPLED
                    while math.gcd(stride, shape[-1]) > 1:
                        stride += 1
                end = fragment.master_start + fragment.num_elements
                places.append(torch.arange(fragment.master_start, end, stride))
            sample = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)
            self._samples[number] = sample.to(master.device)
        return self._samples[number]

    @torch.no_grad()
    def full(self, name: str) -> Tensor:
        """Return a copy of the master of ``name``, fp32, in the parameter's shape; collective under ZeRO."""
        parameter = self._parameters[name]
        fragment = self.fragments.get(name)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if fragment is not None:
            part = fragment.master.detach().reshape(-1)
            part = part.narrow(0, fragment.master_start, fragment.num_elements)
            whole.narrow(0, fragment.start, fragment.num_elements).copy_(part)
        # Every element is in one rank's partition, zero on the others: their sum is the whole.
        if self.partitioned and self._data_group is not None:
            all_reduce(whole, group=self._data_group, what=f"the whole of {name}")
        return whole.view(parameter.shape)

    def publish_loss_scale(self, scale: float) -> None:
        """Let a half-precision wrapper say the scale in force, which users read; its own is not used."""
        if not self.is_plain:
            self._wrapper.loss_scale = scale

    def pieces(self, foreign: Collection[str], *, group_numbers: Sequence[int]) -> OptimizerPieces:
        """Return masters and optimizer state by parameter, this rank's part where they are partitioned.

        Args:
            foreign: parameters that another stage saves.
            group_numbers: of the optimizer's groups among the model's.
        """
        return optimizer_pieces(
            self.optimizer,
            self.fragments,
            has_masters=not self.is_plain,
            foreign=foreign,
            group_numbers=group_numbers,
        )

    def restore(self, saved: StageOptimizerState) -> None:
        """Restore masters and optimizer state from those of any plan."""
        restore_optimizer(self.optimizer, self.fragments, saved)
        if self.partitioned:  # what was linked is of the state before
            self._wrapper._hp_optimizer_states_linked = False
        self._link_state()

    def _link_state(self) -> None:
        """Let `deepspeed.utils.safe_get_full_*` find the state of each parameter, once there is some."""
        if self.partitioned and all(master in self.optimizer.state for master in self._masters):
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def _copy_masters(self) -> None:
        for name, fragment in self.fragments.items():
            parameter = self._parameters[name]
            part = fragment.master.detach()
            if fragment.flat:
                part = part.narrow(0, fragment.master_start, fragment.num_elements).view(parameter.shape)
            parameter.data.copy_(part)

    def _forget_first_step(self) -> None:
        """Undo the step with zero gradients by which DeepSpeed's half-precision wrappers allocate state.

        It would count as Adam's first step (so that its bias correction is one step off, other than under ZeRO)
        and apply weight decay once.
        """
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group.pop("step", None)
        self.refresh()


def _names(parameters: Mapping[str, nn.Parameter]) -> dict[int, str]:
    return {id(parameter): name for name, parameter in parameters.items()}


def _unfused_fragments(wrapper: Any, parameters: Mapping[str, nn.Parameter]) -> dict[str, Fragment]:
    names = _names(parameters)
    return {
        names[id(parameter)]: whole_fragment(parameter, master)
        for group, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        for parameter, master in zip(group, masters, strict=True)
    }


def _fused_fragments(wrapper: Any, parameters: Mapping[str, nn.Parameter]) -> dict[str, Fragment]:
    names = _names(parameters)
    fragments: dict[str, Fragment] = {}
    # The flat master of a group holds its parameters in order, without gaps: of 6 and 4 elements from 0 and from 6.
    for group, master in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
        start = 0
        for parameter in group:
            fragments[names[id(parameter)]] = Fragment(
                master=master, master_start=start, start=0, num_elements=parameter.numel(), flat=True
            )
            start += parameter.numel()
    return fragments


def _zero_fragments(wrapper: Any, layout: Sequence[FlatGroup], position: int) -> dict[str, Fragment]:
    """Return the parts of parameters in this rank's partitions; the others lie wholly in other ranks'."""
    return {
        part.name: Fragment(
            master=master,
            master_start=part.offset,
            start=part.start,
            num_elements=part.num_elements,
            flat=True,
        )
        for master, flat in zip(wrapper.single_partition_of_fp32_groups, layout, strict=True)
        for part in flat.segments(position * flat.partition_size, flat.partition_size)
    }


def read_layout(wrapper: Any, parameters: Mapping[str, nn.Parameter]) -> tuple[FlatGroup, ...]:
    """Return the flat groups of a `DeepSpeedZeroOptimizer`, in the order of its masters.

    Args:
        parameters: the stage's trained parameters by name.

    Raises:
        ConfigError: this DeepSpeed keeps its layout elsewhere.
    """
    require_attributes(wrapper, "round_robin_bit16_groups", "round_robin_bit16_offsets", "partition_size")
    names, groups = _names(parameters), []
    lists = (wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_offsets, wrapper.partition_size)
    for members, offsets, size in zip(*lists, strict=True):
        spans = tuple(
            ParameterSpan(name=names[id(p)], first=first, num_elements=torch.Size(p.shape).numel())
            for p, first in zip(members, offsets, strict=True)
        )
        groups.append(FlatGroup(spans=spans, partition_size=int(size)))
    return tuple(groups)


class ZeroPlaces:
    """Places of weights that ZeRO 1 and 2 gather into flat buffers (asynchronous mode).

    DeepSpeed's optimizer writes its rank's partition of a flat buffer and gathers the others'; parameters are views
    of it. So another place is another flat buffer of each group, and to move is to hand it to the optimizer: only then
    does a gather leave alone the weights that a micro-batch in flight was computed with.

    Args:
        wrapper: a `DeepSpeedZeroOptimizer`; ``layout`` is how it lays out parameters.
        named: the parameters it steps, by the names of ``layout``.
        parameters: all that are trained, in order; those it does not step move by themselves.

    Raises:
        ConfigError: this DeepSpeed keeps its buffers elsewhere.
    """

    def __init__(
        self,
        wrapper: Any,
        layout: Sequence[FlatGroup],
        named: dict[str, nn.Parameter],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        require_attributes(
            wrapper, "bit16_groups_flat", "parallel_partitioned_bit16_groups", "get_data_parallel_partitions"
        )
        # parallel_partitioned_bit16_groups are views of the flat buffers, one a rank: they are made anew at each move.
        self._wrapper = wrapper
        self._order = tuple(parameters)
        number = {id(parameter): at for at, parameter in enumerate(parameters)}
        # by flat group: of each of its parameters that code reads, its number, its first element, its shape
        self._views = [
            [
                (number[id(named[span.name])], span.first, named[span.name].shape)
                for span in group.spans
                if id(named[span.name]) in number
            ]
            for group in layout
        ]
        inside = {at for views in self._views for at, _, _ in views}
        self._rest = [at for at in range(len(parameters)) if at not in inside]
        self._others = ParameterPlaces([self._order[at] for at in self._rest])

    def present(self) -> WeightPlace:
        """Return the optimizer's buffers, and where the parameters lie in them."""
        return self._place(self._wrapper.bit16_groups_flat, self._others.present())

    def make(self) -> WeightPlace:
        """Return buffers like the optimizer's."""
        flats = [torch.zeros_like(flat) for flat in self._wrapper.bit16_groups_flat]
        return self._place(flats, self._others.make())

    def _place(self, flats: Sequence[Tensor], others: WeightPlace) -> WeightPlace:
        found = dict(zip(self._rest, others.tensors, strict=True))
        for flat, views in zip(flats, self._views, strict=True):
            for at, first, shape in views:
                found[at] = flat.detach().narrow(0, first, shape.numel()).view(shape)
        return WeightPlace(tensors=tuple(found[at] for at in range(len(self._order))), flats=tuple(flats))

    @torch.no_grad()
    def move(self, place: WeightPlace) -> None:
        """Copy the buffers, and hand them to optimizer and parameters."""
        wrapper = self._wrapper
        for index, flat in enumerate(place.flats):
            flat.copy_(wrapper.bit16_groups_flat[index])
            wrapper.bit16_groups_flat[index] = flat
            wrapper.parallel_partitioned_bit16_groups[index] = wrapper.get_data_parallel_partitions(
                flat, index
            )
        self._others.move(WeightPlace(tensors=tuple(place.tensors[at] for at in self._rest)))
        for parameter, tensor in zip(self._order, place.tensors, strict=True):
            parameter.data = tensor
