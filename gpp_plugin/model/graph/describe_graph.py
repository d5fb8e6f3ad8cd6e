"""A stage graph as the planner and the runtime know models: blocks, their tensors, parameters, inputs, the loss.

Source: this project
Tests: tests/stage_graph/test_part.py, tests/stage_graph/test_captured.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph, OpGraph, OpNode, Parameter, SavedTensor
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.model.graph.module_trial import Shapes, loss_node
from gpp_plugin.model.graph.resolve import GraphStage, ResolvedGraph
from gpp_plugin.runtime.memory.segments import INSIDE
from gpp_plugin.runtime.stage_module import Reference

# ---- a captured part under the names of the whole graph --------------------------------------------------------

ARGUMENT = "argument_"
"""In front of received arguments' names while tracing: torch.fx renames those that are Python's own (``input``)."""


def traced_names(stage: GraphStage) -> dict[str, str]:
    """Return keyword -> what is traced for it; each tensor once, however many keywords it receives for.

    An entry of the batch is traced under its key. What other stages make has the name of the first keyword for it:
    ``left=vision.hidden, right=vision.hidden, mask=mask`` is
    ``{"left": "argument_left", "right": "argument_left", "mask": "mask"}``.
    """
    first: dict[str, str] = {}
    received = {keyword: first.setdefault(node, ARGUMENT + keyword) for keyword, node in stage.received}
    return {**dict(stage.batch_inputs), **received}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartView:
    """A captured part in one mode, under the names of the whole graph.

    Args:
        blocks: as planners know it.
        loss: what its loss is called, if it yields one.
        outputs: "stage.output", and what its loss is called -> its spec.
        received_saved: what it keeps of what other stages make, made by no block here.
        names: operator or received tensor -> what it is called in the whole graph.
        local_blocks: block of the whole graph -> the capture's own name of it.
    """

    analysis: Analysis
    blocks: BlockGraph
    loss: str | None
    outputs: Mapping[str, TensorSpec]
    received_saved: tuple[SavedTensor, ...]
    names: Mapping[str, str]
    local_blocks: Mapping[str, str]

    @property
    def local_names(self) -> dict[str, str]:
        """Return what the graph calls the part's operators and received tensors -> what the capture does."""
        return {new: old for old, new in self.names.items()}


def view_part(
    stage: GraphStage, captured: CapturedGraph | Analysis, local: BlockGraph, called: Mapping[str, str]
) -> PartView:
    """Return a capture as the whole graph sees it: as it is where it is alone.

    With the stage "vision", whose output "last_hidden_state" is the graph's "hidden": operator ``add_3`` is
    "vision:add_3", but "vision.hidden" where it makes that output; block "layers.0" is "vision.layers.0".

    Args:
        local: its blocks under its own names.
        called: "stage.parameter" of a parameter tied to another stage's -> what it is called on every stage.

    Raises:
        ConfigError: an output is no operator's result, or two are the same.
    """
    analysis = captured if isinstance(captured, Analysis) else captured.analysis
    if stage.is_alone:
        return PartView(
            analysis=analysis,
            blocks=local,
            loss=analysis.op_graph.loss,
            outputs={},
            received_saved=(),
            names={node.name: node.name for node in analysis.op_graph.nodes},
            local_blocks={block.name: block.name for block in local.blocks},
        )
    op_graph = captured.op_graph
    # three kinds of names, each with a map from the capture's: operators and received tensors, blocks, parameters
    names = _part_names(stage, op_graph, local)
    placed = {b.name: f"{stage.prefix}{b.name}" for b in local.blocks}
    parameters = parameter_names(stage, op_graph, called)

    def renamed(spec: TensorSpec) -> TensorSpec:
        return dataclasses.replace(spec, name=names[spec.name])

    # what leaves the part: other stages read its outputs by the user's names, whatever operator makes them
    by_name = {node.name: node for node in op_graph.nodes}
    outputs = {}
    for node in (*op_graph.outputs.values(), *([op_graph.loss] if op_graph.loss else [])):
        spec = by_name[node].output
        assert spec is not None, "outputs are tensors"
        outputs[names[node]] = renamed(spec)
    # what it keeps for backward has no maker here where it was received: the whole graph then finds one storage
    # saved on both sides of an edge, which counts once (`_saved`)
    saved = [_renamed_saved(tensor, placed, names) for tensor in local.saved]
    blocks = BlockGraph(
        model=stage.name,
        num_samples=local.num_samples,
        blocks=tuple(_renamed_block(block, placed, names, parameters) for block in local.blocks),
        edges=tuple(
            dataclasses.replace(
                edge,
                src=placed[edge.src],
                dst=placed[edge.dst],
                tensors=tuple(names[n] for n in edge.tensors),
            )
            for edge in local.edges
        ),
        tensors={names[name]: renamed(spec) for name, spec in local.tensors.items()},
        loss_block=None if local.loss_block is None else placed[local.loss_block],
        tied={parameters[name]: tuple(placed[b] for b in by) for name, by in local.tied.items()},
        saved=tuple(tensor for tensor in saved if tensor.made_by),
    )
    return PartView(
        analysis=analysis,
        blocks=blocks,
        loss=None if op_graph.loss is None else names[op_graph.loss],
        outputs=outputs,
        received_saved=tuple(tensor for tensor in saved if not tensor.made_by),
        names=names,
        local_blocks={new: old for old, new in placed.items()},
    )


