"""Builds a forward on backends, checks each against torch, times them in turn, and stores the measurements.

A backend that cannot run the code, fails, or is further from torch than the tolerance is refused with the reason. Times
are medians of runs in turn, so that a slow moment of the machine hits all of them. The log on disk has one file for
each forward, backend, version, device, types and number of threads: what is stored is neither measured nor built again.

Source: Collage (PACT 2022, arXiv 2111.00655; here by the thesis, section 2.4.2: the log of measurements)
Tests: tests/backends/test_backends.py
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpp_plugin.backends.forward_code import ForwardCode, ForwardRunner, named_operator
from gpp_plugin.capture.eager.trial_run import refuse_lost_device
from gpp_plugin.errors import BackendRefused
from gpp_plugin.ir.profile import BackendCost
from gpp_plugin.ir.serialize import load, save
from gpp_plugin.plugins import find_backend
from gpp_plugin.profile.machine import MeasurementStore, default_directory, describe_device, processor_name
from gpp_plugin.relative_errors import relative_error

logger = logging.getLogger(__name__)

TORCH = "torch"
TOLERANCE = 1e-5
"""Most that a float32 output may differ from torch's, by the norm of the tensor."""
HALF_TOLERANCE = 2e-2
ROUNDS = 7
WARM_UPS = 2
BUDGET_S = 2.0
"""Seconds after which a slow forward is not run again, once it has been three times."""


class BackendLog(MeasurementStore):
    """Costs on disk, by what they depend on.

    Args:
        directory: where the files are; beside the stored profiles if None.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        lost = "costs of backends could not be stored in %s (%s)"
        super().__init__(
            directory or default_directory().with_name("backends"), what="a stored cost", lost=lost
        )

    def find(self, code: ForwardCode, backend: str) -> BackendCost | None:
        """Return the stored cost; None where there is none, or none that can be read."""
        return self.look_up(self._key(code, backend), functools.partial(load, BackendCost))

    def put(self, code: ForwardCode, cost: BackendCost) -> None:
        """Store a cost; where the disk refuses, warn and continue without."""
        self.keep(self._key(code, cost.backend), functools.partial(save, cost))

    def _key(self, code: ForwardCode, backend: str) -> dict[str, object]:
        device = torch.device(next(iter(code.devices), "cpu"))
        # everything that time or result may depend on: another torch or library is another file
        return {
            "forward": code.signature,
            "backend": backend,
            "version": find_backend(backend).version(),
            **place_key(device),
            "dtypes": sorted(map(str, code.dtypes)),
            "threads": torch.get_num_threads(),
        }


def place_key(device: torch.device) -> dict[str, object]:
    """Return what of a place of measurement times depend on."""
    return {"device": describe_device(device, torch.get_num_threads()), "processor": processor_name()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltForward:
    """A forward on a backend, checked.

    Args:
        run: as built; ``overwrites`` says that the next call writes what it returned.
    """

    run: ForwardRunner
    build_s: float
    error: float
    overwrites: bool

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return outputs that stay as they are."""
        outputs = self.run(*tensors)
        return tuple(output.clone() for output in outputs) if self.overwrites else tuple(outputs)


def build_forward(name: str, code: ForwardCode) -> ForwardRunner:
    """Return what a backend builds of code; an error names the operator.

    Raises:
        BackendRefused: it cannot run here, or cannot run this.
    """
    backend = find_backend(name)
    reason = backend.missing() or backend.refusal(code)
    if reason:
        raise BackendRefused(reason)
    try:
        return backend.build(code)
    except BackendRefused:
        raise
    except Exception as error:  # whatever a converter raises
        raise BackendRefused(named_operator(code.operators, error)) from error


@torch.no_grad()
def build_checked(
    build: Callable[[], ForwardRunner], tensors: Sequence[Tensor], expected: Sequence[Tensor]
) -> BuiltForward:
    """Build a forward, run it on tensors and compare what comes.

    Args:
        expected: what torch makes of ``tensors``.

    Raises:
        BackendRefused: it cannot be built or run, or its results are others.
    """
    start = time.perf_counter()
    run = build()
    try:
        first = tuple(run(*tensors))
    except BackendRefused:
        raise
    except Exception as error:
        refuse_lost_device(error)
        raise BackendRefused(f"its first run failed: {type(error).__name__}: {error}") from error
    build_s = time.perf_counter() - start
    distance = compare_outputs(first, expected)
    # Does it reuse its results' memory, or return an operand? Equal addresses say so while the first results are held.
    # A library that holds its results in the request (OpenVINO) returns the same memory again. A stage that only passes
    # a tensor on returns the caller's.
    second = run(*tensors)
    held = {t.untyped_storage().data_ptr() for t in (*first, *tensors) if t.numel()}
    overwrites = any(t.untyped_storage().data_ptr() in held for t in second if t.numel())
    return BuiltForward(run=run, build_s=build_s, error=distance, overwrites=overwrites)


