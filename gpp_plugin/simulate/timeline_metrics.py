"""What is read off a timeline: in-flight and memory over time, start-up, the critical path.

Everything here takes timelines from any source: predicted, rehearsed or measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.ir.timeline import COMPUTE_KINDS, LAST_KINDS, Event, EventKind, Timeline
from gpp_plugin.schedule.messages import gradient_kinds

Steps = tuple[tuple[float, float], ...]
"""(microsecond, value from then on), in order of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What one rank of a stage holds.

    Args:
        static_bytes: parameters, gradients, optimizer: all the time.
        saved_bytes_per_sample: from a forward's start to the end of its backward or weight gradient.
        saved_bytes_fixed: the same for each micro-batch, whatever its size.
        transient_bytes_per_sample: only while a task runs.
    """

    static_bytes: float = 0.0
    saved_bytes_per_sample: float = 0.0
    saved_bytes_fixed: float = 0.0
    transient_bytes_per_sample: float = 0.0


def _tasks_by_rank(timeline: Timeline) -> dict[int, list[Event]]:
    """Return the forwards and backwards of each rank in the order they ran."""
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS:
            by_rank[event.rank].append(event)
    for events in by_rank.values():
        events.sort(key=lambda e: (e.start_us, e.end_us))
    return dict(sorted(by_rank.items()))


def _trained_stages(tasks: Sequence[Event]) -> set[int]:
    """Return the stages that run backwards among a rank's tasks."""
    return {task.stage for task in tasks if task.kind in LAST_KINDS}


def in_flight_over_time(timeline: Timeline) -> dict[int, Steps]:
    """Return for each rank how many micro-batches it holds, from a forward's start to its B's or W's end.

    In a stage that runs no backwards a micro-batch is held until its last message has arrived. A rank of several stages
    holds what they hold together.
    """
    sent: dict[tuple[int, int, int], float] = {}
    for event in timeline.events:
        if event.kind is EventKind.SEND:
            key = (event.rank, event.stage, event.micro_batch)
            sent[key] = max(sent.get(key, 0.0), event.end_us)
    # Halves: a forward in two is one micro-batch, held from the start of half
    # 0; None != 1, so a whole forward counts.
    result = {}
    for rank, tasks in _tasks_by_rank(timeline).items():
        trained = _trained_stages(tasks)
        changes = []
        for task in tasks:
            if task.kind is EventKind.FORWARD:
                if task.half != 1:
                    changes.append((task.start_us, 1))
                if task.stage not in trained and task.half != 0:
                    key = (rank, task.stage, task.micro_batch)
                    changes.append((sent.get(key, task.end_us), -1))
            elif task.kind in LAST_KINDS:
                changes.append((task.end_us, -1))
        result[rank] = _accumulate(changes)
    return result


def peak_in_flight(timeline: Timeline) -> dict[int, int]:
    """Return the most micro-batches each rank holds at a time."""
    return {rank: int(max(v for _, v in steps)) for rank, steps in in_flight_over_time(timeline).items()}


def memory_over_time(
    plan: PipelinePlan, timeline: Timeline, memory: Sequence[StageMemory]
) -> dict[int, Steps]:
    """Return the bytes each rank holds over time.

    Args:
        memory: one for each stage of ``plan``.

    Raises:
        PlanError: there is not one entry for each stage.
    """
    if len(memory) != len(plan.stages):
        raise PlanError(f"memory of {len(memory)} stages for a plan of {len(plan.stages)}; give one for each")
    result = {}
    for rank, tasks in _tasks_by_rank(timeline).items():
        trained = _trained_stages(tasks)
        changes = [(0.0, sum(memory[stage].static_bytes for stage in plan.stages_of_rank(rank)))]
        for task in tasks:
            costs, samples = memory[task.stage], plan.stages[task.stage].local_batch_size
            saved = costs.saved_bytes_fixed + costs.saved_bytes_per_sample * samples
            transient = costs.transient_bytes_per_sample * samples
            # Example: 2 samples, 10 B saved and 4 B transient a sample: a forward adds 28 B,
            # its end frees 8, the backward adds 8 and its end frees 28. The end of an input
            # gradient frees its transient bytes only.
            part = 1.0 if task.half is None else 0.5
            is_forward = task.kind is EventKind.FORWARD
            changes.append((task.start_us, part * (transient + (saved if is_forward else 0.0))))
            is_freed = task.kind in LAST_KINDS or task.stage not in trained
            changes.append((task.end_us, -part * (transient + (saved if is_freed else 0.0))))
        result[rank] = _accumulate(changes)
    return result


def _accumulate(changes: Sequence[tuple[float, float]]) -> Steps:
    """Return running sums; at one time what is freed counts before what is taken."""
    steps: list[tuple[float, float]] = []
    total = 0.0
    # Sorting pairs puts the negative changes of a time first: a buffer freed at 7 us can be taken at 7 us.
    for time, change in sorted(changes):
        total += change
        if steps and steps[-1][0] == time:
            steps[-1] = (time, total)
        else:
            steps.append((time, total))
    return tuple(steps)


def start_up_us(timeline: Timeline) -> float:
    """Return the time until every stage has begun its first forward; on a chain, until the last has."""
    first: dict[int, float] = {}
    for event in timeline.events:
        if event.kind is EventKind.FORWARD:
            first[event.stage] = min(first.get(event.stage, event.start_us), event.start_us)
    return max(first.values()) - min(first.values()) if first else 0.0