def parameter_names(stage: GraphStage, op_graph: OpGraph, called: Mapping[str, str]) -> dict[str, str]:
    """Return parameter or buffer, as the capture calls it -> what it is called in the graph."""
    own = {p.name: [stage.prefix + name for name in (p.name, *p.aliases)] for p in op_graph.parameters}
    return {name: next((called[n] for n in names if n in called), names[0]) for name, names in own.items()}


def _part_names(stage: GraphStage, op_graph: OpGraph, local: BlockGraph) -> dict[str, str]:
    """Return operator or received tensor -> what a graph of several stages calls it."""
    placed = {node for block in local.blocks for node in block.nodes}
    arguments = traced_names(stage)
    names = {node.name: f"{stage.name}:{node.name}" for node in op_graph.nodes}
    names |= {arguments[keyword]: node for keyword, node in stage.received}
    taken: dict[str, str] = {}
    results = dict(op_graph.outputs)
    if op_graph.loss is not None:
        results[str(loss_node(stage))] = op_graph.loss
    for output, node in results.items():
        if node not in placed:
            raise ConfigError(
                f"stage {stage.name!r}: output {output!r} is no result of its layers (an input, a parameter, "
                "or made of inputs alone); read it from the batch where it is needed"
            )
        if node in taken:
            raise ConfigError(
                f"stage {stage.name!r}: outputs {taken[node]!r} and {output!r} are the same tensor; name one"
            )
        taken[node] = names[node] = output
    return names


