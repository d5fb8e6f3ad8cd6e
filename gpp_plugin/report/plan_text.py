"""A plan as text: the stage graph as a picture, what each stage holds and costs, and what carries its edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from gpp_plugin.ir.memory_report import MemoryCounts, MemoryReport, RankMemory
from gpp_plugin.ir.plan import (
    MemoryBreakdown,
    PipelinePlan,
    Stage,
    StageEdge,
    bytes_by_rank,
    forward_only_stages,
    stage_compute_us,
)
from gpp_plugin.ir.serialize import to_plain
from gpp_plugin.ir.step_cost import StepCost
from gpp_plugin.plan.costs.long_context import LayerShape, OnPaper
from gpp_plugin.plan.edge_transports import choose_edge_transports
from gpp_plugin.plan.request import REJECTED
from gpp_plugin.report.picture import draw_graph
from gpp_plugin.report.units import (
    fill_text,
    format_bytes,
    format_ms,
    format_table,
    shorten_name,
    with_printable,
)
from gpp_plugin.schedule.build import in_flight_from_source

# A memory report as text: what is predicted to fill each rank, what was found there, and what to change.

_PARTS = ("weights", "gradients", "optimizer")


def format_memory_report(report: MemoryReport) -> str:
    """Return the table of ranks, ``predicted / measured`` where both are known, and the lines below it."""
    header = ["rank", "stage", *_PARTS, "gathered", "stashed", "activations", "working"]
    header += ["transient", "buffers", "messages", "ahead", "swapped", "recomputed", "peak", "of"]
    table = format_table(header, [_row(rank) for rank in report.ranks], left=2)
    lines = [
        table,
        f"predicted / measured; measured is {report.measure}; swapped and recomputed: a micro-batch",
    ]
    lines += [f"predicted for {report.lengths}"] if report.lengths else []
    return "\n".join([*lines, *report.differences, *report.advice])


def _row(rank: RankMemory) -> list[str]:
    # A cell is "predicted / measured", of the plan's parts on the left and of what was found on the right, so far as
    # both know it: what a stage needs in passing (transient) is predicted alone, what really went to the host
    # measured alone.
    predicted, counts, held = rank.predicted, rank.counts, rank.held
    counted = counts or MemoryCounts(held_bytes=0, swapped_bytes=0, recomputed_bytes=0, peak_held_bytes=0)
    planned = {} if predicted is None else {f.name: getattr(predicted, f.name) for f in fields(predicted)}
    return [
        str(rank.rank),
        rank.stage,
        *(_pair(planned.get(name), getattr(held, name)) for name in _PARTS),
        _pair(planned.get("gathered"), held.gathered),
        _pair(planned.get("stashed_weights"), counted.stashed_bytes),
        _pair(planned.get("activations"), counted.peak_held_bytes),
        _pair(planned.get("working"), counted.working_bytes),
        _pair(planned.get("transient"), None),
        _pair(planned.get("inputs"), held.buffers),
        _pair(planned.get("messages"), held.messages),
        _pair(rank.prefetched_bytes, held.ahead),
        _pair(None, counted.swapped_bytes),
        _pair(None, counted.recomputed_bytes),
        _pair(rank.predicted_peak_bytes or None, rank.measured_peak_bytes),
        format_bytes(predicted.limit) if predicted is not None and predicted.limit else "-",
    ]


def _pair(predicted: int | None, measured: int | None) -> str:
    known = [format_bytes(value) for value in (predicted, measured) if value is not None]
    return " / ".join(known) if predicted or measured else "-"


NO_COST = "what its step takes is not in this plan, or the plan was changed since: gpp plan --out writes it"
SHOWN_US = 0.5
"""What takes less is not named."""
HOW_IT_WAS_FOUND = (REJECTED, "stages of planner ", "schedule ", "warm-up, ")
"""What notes begin with that are of use only to who asks for it."""
MOST_NAMED = 6
"""Stages named in one line; of the others only the number is printed."""


def format_plan(plan: PipelinePlan, *, width: int = 120, is_explained: bool = True) -> str:
    """Return the plan as text for a terminal: headline, stage graph, table of stages, notes.

    Args:
        width: columns the picture may take; a wider graph is listed edge by edge instead.
        is_explained: False leaves out how it was found, and why stages hold as many micro-batches as they do.
    """
    plan = with_printable(plan)
    # a picture broken by a terminal's edge says nothing: past the width each stage's sources are listed instead
    picture = draw_stages(plan)
    if max(map(len, picture.splitlines()), default=0) > width:
        picture = list_edges(plan)
    shown = [note for note in plan.notes if is_explained or not note.startswith(HOW_IT_WAS_FOUND)]
    notes = "\n".join(fill_text(f"- {note}", indent="  ") for note in shown)
    extra = (
        format_cost(plan),
        format_memory(plan),
        format_shared_ranks(plan),
        format_saved_in_flight(plan) if is_explained else "",
        notes,
    )
    parts = (headline(plan), picture, format_table(*stage_table(plan)), *filter(None, extra))
    return "\n\n".join(parts)


def headline(plan: PipelinePlan) -> str:
    """Return two lines: model, stages, ranks, planner, predicted step; samples."""
    predicted = f", {format_ms(plan.iteration_us)} ms a step predicted" if plan.iteration_us else ""
    noun = "stage" if len(plan.stages) == 1 else "stages"
    first = fill_text(
        f"{plan.model}: {len(plan.stages)} {noun} in depth {plan.depth} on {plan.num_ranks} ranks "
        f"(planner {plan.planner}{', asynchronous' if plan.mode == 'async' else ''}){predicted}"
    )
    return f"{first}\nmini-batch {plan.mini_batch} samples, one loss on {plan.loss_unit}"


def format_cost(plan: PipelinePlan) -> str:
    """Return two lines: a step by what takes its time, and the rank with least room left."""
    cost = plan.cost
    if cost is None:
        return "" if not plan.iteration_us else NO_COST
    hidden = {each.kind: each.hidden_us for each in cost.collectives if each.hidden_us >= SHOWN_US}
    parts = []
    for name, us in cost.parts.items():
        beside = f" and {format_ms(hidden[name])} beside tasks" if name in hidden else ""
        parts += [f"{name} {format_ms(us)}{beside}"] if us >= SHOWN_US or beside else []
    takes = f"takes {format_ms(cost.step_us)} ms on {cost_cluster(cost)}"
    start = f"{format_ms(cost.start_up_us)} ms"
    if plan.mode == "async":
        takes = f"a mini-batch {takes} while the pipeline is full"
        start = f"{start} more to fill it, {format_ms(cost.drain_us)} ms to drain it"
    else:
        takes, start = f"a step {takes}", f"{start} until every stage has begun"
    step = f"{takes}: {', '.join(parts)}; {start}"
    full = cost.fullest
    room = f" of {format_bytes(full.limit)}" if full.limit else ""
    over = "" if full.fits else f", {format_bytes(full.peak - full.limit)} too much"
    messages = f", {format_bytes(full.messages)} of it messages" if full.messages else ""
    return "\n".join(
        fill_text(line, indent="  ")
        for line in (step, f"fullest rank: {full.rank} holds {format_bytes(full.peak)}{room}{over}{messages}")
    )


def cost_cluster(cost: StepCost) -> str:
    """Return the name of the cluster that costs are of."""
    return "no links" if cost.prices.cluster is None else cost.prices.cluster.name


def cost_object(plan: PipelinePlan) -> dict[str, Any] | None:
    """Return the plan's costs as JSON types, the terms of the step by name; None where it has none."""
    cost = plan.cost
    if cost is None:
        return None
    return {
        "cluster": cost_cluster(cost),
        "step_us": cost.step_us,
        "parts_us": cost.parts,
        "hidden_us": {each.kind: each.hidden_us for each in cost.collectives},
        "start_up_us": cost.start_up_us,
        "drain_us": cost.drain_us,
        "fits": cost.fits,
        "fullest_rank": cost.fullest.rank,
        "ranks": [{**to_plain(rank), "peak": rank.peak, "fits": rank.fits} for rank in cost.ranks],
    }


