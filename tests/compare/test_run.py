"""gpp compare from end to end on two ranks, and what it says of modes that cannot run."""

import json

import pytest

from gpp_plugin.cli import main
from gpp_plugin.commands.compare_command import TRAINED, format_modes, remarks, speed_ups
from gpp_plugin.compare.compare_run import ModeResult, result_rows

QUICK = ["--devices", "2", "--stages", "2", "--mini-batch", "4", "--loss-unit", "2", "--length", "8"]


def last_json(text):
    return json.loads(text.splitlines()[-1])


def test_all_modes_train_alike(tmp_path, capsys):
    out = tmp_path / "rows.json"
    options = ["--steps", "2", "--warm-up", "1", "--planner", "uniform", "--out", str(out), "--json"]
    assert main(["compare", "gpt2_tiny", *QUICK, *options]) == 0
    text = capsys.readouterr().out
    answer = last_json(text)
    assert [(row["mode"], row["how"]) for row in answer["rows"]] == [
        ("plain", "measured"), ("single", "measured"), ("stock", "measured"), ("chain", "simulated"),
        ("graph", "measured"),
    ]  # fmt: skip
    plain, single, stock, chain, graph = answer["rows"]
    assert plain["max_loss_difference"] < 1e-5 and plain["stages"] == 1
    assert chain["predicted_ms"] > 0 and "iteration_ms" not in chain
    assert answer["speed_up"]["chain"] == chain["predicted_ms"] / graph["predicted_ms"]
    assert single["max_loss_difference"] is None and single["bubble"] is None
    for row in (stock, graph):
        assert row["max_loss_difference"] < 1e-5
        assert 0 < row["bubble"] < 1
        assert row["stages"] == 2 and row["micro_batches"] == [2, 2]
        assert len(row["peak_bytes_by_rank"]) == 2 and row["peak_bytes"] == max(row["peak_bytes_by_rank"])
        assert sum(row["parameter_bytes_by_rank"]) >= single["parameter_bytes_by_rank"][0]
        assert max(row["parameter_bytes_by_rank"]) < single["parameter_bytes_by_rank"][0]
    trained = (plain, single, stock, graph)
    assert all(row["iteration_ms"] > 0 and row["startup_s"] > 0 for row in trained)
    assert not any(row["draws"] for row in trained) and "random numbers" not in text
    assert all(len(row["losses"]) == 3 for row in trained)
    assert json.loads(out.read_text())["rows"] == answer["rows"]
    assert "x as fast as stock" in text
    assert any("travel as the bits of floats" in note for note in stock["notes"]) == (stock["stages"] > 2)


def test_emulated_modes_that_none_can_run_are_an_error(capsys):
    options = ["--mini-batch", "4", "--loss-unit", "4", "--stages", "1", "--modes", "stock", "--emulate"]
    assert main(["compare", "gpt2_tiny", "--devices", "2", *options]) == 1
    assert "no mode can run this; stock: stock_1f1b: 2 ranks a stage take 8" in capsys.readouterr().err


def test_emulated_pipelines_take_at_least_their_bound(capsys):
    options = ["--planner", "uniform", "--steps", "2", "--emulate", "--scale-time", "2", "--json"]
    assert main(["compare", "gpt2_tiny", *QUICK, *options]) == 0
    answer = last_json(capsys.readouterr().out)
    assert [row["mode"] for row in answer["rows"]] == ["plain", "stock", "chain", "graph"] and answer[
        "emulated"
    ]
    assert answer["rows"][0]["stages"] == 1
    for row in answer["rows"][1:]:
        assert row["how"] == "emulated" and row["stages"] == row["depth"] == 2 and 0 < row["bubble"] < 1
        assert row["iteration_ms"] >= max(
            count * sum(times) for count, times in zip(row["micro_batches"], row["stage_ms"], strict=True)
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpt2_tiny --mini-batch 6", "--loss-unit: 4 does not divide --mini-batch 6"),
        ("gpt2_tiny --scale-time 2", "--scale-time: is for --emulate"),
        ("gpt2_tiny --emulate --modes single", "give --modes plain,stock,chain,graph"),
        ("gpt2_tiny --config absent.json", "absent.json: cannot be read"),
        (
            "gpt2_tiny --config ds.json --mini-batch 8 --stages 2",
            "--mini-batch, --stages: cannot be combined",
        ),
        ("mmt --cluster summit --emulate", "--cluster: simulates, without --config and --emulate"),
        ("mmt --dtype bf16", "--dtype: is for --cluster"),
        ("mmt --modes chain", "modes: chain is never trained; add graph, or give --emulate or --cluster"),
        ("mmt --modes stok", "modes: stok; did you mean 'stock'?"),
        ("mmt --cluster summit --length 64", "--length: is for HuggingFace models; mmt has sizes: --size"),
        ("clip_tiny --size layers=2", "--size: is for library models (mmt, dlrm, "),
        ("mine:make --length 64", "--length: the batches are those that mine:make returns"),
    ],
)
def test_wrong_options_are_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "mine.py").write_text("def make(): ...\n")
    assert main(["compare", *words.split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith("gpp compare: ") and message in error and error.count("\n") == 1


def result(mode, times, losses, **more):
    return ModeResult(
        mode=mode, num_ranks=4, times_ms=times, losses=losses, memory_measure="saved tensors",
        peak_bytes_by_rank=[1024, 2048], parameter_bytes_by_rank=[512, 512], startup_s=1.5, **more,
    )  # fmt: skip


def test_rows_hold_medians_and_the_largest_relative_difference():
    results = [
        result("single", [30.0, 10.0, 20.0], [2.0, 1.0], facts={"stages": 1}),
        ModeResult(mode="stock", num_ranks=4, refused="it has three legs"),
        result(
            "graph", [10.0, 12.0, 8.0], [2.0, 1.01], bubble=0.25, facts={"stages": 3, "notes": ["a note"]}
        ),
    ]
    single, stock, graph = rows = result_rows(results)
    assert (single["iteration_ms"], graph["iteration_ms"]) == (20.0, 10.0)
    assert graph["max_loss_difference"] == pytest.approx(0.01)
    assert stock == {"mode": "stock", "how": "measured", "ranks": 4, "refused": "it has three legs"}
    assert speed_ups(rows) == {"single": 2.0}
    assert format_modes(rows, TRAINED) == "\n".join(
        [
            "mode    how       ranks  stages  iteration ms  simulated ms  start-up s  bubble  most bytes of a rank  loss difference",
            "single  measured      4       1          20.0             -         1.5       -              2.00 KiB                -",
            "stock   measured      4       -             -             -           -       -                     -                -",
            "graph   measured      4       3          10.0             -         1.5   25.0%              2.00 KiB          1.0e-02",
        ]
    )
    assert remarks(rows, cores=2) == [
        "stock cannot run this: it has three legs",
        "bytes: saved tensors, by rank: single 1.00 KiB, 2.00 KiB; graph 1.00 KiB, 2.00 KiB",
        "parameters and buffers, by rank: single 512 B, 512 B; graph 512 B, 512 B",
        "graph: a note",
        "4 ranks share the 2 cores of this machine: steps take turns on them, so times and bubbles are not those of as "
        "many devices (--emulate shows those)",
    ]
