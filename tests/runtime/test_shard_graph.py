"""A captured graph as each tensor rank computes it, on one process: what the ranks make together is the whole."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.ir.analysis import ShardedRegion, TensorShard, regions_of_stage, sequence_in
from gpp_plugin.model.materialize import materialize_parameters
from gpp_plugin.runtime import tensor_ranks
from gpp_plugin.runtime.shard_graph import shard_graph
from gpp_plugin.runtime.split import BackwardSplitter
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function
from gpp_plugin.runtime.tensor_ranks import (
    GRADIENT_PARTS,
    PARTS,
    TensorRanks,
    cross_entropy,
    embedded,
    joined,
    own_part,
    seeded,
    shared,
)
from tests.models import build


class Threads:
    """Tensor ranks as threads of one process, in the place of process groups."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._brought: dict[int, Tensor] = {}
        self._pieces: dict[int, list[Tensor]] = {}

    def abort(self) -> None:
        """Let nobody wait for a thread that has failed."""
        self._barrier.abort()

    def sum(self, position: int, tensor: Tensor, op: Any) -> Tensor:
        self._brought[position] = tensor.detach().clone()
        self._barrier.wait()
        brought = torch.stack([self._brought[i] for i in sorted(self._brought)])
        total = brought.amax(0) if op == dist.ReduceOp.MAX else brought.sum(0)
        self._barrier.wait()
        return total

    def exchange(
        self, position: int, pieces: Sequence[Tensor], num_received: Sequence[int]
    ) -> tuple[Tensor, Callable[[], None]]:
        """Begin to send each its piece: what comes is there when it has been waited for."""
        received = torch.full((sum(num_received),), torch.nan, dtype=pieces[0].dtype)
        sent = [piece.detach().reshape(-1).clone() for piece in pieces]

        def wait() -> None:
            self._pieces[position] = sent
            self._barrier.wait()
            received.copy_(torch.cat([self._pieces[i][position] for i in sorted(self._pieces)]))
            self._barrier.wait()

        return received, wait

    def begin_sum(self, position: int, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Begin a sum that is there when it has been waited for: until then the tensor holds no numbers."""
        total = torch.full_like(tensor, torch.nan)
        summand = tensor.clone()

        def wait() -> None:
            total.copy_(self.sum(position, summand, dist.ReduceOp.SUM))

        return total, wait


def run_together(run: Callable[[int], None], degree: int) -> None:
    with ThreadPoolExecutor(degree) as pool:
        for done in [pool.submit(run, position) for position in range(degree)]:
            done.result(120)


def outcome(
    function: StageFunction, tensors: dict[str, Tensor], batch: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    own = {
        n: t.detach().clone().requires_grad_(t.requires_grad and t.is_floating_point())
        for n, t in tensors.items()
    }
    inputs = [batch[key] for key in function.batch_inputs]
    (loss,) = function.call(*(own[n] for n in function.tensors), *inputs)
    loss.backward()
    return loss.detach(), {n: t.grad for n, t in own.items() if t.grad is not None}


@pytest.mark.parametrize(("name", "degree"), [("llama", 2), ("gpt2", 4), ("t5", 2)])
def test_ranks_together_are_the_whole(name, degree, monkeypatch):
    model, make_batch = build(name, layers=1, dtype=torch.float64)
    batch = make_batch(2)
    captured = capture_model(model, batch)
    assert captured.analysis.sharding.regions
    check_ranks(captured, captured.analysis.sharding.regions, model, batch, degree, monkeypatch)


@pytest.mark.parametrize("sizes", [{}, {"lm_head": 1}])
def test_a_tied_weight_is_whole_where_one_reader_is_in_several_blocks_or_stages(sizes, monkeypatch):
    model, make_batch = build("gpt2", layers=1, dtype=torch.float64)
    batch = make_batch(2)
    captured = capture_model(model, batch)
    blocks = coarsen(captured, granularity="layer" if sizes else "node")
    own = [block.name for block in blocks.blocks]
    head = [name for name in own if name in sizes]
    stages = [SimpleNamespace(blocks=tuple(n for n in own if n not in head), tensor=2)]
    stages += [SimpleNamespace(blocks=tuple(head), tensor=1)] if head else []
    plan: Any = SimpleNamespace(stages=stages)
    regions = regions_of_stage(blocks, captured.analysis.sharding.regions, plan, 0)
    assert "transformer.wte.weight" not in {shard.name for region in regions for shard in region.parameters}
    assert not sizes or regions
    if not sizes:
        held = {each.block: each.parameter_bytes for each in blocks.sharding}
        assert not any(held.get(name) for name in blocks.tied["transformer.wte.weight"])
    check_ranks(captured, regions, model, batch, 2, monkeypatch)


def check_ranks(
    captured: CapturedGraph,
    regions: Sequence[ShardedRegion],
    model: nn.Module,
    batch: dict[str, Any],
    degree: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare loss and gradients of ranks that share these regions out with those of one that computes all."""
    nodes = [node.name for node in captured.op_graph.nodes]
    sequence = captured.analysis.sharding.sequence
    assert sequence
    loss = captured.op_graph.loss
    assert loss is not None
    whole = build_stage_function(captured, nodes, [loss])
    values = materialize_parameters(model, whole.tensors, device="cpu")
    tensors = {n: t.requires_grad_(model.get_parameter(n).requires_grad) if n in dict(model.named_parameters()) else t
               for n, t in values.items()}  # fmt: skip
    wanted_loss, wanted = outcome(whole, tensors, batch)

    threads, answers = Threads(degree), {}
    summed = dist.ReduceOp.SUM
    monkeypatch.setattr(TensorRanks, "sum", lambda r, t, what, op=summed: threads.sum(r.position, t, op))
    monkeypatch.setattr(TensorRanks, "begin_sum", lambda r, t, what: threads.begin_sum(r.position, t))

    def exchange(
        ranks: TensorRanks, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], size: int, what: str
    ) -> tuple[Tensor, Callable[[], None]]:
        assert what in (PARTS, GRADIENT_PARTS)
        return threads.exchange(ranks.position, pieces, [math.prod(shape) for shape in shapes])

    monkeypatch.setattr(TensorRanks, "_begin_exchange", exchange)
    regions = [r for r in regions if r.is_divided_by(degree)]
    cuts = {shard.name: shard for region in regions for shard in region.parameters}

    def run(position: int) -> None:
        ranks = TensorRanks(stage="all", position=position, size=degree)
        sharded, added, (loss_name,) = shard_graph(
            captured, regions, ranks, nodes, sequence=sequence, outputs=[loss]
        )
        assert loss_name == loss
        function = build_stage_function(sharded, [*nodes, *added], [loss])
        own = {
            n: own_part(t, cuts[n], position, degree).requires_grad_() if n in cuts else t
            for n, t in tensors.items()
        }
        answers[position] = outcome(function, own, batch)

    run_together(run, degree)
    partial = {name for part in sequence_in(sequence, nodes, regions) for name in part.parameters}
    for name in partial:
        total = sum(gradients[name] for _, gradients in answers.values())
        for _, gradients in answers.values():
            gradients[name] = total
    for position, (found_loss, found) in answers.items():
        # the models themselves cast logits to single precision
        assert float(found_loss) == pytest.approx(float(wanted_loss), rel=1e-6)
        assert found.keys() == wanted.keys()
        for parameter, gradient in found.items():
            whole_gradient = wanted[parameter]
            part = (
                own_part(whole_gradient, cuts[parameter], position, degree)
                if parameter in cuts
                else whole_gradient
            )
            assert float((gradient - part).norm()) <= 1e-6 * float(whole_gradient.norm()), parameter


