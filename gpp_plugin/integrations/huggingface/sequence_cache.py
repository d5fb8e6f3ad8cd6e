"""A cache layer that holds its part of the sequences of all data-parallel ranks, and the attention that reads it.

The model's own attention calls `update` with the new keys and values, and then the attention function by its name:

    prompt    its own keys and values are all there: attention is computed at once, on the sequence's rank; then each
              position is sent to its owner
    token     q goes to all ranks, k and v to the owner; each rank attends over what it holds; (o, max, sum) come back
              and are merged

Source: Cache Parallelism (thesis, chapter 4), section 4.4; FlashDecode's merge
Tests: tests/model/test_cut_cache.py, tests/integrations/test_generation.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.huggingface.generate_calls import cache_layers
from gpp_plugin.model.generation.cache_peers import CachePeers
from gpp_plugin.model.generation.stage_tensors import StageTensor

NAME = "gpp_sequence"


class SequenceLayer(DynamicLayer):
    """The cache of one layer on one rank: some positions of the sequences of all its stage's ranks.

    ``keys`` and ``values`` are [sequences of all ranks, heads, places, head size], in the order of ranks, copies left
    out; ``visible`` says which places hold a token that is attended to.

    Args:
        peers: the ranks that share it.
    """

    keys: Any
    values: Any

    def __init__(self, peers: CachePeers) -> None:
        super().__init__()
        self._peers = peers
        self._length = 0
        self.visible = torch.empty(0, dtype=torch.bool)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take note of new positions; the attention that follows stores them. Elsewhere they are shapes."""
        if isinstance(key_states, StageTensor):
            updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return updated
        self.is_initialized = True
        self._length += key_states.shape[-2]
        key_states.sequence_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return how long the sequences are by now, wherever they lie."""
        return self._length or int(super().get_seq_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequences continue from others of the same prompt."""
        if isinstance(self.keys, StageTensor):
            super().reorder_cache(beam_idx)
            return
        rows = beam_idx.numel()
        offsets = torch.arange(self._peers.number, device=beam_idx.device)[:, None] * rows
        order = (self._peers.gathered(beam_idx) + offsets).reshape(-1)[: self._peers.cached_rows(rows)]
        self.keys, self.values = self.keys.index_select(0, order), self.values.index_select(0, order)
        self.visible = self.visible.index_select(0, order)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return the attention of one new token of each sequence, [sequences, heads, 1, head size]."""
        # Two ranks, two prompts each, one new position; rank 0 owns it in prompts 0 and 2, rank 1 in prompts 1 and 3:
        #
        #     rank 0 sends to 1     q of 0 1, k v of 1       keeps k v of 0
        #     rank 1 sends to 0     q of 2 3, k v of 2       keeps k v of 3
        #     both compute          q of 0 1 2 3 over what they hold, and send back the results of the other's two
        peers, rows = self._peers, query.shape[0]
        position = torch.tensor([self._length - 1], device=query.device)
        owners = peers.owners(position, rows)[..., 0]
        own = owners[peers.position]
        real = (owners >= 0).sum(1).tolist()  # sequences of each rank that are no copies
        query_rows = query[: real[peers.position]].reshape(-1)
        parts = [
            torch.cat([query_rows, key[own == rank].reshape(-1), value[own == rank].reshape(-1)])
            for rank in range(peers.number)
        ]
        mine = (owners == peers.position).sum(1).tolist()
        one, each = query[0].numel(), key[0].numel()
        arrived = peers.swap(parts, [n * one + 2 * count * each for n, count in zip(real, mine, strict=True)])
        # what comes from a rank: its queries, then the keys and the values of which this rank is the owner
        cut = [part.split([n * one, part.numel() - n * one]) for part, n in zip(arrived, real, strict=True)]
        queries = torch.cat([query_rows for query_rows, _ in cut]).view(-1, *query.shape[1:])
        new = [kv.view(2, count, *key.shape[1:]) for (_, kv), count in zip(cut, mine, strict=True)]
        self._grow(key, peers.cached_rows(rows))
        held = (owners.reshape(-1) == peers.position).nonzero()[:, 0]
        slot = int(peers.slots(position))
        self.keys[held, :, slot] = torch.cat([pair[0] for pair in new])[:, :, 0]
        self.values[held, :, slot] = torch.cat([pair[1] for pair in new])[:, :, 0]
        self.visible[held, slot] = True
        partial = partial_attention(queries, self.keys, self.values, self.visible, scaling)
        originals = peers.originals(rows)
        return self._merged([each[originals] for each in partial], query)

    def _merged(self, partial: Sequence[Tensor], query: Tensor) -> Tensor:
        """Return this rank's sequences' attention from the parts that all ranks computed of it."""
        peers, rows = self._peers, query.shape[0]
        out, most, total = partial
        # o in the model's type, max and sum in float32: bytes of all three behind each other
        parts = [
            torch.cat(
                [_bytes(t[rank * rows : (rank + 1) * rows]) for t in (out.to(query.dtype), most, total)]
            )
            for rank in range(peers.number)
        ]
        arrived = peers.swap(parts, [part.numel() for part in parts])
        size, small = query.nbytes, most[:rows].numel() * 4
        outs = torch.stack([part[:size].clone().view(query.dtype).view(query.shape) for part in arrived])
        most, total = (
            torch.stack(
                [part[at : at + small].clone().view(torch.float32).view(rows, -1, 1, 1) for part in arrived]
            )
            for at in (size, size + small)
        )
        return merge_partial(outs, most, total).to(query.dtype)

    def store_prompt(self, key: Tensor, value: Tensor, mask: Tensor) -> None:
        """Send each position of the prompts to the rank that owns it, and keep what is this rank's."""
        # [rows of all ranks, positions] -> owner; what each rank sends is in the order of its rows and, of a row, of
        # positions, so that the receiver, which computes the same owners, needs no numbers with it.
        peers, (rows, heads, length, size) = self._peers, key.shape
        positions = torch.arange(length, device=key.device)
        owners = peers.owners(positions, rows)
        is_visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        seen = is_visible[:, 0, -1, :length].expand(rows, length)
        # [rows, length, elements]: what a position is, and whether it is attended to
        wide = torch.cat(
            [key.transpose(1, 2).flatten(2), value.transpose(1, 2).flatten(2), seen[..., None].to(key.dtype)],
            -1,
        )
        parts = [wide[owners[peers.position] == rank].reshape(-1) for rank in range(peers.number)]
        arrived = peers.swap(parts, [int((of == peers.position).sum()) * wide.shape[-1] for of in owners])
        self._grow(key, peers.cached_rows(rows))
        row, place = (owners.reshape(-1, length) == peers.position).nonzero(as_tuple=True)
        new = torch.cat(arrived).view(-1, wide.shape[-1])
        at = peers.slots(place)
        self.keys[row, :, at] = new[:, : heads * size].reshape(-1, heads, size)
        self.values[row, :, at] = new[:, heads * size : -1].reshape(-1, heads, value.shape[-1])
        self.visible[row, at] = new[:, -1] > 0

    def _grow(self, like: Tensor, rows: int) -> None:
        """Allocate memory for sequences of their present length."""
        capacity = self._peers.capacity(self._length)
        if self.keys is None:
            shape = (rows, like.shape[1], 0, like.shape[3])
            self.keys, self.values = like.new_empty(shape), like.new_empty(shape)
            self.visible = torch.empty((rows, 0), dtype=torch.bool, device=like.device)
        more = capacity - self.keys.shape[2]
        if more > 0:
            self.keys, self.values = (nn.functional.pad(t, (0, 0, 0, more)) for t in (self.keys, self.values))
            self.visible = nn.functional.pad(self.visible, (0, more))


