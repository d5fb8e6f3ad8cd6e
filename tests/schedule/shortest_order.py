"""The shortest order of stages that share ranks, by going through all: an oracle for small plans."""

from __future__ import annotations

from collections.abc import Iterator

from gpp_plugin.ir.plan import PipelinePlan

Task = tuple[int, bool]
"""A stage, and whether it is a forward; its micro-batch is the next one."""


class ShortestOrder:
    """Searches the orders of a plan whose stages are on one rank each and have one micro-batch size.

    It goes through all *active* schedules (Giffler and Thompson): of the task that could end first, every task of its
    rank that could start before that end is tried next. One of those is optimal. States with the same tasks done and no
    earlier time anywhere are left out, and those that cannot end before the best known.
    """

    def __init__(self, plan: PipelinePlan) -> None:
        self._stages = plan.stages
        self._count = plan.num_micro_batches(0)
        self._rank = [stage.ranks[0] for stage in plan.stages]
        every = range(len(plan.stages))
        self._before = [[e.src for e in plan.edges if e.dst == s] for s in every]
        self._behind = [[e.dst for e in plan.edges if e.src == s] for s in every]
        # By task: what follows its start on the longest way to the end of its micro-batch.
        self._tails: dict[Task, float] = {}
        for stage in every:
            tails = [self._tails[other, False] for other in self._before[stage]]
            self._tails[stage, False] = self._us((stage, False)) + max(tails, default=0.0)
        for stage in reversed(every):
            tails = [self._tails[stage, False], *(self._tails[other, True] for other in self._behind[stage])]
            self._tails[stage, True] = self._us((stage, True)) + max(tails)
        # By stage: when each forward and each backward that was run ended.
        self._forwards: list[list[float]] = [[] for _ in every]
        self._backwards: list[list[float]] = [[] for _ in every]
        self._free = dict.fromkeys(self._rank, 0.0)
        self._seen: dict[object, list[list[float]]] = {}
        self._best = float("inf")

    def length(self, known: float) -> float:
        """Return the least time of a mini-batch, or ``known`` where none is less."""
        self._best = known
        self._search()
        return self._best

    def _us(self, task: Task) -> float:
        stage = self._stages[task[0]]
        return stage.forward_us if task[1] else stage.backward_us

    def _starts(self) -> Iterator[tuple[float, Task]]:
        """Yield each task that may come next, with when it could start."""
        for stage in range(len(self._stages)):
            forwards, backwards = len(self._forwards[stage]), len(self._backwards[stage])
            feeds = [self._forwards[other] for other in self._before[stage]]
            has_room = forwards - backwards < self._stages[stage].in_flight
            if forwards < self._count and has_room and all(len(ends) > forwards for ends in feeds):
                yield self._start(stage, [ends[forwards] for ends in feeds]), (stage, True)
            feeds = [self._backwards[other] for other in self._behind[stage]]
            if backwards < forwards and all(len(ends) > backwards for ends in feeds):
                ends = [self._forwards[stage][backwards], *(found[backwards] for found in feeds)]
                yield self._start(stage, ends), (stage, False)

    def _start(self, stage: int, ends: list[float]) -> float:
        return max([self._free[self._rank[stage]], *ends])

    def _search(self) -> None:
        found = list(self._starts())
        if not found:
            self._best = min(self._best, max(self._free.values()))
            return
        if any(start + self._tails[task] >= self._best - 1e-9 for start, task in found):
            return
        if self._is_hopeless() or self._is_dominated():
            return
        end, first = min((start + self._us(task), task) for start, task in found)
        rank = self._rank[first[0]]
        for start, task in sorted(found):
            if self._rank[task[0]] == rank and start < end - 1e-12:
                ends = (self._forwards if task[1] else self._backwards)[task[0]]
                before, self._free[rank] = self._free[rank], start + self._us(task)
                ends.append(self._free[rank])
                self._search()
                ends.pop()
                self._free[rank] = before

    def _is_hopeless(self) -> bool:
        left = dict(self._free)
        for stage, rank in enumerate(self._rank):
            left[rank] += (self._count - len(self._forwards[stage])) * self._us((stage, True))
            left[rank] += (self._count - len(self._backwards[stage])) * self._us((stage, False))
        return max(left.values()) >= self._best - 1e-9

    def _is_dominated(self) -> bool:
        done = tuple(map(len, self._forwards)), tuple(map(len, self._backwards))
        # ends that somebody still waits for: forwards up to the slowest stage behind, or their own backward
        times = list(self._free.values())
        for stage, (forwards, backwards) in enumerate(zip(self._forwards, self._backwards, strict=True)):
            behind = (len(self._forwards[other]) for other in self._behind[stage])
            times += forwards[min([len(backwards), *behind]) :]
            before = [len(self._backwards[other]) for other in self._before[stage]]
            times += backwards[min(before, default=len(backwards)) :]
        known = self._seen.setdefault(done, [])
        if any(all(a <= b + 1e-9 for a, b in zip(other, times, strict=True)) for other in known):
            return True
        known.append(times)
        return False
