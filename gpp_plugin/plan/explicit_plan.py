"""The user's own plan: a JSON that names module paths per stage, a saved PipelinePlan, or stages that are given.

Source: this project
Tests: tests/plan/test_explicit.py, tests/plan/test_fixed.py, tests/stage_graph/test_equality.py,
    tests/stage_graph/test_engine.py, tests/plan/test_asynchronous.py, tests/simulate/test_asynchronous.py
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpp_plugin.config.key_names import place_of, setting_of
from gpp_plugin.errors import GppError, PlanError, PlanInfeasible
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import LOSS_KEY, PipelinePlan, Stage
from gpp_plugin.ir.serialize import is_envelope
from gpp_plugin.ir.typed_leaves import show
from gpp_plugin.plan.baselines.stock_chain import STOCK
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.costs.memory_formula import complete_plan
from gpp_plugin.plan.make import build_plan, make_drafts, pending_bytes, stage_edges, with_in_flight
from gpp_plugin.plan.memory.fitting import StageFitter, fitter_for
from gpp_plugin.plan.plan_form import plan_of_envelope
from gpp_plugin.plan.refine.degrees import choose_degrees
from gpp_plugin.plan.request import (
    BatchRules,
    PlanRequest,
    batch_rules,
    blocks_under,
    coupled_blocks,
    is_under,
    nearest_names,
)
from gpp_plugin.plan.selection import best_optimized, best_plan
from gpp_plugin.plan.stage_names import find_stage, name_stages, namer_of
from gpp_plugin.plan.validate_plan import validate_for
from gpp_plugin.schedule.orders.async_1f1b import asynchronous_in_flight, check_asynchronous

# Micro-batch sizes by the names that a plan gives its stages (``vision_model.0-1``), applied to the finished plan.


def names_a_stage(graph: BlockGraph, key: str) -> bool:
    """Return whether ``key`` can only be a stage's name, or a part of one (``vision_model.0``).

    Raises:
        PlanError: it is neither that, nor a module path, nor ``loss``; the message has the nearest names.
    """
    if key == "*":
        return False
    try:
        blocks_under(graph, key)
    except PlanError:
        if not namer_of(graph).may_name(key):
            raise PlanError(f"no module or stage {key!r} in the model{nearest_names(graph, key)}") from None
        return True
    return False


def stage_sizes(plan: PipelinePlan, graph: BlockGraph, sizes: Mapping[str, int]) -> dict[int, int]:
    """Return the requested sizes by the index of the stage that each key means.

    Raises:
        PlanError: a key means no stage or several, or two keys ask one stage for different sizes.
    """
    requested: dict[int, int] = {}
    for key, size in sizes.items():
        index = find_stage(plan, graph, key)
        if requested.setdefault(index, size) != size:
            raise PlanError(
                f"{key!r} sets {size} samples at a time for stage {plan.stages[index].name!r} and another key sets "
                f"{requested[index]}; remove one of them"
            )
    return requested


def resize_stages(plan: PipelinePlan, request: PlanRequest, sizes: Mapping[str, int]) -> PipelinePlan:
    """Return ``plan`` with micro-batches of ``sizes`` (by stage name), in-flight counts and costs following.

    Raises:
        PlanError: there is no such stage, or its ranks or operators do not allow the size.
        PlanInfeasible: the memory does not suffice.
    """
    # The stages stay and all that follows from sizes is made anew, in this order: times a micro-batch, in-flight
    # counts, memory, and what must be swapped or recomputed for it to fit. Stages a -> b of one rank each with 4
    # samples, b with 8 requested, mini-batches of 32:
    #
    #     micro-batches   a  8 of 4, b  4 of 8       two of a's make one of b's
    #     in flight       a  2 -> 4, b  1            two that b computes on, and two for b's next task
    #
    # Rules are made without ``keep_units``: that a stage takes units is a default, which naming it overrules.
    requested = stage_sizes(plan, request.graph, sizes)
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(dataclasses.replace(request, keep_units=False))
    stages = []
    for index, stage in enumerate(plan.stages):
        size = requested.get(index, stage.micro_batch_size)
        if size != stage.micro_batch_size:
            if rules.micro_batch_size(stage.blocks, stage.degree, size) != size:
                unit = request.loss_unit * stage.degree
                is_coupled = not rules.coupled.isdisjoint(stage.blocks)
                why = (
                    f"mixes samples and takes {unit} at a time"
                    if is_coupled
                    else "has as many ranks to share it"
                )
                raise PlanError(
                    f"stage {stage.name!r} of {stage.degree} ranks cannot take {size} samples at a time: it {why}"
                )
        resized = dataclasses.replace(stage, micro_batch_size=size)
        forward, backward = costs.times_of(resized)
        stages.append(dataclasses.replace(resized, forward_us=forward, backward_us=backward))
    plan = with_in_flight(dataclasses.replace(plan, stages=tuple(stages)), costs)
    fitter = fitter_for(request, costs)
    if fitter is not None:
        plan = fitter.fitted(plan)
    plan = complete_plan(plan, request.graph, request.profile)
    validate_for(plan, request)
    return plan


# Makes an asynchronous plan of one that was planned to step once a mini-batch.
#
# Stages and ranks stay. Each stage runs 1F1B and holds as many micro-batches as an endless pipeline needs, counted
# from the sinks and not limited by the mini-batch, and with them sets of weights (`PipelinePlan.num_versions`); what
# it swaps and recomputes is chosen anew for that, where the request allows any.


def to_asynchronous(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return ``plan`` for mode async: in-flight counts, memory with stashed weights, and time.

    Raises:
        PlanError: its stages cannot step after every micro-batch, or it counts on its schedule.
    """
    has_memory = any(stage.memory is not None for stage in plan.stages)
    if plan.planner == STOCK or (has_memory and not request.memory_optimization):
        why = (
            "is DeepSpeed's synchronous pipeline; choose another planner"
            if plan.planner == STOCK
            else "swaps or recomputes, which mode async chooses anew and is not allowed to; write "
            f"{setting_of('memory.recompute', 'auto')} or {setting_of('memory.swap', 'auto')}"
        )
        raise PlanError(f"mode async: the plan of {plan.planner!r} {why}")
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    counts = asynchronous_in_flight(plan)
    stages = tuple(
        dataclasses.replace(
            stage, schedule="1f1b", k=1, num_sliced=0, joins_last_slice=False, in_flight=count, memory=None
        )
        for stage, count in zip(plan.stages, counts, strict=True)
    )
    made = dataclasses.replace(plan, stages=stages, mode="async", vertical_sync=request.vertical_sync)
    check_asynchronous(made)
    fitter = fitter_for(request, costs)
    fitted = tuple(_fitted(made, index, costs, fitter) for index in range(len(stages)))
    made = dataclasses.replace(made, stages=fitted)
    return dataclasses.replace(made, iteration_us=evaluate_us(made, costs))


