"""One export of a model at one number of samples, cleaned, with its placeholders named."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind

from gpp_plugin.capture.eager.keep_whole import WholeCalls
from gpp_plugin.capture.eager.trial_run import DEPENDS, TAKEN, Untraceable
from gpp_plugin.capture.tracing.clean import (
    clean_graph,
    copied,
    may_alias,
    module_path,
    written_arguments,
    written_storages,
)
from gpp_plugin.capture.tracing.meta_copy import MetaCopy
from gpp_plugin.capture.tracing.outside import Draws, watched_generators
from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.capture.tracing.symbolic_sizes import has_shape_of
from gpp_plugin.capture.tracing.torch_export import WRAPPED, Call, call_by_key, export_model, split_batch
from gpp_plugin.capture.tracing.values import Recording
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import GraphNode

aten = torch.ops.aten

MOVE_TO_MODULE = "move that part into a module of its own, which then runs as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A cleaned export.

    Args:
        inputs, parameters, constants: as in `CapturedGraph`.
        fakes: placeholder name -> fake tensor.
        received: as of `OpGraph`.
        recording: what Python read of the batch, where it was allowed to.
        has_loss: whether the first result is the loss; ``output_names``: of the other results.
        drawn: what generators outside the graph did; they are back where they were.
    """

    num_samples: int
    graph: fx.Graph
    attributes: dict[str, Any]
    inputs: dict[str, str]
    parameters: dict[str, str]
    constants: dict[str, torch.Tensor]
    fakes: dict[str, torch.Tensor]
    has_loss: bool
    output_names: tuple[str, ...]
    received: tuple[str, ...]
    drawn: Draws
    recording: Recording | None = None

    @property
    def loss(self) -> str | None:
        """Return the node that yields the loss."""
        return self._results()[0] if self.has_loss else None

    @property
    def outputs(self) -> dict[str, str]:
        """Return the node of each named output."""
        return dict(zip(self.output_names, self._results()[int(self.has_loss) :], strict=True))

    def as_text(self) -> str:
        """Return all that two traces of one model can differ in: operators, their arguments, and constants."""
        flat = (value.reshape(-1).contiguous().cpu().view(torch.uint8) for value in self.constants.values())
        values = [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in flat]
        return "\n".join([str(self.graph), *map(str, self.attributes.values()), *values])

    def _results(self) -> list[str]:
        output: Any = next(iter(reversed(self.graph.nodes)))
        return [node.name for node in output.args[0]]

    @property
    def operators(self) -> list[fx.Node]:
        """Return the operator nodes in execution order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An export, and the weightless copy of the model that it was made of: they are of one fake mode."""

    meta_copy: MetaCopy
    traced: Traced


