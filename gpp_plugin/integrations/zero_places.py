"""Places of weights that ZeRO 1 and 2 gather into flat buffers (asynchronous mode).

DeepSpeed's optimizer writes its rank's partition of a flat buffer and gathers the others'; parameters are views of
it. So another place is another flat buffer of each group, and to move is to hand it to the optimizer: only then does
a gather leave alone the weights that a micro-batch in flight was computed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.integrations.zero_layout import FlatGroup, require_attributes
from gpp_plugin.runtime.weight_versions import ParameterPlaces, WeightPlace


class ZeroPlaces:
    """Places of one stage's trained weights.

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
        self._wrapper = wrapper
        self._order = tuple(parameters)
        number = {id(parameter): at for at, parameter in enumerate(parameters)}
        # by flat group: of each of its parameters that code reads, its number, its first element, its shape
        self._views = [
            [
                (number[id(named[place.name])], place.first, named[place.name].shape)
                for place in group.places
                if id(named[place.name]) in number
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