def format_saved_in_flight(plan: PipelinePlan) -> str:
    """Return one line on the stages that hold less than a warm-up counted from the sources would have them hold."""
    counts = zip(plan.stages, in_flight_from_source(plan), strict=True)
    stages = [
        f"{index} {stage.name} {stage.in_flight} (not {from_source})"
        for index, (stage, from_source) in enumerate(counts)
        if stage.in_flight < from_source
    ]
    if not stages:
        return ""
    more = f" and {len(stages) - MOST_NAMED} more" if len(stages) > MOST_NAMED else ""
    return f"in flight by what successors need, not by depth: {', '.join(stages[:MOST_NAMED])}{more}"


def format_shared_ranks(plan: PipelinePlan) -> str:
    """Return one line for each set of stages that share ranks: which ranks, and what these hold together."""
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted({rank for stage in plan.stages for rank in stage.ranks}):
        together[plan.stages_of_rank(rank)].append(rank)
    lines, held = [], bytes_by_rank(plan)
    for stages, ranks in together.items():
        if len(stages) < 2:
            continue
        names = ", ".join(f"{stage} {plan.stages[stage].name}" for stage in stages)
        peak = max(held[rank].peak for rank in ranks)
        size = f", {format_bytes(peak)} together" if peak else ""
        which = f"rank {ranks[0]} takes" if len(ranks) == 1 else f"ranks {','.join(map(str, ranks))} take"
        lines.append(f"{which} turns at {names}{size}")
    return "\n".join(lines)


