"""Loss units that lack some of a model's inputs: what is captured of them, and the programs of mini-batches with them.

A unit's *pattern* is the set of inputs that it has. The model is captured once for each (without ``pixel_values`` its
own forward says what is left of it), its blocks are found in the plan by name, or where their parameters are, and with
them what passes between stages, which may go another way than in units that have everything:

    all inputs     vision -> text, embed -> text, text -> loss         stages vision, embed, text, loss
    no images                      embed -> text, text -> loss         stages         embed, text, loss

The edges of all patterns are edges of one *joined* plan, each pattern's behind those of the ones met before. A
mini-batch is a pattern for each of its units; its programs are the plan's without the tasks and messages of what units
lack (`schedule.absent`), scheduled, lowered and proved as all programs are, and kept.

Names of tensors are a capture's own, and captures of two patterns may give one name to unlike things: those of a
pattern have its number in front, except the loss and what an evaluation asks for.

Source: this project
Tests: tests/runtime/test_unit_patterns.py, tests/integrations/test_absent_units.py
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gpp_plugin.errors import CaptureError, PlanError, ScheduleError, first_line
from gpp_plugin.ir.plan import MemoryPlan, PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.plan.make import stage_edges
from gpp_plugin.runtime.batches import Batch, lately, units_of
from gpp_plugin.runtime.compute import BoundaryGradients, boundary_gradients
from gpp_plugin.runtime.memory.segments import INSIDE
from gpp_plugin.runtime.messages.transport import Transport
from gpp_plugin.runtime.rank_programs import channels_of, held_tensors, make_programs, match_blocks
from gpp_plugin.runtime.stage_module import Reference, StageCode
from gpp_plugin.schedule.build_graph import Presence
from gpp_plugin.schedule.gathers import last_backward, stages_that_reduce_early

MAX_PATTERNS = 32
"""Sets of inputs that the units of a job may have."""
MAX_PROGRAMS = 256
"""Mini-batches, as the patterns of their units, whose programs are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPattern:
    """Units that have the same inputs.

    Args:
        index: the patterns are numbered as they are met, the same on every rank; 0 has all inputs.
        lacks: the inputs that there are not.
        reference: the model as captured for such units.
        plan: with their blocks, and the edges that they need, as that capture calls things.
        stages: that have something to do for them.
        edges: of the joined plan, those that are theirs.
        names: what the joined plan calls the loss and the outputs of their capture.
        parameters: that their blocks read.
    """

    index: int
    lacks: tuple[str, ...]
    reference: Reference
    plan: PipelinePlan
    stages: frozenset[int]
    edges: frozenset[int]
    names: Mapping[str, str]
    parameters: frozenset[str]

    def name(self, tensor: str) -> str:
        """Return what the joined plan calls a tensor of the capture."""
        return tensor if not self.index else self.names.get(tensor, f"{self.index}:{tensor}")

    def named(self, code: StageCode) -> StageCode:
        """Return a stage's code under the joined plan's names."""
        if not self.index:
            return code
        function = dataclasses.replace(
            code.function,
            received=tuple(map(self.name, code.function.received)),
            outputs=tuple(map(self.name, code.function.outputs)),
        )
        return dataclasses.replace(
            code,
            function=function,
            tensors={self.name(name): spec for name, spec in code.tensors.items()},
            loss=None if code.loss is None else self.name(code.loss),
            outputs={output: self.name(node) for output, node in code.outputs.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternProgram:
    """What a rank runs of mini-batches whose units have these patterns.

    Args:
        plan: the joined one as it was when the program was made; later ones have more edges behind.
        program: for all of its stages; ``parts`` what it has of each.
        reduces_in: as of `AutogradCompute`, by stage.
    """

    plan: PipelinePlan
    program: RankProgram
    parts: Mapping[int, RankProgram]
    reduces_in: Mapping[int, int | None]

    @classmethod
    def of(cls, plan: PipelinePlan, program: RankProgram, reduces_early: Collection[int]) -> PatternProgram:
        """Return a rank's program with its parts.

        Args:
            reduces_early: stages that may sum gradients in their last backward.
        """
        parts = {stage: program.of_stage(stage) for stage in program.stages}
        reduces_in = {
            stage: last_backward(part) if stage in reduces_early else None for stage, part in parts.items()
        }
        return cls(plan=plan, program=program, parts=parts, reduces_in=reduces_in)


class UnitPatterns:
    """The patterns that a rank's stages have met, and the rank's programs for mini-batches of them.

    Args:
        plan: of units.
        reference: of the model with all its inputs.
        lacking: returns the model as it is for units of these keys only, of the one with all its inputs; collective
            over all ranks. Where it cannot do without the others it raises CaptureError on each.
        program: this rank's where all units have all inputs.
        reduces_early: stages that may sum gradients in their last backward.
        reduces_each_backward: as of `make_programs`.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        reference: Reference,
        lacking: Callable[[Reference, Batch], Reference],
        *,
        program: RankProgram,
        transport: Transport | None,
        reduces_early: Collection[int],
        reduces_each_backward: bool,
    ) -> None:
        self._plan = plan
        self._lacking = lacking
        self._rank = program.rank
        self._transport = transport
        self._reduces_early = frozenset(reduces_early)
        self._reduces_each_backward = reduces_each_backward
        self._inputs = tuple(spec.name for spec in reference.analysis.op_graph.inputs)
        parameters = {p.name for p in reference.analysis.op_graph.parameters if not p.is_buffer}
        self._parameters = parameters
        self._held = [parameters.intersection(names) for names in held_tensors(plan, reference)]
        every = frozenset(range(len(plan.stages)))
        full = UnitPattern(
            index=0,
            lacks=(),
            reference=reference,
            plan=plan,
            stages=every,
            edges=frozenset(range(len(plan.edges))),
            names={},
            parameters=_parameters(reference),
        )
        self._known: dict[tuple[str, ...], UnitPattern] = {(): full}
        self._edges: tuple[StageEdge, ...] = plan.edges
        self._programs: OrderedDict[tuple[int, ...], PatternProgram] = OrderedDict()
        self._full = PatternProgram.of(plan, program, self._reduces_early)
        self._gradients: dict[int, RankProgram] = {0: program}

    def is_full(self, unit: Batch) -> bool:
        """Return whether a unit has all inputs."""
        return not self._lacks(unit)

    def of(self, unit: Batch) -> UnitPattern:
        """Return a unit's pattern, which `learn` has met.

        Raises:
            CaptureError: it has not, as not all ranks take part.
        """
        lacks = self._lacks(unit)
        if lacks not in self._known:
            raise CaptureError(
                f"a unit lacks {list(lacks)}, in a batch that leaves ranks of the plan idle; give every unit these "
                "keys, or units for all ranks"
            )
        return self._known[lacks]

    def _lacks(self, unit: Batch) -> tuple[str, ...]:
        return tuple(name for name in self._inputs if not isinstance(unit.get(name), Tensor))

    def learn(self, batch: Batch) -> None:
        """Capture and plan for the patterns of a mini-batch that are new; collective over all ranks if there are any.

        Raises:
            CaptureError: the model cannot do without what a unit lacks, or its stages cannot; the same on every rank.
        """
        for unit in units_of(batch):
            if self._lacks(unit) not in self._known:
                self._add(unit)

    def _add(self, unit: Batch) -> None:
        lacks = self._lacks(unit)
        if len(self._known) >= MAX_PATTERNS:
            raise CaptureError(
                f"units come with more than {MAX_PATTERNS} sets of inputs; give inputs that a unit lacks as empty or "
                "masked ones"
            )
        reference = self._lacking(self._known[()].reference, unit)
        try:
            pattern, edges = self._planned(lacks, reference)
            joined = (*self._edges, *edges)
            # where all units are of it, each rank's program has all messages there can be
            programs = self._lowered([pattern] * self._plan.mini_batch, joined)
        except (PlanError, ScheduleError) as error:
            raise CaptureError(
                f"a unit lacks {list(lacks)}, for which the plan's stages cannot run: {first_line(error)}; give every "
                "unit these keys, or another plan"
            ) from error
        if self._transport is not None:
            self._transport.open(channels_of(programs))
        self._known[lacks] = pattern
        self._edges = joined
        self._gradients[pattern.index] = self._own(programs)

    def _planned(
        self, lacks: tuple[str, ...], reference: Reference
    ) -> tuple[UnitPattern, tuple[StageEdge, ...]]:
        """Return a pattern and its edges, as the joined plan has them."""
        plan, graph, base = self._plan, reference.block_graph, self._known[()].reference
        groups = match_blocks(plan, graph, parameters=self._parameters, held=self._held)
        own = dataclasses.replace(
            plan,
            stages=tuple(
                dataclasses.replace(s, blocks=tuple(b), memory=_memory_of(s, base, reference))
                for s, b in zip(plan.stages, groups, strict=True)
            ),
            edges=stage_edges(graph, groups, [stage.context for stage in plan.stages]),
        )
        results, known = reference.analysis.op_graph, base.analysis.op_graph
        _check_results(plan, groups, reference, base)
        names = {node: known.outputs[name] for name, node in results.outputs.items() if name in known.outputs}
        if results.loss is not None and known.loss is not None:
            names[results.loss] = known.loss
        pattern = UnitPattern(
            index=len(self._known),
            lacks=lacks,
            reference=reference,
            plan=own,
            stages=frozenset(i for i, blocks in enumerate(groups) if blocks),
            edges=frozenset(range(len(self._edges), len(self._edges) + len(own.edges))),
            names=names,
            parameters=_parameters(reference),
        )
        edges = tuple(
            dataclasses.replace(
                edge,
                batch_tensors=tuple(map(pattern.name, edge.batch_tensors)),
                whole_tensors=tuple(map(pattern.name, edge.whole_tensors)),
                gradient_tensors=tuple(map(pattern.name, edge.gradient_tensors)),
            )
            for edge in own.edges
        )
        return pattern, edges

    def _lowered(
        self, patterns: Sequence[UnitPattern], edges: tuple[StageEdge, ...]
    ) -> tuple[RankProgram, ...]:
        presence = Presence(
            stages=tuple(pattern.stages for pattern in patterns),
            edges=tuple(pattern.edges for pattern in patterns),
        )
        return make_programs(
            self._plan,
            self._known[()].reference,
            reduce_each_backward=self._reduces_each_backward,
            edges=edges,
            presence=presence,
        )

    def _own(self, programs: Sequence[RankProgram]) -> RankProgram:
        return next(program for program in programs if program.rank == self._rank)

    def gradients(self, pattern: UnitPattern, code: StageCode, stage: int) -> BoundaryGradients:
        """Return which gradients cross a stage's boundary for a unit of a pattern.

        Args:
            code: the stage's, under the joined plan's names.
        """
        program = self._gradients[pattern.index].of_stage(stage)
        if not pattern.index:
            return boundary_gradients(program, self._plan, code.tensors)
        joined = dataclasses.replace(self._plan, edges=self._edges)
        return boundary_gradients(program, joined, code.tensors)

    def unread_parameters(self, batch: Batch) -> frozenset[str]:
        """Return the parameters that units with all inputs read, and no unit of a mini-batch does."""
        patterns = {pattern.index: pattern for pattern in map(self.of, units_of(batch))}
        if 0 in patterns:
            return frozenset()
        return self._known[()].parameters.difference(*(p.parameters for p in patterns.values()))

    def program(self, batch: Batch) -> tuple[tuple[int, ...], PatternProgram]:
        """Return the patterns of a mini-batch's units by number, and this rank's program for them.

        Raises:
            CaptureError: the plan's stages cannot run them together; the same on every rank.
        """
        patterns = [self.of(unit) for unit in units_of(batch)]
        key = tuple(pattern.index for pattern in patterns)
        if not any(key):
            return key, self._full
        make = functools.partial(self._make_program, patterns)
        return key, lately(self._programs, key, make, most=MAX_PROGRAMS)

    def _make_program(self, patterns: Sequence[UnitPattern]) -> PatternProgram:
        try:
            programs = self._lowered(patterns, self._edges)
        except (PlanError, ScheduleError) as error:
            raise CaptureError(
                f"units that lack unlike inputs cannot be run together: {first_line(error)}; give units of one "
                "mini-batch the same keys"
            ) from error
        plan = dataclasses.replace(self._plan, edges=self._edges)
        early = self._reduces_early and self._reduces_early & stages_that_reduce_early(plan, programs)
        return PatternProgram.of(plan, self._own(programs), early)


def _memory_of(stage: Stage, base: Reference, now: Reference) -> MemoryPlan | None:
    """Return what a stage swaps and recomputes for units of another capture: what it does in blocks that are the same.

    A block that has other operators there keeps what it saves.
    """
    # Blocks are the same where their operators are, one by one: ``mul_7`` of layers.0 is ``mul_2`` now.
    if stage.memory is None:
        return None
    blocks = {block.name: block.nodes for block in now.block_graph.blocks}
    before, after = (
        {node.name: node.target for node in found.analysis.op_graph.nodes} for found in (base, now)
    )
    names: dict[str, str] = {}
    same = set()
    for block in base.block_graph.blocks:
        own = blocks.get(block.name, ())
        if block.name in stage.blocks and [before[n] for n in block.nodes] == [after[n] for n in own]:
            same.add(block.name)
            names.update(zip(block.nodes, own, strict=True))

    def called(tensor: str) -> str | None:
        operator = tensor.removesuffix(INSIDE)
        return names[operator] + tensor.removeprefix(operator) if operator in names else None

    recomputed = tuple(
        dataclasses.replace(part, tensors=tuple(n for n in map(called, part.tensors) if n is not None))
        for part in stage.memory.recomputed
        if same.issuperset(part.blocks)
    )
    swapped = tuple(
        dataclasses.replace(tensor, name=name)
        for tensor in stage.memory.swapped
        if (name := called(tensor.name)) is not None
    )
    return dataclasses.replace(stage.memory, recomputed=recomputed, swapped=swapped)


def _parameters(reference: Reference) -> frozenset[str]:
    return frozenset(name for block in reference.block_graph.blocks for name in block.parameters)


def _check_results(
    plan: PipelinePlan, groups: Sequence[Sequence[str]], reference: Reference, base: Reference
) -> None:
    """Refuse units that lack a result, or yield one on another stage than units with all inputs.

    Raises:
        PlanError: says which.
    """
    home = {node: i for i, blocks in enumerate(groups) for node in _made_by(reference, blocks)}
    usual = {node: i for i, stage in enumerate(plan.stages) for node in _made_by(base, stage.blocks)}
    now, before = reference.analysis.op_graph, base.analysis.op_graph
    results = {"loss": (now.loss, before.loss)}
    results |= {name: (now.outputs.get(name), node) for name, node in before.outputs.items()}
    for name, (node, known) in results.items():
        if known is None:
            continue
        if node is None:
            raise PlanError(f"such a unit has no {name}")
        if home.get(node) != usual.get(known):
            raise PlanError(f"their {name} would be made on another stage")


def _made_by(reference: Reference, blocks: Sequence[str]) -> list[str]:
    wanted = set(blocks)
    return [node for block in reference.block_graph.blocks if block.name in wanted for node in block.nodes]
