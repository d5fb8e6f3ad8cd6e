"""Executors of random graphs of data x tensor grids, all ranks as threads of one process, against one process.

Every stage computes element by element, on whole tensors or on its tensor ranks' shards of them, so that what
travels is all that tensor parallelism is here: shards cut, joined and summed back.
"""

from __future__ import annotations

import dataclasses
import queue
import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gpp_plugin.errors import PlanError, RuntimeFailure
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import InstructionKind, Message, RankProgram
from gpp_plugin.ir.tensors import UNIFORM, TensorSpec, batch_layout
from gpp_plugin.runtime.compute import AutogradCompute, HalfForwards, boundary_gradients
from gpp_plugin.runtime.executor import StageExecutor, run_steps
from gpp_plugin.runtime.stage_module import StageFunction
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.lower import lower_schedules
from tests.runtime.memory_stages import Hooks
from tests.schedule.plans import on_rows, proven, simple_plan, with_in_flight

Channel: TypeAlias = "queue.Queue[tuple[list[Tensor], threading.Event]]"

MINI_BATCH = 12
SIDE = 12


class ThreadTransport:
    """Messages between threads; one queue a message. A send ends when it was received, and tells only who waits."""

    prepost_depth = 4
    prepost_bytes = 1 << 20
    buffers_ahead = 0

    def __init__(self, queues: dict[Message, Channel]) -> None:
        self._queues = queues
        self.under_way = self.most_under_way = 0
        self.held: list[StorageWeakRef] = []
        self.most_held = 0

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Count what was sent or received and is still there."""
        self.held = [each for each in self.held if not each.expired()]
        self.held += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor.numel()]
        self.most_held = max(self.most_held, len(self.held))

    def bind_send(self, message, payloads, edge):
        def post(tensors: Sequence[Tensor]) -> _Sent:
            for tensor, payload in zip(tensors, payloads, strict=True):
                assert tensor.shape == payload.shape
            self._queues[message].put(([tensor.clone() for tensor in tensors], taken := threading.Event()))
            self.watch(tensors)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            return _Sent(self, taken)

        return post

    def bind_receive(self, message, payloads, edge):
        def post(buffers: Sequence[Tensor]) -> _Arrival:
            self.watch(buffers)
            return _Arrival(self._queues[message], buffers)

        return post

    def open(self, channels) -> None:
        pass

    def close(self) -> None:
        pass


class _Sent:
    def __init__(self, transport: ThreadTransport, taken: threading.Event) -> None:
        self._transport, self._taken = transport, taken

    def wait(self) -> None:
        assert self._taken.wait(30)
        self._transport.under_way -= 1

    def is_done(self) -> bool:
        return False


class _Arrival:
    """Receives when posted, as a transport does in the background."""

    def __init__(self, source: Channel, buffers: Sequence[Tensor]) -> None:
        self._has_come = False
        self._thread = threading.Thread(target=self._take, args=(source, buffers), daemon=True)
        self._thread.start()

    def _take(self, source: Channel, buffers: Sequence[Tensor]) -> None:
        try:
            tensors, taken = source.get(timeout=30)
        except queue.Empty:  # a test that fails on purpose leaves its receives
            return
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        self._has_come = True
        taken.set()

    def wait(self) -> None:
        self._thread.join(31)
        assert self._has_come


class WatchingHooks(Hooks):
    """Looks what of the mini-batch's messages is held when all of it is through."""

    def __init__(self, transport: ThreadTransport) -> None:
        super().__init__()
        self._transport = transport

    def step(self) -> None:
        self._transport.watch(())
        assert not self._transport.held, "nobody reads or sends them any more"


# ---- a random graph --------------------------------------------------------------------------------------


def random_case(rng: random.Random) -> tuple[PipelinePlan, list[int | None]]:
    """Return a plan of 3 to 5 stages, and the axis of each one's shards; the last one yields the loss."""
    count = rng.randint(3, 5)
    axes = [rng.choice([None, 1, 2]) for _ in range(count - 1)] + [None]
    grids, sizes, schedules = [], [], []
    for _ in range(count):
        data, tensor = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
        grids.append((data, tensor))
        sizes.append(rng.choice([size for size in (1, 2, 3, 4, 6, 12) if size % data == 0]))
        schedules.append(rng.choice(["1f1b", "zero_bubble"]))
    links = {(src, rng.randint(src + 1, count - 1)) for src in range(count - 1) for _ in range(2)}
    edges = [edge_between(src, dst, axes, has_whole=rng.random() < 0.5) for src, dst in sorted(links)]
    plan = on_rows(plan_of(sizes, edges, schedules), *zip(*grids, strict=True))
    plan = with_in_flight(plan)
    slices = [
        (
            rng.choice([0, 2]) if stage.local_batch_size % 2 == 0 and stage.name != "loss" else 0,
            rng.random() < 0.5,
        )
        for stage in plan.stages
    ]
    num_sliced, joins_last = zip(*slices, strict=True)
    return plan.with_each(num_sliced=num_sliced, joins_last_slice=joins_last), axes


