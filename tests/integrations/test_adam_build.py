"""A JSON Adam where DeepSpeed's FusedAdam cannot be compiled: torch's fused one, with the same update, and it is said."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.cpp_extension
from deepspeed.ops.op_builder import CPUAdamBuilder, builder

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed import dispatch, optimizer_bytes
from gpp_plugin.integrations.deepspeed.optimizer_bytes import why_no_fused_adam, with_usable_adam
from tests.integrations import toy
from tests.ranks import run_kept_ranks

NO_NVCC = "CUDA_HOME does not exist, unable to compile CUDA op(s)"


@pytest.fixture
def without_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with CUDA and no toolkit, as pip installs it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)


def let_go() -> Any:
    """Return what only itself refers to, as a destroyed engine."""
    engine = torch.nn.Module()
    engine.__dict__["itself"] = engine
    return engine


def usable(params: dict[str, Any], kind: str = "AdamW", **more: Any) -> tuple[dict[str, Any], str]:
    config = {"train_batch_size": 8, "optimizer": {"type": kind, "params": params}, **more}
    changed, note = with_usable_adam(config, device_type="cuda", group=None)
    assert config["optimizer"]["params"] is params, "the user's own is left as it is"
    return changed["optimizer"]["params"], note


def test_a_job_on_gpus_without_nvcc_trains_with_torchs_fused_adam(
    without_nvcc: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What `deepspeed.initialize` makes an engine of; at 37ec3e4 DeepSpeed's optimizer, which compiles and fails."""
    sizes = SimpleNamespace(mini_batch=8)
    setting = SimpleNamespace(rank=0, group=None, device=torch.device("cuda", 0), sizes=sizes)
    made: list[dict[str, Any]] = []

    def make_engine(**given: Any) -> Any:
        made.append(given)
        return SimpleNamespace(optimizer=None, training_dataloader=None, lr_scheduler=None)

    monkeypatch.setattr(dispatch, "_make_setting", lambda *_: setting)
    monkeypatch.setattr(dispatch, "ModelSource", lambda *_, **__: None)
    monkeypatch.setattr(dispatch, "GraphPipelineEngine", make_engine)
    model = dispatch.GraphPipelineModule(torch.nn.Linear(2, 2), sample_batch={"input": torch.zeros(8, 2)})
    config = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    gone = weakref.ref(let_go())
    with caplog.at_level(logging.WARNING):
        dispatch.initialize(model=model, config=config | {"graph_pipeline": {"enabled": True}})
    assert gone() is None, "what an engine of before held would be there beside this one's"
    params = made[0]["ds_config"]["optimizer"]["params"]
    assert params == {"lr": 0.1, "weight_decay": 0.0, "torch_adam": True, "fused": True}
    said = [r.getMessage() for r in caplog.records if "torch's fused implementation" in r.getMessage()]
    assert len(said) == 1 and NO_NVCC in said[0]


def test_hyper_parameters_are_those_of_deepspeeds_own(without_nvcc: None) -> None:
    """FusedAdam decays by 0 where nothing is said, and decouples the decay unless ``adam_w_mode`` is false."""
    assert usable({"lr": 0.1, "betas": [0.8, 0.9], "bias_correction": True})[0] == {
        "lr": 0.1, "betas": [0.8, 0.9], "weight_decay": 0.0, "torch_adam": True, "fused": True,
    }  # fmt: skip
    coupled, _ = usable({"weight_decay": 0.3, "adam_w_mode": False}, kind="Adam")
    assert coupled == {"weight_decay": 0.3, "adam_w_mode": False, "torch_adam": True, "fused": True}
    assert "fused" not in usable({"foreach": True})[0]
    with pytest.raises(ConfigError, match="bias_correction.* hold what torch's Adam does not know"):
        usable({"bias_correction": False})


def test_what_a_user_chose_is_left(without_nvcc: None) -> None:
    assert usable({"torch_adam": False}) == ({"torch_adam": False}, "")
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert usable({"lr": 0.1}, zero_optimization=offload) == ({"lr": 0.1}, "")
    assert usable({"lr": 0.1}, kind="SGD") == ({"lr": 0.1}, "")
    on_cpu = {"optimizer": {"type": "AdamW"}}
    assert with_usable_adam(on_cpu, device_type="cpu", group=None) == (on_cpu, "")
    assert with_usable_adam({}, device_type="cuda", group=None) == ({}, "")


