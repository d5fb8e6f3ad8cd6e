"""From stages as written down to a graph of them: which input is which output, in what order, towards which losses.

Everything a user may get wrong about the graph as a whole is refused here, in one line that names stage and
edge, before anything is built or sent.

Source: this project
Tests: tests/stage_graph/test_bad_input.py
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import networkx as nx
from torch import Tensor, nn

from gpp_plugin.errors import ConfigError
from gpp_plugin.model.graph.stage_graph import LOSS, RETURN_LOSS, StageGraph, StageSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStage:
    """A stage with its inputs resolved.

    Args:
        batch_inputs: (keyword, batch key).
        received: (keyword, output of another stage as "stage.output").
        nodes: (field of what the module returns, "stage.output").
        losses: which of those nodes are losses.
        constants: (keyword, value) of arguments that are no tensors; of captured stages only.
        is_alone: it is a captured module and the whole model: what it has is called as the module calls it. Its nodes
            are "output" then, and there are none where the module was passed alone and its output says which
            field is the loss.
        requested: of a stage that is alone, the outputs that an evaluation requests.
    """

    spec: StageSpec
    batch_inputs: tuple[tuple[str, str], ...]
    received: tuple[tuple[str, str], ...]
    nodes: tuple[tuple[str, str], ...]
    losses: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...] = ()
    is_alone: bool = False
    requested: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the stage's name."""
        return self.spec.name

    @property
    def prefix(self) -> str:
        """Return what the graph puts before the module's own names."""
        return "" if self.is_alone else f"{self.name}."

    @property
    def is_captured(self) -> bool:
        """Return whether its module is traced and cut, not run as it is."""
        return self.spec.num_pieces is not None

    @property
    def is_coupled(self) -> bool:
        """Return whether it computes on whole loss units."""
        return bool(self.losses) if self.spec.coupled is None else self.spec.coupled


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedGraph:
    """Stages in a topological order.

    Args:
        stages: producers before consumers.
        ties: groups of "stage.parameter"; the first of each names the others.
    """

    name: str
    stages: tuple[GraphStage, ...]
    ties: tuple[tuple[str, ...], ...]

    @property
    def whole(self) -> GraphStage | None:
        """Return the captured stage that is the whole model, if there is one."""
        return self.stages[0] if len(self.stages) == 1 and self.stages[0].is_alone else None

    def stage(self, name: str) -> GraphStage:
        """Return the stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    def has(self, name: str) -> bool:
        """Return whether there is a stage of that name."""
        return any(stage.name == name for stage in self.stages)

    def stages_of_rank(self, rank: int) -> tuple[GraphStage, ...]:
        """Return the stages that ``rank`` runs."""
        return tuple(stage for stage in self.stages if rank in stage.spec.ranks)

    def readers(self, node: str) -> tuple[str, ...]:
        """Return the stages that read an output."""
        return tuple(s.name for s in self.stages if any(source == node for _, source in s.received))


def resolve(
    graph: StageGraph,
    *,
    batch_keys: Collection[str],
    num_ranks: int,
    needs_loss: bool = True,
    constants: Mapping[str, Any] = MappingProxyType({}),
    requested: Sequence[str] = (),
) -> ResolvedGraph:
    """Return the graph with every input resolved.

    An input is an output of an earlier stage, else a batch key, else an output of a later one.

    Args:
        batch_keys: the batch's keys that hold tensors.
        needs_loss: False drops the stages that lack an input, and what reads them: evaluation without labels. A
            captured stage whose module can do without it only lacks its losses.
        constants: the batch's other entries.
        requested: outputs that an evaluation requests.

    Raises:
        ConfigError: an input is unknown or ambiguous, the stages form a cycle, ranks are left out, an output is
            read by nobody, or there is no loss.
    """
    # 1. every input, one stage at a time: "vision.hidden" is an output, "ids" what is nearest (see `_source`)
    specs = graph.stages
    if not specs:
        raise ConfigError(f"stage graph {graph.name!r} has no stages; add them with graph.stage(...)")
    check_ranks(specs, num_ranks)
    stages = []
    for position, spec in enumerate(specs):
        sources = [(keyword, _source(specs, position, text, batch_keys)) for keyword, text in spec.inputs]
        outputs = _with_requested(spec, requested) if graph.is_one_capture else spec.outputs
        stages.append(_connected(spec, sources, outputs, constants, needs_loss=needs_loss))
    # 2. what of it runs: in evaluation a stage without its labels falls away, and then whatever reads it
    losses = _losses(graph, stages, is_required=needs_loss)
    if not needs_loss:
        stages = _runnable(stages, batch_keys, losses)
    else:
        _refuse_unknown(stages, batch_keys)
    _refuse_mixed_shards(stages)
    # 3. producers before consumers; then names, for now "stage.output" everywhere, so that checks read one form
    ordered = tuple(
        dataclasses.replace(stage, losses=tuple(node for _, node in stage.nodes if node in losses))
        for stage in _ordered(stages)
    )
    resolved = ResolvedGraph(name=graph.name, stages=ordered, ties=_joined(graph.ties))
    if needs_loss:
        _refuse_unused(resolved)
    if graph.is_one_capture:
        alone = tuple(_alone(stage, batch_keys, requested) for stage in ordered)
        return dataclasses.replace(resolved, stages=alone)
    return resolved


def _connected(
    spec: StageSpec,
    sources: Sequence[tuple[str, tuple[bool, str]]],
    outputs: Sequence[tuple[str, str]],
    constants: Mapping[str, Any],
    *,
    needs_loss: bool,
) -> GraphStage:
    """Return a stage with what each of its inputs is: an output, an entry of the batch, or a constant of a capture.

    Args:
        sources: by keyword, as of `_source`.
        constants: entries of the batch that are no tensors.
    """
    read = [(keyword, text) for keyword, (is_edge, text) in sources if not is_edge]
    # a user's module is called with tensors only: its code is compiled for their shapes, not for values
    known = constants if spec.num_pieces is not None else {}
    held = {keyword: known[text] for keyword, text in read if text in known}
    if spec.needs_loss_flag and (needs_loss or RETURN_LOSS in known):
        held[RETURN_LOSS] = known.get(RETURN_LOSS, True)
    return GraphStage(
        spec=spec,
        batch_inputs=tuple((keyword, text) for keyword, text in read if text not in known),
        received=tuple((keyword, text) for keyword, (is_edge, text) in sources if is_edge),
        nodes=tuple((field, f"{spec.name}.{name}") for field, name in outputs),
        losses=(),
        constants=tuple(held.items()),
    )


def resolve_module(
    model: nn.Module, batch: Mapping[str, Any], *, num_ranks: int, requested: Sequence[str] = ()
) -> ResolvedGraph:
    """Return a plain model as a graph of one captured stage, which is called with the whole batch.

    Args:
        batch: as the model is called with it.
        requested: outputs that an evaluation requests.
    """
    # Its nodes are left empty: the module is called with the batch and its output read as it is, `.loss` and all.
    # A graph of one capture says which field is what (`_alone`), and is the same from there on.
    name = type(model).__name__
    keys = tuple((key, key) for key, value in batch.items() if isinstance(value, Tensor))
    stage = GraphStage(
        spec=StageSpec(
            name=name,
            make=model,
            inputs=tuple((key, key) for key in batch),
            outputs=((LOSS, LOSS),),
            ranks=tuple(range(num_ranks)),
            num_pieces="auto",
        ),
        batch_inputs=keys,
        received=(),
        nodes=(),
        losses=(),
        constants=tuple((key, value) for key, value in batch.items() if not isinstance(value, Tensor)),
        is_alone=True,
        requested=tuple(requested),
    )
    return ResolvedGraph(name=name, stages=(stage,), ties=())


def _with_requested(spec: StageSpec, requested: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the outputs of a stage that is the whole model, with those that an evaluation requests by the names that
    the module has for them: nothing else can be meant.
    """
    names = [name.removeprefix(f"{spec.name}.") for name in requested]
    return (*spec.outputs, *((name, name) for name in names if name not in spec.output_names))


