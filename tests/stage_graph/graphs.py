"""Small stage graphs in double precision, with weights that depend on nothing but the stage's name."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import gpp_plugin

WIDTH, WORDS, TOKENS = 6, 11, 3
B, U = 8, 2


class Body(nn.Module):
    """Adds up what it is given, [samples, TOKENS, WIDTH] each, and passes it through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, **given: Tensor) -> Tensor:
        total = sum(value.to(self.first.weight.dtype) for value in given.values())
        return self.second(torch.tanh(self.first(total)))


class Split(Body):
    """Also says which of its results are large, as bool, and the position of the largest, as int64."""

    def forward(self, **given: Tensor) -> dict[str, Tensor]:
        hidden = super().forward(**given)
        return {"hidden": hidden, "is_large": hidden > 0.1, "largest": hidden.argmax(-1)}


class Choose(nn.Module):
    """Looks the chosen rows up in a table and masks them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, is_large: Tensor, largest: Tensor) -> tuple[Tensor]:
        return (torch.where(is_large, hidden, self.table(largest)),)


class Norm(nn.Module):
    """Normalises over the samples of a loss unit, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view(x.shape)


class Center(nn.Module):
    """Subtracts the mean of a loss unit's samples, and hands that on too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.3))

    def forward(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        mean = (normed * self.weight).mean(0, keepdim=True)
        return normed - mean, mean


class Prompt(nn.Module):
    """Something learned that depends on no input: the same for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH).view(1, 1, WIDTH))

    def forward(self) -> Tensor:
        return self.prompt


class Loss(nn.Module):
    """The mean square of what it is given less the target."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, target: Tensor, **given: Tensor) -> Tensor:
        return ((sum(given.values()) * self.scale - target) ** 2).mean()


class Contrast(nn.Module):
    """A loss over all pairs of a loss unit's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        scores = self.scale * left.flatten(1) @ right.flatten(1).T
        return nn.functional.cross_entropy(scores, torch.arange(len(left), device=left.device))


class _Shared(torch.autograd.Function):
    """A whole tensor that tensor ranks compute with: each has its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    """The sum of what tensor ranks have; its gradient is each one's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Cut(torch.autograd.Function):
    """A tensor rank's part of the tokens; the whole gradient is everyone's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: Any) -> Tensor:
        ctx.context = context
        return tensor.chunk(context.tensor_size, dim=1)[context.tensor_rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        parts = [torch.empty_like(gradient) for _ in range(ctx.context.tensor_size)]
        torch.distributed.all_gather(parts, gradient.contiguous(), group=ctx.context.tensor_group)
        return torch.cat(parts, dim=1), None


class ParallelBody(nn.Module):
    """`Body` with its layers shared out over the tensor ranks, and perhaps its result."""

    def __init__(self, context: Any, *, cuts: bool) -> None:
        super().__init__()
        whole = make(Body, context.stage)
        self.context, self.cuts = context, cuts
        rank, size = context.tensor_rank, context.tensor_size
        self.first = nn.Parameter(whole.first.weight.detach().chunk(size, dim=0)[rank].clone())
        self.first_bias = nn.Parameter(whole.first.bias.detach().chunk(size)[rank].clone())
        self.second = nn.Parameter(whole.second.weight.detach().chunk(size, dim=1)[rank].clone())
        self.second_bias = nn.Parameter(whole.second.bias.detach().clone())
        for parameter in (self.first, self.first_bias, self.second):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, **given: Tensor) -> Tensor:
        total = _Shared.apply(sum(given.values()), self.context.tensor_group)
        inner = torch.tanh(nn.functional.linear(total, self.first, self.first_bias))
        outer = _Summed.apply(nn.functional.linear(inner, self.second), self.context.tensor_group)
        result = outer + self.second_bias
        return _Cut.apply(result, self.context) if self.cuts else result


class ParallelMaker:
    def __init__(self, *, cuts: bool) -> None:
        self.cuts = cuts

    def __call__(self, context: Any) -> nn.Module:
        return ParallelBody(context, cuts=self.cuts)


class Words(nn.Module):
    """An embedding, its position bias the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.bias = nn.Parameter(torch.ones(1, TOKENS, WIDTH))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(ids), self.bias * 2.0


