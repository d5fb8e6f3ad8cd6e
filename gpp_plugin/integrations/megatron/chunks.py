"""Megatron modules as stages of a graph: called ``module(**inputs)``, they return a tensor or a tuple.

Tensors between stages keep Megatron's layout: hidden_SBH [sequence, batch, hidden], with sequence parallelism this
rank's share of the sequence. What comes from the batch or from an encoder has the batch first.

Source: Megatron-LM (arXiv 1909.08053)
Tests: tests/integrations/test_megatron.py, tests/integrations/test_megatron_training.py
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from gpp_plugin.errors import ConfigError
from gpp_plugin.model.graph.stage_graph import StageContext
from gpp_plugin.runtime.random_streams import restored_streams, seed_streams_of
from gpp_plugin.runtime.ranks.collectives import all_reduce, finish

# The process groups of a stage as megatron-core takes them: a `ProcessGroupCollection` laid out by a `HyperCommGrid`.
#
# A stage's ranks are a grid of data x tensor positions, in Megatron's order ("tp-cp-pp-dp") with one position along cp
# and pp: pipelining is the graph's. The grid numbers the stage's positions, so its ranks need not be consecutive; the
# groups of more than one rank are those the stage's context holds, and nothing is put into `parallel_state`.


def collect_groups(context: StageContext) -> Any:
    """Return the `ProcessGroupCollection` of this rank's place; not collective beyond this rank.

    Raises:
        ConfigError: torch.distributed is not initialised; megatron-core nowhere does without.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    if context.tensor_group is None or context.data_group is None or context.single_group is None:
        raise ConfigError(
            f"stage {context.stage!r}: megatron-core's modules need torch.distributed; start ranks with torchrun or "
            "deepspeed (one is enough)"
        )
    _check_grid(context)
    # A stage of 2 tensor x 3 data positions, numbered tensor first: tensor groups (0 1) (2 3) (4 5), data
    # groups (0 2 4) (1 3 5), and everything that this grid has no second position along (cp, pp) is the
    # rank alone. The embedding groups are None: tied weights over stages are the graph's, not Megatron's
    # first and last stage's.
    alone = context.single_group
    tensor, data = context.tensor_group, context.data_group
    return ProcessGroupCollection(
        tp=tensor, cp=alone, pp=alone, dp=data, mp=tensor, tp_cp=tensor, dp_cp=data, embd=None, pos_embd=None
    )


def _check_grid(context: StageContext) -> None:
    from megatron.core.hyper_comm_grid import HyperCommGrid

    grid = HyperCommGrid([context.tensor_size, 1, 1, context.data_size], ["tp", "cp", "pp", "dp"])
    own = context.data_rank * context.tensor_size + context.tensor_rank
    for axis, group, position in (
        ("tp", context.tensor_group, context.tensor_rank),
        ("dp", context.data_group, context.data_rank),
    ):
        (members,) = (ranks for ranks in grid.get_rank_enum(axis) if own in ranks)
        assert len(members) == dist.get_world_size(group) and members.index(own) == position, (
            f"stage {context.stage!r}: its {axis} group is not the one of Megatron's grid: {members}"
        )


# Layer specifications of a chunk: which of the model's layers it has, and what they are made of.


def block_submodules(config: Any, spec: Any, layers: range, *, is_causal: bool = True) -> Any:
    """Return the `TransformerBlockSubmodules` of ``layers`` of the model.

    Args:
        spec: a layer's specification, or all layers' (`TransformerBlockSubmodules`); None: megatron-core's local one.
        layers: consecutive layers, counted from 0; each has its number in the model.
        is_causal: for the local specification; another one says so itself.
    """
    from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules

    final_norm: Any = LayerNormImpl
    if spec is None:
        spec = _local_layer(config, is_causal=is_causal)
        final_norm = spec.submodules.input_layernorm
    if isinstance(spec, TransformerBlockSubmodules):
        every, final_norm = list(spec.layer_specs), spec.layer_norm
    else:
        every = [spec] * config.num_layers
    # Layer specifications by the model's numbers; the chunk of layers 4..7 gets four, whose
    # layers count from 5.
    chosen = [_numbered_from(every[i], layers.start) for i in layers]
    return TransformerBlockSubmodules(layer_specs=chosen, layer_norm=final_norm)


