"""An evaluator of plans that recomputes everything it checks, without the planners' code; what requests must be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import networkx as nx

from gpp_plugin.config.key_names import name_of, place_of, setting_of
from gpp_plugin.errors import PlanError, PlanInfeasible, ProfileError
from gpp_plugin.ir.block_graph import GRANULARITIES, BlockGraph
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.tensors import LayoutKind, nearest_divisors
from gpp_plugin.ir.typed_leaves import MOST_COUNT
from gpp_plugin.plan.plan_form import check_form, check_shards, check_stages
from gpp_plugin.plan.request import AXES, PlanRequest


def validate_plan(
    plan: PipelinePlan,
    graph: BlockGraph,
    *,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    memory_limit_bytes: int | None = None,
    zero_stage: int = 0,
) -> None:
    """Check a plan against the graph it claims to be for.

    Every block lies in one stage; stages are convex and their graph has no circle; the edges are
    those of the graph, with all its tensors; ranks are 0..n-1, and stages that share some run on grids
    that go together; micro-batches divide the mini-batch and ranks divide micro-batches; coupled stages
    compute whole loss units; tensors with one value a loss unit join stages that compute the same units;
    tensor ranks divide at least one block of their stage (what their size does not divide is whole on all
    of them); every stage may hold enough micro-batches to run and (with costs) its ranks have the memory
    for all they hold.

    Raises:
        PlanError: the plan is malformed.
        PlanInfeasible: the stages of a rank need more memory than its device has.
    """
    if plan.graph != graph.fingerprint:
        raise PlanError(
            f"the plan is for graph {plan.graph} and this model's graph is {graph.fingerprint}; "
            "plan again (another model, batch shape or granularity)"
        )
    check_stages(plan)
    _check_blocks(plan, graph)
    check_form(plan)
    if cluster is not None and plan.num_ranks > len(cluster.devices):
        raise PlanError(f"the plan uses {plan.num_ranks} ranks; {cluster.name!r} has {len(cluster.devices)}")
    _check_coupled(plan, graph)
    _check_sizes(plan, graph)
    _check_edges(plan, graph)
    if profile is None:
        return
    _check_memory_plans(plan, graph, profile)
    if profile.graph != plan.graph:
        raise PlanError(f"the profile is of graph {profile.graph}, the plan of {plan.graph}; profile again")
    held: dict[int, list[tuple[int, float]]] = {}
    gathered: dict[int, list[float]] = {}
    for index, stage in enumerate(plan.stages):
        need = _stage_bytes(stage, graph, profile, zero_stage, num_versions=plan.num_versions(index))
        whole = _parameter_bytes(stage, graph, profile)
        for rank in stage.ranks:
            held.setdefault(rank, []).append((index, need))
            # what of its parameters a rank of a stage holds only while a task runs (ZeRO 3)
            gathered.setdefault(rank, []).append(
                whole - whole / stage.num_replicas if zero_stage >= 3 else 0.0
            )
    for rank, needs in held.items():
        twice = sum(gathered[rank]) - max(gathered[rank])  # one stage's parameters are whole at a time
        limits = [limit for limit in (memory_limit_bytes,) if limit is not None]
        if cluster is not None:
            limits.append(cluster.devices[rank].memory_bytes)
        if limits and sum(need for _, need in needs) - twice > min(limits) + len(needs):
            raise PlanInfeasible(_too_much(plan, rank, needs, min(limits)))


def _check_blocks(plan: PipelinePlan, graph: BlockGraph) -> None:
    seen = {block: stage.name for stage in plan.stages for block in stage.blocks}
    known = {block.name for block in graph.blocks}
    unknown, missing = set(seen) - known, known - set(seen)
    if unknown:
        raise PlanError(f"the plan names blocks that the model does not have: {sorted(unknown)[:3]}")
    if missing:
        raise PlanError(f"{len(missing)} blocks are in no stage: {sorted(missing)[:3]}; add them to one")
    names = [stage.name for stage in plan.stages]
    yielding = {seen[block] for block in graph.loss_blocks}
    named = {names[index] for index in plan.loss_stages()}
    if (yielding or plan.losses) and yielding != named:
        raise PlanError(
            f"the stages that yield a loss are {sorted(yielding)}, the plan names {sorted(named)} in its losses; plan "
            "again"
        )
    full = graph.digraph()
    quotient = nx.DiGraph()
    quotient.add_nodes_from(names)
    quotient.add_edges_from((seen[a], seen[b]) for a, b in full.edges if seen[a] != seen[b])
    # An acyclic quotient implies that every stage is convex: a path that leaves a stage and comes
    # back would be a circle of stages.
    if not nx.is_directed_acyclic_graph(quotient):
        circle = [edge[0] for edge in nx.find_cycle(quotient)]
        raise PlanError(f"stages depend on each other in a circle: {' -> '.join([*circle, circle[0]])}")
    for position, stage in enumerate(plan.stages):
        for successor in quotient.successors(stage.name):
            if names.index(successor) <= position:
                raise PlanError(f"stage {successor!r} reads from {stage.name!r} and is listed before it")


def _check_coupled(plan: PipelinePlan, graph: BlockGraph) -> None:
    coupled = {block.name for block in graph.blocks if block.is_coupled}
    for stage in plan.stages:
        size, degree = stage.micro_batch_size, stage.degree
        mixing = sorted(coupled & set(stage.blocks))
        if mixing and size // degree != plan.loss_unit:
            raise PlanError(
                f"stage {stage.name!r}: block {mixing[0]!r} mixes samples and must compute whole loss units "
                f"of {plan.loss_unit}, but a rank computes {size // degree} of a micro-batch of {size} on "
                f"{degree} ranks; set its micro_batch_sizes to {plan.loss_unit * degree}"
            )


def _check_sizes(plan: PipelinePlan, graph: BlockGraph) -> None:
    """Refuse context and tensor sizes that blocks of the graph cannot have; explicit stages have rules of their own."""
    for axis, divisions in (("tensor", graph.sharding), ("context", graph.context)):
        degrees = {each.block: each.degrees for each in divisions}
        for stage in plan.stages if degrees else ():
            size = getattr(stage, axis)
            if size == 1:
                continue
            own = [name for name in stage.blocks if degrees.get(name)]
            if not own:
                raise PlanError(
                    f"stage {stage.name!r} has a {axis} size of {size} and none of its blocks can be divided; plan "
                    f"again with a {axis} size of 1 for it"
                )
            if not any(size in degrees[name] for name in own):
                raise PlanError(
                    f"stage {stage.name!r}: a {axis} size of {size} does not divide block {own[0]!r}, which can be "
                    f"divided by {', '.join(map(str, degrees[own[0]]))}, nor any other of its blocks; plan again"
                )

    shards = {each.block: each.degrees for each in graph.sharding}
    for stage in plan.stages:
        for each in graph.context if min(stage.grid) > 1 else ():
            both = each.block in stage.blocks and stage.tensor in shards.get(each.block, ())
            if both and stage.context in each.degrees and stage.model_parallel not in each.degrees:
                raise PlanError(
                    f"stage {stage.name!r}: context x tensor sizes of {stage.context} x {stage.tensor} do not divide "
                    f"the heads of block {each.block!r}; plan again with smaller ones"
                )


def _check_edges(plan: PipelinePlan, graph: BlockGraph) -> None:
    stage_of = {block: i for i, stage in enumerate(plan.stages) for block in stage.blocks}
    cutting = {(each.block, size) for each in graph.context for size in each.degrees}
    expected: dict[_EdgeKey, set[str]] = {}
    for block_edge in graph.edges:
        ends = stage_of[block_edge.src], stage_of[block_edge.dst]
        src, dst = plan.stages[ends[0]], plan.stages[ends[1]]
        for tensor in block_edge.tensors if src is not dst else ():
            key = (*ends, block_edge.src_shard_axis, block_edge.dst_shard_axis)
            if tensor in graph.position_axes:
                axis = graph.position_axes[tensor]
                has_parts = (block_edge.src, src.context) in cutting, dst.context > 1
                key = (*ends, axis if has_parts[0] else None, axis if has_parts[1] else None)
            expected.setdefault(key, set()).add(tensor)
    found = {(edge.src, edge.dst, edge.src_shard_axis, edge.dst_shard_axis): edge for edge in plan.edges}
    if set(found) != set(expected):
        names = sorted((plan.stages[k[0]].name, plan.stages[k[1]].name) for k in set(found) ^ set(expected))
        raise PlanError(
            f"the plan's edges differ from the model's between stages {names}, in what they send or the axes of its "
            "parts; plan again"
        )
    for key, edge in found.items():
        src, dst = plan.stages[key[0]], plan.stages[key[1]]
        tensors = {name: graph.tensors[name] for name in expected[key]}
        name = f"{src.name} -> {dst.name}"
        check_shards(name, src, edge.src_shard_axis, tensors.values())
        check_shards(name, dst, edge.dst_shard_axis, tensors.values())
        batch = {n for n, spec in tensors.items() if spec.layout.kind is LayoutKind.BATCH}
        grads = {n for n, spec in tensors.items() if spec.requires_grad}
        if set(edge.batch_tensors) != batch or set(edge.whole_tensors) != set(tensors) - batch:
            raise PlanError(f"edge {src.name!r} -> {dst.name!r} lists {edge.batch_tensors + edge.whole_tensors}; "
                            f"the model has {sorted(tensors)} there")  # fmt: skip
        if set(edge.gradient_tensors) != grads:
            raise PlanError(f"edge {src.name!r} -> {dst.name!r} returns gradients of {edge.gradient_tensors}; "
                            f"those of {sorted(grads)} are needed")  # fmt: skip
        units = [n for n, spec in tensors.items() if spec.layout.kind is LayoutKind.UNIT]
        for stage in (src, dst) if units else ():
            if stage.local_batch_size != plan.loss_unit:
                raise PlanError(
                    f"stage {stage.name!r}: tensor {units[0]!r} has one value a loss unit of {plan.loss_unit} "
                    f"samples and a rank computes {stage.local_batch_size}; set its micro_batch_sizes to "
                    f"{plan.loss_unit * stage.degree}"
                )


_EdgeKey = tuple[int, int, int | None, int | None]
"""Producer, consumer, and the axes along which they hold shards."""


def _too_much(plan: PipelinePlan, rank: int, needs: Sequence[tuple[int, float]], limit: int) -> str:
    """Return the error for a rank that holds more than it can.

    Args:
        needs: (stage, bytes) of all stages on it.
    """
    total = sum(need for _, need in needs)
    if len(needs) > 1:
        each = ", ".join(
            f"{plan.stages[index].name!r} {need / 1e9:.3f} with {plan.stages[index].in_flight} micro-batches of "
            f"{plan.stages[index].local_batch_size} samples in flight"
            for index, need in needs
        )
        return (
            f"rank {rank} holds {len(needs)} stages that need {total / 1e9:.3f} GB together ({each}) and may use "
            f"{limit / 1e9:.3f} GB: {total - limit:.0f} bytes too many; lower {name_of('micro_batch_sizes')} or "
            f"{name_of('virtual_stages')}, add ranks, or raise {name_of('memory.limit_gb')}"
        )
    index = needs[0][0]
    stage, count = plan.stages[index], plan.num_versions(index)
    versions = f" and {count} versions of its weights" if count > 1 else ""
    return (
        f"stage {stage.name!r} needs {total / 1e9:.3f} GB on rank {rank} and may use "
        f"{limit / 1e9:.3f} GB: {total - limit:.0f} bytes too many with "
        f"{stage.in_flight} micro-batches of {stage.local_batch_size} samples in flight"
        f"{versions}; "
        f"lower {name_of('micro_batch_sizes')}, add ranks or stages, or raise {name_of('memory.limit_gb')}"
    )


def _parameter_bytes(stage: Stage, graph: BlockGraph, profile: Profile) -> float:
    """Return the bytes of a stage's parameters, or of one tensor rank's part of them."""
    costs, (weights, _, _) = profile.by_block(), _tensor_shares(stage, graph)
    whole = sum(costs[block].parameter_bytes * weights[block] for block in stage.blocks)
    for tie in profile.tied:
        again = sum(block in stage.blocks for block in tie.blocks) - 1
        whole -= max(again, 0) * tie.parameter_bytes * weights.get(tie.blocks[0], 1.0)
    return whole


def _stage_bytes(
    stage: Stage, graph: BlockGraph, profile: Profile, zero_stage: int, *, num_versions: int
) -> float:
    """Return what one rank of a stage needs: `memory_formula` written a second time, on purpose."""
    costs = profile.by_block()
    own = [costs[block] for block in stage.blocks]
    weights, trained, saved_factor = _tensor_shares(stage, graph)
    parameter = sum(c.parameter_bytes * weights[c.block] for c in own)
    gradients = sum(c.gradient_bytes * trained[c.block] for c in own)
    states = sum(c.optimizer_bytes * trained[c.block] for c in own)
    for tie in profile.tied:
        again = sum(block in costs and block in stage.blocks for block in tie.blocks) - 1
        if again > 0:
            first = tie.blocks[0]
            parameter -= again * tie.parameter_bytes * weights.get(first, 1.0)
            gradients -= again * tie.gradient_bytes * trained.get(first, 1.0)
            states -= again * tie.optimizer_bytes * trained.get(first, 1.0)
    optimizer = states / (stage.num_replicas if zero_stage >= 1 else 1)
    gradient = gradients / (stage.num_replicas if zero_stage >= 2 else 1)
    local = stage.local_batch_size
    saved = sum((c.saved_bytes_per_sample * local + c.saved_bytes_fixed) * saved_factor[c.block] for c in own)
    for storage in profile.shared:
        first, *others = storage.blocks
        if first not in stage.blocks and not set(others).isdisjoint(stage.blocks):
            saved += (storage.bytes_per_sample * local + storage.bytes_fixed) * saved_factor.get(first, 1.0)
    transient = max(c.transient_bytes_per_sample * local * saved_factor[c.block] for c in own)
    if stage.memory is not None:
        saved -= sum(t.bytes for t in stage.memory.swapped)
        saved -= sum(s.bytes - s.held_bytes for s in stage.memory.recomputed)
        transient += stage.memory.working_bytes
    transient += stage.pending * sum(c.pending_bytes_per_sample * local * saved_factor[c.block] for c in own)
    if zero_stage >= 2 and stage.num_replicas > 1:  # a backward's gradients are whole until they are reduced
        transient += max(gradients - saved, 0.0)
    stashed = (num_versions - 1) * gradients  # older versions of what is trained
    held = parameter + stashed + gradient + optimizer + profile.input_bytes(stage.blocks, stage.degree)
    return float(held + stage.in_flight * saved + transient)


def _tensor_shares(
    stage: Stage, graph: BlockGraph
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return by block what one rank of the stage has of parameters, of what is trained and what is saved."""
    parameters, trained, saved = ({block.name: 1.0 for block in graph.blocks} for _ in range(3))
    saving = 1.0 - 1.0 / stage.tensor
    for each in graph.sharding if stage.tensor > 1 else ():
        if stage.tensor not in each.degrees:
            continue
        block = graph.block(each.block)
        if block.parameter_bytes:
            parameters[block.name] -= saving * each.parameter_bytes / block.parameter_bytes
        if block.trainable_bytes:
            trained[block.name] -= saving * each.trainable_bytes / block.trainable_bytes
        saved[block.name] -= saving * each.saved_share
    for each in graph.context if stage.context > 1 else ():
        if stage.context in each.degrees:
            sharded = any(s.block == each.block and stage.tensor in s.degrees for s in graph.sharding)
            groups = each.groups // stage.tensor if sharded else each.groups
            more = stage.context // math.gcd(stage.context, groups) - 1 if groups else 0
            share = 1.0 - (1.0 - 1.0 / stage.context) * each.saved_share
            more_bytes = more * each.group_bytes + each.twice_bytes
            share += more_bytes / stage.context / max(graph.block(each.block).saved_bytes, 1)
            saved[each.block] *= share
    return parameters, trained, saved


