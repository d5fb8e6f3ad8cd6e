"""One rank of `gpp bench zoo --family plain`: modules trained one after the other, each against one process.

python -m gpp_benchmarks.zoo.plain._plain_ranks SETTINGS_JSON
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks._ranks import rank_settings, start_engine
from gpp_benchmarks.zoo._catalogue import BROKEN, EXACT, LATE, RAW, REFUSED, WRONG, Batch
from gpp_benchmarks.zoo._on_ranks import train_alone, trained
from gpp_benchmarks.zoo._staged import worst_of
from gpp_benchmarks.zoo._trial import is_refusal, means_of, one_line
from gpp_benchmarks.zoo.plain import PLAIN_MODELS, empty_plain_row
from gpp_benchmarks.zoo.plain._entry import SAMPLES, PlainModel
from gpp_plugin.capture.tracing.outside import hidden_process_group
from gpp_plugin.errors import PlanError
from gpp_plugin.integrations.deepspeed.stock_engine import join_ranks
from gpp_plugin.launch import emit_event, end_rank
from gpp_plugin.relative_errors import loss_difference, relative_error
from gpp_plugin.runtime.ranks.job_board import close_board

STEPS, UNITS = 5, 2
LOSS_LIMIT = PARAMETER_LIMIT = 1e-5
LEARNING_RATE = 0.05
WAIT_S = 60
"""For a message; then the job of a module has failed."""


def units_of(entry: PlainModel) -> list[list[Batch]]:
    """Return the loss units of each step; no two are alike."""
    return [[entry.unit(step * UNITS + unit) for unit in range(UNITS)] for step in range(STEPS)]


class _Trial:
    """One module on all ranks; `run` is collective.

    Args:
        phase: what is done, so that an error can be told by when it came.
    """

    def __init__(self, entry: PlainModel) -> None:
        self.entry = entry
        self.phase = "start"
        self.cuttable: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """Return what became of the module, on rank 0."""
        engine = self._start()
        self.phase = "steps"
        losses = [float(engine.train_batch(iter(units))) for units in units_of(self.entry)]
        state = engine.gather_state_dict()
        engine.destroy()
        if state is None:
            return {}
        self.phase = "alone"
        alone = self.entry.build()
        with hidden_process_group():
            optimizer = torch.optim.SGD(trained(alone), lr=LEARNING_RATE)
            wanted = train_alone(alone, units_of(self.entry), optimizer)
        return _compared(losses, wanted, state, alone)

    def _start(self) -> Any:
        """Return an engine of two stages; of one where there is nothing to cut."""
        try:
            return self._engine(2)
        except PlanError:  # fewer blocks than stages
            return self._engine(1)

    def _engine(self, stages: int) -> Any:
        config = {
            "train_batch_size": SAMPLES * UNITS,
            "train_micro_batch_size_per_gpu": SAMPLES,
            "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
            "graph_pipeline": {"stages": stages, "comm_timeout_s": WAIT_S, **self.entry.block},
        }
        engine = start_engine(self.entry.build(), units_of(self.entry)[0][0], config)
        reference = engine._rank_runner.reference
        means = means_of(reference.analysis)
        self.cuttable = {
            "blocks": len(reference.block_graph.blocks),
            "stages": len(engine.plan.stages),
            "eager": list(means["eager_leaves"]),
            "eager_share": means["eager_share"],
            "how": means["how"],
        }
        return engine


def _compared(
    losses: Sequence[float], wanted: Sequence[float], state: dict[str, Tensor], alone: nn.Module
) -> dict[str, Any]:
    """Return the verdict on what was trained beside what one process trained."""
    trained = dict(alone.named_parameters())
    kept = alone.state_dict()
    errors = {name: _error(state.get(name), tensor) for name, tensor in kept.items()}
    loss_error = loss_difference(losses, wanted)
    of_parameters = {name: error for name, error in errors.items() if name in trained} or {"": 0.0}
    of_buffers = {name: error for name, error in errors.items() if name not in trained} or {"": 0.0}
    parameter_error, parameter = worst_of(of_parameters)
    buffer_error, buffer = worst_of(of_buffers)
    off = [
        f"{what} off by {error:.1e}{f' ({whose})' if whose else ''}"
        for what, error, whose in (
            ("losses", loss_error, ""),
            ("parameters", parameter_error, parameter),
            ("buffers", buffer_error, buffer),
        )
        if not error <= LOSS_LIMIT
    ]
    return {
        "verdict": WRONG if off else EXACT, "line": ", ".join(off), "losses": list(losses), "wanted": list(wanted),
        "loss_error": loss_error, "parameter_error": parameter_error, "buffer_error": buffer_error,
    }  # fmt: skip


def _error(found: Tensor | None, wanted: Tensor) -> float:
    """Return ||found - wanted|| / ||wanted||; infinity where there is none, or one of another shape."""
    if found is None or found.shape != wanted.shape:
        return float("inf")
    a, b = (
        (t.detach().to_dense() if t.is_sparse else t.detach()).to(
            torch.complex128 if t.is_complex() else torch.float64
        )
        for t in (found, wanted)
    )
    return relative_error(float((a - b).norm()), float(b.norm()), least=1e-6)


def train_plain(entry: PlainModel) -> dict[str, Any]:
    """Train a module on all ranks and return its row on rank 0; collective, whatever the module does."""
    began = time.process_time()
    trial = _Trial(entry)
    try:
        found = trial.run()
    except Exception as error:  # one row, whatever it is
        verdict = REFUSED if is_refusal(error) else RAW
        if trial.phase != "start" and verdict == REFUSED:
            verdict = LATE
        found = {"verdict": BROKEN if trial.phase == "alone" else verdict, "line": one_line(error)}
    _drop_groups()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (found, time.process_time() - began))
    # what one rank alone met (an error in a step) is the module's, whichever rank that was
    failed = [row for row, _ in told if row.get("verdict") not in (None, EXACT)]
    own = next((row for row in failed if row["verdict"] == RAW), failed[0] if failed else told[0][0])
    return {
        **empty_plain_row(entry), **own, "cuttable": trial.cuttable, "cpu_s": sum(seconds for _, seconds in told),
    }  # fmt: skip


def _drop_groups() -> None:
    """Destroy what process groups a module left behind, so that the next one starts as the first did."""
    from deepspeed.utils import groups as deepspeed_groups

    close_board()
    gc.collect()
    for name, value in vars(deepspeed_groups).items():
        if isinstance(value, dist.ProcessGroup) and value is not dist.group.WORLD:
            setattr(deepspeed_groups, name, None)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            with contextlib.suppress(Exception):  # of a job that failed
                dist.destroy_process_group(group)
    gc.collect()


def _end_late(*_: Any) -> None:
    os.write(2, b"took too long\n")
    os._exit(3)


def main() -> None:
    """Train modules on this rank; rank 0 tells their rows."""
    settings = rank_settings()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    join_ranks()
    signal.signal(signal.SIGALRM, _end_late)
    for name in settings["names"]:
        if dist.get_rank() == 0:
            emit_event(begun=name)
        signal.setitimer(signal.ITIMER_REAL, settings["timeout_s"])
        row = train_plain(PLAIN_MODELS[name])
        if dist.get_rank() == 0:
            emit_event(row=row)
    signal.setitimer(signal.ITIMER_REAL, 0)
    dist.barrier()
    end_rank()


if __name__ == "__main__":
    main()
