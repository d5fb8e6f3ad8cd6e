"""What stages and pipelines take, in closed form: the one formula of each, for numbers and for numpy arrays alike.

Legend: B samples of a mini-batch, b of a micro-batch, d ranks of a stage, t microseconds of a stage a sample:

    t  =  max(C / b, L)  +  n R / B

    C  forward and backward of one micro-batch on one rank (b/d samples), what memory optimization adds included
    L  a sample's way over the stage's d links, activations there and gradients back; it overlaps with computing
    R  one all-reduce of the stage's gradients; n such are what its reductions in a mini-batch are worth

Whatever is waited for beside that (filling and draining, messages out of step) is the business of those who play a
schedule: the event loop (`schedule.event_loop`), exactly, and `estimate`, quickly. They share what tasks take
(`stage_task_us`), what messages take (`Cluster.transfer_us`, `Link.occupied_us`) and the reductions
(`CostModel.reduce_times`), and are not built on each other, so that a test can hold one against the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def num_reductions(num_micro_batches: int, zero_stage: int) -> float:
    """Return n: how many all-reduces of its gradients a stage's reductions in one mini-batch are worth.

    ZeRO 0 takes one; ZeRO 1 a reduce-scatter and an all-gather of parameters, which is as much; ZeRO 2 a
    reduce-scatter, half an all-reduce, behind each backward, and an all-gather, the other half of one. So does ZeRO 3
    where it gathers once a mini-batch (`num_gathers`).

    >>> num_reductions(4, 0), num_reductions(4, 2)
    (1.0, 2.5)
    """
    return (num_micro_batches + 1) / 2 if zero_stage >= 2 else 1.0


def num_gathers(num_micro_batches: int, *, is_alone: bool) -> int:
    """Return how often a stage's parameters are gathered in one mini-batch under ZeRO 3, at most (`schedule.gathers`).

    Args:
        is_alone: none of its ranks holds another stage; else one may come between any two of its tasks.

    >>> num_gathers(4, is_alone=True), num_gathers(4, is_alone=False)
    (1, 8)
    """
    return 1 if is_alone else 2 * num_micro_batches


def us_per_sample(compute_us: Any, size: Any, *, reduce_us: Any = 0.0, link_us: Any = None) -> Any:
    """Return t: what a stage takes a sample while the pipeline is full.

    Args:
        compute_us: C; ``size`` is b.
        reduce_us: n R / B.
        link_us: L; None: messages are not counted.

    >>> us_per_sample(80.0, 4, reduce_us=1.5), float(us_per_sample(80.0, 4, link_us=25.0))
    (21.5, 25.0)
    """
    own = compute_us / size
    return (own if link_us is None else np.maximum(own, link_us)) + reduce_us


def boundary_us(num_bytes: Any, degree: int, us_per_byte: float) -> Any:
    """Return L: the activations of a sample that enter or leave a stage, and their gradients back, over its d links.

    One formula for every planner. The released PipeDream multiplies the bandwidth by a stage's replicas, the released
    Piper divides the bytes by its degree.

    Args:
        num_bytes: of a sample's activations, in and out.
        us_per_byte: of one rank's link.

    >>> boundary_us(100.0, 4, 0.5)
    25.0
    """
    return num_bytes * (2 * us_per_byte / degree)


def pipelined_samples(mini_batch: int, micro_batch_size: int, levels: int, ramp: float = 1.0) -> float:
    """Return as how many samples of its slowest stage a mini-batch counts: its own, and filling ``levels`` stages.

        stage 0  F0 B0 F1 B1 .. ..       B = 2 b, 3 levels: while the last stage computes 2 micro-batches,
        stage 1  .. F0 B0 F1 B1 ..       the ones before it take 2 more to fill and drain
        stage 2  .. .. F0 B0 F1 B1       2 b + (3 - 1) b = 4 b

    Args:
        ramp: part of the slowest stage's time that the others take.

    >>> pipelined_samples(8, 4, 3)
    16.0
    """
    return mini_batch + ramp * (levels - 1) * micro_batch_size


def full_pipeline_us(mini_batch: int, micro_batch_size: int, levels: int, slowest_us: float) -> float:
    """Return (B + (levels - 1) b) t: the step of a pipeline all of whose stages take ``slowest_us`` a sample.

    >>> full_pipeline_us(8, 4, 3, 10.0)
    160.0
    """
    return slowest_us * pipelined_samples(mini_batch, micro_batch_size, levels)
