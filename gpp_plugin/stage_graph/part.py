"""A captured part of a stage graph: an ordinary module, traced and cut into stages of its own.

Its operators, blocks and tensors are known under names of the whole graph: an output under the user's name of it
("vision.hidden"), another tensor as "vision:<operator>", a block under the stage's name and its module path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
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
from gpp_plugin.ir.block_graph import Block, BlockGraph, SavedTensor
from gpp_plugin.ir.op_graph import OpGraph, Parameter
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.memory_policy import INSIDE, StageOperators
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function
from gpp_plugin.runtime.stage_source import StageCode
from gpp_plugin.stage_graph.call import loss_node, named_outputs
from gpp_plugin.stage_graph.module import describe_tensors
from gpp_plugin.stage_graph.resolve import GraphStage
from gpp_plugin.stage_graph.shapes import Shapes

ARGUMENT = "argument_"
"""In front of arguments' names while tracing: torch.fx renames those that are Python's own (``input``)."""


def owner_of_block(block: str) -> str:
    """Return the stage, as the user gave it, that a block of the whole graph is of."""
    return block.partition(".")[0].partition("#")[0]


class _Part(nn.Module):
    """The user's module under its stage's name, which returns its loss and its outputs by their names in the graph.

    It is called with what it reads once each, under the first keyword for it.
    """

    def __init__(self, stage: GraphStage) -> None:
        super().__init__()
        assert isinstance(stage.spec.make, nn.Module)
        self.add_module(stage.name, stage.spec.make)
        self._name = stage.name
        self._nodes = stage.nodes
        self._losses = stage.losses
        self._arguments = _arguments(stage)

    def forward(self, **given: Tensor) -> dict[str, Tensor]:
        """Call the module."""
        arguments = {keyword: given[name] for keyword, name in self._arguments.items()}
        returned: Any = self.get_submodule(self._name)(**arguments)
        if not isinstance(returned, (Tensor, Mapping, tuple, list)):
            returned = {field: getattr(returned, field, None) for field, _ in self._nodes}
        found = named_outputs(self._name, self._nodes, returned)
        if self._losses:
            found["loss"] = sum(found[node] for node in self._losses)  # type: ignore[assignment]
        return found


def _arguments(stage: GraphStage) -> dict[str, str]:
    """Return keyword -> what its tensor is called while tracing: after the first keyword with the same one."""
    sources = {**dict(stage.batch_inputs), **dict(stage.received)}
    first: dict[str, str] = {}
    return {
        keyword: first.setdefault(sources[keyword], ARGUMENT + keyword)
        for keyword, _ in stage.spec.inputs
        if keyword in sources
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PartView:
    """A captured part in one mode, under the names of the whole graph.

    Args:
        blocks: as planners know it; its inputs are the module's arguments.
        outputs: "stage.output", and what its loss is called -> its spec.
        received_saved: what it keeps of what other stages make, made by no block here.
        names: operator or received tensor -> what it is called in the whole graph.
        local_blocks: block of the whole graph -> the capture's own name of it.
    """

    analysis: Analysis
    blocks: BlockGraph
    outputs: Mapping[str, TensorSpec]
    received_saved: tuple[SavedTensor, ...]
    names: Mapping[str, str]
    local_blocks: Mapping[str, str]


class CapturedPart:
    """Traces a stage's module; nothing of it runs but what its generated code does.

    Args:
        granularity: size of the blocks.
        called: "stage.parameter" of a parameter tied to another stage's -> what it is called on every stage.
    """

    def __init__(
        self,
        stage: GraphStage,
        *,
        dtype: torch.dtype,
        device: torch.device,
        granularity: str,
        called: Mapping[str, str],
    ) -> None:
        self.stage = stage
        self.model = _Part(stage)
        self._dtype = dtype
        self._device = device
        self._granularity = granularity
        self._called = called

    @property
    def called(self) -> dict[str, str]:
        """Return its parameters that other stages have too, as "<stage>.<name>" -> what the graph calls them."""
        own = f"{self.stage.name}."
        return {
            p.name: self._called[name]
            for p in self.tensors()
            for name in (p.name, *p.aliases)
            if name in self._called and name.startswith(own)
        }

    def tensors(self) -> tuple[Parameter, ...]:
        """Return its parameters and buffers under "<stage>.<name>", as they will train."""
        dtype = str(self._dtype).removeprefix("torch.")
        return tuple(
            p
            if p.is_buffer or not p.dtype.startswith(("float", "bfloat"))
            else dataclasses.replace(p, dtype=dtype)
            for p in describe_tensors(self.stage.name, self.model.get_submodule(self.stage.name))
        )

    def capture(self, arguments: Mapping[str, Tensor], *, is_training: bool) -> CapturedGraph:
        """Trace the module for `arguments`.

        Raises:
            CaptureError: it cannot be exported; names module, line and remedy.
        """
        names = _arguments(self.stage)
        try:
            return capture_model(
                self.model,
                arguments,
                training=is_training,
                outputs=[node for _, node in self.stage.nodes if (node,) != self.stage.losses],
                received={
                    names[keyword]: arguments[names[keyword]].requires_grad
                    for keyword, _ in self.stage.received
                },
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
            empty = torch.empty(spec.shape_for(num_samples), dtype=getattr(torch, spec.dtype), device="meta")
            found[keyword] = empty.requires_grad_(spec.requires_grad)
        return self.as_traced(found)

    def as_traced(self, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the module is called with, by keyword, as the capture calls it."""
        return {name: arguments[keyword] for keyword, name in _arguments(self.stage).items()}

    def local_graph(self, captured: CapturedGraph | Analysis) -> BlockGraph:
        """Return a capture's blocks under its own names."""
        return coarsen(captured, granularity=self._granularity)

    def view(self, captured: CapturedGraph | Analysis) -> PartView:
        """Return a capture as the whole graph sees it.

        Raises:
            ConfigError: an output is no operator's result, or two are the same.
        """
        analysis = captured if isinstance(captured, Analysis) else captured.analysis
        op_graph = captured.op_graph
        local = self.local_graph(captured)
        names = self._names(op_graph, local)
        called = {b.name: self._block_name(b.name) for b in local.blocks}
        parameters = self.parameter_names(op_graph)

        def renamed(spec: TensorSpec) -> TensorSpec:
            return dataclasses.replace(spec, name=names[spec.name])

        by_name = {node.name: node for node in op_graph.nodes}
        outputs = {}
        for node in (*op_graph.outputs.values(), *([op_graph.loss] if op_graph.loss else [])):
            spec = by_name[node].output
            assert spec is not None, "outputs are tensors"
            outputs[names[node]] = renamed(spec)
        saved = [_renamed_saved(tensor, called, names) for tensor in local.saved]
        blocks = BlockGraph(
            model=self.stage.name,
            num_samples=local.num_samples,
            blocks=tuple(_renamed_block(block, called, names, parameters) for block in local.blocks),
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
            loss_block=None if local.loss_block is None else called[local.loss_block],
            tied={parameters[name]: tuple(called[b] for b in by) for name, by in local.tied.items()},
            saved=tuple(tensor for tensor in saved if tensor.made_by),
        )
        return PartView(
            analysis=analysis,
            blocks=blocks,
            outputs=outputs,
            received_saved=tuple(tensor for tensor in saved if not tensor.made_by),
            names=names,
            local_blocks={new: old for old, new in called.items()},
        )

    def parameter_names(self, op_graph: OpGraph) -> dict[str, str]:
        """Return parameter or buffer, as the capture calls it -> what it is called in the graph."""
        return {
            p.name: next((self._called[n] for n in (p.name, *p.aliases) if n in self._called), p.name)
            for p in op_graph.parameters
        }

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
        saved: Iterable[SavedTensor],
    ) -> StageCode:
        """Return the code of some of the part's blocks.

        Args:
            view: in the mode the code is for.
            blocks, outputs: of a stage, under the whole graph's names.
            named: output the user asks for -> which of ``outputs`` it is.
            saved: of the whole graph.
        """
        captured = self.capture_again(view.analysis, self.arguments(batch, shapes.tensors, num_samples))
        graph = self.local_graph(captured)
        nodes_of = {block.name: block.nodes for block in graph.blocks}
        nodes = {block: nodes_of[view.local_blocks[block]] for block in blocks}
        local = {new: old for old, new in view.names.items()}
        function = build_stage_function(
            captured,
            [node for of_block in nodes.values() for node in of_block],
            [local[name] for name in outputs],
        )
        fresh = self.view(captured)
        loss = loss_node(self.stage)
        return StageCode(
            function=self._in_graph(function, view.names, captured.op_graph, tuple(outputs)),
            tensors={**shapes.tensors, **fresh.blocks.tensors, **fresh.outputs},
            inputs=shapes.inputs,
            loss=loss if loss in outputs else None,
            outputs=named,
            operators=_operators(captured.op_graph, nodes, view.names, saved),
        )

    def _in_graph(
        self, function: StageFunction, names: Mapping[str, str], op_graph: OpGraph, outputs: tuple[str, ...]
    ) -> StageFunction:
        """Return code with everything under the whole graph's names."""
        arguments = _arguments(self.stage)
        keys = {arguments[keyword]: key for keyword, key in self.stage.batch_inputs}
        parameters = self.parameter_names(op_graph)
        return dataclasses.replace(
            function,
            tensors=tuple(parameters[name] for name in function.tensors),
            batch_inputs=tuple(keys[name] for name in function.batch_inputs),
            received=tuple(names[name] for name in function.received),
            outputs=outputs,
        )

    def _names(self, op_graph: OpGraph, local: BlockGraph) -> dict[str, str]:
        placed = {node for block in local.blocks for node in block.nodes}
        arguments = _arguments(self.stage)
        names = {node.name: f"{self.stage.name}:{node.name}" for node in op_graph.nodes}
        names |= {arguments[keyword]: node for keyword, node in self.stage.received}
        taken: dict[str, str] = {}
        results = dict(op_graph.outputs)
        if op_graph.loss is not None:
            results[str(loss_node(self.stage))] = op_graph.loss
        for output, node in results.items():
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
        return block if owner_of_block(block) == self.stage.name else f"{self.stage.name}.{block}"


