"""Weight stashing (PipeDream, section 3.3): a micro-batch's backward uses the weights of its forward.

A *version* is the weights between two updates, as leaf tensors of their own: what autograd keeps of a forward points
to its version, never to the live parameters. Versions and parameters share storage as long as they can; before an
update writes to storage that a micro-batch in flight still needs, the live parameters move to another (copy on
write). So a stage that holds k micro-batches has at most k sets of weights, the live one among them, and a stage that
holds one has no other. Where nothing is in flight the weights return to the storage they had, which others may know
(DeepSpeed's flat buffers, the user's model).

With vertical sync a micro-batch uses on every stage the weights of the same age: those that the stage with most
micro-batches in flight has at its forward.

Buffers and frozen parameters have no versions.

A stage's optimizer and its parameters move together from one place to another (`WeightPlaces`). Whatever updates
parameters by way of `parameter.data` follows by itself (`ParameterPlaces`); an optimizer that knows their storage
otherwise must be told (`integrations.deepspeed.master_weights`).

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.3
Tests: tests/runtime/test_weight_versions.py, tests/integrations/test_async.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from gpp_plugin.errors import RuntimeFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlace:
    """Storage of one set of weights.

    Args:
        tensors: of each trained parameter, with its shape.
        flats: buffers that hold several of them one after the other, where the optimizer writes those.
    """

    tensors: tuple[Tensor, ...]
    flats: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return what the weights take."""
        return sum(tensor.nbytes for tensor in self.tensors)


class WeightPlaces(Protocol):
    """The places of one stage's weights."""

    def present(self) -> WeightPlace:
        """Return where the live weights lie."""

    def make(self) -> WeightPlace:
        """Return another place for them, which holds nothing yet."""

    def move(self, place: WeightPlace) -> None:
        """Let the live weights, with their values, lie at another place from now on."""