def _alone(stage: GraphStage, batch_keys: Collection[str], requested: Sequence[str]) -> GraphStage:
    """Return a stage that is the whole model: its outputs by their own names, its inputs as the batch has them."""
    # a capture numbers its arguments; by the batch's order, as of a module that is passed alone, both spellings
    # have one graph, and so one stored profile
    place = {key: i for i, key in enumerate(batch_keys)}
    own = stage.prefix
    return dataclasses.replace(
        stage,
        batch_inputs=tuple(sorted(stage.batch_inputs, key=lambda pair: place[pair[1]])),
        nodes=tuple((field, node.removeprefix(own)) for field, node in stage.nodes),
        losses=tuple(node.removeprefix(own) for node in stage.losses),
        is_alone=True,
        requested=tuple(name.removeprefix(own) for name in requested),
    )


def check_ranks(specs: Iterable[StageSpec], num_ranks: int) -> None:
    """Refuse stages that do not use exactly the ranks there are.

    Raises:
        ConfigError: names a rank that is left out, or a stage that names one there is not.
    """
    used: dict[int, str] = {rank: spec.name for spec in specs for rank in spec.ranks}
    beyond = sorted(rank for rank in used if rank >= num_ranks)
    if beyond:
        raise ConfigError(
            f"stage {used[beyond[0]]!r}: rank {beyond[0]} does not exist, the job has {num_ranks} ranks "
            f"(0..{num_ranks - 1}); start more, or list others"
        )
    left_out = sorted(set(range(num_ranks)) - set(used))
    if left_out:
        raise ConfigError(
            f"ranks {left_out} of {num_ranks} are in no stage; the stages are "
            f"{', '.join(f'{s.name} on {list(s.ranks)}' for s in specs)}: list them, or start {len(used)}"
        )