def _local_layer(config: Any, *, is_causal: bool) -> Any:
    """Return megatron-core's local layer, with a norm that supports sequence parallelism where its own does not."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    parts = spec.submodules
    if config.sequence_parallel:
        attention = parts.self_attention.submodules
        for owner in (parts, attention):
            for name, module in list(vars(owner).items()):
                if module is WrappedTorchNorm:
                    setattr(owner, name, SequenceParallelNorm)
    if not is_causal:
        parts.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    return spec


def _numbered_from(spec: Any, first: int) -> Any:
    """Return the specification of a layer that counts ``first`` layers before its chunk's first."""
    from megatron.core.transformer.spec_utils import get_module

    if first == 0:
        return spec
    # Megatron counts layers from 1 and adds the offset of its pipeline rank, which is always the first of one
    # here. Layer numbers scale attention (``apply_query_key_layer_scaling``) and stand in errors, so the
    # class adds the offset itself. It keeps its name and module: checkpoints and specifications look at them.
    base: Any = get_module(spec)

    def __init__(self: Any, *args: Any, layer_number: int = 1, **rest: Any) -> None:
        base.__init__(self, *args, layer_number=layer_number + first, **rest)

    numbered = copy.copy(spec)
    numbered.module = type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})
    return numbered


class SequenceParallelNorm:
    """Makes torch's LayerNorm or RMSNorm as ``config.normalization`` says, with Megatron's mark on its parameters."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        """Return the norm; called as Megatron's specs call a norm's class."""
        make: Any = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm: nn.Module = make(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


# Random streams of a stage's dropout.
#
# Ranks of one tensor group must drop the same elements of what they all hold and different ones of what they share
# out, and ranks of different data positions must differ. Megatron seeds generators once and trusts every rank to draw
# equally often ever after, which a data loader on the CPU's generator breaks. Here every forward of a micro-batch
# seeds its streams from one number that the first rank of its tensor group draws from torch's generator and sends the
# others.
#
# So a forward that is run again (recomputation) drops the same elements: whoever recomputes restores torch's
# generator.

_SEEDS = 1 << 48


class DropoutStreams:
    """Seeds torch's and Megatron's streams for each forward of a stage.

    Args:
        seed: of the stage.
    """

    def __init__(self, seed: int, context: StageContext) -> None:
        self._context = context
        self._place = zlib.crc32(f"{seed}/{context.stage}/{context.data_rank}".encode())

    @contextlib.contextmanager
    def of_forward(self) -> Iterator[None]:
        """Run a forward within; torch's generators are as before afterwards, but for the one number drawn."""
        # One number a forward from torch's CPU generator, inside which recomputation can repeat it:
        #
        #   forward    state A --draw n--> seed n + place --> mask
        #   again      state A --draw n--> the same mask       whoever recomputes has put A back
        #
        # ``place`` is a hash of seed, stage and data position: tensor ranks agree (and hear n from the
        # first of them, whose generator counts), data positions and stages differ even where their
        # generators are equal.
        drawn = torch.empty((), dtype=torch.int64).random_(_SEEDS)
        if self._context.tensor_size > 1:  # on the CPU: no device waits for it
            group = self._context.tensor_group
            work = dist.broadcast(drawn, group=group, group_src=0, async_op=True)
            finish(work, drawn, group=group, what="the seed of dropout")
        with restored_streams(self._context.device):
            seed_streams((int(drawn) + self._place) % _SEEDS, self._context)
            yield


def seed_streams(seed: int, context: StageContext) -> None:
    """Seed torch's generators alike over a tensor group, and Megatron's tracked streams separately."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seed_streams_of(context.device, seed)
    model_parallel_cuda_manual_seed(seed, tp_rank=context.tensor_rank, ep_rank=0, etp_rank=0)


class _Chunk:
    """What both kinds of chunks share: whose they are, their masks and their dropout."""

    config: Any
    training: bool

    def describe(self, context: StageContext, *, seed: int, layers: range, takes_mask: bool) -> None:
        """Say which stage this is, and which layers of the model it has."""
        self.stage = context.stage
        self.first_layer = layers.start
        self.tensor_size = context.tensor_size
        self.context = context
        self.takes_mask = takes_mask
        draws = max(self.config.hidden_dropout, self.config.attention_dropout) > 0.0
        self._streams = DropoutStreams(seed, context) if draws else None
        self._causal: Tensor | None = None

    def random_streams(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a forward draws its dropout."""
        if self._streams is None or not self.training:
            return contextlib.nullcontext()
        return self._streams.of_forward()

    def mask_of(
        self, mask: Tensor | None, *, length: int, device: torch.device, is_causal: bool
    ) -> Tensor | None:
        """Return Megatron's mask, bool [batch or 1, 1, sequence, sequence], True where nothing is attended to.

        Args:
            mask: None, that mask, or one as HuggingFace has it: [batch, sequence], 0 where there is padding.
            length: of the whole sequence.
        """
        if mask is None:
            if not is_causal or not self.takes_mask:
                return None
            return self._causal_mask(length, device)
        if not self.takes_mask:
            raise ConfigError(
                f"stage {self.stage!r}: its layers' specification is not the local one, which an attention_mask "
                "needs; leave the input out (loss_mask or negative labels keep padding out of the loss)"
            )
        if mask.dim() == 4:
            return mask
        # [batch, 1, 1, sequence] and [1, 1, sequence, sequence] to [batch, 1, sequence, sequence], True is
        # hidden. Three tokens, the last one padding: rows are queries, columns keys.
        #
        #   padding  . . x     causal  . x x     together  . x x
        #            . . x             . . x               . . x
        #            . . x             . . .               . . x
        padding = mask[:, None, None, :] == 0
        return padding | self._causal_mask(length, device) if is_causal else padding

    def _causal_mask(self, length: int, device: torch.device) -> Tensor:
        if self._causal is None or self._causal.shape[-1] != length or self._causal.device != device:
            ones = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
            # Stored from call to call: a length seldom changes, and 4096 tokens are 16 MB of bool.
            self._causal = ones.triu(1)
        return self._causal


