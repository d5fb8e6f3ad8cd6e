"""The captured model as data: one node per operator, without tensors or torch."""

from __future__ import annotations

from dataclasses import dataclass

from gpp_plugin.ir.tensors import TensorSpec

CARRIED = "carried:"
"""In front of an attribute's name: a buffer that carries what a forward leaves there for the next one."""


def is_carried(name: str) -> bool:
    """Return whether a buffer carries an attribute of a module, which the user's model has no buffer for."""
    return name.rpartition(".")[2].startswith(CARRIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter or buffer of the model, under its HuggingFace name.

    Args:
        name: the first name the model gives it (``model.named_parameters()`` order).
        aliases: further names of the same tensor (weight tying), without ``name``.
        is_buffer: a buffer; ``is_persistent`` says whether the state dict holds it.
        is_mutated: a buffer that the forward pass updates in place (BatchNorm statistics).
        is_state: what the forward leaves in it is part of what the next one computes (not BatchNorm's, in training).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    is_buffer: bool = False
    is_persistent: bool = True
    is_mutated: bool = False
    is_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpNode:
    """One operator call of the captured graph.

    Args:
        name: unique node name, the one the torch graph uses.
        target: the operator, e.g. ``aten.linear.default``.
        inputs: names of nodes, model inputs and parameters it reads, in order, no repeats.
        module: HuggingFace path of the innermost module that called it ("" is the model itself).
        output: its tensor, or None for an operator that returns several (read by getitem nodes).
        flops: floating-point operations of the forward at the captured number of samples.
        saved_bytes: bytes kept for backward that no earlier node keeps already.
        keeps: nodes, perhaps itself, whose results it keeps for backward, with the bytes of the storage (of
            results that share one: the first); model inputs and parameters, held anyway, are left out.
        storage: the node whose result its own is a view of; "" where it has a storage of its own.
        kept_inside_bytes: of ``saved_bytes``, what is no node's result (a dropout's mask, softmax inside attention).
        is_coupling: mixes samples (in-batch losses, BatchNorm, means over the batch).
        is_random: draws random numbers (dropout).
        is_replicable: cheap, parameter-free, depends on model inputs only; recomputed per stage.
    """

    name: str
    target: str
    inputs: tuple[str, ...]
    module: str
    output: TensorSpec | None
    flops: float = 0.0
    saved_bytes: int = 0
    keeps: tuple[tuple[str, int], ...] = ()
    kept_inside_bytes: int = 0
    storage: str = ""
    is_coupling: bool = False
    is_random: bool = False
    is_replicable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """A captured model: nodes in execution order, model inputs, parameters, outputs.

    Args:
        num_samples: samples in the batch it was captured with.
        inputs: the model's tensor inputs (batch entries), in capture order.
        received: those of them that other stages make (of a captured part of a stage graph): they are not there
            anyway, and may take a gradient.
        loss: name of the node that yields the loss; None in an evaluation graph without labels.
        outputs: named outputs asked for beside the loss, output name -> node name.
        couplings: one line of text for each place that mixes samples (for the user).
    """

    model: str
    num_samples: int
    inputs: tuple[TensorSpec, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[OpNode, ...]
    loss: str | None
    outputs: dict[str, str]
    couplings: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
