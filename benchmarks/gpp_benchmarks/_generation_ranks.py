"""One rank of `gpp bench decode`: generation on stages that compute for as long as they are told, one layer each.

python -m gpp_benchmarks._generation_ranks SETTINGS_JSON
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from gpp_benchmarks._ranks import rank_settings
from gpp_plugin.config.block import GenerateConfig
from gpp_plugin.config.reader import BatchSizes
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.integrations.deepspeed.stock_engine import join_ranks
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.launch import emit_event, end_rank, real_time
from gpp_plugin.model.generation.generator import GeneratedModel, Generator
from gpp_plugin.runtime.ranks.collectives import Collectives
from gpp_plugin.runtime.ranks.placement_of_ranks import JobPlacement, Setting

TIMEOUT_S = 120.0
PROMPT = 8
"""Tokens of a prompt."""


def main() -> None:
    """Generate in each way; rank 0 reports."""
    settings = rank_settings()
    join_ranks()
    group = dist.new_group()
    model = _model(dist.get_world_size())
    number, together = settings["prompts"], settings["micro_batches"]
    ids = torch.randint(3, 64, (number, PROMPT), generator=torch.Generator().manual_seed(1))
    alone, parted = (_generator(model, group, count) for count in (1, together))
    options = {"max_new_tokens": settings["tokens"], "min_new_tokens": settings["tokens"]}
    size = number // together

    def generate(generator: Generator, rows: Tensor) -> Tensor:
        made: Tensor = generator.generate(
            {"input_ids": rows, "attention_mask": torch.ones_like(rows), **options}
        )
        return made

    def in_turn() -> Tensor:
        return torch.cat([generate(alone, rows) for rows in ids.split(size)])

    plain = functools.partial(model.generate, attention_mask=torch.ones_like(ids[:1]), **options)
    # what is not emulated is measured as it is: one prompt, where nothing can overlap
    priority = real_time() if settings["real_time"] else contextlib.nullcontext()
    with real_time() if settings["real_time"] else contextlib.nullcontext():
        one_ms = _ms_a_token(lambda: generate(alone, ids[:1]), settings["tokens"])
        plain_ms = _ms_a_token(lambda: plain(ids[:1]), settings["tokens"])
    found, host_ms = {}, {}
    ways: dict[str, Callable[[], Tensor]] = {
        "one batch": lambda: generate(alone, ids),
        "one after the other": in_turn,
        "in turns": lambda: generate(parted, ids),
    }
    with _emulated(model, settings["row_ms"] / 1e3), priority:
        for way, make in ways.items():
            dist.barrier()
            start, start_host = time.perf_counter(), time.process_time()
            made = make()
            found[way] = (time.perf_counter() - start, made)
            host_s = torch.tensor(time.process_time() - start_host)
            dist.all_reduce(host_s, op=dist.ReduceOp.MAX)
            calls = 1 if way == "one batch" else together
            host_ms[way] = float(host_s) * 1e3 / (calls * settings["tokens"])
    for way, (seconds, made) in found.items():
        if not torch.equal(made, found["one batch"][1]):
            raise RuntimeFailure(f"generated {way}, the tokens are not those of one batch")
        if dist.get_rank() == 0:
            emit_event(way=way, seconds=seconds, host_ms=host_ms[way], one_ms=one_ms, plain_ms=plain_ms)
    dist.barrier()
    end_rank()


def _ms_a_token(generate: Callable[[], Any], tokens: int) -> float:
    generate()
    dist.barrier()
    start = time.perf_counter()
    generate()
    return (time.perf_counter() - start) * 1e3 / tokens


def _model(layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _generator(model: nn.Module, group: dist.ProcessGroup, micro_batches: int) -> Generator:
    """Return what generates with a layer on each rank, the embedding on the first and the head on the last."""
    # Without an engine: no capture, no optimizer, and the same generation.
    number, rank = dist.get_world_size(), dist.get_rank()
    held: list[list[str]] = [[] for _ in range(number)]
    for name, _ in model.named_parameters():
        layer = name.split(".")[2] if ".layers." in name else ("0" if "embed" in name else str(number - 1))
        held[int(layer)].append(name)
    own: Mapping[str, Tensor] = {
        name: parameter.detach() for name, parameter in model.named_parameters() if name in held[rank]
    }
    plan = PipelinePlan(
        model="emulated", graph="0" * 16, planner="by hand", mini_batch=1, loss_unit=1, edges=(),
        stages=tuple(
            Stage(name=f"s{i}", blocks=(f"b{i}",), ranks=(i,), micro_batch_size=1, in_flight=1)
            for i in range(number)
        ),
    )  # fmt: skip
    setting = Setting(
        rank=rank, num_ranks=number, device=torch.device("cpu"), dtype=torch.float32,
        sizes=BatchSizes(1, 1, None), zero_stage=0, optimizer_bytes=0.0, group=group,
        placement=JobPlacement.on_one_host(number, rank=rank),
    )  # fmt: skip
    return Generator(
        GeneratedModel(
            module=model,
            held=held,
            names={},
            live=lambda: own,
            buffers=lambda: dict(model.named_buffers(remove_duplicate=False)),
        ),
        plan=plan,
        config=GenerateConfig(micro_batches=micro_batches),
        setting=setting,
        collectives=Collectives(group=group, who=f"rank {rank}", timeout_s=TIMEOUT_S),
        free_bytes=lambda: None,
    )


@contextlib.contextmanager
def _emulated(model: Any, row_s: float) -> Iterator[None]:
    """Let each layer take a time for every sequence, on the rank that computes it: elsewhere it sees no values."""

    def compute(module: nn.Module, args: Any) -> None:
        if type(args[0]) is Tensor:
            time.sleep(row_s * args[0].shape[0])

    hooks = [layer.input_layernorm.register_forward_pre_hook(compute) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


if __name__ == "__main__":
    main()
