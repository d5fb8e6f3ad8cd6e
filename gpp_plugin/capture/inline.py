"""Put the bodies of ``with torch.no_grad()`` regions back into the graph.

`torch.export` keeps such a region as one operator that calls a body, so that a frozen encoder would be one
operator and its buffer updates invisible. Inlined, its parameters and activations are detached on the way
in: nothing inside records a gradient, as in the model, and every operator stays an operator of its module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from gpp_plugin.errors import CaptureError

aten = torch.ops.aten
_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"
_GRAD_ARGUMENTS, _AUTOCAST_ARGUMENTS = 1, 4
"""How many settings stand before the body among the arguments of each."""


def inline_regions(
    graph: fx.Graph, attributes: Mapping[str, Any], has_effect: Callable[[fx.Node], bool]
) -> None:
    """Replace calls of region bodies by the bodies' operators.

    Regions that switch gradients, and regions that switch autocast off (it is off already). A region
    with another region inside, and one that switches autocast on, stays one operator.

    Args:
        attributes: what ``get_attr`` nodes refer to.
        has_effect: whether an operator writes into its arguments.

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
        is_nested = any(getattr(n.target, "__name__", "") in (_GRAD, _AUTOCAST) for n in inner)
        switches_on = bool(node.args[0 if name == _GRAD else 2])
        if is_nested or (name == _AUTOCAST and switches_on):
            if any(has_effect(n) for n in inner):
                raise CaptureError(
                    f"buffers are updated inside a nested no_grad or an autocast region ({node.name}); move "
                    "the region to the caller of the model, or freeze the buffers with eval()"
                )
            continue
        detaches = name == _GRAD and not switches_on
        _inline(graph, node, body.graph, list(node.args[first + 1 :]), detaches=detaches)


def _inline(graph: fx.Graph, node: fx.Node, body: fx.Graph, operands: list[Any], *, detaches: bool) -> None:
    values: dict[fx.Node, Any] = {}
    remaining = iter(operands)
    results: Any = ()
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "placeholder":
                value = next(remaining)
                values[inner] = _detached(graph, value, inner) if detaches else value
            elif inner.op == "output":
                results = inner.args[0]
            else:
                values[inner] = graph.node_copy(inner, values.__getitem__)
    for user in list(node.users):
        assert user.target is operator.getitem, f"{node.name} is read by {user.name}, not taken apart"
        user.replace_all_uses_with(values[results[user.args[1]]])
        graph.erase_node(user)
    graph.erase_node(node)


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
