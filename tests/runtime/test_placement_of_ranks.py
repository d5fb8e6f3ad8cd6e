"""Where ranks run, launcher by launcher: backend, device and share of memory follow from what ranks see, not from the
launcher's variables."""

import datetime
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.errors import CommTimeout, ConfigError
from gpp_plugin.launch import reserved_port
from gpp_plugin.runtime.ranks import placement_of_ranks
from gpp_plugin.runtime.ranks.placement_of_ranks import (
    JobPlacement,
    SeenByRank,
    launcher_variables,
    place_ranks,
)
from tests.ranks import run_kept_ranks, run_ranks

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
DEEPSPEED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")


class Job:
    """Ranks as a launcher starts them on hosts of ``gpus`` devices, ``ranks`` on each; no process runs."""

    def __init__(self, names, *, hosts=1, ranks=8, gpus=8, sees_one=False, **common):
        self.size = hosts * ranks
        self.environments, seen = [], []
        for rank in range(self.size):
            host, local = divmod(rank, ranks)
            values = (rank, self.size, local, ranks)
            here = {name: str(value) for name, value in zip(names, values, strict=False) if name} | common
            self.environments.append(here)
            variables = here | launcher_variables(here)
            if names:
                assert (variables["RANK"], variables["WORLD_SIZE"]) == (str(rank), str(self.size))
            own = [local % gpus] if sees_one else range(gpus) if gpus else []
            seen.append(
                SeenByRank(
                    host=f"node{host}",
                    local_rank=int(variables["LOCAL_RANK"]) if "LOCAL_RANK" in variables else None,
                    devices=tuple(f"GPU-{host}.{device}" for device in own),
                    names=("H100",) * len(own),
                )
            )
        self.placements = [place_ranks(seen, rank=rank) for rank in range(self.size)]


@pytest.mark.parametrize(
    ("names", "options", "indices"),
    [
        (TORCHRUN, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, range(8)),
        (TORCHRUN, {"hosts": 2}, range(8)),
        # LOCAL_SIZE and no LOCAL_WORLD_SIZE: 37ec3e4 took the job's 16 ranks for ranks of one host of 8 devices
        (DEEPSPEED, {}, range(8)),
        (DEEPSPEED, {"hosts": 2}, range(8)),
        (SRUN, {"hosts": 2, "SLURM_STEP_NODELIST": "node[0-1]"}, range(8)),
        # --gpus-per-task=1: each process sees one device, another one
        (SRUN, {"hosts": 2, "SLURM_STEP_NODELIST": "node[0-1]", "sees_one": True}, [0] * 8),
        (OPEN_MPI, {}, range(8)),
        (OPEN_MPI, {"hosts": 2, "MASTER_ADDR": "node0"}, range(8)),
        # a script that exports torch's two variables itself and no local rank
        (("RANK", "WORLD_SIZE"), {"hosts": 2}, range(8)),
        ((), {"ranks": 1, "gpus": 1}, [0]),
    ],
)
def test_a_device_each_is_nccl_and_the_whole_device(names, options, indices):
    for placement in Job(names, **options).placements:
        assert placement.backend == "nccl" and not placement.shares_device and not placement.fall_back
        assert placement.own_sharers == 1, "37ec3e4 gave a rank 8/16 of its device's memory"
        assert placement.own_place.index == list(indices)[placement.own_local_rank]
        assert placement.is_consecutive


@pytest.mark.parametrize(
    ("names", "options", "sharers"),
    [
        (TORCHRUN, {"ranks": 4, "gpus": 1}, 4),
        (DEEPSPEED, {"hosts": 2, "ranks": 4, "gpus": 2}, 2),
        (OPEN_MPI, {"ranks": 4, "gpus": 2}, 2),
        (SRUN, {"ranks": 2, "gpus": 1, "sees_one": True, "SLURM_STEP_NODELIST": "node0"}, 2),
    ],
)
def test_ranks_that_share_a_device_use_gloo_and_it_is_said(names, options, sharers):
    for placement in Job(names, **options).placements:
        assert placement.backend == "gloo" and placement.shares_device
        assert placement.own_sharers == sharers
        assert f"1/{sharers} of the device's memory" in placement.fall_back
        assert placement.fall_back.startswith("ranks 0, ") and "host node0" in placement.fall_back


