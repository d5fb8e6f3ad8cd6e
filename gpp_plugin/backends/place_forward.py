"""Chooses what a forward runs on: the fastest single backend, or a mix where backends run parts alone.

Source: Collage (PACT 2022, arXiv 2111.00655; here by the thesis, section 2.4): op level first, graph level behind it
Tests: tests/backends/test_backends.py
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

from gpp_plugin.backends.forward_code import ForwardCode, ForwardRunner
from gpp_plugin.backends.measured_backends import (
    TORCH,
    BackendLog,
    build_checked,
    build_forward,
    measure_backends,
    time_in_turn,
)
from gpp_plugin.backends.placed_forward import CuttableForward, placed_groups
from gpp_plugin.collage.candidates import Candidates, OperatorGroup, Placement, find_candidates
from gpp_plugin.collage.graph_search import SearchSettings, search_placements
from gpp_plugin.collage.op_placement import place_operators
from gpp_plugin.collage.registered import patterns_of
from gpp_plugin.errors import BackendRefused
from gpp_plugin.ir.backend_costs import BackendCost, PlacedGroup, StageBackend

logger = logging.getLogger(__name__)

LEAST_GAIN = 1.05
"""How many times as fast as torch (a mix: as the best single backend) something must be to be taken: less is noise."""
UNMATCHED = "matches nothing here"
"""Of a pattern or rule, in a choice's notes."""
LEAST_US = 50.0
"""Operators that take less on torch are given to no library by themselves."""


def choose_single(
    stage: str, costs: Sequence[BackendCost], *, least_gain: float = LEAST_GAIN
) -> StageBackend:
    """Return the fastest backend of those measured; torch where none is faster by more than noise.

    Args:
        costs: torch's among them.
    """
    # torch 100, a 97, b refused: a is 1.03 times as fast, which another day may be 0.98; torch costs no building
    usable = [cost for cost in costs if not cost.refused]
    torch_us = next(cost.us for cost in costs if cost.backend == TORCH)
    best = min(usable, key=lambda cost: cost.us)
    if best.us * least_gain > torch_us:
        best = next(cost for cost in usable if cost.backend == TORCH)
    return StageBackend(
        stage=stage,
        groups=(PlacedGroup(backend=best.backend),),
        us=best.us,
        torch_us=torch_us,
        costs=tuple(costs),
    )


def runs_parts_alone(names: Sequence[str]) -> bool:
    """Return whether some backend runs nothing but the groups of its patterns and rules."""
    return any(not patterns_of(name).runs_any for name in names)


@torch.no_grad()
def place_forward(
    code: ForwardCode,
    names: Sequence[str],
    *,
    log: BackendLog | None = None,
    searches: bool | None = None,
    settings: SearchSettings | None = None,
) -> StageBackend:
    """Return what a forward should run on, of these backends and torch.

    Args:
        searches: look for mixes; None: where some backend runs parts alone.
    """
    names = [name for name in dict.fromkeys(names) if name != TORCH]
    whole = [name for name in names if patterns_of(name).runs_any]
    single = choose_single(code.name, list(measure_backends(code, whole, log=log).values()))
    if not (runs_parts_alone(names) if searches is None else searches) or code.refusal():
        return single
    try:
        return _Mixing(code, (TORCH, *names), log=log, settings=settings).best(single)
    except BackendRefused as error:
        logger.info("stage %s is not mixed: %s", code.name, error)
        return single


