"""Puts `gpp_plugin` in front of `deepspeed.initialize`, whichever of the two is imported first.

Only a thin wrapper is set here, around what answers calls; it imports nothing of this package. Another one is set on
accelerate's reading of a configuration, by which HuggingFace builds models and arguments. torch and DeepSpeed are
imported by the call, so that importing a pure layer of gpp_plugin stays cheap. Import paths of earlier releases that
the documents named still load, with a warning.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Dispatch = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Answers a call of `deepspeed.initialize`: given DeepSpeed's own function, positional and keyword arguments."""

Wrap = Callable[[ModuleType], None]

_MARK = "_gpp_plugin_original"

MOVED = {
    "gpp_plugin.capture.attention": "gpp_plugin.capture.mask_values",
    "gpp_plugin.collage.candidates": "gpp_plugin.collage.op_placement",
    "gpp_plugin.collage.registered": "gpp_plugin.collage.op_placement",
    "gpp_plugin.config.batch_sizes": "gpp_plugin.config.reader",
    "gpp_plugin.config.read_config": "gpp_plugin.read_config",
    "gpp_plugin.demo.digits": "gpp_plugin.demo.clip",
    "gpp_plugin.doors": "gpp_plugin.plugins",
    "gpp_plugin.engine.stage_engine": "gpp_plugin.engine.rank_engine",
    "gpp_plugin.extensions": "gpp_plugin.plugins",
    "gpp_plugin.integrations.huggingface.seq2seq_trainer": "gpp_plugin.integrations.trainer.trainer",
    "gpp_plugin.integrations.huggingface.trainer": "gpp_plugin.integrations.trainer.trainer",
    "gpp_plugin.integrations.megatron.stages": "gpp_plugin.integrations.megatron",
    "gpp_plugin.plan.batch_rules": "gpp_plugin.plan.request",
    "gpp_plugin.plan.costs.cache_parallelism": "gpp_plugin.plan.costs.long_context",
    "gpp_plugin.plan.plan_schedules": "gpp_plugin.plan.choose_schedule",
    "gpp_plugin.report.memory_text": "gpp_plugin.report.plan_text",
    "gpp_plugin.runtime.input_rows": "gpp_plugin.runtime.batches",
    "gpp_plugin.runtime.messages.assembly": "gpp_plugin.runtime.messages.mailbox",
    "gpp_plugin.runtime.ranks.agree": "gpp_plugin.runtime.ranks.collectives",
    "gpp_plugin.schedule.checks.validate_windows": "gpp_plugin.schedule.checks.validate_programs",
    "gpp_plugin.schedule.early_reductions": "gpp_plugin.schedule.gathers",
    "gpp_plugin.schedule.placement": "gpp_plugin.schedule.lower",
}
"""What documents of 0.1.0 imported, and where it is now; the old paths go with the next release."""


def register(dispatch: Dispatch) -> None:
    """Let ``dispatch`` answer `deepspeed.initialize` from now on, or as soon as DeepSpeed is imported."""
    wraps: dict[str, Wrap] = {
        "deepspeed": lambda module: wrap_initialize(module, dispatch),
        "accelerate.utils.deepspeed": wrap_stage,
    }
    for (name, wrap), wrapped in zip(wraps.items(), ("initialize", "HfDeepSpeedConfig"), strict=True):
        if hasattr(sys.modules.get(name), wrapped):
            wrap(sys.modules[name])
    if not any(isinstance(finder, _WrappingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WrappingFinder(wraps))
    if _MovedFinder not in sys.meta_path:
        sys.meta_path.append(_MovedFinder)


def wrap_initialize(module: ModuleType, dispatch: Dispatch) -> None:
    """Set the wrapper on a loaded DeepSpeed; does nothing the second time."""
    original = module.initialize
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        return dispatch(original, args, kwargs)

    setattr(initialize, _MARK, original)
    module.initialize = initialize  # type: ignore[attr-defined]


def wrap_stage(module: ModuleType) -> None:
    """Let HuggingFace take a configuration with an enabled block for one without ZeRO; nothing the second time.

    The engine divides a stage's weights itself. So `from_pretrained` builds whole models, and `TrainingArguments` need
    no ``zero_optimization``.
    """
    kind: Any = module.HfDeepSpeedConfig
    original = kind.set_stage_and_offload
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def set_stage_and_offload(self: Any) -> None:
        block = self.config.get("graph_pipeline", False)
        if block is False or (isinstance(block, Mapping) and not block.get("enabled", True)):
            original(self)
            return
        self.config.setdefault("zero_optimization", {"stage": 0})
        self._stage, self._offload = 0, False

    setattr(set_stage_and_offload, _MARK, original)
    kind.set_stage_and_offload = set_stage_and_offload


def original_initialize(module: ModuleType) -> Callable[..., Any]:
    """Return DeepSpeed's own function, whether or not the wrapper is set on it."""
    original: Callable[..., Any] = getattr(module.initialize, _MARK, module.initialize)
    return original


class _WrappingFinder:
    """Finds some modules as Python would, and wraps what they have once they have run.

    It stays in place when it is asked: others look for DeepSpeed without importing it (transformers does).
    It has no base of `importlib.abc`, which is slow to import and adds nothing here.
    """

    def __init__(self, wraps: Mapping[str, Wrap]) -> None:
        self._wraps = wraps
        self._is_looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._wraps or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is None or spec.loader is None:
            return None
        spec.loader = _WrappingLoader(spec.loader, self._wraps[fullname])  # type: ignore[assignment]  # it has what a loader needs
        return spec


class _WrappingLoader:
    def __init__(self, inner: Any, wrap: Wrap) -> None:
        self._inner = inner
        self._wrap = wrap

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._wrap(module)


class _MovedFinder:
    """Loads by its path of an earlier release, and warns; it is its own loader."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, cls) if fullname in MOVED else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        old = module.__name__
        new = MOVED[old]
        warnings.warn(
            f"{old} is now {new}; the old path goes with the next release", FutureWarning, stacklevel=2
        )
        sys.modules[old] = pkgutil.resolve_name(new)