def _check_memory_plans(plan: PipelinePlan, graph: BlockGraph, profile: Profile) -> None:
    """Every tensor swapped or dropped is saved by the stage, once; segments are consecutive blocks of it."""
    # Why a segment is consecutive blocks, and why the users of a dropped tensor are in it: backward runs the segment's
    # forward again from its first block's inputs, all at once, and throws what it makes away after the segment's
    # backward. In a stage of blocks 0 to 3 with segment (1, 2):
    #
    #     made by 1, saved by 2          may be dropped: there again when 2 and 1 run backward
    #     made by 1, saved by 3          may not: 3 runs backward before the segment is there again
    #     made by 2, sent to a stage     may not: it is read while it is not there
    #
    # A user's module has no such tensors in the graph; what of it is swapped follows the profile's storages.
    tensors = {tensor.name: tensor for tensor in graph.saved}
    for stage in plan.stages:
        if stage.memory is None:
            continue
        place = {block: i for i, block in enumerate(stage.blocks)}
        swapped = [t.name for t in stage.memory.swapped]
        dropped = [name for segment in stage.memory.recomputed for name in segment.tensors]
        twice = sorted(name for name, count in Counter([*swapped, *dropped]).items() if count > 1)
        if twice:
            raise PlanError(
                f"stage {stage.name!r}: tensor {twice[0]!r} is swapped or recomputed twice; keep one"
            )
        module = profile.module(stage.blocks)
        own = set(module.storage_names) if module is not None else set()
        for name in (*(name for name in swapped if name not in own), *dropped):
            if name not in tensors or place.keys().isdisjoint(tensors[name].kept_by):
                raise PlanError(
                    f"stage {stage.name!r}: tensor {name!r} is not one that it keeps for backward"
                )
        taken: set[str] = set()
        for segment in stage.memory.recomputed:
            places = [place.get(block, -1) for block in segment.blocks]
            if not places or places != list(range(places[0], places[0] + len(places))) or places[0] < 0:
                raise PlanError(
                    f"stage {stage.name!r}: a recomputed segment is not consecutive blocks: {segment.blocks[:3]}"
                )
            if not taken.isdisjoint(segment.blocks):
                raise PlanError(f"stage {stage.name!r}: recomputed segments overlap at {segment.blocks[0]!r}")
            taken.update(segment.blocks)
            for name in segment.tensors:
                users = {tensors[name].made_by, *tensors[name].kept_by}
                users |= {
                    edge.dst
                    for edge in graph.edges
                    if not {name, *tensors[name].views}.isdisjoint(edge.tensors)
                }
                if not users <= set(segment.blocks):
                    raise PlanError(
                        f"stage {stage.name!r}: tensor {name!r} is dropped and blocks outside its segment use it: "
                        f"{sorted(users - set(segment.blocks))[:3]}"
                    )


