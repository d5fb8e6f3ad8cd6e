"""The stock `DeepSpeedEngine` behind a stage that trains: how it is made, and what of it is left unused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from gpp_plugin.integrations.learning_rates import OptimizerFactory
from gpp_plugin.integrations.stage_groups import StageMpu
from gpp_plugin.integrations.zero_layout import require_attributes


class _InnerEngine(DeepSpeedEngine):
    """The stock engine, but for its broadcast, which fails on parameters without dimensions."""

    def _broadcast_model(self) -> None:
        """Leave it to the stage, which has already made its replicas equal."""


def make_inner_engine(
    module: nn.Module,
    *,
    optimizer: OptimizerFactory | None,
    parameters: list[Any],
    mpu: StageMpu,
    settings: Mapping[str, Any],
) -> DeepSpeedEngine:
    """Return an engine that builds the optimizer, casts the module and partitions state; nothing else of it is used.

    Args:
        optimizer: makes the optimizer; None: the block in ``settings``.
        parameters: what the optimizer is made from: parameters, or groups of them.
        settings: the stage's DeepSpeed configuration.
    """
    require_attributes(DeepSpeedEngine, "_broadcast_model")
    engine = _InnerEngine(
        args=None,
        model=module,
        optimizer=optimizer,
        model_parameters=parameters,
        mpu=mpu,
        config=settings,
        config_class=DeepSpeedConfig(settings, mpu),
        dont_change_device=True,
    )
    require_attributes(engine, "module_forward_pre_hook", "module_forward_post_hook")
    # Its timers and counters belong to its own forward; the runtime calls the module many times a step.
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    return engine
