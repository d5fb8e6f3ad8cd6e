"""Modes by simulation: what each plan is, and who may not run."""

import argparse
import dataclasses

import pytest

from gpp_plugin.cli import main
from gpp_plugin.commands.compare_command import what_next
from gpp_plugin.compare.compare_settings import MODES
from gpp_plugin.compare.simulated import best_stock, simulate_mode, single_plan
from gpp_plugin.plan.registry import make_plan
from tests.plan.graphs import branches, make_profile, make_request


def make_graph(request):
    return make_plan("auto", request)


def test_every_mode_is_a_row_and_the_graph_is_never_behind_the_chain():
    request = make_request(branches(2, 3), ranks=4, loss_unit=1)
    rows = {mode: simulate_mode(mode, request, make_graph) for mode in MODES}
    assert [row["mode"] for row in rows.values()] == list(MODES)
    assert all(row["how"] == "simulated" for row in rows.values())
    assert [rows[mode]["ranks"] for mode in MODES] == [4, 1, 4, 4, 4]
    assert rows["single"]["stages"] == 1
    # seven blocks of 100 + 200 us a sample, of all 16 samples, on one device
    assert rows["single"]["iteration_ms"] == pytest.approx(7 * 0.3 * 16)
    assert rows["graph"]["iteration_ms"] <= rows["chain"]["iteration_ms"] * (1 + 1e-9)
    assert rows["chain"]["depth"] == rows["chain"]["stages"]


def test_stock_has_the_best_number_of_stages_that_divides_the_ranks():
    request = make_request(branches(2, 3), ranks=4, loss_unit=1)
    times = {
        count: make_plan("stock_1f1b", dataclasses.replace(request, num_stages=count)).iteration_us
        for count in (1, 2, 4)
    }
    assert best_stock(request).iteration_us == min(times.values())
    assert len(best_stock(dataclasses.replace(request, num_stages=2)).stages) == 2


def test_a_single_device_may_lack_the_memory_and_is_shown_all_the_same():
    graph = branches(2, 3)
    request = make_request(graph, make_profile(graph, parameter=500), ranks=2, loss_unit=1)
    small = dataclasses.replace(request, memory_limit_bytes=1)
    row = simulate_mode("single", small, make_graph)
    assert not row["fits"] and row["peak_bytes"] == single_plan(request).stages[0].memory_bytes


def test_a_mode_without_a_plan_says_why():
    request = make_request(branches(2, 3), ranks=3, loss_unit=1)
    asked = dataclasses.replace(request, num_stages=2)
    row = simulate_mode("stock", asked, make_graph)
    assert "2 stages do not divide 3 ranks" in row["refused"]


def test_compare_on_a_cluster_needs_no_ranks(capsys):
    arguments = ["--devices", "4", "--cluster", "summit", "--size", "branches=2"]
    assert main(["compare", "mmt", *arguments, "--modes", "plain,single,stock,graph"]) == 0
    printed = capsys.readouterr().out
    assert "simulated on 4 devices of" in printed
    lines = [line.split() for line in printed.splitlines()]
    shown = {line[0]: line[1] for line in lines if line and line[0] in MODES}
    assert shown == dict.fromkeys(("plain", "single", "stock", "graph"), "simulated")
    assert printed.startswith("plain data parallel, ZeRO ")
    assert "x as fast as stock" in printed and "next: " in printed


def test_compare_takes_the_options_of_plans(capsys):
    """One schema: what plans depend on, compare has under the same names."""
    options = ["--zero", "auto", "--memory", "recompute", "--tensor-parallel", "auto"]
    arguments = ["mmt", "--devices", "4", "--cluster", "summit", "--size", "branches=2", *options]
    assert main(["compare", *arguments, "--modes", "plain,graph"]) == 0
    (first, *_) = compared = capsys.readouterr().out.splitlines()
    assert first.startswith("plain data parallel, ZeRO ")
    assert (
        "--zero auto --memory recompute --tensor-parallel auto" in compared[-1]
        or "gains little" in compared[-1]
    )
    assert main(["plan", *arguments, "--against", "plain"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == first


def arguments(model="llava-7b", *, emulate=False, **keys):
    keys = {"num_devices": 64, **keys}
    return argparse.Namespace(
        model=model, keys=keys, emulate=emulate, size=[], config=None, modes=",".join(MODES)
    )


def test_what_is_advised_keeps_the_options_that_the_user_wrote():
    ratios = {"stock": 1.4, "chain": 1.2}
    keys = {"dtype": "fp16", "stages": 8, "lengths.typical": 2048, "memory.limit_gb": 8}
    (line,) = what_next(arguments(cluster="dgx_h100", **keys), ratios)
    assert (
        "--cluster dgx_h100 --dtype fp16 --stages 8 --length 2048 --memory-limit-gb 8 --out plan.json" in line
    )
    (line,) = what_next(arguments("clip_tiny", cluster="dgx_h100", **keys), ratios)
    again = "--devices 64 --stages 8 --length 2048 --set memory.limit_gb=8"
    assert line.startswith(f"next: gpp compare clip_tiny {again} --emulate runs")
    (line,) = what_next(arguments("clip_tiny", emulate=True, stages=8), ratios)
    assert line.startswith("next: gpp compare clip_tiny --devices 64 --stages 8 trains it")


def test_what_to_do_next_depends_on_what_was_found():
    args = arguments(cluster="dgx_h100")
    (line,) = what_next(args, {"single": 9.0, "stock": 1.4, "chain": 1.2})
    assert line.startswith("next: gpp plan llava-7b --devices 64 --cluster dgx_h100 --out plan.json")
    (line,) = what_next(args, {"single": 9.0, "stock": 1.4, "chain": 1.0})
    assert "gains little or nothing over chain" in line
    assert what_next(args, {"single": 2.0}) == []
