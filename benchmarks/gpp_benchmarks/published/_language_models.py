"""Llama 3 405B under torchtitan, and MT-NLG 530B: equal stages, of which only the number of micro-batches matters.

Sources: torchtitan, benchmarks/llama3_h100_202412 (Table 5); Megatron-Turing NLG (arXiv 2201.11990), section 2.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpp_benchmarks.published._interleaved import interleaved_orders
from gpp_benchmarks.published._plans import chain, longest_span_us, schedules_of, stage_of
from gpp_benchmarks.published._rows import ASSUMED, FITTED, HELD_OUT, Row
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.schedule.build import build_schedules

LLAMA_RANKS, LLAMA_CHUNKS, LLAMA_PUBLISHED = 8, 2, 128 / 100
MT_NLG_RANKS = 35
MT_NLG = ((240, 2240, 60.1), (192, 2800, 50.2), (160, 3360, 44.4))
"""Micro-batches of a pipeline (batch 1,920, 8-way tensor, 35-way pipeline), GPUs, seconds of a step."""
LIMIT = 0.08
_WHY_LLAMA = (
    "8 micro-batches, torchtitan's default (as many as pipeline ranks), and 2 chunks a rank, the fewest that "
    "interleave; neither is published; FSDP's collectives take no time here"
)
_WHY_MT_NLG = (
    "a stage's time from the first row; the gradient reduction, which grows with the replicas, takes none"
)


def language_model_rows() -> Iterator[Row]:
    """Yield the ratio of Llama's two throughputs, and the three steps of MT-NLG."""
    usual = _even_chain(LLAMA_RANKS, LLAMA_RANKS)
    orders = interleaved_orders(LLAMA_RANKS, LLAMA_RANKS, LLAMA_CHUNKS)
    chunked = _even_chain(LLAMA_RANKS, LLAMA_RANKS, chunks=LLAMA_CHUNKS)
    interleaved = longest_span_us(chunked, schedules_of(orders), orders=dict(enumerate(orders)))
    yield Row(
        source="torchtitan",
        case="Llama 3 405B, 512 H100, TP 8 PP 8",
        quantity="interleaved over 1F1B, tokens/s",
        unit="ratio",
        published=LLAMA_PUBLISHED,
        ours=longest_span_us(usual, build_schedules(usual)) / interleaved,
        known=ASSUMED,
        limit=LIMIT,
        why=_WHY_LLAMA,
    )
    spans = [_span(micro_batches) for micro_batches, _, _ in MT_NLG]
    unit = MT_NLG[0][2] / spans[0]
    for span, (micro_batches, gpus, seconds) in zip(spans, MT_NLG, strict=True):
        yield Row(
            source="MT-NLG",
            case=f"530B, {gpus} A100, {micro_batches} micro-batches",
            quantity="step",
            unit="s",
            published=seconds,
            ours=span * unit,
            known=FITTED if gpus == MT_NLG[0][1] else HELD_OUT,
            limit=LIMIT,
            why=_WHY_MT_NLG,
        )


def _span(micro_batches: int) -> float:
    plan = _even_chain(MT_NLG_RANKS, micro_batches)
    return longest_span_us(plan, build_schedules(plan))


def _even_chain(ranks: int, micro_batches: int, *, chunks: int = 1) -> PipelinePlan:
    """Return equal stages of 3 us of work a rank and micro-batch, backwards twice as long as forwards."""
    stages = [
        stage_of(
            index,
            index % ranks,
            forward_us=1.0 / chunks,
            input_us=1.0 / chunks,
            weight_us=1.0 / chunks,
            in_flight=min(micro_batches, ranks * chunks - index),
            schedule="1f1b",
        )
        for index in range(ranks * chunks)
    ]
    return chain(stages, micro_batches=micro_batches)
