"""A forward that takes no gradients, as backends are given it: operators, weights, and examples of what changes.

Generated stage code takes sizes, constants and parameters as arguments, so that training can change them. A backend
wants the opposite: everything that stays the same is part of the module (`ForwardCode.frozen`), which takes nothing but
the tensors that change with the micro-batch.

    stage code     f(size, constant, weight, bias, pixels, hidden)
    frozen         f(pixels, hidden)

Source: this project
Tests: tests/backends/test_backends.py
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.layout.layouts import is_random
from gpp_plugin.errors import first_line

ForwardRunner = Callable[..., Sequence[Tensor]]
"""Takes the tensors that change, in the order of `ForwardCode.examples`, and returns the outputs."""

READS_VALUES = ("item", "_local_scalar_dense", "nonzero")
"""Operators whose results' shapes, or numbers, are known only when they run: what is built once cannot have them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardCode:
    """Operators of a stage, or of a part of one.

    Args:
        name: the stage's, for messages.
        module: generated code; takes ``bound``, ``parameters`` and what changes, returns a tuple.
        bound: sizes and constants.
        examples: what changes, with values that may really come.
    """

    name: str
    module: fx.GraphModule
    bound: tuple[Tensor | int, ...]
    parameters: tuple[Tensor, ...]
    examples: tuple[Tensor, ...]

    @property
    def operators(self) -> list[fx.Node]:
        """Return the calls of operators, in order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Return the floating types of weights and examples."""
        tensors = [t for t in (*self.bound, *self.parameters, *self.examples) if isinstance(t, Tensor)]
        return {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}

    @property
    def devices(self) -> set[str]:
        """Return the kinds of devices of weights and examples."""
        tensors = [t for t in (*self.bound, *self.parameters, *self.examples) if isinstance(t, Tensor)]
        return {tensor.device.type for tensor in tensors}

    @torch.no_grad()
    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return what torch's operators make of tensors like the examples."""
        outputs: tuple[Tensor, ...] = self.module(*self.bound, *self.parameters, *tensors)
        return outputs

    def refusal(self) -> str:
        """Return why no backend may run it, in one line; empty where one may."""
        for node in self.operators:
            if isinstance(node.target, OpaqueCall):
                return f"{node.name} runs a module as it is"
            if is_random(node):
                return f"{node.name} ({node.target}) draws random numbers"
            if _writes_given(node):
                return f"{node.name} ({node.target}) writes into what it is given"
            if operator_name(node) in READS_VALUES:
                return f"{node.name} ({node.target}) depends on values"
            if _updates_statistics(node):
                return f"{node.name} ({node.target}) updates its running statistics"
        return ""

    @functools.cached_property
    def frozen(self) -> fx.GraphModule:
        """Return the operators with all that stays the same inside, called with what changes."""
        # A new graph, operator by operator: placeholders of what stays the same become buffers of the module (the same
        # memory as the weights; it is the backend that copies), or plain numbers where they are sizes.
        graph = fx.Graph()
        root = nn.Module()
        mapping: dict[fx.Node, Any] = {}
        given = (*self.bound, *self.parameters)
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        for i, (node, value) in enumerate(
            zip(placeholders, (*given, *[None] * len(self.examples)), strict=True)
        ):
            if value is None:
                mapping[node] = graph.placeholder(f"given_{i - len(given)}")
            elif isinstance(value, Tensor):
                root.register_buffer(f"held_{i}", value.detach())
                mapping[node] = graph.get_attr(f"held_{i}")
            else:
                mapping[node] = value
        for name, child in self.module.named_children():
            root.add_module(name, child)
        for node in self.module.graph.nodes:
            if node.op == "output":
                graph.output(fx.map_arg(node.args[0], lambda n: mapping[n]))
            elif node.op != "placeholder":
                mapping[node] = _copied(graph, node, mapping)
        return fx.GraphModule(root, graph).eval()

    @functools.cached_property
    def signature(self) -> str:
        """Return a text that depends on operators, literals, shapes and types, and not on names or values."""
        # As block signatures of profiles, but of frozen code: of linear(x, w) with x (2, 8) and w (4, 8)
        #     (4, 8) torch.float32
        #     (2, 8) torch.float32
        #     call_function aten.linear.default ((%1, %0), {})
        values = (*self.bound, *self.parameters, *self.examples)
        given = [f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else repr(v) for v in values]
        return hashlib.sha256("\n".join((*given, structure_of(self.module))).encode()).hexdigest()[:16]


