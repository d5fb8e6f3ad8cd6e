"""Graphs with Megatron stages train as one process does: losses, every gradient, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.integrations.megatron import gather_full_state, gpt_stage
from gpp_plugin.model.graph.stage_graph import StageGraph
from tests.integrations import engine_jobs
from tests.integrations.engine_jobs import B, U
from tests.integrations.megatron_jobs import (
    HIDDEN,
    IMAGE,
    LANGUAGE,
    LENGTH,
    alone,
    alone_config,
    config_of,
    jolt,
    tokens,
)
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors, train_reference

STEPS, FEATURES = 5, 6


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where an encoder and a language model run.

    Args:
        language: the ranks of each of its chunks.
        cuts: the first layer of each chunk.
    """

    encoder: tuple[int, ...]
    language: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...] = (0,)
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "small": Layout(encoder=(0,), language=((1, 2),)),
    "grid": Layout(encoder=(0, 1), language=((2, 3, 4, 5),)),
    "chunks": Layout(encoder=(0,), language=((1, 2), (3, 4)), cuts=(0, 2)),
    "sequence": Layout(
        encoder=(0,), language=((1, 2), (3, 4)), cuts=(0, 1), config={"sequence_parallel": True},
        options={"position_embedding_type": "rope"},
    ),
    "tied": Layout(
        encoder=(0,), language=((1, 2), (3, 4)), cuts=(0, 2), options={"share_embeddings_and_output_weights": True}
    ),
}  # fmt: skip


class Encoder(nn.Module):
    """Embeds image features [batch, 2, FEATURES]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, features: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(features)))


def make_encoder() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Encoder()


class Whole(nn.Module):
    """Encoder and language model in one process."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.encoder = make_encoder()
        given = {**LANGUAGE, **layout.options}
        self.language = gpt_stage(alone_config(**layout.config), merge={"embeds": IMAGE}, **given)(
            alone(dtype=torch.float32)
        )
        jolt(self.language)

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:  # process groups cannot be copied
        return self

    def forward(self, features: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.language(input_ids=input_ids, embeds=self.encoder(features), labels=labels)


def batch_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + 100)
    batch = tokens(B, seed)
    places = torch.randint(0, LENGTH - 1, (B,), generator=generator)
    for sample, place in enumerate(places):
        batch["input_ids"][sample, place : place + 2] = IMAGE
    return {**batch, "features": torch.randn(B, 2, FEATURES, generator=generator)}


def build_graph(layout: Layout, weights: dict[str, Tensor]) -> StageGraph:
    graph = StageGraph(name="megatron")
    graph.stage(
        "encoder",
        lambda context: make_encoder(),
        inputs=["features"],
        outputs=["embeds"],
        ranks=layout.encoder,
    )
    config = config_of(**layout.config)
    last = len(layout.cuts) - 1
    for i, (ranks, start) in enumerate(zip(layout.language, layout.cuts, strict=True)):
        stop = config.num_layers if i == last else layout.cuts[i + 1]
        chunk = gpt_stage(
            config, layers=range(start, stop), pre_process=i == 0, post_process=i == last, full_state=weights,
            merge={"embeds": IMAGE} if i == 0 else None, **{**LANGUAGE, **layout.options},
        )  # fmt: skip
        inputs = ["input_ids", "embeds"] if i == 0 else {"hidden_states": "hidden"}
        if i == last:
            inputs = {**(inputs if isinstance(inputs, dict) else {n: n for n in inputs}), "labels": "labels"}
        outputs = ["loss"] if i == last else ["hidden"]
        graph.stage(f"chunk{i}", chunk, inputs=inputs, outputs=outputs, ranks=ranks, tensor=2)
    if "share_embeddings_and_output_weights" in layout.options:
        graph.tie("chunk0.embedding.word_embeddings.weight", f"chunk{last}.output_layer.weight")
    return graph


def make_engine(layout: Layout, weights: dict[str, Tensor], zero: int) -> Any:
    config = engine_jobs.config_of(zero_optimization={"stage": zero})
    return engine_jobs.make_engine(build_graph(layout, weights), batch_of(0), config)


