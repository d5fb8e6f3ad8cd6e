"""Factories for `StageGraph.stage` that build chunks of megatron-core models on the ranks of a stage.

megatron-core is imported when a stage is built, not before.

    config = TransformerConfig(num_layers=8, hidden_size=512, num_attention_heads=8)
    language = dict(vocab_size=32000, max_sequence_length=1024)
    graph.stage("lower", gpt_stage(config, layers=range(0, 4), post_process=False, **language),
                inputs=["input_ids"], outputs=["hidden"], ranks=[1, 2], tensor=2)
    graph.stage("upper", gpt_stage(config, layers=range(4, 8), pre_process=False, **language),
                inputs={"hidden_states": "hidden", "labels": "labels"}, outputs=["loss"], ranks=[3, 4], tensor=2)

A factory changes a copy of the configuration: the parallel sizes become the stage's, fusing gradient accumulation is
switched off (the stage's engine owns gradients), and on the CPU weights are initialised there. Nothing is put into
Megatron's `parallel_state` but its scratch buffer, which attention and sequence parallelism ask it for.

Source: Megatron-LM (arXiv 1909.08053)
Tests: tests/integrations/test_megatron.py, tests/integrations/test_megatron_training.py
"""

from __future__ import annotations

import copy
import importlib
import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.engine.checkpoints.saved_tensors import cut_shard, join_shards
from gpp_plugin.engine.stage_groups import is_shard
from gpp_plugin.errors import CheckpointError, ConfigError
from gpp_plugin.integrations.megatron import cpu
from gpp_plugin.model.graph.stage_graph import StageContext
from gpp_plugin.runtime.random_streams import restored_streams
from gpp_plugin.runtime.ranks.collectives import finish

# Weights of a chunk from those of a whole model at tensor size 1, and back.
#
# Whole states have megatron-core's names of the whole model (``decoder.layers.5.mlp.linear_fc1.weight``), whatever
# chunk a layer is in. A sharded tensor is cut along ``partition_dim`` into ``tensor * partition_stride`` pieces, of
# which rank t has the pieces t, t + tensor, ...: the stride is 2 where gate and up projection of an MLP lie one behind
# the other in a tensor.

_LAYER = re.compile(r"^((?:decoder\.)?layers\.)(\d+)\.")
_WORDS, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def full_name(module: nn.Module, name: str) -> str:
    """Return the whole model's name of a chunk's parameter or buffer."""
    first: int = getattr(module, "first_layer", 0)
    return _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + first}.", name)


def load_full_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy this rank's shards of a whole model's weights into its chunk.

    Args:
        module: what a factory of `gpp_plugin.integrations.megatron` built.
        state: weights of the whole model at tensor size 1; others than the chunk's are left alone.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """
    context = _context_of(module)
    with torch.no_grad():
        for name, own in _tensors(module):
            whole = state.get(full_name(module, name))
            # A tied output layer is stored once, under the name of the embedding.
            if (
                whole is None
                and name == _OUTPUT
                and getattr(module, "share_embeddings_and_output_weights", False)
            ):
                whole = state.get(_WORDS)
            if whole is None:
                raise CheckpointError(
                    f"stage {context.stage!r}: the whole model's weights have no {full_name(module, name)!r}; name "
                    "them as megatron-core does"
                )
            share = shard_of(whole, own, rank=context.tensor_rank, size=context.tensor_size)
            if share.shape != own.shape:
                raise CheckpointError(
                    f"stage {context.stage!r}: {full_name(module, name)!r} is {tuple(whole.shape)}, a share of "
                    f"{tuple(share.shape)}, and the stage has {tuple(own.shape)}; build both of one config"
                )
            own.copy_(share)