def _fitted(plan: PipelinePlan, index: int, costs: CostModel, fitter: StageFitter | None) -> Stage:
    """Return a stage with its times and memory, and with what makes it fit."""
    stage = plan.stages[index]
    held = costs.memory_of(stage, stage.in_flight)
    stashed = costs.on(stage).stashed_bytes(costs.indices(stage.blocks), plan.num_versions(index))
    stage = dataclasses.replace(stage, backward_us=costs.times_of(stage)[1], memory_bytes=held + stashed)
    return stage if fitter is None else fitter.fitted_stage(stage, stashed_bytes=stashed)


EXPLICIT = "given"
"""What such plans name as their planner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedStage:
    """A stage that the user defines.

    Args:
        name: as the user gave it; of a captured part's piece that of the part.
        ranks: its grid, row by row; ``context`` x ``tensor`` of them a data position.
        micro_batch_size: None leaves it to the planner.
        is_piece: one of several stages of a captured part, called after what it holds (``tower.0-1``).
    """

    name: str
    blocks: tuple[str, ...]
    ranks: tuple[int, ...]
    tensor: int = 1
    micro_batch_size: int | None = None
    is_piece: bool = False
    context: int = 1

    @property
    def degree(self) -> int:
        """Return the data-parallel degree."""
        return len(self.ranks) // (self.context * self.tensor)


def fixed_plan(stages: Sequence[FixedStage], request: PlanRequest) -> PipelinePlan:
    """Return the quickest plan of these stages; those that lack memory swap or recompute where the request allows it.

    Raises:
        PlanError: a micro-batch size is requested twice, or does not divide the mini-batch.
        PlanInfeasible: a stage has no micro-batch size, or lacks memory.
    """
    stages = _with_names(stages, request.graph)
    rules = _rules(stages, request)
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    groups, degrees = [stage.blocks for stage in stages], [stage.degree for stage in stages]
    candidates = [
        [
            dataclasses.replace(
                draft, name=stage.name, ranks=stage.ranks, tensor=stage.tensor, context=stage.context
            )
            for draft, stage in zip(drafts, stages, strict=True)
        ]
        for drafts in (make_drafts(rules, groups, degrees, wish) for wish in rules.sizes_to_try)
        if drafts is not None
    ]
    if not candidates:
        _explain_memory(stages, rules)
    plan = best_plan(request, costs, candidates, planner=EXPLICIT)
    if request.mode == "sync":  # async chooses anew what to swap and recompute
        optimized = best_optimized(request, costs, candidates, planner=EXPLICIT)
        if optimized is not None and (plan is None or optimized.iteration_us < plan.iteration_us):
            plan = optimized
    if plan is None:  # too large: the validator says what for
        plan = build_plan(request, candidates[0], planner=EXPLICIT, costs=costs)
    return in_mode(plan, request)


def in_mode(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return a plan of explicit stages in the request's mode, complete and validated."""
    if request.mode == "async":
        plan = to_asynchronous(plan, request)
    plan = complete_plan(plan, request.graph, request.profile)
    validate_for(plan, request)
    return plan


