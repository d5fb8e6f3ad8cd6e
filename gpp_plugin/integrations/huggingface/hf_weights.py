"""HuggingFace's side of weights: initialisers, values its constructors set, names in its checkpoints.

Imports transformers only where a model of it is at hand, so that plain models need none of it. Reads of
transformers' internals are gathered here: ``_init_weights``, ``all_tied_weights_keys``,
``get_model_conversion_mapping``, ``rename_source_key`` (transformers 5.x); one more is in `pretrained_files`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def is_pretrained_model(model: nn.Module) -> bool:
    """Return whether ``model`` is a transformers ``PreTrainedModel``."""
    return is_of_package(model, "transformers", "PreTrainedModel")


def is_of_package(value: object, package: str, kind: str) -> bool:
    """Return whether a package's class named ``kind`` is among an object's, without importing the package.

    A module in `sys.modules` is no help: transformers imports its parts when they are first requested, and where one of
    them is broken (torchvision of another torch) the question itself would fail, for models that have nothing of it.

    >>> is_of_package(torch.nn.Linear(1, 1), "torch", "Module"), is_of_package(1, "transformers", "PreTrainedModel")
    (True, False)
    """
    return any(
        base.__name__ == kind and base.__module__.partition(".")[0] == package for base in type(value).__mro__
    )


# ---- ties ------------------------------------------------------------------------------------------------


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return every parameter and buffer name -> the first name of the same tensor.

    The first name is the one ``named_parameters`` gives. Ties are found by identity and, where copies to the
    meta device have lost it, by HuggingFace's ``all_tied_weights_keys``.
    """
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            names[name] = first.setdefault(id(tensor), name)
    # A copy to the meta device makes two tensors of one: GPT-2's lm_head.weight and wte.weight. Of a declared
    # tie the name that comes first in the model is the home of both, as `named_parameters` would have it.
    order = {name: i for i, name in enumerate(names)}
    for target, source in declared_ties(model).items():
        if target in names and source in names and names[target] != names[source]:
            canonical, dropped = sorted((names[target], names[source]), key=order.__getitem__)
            names = {name: canonical if home == dropped else home for name, home in names.items()}
    return names


def declared_ties(model: nn.Module) -> dict[str, str]:
    """Return tied name -> the name HuggingFace saves and initialises it under; empty for other models."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {}) if is_pretrained_model(model) else {}


def saved_names(model: nn.Module) -> dict[str, str]:
    """Return first name -> name in saved files: the source of a declared tie, else the first name."""
    names = tied_names(model)
    saved = {first: first for first in names.values()}
    sources = set(declared_ties(model).values())
    for name, first in names.items():
        if name in sources and saved[first] not in sources:
            saved[first] = name
    return saved


# ---- initialisers ----------------------------------------------------------------------------------------


def initialisers(model: nn.Module, name: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (what, call) for every initialiser that may set parameter ``name``, in the order they apply.

    A module's children are initialised before it and it may set theirs again, so these are the initialisers of
    the owner and of its ancestors, innermost first. In a ``PreTrainedModel`` each module is initialised by the
    ``_init_weights`` of the innermost ``PreTrainedModel`` around it; elsewhere by its ``reset_parameters`` or
    ``_reset_parameters``, where it has one.
    """
    path: list[tuple[str, nn.Module]] = [("", model)]
    for part in name.split(".")[:-1]:
        prefix, module = path[-1]
        path.append((f"{prefix}.{part}" if prefix else part, module.get_submodule(part)))
    # For "text_model.layers.0.fc1.bias", innermost first: fc1, layers.0, layers,
    # text_model, the model itself.
    for depth in range(len(path) - 1, -1, -1):
        prefix, module = path[depth]
        home = next((m for _, m in reversed(path[: depth + 1]) if is_pretrained_model(m)), None)
        what = f"{prefix or 'the model'} ({type(module).__name__})"
        if home is not None:
            initialise: Any = home
            yield f"_init_weights of {what}", lambda h=initialise, m=module: h._init_weights(m)  # type: ignore[misc]
            continue
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            yield f"{reset.__name__} of {what}", reset


class _EmptyOnMeta(TorchFunctionMode):
    """Puts what ``torch.empty`` makes on the meta device and leaves tensors with values where they are."""

    _FACTORIES = frozenset({torch.empty, torch.empty_strided})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._FACTORIES:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def rebuild_constants(model: nn.Module) -> nn.Module | None:
    """Return the model constructed anew with real tensors only where its constructor gives values.

    Tables (position ids, rotary frequencies) and explicit values (CLIP's ``logit_scale``) are real; weights
    that wait for an initialiser stay on the meta device. None where the model is not built from a config.
    """
    if not is_pretrained_model(model):
        return None
    from transformers.initialization import no_init_weights

    build: Any = type(model)
    with _EmptyOnMeta(), no_init_weights():
        try:
            return build(copy.deepcopy(model.config))
        except Exception as error:  # constructors of custom models may do anything
            logger.warning("%s cannot be rebuilt from its config: %s", type(model).__name__, error)
            return None


# ---- names in checkpoints --------------------------------------------------------------------------------


def checkpoint_keys(model: nn.Module, keys: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Match checkpoint keys to the model's names as ``from_pretrained`` does.

    Returns:
        model name -> key for plain renames, and model name (or pattern) -> key where HuggingFace converts
        tensors on loading (splits, merges), which a lazy read of single tensors cannot do.
    """
    keys = list(keys)
    if not is_pretrained_model(model):
        return {key: key for key in keys}, {}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    expected = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    transforms: Sequence[Any] = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    plain: dict[str, str] = {}
    converted: dict[str, str] = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
        (plain if pattern is None else converted)[name] = key
    return plain, converted
