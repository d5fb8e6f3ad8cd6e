"""Caches cut along the sequence: attention over the parts is attention over the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.integrations.huggingface.sequence_cache import (
    SequenceLayer,
    attention,
    merge_partial,
    partial_attention,
)
from gpp_plugin.model.generation.cache_peers import CachePeers
from gpp_plugin.plan.costs.long_context import cut_cache_bytes, sent_elements
from tests.ranks import run_kept_ranks

KV, SIZE = 2, 8


class Mailbox:
    """What ranks swap, each of them a thread."""

    def __init__(self, number: int) -> None:
        self.barrier = threading.Barrier(number, timeout=30)
        self.parts: dict[int, Sequence[Tensor]] = {}


class ThreadPeers(CachePeers):
    """Ranks of one process."""

    mailbox: Mailbox

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        self.mailbox.parts[self.position] = parts
        self.mailbox.barrier.wait()
        told = [self.mailbox.parts[rank][self.position].clone() for rank in range(self.number)]
        self.mailbox.barrier.wait()
        assert [part.numel() for part in told] == list(sizes), "both sides know what is sent"
        self.sent_bytes += sum(
            p.numel() * p.element_size() for r, p in enumerate(parts) if r != self.position
        )
        return told


def on_ranks(number: int, act: Callable[[int, Mailbox], Any]) -> list[Any]:
    mailbox, answers, problems = Mailbox(number), [None] * number, []

    def run(rank: int) -> None:
        try:
            answers[rank] = act(rank, mailbox)
        except BaseException as error:
            problems.append(error)
            mailbox.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return answers


def states(rows: int, heads: int, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, n, length, SIZE, generator=generator) for n in (heads, KV, KV))
    return q, k, v


def test_parts_of_attention_are_merged_to_the_whole() -> None:
    query, _, _ = states(3, 4, 1, 0)
    _, key, value = states(3, 4, 11, 1)
    visible = torch.rand(3, 11, generator=torch.Generator().manual_seed(2)) < 0.6
    visible[:, 0] = True
    visible[0, 5:] = False  # one row sees nothing of the second part
    cuts = [slice(0, 5), slice(5, 11), slice(11, 11)]
    parts = [partial_attention(query, key[:, :, c], value[:, :, c], visible[:, c], 0.3) for c in cuts]
    merged = merge_partial(*(torch.stack(each) for each in zip(*parts, strict=True)))
    grouped = dict(enable_gqa=True, scale=0.3, attn_mask=visible[:, None, None, :])
    whole = nn.functional.scaled_dot_product_attention(query, key, value, **grouped)
    torch.testing.assert_close(merged, whole)


@pytest.mark.parametrize(
    ("number", "samples", "heads", "block"),
    [(2, 4, 4, 2), (3, 6, 2, 1), (2, 4, 4, 16), (2, 3, 2, 2), (3, 1, 4, 1)],
)
def test_a_cache_on_several_ranks_is_the_whole_cache(
    number: int, samples: int, heads: int, block: int
) -> None:
    """Two prompts a rank of unequal length, two sequences each, decoded and reordered; bytes and rooms as predicted.

    Where there are fewer prompts, the others are copies of the first, and nothing of them is kept.
    """
    prompts, rows, length, steps = 2, 4, 5, 6
    order = torch.tensor([1, 0, 3, 2])  # of each prompt's sequences, one goes on from the other
    module = nn.Module()
    module.num_key_value_groups = heads // KV  # type: ignore[assignment]

    def decode(rank: int, mailbox: Mailbox) -> Any:
        peers = ThreadPeers(
            position=rank, number=number, prompts=prompts, samples=samples, block=block, group=None,
            staging=torch.device("cpu"), timeout_s=1.0,
        )  # fmt: skip
        peers.mailbox = mailbox
        layer = SequenceLayer(peers)
        of_rank = [p if p < samples else 0 for p in range(rank * prompts, (rank + 1) * prompts)]
        hidden = torch.arange(length) < torch.tensor([p % 3 for p in of_rank]).repeat_interleave(2)[:, None]
        mask = torch.zeros(rows, 1, length, length).masked_fill(
            hidden[:, None, None, :] | torch.ones(length, length).triu(1).bool(), torch.finfo().min
        )
        keys, values = torch.empty(rows, KV, 0, SIZE), torch.empty(rows, KV, 0, SIZE)
        sent = []
        for step in range(steps):
            new = [states(2, heads, length if step == 0 else 1, 100 * step + prompt) for prompt in of_rank]
            query, key, value = (torch.cat(each) for each in zip(*new, strict=True))
            keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
            before = peers.sent_bytes
            made, _ = attention(
                module, query, *layer.update(key, value), mask if step == 0 else None, scaling=0.3
            )
            sent.append(peers.sent_bytes - before)
            if step:
                seen = torch.cat([~hidden, torch.ones(rows, step).bool()], 1)[:, None, None, :]
                expected = nn.functional.scaled_dot_product_attention(
                    query, keys, values, attn_mask=seen, enable_gqa=True, scale=0.3
                )
                torch.testing.assert_close(made.transpose(1, 2), expected)
            layer.reorder_cache(order)
            keys, values = keys[order], values[order]
        assert layer.keys is not None and layer.values is not None
        return layer.keys.nbytes + layer.values.nbytes, sent[1:]

    answers = on_ranks(number, decode)
    room = dict(rows=2 * samples, length=length + steps - 1, kv_width=KV * SIZE, itemsize=4)
    assert {held for held, _ in answers} == {cut_cache_bytes(**room, block=block, ranks=number)}
    if samples < number * prompts:
        return
    # over all ranks: one new position of every sequence, of which one rank in ``number`` keeps its own
    for step in range(steps - 1):
        volume = sum(sent[step] for _, sent in answers) / 4
        spread = number * sent_elements(number, number * rows, heads * SIZE, heads, KV * SIZE)
        assert volume == pytest.approx(spread, rel=0.25), "owners of one position are not quite evenly spread"


def swap_on_ranks() -> list[Any]:
    rank = dist.get_rank()
    peers = CachePeers(
        position=rank, number=2, prompts=1, samples=2, block=1, group=dist.new_group(),
        staging=torch.device("cpu"), timeout_s=60.0,
    )  # fmt: skip
    # rank 0 keeps one element and sends three, rank 1 sends two and keeps four
    counts = ((1, 3), (2, 4))
    parts = [
        torch.full((n,), float(10 * rank + to), dtype=torch.float64) for to, n in enumerate(counts[rank])
    ]
    came = peers.swap(parts, [counts[0][rank], counts[1][rank]])
    whole = peers.gathered(torch.tensor([[rank + 0.5]]))
    votes = [peers.any(False), peers.any(rank == 1)]
    return [[part.tolist() for part in came], whole.tolist(), votes, peers.sent_bytes]


def test_ranks_swap_parts_of_unequal_sizes_over_gloo() -> None:
    answers = run_kept_ranks(swap_on_ranks, 2)
    assert [came for came, *_ in answers] == [[[0.0], [10.0] * 2], [[1.0] * 3, [11.0] * 4]]
    for _, whole, votes, _ in answers:
        assert whole == [[[0.5]], [[1.5]]] and votes == [False, True]
    assert [sent for *_, sent in answers] == [3 * 8 + 4, 2 * 8 + 4]
