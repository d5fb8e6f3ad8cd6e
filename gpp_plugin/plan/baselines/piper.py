"""Piper's partitioner (Tarnawski et al., NeurIPS 2021): a DP over downsets of the model's graph.

A downset is a set of blocks with all their predecessors; a stage is the difference of two. ``F[D][k]`` is
the smallest bottleneck of everything outside D on k devices; the stage next to D on d devices holds
ceil(k / d) micro-batches in flight, Piper's bound. Stages may span branches and are run as a chain.

Deviations: no tensor parallelism (so the sum of degrees is the number of devices) and no recomputation;
the degree divides the micro-batch, and so the number of samples a rank takes is whole; all micro-batch
sizes are tried. More than ``MAX_DOWNSETS`` downsets are refused, as Piper's own search does not end.

Source: Piper (NeurIPS 2021)
Tests: tests/plan/test_baselines.py
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.baselines.chain_costs import best_sequential
from gpp_plugin.plan.batch_rules import BatchRules, batch_rules
from gpp_plugin.plan.costs.cost_model import CostModel, Floats, link_for_span, ring_us
from gpp_plugin.plan.costs.memory_formula import held_bytes, peak_bytes, unreduced_bytes
from gpp_plugin.plan.make import StageDraft
from gpp_plugin.plan.request import PlanRequest, rank_limit
from gpp_plugin.plan.selection import explain_infeasible

MAX_DOWNSETS = 8_000


def piper_plan(request: PlanRequest) -> PipelinePlan:
    """Return the chain of stages over downsets with the smallest bottleneck.

    Raises:
        PlanInfeasible: the graph has too many downsets, or no chain fits.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(request)
    if request.num_stages is not None:
        raise PlanInfeasible(
            f"piper chooses the number of stages itself and {request.num_stages} are asked for; "
            "set stages to auto or take another planner"
        )
    downsets = list_downsets(costs, MAX_DOWNSETS)
    if downsets is None:
        raise PlanInfeasible(
            f"piper cannot plan {request.graph.model!r}: its {len(request.graph.blocks)} blocks have more than "
            f"{MAX_DOWNSETS} downsets (branches multiply); use graphpipe or auto"
        )
    candidates = (_partition(request, costs, rules, downsets, wish) for wish in rules.wishes())
    plan = best_sequential(request, costs, candidates, planner="piper")
    if plan is None:
        names = [block.name for block in request.graph.blocks]
        explain_infeasible(request, costs, rules, [[[name] for name in names], [names]])
    return plan


def list_downsets(costs: CostModel, limit: int) -> list[int] | None:
    """Return all downsets as bit sets, smaller ones first; None where there are more than ``limit``."""
    num = len(costs.index)
    before = [0] * num
    for src, dst, _ in costs.block_edges:
        before[dst] |= 1 << src
    found = {0}
    layer = [0]
    while layer:
        grown = set()
        for members in layer:
            for block in range(num):
                if not members >> block & 1 and not before[block] & ~members:
                    grown.add(members | 1 << block)
        found |= grown
        if len(found) > limit:
            return None
        layer = list(grown)
    return sorted(found, key=lambda members: (members.bit_count(), members))


def _membership(downsets: list[int], num: int) -> Floats:
    return np.array([[members >> block & 1 for block in range(num)] for members in downsets], dtype=float)