class GptChunk(_Chunk, GPTModel):
    """Consecutive layers of a `GPTModel`, with the embedding before the first and the output after the last."""

    merged: Mapping[str, int]
    has_logits: bool

    def forward(
        self,
        *,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **embeds: Tensor,
    ) -> Any:
        """Return hidden_SBH; after the output layer the loss, the logits where there are no labels, or both.

        Args:
            input_ids, position_ids: [batch, sequence], of a chunk with the embedding; positions count up by default.
            hidden_states: hidden_SBH, of any other chunk.
            attention_mask: see `_Chunk.mask_of`.
            labels: [batch, sequence], the token each position is to predict (shifted already), negative: no loss.
            loss_mask: [batch, sequence], 0 where a token's loss does not count.
            embeds: [batch, positions, hidden] by name, put in place of tokens, see `gpt_stage`.
        """
        name, first = ("input_ids", input_ids) if self.pre_process else ("hidden_states", hidden_states)
        if first is None:
            raise ConfigError(
                f"stage {self.stage!r}: with pre_process={self.pre_process} it reads {name!r}, which is not among its "
                "inputs; add it to the stage's inputs"
            )
        if set(embeds) != set(self.merged):
            raise ConfigError(
                f"stage {self.stage!r}: it takes the embeddings {sorted(self.merged)} and received {sorted(embeds)}; "
                "name the same in gpt_stage(merge=...) and in the stage's inputs"
            )
        # input_ids are [batch, sequence], hidden states [sequence / shards, batch, hidden]: masks are of
        # whole sequences, 1024 both for ids [4, 1024] and for hidden states [512, 4, 512] of two shards.
        shards = self.tensor_size if self.config.sequence_parallel else 1
        length = first.shape[1] if self.pre_process else first.shape[0] * shards
        mask = self.mask_of(attention_mask, length=length, device=first.device, is_causal=True)
        with self.random_streams():
            # Megatron's pipeline hands a later chunk its input beside the call, as an attribute. It is
            # cleared in any case, or the module would keep the last micro-batch's activations alive.
            decoder_input = self._embed(first, position_ids, embeds) if self.pre_process else None
            self.set_input_tensor(None if self.pre_process else first)
            try:
                found = super().forward(
                    input_ids, position_ids, mask, decoder_input=decoder_input, labels=labels
                )
            finally:
                self.set_input_tensor(None)
        if not self.post_process:
            return found
        if labels is None:
            return gather_from_tensor_model_parallel_region(found, group=self.tp_group)
        per_token, logits = found
        loss = mean_loss(per_token, labels, loss_mask)
        return (loss, logits) if self.has_logits else loss

    def merge(self, merged: Mapping[str, int]) -> None:
        """Say which embeddings are put in place of which tokens.

        Tensor ranks then hold whole embeddings and must drop the same of them, where Megatron, with sequence
        parallelism, has each rank drop what it likes of its share: `_embed` drops instead.
        """
        self.merged = merged
        if merged:
            self.embedding.embedding_dropout = nn.Identity()

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Any:
        """Return the loss of every token, [batch, sequence], and the whole logits where they were requested."""
        logits = logits.transpose(0, 1)
        whole = None
        if self.has_logits:
            whole = gather_from_tensor_model_parallel_region(logits.contiguous(), group=self.tp_group)
        return vocab_parallel_cross_entropy(logits, labels, self.tp_group), whole

    def _embed(self, input_ids: Tensor, position_ids: Tensor | None, embeds: dict[str, Tensor]) -> Tensor:
        """Return embed_SBH of the tokens, with ``embeds`` in the places of their tokens."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        # Images among words, 2 samples of 5 tokens, token 99 stands for an image position, embeds [2
        # samples, 2, hidden]:
        #
        #   input_ids     7 99 99  8  9        places   . x x . .     hidden   w e e w w   w: word's embedding
        #                 7  8 99 99  9                 . . x x .                w w e e w   e: embeds, in order
        #
        # masked_scatter fills places sample by sample from embeds read in the same order, [batch, positions,
        # hidden]. That is right only if every sample has as many places as embeds has positions, which is
        # checked: one place too few in a sample would shift all that follow.
        tokens = input_ids
        for token in self.merged.values():  # any number will do there, if it is in the vocabulary
            tokens = tokens.masked_fill(input_ids == token, 0)
        hidden: Tensor = self.embedding(input_ids=tokens, position_ids=position_ids)
        if self.merged:
            hidden = nn.functional.dropout(hidden, self.config.hidden_dropout, self.training)
        for name, token in self.merged.items():
            places = input_ids == token
            counts = places.sum(dim=1)
            if not bool((counts == embeds[name].shape[1]).all()):
                raise ConfigError(
                    f"stage {self.stage!r}: {name} has {embeds[name].shape[1]} positions a sample, and token {token} "
                    f"is {counts.tolist()} times in the samples of input_ids; make them equal"
                )
            # hidden is [sequence, batch, hidden]; rows, as places, has the batch first.
            rows = hidden.transpose(0, 1).masked_scatter(places.unsqueeze(-1), embeds[name].to(hidden.dtype))
            hidden = rows.transpose(0, 1).contiguous()
        if self.merged and self.config.sequence_parallel:
            # Only now: before, every rank needs the whole sequence, since an image's places may
            # lie in any share of it.
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        return hidden


class BlockChunk(_Chunk, TransformerBlock):
    """Consecutive layers of a `TransformerBlock`, from hidden states to hidden states."""

    is_causal: bool
    batch_first: bool

    def forward(self, *, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return hidden_SBH of hidden_SBH, or with ``batch_first`` hidden_BSH of hidden_BSH, then whole in any case."""
        hidden, is_sharded = hidden_states, self.config.sequence_parallel
        if self.batch_first:
            hidden = hidden.transpose(0, 1).contiguous()
            hidden = (
                scatter_to_sequence_parallel_region(hidden, group=self.tp_group) if is_sharded else hidden
            )
        length = hidden.shape[0] * (self.tensor_size if is_sharded else 1)
        mask = self.mask_of(attention_mask, length=length, device=hidden.device, is_causal=self.is_causal)
        with self.random_streams():
            found: Tensor = super().forward(hidden, mask)
        if not self.batch_first:
            return found
        if is_sharded:
            found = gather_from_sequence_parallel_region(
                found, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return found.transpose(0, 1).contiguous()


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    """Return the loss of every token.

    Args:
        logits: this rank's share of the vocabulary, in order of ranks, [..., vocabulary / ranks].
        target: token numbers of the whole vocabulary, [...]; a negative one counts as none, its loss means nothing.
        group: the ranks that share the vocabulary.
    """
    from megatron.core.tensor_parallel.mappings import (
        reduce_from_tensor_model_parallel_region as sum_of_ranks,
    )

    logits = logits if logits.dtype == torch.float64 else logits.float()
    # With x the logits and m the largest over the whole vocabulary, the loss of target t is log sum
    # exp(x - m) - (x_t - m). 8 words on 2 ranks, target 5: rank 0 has words 0..3, finds own = 5 outside
    # and picks 0; rank 1 has 4..7, own = 1, and picks x_5 - m. So the sum over ranks is the pick, as it
    # is of the exponentials: one reduction for both, stacked as [2, ...]. m is only for range, its
    # gradient cancels: no_grad.
    with torch.no_grad():
        largest = logits.amax(dim=-1)
        if group.size() > 1:
            all_reduce(largest, op=dist.ReduceOp.MAX, group=group, what="the largest logit")
    logits = logits - largest.unsqueeze(-1)
    own = target - group.rank() * logits.shape[-1]
    is_own = (own >= 0) & (own < logits.shape[-1])
    picked = logits.gather(-1, own.where(is_own, 0).unsqueeze(-1)).squeeze(-1).where(is_own, 0.0)
    both = torch.stack([logits.exp().sum(dim=-1), picked])
    total, picked = sum_of_ranks(both, group).unbind(0)
    return total.log() - picked


def mean_loss(per_token: Tensor, labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    """Return the mean over tokens whose label is not negative and that ``loss_mask`` [as labels], if any, keeps."""
    weights = (labels >= 0).to(per_token.dtype)
    if loss_mask is not None:
        weights = weights * loss_mask
    return (per_token * weights).sum() / weights.sum().clamp(min=1.0)
