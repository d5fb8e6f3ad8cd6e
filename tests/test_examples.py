"""The examples run under both launchers, and the configuration is what the documentation says."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import CLIPModel

from gpp_plugin.config.reader import batch_arithmetic, read_config
from gpp_plugin.launch import reserved_port
from tests.ranks import run_kept_ranks
from tests.waits import communicate

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "clip_graph_pipeline.json"


def launcher(name):
    program = Path(sys.executable).parent / name
    if name == "torchrun":
        return [str(program), "--standalone", "--nproc-per-node", "4"]
    with reserved_port() as port:
        pass
    return [str(program), "--num_gpus", "4", "--master_port", str(port)]


def test_the_configuration_is_accepted():
    config = read_config(CONFIG)
    assert config is not None and config.stages == 4
    assert config.micro_batch_sizes == {"loss": "full", "*": 16}
    assert batch_arithmetic(CONFIG, num_ranks=4) == (64, 64, None)


def run_example(name, *arguments):
    """Run an example under a launcher and return what it printed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    process = subprocess.Popen(
        [*launcher(name), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = communicate(process, limit_s=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the launcher's ranks are in its session
        raise
    assert process.returncode == 0, printed
    return printed


def test_the_example_trains_and_saves(tmp_path):
    out = tmp_path / "model"
    arguments = ["--deepspeed_config", str(CONFIG), "--steps", "3", "--save", str(out)]
    printed = run_example("deepspeed", "examples/train_clip_digits.py", *arguments)
    assert "zero-shot accuracy on held-out digits: " in printed
    assert len(list(out.glob("model-*.safetensors"))) == 4
    model = CLIPModel.from_pretrained(out)
    assert sum(p.numel() for p in model.parameters()) > 100_000


@pytest.mark.parametrize(
    ("name", "example", "said"),
    [
        ("torchrun", "train_llava_megatron.py", r"loss on unseen images: (\d+\.\d+)"),
        ("deepspeed", "train_two_encoders.py", r"loss on what it has not seen or heard: (\d+\.\d+)"),
    ],
)
def test_graphs_of_stages_train_as_the_examples_say(name, example, said):
    printed = run_example(name, f"examples/{example}", "--steps", "3")
    assert (found := re.search(said, printed)) is not None, printed
    assert 0.0 < float(found[1]) < 10.0


def read_digits(name, config):
    path = ROOT / "examples" / "train_digit_readers.py"
    spec = importlib.util.spec_from_file_location("digit_readers", path)
    example = importlib.util.module_from_spec(spec)
    sys.modules["digit_readers"] = example
    spec.loader.exec_module(example)
    return example.train(name, steps=2, config=config)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "t5", "llava", "whisper"])
def test_digit_readers_train_alike_on_all_ranks(name):
    config = json.loads((ROOT / "configs" / "digit_readers.json").read_text())
    config["graph_pipeline"]["stages"] = 2
    (loss, share, _), (other_loss, other_share, _) = run_kept_ranks(read_digits, 2, name, config)
    assert loss == other_loss and 0.5 < loss < 10.0  # of 34 words: log(34) is 3.5, and T5 begins further off
    assert share == other_share and 0.0 <= share <= 0.5


def test_the_slurm_script_starts_a_torchrun_a_node(tmp_path):
    for name, text in (("scontrol", "printf 'n7\\nn8\\n'"), ("srun", 'echo "$OMP_NUM_THREADS|$*"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    given = "JOB_NODELIST=n[7-8] JOB_NUM_NODES=2 JOB_ID=123456 GPUS_ON_NODE=8 CPUS_PER_TASK=64"
    environment = dict(f"SLURM_{word}".split("=") for word in given.split())
    environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(ROOT / "examples" / "several_nodes.sbatch")]
    words = [*command, "train.py", "--steps", "2"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.strip() == (
        "8|--kill-on-bad-exit=1 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 123456 "
        "--rdzv-endpoint n7:23456 --tee 3 train.py --steps 2"
    )
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 2
    assert subprocess.run(["bash", "-n", str(ROOT / "examples" / "two_nodes_here.sh")]).returncode == 0
