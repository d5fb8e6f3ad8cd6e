"""Where the ranks of a job run: which of them share a host, and which a device, as they report to each other.

Launchers do not agree on what they set for a process about its host:

                     rank, size                                  local rank                    ranks of the host
    torchrun         RANK, WORLD_SIZE                            LOCAL_RANK                    LOCAL_WORLD_SIZE
    deepspeed        RANK, WORLD_SIZE                            LOCAL_RANK                    LOCAL_SIZE
    srun             SLURM_PROCID, SLURM_STEP_NUM_TASKS          SLURM_LOCALID                 -
    mpirun (Open)    OMPI_COMM_WORLD_RANK, _SIZE                 OMPI_COMM_WORLD_LOCAL_RANK    ..._LOCAL_SIZE
    mpiexec (PMI)    PMI_RANK, PMI_SIZE                          MPI_LOCALRANKID               MPI_LOCALNRANKS

and a process that sees one GPU cannot see whether seven others see the same one or one each. So no number of ranks is
taken from a variable: every rank puts its host and the devices that it sees into the job's store, all read all, and
`place_ranks` says where each of them runs.

That is done before a process group exists. The backend of the default group follows from it (NCCL cannot serve two
ranks of one device), and groups that name none, DeepSpeed's among them, take the default group's.

Source: this project
Tests: tests/runtime/test_placement_of_ranks.py
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import ipaddress
import itertools
import json
import os
import re
import socket
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpp_plugin.config.reader import BatchSizes
from gpp_plugin.errors import CommTimeout, ConfigError, GppError, describe_error, first_line
from gpp_plugin.launch import reserved_port
from gpp_plugin.runtime.messages.sockets import connect_when_used
from gpp_plugin.runtime.ranks.job_board import (
    did_not_come,
    has_agents_store,
    mark_shared,
    open_board,
    shared_error,
    store_of_start,
)

CONNECTS_S = 0.1
"""Between two attempts to reach the job's store."""

JOINING_TIMEOUT_S = 600.0
"""How long a rank waits for the others to start: they import torch from a shared disk, on many hosts."""

WAITING_LIMIT_S = 60.0
"""How long ranks wait for others that show no sign of work where nothing says so: `comm_timeout_s`'s default."""

TELLING_S = 30.0
"""How long a rank that failed before it joined waits for the others, to inform them."""

DEFAULT_PORT = 29500
"""Where rank 0 listens if nothing says so: as torch and DeepSpeed have it."""


