"""AutoPipe's slicer: the first forwards in two halves, so that the last stage begins in half the time.

Symbols: p stages ("blocks" there), f and b their forward and backward times, mb the sliced micro-batches. Four
stages, the first micro-batch sliced, halves sent singly:

    rank 0  0a 0b 1  1  2  2  3  3
    rank 1     0a 0b 1  1  2  2
    rank 2        0a 0b 1  1
    rank 3           0a 0b B0 ...            unsliced, F0 would begin here at 6, not at 3

`count_sliced` is Algorithm 2: one more micro-batch is sliced as long as the first whole one, sent as late as
its stages need it, would leave stage 0 before the sliced ones have.

Corrections to Algorithm 2 as printed: line 34 is ``>=`` (so says the text); line 21 adds f_i, not f_{i-1}; the
count is at most p - 1; the first backward waits for both halves at the last stage (line 9 counts one).

Deviations:

- Messages travel beside the computation, so nothing is blocked (line 26): a half takes half of the message's
  time, and halves may all be sent singly. The paper's remedy is the other variant, ``joins_last``: what the
  last warm-up forward of each stage makes leaves after its second half, in one message.
- On a DAG the longest path of the warm-up is sliced; other branches have slack, and run whole. Where that
  makes another branch the longest, its stages are sliced too, until the longest path is sliced.
- Stages of different micro-batches: the path's times are those of its largest one, the count covers as many
  samples everywhere.
- A path of two stages stays whole, and so does a stage whose samples cannot be halved.

Slicing is laid over the order of any schedule (`halve_forwards`). Both variants leave in-flight counts as they are.
Which one is faster, if either, the simulator says (`plan.choose_schedule`).

Source: AutoPipe (IEEE CLUSTER 2022), section III-C, Algorithm 2
Tests: tests/schedule/test_slicer.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan, Stage, sinks_first, stage_task_us
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.event_loop import nominal_times
from gpp_plugin.schedule.messages import activation_bytes


def count_sliced(
    forward_us: Sequence[float], backward_us: Sequence[float], message_us: Sequence[float]
) -> int:
    """Return how many micro-batches of a chain to slice (AutoPipe, Algorithm 2, corrected).

    Args:
        forward_us, backward_us: of each stage.
        message_us: of the activations between each stage and the next, one fewer.

    Raises:
        ValueError: the lengths do not fit.

    >>> count_sliced([1.0] * 8, [2.0] * 8, [0.0] * 7)
    2
    """
    num_stages = len(forward_us)
    if len(backward_us) != num_stages or len(message_us) != max(num_stages - 1, 0):
        raise ValueError(
            f"{num_stages} forward times, {len(backward_us)} backward times, {len(message_us)} message times; "
            "give one of each for a stage and one message fewer"
        )
    if num_stages <= 2:
        return 0
    # ``ends[i]``: when stage i is through with the sliced micro-batches so far; ``arrivals[h]``: when half h of the
    # one that is moved on reaches the next stage. Four stages, F 1, B 2, no message times. With one micro-batch
    # sliced:
    #
    #     stage 0  0a 0b               ends 1.0     its first backward ends at 2.5 + 4 x 2 = 10.5
    #     stage 1     0a 0b            ends 1.5                                                  8.5
    #     stage 2        0a 0b         ends 2.0                                                  6.5
    #     stage 3           0a 0b B0   ends 2.5                                                  4.5
    #
    # The next micro-batch, whole, is needed at stage 3 (``last``) when its first backward is over, at 4.5. It is 3 on
    # its way there, so it may leave stage 0 as late as 1.5. The sliced one leaves at 1.0: in time, one is enough.
    # With more stages the way is longer than that, and one more is sliced; the next whole one is then needed a stage
    # earlier.
    ends = [0.0] * num_stages
    first_backward = [0.0] * num_stages
    for count in range(1, num_stages):
        arrivals = [0.0, 0.0]
        for i in range(num_stages - count + 1):
            for half in range(2):
                ends[i] = max(ends[i], arrivals[half]) + forward_us[i] / 2.0
                arrivals[half] = ends[i] + (message_us[i] / 2.0 if i < num_stages - 1 else 0.0)
        if count == 1:
            now = ends[-1]
            for i in reversed(range(num_stages)):
                now += backward_us[i] + (message_us[i] if i < num_stages - 1 else 0.0)
                first_backward[i] = now
        last = num_stages - count
        way = sum(forward_us[:last]) + sum(message_us[:last])
        if first_backward[last] - way >= ends[0]:
            return count
    return num_stages - 1


def slice_warm_up(
    plan: PipelinePlan,
    *,
    num_sliced: int | None = None,
    joins_last: bool = False,
    whole_stages: Collection[int] = (),
    cluster: Cluster | None = None,
) -> PipelinePlan:
    """Return ``plan`` with `Stage.num_sliced` along the longest path of the warm-up; as it was, if that is short.

    Args:
        num_sliced: micro-batches to slice (of the largest size on the path); None: by Algorithm 2.
        joins_last: the halves of each stage's last warm-up forward leave together.
        whole_stages: stages that must not be halved; those with an odd number of samples a rank are not either.
        cluster: links; without one messages take no time.
    """
    plan = unsliced(plan)
    timed = nominal_times(plan)
    whole = {*whole_stages, *(i for i, s in enumerate(plan.stages) if s.local_batch_size % 2)}
    counts = [0] * len(plan.stages)
    while True:
        _, path = longest_start_up(_with_counts(timed, counts, joins_last=joins_last), cluster)
        new = [i for i in path if i not in whole and not counts[i]]
        if len(path) <= 2 or not new:
            break
        samples = _samples_to_slice(timed, path, num_sliced, cluster)
        before = list(counts)
        for i in new:
            stage = plan.stages[i]
            counts[i] = min(-(-samples // stage.micro_batch_size), _most_sliced(stage, joins_last))
        if counts == before:
            break
    return _with_counts(plan, counts, joins_last=joins_last)


def unsliced(plan: PipelinePlan) -> PipelinePlan:
    """Return ``plan`` with all forwards whole."""
    return _with_counts(plan, [0] * len(plan.stages), joins_last=False)


def _with_counts(plan: PipelinePlan, counts: Sequence[int], *, joins_last: bool) -> PipelinePlan:
    joins = [
        joins_last and count > 0 and count == _most_sliced(stage, joins_last)
        for stage, count in zip(plan.stages, counts, strict=True)
    ]
    return plan.with_each(num_sliced=counts, joins_last_slice=joins)


def _most_sliced(stage: Stage, joins_last: bool) -> int:
    """Return the forwards of the warm-up; the one before the first backward counts where halves are sent singly."""
    return stage.in_flight - 1 if joins_last else stage.in_flight


def _samples_to_slice(
    plan: PipelinePlan, path: Sequence[int], num_sliced: int | None, cluster: Cluster | None
) -> int:
    stages = [plan.stages[i] for i in path]
    largest = max(stage.micro_batch_size for stage in stages)
    if num_sliced is None:
        scale = [largest / stage.micro_batch_size for stage in stages]
        num_sliced = count_sliced(
            [stage.forward_us * s for stage, s in zip(stages, scale, strict=True)],
            [stage.backward_us * s for stage, s in zip(stages, scale, strict=True)],
            [
                _message_us(plan, src, dst, plan.stages[dst].local_batch_size, cluster)
                for src, dst in zip(path, path[1:], strict=False)
            ],
        )
    return num_sliced * largest


def _message_us(plan: PipelinePlan, src: int, dst: int, num_samples: int, cluster: Cluster | None) -> float:
    """Return the longest time of one message from ``src`` to ``dst`` with that many samples."""
    if cluster is None:
        return 0.0
    ends = plan.stages[src].ranks[0], plan.stages[dst].ranks[0]
    edges = [edge for edge in plan.edges if (edge.src, edge.dst) == (src, dst)]
    sizes = [activation_bytes(edge, num_samples, bool(edge.whole_tensors)) for edge in edges]
    return max((cluster.transfer_us(*ends, size) for size in sizes), default=0.0)


def longest_start_up(plan: PipelinePlan, cluster: Cluster | None = None) -> tuple[float, tuple[int, ...]]:
    """Return when the last stage begins its first forward, and the stages that it waits for, in order.

    The ranks of a stage move together here. Of paths equally long the one with more stages left whole counts,
    so that slicing them all takes one round each.

    Args:
        plan: with times; its slices are respected.
    """
    # From sources to sinks, each stage runs its warm-up by itself against what the stages before have made.
    # ``made[i]``: (samples made so far, when) of stage i, in order; ``starts[i]``: when its first forward begins;
    # ``before[i]``: which stage that waited for. Two micro-batches of 4 samples on each of two stages, F 2, the first
    # micro-batch of stage 0 in halves:
    #
    #     stage 0   0a 0b 1  1     made [(2, 1.0), (4, 2.0), (8, 4.0)]
    #     stage 1         0  0     starts at 2.0, when 4 samples are there; at 1.0, were it sliced too
    incoming: list[list[int]] = [[] for _ in plan.stages]
    for edge in plan.edges:
        incoming[edge.dst].append(edge.src)
    starts = [0.0] * len(plan.stages)
    before: list[int | None] = [None] * len(plan.stages)
    made: list[list[tuple[int, float]]] = [[] for _ in plan.stages]
    for index in reversed(sinks_first(plan)):
        stage = plan.stages[index]
        now = 0.0
        for number, (end, local, duration_us, is_sent) in enumerate(_warm_up_tasks(stage)):
            ready = [
                (time + _message_us(plan, src, index, local, cluster), src)
                for src in incoming[index]
                for time in [next((time for until, time in made[src] if until >= end), float("inf"))]
            ]
            latest = max(ready, key=lambda r: (r[0], plan.stages[r[1]].num_sliced == 0), default=(0.0, -1))
            if latest[0] == float("inf"):
                break  # beyond the warm-up of a stage before
            now = max(now, latest[0])
            if number == 0:
                starts[index] = now
                before[index] = latest[1] if latest[1] >= 0 else None
            now += duration_us
            if is_sent:
                made[index].append((end, now))
    current: int | None = max(range(len(starts)), key=lambda i: starts[i])
    start_up = starts[current] if current is not None else 0.0
    path: list[int] = []
    while current is not None:
        path.append(current)
        current = before[current]
    return start_up, tuple(reversed(path))


def _warm_up_tasks(stage: Stage) -> list[tuple[int, int, float, bool]]:
    """Return (sample it ends before, samples a rank, microseconds, whether its rows leave at once) of each forward."""
    size, local = stage.micro_batch_size, stage.local_batch_size
    half_us = stage_task_us(stage, TaskKind.FORWARD, 0)
    tasks: list[tuple[int, int, float, bool]] = []
    for m in range(stage.in_flight):
        begin, end = m * size, (m + 1) * size
        if m < stage.num_sliced:
            is_joined = stage.joins_last_slice and m == stage.num_sliced - 1
            tasks.append((begin + size // 2, local // 2, half_us, not is_joined))
            tasks.append((end, local - local // 2, half_us, True))
        else:
            tasks.append((end, local, stage.forward_us, True))
    return tasks


def halve_forwards(schedule: StageSchedule, num_sliced: int, *, joins_last: bool = False) -> StageSchedule:
    """Return ``schedule`` with the forwards of its first micro-batches in halves, one behind the other.

    Args:
        num_sliced: how many; more than there are means all.
        joins_last: what the halves of the last of them make leaves in one message.

    >>> from gpp_plugin.schedule.orders.gpipe import gpipe_schedule
    >>> " ".join(map(str, halve_forwards(gpipe_schedule(0, 2), 1).tasks))
    '0F0a 0F0b 0F1 0B0 0B1'
    """
    tasks: list[Task] = []
    turns: list[int] = []
    num_halved = 0
    for index, task in enumerate(schedule.tasks):
        is_halved = task.kind is TaskKind.FORWARD and task.micro_batch < num_sliced
        turns += schedule.turns[index : index + 1] * (2 if is_halved else 1)
        if is_halved:
            tasks += (dataclasses.replace(task, half=0), dataclasses.replace(task, half=1))
            num_halved += 1
        else:
            tasks.append(task)
    joined = (num_halved - 1,) if joins_last and num_halved else ()
    return dataclasses.replace(schedule, tasks=tuple(tasks), joined=joined, turns=tuple(turns))