def test_vocabulary_is_exact_in_double_precision(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, 8, dtype=torch.float64, generator=generator)
    target = torch.tensor([0, 3, 4, 7, -100, 5])
    threads, answers = Threads(2), {}
    monkeypatch.setattr(
        TensorRanks, "sum", lambda r, t, what, op=dist.ReduceOp.SUM: threads.sum(r.position, t, op)
    )

    def run(position: int, reduction: int) -> None:
        ranks = TensorRanks(stage="all", position=position, size=2)
        own = logits[:, 4 * position : 4 * position + 4].clone().requires_grad_()
        loss = cross_entropy(ranks, 4 * position)(own, target, None, reduction)
        (3 * loss).backward()
        answers[position] = loss.item(), own.grad

    for reduction, name in ((1, "mean"), (2, "sum")):
        run_together(functools.partial(run, reduction=reduction), 2)
        whole = logits.clone().requires_grad_()
        wanted = torch.nn.functional.cross_entropy(whole, target, reduction=name)
        (3 * wanted).backward()
        for position in range(2):
            loss, gradient = answers[position]
            assert loss == pytest.approx(float(wanted), rel=1e-14)
            assert torch.allclose(gradient, whole.grad[:, 4 * position : 4 * position + 4], rtol=1e-12)


def test_embedding_has_zeros_for_rows_of_other_ranks():
    table, tokens = torch.randn(8, 3, dtype=torch.float64), torch.tensor([[0, 5], [7, 4]])
    whole = table.clone().requires_grad_()
    wanted = torch.nn.functional.embedding(tokens, whole, padding_idx=5)
    wanted.sum().backward()
    parts = [table[4 * i : 4 * i + 4].clone().requires_grad_() for i in range(2)]
    found = sum(embedded(4 * i)(part, tokens, 5) for i, part in enumerate(parts))
    found.sum().backward()
    assert torch.equal(found, wanted)
    assert torch.equal(torch.cat([part.grad for part in parts]), whole.grad)


