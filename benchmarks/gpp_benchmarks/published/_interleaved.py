"""The interleaved order of Megatron-LM: each rank holds several chunks of the model and takes micro-batches in groups.

Two ranks, two chunks a rank (stages 0 and 2 on rank 0, 1 and 3 on rank 1), four micro-batches, groups of two; a group
goes through all chunks before the next one begins:

    rank 0   0F0 0F1 2F0 2F1  0F2 2B0  0F3 2B1  2F2 0B0  2F3 0B1  2B2 2B3 0B2 0B3

A rank warms up with two forwards for each rank behind it and a group for each chunk but the last; then a forward and a
backward in turn. Our own scheduler finds orders of this length by itself (`schedule.orders.interleaved`); this is the
published one, task by task.

Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2
Tests: tests/bench/test_published.py
"""

from __future__ import annotations

from gpp_plugin.ir.schedule import Task, TaskKind


def interleaved_orders(num_ranks: int, micro_batches: int, chunks: int) -> list[list[Task]]:
    """Return the order of every rank; chunk c of rank r is stage ``c * num_ranks + r``.

    The number of micro-batches must be a multiple of that of ranks.

    >>> " ".join(map(str, interleaved_orders(2, 4, 2)[0][:6]))
    '0F0 0F1 2F0 2F1 0F2 2B0'
    """
    # (micro-batch, chunk) of every forward of a rank, in order; backwards go through the chunks the other way
    turns = [
        (first + offset, chunk)
        for first in range(0, micro_batches, num_ranks)
        for chunk in range(chunks)
        for offset in range(num_ranks)
    ]
    orders = []
    for rank in range(num_ranks):
        forwards = [
            Task(stage=chunk * num_ranks + rank, kind=TaskKind.FORWARD, micro_batch=m) for m, chunk in turns
        ]
        backwards = [
            Task(stage=(chunks - 1 - chunk) * num_ranks + rank, kind=TaskKind.BACKWARD, micro_batch=m)
            for m, chunk in turns
        ]
        warm_up = min(len(turns), 2 * (num_ranks - 1 - rank) + (chunks - 1) * num_ranks)
        order = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            order += (forward, backward)
        orders.append(order + backwards[len(turns) - warm_up :])
    return orders
