"""Graph pipeline parallelism: trains an unmodified model as a DAG of stages, turned on by the DeepSpeed JSON.

The import makes `deepspeed.initialize` honour a ``graph_pipeline`` block. Public names are imported when
first used, so that ``import gpp_plugin.plan`` stays free of torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpp_plugin.errors import needs_extra
from gpp_plugin.import_hook import register as _register

__version__ = "0.1.0"

_HOME_OF = {
    "GraphPipelineEngine": "gpp_plugin.engine.engine",
    "GraphPipelineModule": "gpp_plugin.integrations.deepspeed.dispatch",
    "GraphPipelineSFTTrainer": "gpp_plugin.integrations.trainer.sft_trainer",
    "GraphPipelineSeq2SeqTrainer": "gpp_plugin.integrations.trainer.trainer",
    "GraphPipelineTrainer": "gpp_plugin.integrations.trainer.trainer",
    "initialize": "gpp_plugin.integrations.deepspeed.dispatch",
    "GraphPipelineConfig": "gpp_plugin.config.block",
    "read_config": "gpp_plugin.config.reader",
    "PipelinePlan": "gpp_plugin.ir.plan",
    "Timeline": "gpp_plugin.ir.timeline",
    "GppError": "gpp_plugin.errors",
    "StageGraph": "gpp_plugin.model.graph.stage_graph",
    "StageContext": "gpp_plugin.model.graph.stage_graph",
    "BasePatternRule": "gpp_plugin.collage.patterns",
    "add_backend": "gpp_plugin.collage.op_placement",
    "add_backend_pattern": "gpp_plugin.collage.op_placement",
    "add_backend_pattern_rule": "gpp_plugin.collage.op_placement",
    "check_path": "gpp_plugin.collage.patterns",
    "is_op": "gpp_plugin.collage.patterns",
    "wildcard": "gpp_plugin.collage.patterns",
}

__all__ = [*sorted(_HOME_OF), "__version__"]


def _dispatch(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return importlib.import_module(_HOME_OF["initialize"]).dispatch(original, args, kwargs)


_register(_dispatch)  # from here on `deepspeed.initialize` honours a `graph_pipeline` block


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'gpp_plugin' has no attribute {name!r}; it has {__all__}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        needed = needs_extra(error)
        if needed is None:
            raise
        raise ModuleNotFoundError(f"gpp_plugin.{name} {needed}", name=error.name) from None
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
