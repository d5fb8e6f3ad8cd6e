"""Owns the ``graph_pipeline`` block of the DeepSpeed JSON: the only reader of user configuration.

A wrong configuration is refused with one line per problem: the key path, the value, the nearest right
name, and what to write instead. A key is accepted with a value other than its default only if this
release does what it says.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpp_plugin.config.block import BLOCK, GraphPipelineConfig
from gpp_plugin.config.contradictions import check_contradictions
from gpp_plugin.config.deepspeed_json import load_deepspeed_json
from gpp_plugin.config.problems import problems_of
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.typed_leaves import show


def read_config(ds_config: Mapping[str, Any] | str | Path) -> GraphPipelineConfig | None:
    """Return the checked ``graph_pipeline`` block, or None where there is none or it is not enabled.

    Args:
        ds_config: the DeepSpeed configuration: a dict, a file name, or base64 text (as its launcher
            passes it).
    Raises:
        ConfigError: one line per problem, among them a top-level key that looks like a mistyped
            ``graph_pipeline``.
    """
    plain = load_deepspeed_json(ds_config)
    # DeepSpeed ignores keys that it does not know: a block called "graphPipeline" would train without
    # a pipeline, and nobody would be told. So keys near the name are refused, also where the right
    # one is there as well.
    mistyped = [
        f"{key}: unknown key, and DeepSpeed would ignore it; did you mean {BLOCK!r}?"
        for key in plain
        if _looks_like_block(key)
    ]
    if mistyped:
        raise ConfigError("\n".join(mistyped))
    if BLOCK not in plain:
        return None
    block = plain[BLOCK]
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"{BLOCK}: {show(block)} is not an object; write {{}} for the defaults or remove the key"
        )
    try:
        config = GraphPipelineConfig.model_validate({str(key): value for key, value in block.items()})
    except ValidationError as error:
        raise ConfigError("\n".join(problems_of(error))) from None
    config = check_contradictions(config)
    return config if config.enabled else None


def _looks_like_block(key: Any) -> bool:
    """Say whether a top-level key other than ``graph_pipeline`` was probably meant to be it."""
    if not isinstance(key, str) or key == BLOCK:
        return False
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower()
    # "pipeline-graph" and "GraphPipeline" have the same words; what is left are typing
    # errors, "grpah_pipeline".
    if sorted(re.split(r"[^a-z0-9]+", words)) == sorted(BLOCK.split("_")):
        return True
    letters = re.sub(r"[^a-z0-9]", "", words)
    return difflib.SequenceMatcher(None, letters, BLOCK.replace("_", "")).ratio() >= 0.8


def check_ranks(config: GraphPipelineConfig, num_ranks: int) -> None:
    """Refuse a block that asks for more ranks than there are.

    Raises:
        ConfigError: a data-parallel degree above the ranks.
    """
    # What no plan could have; whether the rest can be used is the planner's. A rank may hold several stages, so their
    # number is no bound where they share ranks: 8 stages of 2 ranks are two on each of 4 groups of 8 ranks.
    degree = config.data_parallel
    if isinstance(degree, int) and degree > num_ranks:
        raise ConfigError(
            f"{BLOCK}.data_parallel: {degree} ranks is more than the {num_ranks} there are; lower it or start more"
        )