class Head(nn.Module):
    """Scores of words; the weight is tied to the embedding's in one of the graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, hidden: Tensor, ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


class Maker:
    """A factory: the module in double precision, its weights drawn from the stage's name."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        self.kind = kind

    def __call__(self, context: Any) -> nn.Module:
        return make(self.kind, context.stage)


def make(kind: Callable[[], nn.Module], name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(zlib.crc32(name.encode()))
        return kind().double()


@dataclass
class Given:
    """A stage of a test graph: the arguments of `StageGraph.stage`."""

    name: str
    kind: Callable[[], nn.Module]
    inputs: Any
    outputs: Any
    ranks: list[int]
    options: dict[str, Any] = field(default_factory=dict)


def body(name: str, inputs: Any, ranks: list[int], **options: Any) -> Given:
    return Given(name, Body, inputs, [f"{name}_out"], ranks, options)


GRAPHS: dict[str, list[Given]] = {
    "chain": [
        body("a", ["x"], [0]),
        body("b", ["a_out"], [1]),
        Given("end", Loss, ["b_out", "target"], ["loss"], [2]),
    ],
    "two_encoders": [
        body("left", ["x"], [0]),
        body("right", ["y"], [1]),
        Given("join", Contrast, {"left": "left_out", "right": "right_out"}, ["loss"], [2]),
    ],
    "skip": [
        body("a", ["x"], [0]),
        body("b", ["a_out"], [1]),
        Given("end", Loss, ["a_out", "b_out", "target"], ["loss"], [2]),
    ],
    "diamond": [
        body("a", ["x"], [0]),
        body("b", ["a_out"], [1], micro_batch_size=4),
        body("c", ["a_out"], [2]),
        Given("end", Loss, ["b_out", "c.c_out", "target"], ["loss"], [3]),
    ],
    "two_sinks": [
        body("a", ["x"], [0]),
        Given("one", Loss, ["a_out", "target"], ["loss"], [1]),
        Given("other", Loss, {"given": "a_out", "target": "y"}, ["loss"], [2]),
    ],
    "int_and_bool": [
        Given("a", Split, ["x"], ["hidden", "is_large", "largest"], [0]),
        Given("b", Choose, ["hidden", "is_large", "largest"], ["chosen"], [1]),
        Given("end", Loss, ["chosen", "target"], ["loss"], [2]),
    ],
    "degrees": [  # 2 -> 1 -> 2 -> 1, and micro-batches of 4, 2, 8 and a unit
        body("a", ["x"], [0, 1], micro_batch_size=4),
        body("b", ["a_out"], [2], micro_batch_size=2),
        body("c", ["b_out", "a_out"], [3, 4], micro_batch_size=8),
        Given("end", Loss, ["c_out", "target"], ["loss"], [5]),
    ],
    "tied": [
        Given("words", Words, ["ids"], ["embeds", "bias"], [0]),
        body("b", ["embeds", "bias"], [1, 2]),
        Given("last", Head, {"hidden": "b_out", "ids": "ids"}, ["loss", "logits"], [3], {"reported": ["logits"]}),
    ],
}  # fmt: skip
GRAPHS["prompt"] = [
    Given("p", Prompt, [], ["prompt"], [0]),
    body("b", ["x", "prompt"], [1], micro_batch_size=4),
    Given("end", Loss, ["b_out", "prompt", "target"], ["loss"], [2]),
]
GRAPHS["mixing"] = [
    Given("a", Norm, ["x"], ["normed"], [0, 1]),
    Given("b", Center, ["normed"], ["centered", "mean"], [2]),
    Given("end", Loss, ["centered", "mean", "target"], ["loss"], [3]),
]
GRAPHS["two_to_three"] = [
    body("a", ["x"], [0, 1], micro_batch_size=4),
    body("b", ["a_out"], [2, 3, 4], micro_batch_size=6),
    Given("end", Loss, ["b_out", "target"], ["loss"], [5]),
]
GRAPHS["two_tensor_ranks"] = [
    body("b", ["x"], [0, 1], tensor=2, sharded_outputs={"b_out": 1}),
    Given("end", Loss, ["b_out", "target"], ["loss"], [2]),
]
GRAPHS["tensor_on_four"] = [
    body("a", ["x"], [0]),
    body("b", ["a_out"], [1, 2], tensor=2, sharded_outputs={"b_out": 1}),
    Given("end", Loss, ["a_out", "b_out", "target"], ["loss"], [3]),
]
GRAPHS["tensor_on_eight"] = [  # data 1 -> tensor 2 -> data 2 x tensor 2 -> 1
    body("a", ["x"], [0]),
    body("b", ["a_out"], [1, 2], tensor=2, sharded_outputs={"b_out": 1}),
    body("c", ["a_out", "b_out"], [3, 4, 5, 6], tensor=2),
    Given("end", Loss, ["b_out", "c_out", "target"], ["loss"], [7]),
]
TIES = {"tied": [("words.embedding.weight", "last.head.weight")]}


def mini_batch_of(name: str) -> int:
    return 12 if name == "two_to_three" else B


def build_graph(name: str) -> gpp_plugin.StageGraph:
    graph = gpp_plugin.StageGraph(name)
    for given in GRAPHS[name]:
        cuts = "sharded_outputs" in given.options
        graph.stage(
            given.name,
            ParallelMaker(cuts=cuts) if "tensor" in given.options else Maker(given.kind),
            inputs=given.inputs,
            outputs=given.outputs,
            ranks=given.ranks,
            **given.options,
        )
    for tie in TIES.get(name, ()):
        graph.tie(*tie)
    return graph


def batch_of(name: str, *, tokens: int = TOKENS, seed: int = 0) -> dict[str, Tensor]:
    tokens += any("tensor" in given.options for given in GRAPHS[name])  # an even number
    generator = torch.Generator().manual_seed(seed)
    rows = mini_batch_of(name)
    if name == "tied":
        return {"ids": torch.randint(WORDS, (rows, tokens), generator=generator)}
    keys = {"two_encoders": ("x", "y"), "two_sinks": ("x", "y", "target")}.get(name, ("x", "target"))
    return {key: torch.randn(rows, tokens, WIDTH, generator=generator, dtype=torch.float64) for key in keys}


def in_single(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: rows.float() if rows.is_floating_point() else rows for key, rows in batch.items()}


class Whole(nn.Module):
    """The stages of a graph in one process, called one after the other; tied parameters are one."""

    def __init__(self, graph: gpp_plugin.StageGraph | str) -> None:
        super().__init__()
        graph = build_graph(graph) if isinstance(graph, str) else graph
        self._stages, self._losses = graph.stages, graph.losses or ("loss",)
        for stage in self._stages:
            module = make(Body, stage.name) if stage.tensor > 1 else stage.make
            if not isinstance(module, nn.Module):
                module = module(SimpleNamespace(stage=stage.name))
            self.add_module(stage.name, module)
        for first, *others in graph.ties:
            for old in map(self.get_parameter, others):
                for module in self.modules():
                    names = [name for name, own in module._parameters.items() if own is old]
                    module._parameters.update(dict.fromkeys(names, self.get_parameter(first)))

    def forward(self, **batch: Tensor) -> dict[str, Any]:
        known: dict[str, Any] = dict(batch)
        losses = []
        for stage in self._stages:
            made = self.get_submodule(stage.name)(**{k: known[n.split(".")[-1]] for k, n in stage.inputs})
            made = (made,) if isinstance(made, Tensor) else made
            for place, (key, name) in enumerate(stage.outputs):
                known[name] = made[key if isinstance(made, dict) else place]
                losses += [known[name]] if name in self._losses else []
        return {**known, "loss": sum(losses)}


class Once(torch.autograd.Function):
    """A product that lets go of its operands in its backward, which so runs once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.operands = [hidden, weight]
        return hidden @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        weight, hidden = ctx.operands.pop(), ctx.operands.pop()
        return gradient @ weight.T, hidden.flatten(0, -2).T @ gradient.flatten(0, -2)