def _with_names(stages: Sequence[FixedStage], graph: BlockGraph) -> list[FixedStage]:
    """Return the stages with names of their own for the pieces of captured parts, which begin with the part's."""
    explicit = [None if stage.is_piece else stage.name for stage in stages]
    names = name_stages(graph, [stage.blocks for stage in stages], explicit)
    return [
        dataclasses.replace(
            stage,
            name=f"{stage.name}.{name}" if stage.is_piece and not name.startswith(f"{stage.name}.") else name,
        )
        for stage, name in zip(stages, names, strict=True)
    ]


def _rules(stages: Sequence[FixedStage], request: PlanRequest) -> BatchRules:
    rules = batch_rules(request)
    fixed = dict(rules.fixed)
    for stage in stages:
        size = stage.micro_batch_size
        if size is None:
            continue
        requested = {fixed[block] for block in stage.blocks if block in fixed} - {size}
        if requested:
            raise PlanError(
                f"stage {stage.name!r}: micro_batch_size {size} is given with the stage and {requested.pop()} in "
                f"{place_of('micro_batch_sizes')}; remove one of them"
            )
        if rules.mini_batch % size:
            raise PlanError(
                f"stage {stage.name!r}: micro_batch_size {size} does not divide the mini-batch of "
                f"{rules.mini_batch}; choose a divisor"
            )
        fixed.update(dict.fromkeys(stage.blocks, size))
    return _with_fixed(rules, fixed, request)


def _with_fixed(rules: BatchRules, fixed: dict[str, int], request: PlanRequest) -> BatchRules:
    """Return the rules with explicit sizes: they win over the wish to keep units, never over what mixes samples."""
    coupled = (rules.coupled - fixed.keys()) | coupled_blocks(request.graph)
    return dataclasses.replace(rules, fixed=fixed, coupled=coupled)