def _source(
    specs: tuple[StageSpec, ...], position: int, text: str, batch_keys: Collection[str]
) -> tuple[bool, str]:
    """Return whether an input is another stage's output, and the "stage.output" or batch key it is."""
    # "vision.hidden" names its stage; "hidden" is looked for among the stages before, then in the batch, then among
    # those behind, whose author wrote them down in another order: a batch key hides an output that comes later
    own = specs[position]
    head, _, output = text.rpartition(".")
    if head:
        for spec in specs:
            if spec.name == head:
                if output not in spec.output_names:
                    raise ConfigError(
                        f"stage {own.name!r}: input {text!r} names no output of stage {head!r}, whose outputs are "
                        f"{', '.join(spec.output_names)}{_nearest(output, spec.output_names)}"
                    )
                return True, text
    earlier = [spec.name for spec in specs[:position] if text in spec.output_names]
    later = [spec.name for spec in specs[position + 1 :] if text in spec.output_names]
    for makers in (earlier, [] if text in batch_keys else later):
        if len(makers) > 1:
            raise ConfigError(
                f"stage {own.name!r}: input {text!r} is an output of stages {' and '.join(makers)}; write "
                f'"{makers[-1]}.{text}"'
            )
        if makers:
            return True, f"{makers[0]}.{text}"
    return False, text


def _refuse_unknown(stages: Iterable[GraphStage], batch_keys: Collection[str]) -> None:
    listed = list(stages)
    for stage in listed:
        for _, key in stage.batch_inputs:
            if key not in batch_keys:
                outputs = [name for other in listed if other is not stage for _, name in other.spec.outputs]
                raise ConfigError(
                    f"stage {stage.name!r}: input {key!r} is neither an output of another stage ({', '.join(outputs)}) "
                    f"nor a tensor of the batch ({', '.join(sorted(batch_keys))})"
                    f"{_nearest(key, [*outputs, *batch_keys])}"
                )


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _runnable(
    stages: list[GraphStage], batch_keys: Collection[str], losses: Collection[str]
) -> list[GraphStage]:
    """Return the stages that have all their inputs, or can do without."""
    # a stage that falls away takes its readers with it, and they theirs, until nothing changes
    remaining = [known for stage in stages if (known := _with_known(stage, batch_keys, losses)) is not None]
    while True:
        made = {node for stage in remaining for _, node in stage.nodes}
        left = [stage for stage in remaining if all(source in made for _, source in stage.received)]
        if len(left) == len(remaining):
            return left
        remaining = left


def _with_known(stage: GraphStage, batch_keys: Collection[str], losses: Collection[str]) -> GraphStage | None:
    """Return a stage without arguments that the batch lacks and without its losses, or None where it cannot run so."""
    missing = {keyword for keyword, key in stage.batch_inputs if key not in batch_keys}
    yields_loss = not stage.spec.needs_loss_flag or dict(stage.constants).get(RETURN_LOSS)
    if not missing and yields_loss:
        return stage
    nodes = tuple((field, node) for field, node in stage.nodes if node not in losses)
    optional = (
        {n for n, p in _parameters(stage).items() if p.default is not p.empty} if stage.is_captured else set()
    )
    if not stage.is_captured or not nodes or not missing <= optional:
        return None
    known = tuple((keyword, key) for keyword, key in stage.batch_inputs if keyword not in missing)
    return dataclasses.replace(stage, batch_inputs=known, nodes=nodes)