def plan_of(sizes, edges, schedule="1f1b") -> PipelinePlan:
    """Return stages without times of these micro-batches, the last of which yields the loss."""
    plan = simple_plan(sizes, [], mini_batch=MINI_BATCH, schedule=schedule, forward_us=0.0, backward_us=0.0)
    names = [*(stage.name for stage in plan.stages[:-1]), "loss"]
    return dataclasses.replace(plan.with_each(name=names), edges=tuple(edges))


def edge_between(src: int, dst: int, axes, *, has_whole: bool) -> StageEdge:
    names = (f"t{src}", f"w{src}")
    return StageEdge(
        src=src,
        dst=dst,
        batch_tensors=names[:1],
        whole_tensors=names[1:] if has_whole else (),
        gradient_tensors=names if has_whole else names[:1],
        bytes_per_sample=8.0,
        src_shard_axis=axes[src],
        dst_shard_axis=axes[dst],
    )


def specs_of(plan: PipelinePlan) -> dict[str, TensorSpec]:
    common = {"dtype": "float64", "num_samples": 1, "requires_grad": True}
    return {
        name: TensorSpec(name=name, shape=(rows, SIDE, SIDE), layout=layout, **common)
        for index in range(len(plan.stages))
        for name, rows, layout in ((f"t{index}", 1, batch_layout()), (f"w{index}", 3, UNIFORM))
    }


