"""The gpp command: what it prints, its JSON line, its exit codes."""

import argparse
import json
import subprocess
import sys

import pytest

from gpp_plugin.cli import COMMANDS, _make_parser, bench_names, main
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import fingerprint, load, save
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.simulate.predict import simulate_plan


@pytest.fixture
def plan_file(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert (
        main(
            [
                "plan",
                "mmt",
                "--devices",
                "4",
                "--cluster",
                "summit",
                "--size",
                "branches=2",
                "--out",
                str(path),
            ]
        )
        == 0
    )
    capsys.readouterr()
    return path


def last_json(text):
    return json.loads(text.splitlines()[-1])


def test_help_names_every_command_and_needs_no_torch():
    code = "import sys; from gpp_plugin.cli import main\ntry: main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert all(f"    {command.name}" in done.stdout for command in COMMANDS)


def options_of(*command):
    """Return the options of a command or benchmark."""
    parser, _ = _make_parser(command)
    for word in command:
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = commands.choices[word]
    return parser._actions


def test_every_option_of_every_command_is_described_and_its_data_comes_as_json():
    for command in [(c.name,) for c in COMMANDS] + [("bench", name) for name in bench_names()]:
        options = options_of(*command)
        assert any("--json" in option.option_strings for option in options), command
        assert [option.dest for option in options if not option.help] == [], command


def test_help_of_a_benchmark_keeps_its_paragraphs_and_tables(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "max-batch", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert "    dawnpiper   operators; swap and recompute by tensor" in lines
    at = lines.index("DawnPiper's Tables 1 and 2.")
    assert lines[at + 1] == "" and lines[at + 2].startswith("A synchronous pipeline")


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["report"], ["plan", "mmt", "--devices", "four"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage: gpp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "missing.json"], "gpp report: missing.json: cannot be read (No such file or directory); give the path of"),
        (
            ["plan", "mmtt"],
            "gpp plan: model 'mmtt': no such file, configuration or library model; did you mean 'mmt'? (known: ",
        ),
        (["plan", "mmt", "--cluster", "sumit"], "gpp plan: cluster 'sumit': no such file; did you mean 'summit'?"),
        (["plan", "mmt", "--size", "branches"], "gpp plan: --size: 'branches' is not NAME=VALUE, e.g. branches=8\n"),
        (["plan", "mmt", "--mini-batch", "0"], "gpp plan: --mini-batch 0: give at least 1 sample\n"),
        (["plan", "mmt", "--size", "branches=x"], "gpp plan: model 'mmt': branches is 'x'; give a whole number of at least 1\n"),
        (["plan", "mmt", "--mode", "async", "--devices", "2", "--schedule", "gpipe"], "gpp plan: schedule 'gpipe': mode async runs 1f1b; use \"auto\"\n"),
        (["simulate", "bytes.json"], "gpp simulate: bytes.json: is no text (invalid start byte)"),
        (["bench", "max-batch", "--slowdown", "-1"], "gpp bench max-batch: --slowdown -1 --stages [4, 8]: give a slowdown"),
        (["demo", "--steps", "0"], "gpp demo: --steps: 0 is not valid; give at least 1\n"),
    ],
)  # fmt: skip
def test_a_failure_is_one_line_and_exit_code_1(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = ["plan", "mmt", "--devices", "4", "--cluster", "summit", "--size", "branches=2", "--json"]
    assert main([*arguments, "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    result = last_json(printed)
    plan = load(PipelinePlan, path)
    assert result["command"] == "plan"
    assert result["plan"] == fingerprint(plan)
    assert [row["name"] for row in result["rows"]] == [stage.name for stage in plan.stages]
    assert (result["num_ranks"], result["depth"]) == (4, plan.depth)
    assert result["samples_per_s"] == pytest.approx(plan.mini_batch / plan.iteration_us * 1e6)
    assert "┌" in printed and f"plan written to {path}" in printed


def test_plan_shows_what_carries_each_edge(capsys):
    arguments = ["plan", "mmt", "--devices", "6", "--cluster", "summit", "--size", "branches=3", "--json"]
    assert main([*arguments, "--p2p", "megatron"]) == 0
    printed = capsys.readouterr().out
    edges = last_json(printed)["edges"]
    assert {(edge["src"], edge["dst"]) for edge in edges}
    assert all((edge["transport"] == "native") == bool(edge["reason"]) for edge in edges)
    assert "over P2PCommunicator" in printed
    for edge in edges:
        assert f"{edge['src']} -> {edge['dst']}" in printed
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert {edge["transport"] for edge in last_json(printed)["edges"]} == {"native"}
    assert "P2PCommunicator" not in printed


def test_simulate_then_report(plan_file, tmp_path, capsys):
    out = tmp_path / "timeline.json"
    assert main(["simulate", str(plan_file), "--cluster", "summit", "--out", str(out), "--json"]) == 0
    result = last_json(capsys.readouterr().out)
    plan, timeline = load(PipelinePlan, plan_file), load(Timeline, out)
    assert timeline.source == "predicted"
    assert result["summary"]["iteration_us"] == timeline.iteration_us
    assert len(result["rows"]) == len(timeline.events)

    trace = tmp_path / "trace.json"
    assert main(["report", str(out), "--plan", str(plan_file), "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("predicted: ")
    assert all(f"rank {rank} " in printed for rank in range(plan.num_ranks))
    assert json.loads(trace.read_text())["otherData"]["plan"] == fingerprint(plan)


def test_without_links_a_message_takes_no_time(plan_file, capsys):
    assert main(["simulate", str(plan_file), "--json"]) == 0
    predicted = last_json(capsys.readouterr().out)["summary"]["iteration_us"]
    assert predicted == simulate_plan(load(PipelinePlan, plan_file)).iteration_us


def test_report_of_a_plan(plan_file, capsys):
    assert main(["report", str(plan_file), "--json"]) == 0
    result = last_json(capsys.readouterr().out)
    assert result["command"] == "report"
    assert len(result["rows"]) == len(load(PipelinePlan, plan_file).stages)


def test_report_of_a_timeline_needs_its_own_plan(plan_file, tmp_path, capsys):
    save(Timeline(source="measured", plan="0" * 16, events=()), tmp_path / "t.json")
    assert main(["report", str(tmp_path / "t.json")]) == 1
    assert capsys.readouterr().err.endswith("a timeline is shown with its plan; add --plan PLAN.json\n")
    assert main(["report", str(tmp_path / "t.json"), "--plan", str(plan_file)]) == 1
    assert (
        f"is plan {fingerprint(load(PipelinePlan, plan_file))}, the timeline is of plan"
        in capsys.readouterr().err
    )


def test_a_plan_whose_values_have_the_wrong_form(plan_file, tmp_path, capsys):
    written = json.loads(plan_file.read_text())
    written["value"]["stages"] = 3
    (tmp_path / "form.json").write_text(json.dumps(written))
    assert main(["simulate", str(tmp_path / "form.json")]) == 1
    error = capsys.readouterr().err
    assert "form.json: value.stages: 3 is not valid; give a list\n" in error and error.count("\n") == 1


def test_a_plan_has_no_trace(plan_file, tmp_path, capsys):
    assert main(["report", str(plan_file), "--trace", str(tmp_path / "trace.json")]) == 1
    assert "is a plan; gpp simulate" in capsys.readouterr().err


def test_report_of_something_else(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text('{"type": "Cluster"}')
    assert main(["report", str(path)]) == 1
    assert (
        capsys.readouterr().err
        == f"gpp report: {path}: holds a Cluster; gpp report shows a PipelinePlan or a Timeline\n"
    )


def test_plan_of_a_huggingface_configuration(tmp_path, capsys):
    config = {
        "model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 16,
        "text_config": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
                        "num_hidden_layers": 2, "vocab_size": 64, "eos_token_id": 63, "bos_token_id": 62},
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
                          "num_hidden_layers": 2, "image_size": 32, "patch_size": 8},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", str(tmp_path), "--devices", "3", "--mini-batch", "8", "--stages", "3", "--json"]
    assert main(arguments) == 0
    result = last_json(capsys.readouterr().out)
    assert (result["model"], result["num_stages"]) == ("CLIPModel", 3)
    blocks = [block for row in result["rows"] for block in row["blocks"]]
    assert {"vision_model.encoder.layers.1", "text_model.encoder.layers.1"} <= set(blocks)


def test_plan_with_memory_optimization(capsys, tmp_path):
    """Operators of a convolutional network, asynchronous: who swaps and recomputes is told stage by stage."""
    arguments = ["plan", "amoebanet", "--planner", "dawnpiper", "--devices", "4", "--cluster", "a100_pcie"]
    arguments += [
        "--mode",
        "async",
        "--memory",
        "recompute",
        "swap",
        "--micro-batch",
        "512",
        "--loss-unit",
        "1",
    ]
    arguments += ["--out", str(tmp_path / "plan.json"), "--size", "layers=6", "--memory-report", "--json"]
    assert main([*arguments, "--mini-batch", "2048"]) == 0
    printed = capsys.readouterr().out
    assert "asynchronous" in printed and "of every micro-batch" in printed
    rows = last_json(printed)["rows"]
    assert [row["in_flight"] for row in rows] == [4, 3, 2, 1]
    assert any(row["memory"] for row in rows)
    assert max(row["memory_bytes"] for row in rows) <= 40e9
    assert "stashed weights" in printed
    totals = [part["total"] for part in last_json(printed)["memory"]]
    assert totals == pytest.approx([row["memory_bytes"] for row in rows], rel=1e-6)
    assert "fullest is stage" in printed
    assert main(["report", str(tmp_path / "plan.json"), "--json"]) == 0
    shown = capsys.readouterr().out
    assert "stashed weights" in shown
    assert last_json(shown)["memory"] == last_json(printed)["memory"]


def test_a_benchmark_may_be_told_a_word_that_names_another(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "memory", "--plans", "swap", "--help"])
    assert "--cap-gb" in capsys.readouterr().out
