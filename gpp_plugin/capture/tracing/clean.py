"""An exported graph: cleaned of what computes nothing, placed on a device, run on fake tensors for shapes and costs.

Source: this project
Tests: tests/runtime/test_float_inputs.py, tests/capture/test_export.py
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.tracing.symbolic_sizes import argument_of, fold_sizes, tensors_in
from gpp_plugin.errors import CaptureError

aten = torch.ops.aten

_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.alias.default, aten.lift_fresh.default}
_FACTORIES = {
    aten.zeros_like.default: aten.zeros.default,
    aten.new_zeros.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.new_ones.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
    aten.new_full.default: aten.full.default,
    aten.empty_like.default: aten.empty.memory_format,
    aten.new_empty.default: aten.empty.memory_format,
}
"""Operators that read only the shape and type of their operand, and those that take them as arguments."""
_UPDATE_STATISTICS = {aten.batch_norm.default: (3, 4, 5), aten.instance_norm.default: (3, 4, 5)}
"""Operators that write their running statistics without saying so: positions of mean, var, switch."""


_SPARSE = ("sparse", "sparse_grad")
"""Arguments that request gradients of the rows that were read alone."""

ADDED = "added"
"""Mark, in ``node.meta``, of operators that a rewritten graph has and the capture has not."""
_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"
_GRAD_ARGUMENTS, _AUTOCAST_ARGUMENTS = 1, 4
"""How many settings stand before the body among the arguments of a region of each kind."""


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose storage ``node`` writes into."""
    if node.target in _UPDATE_STATISTICS:
        mean, var, switch = _UPDATE_STATISTICS[node.target]
        updates = len(node.args) > switch and bool(node.args[switch])
        found = [node.args[i] for i in (mean, var)] if updates else []
        return [a for a in found if isinstance(a, fx.Node)]
    if isinstance(node.target, OpaqueCall):
        arguments: list[Any] = [node.args[i] for i in node.target.observed.written]
        return arguments
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    written: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        fx.map_arg(value, lambda n: written.append(n))
    return written


def clean_graph(graph: fx.Graph, attributes: dict[str, Any]) -> fx.Graph:
    """Return a new graph without regions, runtime checks, dead code and operators that change nothing.

    Constants made in the shape of a tensor no longer read that tensor.

    Sizes that were left open are arguments where they are read (`fold_sizes`).

    Values and gradients stay bitwise the same. Parts of a tuple are named after the tuple, so that
    the names of other nodes do not depend on how many parts there are.

    Args:
        graph: of an exported program; it is destroyed.
        attributes: what its ``get_attr`` nodes refer to.
    """
    # The order matters: a region's body holds checks and casts of its own; dead operators would keep their operands
    # alive for the rules below; and what these rules detach from its operands is dead in turn.
    _inline_regions(graph, attributes)
    for node in list(graph.nodes):
        is_check = node.op == "call_function" and node.target in _CHECKS
        if is_check or node.op == "call_module":
            node.replace_all_uses_with(None)
            graph.erase_node(node)
    _drop_dead(graph, attributes)
    fold_sizes(graph)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _make_dense(node)
            _make_from_shape(node)
            _join_parts(graph, node) or _skip_no_op(graph, node) or _skip_broadcast(graph, node)
    _drop_dead(graph, attributes)
    return _renamed(graph)


def copied(nodes: Iterable[fx.Node]) -> fx.Graph:
    """Return a graph of copies of nodes, in this order: each after those that it reads."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph


def _drop_dead(graph: fx.Graph, attributes: dict[str, Any]) -> None:
    # Backwards, so that what only a dead node read is dead by the time it is looked at: one pass is enough.
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users or _has_effect(node, attributes):
            continue
        graph.erase_node(node)


def _has_effect(node: fx.Node, attributes: dict[str, Any]) -> bool:
    if written_arguments(node):
        return True
    bodies = [attributes.get(str(a.target)) for a in node.all_input_nodes if a.op == "get_attr"]
    return any(
        isinstance(body, fx.GraphModule) and any(written_arguments(inner) for inner in body.graph.nodes)
        for body in bodies
    )


def _skip_no_op(graph: fx.Graph, node: fx.Node) -> bool:
    """Drop a cast to the type and device the tensor already has."""
    if node.target not in _CASTS or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    # Other strides are other memory: a later view of the result could fail on the operand.
    if before.dtype != after.dtype or before.device != after.device or before.stride() != after.stride():
        return False
    if node.kwargs.get("copy") or any(a is True for a in node.args[1:]):
        return False
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    return True


def _make_dense(node: fx.Node) -> None:
    """Make an embedding's gradient dense: the same numbers, where the gradients of a stage are added up."""
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name not in _SPARSE:
            continue
        # only flags: a matrix is called ``sparse`` elsewhere
        if position < len(node.args) and node.args[position] is True:
            node.update_arg(position, False)
        elif node.kwargs.get(argument.name) is True:
            node.update_kwarg(argument.name, False)


