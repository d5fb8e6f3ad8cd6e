"""Captures of equal models, made once by ranks that live on: a hundred jobs capture the same few small models.

What is captured depends on all that a model has but the values of its weights, on the batch and on the options. All
of it is the key, as pickled bytes: of a parameter the shape, type and place among the others, of other tensors the
numbers too. What cannot be pickled is captured anew each time. So is what is kept of the model itself: modules that
run as they are, state that a forward leaves behind.
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
"""By key: the forwards that were traced, which live on so that none gets the identity of another, and the capture."""


class _KeyPickler(pickle.Pickler):
    """Writes a model without its weights' values; ``model`` is what is captured."""

    def __init__(self, file: io.BytesIO, model: nn.Module) -> None:
        super().__init__(file)
        held = [*model.parameters(), *model.buffers()]
        self._numbers = {id(tensor): number for number, tensor in enumerate(held)}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, captured_part.CapturedPart):  # asked how it calls the model
            return type(value), value.stage, value._called, value._links is None
        if not isinstance(value, Tensor):
            return None
        facts = (
            *(type(value).__qualname__, self._numbers.get(id(value)), tuple(value.shape), value.stride()),
            *(str(value.dtype), str(value.device), value.requires_grad),
        )
        if isinstance(value, nn.Parameter) or value.is_meta:
            return facts
        return (*facts, value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def share_captures() -> None:
    """Let the stages of all engines of this process share what they capture."""
    for name in ("capture_model", "recapture"):
        setattr(captured_part, name, functools.partial(_shared, getattr(captured_part, name)))


def key_of(model: nn.Module, *options: Any) -> bytes | None:
    """Return what is the same for captures that are; None where a capture is not to be shared."""
    if os.environ.get("PYTEST_CURRENT_TEST", "").startswith(OWN_TESTS) or any(GLOBAL_HOOKS.values()):
        return None
    forwards = [id(type(module).forward) for module in model.modules()]  # one may be patched
    key = io.BytesIO()
    try:
        _KeyPickler(key, model).dump(
            (model, forwards, torch.get_default_dtype(), torch.is_grad_enabled(), *options)
        )
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        return None
    return key.getvalue()


def _shared(
    make: Callable[..., CapturedGraph], model: nn.Module, *args: Any, **options: Any
) -> CapturedGraph:
    key = None if options.get("exported") is not None else key_of(model, make.__name__, args, options)
    if key in _made:
        return _copied(_made[key][1])
    before = torch.get_rng_state()
    found = make(model, *args, **options)
    is_of_model = found.analysis.eager or found.analysis.carried
    if key is not None and not is_of_model and torch.equal(before, torch.get_rng_state()):
        _made[key] = [type(module).forward for module in model.modules()], _copied(found)
    return found


def _copied(captured: CapturedGraph) -> CapturedGraph:
    """Return a capture with constants of its own, which code may write to, and without what is used once."""
    constants = {name: tensor.clone() for name, tensor in captured.constants.items()}
    return dataclasses.replace(captured, constants=constants, trials={})
