"""Tasks and messages of all ranks as one graph of integers: what the simulator runs and lowering orders.

A node is one task on one rank, or on the tensor ranks of one data position: collectives inside the task keep
those together, so they run it as one, and the first of them stands for all. It waits for the task before it on
its rank and for every message that one of its ranks needs. A forward-only stage also waits until its consumers
have run on the micro-batch that its ``num_in_flight`` frees, so that it does not advance without bound.

Two stages of one rank each, two micro-batches, 1F1B with two and one in flight; nodes are numbered by stage and kind,
in the order of micro-batches:

    rank 0   0: F0   1: F1   2: B0   3: B1              next_on_rank  [1, 2, 3, -1, 6, 7, 5, -1]
    rank 1   4: F0   6: B0   5: F1   7: B1              num_waits     [0, 1, 2, 2, 1, 2, 1, 1]

    messages 0: 0 > 4   1: 1 > 5   2: 6 > 2   3: 7 > 3  source [0, 1, 6, 7], target [4, 5, 2, 3]; gradients come last

A part of such a graph (`windows`) is one too. It has nodes of two more kinds, which the graph of a mini-batch lacks:
*updates* behind backwards, numbered first, and one *end* a chain, numbered last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.schedule.messages import Overlap, TensorPair, message_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """``count`` nodes from ``first`` on that are the same kind of task of one stage."""

    first: int
    count: int
    stage: int
    kind: TaskKind
    half: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Nodes 0..N-1 are tasks, messages are 0..M-1; every list is indexed by one of the two.

    Args:
        orders: by rank (the first of its tensor ranks) the nodes in the order it runs them.
        chains: by that rank, of each of its stages, the stage's nodes in the order of its schedule.
        members: by that rank all ranks that run those nodes together.
        groups: what the nodes are, in the order of nodes; together all of them.
        stage, rank, micro_batch, kind, half: of a node.
        num_waits: how many things a node waits for.
        next_on_rank: the node that follows on its rank, or -1.
        source, target: nodes that send and receive a message.
        num_bytes, edge, sender, receiver: of a message, the last two are ranks; ``overlaps`` its samples, as
            `edge_overlaps` yields them; ``pairs`` its tensor positions.
        num_activations: messages below this number hold activations, the others gradients.
        first_message, next_message: the messages that a node sends, as a linked list; -1 ends it.
        unlocks: node -> nodes that wait for its end though it sends them nothing: of forward-only stages, and updates.
        trained: the stages that run backwards.
        num_updates, num_ends: how many of the first nodes are updates, and of the last ones ends.
    """

    plan: PipelinePlan
    members: dict[int, tuple[int, ...]]
    groups: tuple[NodeGroup, ...] = ()
    stage: list[int]
    rank: list[int]
    micro_batch: list[int]
    kind: list[TaskKind]
    half: list[int | None]
    num_waits: list[int] = field(default_factory=list)
    next_on_rank: list[int] = field(default_factory=list)
    first_message: list[int] = field(default_factory=list)
    orders: dict[int, list[int]] = field(default_factory=dict)
    chains: list[tuple[int, list[int]]] = field(default_factory=list)
    num_activations: int = 0
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    num_bytes: list[float] = field(default_factory=list)
    edge: list[int] = field(default_factory=list)
    sender: list[int] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    pairs: list[TensorPair] = field(default_factory=list)
    next_message: list[int] = field(default_factory=list)
    unlocks: dict[int, list[int]] = field(default_factory=dict)
    trained: frozenset[int] = frozenset()
    num_updates: int = 0
    num_ends: int = 0

    def __post_init__(self) -> None:
        count = len(self.stage)
        self.num_waits.extend([0] * count)
        self.next_on_rank.extend([-1] * count)
        self.first_message.extend([-1] * count)

    @property
    def tasks(self) -> range:
        """Return the nodes that are tasks."""
        return range(self.num_updates, len(self.stage) - self.num_ends)

    def task(self, node: int) -> Task:
        """Return the task of a node."""
        return Task(
            stage=self.stage[node],
            kind=self.kind[node],
            micro_batch=self.micro_batch[node],
            half=self.half[node],
        )

    def message(self, number: int) -> Message:
        """Return a message as the programs name it."""
        direction = Direction.ACTIVATION if number < self.num_activations else Direction.GRADIENT
        return message_of(self.plan, self.edge[number], direction, self.overlaps[number], self.pairs[number])

    def delay_us(self, number: int) -> float:
        """Return what a message takes that orders reckon with; a local transfer takes nothing."""
        if self.sender[number] == self.receiver[number]:
            return 0.0
        edge = self.plan.edges[self.edge[number]]
        return edge.message_us if number < self.num_activations else edge.gradient_us

    def messages_of(self, node: int) -> Iterator[int]:
        """Yield the numbers of the messages a node sends."""
        number = self.first_message[node]
        while number >= 0:
            yield number
            number = self.next_message[number]

    # ---- while it is made: lists grow, and a node that waits for one thing more counts it ---------------

    def add_chain(self, nodes: Sequence[int]) -> None:
        """Let nodes wait for each other, one after the other."""
        for node, follower in zip(nodes, nodes[1:], strict=False):
            self.next_on_rank[node] = follower
            self.num_waits[follower] += 1

    def replace_chains(self, orders: Mapping[int, list[int]]) -> None:
        """Let ranks run their nodes in these orders, which contain the chains that there are."""
        for node, follower in enumerate(self.next_on_rank):
            if follower >= 0:
                self.num_waits[follower] -= 1
                self.next_on_rank[node] = -1
        for rank, order in orders.items():
            self.orders[rank] = order
            self.add_chain(order)

    def add_message(
        self, source: int, target: int, num_bytes: float, edge: int, overlap: Overlap, pair: TensorPair
    ) -> None:
        """Let a node send a message to another one, in front of those that it sends already."""
        self.next_message.append(self.first_message[source])
        self.first_message[source] = len(self.source)
        self.source.append(source)
        self.target.append(target)
        self.num_bytes.append(num_bytes)
        self.edge.append(edge)
        self.sender.append(self.members[self.rank[source]][pair.sender])
        self.receiver.append(self.members[self.rank[target]][pair.receiver])
        self.overlaps.append(overlap)
        self.pairs.append(pair)
        self.num_waits[target] += 1

    def add_unlock(self, node: int, locked: int) -> None:
        """Let a node wait for the end of another one that sends it nothing."""
        self.unlocks.setdefault(node, []).append(locked)
        self.num_waits[locked] += 1


