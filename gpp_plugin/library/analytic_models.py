"""Block graphs of the papers' models from their dimensions, and their costs on a device; no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph, BlockSharding, SavedTensor
from gpp_plugin.ir.cluster import Device
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.ir.tensors import TRAINING_DTYPES, TensorSpec, adam_bytes, batch_layout, element_bytes
from gpp_plugin.plan.request import TENSOR_SIZES

# How long matrix products take by their size: the efficiency curve behind micro-batch sizes.
#
# A GPU computes C [m, n] in tiles, one a multiprocessor at a time, in waves. A product of few tiles leaves
# multiprocessors idle (tile and wave quantisation: NVIDIA, "Matrix Multiplication Background User's
# Guide"), which is why larger micro-batches are more efficient:
#
#     time = launch + max(flops / (peak x efficiency x utilisation), bytes / bandwidth)
#     utilisation = (tiles' useful part) x tiles / (waves x multiprocessors)
#
# with the better of tiles of 128 x 128, of 64 x 64 (at 0.8 of the rate), and the reduction split in two or
# four (at 0.9). The fractions are of the order such kernels show; peak, efficiency, bandwidth and launch
# come from the cluster description.

MULTIPROCESSORS = {"V100": 80, "A100": 108, "H100": 132, "H200": 132, "RTX3090": 82, "L40S": 142, "CPU": 1}
TILES = ((128, 1.0), (64, 0.8))
SPLITS = ((1, 1.0), (2, 0.9), (4, 0.9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """``count`` products [rows x samples, k] @ [k, n] a forward pass.

    Args:
        rows: rows a sample brings (tokens of a sequence; 1 for a feature vector).
        is_batched: a product of its own for every sample (attention): rows do not add up.
    """

    rows: int
    k: int
    n: int
    count: int = 1
    is_batched: bool = False


def gemm_us(device: Device, m: int, n: int, k: int, *, batch: int = 1, element_bytes: int = 4) -> float:
    """Return microseconds of ``batch`` products [m, k] @ [k, n] in one launch; ``element_bytes`` of a number."""
    # its multiprocessors, by the first part of its name
    units = MULTIPROCESSORS.get(device.name.split("-")[0].split(" ")[0], 100)
    # 512 x 1024 x 1024 on the 108 multiprocessors of an A100, utilisation by tile and split. Tiles
    # of 64 are 8 x 16 = 128 in two waves of 108: 0.59, times their rate, 0.8, is 0.47:
    #
    #             split 1               split 2               split 4
    #   128 x 128  32 tiles, 1 wave .30   64, 1 wave  .53   128, 2 waves .53
    #   64 x 64   128, 2 waves .47       256, 3 waves .57   512, 5 waves .68   <- taken
    #
    # With twice the rows the best is .71 (128 x 128, split 4, 3 waves): a larger micro-batch takes less than
    # twice as long. ``useful`` is the part of the tiles inside the result: 100 rows in a tile of 128 waste a
    # fifth.
    best = 0.0
    for tile, rate in TILES:
        rows, columns = math.ceil(m / tile), math.ceil(n / tile)
        useful = m * n / (rows * columns * tile * tile)
        for split, split_rate in SPLITS:
            # A part of the sum must be long enough for the tile to be worth starting.
            if k // split < 64 and split > 1:
                continue
            tiles = rows * columns * split * batch
            waves = math.ceil(tiles / units)
            best = max(best, rate * split_rate * useful * tiles / (waves * units))
    seconds = 2.0 * m * n * k * batch / (device.flops_per_s * device.efficiency * best)
    # Each operand read once and the result written once: a lower bound, reached by small products.
    moved = float(element_bytes) * batch * (m * k + k * n + m * n)
    return device.launch_us + max(seconds, moved / device.memory_bytes_per_s) * 1e6


def forward_us(device: Device, gemm: Gemm, samples: int, *, element_bytes: int = 4) -> float:
    """Return microseconds of the forward products of ``samples`` samples."""
    if gemm.is_batched:
        batch = gemm.count * samples
        return gemm_us(device, gemm.rows, gemm.n, gemm.k, batch=batch, element_bytes=element_bytes)
    return gemm.count * gemm_us(device, gemm.rows * samples, gemm.n, gemm.k, element_bytes=element_bytes)


def backward_us(device: Device, gemm: Gemm, samples: int, *, element_bytes: int = 4) -> float:
    """Return microseconds of the two backward products (gradients of the input and of the weight)."""
    batch = gemm.count * samples if gemm.is_batched else 1
    rows = gemm.rows if gemm.is_batched else gemm.rows * samples
    both = gemm_us(device, rows, gemm.k, gemm.n, batch=batch, element_bytes=element_bytes) + gemm_us(
        device, gemm.k, gemm.n, rows, batch=batch, element_bytes=element_bytes
    )
    return both if gemm.is_batched else gemm.count * both


def weight_share(device: Device, gemm: Gemm, samples: int, *, element_bytes: int = 4) -> float:
    """Return the weight gradient's share in the two backward products; none where both operands are activations."""
    if gemm.is_batched:
        return 0.0
    rows = gemm.rows * samples
    weight = gemm_us(device, gemm.k, gemm.n, rows, element_bytes=element_bytes)
    other = gemm_us(device, rows, gemm.k, gemm.n, element_bytes=element_bytes)
    return weight / (weight + other)


FLOAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """What tensor ranks divide of a block, in elements of one sample; all of its matrix products are.

    Args:
        counts: heads, features or words that a tensor size must divide.
        saved: of what it keeps, what is in parts where its input is.
        gathered: elements of each tensor that is read in parts of the positions, and made whole for a region.
        scattered: elements of each result of a region that is summed at each rank's positions.
        forward_sums: elements of each tensor that is summed and stays whole.
        begun_whole: of ``saved``, what is whole where the block's input is: the input and its normalisation.
        beside: products of the weight gradients that are made beside the sums of a backward.
    """

    counts: tuple[int, ...]
    parameters: int
    saved: int
    gathered: tuple[int, ...] = ()
    scattered: tuple[int, ...] = ()
    forward_sums: tuple[int, ...] = ()
    begun_whole: int = 0
    beside: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPositions:
    """What context ranks send each other of a block that they compute all of on parts of its positions.

    Args:
        heads: that a context size must divide.
        exchanged: elements of each tensor that goes from parts of the positions to parts of the heads, or back.
        sums: elements of each tensor that is summed, and whose gradients are: of a loss.
    """

    heads: tuple[int, ...] = ()
    exchanged: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """One block by its dimensions; sizes are elements of one sample.

    Args:
        output: elements of its output tensor; ``saved`` kept for backward.
        elementwise: elements read or written outside matrix products, forward; twice that backward.
        launches: operators beside the matrix products.
        divided: by tensor ranks; None: every one of them computes all.
        cut: by context ranks, likewise; its output begins with the positions.
        is_checkpointed: activation checkpointing keeps its input only, and runs it again. Embeddings and heads are not:
            Megatron-LM, and so AutoPipe, checkpoints transformer layers.
    """

    name: str
    output: tuple[int, ...]
    gemms: tuple[Gemm, ...] = ()
    parameters: int = 0
    saved: int = 0
    elementwise: int = 0
    launches: int = 4
    divided: Divided | None = None
    cut: CutPositions | None = None
    is_checkpointed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticModel:
    """A block graph and what its costs follow from."""

    graph: BlockGraph
    specs: tuple[BlockSpec, ...]


