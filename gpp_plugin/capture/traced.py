"""One export of a model at one number of samples, cleaned, with its placeholders named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind

from gpp_plugin.capture.annotate import module_path
from gpp_plugin.capture.clean import clean_graph
from gpp_plugin.capture.samples import count_samples
from gpp_plugin.capture.shadow import Shadow, tracing_device
from gpp_plugin.capture.trace import WRAPPED, export_model, split_batch
from gpp_plugin.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A cleaned export.

    Args:
        inputs, parameters, constants: as in `CapturedGraph`.
        fakes: placeholder name -> fake tensor.
        loss: node that yields the loss; ``outputs``: output name -> node.
    """

    num_samples: int
    graph: fx.Graph
    attributes: dict[str, Any]
    inputs: dict[str, str]
    parameters: dict[str, str]
    constants: dict[str, torch.Tensor]
    fakes: dict[str, torch.Tensor]
    loss: str | None
    outputs: dict[str, str]

    @property
    def operators(self) -> list[fx.Node]:
        """Return the operator nodes in execution order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]


def trace(shadow: Shadow, batch: Mapping[str, Any], *, outputs: Sequence[str], training: bool) -> Traced:
    """Export the shadow for ``batch`` and clean the graph.

    Raises:
        CaptureError: the model cannot be exported, or a constant it made has no values.
    """
    program, has_loss = export_model(shadow, batch, outputs=outputs, training=training)
    attributes = {
        str(node.target): _attribute(program.graph_module, str(node.target))
        for node in program.graph.nodes
        if node.op == "get_attr"
    }
    graph = clean_graph(program.graph, attributes)
    keys, _ = split_batch(batch)
    inputs: dict[str, str] = {}
    parameters: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    fakes: dict[str, torch.Tensor] = {}
    remaining = iter(keys)
    tensors = {**dict(shadow.model.named_parameters(remove_duplicate=False))}
    tensors.update(shadow.model.named_buffers(remove_duplicate=False))
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        name, target = spec.arg.name, str(spec.target)
        if spec.kind is InputKind.USER_INPUT:
            inputs[name] = next(remaining)
            fakes[name] = placeholders[name].meta["val"]
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            own = target.removeprefix(f"{WRAPPED}.")
            parameters[name] = shadow.first_names[own]
            fakes[name] = tensors[own]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            if placeholders[name].users:
                constants[name] = _real(program.constants[target], target, shadow)
            fakes[name] = placeholders[name].meta["val"]
        else:
            raise CaptureError(f"model input {name} of kind {spec.kind.name} is not supported; remove {target}")
    _drop_unused_constants(graph, constants, fakes)
    results = [node.name for node in next(iter(reversed(graph.nodes))).args[0]]
    return Traced(
        num_samples=count_samples(batch),
        graph=graph,
        attributes={k: v for k, v in attributes.items() if any(n.target == k for n in graph.nodes)},
        inputs=inputs,
        parameters=parameters,
        constants=constants,
        fakes=fakes,
        loss=results[0] if has_loss else None,
        outputs=dict(zip(outputs, results[1:] if has_loss else results, strict=True)),
    )


def structural_difference(first: Traced, second: Traced) -> str | None:
    """Return what differs in names or operators of two graphs of one model, or None."""
    one, other = list(first.graph.nodes), list(second.graph.nodes)
    for a, b in zip(one, other, strict=False):
        if a.name != b.name or a.target != b.target or a.op != b.op:
            place = module_path(a) or "the model itself"
            return (
                f"node {a.name} ({a.target}) at {first.num_samples} samples is {b.name} ({b.target}) at "
                f"{second.num_samples} samples, in {place}"
            )
    if len(one) != len(other):
        return f"{len(one)} nodes at {first.num_samples} samples, {len(other)} at {second.num_samples}"
    return None


def _attribute(root: torch.nn.Module, target: str) -> Any:
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _real(constant: Any, target: str, shadow: Shadow) -> torch.Tensor:
    if not isinstance(constant, torch.Tensor):
        raise CaptureError(f"constant {target} is a {type(constant).__name__}; only tensors can be captured")
    real = getattr(constant, "constant", None) if isinstance(constant, FakeTensor) else constant
    if real is None or real.is_meta:
        raise CaptureError(
            f"the model makes or holds tensor {target.removeprefix(WRAPPED + '.')} whose values are unknown "
            "while tracing; register it as a buffer"
        )
    return real.detach().to(tracing_device(shadow.device))


def _drop_unused_constants(
    graph: fx.Graph, constants: Mapping[str, torch.Tensor], fakes: dict[str, torch.Tensor]
) -> None:
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.name.startswith("c_"):
            assert node.name not in constants
            graph.erase_node(node)
            fakes.pop(node.name)
