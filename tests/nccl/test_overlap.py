"""How much of what travels is hidden behind computing, on the recorded tape of the real runtime with times put to it.

A tape says what waits for what. With a time for each item it says when each runs, streams each with a queue of their
own: an item starts when all that it waits for has ended, and a rendezvous lasts from the start of its last end.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_benchmarks._random_plans import random_plan
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.runtime.memory.activation_policy import StageActivations, Turn
from gpp_plugin.runtime.memory.recompute import MovingPass
from gpp_plugin.runtime.memory.swap import SwapLink
from gpp_plugin.runtime.messages.transport import NcclTransport
from gpp_plugin.runtime.tensor_ranks import TensorRanks, linear, shared
from gpp_plugin.simulate.timeline_metrics import COPIES_BACK, COPIES_OUT, Travel, overlap_of
from tests.nccl.checker import WaitGraph, topological_order
from tests.nccl.coverage_counts import Tell, check_runs, everything, report
from tests.nccl.fake_cuda import CUDA, FakeCuda, recorded_cuda
from tests.nccl.operations import Job, Operation, Place, Tape
from tests.nccl.recording import Run, record_job, record_ranks
from tests.schedule.plans import chain_plan, sharded, simple_plan, with_room
from tests.tiers import some

aten = torch.ops.aten
KindOf = Callable[[Operation], str | None]
"""What an item is: "compute", a kind of what travels, or None."""


def timed(job: Job, duration: Callable[[Operation], float]) -> list[tuple[int, Operation, float, float]]:
    """Return (rank, operation, start, end) of all operations; a rendezvous starts where its last end does."""
    graph = WaitGraph(job)
    queues = {(r, each.stream): each.stream for r, rank in enumerate(job) for each in rank}
    behind = graph.behind(queues)
    ready = [0.0] * len(graph.after)
    operations = [(rank, each) for rank, own in enumerate(job) for each in own]
    took = {graph.end[node]: duration(each) for node, (_, each) in enumerate(operations)}
    order = topological_order(graph, queues)
    assert len(order) == len(graph.after), "it hangs"
    for node in order:
        done = ready[node] + took.get(node, 0.0)
        following = behind[node] if node < len(behind) else -1
        for other in (*graph.after[node], *((following,) if following >= 0 else ())):
            ready[other] = max(ready[other], done)
    return [
        (rank, each, ready[graph.end[node]], ready[graph.end[node]] + took[graph.end[node]])
        for node, (rank, each) in enumerate(operations)
    ]


def shares(job: Job, duration: Callable[[Operation], float], kind_of: KindOf) -> dict[str, float]:
    """Return by kind of what travels the share of its time in which its rank computes."""
    computing: dict[int, list[tuple[float, float]]] = defaultdict(list)
    travels = []
    for rank, each, start, end in timed(job, duration):
        kind = kind_of(each)
        if kind == "compute":
            computing[rank].append((start, end))
        elif kind is not None:
            travels.append(Travel(kind=kind, rank=rank, start_us=start, end_us=end))
    return {each.kind: each.share for each in overlap_of(travels, computing)}


# ---- swap --------------------------------------------------------------------------------------------------


class CopyingCuda(FakeCuda):
    """A recorded device that writes down copies to and from host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_device = self.memory.is_device
        if func is Tensor.copy_ and is_device(args[0]) != is_device(args[1]):
            what = COPIES_OUT if is_device(args[1]) else COPIES_BACK
            self.tape.put(self.stream.number, what, sizes=(args[1].nbytes,))
        return super().__torch_function__(func, types, args, kwargs)


LAYERS = 4
ORDER = ("F0", "F1", "F2", "B0", "F3", "B1", "F4", "B2", "B3", "B4")
"""The first of three stages in 1F1B."""


class _Layers(MovingPass):
    """A forward of some layers, each an item of the tape that keeps one tensor, which moves to the host."""

    def __init__(self, cuda: FakeCuda, **context: Any) -> None:
        super().__init__(lambda: (), fixed=(), num_segments=0, counter=None, **context)
        self._cuda = cuda
        self.views: list[Any] = []

    def run(self, fixed: Any, received: Any) -> tuple[Tensor, ...]:
        for layer in range(LAYERS):
            self._cuda.tape.put(0, "forward")
            self.views.append(self.move(torch.zeros(256, device=CUDA), layer))
        return ()

    def backward(self) -> None:
        while self.views:
            self.queue.get(self.views.pop())
            self._cuda.tape.put(0, "backward")


