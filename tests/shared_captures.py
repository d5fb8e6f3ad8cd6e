"""Captures of equal models, made once by ranks that live on: a hundred jobs capture the same few small models.

What is captured depends on all that a model has but the values of its weights, on the batch and on the options. All of it
is the key, as pickled bytes: of a parameter or buffer the shape, type and place among the others, of other tensors the
numbers. What cannot be pickled is captured anew each time. So is what is kept of the model itself: modules that run as they
are, state that a forward leaves behind.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.eager.trial_run import GLOBAL_HOOKS
from gpp_plugin.model.graph import captured_part

OWN_TESTS = "tests/capture/"
_made: dict[bytes, tuple[list[Any], CapturedGraph]] = {}
"""By key: the forwards that were traced, by whose identity they are told apart, and the capture."""


class _KeyPickler(pickle.Pickler):
    """Writes a model without its weights' values; ``model`` is what is captured."""

    def __init__(self, file: io.BytesIO, model: nn.Module) -> None:
        super().__init__(file)
        held = (*model.parameters(), *model.buffers())
        self._held = {id(tensor): number for number, tensor in enumerate(held)}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, captured_part.CapturedPart):  # asked how it calls the model
            return type(value), value.stage, value._called, value._links is None
        if not isinstance(value, Tensor):
            return None
        facts = (tuple(value.shape), value.stride(), str(value.dtype), str(value.device), value.requires_grad)
        number = self._held.get(id(value))
        if number is not None or value.is_meta:
            return (type(value).__qualname__, number, *facts)
        return (*facts, value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def share_captures() -> None:
    """Let the stages of all engines of this process share what they capture."""
    for name in ("capture_model", "recapture"):
        setattr(captured_part, name, functools.partial(_shared, getattr(captured_part, name)))


def _shared(
    make: Callable[..., CapturedGraph], model: nn.Module, *args: Any, **options: Any
) -> CapturedGraph:
    key, forwards = io.BytesIO(), [type(module).forward for module in model.modules()]
    facts = make.__name__, [*map(id, forwards)], torch.get_default_dtype(), torch.is_grad_enabled()
    is_apart = os.environ.get("PYTEST_CURRENT_TEST", "").startswith(OWN_TESTS) or any(GLOBAL_HOOKS.values())
    try:
        if is_apart or options.get("exported") is not None:
            raise pickle.PicklingError
        _KeyPickler(key, model).dump((facts, model, args, options))
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        return make(model, *args, **options)
    if key.getvalue() in _made:
        return _copied(_made[key.getvalue()][1])
    before = torch.get_rng_state()
    found = make(model, *args, **options)
    if not (found.analysis.eager or found.analysis.carried) and torch.equal(before, torch.get_rng_state()):
        _made[key.getvalue()] = forwards, _copied(found)
    return found


def _copied(captured: CapturedGraph) -> CapturedGraph:
    """Return a capture with constants of its own, which code may write to, and without what is used once."""
    constants = {name: tensor.clone() for name, tensor in captured.constants.items()}
    return dataclasses.replace(captured, constants=constants, trials={})
