"""What plans are made for where lengths are declared, and what a plan's stages hold at the lengths of a mini-batch.

A profile is of one length. `LengthCosts` says how each cost grows; so a profile of other lengths (`profile_at`) is this
one times a growth, which is 1 at its own. Planned is for two at once (`planned_profile`): the mean of the typical
lengths' times, and the bytes of the longest.

    input_ids      512     1024    4096
    forward_us     100     220     -         160 is planned
    saved bytes    1 MB    2 MB    8 MB      8 MB are planned, and refused where they do not fit

`SizedPlan` puts the bytes of a mini-batch's own lengths into the one formula of memory: what is compared with counts,
and why a mini-batch is refused.

Source: this project
Tests: tests/plan/test_planned_lengths.py, tests/integrations/test_length_memory.py
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.memory_plan import MemoryBreakdown, MemoryPlan
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.ir.size_formulas import (
    Coefficients,
    Evaluate,
    LengthCosts,
    Lengths,
    Mismatch,
    compile_formulas,
    products,
    value_of,
)
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.plan.costs.memory_formula import memory_breakdown, with_inputs


def profile_at(
    profile: Profile, costs: LengthCosts, lengths: Lengths, *, with_tensors: bool = True
) -> Profile:
    """Return a profile of other lengths; its inputs stay as they are.

    Args:
        with_tensors: say how tensors grow, too, which planners ask for alone.
    """
    here, there = products(lengths, costs.terms), products(costs.reference, costs.terms)

    def growth(coefficients: Coefficients) -> float:
        known = value_of(coefficients, there)
        return value_of(coefficients, here) / known if known > 0 else 1.0

    def at(cost: BlockCost) -> BlockCost:
        own = costs.blocks[cost.block]
        times = growth(own.forward_us), growth(own.backward_us)
        saved, transient = growth(own.saved_bytes), growth(own.transient_bytes)
        return dataclasses.replace(
            cost,
            forward_us=tuple(us * times[0] for us in cost.forward_us),
            backward_us=tuple(us * times[1] for us in cost.backward_us),
            saved_bytes_per_sample=cost.saved_bytes_per_sample * saved,
            saved_bytes_fixed=cost.saved_bytes_fixed * saved,
            transient_bytes_per_sample=cost.transient_bytes_per_sample * transient,
            pending_bytes_per_sample=cost.pending_bytes_per_sample * saved,
        )

    grown = [growth(coefficients) for coefficients in costs.shared]
    tensors = {name: growth(c) for name, c in costs.tensors.items()} if with_tensors else {}
    return dataclasses.replace(
        profile,
        costs=tuple(at(cost) for cost in profile.costs),
        shared=tuple(
            dataclasses.replace(s, bytes_per_sample=s.bytes_per_sample * by, bytes_fixed=s.bytes_fixed * by)
            for s, by in zip(profile.shared, grown, strict=True)
        ),
        growth={name: by for name, by in tensors.items() if by != 1.0},
    )


def planned_profile(typical: Sequence[Profile], longest: Profile) -> Profile:
    """Return a profile with the mean of the typical ones' times, and the bytes of the longest.

    Args:
        typical: at least one; all are of the same blocks, and of the same numbers of samples.
    """

    def mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))

    return dataclasses.replace(
        longest,
        costs=tuple(
            dataclasses.replace(
                cost,
                forward_us=mean([one.costs[i].forward_us for one in typical]),
                backward_us=mean([one.costs[i].backward_us for one in typical]),
            )
            for i, cost in enumerate(longest.costs)
        ),
    )


def inputs_at(inputs: Sequence[TensorSpec], costs: LengthCosts, lengths: Lengths) -> list[TensorSpec]:
    """Return the model's inputs at other lengths; those that no formula is known of as they are."""
    found = []
    for spec in inputs:
        formulas = costs.sizes.shapes.get(spec.name)
        if formulas is not None:
            evaluate = _compiled(tuple(costs.sizes.symbols), tuple(formulas))
            spec = dataclasses.replace(spec, shape=tuple(int(size) for size in evaluate(*lengths)))
        found.append(spec)
    return found


@functools.lru_cache(maxsize=1024)
def _compiled(symbols: tuple[str, ...], formulas: tuple[str, ...]) -> Evaluate:
    """Return what evaluates formulas, compiled once: shapes of each mini-batch are evaluated before it runs."""
    return compile_formulas(symbols, formulas)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """The lengths of a loss unit, or of a whole mini-batch where all its units are alike, and its samples."""

    lengths: Lengths
    samples: int


