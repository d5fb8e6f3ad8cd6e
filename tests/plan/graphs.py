"""Hand-made block graphs and profiles for the planner tests."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence

from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph, BlockSharding, SavedTensor
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import BlockCost, InputCost, Profile, SharedStorage, TiedCost
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.tensors import UNIFORM, UNIT, Layout, TensorSpec, batch_layout
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.request import PlanRequest

GB = 1 << 30


def make_graph(
    edges: Sequence[tuple[str, str]],
    *,
    names: Sequence[str] = (),
    loss: str | None = None,
    coupled: Sequence[str] = (),
    unit_edges: Sequence[tuple[str, str]] = (),
    bytes_per_sample: int = 4,
) -> BlockGraph:
    """Build a graph from its edges; every block makes one tensor named after it."""
    order = list(dict.fromkeys([*names, *(end for edge in edges for end in edge)]))
    unit_sources = {src for src, _ in unit_edges}
    tensors = {
        name: TensorSpec(
            name=f"{name}:out",
            dtype="float32",
            shape=() if name in unit_sources else (1, bytes_per_sample // 4),
            num_samples=1,
            layout=_layout(name in unit_sources),
            requires_grad=True,
        )
        for name in order
    }
    return BlockGraph(
        model="test",
        num_samples=1,
        blocks=tuple(Block(name=name, is_coupled=name in coupled) for name in order),
        edges=tuple(BlockEdge(src=a, dst=b, tensors=(f"{a}:out",)) for a, b in edges),
        tensors={f"{name}:out": spec for name, spec in tensors.items()},
        loss_block=loss,
        tied={},
    )


def _layout(is_unit: bool) -> Layout:
    return UNIT if is_unit else batch_layout()


def make_profile(
    graph: BlockGraph,
    forward_us: dict[str, float] | float = 100.0,
    *,
    saved: float = 0.0,
    parameter: int = 0,
    backward_ratio: float = 2.0,
) -> Profile:
    """Give every block a forward time a sample, proportional in the samples."""
    costs = []
    for block in graph.blocks:
        us = forward_us[block.name] if isinstance(forward_us, dict) else forward_us
        costs.append(
            BlockCost(
                block=block.name,
                samples=(1,),
                forward_us=(us,),
                backward_us=(backward_ratio * us,),
                saved_bytes_per_sample=saved,
                parameter_bytes=parameter,
                gradient_bytes=parameter,
            )
        )
    return Profile(graph=fingerprint(graph), device="test", source="given", costs=tuple(costs))


def make_cluster(
    num: int,
    *,
    memory: int | Sequence[int] = GB,
    bandwidth: float = 1e15,
    latency: float = 0.0,
    host: float = 25e9,
) -> Cluster:
    """Return devices on one link, of so much memory each or all, and with a link to the host of ``host`` bytes/s."""
    device = Device(
        name="unit", memory_bytes=0, flops_per_s=1e12, memory_bytes_per_s=1e12, host_bytes_per_s=host
    )
    sizes = (memory,) * num if isinstance(memory, int) else memory
    return Cluster(
        name="test",
        devices=tuple(dataclasses.replace(device, memory_bytes=size) for size in sizes),
        links=(Link(name="all", span=num, bytes_per_s=bandwidth, latency_us=latency),),
    )


def make_request(
    graph: BlockGraph, profile: Profile | None = None, *, ranks: int = 4, **changes: object
) -> PlanRequest:
    values: dict[str, object] = {
        "graph": graph,
        "profile": profile if profile is not None else make_profile(graph),
        "cluster": make_cluster(ranks),
        "num_ranks": ranks,
        "mini_batch": 16,
        "loss_unit": 1,
    }
    return PlanRequest(**{**values, **changes})  # type: ignore[arg-type]


def costs_of(request: PlanRequest) -> CostModel:
    return CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)


def bottleneck(plan: PipelinePlan) -> float:
    """Return the largest time a sample of any stage, forward and backward."""
    return max((s.forward_us + s.backward_us) / s.micro_batch_size for s in plan.stages)


def with_stage(plan: PipelinePlan, index: int, **changes: object) -> PipelinePlan:
    """Return the plan with fields of one stage changed."""
    stages = list(plan.stages)
    stages[index] = dataclasses.replace(stages[index], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(plan, stages=tuple(stages))


def keep_inside(graph: BlockGraph, num_bytes: int) -> BlockGraph:
    """Return the graph with a tensor of so many bytes that each block makes, keeps and hands to nobody."""
    saved = (
        SavedTensor(name=f"{b.name}:inside", made_by=b.name, kept_by=(b.name,), bytes=num_bytes)
        for b in graph.blocks
    )
    blocks = (dataclasses.replace(block, saved_bytes=num_bytes) for block in graph.blocks)
    return dataclasses.replace(graph, saved=tuple(saved), blocks=tuple(blocks))


def chain(num: int, prefix: str = "layers.") -> BlockGraph:
    names = [f"{prefix}{i}" for i in range(num)]
    return make_graph(list(zip(names, names[1:], strict=False)), names=names)


def branches(num: int, length: int, join: str | None = "join") -> BlockGraph:
    edges, names = [], []
    for b in range(num):
        path = [f"b{b}.{i}" for i in range(length)]
        names.extend(path)
        edges.extend(zip(path, path[1:], strict=False))
        if join is not None:
            edges.append((path[-1], join))
    return make_graph(edges, names=names, loss=join)


def clip() -> BlockGraph:
    vision = [
        "vision_model.embeddings",
        *(f"vision_model.encoder.layers.{i}" for i in range(2)),
        "visual_projection",
    ]
    text = ["text_model.embeddings", *(f"text_model.encoder.layers.{i}" for i in range(2)), "text_projection"]
    edges = [*zip(vision, vision[1:], strict=False), (vision[-1], "head")]
    edges += [*zip(text, text[1:], strict=False), (text[-1], "head")]
    return make_graph(edges, names=[*vision, *text], loss="head", coupled=["head"])


def diamond() -> BlockGraph:
    return make_graph([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")], loss="d")


def encoder_decoder(layers: int = 3) -> BlockGraph:
    """Every decoder layer reads the encoder's output (T5)."""
    enc = ["encoder.embed", *(f"encoder.block.{i}" for i in range(layers))]
    dec = ["decoder.embed", *(f"decoder.block.{i}" for i in range(layers)), "lm_head"]
    edges = [*zip(enc, enc[1:], strict=False), *zip(dec, dec[1:], strict=False)]
    edges += [(enc[-1], d) for d in dec[1:-1]]
    return make_graph(edges, names=[*enc, *dec], loss="lm_head", coupled=["lm_head"])


