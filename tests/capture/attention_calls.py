"""A whole model as the code of one stage, and the calls of attention that code and eager modules make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.model.graph.captured_part import CapturedPart, whole_part
from gpp_plugin.runtime.batches import ones_among
from gpp_plugin.runtime.stage_module import Reference, StageCode, make_reference

Batch = dict[str, Any]


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


class OneStage:
    """A model as the code of one stage, as a lane asks for it."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self.model = model
        self.part: CapturedPart = whole_part(model, batch)
        self.samples = count_samples(batch)
        captured = self.part.capture(batch, is_training=True)
        self.reference: Reference = make_reference(captured.analysis, "layer")
        blocks = tuple(block.name for block in self.reference.block_graph.blocks)
        stage = SimpleNamespace(name="all", blocks=blocks, memory=None, model_parallel=1)
        # all tensors between blocks are told, as if each came to the stage
        told = SimpleNamespace(
            src=1, dst=0, batch_tensors=tuple(self.reference.block_graph.tensors), whole_tensors=()
        )
        self.plan: Any = SimpleNamespace(edges=(told,), stages=(stage,))

    def code(self, batch: Batch) -> StageCode:
        return self.part.stage_code(self.reference, self.plan, 0, batch, self.samples)

    def recaptured(self, batch: Batch) -> StageCode:
        """Return code captured at this shape alone."""
        part = whole_part(self.model, batch)
        return part.stage_code(self.reference, self.plan, 0, batch, self.samples)

    def run(self, code: StageCode, batch: Batch) -> tuple[Tensor, dict[str, Tensor], list[Any]]:
        """Return the loss, every gradient, and how attention was called."""
        function, model = code.function, self.model
        named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        if function.choice is not None:
            function.choice.use(ones_among(batch, function.choice.inputs))
        model.zero_grad(set_to_none=True)
        inputs = [batch[key] for key in function.batch_inputs]
        with recorded_attention() as calls:
            outputs = function.call(*(named[name] for name in function.tensors), *inputs)
        loss = outputs[function.outputs.index(str(code.loss))]
        loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), found, calls