def _parameters(stage: GraphStage) -> Mapping[str, inspect.Parameter]:
    """Return what a captured stage's module takes."""
    assert isinstance(stage.spec.make, nn.Module), "what is captured is a module"
    return inspect.signature(stage.spec.make.forward).parameters


def _refuse_mixed_shards(stages: Iterable[GraphStage]) -> None:
    """A stage's ranks get a tensor once: whole, or as shards along one axis."""
    for stage in stages:
        axes = dict(stage.spec.sharded_inputs)
        held: dict[str, tuple[str, int | None]] = {}
        for keyword, node in stage.received:
            other, axis = held.setdefault(node, (keyword, axes.get(keyword)))
            if axis != axes.get(keyword):
                raise ConfigError(
                    f"stage {stage.name!r}: inputs {other!r} and {keyword!r} are both {node!r}, held in two ways by "
                    "its tensor ranks; read it once"
                )


def _losses(graph: StageGraph, stages: list[GraphStage], *, is_required: bool) -> set[str]:
    nodes = [node for stage in stages for _, node in stage.nodes]
    if graph.losses is None:
        found = {node for node in nodes if node.rpartition(".")[2] == LOSS}
        if not found and is_required:
            raise ConfigError(
                f"stage graph {graph.name!r} has no loss: no stage has an output called {LOSS!r}; name one so, or "
                f"give StageGraph(losses=[...]) from {', '.join(nodes)}"
            )
        return found
    found = set()
    for text in graph.losses:
        named = [node for node in nodes if text in (node, node.rpartition(".")[2])]
        if not named and not is_required:
            continue
        if len(named) != 1:
            what = "is no output" if not named else f"is {' and '.join(named)}"
            raise ConfigError(
                f"stage graph {graph.name!r}: loss {text!r} {what}; the outputs are {', '.join(nodes)}"
                f"{_nearest(text, nodes) if not named else ''}"
            )
        found.update(named)
    if not found and is_required:
        raise ConfigError(f"stage graph {graph.name!r}: losses is empty; name one of {', '.join(nodes)}")
    return found


def _ordered(stages: list[GraphStage]) -> list[GraphStage]:
    """Return the stages with producers first, otherwise in the user's order."""
    place = {stage.name: i for i, stage in enumerate(stages)}
    edges = nx.DiGraph()
    edges.add_nodes_from(place)
    for stage in stages:
        edges.add_edges_from((source.rpartition(".")[0], stage.name) for _, source in stage.received)
    if not nx.is_directed_acyclic_graph(edges):
        circle = [edge[0] for edge in nx.find_cycle(edges)]
        first, second = circle[0], circle[1 % len(circle)]
        reads = next(
            source
            for stage in stages
            if stage.name == second
            for _, source in stage.received
            if source.rpartition(".")[0] == first
        )
        raise ConfigError(
            f"the stages form a cycle: {' -> '.join([*circle, circle[0]])} (stage {second!r} reads {reads!r}); "
            "a stage reads outputs of stages before it only"
        )
    return [stages[place[name]] for name in nx.lexicographical_topological_sort(edges, key=place.__getitem__)]


def _refuse_unused(graph: ResolvedGraph) -> None:
    """Every stage's outputs are read, reported or a loss, and every stage leads to a loss."""
    # backwards from the losses: a stage leads to one where a stage that does reads it
    leads = {stage.name for stage in graph.stages if stage.losses}
    for stage in reversed(graph.stages):
        for _, node in stage.nodes:
            readers = graph.readers(node)
            if leads.intersection(readers):
                leads.add(stage.name)
    for stage in graph.stages:
        unread = [
            node
            for _, node in stage.nodes
            if not graph.readers(node)
            and node not in stage.losses
            and node.rpartition(".")[2] not in stage.spec.reported
        ]
        if unread:
            raise ConfigError(
                f"stage {stage.name!r}: no stage reads its output {unread[0]!r} and it is no loss; leave it out, or "
                f"list it in reported=[...] for eval_batch"
            )
        if stage.name not in leads:
            raise ConfigError(
                f"stage {stage.name!r}: no loss is reached from it (its outputs are "
                f"{', '.join(node for _, node in stage.nodes)}); connect it, or leave it out"
            )


def _joined(ties: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups with those joined that share a parameter."""
    joined: list[list[str]] = []
    for tie in ties:
        separate = [group for group in joined if not set(group) & set(tie)]
        together = [group for group in joined if set(group) & set(tie)]
        joined = [
            *separate,
            list(dict.fromkeys([name for group in [*together, list(tie)] for name in group])),
        ]
    return tuple(map(tuple, joined))
