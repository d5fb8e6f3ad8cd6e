"""Language models in equal stages: Llama 3 405B, MT-NLG 530B, and thirteen GPTs on A100s by our own costs.

Of Llama's run the batch of a pipeline is published, 32 samples, and neither into how many micro-batches it was cut nor
how many chunks a rank had. What interleaving gains hangs on both: so there is a row for each, and none is held to a
limit.

A GPT takes what our costs say of its sizes on `dgx_a100`: nothing of its run is fitted. Micro-batches and chunks that
are not published are the quickest by us, as a user would choose them.

Source: torchtitan, benchmarks/llama3_h100_202412 (Table 5); Megatron-Turing NLG (arXiv 2201.11990), section 2;
    Megatron-LM (arXiv 2104.04473), Table 1; Korthikanti et al. (arXiv 2205.05198), iteration times
Tests: tests/bench/test_published.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpp_benchmarks.published._plans import (
    chain,
    cluster_of,
    interleaved_orders,
    longest_span_us,
    schedules_of,
    stage_of,
)
from gpp_benchmarks.published._rows import ASSUMED, COSTED, FITTED, HELD_OUT, Row
from gpp_plugin.ir.block_graph import BlockSharding
from gpp_plugin.ir.cluster import Device
from gpp_plugin.ir.plan import ModelGrid
from gpp_plugin.ir.profile import BlockCost
from gpp_plugin.library.analytic_models import attention, forward_us, in_dtype, profile_model
from gpp_plugin.library.paper_graphs import transformer
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.request import STEP_ERROR
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
        usual_us = _interleaved_us(micro_batches, 1)
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
    return chain_us([1.0 / chunks] * LLAMA_RANKS * chunks, LLAMA_RANKS, micro_batches)


def _span(micro_batches: int) -> float:
    return chain_us([1.0] * MT_NLG_RANKS, MT_NLG_RANKS, micro_batches)


def chain_us(
    forwards: Sequence[float],
    ranks: int,
    micro_batches: int,
    *,
    backwards: Sequence[float] | None = None,
    message_us: float = 0.0,
) -> float:
    """Return the longest span of a chain: 1F1B of one stage a rank, Megatron's interleaved order of several.

    Args:
        forwards: microseconds of each stage; stage s is on rank s modulo ``ranks``.
        backwards: None: twice as long.
    """
    chunks = len(forwards) // ranks
    times = zip(forwards, backwards or [2 * each for each in forwards], strict=True)
    held = [ranks * chunks if chunks > 1 else ranks - i for i in range(len(forwards))]
    stages = [
        stage_of(i, i % ranks, (forward, backward, 0.0), in_flight=min(micro_batches, held[i]))
        for i, (forward, backward) in enumerate(times)
    ]
    plan = chain(stages, micro_batches=micro_batches)
    orders = interleaved_orders(ranks, micro_batches, chunks) if chunks > 1 else None
    return longest_span_us(
        plan,
        build_schedules(plan) if orders is None else schedules_of(orders),
        cluster=cluster_of(ranks, message_us) if message_us else None,
        orders=None if orders is None else dict(enumerate(orders)),
    )


# GPTs on A100s, tensor ranks and pipelines among them, by costs alone.
#
# A pipeline of p ranks has p x chunks stages, a part of the layers each, and the embedding and the head at its ends. A
# rank stands for t tensor ranks; d such pipelines share the batch, and sum their gradients behind the last task, as
# Megatron-LM did. 39.1B on 512 GPUs: t 8, p 2, so d 32 pipelines of 48 samples; two chunks of a rank are 12 layers.
#
# What a layer of these runs takes beside what our costs say (S: one sum of a task, of which there are two each way):
#
#     norms and residuals    10 tensors of tokens read and written a forward, twice that a backward: whole on each
#                            tensor rank, in parts under sequence parallelism
#     sums of a backward     Megatron-LM waits for them; Korthikanti et al. hide them behind weight gradients
#     all recomputed         the forward again with its two sums
#     selective, sequence    attention's scores again; two gathers, half a sum each, that a backward waits for
#
# A layer of 22B: 8.1 ms and 21.1 of backward; selectively 7.7 and 13.8.

LENGTH, WORDS = 2048, 51200
BAND = STEP_ERROR
SIZES = (1, 2, 4, 8)
"""Samples of a micro-batch that are tried."""
MEGATRON = (
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
    ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
    ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
    ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
    ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
    ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
    ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
    ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
)
"""Name, heads, width, layers, tensor, pipeline, GPUs, batch, and TFLOP/s a GPU with what is recomputed."""
KORTHIKANTI = (
    ("22B", 64, 6144, 48, 8, 1, 8, 4, (4, 1), 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 8, 64, 64, (1, 3), 18.13, 13.75),
    ("530B", 128, 20480, 105, 8, 35, 280, 280, (1, 3), 49.05, 37.83),
    ("1T", 160, 25600, 128, 8, 64, 512, 512, (1, 1), 94.42, 71.49),
)
"""The same, but samples of a micro-batch and chunks of a rank, and seconds: all recomputed; selectively, with sequence
parallelism."""
WHOLE_TENSORS = 10
"""Tensors of tokens that a forward of a layer reads and writes whole: a norm two, a residual with its dropout three."""
_WHY_MEGATRON = (
    "micro-batches and chunks are unknown: the quickest by us; seconds follow from TFLOP/s and the paper's formula; "
    "gradients are summed behind the last task, in bf16; the optimizer step is left out"
)
_WHY_KORTHIKANTI = (
    "sizes, degrees, micro-batches and chunks as remembered of the paper; the optimizer step is left out. On one "
    "pipeline of 280 micro-batches the papers differ by 9 %: 54.1 s with a sum of gradients (0.3), and 49.05 s"
)
_WHY_SELECTIVE = "as the row above; a layer as in the module's comment"
_WHY_EFFICIENCY = (
    "no number of the paper: the share of 312 TFLOP/s at which matrix products make our step as long as the published "
    "one; dgx_a100 has one for all sizes"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptRun:
    """A GPT on A100s: its sizes and degrees."""

    heads: int
    width: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    recompute: bool = True
    hides_sums: bool = False

    def seconds_at(self, teraflops: float) -> float:
        """Return the step of a published TFLOP/s a GPU: 96 B s l h^2 (1 + s / 6h + V / 16lh) operations."""
        h, layers = self.width, self.layers
        share = 1 + LENGTH / (6 * h) + WORDS / (16 * layers * h)
        return 96 * self.batch * LENGTH * layers * h**2 * share / (self.gpus * teraflops * 1e12)

    def costs(self, efficiency: float | None = None) -> CostModel:
        """Return what its blocks take: the embedding, the layers, the head.

        Args:
            efficiency: of matrix products; None: the cluster's.
        """
        cluster = read_cluster("dgx_a100", num_devices=self.gpus, dtype="bf16")
        if efficiency is not None:
            devices = tuple(dataclasses.replace(each, efficiency=efficiency) for each in cluster.devices)
            cluster = dataclasses.replace(cluster, devices=devices)
        model = transformer(
            layers=self.layers, hidden=self.width, heads=self.heads, inner=4 * self.width, length=LENGTH,
            vocabulary=WORDS,
        )  # fmt: skip
        profile = profile_model(
            model, cluster.devices[0], largest=max(SIZES), recompute=self.recompute, dtype="bf16"
        )
        first, *layers, last = profile.costs
        layers = [self._as_run(cost, cluster.devices[0]) for cost in layers]
        profile = dataclasses.replace(profile, costs=(first, *layers, last))
        graph = in_dtype(model.graph, "bf16")
        graph = dataclasses.replace(graph, sharding=tuple(map(self._with_sums, graph.sharding)))
        return CostModel(graph, profile, cluster).at_grid(ModelGrid(tensor=self.tensor))

    def _with_sums(self, own: BlockSharding) -> BlockSharding:
        """Return what ranks of these runs send each other: a sum in the place of a reduce-scatter and an all-gather."""
        number, num_bytes = own.forward_gathers // 2, own.forward_gather_bytes // 2
        return dataclasses.replace(
            own,
            beside_share=own.beside_share if self.hides_sums else 0.0,
            forward_sums=own.forward_sums + number,
            forward_sum_bytes=own.forward_sum_bytes + num_bytes,
            backward_sums=own.backward_sums + number,
            backward_sum_bytes=own.backward_sum_bytes + num_bytes,
            forward_gathers=0,
            forward_gather_bytes=0,
            backward_gathers=0,
            backward_gather_bytes=0,
            beside_gathers=0,
            beside_gather_bytes=0,
            cut_results=(),
        )

    def _as_run(self, cost: BlockCost, device: Device) -> BlockCost:
        """Return the costs of a layer with what its ranks do whole, or do again; tensor ranks divide all of them."""

        def moved_us(elements: int) -> float:
            return 2.0 * elements / device.memory_bytes_per_s * 1e6

        whole = moved_us(WHOLE_TENSORS * LENGTH * self.width) * (self.tensor - 1) if self.recompute else 0.0
        core = attention("", length=LENGTH, hidden=self.width, heads=self.heads)
        again = [3 * whole * n for n in cost.samples]
        if not self.recompute:
            again = [
                sum(forward_us(device, each, n, element_bytes=2) for each in core.gemms if each.is_batched)
                + moved_us(4 * n * self.heads * LENGTH**2)
                for n in cost.samples
            ]
        return dataclasses.replace(
            cost,
            forward_us=tuple(us + whole * n for us, n in zip(cost.forward_us, cost.samples, strict=True)),
            backward_us=tuple(us + more for us, more in zip(cost.backward_us, again, strict=True)),
        )

    def step(self, costs: CostModel, size: int, chunks: int, *, tasks_alone: bool = False) -> float:
        """Return the seconds of a step at ``size`` samples a micro-batch, or of its tasks alone."""
        ranks, each = self.pipeline, self.layers // (self.pipeline * chunks)
        degree = self.gpus // (self.tensor * ranks)
        stages = [list(range(1 + i * each, 1 + (i + 1) * each)) for i in range(ranks * chunks)]
        stages[0].insert(0, 0)
        stages[-1].append(self.layers + 1)
        forwards, backwards = zip(*(costs.stage_times(rows, size) for rows in stages), strict=True)
        sums = costs.tensor_sums(size)[0] if self.recompute else costs.tensor_sums(size)[1] / 2
        backwards = tuple(us + each * float(sums[1]) for us in backwards)
        message, reduce = 0.0, 0.0
        if not tasks_alone:
            if ranks > 1:
                num_bytes = 2.0 * size * LENGTH * self.width
                message = costs.cluster.transfer_us(0, self.gpus // ranks, num_bytes)
            everyone = range(self.tensor * degree)
            price = costs.collectives(everyone[:: self.tensor], everyone).all_reduce
            for rank in {0, ranks - 1}:
                held = costs.group_gradient_bytes([row for rows in stages[rank::ranks] for row in rows])
                reduce = max(reduce, float(price.us(held)))
        micro_batches = self.batch // (size * degree)
        span = chain_us(forwards, ranks, micro_batches, backwards=backwards, message_us=message)
        return (span + reduce) / 1e6

    def quickest(self, costs: CostModel) -> tuple[int, int]:
        """Return the samples of a micro-batch and the chunks of a rank that make the shortest step."""
        best: tuple[float, int, int] | None = None
        layers = self.layers // self.pipeline
        per_size = self.batch * self.tensor * self.pipeline // self.gpus
        for size in (size for size in SIZES if per_size % size == 0):
            may_interleave = self.pipeline > 1 and per_size // size % self.pipeline == 0
            counts = [n for n in range(1, layers + 1 if may_interleave else 2) if layers % n == 0]
            found = min((self.step(costs, size, chunks), size, chunks) for chunks in counts)
            if best is not None and found >= best:
                break
            best = found
        assert best is not None  # one sample divides everything
        return best[1:]


def gpt_rows(*, at_most: int = 1 << 30) -> Iterator[Row]:
    """Yield what tasks, and whole steps, take of each run on at most so many GPUs.

    Tasks are with the pipeline's filling and draining, and without messages and sums of gradients. Both are held
    against the one number that is published, the step.
    """
    for name, *sizes, teraflops in MEGATRON:
        run = _gpt(sizes)
        if run.gpus <= at_most:
            yield from _rows_of("Megatron-LM", name, run, run.seconds_at(teraflops), None, _WHY_MEGATRON)
    for name, *sizes, shape, seconds, selective in KORTHIKANTI:
        run = dataclasses.replace(_gpt(sizes), hides_sums=True)
        if run.gpus <= at_most:
            yield from _rows_of("Korthikanti", name, run, seconds, (*shape, selective), _WHY_KORTHIKANTI)


def _gpt(sizes: Sequence[Any]) -> GptRun:
    heads, width, layers, tensor, pipeline, gpus, batch = map(int, sizes)
    return GptRun(
        heads=heads, width=width, layers=layers, tensor=tensor, pipeline=pipeline, gpus=gpus, batch=batch
    )


def _rows_of(
    source: str, name: str, run: GptRun, seconds: float, more: tuple[int, int, float] | None, why: str
) -> Iterator[Row]:
    costs = run.costs()
    size, chunks = run.quickest(costs) if more is None else more[:2]
    case = f"{name}, {run.gpus} A100, TP {run.tensor} PP {run.pipeline}, micro-batches of {size}, {chunks} chunks"
    row = Row(
        source=source,
        case=case,
        quantity="step",
        unit="s",
        published=seconds,
        ours=run.step(costs, size, chunks),
        known=COSTED,
        limit=BAND,
        why=why,
    )
    yield dataclasses.replace(row, quantity="tasks", ours=run.step(costs, size, chunks, tasks_alone=True))
    yield row
    if more is not None:
        kept = dataclasses.replace(run, recompute=False)
        yield dataclasses.replace(
            row,
            quantity="step, selective",
            published=more[2],
            ours=kept.step(kept.costs(), size, chunks),
            why=_WHY_SELECTIVE,
        )
    # a step is a + b / efficiency
    here, there = costs.cluster.devices[0].efficiency, 0.8
    b = (row.ours - run.step(run.costs(there), size, chunks)) / (1 / here - 1 / there)
    yield dataclasses.replace(
        row,
        quantity="efficiency of products",
        unit="share",
        published=b / (seconds - row.ours + b / here),
        ours=here,
        known=ASSUMED,
        limit=None,
        why=_WHY_EFFICIENCY,
    )
