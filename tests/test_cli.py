"""The gpp command: what it prints, its JSON line, its exit codes."""

import argparse
import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpp_benchmarks
from gpp_plugin import api
from gpp_plugin.cli import COMMANDS, _make_parser, bench_names, main
from gpp_plugin.errors import EXTRAS, ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import fingerprint, load, save
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.library.named_models import huggingface_model
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.simulate.timeline_metrics import timeline_overlap
from tests.waits import run_program

BENCHES = Path(gpp_benchmarks.__file__).parent
PLAN = ["plan", "mmt", "--devices", "4", "--cluster", "summit", "--size", "branches=2"]


@pytest.fixture
def plan_file(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main([*PLAN, "--out", str(path)]) == 0
    capsys.readouterr()
    return path


def last_json(text):
    return json.loads(text.splitlines()[-1])


def gpp(*arguments, setting="", stdout=subprocess.PIPE, **variables):
    """Run gpp in a process of its own, whose encoding and modules are its own, behind statements that set it up."""
    code = f"import sys; {setting or 'pass'}; from gpp_plugin.cli import main; sys.exit(main())"
    command, environment = [sys.executable, "-c", code, *arguments], {**os.environ, **variables}
    return run_program(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=120)


def test_help_names_every_command_and_needs_no_torch():
    done = gpp("--help", setting="sys.modules['torch'] = None")
    assert (done.returncode, done.stderr) == (0, b"")
    assert all(f"    {command.name}" in done.stdout.decode() for command in COMMANDS)


def test_the_package_run_as_a_module_is_the_command():
    command = [sys.executable, "-m", "gpp_plugin", "--version"]
    done = run_program(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("gpp ")


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "gpp: the following arguments are required: COMMAND; see gpp --help"),
        (["pln"], "gpp: argument COMMAND: no 'pln'; did you mean 'plan'? (choose from demo, "),
        (["bench", "throughptu"], "gpp bench: argument NAME: no 'throughptu'; did you mean 'throughput'? ("),
        (["plan", "mmt", "--devcies", "4"], "gpp plan: there is no option --devcies; did you mean '--devices'?; see"),
        (["plan", "mmt", "--dev", "4"], "gpp plan: there is no option --dev; "),  # no abbreviations
        (["plan", "mmt", "--mode", "asynch"], "gpp plan: --mode: \"asynch\" is not valid; give one of sync, async; did you mean 'async'?; see"),
        (["plan", "mmt", "--memory", "recmpute"], "gpp plan: --memory: \"recmpute\" is not valid; give an object with limit_gb, recompute, swap, or a list of"),
        (
            ["plan", "--memory", "recompute", "swap", "mmt"],
            "gpp plan: mmt: not expected here; several values of --memory or --length or --against have commas between",
        ),
        (["plan", "mmt", "--set", "stages"], "gpp plan: --set: 'stages' is not KEY=VALUE, e.g. memory.limit_gb=8; see gpp plan"),
        (["plan", "mmt", "--set", "stages=2", "--stages", "3"], "gpp plan: --stages: --set stages is there already; leave one"),
        (["plan", "mmt", "--width", "0"], "gpp plan: argument --width: 0 is not valid; give at least 1; see"),
        (["report"], "gpp report: the following arguments are required: FILE; see gpp report --help"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_with_the_nearest_name(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.endswith(" --help\n") and error.count("\n") == 1


def test_a_reader_that_goes_ends_the_command_quietly(plan_file):
    for arguments, unbuffered in (
        (["report", str(plan_file)], "1"),
        (["report", str(plan_file)], ""),
        (["--help"], ""),
    ):
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = gpp(*arguments, stdout=write_end, PYTHONUNBUFFERED=unbuffered)
        os.close(write_end)
        assert (done.returncode, done.stderr) == (141, b"")


def test_an_encoding_without_boxes_gets_them_in_ascii(plan_file):
    done = gpp("report", str(plan_file), LC_ALL="C", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    printed = done.stdout.decode("ascii")
    assert "+--" in printed and "|" in printed and "?" not in printed
    usual = gpp("report", str(plan_file), PYTHONIOENCODING="utf-8").stdout.decode()
    assert [len(line) for line in printed.splitlines()] == [len(line) for line in usual.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        (["plan", "clip-l14"], "transformers", "hf"),
        (["compare", "clip_tiny", "--cluster", "summit"], "transformers", "hf"),
        (["compare", "clip_tiny"], "transformers", "hf"),
        (["demo"], "sklearn", "demo"),
        (["bench", "loading"], "transformers", "hf"),
    ],
)
def test_what_is_not_installed_is_one_line_with_the_pip_command(arguments, missing, extra):
    done = gpp(*arguments, setting=f"sys.modules[{missing!r}] = None")  # which is a ModuleNotFoundError
    name = " ".join(arguments[: 1 + (arguments[0] == "bench")])
    line = f"gpp {name}: needs {missing}, which is not installed: pip install 'gpp_plugin[{extra}]'\n"
    assert (done.returncode, done.stderr.decode()) == (1, line)


def test_every_extra_that_is_named_is_one():
    extras = next(
        ast.literal_eval(node.value)
        for node in ast.parse((Path(__file__).parents[1] / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXTRAS"
    )
    assert {*EXTRAS.values(), "completion"} <= set(extras)


def test_completion_knows_commands_options_and_values(capsys):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as raised:
        main(["--completion", "bash"])
    assert raised.value.code == 0
    script = capsys.readouterr().out
    words = ("plan", "--memory-limit-gb", "throughput", "--vertical-sync", "async")
    assert all(text in script for text in words)


def test_completion_without_its_package_is_one_line(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as raised:
        main(["--completion", "zsh"])
    assert raised.value.code == 1
    line = "gpp: --completion: needs shtab, which is not installed: pip install 'gpp_plugin[completion]'\n"
    assert capsys.readouterr().err == line


def test_every_benchmark_prints_a_table_or_lines_of_its_own():
    for path in [*BENCHES.glob("*.py"), *BENCHES.glob("*/__init__.py")]:
        module = path.parent.name if path.name == "__init__.py" else path.stem
        if module.startswith("_") or module == "gpp_benchmarks":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)}
        prints = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
            if not any(keyword.arg == "file" for keyword in node.keywords)
        ]
        assert prints or "TABLE" in names, f"gpp bench {module} prints nothing"


def test_everything_fits_on_sixty_columns(plan_file, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "60")
    timeline = tmp_path / "timeline.json"
    for arguments in (["report", str(plan_file)], ["simulate", str(plan_file), "--out", str(timeline)]):
        assert main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        pictures = [line for line in lines if "  " in line.strip() or "─" in line]
        assert pictures and all(len(line) <= 60 for line in pictures)


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
        (["plan", "mmt", "--size", "branches=x"], "gpp plan: model 'mmt': branches is 'x'; give a whole number of at least 1\n"),
        (["plan", "mmt", "--mode", "async", "--devices", "2", "--schedule", "gpipe"], "gpp plan: --schedule: \"gpipe\" is not possible in mode async, which runs 1F1B of whole"),
        (["simulate", "bytes.json"], "gpp simulate: bytes.json: is no text (invalid start byte)"),
        (["simulate", "form.json"], "gpp simulate: form.json: value.stages: 3 is not valid; give a list\n"),
        (["report", "other.json"], "gpp report: other.json: is neither a plan nor a timeline of this package; gpp report"),
        (["bench", "max-batch", "--slowdown", "-1"], "gpp bench max-batch: --slowdown -1 --stages [4, 8]: give a slowdown"),
        (["demo", "--steps", "0"], "gpp demo: --steps: 0 is not valid; give at least 1\n"),
    ],
)  # fmt: skip
def test_a_failure_is_one_line_and_exit_code_1(arguments, message, plan_file, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "other.json").write_text('{"type": "Cluster"}')
    written = json.loads(plan_file.read_text())
    written["value"]["stages"] = 3
    (tmp_path / "form.json").write_text(json.dumps(written))
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_plan_says_what_it_is_better_than(capsys):
    arguments = [*PLAN, "--json"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    result = last_json(printed)
    assert [row["mode"] for row in result["against"]] == ["plain", "stock", "chain", "graph"]
    plain, stock, chain, graph = (row["iteration_ms"] for row in result["against"])
    assert graph == pytest.approx(result["iteration_us"] / 1e3) and graph <= min(chain, plain) * (1 + 1e-9)
    assert f"{stock / graph:.2f} x as fast" in printed and "the best chain" in printed
    assert main([*arguments, "--against", "none"]) == 0
    printed = capsys.readouterr().out
    assert last_json(printed)["against"] == [] and "best chain" not in printed


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


def test_overlap_is_told_by_kind(plan_file, capsys):
    assert main(["simulate", str(plan_file), "--cluster", "summit", "--overlap", "--json"]) == 0
    printed = capsys.readouterr().out
    rows = last_json(printed)["overlap"]
    plan, links = load(PipelinePlan, plan_file), read_cluster("summit", num_devices=4)
    found = timeline_overlap(plan, api.simulate(plan), links)
    told = [(row["kind"], row["count"], row["share"]) for row in rows]
    assert told == [(each.kind, each.count, each.share) for each in found]
    assert "on its way" in printed and all(0.0 <= row["share"] <= 1.0 for row in rows)
    assert main(["simulate", str(plan_file), "--overlap", "--json"]) == 0
    assert last_json(capsys.readouterr().out)["overlap"] == rows, "the plan's own cluster"
    save(dataclasses.replace(plan, cost=None), plan_file)
    assert main(["simulate", str(plan_file), "--overlap"]) == 1
    assert "--overlap needs --cluster" in capsys.readouterr().err


def test_report_of_a_timeline_needs_its_own_plan(plan_file, tmp_path, capsys):
    save(Timeline(source="measured", plan="0" * 16, events=()), tmp_path / "t.json")
    assert main(["report", str(tmp_path / "t.json")]) == 1
    assert capsys.readouterr().err.endswith("a timeline is shown with its plan; add --plan PLAN.json\n")
    assert main(["report", str(tmp_path / "t.json"), "--plan", str(plan_file)]) == 1
    own = fingerprint(load(PipelinePlan, plan_file))
    assert f"is plan {own}, the timeline is of plan" in capsys.readouterr().err


def test_plan_of_an_encoder_that_sees_and_a_decoder(tmp_path, capsys):
    """TrOCR: the sizes of the image are the encoder's; without texts there is no length to give."""
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    text = {"model_type": "trocr", "vocab_size": 32, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
            "decoder_ffn_dim": 64, "max_position_embeddings": 32, "is_decoder": True, "add_cross_attention": True}  # fmt: skip
    start = {"pad_token_id": 1, "decoder_start_token_id": 2}
    config = {
        "model_type": "vision-encoder-decoder", "architectures": ["VisionEncoderDecoderModel"], **start,
        "encoder": {"model_type": "deit", **vision}, "decoder": {**text, **start},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = [str(tmp_path), "--devices", "2", "--length", "8"]
    assert main(["plan", *options, "--against", "none", "--json"]) == 0
    blocks = [block for row in last_json(capsys.readouterr().out)["rows"] for block in row["blocks"]]
    assert any(block.startswith("encoder") for block in blocks)
    assert any("decoder" in block for block in blocks)
    seeing = {"model_type": "vit", "architectures": ["ViTForImageClassification"], **vision}
    (tmp_path / "config.json").write_text(json.dumps(seeing))
    for command in (["plan"], ["compare", "--cluster", "dgx_h100"]):
        assert main([*command, *options]) == 1
        assert "length: ViTForImageClassification takes no text" in capsys.readouterr().err


_FEW = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("family", "kind", "positions", "most"),
    [
        ("bert", "BertForMaskedLM", {"max_position_embeddings": 40}, 40),
        ("roberta", "RobertaForMaskedLM", {"max_position_embeddings": 42, "pad_token_id": 1}, 40),
        ("gptj", "GPTJForCausalLM", {"n_positions": 40, "rotary_dim": 4}, 40),
        (
            "opt",
            "OPTForCausalLM",
            {"max_position_embeddings": 40, "ffn_dim": 16, "word_embed_proj_dim": 16},
            40,
        ),
        ("llama", "LlamaForCausalLM", {"max_position_embeddings": 40}, None),
        (
            "t5",
            "T5ForConditionalGeneration",
            {"n_positions": 40, "d_kv": 8, "decoder_start_token_id": 0},
            None,
        ),
    ],
)
def test_a_length_is_planned_as_asked_or_refused(family, kind, positions, most, tmp_path, caplog):
    """Beyond a table of positions there are no rows; rotary and relative positions are computed, for any length."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, "architectures": [kind], **_FEW, **positions}))
    widths = []
    for length in (40, 41):
        try:
            _, batches = huggingface_model(path, loss_unit=2, lengths=[8, length])
        except ConfigError as error:
            assert f"length: {length} is beyond the {most} positions" in str(error)
        else:
            widths.append([batch["input_ids"].shape[1] for batch in batches])
    assert widths == [[8, 40]] if most else [[8, 40], [8, 41]]
    assert ("computes its positions" in caplog.text) == (most is None)
    _, [batch] = huggingface_model(path, loss_unit=2, lengths=[41], are_asked=False)
    assert batch["input_ids"].shape[1] == (most or 41)


def test_plan_with_memory_optimization(capsys, tmp_path):
    """Operators of a convolutional network, asynchronous: who swaps and recomputes is told stage by stage."""
    arguments = ["plan", "amoebanet", "--planner", "dawnpiper", "--devices", "4", "--cluster", "a100_pcie"]
    arguments += ["--mode", "async", "--memory", "recompute,swap", "--micro-batch", "512", "--loss-unit", "1"]
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