def critical_path(plan: PipelinePlan, timeline: Timeline) -> tuple[Event, ...]:
    """Return the tasks that determine the iteration time, first to last.

    From the task that ends last, it steps back to whatever the task waited for longest: the task
    before it on its rank or a message. Of several at one time it takes the one nearest the sinks
    (AutoPipe, section III-C: the critical path closest to the last stage).
    """
    # Two stages, two micro-batches, F 1 us, B 2 us; walked from the right, the path is marked by capitals:
    #
    #   us       0    1    2    3    4    5    6    7    8    9
    #   stage 0  |0F0 |0f1 |    .    |0b0      |    |0B1      |
    #   stage 1  .    |1F0 |1B0      |1F1 |1B1      |
    #
    # 0B1 waited for 0b0 until 6, for 1B1's gradient until 7: step to 1B1, and so on to 0F0. The tasks of the
    # path add up to the iteration, 1 + 1 + 2 + 1 + 2 + 2 = 9, where messages take no time.
    tasks = _tasks_by_rank(timeline)
    if not tasks:
        return ()
    # Events are no keys (two may be equal): the task before it on its rank is found by identity.
    previous = {
        id(event): before
        for events in tasks.values()
        for before, event in zip(events, events[1:], strict=False)
    }
    found: dict[_TaskKey, list[Event]] = defaultdict(list)
    for event in (event for events in tasks.values() for event in events):
        found[_task_key(event)].append(event)
    # By (rank, stage, edge, micro-batch, half): when the last of these messages came, in us. A timeline without
    # receives (one written by hand) falls back to the end of the task that made the message.
    arrival: dict[tuple[int, int, int, int, int | None], float] = {}
    for event in timeline.events:
        if event.kind is EventKind.RECEIVE:
            key = (event.rank, event.stage, event.edge, event.micro_batch, event.half)
            arrival[key] = max(arrival.get(key, event.end_us), event.end_us)
    depth = _depths(plan)
    current = max(
        (event for events in tasks.values() for event in events),
        key=lambda e: (e.end_us, depth[e.stage], -e.rank),
    )
    path = [current]
    while True:
        waited = [(e.end_us, e) for e in [previous.get(id(current))] if e is not None]
        for edge, producers in _producers(plan, current, found):
            last = max(producers, key=lambda e: (e.end_us, -e.rank))
            stage = plan.stages[current.stage]
            row = stage.tensor_ranks(stage.position(current.rank)[0])  # they wait for each other's messages
            keys = [(rank, current.stage, edge, current.micro_batch, current.half) for rank in row]
            waited.append((max((arrival[key] for key in keys if key in arrival), default=last.end_us), last))
        if not waited:
            return tuple(reversed(path))
        _, current = max(waited, key=lambda w: (w[0], depth[w[1].stage], w[1].end_us, -w[1].rank))
        path.append(current)


_TaskKey = tuple[int, str, int, int]
"""Stage, direction of what the task sends, micro-batch, rank."""


def _task_key(event: Event) -> _TaskKey:
    kind = event.kind  # compared, not looked up: a search calls this for hundreds of thousands of events
    if kind is EventKind.FORWARD:
        direction = "activation"
    else:
        direction = "nothing" if kind is EventKind.WEIGHT_GRADIENT else "gradient"
    return (event.stage, direction, event.micro_batch, event.rank)


def _producers(
    plan: PipelinePlan, event: Event, found: Mapping[_TaskKey, list[Event]]
) -> Iterator[tuple[int, list[Event]]]:
    """Yield for each edge that feeds a task the tasks whose messages it waits for."""
    if event.kind is EventKind.WEIGHT_GRADIENT:
        return
    # The consumer's samples, cut into the producer's local batches, as messages are (`schedule.messages`): number p
    # of them is micro-batch p // degree on data position p % degree. A consumer of samples 4..7 reads of a producer
    # with 2 samples a rank on 2 ranks p = 2, 3: micro-batch 1, positions 0 and 1.
    stage = plan.stages[event.stage]
    samples = stage.samples(event.micro_batch, event.rank, event.half)
    direction = _task_key(event)[1]
    for index, edge in enumerate(plan.edges):
        is_forward = event.kind is EventKind.FORWARD
        if (edge.dst if is_forward else edge.src) != event.stage:
            continue
        other = edge.src if is_forward else edge.dst
        size, degree = plan.stages[other].local_batch_size, plan.stages[other].degree
        parts = range(samples.first_sample // size, -(-samples.end // size))
        has_batch, has_whole = (True, True)
        if is_forward and not edge.batch_tensors:
            parts = parts[: event.half != 1]  # tensors without a batch axis come with the first sample only
        if not is_forward:
            has_batch, has_whole = gradient_kinds(edge)
            if not has_batch:
                # A tensor without a batch axis travels with a consumer's first sample, so its gradient comes
                # only from consumers that *begin* here: both ends are rounded up.
                parts = range(-(-samples.first_sample // size), -(-samples.end // size))
        if not has_batch and not has_whole:
            continue
        keys = [
            (other, direction, p // degree, rank)
            for p in parts
            for rank in plan.stages[other].tensor_ranks(p % degree)
        ]
        events = [event for key in keys for event in found.get(key, ())]
        if is_forward:
            needed = samples if edge.batch_tensors else samples.first()
            events = [other for other in events if _feeds(plan, other, needed)]
        if events:
            yield index, events


def _feeds(plan: PipelinePlan, event: Event, samples: SampleRange) -> bool:
    """Return whether a forward made rows of ``samples``."""
    made = plan.stages[event.stage].samples(event.micro_batch, event.rank, event.half)
    return made.overlap(samples) is not None


def _depths(plan: PipelinePlan) -> list[int]:
    # The longest path from a source, in edges. T5's decoder behind two encoder stages: depths 0, 1, 2.
    depth = [0] * len(plan.stages)
    for _ in plan.stages:  # at most as many rounds as stages; edges may come in any order
        for edge in plan.edges:
            depth[edge.dst] = max(depth[edge.dst], depth[edge.src] + 1)
    return depth
