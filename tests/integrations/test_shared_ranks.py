"""HuggingFace models on ranks that hold several stages, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import shared_rank_jobs as jobs
from tests.integrations.engine_jobs import U
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors, loss_of, units_of

CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("gpt2, interleaved", 2, 1, {"clipping": 0.05}),
    ("gpt2, in a V", 2, 0, {"memory": {"recompute": "full"}}),
    ("clip on two ranks", 2, 2, {"clipping": 0.05}),
    ("t5, the encoder on the decoder's ranks", 2, 1, {"memory": {"recompute": "full"}}),
    ("clip on four ranks", 4, 1, {}),
    ("llava, the tower on all ranks", 4, 1, {"clipping": 0.05}),
]


def train_alone(case: str, clipping: float) -> tuple[list[float], dict[str, Any], float, Any]:
    """Return losses, the first step's gradients, their norm, and the trained model."""
    model, make_batch = jobs.model_of(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    first_norm = 0.0
    for seed in range(jobs.STEPS):
        optimizer.zero_grad()
        units = units_of(make_batch(jobs.B, seed), U)
        total = 0.0
        for unit in units:
            loss = loss_of(model(**unit)) / len(units)
            loss.backward()
            total += float(loss.detach())
        if not seed:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clipping or float("inf"))
        first_norm = first_norm or float(norm)
        losses.append(total)
        optimizer.step()
    return losses, gradients, first_norm, model


@pytest.mark.parametrize(("case", "num_ranks", "zero", "options"), CASES)
def test_a_rank_of_several_stages_trains_as_one_process(
    case: str, num_ranks: int, zero: int, options: dict[str, Any], tmp_path: Path
) -> None:
    answers = run_kept_ranks(jobs.train, num_ranks, case, zero, options, str(tmp_path), timeout_s=240)
    losses, gradients, norm, model = train_alone(case, options.get("clipping", 0.0))
    assert any(len(answer["stages"]) > 1 for answer in answers)
    found = {name: gradient for answer in answers for name, gradient in answer["gradients"].items()}
    assert found.keys() == gradients.keys()
    errors = gradient_errors(found, gradients)
    assert max(errors.values()) < 2e-6, max(errors, key=errors.__getitem__)
    for answer in answers:
        assert answer["losses"][0] == pytest.approx(losses[0], rel=1e-6)
        assert answer["losses"] == pytest.approx(losses, rel=1e-5)
        assert answer["norm"] == pytest.approx(norm, rel=1e-5)
        assert answer["resumed"] == answer["losses"][jobs.SAVED_AFTER :]
        assert answer["is resumed bit for bit"] and answer["client"] == {"epoch": 7}
        assert answer["steps"] == (jobs.STEPS, jobs.STEPS * jobs.B)
        assert set(answer["rates"]) == {1e-3} and len(answer["rates"]) == answer["groups"]
        assert set(answer["names"]) <= set(answer["state"])
        stage, weights, peak = answer["memory"]
        assert stage == answer["is"][0] and peak > 2 * weights > 0
    assert answers[0]["is"][1] and answers[-1 if "V" not in case else 0]["is"][2]
    # Adam makes steps of the rounding of a gradient that is zero (of a bias before a softmax)
    norms = {name: float(gradient.norm()) for name, gradient in gradients.items()}
    moved = [name for name, own in norms.items() if own > 1e-4 * max(norms.values())]
    check_files(model, moved, answers, tmp_path / "export")
    check_evaluation(case, answers)


def check_files(model: Any, moved: list[str], answers: list[dict[str, Any]], directory: Path) -> None:
    reloaded = type(model).from_pretrained(directory).state_dict()
    state = answers[0]["gathered"]
    assert all(torch.equal(reloaded[name], value) for name, value in state.items() if name in reloaded)
    assert reloaded.keys() <= state.keys()
    trained = dict(model.named_parameters())
    for name in moved:
        assert torch.allclose(state[name], trained[name].detach(), rtol=0, atol=2e-4), name


def check_evaluation(case: str, answers: list[dict[str, Any]]) -> None:
    model, make_batch = jobs.model_of(case)
    model.load_state_dict(answers[0]["gathered"])
    model.eval()
    with torch.no_grad():
        for size, loss in answers[0]["evaluated"].items():
            parts = units_of(make_batch(size, size), U)
            total = sum(float(loss_of(model(**p))) * p["input_ids"].shape[0] for p in parts)
            assert loss == pytest.approx(total / size, rel=1e-5), size
    assert all(answer["evaluated"] == answers[0]["evaluated"] for answer in answers)


def test_a_rank_of_several_stages_loads_what_all_of_them_read() -> None:
    for answer in run_kept_ranks(jobs.load, 2):
        assert answer["shared"] == pytest.approx(answer["alone"], rel=1e-5)
        assert len(set(answer["shared rates"])) == 1 and set(answer["shared rates"]) == set(
            answer["alone rates"]
        )


def test_stages_by_hand_on_the_same_ranks_train_as_one_process(tmp_path: Path) -> None:
    answers = run_kept_ranks(jobs.train_towers, 2, str(tmp_path))
    left, right, head = jobs.Tower(1), jobs.Tower(2), jobs.Head()
    head.layer.weight = left.layer.weight
    parameters = list(torch.nn.ModuleList([left, right, head]).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)

    def loss_of_batch(batch: dict[str, Any]) -> Any:
        return head(left(batch["x"])["hidden"], right(batch["y"])["hidden"], batch["target"])

    losses = []
    for seed in range(jobs.STEPS):
        optimizer.zero_grad()
        loss = loss_of_batch(jobs.towers_batch(seed))
        loss.backward()
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=1e-5)
        assert answer["losses"][0] == pytest.approx(losses[0], rel=1e-6)
        assert answer["resumed"] == answer["losses"][jobs.SAVED_AFTER :]
        assert answer["evaluated"] == pytest.approx(
            float(loss_of_batch(jobs.towers_batch(9)).detach()), rel=1e-5
        )
    assert [len(answer["owns"]) for answer in answers] == [2, 2]
    assert {name.name for name in (tmp_path / "export").iterdir()} == {
        f"{name}.safetensors" for name in ("left", "right", "head")
    }
    trained = {
        f"{stage}.{name}": parameter.detach()
        for stage, module in (("left", left), ("right", right), ("head", head))
        for name, parameter in module.named_parameters()
        if (stage, name) != ("head", "layer.weight")  # the left tower's
    }
    after = answers[0]["after"]
    assert after.keys() - {"head.layer.weight"} == trained.keys()
    for name, value in trained.items():
        assert torch.allclose(after[name], value, rtol=0, atol=1e-6), name
