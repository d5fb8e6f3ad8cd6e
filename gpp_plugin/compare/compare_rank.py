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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.compare.compare_settings import SINGLE, settings_from_json
from gpp_plugin.compare.compared_models import Batch, BuiltModel, build_model, cut_batch
from gpp_plugin.errors import ConfigError, GppError
from gpp_plugin.integrations.deepspeed.config_values import derive_stage_config
from gpp_plugin.integrations.deepspeed.dispatch import GraphPipelineModule, initialize
from gpp_plugin.integrations.deepspeed.learning_rates import LearningRates, StageParameterGroups
from gpp_plugin.launch import emit_event
from gpp_plugin.model.materialize import resident_bytes
from gpp_plugin.runtime.random_streams import MODEL_STREAMS
from gpp_plugin.runtime.ranks.collectives import Collectives

_REFUSAL_S = 10.0
"""How long the other ranks wait while rank 0 reports why a mode is refused."""


# How many bytes a process holds for backward: what autograd saves, while it is saved.

SAVED_TENSORS, ALLOCATOR = "saved tensors", "CUDA allocator"


class PeakMemory:
    """The most bytes held at a time within `watch`.

    On CUDA it is the allocator's peak: everything on the device. On a CPU, which has no such count, it is what
    autograd saves for backward, each storage once, without what is there anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = 0
        self._bytes = 0
        self._users: Counter[int] = Counter()

    @property
    def measure(self) -> str:
        """Return what is counted."""
        return ALLOCATOR if self._device.type == "cuda" else SAVED_TENSORS

    @contextmanager
    def watch(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Count while the block runs.

        Args:
            tensors: parameters, buffers and the mini-batch, which are held anyway.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            return
        # By storage, not by tensor: a transposed weight, or a view of the batch, is another tensor on bytes
        # that are there anyway, and two nodes that save views of one activation hold it once.
        held = {tensor.untyped_storage().data_ptr() for tensor in tensors}

        def pack(tensor: Tensor) -> Tensor | _Saved:
            # `detach`, or the saved output of a node would hold the node that holds it: the graph
            # would never be freed, and nothing ever counted down. A storage cannot be reused for
            # another key while a `_Saved` refers to it.
            key = tensor.untyped_storage().data_ptr()
            return tensor if key in held else _Saved(self, tensor.detach(), key)

        def unpack(saved: Tensor | _Saved) -> Tensor:
            return saved.tensor if isinstance(saved, _Saved) else saved

        # Peak in time: layer 1 saves 10 B, layer 2 saves 6 B (16), backward frees 6, then 10:
        # peak_bytes is 16. Of nested saved_tensors_hooks torch calls only the innermost pair, so those
        # of a plan that swaps or recomputes would hide its tensors from these:
        # `_Pipeline.counted_bytes` reads the plan's counts instead.
        with saved_tensors_hooks(pack, unpack):
            yield

    def add(self, key: int, num_bytes: int) -> None:
        """Count a storage that one more node saves."""
        self._users[key] += 1
        if self._users[key] == 1:
            self._bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def drop(self, key: int, num_bytes: int) -> None:
        """Count one user of a storage less."""
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            self._bytes -= num_bytes


class _Saved:
    """A tensor that a node of the graph holds; it is deleted when the node releases it."""

    __slots__ = ("_key", "_memory", "_num_bytes", "tensor")

    def __init__(self, memory: PeakMemory, tensor: Tensor, key: int) -> None:
        self.tensor = tensor
        self._memory, self._key, self._num_bytes = memory, key, tensor.untyped_storage().nbytes()
        memory.add(key, self._num_bytes)

    def __del__(self) -> None:
        self._memory.drop(self._key, self._num_bytes)


class SingleProcess:
    """The trainer of the single process: trains a model as a script without DeepSpeed would.

    Args:
        ds_config: its optimizer, scheduler, clipping and precision are honoured.
        loss_unit: samples of one loss; a step's loss and gradient are the means over units.

    Raises:
        ConfigError: the optimizer is none of torch's, or the precision needs a loss scale.
    """

    def __init__(
        self, model: nn.Module, ds_config: Mapping[str, Any], *, loss_unit: int, device: torch.device
    ) -> None:
        stage = derive_stage_config(ds_config, mini_batch=loss_unit, degree=1, device_type="cpu")
        if stage.dtype == "float16":
            raise ConfigError("fp16.enabled: the single process has no loss scale; compare in bf16 or fp32")
        self.module = model.to(device)
        self.device, self._unit = device, loss_unit
        self._dtype: torch.dtype = getattr(torch, stage.dtype)
        self._clipping = stage.gradient_clipping
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(trained.values())
        # As DeepSpeed trains in bf16: the optimizer steps float32 masters, which are copied into the model's
        # weights after each step. In float32 masters and weights are equal, and the copy changes nothing.
        self._masters = [nn.Parameter(p.detach().float().clone()) for p in self._parameters]
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self._dtype)
        self._optimizer = _make_optimizer(stage.deepspeed.get("optimizer"), self._masters)
        self._rates = LearningRates(StageParameterGroups(trained, None), ds_config)
        self._rates.publish(self._optimizer)

    def facts(self) -> dict[str, Any]:
        """Return what a row says of it beside the measured."""
        return {"stages": 1, "notes": []}

    def train(self, batch: Mapping[str, Any]) -> float:
        """Take one optimizer step on a mini-batch and return its mean loss."""
        units = cut_batch(batch, self._unit)
        total = 0.0
        for unit in units:
            output = self.module(**{key: self._placed(value) for key, value in unit.items()})
            loss: Tensor = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
            # The mean over B / u loss units, each of u samples, as the configuration defines it: 8
            # samples in units of 2 are 4 losses, each weighted with 1/4. Divided before the backward,
            # not after, as the graph seeds it (u / B).
            (loss / len(units)).backward()
            total += float(loss.detach()) / len(units)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        if self._clipping > 0:
            torch.nn.utils.clip_grad_norm_(self._masters, self._clipping)
        self._optimizer.step()
        # Publish before the first step (in `__init__`) and behind each: the
        # rate of a step is the schedule's before it.
        self._rates.step()
        self._rates.publish(self._optimizer)
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)
        return total

    def counted_bytes(self) -> None:
        """Count nothing: `PeakMemory` sees all that is saved here."""

    def bubble(self, batch: Batch) -> None:
        """Train, as the pipelines do meanwhile: one process has no bubble."""
        self.train(batch)

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device=self.device, dtype=self._dtype if value.is_floating_point() else None)


def _make_optimizer(block: Mapping[str, Any] | None, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return what DeepSpeed makes of the ``optimizer`` block, from torch."""
    if not block:
        raise ConfigError(
            "optimizer: missing in the DeepSpeed configuration; compare needs one to train with"
        )
    kind, params = str(block.get("type")), dict(block.get("params") or {})
    params.pop("torch_adam", None)
    decoupled = params.pop("adam_w_mode", True)
    if kind.lower() in (
        "adam",
        "adamw",
    ):  # DeepSpeed's Adam decouples weight decay unless configured otherwise
        kind = "AdamW" if kind.lower() == "adamw" or decoupled else "Adam"
    cls = getattr(torch.optim, kind, None)
    if cls is None:
        raise ConfigError(
            f"optimizer.type: {kind!r} is none of torch's, which the single process needs; use AdamW or SGD, or "
            "compare --modes stock,graph"
        )
    try:
        optimizer: torch.optim.Optimizer = cls(parameters, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {params} do not fit torch's {kind}: {error}") from error
    return optimizer


class _Pipeline:
    """The trainer of a pipeline, stock or graph: the engine that `deepspeed.initialize` returns."""

    def __init__(self, built: BuiltModel, config: dict[str, Any]) -> None:
        wrapped = GraphPipelineModule(built.model, sample_batch=built.batch_at(0))
        self._engine, *_ = initialize(model=wrapped, config=config)
        self.module = self._engine.module
        self.device = self._engine.device

    def facts(self) -> dict[str, Any]:
        plan, notes = self._engine.plan, list(self._engine.plan.notes)
        carried = getattr(self._engine, "carried", ())
        if carried:
            notes.append(
                "DeepSpeed sends neither int64 nor tensors without a gradient between stages: "
                f"{', '.join(carried)} travel as the bits of floats, exactly, and zeros travel back as their gradient"
            )
        return {
            "stages": len(plan.stages),
            "depth": plan.depth,
            "predicted_ms": plan.iteration_us / 1e3,
            "stage_names": [stage.name for stage in plan.stages],
            "micro_batches": [plan.num_micro_batches(i) for i in range(len(plan.stages))],
            "notes": notes,
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


def _commands(path: str, collectives: Collectives) -> Iterator[dict[str, Any]]:
    """Yield commands on every rank until there are no more."""
    # Only rank 0 holds the FIFO; the others get commands by a collective in which they sleep, instead of by reading
    # files in a loop while another mode is measured. An empty line, "{}", is the end.
    stream = open(path, encoding="utf-8") if os.environ["RANK"] == "0" else None  # noqa: SIM115
    while True:
        own = json.loads(stream.readline() or "{}") if stream is not None else None
        command = collectives.broadcast(own, source=0, what="the next command")
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
            has_cuda = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
            trainer: SingleProcess | _Pipeline = SingleProcess(
                built.model, settings.ds_config, loss_unit=settings.loss_unit, device=device
            )
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
    # of all processes of the mode
    group: dist.ProcessGroup | None = None
    if dist.is_initialized() and dist.get_world_size() > 1:
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=settings.timeout_s))
    who = f"rank {os.environ['RANK']}"
    collectives = Collectives(group=group, who=who, timeout_s=settings.timeout_s)
    collectives.barrier("a measured step")
    if is_first:
        emit_event(ready=True, **trainer.facts())
    for command in _commands(fifo, collectives):
        answer = _run_command(command, trainer, built, collectives)
        if is_first:
            emit_event(**answer)


def _run_command(
    command: dict[str, Any], trainer: SingleProcess | _Pipeline, built: BuiltModel, collectives: Collectives
) -> dict[str, Any]:
    # By number, not by a stream: every mode trains on the same batch in the same step, however often it runs.
    batch = built.batch_at(command["step"])
    collectives.barrier("a measured step")
    if command["measure"] == "bubble":
        return {"bubble": trainer.bubble(batch)}
    if command["measure"] == "memory":
        memory = PeakMemory(trainer.device)
        inputs = [value for value in batch.values() if isinstance(value, Tensor)]
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
    before = _random_states(trainer.device)
    start = time.perf_counter()
    loss = trainer.train(batch)
    taken = time.perf_counter() - start
    draws = not all(map(torch.equal, before, _random_states(trainer.device)))
    seconds, drew = zip(*collectives.gather((taken, draws), "a result"), strict=True)
    return {"loss": loss, "ms": max(seconds) * 1e3, "draws": any(drew)}


def _random_states(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return torch's generators of the program, of an engine's model, and of the device."""
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)
    return torch.get_rng_state(), MODEL_STREAMS.now()[0], own


if __name__ == "__main__":
    main()
