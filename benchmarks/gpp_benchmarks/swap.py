"""What swapping costs on one CUDA device: a transformer at twice the batch that its memory holds otherwise.

A GPT-2 is trained in one process, as one stage, three times. The first is plain, at the batch that fills the memory it
may use. The others have twice that batch in the same memory, with tensors swapped to pinned host memory or with full
recompute. Swapping should cost at most 1.3 times the plain time per sample, and less than recompute does.

--device cpu runs the same code on a CPU, where "host memory" is the same memory: it shows that what is planned
happens, and says nothing of the cost on a device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from gpp_benchmarks._ranks import start_engine
from gpp_plugin.errors import ConfigError, DeviceMissing

MOST_SLOWDOWN = 1.3
MARGIN = 1.05
"""Memory allowed over the plain prediction: what caching allocators round up to."""
SIZES = {"cuda": (12, 1024, 512, 8), "cpu": (6, 64, 16, 4)}
"""Layers, width, tokens and plain batch."""
RUNS = {
    "plain": {"recompute": "off", "swap": "off"},
    "swap": {"recompute": "off", "swap": "auto"},
    "recompute": {"recompute": "full", "swap": "off"},
}


TABLE = (
    *("run", "batch", "ms_per_sample", "predicted_bytes", "measured_bytes", "limit_bytes", "swapped_bytes"),
    "recomputed_bytes",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(%(default)s)")
    parser.add_argument("--layers", type=int, help="of the model (12; on a CPU 6)")
    parser.add_argument("--hidden", type=int, help="width, a multiple of 64 (1024; on a CPU 64)")
    parser.add_argument("--length", type=int, help="tokens of a text (512; on a CPU 16)")
    parser.add_argument(
        "--batch", type=int, help="samples that fill the memory without swapping (8; on a CPU 4)"
    )
    parser.add_argument("--steps", type=int, default=10, help="timed ones, after 2 others (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each run, and the costs of swapping over plain and over recompute.

    Raises:
        DeviceMissing: a CUDA device is asked for, and there is none.
    """
    if args.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise DeviceMissing(
            "bench swap needs a CUDA device and finds none; --device cpu runs it without timing it"
        )
    given = (args.layers, args.hidden, args.length, args.batch)
    sizes = tuple(value or usual for value, usual in zip(given, SIZES[args.device], strict=True))
    if args.steps < 1 or min(sizes) < 1 or sizes[1] % 64:
        raise ConfigError(f"sizes {sizes}, --steps {args.steps}: give positive numbers, and a width in 64s")
    rows: list[dict[str, Any]] = []
    limit_gb: float | None = None
    for name in RUNS:
        batch = sizes[3] if name == "plain" else 2 * sizes[3]
        row = _train(name, sizes, batch, limit_gb if name == "swap" else None, args)
        if name == "plain":
            limit_gb = row["predicted_bytes"] * MARGIN / 1e9
        rows.append({**row, "limit_bytes": round((limit_gb or 0.0) * 1e9)})
        print(f"{name}: {row['ms_per_sample']:.3f} ms a sample", flush=True)
    return _verdict(rows, args.device)


def _train(
    name: str, sizes: tuple[int, ...], batch: int, limit_gb: float | None, args: argparse.Namespace
) -> dict[str, Any]:
    import torch

    from gpp_plugin.integrations.huggingface.hf_models import build_model_of, config_of, make_example_batch

    layers, hidden, length, _ = sizes
    torch.manual_seed(0)
    shape = {"n_embd": hidden, "n_layer": layers, "n_head": hidden // 64, "n_positions": length}
    plain = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 2 * hidden, **shape}
    model = build_model_of(config_of({**plain, "bos_token_id": 1, "eos_token_id": 2}, "gpp bench swap"))
    sample = make_example_batch(model, num_samples=batch, length=length)
    memory = RUNS[name] if limit_gb is None else {**RUNS[name], "limit_gb": limit_gb}
    config = {
        "train_batch_size": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": args.device == "cuda"},
        "graph_pipeline": {"stages": 1, "memory": memory},
    }
    engine = start_engine(model, sample, config)
    times = []
    for step in range(2 + args.steps):
        start = time.perf_counter()
        float(engine.train_batch(data_iter=iter([sample])))  # reads the loss: waits for the device
        times += [time.perf_counter() - start] if step >= 2 else []
    report = engine.memory_report()
    engine.destroy()
    rank = report.ranks[0]
    return {
        "run": name,
        "device": args.device,
        "batch": batch,
        "ms_per_sample": statistics.median(times) / batch * 1e3,
        "predicted_bytes": rank.predicted_peak_bytes,
        "measured_bytes": rank.measured_peak_bytes,
        "measure": report.measure,
        "swapped_bytes": rank.counts.swapped_bytes if rank.counts is not None else 0,
        "recomputed_bytes": rank.counts.recomputed_bytes if rank.counts is not None else 0,
        "differences": list(report.differences),
    }


def _verdict(rows: list[dict[str, Any]], device: str) -> dict[str, Any]:
    plain, swap, recompute = (row["ms_per_sample"] for row in rows)
    as_planned = not any(row["differences"] for row in rows) and rows[1]["swapped_bytes"] > 0
    result = {"rows": rows, "swap_over_plain": swap / plain, "recompute_over_plain": recompute / plain}
    if device == "cpu":
        print("\na functional run on a CPU: what is planned happens; the times say nothing of a device")
        return {**result, "is_functional_only": True, "ok": as_planned}
    print(
        f"\nswapping costs {swap / plain:.2f} x the plain time a sample, full recompute {recompute / plain:.2f} x"
    )
    is_cheap = swap / plain <= MOST_SLOWDOWN and swap < recompute
    return {**result, "is_functional_only": False, "ok": as_planned and is_cheap}
