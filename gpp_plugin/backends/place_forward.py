"""Chooses what a forward runs on: the fastest single backend, or a mix where backends run parts alone.

Source: Collage (PACT 2022, arXiv 2111.00655; here by the thesis, section 2.4): op level first, graph level behind it
Tests: tests/backends/test_backends.py
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from gpp_plugin.backends.forward_code import ForwardCode, ForwardRunner, operator_name
from gpp_plugin.backends.measured_backends import (
    TORCH,
    BackendLog,
    build_checked,
    build_forward,
    measure_backends,
    time_in_turn,
)
from gpp_plugin.capture.tracing.clean import written_arguments
from gpp_plugin.collage.op_placement import (
    OperatorGroup,
    Placement,
    find_candidates,
    patterns_of,
    place_operators,
    search_placements,
)
from gpp_plugin.collage.patterns import Operator, OperatorGraph, bits
from gpp_plugin.errors import BackendRefused
from gpp_plugin.ir.profile import BackendCost, PlacedGroup, StageBackend

# A forward cut into groups of operators, each built by its backend, run one after the other.
#
#     operators   conv  relu  add  norm        OperatorGraph: one for each call that makes tensors
#     groups      [conv relu]openvino  [add norm]torch
#     built       f(pixels) -> relu             g(relu, pixels) -> norm
#
# What is no tensor (sizes) is a number at these shapes and becomes one; the parts of a call that makes several tensors
# go with it.

BuildGroup = Callable[[str, ForwardCode], ForwardRunner]
"""From a backend's name and code to the callable that computes it."""


class CuttableForward:
    """A forward as an `OperatorGraph`, and the code of any convex set of its operators.

    Args:
        code: its examples are run once, to see what each operator makes.

    Raises:
        BackendRefused: it holds code of other functions (control flow), or writes into tensors: it cannot be cut.
    """

    def __init__(self, code: ForwardCode) -> None:
        self.code = code
        graph = code.frozen.graph
        if any(node.op in ("call_module", "call_method") for node in graph.nodes) or any(
            not isinstance(operator.attrgetter(str(node.target))(code.frozen), Tensor)
            for node in graph.find_nodes(op="get_attr")
        ):
            raise BackendRefused(f"stage {code.name!r} holds functions of functions, and cannot be cut")
        written = next((node for node in graph.nodes if written_arguments(node)), None)
        if written is not None:  # its readers must run behind it, and no edge says so
            raise BackendRefused(
                f"operator {written.name} ({written.target}) writes into a tensor: it is not cut"
            )
        with torch.no_grad():
            interpreter = fx.Interpreter(code.frozen, garbage_collect_values=False)
            interpreter.run(*code.examples)
        self._values = {node.name: value for node, value in interpreter.env.items()}
        self._nodes = {node.name: node for node in graph.nodes}
        (output,) = (node for node in graph.nodes if node.op == "output")
        self._outputs = [node.name for node in output.args[0]]
        # the same set has the same code, so that what was built of it can be found again
        self.part = functools.cache(self._part)
        self._owner: dict[str, str] = {}
        self._members: dict[str, list[str]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and not self._is_number(node):
                # a part of a tuple belongs to the call that made it
                source = node.args[0] if node.target is operator.getitem else None
                own = self._owner[source.name] if isinstance(source, fx.Node) else node.name
                self._owner[node.name] = own
                self._members.setdefault(own, []).append(node.name)
        self.graph = OperatorGraph(
            [self._operator(key) for key in self._members],
            [self._owner[name] for name in self._outputs if name in self._owner],
        )

    def _is_number(self, node: fx.Node) -> bool:
        value = self._values[node.name]
        if isinstance(value, Tensor):
            return False
        return not (isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value))

    def _operator(self, key: str) -> Operator:
        node = self._nodes[key]
        inputs = []
        for name in self._members[key]:
            for read in self._nodes[name].all_input_nodes:
                own = self._owner.get(read.name, read.name)
                if own != key and not (read.op == "call_function" and self._is_number(read)):
                    inputs.append(own)
        return Operator(
            key=key, name=operator_name(node), inputs=tuple(inputs), attr=_attributes(node, self._values)
        )

    def _part(self, mask: int) -> tuple[ForwardCode, tuple[str, ...], tuple[str, ...]]:
        """Return the code of a convex set of operators, the names of what it takes, and of what it returns."""
        # For {relu, add} of conv -> relu -> add(relu, w) -> norm, with 0-d size n = 8 read by add:
        #     takes w (held), conv (from outside); n is the number 8 in the code; returns add, which norm reads
        keys = set(self.graph.keys(mask))
        own = [n for n in self._nodes.values() if self._owner.get(n.name) in keys]
        inside = {node.name for node in own}
        graph = fx.Graph()
        reads = dict.fromkeys(source for node in own for source in node.all_input_nodes)
        outside = [n for n in reads if n.name not in inside and not self._is_constant(n)]
        held = [n for n in reads if n.op == "get_attr"]
        mapping: dict[str, Any] = {n.name: graph.placeholder(n.name) for n in (*held, *outside)}
        operand = lambda n: mapping[n.name] if n.name in mapping else self._values[n.name]  # noqa: E731
        for node in own:
            args, kwargs = fx.map_arg(node.args, operand), fx.map_arg(node.kwargs, operand)
            mapping[node.name] = graph.create_node(node.op, node.target, args, kwargs, node.name)
        outputs = tuple(
            n.name
            for n in own
            if isinstance(self._values[n.name], Tensor)
            and (n.name in self._outputs or any(user.name not in inside for user in n.users))
        )
        graph.output(tuple(mapping[name] for name in outputs))
        code = ForwardCode(
            name=self.code.name,
            module=fx.GraphModule(nn.Module(), graph),
            bound=(),
            parameters=tuple(self._values[n.name] for n in held),
            examples=tuple(self._values[n.name] for n in outside),
        )
        return code, tuple(n.name for n in outside), outputs

    def _is_constant(self, node: fx.Node) -> bool:
        return node.op == "get_attr" or (node.op == "call_function" and self._is_number(node))

    def groups(self, placed: Sequence[PlacedGroup]) -> list[tuple[str, int]]:
        """Return the groups of a placement as sets of this graph's operators.

        Raises:
            BackendRefused: it names operators that this graph does not have, or leaves some out.
        """
        found = []
        for group in placed:
            unknown = [key for key in group.operators if key not in self.graph.position]
            if unknown:
                raise BackendRefused(
                    f"stage {self.code.name!r} has no operator {unknown[0]!r} at these shapes"
                )
            found.append((group.backend, self.graph.mask(group.operators)))
        if sum(mask for _, mask in found) != self.graph.everything:
            raise BackendRefused(
                f"stage {self.code.name!r} has operators at these shapes that are not placed"
            )
        return found

    def build(self, groups: Sequence[tuple[str, int]], build_group: BuildGroup) -> ForwardRunner:
        """Return what runs groups of operators in this order, each built by its backend."""
        steps = []
        for backend, mask in groups:
            code, reads, makes = self.part(mask)
            steps.append((build_group(backend, code), reads, makes))
        inputs = [node.name for node in self._nodes.values() if node.op == "placeholder"]
        # weights and constants that are returned as they are
        fixed = {name: self._values[name] for name in self._outputs if self._is_constant(self._nodes[name])}

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            values: dict[str, Any] = {**fixed, **dict(zip(inputs, tensors, strict=True))}
            for compute, reads, makes in steps:
                values.update(zip(makes, compute(*(values[name] for name in reads)), strict=True))
            return [values[name] for name in self._outputs]

        return run


