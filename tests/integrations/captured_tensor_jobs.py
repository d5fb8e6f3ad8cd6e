"""What each rank runs in the tests of captured stages on tensor ranks; importable by the processes that run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.errors import ConfigError
from gpp_plugin.runtime.tensor_ranks import GRADIENT, RESULT, own_part, parameter_shards
from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build

STEPS = 5


def config(block: dict[str, Any], *, zero: int = 0, clipping: float = 0.0) -> dict[str, Any]:
    return config_of(zero_optimization={"stage": zero}, gradient_clipping=clipping, block=block)


def shards_of(engine: Any) -> dict[str, Any]:
    """Return what this rank holds in parts, by name: how it is cut, its position, and the number of ranks."""
    reference = engine._rank_runner.reference
    found = {}
    for index in engine.rank_engine.indices:
        stage = engine._plan.stages[index]
        for name, shard in parameter_shards(reference, engine._plan, index).items():
            found[name] = (shard, stage.position(engine.global_rank)[1], stage.tensor)
    return found


def part_of(whole: Tensor, how: Any) -> Tensor:
    return whole if how is None else own_part(whole, *how)


def train_all(cases: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train every case: (model, block of the configuration, options of the rest)."""
    return {case: train(*given, f"{directory}/{case.replace(' ', '-')}") for case, given in cases.items()}


def train(name: str, block: dict[str, Any], options: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train five steps, export, evaluate; the first step's gradients, and how they are cut."""
    model, make_batch = build(name, layers=1)
    batches = [make_batch(B, seed) for seed in range(STEPS)]
    block = {**block, "profile_dir": f"{directory}/../profiles"}  # every model is measured once
    engine = make_engine(model, batches[0], config(block, **options))
    engine.retain_gradients()
    losses = steps(engine, batches[:1])
    answer = {
        "gradients": {name: gradient.clone() for name, gradient in engine.gradients.items()},
        "shards": shards_of(engine),
        "tensor": [stage.tensor for stage in engine._plan.stages],
    }
    losses += steps(engine, batches[1:])
    answer["losses"] = losses
    answer["evaluated"] = {n: float(engine.eval_batch(iter([make_batch(n, n)]))) for n in (B, 5)}
    engine.save_pretrained(f"{directory}/export")
    answer["exported"] = exported(f"{directory}/export", model)
    answer["gathered"] = engine.gather_state_dict()
    answer["held"] = {n: value.clone() for n, value in engine.module_state_dict().items()}
    engine.destroy()
    return answer


def exported(directory: str, model: Any) -> dict[str, Tensor]:
    """Return an export as HuggingFace reads it, by all names."""
    return dict(type(model).from_pretrained(directory).state_dict())


# ---- more than training as it is ----------------------------------------------------------------------------

TWO = {"stages": 1, "data_parallel": 1, "tensor_parallel": 2}


def count_sums(name: str, block: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train on one mini-batch; the bytes that the ranks summed, and those that the graph says."""
    model, make_batch = build(name, layers=1)
    engine = make_engine(model, make_batch(B), config({**block, "profile_dir": f"{directory}/profiles"}))
    steps(engine, [make_batch(B)])
    graph = engine._rank_runner.reference.block_graph
    answer = {"forward": 0, "backward": 0, "planned forward": 0.0, "planned backward": 0.0}
    for index in engine.rank_engine.indices:
        stage = engine._plan.stages[index]
        sent = engine._source._job.links.of(stage).sent_bytes
        answer["forward"] += sent.get(RESULT, 0)
        answer["backward"] += sent.get(GRADIENT, 0)
        share = B / stage.degree / graph.num_samples
        for own in graph.sharding:
            if own.block in stage.blocks and stage.tensor in own.degrees:
                answer["planned forward"] += own.forward_sum_bytes * share
                answer["planned backward"] += own.backward_sum_bytes * share
    engine.destroy()
    return answer


def drop(directory: str) -> dict[str, list[float]]:
    """Train with dropout, twice alike and once with every block run again, from unlike states of the generators."""
    answers = {}
    for run, memory in (("first", "off"), ("second", "off"), ("again", "full")):
        model, make_batch = build("gpt2", layers=1, dropout=0.1)
        block = {**TWO, "memory": {"recompute": memory}, "profile_dir": f"{directory}/profiles"}
        engine = make_engine(model, make_batch(B), config(block))
        torch.manual_seed(engine.global_rank)  # the group's first rank draws for all
        answers[run] = steps(engine, [make_batch(B, seed) for seed in range(3)])
        engine.destroy()
    return answers


def at_lengths(directory: str) -> list[float]:
    """Train on mini-batches of several lengths."""
    model, make_batch = build("llama", layers=1)
    block = {**TWO, "profile_dir": f"{directory}/profiles"}
    engine = make_engine(model, make_batch(B), config(block))
    losses = steps(engine, batches_of_lengths(make_batch))
    engine.destroy()
    return losses


def batches_of_lengths(make_batch: Any) -> list[dict[str, Tensor]]:
    batches = [make_batch(B, seed) for seed in range(4)]
    lengths = (8, 6, 7, 5)
    return [{k: v[:, :n] for k, v in batch.items()} for batch, n in zip(batches, lengths, strict=True)]


def go_on(directory: str) -> dict[str, list[float]]:
    """Save on two tensor ranks; go on there, on two data positions, and from these on tensor ranks once more."""
    whole = {"stages": 1, "data_parallel": 2, "tensor_parallel": 1}
    answers = {}
    for run, block, source, target in (
        ("first", TWO, None, "one"),
        ("same", TWO, "one", None),
        ("whole", whole, "one", "two"),
        ("back", TWO, "two", None),
    ):
        model, make_batch = build("gpt2", layers=1)
        batches = [make_batch(B, seed) for seed in range(6)]
        given = config({**block, "profile_dir": f"{directory}/profiles"}, zero=1)
        engine = make_engine(model, batches[0], given)
        if source is None:
            steps(engine, batches[:2])
        else:
            engine.load_checkpoint(f"{directory}/{source}")
        if target is not None:
            engine.save_checkpoint(f"{directory}/{target}")
        answers[run] = steps(engine, batches[2:])
        engine.destroy()
    return answers


class Pair(nn.Module):
    def __init__(self, *, sums: bool) -> None:
        super().__init__()
        self.up, self.down, self.sums = nn.Linear(6, 8), nn.Linear(8, 6), sums

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.tanh(self.up(x))
        if self.sums:
            inner = inner.cumsum(-1)
        return self.down(inner), inner


class Inside(nn.Module):
    """Yields what is made between two linear operators, when it is asked for."""

    def __init__(self, *, sums: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.pair = Pair(sums=sums)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outer, inner = self.pair(x)
        return {"loss": ((outer - labels) ** 2).mean(), "inner": inner}


def inside_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {key: torch.randn(B, 6, generator=generator) for key in ("x", "labels")}


def evaluate_inside(directory: str) -> dict[str, Any]:
    """Ask for a tensor of which each rank has a part in training; and for tensor ranks where nothing is shared out."""
    engine = make_engine(Inside(), inside_batch(), config({**TWO, "profile_dir": f"{directory}/profiles"}))
    held = {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
    loss, inner = engine.eval_batch(iter([inside_batch()]), return_logits=True, outputs=("inner",))
    trained = steps(engine, [inside_batch()] * 2)
    engine.destroy()
    try:
        make_engine(Inside(sums=True), inside_batch(), config(TWO))
        refused = ""
    except ConfigError as error:
        refused = str(error)
    return {"held": held, "loss": float(loss), "inner": inner, "trained": trained, "refused": refused}
