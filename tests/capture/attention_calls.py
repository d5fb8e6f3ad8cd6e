"""A whole model as the code of one stage, and the calls of attention that code and eager modules make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.runtime.batches import ones_among
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function


class AttentionCall(NamedTuple):
    """What `scaled_dot_product_attention` was called with."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[Any, ...] | None
    dropout: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


@contextmanager
def recorded_attention() -> Iterator[list[AttentionCall]]:
    """Note every call of attention, by a model's Python code or by generated code."""
    # Models call the function of `torch.nn.functional` at every use; generated code calls the operator, under a name
    # among the code's globals. A mode sees both, as both end in that operator.
    calls: list[AttentionCall] = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "").startswith("scaled_dot_product_attention"):
                calls.append(_call(*args, **(kwargs or {})))
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield calls


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    mask = None if attn_mask is None else (tuple(attn_mask.shape), attn_mask.dtype, attn_mask.requires_grad)
    shapes = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
    return AttentionCall(*shapes, mask, dropout_p, is_causal, scale, enable_gqa)


class WholeStage:
    """A captured model as the code of one stage, with the model's own parameters.

    Args:
        model: as it was captured.
    """

    def __init__(self, captured: CapturedGraph, model: nn.Module) -> None:
        nodes = [n.name for n in captured.graph.nodes if n.op == "call_function"]
        assert captured.op_graph.loss is not None, "a model that trains has a loss"
        self.function: StageFunction = build_stage_function(captured, nodes, [captured.op_graph.loss])
        named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        named.update(model.named_buffers(remove_duplicate=False))
        self._tensors = [named[name] for name in self.function.tensors]

    def look_at(self, batch: Mapping[str, Any]) -> None:
        """Choose the code for this batch, as a lane does before a mini-batch."""
        if self.function.choice is not None:
            self.function.choice.use(ones_among(batch, self.function.choice.inputs))

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of the batch."""
        inputs = [batch[key] for key in self.function.batch_inputs]
        (loss,) = self.function.call(*self._tensors, *inputs)
        return loss


def eager_loss(model: nn.Module) -> Callable[[Mapping[str, Any]], Tensor]:
    """Return what calls a model and returns its loss."""

    def call(batch: Mapping[str, Any]) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    return call