def assemble(
    model: str,
    specs: Sequence[BlockSpec],
    edges: Sequence[tuple[str, str]],
    *,
    loss: str,
    saved: Sequence[SavedTensor] = (),
) -> AnalyticModel:
    """Return the block graph of these blocks; every block makes one tensor, ``<block>:out``.

    Args:
        saved: what is kept for backward; by default what each block keeps is its own (`_own_tensors`).
    """
    # Everything is of one sample: shapes have a batch axis of 1 in front, (1, length, hidden) for a layer of
    # a transformer, and a stage's cost is `profile_model`'s at its number of samples. Two linear layers a ->
    # b with 8 inputs, 4 and 2 outputs, loss b:
    #
    #   tensors   a:out (1, 4), b:out (1, 2)            saved   a.0:inside, ...: pieces that a alone keeps
    #   blocks    a: 36 parameters, 144 B, 64 flops     edges   a -> b with a:out
    #
    # Nothing is ever tied or without a gradient here; the planners meet both in captured models.
    tensors = {
        f"{spec.name}:out": TensorSpec(
            name=f"{spec.name}:out",
            dtype="float32",
            shape=(1, *spec.output),
            num_samples=1,
            layout=batch_layout(),
            requires_grad=True,
        )
        for spec in specs
    }
    blocks = tuple(
        Block(
            name=spec.name,
            parameters=(f"{spec.name}.weight",) if spec.parameters else (),
            parameter_bytes=spec.parameters * FLOAT,
            trainable_bytes=spec.parameters * FLOAT,
            flops=float(sum(2 * g.rows * g.k * g.n * g.count for g in spec.gemms)),
            saved_bytes=spec.saved * FLOAT,
            is_trainable=spec.parameters > 0,
        )
        for spec in specs
    )
    graph = BlockGraph(
        model=model,
        num_samples=1,
        blocks=blocks,
        edges=tuple(BlockEdge(src=a, dst=b, tensors=(f"{a}:out",)) for a, b in edges),
        tensors=tensors,
        loss_block=loss,
        tied={},
        saved=tuple(saved) or tuple(tensor for spec in specs for tensor in _own_tensors(spec)),
        sharding=_shardings(specs, edges),
        context=_contexts(specs, edges),
        position_axes={f"{spec.name}:out": 1 for spec in specs if spec.cut is not None},
    )
    return AnalyticModel(graph=graph, specs=tuple(specs))


def _shardings(specs: Sequence[BlockSpec], edges: Sequence[tuple[str, str]]) -> tuple[BlockSharding, ...]:
    """Return what tensor ranks divide of each block, as a capture of it says (`ir.analysis.block_shardings`)."""
    degrees = {
        spec.name: tuple(t for t in TENSOR_SIZES if all(n % t == 0 for n in spec.divided.counts))
        for spec in specs
        if spec.divided is not None
    }
    divided = {s.name: s.divided for s in specs if s.divided is not None and degrees[s.name]}
    leaves = {name for name, own in divided.items() if own.scattered}
    begins = {dst for src, dst in edges if src in leaves and dst in divided and divided[dst].gathered}
    reads = {dst for _, dst in edges}
    is_whole = {src for src, dst in edges if src in leaves and dst not in begins}
    return tuple(
        _sharding(
            spec,
            divided[spec.name],
            degrees[spec.name],
            begins_on_parts=spec.name in begins,
            has_gradient=spec.name in reads,
            is_gathered=spec.name in is_whole,
        )
        for spec in specs
        if spec.name in divided
    )


