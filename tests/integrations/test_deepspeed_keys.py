"""One reader for DeepSpeed's keys, and one table of them that leaves out none of the installed release's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime import config as stock
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

from gpp_plugin.cli import main
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.config.deepspeed_keys import KEYS, KeyVerdict, configured_keys, names_in
from gpp_plugin.config.reader import read_config
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.config_values import _MODELS, derive_stage_config, read_deepspeed

# ---- every key of the installed release ------------------------------------------------------------------------


class Asked(dict[str, Any]):
    """A configuration that notes which keys it is asked for, with those of the objects in it."""

    def __init__(self, given: Mapping[str, Any], path: str, asked: set[str]) -> None:
        self.path, self.asked = path, asked
        for key, value in given.items():
            inner = f"{path}.{key}".lstrip(".")
            self[key] = Asked(value, inner, asked) if isinstance(value, dict) else value

    def note(self, key: str) -> None:
        self.asked.add(f"{self.path}.{key}".lstrip("."))

    def __contains__(self, key: object) -> bool:
        self.note(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.note(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # ``in config.keys()``

    def __copy__(self) -> Asked:
        return Asked(dict(self.items()), self.path, self.asked)

    __deepcopy__ = __copy__  # type: ignore[assignment]


PRESENT: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "activation_checkpointing": {},
    "flops_profiler": {},
    "autotuning": {"model_info": {"profile": False}},
    "checkpoint": {"writer": {"type": "FAST"}, "parallel_write": {}},
    "data_efficiency": {
        "data_sampling": {
            "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
            "dynamic_batching": {},
        },
        "data_routing": {"random_ltd": {"enabled": True}},
    },
    "data_types": {},
    "aio": {},
    "timers": {},
    "torch_autocast": {"dtype": "bf16", "lower_precision_safe_modules": []},
    "expert_parallel": {"enabled": False},
}
"""Blocks that DeepSpeed reads key by key, and looks into where they are there."""


def fields_of(model: type[DeepSpeedConfigModel], path: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        for each in {name, field.alias or name}:
            yield f"{path}.{each}"
            for word in re.findall(r"[A-Z]\w+", str(field.annotation)):
                kind = next((k for k in models() if k.__name__ == word), None)
                if kind is not None:
                    yield from fields_of(kind, f"{path}.{each}")


def models() -> list[type[DeepSpeedConfigModel]]:
    found: list[type[DeepSpeedConfigModel]] = []
    left = [DeepSpeedConfigModel]
    while left:
        kinds = left.pop().__subclasses__()
        found, left = [*found, *kinds], [*left, *kinds]
    return found


def keys_of_release() -> set[str]:
    """Return the paths of all keys that the configuration classes of the installed DeepSpeed read."""
    asked: set[str] = set()
    read = stock.DeepSpeedConfig(Asked({"train_batch_size": 1, **PRESENT}, "", asked))
    read_all = stock.DeepSpeedConfig({"train_batch_size": 1, "comms_logger": {}, "weight_quantization": {}})
    for block, model_of in _MODELS.items():
        model = model_of(read_all)
        assert isinstance(model, DeepSpeedConfigModel), block
        asked |= {block, *fields_of(type(model), block)}
    asked |= set(fields_of(type(read.timers_config), "timers.throughput"))
    asked |= {f"pipeline.{key}" for key in read.pipeline}
    asked |= {f"zero_optimization.{key}" for key in stock._REMOVED_ZERO_CONFIG_KEYS}
    return asked


def test_the_table_has_every_key_of_the_installed_release() -> None:
    found = keys_of_release()
    assert len(found) > 300
    assert {"zero_optimization.offload_optimizer.ratio", "nebula", "fp16.hysteresis"} <= found
    missing = sorted(path for path in found if path not in KEYS and path != "graph_pipeline")
    assert not missing, f"DeepSpeed {deepspeed.__version__} reads {missing}, of which KEYS has no verdict"
    assert all(key.note for key in KEYS.values() if key.verdict is not KeyVerdict.HONOURED)


def test_a_key_in_a_wrong_place_is_never_taken_for_another_one() -> None:
    own = {*GraphPipelineConfig.model_fields, "compile_deepcompile"}
    for path in KEYS:
        block, _, name = path.rpartition(".")
        wrong = f"{block.replace('.', '_')}_{name}" if block else name
        if block:
            told: list[str] = []
            try:
                told += read_deepspeed({wrong: 3}).warnings
            except ConfigError as error:
                told += str(error).splitlines()
            (line,) = [line for line in told if line.startswith(f"{wrong}:")]
            assert line.endswith((f"it has no effect: write {path}", f"would ignore it; write {path}")), line
        if wrong not in own:
            with pytest.raises(
                ConfigError, match=f"it is DeepSpeed's: {f'write {path}' if block else 'move it'}"
            ):
                read_config({"train_batch_size": 8, "graph_pipeline": {wrong: 3}})


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--keys", "--json"]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert len(result["rows"]) == sum(result["counts"].values()) == len(KEYS)
    assert "pipeline.activation_checkpoint_interval" in printed


ASKED: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
    ("managed_gradient_accumulation", (True, None, "auto"), (False,)),
    ("gradient_allreduce_op", ("mean", "MEAN", ""), ("sum",)),
    ("data_parallel_size", (1, "auto", False), (2, 0)),
    ("tensor_parallel.autotp_size", (0, 1, False), (2, True)),
    ("zero_optimization.offload_optimizer.ratio", (1.0, 1, None), (0.5,)),
    ("pipeline.activation_checkpoint_interval", (0,), (1,)),
    ("checkpoint.tag_validation", ("Fail", "fail"), ("Warn",)),
    ("prescale_gradients", (False, None), (True,)),
    ("elasticity", ({}, [], None), ({"enabled": True},)),
]


@pytest.mark.parametrize(("path", "nothing", "something"), ASKED)
def test_a_value_asks_for_something_unless_it_is_what_happens_anyway(
    path: str, nothing: tuple[Any, ...], something: tuple[Any, ...]
) -> None:
    assert not any(KEYS[path].is_requested(value) for value in nothing)
    assert all(KEYS[path].is_requested(value) for value in something)


def test_keys_of_blocks_that_are_off_are_not_given() -> None:
    config = {
        "bfloat16": {"enabled": True, "check_grad_overflow": False},
        "fp16": {"loss_scale": 0},
        "hybrid_engine": {"enabled": "auto", "max_out_tokens": 5},
        "tensorboard": {"enabled": None, "job_name": "x"},
        "weight_quantization": {"num_bits": 4},
        "timers": {"throughput": {"synchronized": True}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1, "max_grad_norm": 1.0}},
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
    }
    assert [path for path, _ in configured_keys(config)] == [
        "bf16", "bf16.enabled", "bf16.check_grad_overflow", "fp16", "hybrid_engine", "tensorboard",
        "weight_quantization", "weight_quantization.num_bits", "timers", "timers.throughput",
        "timers.throughput.synchronized", "optimizer", "optimizer.type", "optimizer.params",
        "optimizer.params.max_grad_norm", "zero_optimization", "zero_optimization.offload_optimizer",
        "zero_optimization.offload_optimizer.device",
    ]  # fmt: skip
    assert names_in("bfloat16") == names_in("bf16") != ()


# ---- one reader ------------------------------------------------------------------------------------------------

AUTO: list[dict[str, Any]] = [
    {"bf16": {"enabled": "auto"}},
    {"bfloat16": {"enabled": "auto"}},
    {"fp16": {"enabled": "auto", "loss_scale": "auto", "hysteresis": "auto"}},
    {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
    {"zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"}},
    {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "auto", "pin_memory": "auto"}}},
    {"tensorboard": {"enabled": "auto"}, "comms_logger": {"enabled": "auto"}},
    {"hybrid_engine": {"enabled": "auto"}, "compile": {"deepcompile": "auto"}},
    {"tensor_parallel": {"autotp_size": "auto"}},
]


@pytest.mark.parametrize("config", AUTO, ids=json.dumps)
def test_auto_is_read_as_deepspeed_reads_it(config: dict[str, Any]) -> None:
    """It was `bool("auto")` for bf16: no masters, in 8 bits, where DeepSpeed trains in fp32."""
    read = stock.DeepSpeedConfig({"train_batch_size": 1, **config})
    derived = derive_stage_config(config, mini_batch=8, degree=1, device_type="cpu")
    halves = {"float16": read.float16_config.enabled, "bfloat16": read.bfloat16_config.enabled}
    assert derived.dtype == next((name for name, is_on in halves.items() if is_on), "float32")
    assert derived.zero_stage == read.zero_optimization_stage
    settled = read_deepspeed(config).config
    assert "auto" not in json.dumps(settled) and read_deepspeed(settled).config == settled


REFUSED: list[tuple[dict[str, Any], str]] = [
    # what DeepSpeed itself refuses
    ({"curriculum_learning": {"enabled": True}}, "curriculum_learning: {.* is refused by DeepSpeed"),
    ({"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop: "),
    ({"quantize_training": {"enabled": True}}, "quantize_training: "),
    ({"eigenvalue": {"enabled": True}}, "eigenvalue: "),
    ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention: "),
    ({"nebula": {"enabled": False}}, "nebula: "),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "zero_optimization.mics_shard_size: 2 "),
    ({"checkpoint": {"tag_validation": "Strict"}}, 'checkpoint.tag_validation: "Strict" '),
    ({"bf16": {"enabled": True, "masters": 1}}, "bf16.masters: unknown key .value 1.; the keys are .*check_grad"),
    ({"bf16": {"masters": 1}, "compile": {"x": 1}}, "bf16.masters: unknown key"),
    ({"zero_optimization": {"offload_optimizer": {"where": "cpu"}}}, "zero_optimization.offload_optimizer.where: unk"),
    ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.*: .*min_loss_scale must be > 0"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled, bf16.enabled: both are true; choose one"),
    # what stages cannot do
    ({"data_parallel_size": 2}, "data_parallel_size: 2 is not supported"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, "zero_optimization.zero_quant"),
    ({"zero_optimization": {"stage": 3, "cpu_offload_param": True}}, "zero_optimization.cpu_offload_param: true"),
    ({"zero_optimization": 1}, "zero_optimization: expected an object"),
    ({"zero_optimization": {"stage": 1, "zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow: "),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, "zero_opt.*.offload_optimizer.device: "),
    ({"communication_data_type": "int8"}, 'communication_data_type: "int8"'),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size: 2 is not .*shared out .* by graph_pipeline"),
    ({"optimizer": {"type": "Muon", "params": {}}}, "optimizer.type: Muon"),
    ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal: "),
    ({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.offload_optimizer: needs ZeRO"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": {"stage": 1}}, "bf16.bf16_m"),
    ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled: true"),
    ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled: true"),
    ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "optimizer.type: OneBitAdam compresses gradients"),
    ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm: .*_clipping"),
    # what no job means
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr: \"auto\" is filled in by Hugg"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "scheduler.params.warmup_num_steps: "),
    ({"gradient_clipping": "auto"}, "gradient_clipping: \"auto\" "),
    ({"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}},
     "gradient_clipping, optimizer.params.lr, optimizer.params.betas: \"auto\" is filled .*GraphPipelineTrainer$"),
    ({"zero_optimization": False}, "zero_optimization: expected an object, found false; write .\"stage\": 0.$"),
    ({"steps_per_print": "auto"}, "steps_per_print: \"auto\" "),
    ({"flops_profiler": {"enabled": "auto"}}, "flops_profiler.enabled: \"auto\" "),
    ({"activation_checkpointing": {"cpu_checkpoint": True}}, "activation_checkpointing.cpu_check.*did you mean 'cpu_"),
    ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "zero_optimization.offload_optimizer.devise: .*'dev"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "line"), REFUSED, ids=[json.dumps(config) for config, _ in REFUSED])
def test_what_is_refused_is_one_line_that_names_its_key(config: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        read_deepspeed(config)
    assert "\n" not in str(caught.value)


def test_what_has_no_effect_is_said() -> None:
    reading = read_deepspeed(
        {
            "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False},
            "pipeline": {"activation_checkpoint_interval": 1, "stages": "auto"},
            "checkpoint": {"tag_validation": "Ignore"},
            "prescale_gradients": True,
            "_comment": "ours",
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": True,
                "reduce_bucket_size": 1,
                "cpu_offload": False,
            },
            "flops_profiler": {"enabled": False, "module_depth": 2},
            "torch_autocast": {"enabled": False, "dtype": "bf16"},
            "weight_quantization": {"enabled": False},
        }
    )
    assert [line.split(": ")[0] for line in reading.warnings] == [
        "activation_checkpointing.cpu_checkpointing",
        "pipeline.activation_checkpoint_interval",
        "checkpoint.tag_validation",
        "prescale_gradients",
        "_comment",
    ]
    assert "graph_pipeline.memory.recompute" in reading.warnings[0]
    assert [line.split(": ")[0] for line in reading.notes] == [
        "zero_optimization.overlap_comm",
        "gradient_clipping",
    ]
    assert not any("clipping" in line for line in read_deepspeed({"gradient_clipping": 0.0}).notes)


def test_names_of_older_releases_are_read() -> None:
    old = {"bfloat16": {"enabled": True}, "zero_optimization": {"stage": 1, "cpu_offload": True}}
    settled = read_deepspeed(old).config
    assert settled["bf16"] == {"enabled": True} and "bfloat16" not in settled
    assert settled["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_values_of_the_arguments_and_of_the_json_are_compared() -> None:
    """A JSON with another rate and other betas trained on the JSON's, unsaid."""
    from gpp_plugin.integrations.trainer.trainer_config import engine_config

    args = SimpleNamespace(
        per_device_train_batch_size=2, gradient_accumulation_steps=1, max_grad_norm=1.0, bf16=False, fp16=False,
        learning_rate=1e-3, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0,
        get_warmup_steps=lambda steps: 0,
    )  # fmt: skip
    told = {"mini_batch": 4, "units": None, "counts_tokens": False}
    params = {"lr": 1e-6, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.1}
    schedule = {"warmup_max_lr": 1e-6, "warmup_num_steps": 5, "total_num_steps": 9}
    given = {
        "gradient_clipping": 0.1,
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
    }
    with pytest.raises(ConfigError) as caught:
        engine_config(given, args, max_steps=50, **told)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines[:-1]] == [
        "gradient_clipping", "fp16.enabled", "optimizer.params.lr", "optimizer.params.betas",
        "optimizer.params.weight_decay", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
    ]  # fmt: skip
    assert "1e-06 in the DeepSpeed configuration, and TrainingArguments say 0.001 (learning_rate)" in lines[2]
    same = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}}
    assert engine_config(same, args, max_steps=50, **told)["optimizer"] == same["optimizer"]
    # where nothing is trained nobody knows the steps of a schedule
    params = {"total_num_steps": 9, "warmup_num_steps": "auto"}
    own = {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    settled = engine_config(own, args, max_steps=0, **told)["scheduler"]["params"]
    assert settled == {"total_num_steps": 1, "warmup_num_steps": 1}