def test_one_rank_alone_on_its_device_falls_back_with_the_others():
    """A backend is the job's: three ranks on two devices."""
    placements = Job(TORCHRUN, ranks=3, gpus=2).placements
    assert [p.own_sharers for p in placements] == [2, 1, 2]
    assert {p.backend for p in placements} == {"gloo"}
    assert placements[1].devices == ((0, 2), (1,))


def test_cpu_ranks_share_their_host():
    for placement in Job(DEEPSPEED, hosts=2, ranks=2, gpus=0).placements:
        assert (placement.backend, placement.device_type, placement.shares_device) == ("gloo", "cpu", False)
        assert placement.own_sharers == 2 and placement.hosts == ((0, 1), (2, 3))
        assert placement.own_device.type == "cpu" and not placement.fall_back
    assert JobPlacement.on_one_host(3, rank=1).own_sharers == 3


def test_ranks_dealt_out_over_hosts_are_noticed():
    seen = [SeenByRank(host=f"node{rank % 2}", local_rank=rank // 2) for rank in range(4)]
    placement = place_ranks(seen, rank=3)
    assert placement.hosts == ((0, 2), (1, 3)) and not placement.is_consecutive
    assert placement.own_local_rank == 1


def test_a_rank_without_a_device_among_others_is_refused():
    seen = [
        SeenByRank(host="a", local_rank=0, devices=("GPU-1",), names=("H100",)),
        SeenByRank(host="b", local_rank=0),
    ]
    with pytest.raises(ConfigError, match="rank 1 on host b sees no CUDA device and rank 0 on host a sees 1"):
        place_ranks(seen, rank=0)


def test_what_is_taken_from_launchers():
    slurm = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_LOCALID": "3",
        "SLURM_JOB_ID": "1234567",
    }
    assert launcher_variables({**slurm, "SLURM_STEP_NODELIST": "gpu[012-015,020],login1"}) == {
        "RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "MASTER_ADDR": "gpu012", "MASTER_PORT": "24567",
    }  # fmt: skip
    # a batch script that starts one process without srun is one rank, however many tasks the job has
    assert launcher_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"})["WORLD_SIZE"] == "1"
    # torchrun under srun: what torchrun set stands
    torchrun = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "SLURM_PROCID": "1"}
    assert launcher_variables({**slurm, **torchrun}) == {}
    several = {name: value for name, value in zip(OPEN_MPI, "3824", strict=True)}
    with pytest.raises(ConfigError, match="mpirun started 8 ranks on several hosts and MASTER_ADDR is not"):
        launcher_variables(several)
    assert launcher_variables({**several, OPEN_MPI[3]: "8"})["MASTER_ADDR"] == "127.0.0.1"


def _listening() -> set[str]:
    """Return the addresses at which sockets of this process listen, as the kernel writes them."""
    fds = Path("/proc/self/fd")
    own = {os.readlink(each) for each in fds.iterdir() if each.is_symlink()}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def _join(name: str) -> tuple[str, int, str]:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ[{**dict(zip(TORCHRUN, OPEN_MPI, strict=True))}[variable]] = os.environ.pop(variable)
    import deepspeed

    from gpp_plugin.integrations.deepspeed.dispatch import _init_distributed

    placement = _init_distributed({}, GraphPipelineConfig())
    assert deepspeed.comm.is_initialized() and _init_distributed({}, GraphPipelineConfig()) == placement
    if os.environ["MASTER_ADDR"] == "127.0.0.1" and sys.platform == "linux":
        assert _listening() <= {"0100007F", "0" * 24 + "01000000"}, "on one machine none listens to others"
    return dist.get_backend(), dist.get_world_size(), os.environ["LOCAL_RANK"]


def test_ranks_join_under_mpirun():
    """At 37ec3e4 each of them was a job of its own, of one rank."""
    assert run_ranks(_join, 2, "ranks", timeout_s=90) == [("gloo", 2, "0"), ("gloo", 2, "1")]


