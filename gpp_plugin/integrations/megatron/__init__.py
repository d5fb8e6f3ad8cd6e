"""megatron-core's modules as stages of a graph; megatron-core is imported when a stage is built, not before."""

from gpp_plugin.integrations.megatron.stages import (
    MegatronStage,
    full_name,
    gather_full_state,
    gpt_stage,
    load_full_state,
    transformer_block_stage,
)

__all__ = [
    "MegatronStage",
    "full_name",
    "gather_full_state",
    "gpt_stage",
    "load_full_state",
    "transformer_block_stage",
]