def _sharding(
    spec: BlockSpec,
    own: Divided,
    degrees: tuple[int, ...],
    *,
    begins_on_parts: bool,
    has_gradient: bool,
    is_gathered: bool,
) -> BlockSharding:
    """Return what tensor ranks divide of a block.

    Args:
        has_gradient: what it reads has one.
        is_gathered: blocks read its result whole.
    """
    # Two layers behind an input that has no gradient, in front of a head that reads the whole; each gathers and sums
    # tokens:
    #
    #   layer 0   begins whole: 1 sum of its backward; gathers forward 3 (attention's result, the feed-forward's input
    #             and result), backward 4 (2 results, the input and once more for its weights)
    #   layer 1   begins on parts: no sum; gathers forward 4, and 1 for the head, backward 6
    gathered, sums, saved, backward = own.gathered, tuple[int, ...](), own.saved, own.scattered
    if not begins_on_parts:
        gathered, sums, saved = own.gathered[1:], own.gathered[:1], own.saved - own.begun_whole
        # a residual beside it is each rank's positions of the whole
        backward += own.gathered[:1] if own.scattered and has_gradient else ()
    forward = (*gathered, *own.scattered, *((math.prod(spec.output),) if is_gathered else ()))
    made = sum(g.rows * g.k * g.n * g.count for g in spec.gemms if not g.is_batched)
    return BlockSharding(
        block=spec.name,
        degrees=degrees,
        flop_share=1.0,
        parameter_bytes=own.parameters * FLOAT,
        trainable_bytes=own.parameters * FLOAT,
        saved_share=saved / max(spec.saved, 1),
        forward_sums=len(own.forward_sums),
        forward_sum_bytes=sum(own.forward_sums) * FLOAT,
        backward_sums=len(sums),
        backward_sum_bytes=sum(sums) * FLOAT,
        beside_share=own.beside / max(made, 1),
        forward_gathers=len(forward),
        forward_gather_bytes=sum(forward) * FLOAT,
        backward_gathers=len(backward) + 2 * len(gathered),
        backward_gather_bytes=(sum(backward) + 2 * sum(gathered)) * FLOAT,
        beside_gathers=2 * len(gathered),
        beside_gather_bytes=2 * sum(gathered) * FLOAT,
        cut_results=(f"{spec.name}:out",) if own.scattered and not is_gathered else (),
    )


def _contexts(specs: Sequence[BlockSpec], edges: Sequence[tuple[str, str]]) -> tuple[BlockSharding, ...]:
    """Return what context ranks cut of each block, and what they send each other; as `_shardings`."""
    # Attention exchanges queries, keys, values and its result; a feed-forward, a projector or a head sends nothing.
    # What reads the whole of a tensor that is cut, a head that pools or an embedding with images, gathers it.
    known = {spec.name: spec for spec in specs}
    all_heads = {heads for spec in specs if spec.cut is not None for heads in spec.cut.heads}
    found = []
    for spec in specs:
        own = spec.cut
        heads = {math.gcd(*own.heads)} if own is not None and own.heads else all_heads
        degrees = tuple(n for n in range(2, max(heads, default=0) + 1) if any(h % n == 0 for h in heads))
        made = [known[src] for src, dst in edges if dst == spec.name]
        gathered = [math.prod(each.output) for each in made if own is None and each.cut is not None]
        if not degrees or (own is None and not gathered):
            continue
        exchanged, sums = (own.exchanged, own.sums) if own is not None else ((), ())
        readers = [known[dst] for src, dst in edges if src == spec.name]
        is_read_so = own is not None and any(each.cut is not None for each in readers)
        found.append(
            BlockSharding(
                block=spec.name,
                degrees=degrees,
                flop_share=0.0 if own is None else 1.0,
                parameter_bytes=0,
                trainable_bytes=0,
                saved_share=0.0 if own is None else 1.0,
                forward_sums=len(sums),
                forward_sum_bytes=sum(sums) * FLOAT,
                backward_sums=len(sums),
                backward_sum_bytes=sum(sums) * FLOAT,
                forward_gathers=len(gathered),
                forward_gather_bytes=sum(gathered) * FLOAT,
                backward_gathers=len(gathered),
                backward_gather_bytes=sum(gathered) * FLOAT,
                forward_exchanges=len(exchanged),
                forward_exchange_bytes=sum(exchanged) * FLOAT,
                backward_exchanges=len(exchanged),
                backward_exchange_bytes=sum(exchanged) * FLOAT,
                cut_results=(f"{spec.name}:out",) if is_read_so else (),
            )
        )
    return tuple(found)


