"""A plan of two branches that meet in the loss, and the timeline of one mini-batch of it."""

import pytest

from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.timeline import Event, EventKind, Timeline


@pytest.fixture
def plan():
    def stage(name, ranks, size, in_flight, forward_us, backward_us, memory=0):
        return Stage(
            name=name,
            blocks=(f"{name}.a", f"{name}.b"),
            ranks=ranks,
            micro_batch_size=size,
            in_flight=in_flight,
            forward_us=forward_us,
            backward_us=backward_us,
            memory_bytes=memory,
        )

    return PipelinePlan(
        model="CLIPModel",
        graph="0123456789abcdef",
        planner="graphpipe",
        mini_batch=8,
        loss_unit=8,
        iteration_us=9000.0,
        stages=(
            stage("vision_model", (0, 1), 4, 2, 1000.0, 2000.0, 3 * 2**20),
            stage("text_model", (2,), 4, 2, 500.0, 1000.0, 2**20),
            stage("loss", (3,), 8, 1, 250.0, 500.0),
        ),
        edges=(
            StageEdge(
                src=0, dst=2, batch_tensors=("image",), gradient_tensors=("image",), bytes_per_sample=256.0
            ),
            StageEdge(
                src=1,
                dst=2,
                batch_tensors=("text",),
                gradient_tensors=("text",),
                bytes_per_sample=256.0,
                bytes_fixed=100.0,
            ),
        ),
        notes=("the loss mixes the samples of a batch",),
    )


def event_of(kind, start, end, *, rank=0, stage=0, **what):
    """Return an event of stage 0 on rank 0, unless said otherwise; in microseconds."""
    return Event(rank=rank, stage=stage, kind=kind, start_us=start, end_us=end, **what)


@pytest.fixture
def timeline():
    """Two micro-batches on the branches, one on the loss; in microseconds."""

    def compute(rank, stage, kind, micro_batch, start, end, **message):
        return event_of(kind, start, end, rank=rank, stage=stage, micro_batch=micro_batch, **message)

    forward, backward, send = EventKind.FORWARD, EventKind.BACKWARD, EventKind.SEND
    return Timeline(
        source="measured",
        plan="fedcba9876543210",
        events=(
            compute(0, 0, forward, 0, 0, 100),
            compute(0, 0, forward, 1, 100, 200),
            compute(1, 0, forward, 0, 0, 100),
            compute(1, 0, forward, 1, 100, 200),
            compute(2, 1, forward, 0, 50, 100),
            compute(2, 1, forward, 1, 100, 150),
            compute(2, 1, send, 0, 100, 130, edge=1, bytes=64),
            compute(2, 1, send, 1, 110, 140, edge=1, bytes=64),
            compute(3, 2, forward, 0, 200, 250),
            compute(3, 2, backward, 0, 250, 300),
            compute(2, 1, backward, 0, 300, 350),
            compute(2, 1, backward, 1, 350, 400),
            compute(0, 0, backward, 0, 300, 400),
            compute(0, 0, backward, 1, 400, 500),
            compute(1, 0, backward, 0, 300, 400),
            compute(1, 0, backward, 1, 400, 500),
            *(event_of(EventKind.REDUCE, 500, 550, rank=rank, bytes=32) for rank in (0, 1)),
            *(
                event_of(EventKind.STEP, 550, 600, rank=rank, stage=stage)
                for rank, stage in enumerate((0, 0, 1, 2))
            ),
        ),
    )
