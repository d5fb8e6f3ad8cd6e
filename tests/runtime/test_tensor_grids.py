"""Executors of random graphs of data x context x tensor grids, all ranks as threads of one process, against one process.

Every stage computes element by element, on whole tensors or on its ranks' parts of them, so that what travels is all
that context and tensor parallelism are here: parts cut, joined and summed back.
"""

from __future__ import annotations

import dataclasses
import queue
import random
import threading
import types
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
from gpp_plugin.runtime.messages.routes import Routes, payloads_of, resolve_routes
from gpp_plugin.runtime.stage_module import StageFunction
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.messages import message_bytes
from tests.runtime.memory_stages import Hooks
from tests.schedule.plans import on_rows, proven, simple_plan, with_in_flight

Channel: TypeAlias = "queue.Queue[tuple[list[Tensor], threading.Event]]"

MINI_BATCH = 12
LENGTH, SIDE = 7, 12
"""Positions along axis 1, which context ranks hold in parts, and what equal shards divide along axis 2."""


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
        assert payloads, "nothing travels"

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
        assert payloads, "nothing travels"

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
    """Return a plan of 3 to 5 stages, and the axis of each one's parts; the last one yields the loss."""
    count = rng.randint(3, 5)
    axes: list[int | None] = []
    grids, sizes, schedules = [], [], []
    for _ in range(count):
        data, context = rng.choice([1, 2, 3]), rng.choice([1, 1, 2, 3])
        tensor = rng.choice([1, 2, 3] if context == 1 else [1, 1, 2])
        grids.append((data, tensor, context))
        # tensor ranks alone have equal shards, which positions do not allow
        is_last = len(axes) == count - 1
        axes.append(None if is_last else rng.choice([None, 2] if context == 1 else [None, 1, 1, 2]))
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


def specs_of(plan: PipelinePlan, length: int = LENGTH) -> dict[str, TensorSpec]:
    common = {"dtype": "float64", "num_samples": 1, "requires_grad": True}
    return {
        name: TensorSpec(name=name, shape=(rows, length, SIDE), layout=layout, **common)
        for index in range(len(plan.stages))
        for name, rows, layout in ((f"t{index}", 1, batch_layout()), (f"w{index}", 3, UNIFORM))
    }