def _operators(
    op_graph: OpGraph,
    blocks: Mapping[str, Sequence[str]],
    names: Mapping[str, str],
    saved: Iterable[SavedTensor],
) -> StageOperators:
    """Return what a stage of a captured part is made of.

    Args:
        blocks: of the stage -> their operators, as the capture calls them.
        names: as of `PartView`.
        saved: of the whole graph: what another stage keeps too has the name that its maker gives it.
    """
    root = {name: tensor.name for tensor in saved for name in (tensor.name, *tensor.views)}
    received = {name: root.get(names[name], names[name]) for name in op_graph.received}
    storage_of = {
        node.name: received.get(node.storage, node.storage) for node in op_graph.nodes if node.storage
    }
    return StageOperators(
        blocks={block: tuple(nodes) for block, nodes in blocks.items()},
        storage_of={**storage_of, **received},
        local={names[node.name]: node.name for node in op_graph.nodes},
    )


def _renamed_block(
    block: Block, called: Mapping[str, str], names: Mapping[str, str], parameters: Mapping[str, str]
) -> Block:
    return dataclasses.replace(
        block,
        name=called[block.name],
        nodes=tuple(names[node] for node in block.nodes),
        parameters=tuple(parameters[name] for name in block.parameters),
        inputs=tuple(name.removeprefix(ARGUMENT) for name in block.inputs),
    )


def _renamed_saved(tensor: SavedTensor, called: Mapping[str, str], names: Mapping[str, str]) -> SavedTensor:
    operator = tensor.name.removesuffix(INSIDE)
    return dataclasses.replace(
        tensor,
        name=names[operator] + tensor.name.removeprefix(operator),
        made_by=called.get(tensor.made_by, ""),
        kept_by=tuple(called[block] for block in tensor.kept_by),
        views=tuple(names[name] for name in tensor.views),
    )
