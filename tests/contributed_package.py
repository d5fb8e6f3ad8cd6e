"""The files of a package that adds a planner, a schedule and a transport, as a stranger would write it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.waits import run_program

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "gpp-stranger"
version = "1.0"

[project.entry-points."gpp_plugin.planners"]
halves = "gpp_stranger.planner:halves"
[project.entry-points."gpp_plugin.schedules"]
last_first = "gpp_stranger.schedule:LAST_FIRST"
[project.entry-points."gpp_plugin.transports"]
post_office = "gpp_stranger.transport:POST_OFFICE"

[tool.setuptools]
packages = ["gpp_stranger"]
"""

PLANNER = '''
"""As many blocks in every stage; two stages where nothing else is asked for."""

from gpp_plugin.api import PipelinePlan, PlanRequest, StageDraft, build_plan
from gpp_plugin.errors import PlanInfeasible


def halves(request: PlanRequest) -> PipelinePlan:
    blocks = request.graph.blocks
    count = request.num_stages or min(2, request.num_ranks, len(blocks))
    if request.data_parallel is not None:
        count = request.num_ranks // request.data_parallel
    degree, rest = divmod(request.num_ranks, count)
    if rest:
        raise PlanInfeasible(f"halves: {request.num_ranks} ranks are not {count} equal stages; change either")
    wish = (request.micro_batch_sizes or {}).get("*", request.mini_batch)
    drafts = []
    for stage in range(count):
        own = blocks[stage * len(blocks) // count : (stage + 1) * len(blocks) // count]
        whole = request.keep_units or any(block.is_coupled for block in own)
        size = request.loss_unit * degree if whole else wish
        if request.mini_batch % size or size % degree:
            raise PlanInfeasible(f"halves: micro-batches of {size} on {degree} ranks; change micro_batch_sizes")
        drafts.append(
            StageDraft(blocks=tuple(b.name for b in own), degree=degree, micro_batch_size=size)
        )
    return build_plan(request, drafts, planner="halves")
'''

SCHEDULE = '''
"""All forwards, then the backwards from the last micro-batch to the first."""

from gpp_plugin.plugins import Schedule, StageSchedule, Task, TaskKind


class LastFirst(Schedule):
    holds_all = True

    def order(self, plan, index, behind):
        count = plan.num_micro_batches(index)
        tasks = [(TaskKind.FORWARD, m) for m in range(count)]
        tasks += [(TaskKind.BACKWARD, m) for m in reversed(range(count))]
        return StageSchedule(
            stage=index,
            tasks=tuple(Task(stage=index, kind=kind, micro_batch=m) for kind, m in tasks),
            num_in_flight=count,
        )


LAST_FIRST = LastFirst()
'''

TRANSPORT = '''
"""Every tensor as bytes in a parcel of its own, over one gloo group; counts what is sent."""

import datetime

import torch
import torch.distributed as dist

from gpp_plugin.plugins import TransportFactory
from gpp_plugin.errors import CommTimeout

SENT = 0


class Parcels:
    def __init__(self, works, where, timeout, unpack=()):
        self.works, self.where, self.timeout, self.unpack = works, where, timeout, unpack

    def wait(self):
        try:
            for work, _ in self.works:
                work.wait(self.timeout)
        except RuntimeError as error:
            raise CommTimeout(f"post office, edge {self.where}: {error}") from error
        for buffer, parcel in self.unpack:
            buffer.view(-1).view(torch.uint8).copy_(parcel)
        self.works, self.unpack = [], ()

    def is_done(self):
        return all(work.is_completed() for work, _ in self.works)


class PostOffice:
    prepost_depth = 4
    prepost_bytes = 1 << 20
    buffers_ahead = 0

    def __init__(self, request):
        self.timeout = datetime.timedelta(seconds=request.timeout_s)
        self.group = dist.new_group(None, timeout=self.timeout, backend="gloo")

    def bind_send(self, message, payloads, edge):
        tags = [message.edge * 1000 + payload.slot for payload in payloads]

        def post(tensors):
            global SENT
            SENT += 1
            parcels = [t.view(-1).view(torch.uint8).clone() for t in tensors]
            works = [
                (self.group.send([parcel], message.dst_rank, tag), parcel)
                for parcel, tag in zip(parcels, tags, strict=True)
            ]
            return Parcels(works, edge, self.timeout)

        return post

    def bind_receive(self, message, payloads, edge):
        tags = [message.edge * 1000 + payload.slot for payload in payloads]

        def post(buffers):
            parcels = [torch.empty(b.numel() * b.element_size(), dtype=torch.uint8) for b in buffers]
            works = [
                (self.group.recv([parcel], message.src_rank, tag), parcel)
                for parcel, tag in zip(parcels, tags, strict=True)
            ]
            return Parcels(works, edge, self.timeout, tuple(zip(buffers, parcels)))

        return post

    def open(self, channels):
        pass

    def close(self):
        dist.destroy_process_group(self.group)


class PostOffices(TransportFactory):
    def make(self, request):
        return PostOffice(request)


POST_OFFICE = PostOffices()
'''

TESTS = """
import gpp_plugin.testing


def test_planner():
    plans = gpp_plugin.testing.check_planner("halves")
    assert [len(stage.blocks) for stage in plans["plain chain on two ranks"].stages] == [4, 4]


def test_schedule():
    gpp_plugin.testing.check_schedule("last_first")


def test_transport():
    gpp_plugin.testing.check_transport("post_office")
"""


def write_package(folder: Path) -> Path:
    """Write the package and its tests, and return where its tests are."""
    home = folder / "gpp_stranger"
    home.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (home / "__init__.py").write_text("")
    for name, text in (("planner", PLANNER), ("schedule", SCHEDULE), ("transport", TRANSPORT)):
        (home / f"{name}.py").write_text(text.lstrip())
    tests = folder / "test_stranger.py"
    tests.write_text(TESTS)
    return tests


def pip_install(folder: Path, target: Path) -> None:
    """Install the package into a directory of its own, without network."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "--quiet",
    ]
    command += ["--disable-pip-version-check", "--target", str(target), str(folder)]
    done = run_program(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