def parameters_of(index: int, length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    shapes = {"scale": (1, length, SIDE), "shift": (1, length, SIDE), "whole": (3, length, SIDE)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


def shard(tensor: Tensor, stage: Stage, rank: int, axis: int | None) -> Tensor:
    """Return what a rank has of a tensor: of context ranks its positions, else its tensor rank's equal shard."""
    if axis is None:
        return tensor
    number, part = (
        (stage.context, stage.context_position(rank))
        if stage.context > 1
        else (stage.tensor, stage.tensor_position(rank))
    )
    first, behind = (tensor.shape[axis] * at // number for at in (part, part + 1))
    return tensor.narrow(axis, first, behind - first)


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
        for name, tensor in parameters_of(index, data.shape[1]).items()
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
    # of an empty part too: a rank that left its backward out would leave others waiting in its collectives
    assert held["scale"].grad is not None
    return held, executor.result.losses, transport


def alone(plan: PipelinePlan, data: Tensor) -> tuple[list[dict[str, Tensor]], float]:
    """Return every stage's gradients and the mean loss, computed at once."""
    made: dict[str, Tensor] = {}
    parameters = [
        {n: p.requires_grad_() for n, p in parameters_of(i, data.shape[1]).items()}
        for i in range(len(plan.stages))
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
    check_equal(plan, axes, length=rng.choice([LENGTH, LENGTH, 2]), seed=seed)


def check_equal(
    plan: PipelinePlan, axes: Sequence[int | None], *, length: int = LENGTH, seed: int = 0
) -> None:
    """Loss and gradients of the plan's ranks are those of one process; axis 1 has so many positions."""
    data = torch.randn(
        MINI_BATCH, length, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    ranks = run_threads(plan, axes, specs_of(plan, length), data)
    check_bytes(plan, length)
    expected, loss = alone(plan, data)
    told = [(value.item(), count) for _, losses, _ in ranks for value, count in losses]
    assert sum(value * count for value, count in told) / MINI_BATCH == pytest.approx(loss, rel=1e-13)
    assert sum(count for _, count in told) == MINI_BATCH  # one rank of each row tells its losses
    gradients = [gradients_of(held) for held, *_ in ranks]
    for index, stage in enumerate(plan.stages):
        for place in range(stage.model_parallel):
            column = stage.data_ranks(place)
            for name, whole in expected[index].items():
                wanted = shard(whole, stage, column[0], axes[index])
                found = torch.stack([gradients[rank][name] for rank in column]).sum(0)
                assert float((found - wanted).norm()) <= 1e-12 * float(whole.norm()), (index, name)
        # ranks that hold the same have the same bits
        for row in map(stage.model_ranks, range(stage.degree)):
            held: dict[int, int] = {}
            for place, rank in enumerate(row):
                first = held.setdefault(stage.part_at(place, axes[index]), rank)
                for name in expected[index]:
                    assert torch.equal(gradients[first][name], gradients[rank][name])


def check_bytes(plan: PipelinePlan, length: int) -> None:
    """What all ranks send over an edge, counted tensor by tensor, has as many bytes as the plan says."""
    specs = specs_of(plan, length)
    row = length * SIDE * 8.0
    sizes = {"bytes_per_sample": row, "gradient_bytes_per_sample": row}
    sizes |= {"bytes_fixed": 3 * row, "gradient_bytes_fixed": 3 * row}
    sized = dataclasses.replace(plan, edges=tuple(dataclasses.replace(edge, **sizes) for edge in plan.edges))
    counted: dict[object, float] = defaultdict(float)
    planned: dict[object, float] = defaultdict(float)
    for program in proven(plan)[1]:
        for message in program.messages(InstructionKind.SEND):
            payloads = payloads_of(message, is_sender=True, plan=plan, specs=specs)
            assert [(p.name, p.shape) for p in payloads] == [
                (p.name, p.shape) for p in payloads_of(message, is_sender=False, plan=plan, specs=specs)
            ]
            counted[message.edge, message.direction] += sum(payload.num_bytes for payload in payloads)
            planned[message.edge, message.direction] += message_bytes(sized, message)
    assert counted == pytest.approx(planned)


@pytest.mark.parametrize("length", [7, 2])
@pytest.mark.parametrize(
    "grids",
    ["1x1>2x1", "2x1>1x1", "2x1>3x1", "3x1>2x1", "2x2>2x1", "2x1>2x2", "3x1>1x2", "2x2>4x1"],
)
def test_stages_of_unlike_context_sizes_reshard_their_positions(grids, length):
    """Of two positions, one of three or four context ranks has none: nothing travels to and from it."""
    contexts, tensors = zip(*(map(int, grid.split("x")) for grid in grids.split(">")), strict=True)
    contexts, tensors = (*contexts, 1), (*tensors, 1)
    axes = [1 if context > 1 else None for context in contexts]
    edges = [edge_between(src, src + 1, axes, has_whole=True) for src in (0, 1)]
    plan = on_rows(plan_of([4, 6, 6], edges), [1, 2, 1], tensors, contexts)
    check_equal(with_in_flight(plan), axes, length=length)


def routes_at(plan: PipelinePlan, program: RankProgram, specs, known: Routes | None = None) -> Routes:
    one = specs if isinstance(specs, dict) else specs[0]
    gradients = boundary_gradients(program, plan, one)
    index = program.stage
    boundary = types.SimpleNamespace(
        received=received_by(plan, index),
        outputs=(f"t{index}", f"w{index}"),
        gradient_outputs=gradients.outputs,
        gradient_inputs=gradients.inputs,
    )
    return resolve_routes(program, plan=plan, boundary=boundary, specs=specs, known=known)


@pytest.mark.parametrize("seed", range(8))
def test_routes_at_another_length_are_those_that_are_resolved_anew(seed):
    """All micro-batches of one length, or, of micro-batches of a sample, each of its own; 2 leaves ranks without any."""
    rng = random.Random(seed)
    plan, _ = random_case(rng)
    lengths: list[list[int]] = [[7] * MINI_BATCH, [9] * MINI_BATCH, [2] * MINI_BATCH]
    if seed % 2:
        sizes = [stage.degree for stage in plan.stages]
        plan = with_in_flight(plan.with_each(micro_batch_size=sizes, num_sliced=[0] * len(sizes)))
        lengths += [[rng.randint(3, 9) for _ in range(MINI_BATCH)] for _ in range(3)]
    num_derived = 0
    for program in proven(plan)[1]:
        at = [
            [specs_of(plan, length) for length in each] if seed % 2 else specs_of(plan, each[0])
            for each in lengths
        ]
        known = routes_at(plan, program, at[0])
        for each, specs in zip(lengths, at, strict=True):
            anew, derived = (routes_at(plan, program, specs, known=before) for before in (None, known))
            assert derived == anew
            num_derived += derived.slots is known.slots
            assert min(each) < 3 or derived.slots is known.slots, (
                "resolved anew, though the same ranks have parts"
            )
    assert num_derived


def test_what_was_sent_or_read_long_ago_is_let_go():
    """Twelve micro-batches, one at a time, of a stage that sends one tensor for each: two may be under way."""
    plan = plan_of([1, 1], [edge_between(0, 1, [None, None], has_whole=False)])
    data = torch.ones(MINI_BATCH, SIDE, SIDE, dtype=torch.float64)
    ranks = run_threads(plan, [None, None], specs_of(plan, SIDE), data)
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
        run_rank(plan, [None, None], program, specs_of(plan, SIDE), queues, data)


@pytest.mark.parametrize("axis", [0, 3])
def test_shards_along_the_samples_or_no_axis_are_refused(axis):
    plan = sharded_pair(axis)
    program = lower_schedules(plan, build_schedules(plan))[0]
    with pytest.raises(PlanError, match=rf"'s0' holds 't0' of shape .* in 2 equal parts along axis {axis}"):
        run_rank(plan, [1, None], program, specs_of(plan, SIDE), {}, torch.zeros(MINI_BATCH, SIDE, SIDE))
