"""A captured graph as each context rank computes it, on one process: what the ranks make together is the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.model.materialize import materialize_parameters
from gpp_plugin.runtime.context_ranks import cut_graph
from gpp_plugin.runtime.shard_graph import shard_graph
from gpp_plugin.runtime.stage_module import build_stage_function
from gpp_plugin.runtime.tensor_ranks import (
    EXCHANGED,
    GRADIENT,
    GRADIENT_EXCHANGED,
    GRADIENT_PARTS,
    PARTS,
    RESULT,
    TensorRanks,
)
from tests.models import build
from tests.runtime.test_shard_graph import Threads, outcome, run_together


def as_threads(monkeypatch: pytest.MonkeyPatch, threads: Threads) -> None:
    """Let context ranks be threads of this process."""

    def add(ranks: TensorRanks, tensor: Tensor, what: str) -> Tensor:
        ranks.sent_bytes[what] = ranks.sent_bytes.get(what, 0) + tensor.nbytes
        return threads.sum(ranks.position, tensor, dist.ReduceOp.SUM)

    monkeypatch.setattr(TensorRanks, "sum", add)

    def exchange(
        ranks: TensorRanks, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], size: int, what: str
    ) -> tuple[Tensor, Callable[[], None]]:
        ranks.sent_bytes[what] = ranks.sent_bytes.get(what, 0) + size
        return threads.exchange(ranks.position, pieces, [math.prod(shape) for shape in shapes])

    monkeypatch.setattr(TensorRanks, "_begin_exchange", exchange)


def check(
    captured: CapturedGraph, tensors: Mapping[str, Tensor], batch: dict[str, Any], size: int, monkeypatch: Any
) -> list[list[str]]:
    """Compare loss and gradients of so many ranks with those of one; return what was put in."""
    nodes = [node.name for node in captured.op_graph.nodes]
    loss = captured.op_graph.loss
    assert loss is not None
    whole = build_stage_function(captured, nodes, [loss])
    wanted_loss, wanted = outcome(whole, dict(tensors), batch)
    threads, answers, functions, put_in, sent = Threads(size), {}, [], [], []
    as_threads(monkeypatch, threads)
    for position in range(size):
        ranks = TensorRanks(stage="all", position=position, size=size, kind="context")
        alone = TensorRanks(stage="all", position=0, size=1)
        parts = captured.analysis.sharding.context
        cut, added, outputs = cut_graph(captured, parts, ranks, nodes, outputs=[loss])
        own = [*nodes, *added]
        cut, more, outputs = shard_graph(cut, (), alone, own, outputs=outputs, context=ranks, together=ranks)
        functions.append(build_stage_function(cut, [*own, *more], list(outputs)))
        put_in.append(list(added))
        sent.append(ranks.sent_bytes)

    def run(position: int) -> None:
        try:
            answers[position] = outcome(functions[position], dict(tensors), batch)
        except BaseException:
            threads.abort()
            raise

    run_together(run, size)
    for bytes_of in sent:
        assert bytes_of == {
            what: planned for what, planned in planned_bytes(captured, size).items() if planned
        }
    summed = {
        name: sum(gradients[name] for _, gradients in answers.values() if name in gradients)
        for name in wanted
    }
    for found_loss, found in answers.values():
        assert float(found_loss) == pytest.approx(float(wanted_loss), rel=1e-6)
        assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((summed[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()) + 1e-12, name
    return put_in


def planned_bytes(captured: CapturedGraph, size: int) -> dict[str, float]:
    """Return what is planned to be sent in a micro-batch, by what it is."""
    found = dict.fromkeys((RESULT, GRADIENT, PARTS, GRADIENT_PARTS, EXCHANGED, GRADIENT_EXCHANGED), 0.0)
    for block in coarsen(captured, granularity="layer").context:
        found[RESULT] += block.forward_sum_bytes
        found[GRADIENT] += block.backward_sum_bytes
        found[PARTS] += block.forward_gather_bytes
        found[GRADIENT_PARTS] += block.backward_gather_bytes
        more = block.group_bytes * (size // math.gcd(size, block.groups) - 1) if block.groups else 0
        found[EXCHANGED] += block.forward_exchange_bytes + more
        found[GRADIENT_EXCHANGED] += block.backward_exchange_bytes + more
    return found


def captured_model(name: str, length: int | None = None) -> tuple[Any, ...]:
    model, make_batch = build(name, layers=1, dtype=torch.float64)
    batch = make_batch(2)
    if length is not None:
        batch = {key: value[:, :length] if value.ndim == 2 else value for key, value in batch.items()}
    captured = capture_model(model, batch)
    return captured, tensors_of(captured, model), batch


def tensors_of(captured: CapturedGraph, model: nn.Module) -> dict[str, Tensor]:
    nodes = [node.name for node in captured.op_graph.nodes]
    whole = build_stage_function(captured, nodes, [captured.op_graph.loss])
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    values = materialize_parameters(model, whole.tensors, device="cpu")
    return {name: value.requires_grad_(name in trained) for name, value in values.items()}


@pytest.mark.parametrize(("name", "size"), [("gpt2", 2), ("llama", 4), ("t5", 2), ("clip", 2), ("llava", 2)])
def test_ranks_together_are_the_whole(name, size, monkeypatch):
    captured, tensors, batch = captured_model(name)
    put_in = check(captured, tensors, batch, size, monkeypatch)
    assert any("exchanged" in each for each in put_in[0])


@pytest.mark.parametrize(("length", "size"), [(7, 2), (3, 4)])
def test_lengths_are_cut_unevenly_and_may_be_shorter_than_there_are_ranks(length, size, monkeypatch):
    captured, tensors, batch = captured_model("llama", length)
    check(captured, tensors, batch, size, monkeypatch)
