"""One stage of a captured model as a layer for DeepSpeed's `PipelineModule`: a tuple of tensors in, one out.

Stock DeepSpeed sends every element of the tuple, expects a gradient for each floating one, and keeps one buffer a
position for activations and gradients, whatever their dtype. So what has a gradient travels in one dtype, wide
enough for all of it; everything else (token ids, masks, inputs of later stages) is packed into a single tensor of
that dtype by its bits, which is exact for every value, and gets a gradient that nobody reads.

Source: DeepSpeed 0.19.8, its PipelineEngine
Tests: tests/integrations/test_stock.py, tests/integrations/test_stock_layer.py, tests/plan/test_stock.py,
    tests/plan/test_linearise.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.plan.baselines.linearise import ChainStage, Cut
from gpp_plugin.runtime.batches import ones_among
from gpp_plugin.runtime.stage_module import StageFunction, StageModule

Wires = tuple[Tensor, ...]
Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCode:
    """A stage's code at one shape.

    Args:
        chain: what the stage reads, makes and passes on.
        specs: of what crosses the cuts around it: tensors by node name, inputs by batch key.
        loss: node name of the loss, which the last stage returns.
    """

    chain: ChainStage
    function: StageFunction
    specs: Mapping[str, TensorSpec]
    loss: str


class ChainLayer(nn.Module):
    """The layer of one stage.

    Args:
        module: its own parameters and buffers.
        wire_dtype: of everything that travels.
        device: where it computes.
    """

    def __init__(self, *, module: StageModule, wire_dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.stage = module
        self.own_inputs: Wires = ()
        self._wire_dtype = wire_dtype
        self.tensors: dict[str, Tensor] = {}
        self._code: ChainCode | None = None
        self._scalars: set[str] = set()
        self._arguments: list[tuple[Tensor, bool]] = []
        self._device = device
        self._anchor = torch.zeros(1, requires_grad=True, device=device)

    def add_unused(self) -> nn.Parameter:
        """Return a parameter that nothing uses, for a stage that trains none.

        DeepSpeed runs a backward on every stage, and has no optimizer without a parameter.
        """
        self.unused = nn.Parameter(torch.zeros(1, device=self._device))
        return self.unused

    def bind(self, tensors: Mapping[str, Tensor], *, scalars: Iterable[str] = ()) -> None:
        """Compute with these parameters and buffers from the next `use` on.

        Args:
            scalars: names of those that were made one-dimensional (`at_least_1d`).
        """
        self.tensors = dict(tensors)
        self._scalars |= set(scalars)

    def use(self, code: ChainCode) -> None:
        """Run this code from now on (another shape, or evaluation)."""
        self._code = code
        self._arguments = [(self.tensors[name], name in self._scalars) for name in code.function.tensors]

    def named_values(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, in the shapes the model has them in."""
        return {
            name: tensor.view(()) if name in self._scalars else tensor
            for name, tensor in self.tensors.items()
        }

    def forward(self, received: Wires) -> Wires | Tensor:
        """Return what later stages need of one micro-batch, or its loss."""
        code = self._code
        assert code is not None, "a layer runs after it was given code"
        chain = code.chain
        values: dict[str, Tensor] = {}
        inputs: dict[str, Tensor] = {}
        if chain.before is None:
            inputs.update(zip(chain.loads, received, strict=True))
        else:
            self._unpack(chain.before, code.specs, received, values, inputs)
            inputs.update(zip(chain.loads, self.own_inputs, strict=True))
        if code.function.choice is not None:
            code.function.choice.use(ones_among(inputs, code.function.choice.inputs))
        made = code.function.call(
            *(tensor.view(()) if is_scalar else tensor for tensor, is_scalar in self._arguments),
            *(inputs[key] for key in code.function.batch_inputs),
            *(values[name] for name in code.function.received),
        )
        values.update(zip(code.function.outputs, made, strict=True))
        if chain.after is None:
            return values[code.loss]
        return self._pack(chain.after, code.specs, values, inputs)

    def _pack(
        self, cut: Cut, specs: Specs, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Wires:
        # What crosses a cut, for hidden [4, 16, 64] (samples, tokens, width) in bf16, token ids and a
        # mask for later stages:
        #
        #   position 0   hidden, as bf16                                             gets a gradient
        #   position 1   ids int64 [4, 16] -> 4 x 64 = 256 elements of bf16,
        #                mask bool [4, 16] -> int16 -> 64 elements, joined: [320]    gets zeros
        #
        # One tensor for all constants, since each position costs a message each way and a buffer
        # for each micro-batch.
        wires = [values[name].to(self._wire_dtype).contiguous() for name in _sent(cut, specs)]
        constants = [*(values[name] for name in cut.constant), *(inputs[key] for key in cut.inputs)]
        bits = [to_bits(tensor, self._wire_dtype) for tensor in constants]
        if any(part.numel() for part in bits):
            wires.append(_Anchored.apply(torch.cat(bits), self._anchor))  # type: ignore[no-untyped-call]
        return tuple(wires)

    def _unpack(
        self,
        cut: Cut,
        specs: Specs,
        received: Wires,
        values: dict[str, Tensor],
        inputs: dict[str, Tensor],
    ) -> None:
        sent = _sent(cut, specs)
        for name, wire in zip(sent, received, strict=False):
            values[name] = wire.to(_dtype_of(specs[name]))
        for name in set(cut.differentiable).difference(sent):
            values[name] = torch.empty(specs[name].shape, dtype=_dtype_of(specs[name]), device=self._device)
        nothing = torch.empty(0, dtype=self._wire_dtype, device=self._device)
        # In the order of `_pack`: constants, then inputs, each as many elements as its spec says.
        packed = received[-1].detach() if len(received) > len(sent) else nothing
        first = 0
        for target, names in ((values, cut.constant), (inputs, cut.inputs)):
            for name in names:
                count = bits_length(specs[name], self._wire_dtype)
                target[name] = from_bits(packed[first : first + count], specs[name])
                first += count


def _dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def _sent(cut: Cut, specs: Specs) -> list[str]:
    """Return the differentiable tensors that have elements: nothing travels for the others."""
    return [name for name in cut.differentiable if math.prod(specs[name].shape)]


class _Anchored(torch.autograd.Function):
    """Let DeepSpeed call backward on a tensor that has no gradient."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, anchor: Tensor) -> Tensor:
        return packed.view_as(packed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def at_least_1d(tensor: Tensor) -> Tensor:
    """Return a tensor that has a dimension: DeepSpeed fails to broadcast or clip a parameter without one."""
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def to_bits(tensor: Tensor, wire_dtype: torch.dtype) -> Tensor:
    """Return the bits of a tensor without a gradient as a flat tensor of ``wire_dtype``."""
    # A view, no rounding: bits that are no number (NaN patterns) arrive as they were, as
    # nobody computes with them.
    flat = tensor.detach().to(_carrier(tensor.dtype, wire_dtype)).reshape(-1).contiguous()
    return flat.view(wire_dtype)


def from_bits(bits: Tensor, spec: TensorSpec) -> Tensor:
    """Return the tensor that `to_bits` made these of."""
    dtype = _dtype_of(spec)
    # A slice may start at any element; a view as a wider type wants its storage aligned, hence the copy.
    carried = bits.clone().view(_carrier(dtype, bits.dtype))
    return carried.to(dtype).view(spec.shape)


def bits_length(spec: TensorSpec, wire_dtype: torch.dtype) -> int:
    """Return how many elements of ``wire_dtype`` the bits of a tensor take."""
    carrier = _carrier(_dtype_of(spec), wire_dtype)
    return math.prod(spec.shape) * carrier.itemsize // wire_dtype.itemsize


def _carrier(dtype: torch.dtype, wire_dtype: torch.dtype) -> torch.dtype:
    """Return a type that holds every value of ``dtype`` and is no narrower than a wire's element."""
    # By width, over wires of bf16 (2 bytes): bool -> int16, 1 element; int64 stays, 4 elements; float32
    # stays, 2. Over fp32: bool -> int32, 1 element; bf16 -> float32, 1 element, exactly.
    if dtype.itemsize >= wire_dtype.itemsize:
        return dtype
    if dtype.is_floating_point:
        return torch.float64 if wire_dtype.itemsize == 8 else torch.float32
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[wire_dtype.itemsize]