def test_what_draws_is_seeded_by_its_forward_its_place_and_in_regions_by_the_rank():
    cpu = torch.device("cpu")
    ranks = [TensorRanks(stage="all", position=position, size=2) for position in range(2)]
    x, number = torch.ones(64), torch.tensor(7)

    def drop(rank: TensorRanks, number: Tensor, *, place: int, is_part: bool) -> Tensor:
        call = torch.ops.aten.dropout.default
        return seeded(call, rank, cpu, place=place, is_part=is_part)(number, x, 0.5, True)

    before = torch.get_rng_state()
    whole = [drop(rank, number, place=3, is_part=False) for rank in ranks]
    parts = [drop(rank, number, place=3, is_part=True) for rank in ranks]
    assert torch.equal(*whole) and not torch.equal(*parts)
    assert torch.equal(parts[0], drop(ranks[0], number, place=3, is_part=True))
    assert not torch.equal(whole[0], drop(ranks[0], number, place=4, is_part=False))
    assert not torch.equal(whole[0], drop(ranks[0], torch.tensor(8), place=3, is_part=False))
    assert torch.equal(before, torch.get_rng_state())


def test_a_joined_parameter_gives_each_rank_its_part_of_the_gradient(monkeypatch):
    shard = TensorShard(name="qkv", axis=0, parts=(4, 4))
    whole = torch.arange(8.0)
    monkeypatch.setattr(TensorRanks, "join", lambda self, part, shard: whole.clone())
    for position, wanted in enumerate(([0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0])):
        ranks = TensorRanks(stage="all", position=position, size=2)
        part = own_part(whole, shard, position, 2).requires_grad_()
        (joined(ranks, shard)(part) ** 2).sum().backward()
        assert part.tolist() == wanted and part.grad.tolist() == [2 * value for value in wanted]


aten = torch.ops.aten


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    ("call", "shape", "has_bias", "columns", "place"),
    [
        (aten.linear.default, (2, 3, 4), True, 0, 0),
        (aten.linear.default, (2, 3, 4), False, 0, 0),
        (aten.linear.default, (3, 4), True, 0, 0),
        (aten.addmm.default, (6, 4), True, 1, 1),
        (aten.mm.default, (6, 4), False, 1, 0),
        (aten.matmul.default, (2, 3, 4), False, 1, 0),
    ],
)
def test_gradients_of_weights_are_made_while_the_inputs_is_summed(
    call, shape, has_bias, columns, place, is_split, monkeypatch
):
    torch.manual_seed(0)
    events: list[str] = []
    sums: list[Tensor] = []

    def begin_sum(ranks: TensorRanks, tensor: Tensor, what: str) -> tuple[Tensor, Callable[[], None]]:
        events.append("launch")
        total = torch.full_like(tensor, torch.nan)
        sums.append(tensor.clone())
        return total, lambda: (events.append("wait"), total.copy_(3 * sums[-1]))[0]

    monkeypatch.setattr(TensorRanks, "begin_sum", begin_sum)
    ranks = TensorRanks(stage="all", position=0, size=2)
    leaf = torch.randn(shape, requires_grad=True)
    weights = [torch.randn((5, 4) if columns == 0 else (4, 5), requires_grad=True) for _ in range(2)]
    biases = [torch.randn(5, requires_grad=True) if has_bias else None for _ in range(2)]
    weights.append(torch.randn((5, 4) if columns == 0 else (4, 5)))  # frozen
    biases.append(torch.randn(5, requires_grad=True) if has_bias else None)
    trained = [t for t in (*weights, *biases) if t is not None and t.requires_grad]

    def arguments(tensor: Tensor, number: int) -> list[Tensor]:
        own = [weights[number], *([biases[number]] if has_bias else [])]
        return [own[1], tensor, own[0]] if place else [tensor, *own]

    def backward(results: Sequence[Tensor]) -> None:
        loss = sum((result.tanh() * (i + 1)).sum() for i, result in enumerate(results))
        if is_split:
            (found,), pending = BackwardSplitter().split([loss], [leaf], [torch.ones_like(loss)])
            leaf.grad = found
            events.append("second part")
            pending.run()
        else:
            loss.backward()

    def taken() -> list[Tensor]:
        found = [t.grad for t in (leaf, *trained)]
        for t in (leaf, *trained):
            t.grad = None
        return found

    within = leaf * 2
    backward([call(*arguments(within, number)) for number in range(3)])
    wanted = taken()
    events.clear()
    for tensor in trained:
        tensor.register_post_accumulate_grad_hook(lambda _: events.append("weight"))
    within = leaf * 2
    given = [t for pair in zip(weights, biases, strict=True) for t in pair]
    s, *of_weights = shared(ranks, [columns] * 3)(within, None, *given)
    operator = tensor_ranks.linear(call, place)
    backward([operator(of_weights[n], *arguments(s, n)) for n in range(3)])
    own = ["weight"] * len(trained)
    assert events == (["launch", "wait", "second part", *own] if is_split else ["launch", *own, "wait"])
    found = taken()
    assert torch.equal(found[0], 3 * wanted[0]) and all(map(torch.equal, found[1:], wanted[1:]))
    with torch.no_grad():
        s, *of_weights = shared(ranks, [columns] * 3)(within, None, *given)
        made = operator(of_weights[0], *arguments(s, 0))
    assert torch.equal(made, call(*arguments(within, 0))) and events[-1] in ("wait", "weight")


def test_code_is_not_made_for_ranks_that_have_no_group():
    with pytest.raises(AssertionError, match="groups"):
        tensor_ranks.summed(TensorRanks(stage="all", position=0, size=2))(torch.ones(2))