def _renamed_block(
    block: Block, called: Mapping[str, str], names: Mapping[str, str], parameters: Mapping[str, str]
) -> Block:
    return dataclasses.replace(
        block,
        name=called[block.name],
        nodes=tuple(names[node] for node in block.nodes),
        parameters=tuple(parameters[name] for name in block.parameters),
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


# ---- the whole ------------------------------------------------------------------------------------------------

Tensors = Mapping[str, Sequence[Parameter]]
"""Stage -> its parameters and buffers, each under the stage's own name of it."""


def describe_graph(
    graph: ResolvedGraph,
    shapes: Shapes,
    tensors: Tensors,
    called: Mapping[str, str],
    *,
    coupled: frozenset[str],
    views: Mapping[str, PartView],
    is_training: bool,
    outputs: Sequence[str] = (),
) -> Reference:
    """Return the engine's view: one block a stage, and the blocks of captured parts.

    Args:
        called: "stage.parameter" of a tied parameter -> what it is called on every stage.
        coupled: stages that compute on whole loss units.
        views: captured parts.
        outputs: names requested in evaluation; those that the graph lacks are left out.
    """
    # Example: "vision" captured and cut by layers, "end" a user's module that reads vision.hidden and yields the loss.
    #   operators  vision.hidden, end.loss           one a stage's output: what evaluation and edges speak of
    #   blocks     vision.layers.0, vision.layers.1, end
    #   edges      vision.layers.0 -> vision.layers.1 (the part's own), vision.layers.1 -> end (vision.hidden)
    parameters, holders = merged_parameters(tensors, called)
    read = {key for stage in graph.stages for _, key in stage.batch_inputs}
    losses = [stage for stage in graph.stages if stage.losses]
    yielding = [
        str(views[stage.name].blocks.loss_block) if stage.is_captured else stage.name for stage in losses
    ]
    op_graph = OpGraph(
        model=graph.name,
        num_samples=shapes.num_samples,
        inputs=tuple(spec for key, spec in shapes.inputs.items() if key in read),
        parameters=parameters,
        nodes=tuple(_node(stage, node, shapes) for stage in graph.stages for _, node in stage.nodes),
        loss=loss_node(losses[0]) if losses else None,
        outputs={name: node for name in outputs if (node := _output(graph, name)) is not None},
        couplings=tuple(f"stage {name}" for name in sorted(coupled)),
    )
    blocks = BlockGraph(
        model=graph.name,
        num_samples=shapes.num_samples,
        blocks=tuple(block for stage in graph.stages for block in _blocks(stage, holders, coupled, views)),
        edges=(*(edge for view in views.values() for edge in view.blocks.edges), *_edges(graph, views)),
        tensors={
            **{name: spec for view in views.values() for name, spec in view.blocks.tensors.items()},
            **{node: shapes.tensors[node] for stage in graph.stages for _, node in stage.received},
        },
        loss_block=yielding[0] if yielding else None,
        tied=_tied(parameters, holders, views, is_training=is_training),
        saved=_saved(graph, views),
        more_losses=tuple(yielding[1:]),
    )
    analysis = Analysis(op_graph=op_graph, nodes=(), is_training=is_training)
    return Reference(analysis=analysis, block_graph=blocks, granularity="stage")


def merged_parameters(
    tensors: Tensors, called: Mapping[str, str]
) -> tuple[tuple[Parameter, ...], dict[str, list[Parameter]]]:
    """Return every parameter once, and what each stage holds, tied ones under the name of the first stage's."""
    merged: dict[str, Parameter] = {}
    holders: dict[str, list[Parameter]] = {}
    for stage, held in tensors.items():
        holders[stage] = []
        for own in held:
            name = next((called[n] for n in (own.name, *own.aliases) if n in called), own.name)
            names = dict.fromkeys((*_names(merged.get(name)), own.name, *own.aliases))
            known = merged.get(name, own)
            merged[name] = _renamed(known, name, [n for n in names if n != name], own.requires_grad)
            holders[stage].append(_renamed(own, name, (), own.requires_grad))
    return tuple(merged.values()), holders


def _names(parameter: Parameter | None) -> tuple[str, ...]:
    return () if parameter is None else (parameter.name, *parameter.aliases)


def _renamed(parameter: Parameter, name: str, aliases: Sequence[str], requires_grad: bool) -> Parameter:
    return Parameter(
        name=name,
        shape=parameter.shape,
        dtype=parameter.dtype,
        bytes=parameter.bytes,
        requires_grad=parameter.requires_grad or requires_grad,
        aliases=tuple(aliases),
        is_buffer=parameter.is_buffer,
        is_persistent=parameter.is_persistent,
    )


def _tied(
    parameters: Sequence[Parameter],
    holders: Mapping[str, Sequence[Parameter]],
    views: Mapping[str, PartView],
    *,
    is_training: bool,
) -> dict[str, tuple[str, ...]]:
    """Return tied parameter -> the blocks that read it, from the first stage's on.

    Args:
        parameters, holders: as of `merged_parameters`.
    """
    # Ties within a part are the capture's own; those between stages bring the reading blocks of all of them. With
    # text.wte tied to head.weight, "text" captured and "head" a user's: {"text.wte": (text.embed, head)}.
    found = {name: blocks for view in views.values() for name, blocks in view.blocks.tied.items()}
    for p in parameters:
        if not p.aliases:
            continue
        stages = [stage for stage, held in holders.items() if any(h.name == p.name for h in held)]
        if len(stages) > 1:
            found[p.name] = tuple(
                block for stage in stages for block in _holding(stage, p.name, views, is_training=is_training)
            )
    return found


def _holding(
    stage: str, parameter: str, views: Mapping[str, PartView], *, is_training: bool
) -> Sequence[str]:
    """Return the blocks of a stage that has a parameter which read it.

    Raises:
        ConfigError: in training, none of a captured part does.
    """
    if stage not in views:
        return (stage,)
    found = [block.name for block in views[stage].blocks.blocks if parameter in block.parameters]
    if is_training and not found:
        raise ConfigError(
            f"graph.tie: no layer of captured stage {stage!r} reads its parameter that is called {parameter!r}; leave "
            "it out of the tie, or pass what makes the module read it"
        )
    return found


def _saved(graph: ResolvedGraph, views: Mapping[str, PartView]) -> tuple[SavedTensor, ...]:
    """Return what captured parts keep for backward, each storage once; what other stages keep is known elsewhere."""
    found = {tensor.name: tensor for view in views.values() for tensor in view.blocks.saved}
    root = {view: tensor.name for tensor in found.values() for view in tensor.views}
    for view in views.values():
        for tensor in view.received_saved:
            name = root.get(tensor.name, tensor.name)
            maker = graph.stage(tensor.name.rpartition(".")[0])
            block = _maker(views[maker.name], tensor.name) if maker.is_captured else maker.name
            known = found.get(name, dataclasses.replace(tensor, made_by=block, kept_by=(), views=()))
            found[name] = dataclasses.replace(
                known, kept_by=(*known.kept_by, *tensor.kept_by), views=(*known.views, *tensor.views)
            )
    return tuple(found.values())


def _node(stage: GraphStage, node: str, shapes: Shapes) -> OpNode:
    inputs = (*(source for _, source in stage.received), *(key for _, key in stage.batch_inputs))
    return OpNode(
        name=node,
        target=f"stage {stage.name}",
        inputs=tuple(dict.fromkeys(inputs)),
        module=stage.name,
        output=shapes.tensors[node],
    )


def _blocks(
    stage: GraphStage,
    holders: Mapping[str, Sequence[Parameter]],
    coupled: frozenset[str],
    views: Mapping[str, PartView],
) -> list[Block]:
    """Return a captured part's blocks, or a user's module as one."""
    # inputs of blocks are entries of the batch: the others have edges
    keys = dict.fromkeys(key for _, key in stage.batch_inputs)
    if stage.is_captured:
        return [
            dataclasses.replace(block, inputs=tuple(name for name in block.inputs if name in keys))
            for block in views[stage.name].blocks.blocks
        ]
    held = holders[stage.name]
    trained = [p for p in held if p.requires_grad and not p.is_buffer]
    own = Block(
        name=stage.name,
        nodes=tuple(node for _, node in stage.nodes),
        parameters=tuple(p.name for p in held),
        inputs=tuple(keys),
        parameter_bytes=sum(p.bytes for p in held),
        trainable_bytes=sum(p.bytes for p in trained),
        is_coupled=stage.name in coupled,
        is_trainable=bool(trained),
    )
    return [own]


def _edges(graph: ResolvedGraph, views: Mapping[str, PartView]) -> tuple[BlockEdge, ...]:
    """Return an edge for each pair of blocks and way in which their tensor ranks hold what passes between them."""
    between: dict[tuple[str, str, int | None, int | None], dict[str, None]] = {}
    for stage in graph.stages:
        sharded = dict(stage.spec.sharded_inputs)
        for keyword, node in stage.received:
            stage_name, _, output = node.rpartition(".")
            maker = graph.stage(stage_name)
            made = dict(maker.spec.sharded_outputs)
            src = _maker(views[maker.name], node) if maker.is_captured else maker.name
            for dst in _readers(views[stage.name], ARGUMENT + keyword) if stage.is_captured else [stage.name]:
                between.setdefault((src, dst, made.get(output), sharded.get(keyword)), {})[node] = None
    return tuple(
        BlockEdge(src=src, dst=dst, tensors=tuple(nodes), src_shard_axis=src_axis, dst_shard_axis=dst_axis)
        for (src, dst, src_axis, dst_axis), nodes in between.items()
    )


def _maker(view: PartView, node: str) -> str:
    """Return the block of a captured part that makes an output."""
    return next(block.name for block in view.blocks.blocks if node in block.nodes)


def _readers(view: PartView, argument: str) -> list[str]:
    """Return the blocks of a captured part that read an argument."""
    return [block.name for block in view.blocks.blocks if argument in block.inputs]


def _output(graph: ResolvedGraph, name: str) -> str | None:
    """Return the one output of that name ("logits" or "stage.logits"), if there is one."""
    nodes = [node for stage in graph.stages for _, node in stage.nodes]
    found = [node for node in nodes if name in (node, node.rpartition(".")[2])]
    return found[0] if len(found) == 1 else None
