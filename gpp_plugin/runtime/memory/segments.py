"""A stage's memory plan in terms of its operators, and the code of the segments that it runs again.

The operators of a segment stand in the stage's code in *runs*, between operators of other blocks (a second branch).
Before each run the forward transfers what the run reads from outside, and notes the random state if it draws:

    forward   ... enter(0, 0, (x,)) a b │ other branch │ enter(0, 1, (y,)) c d ...      segment 0: a b c d
    again     restore(0) a b restore(1) c

The second forward ends with the last operator whose saved tensors it makes again. Replicated operators (masks) run
again too, rather than being held. Whatever the operators write into besides their own results (a BatchNorm's
statistics) is copied first, and the copy is written: statistics are updated once. Where a value written that
way is also read, the copy is made during the forward.

Source: Chen et al. 2016 (arXiv 1604.06174); DawnPiper (arXiv 2505.05856), section 4.3
Tests: tests/runtime/test_recompute.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from gpp_plugin.capture.layouts import is_random
from gpp_plugin.capture.tracing.clean import written_arguments
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import MemoryPlan

aten = torch.ops.aten

# A stage's `MemoryPlan` in terms of its operators, checked before anything runs.

INSIDE = ":inside"
"""Ends the names of what an operator keeps beside operands and results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOperators:
    """What a captured stage is made of, by names that hold at every shape.

    Args:
        blocks: block of the stage -> its operators. Operators of the stage's code that are in none are replicated
            ones, cheap and made of the model's inputs.
        storage_of: operator or received tensor -> the one in whose storage it lies; left out where that is its own.
        local: operator as plans call it -> as the code does; left out where they agree.
        repeated: keys and values that attention repeats for its heads where it has a mask, and the same as they are,
            which it keeps where it has none.
    """

    blocks: Mapping[str, tuple[str, ...]]
    storage_of: Mapping[str, str]
    local: Mapping[str, str] = field(default_factory=dict)
    repeated: Sequence[tuple[str, str]] = ()

    def tensor(self, name: str) -> str:
        """Return what the code calls a tensor of a plan."""
        operator = name.removesuffix(INSIDE)
        return self.local.get(operator, operator) + name.removeprefix(operator)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryPolicy:
    """What happens to the tensors that autograd keeps, by the names of `SavedTensor`.

    Args:
        segments: operators of each recomputed segment; ``dropped``: the tensors it makes again.
        operators: all operators of the stage's blocks.
        stand_ins: tensor -> those that are saved in its place where attention has no mask, or has one: a plan that
            names either means both.
    """

    segments: tuple[frozenset[str], ...]
    dropped: tuple[frozenset[str], ...]
    swapped: frozenset[str]
    operators: frozenset[str]
    storage_of: Mapping[str, str]
    stand_ins: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def segment_of(self) -> dict[str, int]:
        """Return the segment of each operator that has one."""
        return {node: i for i, nodes in enumerate(self.segments) for node in nodes}

    def root(self, name: str) -> str:
        """Return the operator, or the stage's input, in whose storage a result lies."""
        return self.storage_of.get(name, name)


def make_policy(stage: str, plan: MemoryPlan, operators: StageOperators) -> MemoryPolicy:
    """Translate a plan's blocks to operators.

    Raises:
        PlanError: a segment has blocks that the stage lacks or that another segment has, or a tensor is to be both
            swapped and made again.
    """
    taken: set[str] = set()
    for segment in plan.recomputed:
        absent = [name for name in segment.blocks if name not in operators.blocks]
        if absent:
            raise PlanError(
                f"stage {stage!r}: a segment to run again has block {absent[0]!r}, which is not one of the stage's; "
                "plan again for this model and granularity"
            )
        twice = [name for name in segment.blocks if name in taken]
        if twice:
            raise PlanError(f"stage {stage!r}: block {twice[0]!r} is in two segments to run again; keep one")
        taken.update(segment.blocks)
    dropped = {name for segment in plan.recomputed for name in segment.tensors}
    both = [tensor.name for tensor in plan.swapped if tensor.name in dropped]
    if both:
        raise PlanError(f"stage {stage!r}: tensor {both[0]!r} is both swapped and made again; choose one")
    return MemoryPolicy(
        segments=tuple(
            frozenset(node for block in segment.blocks for node in operators.blocks[block])
            for segment in plan.recomputed
        ),
        dropped=tuple(frozenset(map(operators.tensor, segment.tensors)) for segment in plan.recomputed),
        swapped=frozenset(operators.tensor(tensor.name) for tensor in plan.swapped),
        operators=frozenset(node for nodes in operators.blocks.values() for node in nodes),
        storage_of=operators.storage_of,
        stand_ins=_stand_ins(operators),
    )