def _partition(
    request: PlanRequest, costs: CostModel, rules: BatchRules, downsets: list[int], wish: int
) -> list[StageDraft] | None:
    """Return the stages of the best chain at one micro-batch size, or None."""
    names = [block.name for block in request.graph.blocks]
    num, ranks, mini_batch = len(names), request.num_ranks, request.mini_batch
    member = _membership(downsets, num)
    coupled = member @ np.array([name in rules.coupled for name in names], dtype=float)
    totals = [member @ v for v in (costs.parameter_bytes, costs.gradient_bytes, costs.optimizer_bytes)]
    saved = member @ costs.saved_per_sample, member @ costs.saved_fixed
    inputs = [
        (member[:, readers].sum(axis=1), num_bytes, parts) for readers, num_bytes, parts in costs.inputs
    ]
    limit = min(rank_limit(request, rank) for rank in range(ranks))
    transient = float(costs.transient_per_sample.max(initial=0.0))
    rate = link_for_span(request.cluster, ranks).occupied_us(2.0)  # activations there, gradients back
    cut_us = _cut_bytes(request, costs, member) * rate
    options = _options(request, costs, rules, member, wish)
    # value[at, k]: the slowest stage or link of what is not in downset ``at``, on exactly k ranks; the whole model is
    # value[0, ranks], nothing left is value[-1, 0] = 0. A stage is a downset less a smaller one, so from large to small
    # each row needs only rows done before. choice[at, k] is (the larger downset, the stage's degree).
    # On the chain a -> b the downsets are {}, {a}, {a, b}: value[1] is b alone, value[0] is ab, or a before b.
    packed = np.packbits(member.astype(np.uint8), axis=1)
    sizes_of = member.sum(axis=1)
    value = np.full((len(downsets), ranks + 1), np.inf)
    value[-1, 0] = 0.0
    choice = np.zeros((len(downsets), ranks + 1, 2), dtype=np.int32)
    for at in range(len(downsets) - 2, -1, -1):
        # Supersets: nothing of this downset is missing from them.
        later = np.arange(at + 1, len(downsets))
        later = later[(packed[at] & ~packed[later]).sum(axis=1) == 0]
        later = later[sizes_of[later] > sizes_of[at]]
        is_coupled = coupled[later] - coupled[at] > 0.5
        rest = np.maximum(value[later], np.where(later < len(downsets) - 1, cut_us[later], 0.0)[:, None])
        for degree, work, reduce in options:  # by later downset: the time of that stage, then what it holds
            us = np.full(len(later), np.inf)
            for c, time in work.items():
                mask = is_coupled == c
                us[mask] = (time[later] - time[at] + reduce[later] - reduce[at])[mask]
            own = [t[later] - t[at] for t in totals]
            zero = costs.zero_stage
            held = held_bytes(own[0], own[1], own[2], degree=degree, zero_stage=zero)
            held = held + sum((r[later] - r[at] > 0.5) * n / (degree if s else 1) for r, n, s in inputs)
            local = max(wish // degree, 1)
            per = (saved[0][later] - saved[0][at]) * local + saved[1][later] - saved[1][at]
            held = held + unreduced_bytes(own[1], per, degree=degree, zero_stage=zero)
            for k in range(degree, ranks + 1):
                in_flight = min(-(-k // degree), mini_batch // wish)
                fits = peak_bytes(held, per, in_flight, transient=transient * local) <= limit
                worst = np.where(fits, np.maximum(us, rest[:, k - degree]), np.inf)
                best = int(worst.argmin())
                if worst[best] < value[at, k]:
                    value[at, k] = worst[best]
                    choice[at, k] = later[best], degree
    if not np.isfinite(value[0, ranks]):
        return None
    return list(_read_back(names, downsets, rules, choice, ranks, wish)) or None


def _options(
    request: PlanRequest, costs: CostModel, rules: BatchRules, member: Floats, wish: int
) -> list[tuple[int, dict[bool, Floats], Floats]]:
    """Return every degree that some stage may have, with its times in us a sample.

    By degree: [downset] the blocks' forwards and backwards, for stages without coupled blocks (False) and with them
    (True), and [downset] the reduction of gradients. A stage's time is the difference of two downsets'.
    """
    # Without coupled blocks a stage takes ``wish`` samples at a time, with them a loss unit on each rank. With a wish
    # of 8, units of 4 and a mini-batch of 24, degree 3 has no key False (8 / 3 samples a rank are no whole number),
    # and True with 12 samples at a time.
    options = []
    gradients = member @ costs.gradient_bytes
    for degree in rules.degrees():
        sizes = {False: wish, True: rules.loss_unit * degree}
        usable = {
            c: size for c, size in sizes.items() if size % degree == 0 and request.mini_batch % size == 0
        }
        if usable:
            work = {c: member @ sum(costs.block_times(s / degree)) / s for c, s in usable.items()}
            link = link_for_span(request.cluster, degree)
            reduce = gradients * (ring_us(1e9, degree, link) / 1e9 / request.mini_batch)
            options.append((degree, work, reduce))
    return options


def _cut_bytes(request: PlanRequest, costs: CostModel, member: Floats) -> Floats:
    """Return by downset the forward bytes a sample that leave it."""
    makers: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for src, dst, tensors in costs.block_edges:
        for tensor in tensors:
            makers[tensor] = src
            readers.setdefault(tensor, []).append(dst)
    total = np.zeros(len(member))
    for tensor, maker in makers.items():
        spec = request.graph.tensors[tensor]
        all_inside = member[:, readers[tensor]].min(axis=1)
        total += (member[:, maker] > all_inside) * (spec.bytes_for(spec.num_samples) / spec.num_samples)
    return total


def _read_back(
    names: list[str], downsets: list[int], rules: BatchRules, choice: object, ranks: int, wish: int
) -> Iterator[StageDraft]:
    assert isinstance(choice, np.ndarray)
    at, left = 0, ranks
    while left > 0:
        after, degree = (int(x) for x in choice[at, left])
        stage = downsets[after] & ~downsets[at]
        blocks = tuple(name for i, name in enumerate(names) if stage >> i & 1)
        size = rules.micro_batch_size(blocks, degree, wish)
        if size is None:
            return
        yield StageDraft(blocks=blocks, degree=degree, micro_batch_size=size)
        at, left = after, left - degree