MOST_PIECES = 16


def _own_tensors(spec: BlockSpec) -> list[SavedTensor]:
    """Return what a block keeps, as tensors of about the size of its output that it makes itself."""
    # A layer that keeps 10 times its output is 10 tensors of that size, so that swap and recompute have
    # something to choose from, as they have in a captured layer; at most 16. The bounds are rounded so
    # that the sum is exact.
    count = min(max(-(-spec.saved // max(math.prod(spec.output), 1)), 1), MOST_PIECES)
    bounds = [spec.saved * i // count * FLOAT for i in range(count + 1)]
    return [
        SavedTensor(
            name=f"{spec.name}.{i}:inside", made_by=spec.name, kept_by=(spec.name,), bytes=stop - start
        )
        for i, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False))
        if stop > start
    ]


SENT_BYTES = (
    "forward_sum_bytes",
    "backward_sum_bytes",
    "forward_gather_bytes",
    "backward_gather_bytes",
    "beside_gather_bytes",
    "forward_exchange_bytes",
    "backward_exchange_bytes",
    "group_bytes",
)
"""Of a `BlockSharding`, bytes of what ranks send each other."""


def in_dtype(graph: BlockGraph, dtype: str) -> BlockGraph:
    """Return a graph of fp32 as one whose tensors and parameters are of ``dtype``."""
    size = element_bytes(dtype)

    def scaled(items: Iterable[Any], *names: str) -> tuple[Any, ...]:
        return tuple(
            dataclasses.replace(item, **{name: getattr(item, name) * size // FLOAT for name in names})
            for item in items
        )

    own = ("parameter_bytes", "trainable_bytes")
    return dataclasses.replace(
        graph,
        blocks=scaled(graph.blocks, *own, "saved_bytes"),
        tensors={
            name: dataclasses.replace(spec, dtype=TRAINING_DTYPES[dtype])
            for name, spec in graph.tensors.items()
        },
        saved=scaled(graph.saved, "bytes"),
        sharding=scaled(graph.sharding, *own, *SENT_BYTES),
        context=scaled(graph.context, *SENT_BYTES),
    )


def profile_model(
    model: AnalyticModel, device: Device, *, largest: int, recompute: bool = False, dtype: str = "fp32"
) -> Profile:
    """Return the costs of a model on a device, by the efficiency curve of `gemm`; of the graph `in_dtype`.

    Args:
        dtype: of activations, parameters and gradients; the device's speed is taken to be in it.
        largest: times are given for every power of two up to this number of samples.
        recompute: keep only the input of blocks that are checkpointed, and run their forward again before the backward.
    """
    # 1, 2, 4, ... up to ``largest``; what lies between is interpolated (`ir.profile`).
    samples = tuple(1 << n for n in range(largest.bit_length()) if 1 << n <= largest) or (1,)
    size, costs = element_bytes(dtype), []
    for spec in model.specs:
        forward = tuple(_forward(device, spec, n, size) for n in samples)
        backward = tuple(_backward(device, spec, n, size) for n in samples)
        output = math.prod(spec.output)
        saved, transient = spec.saved, output
        input_share = _input_share(device, spec, samples[-1], size)
        if recompute and spec.is_checkpointed:
            # The block's input, about as large as its output, stays; all that its forward keeps is there only
            # while its backward runs: from saved to transient.
            input_share = 1.0 - (1.0 - input_share) * backward[-1] / (forward[-1] + backward[-1])
            backward = tuple(f + b for f, b in zip(forward, backward, strict=True))
            saved, transient = output, spec.saved + output
        costs.append(
            BlockCost(
                block=spec.name,
                input_share=input_share,
                pending_bytes_per_sample=float(_pending(spec) * size),
                samples=samples,
                forward_us=forward,
                backward_us=backward,
                saved_bytes_per_sample=float(saved * size),
                parameter_bytes=spec.parameters * size,
                gradient_bytes=spec.parameters * size,
                optimizer_bytes=spec.parameters * adam_bytes(dtype),
                transient_bytes_per_sample=float(transient * size),
            )
        )
    graph = model.graph if dtype == "fp32" else in_dtype(model.graph, dtype)
    return Profile(graph=graph.fingerprint, device=device.name, source="analytic", costs=tuple(costs))


def _moved_us(device: Device, num_bytes: int) -> float:
    return num_bytes / device.memory_bytes_per_s * 1e6


def _forward(device: Device, spec: BlockSpec, samples: int, size: int) -> float:
    products = sum(forward_us(device, gemm, samples, element_bytes=size) for gemm in spec.gemms)
    return products + spec.launches * device.launch_us + _moved_us(device, spec.elementwise * samples * size)


def _backward(device: Device, spec: BlockSpec, samples: int, size: int) -> float:
    products = sum(backward_us(device, gemm, samples, element_bytes=size) for gemm in spec.gemms)
    moved = _moved_us(device, 2 * spec.elementwise * samples * size)
    return products + 2 * spec.launches * device.launch_us + moved


def _input_share(device: Device, spec: BlockSpec, samples: int, size: int) -> float:
    """Return the share of a backward that makes the gradients of activations, where it is split."""
    products = [backward_us(device, gemm, samples, element_bytes=size) for gemm in spec.gemms]
    weights = sum(
        us * weight_share(device, gemm, samples, element_bytes=size)
        for us, gemm in zip(products, spec.gemms, strict=True)
    )
    moved = 2 * spec.launches * device.launch_us + _moved_us(device, 2 * spec.elementwise * samples * size)
    return 1.0 - weights / (sum(products) + moved)


def _pending(spec: BlockSpec) -> int:
    """Return the elements of the gradients that wait for weight gradients: as many as products with weights make."""
    return sum(gemm.rows * gemm.n * gemm.count for gemm in spec.gemms if not gemm.is_batched)


# ---- parts -------------------------------------------------------------------------------------------


def attention(name: str, *, length: int, hidden: int, heads: int) -> BlockSpec:
    """Return a self-attention block with its normalisation and residual."""
    head = hidden // heads
    # In elements of a sample: tokens of [length, hidden], scores of [heads, length, length], the one part
    # that grows with length squared. 256 tokens of 1024 in 16 heads: tokens 262,144 and scores 1,048,576, so
    # 3,932,160 elements (15.7 MB in float32) are kept. Products in order: query, key and value at once; query
    # x key^T and scores x value, one a head and sample; the output projection.
    tokens = length * hidden
    scores = heads * length * length
    return BlockSpec(
        name=name,
        output=(length, hidden),
        gemms=(
            Gemm(rows=length, k=hidden, n=3 * hidden),
            Gemm(rows=length, k=head, n=length, count=heads, is_batched=True),
            Gemm(rows=length, k=length, n=head, count=heads, is_batched=True),
            Gemm(rows=length, k=hidden, n=hidden),
        ),
        parameters=4 * hidden * hidden + 6 * hidden,
        saved=7 * tokens + 2 * scores,
        elementwise=10 * tokens + 4 * scores,
        launches=6,
        # by heads: query, key, value, context and scores; by positions: the input, its normalisation and the residual
        divided=Divided(
            counts=(heads,),
            parameters=4 * hidden * hidden + 3 * hidden,
            saved=7 * tokens + 2 * scores,
            gathered=(tokens,),
            scattered=(tokens,),
            begun_whole=2 * tokens,
            beside=3 * hidden * tokens,
        ),
        cut=CutPositions(heads=(heads,), exchanged=(tokens,) * 4),
        is_checkpointed=True,
    )


def feed_forward(name: str, *, length: int, hidden: int, inner: int) -> BlockSpec:
    """Return a transformer's feed-forward block with its normalisation and residual."""
    tokens = length * hidden
    return BlockSpec(
        name=name,
        output=(length, hidden),
        gemms=(Gemm(rows=length, k=hidden, n=inner), Gemm(rows=length, k=inner, n=hidden)),
        parameters=2 * hidden * inner + inner + 3 * hidden,
        saved=3 * tokens + 2 * length * inner,
        elementwise=6 * tokens + 2 * length * inner,
        launches=4,
        divided=Divided(
            counts=(inner,),
            parameters=2 * hidden * inner + inner,
            saved=3 * tokens + 2 * length * inner,
            gathered=(tokens,),
            scattered=(tokens,),
            begun_whole=2 * tokens,
            beside=inner * tokens,
        ),
        cut=CutPositions(),
        is_checkpointed=True,
    )


def merged(name: str, parts: Sequence[BlockSpec]) -> BlockSpec:
    """Return several blocks in a row as one."""
    return BlockSpec(
        name=name,
        output=parts[-1].output,
        gemms=tuple(gemm for part in parts for gemm in part.gemms),
        parameters=sum(part.parameters for part in parts),
        saved=sum(part.saved for part in parts),
        elementwise=sum(part.elementwise for part in parts),
        launches=sum(part.launches for part in parts),
        is_checkpointed=all(part.is_checkpointed for part in parts),
        divided=_divided_together([part.divided for part in parts]),
        cut=_cut_together([part.cut for part in parts]),
    )


def _cut_together(parts: Sequence[CutPositions | None]) -> CutPositions | None:
    """Return what is cut of several blocks in a row; None where one of them is whole."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return CutPositions(
        heads=tuple(number for part in known for number in part.heads),
        exchanged=tuple(size for part in known for size in part.exchanged),
        sums=tuple(size for part in known for size in part.sums),
    )


def _divided_together(parts: Sequence[Divided | None]) -> Divided | None:
    """Return what is divided of several blocks in a row; None where one of them is whole."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return Divided(
        counts=tuple(count for part in known for count in part.counts),
        parameters=sum(part.parameters for part in known),
        saved=sum(part.saved for part in known),
        gathered=tuple(size for part in known for size in part.gathered),
        scattered=tuple(size for part in known for size in part.scattered),
        forward_sums=tuple(size for part in known for size in part.forward_sums),
        begun_whole=known[0].begun_whole,
        beside=sum(part.beside for part in known),
    )


def linear(name: str, inputs: int, outputs: int, *, rows: int = 1) -> BlockSpec:
    """Return a linear layer with its activation."""
    return BlockSpec(
        name=name,
        output=(outputs,) if rows == 1 else (rows, outputs),
        gemms=(Gemm(rows=rows, k=inputs, n=outputs),),
        parameters=inputs * outputs + outputs,
        saved=rows * (inputs + outputs),
        elementwise=2 * rows * outputs,
        launches=2,
        cut=None if rows == 1 else CutPositions(),
    )


def transformer_layers(
    prefix: str, count: int, *, length: int, hidden: int, heads: int, inner: int, granularity: str
) -> list[BlockSpec]:
    """Return the blocks of transformer layers: one a layer, or attention and feed-forward apart.

    Raises:
        PlanError: the granularity is neither ``layer`` nor ``sub_layer``.
    """
    if granularity not in ("layer", "sub_layer"):
        raise PlanError(f"granularity {granularity!r} is not known; choose layer or sub_layer")
    blocks: list[BlockSpec] = []
    for i in range(count):
        parts = [
            attention(f"{prefix}.{i}.attention", length=length, hidden=hidden, heads=heads),
            feed_forward(f"{prefix}.{i}.mlp", length=length, hidden=hidden, inner=inner),
        ]
        blocks += parts if granularity == "sub_layer" else [merged(f"{prefix}.{i}", parts)]
    return blocks


def path_edges(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the edges of a chain."""
    return list(zip(names, names[1:], strict=False))
