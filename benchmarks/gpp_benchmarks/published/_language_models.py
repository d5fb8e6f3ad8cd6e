"""Llama 3 405B under torchtitan, and MT-NLG 530B: equal stages, of which only the number of micro-batches matters.

Of Llama's run the batch of a pipeline is published, 32 samples, and neither into how many micro-batches it was cut nor
how many chunks a rank had. What interleaving gains hangs on both: so there is a row for each, and none is held to a
limit.

Sources: torchtitan, benchmarks/llama3_h100_202412 (Table 5); Megatron-Turing NLG (arXiv 2201.11990), section 2.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpp_benchmarks.published._plans import chain, interleaved_orders, longest_span_us, schedules_of, stage_of
from gpp_benchmarks.published._rows import ASSUMED, FITTED, HELD_OUT, Row
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.schedule.build import build_schedules

LLAMA_RANKS, LLAMA_PUBLISHED = 8, 128 / 100
LLAMA_MICRO_BATCHES, LLAMA_CHUNKS = (8, 16, 32), (2, 4)
"""What its 32 samples divide into, no fewer than ranks; and 126 layers on 8 ranks give few chunks of any size."""
MT_NLG_RANKS = 35
MT_NLG = ((240, 2240, 60.1), (192, 2800, 50.2), (160, 3360, 44.4))
"""Micro-batches of a pipeline (batch 1,920, 8-way tensor, 35-way pipeline), GPUs, seconds of a step."""
LIMIT = 0.08
_WHY_LLAMA = (
    "assumed: the number of micro-batches (torchtitan's default is 8, as many as pipeline ranks), the chunks of a "
    "rank, equal stages, and no time for messages and FSDP's collectives; memory (82.5 and 72.7 GiB) is not simulated"
)
_WHY_MT_NLG = (
    "a stage's time from the first row; the gradient reduction, which grows with the replicas, takes none"
)


def language_model_rows() -> Iterator[Row]:
    """Yield the ratio of Llama's two throughputs at each assumption, and the three steps of MT-NLG."""
    for micro_batches in LLAMA_MICRO_BATCHES:
        usual = _even_chain(LLAMA_RANKS, micro_batches)
        usual_us = longest_span_us(usual, build_schedules(usual))
        for chunks in LLAMA_CHUNKS:
            yield Row(
                source="torchtitan",
                case=f"Llama 3 405B, 512 H100, TP 8 PP 8, {micro_batches} micro-batches, {chunks} chunks",
                quantity="interleaved over 1F1B, tokens/s",
                unit="ratio",
                published=LLAMA_PUBLISHED,
                ours=usual_us / _interleaved_us(micro_batches, chunks),
                known=ASSUMED,
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


def _interleaved_us(micro_batches: int, chunks: int) -> float:
    orders = interleaved_orders(LLAMA_RANKS, micro_batches, chunks)
    plan = _even_chain(LLAMA_RANKS, micro_batches, chunks=chunks)
    return longest_span_us(plan, schedules_of(orders), orders=dict(enumerate(orders)))


def _span(micro_batches: int) -> float:
    plan = _even_chain(MT_NLG_RANKS, micro_batches)
    return longest_span_us(plan, build_schedules(plan))


def _even_chain(ranks: int, micro_batches: int, *, chunks: int = 1) -> PipelinePlan:
    """Return equal stages of 3 us of work a rank and micro-batch, backwards twice as long as forwards."""
    each = 1.0 / chunks
    stages = [
        stage_of(i, i % ranks, (each, each, each), in_flight=min(micro_batches, ranks * chunks - i))
        for i in range(ranks * chunks)
    ]
    return chain(stages, micro_batches=micro_batches)
