"""Which modules are kept whole: those that are asked for by path, and those whose tracing fails.

Source: this project
Tests: tests/capture/test_eager.py
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from gpp_plugin.errors import CaptureError, ConfigError

MAX_ATTEMPTS = 12
"""How often a model is traced anew with one more kind of module kept whole."""


MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Tables of a module that hold what users register on it."""
HOOK_OPTIONS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Tables that say how hooks are called."""
GLOBAL_HOOKS: Mapping[str, Any] = {
    name: getattr(nn.modules.module, name)
    for name in (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    )
}
"""Tables of the hooks that torch calls for every module."""
TRACED_HOOKS = ("torch", "transformers", "peft", "accelerate", "deepspeed", "gpp_plugin")
"""Packages whose own hooks compute (weight norms, inputs that take a gradient), which a trace has as operators."""


READS, DEPENDS, TAKEN = (
    "the Python code depends on tensor values",
    "depends on values",
    "taken from a tensor",
)
"""Words that say that values are what an export lacks (`lacks_values`)."""


class Untraceable(CaptureError):
    """Tracing failed inside a module, or a function, which may be kept whole instead.

    Args:
        culprit: its path; "" where that is the whole model.
        lacks_records: it reads a list of dicts, which no values of the batch help with.
        is_of_state: it keeps for the next forward what only Python has.
    """

    def __init__(
        self, message: str, culprit: str, *, lacks_records: bool = False, is_of_state: bool = False
    ) -> None:
        super().__init__(message)
        self.culprit = culprit
        self.lacks_records = lacks_records
        self.is_of_state = is_of_state


def lacks_values(error: CaptureError) -> bool:
    """Return whether a capture failed for want of values."""
    return any(words in str(error) for words in (READS, DEPENDS, TAKEN))


def find_asked(
    model: nn.Module, eager: Iterable[str], *, key: str = "graph_pipeline.eager"
) -> tuple[str, ...]:
    """Return the modules that paths ask for; ``*`` in one stands for any one part of a path.

    A path may end with a function that is an attribute of a module, such as a HuggingFace model's ``loss_function``.

    Raises:
        ConfigError: a path names nothing of the model's.
    """
    modules = dict(model.named_modules())
    found: dict[str, None] = {}
    for wanted in eager:
        pattern = re.compile(re.escape(wanted).replace(r"\*", r"[^.]+"))
        matches = [path for path in modules if path and pattern.fullmatch(path)]
        owner, _, name = wanted.rpartition(".")
        if not matches and owner in modules and callable(getattr(modules[owner], name, None)):
            matches = [wanted]
        if not matches:
            near = difflib.get_close_matches(wanted, [p for p in modules if p], n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{key}: {wanted!r} is no module of {type(model).__name__}{hint}")
        found.update(dict.fromkeys(matches))
    return without_inner(found)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a user has registered hooks on a module, forward or backward: they see what it computes."""
    for hook in [hook for name in MODULE_HOOKS for hook in getattr(module, name).values()]:
        while isinstance(hook, functools.partial):
            hook = hook.func
        origin = str(getattr(hook, "__module__", None) or type(hook).__module__)
        if origin.partition(".")[0] not in TRACED_HOOKS:
            return True
    return False


def hooked_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the modules that run as they are so that their hooks are called; the model itself cannot."""
    return without_inner(path for path, module in model.named_modules() if path and has_hooks(module))


def with_culprit(model: nn.Module, whole: Sequence[str], culprit: str) -> tuple[str, ...] | None:
    """Return what to keep whole after tracing failed in one more module; None where nothing is left to try.

    The modules of its class in its place in the other layers fail as it did: ``layers.0.router`` stands for
    ``layers.*.router``. Where one of its class failed in another place before, all modules of the class do.
    """
    if culprit in whole:
        return None
    if not culprit:
        return ("",)
    modules = dict(model.named_modules())
    alike = [culprit]
    if culprit in modules:
        kind, place = type(modules[culprit]), _place(culprit)
        is_known = any(type(modules.get(path)) is kind for path in whole)
        alike = [
            path
            for path, module in modules.items()
            if type(module) is kind and (is_known or _place(path) == place)
        ]
    return without_inner((*whole, *alike))


def without_inner(paths: Iterable[str]) -> tuple[str, ...]:
    """Return paths once each, without those inside another one."""
    unique = list(dict.fromkeys(paths))
    return tuple(p for p in unique if not any(p != other and is_within(p, other) for other in unique))


def is_within(name: str, path: str) -> bool:
    """Return whether a name is that of a module, or of something in it; all are in the model itself, "".

    >>> is_within("tower.norm.weight", "tower"), is_within("towers.norm", "tower")
    (True, False)
    """
    return path in ("", name) or name.startswith(f"{path}.")


def _place(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
