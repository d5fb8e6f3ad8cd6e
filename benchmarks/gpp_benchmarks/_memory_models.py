"""DawnPiper's models operator by operator, and the maximum batches it reports (Tables 1 and 2)."""

from __future__ import annotations

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.profile import Profile

MODELS = ("bert_large", "gpt2_770m", "t5_780m", "amoebanet")
HF_MODELS = {
    "bert_large": ("bert-large", 512),
    "gpt2_770m": ("gpt2-762m", 1024),
    "t5_780m": ("t5-large", 128),
}
"""HuggingFace configuration that comes with the package, and tokens of a text. The paper does not give the
lengths: BERT's and GPT-2's are the models' own; T5's is the power of two at which its activations fill the memory
that Table 1 implies."""

SAMPLE_COUNTS = (1, 2, 16, 128)
CAPTURED_SAMPLES = 2

PAPER: dict[tuple[int, str, str, str], tuple[int, int, int, int]] = {
    (4, "sync", "none", "zero_2"): (64, 8, 140, 412),
    (4, "sync", "none", "zero_3"): (64, 8, 132, 404),
    (4, "sync", "none", "uniform"): (52, 8, 144, 280),
    (4, "sync", "none", "vpipe"): (60, 8, 144, 188),
    (4, "sync", "none", "dawnpiper"): (72, 8, 160, 360),
    (4, "sync", "R", "uniform"): (120, 28, 348, 644),
    (4, "sync", "S+R", "vpipe"): (128, 28, 348, 720),
    (4, "sync", "S+R", "dawnpiper"): (160, 32, 424, 1220),
    (8, "sync", "none", "zero_2"): (128, 16, 224, 824),
    (8, "sync", "none", "zero_3"): (128, 16, 208, 808),
    (8, "sync", "none", "uniform"): (88, 16, 256, 480),
    (8, "sync", "none", "vpipe"): (88, 16, 256, 264),
    (8, "sync", "none", "dawnpiper"): (136, 16, 320, 560),
    (8, "sync", "R", "uniform"): (208, 48, 664, 1384),
    (8, "sync", "S+R", "vpipe"): (208, 56, 664, 1424),
    (8, "sync", "S+R", "dawnpiper"): (280, 60, 800, 2180),
    (4, "async", "none", "pipedream"): (16, 2, 40, 70),
    (4, "async", "none", "vpipe"): (16, 2, 40, 48),
    (4, "async", "none", "dawnpiper"): (32, 3, 78, 150),
    (4, "async", "S+R", "vpipe"): (46, 8, 110, 300),
    (4, "async", "S+R", "dawnpiper"): (84, 10, 192, 480),
    (8, "async", "none", "pipedream"): (16, 2, 44, 64),
    (8, "async", "none", "vpipe"): (16, 2, 44, 32),
    (8, "async", "none", "dawnpiper"): (40, 5, 84, 128),
    (8, "async", "S+R", "vpipe"): (58, 16, 144, 214),
    (8, "async", "S+R", "dawnpiper"): (100, 22, 248, 528),
}
"""Maximum batches by (stages, mode, optimization, planner), in the order of `MODELS`: a mini-batch where
synchronous, a micro-batch where asynchronous."""


def paper_batch(model: str, stages: int, mode: str, optimization: str, planner: str) -> int | None:
    """Return the paper's maximum batch, or None where it has none."""
    batches = PAPER.get((stages, mode, optimization, planner))
    return batches[MODELS.index(model)] if batches is not None and model in MODELS else None


def operator_graph(model: str, cluster: Cluster) -> tuple[BlockGraph, Profile]:
    """Return the operators of a model and what they cost on the cluster's devices, by analysis.

    Raises:
        CaptureError: the installed transformers makes a model that cannot be captured.
    """
    if model not in HF_MODELS:
        from gpp_plugin.library.analytic_models import profile_model
        from gpp_plugin.library.paper_graphs import build_model

        library_model = build_model(model)
        largest = 4 * max(SAMPLE_COUNTS)
        return library_model.graph, profile_model(library_model, cluster.devices[0], largest=largest)
    from gpp_plugin.capture.coarsen import coarsen
    from gpp_plugin.capture.export import capture_model
    from gpp_plugin.integrations.huggingface.hf_models import (
        build_on_meta,
        make_example_batch,
        read_hf_config,
    )
    from gpp_plugin.library.named_models import CONFIG_DIR
    from gpp_plugin.profile.analytic_costs import analytic_profile

    name, length = HF_MODELS[model]
    module = build_on_meta(read_hf_config(CONFIG_DIR / f"{name}.json"))
    captured = capture_model(module, make_example_batch(module, num_samples=CAPTURED_SAMPLES, length=length))
    graph = coarsen(captured, granularity="node")
    profile = analytic_profile(
        graph, cluster.devices[0], sample_counts=SAMPLE_COUNTS, op_graph=captured.op_graph
    )
    return graph, profile