def format_memory(plan: PipelinePlan) -> str:
    """Return one line for each stage that swaps or recomputes: how much, and what it adds."""
    lines = []
    for index, stage in enumerate(plan.stages):
        memory = stage.memory
        if memory is None:
            continue
        parts = []
        if memory.swapped:
            parts.append(f"{len(memory.swapped)} tensors, {format_bytes(memory.swapped_bytes)}, swapped")
        if memory.recomputed:
            size = format_bytes(memory.recomputed_bytes)
            parts.append(f"{len(memory.recomputed)} segments, {size}, recomputed")
        lines.append(
            f"{index} {stage.name}: of every micro-batch {'; '.join(parts)}: {format_ms(memory.added_us)} ms more, "
            f"{format_bytes(memory.working_bytes)} to work with"
        )
    return "\n".join(lines)


def format_breakdown(parts: Sequence[MemoryBreakdown]) -> str:
    """Return the table of what fills one rank of each stage, and of what it may use."""
    return format_table(*breakdown_table(parts))


def breakdown_table(parts: Sequence[MemoryBreakdown]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of `format_breakdown`."""
    names = ["weights", "stashed_weights", "gradients", "optimizer", "activations", "working", "transient"]
    if any(part.gathered for part in parts):
        names.insert(1, "gathered")
    header = ["stage", *(name.replace("_", " ") for name in names), "total", "messages", "of"]
    rows = [
        [
            f"{index} {part.stage}",
            *(format_bytes(getattr(part, name)) if getattr(part, name) else "-" for name in names),
            format_bytes(part.total),
            format_bytes(part.messages) if part.messages else "-",
            format_bytes(part.limit) if part.limit else "-",
        ]
        for index, part in enumerate(parts)
    ]
    return header, rows


def rank_table(plan: PipelinePlan) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of what ranks hold, all their stages together; ranks alike share a row."""
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for held in bytes_by_rank(plan):
        alike[plan.stages_of_rank(held.rank), held.held, held.messages, held.limit].append(held.rank)
    rows = []
    for (stages, held, messages, limit), ranks in alike.items():
        is_run = ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 1
        names = ", ".join(f"{stage} {plan.stages[stage].name}" for stage in stages)
        sizes = [format_bytes(size) if size else "-" for size in (held, messages, held + messages, limit)]
        rows.append([f"{ranks[0]}-{ranks[-1]}" if is_run else ",".join(map(str, ranks)), *sizes, names])
    return ["ranks", "total", "messages", "peak", "of", "stages"], rows


def draw_stages(plan: PipelinePlan) -> str:
    """Return the stage graph as boxes and lines; an edge shows its forward bytes of a mini-batch."""
    boxes = []
    for index, stage in enumerate(plan.stages):
        backend = [f"on {stage.runs_on}"] if stage.runs_on else []
        boxes.append([f"{index} {shorten_name(stage.name)}", format_ranks(stage), *backend])
    # two stages may have two edges (tensors that tensor ranks hold in two ways): one line, with the sum
    sizes: dict[tuple[int, int], float] = defaultdict(float)
    for edge in plan.edges:
        sizes[edge.src, edge.dst] += _forward_bytes(plan, edge)
    return draw_graph(boxes, {pair: format_bytes(size) for pair, size in sizes.items()})


def list_edges(plan: PipelinePlan) -> str:
    """Return one line per stage with what it receives from whom, for graphs too wide to draw."""
    lines = []
    for index, stage in enumerate(plan.stages):
        sources = [
            f"{edge.src} {plan.stages[edge.src].name} ({format_bytes(_forward_bytes(plan, edge))})"
            for edge in plan.edges
            if edge.dst == index
        ]
        received = ", ".join(sources) or "inputs only"
        lines.append(f"{index} {stage.forward_label}, {format_ranks(stage)} <- {received}")
    return "\n".join(lines)


def _forward_bytes(plan: PipelinePlan, edge: StageEdge) -> float:
    # rows are sent once whatever the micro-batches, the rest once for each of the consumer's
    whole = edge.bytes_fixed * plan.num_micro_batches(edge.dst)
    return edge.bytes_per_sample * plan.mini_batch + whole


def format_ranks(stage: Stage) -> str:
    """Return a stage's ranks: ``rank 3``, ``ranks 0-3 (2x2)`` of data x tensor, or of data x context x tensor."""
    ranks = stage.ranks
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    grid = f" ({stage.degree}x{stage.tensor})" if stage.tensor > 1 else ""  # data x tensor
    if stage.context > 1:
        grid = f" ({stage.degree}x{stage.context}x{stage.tensor})"
    if ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}{grid}"
    return "ranks " + ",".join(map(str, ranks)) + grid


