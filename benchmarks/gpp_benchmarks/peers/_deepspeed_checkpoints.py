"""What DeepSpeed's unit tests of checkpoints ask of an engine, and a job of its examples that goes on here."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks.peers._scenario import DIFFERS, REFUSED, Seen, Side, raised_by, scenario, shown_elsewhere
from gpp_benchmarks.peers._stack import CONFIG, MICRO, pairs, stack, start, trained, weights

RATES = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 6, "warmup_type": "linear"},
}


def _saved(side: Side, changes: dict[str, Any] | None = None, **more: Any) -> Any:
    """Return an engine that trained two steps and saved."""
    engine = start(side, changes)
    trained(engine, pairs(), 2)
    engine.save_checkpoint(str(side.own), **more)
    return engine


def _anew(side: Side, changes: dict[str, Any] | None = None, **more: Any) -> Any:
    """Return an engine of other weights."""
    return start(side, changes, layers=stack(seed=7), **more)


def _tag(side: Side, path: str) -> str:
    """Return the tag in what `load_checkpoint` returns: the peer's is a file."""
    return (Path(path).parent if side.is_peer else Path(path)).name


@scenario("checkpoint", "weights, optimizer, schedule and counters return")
def returns(side: Side) -> Seen:
    first = _saved(side, {"scheduler": RATES})
    further = trained(first, pairs(4))
    second = _anew(side, {"scheduler": RATES})
    path, _ = second.load_checkpoint(str(side.own))
    again = trained(second, pairs(4))
    return {
        "further": further,
        "again": again,
        "tag": _tag(side, path),
        "steps": [second.global_steps, second.global_samples],
        "rate": float(second.get_lr()[0]),
    }


@scenario("checkpoint", "the same with ZeRO 1 on data-parallel ranks", ranks=4)
def returns_zero_1(side: Side) -> Seen:
    config = {"train_batch_size": 4 * MICRO, "zero_optimization": {"stage": 1}}
    first = start(side, config)
    trained(first, pairs(side=side, degree=2), 2)
    first.save_checkpoint(str(side.own))
    further = trained(first, pairs(8, side=side, degree=2))
    second = _anew(side, config)
    second.load_checkpoint(str(side.own))
    return {"further": further, "again": trained(second, pairs(8, side=side, degree=2))}


@scenario("checkpoint", "a directory without checkpoints gives `(None, None)`")
def nothing_there(side: Side) -> Seen:
    side.own.mkdir(exist_ok=True)
    return {"found": list(start(side).load_checkpoint(str(side.own)))}


@scenario("checkpoint", "an empty directory name is a `ValueError`, and nothing is written")
def no_name(side: Side) -> Seen:
    engine = start(side)
    if dist.get_rank() == 0:
        side.own.mkdir()
    dist.barrier()
    with contextlib.chdir(side.own):
        raised = [raised_by(functools.partial(engine.save_checkpoint, name)) for name in ("", None)]
    return {"types": [one.get("raised", "") for one in raised], "files": os.listdir(side.own)}


@scenario("checkpoint", "a tag of the user's, which `latest` names")
def own_tag(side: Side) -> Seen:
    engine = _saved(side, tag="mine")
    latest = (side.own / "latest").read_text().strip()
    path, _ = _anew(side).load_checkpoint(str(side.own))
    return {"latest": latest, "found": _tag(side, path), "steps": engine.global_steps}


@scenario("checkpoint", "an older checkpoint by its tag; `save_latest=False` leaves `latest`")
def older(side: Side) -> Seen:
    engine = _saved(side)
    trained(engine, pairs(4), 1)
    engine.save_checkpoint(str(side.own), save_latest=False)
    trained(engine, pairs(6), 1)
    engine.save_checkpoint(str(side.own))
    latest = (side.own / "latest").read_text().strip()
    dist.barrier()
    seen: Seen = {"latest": latest}
    for tag in ("global_step2", "global_step3", None):
        other = _anew(side)
        path, _ = other.load_checkpoint(str(side.own), tag=tag)
        seen[str(tag)] = {"steps": other.global_steps, "tag": _tag(side, path), "weights": weights(other)}
    return seen


@scenario("checkpoint", "a tag that is not there is an error")
def absent_tag(side: Side) -> Seen:
    engine = _saved(side)
    return {"load": raised_by(lambda: engine.load_checkpoint(str(side.own), tag="absent"))}


@scenario(
    "checkpoint",
    "the path that `load_checkpoint` returns",
    here=DIFFERS,
    why="the checkpoint's directory; DeepSpeed's is one of its files",
)
def loaded_path(side: Side) -> Seen:
    engine = _saved(side)
    return {"is directory": Path(engine.load_checkpoint(str(side.own))[0]).is_dir()}


