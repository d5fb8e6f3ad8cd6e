"""Which rank of a job failed first, where, and why: a board in the job's store that every rank reads when it fails.

    rank 2   raises, writes "first" ───────────────► store ◄── rank 0's beats: step 3 at 0B1
                                                       │
    rank 1   its message does not come ── reads ◄──────┘     "rank 2 (stage 'text') failed first, in train_batch at
    rank 0   its sum does not come ────── reads ◄────────    2F0: ValueError: ..."

Nothing of it costs a step more than noting where the rank is, an attribute an instruction. A thread writes that to the
store, twice a second, with a number that counts up (the beat), and looks whether a rank has failed. A rank that is
killed writes nothing: those on its host see its process gone, others that its beat stands still. The store's own rank,
when it fails, stays until the others have read what is on the board: the store ends with it.

Source: this project
Tests: tests/runtime/test_failure_board.py, tests/integrations/test_faults.py
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gpp_plugin.errors import describe_error
from gpp_plugin.runtime.messages.sockets import close_connections

logger = logging.getLogger(__name__)

SILENT_S = 4.0
"""After how long without a beat a rank of another host is taken to be gone or stopped."""

ANSWER_S = 6.0
"""After how long without an answer the job's store is taken to be gone, with its host."""

OUTSIDE = "outside of the engine's calls"

_PAGE_BYTES = 4096
_page: mmap.mmap | None = None
_page_number = -1


def own_page() -> int:
    """Return the number of this process's page, a file without a name; -1 where the system has none.

    What the process does now is written there at once. Others of its host open the page while the process lives and
    read it when it is gone: it may have ended long after its last beat, or in a call that held Python's lock.
    """
    global _page, _page_number
    if _page is None:
        with contextlib.suppress(OSError, AttributeError):
            _page_number = os.memfd_create("gpp_plugin status")
            os.ftruncate(_page_number, _PAGE_BYTES)
            _page = mmap.mmap(_page_number, _PAGE_BYTES)
            os.register_at_fork(after_in_child=_leave_page)
            HERE.publish()
    return _page_number


def _leave_page() -> None:
    """Let a forked process, which is no rank, write nothing into the rank's page."""
    global _page, _page_number
    _page, _page_number = None, -1


class _Published:
    """An attribute of a rank's status that is on its page as soon as it is set; about a microsecond."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, status: RankStatus, owner: type) -> Any:
        return vars(status)[self._name]

    def __set__(self, status: RankStatus, value: Any) -> None:
        vars(status)[self._name] = value
        if _page is not None and status is HERE:
            status.publish()


class RankStatus:
    """What this process does now; read by the thread that publishes it to the others.

    Attributes:
        stage: of this rank, once it is known.
        call: what the user called (``train_batch``); empty between calls.
        number: how many calls there were.
        doing: what part of it (``capture``).
        instruction: of the rank's program, while it runs.
        waits_for: what the other ranks are waited for; empty while this rank works.
        last_error: what the last call raised that the job may survive.
    """

    call, doing, waits_for = _Published(), _Published(), _Published()

    def __init__(self) -> None:
        self.stage = ""
        self.call = ""
        self.number = 0
        self.doing = ""
        self.instruction: Any = None
        self.waits_for = ""
        self.last_error = ""

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Say what part of a call a block is."""
        before, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = before

    def facts(self) -> dict[str, Any]:
        """Return what is published to the others."""
        facts = dict(vars(self))
        instruction = facts.pop("instruction")  # read once: another thread may set it to None meanwhile
        return {**facts, "at": "" if instruction is None else str(instruction)}

    def publish(self) -> None:
        """Write on this process's page what it does, all but the instruction, which is in the beats alone."""
        if _page is not None:
            written = [self.call, str(self.number), self.doing, self.waits_for, self.last_error]
            text = "\n".join(written).encode(errors="replace")[: _PAGE_BYTES - 1] + b"\0"
            _page[: len(text)] = text


