"""From the module tree to the keys blocks are grouped by: layers, parts of layers, top-level components."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from gpp_plugin.ir.block_graph import OpNode

_ATTENTION = ("scaled_dot_product_attention", "softmax", "flex_attention", "bmm")
"""Operators, by name, that only the attention part of a layer has."""
_MATRIX = ("linear", "conv", "matmul", "mm", "bmm", "addmm", "einsum", "embedding")


@dataclass(frozen=True, slots=True)
class Key:
    """Group an operator belongs to; ``is_glue`` where a module holding layers called it itself."""

    path: str
    is_glue: bool = False


def find_layer_lists(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of containers whose children are layers, outer ones before inner ones.

    Module lists and dicts always are; a sequential is one if two of its children with parameters are of
    one class. A list of different modules that hold layer lists themselves (towers) only groups them.
    """
    # First all candidates, then without those that only hold different towers: ModuleDict(vision=ViT, text=GPT) with
    # layer lists in both is a namespace like any module, and so its towers' layers are the layers.
    found = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            found.append(path)
        elif isinstance(module, nn.Sequential):
            classes = Counter(type(c) for c in module.children() if any(True for _ in c.parameters()))
            if classes and max(classes.values()) > 1:
                found.append(path)
    lists = []
    for path in found:
        children = list(model.get_submodule(path).children())
        prefix = f"{path}." if path else ""
        inner = any(other != path and other.startswith(prefix) for other in found)
        is_namespace = inner and len(children) > 1 and len({type(c) for c in children}) == len(children)
        if not is_namespace:
            lists.append(path)
    return tuple(lists)


class ModuleKeys:
    """Keys of module paths, by which containers hold repeated layers."""

    def __init__(self, layer_lists: Sequence[str]) -> None:
        self._lists = frozenset(layer_lists)
        outermost = [p for p in layer_lists if not any(o != p and _is_under(p, o) for o in layer_lists)]
        # Every module on the way to a layer list is a namespace: its own code is glue, its other children are
        # components. Lists vision.layers and text.layers: "", vision and text are; vision.embeddings is a component.
        self._namespaces = {""}
        for path in outermost:
            parts = path.split(".") if path else []
            self._namespaces.update(".".join(parts[:i]) for i in range(len(parts) + 1))

    def layer_key(self, path: str) -> Key:
        """Return the layer, or top-level component, or the module whose own code it is."""
        # vision.layers.3.mlp.fc1 with list vision.layers: the first list on the way ends the key behind its child's
        # number, vision.layers.3. head.dense with namespace "" alone: one component below it, head.
        parts = path.split(".") if path else []
        deepest = 0
        for i in range(len(parts) + 1):
            prefix = ".".join(parts[:i])
            if prefix in self._lists and i < len(parts):
                return Key(".".join(parts[: i + 1]))
            if prefix in self._namespaces:
                deepest = i
        if deepest == len(parts):
            return Key(path, is_glue=True)
        return Key(".".join(parts[: deepest + 1]))

    def is_layer(self, path: str) -> bool:
        """Return whether ``path`` is an element of a layer list."""
        return path.rpartition(".")[0] in self._lists and path != ""

    def child(self, layer: str, path: str) -> str:
        """Return the part of ``layer`` that ``path`` lies in, "" for the layer's own code.

        Elements of a list inside the layer are parts of their own.
        """
        rest = path[len(layer) + 1 :].split(".") if len(path) > len(layer) else []
        depth = 1
        while len(rest) > depth and ".".join([layer, *rest[:depth]]) in self._lists:
            depth += 1
        return ".".join(rest[:depth])


def _is_under(path: str, ancestor: str) -> bool:
    return ancestor == "" or path.startswith(f"{ancestor}.")


