"""Faults of waiting and keeping, planted one at a time in the package, and which check finds each.

A fault is one piece of a function's text, and what stands there instead. `find` runs a small recorded job with it:

    race      two uses of one piece of memory in no order (`races`)
    order     ranks wait for each other (`checker`): a hang, perhaps with the host waiting somewhere, or on few queues
    read      a host waits for its device between two tasks
    numbers   the job's weights and losses are others
    error     the package itself refuses

What is not found must be one of those that cost time or memory and change nothing else: ``harmless`` says which. Two of
them are real: at commit 37ec3e4 receives were posted two exchanges ahead of their place, and a traced step synchronised
the device. Of 254 plans of the tests 237 hang so traced, and 225 with one wait of the host somewhere. The table::

    python -m tests.nccl.planted
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import random
import sys
import textwrap
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_benchmarks._emulated_graphs import emulated_plan
from gpp_benchmarks._random_plans import with_in_flight
from gpp_plugin.config.block import GenerateConfig
from gpp_plugin.engine.stage_groups import StageGroups
from gpp_plugin.ir.analysis import regions_in
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.model.generation.generator import GeneratedModel, Generator
from gpp_plugin.model.generation.micro_batches import Turns
from gpp_plugin.plugins import Transport, TransportRequest
from gpp_plugin.runtime.batches import InputLink
from gpp_plugin.runtime.context_ranks import cut_graph
from gpp_plugin.runtime.messages import transport
from gpp_plugin.runtime.ranks.collectives import Collectives
from gpp_plugin.runtime.shard_graph import shard_graph
from gpp_plugin.runtime.stage_module import build_stage_function
from gpp_plugin.runtime.tensor_ranks import TensorRanks, own_part
from tests.models import build
from tests.nccl.checker import WaitGraph, ends_serially, points_that_hang, share_queues
from tests.nccl.coverage_counts import everything
from tests.nccl.fake_cuda import CUDA, FakeCuda
from tests.nccl.recording import SAME_GROUPS, Recorded, Run, record, record_ranks
from tests.runtime.memory_stages import TestStage, Trainer, make_stage, plan_both, plan_swap
from tests.schedule.plans import chain_plan, make_edge, on_ranks, on_rows, sharded, simple_plan
from tests.schedule.test_async import asynchronous
from tests.schedule.test_look_ahead import random_frozen_plan


class Fault(NamedTuple):
    """Something that a function does otherwise.

    Args:
        target: ``module:Class.method``, the module within the package.
        job: of `JOBS`, which shows it.
        harmless: what it costs, if it changes no result.
    """

    target: str
    before: str
    after: str
    job: str = "chain"
    harmless: str = ""

    def __str__(self) -> str:
        return f"{self.target.rpartition('.')[2]}: {self.before.strip().splitlines()[0]} -> {self.after.strip() or 'nothing'}"


# ---- jobs --------------------------------------------------------------------------------------------------


def _twins(zero: int) -> Run:
    plan = emulated_plan("twins", [(0, 1)], num_micro_batches=4, degrees={0: 2, 1: 2})
    return everything(Run(plan=sharded(plan) if zero == 3 else plan, zero=zero, computes=True))


def _tensor_plan() -> PipelinePlan:
    """Return two stages of two tensor ranks, of which the first keeps and the second swaps, and one that recomputes."""
    chain = on_ranks(chain_plan(3, 4), (0, 1), (2, 3), (4, 5))
    return dataclasses.replace(chain, stages=tuple(dataclasses.replace(s, tensor=2) for s in chain.stages))


def _context_plan() -> PipelinePlan:
    """Return stages of two and of three context ranks, between which positions are in parts."""
    edge = make_edge(0, 1, src_shard_axis=1, dst_shard_axis=1)
    plan = dataclasses.replace(simple_plan([1, 1], [], mini_batch=2), edges=(edge,))
    return on_rows(with_in_flight(plan), [1, 1], [1, 1], [2, 3])


def _sending(run: Run) -> Run:
    return dataclasses.replace(run, computes=True, sends_weights=True)


def _frozen() -> PipelinePlan:
    return random_frozen_plan(random.Random(1))


def _captured(make_plan: Callable[[Any], Any]) -> Recorded:
    """Return what the captured code of a small GPT-2 does under a memory plan, with two micro-batches in flight."""
    stage = make_stage("gpt2", granularity="layer", dropout=0.1)
    plan = make_plan(stage)

    def work(cuda: FakeCuda) -> None:
        trainer = Trainer(stage, plan, device=CUDA)
        for _ in range(2):
            made = trainer.train(in_flight=2)
        cuda.memory.numbers = [*made["gradients"], *made["losses"]]

    return _alone(work)


def _captured_in_parts() -> Recorded:
    """Return what the captured code of a small Llama does on two tensor ranks, of parts of the positions between regions."""
    stages = [
        in_parts(make_stage("llama", granularity="layer", start=0.4), position) for position in range(2)
    ]

    def work(cuda: FakeCuda) -> None:
        stage, ranks = stages[dist.get_rank()]
        ranks.group = dist.new_group(None)
        made = Trainer(stage, None, device=CUDA).train()
        cuda.memory.numbers = [*made["gradients"], *made["losses"]]

    return record_ranks(2, work)


def in_parts(stage: TestStage, position: int = 0) -> tuple[TestStage, TensorRanks]:
    """Return a stage as one of two tensor ranks computes it, and these, who have no group yet."""
    captured, blocks = stage.captured, [b for b in stage.graph.blocks if b.name in stage.blocks]
    regions = [
        r
        for b in blocks
        for r in regions_in(captured.analysis.sharding.regions, b.nodes)
        if r.is_divided_by(2)
    ]
    cuts = {shard.name: shard for region in regions for shard in region.parameters}
    ranks = TensorRanks(stage="s", position=position, size=2, parts=cuts)
    sharded_graph, added, (loss,) = shard_graph(
        captured,
        regions,
        ranks,
        [n for b in blocks for n in b.nodes],
        sequence=captured.analysis.sharding.sequence,
        outputs=(str(captured.op_graph.loss),),
    )
    state = {
        n: own_part(t.detach(), cuts[n], position, 2).requires_grad_() if n in cuts else t
        for n, t in stage.state.items()
    }
    return _with_added(dataclasses.replace(stage, captured=sharded_graph, state=state), added, loss), ranks


def in_context(stage: TestStage, position: int = 0) -> tuple[TestStage, TensorRanks]:
    """Return a stage as one of two context ranks computes it, and these, who have no group yet."""
    captured, own = stage.captured, [n for b in stage.graph.blocks if b.name in stage.blocks for n in b.nodes]
    ranks = TensorRanks(stage="s", position=position, size=2, kind="context")
    parts = captured.analysis.sharding.context
    cut, added, (loss,) = cut_graph(captured, parts, ranks, own, outputs=(str(captured.op_graph.loss),))
    return _with_added(dataclasses.replace(stage, captured=cut), added, loss), ranks


def _with_added(stage: TestStage, added: Mapping[str, str], loss: str) -> TestStage:
    """Return a stage with the code of a graph in which operators were put."""
    blocks = [b for b in stage.graph.blocks if b.name in stage.blocks]
    more = {b.name: [n for n, beside in added.items() if beside in b.nodes] for b in blocks}
    blocks = [dataclasses.replace(b, nodes=(*b.nodes, *more[b.name])) for b in blocks]
    function = build_stage_function(stage.captured, [n for b in blocks for n in b.nodes], (loss,))
    if function.choice is not None:
        function.choice.use(stage.captured.analysis.unpadded)
    function = dataclasses.replace(function, outputs=(str(stage.captured.op_graph.loss),))
    graph = dataclasses.replace(stage.graph, blocks=tuple(blocks))
    return dataclasses.replace(stage, graph=graph, function=function)


def _leave_rows(cuda: FakeCuda) -> None:
    """Bring the rows of two mini-batches to the device that nobody reads, as where a mini-batch fails."""
    link = InputLink(CUDA)
    for _ in range(2):
        rows = [torch.zeros(2, 3, dtype=torch.float64) for _ in range(2)]
        link.bring_units([{"x": each} for each in rows], ["x"], dtype=torch.float32).release()


def _make_gloo(request: TransportRequest) -> Transport:
    """Return messages that are staged through the host, as where ranks share a device."""
    with mock.patch.object(transport, "open_pairs", lambda *args, **given: None):
        return transport.make_transport(
            device=CUDA, channels=request.channels, timeout_s=60.0, backend="gloo"
        )


def _make_megatron(request: TransportRequest) -> Transport:
    from gpp_plugin.integrations.megatron.p2p import MEGATRON_TRANSPORT

    return MEGATRON_TRANSPORT.make(request)


@contextlib.contextmanager
def _in_one_order(cuda: FakeCuda) -> Iterator[None]:
    """Let micro-batches of a generation run on a device in one order: who waits goes on when all wait, the oldest first."""
    run, waiting = Turns.run, Turns.waiting
    waiters: deque[int] = deque()

    def run_on_device(turns: Turns, calls: Sequence[Callable[[], Any]]) -> Any:
        def within(call: Callable[[], Any]) -> Any:
            with cuda, cuda.memory:  # which are of a thread
                return call()

        return run(turns, [functools.partial(within, call) for call in calls])

    @contextlib.contextmanager
    def wait_for_turn(turns: Turns, number: int) -> Iterator[None]:
        with waiting(turns, number):
            with turns._changed:
                waiters.append(number)
                turns._changed.wait_for(
                    lambda: turns._is_abandoned or (not turns._ready and waiters[0] == number)
                )
            yield
        waiters.popleft()

    with mock.patch.multiple(Turns, run=run_on_device, waiting=wait_for_turn):
        yield


def _generate(cache: Literal["data", "sequence"], micro_batches: int) -> Recorded:
    """Generate twice on two replicas of two stages; the second time links and groups are there."""
    model: Any = build("gpt2", layers=2)[0]
    names = [name for name, _ in model.named_parameters()]
    last = [name for name in names if ".h.1." in name or ".ln_f." in name or name.endswith("wte.weight")]
    held = [[name for name in names if name not in last or name.endswith("wte.weight")], last]
    prompts = torch.arange(20).view(4, 5)

    def work(cuda: FakeCuda) -> None:
        group: Any = dist.new_group(None, backend="gloo")
        own = held[dist.get_rank() // 2]
        live = {name: p.detach().to(CUDA) for name, p in model.named_parameters() if name in own}
        buffers = {name: buffer.to(CUDA) for name, buffer in model.named_buffers()}
        generated = GeneratedModel(
            module=model,
            held=held,
            names={"lm_head.weight": "transformer.wte.weight"},
            live=lambda: live,
            buffers=lambda: buffers,
        )
        setting: Any = types.SimpleNamespace(
            rank=dist.get_rank(), num_ranks=4, device=CUDA, dtype=torch.float32, group=group,
            placement=types.SimpleNamespace(backend="nccl"),
        )  # fmt: skip
        generator = Generator(
            generated,
            plan=_twins(0).plan,
            config=GenerateConfig(cache=cache, micro_batches=micro_batches),
            setting=setting,
            collectives=Collectives(group=group, who="", timeout_s=60.0),
            free_bytes=lambda: None,
        )
        with _in_one_order(cuda):
            for length in (5, 3):
                arguments = {"input_ids": prompts[:, :length], "max_new_tokens": 3, "pad_token_id": 0}
                cuda.memory.numbers.append(generator.generate({**arguments, "eos_token_id": None}))

    return record_ranks(4, work)


def _alone(work: Callable[[FakeCuda], None]) -> Recorded:
    return record_ranks(1, work)


JOBS: dict[str, Callable[[], Recorded]] = {
    "chain": lambda: record(everything(Run(plan=chain_plan(3, 6), computes=True))),
    "wide": lambda: record(everything(Run(plan=chain_plan(4, 8), computes=True))),
    "tree": lambda: record(everything(Run(plan=simple_plan([1, 1, 1], [(0, 2), (1, 2)], mini_batch=4)))),
    "split": lambda: record(Run(plan=chain_plan(3, 6, schedule="zero_bubble"), computes=True, steps=2)),
    "windows": lambda: record(Run(plan=asynchronous(chain_plan(3, 6)), steps=2, computes=True)),
    "ahead": lambda: record(Run(plan=_frozen(), prefetches=True, record=True)),
    "both": lambda: record(
        everything(
            Run(plan=on_ranks(simple_plan([2, 2], [(0, 1)], mini_batch=4), (0, 1), (0, 1)), computes=True)
        )
    ),
    **{f"ZeRO {zero}": functools.partial(lambda z: record(_twins(z)), zero) for zero in range(4)},
    "staged": lambda: record(
        everything(Run(plan=chain_plan(3, 4), computes=True, make_transport=_make_gloo))
    ),
    "megatron": lambda: record(
        everything(Run(plan=chain_plan(3, 4), computes=True, make_transport=_make_megatron))
    ),
    "weights sent": lambda: record(_sending(Run(plan=chain_plan(3, 4), steps=2))),
    "weights sent in windows": lambda: record(_sending(Run(plan=asynchronous(chain_plan(3, 4)), steps=2))),
    "weights sent under ZeRO 3": lambda: record(_sending(_twins(3))),
    "bound": lambda: record_ranks(
        4, lambda cuda: StageGroups.create(_twins(0).plan, timeout_s=60.0), is_bound=True
    ),
    "context": lambda: record(everything(Run(plan=_context_plan(), computes=True))),
    "tensor": lambda: record(everything(Run(plan=_tensor_plan(), computes=True))),
    "positions": _captured_in_parts,
    "generation": lambda: _generate("data", 2),
    "generation of cut caches": lambda: _generate("sequence", 1),
    "rows": lambda: _alone(_leave_rows),
    "swap": lambda: _captured(plan_swap),
    "swap and recompute": lambda: _captured(lambda stage: plan_both(stage, 1)),
}


# ---- faults ------------------------------------------------------------------------------------------------

_PENDING = "runtime.messages.transport:Posted"
_MAIL = "runtime.messages.mailbox:Mailbox"
_BUFFERS = "runtime.messages.mailbox:ReceiveBuffers"
_NCCL = "runtime.messages.transport"
_LINK = "runtime.memory.swap:SwapLink"
_ROWS = "runtime.batches"
_STORE = "engine.gradient_store"
_SAVE = "engine.checkpoints.save_checkpoint"
_TENSOR = "runtime.tensor_ranks"
_LINKS = "model.generation.micro_batches:ReplicaLink"

FAULTS = (
    # messages: waits, and what is kept until it has been sent
    Fault(f"{_PENDING}.wait", "work.wait()", "pass"),
    Fault(f"{_PENDING}.wait", "for work in self._works:", "for work in self._works[1:]:"),
    Fault(f"{_PENDING}.wait", "work.wait()", "with torch.cuda.stream(torch.cuda.Stream()): work.wait()"),
    Fault(f"{_PENDING}.__init__", "= keep", "= ()"),
    Fault(f"{_MAIL}.complete", "self._receives[number].wait()", "pass"),
    Fault(f"{_MAIL}.complete", "self._receives[number].wait()", "self._receives[number - 1].wait()"),
    Fault(f"{_MAIL}.awaited", "if not self", "if n and not self"),
    Fault(f"{_MAIL}.finish_sends", "self._sends.popleft().wait()", "self._sends.popleft()"),
    Fault(f"{_MAIL}._reap_sends", "pending.popleft().wait()", "pending.popleft()", job="wide"),
    Fault(f"{_MAIL}.compile_send", "self._sends.append(pending)", "pass"),
    Fault(f"{_MAIL}.hand_over", "carry.sends.extend(self._sends)", "pass", job="windows"),
    Fault(f"{_MAIL}.take_over", "self._sends.extend(carry.sends)", "pass", job="windows"),
    Fault(f"{_MAIL}.take_over", "self._receives[number] = carry.received.pop(message, nothing)", "_ = carry.received.pop(message, nothing)", job="windows"),
    Fault("runtime.messages.mailbox:Carry.wait", "pending.wait()", "pass", job="windows"),
    Fault(f"{_MAIL}.finish_sends_of", "pending.wait()", "pass", job="ahead", harmless="memory: sends of frozen stages stay until the step"),
    Fault(f"{_MAIL}._posted_at", "depth, limit = self._transport.prepost_depth, self._transport.prepost_bytes", "depth, limit = 2, 1 << 40", job="wide"),
    # buffers made ahead
    Fault(f"{_BUFFERS}.take", "self._beside.wait_event(unused)", "pass"),
    Fault(f"{_BUFFERS}.take", "event.record(torch.cuda.current_stream(self._device))", "pass"),
    Fault(f"{_BUFFERS}.take", "self._made.append((made, event))", "self._made.append((made, self._made[0][1] if self._made else event))"),
    Fault(f"{_BUFFERS}.take", "event.record(torch.cuda.current_stream(self._device))", "event.record(self._beside)"),
    Fault(f"{_BUFFERS}.take", "self._made.popleft()", "self._made[-1]"),
    Fault(f"{_BUFFERS}.take", "made = self._make(self._next)", "with torch.cuda.stream(self._beside): made = self._make(self._next)"),
    Fault(f"{_BUFFERS}.take", "return buffers, torch.cuda.stream(self._beside)", "return buffers, _HERE", harmless="time: a receive waits for the task before it"),
    # storages that wait on the host
    Fault(f"{_LINK}.send", "self._out.wait_stream(compute)", "pass", job="swap"),
    Fault(f"{_LINK}.send", "self._out.wait_event(buffer.read)", "pass", job="swap", harmless="nothing: tasks have waited for that copy, and this one follows them"),
    Fault(f"{_LINK}.send", "self._leaving.append((copied, data))", "pass", job="swap"),
    Fault(f"{_LINK}.send", "copied = self._out.record_event()", "copied = compute.record_event()", job="swap"),
    Fault(f"{_LINK}.send", "with torch.cuda.stream(self._out):", "if True:", job="swap", harmless="time: tasks wait for copies"),
    Fault(f"{_LINK}.send", "return buffer, copied", "return buffer, None", job="swap", harmless="nothing: tasks have waited for the copies, and what comes back follows them"),
    Fault(f"{_LINK}._let_go", "torch.cuda.current_stream(self.device).wait_event(copied)", "pass", job="swap"),
    Fault(f"{_LINK}._let_go", "leaving[0][0].query()", "True", job="swap"),
    Fault(f"{_LINK}.bring", "self._let_go(0)", "pass", job="swap", harmless="memory: what has left stays a while beside what comes"),
    Fault(f"{_LINK}.bring", "self._back.wait_stream(torch.cuda.current_stream(self.device))", "pass", job="swap"),
    Fault(f"{_LINK}.bring", "self._back.wait_event(copied)", "pass", job="swap", harmless="nothing, as above"),
    Fault(f"{_LINK}.bring", "self._back.record_event()", "torch.cuda.current_stream(self.device).record_event()", job="swap and recompute", harmless="nothing: the copy's own stream is current there"),
    Fault(f"{_LINK}.bring", "buffer.read = self._back.record_event()", "buffer.read = torch.cuda.Event()", job="swap"),
    Fault(f"{_LINK}.bring", "data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)", "with torch.cuda.stream(self._back): data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)", job="swap"),
    Fault(f"{_LINK}.bring", "with torch.cuda.stream(self._back):", "if True:", job="swap", harmless="time: tasks wait for copies"),
    Fault(f"{_LINK}.wait", "torch.cuda.current_stream(self.device).wait_event(event)", "pass", job="swap"),
    Fault("runtime.memory.swap:SwappedStorage.use", "self._link.wait(self._returned)", "pass", job="swap and recompute"),
    Fault("runtime.memory.swap:HostPool.take", "return free.pop()", "return free[-1]", job="swap"),
    # recomputation
    Fault("runtime.random_streams:streams_of", 'if device.type == "cuda" else None', "if False else None", job="swap and recompute"),
    Fault("runtime.random_streams:set_streams", "torch.cuda.set_rng_state(streams[1], device)", "pass", job="swap and recompute"),
    Fault("runtime.memory.recompute:Replay._run", "set_streams(self._device, before)", "pass", job="swap and recompute"),
    Fault("runtime.memory.recompute:Replay.restore", "set_streams(self._device, self.states[run])", "pass", job="swap and recompute"),
    # rows of a mini-batch
    Fault(f"{_ROWS}:CudaCopyStream.follow", "self._stream.wait_stream(torch.cuda.current_stream(self._device))", "pass"),
    Fault(f"{_ROWS}:CudaCopyStream.wait", "torch.cuda.current_stream(self._device).wait_event(event)", "pass"),
    Fault(f"{_ROWS}:CudaCopyStream.record", "self._stream.record_event()", "torch.cuda.current_stream(self._device).record_event()"),
    Fault(f"{_ROWS}:CudaCopyStream.copy", "with torch.cuda.stream(self._stream):", "if True:"),
    Fault(f"{_ROWS}:InputRows.__getitem__", "self._stream.wait(event)", "pass"),
    Fault(f"{_ROWS}:InputRows.release", "self._stream.wait(self._events[-1])", "pass", job="rows"),
    Fault(f"{_ROWS}:InputRows.release", "buffer.read = self._events[-1]", "pass"),
    Fault(f"{_ROWS}:InputLink._staged", "buffer.read.synchronize()", "pass"),
    Fault(f"{_ROWS}:InputLink._copy_beside", "events.append(stream.record())", "events.append(events[0] if events else stream.record())"),
    Fault(f"{_ROWS}:InputLink._copy_beside", "made[id(part)] = self._allocate(part, dtype)", "with torch.cuda.stream(stream._stream): made[id(part)] = self._allocate(part, dtype)"),
    # gradients and weights
    Fault(f"{_STORE}:GradientStore.reduce_data", "finish(bucket.sent, bucket.message, group=self._group, what=SUMMED)", "pass", job="ZeRO 0"),
    Fault(f"{_STORE}:GradientStore.reduce_data", "if bucket.sent is None:", "if True:", job="ZeRO 0"),
    Fault(f"{_STORE}:GradientStore._send", "bucket.part.to(self._communication_dtype or bucket.part.dtype)", "bucket.part.clone()", job="ZeRO 0"),
    Fault(f"{_STORE}:EarlySends._made", "and not self._buckets[self._next].waiting", "", job="ZeRO 0"),
    Fault("engine.sharded_weights:_Sharded.fill", "wait()", "pass", job="ZeRO 3"),
    Fault("engine.sharded_weights:_Sharded.free", "self.part.copy_(self._own)", "pass", job="ZeRO 3"),
    Fault("engine.partitioned_gradients:_reduce_scatter", "group=group)", "group=group, async_op=True)", job="ZeRO 1"),
    Fault("runtime.weight_versions:WeightVersions.begin_update", "self._locations.move(self._live)", "pass", job="windows"),
    Fault("runtime.executor:StageExecutor.step", "self.mail.finish_sends()", "pass", job="weights sent"),
    Fault("runtime.weight_versions:WeightVersions.apart", "if not self._aliased:", "if True:", job="weights sent in windows"),
    Fault("engine.sharded_weights:ShardedWeights.apart", "if not any(", "if True or any(", job="weights sent under ZeRO 3"),
    # tensor ranks
    Fault(f"{_TENSOR}:_Waited.backward", "ctx.begun.pop()()", "pass", job="tensor"),
    Fault(f"{_TENSOR}:_Waited.backward", "ctx.begun.pop()()", "with torch.cuda.stream(torch.cuda.Stream()): ctx.begun.pop()()", job="tensor"),
    Fault(f"{_TENSOR}:_Launched.backward", "total, wait", "with torch.cuda.stream(torch.cuda.Stream()): total, wait", job="tensor"),
    Fault(f"{_TENSOR}:_Launched.backward", "return total", "return gradient", job="tensor"),
    Fault(f"{_TENSOR}:_Launched.backward", "ctx.begun.append(wait)", "wait(); ctx.begun.append(lambda: None)", job="tensor", harmless="time: gradients of weights wait for the sum"),
    Fault(f"{_TENSOR}:TensorRanks._begin_exchange", "finish(work, received, group=group, what=title)", "pass", job="positions"),
    Fault(f"{_TENSOR}:TensorRanks._begin_exchange", "assert sent.numel() == sum(given)", "pass", job="positions"),
    Fault(f"{_TENSOR}:TensorRanks.begin_scatter", "wait()\n", "pass\n", job="positions"),
    Fault(f"{_TENSOR}:TensorRanks.begin_gather", "wait()\n", "pass\n", job="positions"),
    Fault(f"{_TENSOR}:TensorRanks.begin_exchange", "wait()\n", "pass\n", job="context"),
    Fault("runtime.context_ranks:_Left.backward", "gradient / ctx.size", "gradient", job="context"),
    Fault(f"{_TENSOR}:TensorRanks.own_positions", "self.positions(whole.shape[axis])", "self.positions(whole.shape[axis], 0)", job="positions"),
    Fault(f"{_TENSOR}:_Scattered.forward", "wait()\n", "pass\n", job="positions"),
    Fault(f"{_TENSOR}:_Both.backward", "weights.begun = _begin_again(weights)", "pass", job="positions", harmless="time: the gradients of weights wait for the whole"),
    Fault(f"{_TENSOR}:drawn", "return number", "return number.to('cuda').cpu()", job="tensor"),
    Fault("engine.stage_groups:StageGroups.create", "backend=both", "backend=backend", job="tensor"),
    # messages that are staged through the host; generation; saves that are written behind the training
    Fault(f"{_PENDING}.wait", "work.wait(timeout)", "pass", job="staged"),
    Fault(f"{_PENDING}.wait", "destination.copy_(staged, non_blocking=True)", "pass", job="staged"),
    Fault("runtime.messages.transport:GlooTransport.bind_send", "t.cpu()", "t.to('cpu', non_blocking=True)", job="staged"),
    Fault(f"{_LINKS}._send", ".copy_(value)", ".copy_(value, non_blocking=True)", job="generation"),
    Fault(f"{_LINKS}._receive", "self._wait(self._post", "(self._post", job="generation"),
    Fault("model.generation.stage_tensors:ReplicaRun.bring", "if position not in tensor.holders", "if position not in tensor.holders and not self.position", job="generation"),
    Fault(f"{_LINKS}._finish_all_but", "self._wait(self._sends[0][0])", "pass", job="generation"),
    Fault(f"{_LINKS}._finish_all_but", "self._sends[0][0])\n        self._sends.popleft()", "self._sends.popleft()[0])", job="generation"),
    Fault(f"{_LINKS}.finish", "self._finish_all_but(0)", "pass", job="generation"),
    Fault("model.generation.generator:Generator._attempt", "link.finish()", "pass", job="generation of cut caches"),
    Fault("model.generation.generator:Generator._make_links", 'make_group(ranks, "gloo") for', 'None if setting.rank not in ranks else make_group(ranks, "gloo") for', job="generation"),
    Fault("model.generation.cache_peers:CachePeers.swap", "self._wait(", "_wait = lambda *given: None; _wait(", job="generation of cut caches"),
    Fault("model.generation.cache_peers:CachePeers.any", "self._wait(", "_wait = lambda *given: None; _wait(", job="generation of cut caches"),
    Fault(f"{_SAVE}:FileContents.copied", "copy=True", "copy=True, non_blocking=True"),
    Fault(f"{_SAVE}:FileContents.copied", 'tensor.detach().to("cpu", copy=True)', "tensor.detach()"),
    Fault(f"{_SAVE}:FileContents.copied", "copy=True", "copy=True, non_blocking=True", job="windows"),
    Fault(f"{_SAVE}:BackgroundSave.begin", "contents.copied()", "contents", job="windows"),
    Fault("engine.sharded_weights:_Sharded.begin_reading", "all_gather(", "begin_all_gather(", job="ZeRO 3"),
    # messages of megatron-core's communicators
    Fault("integrations.megatron.p2p:MegatronTransport.bind_send", "Posted(list(handles.values()), place, tensors)", "Posted(list(handles.values()), place, ())", job="megatron"),
    Fault("integrations.megatron.p2p:MegatronTransport.bind_receive", "Posted(list(handles.values()), place, buffers)", "Posted([], place, buffers)", job="megatron"),
    Fault("integrations.megatron.p2p:MegatronTransport.bind_receive", "buffer.set_(received.detach())", "buffer.copy_(received)", job="megatron"),
    # what hosts read, and in which order ranks come together
    Fault("runtime.compute:AutogradCompute.backward", "if roots:", "if roots and seeds[0].sum().item() != -1:"),
    Fault("runtime.recorder:Recorder._mark", "return mark", "mark.synchronize(); return mark"),
    Fault("runtime.recorder:Recorder.now", "return", "torch.cuda.synchronize() if self.is_on else None; return", job="wide"),
    Fault("runtime.messages.sockets:opening_order", "opening_rounds(channels)", "(opening_rounds(channels)[::-1] if __import__('torch').distributed.get_rank() % 2 else opening_rounds(channels))", job="wide"),
    Fault(f"{_NCCL}:NcclTransport.bind_receive", "group = self._groups[message.channel]", "self._groups[message.channel] = group = self._groups.get(message.channel[::-1], self._groups[message.channel])", job="wide"),
    Fault(f"{_NCCL}:NcclTransport.open", "opening_order(set(channels) - self._opened)", "opening_order(c for c in channels if torch.distributed.get_rank() in c)", job="wide"),
    Fault("engine.stage_groups:StageGroups.create", "make_one_of(stage.replicas(position) for position in range(stage.tensor))", "make_one_of(stage.replicas(position) for position in range(stage.tensor) if dist.get_rank() in stage.ranks) if dist.get_rank() in stage.ranks else 0", job="ZeRO 0"),
    Fault("engine.stage_groups:StageGroups.create", "backend=backend", 'backend="gloo"', job="bound"),
    Fault("engine.stage_groups:StageGroups.create", "single = new_group([dist.get_rank()], use_local_synchronization=True)", "single = dist.get_rank() and new_group([dist.get_rank()], use_local_synchronization=True)", job="bound"),
    Fault("engine.stage_step:StepTogether.step", "result = self._update.run()", "result = self._update.run(); torch.distributed.get_rank() and torch.distributed.barrier()", job="ZeRO 0"),
)  # fmt: skip


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Let the package have a fault."""
    name, _, path = fault.target.partition(":")
    module = importlib.import_module(f"gpp_plugin.{name}")
    *owners, attribute = path.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    held = inspect.getattr_static(owner, attribute)
    function = held.__func__ if isinstance(held, (classmethod, staticmethod)) else held
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    assert text.count(fault.before) >= 1, f"{fault.target} has no {fault.before!r}"
    place: dict[str, Any] = {}
    exec(compile(text.replace(fault.before, fault.after), f"{inspect.getsourcefile(inspect.unwrap(function))}", "exec"), {**vars(module), "torch": torch}, place)  # fmt: skip
    changed = place[attribute]
    users = [
        m
        for n, m in sys.modules.items()
        if n.startswith(("gpp_plugin", "tests.")) and vars(m).get(attribute) is held
    ]
    with contextlib.ExitStack() as stack:
        for each in [owner] if owners else users:
            stack.enter_context(mock.patch.object(each, attribute, changed))
        yield


