"""Layer specifications of a chunk: which of the model's layers it has, and what they are made of."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def block_submodules(config: Any, spec: Any, layers: range, *, is_causal: bool = True) -> Any:
    """Return the `TransformerBlockSubmodules` of ``layers`` of the model.

    Args:
        spec: a layer's specification, or all layers' (`TransformerBlockSubmodules`); None: megatron-core's local one.
        layers: consecutive layers, counted from 0; each knows its number in the model.
        is_causal: for the local specification; another one says so itself.
    """
    from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules

    final_norm: Any = LayerNormImpl
    if spec is None:
        spec = _local_layer(config, is_causal=is_causal)
        final_norm = spec.submodules.input_layernorm
    if isinstance(spec, TransformerBlockSubmodules):
        every, final_norm = list(spec.layer_specs), spec.layer_norm
    else:
        every = [spec] * config.num_layers
    # Layer specifications by the model's numbers; the chunk of layers 4..7 gets four, whose
    # layers count from 5.
    chosen = [_numbered_from(every[i], layers.start) for i in layers]
    return TransformerBlockSubmodules(layer_specs=chosen, layer_norm=final_norm)


def _local_layer(config: Any, *, is_causal: bool) -> Any:
    """Return megatron-core's local layer, with a norm that knows sequence parallelism where its own does not."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    parts = spec.submodules
    if config.sequence_parallel:
        attention = parts.self_attention.submodules
        for owner in (parts, attention):
            for name, module in list(vars(owner).items()):
                if module is WrappedTorchNorm:
                    setattr(owner, name, SequenceParallelNorm)
    if not is_causal:
        parts.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    return spec


def _numbered_from(spec: Any, first: int) -> Any:
    """Return the specification of a layer that counts ``first`` layers before its chunk's first."""
    from megatron.core.transformer.spec_utils import get_module

    if first == 0:
        return spec
    # Megatron counts layers from 1 and adds the offset of its pipeline rank, which is always the first of one
    # here. Layer numbers scale attention (``apply_query_key_layer_scaling``) and stand in errors, so the
    # class adds the offset itself. It keeps its name and module: checkpoints and specifications look at them.
    base: Any = get_module(spec)

    def __init__(self: Any, *args: Any, layer_number: int = 1, **rest: Any) -> None:
        base.__init__(self, *args, layer_number=layer_number + first, **rest)

    numbered = copy.copy(spec)
    numbered.module = type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})
    return numbered


class SequenceParallelNorm:
    """Makes torch's LayerNorm or RMSNorm as ``config.normalization`` says, with Megatron's mark on its parameters."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        """Return the norm; called as Megatron's specs call a norm's class."""
        make: Any = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm: nn.Module = make(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
