"""Runs the modes of a comparison in turns: their processes are all there at once, and one of them works at a time."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpp_plugin.compare.compare_settings import CHAIN, GRAPH, SINGLE, CompareSettings
from gpp_plugin.errors import ConfigError, GppError, RuntimeFailure
from gpp_plugin.launch import run_ranks
from gpp_plugin.relative_errors import loss_difference

Tell = Callable[[str], None]

BUBBLE_STEPS = 3
"""Steps after the timed ones whose timelines are recorded; the median of their bubbles counts."""


@dataclass(slots=True, kw_only=True)
class ModeResult:
    """What one mode came to.

    Args:
        refused: why the mode cannot run this; everything else is empty then.
        startup_s: from starting its processes until the first step could begin.
        bubble: idle share of the ranks' time between first and last task; None for a single process.
        peak_bytes_by_rank: as ``memory_measure`` says; ``parameter_bytes_by_rank``: parameters and buffers.
        draws: a step draws random numbers, as dropout does.
    """

    mode: str
    num_ranks: int
    refused: str | None = None
    startup_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    bubble: float | None = None
    peak_bytes_by_rank: list[int] = field(default_factory=list)
    parameter_bytes_by_rank: list[int] = field(default_factory=list)
    memory_measure: str = ""
    draws: bool = False

    @property
    def iteration_ms(self) -> float:
        """Return the median time of a step."""
        return statistics.median(self.times_ms)


class _Job:
    """The processes of one mode, which run one command at a time."""

    def __init__(self, mode: str, settings: CompareSettings, folder: Path) -> None:
        self.result = ModeResult(mode=mode, num_ranks=1 if mode == SINGLE else settings.num_ranks)
        path = folder / f"{mode}.fifo"
        os.mkfifo(path)
        # open for reading as well: does not wait for a reader, and commands written early stay in the pipe
        self._commands = os.open(path, os.O_RDWR)
        self._events = run_ranks(
            "gpp_plugin.compare.compare_rank",
            [str(folder / "settings.json"), mode, str(path)],
            num_ranks=self.result.num_ranks,
            timeout_s=settings.timeout_s,
        )

    def start(self) -> str:
        """Start the processes, wait until they can take a step or say why not, and return which of the two.

        Raises:
            ConfigError: there is no such model.
        """
        begin = time.perf_counter()
        event = self._answer()
        if "failed" in event:
            raise ConfigError(event["failed"])
        self.result.startup_s = time.perf_counter() - begin
        self.result.refused = event.pop("refused", None)
        self.result.facts = event
        if self.result.refused is not None:
            self.close()
            return f"cannot run this: {self.result.refused}"
        stages = event.get("stages", 1)
        return f"ready after {self.result.startup_s:.1f} s, {stages} stage{'s' * (stages > 1)}"

    def step(self, step: int, measure: str = "time") -> dict[str, Any]:
        """Take one step on all processes of the mode."""
        os.write(self._commands, (json.dumps({"step": step, "measure": measure}) + "\n").encode())
        return self._answer()

    def close(self) -> None:
        """End the processes."""
        self._events.close()  # type: ignore[attr-defined]  # a generator
        if self._commands >= 0:
            os.close(self._commands)
            self._commands = -1

    def _answer(self) -> dict[str, Any]:
        try:
            return next(self._events)
        except StopIteration:
            raise RuntimeFailure(f"mode {self.result.mode}: its processes ended without an answer") from None
        except RuntimeFailure as error:
            raise RuntimeFailure(f"mode {self.result.mode}: {error}") from error


def compare_modes(settings: CompareSettings, *, tell: Tell) -> list[dict[str, Any]]:
    """Train in every mode, in turns on the same batches, and return a row each; the best chain is only simulated.

    Args:
        tell: called with each line of progress.

    Raises:
        ConfigError: there is no such model, or no mode can run it.
        RuntimeFailure: a process failed; the message ends with what it said last.
    """
    if settings.modes == (CHAIN,):
        raise ConfigError(f"modes: {CHAIN} is never trained; add {GRAPH}, or give --emulate or --cluster")
    with tempfile.TemporaryDirectory(prefix="gpp_compare_") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "settings.json").write_text(settings.to_json(), encoding="utf-8")
        # All modes' processes are there at once and take turns, so that each step of every mode meets
        # the machine in the same state; those that wait sleep in a read. They start one after the
        # other, since they profile while they start.
        #
        #   single   | start |  .   |   .   | s0 |    |    | s1 |    |    |
        #   stock    |       | start|   .   |    | s0 |    |    | s1 |    |
        #   graph    |       |      | start |    |    | s0 |    |    | s1 |
        jobs = []
        for mode in settings.modes:
            if mode == CHAIN:
                continue  # is not trained: `chain_row`
            job = stack.enter_context(closing(_Job(mode, settings, folder)))
            tell(f"{mode}: starting {job.result.num_ranks} process{'es' * (job.result.num_ranks > 1)}")
            jobs.append(job)
            tell(f"{mode}: {job.start()}")
        working = [job for job in jobs if job.result.refused is None]
        if not working:
            raise ConfigError(f"no mode can run this; {jobs[0].result.mode}: {jobs[0].result.refused}")
        _take_steps(working, settings, tell)
        for job in jobs:
            job.close()
        chain = []
        if CHAIN in settings.modes:
            tell(f"{CHAIN}: planning")
            chain = [chain_row(settings, str(folder / f"{GRAPH}_profiles"))]
        rows = [*result_rows([job.result for job in jobs]), *chain]
        return sorted(rows, key=lambda row: settings.modes.index(row["mode"]))


def _take_steps(jobs: list[_Job], settings: CompareSettings, tell: Tell) -> None:
    timed = settings.warm_up + settings.steps
    for step in range(timed):
        for job in jobs:
            answer = job.step(step)
            job.result.losses.append(answer["loss"])
            job.result.draws |= answer["draws"]
            if step >= settings.warm_up:
                job.result.times_ms.append(answer["ms"])
        if step < settings.warm_up or (step + 1 - settings.warm_up) % max(1, settings.steps // 5) == 0:
            times = ", ".join(f"{job.result.mode} {job.result.losses[-1]:.4f}" for job in jobs)
            tell(f"step {step + 1} of {timed}: loss {times}")
    # Bubbles and memory last, since timelines and saved-tensor hooks slow the steps in which they are taken.
    for job in jobs:
        bubbles = [job.step(timed + i, "bubble")["bubble"] for i in range(BUBBLE_STEPS)]
        job.result.bubble = statistics.median(bubbles) if None not in bubbles else None
        for name, value in job.step(timed + BUBBLE_STEPS, "memory").items():
            if name in ("peak_bytes_by_rank", "parameter_bytes_by_rank", "memory_measure"):
                setattr(job.result, name, value)


def chain_row(settings: CompareSettings, folder: str) -> dict[str, Any]:
    """Return the row of the best chain, simulated on the costs that the graph's ranks have measured.

    Args:
        folder: where these are stored.
    """
    # Imported here: this process needs torch for nothing else.
    import torch

    from gpp_plugin.compare.compared_models import build_model
    from gpp_plugin.compare.emulated import chain_of

    row: dict[str, Any] = {"mode": CHAIN, "how": "simulated", "ranks": settings.num_ranks}
    if torch.cuda.is_available():
        return {**row, "refused": "its costs are measured on a CPU here; --cluster simulates it on a GPU's"}
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as each rank has
    try:
        plan = chain_of(build_model(settings), settings, folder)
    except GppError as error:
        return {**row, "refused": str(error)}
    return {
        **row,
        "stages": len(plan.stages),
        "depth": plan.depth,
        "micro_batches": [plan.num_micro_batches(i) for i in range(len(plan.stages))],
        "predicted_ms": plan.iteration_us / 1e3,
        "notes": list(plan.notes),
    }


def result_rows(results: list[ModeResult]) -> list[dict[str, Any]]:
    """Return one row a mode; losses are compared with those of one process, or of the first mode that ran."""
    ran = [result for result in results if result.refused is None]
    compared = next((result for result in ran if result.mode == SINGLE), ran[0] if ran else None)
    rows = []
    for result in results:
        row: dict[str, Any] = {"mode": result.mode, "how": "measured", "ranks": result.num_ranks}
        if result.refused is not None:
            rows.append({**row, "refused": result.refused})
            continue
        row.update(
            stages=result.facts.get("stages"),
            depth=result.facts.get("depth", 1),
            micro_batches=result.facts.get("micro_batches", []),
            iteration_ms=result.iteration_ms,
            predicted_ms=result.facts.get("predicted_ms"),
            startup_s=result.startup_s,
            bubble=result.bubble,
            peak_bytes=max(result.peak_bytes_by_rank),
            peak_bytes_by_rank=result.peak_bytes_by_rank,
            parameter_bytes_by_rank=result.parameter_bytes_by_rank,
            memory_measure=result.memory_measure,
            max_loss_difference=None
            if result is compared or compared is None
            else loss_difference(result.losses, compared.losses),
            losses=result.losses,
            draws=result.draws,
            notes=result.facts.get("notes", []),
        )
        rows.append(row)
    return rows