# Checks a plan against the request it is for; `validate_plan` itself needs no request and no planner.


def validate_for(plan: PipelinePlan, request: PlanRequest) -> None:
    """Refuse a plan that is not one of the request's graph, on its cluster, within its memory.

    Raises:
        PlanError, PlanInfeasible: as `validate_plan`.
    """
    validate_plan(
        plan,
        request.graph,
        profile=request.profile,
        cluster=request.cluster,
        memory_limit_bytes=request.memory_limit_bytes,
        zero_stage=request.zero_stage,
    )


# What a request must be, before any planner sees it.


def check_request(request: PlanRequest) -> None:
    """Refuse what no planner could answer.

    Raises:
        PlanError: a value contradicts another one or the graph.
        PlanInfeasible: more stages than blocks or ranks.
    """
    # Once, here, so that planners may count on it. Samples divide twice: 48 in a mini-batch, 8 in a loss unit, 12 in
    # a stage's micro-batch pass (48 = 6 * 8 = 4 * 12); a unit of 10 or a micro-batch of 9 would leave a rest that no
    # task computes. 12 and 8 need not divide each other: a stage without coupled blocks does not see units.
    r = request
    num_blocks = len(r.graph.blocks)
    if num_blocks == 0:
        raise PlanError(f"model {r.graph.model!r} has no blocks to plan; capture it again")
    try:
        r.profile.check([block.name for block in r.graph.blocks])
    except ProfileError as error:
        raise PlanError(str(error)) from error
    if not 1 <= r.num_ranks <= len(r.cluster.devices):
        raise PlanError(
            f"{r.num_ranks} ranks are wanted and cluster {r.cluster.name!r} has {len(r.cluster.devices)} "
            "devices; change the number of ranks or the cluster description"
        )
    counts = {"mini_batch": r.mini_batch, "loss_unit": r.loss_unit, "stages": r.num_stages}
    counts |= {"data_parallel": r.data_parallel, "virtual_stages": r.virtual_stages}
    for key, count in counts.items():
        if count is not None and not 1 <= count <= MOST_COUNT:
            raise PlanError(f"{place_of(key)}: {count} is not valid; give 1 to {MOST_COUNT}")
    if r.mini_batch % r.loss_unit:
        raise PlanError(
            f"the loss unit of {r.loss_unit} samples does not divide the mini-batch of {r.mini_batch}; "
            f"{name_of('mini_batch')} must be a multiple of {name_of('loss_unit')}"
        )
    if r.schedule not in ("1f1b", "gpipe"):
        raise PlanError(f"no schedule {r.schedule!r}; choose 1f1b or gpipe")
    if r.mode not in ("sync", "async"):
        raise PlanError(f"no mode {r.mode!r}; choose sync or async")
    most = 2 if r.mode == "async" else 3
    if not 0 <= r.zero_stage <= most:
        why = " in mode async, which needs several versions of the weights at a time" if most == 2 else ""
        raise PlanError(f"{place_of('zero')}: {r.zero_stage} is not valid{why}; give 0 to {most}")
    if r.vertical_sync and r.mode == "sync":
        raise PlanError(
            f"{place_of('vertical_sync')}: has no meaning in mode sync, where all stages step at once; write "
            f"{setting_of('mode', 'async')} or remove it"
        )
    for axis in AXES if r.mode == "async" else ():
        if axis.wanted(r) not in (1, None):
            raise PlanError(
                f"{place_of(axis.key)}: {axis.wanted(r)} is not possible in mode async, which is planned "
                f"without {axis.ranks}; write {setting_of(axis.key, 1)}, or {setting_of('mode', 'sync')}"
            )
    unknown = set(r.memory_optimization) - {"recompute", "swap"}
    if unknown:
        raise PlanError(f"no memory optimization {sorted(unknown)[0]!r}; choose from recompute and swap")
    _check_counts(r, num_blocks)
    _check_sharing(r, num_blocks)
    for key, size in (r.micro_batch_sizes or {}).items():
        if size < 1 or r.mini_batch % size:
            raise PlanError(
                f"{place_of('micro_batch_sizes', *([] if key == '*' else [key]))}: {size} does not divide "
                f"{name_of('mini_batch')} {r.mini_batch}; give "
                f"{' or '.join(map(str, nearest_divisors(r.mini_batch, size)))}"
            )


