"""How DeepSpeed's ZeRO lays a stage's trained parameters out over the stage's ranks.

The parameters of one optimizer group stand one after the other in a flat buffer, which is padded and cut into
equal partitions, one a rank of the stage:

    flat        | embed            | norm | layer.weight          | bias | pad |
    partition   | rank 0             | rank 1             | rank 2             |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import nn

from gpp_plugin.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a parameter stands: ``num_elements`` from element ``first`` of the flat buffer on."""

    name: str
    first: int
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Some elements of a parameter, and where they are in what was asked for.

    Args:
        start: first element in the flattened parameter.
        offset: first element in the window.
    """

    name: str
    start: int
    offset: int
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroup:
    """One flat buffer: its parameters in order, and the elements of each rank's partition."""

    places: tuple[Place, ...]
    partition_size: int

    def segments(self, first: int, num_elements: int) -> Iterator[Segment]:
        """Yield the parts of parameters in a window of the flat buffer, in order."""
        return segments_of(self.places, first, num_elements)


def segments_of(places: Sequence[Place], first: int, num_elements: int) -> Iterator[Segment]:
    """Yield the parts of ``places`` that lie in a window of ``num_elements`` elements from ``first`` on."""
    for place in places:
        begin, end = max(place.first, first), min(place.first + place.num_elements, first + num_elements)
        if begin < end:
            yield Segment(
                name=place.name, start=begin - place.first, offset=begin - first, num_elements=end - begin
            )


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


def read_layout(wrapper: Any, parameters: Mapping[str, nn.Parameter]) -> tuple[FlatGroup, ...]:
    """Return the flat groups of a `DeepSpeedZeroOptimizer`, in the order of its masters.

    Args:
        parameters: the stage's trained parameters by name.

    Raises:
        ConfigError: this DeepSpeed keeps its layout elsewhere.
    """
    require_attributes(wrapper, "round_robin_bit16_groups", "round_robin_bit16_offsets", "partition_size")
    names: dict[int, str] = {id(parameter): name for name, parameter in parameters.items()}
    groups = []
    for members, offsets, size in zip(
        wrapper.round_robin_bit16_groups,
        wrapper.round_robin_bit16_offsets,
        wrapper.partition_size,
        strict=True,
    ):
        places = tuple(
            Place(name=names[id(p)], first=first, num_elements=torch.Size(p.shape).numel())
            for p, first in zip(members, offsets, strict=True)
        )
        groups.append(FlatGroup(places=places, partition_size=int(size)))
    return tuple(groups)