def _explain_memory(stages: Sequence[FixedStage], rules: BatchRules) -> None:
    """Say which stage has no micro-batch size.

    Raises:
        PlanInfeasible: always.
    """
    for stage in stages:
        if any(rules.micro_batch_size(stage.blocks, stage.degree, wish) for wish in rules.sizes_to_try):
            continue
        unit = rules.loss_unit * stage.degree
        why = (
            f"{stage.degree} data positions must divide a micro-batch and that the mini-batch"
            if rules.coupled.isdisjoint(stage.blocks)
            else f"it computes whole loss units of {rules.loss_unit}, so {unit} at a time"
        )
        requested_size = f" of {stage.micro_batch_size}" if stage.micro_batch_size is not None else ""
        grid = f"{stage.degree} x {stage.context * stage.tensor}"
        raise PlanInfeasible(
            f"stage {stage.name!r} on {grid} ranks has no micro-batch size{requested_size} "
            f"for a mini-batch of {rules.mini_batch}: {why}; change its ranks or sizes"
        )
    raise PlanInfeasible(
        f"no micro-batch size suits all stages of a mini-batch of {rules.mini_batch} with loss units of "
        f"{rules.loss_unit}; give micro_batch_size per stage"
    )


LONGEST_NAME = 200
"""Characters of a stage's name."""
_STAGE_KEYS = {"name", "modules", "ranks", "devices", "micro_batch_size", "k", "context"}


def explicit_plan(spec: dict[str, Any], request: PlanRequest) -> PipelinePlan:
    """Return the plan a user wrote down.

    Args:
        spec: ``{"stages": [{"name": "vision", "modules": ["vision_model"], "devices": 2,
            "micro_batch_size": 4}, ..., {"name": "head", "modules": ["*"]}]}``. A module path stands
            for every block under it; the longest path that names a block wins; ``*`` is everything
            that no other stage names. ``ranks`` lists ranks, ``devices`` counts them; where neither
            is listed the ranks left over are shared out. Stages that list the same ranks share them.
            ``context`` of them a data position have parts of the positions of the same samples. A
            stage without a name is called after what it holds. Or the JSON of a saved `PipelinePlan`.

    Raises:
        PlanError: the description is malformed or names what the model does not have.
        PlanInfeasible: the stages do not fit the ranks or their memory.
    """
    if is_envelope(spec):
        return _saved_plan(spec, request)
    stages = spec.get("stages")
    if not isinstance(stages, list) or not stages or set(spec) - {"stages"}:
        raise PlanError(
            'plan: expected {"stages": [{"name": ..., "modules": [...]}, ...]}, found keys '
            f"{sorted(map(str, spec))[:8]}"
        )
    for i, stage in enumerate(stages):
        _check_stage(i, stage, request.mini_batch)
    _check_listed_ranks(stages, request.num_ranks)
    groups = _assign_blocks(stages, request)
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = _rules_with(request, stages, groups)
    degrees = _explicit_degrees(stages, request.num_ranks)
    listed = [degree for degree in degrees if degree is not None]
    if len(listed) == len(degrees):
        candidates = [make_drafts(rules, groups, listed, w) for w in rules.sizes_to_try]
    elif listed:
        raise PlanError("plan: give ranks or devices for every stage or for none")
    else:
        candidates = [choose_degrees(request, costs, rules, groups, w) for w in rules.sizes_to_try]
    drafts = [
        [
            dataclasses.replace(
                draft,
                name=_stage_name(stage, draft.blocks, request),
                ranks=tuple(stage["ranks"]) if "ranks" in stage else None,
                k=stage.get("k", 1),
                context=stage.get("context", 1),
            )
            for draft, stage in zip(candidate, stages, strict=True)
        ]
        for candidate in candidates
        if candidate is not None
    ]
    if not drafts:
        _explain(stages, groups, degrees, rules)
    plan = best_plan(request, costs, drafts, planner="explicit")
    if plan is None:
        plan = best_optimized(request, costs, drafts, planner="explicit")
    if plan is None:  # too large: the validator says what for
        plan = build_plan(request, drafts[0], planner="explicit", costs=costs)
    return in_mode(plan, request)