def _check_counts(r: PlanRequest, num_blocks: int) -> None:
    """Refuse numbers of stages and degrees that ranks and blocks cannot have."""
    if r.num_stages is not None and r.num_stages > num_blocks:
        raise PlanInfeasible(
            f"{place_of('stages')}: {r.num_stages} is more than the {num_blocks} blocks of the model; "
            f"write {setting_of('stages', num_blocks)}{finer_advice(r, r.num_stages)}"
        )
    if r.data_parallel is not None and r.num_ranks % r.data_parallel:
        raise PlanInfeasible(
            f"{place_of('data_parallel')}: {r.data_parallel} does not divide {r.num_ranks} ranks; give "
            f"{' or '.join(map(str, nearest_divisors(r.num_ranks, r.data_parallel)))}"
        )
    if (
        r.data_parallel is not None
        and r.num_stages is not None
        and not r.may_share_ranks
        and r.tensor_parallel == r.sequence_parallel == 1
        and r.data_parallel * r.num_stages != r.num_ranks
    ):
        raise PlanInfeasible(
            f"{r.num_stages} stages of {r.data_parallel} ranks are {r.num_stages * r.data_parallel} ranks, "
            f"not {r.num_ranks}; change {name_of('stages')}, {name_of('data_parallel')} or the number of ranks"
        )