class SizedPlan:
    """A plan that says what fills its ranks at any lengths.

    Args:
        plan: its memory is that of the longest.
        profile: of the lengths that blocks were measured at, without inputs.
        inputs: the model's, at those lengths.
        dtype: what floats of the batch are cast to.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        *,
        profile: Profile,
        costs: LengthCosts,
        graph: BlockGraph,
        inputs: Sequence[TensorSpec],
        dtype: str,
        zero_stage: int,
    ) -> None:
        self.plan, self.costs = plan, costs
        self._profile, self._graph, self._inputs = profile, graph, tuple(inputs)
        self._dtype, self._zero_stage = dtype, zero_stage
        self._known: dict[UnitSize, tuple[MemoryBreakdown, ...]] = {}
        self._solve = costs.sizes.solver()

    def lengths_of(self, shapes: Mapping[str, Sequence[int]]) -> Lengths | str:
        """Return the lengths of a loss unit of ``costs.num_samples`` samples, or why it is none of those known."""
        if not self.costs.sizes.shapes.keys() <= shapes.keys():
            missing = sorted(self.costs.sizes.shapes.keys() - shapes.keys())
            return f"it has no {missing[0]}"
        found = self._solve(shapes)
        return str(found) if isinstance(found, Mismatch) else found

    def at(self, units: Sequence[UnitSize]) -> PipelinePlan:
        """Return the plan with the memory of a mini-batch of these units.

        Args:
            units: one where all are alike.
        """
        # A stage with 3 micro-batches in flight holds at most its three largest units at once; whatever one of them
        # needs in passing, the largest does.
        parts = [self._of_unit(unit) for unit in dict.fromkeys(units)]
        by_unit = dict(zip(dict.fromkeys(units), parts, strict=True))
        memory = []
        for index, stage in enumerate(self.plan.stages):
            own = [by_unit[unit][index] for unit in units]
            one = max(own, key=lambda part: part.total)
            if len(own) > 1:
                each = sorted((part.activations / stage.in_flight for part in own), reverse=True)
                share = sum(unit.samples for unit in units)
                read = sum(part.inputs * unit.samples / share for part, unit in zip(own, units, strict=True))
                one = dataclasses.replace(
                    one, activations=round(sum(each[: stage.in_flight])), inputs=round(read)
                )
            memory.append(dataclasses.replace(one, limit=self.plan.memory[index].limit))
        lengths = max(units, key=lambda unit: (unit.lengths, unit.samples)).lengths
        return dataclasses.replace(self._plan_at(lengths), memory=tuple(memory))

    def _plan_at(self, lengths: Lengths) -> PipelinePlan:
        stages = tuple(
            stage
            if stage.memory is None
            else dataclasses.replace(stage, memory=self._memory_plan(stage.memory, lengths))
            for stage in self.plan.stages
        )
        return dataclasses.replace(self.plan, stages=stages)

    def _of_unit(self, unit: UnitSize) -> tuple[MemoryBreakdown, ...]:
        found = self._known.get(unit)
        if found is None:
            profile = profile_at(self._profile, self.costs, unit.lengths, with_tensors=False)
            inputs = inputs_at(self._inputs, self.costs, unit.lengths)
            profile = with_inputs(
                profile, self._graph, inputs, mini_batch=self.plan.mini_batch, dtype=self._dtype
            )
            by = unit.samples / self.costs.num_samples
            plan, zero = self._plan_at(unit.lengths), self._zero_stage
            messages = [round(part.messages * by) for part in self.plan.memory]
            found = memory_breakdown(
                plan, profile, graph=self._graph, zero_stage=zero, more_samples=by, messages=messages
            )
            while len(self._known) >= 256:
                self._known.pop(next(iter(self._known)))
            self._known[unit] = found
        return found

    def _memory_plan(self, memory: MemoryPlan, lengths: Lengths) -> MemoryPlan:
        """Return what a stage swaps and recomputes at other lengths than the longest, for which it was planned."""
        here = products(lengths, self.costs.terms)
        there = products(self.costs.longest, self.costs.terms)

        def growth(names: Sequence[str]) -> float:
            known = [self.costs.tensors[name] for name in names if name in self.costs.tensors]
            total = sum(value_of(coefficients, there) for coefficients in known)
            return sum(value_of(c, here) for c in known) / total if total > 0 else 1.0

        swapped = tuple(
            dataclasses.replace(tensor, bytes=round(tensor.bytes * growth([tensor.name])))
            for tensor in memory.swapped
        )
        on_edges = growth(sorted({name for edge in self._graph.edges for name in edge.tensors}))
        recomputed = tuple(
            dataclasses.replace(
                segment,
                bytes=round(segment.bytes * growth(segment.tensors)),
                held_bytes=round(segment.held_bytes * on_edges),
            )
            for segment in memory.recomputed
        )
        found = dataclasses.replace(memory, swapped=swapped, recomputed=recomputed)
        known, now = (
            one.swapped_bytes + sum(segment.bytes for segment in one.recomputed) for one in (memory, found)
        )
        by = now / known if known > 0 else 1.0
        return dataclasses.replace(found, working_bytes=round(memory.working_bytes * by))