def hangs(recorded: Recorded) -> bool:
    """Return whether ranks hang: on one to 32 queues, with the host waiting anywhere."""
    graph = WaitGraph(recorded.job)
    if not ends_serially(graph):
        return True
    return any(points_that_hang(graph, share_queues(recorded.job, queues)) != {} for queues in (1, 4, 32))


@functools.cache
def usual(job: str) -> Recorded:
    """Return a job as it is without a fault."""
    return JOBS[job]()


def find(fault: Fault) -> str:
    """Return which check finds a fault, ``nothing`` where none does."""
    with planted(fault):  # outside: one that cannot be planted is not found
        try:
            recorded = JOBS[fault.job]()
        except Exception as error:
            assert "NameError" not in str(error), f"{fault} is none: {error}"
            return "order" if SAME_GROUPS in str(error) else f"error ({type(error).__name__})"
    found = []
    if recorded.races():
        found.append("race")
    if hangs(recorded):
        found.append("order")
    if recorded.host_reads():
        found.append("read")
    if not _are_same(recorded.numbers(), usual(fault.job).numbers()):
        found.append("numbers")
    return ", ".join(found) or "nothing"


def _are_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def main() -> None:
    """Print every fault and what finds it."""
    for fault in [f for f in FAULTS if len(sys.argv) < 2 or sys.argv[1] in (*str(f).split(), f.job)]:
        print(f"{find(fault):<24} {fault.job:<20} {fault}" + (f"   ({fault.harmless})" if fault.harmless else ""), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