def _join_on_one_device() -> dict[str, Any]:
    """Join as ranks that see one GPU together; the device itself is made up."""
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid="7", name="H100")
    taken: list[torch.device] = []
    torch.cuda.set_device = taken.append
    given: dict[str, Any] = {}
    init = dist.init_process_group

    def init_process_group(backend: str, **options: Any) -> None:
        given.update(options, backend=backend)
        init(backend, **options)

    dist.init_process_group = init_process_group
    placement = placement_of_ranks.join_ranks("cuda")
    alone = dist.new_group([1])  # of a bound gloo group this calls a method that gloo lacks
    return {
        "backend": given["backend"],
        "has a device bound": given.get("device_id") is not None,
        "device": [str(device) for device in taken],
        "sharers": placement.own_sharers,
        "subset": dist.get_rank() != 1 or dist.get_world_size(alone) == 1,
    }


def test_ranks_on_one_device_join_over_gloo_unbound():
    """DeepSpeed binds the group to cuda:LOCAL_RANK and takes that device, which for rank 1 is not there."""
    joined = {
        "backend": "gloo", "has a device bound": False, "device": ["cuda:0"], "sharers": 2, "subset": True,
    }  # fmt: skip
    assert run_ranks(_join_on_one_device, 2, timeout_s=90) == [joined, joined]


def _join_bound() -> tuple[str, int]:
    """Join where the caller bound the default group, and make groups that not all ranks are in."""
    default: Any = dist.group.WORLD
    default.bound_device_id = torch.device("cuda", 0)
    try:
        placement_of_ranks.join_ranks("cpu")
        # those outside of a group would split the default group's communicator, which gloo's group has no call for
        found = [dist.new_group([rank], backend="gloo") for rank in (0, 1)][dist.get_rank()]
        return str(default.bound_device_id), dist.get_world_size(found)
    finally:
        default.bound_device_id = None


def test_a_default_group_that_the_caller_bound_is_bound_no_longer():
    assert run_kept_ranks(_join_bound, 2) == [("None", 1)] * 2


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=1))
    with pytest.raises(
        CommTimeout, match=r"rank 0 of 2 ranks waited [\d.]+ s for all to join at .*: rank 1 did not come"
    ):
        placement_of_ranks._gather(store, "cpu", rank=0, num_ranks=2, timeout_s=0.2)


def test_rank_zero_is_named_where_nobody_made_the_store(monkeypatch):
    """torch alone waits two and a half times as long, and names a socket."""
    with reserved_port() as port:
        for name, value in (
            ("RANK", 1),
            ("WORLD_SIZE", 4),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", port),
        ):
            monkeypatch.setenv(name, str(value))
        started = time.monotonic()
        with pytest.raises(CommTimeout, match=r"rank 1 of 4 ranks waited 1 s .*: rank 0 did not come \(port"):
            placement_of_ranks._find_store(1.0)
    assert 1.0 <= time.monotonic() - started < 2.0


class CountedStore(dist.HashStore):
    """A store that counts what Python asks of it."""

    def __init__(self):
        super().__init__()
        self.requests = 0

    def __getattribute__(self, name):
        if name in ("set", "get", "multi_get", "wait"):
            self.requests += 1
        return super().__getattribute__(name)


def test_ranks_hear_of_all_through_rank_zero():
    store, num_ranks = CountedStore(), 12
    facts = [
        {"host": f"h{rank // 4}", "local_rank": rank % 4, "devices": ["a", "b"], "names": ["x", "x"]}
        for rank in range(num_ranks)
    ]

    def hear(rank):
        store.set(placement_of_ranks._key(1, rank), json.dumps(facts[rank]))
        return placement_of_ranks._hear_all(store, 1, rank=rank, num_ranks=num_ranks, timeout_s=30.0)

    with ThreadPoolExecutor(num_ranks) as pool:
        assert list(pool.map(hear, range(num_ranks))) == [facts] * num_ranks
    assert store.requests <= 3 * num_ranks + 1
