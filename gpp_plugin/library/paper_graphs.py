"""The papers' models as analytic graphs: GraphPipe's (appendix A.2, Figure 10) and AutoPipe's (Table I)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

from gpp_plugin.errors import PlanError, nearest
from gpp_plugin.library.amoebanet import amoebanet
from gpp_plugin.library.analytic_models import (
    AnalyticModel,
    BlockSpec,
    Divided,
    assemble,
    attention,
    check_granularity,
    linear,
    path_edges,
    transformer_layers,
)


def mmt(
    *,
    branches: int = 4,
    layers: int = 8,
    hidden: int = 1024,
    heads: int = 16,
    inner: int = 4096,
    length: int = 256,
    granularity: str = "layer",
) -> AnalyticModel:
    """Return the multi-modal transformer: branches of transformer layers, concatenated at the end."""
    check_granularity(granularity)
    specs: list[BlockSpec] = []
    edges: list[tuple[str, str]] = []
    for b in range(branches):
        path = transformer_layers(
            f"branch{b}.layers", layers, length=length, hidden=hidden, heads=heads, inner=inner,
            granularity=granularity,
        )  # fmt: skip
        specs += path
        edges += [*path_edges([spec.name for spec in path]), (path[-1].name, "head")]
    specs.append(linear("head", branches * hidden, 1))
    return assemble("mmt", specs, edges, loss="head")


def dlrm(
    *,
    dense: int = 7,
    sparse: int = 7,
    layers: int = 4,
    hidden: int = 4096,
    top_layers: int = 4,
    entries: int = 1_000_000,
    embedding: int = 64,
    bag: int = 100,
) -> AnalyticModel:
    """Return the recommendation model: dense branches, embedding bags, their interaction, a top network."""
    specs: list[BlockSpec] = []
    edges: list[tuple[str, str]] = []
    # Widths of a sample, elements: a dense branch stays at 4096; a sparse one looks up 100 rows of 64 and
    # concatenates them, 6400. Seven of each meet in the interaction: 7 * 4096 + 7 * 6400 = 73,472 inputs.
    #
    #   dense0 -> .. -> dense0 --.
    #   ...                       >-- interaction -> top -> head
    #   sparse0 -----------------'
    for b in range(dense):
        path = [linear(f"dense{b}.layers.{i}", hidden, hidden) for i in range(layers)]
        specs += path
        edges += [*path_edges([spec.name for spec in path]), (path[-1].name, "interaction")]
    for b in range(sparse):
        specs.append(
            BlockSpec(
                name=f"sparse{b}",
                output=(bag * embedding,),
                parameters=entries * embedding,
                saved=bag,
                elementwise=4 * bag * embedding,
                launches=2,
            )
        )
        # 256 MB of parameters and hardly any time: the branches that memory, not time, must place.
        edges.append((f"sparse{b}", "interaction"))
    width = dense * hidden + sparse * bag * embedding
    top = [linear("interaction", width, hidden)]
    top += [linear(f"top.layers.{i}", hidden, hidden) for i in range(top_layers - 1)]
    top.append(linear("head", hidden, 1))
    specs += top
    edges += path_edges([spec.name for spec in top])
    return assemble("dlrm", specs, edges, loss="head")


def candle_uno(*, branches: int = 7, layers: int = 4, hidden: int = 4096) -> AnalyticModel:
    """Return the drug-response model: branches of feed-forward layers, concatenated."""
    specs: list[BlockSpec] = []
    edges: list[tuple[str, str]] = []
    for b in range(branches):
        path = [linear(f"branch{b}.layers.{i}", hidden, hidden) for i in range(layers)]
        specs += path
        edges += [*path_edges([spec.name for spec in path]), (path[-1].name, "head")]
    specs.append(linear("head", branches * hidden, 1))
    return assemble("candle_uno", specs, edges, loss="head")


def two_branch(
    *,
    branches: int = 2,
    layers: int = 4,
    hidden: int = 1024,
    heads: int = 16,
    inner: int = 1024,
    length: int = 256,
) -> AnalyticModel:
    """Return the case study of section 7.5: (attention, linear, linear) repeated in every branch."""
    specs: list[BlockSpec] = []
    edges: list[tuple[str, str]] = []
    for b in range(branches):
        path: list[BlockSpec] = []
        for i in range(layers):
            name = f"branch{b}.layers.{i}"
            path += [
                attention(f"{name}.attention", length=length, hidden=hidden, heads=heads),
                linear(f"{name}.linear1", hidden, inner, rows=length),
                linear(f"{name}.linear2", inner, hidden, rows=length),
            ]
        specs += path
        edges += [*path_edges([spec.name for spec in path]), (path[-1].name, "head")]
    specs.append(linear("head", branches * hidden, 1))
    return assemble("two_branch", specs, edges, loss="head")


def transformer(
    *,
    layers: int = 32,
    hidden: int = 1024,
    heads: int = 16,
    inner: int = 4096,
    length: int = 256,
    vocabulary: int = 0,
    granularity: str = "layer",
    name: str = "transformer",
) -> AnalyticModel:
    """Return a sequential transformer (GraphPipe, A.3), with embedding and language head where it has words."""
    check_granularity(granularity)
    specs = transformer_layers(
        "layers", layers, length=length, hidden=hidden, heads=heads, inner=inner, granularity=granularity
    )
    if vocabulary:
        table = BlockSpec(
            name="embedding",
            output=(length, hidden),
            parameters=(vocabulary + length) * hidden,
            saved=length,
            elementwise=3 * length * hidden,
            divided=Divided(
                counts=(vocabulary,),
                parameters=vocabulary * hidden,
                saved=0,
                forward_sums=(length * hidden,),
                backward_sums=(),
            ),
        )
        # The head is tied to the embedding: its weight is held and reduced there as well.
        # By words: the loss sums a maximum, a sum and the label's score of each token; the input's gradient is summed.
        by_words = Divided(
            counts=(vocabulary,),
            parameters=hidden * vocabulary + vocabulary,
            saved=length * vocabulary,
            forward_sums=(3 * length,),
            backward_sums=(length * hidden,),
        )
        head = dataclasses.replace(linear("head", hidden, vocabulary, rows=length), divided=by_words)
        specs = [table, *specs, head]
    else:
        specs = [*specs, linear("head", hidden, 1)]
    return assemble(name, specs, path_edges([spec.name for spec in specs]), loss="head")


def gpt2_345m(*, length: int = 1024, granularity: str = "sub_layer") -> AnalyticModel:
    """Return GPT-2 345M (AutoPipe, Table I)."""
    return transformer(
        layers=24, hidden=1024, heads=16, inner=4096, length=length, vocabulary=50257, granularity=granularity,
        name="gpt2_345m",
    )  # fmt: skip


def gpt2_762m(*, length: int = 1024, granularity: str = "sub_layer") -> AnalyticModel:
    """Return GPT-2 762M (AutoPipe, Table I)."""
    return transformer(
        layers=36, hidden=1280, heads=20, inner=5120, length=length, vocabulary=50257, granularity=granularity,
        name="gpt2_762m",
    )  # fmt: skip


def gpt2_1p3b(*, length: int = 1024, granularity: str = "sub_layer") -> AnalyticModel:
    """Return GPT-2 1.3B (AutoPipe, Table I)."""
    return transformer(
        layers=24, hidden=2048, heads=16, inner=8192, length=length, vocabulary=50257, granularity=granularity,
        name="gpt2_1p3b",
    )  # fmt: skip


def bert_large(*, length: int = 512, granularity: str = "sub_layer") -> AnalyticModel:
    """Return BERT-large (AutoPipe, Table I)."""
    return transformer(
        layers=24, hidden=1024, heads=16, inner=4096, length=length, vocabulary=30522, granularity=granularity,
        name="bert_large",
    )  # fmt: skip


MODELS: dict[str, Callable[..., AnalyticModel]] = {
    "mmt": mmt,
    "dlrm": dlrm,
    "candle_uno": candle_uno,
    "two_branch": two_branch,
    "transformer": transformer,
    "gpt2_345m": gpt2_345m,
    "gpt2_762m": gpt2_762m,
    "gpt2_1p3b": gpt2_1p3b,
    "bert_large": bert_large,
    "amoebanet": amoebanet,
}


def build_model(name: str, **sizes: int | str) -> AnalyticModel:
    """Return a model of the library by name.

    Args:
        sizes: dimensions that differ from the paper's, by the names of the model's arguments.

    Raises:
        PlanError: no such model or dimension; the message has the nearest name.
    """
    # "gpt2-345m" on a command line is gpt2_345m here. Sizes are the builder's own keyword arguments, so its
    # signature is all that they are checked against.
    key = name.replace("-", "_")
    if key not in MODELS:
        raise PlanError(
            f"no model {name!r} in the library{nearest(key, MODELS)} (models: {', '.join(MODELS)})"
        )
    known = inspect.signature(MODELS[key]).parameters
    for size, value in sizes.items():
        if size not in known:
            raise PlanError(f"model {name!r} has no size {size!r}; its sizes are {', '.join(known)}")
        if isinstance(known[size].default, int) and (not isinstance(value, int) or value < 1):
            raise PlanError(f"model {name!r}: {size} is {value!r}; give a whole number of at least 1")
    return MODELS[key](**sizes)