class ParameterPlaces:
    """Places of parameters that everybody finds through `parameter.data`.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)

    def present(self) -> WeightPlace:
        """Return where the parameters lie."""
        return WeightPlace(tensors=tuple(parameter.data for parameter in self._parameters))

    def make(self) -> WeightPlace:
        """Return tensors like theirs."""
        return WeightPlace(tensors=tuple(torch.empty_like(parameter.data) for parameter in self._parameters))

    @torch.no_grad()
    def move(self, place: WeightPlace) -> None:
        """Copy the parameters there, and let them be there."""
        if place.tensors:
            torch._foreach_copy_(place.tensors, [parameter.data for parameter in self._parameters])
        for parameter, tensor in zip(self._parameters, place.tensors, strict=True):
            parameter.data = tensor


MakePlaces = Callable[[Sequence[nn.Parameter]], WeightPlaces]


@dataclass(slots=True, kw_only=True)
class _Version:
    """One set of weights.

    Args:
        place: of the trained parameters; ``leaves`` are the same values for autograd.
        tensors: what the stage's code takes: leaves, buffers and frozen parameters.
        users: micro-batches between forward and backward.
    """

    place: WeightPlace
    leaves: list[Tensor]
    tensors: tuple[Tensor, ...]
    users: int = 0


class WeightVersions:
    """The versions of one stage's weights.

    Args:
        tensors: parameters and buffers in the order the stage's code takes them.
        most: most sets of weights at a time, as planned.
        lag: with vertical sync, how many updates older than itself a micro-batch's weights are; None: newest ones.
        make_places: where the trained ones of ``tensors`` may lie.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        most: int,
        lag: int | None = None,
        make_places: MakePlaces = ParameterPlaces,
    ) -> None:
        self._tensors = tuple(tensors)
        trained = {id(t): t for t in tensors if isinstance(t, nn.Parameter) and t.requires_grad}
        self._parameters: list[nn.Parameter] = list(trained.values())
        place = {key: position for position, key in enumerate(trained)}
        self._places = [place.get(id(tensor), -1) for tensor in tensors]
        self._locations = make_places(self._parameters)
        self._most = most
        self._lag = lag
        self._aliased: tuple[int, ...] | None = None
        self.staleness = 0
        """Most updates seen between the weights of a forward and the update by its backward."""
        self.most_held = 1
        """Most sets of weights there were at a time."""
        self.start()

    def start(self) -> None:
        """Begin with an empty pipeline and the weights as they are now, where they are now."""
        # A stage with two micro-batches in flight, v its versions; A and B are places (storage), * the live one:
        #
        #     F0 uses v0   F1 uses v0   B0 -> update: v0 is needed by 1, so the live weights move     v0 A   v1 B*
        #     F2 uses v1   B1 (of v0) -> v0's last user: A is free; v1 is needed by 2: move to A      v1 B   v2 A*
        #
        # so two places go round, as many as micro-batches in flight.
        self._home = self._live = self._locations.present()
        self._versions = {0: self._make_version(self._home)}
        self._newest = 0
        self._next_micro_batch = 0
        self._version_of: dict[int, int] = {}
        self._free: list[WeightPlace] = []
        self._num_held = 1

    def _make_version(self, where: WeightPlace) -> _Version:
        # `.data` has a version counter of its own: an update in place must not look like damage to autograd
        leaves = [tensor.data.requires_grad_(True) for tensor in where.tensors]
        tensors = tuple(
            leaves[place] if place >= 0 else tensor
            for tensor, place in zip(self._tensors, self._places, strict=True)
        )
        return _Version(place=where, leaves=leaves, tensors=tensors)

    @property
    def stashed_bytes(self) -> int:
        """Return the most that older versions took beside the present one."""
        return (self.most_held - 1) * self._home.num_bytes

    # ---- micro-batches ---------------------------------------------------------------------------

    def use(self, micro_batch: int) -> tuple[Tensor, ...]:
        """Return what the forward of a micro-batch computes with; micro-batches count from an empty pipeline."""
        # With a lag of 2 micro-batch 5 uses version 3 on every stage: stages that are less behind have newer ones by
        # then, and keep 3 until 5 has come (`_is_needed`). The first micro-batches use version 0.
        age = self._newest if self._lag is None else max(0, micro_batch - self._lag)
        version = self._versions[age]
        version.users += 1
        self._version_of[micro_batch] = age
        self._next_micro_batch = micro_batch + 1
        return version.tensors

    def apart(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return a forward's outputs for sending: copies of those that are views of weights, which will change."""
        if self._aliased is None:
            weights = {_address(leaf) for version in self._versions.values() for leaf in version.leaves}
            self._aliased = tuple(i for i, output in enumerate(outputs) if _address(output) in weights)
        if not self._aliased:
            return outputs
        copied = list(outputs)
        for index in self._aliased:
            copied[index] = outputs[index].detach().clone()
        return copied

    def lend(self, micro_batch: int) -> None:
        """Let the backward that follows add to the gradients of the parameters."""
        version = self._versions[self._version_of[micro_batch]]
        for parameter, leaf in zip(self._parameters, version.leaves, strict=True):
            leaf.grad = parameter.grad

    def release(self, micro_batch: int) -> None:
        """Give the gradients of a backward to the parameters; its version may go."""
        age = self._version_of.pop(micro_batch)
        version = self._versions[age]
        for parameter, leaf in zip(self._parameters, version.leaves, strict=True):
            parameter.grad, leaf.grad = leaf.grad, None
        version.users -= 1
        self.staleness = max(self.staleness, self._newest - age)
        for old in [a for a in self._versions if a != self._newest and not self._is_needed(a)]:
            self._free.append(self._versions.pop(old).place)

    def _is_needed(self, age: int) -> bool:
        """Return whether a micro-batch in flight, or one to come, uses a version."""
        if self._versions[age].users:
            return True
        return self._lag is not None and age + self._lag >= self._next_micro_batch

    # ---- updates ---------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_update(self) -> None:
        """Move the live parameters to other storage if theirs is still needed.

        Raises:
            RuntimeFailure: more sets of weights would be held than planned.
        """
        if not self._is_needed(self._newest):
            return
        if self._free:
            self._live = self._free.pop()
        else:
            self._num_held += 1
            if self._num_held > self._most:
                raise RuntimeFailure(
                    f"{self._num_held} sets of weights would be held, the plan allows {self._most}; this is a bug"
                )
            self.most_held = max(self.most_held, self._num_held)
            self._live = self._locations.make()
        self._locations.move(self._live)

    def end_update(self) -> None:
        """Take the parameters as the newest version."""
        if self._is_needed(self._newest):
            version = self._make_version(self._live)
        else:
            version = self._versions.pop(self._newest)
        self._newest += 1
        self._versions[self._newest] = version

    @torch.no_grad()
    def settle(self) -> None:
        """Return to the first storage: the pipeline is empty."""
        assert not self._version_of, "micro-batches are in flight"
        if self._live is not self._home:
            self._locations.move(self._home)
        self.start()

    def forget(self) -> None:
        """Let go of all micro-batches after a failure; the parameters keep what the last update made of them."""
        self._version_of.clear()
        self.settle()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