def _saved_plan(spec: dict[str, Any], request: PlanRequest) -> PipelinePlan:
    try:
        plan = plan_of_envelope(spec)
    except GppError as error:
        raise PlanError(f"plan: {error}") from error
    if plan.graph != request.graph.fingerprint:
        plan = _refit(plan, request)
    made = (plan.num_ranks, plan.mini_batch, plan.loss_unit)
    wanted = (request.num_ranks, request.mini_batch, request.loss_unit)
    if made != wanted:
        raise PlanError(
            "plan: made for {} ranks, a mini-batch of {} and losses of {} samples; the run has {}, {} and {}; plan "
            "again".format(*made, *wanted)
        )
    if plan.mode != request.mode:
        raise PlanError(f"plan: made for mode {plan.mode}, and the run is {request.mode}; plan again")
    if plan.vertical_sync != request.vertical_sync:
        has, required = ("with", "without") if plan.vertical_sync else ("without", "with")
        raise PlanError(f"plan: made {has} vertical sync, and the run is {required}; plan again")
    for stage in plan.stages:
        memory = stage.memory
        used = {"swap": memory and memory.swapped, "recompute": memory and memory.recomputed}
        refused = [way for way, what in used.items() if what and way not in request.memory_optimization]
        if refused:
            raise PlanError(
                f"plan: stage {stage.name!r} needs {refused[0]}, which this run does not do; plan again without"
            )
    # a user's modules know their sizes
    for stage in plan.stages if plan.planner != EXPLICIT else ():
        axes = (("tensor", request.graph.sharding), ("context", request.graph.context))
        for axis, known in axes:
            if getattr(stage, axis) > 1 and not known:
                raise PlanError(
                    f"plan: stage {stage.name!r} has a {axis} size of {getattr(stage, axis)} and nothing of model "
                    f"{request.graph.model!r} can be divided among {axis} ranks; plan again with a {axis} size of 1"
                )
    validate_for(plan, request)
    return plan