def finer_advice(r: PlanRequest, num_stages: int) -> str:
    """Return advice to cut the model finer, where that can make so many blocks; "" where it cannot."""
    finer = GRANULARITIES[GRANULARITIES.index(r.granularity) + 1 :]
    # graphs that are only described have no operators: what a finer one has is unknown
    most = sum(len(block.nodes) for block in r.graph.blocks) or num_stages
    if not finer or most < num_stages:
        return ""
    return "".join(f", or {setting_of('granularity', one)}" for one in finer)


def _check_sharing(r: PlanRequest, num_blocks: int) -> None:
    """Refuse virtual stages that ranks, blocks or the mode cannot have."""
    # With v stages on each of p groups of d ranks, N = p d, there are v p stages: at most all blocks, and as many as
    # are wanted. Without d any divisor of N may be meant; the fewest stages of a pipeline are then 2 v.
    virtual = r.virtual_stages
    if not r.may_share_ranks:
        return
    for axis in AXES if r.must_share_ranks else ():
        if axis.wanted(r) not in (1, None):
            raise PlanError(
                f"{place_of(axis.key)}: {axis.wanted(r)} is not possible where ranks hold several stages; "
                f"write {setting_of('virtual_stages', 1)} and {setting_of('stages', r.num_ranks)} or less, or "
                f"{setting_of(axis.key, 1)}"
            )
    if r.mode == "async":
        wrong = "virtual_stages" if virtual != 1 else "colocate" if r.colocate else "stages"
        raise PlanError(
            f"{place_of(wrong)}: mode async has one stage a rank; write {setting_of('virtual_stages', 1)}, "
            f"{setting_of('colocate', 'off')} and {setting_of('stages', r.num_ranks)} or less, or "
            f"{setting_of('mode', 'sync')}"
        )
    if virtual is None or virtual == 1:
        return
    degrees = [d for d in range(1, r.num_ranks + 1) if r.num_ranks % d == 0 and r.data_parallel in (None, d)]
    degrees = [d for d in degrees if d < r.num_ranks] or degrees  # one group alone is no pipeline
    counts = {virtual * (r.num_ranks // d): d for d in degrees}
    if r.num_stages is not None and r.num_stages not in counts:
        possible = " or ".join(str(count) for count in sorted(counts))
        raise PlanInfeasible(
            f"{place_of('stages')}: {r.num_stages} is not possible with {setting_of('virtual_stages', virtual)}, "
            f"which makes {possible} stages on {r.num_ranks} ranks; change {name_of('stages')}, "
            f"{name_of('virtual_stages')} or {name_of('data_parallel')}"
        )
    fewest = min(counts) if r.num_stages is None else r.num_stages
    if fewest > num_blocks:
        degree = "" if r.data_parallel is None else f" with {setting_of('data_parallel', r.data_parallel)}"
        raise PlanInfeasible(
            f"{place_of('virtual_stages')}: {virtual} on {r.num_ranks} ranks{degree} makes at least "
            f"{fewest} stages and the model has {num_blocks} blocks; write "
            f"{setting_of('virtual_stages', max(num_blocks * virtual // fewest, 1))}{finer_advice(r, fewest)}"
        )
