"""What captured code costs against eager modules: time of a step and bytes saved for backward, on twelve families.

Each model is one stage on one core, without padding and, where it takes a mask, with padding on the left. Code and
eager modules alternate within a run, forward and backward of the same batch, in processor time, which other processes
do not lengthen; the ratio is the median over pairs of steps side by side. Saved bytes are those of the storages that
autograd keeps, without parameters, buffers and inputs. `masked` is the code with all masks, as it runs
for padded batches, on the batch without padding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpp_benchmarks._attention_calls import WholeStage, eager_loss, recorded_attention
from gpp_benchmarks._attention_models import FAMILIES, HEADS, Size, build_family
from gpp_plugin.capture.export import capture_model
from gpp_plugin.errors import ConfigError

Step = Callable[[], Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="models (all twelve)"
    )
    parser.add_argument("--width", type=int, default=256, help="of the layers (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of each tower (%(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a text (%(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="of a batch (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a family and padding."""
    if min(args.width, args.layers, args.samples, args.repeats) < 1 or args.length < 16 or args.width % HEADS:
        raise ConfigError(
            f"--width {args.width} --layers {args.layers} --length {args.length} --samples {args.samples} --repeats "
            f"{args.repeats}: give at least 1 of each, 16 tokens, and a width that {HEADS} heads divide"
        )
    size = Size(width=args.width, layers=args.layers, length=args.length, samples=args.samples)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for name in args.families for row in _measure_family(name, size, args.repeats)]
    finally:
        torch.set_num_threads(threads)
    return {"rows": rows}


def _measure_family(name: str, size: Size, repeats: int) -> list[dict[str, Any]]:
    rows = []
    model, make_batch = build_family(name, size)
    stage = WholeStage(capture_model(model, make_batch("none")), model)
    for padding in ("none", "left") if FAMILIES[name].is_padded else ("none",):
        row = {"family": name, "padding": padding, **_measure(model, stage, make_batch(padding), repeats)}
        rows.append(row)
        masked = (
            f"; masked {row['masked_ms']:8.1f} ms, {row['masked_saved_bytes'] / 2**20:7.2f} MiB"
            if "masked_ms" in row
            else ""
        )
        print(
            f"{name:<11} {padding:<5} eager {row['eager_ms']:8.1f} ms, {row['eager_saved_bytes'] / 2**20:7.2f} MiB; "
            f"code {row['code_ms']:8.1f} ms ({row['time_ratio']:.3f}), {row['code_saved_bytes'] / 2**20:7.2f} MiB "
            f"({row['saved_ratio']:.3f}){masked}{'' if row['is_called_alike'] else '; other calls'}",
            flush=True,
        )
    return rows


def _measure(model: nn.Module, stage: WholeStage, batch: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    eager = eager_loss(model)

    def run_eager() -> Tensor:
        return eager(batch)

    def run_code() -> Tensor:
        stage.look_at(batch)
        return stage(batch)

    def run_masked() -> Tensor:
        assert stage.function.choice is not None
        stage.function.choice.use(())
        return stage(batch)

    steps: dict[str, Step] = {"eager": run_eager, "code": run_code}
    stage.look_at(batch)
    choice = stage.function.choice
    if choice is not None and choice.module is not stage.function.module:
        steps["masked"] = run_masked
    calls = []
    for step in (run_eager, run_code):
        with recorded_attention() as found:
            step()
        calls.append(found)
    known = [*model.parameters(), *model.buffers(), *(v for v in batch.values() if isinstance(v, Tensor))]
    row: dict[str, Any] = {f"{kind}_saved_bytes": _saved_bytes(step, known) for kind, step in steps.items()}
    times = _times(steps, model, repeats)
    row |= {f"{kind}_ms": statistics.median(found) for kind, found in times.items()}
    row["time_ratio"] = statistics.median(
        own / other for own, other in zip(times["code"], times["eager"], strict=True)
    )
    row["saved_ratio"] = row["code_saved_bytes"] / row["eager_saved_bytes"]
    row["is_called_alike"] = calls[0] == calls[1]
    return row


def _saved_bytes(step: Step, known: list[Tensor]) -> int:
    """Return the bytes of the storages that autograd keeps of a forward, but for those that are there anyway."""
    there = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(kept.values())


def _times(steps: Mapping[str, Step], model: nn.Module, repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each step with its backward, after one that counts for nothing."""
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for repeat in range(repeats + 1):
        # whoever comes first finds other caches: the order turns around with each repeat
        for kind in steps if repeat % 2 else reversed(list(steps)):
            model.zero_grad()
            start = time.process_time()
            steps[kind]().backward()
            if repeat:
                times[kind].append(1e3 * (time.process_time() - start))
    return times