def _make_from_shape(node: fx.Node) -> None:
    """Make a constant independent of the tensor whose shape it has."""
    # zeros_like(hidden) [8, 16, 32] becomes zeros([8, 16, 32]): otherwise a mask would be an edge from the tensor to
    # its readers, sent between stages for the sake of its shape.
    value = node.meta.get("val")
    if node.target not in _FACTORIES or not isinstance(value, torch.Tensor):
        return
    fill = {aten.full_like.default: node.args[1:2], aten.new_full.default: node.args[2:3]}.get(
        node.target, ()
    )
    node.target = _FACTORIES[node.target]
    node.args = ([argument_of(size) for size in value.shape], *fill)
    node.kwargs = {"dtype": value.dtype, "device": value.device}


def _skip_broadcast(graph: fx.Graph, node: fx.Node) -> bool:
    """Drop ``broadcast_tensors`` where the part picked already has the common shape."""
    source: Any = node.args[0] if node.args else None
    if node.target is not operator.getitem or source.target is not aten.broadcast_tensors.default:
        return False
    part = source.args[0][node.args[1]]
    if not isinstance(part, fx.Node) or part.meta["val"].shape != node.meta["val"].shape:
        return False
    node.replace_all_uses_with(part)
    graph.erase_node(node)
    return True


def _join_parts(graph: fx.Graph, node: fx.Node) -> bool:
    """Turn ``cat`` of all parts of ``unbind`` into ``flatten``: a list per sample has no fixed length."""
    # Models with images of several crops loop over samples: cat([x[0], x[1], x[2]]) of x [3 samples, 4 crops, 10]
    # takes three getitem nodes at 3 samples and five at 5; flatten(x, 0, 1) [12, 10] is one node at any number.
    if node.target is not aten.cat.default or not isinstance(node.args[0], (list, tuple)):
        return False
    parts: list[Any] = list(node.args[0])
    if not parts or any(not isinstance(p, fx.Node) or p.target is not operator.getitem for p in parts):
        return False
    source: Any = parts[0].args[0]
    is_unbind = isinstance(source, fx.Node) and source.target is aten.unbind.int
    if not is_unbind or any(part.args != (source, i) for i, part in enumerate(parts)):
        return False
    axis = source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", 0)
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    whole = source.args[0]
    if axis != 0 or dim != 0 or whole.meta["val"].shape[0] != len(parts):
        return False
    with graph.inserting_before(node):
        joined = graph.call_function(aten.flatten.using_ints, (whole, 0, 1))
    joined.meta = {**node.meta, "wanted_name": node.name}
    node.replace_all_uses_with(joined)
    graph.erase_node(node)
    return True