def grows_by_joining(layer: Any) -> bool:
    """Return whether all that a layer does elsewhere than with its values is to put new positions behind the others."""
    return type(layer) in (DynamicLayer, SequenceLayer)


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention over some positions: its result, the largest score, and the sum of exponentials below it.

    Args:
        query: [rows, heads, 1, size]; ``key``, ``value``: [rows, key-value heads, places, size].
        visible: [rows, places].

    Returns:
        [rows, heads, 1, size] and twice [rows, heads, 1, 1], float32; of a row that sees none of its places zeros,
        and minus infinity for the largest score.
    """
    rows, heads = query.shape[:2]
    # the queries of a key-value head together
    grouped = query.float().view(rows, key.shape[1], -1, query.shape[-1])
    scores = grouped @ key.float().transpose(2, 3) * scaling
    # of a row that sees none of these places the largest score is minus infinity, and so this part's weight is zero
    scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
    most = (
        scores.amax(-1, keepdim=True)
        if scores.shape[-1]
        else scores.new_full((*scores.shape[:3], 1), -torch.inf)
    )
    weights = (scores - most.nan_to_num(neginf=0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights @ value.float()) / total.clamp_min(torch.finfo(torch.float32).tiny)
    return out.view(rows, heads, 1, -1), most.view(rows, heads, 1, 1), total.view(rows, heads, 1, 1)


def merge_partial(outs: Tensor, most: Tensor, total: Tensor) -> Tensor:
    """Return attention over all positions from that over parts of them, which are along the first axis.

    >>> one = torch.ones(2, 1, 1, 1, 1)
    >>> merge_partial(torch.tensor([2.0, 4.0]).view_as(one), 0 * one, one).item()
    3.0
    """
    # parts are softmax-weighted means, each with the sum of its own exponentials: as if all had the same largest score
    weights = (most - most.amax(0, keepdim=True)).exp() * total
    return (weights * outs.float()).sum(0) / weights.sum(0)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as HuggingFace's attention functions do, over a cache that several ranks hold where it is one."""
    # The layer marked the keys in `update`, which the model calls right before. Keys without a mark: attention that is
    # not cached (a vision tower), or another rank's, which are shapes.
    layer: SequenceLayer | None = getattr(key, "sequence_layer", None)
    length = query.shape[2]
    if layer is None or layer.get_seq_length() == length:
        made: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        if layer is not None:
            assert attention_mask is not None, "an additive mask is requested"
            layer.store_prompt(key, value, attention_mask)
        return made
    if length != 1:
        raise ConfigError(
            f'graph_pipeline.generate.cache: "sequence" decodes one token at a time, not {length}; use "data"'
        )
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layer.attend(query, key, value, scaling).transpose(1, 2), None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@contextmanager
def shared_caches(model: Any, peers: CachePeers) -> Iterator[None]:
    """Let a model's caches be cut along the sequence while it generates, in step with the other ranks of its stages.

    Raises:
        ConfigError: in `generate`, where a cache is of another kind.
    """
    # Attention by a name of its own, with masks that are added: HuggingFace would otherwise leave out a causal mask
    # that hides no padding, and with it what is attended to.
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    config = model.config
    before = config._attn_implementation
    prepare = model._prepare_cache_for_generation

    def prepare_cache(
        generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        prepare(generation_config, model_kwargs, *args, **kwargs)
        _cut(model_kwargs.get("past_key_values"), peers)

    def has_unfinished(this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        return peers.any(not this_peer_finished and peers.has_prompts)

    model.__dict__["_prepare_cache_for_generation"] = prepare_cache
    model.__dict__["_has_unfinished_sequences"] = has_unfinished
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        del model.__dict__["_prepare_cache_for_generation"], model.__dict__["_has_unfinished_sequences"]


def _cut(cache: Any, peers: CachePeers) -> None:
    """Replace a cache's layers by such as several ranks hold."""
    layers = [layer for _, layer in cache_layers(cache)]
    other = next((type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer), None)
    if other is not None or not layers or hasattr(cache, "self_attention_cache"):
        found = other or ("a cache for cross-attention" if layers else "no cache")
        raise ConfigError(
            f'graph_pipeline.generate.cache: "sequence" cuts caches that grow by a position a token (DynamicLayer); '
            f'the model has {found}; use "data"'
        )
    cache.layers = [SequenceLayer(peers) for _ in layers]