def facts_now(facts: Mapping[str, Any], page: mmap.mmap | None) -> Mapping[str, Any]:
    """Return a rank's facts as its page has them now; those of its last beat that the page lacks, if still of use."""
    written = [] if page is None else page[:].partition(b"\0")[0].decode(errors="replace").split("\n")
    if len(written) != 5 or not written[1].isdecimal():  # no page, or its process ended while it wrote
        return facts
    call, number, doing, waits_for, last_error = written
    now = {"call": call, "number": int(number), "doing": doing}
    is_same = all(facts.get(name) == value for name, value in now.items())
    at = facts.get("at", "") if is_same else ""
    return {"stage": "", **facts, **now, "waits_for": waits_for, "last_error": last_error, "at": at}


HERE = RankStatus()
"""A process is one rank of one job."""


def place_of(facts: Mapping[str, Any]) -> str:
    """Return where a rank is, in words.

    >>> place_of({"call": "train_batch", "at": "2F0"}), place_of({"call": "", "last_error": "StopIteration"})
    ('in train_batch at 2F0', "outside of the engine's calls (its last call raised StopIteration)")
    """
    if not facts.get("call"):
        raised = facts.get("last_error")
        return OUTSIDE + (f" (its last call raised {raised})" if raised else "")
    place = f"in {facts['call']}"
    if facts.get("at"):
        place += f" at {facts['at']}"
    elif facts.get("doing"):
        place += f", {facts['doing']}"
    return place + (f", waiting for {facts['waits_for']}" if facts.get("waits_for") else "")


def name_of(rank: int, stage: str) -> str:
    """Return a rank with its stage, for errors."""
    return f"rank {rank} (stage {stage!r})" if stage else f"rank {rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """The first failure of a job.

    Args:
        where: `place_of` the rank.
        why: one line.
    """

    rank: int
    stage: str
    where: str
    why: str

    def __str__(self) -> str:
        return f"{name_of(self.rank, self.stage)} failed first, {self.where}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRank:
    """What is known of another rank.

    Args:
        state: ``alive``, ``dead``, ``ended`` as it should, ``stopped``, or ``silent``: of another host, not heard of.
        facts: as of `RankStatus.facts`, at its last beat; empty where it was never heard of.
    """

    rank: int
    state: str
    facts: Mapping[str, Any]

    @property
    def why(self) -> str:
        """Return what is wrong with it, as a failure's reason."""
        return {
            "dead": "its process is gone without a word (killed, out of memory, or ended by a signal)",
            "ended": "its process has ended",
            "stopped": "its process is stopped (SIGSTOP, or a debugger)",
            "silent": f"nothing was heard of it for {SILENT_S:g} s (killed, stopped, or its host is gone)",
        }.get(self.state, "it did not come")


def failure_of(seen: SeenRank) -> FirstFailure:
    """Return what is wrong with another rank as the failure of the job."""
    return FirstFailure(
        rank=seen.rank,
        stage=seen.facts.get("stage", ""),
        where=f"last heard of {place_of(seen.facts)}" if seen.facts else "never heard of",
        why=seen.why,
    )


# Processes of other ranks, as those on their host find them: alive, stopped or gone.


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process as others of its host find it; ``space`` distinguishes hosts, and containers' numbers of processes."""

    space: str
    pid: int
    start: str
    page: int = -1

    @classmethod
    def own(cls) -> RankProcess:
        """Return this process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            space = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
        except OSError:  # no such files: others know this rank by its beats alone
            space = ""
        state = stat_of(os.getpid())
        return cls(space, os.getpid(), "" if state is None else state[1], own_page())

    def open_page(self) -> mmap.mmap | None:
        """Return the page of a process of this host that lives, to read; None where there is none."""
        try:
            with open(f"/proc/{self.pid}/fd/{self.page}", "rb") as page:
                return mmap.mmap(page.fileno(), _PAGE_BYTES, prot=mmap.PROT_READ)
        except (OSError, ValueError):  # gone meanwhile, or of another user
            return None

    def state(self) -> str:
        """Return ``alive``, ``stopped`` or ``dead``; of a process on this host."""
        found = stat_of(self.pid)
        if found is None or found[1] != self.start or found[0] in "ZX":
            return "dead"
        return "stopped" if found[0] in "Tt" else "alive"


def stat_of(pid: int) -> tuple[str, str] | None:
    """Return a process's state and when it was started; None where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # pid (name, which may hold blanks and brackets) state ppid ...: the start is the 22nd field, the state the third
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