# ---- what is known -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenByRank:
    """What one rank sees of its machine.

    Args:
        host: distinguishes machines.
        local_rank: the number its launcher gave it on its host; None where it gave none.
        devices: what distinguishes each CUDA device that this process sees from all others of the job, in the order of
            their indices here; empty in a job on CPUs.
        names: their models.
    """

    host: str
    local_rank: int | None
    devices: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where one rank computes.

    Args:
        host: distinguishes machines.
        device: distinguishes devices of the job; of a CPU rank it is its host's CPU.
        name: the device's model, or ``cpu``.
        index: the CUDA device's number in the rank's own process; None on a CPU.
    """

    host: str
    device: str
    name: str
    index: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlacement:
    """Where all ranks compute, as ``rank`` requests it; but for the properties named ``own`` the same on every rank."""

    # Two hosts of two GPUs, three ranks on the first: places (a, G0) (a, G1) (a, G0) (b, G2). Ranks 0 and 2 share a
    # device, so no rank uses NCCL: a backend is the job's. Hosts are (0, 1, 2) and (3,).
    rank: int
    places: tuple[RankPlace, ...]

    @classmethod
    def on_one_host(cls, num_ranks: int, *, rank: int = 0) -> JobPlacement:
        """Return ``num_ranks`` CPU ranks of this machine."""
        return place_ranks([_look("cpu", None)] * num_ranks, rank=rank)

    @property
    def device_type(self) -> str:
        """Return ``cuda`` or ``cpu``."""
        return "cpu" if self.places[0].index is None else "cuda"

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each host, hosts in the order of their first ranks."""
        return self._ranks_by([place.host for place in self.places])

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each device, devices in the order of their first ranks."""
        return self._ranks_by([place.device for place in self.places])

    @property
    def shares_device(self) -> bool:
        """Return whether any CUDA device of the job serves several ranks."""
        return self.device_type == "cuda" and len(self.devices) < len(self.places)

    @property
    def backend(self) -> str:
        """Return the default group's backend: what moves tensors of the ranks' devices."""
        return "nccl" if self.device_type == "cuda" and not self.shares_device else "gloo"

    @property
    def is_consecutive(self) -> bool:
        """Return whether each host holds consecutive ranks, and all hosts equally many."""
        hosts = self.hosts
        return len({len(ranks) for ranks in hosts}) == 1 and list(itertools.chain(*hosts)) == list(
            range(len(self.places))
        )

    @property
    def own_place(self) -> RankPlace:
        """Return where this rank computes."""
        return self.places[self.rank]

    @property
    def own_device(self) -> torch.device:
        """Return this rank's device as its process numbers it."""
        index = self.own_place.index
        return torch.device("cpu") if index is None else torch.device("cuda", index)

    @property
    def own_local_rank(self) -> int:
        """Return this rank's position among the ranks of its host."""
        return next(ranks.index(self.rank) for ranks in self.hosts if self.rank in ranks)

    @property
    def own_sharers(self) -> int:
        """Return how many ranks share this rank's device and its memory, this one counted."""
        return sum(place.device == self.own_place.device for place in self.places)

    @property
    def fall_back(self) -> str:
        """Return one line about ranks that share a device and what it costs; empty where none do."""
        if not self.shares_device:
            return ""
        ranks = max(self.devices, key=len)
        place = self.places[ranks[0]]
        host = place.host.split("/")[0]
        return (
            f"ranks {', '.join(map(str, ranks))} share one {place.name} of host {host}: NCCL serves one rank a device, "
            "so that messages and sums of all ranks go through host memory over gloo, and each of these ranks has "
            f"1/{len(ranks)} of the device's memory; start one rank a device "
            f"({len(self.places)} ranks, {len(self.devices)} devices)"
        )

    @staticmethod
    def _ranks_by(keys: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        found: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            found.setdefault(key, []).append(rank)
        return tuple(map(tuple, found.values()))


def place_ranks(seen: Sequence[SeenByRank], *, rank: int) -> JobPlacement:
    """Return where each rank computes, from what each sees.

    A rank takes the device of its local rank, modulo the devices it sees; a rank without one takes that of its
    position among the ranks of its host.

    Raises:
        ConfigError: some ranks see CUDA devices and others none.
    """
    #   sees          local rank 0..3      takes
    #   4 devices     0 1 2 3              0 1 2 3
    #   2 devices     0 1 2 3              0 1 0 1     two ranks a device
    #   1 of its own  0 1 2 3              0 0 0 0     of four different devices: Slurm's --gpus-per-task=1
    blind = [r for r, each in enumerate(seen) if not each.devices]
    if 0 < len(blind) < len(seen):
        sees = next(r for r, each in enumerate(seen) if each.devices)
        raise ConfigError(
            f"rank {blind[0]} on host {seen[blind[0]].host} sees no CUDA device and rank {sees} on host "
            f"{seen[sees].host} sees {len(seen[sees].devices)}; give every rank a device (CUDA_VISIBLE_DEVICES, the "
            "launcher's GPUs a task), or train on CPUs everywhere (DS_ACCELERATOR=cpu)"
        )
    places = []
    met: Counter[str] = Counter()
    for each in seen:
        local = met[each.host] if each.local_rank is None else each.local_rank
        met[each.host] += 1
        index = local % len(each.devices) if each.devices else None
        places.append(
            RankPlace(
                host=each.host,
                device=f"cpu of {each.host}" if index is None else each.devices[index],
                name="cpu" if index is None else each.names[index],
                index=index,
            )
        )
    return JobPlacement(rank=rank, places=tuple(places))


# ---- launchers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    """The variables of a launcher that sets none of torch's; ``hosts``: where it lists them, rank 0's first."""

    command: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    hosts: str = ""
    job: str = ""


_LAUNCHERS = (
    # SLURM_NTASKS is the job's, and is also set in a batch script that starts one process without srun; the step's
    # number of tasks is set by srun alone.
    _Launcher(
        command="srun",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        hosts="SLURM_STEP_NODELIST",
        job="SLURM_JOB_ID",
    ),
    _Launcher(
        command="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(
        command="mpiexec",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    ),
)


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those of torch's variables that this environment lacks and another launcher's imply.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. A process that no launcher started is a job of one rank;
    it has no MASTER_PORT yet.

    Raises:
        ConfigError: ranks are on several hosts and nothing says which has rank 0.
    """
    started = [each for each in _LAUNCHERS if each.rank in environment and each.size in environment]
    found: dict[str, str] = {}
    if "RANK" in environment or "WORLD_SIZE" in environment:
        # torch's own are there; of another launcher that started these processes only the local rank may lack
        if "LOCAL_RANK" not in environment:
            local = next((environment[e.local_rank] for e in _LAUNCHERS if e.local_rank in environment), None)
            found |= {} if local is None else {"LOCAL_RANK": local}
        return found
    if not started:
        return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    launcher = started[0]
    found |= {"RANK": environment[launcher.rank], "WORLD_SIZE": environment[launcher.size]}
    if launcher.local_rank in environment:
        found["LOCAL_RANK"] = environment[launcher.local_rank]
    if "MASTER_ADDR" not in environment:
        found["MASTER_ADDR"] = _address_of_rank_zero(launcher, environment)
    if "MASTER_PORT" not in environment and found["WORLD_SIZE"] != "1":
        job = environment.get(launcher.job, "")
        found["MASTER_PORT"] = str(20000 + int(job) % 10000 if job.isdigit() else DEFAULT_PORT)
    return found


def _address_of_rank_zero(launcher: _Launcher, environment: Mapping[str, str]) -> str:
    size = environment[launcher.size]
    if size in ("1", environment.get(launcher.local_size)):
        return "127.0.0.1"
    if launcher.hosts in environment:
        return first_host(environment[launcher.hosts])
    raise ConfigError(
        f"{launcher.command} started {size} ranks on several hosts and MASTER_ADDR is not set; give every rank "
        f"MASTER_ADDR, the host of rank 0, and MASTER_PORT, e.g. {launcher.command} -x MASTER_ADDR=HOST -x "
        f"MASTER_PORT={DEFAULT_PORT}"
    )


def first_host(hosts: str) -> str:
    """Return the first of Slurm's list of hosts.

    >>> first_host("gpu[012-015,020],login1"), first_host("a,b[1-2]"), first_host("r[1-2]n[3,5]")
    ('gpu012', 'a', 'r1n3')
    """
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", hosts)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else hosts


# ---- joining -------------------------------------------------------------------------------------------------


def join_ranks(
    device_type: str,
    *,
    timeout_s: float = JOINING_TIMEOUT_S,
    group_timeout: datetime.timedelta | None = None,
    limit_s: float = WAITING_LIMIT_S,
) -> JobPlacement:
    """Join the ranks that the launcher started, in a default group that fits where they run; collective.

    A process that no launcher started becomes a job of one rank. No device is bound to the group (``device_id``): that
    would make torch create every later group's communicator by splitting a communicator of all ranks. On CUDA the
    rank's device is the current one afterwards. A group of the caller's that is bound is bound no longer.

    Args:
        device_type: ``cuda`` or ``cpu``: what ranks compute on.
        timeout_s: how long to wait for the other ranks.
        group_timeout: the default group's own limit, where it is made here; None: torch's.
        limit_s: how long a rank then waits for others that show no sign of work (`FailureBoard`).

    Raises:
        CommTimeout: a rank did not come; says which.
        ConfigError: the launcher does not say where rank 0 is, only some ranks see a device, or ranks share one and
            the caller's own default group is NCCL's.
        GppError: another rank failed before it joined (`telling_before_joining`); the same.
    """
    if dist.is_initialized():  # the caller's group stays; where its ranks run is found out all the same
        store = dist.distributed_c10d._get_default_store()
        placement = gather_placement(device_type, timeout_s=timeout_s)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        if placement.shares_device and "nccl" in dist.get_backend_config():
            raise ConfigError(
                f"torch.distributed was initialised with {dist.get_backend_config()}, and {placement.fall_back}; "
                "or leave the initialisation to deepspeed.initialize"
            )
        _unbind_default_group()
    else:
        os.environ.update(launcher_variables(os.environ))
        with contextlib.ExitStack() as stack:
            if os.environ["WORLD_SIZE"] == "1" and "MASTER_PORT" not in os.environ:
                os.environ["MASTER_PORT"] = str(stack.enter_context(reserved_port()))
            store, rank, num_ranks = _find_store(timeout_s)
        placement = _gather(store, device_type, rank=rank, num_ranks=num_ranks, timeout_s=timeout_s)
        connect_when_used(num_ranks)
        dist.init_process_group(
            placement.backend,
            store=dist.PrefixStore("default_pg", store),
            rank=rank,
            world_size=num_ranks,
            timeout=group_timeout,
        )
    os.environ.setdefault("LOCAL_RANK", str(placement.own_local_rank))
    if placement.own_place.index is not None:
        torch.cuda.set_device(placement.own_device)
    open_board(
        store,
        rank=rank,
        num_ranks=num_ranks,
        epoch=_last_call,
        limit_s=limit_s,
        neighbours=next(ranks for ranks in placement.hosts if rank in ranks),
    )
    return placement


def _unbind_default_group() -> None:
    """Let later groups make their communicators themselves, of their own ranks alone.

    Under a bound default group torch's ``new_group`` splits that group's communicator, which all ranks must do
    together: those outside of the new group enter ``ncclCommSplit`` at once, members only where the new group is of
    NCCL as well. Beside a gloo group, or one that only its members make, nobody answers them.
    """
    default: Any = dist.group.WORLD
    if getattr(default, "bound_device_id", None) is not None:
        default.bound_device_id = None


def _find_store(timeout_s: float) -> tuple[dist.Store, int, int]:
    """Return the job's store when rank 0 has made it, this rank, and how many there are.

    As torch's ``env://`` does it, but for waiting there for all ranks: it would not say which did not come.
    """
    own, size, where, port = (
        os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    makes_store = own == "0" and not has_agents_store()
    listening: int | None = None
    if _is_loopback(where):  # one machine: nothing of the job listens to others
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if makes_store:
            with contextlib.suppress(OSError):  # taken: by a store of this process, which torch then shares
                listening = socket.create_server((where, int(port))).detach()
    if not makes_store:
        _await_store(where, int(port), rank=int(own), num_ranks=int(size), timeout_s=timeout_s)
    try:
        store: dist.Store = dist.TCPStore(
            where,
            int(port),
            int(size),
            makes_store,
            datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening,
        )
    except RuntimeError as error:
        raise CommTimeout(
            f"rank {own} of {size} ranks waited {timeout_s:g} s for all to join at {where}, port {port}: "
            f"{first_line(error)}; start every rank, on rank 0's host as MASTER_ADDR, and look for a firewall between "
            "the hosts"
        ) from error
    if has_agents_store():
        store = store_of_start(store, rank=int(own), num_ranks=int(size), timeout_s=timeout_s)
    return store, int(own), int(size)


def _is_loopback(where: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(where)).is_loopback
    except OSError:
        return False


def _await_store(where: str, port: int, *, rank: int, num_ranks: int, timeout_s: float) -> None:
    """Wait until the job's store takes connections: torch tries for two and a half times its own limit.

    Raises:
        CommTimeout: nobody has made it in time: rank 0 did not come.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((where, port), timeout=max(deadline - time.monotonic(), 0.01)).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise did_not_come(
                    [0],
                    rank=rank,
                    num_ranks=num_ranks,
                    waited_s=timeout_s,
                    why=f"port {port}: {first_line(error)}; or a firewall is between the hosts",
                ) from error
        time.sleep(CONNECTS_S)


def gather_placement(device_type: str, *, timeout_s: float = JOINING_TIMEOUT_S) -> JobPlacement:
    """Return where the ranks of the default group run; collective over them.

    Raises:
        CommTimeout: a rank did not come; says which.
        ConfigError: only some ranks see a device.
    """
    store = dist.distributed_c10d._get_default_store()
    return _gather(
        store, device_type, rank=dist.get_rank(), num_ranks=dist.get_world_size(), timeout_s=timeout_s
    )


_last_call = 0
"""How often this process joined; every rank makes the same calls."""


def _gather(
    store: dist.Store, device_type: str, *, rank: int, num_ranks: int, timeout_s: float
) -> JobPlacement:
    # The store outlives engines, so that each call has keys of its own; every rank makes the same calls.
    call = _next_call()
    local = os.environ.get("LOCAL_RANK")
    mine = _look(device_type, None if local is None else int(local))
    store.set(_key(call, rank), json.dumps(dataclasses.asdict(mine)))
    facts = _hear_all(store, call, rank=rank, num_ranks=num_ranks, timeout_s=timeout_s)
    failed = [(other, each["error"]) for other, each in enumerate(facts) if "error" in each]
    if failed:
        _leave_together(store, call, rank=rank, ranks=range(num_ranks), timeout_s=TELLING_S)
        first, (kind, text) = failed[0]
        raise shared_error(kind, f"rank {first} failed before it joined the others: {text}")
    seen = [
        SeenByRank(**{**each, "devices": tuple(each["devices"]), "names": tuple(each["names"])})
        for each in facts
    ]
    return place_ranks(seen, rank=rank)


def _next_call() -> int:
    global _last_call
    _last_call += 1
    return _last_call


def _hear_all(
    store: dist.Store, call: int, *, rank: int, num_ranks: int, timeout_s: float
) -> list[dict[str, Any]]:
    """Return what each rank has reported about itself.

    Raises:
        CommTimeout: a rank has not; says which.
    """
    # Rank 0 reads what each has reported, and writes it once for all: n + 1 values are written and 2 n read. If every
    # rank read every other's, the store would answer n x n times, two million requests for 1,024 ranks.
    #
    #     rank 1, 2   place/1/1, place/1/2 ──► rank 0 ── place/1/all ──► all
    started = time.monotonic()
    limit = datetime.timedelta(seconds=timeout_s)
    keys = [_key(call, other) for other in range(num_ranks)]
    try:
        if rank == 0:
            store.wait(keys, limit)
            in_one_request: bool = store.has_extended_api()  # type: ignore[attr-defined]
            found = store.multi_get(keys) if in_one_request else [store.get(key) for key in keys]
            facts = [json.loads(each) for each in found]
            store.set(_key(call, "all"), packed(facts))
            return facts
        store.wait([_key(call, "all")], limit)
        distinct, ranks = json.loads(zlib.decompress(base64.b85decode(store.get(_key(call, "all")))))
        return [{**distinct[index], "local_rank": local} for index, local in ranks]
    except RuntimeError as error:
        waited_s = time.monotonic() - started
        there = [other for other in range(num_ranks) if _has(store, keys[other])]
        # it holds the store
        absent = [other for other in range(num_ranks) if other not in there] if there else [0]
        _leave_together(store, call, rank=rank, ranks=there, timeout_s=min(timeout_s, 3.0))
        raise did_not_come(
            absent or [0], rank=rank, num_ranks=num_ranks, waited_s=waited_s, why=first_line(error)
        ) from error


def packed(facts: Sequence[Mapping[str, Any]]) -> str:
    """Return the ranks' reports in few characters: those of one host are the same but for their numbers."""
    texts = [json.dumps({**each, "local_rank": None}) for each in facts]
    distinct = list(dict.fromkeys(texts))
    position = {text: index for index, text in enumerate(distinct)}
    ranks = [[position[text], each.get("local_rank")] for text, each in zip(texts, facts, strict=True)]
    body = json.dumps([[json.loads(text) for text in distinct], ranks])
    return base64.b85encode(zlib.compress(body.encode())).decode()


def _has(store: dist.Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


@contextlib.contextmanager
def telling_before_joining() -> Iterator[None]:
    """Inform the other ranks, which wait for this one to join, of an error: all of them raise it."""
    try:
        yield
    except Exception as error:  # whatever it is: the others wait for this rank
        _publish_before_joining(error)
        mark_shared(error)
        raise


def _publish_before_joining(error: Exception) -> None:
    # A configuration is usually wrong on all ranks: each reports its error, and hears of the others' at once.
    try:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            rank, num_ranks = dist.get_rank(), dist.get_world_size()
        else:
            found = {**launcher_variables(os.environ), **os.environ}
            if (
                found.get("WORLD_SIZE", "1") == "1"
                or "MASTER_ADDR" not in found
                or "MASTER_PORT" not in found
            ):
                return
            os.environ.update(found)
            store, rank, num_ranks = _find_store(TELLING_S)
        if num_ranks == 1:
            return
        call = _next_call()
        text = str(error) if isinstance(error, GppError) else describe_error(error)
        own = {"error": [type(error).__name__, text]}
        store.set(_key(call, rank), json.dumps(own))
        _hear_all(store, call, rank=rank, num_ranks=num_ranks, timeout_s=TELLING_S)
        _leave_together(store, call, rank=rank, ranks=range(num_ranks), timeout_s=TELLING_S)
    except (RuntimeError, GppError):
        return  # there is nobody to inform


def _leave_together(
    store: dist.Store, call: int, *, rank: int, ranks: Iterable[int], timeout_s: float
) -> None:
    """Keep rank 0, which holds the store, alive until all have read what it holds."""
    with contextlib.suppress(RuntimeError):
        store.set(_key(call, rank) + "/heard", "1")
        if rank == 0:
            heard = [_key(call, other) + "/heard" for other in ranks]
            store.wait(heard, datetime.timedelta(seconds=timeout_s))


def _key(call: int, rank: int | str) -> str:
    return f"gpp_plugin/place/{call}/{rank}"


def _look(device_type: str, local_rank: int | None) -> SeenByRank:
    """Return what this process sees."""
    if device_type != "cuda":
        return SeenByRank(host=_host_name(), local_rank=local_rank)
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return SeenByRank(
        host=_host_name(),
        local_rank=local_rank,
        devices=tuple(f"GPU-{each.uuid}" for each in found),
        names=tuple(each.name for each in found),
    )


def _host_name() -> str:
    """Return what distinguishes this host as NCCL does it: containers may have one name on two machines."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a job runs in: ranks, device, precision, sizes.

    Args:
        group: a CPU process group of all ranks for small agreements; None for a single rank.
        placement: which ranks share a host, and which a device.
        dtype: training precision of parameters and floating inputs.
        optimizer_bytes: optimizer state, master copy and gradient sum for each trainable parameter.
    """

    rank: int
    num_ranks: int
    device: torch.device
    dtype: torch.dtype
    sizes: BatchSizes
    zero_stage: int
    optimizer_bytes: float
    group: dist.ProcessGroup | None
    placement: JobPlacement
