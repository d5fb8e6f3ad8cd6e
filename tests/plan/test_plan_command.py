"""`gpp plan`: what is planned where little is said, and the one line that answers what a user gets wrong."""

import dataclasses
import json

import pytest

from gpp_plugin.api import make_request
from gpp_plugin.cli import main
from gpp_plugin.integrations.huggingface.hf_models import build_on_meta, read_hf_config
from gpp_plugin.library.named_models import config_path, usual_loss_unit
from gpp_plugin.plan.cluster_files import CLUSTER_DIR, read_cluster
from gpp_plugin.plan.costs.long_context import LayerShape, expert_exchange_us, on_paper
from gpp_plugin.plan.request import limit_gb


def test_a_model_that_fits_nowhere_says_by_how_much_and_which_knob(tmp_path, capsys):
    description = json.loads((CLUSTER_DIR / "summit.json").read_text())
    description["devices"][0]["memory_gb"] = 0.05
    path = tmp_path / "c.json"
    path.write_text(json.dumps(description))
    assert main(["plan", "mmt", "--devices", "8", "--loss-unit", "1", "--cluster", str(path)]) == 1
    # where nobody looks a long search says nothing in front of it
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("gpp plan: no plan fits: stage ")
    assert "rank " in error and "may use 50000000 (" in error and "too many" in error
    assert "alone needs " in error and "raise --memory-limit-gb by " in error


REQUESTS = [
    (["--stages", "40", "--devices", "64"], "--stages: 40 is more than the 33 blocks of the model; write --stages 33, or"),
    (
        ["--virtual-stages", "20"],
        "--virtual-stages: 20 on 4 ranks makes at least 40 stages and the model has 33 blocks; write --virtual-stages 16",
    ),
    (
        ["--virtual-stages", "2", "--set", "stages=6"],
        "--set stages: 6 is not possible with --virtual-stages 2, which makes 4 or 8 stages on 4 ranks; change --set stages",
    ),
    (["--stages", "5", "--mode", "async"], "--stages: mode async has one stage a rank; write --virtual-stages 1, --colo"),
    (
        ["--colocate", "auto", "--planner", "stock_1f1b"],
        "planner 'stock_1f1b' makes stages for DeepSpeed's own PipelineEngine, which holds one a rank",
    ),
    (["--mini-batch", "63", "--micro-batch", "4"], "--micro-batch: 4 does not divide --mini-batch 63; give 3 or 7"),
    (["--loss-unit", "5"], "--loss-unit: 5 does not divide --mini-batch 64; give 4 or 8"),
    (["--data-parallel", "3"], "--data-parallel: 3 does not divide 4 ranks; give 2 or 4"),
    (["--zero", "3", "--mode", "async"], "--zero: 3 is not valid in mode async, which needs several versions of the weights"),
    (["--set", "memory.limit_gb=0.01"], "no plan fits: stage "),
    (["--set", "trace_path=t.json"], "--set trace_path: no plan depends on it; leave it out"),
    (["--set", "memory.recompute=full"], '--set memory.recompute: "full" is for training; give one of auto, off'),
    (["--memory", '{"recompute": "full"}'], '--memory-recompute: "full" is for training; give one of auto, off'),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REQUESTS)
