"""Every public name of DeepSpeed's engines is answered, or refused with one line."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest
import torch
from torch import nn

from gpp_plugin.engine.compatibility import PipelineSurface, why_lacking
from gpp_plugin.engine.engine import GraphPipelineEngine
from gpp_plugin.errors import ConfigError
from tests.integrations import surface_jobs as jobs
from tests.models import build
from tests.ranks import run_kept_ranks


def public_names() -> set[str]:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    found = {name for name in dir(PipelineEngine) if not name.startswith("_") and name.islower()} | {
        name for name in vars(DeepSpeedEngine) if not name.startswith("_") and name.islower()
    }
    # transformers puts methods of its own into every module once it has made a model
    return {
        name
        for name in found
        if not getattr(vars(nn.Module).get(name), "__module__", "torch").startswith("transf")
    }


def set_on_self(kind: type) -> set[str]:
    """Return the public attributes that methods of a class give its instances, by its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    targets = [
        target
        for node in ast.walk(tree)
        for target in (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign | ast.AugAssign)
            else []
        )
    ]
    return {
        name.attr
        for target in targets
        for name in ast.walk(target)
        if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id == "self"
        if not name.attr.startswith("_")
    }


def attributes() -> set[str]:
    """Return the attributes of instances of DeepSpeed's engines."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return set_on_self(DeepSpeedEngine) | set_on_self(PipelineEngine)


def test_each_public_name_is_answered_or_refused() -> None:
    own = set(dir(GraphPipelineEngine)) | set_on_self(GraphPipelineEngine) | set_on_self(PipelineSurface)
    unknown = sorted(name for name in (public_names() | attributes()) - own if why_lacking(name) is None)
    assert not unknown
    both = sorted(name for name in own if not name.startswith("_") and why_lacking(name) is not None)
    assert not both, "a name that is answered is not refused"


@pytest.mark.parametrize("name", ["load_checkpoint", "save_checkpoint", "save_16bit_model"])
def test_parameters_are_in_the_order_of_deepspeeds(name: str) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    theirs = list(inspect.signature(getattr(DeepSpeedEngine, name)).parameters)
    assert list(inspect.signature(getattr(GraphPipelineEngine, name)).parameters)[: len(theirs)] == theirs


def test_what_deepspeed_takes_and_a_graph_of_stages_does_not_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GraphPipelineEngine, "has_failed", False, raising=False)
    engine = object.__new__(GraphPipelineEngine)
    for given in ({"load_module_strict": False}, {"custom_load_fn": print}):
        with pytest.raises(ConfigError, match="load_module_state_dict"):
            engine.load_checkpoint("nowhere", **given)
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(ConfigError, match="save_pretrained writes the adapter"):
            save("nowhere", exclude_frozen_parameters=True)


def test_a_missing_name_says_why_or_what_is_near() -> None:
    engine = object.__new__(GraphPipelineEngine)
    with pytest.raises(
        AttributeError, match=r"engine.compile does not exist for a graph of stages: stages run code"
    ):
        engine.compile  # noqa: B018
    with pytest.raises(AttributeError, match=r"did you mean engine.train_batch\?"):
        engine.train_bach  # noqa: B018
    assert not hasattr(engine, "zero_offload_param") and not hasattr(engine, "_private")


def test_an_engine_answers_for_its_rank() -> None:
    model, _ = build("gpt2")
    names = set(dict(model.named_parameters()))
    seen: set[str] = set()
    for rank, answer in enumerate(run_kept_ranks(jobs.ask, 2)):
        assert set(answer["names"]) <= names and answer["count"] == len(answer["names"])
        assert answer["state"].keys() >= set(answer["names"])
        assert answer["changed"] and answer["restored"], (
            "a state that is loaded is the one that is trained on"
        )
        assert answer["positions"] == (rank, 0) and answer["batch"] == (8, 2, 4)
        assert answer["applied"] == [False, True] and answer["training"]
        assert answer["attributes"] == {
            "world_size": 2, "local_rank": rank, "num_stages": 1, "dp_world_size": 2, "mp_world_size": 1,
            "is_pipe_parallel": False, "is_data_parallel": True, "is_model_parallel": False,
            "pipeline_parallelism": True, "micro_batch_size": 2, "micro_batches": 4, "micro_steps": 4,
        }  # fmt: skip
        assert answer["last_loss"] == answer["losses"] and answer["same_names"]
        assert answer["mom"] == [(0.9, 0.999)] * len(answer["mom"]) and answer["mom"]
        assert answer["optimizer"] == {"lr": 1e-3, "weight_decay": 0.01}
        assert answer["dynamic"] and not answer["drop_last"] and answer["scheduler"] is None
        seen |= set(answer["names"])
    assert seen == names
    assert all(torch.is_tensor(value) for value in answer["state"].values())
