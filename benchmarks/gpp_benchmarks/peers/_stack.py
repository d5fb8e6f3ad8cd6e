"""The model of DeepSpeed's scenarios, its data, and how an engine is started for it on either side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks.peers._scenario import Seen, Side

WIDTH, OUT = 6, 3
MICRO, STEPS = 2, 3
Pair = tuple[Tensor, Tensor]

CONFIG: dict[str, Any] = {
    "train_batch_size": 2 * MICRO,
    "train_micro_batch_size_per_gpu": MICRO,
    "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0, which a scenario of its own shows
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": 10**9,
}


class Stack(nn.Module):
    """Layers and their loss as one model, as a `PipelineModule` has them."""

    def __init__(self, layers: Sequence[nn.Module], loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss, and what it is of."""
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.loss(x, labels), "logits": x}


def stack(seed: int = 0) -> list[nn.Module]:
    """Return five layers with weights that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUT)]
    with torch.no_grad():
        for parameter in (p for layer in layers for p in layer.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return layers


def mean_square(x: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the stack."""
    return nn.functional.mse_loss(x, labels)


def pair(index: int, *, size: int = MICRO) -> Pair:
    """Return one micro-batch."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, OUT, generator=generator)


def pairs(first: int = 0, *, side: Side | None = None, degree: int = 1) -> Iterator[Pair]:
    """Yield micro-batches without end; where data-parallel ranks of a peer read their own, those of this rank."""
    own = dist.get_rank() % degree if side is not None and side.is_peer else 0
    step = degree if side is not None and side.is_peer else 1
    index = first + own
    while True:
        yield pair(index)
        index += step


def start(
    side: Side,
    changes: Mapping[str, Any] | None = None,
    *,
    layers: Sequence[nn.Module] | None = None,
    loss: Callable[[Any, Any], Tensor] = mean_square,
    stages: int = 2,
    sample: Any = None,
    block: Mapping[str, Any] | None = None,
    pipe: Mapping[str, Any] | None = None,
    **given: Any,
) -> Any:
    """Return an engine that trains the layers on either side.

    Args:
        changes: keys of the JSON other than `CONFIG`'s; a value of None leaves the key out.
        block: keys of ``graph_pipeline``, which the peer has not; ``pipe`` is what `PipelineModule` is given.
        given: further arguments of `deepspeed.initialize`.
    """
    import deepspeed

    import gpp_plugin

    config = {
        key: value for key, value in {**copy.deepcopy(CONFIG), **(changes or {})}.items() if value is not None
    }
    own = list(layers) if layers is not None else stack()
    if side.is_peer:
        from deepspeed.pipe import PipelineModule

        more = {"num_stages": stages, "partition_method": "uniform", **(pipe or {})}
        model: Any = PipelineModule(layers=own, loss_fn=loss, **more)
        given.setdefault("model_parameters", list(model.parameters()))
    else:
        config["graph_pipeline"] = {"stages": stages, "verify": False, "comm_timeout_s": 30, **(block or {})}
        model = Stack(own, loss)
        if given.get("training_data") is None or sample is not None:
            model = gpp_plugin.GraphPipelineModule(model, sample_batch=pair(0) if sample is None else sample)
        given.pop("model_parameters", None)
    return side.keep(deepspeed.initialize(model=model, config=config, **given)[0])


def trained(engine: Any, batches: Iterator[Any], steps: int = STEPS) -> list[float]:
    """Return the losses of some steps."""
    return [float(engine.train_batch(batches)) for _ in range(steps)]


def weights(engine: Any) -> Seen:
    """Return all weights by the names that a `PipelineModule` gives them; collective."""
    own = {
        name.removeprefix("layers."): parameter.detach().float().flatten().tolist()
        for name, parameter in engine.module.named_parameters()
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {name: value for each in every for name, value in each.items()}


def losses_and_weights(side: Side, engine: Any, steps: int = STEPS) -> Seen:
    """Return the losses of some steps, and the weights they led to."""
    return {"losses": trained(engine, pairs(), steps), "weights": weights(engine)}
