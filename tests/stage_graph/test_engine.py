"""Stage graphs behind `deepspeed.initialize`: steps, shapes, clipping, checkpoints, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.ranks import run_kept_ranks
from tests.reference import units_of
from tests.stage_graph import jobs
from tests.stage_graph.graphs import U, Whole, batch_of, in_single

NEAR = 1e-5


def reference_steps(
    name: str, batches: list[dict[str, Tensor]], clip: float = 0.0
) -> tuple[list[float], list[float]]:
    model = Whole(name).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses, norms = [], []
    for batch in map(in_single, batches):
        optimizer.zero_grad()
        units = units_of(batch, U)
        parts = [model(**unit)["loss"] / len(units) for unit in units]
        sum(parts).backward()  # type: ignore[union-attr]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        optimizer.step()
        losses.append(sum(float(part.detach()) for part in parts))
    return losses, norms


@pytest.mark.parametrize("zero", [0, 1])
def test_steps_of_several_lengths(zero: int) -> None:
    answers = run_kept_ranks(jobs.train_lengths, 4, zero)
    batches = [batch_of("diamond", tokens=tokens, seed=tokens) for tokens in (3, 5, 2, 5, 3)]
    losses, norms = reference_steps("diamond", batches, clip=0.05)
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=NEAR)
        assert answer["norms"] == pytest.approx(norms, rel=NEAR)
    assert [answer["stage"] for answer in answers] == ["a", "b", "c", "end"]
    assert [answer["first"] for answer in answers] == [True, False, False, False]


def test_checkpoint_and_reload_with_a_tied_embedding(tmp_path: Path) -> None:
    answers = run_kept_ranks(jobs.train_and_reload, 4, str(tmp_path))
    losses, _ = reference_steps("tied", [batch_of("tied", seed=seed) for seed in range(6)])
    for answer in answers:
        assert answer["first"] + answer["rest"] == pytest.approx(losses, rel=NEAR)
        assert answer["reloaded"] == answer["rest"], "a reloaded job goes on bit for bit"
        assert answer["client"] == {"here": 3}
    assert answers[0]["names"] == ["words.bias", "words.embedding.weight"]
    assert answers[3]["names"] == ["words.embedding.weight"], "the head's weight is the embedding's"
    state: dict[str, Any] = answers[0]["state"]
    assert torch.equal(state["last.head.weight"], state["words.embedding.weight"])
    assert set(state) == set(dict(Whole("tied").named_parameters())) | {"last.head.weight"}
    exported = {path.name: load_file(path) for path in (tmp_path / "export").iterdir()}
    assert {name: set(tensors) for name, tensors in exported.items()} == {
        "words.safetensors": {"bias", "embedding.weight"},
        "b.safetensors": set(dict(Whole("tied").get_submodule("b").named_parameters())),
        "last.safetensors": {"head.weight"},
    }
    assert torch.equal(exported["last.safetensors"]["head.weight"], state["words.embedding.weight"])
    files = {path.name for path in (tmp_path / "global_step3").iterdir()}
    assert {"model-00-words.safetensors", "model-01-b.safetensors", "model-02-last.safetensors"} <= files


def test_evaluation_of_any_size_with_a_reported_output() -> None:
    answers = run_kept_ranks(jobs.evaluate, 4)
    model = Whole("tied").float()
    for rows in (8, 3, 10):
        ids = batch_of("tied", seed=rows)["ids"].repeat(2, 1)[:rows]
        whole = model(ids=ids)
        for answer in answers:
            loss, logits = answer[str(rows)]
            torch.testing.assert_close(logits, whole["logits"], rtol=1e-5, atol=1e-6)
            assert loss == pytest.approx(float(whole["loss"].detach()), rel=NEAR)
    diamond = Whole("diamond").float()
    known = diamond.get_submodule("a")(x=batch_of("diamond")["x"][:5].float())
    for answer in answers:
        torch.testing.assert_close(
            answer["c_out"], diamond.get_submodule("c")(a_out=known), rtol=1e-5, atol=1e-6
        )


def test_timeline_and_memory_of_a_step() -> None:
    """What autograd keeps of a user's own module is what its profile said, to the byte."""
    answer = run_kept_ranks(jobs.report, 4)[0]
    kinds = {"forward", "backward", "send", "receive", "reduce", "step"}
    assert {(rank, kind) for rank in range(4) for kind in kinds} == answer["timeline"]
    memory = answer["memory"]
    assert [rank.stage for rank in memory.ranks] == ["a", "b", "c", "end"]
    assert all(rank.counts.peak_held_bytes == rank.predicted.activations > 0 for rank in memory.ranks)
    assert memory.differences == ()
    assert answer["depth"] == 3
    assert answer["is_same_plan"], "a saved plan is taken as it is"
    assert answer["loss"] == pytest.approx(reference_steps("diamond", [batch_of("diamond")])[0][0], rel=NEAR)