@scenario("checkpoint", "numbers, texts and tensors as `client_state`")
def client_state(side: Side) -> Seen:
    given = {"epoch": 3, "name": "run", "best": 0.25, "nested": {"list": [1, 2]}}
    _saved(side, client_state=given)
    _, found = _anew(side).load_checkpoint(str(side.own))
    return {key: found[key] for key in given}


class _Own:
    """An object of a script."""

    value = 3


@scenario(
    "checkpoint",
    "any object as `client_state`",
    here=REFUSED,
    why="numbers, texts, containers and tensors: nothing is pickled",
)
def client_object(side: Side) -> Seen:
    _saved(side, client_state={"own": _Own()})
    return {}


@scenario(
    "checkpoint",
    "`latest` names a checkpoint that is broken",
    here=DIFFERS,
    why="the newest whole one is loaded, with a warning",
)
def broken_latest(side: Side) -> Seen:
    engine = _saved(side)
    trained(engine, pairs(4), 1)
    engine.save_checkpoint(str(side.own))
    dist.barrier()
    if dist.get_rank() == 0:
        for path in sorted((side.own / "global_step3").iterdir()):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    dist.barrier()
    other = _anew(side)
    return {"load": raised_by(lambda: other.load_checkpoint(str(side.own))), "steps": other.global_steps}


@scenario(
    "checkpoint",
    "ranks that save under different tags",
    here=REFUSED,
    why="always an error; DeepSpeed warns by default",
)
def unlike_tags(side: Side) -> Seen:
    engine = start(side)
    trained(engine, pairs(), 1)
    engine.save_checkpoint(str(side.own), tag=f"rank{dist.get_rank()}")
    return {}


@scenario("checkpoint", "the same where `tag_validation` is Fail")
def unlike_tags_fail(side: Side) -> Seen:
    engine = start(side, {"checkpoint": {"tag_validation": "Fail"}})
    trained(engine, pairs(), 1)
    return {"save": raised_by(lambda: engine.save_checkpoint(str(side.own), tag=f"rank{dist.get_rank()}"))}


@scenario("checkpoint", "`load_module_only`")
def module_only(side: Side) -> Seen:
    _saved(side)
    other = _anew(side)
    other.load_checkpoint(str(side.own), load_module_only=True)
    return {"weights": weights(other), "losses": trained(other, pairs(4))}


def _without(side: Side, states: str) -> Seen:
    _saved(side, {"scheduler": RATES})
    other = _anew(side, {"scheduler": RATES})
    other.load_checkpoint(str(side.own), **{states: False})
    return {"rate": float(other.get_lr()[0]), "losses": trained(other, pairs(4))}


@scenario("checkpoint", "`load_lr_scheduler_states=False`")
def without_schedule(side: Side) -> Seen:
    return _without(side, "load_lr_scheduler_states")


@scenario(
    "checkpoint",
    "`load_optimizer_states=False`",
    here=DIFFERS,
    why="the schedule's rate holds at once; DeepSpeed's next step has the first rate",
)
def without_optimizer(side: Side) -> Seen:
    return _without(side, "load_optimizer_states")


@scenario(
    "checkpoint",
    "another number of stages and of data-parallel ranks",
    here=DIFFERS,
    why="any plan loads it, optimizer included; DeepSpeed's goes by a universal one",
)
def other_ranks(side: Side) -> Seen:
    first = _saved(side)
    further = trained(first, pairs(4))
    second = _anew(side, {"train_micro_batch_size_per_gpu": MICRO}, stages=1)
    second.load_checkpoint(str(side.own))
    return {"further": further, "again": trained(second, pairs(4, side=side, degree=2))}


@scenario(
    "checkpoint",
    "the state of another optimizer",
    here=REFUSED,
    why="`load_optimizer_states=False` leaves it out",
)
def other_optimizer(side: Side) -> Seen:
    _saved(side)
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    other = _anew(side, sgd)
    other.load_checkpoint(str(side.own))
    return {}


@scenario(
    "checkpoint",
    "`load_module_strict=False`, `custom_load_fn`",
    here=REFUSED,
    why="`load_module_state_dict(state, strict=False)`",
)
def not_strict(side: Side) -> Seen:
    _saved(side)
    other = _anew(side)
    other.load_checkpoint(str(side.own), load_module_strict=False)
    return {}


