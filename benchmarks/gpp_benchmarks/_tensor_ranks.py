"""One rank of `gpp bench tensor-parallel`: GPT-2 in parts, captured and of Megatron-core, in turn.

python -m gpp_benchmarks._tensor_ranks SETTINGS_JSON
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks._ranks import over_ranks, rank_settings
from gpp_plugin.capture.export import capture_model
from gpp_plugin.integrations.deepspeed.stock_engine import join_ranks
from gpp_plugin.integrations.megatron import gpt_stage, require_megatron
from gpp_plugin.launch import emit_event
from gpp_plugin.model.graph.stage_graph import StageGraph, make_contexts
from gpp_plugin.runtime.shard_graph import shard_graph
from gpp_plugin.runtime.stage_module import build_stage_function
from gpp_plugin.runtime.tensor_ranks import TensorRanks, own_part

WARM_UP = 2
Batch = Mapping[str, Tensor]


class Contender:
    """A model in parts on this rank.

    Args:
        loss: of a batch, with its graph.
    """

    def __init__(self, loss: Callable[[], Tensor], parameters: list[Tensor]) -> None:
        self._loss, self.parameters = loss, parameters

    def step(self) -> float:
        """Run forward and backward; return the loss."""
        loss = self._loss()
        loss.backward()
        for parameter in self.parameters:
            parameter.grad = None
        return float(loss)

    def timed(self) -> tuple[float, float]:
        """Return the seconds of a step, and those of this process's threads."""
        gc.collect()
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        self.step()
        return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    """Measure on this rank; rank 0 reports."""
    settings = rank_settings()
    join_ranks()
    batch = _batch(settings)
    contenders = {
        "megatron": _megatron(settings, batch),
        "gpp": _captured(settings, batch, attention="sdpa"),
        "gpp, eager attention": _captured(settings, batch, attention="eager"),
    }
    for contender in contenders.values():
        for _ in range(WARM_UP):
            contender.step()
    gc.freeze()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for index in range(settings["rounds"]):
        names = list(contenders)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            times[name].append(contenders[name].timed())
    found = {name: over_ranks(own) for name, own in times.items()}
    held = {name: sum(p.numel() for p in own.parameters) for name, own in contenders.items()}
    if os.environ["RANK"] == "0":
        emit_event(times=found, parameters=held)
    dist.barrier()
    dist.destroy_process_group()


def _batch(settings: Mapping[str, int]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (settings["samples"], settings["length"])
    return {"input_ids": torch.randint(0, settings["vocabulary"], shape, generator=generator)}


def _megatron(settings: Mapping[str, int], batch: Batch) -> Contender:
    require_megatron("bench")
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=settings["layers"],
        hidden_size=settings["hidden"],
        num_attention_heads=settings["heads"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    size = dist.get_world_size()
    graph = StageGraph()
    graph.stage("all", nn.Identity(), inputs=["x"], outputs=["y"], ranks=range(size), tensor=size)
    contexts = make_contexts(
        graph.stages, rank=dist.get_rank(), device=torch.device("cpu"), dtype=torch.float32, timeout_s=60.0
    )
    factory = gpt_stage(
        config,
        vocab_size=settings["vocabulary"],
        max_sequence_length=settings["length"],
        share_embeddings_and_output_weights=True,
    )
    module = factory(contexts["all"])
    given = {**batch, "labels": batch["input_ids"].roll(-1, 1)}
    return Contender(lambda: module(**given), list(module.parameters()))


def _captured(settings: Mapping[str, int], batch: Batch, *, attention: str) -> Contender:
    """Return a captured GPT-2 as the code of one tensor rank, with its parts of the parameters."""
    model = _gpt2(settings, attention)
    given = {**batch, "labels": batch["input_ids"]}
    captured = capture_model(model, given)
    rank, size = dist.get_rank(), dist.get_world_size()
    regions = [region for region in captured.analysis.sharding.regions if region.is_divided_by(size)]
    cuts = {shard.name: shard for region in regions for shard in region.parameters}
    ranks = TensorRanks(stage="all", position=rank, size=size, group=dist.group.WORLD, parts=cuts)
    nodes = [node.name for node in captured.op_graph.nodes]
    assert captured.op_graph.loss is not None, "a model that trains has a loss"
    sequence = captured.analysis.sharding.sequence
    sharded, added, _ = shard_graph(captured, regions, ranks, nodes, sequence=sequence)
    function = build_stage_function(sharded, [*nodes, *added], [captured.op_graph.loss])
    if function.choice is not None:
        function.choice.use(frozenset())
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own: dict[str, Tensor] = {**named, **dict(model.named_buffers(remove_duplicate=False))}
    for name, shard in cuts.items():
        own[name] = own_part(named[name].detach(), shard, rank, size).clone().requires_grad_()
    tensors = [own[name] for name in function.tensors]
    inputs = [given[key] for key in function.batch_inputs]

    def loss() -> Tensor:
        (found,) = function.call(*tensors, *inputs)
        return found

    return Contender(loss, [tensor for tensor in tensors if tensor.requires_grad])


def _gpt2(settings: Mapping[str, int], attention: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=settings["layers"],
        n_embd=settings["hidden"],
        n_head=settings["heads"],
        n_positions=settings["length"],
        vocab_size=settings["vocabulary"],
        activation_function="gelu",  # as Megatron's layers have it
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).train()


if __name__ == "__main__":
    main()