def _attributes(node: fx.Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments that are no tensors by the names of its schema, its defaults among them."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    found: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        plain = fx.map_arg(value, lambda n: values[n.name])
        if not any(isinstance(v, Tensor) for v in (plain if isinstance(plain, (tuple, list)) else (plain,))):
            found[argument.name] = list(plain) if isinstance(plain, (tuple, list)) else plain
    return found


def placed_groups(forward: CuttableForward, groups: Sequence[tuple[str, int]]) -> tuple[PlacedGroup, ...]:
    """Return groups by the names of their operators."""
    graph = forward.graph
    return tuple(
        PlacedGroup(backend=backend, operators=tuple(graph.operators[i].key for i in bits(mask)))
        for backend, mask in groups
    )


logger = logging.getLogger(__name__)

LEAST_GAIN = 1.05
"""How many times as fast as torch (a mix: as the best single backend) something must be to be taken: less is noise."""
UNMATCHED = "matches nothing here"
"""Of a pattern or rule, in a choice's notes."""
LEAST_US = 50.0
"""Operators that take less on torch are not placed on a library by themselves."""


def choose_single(stage: str, costs: Sequence[BackendCost]) -> StageBackend:
    """Return the fastest backend of those measured; torch where none is faster by more than noise.

    Args:
        costs: torch's among them.
    """
    # torch 100, a 97, b refused: a is 1.03 times as fast, which another day may be 0.98; torch costs no building
    usable = [cost for cost in costs if not cost.refused]
    torch_us = next(cost.us for cost in costs if cost.backend == TORCH)
    best = min(usable, key=lambda cost: cost.us)
    if best.us * LEAST_GAIN > torch_us:
        best = next(cost for cost in usable if cost.backend == TORCH)
    return StageBackend(
        stage=stage,
        groups=(PlacedGroup(backend=best.backend),),
        us=best.us,
        torch_us=torch_us,
        costs=tuple(costs),
    )


@torch.no_grad()
def place_forward(
    code: ForwardCode,
    names: Sequence[str],
    *,
    log: BackendLog | None = None,
    searches: bool | None = None,
) -> StageBackend:
    """Return what a forward should run on, of these backends and torch.

    Args:
        searches: look for mixes; None: where some backend runs parts alone.
    """
    names = [name for name in dict.fromkeys(names) if name != TORCH]
    whole = [name for name in names if patterns_of(name).runs_any]
    single = choose_single(code.name, list(measure_backends(code, whole, log=log).values()))
    runs_parts_alone = len(whole) < len(names)  # a backend of nothing but groups of its patterns and rules
    if not (runs_parts_alone if searches is None else searches) or code.refusal():
        return single
    try:
        return _Mixing(code, (TORCH, *names), log).best(single)
    except BackendRefused as error:
        logger.info("stage %s is not mixed: %s", code.name, error)
        return single


class _Mixing:
    """The two levels of Collage on one forward."""

    def __init__(self, code: ForwardCode, names: Sequence[str], log: BackendLog | None) -> None:
        self._code = code
        self._log = log
        self._forward = CuttableForward(code)
        self._graph = self._forward.graph
        self._known = [patterns_of(name) for name in names]
        self._expected = code.run(*code.examples)
        self._runner = functools.cache(self._build_placement)
        # most parts of two placements are the same; parts live as long as the forward, and are known by identity
        self._build = functools.cache(build_forward)
        self._libraries = [own.backend for own in self._known if own.runs_any and own.backend != TORCH]

    def best(self, single: StageBackend) -> StageBackend:
        """Return the fastest mix, or the single backend where no mix is faster by more than noise."""
        # candidates -> cheapest sum (op level) -> search end to end (graph level) -> the winner against the best single
        # backend in turn: each step's times are only compared with each other.
        groups, unmatched = find_candidates(self._graph, self._known)
        usable = [group for group in groups if group.operators != self._graph.everything]
        op_level = place_operators(self._graph, usable, self._cost_of, epsilon_us=self._switch_us())
        searched = search_placements(
            self._graph,
            op_level,
            self._time_of,
            singles=[own.backend for own in self._known if own.runs_any],
            libraries=self._libraries,
        )
        notes = [f"{what} {UNMATCHED}" for what in unmatched]
        notes.append(
            f"{len(groups)} groups of operators, op-level placement {' + '.join(op_level.backends)} in "
            f"{len(op_level.groups)} groups, {len(searched)} placements measured end to end"
        )
        return self._against(single, searched[0], tuple(notes))

    def _against(self, single: StageBackend, best: Placement, notes: tuple[str, ...]) -> StageBackend:
        """Time a mix and the best single backend in turn; the mix must win by more than noise."""
        (own,) = single.groups
        alone = self._runner((OperatorGroup(own.backend, self._graph.everything),))
        runs = {"alone": alone, "mixed": self._runner(best.groups), "torch": self._code.run}
        times = self._times(runs)
        # a "mix" of one group is a single backend, and `single` is the best of those already
        wins = len(best.groups) > 1 and times["mixed"] * LEAST_GAIN <= times["alone"]
        mixed = placed_groups(self._forward, [(g.backend, g.operators) for g in best.groups])
        return dataclasses.replace(
            single,
            groups=mixed if wins else single.groups,
            us=times["mixed" if wins else "alone"],
            torch_us=times["torch"],
            notes=notes,
        )

    def _times(self, runs: Mapping[str, ForwardRunner], **options: Any) -> dict[str, float]:
        calls = {name: functools.partial(run, *self._code.examples) for name, run in runs.items()}
        return time_in_turn(calls, **options)

    def _cost_of(self, group: OperatorGroup) -> float | None:
        """Return what a group costs by itself, of the log where it is there."""
        code, _, _ = self._forward.part(group.operators)
        if group.backend in self._libraries:
            # building takes seconds: nothing is won on an operator that is over at once
            known = measure_backends(code, [TORCH], log=self._log, rounds=3)
            if known[TORCH].us < LEAST_US:
                return None
        costs = measure_backends(code, [group.backend], log=self._log, rounds=3)
        found = costs[group.backend]
        return None if found.refused else found.us

    def _switch_us(self) -> float:
        """Return epsilon: what a group more costs, by a placement of all operators one by one against the whole."""
        # say 120 operators take 900 us one by one and 840 together: 0.5 us a group, to look up its operands and to
        # store its results
        singles = tuple(OperatorGroup(TORCH, 1 << i) for i in range(len(self._graph.operators)))
        runs = {"cut": self._runner(singles), "whole": self._code.run}
        times = self._times(runs, rounds=3)
        return max(times["cut"] - times["whole"], 0.0) / max(len(singles), 1)

    def _build_placement(self, groups: tuple[OperatorGroup, ...]) -> ForwardRunner:
        build = functools.partial(
            self._forward.build, [(g.backend, g.operators) for g in groups], self._build
        )
        return build_checked(build, self._code.examples, self._expected)

    def _time_of(self, placement: Placement) -> float | None:
        try:
            run = self._runner(placement.groups)
        except BackendRefused:
            return None
        return self._times({"own": run}, rounds=3)["own"]
