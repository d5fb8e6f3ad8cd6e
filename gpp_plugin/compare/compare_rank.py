"""One process of a comparison: makes its mode's trainer, then runs the commands of the comparing process.

python -m gpp_plugin.compare.compare_rank SETTINGS_FILE MODE COMMANDS_FIFO

Rank 0 reads commands, one JSON object a line, and broadcasts them; between commands a process sleeps.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpp_plugin.compare.compare_settings import SINGLE, CompareSettings, settings_from_json
from gpp_plugin.compare.compared_models import Batch, BuiltModel, build_model
from gpp_plugin.compare.single_process import PeakMemory, SingleProcess
from gpp_plugin.errors import GppError
from gpp_plugin.integrations.deepspeed.dispatch import GraphPipelineModule, initialize
from gpp_plugin.launch import emit_event
from gpp_plugin.model.materialize import resident_bytes
from gpp_plugin.runtime.ranks.agree import Collectives

_REFUSAL_S = 10.0
"""How long the other ranks wait while rank 0 reports why a mode is refused."""


class _Single:
    """The trainer of the single process."""

    def __init__(self, built: BuiltModel, settings: CompareSettings) -> None:
        has_cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
        self.module = built.model
        self._trainer = SingleProcess(
            built.model, settings.ds_config, loss_unit=settings.loss_unit, device=self.device
        )

    def facts(self) -> dict[str, Any]:
        return {"stages": 1, "notes": []}

    def train(self, batch: Batch) -> float:
        return self._trainer.train(batch)

    def counted_bytes(self) -> None:
        return None

    def bubble(self, batch: Batch) -> None:
        self.train(batch)


class _Pipeline:
    """The trainer of a pipeline, stock or graph: the engine that `deepspeed.initialize` returns."""

    def __init__(self, built: BuiltModel, config: dict[str, Any]) -> None:
        wrapped = GraphPipelineModule(built.model, sample_batch=built.batch_at(0))
        self._engine, *_ = initialize(model=wrapped, config=config)
        self.module = self._engine.module
        self.device = self._engine.device

    def facts(self) -> dict[str, Any]:
        plan = self._engine.plan
        return {
            "stages": len(plan.stages),
            "depth": plan.depth,
            "predicted_ms": plan.iteration_us / 1e3,
            "stage_names": [stage.name for stage in plan.stages],
            "micro_batches": [plan.num_micro_batches(i) for i in range(len(plan.stages))],
            "notes": [*plan.notes, *_notes_on_carried(self._engine)],
        }

    def train(self, batch: Batch) -> float:
        return float(self._engine.train_batch(data_iter=iter([batch])))

    def counted_bytes(self) -> int | None:
        """Return the activations of a rank of a plan that swaps or recomputes; its own hooks hide them from others."""
        if not any(stage.memory is not None for stage in self._engine.plan.stages):
            return None
        counts = [rank.counts for rank in self._engine.memory_report().ranks]
        mine = counts[int(os.environ["RANK"])]
        return 0 if mine is None else int(mine.peak_held_bytes)

    def bubble(self, batch: Batch) -> float | None:
        self._engine.record_timelines = True
        self.train(batch)
        self._engine.record_timelines = False
        timeline = self._engine.last_timeline
        return None if timeline is None else timeline.bubble_ratio()


def _notes_on_carried(engine: Any) -> list[str]:
    carried = getattr(engine, "carried", ())
    if not carried:
        return []
    return [
        "DeepSpeed sends neither int64 nor tensors without a gradient between stages: "
        f"{', '.join(carried)} travel as the bits of floats, exactly, and zeros travel back as their gradient"
    ]


def _join(settings: CompareSettings) -> Collectives:
    """Return the collectives of all processes of the mode."""
    group: dist.ProcessGroup | None = None
    if dist.is_initialized() and dist.get_world_size() > 1:
        timeout = datetime.timedelta(seconds=settings.timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout)
    return Collectives(group=group, who=f"rank {os.environ['RANK']}", timeout_s=settings.timeout_s)


def _commands(path: str, collectives: Collectives) -> Iterator[dict[str, Any]]:
    """Yield commands on every rank until there are no more."""
    # Only rank 0 holds the FIFO; the others get commands by a collective in which they sleep, instead of by reading
    # files in a loop while another mode is measured. An empty line, "{}", is the end.
    stream = open(path, encoding="utf-8") if os.environ["RANK"] == "0" else None  # noqa: SIM115
    while True:
        own = json.loads(stream.readline() or "{}") if stream is not None else None
        command = collectives.tell(own, source=0, what="the next command")
        if not command:
            return
        yield command


def main() -> None:
    """Serve one mode on this rank."""
    settings = settings_from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    mode, fifo = sys.argv[2], sys.argv[3]
    is_first = os.environ["RANK"] == "0"
    try:
        built = build_model(settings)
    except GppError as error:  # the same in every mode
        if is_first:
            emit_event(failed=str(error))
        return
    try:
        if mode == SINGLE:
            trainer: _Single | _Pipeline = _Single(built, settings)
        else:
            # Each mode measures costs in a folder of its own: stock must
            # not profit from what graph has measured.
            profiles = str(Path(sys.argv[1]).with_name(f"{mode}_profiles"))
            trainer = _Pipeline(built, settings.config_of(mode, profiles))
    except GppError as error:
        if is_first:
            emit_event(refused=str(error))
            return
        # If this rank failed at once, the launcher might end rank 0 before it has reported why.
        time.sleep(_REFUSAL_S)
        raise
    collectives = _join(settings)
    collectives.meet("a measured step")
    if is_first:
        emit_event(ready=True, **trainer.facts())
    for command in _commands(fifo, collectives):
        answer = _run_command(command, trainer, built, collectives)
        if is_first:
            emit_event(**answer)


def _run_command(
    command: dict[str, Any], trainer: _Single | _Pipeline, built: BuiltModel, collectives: Collectives
) -> dict[str, Any]:
    # By number, not by a stream: every mode trains on the same batch in the same step, however often it runs.
    batch = built.batch_at(command["step"])
    collectives.meet("a measured step")
    if command["measure"] == "bubble":
        return {"bubble": trainer.bubble(batch)}
    if command["measure"] == "memory":
        memory = PeakMemory(trainer.device)
        inputs = [value for value in batch.values() if isinstance(value, torch.Tensor)]
        with memory.watch([*trainer.module.parameters(), *trainer.module.buffers(), *inputs]):
            trainer.train(batch)
        # On CUDA the allocator counts everything; only on a CPU does a
        # plan's own count replace the saved tensors.
        counted = trainer.counted_bytes() if trainer.device.type == "cpu" else None
        return {
            "peak_bytes_by_rank": collectives.gather(
                memory.peak_bytes if counted is None else counted, "a result"
            ),
            "parameter_bytes_by_rank": collectives.gather(resident_bytes(trainer.module), "a result"),
            "memory_measure": memory.measure,
        }
    # A step takes as long as its slowest rank, in ms; the barrier above makes all of them start together.
    before = torch.get_rng_state(), _device_state(trainer.device)
    start = time.perf_counter()
    loss = trainer.train(batch)
    taken = time.perf_counter() - start
    draws = not all(map(torch.equal, before, (torch.get_rng_state(), _device_state(trainer.device))))
    seconds, drew = zip(*collectives.gather((taken, draws), "a result"), strict=True)
    return {"loss": loss, "ms": max(seconds) * 1e3, "draws": any(drew)}


def _device_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)


if __name__ == "__main__":
    main()
