"""Tries operators on random operands: run on all samples and on slices of them, do the results agree?

On the CPU, whatever device the graphs were traced on: random operands may be refused (`trial_run` has why).

Source: this project
Tests: tests/capture/test_layouts.py
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.eager.trial_run import CPU, CheckedOnCpu, made_up
from gpp_plugin.capture.layout.layout_rules import Fixed, Rows, State
from gpp_plugin.capture.tracing.devices import on_device, placed_body
from gpp_plugin.capture.tracing.traced import Traced
from gpp_plugin.errors import first_line

logger = logging.getLogger(__name__)
aten = torch.ops.aten

MAX_PROBE_BYTES = 1 << 29
"""Operators with larger operands are not run; without a rule they count as mixing samples."""

_MOVEMENT = {
    aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.flatten.using_ints, aten.unflatten.int, aten.cat.default, aten.stack.default, aten.t.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int,
    aten.contiguous.default, aten.numpy_T.default, aten.repeat.default, aten.flip.default, aten.roll.default,
}  # fmt: skip
"""Operators that only move elements; they are run on two-byte integers."""


class MixedSamples(Exception):
    """An operator's results on slices are not slices of its result."""


class Trials:
    """Operators of both graphs, tried in step; equal ones are tried once.

    Args:
        small, large: structurally equal exports at ``n`` and ``2n`` samples.
        pairs: the nodes of both by the smaller one's names.
        states: of every operand, filled as operators are classified.
        constants: values, at both sizes, of operands that do not depend on inputs.
        traced_on: the device of both graphs; custom functions without code for the CPU are tried on it.
    """

    def __init__(
        self,
        small: Traced,
        large: Traced,
        pairs: Mapping[str, tuple[Any, Any]],
        *,
        states: Mapping[str, State],
        constants: Mapping[str, tuple[Tensor, Tensor]],
        traced_on: torch.device,
    ) -> None:
        self._small, self._large, self._pairs = small, large, pairs
        self._states, self._constants, self._traced_on = states, constants, traced_on
        self._memo: dict[Any, list[State] | str] = {}
        self._generator = torch.Generator().manual_seed(0)
        self.bodies = tuple(
            {name: placed_body(body, CPU, of_type=traced_on.type) for name, body in traced.attributes.items()}
            for traced in (small, large)
        )
        """What each graph calls, by name, on the CPU."""

    def classify(self, unit: tuple[str, ...], sources: list[fx.Node]) -> list[State] | str:
        """Return the layout of every result of the unit's operators, or why they mix samples.

        Args:
            unit: operators classified as one.
            sources: what they read from outside.
        """
        key = self._key(unit, sources)
        if key not in self._memo:
            total = sum(t.numel() for s in sources for t in tensors_of(self._pairs[s.name][1]))
            total += sum(t.numel() for name in unit for t in tensors_of(self._pairs[name][1]))
            if total * 8 > MAX_PROBE_BYTES:
                self._memo[key] = f"has operands too large to try ({total * 4 >> 20} MiB)"
            else:
                self._memo[key] = self._run_slices(unit, sources)
        return self._memo[key]

    def _key(self, unit: tuple[str, ...], sources: list[fx.Node]) -> Any:
        # Two units are equal if they are the same calls, at both sizes, on operands of the same states, shapes and
        # types: operands are known by their position, not their name, so that the layers of a model are one trial.
        position = {s.name: i for i, s in enumerate(sources)}
        position.update({name: len(sources) + i for i, name in enumerate(unit)})
        rank = lambda n: ("node", position[n.name])  # noqa: E731
        calls = []
        for name in unit:
            for node in self._pairs[name]:
                calls.append(repr((node.target, fx.map_arg(node.args, rank), fx.map_arg(node.kwargs, rank))))
        operands = tuple(
            (
                repr(self._states[s.name]),
                tuple(shape_of(s)),
                str(s.meta["val"].dtype),
                s.name if s.name in self._constants else "",
            )
            if s.op != "get_attr"
            else s.name
            for s in sources
        )
        return tuple(calls), operands

    def _run_slices(self, unit: tuple[str, ...], sources: list[fx.Node]) -> list[State] | str:
        # Of operands for 2n samples the large graph's operator makes the whole result, and the small graph's one makes
        # a part of each slice of n. Three slices, for n = 2:
        #     samples  0 1 2 3      starts 0, 1 and 2; the middle one separates a cut along samples from one that
        #              a a . .      happens to agree on halves (a reduction over pairs of samples)
        #              . b b .
        #              . . c c
        n = self._small.num_samples
        starts = [0, n // 2, n]
        moves = all(self._pairs[name][0].target in _MOVEMENT for name in unit)
        try:
            whole = {s.name: self._operand(s, moves) for s in sources}
            result = self.execute(unit, 1, whole)
            parts = []
            for start in starts:
                sliced = {s.name: self._slice(s, whole[s.name], start) for s in sources}
                parts.append(self.execute(unit, 0, sliced))
        except Exception as error:  # any failure of an operator on random operands
            reason = first_line(error) or type(error).__name__
            logger.debug("operator %s could not be tried: %s", self._pairs[unit[0]][0].target, reason)
            return f"could not be tried on random operands ({reason[:120]})"
        states: list[State] = []
        for name in unit:
            wholes, slices = _as_list(result[name]), [_as_list(part[name]) for part in parts]
            if any(len(each) != len(wholes) for each in slices):
                return "has as many results as there are samples"
            for i, large in enumerate(wholes):
                try:
                    states.append(find_rows(large, [each[i] for each in slices], starts, n))
                except MixedSamples as mixing:
                    return str(mixing)
        return states

    def _operand(self, source: fx.Node, moves: bool) -> Any:
        if source.op == "get_attr":
            return self.bodies[1][str(source.target)]
        if source.name in self._constants:
            return self._constants[source.name][1].clone()
        node = self._pairs[source.name][1]
        shape, dtype = shape_of(node), node.meta["val"].dtype
        # Lower precisions are tried in float32, as their rounding would hide small differences; operators that only
        # move elements in int16, a half or a quarter of the memory.
        if moves and (dtype.is_floating_point or dtype.is_complex):
            return torch.randint(0, 30000, shape, generator=self._generator, dtype=torch.int16)
        if dtype.is_floating_point and dtype is not torch.float64:
            dtype = torch.float32
        return made_up(shape, dtype, varied=self._generator)

    def _slice(self, source: fx.Node, value: Any, start: int) -> Any:
        if not isinstance(value, Tensor):
            return self.bodies[0][str(source.target)]
        if source.name in self._constants:
            return self._constants[source.name][0].clone()
        state = self._states[source.name]
        if not isinstance(state, Rows):
            return value.clone()
        return _take(value, state, start, self._small.num_samples).clone()

    def execute(self, unit: tuple[str, ...], which: int, operands: dict[str, Any]) -> dict[str, Any]:
        """Run the unit's operators of the small (0) or large (1) graph on real tensors."""
        values = dict(operands)
        with torch.no_grad():
            for name in unit:
                node = self._pairs[name][which]
                placed = on_device((node.args, node.kwargs), CPU, of_type=self._traced_on.type)
                args, kwargs = fx.map_arg(placed, lambda n: values[n.name])
                if isinstance(node.target, OpaqueCall):
                    values[name] = self._try_function(node, args)
                else:
                    values[name] = node.target(*args, **kwargs)
        return {name: values[name] for name in unit}

    def _try_function(self, node: fx.Node, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return a custom function's results, and behind them the gradients of its operands that have samples.

        A backward may mix samples where the forward does not (a gradient divided by its norm).
        """
        sources: Any = node.args
        wanted = [isinstance(self._states[source.name], Rows) for source in sources]
        run: Any = node.target.run_with_gradients  # type: ignore[union-attr]
        try:
            results, gradients = run(arguments, wanted)
        except Exception:
            if self._traced_on.type == "cpu":
                raise
            with CheckedOnCpu(self._traced_on.type):  # kernels of its own for the device
                results, gradients = run([tensor.to(self._traced_on) for tensor in arguments], wanted)
        return tuple(tensor.to(CPU) for tensor in (*results, *gradients))


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the (fake) tensors that an operator results in."""
    return [t for t in _as_list(node.meta.get("val")) if isinstance(t, Tensor)]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of an operator's one tensor."""
    return tuple(node.meta["val"].shape)


def _take(value: Tensor, rows: Rows, start: int, count: int) -> Tensor:
    """Return samples ``start .. start + count`` of a tensor laid out as ``rows``."""
    # Axes of ``split``: those before, outer, samples, rows, those behind. A tensor [3 x 4 x 2, 5] of 4 samples along
    # axis 0 with outer 3 and 2 rows is [3, 4, 2, 5]; samples 1..2 of it are [3, 2, 2, 5], and flat again [12, 5].
    split: Tensor = value.unflatten(rows.axis, (rows.outer, -1, rows.rows))
    return split.narrow(rows.axis + 1, start, count).flatten(rows.axis, rows.axis + 2)


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are equal but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    # relative to the largest value: sums over samples come in another order, and near zero that is all there is
    scale = float(a[torch.isfinite(a)].abs().max()) if torch.isfinite(a).any() else 1.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * max(scale, 1e-6), equal_nan=True)


def find_rows(whole: Tensor, parts: list[Tensor], starts: list[int], n: int) -> State:
    """Return the layout under which the results on slices are slices of the result on all.

    Raises:
        MixedSamples: there is none.
    """
    # The samples are along the one axis that is twice as long for 2n samples as for n. Along it rows of a sample may
    # stand together (outer = 1, [samples x rows]), or samples may stand inside another count (outer = length, [length x
    # samples]); smaller outer first, as those can be cut by one slice. For n = 2 and 8 rows: (4 rows, outer 1),
    # (2, 2), (1, 4).
    shape = parts[0].shape
    if whole.shape == shape:
        if all(are_equal(whole, part) for part in parts):
            return Fixed()
        raise MixedSamples("reduces over the samples")
    axes = [i for i in range(whole.dim()) if whole.dim() == len(shape) and whole.shape[i] != shape[i]]
    if len(axes) != 1 or whole.shape[axes[0]] * n != shape[axes[0]] * 2 * n or shape[axes[0]] % n:
        raise MixedSamples("combines every sample with every other")
    axis, per_sample = axes[0], shape[axes[0]] // n
    for outer in (d for d in range(1, per_sample + 1) if per_sample % d == 0):
        rows = Rows(axis, per_sample // outer, outer)
        if all(are_equal(_take(whole, rows, s, n), part) for s, part in zip(starts, parts, strict=True)):
            return rows
    raise MixedSamples("mixes samples")