def waiting_circle(graph: TaskGraph, finished: Sequence[bool]) -> list[int]:
    """Return unfinished nodes each of which waits for the next, the last one for the first."""
    # One thing that each unfinished node waits for and that has not ended is enough: an unfinished node waits for
    # an unfinished node, there are finitely many, so the walk comes back to a node it has seen.
    waits: dict[int, int] = {}
    for node, follower in enumerate(graph.next_on_rank):
        if follower >= 0 and not finished[node]:
            waits.setdefault(follower, node)
    for source, target in zip(graph.source, graph.target, strict=True):
        if not finished[source]:
            waits.setdefault(target, source)
    for node, locked in graph.unlocks.items():
        if not finished[node]:
            for other in locked:
                waits.setdefault(other, node)
    seen: dict[int, int] = {}
    node = next(node for node in range(len(finished)) if not finished[node])
    path: list[int] = []
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = waits[node]
    return path[seen[node] :]


def deadlock_error(graph: TaskGraph, finished: Sequence[bool]) -> ScheduleError:
    """Return the error for orders that stop: the circle, the remedy, and the grid with the circle marked."""
    circle = waiting_circle(graph, finished)
    following = [*circle[1:], circle[0]]
    # A stage holds too little where a forward waits for a backward of its own, or for its consumers.
    short = [
        index
        for index, (node, other) in enumerate(zip(circle, following, strict=True))
        if graph.kind[node] is TaskKind.FORWARD
        and (graph.kind[other] is not TaskKind.FORWARD or node in graph.unlocks.get(other, ()))
    ]
    stages = sorted({graph.stage[circle[index]] for index in short}) or sorted(
        {graph.stage[n] for n in circle}
    )
    if short:
        circle = [*circle[short[0] :], *circle[: short[0]]]
    names = ", ".join(f"{graph.plan.stages[s].name!r} (now {graph.plan.stages[s].in_flight})" for s in stages)
    chain = " waits for ".join(str(graph.task(node)) for node in [*_corners(graph, circle), circle[0]])
    rows = {f"rank {rank}": [str(graph.task(node)) for node in nodes] for rank, nodes in graph.orders.items()}
    row_of = {rank: row for row, rank in enumerate(graph.orders)}
    bad = {(row_of[graph.rank[node]], graph.orders[graph.rank[node]].index(node)) for node in circle}
    return ScheduleError(
        f"the orders of the stages wait for each other: {chain}; raise in_flight of {names}\n"
        + format_grid(rows, bad=bad)
    )