@scenario(
    "checkpoint",
    "`exclude_frozen_parameters`",
    here=REFUSED,
    why="`save_pretrained` writes an adapter alone",
)
def without_frozen(side: Side) -> Seen:
    _saved(side, exclude_frozen_parameters=True)
    return {}


shown_elsewhere(
    "checkpoint",
    "a job killed while it saves",
    here=DIFFERS,
    why="the old checkpoint or the new one, whole",
    test="checkpoints/test_killed_saves.py::test_old_or_new_exactly",
)


# ---- jobs of DeepSpeedExamples that go on here ------------------------------------------------------------------


def _converted(side: Side, model: nn.Module) -> Path:
    """Return the peer's checkpoint under the model's names, by two calls of `gpp convert`; collective."""
    from gpp_plugin.cli import main

    stock, like, names = side.folder / "peer", side.folder / "like.pt", side.folder / "names.json"
    out = side.folder / "converted"
    if dist.get_rank() == 0:
        torch.save({"module": model.state_dict()}, like)
        common = ["convert", str(stock), str(out), "--to", "gpp", "--names", str(names)]
        assert main([*common, "--like", str(like)]) == 0 and not out.exists(), "the map is looked at first"
        assert main(common) == 0
    dist.barrier()
    return out


def _goes_on(
    side: Side, layers: list[Any], model: nn.Module, batches: Any, config: dict[str, Any], loss: Any
) -> Seen:
    """Return the losses of five steps behind three of stock DeepSpeed: its own, or of its checkpoint converted."""
    import deepspeed

    import gpp_plugin

    if side.is_peer:
        from deepspeed.pipe import PipelineModule

        net = PipelineModule(layers=layers, num_stages=2, loss_fn=loss, partition_method="parameters")
        engine = side.keep(
            deepspeed.initialize(model=net, config=config, model_parameters=list(net.parameters()))[0]
        )
        trained(engine, batches(0), 3)
        engine.save_checkpoint(str(side.own))
        return {"losses": trained(engine, batches(3), 5)}
    path = _converted(side, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # what is not read is seen
    block = {"graph_pipeline": {"stages": 2, "verify": False, "comm_timeout_s": 60}}
    wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=next(batches(0)))
    engine = side.keep(deepspeed.initialize(model=wrapped, config={**config, **block})[0])
    found, _ = engine.load_checkpoint(str(path))
    assert found is not None and engine.global_steps == 3
    return {"losses": trained(engine, batches(3), 5)}


class _ImageModel(nn.Module):
    """Convolutions and a classifier, as the images of the pipeline example are trained with."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 5, stride=2, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(24, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d((3, 3))
        self.classifier = nn.Sequential(
            nn.Dropout(0.0), nn.Linear(144, 64), nn.ReLU(inplace=True), nn.Linear(64, classes)
        )

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and the logits."""
        logits = self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _images(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    while True:
        labels = torch.randint(0, 10, (MICRO,), generator=generator)
        yield torch.randn(MICRO, 3, 32, 32, generator=generator) + labels[:, None, None, None] / 10, labels


def _flat(x: Tensor) -> Tensor:
    return torch.flatten(x, 1)


@scenario("examples", "the images' pipeline, three steps, its checkpoint converted, five more steps")
def images_go_on(side: Side) -> Seen:
    torch.manual_seed(1138)
    model = _ImageModel()
    layers = [*model.features, model.avgpool, _flat, *model.classifier]
    config = {**CONFIG, "train_batch_size": 4 * MICRO}
    config["optimizer"] = {
        "type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "torch_adam": True}
    }  # fmt: skip
    return _goes_on(side, layers, model, _images, config, nn.functional.cross_entropy)


class _Encoder(nn.Module):
    """A BERT-like model of masked words: embeddings, encoder layers, a head."""

    def __init__(self, words: int = 40, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of the words that are masked, and the logits."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return {"loss": _masked(logits, labels), "logits": logits}


def _masked(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


def _sentences(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    while True:
        ids = torch.randint(1, 40, (MICRO, 8), generator=generator)
        masked = torch.rand(ids.shape, generator=generator) < 0.3
        masked[:, 0] = True
        yield torch.where(masked, 0, ids), torch.where(masked, ids, -100)


@scenario("examples", "masked words, with warm-up and weight decay, converted, five more steps")
def sentences_go_on(side: Side) -> Seen:
    torch.manual_seed(0)
    model = _Encoder()
    layers = [model.embed, *model.layers, model.norm, model.head]
    config = {**CONFIG, "train_batch_size": 4 * MICRO, "scheduler": RATES}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.1, "torch_adam": True}}
    return _goes_on(side, layers, model, _sentences, config, _masked)