def sub_layer_keys(keys: ModuleKeys, nodes: Sequence[OpNode], parameters: set[str]) -> dict[str, Key]:
    """Return the key of each operator when layers are cut into attention and feed-forward parts.

    Children of a layer with matrix products are its parts; those without attention that follow each
    other are one part (``fc1`` and ``fc2``). Norms go with the only part that reads them, else with the
    part before; activations, dropout and residual additions go with the part before.
    """
    # First as for whole layers; then each layer by itself, as what belongs to its parts shows only in its own code.
    result: dict[str, Key] = {}
    layers: dict[str, list[OpNode]] = {}
    for node in nodes:
        key = keys.layer_key(node.module)
        result[node.name] = key
        if not key.is_glue and keys.is_layer(key.path):
            layers.setdefault(key.path, []).append(node)
    for layer, members in layers.items():
        for name, part in _layer_parts(keys, layer, members, parameters).items():
            result[name] = Key(f"{layer}.{part}")
    return result


def _layer_parts(
    keys: ModuleKeys, layer: str, nodes: Sequence[OpNode], parameters: set[str]
) -> dict[str, str]:
    """Return the part of each of a layer's operators; nothing if it has fewer than two parts."""
    child = {node.name: keys.child(layer, node.module) for node in nodes}
    part_of = _matrix_parts(nodes, child)
    if len(set(part_of.values())) < 2:
        return {}
    units = _light_units(nodes, child, part_of)
    placed = {node.name: part_of[child[node.name]] for node in nodes if child[node.name] in part_of}
    by_name = {node.name: node for node in nodes}
    for members in units:
        part = _place(members, by_name, placed, parameters)
        placed.update((name, part) for name in members)
    return placed


def _matrix_parts(nodes: Sequence[OpNode], child: Mapping[str, str]) -> dict[str, str]:
    # ``order``: the layer's children with matrix products, as they run -> whether they hold attention. A GPT-2 layer
    # gives {attn: True, mlp: False}; a Whisper layer, whose fc1 and fc2 are its own, {self_attn: True, fc1: False,
    # fc2: False}, of which fc2 joins fc1: a cut between the two would send the widest tensor of the layer.
    order: dict[str, bool] = {}
    for node in nodes:
        operator = node.target.split(".")[1] if node.target.startswith("aten.") else ""
        is_attention = any(operator.startswith(name) for name in _ATTENTION)
        if child[node.name] and (is_attention or operator.rstrip("123d_").startswith(_MATRIX)):
            order[child[node.name]] = order.get(child[node.name], False) or is_attention
    part_of: dict[str, str] = {}
    previous = ""
    for name, is_attention in order.items():
        is_listed = "." in name or "." in previous  # elements of a list inside the layer stay separate
        joins = previous and not is_attention and not order[previous] and not is_listed
        part_of[name] = part_of[previous] if joins else name
        previous = name
    return part_of


def _light_units(
    nodes: Sequence[OpNode], child: Mapping[str, str], part_of: Mapping[str, str]
) -> list[list[str]]:
    """Return the layer's other operators: a module's run of operators together, own code one by one."""
    units: list[list[str]] = []
    last = ""
    for node in nodes:
        name = child[node.name]
        if name in part_of:
            last = ""
            continue
        if name and name == last:
            units[-1].append(node.name)
        else:
            units.append([node.name])
        last = name
    return units


def _place(
    members: Iterable[str], by_name: Mapping[str, OpNode], placed: Mapping[str, str], parameters: set[str]
) -> str:
    # A norm has parameters and, with residual additions behind the parts, one reader (the part): it moves there with
    # its weights. Anything else stays where its operand is made: sending the operand or the result costs the same.
    own = set(members)
    readers = {n.name for n in by_name.values() if n.name not in own and own & set(n.inputs)}
    before = [s for name in own for s in by_name[name].inputs if s in placed and s not in own]
    order = {name: index for index, name in enumerate(by_name)}
    has_parameters = any(s in parameters for name in own for s in by_name[name].inputs)
    reading = {placed.get(reader) for reader in readers}
    if has_parameters and len(reading) == 1 and None not in reading:
        return str(reading.pop())
    if before:
        return placed[max(before, key=order.__getitem__)]
    following = [r for r in readers if r in placed] or [n for n in placed if n not in own]
    return placed[min(following, key=order.__getitem__)]
