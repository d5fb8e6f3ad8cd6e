"""HuggingFace models on ranks that hold several stages, against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import shared_rank_jobs as jobs
from tests.ranks import run_kept_ranks


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