def walked_us(
    cluster: Cluster,
    ranks: Sequence[int],
    num_bytes: float,
    *,
    beside: Sequence[int] = (),
    is_ring: bool = False,
) -> float:
    """Return an all-reduce worked out a second time: a ring's links one by one, or a tree of the nodes.

    Args:
        beside: ranks that run others like it at the same time.
        is_ring: twice an all-gather.
    """
    n, links, ranks = len(ranks), cluster.links, sorted(ranks)
    if n == 1:
        return 0.0
    hops = [cluster.link_between(a, b) for a, b in zip(ranks, ranks[1:], strict=False)]

    def out(link: Link) -> float:
        """Microseconds of all bytes through what the fewest of them can leave by."""
        level = links.index(link)
        if level == 0:
            return num_bytes / link.bytes_per_s * 1e6
        inner = links[level - 1].span
        found = []
        for node in {rank // inner for rank in ranks}:
            here = [rank for rank in set(beside) | set(ranks) if rank // inner == node]
            own = [rank for rank in ranks if rank // inner == node]
            ways = (
                len(here)
                if link.adapters is None
                else len({r % inner * link.adapters // inner for r in here})
            )
            found.append(num_bytes / (link.bytes_per_s * ways * len(own) / len(here)) * 1e6)
        return max(found)

    slowest = max(out(link) for link in hops)
    ring = 2 * sum(link.latency_us for link in hops) + 2 * (n - 1) / n * slowest
    if is_ring or all(link is links[0] for link in hops):
        return ring
    depth = bytes_ = 0.0
    for level, link in enumerate(links):
        inner = links[level - 1].span if level else 1
        within = Counter(group * inner // link.span for group in {rank // inner for rank in ranks})
        most = max(within.values())
        if most > 1:
            depth += 2 * link.latency_us * ((most - 1) if level == 0 else math.ceil(math.log2(most)))
            bytes_ = max(bytes_, out(link) * (min(most - 1, 2) if level == 0 else 2))
    return min(ring, depth + bytes_)


def uneven_request(
    seed: int, *, ranks: int = 8, adapters: int | None = None, **changes: object
) -> PlanRequest:
    """Return a request no two of whose numbers are alike, so that what is mixed up, left out or added twice shows.

    Seven blocks in a row with skips: times that do not grow in proportion, gradients of unequal shares, edges of one to
    three tensors (without a gradient, without samples), parameters tied between unlike blocks, storages kept by
    several, transients and pending bytes that differ, blocks that tensor ranks divide or do not, three levels of links.

    Args:
        adapters: of a node of four ranks.
    """
    rng = random.Random(seed)
    names = [f"b{i}" for i in range(7)]
    pairs = [*zip(names, names[1:], strict=False), ("b0", "b2"), ("b1", "b5"), ("b2", "b6")]
    tensors: dict[str, TensorSpec] = {}
    edges = []
    for src, dst in pairs:
        own = (f"{src}:out", *rng.sample((f"{src}:mask", f"{src}:bias"), rng.randint(0, 2)))
        for name in own:
            is_bias = name.endswith("bias")
            tensors.setdefault(
                name,
                TensorSpec(
                    name=name,
                    dtype="float32",
                    shape=(rng.randint(3, 99),) if is_bias else (2, rng.randint(100, 900)),
                    num_samples=2,
                    layout=UNIFORM if is_bias else batch_layout(),
                    requires_grad=not name.endswith("mask"),
                ),
            )
        edges.append(BlockEdge(src=src, dst=dst, tensors=own))
    tied = {"words": ("b0", "b4"), "scale": ("b1", "b2", "b6")}
    blocks, costs, sharding = [], [], []
    for name in names:
        parameter = rng.randint(2000, 9000)
        trained = rng.randint(1000, parameter)
        first = rng.uniform(20, 90)
        blocks.append(
            Block(
                name=name,
                parameter_bytes=parameter,
                trainable_bytes=trained,
                flops=rng.uniform(1, 9),
                saved_bytes=rng.randint(100, 900),
            )
        )
        costs.append(
            BlockCost(
                block=name,
                samples=(1, 4),
                forward_us=(first, first * rng.uniform(2, 4)),
                backward_us=(first * rng.uniform(1, 3), first * rng.uniform(5, 9)),
                saved_bytes_per_sample=float(rng.randint(100, 900)),
                saved_bytes_fixed=float(rng.randint(10, 90)),
                parameter_bytes=parameter,
                gradient_bytes=trained,
                optimizer_bytes=rng.randint(2000, 9000),
                transient_bytes_per_sample=float(rng.randint(100, 900)),
                split_factor=rng.uniform(1.0, 1.3),
                input_share=rng.uniform(0.2, 0.8),
                pending_bytes_per_sample=float(rng.randint(10, 90)),
            )
        )
        if name not in ("b2", "b5"):
            sharding.append(
                BlockSharding(
                    block=name,
                    degrees=(2,) if name == "b3" else (2, 4),
                    flop_share=rng.uniform(0.5, 1),
                    parameter_bytes=parameter * 3 // 4,
                    trainable_bytes=trained // 2,
                    saved_share=rng.uniform(0.2, 0.9),
                    forward_sums=rng.randint(1, 3),
                    forward_sum_bytes=rng.randint(1000, 5000),
                    backward_sums=rng.randint(1, 3),
                    backward_sum_bytes=rng.randint(1000, 5000),
                    beside_share=len(sharding) / 5,
                )
            )
    graph = BlockGraph(
        model="uneven",
        num_samples=2,
        blocks=tuple(blocks),
        edges=tuple(edges),
        tensors=tensors,
        loss_block="b6",
        tied=tied,
        sharding=tuple(sharding),
    )
    profile = Profile(
        graph=fingerprint(graph),
        device="test",
        source="given",
        costs=tuple(costs),
        tied=tuple(
            TiedCost(
                blocks=own,
                parameter_bytes=900 - 99 * n,
                gradient_bytes=700 - 99 * n,
                optimizer_bytes=1300 - 99 * n,
            )
            for n, own in enumerate(tied.values())
        ),
        shared=(
            SharedStorage(blocks=("b0", "b2", "b3"), bytes_per_sample=70.0, bytes_fixed=11.0),
            SharedStorage(blocks=("b1", "b5"), bytes_per_sample=-30.0, bytes_fixed=7.0),
        ),
        inputs=(
            InputCost(blocks=("b0", "b3"), bytes=6400, is_shared_out=True),
            InputCost(blocks=("b6",), bytes=500, is_shared_out=False),
        ),
    )
    devices = (
        dataclasses.replace(device, host_bytes_per_s=(20 - rank) * 1e8)
        for rank, device in enumerate(make_cluster(ranks).devices)
    )
    cluster = Cluster(
        name="three levels",
        devices=tuple(devices),
        links=tuple(
            Link(name=f"span {span}", span=span, bytes_per_s=rate, latency_us=us, adapters=shared)
            for span, rate, us, shared in (
                (2, 4e9, 1.0, None),
                (4, 1e9, 3.0, None),
                (8, 2e8, 11.0, adapters),
            )
        ),
    )
    return make_request(graph, profile, **{"cluster": cluster, "num_ranks": ranks, **changes})