def trace(
    meta_copy: MetaCopy,
    batch: Mapping[str, Any],
    *,
    outputs: Sequence[str],
    received: Mapping[str, bool],
    training: bool,
    call: Call = call_by_key,
    eager: Sequence[str] = (),
    reads: Mapping[str, Any] | None = None,
    lengths: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> Traced:
    """Export the meta_copy for ``batch`` and clean the graph.

    Args:
        eager: modules and loss functions that run as they are.
        lengths: batch key -> axes whose sizes are left open.
        received: entries of the batch that other stages make -> whether they take a gradient.
        call: how the model is called with the batch.
        reads: as of `export_model`.

    Raises:
        CaptureError: the model cannot be exported, or a constant it made has no values.
    """
    # Export, clean, then name what goes in: of a model with a loss and outputs=("logits",) the graph returns (loss,
    # logits), and its placeholders are called as export calls them, here "p_model_head_weight" and "pixel_values".
    receives = training and any(received.values())
    whole = WholeCalls(meta_copy, eager, batch, training=training, receives=receives)
    with watched_generators(meta_copy.model) as drawn:
        program, has_loss, recording = export_model(
            meta_copy,
            batch,
            outputs=outputs,
            training=training,
            whole=whole,
            call=call,
            reads=reads,
            lengths=lengths,
        )
    attributes = {
        str(node.target): attrgetter(str(node.target))(program.graph_module)
        for node in program.graph.nodes
        if node.op == "get_attr"
    }
    whole.place(program.graph, attributes)
    graph = clean_graph(program.graph, attributes)
    if not lengths:
        refuse_values(graph)
    keys, _ = split_batch(batch)
    takes = {key: training and gradient for key, gradient in received.items()}
    known = _name_placeholders(program, graph, meta_copy, keys, takes)
    for node in [n for n in graph.nodes if n.op == "placeholder" and not n.users and n.name.startswith("c_")]:
        assert node.name not in known.constants
        graph.erase_node(node)
        known.fakes.pop(node.name)
    copy_written_inputs(graph, known.inputs)
    if training:
        graded = [name for name, fake in known.fakes.items() if fake.requires_grad]
        copy_read_state(graph, known.parameters, graded)
    return Traced(
        num_samples=count_samples(batch),
        graph=graph,
        attributes={k: v for k, v in attributes.items() if any(n.target == k for n in graph.nodes)},
        inputs=known.inputs,
        parameters=known.parameters,
        constants=known.constants,
        fakes=known.fakes,
        has_loss=has_loss,
        output_names=tuple(outputs),
        received=tuple(key for key in keys if key in received),
        drawn=drawn,
        recording=recording,
    )


@dataclass(slots=True)
class _Placeholders:
    """What the placeholders of an export stand for, as in `Traced`."""

    inputs: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    fakes: dict[str, torch.Tensor] = field(default_factory=dict)


def _name_placeholders(
    program: torch.export.ExportedProgram,
    graph: fx.Graph,
    meta_copy: MetaCopy,
    keys: Sequence[str],
    received: Mapping[str, bool],
) -> _Placeholders:
    """Return what each placeholder of the cleaned graph stands for.

    Export lists parameters, buffers, constants, then inputs: of a model with a weight, a table it made while it was
    traced, and a batch of one tensor, p_model_weight, c_lifted_tensor_0, pixel_values. Of each its signature says
    the kind and the name; inputs it leaves unnamed, in the order of the batch's tensors.

    Args:
        keys: of the batch's tensors.
        received: those that other stages make -> whether they take a gradient.

    Raises:
        CaptureError: a placeholder of another kind, or a constant without values.
    """
    found = _Placeholders()
    remaining = iter(keys)
    # Of a tied parameter export keeps one placeholder, under any of its names: all are looked up, the first is used.
    tensors: dict[str, torch.Tensor] = dict(meta_copy.model.named_parameters(remove_duplicate=False))
    tensors.update(meta_copy.model.named_buffers(remove_duplicate=False))
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    exported = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    # a copy of a graph renames what is called like Python's own names (``input``)
    name_of = dict(zip(exported, placeholders, strict=True))
    # the signature lists what each placeholder stands for, user inputs in the order of the batch's tensors:
    #   p_model_embed_weight -> parameter "embed.weight"; ids -> batch key "ids"; c_lifted_0 -> a constant's values
    for spec in program.graph_signature.input_specs:
        name, target = name_of[spec.arg.name], str(spec.target)
        if spec.kind is InputKind.USER_INPUT:
            found.inputs[name] = key = next(remaining)
            found.fakes[name] = placeholders[name].meta["val"]
            assert key not in received or key == name, f"{key} was renamed"
            if received.get(name):
                found.fakes[name] = found.fakes[name].detach().requires_grad_(True)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            own = target.removeprefix(f"{WRAPPED}.")
            found.parameters[name] = meta_copy.first_names[own]
            found.fakes[name] = tensors[own]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            if placeholders[name].users:
                found.constants[name] = _real(program.constants[target], target, placeholders[name])
            found.fakes[name] = placeholders[name].meta["val"]
        else:
            raise CaptureError(
                f"{type(meta_copy.original).__name__} holds an object that no graph has ({spec.kind.name}, "
                f"{target.removeprefix(f'{WRAPPED}.')}: a torch.Generator of its own, for instance); draw from torch's "
                "default generator, or move that part into a module of its own, which then runs as it is"
            )
    return found


def structure_of(graph: fx.Graph) -> tuple[GraphNode, ...]:
    """Return the nodes of a graph as data, for `align`."""
    return tuple(
        GraphNode(
            name=node.name,
            op=node.op,
            target=_target(node),
            inputs=tuple(source.name for source in node.all_input_nodes),
            module=module_path(node),
        )
        for node in graph.nodes
    )


_UNCHANGING: Mapping[str, tuple[Any, Callable[[int], tuple[Any, ...]]]] = {
    str(aten.contiguous.default): (aten.contiguous.default, lambda dims: ()),
    str(aten.slice.Tensor): (aten.slice.Tensor, lambda dims: (0, 0, sys.maxsize)),
    str(aten.expand.default): (aten.expand.default, lambda dims: ([-1] * dims,)),
}
"""Operators that may leave no node where they change nothing: by their name, with what they then take beside a tensor
of so many axes."""


def align(reference: Iterable[GraphNode], traced: Traced) -> Traced:
    """Return ``traced`` with the node names, and with the operators that change nothing, of a reference.

    Copies and expansions that are not needed leave no node (one sample is contiguous where two are not), and names
    count the nodes before; with both put right, graphs of one model differ in static arguments only. Operators that do
    not read each other may have come in another order: a loop over a set of names has one of its own in every process.

    Raises:
        CaptureError: the operators or what they read differ.
    """
    known = tuple(reference)
    try:
        return _walked(known, traced)
    except CaptureError as error:
        try:
            return _walked(known, _in_order_of(known, traced))
        except CaptureError:
            raise error from None


def _walked(known: Sequence[GraphNode], traced: Traced) -> Traced:
    # Both lists are walked in step:
    #     reference  x  view  contiguous  linear_3     names and wiring are taken from here,
    #     traced     x  view              linear_2     operators and their static arguments (sizes) from here.
    # Where they differ and the reference has a copy, one is put in. So is a slice: of everything, as Python leaves it
    # out where it sees that from numbers (positions[:, :77] of 77); where it cannot see that, from symbols, it is left
    # out here. So is an expansion: of positions [1, 77] to one sample, which Python leaves out. Anything else is
    # another structure.
    new = fx.Graph()
    mapping: dict[str, fx.Node] = {}  # of the reference's nodes
    # what each traced node is in the reference, and what each copy that was put in is a copy of: two operators of one
    # kind differ by what they read (a branch in Python that takes another layer at another length)
    known_as: dict[fx.Node, str] = {}
    copy_of: dict[str, str] = {}
    pending = deque(traced.graph.nodes)
    for place, old in enumerate(known):
        # ``x[:, 4:]`` is one slice, or two with the first of everything: then the longer row begins with that
        while (
            pending
            and _is_whole_slice(pending[0])
            and (
                old.target != _target(pending[0])
                or _num_slices(map(_described, pending))
                > _num_slices((n.target, n.name, n.inputs) for n in islice(known, place, None))
            )
        ):
            whole: Any = pending.popleft()
            known_as[whole] = known_as[whole.args[0]]
        node = pending[0] if pending else None
        is_alike = node is not None and (node.op, _target(node)) == (old.op, old.target)
        read = [known_as[source] for source in node.all_input_nodes] if is_alike and node is not None else []
        if is_alike and node is not None and read == [copy_of.get(source, source) for source in old.inputs]:
            pending.popleft()
            # by position, not by name: the traced node reads ``view`` where the reference reads ``contiguous``
            wiring = {own: mapping[s] for own, s in zip(node.all_input_nodes, old.inputs, strict=True)}
            args: Any = fx.map_arg(node.args, wiring.__getitem__)
            kwargs: Any = fx.map_arg(node.kwargs, wiring.__getitem__)
            mapping[old.name] = new.create_node(node.op, node.target, args, kwargs, name=old.name)
            mapping[old.name].meta = dict(node.meta)
            known_as[node] = old.name
        elif old.target in _UNCHANGING and len(old.inputs) == 1:
            source = mapping[old.inputs[0]]
            target, further = _UNCHANGING[old.target]
            args = (source, *further(source.meta["val"].dim()))
            mapping[old.name] = new.create_node("call_function", target, args, {}, name=old.name)
            mapping[old.name].meta = dict(source.meta)
            copy_of[old.name] = copy_of.get(old.inputs[0], old.inputs[0])
        else:
            raise CaptureError(_difference(old, node, traced.num_samples))
    if pending:
        raise CaptureError(_difference(None, pending[0], traced.num_samples))
    return dataclasses.replace(traced, graph=new)


def _in_order_of(known: Sequence[GraphNode], traced: Traced) -> Traced:
    """Return the traced graph with its nodes in the order of a reference, as far as they are known.

    From the outputs backwards what is read by the same node at the same place is the same node, too:

        reference    cos(mul(x, full))  cos(mul(x, sliding))        traced first for "full", then for "sliding"
        traced       cos(mul(x, sliding))  cos(mul(x, full))        moved behind the other

    A write that nobody reads is known by what it reads. A node that the reference has not goes behind its inputs.

    Raises:
        CaptureError: that would let a read and a write of one storage change places, which no edge shows.
    """
    places = {old.name: place for place, old in enumerate(known)}
    at: dict[fx.Node, int] = {}
    outputs = [node for node in traced.graph.nodes if node.op == "output"]
    pairs = list(zip([old for old in known if old.op == "output"], outputs, strict=True))
    while pairs:
        old, node = pairs.pop()
        if node in at:
            continue
        if (old.op, old.target) == (node.op, _target(node)):
            at[node] = places[old.name]
            read = [known[places[name]] for name in old.inputs]
            pairs += zip(read, node.all_input_nodes, strict=False)
        elif old.target in _UNCHANGING and len(old.inputs) == 1:
            pairs.append((known[places[old.inputs[0]]], node))
        elif _target(node) in _UNCHANGING and len(node.all_input_nodes) == 1:
            pairs.append((old, node.all_input_nodes[0]))
    left: dict[tuple[str, tuple[int, ...]], deque[int]] = defaultdict(deque)
    for place in sorted(set(places.values()) - set(at.values())):
        left[known[place].target, tuple(places[name] for name in known[place].inputs)].append(place)
    for node in traced.graph.nodes:
        read_at = tuple(at[source] for source in node.all_input_nodes)
        if node not in at:
            others = left[_target(node), read_at]
            at[node] = others.popleft() if others else 0
        at[node] = max(at[node], *read_at, 0)
    written = written_storages(traced.graph)
    touching = [n for n in traced.graph.nodes if n in written or not written.isdisjoint(n.all_input_nodes)]
    if sorted(touching, key=at.__getitem__) != touching:
        raise CaptureError("what is written into is read in another order")
    # a stable sort: nodes of one place stay in their order
    return dataclasses.replace(traced, graph=copied(sorted(traced.graph.nodes, key=at.__getitem__)))


def _is_whole_slice(node: fx.Node) -> bool:
    source = node.args[0] if node.target is aten.slice.Tensor else None
    return isinstance(source, fx.Node) and has_shape_of(node, source)


def _num_slices(nodes: Iterable[tuple[str, str, Sequence[str]]]) -> int:
    """Return how many slices a row of (target, name, what it reads) begins with, each of the one before."""
    count, last = 0, None
    for target, name, inputs in nodes:
        if target != str(aten.slice.Tensor) or (last is not None and last not in inputs):
            break
        count, last = count + 1, name
    return count


def _described(node: fx.Node) -> tuple[str, str, list[str]]:
    return _target(node), node.name, [source.name for source in node.all_input_nodes]


def _target(node: fx.Node) -> str:
    if node.op == "call_function":
        return str(node.target)
    return node.name if node.op == "placeholder" else ""


def _difference(old: GraphNode | None, new: fx.Node | None, num_samples: int) -> str:
    place = old.module if old is not None else module_path(new) if new is not None else ""
    was = f"{old.name} ({old.target})" if old is not None else "nothing"
    now = f"{new.name} ({new.target})" if new is not None else "nothing"
    if old is not None and new is not None and (new.op, _target(new)) == (old.op, old.target):
        was, now = (f"{name} of {', '.join(read)}" for name, read in (
            (was, old.inputs), (now, [source.name for source in new.all_input_nodes])
        ))  # fmt: skip
    return f"operator {was} in {place or 'the model itself'} is {now} at {num_samples} samples"


def refuse_values(graph: fx.Graph) -> None:
    """Refuse operators whose results have a size, or are numbers, that only values decide.

    Raises:
        Untraceable: names the first.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        place = f"operator {node.target} ({node.name}) at {module_path(node) or 'the model itself'}"
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
                path = module_path(node)
                raise Untraceable(
                    f"{path or 'the model itself'} computes in a transform of torch.func (vmap, grad), which no graph "
                    f"holds; {MOVE_TO_MODULE}",
                    path,
                )
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise Untraceable(
                    f"{place} yields a Python number {TAKEN}; keep it a tensor", module_path(node)
                )
            if isinstance(value, torch.Tensor) and any(not isinstance(size, int) for size in value.shape):
                raise Untraceable(
                    f"{place} makes a tensor of shape {tuple(value.shape)}, which {DEPENDS} (nonzero, boolean "
                    "indexing, unique); use a mask or torch.where so that shapes are known beforehand",
                    module_path(node),
                )


def _real(constant: Any, target: str, node: fx.Node) -> torch.Tensor:
    if not isinstance(constant, torch.Tensor):
        raise CaptureError(f"constant {target} is a {type(constant).__name__}; only tensors can be captured")
    real = getattr(constant, "constant", None) if isinstance(constant, FakeTensor) else constant
    if real is None or real.is_meta:
        path = module_path(next(iter(node.users)))
        raise Untraceable(
            f"{path or 'the model itself'} makes or holds tensor {target.removeprefix(WRAPPED + '.')} whose values are "
            "unknown while tracing; register it as a buffer, or, where forward makes it (as of a gradient that it "
            f"takes itself), {MOVE_TO_MODULE}",
            path,
        )
    return real.detach()


# Copies of what a forward writes.


def copy_written_inputs(graph: fx.Graph, inputs: Collection[str]) -> None:
    """Make forward write into copies of the batch's tensors: ``x -= x.mean()`` of one stage is what all others read.

    The batch itself stays as it is.

    Args:
        inputs: names of the placeholders.
    """
    #     x ─► sub_ ─► linear     becomes     x ─► clone ─► sub_ ─► linear
    #     '──► other                                '──► other
    written = written_storages(graph)
    for node in [n for n in graph.nodes if n.name in inputs and n in written]:
        first = next(user for user in graph.nodes if node in user.all_input_nodes)
        copy = _clone_before(first, node, name=f"{node.name}_written")
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _clone_before(reader: fx.Node, node: fx.Node, *, name: str) -> fx.Node:
    with reader.graph.inserting_before(reader):
        copy = reader.graph.create_node("call_function", aten.clone.default, (node,), name=name)
    copy.meta = {"val": node.meta["val"].clone(), "nn_module_stack": reader.meta.get("nn_module_stack")}
    return copy


def copy_read_state(graph: fx.Graph, parameters: Collection[str], takes_gradient: Collection[str]) -> None:
    """Make autograd save a copy of a tensor that forward has written: the next forward writes it again.

    In one process the backward has come by then; in a pipeline the next micro-batch's forward may be first.

    Args:
        parameters: names of the placeholders of parameters and buffers; ``takes_gradient``: of those, and of what is
            received, which take a gradient.
    """
    #     scale ─► clamp_ ─► mul ─► loss     becomes     scale ─► clamp_ ─► clone ─► mul ─► loss
    writers = {node: found for node in graph.nodes if (found := written_arguments(node))}
    roots = _roots([node for found in writers.values() for node in found], parameters)
    if not roots:
        return
    order = {node: place for place, node in enumerate(graph.nodes)}
    graded = {node for node in graph.nodes if node.name in takes_gradient}
    for node in graph.nodes:
        if node.target is not aten.detach.default and not graded.isdisjoint(node.all_input_nodes):
            graded.add(node)
    for root in roots:
        alike = _views_of(root)
        last = max(order[writer] for writer, found in writers.items() if not alike.isdisjoint(found))
        for part in alike:
            readers = [
                user
                for user in part.users
                if user in graded and user.op == "call_function" and user not in alike
                if order[user] > last and part not in writers.get(user, ())
            ]
            if not readers:
                continue
            copy = _clone_before(min(readers, key=order.__getitem__), part, name=f"{part.name}_read")
            for reader in readers:
                reader.replace_input_with(part, copy)


def _roots(written: Iterable[fx.Node], parameters: Collection[str]) -> list[fx.Node]:
    """Return the placeholders of parameters that these nodes are, or are views of."""
    found: dict[fx.Node, None] = {}
    for node in written:
        while node.op == "call_function" and _returns_first(node):
            source: Any = node.args[0]
            node = source
        if node.op == "placeholder" and node.name in parameters:
            found[node] = None
    return list(found)


def _views_of(root: fx.Node) -> set[fx.Node]:
    """Return a tensor, its views, and what operators in place return of them."""
    found, pending = {root}, [root]
    while pending:
        node = pending.pop()
        views = [u for u in node.users if u not in found and _returns_first(u) and u.args[0] is node]
        found.update(views)
        pending += views
    return found


def _returns_first(node: fx.Node) -> bool:
    has_operand = bool(node.args) and isinstance(node.args[0], fx.Node)
    return has_operand and hasattr(node.target, "_schema") and may_alias(node)
