"""A forward without gradients in the form that backends build from: operators, weights, and examples of what changes.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.layouts import is_random
from gpp_plugin.capture.tracing.clean import may_alias, written_arguments
from gpp_plugin.errors import ConfigError, first_line, nearest
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function

ForwardRunner = Callable[..., Sequence[Tensor]]
"""Takes the tensors that change, in the order of `ForwardCode.examples`, and returns the outputs."""

READS_VALUES = ("item", "_local_scalar_dense", "nonzero")
"""Operators whose results' shapes, or numbers, are only decided at run time: what is built once cannot have them."""


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
        return {tensor.dtype for tensor in self._tensors if tensor.dtype.is_floating_point}

    @property
    def devices(self) -> set[str]:
        """Return the kinds of devices of weights and examples."""
        return {tensor.device.type for tensor in self._tensors}

    @property
    def _tensors(self) -> list[Tensor]:
        return [t for t in (*self.bound, *self.parameters, *self.examples) if isinstance(t, Tensor)]

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
            name = operator_name(node)
            if _writes_operands(node):
                updates = name in ("batch_norm", "instance_norm")
                written = "updates its running statistics" if updates else "writes into its operands"
                return f"{node.name} ({node.target}) {written}"
            if name in READS_VALUES:
                return f"{node.name} ({node.target}) depends on values"
        return ""

    @functools.cached_property
    def frozen(self) -> fx.GraphModule:
        """Return the operators with all that stays the same inside, called with what changes."""
        # A new graph, operator by operator: placeholders of what stays the same become buffers of the module (the same
        # memory as the weights; it is the backend that copies), or plain numbers where they are sizes.
        graph = fx.Graph()
        root = nn.Module()
        mapping: dict[fx.Node, Any] = {}
        fixed = (*self.bound, *self.parameters)
        values = (*fixed, *[None] * len(self.examples))
        placeholders = self.module.graph.find_nodes(op="placeholder")
        for i, (node, value) in enumerate(zip(placeholders, values, strict=True)):
            if value is None:
                mapping[node] = graph.placeholder(f"input_{i - len(fixed)}")
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
        operands = [f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else repr(v) for v in values]
        return hashlib.sha256("\n".join((*operands, structure_of(self.module))).encode()).hexdigest()[:16]


def module_in_use(function: StageFunction) -> fx.GraphModule:
    """Return the version of a stage's code that is in use (attention with or without masks)."""
    module = function.module if function.choice is None else function.choice.module
    assert module is not None, "backends and compilers take generated code alone"
    return module


def forward_code(
    name: str, function: StageFunction, parameters: Sequence[Tensor], tensors: Sequence[Tensor]
) -> ForwardCode:
    """Return the code of a stage, or of a part of one, in the version that is in use."""
    return ForwardCode(
        name=name,
        module=module_in_use(function),
        bound=function.bound,
        parameters=tuple(parameters),
        examples=tuple(tensor.detach() for tensor in tensors),
    )


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
    arguments: Any = fx.map_arg((node.args, node.kwargs), lambda n: mapping[n])
    args, kwargs = arguments
    return graph.create_node(node.op, node.target, args, kwargs, node.name)