def _renamed(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        name = node.meta.get("wanted_name", node.name)
        # export counts: the parts of ``split`` are getitem, getitem_1, ..., and one more would rename all that follow
        if node.target is operator.getitem:
            source: Any = node.args[0]
            name = f"{mapping[source].name}_part_{node.args[1]}"
        args: Any = fx.map_arg(node.args, lambda n: mapping[n])
        kwargs: Any = fx.map_arg(node.kwargs, lambda n: mapping[n])
        mapping[node] = new.create_node(node.op, node.target, args, kwargs, name=name)
        mapping[node].meta = dict(node.meta)
    return new


def _inline_regions(graph: fx.Graph, attributes: Mapping[str, Any]) -> None:
    """Replace calls of region bodies by the bodies' operators.

    `torch.export` keeps a ``with torch.no_grad()`` region as one operator that calls a body, so that a frozen encoder
    would be one operator and its buffer updates invisible. Inlined, its parameters and activations are detached on the
    way in: nothing inside records a gradient, as in the model, and every operator stays an operator of its module.

    Regions that switch gradients, and regions that switch autocast off (it is off already). A region
    with another region inside, and one that switches autocast on, stays one operator.

    Args:
        attributes: what ``get_attr`` nodes refer to.

    Raises:
        CaptureError: a region that stays one operator updates buffers.
    """
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name not in (_GRAD, _AUTOCAST):
            continue
        first = _GRAD_ARGUMENTS if name == _GRAD else _AUTOCAST_ARGUMENTS
        body = attributes[str(node.args[first].target)]
        inner = [n for n in body.graph.nodes if n.op == "call_function"]
        # A region inside would have to detach what the outer one attaches again; autocast that is on casts operands
        # where no operator says so. Neither is written out; both are rare, and correct as one operator.
        is_nested = any(getattr(n.target, "__name__", "") in (_GRAD, _AUTOCAST) for n in inner)
        switches_on = bool(node.args[0 if name == _GRAD else 2])
        if is_nested or (name == _AUTOCAST and switches_on):
            if any(written_arguments(n) for n in inner):
                raise CaptureError(
                    f"buffers are updated inside a nested no_grad or an autocast region ({node.name}); move "
                    "the region to the caller of the model, or freeze the buffers with eval()"
                )
            continue
        detaches = name == _GRAD and not switches_on
        _inline(graph, node, body.graph, list(node.args[first + 1 :]), detaches=detaches)


def _inline(graph: fx.Graph, node: fx.Node, body: fx.Graph, operands: list[Any], *, detaches: bool) -> None:
    values: dict[fx.Node, Any] = {}
    passed: dict[fx.Node, Any] = {}
    remaining = iter(operands)
    results: Any = ()
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "placeholder":
                value = passed[inner] = next(remaining)
                values[inner] = _detached(graph, value, inner) if detaches else value
            elif inner.op == "output":
                results = inner.args[0]
            else:
                values[inner] = graph.node_copy(inner, values.__getitem__)
    # The call returned a tuple, which ``getitem`` nodes unpacked: these are the bodies' results themselves now.
    for user in list(node.users):
        assert user.target is operator.getitem, f"{node.name} is read by {user.name}, not unpacked"
        result = results[user.args[1]]
        # ``with torch.no_grad(): scale.clamp_(max=4)``: what is read behind it is scale itself, which takes a gradient
        written = _written_operand(result)
        user.replace_all_uses_with(passed[written] if detaches and written in passed else values[result])
        graph.erase_node(user)
    graph.erase_node(node)


def _written_operand(result: fx.Node) -> fx.Node:
    """Return the tensor that operators in place have written into and returned."""
    while result.op == "call_function" and result.args and result.args[0] in written_arguments(result):
        source: Any = result.args[0]
        result = source
    return result


def _detached(graph: fx.Graph, value: Any, inner: fx.Node) -> Any:
    """Detach parameters and activations; inputs and buffers record no gradient anyway."""
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    is_source = isinstance(value, fx.Node) and value.op == "placeholder" and not value.name.startswith("p_")
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or is_source:
        return value
    detached = graph.create_node("call_function", aten.detach.default, (value,), name=f"{value.name}_detach")
    reader = next(iter(inner.users), inner)
    detached.meta = {"val": tensor.detach(), "nn_module_stack": reader.meta.get("nn_module_stack")}
    return detached


def written_storages(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose storage some operator writes into: what they hold depends on when they are read."""
    # Backwards from what is written to what it is a view of, then forwards to all views of that. A view of any kind:
    # operators that may return their operand (reshape, contiguous) count.
    written: set[fx.Node] = set()
    pending = [argument for node in graph.nodes for argument in written_arguments(node)]
    while pending:
        node = pending.pop()
        if node not in written:
            written.add(node)
            pending.extend(node.all_input_nodes if may_alias(node) else ())
    for node in graph.nodes:
        if may_alias(node) and not written.isdisjoint(node.all_input_nodes):
            written.add(node)
    return written


def updates_alone(node: fx.Node) -> bool:
    """Return whether an operator writes into a fresh result that none but it reads from then on, as ``x += y`` does."""
    # x = linear(a, w), n = norm(x), x.add_(y): as good as a new result
    written = written_arguments(node)
    if len(written) != 1 or written[0].op != "call_function" or not may_alias(node):
        return False
    (own,) = written
    maker: Any = own.args[0] if own.target is operator.getitem else own
    is_last = all(user is node or (user < node and not may_alias(user)) for user in own.users)
    return is_last and not may_alias(maker)


def written_for_others(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of `written_storages` but for those that only `updates_alone` writes into."""
    written, writers = written_storages(graph), [node for node in graph.nodes if written_arguments(node)]
    others = {own for node in writers if not updates_alone(node) for own in written_arguments(node)}
    for node in writers:
        if not updates_alone(node):
            continue
        own = {node, *written_arguments(node)}
        own |= {each.args[0] for each in own if each.target is operator.getitem}
        for each in graph.nodes:
            if may_alias(each) and not own.isdisjoint(each.all_input_nodes):
                own.add(each)
        if own.isdisjoint(others):
            written -= own
    return written


def may_alias(node: fx.Node) -> bool:
    """Return whether an operator may return a view of what it takes, or the thing itself."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


# On which device a captured graph computes: every device that is written into it becomes the rank's own.
#
# A graph is captured on one device and its code may run on another of the same type: rank 0 plans on ``cuda:0``, rank 3
# computes on ``cuda:3``. What names a device in a graph is an argument (``arange(8, device=cuda:0)``, a cast), in the
# graph or in a body that it calls, and where a constant lies that the model made while it was traced.


def on_device(value: Any, device: torch.device, *, of_type: str | None = None) -> Any:
    """Return an operator's argument with ``device`` for every device in it that is of its type.

    Args:
        of_type: the type of devices that are replaced; a model may compute something on the CPU on purpose.
    """
    replaced = device.type if of_type is None else of_type

    def change(part: Any) -> Any:
        return device if isinstance(part, torch.device) and part.type == replaced else part

    return tree_map(change, value)


def place_graph(graph: fx.Graph, device: torch.device, *, of_type: str | None = None) -> None:
    """Replace the devices in all arguments of a graph, as `on_device` does."""
    for node in graph.nodes:
        node.args = on_device(node.args, device, of_type=of_type)
        node.kwargs = on_device(node.kwargs, device, of_type=of_type)


def placed_body(body: Any, device: torch.device, *, of_type: str | None = None) -> Any:
    """Return a copy of what a graph calls, with the devices in it, and in bodies inside it, replaced."""
    if not isinstance(body, fx.GraphModule):
        return body
    placed = copy.deepcopy(body)
    for inner in placed.modules():
        if isinstance(inner, fx.GraphModule):
            place_graph(inner.graph, device, of_type=of_type)
            inner.recompile()
    return placed


# Counts floating-point operations of the operators below autograd while they run, on real or fake tensors.

_CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu


class FlopCount(TorchDispatchMode):
    """What was computed since ``flops`` was last set to zero."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        # Three kinds: products, counted by torch's own formulas (2 m n k of an m x k by k x n); attention as the CPU
        # runs it, which torch has no formula for; and all else, one operation an element of the result. Views are free.
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif packet is _CPU_ATTENTION:
            self.flops += sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
        elif not func.is_view:
            first = result[0] if isinstance(result, (tuple, list)) and result else result
            self.flops += first.numel() if isinstance(first, torch.Tensor) else 0
        return result


# What runs of a graph on fake tensors show: shapes, gradient flags, costs, storages, writes.


@dataclass(slots=True, kw_only=True)
class Note:
    """What the interpretation found of one node.

    Args:
        shapes, dtypes: of its tensors (one, or several for an operator that returns a tuple).
        storages: numbers of the storages its tensors lie in.
        reads, writes: storages of its arguments, and those it writes into.
        saved_bytes, keeps, kept_inside_bytes, storage: as of `OpNode`.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    requires_grad: bool
    is_tuple: bool
    storages: frozenset[int]
    reads: frozenset[int]
    writes: frozenset[int]
    flops: float = 0.0
    saved_bytes: int = 0
    keeps: tuple[tuple[str, int], ...] = ()
    kept_inside_bytes: int = 0
    storage: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a node with one tensor."""
        return self.shapes[0]


@dataclass(slots=True)
class _Saved:
    """Bytes saved for backward, each storage charged to the node that first saves it."""

    free: set[int]
    bytes: int = 0
    counts: bool = True
    now: dict[int, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    alive: list[torch.Tensor] = field(default_factory=list)

    def begin(self, *, counts: bool) -> None:
        """Start with the next node, whose bytes count or not."""
        self.bytes = 0
        self.counts = counts
        self.now = {}

    def pack(self, tensor: torch.Tensor) -> None:
        """Charge the storage of a tensor that autograd saves; it is never unpacked."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # the address of torch's own object: the same for all views of one memory
        # Parameters and inputs are there anyway; what several operators keep is in memory once, and charged to the
        # first of them. `alive` holds the tensors so that no later storage gets a freed one's address.
        if self.counts and key not in self.free:
            self.now[key] = storage.nbytes()
            if key not in self.seen:
                self.seen.add(key)
                self.alive.append(tensor)
                self.bytes += storage.nbytes()


class _StorageOwners:
    """Numbers storages in the order in which they appear, and notes the operator that made each."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self.makers: dict[int, str] = {}

    def of(self, value: Any) -> frozenset[int]:
        """Return the numbers of the storages that the tensors of ``value`` lie in."""
        return frozenset(
            self._numbers.setdefault(t.untyped_storage()._cdata, len(self._numbers))
            for t in tensors_in(value)
        )

    def maker_of(self, value: Any, node: str) -> str:
        """Return who made the storage that ``node`` put its result into, "" where it is a new one."""
        other = ""
        for tensor in tensors_in(value):
            maker = self.makers.setdefault(tensor.untyped_storage()._cdata, node)
            other = maker if maker != node else ""
        return other


def annotate(
    graph: fx.Graph,
    mode: FakeTensorMode,
    tensors: Mapping[str, torch.Tensor],
    attributes: Mapping[str, Any],
    *,
    received: Collection[str],
    training: bool,
    unread: Collection[str] = (),
) -> dict[str, Note]:
    """Run ``graph`` on fake tensors and return a note for each placeholder and operator.

    For ``x -> view -> linear(w, b) -> relu`` on x of 4 samples: the view has the storage of x and no FLOPs; linear has
    a new one, 2 * 4 * in * out FLOPs, reads the storages of x, w and b, and saves nothing but what is there anyway (x
    is an input, w a parameter); relu saves its own result, 4 * out * 4 bytes, charged to it.

    Args:
        mode: of the fake tensors.
        tensors: placeholder name -> fake tensor.
        received: placeholders of what other stages make, which is not there anyway.
        training: record gradient flags and what is saved for backward.
        unread: operators that the code of a stage leaves out; they cost nothing.
    """
    tensors = {name: _in_mode(tensor, mode) for name, tensor in tensors.items()}
    values: dict[fx.Node, Any] = {}
    notes: dict[str, Note] = {}
    costs = FlopCount()
    saved = _Saved(free={t.untyped_storage()._cdata for n, t in tensors.items() if n not in received})
    storages = _StorageOwners()
    hooks = saved_tensors_hooks(saved.pack, _no_backward)
    with mode, costs, torch.set_grad_enabled(training), hooks:
        for node in graph.nodes:
            if node.op == "output":
                continue
            # What a node reads and writes is looked up before it runs: an operator in place gives its result the
            # storage of its argument, so that afterwards the two could not be distinguished.
            args = fx.map_arg(node.args, lambda n: values[n])
            reads = storages.of([values[n] for n in node.all_input_nodes])
            writes = storages.of([values[n] for n in written_arguments(node)])
            costs.flops = 0.0
            saved.begin(counts=node.name not in unread)
            if node.op == "placeholder":
                values[node] = tensors[node.name]
            elif node.op == "get_attr":
                values[node] = attributes[str(node.target)]
                continue
            else:
                values[node] = node.target(*args, **fx.map_arg(node.kwargs, lambda n: values[n]))
            note = notes[node.name] = _note(node, values[node], reads, writes, storages.of(values[node]))
            note.requires_grad &= training
            flops = node.target.observed.flops if isinstance(node.target, OpaqueCall) else float(costs.flops)
            note.flops = 0.0 if node.name in unread else flops
            note.saved_bytes = saved.bytes
            if ADDED in node.meta:  # no operator of the capture: its saved tensors count as inside its reader
                continue
            note.storage = storages.maker_of(values[node], node.name)
            # only now: an operator that keeps its own result (relu) is itself the maker of what it keeps
            note.keeps, note.kept_inside_bytes = _by_maker(saved.now, storages.makers)
    # only now: ``logits = full(-inf); logits[:, :n] = found`` gives ``logits``, which is what others read, a gradient
    # that it was made without
    for node, value in values.items():
        if training and node.op == "call_function":
            notes[node.name].requires_grad = any(tensor.requires_grad for tensor in tensors_in(value))
    _forget_dead_ends(graph, notes)
    return notes


def written_placeholders(graph: fx.Graph, notes: Mapping[str, Note]) -> set[str]:
    """Return the placeholders that some operator writes into, through views as well."""
    writes = {storage for note in notes.values() for storage in note.writes}
    placeholders = (node.name for node in graph.nodes if node.op == "placeholder")
    return {name for name in placeholders if not writes.isdisjoint(notes[name].storages)}


def _forget_dead_ends(graph: fx.Graph, notes: Mapping[str, Note]) -> None:
    """Leave gradient flags to what a gradient of the graph's results comes to.

    An encoder whose output is looked up in a codebook (``argmax``) takes gradients that nobody makes: `requires_grad`
    says how a tensor was made, not who reads it, and in stages no gradient would be sent.
    """
    # Backwards from the results. Who reads memory that was written in place need not read the operator that wrote it.
    reached: set[fx.Node] = set()
    memory: set[int] = set()
    for node in reversed(list(graph.nodes)):
        note = notes.get(node.name)
        if node.op == "output":
            reached.update(node.all_input_nodes)
            memory.update(*(notes[source.name].storages for source in node.all_input_nodes))
        elif note is not None and note.requires_grad and (node in reached or note.writes & memory):
            reached.update(node.all_input_nodes)
            memory |= note.reads
        elif note is not None:
            note.requires_grad = False


def _in_mode(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor of this mode: a view of another mode's would have another storage."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    with mode:
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return own.requires_grad_(tensor.requires_grad)


def _no_backward(_: object) -> torch.Tensor:
    raise AssertionError("what is only looked at has no backward")


def _by_maker(saved: Mapping[int, int], makers: Mapping[int, str]) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return the bytes saved of each node's results, and those of no node's."""
    # No node's: what an operator makes for its own backward alone (the mask of dropout, the statistics of a norm).
    keeps: dict[str, int] = {}
    inside = 0
    for key, num_bytes in saved.items():
        if key in makers:
            keeps[makers[key]] = keeps.get(makers[key], 0) + num_bytes
        else:
            inside += num_bytes
    return tuple(keeps.items()), inside


def _note(
    node: fx.Node, value: Any, reads: frozenset[int], writes: frozenset[int], storages: frozenset[int]
) -> Note:
    is_tuple = isinstance(value, (tuple, list))
    tensors = [t for t in value if isinstance(t, torch.Tensor)] if is_tuple else [value]
    shapes = tuple(tuple(t.shape) for t in tensors)
    assert all(type(size) is int for shape in shapes for size in shape), f"{node.name} passed `refuse_values`"
    return Note(
        shapes=shapes,
        dtypes=tuple(t.dtype for t in tensors),
        requires_grad=any(t.requires_grad for t in tensors),
        is_tuple=is_tuple,
        storages=storages,
        reads=reads,
        writes=writes,
    )


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that called ``node``; "" is the user's model itself."""
    # Export calls modules "L['self'].model.encoder.layers.0@2": the wrapper's name, the model's in it, and a number
    # behind @ from a module's second call on. All three go, "" for what no module of the model's called.
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    path = path.removeprefix("L['self']").lstrip(".")
    path = re.sub(r"@\d+", "", path)
    return (
        path.removeprefix("model").removeprefix(".") if path == "model" or path.startswith("model.") else ""
    )
