"""`gpp convert` in one process: a torch file, DeepSpeed's universal layout, this package's, and back.

Then checkpoints of DeepSpeed's `PipelineModule`, brought along under a model's names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpp_plugin.cli import main
from gpp_plugin.engine.checkpoints.conversion import (
    WholeState,
    propose_names,
    read_checkpoint,
    read_pipeline,
    read_torch,
    write_checkpoint,
    write_torch,
)
from gpp_plugin.errors import CheckpointError
from tests.ranks import run_kept_ranks


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


COUNTED: dict[str, Any] = {"samples": 12, "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1, 0.2]}}
"""What a schedule and its counters are in a file."""


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[float]]:
    """Return a file that one process wrote after three steps, and its next losses."""
    model, optimizer = make(0)
    train(model, optimizer, 3)
    told = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), **COUNTED}
    torch.save(told, tmp_path / "one.pt")
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
    told = torch.load(path, weights_only=True)
    assert {key: told[key] for key in COUNTED} == COUNTED


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


# ---- DeepSpeed's PipelineModule ----------------------------------------------------------------------------


class Text(nn.Module):
    """What the layers of `train_stock` are as one model; its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean cross entropy."""
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        logits = nn.functional.linear(self.norm(x), self.embed.weight)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())}


def texts(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 16, (8, 5), generator=generator)
    return ids, torch.randint(0, 16, (8, 5), generator=generator)


CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0, of two stages that share a weight by another norm
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 9}},
    "steps_per_print": 1000,
}


def head(embed: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, embed.weight)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def train_stock(directory: str, stages: int, zero: int = 0) -> list[float]:
    """Train three steps on DeepSpeed's own pipeline, save, and return the losses of the next five."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    def embed(**given: Any) -> Any:
        return TiedLayerSpec("embed", nn.Embedding, 16, 8, tied_weight_attr="weight", **given)

    layers = [embed()]
    for _ in range(3):
        layers += [LayerSpec(nn.Linear, 8, 8), torch.tanh]
    layers += [LayerSpec(nn.LayerNorm, 8), embed(forward_fn=head)]
    torch.manual_seed(0)
    net = PipelineModule(layers=layers, num_stages=stages, loss_fn=cross_entropy, partition_method="uniform")
    config = {**CONFIG, "zero_optimization": {"stage": zero}}
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]

    def train(steps: range) -> list[float]:
        batches = (tuple(t[n : n + 4] for t in texts(step)) for step in steps for n in (0, 4))
        return [float(engine.train_batch(batches)) for _ in steps]

    train(range(3))
    engine.save_checkpoint(directory)
    return train(range(3, 8))