def test_all_ranks_take_the_same(without_nvcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of a stage on two machines, one of which has nvcc, would step apart."""
    monkeypatch.setattr(optimizer_bytes, "exchange", lambda make, **_: ["", make()])
    params, note = usable({"lr": 0.1})
    assert params["fused"]
    assert note.startswith("optimizer.type AdamW: on rank 1 DeepSpeed's FusedAdam cannot be")
    monkeypatch.setattr(optimizer_bytes, "exchange", lambda make, **_: ["", ""])
    assert usable({"lr": 0.1}) == ({"lr": 0.1}, "")


def test_why_it_cannot_be_compiled(without_nvcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_fused_adam() == NO_NVCC
    monkeypatch.setattr(builder, "installed_cuda_version", lambda *_: (11, 8))
    assert "version 11.8 does not match the version torch was compiled with" in why_no_fused_adam()
    monkeypatch.setattr(builder, "installed_cuda_version", lambda *_: (13, 0))
    monkeypatch.setattr(optimizer_bytes.shutil, "which", lambda name: None if name == "ninja" else name)
    assert why_no_fused_adam() == "ninja cannot be found"
    monkeypatch.setattr(optimizer_bytes.shutil, "which", lambda name: name)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert why_no_fused_adam() == ""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")  # of an image for one GPU
    assert why_no_fused_adam().startswith("its builder cannot read TORCH_CUDA_ARCH_LIST='9.0a'")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0+PTX")
    assert why_no_fused_adam() == ""
    monkeypatch.undo()
    monkeypatch.setitem(optimizer_bytes.installed_ops, "fused_adam", True)
    assert why_no_fused_adam() == "", "the installation brought it ready"


MORE: tuple[dict[str, Any], ...] = ({}, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
Trained = list[tuple[str, bool, list[torch.Tensor]]]


def train_both() -> tuple[list[Trained], list[int]]:
    """Return, of a stage with torch's Adam, plain and fused, the optimizer and the weights; and the devices asked for.

    A stage that trains nothing has no engine of DeepSpeed's, and is left out.
    """
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    asked: list[int] = []
    answers: list[Trained] = []
    for more in MORE:
        answers.append([])
        for fused in (False, True):
            params = {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True, "fused": fused}
            config = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": params}, **more}
            get_accelerator().set_device = asked.append
            try:
                engine = toy.make_engine(dist.get_rank(), config)
            finally:
                del get_accelerator().set_device
            for step in range(3):
                toy.feed(engine, step, 2)
                engine.step()
            inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
            weights = [p.detach().float().clone() for p in engine.module.parameters()]
            if engine.is_trained:
                answers[-1].append((type(inner).__name__, bool(inner.param_groups[0]["fused"]), weights))
    return answers, asked


@pytest.fixture(scope="module")
def trained() -> list[tuple[list[Trained], list[int]]]:
    return run_kept_ranks(train_both, 4)


def test_the_fused_one_steps_as_the_plain_one_behind_deepspeed(trained: Any) -> None:
    compared = 0
    for answers, _ in trained:
        for more, pair in zip(MORE, answers, strict=True):
            if not pair:
                continue
            plain, fused = pair
            assert (plain[0], fused[0]) == ("AdamW", "AdamW"), "of a JSON Adam DeepSpeed makes AdamW"
            assert (plain[1], fused[1]) == (False, True)
            for left, right in zip(plain[2], fused[2], strict=True):
                torch.testing.assert_close(left, right, rtol=2e-2 if more else 1e-5, atol=1e-6)
                compared += 1
    assert compared > 0


def test_deepspeeds_engine_makes_the_ranks_device_the_current_one(trained: Any) -> None:
    """At 37ec3e4 that of LOCAL_RANK, which is not there where four ranks share a device."""
    asked = [devices for _, devices in trained]
    assert any(asked) and all(set(devices) <= {0} for devices in asked), asked


def test_an_operator_that_is_compiled_is_named_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    said_by_then: list[int] = []
    folders = [Path(torch.utils.cpp_extension._get_build_directory("cpu_adam", False))]
    monkeypatch.setattr(builder.OpBuilder, "jit_load", lambda self: said_by_then.append(len(caplog.records)))
    with caplog.at_level(logging.WARNING), optimizer_bytes.saying_what_compiles():
        its = CPUAdamBuilder()
        its.jit_load()
        (folders[0] / "lock").touch()  # another rank compiles
        its.jit_load()
        (folders[0] / "lock").unlink()
        (folders[0] / "cpu_adam.so").touch()
        its.jit_load()
    assert said_by_then == [1, 1, 1]
    assert "compiles its operator cpu_adam" in caplog.text and str(tmp_path) in caplog.text