def stage_loads_us(plan: PipelinePlan) -> list[float]:
    """Return `stage_compute_us` of each stage: a step cannot be shorter than the largest of these."""
    return [stage_compute_us(plan, index) for index in range(len(plan.stages))]


def stage_rows(plan: PipelinePlan) -> list[dict[str, Any]]:
    """Return one JSON object per stage, with the load of `stage_loads_us`."""
    loads = stage_loads_us(plan)
    return [{**to_plain(stage), "load_us": load} for stage, load in zip(plan.stages, loads, strict=True)]


def stage_table(plan: PipelinePlan) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of stages; ``load``: the part of the busiest rank's compute in a step."""
    loads = stage_loads_us(plan)
    ranks = {rank for stage in plan.stages for rank in stage.ranks}
    busiest = max((sum(loads[index] for index in plan.stages_of_rank(rank)) for rank in ranks), default=0.0)
    header = ["stage", "ranks", "micro-batches", "in flight", "fwd ms", "bwd ms", "load", "memory", "blocks"]
    # a column of its own only where some stage runs on something else than torch
    has_backends = any(stage.runs_on for stage in plan.stages)
    frozen = forward_only_stages(plan)
    header += ["runs on"] if has_backends else []
    rows = []
    for index, (stage, load) in enumerate(zip(plan.stages, loads, strict=True)):
        known = load > 0
        rows.append(
            [
                f"{index} {stage.name}",
                format_ranks(stage).split(" ", 1)[1],
                f"{plan.num_micro_batches(index)} x {stage.micro_batch_size}",
                str(stage.in_flight),
                format_ms(stage.forward_us) if known else "-",
                format_ms(stage.backward_us) if known and index not in frozen else "-",
                f"{100 * load / busiest:.0f} %" if known else "-",
                format_bytes(stage.memory_bytes) if stage.memory_bytes else "-",
                str(len(stage.blocks)),
                *([stage.runs_on or "torch"] if has_backends else []),
            ]
        )
    return header, rows


def edge_rows(plan: PipelinePlan, p2p: str) -> list[dict[str, Any]]:
    """Return one JSON object per edge: its stages, how many tensors, what carries them, and why not megatron.

    Args:
        p2p: as ``graph_pipeline.p2p``.
    """
    rows = []
    for choice in choose_edge_transports(plan, p2p):
        edge = plan.edges[choice.edge]
        rows.append(
            {
                "edge": choice.edge,
                "src": plan.stages[edge.src].name,
                "dst": plan.stages[edge.dst].name,
                "tensors": len(edge.batch_tensors) + len(edge.whole_tensors),
                "transport": choice.transport,
                "reason": choice.reason,
            }
        )
    return rows


def format_edges(plan: PipelinePlan, p2p: str) -> str:
    """Return the table of edges: how many tensors a message holds, what carries it, and why not megatron."""
    rows = [
        [plan.edge_name(row["edge"]), str(row["tensors"]), row["transport"], row["reason"] or "-"]
        for row in edge_rows(plan, p2p)
    ]
    return format_table(["edge", "tensors", "over", "because"], rows, left=4)


def format_on_paper(shape: LayerShape, rows: Sequence[OnPaper]) -> str:
    """Return what context and expert parallelism would take of a layer, by ranks, under a line that says what it is."""
    header = ["ranks", "ring ms", "x", "sends in sight", "heads + sums ms"]
    lines = [
        [
            str(row.ranks),
            f"{row.ring / 1e3:.2f}",
            f"{row.alone / row.ring:.2f}",
            f"{row.unhidden / 1e3:.2f}",
            f"{row.alone / row.ranks / 1e3:.2f} + {row.tensor_sums / 1e3:.2f}",
        ]
        for row in rows
    ]
    if shape.chosen_experts:
        header.append("experts' exchange ms")
        lines = [[*line, f"{row.experts / 1e3:.2f}"] for line, row in zip(lines, rows, strict=True)]
    what = "on paper, not built: ring attention (context parallelism) of one layer of one text of "
    experts = ", and experts on ranks of their own" if shape.chosen_experts else ""
    title = fill_text(f"{what}{shape.length} tokens, beside tensor ranks{experts}")
    return f"{title}\n{format_table(header, lines, left=0)}"
