"""What a tensor-parallel size must divide, checked before anything is built."""

from __future__ import annotations

from typing import Any

from gpp_plugin.errors import ConfigError


def check_sizes(stage: str, config: Any, tensor: int, *, vocab_size: int | None) -> None:
    """Check that ``tensor`` ranks can share out a stage of Megatron modules.

    Args:
        config: the stage's `TransformerConfig`.
        vocab_size: where the stage embeds tokens or yields logits.

    Raises:
        ConfigError: it does not divide heads, query groups, the MLP or the vocabulary, or the configuration asks for
            a kind of parallelism that stages do not have.
    """
    given = config.tensor_model_parallel_size
    if given not in (1, tensor):
        raise ConfigError(
            f"stage {stage!r}: its config says tensor_model_parallel_size={given} and the stage has tensor={tensor}; "
            "make them equal, or leave the former at 1"
        )
    divided = [
        ("num_attention_heads", config.num_attention_heads),
        ("num_query_groups", config.num_query_groups),
        ("ffn_hidden_size", config.ffn_hidden_size),
    ]
    if vocab_size is not None:
        divided.append(("vocab_size", vocab_size))
    for name, size in divided:
        if size % tensor:
            advice = (
                f"pad the vocabulary to {-(-size // tensor) * tensor}"
                if name == "vocab_size"
                else f"change {name}"
            )
            raise ConfigError(
                f"stage {stage!r}: tensor={tensor} does not divide {name}={size}; {advice}, or give the stage another "
                "tensor size"
            )
    _refuse_other_parallelism(stage, config)


def _refuse_other_parallelism(stage: str, config: Any) -> None:
    for name, plain, instead in (
        ("pipeline_model_parallel_size", 1, "give every part of the pipeline a stage of its own"),
        (
            "virtual_pipeline_model_parallel_size",
            None,
            "leave it out: the graph's schedules do not interleave",
        ),
        ("context_parallel_size", 1, "leave it at 1, or shard sequences with sequence_parallel=True"),
        ("num_moe_experts", None, "leave it out: experts have no groups of their own here"),
        ("mtp_num_layers", None, "leave it out: it logs through Megatron's global groups"),
        ("cpu_offloading", False, "leave it out, and let graph_pipeline.memory.swap choose what to offload"),
    ):
        value = getattr(config, name, plain)
        if value != plain and value is not None:
            raise ConfigError(f"stage {stage!r}: {name}={value!r} is not for stages of a graph; {instead}")
