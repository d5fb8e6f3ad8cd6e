"""The papers' models as analytic graphs: GraphPipe's (appendix A.2, Figure 10) and AutoPipe's (Table I); and models
that do not fit on one device, whose branches are very unlike."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

from gpp_plugin.errors import PlanError, nearest
from gpp_plugin.ir.block_graph import SavedTensor
from gpp_plugin.library.analytic_models import (
    FLOAT,
    AnalyticModel,
    BlockSpec,
    CutPositions,
    Divided,
    Gemm,
    assemble,
    attention,
    linear,
    path_edges,
    transformer_layers,
)

# A convolutional network after AmoebaNet-D (Real et al., 2019), operator by operator: over 1,000 nodes.
#
# Cells of five sums of two operators each (arXiv:1802.01548) read the outputs of the two cells before them;
# reduction cells halve the image and double the channels. What autograd keeps is listed tensor by tensor, as
# PyTorch keeps it: a convolution, a batch normalisation and a pooling their input, a ReLU its result, a maximum
# also the places (int64). A convolution costs its im2col product (`gemm`), the rest its memory traffic.
#
# Batch normalisation takes its statistics over a micro-batch, as torchgpipe's does: it is not marked as an
# operator that mixes samples.


# A cell is five sums of two entries each, which make states 2 to 6. NORMAL's first pair, (1, "conv_1x1") and (1,
# "max_pool_3x3"), is state 2 = conv_1x1(state 1) + max_pool_3x3(state 1). The states of `..._OUTPUT` are
# concatenated: 4 of them with 240 channels each make the cell's 960.
NORMAL = (
    (1, "conv_1x1"), (1, "max_pool_3x3"), (1, "none"), (0, "conv_1x7_7x1"), (0, "conv_1x1"),
    (0, "conv_1x7_7x1"), (2, "max_pool_3x3"), (2, "none"), (1, "avg_pool_3x3"), (5, "conv_1x1"),
)  # fmt: skip
NORMAL_OUTPUT = (0, 3, 4, 6)
REDUCTION = (
    (0, "max_pool_2x2"), (0, "max_pool_3x3"), (2, "none"), (1, "conv_3x3"), (2, "conv_1x7_7x1"),
    (2, "max_pool_3x3"), (3, "none"), (1, "max_pool_2x2"), (2, "avg_pool_3x3"), (3, "conv_1x1"),
)  # fmt: skip
REDUCTION_OUTPUT = (4, 5, 6)
"""Operators as (state they read, kind), two a sum; states 0 and 1 are the cell's inputs."""

INT64 = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """A result: the operator that makes it ("" is the model's input), its channels and its side."""

    made_by: str
    channels: int
    side: int

    @property
    def elements(self) -> int:
        return self.channels * self.side * self.side


