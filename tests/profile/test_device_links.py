"""Levels of links from placement and topology, and the speeds of pairs, measured over gloo."""

import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

from gpp_plugin.errors import CommTimeout
from gpp_plugin.profile.device_links import (
    HostTopology,
    Level,
    PairSpeed,
    level_pairs,
    link_levels,
    measure_levels,
    measure_pairs,
    parse_topology,
    read_topology,
    rounds_of_pairs,
)
from gpp_plugin.runtime.ranks.placement_of_ranks import JobPlacement, SeenByRank, place_ranks
from tests.ranks import run_kept_ranks

DGX = "\n".join(
    [
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m",
        "GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-55\t0\tN/A",
        "GPU1\tNV18\t X \tNV18\tNV18\tSYS\t0-55\t0\tN/A",
        "GPU2\tNV18\tNV18\t X \tNV18\tSYS\t56-111\t1\tN/A",
        "GPU3\tNV18\tNV18\tNV18\t X \tSYS\t56-111\t1\tN/A",
        "NIC0\tPIX\tSYS\tSYS\tSYS\t X ",
        "",
        "Legend:",
        "  NV#  = Connection traversing a bonded set of # NVLinks",
    ]
)


def job(*hosts: list[int]) -> JobPlacement:
    """Ranks on hosts, each on a device of its own."""
    where = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    seen = [
        SeenByRank(host=f"node{where[r]}/boot", local_rank=0, devices=(f"G{r}",), names=("H100",))
        for r in where
    ]
    return place_ranks([seen[list(where).index(r)] for r in sorted(where)], rank=0)


def topology(*pairs: str, source: str = "NVML") -> HostTopology:
    nvlinks = frozenset(frozenset(f"G{rank}" for rank in pair) for pair in pairs)
    return HostTopology(nvlinks=nvlinks, source=source)


def test_what_nvidia_smi_prints():
    pairs = parse_topology(DGX)
    assert pairs is not None and len(pairs) == 6 and frozenset((0, 3)) in pairs
    assert parse_topology("No devices were found\n") is None
    assert parse_topology(DGX.replace("NV18", "PHB")) == frozenset()


def test_who_is_asked(monkeypatch):
    """NVML's package, then nvidia-smi; where there is neither, nobody has said anything."""
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = RuntimeError
    nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_STATUS_OK = 2, 0
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid[1:])
    nvml.nvmlDeviceGetP2PStatus = lambda a, b, kind: 0 if a // 2 == b // 2 else 5
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert read_topology(["G0", "G1", "G2", "G3"]) == topology("01", "23")
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def run(command, **options):
        text = DGX if "topo" in command else "".join(f"{i}, G{i}\n" for i in range(4))
        return subprocess.CompletedProcess(command, 0, stdout=text)

    monkeypatch.setattr(subprocess, "run", run)
    assert read_topology(["G3", "G1"]) == topology("13", source="nvidia-smi")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    assert read_topology(["G3", "G1"]) == topology(source="")


@pytest.mark.parametrize(
    ("placement", "topologies", "levels"),
    [
        # 37ec3e4: one level "PCIe" over all ranks, for each of these
        (job([0, 1, 2, 3]), [topology("01", "02", "03", "12", "13", "23")], [("NVLink", 4)]),
        (job([0, 1, 2, 3]), [topology("01", "23")], [("NVLink", 2), ("PCIe", 4)]),
        (job([0, 1, 2, 3]), [topology()], [("PCIe", 4)]),
        (job([0, 1], [2, 3]), [topology("01"), topology("23")], [("NVLink", 2), ("network", 4)]),
        (job([0, 1], [2, 3]), [topology(), topology()], [("PCIe", 2), ("network", 4)]),
        (job([0], [1], [2]), [topology()] * 3, [("network", 3)]),
        (job([0]), [topology()], [("PCIe", 1)]),
    ],
)
def test_levels(placement, topologies, levels):
    found, notes = link_levels(placement, topologies)
    assert [(level.name, level.span) for level in found] == levels and not notes


def test_what_cannot_be_said_in_levels_is_said_in_words():
    levels, (note,) = link_levels(job([0, 2], [1, 3]), [topology("02"), topology("13")])
    assert levels == (Level(name="network", span=4),)
    assert "(node0: [0, 2]; node1: [1, 3])" in note and "start the ranks host by host" in note
    assert level_pairs(levels, 0, job([0, 2], [1, 3])) == ((0, 1), (2, 3)), "between hosts"
    levels, (note,) = link_levels(job([0, 1, 2, 3]), [topology("12")])
    assert levels == (Level(name="PCIe", span=4),) and "there is NVLink between 1 pairs" in note
    levels, (note,) = link_levels(job([0, 1]), [topology(source="")])
    assert levels == (Level(name="PCIe", span=2),) and "pip install nvidia-ml-py" in note
    (levels, notes) = link_levels(JobPlacement.on_one_host(2), [topology(source="")])
    assert levels == (Level(name="host memory", span=2),) and not notes


def test_a_level_is_measured_between_the_groups_of_the_one_inside_it():
    levels = (Level(name="NVLink", span=2), Level(name="PCIe", span=4), Level(name="network", span=8))
    placement = job([0, 1, 2, 3], [4, 5, 6, 7])
    assert level_pairs(levels, 0, placement) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert level_pairs(levels, 1, placement) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert level_pairs(levels, 2, placement) == ((0, 4), (1, 5), (2, 6), (3, 7))
    asked = []

    def measure(pairs):
        asked.append(pairs)
        speed = {"bytes_per_s": 100e9 / 10 ** len(asked), "latency_us": 1.0}
        return [
            PairSpeed(first=a, second=b, **{name: each * (1 + a) for name, each in speed.items()})
            for a, b in pairs
        ]

    links = measure_levels(levels, measure, placement)
    assert [(link.name, link.span, link.bytes_per_s, link.latency_us) for link in links] == [
        ("NVLink", 2, 10e9, 4.0),
        ("PCIe", 4, 1e9, 3.5),
        ("network", 8, 0.1e9, 2.5),
    ]


def test_all_pairs_meet_once():
    for num_ranks in (2, 3, 8):
        rounds = rounds_of_pairs(num_ranks)
        pairs = [pair for each in rounds for pair in each]
        assert sorted(pairs) == [(a, b) for a in range(num_ranks) for b in range(a + 1, num_ranks)]
        assert all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in rounds)


def _measure() -> tuple[list[PairSpeed], str]:
    """Measure a pair and none, and then one whose first rank does not come."""
    group, everyone = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    options = {"messages": group, "group": everyone, "device": torch.device("cpu")}
    found = [
        *measure_pairs([(0, 1)], timeout_s=30.0, **options),
        *measure_pairs([], timeout_s=30.0, **options),
    ]
    with pytest.raises(CommTimeout) as said:
        measure_pairs([(0, 1)] if dist.get_rank() else [], timeout_s=0.5, **options)
    return found, str(said.value)


def test_two_ranks_measure_their_link_and_one_that_does_not_answer_is_named():
    first, second = run_kept_ranks(_measure, 2)
    ((found,), said) = first
    assert first == second and (found.first, found.second) == (0, 1)
    assert 1e6 < found.bytes_per_s < 1e12 and 1.0 < found.latency_us < 1e5
    assert said.startswith("rank 1 waited 0.5 s for rank 0, with which it measures their link over gloo")
