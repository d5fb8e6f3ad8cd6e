"""`gpp bench large-start`: the model of a start agrees with what started ranks count, and grows no faster than it should."""

from __future__ import annotations

import argparse

from gpp_benchmarks import large_start
from gpp_benchmarks.large_start import WAYS, Job, all_group_requests, placement_requests


def rows(*words: str) -> list[dict]:
    parser = argparse.ArgumentParser()
    large_start.add_arguments(parser)
    return large_start.run(parser.parse_args(words))["rows"]


def test_requests_grow_with_ranks_and_not_with_their_square() -> None:
    found = {(row["way"], row["ranks"]): row for row in rows("--ranks", "64", "256", "1024")}
    before, now = WAYS
    for few, many in ((64, 256), (256, 1024)):
        assert found[now, many]["requests"] < 6 * found[now, few]["requests"]
        assert found[before, many]["requests"] > 12 * found[before, few]["requests"]
    assert found[WAYS[1], 1024]["sockets"] < 128 < 1024 < found[WAYS[0], 1024]["sockets"]


def test_what_started_ranks_count_is_what_the_model_says() -> None:
    model, counted = rows("--ranks", "64", "--start", "3")[-2:]
    exact = ("groups", "member_of", "placement_requests", "groups_requests")
    assert [counted[name] for name in exact] == [model[name] for name in exact]
    assert counted["processes_requests"] >= model["processes_requests"]


def test_meshed_groups_are_counted_as_three_ranks_did() -> None:
    # counted in a start of three ranks in three stages: 50 requests of groups a rank, 3,480 bytes read
    job = Job(num_ranks=3, num_stages=3, ranks_a_host=3)
    groups = all_group_requests(job, way=WAYS[1])
    assert (groups.requests, groups.read, groups.written) == (3 * 50, 3 * 3480, 3 * 1700)
    assert placement_requests(job, way=WAYS[1]).requests == 4 + 2 * 3