def test_a_wrong_request(arguments, message, capsys):
    defaults = ["--devices", "4", "--cluster", "summit", "--mini-batch", "64"]
    assert main(["plan", "mmt", *defaults, *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"gpp plan: {message}")
    assert error.count("\n") == 1


def test_the_help_offers_no_value_that_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "--memory-recompute {auto,off}\n" in capsys.readouterr().out


def planned(capsys, *arguments):
    assert main(["plan", *arguments, "--planner", "uniform", "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    return "\n".join(text), json.loads(last)


def test_the_cluster_says_what_is_trained_in(capsys):
    text, found = planned(capsys, "mmt", "--devices", "4")
    assert found["dtype"] == "bf16" and "of H100-80GB in bf16 (the cluster's; --dtype says another)" in text
    text, slow = planned(capsys, "mmt", "--devices", "4", "--dtype", "fp32")
    assert slow["dtype"] == "fp32" and "of H100-80GB in fp32;" in text
    assert slow["iteration_us"] > 4 * found["iteration_us"]
    assert slow["rows"][0]["memory_bytes"] > 1.3 * found["rows"][0]["memory_bytes"]
    _, summit = planned(capsys, "mmt", "--cluster", "summit", "--devices", "4")
    assert summit["dtype"] == "fp32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "laptop_cpu", "--dtype", "bf16"], "has a speed in fp32 and none in bf16"),
        (["--length", "256"], "--length: is for HuggingFace models; mmt has sizes: --size NAME=VALUE"),
        (["--on-paper"], "--on-paper: is for HuggingFace models; mmt is a library model"),
    ],
)
def test_what_is_refused(arguments, message, capsys):
    assert main(["plan", "mmt", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_is_not_built_is_told_on_paper(capsys, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
    text = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 64, **sizes}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 3}
    (tmp_path / "config.json").write_text(json.dumps({**text, **experts}))
    arguments = ["--devices", "8", "--length", "64", "--on-paper", "--against", "none"]
    told, found = planned(capsys, str(tmp_path), *arguments)
    assert "context parallelism" in told and "experts on ranks of their own" in told
    device = read_cluster("dgx_h100", num_devices=8, dtype="bf16")
    shape = LayerShape(length=64, width=64, query_width=64, key_width=16, chosen_experts=3)
    rows = on_paper(shape, [2, 4, 8], device.devices[0], device.links[0])
    assert found["on_paper"] == [dataclasses.asdict(row) for row in rows]
    assert rows[0].experts == pytest.approx(expert_exchange_us(32, 64, 3, 2, device.links[0]))
    (tmp_path / "config.json").write_text(
        json.dumps({**text, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    told, found = planned(capsys, str(tmp_path), *arguments, "--devices", "2")
    assert [row["ranks"] for row in found["on_paper"]] == [2] and "experts" not in told
    resnet = tmp_path / "resnet.json"
    resnet.write_text(json.dumps({"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}))
    assert main(["plan", str(resnet), "--devices", "2", "--on-paper"]) == 1
    assert "has no hidden_size and num_attention_heads; leave --on-paper out" in capsys.readouterr().err


def test_mini_batches_grow_with_the_devices():
    sizes = {"branches": 2, "layers": 1}
    assert make_request("mmt", "dgx_h100", num_devices=4, sizes=sizes).mini_batch == 64
    assert make_request("mmt", "dgx_h100", num_devices=32, sizes=sizes).mini_batch == 256
    assert make_request("mmt", "dgx_h100", num_devices=4, sizes=sizes, loss_unit=48).mini_batch == 96


@pytest.mark.parametrize(
    ("model", "length", "devices", "unit"),
    [("gpt2-345m", 512, 4, 4), ("gpt2-345m", 512, 1, 8), ("llava-7b", 2048, 8, 2), ("llava-7b", 8192, 8, 1),
     ("clip-l14", 77, 8, 64)],
)  # fmt: skip
def test_loss_units_of_a_sensible_size(model, length, devices, unit):
    path = config_path(model)
    assert usual_loss_unit(path, mini_batch=64, length=length, num_devices=devices) == unit


@pytest.mark.parametrize(
    ("model", "billions"),
    [("llava-34b", 34.8), ("vl-72b", 73.2), ("vit22b-llama70b", 92.5), ("t5-11b", 11.3), ("clip-18b", 18.2)],
)
def test_configurations_of_models_that_do_not_fit_on_a_device(model, billions):
    built = build_on_meta(read_hf_config(config_path(model)))
    assert sum(p.numel() for p in built.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (477_600, "0.0004776"),
        (477_601, "0.0004777"),
        (12_345_400_000, "12.35"),
        (8_000_000_000, "8"),
        (80_000_000_001, "80.01"),
        (7, "0.000000007"),
        (9_999_900, "0.01"),
    ],
)
def test_the_limit_that_is_told_allows_the_bytes(num_bytes: int, said: str) -> None:
    assert limit_gb(num_bytes) == said
    assert round(float(said) * 1e9) >= num_bytes