def _stand_ins(operators: StageOperators) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for pair in operators.repeated:
        repeated, source = (operators.storage_of.get(name, name) for name in pair)
        for name, other in ((repeated, source), (source, repeated)):
            found[name] = found.get(name, frozenset()) | {other}
    return found


# Code of recomputed segments: where the forward must note something for them, and how they run again.

_STATISTICS = {aten.batch_norm.default: (3, 4), aten.instance_norm.default: (3, 4)}
"""Operators that, where they update running statistics, do not read them: positions of mean and variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Operators of a segment that follow each other in the stage's code.

    Args:
        values: results from outside that no earlier run of the segment reads, and inputs of the stage's code that
            must be copied before they change (``snapshots``).
    """

    nodes: tuple[str, ...]
    values: tuple[str, ...]
    snapshots: frozenset[str]
    is_random: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLayout:
    """A segment as it lies in the stage's code.

    Args:
        replicated: operators outside that it needs, to run again with it.
        scratch: inputs of the stage's code that the segment writes into.
    """

    runs: tuple[Run, ...]
    replicated: frozenset[str]
    scratch: frozenset[str]

    def until(self, last: str) -> SegmentLayout:
        """Return the segment without what comes after an operator."""
        runs = []
        for run in self.runs:
            runs.append(run)
            if last in run.nodes:
                nodes = run.nodes[: run.nodes.index(last) + 1]
                return replace(self, runs=(*runs[:-1], replace(run, nodes=nodes)))
        raise AssertionError(f"{last} is in no run")

    def holding(self, names: Iterable[str]) -> SegmentLayout:
        """Return the segment with those values only that are among ``names``."""
        wanted = frozenset(names)
        runs = (
            replace(
                run,
                values=tuple(v for v in run.values if v in wanted),
                snapshots=run.snapshots & wanted,
            )
            for run in self.runs
        )
        return replace(self, runs=tuple(runs))


def lay_out(graph: fx.Graph, policy: MemoryPolicy, fixed: frozenset[str]) -> tuple[SegmentLayout, ...]:
    """Find every segment of a policy in the stage's code.

    Args:
        fixed: placeholders that are there at any time: parameters, buffers, constants, the model's inputs.
    """
    # ``runs[s][r]`` are the operators of run r of segment s. Code ``a b p c m d`` with segments 0 = {a, b, c, d} and
    # no segment for p, where m is replicated (a mask, in no block): runs[0] = [[a, b], [c, d]]. p ends the first run,
    # as its result may be what c reads; m does not, as it runs again with the segment.
    operators = [node for node in graph.nodes if node.op == "call_function"]
    current = -1
    runs: list[list[list[fx.Node]]] = [[] for _ in policy.segments]
    for node in operators:
        if node.name not in policy.operators:
            continue
        segment = policy.segment_of.get(node.name, -1)
        if segment >= 0 and segment != current:
            runs[segment].append([])
        if segment >= 0:
            runs[segment][-1].append(node)
        current = segment
    return tuple(_layout(of_segment, operators, policy, fixed) for of_segment in runs)


def _layout(
    runs: list[list[fx.Node]], operators: list[fx.Node], policy: MemoryPolicy, fixed: frozenset[str]
) -> SegmentLayout:
    # What each run reads from outside and no earlier run did: of ``a(x) b(a) | c(b, y) d(c, x)`` the runs' values are
    # (x,) and (y,), as x is held since the first. Parameters and inputs (``fixed``) are there anyway, but for those
    # that the segment itself changes and reads: they are copied before its first run (``snapshots``).
    own = {node for run in runs for node in run}
    replicated = _replicated(own, operators, policy)
    scratch = {
        policy.root(argument.name) for node in own for argument in written_arguments(node)
    } & fixed  # fmt: skip
    snapshots = frozenset(name for name in scratch if _is_read(name, own, policy))
    known = {node.name for node in own | replicated} | (fixed - snapshots)
    found = []
    for run in runs:
        values = dict.fromkeys(
            policy.root(source.name) if policy.root(source.name) in snapshots else source.name
            for node in run
            for source in node.all_input_nodes
            if source.op != "get_attr"
        )
        new = tuple(name for name in values if name not in known)
        known.update(new)
        found.append(
            Run(
                nodes=tuple(node.name for node in run),
                values=new,
                snapshots=snapshots.intersection(new),
                # of an operator with a body it is not looked into whether that draws
                is_random=any(
                    is_random(n) or any(s.op == "get_attr" for s in n.all_input_nodes) for n in run
                ),
            )
        )
    return SegmentLayout(
        runs=tuple(found), replicated=frozenset(n.name for n in replicated), scratch=frozenset(scratch)
    )


