"""Plain training in one process: the model's own forward, torch's optimizer, the mean over loss units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.compare.compared_models import cut_batch
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.config_values import derive_stage_config
from gpp_plugin.integrations.deepspeed.learning_rates import LearningRates, StageParameterGroups

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
        # `rank._Pipeline.counted_bytes` reads the plan's counts instead.
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
    """Trains a model as a script without DeepSpeed would.

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
        self.model = model.to(device)
        self._device, self._unit = device, loss_unit
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
        self._rates = LearningRates(
            StageParameterGroups(trained, None),
            optimizer=None,
            optimizer_block=ds_config.get("optimizer"),
            scheduler=None,
            scheduler_block=ds_config.get("scheduler"),
        )
        self._rates.publish(self._optimizer)

    def train(self, batch: Mapping[str, Any]) -> float:
        """Take one optimizer step on a mini-batch and return its mean loss."""
        units = cut_batch(batch, self._unit)
        total = 0.0
        for unit in units:
            loss = _loss_of(self.model(**{key: self._placed(value) for key, value in unit.items()}))
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

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device=self._device, dtype=self._dtype if value.is_floating_point() else None)


def _loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output.loss
    return loss


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
