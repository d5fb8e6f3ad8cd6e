"""Clean an exported graph: no checks, no dead or no-op nodes, names that do not depend on sizes."""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.tracing.symbolic_sizes import argument_of, fold_sizes
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