class _Mixing:
    """The two levels of Collage on one forward."""

    def __init__(
        self,
        code: ForwardCode,
        names: Sequence[str],
        *,
        log: BackendLog | None,
        settings: SearchSettings | None,
    ) -> None:
        self._code = code
        self._log = log
        self._settings = settings
        self._forward = CuttableForward(code)
        self._graph = self._forward.graph
        self._known = [patterns_of(name) for name in names]
        self._expected = code.run(*code.examples)
        self._runs: dict[tuple[OperatorGroup, ...], ForwardRunner] = {}
        self._built: dict[tuple[str, int], ForwardRunner] = {}
        self._libraries = [own.backend for own in self._known if own.runs_any and own.backend != TORCH]

    def best(self, single: StageBackend) -> StageBackend:
        """Return the fastest mix, or the single backend where no mix is faster by more than noise."""
        # candidates -> cheapest sum (op level) -> search end to end (graph level) -> the winner against the best single
        # backend in turn: each step's times are only compared with each other.
        found = find_candidates(self._graph, self._known)
        usable = [group for group in found.groups if group.operators != self._graph.everything]
        op_level = place_operators(self._graph, usable, self._cost_of, epsilon_us=self._switch_us())
        singles = [own.backend for own in self._known if own.runs_any]
        searched = search_placements(
            self._graph,
            op_level.placement,
            self._time_of,
            singles=singles,
            libraries=self._libraries,
            settings=self._settings,
        )
        notes = _notes(found, op_level.placement, len(searched.tried))
        return self._against(single, searched.best, notes)

    def _against(self, single: StageBackend, best: Placement, notes: tuple[str, ...]) -> StageBackend:
        """Time a mix and the best single backend in turn; the mix must win by more than noise."""
        (own,) = single.groups
        alone = self._runner((OperatorGroup(own.backend, self._graph.everything),))
        runs = {"alone": alone, "mixed": self._runner(best.groups), "torch": self._code.run}
        times = time_in_turn(
            {name: functools.partial(run, *self._code.examples) for name, run in runs.items()}
        )
        # a "mix" of one group is a single backend, which was chosen among its like already
        if len(best.groups) == 1 or times["mixed"] * LEAST_GAIN > times["alone"]:
            return StageBackend(
                stage=single.stage,
                groups=single.groups,
                us=times["alone"],
                torch_us=times["torch"],
                costs=single.costs,
                notes=notes,
            )
        return StageBackend(
            stage=single.stage,
            groups=placed_groups(self._forward, [(g.backend, g.operators) for g in best.groups]),
            us=times["mixed"],
            torch_us=times["torch"],
            costs=single.costs,
            notes=notes,
        )

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
        # say 120 operators take 900 us one by one and 840 together: 0.5 us a group, for looking up what it takes and
        # keeping what it makes
        singles = tuple(OperatorGroup(TORCH, 1 << i) for i in range(len(self._graph.operators)))
        runs = {"cut": self._runner(singles), "whole": self._code.run}
        times = time_in_turn(
            {name: functools.partial(run, *self._code.examples) for name, run in runs.items()}, rounds=3
        )
        return max(times["cut"] - times["whole"], 0.0) / max(len(singles), 1)

    def _runner(self, groups: tuple[OperatorGroup, ...]) -> ForwardRunner:
        if groups not in self._runs:
            self._runs[groups] = build_checked(
                lambda: self._forward.build([(g.backend, g.operators) for g in groups], self._build),
                self._code.examples,
                self._expected,
            )
        return self._runs[groups]

    def _build(self, backend: str, code: ForwardCode) -> ForwardRunner:
        """Return what a backend builds of a part, built once: most parts of two placements are the same."""
        key = (backend, id(code))  # parts are kept as long as the forward is
        if key not in self._built:
            self._built[key] = build_forward(backend, code)
        return self._built[key]

    def _time_of(self, placement: Placement) -> float | None:
        try:
            run = self._runner(placement.groups)
        except BackendRefused:
            return None
        return time_in_turn({"own": functools.partial(run, *self._code.examples)}, rounds=3)["own"]


def _notes(found: Candidates, op_level: Placement, num_tried: int) -> tuple[str, ...]:
    lines = [f"{what} {UNMATCHED}" for what in found.unmatched]
    lines.append(
        f"{len(found.groups)} groups of operators, op-level placement {' + '.join(op_level.backends)} in "
        f"{len(op_level.groups)} groups, {num_tried} placements measured end to end"
    )
    return tuple(lines)