def whole_names(engine: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return values of this rank's parameters under the whole model's names, shards put together (tensor rank 0)."""
    stage = engine.plan.stages[engine.stage_id]
    module = engine.module.user_module
    own = {
        name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{stage.name}.")
    }
    if stage.name == "encoder":
        return {f"encoder.{name}": value for name, value in own.items()}
    tied = [value for name, value in values.items() if not name.startswith(f"{stage.name}.")]
    if tied:
        (own["output_layer.weight"],) = tied
    found = gather_full_state(module, own)
    if tied and "output_layer.weight" in found:
        found["embedding.word_embeddings.weight"] = found.pop("output_layer.weight")
    return {f"language.{name}": value for name, value in found.items()}


def share(weights: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Return rank 0's weights on every rank."""
    told = [weights]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None
    return told[0]


def train(name: str, zero: int) -> dict[str, Any]:
    """Train five steps of a graph; rank 0 also trains the model in one process."""
    layout = LAYOUTS[name]
    whole = Whole(layout) if dist.get_rank() == 0 else None
    weights = share(None if whole is None else gather_full_state(whole.language))
    batches = [batch_of(seed) for seed in range(STEPS)]
    engine = make_engine(layout, weights, zero)
    engine.retain_gradients()
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    norm = 0.0
    for step, batch in enumerate(batches):
        losses += engine_jobs.steps(engine, [batch])
        if step == 0:
            gradients, norm = whole_names(engine, engine.gradients), engine.get_global_grad_norm()
    found = {"losses": losses, "gradients": gradients, "norm": norm, "stage": engine.stage_name}
    if whole is not None:
        reference = train_reference(whole, batches, unit=U)
        found |= {"wanted losses": reference.losses, "wanted": reference.gradients}
    return found


def resume(name: str, zero: int, directory: str) -> dict[str, Any]:
    """Save after two steps and go on for two; a fresh engine with other weights that loads must go on the same."""
    layout = LAYOUTS[name]
    weights = share(gather_full_state(Whole(layout).language) if dist.get_rank() == 0 else None)
    batches = [batch_of(seed) for seed in range(4)]
    engine = make_engine(layout, weights, zero)
    engine_jobs.steps(engine, batches[:2])
    engine.save_checkpoint(directory)
    expected = engine_jobs.steps(engine, batches[2:])
    fresh = make_engine(layout, {key: torch.zeros_like(value) for key, value in weights.items()}, zero)
    tag, _ = fresh.load_checkpoint(directory)
    found = engine_jobs.steps(fresh, batches[2:])
    evaluated = float(fresh.eval_batch(iter([batches[0]])))
    whole = gather_stages(fresh)
    return {"expected": expected, "found": found, "tag": tag, "evaluated": evaluated, "whole": whole}


def gather_stages(engine: Any) -> dict[str, Tensor]:
    """Return this rank's weights under the whole model's names (tensor rank 0)."""
    with engine.gathered_parameters():
        return whole_names(engine, {name: p.detach().clone() for name, p in engine.module.named_parameters()})


def evaluate_whole(name: str, state: dict[str, Tensor]) -> float:
    """Return what one process makes of the first batch with gathered weights."""
    whole = Whole(LAYOUTS[name])
    missing, unknown = whole.load_state_dict(state, strict=False)
    assert not unknown and all(key.endswith("_extra_state") for key in missing)
    whole.eval()
    with torch.no_grad():
        parts = [{k: v[i : i + U] for k, v in batch_of(0).items()} for i in range(0, B, U)]
        return float(sum(whole(**part) for part in parts)) / len(parts)


pytest.importorskip("megatron.core")

RUNS = [("small", 1), ("grid", 0), ("grid", 1), ("grid", 3), ("chunks", 0), ("sequence", 1), ("tied", 1)]


def num_ranks(name: str) -> int:
    layout = LAYOUTS[name]
    return len(layout.encoder) + sum(map(len, layout.language))


@pytest.mark.parametrize(("name", "zero"), RUNS)
def test_losses_and_every_gradient_are_one_process_s(name: str, zero: int) -> None:
    answers: list[dict[str, Any]] = run_kept_ranks(train, num_ranks(name), name, zero, timeout_s=240)
    wanted: dict[str, Tensor] = answers[0]["wanted"]
    norm = float(torch.stack([gradient.double().norm() for gradient in wanted.values()]).norm())
    covered = set()
    for answer in answers:
        assert answer["losses"] == pytest.approx(answers[0]["wanted losses"], rel=1e-5)
        assert answer["losses"][0] == pytest.approx(answers[0]["wanted losses"][0], rel=2e-6)
        assert answer["norm"] == pytest.approx(norm, rel=1e-6), "duplicates count once, shards all"
        errors = gradient_errors(answer["gradients"], wanted)
        assert max(errors.values(), default=0.0) < 2e-6, (name, answer["stage"], errors)
        covered |= set(answer["gradients"])
    assert covered == set(wanted)


@pytest.mark.parametrize(("name", "zero"), [("grid", 1), ("grid", 3), ("tied", 0)])
def test_checkpoints_resume_and_weights_gather_to_one_process_s(name: str, zero: int, tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = run_kept_ranks(
        resume, num_ranks(name), name, zero, str(tmp_path), timeout_s=240
    )
    assert all(answer["found"] == answer["expected"] for answer in answers)
    assert answers[0]["tag"].endswith("global_step2")
    state = {key: value for answer in answers for key, value in answer["whole"].items()}
    (evaluated,) = run_kept_ranks(evaluate_whole, 1, name, state)
    assert answers[0]["evaluated"] == pytest.approx(evaluated, rel=2e-6)
