"""Hand-made block graphs and profiles for the planner tests."""

from __future__ import annotations

from collections.abc import Sequence

from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.tensors import UNIT, Layout, TensorSpec, batch_layout
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


def make_cluster(num: int, *, memory: int = GB, bandwidth: float = 1e15, latency: float = 0.0) -> Cluster:
    device = Device(name="unit", memory_bytes=memory, flops_per_s=1e12, memory_bytes_per_s=1e12)
    return Cluster(
        name="test",
        devices=(device,) * num,
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
