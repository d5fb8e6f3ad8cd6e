"""Where a stage's trained weights may lie: its optimizer and its parameters move together from one place to another.

A version of the weights that a micro-batch still needs keeps its place, and the live ones go elsewhere
(`weight_versions`). Whatever updates parameters by way of `parameter.data` follows by itself (`ParameterPlaces`);
an optimizer that knows their storage otherwise must be told (`integrations.zero_places`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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

    def present(self) -> Place:
        """Return where the live weights lie."""

    def make(self) -> Place:
        """Return another place for them, which holds nothing yet."""

    def move(self, place: Place) -> None:
        """Let the live weights, with their values, lie at another place from now on."""


class ParameterPlaces:
    """Places of parameters that everybody finds through `parameter.data`.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)

    def present(self) -> Place:
        """Return where the parameters lie."""
        return Place(tensors=tuple(parameter.data for parameter in self._parameters))

    def make(self) -> Place:
        """Return tensors like theirs."""
        return Place(tensors=tuple(torch.empty_like(parameter.data) for parameter in self._parameters))

    @torch.no_grad()
    def move(self, place: Place) -> None:
        """Copy the parameters there, and let them be there."""
        if place.tensors:
            torch._foreach_copy_(place.tensors, [parameter.data for parameter in self._parameters])
        for parameter, tensor in zip(self._parameters, place.tensors, strict=True):
            parameter.data = tensor
