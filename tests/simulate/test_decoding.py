"""Simulated decoding against small cases computed by hand, and what the figures say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gpp_benchmarks._decode_figures import Traffic, remarks, throughput_rows, volume_rows
from gpp_benchmarks._decode_serving import KINDS, Request, ServedLayer, serve, step_times, sum_of_blocks
from gpp_plugin.cli import main
from gpp_plugin.errors import ConfigError

# A byte is a microsecond, of memory, links and copies; so are a table's entry and a task's start. 112 weights.
SMALL = ServedLayer(
    ranks=2, width=4, heads=2, kv_heads=2, ffn_width=4, itemsize=1, block=2, memory_gb=1, memory_gb_s=1e-3, tflops=1e9,
    link_gb_s=1e-3, host_gb_s=1e-3, link_us=1, step_us=10, entry_ns=1000, task_ns=1000,
)  # fmt: skip
ALONE = dataclasses.replace(SMALL, ranks=1)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        # linear, attention, link, table, host of two rows of 3 and 4 positions: 7 of 8 bytes, 4 blocks
        ("data", (112, 7 * 8 + 4, 0, 4, 10)),
        ("tensor", (56, 7 * 4 + 2, 2 + 4 * 2 * 4 / 2, 4, 10)),  # of one head's bytes and tasks
        ("cache", (112, 7 * 8 / 2 + 4, 2 + 2 * (8 + 4 + 4) / 2, 2, 10)),
    ],
)
def test_a_step_by_hand(kind, parts):
    times = step_times(SMALL, kind, rows=2, tokens=7, entries=4, steps=1, volumes="owner")
    assert dataclasses.astuple(times) == pytest.approx(parts)
    assert times.total_us == pytest.approx(sum(parts))


def test_sequences_are_evicted_and_come_back_by_hand():
    """Three blocks of two for answers that need five: the second sequence leaves after a step and comes back last."""
    layer = dataclasses.replace(ALONE, memory_gb=(112 + 3 * 16) / 1e9)
    assert layer.rank_blocks("data") == 3
    found = serve(layer, "data", [Request(prompt=1, new=4), Request(prompt=2, new=2)], max_batch=2)
    both = 112 + 10 + 5 * 8 + 4 + 3  # lengths 2 and 3, in 1 and 2 blocks
    first = 3 * (112 + 10 + 2) + 12 * 8 + 7  # lengths 3, 4, 5 in 2, 2, 3
    second = 112 + 10 + 4 * 8 + 2 + 2
    copy = 2 * 16
    assert found.elapsed_us == pytest.approx(both + copy + first + copy + second)
    assert (found.tokens, found.evictions, found.most_rows) == (6, 1, 2)
    assert found.evict_us == 2 * copy and found.idle_us == 0
    assert found.token_us == pytest.approx(((both + copy + first) + found.elapsed_us) / 6)
    with pytest.raises(ConfigError, match="8 tokens needs 4 blocks of 2, ranks have 3"):
        serve(layer, "data", [Request(prompt=4, new=3)], max_batch=1)


def test_who_arrives_joins_at_the_next_step():
    requests = [Request(prompt=0, new=3), Request(arrival_us=150, prompt=0, new=1)]
    found = serve(ALONE, "data", requests, max_batch=2)
    alone = 2 * (112 + 10 + 2) + (1 + 2) * 8 + 2  # two steps: the first ends before it comes
    together = 112 + 10 + 4 + 4 * 8 + 3
    assert found.elapsed_us == pytest.approx(alone + together)
    later = serve(ALONE, "data", [Request(arrival_us=1000, prompt=0, new=1)], max_batch=1)
    assert later.idle_us == 1000 and later.elapsed_us == 1000 + 112 + 10 + 2 + 8 + 1


def test_data_parallel_ranks_wait_for_the_last_and_cut_caches_share_room():
    requests = [Request(prompt=0, new=3), Request(prompt=0, new=1)]
    found = serve(SMALL, "data", requests, max_batch=2)
    longest, shortest = 3 * (112 + 10 + 2) + 6 * 8 + 4, 112 + 10 + 2 + 8 + 1
    assert found.elapsed_us == pytest.approx(longest)
    assert found.idle_us == pytest.approx((longest - shortest) / 2)
    small = dataclasses.replace(SMALL, memory_gb=(112 + 3 * 16) / 1e9)  # three blocks a rank
    with pytest.raises(ConfigError, match="5 blocks of 2, ranks have 3"):
        serve(small, "data", [Request(prompt=8, new=1)], max_batch=1)
    assert serve(small, "cache", [Request(prompt=8, new=1)], max_batch=1).tokens == 1


@pytest.mark.parametrize("kind", KINDS)
def test_many_steps_in_one_go_are_the_same_as_one_by_one(kind):
    lengths = np.array([1, 5, 8])
    whole = step_times(SMALL, kind, rows=3, tokens=3 * 14 + 3 * 6, entries=sum_of_blocks(lengths, 3, 2), steps=3, volumes="printed")  # fmt: skip
    each = [
        step_times(SMALL, kind, rows=3, tokens=int(now.sum()), entries=int((-(-now // 2)).sum()), steps=1, volumes="printed")
        for now in (lengths + step for step in (1, 2, 3))
    ]  # fmt: skip
    assert whole.total_us == pytest.approx(sum(one.total_us for one in each))


def test_cache_parallelism_is_faster_by_the_servers_block_tables_alone():
    traffic = Traffic(prefixes=(10_000, 40_000), batches=(32,), new=64, waves=1)
    rows = throughput_rows(ServedLayer(), traffic, figure="4.2")
    assert all(row["cp_to_tp"] > 1 > row["no_tables_cp_to_tp"] for row in rows)
    said = remarks(rows)
    assert said[0].endswith("in 2 of 2 rows") and "block tables" in said[1]
    assert "without them" in said[2] and said[2].endswith("in 0 of 2 rows") and "linear layers" in said[3]


def test_the_volumes_are_the_chapters_as_printed_and_in_equal_units():
    row = next(
        row for row in volume_rows(ServedLayer(), Traffic()) if (row["ranks"], row["batch"]) == (4, 512)
    )
    assert (row["printed_tp"], row["printed_cp"]) == (4 * 3 * 512 * 4096, 7_913_472)
    assert (row["corrected_tp"], row["corrected_cp"], row["owner_cp"]) == (6_291_456, 6_316_032, 3_956_736)


SHORT = ["--set", "prefixes=100", "answers=10", "batches=8", "all_batches=4,8", "batch=8", "new=10"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--decode", "--set", "entry=1"], "there is no constant 'entry'"),
        (["--decode", "--set", "ranks=x"], "'x' is no value of the kind int"),
        (["--decode", "--set", "memory_gb_s=0"], "give more than 0"),
        (["--decode", "--set", "kv_heads=5"], "heads divide the width, and key-value heads the heads"),
        (["--decode", "plan.json"], "--decode simulates no plan"),
        (["--decode", "--set", "memory_gb=0.5", *SHORT[1:]], "ranks have"),
        ([], "give a plan, as gpp plan writes it, or --decode"),
        (["plan.json", "--figure", "4.1"], "--figure and --set go with --decode"),
    ],
)
def test_a_wrong_call_takes_one_line(arguments, said, capsys):
    assert main(["simulate", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_without_the_benchmarks_one_line_says_what_to_install(monkeypatch, capsys):
    from gpp_plugin.commands import simulate_command

    monkeypatch.setattr(simulate_command, "BENCHMARKS", "no_such_package")
    assert main(["simulate", "--decode"]) == 1
    assert "is in no_such_package, which is not installed; the wheel of" in capsys.readouterr().err
