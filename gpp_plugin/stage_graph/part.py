"""A captured part of a stage graph: an ordinary module without a loss, traced and cut into stages of its own.

Its operators, blocks and tensors are known under names of the whole graph: an output under the user's name of it
("vision.hidden"), another tensor as "vision:<operator>", a block under the stage's name and its module path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model, recapture
from gpp_plugin.capture.graph import CapturedGraph
from gpp_plugin.capture.samples import resize_batch
from gpp_plugin.errors import CaptureError, ConfigError
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.block_graph import Block, BlockGraph
from gpp_plugin.ir.op_graph import OpGraph
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function
from gpp_plugin.runtime.stage_source import StageCode
from gpp_plugin.stage_graph.call import named_outputs
from gpp_plugin.stage_graph.resolve import GraphStage
from gpp_plugin.stage_graph.shapes import Shapes

ARGUMENT = "argument_"
"""In front of arguments' names while tracing: torch.fx renames those that are Python's own (``input``)."""


class _Part(nn.Module):
    """The user's module under its stage's name, which returns its outputs by their names in the graph."""

    def __init__(self, name: str, module: nn.Module, nodes: tuple[tuple[str, str], ...]) -> None:
        super().__init__()
        self.add_module(name, module)
        self._name = name
        self._nodes = nodes

    def forward(self, **given: Tensor) -> dict[str, Tensor]:
        """Call the module."""
        arguments = {name.removeprefix(ARGUMENT): tensor for name, tensor in given.items()}
        returned: Any = self.get_submodule(self._name)(**arguments)
        if not isinstance(returned, (Tensor, Mapping, tuple, list)):
            returned = {field: getattr(returned, field, None) for field, _ in self._nodes}
        return named_outputs(self._name, self._nodes, returned)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartView:
    """A captured part in one mode, under the names of the whole graph.

    Args:
        blocks: as planners know it; its inputs are the module's arguments.
        outputs: "stage.output" -> its spec.
        names: operator -> what its result is called in the whole graph.
        local_blocks: block of the whole graph -> the capture's own name of it.
    """

    analysis: Analysis
    blocks: BlockGraph
    outputs: Mapping[str, TensorSpec]
    names: Mapping[str, str]
    local_blocks: Mapping[str, str]


class CapturedPart:
    """Traces a stage's module; nothing of it runs but what its generated code does.

    Args:
        granularity: size of the blocks.
    """

    def __init__(
        self, stage: GraphStage, *, dtype: torch.dtype, device: torch.device, granularity: str
    ) -> None:
        assert isinstance(stage.spec.make, nn.Module)
        self.stage = stage
        self.model = _Part(stage.name, stage.spec.make, stage.nodes)
        self._dtype = dtype
        self._device = device
        self._granularity = granularity

    def capture(self, arguments: Mapping[str, Tensor], *, is_training: bool) -> CapturedGraph:
        """Trace the module for arguments like these.

        Raises:
            CaptureError: it cannot be exported; names module, line and remedy.
        """
        try:
            return capture_model(
                self.model,
                arguments,
                training=is_training,
                outputs=[node for _, node in self.stage.nodes],
                dtype=self._dtype,
                device=self._device,
            )
        except CaptureError as error:
            text = str(error).replace(_Part.__name__, type(self.stage.spec.make).__name__)
            raise CaptureError(f"stage {self.stage.name!r}: {text}") from error

    def capture_again(self, analysis: Analysis, arguments: Mapping[str, Tensor]) -> CapturedGraph:
        """Trace the module at another shape."""
        return recapture(self.model, analysis, arguments)

    def arguments(
        self, batch: Batch, shapes: Mapping[str, TensorSpec], num_samples: int
    ) -> dict[str, Tensor]:
        """Return arguments, as the capture calls them, for ``num_samples`` samples: rows of the batch, edges empty."""
        rows = resize_batch(batch, num_samples)
        found = {keyword: rows[key] for keyword, key in self.stage.batch_inputs}
        for keyword, node in self.stage.received:
            spec = shapes[node]
            found[keyword] = torch.empty(
                spec.shape_for(num_samples), dtype=getattr(torch, spec.dtype), device="meta"
            )
        return {ARGUMENT + keyword: found[keyword] for keyword, _ in self.stage.spec.inputs}

    def local_graph(self, captured: CapturedGraph | Analysis) -> BlockGraph:
        """Return a capture's blocks under its own names."""
        return coarsen(captured, granularity=self._granularity)

    def view(self, captured: CapturedGraph | Analysis, tensors: Mapping[str, TensorSpec]) -> PartView:
        """Return a capture as the whole graph sees it.

        Args:
            tensors: specs of what it reads from other stages.

        Raises:
            ConfigError: an output is no operator's result, or two are the same.
        """
        analysis = captured if isinstance(captured, Analysis) else captured.analysis
        op_graph = captured.op_graph
        local = self.local_graph(captured)
        names = self._names(op_graph, local)
        gradients = _with_gradient(op_graph, self._trained_arguments(tensors))
        called = {b.name: self._block_name(b.name) for b in local.blocks}

        def renamed(spec: TensorSpec) -> TensorSpec:
            has_gradient = spec.requires_grad or spec.name in gradients
            return dataclasses.replace(spec, name=names[spec.name], requires_grad=has_gradient)

        by_name = {node.name: node for node in op_graph.nodes}
        outputs = {}
        for output, node in op_graph.outputs.items():
            spec = by_name[node].output
            assert spec is not None, "outputs are tensors"
            outputs[output] = renamed(spec)
        blocks = BlockGraph(
            model=self.stage.name,
            num_samples=local.num_samples,
            blocks=tuple(_renamed_block(block, called, names) for block in local.blocks),
            edges=tuple(
                dataclasses.replace(
                    edge,
                    src=called[edge.src],
                    dst=called[edge.dst],
                    tensors=tuple(names[n] for n in edge.tensors),
                )
                for edge in local.edges
            ),
            tensors={names[name]: renamed(spec) for name, spec in local.tensors.items()},
            loss_block=None,
            tied={name: tuple(called[b] for b in by) for name, by in local.tied.items()},
        )
        return PartView(
            analysis=analysis,
            blocks=blocks,
            outputs=outputs,
            names=names,
            local_blocks={new: old for old, new in called.items()},
        )

    def code(
        self,
        view: PartView,
        batch: Batch,
        shapes: Shapes,
        num_samples: int,
        *,
        blocks: Sequence[str],
        outputs: Sequence[str],
        named: Mapping[str, str],
    ) -> StageCode:
        """Return the code of some of the part's blocks.

        Args:
            view: in the mode the code is for.
            blocks, outputs: of a stage, under the whole graph's names.
            named: output the user asks for -> which of ``outputs`` it is.
        """
        captured = self.capture_again(view.analysis, self.arguments(batch, shapes.tensors, num_samples))
        graph = self.local_graph(captured)
        nodes_of = {block.name: block.nodes for block in graph.blocks}
        nodes = [node for block in blocks for node in nodes_of[view.local_blocks[block]]]
        local = {new: old for old, new in view.names.items()}
        function = build_stage_function(captured, nodes, [local[name] for name in outputs])
        fresh = self.view(captured, shapes.tensors)
        return StageCode(
            function=self._in_graph(function, view.names, tuple(outputs)),
            tensors={**shapes.tensors, **fresh.blocks.tensors, **fresh.outputs},
            inputs=shapes.inputs,
            loss=None,
            outputs=named,
        )

    def _in_graph(
        self, function: StageFunction, names: Mapping[str, str], outputs: tuple[str, ...]
    ) -> StageFunction:
        """Return code that takes edges among what is received, and everything under the whole graph's names."""
        keys = {ARGUMENT + keyword: key for keyword, key in self.stage.batch_inputs}
        edges = {ARGUMENT + keyword: node for keyword, node in self.stage.received}
        own = [*function.batch_inputs, *function.received]
        batch_inputs = dict.fromkeys(keys[name] for name in function.batch_inputs if name in keys)
        received = dict.fromkeys(
            [
                *(edges[name] for name in function.batch_inputs if name in edges),
                *(names[n] for n in function.received),
            ]
        )
        order = {("batch", key): i for i, key in enumerate(batch_inputs)}
        order |= {("node", node): len(batch_inputs) + i for i, node in enumerate(received)}
        places = []
        for position, name in enumerate(own):
            if position >= len(function.batch_inputs):
                places.append(order["node", names[name]])
            else:
                places.append(order["batch", keys[name]] if name in keys else order["node", edges[name]])
        count, inner = len(function.tensors), function.call

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = tensors[count:]
            return inner(*tensors[:count], *(given[place] for place in places))

        return dataclasses.replace(
            function,
            call=call,
            batch_inputs=tuple(batch_inputs),
            received=tuple(received),
            outputs=outputs,
        )

    def _names(self, op_graph: OpGraph, local: BlockGraph) -> dict[str, str]:
        placed = {node for block in local.blocks for node in block.nodes}
        names = {node.name: f"{self.stage.name}:{node.name}" for node in op_graph.nodes}
        taken: dict[str, str] = {}
        for output, node in op_graph.outputs.items():
            if node not in placed:
                raise ConfigError(
                    f"stage {self.stage.name!r}: output {output!r} is no result of its layers (an input, a parameter, "
                    "or made of inputs alone); read it from the batch where it is needed"
                )
            if node in taken:
                raise ConfigError(
                    f"stage {self.stage.name!r}: outputs {taken[node]!r} and {output!r} are the same tensor; name one"
                )
            taken[node] = names[node] = output
        return names

    def _block_name(self, block: str) -> str:
        stage = self.stage.name
        return block if block == stage or block.startswith((f"{stage}.", f"{stage}#")) else f"{stage}.{block}"

    def _trained_arguments(self, tensors: Mapping[str, TensorSpec]) -> set[str]:
        return {ARGUMENT + keyword for keyword, node in self.stage.received if tensors[node].requires_grad}


def _renamed_block(block: Block, called: Mapping[str, str], names: Mapping[str, str]) -> Block:
    return dataclasses.replace(
        block,
        name=called[block.name],
        nodes=tuple(names[node] for node in block.nodes),
        inputs=tuple(name.removeprefix(ARGUMENT) for name in block.inputs),
    )


def _with_gradient(op_graph: OpGraph, arguments: set[str]) -> set[str]:
    """Return the operators through which a gradient flows to these arguments; the capture's inputs have none."""
    found = set(arguments)
    for node in op_graph.nodes:
        is_float = node.output is None or node.output.dtype.startswith(("float", "bfloat", "complex"))
        if is_float and not found.isdisjoint(node.inputs):
            found.add(node.name)
    return found