def operator_name(node: fx.Node) -> str:
    """Return what a call runs, without namespace and overload: ``linear`` for ``aten.linear.default``."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return (
        "getitem" if node.target is operator.getitem else getattr(node.target, "__name__", str(node.target))
    )


def _writes_operands(node: fx.Node) -> bool:
    """Return whether a call writes into a weight, or into an argument of the code."""
    # relu_(conv2d(x)) writes what is made here, and may stay; relu_(view(x)) writes x. A call whose schema says that
    # its result may share the memory of what it reads ("Tensor(a)") is followed to what it reads.
    waiting, seen = written_arguments(node), set()
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        if source.op != "call_function":
            return True
        if may_alias(source):
            waiting += source.all_input_nodes
    return False


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


# Forwards of a model and of modules in it, captured in evaluation as stages are, to measure backends on.

WHOLE = "(whole)"
"""The name of the part that is the model itself."""


def use_threads(count: int | None) -> int:
    """Let torch, and so all backends, compute on so many threads; None: as many as it does. Returns how many."""
    if count is not None:
        torch.set_num_threads(count)
    return torch.get_num_threads()


@torch.no_grad()
def part_codes(
    model: nn.Module, batch: Mapping[str, Any], parts: Sequence[str] = (), *, outputs: Sequence[str] = ()
) -> list[ForwardCode]:
    """Return the forward of a model in evaluation, or of each of some modules of it, on a batch.

    Args:
        parts: paths of modules, like ``vision_model``; none: the whole model.
        outputs: of the model, where it has no loss.

    Raises:
        ConfigError: a path names no module, or one that computes nothing.
        CaptureError: the model cannot be captured.
    """
    captured = capture_model(model.eval(), batch, training=False, outputs=outputs)
    graph = captured.op_graph
    generator = _Generator(captured, model, batch)
    leaving = [name for name in (graph.loss, *graph.outputs.values()) if name is not None]
    if not parts:
        return [generator.code(WHOLE, [node.name for node in graph.nodes], leaving)]
    codes = []
    for path in parts:
        # what a module made of inputs alone (masks) is replicated: each reader computes it again
        own = [
            node.name
            for node in graph.nodes
            if (node.module == path or node.module.startswith(f"{path}.")) and not node.is_replicable
        ]
        if not own:
            # every module on the way to one that calls an operator: vision_model of vision_model.encoder.layers.0
            paths = {node.module for node in graph.nodes if node.module}
            modules = sorted({one.rsplit(".", n)[0] for one in paths for n in range(one.count(".") + 1)})
            raise ConfigError(
                f"--part {path!r}: no module of the model computes anything by that name{nearest(path, modules)}"
            )
        # what leaves the module: tensors that operators outside of it read, and those that the model returns
        inside = set(own)
        read = {
            name for node in graph.nodes if node.name not in inside for name in node.inputs if name in inside
        }
        tensors = {node.name for node in graph.nodes if node.output is not None}
        made = [name for name in own if name in tensors and (name in read or name in leaving)]
        codes.append(generator.code(path, own, made))
    return codes


class _Generator:
    """Generates code of operators of a captured model, with the model's weights and values of a batch."""

    def __init__(self, captured: CapturedGraph, model: nn.Module, batch: Mapping[str, Any]) -> None:
        self._captured = captured
        self._weights: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._weights.update(model.named_buffers(remove_duplicate=False))
        self._batch = batch

    def code(self, name: str, nodes: Sequence[str], outputs: Sequence[str]) -> ForwardCode:
        """Return the code of some operators."""
        function, parameters, inputs = self._generate(nodes, outputs)
        received: tuple[Tensor, ...] = ()
        if function.received:
            # of visual_projection: pixels -> ... -> pooled, which it reads; the text tower and the loss do not run
            before, *operands = self._generate(self._ancestors(function.received), function.received)
            received = before.call(*operands[0], *operands[1])
        return forward_code(name, function, parameters, (*inputs, *received))

    def _generate(
        self, nodes: Sequence[str], outputs: Sequence[str]
    ) -> tuple[StageFunction, list[Tensor], list[Tensor]]:
        """Return code, and the weights and entries of the batch that it takes."""
        function = build_stage_function(self._captured, nodes, outputs, ones=self._captured.analysis.unpadded)
        weights = [self._weights[name].detach() for name in function.tensors]
        return function, weights, [self._batch[key] for key in function.batch_inputs]

    def _ancestors(self, names: Sequence[str]) -> list[str]:
        """Return all operators that these depend on, and themselves; a loss behind them may be costly."""
        known = {node.name: node for node in self._captured.op_graph.nodes}
        needed, waiting = set(), list(names)
        while waiting:
            name = waiting.pop()
            if name in known and name not in needed:
                needed.add(name)
                waiting += known[name].inputs
        return [name for name in known if name in needed]