class _Builder:
    """Operators in execution order, what they read, and what is kept of it."""

    def __init__(self) -> None:
        self.specs: list[BlockSpec] = []
        self.edges: list[tuple[str, str]] = []
        self._keepers: dict[str, tuple[str, list[str], int]] = {}

    def add(
        self,
        name: str,
        reads: list[_Image],
        output: tuple[int, ...],
        *,
        gemm: Gemm | None = None,
        parameters: int = 0,
        moved: int = 0,
        keeps: tuple[_Image, ...] = (),
        keeps_result: bool = False,
        inside_bytes: int = 0,
    ) -> None:
        """Enter an operator.

        Args:
            moved: elements read and written outside the product.
            keeps: operands kept for backward; ``inside_bytes`` more that only it has.
        """
        # All sizes are of one sample: ``output`` (channels, side, side), ``keeps`` in elements of 4 bytes. A
        # convolution of (64, 28, 28) by 64 filters of 3 x 3 is a product of 784 x 576 x 64 with 36,864
        # parameters, and keeps its input:
        #
        #   saved tensor     made_by   kept_by              bytes
        #   <maker>:out      <maker>   [conv, next, ...]    64 * 784 * 4 = 200,704, charged to the first keeper
        #   <conv>:inside    <conv>    [conv]               ``inside_bytes``: a maximum's places (int64)
        #
        # One tensor kept by two operators is held once: `_keepers` has it once, under the name of what made
        # it, and only the operator that enters it first counts it in its ``saved``.
        elements = math.prod(output)
        charged = 0
        kept = [(image.made_by, image.elements * FLOAT) for image in keeps if image.made_by]
        if keeps_result:
            kept.append((name, elements * FLOAT))
        for maker, num_bytes in kept:
            tensor = f"{maker}:out"
            if tensor not in self._keepers:
                self._keepers[tensor] = maker, [], num_bytes
                charged += num_bytes
            if name not in self._keepers[tensor][1]:
                self._keepers[tensor][1].append(name)
        if inside_bytes:
            self._keepers[f"{name}:inside"] = name, [name], inside_bytes
        self.specs.append(
            BlockSpec(
                name=name,
                output=output,
                gemms=(gemm,) if gemm is not None else (),
                parameters=parameters,
                saved=(charged + inside_bytes) // FLOAT,
                elementwise=moved,
                launches=0 if gemm is not None else 1,
            )
        )
        self.edges += [(image.made_by, name) for image in dict.fromkeys(reads) if image.made_by]

    def saved(self) -> list[SavedTensor]:
        """Return what is kept, tensor by tensor."""
        return [
            SavedTensor(name=name, made_by=maker, kept_by=tuple(keepers), bytes=num_bytes)
            for name, (maker, keepers, num_bytes) in self._keepers.items()
        ]

    def relu(self, name: str, image: _Image) -> _Image:
        self.add(name, [image], _shape(image), moved=2 * image.elements, keeps_result=True)
        return _Image(made_by=name, channels=image.channels, side=image.side)

    def conv(
        self, name: str, image: _Image, channels: int, *, kernel: tuple[int, int] = (1, 1), stride: int = 1
    ) -> _Image:
        made = _Image(made_by=name, channels=channels, side=-(-image.side // stride))
        fan_in = image.channels * kernel[0] * kernel[1]
        self.add(
            name, [image], _shape(made), gemm=Gemm(rows=made.side * made.side, k=fan_in, n=channels),
            parameters=fan_in * channels, keeps=(image,),
        )  # fmt: skip
        return made

    def norm(self, name: str, image: _Image) -> _Image:
        self.add(
            name, [image], _shape(image), parameters=2 * image.channels, moved=4 * image.elements, keeps=(image,)
        )  # fmt: skip
        return _Image(made_by=name, channels=image.channels, side=image.side)

    def pool(self, name: str, image: _Image, *, stride: int, is_max: bool) -> _Image:
        made = _Image(made_by=name, channels=image.channels, side=-(-image.side // stride))
        self.add(
            name, [image], _shape(made), moved=image.elements + made.elements, keeps=(image,),
            inside_bytes=made.elements * INT64 if is_max else 0,
        )  # fmt: skip
        return made

    def relu_conv_norm(
        self, name: str, image: _Image, channels: int, *, kernel: tuple[int, int] = (1, 1), stride: int = 1
    ) -> _Image:
        active = self.relu(f"{name}.relu", image)
        return self.norm(
            f"{name}.norm", self.conv(f"{name}.conv", active, channels, kernel=kernel, stride=stride)
        )

    def operator(self, name: str, kind: str, image: _Image, channels: int, stride: int) -> _Image:
        """Enter one of the operators that cells are made of."""
        if kind == "none":
            return image if stride == 1 else self.relu_conv_norm(name, image, channels, stride=2)
        if "pool" in kind:
            return self.pool(name, image, stride=stride, is_max=kind.startswith("max"))
        if kind == "conv_1x1":
            return self.relu_conv_norm(name, image, channels, stride=stride)
        narrow = channels // 4
        image = self.relu_conv_norm(f"{name}.down", image, narrow)
        kernels = ((3, 3),) if kind == "conv_3x3" else ((1, 7), (7, 1))
        for i, kernel in enumerate(kernels):
            step = stride if i == 0 else 1
            image = self.relu_conv_norm(f"{name}.kernel{i}", image, narrow, kernel=kernel, stride=step)
        return self.relu_conv_norm(f"{name}.up", image, channels)

    def cell(self, name: str, before: _Image, image: _Image, channels: int, *, is_reduction: bool) -> _Image:
        """Enter a cell that reads the outputs of the two cells before it."""
        # Two inputs, brought to this cell's channels and side: ``before`` may still be twice as large, where
        # the cell between them has reduced. Before 480 x 28 x 28 and image 960 x 14 x 14 both become
        # ``channels`` x 14 x 14.
        stride = before.side // image.side  # 2 where the cell before this one has reduced
        states = [
            self.relu_conv_norm(f"{name}.input0", before, channels, stride=stride)
            if (before.channels, stride) != (channels, 1)
            else before,
            self.relu_conv_norm(f"{name}.input1", image, channels),
        ]
        operators, output = (REDUCTION, REDUCTION_OUTPUT) if is_reduction else (NORMAL, NORMAL_OUTPUT)
        for i in range(0, len(operators), 2):
            terms = []
            for j, (state, kind) in enumerate(operators[i : i + 2]):
                # Only reads of the cell's inputs reduce; later states are small already.
                step = 2 if is_reduction and state < 2 else 1
                terms.append(self.operator(f"{name}.op{i + j}", kind, states[state], channels, step))
            total = f"{name}.add{i // 2}"
            self.add(total, terms, _shape(terms[0]), moved=3 * terms[0].elements)
            states.append(_Image(made_by=total, channels=channels, side=terms[0].side))
        parts = [states[i] for i in output]
        joined = _Image(
            made_by=f"{name}.cat", channels=sum(part.channels for part in parts), side=parts[-1].side
        )
        self.add(joined.made_by, parts, _shape(joined), moved=2 * joined.elements)
        return joined


def _shape(image: _Image) -> tuple[int, ...]:
    return image.channels, image.side, image.side


def amoebanet(
    *, layers: int = 18, filters: int = 120, image: int = 224, classes: int = 1000
) -> AnalyticModel:
    """Return the network operator by operator (28 million parameters, as DawnPiper trains it).

    Args:
        layers: normal cells, a multiple of three.

    Raises:
        PlanError: ``layers`` is no multiple of three, or ``filters`` of 8.
    """
    if layers < 3 or layers % 3 or filters < 8 or filters % 8:
        raise PlanError(
            f"amoebanet: {layers} layers and {filters} filters; give a multiple of 3 and a multiple of 8"
        )
    builder = _Builder()
    pixels = _Image(made_by="", channels=3, side=image)
    first = builder.norm(
        "stem.norm", builder.conv("stem.conv", pixels, filters // 4, kernel=(3, 3), stride=2)
    )
    # Two reductions follow the stem at once, so cells work on an eighth of the image's side: 224 -> 112
    # (stem) -> 56 -> 28, then 28, 14 and 7 in the three thirds.
    before, last, channels, number = first, first, filters // 4, 0
    third = [False] * (layers // 3)
    for is_reduction in (True, True, *third, True, *third, True, *third):
        channels *= 2 if is_reduction else 1
        made = builder.cell(f"cells.{number}", before, last, channels, is_reduction=is_reduction)
        before, last, number = last, made, number + 1
    builder.add("head.pool", [last], (last.channels,), moved=last.elements)
    pooled = _Image(made_by="head.pool", channels=last.channels, side=1)
    builder.add(
        "head.linear", [pooled], (classes,), gemm=Gemm(rows=1, k=last.channels, n=classes),
        parameters=last.channels * classes + classes, keeps=(pooled,),
    )  # fmt: skip
    logits = _Image(made_by="head.linear", channels=classes, side=1)
    builder.add("loss", [logits], (1,), moved=3 * classes, inside_bytes=classes * FLOAT)
    return assemble("amoebanet", builder.specs, builder.edges, loss="loss", saved=builder.saved())


def _joined(name: str, paths: list[list[BlockSpec]], width: int) -> AnalyticModel:
    """Return branches of blocks, each ``width`` wide at its end, concatenated before a linear head."""
    edges = [edge for path in paths for edge in path_edges([*(spec.name for spec in path), "head"])]
    specs = [spec for path in paths for spec in path]
    return assemble(name, [*specs, linear("head", len(paths) * width, 1)], edges, loss="head")


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
    paths = [
        transformer_layers(
            f"branch{b}.layers", layers, length=length, hidden=hidden, heads=heads, inner=inner,
            granularity=granularity,
        )
        for b in range(branches)
    ]  # fmt: skip
    return _joined("mmt", paths, hidden)


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
    paths = [
        [linear(f"branch{b}.layers.{i}", hidden, hidden) for i in range(layers)] for b in range(branches)
    ]
    return _joined("candle_uno", paths, hidden)


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
    paths: list[list[BlockSpec]] = [[] for _ in range(branches)]
    for b, path in enumerate(paths):
        for i in range(layers):
            name = f"branch{b}.layers.{i}"
            path += [
                attention(f"{name}.attention", length=length, hidden=hidden, heads=heads),
                linear(f"{name}.linear1", hidden, inner, rows=length),
                linear(f"{name}.linear2", inner, hidden, rows=length),
            ]
    return _joined("two_branch", paths, hidden)


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
    specs = transformer_layers(
        "layers", layers, length=length, hidden=hidden, heads=heads, inner=inner, granularity=granularity
    )
    if vocabulary:
        table, head = _words(vocabulary, length, hidden)
        specs = [table, *specs, head]
    else:
        specs = [*specs, linear("head", hidden, 1)]
    return assemble(name, specs, path_edges([spec.name for spec in specs]), loss="head")


def _words(
    vocabulary: int, length: int, hidden: int, *, has_others: bool = False
) -> tuple[BlockSpec, BlockSpec]:
    """Return the embedding and the language head of a model of texts.

    Args:
        has_others: images or sounds are put between the words, for which all of them must be there.
    """
    tokens = length * hidden
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
            scattered=() if has_others else (tokens,),
            forward_sums=(tokens,) if has_others else (),
        ),
        cut=None if has_others else CutPositions(),
    )
    # The head is tied to the embedding: its weight is held and reduced there as well.
    # By words: the loss takes each token's largest score, and sums its scores and the label's; the input is gathered.
    by_words = Divided(
        counts=(vocabulary,),
        parameters=hidden * vocabulary + vocabulary,
        saved=tokens + length * vocabulary,
        gathered=(tokens,),
        forward_sums=(length, 2 * length),
        begun_whole=tokens,
        beside=tokens * vocabulary,
    )
    head = linear("head", hidden, vocabulary, rows=length)
    return table, dataclasses.replace(head, divided=by_words, cut=CutPositions(sums=(4,)))


def _tower(name: str, layers: int, length: int, hidden: int, heads: int, granularity: str) -> list[BlockSpec]:
    """Return the layers of an encoder, four times as wide inside."""
    return transformer_layers(
        name, layers, length=length, hidden=hidden, heads=heads, inner=4 * hidden, granularity=granularity
    )


def multimodal(
    *,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    inner: int = 16512,
    length: int = 2048,
    vocabulary: int = 32064,
    vision_layers: int = 24,
    vision_hidden: int = 1024,
    vision_heads: int = 16,
    patches: int = 576,
    audio_layers: int = 1,
    audio_hidden: int = 1280,
    frames: int = 1500,
    granularity: str = "layer",
    name: str = "multimodal",
) -> AnalyticModel:
    """Return encoders of images and of sound (1 layer: none) before a language model that reads their outputs.

    Args:
        inner: of two products; a gated layer of three with grouped heads has as many parameters with another.
    """
    encoders = {"vision": (vision_layers, patches, vision_hidden, vision_heads)}
    if audio_layers > 1:
        encoders["audio"] = audio_layers, frames, audio_hidden, audio_hidden // 80
    table, head = _words(vocabulary, length, hidden, has_others=True)
    text = transformer_layers(
        "layers", layers, length=length, hidden=hidden, heads=heads, inner=inner, granularity=granularity
    )
    specs = [table, *text, head]
    edges = path_edges([spec.name for spec in specs])
    for branch, (count, tokens, width, own_heads) in encoders.items():
        path = _tower(branch, count, tokens, width, own_heads, granularity)
        path.append(linear(f"{branch}.projector", width, hidden, rows=tokens))
        edges += path_edges([*(spec.name for spec in path), table.name])
        specs = [*path, *specs]
    return assemble(name, specs, edges, loss="head")


def two_towers(
    *,
    layers: int = 48,
    hidden: int = 5120,
    heads: int = 40,
    length: int = 257,
    text_layers: int = 32,
    text_hidden: int = 1280,
    text_heads: int = 20,
    text_length: int = 77,
    granularity: str = "layer",
) -> AnalyticModel:
    """Return a large image tower beside a small text tower (EVA-CLIP-18B), joined by a head without a contrast."""
    towers = {
        "vision": (layers, length, hidden, heads),
        "text": (text_layers, text_length, text_hidden, text_heads),
    }
    paths = []
    for branch, (count, tokens, width, own_heads) in towers.items():
        path = _tower(branch, count, tokens, width, own_heads, granularity)
        paths.append([*path, linear(f"{branch}.projection", width, 1536)])
    return _joined("two_towers", paths, 1536)


def _multimodal(name: str, **sizes: int) -> Callable[..., AnalyticModel]:
    """Return what makes a model of these sizes, of texts of 2,048 tokens unless the user says otherwise."""

    def make(*, length: int = 2048, granularity: str = "layer") -> AnalyticModel:
        return multimodal(name=name, length=length, granularity=granularity, **sizes)

    return make


def _table_1(
    name: str, layers: int, hidden: int, heads: int, *, words: int, tokens: int
) -> Callable[..., AnalyticModel]:
    """Return what makes a model of AutoPipe's Table I, of texts of ``tokens`` unless the user says otherwise."""

    def make(*, length: int = tokens, granularity: str = "sub_layer") -> AnalyticModel:
        return transformer(
            layers=layers, hidden=hidden, heads=heads, inner=4 * hidden, length=length, vocabulary=words,
            granularity=granularity, name=name,
        )  # fmt: skip

    return make


MODELS: dict[str, Callable[..., AnalyticModel]] = {
    "mmt": mmt,
    "dlrm": dlrm,
    "candle_uno": candle_uno,
    "two_branch": two_branch,
    "transformer": transformer,
    "gpt2_345m": _table_1("gpt2_345m", 24, 1024, 16, words=50257, tokens=1024),
    "gpt2_762m": _table_1("gpt2_762m", 36, 1280, 20, words=50257, tokens=1024),
    "gpt2_1p3b": _table_1("gpt2_1p3b", 24, 2048, 16, words=50257, tokens=1024),
    "bert_large": _table_1("bert_large", 24, 1024, 16, words=30522, tokens=512),
    "amoebanet": amoebanet,
    "two_towers": two_towers,
    "multimodal": multimodal,
    "llava_34b": _multimodal("llava_34b", layers=60, hidden=7168, heads=56, inner=24576, vocabulary=64064),
    "vl_72b": _multimodal(
        "vl_72b",
        layers=80,
        hidden=8192,
        heads=64,
        inner=37184,
        vocabulary=152064,
        vision_layers=32,
        vision_hidden=1280,
        patches=1024,
    ),
    "vit22b_llama70b": _multimodal(
        "vit22b_llama70b",
        layers=80,
        hidden=8192,
        heads=64,
        inner=35840,
        vocabulary=128320,
        vision_layers=48,
        vision_hidden=6144,
        vision_heads=48,
        patches=256,
    ),
    "omni_7b": _multimodal(
        "omni_7b", vision_layers=32, vision_hidden=1280, patches=1024, audio_layers=32, audio_hidden=1280
    ),
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
