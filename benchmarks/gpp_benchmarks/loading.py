"""How much memory each rank has while a model on the meta device is loaded from sharded safetensors, over its share.

Writes a Llama of random bfloat16 weights, a shard of at most ``--shard-mb`` at a time. Ranks started here build it on
the meta device, plan it in as many stages, load, and train a step. All but one norm is frozen, so that no optimizer
state hides what loading takes. ``over share`` is the most memory that a rank had while it loaded, over what it had
before, in its own weights. Loading lasts from the first tensor read until `deepspeed.initialize` returns. At most
`MOST_OVER_SHARE`, or it fails. ``over imports`` counts from the end of the imports: capture and plan, too. Written
weights stay with ``--keep``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gpp_benchmarks._options import add_option
from gpp_benchmarks._ranks import bench_ranks
from gpp_plugin.errors import ConfigError, RuntimeFailure
from gpp_plugin.launch import require_modules

SIZES = {
    "50m": {"hidden": 512, "layers": 12, "vocabulary": 8192},
    "500m": {"hidden": 1536, "layers": 16, "vocabulary": 8192},
    "3b": {"hidden": 3072, "layers": 25, "vocabulary": 32000},
}
"""Models by their number of parameters, about."""

MOST_OVER_SHARE = 1.2
SLACK_MB = 64.0
"""What a process takes besides weights in a measurement: allocator, threads, DeepSpeed's modules."""

INDEX = "model.safetensors.index.json"
MOST_SECONDS = 1500.0
TABLE = ()
"""The table that is printed has every column (`gpp_plugin.report.rows_text`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_option(parser, "--model", "50m", "parameters, about", choices=SIZES)
    add_option(parser, "--ranks", 2, "processes, a stage each")
    add_option(parser, "--shard-mb", 1000.0, "largest file")
    parser.add_argument("--keep", type=Path, help="folder for the weights; those that are there are taken")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a rank.

    Raises:
        RuntimeFailure: a rank had more than its share allows.
    """
    if args.ranks < 2 or args.shard_mb <= 0:
        raise ConfigError(
            f"--ranks {args.ranks}, --shard-mb {args.shard_mb:g}: give at least 2 ranks and more than 0 MB"
        )
    require_modules("transformers")
    settings = {**SIZES[args.model], "ranks": args.ranks, "timeout_s": MOST_SECONDS}
    if args.keep is not None:
        return {"rows": _load_from(args.keep, settings, args.shard_mb)}
    with tempfile.TemporaryDirectory(prefix="gpp_weights_") as folder:
        return {"rows": _load_from(Path(folder), settings, args.shard_mb)}


def _load_from(folder: Path, settings: dict[str, Any], shard_mb: float) -> list[dict[str, Any]]:
    if not (folder / INDEX).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_weights(folder, settings, shard_mb=shard_mb)
    settings, num_ranks = {**settings, "weights": str(folder)}, settings["ranks"]
    (event,) = bench_ranks("_loading_ranks", settings, num_ranks=num_ranks, timeout_s=MOST_SECONDS)
    rows = [_row(rank, each) for rank, each in enumerate(event["found"])]
    for row in rows:
        taken, share = row["peak_mb"] - row["before_load_mb"], row["stage_mb"]
        if taken > MOST_OVER_SHARE * share + SLACK_MB:
            raise RuntimeFailure(
                f"rank {row['rank']} took {taken:.0f} MB to load {share:.0f} MB of weights; "
                f"at most {MOST_OVER_SHARE} x and {SLACK_MB:g} MB are right"
            )
    return rows


def _row(rank: int, found: dict[str, Any]) -> dict[str, Any]:
    share = found["stage_mb"]
    return {
        "rank": rank,
        **found,
        "over_share": (found["peak_mb"] - found["before_load_mb"]) / share,
        "over_imports": (found["peak_mb"] - found["imported_mb"]) / share,
    }


def write_weights(folder: Path, settings: dict[str, Any], *, shard_mb: float) -> int:
    """Write a checkpoint of random weights in shards, as `save_pretrained` would; return its bytes.

    One shard is in memory at a time. Each tensor is drawn from a seed of its own.

    Args:
        settings: of `SIZES`.
        shard_mb: MB of a file at most, of one tensor where that alone is more.

    Raises:
        ConfigError: the disk has less room.
    """
    import torch
    from safetensors.torch import save_file

    from gpp_benchmarks._loading_ranks import DTYPE, meta_llama

    shapes = {name: tuple(p.shape) for name, p in meta_llama(settings).named_parameters()}
    sizes = {name: torch.Size(shape).numel() * DTYPE.itemsize for name, shape in shapes.items()}
    free = shutil.disk_usage(folder).free
    if free < 1.1 * sum(sizes.values()):
        raise ConfigError(
            f"{folder} has {free / 1e9:.1f} GB free, the weights are {sum(sizes.values()) / 1e9:.1f} GB; "
            "name another folder with --keep, or a smaller --model"
        )
    shards: list[list[str]] = [[]]
    for name in shapes:
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + sizes[name] > shard_mb * 1e6:
            shards.append([])
        shards[-1].append(name)
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        where |= dict.fromkeys(names, file)
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            generator = torch.Generator().manual_seed(len(tensors) + 1000 * number)
            value = torch.empty(shapes[name], dtype=DTYPE)
            is_norm = len(shapes[name]) == 1
            tensors[name] = value.fill_(1) if is_norm else value.normal_(std=0.02, generator=generator)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return sum(sizes.values())
