"""Which operators context ranks compute on parts, and that these parts are those of the whole."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.ir.analysis import HEADS, POSITIONS, ROWS, ContextCut, ContextPart

aten = torch.ops.aten


# ---- each operator by itself, on the parts of each rank -----------------------------------------------


def repeats(number: int, degree: int) -> int:
    """Return how many ranks hold the same group."""
    return degree // math.gcd(number, degree)


class Emulated:
    """Runs single operators of a capture as one of so many context ranks would, on parts of the true operands."""

    def __init__(self, capture: CapturedGraph, values: dict[str, Any], degree: int, samples: int) -> None:
        self.capture, self.values, self.degree, self.samples = capture, values, degree, samples
        self.parts = {part.name: part for part in capture.analysis.sharding.context}
        self.called = {**capture.inputs, **capture.parameters}

    def cut(self, value: torch.Tensor, cut: ContextCut, rank: int, groups: int | None = None) -> torch.Tensor:
        """Return what a rank holds of a whole tensor."""
        size = value.shape[cut.axis]
        if cut.kind == HEADS:
            if groups is not None:
                value = value.repeat_interleave(repeats(groups, self.degree), cut.axis)
            return value.chunk(self.degree, cut.axis)[rank].contiguous()
        if cut.kind == ROWS:
            apart = value.unflatten(cut.axis, (self.samples, size // self.samples))
            own = self.cut(apart, ContextCut(kind=POSITIONS, axis=cut.axis + 1), rank)
            return own.flatten(cut.axis, cut.axis + 1)
        first, last = size * rank // self.degree, size * (rank + 1) // self.degree
        return value.narrow(cut.axis, first, last - first).contiguous()

    def wanted(self, node: fx.Node, rank: int) -> torch.Tensor:
        """Return a rank's part of a true result; the whole where ranks have summands."""
        part, value = self.parts[node.name], self.values[node.name]
        if part.result is None:
            return value
        axis = part.result.axis
        own = repeats(value.shape[axis], self.degree) if part.groups else 1
        if own > 1 and node.target is aten.expand.default:
            # the heads of each group are divided among the ranks that hold it
            value = value.unflatten(axis + 1, (own, -1)).flatten(axis, axis + 1)
            return value.chunk(self.degree, axis)[rank]
        return self.cut(value, part.result, rank, value.shape[axis] if own > 1 else None)

    def operand(self, node: fx.Node, reader: ContextPart, rank: int) -> Any:
        name, value = self.called.get(node.name, node.name), self.values[node.name]
        cut = reader.operands.get(name)
        if cut is None or not isinstance(value, torch.Tensor):
            return value
        if name in reader.groups and node.target is aten.expand.default:
            return self.wanted(node, rank)
        return self.cut(value, cut, rank, reader.groups.get(name))

    def run(self, node: fx.Node, rank: int) -> Any:
        """Return what a rank makes of its parts of the operands."""
        if node.target is operator.getitem:
            return self.run(node.args[0], rank)[node.args[1]]
        part, args = self.parts[node.name], list(node.args)
        if node.target in (aten.view.default, aten.reshape.default, aten.expand.default):
            args[1] = list(self.wanted(node, rank).shape)
        if node.target is aten.repeat_interleave.self_int and part.groups:
            (number,) = part.groups.values()
            args[1] //= repeats(number, self.degree)
        if part.sums == "mean":
            args = [*args[:2], None, 2, *args[4:]]  # a sum, which is divided at last
        args, kwargs = fx.map_arg((args, dict(node.kwargs)), lambda n: self.operand(n, part, rank))
        return node.target(*args, **kwargs)

    def check(self) -> set[str]:
        """Hold each operator against the whole; return those that can be cut by this number."""
        checked = set()
        for node in self.capture.graph.nodes:
            part = self.parts.get(node.name)
            if part is None or any(number % self.degree for number in part.heads):
                continue
            checked.add(node.name)
            if not isinstance(self.values[node.name], torch.Tensor):
                assert all(self.parts[user.name].result == part.result for user in node.users)
                continue
            made = [self.run(node, rank) for rank in range(self.degree)]
            if part.sums:
                made = [torch.stack(made).sum(0)]
            if part.sums == "mean":
                made = [made[0] / (self.values[node.args[1].name] != -100).sum()]
            for rank, own in enumerate(made):
                wanted = self.wanted(node, rank)
                assert own.shape == wanted.shape, node.name
                torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
        return checked