def swapped_job() -> Job:
    """Return what a stage that swaps asks of its device in 1F1B, with the runtime's keeper and link."""
    tape = Tape(0)
    cuda = CopyingCuda(tape, num_devices=1)
    following: dict[Turn, int] = {
        (task[0] == "B", int(task[1]), None): int(then[1])
        for task, then in zip(ORDER, ORDER[1:], strict=False)
        if then[0] == "B"
    }
    with recorded_cuda(cuda):
        link = SwapLink(CUDA)
        link.pool._is_pinned = False
        passes: list[_Layers] = []

        def begin(fixed: Any, received: Any, *, micro_batch: int, counter: Any) -> _Layers:
            passes.append(_Layers(cuda, micro_batch=micro_batch, link=link))
            return passes[-1]

        policy: Any = mock.Mock(begin=begin, frees_received=True)
        keeper = StageActivations(
            whole=policy, half=None, leaves=(), constants=(), link=link, next_backward=following.get
        )
        for task in ORDER:
            micro_batch = int(task[1])
            if task[0] == "F":
                keeper.forward(micro_batch, None, (), (), ())
            else:
                keeper.begin_backward(micro_batch)
                passes[micro_batch].backward()
                keeper.end_backward(micro_batch)
    return (tuple(tape.operations),)


def swap_shares(job: Job, *, copy_us: float = 8.0) -> dict[str, float]:
    took = {"forward": 10.0, "backward": 20.0, COPIES_OUT: copy_us, COPIES_BACK: copy_us}
    kinds = {
        **dict.fromkeys(("forward", "backward"), "compute"),
        COPIES_OUT: COPIES_OUT,
        COPIES_BACK: COPIES_BACK,
    }
    return shares(job, lambda each: took.get(each.what, 0.0), lambda each: kinds.get(each.what))


def test_what_comes_back_from_the_host_hides_behind_computing(tell: Tell) -> None:
    found = swap_shares(swapped_job())
    tell(found)
    # what a forward keeps last has left before its own backward brings anything back: two ways at once need the memory
    assert found[COPIES_BACK] >= 0.9 and found[COPIES_OUT] >= 0.8
    assert swap_shares(swapped_job(), copy_us=60.0)[COPIES_BACK] < 0.6, (
        "a link that is too slow hides nothing more"
    )


def test_without_the_early_prefetch_the_number_falls(tell: Tell) -> None:
    prefetch = StageActivations._prefetch

    def late(self: StageActivations, micro_batch: int | None, *, beside_forward: bool = False) -> None:
        if not beside_forward:
            prefetch(self, micro_batch)

    def behind_launch(
        self: StageActivations, *args: Any
    ) -> Any:  # as it was: the copy waits for the forward's end
        done = forward(self, *args)
        prefetch(self, self._next_backward((False, args[0], None)), beside_forward=True)
        return done

    forward = StageActivations.forward
    for fault in (
        {"_prefetch": late},
        {"_prefetch": late, "forward": behind_launch},
        {"begin_backward": lambda self, micro_batch, is_whole=True: self._prefetch(micro_batch)},
    ):
        with mock.patch.multiple(StageActivations, **fault):
            found = swap_shares(swapped_job())
        tell({"fault": sorted(fault), **found})
        assert found[COPIES_BACK] <= 0.9 < swap_shares(swapped_job())[COPIES_BACK]


# ---- messages ----------------------------------------------------------------------------------------------


def plan_shares(run: Run, *, transfer_us: float = 4.0, gather_us: float = 6.0) -> dict[str, float]:
    def kind_of(each: Operation) -> str | None:
        if each.place is not Place.DEVICE:
            return None
        if each.transfers:
            return "messages" if each.what == "transfers" else None
        if each.collectives is not None:
            return "gathers" if each.what.startswith("all_gather") else None
        return "compute" if each.what[0] in "FBIW" and each.what[1:].isdigit() else None

    def duration(each: Operation) -> float:
        kind = kind_of(each)
        took = {
            "messages": transfer_us,
            "gathers": gather_us,
            "compute": 20.0 if each.what[:1] == "B" else 10.0,
        }
        return took.get(kind or "", 0.0)

    return shares(record_job(run), duration, kind_of)


