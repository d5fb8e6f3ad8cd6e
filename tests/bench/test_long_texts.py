"""What parts of the sequence win: each kind of plan has the ranks that it may have, and a case is one line."""

from __future__ import annotations

import pytest

from gpp_benchmarks.long_texts import KINDS, compare_kinds, format_kinds
from gpp_plugin.errors import ConfigError, PlanError


def test_each_kind_has_its_ranks_and_both_is_behind_none() -> None:
    row, plan = compare_kinds("transformer", "dgx_h100", (4, 4, 8192), None, {"layers": 4})
    grids = {
        kind: [tuple(map(int, each.split("x"))) for each in row[f"{kind}_grids"].split(" ")[0].split("+")]
        for kind in KINDS
    }
    assert grids["plain"] == grids["full"] == [(4, 1, 1)]
    assert (
        {context for _, context, _ in grids["tensor"]} == {1} == {tensor for *_, tensor in grids["context"]}
    )
    times = {kind: row[f"{kind}_ms"] for kind in KINDS}
    assert times["full"] > times["plain"] and plan is not None
    assert times["both"] <= min(times.values()) * 1.001
    assert row["by_full"] == pytest.approx(times["full"] / times["both"])
    line = format_kinds([row]).splitlines()[-1].split()
    assert line[:3] == ["4", "4", "8192"] and f"{row['by_tensor']:.2f}" in line


def test_what_fits_in_no_way_is_a_dash_and_mistakes_are_one_line() -> None:
    row, plan = compare_kinds("transformer", "dgx_h100", (1, 1, 131072), 0, {"layers": 4})
    assert plan is None and {row[f"{kind}_ms"] for kind in KINDS} == {None}
    assert format_kinds([row]).splitlines()[-1].split() == ["1", "1", "131072", *["-"] * 7]
    with pytest.raises(PlanError, match="has no size 'length'"):
        compare_kinds("dlrm", "dgx_h100", (2, 2, 64), None, {})
    with pytest.raises(ConfigError, match="give DEVICES:SAMPLES:TOKENS, like 8:32:32768"):
        from gpp_benchmarks.long_texts import _read_case

        _read_case("8:256")