def parameters_of(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    shapes = {"scale": (1, SIDE, SIDE), "shift": (1, SIDE, SIDE), "whole": (3, SIDE, SIDE)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


def shard(tensor: Tensor, stage: Stage, rank: int, axis: int | None) -> Tensor:
    return tensor if axis is None else tensor.chunk(stage.tensor, dim=axis)[stage.position(rank)[1]]


def compute_stage(parameters, data, received: dict[str, Tensor], *, has_loss: bool) -> tuple[Tensor, ...]:
    """Return the stage's batch tensor and its tensor that is the same for all samples, or the loss."""
    hidden = data * parameters["scale"] + parameters["shift"]
    whole = parameters["whole"]
    for name, tensor in received.items():
        if name.startswith("t"):
            hidden = hidden + 0.5 * tensor * parameters["scale"]
        else:
            hidden = hidden + 0.1 * tensor.sum(0, keepdim=True)
            whole = whole + 0.3 * tensor * parameters["whole"]
    if has_loss:
        return ((hidden.square().sum() + whole.square().sum()) / (2 * len(hidden)),)
    return hidden.tanh(), whole.tanh()


def received_by(plan: PipelinePlan, index: int) -> tuple[str, ...]:
    edges = [edge for edge in plan.edges if edge.dst == index]
    return tuple(name for edge in edges for name in (*edge.batch_tensors, *edge.whole_tensors))


# ---- one rank, and one process ---------------------------------------------------------------------------


def run_rank(plan, axes, program: RankProgram, specs, queues, data: Tensor):
    """Return this rank's parameters after a mini-batch, with their gradients, its losses, and its transport."""
    transport = ThreadTransport(queues)
    stage, index, rank = plan.stages[program.stage], program.stage, program.rank
    held = {
        name: shard(tensor, stage, rank, axes[index]).clone().requires_grad_()
        for name, tensor in parameters_of(index).items()
    }
    names, received, has_loss = tuple(held), received_by(plan, index), stage.name == "loss"

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        parameters = dict(zip(names, tensors, strict=False))
        data, *rest = tensors[len(names) :]
        return compute_stage(parameters, data, dict(zip(received, rest, strict=True)), has_loss=has_loss)

    function = StageFunction(
        call=call,
        tensors=names,
        constants=(),
        batch_inputs=("data",),
        received=received,
        outputs=("loss",) if has_loss else (f"t{index}", f"w{index}"),
        code="",
    )
    compute = AutogradCompute(
        function=function,
        parameters=list(held.values()),
        gradients=boundary_gradients(program, plan, specs),
        hooks=Hooks(),
        loss="loss" if has_loss else None,
        loss_share=stage.local_batch_size / plan.mini_batch,
        halves=HalfForwards(
            function=function,
            input_axes=(0,),
            axes={name: 0 if name.startswith("t") else -1 for name in specs},
        ),
    )
    executor = StageExecutor(
        plan=plan,
        program=program,
        compute=compute,
        specs=specs,
        transport=transport,
        hooks=WatchingHooks(transport),
        device=torch.device("cpu"),
        loss="loss" if has_loss else None,
    )
    rows = [stage.samples(m, rank) for m in range(plan.num_micro_batches(index))]
    whole = shard(data, stage, rank, axes[index])
    inputs = [(whole[r.first_sample : r.end],) for r in rows]
    run_steps(program, executor.steps, (executor,), (inputs,), record=False, carries=(None,))
    return held, executor.result.losses, transport


def alone(plan: PipelinePlan, data: Tensor) -> tuple[list[dict[str, Tensor]], float]:
    """Return every stage's gradients and the mean loss, computed at once."""
    made: dict[str, Tensor] = {}
    parameters = [
        {n: p.requires_grad_() for n, p in parameters_of(i).items()} for i in range(len(plan.stages))
    ]
    loss = torch.zeros(())
    for index, stage in enumerate(plan.stages):
        received = {name: made[name] for name in received_by(plan, index)}
        outputs = compute_stage(parameters[index], data, received, has_loss=False)
        made.update(zip((f"t{index}", f"w{index}"), outputs, strict=True))
        if stage.name == "loss":
            # each micro-batch's loss holds the tensor without samples once
            size = stage.local_batch_size
            losses = [
                compute_stage(
                    parameters[index],
                    data[first : first + size],
                    {n: t[first : first + size] if n.startswith("t") else t for n, t in received.items()},
                    has_loss=True,
                )[0]
                for first in range(0, MINI_BATCH, size)
            ]
            loss = torch.stack(losses).mean()
    loss.backward()
    return [gradients_of(held) for held in parameters], loss.item()


def gradients_of(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}


def run_threads(plan, axes, specs, data):
    _, programs = proven(plan)
    queues: dict[Message, Channel] = defaultdict(queue.Queue)
    for program in programs:
        for message in program.messages(InstructionKind.SEND):
            queues[message] = queue.Queue()
    with ThreadPoolExecutor(len(programs)) as pool:
        futures = [pool.submit(run_rank, plan, axes, p, specs, queues, data) for p in programs]
        return [future.result(timeout=60) for future in futures]


@pytest.mark.parametrize("seed", range(24))
def test_gradients_equal_those_of_one_process(seed):
    rng = random.Random(seed)
    plan, axes = random_case(rng)
    data = torch.randn(
        MINI_BATCH, SIDE, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    ranks = run_threads(plan, axes, specs_of(plan), data)
    expected, loss = alone(plan, data)
    told = [(value.item(), count) for _, losses, _ in ranks for value, count in losses]
    assert sum(value * count for value, count in told) / MINI_BATCH == pytest.approx(loss, rel=1e-13)
    assert sum(count for _, count in told) == MINI_BATCH  # one tensor rank of each row tells its losses
    gradients = [gradients_of(held) for held, *_ in ranks]
    for index, stage in enumerate(plan.stages):
        for position in range(stage.tensor):
            column = stage.data_ranks(position)
            for name, whole in expected[index].items():
                wanted = shard(whole, stage, column[0], axes[index])
                found = torch.stack([gradients[rank][name] for rank in column]).sum(0)
                assert float((found - wanted).norm()) <= 1e-12 * float(whole.norm()), (index, name)
        if axes[index] is None:  # tensor ranks that hold the same have the same bits
            for row in map(stage.tensor_ranks, range(stage.degree)):
                for name in expected[index]:
                    assert all(
                        torch.equal(gradients[row[0]][name], gradients[rank][name]) for rank in row[1:]
                    )


def test_what_was_sent_or_read_long_ago_is_let_go():
    """Twelve micro-batches, one at a time, of a stage that sends one tensor for each: two may be under way."""
    plan = plan_of([1, 1], [edge_between(0, 1, [None, None], has_whole=False)])
    data = torch.ones(MINI_BATCH, SIDE, SIDE, dtype=torch.float64)
    ranks = run_threads(plan, [None, None], specs_of(plan), data)
    assert [transport.most_under_way for *_, transport in ranks] == [3, 3]  # and the one that was just posted
    # receives that are posted ahead, what a task reads and what is under way: of the 12 of a mini-batch each way
    assert all(4 < transport.most_held < 8 for *_, transport in ranks)


def sharded_pair(axis: int) -> PipelinePlan:
    """Return a stage of two tensor ranks that hold what they send as shards, and the loss behind it."""
    return on_rows(plan_of([1, 1], [edge_between(0, 1, [axis, None], has_whole=False)]), [1, 1], [2, 1])


def test_a_stage_that_makes_the_whole_tensor_where_the_plan_has_shards_is_told():
    plan = sharded_pair(1)
    data = torch.zeros(MINI_BATCH, SIDE, SIDE, dtype=torch.float64)
    program = lower_schedules(plan, build_schedules(plan))[0]
    queues: dict[Message, Channel] = defaultdict(queue.Queue)
    with pytest.raises(RuntimeFailure, match=r"t0 is \(1, 12, 12\); by the plan the rank holds 6 elements"):
        run_rank(plan, [None, None], program, specs_of(plan), queues, data)


@pytest.mark.parametrize("axis", [0, 3])
def test_shards_along_the_samples_or_no_axis_are_refused(axis):
    plan = sharded_pair(axis)
    program = lower_schedules(plan, build_schedules(plan))[0]
    with pytest.raises(PlanError, match=rf"'s0' holds 't0' of shape .* in 2 equal parts along axis {axis}"):
        run_rank(plan, [1, None], program, specs_of(plan), {}, torch.zeros(MINI_BATCH, SIDE, SIDE))
