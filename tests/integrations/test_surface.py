"""Every public name of DeepSpeed's engines is answered, or refused with one line."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.config.deepspeed_keys import KEYS
from gpp_plugin.engine.compatibility import _BY_NAME, PipelineSurface, _lack, why_lacking
from gpp_plugin.engine.engine import GraphPipelineEngine
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.dispatch import _checked_arguments
from gpp_plugin.integrations.deepspeed.stock_engine import StockPipelineEngine
from tests.integrations.engine_jobs import B, U, config_of, logged, make_engine, said_of, steps
from tests.models import build
from tests.ranks import run_kept_ranks


def public_names() -> set[str]:
    """Return the methods and attributes of DeepSpeed's engines."""
    found = {name for name in (*dir(PipelineEngine), *vars(DeepSpeedEngine)) if name.islower()}
    # transformers puts methods of its own into every module once it has made a model
    found -= {n for n, v in vars(nn.Module).items() if getattr(v, "__module__", "torch").startswith("transf")}
    found |= set_on_self(DeepSpeedEngine) | set_on_self(PipelineEngine)
    return {name for name in found if not name.startswith("_")}


def set_on_self(kind: type) -> set[str]:
    """Return the attributes that methods of a class give its instances, by its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if ast.unparse(node.value) == "self"
    }


def test_each_public_name_is_answered_or_refused() -> None:
    refused = {n for n in dir(nn.Module) if getattr(vars(PipelineSurface).get(n), "fget", None) is _lack}
    own = set(dir(GraphPipelineEngine)) | set_on_self(GraphPipelineEngine) | set_on_self(PipelineSurface)
    own -= refused
    unknown = sorted(name for name in public_names() - own if why_lacking(name) is None)
    assert not unknown
    both = sorted(own.intersection(_BY_NAME))
    assert not both, "a name that is answered is not refused"


@pytest.mark.parametrize("name", ["load_checkpoint", "save_checkpoint", "save_16bit_model"])
def test_parameters_are_in_the_order_of_deepspeeds(name: str) -> None:
    theirs = list(inspect.signature(getattr(DeepSpeedEngine, name)).parameters)
    assert list(inspect.signature(getattr(GraphPipelineEngine, name)).parameters)[: len(theirs)] == theirs


def test_what_a_graph_of_stages_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphPipelineEngine, "has_failed", False, raising=False)
    engine = object.__new__(GraphPipelineEngine)
    for given in ({"load_module_strict": False}, {"custom_load_fn": print}):
        with pytest.raises(ConfigError, match="load_module_state_dict"):
            engine.load_checkpoint("nowhere", **given)
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(ConfigError, match="save_pretrained writes the adapter"):
            save("nowhere", exclude_frozen_parameters=True)


def test_deepspeeds_own_pipeline_keeps_its_batch_size() -> None:
    with pytest.raises(ConfigError, match="choose another planner"):
        object.__new__(StockPipelineEngine).set_train_batch_size(16)


def test_what_is_no_plain_model_is_refused() -> None:
    for kind, said in (
        (PipelineModule, "pass the plain model"),
        (GraphPipelineEngine, "is an engine already"),
    ):
        with pytest.raises(ConfigError, match=said):
            _checked_arguments({}, GraphPipelineConfig(), {"model": object.__new__(kind)})


def test_a_missing_name_says_why_or_what_is_near() -> None:
    engine = object.__new__(GraphPipelineEngine)
    with pytest.raises(AttributeError, match="compile does not exist for a graph of stages: stages run code"):
        engine.compile  # noqa: B018
    with pytest.raises(AttributeError, match=r"did you mean engine.train_batch\?"):
        engine.train_bach  # noqa: B018
    for name in ("to", "half", "register_forward_hook", "grid", "mpu", "timers"):
        with pytest.raises(
            AttributeError, match=f"{name} does not exist for a graph of stages: .*(engine|model|plan)"
        ):
            getattr(engine, name)
    # of sequence_parallel there is engine.sequence_parallel_size, as DeepSpeed's engines have it
    for block in {path.partition(".")[0] for path in KEYS if "." in path} - {"sequence_parallel"}:
        with pytest.raises(AttributeError, match="graph of stages: (?!did you mean)"):
            getattr(engine, f"{block}_enable")
    with pytest.raises(
        AttributeError, match=r"tensorboard_enabled .*: engine.monitor writes to the monitors"
    ):
        engine.tensorboard_enabled  # noqa: B018
    assert not hasattr(engine, "zero_offload_param") and not hasattr(engine, "_private")


ATTRIBUTES = (
    "world_size", "local_rank", "num_stages", "dp_world_size", "mp_world_size", "sequence_parallel_size",
    "seq_dp_world_size", "is_pipe_parallel",
    "is_data_parallel", "is_model_parallel", "pipeline_parallelism", "micro_batch_size", "micro_batches", "micro_steps",
)  # fmt: skip


WITH_DIRECTORY = "save_checkpoint", "load_checkpoint", "resume", "save_pretrained", "save_16bit_model"


def ask(directory: str) -> dict[str, Any]:
    """What a user asks of an engine on two ranks of one stage, before and after a step."""
    model, make_batch = build("gpt2")
    batch = make_batch(B, 0)
    csv = {"enabled": True, "output_path": directory, "job_name": "job"}
    engine = make_engine(model, batch, config_of(block={"stages": 1}, csv_monitor=csv))
    applied = [engine.was_step_applied()]
    with contextlib.chdir(directory):
        calls = [functools.partial(getattr(engine, n), d) for n in WITH_DIRECTORY for d in ("", " ", None, 5)]
        refused = [said_of(call) for call in calls]
    with logged("gpp_plugin.engine.compatibility") as records:
        nothing = engine.load_checkpoint(directory), engine.resume(directory)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    losses = steps(engine, [batch])
    assert engine.agg_train_loss is not None
    last_loss = [float(engine.agg_train_loss)]
    applied.append(engine.was_step_applied())
    engine.zero_grad()
    rows = [{key: value[n : n + U] for key, value in batch.items()} for n in range(0, B, U)]
    evaluated = [
        float(engine.eval_batch(iter([batch]))),
        float(engine.eval_batch(iter(rows), num_micro_batches=4)),
    ]
    engine.monitor.write_events([("Own/number", 3.0, engine.global_samples)])
    parent = nn.Module()
    parent.engine = engine
    inherited = {
        "is module": isinstance(engine, nn.Module) and list(engine.children()) == [engine.module],
        "in a module": parent.state_dict().keys() == {f"engine.{name}" for name in engine.state_dict()},
        "modes": parent.eval() is parent and not engine.training and engine.train() is engine,
        "shown": "(module)" in repr(engine),
        "of torch": torch.nn.utils.parameters_to_vector(engine.parameters()).numel() > 0,
        "too few": said_of(lambda: engine.eval_batch(iter(rows), num_micro_batches=5)).startswith(
            "ConfigError: the data"
        ),
    }
    after = engine.state_dict()
    changed = any(not torch.equal(before[name], value) for name, value in after.items())
    engine.load_state_dict(before)
    restored = all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    return {
        "names": [name for name, _ in engine.named_parameters()],
        "count": len(list(engine.parameters())),
        "state": engine.state_dict(),
        "changed": changed,
        "restored": restored,
        "applied": applied,
        "refused": refused,
        "inherited": inherited,
        "evaluated": evaluated,
        "nothing": nothing,
        "warned": [record.getMessage() for record in records],
        "positions": (engine.get_data_parallel_rank(), engine.get_model_parallel_rank()),
        "batch": engine.get_batch_info(),
        "mom": engine.get_mom(),
        "optimizer": engine.optimizer_params(),
        "scheduler": engine.scheduler_params(),
        "dynamic": engine.dynamic_loss_scale(),
        "drop_last": engine.dataloader_drop_last(),
        "training": engine.training,
        "attributes": {name: getattr(engine, name) for name in ATTRIBUTES},
        "last_loss": last_loss,
        "losses": losses,
        "same_names": engine.param_names == {p: name for name, p in engine.named_parameters()},
    }


def test_an_engine_answers_for_its_rank(tmp_path: Path) -> None:
    model, _ = build("gpt2")
    names = set(dict(model.named_parameters()))
    seen: set[str] = set()
    answers = run_kept_ranks(ask, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["job"], "what is refused writes nothing"
    assert "3.0" in (tmp_path / "job" / "Own_number.csv").read_text()
    for rank, answer in enumerate(answers):
        wrong = [f"ValueError: {name}: the directory is" for name in WITH_DIRECTORY for _ in range(4)]
        assert all(map(str.startswith, answer["refused"], wrong)), answer["refused"]
        assert answer["nothing"] == ((None, None), None)
        assert len(answer["warned"]) == (rank == 0) and all(
            "no checkpoint is in" in t for t in answer["warned"]
        )
        assert set(answer["names"]) <= names and answer["count"] == len(answer["names"])
        assert answer["state"].keys() >= set(answer["names"])
        assert answer["changed"] and answer["restored"], "what is loaded is trained on"
        assert answer["positions"] == (rank, 0) and answer["batch"] == (8, 2, 4)
        assert answer["applied"] == [False, True] and answer["training"]
        assert answer["attributes"] == {
            "world_size": 2, "local_rank": rank, "num_stages": 1, "dp_world_size": 2, "mp_world_size": 1,
            "sequence_parallel_size": 1, "seq_dp_world_size": 2,
            "is_pipe_parallel": False, "is_data_parallel": True, "is_model_parallel": False,
            "pipeline_parallelism": True, "micro_batch_size": 2, "micro_batches": 4, "micro_steps": 4,
        }  # fmt: skip
        assert all(answer["inherited"].values()), answer["inherited"]
        assert answer["evaluated"][0] == pytest.approx(answer["evaluated"][1], rel=1e-6)
        assert answer["last_loss"] == answer["losses"] and answer["same_names"]
        assert answer["mom"] == [(0.9, 0.999)] * len(answer["mom"]) and answer["mom"]
        assert answer["optimizer"] == {"lr": 1e-3, "weight_decay": 0.01}
        assert answer["dynamic"] and not answer["drop_last"] and answer["scheduler"] is None
        seen |= set(answer["names"])
    assert seen == names
    assert all(torch.is_tensor(value) for value in answer["state"].values())