def compare_outputs(
    found: Sequence[Tensor], expected: Sequence[Tensor], *, what: str = "output", least: float = 0.0
) -> float:
    """Return the largest difference of any output, by its norm; refuse other shapes, types or numbers.

    Args:
        what: they are called in messages.
        least: the norm by which tensors of a smaller one are compared.

    Raises:
        BackendRefused: says which output is another.
    """
    if len(found) != len(expected):
        raise BackendRefused(f"it returns {len(found)} tensors of {len(expected)}")
    # By the tensor's norm, not value by value: a sum that cancels to almost nothing has no relative error to speak of.
    worst = 0.0
    for i, (own, right) in enumerate(zip(found, expected, strict=True)):
        if own.shape != right.shape or own.dtype != right.dtype:
            raise BackendRefused(
                f"{what} {i} is {tuple(own.shape)} {own.dtype}, and {tuple(right.shape)} {right.dtype} on torch"
            )
        if not right.dtype.is_floating_point:
            if not torch.equal(own, right):
                raise BackendRefused(f"{what} {i} ({right.dtype}) has other values than on torch")
            continue
        most = HALF_TOLERANCE if right.dtype.itemsize < 4 else TOLERANCE
        # infinities and NaN where torch has them (a mask of least numbers) are compared as they are
        wide, wanted = own.double(), right.double()
        finite = wanted.isfinite()
        if not torch.equal(wide.isfinite(), finite) or not torch.equal(
            wide[~finite].nan_to_num(0.0, 1.0, -1.0), wanted[~finite].nan_to_num(0.0, 1.0, -1.0)
        ):
            raise BackendRefused(
                f"{what} {i} is not finite where torch's is, the other way round, or otherwise"
            )
        # of a tensor of zeros, the difference itself
        scale = max(float(wanted[finite].norm()), least) or 1.0
        error = relative_error(float((wide - wanted)[finite].norm()), scale)
        if not error <= most:
            raise BackendRefused(f"{what} {i} differs by {error:.1e} of its norm, more than {most:.0e}")
        worst = max(worst, error)
    return worst


def time_in_turn(runs: Mapping[str, Callable[[], object]], *, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median microseconds of each call, made in turn: one round is one of each."""
    # On one thread the process's CPU time is what it would take on a free core.
    clock = time.process_time if torch.get_num_threads() == 1 and not torch.cuda.is_available() else _clock
    # torch a b torch a b ...: a core that slows down for a second slows all of them; the median leaves out the rest
    laps: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for attempt in range(rounds + WARM_UPS):
        for name, run in runs.items():
            start = clock()
            run()
            if attempt >= WARM_UPS:
                laps[name].append(clock() - start)
        if attempt >= WARM_UPS + 2 and time.perf_counter() - began > BUDGET_S * len(runs):
            break
    return {name: statistics.median(own) * 1e6 for name, own in laps.items()}


def _clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def measure_backends(
    code: ForwardCode, names: Sequence[str], *, log: BackendLog | None = None, rounds: int = ROUNDS
) -> dict[str, BackendCost]:
    """Return what each backend costs on a forward, torch's operators first.

    Args:
        names: of backends; torch is measured with them.
        log: what it has is not measured again; None: all is measured, and nothing is stored.
    """
    names = list(dict.fromkeys((TORCH, *names)))
    reason = code.refusal()
    if reason:
        refused = {name: BackendCost(backend=name, refused=reason) for name in names}
        return {**refused, TORCH: BackendCost(backend=TORCH)}
    stored = [name for name in names if log is not None and not find_backend(name).missing()]
    found = {name: log.find(code, name) for name in stored if log is not None}
    costs = {name: cost for name, cost in found.items() if cost is not None}
    # The log has torch and openvino, new is inductor: it and torch are built and timed in turn, openvino is not built
    # at all. Of torch the new time counts in this answer; the old one stays in the log.
    todo = [name for name in names if name not in costs]
    if not todo:
        return {name: costs[name] for name in names}
    expected = code.run(*code.examples)
    built: dict[str, BuiltForward] = {}
    for name in dict.fromkeys((TORCH, *todo)):  # torch is always timed beside what is new
        try:
            built[name] = build_checked(functools.partial(build_forward, name, code), code.examples, expected)
        except BackendRefused as error:
            costs[name] = BackendCost(backend=name, refused=str(error))
    runs = {name: functools.partial(own, *code.examples) for name, own in built.items()}
    times = time_in_turn(runs, rounds=rounds)
    for name, own in built.items():
        costs[name] = BackendCost(backend=name, us=times[name], build_s=own.build_s, error=own.error)
    for name in todo:
        if log is not None and name in stored:
            log.put(code, costs[name])
    return {name: costs[name] for name in names}