def structure_of(module: fx.GraphModule) -> str:
    """Return a text of a module's operators and literals that depends on no names."""
    numbers: dict[str, int] = {}
    lines = []
    for node in module.graph.nodes:
        numbers[node.name] = len(numbers)
        if node.op != "placeholder":
            arguments: Any = fx.map_arg((node.args, node.kwargs), lambda n: _Number(numbers[n.name]))
            lines.append(f"{node.op} {node.target} {arguments}")
    return "\n".join(lines)


class _Number(int):
    """Prints so that an operator's number never looks like a literal."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _copied(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, Any]) -> Any:
    """Copy a call; what drops nothing out (dropout in evaluation, or of 0) is left out."""
    if operator_name(node) in ("dropout", "feature_dropout") and not is_random(node):
        return mapping[node.args[0]]  # type: ignore[index]
    copied = graph.create_node(
        node.op,
        node.target,
        fx.map_arg(node.args, lambda n: mapping[n]),
        fx.map_arg(node.kwargs, lambda n: mapping[n]),
        node.name,
    )
    return copied


def operator_name(node: fx.Node) -> str:
    """Return what a call runs, without namespace and overload: ``linear`` for ``aten.linear.default``."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return (
        "getitem" if node.target is operator.getitem else getattr(node.target, "__name__", str(node.target))
    )


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a call writes into (``relu_``, ``copy_``)."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = [
        i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    found = [
        node.args[i] if i < len(node.args) else node.kwargs.get(schema.arguments[i].name) for i in written
    ]
    return [read for read in found if isinstance(read, fx.Node)]


def _writes_given(node: fx.Node) -> bool:
    """Return whether a call writes into a weight, or into what the code is called with."""
    # relu_(conv2d(x)) writes what is made here, and may stay; relu_(view(x)) writes x. A call whose schema says that
    # its result may share the memory of what it reads ("Tensor(a)") is followed to what it reads.
    waiting, seen = writes(node), set()
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        if source.op != "call_function":
            return True
        schema = getattr(source.target, "_schema", None)
        if schema is None or any(result.alias_info is not None for result in schema.returns):
            waiting += source.all_input_nodes
    return False


def _updates_statistics(node: fx.Node) -> bool:
    """Return whether a normalisation over the batch writes its buffers: its schema says nothing of it."""
    # aten.batch_norm(input, weight, bias, running_mean, running_var, training, ...); instance_norm likewise
    name = operator_name(node)
    return name in ("batch_norm", "instance_norm") and bool(node.args[3]) and bool(node.args[5])


def named_operator(operators: Iterable[fx.Node], error: BaseException) -> str:
    """Return an error of a conversion in one line, with the operator that it speaks of in front where it names one."""
    # Converters wrap the error that says which operator it is, some twice: all causes are looked through, for the
    # operator's name as torch prints it (aten.softmax.int) and as schemas have it (aten::softmax).
    text = ""
    cause: BaseException | None = error
    while cause is not None:
        text += f"{cause}\n"
        cause = cause.__cause__ or cause.__context__
    for node in operators:
        schema = getattr(node.target, "_schema", None)
        names = (str(node.target), str(schema.name)) if schema is not None else (str(node.target),)
        if any(name in text for name in names):
            return f"operator {node.name} ({node.target}): {type(error).__name__}"
    return f"{type(error).__name__}: {first_line(error)}"