BEAT_S = 0.5
"""Between two signs of life of a rank."""

SETTLING_S = 2.0
"""How long a rank whose wait broke off looks for the cause: the rank that failed may be writing it."""

SLACK_S = 1.0
"""How much later than a wait that ends by itself a stopped rank is written down by the thread."""

ENDING_S = 8.0
"""How long after a failure a rank may stay in a call; it has a wait's limit to come out of it by an error."""

LINGERING_S = 3.0
"""How long the store's rank stays, at most, until the others have read who failed."""


class FailureBoard:
    """What the ranks of a job know of each other's failures; made by every rank with the same ``epoch``.

    Args:
        store: the job's; a connection of its own is made to it, as another thread's waits block a shared one.
        epoch: distinguishes boards of one store.
        limit_s: how long a wait for ranks that give no sign of work may take.
        holder: the rank whose process holds the store; None: another process does.
        neighbours: the ranks of this rank's host, whose processes it looks after; None: all, where hosts are unknown.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        num_ranks: int,
        epoch: int,
        limit_s: float,
        holder: int | None = 0,
        neighbours: Collection[int] | None = None,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.limit_s = limit_s
        self.first: FirstFailure | None = None
        """What the thread has found on the board, or this rank has."""
        self._holder = holder
        # Looking up the processes of all ranks would be two requests a pair of ranks, and of other hosts' nothing is
        # to be seen from here.
        self._neighbours = frozenset(range(num_ranks) if neighbours is None else neighbours)
        self._store = store
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            self._store = store.clone()  # type: ignore[attr-defined]
        self._prefix = f"gpp_plugin/board/{epoch}"
        self._number = 0
        self._processes: dict[int, RankProcess] = {}
        self._pages: dict[int, mmap.mmap | None] = {}
        self._holders_facts: Mapping[str, Any] = {}
        self._has_store = True
        self._holder_has_left = False
        self._stopped_since: dict[int, float] = {}
        self._stuck_since: tuple[int, float] | None = None
        self._beats: dict[int, tuple[int, float]] = {}
        """By rank: the number of its last beat, and when that was first read."""
        self._asking_since: float | None = None
        """When the thread began to wait for what it asks the store now."""
        self._stands_since: tuple[Any, float] = None, 0.0
        self._closing = threading.Event()
        self._asking: list[threading.Thread] = []
        own = RankProcess.own()
        self._own_space = own.space
        self._set(f"process/{rank}", [own.space, own.pid, own.start, own.page])
        self._beat()
        self._thread = threading.Thread(target=self._run, name="gpp_plugin failure board", daemon=True)
        self._thread.start()
        if holder not in self._neighbours:  # the store is, or may be, on another host
            threading.Thread(target=self._watch, name="gpp_plugin lost host", daemon=True).start()

    def close(self) -> None:
        """End the threads; nothing is looked for any more, and nothing more is written of a store that is gone."""
        self._closing.set()
        if self._asking_since is not None and self._is_store_quiet():  # its error would follow the last line
            close_connections()
        deadline = time.monotonic() + 2.0
        for thread in (self._thread, *self._asking):
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join(timeout=max(deadline - time.monotonic(), 0.0))

    def leave(self) -> None:
        """Report that this rank ends as it should, and close."""
        self.close()
        if self.first is not None or self._find_lost_holder():
            return
        with contextlib.suppress(RuntimeError):
            self._set(f"left/{self.rank}", 1)
            if self.rank == self._holder:  # the others' threads stop asking a store that will be gone
                self._stay_until(
                    lambda rank: self._has(f"left/{rank}") or self._has(f"knows/{rank}"), 3 * BEAT_S
                )

    # ---- failures ------------------------------------------------------------------------------

    def post(self, failure: FirstFailure) -> FirstFailure:
        """Write a failure, unless there is one already; return the one that is there."""
        if self._find_lost_holder() or not self._has_store:
            self.first = self.first or failure
            return self.first
        key = f"{self._prefix}/first"
        record = json.dumps([failure.rank, failure.stage, failure.where, failure.why])
        try:
            return self._take_first(self._store.compare_set(key, "", record))
        except (RuntimeError, ValueError):
            self._lose_store()
            self.first = self.first or failure
            return self.first

    def post_error(self, error: BaseException) -> FirstFailure:
        """Write an exception of this rank, where it is now."""
        return self.post(
            FirstFailure(
                rank=self.rank,
                stage=HERE.stage,
                where=place_of(HERE.facts() | {"waits_for": ""}),
                why=describe_error(error),
            )
        )

    def find(self) -> FirstFailure | None:
        """Return who failed first, when a wait of this rank broke off; takes a moment where nobody has said so yet."""
        self._bounded(self._find)
        return self.first

    def _find(self) -> None:
        started = time.monotonic()
        while self.first is None:
            try:
                self._read_first()
                self._look_for_deaths()
            except RuntimeError:
                self._lose_store()
            has_settled = time.monotonic() - started > SETTLING_S
            if self.first is None and has_settled:
                seen = self.look()
                lost = [each for each in seen if each.state != "alive"]
                away = [each for each in seen if HERE.call and each.facts and not each.facts.get("call")]
                if lost:
                    self.post(failure_of(lost[0]))
                elif away:
                    facts, why = away[0].facts, f"it did not come to {HERE.call}, which every rank calls"
                    stage, where = facts.get("stage", ""), place_of(facts)
                    self.post(FirstFailure(rank=away[0].rank, stage=stage, where=where, why=why))
                return
            if self.first is None:
                time.sleep(0.1)

    def look(self, ranks: Sequence[int] | None = None) -> list[SeenRank]:
        """Return what is known of the other ranks; takes two beats, and longer where one of another host is silent."""
        found: list[SeenRank] = []
        self._bounded(lambda: found.extend(self._look(ranks)))
        return found

    def _look(self, ranks: Sequence[int] | None) -> list[SeenRank]:
        others = [rank for rank in ranks or range(self.num_ranks) if rank != self.rank]
        before = {rank: self._facts_of(rank)[0] for rank in others}
        found: dict[int, SeenRank] = {}
        while len(found) < len(others):
            time.sleep(BEAT_S)
            self._check_store()  # without it nothing comes to be known
            for rank in others:
                if rank in found:
                    continue
                number, facts = self._facts_of(rank)
                state = self._local_state(rank)
                if state in ("dead", "stopped"):
                    has_left = state == "dead" and self._has(f"left/{rank}")
                    found[rank] = SeenRank(rank=rank, state="ended" if has_left else state, facts=facts)
                elif number != before[rank]:
                    found[rank] = SeenRank(rank=rank, state="alive", facts=facts)
                elif time.monotonic() - self._beats[rank][1] > SILENT_S:
                    is_local = state == "alive"  # a rank that holds Python's lock for long does not beat
                    found[rank] = SeenRank(rank=rank, state="alive" if is_local else "silent", facts=facts)
        return [found[rank] for rank in others]

    def _bounded(self, act: Callable[[], None]) -> None:
        """Run a request to the store, without a wait for one whose rank is stopped or whose host is gone."""

        def quietly() -> None:
            with contextlib.suppress(RuntimeError):  # the store went meanwhile
                act()

        done = threading.Thread(target=quietly, daemon=True)
        if not self._find_lost_holder():
            self._asking = [*(thread for thread in self._asking if thread.is_alive()), done]
            done.start()
        deadline = time.monotonic() + SETTLING_S + 2 * SILENT_S
        while done.is_alive() and time.monotonic() < deadline and not self._find_lost_holder():
            done.join(0.1)
        if done.is_alive() and self.first is None:
            self._lose_store("silent")

    def _find_lost_holder(self) -> bool:
        """Return whether no question to the store would end (`_is_store_quiet`)."""
        if not self._is_store_quiet():
            return False
        if self.first is None:
            self._lose_store(self._state_of(self._holder) or "silent")
        return True

    def linger(self) -> None:
        """Stay until the others have read who failed, if the store ends with this rank."""
        if self.rank != self._holder or self.first is None or not self._has_store:
            return
        self._holder = None  # once
        with contextlib.suppress(RuntimeError):
            self._stay_until(lambda rank: self._has(f"seen/{rank}") or self._is_silent(rank), LINGERING_S)

    def _is_silent(self, rank: int) -> bool:
        """Return whether nothing was heard of a rank of another host since it was looked for."""
        self._facts_of(rank)
        return rank not in self._neighbours and time.monotonic() - self._beats[rank][1] > SILENT_S

    def _stay_until(self, is_informed: Callable[[int], bool], most_s: float) -> None:
        """Wait until all ranks that can know something do."""
        deadline, waiting = time.monotonic() + most_s, set(range(self.num_ranks)) - {self.rank}
        while waiting and time.monotonic() < deadline:
            living = {rank for rank in waiting if self._local_state(rank) not in ("dead", "stopped")}
            waiting = {rank for rank in living if not is_informed(rank)}
            if waiting:
                time.sleep(0.02)

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.wait(BEAT_S):
            self._asking_since = time.monotonic()
            try:
                self._tick()
            except Exception as error:
                if self._closing.is_set():
                    return
                if isinstance(error, RuntimeError):  # c10d's errors are of this kind
                    self._lose_store()
                else:  # no other thread beats, or ends a rank that is stuck
                    logger.debug("the board's thread goes on after an error", exc_info=True)
            finally:
                self._asking_since = None
            self._end_if_stuck()

    def _watch(self) -> None:
        """Do what `_run` does not while a lost host's store leaves it without an answer: end a rank that is stuck."""
        while not self._closing.wait(BEAT_S):
            since = self._asking_since
            if since is not None and time.monotonic() - since > self.limit_s:
                self._find_lost_holder()
                self._end_if_stuck()

    def _tick(self) -> None:
        """Publish where this rank is, and look at the others; send nothing to a store that would not answer."""
        if not self._has_store:
            return
        self._look_for_stops()
        if self._is_store_quiet():
            if (
                self._state_of(self._holder) == "dead"
            ):  # it may go on, stopped; so, no wait needs to have broken off
                self._find_lost_holder()
            return
        if self._holder is not None and self._has(f"left/{self._holder}"):
            self._set(f"knows/{self.rank}", 1)
            self._holder_has_left, self._has_store = True, False
            return
        self._beat()
        if self.first is None:
            self._read_first()
            self._look_for_deaths()
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Read other hosts' beats once, before this rank has stood still for the limit: then it knows who is silent."""
        stands, now = (HERE.number, HERE.instruction, HERE.waits_for), time.monotonic()
        if stands != self._stands_since[0]:
            self._stands_since = stands, now
        elif HERE.call and now - self._stands_since[1] > self.limit_s - SILENT_S - 2 * BEAT_S:
            self._stands_since = stands, math.inf
            for rank in set(range(self.num_ranks)) - self._neighbours:
                self._facts_of(rank)

    def _look_for_stops(self) -> None:
        """Write who of this host has been stopped for longer than ranks are waited for, while this one is in a call."""
        for rank in list(self._processes):
            if self._state_of(rank) != "stopped":
                self._stopped_since.pop(rank, None)
                continue
            since = self._stopped_since.setdefault(rank, time.monotonic())
            if self.first is None and HERE.call and time.monotonic() - since > self.limit_s + SLACK_S:
                facts = self._known_of(rank, self._holders_facts)
                if not self._is_store_quiet():
                    facts = self._facts_of(rank)[1]
                self.post(failure_of(SeenRank(rank=rank, state="stopped", facts=facts)))

    def _end_if_stuck(self) -> None:
        """End this process where a rank has failed and this one does not come out of a wait that is torch's own.

        Making a process group, and what a device waits for, nobody can break off; torch's own limits are half an hour.
        """
        if self.first is None or not HERE.call:
            self._stuck_since = None
            return
        now = time.monotonic()
        if self._stuck_since is None or self._stuck_since[0] != HERE.number:
            self._stuck_since = HERE.number, now
        if now - self._stuck_since[1] > ENDING_S:
            place = place_of(HERE.facts())
            # not to sys.stderr, which may be another one while torch traces
            text = (
                f"gpp_plugin: rank {self.rank} is ended: {ENDING_S:g} s after another rank failed it is still {place}\n"
                f"gpp_plugin: {self.first}\n"
            )
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
            self.linger()
            os._exit(1)

    def _is_store_quiet(self) -> bool:
        """Return whether the store does not answer: its rank is dead or stopped, or its host is gone."""
        since = self._asking_since
        if since is not None and time.monotonic() - since > ANSWER_S:
            return True
        return self._holder not in (None, self.rank) and self._state_of(self._holder) in ("dead", "stopped")

    def _state_of(self, rank: int | None) -> str:
        """Return the state of a rank's process, if it is known and of this host, without asking the store."""
        process = None if rank is None else self._processes.get(rank)
        if process is None or not process.space or process.space != self._own_space:
            return ""
        return process.state()

    def _beat(self) -> None:
        self._number += 1
        self._set(f"beat/{self.rank}", [self._number, HERE.facts()])
        if self._holder is not None and self.rank != self._holder:  # without it, the store answers no more
            self._holders_facts = self._facts_of(self._holder)[1]
            self._local_state(self._holder)

    def _read_first(self) -> None:
        if self._has("first"):
            self._take_first(self._store.get(f"{self._prefix}/first"))

    def _take_first(self, record: bytes) -> FirstFailure:
        rank, stage, where, why = json.loads(record)
        first = self.first = FirstFailure(rank=rank, stage=stage, where=where, why=why)
        self._set(f"seen/{self.rank}", 1)
        return first

    def _look_for_deaths(self) -> None:
        """Write who of this host is gone without having said so."""
        for rank in sorted(self._neighbours):
            if rank == self.rank or self._local_state(rank) != "dead" or self._has(f"left/{rank}"):
                continue
            if self._has("first"):
                self._read_first()
                return
            self.post(failure_of(SeenRank(rank=rank, state="dead", facts=self._facts_of(rank)[1])))
            return

    def _lose_store(self, state: str = "dead") -> None:
        self._has_store = False
        if self.first is not None:
            return
        others = set(range(self.num_ranks)) - self._neighbours
        if self._holder is None and state == "silent" and others:  # an agent's, on a host of theirs
            why = f"nothing was heard of the job's store for {ANSWER_S:g} s (its host is gone)"
            self.first = FirstFailure(rank=min(others), stage="", where="on another host", why=why)
        elif self._holder not in (None, self.rank):
            assert self._holder is not None
            state = "ended" if self._holder_has_left else state
            facts = self._known_of(self._holder, self._holders_facts)
            self.first = failure_of(SeenRank(rank=self._holder, state=state, facts=facts))

    # ---- the store -----------------------------------------------------------------------------

    def _set(self, key: str, value: Any) -> None:
        self._check_store()
        self._store.set(f"{self._prefix}/{key}", json.dumps(value))

    def _has(self, key: str) -> bool:
        self._check_store()
        return bool(self._store.check([f"{self._prefix}/{key}"]))

    def _check_store(self) -> None:
        if not self._has_store:  # torch would write a page for each attempt
            raise RuntimeError("the job's store is gone")

    def _facts_of(self, rank: int) -> tuple[int, Mapping[str, Any]]:
        """Return the number of a rank's last beat, and where it was."""
        self._beats.setdefault(rank, (0, time.monotonic()))
        try:
            if not self._has(f"beat/{rank}"):
                return 0, {}
            number, facts = json.loads(self._store.get(f"{self._prefix}/beat/{rank}"))
        except RuntimeError:
            self._lose_store()
            return 0, self._known_of(rank, self._holders_facts if rank == self._holder else {})
        if number != self._beats[rank][0]:
            self._beats[rank] = number, time.monotonic()
        return number, self._known_of(rank, facts)

    def _known_of(self, rank: int, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the facts of a rank's last beat, brought up to date where it is of this host."""
        return facts_now(facts, self._pages.get(rank))

    def _local_state(self, rank: int) -> str:
        """Return the state of a rank's process; empty where it is on another host, or not known yet."""
        if rank not in self._processes and rank in self._neighbours:
            try:
                if self._has(f"process/{rank}"):
                    record = json.loads(self._store.get(f"{self._prefix}/process/{rank}"))
                    process = self._processes[rank] = RankProcess(*record)
                    if process.space and process.space == self._own_space:
                        self._pages[rank] = process.open_page()
            except RuntimeError:
                return ""
        return self._state_of(rank)
