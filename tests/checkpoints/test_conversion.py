"""`gpp convert` in one process: a torch file, DeepSpeed's universal layout, this package's, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpp_plugin.cli import main
from gpp_plugin.engine.checkpoints.conversion import (
    read_checkpoint,
    read_torch,
    write_checkpoint,
    write_torch,
)
from gpp_plugin.errors import CheckpointError


class Tied(nn.Module):
    """An embedding whose weight is the head's, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return something to train on."""
        loss: torch.Tensor = self.head(self.norm(self.frozen(self.embed(ids)))).square().mean()
        return loss


def make(seed: int) -> tuple[Tied, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Tied()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [(name, p) for name, p in trained if p.ndim > 1]
    others = [(name, p) for name, p in trained if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def train(model: Tied, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(torch.tensor([0, 1, 2, step % 5]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[float]]:
    """Return a file that one process wrote after three steps, and its next losses."""
    model, optimizer = make(0)
    train(model, optimizer, 3)
    torch.save({"module": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    return tmp_path / "one.pt", train(model, optimizer, 4)


def go_on(path: Path) -> list[float]:
    model, optimizer = make(1)
    told = torch.load(path, weights_only=True)
    model.load_state_dict(told["module"])
    optimizer.load_state_dict(told["optimizer"])
    return train(model, optimizer, 4)


@pytest.mark.parametrize("ways", [["gpp"], ["universal"], ["gpp", "universal", "gpp"]], ids=",".join)
def test_there_and_back_bit_for_bit(saved: tuple[Path, list[float]], tmp_path: Path, ways: list[str]) -> None:
    path, losses = saved
    for number, way in enumerate([*ways, "torch"]):
        out = tmp_path / f"{number}-{way}"
        assert main(["convert", str(path), str(out), "--to", way]) == 0
        path = out
    assert go_on(path) == losses


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["convert", *map(str, arguments)]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_refusals_are_one_line(
    saved: tuple[Path, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = saved
    assert "none: is not there" in refused(capsys, tmp_path / "none", tmp_path / "out")
    assert "is there already" in refused(capsys, path, tmp_path, "--to", "universal")
    assert "'../x' is a path" in refused(capsys, path, tmp_path / "out", "--to", "gpp", "--tag", "../x")
    (tmp_path / "empty").mkdir()
    assert "has no manifest" in refused(capsys, tmp_path / "empty", tmp_path / "out")
    (tmp_path / "text").write_text("text")
    assert "cannot be read as tensors" in refused(capsys, tmp_path / "text", tmp_path / "out", "--to", "gpp")
    (tmp_path / "empty" / "manifest.json").write_text('{"format": 1, "stages": []}')
    assert "has format 1, this release reads 2" in refused(capsys, tmp_path / "empty", tmp_path / "out")


def test_an_optimizer_must_name_its_parameters(tmp_path: Path) -> None:
    model = Tied()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, 1)
    told = {"module": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(told, tmp_path / "unnamed.pt")
    with pytest.raises(CheckpointError, match="do not say which parameters they have"):
        read_torch(tmp_path / "unnamed.pt")
    torch.save({**told, "parameters": names}, tmp_path / "named.pt")
    assert set(read_torch(tmp_path / "named.pt").state) == set(names)


def test_weights_alone(tmp_path: Path) -> None:
    model = Tied()
    torch.save({"module": model.state_dict()}, tmp_path / "one.pt")
    state = read_torch(tmp_path / "one.pt")
    assert state.optimizer == "" and state.aliases == {"embed.weight": ("head.weight",)} | {
        name: () for name in state.weights if name != "embed.weight"
    }
    write_checkpoint(state, tmp_path / "out", "tag")
    write_torch(read_checkpoint(tmp_path / "out"), tmp_path / "two.pt")
    found = torch.load(tmp_path / "two.pt", weights_only=True)["module"]
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


def test_a_universal_checkpoint_has_room_for_adam_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(
        [(name, p) for name, p in model.named_parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    train(model, optimizer, 1)
    told = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "optimizer_class": "SGD"}
    torch.save(told, tmp_path / "one.pt")
    text = refused(capsys, tmp_path / "one.pt", tmp_path / "out", "--to", "universal")
    assert "holds exp_avg, exp_avg_sq and step, not 'momentum_buffer' of SGD" in text
    assert main(["convert", str(tmp_path / "one.pt"), str(tmp_path / "out"), "--to", "gpp"]) == 0
