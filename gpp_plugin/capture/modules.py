"""What the module tree says about layers: which containers hold repeated layers."""

from __future__ import annotations

from collections import Counter

from torch import nn


def find_layer_lists(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of containers whose children are layers, outer ones before inner ones.

    Module lists and dicts always are; a sequential is one if two of its children with parameters are of
    one class. A list of unlike modules that hold layer lists themselves (towers) only groups them.
    """
    found = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            found.append(path)
        elif isinstance(module, nn.Sequential):
            classes = Counter(type(c) for c in module.children() if any(True for _ in c.parameters()))
            if classes and max(classes.values()) > 1:
                found.append(path)
    kept = []
    for path in found:
        children = list(model.get_submodule(path).children())
        prefix = f"{path}." if path else ""
        inner = any(other != path and other.startswith(prefix) for other in found)
        is_namespace = inner and len(children) > 1 and len({type(c) for c in children}) == len(children)
        if not is_namespace:
            kept.append(path)
    return tuple(kept)