def _replicated(own: set[fx.Node], operators: list[fx.Node], policy: MemoryPolicy) -> set[fx.Node]:
    """Return the replicated operators that a segment depends on, writes into what they make included."""
    writers: dict[str, list[fx.Node]] = {}
    for node in operators:
        if node.name not in policy.operators:
            for argument in written_arguments(node):
                writers.setdefault(policy.root(argument.name), []).append(node)
    found: set[fx.Node] = set()
    stack = list(own)
    while stack:
        node = stack.pop()
        needed = [
            *node.all_input_nodes,
            *(writers.get(policy.root(node.name), ()) if node not in own else ()),
        ]
        for source in needed:
            is_replicated = source.op == "call_function" and source.name not in policy.operators
            if is_replicated and source not in found:
                found.add(source)
                stack.append(source)
    return found


def _is_read(name: str, own: set[fx.Node], policy: MemoryPolicy) -> bool:
    """Return whether a segment's results depend on the value of an input that it writes into."""
    for node in own:
        written = written_arguments(node)
        positions = _STATISTICS.get(node.target, ()) if written else ()  # type: ignore[call-overload]
        statistics = {node.args[i] for i in positions}
        for source in node.all_input_nodes:
            if policy.root(source.name) != name or source in statistics:
                continue
            if source not in written or node.users:
                return True
    return False


def with_entries(module: fx.GraphModule, layouts: Mapping[int, SegmentLayout]) -> fx.GraphModule:
    """Return the stage's code with ``record.enter(segment, run, values)`` before each run; ``record`` comes first."""
    starts = {
        run.nodes[0]: (segment, number, run)
        for segment, layout in layouts.items()
        for number, run in enumerate(layout.runs)
        if run.values or run.is_random
    }
    graph = fx.Graph()
    record = graph.placeholder("gpp_record")
    mapping: dict[fx.Node, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}
    for node in module.graph.nodes:
        if node.name in starts:
            segment, number, run = starts[node.name]
            values = tuple(by_name[name] for name in run.values)
            graph.call_method("enter", (record, segment, number, values))
        mapping[node] = by_name[node.name] = graph.node_copy(node, lambda n: mapping[n])
        assert node.op == "output" or mapping[node].name == node.name, f"{node.name} was renamed"
    return fx.GraphModule(module, graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCode:
    """A segment's second forward.

    Args:
        call: takes what has ``restore(run)``, then ``arguments``; returns nothing.
        arguments: placeholders of the stage's code, and results from outside.
        scratch: those of them that it writes into.
        nodes: its operators.
    """

    call: Callable[..., Any]
    arguments: tuple[str, ...]
    scratch: frozenset[str]
    nodes: frozenset[str]
    is_random: bool


def second_forward(module: fx.GraphModule, layout: SegmentLayout) -> SegmentCode:
    """Generate the code that runs a segment again."""
    nodes = {name for run in layout.runs for name in run.nodes}
    wanted = nodes | layout.replicated
    restored = {run.nodes[0]: number for number, run in enumerate(layout.runs) if run.is_random}
    chosen = [node for node in module.graph.nodes if node.name in wanted]
    sources = dict.fromkeys(
        source for node in chosen for source in node.all_input_nodes if source.name not in wanted
    )
    graph = fx.Graph()
    replay = graph.placeholder("gpp_replay")
    arguments = [source for source in sources if source.op != "get_attr"]
    mapping = {source: graph.placeholder(source.name) for source in arguments}
    for source in sources:
        if source.op == "get_attr":
            mapping[source] = graph.node_copy(source)
    for node in chosen:
        if node.name in restored:
            graph.call_method("restore", (replay, restored[node.name]))
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    graph.output(())
    names = tuple(source.name for source in arguments)
    return SegmentCode(
        call=fx.GraphModule(module, graph).forward,
        arguments=names,
        scratch=layout.scratch.intersection(names),
        nodes=frozenset(nodes),
        is_random=any(run.is_random for run in layout.runs),
    )
