"""One rank of `gpp bench decode`: attention over caches that all ranks hold, and over whole ones, step by step.

python -m gpp_benchmarks._decode_ranks SETTINGS_JSON
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks._ranks import rank_settings
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.integrations.deepspeed.stock_engine import join_ranks
from gpp_plugin.integrations.huggingface.sequence_cache import SequenceLayer, attention
from gpp_plugin.launch import emit_event, end_rank
from gpp_plugin.model.generation.cache_peers import CachePeers

TIMEOUT_S = 60.0
TOLERANCE = 1e-4


def main() -> None:
    """Measure on this rank; rank 0 reports."""
    settings = rank_settings()
    join_ranks()
    group = dist.new_group()
    for kv_heads in settings["kv_heads"]:
        found = _measure(settings, kv_heads, group)
        # bytes of all ranks: owners of one position are spread over them
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, found)
        if dist.get_rank() == 0:
            emit_event(
                kv_heads=kv_heads,
                elements=statistics.mean(each["elements"] for each in told),
                difference=max(each["difference"] for each in told),
                sequence_ms=statistics.median(each["sequence_ms"] for each in told),
                data_ms=statistics.median(each["data_ms"] for each in told),
            )
    dist.barrier()
    end_rank()


def _measure(settings: dict[str, Any], kv_heads: int, group: dist.ProcessGroup) -> dict[str, float]:
    number, length = dist.get_world_size(), settings["length"]
    rows = settings["batch"] // number
    peers = CachePeers(
        position=dist.get_rank(),
        number=number,
        prompts=rows,
        samples=settings["batch"],
        block=settings["block"],
        group=group,
        staging=torch.device("cpu"),
        timeout_s=TIMEOUT_S,
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    layer, module = SequenceLayer(peers), nn.Module()
    module.num_key_value_groups = settings["heads"] // kv_heads

    def states(positions: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            torch.randn(rows, heads, positions, settings["head_size"], generator=generator)
            for heads in (settings["heads"], kv_heads, kv_heads)
        )
        return q, k, v

    query, keys, values = states(length)
    mask = torch.full((length, length), torch.finfo().min).triu(1)[None, None]
    attention(module, query, *layer.update(keys, values), mask)
    sent, times, whole_times, apart = [], [], [], torch.zeros(())
    for _ in range(settings["steps"]):
        query, key, value = states(1)
        dist.barrier()
        before, start = peers.sent_bytes, time.perf_counter()
        made, _ = attention(module, query, *layer.update(key, value), None)
        times.append(time.perf_counter() - start)
        sent.append(peers.sent_bytes - before)
        start = time.perf_counter()
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        whole = nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        whole_times.append(time.perf_counter() - start)
        apart = torch.maximum(apart, (made.transpose(1, 2) - whole).abs().max())  # nan stays
    if not apart <= TOLERANCE:
        raise RuntimeFailure(f"attention over cut caches is {apart:g} apart from that over whole ones")
    return {
        "elements": statistics.mean(sent) / query.element_size(),
        "difference": float(apart),
        "sequence_ms": statistics.median(times) * 1e3,
        "data_ms": statistics.median(whole_times) * 1e3,
    }


if __name__ == "__main__":
    main()