def gather_full_state(module: nn.Module, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return a chunk's weights as a whole model has them, on the CPU; empty but on tensor rank 0.

    Collective over the tensor group.

    Args:
        module: what a factory of `gpp_plugin.integrations.megatron` built; a stage's is ``engine.module.configured``.
        values: other tensors of the parameters' shapes by the chunk's names, such as gradients, in place of weights.
    """
    context = _context_of(module)
    found: dict[str, Tensor] = {}
    for name, own in _tensors(module):
        if values is not None and name not in values:
            continue
        value = (own if values is None else values[name]).detach().contiguous()
        whole = _gather(value, own, context)
        if context.tensor_rank == 0:
            found[full_name(module, name)] = whole.to("cpu", copy=True)
    return found


def shard_of(whole: Tensor, parameter: Tensor, *, rank: int, size: int) -> Tensor:
    """Return the part of ``whole`` that ``rank`` of ``size`` ranks has; all of it where they have duplicates."""
    if size == 1 or not is_shard(parameter):
        return whole
    return cut_shard(whole, rank, size, **_way(parameter))


def _way(parameter: Any) -> dict[str, int]:
    return {"axis": int(parameter.partition_dim), "stride": int(parameter.partition_stride)}


def _context_of(module: nn.Module) -> StageContext:
    context = getattr(module, "context", None)
    if not isinstance(context, StageContext):
        raise TypeError(
            f"{type(module).__name__} is no chunk that gpt_stage or transformer_block_stage built"
        )
    return context


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and saved buffers; Megatron's extra states hold nothing."""
    return [
        (name, value)
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    ]


def _gather(value: Tensor, parameter: Tensor, context: StageContext) -> Tensor:
    if context.tensor_size == 1 or not is_shard(parameter):
        return value
    assert context.tensor_group is not None
    shares = [torch.empty_like(value) for _ in range(context.tensor_size)]
    work = dist.all_gather(shares, value, group=context.tensor_group, async_op=True)
    finish(work, value, group=context.tensor_group, what="a weight that tensor ranks hold in parts")
    return join_shards(shares, **_way(parameter))


State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronStage:
    """A factory of chunks; `gpt_stage` and `transformer_block_stage` make it.

    Args:
        layers: of the model, counted from 0.
        vocab_size: where there is an embedding or an output layer.
        build: makes the module of (the stage's configuration, its process groups, the context).
        full_state: weights of the whole model at tensor size 1, or what returns them; None: random ones.
        seed: of random weights, the same on all of its ranks, and of dropout.
        reads_hidden, makes_hidden: whether it receives, and returns, hidden states in Megatron's layout.
    """

    config: Any
    layers: range
    vocab_size: int | None
    build: Callable[[Any, Any, StageContext], nn.Module]
    full_state: State | Callable[[], State] | None
    seed: int
    reads_hidden: bool
    makes_hidden: bool

    def shards(self, inputs: Sequence[str], outputs: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
        """Return which inputs and outputs are shares of the sequence -> their axis, with sequence parallelism."""
        if not self.config.sequence_parallel:
            return {}, {}
        return (
            {name: 0 for name in inputs if name == "hidden_states" and self.reads_hidden},
            {name: 0 for name in outputs if self.makes_hidden},
        )

    def check(self, stage: str, tensor: int) -> None:
        """Check, before anything is built, that ``tensor`` ranks can share the stage out.

        Raises:
            ConfigError: they cannot; one line that names the stage.
        """
        if self.layers.step != 1 or self.layers.start < 0 or self.layers.stop > self.config.num_layers:
            raise ConfigError(
                f"stage {stage!r}: layers={self.layers} are not consecutive layers of the {self.config.num_layers} in "
                "its config; layers are counted from 0"
            )
        check_sizes(stage, self.config, tensor, vocab_size=self.vocab_size)

    def __call__(self, context: StageContext) -> nn.Module:
        """Build the chunk of this rank.

        Raises:
            ConfigError: megatron-core is not installed, or the stage cannot be shared out.
        """
        require_megatron(context.stage)
        self.check(context.stage, context.tensor_size)
        cpu.install()
        from megatron.core import parallel_state

        # The one global that modules read whatever groups they receive (megatron-core 0.16:
        # ``get_global_memory_buffer`` in linear layers with sequence parallelism); it is scratch space and
        # belongs to no group.
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()
        config = stage_config(self.config, context)
        from gpp_plugin.integrations.megatron.chunks import collect_groups, seed_streams

        # A fork, so that building draws from the chunk's own seed and leaves the process's generators as they
        # were: what a user's program draws next does not depend on which stage a rank builds. All of a
        # stage's ranks use one seed; Megatron's tracked streams differ by tensor rank, so shards differ, and
        # what all hold alike is equal.
        with restored_streams(context.device):
            chunk = f"{self.seed}/{context.stage}/{self.layers.start}"  # no two chunks draw the same layers
            seed_streams(zlib.crc32(chunk.encode()), context)
            module = self.build(config, collect_groups(context), context)
        mark_partial_gradients(module, config)
        if self.full_state is not None:
            load_full_state(module, self.full_state() if callable(self.full_state) else self.full_state)
        return module


# Long by its arguments and what is said of them. Shapes for batch 4, sequence 1024, hidden 512, 32,000 words,
# tensor=2, sequence parallel:
#
#   input_ids, labels, loss_mask   [4, 1024]            [batch, sequence], whole on both ranks
#   hidden_states, in and out      [512, 4, 512]        hidden_SBH, half the sequence on each rank
#   logits, inside                 [1024, 4, 16000]     [sequence, batch, vocabulary / tensor]
#   logits, returned               [4, 1024, 32000]     whole; the loss is a scalar
def gpt_stage(
    config: Any,
    *,
    vocab_size: int,
    max_sequence_length: int,
    layers: range | None = None,
    pre_process: bool = True,
    post_process: bool = True,
    spec: Any = None,
    merge: Mapping[str, int] | None = None,
    with_logits: bool = False,
    full_state: State | Callable[[], State] | None = None,
    seed: int = 1234,
    **options: Any,
) -> MegatronStage:
    """Return a factory of a `GPTModel` chunk.

    The module is called with ``input_ids`` (and ``position_ids``, by default counting up) if it has the embedding,
    with ``hidden_states`` otherwise, and with ``labels`` (and ``loss_mask``) if it has the output layer; labels are
    shifted already. It returns hidden states [sequence, batch, hidden], the mean loss of the samples it received, or
    whole logits [batch, sequence, vocabulary] where there are no labels. An ``attention_mask``
    [batch, sequence], 0 at padding, or Megatron's own may be an input of the local specification.

    Args:
        config: a `TransformerConfig` of the whole model; its ``tensor_model_parallel_size`` may stay 1, but
            ``sequence_parallel`` wants the stage's. With it, hidden states are shares of the sequence.
        layers: of this chunk, counted from 0; all by default.
        pre_process, post_process: whether it has the embedding, and the final norm and output layer.
        spec: a layer's `ModuleSpec` or all layers' `TransformerBlockSubmodules`; megatron-core's local one by default.
        merge: input name -> token: embeddings [batch, positions, hidden] by which a chunk with the embedding
            replaces that token's, position by position (images, sounds).
        with_logits: return (loss, logits) where there are labels.
        full_state: weights of the whole model at tensor size 1, see `load_full_state`, or what returns them.
        seed: of random weights and dropout.
        options: further arguments of `GPTModel`, such as ``position_embedding_type`` or
            ``share_embeddings_and_output_weights`` (chunks of one model then need `StageGraph.tie` between
            ``embedding.word_embeddings.weight`` and ``output_layer.weight``).
    """
    # Modules are imported in `build`, on the ranks of the stage: the script that describes a graph, and the
    # ranks of other stages, need no megatron-core.
    chosen = range(config.num_layers) if layers is None else layers
    merged = dict(merge or {})
    if merged and not pre_process:
        raise ConfigError(
            f"gpt_stage: merge={merged} puts embeddings among tokens and needs pre_process=True"
        )

    def build(stage_config: Any, groups: Any, context: StageContext) -> nn.Module:
        from gpp_plugin.integrations.megatron.chunks import GptChunk, block_submodules

        chunk = GptChunk(
            config=stage_config,
            transformer_layer_spec=block_submodules(stage_config, spec, chosen),
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=groups,
            scatter_embedding_sequence_parallel=not merged,
            **options,
        )
        chunk.describe(context, seed=seed, layers=chosen, takes_mask=spec is None)
        chunk.has_logits = with_logits
        chunk.merge(merged)
        return chunk

    return MegatronStage(
        config=config,
        layers=chosen,
        vocab_size=vocab_size if pre_process or post_process else None,
        build=build,
        full_state=full_state,
        seed=seed,
        reads_hidden=not pre_process,
        makes_hidden=not post_process,
    )


def transformer_block_stage(
    config: Any,
    *,
    layers: range | None = None,
    spec: Any = None,
    final_norm: bool = False,
    is_causal: bool = False,
    batch_first: bool = False,
    full_state: State | Callable[[], State] | None = None,
    seed: int = 1234,
) -> MegatronStage:
    """Return a factory of a `TransformerBlock` chunk, from ``hidden_states`` to hidden states.

    Args:
        config, layers, spec, full_state, seed: see `gpt_stage`.
        final_norm: whether the final layer norm follows the layers.
        is_causal: of the local specification; an ``attention_mask`` input is [batch, sequence], 0 at padding.
        batch_first: take and return [batch, sequence, hidden], whole, instead of Megatron's layout.
    """
    # An encoder's shapes, batch 4, 257 patches, hidden 1024: [4, 257, 1024] with batch_first, else [257, 4,
    # 1024]; with sequence parallelism the sequence must divide among the tensor ranks, so 257 patches want
    # padding or tensor=1. Such a stage has no vocabulary: only heads and the MLP are shared out, which
    # `check_sizes` checks.
    chosen = range(config.num_layers) if layers is None else layers

    def build(stage_config: Any, groups: Any, context: StageContext) -> nn.Module:
        from gpp_plugin.integrations.megatron.chunks import BlockChunk, block_submodules

        chunk = BlockChunk(
            config=stage_config,
            spec=block_submodules(stage_config, spec, chosen, is_causal=is_causal),
            post_process=final_norm,
            pg_collection=groups,
        )
        chunk.describe(context, seed=seed, layers=chosen, takes_mask=spec is None)
        chunk.is_causal, chunk.batch_first = is_causal, batch_first
        return chunk

    return MegatronStage(
        config=config,
        layers=chosen,
        vocab_size=None,
        build=build,
        full_state=full_state,
        seed=seed,
        reads_hidden=not batch_first,
        makes_hidden=not batch_first,
    )


def require_megatron(stage: str) -> None:
    """Import megatron-core, without its warnings about optional packages.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"stage {stage!r} is made of megatron-core's modules and {error.name!r} is not installed; "
            "pip install 'gpp_plugin[megatron]'"
        ) from error


def stage_config(config: Any, context: StageContext) -> Any:
    """Return a copy of a model's `TransformerConfig` for one stage."""
    made = copy.copy(config)
    made.tensor_model_parallel_size = made.expert_tensor_parallel_size = context.tensor_size
    made.sequence_parallel = config.sequence_parallel and context.tensor_size > 1
    made.params_dtype = context.dtype
    made.bf16, made.fp16 = context.dtype == torch.bfloat16, context.dtype == torch.float16
    # Its kernel adds to ``main_grad`` behind autograd's back; gradients of micro-batches
    # are the stage engine's.
    made.gradient_accumulation_fusion = False
    made.masked_softmax_fusion = False  # its kernel takes no mask, and needs CUDA
    if context.device.type == "cpu":
        made.use_cpu_initialization = True
    return made


def mark_partial_gradients(module: nn.Module, config: Any) -> None:
    """Mark the norms of queries and keys: ranks apply them to other heads each, so their gradients are summed.

    Megatron finds them by name when it sums (`finalize_model_grads`); the stage's engine looks at the mark that its
    sequence-parallel parameters have.
    """
    if not config.qk_layernorm:
        return
    for name, parameter in module.named_parameters():
        if "q_layernorm" in name or "k_layernorm" in name:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


def check_sizes(stage: str, config: Any, tensor: int, *, vocab_size: int | None) -> None:
    """Check that ``tensor`` ranks can share out a stage of Megatron modules.

    Args:
        config: the stage's `TransformerConfig`.
        vocab_size: where the stage embeds tokens or yields logits.

    Raises:
        ConfigError: it does not divide heads, query groups, the MLP or the vocabulary, or the configuration requests
            a kind of parallelism that stages do not have.
    """
    configured = config.tensor_model_parallel_size
    if configured not in (1, tensor):
        raise ConfigError(
            f"stage {stage!r}: its config says tensor_model_parallel_size={configured}, the stage has tensor={tensor}; "
            "make them equal, or leave the former at 1"
        )
    # What Megatron's layers cut among tensor ranks. 12 heads on 8 ranks, say: a rank would have one
    # and a half. The model's own asserts come later, on this stage's ranks only,
    # and leave the others waiting in a collective.
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
    # Options that have an effect through Megatron's global state or schedules, which are not there: silently
    # ignored they would train another model than the one configured.
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