def _refit(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return a plan made for other shapes or another precision of this model, with this graph's sizes and times.

    Raises:
        PlanError: the blocks are others, or the plan swaps or recomputes tensors of the shapes it was made for.
    """
    # What a plan decides stays: stages, ranks, micro-batches, in-flight counts and order. What it was made for is this
    # run's: times, memory, edges, the graph it is of. A plan made at 512 tokens and run at 1024 keeps its four stages,
    # whose memory is then counted anew and refused by `validate_for` where it no longer fits. Times of half a forward
    # and of split backwards are 0 (unknown), rather than those of other shapes. Tensors to swap or recompute are listed
    # with their bytes, so a plan that has any cannot be fitted.
    graph = request.graph
    planned = {block for stage in plan.stages for block in stage.blocks}
    differ = sorted(planned ^ {block.name for block in graph.blocks})
    is_fixed = any(stage.memory is not None for stage in plan.stages)
    if differ or is_fixed:
        why = (
            "it swaps or recomputes tensors"
            if is_fixed
            else f"{len(differ)} blocks differ, such as {differ[0]!r}"
        )
        raise PlanError(
            f"plan: made for graph {plan.graph} of model {plan.model!r}; this model's graph is {graph.fingerprint} "
            f"and {why}; plan again"
        )
    costs = CostModel(graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    stages = []
    for index, stage in enumerate(plan.stages):
        forward, backward = costs.times_of(stage)
        memory = costs.memory_of(stage, stage.in_flight) + pending_bytes(stage, costs, stage.pending)
        memory += costs.on(stage).stashed_bytes(costs.indices(stage.blocks), plan.num_versions(index))
        stages.append(
            dataclasses.replace(
                stage,
                forward_us=forward,
                backward_us=backward,
                half_forward_us=0.0,
                input_gradient_us=0.0,
                weight_gradient_us=0.0,
                memory_bytes=memory,
            )
        )
    reckoned = {(edge.src, edge.dst): (edge.message_us, edge.gradient_us) for edge in plan.edges}
    edges = [
        dataclasses.replace(edge, message_us=there, gradient_us=back)
        for edge in stage_edges(graph, [s.blocks for s in stages], [s.context for s in stages], costs=costs)
        for there, back in [reckoned.get((edge.src, edge.dst), (0.0, 0.0))]
    ]
    fitted = dataclasses.replace(
        plan,
        graph=graph.fingerprint,
        stages=tuple(stages),
        edges=tuple(edges),
        notes=(*plan.notes, "made for other shapes or another precision; sizes and times are this run's"),
    )
    fitted = dataclasses.replace(fitted, iteration_us=evaluate_us(fitted, costs))
    return complete_plan(fitted, graph, request.profile)


def _check_stage(i: int, stage: Any, mini_batch: int) -> None:
    where = f"plan.stages[{i}]"
    if not isinstance(stage, dict):
        raise PlanError(f"{where}: expected an object, found {type(stage).__name__}")
    unknown = sorted(map(str, set(stage) - _STAGE_KEYS))
    if unknown:
        raise PlanError(f"{where}: unknown keys {unknown}; the keys are {sorted(_STAGE_KEYS)}")
    modules = stage.get("modules")
    if not isinstance(modules, list) or not modules or not all(isinstance(m, str) for m in modules):
        raise PlanError(f'{where}.modules: expected a list of module paths, such as ["vision_model"]')
    if "name" in stage and not (isinstance(stage["name"], str) and 0 < len(stage["name"]) <= LONGEST_NAME):
        raise PlanError(
            f"{where}.name: expected a text of 1 to {LONGEST_NAME} characters, found {show(stage['name'])}"
        )
    for key in ("devices", "micro_batch_size", "k", "context"):
        if key in stage and (
            isinstance(stage[key], bool) or not isinstance(stage[key], int) or stage[key] < 1
        ):
            raise PlanError(f"{where}.{key}: expected a positive integer, found {show(stage[key])}")
    if stage.get("k", 1) > mini_batch:
        raise PlanError(
            f"{where}.k: {show(stage['k'])}, and a mini-batch of {mini_batch} samples has at most as many "
            f"micro-batches; give 1 to {mini_batch}"
        )
    ranks = stage.get("ranks", [0])
    is_list = isinstance(ranks, list) and ranks and all(type(rank) is int and rank >= 0 for rank in ranks)
    if not is_list:
        raise PlanError(f"{where}.ranks: expected a list of ranks, found {show(ranks)}")
    if "ranks" in stage and "devices" in stage and stage["devices"] != len(ranks):
        raise PlanError(
            f"{where}: devices is {stage['devices']} and {len(ranks)} ranks are listed; keep one of them"
        )
    context, count = stage.get("context", 1), stage.get("devices", len(stage.get("ranks", ())))
    if context > 1 and (not count or count % context):
        found = f"{count} ranks are no multiple of it" if count else "neither ranks nor devices are given"
        raise PlanError(
            f"{where}.context: {context}, and {found}; give the stage a multiple of {context} ranks"
        )


def _check_listed_ranks(stages: list[dict[str, Any]], num_ranks: int) -> None:
    for i, stage in enumerate(stages):
        ranks = stage.get("ranks", ())
        wrong = [rank for rank, count in Counter(ranks).items() if rank >= num_ranks or count > 1]
        if wrong:
            raise PlanError(
                f"plan.stages[{i}].ranks: lists rank {wrong[0]}; the run has 0 to {num_ranks - 1}, each once a stage"
            )


def _assign_blocks(stages: list[dict[str, Any]], request: PlanRequest) -> list[list[str]]:
    graph = request.graph
    rest = [i for i, stage in enumerate(stages) if "*" in stage["modules"]]
    if len(rest) > 1:
        raise PlanError(f'plan: stages {rest} both take "*" (everything else); only one can')
    paths = [(path, i) for i, stage in enumerate(stages) for path in stage["modules"] if path != "*"]
    for path, i in paths:
        if not any(is_under(block.name, path) for block in graph.blocks):
            raise PlanError(
                f"plan.stages[{i}].modules: no module {show(path)} in the model{nearest_names(graph, path)}"
            )
    groups: list[list[str]] = [[] for _ in stages]
    unnamed = []
    for block in graph.blocks:
        matching = [(path, i) for path, i in paths if is_under(block.name, path)]
        longest = max((len(path) for path, _ in matching), default=0)
        owners = sorted({i for path, i in matching if len(path) == longest})
        if len(owners) > 1:
            raise PlanError(f"plan: block {block.name!r} is claimed by stages {owners}; name it in one")
        if owners or rest:
            groups[owners[0] if owners else rest[0]].append(block.name)
        else:
            unnamed.append(block.name)
    if unnamed:
        raise PlanError(
            f'plan: {len(unnamed)} blocks are in no stage ({unnamed[:3]}); add "*" to one stage\'s modules'
        )
    for i, group in enumerate(groups):
        if not group:
            raise PlanError(
                f"plan.stages[{i}]: no block is left for it; others name all of {stages[i]['modules']}"
            )
    return groups


def _stage_name(stage: dict[str, Any], blocks: tuple[str, ...], request: PlanRequest) -> str | None:
    name: str | None = stage.get("name")
    if name == LOSS_KEY and set(request.graph.loss_blocks).isdisjoint(blocks):  # the key means another stage
        raise PlanError(f"plan: only the stage that yields the loss is named {LOSS_KEY!r}; rename this one")
    return name


def _rules_with(request: PlanRequest, stages: list[dict[str, Any]], groups: list[list[str]]) -> BatchRules:
    rules = batch_rules(request)
    fixed = dict(rules.fixed)
    for stage, group in zip(stages, groups, strict=True):
        if "micro_batch_size" in stage:
            if rules.mini_batch % stage["micro_batch_size"]:
                raise PlanError(
                    f"plan: micro_batch_size {stage['micro_batch_size']} of stage {stage.get('name', group[0])!r} "
                    f"does not divide the mini-batch of {rules.mini_batch}"
                )
            fixed.update(dict.fromkeys(group, stage["micro_batch_size"]))
    return _with_fixed(rules, fixed, request)


def _explicit_degrees(stages: list[dict[str, Any]], num_ranks: int) -> list[int | None]:
    counts = [len(stage["ranks"]) if "ranks" in stage else stage.get("devices") for stage in stages]
    if all(count is not None for count in counts):
        # ranks that are listed may be those of several stages
        listed = {rank for stage in stages for rank in stage.get("ranks", ())}
        counted = sum(stage["devices"] for stage in stages if "ranks" not in stage)
        total = len(listed) + counted
        if total != num_ranks:
            raise PlanError(
                f"plan: its stages use {total} ranks and the run has {num_ranks}; change devices or the run"
            )
    return [n if n is None else n // s.get("context", 1) for n, s in zip(counts, stages, strict=True)]


def _explain(
    stages: list[dict[str, Any]], groups: list[list[str]], degrees: list[int | None], rules: BatchRules
) -> None:
    for stage, group, degree in zip(stages, groups, degrees, strict=True):
        if degree is None:
            continue
        if not any(rules.micro_batch_size(group, degree, wish) for wish in rules.sizes_to_try):
            label = stage.get("name", group[0])
            coupled = sorted(set(group) & rules.coupled)
            why = (
                f"block {coupled[0]!r} computes whole loss units, {rules.loss_unit} samples a rank"
                if coupled
                else "the degree must divide the micro-batch and that the mini-batch"
            )
            raise PlanInfeasible(
                f"plan: stage {label!r} on {degree} data ranks has no micro-batch size for a mini-batch of "
                f"{rules.mini_batch}: {why}; change its devices or micro_batch_size"
            )
    raise PlanInfeasible(
        f"plan: {rules.num_ranks} ranks cannot be shared out among the {len(stages)} stages so that their degrees "
        f"divide a mini-batch of {rules.mini_batch} in loss units of {rules.loss_unit} and their memory suffices; "
        "give devices per stage, or other sizes"
    )
