"""A graph of stages as the engine's model (`gpp_plugin.stage_graph`)."""

from __future__ import annotations

from torch import nn

from gpp_plugin.config import GraphPipelineConfig
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.model_source import CapturedModel, ModelSource
from gpp_plugin.integrations.preparation import Setting
from gpp_plugin.stage_graph.graph import StageGraph


def source_of(model: nn.Module | StageGraph, *, config: GraphPipelineConfig, setting: Setting) -> ModelSource:
    """Return the engine's view of what the user gave as a model."""
    if isinstance(model, StageGraph):
        raise ConfigError("stage graphs are not trained yet")
    return CapturedModel(model, config=config, setting=setting)
