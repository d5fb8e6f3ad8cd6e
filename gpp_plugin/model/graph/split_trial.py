"""Whether the backward of a user's module can be made in two parts, and what that costs.

Nothing says of a module's operators whether they can be run for their inputs first and for parameters later: one may
let go of what it saved, or write to it, or add to something as it goes. So both are done and compared: a module whose
gradients are not the same is never split.

Source: this project
Tests: tests/stage_graph/test_module_cost.py
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from gpp_plugin.model.graph.module_trial import ModuleTrial
from gpp_plugin.profile.split_cost import CANNOT_SPLIT, SplitCost
from gpp_plugin.profile.timing import Stopwatch
from gpp_plugin.runtime.split import BackwardSplitter

logger = logging.getLogger(__name__)

WARM_UPS, REPEATS = 1, 2

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
COARSE_TOLERANCE = 5e-2
"""How far a gradient may be off, over its norm: sums differ in their order."""
SMALL = 1e-3
"""Gradients of less than this share of the largest one's norm are mostly rounding."""

_Gradients = list[Tensor | None]


def measure_split(trial: ModuleTrial) -> SplitCost:
    """Time a backward whole and in two parts; `CANNOT_SPLIT` where the parts fail or make other gradients.

    Collective over the ranks that compute the stage together.
    """
    splitter = BackwardSplitter()
    laps: list[tuple[float, ...]] = []
    for attempt in range(WARM_UPS + REPEATS):
        wanted, whole_us = _run(trial, None)
        try:
            found, parts_us = _run(trial, splitter)
        except Exception as error:  # whatever its operators say to being run twice
            logger.info("stage %s: its backward cannot be split: %s", trial.stage.name, error)
            return CANNOT_SPLIT
        if not _are_same(wanted, found):
            logger.info("stage %s: its backward makes other gradients in two parts", trial.stage.name)
            return CANNOT_SPLIT
        if attempt >= WARM_UPS:
            laps.append((*whole_us, *parts_us))
    backward_us, input_us, weight_us = (statistics.median(column) for column in zip(*laps, strict=True))
    return SplitCost(backward_us=backward_us, input_gradient_us=input_us, weight_gradient_us=weight_us)


def _run(trial: ModuleTrial, splitter: BackwardSplitter | None) -> tuple[_Gradients, list[float]]:
    """Return the gradients of received tensors and parameters, and the time of each part; the same draws each time."""
    with trial.undisturbed():
        roots, leaves = trial.forward()
        seeds = [torch.randn_like(root) for root in roots]
        watch = Stopwatch(trial.device)
        found: _Gradients
        if splitter is not None:
            found, pending = splitter.split(roots, leaves, seeds)
            watch.mark()
            pending.run()
        else:
            if roots:
                torch.autograd.backward(roots, seeds)
            found = [leaf.grad for leaf in leaves]
        watch.mark()
        found += [parameter.grad for parameter in trial.module.parameters()]
        return found, watch.laps_us()


def _are_same(wanted: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> bool:
    largest = max((float(g.double().norm()) for g in wanted if g is not None), default=0.0)
    for want, have in zip(wanted, found, strict=True):
        if want is None or have is None:
            only = want if have is None else have
            if only is not None and float(only.norm()) > 0:
                return False
            continue
        tolerance = TOLERANCE.get(want.dtype, COARSE_TOLERANCE)
        norm = max(float(want.double().norm()), SMALL * largest)
        if not float((want.double() - have.double()).norm()) <= tolerance * norm:
            return False
    return True