def continue_stock(directory: str) -> list[float]:
    """Return the next five losses of what was converted, on two stages."""
    import deepspeed

    import gpp_plugin

    torch.manual_seed(1)
    model = gpp_plugin.GraphPipelineModule(Text(), sample_batch=texts(0))
    config = {**CONFIG, "graph_pipeline": {"stages": 2, "verify": False, "comm_timeout_s": 60}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert engine.load_checkpoint(directory)[0] is not None and engine.global_steps == 3
    assert engine.global_samples == 24 and engine.lr_scheduler.last_batch_iteration == 2
    return [float(engine.train_batch(iter([texts(step)]))) for step in range(3, 8)]


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """Return a file with the names of the model, in its order."""
    torch.save({"module": Text().state_dict()}, tmp_path / "like.pt")
    return tmp_path / "like.pt"


def converted(stock: Path, like: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a converted checkpoint, made with the map that is proposed."""
    out, names = tmp_path / "out", tmp_path / "map.json"
    assert main(["convert", str(stock), str(out), "--to", "gpp", "--like", str(like)]) == 0
    assert "nothing is written" in capsys.readouterr().out
    assert not out.exists() and not names.exists()
    assert (
        main(["convert", str(stock), str(out), "--to", "gpp", "--like", str(like), "--names", str(names)])
        == 0
    )
    found = json.loads(names.read_text())
    assert found.pop("0.weight", None) or found.pop("tied_modules.embed.weight")
    assert found == {
        "1.weight": "blocks.0.weight", "1.bias": "blocks.0.bias", "3.weight": "blocks.1.weight",
        "3.bias": "blocks.1.bias", "5.weight": "blocks.2.weight", "5.bias": "blocks.2.bias",
        "7.weight": "norm.weight", "7.bias": "norm.bias",
    }  # fmt: skip
    assert not out.exists(), "the map is looked at first"
    assert main(["convert", str(stock), str(out), "--to", "gpp", "--names", str(names)]) == 0
    return out


@pytest.mark.parametrize("stages", [1, 2])
def test_a_stock_pipeline_goes_on_under_the_models_names(
    stages: int, like: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = tmp_path / "stock"
    losses = run_kept_ranks(train_stock, stages, str(stock), stages)[0]
    out = converted(stock, like, tmp_path, capsys)
    for found in run_kept_ranks(continue_stock, 2, str(out)):
        assert found == pytest.approx(losses, rel=1e-5)
    # an optimizer of which it is not known whose states it has
    file = next((stock / "global_step3").glob("mp_rank_00*"))
    saved = torch.load(file, weights_only=True)
    saved["optimizer"]["param_groups"][0]["params"].pop()
    torch.save(saved, file)
    assert "is not certain" in refused(capsys, stock, tmp_path / "other", "--to", "gpp")


def test_a_universal_checkpoint_of_stock_names_goes_on(
    like: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock, universal = tmp_path / "stock", tmp_path / "universal"
    losses = run_kept_ranks(train_stock, 2, str(stock), 2, 1)[0]
    said = refused(capsys, stock, tmp_path / "out", "--to", "gpp")
    assert "in flat pieces" in said and "ds_to_universal.py" in said
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
         "--num_extract_workers", "1", "--num_merge_workers", "1",
         "--input_folder", str(stock / "global_step3"), "--output_folder", str(universal)],
        check=True, capture_output=True,
    )  # fmt: skip
    out = converted(universal, like, tmp_path, capsys)
    for found in run_kept_ranks(continue_stock, 2, str(out)):
        assert found == pytest.approx(losses, rel=1e-5)


def whole(*shapes: tuple[str, tuple[int, ...]]) -> WholeState:
    return WholeState(weights={name: torch.zeros(shape) for name, shape in shapes})


def test_names_are_proposed_where_shapes_and_order_leave_no_doubt() -> None:
    stock = whole(("0.weight", (9, 4)), ("1.weight", (4, 4)), ("2.weight", (4, 4)), ("2.bias", (4,)))
    # what is alone of its kind may lie anywhere
    model = whole(("a.bias", (4,)), ("b.weight", (4, 4)), ("c.weight", (4, 4)), ("d.weight", (9, 4)))
    assert propose_names(stock, model) == {
        "0.weight": "d.weight", "1.weight": "b.weight", "2.weight": "c.weight", "2.bias": "a.bias",
    }  # fmt: skip
    with pytest.raises(
        CheckpointError, match=r"'weight' of shape \[4, 4\] the checkpoint has 2 .*model 1 \(b.weight\)"
    ):
        propose_names(stock, whole(("b.weight", (4, 4)), ("d.weight", (9, 4)), ("a.bias", (4,))))
    twice = whole(("0.weight", (4, 4)), ("0.bias", (4,)), ("1.weight", (4, 4)), ("1.bias", (4,)))
    other = whole(("a.weight", (4, 4)), ("b.weight", (4, 4)), ("a.bias", (4,)), ("b.bias", (4,)))
    with pytest.raises(
        CheckpointError, match=r"ambiguous: where the checkpoint has '0.bias' .* has 'b.weight'"
    ):
        propose_names(twice, other)


def test_a_map_is_whole_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], like: Path) -> None:
    names = {name: f"new.{name}" for name in Text().state_dict()}
    file, out = tmp_path / "map.json", tmp_path / "out.pt"
    assert "map.json is not there; give --like" in refused(capsys, like, out, "--names", file)
    for wrong, said in (
        ({**names, "norm.weight": 5}, "is no object of texts"),
        (
            {k: v for k, v in names.items() if k != "norm.bias"},
            "the names lack 'norm.bias'; the checkpoint has embed.w",
        ),
        ({**names, "more": "other"}, "have, and the checkpoint has not, 'more'"),
        ({**names, "norm.bias": "new.norm.weight"}, "give twice 'new.norm.weight'"),
        (["0.weight"], "is no object of texts"),
    ):
        file.write_text(json.dumps(wrong))
        assert said in refused(capsys, like, out, "--names", file)
        assert not out.exists()
    file.write_text(json.dumps(names))
    assert "is there already; leave out --like" in refused(capsys, like, out, "--names", file, "--like", like)
    assert main(["convert", str(like), str(out), "--names", str(file)]) == 0
    assert set(torch.load(out, weights_only=True)["module"]) == set(names.values())


def stock_files(
    directory: Path, layers: dict[int, dict[str, torch.Tensor]], *stages: list[torch.Tensor], groups: int = 1
) -> Path:
    """Write files as DeepSpeed's pipeline engine does; of each stage the first moments that its optimizer has."""
    directory.mkdir()
    for number, layer in layers.items():
        torch.save(layer, directory / f"layer_{number:02d}-model_states.pt")
    for rank, moments in enumerate(stages):
        states = {n: {"step": 2, "exp_avg": m, "exp_avg_sq": m} for n, m in enumerate(moments)}
        cut = [[*states][at::groups] for at in range(groups)]
        optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": own} for own in cut]}
        config = {"optimizer": {"type": "Adam"}}
        head = {"optimizer": optimizer, "ds_config": config, "global_steps": 2, "buffer_names": ["5.mean"]}
        torch.save(head, directory / f"mp_rank_{rank:02d}_model_states.pt")
    return directory


def test_states_are_those_of_their_parameters_or_refused(tmp_path: Path) -> None:
    def one(value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value)

    torch.manual_seed(0)
    tied = {"weight": torch.randn(4, 4)}
    layers = {
        0: {"weight": torch.randn(4, 4)}, 1: tied, 3: dict(tied),
        5: {"weight": torch.ones(4), "mean": torch.zeros(4)}, 7: {"weight": torch.randn(2, 4)},
    }  # fmt: skip
    # a stage numbers what is tied first, and a second one that shares it has it again
    whole = stock_files(tmp_path / "whole", layers, [one(1, 4, 4), one(0, 4, 4), one(5, 4), one(7, 2, 4)])
    shared = stock_files(
        tmp_path / "shared", layers, [one(1, 4, 4), one(0, 4, 4)], [one(1, 4, 4), one(5, 4), one(7, 2, 4)]
    )
    for path in (whole, shared):
        state = read_pipeline(path)
        found = {name: float(own["exp_avg"].flatten()[0]) for name, own in state.state.items()}
        assert found == {"0.weight": 0, "1.weight": 1, "5.weight": 5, "7.weight": 7}
        assert state.aliases == {"1.weight": ("3.weight",)} and list(state.buffers) == ["5.mean"]
        assert (state.optimizer, state.step) == ("AdamW", 2) and len(state.groups) == 1
    plain = {n: layers[n] for n in (0, 5)}
    for number, (broken, said) in enumerate(
        [
            (lambda p: stock_files(p, plain, [one(5, 4)]), "is not certain"),  # frozen
            (lambda p: stock_files(p, plain, [one(0, 4, 4), one(5, 4)], groups=2), "is not certain"),
            (lambda p: stock_files(p, plain, [one(0, 4, 3), one(5, 4)]), "is not certain"),
            (
                lambda p: (stock_files(p, plain) / "layer_00-model_01-model_states.pt").touch(),
                "a part of a layer",
            ),
            (
                lambda p: (stock_files(p, plain) / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch(),
                "flat pieces",
            ),
        ]
    ):
        broken(tmp_path / str(number))
        with pytest.raises(CheckpointError, match=said):
            read_pipeline(tmp_path / str(number))