def _corners(graph: TaskGraph, circle: Sequence[int]) -> list[int]:
    """Leave out of a circle the tasks whose neighbours are on the same rank."""
    ranks = [graph.rank[node] for node in circle]
    return [
        node
        for i, node in enumerate(circle)
        if i == 0 or not ranks[i - 1] == ranks[i] == ranks[(i + 1) % len(circle)]
    ]


# Orders of tasks as a grid of text, one row a rank, with cells that are wrong marked:
#
#     rank 0   0F0    0F1   0B0  0F2  0B1   ...
#     rank 1  [1F1]!  1B0   1F0

MOST_COLUMNS = 16
MOST_ROWS = 24


def format_grid(rows: Mapping[str, Sequence[str]], *, bad: Collection[tuple[int, int]] = ()) -> str:
    """Return the rows aligned in columns; ``bad`` cells (row, column) print as ``[2F1]!``.

    Large grids are cut to a window around the first bad cell; ``...`` stands for what is left out.
    """
    labels = list(rows)
    columns = max((len(cells) for cells in rows.values()), default=0)
    row, column = min(bad, default=(0, 0), key=lambda cell: (cell[1], cell[0]))
    first_row, last_row = _window(row, len(labels), MOST_ROWS)
    first, last = _window(column, columns, MOST_COLUMNS)
    table = []
    for index in range(first_row, last_row):
        cells = rows[labels[index]]
        shown = [
            f"[{cells[c]}]!" if (index, c) in bad else cells[c] for c in range(first, min(last, len(cells)))
        ]
        table.append(
            [labels[index], *(["..."] if first else []), *shown, *(["..."] if last < len(cells) else [])]
        )
    widths = [
        max(len(line[c]) for line in table if c < len(line)) for c in range(max(map(len, table), default=0))
    ]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
        for line in table
    ]
    above = ["..."] if first_row else []
    below = ["..."] if last_row < len(labels) else []
    return "\n".join([*above, *lines, *below])


def program_grid(programs: Iterable[RankProgram], *, positions: Mapping[int, int]) -> str:
    """Return the tasks of each rank, marking the one at or after instruction ``positions[rank]``."""
    rows: dict[str, list[str]] = {}
    bad = set()
    for row, program in enumerate(programs):
        tasks = [
            (i, str(x.task)) for i, x in enumerate(program.instructions) if x.kind is InstructionKind.COMPUTE
        ]
        rows[f"rank {program.rank}"] = [text for _, text in tasks] or ["-"]
        if program.rank in positions:
            later = [column for column, (i, _) in enumerate(tasks) if i >= positions[program.rank]]
            bad.add((row, later[0] if later else max(len(tasks) - 1, 0)))
    return format_grid(rows, bad=bad)


def _window(center: int, total: int, most: int) -> tuple[int, int]:
    if total <= most:
        return 0, total
    first = max(0, min(center - most // 2, total - most))
    return first, first + most