def test_messages_travel_beside_tasks(tell: Tell) -> None:
    found = plan_shares(Run(plan=chain_plan(4, 16)))
    tell(found)
    # 1F1B gives a stage two tasks' time for a message there and back: half of them find their receiver idle
    assert found["messages"] >= 0.45
    with mock.patch.object(NcclTransport, "buffers_ahead", 0):  # a receive waits for the task in front of it
        late = plan_shares(Run(plan=chain_plan(4, 16)))
    tell({"made at their place": late})
    assert late["messages"] < found["messages"]


# ---- gathers -----------------------------------------------------------------------------------------------


def interleaved(num_stages: int) -> PipelinePlan:
    chain = simple_plan([4] * num_stages, [(i, i + 1) for i in range(num_stages - 1)], mini_batch=16)
    return sharded(chain, *[((0, 1), (2, 3))[i % 2] for i in range(num_stages)])


def test_gathers_hide_behind_the_task_in_front_where_there_is_room(tell: Tell) -> None:
    found = {
        name: plan_shares(Run(plan=plan, zero=3))
        for name, plan in {"alone": interleaved(6), "ahead": with_room(interleaved(6))}.items()
    }
    tell(found)
    assert found["ahead"]["gathers"] >= 0.6 > 0.3 >= found["alone"]["gathers"]


def test_no_gather_ahead_of_its_place_hangs(tell: Tell) -> None:
    rng = random.Random(5)
    plans = [with_room(interleaved(4)), with_room(interleaved(6))]
    for _ in some(range(24), every=4):
        plans.append(with_room(sharded(random_plan(rng, most_stages=6, most_ranks=6, shares_ranks=True))))
    runs = [(str(n), everything(Run(plan=plan, zero=3))) for n, plan in enumerate(plans)]
    report(tell, check_runs(runs))


# ---- sums of tensor ranks ----------------------------------------------------------------------------------


def tensor_sums_job(layers: int = 3) -> Job:
    """Return what two tensor ranks ask of their devices for layers of q, k and v, in whose backwards they sum."""

    def work(cuda: FakeCuda) -> None:
        group = dist.new_group(None)
        ranks = TensorRanks(stage="all", position=dist.get_rank(), size=2, group=group)
        read, share = linear(aten.linear.default, 0), shared(ranks, (0, 0, 0))
        hidden = torch.ones(2, 4, device=CUDA, requires_grad=True)
        for _ in range(layers):
            weights = [torch.ones(3, 4, device=CUDA, requires_grad=True) for _ in range(3)]
            for weight in weights:
                weight.register_hook(lambda _: cuda.tape.put(cuda.stream.number, "weight") and None)
            tensor, *of_weights = share(hidden, None, *(each for w in weights for each in (w, None)))
            parts = [read(o, tensor, w) for o, w in zip(of_weights, weights, strict=True)]
            hidden = torch.stack(parts).sum(0) @ torch.ones(3, 4, device=CUDA)
        hidden.sum().backward()

    return record_ranks(2, work).job


def tensor_sums_share(*, sum_us: float) -> float:
    def kind_of(each: Operation) -> str | None:
        return {"all_reduce": "tensor sums", "weight": "compute"}.get(each.what)

    took = {"tensor sums": sum_us, "compute": 5.0}
    return shares(tensor_sums_job(), lambda each: took.get(kind_of(each) or "", 0.0), kind_of)["tensor sums"]


def test_sums_of_tensor_ranks_hide_behind_the_gradients_of_weights(tell: Tell) -> None:
    found = {sum_us: tensor_sums_share(sum_us=sum_us) for sum_us in (12.0, 30.0)}
    begin_sum = TensorRanks.begin_sum

    def waits(self: TensorRanks, tensor: Tensor, what: str) -> tuple[Tensor, Callable[[], None]]:
        total, wait = begin_sum(self, tensor, what)
        wait()
        return total, lambda: None

    with mock.patch.object(TensorRanks, "begin_sum", waits):
        late = tensor_sums_share(sum_us=12.0)
    tell({"hidden": found, "waits at once": late})
    assert found == {12.0: 1.0, 30.0: 0.5} and late == 0.0
